"""Tick exports as typed blocks, without holding the file in memory.

1. `sniff` decides once how a file is written: which column is which (`_columns.TICKS`: Wind's
   exports 行情.csv and 逐笔成交.csv, and the English names of its terminal), times and prices.
2. `read_blocks` types the blocks of cells that `_tables.pieces` reads. Rows whose symbol, date or
   time cannot be read cannot be placed and are left out.
3. What is left out goes to a `ProblemLog`: the first rows of each kind in full, all counted, and
   all set aside.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import polars as pl
import pyarrow as pa

from echelon.data.sources._columns import TICKS, ColumnMap, is_missing, read_numbers, recognise
from echelon.data.sources._tables import ROW, FileFacts, inspect, lines_of, pieces, rejects
from echelon.data.sources._times import parse_times
from echelon.errors import Problem, SourceError
from echelon.files import scratch_directory

log = logging.getLogger(__name__)

_TEXT = frozenset({"symbol", "trade_code", "bs_flag", "date", "time", "datetime"})
_NEEDED = frozenset({"price", "volume", "amount", "acc_volume", "acc_amount", "pre_close"})
_OTHER_PRICES = frozenset({"pre_close", "day_open", "day_high", "day_low"})
_BLANK = " \t\x00"
_SNIFFED = 256 << 10

ClockFormat = Literal["hmsf", "hms", "stamp17", "stamp14", "text", "stamp_text"]
"""How times are written: HHMMSSmmm, HHMMSS, the same after YYYYMMDD, or as text with colons."""


@dataclass(frozen=True)
class TickLayout:
    """How one tick file is written; `columns` says what its columns are, by our names."""

    facts: FileFacts
    columns: ColumnMap
    clock: ClockFormat
    price_scale: float

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(self.columns.by_field)

    @property
    def names(self) -> dict[str, str]:
        """The file's columns, in its order → our name, or their own where we have none."""
        ours = {c.name: c.field for c in self.columns.by_field.values()}
        own = {c: f"{c}_{k}" if c in self.roles else c for k, c in enumerate(self.facts.columns)}
        return {c: ours.get(c, own[c]) for c in self.facts.columns if c}

    @property
    def clock_column(self) -> str:
        return "time" if "time" in self.roles else "datetime"

    @property
    def date_column(self) -> str:
        """The column that says the day, which may be the same."""
        return "date" if "date" in self.roles else self.clock_column

    @property
    def numbers(self) -> dict[str, float]:
        """The columns that hold numbers → what makes shares and money of them."""
        scales = {n: c.scale for n, c in self.columns.by_field.items() if n not in _TEXT}
        prices = {n for n in scales if "price" in n or n in _OTHER_PRICES}
        return scales | dict.fromkeys(prices, self.price_scale)


def sniff(path: Path, columns: Mapping[str, str], price_scale: float | None = None) -> TickLayout:
    """Find out how `path` is written; `columns` and `price_scale` are the user's own, where set."""
    facts, needed = inspect(path), ("symbol", "price", "time")
    known = recognise(
        facts.columns, file=str(path), own=columns, aliases=TICKS, required=needed, ranked=True
    )
    block = next(pieces(facts, known.names, _SNIFFED), None)
    sample: dict[str, list[str]] = {ours: [] for ours in known.by_field}
    if block is not None:
        for ours, column in known.by_field.items():
            cells = block.frame[column.name].cast(pl.String).str.strip_chars(_BLANK)
            sample[ours] = cells.filter(~is_missing(cells)).to_list()
    if price_scale is None:
        price_scale = _price_scale(path, sample["price"])
    return TickLayout(facts, known, _clock(path, sample), price_scale)


def _clock(path: Path, sample: Mapping[str, list[str]]) -> ClockFormat:
    column = "time" if "time" in sample else "datetime"
    texts, dated = sample[column], "date" in sample
    digits = [t for t in texts if t.isdigit()]
    clock: ClockFormat
    if not digits:
        clock = "text" if dated else "stamp_text"
    elif max(map(len, digits)) >= 14:
        clock = "stamp17" if max(map(len, digits)) >= 17 else "stamp14"
    elif not dated:
        clock = "text"
    else:
        # 93000 can only be 09:30:00; a file of milliseconds soon has a time after 00:02:40.
        clock = "hmsf" if max(map(int, digits)) > 235_959 else "hms"
    stamped = clock.startswith("stamp") and (
        clock != "stamp_text" or not texts or re.match(r"\d{4}\D?\d{2}", texts[0])
    )
    if not dated and not stamped:
        raise SourceError(
            f"{path}: no date column, and {column} has no date in it. Name it with data.columns."
        )
    return clock


def _price_scale(path: Path, prices: list[str]) -> float:
    """1, or 1e-4 where prices are whole ten-thousandths, as Wind's TDB writes them.

    The ticks of stocks and funds (0.01, 0.001) are then multiples of 100 or 10 and no price is
    below 1000 (0.1 yuan), while real prices of whole yuan in every row do not occur.
    """
    texts = [t for t in prices if t.strip("0.")]
    if not texts or not all(t.isdigit() and int(t) >= 1000 and int(t) % 10 == 0 for t in texts):
        return 1.0
    log.warning(
        "%s: prices are whole numbers such as %s; read as 1/10000 of a yuan (Wind TDB). "
        "Pass price_scale=1 if they are yuan.",
        path,
        texts[0],
    )
    return 1e-4


class ProblemLog:
    """Bad rows: the first `shown` of each file and kind in full, the rest as a number.

    Rows with an error are set aside too, with what is wrong with them: in memory up to `limit`
    bytes, then on disk, since every row may be bad. The spilled files go when the log does.
    """

    def __init__(self, shown: int = 20, limit: int = 8 << 20) -> None:
        self._shown, self._limit = shown, limit
        self._counts: Counter[tuple[str, str]] = Counter()
        self._listed: dict[tuple[str, str], list[Problem]] = {}
        self._facts: dict[str, FileFacts] = {}
        self._kept: list[pl.DataFrame] = []
        self._spilled: list[Path] = []
        self._directory: Path | None = None

    def report(
        self,
        layout: TickLayout,
        rows: pl.DataFrame,
        field: str,
        what: str,
        remedy: str,
        *,
        value: str | None = None,
        severity: Literal["error", "warning"] = "error",
    ) -> None:
        """Note `rows`: what is wrong with their `field`; `value`: the column to show, if other."""
        if rows.is_empty():
            return
        column = layout.columns.by_field.get(field)
        file, name = str(layout.facts.path), field if column is None else column.name
        shown = pl.col(value or field).cast(pl.String)
        said = rows.select(
            "row", said=pl.concat_str(shown, pl.lit(what), separator=" ", ignore_nulls=True)
        )
        listed = (Problem(file, r, name, text, remedy, severity) for r, text in said.iter_rows())
        self._list(file, f"{field} {what}", listed, rows.height)
        if severity == "error":
            problem, cells = pl.lit(f"{name}: ") + pl.col("said"), pl.lit(None, dtype=pl.String)
            aside = said.select(file=pl.lit(file), row="row", problem=problem, cells=cells)
            self._set_aside(layout.facts, aside)

    def report_lines(self, facts: FileFacts, problems: list[Problem], rows: pl.DataFrame) -> None:
        """Note lines that are no rows, as `pieces` gives them."""
        if problems:
            self._list(str(facts.path), "wrong number of cells", problems, len(problems))
            self._set_aside(facts, rows)

    def _list(self, file: str, kind: str, problems: Iterable[Problem], n: int) -> None:
        self._counts[file, kind] += n
        listed = self._listed.setdefault((file, kind), [])
        listed.extend(islice(problems, self._shown - len(listed)))

    def problems(self) -> list[Problem]:
        """The rows that are shown, each kind followed by the number of those that are not."""
        problems = []
        for (file, kind), listed in self._listed.items():
            problems += listed
            more = self._counts[file, kind] - len(listed)
            if more:
                said = f"{more:,} more row(s) like row {listed[0].row}: {kind}"
                problems.append(replace(listed[0], row=None, message=said))
        return problems

    def _set_aside(self, facts: FileFacts, rows: pl.DataFrame) -> None:
        self._facts[str(facts.path)] = facts
        self._kept.append(rows)
        if sum(kept.estimated_size() for kept in self._kept) <= self._limit:
            return
        if self._directory is None:
            stack = ExitStack()
            self._directory = stack.enter_context(scratch_directory("rejects"))
            weakref.finalize(self, stack.close)
        path = self._directory / f"{len(self._spilled)}.parquet"
        pl.concat(self._kept).write_parquet(path, compression="lz4")
        self._spilled.append(path)
        self._kept = []

    def rejected_rows(self) -> pl.DataFrame:
        """All rows set aside, each once, in the order of the files: file, row, problem, cells."""
        spilled = (pl.read_parquet(path, memory_map=False, glob=False) for path in self._spilled)
        every = pl.concat([rejects(""), *spilled, *self._kept])
        done = [rejects("")]
        for (file,), part in every.group_by("file", maintain_order=True):
            rows = part.group_by("row", maintain_order=True).agg(
                pl.col("file").first(),
                pl.col("problem").str.join("; "),
                # As the parser saw it: with an open quote, a row may be many lines.
                pl.col("cells").drop_nulls().first(),
            )
            lines = lines_of(self._facts[str(file)], rows["row"].to_list())
            line = pl.col("row").replace_strict(lines, default=None, return_dtype=pl.String)
            done.append(
                rows.sort("row").select("file", "row", "problem", pl.col("cells").fill_null(line))
            )
        return pl.concat(done)


def read_blocks(
    layout: TickLayout,
    problems: ProblemLog,
    columns: Collection[str],
    block_bytes: int | None = None,
) -> Iterator[pl.DataFrame]:
    """Yield the rows of a tick file, a block at a time, in file order.

    Columns: row (Int64), symbol (Categorical), date (Date), ms (Int32, since midnight), bad (a
    needed number did not parse) and those of `columns` that the file has, as Float64 or String.
    """
    wanted = {"symbol", layout.date_column, layout.clock_column, *columns}
    names = {theirs: ours for theirs, ours in layout.names.items() if ours in wanted}
    few = pa.dictionary(pa.int32(), pa.string())
    kinds = dict.fromkeys(layout.numbers, pa.float64()) | {"symbol": few, layout.date_column: few}
    if not layout.clock.endswith("text"):
        kinds[layout.clock_column] = pa.int64()
    types = {theirs: kinds[ours] for theirs, ours in names.items() if ours in kinds}
    for block in pieces(layout.facts, list(names), block_bytes, types):
        problems.report_lines(layout.facts, block.problems, block.rejected_rows)
        cells = block.frame.rename({**names, ROW: "row"})
        frame = _keys(_numbers(cells, layout, problems), layout, problems)
        if frame.height:
            yield frame


def _numbers(frame: pl.DataFrame, layout: TickLayout, problems: ProblemLog) -> pl.DataFrame:
    """Float64 in shares and money, cells that do not parse are logged and null."""
    scales = {n: scale for n, scale in layout.numbers.items() if n in frame.columns}
    bad = pl.repeat(False, frame.height, eager=True)
    columns = []
    for name, scale in scales.items():
        values, unread = read_numbers(frame[name], scale)
        columns.append(values.alias(name))
        if not unread.any():
            continue
        wrong, what = frame.filter(unread), "is not a number"
        if name in _NEEDED:
            problems.report(layout, wrong, name, what, "Mend or remove the row")
            bad |= unread
        else:
            # Only the ticks themselves have it: bars must not depend on writing those.
            remedy = "The row is kept without it; mend it if you need it"
            problems.report(layout, wrong, name, what, remedy, severity="warning")
    return frame.with_columns(*columns, bad=bad)


def _keys(frame: pl.DataFrame, layout: TickLayout, problems: ProblemLog) -> pl.DataFrame:
    """Type symbol, date and time of day; rows where one cannot be read are logged and left out."""
    clock = layout.clock_column
    if frame["symbol"].dtype not in (pl.String, pl.Categorical):  # a Parquet file may hold anything
        frame = frame.with_columns(pl.col("symbol").cast(pl.String))
    codes = frame["symbol"].unique().cast(pl.String)  # few: look at those, not at all rows
    if (codes != codes.str.strip_chars(_BLANK)).any() or is_missing(codes).any():
        text = frame["symbol"].cast(pl.String).str.strip_chars(_BLANK)
        frame = frame.with_columns(symbol=text.set(is_missing(text), None))
    frame = frame.with_columns(pl.col("symbol").cast(pl.Categorical))
    frame = frame.with_columns(pl.col(pl.String).str.strip_chars(_BLANK).replace("", None))
    day = pl.col(layout.date_column)  # as written
    if "date" not in layout.roles and layout.clock == "stamp_text":
        day = day.cast(pl.String).str.extract(r"^([^ T]+)")
    elif "date" not in layout.roles:
        time = 10**9 if layout.clock == "stamp17" else 10**6
        day = day.cast(pl.Int64, strict=False) // time
    frame = frame.with_columns(day=day, ms=_milliseconds(frame[clock], layout.clock))
    frame = frame.with_columns(date=_dates(frame["day"]))
    for name, column, value, what, remedy in (
        ("symbol", "symbol", "symbol", "is missing", "Give the code, such as 600000.SH"),
        ("date", layout.date_column, "day", "is not a date", "Write it as 20240102 or 2024-01-02"),
        ("ms", clock, clock, "is not a time of day", "Write it as 93000000 or 09:30:00.000"),
    ):
        if frame[name].null_count():
            lost = frame.filter(pl.col(name).is_null())
            problems.report(layout, lost, column, what, remedy, value=value)
            frame = frame.filter(pl.col(name).is_not_null())
    return frame.drop("time", "datetime", "day", strict=False)


def _dates(days: pl.Series) -> pl.Series:
    """Dates from days as written, null where one cannot be read."""
    written = days.unique().drop_nulls().cast(pl.String).unique()  # two may be written alike
    known = parse_times(written, freq="1d", timezone="UTC")["time"].cast(pl.Date)
    if len(known) == 1 and not days.null_count():
        return known.new_from_index(0, days.len())
    return days.cast(pl.String).replace_strict(written, known, default=None, return_dtype=pl.Date)


def _milliseconds(written: pl.Series, clock: ClockFormat) -> pl.Series:
    """Milliseconds since midnight (Int32), null where the time does not exist."""
    if not clock.endswith("text"):
        number = written.cast(pl.Int64, strict=False)
        if clock.startswith("stamp"):
            number = number % (10**9 if clock == "stamp17" else 10**6)
        # 93000 or 93000000. Every row goes through here: narrow integers, and two divisions, are
        # the fastest.
        unit = 1000 if clock in ("hmsf", "stamp17") else 1
        number = number.cast(pl.Int32, strict=False)
        minutes = number // (100 * unit)  # as HHMM
        hours = minutes // 100
        exists = (
            number.is_between(0, 240_000 * unit - 1)
            & (minutes - hours * 100 < 60)
            & (number - minutes * (100 * unit) < 60 * unit)
        )
        since = number - minutes * (40 * unit) - hours * (2_400 * unit)
        return pl.select(pl.when(exists).then(since * (1000 // unit))).to_series()
    form = r"(?:^|[ T])(\d{1,2}):(\d{2}):(\d{2})(?:[.:](\d{1,6}))?$"
    parts = pl.lit(written.cast(pl.String)).str.strip_chars().str.extract_groups(form).struct
    hour, minute, second = (parts.field(str(i)).cast(pl.Int64, strict=False) for i in (1, 2, 3))
    digits = parts.field("4").fill_null("0").str.pad_end(6, "0")
    ms = digits.cast(pl.Int64, strict=False) // 1000
    fits = hour.is_between(0, 23) & (minute < 60) & (second < 60)
    total = ((hour * 60 + minute) * 60 + second) * 1000 + ms
    return pl.select(pl.when(fits).then(total).cast(pl.Int32)).to_series()
