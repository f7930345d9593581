"""Learners and policies by the name in `train.algo`: what they are made from, and made ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from echelon.agents.learner import Learner, TrainingSetup, learner_class
from echelon.agents.pretrain import Pretrained, encoder_file_hash, ensure_encoder
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.algorithms import ALGORITHMS
from echelon.config.sizes import refuse_settings
from echelon.envs.world import World, world_of
from echelon.features.prepared import Prepared
from echelon.training.executors import with_executor


class Worlds(NamedTuple):
    """Where an agent learns and where it is validated; often the same market.

    data: hash of what both were made from
    """

    train: World
    valid: World
    data: str

    @staticmethod
    def from_prepared(prepared: Prepared, config: Config) -> Worlds:
        """Both windows of a prepared set; its test window is not in them.

        Only validation has the executor: learners collect with immediate fills.
        """
        world = world_of(prepared, config)
        costs = 1.0 if config.eval.use_fee else 0.0
        valid = world if costs else world_of(prepared, config, costs=costs)
        if config.market.executor != "immediate":  # which would only tell more of the same fills
            valid = with_executor(valid, config, costs=costs)
        return Worlds(world, valid, str(prepared.manifest["content_hash"]))


def make_learner(config: Config, worlds: Worlds, directory: Path, seed: int) -> Learner:
    """The learner that `train.algo` names; directory: the seed's own.

    The encoder of experts is the run's, two directories up; `ready` has it pre-trained beforehand,
    otherwise that is done here.
    """
    base = _encoder(config, worlds, directory) if _stands_on_encoder(config) else None
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
    return encoder_file_hash(directory.parents[1]) if _stands_on_encoder(config) else None


def ready(config: Config, worlds: Worlds, directory: Path, should_stop: Callable[[], bool]) -> bool:
    """Whether everything is there that the learner needs; False: stopped before it was.

    Experts need the run's encoder: whichever seed comes first pre-trains it, the others wait.
    """
    # Before the encoder is pre-trained, which takes minutes.
    refuse_settings(config)
    learner_class(config).refuse_world(config, worlds.train)
    return (
        not _stands_on_encoder(config)
        or _encoder(config, worlds, directory, should_stop) is not None
    )


def _stands_on_encoder(config: Config) -> bool:
    return ALGORITHMS[config.train.algo].pretrained


def _encoder(
    config: Config,
    worlds: Worlds,
    directory: Path,
    should_stop: Callable[[], bool] = lambda: False,
) -> Pretrained | None:
    return ensure_encoder(
        config,
        learner_class(config).pretraining_world(config, worlds.train),
        directory.parents[1],
        config.seed,
        should_stop=should_stop,
        valid=worlds.valid,
        data=worlds.data,
    )
