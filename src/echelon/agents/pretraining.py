"""Pre-training of an encoder: how it learns to foresee, and whom it has to beat.

1. The encoder looks at the train window's features (`Encoder.fit`), then each pass goes over all
   train rows, or over `pretrain.pass_rows` of them by lot, in shuffled runs of neighbouring rows:
   a run shares the rows of its windows.
2. A linear head on the embedding foretells the targets of `agents.outcomes` for every horizon.
   Linear, so that what is known about the future lies open in the embedding. Returns and
   volatilities are learned by squared error, ranks by `pretrain.loss`.
3. A quarter of the runs is encoded a second time with a share of the rows hidden (zeroed), and a
   linear decoder has to tell them from the embedding of the window. With a tenth of the weight:
   with all of it, the forecasts lose half of their lead over a linear model on the planted trend.
4. AdamW on the sum. What is kept and judged is the running mean of the weights: forecasts of
   returns are nearly all noise, and so is the last step of any optimizer.
5. After each pass the loss on the first half of the validation window; the best weights so far are
   kept, and `pretrain.patience` passes without better ones end it.
6. On the other half, which has chosen nothing, the encoder is compared with its rivals
   (`agents.foresight`): the mean of the train window; the last value (of the h bars up to t); a
   ridge regression on the same features, all W rows of the window side by side; and, of ranks,
   boosted trees on the features of the row.

With `pretrain.cross_fit` agents stand on the forecasts, not on the embedding. Those of the rows an
encoder was fitted on are better than any that come later, and who learns to trade on them trades
too much. So the train window is cut into K blocks, and for each an encoder is fitted on the others,
without the rows next to the block: as many passes as were best for the one fitted on all of it. A
block's rows are scored by its own encoder (`Encoder.folds`), all others by the one.

The encoder of a run is made once and kept on disk (`ensure_encoder`), for whoever stands on it:

    RUN/encoder/weights.safetensors    the encoder's tensors, and those of the folds
    RUN/encoder/encoder.json           what it was made of, hashes, how pre-training went

Axes: `T` rows of the world, `R` rows of some stretches, `N` assets, `F` features, `W` window, `K`
targets, `P` = W·F + 1; `G` runs, `S` rows of a run and of the window before it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from echelon.agents.cross_fit import cut_folds, fit_fold, mean_ics, purged_bars
from echelon.agents.encoder_training import (
    RUN_BARS,
    Descent,
    clones,
    draw_encoder,
    forecast_loss,
    row_chunks,
    rows_behind,
    served_encoder,
)
from echelon.agents.foresight import (
    Forecasts,
    boosted_forecasts,
    fit_linear,
    linear_forecasts,
    scores,
)
from echelon.agents.outcomes import Pieces, Targets, fit_scale, last_values, outcomes
from echelon.agents.tables import encode_span
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import DamagedError, DataError, StoreError, shorten
from echelon.files import (
    check_tree,
    exclusive_lock,
    json_line,
    recover_directory,
    standing_directory,
)
from echelon.models.encoders import Encoder, Fold, build_served
from echelon.rng import global_draws, stream
from echelon.runs.checkpoint import below_prefix, with_prefix
from echelon.runs.tensor_files import TensorFiles
from echelon.types import Bools, Floats32

_FILES = TensorFiles("weights.safetensors", "encoder.json", "encoder", 1, "another directory")
_NAME = "encoder"
_FOLDS = "folds."
_FOLD = _FOLDS + "{}."


class Origin(NamedTuple):
    """What an encoder was made of."""

    config: str
    n_features: int
    data: str
    seed: int

    @staticmethod
    def from_config(config: Config, n_features: int, data: str, seed: int) -> Origin:
        """config: its hash is of the parts that pre-training depends on"""
        tree = config.model_dump(mode="json")
        sections = ("window", "features", "normalization", "split", "pretrain")
        of_model = ("encoder", "d_model", "n_layers", "dropout", "periods", "n_periods", "direct")
        parts = {name: tree[name] for name in sections}
        parts["model"] = {name: tree["model"][name] for name in of_model}
        text = json_line(parts, sort_keys=True, allow_nan=True)
        return Origin(hashlib.sha256(text.encode()).hexdigest(), n_features, data, seed)


class EncoderDocument(TypedDict):
    """What encoder.json says besides versions; facts: see `Pretrained`."""

    origin: Origin
    facts: dict[str, Any]
    tensors_sha256: str


def write_encoder(
    directory: Path, origin: Origin, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    target = directory / _NAME
    try:
        recover_directory(target)
        document = {"origin": origin._asdict(), "facts": dict(facts)}
        _FILES.write(target, tensors, document, allow_nan=False)
    except OSError as error:
        raise StoreError(
            f"{target}: the pre-trained encoder cannot be written ({error.strerror or error}). "
            "Make room or mend the disk, then start again."
        ) from error


def read_encoder(
    directory: Path, origin: Origin
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """(tensors, facts), made of `origin` or refused; None where there is nothing."""
    path = standing_directory(directory / _NAME)
    if path is None:
        return None
    file, remedy = path / _FILES.document, _remedy(path)
    document, data = _FILES.read(path, remedy)
    written = check_tree(document, EncoderDocument, file, remedy)
    words = {
        "config": "configuration (window, features, normalization, split, model, pretrain)",
        "n_features": "number of features",
        "data": "data",
        "seed": "seed",
    }
    for name, there, here in zip(Origin._fields, written["origin"], origin, strict=True):
        if there != here:
            raise StoreError(
                f"{file}: the encoder was pre-trained with another {words[name]}: "
                f"{shorten(there)[:12]}, expected {str(here)[:12]}. Go on with what it was made "
                "of, or use another directory."
            )
    return _FILES.unpack(data, path, remedy), written["facts"]


def read_encoder_document(directory: Path) -> EncoderDocument | None:
    """What is known of the encoder of a run, checked; None where it has none."""
    path = standing_directory(directory / _NAME)
    if path is None:
        return None
    document = _FILES.read_document(path, _remedy(path))
    return check_tree(document, EncoderDocument, path / _FILES.document, _remedy(path))


@dataclass(frozen=True)
class Pretrained:
    """A base encoder, in evaluation mode, and what is known about it.

    facts: as JSON has it; `enabled`, and where that is true `epochs`, `best_epoch`, `ending`,
        `train_loss`, `valid_loss` (one per pass), `cells`, `masked_r2` and `scores`; where it is
        cross-fitted `folds` (rows of each) and `cross_fit` (mean rank IC on the train window)
    """

    encoder: Encoder
    facts: Mapping[str, Any]


def pretrain(
    config: Config,
    world: World,
    seed: int,
    *,
    valid: World | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Pretrained | None:
    """Pre-train the encoder; valid: a world of its own for the validation window; None: stopped."""
    torch.set_num_threads(config.train.threads)
    pieces = world.spans("train")
    with global_draws(seed, "pretrain"):
        encoder = draw_encoder(config, world, pieces)
        if not config.pretrain.enabled:
            return Pretrained(encoder.eval(), {"enabled": False})
        training = Pretraining(config, world, valid or world, encoder, seed)
        facts = training.run(should_stop)
        if facts is None:
            return None
        served = served_encoder(config, training.net)
    if config.pretrain.cross_fit:
        blocks = cut_folds(pieces, config.pretrain.cross_fit, purged_bars(config))
        fits = []
        for k, block in enumerate(blocks):
            fit = fit_fold(config, world, block, facts["best_epoch"], (seed, k), should_stop)
            if fit is None:
                return None
            fits.append(fit)
        facts["folds"] = [[[rows.start, rows.stop] for rows in block.held] for block in blocks]
        served.folds = _folds(facts["folds"], fits)
        facts["cross_fit"] = mean_ics(world, served, training.y, training.targets.names)
    return Pretrained(served, facts)


def ensure_encoder(
    config: Config,
    world: World,
    directory: Path,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    valid: World | None = None,
    data: str,
) -> Pretrained | None:
    """The encoder of `directory`, pre-trained now if it has none; None: stopped before the end.

    Processes that ask for the same one wait for whoever is at it. Made of another configuration,
    data (by its hash) or seed, it is refused.
    """
    n_features = world.x.shape[2]
    origin = Origin.from_config(config, n_features, data, seed)
    with exclusive_lock(directory / ".encoder.lock", f"the encoder in {directory}", wait=True):
        stored = read_encoder(directory, origin)
        if stored is None:
            made = pretrain(config, world, seed, valid=valid, should_stop=should_stop)
            if made is not None:
                write_encoder(directory, origin, _tensors_of(made.encoder), made.facts)
            return made
        torch.set_num_threads(config.train.threads)
        tensors, facts = stored
        try:
            encoder = _load_encoder(config, n_features, tensors, "")
            fits = [
                _load_encoder(config, n_features, tensors, _FOLD.format(k))
                for k in range(len(facts.get("folds", ())))
            ]
        except RuntimeError as error:
            path = directory / _NAME
            what = f"of another network: {error}"
            raise DamagedError(path / _FILES.tensors, what, _remedy(path)) from None
        encoder.folds = _folds(facts.get("folds", ()), fits)
        return Pretrained(encoder, facts)


def _tensors_of(encoder: Encoder) -> dict[str, Tensor]:
    """Those of the encoder and, under names of their own, of its folds."""
    tensors = encoder.state_dict()
    fits = dict.fromkeys(fold.encoder for fold in encoder.folds)
    for k, fit in enumerate(fits):
        tensors |= with_prefix(_FOLD.format(k), fit.state_dict())
    return tensors


def _load_encoder(
    config: Config, n_features: int, tensors: Mapping[str, Tensor], prefix: str
) -> Encoder:
    with torch.random.fork_rng(devices=[]):  # drawing weights would move the caller's generator
        encoder = build_served(config, n_features)
    own = below_prefix(prefix, tensors)
    if not prefix:
        own = {name: tensor for name, tensor in own.items() if not name.startswith(_FOLDS)}
    encoder.load_state_dict(own)
    return encoder.eval()


def _folds(rows: Sequence[Sequence[Sequence[int]]], fits: Sequence[Encoder]) -> tuple[Fold, ...]:
    """rows: of each fit, the stretches [first, stop) that it scores"""
    return tuple(
        Fold(range(*ends), fit) for held, fit in zip(rows, fits, strict=True) for ends in held
    )


def _remedy(path: Path) -> str:
    return f"Remove the directory {path}, and it is pre-trained again."


class Pretraining:
    def __init__(
        self, config: Config, world: World, valid: World, encoder: Encoder, seed: int
    ) -> None:
        self.config, self.seed, self.world, self.valid = config, seed, world, valid
        self.targets = Targets.from_config(config.pretrain)
        self.train_pieces = world.spans("train")
        self.stop_pieces, self.score_pieces = _halves(valid.spans("valid"))
        for a, b in product(self.train_pieces, valid.spans("valid") if valid is world else ()):
            if a.start < b.stop and b.start < a.stop:
                raise DataError(
                    f"the train window (rows {a.start} to {a.stop - 1}) and the validation window "
                    f"({b.start} to {b.stop - 1}) overlap, so nothing would be out of sample. "
                    "Keep split.train and split.valid apart, or hand in a validation world."
                )
        self.scale = fit_scale(world, self.train_pieces, self.targets)
        self.y = outcomes(world, self.train_pieces, self.targets, self.scale)
        stop = outcomes(valid, self.stop_pieces, self.targets, self.scale)
        self.y_stop = _rows(stop, self.stop_pieces)
        if not np.isfinite(self.y_stop).any():
            raise DataError(
                f"pretrain.horizons={list(self.targets.horizons)}: the first half of the "
                f"validation window, {len(self.y_stop)} bars, holds no such target to stop by. "
                "Lengthen split.valid or shorten the horizons."
            )
        rng = stream(seed, "pretrain", "batches")
        self.descent = Descent(config, world, self.train_pieces, self.y, encoder, rng)
        self.net = self.descent.net

    def run(self, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train to the end, compare with the rivals, say how it went; None: stopped."""
        facts = self.fit(should_stop)
        return None if facts is None else facts | self._compare()

    def fit(self, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train to the end and leave the best weights; None: stopped."""
        settings, descent = self.config.pretrain, self.descent
        best, best_epoch, best_weights = math.inf, 0, descent.mean
        train_losses: list[float] = []
        valid_losses: list[float] = []
        for epoch in range(1, settings.epochs + 1):
            loss = descent.run_pass(should_stop)
            if loss is None:
                return None
            own = clones(descent.weights)
            descent.put(descent.mean)
            said = self._forecasts(self.valid, self.stop_pieces)
            descent.put(own)
            valid_losses.append(_loss(said, self.y_stop, self.targets.ranked, settings.loss))
            train_losses.append(loss)
            if valid_losses[-1] < best:
                best, best_epoch, best_weights = valid_losses[-1], epoch, clones(descent.mean)
            if epoch - best_epoch >= settings.patience:
                break
        descent.put(best_weights)
        return {
            "enabled": True,
            "epochs": len(valid_losses),
            "best_epoch": best_epoch,
            "ending": "done" if len(valid_losses) == settings.epochs else "patience",
            "train_loss": train_losses,
            "valid_loss": valid_losses,
        }

    @torch.no_grad()
    def _forecasts(self, world: World, pieces: Pieces) -> Floats32:
        """[R,N,K] forecasts of the rows of `pieces`, one piece after the other."""
        self.net.eval()
        return np.concatenate(
            [encode_span(self.net.forecast, world, piece).numpy() for piece in pieces]
        )

    @torch.no_grad()
    def _masked_r2(self) -> float | None:
        """Share of the hidden rows' squares that is predicted, on the scoring half, if any."""
        if not self.config.pretrain.masked_share:
            return None
        self.net.eval()
        rng = stream(self.seed, "pretrain", "hidden")
        error, square = 0.0, 0.0
        for rows in row_chunks(self.score_pieces, RUN_BARS):
            x = torch.from_numpy(rows_behind(self.valid, rows, self.valid.x))[None]
            part = self.descent.mask(self.valid, [rows], x, rng)
            error, square = error + float(part.error), square + float(part.square)
        return 1.0 - error / square if square else None

    def _compare(self) -> dict[str, Any]:
        """The encoder at its best weights against its rivals, on the scoring half."""
        targets, pieces = self.targets, self.score_pieces
        linear = fit_linear(self.world, self.train_pieces, self.y, targets.reach)
        forecasts = Forecasts(
            y=_rows(outcomes(self.valid, pieces, targets, self.scale), pieces),
            encoder=self._forecasts(self.valid, pieces),
            linear=linear_forecasts(self.valid, pieces, linear),
            last=last_values(self.valid, pieces, targets, self.scale),
            boosted=boosted_forecasts(
                self.world, self.train_pieces, self.y, self.valid, pieces, targets, self.seed
            ),
        )
        known = {"train": self.y, "stop": self.y_stop, "score": forecasts.y}
        return {
            "cells": {k: int(np.isfinite(y).any(axis=2).sum()) for k, y in known.items()},
            "masked_r2": self._masked_r2(),
            "scores": scores(forecasts, targets, self.seed),
        }


def _loss(said: Floats32, y: Floats32, ranked: Bools, kind: str) -> float:
    said_wide, y_wide = (torch.from_numpy(part.astype(np.float64)) for part in (said, y))
    return float(forecast_loss(said_wide, y_wide, ranked, kind))


def _rows(values: Floats32, pieces: Pieces) -> Floats32:
    return np.concatenate([values[piece.start : piece.stop] for piece in pieces])


def _halves(pieces: Pieces) -> tuple[Pieces, Pieces]:
    """(to stop by, to score on): of several stretches half of them each, of one its two halves."""
    if len(pieces) > 1:
        middle = len(pieces) // 2
        return pieces[:middle], pieces[middle:]
    (piece,) = pieces
    cut = piece.start + len(piece) // 2
    return (range(piece.start, cut),), (range(cut, piece.stop),)
