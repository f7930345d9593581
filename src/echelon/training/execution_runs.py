"""Runs of execution policies: one job a seed, and what trained runs are worth on a split."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from echelon.agents.execution import load_policy
from echelon.agents.jobs import Report, ShouldStop
from echelon.config import Config, load_run_config
from echelon.errors import StoreError, UsageError
from echelon.execution.extensions import load_extensions
from echelon.execution.policies import ExecutionPolicy
from echelon.files import blaming, exclusive_lock, read_json
from echelon.training.execution import (
    CHECKPOINTS,
    POLICY,
    RESULT,
    TEACHER,
    ExecutionData,
    ExecutionOutcome,
    ExecutionTraining,
    Split,
    load_execution_data,
    load_learned,
)
from echelon.training.run import seed_directory, trained_seeds

_LOCK = ".train.lock"
_SEEN: dict[Split, tuple[str, ...]] = {"train": (), "valid": ("train",), "test": ("train", "valid")}
"""Split → windows of a policy that must not reach into it."""


@dataclass(frozen=True)
class ExecutionJob:
    """One policy to train; resume: from the latest checkpoint, if any."""

    config: Config
    run: Path
    seed: int
    resume: bool = False


def train_seed(job: ExecutionJob, report: Report, should_stop: ShouldStop) -> ExecutionOutcome:
    """Train one policy; what is finished already is not trained again."""
    directory = job.run / "seeds" / str(job.seed)
    with exclusive_lock(directory / _LOCK, f"the training in {directory}"):
        if job.resume and (done := _finished(directory)) is not None:
            return done
        data = load_execution_data(job.config)
        training = ExecutionTraining(job.config, data, directory, job.seed)
        return training.run(report, should_stop, resume=job.resume)


def check_start(config: Config, directory: Path) -> None:
    """Refuse what cannot be trained, before anything is written or removed."""
    ExecutionTraining(config, load_execution_data(config), directory, config.seed).learner()


def make_room(directory: Path, *, overwrite: bool) -> None:
    """Refuse to train over a trained run, or remove it where that is asked for.

    What a start leaves that came to nothing, a lock or an empty log, is not a trained run.
    """
    seeds = directory / "seeds"
    for lock in seeds.glob(f"*/{_LOCK}"):
        with exclusive_lock(lock, f"the training in {lock.parent}"):
            pass  # nobody trains there now
    left = (CHECKPOINTS, f"{TEACHER}/{CHECKPOINTS}", POLICY, RESULT)
    if not overwrite and any(any(seeds.glob(f"*/{part}")) for part in left):
        raise UsageError(
            f"{directory}: holds a trained run. Go on with it (--resume {directory}), name another "
            "directory (--output-dir), or train anew in its place (--overwrite)."
        )
    for part in (seeds, directory / "evaluations"):
        shutil.rmtree(part, ignore_errors=True)


def open_trained(
    runs: Mapping[str, Path],
    split: Split,
    orders: Path | None = None,
    trust_code: Sequence[Path] = (),
) -> tuple[Config, ExecutionData, dict[str, dict[int, ExecutionPolicy]]]:
    """The first run's configuration and data, and the learned policies of all, by name and seed.

    split: that they are to be judged on; orders: a file of them, in place of the first run's own
    trust_code: files of the runs' extensions that may run

    A policy that has learned from the split's days, or was made for other steps, other ticks or
    other data, is refused: what it would show there is not what it is worth.
    """
    configs = {run: load_run_config(_configured(run), (), trust_code) for run in runs.values()}
    first = next(iter(runs.values()))
    config = configs[first]
    data = load_execution_data(config, (split,), orders)
    learned: dict[str, dict[int, ExecutionPolicy]] = {}
    for name, run in runs.items():
        # A policy's own features are those of its own run's files.
        execution = configs[run].execution
        own = load_extensions(execution.extensions, execution.run_code)
        places = [seed_directory(run, seed) for seed in trained_seeds(run)]
        seeds = [place for place in places if (place / POLICY).is_dir()]
        if not seeds:
            raise StoreError(
                f"{run}: holds no trained execution policy. Train one: echelon execution train."
            )
        for seed in seeds:
            facts = load_policy(seed / POLICY).facts
            # Policies of before these facts were kept: what the run's configuration says.
            seen = facts.get("seen") or configs[run].split.model_dump(mode="json")
            with blaming(seed / POLICY, "Train the policy again: echelon execution train."):
                _refuse_seen(run, seen, first, config, split)
                refuse_other(run, facts, first, data)
        learned[name] = {int(seed.name): load_learned(seed, data, name, own) for seed in seeds}
    return config, data, learned


def _refuse_seen(
    run: Path, seen: Mapping[str, Sequence[str]], first: Path, config: Config, split: Split
) -> None:
    """Refuse a policy whose windows reach into the days it is to be judged on."""
    begin, end = getattr(config.split, split)
    for window in _SEEN[split]:
        low, high = (date.fromisoformat(one) for one in seen[window])
        if low <= end and begin <= high:
            raise UsageError(
                f"{run}: was trained with split.{window} = {low} to {high}, which overlaps "
                f"split.{split} of {first}, {begin} to {end}: it has seen days it would be judged "
                f"on. Name a run first whose split.{split} none has seen, or train this one again "
                "with the other's split."
            )


def refuse_other(run: Path, facts: Mapping[str, Any], first: Path, data: ExecutionData) -> None:
    """Refuse a policy made for other steps, ticks or data than those at hand."""
    clock = data.days.clock.tolist()
    checks = (
        ("execution.ticks_per_step", int(facts["rules"][0]), data.rules.ticks_per_step),
        ("the dataset's content", facts["content"][:12], data.content[:12]),
        ("the grid of ticks", _grid(facts.get("clock", clock)), _grid(clock)),
    )
    for key, own, here in checks:
        if own != here:
            raise UsageError(
                f"{run}: its policy was trained with {key} = {own}, but {first} has {here}. "
                "Evaluate it by itself with the data and settings it was trained with, or train "
                "it again with these."
            )


def _grid(clock: Sequence[float]) -> str:
    """A grid in words; irregular ones differ by their middle, too."""
    shown = [f"{int(m) // 60:02d}:{int(m) % 60:02d}" for m in (clock[0], clock[-1])]
    return f"{len(clock)} ticks from {shown[0]} to {shown[1]} (sum {sum(clock):g})"


def _configured(run: Path) -> Path:
    path = run / "config.yaml"
    if not path.is_file():
        raise UsageError(f"{run}: no config.yaml there, so not a run directory.")
    return path


def _finished(directory: Path) -> ExecutionOutcome | None:
    path = directory / RESULT
    if not path.is_file():
        return None
    outcome = read_json(path, ExecutionOutcome, "Remove it and resume.")
    return outcome if outcome.ending == "done" else None
