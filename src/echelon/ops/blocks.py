"""The mean of a time series whose neighbours depend on one another, with an interval.

Blocks of neighbours are drawn again and again, each anywhere on the series bent to a ring (the
circular block bootstrap of Politis & Romano, 1992), so that what hangs together stays together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from echelon.types import Floats

MIN_BLOCK_PERIODS = 20
"""Fewer values hold no block bootstrap worth the name."""


class MeanInterval(NamedTuple):
    """A mean with a two-sided interval; block: neighbours drawn together."""

    estimate: float
    low: float
    high: float
    block: int


def mean_interval(
    values: Floats,
    rng: np.random.Generator,
    *,
    least_block: int = 1,
    level: float = 0.95,
    replications: int = 2000,
) -> MeanInterval:
    """Mean of values[T] and its interval by the percentiles of resampled means.

    The block length is arch's (Patton, Politis & White, 2009), at least `least_block` (such as
    the bars by which neighbouring values overlap), and at most a quarter of the series. The bounds
    are NaN where there are fewer than `MIN_BLOCK_PERIODS` values.
    """
    x = np.asarray(values, dtype=np.float64)
    assert x.ndim == 1, f"values should be [T], are {x.shape}"
    assert np.isfinite(x).all(), "values are not all finite"
    n = len(x)
    if n < MIN_BLOCK_PERIODS:
        return MeanInterval(float(x.mean()) if n else math.nan, math.nan, math.nan, 0)
    best = 1.0
    if np.ptp(x) > 0.0:
        from arch.bootstrap import optimal_block_length  # takes a second to import

        # Scaled, since arch squares variances: those of tiny differences would vanish.
        best = float(optimal_block_length(x / x.std())["circular"].iloc[0])
    block = int(min(max(math.ceil(best), least_block, 1), n // 4))
    ring = np.concatenate([[0.0], np.cumsum(np.concatenate([x, x[: block - 1]]))])
    sums = ring[block:] - ring[:-block]  # of the block that begins at each value
    count = -(-n // block)
    starts = rng.integers(0, n, size=(replications, count))
    means = sums[starts].sum(axis=1) / (count * block)
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return MeanInterval(float(x.mean()), float(low), float(high), block)
