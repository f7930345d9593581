"""What of a live engine is alerted: a function of its journal, and the silence of its venue.

Refusals, stopped and rejected orders of one reason are one alert; a difference between venue and
journal is alerted by the halt that it causes. Of a hierarchy's risk control it is what changed from
one decision to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from echelon.config.alerts import Severity
from echelon.errors import DamagedError, shorten
from echelon.files import read_json, write_json
from echelon.live.engine import LiveEngine
from echelon.monitoring.alerts import Alert, AlertCallback, Alerter
from echelon.monitoring.metrics import Metrics
from echelon.risk.budget import CUT_CAP, RESTORED_CAP
from echelon.risk.events import SEVERITY, RiskKind

_GROUPS = {"refused": "reason", "stopped": "code"}
"""Kind of an entry → field of its reason."""
_GUARD: Mapping[str, Severity] = {"warn": "warning", "reduce": "warning", "halt": "critical"}
"""What a guard's alarm does → how severe it is; the end of one does nothing."""
_MOST_NAMES = 5


class AlertReader:
    """Reads entries in their order; `read` says what is alerted of them."""

    def __init__(self, drawdown: float | None) -> None:
        """drawdown: of the account, that is warned of; None: none is"""
        self._limit = drawdown
        self._time = ""
        self._peak, self._warned = 0.0, False
        self._charge: Mapping[str, Any] | None = None
        self._cut = False  # the limits of the real book left less than half of the wish
        self._symbols: dict[str, str] = {}  # of orders that are not final

    def resume(self, engine: LiveEngine) -> None:
        state = engine.state
        self._time, self._charge, self._peak = state.time, state.in_charge, state.risk.peak
        self._warned = self._measure_drawdown(state.risk.equity) > (self._limit or 1.0)
        self._symbols = {name: order["symbol"] for name, order in state.orders.items()}
        self._cut = (engine.decider.decision or {}).get("exposure_cap", 1.0) < CUT_CAP

    def read(self, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Alert]:
        """Alerts of entries (kind, body), those of a kind and reason together."""
        alerts: list[Alert] = []
        groups: dict[tuple[str, str], list[str]] = {}
        for kind, body in entries:
            if kind in _GROUPS:
                groups.setdefault((kind, body[_GROUPS[kind]]), []).append(body["symbol"] or "")
            elif kind == "order":
                self._symbols[body["id"]] = body["symbol"]
            elif kind == "status" and body["state"] == "rejected":
                symbol = self._symbols.get(body["id"], "")
                groups.setdefault(("rejected", body["reason"] or "none"), []).append(symbol)
            else:
                alerts += self._read(kind, body)
        for (kind, who), symbols in groups.items():
            some = sorted({*symbols} - {""})
            names = ", ".join(some[:_MOST_NAMES]) + (" …" if len(some) > _MOST_NAMES else "")
            alerts.append(self._alert(kind, "warning", who, count=len(symbols), symbols=names))
        return alerts

    def _read(self, kind: str, body: Mapping[str, Any]) -> Iterator[Alert]:
        if kind == "bars":
            self._time = body["time"]
        elif kind == "halt":
            yield self._alert("halt", "critical", body["reason"], detail=body["detail"])
        elif kind == "command":
            yield self._alert("command", "info", body["name"], by=body["by"] or "operator")
        elif kind == "recovered":
            yield self._alert("recovered", "info", bar=body["time"] or "–")
        elif kind == "guard" and body["event"] != "settings":
            severity, code = _GUARD.get(body.get("action", "")), body["guard"]
            if severity is None:
                severity, code = "info", "guard_end"
            yield self._alert(code, severity, body["name"], detail=body["detail"])
        elif kind == "decision":
            yield from self._read_decision(body)

    def _read_decision(self, body: Mapping[str, Any]) -> Iterator[Alert]:
        equity, now = body["account"]["equity"], body["in_charge"]
        self._peak = max(self._peak, equity)
        fall = self._measure_drawdown(equity)
        if self._limit is not None:
            if fall > self._limit and not self._warned:
                yield self._alert("drawdown", "warning", drawdown=fall, limit=self._limit)
            # Again only after half of it was made good.
            self._warned = fall > self._limit * (0.5 if self._warned else 1.0)
        cap = body.get("exposure_cap", 1.0)
        if cap < CUT_CAP and not self._cut:
            severity = SEVERITY[RiskKind.EXPOSURE_CUT]
            yield self._alert(RiskKind.EXPOSURE_CUT, severity, "portfolio", cap=cap)
        elif cap >= RESTORED_CAP and self._cut:
            yield self._alert(RiskKind.EXPOSURE_RESTORED, "info", "portfolio", cap=cap)
        self._cut = cap < (RESTORED_CAP if self._cut else CUT_CAP)
        before = self._charge or {"masked": (), "halted": False, "position_scale": 1.0}
        self._charge = now
        if now is None:
            return
        for kind, here, there in (
            (RiskKind.MASKED, now, before),
            (RiskKind.RELEASED, before, now),
        ):
            for who in sorted({*here["masked"]} - {*there["masked"]}):
                yield self._alert(kind, SEVERITY.get(kind, "info"), who)
        scale, last = now["position_scale"], before["position_scale"]
        changes = (
            (RiskKind.HALTED, now["halted"] and not before["halted"]),
            (RiskKind.RESUMED, before["halted"] and not now["halted"]),
            (RiskKind.HALVED, scale < last),
            (RiskKind.RESTORED, scale > last),
        )
        for kind in (kind for kind, changed in changes if changed):
            yield self._alert(kind, SEVERITY.get(kind, "info"), "portfolio", factor=scale)

    def _measure_drawdown(self, equity: float) -> float:
        return 1.0 - equity / self._peak if self._peak > 0.0 else 0.0

    def _alert(self, kind: str, severity: Severity, who: str = "", **values: float | str) -> Alert:
        short = {k: shorten(v, 600) if isinstance(v, str) else v for k, v in values.items()}
        return Alert(str(kind), severity, who, self._time, short)


class AlertWatcher:
    def __init__(self, send: AlertCallback, drawdown: float | None) -> None:
        self._send, self._reader = send, AlertReader(drawdown)
        self._started, self._silent = False, False
        self._errors: dict[str, int] = {}

    def watch(self, engine: LiveEngine, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        if not self._started:
            self._started = True
            self._reader.resume(engine)
        alerts = self._reader.read(entries)
        time, silent = engine.state.time, bool(engine.trouble)
        if silent and not self._silent:
            values = {"detail": shorten(engine.trouble, 600)}
            alerts.append(Alert("silent", "critical", engine.broker.name, time, values))
        elif self._silent and not silent:
            alerts.append(Alert("answers", "info", engine.broker.name, time))
        self._silent = silent
        for kind, count in engine.errors.items():
            if kind != "venue" and count > self._errors.get(kind, 0):
                alerts.append(Alert("error", "warning", kind, time, {"count": count}))
        self._errors = dict(engine.errors)
        for alert in alerts:
            self._send(alert)


class Check(TypedDict):
    """JOURNAL.day: whether a day's decisions came out the same when they were made again."""

    day: str
    equal: bool


def note_check(journal: Path, day: str, *, equal: bool) -> None:
    """Leave the result of a check where the engine of the journal finds it."""
    write_json(_check_file(journal), Check(day=day, equal=equal))


def read_check(journal: Path) -> Check | None:
    path = _check_file(journal)
    return read_json(path, Check, "Run `echelon live summary` again.") if path.exists() else None


def _check_file(journal: Path) -> Path:
    return journal.with_name(f"{journal.name}.day")


def metrics_of(metrics: Metrics, alerter: Alerter, journal: Path) -> Callable[[], None]:
    """What a scrape sets: what became of alerts, and the last check of the journal."""

    def refresh() -> None:
        for (channel, severity), count in dict(alerter.sent).items():
            metrics.reach("alerts_sent_total", count, channel, severity)
        for name, counts in (("failed", alerter.failed), ("dropped", alerter.dropped)):
            for label, count in dict(counts).items():
                metrics.reach(f"alerts_{name}_total", count, label)
        with suppress(DamagedError):  # a scrape has nobody to tell; the summary writes it again
            if (check := read_check(journal)) is not None:
                metrics.set("reference_decisions_equal", check["equal"])

    return refresh
