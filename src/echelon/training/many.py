"""Train a run's agents: one per seed, side by side, each from the beginning or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.config import Config
from echelon.features.prepared import Prepared
from echelon.files import exclusive_lock
from echelon.training.executors import verify_days
from echelon.training.learners import Worlds, ready
from echelon.training.loop import Outcome, Progress
from echelon.training.run import (
    Training,
    finished_outcome,
    outcome_before_start,
    resume_point,
    seed_directory,
)
from echelon.workers import JobResults, Report, ShouldStop, run_jobs


@dataclass(frozen=True)
class SeedJob:
    """One agent to train. checkpoint: where to go on from; resume: from the latest, if any."""

    config: Config
    run: Path
    seed: int
    resume: bool = False
    checkpoint: Path | None = None


def train_seed(job: SeedJob, report: Report, should_stop: ShouldStop) -> Outcome:
    """Train one agent; what is finished already is not trained again."""
    directory = seed_directory(job.run, job.seed)
    with exclusive_lock(directory / ".train.lock", f"the training in {directory}"):
        point = job.checkpoint
        if point is None and job.resume:
            done = finished_outcome(job.config, directory)
            if done is not None:
                return done
            point = resume_point(directory)
        worlds = Worlds.from_prepared(Prepared.open(job.run), job.config)
        if not ready(job.config, worlds, directory, should_stop):
            return outcome_before_start(job.seed)
        training = Training(job.config, worlds, directory, job.seed, resume=point)
        return training.run(report, should_stop)


def train_seeds(
    jobs: Sequence[SeedJob],
    *,
    workers: int,
    on_progress: Callable[[Progress], None],
    train: Callable[[SeedJob, Report, ShouldStop], Outcome] = train_seed,
) -> JobResults[Outcome]:
    """Train every job, so many at a time; train: one of them, in a process of its own."""

    def pass_on(_job: int, message: object) -> None:
        assert isinstance(message, Progress)
        on_progress(message)

    if workers > 1:
        verify_days(job.config for job in jobs)
    return run_jobs(train, jobs, workers=workers, on_report=pass_on)
