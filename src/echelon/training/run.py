"""Train a run's portfolio agents, one per seed, side by side, and open what was trained.

SEED_DIR/…                     the training's log, checkpoints and result (see training.loop)
SEED_DIR/checkpoints/best/     weights of the best on the validation window
SEED_DIR/tensorboard/          the log for TensorBoard
SEED_DIR/learner.json          sizes of adapter and replay, of learners that have them
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.agents.learner import Learner, LearnerFacts, TrainingSetup, learner_class
from echelon.agents.pretraining import Pretrained, ensure_encoder, read_encoder_document
from echelon.backtest.policy import Policy
from echelon.backtest.run import run_backtest
from echelon.cluster import freeze
from echelon.config import Config, load_run_config, override_config
from echelon.config.agents import BASELINE_SETTINGS
from echelon.config.algorithms import ALGORITHMS
from echelon.config.market import EXECUTOR_KEYS
from echelon.config.sizes import refuse_settings
from echelon.envs.world import World, world_of
from echelon.errors import DamagedError, DataError, EchelonError, StoreError, UsageError, shorten
from echelon.features.prepared import Prepared
from echelon.files import blaming, exclusive_lock, json_line, read_json, write_json
from echelon.population.policy import risk_alerts
from echelon.runs import RunDirectory
from echelon.runs.checkpoint import (
    TENSORS,
    Checkpoint,
    below_prefix,
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_best,
    with_prefix,
)
from echelon.runs.tracking import Sink, open_sinks
from echelon.training.executors import verify_days, with_executor
from echelon.training.loop import CHECKPOINTS, RESULT, Intervals, Outcome, Progress, TrainingLoop
from echelon.types import Metrics
from echelon.workers import JobResults, Report, ShouldStop, engine, run_jobs

LEARNER_FACTS = "learner.json"
_LEAST_VALID = 3
"""Bars of a validation window: two returns have a standard deviation."""
_MOST_ALERTS = 100
"""Of validations, the last ones, that wait for whoever watches."""

_AFTERWARDS = (*EXECUTOR_KEYS, "risk.max_drawdown", "risk.target_volatility")
"""Keys that may change between training and evaluation."""
_TRAINED_BY = (
    *("assets", "window", "fee_rate", "buy_pct", "sell_pct", "split", "features", "normalization"),
    *("market", "reward", "state", "model", "train", "eval", "pretrain", "lora", "expert"),
    *("experts", "meta_router", "trainer", "risk"),
)
"""Parts of the configuration that training depends on; the seed is checked on its own."""


class Worlds(NamedTuple):
    """Where an agent learns and where it is validated; data: hash of what both were made from."""

    train: World
    valid: World
    data: str

    @staticmethod
    def from_prepared(prepared: Prepared, config: Config) -> Worlds:
        """Without the test window; only validation has the executor, learners fill at once."""
        world, costs = world_of(prepared, config), float(config.eval.use_fee)
        valid = world if costs else world_of(prepared, config, costs=costs)
        if config.market.executor != "immediate":  # which would only tell more of the same fills
            valid = with_executor(valid, config, costs=costs)
        return Worlds(world, valid, str(prepared.manifest["content_hash"]))


def make_learner(config: Config, worlds: Worlds, directory: Path, seed: int) -> Learner:
    """The learner that `train.algo` names, in the seed's directory, on the run's encoder if any."""
    pretrained = ALGORITHMS[config.train.algo].pretrained
    base = _encoder(config, worlds, directory) if pretrained else None
    encoder = None if base is None else base.encoder
    setup = TrainingSetup(config, worlds.train, worlds.valid, directory, seed, encoder)
    return learner_class(config).from_setup(setup)


def load_policy(
    config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str = "agent"
) -> Policy:
    """The policy of a learner's `weights`; raises RuntimeError where they do not fit."""
    return learner_class(config).load_policy(config, weights, n_features, seed, name)


def encoder_hash(config: Config, directory: Path) -> str | None:
    """Hash of the run's encoder, which the learner in `directory` stands on; None without one."""
    if not ALGORITHMS[config.train.algo].pretrained:
        return None
    document = read_encoder_document(directory.parents[1])
    return None if document is None else document["tensors_sha256"]


def ready(config: Config, worlds: Worlds, directory: Path, should_stop: Callable[[], bool]) -> bool:
    """Make what the learner needs: the first seed pre-trains the run's encoder. False: stopped."""
    # Before the encoder is pre-trained, which takes minutes.
    refuse_settings(config)
    learner_class(config).refuse_world(config, worlds.train)
    pretrained = ALGORITHMS[config.train.algo].pretrained
    return not pretrained or _encoder(config, worlds, directory, should_stop) is not None


def _encoder(
    config: Config, worlds: Worlds, directory: Path, should_stop: ShouldStop = lambda: False
) -> Pretrained | None:
    world = learner_class(config).pretraining_world(config, worlds.train)
    place, valid, data = directory.parents[1], worlds.valid, worlds.data
    return ensure_encoder(config, world, place, config.seed, should_stop, valid=valid, data=data)


class Training(TrainingLoop[Learner]):
    def __init__(
        self, config: Config, worlds: Worlds, directory: Path, seed: int, resume: Path | None = None
    ) -> None:
        """directory: the seed's own; resume: a checkpoint of it to go on from"""
        torch.set_num_threads(config.train.threads)
        self.config, self.worlds = config, worlds
        self.valid_spans = worlds.valid.spans("valid")
        shortest = min(len(span) for span in self.valid_spans)
        if shortest < _LEAST_VALID:
            raise DataError(
                f"split.valid has {shortest} bars to decide and be marked on; a Sharpe "
                f"ratio to choose a checkpoint by needs {_LEAST_VALID}. Lengthen the split."
            )
        train = config.train
        intervals = Intervals(
            train.total_env_steps,
            train.log_interval_steps,
            train.validate_every_steps,
            train.checkpoint_every_steps,
            train.keep_checkpoints,
            train.patience,
        )
        learner = make_learner(config, worlds, directory, seed)
        made_of = {"seed": seed, "data": worlds.data, "encoder": encoder_hash(config, directory)}
        super().__init__(
            *(learner, directory, seed, intervals),
            identity=training_hash(config),
            made_of={name: part for name, part in made_of.items() if part is not None},
            select_by=train.select_by,
            reward_scale=config.reward.scale,
            resume=resume,
        )

    def run(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        if (facts := self.learner.facts()) is not None:
            parts = facts._asdict().items()
            tree = {k: part._asdict() if hasattr(part, "_asdict") else part for k, part in parts}
            write_json(self.directory / LEARNER_FACTS, tree)
        return super().run(on_progress, should_stop)

    def validate(self) -> Metrics:
        """Measures of the present policy on the validation window; means where it has stretches."""
        policy, world = self.learner.policy(), self.worlds.valid
        spans = []
        for valid in self.valid_spans:
            run = run_backtest(policy, world, valid, self.config)
            spans.append(run.measures)
            self.alerts = [*self.alerts, *risk_alerts(policy, run)][-_MOST_ALERTS:]
        return {name: sum(m[name] for m in spans) / len(spans) for name in spans[0]}

    def _save_best(self) -> None:
        tensors = with_prefix("net.", self.learner.weights())
        facts = {"score": self.course.score, **self.made_of}
        save_best(self.checkpoints, self.learner.steps, tensors, facts, config_hash=self.identity)

    def _sinks(self) -> list[Sink]:
        name = f"{self.directory.parent.parent.name}-{self.seed}"
        return open_sinks(self.config.logging, self.directory, name, self.resumed_at)


def training_hash(config: Config) -> str:
    """Hash of what training depends on.

    Left out: how long it goes on, where it is logged, what it is compared with afterwards, where
    the data came from (they have a hash of their own), and every key that has its default, so
    that keys which come with a later version leave the hashes of older runs alone.
    """
    free = ["seeds", "patience", "keep_checkpoints", "checkpoint_every_steps"]
    if config.train.lr_schedule == "constant":
        free.append("total_env_steps")
    # Rules among the experts are part of what is trained, and their settings with them.
    ruled = {"forecast"} if "forecast" in config.experts.rules else set()
    sections = {*_TRAINED_BY, *ruled}
    tree = config.model_dump(mode="json", exclude_defaults=True, include=sections)
    compared = ("metrics", "baselines") if config.experts.rules else BASELINE_SETTINGS
    for section, keys in (("train", free), ("eval", compared)):
        tree[section] = {k: v for k, v in tree.get(section, {}).items() if k not in keys}
    # Over how many processes experts are spread changes nothing.
    tree.get("trainer", {}).pop("workers", None)
    # `paper` was the default once: it is what older runs mean by a hash without a preset.
    hidden = ("preset_confirmed", "preset")
    market = {k: v for k, v in tree.pop("market", {}).items() if k not in hidden}
    if config.market.preset != "paper":
        market["preset"] = config.market.preset
    if market:
        tree["market"] = market
    text = json_line(tree, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class TrainedRun:
    """A run directory with trained agents in it.

    executor: name of another executor than it was trained with, below which evaluations go
    trained_by: hash of the configuration of the training, where `config` is another
    """

    path: Path
    config: Config
    seeds: tuple[int, ...]
    executor: str | None = None
    trained_by: str | None = None

    @staticmethod
    def open(path: Path, trust_code: Sequence[Path] = ()) -> TrainedRun:
        """Open a run that has trained agents; trust_code: files of code it names that may run."""
        config_file = path / "config.yaml"
        if not config_file.is_file():
            raise StoreError(f"{path}: no config.yaml there, so not a run directory.")
        seeds = [s for s in trained_seeds(path) if best_checkpoint(_checkpoints(path, s))]
        if not seeds:
            raise StoreError(
                f"{path}: no trained agent there yet. Run `echelon train`; one appears with the "
                "first validation."
            )
        return TrainedRun(path, load_run_config(config_file, (), trust_code), tuple(seeds))

    def executed_by(self, overrides: Sequence[str], name: str | None = None) -> TrainedRun:
        """The same agents with the executor, or the limits of real books, of `overrides`.

        Agents learn with fills at the open and without limits, whatever is set; only the choice
        among their checkpoints was made with those of the training, and stays as it is.
        name: of the directory of its evaluations; None: the executor's, or `limits`
        """
        for key in (item.partition("=")[0].strip() for item in overrides):
            if key not in _AFTERWARDS:
                raise UsageError(
                    f"{key!r} cannot change between training and evaluation, expected one of "
                    f"{', '.join(_AFTERWARDS)}. Train another run with it."
                )
        config = override_config(self.config, list(overrides))
        if name is None:
            by_executor = any(item.startswith("market.") for item in overrides)
            name = config.market.executor if by_executor else "limits"
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UsageError(
                f"executor name {name!r}: expected letters, digits, '-', '_' and '.', since a "
                "directory is called by it."
            )
        trained_by = self.trained_by or training_hash(self.config)
        return replace(self, config=config, executor=name, trained_by=trained_by)

    @property
    def home(self) -> Path:
        """Where `evaluations` is: the run, or its directory of another executor."""
        return self.path if self.executor is None else self.path / "executors" / self.executor

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared.open(self.path, RunDirectory(self.path).trained_on())

    @cached_property
    def facts(self) -> dict[str, Any]:
        return RunDirectory(self.path).facts()

    def best_step(self, seed: int) -> int:
        return self._best(seed).step

    def weights(self, seed: int) -> dict[str, Tensor]:
        """Weights of the seed's best agent: what `load_policy` takes."""
        return below_prefix("net.", self._best(seed).tensors)

    def policy(self, seed: int) -> Policy:
        data = self.prepared.manifest["content_hash"]
        checkpoint = self._best(seed)
        trained_on = checkpoint.state.get("data")
        if trained_on != data:
            raise StoreError(
                f"{self.path}: seed {seed} was trained on other data ({shorten(trained_on, 80)}) "
                f"than is prepared there now ({data}). Train again."
            )
        torch.set_num_threads(self.config.train.threads)
        weights = self.weights(seed)
        n_features = len(self.prepared.names)
        place = _checkpoints(self.path, seed) / "best"
        with blaming(place / TENSORS, "It does not fit the network of config.yaml: train again."):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
                raise ValueError("weights that are not finite")
            return load_policy(self.config, weights, n_features, seed, f"seed {seed}")

    @cached_property
    def _loaded(self) -> dict[int, Checkpoint]:
        return {}

    def _best(self, seed: int) -> Checkpoint:
        """Read once: during a training, a second look may find a better one."""
        if seed not in self._loaded:
            directory = _checkpoints(self.path, seed)
            path = best_checkpoint(directory)
            if path is None:
                raise StoreError(f"{directory}: no best checkpoint. Train seed {seed} again.")
            identity = self.trained_by or training_hash(self.config)
            self._loaded[seed] = load_checkpoint(path, config_hash=identity)
        return self._loaded[seed]


def seed_directory(run: Path, seed: int) -> Path:
    return run / "seeds" / str(seed)


def _checkpoints(run: Path, seed: int) -> Path:
    return seed_directory(run, seed) / CHECKPOINTS


def trained_seeds(run: Path) -> list[int]:
    """Seeds that have a directory in a run, in order; a copy next to them (`42 copy`) is none."""
    place = run / "seeds"
    try:
        names = [entry.name for entry in place.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        remedy = "Make it readable, or name another run."
        raise DamagedError(place, error.strerror or str(error), remedy) from None
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9][0-9]{0,18}", name))


def finished_outcome(config: Config, directory: Path) -> Outcome | None:
    """How a seed's training ended, if it did and nothing is left to do."""
    try:
        outcome = read_json(directory / RESULT, Outcome, "")
    except DamagedError:
        return None  # never ended, or the note of it is gone: going on finds the same end
    patience = config.train.patience  # perhaps more of it than when the training ended
    impatient = patience is not None and outcome.since_best >= patience
    done = outcome.step >= config.train.total_env_steps
    return outcome if done or (outcome.ending == "patience" and impatient) else None


def resume_point(directory: Path) -> Path | None:
    """The checkpoint a seed's training goes on from; None: from the beginning."""
    return latest_checkpoint(directory / CHECKPOINTS)


def read_learner_facts(directory: Path) -> LearnerFacts:
    """What `Learner.facts` said when training began; nothing known where there is no file."""
    path = directory / LEARNER_FACTS
    if not path.exists():
        return LearnerFacts(None, None)
    return read_json(path, LearnerFacts, "Remove it; going on with the training writes it again.")


@dataclass(frozen=True)
class SeedJob:
    """One agent to train. checkpoint: where to go on from; resume: from the latest, if any.

    data: what it learns from, or why there is none, where its worker sees no files of this machine
    """

    config: Config
    run: Path
    seed: int
    resume: bool = False
    checkpoint: Path | None = None
    data: Any = field(default=None, repr=False, compare=False)

    @property
    def title(self) -> str:
        """As a `cluster.Portable`, like all below."""
        return f"{self.run.name}, seed {self.seed}"

    @property
    def home(self) -> Path:
        """The run."""
        return self.run

    @property
    def trees(self) -> tuple[str, ...]:
        """Its own directory, and the encoder of all seeds."""
        return "encoder", f"seeds/{self.seed}"

    @property
    def locks(self) -> tuple[Path, ...]:
        """Of its own directory."""
        return (seed_directory(self.run, self.seed) / ".train.lock",)

    def at(self, home: Path) -> SeedJob:
        """The same in another run directory."""
        point = self.checkpoint
        if point is not None:
            point = home / point.relative_to(self.run)
        return replace(self, run=home, checkpoint=point)

    def again(self) -> SeedJob:
        """The same, from the latest checkpoint there is by now."""
        trained = resume_point(seed_directory(self.run, self.seed)) is not None
        return replace(self, resume=True, checkpoint=None) if trained else self

    def learning_data(self, load: Callable[[SeedJob], Any]) -> Any:  # noqa: ANN401 (worlds, or days)
        """What it learns from: what came along, or what `load` reads."""
        if isinstance(self.data, EchelonError):
            raise self.data
        return load(self) if self.data is None else self.data


def train_seed(job: SeedJob, report: Report, should_stop: ShouldStop) -> Outcome:
    """Train one agent; what is finished already is not trained again."""
    directory = seed_directory(job.run, job.seed)
    with exclusive_lock(directory / ".train.lock", f"the training in {directory}"):
        point = job.checkpoint
        if point is None and job.resume:
            if (done := finished_outcome(job.config, directory)) is not None:
                return done
            point = resume_point(directory)
        worlds = job.learning_data(load_worlds)
        if not ready(job.config, worlds, directory, should_stop):
            return Outcome(job.seed, "stopped", 0, -1, -math.inf, 0.0)
        training = Training(job.config, worlds, directory, job.seed, resume=point)
        return training.run(report, should_stop)


def train_seeds(
    jobs: Sequence[SeedJob],
    *,
    workers: int,
    on_progress: Callable[[Progress], None],
    train: Callable[[SeedJob, Report, ShouldStop], Outcome] = train_seed,
    load: Callable[[SeedJob], Any] | None = None,
) -> JobResults[Outcome]:
    """Train every job, so many at a time; train: one of them, in a process of its own.

    load: see `run_seed_jobs`
    """

    def pass_on(_job: int, message: object) -> None:
        assert isinstance(message, Progress)
        on_progress(message)

    return run_seed_jobs(train, jobs, workers=workers, on_report=pass_on, load=load or load_worlds)


def load_worlds(job: SeedJob) -> Worlds:
    """Of the run's prepared set."""
    return Worlds.from_prepared(Prepared.open(job.run), job.config)


def run_seed_jobs(
    train: Callable[[SeedJob, Report, ShouldStop], Outcome],
    jobs: Sequence[SeedJob],
    *,
    workers: int,
    on_report: Callable[[int, object], None],
    load: Callable[[SeedJob], Any] = load_worlds,
) -> JobResults[Outcome]:
    """Do every job; away from this machine with its data, and after the encoder of its run.

    load: what a job learns from
    """
    if workers > 1 or engine().away:
        verify_days(job.config for job in jobs)
    if not engine().away:
        return run_jobs(train, jobs, workers=workers, on_report=on_report)
    loaded: dict[Path, Any] = {}
    for job in jobs:
        if job.run not in loaded:
            try:
                loaded[job.run] = freeze(load(job))
            except EchelonError as error:  # which concerns this run alone
                loaded[job.run] = error
    jobs = [replace(job, data=loaded[job.run]) for job in jobs]
    # Here the first seed makes the run's encoder while others wait, which there they could not see.
    first = {job.run: job for job in reversed(jobs) if _lacks_encoder(job)}
    if first:
        made = run_jobs(_make_encoder, list(first.values()), workers=workers)
        if made.stopped:
            return JobResults([None] * len(jobs), stopped=True)
    return run_jobs(train, jobs, workers=workers, on_report=on_report)


def _lacks_encoder(job: SeedJob) -> bool:
    if not isinstance(job.data, Worlds) or not ALGORITHMS[job.config.train.algo].pretrained:
        return False
    finished = finished_outcome(job.config, seed_directory(job.run, job.seed)) is not None
    return not finished and read_encoder_document(job.run) is None


def _make_encoder(job: SeedJob, _report: Report, should_stop: ShouldStop) -> bool:
    """Pre-train the encoder of the job's run, which needs nothing of the seed."""
    directory = seed_directory(job.run, job.seed)
    return ready(job.config, job.learning_data(load_worlds), directory, should_stop)
