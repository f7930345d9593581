"""Policies from the weights that their learners wrote."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from echelon.agents.policy import ActorPolicy, WeightPolicy
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.models import ExpertActor, build_actor_critic, build_encoder
from echelon.runs.checkpoint import below_prefix


def is_sb3(config: Config) -> bool:
    """Whether `train.algo` is one of Stable-Baselines3's."""
    return config.train.algo.startswith("SB3-")


def load_policy(
    config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str = "agent"
) -> Policy:
    """The policy of a learner's `weights`; raises RuntimeError where they do not fit."""
    if config.train.algo == "A2C":
        net = build_actor_critic(config, n_features)
        net.load_state_dict(dict(weights))
        return ActorPolicy(net, config, seed, name)
    if is_sb3(config):
        from echelon.agents.sb3 import load_sb3_policy

        return load_sb3_policy(config, weights, n_features, seed, name)
    if config.train.algo == "HIERARCHY":
        from echelon.population.policies import load_hierarchy

        return load_hierarchy(config, weights, n_features, seed, name)
    encoder = build_encoder(config, n_features)
    encoder.load_state_dict(below_prefix("encoder.", weights))
    actor = ExpertActor(config.model.d_model, config.expert.hidden, config.state)
    actor.load_state_dict(below_prefix("actor.", weights))
    return WeightPolicy(encoder, actor, config, seed, name)
