"""Did the search find anything? Probability of backtest overfitting; superior predictive ability.

**Overfitting** by combinatorially symmetric cross-validation (Bailey, Borwein, López de Prado &
Zhu 2017, "The Probability of Backtest Overfitting", Journal of Computational Finance 20(4)):

1. The dates are cut into an even number of blocks; every half of the blocks is in-sample once.
2. The configuration with the best in-sample Sharpe ratio is ranked among all out-of-sample.
3. The probability is the share of halves in which it comes out at the median or below.

Where no configuration is better than another this is ½ on average only: one sample can give 0.2 as
well as 0.8. The null band says what to expect: the same statistic on redrawn dates of the same
configurations with their means taken out. Below 20 configurations ranks are too coarse.

`ffn.calc_prob_backtest_overfitting` computes the same number, too slowly for the null band's 200.
Here each block is summed once and halves are sums of blocks; the tests hold ours to ffn's.

**Superior ability** (Hansen 2005), through arch: is the best of many trials better than the
baseline in mean return, given that it is the best of many?
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from echelon.evaluation.statistics import block_length, finite, resampled_dates, standardise
from echelon.ops.blocks import MIN_BLOCK_PERIODS
from echelon.rng import stream
from echelon.types import Bools, Floats

MIN_CONFIGURATIONS = 20
_SPA_REPLICATIONS = 1000
_STILL = 1e-10  # of a series' own variance: a half in which it does not move
_DIGITS = 12  # of a Sharpe ratio: copies of one configuration must tie in spite of rounding


class Overfitting(NamedTuple):
    """Probability of backtest overfitting, and the 2.5–97.5 % band of it where nothing is better.

    Below the band the search found something that lasts; within it there is no telling.
    """

    probability: float
    null_low: float
    null_high: float
    n_configurations: int
    n_blocks: int


class Superiority(NamedTuple):
    """Hansen's consistent p-value of "none of the trials beats the baseline's mean return"."""

    p_value: float
    n_models: int
    block_length: float


def backtest_overfitting(
    returns: Floats, *, seed: int, n_blocks: int = 16, null_draws: int = 200
) -> Overfitting | None:
    """Return the probability of overfitting of returns[T, K], all K configurations of a search.

    None below 20 configurations. Dates of the null band are resampled in blocks jointly, so that
    the correlation of configurations stays.
    """
    r = finite(returns, "returns", MIN_BLOCK_PERIODS)
    halves = split_halves(n_blocks)
    n_configurations = r.shape[1]
    if n_configurations < MIN_CONFIGURATIONS:
        return None
    nothing, _ = standardise(r, ddof=0)
    mean_block = float(np.mean([block_length(column) for column in r.T]))
    dates = resampled_dates(len(r), mean_block, null_draws, stream(seed, "overfitting"))
    null = [overfitting_probability(nothing[rows], halves) for rows in dates]
    low, high = np.quantile(null, [0.025, 0.975]).tolist()
    probability = overfitting_probability(r, halves)
    return Overfitting(probability, low, high, n_configurations, n_blocks)


def superior_ability(trials: Floats, baseline: Floats, *, seed: int) -> Superiority:
    """Test whether the best of trials[T, K] beats baseline[T] in mean return, by arch's SPA.

    Trials equal to the baseline are left out of the test; if all are, the p-value is 1.
    """
    from arch.bootstrap import SPA  # seconds to import, and few evaluations have trials

    tried = finite(trials, "trials", MIN_BLOCK_PERIODS)
    against = finite(baseline, "baseline", MIN_BLOCK_PERIODS)
    assert len(tried) == len(against)
    difference = tried - against[:, np.newaxis]
    scale = max(float(np.abs(tried).max()), float(np.abs(against).max()))
    other: Bools = np.abs(difference).max(axis=0) > 1e-12 * scale
    n_models = tried.shape[1]
    if not other.any():
        return Superiority(1.0, n_models, 1.0)
    mean_block = float(np.mean([block_length(column) for column in difference[:, other].T]))
    test = SPA(
        -against,
        -tried[:, other],
        block_size=mean_block,  # type: ignore[arg-type]  # used as 1 / block_size only
        reps=_SPA_REPLICATIONS,
        bootstrap="stationary",
        seed=stream(seed, "superior ability"),
    )
    test.compute()
    return Superiority(float(test.pvalues["consistent"]), n_models, mean_block)


def split_halves(n_blocks: int) -> Floats:
    """[H, blocks] of 0 and 1: the halves that hold block 0; their complements are the others."""
    rest = itertools.combinations(range(1, n_blocks), n_blocks // 2 - 1)
    chosen = np.array([(0, *others) for others in rest])
    halves = np.zeros((len(chosen), n_blocks))
    np.put_along_axis(halves, chosen, 1.0, axis=1)
    return halves


def overfitting_probability(returns: Floats, halves: Floats) -> float:
    """Share of halves, complements included, whose winner in returns[T, K] ranks low outside.

    Dates beyond a multiple of the blocks are left out at the end. Of equal in-sample winners the
    first counts, equal out-of-sample ranks are averaged. A configuration that does not move
    within a half has Sharpe ratio 0 there (ffn answers NaN to all of it).
    """
    n_blocks = halves.shape[1]
    per_block = len(returns) // n_blocks
    assert per_block > 1, "a block needs two dates"
    r = returns[: per_block * n_blocks]
    # Standardised, so that sums of squares lose no digits and `_STILL` has a scale.
    z, mean = standardise(r, ddof=0)
    powers = np.concatenate([z, z**2], axis=1)
    by_block = powers.reshape(n_blocks, per_block, -1).sum(axis=1)
    inside = halves @ by_block
    outside = by_block.sum(axis=0) - inside
    n_half = per_block * n_blocks // 2
    first, second = _sharpes(inside, mean, n_half), _sharpes(outside, mean, n_half)
    low = _winner_ranks_low(first, second).sum() + _winner_ranks_low(second, first).sum()
    return float(low) / (2 * len(halves))


def _sharpes(sums: Floats, mean: Floats, n: int) -> Floats:
    k = len(mean)
    m = sums[:, :k] / n
    variance = (sums[:, k:] - n * m**2) / (n - 1)
    moving = variance > _STILL
    ratio = (m + mean) / np.sqrt(np.where(moving, variance, 1.0))
    return np.asarray(np.where(moving, ratio, 0.0).round(_DIGITS))


def _winner_ranks_low(inside: Floats, outside: Floats) -> Bools:
    """[H]: whether the best inside is at the median or below outside, equals sharing a rank."""
    winner = outside[np.arange(len(inside)), inside.argmax(axis=1)][:, np.newaxis]
    twice_rank = 2 * (outside < winner).sum(axis=1) + (outside == winner).sum(axis=1) + 1
    return np.asarray(twice_rank <= outside.shape[1] + 1)
