"""Seed intervals, probabilistic and deflated Sharpe ratio, and the rule for a claim.

Published numbers: Bailey & López de Prado (2012), "The Sharpe Ratio Efficient Frontier", and
(2014), "The Deflated Sharpe Ratio".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import ffn
import numpy as np
import pandas as pd
import pytest
from arch.bootstrap import IIDBootstrap
from scipy import stats

from echelon.evaluation import statistics
from echelon.evaluation.statistics import (
    ReturnMoments,
    SharpeDifference,
    active_ratio,
    at_both_blocks,
    block_length,
    deflate,
    deflate_by_sharpes,
    effective_trials,
    expected_max_sharpe,
    interquartile_mean,
    judge,
    moments,
    probabilistic_sharpe,
    seed_interval,
)
from echelon.rng import stream
from echelon.types import Floats


def returns_of(*name: str | int, periods: int = 500, columns: int = 1, mean: float = 0.0) -> Floats:
    drawn: Floats = 0.01 * stream(4, *name).standard_normal((periods, columns)) + mean
    return drawn


# Seeds


def test_t_interval_of_five_seeds_is_the_textbook_one() -> None:
    # Mean 3, deviation √2.5, t(0.975, 4) = 2.776445: 3 ± 2.776445·√(2.5/5).
    found = seed_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.method == "t"
    assert found.n == 5
    assert found.estimate == 3.0
    assert found.low == pytest.approx(3.0 - 2.776445 * math.sqrt(0.5), abs=1e-6)
    assert found.high == pytest.approx(3.0 + 2.776445 * math.sqrt(0.5), abs=1e-6)


def test_one_seed_has_no_interval() -> None:
    found = seed_interval([0.7])
    assert (found.estimate, found.n, found.method) == (0.7, 1, "none")
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_ten_seeds_use_the_bootstrap_and_nine_the_t_interval() -> None:
    values = returns_of("ten", periods=10)[:, 0]
    assert seed_interval(values[:9].tolist()).method == "t"
    ten = seed_interval(values.tolist())
    assert ten.method == "bootstrap"
    assert ten.low < ten.estimate < ten.high
    assert ten == seed_interval(values.tolist())


def test_bootstrap_of_skewed_seeds_reaches_further_into_the_long_tail() -> None:
    values = [0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.6, 3.0]
    found = seed_interval(values)
    assert found.high - found.estimate > 2.0 * (found.estimate - found.low)


def test_equal_seeds_have_an_interval_of_no_width() -> None:
    assert seed_interval([0.1] * 12)[:3] == pytest.approx((0.1, 0.1, 0.1))
    assert seed_interval([0.1] * 3)[:3] == pytest.approx((0.1, 0.1, 0.1))


def test_mostly_equal_seeds_have_finite_bounds() -> None:
    found = seed_interval([0.0] * 11 + [1.0])
    assert math.isfinite(found.low)
    assert found.high > found.estimate


def test_percentile_bootstrap_of_five_seeds_claims_thrice_too_often_and_ours_does_not() -> None:
    draws = 4000
    rng = stream(4, "five seeds")
    samples = rng.standard_normal((draws, 5))
    picked = rng.integers(5, size=(draws, 400, 5))
    means = np.take_along_axis(samples[:, np.newaxis, :], picked, axis=2).mean(axis=2)
    percentile = float((np.quantile(means, 0.025, axis=1) > 0).mean())
    ours = float(np.mean([seed_interval(row.tolist()).low > 0 for row in samples]))
    assert 0.06 < percentile < 0.095
    assert 0.018 < ours < 0.032


def test_bootstrap_of_ten_seeds_covers_about_as_often_as_it_says() -> None:
    samples = stream(4, "ten seeds").standard_normal((1000, 10))
    found = [seed_interval(row.tolist()) for row in samples]
    covered = float(np.mean([f.low < 0 < f.high for f in found]))
    assert 0.93 <= covered <= 0.97


def test_bootstrap_of_seeds_is_the_studentised_one_of_arch() -> None:
    values = np.exp(stream(4, "arch").standard_normal(15))
    found = seed_interval(values.tolist())

    # arch multiplies by the bootstrap's own error, whose divisor is n: so is this one's.
    def error(_: Floats, sample: Floats) -> Floats:
        return np.atleast_1d(sample.std() / math.sqrt(len(sample)))

    twin = IIDBootstrap(values, seed=1).conf_int(
        lambda sample: np.atleast_1d(sample.mean()), 4000, "studentized", std_err_func=error
    )
    width = found.high - found.low
    assert found.low == pytest.approx(twin[0, 0], abs=0.03 * width)
    assert found.high == pytest.approx(twin[1, 0], abs=0.1 * width)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], 5.0),
        ([1.0, 3.0], 2.0),
        # Three values: the outer ones keep 1/3 - 1/4 = 1/12 each, the middle one 1/3.
        ([0.0, 3.0, 12.0], (0.0 / 12 + 3.0 / 3 + 12.0 / 12) / 0.5),
        ([1.0, 2.0, 4.0, 100.0], 3.0),
        # Five: weights ¾, 1, ¾ on the inner three.
        ([0.0, 1.0, 2.0, 4.0, 100.0], (0.75 * 1 + 2 + 0.75 * 4) / 2.5),
        ([8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 4.5),
    ],
)
def test_interquartile_mean_weighs_the_quartiles_by_fractions(
    values: list[float], expected: float
) -> None:
    assert interquartile_mean(values) == pytest.approx(expected)
    if len(values) % 4 == 0:
        assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))


# Probabilistic Sharpe ratio


def test_moments_are_those_of_pandas() -> None:
    r = returns_of("moments", mean=0.001)[:, 0] ** 3
    frame = pd.Series(r)
    found = moments(r)
    assert found.n == 500
    assert found.sharpe == pytest.approx(frame.mean() / frame.std())
    assert found.skew == pytest.approx(frame.skew())
    assert found.kurtosis == pytest.approx(frame.kurt() + 3.0)


def test_constant_series_has_no_sharpe_ratio() -> None:
    found = moments(np.full(50, 0.1))
    assert math.isnan(found.sharpe)
    assert math.isnan(probabilistic_sharpe(found))


def test_probabilistic_sharpe_of_the_published_hedge_fund() -> None:
    # Two years of months, Sharpe ratio 0.458: 0.982 if normal; 0.913 with its skew and kurtosis.
    assert probabilistic_sharpe(ReturnMoments(0.458, 24, 0.0, 3.0)) == pytest.approx(
        0.982, abs=5e-4
    )
    fund = ReturnMoments(0.458, 24, -2.448, 10.164)
    assert probabilistic_sharpe(fund) == pytest.approx(0.913, abs=5e-4)


@pytest.mark.parametrize(
    ("per_year", "skew", "kurtosis", "years"),
    [(252, 0, 3, 2.73), (52, 0, 3, 2.83), (12, 0, 3, 3.24), (12, -0.72, 5.78, 4.99)],
)
def test_published_minimum_track_record_has_a_probability_of_95_percent(
    per_year: int, skew: float, kurtosis: float, years: float
) -> None:
    # An annual Sharpe ratio of 2 is above 1 with 95 % after so many years, and not before.
    def probability(n: int) -> float:
        m = ReturnMoments(2.0 / math.sqrt(per_year), n, skew, kurtosis)
        return probabilistic_sharpe(m, 1.0 / math.sqrt(per_year))

    n = round(years * per_year)
    slack = math.ceil(0.005 * per_year) + 1
    assert probability(n - slack) < 0.95 < probability(n + slack)
    assert probability(n) == pytest.approx(0.95, abs=2e-3)


def test_probabilistic_sharpe_at_its_own_hurdle_is_one_half() -> None:
    assert probabilistic_sharpe(ReturnMoments(0.1, 300, -1.0, 8.0), 0.1) == 0.5


def test_moments_whose_variance_is_not_positive_give_nan() -> None:
    assert math.isnan(probabilistic_sharpe(ReturnMoments(1.0, 100, 5.0, 3.0)))


# Deflated Sharpe ratio


def test_expected_maximum_of_ten_trials_is_the_published_one() -> None:
    assert expected_max_sharpe(10, 1.0) == pytest.approx(1.57, abs=5e-3)
    assert expected_max_sharpe(10, 0.25) == pytest.approx(0.5 * expected_max_sharpe(10, 1.0))


def test_expected_maximum_starts_at_zero_and_grows_with_the_trials() -> None:
    trials = [1, 1.2, 1.5, 2, 3, 10, 100, 1000]
    hurdles = [expected_max_sharpe(n, 1.0) for n in trials]
    assert hurdles[:2] == [0.0, 0.0]
    assert hurdles == sorted(hurdles)
    assert expected_max_sharpe(10, 0.0) == 0.0


@pytest.mark.parametrize(
    ("n_trials", "skew", "kurtosis", "published"),
    [(100, -3.0, 10.0, 0.9004), (46, -3.0, 10.0, 0.9505), (88, 0.0, 3.0, 0.9505)],
)
def test_deflated_sharpe_of_the_published_example(
    n_trials: int, skew: float, kurtosis: float, published: float
) -> None:
    # Annual Sharpe ratio 2.5 over 1250 days of 250 a year, variance of the trials' ½ a year.
    chosen = ReturnMoments(2.5 / math.sqrt(250), 1250, skew, kurtosis)
    hurdle = expected_max_sharpe(n_trials, 0.5 / 250)
    assert probabilistic_sharpe(chosen, hurdle) == pytest.approx(published, abs=5e-5)
    if n_trials == 100:
        assert hurdle == pytest.approx(0.1132, abs=5e-5)


def scattered_trials() -> Floats:
    """[500, 12] whose Sharpe ratios scatter by more than chance: the floor does not bind."""
    return returns_of("trials", columns=12) + np.linspace(-0.002, 0.003, 12)


def test_deflation_agrees_with_ffn_where_the_floor_does_not_bind() -> None:
    trials = scattered_trials()
    sharpes = trials.mean(axis=0) / trials.std(axis=0, ddof=1)
    best = trials[:, int(sharpes.argmax())]
    found = deflate(best, trials)
    assert found.variance == pytest.approx(float(sharpes.var(ddof=1)))
    assert found.variance > 1 / 500
    theirs = ffn.calc_deflated_sharpe_ratio(
        pd.Series(best), sharpes, nperiods=1, annualized_trials=False
    )
    assert 0.01 < found.probability < 0.99
    assert found.probability == pytest.approx(theirs, abs=1e-12)
    assert found.n_trials == 12


def test_deflation_by_sharpes_is_that_by_returns() -> None:
    trials = scattered_trials()
    sharpes = (trials.mean(axis=0) / trials.std(axis=0, ddof=1)).tolist()
    by_returns = deflate(trials[:, -1], trials)
    by_sharpes = deflate_by_sharpes(trials[:, -1], sharpes, effective_trials(trials))
    assert by_sharpes == pytest.approx(by_returns)
    unknown = deflate_by_sharpes(trials[:, -1], sharpes)
    assert unknown.n_effective == 12
    assert unknown.probability_effective == unknown.probability


def test_trials_that_are_alike_do_not_lower_the_hurdle_to_nothing() -> None:
    chosen = returns_of("alike", mean=0.001)[:, 0]
    found = deflate_by_sharpes(chosen, [0.1, 0.1, 0.1, 0.1])
    assert found.variance == 1 / 500
    assert found.hurdle == pytest.approx(expected_max_sharpe(4, 1 / 500))
    assert found.hurdle > 0.04
    assert found.probability < found.psr


def test_one_trial_is_not_deflated() -> None:
    chosen = returns_of("one", mean=0.001)
    found = deflate(chosen[:, 0], chosen)
    assert found.hurdle == 0.0
    assert found.probability == found.psr == found.probability_effective
    assert (found.n_trials, found.n_effective) == (1, 1.0)


def test_best_of_many_trials_without_skill_is_deflated_to_no_evidence() -> None:
    trials = returns_of("no skill", columns=100)
    sharpes = trials.mean(axis=0) / trials.std(axis=0)
    found = deflate(trials[:, int(sharpes.argmax())], trials)
    assert found.psr > 0.95
    assert found.probability < 0.8


def test_book_that_never_moved_has_no_probability() -> None:
    trials = np.column_stack([np.zeros(500), returns_of("cash", columns=2)])
    found = deflate(trials[:, 0], trials)
    assert math.isnan(found.psr)
    assert math.isnan(found.probability)
    assert math.isnan(found.probability_effective)
    assert found.n_trials == 3
    assert math.isfinite(found.hurdle)


def test_effective_trials_of_copies_is_one_and_of_independent_ones_their_number() -> None:
    one = returns_of("copies")
    assert effective_trials(np.tile(one, 8)) == pytest.approx(1.0)
    many = effective_trials(returns_of("independent", periods=20_000, columns=8))
    assert many == pytest.approx(8.0, abs=0.1)


def test_effective_trials_of_half_correlated_ones_lies_half_way() -> None:
    # ρ = ½ gives ½ + ½·9 = 5 for nine trials.
    common = returns_of("common", periods=50_000)
    own = returns_of("own", periods=50_000, columns=9)
    assert effective_trials(common + own) == pytest.approx(5.0, abs=0.1)


def test_effective_trials_by_hand_with_one_that_never_moved() -> None:
    # Correlation of the two that move is 0.8 (x·y = 8, |x|² = |y|² = 10): 0.8 + 0.2·3 = 1.4.
    x = [-2.0, -1.0, 0.0, 1.0, 2.0]
    y = [-1.0, -2.0, 0.0, 2.0, 1.0]
    assert effective_trials(np.column_stack([x, np.zeros(5), y])) == pytest.approx(1.4)


def test_opposed_trials_count_in_full() -> None:
    one = returns_of("opposed")
    assert effective_trials(np.column_stack([one, -one])) == 2.0


# Claims


def test_clear_edge_is_claimed_with_both_block_lengths() -> None:
    baseline = returns_of("base", mean=0.0003)
    agents = baseline + 0.2 * returns_of("agents", columns=3) + 0.002
    found = judge(agents, baseline[:, 0], 0.99, seed=1, replications=500)
    assert found.made
    for both in (found.sharpe, found.information):
        assert both.double.block_length == pytest.approx(2 * both.single.block_length)
        assert both.single.level == both.double.level == 0.95
        assert both.low == min(both.single.low, both.double.low) > 0.0
        assert both.high == max(both.single.high, both.double.high)
    assert found == judge(agents, baseline[:, 0], 0.99, seed=1, replications=500)


def test_more_in_cash_is_no_claim_and_neither_is_a_bolder_book() -> None:
    baseline = returns_of("base", mean=0.001)[:, 0]
    careful = 0.3 * baseline + 0.0002  # three tenths of it, and a sure gain every day
    found = judge(careful[:, None], baseline, 0.99, seed=1, replications=500)
    assert found.sharpe.low > 0.0 > found.information.low
    assert not found.made
    rising = baseline + 0.002
    found = judge(2.0 * rising[:, None], rising, 0.99, seed=1, replications=500)
    assert found.information.low > 0.0
    assert found.sharpe == at_both_blocks(rising[:, None], rising, seed=1, replications=500)
    assert not found.made


def test_information_ratio_is_the_sharpe_ratio_of_the_active_return() -> None:
    agents, baseline = returns_of("active", columns=3), returns_of("base")[:, 0]
    found = active_ratio(agents, baseline, seed=1, replications=500)
    active = agents - baseline[:, None]
    ratios = active.mean(axis=0) / active.std(axis=0, ddof=1)
    assert found.single.estimate == pytest.approx(ratios.mean())
    by_mean = active.mean(axis=1)
    assert found.single.block_length == pytest.approx(block_length(by_mean))
    nothing = active_ratio(np.column_stack([baseline] * 2), baseline, seed=1)
    assert nothing.single[:3] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("lows", "deflated", "made"),
    [
        ((0.01, 0.01, 0.01, 0.01), 0.951, True),
        ((0.01, 0.01, 0.01, 0.01), 0.95, False),
        ((0.01, 0.01, 0.01, 0.01), math.nan, False),
        ((0.0, 0.01, 0.01, 0.01), 0.99, False),
        ((0.01, -0.01, 0.01, 0.01), 0.99, False),
        ((0.01, 0.01, -0.01, 0.01), 0.99, False),
        ((0.01, 0.01, 0.01, 0.0), 0.99, False),
        ((math.nan, 0.01, 0.01, 0.01), 0.99, False),
        ((0.01, 0.01, 0.01, math.nan), 0.99, False),
    ],
)
def test_claim_needs_all_four_bounds_and_the_deflated_ratio(
    lows: tuple[float, ...], deflated: float, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharpe ratio at both block lengths, then the information ratio."""
    given = iter(lows)

    def prepared(*_: object, **options: float) -> SharpeDifference:
        return SharpeDifference(
            0.05, next(given), 0.1, 0.01, 0.01, options.get("block", 3.0), 500, 0.95
        )

    monkeypatch.setattr(statistics, "sharpe_difference", prepared)
    found = judge(returns_of("any", columns=2), returns_of("other")[:, 0], deflated, seed=1)
    assert found.made is made


# Input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: seed_interval([]), "values needs at least 1"),
        (lambda: seed_interval([1.0, math.nan]), "values must be finite; 1 of its 2"),
        (lambda: interquartile_mean([]), "values needs at least 1"),
        (lambda: moments(np.zeros(3)), "returns needs at least 4 values; it has 3"),
        (lambda: deflate_by_sharpes(np.arange(9.0), []), "sharpes .* needs at least 1"),
        (lambda: deflate_by_sharpes(np.arange(9.0), [math.nan]), "sharpes .* must be finite"),
    ],
)
def test_unusable_input_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
