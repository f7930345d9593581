"""What a hierarchy leaves behind for reports: the record of a run, and the history of its training.

A policy that commands others leaves a `CommandRecord` after each run of a single book: who was in
charge, and what everybody's book made. On disk it stands besides the tables of the backtest:

    STEM.command.parquet       time, in_charge, decided, distance and, for each expert,
                               allowed/NAME, own_value/NAME (after the bar), own_cost/NAME; of
                               blended targets share/NAME, of cash too
    STEM.risk_events.jsonl     what risk control did, an event a line (see risk.events)

What has no row (names, the first own values, mean portfolios, the hash of the events' file) is in
the metadata of the first file, which is written last: a pair that does not belong together is
refused. Of portfolios, larger than all else together, distances and means are kept.

Training a population leaves a `PopulationHistory`, SEED_DIR/population.json:

    format      2
    experts     [K] names
    skills      [K][D] their skill vectors at the end
    lineage     lives, by id (see agents.mfpbt)
    rounds      evolutions: round, step, mapd, volume, usage_entropy (nats), fitness[K],
                hyperparameters[K] (name → value), those that the fitness was measured under
    readings    after every phase of the experts: round, step, mapd, volume
    events      what befell the population: round, step, kind, who, code, values

JSON has no NaN: what is not known, or not finite, is null. Files are written whole or not at all,
and what does not hold together is refused.

Axes: `S` bars traded, `K` experts, `N` assets, `D` dimensions of a skill; the expert of number K
is cash.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BeforeValidator
from typing_extensions import TypedDict

from echelon import files
from echelon.agents.mfpbt import FOUNDER, Life
from echelon.errors import DamagedError, StoreError
from echelon.risk.events import RiskEvent, from_lines, to_lines
from echelon.types import Bools, Floats, Times

_T = TypeVar("_T")

CASH = "cash"
"""What the choice of number K is called."""
POPULATION = "population.json"
_FORMAT = 2  # of both
_KEY = "echelon.command"
_AGAIN = "Run `echelon evaluate` again."
_RETRAIN = "Train again with this version, or delete the file: the report then does without."
_REMEDY = "Restore the file, or delete it: the report then does without it."

NullableFloat = Annotated[
    float, BeforeValidator(lambda value: math.nan if value is None else value)
]
"""As JSON has it: null where it is not known."""


class TargetSummary(NamedTuple):
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
    first_values: list[NullableFloat]
    mean_target: list[list[NullableFloat]]
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
    shares[S,K+1]: of each expert and of cash in what was held, where targets were blended; the one
        with the largest is then called in charge
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
    shares: Floats | None = None
    kept: TargetSummary | None = None

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
            actual = getattr(self, name).shape
            assert actual == shape, f"{name} should be {shape}, is {actual}"
        assert self.target.shape[:2] == (bars, experts), f"target is {self.target.shape}"
        if self.shares is not None:
            shape = (bars, experts + 1)
            assert self.shares.shape == shape, f"shares should be {shape}, is {self.shares.shape}"
        known = (self.in_charge >= 0) & (self.in_charge <= experts)
        assert known.all(), f"in_charge names others than 0 … {experts}"
        places = [event.time for event in self.events if not 0 <= event.time <= bars]
        assert not places, f"an event at bar {places[0]} of {bars}"

    @property
    def bars(self) -> int:
        return len(self.times)

    @property
    def choices(self) -> tuple[str, ...]:
        """[K+1] names of all whom the router can choose; the last is cash."""
        return (*self.experts, CASH)

    @property
    def held_shares(self) -> Floats:
        """[S,K+1] of each expert and of cash in what was held."""
        if self.shares is not None:
            return self.shares
        return np.asarray(self.in_charge[:, None] == np.arange(len(self.choices)), dtype=np.float64)

    @property
    def own_returns(self) -> Floats:
        """[S,K] of the experts' own books."""
        return np.asarray(self.own_values[1:] / self.own_values[:-1] - 1.0)

    @cached_property
    def portfolios(self) -> TargetSummary:
        """How far apart the experts' targets are, and what they are on average."""
        return self.kept if self.kept is not None else summarise_targets(self.target)

    def write(self, directory: Path, stem: str) -> None:
        """Put the record into the files named `stem`, each whole or not at all."""
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
        if self.shares is not None:
            columns |= {
                f"share/{n}": part for n, part in zip(self.choices, self.shares.T, strict=True)
            }
        lines = to_lines(self.events).encode()
        facts = {
            "format": _FORMAT,
            "experts": list(self.experts),
            "first_values": plain_tree(self.own_values[0]),
            "mean_target": plain_tree(self.portfolios.mean),
            "events": hashlib.sha256(lines).hexdigest(),
        }
        buffer = io.BytesIO()
        metadata = {_KEY: files.json_line(facts)}
        pl.DataFrame(columns).write_parquet(buffer, compression="zstd", metadata=metadata)
        table, events = record_files(directory, stem)
        try:
            files.write_atomic(events, lines)
            files.write_atomic(table, buffer.getvalue())
        except OSError as error:
            raise StoreError(
                f"{table}: cannot be written ({error}). Make room or mend the disk. {_AGAIN}"
            ) from error

    @classmethod
    def read(cls, directory: Path, stem: str) -> Self:
        """The record that `write` wrote; refuses a missing, damaged or foreign file."""
        table, events = record_files(directory, stem)
        frame = files.read_table(table, {"time": "time"}, _AGAIN)
        with files.blaming(table, _AGAIN):
            text = pl.read_parquet_metadata(table)[_KEY]
        facts = files.parse_json(text, _Facts, table, _AGAIN)
        try:
            lines = events.read_bytes()
        except OSError as error:
            raise DamagedError(events, error.strerror or str(error), _AGAIN) from None
        if facts["format"] != _FORMAT:
            raise DamagedError(table, f"format {facts['format']}, expected {_FORMAT}", _AGAIN)
        happened = from_lines(lines, events)
        with files.blaming(table, _AGAIN):
            if facts["events"] != hashlib.sha256(lines).hexdigest():
                raise ValueError(f"{events.name} belongs to another run")
            return cls._from_frame(frame, facts, happened)

    @classmethod
    def _from_frame(cls, frame: pl.DataFrame, facts: _Facts, events: tuple[RiskEvent, ...]) -> Self:
        names = tuple(facts["experts"])

        def by_expert(kind: str, dtype: type, who: tuple[str, ...] = names) -> NDArray[Any]:
            return np.stack([_column(frame, f"{kind}/{name}", dtype) for name in who], axis=1)

        first = np.array([facts["first_values"]], np.float64)
        mean = np.array(facts["mean_target"], np.float64)
        if len(mean) != len(names):
            raise ValueError(f"{len(mean)} mean portfolios of {len(names)} experts")
        return cls(
            experts=names,
            times=_column(frame, "time", np.datetime64).astype("datetime64[us]"),
            in_charge=_column(frame, "in_charge", np.integer).astype(np.int64),
            decided=_column(frame, "decided", np.bool_),
            allowed=by_expert("allowed", np.bool_),
            target=np.zeros((len(frame), len(names), 0)),
            own_values=np.concatenate([first, by_expert("own_value", np.floating)]),
            own_costs=by_expert("own_cost", np.floating),
            events=events,
            shares=by_expert("share", np.floating, (*names, CASH))
            if f"share/{CASH}" in frame.columns
            else None,
            kept=TargetSummary(_column(frame, "distance", np.floating), mean),
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
    """Remove a record that no longer belongs to what stands next to it, if there is one."""
    for path in record_files(directory, stem):
        path.unlink(missing_ok=True)


def summarise_targets(target: Floats) -> TargetSummary:
    """What is kept of target[S,K,N]: shares of the book, the rest being cash."""
    known = np.isfinite(target)
    filled = np.where(known, target, 0.0)
    seen = known.sum(axis=0)
    mean = np.where(seen > 0, filled.sum(axis=0) / np.maximum(seen, 1), np.nan)
    cash = 1.0 - filled.sum(axis=2)
    pairs = list(combinations(range(target.shape[1]), 2))
    total = np.zeros(len(target))
    for a, b in pairs:  # a pair at a time: S K² N numbers at once would be too many
        apart = np.abs(filled[:, a] - filled[:, b]).sum(axis=1)
        total += 0.5 * (apart + np.abs(cash[:, a] - cash[:, b]))
    distance = total / len(pairs) if pairs else np.full(len(target), np.nan)
    return TargetSummary(np.where(known.all(axis=(1, 2)), distance, np.nan), mean)


def _column(frame: pl.DataFrame, name: str, dtype: type) -> NDArray[Any]:
    if name not in frame.columns:
        raise ValueError(f"no column {name!r}")
    series = frame[name]
    values = series.to_numpy()
    if series.null_count() or not np.issubdtype(values.dtype, dtype):
        raise ValueError(f"column {name!r} is not whole, or of type {series.dtype}")
    return values


@dataclass(frozen=True)
class Reading:
    """How different the experts were after they had learned (ops.diversity), on probe states."""

    round: int
    step: int
    mapd: NullableFloat
    volume: NullableFloat


@dataclass(frozen=True)
class Round:
    """The population at one evolution, before it; NaN where something was not measured.

    mapd, volume: how different the experts are (ops.diversity), on shared probe states
    usage_entropy: of the router's last decisions, in nats
    fitness[K], hyperparameters[K]: of each expert
    """

    round: int
    step: int
    mapd: NullableFloat
    volume: NullableFloat
    usage_entropy: NullableFloat
    fitness: tuple[NullableFloat, ...]
    hyperparameters: tuple[Mapping[str, NullableFloat], ...]


@dataclass(frozen=True)
class PopulationEvent:
    """Something that befell the population: an expert re-seeded, quarantined, a worker lost.

    kind: of a decision (`mfpbt.Kind`), quarantine or worker_lost
    who: the expert, the router or the worker
    code, values: why; reports make the sentence from them
    """

    round: int
    step: int
    kind: str
    who: str
    code: str
    values: Mapping[str, int | NullableFloat | str]

    def __str__(self) -> str:
        """As a line of the log."""
        details = "".join(f", {name} {value}" for name, value in self.values.items())
        return f"{self.kind.replace('_', ' ')}, {self.who}{details}"


@dataclass(frozen=True, eq=False)
class PopulationHistory:
    """All of population.json: skills[K,D], lineage by id, the rest in the order it happened."""

    experts: tuple[str, ...]
    skills: Floats
    lineage: tuple[Life, ...] = ()
    rounds: tuple[Round, ...] = ()
    events: tuple[PopulationEvent, ...] = ()
    readings: tuple[Reading, ...] = ()

    def __post_init__(self) -> None:
        """ValueError where the parts do not belong together."""
        experts = len(self.experts)
        if not experts or len(set(self.experts)) != experts:
            raise ValueError(f"expected experts of different names, found {list(self.experts)}")
        if self.skills.ndim != 2 or len(self.skills) != experts:
            raise ValueError(f"expected skills[{experts}][D], found the shape {self.skills.shape}")
        for place, life in enumerate(self.lineage):
            sources = [source for source in (life.parent, life.lender) if source is not None]
            earlier = all(0 <= source < place for source in sources)
            in_time = earlier and all(self.lineage[s].round <= life.round for s in sources)
            founds = life.kind == FOUNDER and bool(sources)
            if life.id != place or not in_time or life.member < 0 or founds:
                raise ValueError(f"life {place} of the lineage does not descend from earlier ones")
        for done in self.rounds:
            for name in ("fitness", "hyperparameters"):
                count = len(getattr(done, name))
                if count != experts:
                    raise ValueError(
                        f"round {done.round}: expected {name} of {experts} experts, found {count}"
                    )
        for name, records in (("rounds", self.rounds), ("readings", self.readings)):
            steps = [(record.round, record.step) for record in records]
            if steps != sorted(steps) or len({r for r, _ in steps}) != len(steps):
                raise ValueError(f"expected {name} in order, each once")

    @property
    def members(self) -> int:
        return 1 + max((life.member for life in self.lineage), default=-1)

    @property
    def watched(self) -> tuple[Reading, ...]:
        """How different the experts were: `readings`; of a file without them, at evolutions."""
        return self.readings or tuple(
            Reading(done.round, done.step, done.mapd, done.volume) for done in self.rounds
        )

    def write(self, directory: Path) -> None:
        tree = plain_tree(self) | {"format": _FORMAT}
        path = directory / POPULATION
        try:
            files.write_json(path, tree, indent=None)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be written ({error}). Make room or mend the disk."
            ) from error

    @classmethod
    def read(cls, directory: Path) -> Self:
        """What `write` wrote; refuses a missing or damaged file."""
        path = directory / POPULATION
        tree = files.read_json(path, _File, _REMEDY)
        if tree["format"] != _FORMAT:
            raise DamagedError(path, f"format {tree['format']}, expected {_FORMAT}", _RETRAIN)
        with files.blaming(path, _REMEDY):
            skills = np.array(tree["skills"], dtype=np.float64)
            story = tree["lineage"], tree["rounds"], tree["events"], tree["readings"]
            return cls(tree["experts"], skills, *story)

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """The same; None where there is no such file."""
        return cls.read(directory) if (directory / POPULATION).exists() else None


class _File(TypedDict):
    format: int
    experts: tuple[str, ...]
    skills: list[list[NullableFloat]]
    lineage: tuple[Life, ...]
    rounds: tuple[Round, ...]
    events: tuple[PopulationEvent, ...]
    readings: tuple[Reading, ...]


def plain_tree(value: object) -> Any:  # noqa: ANN401 (JSON)
    """As JSON has it: dataclasses as objects, arrays as lists, what is not finite as null."""
    if is_dataclass(value):
        return {field.name: plain_tree(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain_tree(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain_tree(value.tolist())
    if isinstance(value, list | tuple):
        return [plain_tree(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def from_plain_tree(tree: object, kind: type[_T]) -> _T:
    """What `plain_tree` was made from, such as a list of `Round`."""
    return files.parse_json(
        files.json_line(tree), kind, Path("state.json"), "Resume with another checkpoint."
    )
