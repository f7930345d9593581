"""Cross-fitting: each block of the train window scored by an encoder that was fitted without it.

Axes: `T` rows of the world, `N` assets, `K` targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from echelon.agents.encoder_training import RUN_BARS, Descent, draw_encoder, served_encoder
from echelon.agents.outcomes import Pieces, Targets, fit_scale, outcomes
from echelon.agents.tables import encode_span
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import DataError
from echelon.models.encoders import Encoder
from echelon.ops.ranks import rank_ic
from echelon.rng import global_draws, stream
from echelon.types import Floats32


class FoldPieces(NamedTuple):
    """Rows of a block of the train window, and those an encoder may be fitted on to score them."""

    held: tuple[range, ...]
    fitted: tuple[range, ...]


def purged_bars(config: Config) -> int:
    """Bars on each side of a block that its encoder is not fitted on.

    A window of features reaches back, a target ahead: with both left out, nothing that is fitted on
    shares a bar with what the block's rows see, nor with what comes of them.
    """
    return config.window + Targets.from_config(config.pretrain).reach


def cut_folds(pieces: Pieces, n_folds: int, purge: int) -> list[FoldPieces]:
    """The rows of the train window in blocks of equal length, in order of time."""
    total = sum(len(piece) for piece in pieces)
    bounds = [total * k // n_folds for k in range(n_folds + 1)]
    starts = np.cumsum([0, *(len(piece) for piece in pieces)]).tolist()
    folds = []
    for low, high in pairwise(bounds):
        held: list[range] = []
        fitted: list[range] = []
        for piece, start in zip(pieces, starts, strict=False):
            a, b = (
                min(max(piece.start + at - start, piece.start), piece.stop) for at in (low, high)
            )
            if a == b:
                fitted.append(piece)
                continue
            held.append(range(a, b))
            fitted += [range(piece.start, a - purge), range(b + purge, piece.stop)]
        # What holds no run of rows teaches little, and would shorten all the others.
        longest = max((len(rows) for rows in fitted), default=0)
        kept = tuple(rows for rows in fitted if rows and len(rows) >= min(RUN_BARS, longest))
        if not kept or not held:
            raise DataError(
                f"pretrain.cross_fit={n_folds}: the train window has {total} bars, and a block of "
                f"{high - low} of them with {purge} on each side leaves nothing to fit on. Take "
                "fewer blocks, a shorter window or horizon, or lengthen split.train."
            )
        folds.append(FoldPieces(tuple(held), kept))
    return folds


def fit_fold(
    config: Config,
    world: World,
    block: FoldPieces,
    passes: int,
    name: tuple[int, int],
    should_stop: Callable[[], bool],
) -> Encoder | None:
    """The encoder of one block, fitted without it; name: seed and number; None: stopped."""
    seed, number = name
    targets = Targets.from_config(config.pretrain)
    with global_draws(seed, "pretrain", number):
        encoder = draw_encoder(config, world, block.fitted)
        y = outcomes(world, block.fitted, targets, fit_scale(world, block.fitted, targets))
        rng = stream(seed, "pretrain", "batches", number)
        descent = Descent(config, world, block.fitted, y, encoder, rng)
        for _ in range(passes):
            if descent.run_pass(should_stop) is None:
                return None
        descent.put(descent.mean)
        return served_encoder(config, descent.net)


def mean_ics(
    world: World, served: Encoder, y: Floats32, names: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Name of a target → mean rank IC on the train window, in sample and out of fold."""
    ics: dict[str, dict[str, float | None]] = {name: {} for name in names}
    rows = np.concatenate([np.arange(fold.rows.start, fold.rows.stop) for fold in served.folds])
    for kind in ("in_sample", "out_of_fold"):
        scores = [
            encode_span(served if kind == "in_sample" else fold.encoder, world, fold.rows)
            for fold in served.folds
        ]
        z = torch.cat(scores).double().numpy()
        for k, name in enumerate(names):
            daily = rank_ic(z[..., k], y[rows, :, k].astype(np.float64))
            known = daily[np.isfinite(daily)]
            ics[name][kind] = float(known.mean()) if len(known) else None
    return ics
