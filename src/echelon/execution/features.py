"""Public features: what the market of a day shows, once per (day, tick), for all orders alike.

Row t of a day holds what is known as tick t **ends**; an order that decides as tick t begins reads
row t-1 and nothing later. The features shipped are cumulative along the day, so a row is made of
the ticks up to it and of whole earlier days of its symbol. They are ratios: units do not matter.

One's own features come in through one interface: a function of a `Past`, which is shown the ticks
of one day up to now and the days before it::

    def last_minutes_range(past: Past) -> float:
        recent = past.price[-10:]
        return float(np.log(np.nanmax(recent) / np.nanmin(recent)))

    public_features(days, {"range_10": last_minutes_range})

In a file that the configuration names (`execution.extensions`) they are declared with
`@execution_feature("range_10")`, next to metrics (`@metric`), and train, evaluate and compare find
them. Loading runs these files with the rights of the caller. Features belong to the configuration
that names the file; metrics are one table for the process (`METRICS`), in which a file that is
loaded again replaces its own. What is to come cannot be read there: it has not been copied yet.

Axes: `D` days, `T` ticks of a day, `F` features, `K` earlier days.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from echelon.config.code import RunCode, read_user_file, run_user_file
from echelon.errors import FeatureError
from echelon.execution.days import Days
from echelon.execution.history import METRICS
from echelon.execution.orders import TRAILING_DAYS
from echelon.features.scaler import RunningMoments, Scaler
from echelon.types import Bools, Floats, Floats32, Ints

SCALED_MOST = 10.0
"""Scaled features are cut to ± this many standard deviations of the train days."""
_FLOOR = 0.05  # of the mean tick's volume: so that an empty tick has a finite ratio
_collecting: ContextVar[dict[str, Custom] | None] = ContextVar("_collecting", default=None)


class Quotes(NamedTuple):
    """Of a book, as a tick ends, [D,T]: best quotes, and sizes displayed on all levels."""

    bid: Floats
    ask: Floats
    bid_depth: Floats
    ask_depth: Floats


@dataclass(frozen=True)
class PublicArrays:
    """What is public of `D` days, from arrays of one's own.

    today[D,T,F]: row t is known as tick t ends
    yesterday[D,T,F]: of the symbol's day before in the data; zeros where there is none
    """

    today: Floats32
    yesterday: Floats32

    def __post_init__(self) -> None:
        assert self.today.shape == self.yesterday.shape, "today and yesterday differ in shape"
        assert self.today.dtype == self.yesterday.dtype == np.float32, "not float32"


@dataclass(frozen=True)
class PublicFeatures(PublicArrays):
    """Features of `D` days; names[F]; scaler: what they were scaled with, None: unscaled."""

    names: tuple[str, ...]
    scaler: Scaler | None = None


class FeatureInputs:
    """What shipped features are made from; every array is cumulative along the day."""

    def __init__(self, days: Days, quotes: Quotes | None) -> None:
        self.days = days
        self.quotes = quotes

    @cached_property
    def traded(self) -> Bools:
        """[D,T] whether the tick has a price."""
        return np.asarray(self._raw > 0.0)

    @cached_property
    def _raw(self) -> Floats:
        return np.asarray((self.days.buy + self.days.sell) / 2.0)

    @cached_property
    def price(self) -> Floats:
        """[D,T+1] column 0: known as the day begins; t+1: last price up to tick t, NaN without."""
        prices = np.concatenate([self.days.known[:, :1], self._raw], axis=1)
        known = prices > 0.0
        last = np.maximum.accumulate(np.where(known, np.arange(prices.shape[1]), 0), axis=1)
        return np.asarray(np.take_along_axis(np.where(known, prices, np.nan), last, axis=1))

    @cached_property
    def moves(self) -> Floats:
        """[D,T] log return of each tick; 0 where there was none."""
        return np.nan_to_num(np.diff(np.log(self.price), axis=1), nan=0.0)

    @cached_property
    def profile(self) -> Floats:
        """[D,T] mean volume of the same tick on the symbol's earlier days; NaN without any."""
        return trailing_profile(self.days, TRAILING_DAYS)


_Compute = Callable[[FeatureInputs], Floats]


class _Shipped(NamedTuple):
    """compute: [D,T] of a market, NaN where unknown; scaled: by the scaler; book: needs quotes."""

    compute: _Compute
    scaled: bool
    book: bool


FEATURES: dict[str, _Shipped] = {}
"""The features shipped, by name."""


def _ship(name: str, *, scaled: bool = True, book: bool = False) -> Callable[[_Compute], _Compute]:
    def add(compute: _Compute) -> _Compute:
        FEATURES[name] = _Shipped(compute, scaled, book)
        return compute

    return add


def _return_over(ticks: int) -> _Compute:
    def compute(market: FeatureInputs) -> Floats:
        price = np.log(market.price)
        before = np.maximum(np.arange(1, price.shape[1]) - ticks, 0)
        return np.asarray(np.where(market.traded, price[:, 1:] - price[:, before], np.nan))

    return compute


for _ticks in (1, 5, 20):
    _ship(f"return_{_ticks}")(_return_over(_ticks))


@_ship("return_day")
def return_day(market: FeatureInputs) -> Floats:
    price = np.log(market.price)
    return np.asarray(price[:, 1:] - price[:, :1])


@_ship("volatility")
def volatility(market: FeatureInputs) -> Floats:
    count = np.arange(1, market.moves.shape[1] + 1)
    return np.asarray(np.sqrt(np.cumsum(market.moves**2, axis=1) / count))


@_ship("vwap_deviation")
def vwap_deviation(market: FeatureInputs) -> Floats:
    """Log of the price over the day's volume-weighted mean so far."""
    volume = np.where(market.traded, market.days.volume, 0.0)
    price = np.nan_to_num(market.price[:, 1:], nan=0.0)
    shares = np.cumsum(volume, axis=1)
    money = np.cumsum(volume * price, axis=1)
    out = np.full(shares.shape, np.nan)
    np.divide(price * shares, money, out=out, where=money > 0.0)
    return np.asarray(np.log(out))


@_ship("volume")
def volume(market: FeatureInputs) -> Floats:
    """Log of the tick's volume over the same tick's mean on earlier days."""
    return _log_ratio(market.days.volume, market.profile)


@_ship("volume_day")
def volume_day(market: FeatureInputs) -> Floats:
    """Log of the day's volume so far over what earlier days had by then."""
    shares = np.cumsum(market.days.volume, axis=1)
    return _log_ratio(shares, np.cumsum(market.profile, axis=1))


@_ship("halted", scaled=False)
def halt_flag(market: FeatureInputs) -> Floats:
    return np.where(market.traded, 0.0, 1.0)


@_ship("time", scaled=False)
def time(market: FeatureInputs) -> Floats:
    """Share of the day's ticks that are over, from 1/T to 1."""
    n_days, n_ticks = market.days.shape
    return np.tile((np.arange(n_ticks) + 1.0) / n_ticks, (n_days, 1))


@_ship("spread", book=True)
def spread(market: FeatureInputs) -> Floats:
    """Best ask less best bid, as a share of their mean."""
    assert market.quotes is not None
    bid, ask = market.quotes.bid, market.quotes.ask
    return np.asarray(2.0 * (ask - bid) / (ask + bid))


@_ship("imbalance", scaled=False, book=True)
def imbalance(market: FeatureInputs) -> Floats:
    """(bid depth - ask depth) / both, from -1 to 1."""
    assert market.quotes is not None
    bids, asks = market.quotes.bid_depth, market.quotes.ask_depth
    out = np.zeros(bids.shape)
    np.divide(bids - asks, bids + asks, out=out, where=bids + asks > 0.0)
    return out


class Past:
    """What one's own feature is shown: a day up to now, and the days before it.

    price, volume[t+1]: ticks 0 to t of today; price is NaN where nothing could trade
    known[t+1]: last price as the tick began
    clock[t+1]: minutes after midnight at which the ticks begin
    earlier_price, earlier_volume[K,T]: whole earlier days of the symbol, oldest first, K ≤ 20
    """

    def __init__(self, days: Days, day: int, earlier: Ints) -> None:
        # Filled tick by tick: a feature that reaches around its slice finds nothing there.
        self._shown = np.full((3, days.shape[1]), np.nan)
        self._clock = days.clock.copy()
        self.symbol = days.symbols[day]
        self.price = self.volume = self.known = self.clock = np.empty(0)
        self.earlier_price: Floats = (days.buy[earlier] + days.sell[earlier]) / 2.0
        self.earlier_volume: Floats = days.volume[earlier]

    def end_tick(self, price: float, volume: float, known: float) -> None:
        """Show one tick more."""
        now = len(self.price)
        self._shown[:, now] = price, volume, known
        self.price, self.volume, self.known = self._shown[:, : now + 1]
        self.clock = self._clock[: now + 1]


Custom = Callable[[Past], float]
"""One's own feature: its value as the last tick it is shown ends; NaN: unknown."""


def public_features(
    days: Days,
    extra: Mapping[str, Custom] | None = None,
    scaler: Scaler | None = None,
    *,
    train: Bools | None = None,
    names: Sequence[str] | None = None,
    quotes: Quotes | None = None,
) -> PublicFeatures:
    """Features of all days, by name: those shipped (`FEATURES`), then one's own (`extra`).

    scaler: fitted before; or `train`[D]: the days to fit it on, and no others are looked at for
        that; without both, unscaled
    names: of those shipped; None: all, those of the book where there are `quotes`
    """
    assert scaler is None or train is None, "either a scaler or days to fit one on"
    extra = extra or {}
    chosen = _check_names(names, extra, with_book=quotes is not None)
    market = FeatureInputs(days, quotes)
    columns = [FEATURES[name].compute(market) for name in chosen]
    columns += [_custom(name, function, days) for name, function in extra.items()]
    raw = np.stack(columns, axis=2)
    every = (*chosen, *extra)
    if train is not None:
        if not train.any():
            raise FeatureError("no day to fit the scaler on. Choose a longer train window.")
        kept = np.array([name not in FEATURES or FEATURES[name].scaled for name in every])
        dates = days.dates[train].astype("datetime64[D]")
        first, last = np.array([dates.min(), dates.max()]).tolist()
        moments = RunningMoments.from_values(raw[train].reshape(-1, len(every)))
        scaler = Scaler.fit(every, moments, kept, (first, last))
    if scaler is not None and scaler.names != every:
        raise FeatureError(
            f"the scaler was fitted on {', '.join(scaler.names)}, but the features are "
            f"{', '.join(every)}. Use the same features, or fit another."
        )
    today = np.nan_to_num(raw, nan=0.0).astype(np.float32)
    if scaler is not None:
        today = np.clip(scaler.transform(raw), -SCALED_MOST, SCALED_MOST)
    before = previous_days(days)
    yesterday = np.where((before >= 0)[:, None, None], today[before], np.float32(0.0))
    return PublicFeatures(today, yesterday, every, scaler)


def previous_days(days: Days) -> Ints:
    """[D] number of the symbol's last earlier day in the data; -1 where there is none."""
    before = np.full(days.shape[0], -1, dtype=np.int64)
    for which, earlier in days.by_symbol():
        has = earlier > 0
        before[which[has]] = which[earlier[has] - 1]
    return before


def trailing_profile(days: Days, trailing: int = TRAILING_DAYS) -> Floats:
    """[D,T] mean volume of a tick on up to `trailing` earlier days that traded; NaN: none."""
    out = np.full(days.shape, np.nan)
    for which, earlier in days.by_symbol():
        shares = days.volume[which]
        active = np.flatnonzero(shares.sum(axis=1) > 0.0)
        # Of the days before this one, those that traded, of which the last few count.
        n_active = np.searchsorted(active, earlier)
        for k, n in enumerate(n_active):
            if n > 0:
                out[which[k]] = shares[active[max(n - trailing, 0) : n]].mean(axis=0)
    return out


@dataclass(frozen=True)
class Extensions:
    """What the files declare: features by name, in their order, and the digest of their content."""

    features: Mapping[str, Custom] = field(default_factory=lambda: MappingProxyType({}))
    digest: str = ""

    def split_names(self, names: Sequence[str]) -> tuple[list[str] | None, dict[str, Custom]]:
        """`names` apart: (those that are not one's own, one's own).

        Without names: (None, all of one's own), with which `public_features` takes everything.
        """
        if not names:
            return None, dict(self.features)
        own = {name: self.features[name] for name in names if name in self.features}
        return [name for name in names if name not in own], own


def execution_feature(name: str) -> Callable[[Custom], Custom]:
    """Declare the function below as a public feature of execution by this name.

    It is asked once a day and tick, as the tick ends, and handed the past alone (`Past`); NaN
    says that the value is not known. Outside a file that is being loaded it declares nothing.
    """

    def declare(function: Custom) -> Custom:
        target = _collecting.get()
        if target is None:
            return function
        if name in FEATURES or name in target:
            raise FeatureError(f"execution feature {name!r} exists: give yours another name.", name)
        target[name] = function
        return function

    return declare


def load_extensions(paths: Iterable[str | Path], run_code: RunCode | None = None) -> Extensions:
    """Run the Python files `paths`: features are returned, metrics join the table of metrics.

    run_code: where a run directory names the files, which run only if the user has named them
    """
    features: dict[str, Custom] = {}
    digest = hashlib.sha256()
    files = [Path(path) for path in paths]
    for path in files:
        content = read_user_file(path, "extension", "execution.extensions", run_code)
        digest.update(hashlib.sha256(content).digest())
        # Named by place, so that a file which was changed replaces its own metrics.
        place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
        module = f"_echelon_extension_{place}"
        known = len(features)
        token = _collecting.set(features)
        try:
            run_user_file(path, content, module, "extension")
        finally:
            _collecting.reset(token)
        measured = any(metric.__module__ == module for metric in METRICS.values())
        if len(features) == known and not measured:
            raise FeatureError(
                f"{path}: the file declares neither a feature nor a metric. Put "
                '@execution_feature("name") or @metric("name") above a function.'
            )
    return Extensions(features, digest.hexdigest()) if files else Extensions()


def _check_names(
    names: Sequence[str] | None, extra: Mapping[str, Custom], *, with_book: bool
) -> tuple[str, ...]:
    if names is None:
        names = [name for name, shipped in FEATURES.items() if with_book or not shipped.book]
    for name in names:
        if name not in FEATURES:
            near = difflib.get_close_matches(name, FEATURES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FEATURES)}."
            hint += " Your own come from the files that execution.extensions names."
            raise FeatureError(f"unknown execution feature {name!r}: {hint}", name)
        if FEATURES[name].book and not with_book:
            hint = "needs the quotes of an order book. Leave it out, or load days with a book."
            raise FeatureError(f"execution feature {name!r} {hint}", name)
    for name in extra:
        if name in FEATURES:
            raise FeatureError(f"execution feature {name!r} exists: give yours another name.", name)
    if not names and not extra:
        raise FeatureError("no execution feature was asked for. Name at least one.")
    return tuple(names)


def _custom(name: str, function: Custom, days: Days) -> Floats:
    """[D,T] of one's own feature, asked tick by tick."""
    out = np.full(days.shape, np.nan)
    ticks = np.stack([(days.buy + days.sell) / 2.0, days.volume, days.known], axis=2)
    for which, earlier in days.by_symbol():
        for k, day in enumerate(which):
            past = Past(days, int(day), which[max(earlier[k] - TRAILING_DAYS, 0) : earlier[k]])
            for tick in range(days.shape[1]):
                past.end_tick(*ticks[day, tick])
                where = f"{days.name(int(day))}, tick {tick}"
                try:
                    value = float(function(past))
                except Exception as error:
                    what = f"failed at {where}: {type(error).__name__}: {error}"
                    raise FeatureError(f"execution feature {name!r} {what}", name) from error
                if np.isinf(value):
                    what = f"is {value} at {where}: expected a number, or NaN where it is unknown."
                    raise FeatureError(f"execution feature {name!r} {what}", name)
                out[day, tick] = value
    return out


def _log_ratio(shares: Floats, usual: Floats) -> Floats:
    floor = _FLOOR * usual.mean(axis=1, keepdims=True)
    out = np.full(shares.shape, np.nan)
    np.divide(shares + floor, usual + floor, out=out, where=usual + floor > 0.0)
    return np.asarray(np.log(out))
