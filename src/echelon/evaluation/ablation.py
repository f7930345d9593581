"""An ablation: train every variant of a base configuration and compare them on validation.

    DIR/base.yaml             the base configuration
    DIR/ablation.json         the variants, for going on later
    DIR/variants/NAME/        a run directory like any other
    DIR/ablation.csv, .parquet, .png    the result

1. `prepare_variants`: features, made once where several variants share them.
2. `train_variants`: variants × seeds is one list of jobs, so many at a time.
3. `evaluate_variants`: the best agent of each seed, on the validation window. The test window is
   never traded: who chooses by it has none left.
4. `summarise`: mean and standard deviation over seeds, and the difference to the base.

What fails concerns its variant only and is part of the result. Every step skips what is done
already, so going on after a stop is the same as starting.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import polars as pl

from echelon import __version__
from echelon.agents.jobs import Failure, Report, ShouldStop, run_jobs
from echelon.agents.many import SeedJob, train_seed
from echelon.agents.training import Outcome, TrainedRun, finished_outcome, seed_directory
from echelon.config import Config, fingerprint, load_config, to_yaml
from echelon.errors import EchelonError, StoreError, UsageError
from echelon.evaluation.evaluate import evaluate, load_evaluation
from echelon.evaluation.variants import Setting, Variant, variant_configs
from echelon.features import prepare
from echelon.files import (
    exclusive_lock,
    link_or_copy,
    staging_directory,
    swap_directory,
    write_atomic,
)
from echelon.ops.measures import LABELS, mean_std
from echelon.runs import RunDirectory

FORMAT = 1
COMMAND = "ablate"
_SPLIT: Final = "valid"


@dataclass(frozen=True)
class Ablation:
    """Variants of a base in a directory; the first one is the base. configs: one per variant."""

    directory: Path
    base: Config
    variants: tuple[Variant, ...]
    configs: tuple[Config, ...]

    @staticmethod
    def of(directory: Path, base: Config, variants: Sequence[Variant]) -> Ablation:
        """The ablation of these variants; raises where the configuration of one is no good."""
        configs = variant_configs(base, variants)
        return Ablation(directory, base, tuple(variants), tuple(configs))

    @staticmethod
    def open(directory: Path, *, seeds: int | None = None) -> Ablation:
        """Go on with the one in a directory. seeds: another number of them than before"""
        path = directory / "ablation.json"
        if not path.is_file():
            raise UsageError(f"--resume {directory}: no ablation there (no ablation.json).")
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree["format"] != FORMAT:
                raise StoreError(
                    f"{path}: written by another version of Echelon ({tree['echelon']}). Run the "
                    "ablation anew (--overwrite)."
                )
            variants = [
                Variant(
                    entry["name"],
                    tuple(Setting(*pair) for pair in entry["settings"]),
                    tuple(entry["overrides"]),
                )
                for entry in tree["variants"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path}: damaged ({error}). Run the ablation anew (--overwrite)."
            ) from None
        base = load_config(directory / "base.yaml")
        if seeds is not None:
            base = with_seeds(base, seeds)
        return Ablation.of(directory, base, variants)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the directory."""
        RunDirectory.claim(self.directory)
        with exclusive_lock(self.directory / ".ablate.lock", f"the ablation {self.directory}"):
            yield

    def begin(self, *, overwrite: bool = False) -> None:
        """Make the directory this ablation's; raises where it holds another, unless told to."""
        directory = self.directory
        if (directory / "run.json").exists():
            raise UsageError(f"{directory}: holds a run. Name another directory (--output-dir).")
        if (directory / "ablation.json").exists():
            if not overwrite:
                raise UsageError(
                    f"{directory}: holds an ablation. Go on with it (--resume {directory}), name "
                    "another directory (--output-dir), or run it anew in its place (--overwrite)."
                )
            for ending in ("csv", "parquet", "png"):
                (directory / f"ablation.{ending}").unlink(missing_ok=True)
            shutil.rmtree(directory / "variants", ignore_errors=True)
        self.save()

    def save(self) -> None:
        """Write down what is to be done."""
        tree = {
            "format": FORMAT,
            "echelon": __version__,
            "variants": [
                {"name": v.name, "settings": v.settings, "overrides": v.overrides}
                for v in self.variants
            ],
        }
        write_atomic(self.directory / "base.yaml", to_yaml(self.base))
        text = json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
        write_atomic(self.directory / "ablation.json", text)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of every variant."""
        return tuple(self.base.seed + k for k in range(self.base.train.seeds))

    def run(self, k: int) -> Path:
        """Run directory of variant k."""
        return self.directory / "variants" / self.variants[k].name


def with_seeds(config: Config, seeds: int) -> Config:
    """The configuration with this many seeds."""
    return config.model_copy(update={"train": config.train.model_copy(update={"seeds": seeds})})


@dataclass
class Course:
    """How far an ablation got; by number of the variant.

    data: what a variant was prepared from, for its run.json
    outcomes: of the seeds whose training ended
    errors: what went wrong, in order
    """

    data: dict[int, dict[str, Any]] = field(default_factory=dict)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    errors: dict[int, list[BaseException]] = field(default_factory=dict)
    stopped: bool = False

    def failed(self, k: int, error: BaseException) -> None:
        """Note an error of variant k."""
        self.errors.setdefault(k, []).append(error)

    def problem(self, k: int) -> str:
        """What went wrong with variant k, in words; empty if nothing did."""
        return "; ".join(dict.fromkeys(_words(error) for error in self.errors.get(k, [])))


def prepare_variants(
    ablation: Ablation,
    course: Course,
    *,
    quarantine: bool = False,
    on_variant: Callable[[int, int], None] = lambda _done, _all: None,
) -> None:
    """Prepare every variant; those with the same features share the files of the first."""
    made: dict[str, Path] = {}
    for k, config in enumerate(ablation.configs):
        on_variant(k, len(ablation.configs))
        run = ablation.run(k)
        share = made.setdefault(_features_hash(config), run)
        try:
            if share != run:
                _share_prepared(share, run)
            report = prepare(config, run, quarantine=quarantine)
        except EchelonError as error:
            course.failed(k, error)
            continue
        manifest = report.prepared.manifest
        course.data[k] = {"data": manifest["dataset"], "prepared": manifest["content_hash"]}
        if not (run / "run.json").exists():  # else of an earlier session, which knows more
            _record(ablation, course, k)
    on_variant(len(ablation.configs), len(ablation.configs))


@dataclass(frozen=True)
class VariantJob:
    """A seed of variant k to train."""

    k: int
    seed: SeedJob


def plan_training(ablation: Ablation, course: Course) -> list[VariantJob]:
    """What is still to be trained; what ended in an earlier session is noted in `course`.

    All variants have one seed before any has two: what is stopped half-way can be compared.
    """
    plan = []
    for seed in ablation.seeds:
        for k in sorted(course.data):
            run, config = ablation.run(k), ablation.configs[k]
            done = finished_outcome(config, seed_directory(run, seed))
            if done is None:
                plan.append(VariantJob(k, SeedJob(config, run, seed, resume=True)))
            else:
                course.outcomes.setdefault(k, []).append(done)
    return plan


def train_variants(
    ablation: Ablation,
    course: Course,
    plan: Sequence[VariantJob],
    *,
    workers: int,
    on_report: Callable[[int, object], None] = lambda _job, _message: None,
) -> None:
    """Train what `plan_training` listed; `on_report(job, message)` passes on `Progress`, `Outcome`.

    job: number in the plan
    """
    if plan:
        jobs = [job.seed for job in plan]
        done = run_jobs(_train_one, jobs, workers=workers, on_report=on_report)
        course.stopped = done.stopped
        for job, result in zip(plan, done.results, strict=True):
            if isinstance(result, Failure):
                course.failed(job.k, _named(result.error, job.seed.seed))
            elif result is not None and result.ending != "stopped":
                course.outcomes.setdefault(job.k, []).append(result)
    for k, outcomes in course.outcomes.items():
        outcomes.sort(key=lambda outcome: outcome.seed)
        _record(ablation, course, k)


def _train_one(job: SeedJob, report: Report, should_stop: ShouldStop) -> Outcome:
    """Train one agent and report how it ended too."""
    outcome = train_seed(job, report, should_stop)
    report(outcome)
    return outcome


@dataclass(frozen=True)
class _Backtests:
    """One variant to evaluate."""

    config: Config
    run: Path
    seeds: tuple[int, ...]


def evaluate_variants(
    ablation: Ablation,
    course: Course,
    *,
    on_variant: Callable[[int, int], None] = lambda _done, _all: None,
) -> None:
    """Backtest the best agents on the validation window, where that was not done yet.

    In this process: to start another takes as long as a few backtests.
    """
    due = [k for k in sorted(course.outcomes) if not _is_evaluated(ablation, course, k)]
    jobs = [
        _Backtests(ablation.configs[k], ablation.run(k), tuple(o.seed for o in course.outcomes[k]))
        for k in due
    ]
    if not jobs:
        return
    count = 0

    def one_more(_job: int, _message: object) -> None:
        nonlocal count
        count += 1
        on_variant(count, len(jobs))

    on_variant(0, len(jobs))
    done = run_jobs(_evaluate_one, jobs, workers=1, on_report=one_more)
    course.stopped = done.stopped
    for k, result in zip(due, done.results, strict=True):
        if isinstance(result, Failure):
            course.failed(k, result.error)


def _evaluate_one(job: _Backtests, report: Report, _should_stop: ShouldStop) -> int:
    result = evaluate(TrainedRun(job.run, job.config, job.seeds), _SPLIT)
    report(len(result.seeds))
    return len(result.seeds)


def _is_evaluated(ablation: Ablation, course: Course, k: int) -> bool:
    """Whether the saved evaluation is of just these agents."""
    try:
        saved = load_evaluation(ablation.run(k), _SPLIT)
    except StoreError:
        return False
    best = {str(o.seed): o.best_step for o in course.outcomes[k]}
    made_from = saved.facts["run"]
    return bool(
        saved.facts["best_steps"] == best
        and made_from.get("prepared") == course.data[k]["prepared"]
        and made_from.get("config_hash") == fingerprint(ablation.configs[k])
    )


@dataclass(frozen=True)
class VariantResult:
    """What a variant came to.

    seeds: measures by seed, as in `Measures`; empty where no training ended
    problem: what went wrong, empty if nothing did
    """

    variant: Variant
    config_hash: str
    seeds: Mapping[int, Mapping[str, float]]
    problem: str

    def values(self, measure: str) -> list[float]:
        """A measure of each seed."""
        return [values[measure] for values in self.seeds.values()]


@dataclass(frozen=True)
class AblationResult:
    """Every variant's result, the base's first. facts: of the window they were compared on."""

    name: str
    rows: tuple[VariantResult, ...]
    facts: Mapping[str, Any]

    @property
    def base(self) -> VariantResult:
        """The one the others are compared with."""
        return self.rows[0]

    def difference(self, row: VariantResult, measure: str) -> float:
        """Mean of a measure less the base's; NaN where either has none."""
        if not row.seeds or not self.base.seeds:
            return math.nan
        return mean_std(row.values(measure)).mean - mean_std(self.base.values(measure)).mean

    def frame(self) -> pl.DataFrame:
        """One line per variant: mean, std (ddof 1, over seeds) and difference of every measure."""
        return pl.DataFrame([self._line(row) for row in self.rows], infer_schema_length=None)

    def _line(self, row: VariantResult) -> dict[str, object]:
        line: dict[str, object] = {
            "variant": row.variant.name,
            "factor": row.variant.factor,
            "value": row.variant.value,
            "seeds": len(row.seeds),
            "problem": row.problem,
        }
        for measure in LABELS:
            found = mean_std(row.values(measure)) if row.seeds else (math.nan, math.nan)
            line[f"{measure}_mean"], line[f"{measure}_std"] = map(_or_none, found)
            line[f"{measure}_diff"] = _or_none(self.difference(row, measure))
        line["overrides"] = "; ".join(row.variant.overrides)
        line["config_hash"] = row.config_hash
        return line

    def write(self, directory: Path) -> None:
        """Write ablation.csv and ablation.parquet."""
        frame = self.frame()
        write_atomic(directory / "ablation.csv", frame.write_csv())
        with staging_directory(directory) as staging:
            frame.write_parquet(staging / "ablation.parquet")
            (staging / "ablation.parquet").replace(directory / "ablation.parquet")


def summarise(ablation: Ablation, course: Course) -> AblationResult:
    """Gather the variants' evaluations."""
    rows, facts = [], {}
    for k, variant in enumerate(ablation.variants):
        seeds: Mapping[int, Mapping[str, float]] = {}
        if k in course.outcomes and _is_evaluated(ablation, course, k):
            evaluation = load_evaluation(ablation.run(k), _SPLIT)
            seeds, facts = evaluation.seeds, dict(evaluation.facts)
        digest = fingerprint(ablation.configs[k])
        rows.append(VariantResult(variant, digest, seeds, course.problem(k)))
    return AblationResult(ablation.directory.name, tuple(rows), facts)


def _record(ablation: Ablation, course: Course, k: int) -> None:
    """Write a variant's config.yaml and run.json."""
    variant = ablation.variants[k]
    facts = dict(course.data[k])
    if k in course.outcomes:
        facts["outcomes"] = [outcome.__dict__ for outcome in course.outcomes[k]]
    about = {"variant": variant.name, "factor": variant.factor, "value": variant.value}
    run = RunDirectory(ablation.run(k))
    run.record(ablation.configs[k], COMMAND, ablation=about, **facts)


def _features_hash(config: Config) -> str:
    """Hash of what a prepared set depends on; variants with the same one can share it."""
    plain = Config()
    parts = ("data", "split", "features", "normalization", "window", "assets")
    return fingerprint(plain.model_copy(update={name: getattr(config, name) for name in parts}))


def _share_prepared(source: Path, run: Path) -> None:
    """Give another variant's prepared set a second name here, unless there is one already.

    `prepare` checks afterwards that it is what this variant needs.
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


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
