"""Technical indicators: the OHLCV group and every indicator a configuration can name.

TA-Lib computes what it has; Heikin-Ashi and SuperTrend are kernels of ours. Prices come in units
of the symbol's first close, so lines and bands (moving averages, MACD, ATR, Bollinger, Ichimoku,
Heikin-Ashi, the SuperTrend line) are in that unit, while RSI, bandwidth, percent and direction
are free of any unit.

**Seeds.** SMA, Bollinger and Ichimoku depend on their window alone. EMA, RSI, MACD, ATR,
Heikin-Ashi and SuperTrend are recursive: a value depends on *every bar since listing*, with
weights that decay geometrically, and the recursion starts as each function below says. A live
run therefore continues from the full stored history and never from the last window.

**Lookback.** The lookback of a feature is the number of bars up to and including its first
value: TA-Lib's own lookback + 1 where TA-Lib computes it. All columns of one indicator start
together, at the last of them.
"""

from __future__ import annotations

import numpy as np
import talib

from echelon.config.features import IndicatorsConfig
from echelon.errors import FeatureError
from echelon.features import _kernels
from echelon.features.base import Bars, Compute, Feature, Field, source_id
from echelon.types import Floats

FLAT_WIDTH = 1e-9
"""Bollinger bands narrower than this share of their middle are rounding: the close is inside."""


def ohlcv_features() -> tuple[Feature, ...]:
    """Open, high, low, close and traded value, as they are.

    Five features, so that a source with closes only keeps its close. `volume` is the value
    traded in money: it does not jump at splits. A day without a bar repeats the prices and has
    a volume of zero.
    """

    def price(name: Field) -> Feature:
        return Feature(
            names=(name,),
            compute=lambda bars: _have(getattr(bars, name)),
            lookback=1,
            needs=frozenset({name}),
            group="OHLCV",
            source_id=_source_id("ohlcv", name),
        )

    volume = Feature(
        names=("volume",),
        compute=lambda bars: _have(bars.value),
        lookback=1,
        needs=frozenset({"volume"}),
        group="OHLCV",
        on_gap="zero",
        source_id=_source_id("ohlcv", "volume"),
    )
    return price("open"), price("high"), price("low"), price("close"), volume


def indicator_features(config: IndicatorsConfig) -> tuple[Feature, ...]:
    """Return the indicators `config` names, in the order of its fields."""
    features = [sma(period) for period in config.sma]
    features += [ema(period) for period in config.ema]
    features += [rsi(period) for period in config.rsi]
    if config.macd is not None:
        features.append(macd(*config.macd))
    features += [atr(period) for period in config.atr]
    if config.bbands is not None:
        features.append(bbands(*config.bbands))
    if config.ichimoku is not None:
        features.append(ichimoku(*config.ichimoku))
    if config.heikin_ashi:
        features.append(heikin_ashi())
    if config.supertrend is not None:
        features.append(supertrend(*config.supertrend))
    return tuple(features)


def sma(period: int) -> Feature:
    """Simple moving average of the close: `sma_{period}`."""
    return _indicator(
        (f"sma_{period}",),
        (period,),
        period,
        ("close",),
        lambda bars: _stack(talib.SMA(bars.close, period)),
    )


def ema(period: int) -> Feature:
    """Exponential moving average of the close, weight 2 / (period + 1): `ema_{period}`.

    Seed: the simple mean of the first `period` closes since listing, at bar `period`.
    """
    return _indicator(
        (f"ema_{period}",),
        (period,),
        period,
        ("close",),
        lambda bars: _stack(talib.EMA(bars.close, period)),
    )


def rsi(period: int) -> Feature:
    """Relative strength index in [0, 100] (Wilder 1978): `rsi_{period}`.

    Seed: the simple means of the first `period` gains and losses since listing, then Wilder's
    smoothing with weight 1 / period. A symbol that has never moved since listing has neither
    gains nor losses: it gets 50, the middle (TA-Lib says 0, pandas-ta NaN).
    """

    def compute(bars: Bars) -> Floats:
        out = _stack(talib.RSI(bars.close, period))
        if (bars.close[: period + 1] == bars.close[0]).all():
            moved = np.flatnonzero(bars.close != bars.close[0])
            out[period : moved[0] if moved.size else len(out)] = 50.0
        return out

    return _indicator((f"rsi_{period}",), (period,), period + 1, ("close",), compute)


def macd(fast: int, slow: int, signal: int) -> Feature:
    """MACD line, signal and histogram of the close (Appel).

    `macd_{f}_{s}_{g}` = EMA(fast) − EMA(slow), `macd_signal_…` = EMA(signal) of the line,
    `macd_hist_…` = line − signal.

    Seed: TA-Lib's. Both averages start at bar `slow`, each from the simple mean of its own last
    bars there; the signal starts from the mean of the line's first `signal` values. Packages
    that start the fast average at bar `fast` (pandas-ta) differ at first; the difference decays
    by (fast − 1) / (fast + 1) a bar.
    """
    if not 2 <= fast < slow:
        raise FeatureError(
            f"features.indicators.macd is [{fast}, {slow}, {signal}]: it needs 2 ≤ fast < slow. "
            "The usual setting is [12, 26, 9]."
        )
    tail = f"{fast}_{slow}_{signal}"
    return _indicator(
        (f"macd_{tail}", f"macd_signal_{tail}", f"macd_hist_{tail}"),
        (fast, slow, signal),
        slow + signal - 1,
        ("close",),
        lambda bars: _stack(*talib.MACD(bars.close, fast, slow, signal)),
    )


def atr(period: int) -> Feature:
    """Average true range (Wilder 1978): `atr_{period}`.

    Seed: the simple mean of the true ranges of bars 2 to `period` + 1 since listing (the first
    bar has no previous close), then Wilder's smoothing with weight 1 / period.
    """
    return _indicator(
        (f"atr_{period}",),
        (period,),
        period + 1,
        ("high", "low", "close"),
        lambda bars: _atr(bars, period),
    )


def bbands(period: int, deviations: float) -> Feature:
    """Bollinger bands of the close: lower, mid, upper, bandwidth and percent, `bb_*_{p}_{d}`.

    mid is the simple mean; the bands are `deviations` population standard deviations (divisor
    n) from it. bandwidth = 100 · (upper − lower) / mid. percent = (close − lower) /
    (upper − lower), 0.5 where the bands have no width.
    """
    if period < 2:
        raise FeatureError(
            f"features.indicators.bbands is [{period}, {deviations:g}]: a deviation needs a period "
            "of at least 2 bars. The usual setting is [20, 2.0]."
        )

    def compute(bars: Bars) -> Floats:
        upper, mid, lower = talib.BBANDS(bars.close, period, float(deviations), float(deviations))
        return _kernels.bollinger_columns(bars.close, lower, mid, upper, FLAT_WIDTH)

    columns = ("lower", "mid", "upper", "bandwidth", "percent")
    names = tuple(f"bb_{column}_{period}_{deviations:.12g}" for column in columns)
    return _indicator(names, (period, deviations), period, ("close",), compute)


def ichimoku(tenkan: int, kijun: int, senkou: int) -> Feature:
    """Ichimoku lines: tenkan, kijun and the leading spans, `ichimoku_*`.

    A line is the middle of the highest high and the lowest low of its window. The leading spans
    are drawn `kijun` bars ahead, so the value *at* bar t is made of bars up to t − kijun (the
    convention of pandas-ta; some charts count the current bar and use kijun − 1). The lagging
    span at t is the close of t + kijun: it looks ahead and is left out.
    """

    def compute(bars: Bars) -> Floats:
        conversion, base, wide = (_middle(bars, period) for period in (tenkan, kijun, senkou))
        return _kernels.ichimoku_lines(conversion, base, wide, kijun)

    names = (
        f"ichimoku_tenkan_{tenkan}",
        f"ichimoku_kijun_{kijun}",
        f"ichimoku_senkou_a_{tenkan}_{kijun}",
        f"ichimoku_senkou_b_{senkou}_{kijun}",
    )
    lookback = max(tenkan, kijun, senkou) + kijun
    return _indicator(names, (tenkan, kijun, senkou), lookback, ("high", "low"), compute)


def heikin_ashi() -> Feature:
    """Heikin-Ashi candle: `ha_open`, `ha_high`, `ha_low`, `ha_close`.

    close = (o + h + l + c) / 4; open = the middle of the previous candle's body; high and low
    take in the body. Seed: at the first bar since listing open = (o + c) / 2, whose weight
    halves with every bar.
    """

    def compute(bars: Bars) -> Floats:
        return _kernels.heikin_ashi_candles(
            _have(bars.open), _have(bars.high), _have(bars.low), bars.close
        )

    names = ("ha_open", "ha_high", "ha_low", "ha_close")
    return _indicator(names, (), 1, ("open", "high", "low", "close"), compute)


def supertrend(period: int, multiplier: float) -> Feature:
    """SuperTrend: `supertrend_{p}_{m}` (the line) and `supertrend_dir_{p}_{m}` (+1 up, −1 down).

    The bands are (high + low) / 2 ± multiplier · ATR(period). A close beyond the previous bar's
    band turns the trend; while it lasts, the band on its side only tightens. The line is the
    lower band in an uptrend, the upper in a downtrend. Seed: the ATR's (see `atr`), the trend
    taken to be up at its first value, as in pandas-ta.
    """

    def compute(bars: Bars) -> Floats:
        high, low = _have(bars.high), _have(bars.low)
        return _kernels.supertrend_line(
            high, low, bars.close, _atr(bars, period), float(multiplier), period
        )

    tail = f"{period}_{multiplier:.12g}"
    names = (f"supertrend_{tail}", f"supertrend_dir_{tail}")
    return _indicator(names, (period, multiplier), period + 1, ("high", "low", "close"), compute)


def _indicator(
    names: tuple[str, ...],
    parameters: tuple[float, ...],
    lookback: int,
    needs: tuple[Field, ...],
    compute: Compute,
) -> Feature:
    """Assemble a Feature whose compute gives all NaN to a history shorter than its lookback."""

    def compute_when_long_enough(bars: Bars) -> Floats:
        # A listing shorter than the lookback has no value, and TA-Lib is not asked for one.
        if len(bars) < lookback:
            return np.full((len(bars), len(names)), np.nan)
        return compute(bars)

    return Feature(
        names=names,
        compute=compute_when_long_enough,
        lookback=lookback,
        needs=frozenset(needs),
        group="indicators",
        source_id=_source_id(names, parameters),
    )


def _atr(bars: Bars, period: int) -> Floats:
    return _stack(talib.ATR(_have(bars.high), _have(bars.low), bars.close, period))


def _middle(bars: Bars, period: int) -> Floats:
    """Middle of the highest high and the lowest low of `period` bars: [L]."""
    high, low = _have(bars.high), _have(bars.low)
    # TA-Lib refuses a period of one bar.
    return 0.5 * (high + low) if period == 1 else _stack(talib.MIDPRICE(high, low, period))


def _stack(*columns: Floats) -> Floats:
    """Give TA-Lib's untyped columns a type and, if there are several, one array [L,k]."""
    return columns[0] if len(columns) == 1 else np.column_stack(columns)


def _have(values: Floats | None) -> Floats:
    assert values is not None, "a feature was asked for a field its source does not have"
    return values


def _source_id(*parts: object) -> str:
    return source_id(__name__, _kernels.__name__, parts=(talib.__version__, *parts))
