"""What `ablate`, `compare` and `walk-forward` share: many runs worked through, and watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.cli import options
from echelon.cli.console import err, progress_bar, say_rules, set_up_logging, watching
from echelon.errors import EchelonError, Stopped, UsageError

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.evaluation.batch import Course, RunBatch, TrainingJob
    from echelon.training.loop import Outcome, Progress
    from echelon.training.run import SeedJob
    from echelon.workers import Report, ShouldStop

B = TypeVar("B", bound="RunBatch")


def open_batch(
    kind: type[B],
    given: options.RunOptions,
    make: Callable[[Path, Config], B],
    *own: object,
    also: str = "--seeds",
    **changes: Any,  # noqa: ANN401 (a field of the batch)
) -> B:
    """The batch that --resume names, or a new one by `make`, of its directory and configuration.

    own: values of the command's own options, which would change what --resume goes on with
    also, changes: options that may, and the fields they change
    """
    if given.resume is None:
        tree = given.read_config(None)
        parent = tree.logging.output_dir
        place = options.run_directory(given.config, given.output_dir, None, parent, f"-{kind.noun}")
        return make(place, tree)
    if any((given.config, given.override, given.output_dir, given.overwrite, *own)):
        raise UsageError(
            f"--resume goes on with its own {kind.noun}; of the other options, only {also}, "
            "--trust-code, --on and --workers go with it."
        )
    set_up_logging(given.log_level)
    trust_code = given.trust_code or ()
    return kind.open(given.resume, seeds=given.seeds, trust_code=trust_code, **changes)


@contextmanager
def work_through(
    batch: RunBatch, given: options.RunOptions, before: Callable[[], None] = lambda: None
) -> Iterator[Course]:
    from echelon.config.sizes import refuse_sizes
    from echelon.evaluation.batch import Course

    refuse_sizes(batch.base)
    with batch.lock(), given.exporting_metrics(batch.directory):
        if given.resume is None:
            batch.make_room(overwrite=given.overwrite)
        batch.save()  # with the number of seeds of now
        before()
        course = Course()
        try:
            with options.working_on(options.on_engine(batch.base, given), given.workers):
                run_steps(batch, course, given)
        except KeyboardInterrupt:
            course.stopped = True
        if course.stopped:
            ended = sum(len(outcomes) for outcomes in course.outcomes.values())
            raise Stopped(
                f"{ended} of {len(batch.members) * len(batch.seeds)} trainings ended, the others "
                f"have checkpoints. Go on with: {_resume(batch)}"
            )
        yield course
        _raise_failures(batch, course)


def run_steps(
    batch: RunBatch,
    course: Course,
    given: options.RunOptions,
    train: Callable[[SeedJob, Report, ShouldStop], Outcome] | None = None,
    on_progress: Callable[[TrainingJob, Progress], None] = lambda _job, _now: None,
) -> None:
    """Prepare, train and evaluate what is not done yet; train: see `train_runs`."""
    from echelon.evaluation.batch import evaluate_runs, plan_training, prepare_runs, train_runs
    from echelon.training.loop import Outcome, Progress

    members = f"{batch.member}s"
    workers = options.worker_count(given.workers, batch.base)
    with progress_bar(f"preparing {members}") as bar:
        prepare_runs(batch, course, quarantine=given.quarantine, on_run=bar.show)
    # In a line; where the runs' rules differ, in a line for each that is another.
    said: list[dict[str, Any]] = []
    differ = len({str(data["rules"]) for data in course.data.values()}) > 1
    for k, data in sorted(course.data.items()):
        if data["rules"] not in said:
            said.append(data["rules"])
            say_rules(data["rules"], of=batch.members[k].name if differ else "")
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
                on_progress(plan[job], message)
                watch.progress(job, message)
            elif isinstance(message, Outcome) and message.ending != "stopped":
                watch.end(job, message)

        train_runs(batch, course, plan, workers=workers, on_report=show, train=train)
    if course.stopped:
        return
    with progress_bar(f"evaluating {members}") as bar:
        evaluate_runs(batch, course, on_run=bar.show)


def _raise_failures(batch: RunBatch, course: Course) -> None:
    if not course.errors:
        return
    for errors in course.errors.values():
        for error in errors:
            if not isinstance(error, EchelonError | OSError):
                raise error
    lines = [f"  {batch.members[k].name}: {course.problem(k)}" for k in sorted(course.errors)]
    raise EchelonError(
        f"{len(lines)} of {len(batch.members)} {batch.member}s failed; the others are done. "
        f"Mend what can be and go on with: {_resume(batch)}\n" + "\n".join(lines)
    )


def _resume(batch: RunBatch) -> str:
    return f"echelon {batch.command} --resume {batch.directory}{options.trust_flags(batch.base)}"
