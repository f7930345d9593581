"""Who foresees better: an encoder's forecasts against those of its rivals, on the same cells.

Returns and volatilities are judged by squared error; ranks by the daily rank IC (`ops.ranks`), as
who trades on scores needs their order and nothing else. Rivals are fitted on the train window:

    linear    ridge regression on the window's features, all W rows side by side
    boosted   boosted trees on the features of the row, for each rank target
    last      the value of the h bars up to t; mean: that of the train window

Axes: `R` rows of some stretches, `N` assets, `F` features, `W` window, `K` targets, `P` = W·F + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from echelon.agents.outcomes import Pieces, Targets
from echelon.envs.world import World
from echelon.ops.blocks import MeanInterval, mean_interval
from echelon.ops.ranks import compare_ic, ic_summary, rank_ic
from echelon.ops.ridge import Moments, fit_ridge
from echelon.ops.trees import fit_trees, predict_trees
from echelon.rng import stream
from echelon.types import Floats, Floats32

_CHUNK_CELLS = 4_000_000
"""Numbers of flattened windows that are held at a time: 16 MB."""
_RIDGE_WORK = 2e11
"""Products that the ridge's sums may take; of more, it sees one chunk of rows in several."""
_TREES = 150
_TREE_CELLS = 250_000
"""Cells that trees are grown on at most: rows at an even distance."""


def fit_linear(world: World, pieces: Pieces, y: Floats32, reach: int) -> Floats:
    """Weights[P,K] of a ridge regression of y[T,N,K] on the flattened windows; the last: bias.

    Each target's strength is the best one on the last fifth of every stretch, for weights of the
    rows before it, without the `reach` bars whose targets reach into it; then all rows are used.
    Only cells with every target take part.
    """
    n_weights = world.window * world.x.shape[2] + 1
    work = sum(len(piece) for piece in pieces) * world.n_assets * n_weights**2
    every = math.ceil(work / _RIDGE_WORK)
    early, between, late = (Moments(n_weights, y.shape[2]) for _ in range(3))
    for piece in pieces:
        cut = piece.stop - len(piece) // 5
        first = max(piece.start, cut - reach)
        parts = (range(piece.start, first), range(first, cut), range(cut, piece.stop))
        for moments, rows in zip((early, between, late), parts, strict=True):
            for some, flat in flat_windows(world, rows, every):
                moments.add(flat, y[some.start : some.stop].reshape(-1, y.shape[2]))
    return fit_ridge(early, between, late)


def linear_forecasts(world: World, pieces: Pieces, weights: Floats) -> Floats32:
    """[R,N,K] what the ridge says at the rows of `pieces`, one piece after the other."""
    small = weights.astype(np.float32)
    said = [flat @ small for piece in pieces for _, flat in flat_windows(world, piece)]
    return np.concatenate(said).reshape(-1, world.n_assets, weights.shape[1])


def flat_windows(world: World, rows: range, every: int = 1) -> Iterator[tuple[range, Floats32]]:
    """(some rows, their windows side by side and a one [len·N,P]), until all `rows` are done.

    every: of so many chunks of rows one is given
    """
    width = world.window * world.x.shape[2]
    step = max(1, _CHUNK_CELLS // (width * world.n_assets))
    for first in range(rows.start, rows.stop, step * every):
        some = range(first, min(first + step, rows.stop))
        x = np.asarray(world.x[some.start - world.window + 1 : some.stop])
        windows = sliding_window_view(x, world.window, axis=0).reshape(-1, width)
        yield some, np.concatenate([windows, np.ones((len(windows), 1), np.float32)], axis=1)


def boosted_forecasts(
    world: World,
    train: Pieces,
    y: Floats32,
    where: World,
    pieces: Pieces,
    targets: Targets,
    seed: int,
) -> Floats32:
    """[R,N,K] what trees grown on y[T,N,K] of `train` say at `pieces` of another world or this.

    NaN for targets that are no ranks, and where an asset is absent.
    """
    shape = (sum(len(piece) for piece in pieces), where.n_assets, y.shape[2])
    said = np.full(shape, np.nan, dtype=np.float32)
    rows = np.concatenate([np.arange(piece.start, piece.stop) for piece in train])
    at = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
    for k in np.flatnonzero(targets.ranked).tolist():
        known = np.isfinite(y[rows, :, k])
        some = rows[:: max(1, math.ceil(known.sum() / _TREE_CELLS))]
        known = np.isfinite(y[some, :, k])
        x = np.ascontiguousarray(world.x[some][known])
        trees = fit_trees(x, y[some, :, k][known].astype(np.float64), trees=_TREES, seed=seed)
        for row, out in zip(at.tolist(), said, strict=True):
            present = where.present[row]
            out[present, k] = predict_trees(np.ascontiguousarray(where.x[row][present]), trees)
    return said


class Forecasts(NamedTuple):
    """Scaled forecasts[R,N,K] of the same rows, and what came: y[R,N,K], NaN where unknown."""

    y: Floats32
    encoder: Floats32
    linear: Floats32
    last: Floats32
    boosted: Floats32


def scores(forecasts: Forecasts, targets: Targets, seed: int) -> dict[str, Any]:
    """Name of a target → how the encoder and its rivals did, as JSON has it. Of a rank:

    ic, icir: mean daily rank IC of each, and that over its standard deviation from day to day
    interval: of the encoder's mean
    over_linear, over_boosted: the encoder's daily IC minus the rival's of the same day

    Of any other:

    mse: mean squared error, in units of the target's variance on the train window
    r2: share of the mean's squared error that a forecast saves
    over_linear, over_last, over_mean: the rival's squared error less the encoder's

    All intervals are of 95 %, over time; above zero: the encoder is better.
    """
    scored = {}
    for k, (kind, horizon) in enumerate(targets.of_each):
        name = targets.names[k]
        own = Forecasts(*(part[..., k] for part in forecasts))
        score = _score_ranks if kind == "rank" else _score
        scored[name] = score(own, horizon, stream(seed, "scores", name))
    return scored


def _score_ranks(forecasts: Forecasts, horizon: int, rng: np.random.Generator) -> dict[str, Any]:
    """The score of one rank target, whose forecasts are [R,N]."""
    y = forecasts.y.astype(np.float64)
    said = {name: getattr(forecasts, name) for name in ("encoder", "linear", "boosted")}
    daily = {name: rank_ic(part.astype(np.float64), y) for name, part in said.items()}
    summaries = {name: ic_summary(ic, rng, horizon=horizon) for name, ic in daily.items()}
    if not summaries["encoder"].days:
        return {"cells": 0}
    score: dict[str, Any] = {
        "cells": int(np.isfinite(y).sum()),
        "days": summaries["encoder"].days,
        "ic": {name: _number(own.mean.estimate) for name, own in summaries.items()},
        "icir": {name: _number(own.icir) for name, own in summaries.items()},
        "interval": _json_interval(summaries["encoder"].mean),
    }
    for rival in ("linear", "boosted"):
        gain = compare_ic(daily["encoder"], daily[rival], rng, horizon=horizon)
        score[f"over_{rival}"] = _json_interval(gain)
    return score


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _json_interval(interval: MeanInterval) -> dict[str, float | None]:
    return {name: _number(value) for name, value in interval._asdict().items()}


def _score(forecasts: Forecasts, horizon: int, rng: np.random.Generator) -> dict[str, Any]:
    """The score of one target, whose forecasts are [R,N]."""
    y, encoder, linear, last, _ = forecasts
    known = np.isfinite(y)
    if not known.any():
        return {"cells": 0}
    said = {"encoder": encoder, "linear": linear, "last": last, "mean": np.zeros_like(y)}
    # The last value may be unknown where the target is not; all are compared on the same cells.
    both = known & np.isfinite(last)
    errors = {
        name: (np.where(both if name == "last" else known, y - part, np.nan)) ** 2
        for name, part in said.items()
    }
    mse = {
        name: float(np.nanmean(error, dtype=np.float64)) if np.isfinite(error).any() else None
        for name, error in errors.items()
    }
    score: dict[str, Any] = {
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
        cells = np.isfinite(gain)
        rows = cells.any(axis=1)
        # By rows: what happens to all assets at once counts once. They weigh by their cells, so
        # that the estimate is the mean over cells.
        per_row = cells.sum(axis=1)[rows]
        total = np.where(cells, gain, 0.0).sum(axis=1, dtype=np.float64)[rows]
        share = per_row.mean() if len(per_row) else 1.0
        interval = mean_interval(total / share, rng, least_block=horizon)
        score[f"over_{rival}"] = _json_interval(interval)
    return score


def summary(facts: Mapping[str, Any]) -> list[str]:
    """Lines for a display: did the encoder foresee more than its rivals, out of sample?"""
    if not facts["enabled"]:
        return ["encoder: as drawn, not pre-trained (pretrain.enabled=false)"]
    lines = [
        f"encoder: best of {facts['epochs']} passes is no. {facts['best_epoch']}; out of sample "
        "(second half of validation):"
    ]
    scores = [(*name.rsplit("_", 1), score) for name, score in facts["scores"].items()]
    for kind, bars, score in sorted(scores, key=lambda item: (item[0], int(item[1]))):
        what = f"  {kind} over {bars} bar{'' if bars == '1' else 's'}: "
        if not score["cells"]:
            lines.append(f"{what}no data")
            continue
        if "ic" in score:
            lines.append(what + _rank_line(score))
            continue
        r2 = score["r2"]
        last = "n/a" if r2["last"] is None else f"{100 * r2['last']:.2f} %"
        lines.append(
            f"{what}R² {100 * r2['encoder']:.2f} % (linear {100 * r2['linear']:.2f} %, last value "
            f"{last}); {_verdict(score)}"
        )
    return lines


def _rank_line(score: Mapping[str, Any]) -> str:
    shown = {
        part: {k: "n/a" if v is None else f"{v:.3f}" for k, v in score[part].items()}
        for part in ("ic", "icir")
    }
    rivals = ", ".join(f"{name} {shown['ic'][name]}" for name in ("linear", "boosted"))
    return (
        f"rank IC {shown['ic']['encoder']}, ICIR {shown['icir']['encoder']} a day ({rivals}); "
        f"{_verdict(score)}"
    )


def _verdict(score: Mapping[str, Any]) -> str:
    """Which rivals the encoder is better than, not distinguished from, worse than."""
    words = ("better than", "not distinguished from", "worse than")
    verdicts: dict[str, list[str]] = {word: [] for word in words}
    for rival in ("linear", "boosted", "last", "mean"):
        interval = score.get(f"over_{rival}") or {}
        if interval.get("low") is None:
            continue
        place = 0 if interval["low"] > 0.0 else 2 if interval["high"] < 0.0 else 1
        verdicts[words[place]].append(rival)
    parts = [f"{word} {' and '.join(rivals)}" for word, rivals in verdicts.items() if rivals]
    return ", ".join(parts) or "too few bars to compare them"
