"""Statistics that say how far a backtest can be believed: pure functions on arrays.

Sharpe ratios, variances and standard errors are per period; annualise them only when shown. Axes:
`T` periods, `S` seeds, `K` trials. Values that are not finite and series that are too short raise
ValueError. What a search overfitted is in `evaluation.overfitting`.

**Over seeds** (`seed_interval`). One seed has no interval; two to nine have Student's t, as
bootstraps of few values are too sure of themselves; more have the studentised bootstrap
(bootstrap-t) of the mean, which follows a skewed sample where t cannot. At ten seeds it covers as
nearly 95 % as t does, BCa about 90 % (by simulation on normal values).

**After a search** (`deflate`). The PSR is the probability that the true Sharpe ratio exceeds a
hurdle, given the length of the record and the skew and kurtosis of its returns (Bailey & López de
Prado 2012, "The Sharpe Ratio Efficient Frontier", Journal of Risk 15(2)). A search sets the hurdle:
the highest Sharpe ratio expected of N trials without skill, from their number and the variance of
their Sharpe ratios. The PSR of the chosen trial against it is the DSR (Bailey & López de Prado
2014, "The Deflated Sharpe Ratio", Journal of Portfolio Management 40(5)). The hurdle comes from
ffn, whose own deflated ratio knows no effective number of trials and no floor under the variance.

**Against a baseline** (`sharpe_difference`). A studentised block bootstrap of dates after Ledoit &
Wolf (2008), "Robust performance hypothesis testing with the Sharpe ratio", Journal of Empirical
Finance 15(5), with the stationary bootstrap of Politis & Romano (1994):

1. The estimate is the mean over seeds of Sharpe(seed), less that of the baseline's series.
2. Its standard error comes from the delta method: each date's influence on the estimate, and the
   long-run variance of that influence series.
3. Dates are resampled in blocks, the same dates for every seed and the baseline, so that the
   dependence of days, seeds and baseline stays. arch draws the dates and chooses the block length
   from the difference of the mean seed and the baseline.
4. In each replication the estimate and its standard error are computed again.
5. The quantiles of (replicated - estimate) / replicated error, turned round and multiplied by
   the sample's error, are the interval.

The long-run variance is exactly the one that resampling gives the mean of the series (Politis &
Romano, Lemma 1), so steps 2, 3 and 4 agree on one bandwidth. The interval is equal-tailed: a claim
reads one bound only, and returns are skewed. It speaks of other days for these trained agents,
`seed_interval` of other seeds for these days. A series without variance, such as cash, has Sharpe
ratio 0 and no influence.

**Beyond a baseline** (`active_ratio`). The information ratio is the Sharpe ratio of the active
return, what the agent earned less what the baseline did on the same date, and so the difference of
two Sharpe ratios of which cash has the other: the same bootstrap gives its interval.

**A claim** (`judge`) is the one rule that reports and the proving ground apply. It needs all three:

1. the lower 97.5 % bound of the agents' Sharpe ratio over the baseline's lies above 0, with the
   block length that fits the data and with twice that length;
2. so does the lower bound of the information ratio over the baseline, at both lengths;
3. the deflated Sharpe ratio is above 0.95: the search that found the result does not explain it.

Neither ratio is enough. Half a book in cash can have the higher Sharpe ratio and earn less than the
baseline; a book that is bolder than the baseline earns more in a rising market without any skill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from echelon.ops.blocks import MIN_BLOCK_PERIODS
from echelon.ops.measures import active_returns
from echelon.rng import stream
from echelon.types import Bools, Floats, Ints

LEVEL = 0.95
"""Of every two-sided interval."""
BOOTSTRAP_FROM = 10
"""Number of seeds from which the bootstrap takes over from Student's t."""
MIN_RETURNS = 4
"""The unbiased kurtosis divides by (n - 1)(n - 2)(n - 3)."""
DEFLATED_ABOVE = 0.95
"""A claim needs a deflated Sharpe ratio above this."""
_ROUNDING = 4 * np.finfo(np.float64).eps
_SEED_REPLICATIONS = 4_000
_SEED = 20_240_601
_CHUNK = 250
_NOTHING = 1e-9  # of the influence, whose scale is 1: what rounding leaves of no difference
_BLIND = 1e-3  # of the sample's error: a replication that holds no date of difference
_STILL = 1e-10  # of the sample's variance: a replication that holds none of the moving dates


def finite(values: Floats | Sequence[float], name: str, at_least: int) -> Floats:
    """`values` as float64, axis 0 being time; ValueError unless finite and long enough."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < at_least:
        raise ValueError(f"{name} needs at least {at_least} values; it has {len(array)}")
    bad = array.size - int(np.isfinite(array).sum())
    if bad:
        raise ValueError(
            f"{name} must be finite; {bad} of its {array.size} values are not. "
            "Give only periods in which every series has a value"
        )
    return array


def is_constant(returns: Floats) -> Bools:
    """Per series (axis 0 is time): whether its range is no more than rounding."""
    spread = returns.max(axis=0) - returns.min(axis=0)
    return np.asarray(spread <= _ROUNDING * np.abs(returns).max(axis=0))


def standardise(returns: Floats, ddof: int) -> tuple[Floats, Floats]:
    """(z[T, C], mean[C] in deviations) of returns[T, C]; both are 0 of a constant series."""
    constant = is_constant(returns)
    deviation = np.where(constant, 1.0, returns.std(axis=0, ddof=ddof))
    z = np.where(constant, 0.0, (returns - returns.mean(axis=0)) / deviation)
    return z, np.where(constant, 0.0, returns.mean(axis=0) / deviation)


class SeedInterval(NamedTuple):
    """The mean over n seeds and its two-sided interval; bounds are NaN for one seed ("none")."""

    estimate: float
    low: float
    high: float
    n: int
    method: Literal["t", "bootstrap", "none"]


def seed_interval(values: Sequence[float]) -> SeedInterval:
    """Return the mean of `values`, one per seed, and its two-sided interval.

    The resampling has a fixed seed: the same values always give the same bounds. arch's
    `IIDBootstrap`, a hundred times slower, is the twin that tests hold this to.
    """
    x = finite(values, "values", 1)
    n, mean = len(x), float(x.mean())
    if n == 1:
        return SeedInterval(mean, math.nan, math.nan, n, "none")
    if n < BOOTSTRAP_FROM:
        margin = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * float(x.std(ddof=1)) / math.sqrt(n)
        return SeedInterval(mean, mean - margin, mean + margin, n, "t")
    if is_constant(x):
        return SeedInterval(mean, mean, mean, n, "bootstrap")
    samples = x[stream(_SEED, "seed interval").integers(n, size=(_SEED_REPLICATIONS, n))]
    # A resample that drew one value only says nothing of its deviation; a hundredth of the
    # sample's keeps it finite, far out in the tail where it belongs.
    deviation = np.maximum(samples.std(axis=1), 0.01 * x.std())
    studentised = (samples.mean(axis=1) - x.mean()) / deviation
    tails = [0.5 - LEVEL / 2, 0.5 + LEVEL / 2]
    lower, upper = np.quantile(studentised, tails, method="weibull").tolist()
    # The lower quantile makes the upper bound: it is the error that is turned round.
    low, high = float(mean - upper * x.std()), float(mean - lower * x.std())
    return SeedInterval(mean, low, high, n, "bootstrap")


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of `values`, exact for any number of them.

    Each of the n values carries mass 1/n and the mass between the quartiles is averaged;
    `scipy.stats.trim_mean(x, 0.25)` drops whole values and is this only where 4 divides n.

    >>> interquartile_mean([0.0, 10.0, 1.0, 2.0])
    1.5
    """
    x = np.sort(finite(values, "values", 1))
    n = len(x)
    edges = np.arange(n + 1) / n
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0.0, None)
    return float(weights @ x / weights.sum())


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
    The probabilities are NaN for a chosen series without variance.
    """

    psr: float
    probability: float
    hurdle: float
    n_trials: int
    n_effective: float
    probability_effective: float
    variance: float


def moments(returns: Floats) -> ReturnMoments:
    """Return the moments of returns[T], T ≥ 4, divisor T - 1; NaN of a constant series."""
    r = finite(returns, "returns", MIN_RETURNS)
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
    spread = 1.0 - m.skew * m.sharpe + (m.kurtosis - 1.0) / 4.0 * m.sharpe**2
    if not spread > 0.0:
        return math.nan
    return float(stats.norm.cdf((m.sharpe - hurdle) * math.sqrt((m.n - 1) / spread)))


def expected_max_sharpe(n_trials: float, variance: float) -> float:
    """Return the highest Sharpe ratio expected of `n_trials` trials without skill.

    √variance·((1-γ)·Φ⁻¹(1-1/N) + γ·Φ⁻¹(1-1/(N·e))), γ being Euler's constant. 0 for one trial, and
    never below it, as the formula, an approximation for many, is between one trial and two.
    """
    import ffn  # seconds to import, with all of matplotlib and sklearn

    return max(0.0, float(ffn.calc_expected_max_sharpe(n_trials, math.sqrt(variance))))


def effective_trials(returns: Floats) -> float:
    """Return the number of independent trials that returns[T, K] are worth: ρ + (1-ρ)·K.

    ρ is the mean correlation of two different trials, clipped to [0, 1]. Trials without variance
    are left out of ρ, but stay among the K.
    """
    r = finite(returns, "returns", 2)
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
    tried = finite(trials, "trials", MIN_RETURNS)
    assert len(returns) == len(tried)
    _, sharpes = standardise(tried, ddof=1)
    return deflate_by_sharpes(returns, sharpes.tolist(), effective_trials(tried))


def deflate_by_sharpes(
    returns: Floats, sharpes: Sequence[float], n_effective: float | None = None
) -> Deflation:
    """Deflate the chosen returns[T] by the per-period Sharpe ratios of all trials.

    The chosen one is among `sharpes`. The variance of the trials is the larger of their sample
    variance and 1/T, that of a Sharpe ratio where nothing is there: a handful of trials that happen
    to be alike must not lower the hurdle to nothing. One trial: the probability is the PSR.
    """
    m = moments(returns)
    tried = finite(sharpes, "sharpes (0 for a trial that never traded)", 1)
    n_trials = len(tried)
    effective = float(n_trials) if n_effective is None else n_effective
    assert 1.0 <= effective <= n_trials
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


class SharpeDifference(NamedTuple):
    """Agents' mean per-period Sharpe ratio less the baseline's, with a two-sided interval.

    Bounds and p-value are NaN where there is a difference but no error to measure it by.
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
    d = finite(difference, "difference", MIN_BLOCK_PERIODS)
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
    replications: int = 2000,
    block: float | None = None,
) -> SharpeDifference:
    """Compare agents[T, S], one column per seed, with baseline[T] or [T, R] on the same dates.

    `block` is the mean block length; by default `block_length` of the mean agent less the
    baseline. Series that differ by a positive factor only have no difference: bounds 0, p 1.
    """
    x = finite(agents, "agents", MIN_BLOCK_PERIODS)
    columns = baseline[:, np.newaxis] if baseline.ndim == 1 else baseline
    y = finite(columns, "baseline", MIN_BLOCK_PERIODS)
    n_dates = len(y)
    assert len(x) == n_dates
    apart = x.mean(axis=1) - y.mean(axis=1)
    mean_block = block_length(apart) if block is None else float(block)

    powers = _Powers.from_returns(np.column_stack([x, y]), y.shape[1])
    weights = _spectral_weights(n_dates, mean_block)
    every_date = np.arange(n_dates, dtype=np.int64)[np.newaxis]
    (estimate,), (error,) = (part.tolist() for part in _replicate(powers, every_date, weights))
    if error * math.sqrt(n_dates) <= _NOTHING:
        nothing = abs(estimate) <= _NOTHING
        bound, p_value = (0.0, 1.0) if nothing else (math.nan, math.nan)
        shown = 0.0 if nothing else estimate
        return SharpeDifference(shown, bound, bound, 0.0, p_value, mean_block, replications, LEVEL)

    rng = stream(seed, "sharpe difference")
    below, above = _studentise(powers, weights, mean_block, replications, rng, estimate, error)
    # Weibull positions, q·(B+1): the quantiles for which a bound fails with probability q.
    lower = float(np.quantile(below, (1.0 - LEVEL) / 2.0, method="weibull"))
    upper = float(np.quantile(above, (1.0 + LEVEL) / 2.0, method="weibull"))
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
        level=LEVEL,
    )


def resampled_dates(n_dates: int, mean_block: float, draws: int, rng: np.random.Generator) -> Ints:
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


def _studentise(
    powers: _Powers,
    weights: Floats,
    mean_block: float,
    replications: int,
    rng: np.random.Generator,
    estimate: float,
    error: float,
) -> tuple[Floats, Floats]:
    """(replicated - estimate) / replicated error, [B], for the lower and for the upper tail.

    They differ in replications without a date on which the series differ (an agent that traded
    twice), which have no error to be measured by. These count far out in both tails: what rests
    on a handful of dates must not be claimed.
    """
    drawn, drawn_errors = np.empty(replications), np.empty(replications)
    for start in range(0, replications, _CHUNK):
        draws = min(_CHUNK, replications - start)
        dates = resampled_dates(len(powers.values), mean_block, draws, rng)
        part = slice(start, start + draws)
        drawn[part], drawn_errors[part] = _replicate(powers, dates, weights)
    blind = drawn_errors < _BLIND * error
    studentised = (drawn - estimate) / np.where(blind, 1.0, drawn_errors)
    return np.where(blind, -1.0 / _BLIND, studentised), np.where(blind, 1.0 / _BLIND, studentised)


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
        z, mean = standardise(returns, ddof=1)
        n_seeds = returns.shape[1] - n_baseline
        return cls(
            values=np.concatenate([z, z**2], axis=1),
            mean=mean,
            sign=np.repeat([1.0 / n_seeds, -1.0 / n_baseline], [n_seeds, n_baseline]),
        )


def _replicate(powers: _Powers, dates: Ints, weights: Floats) -> tuple[Floats, Floats]:
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
    return np.asarray(np.maximum(weights, 0.0))


class BothBlocks(NamedTuple):
    """A difference with the block length that fits the data, and with twice that length."""

    single: SharpeDifference
    double: SharpeDifference

    @property
    def low(self) -> float:
        """The lower of both lower bounds; NaN where one is."""
        return float(np.min([part.low for part in self]))

    @property
    def high(self) -> float:
        return float(np.max([part.high for part in self]))


def at_both_blocks(
    agents: Floats, baseline: Floats, *, seed: int, replications: int = 2000
) -> BothBlocks:
    """`sharpe_difference` of agents[T, S] and baseline[T] or [T, R] at both block lengths."""
    single = sharpe_difference(agents, baseline, seed=seed, replications=replications)
    longer = min(2.0 * single.block_length, float(len(baseline)))
    double = sharpe_difference(agents, baseline, seed=seed, replications=replications, block=longer)
    return BothBlocks(single, double)


def active_ratio(
    agents: Floats, baseline: Floats, *, seed: int, replications: int = 2000
) -> BothBlocks:
    """Mean over seeds of the information ratio of agents[T, S] over baseline[T], per period."""
    active = active_returns(agents, baseline)
    return at_both_blocks(active, np.zeros(len(active)), seed=seed, replications=replications)


class Claim(NamedTuple):
    """What `judge` says, and what it rests on: `sharpe` is the difference of Sharpe ratios."""

    sharpe: BothBlocks
    information: BothBlocks
    made: bool


def judge(
    agents: Floats, baseline: Floats, deflated: float, *, seed: int, replications: int = 2000
) -> Claim:
    """Judge agents[T, S] against baseline[T]; what is not a number supports no claim."""
    sharpe = at_both_blocks(agents, baseline, seed=seed, replications=replications)
    information = active_ratio(agents, baseline, seed=seed, replications=replications)
    ahead = sharpe.low > 0.0 and information.low > 0.0
    return Claim(sharpe, information, ahead and deflated > DEFLATED_ABOVE)
