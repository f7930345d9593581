"""A comparison of agents: ours, QTMRL's and Stable-Baselines3's on one market, by one backtest.

    DIR/base.yaml              the configuration they come from
    DIR/comparison.json        the agents, for going on later
    DIR/agents/NAME/           a run directory like any other
    DIR/comparison-SPLIT.csv, .parquet, .json, .png    the result on a window

All have the base's data, windows, features, costs, fills and reward, and choose their checkpoint
by the same measure on the validation window at the same intervals; they are trained, validated and
evaluated by `evaluation.batch`. What differs is the agent:

    sac, td3, apg       the base's settings, with another `train.algo`
    a2c                 QTMRL's actor-critic with the settings of configs/qtmrl-fast.yaml
    sb3-ppo, sb3-sac    Stable-Baselines3's with its own settings (see agents.sb3)

`summarise` gives mean and standard deviation over seeds, beside the baselines, and the difference
of Sharpe ratios to the reference, our SAC where it takes part, with its 95 % interval.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from echelon.config import Config, fingerprint, load_config
from echelon.config.algorithms import ALGORITHMS, FLAT_SETTINGS
from echelon.errors import UsageError
from echelon.evaluation.batch import (
    Batch,
    Course,
    Kind,
    Member,
    evaluation_of,
    reading,
    saved_base,
    write_table,
)
from echelon.evaluation.evaluate import Evaluation
from echelon.evaluation.statistics import judge
from echelon.evaluation.test_access import SplitName
from echelon.evaluation.trust import LEAST_BARS
from echelon.files import write_json
from echelon.ops.measures import LABELS, MeanStd, mean_std
from echelon.types import Floats

AGENTS: Mapping[str, str] = MappingProxyType(
    {algo.lower(): algo for algo, it in ALGORITHMS.items() if it.family != "hierarchy"}
)
"""Name → `train.algo`."""
REFERENCE = "sac"
_SPLITS = ("valid", "test")
_BASES = (
    *("total_env_steps", "episode_steps", "log_interval_steps"),
    *("validate_every_steps", "checkpoint_every_steps"),
)
"""Keys of `train` that say how long and how often: the base's, whatever the agent."""


def _kind(split: SplitName) -> Kind:
    endings = ("csv", "parquet", "json", "png")
    return Kind(
        title="a comparison",
        command="compare",
        member="agent",
        split=split,
        trust=False,
        results=tuple(f"comparison-{s}.{ending}" for s in _SPLITS for ending in endings),
    )


@dataclass(frozen=True)
class Comparison:
    """Agents and their runs. steps: of those that are trained for another number than the base's"""

    agents: tuple[str, ...]
    steps: Mapping[str, int]
    batch: Batch

    @staticmethod
    def of(
        directory: Path,
        base: Config,
        agents: Sequence[str] = tuple(AGENTS),
        *,
        steps: Mapping[str, int] | None = None,
        split: SplitName = "valid",
    ) -> Comparison:
        """The comparison of these agents; raises where one is unknown or cannot be made."""
        chosen = dict(steps or {})
        _refuse_odd(agents, chosen, split)
        members = tuple(
            Member(name, agent_config(base, name, chosen.get(name)), {"agent": name})
            for name in agents
        )
        return Comparison(tuple(agents), chosen, Batch(_kind(split), directory, base, members))

    @staticmethod
    def open(
        directory: Path,
        *,
        seeds: int | None = None,
        split: SplitName | None = None,
        trust_code: Sequence[Path] = (),
    ) -> Comparison:
        """Go on with the one in a directory.

        seeds, split: others than before; trust_code: files of code that may run
        """
        with reading(_kind("valid"), directory) as tree:
            agents, before = [str(name) for name in tree["agents"]], tree["split"]
            steps = {str(name): int(count) for name, count in tree["steps"].items()}
        base = saved_base(directory, seeds, trust_code)
        return Comparison.of(directory, base, agents, steps=steps, split=split or before)

    @property
    def reference(self) -> str:
        """The agent that the others are compared with: our SAC, or the first."""
        return REFERENCE if REFERENCE in self.agents else self.agents[0]

    def save(self) -> None:
        """Write down what is to be done."""
        split = self.batch.kind.split
        self.batch.save({"agents": self.agents, "steps": dict(self.steps), "split": split})


def agent_config(base: Config, name: str, steps: int | None = None) -> Config:
    """The base with this agent instead of its own. steps: another number than the base's"""
    algo = AGENTS[name]
    family, basis = ALGORITHMS[algo].family, ALGORITHMS[base.train.algo].family
    if family == "expert" and basis != "expert":
        raise UsageError(
            f"agent {name!r} takes its settings from the configuration, whose train.algo is "
            f"{base.train.algo}, not an expert's. Start from one such as configs/sac.yaml and "
            "override data, assets and split (-o), or leave the agent out (--agents)."
        )
    train: dict[str, Any] = {"algo": algo}
    parts: dict[str, Any] = {}
    if family == "flat" and basis != "flat":
        flat = load_config(None, FLAT_SETTINGS)
        keys = flat.train.model_fields_set.difference(_BASES)
        train |= {key: getattr(flat.train, key) for key in keys}
        parts["model"] = flat.model
    if steps is not None:
        train["total_env_steps"] = steps
    return base.model_copy(update=parts | {"train": base.train.model_copy(update=train)})


class Gap(NamedTuple):
    """Annual Sharpe ratio less the reference's, and its 95 % interval; NaN: cannot be told."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What an agent or a baseline came to.

    seeds: measures by seed, as in `Measures`; a baseline has one, which is none of ours
    steps, seconds: of training, the most that a seed had; best_steps: by seed, of what was chosen
    gap: to the reference; None for itself
    problem: what went wrong, empty if nothing did
    """

    name: str
    kind: Literal["agent", "baseline"]
    seeds: Mapping[int, Mapping[str, float]]
    gap: Gap | None = None
    steps: int = 0
    seconds: float = 0.0
    best_steps: Mapping[int, int] = field(default_factory=dict)
    config_hash: str = ""
    problem: str = ""

    def values(self, measure: str) -> list[float]:
        """A measure of each seed."""
        return [values[measure] for values in self.seeds.values()]

    def over_seeds(self, measure: str) -> MeanStd:
        """Mean and standard deviation (ddof 1) of a measure; NaN without any seed."""
        return mean_std(self.values(measure)) if self.seeds else MeanStd(math.nan, math.nan)


@dataclass(frozen=True)
class ComparisonResult:
    """Every agent's result, then every baseline's. facts: of the window they were compared on"""

    name: str
    reference: str
    rows: tuple[Row, ...]
    facts: Mapping[str, Any]

    def frame(self) -> pl.DataFrame:
        """One line each: steps, difference, and mean and std over seeds of every measure."""
        return pl.DataFrame([self._line(row) for row in self.rows], infer_schema_length=None)

    def _line(self, row: Row) -> dict[str, object]:
        gap = row.gap or Gap(math.nan, math.nan, math.nan)
        line: dict[str, object] = {
            "name": row.name,
            "kind": row.kind,
            "seeds": len(row.seeds) if row.kind == "agent" else None,
            "steps": row.steps if row.kind == "agent" else None,
            "seconds": row.seconds if row.kind == "agent" else None,
            "reference": self.reference,
            **{f"sharpe_annual_diff_{k}": or_none(v) for k, v in gap._asdict().items()},
        }
        for measure in LABELS:
            found = row.over_seeds(measure)
            line[f"{measure}_mean"], line[f"{measure}_std"] = map(or_none, found)
        return line | {"problem": row.problem, "config_hash": row.config_hash}

    def tree(self) -> dict[str, Any]:
        """Everything, single seeds too, as JSON has it."""
        rows = [
            {
                "name": row.name,
                "kind": row.kind,
                "steps": row.steps,
                "seconds": row.seconds,
                "best_steps": {str(seed): step for seed, step in row.best_steps.items()},
                "difference": None
                if row.gap is None
                else {k: or_none(v) for k, v in row.gap._asdict().items()},
                "seeds": {
                    str(seed): {k: or_none(v) for k, v in values.items()}
                    for seed, values in row.seeds.items()
                },
                "problem": row.problem,
                "config_hash": row.config_hash,
            }
            for row in self.rows
        ]
        return {"format": 1, "reference": self.reference, **self.facts, "rows": rows}

    def write(self, directory: Path, split: str) -> None:
        """Write comparison-SPLIT.csv, .parquet and .json."""
        stem = directory / f"comparison-{split}"
        write_table(self.frame(), stem)
        write_json(stem.with_suffix(".json"), self.tree())


def summarise(comparison: Comparison, course: Course) -> ComparisonResult:
    """Gather the agents' evaluations, and compare them with the reference."""
    batch, reference = comparison.batch, comparison.reference
    found = {
        name: evaluation
        for k, name in enumerate(comparison.agents)
        if (evaluation := evaluation_of(batch, course, k)) is not None
    }
    gaps = Gaps(found.get(reference), batch.base.seed)
    rows = []
    for k, name in enumerate(comparison.agents):
        outcomes = course.outcomes.get(k, [])
        evaluation = found.get(name)
        rows.append(
            Row(
                name,
                "agent",
                {} if evaluation is None else evaluation.seeds,
                gap=None
                if evaluation is None or name == reference
                else gaps.of(evaluation, list(evaluation.seeds)),
                steps=max((o.step for o in outcomes), default=0),
                seconds=max((o.seconds for o in outcomes), default=0.0),
                best_steps={o.seed: o.best_step for o in outcomes},
                config_hash=fingerprint(batch.members[k].config),
                problem=course.problem(k),
            )
        )
    if not found:
        return ComparisonResult(batch.directory.name, reference, tuple(rows), {})
    # The same on every run: market, window and costs are.
    first = next(iter(found.values()))
    for name, values in first.baselines.items():
        rows.append(Row(name, "baseline", {-1: values}, gap=gaps.of(first, [name])))
    keys = ("split", "first", "last", "bars", "periods_per_year", "ledger", "fees")
    facts = {key: first.facts[key] for key in keys}
    return ComparisonResult(batch.directory.name, reference, tuple(rows), facts)


class Gaps:
    """Differences to the seeds of one evaluation."""

    def __init__(self, reference: Evaluation | None, seed: int) -> None:
        self._seed = seed
        self._mine = None if reference is None else saved_returns(reference, list(reference.seeds))

    def of(self, evaluation: Evaluation, names: Sequence[str | int]) -> Gap | None:
        """Of these seeds, or of a baseline; the wider bounds of two block lengths."""
        if self._mine is None:
            return None
        theirs = saved_returns(evaluation, names)
        bars = max(len(theirs), len(self._mine))
        if bars < LEAST_BARS:
            return Gap(math.nan, math.nan, math.nan)
        one, other = (np.pad(x, ((0, bars - len(x)), (0, 0))) for x in (theirs, self._mine))
        claim = judge(one, other, math.nan, seed=self._seed)
        yearly = math.sqrt(float(evaluation.facts["periods_per_year"]))
        low = min(claim.single.low, claim.double.low)
        high = max(claim.single.high, claim.double.high)
        return Gap(claim.single.estimate * yearly, low * yearly, high * yearly)


def saved_returns(evaluation: Evaluation, names: Sequence[str | int]) -> Floats:
    """[T,S] returns of saved backtests; zero after a ruin."""
    columns = [
        evaluation.tables(name).equity["return"].drop_nulls().to_numpy().astype(np.float64)
        for name in names
    ]
    longest = max(len(column) for column in columns)
    return np.column_stack([np.pad(column, (0, longest - len(column))) for column in columns])


def _refuse_odd(agents: Sequence[str], steps: Mapping[str, int], split: str) -> None:
    if not agents:
        raise UsageError(f"--agents: none named. Choose from {', '.join(AGENTS)}.")
    for name in (*agents, *steps):
        if name not in AGENTS:
            near = difflib.get_close_matches(name, AGENTS, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"agent {name!r} is unknown; there are {', '.join(AGENTS)}.{hint}")
    twice = sorted({name for name in agents if agents.count(name) > 1})
    if twice:
        raise UsageError(f"--agents: {', '.join(twice)} named more than once.")
    absent = sorted(steps.keys() - set(agents))
    if absent:
        raise UsageError(f"--steps: {', '.join(absent)} takes no part; add it to --agents.")
    for name, count in steps.items():
        if count < 1:
            raise UsageError(f"--steps {name}={count}: expected a whole number above 0.")
    if split not in _SPLITS:
        raise UsageError(f"--split {split!r}: expected valid or test.")


def or_none(value: float) -> float | None:
    """A number as JSON and tables have it: null where it is not finite."""
    return float(value) if math.isfinite(value) else None
