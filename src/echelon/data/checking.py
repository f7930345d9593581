"""`echelon data check`: everything wrong with a source or a stored dataset, at once."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from echelon.data.bars import RawFrame
from echelon.data.importing import Extras, Progress, import_source
from echelon.data.manifest import digest_frame
from echelon.data.sources._protocol import Source
from echelon.data.store import Store
from echelon.data.suspicious import suspicious
from echelon.data.validate import validate
from echelon.errors import DataError, StoreError
from echelon.types import Problem


def check_source(
    source: Source, extras: Extras, scratch: Path, *, progress: Progress | None = None
) -> list[Problem]:
    """All problems of a source: what an import would refuse, and what merely looks odd.

    It is a real import, into a store in `scratch`, with every bad row set aside.
    """
    store = Store(scratch)
    try:
        report = import_source(
            source, store, "check", quarantine=True, extras=extras, progress=progress
        )
    except DataError as error:
        found = getattr(error, "problems", ())
        if not found:
            raise
        return list(found)
    return [*report.problems, *_odd(store, "check", source.info().name)]


def check_stored(store: Store, name: str) -> list[Problem]:
    """All problems of a stored dataset: files changed since the import, bad rows, oddities."""
    manifest = store.manifest(name)
    problems: list[Problem] = []
    for part in manifest.partitions:
        path = store.directory(name) / manifest.version / "bars" / f"{part.key}.parquet"
        try:
            frame = store.read_bars(name, part.key)
        except StoreError as error:
            problems.append(Problem(str(path), None, None, str(error), "Import the dataset anew"))
            continue
        if digest_frame(frame) != part.digest:
            problems.append(
                Problem(
                    str(path),
                    None,
                    None,
                    "its content is not what was imported",
                    "Import the dataset anew",
                )
            )
        numbered = frame.with_columns(row=pl.int_range(pl.len(), dtype=pl.Int64))
        problems += validate(RawFrame(numbered, str(path)), manifest.info).problems
    if any(p.severity == "error" for p in problems):
        return problems
    return [*problems, *_odd(store, name, name)]


def _odd(store: Store, name: str, label: str) -> list[Problem]:
    frames = [store.read_bars(name, key) for key in store.partitions(name)]
    return suspicious(pl.concat(frames), store.manifest(name).info, label)
