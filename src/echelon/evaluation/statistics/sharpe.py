"""How sure a Sharpe ratio is, alone and after a search: probabilistic and deflated Sharpe ratio.

1. PSR: the probability that the true Sharpe ratio exceeds a hurdle, given the length of the
   record and the skew and kurtosis of its returns (Bailey & López de Prado 2012, "The Sharpe
   Ratio Efficient Frontier", Journal of Risk 15(2)).
2. The hurdle a search sets: the highest Sharpe ratio expected of N trials without skill, from
   their number and the variance of their Sharpe ratios.
3. DSR: the PSR of the chosen trial against that hurdle (Bailey & López de Prado 2014, "The
   Deflated Sharpe Ratio", Journal of Portfolio Management 40(5)).

Everything is per period, never annualised. The hurdle comes from ffn. `ffn`'s deflated ratio
knows neither another hurdle, nor moments given as numbers, nor an effective number of trials,
nor a floor under the variance; it agrees with `deflate` where none of these matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from echelon.evaluation.statistics._arrays import is_constant, matrix, same_length, series
from echelon.types import Floats

MIN_RETURNS = 4
"""The unbiased kurtosis divides by (n - 1)(n - 2)(n - 3)."""


class ReturnMoments(NamedTuple):
    """Per-period Sharpe ratio, length and shape of a return series; a normal's kurtosis is 3."""

    sharpe: float
    n: int
    skew: float
    kurtosis: float


class Deflation(NamedTuple):
    """A Sharpe ratio before and after the search that found it.

    `psr` is against 0. `hurdle` (per period), `probability`, the deflated Sharpe ratio, and
    `n_trials` count every trial; `probability_effective` counts `n_effective` independent ones.
    `variance` is that of the trials' per-period Sharpe ratios, as used. The probabilities are NaN
    for a chosen series without variance, which has no Sharpe ratio.
    """

    psr: float
    probability: float
    hurdle: float
    n_trials: int
    n_effective: float
    probability_effective: float
    variance: float


def moments(returns: Floats) -> ReturnMoments:
    """Return the moments of returns[T], T ≥ 4: divisor T - 1, unbiased skew and kurtosis.

    A constant series has no Sharpe ratio: its moments are NaN, and so is all that follows.
    """
    r = series(returns, "returns", MIN_RETURNS)
    if is_constant(r):
        return ReturnMoments(math.nan, len(r), math.nan, math.nan)
    return ReturnMoments(
        sharpe=float(r.mean() / r.std(ddof=1)),
        n=len(r),
        skew=float(stats.skew(r, bias=False)),
        kurtosis=float(stats.kurtosis(r, bias=False, fisher=False)),
    )


def probabilistic_sharpe(m: ReturnMoments, hurdle: float = 0.0) -> float:
    """Return the probability that the true per-period Sharpe ratio exceeds `hurdle`.

    Φ((SR - hurdle)·√(T-1) / √(1 - skew·SR + (kurtosis-1)/4·SR²)); NaN where a moment is NaN or
    the variance under the root is not positive.
    """
    if m.n < 2:
        raise ValueError(f"the moments need at least 2 returns; n is {m.n}")
    spread = 1.0 - m.skew * m.sharpe + (m.kurtosis - 1.0) / 4.0 * m.sharpe**2
    if not spread > 0.0:
        return math.nan
    return float(stats.norm.cdf((m.sharpe - hurdle) * math.sqrt((m.n - 1) / spread)))


def expected_max_sharpe(n_trials: float, variance: float) -> float:
    """Return the highest Sharpe ratio expected of `n_trials` trials without skill.

    √variance·((1-γ)·Φ⁻¹(1-1/N) + γ·Φ⁻¹(1-1/(N·e))), γ being Euler's constant; in the terms of
    `variance`. 0 for one trial, and never below it: between one and two effective trials the
    formula, an approximation for many, would fall below the 0 it must start from.
    """
    if not n_trials >= 1.0:
        raise ValueError(f"n_trials must be at least 1; it is {n_trials}")
    if not (variance >= 0.0 and math.isfinite(variance)):
        raise ValueError(f"variance must be finite and at least 0; it is {variance}")
    import ffn  # seconds to import, with all of matplotlib and sklearn

    return max(0.0, float(ffn.calc_expected_max_sharpe(n_trials, math.sqrt(variance))))


def effective_trials(returns: Floats) -> float:
    """Return the number of independent trials that returns[T, K] are worth: ρ + (1-ρ)·K.

    ρ is the mean correlation of two different trials, clipped to [0, 1]: K copies of one trial
    are one trial, uncorrelated ones are K. Trials without variance have no correlation and are
    left out of ρ, but stay among the K.
    """
    r = matrix(returns, "returns", 2)
    k = r.shape[1]
    moving = r[:, ~is_constant(r)]
    n_moving = moving.shape[1]
    if n_moving < 2:
        return float(k)
    total = float(np.corrcoef(moving, rowvar=False).sum())
    rho = min(max((total - n_moving) / (n_moving * (n_moving - 1)), 0.0), 1.0)
    return float(min(max(rho + (1.0 - rho) * k, 1.0), k))


def deflate(returns: Floats, trials: Floats) -> Deflation:
    """Deflate the chosen returns[T] by all trials[T, K] of its search, the chosen one included.

    A trial without variance counts as one of Sharpe ratio 0. See `deflate_by_sharpes`.
    """
    chosen = series(returns, "returns", MIN_RETURNS)
    tried = matrix(trials, "trials", MIN_RETURNS)
    same_length(chosen, "returns", tried, "trials")
    constant = is_constant(tried)
    deviation = np.where(constant, 1.0, tried.std(axis=0, ddof=1))
    sharpes = np.where(constant, 0.0, tried.mean(axis=0) / deviation)
    return deflate_by_sharpes(chosen, sharpes.tolist(), effective_trials(tried))


def deflate_by_sharpes(
    returns: Floats, sharpes: Sequence[float], n_effective: float | None = None
) -> Deflation:
    """Deflate the chosen returns[T] by the per-period Sharpe ratios of all trials.

    The chosen one is among `sharpes`. The variance of the trials is the larger of their sample
    variance and 1/T, that of a Sharpe ratio estimated where nothing is there: a handful of trials
    that happen to be alike must not lower the hurdle to nothing. `n_effective` is the number of
    trials where it is not known. One trial: the hurdle is 0 and the probability is the PSR.
    """
    m = moments(returns)
    tried = series(sharpes, "sharpes (0 for a trial that never traded)", 1)
    n_trials = len(tried)
    effective = float(n_trials) if n_effective is None else n_effective
    if not 1.0 <= effective <= n_trials:
        raise ValueError(
            f"n_effective must lie between 1 and the {n_trials} trials; it is {n_effective}"
        )
    sample = float(tried.var(ddof=1)) if n_trials > 1 else 0.0
    variance = max(sample, 1.0 / m.n)
    hurdle = expected_max_sharpe(n_trials, variance)
    return Deflation(
        psr=probabilistic_sharpe(m),
        probability=probabilistic_sharpe(m, hurdle),
        hurdle=hurdle,
        n_trials=n_trials,
        n_effective=effective,
        probability_effective=probabilistic_sharpe(m, expected_max_sharpe(effective, variance)),
        variance=variance,
    )
