"""Selection, user factors, what `run` enforces, ranks, and properties of every shipped feature."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from echelon.config.features import (
    CrossSectionConfig,
    FeaturesConfig,
    IndicatorsConfig,
    StationaryConfig,
)
from echelon.errors import FeatureError
from echelon.features._kernels import rank_rows as rank
from echelon.features.base import Bars, CrossSection, Feature, Field
from echelon.features.engine import FeaturePlan
from echelon.features.indicators import (
    alpha158_features,
    indicator_features,
    ohlcv_features,
    relative_feature,
)
from echelon.features.registry import LeftOut, Selection, factor, load_modules, run, select
from echelon.types import Bools, Floats

ALL_FIELDS = frozenset({"open", "high", "low", "close", "volume", "vwap", "limits"})
EVERYTHING = FeaturesConfig(
    ohlcv=True,
    indicators=IndicatorsConfig(
        sma=(10, 20, 50),
        ema=(12, 26),
        rsi=(14,),
        macd=(12, 26, 9),
        atr=(14,),
        bbands=(20, 2.0),
        ichimoku=(9, 26, 52),
        heikin_ashi=True,
        supertrend=(10, 3.0),
    ),
    stationary=StationaryConfig(enabled=True),
    alpha158=(5, 20),
)
SHIPPED = [s for s in select(EVERYTHING, ALL_FIELDS).specs if isinstance(s, Feature)]
LEVELS = (*ohlcv_features(), *indicator_features(EVERYTHING.indicators))
each_shipped = pytest.mark.parametrize("feature", SHIPPED, ids=lambda f: f.names[0])
seeds = st.integers(0, 2**32 - 1)


def names_of(selection: Selection) -> tuple[str, ...]:
    """Names of the columns."""
    return FeaturePlan.from_specs(selection.specs).names


def walk(n: int, seed: int) -> Bars:
    """A fat-tailed walk with all fields; some bars without a trade, some without limits."""
    rng = np.random.default_rng(seed)
    days = np.datetime64("2000-01-03", "us") + np.arange(n) * np.timedelta64(1, "D")
    close = np.exp(np.cumsum(0.02 * rng.standard_t(3, n)))
    open_ = close * np.exp(rng.normal(0, 0.01, n))
    high = np.maximum(open_, close) * np.exp(np.abs(rng.normal(0, 0.01, n)))
    low = np.minimum(open_, close) * np.exp(-np.abs(rng.normal(0, 0.01, n)))
    value = np.where(rng.random(n) < 0.1, 0.0, rng.lognormal(16, 1, n))
    vwap = (high + low + close) / 3
    reference = np.where(rng.random(n) < 0.1, np.nan, np.r_[1.0, close][:n])
    limits = reference * 1.1, reference * 0.9
    return Bars(days, close, close, open_, high, low, value, *limits, vwap)


def over_fields(bars: Bars, change: Callable[[str, Any], Any]) -> Bars:
    return Bars(**{f.name: change(f.name, getattr(bars, f.name)) for f in dataclass_fields(bars)})


def simple(close: list[float], **more: Floats) -> Bars:
    prices = np.array(close, dtype=np.float64)
    days = np.datetime64("2000-01-03", "us") + np.arange(len(prices)) * np.timedelta64(1, "D")
    return Bars(days, prices, prices, **more)


# Properties of every shipped feature


@each_shipped
@settings(max_examples=25)
@given(seed=seeds, cut=st.integers(0, 200))
def test_history_without_its_future_gives_the_same_rows_bit_for_bit(
    feature: Feature, seed: int, cut: int
) -> None:
    bars = walk(200, seed)
    truncated = run(feature, over_fields(bars, lambda _, a: a[:cut]))
    np.testing.assert_array_equal(truncated, run(feature, bars)[:cut])


@each_shipped
@settings(max_examples=25)
@given(seed=seeds, cut=st.integers(0, 200))
def test_another_future_gives_the_same_rows_bit_for_bit(
    feature: Feature, seed: int, cut: int
) -> None:
    bars, other = walk(200, seed), walk(200, seed ^ 1)

    def splice(name: str, past: Any) -> Any:
        if name == "times":
            return past
        scale = 1 if name == "value" else 100
        return np.concatenate([past[:cut], getattr(other, name)[cut:] * scale])

    spliced = over_fields(bars, splice)
    np.testing.assert_array_equal(run(feature, spliced)[:cut], run(feature, bars)[:cut])


UNITLESS = (
    *("rsi_", "bb_bandwidth_", "bb_percent_", "supertrend_dir_", "volume", "ret_", "vol_"),
    *("limit_", *(name for f in alpha158_features((5, 20)) for name in f.names)),
)


@each_shipped
@settings(max_examples=25)
@given(seed=seeds, log_scale=st.floats(-6, 6))
def test_prices_times_a_constant_scale_lines_and_leave_ratios(
    feature: Feature, seed: int, log_scale: float
) -> None:
    bars, scale = walk(150, seed), 10.0**log_scale
    keep = ("times", "value")
    scaled = over_fields(bars, lambda name, a: a if name in keep else a * scale)
    before, after = run(feature, bars), run(feature, scaled)
    for k, name in enumerate(feature.names):
        unit = 1.0 if name.startswith(UNITLESS) else scale
        np.testing.assert_allclose(
            after[:, k], before[:, k] * unit, rtol=1e-7, atol=1e-9 * unit, err_msg=name
        )


@pytest.mark.parametrize("level", LEVELS, ids=lambda f: f.names[0])
def test_relative_level_is_a_ratio_to_the_close_and_has_no_unit(level: Feature) -> None:
    bars, feature = walk(150, 3), relative_feature(level)
    assert (feature.names, feature.group) == (level.names, level.group)
    before, after = run(level, bars), run(feature, bars)
    for k, name in enumerate(level.names):
        plain, close = before[:, k], bars.close
        if name == "close":
            expected = np.r_[np.nan, np.log(close[1:] / close[:-1])]
        elif name == "volume":
            mean = np.convolve(bars.value, np.ones(20) / 20)[:150]
            expected = np.log(np.maximum(bars.value / mean, 0.01))
            expected[:19] = np.nan
        elif name.startswith(UNITLESS):
            expected = plain
        else:
            expected = plain / close - (0 if name.startswith(("macd", "atr")) else 1)
        np.testing.assert_allclose(after[:, k], expected, 1e-9, 1e-12, err_msg=name)
    keep = ("times", "value")
    scaled = over_fields(bars, lambda name, a: a if name in keep else a * 1000.0)
    np.testing.assert_allclose(run(feature, scaled), after, 1e-7, 1e-9)


@each_shipped
@settings(max_examples=10)
@given(seed=seeds, scale=st.floats(1e-6, 1e6))
def test_traded_value_in_another_currency_changes_nothing_but_volume(
    feature: Feature, seed: int, scale: float
) -> None:
    bars = walk(150, seed)
    assert bars.value is not None
    before, after = run(feature, bars), run(feature, replace(bars, value=bars.value * scale))
    unit = scale if feature.names == ("volume",) else 1.0
    np.testing.assert_allclose(after, before * unit, rtol=1e-9, atol=1e-12)


# Selection


def test_everything_selected_is_ordered_unique_and_has_ranks_last() -> None:
    selection = select(EVERYTHING, ALL_FIELDS)
    assert selection.left_out == ()
    assert len(names_of(selection)) == len(set(names_of(selection))) == 30 + 12 + 10 + 13 + 2 * 29
    kinds = [isinstance(s, CrossSection) for s in selection.specs]
    assert kinds == sorted(kinds)
    assert names_of(selection)[:5] == ("open", "high", "low", "close", "volume")
    assert FeaturePlan.from_specs(selection.specs).warmup == 78


def test_close_only_source_leaves_the_others_out_by_name_and_reason() -> None:
    selection = select(EVERYTHING, frozenset({"close"}))
    assert all(s.needs == {"close"} for s in selection.specs if isinstance(s, Feature))
    reasons = {out.name: out.missing for out in selection.left_out}
    assert reasons["open"] == ("open",)
    assert reasons["atr_14"] == ("high", "low")
    assert reasons["ha_close"] == ("open", "high", "low")
    assert reasons["volume"] == reasons["rank_volume_ratio_5"] == ("volume",)
    assert reasons["limit_up_distance"] == reasons["limit_down_distance"] == ("limits",)
    everything = names_of(select(EVERYTHING, ALL_FIELDS))
    assert sorted([*names_of(selection), *reasons]) == sorted(everything)
    assert str(LeftOut("atr_14", ("high", "low"))) == (
        "atr_14 is left out: the source has no high, low"
    )


def test_comparison_names_its_columns_and_takes_the_place_of_what_it_is_made_of() -> None:
    config = FeaturesConfig(
        alpha158=(5,),
        calendar=True,
        cross_section=CrossSectionConfig(method="rank", of=("ROC5", "KMID")),
    )
    plan = FeaturePlan.from_specs(select(config, ALL_FIELDS).specs)
    assert plan.names[-2:] == ("rank_KMID", "rank_ROC5")
    assert not {"KMID", "ROC5"} & set(plan.names)
    assert len(plan.names) == len(plan.groups) == len(plan.lookbacks) == 13 + 29 + 4
    assert (plan.lookbacks["rank_ROC5"], plan.warmup) == (6, 6)
    keep = config.cross_section.model_copy(update={"keep": True})
    both = select(config.model_copy(update={"cross_section": keep}), ALL_FIELDS)
    assert len(names_of(both)) == len(plan.names) + 2


def test_ranks_of_the_stationary_set_are_not_made_twice() -> None:
    ranked = FeaturesConfig(cross_section=CrossSectionConfig(method="rank"))
    names = names_of(select(ranked, ALL_FIELDS))
    assert len(names) == len(set(names)) == 12
    assert all(name.startswith("rank_") for name in names)
    scored = FeaturesConfig(cross_section=CrossSectionConfig(method="zscore"))
    names = names_of(select(scored, ALL_FIELDS))
    assert [name.partition("_")[0] for name in names] == ["rank"] * 10 + ["zscore"] * 12


def test_comparison_of_an_unknown_column_or_under_a_taken_name_is_refused(tmp_path: Path) -> None:
    unknown = CrossSectionConfig(method="rank", of=("ROC6",))
    with pytest.raises(FeatureError, match=r"names 'ROC6', which is no column.*'ROC5'"):
        select(FeaturesConfig(alpha158=(5,), cross_section=unknown), ALL_FIELDS)
    file = tmp_path / "taken.py"
    file.write_text(
        "from echelon.features import factor\n\n@factor(lookback=1, names=('rank_KMID',))\n"
        "def mine(bars):\n    return bars.close\n"
    )
    across = CrossSectionConfig(method="rank", of=("KMID",))
    config = FeaturesConfig(alpha158=(5,), modules=(str(file),), cross_section=across)
    with pytest.raises(FeatureError, match=r"'rank_KMID' occurs twice"):
        select(config, ALL_FIELDS)


def test_left_out_column_is_not_compared() -> None:
    across = CrossSectionConfig(method="zscore", of=("CORR5", "ROC5"))
    selection = select(FeaturesConfig(alpha158=(5,), cross_section=across), frozenset({"close"}))
    names = names_of(selection)
    assert "zscore_ROC5" in names
    assert "zscore_CORR5" not in names


def test_ranks_of_what_is_there_stay_on_a_close_only_source() -> None:
    names = names_of(select(EVERYTHING, frozenset({"close"})))
    assert "rank_ret_1" in names
    assert "rank_volume_ratio_5" not in names


def test_selection_that_is_empty_is_refused_with_the_reason() -> None:
    with pytest.raises(FeatureError, match="names no feature"):
        select(FeaturesConfig(stationary=StationaryConfig(enabled=False)), ALL_FIELDS)
    only_atr = FeaturesConfig(indicators=IndicatorsConfig(atr=(14,)))
    with pytest.raises(FeatureError, match="atr_14 is left out: the source has no high, low"):
        select(only_atr, frozenset({"close"}))


def test_period_listed_twice_is_refused() -> None:
    config = FeaturesConfig(indicators=IndicatorsConfig(sma=(10, 10)))
    with pytest.raises(FeatureError, match="'sma_10' occurs twice"):
        select(config, ALL_FIELDS)


# User factors

MOMENTUM = """
    import numpy as np
    from dataclasses import dataclass
    from echelon.features.base import Bars
    from echelon.features.registry import factor

    @dataclass
    class Settings:
        horizon: int = 20

    @factor(lookback=21, needs=("close",))
    def momentum_20(bars: Bars):
        horizon = Settings().horizon
        out = np.full(len(bars), np.nan)
        out[horizon:] = bars.close[horizon:] / bars.close[:-horizon] - 1
        return out

    fields, names = ("high", "low", "volume"), ("spread", "turnover")

    @factor(lookback=1, needs=fields, names=names, on_gap="zero")
    def pair(bars: Bars):
        return np.column_stack([bars.high / bars.low - 1, bars.value])
"""


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_factor_file_adds_its_columns_to_the_selection(tmp_path: Path) -> None:
    path = write(tmp_path, MOMENTUM)
    config = FeaturesConfig(ohlcv=True, modules=(str(path),))
    selection = select(config, ALL_FIELDS)
    assert names_of(selection)[5:] == ("momentum_20", "spread", "turnover")
    momentum, pair = (s for s in selection.specs[5:] if isinstance(s, Feature))
    assert momentum.group == pair.group == "custom"
    assert (momentum.lookback, momentum.on_gap, pair.on_gap) == (21, "carry", "zero")
    bars = walk(30, 0)
    np.testing.assert_allclose(run(momentum, bars)[20:, 0], bars.close[20:] / bars.close[:-20] - 1)
    np.testing.assert_array_equal(run(pair, bars)[:, 1], bars.value)


@pytest.mark.parametrize("wanted", ["pair", "spread"])
def test_custom_picks_factors_by_function_or_column(tmp_path: Path, wanted: str) -> None:
    path = write(tmp_path, MOMENTUM)
    selection = select(FeaturesConfig(modules=(str(path),), custom=(wanted,)), ALL_FIELDS)
    assert names_of(selection) == ("spread", "turnover")


def test_unknown_custom_name_is_answered_with_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path, MOMENTUM)
    config = FeaturesConfig(modules=(str(path),), custom=("momentum_21",))
    with pytest.raises(FeatureError, match="Did you mean 'momentum_20'"):
        select(config, ALL_FIELDS)
    with pytest.raises(FeatureError, match=r"features\.custom names 'momentum_20'"):
        select(FeaturesConfig(ohlcv=True, custom=("momentum_20",)), ALL_FIELDS)


def test_factor_needing_a_missing_field_is_left_out_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, MOMENTUM)
    selection = select(FeaturesConfig(modules=(str(path),)), frozenset({"close"}))
    assert names_of(selection) == ("momentum_20",)
    assert [out.name for out in selection.left_out] == ["spread", "turnover"]
    assert selection.left_out[0].missing == ("high", "low", "volume")


def test_loading_twice_gives_the_same_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, MOMENTUM)
    first, second = load_modules([path]), load_modules([path])
    assert [f.names for f in first] == [f.names for f in second]
    assert [f.source_id for f in first] == [f.source_id for f in second]
    assert list(tmp_path.iterdir()) == [path]
    assert load_modules([]) == ()


def test_edited_helper_changes_identity_and_result_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, MOMENTUM)
    (before, _), bars = load_modules([path]), walk(30, 0)
    write(tmp_path, MOMENTUM.replace("horizon: int = 20", "horizon: int = 10"))
    after, _ = load_modules([path])
    assert after.source_id != before.source_id
    assert not np.array_equal(run(after, bars)[20:], run(before, bars)[20:])


ONE = """
    from echelon.features.registry import factor

    @factor(lookback=1)
    def same(bars):
        return bars.close
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n    pass\n", r"mine\.py, line 1: .*syntax"),
        ("import no_such_package\n", r"mine\.py, line 1: .*ModuleNotFoundError"),
        ("x = 1\n1 / 0\n", r"mine\.py, line 2: .*ZeroDivisionError"),
        ("x = 1\n", r"mine\.py: the file declares no factor"),
        (ONE + ONE, r"mine\.py, line 10: factor 'same': another feature already has this name"),
        (ONE.replace("same", "sma_10"), r"mine\.py, line 4: factor 'sma_10'"),
        (ONE.replace("lookback=1", "lookback=0"), r"mine\.py, line 4: .*lookback is 0"),
        (ONE.replace("lookback=1", "lookback=1.5"), r"mine\.py, line 4: .*lookback is 1\.5"),
        (ONE.replace("=1)", "=1, needs=('cloze',))"), r"mine\.py, .*needs has 'cloze'"),
        (ONE.replace("=1)", "=1, needs='close')"), r"mine\.py, .*needs is 'close'"),
        (ONE.replace("=1)", "=1, on_gap='drop')"), r"mine\.py, .*on_gap has 'drop'"),
        (ONE.replace("=1)", "=1, group='mine')"), r"mine\.py, .*group has 'mine'"),
        (ONE.replace("=1)", "=1, names=())"), r"mine\.py, .*names is \(\)"),
    ],
)
def test_bad_factor_file_is_refused_by_file_and_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    config = FeaturesConfig(indicators=IndicatorsConfig(sma=(10,)), modules=(str(path),))
    with pytest.raises(FeatureError, match=message):
        select(config, ALL_FIELDS)


def test_missing_factor_file_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match=r"nowhere\.py: cannot read .*features\.modules"):
        load_modules([tmp_path / "nowhere.py"])
    with pytest.raises(FeatureError, match="cannot read this factor file"):
        load_modules([tmp_path])


def test_same_name_in_two_files_names_the_second(tmp_path: Path) -> None:
    first, second = write(tmp_path, ONE, "a.py"), write(tmp_path, ONE, "b.py")
    with pytest.raises(FeatureError, match=r"b\.py, line 4: factor 'same'"):
        load_modules([first, second])


def test_failed_load_leaves_the_decorator_outside_a_file(tmp_path: Path) -> None:
    with pytest.raises(FeatureError):
        load_modules([write(tmp_path, "1 / 0\n")])

    @factor(lookback=1)
    def loose(bars: Bars) -> Floats:
        return bars.close

    np.testing.assert_array_equal(run(loose, simple([1, 2]))[:, 0], [1, 2])


def test_bars_are_read_only_and_leave_the_arrays_they_were_made_from_alone() -> None:
    times = np.datetime64("2020-01-01", "us") + np.arange(3) * np.timedelta64(1, "D")
    close, limit = np.array([1.0, 2.0, 3.0]), np.full(3, np.nan)
    bars = Bars(times=times, close=close, raw_close=close, limit_up=limit)
    for array in (bars.times, bars.close, bars.raw_close, bars.limit_up):
        assert array is not None
        assert not array.flags.writeable
    assert all(array.flags.writeable for array in (times, close, limit))
    assert np.shares_memory(bars.close, close)


def test_factor_that_writes_into_its_input_is_refused_by_name_and_line(tmp_path: Path) -> None:
    text = """
        from echelon.features import factor

        @factor(lookback=1)
        def shifted(bars):
            x = bars.close
            x -= x.min()
            return x
        """
    path = write(tmp_path, text)
    config = FeaturesConfig(modules=(str(path),))
    (feature,) = select(config, ALL_FIELDS).specs
    assert isinstance(feature, Feature)
    bars = walk(50, 1)
    before = bars.close.copy()
    with pytest.raises(FeatureError, match=r"mine\.py, line 7: ValueError: .*read-only"):
        run(feature, bars)
    assert np.array_equal(bars.close, before)


def test_factor_sees_only_the_fields_it_declared() -> None:
    @factor(lookback=1, needs=("close",))
    def sly(bars: Bars) -> Floats:
        return bars.high / bars.close  # type: ignore[operator]

    bars = simple([1, 2], high=np.array([1.0, 2.0]))
    with pytest.raises(
        FeatureError, match=r"factor 'sly' on ABC failed: .*test_registry\.py, line .*TypeError"
    ):
        run(sly, bars, "ABC")


# What `run` enforces


def returning(values: Any, lookback: int = 1, names: tuple[str, ...] = ("x",)) -> Feature:
    return Feature(names, lambda _: values, lookback, frozenset({"close"}), "custom")


def test_run_blanks_the_rows_before_the_lookback() -> None:
    out = run(returning(np.array([1.0, 2.0, 3.0]), lookback=3), simple([1, 1, 1]))
    np.testing.assert_array_equal(out, [[np.nan], [np.nan], [3.0]])
    assert out.dtype == np.float64


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_run_names_the_first_row_that_is_not_finite(bad: float) -> None:
    values = np.array([[bad, bad], [1, 1], [1, bad], [bad, 1]])
    with pytest.raises(
        FeatureError, match=r"factor 'x' on ABC returned .*column 'y' at row 2 \(2000-01-05"
    ):
        run(returning(values, lookback=2, names=("x", "y")), simple([1, 1, 1, 1]), "ABC")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (np.zeros(2), ("x",)),
        (np.zeros((3, 2)), ("x",)),
        (np.zeros(3), ("x", "y")),
        (np.zeros((2, 3)), ("x", "y")),
        (np.float64(0), ("x",)),
        (np.zeros((3, 1, 1)), ("x",)),
    ],
)
def test_run_refuses_a_wrong_shape(values: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(FeatureError, match=r"returned shape .* expected \(3, "):
        run(returning(values, names=names), simple([1, 1, 1]))


@pytest.mark.parametrize("values", [np.array(["a"]), np.array([1j]), np.array([None])])
def test_run_refuses_what_is_not_a_number(values: Any) -> None:
    with pytest.raises(FeatureError, match="expected an array of numbers"):
        run(returning(values), simple([1]))


def test_run_takes_whole_numbers_and_single_precision() -> None:
    for values in (np.array([1, 2]), np.array([1, 2], dtype=np.float32), [1.0, 2.0]):
        np.testing.assert_array_equal(run(returning(values), simple([1, 1])), [[1.0], [2.0]])


# Ranks


def slow_rank(values: Floats, mask: Bools) -> Floats:
    """The obvious twin: scipy's average ranks, row by row."""
    out = np.zeros(values.shape)
    for t in range(len(values)):
        there = mask[t] & ~np.isnan(values[t])
        if there.sum() > 1:
            out[t, there] = 2 * (rankdata(values[t, there]) - 1) / (there.sum() - 1) - 1
    return out


@st.composite
def cross_sections(draw: st.DrawFn) -> tuple[Floats, Bools]:
    """Small grids full of ties, holes and infinities."""
    rows, n = draw(st.integers(0, 4)), draw(st.integers(0, 8))
    cell = st.sampled_from([np.nan, -np.inf, np.inf, -1.0, -0.0, 0.0, 1.0, 1.5, 2.0])
    size = rows * n
    values = draw(st.lists(cell, min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return np.array(values).reshape(rows, n), np.array(mask, dtype=bool).reshape(rows, n)


@given(cross_sections())
def test_rank_equals_its_slow_twin(grid: tuple[Floats, Bools]) -> None:
    values, mask = grid
    out = rank(values, mask)
    np.testing.assert_allclose(out, slow_rank(values, mask), atol=1e-12)
    assert (np.abs(out) <= 1).all()
    assert (out[~mask] == 0).all()


@given(cross_sections(), seeds)
def test_rank_does_not_depend_on_the_order_of_assets(grid: tuple[Floats, Bools], seed: int) -> None:
    values, mask = grid
    order = np.random.default_rng(seed).permutation(values.shape[1])
    np.testing.assert_array_equal(
        rank(values[:, order], mask[:, order]), rank(values, mask)[:, order]
    )


@given(cross_sections())
def test_rank_of_one_bar_ignores_all_others(grid: tuple[Floats, Bools]) -> None:
    values, mask = grid
    assume(len(values) > 0)
    np.testing.assert_array_equal(rank(values[:1], mask[:1]), rank(values, mask)[:1])


def test_rank_of_a_wide_random_panel_equals_its_slow_twin() -> None:
    rng = np.random.default_rng(0)
    values = np.round(rng.normal(size=(50, 300)), 2)
    values[rng.random(values.shape) < 0.1] = np.nan
    mask = rng.random(values.shape) < 0.8
    np.testing.assert_allclose(rank(values, mask), slow_rank(values, mask), atol=1e-12)


def test_rank_matches_hand_computed_rows() -> None:
    nan = np.nan
    values = np.array([[3.0, 1.0, 2.0], [5.0, 5.0, 1.0], [7.0, nan, 9.0], [4.0, 4.0, 4.0]])
    mask = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=bool)
    expected = [[1, -1, 0], [0.5, 0.5, -1], [0, 0, 0], [0, 0, 0]]
    np.testing.assert_array_equal(rank(values, mask), expected)


def test_stationary_set_is_the_default_where_nothing_else_is_asked_for() -> None:
    fields = frozenset({"close"})
    assert "ret_1" in names_of(select(FeaturesConfig(), fields))
    assert "ret_1" not in names_of(select(FeaturesConfig(ohlcv=True), fields))


@pytest.mark.parametrize("place", ["top", "inside"])
def test_factor_file_that_exits_is_named(place: str, tmp_path: Path) -> None:
    file = tmp_path / "quits.py"
    body = "    sys.exit(0)" if place == "inside" else "    return bars.close"
    head = "sys.exit(0)" if place == "top" else ""
    file.write_text(
        f"import sys\nfrom echelon.features import factor\n{head}\n"
        f"@factor(lookback=1)\ndef quits(bars):\n{body}\n"
    )
    with pytest.raises(FeatureError, match=r"quits\.py, line"):
        run(load_modules([file])[0], walk(50, 0))


def _whole_bars() -> Bars:
    close = np.linspace(1.0, 2.0, 30)
    times = np.arange("2020-01-01", "2020-01-31", dtype="datetime64[D]").astype("datetime64[us]")
    return Bars(
        times, *[close] * 5, value=close * 1e6, limit_up=close, limit_down=close, vwap=close
    )


@pytest.mark.parametrize("field", get_args(Field))
def test_declared_field_exists_under_its_name(field: Field) -> None:
    whole = _whole_bars()
    seen = []

    @factor(lookback=1, needs=(field,))
    def looks(bars: Bars) -> Floats:
        seen.append(getattr(bars, field))
        return np.zeros(len(bars))

    looks.compute(whole)
    assert seen[0] is not None
    assert len(seen[0]) == len(whole)


def test_volume_is_the_traded_value_and_hidden_unless_declared() -> None:
    bars = _whole_bars()
    assert bars.volume is not None
    assert bars.value is not None
    np.testing.assert_array_equal(bars.volume, bars.value)
    seen = []

    @factor(lookback=1, needs=("close",))
    def looks(bars: Bars) -> Floats:
        seen.append((bars.volume, bars.limits))
        return np.zeros(len(bars))

    looks.compute(bars)
    assert seen == [(None, None)]
