"""A net that learns to foresee: the encoder with its heads, its losses, and passes over train rows.

`Descent` is what pre-training (`agents.pretraining`) and each of its folds (`agents.cross_fit`)
run; what is asked of the net is in `agents.outcomes`.

Axes: `T` rows of the world, `N` assets, `F` features, `W` window, `K` targets; `G` runs of rows,
`S` rows of a run and of the window before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.agents.outcomes import Pieces, Targets
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import TrainingError
from echelon.models.encoders import Encoder, JoinedEncoder, Scores, build_encoder, init_linear
from echelon.types import Bools, Floats32

RUN_BARS = 16
"""Neighbouring rows that are encoded together."""
_MASKED_RUNS, _MASKED_WEIGHT = 4, 0.1
"""One run in so many is encoded a second time, with rows hidden; weight of its loss."""
_AVERAGED_STEPS = 500
"""Steps over which the running mean of the weights forgets."""
_GRAD_CLIP = 1.0
_PAIRS = 16
"""Others that the pairwise loss compares an asset with."""
_CHUNK_BARS = 256


class MaskedErrors(NamedTuple):
    """Sums over hidden cells: squared error, square of what was hidden, number."""

    error: Tensor
    square: Tensor
    cells: Tensor


class Forecaster(nn.Module):
    """The encoder, what it foretells, and what it remembers of hidden rows."""

    def __init__(self, encoder: Encoder, n_targets: int, drawn: Bools) -> None:
        """drawn[K]: targets whose loss cannot begin with forecasts that are all alike"""
        super().__init__()
        self.encoder = encoder
        self.ahead = nn.Linear(encoder.d_model, n_targets)
        self.hidden = nn.Linear(encoder.d_model, encoder.window * encoder.n_features)
        nn.init.zeros_(self.ahead.weight)  # the first forecast is the mean
        if drawn.any():
            init_linear(self.ahead)
            with torch.no_grad():
                self.ahead.weight[torch.from_numpy(~drawn)] = 0.0
        nn.init.zeros_(self.ahead.bias)

    def forecast(self, x: Tensor) -> Tensor:
        """x[..,S,N,F] -> scaled forecasts[..,S-W+1,N,K]."""
        said: Tensor = self.ahead(self.encoder(x))
        return said

    def masked_errors(self, x: Tensor, hide: Tensor, present: Tensor, sd: Tensor) -> MaskedErrors:
        """Errors on the rows of x[G,S,N,F] that `hide`[G,S,N] says; sd[F]: the features' own."""
        window = self.encoder.window
        z = self.encoder(torch.where(hide[..., None], 0.0, x))
        decoded = self.hidden(z).unflatten(-1, (window, -1))
        wanted = (x / sd).unfold(1, window, 1).transpose(-1, -2)
        counted = (hide & present).unfold(1, window, 1)[..., None]
        n = counted.sum() * x.shape[-1]
        error = torch.where(counted, decoded - wanted, 0.0).square().sum()
        return MaskedErrors(error, torch.where(counted, wanted, 0.0).square().sum(), n)


def forecast_loss(said: Tensor, y: Tensor, ranked: Bools, kind: str) -> Tensor:
    """Mean over the targets of said, y[..,N,K]; NaN is unknown. kind: what ranks are learned by"""
    known = torch.isfinite(y)
    if kind == "mse" or not ranked.any():
        return torch.where(known, said - y.nan_to_num(), 0.0).square().sum() / known.sum().clamp(
            min=1
        )
    of_rank = correlation_loss if kind == "ic" else pairwise_loss
    loss = of_rank(said[..., ranked], y[..., ranked])
    if ranked.all():
        return loss
    share = float(ranked.mean())
    others = forecast_loss(said[..., ~ranked], y[..., ~ranked], ranked[~ranked], "mse")
    return share * loss + (1.0 - share) * others


def correlation_loss(said: Tensor, y: Tensor) -> Tensor:
    """1 − the mean over rows of the correlation across the assets of said, y[..,N,K]."""
    known = torch.isfinite(y)
    count = known.sum(-2, keepdim=True).clamp(min=1)
    said, y = (torch.where(known, part, 0.0) for part in (said, y))
    said, y = (
        torch.where(known, part - part.sum(-2, keepdim=True) / count, 0.0) for part in (said, y)
    )
    spread = y.square().sum(-2)
    # Forecasts that are nearly alike count as a little apart, or their gradient has no bound.
    size = (said.square().sum(-2) + 1e-6 * count.squeeze(-2)) * spread
    counted = spread > 0.0
    ic = (said * y).sum(-2) / torch.where(counted, size, 1.0).sqrt()
    return 1.0 - (ic * counted).sum() / counted.sum().clamp(min=1)


def pairwise_loss(said: Tensor, y: Tensor) -> Tensor:
    """Mean over pairs of assets of log(1 + exp(−d)), d being how far the better one is ahead.

    Not of all N² pairs: each asset against the ones at `_PAIRS` distances round the ring of assets.
    """
    n_assets = said.shape[-2]
    steps = np.unique(np.linspace(1, max(1, n_assets // 2), _PAIRS).astype(int)).tolist()
    total, n = said.new_zeros(()), said.new_zeros(())
    for step in steps:
        ahead, better = said - said.roll(step, -2), y - y.roll(step, -2)
        counted = torch.isfinite(better) & (better != 0.0)
        loss = nn.functional.softplus(-ahead * better.nan_to_num().sign())
        total = total + torch.where(counted, loss, 0.0).sum()
        n = n + counted.sum()
    return total / n.clamp(min=1)


class Descent:
    """A net that learns on some stretches of the train window, and the running mean of its weights.

    y[T,N,K]: the targets of their rows
    """

    def __init__(
        self,
        config: Config,
        world: World,
        pieces: Pieces,
        y: Floats32,
        encoder: Encoder,
        rng: np.random.Generator,
    ) -> None:
        self.settings, self.world, self.pieces = config.pretrain, world, pieces
        self.y, self.rng = y, rng
        self.ranked = Targets.from_config(config.pretrain).ranked
        if self.settings.masked_share:
            self.feature_sd = torch.from_numpy(_feature_sd(world, pieces))
        drawn = self.ranked & (self.settings.loss != "mse")
        self.net = Forecaster(encoder, y.shape[2], drawn)
        self.weights: list[Tensor] = list(self.net.parameters())
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=self.settings.lr, weight_decay=self.settings.weight_decay, fused=True
        )
        # The mean of the weights of the last steps, the newest of which weigh most.
        self.mean, self.steps = clones(self.weights), 0

    def run_pass(self, should_stop: Callable[[], bool]) -> float | None:
        """One pass; the mean loss of its steps, None: stopped."""
        losses = []
        self.net.train()
        for batch in self.batches():
            if should_stop():
                return None
            losses.append(self._step(batch))
            self.steps += 1
            share = max(1.0 / _AVERAGED_STEPS, 3.0 / (3.0 + self.steps))
            torch._foreach_lerp_(self.mean, [weight.detach() for weight in self.weights], share)
        return float(np.mean(losses))

    @torch.no_grad()
    def put(self, weights: list[Tensor]) -> None:
        """Let the net have these weights."""
        torch._foreach_copy_(self.weights, weights)

    def batches(self) -> Iterator[list[range]]:
        """Runs of neighbouring rows, all of one length, shuffled; as many as make up a step."""
        rows = self.settings.batch_rows
        length = min(RUN_BARS, rows, *(len(piece) for piece in self.pieces))
        runs = []
        for piece in self.pieces:
            # What does not fill a run is left out, at the front or at the end at random.
            shift = int(self.rng.integers(len(piece) % length + 1))
            firsts = range(piece.start + shift, piece.stop - length + 1, length)
            runs += [range(first, first + length) for first in firsts]
        order = self.rng.permutation(len(runs))
        if self.settings.pass_rows is not None:
            order = order[: max(1, self.settings.pass_rows // length)]
        per_step = max(1, rows // length)
        for first in range(0, len(order), per_step):
            yield [runs[k] for k in order[first : first + per_step]]

    def _step(self, runs: list[range]) -> float:
        x = torch.from_numpy(np.stack([rows_behind(self.world, run, self.world.x) for run in runs]))
        y = torch.from_numpy(np.stack([self.y[run.start : run.stop] for run in runs]))
        loss = forecast_loss(self.net.forecast(x), y, self.ranked, self.settings.loss)
        total = loss
        if self.settings.masked_share:
            some = max(1, len(runs) // _MASKED_RUNS)
            masked = self.mask(self.world, runs[:some], x[:some], self.rng)
            total = loss + _MASKED_WEIGHT * masked.error / masked.cells.clamp(min=1)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.weights, _GRAD_CLIP)
        whole, length = float(total.detach()), float(norm)
        if not (math.isfinite(whole) and math.isfinite(length)):
            raise TrainingError(
                f"pre-training diverged: the loss is {whole} and the gradient's norm {length}. "
                "Lower pretrain.lr, and check the features for outliers."
            )
        self.optimizer.step()
        return float(loss.detach())

    def mask(
        self, world: World, runs: list[range], x: Tensor, rng: np.random.Generator
    ) -> MaskedErrors:
        """Errors on rows hidden at random of x[G,S,N,F], the rows of `runs` and their windows."""
        hide = torch.from_numpy(rng.random(x.shape[:3]) < self.settings.masked_share)
        present = np.stack([rows_behind(world, run, world.present) for run in runs])
        return self.net.masked_errors(x, hide, torch.from_numpy(present), self.feature_sd)


def clones(weights: list[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def row_chunks(pieces: Pieces, bars: int = _CHUNK_BARS) -> Iterator[range]:
    for piece in pieces:
        for first in range(piece.start, piece.stop, bars):
            yield range(first, min(first + bars, piece.stop))


def rows_behind(world: World, rows: range, values: NDArray[Any]) -> NDArray[Any]:
    """values[T,..] of `rows` and of the W - 1 rows before them, as a copy."""
    return np.array(values[rows.start - world.window + 1 : rows.stop])


def whole_windows(world: World, pieces: Pieces) -> Tensor:
    """Features of whole windows, one after another; none crosses from one stretch to the next."""
    lengths = [-(-len(piece) // world.window) * world.window for piece in pieces]
    ends = zip(pieces, lengths, strict=True)
    return torch.from_numpy(np.concatenate([world.x[p.stop - n : p.stop] for p, n in ends]))


def _feature_sd(world: World, pieces: Pieces) -> Floats32:
    """[F] deviation of each feature on the train window; 1 for those that never move."""
    total, square, count = np.zeros((3, world.x.shape[2]))
    for rows in row_chunks(pieces):
        x = world.x[rows.start : rows.stop][world.present[rows.start : rows.stop]]
        total = total + x.sum(axis=0, dtype=np.float64)
        square = square + (x.astype(np.float64) ** 2).sum(axis=0)
        count = count + len(x)
    mean = total / np.maximum(count, 1)
    sd = np.sqrt(np.maximum(square / np.maximum(count, 1) - mean**2, 0.0))
    return np.where(sd > 0.0, sd, 1.0).astype(np.float32)


def draw_encoder(config: Config, world: World, pieces: Pieces) -> Encoder:
    encoder = build_encoder(config, world.x.shape[2])
    if encoder.looks:
        encoder.fit(whole_windows(world, pieces))
    return encoder


def served_encoder(config: Config, net: Forecaster) -> Encoder:
    """What agents stand on: the encoder, or with cross-fitting what its head says."""
    encoder = net.encoder
    if config.pretrain.cross_fit:
        scores = Scores(encoder.d_model, net.ahead.out_features)
        scores.ahead = net.ahead
        encoder = JoinedEncoder(config, encoder, scores, net.ahead.out_features)
    return encoder.eval()
