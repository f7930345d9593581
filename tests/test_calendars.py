"""Exchange calendars: sessions, hours, time zones and bars per year."""

from __future__ import annotations

from datetime import date, datetime

import numpy as np
import pytest

from echelon.data.calendars import bounds, hours, periods_per_year, sessions, timezone_of
from echelon.errors import DataError


def test_new_york_week_of_a_holiday_leaves_the_holiday_out() -> None:
    days = sessions("XNYS", date(2019, 7, 1), date(2019, 7, 7))
    assert days.dtype == np.dtype("datetime64[us]")
    assert days.astype("datetime64[D]").astype(str).tolist() == [
        "2019-07-01",
        "2019-07-02",
        "2019-07-03",
        "2019-07-05",
    ]


def test_sessions_older_than_the_librarys_default_are_known() -> None:
    days = sessions("XNYS", date(1990, 1, 1), date(1990, 12, 31))
    assert len(days) == 253
    assert days[0] == np.datetime64("1990-01-02")


def test_sessions_spanning_decades_equal_the_years_joined() -> None:
    whole = sessions("XSHG", date(2005, 1, 1), date(2020, 12, 31))
    parts = [sessions("XSHG", date(y, 1, 1), date(y, 12, 31)) for y in range(2005, 2021)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_round_the_clock_has_every_day() -> None:
    days = sessions("24/7", date(2020, 2, 27), date(2020, 3, 1))
    assert days.tolist() == [datetime(2020, 2, d) for d in (27, 28, 29)] + [datetime(2020, 3, 1)]


def test_no_days_asked_for_gives_none() -> None:
    assert sessions("XNYS", date(2020, 1, 3), date(2020, 1, 2)).shape == (0,)


def test_sessions_returned_are_the_callers_own() -> None:
    sessions("XNYS", date(2019, 7, 1), date(2019, 7, 7))[:] = np.datetime64("1970-01-01")
    assert sessions("XNYS", date(2019, 7, 1), date(2019, 7, 7))[0] == np.datetime64("2019-07-01")


def test_shanghai_beyond_its_decreed_holidays_says_how_far_it_reaches() -> None:
    last = bounds("XSHG").last
    assert last is not None
    assert sessions("XSHG", date(last.year, 12, 1), last)[-1] <= np.datetime64(last)
    with pytest.raises(DataError, match=rf"XSHG is known from .* to {last}.*data\.calendar"):
        sessions("XSHG", date(2020, 1, 1), date(last.year + 1, 1, 4))


def test_unknown_calendar_is_named_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"unknown calendar 'XNYX'.*XNYS"):
        sessions("XNYX", date(2020, 1, 1), date(2020, 1, 4))


def test_calendar_of_the_data_has_no_sessions_of_its_own() -> None:
    with pytest.raises(DataError, match="no sessions of its own"):
        sessions("data", date(2020, 1, 1), date(2020, 1, 4))
    assert bounds("data") == (date.min, date.max)


@pytest.mark.parametrize(
    ("calendar", "zone"),
    [("XNYS", "America/New_York"), ("XSHG", "Asia/Shanghai"), ("24/7", "UTC"), ("data", "UTC")],
)
def test_time_zone_of_an_exchange(calendar: str, zone: str) -> None:
    assert timezone_of(calendar) == zone


@pytest.mark.parametrize(
    ("calendar", "freq", "bars"),
    [
        ("XNYS", "1d", 252),
        ("XNYS", "5min", 252 * 78),
        ("XNYS", "1min", 252 * 390),
        ("XSHG", "1d", 244),
        ("XSHG", "5min", 244 * 48),
        ("XSHG", "1min", 244 * 240),
        ("24/7", "1d", 365),
        ("24/7", "5min", 365 * 288),
        ("24/7", "1min", 365 * 1440),
        ("data", "1d", 252),
        ("XLON", "1d", 253),
    ],
)
def test_bars_in_a_year(calendar: str, freq: str, bars: int) -> None:
    assert periods_per_year(calendar, freq) == bars  # type: ignore[arg-type]


def test_intraday_bars_in_a_year_of_the_datas_own_days_cannot_be_known() -> None:
    with pytest.raises(DataError, match=r"how long a session is.*Set data\.calendar"):
        periods_per_year("data", "5min")


def test_hours_are_local_and_keep_the_lunch_break() -> None:
    row = hours("XSHG", date(2020, 1, 2), date(2020, 1, 2), "Asia/Shanghai").row(0)
    clock = [(t.hour, t.minute) for t in row[1:]]
    assert row[0] == datetime(2020, 1, 2)
    assert clock == [(9, 30), (11, 30), (13, 0), (15, 0)]


def test_hours_in_another_zone_follow_daylight_saving() -> None:
    summer = hours("XNYS", date(2020, 7, 1), date(2020, 7, 1), "UTC").row(0)
    winter = hours("XNYS", date(2020, 12, 1), date(2020, 12, 1), "UTC").row(0)
    assert (summer[1], winter[1]) == (datetime(2020, 7, 1, 13, 30), datetime(2020, 12, 1, 14, 30))
    assert summer[2] is None
