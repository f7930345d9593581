"""Reading tick exports as typed blocks, without holding the file in memory.

1. `sniff` looks at the first piece of a file and decides once how it is written: encoding,
   delimiter, which column is which, times and prices. Column names follow Wind's exports 行情.csv
   (snapshots) and 逐笔成交.csv (trades) and the English names of its terminal; `columns` maps any
   other.
2. Whole lines are read a few megabytes at a time and parsed by pyarrow into typed columns. A
   block with a cell that does not parse is read again as text, cell by cell, so that one bad
   cell costs its row, not the import.
3. Symbol, date and time of day are typed; rows without one cannot be placed and are left out.
4. What is left out goes to a `ProblemLog`: the first rows of each kind in full, all counted.
   The lines themselves go to its `RejectSpool`, which spills to disk: every row may be bad.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv

from echelon.data.sources._tables import MAX_COLUMNS, open_bytes, reading_file, rejects
from echelon.data.sources._times import parse_times
from echelon.errors import Problem, SourceError
from echelon.files import scratch_directory

log = logging.getLogger(__name__)

_ALIASES: Mapping[str, str] = {
    "symbol": "万得代码 windcode wind_code 证券代码 股票代码 代码 symbol code ticker sec_code "
    "交易所代码",
    "date": "自然日 日期 交易日 交易日期 date trading_day tradingday day",
    "time": "时间 成交时间 交易时间 time trade_time tradetime",
    "datetime": "日期时间 datetime timestamp date_time",
    "price": "成交价 成交价格 最新价 最新 现价 price last last_price lastprice trade_price match",
    "volume": "成交量 成交数量 volume vol qty trade_volume ivolume",
    "amount": "成交额 成交金额 turnover amount amt turover iturover",
    "acc_volume": "当日累计成交量 累计成交量 总成交量 accvolume acc_volume iaccvolume "
    "total_volume totalvolume cum_volume",
    "acc_amount": "当日成交额 当日累计成交额 累计成交额 总成交额 accturnover accturover "
    "acc_turnover acc_amount total_turnover totalturnover cum_amount",
    "pre_close": "前收盘 前收盘价 昨收 昨收价 昨收盘 preclose pre_close",
    "day_open": "开盘价 开盘 open",
    "day_high": "最高价 最高 high",
    "day_low": "最低价 最低 low",
    "trade_code": "成交代码 functioncode function_code trade_code",
    "bs_flag": "bs标志 bsflag bs_flag 买卖方向",
}
_TEXT = frozenset({"symbol", "trade_code", "bs_flag"})
_PRICES = frozenset({"price", "pre_close", "day_open", "day_high", "day_low"})
_LEVELS = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"(?:申买价|叫买价|买价|bid_?price_?|bid_?px_?|bid_?)(\d+)", "bid_price"),
        (r"(?:申卖价|叫卖价|卖价|ask_?price_?|ask_?px_?|ask_?)(\d+)", "ask_price"),
        (r"(?:申买量|叫买量|买量|bid_?vol(?:ume)?_?|bid_?size_?)(\d+)", "bid_volume"),
        (r"(?:申卖量|叫卖量|卖量|ask_?vol(?:ume)?_?|ask_?size_?)(\d+)", "ask_volume"),
    )
)
_NUMERALS = {c: str(i) for i, c in enumerate("一二三四五六七八九", start=1)} | {"十": "10"}
_UNITS = {"手": 100.0, "万股": 1e4, "千元": 1e3, "万元": 1e4, "亿元": 1e8}
NULLS = ["", "\x00", "-", "--", "NULL", "null", "NaN", "nan", "N/A", "None"]

_SNIFFED = 256 << 10

ClockFormat = Literal["hmsf", "hms", "stamp17", "stamp14", "text", "stamp_text"]
"""How times are written: HHMMSSmmm, HHMMSS, the same after YYYYMMDD, or as text with colons."""


@dataclass(frozen=True)
class TickLayout:
    """How one tick file is written.

    names: our name of each column, in file order ("" for one without a header)
    headers: our name → the file's, for messages
    units: our name → multiplier to shares or money
    """

    path: Path
    encoding: str
    delimiter: str
    names: tuple[str, ...]
    headers: Mapping[str, str]
    units: Mapping[str, float]
    clock: ClockFormat
    price_scale: float

    @property
    def roles(self) -> frozenset[str]:
        """The columns we know the meaning of."""
        return frozenset(n for n in self.names if is_role(n))

    @property
    def clock_column(self) -> str:
        """The column that says the time of day."""
        return "time" if "time" in self.names else "datetime"

    @property
    def date_column(self) -> str:
        """The column that says the day, which may be the same."""
        return "date" if "date" in self.names else self.clock_column

    @property
    def scales(self) -> dict[str, float]:
        """Multipliers to shares and money of the columns that need one."""
        prices = {n: self.price_scale for n in self.numbers if n in _PRICES or "_price" in n}
        return {n: f for n, f in (prices | dict(self.units)).items() if f != 1.0}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that hold numbers."""
        clocks = ("date", "time", "datetime")
        return tuple(n for n in self.names if is_role(n) and n not in (*_TEXT, *clocks))


def sniff(path: Path, columns: Mapping[str, str], price_scale: float | None = None) -> TickLayout:
    """Find out how `path` is written; `columns` maps its names to ours where we do not know them.

    `price_scale` multiplies prices; None decides from the first rows (see `_price_scale`).
    """
    with reading_file(path), open_bytes(path) as handle:
        head = handle.read(_SNIFFED)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise SourceError(f"{path}: the file is UTF-16. Save it as UTF-8 or GBK.")
    cut = head.rfind(b"\n") + 1 or len(head)
    encoding = _encoding(path, head[:cut])
    lines = head[:cut].decode(encoding).splitlines()
    if not lines or not lines[0].strip():
        raise SourceError(f"{path}: no header in line 1. Export the file with column names.")
    delimiter = max(",\t;|", key=lines[0].count)
    if lines[0].count(delimiter) >= MAX_COLUMNS or (len(lines) == 1 and len(head) == _SNIFFED):
        raise SourceError(
            f"{path}: the first line has {len(lines[0]):,} characters or more, the header of no "
            "tick file. Export it with its column names in line 1 and a line per tick."
        )
    headers = [h.strip().strip('"').strip() for h in lines[0].split(delimiter)]
    names, units = _name_columns(path, headers, columns)
    rows = [[c.strip().strip('"') for c in line.split(delimiter)] for line in lines[1:]]
    sample = [r for r in rows if len(r) == len(names)]
    return TickLayout(
        path=path,
        encoding=encoding,
        delimiter=delimiter,
        names=tuple(names),
        headers=dict(zip(names, headers, strict=True)),
        units=units,
        clock=_clock(path, names, sample),
        price_scale=_price_scale(path, names, sample) if price_scale is None else price_scale,
    )


def is_role(name: str) -> bool:
    """Whether `name` is one of our tick columns (and not just a header we kept)."""
    return name in _ALIASES or bool(re.fullmatch(r"(?:bid|ask)_(?:price|volume)\d+", name))


def _encoding(path: Path, head: bytes) -> str:
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            head.decode(encoding)
        except UnicodeDecodeError:
            continue
        return "utf-8" if encoding == "utf-8-sig" else encoding
    raise SourceError(f"{path}: the text is neither UTF-8 nor GBK. Save it as UTF-8.")


def _name_columns(
    path: Path, headers: list[str], columns: Mapping[str, str]
) -> tuple[list[str], dict[str, float]]:
    """Our name for each of the file's columns, and the units that headers such as (手) give."""
    headers = [h.lstrip("\ufeff") for h in headers]
    unknown = [c for c in columns if c not in headers]
    if unknown:
        raise SourceError(
            f"{path}: data.columns names {unknown[0]!r}, which is not a column of the file. "
            f"It has: {', '.join(headers)}."
        )
    wrong = [ours for ours in columns.values() if not is_role(ours)]
    if wrong:
        raise SourceError(
            f"data.columns maps to {wrong[0]!r}, which is not a tick column. Use one of "
            f"{', '.join(_ALIASES)}, bid_price1, ask_volume1 …"
        )
    bare = [re.sub(r"[（(\[].*[)）\]]$", "", h).strip().lower().replace(" ", "_") for h in headers]
    names = [columns.get(h, "") for h in headers]
    for role, aliases in _ALIASES.items():
        match = next((a for a in aliases.split() if a in bare and not names[bare.index(a)]), None)
        if match is not None and role not in names:
            names[bare.index(match)] = role
    taken: set[str] = {n for n in names if n}
    for i, header in enumerate(headers):
        name = names[i] or _level(bare[i]) or header
        if name in taken and not names[i]:
            name = header if header not in taken else f"{header}_{i}"
        names[i] = name
        taken.add(name)
    _require(path, names, headers)
    units = {
        name: _UNITS[unit.group(1)]
        for name, header in zip(names, headers, strict=True)
        if (unit := re.search(r"[（(\[](\w+)[)）\]]$", header)) and unit.group(1) in _UNITS
    }
    return names, units


def _level(header: str) -> str | None:
    """bid_price1 … of a book column's name: 申买价1, 买一价, BidPrice1."""
    if chinese := re.fullmatch(r"([买卖])([一二三四五六七八九十])(价|量)", header):
        side, level, what = chinese.groups()
        header = f"{side}{what}{_NUMERALS[level]}"
    for pattern, role in _LEVELS:
        if match := pattern.fullmatch(header):
            return f"{role}{int(match.group(1))}"
    return None


def _require(path: Path, names: list[str], headers: list[str]) -> None:
    missing = [role for role in ("symbol", "price") if role not in names]
    if "time" not in names and "datetime" not in names:
        missing.append("time")
    if missing:
        raise SourceError(
            f"{path}: no column for {', '.join(missing)} among {', '.join(headers)}. Name it with "
            f'data.columns, for example -o \'data.columns={{"{headers[0]}": "{missing[0]}"}}\'.'
        )


def _clock(path: Path, names: list[str], sample: list[list[str]]) -> ClockFormat:
    """How times are written, from the first rows."""
    column = "time" if "time" in names else "datetime"
    texts = [t for r in sample if (t := r[names.index(column)]) not in NULLS]
    digits = [t for t in texts if t.isdigit()]
    dated = "date" in names
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


def _price_scale(path: Path, names: list[str], sample: list[list[str]]) -> float:
    """1, or 1e-4 where prices are whole ten-thousandths, as Wind's TDB writes them.

    The ticks of stocks and funds (0.01, 0.001) are then multiples of 100 or 10 and no price is
    below 1000 (0.1 yuan), while real prices of whole yuan in every row do not occur.
    """
    column = names.index("price")
    texts = [t for r in sample if (t := r[column]) not in NULLS and t.strip("0.")]
    if not texts or not all(t.isdigit() and int(t) >= 1000 and int(t) % 10 == 0 for t in texts):
        return 1.0
    log.warning(
        "%s: prices are whole numbers such as %s; read as 1/10000 of a yuan (Wind TDB). "
        "Pass price_scale=1 if they are yuan.",
        path,
        texts[0],
    )
    return 1e-4


BLOCK_BYTES = 4 << 20
"""Text per block. Larger ones are no faster and hold more memory."""

_WORKERS = 2
_LINE_BYTES = 1 << 20
_BLANK = " \t\x00"
_NEEDED = frozenset({"price", "volume", "amount", "acc_volume", "acc_amount", "pre_close"})


class RejectSpool:
    """Rows that are set aside, as they stood; in memory up to `limit` bytes, then on disk.

    A block of a file is begun with its text; rows of it are then added with what is wrong with
    them, in any order, and are looked up in the text when the block ends. A row with several
    things wrong is one row. The spilled files go when the spool does.
    """

    def __init__(self, limit: int = 8 << 20) -> None:
        self._limit = limit
        self._file, self._encoding, self._first, self._text = "", "utf-8", 0, b""
        self._rows_aside: list[pl.DataFrame] = []
        self._kept: list[pl.DataFrame] = []
        self._spilled: list[Path] = []
        self._directory: Path | None = None

    def begin(self, layout: TickLayout, first_line: int, text: bytes) -> None:
        """End the block before; the next one is `text`, from line `first_line` on."""
        self.end()
        self._file, self._encoding = str(layout.path), layout.encoding
        self._first, self._text = first_line, text

    def add(self, rows: pl.DataFrame) -> None:
        """Set rows of the block aside: row (Int64), problem, and cells where they are known."""
        unknown = pl.lit(None, dtype=pl.String).alias("cells")
        self._rows_aside.append(rows if "cells" in rows.columns else rows.with_columns(unknown))

    def end(self) -> None:
        """Look up the rows of the block, and spill when there are too many."""
        if self._rows_aside:
            rows = (
                pl.concat(self._rows_aside)
                .group_by("row", maintain_order=True)
                .agg(pl.col("problem").str.join("; "), pl.col("cells").first())
                .sort("row")
            )
            lines = self._text.splitlines()
            cells = pl.Series(
                [
                    lines[row - self._first].decode(self._encoding, errors="replace")
                    for row in rows["row"]
                ],
                dtype=pl.String,
            )
            self._keep(
                rows.select(
                    pl.lit(self._file).alias("file"),
                    "row",
                    "problem",
                    pl.col("cells").fill_null(cells),
                )
            )
        self._rows_aside, self._text = [], b""

    def frame(self) -> pl.DataFrame:
        """All rows set aside, in the order of the files: file, row, problem, cells."""
        spilled = (pl.read_parquet(path, memory_map=False, glob=False) for path in self._spilled)
        return pl.concat([rejects(""), *spilled, *self._kept])

    def _keep(self, frame: pl.DataFrame) -> None:
        self._kept.append(frame)
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


@dataclass
class ProblemLog:
    """Bad rows: the first `shown` of each file and kind in full, the rest as a number.

    rejects: where the rows themselves go; None: nowhere
    """

    rejects: RejectSpool | None = None
    shown: int = 20
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _listed: dict[tuple[str, str], list[Problem]] = field(default_factory=dict)

    def add(self, kind: str, file: str, problems: Iterable[Problem], n: int) -> None:
        """Count `n` rows of one kind; `problems` is drawn from only as far as it is shown."""
        key = (file, kind)
        self._counts[key] = self._counts.get(key, 0) + n
        listed = self._listed.setdefault(key, [])
        listed.extend(islice(problems, self.shown - len(listed)))

    def problems(self) -> list[Problem]:
        """The rows that are shown, each kind followed by the number of those that are not."""
        problems = []
        for (file, kind), listed in self._listed.items():
            problems += listed
            more = self._counts[file, kind] - len(listed)
            if more:
                first = listed[0]
                said = f"{more:,} more row(s) like row {first.row}: {kind}"
                problems.append(
                    Problem(file, None, first.field, said, first.remedy, first.severity)
                )
        return problems


class _Ragged(NamedTuple):
    """A row with too few or too many fields; `number` counts from 1 in its block."""

    number: int
    fields: int
    text: str


class _Parsed(NamedTuple):
    """A block as a frame with `row` counted from 0; `typed` unless it had to be read as text."""

    text: bytes
    frame: pl.DataFrame
    lines: int
    ragged: list[_Ragged]
    typed: bool


def read_blocks(
    layout: TickLayout,
    problems: ProblemLog,
    columns: Collection[str],
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
    with reading_file(layout.path):
        line = 2
        for parsed in _ahead(layout, names, block_bytes):
            if problems.rejects is not None:
                problems.rejects.begin(layout, line, parsed.text)
            _report_ragged(problems, layout, parsed.ragged, line)
            frame = parsed.frame.with_columns(pl.col("row") + line)
            line += parsed.lines
            frame = _keys(_numbers(frame, layout, problems, parsed.typed), layout, problems)
            if frame.height:
                yield frame
        if problems.rejects is not None:
            problems.rejects.end()


def _ahead(layout: TickLayout, names: list[str], block_bytes: int) -> Iterator[_Parsed]:
    """Parse blocks in threads while the caller works on those before; in file order."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        waiting: deque[Future[_Parsed]] = deque()
        for text in _whole_lines(layout, block_bytes):
            waiting.append(pool.submit(_parse_block, text, layout, names))
            if len(waiting) > _WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _parse_block(text: bytes, layout: TickLayout, names: list[str]) -> _Parsed:
    table, ragged, typed = _parse(text, layout, names)
    lines = np.arange(table.num_rows + len(ragged), dtype=np.int64)
    n_lines = lines.size
    if ragged:
        lines = np.delete(lines, [row.number - 1 for row in ragged])
    frame = cast(pl.DataFrame, pl.from_arrow(table)).with_columns(row=pl.Series(lines))
    if frame["symbol"].null_count():
        frame = frame.filter(~pl.all_horizontal(pl.exclude("row").is_null()))
    frame = frame.with_columns(symbol=_trim_symbols(frame["symbol"], table["symbol"]))
    return _Parsed(text, frame, n_lines, ragged, typed)


def _whole_lines(layout: TickLayout, block_bytes: int) -> Iterator[bytes]:
    with open_bytes(layout.path) as handle:
        handle.readline()
        while text := handle.read(block_bytes) + handle.readline(_LINE_BYTES):
            if len(text) >= block_bytes + _LINE_BYTES:
                raise SourceError(
                    f"{layout.path}: a line of more than {_LINE_BYTES >> 20} MiB. The file is "
                    "damaged, or no table of ticks: export it again."
                )
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
            what, remedy = "is not a number", "Mend or remove the row"
            if name in _NEEDED:
                report_rows(problems, layout, wrong, name, what, remedy)
                unusable += wrong["row"].to_list()
            else:
                # Only the ticks themselves have it: bars must not depend on writing those.
                remedy = "The row is kept without it; mend it if you need it"
                report_rows(problems, layout, wrong, name, what, remedy, severity="warning")
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
        symbol=frame["symbol"].cast(pl.Categorical),
        day=_day(layout),
        ms=_milliseconds(frame[layout.clock_column], layout.clock),
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
            report_rows(problems, layout, lost, column, what, remedy, value=value)
            frame = frame.filter(pl.col(name).is_not_null())
    return frame.drop("time", "datetime", "day", strict=False)


def _trim_symbols(symbols: pl.Series, as_read: pa.ChunkedArray) -> pl.Series:
    """Without blanks around, null where nothing is left; `as_read` are the same from Arrow."""
    if pa.types.is_dictionary(as_read.type):
        # The codes of a block are few: look at those, not at all rows.
        codes = [code for part in as_read.chunks for code in part.dictionary.to_pylist()]
        if all(code and code == code.strip(_BLANK) for code in codes):
            return symbols
    return symbols.cast(pl.String).str.strip_chars(_BLANK).replace("", None)


def _dates(days: pl.Series) -> pl.Series:
    """Dates from days as written, null where one cannot be read."""
    written = days.unique().drop_nulls().cast(pl.String)
    known = parse_times(written, freq="1d", timezone="UTC")["time"].cast(pl.Date)
    if len(known) == 1 and not days.null_count():
        return known.new_from_index(0, days.len())
    return days.cast(pl.String).replace_strict(written, known, default=None, return_dtype=pl.Date)


def _day(layout: TickLayout) -> pl.Expr:
    """The day as written."""
    raw = pl.col(layout.date_column)
    if "date" in layout.names:
        return raw
    if layout.clock == "stamp_text":
        return raw.cast(pl.String).str.strip_chars().str.extract(r"^([^ T]+)")
    return raw.cast(pl.Int64, strict=False) // (10**9 if layout.clock == "stamp17" else 10**6)


def _milliseconds(written: pl.Series, clock: ClockFormat) -> pl.Series:
    """Milliseconds since midnight (Int32), null where the time does not exist."""
    if not clock.endswith("text"):
        number = written.cast(pl.Int64, strict=False)
        if clock.startswith("stamp"):
            number = number % (10**9 if clock == "stamp17" else 10**6)
        return _of_digits(number, 1000 if clock in ("hmsf", "stamp17") else 1)
    form = r"(?:^|[ T])(\d{1,2}):(\d{2}):(\d{2})(?:[.:](\d{1,6}))?$"
    parts = pl.lit(written.cast(pl.String)).str.strip_chars().str.extract_groups(form).struct
    hour, minute, second = (parts.field(str(i)).cast(pl.Int64, strict=False) for i in (1, 2, 3))
    digits = parts.field("4").fill_null("0").str.pad_end(6, "0")
    ms = digits.cast(pl.Int64, strict=False) // 1000
    fits = hour.is_between(0, 23) & (minute < 60) & (second < 60)
    total = ((hour * 60 + minute) * 60 + second) * 1000 + ms
    return pl.select(pl.when(fits).then(total).cast(pl.Int32)).to_series()


def _of_digits(written: pl.Series, second: int) -> pl.Series:
    """Milliseconds of times such as 93000 (a `second` is 1) or 93000000 (it is 1000).

    Every row of a file goes through here: narrow integers, and two divisions, are the fastest.
    """
    number = written.cast(pl.Int32, strict=False)
    minutes = number // (100 * second)  # as HHMM
    hours = minutes // 100
    fits = (
        number.is_between(0, 240_000 * second - 1)
        & (minutes - hours * 100 < 60)
        & (number - minutes * (100 * second) < 60 * second)
    )
    total = number - minutes * (40 * second) - hours * (2_400 * second)
    return pl.select(pl.when(fits).then(total * (1000 // second))).to_series()


def report_rows(
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

    `value` is the column that has the value to show, where that is not `field_` itself. Rows
    with an error are set aside; a warning is only told.
    """
    if rows.is_empty():
        return
    file, name = str(layout.path), layout.headers.get(field_, field_)
    shown = pl.col(value or field_).cast(pl.String)
    said = rows.select(
        "row", said=pl.concat_str(shown, pl.lit(what), separator=" ", ignore_nulls=True)
    )
    listed = (Problem(file, row, name, text, remedy, severity) for row, text in said.iter_rows())
    problems.add(f"{field_} {what}", file, listed, rows.height)
    if severity == "error" and problems.rejects is not None:
        problems.rejects.add(said.select("row", problem=pl.lit(f"{name}: ") + pl.col("said")))


def _report_ragged(
    problems: ProblemLog, layout: TickLayout, ragged: list[_Ragged], first_line: int
) -> None:
    if not ragged:
        return
    file, expected = str(layout.path), len(layout.names)
    rows = [first_line + row.number - 1 for row in ragged]
    said = [f"{row.fields} fields instead of {expected}" for row in ragged]
    listed = (
        Problem(file, number, None, f"{what}: {row.text[:80]!r}", "Mend or remove the row")
        for number, what, row in zip(rows, said, ragged, strict=True)
    )
    problems.add("wrong number of fields", file, listed, len(ragged))
    if problems.rejects is not None:
        # As the parser saw it: with an open quote, a row may be many lines.
        cells = [row.text for row in ragged]
        schema = {"row": pl.Int64, "problem": pl.String, "cells": pl.String}
        problems.rejects.add(
            pl.DataFrame({"row": rows, "problem": said, "cells": cells}, schema=schema)
        )
