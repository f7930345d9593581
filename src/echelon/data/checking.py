"""`echelon data check`: everything wrong with a source or a stored dataset, at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from echelon.data.bars import RawFrame
from echelon.data.importing import Extras, Progress, import_source
from echelon.data.sources._protocol import Source
from echelon.data.store import Store
from echelon.data.suspicious import suspicious_in
from echelon.data.validate import validate
from echelon.errors import DataError, StoreError
from echelon.types import Problem

_CHUNK_ROWS = 5_000_000
"""So many bars, about half a gigabyte, are looked at together for what is odd about them."""


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
    store = store.pinned(name)
    manifest = store.manifest(name)
    home = store.directory(name) / manifest.version
    problems: list[Problem] = []
    for part in manifest.partitions:
        path = home / "bars" / f"{part.key}.parquet"
        try:
            frame = store.read_bars(name, part.key)
        except StoreError as error:
            problems.append(_broken(path, str(error)))
            continue
        numbered = frame.with_columns(row=pl.int_range(pl.len(), dtype=pl.Int64))
        problems += validate(RawFrame(numbered, str(path)), manifest.info).problems
    for table in manifest.tables:
        try:
            store.table(name, table)
        except StoreError as error:
            problems.append(_broken(home / f"{table}.parquet", str(error)))
    if any(p.severity == "error" for p in problems):
        return problems
    return [*problems, *_odd(store, name, name)]


def _broken(path: Path, message: str) -> Problem:
    return Problem(str(path), None, None, message, "Import the dataset anew")


def _odd(store: Store, name: str, label: str) -> list[Problem]:
    return suspicious_in(_chunks(store, name), store.manifest(name).info, label)


def _chunks(store: Store, name: str) -> Iterator[pl.DataFrame]:
    """All bars, some symbols at a time: memory holds a chunk, each of which reads every file."""
    table = store.symbols(name).sort("symbol")
    chunk = (table["bars"].cum_sum() - 1) // _CHUNK_ROWS
    for _, some in table.group_by(chunk, maintain_order=True):
        symbols = None if some.height == table.height else some["symbol"].to_list()
        yield pl.concat([store.read_bars(name, key, symbols) for key in store.partitions(name)])
