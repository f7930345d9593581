"""Retry: when to try again and how long to wait."""

from collections.abc import Callable

import pytest
from vendor_fakes import (
    Naps,
    Yahoo,
    YFRateLimitError,
    only,
    patient,
    recorded,
    yahoo,
)

from echelon.data.sources._vendor import Retry
from echelon.errors import SourceError


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "done"

    return call


def test_retry_waits_twice_as_long_each_time_up_to_the_cap() -> None:
    naps = Naps()
    retry = Retry(attempts=6, base=1.0, cap=5.0, sleep=naps, jitter=lambda: 0.0)
    assert yahoo(None, retry=retry)._ask(failing(5, OSError()), "A", "x") == "done"
    assert naps.seconds == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_retry_jitter_shortens_a_wait_by_at_most_half() -> None:
    retry = Retry(jitter=lambda: 0.999)
    assert retry.wait(1, "transient") == pytest.approx(0.5, abs=1e-3)
    assert retry.wait(1, "rate limit") >= retry.rate_limit_wait


def test_retry_gives_up_and_names_the_last_error() -> None:
    naps, error = Naps(), OSError("down")
    with pytest.raises(SourceError, match="failed 3 times for A: OSError: down") as caught:
        yahoo(None, retry=patient(naps))._ask(failing(9, error), "A", "x")
    assert caught.value.__cause__ is error
    assert len(naps.seconds) == 2


def test_retry_raises_a_fatal_error_at_once() -> None:
    naps = Naps()
    with pytest.raises(SourceError, match="failed for A: ValueError: no"):
        yahoo(None, retry=patient(naps))._ask(failing(1, ValueError("no")), "A", "x")
    assert naps.seconds == []


def test_retry_lets_ctrl_c_through() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    naps = Naps()
    with pytest.raises(KeyboardInterrupt):
        yahoo(None, retry=patient(naps))._ask(interrupted, "A", "x")
    assert naps.seconds == []


def test_yahoos_rate_limit_is_waited_out() -> None:
    naps = Naps()
    client = Yahoo([YFRateLimitError(), recorded("yfinance_daily")])
    assert only(yahoo(client, retry=patient(naps))).height == 7
    assert naps.seconds == [61.0]
