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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import TypedDict

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
from echelon.errors import DamagedError, DataError, StoreError, TrainingError, shorten
from echelon.files import (
    check_tree,
    exclusive_lock,
    json_line,
    recover_directory,
    standing_directory,
)
from echelon.models.encoders import (
    Encoder,
    Fold,
    JoinedEncoder,
    Scores,
    build_encoder,
    build_served,
    init_linear,
)
from echelon.ops.ranks import rank_ic
from echelon.rng import global_draws, stream
from echelon.runs.checkpoint import below_prefix, with_prefix
from echelon.runs.tensor_files import TensorFiles
from echelon.types import Bools, Floats32

_RUN_BARS = 16
"""Neighbouring rows that are encoded together."""
_MASKED_RUNS, _MASKED_WEIGHT = 4, 0.1
"""One run in so many is encoded a second time, with rows hidden; weight of its loss."""
_AVERAGED_STEPS = 500
"""Steps over which the running mean of the weights forgets."""
_GRAD_CLIP = 1.0
_PAIRS = 16
"""Others that the pairwise loss compares an asset with."""
_CHUNK_BARS = 256

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
        encoder = _fresh_encoder(config, world, pieces)
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
            fit = _fit_fold(config, world, block, facts["best_epoch"], (seed, k), should_stop)
            if fit is None:
                return None
            fits.append(fit)
        facts["folds"] = [[[rows.start, rows.stop] for rows in block.held] for block in blocks]
        served.folds = _folds(facts["folds"], fits)
        facts["cross_fit"] = _cross_fit_ics(world, served, training.y, training.targets.names)
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
    total, n = said.new_zeros(()), 0
    for step in steps:
        ahead, better = said - said.roll(step, -2), y - y.roll(step, -2)
        counted = torch.isfinite(better) & (better != 0.0)
        loss = nn.functional.softplus(-ahead * better.nan_to_num().sign())
        total = total + torch.where(counted, loss, 0.0).sum()
        n = n + counted.sum()
    return total / torch.as_tensor(n).clamp(min=1)


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
        self.feature_sd = torch.from_numpy(_feature_sd(world, pieces))
        drawn = self.ranked & (self.settings.loss != "mse")
        self.net = Forecaster(encoder, y.shape[2], drawn)
        self.weights: list[Tensor] = list(self.net.parameters())
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=self.settings.lr, weight_decay=self.settings.weight_decay, fused=True
        )
        # The mean of the weights of the last steps, the newest of which weigh most.
        self.mean, self.steps = _clones(self.weights), 0

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
    def put(self, weights: Sequence[Tensor]) -> None:
        """Let the net have these weights."""
        torch._foreach_copy_(self.weights, weights)

    def batches(self) -> Iterator[list[range]]:
        """Runs of neighbouring rows, all of one length, shuffled; as many as make up a step."""
        rows = self.settings.batch_rows
        length = min(_RUN_BARS, rows, *(len(piece) for piece in self.pieces))
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
        x = torch.from_numpy(np.stack([_behind(self.world, run, self.world.x) for run in runs]))
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
        present = np.stack([_behind(world, run, world.present) for run in runs])
        return self.net.masked_errors(x, hide, torch.from_numpy(present), self.feature_sd)


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
        """Train to the end, leave the best weights, compare with the rivals; None: stopped."""
        settings, descent = self.config.pretrain, self.descent
        best, best_epoch, best_weights = math.inf, 0, descent.mean
        train_losses: list[float] = []
        valid_losses: list[float] = []
        for epoch in range(1, settings.epochs + 1):
            loss = descent.run_pass(should_stop)
            if loss is None:
                return None
            own = _clones(descent.weights)
            descent.put(descent.mean)
            said = self._forecasts(self.valid, self.stop_pieces)
            descent.put(own)
            valid_losses.append(_loss(said, self.y_stop, self.targets.ranked, settings.loss))
            train_losses.append(loss)
            if valid_losses[-1] < best:
                best, best_epoch, best_weights = valid_losses[-1], epoch, _clones(descent.mean)
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
            **self._compare(),
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
        for rows in _chunks(self.score_pieces, _RUN_BARS):
            x = torch.from_numpy(_behind(self.valid, rows, self.valid.x))[None]
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
    wide = (torch.from_numpy(part.astype(np.float64)) for part in (said, y))
    return float(forecast_loss(*wide, ranked, kind))


def _fresh_encoder(config: Config, world: World, pieces: Pieces) -> Encoder:
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
        kept = tuple(rows for rows in fitted if rows and len(rows) >= min(_RUN_BARS, longest))
        if not kept or not held:
            raise DataError(
                f"pretrain.cross_fit={n_folds}: the train window has {total} bars, and a block of "
                f"{high - low} of them with {purge} on each side leaves nothing to fit on. Take "
                "fewer blocks, a shorter window or horizon, or lengthen split.train."
            )
        folds.append(FoldPieces(tuple(held), kept))
    return folds


def _fit_fold(
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
        encoder = _fresh_encoder(config, world, block.fitted)
        y = outcomes(world, block.fitted, targets, fit_scale(world, block.fitted, targets))
        rng = stream(seed, "pretrain", "batches", number)
        descent = Descent(config, world, block.fitted, y, encoder, rng)
        for _ in range(passes):
            if descent.run_pass(should_stop) is None:
                return None
        descent.put(descent.mean)
        return served_encoder(config, descent.net)


def _cross_fit_ics(
    world: World, served: Encoder, y: Floats32, names: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Name of a target → mean rank IC on the train window, in sample and out of fold."""
    ics: dict[str, dict[str, float | None]] = {name: {} for name in names}
    said = {
        "in_sample": [(fold.rows, encode_span(served, world, fold.rows)) for fold in served.folds],
        "out_of_fold": [
            (fold.rows, encode_span(fold.encoder, world, fold.rows)) for fold in served.folds
        ],
    }
    for kind, parts in said.items():
        for k, name in enumerate(names):
            daily = np.concatenate(
                [rank_ic(z[..., k].numpy(), y[rows.start : rows.stop, :, k]) for rows, z in parts]
            )
            known = daily[np.isfinite(daily)]
            ics[name][kind] = float(known.mean()) if len(known) else None
    return ics


def _clones(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def _rows(values: Floats32, pieces: Pieces) -> Floats32:
    return np.concatenate([values[piece.start : piece.stop] for piece in pieces])


def _chunks(pieces: Pieces, bars: int = _CHUNK_BARS) -> Iterator[range]:
    for piece in pieces:
        for first in range(piece.start, piece.stop, bars):
            yield range(first, min(first + bars, piece.stop))


def _behind(world: World, rows: range, values: NDArray[Any]) -> NDArray[Any]:
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
