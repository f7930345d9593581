"""A pre-trained encoder on disk: its weights, where they come from, and what is known of them.

    DIR/encoder/weights.safetensors    the encoder's tensors
    DIR/encoder/encoder.json           what it was made of, hashes, how pre-training went

Both appear at once, by renaming a finished directory; both are covered by a SHA-256; nothing is
unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from echelon import __version__
from echelon.config import Config
from echelon.errors import StoreError
from echelon.files import (
    exclusive_lock,
    recover_directory,
    staging_directory,
    standing_directory,
    swap_directory,
    sync,
    write_atomic,
)

FORMAT = 1
WEIGHTS = "weights.safetensors"
FACTS = "encoder.json"

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
    data = save({name: value.detach().contiguous() for name, value in tensors.items()})
    document: dict[str, Any] = {
        "format": FORMAT,
        "echelon": __version__,
        "origin": origin._asdict(),
        "tensors_sha256": hashlib.sha256(data).hexdigest(),
        "facts": dict(facts),
    }
    document["sha256"] = _digest(document)
    text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
    try:
        recover_directory(target)
        with staging_directory(directory, f".{target.name}-") as staging:
            write_atomic(staging / WEIGHTS, data)
            write_atomic(staging / FACTS, text)
            sync(staging)
            swap_directory(staging, target)
        sync(directory)
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
    document = _document(path / FACTS)
    _require_origin(path / FACTS, document["origin"], origin)
    try:
        data = (path / WEIGHTS).read_bytes()
        if hashlib.sha256(data).hexdigest() != document["tensors_sha256"]:
            raise _damaged(path / WEIGHTS, f"its {len(data)} bytes do not have the hash in {FACTS}")
        tensors = load(data)
    except OSError as error:
        raise _damaged(path / WEIGHTS, error.strerror or str(error)) from None
    except SafetensorError as error:
        raise _damaged(path / WEIGHTS, str(error)) from None
    return Stored(tensors, document["facts"])


def foreign_weights(directory: Path, what: str) -> StoreError:
    """The error for whole weights that belong to another network."""
    return _damaged(encoder_path(directory) / WEIGHTS, f"of another network: {what[:200]}")


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise _damaged(path, f"not JSON: {error}") from None
    if not isinstance(document, dict) or "format" not in document:
        raise _damaged(path, "not the description of an encoder")
    if document["format"] != FORMAT:
        raise StoreError(
            f"{path}: encoder format {document['format']!r} of Echelon "
            f"{document.get('echelon', 'unknown')}; this version reads format {FORMAT}. Use the "
            "version that wrote it, or another directory."
        )
    if document.pop("sha256", None) != _digest(document):
        raise _damaged(path, "its content does not have the hash it states")
    return document


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


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
