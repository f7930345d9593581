"""Probability of backtest overfitting and superior predictive ability."""

from __future__ import annotations

import ffn
import numpy as np
import pandas as pd
import pytest

from echelon.evaluation.overfitting import (
    backtest_overfitting,
    overfitting_probability,
    split_halves,
    superior_ability,
)
from echelon.rng import stream
from echelon.types import Floats


def configurations(*name: str | int, count: int = 24, periods: int = 400) -> Floats:
    """[T, count] correlated series of which none is better than another."""
    rng = stream(4, *name)
    common = rng.standard_normal((periods, 1))
    drawn: Floats = 0.01 * (common + rng.standard_normal((periods, count)))
    return drawn


# Probability of backtest overfitting


def test_three_configurations_in_four_blocks_worked_by_hand() -> None:
    # Block means; each block is mean - 1, mean + 1. On blocks of means a and b the Sharpe ratio
    # is (a + b)/2 · √3 / √(4 + (a - b)²):
    #              {1,2}  {3,4} | {1,3}  {2,4} | {1,4}  {2,3}
    #   A 2 2 0 0  1.732  0     | 0.612  0.612 | 0.612  0.612
    #   B 1 1 1 1  0.866  0.866 | 0.866  0.866 | 0.866  0.866
    #   C 0 0 2 1  0      1.162 | 0.612  0.387 | 0.387  0.612
    # A wins {1,2} and is last on {3,4}; C wins {3,4} and is last (tied by none) on {1,2}; B wins
    # and is best in the other four: 2 of 6.
    means = np.array([[2.0, 1, 0], [2, 1, 0], [0, 1, 2], [0, 1, 1]])
    returns = (means[:, np.newaxis, :] + np.array([[-1.0], [1.0]])).reshape(8, 3)
    assert overfitting_probability(returns, split_halves(4)) == pytest.approx(2 / 6)
    assert ffn.calc_prob_backtest_overfitting(pd.DataFrame(returns), 4) == pytest.approx(2 / 6)


@pytest.mark.parametrize(("count", "periods", "n_blocks"), [(2, 60, 6), (7, 83, 4), (25, 203, 8)])
def test_probability_is_that_of_ffn(count: int, periods: int, n_blocks: int) -> None:
    for draw in range(3):
        returns = configurations("ffn", draw, count=count, periods=periods)
        theirs = ffn.calc_prob_backtest_overfitting(pd.DataFrame(returns), n_blocks)
        assert overfitting_probability(returns, split_halves(n_blocks)) == theirs


def test_copies_of_a_configuration_tie_as_in_ffn() -> None:
    returns = configurations("copies", count=6, periods=96)
    returns = np.concatenate([returns, returns[:, :3], returns[:, 1:2]], axis=1)
    theirs = ffn.calc_prob_backtest_overfitting(pd.DataFrame(returns), 6)
    assert overfitting_probability(returns, split_halves(6)) == theirs


def test_lasting_edge_lies_below_the_null_band() -> None:
    returns = configurations("edge")
    returns[:, 7] += 0.004
    found = backtest_overfitting(returns, seed=1, n_blocks=8, null_draws=60)
    assert found is not None
    assert found.probability < found.null_low
    assert found.null_low < 0.5 < found.null_high
    assert (found.n_configurations, found.n_blocks) == (24, 8)


def test_search_that_found_nothing_lies_within_the_null_band_nine_times_in_ten() -> None:
    within = []
    for draw in range(40):
        returns = configurations("nothing", draw, count=20, periods=240)
        found = backtest_overfitting(returns, seed=draw, n_blocks=6, null_draws=60)
        assert found is not None
        within.append(found.null_low <= found.probability <= found.null_high)
    assert np.mean(within) >= 0.85


def test_null_band_depends_on_neither_the_means_nor_the_scales() -> None:
    returns = configurations("scale")
    moved = (returns + np.linspace(0.0, 0.01, 24)) * np.linspace(1.0, 5.0, 24)
    one, other = (
        backtest_overfitting(r, seed=1, n_blocks=6, null_draws=20) for r in (returns, moved)
    )
    assert one is not None
    assert other is not None
    assert (one.null_low, one.null_high) == (other.null_low, other.null_high)
    assert one.probability != other.probability


def test_same_seed_gives_the_same_band() -> None:
    returns = configurations("deterministic")
    first, again, other = (
        backtest_overfitting(returns, seed=s, n_blocks=6, null_draws=20) for s in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_below_twenty_configurations_nothing_is_said() -> None:
    returns = configurations("few", count=20)
    assert backtest_overfitting(returns[:, :19], seed=1) is None
    assert backtest_overfitting(returns, seed=1, n_blocks=4, null_draws=5) is not None


def test_configuration_in_cash_has_sharpe_ratio_zero() -> None:
    returns = configurations("cash")
    returns[:, 3] = 0.0
    returns[:200, 4] = 0.0
    found = backtest_overfitting(returns, seed=1, n_blocks=4, null_draws=10)
    assert found is not None
    assert 0.0 <= found.probability <= 1.0
    # Cash beats configurations that all lose, in every half.
    losing, halves = returns - 0.1 * (np.arange(24) != 3), split_halves(4)
    assert overfitting_probability(losing, halves) == 0.0


# Superior predictive ability


def test_one_true_edge_among_many_is_found() -> None:
    trials = configurations("spa", count=15)
    baseline = configurations("spa base", count=1)[:, 0]
    nothing = superior_ability(trials, baseline, seed=1)
    trials[:, 4] += 0.004
    found = superior_ability(trials, baseline, seed=1)
    assert found.p_value < 0.01 < 0.1 < nothing.p_value
    assert found.n_models == 15
    assert found.block_length >= 1.0
    assert found == superior_ability(trials, baseline, seed=1)


def test_trials_that_all_lose_are_not_superior() -> None:
    trials = configurations("losing", count=5)
    assert superior_ability(trials[:, 1:] - 0.005, trials[:, 0], seed=1).p_value > 0.3


def test_trials_equal_to_the_baseline_are_not_superior() -> None:
    trials = configurations("same", count=3)
    same = superior_ability(trials[:, [0, 0]], trials[:, 0], seed=1)
    assert (same.p_value, same.n_models) == (1.0, 2)
    with_others = superior_ability(trials, trials[:, 0], seed=1)
    without = superior_ability(trials[:, 1:], trials[:, 0], seed=1)
    assert with_others.p_value == without.p_value
    assert with_others.n_models == 3


def test_values_that_are_not_finite_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="returns must be finite"):
        backtest_overfitting(np.full((90, 20), np.inf), seed=1)
