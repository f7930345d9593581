"""A pre-trained encoder on disk: its weights, where they come from, and what is known of them.

    DIR/encoder/weights.safetensors    the encoder's tensors
    DIR/encoder/encoder.json           what it was made of, hashes, how pre-training went

Both are whole or an error, and nothing is unpickled: see `runs.tensor_files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import TypedDict

from echelon.config import Config
from echelon.errors import DamagedError, StoreError, shorten
from echelon.files import (
    check_tree,
    exclusive_lock,
    json_line,
    recover_directory,
    standing_directory,
)
from echelon.runs.tensor_files import TensorFiles

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
        text = json_line(parts, sort_keys=True, allow_nan=True)
        return Origin(hashlib.sha256(text.encode()).hexdigest(), n_features, data, seed)


class Stored(NamedTuple):
    """What was saved. hash: of the weights"""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    hash: str


class _Document(TypedDict):
    """What encoder.json says beside versions and hashes."""

    origin: Origin
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
    remedy = _remedy(path)
    document, data = _FILES.read(path, remedy)
    written = check_tree(document, _Document, path / FACTS, remedy)
    _require_origin(path / FACTS, written["origin"], origin)
    tensors = _FILES.unpack(data, path, remedy)
    return Stored(tensors, written["facts"], str(document["tensors_sha256"]))


def read_facts(directory: Path) -> dict[str, Any] | None:
    """What is known of the encoder of a run, checked; None where it has none."""
    path = standing_directory(encoder_path(directory))
    if path is None:
        return None
    remedy = _remedy(path)
    document = _FILES.read_document(path, remedy)
    return check_tree(document, _Document, path / FACTS, remedy)["facts"]


def read_hash(directory: Path) -> str | None:
    """Hash of the weights of the encoder of a run; None where it has none."""
    path = standing_directory(encoder_path(directory))
    if path is None:
        return None
    return str(_FILES.read_document(path, _remedy(path))["tensors_sha256"])


def foreign_weights(directory: Path, what: str) -> DamagedError:
    """The error for whole weights that belong to another network."""
    path = encoder_path(directory)
    return DamagedError(path / WEIGHTS, f"of another network: {what}", _remedy(path))


def _require_origin(path: Path, written: Origin, wanted: Origin) -> None:
    words = {
        "config": "configuration (window, features, normalization, split, model, pretrain)",
        "n_features": "number of features",
        "data": "data",
        "seed": "seed",
    }
    for name, value in wanted._asdict().items():
        if value is not None and getattr(written, name) != value:
            there, here = shorten(getattr(written, name))[:12], str(value)[:12]
            raise StoreError(
                f"{path}: the encoder was pre-trained with another {words[name]}: {there}, "
                f"expected {here}. Go on with what it was made of, or use another directory."
            )


def _remedy(path: Path) -> str:
    return f"Remove the directory {path}, and it is pre-trained anew."
