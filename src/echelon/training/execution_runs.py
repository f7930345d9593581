"""Runs of execution policies: one job a seed, and what trained runs are worth on a split."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.agents.jobs import Report, ShouldStop
from echelon.config import Config, load_config
from echelon.errors import StoreError, UsageError
from echelon.execution.policies import ExecutionPolicy
from echelon.files import exclusive_lock
from echelon.training.execution import (
    POLICY,
    RESULT,
    ExecutionData,
    ExecutionOutcome,
    ExecutionTraining,
    load_execution_data,
    load_learned,
)


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
    with exclusive_lock(directory / ".train.lock", f"the training in {directory}"):
        if job.resume and (done := _finished(directory)) is not None:
            return done
        data = load_execution_data(job.config)
        training = ExecutionTraining(job.config, data, directory, job.seed)
        return training.run(report, should_stop, resume=job.resume)


def make_room(directory: Path, *, overwrite: bool) -> None:
    """Refuse to train over a trained run, or remove it where that is asked for."""
    seeds = directory / "seeds"
    if not seeds.exists():
        return
    if not overwrite:
        raise UsageError(
            f"{directory}: holds a trained run. Go on with it (--resume {directory}), name another "
            "directory (--output-dir), or train anew in its place (--overwrite)."
        )
    for part in (seeds, directory / "evaluations"):
        shutil.rmtree(part, ignore_errors=True)


def open_trained(
    runs: Mapping[str, Path],
) -> tuple[Config, ExecutionData, dict[str, dict[int, ExecutionPolicy]]]:
    """The first run's configuration and data, and the learned policies of all, by name and seed."""
    first = next(iter(runs.values()))
    config = load_config(_configured(first))
    data = load_execution_data(config)
    learned: dict[str, dict[int, ExecutionPolicy]] = {}
    for name, run in runs.items():
        _configured(run)
        seeds = sorted(p.parent for p in (run / "seeds").glob(f"*/{POLICY}"))
        if not seeds:
            raise StoreError(
                f"{run}: holds no trained execution policy. Train one: echelon execution train."
            )
        learned[name] = {int(seed.name): load_learned(seed, data, name) for seed in seeds}
    return config, data, learned


def _configured(run: Path) -> Path:
    path = run / "config.yaml"
    if not path.is_file():
        raise UsageError(f"{run}: no config.yaml there, so not a run directory.")
    return path


def _finished(directory: Path) -> ExecutionOutcome | None:
    path = directory / RESULT
    if not path.is_file():
        return None
    try:
        outcome = ExecutionOutcome(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path}: damaged ({error}). Remove it and resume.") from None
    return outcome if outcome.ending == "done" else None
