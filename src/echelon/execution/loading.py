"""Days to trade on, from the intraday bars of the store.

1. The grid of a day comes from the dataset's calendar: the ticks of a regular session, its lunch
   break left out (48 five-minute ticks for A-shares, 390 minutes in New York, 1440 around the
   clock). The calendar "data" has no hours; there the grid is the times of day that occur.
2. The store stamps a bar with its end; a tick is named by its begin, so the bar of 09:35 is the
   tick of 09:30, and the bar that ends at midnight belongs to the day that is over.
3. A tick is priced at its close or at its volume-weighted mean: traded money over volume where the
   dataset has it (cut to the bar's range: vendors round), else (high + low + close) / 3.
4. Known as a tick begins is its open; without opens the price of the tick before, and at the first
   one the last price of the day before (on a symbol's first day, its own).

Days are kept in a cache of bounded size under everything that makes them what they are: the
dataset's content, symbol, date, grid, price source, adjustment. A new import has another content.

Axes: `D` days, `T` ticks of a day.
"""

from __future__ import annotations

import difflib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from threading import Lock
from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from echelon.data import calendars
from echelon.data.bars import SourceInfo
from echelon.data.store import Manifest, Store
from echelon.errors import DataError, InvalidDataError, Problem, UniverseError, UsageError
from echelon.execution.days import Days, PriceSource
from echelon.types import Floats

_TOO_FAR = 0.01  # a mean price this far outside its bar is of other units, not a rounding
_TOO_MANY = 0.01
_COLUMNS = ("open", "high", "low", "close", "volume", "amount", "factor")


class DayKey(NamedTuple):
    """Everything that makes a loaded day what it is."""

    content: str
    symbol: str
    day: date
    clock: bytes
    price_source: PriceSource
    adjusted: bool
    outside: str


class DayArrays(NamedTuple):
    """One symbol's day, [T]; `factor` is of its last bar."""

    price: Floats
    known: Floats
    volume: Floats
    factor: float

    @property
    def n_bytes(self) -> int:
        """What it takes in memory."""
        return int(self.price.nbytes + self.known.nbytes + self.volume.nbytes)


class DayCache:
    """The days used last, up to `max_bytes`; a day without bars is remembered as None."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = self.hits = self.misses = 0
        self._days: OrderedDict[DayKey, DayArrays | None] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._days)

    def __contains__(self, key: DayKey) -> bool:
        return key in self._days

    def get(self, key: DayKey) -> tuple[bool, DayArrays | None]:
        """(whether it is there, the day)."""
        with self._lock:
            if key not in self._days:
                self.misses += 1
                return False, None
            self.hits += 1
            self._days.move_to_end(key)
            return True, self._days[key]

    def put(self, key: DayKey, day: DayArrays | None) -> None:
        """Add a day, and drop those that were not used for longest."""
        with self._lock:
            if key in self._days:
                self.n_bytes -= _size(self._days.pop(key))
            self._days[key] = day
            self.n_bytes += _size(day)
            while self.n_bytes > self.max_bytes and self._days:
                self.n_bytes -= _size(self._days.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all days."""
        with self._lock:
            self._days.clear()
            self.n_bytes = 0


def _size(day: DayArrays | None) -> int:
    return 256 + (0 if day is None else day.n_bytes)  # key and entry are some 256 bytes


CACHE = DayCache()
"""The cache that `load_days` uses unless it is given another."""


@dataclass(frozen=True)
class _Request:
    store: Store
    manifest: Manifest
    clock: Floats
    price_source: PriceSource
    adjusted: bool
    outside: str

    @property
    def length(self) -> int:
        """Minutes of a bar."""
        return calendars.MINUTES[self.manifest.info.freq]

    def key(self, symbol: str, day: date) -> DayKey:
        content = self.manifest.content_hash
        source, grid = self.price_source, self.clock.tobytes()
        return DayKey(content, symbol, day, grid, source, self.adjusted, self.outside)


def load_days(
    store: Store,
    dataset: str,
    symbols: Sequence[str],
    first: date,
    last: date,
    *,
    price_source: PriceSource = "close",
    adjusted: bool = False,
    halted: bool = False,
    outside: Literal["refuse", "drop"] = "refuse",
    cache: DayCache | None = CACHE,
) -> Days:
    """Days of `symbols` (none: all of the dataset) from `first` to `last`, both included.

    In order of symbol, then date. Where there is no bar there is no price and no volume.

    adjusted: prices times the adjustment factor, volumes over it; else as stored
    halted: also the sessions between a symbol's first and last bar on which it has none
    outside: what to do about bars outside the regular session, before the opening for one
    cache: None: read again. Views of a store that are not what is on disk are never cached.
    """
    store = store.pin_dataset(dataset)
    manifest = store.manifest(dataset)
    _refuse(manifest, price_source)
    table = store.symbols(dataset)
    chosen = _known_symbols(symbols, table, dataset)
    dates = _candidates(manifest, first, last)
    clock = _grid(store, manifest, chosen, dates)
    request = _Request(store, manifest, clock, price_source, adjusted, outside)
    loaded = _load(request, chosen, dates, cache if type(store) is Store else None)
    lives = {s: (a.date(), b.date()) for s, a, b in table["symbol", "first", "last"].iter_rows()}
    kept = [
        (symbol, day, loaded[symbol, day])
        for symbol in chosen
        for day in dates
        if loaded[symbol, day] is not None
        or (halted and lives[symbol][0] <= day <= lives[symbol][1])
    ]
    if not kept:
        low, high = manifest.span
        raise DataError(
            f"dataset {dataset!r} has no bars of {', '.join(chosen[:5])} from {first} to {last}; "
            f"it runs from {low.date()} to {high.date()}. Choose other dates or symbols."
        )
    return _join_days(kept, clock, price_source)


def session_clock(info: SourceInfo, first: date, last: date) -> Floats:
    """[T] minutes after midnight at which the ticks of a regular session begin.

    Regular is what most sessions of the span and of a month around it are: a single day that
    closes early still lies on the grid of the others. Not for the calendar "data".
    """
    length = calendars.MINUTES[info.freq]
    if info.calendar == calendars.ROUND_THE_CLOCK:
        return np.arange(0.0, 1440.0, length)
    reach, month = calendars.bounds(info.calendar), timedelta(days=30)
    begin, until = first - month, last + month
    begin = begin if reach.first is None else min(first, max(begin, reach.first))
    until = until if reach.last is None else max(last, min(until, reach.last))
    hours = calendars.hours(info.calendar, begin, until, info.timezone)
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


def _known_symbols(symbols: Sequence[str], table: pl.DataFrame, dataset: str) -> tuple[str, ...]:
    have = table["symbol"].to_list()
    for symbol in symbols:
        if symbol not in have:
            near = difflib.get_close_matches(symbol, have, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(have[:10])}."
            raise UniverseError(f"dataset {dataset!r} has no symbol {symbol}: {hint}")
    return tuple(dict.fromkeys(symbols)) or tuple(have)


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


def _grid(
    store: Store, manifest: Manifest, symbols: Sequence[str], dates: Sequence[date]
) -> Floats:
    if not dates:
        return np.empty(0)
    first, last = dates[0], dates[-1]
    if manifest.info.calendar != calendars.FROM_DATA:
        return session_clock(manifest.info, first, last)
    length = calendars.MINUTES[manifest.info.freq]
    keys = store.partitions(manifest.name, *_moments(first, last))
    frames = [store.read_bars(manifest.name, key, symbols, ["time"]) for key in keys]
    if not frames:
        return np.empty(0)
    begin = pl.concat(frames)["time"] - timedelta(minutes=length)
    inside = begin.filter(begin.dt.date().is_between(first, last))
    clock = (inside.dt.hour().cast(pl.Float64) * 60.0 + inside.dt.minute()).unique().sort()
    return np.ascontiguousarray(clock.to_numpy())


def _moments(first: date, last: date) -> tuple[datetime, datetime]:
    """First and last end that a bar of these dates can have."""
    midnight = datetime.min.time()
    return datetime.combine(first, midnight), datetime.combine(last + timedelta(days=1), midnight)


def _load(
    request: _Request, symbols: Sequence[str], dates: Sequence[date], cache: DayCache | None
) -> dict[tuple[str, date], DayArrays | None]:
    loaded: dict[tuple[str, date], DayArrays | None] = {}
    missing = []
    for symbol in symbols:
        for day in dates:
            there, arrays = (False, None) if cache is None else cache.get(request.key(symbol, day))
            loaded[symbol, day] = arrays
            if not there:
                missing.append((symbol, day))
    loaded |= _read(request, missing)
    if cache is not None:
        for symbol, day in missing:
            cache.put(request.key(symbol, day), loaded[symbol, day])
    return loaded


def _read(
    request: _Request, wanted: Sequence[tuple[str, date]]
) -> dict[tuple[str, date], DayArrays | None]:
    """The days among `wanted` that have bars."""
    if not wanted:
        return {}
    symbols = sorted({symbol for symbol, _ in wanted})
    days = sorted({day for _, day in wanted})
    name = request.manifest.name
    keys = request.store.partitions(name, *_moments(days[0], days[-1]))
    frames = [request.store.read_bars(name, key, symbols) for key in keys]
    if not frames:
        return {}
    begin = pl.col("begin")
    bars = (
        pl.concat(frames)
        .with_columns(begin=pl.col("time") - timedelta(minutes=request.length))
        .with_columns(
            day=begin.dt.date(),
            minute=begin.dt.hour().cast(pl.Float64) * 60.0 + begin.dt.minute(),
        )
        .filter(pl.col("day").is_in(days))
    )
    bars = _inside(bars, request)
    _refuse_damaged(bars, request)
    asked = set(wanted)
    return {place: day for place, day in _lay_out(bars, request).items() if place in asked}


def _inside(bars: pl.DataFrame, request: _Request) -> pl.DataFrame:
    on_grid = pl.col("minute").is_in(request.clock.tolist())
    off = bars.filter(~on_grid)
    if off.height and request.outside == "refuse":
        raise DataError(
            f"dataset {request.manifest.name!r}: {off.height} bar(s), the first of "
            f"{off['symbol'][0]} at {off['time'][0]}, lie outside the regular session of "
            f"{request.manifest.info.calendar}. Drop them (outside='drop'), or import the bars of "
            "the session only."
        )
    return bars.filter(on_grid)


def _refuse_damaged(bars: pl.DataFrame, request: _Request) -> None:
    """Refuse what import refuses, in case the files were written by others."""
    name = request.manifest.name
    again = bars.filter(pl.struct("symbol", "time").is_duplicated())
    volume = pl.col("volume")
    odd = bars.filter((volume < 0.0) | volume.is_nan() | volume.is_infinite())
    close = pl.col("close")
    empty = bars.filter(close.is_null() | ~(close > 0.0) | ~close.is_finite())
    remedy = "Import the dataset again; import refuses such rows"
    problems = [
        Problem(name, None, field, f"{symbol} at {time}: {text}", remedy)
        for field, rows, text in (
            ("time", again, "the bar is there more than once"),
            ("volume", odd, "the volume is not a number of at least 0"),
            ("close", empty, "the close is not a positive number"),
        )
        for symbol, time in rows.select("symbol", "time").iter_rows()
    ]
    if problems:
        raise InvalidDataError(problems)
    if request.price_source == "vwap":
        _refuse_odd_money(bars, name)


def _refuse_odd_money(bars: pl.DataFrame, name: str) -> None:
    """Refuse traded money of other units than price times volume."""
    mean = bars.filter(pl.col("volume") > 0.0).select(
        "low", "high", mean=pl.col("amount") / pl.col("volume")
    )
    mean = mean.drop_nulls()
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


def _lay_out(bars: pl.DataFrame, request: _Request) -> dict[tuple[str, date], DayArrays]:
    """Bars scattered over the grids of their days."""
    bars = bars.sort("symbol", "time")
    group = bars.select(pl.struct("symbol", "day").rle_id()).to_series().to_numpy()
    at = group, np.searchsorted(request.clock, bars["minute"].to_numpy())
    columns = {name: bars[name].cast(pl.Float64).to_numpy() for name in _COLUMNS}
    factor = np.nan_to_num(columns["factor"], nan=1.0)
    scale = factor if request.adjusted else np.ones(len(factor))
    shares = np.nan_to_num(columns["volume"], nan=0.0)
    traded = columns["close"]
    if request.price_source == "vwap":
        traded = _mean_price(columns, shares)
    places = bars.select("symbol", "day").unique(maintain_order=True).rows()
    shape = (len(places), len(request.clock))
    price, known, volume = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape)
    price[at], known[at], volume[at] = traded * scale, columns["open"] * scale, shares / scale
    before = np.maximum.accumulate(np.where(np.isnan(price), -1, np.arange(shape[1])), axis=1)
    before = np.concatenate([np.full((len(places), 1), -1), before[:, :-1]], axis=1)
    carried = np.where(before >= 0, np.take_along_axis(price, before, axis=1), np.nan)
    known = np.where(np.isnan(known), carried, known)
    last = np.ones(len(places))
    if not request.adjusted:
        last[group] = factor  # of a day's bars the last one stays
    # Copies, so that a day that the cache drops gives its memory back.
    return {
        place: DayArrays(price[k].copy(), known[k].copy(), volume[k].copy(), float(last[k]))
        for k, place in enumerate(places)
    }


def _mean_price(columns: dict[str, Floats], shares: Floats) -> Floats:
    """Of a bar: traded money over volume, cut to its range; else (high + low + close) / 3."""
    close = columns["close"]
    high = np.where(np.isnan(columns["high"]), close, columns["high"])
    low = np.where(np.isnan(columns["low"]), close, columns["low"])
    typical = (high + low + close) / 3.0
    money = np.nan_to_num(columns["amount"], nan=0.0)
    mean = np.where((money > 0.0) & (shares > 0.0), money / np.maximum(shares, 1e-12), typical)
    return np.asarray(np.clip(mean, low, high))


def _join_days(
    kept: Sequence[tuple[str, date, DayArrays | None]], clock: Floats, price_source: PriceSource
) -> Days:
    shape = (len(kept), len(clock))
    price, known, volume = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape)
    last: dict[str, tuple[float, float]] = {}
    for k, (symbol, _, day) in enumerate(kept):
        before, factor = last.get(symbol, (np.nan, 1.0))
        if day is None:
            known[k] = before
            continue
        price[k], known[k], volume[k] = day.price, day.known, day.volume
        # Up to the first price of the day, what was known is yesterday's, in today's units.
        known[k, np.isnan(day.known)] = before * factor / day.factor
        if np.isnan(known[k, 0]):
            known[k, 0] = price[k, 0]  # a symbol's first day, without opens
        last[symbol] = float(day.price[~np.isnan(day.price)][-1]), day.factor
    dates = np.array([day for _, day, _ in kept], dtype="datetime64[us]")
    symbols = tuple(symbol for symbol, _, _ in kept)
    return Days(symbols, dates, clock, price, price, known, volume, price_source)
