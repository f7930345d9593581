"""A prepared set on disk: features, prices and masks that every later part reads.

    X.npy [T,N,F] float32        scaled features, rows of absent symbols zero
    present.npy, member.npy, tradable.npy, suspended.npy, delisted.npy [T,N] bool
    close.npy [T,N] float64      last known close, for valuation (the source's own price basis)
    open.npy, high.npy, low.npy, volume.npy, factor.npy, pre_close.npy, limit_up.npy,
    limit_down.npy [T,N]         where the source has them, NaN where there is no bar
    benchmark.npy [T]            where there is a benchmark
    times.npy [T] datetime64[us]
    splits.json, scaler.json, manifest.json

Arrays are opened memory-mapped and read-only: a rolling window costs what it touches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import StoreError
from echelon.features.scaler import Scaler
from echelon.files import sha256_file
from echelon.types import Bools, Floats, Floats32, Times

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Split:
    """A window: its rows of X, and its first and last bar's day."""

    rows: range
    first: date
    last: date


class Prepared:
    """A prepared set, opened lazily."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def open(path: Path) -> Prepared:
        """Open the set in `path`, or in `path`/prepared where `path` is a run directory."""
        inner = path / "prepared"
        prepared = Prepared(inner if inner.is_dir() else path)
        if prepared.manifest.get("format") != FORMAT:
            raise StoreError(
                f"{prepared.path}: written by another version of Echelon. Run `echelon prepare`."
            )
        return prepared

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """T, N, F, W, names, symbols, hashes, what was left out and why."""
        tree: dict[str, Any] = self._json("manifest.json")
        return tree

    @cached_property
    def splits(self) -> dict[str, Split]:
        """Train, valid and test."""
        return {
            name: Split(
                range(s["rows"][0], s["rows"][1]),
                date.fromisoformat(s["first"]),
                date.fromisoformat(s["last"]),
            )
            for name, s in self._json("splits.json").items()
        }

    @cached_property
    def scaler(self) -> Scaler:
        """The fitted scaler."""
        return Scaler.read(self.path / "scaler.json")

    @property
    def names(self) -> tuple[str, ...]:
        """Feature names [F]."""
        return tuple(self.manifest["features"])

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols [N]."""
        return tuple(self.manifest["symbols"])

    @property
    def delist_reasons(self) -> tuple[str | None, ...]:
        """Why each symbol [N] was delisted; None: it was not, or it is not known."""
        # Sets made before reasons were kept have none.
        return tuple(self.manifest.get("delist_reasons") or (None,) * len(self.symbols))

    @property
    def window(self) -> int:
        """Bars in an observation (W)."""
        return int(self.manifest["W"])

    @cached_property
    def x(self) -> Floats32:
        """X [T,N,F]."""
        return self._array("X")

    @cached_property
    def times(self) -> Times:
        """Bar times [T]."""
        return self._array("times")

    @cached_property
    def present(self) -> Bools:
        """[T,N] listed, warmed up, not delisted."""
        return self._array("present")

    @cached_property
    def close(self) -> Floats:
        """[T,N] last known close."""
        return self._array("close")

    def array(self, name: str) -> np.ndarray | None:
        """Any array by name (`member`, `open`, `limit_up` …); None where the source lacks it."""
        return self._array(name) if (self.path / f"{name}.npy").exists() else None

    def verify(self) -> None:
        """Recompute the content hash; raises where a file was changed or damaged."""
        found = content_hash(file_hashes(self.path))
        if found != self.manifest["content_hash"]:
            raise StoreError(
                f"{self.path}: the content hash is {found[:12]}, its manifest says "
                f"{self.manifest['content_hash'][:12]}: a file was changed. "
                "Run `echelon prepare` again."
            )

    def _array(self, name: str) -> np.ndarray:
        path = self.path / f"{name}.npy"
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{path}: missing or damaged ({error}). Run `echelon prepare`."
            ) from None

    def _json(self, name: str) -> Any:  # noqa: ANN401 (JSON)
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{path}: missing or damaged ({error}). Run `echelon prepare`."
            ) from None


def file_hashes(path: Path) -> dict[str, str]:
    """Name → SHA-256 of every file of a prepared set but its manifest, sorted."""
    files = sorted(file for file in path.iterdir() if file.name != "manifest.json")
    return {file.name: sha256_file(file) for file in files}


def file_sizes(path: Path) -> dict[str, int]:
    """Name → bytes of every file of a prepared set but its manifest, sorted."""
    files = sorted(file for file in path.iterdir() if file.name != "manifest.json")
    return {file.name: file.stat().st_size for file in files}


def is_whole(path: Path, key: str) -> bool:
    """Whether `path` holds the complete set of `key`: every file there, as long as it was.

    Contents are not read, as they can be large: `Prepared.verify` does that.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        return bool(
            manifest["format"] == FORMAT
            and manifest["key"] == key
            and manifest["sizes"] == file_sizes(path)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False  # half a set, or another version's


def content_hash(files: Mapping[str, str]) -> str:
    """One hash for what `file_hashes` found."""
    text = "".join(f"{name}:{digest};" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()
