"""What the store knows of a dataset without opening its bars."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

from echelon.data.bars import SourceInfo
from echelon.errors import StoreError
from echelon.files import sha256_file

FORMAT = 1


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

    def to_json(self) -> str:
        """Serialise, sorted."""
        tree = asdict(self) | {"format": FORMAT}
        tree["info"]["fields"] = sorted(self.info.fields)
        return json.dumps(tree, indent=1, sort_keys=True, default=str, ensure_ascii=False)

    @staticmethod
    def from_json(text: str, path: Path) -> Manifest:
        """Parse what `to_json` wrote; `path` is named in errors."""
        try:
            tree = json.loads(text)
            if tree.pop("format") != FORMAT:
                raise StoreError(f"{path}: written by another version of Echelon. Import anew.")
            info = tree.pop("info")
            info["fields"] = frozenset(info["fields"])
            partitions = tuple(
                Partition(
                    **p
                    | {
                        "first": datetime.fromisoformat(p["first"]),
                        "last": datetime.fromisoformat(p["last"]),
                    }
                )
                for p in tree.pop("partitions")
            )
            return Manifest(info=SourceInfo(**info), partitions=partitions, **tree)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}: damaged ({error}). Import the dataset anew.") from None


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
    steps = ("bars", "importing", "joining", "validate")
    return digest_code("data/sources/*.py", *(f"data/{step}.py" for step in steps))
