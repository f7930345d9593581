"""The metric log of a run: one row per call, readable while training writes it.

    metrics.jsonl      appended to, a row a line: {"step": 1000, "seconds": 2.1, "losses/value": …}
    metrics.parquet    the same rows as columns, written at checkpoints and at the end

1. A row is written with one call and is whole or not there: what a kill tears is dropped on
   opening, what a full disk tears is cut off at once.
2. On resuming from step s the rows after s are removed, so that a resumed run's log equals that
   of an uninterrupted one in all but what clocks say (`is_timing`).
3. Where JSON has no number (NaN, infinities) the line has the string "NaN", "Infinity" or
   "-Infinity": such a value is a value of the log, not a missing one.

Metric names have a prefix that groups them: `losses/policy`, `charts/reward`,
`valid/sharpe_annual`. A metric a row does not have is null in the table. What a clock said is below
`time/` and in the column `seconds`; everything else is the same, to the bit, in two runs of one
seed, data and configuration.
"""

from __future__ import annotations

import io
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, SupportsFloat

from pydantic import FiniteFloat

from echelon.errors import DamagedError, StoreError
from echelon.files import Closing, json_line, parse_json, read_table, sync, write_atomic

if TYPE_CHECKING:
    import polars as pl

LOG = "metrics.jsonl"
TABLE = "metrics.parquet"
_CLOCKS = frozenset({"seconds", "cpu_seconds", "steps_per_second", "finished", "evaluated"})

_NAME = re.compile(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)+")
_Number = FiniteFloat | Literal["NaN", "Infinity", "-Infinity"]
_SPELLED = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_REMEDY = "Delete it to go on without the rows so far, or start the run again."


def is_timing(name: str) -> bool:
    """Whether a metric, or a field of a result, is a clock's: alike runs differ in no other."""
    *groups, last = name.split("/")
    return "time" in groups or last in _CLOCKS


class MetricLog(Closing):
    """The log of one run, open to append. resume_step: rows up to it are kept, None: none"""

    def __init__(self, directory: Path, *, resume_step: int | None) -> None:
        self._path = directory / LOG
        self._table = directory / TABLE
        kept = []
        if resume_step is not None and self._path.exists():
            kept = [row for row in _read_rows(self._path) if row["step"] <= resume_step]
        text = "".join(map(_line, kept))
        try:
            write_atomic(self._path, text)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self._path, error) from error
        self._size = len(text.encode())
        self._step = int(kept[-1]["step"]) if kept else 0
        self._started = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Append a row. Steps never decrease; two rows of one step are two rows."""
        if step < self._step:
            raise ValueError(f"step {step} after step {self._step}: the log's steps never decrease")
        for name in metrics:
            if not _NAME.fullmatch(name):
                raise ValueError(f"metric {name!r}: expected a prefixed name such as losses/value")
        row: dict[str, float] = {"step": step, "seconds": self.seconds}
        row |= {name: float(value) for name, value in metrics.items()}
        line = _line(row).encode()
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(None, f"only {written} of {len(line)} bytes of a row were written")
        except OSError as error:
            os.truncate(self._path, self._size)
            raise _unwritable(self._path, error) from error
        self._size += len(line)
        self._step = step

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resumption included."""
        return round(time.monotonic() - self._started, 3)

    def snapshot(self) -> None:
        """Write the table and wait until all rows are on disk. Call before saving a checkpoint."""
        buffer = io.BytesIO()
        _frame(_read_rows(self._path)).write_parquet(buffer)
        try:
            sync(self._path)
            write_atomic(self._table, buffer.getvalue())
        except OSError as error:
            raise _unwritable(self._table, error) from error

    def close(self) -> None:
        """Write the table and close; a second call does nothing."""
        if not self._file.closed:
            self._file.close()
            self.snapshot()


def read_metrics(directory: Path) -> pl.DataFrame:
    """The log of a run, while training writes, too: step, seconds, metrics as they appeared."""
    log, table = directory / LOG, directory / TABLE
    if log.exists():
        return _frame(_read_rows(log))
    if not table.exists():
        raise StoreError(f"{log}: no such file. Name the directory of a run that was trained.")
    frame = read_table(table, {"step": "number", "seconds": "number"}, _REMEDY)
    odd = [name for name, dtype in frame.schema.items() if not dtype.is_numeric()]
    if odd:
        raise DamagedError(table, f"column {odd[0]!r} holds no numbers", _REMEDY)
    return frame


class LogTail:
    """The last value of each metric of a log that training may be writing."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG
        self._file, self._end = 0, 0
        self._last: dict[str, float] = {}

    def read(self) -> Mapping[str, float]:
        """What the log says now: the lines since the last call, or all of a log that is another."""
        with self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._file or about.st_size < self._end:
                self._file, self._end, self._last = about.st_ino, 0, {}
            file.seek(self._end)
            data = file.read()
        for row in _parse_rows(self._path, data):
            self._last |= row
        self._end += data.rfind(b"\n") + 1
        return self._last


def _read_rows(path: Path) -> list[dict[str, float]]:
    try:
        return _parse_rows(path, path.read_bytes())
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error), _REMEDY) from None


def _parse_rows(path: Path, data: bytes) -> list[dict[str, float]]:
    """All whole rows; bytes after the last line end are a row still, or never, being written."""
    rows: list[dict[str, float]] = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            tree = parse_json(line, dict[str, _Number], path, _REMEDY)
            row = {name: float(value) for name, value in tree.items()}
            for name in ("step", "seconds"):
                if name not in row or not math.isfinite(row[name]):
                    raise DamagedError(path, f"no number {name!r}", _REMEDY)
            if not 0 <= row["step"] < 2**63 or row["step"] % 1:
                raise DamagedError(path, f"step = {row['step']}", _REMEDY)
            rows.append(row | {"step": int(row["step"])})
        except DamagedError as damage:
            raise DamagedError(path, f"line {number}: {damage.what}", _REMEDY) from None
    return rows


def _line(row: Mapping[str, float]) -> str:
    plain = {name: _SPELLED.get(str(value), value) for name, value in row.items()}
    return json_line(plain) + "\n"


def _frame(rows: list[dict[str, float]]) -> pl.DataFrame:
    import polars as pl

    names = ("step", "seconds", *(name for row in rows for name in row))
    schema = dict.fromkeys(names, pl.Float64) | {"step": pl.Int64}
    return pl.DataFrame({name: [row.get(name) for row in rows] for name in schema}, schema=schema)


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot be written ({error.strerror or error}). The rows so far are intact: make "
        "room or mend the disk, then resume."
    )
