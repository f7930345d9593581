"""A prepared set on disk: features, prices and masks that every later part reads.

    X.npy [T,N,F] float32        scaled features, rows of absent symbols zero
    present.npy, member.npy, tradable.npy, suspended.npy, delisted.npy [T,N] bool
    close.npy [T,N] float64      last known close, for valuation (the source's own price basis)
    open.npy, high.npy, low.npy, volume.npy, factor.npy, pre_close.npy, limit_up.npy,
    limit_down.npy [T,N]         where the source has them, NaN where there is no bar
    benchmark.npy [T]            where there is a benchmark
    times.npy [T] datetime64[us]
    splits.json, scaler.json, manifest.json

Arrays are opened memory-mapped and read-only: a rolling window costs what it touches. What a set
holds is verified when it is opened, once a command (`echelon.files`): the content of every file
against the manifest, and whether manifest, arrays, splits and scaler fit each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from echelon.errors import DamagedError, StoreError, shorten
from echelon.features.scaler import Scaler
from echelon.files import read_array, read_json, sha256_once
from echelon.runs.directory import DataFacts
from echelon.types import Bools, Floats, Floats32, Freq, PriceBasis, Times

PREPARED_FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "valid", "test")
PREPARE_AGAIN = (
    "Make it again: `echelon prepare --resume RUN` where agents were trained on it, else "
    "`echelon prepare`."
)
ARRAYS: Mapping[str, tuple[str, str]] = {
    "X": ("TNF", "<f4"),
    "times": ("T", "<M8[us]"),
    "close": ("TN", "<f8"),
    **dict.fromkeys(("present", "member", "tradable", "suspended", "delisted"), ("TN", "|b1")),
}
_GRIDS = ("open", "high", "low", "volume", "factor", "pre_close", "limit_up", "limit_down")
OPTIONAL: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_GRIDS, ("TN", "<f8")),
    "benchmark": ("T", "<f8"),
}
"""As `ARRAYS`, of what a source may lack."""


class PreparedManifest(TypedDict):
    """What manifest.json holds. Sets made before have no sources, reasons and facts_hash."""

    format: int
    key: str
    content_hash: str
    files: dict[str, str]
    dataset: DataFacts
    freq: Freq
    calendar: str
    timezone: str
    price_basis: PriceBasis
    T: int
    N: int
    F: int
    W: int
    features: list[str]
    sources: NotRequired[list[str]]
    groups: list[str]
    lookbacks: dict[str, int]
    warmup: int
    symbols: list[str]
    delist_reasons: NotRequired[list[str | None] | None]
    left_out: dict[str, list[str]]
    echelon: str
    facts_hash: NotRequired[str]


class _SplitTree(TypedDict):
    rows: tuple[int, int]
    first: date
    last: date


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
    def open(path: Path, expected: str | None = None) -> Prepared:
        """Open and verify the set in `path`, or in `path`/prepared of a run directory."""
        inner = path / "prepared"
        prepared = Prepared(inner if inner.is_dir() else path)
        prepared.verify(expected=expected)
        return prepared

    @cached_property
    def manifest(self) -> PreparedManifest:
        """T, N, F, W, names, symbols, hashes, what was left out and why."""
        path = self.path / MANIFEST
        tree: dict[str, Any] = read_json(path, dict, PREPARE_AGAIN)
        if tree.get("format") != PREPARED_FORMAT:
            raise StoreError(
                f"{path}: of format {shorten(tree.get('format'), 20)}, expected {PREPARED_FORMAT}: "
                f"damaged, or written by another version of Echelon. {PREPARE_AGAIN}"
            )
        manifest: PreparedManifest = read_json(path, PreparedManifest, PREPARE_AGAIN)
        if "facts_hash" in tree and tree["facts_hash"] != facts_hash(tree):
            raise DamagedError(path, "its facts are not those that were written", PREPARE_AGAIN)
        return manifest

    @cached_property
    def splits(self) -> dict[str, Split]:
        path = self.path / "splits.json"
        tree: dict[str, _SplitTree] = read_json(path, dict[str, _SplitTree], PREPARE_AGAIN)
        if set(tree) != set(SPLITS):
            what = f"expected {', '.join(SPLITS)}, not {sorted(tree)}"
            raise DamagedError(path, what, PREPARE_AGAIN)
        return {name: Split(range(*s["rows"]), s["first"], s["last"]) for name, s in tree.items()}

    @cached_property
    def scaler(self) -> Scaler:
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

    def verify(self, *, key: str | None = None, expected: str | None = None) -> None:
        """Raise where the set is not what was written, or not of this key or content hash."""
        manifest = self.manifest
        content = manifest["content_hash"]
        if key is not None and manifest["key"] != key:
            raise self._damage(MANIFEST, f"of the key {manifest['key'][:12]}, not {key[:12]}")
        if expected is not None and content != expected:
            raise StoreError(
                f"{self.path}: its content hash is {shorten(content[:12])}, but the run's agents "
                f"were trained on {shorten(expected[:12])} (run.json). {PREPARE_AGAIN}"
            )
        if content_hash(manifest["files"]) != content:
            raise self._damage(MANIFEST, "its content hash is not that of its files")
        files, digests = manifest["files"], file_hashes(self.path)
        for name in sorted({*files, *digests}):
            if name not in digests:
                raise self._damage(name, "no such file")
            if name not in files:
                raise self._damage(name, "not one of the set's files")
            if digests[name] != files[name]:
                known = f"its hash is {digests[name][:12]}, the manifest says {files[name][:12]}"
                raise self._damage(name, f"{known}: the file was changed")
        self._verify_arrays()
        self._verify_facts()

    def _verify_arrays(self) -> None:
        """Every array has the axes of the manifest, and there is none that nobody knows."""
        manifest = self.manifest
        sizes = {"T": manifest["T"], "N": manifest["N"], "F": manifest["F"]}
        there = {name.removesuffix(".npy") for name in manifest["files"] if name.endswith(".npy")}
        wanted = {**ARRAYS, **{name: OPTIONAL[name] for name in there & set(OPTIONAL)}}
        for name in sorted(there | set(wanted)):
            if name not in wanted:
                raise self._damage(f"{name}.npy", "no array of a prepared set is called so")
            axes, kind = wanted[name]
            array, shape = self._array(name), tuple(sizes[axis] for axis in axes)
            if array.shape != shape or array.dtype != np.dtype(kind):
                raise self._damage(
                    f"{name}.npy",
                    f"expected {list(axes)} = {shape} of {np.dtype(kind)} as the manifest says, "
                    f"it is {array.shape} of {array.dtype}",
                )

    def _verify_facts(self) -> None:
        manifest = self.manifest
        for fact, axis in (("features", "F"), ("groups", "F"), ("symbols", "N")):
            if len(manifest[fact]) != manifest[axis]:  # type: ignore[literal-required]
                raise self._damage(MANIFEST, f"the number of its {fact} is not its {axis}")
        for fact in ("features", "symbols"):
            if len(set(manifest[fact])) != len(manifest[fact]):  # type: ignore[literal-required]
                raise self._damage(MANIFEST, f"its {fact} have one name twice")
        if len(self.delist_reasons) != manifest["N"]:
            raise self._damage(MANIFEST, "the number of its delist_reasons is not its N")
        if manifest["W"] < 1 or manifest["T"] < 1:
            raise self._damage(MANIFEST, "T and W must be 1 or more")
        if self.scaler.names != self.names:
            raise self._damage("scaler.json", "its names are not the features of the set")
        days = self.times.astype("datetime64[D]")
        for name, split in self.splits.items():
            start, stop = split.rows.start, split.rows.stop
            fits = 0 <= start < stop <= len(days)
            if not fits or [split.first, split.last] != days[[start, stop - 1]].tolist():
                raise self._damage("splits.json", f"rows and days of {name} do not fit")

    def _damage(self, name: str, what: str) -> DamagedError:
        return DamagedError(self.path / name, what, PREPARE_AGAIN)

    def _array(self, name: str) -> np.ndarray:
        return read_array(self.path / f"{name}.npy", PREPARE_AGAIN)


def file_hashes(path: Path) -> dict[str, str]:
    """Name → SHA-256 of every file of a prepared set but its manifest, sorted."""
    try:
        files = sorted(file for file in path.iterdir() if file.name != MANIFEST)
        for file in files:
            if not file.is_file():  # a pipe would never end
                raise DamagedError(file, "not a file", PREPARE_AGAIN)
        # Two threads: X is about as large as all else together.
        with ThreadPoolExecutor(2) as pool:
            digests = list(pool.map(sha256_once, files))
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error), PREPARE_AGAIN) from None
    return {file.name: digest for file, digest in zip(files, digests, strict=True)}


def content_hash(files: Mapping[str, str]) -> str:
    """One hash for what `file_hashes` gave."""
    text = "".join(f"{name}:{digest};" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def facts_hash(tree: Mapping[str, Any]) -> str:
    """Hash of all that a manifest holds but this hash itself."""
    facts = {name: value for name, value in tree.items() if name != "facts_hash"}
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
