"""What a pre-trained encoder is asked to foresee, and whom it has to beat at it.

Targets, for each horizon h, at the close of row t:

    return_h       log of the total return over the next h bars
    volatility_h   log of the root mean square of the one-bar log returns in them

Neither crosses the end of the stretch it begins in, and a cell counts only where the asset has
features and can be traded at every bar the target is made of. Targets are scaled by the mean and
standard deviation they have on the train window, so that a loss of 1 is that of the mean.

Rivals: the mean of the train window; the last value (the return, or the volatility, of the h bars
up to t); and a ridge regression on the same features, all W rows of the window side by side.

Axes: `T` rows, `N` assets, `F` features, `W` window, `K` targets, `P` = W·F + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from echelon.envs.world import World
from echelon.errors import DataError
from echelon.ops.blocks import MeanInterval, mean_interval
from echelon.rng import stream
from echelon.types import Bools, Floats, Floats32

Pieces = Sequence[range]
"""Stretches of rows, none of which leads into the next."""

_QUIET = 0.1
"""Volatilities below this share of the usual one count as that: the log of a single return near
zero would outweigh all others."""
_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Strengths of the ridge, in units of each feature's own variance."""
_HELD_OUT = 0.2
"""Last part of each train stretch, on which the ridge's strength is chosen."""
_CHUNK_CELLS = 4_000_000
"""Numbers of flattened windows that are held at a time: 16 MB."""


class Scale(NamedTuple):
    """Of the targets on the train window: mean, sd[K]; quiet: least volatility that counts."""

    mean: Floats
    sd: Floats
    quiet: float


def target_names(horizons: Sequence[int]) -> list[str]:
    """[K] names of the targets, in their order."""
    return [f"{kind}_{h}" for kind in ("return", "volatility") for h in horizons]


def fit_scale(world: World, pieces: Pieces, horizons: Sequence[int]) -> Scale:
    """Mean and deviation of the targets on the train window's stretches."""
    daily = _all_of([np.diff(_log_growth(world, piece), axis=0) for piece in pieces])
    quiet = _QUIET * float(np.nanstd(daily)) if np.isfinite(daily).any() else 0.0
    raw = _all_of(
        [_ahead(_log_growth(world, piece), horizons, quiet, len(piece)) for piece in pieces]
    )
    known = np.isfinite(raw).sum(axis=(0, 1))
    if (known < 2).any():
        longest = max(len(piece) for piece in pieces)
        raise DataError(
            f"pretrain.horizons={list(horizons)}: the train window has no "
            f"{target_names(horizons)[int(np.argmin(known))]} to learn from. Its longest stretch "
            f"has {longest} bars; shorten the horizons or lengthen split.train."
        )
    sd = np.nanstd(raw, axis=(0, 1))
    return Scale(np.nanmean(raw, axis=(0, 1)), np.where(sd > 0.0, sd, 1.0), quiet)


def outcomes(world: World, pieces: Pieces, horizons: Sequence[int], scale: Scale) -> Floats32:
    """[T,N,K] scaled targets of the rows of `pieces`; NaN elsewhere and where one is unknown."""
    y = np.full((len(world.times), world.n_assets, 2 * len(horizons)), np.nan, dtype=np.float32)
    for piece in pieces:
        raw = _ahead(_log_growth(world, piece), horizons, scale.quiet, len(piece))
        y[piece.start : piece.stop] = (raw - scale.mean) / scale.sd
    return y


def last_values(world: World, pieces: Pieces, horizons: Sequence[int], scale: Scale) -> Floats32:
    """[R,N,K] scaled last values of the rows of `pieces`, one piece after the other.

    The value of the h bars up to t is the target of row t - h. A stretch may look back over the
    rows of its first window, which belong to it.
    """
    parts = []
    for piece in pieces:
        reach = range(piece.start - world.window + 1, piece.stop)
        ahead = _ahead(_log_growth(world, reach), horizons, scale.quiet, len(reach))
        last = np.full_like(ahead, np.nan)
        for k, h in enumerate((*horizons, *horizons)):
            last[h:, :, k] = ahead[: max(0, len(reach) - h), :, k]
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


def _ahead(level: Floats, horizons: Sequence[int], quiet: float, n_rows: int) -> Floats:
    """[R,N,K] unscaled targets of a stretch with log prices level[R,N]."""
    out = np.full((n_rows, level.shape[1], 2 * len(horizons)), np.nan)
    squares = np.diff(level, axis=0) ** 2
    for k, h in enumerate(horizons):
        if h >= n_rows:
            continue
        out[:-h, :, k] = level[h:] - level[:-h]
        usual = np.sqrt(sliding_window_view(squares, h, axis=0).mean(axis=-1))
        tiny = np.finfo(np.float64).tiny
        out[:-h, :, len(horizons) + k] = np.log(np.maximum(usual, max(quiet, tiny)))
    return out


def _all_of(parts: Sequence[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.empty((0, 0))


def fit_linear(world: World, pieces: Pieces, y: Floats32, reach: int) -> Floats:
    """Weights[P,K] of a ridge regression of y[T,N,K] on the flattened windows; the last: bias.

    Each target's strength is the best one on the last fifth of every stretch, for weights of the
    rows before it (so far before that their targets do not reach into it); then all rows are used.
    Only cells with every target take part.

    reach: bars of the longest horizon
    """
    n_weights = world.window * world.x.shape[2] + 1
    early, between, late = (_Moments(n_weights, y.shape[2]) for _ in range(3))
    for piece in pieces:
        cut = piece.stop - int(_HELD_OUT * len(piece))
        first = max(piece.start, cut - reach)
        parts = (range(piece.start, first), range(first, cut), range(cut, piece.stop))
        for moments, rows in zip((early, between, late), parts, strict=True):
            for some, flat in flat_windows(world, rows):
                moments.add(flat, y[some.start : some.stop].reshape(-1, y.shape[2]))
    whole = early.plus(between).plus(late)
    if late.count == 0 or early.count == 0:
        return whole.solve(_STRENGTHS[-1])
    tried = np.stack([late.loss(early.solve(strength)) for strength in _STRENGTHS])
    best = tried.argmin(axis=0)
    solved = {int(k): whole.solve(_STRENGTHS[int(k)]) for k in set(best.tolist())}
    return np.stack([solved[int(k)][:, target] for target, k in enumerate(best)], axis=1)


def linear_forecasts(world: World, pieces: Pieces, weights: Floats) -> Floats32:
    """[R,N,K] what the ridge says at the rows of `pieces`, one piece after the other."""
    small = weights.astype(np.float32)
    parts = [
        (flat @ small).reshape(len(some), world.n_assets, -1)
        for piece in pieces
        for some, flat in flat_windows(world, piece)
    ]
    return np.concatenate(parts)


def flat_windows(world: World, rows: range) -> Iterator[tuple[range, Floats32]]:
    """(some rows, their windows side by side and a one [len·N,P]), until all `rows` are done."""
    width = world.window * world.x.shape[2]
    step = max(1, _CHUNK_CELLS // (width * world.n_assets))
    for first in range(rows.start, rows.stop, step):
        some = range(first, min(first + step, rows.stop))
        x = np.asarray(world.x[some.start - world.window + 1 : some.stop])
        windows = sliding_window_view(x, world.window, axis=0).reshape(-1, width)
        yield some, np.concatenate([windows, np.ones((len(windows), 1), np.float32)], axis=1)


class _Moments:
    """Sums over cells that a least-squares fit and its loss are made of."""

    def __init__(self, n_weights: int, n_targets: int) -> None:
        self.count = 0
        self.gram = np.zeros((n_weights, n_weights))
        self.cross = np.zeros((n_weights, n_targets))
        self.squares = np.zeros(n_targets)

    def add(self, flat: Floats32, y: Floats32) -> None:
        known = np.isfinite(y).all(axis=1)
        if not known.all():
            flat, y = flat[known], y[known]
        self.count += len(y)
        self.gram += flat.T @ flat
        self.cross += flat.T @ y
        self.squares += (y.astype(np.float64) ** 2).sum(axis=0)

    def plus(self, other: _Moments) -> _Moments:
        total = _Moments(*self.cross.shape)
        total.count = self.count + other.count
        total.gram = self.gram + other.gram
        total.cross = self.cross + other.cross
        total.squares = self.squares + other.squares
        return total

    def solve(self, strength: float) -> Floats:
        """Weights[P,K], shrunk by `strength` but for the bias."""
        penalty = strength * np.diag(self.gram).copy()
        penalty[-1] = 0.0
        # Features that never move have no weight, whatever it would be.
        penalty += 1e-9 * max(float(penalty.max()), 1.0)
        return np.asarray(np.linalg.solve(self.gram + np.diag(penalty), self.cross))

    def loss(self, weights: Floats) -> Floats:
        """[K] mean squared error that `weights` have on these cells."""
        fitted = (weights * (self.gram @ weights)).sum(axis=0)
        return np.asarray(
            (fitted - 2.0 * (weights * self.cross).sum(axis=0) + self.squares) / self.count
        )


class Forecasts(NamedTuple):
    """Scaled forecasts[R,N,K] of the same rows, and what came: y[R,N,K], NaN where unknown."""

    y: Floats32
    encoder: Floats32
    linear: Floats32
    last: Floats32


def scores(forecasts: Forecasts, horizons: Sequence[int], seed: int) -> dict[str, Any]:
    """Name of a target → how the encoder and its rivals did, as JSON has it.

    mse: mean squared error, in units of the target's variance on the train window
    r2: share of the mean's squared error that a forecast saves
    over_linear, over_last, over_mean: the rival's squared error less the encoder's, with a 95 %
        interval over time; above zero: the encoder is better
    """
    reach = (*horizons, *horizons)
    return {
        name: _score(
            Forecasts(*(part[..., k] for part in forecasts)), reach[k], stream(seed, "scores", name)
        )
        for k, name in enumerate(target_names(horizons))
    }


def _score(one: Forecasts, horizon: int, rng: np.random.Generator) -> dict[str, Any]:
    """The score of one target, whose forecasts are [R,N]."""
    y, encoder, linear, last = one
    known = np.isfinite(y)
    if not known.any():
        return {"cells": 0}
    mean = np.zeros_like(y)
    said = {"encoder": encoder, "linear": linear, "last": last, "mean": mean}
    # The last value may be unknown where the target is not; all are compared on the same cells.
    both = known & np.isfinite(last)
    errors = {
        name: (np.where(both if name == "last" else known, y - part, np.nan)) ** 2
        for name, part in said.items()
    }
    mse = {name: _mean(error) for name, error in errors.items()}
    found: dict[str, Any] = {
        "cells": int(known.sum()),
        "mse": mse,
        "r2": {
            name: None if value is None or not mse["mean"] else 1.0 - value / mse["mean"]
            for name, value in mse.items()
            if name != "mean"
        },
    }
    for rival in ("linear", "last", "mean"):
        gain = errors[rival] - errors["encoder"]
        found[f"over_{rival}"] = _told(_over_time(gain, horizon, rng))
    return found


def _over_time(gain: Floats32, horizon: int, rng: np.random.Generator) -> MeanInterval:
    """Mean of gain[R,N] over its known cells; what happens to all assets at once counts once."""
    known = np.isfinite(gain)
    rows = known.any(axis=1)
    per_row = known.sum(axis=1)[rows]
    # Rows weigh by their cells, so that the estimate is the mean over cells.
    total = np.where(known, gain, 0.0).sum(axis=1, dtype=np.float64)[rows]
    share = per_row.mean() if len(per_row) else 1.0
    return mean_interval(total / share, rng, least_block=horizon)


def _told(interval: MeanInterval) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in interval._asdict().items()
    }


def _mean(errors: Floats32) -> float | None:
    return float(np.nanmean(errors, dtype=np.float64)) if np.isfinite(errors).any() else None


def beats(score: Mapping[str, Any], rival: str) -> bool:
    """Whether the encoder is better than a rival, the whole interval above zero."""
    low = score.get(f"over_{rival}", {}).get("low")
    return low is not None and low > 0.0
