"""Small files beside the bars: index membership, facts about instruments, the benchmark.

They are read whole, and checked here, at once: a membership file with an overlap or a benchmark
with two values for a day is refused with every problem listed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import polars as pl

from echelon.data.bars import MAX_SYMBOL, ODD_IN_SYMBOL, RawFrame, SourceInfo
from echelon.data.sources._columns import (
    FACTS,
    MEMBERS,
    ColumnMap,
    Reader,
    is_missing,
    recognise,
    symbols_of,
)
from echelon.data.sources._tables import ROW, inspect, read_whole, stem_of
from echelon.data.sources._times import UNDERSTOOD, parse_times
from echelon.data.validate import validate
from echelon.errors import InvalidDataError, UniverseError, shorten
from echelon.types import Freq, Problem


def read_membership(
    path: Path, *, pad_symbols: bool = False, own: Mapping[str, str] | None = None
) -> pl.DataFrame:
    """Membership intervals: symbol, start, end (Date; end exclusive, null = still in), sorted.

    Columns may be called symbol, start/start_date/in_date/纳入日期, end/end_date/out_date/剔除日期.
    pad_symbols: as for the bars, see `symbols_of`; own: your column name → ours (data.columns)
    """
    sheet = _Sheet.open(path, MEMBERS, ("symbol", "start"), own)
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
    for row, symbol, start, other in _overlaps(table).iter_rows():
        message = f"{symbol} joins on {start} while it is still in by row {other}"
        sheet.note(row, "start", message, "End the earlier interval by then, or join the two")
    sheet.refuse()
    return table.select("symbol", "start", "end")


def _overlaps(table: pl.DataFrame) -> pl.DataFrame:
    """Intervals that begin before an earlier one of the symbol ends: row, symbol, start, other."""
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
    """Facts about symbols: symbol, listed, delisted (Date), reason, name; null where unknown.

    pad_symbols: as for the bars, see `symbols_of`; own: your column name → ours (data.columns)
    """
    sheet = _Sheet.open(path, FACTS, ("symbol",), own)
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
    own: Mapping[str, str] | None = None,
    pad_symbols: bool = False,
) -> pl.DataFrame:
    """The benchmark index: time, close, sorted. `symbol` may be left out where there is but one.

    pad_symbols: as for the bars, see `symbols_of`; own: your column name → ours (data.columns)
    """
    facts = inspect(path)
    columns = recognise(facts.columns, file=str(path), own=_applicable(own, facts.columns))
    reader = Reader(
        columns, str(path), freq, timezone, symbol or stem_of(path), pad_symbols=pad_symbols
    )
    bars, problems, _ = reader.to_bars(read_whole(facts, columns.names))
    if "symbol" in columns.by_field:
        bars = _only(bars, symbol, path)
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


def _applicable(own: Mapping[str, str] | None, columns: Sequence[str]) -> dict[str, str]:
    """The entries of the user's map that concern this file; it was written for the bars."""
    return {theirs: ours for theirs, ours in (own or {}).items() if theirs in columns}


def _only(bars: pl.DataFrame, symbol: str | None, path: Path) -> pl.DataFrame:
    found = bars["symbol"].drop_nulls().unique().sort().to_list()
    shown = ", ".join(found[:20]) + (" …" if len(found) > 20 else "")
    if symbol is None:
        if len(found) != 1:
            raise UniverseError(
                f"{path}: holds {len(found)} symbols ({shown}). Say which is the benchmark: "
                "data.benchmark."
            )
        return bars
    if symbol not in found:
        near = difflib.get_close_matches(symbol, found, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UniverseError(
            f"{path}: no rows of benchmark {symbol!r}. {hint}The file has {shown}; set "
            "data.benchmark."
        )
    return bars.filter(pl.col("symbol") == symbol)


@dataclass
class _Sheet:
    """A small file with its columns recognised, and what was found wrong with it."""

    path: Path
    columns: ColumnMap
    frame: pl.DataFrame
    problems: list[Problem] = field(default_factory=list)

    @staticmethod
    def open(
        path: Path,
        aliases: Mapping[str, str],
        required: Sequence[str],
        own: Mapping[str, str] | None,
    ) -> _Sheet:
        facts = inspect(path)
        # The map was written for the bars: of its entries, those count that fit this file.
        fitting = {
            theirs: ours
            for theirs, ours in _applicable(own, facts.columns).items()
            if ours in aliases
        }
        columns = recognise(
            facts.columns, file=str(path), aliases=aliases, required=required, own=fitting
        )
        return _Sheet(path, columns, read_whole(facts, columns.names))

    @property
    def rows(self) -> pl.Series:
        return self.frame[ROW]

    def note(self, row: int | None, ours: str, message: str, remedy: str) -> None:
        self.problems.append(Problem(str(self.path), row, ours, message, remedy))

    def refuse(self) -> None:
        """Raise if anything was wrong."""
        if self.problems:
            self.problems.sort(key=lambda p: -1 if p.row is None else p.row)
            raise InvalidDataError(
                self.problems, f"{self.path}: {len(self.problems)} problem(s) in the file"
            )

    def symbols(self, *, pad: bool) -> pl.Series:
        """The symbols, spelled as those of the bars; an empty cell is a problem."""
        symbols = symbols_of(self.frame[self.columns.by_field["symbol"].name], pad=pad)
        self._require("symbol", symbols.is_null())
        odd = symbols.str.contains(ODD_IN_SYMBOL) | (symbols.str.len_chars() > MAX_SYMBOL)
        for row, symbol in pl.DataFrame([self.rows, symbols.alias("symbol")]).filter(odd).rows():
            what = f"{shorten(repr(symbol), 80)} has a control or invisible character, or over "
            what += f"{MAX_SYMBOL} characters"
            self.note(row, "symbol", what, "Write the symbol in plain characters")
        return symbols

    def text(self, ours: str) -> pl.Series:
        """The column as text, empty cells null."""
        column = self.columns.by_field.get(ours)
        if column is None:
            return pl.repeat(None, self.frame.height, dtype=pl.String, eager=True)
        text = self.frame[column.name].cast(pl.String).str.strip_chars()
        return pl.select(pl.when(text != "").then(text)).to_series()

    def dates(self, ours: str, *, needed: bool = False) -> pl.Series:
        """The column as dates, empty cells null."""
        column = self.columns.by_field.get(ours)
        if column is None:
            return pl.repeat(None, self.frame.height, dtype=pl.Date, eager=True)
        cells = self.frame[column.name]
        dates = parse_times(cells, freq="1d", timezone="UTC")["time"].cast(pl.Date)
        empty = is_missing(cells)
        wrong = pl.DataFrame([self.rows, cells.cast(pl.String).alias("cell")]).filter(
            dates.is_null() & ~empty
        )
        for row, cell in wrong.iter_rows():
            self.note(row, ours, f"{cell!r} cannot be read as a date", f"Understood: {UNDERSTOOD}")
        if needed:
            self._require(ours, empty)
        return dates

    def _require(self, ours: str, empty: pl.Series) -> None:
        for row in self.rows.filter(empty):
            self.note(row, ours, "the cell is empty", "Fill it in, or remove the row")
