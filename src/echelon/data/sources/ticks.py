"""Tick files (Wind-style exports) as Parquet and as 1-minute, 5-minute and daily bars.

Files are read once, in blocks (`_ticks_read`), which come in any order, and never held in memory:

1. `TradeFilter` picks the trades out of a block: cancellations and quotes without a trade go,
   impossible rows are logged, cumulative volume is differenced per symbol and day.
2. `partial_bars` aggregates the block's trades to bars that remember when their first and last
   trade were.
3. `BarMerger` joins partial bars of the same symbol and time. Beyond a limit it spills them to
   disk by symbol, so memory holds one part of the symbols at a time.

Both kinds of export are understood:

- trades (逐笔成交.csv): every row is a trade or, with code C, a cancellation;
- snapshots (行情.csv): last price with the volume since the snapshot before, or with the day's
  cumulative volume. Rows without new volume are quotes, not trades.

Amounts are the file's, or price × volume. A previous close in the file is the session's reference
price. Files may be sorted by time or by symbol; within a block they may be unsorted.

A bar holds the trades from its start up to, not including, its end, and is named by its end.
Opening-auction trades belong to the first bar, prints of the close to the last of the session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from echelon.config import Config
from echelon.data import calendars
from echelon.data.bars import BOUNDS, RawFrame, conform
from echelon.data.sources import PathSource
from echelon.data.sources._columns import ColumnMap, FileColumn
from echelon.data.sources._tables import FileFacts, files_below
from echelon.data.sources._ticks_read import ProblemLog, TickLayout, read_blocks, sniff
from echelon.errors import Problem, SourceError
from echelon.files import atomic_file, scratch_directory, sweep
from echelon.sources import SourceInfo
from echelon.types import Freq

_PART_BYTES = 64 << 20
_GZIP_RATIO = 8
_SUFFIXES = (".csv", ".csv.gz", ".txt", ".txt.gz")


class TicksSource(PathSource):
    """Bars of tick files; the options are those of `data` and `data.ticks`."""

    def __init__(
        self,
        path: Path,
        *,
        columns: Mapping[str, str] = {},
        parquet_dir: Path | None = None,
        price_scale: float | None = None,
        block_bytes: int | None = None,
        **query: Any,  # noqa: ANN401 (see PathSource)
    ) -> None:
        super().__init__(path, **query)
        calendar = self._wanted_calendar
        self._calendar = "XSHG" if calendar == "auto" else calendar
        self._timezone = self._wanted_timezone or calendars.timezone_of(self._calendar)
        self._columns = dict(columns)
        self._parquet_dir = parquet_dir
        self._price_scale = price_scale
        self._block_bytes = block_bytes
        self._problems = ProblemLog()

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
        """Yield the bars of all files by symbol; their `row` is the line of the first trade."""
        layouts = self._layouts
        absent = {"volume", "amount", "pre_close"} - self._fields()
        self._problems = ProblemLog()
        trades = TradeFilter(sessions_of(self._calendar), self._freq, self._problems)
        with scratch_directory("ticks") as spill:
            paths = [layout.facts.path for layout in layouts]
            sizes = (p.stat().st_size * (_GZIP_RATIO if p.suffix == ".gz" else 1) for p in paths)
            merger = BarMerger(spill, min(max(sum(sizes) // _PART_BYTES, 1), 256))
            offsets: list[int] = []  # rows are counted across files, to know which came first
            end = 0
            for layout in layouts:
                offsets.append(end)
                for block in self._blocks(layout):
                    merger.add(partial_bars(trades.trades(block, layout), offsets[-1]))
                    end = offsets[-1] + int(block["row"][-1]) + 1
            for bars in merger.finish():
                # A bar is of the file of its first trade, and of the row there.
                rows = bars["first"].to_numpy() % _ROWS
                files = np.searchsorted(offsets, rows, side="right") - 1
                bars = _name_bars(bars).drop(absent)
                bars = bars.with_columns(row=pl.Series(rows - np.array(offsets)[files]))
                for number in np.unique(files).tolist():
                    piece = bars.filter(pl.Series(files == number)).sort("symbol", "time")
                    yield RawFrame(conform(piece), str(paths[number]))

    def problems(self) -> list[Problem]:
        return self._problems.problems()

    def rejected_rows(self) -> pl.DataFrame:
        return self._problems.rejected_rows()

    def _fields(self) -> frozenset[str]:
        roles = self._layouts[0].roles
        fields = {"open", "high", "low", "close"} | (roles & {"pre_close"})
        if roles & {"volume", "acc_volume"}:
            fields |= {"volume", "amount"}
        if roles & {"amount", "acc_amount"}:
            fields.add("amount")
        return frozenset(fields)

    def _blocks(self, layout: TickLayout) -> Iterator[pl.DataFrame]:
        if self._parquet_dir is None:
            yield from read_blocks(layout, self._problems, BAR_COLUMNS, self._block_bytes)
            return
        target = self._parquet_dir / self._parquet_name(layout.facts.path)
        with _parquet_sink(target, layout) as write:
            for block in read_blocks(
                layout, self._problems, layout.names.values(), self._block_bytes
            ):
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
        files = files_below(self._path)
        if self._path.is_dir():  # a pattern names what is meant
            files = [f for f in files if f.name.lower().endswith(_SUFFIXES)]
        if not files:
            raise SourceError(f"{self._path}: no tick files (CSV or CSV.gz) there. Set data.path.")
        first, *others = (sniff(f, self._columns, self._price_scale) for f in files)
        for layout in others:
            if list(layout.names.values()) != list(first.names.values()):
                raise SourceError(
                    f"{layout.facts.path} has other columns than {first.facts.path}: trades and "
                    "snapshots of one day must not be counted twice. Import one kind of file, with "
                    "a pattern such as data.path=ticks/**/逐笔成交.csv."
                )
        return [first, *others]

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for layout in self._layouts:
            # How a file is read belongs to what it delivers.
            digest.update(
                f"{tuple(layout.names.values())} {layout.clock} {layout.price_scale}".encode()
            )
            digest.update(layout.facts.digest.encode())
        digest.update(f"ticks-2 {self._freq} {self._calendar}".encode())
        return digest.hexdigest()


def from_config(config: Config) -> TicksSource:
    return TicksSource.from_config(config, columns=config.data.columns, **dict(config.data.ticks))


@contextmanager
def _parquet_sink(target: Path, layout: TickLayout) -> Iterator[Callable[[pl.DataFrame], None]]:
    """Writes blocks of ticks, each a row group, to a file that gets its name when all is there.

    Columns: symbol, date, time, then the file's others: those we know under our names as float64,
    the rest as text. Every readable row is kept, quotes and cancellations too, in file order.
    """
    keys = ("symbol", "date", "time", "datetime")
    names = [n for n in layout.names.values() if n not in keys]
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


_MINUTE = 60_000
_DAY = 24 * 60 * _MINUTE
_KEYS = ("symbol", "date", "bar")
_SYMBOL_DAY = ("symbol", "date")
_PLACES = ("row", "symbol", "date", "ms", "bad")

BAR_COLUMNS = ("price", "volume", "amount", "acc_volume", "acc_amount", "pre_close", "trade_code")
"""The columns of a tick file that bars are made of."""
_ROWS = 2**36  # more than any file has; milliseconds of a day take the 27 bits above
_GRACE = 5 * _MINUTE  # prints of the closing auction and late snapshots still belong to the bar


class Hours(NamedTuple):
    """A session in milliseconds since midnight; trades from `first` up to `last` belong to it."""

    open: int
    close: int
    first: int
    last: int


class Sessions(NamedTuple):
    """The sessions of a day, and where trades without a bar may be (after-hours trading)."""

    hours: tuple[Hours, ...]
    after: tuple[int, int] | None = None


def sessions_of(calendar: str) -> Sessions:
    """Trading hours: A-shares' with their auctions, any time, or an exchange's regular ones."""
    if calendar == "XSHG":
        morning = Hours(_ms(9, 30), _ms(11, 30), _ms(9, 15), _ms(11, 30) + _GRACE)
        afternoon = Hours(_ms(13, 0), _ms(15, 0), _ms(12, 59), _ms(15, 0) + _GRACE)
        # Fixed-price trading of STAR and ChiNext: real, but in no bar of the continuous session.
        return Sessions((morning, afternoon), (_ms(15, 5), _ms(15, 31)))
    if calendar in (calendars.ROUND_THE_CLOCK, calendars.FROM_DATA):
        return Sessions((Hours(0, _DAY, 0, _DAY),))
    zone = calendars.timezone_of(calendar)
    table = calendars.hours(calendar, date(2019, 1, 1), date(2019, 12, 31), zone)

    def usual(*names: str) -> list[int]:
        """Milliseconds of the most frequent times of day, where there are any."""
        times = (table[name].dt.time().mode().first() for name in names)
        return [_ms(at.hour, at.minute) for at in times if isinstance(at, time)]

    both = zip(usual("open", "break_end"), usual("break_start", "close"), strict=True)
    return Sessions(tuple(Hours(o, c, o, c + _GRACE) for o, c in both))


def bar_end(sessions: Sessions, freq: Freq) -> pl.Expr:
    """End of the bar of a trade at `ms` (Int32 ms since midnight, 0 for daily), null if none."""
    size = calendars.MINUTES[freq] * _MINUTE
    ms = pl.col("ms")
    end = pl.lit(None, dtype=pl.Int32)
    for hours in sessions.hours:
        last = -(-(hours.close - hours.open) // size) - 1
        place = ((ms - hours.open) // size).clip(0, last)
        label = pl.min_horizontal(hours.open + (place + 1) * size, pl.lit(hours.close))
        inside = ms.is_between(hours.first, hours.last, closed="left")
        end = pl.when(inside).then(pl.lit(0) if freq == "1d" else label).otherwise(end)
    return end.cast(pl.Int32)


@dataclass
class TradeFilter:
    """Turns blocks of ticks into trades with a bar; see `trades`."""

    sessions: Sessions
    freq: Freq
    problems: ProblemLog
    _running: pl.DataFrame | None = None

    def trades(self, block: pl.DataFrame, layout: TickLayout) -> pl.DataFrame:
        """The trades of a block: symbol, date, bar, ms, row, price, volume, amount, pre_close."""
        block = block.select(c for c in (*_PLACES, *BAR_COLUMNS) if c in block.columns)
        if block["bad"].any():
            block = block.filter(~pl.col("bad"))
        if "trade_code" in layout.roles:
            block = block.filter(~pl.col("trade_code").is_in(["C", "c"]).fill_null(False))
        block = self._per_row(block, layout)
        block = block.with_columns(bar=bar_end(self.sessions, self.freq))
        block = self._without_nonsense(block, layout)
        traded = pl.col("volume") > 0
        if not layout.roles & {"volume", "acc_volume"}:
            # Without volumes every price counts; zeros before the open are quotes.
            traded = pl.col("bar").is_not_null() | (pl.col("price") > 0)
        return self._place_trades(block.filter(traded), layout)

    def _per_row(self, block: pl.DataFrame, layout: TickLayout) -> pl.DataFrame:
        """Give every row its own volume and amount, differencing cumulative columns."""
        missing = pl.lit(None, dtype=pl.Float64)
        absent = [n for n in ("volume", "amount") if n not in layout.roles]
        running = [n for n in absent if f"acc_{n}" in layout.roles]
        if running:
            block = self._difference(block, layout, running)
        block = block.with_columns(missing.alias(n) for n in absent if n not in running)
        if not layout.roles & {"amount", "acc_amount"}:
            block = block.with_columns(amount=pl.col("price") * pl.col("volume"))
        if "pre_close" not in layout.roles:
            return block.with_columns(pre_close=missing)
        return block.with_columns(
            # Some exports write 0 where they do not know it.
            pre_close=pl.when(pl.col("pre_close") > 0).then(pl.col("pre_close"))
        )

    def _difference(
        self, block: pl.DataFrame, layout: TickLayout, names: list[str]
    ) -> pl.DataFrame:
        """Growth of cumulative columns that day; rows where one falls are logged and left out."""
        totals = [f"acc_{name}" for name in names]
        # Equal symbols need to be together, in whatever order: codes sort faster than text.
        keys = (pl.col("symbol").to_physical(), "date", "ms")
        block = self._with_base(block.sort(*keys, maintain_order=True), totals)
        falls = {t: block[t] < block[f"{t}_base"] for t in totals}
        if any(fell.any() for fell in falls.values()):
            what, remedy = "is less than before on that day", "Sort the file by symbol and time"
            for total, fell in falls.items():
                self.problems.report(layout, block.filter(fell), total, what, remedy)
            sound = pl.all_horizontal(~fell.fill_null(False) for fell in falls.values())
            block = self._with_base(block.filter(sound), totals)
        latest = block.group_by(_SYMBOL_DAY).agg(
            pl.max_horizontal(pl.col(t, f"{t}_base").max()).alias(f"{t}_before") for t in totals
        )
        latest = latest if self._running is None else pl.concat([self._running, latest])
        # One day per symbol is enough: within a symbol, days do not come back.
        latest = latest.filter(pl.col("date") == pl.col("date").max().over("symbol"))
        self._running = latest.group_by(_SYMBOL_DAY).agg(pl.all().max())
        return block.with_columns(
            (pl.col(f"acc_{name}") - pl.col(f"acc_{name}_base")).alias(name) for name in names
        )

    def _with_base(self, block: pl.DataFrame, totals: list[str]) -> pl.DataFrame:
        """Add what each total had reached that day before the row, as its `_base`."""
        before = {t: f"{t}_before" for t in totals}
        if self._running is None:
            block = block.with_columns(pl.lit(0.0).alias(name) for name in before.values())
        else:
            block = block.join(self._running, on=_SYMBOL_DAY, how="left", maintain_order="left")
        return block.with_columns(
            pl.max_horizontal(name, pl.col(t).cum_max().forward_fill().shift(1).over(_SYMBOL_DAY))
            .fill_null(0.0)
            .alias(f"{t}_base")
            for t, name in before.items()
        ).drop(before.values())

    def _without_nonsense(self, block: pl.DataFrame, layout: TickLayout) -> pl.DataFrame:
        """Leave out numbers below zero and beyond all bounds, and say so."""
        rules = []
        for name, kind in (("price", "close"), ("volume", "volume"), ("amount", "amount")):
            value, bounds = pl.col(name), BOUNDS[kind]
            beyond = bounds.excludes(value) | value.is_infinite() | value.is_nan()
            rules += [(name, "is negative", value < 0)]
            rules += [(name, f"cannot be meant (up to {bounds.high:g})", beyond)]
        broken = block.select(e.fill_null(False).alias(str(k)) for k, (*_, e) in enumerate(rules))
        wrong = pl.select(pl.any_horizontal(broken.get_columns())).to_series()
        if not wrong.any():
            return block
        said = pl.repeat(False, block.height, eager=True)
        for flags, (name, what, _) in zip(broken.get_columns(), rules, strict=True):
            # An amount made of a price and a volume has no fault of its own.
            self.problems.report(layout, block.filter(flags & ~said), name, what, "Mend the row")
            said |= flags
        return block.filter(~wrong)

    def _place_trades(self, trades: pl.DataFrame, layout: TickLayout) -> pl.DataFrame:
        """Only trades with a price and a bar; the others are logged."""
        priceless = trades["price"].is_null() | (trades["price"] <= 0)
        if priceless.any():
            lost = trades.filter(priceless)
            what = "is not a price, yet there is volume"
            if not layout.roles & {"volume", "acc_volume"}:
                what = "is not a price"
            self.problems.report(layout, lost, "price", what, "Mend or remove the row")
            trades = trades.filter(~priceless)
        if not trades["bar"].null_count():
            return trades
        clock = (pl.col("ms").cast(pl.Int64) * 1_000_000).cast(pl.Time)
        outside = trades.filter(pl.col("bar").is_null())
        outside = outside.with_columns(at=clock.dt.strftime("%H:%M:%S%.3f"))
        after = pl.lit(False)
        if self.sessions.after is not None:
            after = pl.col("ms").is_between(*self.sessions.after, closed="left")
        column = layout.clock_column
        late, what = outside.filter(after), "is after-hours trading, which is in no bar"
        remedy = "Nothing to do: bars hold the continuous session and its auctions"
        self.problems.report(layout, late, column, what, remedy, value="at", severity="warning")
        wrong, what = outside.filter(~after), "is outside the session"
        remedy = "Check the time zone and data.calendar, or remove the row"
        self.problems.report(layout, wrong, column, what, remedy, value="at")
        return trades.filter(pl.col("bar").is_not_null())


def partial_bars(trades: pl.DataFrame, offset: int) -> pl.DataFrame:
    """Bars of one block's trades: `first` and `last` say where their first and last trade are.

    A place is the time of day and then the row (plus `offset`, to count across files).
    """
    place = pl.col("ms").cast(pl.Int64) * _ROWS + pl.col("row") + offset
    prices = {name: pl.col("price") for name in ("open", "high", "low", "close")}
    return merge_bars([trades.with_columns(**prices, first=place, last=place)])


def merge_bars(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """One bar per symbol and time out of partial bars, in no order."""
    # Symbol, date and bar as one integer: grouped faster than three columns.
    code, day = (pl.col(c).to_physical().cast(pl.Int64) for c in _SYMBOL_DAY)
    return (
        pl.concat(parts)
        .lazy()
        .with_columns(key=code * 2**36 + day * 1441 + pl.col("bar") // _MINUTE)
        .group_by("key")
        .agg(
            pl.col(_KEYS).first(),
            pl.col("open").min_by("first"),
            pl.col("high").max(),
            pl.col("low").min(),
            pl.col("close").max_by("last"),
            pl.col("volume", "amount").sum(),
            pl.col("pre_close").max(),
            pl.col("first").min(),
            pl.col("last").max(),
        )
        .drop("key")
        .collect()
    )


def _name_bars(bars: pl.DataFrame) -> pl.DataFrame:
    """Merged bars with the time they end at, and their session's reference price."""
    return bars.with_columns(
        pl.col("symbol").cast(pl.String),
        # A session's reference price is one, though a row may leave it out or write 0.
        pl.col("pre_close").max().over("symbol", "date"),
        time=pl.col("date").cast(pl.Datetime("us")) + pl.duration(milliseconds="bar"),
    )


_TICK_COLUMNS = ("symbol", "time", "price", "volume", "amount", "pre_close")
_STREAM = TickLayout(
    FileFacts(Path("ticks"), _TICK_COLUMNS, ""),
    ColumnMap({name: FileColumn(name, name, 1.0) for name in _TICK_COLUMNS}),
    "text",
    1.0,
)


def place_ticks(times: pl.Series, sessions: Sessions, freq: Freq) -> pl.Series:
    """Ends of the bars that ticks of these times belong to, null where they are in no session."""
    frame = _clock_columns(pl.DataFrame({"time": times}))
    end = pl.col("date").cast(pl.Datetime("us")) + pl.duration(milliseconds=pl.col("bar"))
    return frame.select(bar=bar_end(sessions, freq), date="date").select(end).to_series()


def bars_of_ticks(
    ticks: pl.DataFrame, sessions: Sessions, freq: Freq
) -> tuple[pl.DataFrame, list[Problem]]:
    """Bars of trades that came one by one, by the rules of files, and what is wrong with trades.

    ticks: symbol, time (Datetime), price, volume, amount and pre_close (both may be null), in the
        order they came; a problem's row counts them from 0
    """
    block = _clock_columns(ticks).with_columns(
        pl.col("symbol").cast(pl.Categorical),
        pl.coalesce("amount", pl.col("price") * pl.col("volume")),
        row=pl.int_range(ticks.height, dtype=pl.Int64),
        bad=pl.lit(False),
    )
    problems = ProblemLog()
    trades = TradeFilter(sessions, freq, problems).trades(block.drop("time"), _STREAM)
    bars = _name_bars(partial_bars(trades, 0)).sort("symbol", "time")
    return bars, problems.problems()


def _clock_columns(ticks: pl.DataFrame) -> pl.DataFrame:
    """Ticks with date and ms since midnight."""
    at = pl.col("time")
    ms = (at - at.dt.truncate("1d")).dt.total_milliseconds().cast(pl.Int32)
    return ticks.with_columns(date=at.dt.date(), ms=ms)


@dataclass
class BarMerger:
    """Collects partial bars; spills them beyond `limit` to `directory`, in `parts` by symbol."""

    directory: Path
    parts: int
    limit: int = 150_000
    _pending: list[pl.DataFrame] = field(default_factory=list)
    _rows: int = 0
    _spills: int = 0

    def add(self, bars: pl.DataFrame) -> None:
        """Take partial bars; merges and spills when there are too many."""
        if bars.is_empty():
            return
        self._pending.append(bars)
        self._rows += bars.height
        if self._rows <= self.limit:
            return
        if self._spills:  # merging has not helped before, and is done at the end anyway
            self._spill(pl.concat(self._pending))
            return
        merged = merge_bars(self._pending)
        self._pending, self._rows = [merged], merged.height
        if merged.height > self.limit // 2:
            self._spill(merged)

    def finish(self) -> Iterator[pl.DataFrame]:
        """Yield the merged bars in pieces, in no order; a symbol's bars are in one piece."""
        if self._spills and self._pending:
            self._spill(pl.concat(self._pending))
        if self._pending:
            yield merge_bars(self._pending)
        for part in range(self.parts):
            files = sorted(self.directory.glob(f"{part}-*.parquet"))
            if files:
                yield merge_bars([pl.read_parquet(f, memory_map=False, glob=False) for f in files])

    def _spill(self, bars: pl.DataFrame) -> None:
        split = bars.with_columns(part=pl.col("symbol").to_physical() % self.parts)
        for (part,), piece in split.partition_by("part", as_dict=True, include_key=False).items():
            piece.write_parquet(
                self.directory / f"{part}-{self._spills}.parquet", compression="lz4"
            )
        self._spills += 1
        self._pending, self._rows = [], 0


def _ms(hour: int, minute: int) -> int:
    return (hour * 60 + minute) * _MINUTE
