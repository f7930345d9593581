"""The loop of every training: rounds, metric log, validation, checkpoints, going on after a stop.

    PLACE/checkpoints/step-…/          state of the learner (see runs.checkpoint)
    PLACE/metrics.jsonl, .parquet      the training log
    PLACE/result.json                  how training ended

After each round, in this order: log, validate, checkpoint. All are due when the number of steps
passes a multiple of their interval, so a run that is stopped and resumed does the same things at
the same steps as one that is not, and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from echelon.agents.learner import RoundLearner
from echelon.errors import DamagedError, StoreError, shorten
from echelon.files import write_json
from echelon.monitoring.alerts import Alert
from echelon.runs.checkpoint import blaming_checkpoint, load_checkpoint, save_checkpoint
from echelon.runs.metrics import MetricLog
from echelon.runs.tracking import Sink, Status
from echelon.types import Metrics

RESULT, CHECKPOINTS = "result.json", "checkpoints"
Ending = Literal["done", "patience", "stopped"]
LearnerT = TypeVar("LearnerT", bound=RoundLearner)


class Intervals(NamedTuple):
    """Steps of the whole training, and from one log, validation and checkpoint to the next.

    keep: newest checkpoints that stay; patience: validations without a better one that end it
    """

    total: int
    log: int
    validate: int
    checkpoint: int
    keep: int
    patience: int | None = None


@dataclass(frozen=True)
class Progress:
    """Where training stands, for whoever watches.

    reward: mean of the last log interval, before scaling; score: of the last validation, NaN
    before it; best: the best score so far; alerts: of risk control in validations since the last
    """

    seed: int
    step: int
    total: int
    steps_per_second: float
    reward: float
    score: float
    best: float
    alerts: tuple[Alert, ...] = ()

    @property
    def seconds_left(self) -> float:
        return max(0, self.total - self.step) / max(self.steps_per_second, 1e-9)


@dataclass(frozen=True)
class Outcome:
    """How training ended; since_best: validations since the best one."""

    seed: int
    ending: Ending
    step: int
    best_step: int
    best_score: float
    seconds: float
    since_best: int = 0


@dataclass
class Course:
    """What training remembers besides the learner's own state."""

    best_score: float = -math.inf
    best_step: int = -1
    since_best: int = 0
    score: float = math.nan
    reward: float = math.nan
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)


class TrainingLoop(ABC, Generic[LearnerT]):
    def __init__(
        self,
        learner: LearnerT,
        directory: Path,
        seed: int,
        intervals: Intervals,
        *,
        identity: str,
        made_of: Mapping[str, Any],
        select_by: str,
        reward_scale: float,
        resume: Path | None,
    ) -> None:
        """directory: the training's own; resume: a checkpoint of it to go on from

        identity: hash of the configuration; made_of: what else a checkpoint must agree in
        select_by: measure of the validation that the best is chosen by
        reward_scale: what `charts/reward` is divided by for whoever watches
        """
        self.learner, self.directory, self.seed = learner, directory, seed
        self.intervals, self.identity, self.made_of = intervals, identity, made_of
        self.select_by, self.reward_scale = select_by, reward_scale
        self.course = Course()
        self.alerts: list[Alert] = []
        self.resumed_at: int | None = None
        self._passing: str | None = None
        """Name of the checkpoint of a stop, of which an uninterrupted training has none: the next
        one takes its place, so that the same ones are left in the end."""
        if resume is not None:
            self._restore(resume)

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    @abstractmethod
    def validate(self) -> Metrics:
        """Measures of the present policy on the validation window, `select_by` among them."""

    @abstractmethod
    def _save_best(self) -> None:
        """Keep the present policy, than which none was better."""

    def run(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Train to the end, or until `should_stop` says so after some round."""
        every, learner, course = self.intervals, self.learner, self.course
        started, first_step = time.perf_counter(), learner.steps
        ending: Ending = "done"
        passing = False
        # From here on an earlier ending is no longer how this training ended.
        (self.directory / RESULT).unlink(missing_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        log = MetricLog(self.directory, resume_step=self.resumed_at)
        sinks: list[Sink] = []
        try:
            sinks = self._sinks()
            if self.resumed_at is None:
                self._checkpoint(log)
            while learner.steps < every.total:
                before = learner.steps
                self._collect(learner.train_once())
                last = learner.steps >= every.total
                logs = last or _is_due(before, learner.steps, every.log)
                if logs:
                    rate = (learner.steps - first_step) / (time.perf_counter() - started)
                    self._log(log, sinks, rate)
                if last or _is_due(before, learner.steps, every.validate):
                    self._validate(log, sinks)
                    if every.patience is not None and course.since_best >= every.patience:
                        ending = "patience"
                # After validation: whoever watches gets the latest.
                if logs and on_progress is not None:
                    on_progress(self._progress(rate))
                if ending == "patience":
                    break
                due = _is_due(before, learner.steps, every.checkpoint)
                if due:
                    self._checkpoint(log)
                if not last and should_stop():
                    ending, passing = "stopped", not due
                    break
            self._checkpoint(log, passing=passing)
            learner.close()
        except BaseException:
            _finish(sinks, log, "failed")
            raise
        best = course.best_step, course.best_score
        outcome = Outcome(self.seed, ending, learner.steps, *best, log.seconds, course.since_best)
        _finish(sinks, log, "interrupted" if ending == "stopped" else "finished")
        write_json(self.directory / RESULT, self._result(outcome), allow_nan=True)
        return outcome

    def _sinks(self) -> list[Sink]:
        return []

    def _collect(self, metrics: Metrics) -> None:
        """Take in a round's metrics: the log has means over the rounds since the last one."""
        counts, sums = self.course.counts, self.course.sums
        for name, value in metrics.items():
            counts[name] = counts.get(name, 0) + 1
            sums[name] = sums.get(name, 0.0) + value

    def _result(self, outcome: Outcome) -> dict[str, Any]:
        """As result.json has it."""
        return outcome.__dict__

    def _course_state(self) -> dict[str, Any]:
        return {"course": self.course.__dict__}

    def _restore_course(self, state: Mapping[str, Any]) -> Course:
        """What a checkpoint has of it; older ones had one count for all metrics."""
        fields = dict(state["course"])
        if "count" in fields:
            fields["counts"] = dict.fromkeys(fields["sums"], fields.pop("count"))
        return Course(**fields)

    def _log(self, log: MetricLog, sinks: list[Sink], rate: float) -> None:
        """Means of each metric over the rounds that had it."""
        course = self.course
        # Sorted, as a checkpoint's JSON is: the columns of a resumed run's log keep their order.
        means = {name: total / course.counts[name] for name, total in sorted(course.sums.items())}
        course.counts, course.sums = {}, {}
        course.reward = means["charts/reward"] / self.reward_scale
        self._write(log, sinks, means | {"time/steps_per_second": rate})

    def _validate(self, log: MetricLog, sinks: list[Sink]) -> None:
        course = self.course
        measures = {f"valid/{name}": value for name, value in self.validate().items()}
        self._write(log, sinks, measures)
        course.score = measures[f"valid/{self.select_by}"]
        course.since_best += 1
        # NaN (nothing traded, nothing known) is never better than anything.
        first = course.best_step < 0 and math.isfinite(course.score)
        if course.score > course.best_score or first:
            course.best_score, course.best_step = course.score, self.learner.steps
            course.since_best = 0
            self._save_best()

    def _write(self, log: MetricLog, sinks: list[Sink], metrics: Metrics) -> None:
        log.write(self.learner.steps, metrics)
        for sink in sinks:
            sink.log(self.learner.steps, metrics)

    def _progress(self, rate: float) -> Progress:
        course, steps, total = self.course, self.learner.steps, self.intervals.total
        best = course.best_score if course.best_step >= 0 else math.nan
        alerts, self.alerts = tuple(self.alerts), []
        return Progress(self.seed, steps, total, rate, course.reward, course.score, best, alerts)

    def _checkpoint(self, log: MetricLog, *, passing: bool = False) -> None:
        log.snapshot()
        tensors, state = self.learner.state()
        save_checkpoint(
            self.checkpoints,
            self.learner.steps,
            tensors,
            {"learner": state, **self._course_state(), **self.made_of}
            | ({"passing": True} if passing else {}),
            config_hash=self.identity,
            keep=self.intervals.keep,
            drop=self._passing,
        )
        self._passing = None

    def _restore(self, path: Path) -> None:
        checkpoint = load_checkpoint(path, config_hash=self.identity)
        state = checkpoint.state
        for key, mine in self.made_of.items():
            # Checkpoints of before have no encoder; what it was made of is checked all the same.
            if state.get(key, mine if key == "encoder" else None) != mine:
                raise StoreError(
                    f"{path}: made with another {key} ({shorten(state.get(key), 80)}, here {mine})."
                    f" Resume with the {key} it was made with, or start a new run."
                )
        with blaming_checkpoint(path):
            self.learner.restore(dict(checkpoint.tensors), state["learner"])
            self.course = self._restore_course(state)
        if self.learner.steps != checkpoint.step:
            what = f"{self.learner.steps} steps in a checkpoint of {checkpoint.step}"
            raise DamagedError(path, what, "Resume from an earlier one, or start the run again.")
        self.resumed_at = checkpoint.step
        self._passing = path.name if state.get("passing") else None


def _finish(sinks: list[Sink], log: MetricLog, status: Status) -> None:
    try:
        log.close()
    finally:
        for sink in sinks:
            sink.finish(status)


def _is_due(before: int, after: int, interval: int) -> bool:
    """Whether a multiple of `interval` lies in (before, after]."""
    return after // interval > before // interval
