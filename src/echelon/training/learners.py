"""Learners behind one interface: what training asks of A2C, SAC, TD3, APG and SB3's alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from echelon.agents import apg
from echelon.agents.a2c import A2C
from echelon.agents.apg import APG
from echelon.agents.encoder_files import read_hash
from echelon.agents.expert import ExpertLearner
from echelon.agents.pretrain import Pretrained, ensure_encoder
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.envs.world import World, world_of
from echelon.features.prepared import Prepared
from echelon.population.settings import refuse_settings
from echelon.population.windows import parts_of
from echelon.training.executors import with_executor
from echelon.training.loading import is_sb3
from echelon.training.loop import RoundLearner


class Worlds(NamedTuple):
    """Where an agent learns and where it is validated; often the same market.

    data: hash of what both were made from
    """

    train: World
    valid: World
    data: str

    @staticmethod
    def of(prepared: Prepared, config: Config) -> Worlds:
        """Both windows of a prepared set; its test window is not in them.

        Only validation has the executor: learners collect with immediate fills.
        """
        world = world_of(prepared, config)
        costs = 1.0 if config.eval.use_fee else 0.0
        valid = world if costs else world_of(prepared, config, costs=costs)
        if config.market.executor != "immediate":  # which would only tell more of the same fills
            valid = with_executor(valid, config, costs=costs)
        return Worlds(world, valid, str(prepared.manifest["content_hash"]))


class Learner(RoundLearner, Protocol):
    """An agent that learns. `steps`: environment steps so far, one per book and bar.

    A round collects and learns a little; it reports nothing of losses before the first update, and
    raises `TrainingError` before a loss that is not a number can reach the weights.
    """

    def policy(self) -> Policy:
        """The agent as it is now."""

    def weights(self) -> dict[str, Tensor]:
        """What `training.load_policy` makes the policy from again."""


def make_learner(config: Config, worlds: Worlds, directory: Path, seed: int) -> Learner:
    """The learner that `train.algo` names; directory: the seed's own.

    The encoder of experts is the run's, two directories up; `ready` has it pre-trained beforehand,
    otherwise that is done here.
    """
    if config.train.algo == "A2C":
        return A2C(config, worlds.train, seed)
    if is_sb3(config):
        # Stable-Baselines3 takes a second or two to import, and our own learners never use it.
        from echelon.agents.sb3 import Sb3Learner

        return Sb3Learner(config, worlds.train, seed)
    base = _encoder(config, worlds, directory, lambda: False)
    assert base is not None, "nobody asked it to stop"
    if config.train.algo == "HIERARCHY":
        # The router's Stable-Baselines3 takes seconds to import.
        from echelon.population.learner import HierarchyLearner

        return HierarchyLearner(config, worlds.train, worlds.valid, directory, seed, base.encoder)
    tables = directory / "tables"
    if config.train.algo == "APG":
        return APG(config, worlds.train, seed, base.encoder, tables)
    return ExpertLearner(config, worlds.train, seed, base.encoder, tables)


def encoder_hash(config: Config, directory: Path) -> str | None:
    """Hash of the run's encoder, which the learner in `directory` stands on; None without one."""
    if config.train.algo == "A2C" or is_sb3(config):
        return None
    return read_hash(directory.parents[1])


def ready(config: Config, worlds: Worlds, directory: Path, should_stop: Callable[[], bool]) -> bool:
    """Whether everything is there that the learner needs; False: stopped before it was.

    Experts need the run's encoder: whichever seed comes first pre-trains it, the others wait.
    """
    if config.train.algo == "A2C" or is_sb3(config):
        return True
    # Before the encoder is pre-trained, which takes minutes.
    refuse_settings(config)
    if config.train.algo == "APG":
        apg.refuse_settings(config, worlds.train)
    return _encoder(config, worlds, directory, should_stop) is not None


def _encoder(
    config: Config, worlds: Worlds, directory: Path, should_stop: Callable[[], bool]
) -> Pretrained | None:
    train = worlds.train
    if config.train.algo == "HIERARCHY":
        # What the router learns on is unseen by everything below it.
        train = parts_of(train, config.meta_router.window_share).experts
    return ensure_encoder(
        config,
        train,
        directory.parents[1],
        config.seed,
        should_stop=should_stop,
        valid=worlds.valid,
        data=worlds.data,
    )
