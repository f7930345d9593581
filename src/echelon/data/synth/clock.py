"""Sessions of the exchange, and when the bars of a session end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from echelon.data import calendars
from echelon.errors import ConfigError
from echelon.types import Bools, Times


@dataclass(frozen=True)
class Clock:
    """The days and minutes a market trades, in the exchange's local time.

    sessions[T]: datetime64[D]
    minute_ends[M]: minutes after midnight at which each minute bar of a regular session ends
    open_minutes[T]: how many of them a session has, fewer than M where it closes early
    """

    sessions: NDArray[np.datetime64]
    minute_ends: NDArray[np.int64]
    open_minutes: NDArray[np.int64]
    timezone: str

    @cached_property
    def midnights(self) -> Times:
        """Midnight of each session, datetime64[us], [T]."""
        return self.sessions.astype("datetime64[us]")

    def bar_ends(self, step: int) -> NDArray[np.timedelta64]:
        """Time from midnight to the end of each bar of `step` minutes; the last may be short."""
        last = len(self.minute_ends)
        ends = np.minimum(np.arange(step, last + step, step), last) - 1
        return np.asarray(self.minute_ends[ends] * np.timedelta64(60_000_000, "us"))

    def has_bar(self, days: NDArray[np.int64], step: int) -> Bools:
        """Which bars of `step` minutes begin before the close of each of `days` [B]: [B, bars]."""
        starts = np.arange(0, len(self.minute_ends), step)
        return np.asarray(starts < self.open_minutes[days, None])

    def day_of(self, session: date) -> int | None:
        """Position of `session`, or None where the exchange is closed or nothing was made."""
        at = int(np.searchsorted(self.sessions, np.datetime64(session)))
        found = at < len(self.sessions) and self.sessions[at] == np.datetime64(session)
        return at if found else None


def make_clock(calendar: str, start: date, n_days: int, minutes_per_day: int) -> Clock:
    """Take `n_days` sessions of the exchange from `start` on, with minutes from its opening.

    The lunch break of an exchange that has one is left out; a minute bar is labelled by its end.
    """
    # 1.6 calendar days a session and three weeks leave room for weekends and holidays.
    end = start + timedelta(days=int(n_days * 1.6) + 21)
    last = calendars.bounds(calendar).last
    sessions = calendars.sessions(calendar, start, end if last is None else min(end, last))
    if len(sessions) < n_days:
        raise ConfigError(
            f"data.synthetic.n_days is {n_days}, but {calendar} has only {len(sessions)} known "
            f"sessions from {start} on; take fewer days or an earlier data.synthetic.start"
        )
    sessions = sessions[:n_days]
    closes = _closes(calendar, sessions)
    ends = _minute_ends(calendar, sessions[0].item().date(), minutes_per_day)
    return Clock(
        sessions=sessions.astype("datetime64[D]"),
        minute_ends=ends,
        open_minutes=np.maximum(np.searchsorted(ends, closes, side="right"), 1),
        timezone=calendars.timezone_of(calendar),
    )


def _closes(calendar: str, sessions: Times) -> NDArray[np.int64]:
    """Minutes after midnight at which each session closes, [T]."""
    if calendar == calendars.ROUND_THE_CLOCK:
        return np.full(len(sessions), 24 * 60)
    first, last = (sessions[k].item().date() for k in (0, -1))
    table = calendars.hours(calendar, first, last, calendars.timezone_of(calendar))
    minutes = (pl.col("close") - pl.col("session")).dt.total_minutes()
    return np.asarray(table.select(minutes).to_series().to_numpy(), dtype=np.int64)


def _minute_ends(calendar: str, day: date, minutes_per_day: int) -> NDArray[np.int64]:
    """Minutes after midnight at which the minute bars of a regular session end, [M]."""
    if calendar == calendars.ROUND_THE_CLOCK:
        opening, closing, lunch = 0, 24 * 60, None
    else:
        last = calendars.bounds(calendar).last
        month = day + timedelta(days=30)
        until = month if last is None else min(month, last)
        # Of a month, the first session with the latest close: an early close is no regular day.
        table = calendars.hours(calendar, day, until, calendars.timezone_of(calendar))
        hours = max(table.iter_rows(named=True), key=lambda row: _minute_of(row["close"]))
        opening, closing = _minute_of(hours["open"]), _minute_of(hours["close"])
        lunch = None if hours["break_start"] is None else hours
    ends = opening + np.arange(1, minutes_per_day + 1)
    if lunch is not None:
        pause, resume = _minute_of(lunch["break_start"]), _minute_of(lunch["break_end"])
        ends = np.where(ends > pause, ends + resume - pause, ends)
    # A bar that ended at midnight would carry the next day's date.
    fits = (ends <= closing) & (ends < 24 * 60)
    if not fits.all():
        raise ConfigError(
            f"data.synthetic.minutes_per_day is {minutes_per_day}, but a session of {calendar} "
            f"has room for {np.count_nonzero(fits)} minute bars; use at most that many"
        )
    return ends.astype(np.int64)


def _minute_of(moment: datetime) -> int:
    return moment.hour * 60 + moment.minute
