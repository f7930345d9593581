"""One encoder's pre-training, pass by pass.

1. The encoder looks at the train window's features (`Encoder.fit`), then each pass goes over all
   train rows, or over `pretrain.pass_rows` of them by lot, in shuffled runs of neighbouring rows:
   a run shares the rows of its windows.
2. A linear head on the embedding foretells the targets of `agents.forecast` for every horizon.
   Linear, so that what is known about the future lies open in the embedding.
3. In a quarter of the runs, encoded a second time, a share of the rows is hidden (zeroed), and a
   linear decoder has to tell them from the embedding of the window. A window has one embedding,
   so this asks it to remember what is in it. In a pass of its own: targets foretold from windows
   with holes would be foretold worse. With a tenth of the weight: with all of it, the forecasts
   lose half of their lead over a linear model on the planted trend.
4. AdamW on the sum. What is kept and judged is the running mean of the weights: forecasts of
   returns are nearly all noise, and so is the last step of any optimizer.
5. After each pass the loss on the first half of the validation window; the best weights so far are
   kept, and `pretrain.patience` passes without better ones end it.
6. On the other half, which has chosen nothing, the encoder is compared with its rivals: a ridge
   regression on the same windows, the last value, the mean.

Axes: `G` runs, `S` rows of a run and of the window before it, `N` assets, `F` features, `W` window,
`R` rows, `K` targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.agents.forecast import (
    Forecasts,
    Pieces,
    fit_linear,
    fit_scale,
    last_values,
    linear_forecasts,
    outcomes,
    scores,
)
from echelon.agents.jobs import Report, ShouldStop
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import DataError, TrainingError
from echelon.models.encoders import Encoder
from echelon.rng import stream
from echelon.types import Floats32

_RUN_BARS = 16
"""Neighbouring rows that are encoded together."""
_MASKED_RUNS = 4
"""One run in so many is encoded a second time, with rows hidden."""
_MASKED_WEIGHT = 0.1
_AVERAGED_STEPS = 500
"""Steps over which the running mean of the weights forgets."""
_GRAD_CLIP = 1.0
_CHUNK_BARS = 256


@dataclass(frozen=True)
class PretrainProgress:
    """Where pre-training stands after a pass, for whoever watches; losses: 1 is the mean's."""

    seed: int
    epoch: int
    epochs: int
    train_loss: float
    valid_loss: float
    best: float


class MaskedErrors(NamedTuple):
    """Sums over hidden cells: squared error, square of what was hidden, number."""

    error: Tensor
    square: Tensor
    cells: Tensor


class Forecaster(nn.Module):
    """The encoder, what it foretells, and what it remembers of hidden rows."""

    def __init__(self, encoder: Encoder, n_targets: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.ahead = nn.Linear(encoder.d_model, n_targets)
        self.hidden = nn.Linear(encoder.d_model, encoder.window * encoder.n_features)
        nn.init.zeros_(self.ahead.weight)  # the first forecast is the mean
        nn.init.zeros_(self.ahead.bias)

    def forecast(self, x: Tensor) -> Tensor:
        """x[..,S,N,F] -> scaled forecasts[..,S-W+1,N,K]."""
        said: Tensor = self.ahead(self.encoder(x))
        return said

    def masked_errors(self, x: Tensor, hide: Tensor, present: Tensor, sd: Tensor) -> MaskedErrors:
        """Errors on the rows that `hide`[G,S,N] says, as sums over windows, rows and features.

        x[G,S,N,F]; present[G,S,N]: who has features; sd[F]: their deviations on the train window
        """
        window = self.encoder.window
        z = self.encoder(torch.where(hide[..., None], 0.0, x))
        told = self.hidden(z).unflatten(-1, (window, -1))
        wanted = (x / sd).unfold(1, window, 1).transpose(-1, -2)
        counted = (hide & present).unfold(1, window, 1)[..., None]
        n = counted.sum() * x.shape[-1]
        error = torch.where(counted, told - wanted, 0.0).square().sum()
        return MaskedErrors(error, torch.where(counted, wanted, 0.0).square().sum(), n)


class Pretraining:
    """One encoder's pre-training."""

    def __init__(
        self, config: Config, world: World, valid: World, encoder: Encoder, seed: int
    ) -> None:
        self.config, self.seed = config, seed
        self.world, self.valid = world, valid
        horizons = config.pretrain.horizons
        self.train_pieces = world.spans("train")
        self.stop_pieces, self.score_pieces = _halves(valid.spans("valid"))
        if valid is world:
            _refuse_overlap(self.train_pieces, valid.spans("valid"))
        self.scale = fit_scale(world, self.train_pieces, horizons)
        self.y = outcomes(world, self.train_pieces, horizons, self.scale)
        self.y_stop = _rows(
            outcomes(valid, self.stop_pieces, horizons, self.scale), self.stop_pieces
        )
        if not np.isfinite(self.y_stop).any():
            raise DataError(
                f"pretrain.horizons={list(horizons)}: the first half of the validation window, "
                f"{len(self.y_stop)} bars, holds no such target to stop by. Lengthen split.valid "
                "or shorten the horizons."
            )
        self.feature_sd = torch.from_numpy(_feature_sd(world, self.train_pieces))
        self.net = Forecaster(encoder, self.y.shape[2])
        self.rng = stream(seed, "pretrain", "batches")

    def run(self, report: Report, should_stop: ShouldStop) -> dict[str, Any] | None:
        """Train to the end and compare with the rivals: the facts; None: stopped.

        Leaves the encoder at its best weights.
        """
        settings = self.config.pretrain
        weights: list[Tensor] = list(self.net.parameters())
        optimizer = torch.optim.AdamW(
            weights, lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        mean = _RunningMean(weights)
        best, best_epoch, best_weights = math.inf, 0, mean.values
        train_losses: list[float] = []
        valid_losses: list[float] = []
        for epoch in range(1, settings.epochs + 1):
            losses = []
            self.net.train()
            for batch in self._batches():
                if should_stop():
                    return None
                losses.append(self._step(batch, optimizer, weights))
                mean.add(weights)
            with mean.in_place_of(weights):
                valid_losses.append(
                    _loss(self._forecasts(self.valid, self.stop_pieces), self.y_stop)
                )
            train_losses.append(float(np.mean(losses)))
            if valid_losses[-1] < best:
                best, best_epoch = valid_losses[-1], epoch
                best_weights = [value.clone() for value in mean.values]
            report(
                PretrainProgress(
                    self.seed, epoch, settings.epochs, train_losses[-1], valid_losses[-1], best
                )
            )
            if epoch - best_epoch >= settings.patience:
                break
        with torch.no_grad():
            torch._foreach_copy_(weights, best_weights)
        return {
            "enabled": True,
            "epochs": len(valid_losses),
            "best_epoch": best_epoch,
            "ending": "done" if len(valid_losses) == settings.epochs else "patience",
            "train_loss": train_losses,
            "valid_loss": valid_losses,
            **self._compare(),
        }

    def _batches(self) -> Iterator[list[range]]:
        """Runs of neighbouring rows, all of one length, shuffled; as many as make up a step."""
        rows = self.config.pretrain.batch_rows
        length = min(_RUN_BARS, rows, *(len(piece) for piece in self.train_pieces))
        runs = []
        for piece in self.train_pieces:
            # What does not fill a run is left out, at the front or at the end as chance has it.
            shift = int(self.rng.integers(len(piece) % length + 1))
            firsts = range(piece.start + shift, piece.stop - length + 1, length)
            runs += [range(first, first + length) for first in firsts]
        order = self.rng.permutation(len(runs))
        if self.config.pretrain.pass_rows is not None:
            order = order[: max(1, self.config.pretrain.pass_rows // length)]
        per_step = max(1, rows // length)
        for first in range(0, len(order), per_step):
            yield [runs[k] for k in order[first : first + per_step]]

    def _step(
        self, runs: list[range], optimizer: torch.optim.Optimizer, weights: list[Tensor]
    ) -> float:
        """One step of gradient descent; the loss of the forecasts."""
        x = torch.from_numpy(np.stack([_behind(self.world, run, self.world.x) for run in runs]))
        y = torch.from_numpy(np.stack([self.y[run.start : run.stop] for run in runs]))
        known = torch.isfinite(y)
        error = torch.where(known, self.net.forecast(x) - y.nan_to_num(), 0.0)
        loss = error.square().sum() / known.sum().clamp(min=1)
        total = loss
        if self.config.pretrain.masked_share:
            some = max(1, len(runs) // _MASKED_RUNS)
            masked = self._masked(self.world, runs[:some], x[:some], self.rng)
            total = loss + _MASKED_WEIGHT * masked.error / masked.cells.clamp(min=1)
        optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(weights, _GRAD_CLIP)
        whole, length = float(total.detach()), float(norm)
        if not (math.isfinite(whole) and math.isfinite(length)):
            raise TrainingError(
                f"pre-training diverged: the loss is {whole} and the gradient's norm {length}. "
                "Lower pretrain.lr, and check the features for outliers."
            )
        optimizer.step()
        return float(loss.detach())

    def _masked(
        self, world: World, runs: list[range], x: Tensor, rng: np.random.Generator
    ) -> MaskedErrors:
        hide = torch.from_numpy(rng.random(x.shape[:3]) < self.config.pretrain.masked_share)
        present = np.stack([_behind(world, run, world.present) for run in runs])
        return self.net.masked_errors(x, hide, torch.from_numpy(present), self.feature_sd)

    @torch.no_grad()
    def _forecasts(self, world: World, pieces: Pieces) -> Floats32:
        """[R,N,K] forecasts of the rows of `pieces`, one piece after the other."""
        self.net.eval()
        return np.concatenate(
            [
                self.net.forecast(torch.from_numpy(_behind(world, rows, world.x))).numpy()
                for rows in _chunks(pieces)
            ]
        )

    @torch.no_grad()
    def _masked_r2(self) -> float | None:
        """Share of the hidden rows' squares that is told, on the scoring half; None: no rows."""
        if not self.config.pretrain.masked_share:
            return None
        self.net.eval()
        rng = stream(self.seed, "pretrain", "hidden")
        error, square = 0.0, 0.0
        for rows in _chunks(self.score_pieces, _RUN_BARS):
            x = torch.from_numpy(_behind(self.valid, rows, self.valid.x))[None]
            found = self._masked(self.valid, [rows], x, rng)
            error, square = error + float(found.error), square + float(found.square)
        return 1.0 - error / square if square else None

    def _compare(self) -> dict[str, Any]:
        """The encoder at its best weights against its rivals, on the scoring half."""
        horizons, pieces = self.config.pretrain.horizons, self.score_pieces
        linear = fit_linear(self.world, self.train_pieces, self.y, max(horizons))
        found = Forecasts(
            y=_rows(outcomes(self.valid, pieces, horizons, self.scale), pieces),
            encoder=self._forecasts(self.valid, pieces),
            linear=linear_forecasts(self.valid, pieces, linear),
            last=last_values(self.valid, pieces, horizons, self.scale),
        )
        return {
            "cells": {
                "train": int(np.isfinite(self.y).any(axis=2).sum()),
                "stop": int(np.isfinite(self.y_stop).any(axis=2).sum()),
                "score": int(np.isfinite(found.y).any(axis=2).sum()),
            },
            "masked_r2": self._masked_r2(),
            "scores": scores(found, horizons, self.seed),
        }


class _RunningMean:
    """Mean of the weights of the last steps, the newest of which weigh most."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.values = [weight.detach().clone() for weight in weights]
        self._steps = 0

    def add(self, weights: list[Tensor]) -> None:
        """Take in the weights after a step."""
        self._steps += 1
        share = max(1.0 / _AVERAGED_STEPS, 3.0 / (3.0 + self._steps))
        torch._foreach_lerp_(self.values, [weight.detach() for weight in weights], share)

    @contextmanager
    def in_place_of(self, weights: list[Tensor]) -> Iterator[None]:
        """Let the mean stand for the weights for a while."""
        own = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            torch._foreach_copy_(weights, self.values)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, own)


def _loss(said: Floats32, y: Floats32) -> float:
    """Mean squared error over known targets."""
    return float(np.nanmean((said - y) ** 2, dtype=np.float64))


def _rows(values: Floats32, pieces: Pieces) -> Floats32:
    """The rows of `pieces`, one piece after the other."""
    return np.concatenate([values[piece.start : piece.stop] for piece in pieces])


def _chunks(pieces: Pieces, bars: int = _CHUNK_BARS) -> Iterator[range]:
    for piece in pieces:
        for first in range(piece.start, piece.stop, bars):
            yield range(first, min(first + bars, piece.stop))


def _behind(world: World, rows: range, values: NDArray[Any]) -> NDArray[Any]:
    """values[T,..] of `rows` and of the W - 1 rows before them, as a copy."""
    return np.array(values[rows.start - world.window + 1 : rows.stop])


def whole_windows(world: World, pieces: Pieces) -> Tensor:
    """Features of whole windows, one after another, as an encoder is shown them to fit itself.

    None crosses from one stretch to the next.
    """
    parts = []
    for piece in pieces:
        n_rows = (len(piece) + world.window - 1) // world.window * world.window
        parts.append(np.asarray(world.x[piece.stop - n_rows : piece.stop]))
    return torch.from_numpy(np.concatenate(parts))


def _feature_sd(world: World, pieces: Pieces) -> Floats32:
    """[F] deviation of each feature on the train window; 1 for those that never move."""
    total, square, count = np.zeros((3, world.x.shape[2]))
    for rows in _chunks(pieces):
        x = world.x[rows.start : rows.stop][world.present[rows.start : rows.stop]]
        total = total + x.sum(axis=0, dtype=np.float64)
        square = square + (x.astype(np.float64) ** 2).sum(axis=0)
        count = count + len(x)
    mean = total / np.maximum(count, 1)
    sd = np.sqrt(np.maximum(square / np.maximum(count, 1) - mean**2, 0.0))
    return np.where(sd > 0.0, sd, 1.0).astype(np.float32)


def _halves(pieces: Pieces) -> tuple[Pieces, Pieces]:
    """(to stop by, to score on): of several stretches half of them each, of one its two halves."""
    if len(pieces) > 1:
        middle = len(pieces) // 2
        return pieces[:middle], pieces[middle:]
    (piece,) = pieces
    cut = piece.start + len(piece) // 2
    return (range(piece.start, cut),), (range(cut, piece.stop),)


def _refuse_overlap(train: Pieces, valid: Pieces) -> None:
    for a in train:
        for b in valid:
            if a.start < b.stop and b.start < a.stop:
                raise DataError(
                    f"the train window (rows {a.start} to {a.stop - 1}) and the validation window "
                    f"({b.start} to {b.stop - 1}) overlap, so nothing would be out of sample. "
                    "Keep split.train and split.valid apart, or hand in a validation world."
                )
