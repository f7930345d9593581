"""Reading tick exports as typed blocks, without holding the file in memory.

1. Whole lines are read a few megabytes at a time and parsed by pyarrow into typed columns. A
   block with a cell that does not parse is read again as text, cell by cell, so that one bad
   cell costs its row, not the import.
2. Symbol, date and time of day are typed; rows without one cannot be placed and are left out.
3. What is left out goes to a `ProblemLog`: the first rows of each kind in full, all counted.
"""

from __future__ import annotations

import gzip
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import islice
from typing import Literal, NamedTuple, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv

from echelon.data.sources._ticks_layout import NULLS, TickLayout, open_ticks
from echelon.errors import SourceError
from echelon.types import Problem

BLOCK_BYTES = 4 << 20
"""Text per block. Larger ones are no faster and hold more memory."""

_WORKERS = 2
_NEEDED = frozenset({"price", "volume", "amount", "acc_volume", "acc_amount"})
_DATE_FORMATS = ("%Y%m%d", "%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d")


@dataclass
class ProblemLog:
    """Bad rows: the first `shown` of each file and kind in full, the rest as a number."""

    shown: int = 20
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _listed: dict[tuple[str, str], list[Problem]] = field(default_factory=dict)

    def add(self, kind: str, file: str, problems: Iterable[Problem], n: int) -> None:
        """Count `n` rows of one kind; `problems` is drawn from only as far as it is shown."""
        key = (file, kind)
        self.counts[key] = self.counts.get(key, 0) + n
        listed = self._listed.setdefault(key, [])
        listed.extend(islice(problems, self.shown - len(listed)))

    def problems(self) -> list[Problem]:
        """The rows that are shown, each kind followed by the number of those that are not."""
        found = []
        for (file, kind), listed in self._listed.items():
            found += listed
            more = self.counts[file, kind] - len(listed)
            if more:
                first = listed[0]
                said = f"{more:,} more row(s) like row {first.row}: {kind}"
                found.append(Problem(file, None, first.field, said, first.remedy, first.severity))
        return found

    @property
    def total(self) -> int:
        """Bad rows in all."""
        return sum(self.counts.values())


class _Ragged(NamedTuple):
    """A row with too few or too many fields; `number` counts from 1 in its block."""

    number: int
    fields: int
    text: str


class _Parsed(NamedTuple):
    """A block as a frame with `row` counted from 0; `typed` unless it had to be read as text."""

    frame: pl.DataFrame
    lines: int
    ragged: list[_Ragged]
    typed: bool


def read_blocks(
    layout: TickLayout,
    problems: ProblemLog,
    columns: Collection[str],
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[pl.DataFrame]:
    """Yield the rows of a tick file, a block at a time, in file order.

    Columns: row (Int64, the line in the file), symbol (Categorical), date (Date), ms (Int32,
    milliseconds since midnight), bad (Boolean: a needed number did not parse) and those of
    `columns` that the file has, as Float64 or String. Rows whose symbol, date or time cannot be
    read are logged and left out.
    """
    wanted = {"symbol", layout.date_column, layout.clock_column, *columns}
    names = [n for n in layout.names if n in wanted]
    try:
        line = 2
        for parsed in _ahead(layout, names, block_bytes):
            _report_ragged(problems, layout, parsed.ragged, line)
            frame = parsed.frame.with_columns(pl.col("row") + line)
            line += parsed.lines
            frame = _keys(_numbers(frame, layout, problems, parsed.typed), layout, problems)
            if frame.height:
                yield frame
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(
            f"{layout.path}: the compressed file is damaged or cut short ({error}). Fetch it again."
        ) from error


def _ahead(layout: TickLayout, names: list[str], block_bytes: int) -> Iterator[_Parsed]:
    """Parse blocks in threads while the caller works on those before; in file order."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        waiting: deque[Future[_Parsed]] = deque()
        for text in _whole_lines(layout, block_bytes):
            waiting.append(pool.submit(_parsed, text, layout, names))
            if len(waiting) > _WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _parsed(text: bytes, layout: TickLayout, names: list[str]) -> _Parsed:
    table, ragged, typed = _parse(text, layout, names)
    lines = np.arange(table.num_rows + len(ragged), dtype=np.int64)
    n_lines = lines.size
    if ragged:
        lines = np.delete(lines, [row.number - 1 for row in ragged])
    frame = cast(pl.DataFrame, pl.from_arrow(table)).with_columns(row=pl.Series(lines))
    if frame["symbol"].null_count():
        frame = frame.filter(~pl.all_horizontal(pl.exclude("row").is_null()))
    return _Parsed(frame, n_lines, ragged, typed)


def _whole_lines(layout: TickLayout, block_bytes: int) -> Iterator[bytes]:
    with open_ticks(layout.path) as handle:
        handle.readline()
        while text := handle.read(block_bytes) + handle.readline():
            yield text


def _parse(
    text: bytes, layout: TickLayout, names: list[str]
) -> tuple[pa.Table, list[_Ragged], bool]:
    """A block as an Arrow table: typed, or as text where a cell does not parse."""
    if layout.encoding != "utf-8" and not text.isascii():
        text = text.decode(layout.encoding, errors="replace").encode()
    try:
        return _arrow(text, layout, names, None), [], True
    except pa.ArrowInvalid:
        ragged: list[_Ragged] = []
        clean = text.decode("utf-8", errors="replace").encode()
        return _arrow(clean, layout, names, ragged), ragged, False


def _arrow(
    text: bytes, layout: TickLayout, wanted: list[str], ragged: list[_Ragged] | None
) -> pa.Table:
    """Parse into typed columns, or raise; with a list for `ragged` rows, into text, and do not."""

    def skip(row: pa_csv.InvalidRow) -> str:
        assert ragged is not None
        ragged.append(_Ragged(row.number, row.actual_columns, row.text))
        return "skip"

    # A column without a header still has cells: it needs a name to be parsed.
    names = [name or f"_unnamed{i}" for i, name in enumerate(layout.names)]
    types: dict[str, pa.DataType] = dict.fromkeys(wanted, pa.string())
    if ragged is None:
        few = pa.dictionary(pa.int32(), pa.string())
        types |= {"symbol": few, layout.date_column: few}
        types |= {n: pa.float64() for n in layout.numbers if n in wanted}
        if not layout.clock.endswith("text"):
            types[layout.clock_column] = pa.int64()
    return pa_csv.read_csv(
        pa.BufferReader(text),
        # One block is one piece of work: row numbers are only known when read in order.
        read_options=pa_csv.ReadOptions(
            use_threads=False, column_names=names, block_size=len(text) + 1
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=layout.delimiter,
            ignore_empty_lines=False,  # they count as lines
            invalid_row_handler=None if ragged is None else skip,
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types=types,
            include_columns=wanted,
            null_values=NULLS,
            strings_can_be_null=True,
        ),
    )


def _numbers(
    frame: pl.DataFrame, layout: TickLayout, problems: ProblemLog, typed: bool
) -> pl.DataFrame:
    """Float64 in shares and money; cells that do not parse are logged and null."""
    names = [n for n in layout.numbers if n in frame.columns]
    unusable: list[int] = []
    if not typed:
        frame = frame.with_columns(pl.col(pl.String).str.strip_chars())
        for name in names:
            numbers = frame[name].cast(pl.Float64, strict=False)
            wrong = frame.filter(frame[name].is_not_null() & numbers.is_null())
            report(problems, layout, wrong, name, "is not a number", "Mend or remove the row")
            if name in _NEEDED:
                unusable += wrong["row"].to_list()
        frame = frame.with_columns(pl.col(names).cast(pl.Float64, strict=False))
    scales = {n: f for n, f in layout.scales.items() if n in names}
    return frame.with_columns(
        # Dividing by 10000 gives the double nearest to 10.25; multiplying by 0.0001 may not.
        *[pl.col(n) / round(1 / f) if f < 1 else pl.col(n) * f for n, f in scales.items()],
        bad=pl.col("row").is_in(unusable) if unusable else pl.lit(False),
    )


def _keys(frame: pl.DataFrame, layout: TickLayout, problems: ProblemLog) -> pl.DataFrame:
    """Type symbol, date and time of day; rows where one cannot be read are logged and left out."""
    frame = frame.with_columns(
        symbol=_trimmed(frame["symbol"]).cast(pl.Categorical),
        day=_day(layout),
        ms=_milliseconds(layout),
    )
    frame = frame.with_columns(date=_dates(frame["day"]))
    clock = layout.clock_column
    for name, column, value, what, remedy in (
        ("symbol", "symbol", "symbol", "is missing", "Give the code, such as 600000.SH"),
        ("date", layout.date_column, "day", "is not a date", "Write it as 20240102 or 2024-01-02"),
        ("ms", clock, clock, "is not a time of day", "Write it as 93000000 or 09:30:00.000"),
    ):
        if frame[name].null_count():
            lost = frame.filter(pl.col(name).is_null())
            report(problems, layout, lost, column, what, remedy, value=value)
            frame = frame.filter(pl.col(name).is_not_null())
    return frame.drop("time", "datetime", "day", strict=False)


def _trimmed(symbols: pl.Series) -> pl.Series:
    """Without blanks around, null where nothing is left."""
    if symbols.dtype != pl.String:
        # The codes of a block are few: look at those first, not at all rows.
        codes = symbols.unique().drop_nulls().cast(pl.String)
        if (codes.str.strip_chars(" \t\x00") == codes).all() and not (codes == "").any():
            return symbols
    text = symbols.cast(pl.String).str.strip_chars(" \t\x00")
    return text.replace("", None)


def _dates(days: pl.Series) -> pl.Series:
    """Dates from days as written, null where one cannot be read."""
    written = days.unique().drop_nulls()
    known = {text: _parse_date(text.strip()) for text in written.cast(pl.String)}
    if len(known) == 1 and not days.null_count():
        return pl.Series([*known.values()], dtype=pl.Date).new_from_index(0, days.len())
    return days.cast(pl.String).replace_strict(known, default=None, return_dtype=pl.Date)


def _day(layout: TickLayout) -> pl.Expr:
    """The day as written."""
    raw = pl.col(layout.date_column)
    if "date" in layout.names:
        return raw
    if layout.clock == "stamp_text":
        return raw.cast(pl.String).str.strip_chars().str.extract(r"^([^ T]+)")
    return raw.cast(pl.Int64, strict=False) // (10**9 if layout.clock == "stamp17" else 10**6)


def _milliseconds(layout: TickLayout) -> pl.Expr:
    """Milliseconds since midnight, null where the time does not exist."""
    raw = pl.col(layout.clock_column)
    if layout.clock.endswith("text"):
        form = r"(?:^|[ T])(\d{1,2}):(\d{2}):(\d{2})(?:[.:](\d{1,6}))?$"
        parts = raw.cast(pl.String).str.strip_chars().str.extract_groups(form).struct
        hour, minute, second = (parts.field(str(i)).cast(pl.Int64, strict=False) for i in (1, 2, 3))
        digits = parts.field("4").fill_null("0").str.pad_end(6, "0")
        ms = digits.cast(pl.Int64, strict=False) // 1000
    else:
        number = raw.cast(pl.Int64, strict=False)
        if layout.clock.startswith("stamp"):
            number = number % (10**9 if layout.clock == "stamp17" else 10**6)
        number = number.cast(pl.Int32, strict=False)  # narrow integers divide faster
        fractional = layout.clock in ("hmsf", "stamp17")
        ms = number % 1000 if fractional else number * 0
        number = number // 1000 if fractional else number
        hour, minute, second = number // 10_000, number // 100 % 100, number % 100
    fits = hour.is_between(0, 23) & (minute < 60) & (second < 60)
    total = ((hour * 60 + minute) * 60 + second) * 1000 + ms
    return pl.when(fits).then(total).cast(pl.Int32)


def report(
    problems: ProblemLog,
    layout: TickLayout,
    rows: pl.DataFrame,
    field_: str,
    what: str,
    remedy: str,
    *,
    value: str | None = None,
    severity: Literal["error", "warning"] = "error",
) -> None:
    """Log `rows` (with `row`): what is wrong with their `field_`, and what to do.

    `value` is the column that has the value to show, where that is not `field_` itself.
    """
    if rows.is_empty():
        return

    def each() -> Iterator[Problem]:
        for row in rows.iter_rows(named=True):
            found = row.get(value or field_)
            said = what if found is None else f"{found} {what}"
            name = layout.headers.get(field_, field_)
            yield Problem(str(layout.path), row["row"], name, said, remedy, severity)

    problems.add(f"{field_} {what}", str(layout.path), each(), rows.height)


def _report_ragged(
    problems: ProblemLog, layout: TickLayout, ragged: list[_Ragged], first_line: int
) -> None:
    if not ragged:
        return
    found = (
        Problem(
            str(layout.path),
            first_line + row.number - 1,
            None,
            f"{row.fields} fields instead of {len(layout.names)}: {row.text[:80]!r}",
            "Mend or remove the row",
        )
        for row in ragged
    )
    problems.add("wrong number of fields", str(layout.path), found, len(ragged))


def _parse_date(text: str) -> date | None:
    for form in _DATE_FORMATS:
        try:
            return datetime.strptime(text, form).date()
        except ValueError:
            continue
    return None
