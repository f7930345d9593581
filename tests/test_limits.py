"""Price limits: dated board rules, rounding half up, special treatment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.data.limits import bands, board_of, limit_prices, round_half_up

FAR = np.iinfo(np.int64).max


def _band(symbol: str, day: str, *, st_: bool = False, since: int = FAR) -> float:
    times = np.array([day], dtype="datetime64[us]")
    return float(bands(times, (symbol,), np.array([[st_]]), np.array([[since]]))[0, 0])


@pytest.mark.parametrize(
    ("symbol", "board"),
    [
        ("600000.SH", "main"),
        ("SZ000338", "main"),
        ("002594.SZ", "main"),
        ("300750.SZ", "chinext"),
        ("688981", "star"),
        ("830799.BJ", "bse"),
        ("AAPL", None),
        ("900901.SH", None),
    ],
)
def test_board_follows_the_code(symbol: str, board: str | None) -> None:
    assert board_of(symbol) == board


@pytest.mark.parametrize(
    ("symbol", "day", "st_", "band"),
    [
        ("600000.SH", "2015-01-05", False, 0.10),
        ("600000.SH", "2015-01-05", True, 0.05),
        ("300750.SZ", "2020-08-21", False, 0.10),
        ("300750.SZ", "2020-08-21", True, 0.05),
        ("300750.SZ", "2020-08-24", False, 0.20),
        ("300750.SZ", "2020-08-24", True, 0.20),
        ("688981.SH", "2020-08-03", False, 0.20),
    ],
)
def test_band_follows_board_date_and_treatment(
    symbol: str, day: str, st_: bool, band: float
) -> None:
    assert _band(symbol, day, st_=st_) == band


def test_new_star_listing_has_no_limit_for_five_sessions() -> None:
    assert np.isnan(_band("688981.SH", "2020-07-16", since=4))
    assert _band("688981.SH", "2020-07-23", since=5) == 0.20


def test_before_the_rule_and_for_other_markets_there_is_no_limit() -> None:
    assert np.isnan(_band("600000.SH", "1995-01-05"))
    assert np.isnan(_band("AAPL", "2020-01-06"))


@pytest.mark.parametrize(
    ("pre_close", "band", "up", "down"),
    [
        (10.0, 0.1, 11.0, 9.0),
        (9.97, 0.1, 10.97, 8.97),  # 10.967, 8.973
        (9.95, 0.1, 10.95, 8.96),  # 10.945 and 8.955 are halves: up
        (24.37, 0.1, 26.81, 21.93),
        (1.05, 0.05, 1.10, 1.00),
    ],
)
def test_limits_round_half_up(pre_close: float, band: float, up: float, down: float) -> None:
    found = limit_prices(np.array(pre_close), np.array(band))
    assert [float(x) for x in found] == [up, down]


@given(st.integers(1, 1_000_000))
def test_whole_cents_stay_as_they_are(cents: int) -> None:
    assert round_half_up(np.array(cents / 100)) == cents / 100
