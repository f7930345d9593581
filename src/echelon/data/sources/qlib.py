"""A Qlib data directory, read natively: day and 1-minute bars without pyqlib.

The format (pyqlib 0.9.7, `FileFeatureStorage` and `scripts/dump_bin.py`):

- `calendars/<freq>.txt`: one time per line, ascending;
- `instruments/<market>.txt`: symbol, first and last day, tab-separated, several lines per symbol;
- `features/<symbol, lower case>/<field>.<freq>.bin`: little-endian float32; the first number is
  the calendar index of the second. Names that Windows reserves (CON, NUL …) get `_qlib_` before.

Qlib's prices are adjusted: price = traded price × factor, volume = traded volume / factor. Where
every symbol has a factor we deliver traded prices with the factor next to them, otherwise the
adjusted prices as they are. NaN closes are suspensions and give no row.

The last day of a line of `all.txt` is that of the last bar in the dump, which says nothing of a
delisting: so `delisted` stays open (silence decides, `data.delist_after`), and only a named market
(csi300 …) has membership.

Qlib names a minute by its start (09:30 to 14:59 for A-shares), Echelon by its end: 1-minute
times are moved by one minute unless the calendar holds the session's close, which no bar starts at.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.config import Config
from echelon.data import calendars
from echelon.data.bars import MAX_SYMBOL, PRICES, RawFrame, conform
from echelon.data.sources import PathSource
from echelon.data.sources._tables import reading_file
from echelon.errors import Problem, SourceError, shorten
from echelon.files import sha256_file
from echelon.sources import SourceInfo
from echelon.types import Floats, Floats32, Times

_FREQS: Mapping[str, str] = {"1d": "day", "1min": "1min"}
_RESERVED = frozenset(
    {"CON", "PRN", "AUX", "NUL"} | {f"{port}{i}" for port in ("COM", "LPT") for i in range(10)}
)
_ELSEWHERE = re.compile(r"[/\\\x00-\x1f]|^\.\.?$")
_A_SHARE = re.compile(r"(?:SH|SZ|BJ)\d{6}|\d{6}\.(?:SH|SZ|BJ)", re.IGNORECASE)
# Price and factor are each off by up to 2^-24 of their size, so their quotient by twice that.
_NOISE = 2.1 * 2.0**-24
_REDUMP = "Dump the symbol again, or take it out of the instruments file"
_ALL = "all"
_VERSION = "2"


class QlibSource(PathSource):
    """Bars of a Qlib data directory; the intervals of a named `market` are its membership."""

    def __init__(
        self,
        path: Path,
        *,
        market: str = _ALL,
        benchmark: str | None = None,
        **query: Any,  # noqa: ANN401 (see PathSource)
    ) -> None:
        super().__init__(path, **query)
        if self._freq not in _FREQS:
            raise SourceError(
                f"data.freq: a Qlib directory has day and 1min bars, not {self._freq}. "
                "Use data.freq=1d or data.freq=1min."
            )
        if not path.is_dir():
            raise SourceError(
                f"{path}: no such directory. Set data.path to a Qlib data directory, the one with "
                "calendars, instruments and features in it."
            )
        self._suffix = _FREQS[self._freq]
        self._market = market
        self._benchmark = benchmark
        self._problems: list[Problem] = []

    def info(self) -> SourceInfo:
        """Describe the directory; reads it once, for its hash."""
        have = {
            name
            for name in (*PRICES, "volume", "amount", "vwap")
            if any(self._bin_path(s, name).exists() for s in self._symbols)
        }
        fields = (have - {"vwap"}) | {"close", *(["factor"] if self._has_factor else [])}
        if {"vwap", "volume"} <= have:
            fields.add("amount")
        return SourceInfo(
            name="qlib",
            freq=self._freq,
            calendar=self._calendar,
            timezone=self._timezone,
            price_basis="raw" if self._has_factor else "adjusted",
            fields=frozenset(fields),
            fingerprint=self._fingerprint(),
        )

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Yield one frame per symbol; its `row` k is the number at byte 4·k of the close file."""
        self._problems = []
        times = self.times()
        for symbol in self._symbols:
            if symbol == self._benchmark:
                continue
            frame = self._bars(symbol, times, self._problems)
            if frame is None:
                continue
            if since is not None and symbol in since:
                frame = frame.filter(pl.col("time") >= since[symbol])
            yield RawFrame(conform(frame), str(self._bin_path(symbol, "close")))

    def problems(self) -> list[Problem]:
        return list(self._problems)

    def instruments(self) -> pl.DataFrame | None:
        """First day of each symbol by instruments/all.txt; nothing where there is no such file."""
        if not self._whole.exists():
            return None
        known = _read_instruments(self._whole).filter(pl.col("symbol").is_in(set(self._symbols)))
        return known.group_by("symbol").agg(listed=pl.col("first").min()).sort("symbol")

    def membership(self) -> pl.DataFrame | None:
        """The intervals of a named market; open-ended where they reach the calendar's last day."""
        if self._market.lower() == _ALL:
            return None
        last_day: datetime = self._stamps[-1].astype(datetime)
        end = pl.when(pl.col("last") < last_day.date()).then(pl.col("last").dt.offset_by("1d"))
        return (
            self._intervals.filter(pl.col("symbol") != (self._benchmark or ""))
            .select("symbol", start="first", end=end)
            .sort("symbol", "start")
        )

    def benchmark(self) -> pl.DataFrame | None:
        if self._benchmark is None:
            return None
        problems: list[Problem] = []
        bars = self._bars(self._benchmark, self.times(), problems)
        if bars is None or problems:
            raise SourceError(
                f"data.benchmark: {self._benchmark} cannot be read as {self._suffix} bars: "
                f"{problems[0].file}: {problems[0].message}. Name an index that the directory has."
            )
        return bars.select("time", "close")

    def times(self) -> Times:
        """The calendar as ends of bars, datetime64[us][T]: it may name minutes by their start."""
        if self._freq == "1d":
            return self._stamps
        later = np.asarray(self._stamps + np.timedelta64(1, "m"))
        if self._calendar in (calendars.ROUND_THE_CLOCK, calendars.FROM_DATA):
            return later
        first, last = (s.astype(datetime).date() for s in self._stamps[[0, -1]])
        closes = calendars.hours(self._calendar, first, last, self._timezone)["close"].to_numpy()
        ends = np.isin(closes.astype("datetime64[us]"), self._stamps).any()
        return self._stamps if ends else later

    @cached_property
    def _stamps(self) -> Times:
        return _read_calendar(self._path / "calendars" / f"{self._suffix}.txt")

    @property
    def _whole(self) -> Path:
        return self._path / "instruments" / f"{_ALL}.txt"

    @cached_property
    def _intervals(self) -> pl.DataFrame:
        path = self._path / "instruments" / f"{self._market.lower()}.txt"
        if _ELSEWHERE.search(self._market) or not path.exists():
            known = ", ".join(sorted(p.stem for p in path.parent.glob("*.txt"))) or "none"
            raise SourceError(f"{path}: no such market. Markets in this directory: {known}.")
        return _read_instruments(path)

    @cached_property
    def _symbols(self) -> list[str]:
        return sorted(set(self._intervals["symbol"]))

    @cached_property
    def _calendar(self) -> str:
        if self._wanted_calendar != "auto":
            return self._wanted_calendar
        n_a_shares = sum(bool(_A_SHARE.fullmatch(s)) for s in self._symbols)
        return "XSHG" if 2 * n_a_shares > len(self._symbols) else calendars.FROM_DATA

    @property
    def _timezone(self) -> str:
        return self._wanted_timezone or calendars.timezone_of(self._calendar)

    @cached_property
    def _has_factor(self) -> bool:
        """Whether every symbol that has closes has a factor."""
        with_close = [s for s in self._symbols if self._bin_path(s, "close").exists()]
        return bool(with_close) and all(self._bin_path(s, "factor").exists() for s in with_close)

    def _bin_path(self, symbol: str, field: str) -> Path:
        folder = f"_qlib_{symbol}" if symbol.upper() in _RESERVED else symbol
        return self._path / "features" / folder.lower() / f"{field}.{self._suffix}.bin"

    def _bars(self, symbol: str, times: Times, problems: list[Problem]) -> pl.DataFrame | None:
        """Bars of one symbol, or None; what is wrong is added to `problems`."""
        close_path = self._bin_path(symbol, "close")
        if not close_path.exists():
            problems.append(self._no_close(symbol, close_path))
            return None
        columns: dict[str, Floats] = {}
        spans: dict[str, tuple[int, int]] = {}
        for field in (*PRICES, "volume", "amount", "vwap", "factor"):
            path = self._bin_path(symbol, field)
            if not path.exists():
                continue
            try:
                start, values = read_bin(path, len(times))
            except SourceError as error:
                what = str(error).removeprefix(f"{path}: ").rstrip(".")
                problems.append(Problem(str(path), None, field, what, _REDUMP))
                return None
            spans[field] = (start, len(values))
            columns[field] = np.full(len(times), np.nan)
            columns[field][start : start + len(values)] = values
        start, length = spans["close"]
        for field, (first, count) in spans.items():
            if first < start or first + count > start + length:
                # Those days have no close: they would be dropped, and nobody would know why.
                what = (
                    f"{symbol} has {field} for {count} days from calendar row {first}, but close "
                    f"only for {length} from row {start}"
                )
                problems.append(Problem(str(close_path), None, "close", what, _REDUMP))
                return None
        rows = np.flatnonzero(~np.isnan(columns["close"]))
        frame = pl.DataFrame(
            {"time": times[rows]} | {name: values[rows] for name, values in columns.items()},
        ).with_columns(symbol=pl.lit(symbol), row=pl.Series(rows - start + 1))
        frame = frame.with_columns(pl.col(*columns).fill_nan(None))
        if "amount" not in columns and {"vwap", "volume"} <= columns.keys():
            # In the product the adjustment cancels out.
            frame = frame.with_columns(amount=pl.col("vwap") * pl.col("volume"))
        if not self._has_factor:
            return frame.drop("factor", strict=False)
        return self._undo_adjustment(frame, symbol, problems)

    def _no_close(self, symbol: str, path: Path) -> Problem:
        listed, folder = f"{symbol} is in instruments/{self._market.lower()}.txt", path.parent
        if not folder.is_dir():
            return Problem(str(folder), None, None, f"{listed} but has no directory", _REDUMP)
        if any(folder.glob(f"*.{self._suffix}.bin")):
            return Problem(str(path), None, None, f"{listed} but has no {path.name}", _REDUMP)
        # Minutes of a few symbols next to the days of many are usual.
        what = f"{listed} but has no {self._suffix} data"
        remedy = "Nothing to do, unless it should have"
        return Problem(str(folder), None, None, what, remedy, "warning")

    def _undo_adjustment(
        self, frame: pl.DataFrame, symbol: str, problems: list[Problem]
    ) -> pl.DataFrame:
        """Undo Qlib's adjustment; days without a usable factor are noted and left out."""
        usable = pl.col("factor").is_not_null() & (pl.col("factor") > 0)
        path = str(self._bin_path(symbol, "factor"))
        remedy = "Dump the symbol again: the traded price is close / factor"
        for row, time, factor in frame.filter(~usable).select("row", "time", "factor").rows():
            what = f"{symbol} has a close at {time} but the factor is {factor}"
            problems.append(Problem(path, int(row), "factor", what, remedy))
        frame = frame.filter(usable)
        factor = frame["factor"].to_numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are judged like any bar
            changed = {
                name: shortest_decimal(frame[name].to_numpy() / factor, (2, 3, 4))
                for name in PRICES
                if name in frame.columns
            }
            if "volume" in frame.columns:
                changed["volume"] = shortest_decimal(frame["volume"].to_numpy() * factor, (0,))
        return frame.with_columns(pl.Series(n, v) for n, v in changed.items()).with_columns(
            pl.col(*changed).fill_nan(None)
        )

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"qlib-{_VERSION} {self._freq} {self._market}".encode())
        digest.update(f" {self._calendar} {self._timezone} {self._benchmark}".encode())
        market = self._path / "instruments" / f"{self._market.lower()}.txt"
        files = [self._path / "calendars" / f"{self._suffix}.txt", *sorted({market, self._whole})]
        for symbol in sorted({*self._symbols, *([self._benchmark] if self._benchmark else [])}):
            folder = self._bin_path(symbol, "close").parent
            files += sorted(folder.glob(f"*.{self._suffix}.bin"))
        for file in files:
            if file.exists():
                digest.update(f"{file.relative_to(self._path)} {sha256_file(file)}\n".encode())
        return digest.hexdigest()


def from_config(config: Config) -> QlibSource:
    data = config.data
    return QlibSource.from_config(config, market=data.qlib_market, benchmark=data.benchmark)


def read_bin(path: Path, n_times: int) -> tuple[int, Floats32]:
    """(start, values[L]) of one feature file: the first is at index `start` of `n_times`."""
    size = path.stat().st_size
    if size < 4 or size % 4:
        raise SourceError(
            f"{path}: {size} bytes are not a start index and float32 values. The file is cut "
            "short: dump the symbol again."
        )
    with path.open("rb") as handle:  # what is longer than the calendar is refused below
        numbers = np.frombuffer(handle.read(4 * (n_times + 2)), dtype="<f4")
    head, values = float(numbers[0]), numbers[1:].astype(np.float32)
    if not (head >= 0 and head.is_integer()):
        raise SourceError(
            f"{path}: the first number, {head}, is not a calendar index. Dump the symbol again."
        )
    start = int(head)
    if start + len(values) > n_times:
        raise SourceError(
            f"{path}: {len(values)} values from index {start} on do not fit the calendar of "
            f"{n_times} entries. The calendar is older than the file: dump both again."
        )
    return start, values


def shortest_decimal(values: Floats, decimals: tuple[int, ...]) -> Floats:
    """Values[L] rounded to the fewest of `decimals` that float32 cannot tell from the value.

    Two float32 numbers divided give a price back only to about 1.2e-7 of its size: 10.2500003.
    """
    result = values.copy()
    for places in sorted(decimals, reverse=True):
        rounded = np.round(values, places)
        near = np.abs(values - rounded) <= _NOISE * np.abs(values)
        result = np.where(near, rounded, result)
    return result


def _read_calendar(path: Path) -> Times:
    """A calendar file: datetime64[us][T], ascending."""
    if not path.exists():
        others = ", ".join(sorted(p.stem for p in path.parent.glob("*.txt"))) or "none"
        raise SourceError(
            f"{path}: no such calendar. Calendars in this directory: {others}. Set data.path to "
            "the directory with calendars in it, and data.freq to one it has."
        )
    stamps = []
    for number, line in _lines(path):
        stamp = _stamp(line)
        if stamp is None:
            raise SourceError(
                f"{path}, row {number}: {shorten(repr(line), 80)} is not a time. Write it as "
                "2020-01-02 or 2020-01-02 09:30:00, in exchange-local time."
            )
        stamps.append(stamp)
    times = np.array(stamps, dtype="datetime64[us]")
    if not times.size:
        raise SourceError(f"{path}: the calendar is empty. Dump the directory again.")
    late = np.flatnonzero(times[1:] <= times[:-1])
    if late.size:
        raise SourceError(
            f"{path}: {times[late[0] + 1]} does not come after {times[late[0]]}. Sort the calendar "
            "and dump the features again: their values are counted along it."
        )
    return times


def _read_instruments(path: Path) -> pl.DataFrame:
    """Symbol, first and last day (included) of each line of an instruments file."""
    intervals = []
    for number, line in _lines(path):
        symbol, first, last, *_ = [*(c.strip() for c in line.split("\t")), "", "", ""]
        begin, end = _stamp(first), _stamp(last)
        if not symbol or begin is None or end is None:
            raise SourceError(
                f"{path}, row {number}: {shorten(repr(line), 80)} is not symbol, first day and "
                "last day, separated by tabs. Mend the line."
            )
        if _ELSEWHERE.search(symbol) or len(symbol) > MAX_SYMBOL:
            raise SourceError(
                f"{path}, row {number}: {shorten(repr(symbol), 80)} is no symbol: it names a "
                "directory of features, so it has neither slashes nor control characters, and is "
                f"no longer than {MAX_SYMBOL}. Mend the line."
            )
        intervals.append((symbol, begin.date(), end.date()))
    if not intervals:
        raise SourceError(f"{path}: no instruments in it. Dump the directory again.")
    return pl.DataFrame(intervals, schema=["symbol", "first", "last"], orient="row")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with reading_file(path):
        text = path.read_text(encoding="utf-8-sig")
    return ((k, line) for k, line in enumerate(text.splitlines(), start=1) if line.strip())


def _stamp(text: str) -> datetime | None:
    try:
        stamp = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return stamp if stamp.tzinfo is None else None
