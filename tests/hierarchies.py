"""A hierarchy so small that a round of it takes a moment, and whether two are the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from worlds import make_config

from echelon.agents.learner import TrainingSetup
from echelon.envs import World
from echelon.models.encoders import build_encoder
from echelon.population.learner import HierarchyLearner
from echelon.runs.metrics import is_timing

SMALL = (
    *("window=6", "model.d_model=8", "model.n_layers=1", "expert.hidden=8", "train.books=4"),
    *("train.episode_steps=12", "train.gamma=0.9", "train.algo=HIERARCHY", "reward.scale=100"),
    *("train.lr_actor=0.003", "train.lr_critic=0.003", "expert.batch_size=16"),
    *("expert.learning_starts=16", "expert.updates_per_step=0.25", "expert.warmup_updates=0"),
    *("experts.n_experts=3", "experts.skill_dim=4", "experts.responsibility_bars=5"),
    *("experts.sharing.buffer_size=3000", "experts.sharing.sequence_steps=3"),
    *("experts.sharing.fresh_steps=200", "trainer.round_steps=16", "trainer.probe_states=12"),
    *("trainer.training_schedule.experts={freq: 2, steps: 16}", "meta_router.n_steps=32"),
    *("trainer.training_schedule.router={freq: 4, steps: 32}", "meta_router.n_envs=4"),
    *("trainer.training_schedule.population={freq: 4, mutation_rate: 0.1}", "lora.rank=2"),
    *("meta_router.batch_size=16", "meta_router.episode_decisions=4", "meta_router.every_bars=2"),
    *("meta_router.horizons=[2, 5]", "trainer.evolution.windows=2", "lora.every_updates=2"),
    *("lora.refresh_updates=3", "lora.lr=0.01"),
)


def make_learner(world: World, directory: Path, *more: str, seed: int = 7) -> HierarchyLearner:
    config = make_config(*SMALL, *more)
    torch.manual_seed(3)
    encoder = build_encoder(config, world.x.shape[2])
    return HierarchyLearner(TrainingSetup(config, world, world, directory, seed, encoder))


def trained(learner: HierarchyLearner, rounds: int) -> HierarchyLearner:
    for _ in range(rounds):
        learner.train_once()
    return learner


class Everything(NamedTuple):
    """What a checkpoint of a hierarchy would hold, but for what clocks say."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def everything(learner: HierarchyLearner) -> Everything:
    tensors, state = learner.state()
    metrics = {k: v for k, v in state["metrics"].items() if not is_timing(k)}
    cloned = {name: value.clone() for name, value in tensors.items()}
    return Everything(cloned, copy.deepcopy(state) | {"metrics": metrics})


def assert_equal(left: Everything, right: Everything) -> None:
    assert str(left.state) == str(right.state)  # as text: NaN is not equal to itself
    assert left.tensors.keys() == right.tensors.keys()
    for name, value in left.tensors.items():
        assert torch.equal(value.nan_to_num(), right.tensors[name].nan_to_num()), name


def assert_same(left: HierarchyLearner, right: HierarchyLearner) -> None:
    assert_equal(everything(left), everything(right))
