"""Indicators against TA-Lib, pandas-ta-classic and numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pandas_ta_classic as pta
import pytest
import talib
from talib import abstract

from echelon.config.features import IndicatorsConfig
from echelon.features import indicators
from echelon.features.base import Bars, Feature
from echelon.features.indicators import INDICATORS, indicator_features, ohlcv_features
from echelon.features.registry import run
from echelon.types import Floats

QTMRL = IndicatorsConfig(
    sma=(10, 20, 50),
    ema=(12, 26),
    rsi=(14,),
    macd=(12, 26, 9),
    atr=(14,),
    bbands=(20, 2.0),
    ichimoku=(9, 26, 52),
    heikin_ashi=True,
    supertrend=(10, 3.0),
)
FEATURES = (*ohlcv_features(), *indicator_features(QTMRL))
COLUMNS = (
    *("open", "high", "low", "close", "volume", "sma_10", "sma_20", "sma_50", "ema_12", "ema_26"),
    *("rsi_14", "macd_12_26_9", "macd_signal_12_26_9", "macd_hist_12_26_9", "atr_14"),
    *("bb_lower_20_2", "bb_mid_20_2", "bb_upper_20_2", "bb_bandwidth_20_2", "bb_percent_20_2"),
    *("ichimoku_tenkan_9", "ichimoku_kijun_26", "ichimoku_senkou_a_9_26"),
    *("ichimoku_senkou_b_52_26", "ha_open", "ha_high", "ha_low", "ha_close"),
    *("supertrend_10_3", "supertrend_dir_10_3"),
)


def days(n: int) -> np.ndarray:
    return np.datetime64("2000-01-03", "us") + np.arange(n) * np.timedelta64(1, "D")


def walk(n: int, seed: int = 0) -> Bars:
    """A fat-tailed walk with opens off the close and highs and lows around both."""
    rng = np.random.default_rng(seed)
    close = np.exp(np.cumsum(0.015 * rng.standard_t(3, n)))
    open_ = close * np.exp(rng.normal(0, 0.01, n))
    high = np.maximum(open_, close) * np.exp(np.abs(rng.normal(0, 0.01, n)))
    low = np.minimum(open_, close) * np.exp(-np.abs(rng.normal(0, 0.01, n)))
    value = rng.lognormal(16, 1, n)
    return Bars(days(n), close, close, open_, high, low, value)


def candles(rows: list[tuple[float, float, float, float]]) -> Bars:
    """Bars of (open, high, low, close)."""
    open_, high, low, close = (
        np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)
    )
    return Bars(days(len(rows)), close, close, open_, high, low, np.ones(len(rows)))


def by_name(features: tuple[Feature, ...], bars: Bars) -> dict[str, Floats]:
    return {
        name: column
        for feature in features
        for name, column in zip(feature.names, run(feature, bars).T, strict=True)
    }


def head(bars: Bars, n: int) -> Bars:
    cut = {f: None if (a := getattr(bars, f)) is None else a[:n] for f in Bars.__slots__}
    return Bars(**cut)


def test_qtmrl_indicators_are_thirty_columns_with_stable_names() -> None:
    assert tuple(name for feature in FEATURES for name in feature.names) == COLUMNS
    assert len(set(COLUMNS)) == 30


def talib_middle(bars: Bars, period: int) -> Floats:
    return (talib.MAX(bars.high, period) + talib.MIN(bars.low, period)) / 2


def talib_bollinger(bars: Bars, period: int, deviations: float) -> list[Floats]:
    upper, mid, lower = talib.BBANDS(bars.close, period, deviations, deviations)
    width = upper - lower
    return [lower, mid, upper, 100 * width / mid, (bars.close - lower) / width]


def talib_ichimoku(bars: Bars, tenkan: int, kijun: int, senkou: int) -> list[Floats]:
    quick, calm, wide = (talib_middle(bars, period) for period in (tenkan, kijun, senkou))
    ahead = np.full((2, len(bars)), np.nan)
    ahead[:, kijun:] = ((quick + calm) / 2)[:-kijun], wide[:-kijun]
    return [quick, calm, *ahead]


def slow_heikin_ashi(bars: Bars) -> list[Floats]:
    rows: list[tuple[float, float, float, float]] = []
    for o, h, low, c in zip(bars.open, bars.high, bars.low, bars.close, strict=True):
        first = (rows[-1][0] + rows[-1][3]) / 2 if rows else (o + c) / 2
        last = (o + h + low + c) / 4
        rows.append((first, max(h, first, last), min(low, first, last), last))
    return list(np.array(rows).T)


def talib_supertrend(bars: Bars, period: int, multiplier: float) -> list[Floats]:
    reach = multiplier * talib.ATR(bars.high, bars.low, bars.close, period)
    middle = (bars.high + bars.low) / 2
    out = np.full((2, len(bars)), np.nan)
    up, upper, lower = True, np.inf, -np.inf
    for t in range(period, len(bars)):
        top, bottom = middle[t] + reach[t], middle[t] - reach[t]
        if bars.close[t] > upper:
            up = True
        elif bars.close[t] < lower:
            up = False
        elif up:
            bottom = max(bottom, lower)
        else:
            top = min(top, upper)
        upper, lower = top, bottom
        out[:, t] = (lower, 1.0) if up else (upper, -1.0)
    return list(out)


ORACLES = {
    "sma": (lambda b, p: [talib.SMA(b.close, p)], (20,), 0.0),
    "ema": (lambda b, p: [talib.EMA(b.close, p)], (26,), 1e-14),
    "rsi": (lambda b, p: [talib.RSI(b.close, p)], (14,), 1e-13),
    "macd": (lambda b, *p: talib.MACD(b.close, *p), (12, 26, 9), 1e-13),
    "atr": (lambda b, p: [talib.ATR(b.high, b.low, b.close, p)], (14,), 1e-13),
    "bbands": (talib_bollinger, (20, 2.0), 1e-11),
    "ichimoku": (talib_ichimoku, (9, 26, 52), 0.0),
    "heikin_ashi": (slow_heikin_ashi, (), 1e-14),
    "supertrend": (talib_supertrend, (10, 3.0), 1e-13),
}
"""Indicator → TA-Lib's columns (a slow twin where it has none), settings, tolerance.

The tolerance is relative to the larger of the value and the column's mean size: a MACD line near
zero, or a close at its lower band, is the difference of two numbers that are not small.
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", INDICATORS)
def test_every_indicator_agrees_with_its_oracle(name: str, seed: int) -> None:
    columns, settings, tolerance = ORACLES[name]
    bars, feature = walk(2000, seed), INDICATORS[name](*settings)
    actual, expected = run(feature, bars), np.column_stack(columns(bars, *settings))
    warm = slice(feature.lookback - 1, None)
    assert np.isfinite(expected[warm]).all()
    size = np.maximum(np.abs(expected[warm]), np.abs(expected[warm]).mean(axis=0))
    assert (np.abs(actual[warm] - expected[warm]) / size).max() <= tolerance


def pandas_ta(bars: Bars) -> dict[str, Floats]:
    """Everything but volume, as pandas-ta-classic computes it natively (talib=False).

    Its conventions match ours with the defaults below: EMA and Wilder's averages seeded by a
    simple mean, Bollinger with the population deviation, spans shifted by kijun. Only its MACD
    seeds the fast average earlier.
    """
    index = pd.RangeIndex(len(bars))
    o, h, low, c = (
        pd.Series(getattr(bars, f), index=index, name=f) for f in ("open", "high", "low", "close")
    )
    out = {f"sma_{p}": pta.sma(c, p, talib=False) for p in (10, 20, 50)}
    out |= {f"ema_{p}": pta.ema(c, p, talib=False) for p in (12, 26)}
    out |= {"rsi_14": pta.rsi(c, 14, talib=False), "atr_14": pta.atr(h, low, c, 14, talib=False)}
    macd = pta.macd(c, 12, 26, 9, talib=False)
    out |= {
        f"macd{ours}_12_26_9": macd[f"MACD{theirs}_12_26_9"]
        for ours, theirs in (("", ""), ("_signal", "s"), ("_hist", "h"))
    }
    bands = pta.bbands(c, 20, 2.0, talib=False, ddof=0)
    out |= {
        f"bb_{ours}_20_2": bands[f"BB{ours[0].upper()}_20_2.0"]
        for ours in ("lower", "mid", "upper", "bandwidth", "percent")
    }
    cloud = pta.ichimoku(h, low, c, 9, 26, 52, as_dataframe=True)
    out |= {
        "ichimoku_tenkan_9": cloud["ITS_9"],
        "ichimoku_kijun_26": cloud["IKS_26"],
        "ichimoku_senkou_a_9_26": cloud["ISA_9"],
        "ichimoku_senkou_b_52_26": cloud["ISB_26"],
    }
    candle = pta.ha(o, h, low, c)
    out |= {f"ha_{f}": candle[f"HA_{f}"] for f in ("open", "high", "low", "close")}
    trend = pta.supertrend(h, low, c, 10, 3.0)
    out |= {
        "supertrend_10_3": trend["SUPERT_10_3.0"],
        "supertrend_dir_10_3": trend["SUPERTd_10_3.0"],
    }
    out |= {"open": o, "high": h, "low": low, "close": c}
    return {name: column.to_numpy() for name, column in out.items()}


@pytest.mark.parametrize("seed", range(5))
def test_every_column_agrees_with_pandas_ta_after_warm_up(seed: int) -> None:
    bars = walk(1000, seed)
    actual, expected = by_name(FEATURES, bars), pandas_ta(bars)
    assert set(expected) == set(COLUMNS) - {"volume"}
    for name, column in expected.items():
        # The seed of the fast average has a weight of (11/13)^150 ≈ 1e-11 by then.
        first = 33 + 150 if name.startswith("macd") else np.flatnonzero(~np.isnan(actual[name]))[0]
        np.testing.assert_allclose(
            actual[name][first:], column[first:], rtol=1e-6, atol=1e-9, err_msg=name
        )


def test_volume_is_the_traded_value_and_zero_on_gaps() -> None:
    volume = ohlcv_features()[-1]
    bars = walk(5)
    np.testing.assert_array_equal(run(volume, bars)[:, 0], bars.value)
    assert volume.on_gap == "zero"
    assert {f.on_gap for f in ohlcv_features()[:-1]} == {"carry"}


@pytest.mark.parametrize(
    ("feature", "function", "parameters"),
    [
        (indicators.sma(7), "SMA", {"timeperiod": 7}),
        (indicators.ema(7), "EMA", {"timeperiod": 7}),
        (indicators.rsi(7), "RSI", {"timeperiod": 7}),
        (
            indicators.macd(5, 9, 4),
            "MACD",
            {"fastperiod": 5, "slowperiod": 9, "signalperiod": 4},
        ),
        (indicators.atr(7), "ATR", {"timeperiod": 7}),
        (indicators.bbands(7, 1.5), "BBANDS", {"timeperiod": 7}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lookback_is_talibs_own_plus_the_current_bar(
    feature: Feature, function: str, parameters: dict[str, int]
) -> None:
    theirs = abstract.Function(function)
    theirs.set_parameters(parameters)
    assert feature.lookback == theirs.lookback + 1


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.names[0])
def test_exactly_the_rows_before_the_lookback_are_nan(feature: Feature) -> None:
    bars = walk(feature.lookback + 5)
    own = feature.compute(bars).reshape(len(bars), -1)
    # The indicator itself has no full row earlier, so the lookback is not too long …
    assert np.isnan(own[: feature.lookback - 1]).any(axis=1).all()
    out = run(feature, bars)
    # … and `run` blanks the columns that would start sooner and finds all later rows valid.
    assert np.isnan(out[: feature.lookback - 1]).all()
    assert np.isfinite(out[feature.lookback - 1 :]).all()
    np.testing.assert_array_equal(out[feature.lookback - 1 :], own[feature.lookback - 1 :])


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.names[0])
def test_history_shorter_than_the_lookback_is_all_nan(feature: Feature) -> None:
    bars = walk(feature.lookback)
    for length in {0, 1, feature.lookback - 1} - {feature.lookback}:
        out = run(feature, head(bars, length))
        assert out.shape == (length, len(feature.names))
        assert np.isnan(out).all()
    assert np.isfinite(run(feature, bars)[-1]).all()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.names[0])
def test_bars_are_neither_changed_nor_handed_out(feature: Feature) -> None:
    bars = walk(120)
    for name in ("open", "high", "low", "close", "value"):
        getattr(bars, name).setflags(write=False)
    out = run(feature, bars)
    assert out.flags.writeable
    assert not any(
        np.shares_memory(out, getattr(bars, f)) for f in ("open", "high", "low", "close", "value")
    )


def test_heikin_ashi_matches_hand_computed_candles() -> None:
    bars = candles([(10, 12, 8, 11), (11, 15, 11, 15), (15, 15, 9, 10)])
    # close = (o+h+l+c)/4; open = (o+c)/2 at first, then the middle of the previous body.
    expected = [
        [10.5, 12, 8, 10.25],
        [10.375, 15, 10.375, 13],
        [11.6875, 15, 9, 12.25],
    ]
    np.testing.assert_array_equal(run(indicators.heikin_ashi(), bars), expected)


def test_supertrend_matches_hand_computed_line() -> None:
    # period 1, multiplier 1: the ATR is the true range, the bands are the middle ± that.
    bars = candles(
        [
            (9.5, 10, 9, 9.5),  # no true range yet
            (10, 11, 10, 10.5),  # range 1.5, bands 9 and 12, up by definition
            (12, 13, 12, 12.5),  # range 2.5, bands 10 and 15; above 12: up, bands as they are
            (12, 12.5, 11, 11),  # range 1.5, bands 10.25 and 13.25; up goes on
            (11, 11, 9, 9),  # range 2, bands 8 and 12; below 10.25: down
            (9, 10, 8, 8.5),  # range 2, bands 7 and 11; down, the upper band tightens to 11
            (10, 12, 10, 10.5),  # range 3.5, bands 7.5 and 14.5; down, the upper band stays 11
            (11, 12, 11, 11.5),  # range 1.5, bands 10 and 13; above 11: up
        ]
    )
    out = run(indicators.supertrend(1, 1.0), bars)
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:, 0], [9, 10, 10.25, 12, 11, 11, 10])
    np.testing.assert_array_equal(out[1:, 1], [1, 1, 1, -1, -1, -1, 1])


def test_ichimoku_matches_hand_computed_lines_and_spans_lag_by_kijun() -> None:
    bars = candles(
        [(5, high, low, 5) for high, low in ((6, 4), (8, 5), (7, 2), (9, 5), (10, 5), (12, 6))]
    )
    out = run(indicators.ichimoku(1, 2, 3), bars)
    # Row 4 is the first: span b needs three bars, two bars ago.
    assert np.isnan(out[:4]).all()
    # tenkan: (10+5)/2, (12+6)/2. kijun: (10+5)/2, (12+5)/2.
    np.testing.assert_array_equal(out[4:, 0], [7.5, 9])
    np.testing.assert_array_equal(out[4:, 1], [7.5, 8.5])
    # At row 2: tenkan (7+2)/2 = 4.5, kijun (8+2)/2 = 5. At row 3: (9+5)/2 = 7, (9+2)/2 = 5.5.
    np.testing.assert_array_equal(out[4:, 2], [4.75, 6.25])
    # At row 2: (8+2)/2 = 5. At row 3: (9+2)/2 = 5.5.
    np.testing.assert_array_equal(out[4:, 3], [5, 5.5])


def test_symbol_that_never_moved_sits_in_the_middle() -> None:
    bars = candles([(3.3, 3.3, 3.3, 3.3)] * 100)
    out = {name: column[-1] for name, column in by_name(FEATURES, bars).items()}
    assert out["rsi_14"] == 50
    assert out["bb_percent_20_2"] == 0.5
    assert out["bb_bandwidth_20_2"] == pytest.approx(0, abs=1e-9)
    assert out["atr_14"] == 0
    assert out["supertrend_10_3"] == pytest.approx(3.3)


def test_rsi_of_first_move_after_a_flat_start_is_extreme() -> None:
    bars = candles([(1.0, 1.0, 1.0, 1.0)] * 20 + [(1.0, 1.1, 1.0, 1.1)] * 2)
    out = run(indicators.rsi(14), bars)[:, 0]
    np.testing.assert_array_equal(out[14:], [50, 50, 50, 50, 50, 50, 100, 100])


def test_bollinger_of_a_flat_stretch_after_wild_prices_stays_inside_the_bands() -> None:
    rng = np.random.default_rng(1)
    close = np.r_[100 * np.exp(np.cumsum(rng.normal(0, 0.05, 300))), np.full(100, 37.123)]
    out = run(indicators.bbands(20, 2.0), Bars(days(400), close, close))
    np.testing.assert_array_equal(out[-80:, 4], 0.5)


def test_parameters_show_in_names() -> None:
    assert indicators.bbands(20, 2.5).names[0] == "bb_lower_20_2.5"
    assert indicators.supertrend(7, 1.0).names == ("supertrend_7_1", "supertrend_dir_7_1")


def test_bars_refuse_nan_and_prices_that_are_not_positive() -> None:
    good = np.array([1.0, 2.0])
    for bad in (np.array([1.0, np.nan]), np.array([0.0, 1.0]), np.array([-1.0, 1.0])):
        with pytest.raises(AssertionError, match="close"):
            Bars(days(2), bad, good)
        with pytest.raises(AssertionError, match="high"):
            Bars(days(2), good, good, high=bad)
    with pytest.raises(AssertionError, match="value"):
        Bars(days(2), good, good, value=np.array([1.0, np.nan]))
    with pytest.raises(AssertionError, match="float64"):
        Bars(days(2), good.astype(np.float32), good)
    no_limit = Bars(days(2), good, good, limit_up=np.array([np.nan, 1.0]))
    assert len(no_limit) == 2
