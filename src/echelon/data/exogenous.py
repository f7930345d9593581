"""Exogenous series: macro or sentiment values, joined as of what was known.

A value belongs to a period (March) but becomes known when it is published (12 April), and may be
revised later. Joining by period would hand March's inflation to the trades of March, so:

1. `read_exogenous` reads series, period, published, value (and symbol) and refuses rows without
   a publication time; nothing stands in for it.
2. `join_as_of` gives each bar, among the rows published by the bar's decision time, the one of
   the latest period, and of that period the latest publication.

Publication times are naive and local to the exchange; times with an offset are converted. A date
without an hour (midnight) counts as known from the *next* day on, because the hour may have been
after the close. Values published inside their period (flash estimates, sentiment) are welcome.
"""

from __future__ import annotations

import calendar as days_of
import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from echelon.config.data import ExogenousConfig
from echelon.data.calendars import FROM_DATA, ROUND_THE_CLOCK, hours, timezone_of
from echelon.data.sources._columns import SERIES, Sheet
from echelon.data.sources._times import parse_times
from echelon.errors import ConfigError, SourceError
from echelon.types import Floats, Freq, Times

log = logging.getLogger(__name__)

SERIES_SCHEMA: Mapping[str, pl.DataType] = {
    "series": pl.String(),
    "period": pl.Date(),  # last day of the period the value describes
    "published": pl.Datetime("us"),  # from when on it counts as known
    "value": pl.Float64(),
    "symbol": pl.String(),  # null: market-wide
}
"""Columns and types of an exogenous frame."""

MAX_VALUE = 1e30
"""Size of the largest value: money of any country, and within what single precision holds."""

_LEAK = (
    "without it a value would have to be joined by its period, which is over before the value "
    "is known: that leaks the future"
)


@dataclass(frozen=True)
class Exogenous:
    """What was known at each bar, `T` bars of `N` symbols and `K` series."""

    names: tuple[str, ...]  # [K]
    values: Floats  # [T,N,K], NaN where none is in force


def read_exogenous(config: ExogenousConfig, timezone: str = "UTC") -> pl.DataFrame:
    """Read one file of series (CSV, gzip or Parquet) into the columns of `SERIES_SCHEMA`.

    timezone: of the exchange. Rows come sorted by series (in the order of `config.series`), symbol
    and publication.
    """
    path = config.path
    sheet = Sheet.read(path, SERIES, ("series", "period", "value"))
    if "published" not in sheet.columns.by_field:
        raise SourceError(
            f"{path}: no column 'published'; {_LEAK}. Add it; understood names: "
            f"{SERIES['published']}."
        )
    series = sheet.text("series")
    have = sorted(series.drop_nulls().unique())
    for name in config.series:
        if name not in have:
            near = difflib.get_close_matches(name, have, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(have) or 'none'}"
            raise ConfigError(f"data.exogenous.series: {path} has no series {name!r}; {hint}")
    names = list(config.series) or have
    sheet.frame = sheet.frame.filter(series.is_in(names) | series.is_null())
    frame = pl.DataFrame(
        {
            "row": sheet.rows,
            "series": sheet.text("series"),
            "period": _periods(sheet),
            "published": _publication_times(sheet, timezone),
            "value": _values(sheet),
            "symbol": sheet.text("symbol"),
        }
    )
    for field in ("series", "period", "published", "value"):
        why = f"; {_LEAK}" if field == "published" else ""
        sheet.require(field, sheet.text(field).is_null(), f"no {field}{why}")
    if not sheet.problems:
        _note_ambiguous(sheet, frame)
    sheet.refuse("series")
    # Values ahead of their period are usual for estimates, and a sign of swapped columns.
    early = frame.filter(pl.col("published").dt.date() <= pl.col("period"))
    if early.height:
        log.warning(
            "%s: %d of %d values are published before their period ends (first: row %d). That is "
            "right for estimates and sentiment; otherwise check that period and published are not "
            "swapped.",
            *(path, early.height, frame.height, early["row"][0]),
        )
    order = pl.col("series").replace_strict({n: k for k, n in enumerate(names)})
    return frame.sort(order, "symbol", "published", "period").select(list(SERIES_SCHEMA))


def join_as_of(
    frame: pl.DataFrame,
    times: Times,
    symbols: Sequence[str],
    *,
    close_offset: timedelta | NDArray[np.timedelta64] = timedelta(0),
    max_age_days: int | None = None,
    names: Sequence[str] | None = None,
) -> Exogenous:
    """Give every bar the values known when it is decided on.

    frame: as `read_exogenous` returns it
    times[T]: bar times; daily ones are midnight of the session
    close_offset: from a bar's time to its decision, one for all or one per bar [T]; see
        `close_offsets`
    max_age_days: a value published longer ago than this counts as unknown
    names: the series and their order; null: those of the frame
    """
    if names is None:
        names = frame["series"].unique(maintain_order=True).to_list()
    decisions = times.astype("datetime64[us]") + np.asarray(close_offset, dtype="timedelta64[us]")
    values = np.full((len(times), len(symbols), len(names)), np.nan)
    for n, k, line in _lines(frame, symbols, names, max_age_days):
        place = slice(None) if n is None else slice(n, n + 1)
        values[:, place, k] = line.at(decisions)[:, None]
    return Exogenous(tuple(names), values)


def join_all(
    configs: Sequence[ExogenousConfig],
    times: Times,
    symbols: Sequence[str],
    calendar: str,
    timezone: str | None = None,
    published_until: datetime | None = None,
) -> Exogenous:
    """Read every file and join it, each with its own maximal age: the series side by side.

    times[T]: bars; where all are at midnight they are daily and decided on at the session's close
    published_until: a bar's time; pretend that nothing was published after its decision
    """
    timezone = timezone_of(calendar) if timezone is None else timezone
    daily = bool(np.all(times == times.astype("datetime64[D]")))

    def offsets(at: Times) -> timedelta | NDArray[np.timedelta64]:
        return close_offsets(at, calendar, timezone) if daily else timedelta(0)

    parts: list[Exogenous] = []
    for config, frame, names in _read_all(configs, timezone):
        if published_until is not None:
            last = np.array([published_until], dtype="datetime64[us]")
            until = (last + np.asarray(offsets(last), dtype="timedelta64[us]")).item()
            frame = frame.filter(pl.col("published") <= until)
        offset, age = offsets(times), config.max_age_days
        joined = join_as_of(
            frame, times, symbols, close_offset=offset, max_age_days=age, names=names
        )
        parts.append(joined)
    empty = np.empty((len(times), len(symbols), 0))
    values = np.concatenate([empty, *(p.values for p in parts)], axis=2)
    return Exogenous(tuple(n for p in parts for n in p.names), values)


def close_offsets(
    times: Times, calendar: str, timezone: str
) -> timedelta | NDArray[np.timedelta64]:
    """From midnight to the close of each session: timedelta64[us][T], half days included.

    Around the clock a day ends at the next midnight. Where no close is known (the calendar "data",
    a day that is no session) the offset is zero, which is late but never early.
    """
    if calendar == ROUND_THE_CLOCK:
        return timedelta(days=1)
    if calendar == FROM_DATA or not len(times):
        return timedelta(0)
    first, last = (t.astype("datetime64[D]").item() for t in (times.min(), times.max()))
    table = hours(calendar, first, last, timezone)
    sessions = table["session"].to_numpy().astype("datetime64[us]")
    lengths = table["close"].to_numpy().astype("datetime64[us]") - sessions
    if not len(sessions):
        return timedelta(0)
    days = times.astype("datetime64[D]").astype("datetime64[us]")
    at = np.minimum(np.searchsorted(sessions, days), len(sessions) - 1)
    return np.where(sessions[at] == days, lengths[at], np.timedelta64(0, "us"))


class _Line(NamedTuple):
    """One series of one symbol, or of the market: what is in force from each publication on."""

    published: Times  # [P] sorted
    since: Times  # [P] when the value in force was published
    values: Floats  # [P]
    max_age_days: int | None

    @staticmethod
    def from_rows(rows: pl.DataFrame, max_age_days: int | None) -> _Line:
        rows = rows.sort("published", "period")
        published = rows["published"].to_numpy().astype("datetime64[us]")
        period = rows["period"].to_numpy().astype("datetime64[D]").astype(np.int64)
        # After each publication the row in force is the last one of the latest period so far: a
        # late revision of an older period changes nothing.
        latest = period == np.maximum.accumulate(period)
        best = np.maximum.accumulate(np.where(latest, np.arange(len(period)), 0))
        return _Line(published, published[best], rows["value"].to_numpy()[best], max_age_days)

    def at(self, decisions: Times) -> Floats:
        """The value[T] in force at each decision time, NaN where there is none."""
        seen = np.searchsorted(self.published, decisions, side="right") - 1
        row = np.maximum(seen, 0)
        line = np.where(seen >= 0, self.values[row], np.nan)
        if self.max_age_days is not None:
            stale = decisions - self.since[row] > np.timedelta64(self.max_age_days, "D")
            line = np.where(stale, np.nan, line)
        return np.asarray(line, dtype=np.float64)


class ExogenousStream:
    """The series of some files as known at one bar after the other: rows of what `join_all` gives.

    Files are read when it is made: what is published later comes with another, or with the bars.
    """

    def __init__(
        self,
        configs: Sequence[ExogenousConfig],
        symbols: Sequence[str],
        freq: Freq,
        calendar: str,
        timezone: str | None = None,
    ) -> None:
        self._symbols, self._freq, self._calendar = tuple(symbols), freq, calendar
        self._timezone = timezone_of(calendar) if timezone is None else timezone
        self._lines: list[tuple[int | slice, int, _Line]] = []
        self.names: tuple[str, ...] = ()
        for config, frame, names in _read_all(configs, self._timezone):
            for n, k, line in _lines(frame, self._symbols, names, config.max_age_days):
                self._lines.append((slice(None) if n is None else n, len(self.names) + k, line))
            self.names += tuple(names)

    def at(self, time: np.datetime64) -> Floats:
        """[N,K] what is in force at the decision on the bar of `time`, NaN where nothing is."""
        times = np.array([time], dtype="datetime64[us]")
        daily = self._freq == "1d"
        offset = close_offsets(times, self._calendar, self._timezone) if daily else timedelta(0)
        decision = times + np.asarray(offset, dtype="timedelta64[us]")
        values = np.full((len(self._symbols), len(self.names)), np.nan)
        for n, k, line in self._lines:
            values[n, k] = line.at(decision)[0]
        return values


def _read_all(
    configs: Sequence[ExogenousConfig], timezone: str
) -> Iterator[tuple[ExogenousConfig, pl.DataFrame, list[str]]]:
    """Each file with its rows and series, which no earlier file has."""
    known: set[str] = set()
    for config in configs:
        frame = read_exogenous(config, timezone)
        names = frame["series"].unique(maintain_order=True).to_list()
        twice = sorted(known & set(names))
        if twice:
            raise ConfigError(
                f"data.exogenous: the series {twice[0]!r} of {config.path} is in an earlier file "
                "too. Choose each series from one file, by `series`."
            )
        known |= set(names)
        yield config, frame, names


def _lines(
    frame: pl.DataFrame, symbols: Sequence[str], names: Sequence[str], max_age_days: int | None
) -> Iterator[tuple[int | None, int, _Line]]:
    """(place of the symbol, None: all; place of the series; its line) of each series in `names`."""
    column = {s: n for n, s in enumerate(symbols)}
    layer = {s: k for k, s in enumerate(names)}
    groups = frame.partition_by("series", "symbol", as_dict=True, maintain_order=True)
    for (series, symbol), rows in groups.items():
        if series in layer and (symbol is None or symbol in column):
            n = None if symbol is None else column[symbol]
            yield n, layer[series], _Line.from_rows(rows, max_age_days)


def _periods(sheet: Sheet) -> pl.Series:
    """The last day of each period: a day, month, quarter or year."""
    cells = sheet.cells("period")
    if isinstance(cells.dtype, pl.Date | pl.Datetime):
        return cells.cast(pl.Date)
    text = sheet.text("period")
    ends = {period: _period_end(period) for period in text.unique().drop_nulls()}
    periods = text.replace_strict(ends, default=None, return_dtype=pl.Date)
    remedy = "Write it as 2020-03-31, 2020-03, 2020Q1 or 2020"
    sheet.note_unread("period", periods.is_null() & text.is_not_null(), "is no period", remedy)
    return periods


def _period_end(text: str) -> date | None:
    """The last day of what `text` names; None where it names nothing."""
    year = r"(?P<y>\d{4})"
    forms = (
        rf"{year}[-/.](?P<m>\d{{1,2}})[-/.](?P<d>\d{{1,2}})(?:[ T]00:00(?::00(?:\.0+)?)?)?",
        rf"{year}(?P<m>\d{{2}})(?P<d>\d{{2}})",
        rf"{year}年(?P<m>\d{{1,2}})月(?P<d>\d{{1,2}})日",
        rf"{year}[-/.]?(?P<m>\d{{2}})",
        rf"{year}年(?P<m>\d{{1,2}})月",
        rf"{year}[- ]?Q(?P<q>[1-4])",
        rf"{year}年第?(?P<q>[1-4])季度?",
        rf"{year}年?",
    )
    for form in forms:
        match = re.fullmatch(form, text, re.IGNORECASE)
        if match is None:
            continue
        parts = {k: int(v) for k, v in match.groupdict().items()}
        month = parts.get("m", 3 * parts.get("q", 4))
        if not (1 <= month <= 12 and parts["y"] >= 1):
            return None
        last = days_of.monthrange(parts["y"], month)[1]
        day = parts.get("d", last)
        return date(parts["y"], month, day) if 1 <= day <= last else None
    return None


def _publication_times(sheet: Sheet, timezone: str) -> pl.Series:
    """From when on each row counts as known, naive exchange-local time."""
    cells = sheet.cells("published")
    parsed = parse_times(cells, freq="1min", timezone=timezone)
    times, aware = parsed["time"], parsed["aware"]
    # A day without an hour has no offset either.
    plain = ~aware & (times != times.dt.truncate("1d"))
    if aware.any() and plain.any():
        row, cell = sheet.rows.filter(plain)[0], cells.filter(plain)[0]
        message = f"{cell!r} has no time zone while other rows have one"
        remedy = "Write all publication times with an offset, or none"
        sheet.note(int(row), "published", message, remedy)
    remedy = "Write it as 2020-04-12 08:30:00 (or 2020-04-12 where the hour is unknown)"
    unread = times.is_null() & sheet.text("published").is_not_null()
    sheet.note_unread("published", unread, "is no date or time", remedy)
    # Midnight means that the hour is unknown: known from the next day on.
    midnight = (times == times.dt.truncate("1d")).fill_null(False)
    return times.dt.offset_by("1d").zip_with(midnight, times)


def _values(sheet: Sheet) -> pl.Series:
    cells, text = sheet.cells("value"), sheet.text("value")
    numbers = cells if cells.dtype.is_numeric() else text
    values = numbers.cast(pl.Float64, strict=cells.dtype.is_numeric())
    usable = (values.abs() <= MAX_VALUE).fill_null(False) & values.is_not_nan().fill_null(False)
    remedy = "Write a plain number (no %, no thousands separators), or remove the row"
    what = f"is no number of up to {MAX_VALUE:g}"
    sheet.note_unread("value", text.is_not_null() & ~usable, what, remedy)
    return values


def _note_ambiguous(sheet: Sheet, frame: pl.DataFrame) -> None:
    """Two values at once, and series that are both market-wide and per symbol."""
    key = ("series", "symbol", "period", "published")
    for row in frame.filter(~pl.struct(key).is_first_distinct())["row"]:
        message = "a second value of the same series and period, published at the same time"
        remedy = "Keep one of them, or give the revision its own publication time"
        sheet.note(row, "published", message, remedy)
    mixed = (
        frame.group_by("series", maintain_order=True)
        .agg(
            row=pl.col("row").filter(pl.col("symbol").is_null()).first(),
            own=pl.col("symbol").is_not_null().any(),
        )
        .filter("own")
        .drop_nulls("row")
    )
    for series, row in mixed.select("series", "row").rows():
        message = f"series {series!r} has rows with and without a symbol"
        sheet.note(row, "symbol", message, "Fill the symbol in on all, or split the series in two")
