"""A comparison of agents: ours, QTMRL's and Stable-Baselines3's on one market, by one backtest.

    DIR/base.yaml              the configuration they come from
    DIR/comparison.json        the agents, for going on later
    DIR/agents/NAME/           a run directory like any other
    DIR/comparison-SPLIT.csv, .parquet, .json, .png    the result on a window

All have the base's data, windows, features, costs, fills, reward and validation, and are trained
and evaluated by `evaluation.batch`. What differs is the agent:

    sac, td3, apg       the base's settings, with another `train.algo`
    a2c                 QTMRL's actor-critic with the settings of configs/qtmrl-fast.yaml
    sb3-ppo, sb3-sac    Stable-Baselines3's with its own settings (see agents.sb3)

`summarise` adds the baselines, and the difference of Sharpe ratios to the reference, our SAC where
it takes part, with its 95 % interval.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from echelon.backtest.run import stack_returns
from echelon.config import Config, fingerprint, load_config
from echelon.config.algorithms import ALGORITHMS, FLAT_SETTINGS
from echelon.errors import UsageError
from echelon.evaluation.batch import (
    BatchMember,
    Course,
    MeasuredRow,
    RunBatch,
    evaluations_of,
    write_table,
)
from echelon.evaluation.evaluate import Evaluation
from echelon.evaluation.trust import compare
from echelon.files import finite_or_none, finite_values, write_json
from echelon.types import Floats

AGENTS: Mapping[str, str] = {
    algo.lower(): algo for algo, it in ALGORITHMS.items() if it.family != "hierarchy"
}
"""Name → `train.algo`."""
REFERENCE = "sac"
_BASES = (
    *("total_env_steps", "episode_steps", "log_interval_steps"),
    *("validate_every_steps", "checkpoint_every_steps"),
)
"""Keys of `train` that say how long and how often: the base's, whatever the agent."""


@dataclass(frozen=True)
class Comparison(RunBatch):
    """Agents and their runs. steps: of those that are trained for another number than the base's"""

    noun = stem = "comparison"
    command = "compare"
    member = "agent"
    results = tuple(
        f"comparison-{split}.{ending}"
        for split in ("valid", "test")
        for ending in ("csv", "parquet", "json", "png")
    )

    planned = ("agents", "steps", "split")

    agents: tuple[str, ...] = tuple(AGENTS)
    steps: Mapping[str, int] = field(default_factory=dict)

    def make_members(self) -> Iterator[BatchMember]:
        """A run of each agent; raises where one is unknown or cannot be made."""
        self._refuse_odd()
        for name in self.agents:
            config = agent_config(self.base, name, self.steps.get(name))
            yield BatchMember(name, config, {"agent": name})

    @property
    def reference(self) -> str:
        """The agent that the others are compared with: our SAC, or the first."""
        return REFERENCE if REFERENCE in self.agents else self.agents[0]

    def summarise(self, course: Course) -> ComparisonResult:
        evaluations = evaluations_of(self, course)
        reference = evaluations.get(self.reference)

        def gap(evaluation: Evaluation | None, names: Sequence[str | int]) -> SharpeGap | None:
            if evaluation is None or reference is None:
                return None
            return sharpe_gap(evaluation, names, reference, self.base.seed)

        rows = []
        for k, name in enumerate(self.agents):
            outcomes = course.outcomes.get(k, [])
            evaluation = evaluations.get(name)
            seeds = {} if evaluation is None else evaluation.seeds
            row = ComparedRow(
                name=name,
                kind="agent",
                seeds=seeds,
                gap=None if name == self.reference else gap(evaluation, list(seeds)),
                steps=max((o.step for o in outcomes), default=0),
                seconds=max((o.seconds for o in outcomes), default=0.0),
                best_steps={o.seed: o.best_step for o in outcomes},
                config_hash=fingerprint(self.members[k].config),
                problem=course.problem(k),
            )
            rows.append(row)
        facts: dict[str, Any] = {}
        if evaluations:
            # The same on every run: market, window and costs are.
            first = next(iter(evaluations.values()))
            rows += [replace(row, gap=gap(first, [row.name])) for row in baseline_rows(first)]
            facts = window_facts(first)
        return ComparisonResult(self.directory.name, self.reference, tuple(rows), facts)

    def _refuse_odd(self) -> None:
        agents, steps = self.agents, self.steps
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
        if self.split not in ("valid", "test"):
            raise UsageError(f"--split {self.split!r}: expected valid or test.")


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


class SharpeGap(NamedTuple):
    """Annual Sharpe ratio minus the reference's, and its 95 % interval; NaN: unknown."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ComparedRow(MeasuredRow):
    """What an agent or a baseline came to. gap: to the reference; None for itself

    steps, seconds: of training, the most that a seed had; best_steps: by seed, of what was chosen
    """

    kind: Literal["agent", "baseline"]
    gap: SharpeGap | None = None
    steps: int = 0
    seconds: float = 0.0
    best_steps: Mapping[int, int] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "config_hash": self.config_hash,
            "best_steps": {str(seed): step for seed, step in self.best_steps.items()},
            "seeds": {str(seed): finite_values(values) for seed, values in self.seeds.items()},
        }


@dataclass(frozen=True)
class ComparisonResult:
    """Every agent's result, then every baseline's. facts: of the window they were compared on"""

    name: str
    reference: str
    rows: tuple[ComparedRow, ...]
    facts: Mapping[str, Any]

    def frame(self) -> pl.DataFrame:
        """One line each: steps, difference, and mean and std over seeds of every measure."""
        return pl.DataFrame([self._line(row) for row in self.rows], infer_schema_length=None)

    def _line(self, row: ComparedRow) -> dict[str, object]:
        gap = row.gap or SharpeGap(math.nan, math.nan, math.nan)
        trained = row.kind == "agent"
        line: dict[str, object] = {
            "name": row.name,
            "kind": row.kind,
            "seeds": len(row.seeds) if trained else None,
            "steps": row.steps if trained else None,
            "seconds": row.seconds if trained else None,
            "reference": self.reference,
            **{f"sharpe_annual_diff_{k}": finite_or_none(v) for k, v in gap._asdict().items()},
        }
        line |= finite_values(row.columns())
        return line | {"problem": row.problem, "config_hash": row.config_hash}

    def tree(self) -> dict[str, Any]:
        """Everything, single seeds too, as JSON has it."""
        rows = [
            {
                **row.tree(),
                "kind": row.kind,
                "steps": row.steps,
                "seconds": row.seconds,
                "difference": None if row.gap is None else finite_values(row.gap._asdict()),
                "problem": row.problem,
            }
            for row in self.rows
        ]
        return {"format": 1, "reference": self.reference, **self.facts, "rows": rows}

    def write(self, directory: Path, split: str) -> None:
        stem = directory / f"comparison-{split}"
        write_table(self.frame(), stem)
        write_json(stem.with_suffix(".json"), self.tree())


def baseline_rows(evaluation: Evaluation) -> list[ComparedRow]:
    return [
        ComparedRow(name=name, kind="baseline", seeds={-1: values})
        for name, values in evaluation.baselines.items()
    ]


def window_facts(evaluation: Evaluation) -> dict[str, Any]:
    keys = ("split", "first", "last", "bars", "periods_per_year", "ledger", "fees")
    return {key: evaluation.facts[key] for key in keys}


def sharpe_gap(
    evaluation: Evaluation, names: Sequence[str | int], reference: Evaluation, seed: int
) -> SharpeGap:
    """Of seeds or a baseline, to the reference's seeds; the wider bounds of two block lengths."""
    returns, others = saved_returns(evaluation, names), saved_returns(reference, [*reference.seeds])
    bars = max(len(returns), len(others))
    mine, theirs = (np.pad(x, ((0, bars - len(x)), (0, 0))) for x in (returns, others))
    if (both := compare(mine, theirs, seed)) is None:
        return SharpeGap(math.nan, math.nan, math.nan)
    yearly = math.sqrt(float(evaluation.facts["periods_per_year"]))
    return SharpeGap(both.single.estimate * yearly, both.low * yearly, both.high * yearly)


def saved_returns(evaluation: Evaluation, names: Sequence[str | int]) -> Floats:
    """[T,S] returns of saved backtests; zero after a ruin."""
    return stack_returns(
        evaluation.tables(name).equity["return"].drop_nulls().to_numpy().astype(np.float64)
        for name in names
    )
