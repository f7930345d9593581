"""What was tried, and how often the test windows were looked at: kept next to the runs.

Whoever tries a hundred configurations finds a good one by chance. How many were tried decides
what the best of them is worth, so it is counted here, not remembered: every configuration that
was compared on a validation window is a trial, and every look at a test window is a read, written
down *before* the window is opened. Deleting a run does not undo what was seen.

    RUNS/registry/trials.json              one entry per configuration, data and window
    RUNS/registry/reads.json               one entry per look
    RUNS/registry/returns/KEY.parquet      time, return: the mean over the seeds

The average over the seeds of a configuration is one trial, however many seeds there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import TypedDict

from echelon.errors import StoreError, shorten
from echelon.files import (
    ColumnKind,
    exclusive_lock,
    read_json,
    read_table,
    sweep,
    write_json,
    write_parquet,
)
from echelon.types import Floats, Times

if TYPE_CHECKING:
    import polars as pl

FORMAT = 1
NESTED = {
    **{"variants": "ablation.json", "folds": "walk_forward.json", "agents": "comparison.json"},
    "trials": "tuning.json",
}
"""Directories between a run and the study it is part of, and the study's file; the registry is
next to the study."""

_Kind = Literal["trials", "reads"]


class Window(NamedTuple):
    """Whose bars, and which: name and hash of the dataset, first and last day."""

    dataset: str
    data_hash: str
    first: str
    last: str

    def overlaps(self, other: Window) -> bool:
        """Whether both hold bars of the same data on the same days."""
        same = self.dataset == other.dataset or self.data_hash == other.data_hash
        return same and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Entry:
    """A trial, or a read of a test window; sharpe: per period, None: no result came of it."""

    key: str
    window: Window
    run: str
    config_hash: str
    seeds: int
    when: str
    sharpe: float | None = None
    periods: int = 0


class _File(TypedDict):
    format: int
    lines: list[Entry]


@dataclass(frozen=True)
class TestRead:
    """Proof that a look at a test window was written down; what opens it asks for one."""

    __test__ = False  # not a test case, though its name begins like one

    registry: TrialRegistry
    entry: Entry


class TrialRegistry:
    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def for_run(run: Path, named: Path | None = None) -> TrialRegistry:
        """The registry next to a run, or next to the study it is part of; or the one named."""
        if named is not None:
            return TrialRegistry(named)
        study = run.resolve()
        marker = NESTED.get(study.parent.name)
        if marker is not None and (study.parent.parent / marker).is_file():
            study = study.parent.parent
        return TrialRegistry(study.parent / "registry")

    def begin(self) -> None:
        """Make the registry where there is none: then it is known as one."""
        with self._hold_lock():
            if not (self.path / "trials.json").exists():
                self._write("trials", [])

    def add_trial(self, entry: Entry, times: Times, returns: Floats, sharpe: float) -> None:
        """Write down a trial; the same configuration on the same window is the same trial."""
        self._add("trials", entry, times, returns, sharpe)

    def begin_read(self, entry: Entry, *, resumed: bool = False) -> TestRead:
        """Write down that a test window is about to be looked at.

        resumed: an earlier look of the same run that was ended before it saw anything is this one,
        so that a killed evaluation that is run again counts as one that was not killed
        """
        with self._hold_lock():
            known = self._read("reads")
            for read in reversed(known) if resumed else ():
                began_so = replace(read, key=entry.key, when=entry.when) == entry
                if began_so and read.sharpe is None:
                    return TestRead(self, read)
            numbered = replace(entry, key=_digest(entry.key, len(known)))
            self._write("reads", [*known, numbered])
        return TestRead(self, numbered)

    def end_read(self, read: TestRead, times: Times, returns: Floats, sharpe: float) -> None:
        self._add("reads", read.entry, times, returns, sharpe)

    def trials(self, window: Window) -> list[Entry]:
        """Trials on windows that overlap this one, in the order of time."""
        return [entry for entry in self._read("trials") if entry.window.overlaps(window)]

    def reads(self, window: Window) -> list[Entry]:
        """Looks at test windows that overlap this one, in the order of time."""
        return [entry for entry in self._read("reads") if entry.window.overlaps(window)]

    def returns(self, entry: Entry) -> pl.DataFrame:
        """time, return: of an entry that has a result."""
        again = f"Evaluate {shorten(entry.run)} again"
        remedy = f"{again}, or take the registry {self.path} from a backup."
        columns: dict[str, ColumnKind] = {"time": "time", "return": "number"}
        return read_table(self._returns(entry.key), columns, remedy)

    def _add(self, kind: _Kind, entry: Entry, times: Times, returns: Floats, sharpe: float) -> None:
        import polars as pl

        entry = replace(entry, sharpe=sharpe, periods=len(returns))
        frame = pl.DataFrame({"time": times, "return": returns})
        with self._hold_lock():
            others = [trial for trial in self._read(kind) if trial.key != entry.key]
            write_parquet(self._returns(entry.key), frame)
            self._write(kind, sorted([*others, entry], key=lambda e: e.when))

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.path / ".lock", f"the registry {self.path}", wait=True):
            sweep(self.path, deep=True)
            yield

    def _returns(self, key: str) -> Path:
        return self.path / "returns" / f"{key}.parquet"

    def _read(self, kind: _Kind) -> list[Entry]:
        path = self.path / f"{kind}.json"
        if not path.exists():
            return []
        away = f"move {self.path} away to begin a new registry; its trials are then not counted."
        tree = read_json(path, _File, f"Take it from a backup, or {away}")
        if tree["format"] != FORMAT:
            raise StoreError(f"{path}: written by another version of Echelon. Use that, or {away}")
        return tree["lines"]

    def _write(self, kind: _Kind, entries: Sequence[Entry]) -> None:
        lines = [asdict(e) | {"window": e.window._asdict()} for e in entries]
        tree = {"format": FORMAT, "lines": lines}
        write_json(self.path / f"{kind}.json", tree)


def new_entry(window: Window, run: Path, config_hash: str, seeds: int) -> Entry:
    """An entry of now; the same configuration on the same window has the same key."""
    return Entry(
        key=_digest(config_hash, *window),
        window=window,
        run=run.name,
        config_hash=config_hash,
        seeds=seeds,
        when=datetime.now(UTC).isoformat(timespec="microseconds"),
    )


def window_of(data: Mapping[str, Any], first: object, last: object) -> Window:
    """The window of a run. data: what its run.json says of the dataset"""
    return Window(str(data["name"]), str(data["content_hash"]), str(first), str(last))


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]
