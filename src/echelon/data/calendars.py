"""Exchange calendars: which days are sessions, when they open, and how many bars make a year.

A thin layer over exchange_calendars that takes explicit dates (the library's own default is the
last twenty years only), keeps what it has built, and answers in naive exchange-local time.

- An exchange code ("XNYS", "XSHG") follows that exchange.
- "24/7" trades every day, around the clock.
- "data" stands for "the days that occur in the data" and has no sessions of its own.
"""

from __future__ import annotations

import warnings
from datetime import date
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from echelon.errors import DataError
from echelon.types import Freq, Times

ROUND_THE_CLOCK = "24/7"
FROM_DATA = "data"

MINUTES: dict[Freq, int] = {"1d": 1440, "5min": 5, "1min": 1}  # length of a bar in minutes

# What the markets' own statistics use; others are counted over the decade below.
_SESSIONS_PER_YEAR = {"XNYS": 252, "XSHG": 244, ROUND_THE_CLOCK: 365, FROM_DATA: 252}
_DECADE = (date(2010, 1, 1), date(2019, 12, 31))


class CalendarReach(NamedTuple):
    first: date = date.min
    last: date = date.max

    def clip(self, first: date, last: date) -> tuple[date, date]:
        return max(first, self.first), min(last, self.last)


def sessions(calendar: str, first: date, last: date) -> Times:
    """Sessions from `first` to `last`, both included: datetime64[us][T] at midnight."""
    if first > last:
        return np.empty(0, dtype="datetime64[us]")
    if calendar == ROUND_THE_CLOCK:
        days = np.arange(np.datetime64(first, "D"), np.datetime64(last, "D") + 1)
        return np.asarray(days.astype("datetime64[us]"))
    _refuse_outside(calendar, first, last)
    known = np.asarray(_covering(calendar, first, last).sessions.to_numpy()).astype(
        "datetime64[us]"
    )
    low = np.searchsorted(known, np.datetime64(first, "us"), side="left")
    high = np.searchsorted(known, np.datetime64(last, "us"), side="right")
    return known[low:high].copy()


def hours(calendar: str, first: date, last: date, timezone: str) -> pl.DataFrame:
    """Trading hours of the sessions: session, open, break_start, break_end, close.

    All are naive datetimes, `session` at midnight, the others in `timezone`; the break is null
    where there is none. Not for "24/7" and "data", which have no hours.
    """
    assert calendar not in (ROUND_THE_CLOCK, FROM_DATA), f"{calendar} has no hours"
    _refuse_outside(calendar, first, last)
    schedule = _covering(calendar, first, last).schedule
    columns = {
        name: pl.Series(schedule[name].dt.tz_localize(None).to_numpy().astype("datetime64[us]"))
        .dt.replace_time_zone("UTC")
        .dt.convert_time_zone(timezone)
        .dt.replace_time_zone(None)
        for name in ("open", "break_start", "break_end", "close")
    }
    table = pl.DataFrame({"session": schedule.index.to_numpy().astype("datetime64[us]"), **columns})
    return table.filter(pl.col("session").dt.date().is_between(first, last))


@lru_cache(maxsize=64)
def timezone_of(calendar: str) -> str:
    """IANA name of the exchange's time zone; UTC for "24/7" and "data"."""
    if calendar in (ROUND_THE_CLOCK, FROM_DATA):
        return "UTC"
    return str(_any_year(calendar).tz)


@lru_cache(maxsize=64)
def bounds(calendar: str) -> CalendarReach:
    """How far a calendar reaches: holidays of XSHG, for one, are decreed year by year."""
    if calendar in (ROUND_THE_CLOCK, FROM_DATA):
        return CalendarReach()
    known = _any_year(calendar)
    limits = {"first": known.bound_min(), "last": known.bound_max()}
    return CalendarReach(**{end: day.date() for end, day in limits.items() if day is not None})


def bars_per_day(calendar: str, freq: Freq) -> int:
    """Bars of a regular session.

    >>> bars_per_day("XNYS", "1d"), bars_per_day("XSHG", "5min")
    (1, 48)
    """
    if freq == "1d":
        return 1
    return round(periods_per_year(calendar, freq) / periods_per_year(calendar, "1d"))


@lru_cache(maxsize=64)
def periods_per_year(calendar: str, freq: Freq) -> float:
    """Bars in a year, for annualising: sessions × bars in a regular session.

    >>> periods_per_year("XNYS", "1d"), periods_per_year("XSHG", "5min")
    (252.0, 11712.0)
    """
    days = _SESSIONS_PER_YEAR.get(calendar)
    if days is None:
        days = round(len(sessions(calendar, *_DECADE)) / 10)
    if freq == "1d":
        return float(days)
    if calendar == ROUND_THE_CLOCK:
        return float(days) * 1440.0 / MINUTES[freq]
    if calendar == FROM_DATA:
        raise DataError(
            "calendar 'data' does not say how long a session is, which intraday bars need to be "
            "annualised. Set data.calendar to an exchange code such as XNYS or XSHG, or to 24/7."
        )
    table = hours(calendar, date(2019, 1, 1), date(2019, 12, 31), "UTC")
    lunch = (pl.col("break_end") - pl.col("break_start")).fill_null(pl.duration())
    lengths = table.select((pl.col("close") - pl.col("open") - lunch).dt.total_minutes())
    return float(days) * float(np.median(lengths.to_series().to_numpy())) / MINUTES[freq]


def _refuse_outside(calendar: str, first: date, last: date) -> None:
    if calendar == FROM_DATA:
        raise DataError(
            "calendar 'data' has no sessions of its own: they are the days in the data. "
            "Set data.calendar to an exchange code such as XNYS or XSHG, or to 24/7."
        )
    reach = bounds(calendar)
    if reach.clip(first, last) != (first, last):
        begin = "the beginning" if reach.first == date.min else reach.first
        end = "any later day" if reach.last == date.max else reach.last
        raise DataError(
            f"calendar {calendar} is known from {begin} to {end}, but {first} to {last} was asked "
            "for. Use dates within, a newer exchange_calendars, or data.calendar: data (the days "
            "that occur)."
        )


def _covering(calendar: str, first: date, last: date) -> Any:  # noqa: ANN401 (untyped library)
    """A calendar over whole decades around the dates, so that few are ever built."""
    decades = date(first.year // 10 * 10, 1, 1), date(last.year // 10 * 10 + 9, 12, 31)
    return _build(calendar, *bounds(calendar).clip(*decades))


def _any_year(calendar: str) -> Any:  # noqa: ANN401 (untyped library)
    return _build(calendar, date(2019, 1, 1), date(2019, 12, 31))


@lru_cache(maxsize=64)
def _build(calendar: str, start: date, end: date) -> Any:  # noqa: ANN401 (untyped library)
    import exchange_calendars  # with pandas a second to import; most runs know their sessions
    from pandas.errors import Pandas4Warning

    try:
        with warnings.catch_warnings():
            # The library uses what pandas 4 will change; that is for its authors to mend.
            warnings.simplefilter("ignore", Pandas4Warning)
            return exchange_calendars.get_calendar(
                calendar, start=start.isoformat(), end=end.isoformat()
            )
    except exchange_calendars.errors.InvalidCalendarName as error:
        raise DataError(
            f"unknown calendar {calendar!r}. Use an exchange code such as XNYS or XSHG, 24/7 or "
            "data."
        ) from error
    except ValueError as error:  # some of the library's calendars cannot be built at all
        raise DataError(
            f"calendar {calendar} cannot be built for {start} to {end}: {str(error)[:200]}. "
            "Use data.calendar: data (the days that occur)."
        ) from error
