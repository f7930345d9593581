"""Tensors on disk beside a JSON document that vouches for them: both files are whole, or an error.

    DIR/….safetensors    name → tensor
    DIR/….json           what they are, the hash of the tensor file, and a hash of its own

1. The directory is written under a staging name, synced, then renamed: it is whole or not there.
2. Both files are covered by a SHA-256, so a damaged one is an error and never a weight.
3. Nothing is pickled: reading one runs no code of whoever wrote it.

What a damaged file means to a user, a checkpoint or an encoder, whoever asks for it says. torch is
imported on use, as in `runs.checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon import __version__
from echelon.errors import StoreError
from echelon.files import staging_directory, swap_directory, sync, write_atomic

if TYPE_CHECKING:
    import torch


class DamagedError(Exception):
    """What is wrong with which file; whoever reads turns it into an error with advice."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name
        self.what = what


class TensorFiles(NamedTuple):
    """A kind of such a directory: the names of its two files, and what it is called in errors.

    version: of the document; others are refused. otherwise: what to do about another version,
    beside using the Echelon that wrote it
    """

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
        """Write both files in the place of what is at `target`, or change nothing.

        facts: what the document says beside versions and hashes, as JSON can hold it
        allow_nan: or refuse NaN and infinities, which only Python's dialect of JSON has
        Raises: OSError
        """
        from safetensors.torch import save

        data = save(_storable(tensors))
        document = {
            "format": self.version,
            "echelon": __version__,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            **facts,
        }
        document["sha256"] = _digest(document)
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=allow_nan) + "\n"
        with staging_directory(target.parent, f".{target.name}-") as staging:
            write_atomic(staging / self.tensors, data)
            write_atomic(staging / self.document, text)
            sync(staging)
            swap_directory(staging, target)
        sync(target.parent)

    def read(self, path: Path) -> tuple[dict[str, Any], bytes]:
        """The document and the bytes of the tensor file, both checked against their hashes.

        Raises: DamagedError, and StoreError for another version
        """
        document = self.read_document(path)
        try:
            data = (path / self.tensors).read_bytes()
        except OSError as error:
            raise DamagedError(self.tensors, error.strerror or str(error)) from None
        if hashlib.sha256(data).hexdigest() != document["tensors_sha256"]:
            what = f"its {len(data)} bytes do not have the hash in {self.document}"
            raise DamagedError(self.tensors, what)
        return document, data

    def read_document(self, path: Path) -> dict[str, Any]:
        """The document alone, checked; raises as `read` does."""
        try:
            document = json.loads((path / self.document).read_bytes())
        except OSError as error:
            raise DamagedError(self.document, error.strerror or str(error)) from None
        except ValueError as error:
            raise DamagedError(self.document, f"not JSON: {error}") from None
        if not isinstance(document, dict) or "format" not in document:
            raise DamagedError(self.document, f"not the description of any {self.kind}")
        if document["format"] != self.version:
            raise StoreError(
                f"{path / self.document}: {self.kind} format {document['format']!r} of Echelon "
                f"{document.get('echelon', 'unknown')}; this version reads format {self.version}. "
                f"Use the version that wrote it, or {self.otherwise}."
            )
        if document.pop("sha256", None) != _digest(document):
            raise DamagedError(self.document, "its content does not have the hash it states")
        return document

    def unpack(self, data: bytes) -> dict[str, torch.Tensor]:
        """The tensors of what `read` gave; raises DamagedError."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return dict(load(data))
        except SafetensorError as error:
            raise DamagedError(self.tensors, str(error)) from None


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, no two of one memory: safetensors refuses shared weights."""
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        ready[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return ready


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
