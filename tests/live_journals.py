"""Journals as an engine on the paper broker writes them, made without one.

A decision engine with its simulated account is the venue; a second one decides by what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.data.stream import BarSet
from echelon.live.journal import Journal, encode_bars
from echelon.live.limits import StoppedOrder
from echelon.serving.bundle import Bundle
from echelon.serving.decision import Decision
from echelon.serving.engine import Account, DecisionEngine
from echelon.serving.state_file import encode_state
from echelon.states import with_prefix


def write_journal(
    path: Path,
    bundle: Bundle,
    venue: DecisionEngine,
    decider: DecisionEngine,
    sets: Sequence[BarSet],
    *,
    broker: str = "paper",
    stop: Mapping[int, str] | None = None,
) -> Journal:
    """The journal of these bar sets. stop: number of a set → code that stops its first order"""
    symbols = list(bundle.symbols)
    about = {"bundle": bundle.id, "broker": broker, "symbols": symbols}
    journal = Journal.open(path, {**about, "policy": bundle.manifest["policy"]}, sync=False)
    parts, facts = decider.state()
    live: dict[str, Any] = {"engine": facts, "gate": {}, "live": _STATE}
    journal.snapshot(encode_state(with_prefix("engine.", parts), live))
    journal.commit()
    sent: dict[str, str] = {}
    for k, bars in enumerate(sets):
        done = venue.push(bars)
        venue.complete()
        account = Account(done.cash, _held(symbols, done))
        decision = decider.push(bars, account)
        decider.complete()
        _write_fills(journal, done, sent, k)
        body, data = encode_bars(bars)
        more = {
            "offsets": {"store": k + 1},
            "seen": {"store": k},
            "received": "2026-01-01T00:00:00+00:00",
        }
        journal.append("bars", {**body, **more}, data)
        journal.append("account", account._asdict())
        journal.append("decision", decision.to_dict())
        sent = _write_orders(journal, decision, (stop or {}).get(k))
        journal.commit()
    return journal


_STATE: dict[str, Any] = {
    "mode": "running",
    "why": "",
    "time": "",
    "bars": 0,
    "risk": {
        **{"session": "", "before": 0.0, "equity": 0.0, "peak": 0.0, "traded": 0.0, "recent": []}
    },
}


def _held(symbols: Sequence[str], decision: Decision) -> dict[str, float]:
    pairs = zip(symbols, decision.shares.tolist(), strict=True)
    return {symbol: shares for symbol, shares in pairs if shares}


def _write_fills(journal: Journal, done: Decision, sent: Mapping[str, str], k: int) -> None:
    """What became of the orders before: statuses, and the fills."""
    fills, ended = [], []
    for fill in done.fills:
        order = sent.get(fill.symbol)
        if order is None:
            continue
        state = "filled" if fill.shares else "cancelled"
        ended.append({"id": order, "state": state, "filled": abs(fill.shares)})
        ended[-1]["reason"] = fill.not_filled
        if fill.shares:
            trade = {"trade_id": f"{order}-{k}", "order_id": order, "symbol": fill.symbol}
            trade |= {"shares": fill.shares, "price": fill.price, "commission": fill.cost}
            fills.append({**trade, "stamp": 0.0, "slippage": 0.0, "time": str(done.time)})
    for status in ended:
        journal.append("status", status)
    if fills:
        journal.append("fills", {"fills": fills, "cursor": str(k)})


def _write_orders(journal: Journal, decision: Decision, code: str | None) -> dict[str, str]:
    """The intents of a decision; symbol → id."""
    ids = {}
    shares, spend = decision.wanted.shares[0].tolist(), decision.wanted.spend[0].tolist()
    tried = {order.symbol: order for order in decision.orders}
    for symbol, wanted, money in zip(decision.symbols, shares, spend, strict=True):
        if symbol not in tried:
            continue
        body = {**tried[symbol]._asdict(), "wanted": wanted, "spend": money}
        body |= {"id": f"{decision.time}-{symbol}", "bar": str(decision.time)}
        if code is not None:
            stopped = StoppedOrder(tried[symbol], code)  # type: ignore[arg-type]
            journal.append("stopped", {**body, "code": stopped.code})
            code = None
            continue
        journal.append("order", {**body, "seconds": 0.0})
        journal.append(
            "status", {"id": body["id"], "state": "accepted", "filled": 0.0, "reason": None}
        )
        ids[symbol] = body["id"]
    return ids
