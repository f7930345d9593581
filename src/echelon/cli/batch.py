"""What `ablate`, `compare` and `walk-forward` share: many runs worked through, and watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from echelon.cli.console import err, progress_bar
from echelon.cli.options import run_directory, trust_flags
from echelon.cli.rules import say_rules
from echelon.cli.watch import watching
from echelon.errors import EchelonError, Stopped, UsageError

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.evaluation.batch import Batch, Course


def batch_directory(
    config: Path | None, output_dir: Path | None, base: Config, ending: str
) -> Path:
    """--output-dir, or one named after the configuration, apart from its ordinary run."""
    if output_dir is not None:
        return output_dir
    usual = run_directory(config, None, None, base.logging.output_dir)
    return usual.with_name(f"{usual.name}-{ending}")


class Study(Protocol):
    """What is made of a batch: an ablation, a walk-forward."""

    @property
    def batch(self) -> Batch:
        """Its runs."""

    def save(self) -> None:
        """Write down what is to be done."""


def refuse_beside_resume(noun: str, *given: object, also: str = "--seeds") -> None:
    """Refuse options that would change what --resume goes on with. also: those that may"""
    if any(given):
        raise UsageError(
            f"--resume goes on with its own {noun}; of the other options, only {also}, "
            "--trust-code and --workers go with it."
        )


@contextmanager
def claimed(study: Study, *, resumed: bool, overwrite: bool) -> Iterator[None]:
    """Hold the study's directory, emptied where it begins anew, and what is to be done in it."""
    from echelon.config.sizes import refuse_sizes

    refuse_sizes(study.batch.base)
    with study.batch.locked():
        if not resumed:
            study.batch.begin(overwrite=overwrite)
        study.save()  # with the number of seeds of now
        yield


def run_batch(batch: Batch, workers: int, quarantine: bool) -> Course:
    """Prepare, train and evaluate; after Ctrl-C raises `Stopped`, which says how to go on."""
    from echelon.evaluation.batch import Course

    course = Course()
    try:
        _run_steps(batch, course, workers, quarantine)
    except KeyboardInterrupt:
        course.stopped = True
    if course.stopped:
        ended = sum(len(outcomes) for outcomes in course.outcomes.values())
        raise Stopped(
            f"{ended} of {len(batch.members) * len(batch.seeds)} trainings ended, the others have "
            f"checkpoints. Go on with: {_resume(batch)}"
        )
    return course


def _run_steps(batch: Batch, course: Course, workers: int, quarantine: bool) -> None:
    from echelon.evaluation.batch import evaluate_runs, plan_training, prepare_runs, train_runs
    from echelon.training.loop import Outcome, Progress

    members = f"{batch.kind.member}s"
    with progress_bar(f"preparing {members}") as bar:
        prepare_runs(batch, course, quarantine=quarantine, on_run=bar.of)
    _say_rules(batch, course)
    plan = plan_training(batch, course)
    before = len(course.data) * len(batch.seeds) - len(plan)
    err.print(
        f"{len(course.data)} {members} × {len(batch.seeds)} seeds: {len(plan)} to train, "
        f"{before} done before; {workers} at a time"
    )
    labels = [f"{batch.members[job.k].name} {job.seed.seed}" for job in plan]
    totals = [job.seed.config.train.total_env_steps for job in plan]
    with watching(labels, totals) as watch:

        def show(job: int, message: object) -> None:
            if isinstance(message, Progress):
                watch.progress(job, message)
            elif isinstance(message, Outcome) and message.ending != "stopped":
                watch.ended(job, message)

        train_runs(batch, course, plan, workers=workers, on_report=show)
    if course.stopped:
        return
    with progress_bar(f"evaluating {members}") as bar:
        evaluate_runs(batch, course, on_run=bar.of)


def _say_rules(batch: Batch, course: Course) -> None:
    """The rules of the runs in a line; where they differ, in a line for each that is another."""
    said: list[dict[str, Any]] = []
    differ = len({str(data["rules"]) for data in course.data.values()}) > 1
    for k, data in sorted(course.data.items()):
        if data["rules"] not in said:
            said.append(data["rules"])
            say_rules(data["rules"], of=batch.members[k].name if differ else "")


def raise_failures(batch: Batch, course: Course) -> None:
    """Name the runs that failed; a bug of ours is shown as one."""
    if not course.errors:
        return
    for errors in course.errors.values():
        for error in errors:
            if not isinstance(error, EchelonError | OSError):
                raise error
    lines = [f"  {batch.members[k].name}: {course.problem(k)}" for k in sorted(course.errors)]
    raise EchelonError(
        f"{len(lines)} of {len(batch.members)} {batch.kind.member}s failed; the others are done. "
        f"Mend what can be and go on with: {_resume(batch)}\n" + "\n".join(lines)
    )


def _resume(batch: Batch) -> str:
    return f"echelon {batch.kind.command} --resume {batch.directory}{trust_flags(batch.base)}"
