"""The watcher that fills the metrics of a live engine (`monitoring.metrics`).

Counters follow the entries that the engine commits, so they agree with its journal. What else is
measured is what the engine publishes of itself, and worked out when Prometheus asks, by the thread
that answers it. An engine that starts has its gauges from its journal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, get_args

import numpy as np

from echelon.live.brokers import OPEN, OrderState
from echelon.live.engine import COMMANDS, LiveEngine, bar_end
from echelon.live.gate import REFUSED
from echelon.live.limits import STOPPED, Mode
from echelon.monitoring.metrics import Metrics
from echelon.ops.diversity import entropy, mapd
from echelon.population.record import CASH
from echelon.risk.cvar import tail_of, tail_points
from echelon.types import Floats

_COUNTED: Mapping[str, tuple[str, str]] = {
    "order": ("live_orders_total", "side"),
    "status": ("live_order_states_total", "state"),
    "stopped": ("live_stopped_orders_total", "code"),
    "refused": ("live_refused_bars_total", "reason"),
    "halt": ("live_halts_total", "reason"),
    "command": ("live_commands_total", "name"),
}
"""Kind of an entry → the counter, and the field that is its label."""
_SIDES = ("buy", "sell")
_SERIES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("live_orders_total", "live_fills_total", "live_traded_value_total"), _SIDES),
    "live_order_states_total": get_args(OrderState),
    "live_fees_total": ("commission", "stamp"),
    "live_stopped_orders_total": STOPPED,
    "live_refused_bars_total": REFUSED,
    "live_commands_total": COMMANDS,
    "live_halts_total": ("limit", "difference", "unknown", "open", "account", "clock", "command"),
    "live_rejected_orders_total": ("other",),
    "live_errors_total": ("venue",),
}
"""Counters whose series are known beforehand, and begin at 0."""
_CODE = re.compile(r"[a-z][a-z_]{1,40}")


class Monitor:
    """Fills the metrics of one engine; see the module's text."""

    def __init__(self, metrics: Metrics, engine: LiveEngine, feed: str) -> None:
        """feed: as `--feed` names it"""
        self._metrics, self._engine = metrics, engine
        journal, bundle = engine.journal, engine.decider.bundle
        info = bundle.id, bundle.manifest["policy"], engine.broker.name, feed.partition(":")[0]
        metrics.set("live_info", 1.0, *info)
        for name, labels in _SERIES.items():
            for label in labels:
                metrics.add(name, label, by=0.0)
        self._hierarchy = engine.decider.hierarchy
        self._targets = self._own_targets()
        bars = journal.last("bars")
        self._bars = None if bars is None else (bars.body["time"], bars.body["received"])
        self._most = bundle.config.risk.cvar_window + 1
        share = min(1.0, 2.0 * self._most / max(engine.state.counts.get("decision", 0), 1))
        last = journal.entries(int((1.0 - share) * journal.seq), kinds=("decision",))
        equities = [entry.body["account"]["equity"] for entry in last]
        self._equities: tuple[float, ...] = (*equities[-self._most :],)
        self._prices = {order["id"]: order["price"] for order in engine.state.orders.values()}
        metrics.refresh.append(self._fill)

    def watch(self, engine: LiveEngine, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        counts: Counter[tuple[str, ...]] = Counter()
        for kind, body in entries:
            if kind in _COUNTED:
                name, label = _COUNTED[kind]
                counts[name, body[label]] += 1
            if kind == "order":
                self._prices[body["id"]] = body["price"]
            elif kind == "status" and body["state"] == "rejected":
                reason = body["reason"] or ""  # a venue's may be a sentence, with numbers in it
                code = reason if _CODE.fullmatch(reason) else "other"
                counts["live_rejected_orders_total", code] += 1
            elif kind == "fills":
                self._count_fills(body["fills"])
            elif kind == "bars":
                self._bars = body["time"], body["received"]
            elif kind == "decision":
                self._take_decision(engine, body)
        for (name, *labels), by in counts.items():
            self._metrics.add(name, *labels, by=by)

    def _take_decision(self, engine: LiveEngine, body: Mapping[str, Any]) -> None:
        self._metrics.add("live_bars_total")
        if engine.latency is not None:
            self._metrics.observe("live_decision_seconds", engine.latency)
        self._equities = (*self._equities, body["account"]["equity"])[-self._most :]
        self._targets = self._own_targets()
        # Fills of the orders before came ahead of the decision.
        self._prices = {o: p for o, p in self._prices.items() if o in engine.state.orders}

    def _own_targets(self) -> Floats | None:
        """[K,N] what the experts of a hierarchy want; None: there are none."""
        return None if self._hierarchy is None else self._hierarchy.own_targets()

    def _count_fills(self, fills: Sequence[Mapping[str, Any]]) -> None:
        number, value = dict.fromkeys(_SIDES, 0), dict.fromkeys(_SIDES, 0.0)
        commission = stamp = slippage = 0.0
        for fill in fills:
            shares, price = fill["shares"], fill["price"]
            side = _SIDES[shares < 0.0]
            number[side] += 1
            value[side] += abs(shares) * price
            commission += fill["commission"]
            stamp += fill["stamp"]
            slippage += fill["slippage"]
            if arrival := self._prices.get(fill["order_id"]):
                moved = 1e4 * (price / arrival - 1.0)
                self._metrics.observe(
                    "live_slippage_basis_points", -moved if shares < 0.0 else moved
                )
        add = self._metrics.add
        for side in _SIDES:
            add("live_fills_total", side, by=number[side])
            add("live_traded_value_total", side, by=value[side])
        add("live_fees_total", "commission", by=commission)
        add("live_fees_total", "stamp", by=stamp)
        add("live_slippage_value_total", by=slippage)

    def _fill(self) -> None:
        """The gauges, when somebody asks."""
        engine, show, put = self._engine, self._metrics.show, self._metrics.set
        now = engine.published
        show("live_mode", {mode: float(mode == now["mode"]) for mode in get_args(Mode)})
        states = Counter(order["state"] for order in now["orders"])
        show("live_orders", {**dict.fromkeys(("intent", *sorted(OPEN)), 0), **states})
        put("live_journal_entries", now["entries"])
        path = engine.journal.path
        files = (path, path.with_name(f"{path.name}-wal"))
        put("live_journal_bytes", sum(file.stat().st_size for file in files if file.exists()))
        put("live_venue_silent", bool(now["trouble"]))
        for name, labelled in engine.guards.reading().items():
            if "" in labelled:
                put(name, labelled[""])
            else:
                show(name, labelled)
        for kind, count in dict(engine.errors).items():
            self._metrics.reach("live_errors_total", count, kind)
        if self._bars is not None:
            time, received = self._bars
            ended = bar_end(engine.decider.panel.kind, time).timestamp()
            put("live_bar_time_seconds", ended)
            put("live_lag_seconds", datetime.fromisoformat(received).timestamp() - ended)
        if now["account"] and now["equity"]:
            self._fill_account(now)

    def _fill_account(self, now: Mapping[str, Any]) -> None:
        show, put, account = self._metrics.show, self._metrics.set, now["account"]
        for name in ("equity", "drawdown", "turnover"):
            put(f"live_{name}", now[name])
        put("live_cash", account["cash"])
        put("live_exposure", 1.0 - account["cash"] / now["equity"])
        put("live_positions", sum(held != 0.0 for held in account["positions"].values()))
        steps = pairwise(self._equities)
        returns = np.array([after / before - 1.0 for before, after in steps if before])
        if tail_points(len(returns)) >= 1.0:
            put("live_cvar", float(tail_of(returns[None]).cvar[0]))
        charge, targets = now["in_charge"], self._targets
        if targets is not None and len(targets) > 1:
            put("live_mapd", mapd(targets[:, None]))
        if charge is None or self._hierarchy is None:
            return
        experts = (*self._hierarchy.expert_names, CASH)
        show("live_in_charge", {name: name == charge["expert"] for name in experts})
        show("live_masked", {name: name in charge["masked"] for name in experts})
        put("live_position_scale", charge["position_scale"])
        if (odds := charge["probabilities"]) is not None:
            show("live_router_probability", odds)
            put("live_router_entropy", entropy(np.array([*odds.values()])))
