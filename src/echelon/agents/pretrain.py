"""The pre-trained encoder of a run: made once, kept on disk, loaded by whoever stands on it.

    RUN/encoder/weights.safetensors    the encoder's tensors
    RUN/encoder/encoder.json           what it was made of, hashes, how pre-training went

`ensure_encoder` pre-trains it (`agents.pretraining`) or loads what is there. Both files are whole
or an error, and nothing is unpickled: see `runs.tensor_files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

from echelon.agents.pretraining import Pretraining, whole_windows
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import DamagedError, StoreError, shorten
from echelon.files import (
    check_tree,
    exclusive_lock,
    json_line,
    recover_directory,
    standing_directory,
)
from echelon.models import build_encoder
from echelon.models.encoders import Encoder
from echelon.rng import global_draws
from echelon.runs.tensor_files import TensorFiles

_WEIGHTS, _FACTS = "weights.safetensors", "encoder.json"
_FILES = TensorFiles(_WEIGHTS, _FACTS, "encoder", 1, "another directory")
_NAME = "encoder"
_SECTIONS = ("window", "features", "normalization", "split", "pretrain")
_MODEL_KEYS = ("encoder", "d_model", "n_layers", "dropout", "periods", "n_periods")
"""Parts of the configuration, and of its `model`, that an encoder depends on."""


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
        parts = {name: tree[name] for name in _SECTIONS}
        parts["model"] = {name: tree["model"][name] for name in _MODEL_KEYS}
        text = json_line(parts, sort_keys=True, allow_nan=True)
        return Origin(hashlib.sha256(text.encode()).hexdigest(), n_features, data, seed)


class Stored(NamedTuple):
    """What was saved. hash: of the weights"""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    hash: str


class _Document(TypedDict):
    """What encoder.json says besides versions and hashes."""

    origin: Origin
    facts: dict[str, Any]


def write_encoder(
    directory: Path, origin: Origin, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Write both files, or none."""
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


def read_encoder(directory: Path, origin: Origin) -> Stored | None:
    """Read and check what `write_encoder` wrote; None where there is nothing.

    origin: what it must be made of
    """
    path = standing_directory(directory / _NAME)
    if path is None:
        return None
    remedy = _remedy(path)
    document, data = _FILES.read(path, remedy)
    written = check_tree(document, _Document, path / _FACTS, remedy)
    _require_origin(path / _FACTS, written["origin"], origin)
    tensors = _FILES.unpack(data, path, remedy)
    return Stored(tensors, written["facts"], str(document["tensors_sha256"]))


def read_encoder_facts(directory: Path) -> dict[str, Any] | None:
    """What is known of the encoder of a run, checked; None where it has none."""
    path = standing_directory(directory / _NAME)
    if path is None:
        return None
    remedy = _remedy(path)
    document = _FILES.read_document(path, remedy)
    return check_tree(document, _Document, path / _FACTS, remedy)["facts"]


def encoder_file_hash(directory: Path) -> str | None:
    """Hash of the weights of the encoder of a run; None where it has none."""
    path = standing_directory(directory / _NAME)
    if path is None:
        return None
    return str(_FILES.read_document(path, _remedy(path))["tensors_sha256"])


@dataclass(frozen=True)
class Pretrained:
    """A base encoder, in evaluation mode, and what is known about it.

    facts: as JSON has it; `enabled`, and where that is true `epochs`, `best_epoch`, `ending`,
        `train_loss`, `valid_loss` (one per pass), `cells`, `masked_r2` and `scores`
        (see `pretraining.scores`)
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
    """Pre-train the encoder that `config.model` asks for; None: stopped before the end.

    valid: where the validation window is, if in another world than the train window
    """
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
    data or seed, it is refused.

    data: hash of what the worlds were made from
    """
    n_features = world.x.shape[2]
    origin = Origin.from_config(config, n_features, data, seed)
    with exclusive_lock(directory / ".encoder.lock", f"the encoder in {directory}", wait=True):
        stored = read_encoder(directory, origin)
        if stored is not None:
            torch.set_num_threads(config.train.threads)
            return Pretrained(_rebuild(config, n_features, directory, stored.tensors), stored.facts)
        made = pretrain(config, world, seed, valid=valid, should_stop=should_stop)
        if made is not None:
            write_encoder(directory, origin, made.encoder.state_dict(), made.facts)
        return made


def _rebuild(
    config: Config, n_features: int, directory: Path, tensors: Mapping[str, Tensor]
) -> Encoder:
    with torch.random.fork_rng(devices=[]):  # drawing weights would move the caller's generator
        encoder = build_encoder(config, n_features)
    try:
        encoder.load_state_dict(dict(tensors))
    except RuntimeError as error:
        path = directory / _NAME
        what = f"of another network: {error}"
        raise DamagedError(path / _WEIGHTS, what, _remedy(path)) from None
    return encoder.eval()


def _require_origin(path: Path, written: Origin, wanted: Origin) -> None:
    words = {
        "config": "configuration (window, features, normalization, split, model, pretrain)",
        "n_features": "number of features",
        "data": "data",
        "seed": "seed",
    }
    for name, value in wanted._asdict().items():
        if getattr(written, name) != value:
            there, here = shorten(getattr(written, name))[:12], str(value)[:12]
            raise StoreError(
                f"{path}: the encoder was pre-trained with another {words[name]}: {there}, "
                f"expected {here}. Go on with what it was made of, or use another directory."
            )


def _remedy(path: Path) -> str:
    return f"Remove the directory {path}, and it is pre-trained again."


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
    """Which rivals the encoder is better than, not distinguished from, worse than."""
    verdicts: dict[str, list[str]] = {
        "better than": [],
        "not distinguished from": [],
        "worse than": [],
    }
    for rival in ("linear", "last", "mean"):
        interval = score.get(f"over_{rival}") or {}
        if interval.get("low") is None:
            continue
        above, below = interval["low"] > 0.0, interval["high"] < 0.0
        word = "better than" if above else "worse than" if below else "not distinguished from"
        verdicts[word].append(rival)
    parts = [f"{word} {' and '.join(rivals)}" for word, rivals in verdicts.items() if rivals]
    return ", ".join(parts) or "too few bars to compare them"
