"""Everything a report shows of a run, read and checked before anything is drawn.

Reads config.yaml, run.json, evaluations/, the training logs and, of a hierarchy, what its
commands and its population left behind; changes nothing. What is missing
or damaged is a StoreError that names the file and the command that makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.backtest.files import Tables
from echelon.config import Config, load_run_config
from echelon.errors import StoreError, UsageError
from echelon.evaluation.evaluate import Evaluation, load_evaluation
from echelon.evaluation.trust import load_trust
from echelon.population.record import CommandRecord, PopulationHistory, has_record, record_files
from echelon.population.reference_policies import HEDGE, expert_key
from echelon.report.charts.chart import BASELINES
from echelon.runs import RunDirectory
from echelon.runs.metrics import LOG, TABLE, read_metrics
from echelon.runs.registry import NESTED
from echelon.training.run import seed_directory
from echelon.types import Floats, Times

SPLITS = ("test", "valid", "train")
"""In the order of a report: what counts most comes first."""
_EQUITY = ("time", "value", "drawdown", "cash_share", "commission", "stamp", "slippage")


@dataclass(frozen=True)
class Record:
    """One saved backtest, of an agent (its `seed`) or a baseline; command: of a hierarchy."""

    key: str
    seed: int | None
    measures: Mapping[str, float]
    tables: Tables
    command: CommandRecord | None = None

    @cached_property
    def times(self) -> Times:
        """[T]."""
        return self.tables.equity["time"].to_numpy()

    @cached_property
    def value(self) -> Floats:
        """[T] money."""
        return self.tables.equity["value"].to_numpy().astype(np.float64)

    @cached_property
    def growth(self) -> Floats:
        """[T] what 1 invested at the start has become."""
        return np.asarray(self.value / self.value[0])

    @property
    def commanded(self) -> CommandRecord:
        assert self.command is not None, f"{self.key} commands nobody"
        return self.command

    @property
    def sets_targets(self) -> bool:
        """Whether the actions are target weights."""
        return any(dtype.is_float() for dtype in self.tables.actions.drop("time").dtypes)


@dataclass(frozen=True)
class SplitData:
    """A run's results on one split. trust: what they are worth; tried: how many were compared"""

    name: str
    evaluation: Evaluation
    agents: tuple[Record, ...]
    baselines: tuple[Record, ...]
    trust: Mapping[str, Any] | None = None
    tried: int | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.evaluation.facts

    @cached_property
    def times(self) -> Times:
        """[T] of the book that lived longest: a ruined one ends early."""
        return max((r.times for r in (*self.agents, *self.baselines)), key=len)

    @property
    def records(self) -> tuple[Record, ...]:
        return (*self.agents, *self.baselines)

    @cached_property
    def median_agent(self) -> Record:
        """The agent whose Sharpe ratio is the median of the seeds' (the lower of two)."""
        ranked = sorted(
            self.agents, key=lambda r: np.nan_to_num(r.measures["sharpe_annual"], nan=np.inf)
        )
        return ranked[(len(ranked) - 1) // 2]

    def over_span(self, values: Floats) -> Floats:
        """[T] values over the whole span: a ruined book stays where it ended."""
        return np.concatenate([values, np.full(len(self.times) - len(values), values[-1])])

    def mean(self, series: Sequence[Floats]) -> Floats:
        """[T] mean over several books, each over the whole span."""
        return np.asarray(np.mean([self.over_span(s) for s in series], axis=0))


@dataclass(frozen=True)
class RunData:
    """A run, as a report needs it: logs by seed, what training left of populations by agent."""

    path: Path
    config: Config
    config_text: str
    facts: Mapping[str, Any]
    splits: tuple[SplitData, ...]
    logs: Mapping[int, pl.DataFrame]
    populations: Mapping[str, PopulationHistory] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def main(self) -> SplitData:
        return self.splits[0]

    @cached_property
    def best_steps(self) -> Mapping[int, int]:
        """Seed → step of the checkpoint that was evaluated."""
        return {int(s): int(step) for s, step in self.main.facts["best_steps"].items()}


def gather(run: Path, splits: Sequence[str] | None) -> RunData:
    """Read a run; `splits` None: all it was evaluated on."""
    config_file = run / "config.yaml"
    if not config_file.is_file():
        inner = (path for name in NESTED for path in sorted((run / name).glob("*/config.yaml")))
        first = next(inner, None)  # of an ablation or a comparison
        remedy = (
            "`echelon train` makes one." if first is None else f"Name one in it: {first.parent}"
        )
        raise StoreError(f"{config_file}: no such file, so {run} is not a run directory. {remedy}")
    wanted = set(RunDirectory(run).evaluated_splits() if splits is None else splits)
    unknown = sorted(wanted - set(SPLITS))
    if unknown:
        raise UsageError(f"no split is called {unknown[0]!r}: name {', '.join(SPLITS)}.")
    if not wanted:
        raise StoreError(
            f"{run / 'evaluations'}: the run was not evaluated yet. Run `echelon evaluate {run} "
            "--split test`, or --split valid."
        )
    config = load_run_config(config_file)
    facts = RunDirectory(run).facts()
    loaded = tuple(_split(run, name) for name in SPLITS if name in wanted)
    seeds = sorted({r.seed for split in loaded for r in split.agents if r.seed is not None})
    logs = {seed: _log(run, seed) for seed in seeds}
    histories = {f"seed-{s}": PopulationHistory.find(seed_directory(run, s)) for s in seeds}
    populations = {key: history for key, history in histories.items() if history is not None}
    text = config_file.read_text(encoding="utf-8")
    return RunData(run, config, text, facts, loaded, logs, populations)


def _split(run: Path, name: str) -> SplitData:
    evaluation = load_evaluation(run, name)
    reference_policies = evaluation.reference_policies.values()
    missing = [
        name
        for name in (HEDGE, expert_key(0))
        if any(name not in own for own in reference_policies)
    ]
    if missing or not evaluation.seeds:
        what = f"{missing[0]!r} is missing" if missing else "no seed in it"
        raise _unfit(run, evaluation, "summary.json", what)
    agents = []
    for seed, measures in sorted(evaluation.seeds.items()):
        record = Record(f"seed-{seed}", seed, measures, _tables(run, evaluation, seed))
        if has_record(evaluation.directory, record.key):
            record = replace(record, command=CommandRecord.read(evaluation.directory, record.key))
            if not np.array_equal(record.commanded.times, record.times[:-1]):
                raise StoreError(
                    f"{record_files(evaluation.directory, record.key)[0]}: its bars are not those "
                    "of equity.parquet. Run `echelon evaluate` again."
                )
        agents.append(record)
    baselines = [
        Record(key, None, evaluation.baselines[key], _tables(run, evaluation, key))
        for key in in_order(evaluation.baselines)
    ]
    trust = load_trust(run, name)
    return SplitData(name, evaluation, tuple(agents), tuple(baselines), trust, tried_on(run))


def tried_on(run: Path) -> int | None:
    """Configurations compared on its validation window, as its last look counted; None: unknown."""
    tested, trust = (load_trust(run, split) for split in ("test", "valid"))
    if tested is not None and tested["claim"].get("trials") is not None:
        return int(tested["claim"]["trials"])
    return None if trust is None or trust["deflation"] is None else trust["deflation"]["n_trials"]


def _tables(run: Path, evaluation: Evaluation, key: str | int) -> Tables:
    tables = evaluation.tables(key)
    missing = [name for name in _EQUITY if name not in tables.equity.columns]
    if missing or tables.equity.is_empty():
        what = f"has no column {missing[0]!r}" if missing else "is empty"
        raise _unfit(run, evaluation, "equity.parquet", what)
    return tables


def _unfit(run: Path, evaluation: Evaluation, file: str, what: str) -> StoreError:
    again = f"Run `echelon evaluate {run} --split {evaluation.directory.name}` again."
    return StoreError(f"{evaluation.directory / file}: {what}. {again}")


def _log(run: Path, seed: int) -> pl.DataFrame:
    directory = seed_directory(run, seed)
    if not any((directory / name).is_file() for name in (LOG, TABLE)):
        raise StoreError(
            f"{directory / LOG}: no such file, but seed {seed} was evaluated. Put the training log "
            "back, or train the run again with `echelon train`."
        )
    return read_metrics(directory)


def in_order(baselines: Iterable[str]) -> list[str]:
    """Names of baselines as a report has them: those we know in our order, then others by name."""
    known = {key: k for k, key in enumerate(BASELINES)}
    return sorted(baselines, key=lambda key: (known.get(key, len(known)), key))
