"""Tuning: settings searched for within declared ranges, by how agents do on the validation window.

    DIR/base.yaml              the configuration they change
    DIR/tuning.json            ranges and trials, for going on later
    DIR/study.db               the search (Optuna's, SQLite), unless it is kept elsewhere
    DIR/trials/NAME/           a run directory like any other, one per trial
    DIR/tuning.csv, .parquet, .png    the result

1. A generation of trials is asked for, each by a generator of its own number.
2. Their runs are prepared, trained and evaluated by `evaluation.batch`, on the validation window,
   which enters them into the registry of trials: the deflated Sharpe ratio knows of every one.
3. The pruner ends the training of a first seed that does worse than the generations before it;
   the worker asks it at the very step, so it decides the same however many work.
4. The study is told, in the order of the trials, and the next generation is asked for.

So the search depends on the size of a generation, and not on workers, nodes or interruptions. The
test window is never traded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import polars as pl
from pydantic import TypeAdapter

from echelon.config import Config, override_config
from echelon.config.yaml_reader import read_yaml
from echelon.errors import ConfigError, UsageError
from echelon.evaluation.batch import BatchMember, Course, RunBatch, TrainingJob, write_table
from echelon.files import json_line, read_json, write_json
from echelon.training.loop import Outcome, Progress
from echelon.training.run import SeedJob, seed_directory, train_seed
from echelon.workers import Report, ShouldStop

Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "hyperband", "halving", "none"]
Value = bool | int | float | str
_STUDY, _PRUNED = "tuning", "pruned.json"


class Range(NamedTuple):
    """Values of a key of the configuration: some to choose from, or all from low to high."""

    key: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    choices: tuple[Value, ...] = ()


class Trial(NamedTuple):
    """One configuration that was tried; overrides: key=value over the base."""

    number: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its run directory."""
        return f"trial-{self.number:04d}"


class TrialResult(NamedTuple):
    """What a trial came to. value: mean over seeds of the best validation, None: there is none"""

    trial: Trial
    state: Literal["complete", "pruned", "fail"]
    value: float | None
    settings: Mapping[str, Value]


@dataclass(frozen=True)
class Tuning(RunBatch):
    """A search, and the trials it has come to; generation: of so many that are asked together."""

    noun = stem = "tuning"
    command = "tune"
    member = "trial"
    results = (
        *("tuning.csv", "tuning.parquet", "tuning.png", "tuning.zh.png", "study.db"),
        *("report/report.html", "report/report.zh.html"),
    )
    planned = ("ranges", "n_trials", "generation", "sampler", "pruner", "storage", "trials")

    ranges: tuple[Range, ...]
    n_trials: int = 20
    generation: int = 4
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    storage: str | None = None
    trials: tuple[Trial, ...] = ()

    def make_members(self) -> Iterator[BatchMember]:
        """A run of each trial."""
        for trial in self.trials:
            config = override_config(self.base, trial.overrides)
            yield BatchMember(trial.name, config, {"trial": trial.name})

    def open_study(self) -> Any:  # noqa: ANN401 (optuna's study)
        """The study as far as it is, or a new one."""
        optuna = import_optuna()
        place = self.storage or f"sqlite:///{self.directory / 'study.db'}"
        try:
            return optuna.create_study(
                storage=place,
                study_name=_STUDY,
                direction="maximize",
                load_if_exists=True,
                pruner=optuna.pruners.NopPruner(),  # workers prune
            )
        except (optuna.exceptions.OptunaError, OSError, RuntimeError, ImportError) as error:
            raise UsageError(f"--storage {place}: cannot be opened ({error}).") from None

    def ask(self, study: Any) -> Tuning | None:  # noqa: ANN401 (optuna's study)
        """The trials to do next, those that an earlier session began first; None: all are done."""
        optuna = import_optuna()
        distributions = {r.key: _distribution(optuna, r) for r in self.ranges}
        unfinished = (optuna.trial.TrialState.RUNNING,)
        running = list(study.get_trials(deepcopy=False, states=unfinished))
        n_before = len(study.get_trials(deepcopy=False))
        # A generation that a kill interrupted is asked for to its end.
        wanted = min(-(-n_before // self.generation) * self.generation, self.n_trials)
        if not running and wanted == n_before:
            wanted = min(n_before + self.generation, self.n_trials)
        for number in range(n_before, wanted):
            study.sampler = _sampler(optuna, self.sampler, self.base.seed, number)
            running.append(study.ask(distributions))
        if not running:
            return None
        trials = []
        for trial in running:
            items = tuple(f"{key}={_as_yaml(value)}" for key, value in trial.params.items())
            try:
                override_config(self.base, items)
            except ConfigError:  # settings that cannot go together
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                continue
            trials.append(Trial(trial.number, items))
        return replace(self, trials=tuple(trials)) if trials else self.ask(study)

    def tell(self, study: Any, course: Course) -> None:  # noqa: ANN401 (optuna's study)
        """Tell the study what a generation came to, in the order of its trials."""
        states = import_optuna().trial.TrialState
        for k, trial in enumerate(self.trials):
            outcomes = course.outcomes.get(k, [])
            scores = [o.best_score for o in outcomes if math.isfinite(o.best_score)]
            pruned = (seed_directory(self.run(k), self.seeds[0]) / _PRUNED).is_file()
            if pruned:
                study.tell(trial.number, state=states.PRUNED)
            elif len(scores) < len(self.seeds):
                study.tell(trial.number, state=states.FAIL)
            else:
                study.tell(trial.number, sum(scores) / len(scores))

    def note_progress(self, study: Any, job: TrainingJob, now: Progress) -> None:  # noqa: ANN401
        """Keep what the first seed of a trial came to so far, which pruners go by."""
        if job.seed.seed != self.seeds[0] or not math.isfinite(now.score):
            return
        trial = self.trials[job.k]
        storage = study._storage
        number = storage.get_trial_id_from_study_id_trial_number(study._study_id, trial.number)
        if now.step not in storage.get_trial(number).intermediate_values:
            storage.set_trial_intermediate_value(number, now.step, now.score)

    def pruning(self, study: Any) -> PrunedTraining:  # noqa: ANN401 (optuna's study)
        """The task of a generation's jobs."""
        complete = (import_optuna().trial.TrialState.COMPLETE,)
        earlier = study.get_trials(deepcopy=False, states=complete)
        series = tuple(tuple(sorted(trial.intermediate_values.items())) for trial in earlier)
        return PrunedTraining(self.pruner, self.seeds[0], tuple(s for s in series if s))

    def summarise(self, study: Any) -> TuningResult:  # noqa: ANN401 (optuna's study)
        """All trials of the study, and the best."""
        lines = []
        for trial in study.get_trials(deepcopy=False):
            state = trial.state.name.lower()
            if state not in ("complete", "pruned", "fail"):
                continue
            value = None if trial.value is None else float(trial.value)
            items = tuple(f"{key}={_as_yaml(v)}" for key, v in trial.params.items())
            lines.append(TrialResult(Trial(trial.number, items), state, value, dict(trial.params)))
        return TuningResult(self.directory.name, self.ranges, tuple(lines))

    def read_result(self) -> TuningResult:
        """What `keep_result` wrote of the search when it ended."""
        with self.reading(self.directory) as tree:
            if "done" not in tree:
                raise UsageError(
                    f"{self.directory}: the search has not ended. Go on with `echelon tune "
                    f"--resume {self.directory}`."
                )
            lines = TypeAdapter(tuple[TrialResult, ...]).validate_python(tree["done"])
        return TuningResult(self.directory.name, self.ranges, lines)

    def keep_result(self, result: TuningResult) -> None:
        """Write the result, also where `read_result` finds it."""
        result.write(self.directory)
        self.save(done=TypeAdapter(tuple[TrialResult, ...]).dump_python(result.trials, mode="json"))


@dataclass(frozen=True)
class TuningResult:
    """Every trial, in the order of their numbers."""

    name: str
    ranges: tuple[Range, ...]
    trials: tuple[TrialResult, ...]

    @property
    def best(self) -> TrialResult | None:
        """The complete trial of the highest value; None: none is complete."""
        return next(iter(self.ranked), None) if self.complete else None

    @property
    def complete(self) -> int:
        """How many are."""
        return sum(trial.state == "complete" for trial in self.trials)

    @property
    def ranked(self) -> list[TrialResult]:
        """Complete ones first, and of those the best."""
        return sorted(
            self.trials,
            key=lambda t: (t.state != "complete", math.inf if t.value is None else -t.value),
        )

    def write(self, directory: Path) -> None:
        """Write tuning.csv and tuning.parquet: a line per trial."""
        lines = [
            {
                "trial": result.trial.name,
                "state": result.state,
                "value": result.value,
                **{r.key: str(result.settings.get(r.key, "")) for r in self.ranges},
            }
            for result in self.trials
        ]
        write_table(pl.DataFrame(lines, infer_schema_length=None), directory / "tuning")


@dataclass(frozen=True)
class PrunedTraining:
    """Train a seed, and end it where the pruner says so; a task of jobs.

    first_seed: the one that is pruned
    earlier: of each complete trial (step, validation), in order
    """

    pruner: Pruner
    first_seed: int
    earlier: tuple[tuple[tuple[int, float], ...], ...]

    def __call__(self, job: SeedJob, report: Report, should_stop: ShouldStop) -> Outcome:
        """How it ended: 'patience' where it was pruned."""
        note = seed_directory(job.run, job.seed) / _PRUNED
        if note.is_file():
            outcome = read_json(note, Outcome, "Remove it and resume.")
            report(outcome)
            return outcome
        prunes, last = False, -1
        trial = self._trial() if job.seed == self.first_seed else None

        def watch(message: object) -> None:
            nonlocal prunes, last
            report(message)
            if trial is None or not isinstance(message, Progress) or message.step <= last:
                return
            last = message.step
            if math.isfinite(message.score):
                trial.report(message.score, message.step)
                prunes = prunes or trial.should_prune()

        outcome = train_seed(job, watch, lambda: prunes or should_stop())
        if prunes and outcome.ending == "stopped":
            outcome = replace(outcome, ending="patience")
            write_json(note, outcome.__dict__, allow_nan=True)
        report(outcome)
        return outcome

    def _trial(self) -> Any:  # noqa: ANN401 (optuna's trial)
        """A trial beside those that are known."""
        optuna = import_optuna()
        made = {
            "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4),
            "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1),
            "halving": optuna.pruners.SuccessiveHalvingPruner,
            "none": optuna.pruners.NopPruner,
        }
        study = optuna.create_study(direction="maximize", pruner=made[self.pruner]())
        for series in self.earlier:
            values = dict(series)
            study.add_trial(
                optuna.trial.create_trial(value=max(values.values()), intermediate_values=values)
            )
        return study.ask()


def read_ranges(path: Path, base: Config) -> tuple[Range, ...]:
    """The ranges of a YAML file: key: {low, high, log, step}, or key: [value, …]."""
    ranges = tuple(_range(path, str(key), value) for key, value in read_yaml(path).items())
    if not ranges:
        raise ConfigError(f"{path}: no range in it. Write key: {{low: …, high: …}}, one a line.")
    for r in ranges:
        if r.key.split(".")[0] in ("split", "seed", "compute", "logging") or r.key == "train.seeds":
            raise ConfigError(
                f"{path}: {r.key} is no setting of an agent: trials are compared on one "
                "validation window and on the same seeds. Leave it out."
            )
        for value in r.choices or (r.low, r.high):
            try:
                override_config(base, [f"{r.key}={_as_yaml(value)}"])
            except ConfigError as error:
                raise ConfigError(f"{path}: {r.key} = {value!r}: {error}") from None
    return ranges


def _range(path: Path, key: str, value: Any) -> Range:  # noqa: ANN401 (as YAML read it)
    if isinstance(value, list) and len(value) > 1:
        if all(isinstance(item, bool | int | float | str) for item in value):
            return Range(key, choices=tuple(value))
    elif isinstance(value, dict) and {"low", "high"} <= set(value) <= set(Range._fields[1:5]):
        numbers = [value[n] for n in ("low", "high", "step") if value.get(n) is not None]
        plain = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
        log = value.get("log", False)
        if plain and isinstance(log, bool) and value["low"] < value["high"]:
            if log and (value["low"] <= 0 or value.get("step") is not None):
                raise ConfigError(f"{path}: {key}: log wants low above 0, and no step.")
            if value.get("step") is None or value["step"] > 0:
                return Range(key, **value)
    raise ConfigError(
        f"{path}: {key}: expected {{low: 1e-4, high: 1e-2, log: true}}, {{low: 16, high: 64, "
        f"step: 16}} or a list of two values or more, found {value!r}."
    )


def _distribution(optuna: Any, r: Range) -> Any:  # noqa: ANN401 (optuna's)
    if r.choices:
        return optuna.distributions.CategoricalDistribution(r.choices)
    whole = all(isinstance(n, int) for n in (r.low, r.high, r.step) if n is not None)
    if whole:
        step = 1 if r.step is None else r.step
        return optuna.distributions.IntDistribution(r.low, r.high, log=r.log, step=step)
    return optuna.distributions.FloatDistribution(r.low, r.high, log=r.log, step=r.step)


def _sampler(optuna: Any, name: Sampler, seed: int, number: int) -> Any:  # noqa: ANN401 (optuna's)
    """A sampler of its own for each trial: what it suggests does not depend on who stopped when."""
    digest = hashlib.sha256(f"tuning {seed} {number}".encode()).digest()
    own = int.from_bytes(digest[:4], "big")
    if name == "random":
        return optuna.samplers.RandomSampler(seed=own)
    return optuna.samplers.TPESampler(seed=own, n_startup_trials=8)


def _as_yaml(value: Value | None) -> str:
    """A value as an override has it."""
    return json_line(value)


def import_optuna() -> Any:  # noqa: ANN401 (a module)
    """The package, or which extra has it."""
    try:
        import optuna
    except ImportError:
        raise UsageError(
            "Optuna is not installed: it comes with the extra 'scale' (pip install "
            "'echelon[scale]')."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
