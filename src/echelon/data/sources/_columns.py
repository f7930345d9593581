"""Which column is what, in English and in Chinese, and cells → canonical bars.

1. `recognise` matches a file's columns to ours: the user's own map first, then aliases, blind to
   case, spaces, underscores and full-width signs. A unit in brackets scales: 成交量(手) is ×100.
2. `to_bars` converts a block of cells. A cell that cannot be read becomes a problem with its row
   number, and its row is set aside; it is never an exception and never a silent null.
3. `Sheet` is a small file next to the bars, read whole, with all its problems.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import polars as pl
import polars.selectors as cs

from echelon.data.bars import MAX_PROBLEMS, MAX_SYMBOL, ODD_IN_SYMBOL, conform
from echelon.data.sources._tables import MISSING, ROW, TableBlock, inspect, read_whole, rejects
from echelon.data.sources._times import UNDERSTOOD, join_clock, parse_times
from echelon.errors import InvalidDataError, Problem, shorten
from echelon.files import package_yaml
from echelon.types import Freq

NAMES = package_yaml("echelon.data.sources", "names.yaml")
# Our name → the aliases of a column, in each kind of file.
BARS: Mapping[str, str] = NAMES["bars"]
MEMBERS: Mapping[str, str] = {"symbol": BARS["symbol"], **NAMES["members"]}
INSTRUMENTS: Mapping[str, str] = {"symbol": BARS["symbol"], **NAMES["instruments"]}
SERIES: Mapping[str, str] = NAMES["series"]
TICKS: Mapping[str, str] = NAMES["ticks"] | {
    f"{ours}{k}": f"{' '.join(f'{stem}{k}' for stem in stems.split())} {side}{numeral}{what}"
    for k, numeral in enumerate("一二三四五六七八九十", start=1)
    for ours, side, what, stems in (
        ("bid_price", "买", "价", "申买价 叫买价 买价 bid_price bid_px bid"),
        ("ask_price", "卖", "价", "申卖价 叫卖价 卖价 ask_price ask_px ask"),
        ("bid_volume", "买", "量", "申买量 叫买量 买量 bid_vol bid_volume bid_size"),
        ("ask_volume", "卖", "量", "申卖量 叫卖量 卖量 ask_vol ask_volume ask_size"),
    )
}

_WEAK: Mapping[str, str] = NAMES["weak"]
_UNITS = {unit: scale for scale, units in NAMES["units"].items() for unit in units.split()}
_NUMBERS = ("open", "high", "low", "close", "volume", "amount", "factor", "adj_close", "pre_close")
_YES = ("1", "1.0", "true", "t", "yes", "y", "是", "st", "*st")
_NO = ("0", "0.0", "false", "f", "no", "n", "否")
_IGNORE = "ignore"
# What the user's own map of a field makes superfluous: a whole time does without date and clock.
_STAND_FOR = {
    "time": ("time", "date", "clock"),
    "date": ("time", "date"),
    "clock": ("time", "clock"),
}


class FileColumn(NamedTuple):
    """A column of a file, what it is to us, and what its numbers are multiplied by."""

    name: str
    field: str
    scale: float


@dataclass(frozen=True)
class ColumnMap:
    """What `recognise` found, by our names."""

    by_field: Mapping[str, FileColumn]

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.by_field.values()]

    @property
    def fields(self) -> frozenset[str]:
        """Fields of a bar beyond time and symbol, as in `SourceInfo.fields`."""
        fields = self.by_field.keys() - {"time", "clock", "date", "symbol"}
        return frozenset("factor" if f == "adj_close" else f for f in fields)


def normalise(name: str) -> str:
    """A column's name with everything that does not distinguish it removed.

    >>> normalise("Adj Close*"), normalise("成交量（手）"), normalise("<TICKER>")
    ('adjclose', '成交量(手)', 'ticker')
    """
    return re.sub(r"[\s_\-.<>\"'*\ufeff]", "", unicodedata.normalize("NFKC", name)).casefold()


def recognise(
    columns: Sequence[str],
    *,
    file: str,
    own: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] = BARS,
    required: Sequence[str] = ("time", "close"),
    key: str = "data.columns",
    ranked: bool = False,
) -> ColumnMap:
    """Match `columns` to our fields; `own` (their name → ours, or "ignore") wins over aliases.

    key: of the configuration, where `own` is set; messages name it
    ranked: of columns with the same meaning, that counts whose alias comes first
    """
    match = _Matcher(columns, aliases, file, key, ranked)
    mapped = match.own_columns(own or {})
    settled = {f for c in mapped.values() for f in _STAND_FOR.get(c.field, (c.field,))}
    claims: dict[str, list[FileColumn]] = {}
    for name, count in Counter(columns).items():
        column = mapped.get(name) or match.column(name)
        if column is not None and column.field != _IGNORE:
            if name not in mapped and column.field in settled:
                continue  # the user's own map has that field already
            claims.setdefault(column.field, []).extend([column] * min(count, 2))
    if "date" in claims and "clock" in claims:  # together they make a time
        claims.get("time", []).extend(claims["date"])  # next to a whole time: too many
    elif "clock" in aliases:  # one alone is the time
        for part in claims.keys() & {"date", "clock"}:
            claims.setdefault("time", []).extend(claims.pop(part))
    for ours, claimed in claims.items():
        if len(claimed) > 1:
            names = " and ".join(repr(c.name) for c in claimed)
            remedy = f"Map one of them to {_IGNORE!r} in {key}, or remove it"
            match.note(ours, f"columns {names} both mean it", remedy)
    have = {*claims, *("time" for whole in ("clock", "datetime") if whole in claims)}
    for ours in required:
        if ours not in have:
            match.note_missing(ours, {c.name for claimed in claims.values() for c in claimed})
    if match.problems:
        raise InvalidDataError(match.problems, f"{file}: the columns cannot be used")
    return ColumnMap({ours: claimed[0] for ours, claimed in claims.items()})


@dataclass
class _Matcher:
    """What each of a file's columns is: by the user's own map, or by its name alone."""

    columns: Sequence[str]
    aliases: Mapping[str, str]
    file: str
    key: str
    ranked: bool
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = {normalise(a): ours for ours, names in self.aliases.items() for a in names.split()}
        self._split = {c: _split_unit(normalise(c)) for c in self.columns}
        self._fields = {c: table.get(base) for c, (base, _) in self._split.items()}
        if self.ranked:
            rank = {alias: k for k, alias in enumerate(table)}
            best = sorted(self._fields, key=lambda c: -rank.get(self._split[c][0], 0))
            first = {self._fields[c]: c for c in best}
            self._fields = {c: f if first[f] == c else None for c, f in self._fields.items()}

    def note(self, field: str, message: str, remedy: str) -> None:
        self.problems.append(Problem(self.file, None, field, message, remedy))

    def column(self, name: str) -> FileColumn | None:
        """The column, or None where its name says nothing, or another's says it better."""
        (base, scale), ours = self._split[name], self._fields[name]
        weak = _WEAK.get(base)
        if ours is None and weak in self.aliases and weak not in self._fields.values():
            ours = weak
        return None if ours is None or not _fits(ours, scale) else FileColumn(name, ours, scale)

    def own_columns(self, own: Mapping[str, str]) -> dict[str, FileColumn]:
        """What the user says of columns, by their names."""
        known = [*self.aliases, _IGNORE]
        mapped = {}
        for theirs, value in own.items():
            alike = [c for c in self.columns if normalise(c) == normalise(theirs)]
            base, scale = _split_unit(value.strip().casefold())
            if not alike:
                message = f"{self.key} names {theirs!r}, but the columns are "
                message += _listing(self.columns)
                self.note(theirs, message, _did_you_mean(theirs, self.columns))
            elif base not in known or not _fits(base, scale):
                message = f"{self.key} maps it to {value!r}, which is no field of ours"
                remedy = f"{_did_you_mean(base, known)}. Ours are {_listing(known)}; volume(lots) "
                self.note(theirs, message, remedy + "or amount(thousand) scale")
            else:
                name = theirs if theirs in alike else alike[0]
                mapped[name] = FileColumn(name, base, scale)
        return mapped

    def note_missing(self, ours: str, taken: Collection[str]) -> None:
        """Add the problem that no column is `ours`; those that are something else are `taken`."""
        free = {normalise(c): c for c in self.columns if c not in taken}
        names = self.aliases[ours].split()
        if ours == "time":
            names += self.aliases["date"].split()
        near = (difflib.get_close_matches(normalise(n), free, n=1, cutoff=0.6) for n in names)
        hint = next((f"Did you mean {free[m[0]]!r}? " for m in near if m), "")
        columns, some = _listing(self.columns), ", ".join(names[:8])
        message = f"no column for it; found {columns}; expected one of {some} …"
        remedy = f"{hint}Rename the column, or map it: {self.key}: {{your_name: {ours}}}"
        self.note(ours, message, remedy)


def _fits(ours: str, scale: float) -> bool:
    """Whether a unit is known (not NaN), and means something for the field."""
    return scale == 1.0 or (scale > 0.0 and ("volume" in ours or "amount" in ours))


def _split_unit(name: str) -> tuple[str, float]:
    """Base name and scale; the scale is NaN where the unit is unknown."""
    match = re.fullmatch(r"(.+?)[(\[/](.+?)[)\]]?", name)
    return (name, 1.0) if match is None else (match[1], _UNITS.get(match[2], math.nan))


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "Correct the name"


def _listing(columns: Sequence[str]) -> str:
    shown = ", ".join(columns[:20])
    return shown + (f" and {len(columns) - 20} more" if len(columns) > 20 else "")


@dataclass
class Reader:
    """Converts the pieces of one file. `file` names it in problems."""

    columns: ColumnMap
    file: str
    freq: Freq
    timezone: str
    symbol: str | None = None  # of every row where the file has no such column
    pad_symbols: bool = False  # see `symbols_of`
    _aware: tuple[int, bool] | None = field(default=None, init=False)

    def to_bars(self, piece: pl.DataFrame) -> TableBlock:
        """Canonical bars of a block of cells (with `ROW`), and what of it could not be read."""
        fields = self.columns.by_field
        if "date" in fields:
            date, clock = fields["date"].name, fields["clock"].name
            cells, name = join_clock(piece[date], piece[clock]), f"{date} {clock}"
        else:
            name = fields["time"].name
            cells = piece[name]
        times = parse_times(cells, freq=self.freq, timezone=self.timezone)
        unread = times["time"].is_null() & ~is_missing(cells)
        checks = [_Check(name, cells, unread, "a time", f"Understood are {UNDERSTOOD}")]
        symbols = pl.Series([self.symbol], dtype=pl.String).new_from_index(0, piece.height)
        if "symbol" in fields:
            symbols = symbols_of(piece[fields["symbol"].name], pad=self.pad_symbols)
        out = {"row": piece[ROW], "time": times["time"], "symbol": symbols}
        for ours, column in fields.items():
            cells = piece[column.name]
            if ours in _NUMBERS:
                out[ours], unread = read_numbers(cells, column.scale)
                checks.append(_Check(column.name, cells, unread, "a number", "Write a number"))
            elif ours == "st":
                text = cells.cast(pl.String).str.strip_chars().str.to_lowercase()
                flags = pl.when(text.is_in(_YES)).then(True).when(text.is_in(_NO)).then(False)
                out[ours] = pl.select(flags).to_series()
                unread = out[ours].is_null() & ~is_missing(text)
                remedy = "Write 1 or 0, true or false, 是 or 否"
                checks.append(_Check(column.name, cells, unread, "yes or no", remedy))
        frame = pl.DataFrame(out)
        if "adj_close" in out and "factor" not in out:
            ratio = pl.col("adj_close") / pl.col("close")
            frame = frame.with_columns(factor=pl.when(pl.col("close") > 0).then(ratio))
        mixed, problems = self._mixed_zones(piece[ROW], times["aware"], name)
        for check in checks:
            problems += self._problems(piece[ROW], check)
        bad = pl.select(pl.any_horizontal(mixed, *[c.unread for c in checks])).to_series()
        rejected_rows = self._reject_rows(piece, bad, mixed, checks)
        return TableBlock(conform(frame.filter(~bad)), problems, rejected_rows)

    def _problems(self, rows: pl.Series, check: _Check) -> list[Problem]:
        """What to tell of the cells of a column that mean nothing."""
        if not check.unread.any():
            return []
        wrong = pl.DataFrame([rows, check.cells.cast(pl.String).alias("cell")]).filter(check.unread)
        if wrong.height == len(rows) > 1:
            row, cell = wrong.row(0)
            message = f"none of {len(rows)} cells can be read as {check.what}, the first: {cell!r}"
            return [Problem(self.file, row, check.name, message, check.remedy)]
        rows_said = [
            (row, f"{cell!r} cannot be read as {check.what}")
            for row, cell in wrong.head(MAX_PROBLEMS).iter_rows()
        ]
        if wrong.height > MAX_PROBLEMS:
            more = f"{wrong.height - MAX_PROBLEMS} more cells cannot be read as {check.what}"
            rows_said.append((None, more))
        return [Problem(self.file, row, check.name, said, check.remedy) for row, said in rows_said]

    def _mixed_zones(
        self, rows: pl.Series, aware: pl.Series, name: str
    ) -> tuple[pl.Series, list[Problem]]:
        """Rows whose time has an offset while the file's first has none, or the reverse."""
        if self._aware is None and aware.count():
            first = int(aware.is_not_null().arg_max() or 0)
            self._aware = int(rows[first]), bool(aware[first])
        if self._aware is None:
            return pl.repeat(False, len(rows), eager=True), []
        first_row, first_aware = self._aware
        mixed = (aware != first_aware).fill_null(False)
        if not mixed.any():
            return mixed, []
        numbers = rows.filter(mixed)
        said = ("no UTC offset", "a UTC offset")
        message = (
            f"mixed time zones: the time has {said[not first_aware]}, that of row {first_row} "
            f"has {said[first_aware]} ({len(numbers)} such row(s))"
        )
        remedy = "Write every time with its offset, or every time in exchange-local time"
        return mixed, [Problem(self.file, int(numbers[0]), name, message, remedy)]

    def _reject_rows(
        self, piece: pl.DataFrame, bad: pl.Series, mixed: pl.Series, checks: Sequence[_Check]
    ) -> pl.DataFrame:
        if not bad.any():
            return rejects(self.file)
        reasons = [pl.when(mixed).then(pl.lit("mixed time zones"))] + [
            pl.when(c.unread).then(pl.format(f"{c.name}: {{}} cannot be read as {c.what}", cell))
            for c in checks
            for cell in [pl.lit(c.cells.cast(pl.String))]
        ]
        # Not every type has a spelling in JSON: a decimal and a time of day have none.
        as_text = (cs.temporal() | cs.decimal()).cast(pl.String)
        cells = pl.struct(pl.all().exclude(ROW)).struct.json_encode()
        return (
            piece.with_columns(as_text)
            .select(
                file=pl.lit(self.file),
                row=pl.col(ROW),
                problem=pl.concat_str(reasons, separator="; ", ignore_nulls=True),
                cells=cells,
            )
            .filter(bad)
        )


class _Check(NamedTuple):
    """A column's cells, which of them could not be read, as what, and the remedy."""

    name: str
    cells: pl.Series
    unread: pl.Series
    what: str
    remedy: str


def symbols_of(cells: pl.Series, *, pad: bool) -> pl.Series:
    """Symbols as text, empty cells null; pad: to six digits, as A-share codes that lost zeros."""
    if cells.dtype.is_float():  # pandas: whole numbers with gaps
        whole = cells.cast(pl.Int64, strict=False)
        cells = whole.cast(pl.String).zip_with(cells == whole, cells.cast(pl.String))
    text = cells.cast(pl.String).str.strip_chars()
    if pad and (text.str.len_bytes() < 6).any():
        text = text.zip_with(~text.str.contains(r"^\d+$").fill_null(False), text.str.zfill(6))
    return pl.select(pl.when(text != "").then(text)).to_series()


def is_missing(cells: pl.Series) -> pl.Series:
    if cells.dtype != pl.String:
        return cells.is_null()
    return cells.str.strip_chars().str.to_lowercase().is_in(MISSING).fill_null(True)


def read_numbers(cells: pl.Series, scale: float) -> tuple[pl.Series, pl.Series]:
    """Float64 values times `scale`, and which cells could not be read."""
    if cells.dtype == pl.String:
        text = cells.str.strip_chars()
        if text.str.contains(",", literal=True).any():
            grouped = text.str.contains(r"^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?$")
            text = text.zip_with(~grouped.fill_null(False), text.str.replace_all(",", ""))
        values = text.cast(pl.Float64, strict=False)
        if values.null_count() or values.is_nan().any():
            missing = is_missing(cells)
            values = values.set(missing, None)
            bad = values.is_null() & ~missing
        else:
            bad = pl.repeat(False, len(cells), eager=True)
    elif not (cells.dtype.is_numeric() or cells.dtype == pl.Null):
        # Dates and truth values would become numbers, days since 1970 for instance.
        values = pl.repeat(None, len(cells), dtype=pl.Float64, eager=True)
        bad = cells.is_not_null()
    else:
        values = cells.cast(pl.Float64, strict=False)
        if cells.dtype == pl.Float32:
            # 24.37 stored as float32 is 24.370001…; seven digits are all it ever held.
            values = values.round_sig_figs(7)
        bad = values.is_null() & cells.is_not_null()
    if scale != 1.0:
        # Dividing by 10000 gives the double nearest to 10.25; multiplying by 0.0001 may not.
        values = values / round(1 / scale) if scale < 1.0 else values * scale
    return values, bad


@dataclass
class Sheet:
    """A small file that is read whole: its columns recognised, and everything wrong with it."""

    path: Path
    columns: ColumnMap
    frame: pl.DataFrame
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def read(
        cls,
        path: Path,
        aliases: Mapping[str, str],
        required: Sequence[str],
        own: Mapping[str, str] | None = None,
        key: str = "data.columns",
    ) -> Self:
        """Read `path`; of data.columns, written for the bars, those entries count that fit."""
        facts, own = inspect(path), own or {}
        if key == "data.columns":
            own = {a: b for a, b in own.items() if a in facts.columns and b in aliases}
        columns = recognise(
            facts.columns, file=str(path), aliases=aliases, required=required, own=own, key=key
        )
        return cls(path, columns, read_whole(facts, columns.names))

    @property
    def rows(self) -> pl.Series:
        return self.frame[ROW]

    def note(self, row: int | None, ours: str, message: str, remedy: str) -> None:
        self.problems.append(Problem(str(self.path), row, ours, message, remedy))

    def note_unread(self, ours: str, unread: pl.Series, what: str, remedy: str) -> None:
        """Note the cells of a column that say something, but not what they should."""
        cells = pl.DataFrame([self.rows, self.cells(ours).cast(pl.String).alias("cell")])
        for row, cell in cells.filter(unread).iter_rows():
            self.note(row, ours, f"{cell!r} {what}", remedy)

    def require(self, ours: str, empty: pl.Series, message: str = "the cell is empty") -> None:
        for row in self.rows.filter(empty):
            self.note(row, ours, message, "Fill it in, or remove the row")

    def refuse(self, what: str = "file") -> None:
        """Raise if anything was wrong."""
        if self.problems:
            self.problems.sort(key=lambda p: -1 if p.row is None else p.row)
            raise InvalidDataError(
                self.problems, f"{self.path}: {len(self.problems)} problem(s) in the {what}"
            )

    def cells(self, ours: str) -> pl.Series:
        """The column as it is; nulls where the file has none."""
        column = self.columns.by_field.get(ours)
        if column is None:
            return pl.repeat(None, self.frame.height, dtype=pl.String, eager=True)
        return self.frame[column.name]

    def text(self, ours: str) -> pl.Series:
        """The column as text, empty cells null."""
        text = self.cells(ours).cast(pl.String).str.strip_chars()
        return pl.select(pl.when(text != "").then(text)).to_series()

    def dates(self, ours: str, *, needed: bool = False) -> pl.Series:
        """The column as dates, empty cells null."""
        cells = self.cells(ours)
        dates = parse_times(cells, freq="1d", timezone="UTC")["time"].cast(pl.Date)
        empty = is_missing(cells)
        unread = dates.is_null() & ~empty
        self.note_unread(ours, unread, "cannot be read as a date", f"Understood: {UNDERSTOOD}")
        if needed:
            self.require(ours, empty)
        return dates

    def symbols(self, *, pad: bool) -> pl.Series:
        """The symbols, spelled as those of the bars; an empty cell is a problem."""
        symbols = symbols_of(self.cells("symbol"), pad=pad)
        self.require("symbol", symbols.is_null())
        odd = symbols.str.contains(ODD_IN_SYMBOL) | (symbols.str.len_chars() > MAX_SYMBOL)
        for row, symbol in pl.DataFrame([self.rows, symbols.alias("symbol")]).filter(odd).rows():
            what = f"{shorten(repr(symbol), 80)} has a control or invisible character, or over "
            what += f"{MAX_SYMBOL} characters"
            self.note(row, "symbol", what, "Write the symbol in plain characters")
        return symbols
