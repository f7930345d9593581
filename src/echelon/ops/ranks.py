"""How well scores order what comes: daily rank ICs, their mean with an interval, and pairs of them.

1. `rank_ic`: Spearman's correlation over the assets of each row, scores against what came of them.
2. `ic_summary`: mean IC with its interval, and ICIR, the mean over the standard deviation of days.
3. `compare_ic`: of two forecasters on the same rows, the mean of the daily differences. Pairing
   takes out what both share, the days that were hard for everybody, which is most of the noise.

Outcomes of neighbouring rows overlap where they look several bars ahead, so intervals draw blocks
of at least that horizon (`blocks.mean_interval`). Axes: `T` time, `N` assets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from echelon.ops.blocks import MeanInterval, mean_interval
from echelon.types import Floats

LEAST_ASSETS = 5
"""Assets of a row below which the order of so few says nothing of it."""


def rank_ic(scores: Floats, outcomes: Floats) -> Floats:
    """[T] Spearman's correlation of scores[T,N] with outcomes[T,N], ties sharing their mean rank.

    A cell counts where both have a number. Scores that are all alike have IC 0: they order
    nothing, and a forecaster must not drop a day by keeping silent. NaN is a row of fewer than
    `LEAST_ASSETS` cells, or one whose outcomes are all alike.
    """
    assert scores.ndim == 2, f"scores should be [T,N], are {scores.shape}"
    assert scores.shape == outcomes.shape, "scores and outcomes differ in shape"
    known = np.isfinite(scores) & np.isfinite(outcomes)
    count = known.sum(axis=1)
    mine, theirs = (_centred_ranks(values, known) for values in (scores, outcomes))
    size, spread = (mine**2).sum(axis=1), (theirs**2).sum(axis=1)
    product = np.sqrt(size * spread)
    ic = (mine * theirs).sum(axis=1) / np.where(product > 0.0, product, 1.0)
    return np.where((count >= LEAST_ASSETS) & (spread > 0.0), ic, np.nan)


def _centred_ranks(values: Floats, known: np.ndarray) -> Floats:
    """[T,N] mean ranks of each row's known cells minus their mean; 0 elsewhere."""
    # Infinity ranks behind all that is known, and so moves none of their ranks.
    ranks = stats.rankdata(np.where(known, values, np.inf), axis=1)
    count = known.sum(axis=1, keepdims=True)
    return np.where(known, ranks - (count + 1) / 2.0, 0.0)


class ICSummary(NamedTuple):
    """Mean daily IC with its interval, ICIR (not annualised; NaN of fewer than two days), days."""

    mean: MeanInterval
    icir: float
    days: int


def ic_summary(ic: Floats, rng: np.random.Generator, *, horizon: int) -> ICSummary:
    """Of ic[T], NaN rows left out. horizon: bars that outcomes look ahead"""
    known = ic[np.isfinite(ic)]
    deviation = float(known.std(ddof=1)) if len(known) > 1 else math.nan
    mean = mean_interval(known, rng, least_block=horizon)
    return ICSummary(mean, mean.estimate / deviation if deviation else math.nan, len(known))


def compare_ic(
    first: Floats, second: Floats, rng: np.random.Generator, *, horizon: int
) -> MeanInterval:
    """Mean of first[T] minus second[T], daily ICs of two forecasters, with its 95 % interval.

    Rows that either has no IC of are left out. horizon: bars that outcomes look ahead
    """
    assert first.shape == second.shape, "the series are not of the same rows"
    difference = first - second
    return mean_interval(difference[np.isfinite(difference)], rng, least_block=horizon)
