"""Runs that are prepared, trained and evaluated together: an ablation's variants, or folds.

    DIR/base.yaml       the configuration they come from
    DIR/KIND.json       what is to be done, for going on later
    DIR/MEMBERS/NAME/   a run directory like any other

1. `prepare_runs`: features, made once where several runs share them.
2. `plan_training`, `train_runs`: runs × seeds is one list of jobs, so many at a time.
3. `evaluate_runs`: the best agent of each seed, on the kind's window.

What fails concerns its run only and is part of the result. Every step skips what is done already,
so going on after a stop is the same as starting.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from echelon import __version__
from echelon.agents.jobs import Failure, Report, ShouldStop, run_jobs
from echelon.config import Config, fingerprint, load_run_config, refuse_places, to_yaml
from echelon.envs.world import rules_of
from echelon.errors import EchelonError, StoreError, UsageError, shorten
from echelon.evaluation.evaluate import Evaluation, evaluate, load_evaluation
from echelon.evaluation.test_access import SplitName
from echelon.features import prepare
from echelon.files import (
    blaming,
    exclusive_lock,
    link_or_copy,
    read_json,
    staging_directory,
    swap_directory,
    write_atomic,
    write_csv,
    write_json,
)
from echelon.runs import RunDirectory
from echelon.training.executors import verify_days
from echelon.training.loop import Outcome
from echelon.training.many import SeedJob, train_seed
from echelon.training.run import TrainedRun, finished_outcome, seed_directory

FORMAT = 1

OnRun = Callable[[int, int], None]
"""Called with how many runs are done, of how many."""


@dataclass(frozen=True)
class Kind:
    """A sort of batch.

    title: with its article, `an ablation`; member: what one of its runs is called
    split: the window its runs are evaluated on; trust: with trust.json
    results: files in its directory that a new beginning removes
    """

    title: str
    command: str
    member: str
    split: SplitName
    trust: bool
    results: tuple[str, ...]

    @property
    def noun(self) -> str:
        """`ablation`."""
        return self.title.split()[-1]

    @property
    def stem(self) -> str:
        """The noun as files and JSON have it: `walk_forward`."""
        return self.noun.replace("-", "_")


@dataclass(frozen=True)
class Member:
    """One run of a batch. about: what its run.json says of its part in it"""

    name: str
    config: Config
    about: Mapping[str, str]


@dataclass(frozen=True)
class Batch:
    """Runs in a directory, all made from one configuration."""

    kind: Kind
    directory: Path
    base: Config
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        # What is gone on with may be a stranger's: a name must not lead out of the directory.
        for member in self.members:
            if not re.fullmatch(r"\w[\w.+=-]*", member.name):
                raise StoreError(
                    f"{self.file}: {shorten(member.name, 60)!r} cannot name a {self.kind.member}, "
                    "which names a directory; expected letters, digits, '.', '_', '+', '=', '-'."
                )

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of every run."""
        return tuple(self.base.seed + k for k in range(self.base.train.seeds))

    @property
    def file(self) -> Path:
        """What is to be done."""
        return self.directory / f"{self.kind.stem}.json"

    def run(self, k: int) -> Path:
        """Directory of run k."""
        return self.directory / f"{self.kind.member}s" / self.members[k].name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the directory."""
        RunDirectory.claim(self.directory)
        lock = self.directory / f".{self.kind.command}.lock"
        with exclusive_lock(lock, f"the {self.kind.noun} {self.directory}"):
            yield

    def begin(self, *, overwrite: bool = False) -> None:
        """Make room in the directory; raises where it holds a batch, unless told to overwrite."""
        kind, directory = self.kind, self.directory
        if (directory / "run.json").exists():
            raise UsageError(f"{directory}: holds a run. Name another directory (--output-dir).")
        if not self.file.exists():
            return
        if not overwrite:
            raise UsageError(
                f"{directory}: holds {kind.title}. Go on with it (--resume {directory}), name "
                "another directory (--output-dir), or run it anew in its place (--overwrite)."
            )
        for name in kind.results:
            (directory / name).unlink(missing_ok=True)
        shutil.rmtree(directory / f"{kind.member}s", ignore_errors=True)

    def save(self, tree: Mapping[str, Any]) -> None:
        """Write down what is to be done, and what came out of it so far."""
        whole = {"format": FORMAT, "echelon": __version__, **tree}
        write_atomic(self.directory / "base.yaml", to_yaml(self.base))
        write_json(self.file, whole)


@contextmanager
def reading(kind: Kind, directory: Path) -> Iterator[dict[str, Any]]:
    """What `Batch.save` wrote into a directory; whoever cannot make sense of it says damaged."""
    path = directory / f"{kind.stem}.json"
    if not path.is_file():
        raise UsageError(f"--resume {directory}: no {kind.noun} there (no {path.name}).")
    again = f"Run the {kind.noun} anew (--overwrite)."
    tree = read_json(path, dict[str, Any], again)
    if tree.get("format") != FORMAT:
        version = shorten(tree.get("echelon", "unknown"), 40)
        raise StoreError(f"{path}: written by another version of Echelon ({version}). {again}")
    with blaming(path, again):
        yield tree


def saved_base(directory: Path, seeds: int | None, trust_code: Sequence[Path] = ()) -> Config:
    """The configuration a batch was made from.

    seeds: another number of them than before; trust_code: files it names whose code may run
    """
    base = load_run_config(directory / "base.yaml", (), trust_code)
    refuse_places(base, directory)
    return base if seeds is None else with_seeds(base, seeds)


def with_seeds(config: Config, seeds: int) -> Config:
    """The configuration with this many seeds."""
    return config.model_copy(update={"train": config.train.model_copy(update={"seeds": seeds})})


@dataclass
class Course:
    """How far a batch got; by number of the run.

    data: what a run was prepared from, for its run.json
    outcomes: of the seeds whose training ended
    errors: what went wrong, in order
    """

    data: dict[int, dict[str, Any]] = field(default_factory=dict)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    errors: dict[int, list[BaseException]] = field(default_factory=dict)
    stopped: bool = False

    def failed(self, k: int, error: BaseException) -> None:
        """Note an error of run k."""
        self.errors.setdefault(k, []).append(error)

    def problem(self, k: int) -> str:
        """What went wrong with run k, in words; empty if nothing did."""
        return "; ".join(dict.fromkeys(_words(error) for error in self.errors.get(k, [])))


def prepare_runs(
    batch: Batch,
    course: Course,
    *,
    quarantine: bool = False,
    on_run: OnRun = lambda _done, _all: None,
) -> None:
    """Prepare every run; those with the same features share the files of the first."""
    made: dict[str, Path] = {}
    for k, member in enumerate(batch.members):
        on_run(k, len(batch.members))
        run = batch.run(k)
        share = made.setdefault(_features_hash(member.config), run)
        try:
            if share != run:
                _share_prepared(share, run)
            expected = RunDirectory(run).trained_on()
            report = prepare(member.config, run, expected=expected, quarantine=quarantine)
        except EchelonError as error:
            course.failed(k, error)
            continue
        manifest = report.prepared.manifest
        course.data[k] = {
            "data": manifest["dataset"],
            "prepared": manifest["content_hash"],
            "rules": rules_of(report.prepared, member.config).facts(),
        }
        if not (run / "run.json").exists():  # else of an earlier session, which knows more
            _record(batch, course, k)
    on_run(len(batch.members), len(batch.members))


@dataclass(frozen=True)
class TrainingJob:
    """A seed of run k to train."""

    k: int
    seed: SeedJob


def plan_training(batch: Batch, course: Course) -> list[TrainingJob]:
    """What is still to be trained; what ended in an earlier session is noted in `course`.

    All runs have one seed before any has two: what is stopped half-way can be compared.
    """
    plan = []
    for seed in batch.seeds:
        for k in sorted(course.data):
            run, config = batch.run(k), batch.members[k].config
            done = finished_outcome(config, seed_directory(run, seed))
            if done is None:
                plan.append(TrainingJob(k, SeedJob(config, run, seed, resume=True)))
            else:
                course.outcomes.setdefault(k, []).append(done)
    return plan


def train_runs(
    batch: Batch,
    course: Course,
    plan: Sequence[TrainingJob],
    *,
    workers: int,
    on_report: Callable[[int, object], None] = lambda _job, _message: None,
) -> None:
    """Train what `plan_training` listed; `on_report(job, message)` passes on `Progress`, `Outcome`.

    job: number in the plan
    """
    if plan:
        jobs = [job.seed for job in plan]
        if workers > 1:
            verify_days(job.config for job in jobs)
        done = run_jobs(_train_one, jobs, workers=workers, on_report=on_report)
        course.stopped = done.stopped
        for job, result in zip(plan, done.results, strict=True):
            if isinstance(result, Failure):
                course.failed(job.k, _named(result.error, job.seed.seed))
            elif result is not None and result.ending != "stopped":
                course.outcomes.setdefault(job.k, []).append(result)
    for k, outcomes in course.outcomes.items():
        outcomes.sort(key=lambda outcome: outcome.seed)
        _record(batch, course, k)


def _train_one(job: SeedJob, report: Report, should_stop: ShouldStop) -> Outcome:
    """Train one agent and report how it ended too."""
    outcome = train_seed(job, report, should_stop)
    report(outcome)
    return outcome


@dataclass(frozen=True)
class _Backtests:
    """One run to evaluate."""

    run: TrainedRun
    split: SplitName
    trust: bool


def evaluate_runs(
    batch: Batch, course: Course, *, on_run: OnRun = lambda _done, _all: None
) -> None:
    """Backtest the best agents on the kind's window, where that was not done yet.

    In this process: to start another takes as long as a few backtests.
    """
    kind = batch.kind
    due = [k for k in sorted(course.outcomes) if evaluation_of(batch, course, k) is None]
    jobs = []
    for k in due:
        seeds = tuple(outcome.seed for outcome in course.outcomes[k])
        run = TrainedRun(batch.run(k), batch.members[k].config, seeds)
        jobs.append(_Backtests(run, kind.split, kind.trust))
    if not jobs:
        return
    count = 0

    def one_more(_job: int, _message: object) -> None:
        nonlocal count
        count += 1
        on_run(count, len(jobs))

    on_run(0, len(jobs))
    done = run_jobs(_evaluate_one, jobs, workers=1, on_report=one_more)
    course.stopped = done.stopped
    for k, result in zip(due, done.results, strict=True):
        if isinstance(result, Failure):
            course.failed(k, result.error)


def _evaluate_one(job: _Backtests, report: Report, _should_stop: ShouldStop) -> int:
    result = evaluate(job.run, job.split, trust=job.trust)
    report(len(result.seeds))
    return len(result.seeds)


def evaluation_of(batch: Batch, course: Course, k: int) -> Evaluation | None:
    """The saved evaluation of run k, if it is of just the agents that were trained."""
    if k not in course.outcomes:
        return None
    try:
        saved = load_evaluation(batch.run(k), batch.kind.split)
    except StoreError:
        return None
    best = {str(o.seed): o.best_step for o in course.outcomes[k]}
    made_from = saved.facts["run"]
    same = (
        saved.facts["best_steps"] == best
        and made_from.get("prepared") == course.data[k]["prepared"]
        and made_from.get("config_hash") == fingerprint(batch.members[k].config)
    )
    return saved if same else None


def write_table(frame: pl.DataFrame, stem: Path) -> None:
    """Write a result as STEM.csv, to read, and STEM.parquet, to compute with."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    write_csv(stem.with_suffix(".csv"), frame)
    write_atomic(stem.with_suffix(".parquet"), buffer.getvalue())


def _record(batch: Batch, course: Course, k: int) -> None:
    """Write a run's config.yaml and run.json."""
    member = batch.members[k]
    facts = dict(course.data[k])
    if k in course.outcomes:
        facts["outcomes"] = [outcome.__dict__ for outcome in course.outcomes[k]]
    facts[batch.kind.stem] = dict(member.about)
    RunDirectory(batch.run(k)).record(member.config, batch.kind.command, **facts)


def _features_hash(config: Config) -> str:
    """Hash of what a prepared set depends on; runs with the same one can share it."""
    plain = Config()
    parts = ("data", "split", "features", "normalization", "window", "assets")
    return fingerprint(plain.model_copy(update={name: getattr(config, name) for name in parts}))


def _share_prepared(source: Path, run: Path) -> None:
    """Give another run's prepared set a second name here, unless there is one already.

    `prepare` checks afterwards that it is what this run needs.
    """
    if (run / "prepared").exists() or not (source / "prepared" / "manifest.json").exists():
        return
    with staging_directory(run, ".prepared-") as staging:
        for file in (source / "prepared").iterdir():
            link_or_copy(file, staging / file.name)
        swap_directory(staging, run / "prepared")


def _named(error: BaseException, seed: int) -> BaseException:
    """The error with the seed it concerns; a bug stays as it is."""
    if not isinstance(error, EchelonError):
        return error
    return EchelonError(f"seed {seed}: {error}")


def _words(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # A bug comes as a traceback, which ends with what happened; ours begin with it.
    return lines[0] if isinstance(error, EchelonError | OSError) else lines[-1]
