"""What an algorithm is: a learner, the policy it leaves behind, and what it needs.

The table in `config.algorithms` names the class of each `train.algo`; `learner_class` imports it.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor

from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.algorithms import ALGORITHMS
from echelon.envs.world import World
from echelon.errors import DataError, TrainingError
from echelon.models.encoders import Encoder
from echelon.models.lora import AdapterSize
from echelon.types import Metrics


class ReplaySize(NamedTuple):
    """Of a replay buffer: bytes of one transition, and how many it has room for."""

    transition_bytes: int
    capacity: int

    @property
    def whole(self) -> str:
        size = float(self.transition_bytes * self.capacity)
        units = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
        unit = next((name for name, least in units.items() if size >= least), "bytes")
        return f"{size / units.get(unit, 1.0):.4g} {unit}"


class LearnerFacts(NamedTuple):
    """What a learner takes besides its networks; None: it has none.

    dropped: settings of the market that it leaves out while it learns, and is judged under
    """

    adapter: AdapterSize | None
    replay: ReplaySize | None
    dropped: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        lines = []
        if self.adapter is not None:
            trained, whole = self.adapter
            share = 100 * self.adapter.share
            lines.append(f"adapter: {trained:,} of {whole:,} encoder weights train ({share:.1f} %)")
        if self.replay is not None:
            size, capacity = self.replay
            lines.append(
                f"replay: {size:,} bytes a transition, {self.replay.whole} for {capacity:,}"
            )
        if self.dropped:
            names = ", ".join(self.dropped)
            lines.append(f"learns without {names}; validated and evaluated under all rules")
        return lines


class TrainingSetup(NamedTuple):
    """Where a learner begins.

    train, valid: worlds with the train and the validation window; directory: the seed's own
    encoder: the run's, of algorithms that stand on a pre-trained one
    """

    config: Config
    train: World
    valid: World
    directory: Path
    seed: int
    encoder: Encoder | None = None


class RoundLearner(ABC):
    """What learns in rounds, by `training.loop`. `steps`: so far."""

    steps: int

    @abstractmethod
    def train_once(self) -> Metrics:
        """Collect and learn a little; the metrics have `charts/reward`, and nothing of losses
        before the first update.

        Raises `TrainingError` before a loss that is not a number can reach the weights.
        """

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) from which `restore` goes on bit for bit."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""

    def close(self) -> None:  # noqa: B027 (most learners keep nothing outside of themselves)
        """Training has ended: remove what can be computed again."""


class Learner(RoundLearner):
    """An agent that learns; its steps are one per book and bar."""

    @abstractmethod
    def __init__(self, config: Config, world: World, seed: int) -> None:
        """world: with the train window"""

    @classmethod
    def from_setup(cls, setup: TrainingSetup) -> Self:
        """A fresh learner: on the train window alone, unless it says otherwise."""
        return cls(setup.config, setup.train, setup.seed)

    @classmethod
    @abstractmethod
    def load_policy(
        cls, config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str
    ) -> Policy:
        """The policy of what `weights` gave; raises RuntimeError where they do not fit."""

    @classmethod
    def refuse_world(cls, config: Config, world: World) -> None:
        """Raise where nothing could be learned on this train window."""

    @classmethod
    def pretraining_world(cls, config: Config, train: World) -> World:
        """The part of the train window on which the encoder is pre-trained."""
        return train

    @abstractmethod
    def policy(self) -> Policy:
        """The agent as it is now."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """What `load_policy` makes the policy from again."""

    def facts(self) -> LearnerFacts | None:
        """What it takes besides its networks; None: nothing."""
        return None


def learner_class(config: Config) -> type[Learner]:
    module, _, name = ALGORITHMS[config.train.algo].learner.partition(":")
    named: type[Learner] = getattr(importlib.import_module(module), name)
    return named


def learning_rate_share(schedule: str, progress: float) -> float:
    """What is left of a learning rate after `progress` ∈ [0, 1] of the training."""
    done = min(max(progress, 0.0), 1.0)
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0


def refuse_long_episode(setting: str, steps: int, spans: Sequence[range]) -> None:
    """Raise `DataError` where a stretch of the train window is too short for so many steps."""
    shortest = min(len(span) for span in spans)
    if steps + 1 > shortest:
        raise DataError(
            f"{setting}={steps} does not fit into split.train, in which a book can take "
            f"{shortest - 1} steps. Shorten it."
        )


def refuse_divergence(metrics: Metrics, when: str, advice: str, of: str = "") -> None:
    """Raise `TrainingError` where a metric of an update is not a number; advice: what to lower.

    when: of the update, "step 1,000"; of: the network that it was of, where there are several
    """
    bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if bad:
        shown = ", ".join(f"{name} = {metrics[name]}" for name in bad)
        raise TrainingError(
            f"training diverged at {when}: {shown}. The weights{of} were not changed by this "
            f"{when.split()[0]}; the last checkpoint is good. Lower {advice}, and check the "
            "features for outliers."
        )
