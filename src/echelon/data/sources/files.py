"""Bars from CSV and Parquet files, and the small files next to them.

Bars are one long file, or a directory of one file per symbol:

1. Every file is read once as a stream (`_tables.inspect`): hash, encoding, columns. All files
   that cannot be used are named together.
2. Columns are recognised (`_columns.recognise`); every file must offer the same fields.
3. Calendar, time zone and price basis are settled, from the options or from a first look.
4. `frames` reads block by block; cells that mean nothing are set aside with their row numbers.

Index membership, facts about instruments and the benchmark are read whole, and refused with every
problem listed.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import polars as pl

from echelon.config import Config
from echelon.data.bars import RawFrame
from echelon.data.calendars import ROUND_THE_CLOCK, timezone_of
from echelon.data.sources import PathSource, _tables
from echelon.data.sources._columns import INSTRUMENTS, MEMBERS, ColumnMap, Reader, Sheet, recognise
from echelon.data.sources._tables import ROW, stem_of
from echelon.data.validate import validate
from echelon.errors import InvalidDataError, Problem, SourceError, UniverseError
from echelon.sources import SourceInfo
from echelon.types import Freq, PriceBasis

_A_SHARE = re.compile(r"(?:(?:SH|SZ|BJ)\.?)?\d{6}|\d{6}\.(?:SH|SZ|BJ|SS|XSHG|XSHE)", re.IGNORECASE)
_A_SHARE_NUMBER = re.compile(r"(?:00|30|60|68|20|90|43|83|87|92)\d{4}")
# Only BTC is safe without its counter currency: ETH, SOL and others are, or were, stock tickers.
_COIN = re.compile(
    r"X?BTC.*|[A-Z0-9]{2,10}[-_/]?(?:USDT|USDC|BUSD|PERP)|[A-Z0-9]{2,10}[-_/](?:USD|BTC|ETH)",
    re.IGNORECASE,
)


class _File(NamedTuple):
    facts: _tables.FileFacts
    columns: ColumnMap


class _FileSource(PathSource):
    """What CSV and Parquet have in common; the options are those of `data`."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    other: ClassVar[str]

    def __init__(
        self,
        path: Path,
        *,
        columns: Mapping[str, str] = {},
        price_basis: PriceBasis | Literal["auto"] = "auto",
        **market: Any,  # noqa: ANN401 (see PathSource)
    ) -> None:
        super().__init__(path, **market)
        self._own = dict(columns)
        self._basis_wanted = price_basis
        self._problems: list[Problem] = []
        self._rejected: list[pl.DataFrame] = []

    def info(self) -> SourceInfo:
        """Describe the data; reads the bytes of every file once, for the fingerprint."""
        return self._info

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Yield the files' bars block by block, in the order of the files."""
        del since  # a file is read whole: what it says about the past may have changed
        info = self._info
        self._problems, self._rejected = [], []
        for file in self._files:
            origin = str(file.facts.path)
            reader = self._reader(file, info.timezone, pad_symbols=pads_symbols(info.calendar))
            for piece in _tables.pieces(file.facts, file.columns.names):
                bars, problems, rejected_rows = reader.to_bars(piece.frame)
                self._problems += [*piece.problems, *problems]
                self._rejected += [r for r in (piece.rejected_rows, rejected_rows) if r.height]
                if bars.height:
                    yield RawFrame(self._whole_days(bars, origin), origin)

    def problems(self) -> list[Problem]:
        return list(self._problems)

    def rejected_rows(self) -> pl.DataFrame:
        return pl.concat([_tables.rejects(str(self._path)), *self._rejected])

    def _reader(self, file: _File, timezone: str, *, pad_symbols: bool) -> Reader:
        path = file.facts.path
        return Reader(
            file.columns, str(path), self._freq, timezone, stem_of(path), pad_symbols=pad_symbols
        )

    def _whole_days(self, bars: pl.DataFrame, origin: str) -> pl.DataFrame:
        """Put daily bars at midnight; refuse a file whose bars are of another length."""
        day = pl.col("time").dt.truncate("1d")
        at_midnight = bars.select((pl.col("time") == day).all()).item()
        if self._freq != "1d":
            if at_midnight and bars["time"].n_unique() > 1:
                raise SourceError(
                    f"{origin}: the times have no time of day, but data.freq is {self._freq}. "
                    "Set data.freq: 1d, or give the file of intraday bars."
                )
            return bars
        if at_midnight:
            return bars
        several = bars.group_by(day.alias("day"), "symbol").agg(n=pl.col("time").n_unique())
        several = several.filter(pl.col("n") > 1).sort("day", "symbol")
        if several.height:
            row = several.row(0)
            raise SourceError(
                f"{origin}: {row[1]} has {row[2]} bars at different times on {row[0]:%Y-%m-%d}, "
                "but data.freq is 1d. Set data.freq: 1min or 5min, or give the file of daily bars."
            )
        return bars.with_columns(time=day)

    @cached_property
    def _files(self) -> tuple[_File, ...]:
        files: list[_File] = []
        unusable: list[str] = []
        problems: list[Problem] = []
        for path in self._paths():
            try:
                facts = _tables.inspect(path)
                columns = recognise(facts.columns, file=str(path), own=self._own)
                files.append(_File(facts, columns))
            except SourceError as error:
                unusable.append(str(error))
            except InvalidDataError as error:
                problems += error.problems
        if unusable:
            raise SourceError("\n".join(unusable))
        # Of a file that lacks a field which others have, the bars would be half empty.
        union = frozenset[str]().union(*(f.columns.fields for f in files))
        message = "the file has no such column, others next to it have"
        remedy = "Add the column, or map it to 'ignore' in data.columns"
        problems += [
            Problem(str(file.facts.path), None, lacking, message, remedy)
            for file in files
            for lacking in sorted(union - file.columns.fields)
        ]
        if problems:
            raise InvalidDataError(problems, f"{self._path}: the columns cannot be used")
        return tuple(files)

    def _paths(self) -> list[Path]:
        path = self._path
        files = [f for f in _tables.files_below(path) if _tables.suffix_of(f, self.suffixes)]
        if not files:
            raise SourceError(
                f"{path}: no {self.name} files there ({', '.join(self.suffixes)}). Use "
                f"data.source: {self.other}, or check data.path and how the files are named."
            )
        return files

    @cached_property
    def _info(self) -> SourceInfo:
        calendar = self._wanted_calendar
        if calendar == "auto":
            calendar = self._guess_calendar()
        return SourceInfo(
            name=self.name,
            freq=self._freq,
            calendar=calendar,
            timezone=self._wanted_timezone or timezone_of(calendar),
            price_basis=self._price_basis(),
            fields=self._files[0].columns.fields,
            fingerprint=self._fingerprint(calendar),
        )

    def _price_basis(self) -> PriceBasis:
        if self._basis_wanted != "auto":
            return self._basis_wanted
        have = self._files[0].columns.by_field
        if "pre_close" in have or "factor" in have:
            return "raw"
        return "split_adjusted" if "adj_close" in have else "adjusted"

    def _guess_calendar(self) -> str:
        """A-share codes → XSHG; coins, or bars at week-ends → 24/7; otherwise XNYS."""
        file = self._files[0]
        reader = self._reader(file, "UTC", pad_symbols=False)
        first = next(_tables.pieces(file.facts, file.columns.names), None)
        if first is None:
            return "XNYS"
        bars = reader.to_bars(first.frame).frame
        symbols = bars["symbol"].drop_nulls().unique().to_list()
        if "symbol" not in file.columns.by_field:
            symbols = [stem_of(f.facts.path) for f in self._files]
        elif first.frame[file.columns.by_field["symbol"].name].dtype.is_integer():
            codes = [s.zfill(6) for s in symbols]
            return "XSHG" if _mostly(_A_SHARE_NUMBER, codes) else "XNYS"
        if _mostly(_A_SHARE, symbols):
            return "XSHG"
        if _mostly(_COIN, symbols) or _round_the_clock(bars["time"].drop_nulls(), self._freq):
            return ROUND_THE_CLOCK
        return "XNYS"

    def _fingerprint(self, calendar: str) -> str:
        options = {
            "reader": 2,  # counts changes in what is made of the same bytes
            "freq": self._freq,
            "calendar": calendar,
            "timezone": self._wanted_timezone,
            "columns": self._own,
            "price_basis": self._price_basis(),
            "files": [[stem_of(f.facts.path), f.facts.digest] for f in self._files],
            # What it once read itself; the names of datasets are made from this hash.
            **{"benchmark": None, "beside": [None, None, None]},
        }
        return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


class CsvSource(_FileSource):
    name, suffixes, other = "csv", _tables.TEXT_SUFFIXES, "parquet"


class ParquetSource(_FileSource):
    name, suffixes, other = "parquet", _tables.PARQUET_SUFFIXES, "csv"


def from_config(config: Config) -> _FileSource:
    data = config.data
    kind = next(k for k in (CsvSource, ParquetSource) if k.name == data.source)
    return kind.from_config(config, columns=data.columns, price_basis=data.price_basis)


def pads_symbols(calendar: str) -> bool:
    """Whether symbols of the market are six-digit codes, so that short numbers lost zeros."""
    return calendar == "XSHG"


def _mostly(pattern: re.Pattern[str], symbols: Iterable[str]) -> bool:
    hits = [pattern.fullmatch(s) is not None for s in symbols]
    return bool(hits) and sum(hits) >= 0.9 * len(hits)


def _round_the_clock(times: pl.Series, freq: Freq) -> bool:
    """Bars at week-ends as on other days, or within a few days at nearly every hour."""
    days = times.dt.date().unique()
    if len(days) >= 7:
        return bool((days.dt.weekday() >= 6).mean() > 0.2)  # type: ignore[operator]
    return freq != "1d" and times.dt.hour().n_unique() >= 23


def read_membership(
    path: Path, *, pad_symbols: bool = False, own: Mapping[str, str] | None = None
) -> pl.DataFrame:
    """Membership intervals: symbol, start, end (Date; end exclusive, null = still in), sorted."""
    sheet = Sheet.read(path, MEMBERS, ("symbol", "start"), own)
    table = pl.DataFrame(
        {
            ROW: sheet.rows,
            "symbol": sheet.symbols(pad=pad_symbols),
            "start": sheet.dates("start", needed=True),
            "end": sheet.dates("end"),
        }
    ).sort("symbol", "start", maintain_order=True)
    for row, symbol, start, end in table.filter(pl.col("end") <= pl.col("start")).iter_rows():
        message = f"{symbol} leaves on {end}, not after it joins on {start}"
        sheet.note(row, "end", message, "The end is the first day out: write a later day, or none")
    for row, symbol, start, earlier in _overlaps(table).iter_rows():
        message = f"{symbol} joins on {start} while it is still in by row {earlier}"
        sheet.note(row, "start", message, "End the earlier interval by then, or join the two")
    sheet.refuse()
    return table.select("symbol", "start", "end")


def _overlaps(table: pl.DataFrame) -> pl.DataFrame:
    last = pl.col("until").cum_max().over("symbol")
    return (
        table.drop_nulls(("symbol", "start"))
        .with_columns(until=pl.col("end").fill_null(date.max))
        .with_columns(holder=pl.when(pl.col("until") == last).then(pl.col(ROW)))
        .with_columns(
            before=last.shift(1).over("symbol"),
            other=pl.col("holder").forward_fill().shift(1).over("symbol"),
        )
        .filter(pl.col("start") < pl.col("before"))
        .select(ROW, "symbol", "start", "other")
    )


def read_instruments(
    path: Path, *, pad_symbols: bool = False, own: Mapping[str, str] | None = None
) -> pl.DataFrame:
    """Facts about symbols: symbol, listed, delisted (Date), reason, name; null where unknown."""
    sheet = Sheet.read(path, INSTRUMENTS, ("symbol",), own)
    table = pl.DataFrame(
        {
            ROW: sheet.rows,
            "symbol": sheet.symbols(pad=pad_symbols),
            "listed": sheet.dates("listed"),
            "delisted": sheet.dates("delisted"),
            "reason": sheet.text("reason"),
            "name": sheet.text("name"),
        }
    )
    first = pl.col(ROW).first().over("symbol")
    again = table.with_columns(first=first).filter(pl.col(ROW) != pl.col("first"))
    for row, symbol, kept in again.drop_nulls("symbol").select(ROW, "symbol", "first").iter_rows():
        sheet.note(row, "symbol", f"{symbol} is in row {kept} already", "Keep one row per symbol")
    gone = table.filter(pl.col("delisted") <= pl.col("listed"))
    for row, symbol, listed, delisted in gone.drop("reason", "name").iter_rows():
        message = f"{symbol} is delisted on {delisted}, not after it lists on {listed}"
        sheet.note(row, "delisted", message, "Correct one of the two dates")
    sheet.refuse()
    return table.drop(ROW)


def read_benchmark(
    path: Path,
    symbol: str | None = None,
    *,
    freq: Freq = "1d",
    timezone: str = "UTC",
    pad_symbols: bool = False,
) -> pl.DataFrame:
    """The benchmark index: time, close, sorted. `symbol` may be left out where there is but one."""
    facts = _tables.inspect(path)
    columns = recognise(facts.columns, file=str(path))
    reader = Reader(
        columns, str(path), freq, timezone, symbol or stem_of(path), pad_symbols=pad_symbols
    )
    bars, problems, _ = reader.to_bars(_tables.read_whole(facts, columns.names))
    if "symbol" in columns.by_field:
        symbols = bars["symbol"].drop_nulls().unique().sort().to_list()
        shown = ", ".join(symbols[:20]) + (" …" if len(symbols) > 20 else "")
        if symbol is None and len(symbols) != 1:
            raise UniverseError(
                f"{path}: holds {len(symbols)} symbols ({shown}). Say which is the benchmark: "
                "data.benchmark."
            )
        if symbol is not None and symbol not in symbols:
            near = difflib.get_close_matches(symbol, symbols, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise UniverseError(
                f"{path}: no rows of benchmark {symbol!r}. {hint}The file has {shown}; set "
                "data.benchmark."
            )
        if symbol is not None:
            bars = bars.filter(pl.col("symbol") == symbol)
    if freq == "1d":
        bars = bars.with_columns(pl.col("time").dt.truncate("1d"))
    info = SourceInfo(
        "benchmark", freq, "data", timezone, "adjusted", frozenset({"close"}), facts.digest
    )
    checked = validate(RawFrame(bars, str(path)), info)
    errors = [p for p in (*problems, *checked.problems) if p.severity == "error"]
    if errors:
        raise InvalidDataError(errors, f"{path}: {len(errors)} problem(s) in the benchmark")
    return checked.good.select("time", "close").sort("time")
