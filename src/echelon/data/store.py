"""The Parquet store: datasets on disk that are whole or not there at all.

Layout, below the store's root:

    <dataset>/CURRENT.json              the manifest, what is known without opening the bars;
                                        replaced in one rename
    <dataset>/v-<hash>/bars/2004.parquet    a partition: a year, month or day of bars
    <dataset>/v-<hash>/symbols.parquet      first and last bar, anchor, listing facts
    <dataset>/v-<hash>/membership.parquet, benchmark.parquet     where there are such

A version directory never changes once it has its name. An import writes a new one next to it, waits
until it is on disk, and then replaces CURRENT.json, so an import that dies leaves the store as it
was, and one of the same content mends a damaged version. Partitions that an update does not touch
are hard links to the version before. Whoever reads several files of one dataset pins it first
(`Store.pin_dataset`): an import in between then changes nothing under the reader's eyes.

What reads or writes a table imports polars itself: `echelon data show` needs the manifests alone.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from echelon import files
from echelon.errors import DamagedError, StoreError, shorten
from echelon.sources import SourceInfo

if TYPE_CHECKING:
    import polars as pl

log = logging.getLogger(__name__)

CURRENT = "CURRENT.json"
_FORMAT = 1
REIMPORT = "Import the dataset again (`echelon data import`)."
TABLES = ("symbols", "membership", "benchmark")


@dataclass(frozen=True, slots=True)
class Partition:
    """One Parquet file: a year of daily, a month of 5-minute or a day of 1-minute bars."""

    key: str
    rows: int
    first: datetime
    last: datetime
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A dataset in the store; the same data, in any order of rows, have the same content hash."""

    name: str
    version: str  # the directory that holds it
    info: SourceInfo
    partitions: tuple[Partition, ...]
    tables: dict[str, str]  # name → digest
    content_hash: str
    fingerprint: str  # of the source it was imported from and of the code that imported it
    quarantined: int = 0

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.partitions)

    @property
    def span(self) -> tuple[datetime, datetime]:
        return self.partitions[0].first, self.partitions[-1].last

    def to_tree(self) -> dict[str, Any]:
        tree = asdict(self) | {"format": _FORMAT}
        tree["info"]["fields"] = sorted(self.info.fields)
        for part in tree["partitions"]:
            part |= {"first": str(part["first"]), "last": str(part["last"])}
        return tree

    @staticmethod
    def read(path: Path) -> Manifest:
        """Read what `to_tree` became; raises where it is not what was written."""
        if files.read_json(path, dict, REIMPORT).get("format") != _FORMAT:
            raise StoreError(f"{path}: written by another version of Echelon. {REIMPORT}")
        manifest = files.read_json(path, Manifest, REIMPORT)
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
        if content_digest(manifest) != manifest.content_hash:
            raise DamagedError(path, "its content hash is not that of its parts", REIMPORT)
        return manifest


def content_digest(manifest: Manifest) -> str:
    """The content hash of a dataset, from the digests of its parts."""
    info = manifest.info
    return digest_of(
        {
            "info": [info.freq, info.calendar, info.timezone, info.price_basis],
            "fields": sorted(info.fields),
            "partitions": [[p.key, p.digest] for p in manifest.partitions],
            "tables": manifest.tables,
        }
    )


def digest_frame(frame: pl.DataFrame) -> str:
    """Hash the values of a frame, independent of how Parquet would lay them out."""
    import numpy as np
    import polars as pl

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
    paths = sorted({path for pattern in patterns for path in root.glob(pattern)})
    return digest_of({p.relative_to(root).as_posix(): files.sha256_file(p) for p in paths})


def import_fingerprint(source: str, extras: str) -> str:
    """What an import depends on: the fingerprints of source and extra tables, and our own code."""
    steps = (f"data/{step}.py" for step in ("bars", "importing", "validate"))
    code = digest_code("data/sources/*.py", "data/sources/*.yaml", *steps)
    return digest_of({"source": source, "extras": extras, "code": code})


class Store:
    """A directory of datasets; pin: the version of one that is shown, which makes it read-only."""

    def __init__(self, root: Path, pin: Manifest | None = None) -> None:
        self.root = root
        self.pin = pin

    def pin_dataset(self, name: str) -> Self:
        """The same store (or view) on the dataset's present version, gone two imports later."""
        other = copy.copy(self)
        other.pin = self.manifest(name)
        return other

    def datasets(self) -> list[str]:
        return sorted(p.parent.name for p in self.root.glob(f"*/{CURRENT}"))

    def __contains__(self, name: str) -> bool:
        return (self.root / name / CURRENT).is_file()

    def directory(self, name: str) -> Path:
        """Where a dataset lives; refuses names that are not plain file names."""
        if not re.fullmatch(r"[\w][\w.+-]*", name):
            raise StoreError(
                f"dataset name {name!r}: use letters, digits, dot, plus, dash and underscore."
            )
        return self.root / name

    def manifest(self, name: str) -> Manifest:
        if self.pin is not None and self.pin.name == name:
            return self.pin
        path = self.directory(name) / CURRENT
        if not path.is_file():
            have = ", ".join(self.datasets()) or "none"
            raise StoreError(
                f"{self.root}: no dataset {name!r} (there: {have}). "
                "Import it with `echelon data import`."
            )
        manifest = Manifest.read(path)
        if manifest.name != name:
            raise DamagedError(
                path, f"of the dataset {shorten(repr(manifest.name), 60)}, not {name!r}", REIMPORT
            )
        return manifest

    def find(self, name: str) -> Manifest | None:
        """The manifest, or None: also where it is damaged or too old, which an import mends."""
        if name not in self:
            return None
        try:
            return self.manifest(name)
        except StoreError as error:
            log.warning("%s It counts as not there.", error)
            return None

    def read_bars(
        self,
        name: str,
        key: str,
        symbols: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> pl.DataFrame:
        """One partition's bars, sorted by time and symbol."""
        import polars as pl

        path = self._verified_bars(name, key)
        lazy = pl.scan_parquet(path, glob=False)
        if symbols is not None:
            lazy = lazy.filter(pl.col("symbol").is_in(list(symbols)))
        if columns is not None:
            lazy = lazy.select(columns)
        with _naming(path):
            return lazy.collect()

    def verify(self, name: str, start: datetime | None = None, end: datetime | None = None) -> None:
        """Verify what lies between `start` and `end`: worker processes then need not."""
        for key in self.partitions(name, start, end):
            self._verified_bars(name, key)

    def partitions(
        self, name: str, start: datetime | None = None, end: datetime | None = None
    ) -> list[str]:
        return [
            p.key
            for p in self.manifest(name).partitions
            if (start is None or p.last >= start) and (end is None or p.first <= end)
        ]

    def table(self, name: str, table: str) -> pl.DataFrame | None:
        """`symbols`, `membership` or `benchmark`; None where the dataset has no such table."""
        import polars as pl

        path = self._version(name) / f"{table}.parquet"
        digest = self.manifest(name).tables.get(table)
        if digest is None:
            return None
        _verify_file(path, _table_digest, digest)
        with _naming(path):
            return pl.read_parquet(path, glob=False)

    def symbols(self, name: str) -> pl.DataFrame:
        """The symbols table: symbol, first, last, bars, anchor, listed, delisted, reason, name."""
        frame = self.table(name, "symbols")
        if frame is None:
            raise StoreError(f"{self.directory(name)}: symbols table missing. Import it again.")
        return frame

    def replace_table(self, name: str, table: str, frame: pl.DataFrame) -> Manifest:
        """Give the dataset another membership or benchmark; its bars stay as they are."""
        home = self.directory(name)
        with files.exclusive_lock(home / ".lock", f"dataset {name!r}"):
            old = self.manifest(name)
            with files.staging_directory(home) as staging:
                old_home, link = home / old.version, files.link_or_copy
                shutil.copytree(old_home, staging, dirs_exist_ok=True, copy_function=link)
                (staging / f"{table}.parquet").unlink(missing_ok=True)
                frame.write_parquet(staging / f"{table}.parquet", compression="zstd")
                tables = old.tables | {table: digest_frame(frame)}
                return self.publish(staging, replace(old, tables=tables))

    def publish(self, staging: Path, draft: Manifest) -> Manifest:
        """Make a finished staging directory the current version. Call with the lock held."""
        assert self.pin is None, "a pinned store is for reading"
        content = content_digest(draft)
        home = self.directory(draft.name)
        previous = self.find(draft.name)
        version = f"v-{content[:16]}"
        if previous is not None and previous.version == version:
            # The same again: the old files may be damaged, and may be being read.
            version += "-2"
        done = replace(draft, version=version, content_hash=content)
        if (home / version).exists():
            shutil.rmtree(home / version)  # an older version that nothing points to
        files.sync_tree(staging)
        staging.rename(home / version)
        files.sync(home)
        files.write_json(home / CURRENT, done.to_tree(), sort_keys=True)
        if previous is None:
            return done  # whatever a damaged manifest pointed to stays until the next import
        # The version before stays for readers that opened it; anything older goes.
        for path in home.glob("v-*"):
            if path.name not in (version, previous.version):
                shutil.rmtree(path, ignore_errors=True)
        return done

    def _verified_bars(self, name: str, key: str) -> Path:
        """The file of a partition, whose values are those that were imported."""
        path = self._version(name) / "bars" / f"{key}.parquet"
        part = next((p for p in self.manifest(name).partitions if p.key == key), None)
        if part is None:
            raise StoreError(f"dataset {name!r} has no partition {key!r}.")
        _verify_file(path, _bars_digest, _bars_facts(part))
        return path

    def _version(self, name: str) -> Path:
        return self.directory(name) / self.manifest(name).version


def _verify_file(path: Path, digest: Callable[[Path], str], expected: str) -> None:
    """Compare the values (not the bytes) of a file with what was imported, once a command."""
    with _naming(path):
        values = files.digest_once(path, digest.__name__, digest)
    if values != expected:
        raise DamagedError(path, "its content is not what was imported", REIMPORT)


def _table_digest(path: Path) -> str:
    import polars as pl

    return digest_frame(pl.read_parquet(path, glob=False))


def _bars_digest(path: Path) -> str:
    import polars as pl

    frame = pl.read_parquet(path, glob=False)
    first, last = frame["time"].min(), frame["time"].max()
    assert isinstance(first, datetime)
    assert isinstance(last, datetime)
    return _bars_facts(Partition("", frame.height, first, last, digest_frame(frame)))


def _bars_facts(part: Partition) -> str:
    """What a manifest says of a partition and its file must confirm."""
    return f"{part.digest} {part.rows} {part.first} {part.last}"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say of which file it was where it cannot be read."""
    import polars as pl

    try:
        yield
    except (
        pl.exceptions.PolarsError,
        pl.exceptions.PanicException,  # of its Parquet reader, on bytes that make no sense
        OSError,
        ValueError,
        AssertionError,  # no times in it
    ) as error:
        lines = str(error).splitlines()
        raise DamagedError(path, lines[0] if lines else type(error).__name__, REIMPORT) from None
