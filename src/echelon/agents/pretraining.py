"""Pre-training of an encoder: what it is asked to foresee, how it learns, whom it has to beat.

1. The encoder looks at the train window's features (`Encoder.fit`), then each pass goes over all
   train rows, or over `pretrain.pass_rows` of them by lot, in shuffled runs of neighbouring rows:
   a run shares the rows of its windows.
2. A linear head on the embedding foretells the targets below for every horizon.
   Linear, so that what is known about the future lies open in the embedding.
3. A quarter of the runs is encoded a second time with a share of the rows hidden (zeroed), and a
   linear decoder has to tell them from the embedding of the window. With a tenth of the weight:
   with all of it, the forecasts lose half of their lead over a linear model on the planted trend.
4. AdamW on the sum. What is kept and judged is the running mean of the weights: forecasts of
   returns are nearly all noise, and so is the last step of any optimizer.
5. After each pass the loss on the first half of the validation window; the best weights so far are
   kept, and `pretrain.patience` passes without better ones end it.
6. On the other half, which has chosen nothing, the encoder is compared with its rivals.

Targets, for each horizon h, at the close of row t:

    return_h       log of the total return over the next h bars
    volatility_h   log of the root mean square of the one-bar log returns in them

Neither crosses the end of the stretch it begins in, and a cell counts only where the asset has
features and can be traded at every bar the target is made of. Targets are scaled by the mean and
standard deviation they have on the train window, so that a loss of 1 is that of the mean.

Rivals: the mean of the train window; the last value (the return, or the volatility, of the h bars
up to t); and a ridge regression on the same features, all W rows of the window side by side.

The encoder of a run is made once and kept on disk (`ensure_encoder`), for whoever stands on it:

    RUN/encoder/weights.safetensors    the encoder's tensors
    RUN/encoder/encoder.json           what it was made of, hashes, how pre-training went

Axes: `T` rows of the world, `R` rows of some stretches, `N` assets, `F` features, `W` window, `K`
targets, `P` = W·F + 1; `G` runs, `S` rows of a run and of the window before it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import TypedDict

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
from echelon.models.encoders import Encoder, build_encoder
from echelon.ops.blocks import mean_interval
from echelon.ops.ridge import Moments, fit_ridge
from echelon.rng import global_draws, stream
from echelon.runs.tensor_files import TensorFiles
from echelon.types import Bools, Floats, Floats32

Pieces = Sequence[range]
"""Stretches of rows, none of which leads into the next."""

_QUIET = 0.1
"""Volatilities below this share of the usual one count as that: the log of a single return near
zero would outweigh all others."""
_CHUNK_CELLS = 4_000_000
"""Numbers of flattened windows that are held at a time: 16 MB."""
_RUN_BARS = 16
"""Neighbouring rows that are encoded together."""
_MASKED_RUNS, _MASKED_WEIGHT = 4, 0.1
"""One run in so many is encoded a second time, with rows hidden; weight of its loss."""
_AVERAGED_STEPS = 500
"""Steps over which the running mean of the weights forgets."""
_GRAD_CLIP = 1.0
_CHUNK_BARS = 256

_FILES = TensorFiles("weights.safetensors", "encoder.json", "encoder", 1, "another directory")
_NAME = "encoder"


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
        of_model = ("encoder", "d_model", "n_layers", "dropout", "periods", "n_periods")
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
        `train_loss`, `valid_loss` (one per pass), `cells`, `masked_r2` and `scores`
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
    with global_draws(seed, "pretrain"):
        encoder = build_encoder(config, world.x.shape[2])
        encoder.fit(whole_windows(world, world.spans("train")))
        facts: Mapping[str, Any] | None = {"enabled": False}
        if config.pretrain.enabled:
            training = Pretraining(config, world, valid or world, encoder, seed)
            facts = training.run(should_stop)
    return None if facts is None else Pretrained(encoder.eval(), facts)


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
                write_encoder(directory, origin, made.encoder.state_dict(), made.facts)
            return made
        torch.set_num_threads(config.train.threads)
        with torch.random.fork_rng(devices=[]):  # drawing weights would move the caller's generator
            encoder = build_encoder(config, n_features)
        try:
            encoder.load_state_dict(stored[0])
        except RuntimeError as error:
            path = directory / _NAME
            what = f"of another network: {error}"
            raise DamagedError(path / _FILES.tensors, what, _remedy(path)) from None
        return Pretrained(encoder.eval(), stored[1])


def _remedy(path: Path) -> str:
    return f"Remove the directory {path}, and it is pre-trained again."


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
        """Errors on the rows of x[G,S,N,F] that `hide`[G,S,N] says; sd[F]: the features' own."""
        window = self.encoder.window
        z = self.encoder(torch.where(hide[..., None], 0.0, x))
        decoded = self.hidden(z).unflatten(-1, (window, -1))
        wanted = (x / sd).unfold(1, window, 1).transpose(-1, -2)
        counted = (hide & present).unfold(1, window, 1)[..., None]
        n = counted.sum() * x.shape[-1]
        error = torch.where(counted, decoded - wanted, 0.0).square().sum()
        return MaskedErrors(error, torch.where(counted, wanted, 0.0).square().sum(), n)


class Pretraining:
    def __init__(
        self, config: Config, world: World, valid: World, encoder: Encoder, seed: int
    ) -> None:
        self.config, self.seed, self.world, self.valid = config, seed, world, valid
        horizons = config.pretrain.horizons
        self.train_pieces = world.spans("train")
        self.stop_pieces, self.score_pieces = _halves(valid.spans("valid"))
        for a, b in product(self.train_pieces, valid.spans("valid") if valid is world else ()):
            if a.start < b.stop and b.start < a.stop:
                raise DataError(
                    f"the train window (rows {a.start} to {a.stop - 1}) and the validation window "
                    f"({b.start} to {b.stop - 1}) overlap, so nothing would be out of sample. "
                    "Keep split.train and split.valid apart, or hand in a validation world."
                )
        self.scale = fit_scale(world, self.train_pieces, horizons)
        self.y = outcomes(world, self.train_pieces, horizons, self.scale)
        stop = outcomes(valid, self.stop_pieces, horizons, self.scale)
        self.y_stop = _rows(stop, self.stop_pieces)
        if not np.isfinite(self.y_stop).any():
            raise DataError(
                f"pretrain.horizons={list(horizons)}: the first half of the validation window, "
                f"{len(self.y_stop)} bars, holds no such target to stop by. Lengthen split.valid "
                "or shorten the horizons."
            )
        self.feature_sd = torch.from_numpy(_feature_sd(world, self.train_pieces))
        self.net = Forecaster(encoder, self.y.shape[2])
        self.rng = stream(seed, "pretrain", "batches")

    def run(self, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train to the end, leave the best weights, compare with the rivals; None: stopped."""
        settings = self.config.pretrain
        weights: list[Tensor] = list(self.net.parameters())
        optimizer = torch.optim.AdamW(
            weights, lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        # The mean of the weights of the last steps, the newest of which weigh most.
        mean, steps = _clones(weights), 0
        best, best_epoch, best_weights = math.inf, 0, mean
        train_losses: list[float] = []
        valid_losses: list[float] = []
        for epoch in range(1, settings.epochs + 1):
            losses = []
            self.net.train()
            for batch in self._batches():
                if should_stop():
                    return None
                losses.append(self._step(batch, optimizer, weights))
                steps += 1
                share = max(1.0 / _AVERAGED_STEPS, 3.0 / (3.0 + steps))
                torch._foreach_lerp_(mean, [weight.detach() for weight in weights], share)
            with torch.no_grad():
                own = _clones(weights)
                torch._foreach_copy_(weights, mean)
                said = self._forecasts(self.valid, self.stop_pieces)
                torch._foreach_copy_(weights, own)
            valid_losses.append(_loss(said, self.y_stop))
            train_losses.append(float(np.mean(losses)))
            if valid_losses[-1] < best:
                best, best_epoch, best_weights = valid_losses[-1], epoch, _clones(mean)
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
            # What does not fill a run is left out, at the front or at the end at random.
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
        x = torch.from_numpy(np.stack([_behind(self.world, run, self.world.x) for run in runs]))
        y = torch.from_numpy(np.stack([self.y[run.start : run.stop] for run in runs]))
        known = torch.isfinite(y)
        error = torch.where(known, self.net.forecast(x) - y.nan_to_num(), 0.0)
        loss = error.square().sum() / known.sum().clamp(min=1)
        total = loss
        if self.config.pretrain.masked_share:
            some = max(1, len(runs) // _MASKED_RUNS)
            masked = self._mask(self.world, runs[:some], x[:some], self.rng)
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

    def _mask(
        self, world: World, runs: list[range], x: Tensor, rng: np.random.Generator
    ) -> MaskedErrors:
        hide = torch.from_numpy(rng.random(x.shape[:3]) < self.config.pretrain.masked_share)
        present = np.stack([_behind(world, run, world.present) for run in runs])
        return self.net.masked_errors(x, hide, torch.from_numpy(present), self.feature_sd)

    @torch.no_grad()
    def _forecasts(self, world: World, pieces: Pieces) -> Floats32:
        """[R,N,K] forecasts of the rows of `pieces`, one piece after the other."""
        self.net.eval()
        parts = (torch.from_numpy(_behind(world, rows, world.x)) for rows in _chunks(pieces))
        return np.concatenate([self.net.forecast(part).numpy() for part in parts])

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
            part = self._mask(self.valid, [rows], x, rng)
            error, square = error + float(part.error), square + float(part.square)
        return 1.0 - error / square if square else None

    def _compare(self) -> dict[str, Any]:
        """The encoder at its best weights against its rivals, on the scoring half."""
        horizons, pieces = self.config.pretrain.horizons, self.score_pieces
        linear = fit_linear(self.world, self.train_pieces, self.y, max(horizons))
        forecasts = Forecasts(
            y=_rows(outcomes(self.valid, pieces, horizons, self.scale), pieces),
            encoder=self._forecasts(self.valid, pieces),
            linear=linear_forecasts(self.valid, pieces, linear),
            last=last_values(self.valid, pieces, horizons, self.scale),
        )
        targets = {"train": self.y, "stop": self.y_stop, "score": forecasts.y}
        return {
            "cells": {k: int(np.isfinite(y).any(axis=2).sum()) for k, y in targets.items()},
            "masked_r2": self._masked_r2(),
            "scores": scores(forecasts, horizons, self.seed),
        }


def _loss(said: Floats32, y: Floats32) -> float:
    return float(np.nanmean((said - y) ** 2, dtype=np.float64))


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
    daily = np.concatenate([np.diff(_log_growth(world, piece), axis=0) for piece in pieces])
    quiet = _QUIET * float(np.nanstd(daily)) if np.isfinite(daily).any() else 0.0
    raw = np.concatenate(
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


def fit_linear(world: World, pieces: Pieces, y: Floats32, reach: int) -> Floats:
    """Weights[P,K] of a ridge regression of y[T,N,K] on the flattened windows; the last: bias.

    Each target's strength is the best one on the last fifth of every stretch, for weights of the
    rows before it, without the `reach` bars whose targets reach into it; then all rows are used.
    Only cells with every target take part.
    """
    n_weights = world.window * world.x.shape[2] + 1
    early, between, late = (Moments(n_weights, y.shape[2]) for _ in range(3))
    for piece in pieces:
        cut = piece.stop - len(piece) // 5
        first = max(piece.start, cut - reach)
        parts = (range(piece.start, first), range(first, cut), range(cut, piece.stop))
        for moments, rows in zip((early, between, late), parts, strict=True):
            for some, flat in flat_windows(world, rows):
                moments.add(flat, y[some.start : some.stop].reshape(-1, y.shape[2]))
    return fit_ridge(early, between, late)


def linear_forecasts(world: World, pieces: Pieces, weights: Floats) -> Floats32:
    """[R,N,K] what the ridge says at the rows of `pieces`, one piece after the other."""
    small = weights.astype(np.float32)
    said = [flat @ small for piece in pieces for _, flat in flat_windows(world, piece)]
    return np.concatenate(said).reshape(-1, world.n_assets, weights.shape[1])


def flat_windows(world: World, rows: range) -> Iterator[tuple[range, Floats32]]:
    """(some rows, their windows side by side and a one [len·N,P]), until all `rows` are done."""
    width = world.window * world.x.shape[2]
    step = max(1, _CHUNK_CELLS // (width * world.n_assets))
    for first in range(rows.start, rows.stop, step):
        some = range(first, min(first + step, rows.stop))
        x = np.asarray(world.x[some.start - world.window + 1 : some.stop])
        windows = sliding_window_view(x, world.window, axis=0).reshape(-1, width)
        yield some, np.concatenate([windows, np.ones((len(windows), 1), np.float32)], axis=1)


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
    scored = {}
    for k, name in enumerate(target_names(horizons)):
        own = Forecasts(*(part[..., k] for part in forecasts))
        scored[name] = _score(own, horizons[k % len(horizons)], stream(seed, "scores", name))
    return scored


def _score(forecasts: Forecasts, horizon: int, rng: np.random.Generator) -> dict[str, Any]:
    """The score of one target, whose forecasts are [R,N]."""
    y, encoder, linear, last = forecasts
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
        score[f"over_{rival}"] = {
            name: value if math.isfinite(value) else None
            for name, value in interval._asdict().items()
        }
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
        r2 = score["r2"]
        last = "n/a" if r2["last"] is None else f"{100 * r2['last']:.2f} %"
        lines.append(
            f"{what}R² {100 * r2['encoder']:.2f} % (linear {100 * r2['linear']:.2f} %, last value "
            f"{last}); {_verdict(score)}"
        )
    return lines


def _verdict(score: Mapping[str, Any]) -> str:
    """Which rivals the encoder is better than, not distinguished from, worse than."""
    words = ("better than", "not distinguished from", "worse than")
    verdicts: dict[str, list[str]] = {word: [] for word in words}
    for rival in ("linear", "last", "mean"):
        interval = score.get(f"over_{rival}") or {}
        if interval.get("low") is None:
            continue
        place = 0 if interval["low"] > 0.0 else 2 if interval["high"] < 0.0 else 1
        verdicts[words[place]].append(rival)
    parts = [f"{word} {' and '.join(rivals)}" for word, rivals in verdicts.items() if rivals]
    return ", ".join(parts) or "too few bars to compare them"
