"""Every feature that Echelon ships: OHLCV, indicators, the stationary set, alpha158, the calendar.

Each is a compiled kernel (`_kernels`), the same for history and stream. Prices come in units
of the symbol's first close, so lines and bands (moving averages, MACD, ATR, Bollinger, Ichimoku,
Heikin-Ashi, the SuperTrend line) are in that unit, while RSI, bandwidth, percent and direction
are free of any unit; `relative_feature` frees the others of theirs. The stationary set and alpha158
are ratios and ranks: multiplying a symbol's prices, or its traded value, by a constant changes
nothing.

**Starts.** SMA, Bollinger, Ichimoku, the stationary set and alpha158 depend on their window alone.
EMA, RSI, MACD, ATR, Heikin-Ashi and SuperTrend are recursive: a value depends on *every bar since
listing*, with weights that decay geometrically, and the recursion starts as each function below
says. A live run therefore continues from the full stored history and never from the last window.

**Lookback.** The lookback of a feature is the number of bars up to and including its first
value: TA-Lib's own lookback + 1 where TA-Lib has the indicator. All columns of one indicator start
together, at the last of them.

**Days without a bar** repeat the last value, which describes the last known window, but for three
that get zero: traded value; the one-bar return, since the price one can value the position at did
not move; and volume ratios, "as usual", since repeating the last trading day through a suspension
would repeat what is often the most unusual day of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from echelon.config.features import FeaturesConfig, IndicatorsConfig, StationaryConfig
from echelon.features import _alpha158, _kernels
from echelon.features.base import Bars, CrossSection, Feature, FeatureSpec, Field, Group, Kernel
from echelon.types import Floats

FLAT_WIDTH = 1e-9
"""Bollinger bands narrower than this share of their middle are rounding: the close is inside."""
VOLUME_FLOOR = 0.01
"""Smallest ratio of traded value to its mean that volume ratios tell apart.

The logarithm needs a floor, for a bar may have no trade in it. A floor on the *ratio* keeps the
feature free of the currency, which log1p(value) would not; real sessions are seldom below 1 %.
"""
VOLUME_BARS = 20
"""Bars whose mean traded value is compared with where levels are to be relative."""
_FREE = ("rsi_", "bb_bandwidth_", "bb_percent_", "supertrend_dir_")
"""Indicators without a unit."""
NO_LIMIT = 1.0
"""Distance given to a day without a price limit (the first days after listing, say).

Farther than any limit can be: the widest band in use, ±30 %, gives at most 1.3 / 0.7 − 1 = 0.86.
"""


def shipped_features(config: FeaturesConfig) -> tuple[FeatureSpec, ...]:
    """The features `config` asks for, those of the user's files apart."""
    levels = (
        *(ohlcv_features() if config.ohlcv else ()),
        *indicator_features(config.indicators),
    )
    return (
        *(map(relative_feature, levels) if config.relative else levels),
        *(stationary_features(config.stationary) if config.wants_stationary else ()),
        *alpha158_features(config.alpha158_windows),
        *(calendar_features() if config.calendar else ()),
    )


def ohlcv_features() -> tuple[Feature, ...]:
    """Open, high, low, close and traded value, each a feature: a source may have closes only."""
    fields: tuple[Field, ...] = ("open", "high", "low", "close", "volume")
    return tuple(_ohlcv(name) for name in fields)


def _ohlcv(name: Field) -> Feature:
    on_gap: Literal["carry", "zero"] = "zero" if name == "volume" else "carry"
    field = "value" if name == "volume" else name
    kernel = Kernel(_kernels.copy_field, 0, (field,))
    return _feature((name,), 1, (name,), kernel, on_gap, "OHLCV")


def indicator_features(config: IndicatorsConfig) -> tuple[Feature, ...]:
    """The indicators `config` names, in the order of its fields: one for each period of a list."""
    features = []
    for name in type(config).model_fields:
        make, settings = INDICATORS[name], getattr(config, name)
        if make in (sma, ema, rsi, atr):
            features += [make(period) for period in settings]
        elif settings:
            features.append(make() if settings is True else make(*settings))
    return tuple(features)


def relative_feature(feature: Feature) -> Feature:
    """`feature` in terms of the close: prices as their ratio to it − 1, ranges and MACD as a share.

    Columns that are free of units stay. The close itself becomes its one-bar log return, and traded
    value the logarithm of its ratio to the mean of `VOLUME_BARS` bars.
    """
    name, kernel = feature.names[0], feature.kernel
    assert kernel is not None, f"{name} is not one of ours"
    if name in ("close", "volume"):
        other = log_return(1) if name == "close" else volume_ratio(VOLUME_BARS)
        return replace(other, names=feature.names, group=feature.group)
    shares = [0.0 if n.startswith(("macd_", "atr_")) else 1.0 for n in feature.names]
    free = [n.startswith(_FREE) for n in feature.names]
    less = tuple(np.where(free, np.nan, shares).tolist())
    needs: tuple[Field, ...] = (*feature.needs, "close")
    relative = replace(kernel, relative=() if all(free) else less)
    return _feature(feature.names, feature.lookback, needs, relative, feature.on_gap, feature.group)


def sma(period: int) -> Feature:
    """Simple moving average of the close: `sma_{period}`."""
    kernel = Kernel(_kernels.simple_average, 2 + period, ("close",), (period,))
    return _feature((f"sma_{period}",), period, ("close",), kernel)


def ema(period: int) -> Feature:
    """Exponential moving average of the close, weight 2 / (period + 1): `ema_{period}`.

    Start: the simple mean of the first `period` closes since listing, at bar `period`.
    """
    kernel = Kernel(_kernels.exponential_average, 2, ("close",), (period,))
    return _feature((f"ema_{period}",), period, ("close",), kernel)


def rsi(period: int) -> Feature:
    """Relative strength index in [0, 100] (Wilder 1978): `rsi_{period}`.

    Start: the simple means of the first `period` gains and losses since listing, then Wilder's
    smoothing with weight 1 / period. A symbol that has never moved since listing has neither
    gains nor losses: it gets 50, the middle (TA-Lib says 0, pandas-ta NaN).
    """
    kernel = Kernel(_kernels.relative_strength, 5, ("close",), (period,))
    return _feature((f"rsi_{period}",), period + 1, ("close",), kernel)


def macd(fast: int, slow: int, signal: int) -> Feature:
    """MACD line, signal and histogram of the close (Appel).

    `macd_{f}_{s}_{g}` = EMA(fast) − EMA(slow), `macd_signal_…` = EMA(signal) of the line,
    `macd_hist_…` = line − signal.

    Start: TA-Lib's. Both averages start at bar `slow`, each from the simple mean of its own last
    bars there; the signal starts from the mean of the line's first `signal` values. Packages
    that start the fast average at bar `fast` (pandas-ta) differ at first; the difference decays
    by (fast − 1) / (fast + 1) a bar.
    """
    tail = f"{fast}_{slow}_{signal}"
    names = (f"macd_{tail}", f"macd_signal_{tail}", f"macd_hist_{tail}")
    kernel = Kernel(_kernels.convergence, 4, ("close",), (fast, slow, signal))
    return _feature(names, slow + signal - 1, ("close",), kernel)


def atr(period: int) -> Feature:
    """Average true range (Wilder 1978): `atr_{period}`.

    Start: the simple mean of the true ranges of bars 2 to `period` + 1 since listing (the first
    bar has no previous close), then Wilder's smoothing with weight 1 / period.
    """
    needs: tuple[Field, ...] = ("high", "low", "close")
    kernel = Kernel(_kernels.average_range, 3, needs, (period,))
    return _feature((f"atr_{period}",), period + 1, needs, kernel)


def bbands(period: int, deviations: float) -> Feature:
    """Bollinger bands of the close: lower, mid, upper, bandwidth and percent, `bb_*_{p}_{d}`.

    mid is the simple mean; the bands are `deviations` population standard deviations (divisor
    n) from it. bandwidth = 100 · (upper − lower) / mid. percent = (close − lower) /
    (upper − lower), 0.5 where the bands have no width.
    """
    columns = ("lower", "mid", "upper", "bandwidth", "percent")
    names = tuple(f"bb_{column}_{period}_{deviations:.12g}" for column in columns)
    settings = (period, float(deviations), FLAT_WIDTH)
    kernel = Kernel(_kernels.bollinger, 2 + period, ("close",), settings)
    return _feature(names, period, ("close",), kernel)


def ichimoku(tenkan: int, kijun: int, senkou: int) -> Feature:
    """Ichimoku lines: tenkan, kijun and the leading spans, `ichimoku_*`.

    A line is the middle of the highest high and the lowest low of its window. The leading spans
    are drawn `kijun` bars ahead, so the value *at* bar t is made of bars up to t − kijun (the
    convention of pandas-ta; some charts count the current bar and use kijun − 1). The lagging
    span at t is the close of t + kijun: it looks ahead and is left out.
    """
    names = (
        f"ichimoku_tenkan_{tenkan}",
        f"ichimoku_kijun_{kijun}",
        f"ichimoku_senkou_a_{tenkan}_{kijun}",
        f"ichimoku_senkou_b_{senkou}_{kijun}",
    )
    longest = max(tenkan, kijun, senkou)
    size = 1 + 2 * longest + 2 * kijun
    kernel = Kernel(_kernels.ichimoku_lines, size, ("high", "low"), (tenkan, kijun, senkou))
    return _feature(names, longest + kijun, ("high", "low"), kernel)


def heikin_ashi() -> Feature:
    """Heikin-Ashi candle: `ha_open`, `ha_high`, `ha_low`, `ha_close`.

    close = (o + h + l + c) / 4; open = the middle of the previous candle's body; high and low
    take in the body. Start: at the first bar since listing open = (o + c) / 2, whose weight
    halves with every bar.
    """
    names = ("ha_open", "ha_high", "ha_low", "ha_close")
    needs: tuple[Field, ...] = ("open", "high", "low", "close")
    return _feature(names, 1, needs, Kernel(_kernels.heikin_ashi_candles, 3, needs))


def supertrend(period: int, multiplier: float) -> Feature:
    """SuperTrend: `supertrend_{p}_{m}` (the line) and `supertrend_dir_{p}_{m}` (+1 up, −1 down).

    The bands are (high + low) / 2 ± multiplier · ATR(period). A close beyond the previous bar's
    band turns the trend; while it lasts, the band on its side only tightens. The line is the
    lower band in an uptrend, the upper in a downtrend. Start: the ATR's (see `atr`), the trend
    taken to be up at its first value, as in pandas-ta.
    """
    tail = f"{period}_{multiplier:.12g}"
    names = (f"supertrend_{tail}", f"supertrend_dir_{tail}")
    needs: tuple[Field, ...] = ("high", "low", "close")
    kernel = Kernel(_kernels.supertrend_line, 6, needs, (period, float(multiplier)))
    return _feature(names, period + 1, needs, kernel)


INDICATORS: Mapping[str, Callable[..., Feature]] = {
    make.__name__: make
    for make in (sma, ema, rsi, macd, atr, bbands, ichimoku, heikin_ashi, supertrend)
}
"""Key of `features.indicators` → what makes the feature of its settings."""


def stationary_features(config: StationaryConfig) -> tuple[FeatureSpec, ...]:
    """The set `config` describes, ranks after what they rank; nothing if disabled."""
    if not config.enabled:
        return ()
    bases = [log_return(horizon) for horizon in config.returns]
    bases += [return_volatility(window) for window in config.volatility]
    bases += [volume_ratio(window) for window in config.volume_ratio]
    specs: list[FeatureSpec] = list(bases)
    if config.ranks:
        specs += [CrossSection(f"rank_{name}", base=name) for f in bases for name in f.names]
    if config.limit_distance:
        specs.append(limit_distance())
    return tuple(specs)


def log_return(horizon: int) -> Feature:
    """Log return of the close over `horizon` bars: `ret_{horizon}`."""
    on_gap: Literal["carry", "zero"] = "zero" if horizon == 1 else "carry"
    kernel = Kernel(_kernels.log_returns, 1 + horizon, ("close",), (horizon,))
    return _feature((f"ret_{horizon}",), horizon + 1, ("close",), kernel, on_gap, "stationary")


def return_volatility(window: int) -> Feature:
    """Sample standard deviation of the last `window` one-bar log returns: `vol_{window}`."""
    kernel = Kernel(_kernels.return_deviations, 2 + window, ("close",), (window,))
    return _feature((f"vol_{window}",), window + 1, ("close",), kernel, group="stationary")


def volume_ratio(window: int) -> Feature:
    """Log of traded value over its mean of `window` bars, this one included: `volume_ratio_{w}`.

    Lies in [log VOLUME_FLOOR, log window]. Where nothing was traded in the whole window, today
    is as usual: 0.
    """
    kernel = Kernel(_kernels.volume_ratios, 1 + window, ("value",), (window, VOLUME_FLOOR))
    name = f"volume_ratio_{window}"
    return _feature((name,), window, ("volume",), kernel, "zero", "stationary")


def limit_distance() -> Feature:
    """Room to the day's price limits: `limit_up_distance`, `limit_down_distance`.

    limit_up / close − 1 and close / limit_down − 1: 0 at the limit, `NO_LIMIT` without one.
    The limits are those before rounding to the tick, so a close at a rounded limit can lie a
    fraction of a tick beyond and give a distance slightly below zero.
    """
    names = ("limit_up_distance", "limit_down_distance")
    fields = ("close", "limit_up", "limit_down")
    kernel = Kernel(_kernels.limit_room, 0, fields, (NO_LIMIT,))
    return _feature(names, 1, ("close", "limits"), kernel, group="stationary")


def alpha158_features(windows: tuple[int, ...]) -> tuple[Feature, ...]:
    """Qlib's Alpha158 under its names: candle shapes, price ratios, and windows of closes, ranges,
    traded value and both; none without windows.

    Its `$open`, `$high`, `$low`, `$close`, `$vwap` are our prices in units of the first close and
    its `$volume` is traded value, which splits leave alone. No column has a unit. Bars that Qlib
    has no number for, or an infinite one, have one here: see the kernels.
    """
    if not windows:
        return ()
    prices: tuple[Field, ...] = ("open", "high", "low", "close")
    shapes = _names("KMID KLEN KMID2 KUP KUP2 KLOW KLOW2 KSFT KSFT2 OPEN0 HIGH0 LOW0")
    candle = Kernel(_alpha158.candle_shapes, 0, prices)
    vwap = Kernel(_alpha158.price_ratio, 0, ("vwap", "close"))
    features = [_feature(shapes, 1, prices, candle, group="stationary")]
    features.append(_feature(("VWAP0",), 1, ("vwap", "close"), vwap, group="stationary"))
    for w in windows:
        trends = "ROC MA STD BETA RSQR RESI QTLU QTLD RANK CNTP CNTN CNTD SUMP SUMN SUMD"
        closes = Kernel(_alpha158.close_windows, 1 + w, ("close",), (w,))
        ranges = Kernel(_alpha158.range_windows, 2 * w - 1, ("high", "low", "close"), (w,))
        volumes = Kernel(_alpha158.volume_windows, 1 + w, ("value",), (w, VOLUME_FLOOR))
        pairs = ("close", "value")
        both = Kernel(_alpha158.price_volume_windows, 1 + 2 * w, pairs, (w, VOLUME_FLOOR))
        parts: tuple[tuple[str, int, tuple[Field, ...], Kernel], ...] = (
            (trends, w + 1, ("close",), closes),
            ("MAX MIN RSV IMAX IMIN IMXD", w, ("high", "low", "close"), ranges),
            ("CORR CORD WVMA", w + 1, ("close", "volume"), both),
            ("VMA VSTD VSUMP VSUMN VSUMD", w + 1, ("volume",), volumes),
        )
        for names, lookback, needs, kernel in parts:
            features.append(_feature(_names(names, w), lookback, needs, kernel, group="stationary"))
    return tuple(features)


def _names(stems: str, window: int | None = None) -> tuple[str, ...]:
    return tuple(f"{stem}{window or ''}" for stem in stems.split())


def calendar_features() -> tuple[Feature, ...]:
    """When a bar is: day of the week, month and, for bars within the day, time of day.

    Each goes round, so each is a sine and a cosine: December meets January. They are known before
    the bar is and the same for all symbols; times are the exchange's own. Values lie in [−1, 1], so
    the group is not scaled unless `normalization.include` names it.
    """
    return (
        _going_round("day_of_week", _kernels.DAY_OF_WEEK),
        _going_round("month", _kernels.MONTH),
        _going_round("time_of_day", _kernels.TIME_OF_DAY, "time"),
    )


def _going_round(name: str, cycle: int, *needs: Field) -> Feature:
    """`{name}_sin` and `{name}_cos` of the share of a whole turn that has passed."""
    kernel = Kernel(_kernels.clock_turns, 0, ("times",), (cycle,))
    return _feature((f"{name}_sin", f"{name}_cos"), 1, needs, kernel, group="calendar")


def _feature(
    names: tuple[str, ...],
    lookback: int,
    needs: tuple[Field, ...],
    kernel: Kernel,
    on_gap: Literal["carry", "zero"] = "carry",
    group: Group = "indicators",
) -> Feature:
    """Assemble a Feature that folds its kernel over a symbol's bars, from its first on."""

    def compute(bars: Bars) -> Floats:
        return kernel.fold(np.zeros((1, kernel.size)), bars, len(names))

    return Feature(names, compute, lookback, frozenset(needs), group, on_gap, kernel=kernel)
