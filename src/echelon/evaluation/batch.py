"""Runs that are prepared, trained and evaluated together: an ablation's variants, or folds.

    DIR/base.yaml       the configuration they come from
    DIR/STEM.json       what is to be done, for going on later
    DIR/MEMBERS/NAME/   a run directory like any other

1. `prepare_runs`: features, made once where several runs share them.
2. `plan_training`, `train_runs`: runs × seeds is one list of jobs, so many at a time.
3. `evaluate_runs`: the best agent of each seed, on the batch's window.

What fails concerns its run only and is part of the result. Every step skips what is done already,
so going on after a stop is the same as starting.
"""

from __future__ import annotations

import math
import re
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, get_type_hints

import polars as pl
from pydantic import TypeAdapter

from echelon import __version__
from echelon.backtest.files import Book
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
    write_parquet,
)
from echelon.ops.measures import LABELS, MeanStd, mean_std
from echelon.runs import RunDirectory
from echelon.training.loop import Outcome
from echelon.training.run import (
    SeedJob,
    TrainedRun,
    finished_outcome,
    run_seed_jobs,
    seed_directory,
    train_seed,
)
from echelon.types import Floats
from echelon.workers import Engine, Failure, Report, ShouldStop, run_jobs, use_engine

_FORMAT = 1

OnRun = Callable[[int, int], None]
"""Called with how many runs are done, of how many."""


@dataclass(frozen=True)
class BatchMember:
    """One run of a batch. about: what its run.json says of its part in it"""

    name: str
    config: Config
    about: Mapping[str, str]


@dataclass(frozen=True)
class RunBatch(ABC):
    """Runs in a directory, all made from one configuration; each sort of batch is a subclass.

    noun: what it is called; stem: the noun in names of files; member: what one run is called
    command: that makes it; results: files in its directory that a new beginning removes
    planned: fields that say what is to be done, in STEM.json
    split: the window its runs are evaluated on; trust: with trust.json; ensemble: of its seeds too
    """

    noun: ClassVar[str]
    stem: ClassVar[str]
    command: ClassVar[str]
    member: ClassVar[str]
    results: ClassVar[tuple[str, ...]]
    planned: ClassVar[tuple[str, ...]]
    trust: ClassVar[bool] = False
    ensemble: ClassVar[bool] = False

    directory: Path
    base: Config
    split: SplitName = field(default="valid", kw_only=True)

    def __post_init__(self) -> None:
        # What is gone on with may be a stranger's: a name must not lead out of the directory.
        for member in self.members:
            if not re.fullmatch(r"\w[\w.+=-]*", member.name):
                raise StoreError(
                    f"{self.file}: {shorten(member.name, 60)!r} cannot name a {self.member}, "
                    "which names a directory; expected letters, digits, '.', '_', '+', '=', '-'."
                )

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        seeds: int | None = None,
        trust_code: Sequence[Path] = (),
        **changes: Any,  # noqa: ANN401 (a field of the subclass)
    ) -> Self:
        """Go on with the one in a directory.

        seeds: another number of them than before; trust_code: files it names whose code may run
        changes: fields that are to be others than before
        """
        with cls.reading(directory) as tree:
            plan = {name: of.validate_python(tree[name]) for name, of in cls._adapters().items()}
        overrides = () if seeds is None else (f"train.seeds={seeds}",)
        base = load_run_config(directory / "base.yaml", overrides, trust_code)
        refuse_places(base, directory)
        return cls(directory, base, **plan | changes)

    @classmethod
    @contextmanager
    def reading(cls, directory: Path) -> Iterator[dict[str, Any]]:
        """What `save` wrote into a directory; whoever cannot make sense of it says damaged."""
        path, again = directory / f"{cls.stem}.json", f"Run the {cls.noun} again (--overwrite)."
        if not path.is_file():
            raise UsageError(f"--resume {directory}: no {cls.noun} there (no {path.name}).")
        tree = read_json(path, dict[str, Any], again)
        if tree.get("format") != _FORMAT:
            version = shorten(tree.get("echelon", "unknown"), 40)
            raise StoreError(f"{path}: written by another version of Echelon ({version}). {again}")
        with blaming(path, again):
            yield tree

    @classmethod
    def _adapters(cls) -> dict[str, TypeAdapter[Any]]:
        hints = get_type_hints(cls)
        return {name: TypeAdapter(hints[name]) for name in cls.planned}

    @abstractmethod
    def make_members(self) -> Iterator[BatchMember]:
        """Its runs; raises where the configuration of one is no good."""

    def past(self, k: int) -> Mapping[Book, Floats]:
        """Earlier values of the books that run k is evaluated with; see `evaluate`."""
        return {}

    @property
    def follows(self) -> bool:
        """Whether what a run is evaluated with depends on the evaluations of those before it."""
        return False

    @cached_property
    def members(self) -> tuple[BatchMember, ...]:
        return tuple(self.make_members())

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.base.seed + k for k in range(self.base.train.seeds))

    @property
    def file(self) -> Path:
        return self.directory / f"{self.stem}.json"

    def run(self, k: int) -> Path:
        return self.directory / f"{self.member}s" / self.members[k].name

    @contextmanager
    def lock(self) -> Iterator[None]:
        RunDirectory.claim(self.directory)
        path = self.directory / f".{self.command}.lock"
        with exclusive_lock(path, f"the {self.noun} {self.directory}"):
            yield

    def make_room(self, *, overwrite: bool = False) -> None:
        """Raise where the directory holds a batch, or remove it where that is asked for."""
        directory = self.directory
        if (directory / "run.json").exists():
            raise UsageError(f"{directory}: holds a run. Name another directory (--output-dir).")
        if not self.file.exists():
            return
        if not overwrite:
            article = "an" if self.noun.startswith("a") else "a"
            raise UsageError(
                f"{directory}: holds {article} {self.noun}. Go on with it (--resume {directory}), "
                "name another directory (--output-dir), or run it again in its place (--overwrite)."
            )
        for name in self.results:
            (directory / name).unlink(missing_ok=True)
        shutil.rmtree(directory / f"{self.member}s", ignore_errors=True)

    def save(self, **results: Any) -> None:  # noqa: ANN401 (JSON)
        plan = {
            name: of.dump_python(getattr(self, name), mode="json")
            for name, of in self._adapters().items()
        }
        tree = {"format": _FORMAT, "echelon": __version__, **plan, **results}
        write_atomic(self.directory / "base.yaml", to_yaml(self.base))
        write_json(self.file, tree)


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """What a run or a baseline came to; problem: what went wrong, empty if nothing did.

    seeds: measures by seed, empty where no training ended; a baseline has one that is none of ours
    """

    name: str
    seeds: Mapping[int, Mapping[str, float]]
    config_hash: str = ""
    problem: str = ""

    def values(self, measure: str) -> list[float]:
        return [values[measure] for values in self.seeds.values()]

    def over_seeds(self, measure: str) -> MeanStd:
        """Mean and standard deviation (ddof 1) of a measure; NaN without any seed."""
        return mean_std(self.values(measure)) if self.seeds else MeanStd(math.nan, math.nan)

    def columns(self, **others: Callable[[str], float]) -> dict[str, float]:
        made: dict[str, float] = {}
        for name in LABELS:
            mean, std = self.over_seeds(name)
            made |= {f"{name}_mean": mean, f"{name}_std": std}
            made |= {f"{name}_{ending}": of(name) for ending, of in others.items()}
        return made


@dataclass
class Course:
    """How far a batch got, by number of the run: what it is made from, ended trainings, errors."""

    data: dict[int, dict[str, Any]] = field(default_factory=dict)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    errors: defaultdict[int, list[BaseException]] = field(default_factory=lambda: defaultdict(list))
    stopped: bool = False

    def problem(self, k: int) -> str:
        words: dict[str, None] = {}  # in order, each once
        for error in self.errors.get(k, []):
            lines = [line for line in str(error).splitlines() if line.strip()]
            # A bug comes as a traceback, which ends with what happened; ours begin with it.
            at = 0 if isinstance(error, EchelonError | OSError) else -1
            words[lines[at] if lines else type(error).__name__] = None
        return "; ".join(words)


def prepare_runs(
    batch: RunBatch,
    course: Course,
    *,
    quarantine: bool = False,
    on_run: OnRun = lambda _done, _all: None,
) -> None:
    """Prepare every run; those with the same features share the files of the first."""
    made: dict[str, Path] = {}
    features = ("data", "split", "features", "normalization", "window", "assets")
    for k, member in enumerate(batch.members):
        on_run(k, len(batch.members))
        run = batch.run(k)
        # All that a prepared set depends on.
        own = Config().model_copy(update={name: getattr(member.config, name) for name in features})
        share = made.setdefault(fingerprint(own), run)
        try:
            if share != run:
                _share_prepared(share, run)
            expected = RunDirectory(run).trained_on()
            report = prepare(member.config, run, expected=expected, quarantine=quarantine)
        except EchelonError as error:
            course.errors[k].append(error)
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


class TrainingJob(NamedTuple):
    """A seed of run k to train."""

    k: int
    seed: SeedJob


def plan_training(batch: RunBatch, course: Course) -> list[TrainingJob]:
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
    batch: RunBatch,
    course: Course,
    plan: Sequence[TrainingJob],
    *,
    workers: int,
    on_report: Callable[[int, object], None] = lambda _job, _message: None,
    train: Callable[[SeedJob, Report, ShouldStop], Outcome] | None = None,
) -> None:
    """Train the plan; `on_report(number in the plan, message)` gets `Progress` and `Outcome`.

    train: one of the jobs, where it is not only trained
    """
    train = train or train_and_report
    if plan:
        jobs = [job.seed for job in plan]
        done = run_seed_jobs(train, jobs, workers=workers, on_report=on_report)
        course.stopped = done.stopped
        for job, result in zip(plan, done.results, strict=True):
            if isinstance(result, Failure):
                error = result.error  # a bug stays as it is
                if isinstance(error, EchelonError):
                    error = EchelonError(f"seed {job.seed.seed}: {error}")
                course.errors[job.k].append(error)
            elif result is not None and result.ending != "stopped":
                course.outcomes.setdefault(job.k, []).append(result)
    for k, outcomes in course.outcomes.items():
        outcomes.sort(key=lambda outcome: outcome.seed)
        _record(batch, course, k)


def train_and_report(job: SeedJob, report: Report, should_stop: ShouldStop) -> Outcome:
    """Train one agent and report how it ended too."""
    outcome = train_seed(job, report, should_stop)
    report(outcome)
    return outcome


def evaluate_runs(
    batch: RunBatch, course: Course, *, on_run: OnRun = lambda _done, _all: None
) -> None:
    """Backtest the best agents on the batch's window, where that was not done yet."""
    done_before = evaluations_of(batch, course)
    due = [k for k in sorted(course.outcomes) if batch.members[k].name not in done_before]
    if not due:
        return
    if batch.follows:
        due = [k for k in sorted(course.outcomes) if k >= due[0]]

    def evaluate_run(k: int, report: Report, _should_stop: ShouldStop) -> None:
        seeds = tuple(outcome.seed for outcome in course.outcomes[k])
        run = TrainedRun(batch.run(k), batch.members[k].config, seeds)
        past = batch.past(k)
        done = evaluate(run, batch.split, trust=batch.trust, ensemble=batch.ensemble, past=past)
        report(len(done.seeds))

    on_run(0, len(due))
    with use_engine(Engine()):  # here, where the runs are
        done = run_jobs(
            evaluate_run,
            due,
            workers=1,  # one after the other, so that job k is the k-th that ends
            on_report=lambda job, _message: on_run(job + 1, len(due)),
        )
    course.stopped = done.stopped
    for k, result in zip(due, done.results, strict=True):
        if isinstance(result, Failure):
            course.errors[k].append(result.error)


def evaluations_of(batch: RunBatch, course: Course) -> dict[str, Evaluation]:
    """The saved evaluations, by name of the run, that are of just the agents that were trained."""
    evaluations: dict[str, Evaluation] = {}
    for k, outcomes in sorted(course.outcomes.items()):
        try:
            saved = load_evaluation(batch.run(k), batch.split)
        except StoreError:
            continue
        member, of = batch.members[k], saved.facts["run"]
        best = {str(outcome.seed): outcome.best_step for outcome in outcomes}
        trained = (best, course.data[k]["prepared"], fingerprint(member.config))
        if trained == (saved.facts["best_steps"], of.get("prepared"), of.get("config_hash")):
            evaluations[member.name] = saved
    return evaluations


def write_table(frame: pl.DataFrame, stem: Path) -> None:
    """Write a result as STEM.csv, to read, and STEM.parquet, to compute with."""
    write_csv(stem.with_suffix(".csv"), frame)
    write_parquet(stem.with_suffix(".parquet"), frame)


def _record(batch: RunBatch, course: Course, k: int) -> None:
    """Write a run's config.yaml and run.json."""
    member = batch.members[k]
    facts = dict(course.data[k])
    if k in course.outcomes:
        facts["outcomes"] = [outcome.__dict__ for outcome in course.outcomes[k]]
    facts[batch.stem] = dict(member.about)
    RunDirectory(batch.run(k)).record(member.config, batch.command, **facts)


def _share_prepared(source: Path, run: Path) -> None:
    """Give another run's prepared set a second name here; `prepare` checks it afterwards."""
    if (run / "prepared").exists() or not (source / "prepared" / "manifest.json").exists():
        return
    with staging_directory(run, ".prepared-") as staging:
        for file in (source / "prepared").iterdir():
            link_or_copy(file, staging / file.name)
        swap_directory(staging, run / "prepared")
