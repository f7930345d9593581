"""Days of order-book snapshots: several levels of both sides, and what traded in between.

Tick t begins with snapshot t and lasts until the next one. What is traded in it, `bought` by those
who lifted asks and `sold` by those who hit bids, is known as it ends. The last tick of a day has no
snapshot after it and hence no trades: there is its book, and nothing more.

Two loaders: `synthetic_book_days` for the books of the `synthetic` source, and `read_book` for a
Parquet or CSV file of one recording with the columns

    ts                                      time of the snapshot; ascending
    midpoint, spread                        of the best quotes, in money
    buys, sells                             money traded by aggressive buyers and sellers since the
                                            snapshot before
    bids_distance_0 … bids_distance_<L-1>   price of a level as a share of the midpoint, less 1:
                                            below 0, best level first
    bids_notional_0 …                       money displayed at the level
    asks_distance_0 …, asks_notional_0 …    the same of the asks, distances above 0

Other columns are left alone. One recording is one day, even where it runs past midnight: its clock
then goes beyond 1440. `cut_sessions` makes days to work orders on from a long one:

1. The recording is parted where it pauses: where the next snapshot is more than `PAUSE` usual
   distances away.
2. Each part is cut, from its first snapshot on, into sessions of `length` ticks; each ends with
   the snapshot that begins the next one. What is left of a part is left out.

A session's date is the moment it begins, and its clock counts minutes from there. Snapshots come at
slightly uneven moments; the clock that all sessions share has their usual distance.

Axes: `D` days, `T` snapshots of a day, `L` levels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from echelon.data.sources._tables import ROW, inspect, read_whole
from echelon.data.sources._times import UNDERSTOOD, parse_times
from echelon.data.sources.synthetic import SyntheticSource
from echelon.data.synth.minutes import BLOCK, MinuteEngine, order_book
from echelon.data.synth.path import trace
from echelon.errors import DataError, InvalidDataError, Problem
from echelon.execution.days import Days
from echelon.execution.features import Quotes
from echelon.types import Bools, Floats, Times

PAUSE = 10.0
"""A snapshot this many usual distances after the one before begins a new part."""
_LEVELS = ("bid_price", "bid_size", "ask_price", "ask_size")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BookDays:
    """`D` days of `T` snapshots with `L` levels a side, best first.

    symbols[D]; dates[D]: midnight; clock[T]: minutes after midnight of the snapshots
    bid_price, ask_price[D,T,L]: NaN where there is no such level
    bid_size, ask_size[D,T,L]: shares displayed, 0 where there is no such level
    bought, sold[D,T]: shares that takers bought and sold from this snapshot to the next
    tick_size: smallest step of a price
    """

    symbols: tuple[str, ...]
    dates: Times
    clock: Floats
    bid_price: Floats
    bid_size: Floats
    ask_price: Floats
    ask_size: Floats
    bought: Floats
    sold: Floats
    tick_size: float

    def __post_init__(self) -> None:
        shape = (len(self.dates), len(self.clock), self.bid_price.shape[2])
        assert len(self.symbols) == shape[0], "symbols are not [D]"
        for name in (*_LEVELS, "bought", "sold"):
            array = getattr(self, name)
            assert array.shape == (shape if name in _LEVELS else shape[:2]), f"{name}: wrong shape"
            assert array.dtype == np.float64, f"{name} is not float64"
            assert array.flags.c_contiguous, f"{name} is not one block of memory"
        if not self.tick_size > 0.0:
            raise DataError(f"tick_size is {self.tick_size}; it must be positive.")
        crossed = self.bid_price[..., 0] >= self.ask_price[..., 0]
        with np.errstate(invalid="ignore"):
            unordered = (np.diff(self.bid_price, axis=2) >= 0.0).any(axis=2)
            unordered |= (np.diff(self.ask_price, axis=2) <= 0.0).any(axis=2)
        prices = np.concatenate([self.bid_price, self.ask_price], axis=2)
        sizes = np.concatenate([self.bid_size, self.ask_size], axis=2)
        flows = np.stack([self.bought, self.sold], axis=2)
        for fault, expected in (
            (crossed, "the best bid must be below the best ask"),
            (unordered, "levels must go from the best outwards"),
            ((prices <= 0.0).any(axis=2) | np.isinf(prices).any(axis=2), "prices must be positive"),
            (_not_counts(sizes), "sizes must be numbers of at least 0"),
            (_not_counts(flows), "traded volumes must be numbers of at least 0"),
        ):
            if fault.any():
                d, t = (int(k) for k in np.argwhere(fault)[0])
                raise DataError(
                    f"book of {self.symbols[d]} on "
                    f"{np.datetime_as_string(self.dates[d], unit='D')}, snapshot {t}: {expected} "
                    f"({int(fault.sum())} snapshot(s) have this fault). Correct or remove them."
                )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(D, T, L)."""
        n_days, n_ticks, n_levels = self.bid_price.shape
        return n_days, n_ticks, n_levels

    def to_days(self, *, last: bool = False) -> Days:
        """The same days for whoever takes the best quotes: metrics, benchmarks, bar simulators.

        Bought at the best ask and sold at the best bid of the snapshot with which a tick begins;
        known by then is their mean. T-1 ticks: what follows the last snapshot is not known, and
        what a schedule left for a tick without volume could never be filled.

        last: with the last snapshot as a tick, too: its levels can be taken, but nothing trades
        """
        n_ticks = self.shape[1] if last else self.shape[1] - 1
        if not n_ticks:
            raise DataError(
                f"the book of {self.symbols[0]} has one snapshot a day; trades lie between two. "
                "Give a longer recording."
            )
        ask, bid, volume = (
            np.ascontiguousarray(array[:, :n_ticks])
            for array in (self.ask_price[..., 0], self.bid_price[..., 0], self.bought + self.sold)
        )
        middle, clock = (ask + bid) / 2.0, self.clock[:n_ticks]
        return Days(self.symbols, self.dates, clock, ask, bid, middle, volume, "book")

    def quotes(self) -> Quotes:
        """What the book shows as each tick of `to_days` ends: the next snapshot's. [D,T-1]."""
        return Quotes(
            self.bid_price[:, 1:, 0],
            self.ask_price[:, 1:, 0],
            self.bid_size[:, 1:].sum(axis=2),
            self.ask_size[:, 1:].sum(axis=2),
        )


def synthetic_book_days(
    source: SyntheticSource, symbols: Sequence[str], sessions: Sequence[date]
) -> BookDays:
    """Books of a synthetic market: a snapshot at the end of each minute, five levels.

    The market has no trades by side; of a minute's volume that share is bought which its close
    has in the way from its low to its high. After an early close there are no levels.
    """
    market = source.market
    engine = MinuteEngine(market)
    ends = market.clock.minute_ends.astype(np.float64)
    places = [(symbol, session) for symbol in symbols for session in sessions]
    shape = (len(places), len(ends))
    levels = {name: np.full((*shape, 5), 0.0 if "size" in name else np.nan) for name in _LEVELS}
    bought, sold = np.zeros(shape), np.zeros(shape)
    for k, (symbol, session) in enumerate(places):
        day = market.clock.day_of(session)
        if day is None:
            raise DataError(f"{session} is no session of this market. Choose others.")
        book = order_book(engine, symbol, day)
        n = len(book.time)
        for name in _LEVELS:
            levels[name][k, :n] = getattr(book, name)
        block = engine.block(trace(market, market.position(symbol)), day // BLOCK)
        assert block is not None, "the book came from this block"
        row = block.days == day
        high, low, close, lots = (
            part[row][0, 1:n] for part in (block.high, block.low, block.close, block.lots)
        )
        share = np.where(high > low, (close - low) / np.maximum(high - low, 1e-12), 0.5)
        # Trades of a minute come after the snapshot with which it begins.
        bought[k, : n - 1] = 100.0 * lots * share
        sold[k, : n - 1] = 100.0 * lots * (1.0 - share)
    return BookDays(
        tuple(symbol for symbol, _ in places),
        np.array([session for _, session in places], dtype="datetime64[us]"),
        ends,
        **levels,
        bought=bought,
        sold=sold,
        tick_size=0.01,
    )


def read_book(
    path: Path, symbol: str, *, tick_size: float = 0.01, timezone: str = "UTC"
) -> BookDays:
    """One recording of a book, of the layout that the module describes: one day."""
    facts = inspect(path)
    n_levels = sum(f"bids_distance_{level}" in facts.columns for level in range(1000))
    fields = ("bids_distance", "bids_notional", "asks_distance", "asks_notional")
    wanted = [f"{field}_{level}" for field in fields for level in range(n_levels)]
    columns = ["ts", "midpoint", "spread", "buys", "sells", *wanted]
    missing = [name for name in columns if name not in facts.columns]
    if missing or not n_levels:
        absent = missing or ["bids_distance_0"]
        remedy = "See echelon.execution.book_days for the columns of a book file"
        raise InvalidDataError(
            [Problem(str(path), None, name, "the column is missing", remedy) for name in absent]
        )
    frame = read_whole(facts, columns)
    times = parse_times(frame["ts"], freq="1min", timezone=timezone)["time"]
    numbers = frame.select(pl.col(columns[1:]).cast(pl.Float64, strict=False).fill_null(np.nan))
    table = {
        field: numbers.select(f"{field}_{level}" for level in range(n_levels)).to_numpy()
        for field in fields
    }
    table |= {name: numbers[name].to_numpy() for name in columns[1:5]}
    _refuse_rows(path, frame[ROW], times, table)
    middle = table["midpoint"]
    levels = {}
    for side in ("bid", "ask"):
        price = middle[:, None] * (1.0 + table[f"{side}s_distance"])
        levels[f"{side}_price"] = np.ascontiguousarray(price[None])
        levels[f"{side}_size"] = np.ascontiguousarray((table[f"{side}s_notional"] / price)[None])
    start = times[0].replace(hour=0, minute=0, second=0, microsecond=0)
    moments = (times - start).dt.total_microseconds().cast(pl.Float64) / 60e6
    # Traded until the next snapshot, from what was traded since the one before.
    bought, sold = (np.append((table[k] / middle)[1:], 0.0)[None] for k in ("buys", "sells"))
    return BookDays(
        (symbol,),
        np.array([start], dtype="datetime64[us]"),
        np.ascontiguousarray(moments.to_numpy()),
        **levels,
        bought=bought,
        sold=sold,
        tick_size=tick_size,
    )


def _refuse_rows(path: Path, rows: pl.Series, times: pl.Series, table: dict[str, Floats]) -> None:
    """List the rows that cannot be snapshots."""
    step = np.diff(times.fill_null(strategy="forward").cast(pl.Int64).to_numpy(), prepend=-1)
    bids, asks = table["bids_distance"], table["asks_distance"]
    faults = (
        ("ts", times.is_null().to_numpy(), f"cannot be read as a time ({UNDERSTOOD})"),
        ("ts", step == 0, "is the time of the row before"),
        ("ts", step < -1, "is earlier than the row before"),
        *((k, ~(table[k] > 0.0), "is not a positive number") for k in ("midpoint", "spread")),
        *((k, ~(table[k] >= 0.0), "is not a number of at least 0") for k in ("buys", "sells")),
        ("bids_distance", _not_outwards(-bids), "do not go from the best bid outwards, below 0"),
        ("asks_distance", _not_outwards(asks), "do not go from the best ask outwards, above 0"),
        *(
            (k, ~(table[k] >= 0.0).all(axis=1), "are not all at least 0")
            for k in ("bids_notional", "asks_notional")
        ),
    )
    problems = [
        Problem(str(path), int(rows[int(k)]), name, f"{name} {text}", "Correct or remove the row")
        for name, wrong, text in faults
        for k in np.flatnonzero(wrong)
    ]
    if problems:
        problems.sort(key=lambda p: p.row or 0)
        raise InvalidDataError(problems, f"{path}: {len(problems)} problem(s) in the book")


def _not_counts(values: Floats) -> Bools:
    """[D,T] where any of values[D,T,…] is no number of at least 0."""
    return np.asarray((~np.isfinite(values) | (values < 0.0)).any(axis=2))


def _not_outwards(distance: Floats) -> Bools:
    positive = (distance > 0.0).all(axis=1) & (distance < 1.0).all(axis=1)
    return np.asarray(~(positive & (np.diff(distance, axis=1) > 0.0).all(axis=1)))


def cut_sessions(book: BookDays, length: int) -> BookDays:
    """Sessions of `length` ticks, hence of length + 1 snapshots, from a recording of one day."""
    n_days, n_snapshots, _ = book.shape
    assert n_days == 1, "one recording is one day"
    assert length >= 1, "a session has a tick"
    if n_snapshots <= length:
        raise DataError(
            f"the book of {book.symbols[0]} has {n_snapshots} snapshots, too few for a session of "
            f"{length} ticks. Set execution.book_session lower, or give a longer recording."
        )
    apart = np.diff(book.clock)
    usual = float(np.median(apart))
    bounds = [0, *(np.flatnonzero(apart > PAUSE * usual) + 1).tolist(), n_snapshots]
    first = [begin for low, high in pairwise(bounds) for begin in range(low, high - length, length)]
    if not first:
        raise DataError(
            f"the book of {book.symbols[0]} pauses {len(bounds) - 2} times, and no part in between "
            f"has {length + 1} snapshots. Set execution.book_session lower."
        )
    left_out = n_snapshots - len(np.unique(np.add.outer(first, np.arange(length + 1))))
    if left_out:
        log.info("%d of %d snapshots are left out: shorter than a session", left_out, n_snapshots)
    begins = np.array(first)
    at = begins[:, None] + np.arange(length + 1)
    arrays = {
        name: np.ascontiguousarray(getattr(book, name)[0, at])
        for name in (*_LEVELS, "bought", "sold")
    }
    for name in ("bought", "sold"):
        arrays[name][:, -1] = 0.0  # what follows the last snapshot is the next session's
    moments = np.round(book.clock[begins] * 60e6).astype("timedelta64[us]")
    clock = np.asarray(np.arange(length + 1) * usual, dtype=np.float64)
    names = book.symbols * len(begins)
    return BookDays(names, book.dates[0] + moments, clock, **arrays, tick_size=book.tick_size)
