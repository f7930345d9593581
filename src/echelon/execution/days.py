"""Trading days on one grid of ticks, and how they come out of the store's intraday bars.

A tick is a bar of the day's grid (a minute, five minutes) or the time between two snapshots of a
book. All days of one `Days` have the same grid; a tick that does not occur on a day (a halt, an
early close) has no price and no volume, and nothing trades there. `load_days`:

1. The grid of a day comes from the dataset's calendar: the ticks of a regular session, its lunch
   break left out (48 five-minute ticks for A-shares, 390 minutes in New York, 1440 around the
   clock). The calendar "data" has no hours; there the grid is the times of day that occur.
2. The store stamps a bar with its end; a tick is named by its begin, so the bar of 09:35 is the
   tick of 09:30, and the bar that ends at midnight belongs to the day that is over.
3. A tick is priced at its close or at its volume-weighted mean: traded money over volume where the
   dataset has it (cut to the bar's range: vendors round), else (high + low + close) / 3.
4. Known as a tick begins is its open; without opens the price of the tick before, and at the first
   one the last price of the day before (on a symbol's first day, its own).

Axes: `D` days (each of one symbol), `T` ticks of a day, `E` orders.
"""

from __future__ import annotations

import difflib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from threading import Lock
from typing import Any, Literal

import numpy as np
import polars as pl

from echelon.data import calendars
from echelon.data.store import Manifest, Store
from echelon.errors import DataError, UniverseError, UsageError
from echelon.sources import SourceInfo
from echelon.types import Bools, Floats, Ints, Times

PriceSource = Literal["close", "vwap", "book"]
"""What a trade in a tick is priced at: the bar's close, its volume-weighted mean, or the best
opposite quote."""
_TOO_FAR = 0.01  # a mean price this far outside its bar is of other units, not a rounding
_TOO_MANY = 0.01
_ARRAYS = ("buy", "sell", "known", "volume")
_COLUMNS = ("open", "high", "low", "close", "volume", "amount", "factor")


@dataclass(frozen=True)
class Days:
    """`D` days of `T` ticks.

    symbols[D]; dates[D]: midnight, or the moment at which a session of a book begins
    clock[T]: minutes after that at which a tick begins
    buy, sell[D,T]: price of a share bought or sold in the tick; NaN: no trading
    known[D,T]: last price known as the tick begins, NaN before the first; the arrival price
    volume[D,T]: shares traded in the tick, 0 where there is no trading
    """

    symbols: tuple[str, ...]
    dates: Times
    clock: Floats
    buy: Floats
    sell: Floats
    known: Floats
    volume: Floats
    price_source: PriceSource = "close"

    def __post_init__(self) -> None:
        shape = (len(self.dates), len(self.clock))
        assert len(self.symbols) == shape[0], "symbols are not [D]"
        for name in _ARRAYS:
            array = getattr(self, name)
            assert array.shape == shape, f"{name} is not [D,T]"
            assert array.dtype == np.float64, f"{name} is not float64"
            assert array.flags.c_contiguous, f"{name} is not one block of memory"
        assert np.isfinite(self.volume).all(), "volume is not a number somewhere"
        assert (self.volume >= 0.0).all(), "volume is negative somewhere"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.dates), len(self.clock)

    @property
    def n_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    def name(self, day: int) -> str:
        """Symbol and date, for messages; of a session its time, too."""
        date = self.dates[day]
        midnight = date == date.astype("datetime64[D]")
        when = np.datetime_as_string(date, unit="D" if midnight else "s")
        return f"{self.symbols[day]} on {when}"

    @property
    def tick_minutes(self) -> float:
        """How long a tick is: the shortest time from one to the next (a lunch break is longer)."""
        return float(np.diff(self.clock).min()) if len(self.clock) > 1 else 1.0

    @property
    def sessions(self) -> tuple[Ints, Ints]:
        """(first tick, the one after the last) of each day's date, [D]: when the market was open.

        Of a date on which one symbol alone is known, that of all days together: its silence may
        have been a halt, which nobody knew beforehand. Early closes are known beforehand.
        """
        traded = (self.buy > 0.0) | (self.sell > 0.0)
        which, count = np.unique(self.dates, return_inverse=True, return_counts=True)[1:]
        open_ = np.zeros((len(count), traded.shape[1]), dtype=np.bool_)
        np.logical_or.at(open_, which, traded)
        open_[(count == 1) | ~open_.any(axis=1)] = traded.any(axis=0)
        begin, end = open_.argmax(axis=1), open_.shape[1] - open_[:, ::-1].argmax(axis=1)
        return begin[which], end[which]

    def take(self, which: Ints | Bools) -> Days:
        which = np.flatnonzero(which) if which.dtype == np.bool_ else which
        arrays: dict[str, Any] = {
            name: np.ascontiguousarray(getattr(self, name)[which]) for name in _ARRAYS
        }
        symbols = tuple(self.symbols[k] for k in which.tolist())
        return replace(self, symbols=symbols, dates=self.dates[which], **arrays)

    def by_symbol(self) -> list[tuple[Ints, Ints]]:
        """For each symbol its days in order of date, and how many of them lie before each."""
        _, number = np.unique(np.asarray(self.symbols), return_inverse=True)
        order = np.lexsort((self.dates, number))
        groups = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
        return [
            (which, np.searchsorted(self.dates[which], self.dates[which]).astype(np.int64))
            for which in groups
        ]

    @staticmethod
    def from_prices(
        price: Floats,
        volume: Floats,
        *,
        symbol: str = "SYM",
        opens_at: float = 570.0,
        minutes: float = 1.0,
        first_date: str = "2020-01-06",
    ) -> Days:
        """Days of one symbol made from price[D,T] and volume[D,T]: for markets of one's own.

        Known as a tick begins is the price of the tick before; at the first, its own.
        """
        price, volume = np.ascontiguousarray(price, float), np.ascontiguousarray(volume, float)
        n_days, n_ticks = price.shape
        known = np.concatenate([price[:, :1], price[:, :-1]], axis=1)
        return Days(
            symbols=(symbol,) * n_days,
            dates=np.datetime64(first_date, "us") + np.arange(n_days) * np.timedelta64(1, "D"),
            clock=np.asarray(opens_at + minutes * np.arange(n_ticks), dtype=np.float64),
            buy=price,
            sell=price,
            known=np.ascontiguousarray(known),
            volume=volume,
        )


class DayCache:
    """The days that were loaded last, up to `max_bytes`, by all that makes them what they are."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Days] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def load(self, key: Hashable, read: Callable[[], Days]) -> Days:
        """The days of `key`, read where they are not here; what was unused longest makes room."""
        with self._lock:
            days = self._kept.pop(key, None)
        days = read() if days is None else days
        with self._lock:
            self._kept[key] = days
            while sum(kept.n_bytes for kept in self._kept.values()) > self.max_bytes:
                self._kept.popitem(last=False)
        return days


CACHE = DayCache()
"""The cache that `load_days` uses unless it is given another."""


def load_days(
    store: Store,
    dataset: str,
    symbols: Sequence[str],
    first: date,
    last: date,
    *,
    price_source: PriceSource = "close",
    outside: Literal["refuse", "drop"] = "refuse",
    cache: DayCache | None = CACHE,
) -> Days:
    """Days of `symbols` (none: all of the dataset) from `first` to `last`, both included.

    In order of symbol, then date, as far as there are bars; where there is none in a day there is
    no price and no volume. Prices and volumes are as stored.

    outside: what to do about bars outside the regular session, before the opening for one
    cache: None: read again. Views of a store that are not what is on disk are never cached.
    """
    store = store.pin_dataset(dataset)
    manifest = store.manifest(dataset)
    _refuse(manifest, price_source)
    have = store.symbols(dataset)["symbol"].to_list()
    for symbol in symbols:
        if symbol not in have:
            near = difflib.get_close_matches(symbol, have, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(have[:10])}."
            raise UniverseError(f"dataset {dataset!r} has no symbol {symbol}: {hint}")
    chosen = tuple(dict.fromkeys(symbols)) or tuple(have)

    def read() -> Days:
        bars, clock = _read_bars(store, manifest, chosen, _candidates(manifest, first, last))
        if not bars.is_empty():
            on_grid = pl.col("minute").is_in(clock.tolist())
            off, bars = bars.filter(~on_grid), bars.filter(on_grid)
            if off.height and outside == "refuse":
                raise DataError(
                    f"dataset {dataset!r}: {off.height} bar(s), the first of {off['symbol'][0]} at "
                    f"{off['time'][0]}, lie outside the regular session of "
                    f"{manifest.info.calendar}. Drop them (outside='drop'), or import the bars of "
                    "the session only."
                )
        if bars.is_empty():
            low, high = manifest.span
            raise DataError(
                f"dataset {dataset!r} has no bars of {', '.join(chosen[:5])} from {first} to "
                f"{last}; it runs from {low.date()} to {high.date()}. Choose other dates or "
                "symbols."
            )
        if price_source == "vwap":
            _refuse_odd_money(bars, dataset)
        return _lay_out(bars, chosen, clock, price_source)

    if cache is None or type(store) is not Store:
        return read()
    key = (manifest.content_hash, manifest.info, chosen, first, last, price_source, outside)
    return cache.load(key, read)


def _session_clock(info: SourceInfo, first: date, last: date) -> Floats:
    """[T] minutes after midnight at which the ticks of a regular session begin.

    Regular is what most sessions of the span and of a month around it are: a single day that
    closes early still lies on the grid of the others. Not for the calendar "data".
    """
    length = calendars.MINUTES[info.freq]
    if info.calendar == calendars.ROUND_THE_CLOCK:
        return np.arange(0.0, 1440.0, length)
    reach, month = calendars.bounds(info.calendar), timedelta(days=30)
    begin, until = reach.clip(first - month, last + month)
    hours = calendars.hours(info.calendar, min(first, begin), max(last, until), info.timezone)
    if hours.is_empty():
        raise DataError(f"{info.calendar} has no session from {first} to {last}. Choose others.")
    minutes = hours.select(
        ((pl.col(name) - pl.col("session")).dt.total_minutes()).alias(name)
        for name in ("open", "break_start", "break_end", "close")
    )
    opens, pause, resume, closes = Counter(minutes.iter_rows()).most_common(1)[0][0]
    if opens < 0 or closes > 1440:
        raise DataError(
            f"sessions of {info.calendar} begin on another day than they end, which execution "
            "cannot lay out. Use an exchange whose session lies within a day, or 24/7."
        )
    clock = np.arange(float(opens), float(closes), length)
    if pause is not None:
        clock = clock[(clock < pause) | (clock >= resume)]
    return clock


def _refuse(manifest: Manifest, price_source: PriceSource) -> None:
    info = manifest.info
    if price_source == "book":
        raise UsageError(
            "price source 'book' needs order-book snapshots, which bars are not. Use close or "
            "vwap, or load a book with echelon.execution.book_days."
        )
    if price_source not in ("close", "vwap"):
        raise UsageError(f"unknown price source {price_source!r}: there are close, vwap and book.")
    if info.freq == "1d":
        raise DataError(
            f"dataset {manifest.name!r} has daily bars; execution works inside the day. Import "
            "1-minute or 5-minute bars (data.freq: 1min)."
        )
    if "volume" not in info.fields:
        raise DataError(
            f"dataset {manifest.name!r} has no volume, without which nothing can be filled. "
            "Import bars with their volume."
        )


def _candidates(manifest: Manifest, first: date, last: date) -> list[date]:
    """Dates that may have bars."""
    low, high = (moment.date() for moment in manifest.span)
    # The first bar of a span may end at midnight, and is of the day before.
    first, last = max(first, low - timedelta(days=1)), min(last, high)
    if first > last:
        return []
    if manifest.info.calendar == calendars.FROM_DATA:
        return [first + timedelta(days=k) for k in range((last - first).days + 1)]
    days = calendars.sessions(manifest.info.calendar, first, last)
    return [day.astype("datetime64[D]").item() for day in days]


def _read_bars(
    store: Store, manifest: Manifest, symbols: Sequence[str], dates: Sequence[date]
) -> tuple[pl.DataFrame, Floats]:
    """(bars with the `day` and `minute` at which they begin, the day's grid[T])."""
    if not dates:
        return pl.DataFrame(), np.empty(0)
    info, midnight = manifest.info, datetime.min.time()
    length = timedelta(minutes=calendars.MINUTES[info.freq])
    first, last = (datetime.combine(day, midnight) for day in (dates[0], dates[-1]))
    keys = store.partitions(manifest.name, first, last + timedelta(days=1))
    frames = [store.read_bars(manifest.name, key, symbols) for key in keys]
    if not frames:
        return pl.DataFrame(), np.empty(0)
    begin = pl.col("time") - length
    minute = begin.dt.hour().cast(pl.Float64) * 60.0 + begin.dt.minute()
    bars = pl.concat(frames).with_columns(day=begin.dt.date(), minute=minute)
    bars = bars.filter(pl.col("day").is_in(dates))
    if info.calendar != calendars.FROM_DATA:
        return bars, _session_clock(info, dates[0], dates[-1])
    return bars, np.ascontiguousarray(bars["minute"].unique().sort().to_numpy())


def _refuse_odd_money(bars: pl.DataFrame, name: str) -> None:
    """Refuse traded money of other units than price times volume."""
    money = pl.col("amount") / pl.col("volume")
    mean = bars.filter(pl.col("volume") > 0.0).select("low", "high", mean=money).drop_nulls()
    far = mean.filter(
        (pl.col("mean") > pl.col("high") * (1.0 + _TOO_FAR))
        | (pl.col("mean") < pl.col("low") * (1.0 - _TOO_FAR))
    )
    if far.height > max(_TOO_MANY * mean.height, 3):
        low, high, value = far.row(0)
        raise DataError(
            f"dataset {name!r}: amount / volume lies outside low to high in {far.height} of "
            f"{mean.height} bars (the first: {value:g} is not in {low:g} to {high:g}), so amount "
            "and volume are in other units than the prices (lots of 100? adjusted prices?). Use "
            "price source close, or import shares and money on the basis of the prices."
        )


def _lay_out(
    bars: pl.DataFrame, symbols: Sequence[str], clock: Floats, price_source: PriceSource
) -> Days:
    """Bars scattered over the grids of their days, those in order of `symbols`, then date."""
    bars = bars.with_columns(pl.col("symbol").cast(pl.Enum(symbols))).sort("symbol", "time")
    places = bars.select("symbol", "day").unique(maintain_order=True)
    group = bars.select(pl.struct("symbol", "day").rle_id()).to_series().to_numpy()
    at = group, np.searchsorted(clock, bars["minute"].to_numpy())
    numbers = bars.select(pl.col(_COLUMNS).cast(pl.Float64)).to_dict()
    columns = {name: column.to_numpy() for name, column in numbers.items()}
    shares = np.nan_to_num(columns["volume"], nan=0.0)
    shape = (places.height, len(clock))
    price, known, volume = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape)
    price[at] = columns["close"] if price_source == "close" else _mean_price(columns, shares)
    known[at], volume[at] = columns["open"], shares
    factor = np.ones(shape[0])
    factor[group] = np.nan_to_num(columns["factor"], nan=1.0)  # of a day's bars the last one stays
    # Without an open: the price before, up to the day's first that of the symbol's day before, in
    # today's units.
    latest = np.maximum.accumulate(np.where(np.isnan(price), -1, np.arange(shape[1])), axis=1)
    closing = np.take_along_axis(price, latest[:, -1:], axis=1)[:, 0]
    same = (places["symbol"] == places["symbol"].shift(1)).fill_null(False).to_numpy()
    start = np.where(same, np.roll(closing, 1) * np.roll(factor, 1) / factor, np.nan)[:, None]
    latest = np.concatenate([np.full((shape[0], 1), -1), latest[:, :-1]], axis=1)
    before = np.where(latest >= 0, np.take_along_axis(price, latest, axis=1), start)
    known = np.where(np.isnan(known), before, known)
    # On a symbol's first day, without opens, its own.
    known[:, 0] = np.where(np.isnan(known[:, 0]), price[:, 0], known[:, 0])
    dates = places["day"].to_numpy().astype("datetime64[us]")
    names = tuple(places["symbol"].to_list())
    return Days(names, dates, clock, price, price, known, volume, price_source)


def _mean_price(columns: dict[str, Floats], shares: Floats) -> Floats:
    """Of a bar: traded money over volume, cut to its range; else (high + low + close) / 3."""
    close = columns["close"]
    high = np.where(np.isnan(columns["high"]), close, columns["high"])
    low = np.where(np.isnan(columns["low"]), close, columns["low"])
    typical = (high + low + close) / 3.0
    money = np.nan_to_num(columns["amount"], nan=0.0)
    mean = np.where((money > 0.0) & (shares > 0.0), money / np.maximum(shares, 1e-12), typical)
    return np.asarray(np.clip(mean, low, high))
