"""Plain networks for control tasks of a few numbers, shared by `bench/pendulum.py` and the tests.

Sizes and first weights are those of Stable-Baselines3's `MlpPolicy` (torch's own for linear
layers), so that both sides begin alike; `load_sb3` makes them equal.

Axes: `B` rows of a batch, `O` numbers of an observation, `A` of an action, `H` hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.agents.offpolicy import Batch

Floats = NDArray[np.float32]


class GaussianMLP(nn.Module):
    """Layers with ReLU, then mean and log of the standard deviation as one linear layer."""

    def __init__(self, n_obs: int, n_actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [n_obs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 2 * n_actions)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """(mean[B,A], log_std[B,A])."""
        h = obs
        for layer in self.layers:
            h = torch.relu(layer(h))
        mean, log_std = self.last(h).chunk(2, dim=-1)
        return mean, log_std

    def free(self, obs: Tensor) -> Tensor | None:
        """Everything counts."""
        return None


class TwinMLP(nn.Module):
    """Two critics: the first layer of both is one matrix product, the others are one batch."""

    def __init__(self, n_obs: int, n_actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.first = nn.Linear(n_obs + n_actions, 2 * hidden[0])
        sizes = [*hidden, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for n_in, n_out in pairwise(sizes):
            bound = 1.0 / math.sqrt(n_in)
            self.weights.append(nn.Parameter(torch.empty(2, n_in, n_out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(2, 1, n_out).uniform_(-bound, bound)))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """q[2,B]."""
        x = self.first(torch.cat([obs, action], dim=-1))
        h = x.view(len(x), 2, -1).transpose(0, 1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            h = torch.baddbmm(bias, torch.relu(h), weight)
        return h.squeeze(-1)


@torch.no_grad()
def load_sb3(policy: Any, actor: GaussianMLP, critic: TwinMLP) -> None:
    """Copy the weights of SB3's SAC or TD3 policy; TD3's actor has no deviation: ours is left."""
    theirs = policy.actor
    if hasattr(theirs, "latent_pi"):
        hidden = _linear(theirs.latent_pi)
        heads = [theirs.mu, theirs.log_std]
    else:
        *hidden, mean = _linear(theirs.mu)
        heads = [mean]
    for ours, layer in zip(actor.layers, hidden, strict=True):
        ours.load_state_dict(layer.state_dict())
    rows = sum(head.out_features for head in heads)
    actor.last.weight[:rows] = torch.cat([head.weight for head in heads])
    actor.last.bias[:rows] = torch.cat([head.bias for head in heads])
    first, *rest = zip(*(_linear(net) for net in policy.critic.q_networks), strict=True)
    critic.first.weight.copy_(torch.cat([layer.weight for layer in first]))
    critic.first.bias.copy_(torch.cat([layer.bias for layer in first]))
    for weight, bias, pair in zip(critic.weights, critic.biases, rest, strict=True):
        weight.copy_(torch.stack([layer.weight.T for layer in pair]))
        bias.copy_(torch.stack([layer.bias[None] for layer in pair]))


def _linear(layers: nn.Module) -> list[nn.Linear]:
    return [layer for layer in layers.modules() if isinstance(layer, nn.Linear)]


class Ring:
    """Transitions of one environment, the oldest overwritten."""

    def __init__(self, capacity: int, n_obs: int, n_actions: int) -> None:
        self.obs = np.zeros((capacity, n_obs), dtype=np.float32)
        self.next_obs = np.zeros_like(self.obs)
        self.action = np.zeros((capacity, n_actions), dtype=np.float32)
        self.reward = np.zeros(capacity, dtype=np.float32)
        self.discount = np.zeros(capacity, dtype=np.float32)
        self.added = 0

    def add(
        self, obs: Floats, action: Floats, reward: float, discount: float, next_obs: Floats
    ) -> None:
        """Remember one transition."""
        k = self.added % len(self.reward)
        self.obs[k], self.action[k], self.next_obs[k] = obs, action, next_obs
        self.reward[k], self.discount[k] = reward, discount
        self.added += 1

    def sample(self, n: int, chance: np.random.Generator) -> Batch:
        """Draw n of them, with repetition."""
        slots = chance.integers(0, min(self.added, len(self.reward)), n)
        parts = (self.obs, self.action, self.reward, self.discount, self.next_obs)
        return Batch(*(torch.from_numpy(part.take(slots, axis=0)) for part in parts))
