"""`echelon data check`: everything wrong with a source or a stored dataset, at once.

What an import would refuse (`data.validate`), and what is not wrong but looks odd: prices that jump
without a corporate action, prices that stand still, sessions without a single bar, factors anchored
at the end of history, and volumes in lots or thousands.

A dataset can be larger than memory, so each check for oddities has two halves: one condenses the
bars of some symbols to what the check needs of them, the other tells what all the condensed pieces
show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date, datetime
from pathlib import Path

import polars as pl

from echelon.data import calendars
from echelon.data.bars import RawFrame
from echelon.data.importing import Extras, RowProgress, import_source
from echelon.data.sources import Source
from echelon.data.store import Store
from echelon.data.validate import validate
from echelon.errors import DataError, Problem, StoreError
from echelon.sources import SourceInfo

_REIMPORT = "Import the dataset again"
_CHUNK_ROWS = 5_000_000
"""So many bars, about half a gigabyte, are looked at together for what is odd about them."""


def check_source(
    source: Source, extras: Extras, scratch: Path, *, progress: RowProgress | None = None
) -> list[Problem]:
    """All problems of a source, found by a real import into `scratch` that sets bad rows aside."""
    store = Store(scratch)
    try:
        report = import_source(
            source, store, "check", quarantine=True, extras=extras, progress=progress
        )
    except DataError as error:
        problems = getattr(error, "problems", ())
        if not problems:
            raise
        return list(problems)
    chunks, info = _chunks(store, "check"), report.manifest.info
    return [*report.problems, *find_oddities(chunks, info, source.info().name)]


def check_stored(store: Store, name: str) -> list[Problem]:
    """All problems of a stored dataset: files changed since the import, bad rows, oddities."""
    store = store.pin_dataset(name)
    manifest = store.manifest(name)
    home = store.directory(name) / manifest.version
    problems: list[Problem] = []
    for part in manifest.partitions:
        path = home / "bars" / f"{part.key}.parquet"
        try:
            frame = store.read_bars(name, part.key)
        except StoreError as error:
            problems.append(Problem(str(path), None, None, str(error), _REIMPORT))
            continue
        numbered = frame.with_columns(row=pl.int_range(pl.len(), dtype=pl.Int64))
        problems += validate(RawFrame(numbered, str(path)), manifest.info).problems
    for table in manifest.tables:
        try:
            store.table(name, table)
        except StoreError as error:
            path = home / f"{table}.parquet"
            problems.append(Problem(str(path), None, None, str(error), _REIMPORT))
    if any(p.severity == "error" for p in problems):
        return problems
    return [*problems, *find_oddities(_chunks(store, name), manifest.info, name)]


def _chunks(store: Store, name: str) -> Iterator[pl.DataFrame]:
    """All bars, some symbols at a time: memory holds a chunk, each of which reads every file."""
    table = store.symbols(name).sort("symbol")
    chunk = (table["bars"].cum_sum() - 1) // _CHUNK_ROWS
    for _, some in table.group_by(chunk, maintain_order=True):
        symbols = None if some.height == table.height else some["symbol"].to_list()
        yield pl.concat([store.read_bars(name, key, symbols) for key in store.partitions(name)])


JUMP = 0.5  # a one-bar total return beyond this, up or down, is worth a look
STALE = 20  # so many bars in a row with the same close are worth a look
_SHOWN = 100
_ANCHOR_TOLERANCE = 1e-4  # factors made of seven-digit prices are no better than this


def find_oddities(chunks: Iterable[pl.DataFrame], info: SourceInfo, origin: str) -> list[Problem]:
    """Warnings about chunks of bars, each all bars of some symbols, that passed `validate`."""
    pieces = []
    for chunk in chunks:
        if chunk.is_empty():
            continue
        frame = chunk.sort("symbol", "time")
        days = frame.select(pl.col("time").dt.date().unique().alias("day"))
        first, top = pl.col("factor").first().alias("first"), pl.col("factor").max().alias("top")
        factors = frame.drop_nulls("factor").group_by("symbol").agg(first, top)
        traded = frame.filter((pl.col("volume") > 0) & (pl.col("amount") > 0))
        ratios = traded.select(ratio=pl.col("amount") / pl.col("volume") / pl.col("close"))
        pieces.append((_jumps(frame), _runs(frame), factors, days, ratios))
    if not pieces:
        return []
    jumps, runs, factors, days, ratios = (pl.concat(parts) for parts in zip(*pieces, strict=True))
    return [
        *_tell_jumps(jumps, origin),
        *_tell_stale(runs, origin),
        *_tell_end_anchored(factors, origin),
        *_tell_holes(days["day"].unique(), origin, info),
        *_tell_units(ratios, origin, info),
    ]


def _warn(origin: str, field: str, message: str, remedy: str) -> Problem:
    return Problem(origin, None, field, message, remedy, severity="warning")


def _time_text(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M}".removesuffix(" 00:00")


def _jumps(frame: pl.DataFrame) -> pl.DataFrame:
    """Total returns beyond ±50 % in a bar: an unmarked split, a wrong digit, or news."""
    level = pl.col("close") * pl.col("factor").fill_null(1.0)
    # A reference price tells of an ex-right day where there is no factor.
    reference = pl.col("pre_close").is_not_null() & pl.col("factor").is_null()
    change = (
        pl.when(reference)
        .then(pl.col("close") / pl.col("pre_close"))
        .otherwise(level / level.shift(1).over("symbol"))
        - 1
    )
    first = pl.col("time") == pl.col("time").first().over("symbol")
    return frame.select("symbol", "time", change=pl.when(~first).then(change)).filter(
        pl.col("change").abs() > JUMP
    )


def _tell_jumps(jumps: pl.DataFrame, origin: str) -> Iterator[Problem]:
    for symbol, time, value in jumps.head(_SHOWN).iter_rows():
        message = (
            f"{symbol} moves {value:+.0%} in the bar of {_time_text(time)}, its factor included"
        )
        remedy = "Check for a split or a wrong digit; give a factor or adj_close column"
        yield _warn(origin, "close", message, remedy)
    if jumps.height > _SHOWN:
        message = f"{jumps.height - _SHOWN} more bars move beyond ±{JUMP:.0%}"
        yield _warn(origin, "close", message, "Check for splits that are not marked")


def _runs(frame: pl.DataFrame) -> pl.DataFrame:
    """Runs of one price: a halted or dead symbol that is filled forward, or a cheap one."""
    return (
        frame.with_columns(run=pl.struct("symbol", "close").rle_id())
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("symbol", "close", "time").first(),
            last=pl.col("time").last(),
            bars=pl.len(),
        )
        .filter(pl.col("bars") > STALE)
        .drop("run")
    )


def _tell_stale(runs: pl.DataFrame, origin: str) -> Iterator[Problem]:
    for symbol, close, start, end, bars in runs.head(_SHOWN).iter_rows():
        span = f"{_time_text(start)} to {_time_text(end)}"
        message = f"{symbol} closes at {close} for {bars} bars in a row, {span}"
        remedy = "If these days are a suspension that was filled forward, remove the rows"
        yield _warn(origin, "close", message, remedy)
    if runs.height > _SHOWN:
        message = f"{runs.height - _SHOWN} more runs of over {STALE} bars at one price"
        yield _warn(origin, "close", message, "Remove rows that were filled forward")


def _tell_end_anchored(factors: pl.DataFrame, origin: str) -> Iterator[Problem]:
    """Factors that run up to 1 at the end: they carry later splits and dividends into the past."""
    below = factors.filter(pl.col("first") < 1 - _ANCHOR_TOLERANCE)
    if below.is_empty() or (factors["top"] > 1 + _ANCHOR_TOLERANCE).any():
        return
    message = (
        f"the factors are anchored at the end (1 on the last day or later, under 1 before, for "
        f"{below.height} of {factors.height} symbols): past levels would tell of later splits and "
        "dividends"
    )
    yield _warn(origin, "factor", message, "Nothing need be done: import re-anchors them")


def _tell_holes(days: pl.Series, origin: str, info: SourceInfo) -> Iterator[Problem]:
    """Sessions between the first and the last bar on which no symbol has one."""
    if info.calendar == calendars.FROM_DATA:
        return
    first, last = days.min(), days.max()
    assert isinstance(first, date)
    assert isinstance(last, date)
    known = pl.Series(calendars.sessions(info.calendar, first, last)).cast(pl.Date)
    empty = known.filter(~known.is_in(days.implode()))
    if empty.is_empty():
        return
    shown = ", ".join(str(d) for d in empty.head(5)) + (" …" if len(empty) > 5 else "")
    message = (
        f"{len(empty)} of {len(known)} sessions of {info.calendar} have no bar of any symbol: "
        f"{shown}"
    )
    remedy = "Get the missing days, or set data.calendar if the exchange was closed on them"
    yield _warn(origin, "time", message, remedy)


def _tell_units(ratios: pl.DataFrame, origin: str, info: SourceInfo) -> Iterator[Problem]:
    """Volume and amount in different units: in units of the close their ratio must be about 1."""
    if info.price_basis != "raw":
        return
    ratio = ratios.select(pl.col("ratio").median()).item()
    if ratio is None or 0.5 < ratio < 2:
        return
    likely = {
        100.0: "volume seems to be in lots of 100: map it to volume(lots)",
        0.001: "amount seems to be in thousands: map it to amount(thousand)",
        0.1: "volume seems to be in lots and amount in thousands: map them to volume(lots) and "
        "amount(thousand)",
    }
    guess = next((text for r, text in likely.items() if 0.7 * r < ratio < 1.4 * r), None)
    message = f"amount / volume is {ratio:.3g} times the close in the median; it should be about 1"
    remedy = f"{guess or 'Check the units of the two'} (data.columns)".capitalize()
    yield _warn(origin, "volume, amount", message, remedy)
