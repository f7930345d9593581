"""Sharpe ratio over a baseline's, by the block bootstrap, held to slow twins and to the truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from arch.bootstrap import optimal_block_length

from echelon.evaluation import statistics
from echelon.evaluation.statistics import (
    at_both_blocks,
    block_length,
    moments,
    sharpe_difference,
)
from echelon.rng import stream
from echelon.types import Floats

PERIODS = 400


def correlated_returns(*name: str | int, columns: int, periods: int = PERIODS) -> Floats:
    """[T, columns] with a common part, fat tails and a mean of its own each."""
    rng = stream(4, *name)
    noise = rng.standard_t(5, (periods, columns)) + 2 * rng.standard_t(5, (periods, 1))
    drawn: Floats = 0.005 * noise + 0.0003 * np.arange(columns)
    return drawn


def restless_returns(draws: int, periods: int, columns: int, means: Floats, name: str) -> Floats:
    """[draws, T, columns] of 1 % deviation: AR(1) over GARCH(1, 1) with t(6) shocks, correlated.

    Volatility is common to the columns, half of the variance too; the unconditional variance is
    exactly that of 1 %, so the true per-period Sharpe ratios are means / 0.01.
    """
    rng = stream(4, name)
    burn = 200
    shape = (draws, periods + burn, columns)
    shock = math.sqrt(0.5) * rng.standard_normal(shape)
    shock += math.sqrt(0.5) * rng.standard_normal((draws, periods + burn, 1))
    shock *= np.sqrt(4.0 / rng.chisquare(6, (draws, periods + burn, 1)))
    volatility = np.ones((draws, 1))
    state = np.zeros((draws, columns))
    path = np.empty(shape)
    for t in range(periods + burn):
        residual = np.sqrt(volatility) * shock[:, t]
        state = 0.1 * state + math.sqrt(1 - 0.01) * residual
        path[:, t] = state
        market = np.square(residual).mean(axis=1, keepdims=True)
        volatility = 0.03 + 0.07 * market + 0.90 * volatility
    drawn: Floats = 0.01 * path[:, burn:] + means
    return drawn


# The estimate and its error


def test_estimate_is_the_mean_over_seeds_of_sharpe_less_the_baselines() -> None:
    r = correlated_returns("estimate", columns=4)
    found = sharpe_difference(r[:, :3], r[:, 3], seed=1, replications=200)
    sharpes = [moments(column).sharpe for column in r.T]
    assert found.estimate == pytest.approx(sum(sharpes[:3]) / 3 - sharpes[3], abs=1e-12)
    assert found.low < found.estimate < found.high
    assert (found.replications, found.level) == (200, 0.95)


def test_error_against_cash_without_blocks_is_that_of_the_probabilistic_sharpe_ratio() -> None:
    # (1 - skew·SR + (kurtosis - 1)/4·SR²)/T, with moments of divisor T.
    r = correlated_returns("error", columns=1) + 0.004
    found = sharpe_difference(r, np.zeros(PERIODS), seed=1, replications=100, block=1.0)
    z = (r[:, 0] - r.mean()) / r.std()
    sharpe = r.mean() / r.std()
    variance = 1 - np.mean(z**3) * sharpe + (np.mean(z**4) - 1) / 4 * sharpe**2
    assert sharpe > 0.2
    assert found.standard_error == pytest.approx(math.sqrt(variance / PERIODS), rel=3 / PERIODS)


def slow_replication(returns: Floats, dates: Floats, mean_block: float) -> tuple[float, float]:
    """Estimate and error on those dates, one series, one lag at a time; baseline last."""
    sample = returns[dates]
    n, columns = sample.shape
    estimate, influence = 0.0, np.zeros(n)
    for c in range(columns):
        sign = -1.0 if c == columns - 1 else 1.0 / (columns - 1)
        r = sample[:, c]
        deviation = r.std(ddof=1)
        sharpe = r.mean() / deviation
        z = (r - r.mean()) / deviation
        estimate += sign * sharpe
        influence += sign * (z - sharpe / 2 * (z**2 - 1))
    influence -= influence.mean()
    variance = 0.0
    for lag in range(-n + 1, n):
        covariance = np.mean(influence * np.roll(influence, lag))
        variance += (1 - abs(lag) / n) * (1 - 1 / mean_block) ** abs(lag) * covariance
    return estimate, math.sqrt(variance / n)


@pytest.mark.parametrize("periods", [80, 81])
@pytest.mark.parametrize("mean_block", [1.0, 4.5])
def test_replications_all_at_once_are_those_of_the_slow_twin(
    mean_block: float, periods: int
) -> None:
    r = correlated_returns("twin", columns=4, periods=periods)
    dates = statistics.resampled_dates(periods, mean_block, 5, stream(4, "dates"))
    weights = statistics._spectral_weights(periods, mean_block)
    estimates, errors = statistics._replicate(statistics._Powers.from_returns(r), dates, weights)
    for row, estimate, error in zip(dates, estimates, errors, strict=True):
        slow = slow_replication(r, row, mean_block)
        assert (estimate, error) == pytest.approx(slow, rel=1e-9)


def test_agents_are_compared_with_other_agents_as_with_one_series() -> None:
    r = correlated_returns("others", columns=4)
    alone = sharpe_difference(r[:, :2], r[:, 2], seed=1, replications=200)
    twice = sharpe_difference(r[:, :2], r[:, [2, 2]], seed=1, replications=200)
    assert twice == pytest.approx(alone)
    there = sharpe_difference(r[:, :2], r[:, 2:], seed=1, replications=200, block=3.0)
    back = sharpe_difference(r[:, 2:], r[:, :2], seed=1, replications=200, block=3.0)
    sharpes = r.mean(axis=0) / r.std(axis=0, ddof=1)
    assert there.estimate == pytest.approx(sharpes[:2].mean() - sharpes[2:].mean())
    assert (back.estimate, back.standard_error) == pytest.approx(
        (-there.estimate, there.standard_error)
    )
    both = at_both_blocks(r[:, :2], r[:, 2:], seed=1, replications=200)
    assert both.single.low < there.estimate < both.double.high


def test_long_run_variance_is_that_of_the_resampled_mean() -> None:
    x = np.convolve(stream(4, "mean").standard_normal(304), np.ones(4), "valid")
    x -= x.mean()
    weights = statistics._spectral_weights(len(x), 6.0)
    ours = float(np.abs(np.fft.rfft(x)) ** 2 @ weights) / len(x) ** 2
    dates = statistics.resampled_dates(len(x), 6.0, 10_000, stream(4, "resample"))
    assert ours == pytest.approx(float(x[dates].mean(axis=1).var()), rel=0.05)


def test_resampled_blocks_have_the_mean_length_asked_for() -> None:
    dates = statistics.resampled_dates(500, 7.5, 40, stream(4, "blocks"))
    breaks = dates[:, 1:] != (dates[:, :-1] + 1) % 500
    assert 1.0 / float(breaks.mean()) == pytest.approx(7.5, rel=0.05)


# What must not matter


def test_same_seed_gives_the_same_interval_and_another_nearly_so() -> None:
    r = correlated_returns("seed", columns=3)
    first, again, other = (
        sharpe_difference(r[:, :2], r[:, 2], seed=s, replications=1000) for s in (1, 1, 2)
    )
    assert first == again
    assert first.low != other.low
    assert first.low == pytest.approx(other.low, abs=0.3 * first.standard_error)


def test_interval_does_not_depend_on_how_replications_are_chunked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r = correlated_returns("chunk", columns=3)
    whole = sharpe_difference(r[:, :2], r[:, 2], seed=1, replications=300)
    monkeypatch.setattr(statistics, "_CHUNK", 70)
    assert sharpe_difference(r[:, :2], r[:, 2], seed=1, replications=300) == pytest.approx(whole)


def test_leverage_changes_nothing_and_exchange_turns_the_sign() -> None:
    r = correlated_returns("leverage", columns=2)
    plain = sharpe_difference(r[:, :1], r[:, 1], seed=1, replications=200, block=3.0)
    levered = sharpe_difference(7.0 * r[:, :1], r[:, 1], seed=1, replications=200, block=3.0)
    assert levered == pytest.approx(plain)
    turned = sharpe_difference(r[:, 1:], r[:, 0], seed=1, replications=200, block=3.0)
    assert turned.estimate == pytest.approx(-plain.estimate)
    assert (turned.low, turned.high) == pytest.approx((-plain.high, -plain.low))
    assert turned.p_value == pytest.approx(plain.p_value)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_agents_equal_to_the_baseline_have_no_difference(factor: float) -> None:
    r = correlated_returns("equal", columns=1)
    found = sharpe_difference(np.tile(r, 5), factor * r[:, 0], seed=1, replications=100)
    assert found[:5] == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_cash_has_sharpe_ratio_zero_and_no_influence() -> None:
    r = correlated_returns("cash", columns=1) + 0.004
    against_cash = sharpe_difference(r, np.full(PERIODS, 0.0001), seed=1, replications=200)
    assert against_cash.estimate == pytest.approx(moments(r[:, 0]).sharpe)
    assert against_cash.low > 0
    assert against_cash.p_value < 0.05
    cash = sharpe_difference(np.zeros((PERIODS, 2)), r[:, 0], seed=1, replications=200)
    assert cash.high < 0
    nothing = sharpe_difference(np.zeros((PERIODS, 2)), np.zeros(PERIODS), seed=1)
    assert nothing[:5] == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_agent_that_moved_on_two_days_only_is_never_claimed() -> None:
    agent = np.zeros((PERIODS, 1))
    agent[[100, 300]] = 0.01
    found = sharpe_difference(agent, np.zeros(PERIODS), seed=1, replications=500)
    assert found.estimate > 0
    assert found.low < 0 < found.high
    assert found.p_value > 0.05
    assert math.isfinite(found.low)


def test_two_valued_series_without_influence_gets_no_bounds() -> None:
    # Two values z have the same influence z - SR/2·(z² - 1) if SR = 2 / (their sum): then no date
    # moves the estimate. The deviation of divisor T - 1 makes z a little smaller than -½ and 2.
    shrunk = math.sqrt(499 / 500)
    values = np.repeat([-0.5, 2.0], [400, 100]) + 2.0 / 1.5 / shrunk**2
    found = sharpe_difference(values[:, np.newaxis], np.zeros(500), seed=1, block=1.0)
    assert found.estimate == pytest.approx(2.0 / 1.5 / shrunk)
    assert found.standard_error == 0.0
    assert np.isnan([found.low, found.high, found.p_value]).all()


# Block length


def test_block_length_is_that_of_arch_for_the_difference() -> None:
    noise = stream(4, "ar").standard_normal(600)
    slow = np.empty(600)
    slow[0] = noise[0]
    for t in range(1, 600):
        slow[t] = 0.6 * slow[t - 1] + noise[t]
    expected = float(optimal_block_length(slow)["stationary"].iloc[0])
    assert expected > 4
    assert block_length(slow) == pytest.approx(expected)
    assert block_length(1e-9 * slow) == pytest.approx(expected)
    baseline = correlated_returns("block", columns=1, periods=600)
    agents = baseline + 0.01 * slow[:, np.newaxis] * np.array([0.5, 1.5])
    found = sharpe_difference(agents, baseline[:, 0], seed=1, replications=100)
    assert found.block_length == pytest.approx(expected)


def test_block_length_stays_between_one_and_three_roots() -> None:
    assert block_length(np.arange(400.0)) <= 60.0
    assert block_length(np.zeros(400)) == 1.0
    assert block_length(stream(4, "white").standard_normal(400)) >= 1.0


# Coverage, by simulation


def test_interval_covers_fat_tailed_dependent_returns_about_as_often_as_it_says() -> None:
    means = np.array([0.0012, 0.0012, 0.0006])
    truth = 0.06
    draws = restless_returns(250, 600, 3, means, "coverage")
    found = [
        sharpe_difference(r[:, :2], r[:, 2], seed=i, replications=299) for i, r in enumerate(draws)
    ]
    covered = float(np.mean([f.low < truth < f.high for f in found]))
    above = float(np.mean([f.low > truth for f in found]))
    assert 0.91 <= covered <= 0.98
    assert above <= 0.05
    spread = float(np.std([f.estimate for f in found]))
    assert float(np.mean([f.standard_error for f in found])) == pytest.approx(spread, rel=0.12)


def test_p_value_below_five_percent_goes_with_an_interval_that_leaves_out_zero() -> None:
    draws = restless_returns(40, 200, 2, np.array([0.0015, 0.0]), "p value")
    found = [
        sharpe_difference(r[:, :1], r[:, 1], seed=i, replications=399) for i, r in enumerate(draws)
    ]
    outside = [f.low > 0 or f.high < 0 for f in found]
    assert outside == [f.p_value <= 0.05 for f in found]
    assert 5 < sum(outside) < 35


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_length(np.zeros(19)), "difference needs at least 20 values; it has 19"),
        (
            lambda: sharpe_difference(np.full((30, 2), np.nan), np.zeros(30), seed=1),
            "agents must be finite; 60 of its 60 values are not",
        ),
    ],
)
def test_unusable_input_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
