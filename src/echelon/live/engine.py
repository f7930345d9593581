"""The live engine: bars in, orders out, exactly once, whatever dies.

    feed ─► gate ─► step ─► risk gate ─► journal ─► broker ─► journal

A step, for each bar set that the gate lets pass:

1. The bars and the feed's offsets are committed: whatever dies, these bars are decided on.
2. The venue says what became of the orders before: fills, statuses, what is held. A paper venue is
   shown the bars first, which fill them.
3. `DecisionEngine.push` decides, by the functions of the backtest. The guards look at the bar
   (`guards`), and by configuration warn, let orders only reduce, or halt.
4. The risk gate passes or stops each order.
5. Fills, account, decision and orders are committed together. Only then is anything sent.
6. The orders are sent; what the venue answers is an entry of the next commit. Without an answer an
   order is unknown until the venue says what became of it, and is never decided again.

Everything that the engine knows follows from the journal (`LiveState.apply`), so starting is
recovering: the last snapshot, the entries behind it, then the venue is asked about every order that
is not final, and gets those that it never got. An order's id follows from bundle, bar, symbol and
number: a venue that has it refuses a second. Where venue and journal differ, the engine halts and
says how.

A halted engine goes on reading, deciding and writing down; it sends nothing. Wall-clock times are
written down and not used again; waiting is measured by the monotonic clock.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from zoneinfo import ZoneInfo

import numpy as np

from echelon.config.live import LiveConfig
from echelon.data.calendars import FROM_DATA, ROUND_THE_CLOCK, hours
from echelon.data.derive import PanelKind
from echelon.data.stream import BarSet, StreamState
from echelon.errors import DamagedError, EchelonError, UsageError
from echelon.files import Closing, blaming
from echelon.live.brokers import (
    OPEN,
    Broker,
    BrokerError,
    OrderRequest,
    OrderStatus,
    OwnSymbols,
    SimulatedVenue,
    VenueFill,
    account_of,
)
from echelon.live.feeds import Feed
from echelon.live.gate import Gate, Halt
from echelon.live.guards import Guards
from echelon.live.journal import Entry, Journal, decode_bars, encode_bars
from echelon.live.limits import (
    Mode,
    RiskRecord,
    Situation,
    StoppedOrder,
    breached_limits,
    order_value,
    pass_orders,
)
from echelon.serving.bundle import Bundle
from echelon.serving.decision import Decision
from echelon.serving.engine import Account, DecisionEngine
from echelon.serving.state_file import decode_state, encode_state
from echelon.states import below_prefix, with_prefix

log = logging.getLogger(__name__)

T = TypeVar("T")
MODES: Mapping[str, Mode] = {"halt": "halted", "resume": "running", "reduce-only": "reduce_only"}
COMMANDS = (*MODES, "flatten", "reconcile")
_IDLE_SECONDS = 0.2
_ASK_SECONDS = 5.0
"""Between two looks at a real venue's fills while no bar comes."""
_OVERDRAFT = 0.05
"""Share of the equity that cash may be below zero, after a gap at the open, without a halt."""
_FIT_SECONDS = 5.0
"""That a venue's fills and positions may take to fit each other."""
_REMEMBERED = 3
"""Bar sets for which an order is known behind its end: its fills may be listed later."""
_SAME = 1e-6
"""Relative difference of positions that is rounding; a thousand times it of the equity, of cash."""
_REMEDY = "Run `echelon live journal verify`; start from a backup of the journal, or a new one."


class Clock(NamedTuple):
    """Wall clock, timezone-aware; and the monotonic one, in seconds."""

    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    monotonic: Callable[[], float] = time.monotonic


@dataclass
class LiveState:
    """What the engine knows beside the decision engine and the gate; all of it JSON."""

    mode: Mode = "running"
    why: str = ""  # it is not running
    time: str = ""  # of the last bar set
    bars: int = 0
    offsets: dict[str, int] = field(default_factory=dict)  # of the feed, to be read next
    seen: dict[str, int] = field(default_factory=dict)  # of the feed, never looked at
    refused_to: dict[str, int] = field(default_factory=dict)  # last offset with a refusal
    cursor: str = ""  # of the venue's fills
    account: dict[str, Any] = field(default_factory=dict)
    in_charge: dict[str, Any] | None = None  # of a hierarchy
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)  # those that are not final
    ended: dict[str, int] = field(default_factory=dict)  # orders that became final → at which bar
    surplus: dict[str, float] = field(default_factory=dict)  # shares of differences, not settled
    risk: RiskRecord = field(default_factory=RiskRecord)
    counts: dict[str, int] = field(default_factory=dict)  # of entries, by kind

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "risk": vars(self.risk)}

    def summary(self) -> dict[str, Any]:
        """What an operator looks at, in copies."""
        return {
            **{name: getattr(self, name) for name in ("mode", "why", "time", "bars", "in_charge")},
            "equity": self.risk.equity,
            "drawdown": 1.0 - self.risk.equity / self.risk.peak if self.risk.peak else 0.0,
            "turnover": self.risk.traded / self.risk.equity if self.risk.equity else 0.0,
            "account": dict(self.account),
            "orders": [dict(order) for order in self.orders.values()],
            "counts": dict(self.counts),
        }

    def apply(self, kind: str, body: Mapping[str, Any]) -> None:
        """What an entry of the journal changes; nothing else does."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "bars":
            self.time, self.bars = body["time"], self.bars + 1
            self.offsets, self.seen = dict(body["offsets"]), dict(body["seen"])
            self.ended = {k: at for k, at in self.ended.items() if at > self.bars - _REMEMBERED}
        elif kind == "refused":
            known = self.refused_to.get(body["source"], -1)
            if body["offset"] > known:
                self.refused_to[body["source"]] = body["offset"]
        elif kind == "fills":
            self.cursor = body["cursor"]
        elif kind == "account":
            self.account = dict(body)
        elif kind == "decision":
            self.risk.note_equity(body["time"][:10], body["account"]["equity"])
            self.in_charge = body["in_charge"]
        elif kind == "order":
            self.orders[body["id"]] = {**body, "state": "intent", "filled": 0.0}
            self.risk.note_order(order_value(_request_of(body)), body["seconds"])
        elif kind == "status" and body["id"] in self.orders:
            self.orders[body["id"]].update(body)
            if body["state"] not in OPEN:
                del self.orders[body["id"]]
                self.ended[body["id"]] = self.bars
        elif kind == "difference":
            for symbol, shares in body.get("surplus", {}).items():
                self.surplus[symbol] = self.surplus.get(symbol, 0.0) + shares
        elif kind == "guard" and body.get("action") == "reduce" and self.mode == "running":
            self.mode, self.why = "reduce_only", f"{body['guard']}: {body['detail']}"
        elif kind == "halt":
            self.mode, self.why = "halted", f"{body['reason']}: {body['detail']}"
        elif kind == "command" and body["name"] in MODES:
            self.mode = MODES[body["name"]]
            if self.mode == "running":
                self.surplus = {}
            self.why = "" if self.mode == "running" else f"command of {body['by'] or 'operator'}"

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> LiveState:
        return cls(**{**tree, "risk": RiskRecord.from_dict(tree["risk"])})


class Command(NamedTuple):
    """What an operator asks for. name: of `COMMANDS`; by: who says so"""

    name: str
    by: str = ""
    adopt: bool = False  # of reconcile: take what the venue says
    undo: bool = False  # of reconcile: send what brings the venue back


class Watcher(Protocol):
    """Who looks on: metrics, alerts. It must not wait for anything; see `LiveEngine.watchers`."""

    def watch(self, engine: LiveEngine, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """entries: (kind, body) of what was committed since the last call, in order; may be none

        Called by the engine's own thread once a bar's orders are out, while no bar comes, while the
        venue is waited for, and when `run` starts.
        """


class LiveEngine(Closing):
    """Runs a bundle on a feed and a broker; see the module's text."""

    def __init__(
        self,
        decider: DecisionEngine,
        gate: Gate,
        journal: Journal,
        feed: Feed,
        broker: Broker,
        config: LiveConfig,
        clock: Clock | None = None,
    ) -> None:
        """Use `open`."""
        self.decider, self.gate, self.journal = decider, gate, journal
        self.feed, self.broker, self.config = feed, broker, config
        self.clock = clock or Clock()
        self.state = LiveState()
        self.guards = Guards(decider.bundle)
        self.decision: Decision | None = None
        self.latency: float | None = None  # seconds from the complete bar set to the sent orders
        self.commands: queue.SimpleQueue[tuple[Command, Future[dict[str, Any]]]] = (
            queue.SimpleQueue()
        )
        self._put_off: list[tuple[Command, Future[dict[str, Any]]]] = []
        self.watchers: list[Watcher] = []
        self.errors: Counter[str] = Counter()  # that trading went on behind, by kind
        self._written: list[tuple[str, Mapping[str, Any]]] = []  # entries not committed yet
        self._committed: list[tuple[str, Mapping[str, Any]]] = []  # and not shown yet
        self._venue = broker if isinstance(broker, SimulatedVenue) else None
        self.trouble = ""  # why the venue does not answer
        self.published = self.status()  # as of the last step; other threads may look
        self._unknown_since: float | None = None
        self._symbols = OwnSymbols(broker.name, decider.symbols)
        self._undecided: BarSet | None = None  # the engine died behind them
        self._asked = 0.0
        self._stop: Callable[[], bool] = lambda: False

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        store: Path,
        journal: Path,
        feed: Feed,
        broker: Broker,
        config: LiveConfig,
        *,
        until: Any = None,  # noqa: ANN401 (a date, or None)
        clock: Clock | None = None,
    ) -> LiveEngine:
        """The engine of a journal: recovered from it, or behind the store's history.

        until: last day of the history that a new journal starts behind; None: the store's last
        """
        if bundle.config.market.fill != "open":
            raise UsageError(
                f"{bundle.path}: its market.fill is {bundle.config.market.fill!r}: decided and "
                "filled at the same close, which no venue can do. Train with market.fill=open."
            )
        about = {"bundle": bundle.id, "broker": broker.name, "symbols": list(bundle.symbols)}
        about["policy"] = bundle.manifest["policy"]
        opened = Journal.open(journal, about, sync=config.sync)
        try:
            last = opened.last_snapshot()
            if last is None:
                decider = DecisionEngine.from_store(bundle, store, until=until)
                gate = Gate.from_engine(decider, config.gate, live=feed.live)
                engine = cls(decider, gate, opened, feed, broker, config, clock)
                engine._arm_guards()
                engine._snapshot()
                engine._commit()
            else:
                # Whoever can write the file can make a chain that holds: see `journal`.
                with blaming(journal, _REMEDY):
                    seq, data = last
                    parts, facts = decode_state(data, journal, _REMEDY)
                    below = below_prefix("engine.", parts)
                    decider = DecisionEngine.from_state(bundle, below, facts["engine"], journal)
                    gate = Gate.from_engine(decider, config.gate, live=feed.live)
                    gate.restore(StreamState(below_prefix("gate.", parts), facts["gate"]))
                    engine = cls(decider, gate, opened, feed, broker, config, clock)
                    engine.state = LiveState.from_dict(facts["live"])
                    engine.guards.restore(below_prefix("guards.", parts), facts.get("guards", {}))
                    engine._replay(opened.entries(seq))
                engine._record("recovered", {"snapshot": seq, "time": engine.state.time})
                engine._arm_guards()
                engine._commit()
        except BaseException:
            opened.close()
            raise
        return engine

    def close(self) -> None:
        self.feed.close()
        self.broker.close()
        self.journal.close()

    def run(self, stop: Callable[[], bool] = lambda: False, *, bars: int | None = None) -> None:
        """Run until the feed ends, `stop` says so, or so many bar sets are done."""
        self._stop = stop
        self._show_watchers()
        self.reconcile()
        state = self.state
        self.gate.resume(state.offsets, state.seen, state.refused_to)
        self.gate.why_early = self._why_early
        if self._undecided is not None:
            self._decide(self._undecided, self.clock.wall())
            self.decider.complete()
        self.feed.start(state.offsets, self.decider.time)
        last = None if bars is None else self.state.bars + bars
        while not stop() and (last is None or self.state.bars < last):
            self._obey()
            self.feed.hold(self.gate.ahead())
            messages = self.feed.poll(_IDLE_SECONDS)
            self.gate.take(messages, self.clock.monotonic(), self.feed.sources)
            idle = True
            for item in self.gate.ready(self.clock.monotonic(), ended=self.feed.ended):
                idle = False
                if isinstance(item, Halt):
                    self.halt(item.reason, item.detail)
                else:
                    self.step(item)
                if stop() or (last is not None and self.state.bars >= last):
                    break
            if idle:
                self._rest()
                if self.feed.ended and not messages:
                    break
        self._rest()

    def step(self, bars: BarSet) -> None:
        """One bar set: see the module's text."""
        began = self.clock.monotonic()
        bars = self.decider.with_series(bars)
        self._drain_refusals()
        body, data = encode_bars(bars)
        gate = self.gate
        source = {"offsets": gate.offsets, "seen": gate.seen, "doubted": gate.doubted}
        received = self.clock.wall()
        self._record("bars", {**body, **source, "received": received.isoformat()}, data)
        self._commit()
        self._decide(bars, received)
        self.latency = self.clock.monotonic() - began
        self.decider.complete()
        if self.state.bars % self.config.snapshot_every == 0:
            self._snapshot()
        self._show_watchers()

    def _decide(self, bars: BarSet, received: datetime) -> None:
        """What follows from bars that are in the journal."""
        self._resolve()
        if self._venue is not None:
            fills, account, statuses, cursor = self._ask(self._venue.show_bars, bars)
        else:
            self._finish_orders()
            (fills, cursor, account), statuses = self._ask_books(), []
        decision = self.decider.push(bars, holdable(account))
        self._take_answers(statuses)
        if self._venue is None:
            self._compare(account, fills)
        if fills:
            listed = [fill._asdict() for fill in fills]
            self._record("fills", {"fills": listed, "cursor": cursor})
        self._record("account", account._asdict())
        body = decision.to_dict()
        self._record("decision", body)
        self._look(body)
        for breach in breached_limits(self.config.limits, self.state.risk):
            self._record("halt", {"reason": "limit", "detail": breach})
        orders = self._write_orders(decision, account, received)
        self._commit()
        self.decision, self._undecided = decision, None
        self._send(orders)

    def _arm_guards(self) -> None:
        if self.guards.bundle.guards is None:
            log.warning(
                "%s was exported before bundles knew their training data: its guards are off. "
                "Export the run again to have them.",
                self.guards.bundle.path,
            )
        elif (settings := self.guards.new_settings(self.config)) is not None:
            self._record("guard", settings)

    def _look(self, decision: Mapping[str, Any]) -> None:
        """Let the guards look at the bar of a decision, and do what their alarms ask for."""
        for body in self.guards.check(self.decider, decision, self.state.mode):
            self._record("guard", body)
            if body["event"] == "alarm":
                log.warning("%s: %s: %s", body["guard"], body["name"], body["detail"])
                if body["action"] == "halt" and self.state.mode != "halted":
                    detail = f"{body['name']}: {body['detail']}"
                    self._record("halt", {"reason": body["guard"], "detail": detail})

    def halt(self, reason: str, detail: str) -> None:
        """Send nothing from now on, until an operator resumes."""
        log.warning("halted: %s: %s", reason, detail)
        self._drain_refusals()
        self._record("halt", {"reason": reason, "detail": detail[:2_000]})
        self._commit()
        self.published = self.status()

    def reconcile(self) -> list[str]:
        """Bring orders in flight to an end, and compare the venue with the journal."""
        self._resolve()
        if self._venue is not None and (self._undecided is not None or not self.state.account):
            return []  # the venue may be these bars ahead, or new as the journal is
        fills, cursor, account = self._ask_books()
        differences = self._compare(account, fills)
        if not self.state.account:
            fills = []  # what was traded before this journal is not its own
        if fills or not self.state.account:
            self._record("fills", {"fills": [f._asdict() for f in fills], "cursor": cursor})
        if fills or (differences and self._venue is None):
            self._record("account", account._asdict())
        self._commit()
        return differences

    def status(self) -> dict[str, Any]:
        """What is going on, in copies, for whoever looks."""
        return {
            **self.state.summary(),
            "policy": self.decider.bundle.manifest["policy"],
            "broker": self.broker.name,
            "latency": self.latency,
            "trouble": self.trouble,
            "entries": self.journal.seq,
        }

    # Orders.

    def _write_orders(
        self, decision: Decision, account: Account, received: datetime
    ) -> list[OrderRequest]:
        """The orders of a decision that pass the risk gate, written down as intents."""
        close = self._closes()
        seconds, barred = self._look_at_clock(decision.time, received)
        now = Situation(self.state.mode, decision.equity, account, close, seconds, barred)
        wanted = self._requests(decision, close)
        passed, stopped = pass_orders(self.config.limits, self.state.risk, wanted, now)
        self._write_intents(passed, stopped, decision.time, seconds)
        return passed

    def _write_intents(
        self,
        passed: Sequence[OrderRequest],
        stopped: Sequence[StoppedOrder],
        bar: np.datetime64,
        seconds: float,
        by: str | None = None,
    ) -> None:
        """by: the command that an order is of; None: the decision's"""
        for order in passed:
            body = {**order._asdict(), "bar": str(bar), "seconds": seconds}
            self._record("order", body if by is None else {**body, "by": by})
        for order, code in stopped:
            self._record("stopped", {**order._asdict(), "bar": str(bar), "code": code})

    def _requests(self, decision: Decision, close: Mapping[str, float]) -> list[OrderRequest]:
        """What to send: to a simulated venue what the kernel gets, else what it would fill."""
        tried = {order.symbol: order for order in decision.orders}
        shares, spend = decision.wanted.shares[0].tolist(), decision.wanted.spend[0].tolist()
        requests = []
        for n, symbol in enumerate(decision.symbols):
            wish, money = shares[n], spend[n]
            if not wish and money <= 0.0:
                continue
            order = tried.get(symbol)
            if order is None and self._venue is None:
                continue
            requests.append(
                OrderRequest(
                    id=self._order_id(str(decision.time), symbol),
                    symbol=symbol,
                    side="sell" if wish < 0.0 else "buy",
                    shares=0.0 if order is None else order.shares,
                    price=close[symbol],
                    wanted=wish,
                    spend=money,
                    limit=self._limit(wish, close[symbol]),
                )
            )
        return requests

    def _limit(self, wish: float, close: float) -> float | None:
        """The worst price of an order; None: any."""
        collar = self.config.limits.price_collar
        if collar is None or self._venue is not None:
            return None
        return close * (1.0 - collar if wish < 0.0 else 1.0 + collar)

    def _order_id(self, bar: str, symbol: str, k: str = "0") -> str:
        text = "|".join((self.decider.bundle.id, bar, symbol, k))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _send(self, orders: Sequence[OrderRequest]) -> None:
        """Send, and write down what is answered; no answer leaves an order unknown."""
        if not orders:
            return
        try:
            answers = self.broker.submit(orders)
        except BrokerError as error:
            self.errors["venue"] += 1
            log.warning("%s: no answer to %d order(s): %s", self.broker.name, len(orders), error)
            answers = [OrderStatus(order.id, "unknown", 0.0, str(error)) for order in orders]
        self._take_answers(answers)

    def _take_answers(self, answers: Iterable[OrderStatus]) -> None:
        for status in answers:
            known = self.state.orders.get(status.id)
            if known is not None and (known["state"], known["filled"]) != status[1:3]:
                self._record("status", status._asdict())
        unknown = any(order["state"] == "unknown" for order in self.state.orders.values())
        if not unknown:
            self._unknown_since = None
        elif self._unknown_since is None:
            self._unknown_since = self.clock.monotonic()

    def _in_flight(self) -> list[dict[str, Any]]:
        """Orders that were written down, and of which the venue has not said that it has them."""
        return [o for o in self.state.orders.values() if o["state"] in ("intent", "unknown")]

    def _resolve(self) -> None:
        """Ask the venue about orders in flight, and send those that it never got.

        Where it may not be sent now, by mode or clock, such an order is cancelled instead.
        """
        waited = 0.05
        while orders := self._in_flight():
            try:
                known = self.broker.orders([order["id"] for order in orders])
                self._take_answers(known.values())
                lost = [(o, self._reason_not_to_send(o)) for o in orders if o["id"] not in known]
                self._take_answers(
                    OrderStatus(o["id"], "cancelled", 0.0, why) for o, why in lost if why
                )
                self._send([_request_of(order) for order, why in lost if not why])
            except BrokerError as error:
                self._note_silence(error)
            if not self._in_flight():
                self.trouble = ""
                return
            since = self._unknown_since or self.clock.monotonic()
            self._unknown_since = since
            late = self.clock.monotonic() - since > self.config.unknown_seconds
            if late and self.state.mode != "halted":
                names = ", ".join(order["symbol"] for order in self._in_flight()[:5])
                self.halt("unknown", f"{self.broker.name} says nothing of orders for {names}")
            waited = self._wait(waited)

    def _finish_orders(self) -> None:
        """Cancel what is still open of the orders before, and wait until all are final."""
        waited, began = 0.05, self.clock.monotonic()
        asked = False
        while ids := list(self.state.orders):
            try:
                if not asked:
                    self.broker.cancel(ids)
                    asked = True
                self._take_answers(self.broker.orders(ids).values())
            except BrokerError as error:
                self._note_silence(error)
            if not self.state.orders:
                return
            late = self.clock.monotonic() - began > self.config.unknown_seconds
            if late and self.state.mode != "halted":
                self.halt("open", f"{self.broker.name} neither fills nor cancels {len(ids)} orders")
            if late:
                return
            waited = self._wait(waited)

    def _flatten(self, seq: int) -> None:
        """Sell all that is held, then halt. seq: of the command, by which the orders are known."""
        self._refuse_killed("flatten")
        self._resolve()
        self._finish_orders()
        if self._venue is None:  # others fill between bars, too
            self._take_books()
        held: Mapping[str, float] = self.state.account.get("positions", {})
        orders = self._write_moves({s: -n for s, n in held.items() if n > 0.0}, "flatten", seq)
        self._record("halt", {"reason": "command", "detail": "flattened by an operator"})
        self._commit()
        self._send(orders)

    def _write_moves(self, moves: Mapping[str, float], by: str, seq: int) -> list[OrderRequest]:
        """Orders of a command, written down. moves: symbol → shares to buy (positive) or sell"""
        close = self._closes()
        orders = [
            OrderRequest(
                self._order_id(self.state.time, symbol, f"{by}-{seq}"),
                *(symbol, "sell" if shares < 0.0 else "buy", abs(shares), close[symbol], shares),
            )
            for symbol, shares in sorted(moves.items())
            if shares
        ]
        self._write_intents(orders, (), self.decider.time, 0.0, by)
        return orders

    # Venue and journal.

    def _compare(self, account: Account, fills: Sequence[VenueFill]) -> list[str]:
        """What the venue holds beside what the journal says; differences halt the engine."""
        differences = self._differences(account, fills)
        if differences:
            surplus = surplus_of(self._account_by(fills), account)
            self._record("difference", {"differences": differences, "surplus": surplus})
        if differences and self.state.mode != "halted":
            some = "; ".join(differences[:20])
            self.halt("difference", f"{self.broker.name} and journal differ: {some}")
        return differences

    def _differences(self, account: Account, fills: Sequence[VenueFill]) -> list[str]:
        """Where the journal and these fills do not come to what the venue holds."""
        if not self.state.account:
            return []
        return compare_accounts(self._account_by(fills), account, self.state.risk.equity)

    def _account_by(self, fills: Sequence[VenueFill]) -> Account:
        """What is held by the journal and those of the fills that are of its orders."""
        known = self.state.orders.keys() | self.state.ended.keys()
        ours = [fill for fill in fills if fill.order_id in known]
        return add_fills(account_of(self.state.account), ours)

    def _take_books(self) -> list[str]:
        """Write down what was filled since the last look, and what is held: the differences."""
        fills, cursor, account = self._ask_books()
        differences = self._compare(account, fills)
        self._record("fills", {"fills": [f._asdict() for f in fills], "cursor": cursor})
        self._record("account", account._asdict())
        return differences

    def _ask_books(self) -> tuple[list[VenueFill], str, Account]:
        """(fills since the last ones, the cursor behind them, what is held), of one moment.

        A venue may fill between the two questions, and list a fill later than it books it: where
        the answers do not fit, it is asked again for a while.
        """
        began, waited = self.clock.monotonic(), 0.05
        while True:
            fills, cursor = self._ask(self.broker.fills, self.state.cursor)
            account = self._ask_account()
            late = self.clock.monotonic() - began > _FIT_SECONDS
            known = self.state.why.startswith("difference")
            if late or known or not self._differences(account, fills):
                return fills, cursor, account
            waited = self._wait(waited)

    def _ask_account(self) -> Account:
        """What the venue holds of the bundle's symbols; less than nothing halts the engine."""
        account = self._ask(self.broker.account)
        positions, locked = (
            {symbol: count for symbol, count in held.items() if self._symbols.has(symbol)}
            for held in (account.positions, account.locked)
        )
        account = Account(account.cash, positions, locked)
        short = [
            f"{symbol}: {held:g} shares" for symbol, held in positions.items() if held < -_SAME
        ]
        if account.cash < -_OVERDRAFT * max(self.state.risk.equity, 1.0):
            short.append(f"cash: {account.cash:.2f}")
        if short and self.state.mode != "halted":
            self.halt("account", f"{self.broker.name} holds less than nothing: {'; '.join(short)}")
        return account

    def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        """What the venue answers, however long it takes; bars wait in the gate."""
        waited = 0.05
        while True:
            try:
                answer = call(*arguments)
            except BrokerError as error:
                self._note_silence(error)
                waited = self._wait(waited)
            else:
                self.trouble = ""
                return answer

    def _note_silence(self, error: BrokerError) -> None:
        if str(error) != self.trouble:
            log.warning("%s: does not answer: %s", self.broker.name, error)
        self.trouble = str(error)
        self.errors["venue"] += 1
        self.published = self.status()

    def _wait(self, seconds: float) -> float:
        """Wait for so long; how long to wait the next time."""
        self._show_watchers()
        if self._stop():
            raise Interrupted("stopped while the venue does not answer; start again to go on")
        self._obey(MODES)  # what needs the venue would meet what is going on with it
        time.sleep(seconds)
        return min(2.0 * seconds, 2.0)

    def _rest(self) -> None:
        """While no bar comes: write down what came, send again what was lost, look at the venue."""
        self._drain_refusals()
        if self._in_flight():
            self._commit()
            self._resolve()
        now = self.clock.monotonic()
        if self._venue is None and self.state.account and now - self._asked > _ASK_SECONDS:
            self._asked = now
            try:
                self._take_answers(self.broker.orders(list(self.state.orders)).values())
            except BrokerError as error:
                self._note_silence(error)
        self._commit()
        self._show_watchers()

    def _drain_refusals(self) -> None:
        for refusal in self.gate.drain():
            self._record("refused", refusal._asdict())

    def _reason_not_to_send(self, order: Mapping[str, Any]) -> str | None:
        """Why an order may not be sent now; None: it may. An operator's stops at the kill file."""
        if "by" in order:
            return "kill_file" if self._is_killed() else None
        if self.state.mode == "halted":
            return "halted"
        return self._look_at_clock(self.decider.time, self.clock.wall())[1]

    def _is_killed(self) -> bool:
        kill = self.config.limits.kill_file
        return kill is not None and kill.exists()

    def _refuse_killed(self, command: str) -> None:
        if self._is_killed():
            raise UsageError(
                f"{command}: the kill-switch file {self.config.limits.kill_file} is there, and "
                "nothing is sent. Remove it, then say it again."
            )

    def _look_at_clock(self, bar: np.datetime64, received: datetime) -> tuple[float, str | None]:
        """(seconds on the feed's clock, why nothing may be sent now)."""
        limits = self.config.limits
        barred = "kill_file" if self._is_killed() else None
        if not self.feed.live:
            return float(bar.astype("datetime64[us]").astype(np.int64)) / 1e6, barred
        age, in_session = self._age(bar, received)
        if limits.trading_hours and not in_session:
            barred = barred or "closed"
        if age < -_MOST_AHEAD:
            self.halt("clock", _clock_text(bar, received))
        elif limits.max_age_seconds is not None and age > limits.max_age_seconds:
            barred = barred or "old_data"
        return received.timestamp(), barred

    def _age(self, bar: np.datetime64, received: datetime) -> tuple[float, bool]:
        """(seconds since the end of these bars, whether the exchange has a session that day)."""
        kind = self.decider.panel.kind
        age = (received - bar_end(kind, str(bar))).total_seconds()
        day = received.astimezone(ZoneInfo(kind.timezone)).date()
        always = kind.calendar in (FROM_DATA, ROUND_THE_CLOCK)
        return age, always or _close(kind.calendar, day, kind.timezone) is not None

    def _why_early(self, bar: np.datetime64) -> str | None:
        """Why bars cannot be of now: the clock has not come to their end; None: they can."""
        received = self.clock.wall()
        early = self._age(bar, received)[0] < -_MOST_AHEAD
        return _clock_text(bar, received) if early else None

    def _closes(self) -> dict[str, float]:
        world = self.decider.world
        closes: list[float] = world.rows.close[len(world.times) - 1].tolist()
        return dict(zip(world.symbols, closes, strict=True))

    # Operators.

    def _obey(self, names: Collection[str] | None = None) -> None:
        """Do what operators asked for since the last look; of these commands, others later."""
        heard, self._put_off = self._put_off, []
        while not self.commands.empty():
            heard.append(self.commands.get())
        for command, answer in heard:
            if names is not None and command.name not in names:
                self._put_off.append((command, answer))
                continue
            try:
                answer.set_result(self.obey(command))
            except EchelonError as error:
                answer.set_exception(error)

    def obey(self, command: Command) -> dict[str, Any]:
        """Do what an operator asks for, written down first; the status after it."""
        if command.name not in COMMANDS:
            raise UsageError(f"{command.name!r} is no command; there are {', '.join(COMMANDS)}.")
        seq = self._record("command", command._asdict())
        self._commit()
        result: dict[str, Any] = {}
        if command.name == "flatten":
            self._flatten(seq)
        elif command.name == "reconcile":
            result["differences"] = self._settle_differences(command, seq)
        self.published = self.status()
        return {**self.published, **result}

    def _settle_differences(self, command: Command, seq: int) -> list[str]:
        """Compare venue and journal; adopt what the venue has, or send what undoes it."""
        if not (command.adopt or command.undo):
            differences = self.reconcile()
            left = [f"{s}: {n:+g} shares at the venue" for s, n in self.state.surplus.items() if n]
            return differences or left
        if self._venue is not None:
            raise UsageError("a paper venue is the journal's own: there is nothing to settle.")
        if command.undo:
            self._refuse_killed("reconcile --undo")
        self._take_books()
        back = {symbol: -more for symbol, more in self.state.surplus.items()}
        said = f"settled: {'undo' if command.undo else 'adopt'}"
        self._record("difference", {"differences": [said], "surplus": back})
        orders = self._write_moves(back if command.undo else {}, "undo", seq)
        self._commit()
        self._send(orders)
        return []

    # The journal.

    def _record(self, kind: str, body: Mapping[str, Any], data: bytes | None = None) -> int:
        """Write an entry down, and take it in as a recovery would."""
        seq = self.journal.append(kind, body, data)
        self.state.apply(kind, body)
        self.guards.note(kind, body)
        self._written.append((kind, body))
        return seq

    def _commit(self) -> None:
        self.journal.commit()
        self._committed += self._written
        self._written.clear()

    def _show_watchers(self) -> None:
        """Show what was committed; a watcher that fails is logged once a kind, and counted."""
        entries, self._committed = self._committed, []
        if entries:
            self.published = self.status()
        for watcher in self.watchers:
            try:
                watcher.watch(self, entries)
            except Exception as error:
                kind = f"{type(watcher).__name__}.{type(error).__name__}"
                if not self.errors[kind]:
                    log.exception(
                        "%s failed; the engine goes on without it", type(watcher).__name__
                    )
                self.errors[kind] += 1

    def _replay(self, entries: Iterable[Entry]) -> None:
        """Take in the entries behind a snapshot; decisions must come out as they were."""
        bars: BarSet | None = None
        account: Account | None = None
        for entry in entries:
            kind, body = entry.kind, entry.body
            if kind == "bars":
                bars = decode_bars(body, entry.data or b"")
                self.gate.note_set(bars, body["doubted"])
                self._undecided = bars
            elif kind == "account":
                account = account_of(body)
            elif kind == "decision":
                assert bars is not None, "bars come before their decision"
                assert account is not None, "an account comes before its decision"
                decision = self.decider.push(bars, holdable(account))
                if decision.to_dict() != body:
                    raise DamagedError(
                        self.journal.path,
                        f"entry {entry.seq}: this machine or version decides otherwise at "
                        f"{decision.time}",
                        "Run the version that wrote it, on the same kind of machine.",
                    )
                self.guards.check(self.decider, body, self.state.mode)
                self.decider.complete()
                self.decision, self._undecided = decision, None
            self.state.apply(kind, body)
            self.guards.note(kind, body)

    def _snapshot(self) -> None:
        parts, facts = self.decider.state()
        gate = self.gate.state()
        guards, known = self.guards.state()
        arrays = with_prefix("engine.", parts) | with_prefix("gate.", gate.arrays)
        arrays |= with_prefix("guards.", guards)
        tree = {"engine": facts, "gate": gate.facts, "live": self.state.to_dict(), "guards": known}
        self.journal.snapshot(encode_state(arrays, tree))


_MOST_AHEAD = 5.0
"""Seconds that a bar's end may be ahead of the clock."""


class Interrupted(EchelonError):
    """A stop was asked for while the engine waited for its venue."""


def bar_end(kind: PanelKind, time: str) -> datetime:
    """When a bar ended, aware; a daily one has the date as its time, and ends with the session."""
    at = datetime.fromisoformat(time)
    if kind.freq == "1d" and kind.calendar not in (FROM_DATA, ROUND_THE_CLOCK):
        at = _close(kind.calendar, at.date(), kind.timezone) or at
    return at.replace(tzinfo=ZoneInfo(kind.timezone))


@lru_cache(maxsize=8)
def _close(calendar: str, day: date, timezone: str) -> datetime | None:
    """End of a day's session; None: it has none."""
    table = hours(calendar, day, day, timezone)
    return None if table.is_empty() else table["close"][0]


def surplus_of(journal: Account, venue: Account) -> dict[str, float]:
    """Symbol → shares that a venue holds beyond the journal."""
    every = {s: venue.positions.get(s, 0.0) for s in {*journal.positions, *venue.positions}}
    more = {s: held - journal.positions.get(s, 0.0) for s, held in sorted(every.items())}
    return {symbol: shares for symbol, shares in more.items() if abs(shares) > _SAME}


def _clock_text(bar: np.datetime64, received: datetime) -> str:
    return f"the clock says {received:%Y-%m-%d %H:%M:%S} UTC, before the end of the bars of {bar}"


def holdable(account: Account) -> Account:
    """The account as a policy can hold it: a small overdraft or a short position is nothing."""
    positions = {symbol: max(held, 0.0) for symbol, held in account.positions.items()}
    locked = {symbol: min(n, positions.get(symbol, 0.0)) for symbol, n in account.locked.items()}
    return Account(max(account.cash, 0.0), positions, locked)


def add_fills(account: Account, fills: Sequence[VenueFill]) -> Account:
    cash, positions = account.cash, dict(account.positions)
    for fill in fills:
        cash -= fill.shares * fill.price + fill.commission + fill.stamp
        positions[fill.symbol] = positions.get(fill.symbol, 0.0) + fill.shares
    return Account(cash, {s: held for s, held in positions.items() if abs(held) > _SAME})


def compare_accounts(journal: Account, venue: Account, equity: float) -> list[str]:
    differences = []
    for symbol in sorted({*journal.positions, *venue.positions}):
        here, there = journal.positions.get(symbol, 0.0), venue.positions.get(symbol, 0.0)
        if abs(here - there) > _SAME * max(1.0, abs(here), abs(there)):
            differences.append(f"{symbol}: journal {here:g} shares, venue {there:g}")
    if abs(journal.cash - venue.cash) > 1e3 * _SAME * max(equity, 1.0):
        differences.append(f"cash: journal {journal.cash:.2f}, venue {venue.cash:.2f}")
    return differences


def _request_of(order: Mapping[str, Any]) -> OrderRequest:
    return OrderRequest(**{name: order[name] for name in OrderRequest._fields})
