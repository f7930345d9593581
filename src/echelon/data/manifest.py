"""What the store knows of a dataset without opening its bars."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.data.bars import SourceInfo
from echelon.errors import DamagedError, StoreError, shorten
from echelon.files import read_json, sha256_file

_FORMAT = 1
REIMPORT = "Import the dataset anew (`echelon data import`)."
TABLES = ("symbols", "membership", "benchmark")


@dataclass(frozen=True, slots=True)
class Partition:
    """One Parquet file of bars: a year of daily, a month of 5-minute or a day of 1-minute bars."""

    key: str
    rows: int
    first: datetime
    last: datetime
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A dataset in the store.

    version: the directory that holds it
    content_hash: identifies bars, symbols, membership, benchmark and what kind of bars they are;
        the same data imported twice, in any order of rows, has the same hash
    fingerprint: of the source it was imported from and of the code that imported it
    """

    name: str
    version: str
    info: SourceInfo
    partitions: tuple[Partition, ...]
    tables: dict[str, str]
    content_hash: str
    fingerprint: str
    quarantined: int = 0

    @property
    def rows(self) -> int:
        """Bars in all."""
        return sum(p.rows for p in self.partitions)

    @property
    def span(self) -> tuple[datetime, datetime]:
        """Times of the first and the last bar."""
        return self.partitions[0].first, self.partitions[-1].last

    def to_tree(self) -> dict[str, Any]:
        """As JSON has it."""
        tree = asdict(self) | {"format": _FORMAT}
        tree["info"]["fields"] = sorted(self.info.fields)
        for part in tree["partitions"]:
            part |= {"first": str(part["first"]), "last": str(part["last"])}
        return tree

    @staticmethod
    def read(path: Path) -> Manifest:
        """Read what `to_tree` became; raises where it is not what was written."""
        if read_json(path, dict, REIMPORT).get("format") != _FORMAT:
            raise StoreError(f"{path}: written by another version of Echelon. {REIMPORT}")
        manifest = read_json(path, Manifest, REIMPORT)
        for names, pattern in (
            ([manifest.version], r"v-[0-9a-f]{16}(-2)?"),
            ([part.key for part in manifest.partitions], r"\d{4}(-\d\d){0,2}"),
            (manifest.tables, "|".join(TABLES)),
        ):
            # They become names of files.
            wrong = next((name for name in names if not re.fullmatch(pattern, name, re.A)), None)
            if wrong is not None:
                raise DamagedError(path, f"{shorten(repr(wrong), 60)} is no name of ours", REIMPORT)
        if not manifest.partitions:
            raise DamagedError(path, "no partitions", REIMPORT)
        if content_digest(manifest.info, manifest.partitions, manifest.tables) != (
            manifest.content_hash
        ):
            raise DamagedError(path, "its content hash is not that of its parts", REIMPORT)
        return manifest


def content_digest(
    info: SourceInfo, partitions: Iterable[Partition], tables: Mapping[str, str]
) -> str:
    """The content hash of a dataset, from the digests of its parts."""
    return digest_of(
        {
            "info": [info.freq, info.calendar, info.timezone, info.price_basis],
            "fields": sorted(info.fields),
            "partitions": [[p.key, p.digest] for p in partitions],
            "tables": dict(tables),
        }
    )


def digest_frame(frame: pl.DataFrame) -> str:
    """Hash the values of a frame, independent of how Parquet would lay them out."""
    state = hashlib.sha256()
    for column in frame.iter_columns():
        state.update(f"{column.name}:{column.dtype}:{len(column)};".encode())
        nulls = column.is_null()
        if nulls.any():
            state.update(np.packbits(nulls.to_numpy()).tobytes())
        if column.dtype == pl.String:
            state.update(column.fill_null("").str.join("\x00").item().encode())
        else:
            plain = column.to_physical().fill_null(0)
            state.update(np.ascontiguousarray(plain.to_numpy()).tobytes())
    return state.hexdigest()


def digest_of(parts: dict[str, object]) -> str:
    """Hash a small mapping of named values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def digest_code(*patterns: str) -> str:
    """Hash the source files of this package that match the patterns, names included."""
    root = Path(__file__).parents[1]
    files = sorted({path for pattern in patterns for path in root.glob(pattern)})
    return digest_of({path.relative_to(root).as_posix(): sha256_file(path) for path in files})


def import_fingerprint(source: str, extras: str) -> str:
    """What an import depends on: the fingerprints of source and extra tables, and our own code.

    A dataset that older code made from the same files is imported anew by `ensure_dataset`.
    """
    return digest_of({"source": source, "extras": extras, "code": _import_code()})


@cache
def _import_code() -> str:
    steps = ("bars", "importing", "validate")
    return digest_code("data/sources/*.py", *(f"data/{step}.py" for step in steps))
