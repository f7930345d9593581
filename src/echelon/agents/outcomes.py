"""What an encoder is asked to foresee at the close of row t, for each horizon h.

    return_h       log of the total return over the next h bars
    volatility_h   log of the root mean square of the one-bar log returns in them
    rank_h         rank, among all assets of the row, of the return over h bars from the next fill

None crosses the end of the stretch it begins in, and a cell counts only where the asset has
features and can be traded at every bar the target is made of. Returns and volatilities are scaled
by the mean and standard deviation they have on the train window, so that a squared error of 1 is
that of the mean; ranks have mean 0 and variance 1 in every row.

Axes: `T` rows of the world, `R` rows of some stretches, `N` assets, `K` targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from echelon.config.agents import PretrainConfig, TargetKind
from echelon.envs.targets import forward_returns, section_ranks
from echelon.envs.world import World
from echelon.errors import DataError
from echelon.types import Bools, Floats, Floats32

Pieces = Sequence[range]
"""Stretches of rows, none of which leads into the next."""

_QUIET = 0.1
"""Volatilities below this share of the usual one count as that: the log of a single return near
zero would outweigh all others."""


class Targets(NamedTuple):
    """K = kinds × horizons targets, kind by kind and horizon by horizon."""

    kinds: tuple[TargetKind, ...]
    horizons: tuple[int, ...]

    @staticmethod
    def from_config(pretrain: PretrainConfig) -> Targets:
        return Targets(pretrain.targets, pretrain.horizons)

    @property
    def of_each(self) -> list[tuple[TargetKind, int]]:
        """[K] kind and horizon."""
        return [(kind, horizon) for kind in self.kinds for horizon in self.horizons]

    @property
    def names(self) -> list[str]:
        return [f"{kind}_{horizon}" for kind, horizon in self.of_each]

    @property
    def ranked(self) -> Bools:
        """[K] which are ranks."""
        return np.array([kind == "rank" for kind, _ in self.of_each])

    @property
    def reach(self) -> int:
        """Bars after a row that its targets are made of at most: a fill may come a bar later."""
        return max(self.horizons) + ("rank" in self.kinds)


class Scale(NamedTuple):
    """Of the targets on the train window: mean, sd[K]; quiet: least volatility that counts."""

    mean: Floats
    sd: Floats
    quiet: float


def fit_scale(world: World, pieces: Pieces, targets: Targets) -> Scale:
    """Mean and deviation of the targets on the train window's stretches; ranks stay as they are."""
    daily = np.concatenate([np.diff(_log_growth(world, piece), axis=0) for piece in pieces])
    quiet = _QUIET * float(np.nanstd(daily)) if np.isfinite(daily).any() else 0.0
    raw = np.concatenate([_ahead(world, piece, targets, quiet) for piece in pieces])
    known = np.isfinite(raw).sum(axis=(0, 1))
    if (known < 2).any():
        longest = max(len(piece) for piece in pieces)
        raise DataError(
            f"pretrain.horizons={list(targets.horizons)}: the train window has no "
            f"{targets.names[int(np.argmin(known))]} to learn from. Its longest stretch "
            f"has {longest} bars; shorten the horizons or lengthen split.train."
        )
    mean, sd = np.nanmean(raw, axis=(0, 1)), np.nanstd(raw, axis=(0, 1))
    plain = targets.ranked | (sd == 0.0)
    return Scale(np.where(targets.ranked, 0.0, mean), np.where(plain, 1.0, sd), quiet)


def outcomes(world: World, pieces: Pieces, targets: Targets, scale: Scale) -> Floats32:
    """[T,N,K] scaled targets of the rows of `pieces`; NaN elsewhere and where one is unknown."""
    shape = (len(world.times), world.n_assets, len(targets.names))
    y = np.full(shape, np.nan, dtype=np.float32)
    for piece in pieces:
        raw = _ahead(world, piece, targets, scale.quiet)
        y[piece.start : piece.stop] = (raw - scale.mean) / scale.sd
    return y


def last_values(world: World, pieces: Pieces, targets: Targets, scale: Scale) -> Floats32:
    """[R,N,K] scaled last values of the rows of `pieces`, one piece after the other.

    The value of the h bars up to t is the target of row t - h; of a rank, whose fill comes a bar
    later, that of the row before, which is over at the open of t. A stretch may look back over the
    rows of its first window, which belong to it.
    """
    parts = []
    for piece in pieces:
        reach = range(piece.start - world.window + 1, piece.stop)
        ahead = _ahead(world, reach, targets, scale.quiet)
        last = np.full_like(ahead, np.nan)
        for k, (kind, h) in enumerate(targets.of_each):
            back = h + (kind == "rank" and world.fill_open)
            last[back:, :, k] = ahead[: max(0, len(reach) - back), :, k]
        parts.append((last[world.window - 1 :] - scale.mean) / scale.sd)
    return np.concatenate(parts).astype(np.float32)


def _log_growth(world: World, rows: range) -> Floats:
    """[R,N] log of the total-return index; NaN where the asset is absent or cannot be traded."""
    growth = np.asarray(world.growth[rows.start : rows.stop], dtype=np.float64)
    known: Bools = np.asarray(world.present[rows.start : rows.stop], dtype=bool)
    known = known & world.rows.tradable[rows.start : rows.stop]
    with np.errstate(invalid="ignore"):
        known = known & np.isfinite(growth) & (growth > 0.0)
    return np.log(growth, out=np.full(growth.shape, np.nan), where=known)


def _ahead(world: World, rows: range, targets: Targets, quiet: float) -> Floats:
    """[R,N,K] unscaled targets of a stretch."""
    level = _log_growth(world, rows)
    squares = np.diff(level, axis=0) ** 2
    out = np.full((*level.shape, len(targets.names)), np.nan)
    for k, (kind, h) in enumerate(targets.of_each):
        if h >= len(rows):
            continue
        if kind == "rank":
            out[:, :, k] = section_ranks(forward_returns(world, rows, h))
        elif kind == "return":
            out[:-h, :, k] = level[h:] - level[:-h]
        else:
            usual = np.sqrt(sliding_window_view(squares, h, axis=0).mean(axis=-1))
            tiny = np.finfo(np.float64).tiny
            out[:-h, :, k] = np.log(np.maximum(usual, max(quiet, tiny)))
    return out
