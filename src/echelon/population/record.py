"""What the hierarchy did over a run of one book: who was in charge, and what everybody's book made.

A policy that commands others leaves one behind after each run of a single book; reports and
attribution are made from it. On disk it stands beside the tables of the backtest:

    STEM.command.parquet       time, in_charge, decided, distance and, for each expert,
                               allowed/NAME, own_value/NAME (after the bar), own_cost/NAME
    STEM.risk_events.jsonl     what risk control did, an event a line (see risk.events)

What has no row (names, the first own values, mean portfolios, the hash of the events' file) is in
the metadata of the first file, which is written last: a pair that does not belong together is
refused. All portfolios of all bars would be larger than everything else together, so their
distance at each bar and their mean are kept in their place.

Axes: `S` bars traded, `K` experts, `N` assets; the expert of number K is cash.
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import polars as pl
from numpy.typing import NDArray
from typing_extensions import TypedDict

from echelon.errors import DamagedError, StoreError
from echelon.files import blaming, json_line, parse_json, read_table, write_atomic
from echelon.risk import RiskEvent, from_lines, to_lines
from echelon.types import Bools, Floats, Times

CASH = "cash"
"""What the choice of number K is called."""
_FORMAT = 2
_KEY = "echelon.command"
_AGAIN = "Run `echelon evaluate` again."


class Portfolios(NamedTuple):
    """What is kept of the experts' targets.

    distance[S]: mean over pairs of experts of half the L1 distance of their portfolios, cash
        included (MAPD at that bar); NaN where a target is unknown, or with a single expert
    mean[K,N]: over the bars at which it is known; NaN where it never is
    """

    distance: Floats
    mean: Floats


class _Facts(TypedDict):
    """What the metadata of the table say."""

    format: int
    experts: list[str]
    first_values: list[float | None]
    mean_target: list[list[float | None]]
    events: str


@dataclass(frozen=True, eq=False)
class CommandRecord:
    """One run of the hierarchy with one book.

    experts[K]: names; times[S]: of the bars at whose close was decided
    in_charge[S]: expert whose orders were sent, K: cash; decided[S]: the router was asked
    allowed[S,K]: whom it might choose; target[S,K,N]: what every expert would hold
    own_values[S+1,K]: of the experts' own books, the first before the first bar
    own_costs[S,K]: what these paid for trading at the bar, as a share of their value before it
    events: of risk control; their `time` is the bar's place in `times`, S being the end
    kept: of the targets, in a record that was read; its own `target` is [S,K,0]
    """

    experts: tuple[str, ...]
    times: Times
    in_charge: NDArray[np.int64]
    decided: Bools
    allowed: Bools
    target: Floats
    own_values: Floats
    own_costs: Floats
    events: tuple[RiskEvent, ...]
    kept: Portfolios | None = None

    def __post_init__(self) -> None:
        bars, experts = self.bars, len(self.experts)
        assert experts >= 1, "there are no experts"
        assert len(set(self.experts)) == experts, f"two experts of one name: {self.experts}"
        for name, shape in (
            ("in_charge", (bars,)),
            ("decided", (bars,)),
            ("allowed", (bars, experts)),
            ("own_values", (bars + 1, experts)),
            ("own_costs", (bars, experts)),
        ):
            found = getattr(self, name).shape
            assert found == shape, f"{name} should be {shape}, is {found}"
        assert self.target.shape[:2] == (bars, experts), f"target is {self.target.shape}"
        known = (self.in_charge >= 0) & (self.in_charge <= experts)
        assert known.all(), f"in_charge names others than 0 … {experts}"
        places = [event.time for event in self.events if not 0 <= event.time <= bars]
        assert not places, f"an event at bar {places[0]} of {bars}"

    @property
    def bars(self) -> int:
        """Their number, S."""
        return len(self.times)

    @property
    def choices(self) -> tuple[str, ...]:
        """[K+1] names of all whom the router can choose; the last is cash."""
        return (*self.experts, CASH)

    @property
    def own_returns(self) -> Floats:
        """[S,K] of the experts' own books."""
        return np.asarray(self.own_values[1:] / self.own_values[:-1] - 1.0)

    @cached_property
    def portfolios(self) -> Portfolios:
        """How far apart the experts' targets are, and what they are on average."""
        return self.kept if self.kept is not None else summarise(self.target)

    def write(self, directory: Path, stem: str) -> None:
        """Put the record into the files named `stem`, each whole or not at all."""
        lines = to_lines(self.events).encode()
        table, events = record_files(directory, stem)
        buffer = io.BytesIO()
        metadata = {_KEY: json_line(self._facts(lines))}
        self._frame().write_parquet(buffer, compression="zstd", metadata=metadata)
        try:
            write_atomic(events, lines)
            write_atomic(table, buffer.getvalue())
        except OSError as error:
            raise StoreError(
                f"{table}: cannot be written ({error}). Make room or mend the disk. {_AGAIN}"
            ) from error

    @classmethod
    def read(cls, directory: Path, stem: str) -> Self:
        """The record that `write` wrote; refuses a missing, damaged or foreign file."""
        table, events = record_files(directory, stem)
        frame = read_table(table, {"time": "time"}, _AGAIN)
        with blaming(table, _AGAIN):
            text = pl.read_parquet_metadata(table)[_KEY]
        facts = parse_json(text, _Facts, table, _AGAIN)
        try:
            lines = events.read_bytes()
        except OSError as error:
            raise DamagedError(events, error.strerror or str(error), _AGAIN) from None
        if facts["format"] != _FORMAT:
            raise DamagedError(table, f"format {facts['format']}, expected {_FORMAT}", _AGAIN)
        happened = from_lines(lines, events)
        with blaming(table, _AGAIN):
            if facts["events"] != hashlib.sha256(lines).hexdigest():
                raise ValueError(f"{events.name} belongs to another run")
            return cls._of(frame, facts, happened)

    def _frame(self) -> pl.DataFrame:
        columns: dict[str, Any] = {
            "time": self.times.astype("datetime64[us]"),
            "in_charge": self.in_charge.astype(np.int64),
            "decided": self.decided.astype(np.bool_),
            "distance": self.portfolios.distance,
        }
        for k, name in enumerate(self.experts):
            columns[f"allowed/{name}"] = self.allowed[:, k].astype(np.bool_)
            columns[f"own_value/{name}"] = self.own_values[1:, k].astype(np.float64)
            columns[f"own_cost/{name}"] = self.own_costs[:, k].astype(np.float64)
        return pl.DataFrame(columns)

    def _facts(self, lines: bytes) -> dict[str, Any]:
        """What has no row in the table."""
        return {
            "format": _FORMAT,
            "experts": list(self.experts),
            "first_values": _plain(self.own_values[:1])[0],
            "mean_target": _plain(self.portfolios.mean),
            "events": hashlib.sha256(lines).hexdigest(),
        }

    @classmethod
    def _of(cls, frame: pl.DataFrame, facts: _Facts, events: tuple[RiskEvent, ...]) -> Self:
        names = tuple(facts["experts"])
        bars = len(frame)

        def by_expert(kind: str, dtype: type) -> NDArray[Any]:
            columns = [_column(frame, f"{kind}/{name}", dtype) for name in names]
            return np.stack(columns, axis=1)

        first = _numbers([facts["first_values"]])
        mean = _numbers(facts["mean_target"])
        if len(mean) != len(names):
            raise ValueError(f"{len(mean)} mean portfolios of {len(names)} experts")
        return cls(
            experts=names,
            times=_column(frame, "time", np.datetime64).astype("datetime64[us]"),
            in_charge=_column(frame, "in_charge", np.integer).astype(np.int64),
            decided=_column(frame, "decided", np.bool_),
            allowed=by_expert("allowed", np.bool_),
            target=np.zeros((bars, len(names), 0)),
            own_values=np.concatenate([first, by_expert("own_value", np.floating)]),
            own_costs=by_expert("own_cost", np.floating),
            events=events,
            kept=Portfolios(_column(frame, "distance", np.floating), mean),
        )


@runtime_checkable
class Commanding(Protocol):
    """A policy that commands others, and says afterwards what it did."""

    @property
    def record(self) -> CommandRecord | None:
        """Of the last run, where that was of a single book."""


def record_of(policy: object) -> CommandRecord | None:
    """The record of a policy's last run; None of one that commands nobody."""
    return policy.record if isinstance(policy, Commanding) else None


def record_files(directory: Path, stem: str) -> tuple[Path, Path]:
    """Where the table and the events of a record are."""
    return directory / f"{stem}.command.parquet", directory / f"{stem}.risk_events.jsonl"


def has_record(directory: Path, stem: str) -> bool:
    """Whether a record was written, be it a part of it."""
    return any(path.exists() for path in record_files(directory, stem))


def remove_record(directory: Path, stem: str) -> None:
    """Remove a record that no longer belongs to what stands beside it, if there is one."""
    for path in record_files(directory, stem):
        path.unlink(missing_ok=True)


def summarise(target: Floats) -> Portfolios:
    """What is kept of target[S,K,N]: shares of the book, the rest being cash."""
    known = np.isfinite(target)
    filled = np.where(known, target, 0.0)
    seen = known.sum(axis=0)
    mean = np.where(seen > 0, filled.sum(axis=0) / np.maximum(seen, 1), np.nan)
    cash = 1.0 - filled.sum(axis=2)
    pairs = list(combinations(range(target.shape[1]), 2))
    total = np.zeros(len(target))
    for one, other in pairs:  # a pair at a time: S K² N numbers at once would be too many
        apart = np.abs(filled[:, one] - filled[:, other]).sum(axis=1)
        total += 0.5 * (apart + np.abs(cash[:, one] - cash[:, other]))
    distance = total / len(pairs) if pairs else np.full(len(target), np.nan)
    return Portfolios(np.where(known.all(axis=(1, 2)), distance, np.nan), mean)


def _column(frame: pl.DataFrame, name: str, dtype: type) -> NDArray[Any]:
    if name not in frame.columns:
        raise ValueError(f"no column {name!r}")
    series = frame[name]
    values = series.to_numpy()
    if series.null_count() or not np.issubdtype(values.dtype, dtype):
        raise ValueError(f"column {name!r} is not whole, or of type {series.dtype}")
    return values


def _plain(values: Floats) -> list[list[float | None]]:
    """As JSON has them: what is not finite is null."""
    return [[float(v) if math.isfinite(v) else None for v in row] for row in values.tolist()]


def _numbers(rows: list[list[float | None]]) -> Floats:
    return np.array([[math.nan if v is None else v for v in row] for row in rows], np.float64)
