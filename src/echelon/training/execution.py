"""Train an execution policy: data, learner, validation, checkpoints, and going on after a stop.

    SEED_DIR/teacher/checkpoints/…     OPD: the teacher's training, before the student's
    SEED_DIR/checkpoints/step-…/       state of the learner (see runs.checkpoint)
    SEED_DIR/policy/                   the best policy on the validation window (agents.execution)
    SEED_DIR/metrics.jsonl             the training log
    SEED_DIR/result.json               how training ended

After each `execution.learner.validate_every` steps, in this order: log, validate, checkpoint. A run
that is stopped and resumed ends with the same weights, bit for bit, as one that is not.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from echelon.agents.execution import (
    DQN,
    PPO,
    DistillSettings,
    DQNSettings,
    LearnedPolicy,
    NetworkSettings,
    PPOSettings,
    Student,
    Task,
    load_policy,
    save_policy,
    teacher_of,
)
from echelon.agents.execution.learner import ExecutionLearner
from echelon.config import Config
from echelon.config.execution import ExecutionConfig, ExecutionRewardConfig
from echelon.data.datasets import ensure_dataset
from echelon.data.sources._tables import inspect
from echelon.data.store import Store
from echelon.errors import ConfigError, DataError, StoreError, shorten
from echelon.execution import (
    Days,
    ExecutionRules,
    PAPenalty,
    ParentOrders,
    Ratio,
    Reward,
    Risk,
    Shortfall,
    Weighted,
    measure_orders,
)
from echelon.execution.drawing import OrderRule, draw_orders, read_orders
from echelon.execution.extensions import Extensions, load_extensions
from echelon.execution.features import PublicFeatures, Quotes, public_features
from echelon.execution.loading import load_days
from echelon.execution.policies import run_orders
from echelon.execution.schedules import VolumeProfile
from echelon.features.scaler import Scaler
from echelon.files import blaming, json_line, write_json
from echelon.runs.checkpoint import (
    blaming_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from echelon.runs.metrics import MetricLog
from echelon.training.execution_books import Traded, load_book, sessions_by_share
from echelon.types import Bools, Metrics

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
RESULT, POLICY, TEACHER, CHECKPOINTS = "result.json", "policy", "teacher", "checkpoints"
_KEEP = 2

log = logging.getLogger(__name__)


class ExecutionData(NamedTuple):
    """What execution is learned and judged on.

    inside[split][D]: days of the split; orders: by split, of which some may have none
    profile: volume on the train days; content: hash of the dataset
    asked: orders there were, with those on days of no split
    quotes: of a book; extensions: features of one's own
    """

    days: Days
    public: PublicFeatures
    inside: dict[Split, Bools]
    orders: dict[Split, ParentOrders]
    rules: ExecutionRules
    profile: VolumeProfile
    content: str
    asked: int
    quotes: Quotes | None = None
    extensions: Extensions = Extensions()


class ExecutionProgress(NamedTuple):
    """Where training stands; gain: of the last validation over TWAP, basis points."""

    seed: int
    stage: str
    step: int
    total: int
    gain: float
    best: float


@dataclass(frozen=True)
class ExecutionOutcome:
    """How training ended; best_gain: over TWAP on the validation window, basis points."""

    seed: int
    ending: Literal["done", "stopped"]
    step: int
    best_step: int
    best_gain: float
    seconds: float


# --- data


def load_execution_data(
    config: Config, needed: Sequence[Split] = ("train", "valid"), orders: Path | None = None
) -> ExecutionData:
    """Days from the store, features scaled on the train days, and orders of all splits.

    needed: splits that must have orders; orders: a file of them, in place of the configuration's
    """
    execution = config.execution
    extensions = load_extensions(execution.extensions, execution.run_code)
    traded = load_book(config) if execution.price == "book" else _load_bars(config)
    days, quotes = traded.days, traded.quotes
    inside = _inside(config, days)
    names, own = extensions.chosen(execution.features)
    public = public_features(days, own, train=inside["train"], names=names, quotes=quotes)
    every = _orders(config, days, traded.timezone, orders)
    return ExecutionData(
        days,
        public,
        inside,
        _by_split(every, inside, needed, config, orders),
        rules_of(execution),
        VolumeProfile.fit(_only(days, inside["train"])),
        traded.content,
        len(every),
        quotes,
        extensions,
    )


def _load_bars(config: Config) -> Traded:
    if config.data.freq == "1d":
        raise ConfigError(
            "data.freq = 1d: orders are worked through the bars of a day. Set data.freq to 5min or "
            "1min, with data that has such bars."
        )
    manifest = ensure_dataset(config)
    if config.market.preset != "auto":  # which nothing here needs
        config.market.preset_for(manifest.info.calendar)
    days = load_days(
        Store(config.data.store),
        manifest.name,
        config.assets,
        config.split.train[0],
        config.split.test[1],
        price_source=config.execution.price,
        outside="drop",
    )
    return Traded(days, None, manifest.content_hash, manifest.info.timezone)


def _inside(config: Config, days: Days) -> dict[Split, Bools]:
    """[D] of each split: by date, or by share of the sessions of a book."""
    shares = config.execution.book_split
    date = days.dates.astype("datetime64[D]")
    inside: dict[Split, Bools] = {}
    if shares is not None:
        inside = dict(zip(SPLITS, sessions_by_share(len(date), shares), strict=True))
        if not all(which.any() for which in inside.values()):
            raise DataError(
                f"execution.book_split {shares} leaves a split of the {len(date)} sessions empty. "
                "Set execution.book_session lower, or the shares otherwise."
            )
        return inside
    for name in SPLITS:
        first, last = (np.datetime64(one) for one in getattr(config.split, name))
        inside[name] = (date >= first) & (date <= last)
        if not inside[name].any():
            raise DataError(
                f"split.{name} ({first} to {last}) has no day of the data, which has {date.min()} "
                f"to {date.max()}. Set split to days that are there"
                + (", or execution.book_split." if config.execution.book else ".")
            )
    return inside


def _only(days: Days, which: Bools) -> Days:
    return replace(
        days,
        symbols=tuple(s for s, keep in zip(days.symbols, which, strict=True) if keep),
        dates=days.dates[which],
        buy=days.buy[which],
        sell=days.sell[which],
        known=days.known[which],
        volume=days.volume[which],
    )


def _orders(config: Config, days: Days, timezone: str, file: Path | None) -> ParentOrders:
    told = config.execution.orders
    if file is not None:
        # The map was written for another file: what fits this one counts.
        have = inspect(file).columns
        own = {theirs: ours for theirs, ours in told.columns.items() if theirs in have}
        return read_orders(file, days, own=own, timezone=timezone)
    if told.path is not None:
        return read_orders(told.path, days, own=told.columns, timezone=timezone)
    rule = OrderRule(
        per_day=told.per_day,
        share=told.share,
        buys=told.buys,
        window=told.window,
        min_ticks=told.min_ticks,
        lot=told.lot,
    )
    # Draws are named by date, which the sessions of a book share: there by number.
    number = np.arange(len(days.dates)) * np.timedelta64(1, "D")
    apart = replace(days, dates=days.dates[0] + number) if config.execution.book else days
    return draw_orders(apart, rule, config.seed)


def _by_split(
    every: ParentOrders,
    inside: dict[Split, Bools],
    needed: Sequence[Split],
    config: Config,
    file: Path | None,
) -> dict[Split, ParentOrders]:
    """Orders by the split that their day is in; those of no split are in none."""
    path = file or config.execution.orders.path
    found = {name: every.take(np.flatnonzero(which[every.day])) for name, which in inside.items()}
    for name in needed:
        if not len(found[name]):
            first, last = getattr(config.split, name)
            raise DataError(
                f"there are no orders in split.{name} ({first} to {last}). "
                + (f"Add some to {path}." if path else "Lengthen it: sizes need 5 days.")
            )
    return found


def rules_of(execution: ExecutionConfig) -> ExecutionRules:
    """As the simulator takes them."""
    return ExecutionRules(
        execution.ticks_per_step,
        1.0 if execution.volume_cap is None else execution.volume_cap,
        execution.half_spread,
        execution.temporary,
        execution.permanent,
    )


def reward_from(told: ExecutionRewardConfig) -> Reward:
    """The weighted sum that the configuration says."""
    parts: list[tuple[float, Reward]] = [
        (told.pa_penalty, PAPenalty(told.penalty)),
        (told.ratio, Ratio(told.thresholds, told.classes)),
        (told.shortfall, Shortfall()),
        (1.0, Risk(told.risk)),
    ]
    weighty = [(weight, one) for weight, one in parts if weight > 0.0]
    return Weighted(weighty if told.risk > 0.0 else weighty[:-1])


# --- learners


def network_of(execution: ExecutionConfig) -> NetworkSettings:
    """Shape of the network."""
    fractions = execution.fractions if execution.actions == "fractions" else ()
    return NetworkSettings(
        sequence=execution.sequence,
        hidden=execution.hidden,
        fractions=fractions,
        rate_max=execution.rate_max,
        block=execution.block,
    )


def _ppo(execution: ExecutionConfig) -> PPOSettings:
    told = execution.learner
    return PPOSettings(
        lr=told.lr,
        orders=told.orders,
        copies=told.copies,
        epochs=told.epochs,
        minibatches=told.minibatches,
        clip=told.clip,
        gamma=told.gamma,
        trace=told.trace,
        entropy_coef=told.entropy,
        normalize_advantages=told.normalize_advantages,
        normalize_rewards=told.normalize_rewards,
        decay_steps=told.total_steps,
    )


def _dqn(execution: ExecutionConfig) -> DQNSettings:
    told = execution.learner
    return DQNSettings(
        lr=told.lr,
        orders=told.orders,
        batch=min(told.orders, DQNSettings().batch),
        updates=told.updates,
        memory=told.memory,
        gamma=told.gamma,
        explore_steps=max(1, told.total_steps // 2),
        target_every=told.target_every,
        normalize_rewards=told.normalize_rewards,
        decay_steps=told.total_steps,
    )


class ExecutionTraining:
    """One policy's training, from the beginning or from its latest checkpoint."""

    def __init__(self, config: Config, data: ExecutionData, directory: Path, seed: int) -> None:
        """directory: the seed's own."""
        torch.set_num_threads(config.train.threads)
        self.config, self.data = config, data
        self.directory, self.seed = directory, seed
        execution = config.execution
        self.task = Task(
            data.days, data.public, data.orders["train"], data.rules, reward_from(execution.reward)
        )
        told = [execution.model_dump(mode="json"), config.split.model_dump(mode="json"), seed]
        # The name of an extension stays when its code changes.
        told.append(data.extensions.digest)
        self.identity = hashlib.sha256(
            json_line(told, sort_keys=True, allow_nan=True).encode()
        ).hexdigest()

    def run(
        self,
        on_progress: Callable[[ExecutionProgress], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        resume: bool = False,
    ) -> ExecutionOutcome:
        """Train to the end, or until `should_stop` says so after some update."""
        (self.directory / RESULT).unlink(missing_ok=True)
        if self.config.execution.learner.algo == "OPD":
            place = self.directory / TEACHER
            taught = self._course(self.teacher(), place, resume, on_progress, should_stop)
            if taught.ending == "stopped":
                return self._ended(taught)
        learner = self.learner()
        return self._ended(self._course(learner, self.directory, resume, on_progress, should_stop))

    def teacher(self) -> PPO:
        """OPD's, as it begins."""
        execution = self.config.execution
        return teacher_of(_ppo(execution), network_of(execution), self.task, self.seed)

    def learner(self) -> PPO | DQN:
        """As it begins; OPD's student listens to the best teacher there is, or to a fresh one."""
        execution = self.config.execution
        network, told = network_of(execution), execution.learner
        if told.algo == "DQN":
            return DQN(_dqn(execution), network, self.task, self.seed)
        if told.algo == "PPO":
            return PPO(_ppo(execution), network, self.task, self.seed)
        place = self.directory / TEACHER / POLICY
        taught = load_policy(place, self.data.public.names).net if place.exists() else None
        teacher = self.teacher().net if taught is None else taught
        decay = told.distill_decay
        until = None if decay is None else max(1, round(decay * told.total_steps))
        distill = DistillSettings(told.distill, told.distill_target, until)
        return Student(_ppo(execution), distill, network, self.task, teacher, self.seed)

    def validate(self, learner: ExecutionLearner) -> Metrics:
        """Mean gain over TWAP, price advantage and fill on the validation window."""
        return gains(learner.policy(), self.data, "valid")

    def _course(
        self,
        learner: ExecutionLearner,
        place: Path,
        resume: bool,
        on_progress: Callable[[ExecutionProgress], None] | None,
        should_stop: Callable[[], bool],
    ) -> ExecutionOutcome:
        told = self.config.execution.learner
        best = {"gain": -math.inf, "step": -1}
        at = self._restore(learner, place, best) if resume else None
        place.mkdir(parents=True, exist_ok=True)
        ending: Literal["done", "stopped"] = "done"
        with MetricLog(place, resume_step=at) as log:
            while learner.steps < told.total_steps:
                before = learner.steps
                metrics = learner.train_once()
                last = learner.steps >= told.total_steps
                stop = not last and should_stop()
                due = learner.steps // told.validate_every > before // told.validate_every
                if last or due:
                    log.write(learner.steps, metrics)
                    self._look(learner, place, log, best)
                    if on_progress is not None:
                        on_progress(self._progress(learner, best, metrics))
                if last or due or stop:
                    self._save(learner, place, log, best)
                if stop:
                    ending = "stopped"
                    break
            return ExecutionOutcome(
                self.seed, ending, learner.steps, int(best["step"]), best["gain"], log.seconds
            )

    def _look(
        self, learner: ExecutionLearner, place: Path, log: MetricLog, best: dict[str, float]
    ) -> None:
        found = self.validate(learner)
        log.write(learner.steps, {f"valid/{name}": value for name, value in found.items()})
        if found["gain_twap"] > best["gain"]:
            best.update(gain=found["gain_twap"], step=learner.steps)
            facts = {
                "algo": learner.algo,
                "step": learner.steps,
                "seed": self.seed,
                "content": self.data.content,
                "rules": list(self.data.rules),
                "clock": self.data.days.clock.tolist(),
                "seen": self.config.split.model_dump(mode="json", include={"train", "valid"}),
                "scaler": _scaler(self.data).to_dict(),
                "extensions": self.data.extensions.digest,
            }
            save_policy(place / POLICY, learner.net, self.data.public.names, facts)

    def _progress(
        self, learner: ExecutionLearner, best: dict[str, float], metrics: Metrics
    ) -> ExecutionProgress:
        total = self.config.execution.learner.total_steps
        stage = "teacher" if learner.net.settings.oracle else learner.algo
        gain = metrics.get("valid/gain_twap", best["gain"])
        return ExecutionProgress(self.seed, stage, learner.steps, total, gain, best["gain"])

    def _save(
        self, learner: ExecutionLearner, place: Path, log: MetricLog, best: dict[str, float]
    ) -> None:
        log.snapshot()
        tensors, state = learner.state()
        save_checkpoint(
            place / CHECKPOINTS,
            learner.steps,
            tensors,
            {"learner": state, "best": dict(best), "content": self.data.content},
            config_hash=self.identity,
            keep=_KEEP,
        )

    def _restore(
        self, learner: ExecutionLearner, place: Path, best: dict[str, float]
    ) -> int | None:
        """Go on from the latest checkpoint; its step, None where there is none."""
        path = latest_checkpoint(place / CHECKPOINTS)
        if path is None:
            return None
        saved = load_checkpoint(path, config_hash=self.identity)
        content = saved.state.get("content")
        if content != self.data.content:
            raise StoreError(
                f"{path}: made with other data ({shorten(content)[:12]}, here "
                f"{self.data.content[:12]}). Resume with its data, or start a new run."
            )
        with blaming_checkpoint(path):
            learner.restore(dict(saved.tensors), saved.state["learner"])
            best.update(saved.state["best"])
        return saved.step

    def _ended(self, outcome: ExecutionOutcome) -> ExecutionOutcome:
        write_json(self.directory / RESULT, asdict(outcome), allow_nan=True)
        return outcome


def gains(policy: LearnedPolicy, data: ExecutionData, split: Split) -> dict[str, float]:
    """Means over the split's orders: gain over TWAP, price advantage, fill."""
    history = run_orders(policy, data.days, data.orders[split], data.rules, record=False)
    found = measure_orders(history, ("gain_twap", "pa", "ffr"))
    return {name: float(values.mean()) for name, values in found.items()}


def load_learned(
    directory: Path,
    data: ExecutionData,
    name: str = "learned",
    extensions: Extensions | None = None,
) -> LearnedPolicy:
    """The best policy of a trained seed, for days with the features it was trained with.

    The scaler that was fitted with it is used, whatever the train window is here.

    extensions: where its own features are; None: those of the data
    """
    stored = load_policy(directory / POLICY)
    facts: dict[str, Any] = stored.facts
    with blaming(directory / POLICY, "Train the policy again: echelon execution train."):
        scaler = Scaler.from_dict(facts["scaler"])
    extensions = data.extensions if extensions is None else extensions
    names, own = extensions.chosen(stored.features)
    if own and facts.get("extensions") != extensions.digest:
        log.warning(
            "%s was trained with other versions of the files in execution.extensions; its features "
            "(%s) may mean something else now",
            directory,
            ", ".join(own),
        )
    public = public_features(data.days, own, scaler, names=names, quotes=data.quotes)
    return LearnedPolicy(stored.net, public, name)


def _scaler(data: ExecutionData) -> Scaler:
    assert data.public.scaler is not None, "features were scaled on the train days"
    return data.public.scaler
