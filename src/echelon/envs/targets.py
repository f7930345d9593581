"""What a forecaster is to foresee: returns from the next fill on, and their ranks in the row.

A decision at the close of row t is filled at row t + 1, at its open, or at the close of t where the
world fills there. The forward return over h bars is of the same price h bars later, with dividends
and splits inside. It is known of a cell only if the asset is present and traded at row t, trades at
the row of the fill and at that of the exit, and only if both lie in the same stretch of rows: what
is learned on a window has seen nothing beyond its end.

Axes: `R` rows of a stretch, `N` assets.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from echelon.envs.world import World
from echelon.types import Floats


def forward_returns(world: World, rows: range, horizon: int) -> Floats:
    """[R,N] returns over `horizon` bars from the fill of a decision at each of `rows`, or NaN."""
    assert horizon >= 1, f"a horizon of {horizon} bars is none"
    stretch = slice(rows.start, rows.stop)
    market = world.rows
    level = np.array(world.growth[stretch], dtype=np.float64)
    trades = np.asarray(market.tradable[stretch], dtype=bool)
    first = trades & np.asarray(world.present[stretch], dtype=bool)
    delay = 1 if world.fill_open else 0
    with np.errstate(invalid="ignore", divide="ignore"):
        if world.fill_open:
            level *= market.open[stretch] / market.close[stretch]
        level[~(trades & (level > 0.0))] = np.nan
        out = np.full(level.shape, np.nan)
        n = max(0, len(level) - horizon - delay)
        out[:n] = level[delay + horizon :][:n] / level[delay:][:n] - 1.0
    out[~first | ~np.isfinite(out)] = np.nan
    return out


def section_ranks(values: Floats) -> Floats:
    """[R,N] the rank of each cell among the known ones of its row: mean 0, variance 1, or NaN.

    Equal values share their mean rank. A row with one known cell has no ranks.
    """
    known = np.isfinite(values)
    count = known.sum(axis=1, keepdims=True)
    # Infinity ranks behind all that is known, and so moves none of their ranks.
    ranks = stats.rankdata(np.where(known, values, np.inf), axis=1) - (count + 1) / 2.0
    spread = np.sqrt(np.maximum(count.astype(np.float64) ** 2 - 1.0, 0.0) / 12.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known & (spread > 0.0), ranks / spread, np.nan)
