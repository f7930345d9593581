"""The risk log: order, files, damaged lines, and alerts that fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echelon.errors import Stopped, StoreError
from echelon.monitoring.alerts import Alert
from echelon.risk.events import RiskEvent, RiskKind, RiskLog, alert_of, from_lines, to_lines

MASKED = RiskEvent(
    28, RiskKind.MASKED, "trend 趋势", 0.16, 0.15, 3, {"note": "\u2028\nx", "n": math.inf}
)
HALTED = RiskEvent(40, RiskKind.HALTED, "portfolio", 0.31, 0.25)


def broken_pager(alert: Alert) -> None:
    raise ConnectionError("no line")


FILE = Path("risk.jsonl")


def test_events_written_and_read_again_are_the_same() -> None:
    lines = to_lines([MASKED, HALTED, MASKED])
    assert from_lines(lines.encode(), FILE) == (MASKED, HALTED, MASKED)
    assert len(lines.splitlines()) == 3


def test_line_is_plain_json() -> None:
    assert to_lines([HALTED]) == (
        '{"time": 40, "kind": "halted", "who": "portfolio", "value": 0.31, "limit": 0.25, '
        '"book": 0, "values": {}}\n'
    )
    assert to_lines([]) == ""
    assert from_lines(b"", FILE) == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1 + 0.2, 5e-324])
def test_any_number_survives_the_file(value: float) -> None:
    event = RiskEvent(np.int64(1), RiskKind.HALVED, "x", np.float64(value), 0.05, np.int64(2))
    [back] = from_lines(to_lines([event]).encode(), FILE)
    assert math.isnan(back.value) if math.isnan(value) else back.value == value
    assert (back.time, back.book) == (1, 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: line[:40], "line 2: .*delete it to go on"),
        (lambda line: "\n" + line, "line 2: "),
        (lambda line: line.replace('"halted"', '"exploded"'), "line 2: kind: Input should be"),
        (lambda line: line.replace('"time"', '"when"'), "line 2: time: Field required"),
        (lambda line: line.replace("40", "40.5"), "line 2: time: Input should be a valid integer"),
        (lambda line: line.replace("0.31", '"much"'), "line 2: value"),
        (lambda line: line.replace("0.31", "true"), "line 2: value"),
        (lambda line: line.replace("0.31", "9" * 400), "line 2: value"),
        (
            lambda line: line.replace('"portfolio"', "7"),
            "line 2: who: Input should be a valid string",
        ),
        (lambda line: "[1]\n", "line 2: Input should be"),
    ],
)
def test_damaged_line_is_refused_and_named(damage: Callable[[str], str], message: str) -> None:
    lines = to_lines([MASKED]) + damage(to_lines([HALTED]))
    with pytest.raises(StoreError, match=message):
        from_lines(lines.encode(), FILE)


def test_bytes_that_are_no_text_are_a_store_error() -> None:
    with pytest.raises(StoreError, match="missing or damaged"):
        from_lines(b"\xff\xfe", FILE)


# --- alerts -------------------------------------------------------------------------------------


def test_alerts_are_told_of_events_in_order() -> None:
    told: list[Alert] = []
    log = RiskLog(alert_callbacks=[told.append])
    log.append(MASKED)
    log.subscribe(lambda alert: told.append(alert))
    log.append(HALTED)
    assert told == [alert_of(MASKED), alert_of(HALTED), alert_of(HALTED)]
    assert [(alert.kind, alert.severity) for alert in told[:2]] == [
        ("masked", "warning"),
        ("halted", "critical"),
    ]
    assert told[0].values == {"measured": 0.16, "limit": 0.15, "bar": 28, **MASKED.values}
    assert list(log) == [MASKED, HALTED]


def test_alert_that_raises_is_an_event_and_stops_neither_trading_nor_others() -> None:
    told: list[Alert] = []
    log = RiskLog(alert_callbacks=[broken_pager, told.append])
    log.append(MASKED)
    assert told == [alert_of(MASKED)]
    recorded, failure = log
    assert recorded == MASKED
    assert (failure.kind, failure.who) == (RiskKind.ALERT_FAILED, "broken_pager")
    assert (failure.time, failure.book) == (28, 3)
    assert failure.values == {
        "event": "masked",
        "subject": "trend 趋势",
        "error": "ConnectionError: no line",
    }
    assert from_lines(to_lines(log).encode(), FILE) == (recorded, failure)


def test_failures_of_all_alerts_are_recorded_once_each() -> None:
    log = RiskLog(alert_callbacks=[broken_pager, broken_pager])
    log.append(MASKED)
    log.append(HALTED)
    assert sum(event.kind is RiskKind.ALERT_FAILED for event in log) == 4
    assert len(list(log)) == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped("stopped; resume with …")])
def test_alert_does_not_hold_up_ctrl_c(error: BaseException) -> None:
    def interrupted(alert: Alert) -> None:
        raise error

    log = RiskLog(alert_callbacks=[interrupted])
    with pytest.raises(type(error)):
        log.append(MASKED)
    assert list(log) == [MASKED]
