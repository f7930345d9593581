"""A state on disk: arrays by name and a JSON document, in one file that is whole or refused.

The file is safetensors; the document and the hash of everything stand in its header. Written to a
temporary name and renamed, so that a reader sees the old state or the new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from echelon.errors import DamagedError
from echelon.files import json_line, parse_json, write_atomic
from echelon.states import State

MAX_BYTES = 1 << 32
_FORMAT = 1


def write_state(path: Path, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
    write_atomic(path, encode_state(arrays, facts))


def encode_state(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> bytes:
    plain = {name: np.array(part, order="C") for name, part in arrays.items()}
    document = json_line({"format": _FORMAT, **facts}, sort_keys=True, allow_nan=True)
    header = {"document": document, "sha256": _digest(plain, document)}
    return bytes(save(plain, metadata=header))


def read_state(path: Path, remedy: str) -> tuple[State, dict[str, Any]]:
    """(arrays, document) of what `write_state` wrote; DamagedError says what is wrong."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DamagedError(path, f"larger than {MAX_BYTES:,} bytes", remedy)
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error), remedy) from None
    return decode_state(data, path, remedy)


def decode_state(data: bytes, path: Path, remedy: str) -> tuple[State, dict[str, Any]]:
    """As `read_state`, of what was read already from `path`."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = parse_json(data[8 : 8 + length], dict[str, Any], path, remedy)
        arrays: State = dict(load(data))
    except (SafetensorError, LookupError, ValueError, TypeError) as error:
        raise DamagedError(path, str(error), remedy) from None
    about = header.get("__metadata__")
    document = about.get("document") if isinstance(about, dict) else None
    if not isinstance(document, str) or not isinstance(about, dict):
        raise DamagedError(path, "no state of an engine", remedy)
    if about.get("sha256") != _digest(arrays, document):
        raise DamagedError(path, "its content does not have the hash it states", remedy)
    facts = parse_json(document.encode(), dict[str, Any], path, remedy)
    if facts.pop("format", None) != _FORMAT:
        raise DamagedError(path, f"not of format {_FORMAT}", remedy)
    return arrays, facts


def _digest(arrays: Mapping[str, NDArray[Any]], document: str) -> str:
    state = hashlib.sha256(document.encode())
    for name, part in sorted(arrays.items()):
        state.update(f"{name}:{part.dtype}:{list(part.shape)};".encode())
        state.update(part.tobytes())
    return state.hexdigest()
