"""Small learners of Stable-Baselines3, to see that they train on our environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO, SAC

from echelon.envs.act import ActionKind

_PPO = {"n_steps": 32, "batch_size": 32, "n_epochs": 2}
_SETTINGS: dict[str, tuple[type, dict[str, Any]]] = {
    "A2C": (A2C, {"n_steps": 16}),
    "PPO": (PPO, _PPO),
    "SAC": (SAC, {"learning_starts": 40, "batch_size": 16, "buffer_size": 400}),
    "MaskablePPO": (MaskablePPO, _PPO),
}
TRAINED: tuple[tuple[str, ActionKind], ...] = (
    ("A2C", "discrete"),
    ("A2C", "weights"),
    ("PPO", "discrete"),
    ("PPO", "weights"),
    ("SAC", "weights"),
    ("MaskablePPO", "discrete"),
)
"""Which learner acts how; SAC knows no discrete actions, masks are for discrete ones only."""


def make_learner(name: str, env: Any, **settings: Any) -> Any:
    """The learner of that name with a tiny network."""
    kind, usual = _SETTINGS[name]
    network = {"net_arch": [8]}
    return kind(
        "MultiInputPolicy",
        env,
        seed=0,
        device="cpu",
        policy_kwargs=network,
        **(usual | settings),
    )


def assert_learns(model: Any, steps: int) -> None:
    """Train, and check that the weights moved and that weights and losses are finite."""
    before = _weights(model)
    model.learn(steps)
    after = _weights(model)
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)
    losses = {k: v for k, v in model.logger.name_to_value.items() if "loss" in k}
    assert losses, "the learner logged no loss"
    assert all(np.isfinite(v) for v in losses.values()), losses


def _weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().ravel().clone() for p in model.policy.parameters()])
