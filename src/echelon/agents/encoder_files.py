"""A pre-trained encoder on disk: its weights, where they come from, and what is known of them.

    DIR/encoder/weights.safetensors    the encoder's tensors
    DIR/encoder/encoder.json           what it was made of, hashes, how pre-training went

Both are whole or an error, and nothing is unpickled: see `runs.tensor_files`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from echelon.config import Config
from echelon.errors import StoreError
from echelon.files import exclusive_lock, recover_directory, standing_directory
from echelon.runs.tensor_files import DamagedError, TensorFiles

FORMAT = 1
WEIGHTS = "weights.safetensors"
FACTS = "encoder.json"

_FILES = TensorFiles(WEIGHTS, FACTS, "encoder", FORMAT, "another directory")
_NAME = "encoder"
_SECTIONS = ("window", "features", "normalization", "split", "pretrain")
_MODEL_KEYS = ("encoder", "d_model", "n_layers", "dropout", "periods", "n_periods")
"""Parts of the configuration, and of its `model`, that an encoder depends on."""


class Origin(NamedTuple):
    """What an encoder was made of; data, seed: None where any will do."""

    config: str
    n_features: int
    data: str | None
    seed: int | None

    @staticmethod
    def of(config: Config, n_features: int, data: str | None, seed: int | None) -> Origin:
        """config: its hash is of the parts that pre-training depends on"""
        tree = config.model_dump(mode="json")
        parts = {name: tree[name] for name in _SECTIONS}
        parts["model"] = {name: tree["model"][name] for name in _MODEL_KEYS}
        text = json.dumps(parts, sort_keys=True)
        return Origin(hashlib.sha256(text.encode()).hexdigest(), n_features, data, seed)


class Stored(NamedTuple):
    """What was saved."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def encoder_path(directory: Path) -> Path:
    """Where the encoder of a run is."""
    return directory / _NAME


def locked(directory: Path) -> AbstractContextManager[None]:
    """Keep others from pre-training the same encoder; they wait."""
    return exclusive_lock(directory / ".encoder.lock", f"the encoder in {directory}", wait=True)


def write_encoder(
    directory: Path, origin: Origin, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Write both files, or none."""
    target = encoder_path(directory)
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
    path = standing_directory(encoder_path(directory))
    if path is None:
        return None
    try:
        document, data = _FILES.read(path)
        _require_origin(path / FACTS, document["origin"], origin)
        return Stored(_FILES.unpack(data), document["facts"])
    except DamagedError as damage:
        raise _damaged(path / damage.name, damage.what) from None


def read_facts(directory: Path) -> dict[str, Any] | None:
    """What is known of the encoder of a run, checked; None where it has none."""
    path = standing_directory(encoder_path(directory))
    if path is None:
        return None
    try:
        facts: dict[str, Any] = _FILES.read_document(path)["facts"]
    except DamagedError as damage:
        raise _damaged(path / damage.name, damage.what) from None
    return facts


def foreign_weights(directory: Path, what: str) -> StoreError:
    """The error for whole weights that belong to another network."""
    return _damaged(encoder_path(directory) / WEIGHTS, f"of another network: {what[:200]}")


def _require_origin(path: Path, found: Mapping[str, Any], wanted: Origin) -> None:
    words = {
        "config": "configuration (window, features, normalization, split, model, pretrain)",
        "n_features": "number of features",
        "data": "data",
        "seed": "seed",
    }
    for name, value in wanted._asdict().items():
        if value is not None and found[name] != value:
            there, here = str(found[name])[:12], str(value)[:12]
            raise StoreError(
                f"{path}: the encoder was pre-trained with another {words[name]}: {there}, "
                f"expected {here}. Go on with what it was made of, or use another directory."
            )


def _damaged(path: Path, what: str) -> StoreError:
    return StoreError(
        f"{path}: missing or damaged ({what}). Remove the directory {path.parent}, and it is "
        "pre-trained anew."
    )
