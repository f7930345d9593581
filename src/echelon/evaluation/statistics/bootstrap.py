"""Is the agents' Sharpe ratio above the baseline's? A studentised block bootstrap of dates.

After Ledoit & Wolf (2008), "Robust performance hypothesis testing with the Sharpe ratio",
Journal of Empirical Finance 15(5), with the stationary bootstrap of Politis & Romano (1994):

1. The estimate is the mean over seeds of Sharpe(seed), less Sharpe(baseline); the baseline may be
   other agents, and their mean over seeds is taken then.
2. Its standard error comes from the delta method: each date's influence on the estimate, and the
   long-run variance of that influence series.
3. Dates are resampled in blocks, the same dates for every seed and the baseline, so that the
   dependence of days, seeds and baseline stays. arch draws the dates and chooses the block length
   from the difference of the mean seed and the baseline.
4. In each replication the estimate and its standard error are computed again, the error from the
   replication's own influence series.
5. The quantiles of (replicated - estimate) / replicated error, turned round and multiplied by
   the sample's error, are the interval.

The long-run variance weighs autocovariances as the stationary bootstrap does with the same mean
block length: it is exactly the variance that resampling gives the mean of the series (Politis &
Romano, Lemma 1), so step 2, 3 and 4 agree on one bandwidth. The interval is equal-tailed, not
symmetric: a claim reads one bound only, and returns are skewed.

The seeds are taken as they are: the interval speaks of other days for these trained agents, and
`seeds.seed_interval` of other seeds for these days. A series without variance, such as cash, has
Sharpe ratio 0 and no influence.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.evaluation.statistics._arrays import (
    as_columns,
    is_constant,
    matrix,
    same_length,
    series,
)
from echelon.ops.blocks import MIN_BLOCK_PERIODS
from echelon.rng import stream
from echelon.types import Floats

Indices: TypeAlias = NDArray[np.int64]

_CHUNK = 250
_NOTHING = 1e-9  # of the influence, whose scale is 1: what rounding leaves of no difference
_BLIND = 1e-3  # of the sample's error: a replication that holds no date of difference
_STILL = 1e-10  # of the sample's variance: a replication that holds none of the moving dates


class SharpeDifference(NamedTuple):
    """Agents' mean per-period Sharpe ratio less the baseline's, with a two-sided interval.

    `p_value` is two-sided, of no difference. Bounds and p-value are NaN in the one case that has
    a difference but no error to measure it by (a two-valued series can have no influence).
    """

    estimate: float
    low: float
    high: float
    standard_error: float
    p_value: float
    block_length: float
    replications: int
    level: float


def block_length(difference: Floats) -> float:
    """Return the mean block length for difference[T], by arch (Patton, Politis & White 2009).

    Kept between 1 and 3·√T, as arch's estimate of a nearly unit-root series can exceed the
    sample. A constant series has nothing to keep together: 1.
    """
    d = series(difference, "difference", MIN_BLOCK_PERIODS)
    if is_constant(d):
        return 1.0
    from arch.bootstrap import optimal_block_length  # seconds to import, as below

    # Scaled, since arch squares variances: those of tiny differences would vanish.
    best = float(optimal_block_length(d / d.std())["stationary"].iloc[0])
    return min(max(best, 1.0), 3.0 * math.sqrt(len(d)))


def sharpe_difference(
    agents: Floats,
    baseline: Floats,
    *,
    seed: int,
    level: float = 0.95,
    replications: int = 2000,
    block: float | None = None,
) -> SharpeDifference:
    """Compare agents[T, S], one column per seed, with baseline[T] or [T, R] on the same dates.

    `block` is the mean block length; by default `block_length` of the mean agent less the
    baseline. Series that differ by a positive factor only have no difference: bounds 0, p 1.
    """
    x = matrix(agents, "agents", MIN_BLOCK_PERIODS)
    y = as_columns(baseline, "baseline", MIN_BLOCK_PERIODS)
    same_length(x, "agents", y, "baseline")
    n_dates = len(y)
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1; it is {level}")
    if replications < 100:
        raise ValueError(f"replications must be at least 100; it is {replications}")
    apart = x.mean(axis=1) - y.mean(axis=1)
    mean_block = block_length(apart) if block is None else float(block)
    if not 1.0 <= mean_block <= n_dates:
        raise ValueError(f"block must lie between 1 and the {n_dates} dates; it is {block}")

    powers = _Powers.from_returns(np.column_stack([x, y]), y.shape[1])
    weights = _spectral_weights(n_dates, mean_block)
    estimate, error = _on_every_date(powers, weights)
    if error * math.sqrt(n_dates) <= _NOTHING:
        nothing = abs(estimate) <= _NOTHING
        bound, p_value = (0.0, 1.0) if nothing else (math.nan, math.nan)
        shown = 0.0 if nothing else estimate
        return SharpeDifference(shown, bound, bound, 0.0, p_value, mean_block, replications, level)

    rng = stream(seed, "sharpe difference")
    below, above = _studentise(powers, weights, mean_block, replications, rng)
    # Weibull positions, q·(B+1): the quantiles for which a bound fails with probability q.
    lower = float(np.quantile(below, (1.0 - level) / 2.0, method="weibull"))
    upper = float(np.quantile(above, (1.0 + level) / 2.0, method="weibull"))
    t = estimate / error
    beyond = min(int((above >= t).sum()), int((below <= t).sum()))
    return SharpeDifference(
        estimate=estimate,
        low=estimate - upper * error,
        high=estimate - lower * error,
        standard_error=error,
        p_value=min(1.0, 2.0 * (1 + beyond) / (replications + 1)),
        block_length=mean_block,
        replications=replications,
        level=level,
    )


def resampled_dates(
    n_dates: int, mean_block: float, draws: int, rng: np.random.Generator
) -> Indices:
    """[draws, T]: numbers of the dates that arch's stationary bootstrap draws."""
    from arch.bootstrap import StationaryBootstrap

    bootstrap = StationaryBootstrap(
        mean_block,  # type: ignore[arg-type]  # used as 1 / mean_block: a fraction is right
        np.arange(n_dates, dtype=np.int64),
        seed=rng,
    )
    dates = np.empty((draws, n_dates), dtype=np.int64)
    for row, (resampled, _) in zip(dates, bootstrap.bootstrap(draws), strict=True):
        row[:] = resampled[0]
    return dates


def _on_every_date(powers: _Powers, weights: Floats) -> tuple[float, float]:
    """Estimate and standard error of the sample itself."""
    every_date = np.arange(len(powers.values), dtype=np.int64)[np.newaxis]
    estimates, errors = _replicate(powers, every_date, weights)
    return float(estimates[0]), float(errors[0])


def _studentise(
    powers: _Powers,
    weights: Floats,
    mean_block: float,
    replications: int,
    rng: np.random.Generator,
) -> tuple[Floats, Floats]:
    """(replicated - estimate) / replicated error, [B], for the lower and for the upper tail.

    They differ in replications without a date on which the series differ (an agent that traded
    twice), which have no error to be measured by. These count far out in both tails: what rests
    on a handful of dates must not be claimed.
    """
    estimate, error = _on_every_date(powers, weights)
    drawn, drawn_errors = np.empty(replications), np.empty(replications)
    for start in range(0, replications, _CHUNK):
        draws = min(_CHUNK, replications - start)
        dates = resampled_dates(len(powers.values), mean_block, draws, rng)
        part = slice(start, start + draws)
        drawn[part], drawn_errors[part] = _replicate(powers, dates, weights)
    blind = drawn_errors < _BLIND * error
    studentised = (drawn - estimate) / np.where(blind, 1.0, drawn_errors)
    below: Floats = np.where(blind, -1.0 / _BLIND, studentised)
    above: Floats = np.where(blind, 1.0 / _BLIND, studentised)
    return below, above


class _Powers(NamedTuple):
    """Returns, standardised, with their squares: all that Sharpe ratios and influences need.

    values[T, 2·C]: z = (r - mean) / deviation of the C series, then z². mean[C] is
    mean / deviation, so that Sharpe ratios are unchanged. sign[C] is 1/S for each of the S seeds
    and -1/R for the R series of the baseline, the last ones.
    """

    values: Floats
    mean: Floats
    sign: Floats

    @classmethod
    def from_returns(cls, returns: Floats, n_baseline: int = 1) -> _Powers:
        """Standardise returns[T, C]; the baseline's are the last columns, constants become 0."""
        constant = is_constant(returns)
        deviation = np.where(constant, 1.0, returns.std(axis=0, ddof=1))
        z = np.where(constant, 0.0, (returns - returns.mean(axis=0)) / deviation)
        n_seeds = returns.shape[1] - n_baseline
        return cls(
            values=np.concatenate([z, z**2], axis=1),
            mean=np.where(constant, 0.0, returns.mean(axis=0) / deviation),
            sign=np.repeat([1.0 / n_seeds, -1.0 / n_baseline], [n_seeds, n_baseline]),
        )


def _replicate(powers: _Powers, dates: Indices, weights: Floats) -> tuple[Floats, Floats]:
    """Estimate and standard error [B] on each row of dates[B, T].

    With mean m, variance v and Sharpe ratio s of a series on those dates, a date with return r
    has the influence (r - m)/√v - s/2·((r - m)²/v - 1), a polynomial in r. Summed over the
    series it is one product of matrices for all dates, picked in the order of `dates` after.
    """
    draws, n_dates = dates.shape
    n_series = len(powers.sign)
    offset = n_dates * np.arange(draws, dtype=np.int64)[:, np.newaxis]
    times = np.bincount((dates + offset).ravel(), minlength=draws * n_dates)
    sums = times.reshape(draws, n_dates).astype(np.float64) @ powers.values
    m = sums[:, :n_series] / n_dates
    v = (sums[:, n_series:] - n_dates * m**2) / (n_dates - 1)
    moving = v > _STILL
    v = np.where(moving, v, 1.0)
    deviation = np.sqrt(v)
    sharpe = np.where(moving, (powers.mean + m) / deviation, 0.0)

    sign = np.where(moving, powers.sign, 0.0)
    linear = sign * (1.0 / deviation + sharpe * m / v)
    square = -sign * sharpe / (2.0 * v)
    constant = sign * (sharpe / 2.0 - m / deviation - sharpe * m**2 / (2.0 * v))
    by_date = np.concatenate([linear, square], axis=1) @ powers.values.T
    by_date += constant.sum(axis=1, keepdims=True)
    influence = np.take_along_axis(by_date, dates, axis=1)
    influence -= influence.mean(axis=1, keepdims=True)
    spectrum = np.abs(np.fft.rfft(influence, axis=1)) ** 2
    return sharpe @ powers.sign, np.sqrt(spectrum @ weights) / n_dates


def _spectral_weights(n_dates: int, mean_block: float) -> Floats:
    """[T//2 + 1]: weights on |rfft(x)|²/T that give T · the resampled variance of the mean of x.

    That variance is Σ (1 - |k|/T)·(1 - 1/block)^|k|·R(k) over the lags |k| < T, R being the
    circular autocovariances; here it is written in frequencies, where it costs one transform and
    is never negative.
    """
    lags = np.arange(n_dates)
    by_lag = (1.0 - lags / n_dates) * (1.0 - 1.0 / mean_block) ** lags
    by_lag[1:] += by_lag[:0:-1].copy()
    weights = np.fft.rfft(by_lag).real / n_dates
    # rfft keeps one of each pair of frequencies; 0 and, for even T, T/2 have no partner.
    weights[1 : (n_dates + 1) // 2] *= 2.0
    clipped: Floats = np.maximum(weights, 0.0)
    return clipped
