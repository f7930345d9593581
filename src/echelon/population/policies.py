"""Policies of a hierarchy, from the weights that its learner leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon.agents.expert_core import WeightPolicy
from echelon.agents.tables import EmbeddingTable
from echelon.config import Config
from echelon.models import Encoder, ExpertActor, build_encoder
from echelon.population.policy import HierarchyPolicy
from echelon.population.router import Router
from echelon.runs.checkpoint import below_prefix


def expert_policy(
    config: Config,
    weights: Mapping[str, Tensor],
    base: Encoder,
    seed: int,
    number: int,
    tables: tuple[EmbeddingTable, ...] = (),
) -> WeightPolicy:
    """An expert's policy from what `Member.acting` gave; tables: of the base encoder."""
    actor = ExpertActor(
        base.d_model, config.expert.hidden, config.state, skill_dim=config.experts.skill_dim
    )
    actor.load_state_dict(below_prefix("actor.", weights))
    encoder, own = base, below_prefix("encoder.", weights)
    plain = base.state_dict()
    if any(not torch.equal(value, plain[name]) for name, value in own.items()):
        encoder = build_encoder(config, base.n_features)
        encoder.load_state_dict(own)
        tables = ()
    return WeightPolicy(encoder, actor, config, seed, f"expert {number}", keep=True, tables=tables)


def load_hierarchy(
    config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str
) -> HierarchyPolicy:
    """The policy of what `HierarchyLearner.weights` gave."""
    with torch.random.fork_rng(devices=[]):  # drawing weights would move the caller's generator
        base = build_encoder(config, n_features)
    base.load_state_dict(below_prefix("encoder.", weights))
    n_experts = config.experts.n_experts
    experts = [
        expert_policy(config, below_prefix(f"expert.{k}.", weights), base, seed, k)
        for k in range(n_experts)
    ]
    router = Router(config, n_experts, seed)
    router.load(below_prefix("router.", weights))
    return HierarchyPolicy(experts, router, config, seed, name)
