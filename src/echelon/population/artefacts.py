"""What training a population leaves behind for reports: SEED_DIR/population.json.

    format      2
    experts     [K] names
    skills      [K][D] their skill vectors at the end
    lineage     lives, by id (see agents.mfpbt)
    rounds      evolutions: round, step, mapd, volume, usage_entropy (nats), fitness[K],
                hyperparameters[K] (name → value), those that the fitness was measured under
    readings    after every phase of the experts: round, step, mapd, volume
    events      what befell the population: round, step, kind, who, code, values

JSON has no NaN: what is not known, or not finite, is null. The file is written whole or not at
all, and one that does not hold together is refused.

Axes: `K` experts, `D` dimensions of a skill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, Self

import numpy as np
from typing_extensions import TypedDict

from echelon.agents.mfpbt import FOUNDER, Life
from echelon.errors import DamagedError, StoreError
from echelon.files import blaming, read_json, write_json
from echelon.types import Floats

POPULATION = "population.json"
_FORMAT = 2
_OTHER_FORMAT = "Train again with this version, or delete the file: the report then does without."
_REMEDY = "Restore the file, or delete it: the report then does without it."


@dataclass(frozen=True)
class Reading:
    """How different the experts were after they had learned (ops.diversity), on probe states."""

    round: int
    step: int
    mapd: float
    volume: float

    def as_json(self) -> dict[str, Any]:
        """The record in plain types."""
        return {
            "round": int(self.round),
            "step": int(self.step),
            "mapd": _plain(self.mapd),
            "volume": _plain(self.volume),
        }

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Reading:
        """The reading that `as_json` gave."""
        return Reading(
            _whole(tree["round"], "round"),
            _whole(tree["step"], "step"),
            _number(tree["mapd"]),
            _number(tree["volume"]),
        )


@dataclass(frozen=True)
class Round:
    """The population at one evolution, before it; NaN where something was not measured.

    mapd, volume: how different the experts are (ops.diversity), on shared probe states
    usage_entropy: of the router's last decisions, in nats
    fitness[K], hyperparameters[K]: of each expert
    """

    round: int
    step: int
    mapd: float
    volume: float
    usage_entropy: float
    fitness: tuple[float, ...]
    hyperparameters: tuple[Mapping[str, float], ...]

    def as_json(self) -> dict[str, Any]:
        """The record in plain types."""
        return {
            "round": int(self.round),
            "step": int(self.step),
            "mapd": _plain(self.mapd),
            "volume": _plain(self.volume),
            "usage_entropy": _plain(self.usage_entropy),
            "fitness": [_plain(value) for value in self.fitness],
            "hyperparameters": [
                {name: _plain(value) for name, value in one.items()} for one in self.hyperparameters
            ],
        }

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Round:
        """The round that `as_json` gave."""
        return _round(tree)


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
    values: Mapping[str, float | str]

    def __str__(self) -> str:
        """As a line of the log."""
        details = "".join(f", {name} {value}" for name, value in self.values.items())
        return f"{self.kind.replace('_', ' ')}, {self.who}{details}"

    def as_json(self) -> dict[str, Any]:
        """The record in plain types."""
        return {
            "round": int(self.round),
            "step": int(self.step),
            "kind": self.kind,
            "who": self.who,
            "code": self.code,
            "values": {
                name: value if isinstance(value, str) else _plain(value)
                for name, value in self.values.items()
            },
        }

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> PopulationEvent:
        """The event that `as_json` gave."""
        values = {
            str(name): value if isinstance(value, str) else _number(value)
            for name, value in tree["values"].items()
        }
        return PopulationEvent(
            _whole(tree["round"], "round"),
            _whole(tree["step"], "step"),
            str(tree["kind"]),
            str(tree["who"]),
            str(tree["code"]),
            values,
        )


@dataclass(frozen=True, eq=False)
class PopulationHistory:
    """All of population.json.

    skills[K,D]; lineage: by id; rounds, events and readings in the order they happened
    """

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
            _require_descent(place, life, self.lineage)
        for one in self.rounds:
            for name in ("fitness", "hyperparameters"):
                found = len(getattr(one, name))
                if found != experts:
                    raise ValueError(
                        f"round {one.round}: expected {name} of {experts} experts, found {found}"
                    )
        for name, records in (("rounds", self.rounds), ("readings", self.readings)):
            steps = [(one.round, one.step) for one in records]
            if steps != sorted(steps) or len({r for r, _ in steps}) != len(steps):
                raise ValueError(f"expected {name} in order, each once")

    @property
    def members(self) -> int:
        """How many members the lineage has."""
        return 1 + max((life.member for life in self.lineage), default=-1)

    @property
    def watched(self) -> tuple[Reading, ...]:
        """How different the experts were: `readings`; of a file without them, at evolutions."""
        found = (Reading(one.round, one.step, one.mapd, one.volume) for one in self.rounds)
        return self.readings or tuple(found)

    def write(self, directory: Path) -> None:
        """Put it into `directory`/population.json."""
        tree = {
            "format": _FORMAT,
            "experts": list(self.experts),
            "skills": [[_plain(value) for value in row] for row in self.skills.tolist()],
            "lineage": [life.as_json() for life in self.lineage],
            "rounds": [one.as_json() for one in self.rounds],
            "events": [one.as_json() for one in self.events],
            "readings": [one.as_json() for one in self.readings],
        }
        path = directory / POPULATION
        try:
            write_json(path, tree, indent=None)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be written ({error}). Make room or mend the disk."
            ) from error

    @classmethod
    def read(cls, directory: Path) -> Self:
        """What `write` wrote; refuses a missing or damaged file."""
        path = directory / POPULATION
        tree = read_json(path, _File, _REMEDY)
        if tree["format"] != _FORMAT:
            raise DamagedError(path, f"format {tree['format']}, expected {_FORMAT}", _OTHER_FORMAT)
        with blaming(path, _REMEDY):
            return cls(
                experts=tuple(tree["experts"]),
                skills=_matrix(tree["skills"]),
                lineage=tuple(tree["lineage"]),
                rounds=tuple(_round(one) for one in tree["rounds"]),
                events=tuple(PopulationEvent.from_json(one) for one in tree["events"]),
                readings=tuple(Reading.from_json(one) for one in tree.get("readings", ())),
            )

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """The same; None where there is no such file."""
        return cls.read(directory) if (directory / POPULATION).exists() else None


class _File(TypedDict):
    """population.json; what NaN becomes is looked at afterwards."""

    format: int
    experts: list[str]
    skills: list[list[float | None]]
    lineage: list[Life]
    rounds: list[dict[str, Any]]
    events: list[dict[str, Any]]
    readings: NotRequired[list[dict[str, Any]]]


def _round(tree: Mapping[str, Any]) -> Round:
    names = {field.name for field in fields(Round)}
    if set(tree) != names:
        raise ValueError(f"expected the keys {', '.join(sorted(names))} in a round")
    return Round(
        round=_whole(tree["round"], "round"),
        step=_whole(tree["step"], "step"),
        mapd=_number(tree["mapd"]),
        volume=_number(tree["volume"]),
        usage_entropy=_number(tree["usage_entropy"]),
        fitness=tuple(_number(value) for value in tree["fitness"]),
        hyperparameters=tuple(
            {str(name): _number(value) for name, value in one.items()}
            for one in tree["hyperparameters"]
        ),
    )


def _require_descent(place: int, life: Life, lineage: Sequence[Life]) -> None:
    """ValueError unless a life descends from earlier ones."""
    sources = [source for source in (life.parent, life.lender) if source is not None]
    earlier = all(0 <= source < place for source in sources)
    in_time = earlier and all(lineage[source].round <= life.round for source in sources)
    founds = life.kind == FOUNDER
    if life.id != place or not in_time or life.member < 0 or (founds and bool(sources)):
        raise ValueError(f"life {place} of the lineage does not descend from earlier ones")


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _whole(value: object, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} = {value!r} is not a whole number")
    return value


def _matrix(rows: Sequence[Sequence[float | None]]) -> Floats:
    return np.array([[_number(value) for value in row] for row in rows], dtype=np.float64)
