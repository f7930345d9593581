"""Train execution policies, and open what was trained.

SEED_DIR/…             the training's log, checkpoints and result (see training.loop)
SEED_DIR/policy/       the best policy on the validation window (agents.execution)
SEED_DIR/teacher/…     OPD: the same of the teacher, which learns before the student
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypedDict

from echelon.agents.execution.dqn import DQN
from echelon.agents.execution.learner import ExecutionLearner, ExecutionTask
from echelon.agents.execution.network import NetworkSettings
from echelon.agents.execution.policy import (
    LearnedPolicy,
    load_execution_policy,
    policy_for_days,
    save_execution_policy,
)
from echelon.agents.execution.ppo import PPO, make_teacher
from echelon.config import Config, load_run_config
from echelon.errors import StoreError, UsageError
from echelon.execution.features import Extensions, load_extensions
from echelon.execution.history import BASIS_POINTS, measure_orders
from echelon.execution.policies import ExecutionPolicy, run_orders
from echelon.execution.rewards import reward_from_config
from echelon.features.prepared import SPLITS
from echelon.files import blaming, exclusive_lock, json_line, read_json
from echelon.training.execution_data import ExecutionData, load_execution_data
from echelon.training.loop import (
    CHECKPOINTS,
    RESULT,
    Course,
    Ending,
    Intervals,
    Outcome,
    Progress,
    TrainingLoop,
)
from echelon.training.run import SeedJob, resume_point, seed_directory, trained_seeds
from echelon.types import Metrics
from echelon.workers import Report, ShouldStop, engine

POLICY, TEACHER = "policy", "teacher"
_AGAIN = "Train the policy again: echelon execution train."


class _Result(TypedDict):
    """result.json; best_gain: over TWAP on the validation window, basis points."""

    seed: int
    ending: Ending
    step: int
    best_step: int
    best_gain: float
    seconds: float


class ExecutionTraining(TrainingLoop[ExecutionLearner]):
    def __init__(
        self,
        config: Config,
        data: ExecutionData,
        learner: ExecutionLearner,
        directory: Path,
        seed: int,
        *,
        resume: bool = False,
    ) -> None:
        """directory: the learner's own; resume: from its latest checkpoint, if any"""
        self.config, self.data = config, data
        settings, every = config.execution.learner, config.execution.learner.validate_every
        sections = [part.model_dump(mode="json") for part in (config.execution, config.split)]
        # The name of an extension stays when its code changes.
        parts = [*sections, seed, data.extensions.digest]
        made_from = json_line(parts, sort_keys=True, allow_nan=True)
        super().__init__(
            learner,
            directory,
            seed,
            Intervals(settings.total_steps, every, every, every, keep=2),
            identity=hashlib.sha256(made_from.encode()).hexdigest(),
            made_of={"content": data.content},
            select_by="gain_twap",
            reward_scale=BASIS_POINTS,
            resume=resume_point(directory) if resume else None,
        )

    def validate(self) -> Metrics:
        """Means over the validation window's orders: gain over TWAP, price advantage, fill."""
        data, policy = self.data, self.learner.policy()
        history = run_orders(policy, data.days, data.orders["valid"], data.rules, record=False)
        measures = measure_orders(history, ("gain_twap", "pa", "ffr"))
        return {name: float(values.mean()) for name, values in measures.items()}

    def _save_best(self) -> None:
        data = self.data
        assert data.public.scaler is not None, "features were scaled on the train days"
        facts = {
            "algo": self.learner.algo,
            "step": self.learner.steps,
            "seed": self.seed,
            "content": data.content,
            "rules": list(data.rules),
            "clock": data.days.clock.tolist(),
            "seen": self.config.split.model_dump(mode="json", include={"train", "valid"}),
            "scaler": data.public.scaler.to_dict(),
            "extensions": data.extensions.digest,
        }
        save_execution_policy(self.directory / POLICY, self.learner.net, data.public.names, facts)

    def _collect(self, metrics: Metrics) -> None:
        """The log has the metrics of the last round."""
        self.course.counts, self.course.sums = {}, {}
        super()._collect(metrics)

    def _course_state(self) -> dict[str, Any]:
        return {"best": {"gain": self.course.best_score, "step": self.course.best_step}}

    def _restore_course(self, state: Mapping[str, Any]) -> Course:
        return Course(best_score=state["best"]["gain"], best_step=state["best"]["step"])

    def _result(self, outcome: Outcome) -> dict[str, Any]:
        fields = {"best_gain": outcome.best_score, **outcome.__dict__}
        return {name: fields[name] for name in _Result.__annotations__}


def train_execution(
    config: Config,
    data: ExecutionData,
    directory: Path,
    seed: int,
    on_progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    resume: bool = False,
) -> Outcome:
    """Train a policy in the seed's directory, OPD's after its teacher; progress counts both."""
    torch.set_num_threads(config.train.threads)
    before = 0
    if config.execution.learner.algo == "OPD":
        (directory / RESULT).unlink(missing_ok=True)
        before = config.execution.learner.total_steps
        teacher = make_execution_learner(config, data, directory, seed, teacher=True)
        place = directory / TEACHER
        training = ExecutionTraining(config, data, teacher, place, seed, resume=resume)
        outcome = training.run(lambda now: on_progress(replace(now, total=2 * before)), should_stop)
        if outcome.ending == "stopped":
            return outcome
    learner = make_execution_learner(config, data, directory, seed)
    training = ExecutionTraining(config, data, learner, directory, seed, resume=resume)
    return training.run(
        lambda now: on_progress(replace(now, step=before + now.step, total=before + now.total)),
        should_stop,
    )


def make_execution_learner(
    config: Config, data: ExecutionData, directory: Path, seed: int, *, teacher: bool = False
) -> ExecutionLearner:
    """As it begins: OPD's teacher, or a policy's; OPD's student with the best teacher there is."""
    execution = config.execution
    settings, network = execution.learner, NetworkSettings.from_config(execution)
    reward = reward_from_config(execution.reward)
    task = ExecutionTask(data.days, data.public, data.orders["train"], data.rules, reward)
    if teacher:
        return make_teacher(settings, network, task, seed)
    if settings.algo != "OPD":
        return (DQN if settings.algo == "DQN" else PPO)(settings, network, task, seed)
    place = directory / TEACHER / POLICY
    best = load_execution_policy(place, data.public.names) if place.exists() else None
    taught = best or make_teacher(settings, network, task, seed)
    return PPO(settings, network, task, seed, taught.net)


def train_execution_seed(job: SeedJob, report: Report, should_stop: ShouldStop) -> Outcome:
    """Train one policy; what is finished already is not trained again."""
    directory = seed_directory(job.run, job.seed)
    with exclusive_lock(directory / ".train.lock", f"the training in {directory}"):
        if job.resume and (directory / RESULT).is_file():
            result = read_json(directory / RESULT, _Result, "Remove it and resume.")
            if result["ending"] == "done":
                return Outcome(*(result[name] for name in _Result.__annotations__))  # type: ignore[literal-required]
        data = job.learning_data(load_execution_days)
        return train_execution(
            job.config, data, directory, job.seed, report, should_stop, resume=job.resume
        )


def load_execution_days(job: SeedJob) -> ExecutionData:
    """What a job learns from."""
    config = job.config
    if engine().away and config.execution.extensions:
        raise UsageError(
            "execution.extensions names files of code, which do not travel to a Ray cluster. Train "
            "here, or leave them out."
        )
    return load_execution_data(config)


def check_start(config: Config, directory: Path) -> None:
    """Refuse what cannot be trained, before anything is written or removed."""
    make_execution_learner(config, load_execution_data(config), directory, config.seed)


def is_trained(run: Path) -> bool:
    """Whether policies were trained there: a lock or an empty log came to nothing."""
    left = (CHECKPOINTS, f"{TEACHER}/{CHECKPOINTS}", POLICY, RESULT)
    return any(any((run / "seeds").glob(f"*/{part}")) for part in left)


def load_learned(
    directory: Path,
    data: ExecutionData,
    name: str = "learned",
    extensions: Extensions | None = None,
) -> LearnedPolicy:
    """A seed's best policy; extensions: where features of its own are, None: those of the data."""
    path, own = directory / POLICY, extensions or data.extensions
    return policy_for_days(path, load_execution_policy(path), data.days, own, data.quotes, name)


def open_trained(
    runs: Mapping[str, Path],
    split: str,
    orders: Path | None = None,
    trust_code: Sequence[Path] = (),
) -> tuple[Config, ExecutionData, dict[str, dict[int, ExecutionPolicy]]]:
    """The first run's configuration and data, and the learned policies of all, by name and seed.

    split: that they are to be judged on, and that none may have learned from
    orders: a file of them, in place of the first run's own
    trust_code: files of the runs' extensions that may run
    """
    for run in runs.values():
        if not (run / "config.yaml").is_file():
            raise UsageError(f"{run}: no config.yaml there, so not a run directory.")
    configs = {run: load_run_config(run / "config.yaml", (), trust_code) for run in runs.values()}
    first, config = next(iter(configs.items()))
    data = load_execution_data(config, (split,), orders)
    learned: dict[str, dict[int, ExecutionPolicy]] = {}
    for name, run in runs.items():
        # A policy's own features are those of its own run's files.
        execution = configs[run].execution
        own = load_extensions(execution.extensions, execution.run_code)
        places = [seed_directory(run, seed) for seed in trained_seeds(run)]
        seeds = [place for place in places if (place / POLICY).is_dir()]
        if not seeds:
            raise StoreError(
                f"{run}: holds no trained execution policy. Train one: echelon execution train."
            )
        for seed in seeds:
            facts = load_execution_policy(seed / POLICY).facts
            # Policies of before these facts were kept: what the run's configuration says.
            seen = facts.get("seen") or configs[run].split.model_dump(mode="json")
            with blaming(seed / POLICY, _AGAIN):
                _refuse_seen(run, seen, first, config, split)
                refuse_other(run, facts, first, data)
        learned[name] = {int(seed.name): load_learned(seed, data, name, own) for seed in seeds}
    return config, data, learned


def _refuse_seen(
    run: Path, seen: Mapping[str, Sequence[str]], first: Path, config: Config, split: str
) -> None:
    """Refuse a policy whose windows reach into the days it is to be judged on."""
    begin, end = getattr(config.split, split)
    for window in SPLITS[: SPLITS.index(split)]:
        low, high = (date.fromisoformat(bound) for bound in seen[window])
        if low <= end and begin <= high:
            raise UsageError(
                f"{run}: was trained with split.{window} = {low} to {high}, which overlaps "
                f"split.{split} of {first}, {begin} to {end}: it has seen days it would be judged "
                f"on. Name a run first whose split.{split} none has seen, or train this one again "
                "with the other's split."
            )


def refuse_other(run: Path, facts: Mapping[str, Any], first: Path, data: ExecutionData) -> None:
    """Refuse a policy made for other steps, ticks or data than those at hand."""
    clock = data.days.clock.tolist()
    checks = (
        ("execution.ticks_per_step", int(facts["rules"][0]), data.rules.ticks_per_step),
        ("the dataset's content", facts["content"][:12], data.content[:12]),
        ("the grid of ticks", _grid(facts.get("clock", clock)), _grid(clock)),
    )
    for key, own, here in checks:
        if own != here:
            raise UsageError(
                f"{run}: its policy was trained with {key} = {own}, but {first} has {here}. "
                "Evaluate it by itself with the data and settings it was trained with, or train "
                "it again with these."
            )


def _grid(clock: Sequence[float]) -> str:
    """A grid in words; irregular ones differ by their middle, too."""
    shown = [f"{int(m) // 60:02d}:{int(m) % 60:02d}" for m in (clock[0], clock[-1])]
    return f"{len(clock)} ticks from {shown[0]} to {shown[1]} (sum {sum(clock):g})"
