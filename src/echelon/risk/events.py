"""What risk control did, when, to whom and why: a log, and alerts.

Every event is an `Alert` to the callbacks of its log. One that raises does not stop trading, nor
the other callbacks: its failure is recorded as an event of its own (`alert_failed`), which is not
alerted again.

JSON has no NaN and no infinities: as in the metric log, such a number is a string, "NaN",
"Infinity" or "-Infinity".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, FiniteFloat
from typing_extensions import TypedDict

from echelon.config.alerts import Severity
from echelon.errors import DamagedError, Stopped
from echelon.files import json_line, parse_json
from echelon.monitoring.alerts import Alert, AlertCallback


class RiskKind(StrEnum):
    """What happened."""

    MASKED = "masked"
    """An expert may no longer be chosen."""
    RELEASED = "released"
    FORCED = "forced"
    """The expert in charge was masked: the router decides again at this bar."""
    HALVED = "halved"
    """CVaR beyond its limit: smaller positions."""
    RESTORED = "restored"
    HALTED = "halted"
    """The portfolio fell too far: all to cash."""
    RESUMED = "resumed"
    TURNOVER_CUT = "turnover_cut"
    EXPOSURE_CUT = "exposure_cut"
    """The drawdown budget or the target volatility leaves less than half of the wish."""
    EXPOSURE_RESTORED = "exposure_restored"
    BUDGET_JUMPED = "budget_jumped"
    """A loss since the last bar went through the whole drawdown budget."""
    ALERT_FAILED = "alert_failed"
    """An alert of an event failed."""


@dataclass(frozen=True, slots=True)
class RiskEvent:
    """One thing risk control did at the close of bar `time` to book `book`.

    who: the expert, the portfolio or, if it failed, the alert's callback
    value, limit: what was measured, and what it was held against
    values: more that the kind has to say; reports make the sentence from both
    """

    time: int
    kind: RiskKind
    who: str
    value: float
    limit: float
    book: int = 0
    values: Mapping[str, float | str] = field(default_factory=dict)


SEVERITY: Mapping[RiskKind, Severity] = {
    RiskKind.HALTED: "critical",
    RiskKind.MASKED: "warning",
    RiskKind.FORCED: "warning",
    RiskKind.HALVED: "warning",
    RiskKind.EXPOSURE_CUT: "warning",
    RiskKind.BUDGET_JUMPED: "warning",
    RiskKind.ALERT_FAILED: "warning",
}
"""Of events that are alerted; those of other kinds are for information."""


def alert_of(event: RiskEvent, time: object = "") -> Alert:
    """An event as an alert. time: of its bar, where that is known"""
    values = {"measured": event.value, "limit": event.limit, **event.values, "bar": event.time}
    severity = SEVERITY.get(event.kind, "info")
    return Alert(event.kind.value, severity, event.who, str(time), values)


class RiskLog:
    """Events in the order they happened. Iterating gives them."""

    def __init__(
        self, alert_callbacks: Iterable[AlertCallback] = (), most: int | None = None
    ) -> None:
        """alert_callbacks: called with every event; most: events that are kept; None: all."""
        self._callbacks = list(alert_callbacks)
        self._events: deque[RiskEvent] = deque(maxlen=most)

    def __iter__(self) -> Iterator[RiskEvent]:
        return iter(self._events)

    def subscribe(self, callback: AlertCallback) -> None:
        self._callbacks.append(callback)

    def append(self, event: RiskEvent) -> None:
        """Record an event and tell all who want to know."""
        self._events.append(event)
        for callback in tuple(self._callbacks):
            try:
                callback(alert_of(event))
            except Stopped:
                raise  # the user's Ctrl-C, not a fault of the callback
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not end trading
                name = getattr(callback, "__qualname__", type(callback).__name__)
                text = f"{type(error).__name__}: {error}"
                values = {"event": event.kind.value, "subject": event.who, "error": text}
                failed = replace(event, kind=RiskKind.ALERT_FAILED, who=name, values=values)
                self._events.append(failed)

    def extend(self, events: Iterable[RiskEvent]) -> None:
        for event in events:
            self.append(event)


def to_lines(events: Iterable[RiskEvent]) -> str:
    return "".join(json_line(_row(event)) + "\n" for event in events)


def from_lines(data: bytes, path: Path) -> tuple[RiskEvent, ...]:
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    return tuple(_event(line, path, k) for k, line in enumerate(lines, 1))


_REMEDY = "Restore it, or delete it to go on without."
_SPELLED = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_Number = FiniteFloat | Literal["NaN", "Infinity", "-Infinity"]


class _Line(TypedDict):
    """A line of the log; all of it, so that a line of something else is none."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    time: int
    kind: RiskKind
    who: str
    value: _Number
    limit: _Number
    book: int
    values: dict[str, _Number | str]


def _row(event: RiskEvent) -> dict[str, Any]:
    values = {k: v if isinstance(v, str) else _json_number(v) for k, v in event.values.items()}
    row = {field.name: getattr(event, field.name) for field in fields(event)}
    row |= {name: int(row[name]) for name in ("time", "book")}
    row |= {name: _json_number(row[name]) for name in ("value", "limit")}
    return row | {"values": values}


def _json_number(value: float) -> float | str:
    return _SPELLED.get(str(float(value)), float(value))


def _event(line: bytes, path: Path, number: int) -> RiskEvent:
    try:
        row = parse_json(line, _Line, path, _REMEDY)
    except DamagedError as damage:
        raise DamagedError(path, f"line {number}: {damage.what}", _REMEDY) from None
    spelled = tuple(_SPELLED.values())
    return RiskEvent(
        row["time"],
        row["kind"],
        row["who"],
        float(row["value"]),
        float(row["limit"]),
        row["book"],
        {
            name: float(value) if value in spelled or not isinstance(value, str) else value
            for name, value in row["values"].items()
        },
    )
