"""The stationary set against slow twins and numbers worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.config.features import StationaryConfig
from echelon.features import indicators as stationary
from echelon.features.base import Bars, CrossSection, Feature
from echelon.features.indicators import NO_LIMIT, VOLUME_FLOOR, stationary_features
from echelon.features.registry import run
from echelon.types import Floats

positive = st.floats(1e-3, 1e3)


def bars_of(close: list[float] | Floats, value: list[float] | None = None) -> Bars:
    prices = np.array(close, dtype=np.float64)
    days = np.datetime64("2000-01-03", "us") + np.arange(len(prices)) * np.timedelta64(1, "D")
    return Bars(days, prices, prices, value=None if value is None else np.array(value))


def test_default_set_has_returns_volatilities_volumes_ranks_and_limits_in_order() -> None:
    specs = stationary_features(StationaryConfig(enabled=True))
    bases = [
        *("ret_1", "ret_5", "ret_10", "ret_20", "ret_60", "vol_10", "vol_20", "vol_60"),
        *("volume_ratio_5", "volume_ratio_20"),
    ]
    assert [s.names[0] for s in specs if isinstance(s, Feature)] == [*bases, "limit_up_distance"]
    ranks = [s for s in specs if isinstance(s, CrossSection)]
    assert [r.base for r in ranks] == bases
    assert [r.name for r in ranks] == [f"rank_{base}" for base in bases]
    assert {s.group for s in specs} == {"stationary"}


def test_each_switch_of_the_configuration_takes_its_part_out() -> None:
    assert stationary_features(StationaryConfig(enabled=False)) == ()
    bare = StationaryConfig(
        enabled=True,
        returns=(3,),
        volatility=(),
        volume_ratio=(),
        ranks=False,
        limit_distance=False,
    )
    (only,) = stationary_features(bare)
    assert isinstance(only, Feature)
    assert only.names == ("ret_3",)


def test_gaps_zero_the_one_bar_return_and_volumes_and_carry_the_rest() -> None:
    on_gap = {
        spec.names[0]: spec.on_gap
        for spec in stationary_features(StationaryConfig(enabled=True))
        if isinstance(spec, Feature)
    }
    zero = {name for name, what in on_gap.items() if what == "zero"}
    assert zero == {"ret_1", "volume_ratio_5", "volume_ratio_20"}


@given(st.lists(positive, max_size=30), st.integers(1, 8))
def test_log_return_equals_difference_of_logs(close: list[float], horizon: int) -> None:
    out = run(stationary.log_return(horizon), bars_of(close))[:, 0]
    expected = [
        math.nan if t < horizon else math.log(close[t]) - math.log(close[t - horizon])
        for t in range(len(close))
    ]
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)


@given(st.lists(positive, max_size=30), st.integers(2, 8))
def test_volatility_equals_the_sample_deviation_of_each_window(
    close: list[float], window: int
) -> None:
    out = run(stationary.return_volatility(window), bars_of(close))[:, 0]
    returns = [math.log(b / a) for a, b in pairwise(close)]
    expected = [
        math.nan if t < window else stdev(returns[t - window : t]) for t in range(len(close))
    ]
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)


def test_volatility_after_a_crash_is_not_disturbed_by_its_rounding() -> None:
    calm = np.exp(1e-6 * np.sin(np.arange(100)))
    crash = np.r_[1e12, np.ones(5)]
    out = run(stationary.return_volatility(10), bars_of(np.r_[crash, calm]))[-80:, 0]
    np.testing.assert_array_equal(
        out, run(stationary.return_volatility(10), bars_of(calm))[-80:, 0]
    )


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1, 1e12)), max_size=30),
    st.integers(2, 8),
)
def test_volume_ratio_equals_log_of_value_over_its_mean_with_a_floor(
    value: list[float], window: int
) -> None:
    out = run(stationary.volume_ratio(window), bars_of([1.0] * len(value), value))[:, 0]
    expected = []
    for t in range(len(value)):
        mean = fmean(value[t - window + 1 : t + 1]) if t >= window - 1 else math.nan
        ratio = 1.0 if mean == 0 else value[t] / mean
        expected.append(math.log(max(ratio, VOLUME_FLOOR)) if mean >= 0 else math.nan)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)
    warm = out[window - 1 :]
    assert ((warm >= math.log(VOLUME_FLOOR)) & (warm <= math.log(window) + 1e-12)).all()


def test_bars_without_a_trade_give_the_floor_and_a_dead_window_gives_zero() -> None:
    out = run(stationary.volume_ratio(2), bars_of([1.0] * 4, [8.0, 8.0, 0.0, 0.0]))[:, 0]
    np.testing.assert_array_equal(out[1:], [0.0, math.log(VOLUME_FLOOR), 0.0])


def test_limit_distance_is_room_to_each_limit_and_a_constant_without_one() -> None:
    close = np.array([10.0, 11.0, 9.0, 10.0])
    up = np.array([11.0, 11.0, 11.0, np.nan])
    down = np.array([9.0, 9.0, 9.0, np.nan])
    days = np.datetime64("2000-01-03", "us") + np.arange(4) * np.timedelta64(1, "D")
    bars = Bars(days, close, close, limit_up=up, limit_down=down)
    out = run(stationary.limit_distance(), bars)
    np.testing.assert_allclose(out[:, 0], [0.1, 0.0, 11 / 9 - 1, NO_LIMIT])
    np.testing.assert_allclose(out[:, 1], [10 / 9 - 1, 11 / 9 - 1, 0.0, NO_LIMIT])


def test_constant_without_limit_is_beyond_the_widest_band() -> None:
    widest = 0.30
    assert (1 + widest) / (1 - widest) - 1 < NO_LIMIT


@pytest.mark.parametrize(
    "feature",
    [stationary.log_return(5), stationary.return_volatility(5), stationary.volume_ratio(5)],
    ids=lambda f: f.names[0],
)
def test_exactly_the_rows_before_the_lookback_are_nan(feature: Feature) -> None:
    close = np.exp(np.random.default_rng(0).normal(0, 0.02, 12))
    bars = bars_of(close, [1e6] * 12)
    own = feature.compute(bars)
    assert np.isnan(own[: feature.lookback - 1]).all()
    assert np.isfinite(own[feature.lookback - 1 :]).all()
    for length in (0, 1, feature.lookback - 1):
        short = Bars(
            bars.times[:length],
            bars.close[:length],
            bars.raw_close[:length],
            value=None if bars.value is None else bars.value[:length],
        )
        assert np.isnan(run(feature, short)).all()
        assert run(feature, short).shape == (length, 1)
