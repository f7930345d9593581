"""Tensors on disk next to a JSON document that vouches for them: both files are whole, or an error.

    DIR/….safetensors    name → tensor
    DIR/….json           what they are, the hash of the tensor file, and a hash of its own

1. The directory is written under a staging name, synced, then renamed: it is whole or not there.
2. Both files are covered by a SHA-256, so a damaged one is an error and never a weight.
3. Nothing is pickled: reading one runs no code of whoever wrote it.

What to do about a damaged file, of a checkpoint or an encoder, whoever asks for it says. torch is
imported on use, as in `runs.checkpoint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import TypedDict

from echelon import __version__
from echelon.errors import DamagedError, StoreError, shorten
from echelon.files import (
    check_tree,
    json_line,
    read_json,
    staging_directory,
    swap_directory,
    sync,
    write_atomic,
    write_json,
)

if TYPE_CHECKING:
    import torch


class _Document(TypedDict):
    """What every document says besides its kind's own facts."""

    format: int
    sha256: str
    tensors_sha256: str


class TensorFiles(NamedTuple):
    """A kind of such a directory. otherwise: what to do about a file of another version"""

    tensors: str
    document: str
    kind: str
    version: int
    otherwise: str

    def write(
        self,
        target: Path,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, Any],
        *,
        allow_nan: bool = True,
    ) -> None:
        """Write both files in the place of what is at `target`, or change nothing and raise."""
        from safetensors.torch import save

        seen: set[int] = set()
        ready = {}
        for name, tensor in tensors.items():
            plain = tensor.detach().cpu().contiguous()
            memory = plain.untyped_storage().data_ptr()
            ready[name] = plain.clone() if memory in seen else plain  # weights may be shared
            seen.add(memory)
        data = save(ready)
        document = {
            "format": self.version,
            "echelon": __version__,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            **facts,
        }
        document["sha256"] = _digest(document)
        with staging_directory(target.parent, f".{target.name}-") as staging:
            write_atomic(staging / self.tensors, data)
            write_json(staging / self.document, document, sort_keys=True, allow_nan=allow_nan)
            sync(staging)
            swap_directory(staging, target)
        sync(target.parent)

    def read(self, path: Path, remedy: str) -> tuple[dict[str, Any], bytes]:
        """The document and the bytes of the tensor file, both checked against their hashes."""
        document = self.read_document(path, remedy)
        file = path / self.tensors
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DamagedError(file, error.strerror or str(error), remedy) from None
        if hashlib.sha256(data).hexdigest() != document["tensors_sha256"]:
            what = f"its {len(data)} bytes do not have the hash in {self.document}"
            raise DamagedError(file, what, remedy)
        return document, data

    def read_document(self, path: Path, remedy: str) -> dict[str, Any]:
        """The document alone, checked; raises as `read` does."""
        file = path / self.document
        document = read_json(file, dict[str, Any], remedy)
        if "format" not in document:
            raise DamagedError(file, f"not the description of any {self.kind}", remedy)
        if document["format"] != self.version:
            raise StoreError(
                f"{file}: {self.kind} format {shorten(repr(document['format']), 40)} of Echelon "
                f"{shorten(document.get('echelon', 'unknown'), 40)}; this version reads format "
                f"{self.version}. Use the version that wrote it, or {self.otherwise}."
            )
        check_tree(document, _Document, file, remedy)
        if document.pop("sha256") != _digest(document):
            raise DamagedError(file, "its content does not have the hash it states", remedy)
        return document

    def unpack(self, data: bytes, path: Path, remedy: str) -> dict[str, torch.Tensor]:
        """The tensors of what `read` gave of `path`; raises DamagedError."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return dict(load(data))
        # A header with sound JSON may still name a type that torch has not, or a shape that the
        # bytes are too few for.
        except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as error:
            raise DamagedError(path / self.tensors, str(error), remedy) from None


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_line(document, sort_keys=True, allow_nan=True).encode()).hexdigest()
