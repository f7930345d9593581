"""What several training seeds say about the mean: an interval, and the interquartile mean.

With few seeds the usual percentile bootstrap is too sure of itself: over five normal values its
lower 2.5 % bound lies above the truth three times too often, since resampling five values can
show neither the tails nor, by a factor √(4/5), the spread. Hence:

1. one seed: no interval;
2. two to nine seeds: Student's t;
3. from ten on: the studentised bootstrap (bootstrap-t) of the mean, which follows a skewed
   sample where the t-interval cannot. At ten seeds it covers as nearly 95 % as the t-interval
   does, where BCa covers about 90 % (both measured by simulation on normal values).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from echelon.evaluation.statistics._arrays import is_constant, series
from echelon.rng import stream
from echelon.types import Floats

BOOTSTRAP_FROM = 10
"""Number of seeds from which the bootstrap takes over from Student's t."""
_REPLICATIONS = 4_000
_SEED = 20_240_601


class SeedInterval(NamedTuple):
    """The mean over n seeds and its two-sided interval; bounds are NaN for one seed ("none")."""

    estimate: float
    low: float
    high: float
    n: int
    method: Literal["t", "bootstrap", "none"]


def seed_interval(values: Sequence[float], level: float = 0.95) -> SeedInterval:
    """Return the mean of `values`, one per seed, and its two-sided interval at `level`.

    The interval speaks of other seeds on the same data, not of other data. The resampling has
    its own fixed seed: the same values always give the same bounds.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie between 0 and 1; it is {level}")
    x = series(values, "values", 1)
    n, mean = len(x), float(x.mean())
    if n == 1:
        return SeedInterval(mean, math.nan, math.nan, n, "none")
    if n < BOOTSTRAP_FROM:
        margin = float(stats.t.ppf(0.5 + level / 2, n - 1)) * float(x.std(ddof=1)) / math.sqrt(n)
        return SeedInterval(mean, mean - margin, mean + margin, n, "t")
    low, high = (mean, mean) if is_constant(x) else _studentise(x, level)
    return SeedInterval(mean, low, high, n, "bootstrap")


def _studentise(x: Floats, level: float) -> tuple[float, float]:
    """Bounds of the bootstrap-t interval of the mean of x[S].

    `arch.bootstrap.IIDBootstrap` has the same interval, one replication at a time; a hundred
    times slower, it is the twin that tests hold this to.
    """
    picked = stream(_SEED, "seed interval").integers(len(x), size=(_REPLICATIONS, len(x)))
    samples = x[picked]
    # A resample that drew one value only says nothing of its deviation; a hundredth of the
    # sample's keeps it finite, far out in the tail where it belongs.
    deviation = np.maximum(samples.std(axis=1), 0.01 * x.std())
    studentised = (samples.mean(axis=1) - x.mean()) / deviation
    tails = [0.5 - level / 2, 0.5 + level / 2]
    lower, upper = np.quantile(studentised, tails, method="weibull").tolist()
    # The lower quantile makes the upper bound: it is the error that is turned round.
    return float(x.mean() - upper * x.std()), float(x.mean() - lower * x.std())


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half of `values`, exact for any number of them.

    Each of the n values carries mass 1/n and the mass between the quartiles is averaged, so for
    n = 5 the second and fourth value weigh ¾. rliable calls `scipy.stats.trim_mean(x, 0.25)`,
    which drops ⌊n/4⌋ whole values at each end and so is this only where 4 divides n: of five
    values it keeps three fifths, of three all.

    >>> interquartile_mean([0.0, 10.0, 1.0, 2.0])
    1.5
    """
    x = np.sort(series(values, "values", 1))
    n = len(x)
    edges = np.arange(n + 1) / n
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0.0, None)
    return float(weights @ x / weights.sum())
