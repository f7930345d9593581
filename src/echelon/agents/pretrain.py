"""Pre-training: an encoder learns on the train window to foresee returns and volatilities.

How it learns and what it is compared with stands in `agents.pretraining` and `agents.forecast`;
here it is asked for. `ensure_encoder` does it once for a directory and loads the result afterwards
(see `agents.encoder_files`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.agents.encoder_files import (
    Origin,
    encoder_path,
    foreign_weights,
    locked,
    read_encoder,
    write_encoder,
)
from echelon.agents.jobs import Report, ShouldStop
from echelon.agents.pretraining import Pretraining, PretrainProgress, whole_windows
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.models import build_encoder
from echelon.models.encoders import Encoder
from echelon.rng import stream

__all__ = [
    "PretrainProgress",
    "Pretrained",
    "ensure_encoder",
    "load_encoder",
    "pretrain",
    "summary",
]


@dataclass(frozen=True)
class Pretrained:
    """A base encoder, in evaluation mode, and what is known about it.

    facts: as JSON has it; `enabled`, and where that is true `epochs`, `best_epoch`, `ending`,
        `train_loss`, `valid_loss` (one per pass), `cells`, `masked_r2` and `scores`
        (see `agents.forecast.scores`)
    """

    encoder: Encoder
    facts: Mapping[str, Any]


def pretrain(
    config: Config,
    world: World,
    seed: int,
    *,
    valid: World | None = None,
    report: Report = lambda _message: None,
    should_stop: ShouldStop = lambda: False,
) -> Pretrained | None:
    """Pre-train the encoder that `config.model` asks for; None: stopped before the end.

    valid: where the validation window is, if in another world than the train window
    """
    torch.set_num_threads(config.train.threads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(seed, "pretrain").integers(2**62)))
        encoder = build_encoder(config, world.x.shape[2])
        encoder.fit(whole_windows(world, world.spans("train")))
        facts: Mapping[str, Any] | None = {"enabled": False}
        if config.pretrain.enabled:
            training = Pretraining(config, world, valid or world, encoder, seed)
            facts = training.run(report, should_stop)
    return None if facts is None else Pretrained(encoder.eval(), facts)


def ensure_encoder(
    config: Config,
    world: World,
    directory: Path,
    seed: int,
    report: Report = lambda _message: None,
    should_stop: ShouldStop = lambda: False,
    *,
    valid: World | None = None,
    data: str,
) -> Pretrained | None:
    """The encoder of `directory`, pre-trained now if it has none; None: stopped before the end.

    Processes that ask for the same one wait for whoever is at it. Made of another configuration,
    data or seed, it is refused.

    data: hash of what the worlds were made from
    """
    n_features = world.x.shape[2]
    with locked(directory):
        stored = read_encoder(directory, Origin.of(config, n_features, data, seed))
        if stored is not None:
            torch.set_num_threads(config.train.threads)
            return Pretrained(_rebuilt(config, n_features, directory, stored.tensors), stored.facts)
        found = pretrain(config, world, seed, valid=valid, report=report, should_stop=should_stop)
        if found is not None:
            origin = Origin.of(config, n_features, data, seed)
            write_encoder(directory, origin, found.encoder.state_dict(), found.facts)
        return found


def load_encoder(
    directory: Path,
    config: Config,
    n_features: int,
    *,
    data: str | None = None,
    seed: int | None = None,
) -> Pretrained:
    """The encoder that `ensure_encoder` left; data, seed: those it must be of, None: any.

    Raises:
        StoreError: if there is none, if it is damaged or made of something else.
    """
    stored = read_encoder(directory, Origin.of(config, n_features, data, seed))
    if stored is None:
        raise StoreError(
            f"{encoder_path(directory)}: there is no pre-trained encoder. Train the expert anew; "
            "it is pre-trained first."
        )
    return Pretrained(_rebuilt(config, n_features, directory, stored.tensors), stored.facts)


def _rebuilt(
    config: Config, n_features: int, directory: Path, tensors: Mapping[str, Tensor]
) -> Encoder:
    with torch.random.fork_rng(devices=[]):  # drawing weights would move the caller's generator
        encoder = build_encoder(config, n_features)
    try:
        encoder.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise foreign_weights(directory, str(error)) from None
    return encoder.eval()


def summary(facts: Mapping[str, Any]) -> list[str]:
    """Lines for a display: did the encoder foresee more than its rivals, out of sample?

    Out of sample: on the second half of the validation window, the first having chosen the pass.
    """
    if not facts["enabled"]:
        return ["encoder: as drawn, not pre-trained (pretrain.enabled=false)"]
    lines = [
        f"encoder: best of {facts['epochs']} passes is no. {facts['best_epoch']}; out of sample "
        "(second half of validation):"
    ]
    for name, score in sorted(facts["scores"].items(), key=lambda item: _order(item[0])):
        kind, _, bars = name.rpartition("_")
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


def _order(name: str) -> tuple[str, int]:
    """Targets by kind, then by horizon as a number."""
    kind, _, bars = name.rpartition("_")
    return kind, int(bars)


def _verdict(score: Mapping[str, Any]) -> str:
    """Which rivals the encoder is better than, not told apart from, worse than."""
    found: dict[str, list[str]] = {"better than": [], "not told apart from": [], "worse than": []}
    for rival in ("linear", "last", "mean"):
        interval = score.get(f"over_{rival}") or {}
        if interval.get("low") is None:
            continue
        above, below = interval["low"] > 0.0, interval["high"] < 0.0
        word = "better than" if above else "worse than" if below else "not told apart from"
        found[word].append(rival)
    told = [f"{word} {' and '.join(rivals)}" for word, rivals in found.items() if rivals]
    return ", ".join(told) or "too few bars to compare them"
