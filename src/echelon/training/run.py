"""Train one agent: updates, metric log, validation, checkpoints, and going on after a stop.

    SEED_DIR/checkpoints/step-…/, best/    state and weights (see runs.checkpoint)
    SEED_DIR/metrics.jsonl, .parquet       the training log
    SEED_DIR/tensorboard/                  the same for TensorBoard
    SEED_DIR/learner.json                  sizes of adapter and replay (see training.learner_facts)
    SEED_DIR/result.json                   how training ended

After each update, in this order: log, validate, checkpoint. All are due when the number of steps
passes a multiple of their interval, so a run that is stopped and resumed does the same things at
the same steps as one that is not, and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.backtest.policy import Policy
from echelon.backtest.run import run_backtest
from echelon.config import Config, load_run_config, override_config
from echelon.config.agents import BASELINE_SETTINGS
from echelon.config.market import EXECUTOR_KEYS
from echelon.errors import DamagedError, DataError, StoreError, UsageError, shorten
from echelon.features.prepared import Prepared
from echelon.files import blaming, json_line, read_json, write_json
from echelon.runs import RunDirectory
from echelon.runs.checkpoint import (
    TENSORS,
    Checkpoint,
    below_prefix,
    best_checkpoint,
    blaming_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_best,
    save_checkpoint,
    with_prefix,
)
from echelon.runs.metrics import MetricLog
from echelon.runs.tracking import Sink, Status, open_sinks
from echelon.training.learner_facts import write_learner_facts
from echelon.training.learners import Worlds, encoder_hash, make_learner
from echelon.training.loading import load_policy
from echelon.types import Metrics

RESULT = "result.json"
_LEAST_VALID = 3
"""Bars of a validation window: two returns have a standard deviation."""

_TRAINED_BY = (
    *("assets", "window", "fee_rate", "buy_pct", "sell_pct", "split", "features", "normalization"),
    *("market", "reward", "state", "model", "train", "eval", "pretrain", "lora", "expert"),
    *("experts", "meta_router", "trainer", "risk"),
)
"""Parts of the configuration that training depends on; the seed is checked on its own."""

Ending = Literal["done", "patience", "stopped"]


@dataclass(frozen=True)
class Progress:
    """Where training stands, for whoever watches.

    reward: mean of the last log interval, before scaling; score: of the last validation, NaN
    before it; best: the best score so far
    """

    seed: int
    step: int
    total: int
    steps_per_second: float
    reward: float
    score: float
    best: float

    @property
    def seconds_left(self) -> float:
        """At the present pace."""
        return max(0, self.total - self.step) / max(self.steps_per_second, 1e-9)


@dataclass(frozen=True)
class Outcome:
    """How training ended: all steps done, no progress for `train.patience`, or stopped.

    since_best: validations since the best one
    """

    seed: int
    ending: Ending
    step: int
    best_step: int
    best_score: float
    seconds: float
    since_best: int = 0


@dataclass
class _Course:
    """What training remembers beside the learner's own state."""

    best_score: float = -math.inf
    best_step: int = -1
    since_best: int = 0
    score: float = math.nan
    reward: float = math.nan
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(state: Mapping[str, Any]) -> _Course:
        """What a checkpoint has of it; older ones had one count for all metrics."""
        found = dict(state)
        if "count" in found:
            found["counts"] = dict.fromkeys(found["sums"], found.pop("count"))
        return _Course(**found)

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.counts[name] = self.counts.get(name, 0) + 1
            self.sums[name] = self.sums.get(name, 0.0) + value

    def take_means(self) -> Metrics:
        """Of each metric, over the rounds that told it: what was not measured is not in the log."""
        # Sorted, as a checkpoint's JSON is: the columns of a resumed run's log keep their order.
        means = {name: total / self.counts[name] for name, total in sorted(self.sums.items())}
        self.counts, self.sums = {}, {}
        return means


class Training:
    """One agent's training, from the beginning or from a checkpoint."""

    def __init__(
        self,
        config: Config,
        worlds: Worlds,
        directory: Path,
        seed: int,
        *,
        resume: Path | None = None,
    ) -> None:
        """directory: the seed's own; resume: a checkpoint of it to go on from"""
        torch.set_num_threads(config.train.threads)
        self.config = config
        self.directory = directory
        self.seed = seed
        self.worlds = worlds
        self.valid_spans = worlds.valid.spans("valid")
        shortest = min(len(span) for span in self.valid_spans)
        if shortest < _LEAST_VALID:
            raise DataError(
                f"split.valid has {shortest} bars to decide and be marked on; a Sharpe "
                f"ratio to choose a checkpoint by needs {_LEAST_VALID}. Lengthen the split."
            )
        self.learner = make_learner(config, worlds, directory, seed)
        self.encoder = encoder_hash(config, directory)
        self.course = _Course()
        self.identity = training_hash(config)
        self.resumed_at: int | None = None
        if resume is not None:
            self._restore(resume)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.directory / "checkpoints"

    def run(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Train to the end, or until `should_stop` says so after some update."""
        train, learner, course = self.config.train, self.learner, self.course
        started, first_step = time.perf_counter(), learner.steps
        ending: Ending = "done"
        # From here on an earlier ending is no longer how this training ended.
        (self.directory / RESULT).unlink(missing_ok=True)
        write_learner_facts(self.directory, learner)
        log = MetricLog(self.directory, resume_step=self.resumed_at)
        sinks: list[Sink] = []
        try:
            sinks = self._sinks()
            if self.resumed_at is None:
                self._checkpoint(log)
            while learner.steps < train.total_env_steps:
                before = learner.steps
                course.add(learner.train_once())
                last = learner.steps >= train.total_env_steps
                logs = last or _passed(before, learner.steps, train.log_interval_steps)
                if logs:
                    rate = (learner.steps - first_step) / (time.perf_counter() - started)
                    self._log(log, sinks, rate)
                if last or _passed(before, learner.steps, train.validate_every_steps):
                    self._validate(log, sinks)
                    if train.patience is not None and course.since_best >= train.patience:
                        ending = "patience"
                # After validation: whoever watches is told of the latest.
                if logs and on_progress is not None:
                    on_progress(self._progress(rate))
                if ending == "patience":
                    break
                if _passed(before, learner.steps, train.checkpoint_every_steps):
                    self._checkpoint(log)
                if not last and should_stop():
                    ending = "stopped"
                    break
            self._checkpoint(log)
            learner.close()
        except BaseException:
            self._finish(sinks, log, "failed")
            raise
        outcome = Outcome(
            self.seed,
            ending,
            learner.steps,
            course.best_step,
            course.best_score,
            log.seconds,
            course.since_best,
        )
        self._finish(sinks, log, "interrupted" if ending == "stopped" else "finished")
        write_json(self.directory / RESULT, outcome.__dict__, allow_nan=True)
        return outcome

    def validate(self) -> Metrics:
        """Measures of the present policy on the validation window; means where it has stretches."""
        policy, world = self.learner.policy(), self.worlds.valid
        found = [
            run_backtest(policy, world, span, self.config).measures.as_dict()
            for span in self.valid_spans
        ]
        return {name: sum(m[name] for m in found) / len(found) for name in found[0]}

    def _log(self, log: MetricLog, sinks: list[Sink], rate: float) -> None:
        course, learner = self.course, self.learner
        metrics = course.take_means() | {"time/steps_per_second": rate}
        course.reward = metrics["charts/reward"] / self.config.reward.scale
        log.write(learner.steps, metrics)
        for sink in sinks:
            sink.log(learner.steps, metrics)

    def _progress(self, rate: float) -> Progress:
        course = self.course
        return Progress(
            self.seed,
            self.learner.steps,
            self.config.train.total_env_steps,
            rate,
            course.reward,
            course.score,
            course.best_score if course.best_step >= 0 else math.nan,
        )

    def _validate(self, log: MetricLog, sinks: list[Sink]) -> None:
        course, learner = self.course, self.learner
        measures = {f"valid/{name}": value for name, value in self.validate().items()}
        log.write(learner.steps, measures)
        for sink in sinks:
            sink.log(learner.steps, measures)
        course.score = measures[f"valid/{self.config.train.select_by}"]
        # NaN (nothing traded, nothing known) is never better than anything.
        if course.score > course.best_score or (
            course.best_step < 0 and math.isfinite(course.score)
        ):
            course.best_score, course.best_step, course.since_best = course.score, learner.steps, 0
            tensors = with_prefix("net.", learner.weights())
            save_best(
                self.checkpoints,
                learner.steps,
                tensors,
                {"score": course.score, **self._made_of()},
                config_hash=self.identity,
            )
        else:
            course.since_best += 1

    def _checkpoint(self, log: MetricLog) -> None:
        log.snapshot()
        tensors, state = self.learner.state()
        save_checkpoint(
            self.checkpoints,
            self.learner.steps,
            tensors,
            {
                "learner": state,
                "course": self.course.__dict__,
                **self._made_of(),
            },
            config_hash=self.identity,
            keep=self.config.train.keep_checkpoints,
        )

    def _made_of(self) -> dict[str, Any]:
        """What a checkpoint says it was made of, beside the configuration."""
        parts = {"seed": self.seed, "data": self.worlds.data, "encoder": self.encoder}
        return {name: part for name, part in parts.items() if part is not None}

    def _restore(self, path: Path) -> None:
        checkpoint = load_checkpoint(path, config_hash=self.identity)
        state = checkpoint.state
        for key, mine in self._made_of().items():
            # Checkpoints of before have no encoder; what it was made of is checked all the same.
            if state.get(key, mine if key == "encoder" else None) != mine:
                raise StoreError(
                    f"{path}: made with another {key} ({shorten(state.get(key), 80)}, here {mine})."
                    f" Resume with the {key} it was made with, or start a new run."
                )
        with blaming_checkpoint(path):
            self.learner.restore(dict(checkpoint.tensors), state["learner"])
            self.course = _Course.of(state["course"])
        if self.learner.steps != checkpoint.step:
            raise DamagedError(
                path,
                f"{self.learner.steps} steps in a checkpoint of {checkpoint.step}",
                "Resume from an earlier one, or start the run anew.",
            )
        self.resumed_at = checkpoint.step

    def _sinks(self) -> list[Sink]:
        name = f"{self.directory.parent.parent.name}-{self.seed}"
        return open_sinks(self.config.logging, self.directory, name, self.resumed_at)

    def _finish(self, sinks: list[Sink], log: MetricLog, status: Status) -> None:
        try:
            log.close()
        finally:
            for sink in sinks:
                sink.finish(status)


def _passed(before: int, after: int, interval: int) -> bool:
    """Whether a multiple of `interval` lies in (before, after]."""
    return after // interval > before // interval


def training_hash(config: Config) -> str:
    """Hash of what training depends on.

    Left out: how long it goes on, where it is logged, what it is compared with afterwards, where
    the data came from (they have a hash of their own), and every key that has its default, so
    that keys which come with a later version leave the hashes of older runs alone.
    """
    free = ["seeds", "patience", "keep_checkpoints", "checkpoint_every_steps"]
    if config.train.lr_schedule == "constant":
        free.append("total_env_steps")
    tree = config.model_dump(mode="json", exclude_defaults=True, include=set(_TRAINED_BY))
    for section, keys in (("train", free), ("eval", BASELINE_SETTINGS)):
        tree[section] = {k: v for k, v in tree.get(section, {}).items() if k not in keys}
    # Over how many processes experts are spread changes nothing.
    tree.get("trainer", {}).pop("workers", None)
    # `paper` was the default once: it is what older runs mean by a hash without a preset.
    market = {k: v for k, v in tree.pop("market", {}).items() if k != "preset_confirmed"}
    market["preset"] = config.market.preset
    if market["preset"] == "paper":
        del market["preset"]
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
        """Open a run; raises where nothing was trained in it.

        trust_code: files of code that its configuration names and that may run
        """
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
        """The same agents with the executor of `overrides` (market.executor… and nothing else).

        Agents learn with fills at the open, whatever the executor; only the choice among their
        checkpoints was made with the one of the training, and stays as it is.
        name: of the directory of its evaluations; None: the executor's
        """
        keys = [item.partition("=")[0].strip() for item in overrides]
        wrong = [key for key in keys if key not in EXECUTOR_KEYS]
        if wrong:
            raise UsageError(
                f"{wrong[0]!r} cannot change between training and evaluation, expected one of "
                f"{', '.join(EXECUTOR_KEYS)}. Train another run with it."
            )
        config = override_config(self.config, list(overrides))
        name = config.market.executor if name is None else name
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
        """The features and prices it was trained on, verified against what run.json says."""
        return Prepared.open(self.path, RunDirectory(self.path).trained_on())

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What run.json says."""
        return RunDirectory(self.path).facts()

    def best_step(self, seed: int) -> int:
        """Step of the seed's best checkpoint."""
        return self._best(seed).step

    def policy(self, seed: int) -> Policy:
        """The seed's best agent."""
        data = self.prepared.manifest["content_hash"]
        checkpoint = self._best(seed)
        trained_on = checkpoint.state.get("data")
        if trained_on != data:
            raise StoreError(
                f"{self.path}: seed {seed} was trained on other data ({shorten(trained_on, 80)}) "
                f"than is prepared there now ({data}). Train anew."
            )
        torch.set_num_threads(self.config.train.threads)
        weights = below_prefix("net.", checkpoint.tensors)
        n_features = len(self.prepared.names)
        place = seed_directory(self.path, seed) / "checkpoints" / "best"
        with blaming(place / TENSORS, "It does not fit the network of config.yaml: train anew."):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
                raise ValueError("weights that are not finite")
            return load_policy(self.config, weights, n_features, seed, f"seed {seed}")

    @cached_property
    def _loaded(self) -> dict[int, Checkpoint]:
        return {}

    def _best(self, seed: int) -> Checkpoint:
        """Read once: beside a training, a second look may find a better one."""
        if seed not in self._loaded:
            directory = _checkpoints(self.path, seed)
            path = best_checkpoint(directory)
            if path is None:
                raise StoreError(f"{directory}: no best checkpoint. Train seed {seed} again.")
            identity = self.trained_by or training_hash(self.config)
            self._loaded[seed] = load_checkpoint(path, config_hash=identity)
        return self._loaded[seed]


def seed_directory(run: Path, seed: int) -> Path:
    """Where a seed's training is."""
    return run / "seeds" / str(seed)


def _checkpoints(run: Path, seed: int) -> Path:
    return seed_directory(run, seed) / "checkpoints"


def trained_seeds(run: Path) -> list[int]:
    """Seeds that have a directory in a run, in order; what else is there is not a seed's.

    A copy made beside them (`42 copy`) is none, and neither is anything by a name that
    `seed_directory` does not give.
    """
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
    if outcome.step >= config.train.total_env_steps or (outcome.ending == "patience" and impatient):
        return outcome
    return None


def unbegun(seed: int) -> Outcome:
    """Of a training that was stopped before its first step."""
    return Outcome(seed, "stopped", 0, -1, -math.inf, 0.0)


def resume_point(directory: Path) -> Path | None:
    """The checkpoint a seed's training goes on from; None: from the beginning."""
    return latest_checkpoint(directory / "checkpoints")
