"""Tick files (Wind-style exports) as Parquet and as 1-minute, 5-minute and daily bars.

The file is read once, in blocks, and never held in memory: see `_ticks_read` for the reading,
`_ticks_bars` for the bars. Both kinds of export are understood:

- trades (逐笔成交.csv): every row is a trade or, with code C, a cancellation;
- snapshots (行情.csv): last price with the volume since the snapshot before, or with the day's
  cumulative volume, which is differenced. Rows without new volume are quotes, not trades.

Amounts are the file's; where it has none they are price × volume, exact for trades. A previous
close in the file is the session's reference price and comes with each of its bars. Files may be
sorted by time or by symbol; within a block they may be unsorted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from echelon.config import Config
from echelon.data import calendars
from echelon.data.bars import RawFrame, SourceInfo, conform
from echelon.data.sources import Source, required_path
from echelon.data.sources._tables import files_below
from echelon.data.sources._ticks_bars import (
    BAR_COLUMNS,
    BarMerger,
    TickCounts,
    TradeFilter,
    partial_bars,
    row_of,
    sessions_of,
)
from echelon.data.sources._ticks_read import (
    BLOCK_BYTES,
    ProblemLog,
    RejectSpool,
    TickLayout,
    read_blocks,
    sniff,
)
from echelon.digests import sha256_once
from echelon.errors import Problem, SourceError
from echelon.files import atomic_file, scratch_directory, sweep
from echelon.types import Freq

_NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
_PART_BYTES = 64 << 20
_GZIP_RATIO = 8
_SUFFIXES = (".csv", ".csv.gz", ".txt", ".txt.gz")


class TicksSource(Source):
    """Bars of tick files.

    path: a CSV or CSV.gz, a directory of them, or a pattern such as ticks/**/逐笔成交.csv
    columns: your column name → ours, for columns whose name is not recognised
    parquet_dir: where to write the ticks themselves as Parquet in the same pass; None: nowhere
    price_scale: what to multiply prices with; None: 1, or 1/10000 for Wind's whole-number prices
    """

    def __init__(
        self,
        path: Path,
        *,
        freq: Freq,
        calendar: str = "XSHG",
        timezone: str | None = None,
        columns: Mapping[str, str] = _NO_COLUMNS,
        parquet_dir: Path | None = None,
        price_scale: float | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._path = path
        self._freq: Freq = freq
        self._calendar = "XSHG" if calendar == "auto" else calendar
        self._timezone = timezone or calendars.timezone_of(self._calendar)
        self._columns = dict(columns)
        self._parquet_dir = parquet_dir
        self._price_scale = price_scale
        self._block_bytes = block_bytes
        self._rejects = RejectSpool()
        self._problems = ProblemLog(self._rejects)
        self._counts = TickCounts()

    def info(self) -> SourceInfo:
        """Describe the bars; reads the files once, for their hash."""
        return SourceInfo(
            name="ticks",
            freq=self._freq,
            calendar=self._calendar,
            timezone=self._timezone,
            price_basis="raw",
            fields=self._fields(),
            fingerprint=self._fingerprint(),
        )

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Read all files and yield their bars, every symbol's in one piece and sorted.

        A bar's `row` is the line of its first trade. `since` is ignored: a tick file is read
        whole.
        """
        layouts = self._layouts
        fields = self._fields()
        self._rejects = RejectSpool()
        self._problems = ProblemLog(self._rejects)
        trades = TradeFilter(sessions_of(self._calendar), self._freq, self._problems)
        self._counts = trades.counts
        with scratch_directory("ticks") as spill:
            merger = BarMerger(spill, _parts(layouts))
            offsets: list[int] = []  # rows are counted across files, to know which came first
            end = 0
            for layout in layouts:
                offsets.append(end)
                for block in self._blocks(layout):
                    merger.add(partial_bars(trades.trades(block, layout), offsets[-1]))
                    end = offsets[-1] + int(block["row"][-1]) + 1
            for bars in merger.finish():
                for number, piece in _by_file(_with_reference(bars), offsets):
                    yield RawFrame(_canonical(piece, fields), str(layouts[number].path))

    def problems(self) -> list[Problem]:
        """What is wrong with rows, after `frames`; the first of each kind, then a number.

        Rows with an error are in no bar; so is after-hours trading, which is a warning.
        """
        return self._problems.problems()

    def rejected_rows(self) -> pl.DataFrame:
        """All rows with an error, as they stood: file, row, problem, cells (the line)."""
        return self._rejects.frame()

    def counts(self) -> TickCounts:
        """Where the rows went, after `frames`."""
        return self._counts

    def _fields(self) -> frozenset[str]:
        roles = self._layouts[0].roles
        fields = {"open", "high", "low", "close"}
        if roles & {"volume", "acc_volume"}:
            fields |= {"volume", "amount"}
        if roles & {"amount", "acc_amount"}:
            fields.add("amount")
        if "pre_close" in roles:
            fields.add("pre_close")
        return frozenset(fields)

    def _blocks(self, layout: TickLayout) -> Iterator[pl.DataFrame]:
        if self._parquet_dir is None:
            yield from read_blocks(layout, self._problems, BAR_COLUMNS, self._block_bytes)
            return
        with _parquet_sink(self._parquet_dir / self._parquet_name(layout.path), layout) as write:
            for block in read_blocks(layout, self._problems, layout.names, self._block_bytes):
                write(block)
                yield block

    def _parquet_name(self, path: Path) -> str:
        """One Parquet file per tick file, its place below a directory spelled into the name."""
        inside = path.relative_to(self._path) if self._path.is_dir() else Path(path.name)
        if "*" in str(self._path):
            inside = Path(*path.parts[-3:])
        stem = "-".join(p for p in inside.parts if p not in ("/", ".."))
        return stem.removesuffix(".gz").rsplit(".", 1)[0] + ".parquet"

    @cached_property
    def _layouts(self) -> list[TickLayout]:
        first, *others = (
            sniff(f, self._columns, self._price_scale) for f in _tick_files(self._path)
        )
        for layout in others:
            if layout.names != first.names:
                raise SourceError(
                    f"{layout.path} has other columns than {first.path}: trades and snapshots "
                    "of one day must not be counted twice. Import one kind of file, with a "
                    "pattern such as data.path=ticks/**/逐笔成交.csv."
                )
        return [first, *others]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for layout in self._layouts:
            # How a file is read belongs to what it delivers.
            digest.update(f"{layout.names} {layout.clock} {layout.price_scale}".encode())
            digest.update(sha256_once(layout.path).encode())
        digest.update(f"ticks-2 {self._freq} {self._calendar}".encode())
        return digest.hexdigest()


def from_config(config: Config) -> TicksSource:
    """The source of the `data` section."""
    data = config.data
    return TicksSource(
        required_path(config),
        freq=data.freq,
        calendar=data.calendar,
        timezone=data.timezone,
        columns=data.columns,
        parquet_dir=data.ticks.parquet_dir,
        price_scale=data.ticks.price_scale,
    )


def ticks_to_parquet(
    path: Path,
    target: Path,
    *,
    columns: Mapping[str, str] = _NO_COLUMNS,
    price_scale: float | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> list[Problem]:
    """Write one tick file as Parquet, in blocks; returns the rows that could not be read.

    Columns: symbol (string), date (date32), time (time32[ms]), then the file's others: those we
    know under our names as float64, in yuan and shares (price, volume, bid_price1 …), the rest
    as text. Every readable row is kept, quotes and cancellations too, in file order, one row
    group per block. The target appears whole or not at all.
    """
    layout = sniff(path, columns, price_scale)
    problems = ProblemLog()
    with _parquet_sink(target, layout) as write:
        for block in read_blocks(layout, problems, layout.names, block_bytes):
            write(block)
    return problems.problems()


@contextmanager
def _parquet_sink(target: Path, layout: TickLayout) -> Iterator[Callable[[pl.DataFrame], None]]:
    """Writes blocks of ticks, each a row group, to a file that gets its name when all is there."""
    names = [n for n in layout.names if n not in ("symbol", "date", "time", "datetime", "")]
    schema = pa.schema(
        [("symbol", pa.string()), ("date", pa.date32()), ("time", pa.time32("ms"))]
        + [(n, pa.float64() if n in layout.numbers else pa.string()) for n in names]
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    with (
        atomic_file(target) as handle,
        pq.ParquetWriter(
            handle, schema, compression="zstd", use_dictionary=["symbol", "date"]
        ) as writer,
    ):

        def write(block: pl.DataFrame) -> None:
            columns = block.select(
                pl.col("symbol").cast(pl.String), "date", pl.col("ms").alias("time"), *names
            ).to_arrow()
            typed = [c.cast(kind) for c, kind in zip(columns.columns, schema.types, strict=True)]
            table = pa.table(typed, schema=schema)
            writer.write_table(table, row_group_size=max(table.num_rows, 1))

        yield write


def _with_reference(bars: pl.DataFrame) -> pl.DataFrame:
    """Every bar of a session gets its reference price, which is one and known before the open.

    An export may leave it out, or write 0, in some of the session's rows.
    """
    return bars.with_columns(pl.col("pre_close").max().over("symbol", "date"))


def _by_file(bars: pl.DataFrame, offsets: list[int]) -> Iterator[tuple[int, pl.DataFrame]]:
    """Split bars by the file of their first trade; gives its number and the bars with `row`."""
    rows = bars.select(row_of(pl.col("first"))).to_series().to_numpy()
    files = np.searchsorted(offsets, rows, side="right") - 1
    bars = bars.with_columns(file=pl.Series(files), row=pl.Series(rows - np.array(offsets)[files]))
    for (number,), piece in bars.group_by("file", maintain_order=True):
        assert isinstance(number, int)
        yield number, piece


def _canonical(bars: pl.DataFrame, fields: frozenset[str]) -> pl.DataFrame:
    time = pl.col("date").cast(pl.Datetime("us")) + pl.duration(milliseconds="bar")
    absent = [c for c in ("volume", "amount", "pre_close") if c not in fields]
    return conform(bars.with_columns(time=time).drop(absent).sort("symbol", "time"))


def _tick_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = files_below(path)
    if files is None:
        raise SourceError(f"{path}: no such file or directory. Set data.path to the tick export.")
    if path.is_dir():  # a pattern names what is meant
        files = [f for f in files if f.name.lower().endswith(_SUFFIXES)]
    if not files:
        raise SourceError(f"{path}: no tick files (CSV or CSV.gz) there. Set data.path.")
    return files


def _parts(layouts: list[TickLayout]) -> int:
    """Into how many pieces bars are split when they do not fit in memory."""
    size = sum(
        layout.path.stat().st_size * (_GZIP_RATIO if layout.path.suffix == ".gz" else 1)
        for layout in layouts
    )
    return min(max(size // _PART_BYTES, 1), 256)
