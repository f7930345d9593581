"""Plain networks and replay for control tasks of a few numbers, for benchmarks and tests.

Sizes and first weights are those of Stable-Baselines3's `MlpPolicy` (torch's own for linear
layers), so that both sides begin alike; `load_sb3` makes them equal.

Axes: `B` rows of a batch, `O` numbers of an observation, `A` of an action, `H` hidden width;
`G` learners side by side, `E` episodes of each, `T` their steps, `L` those of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.agents.offpolicy import ReplayBatch
from echelon.config.agents import ExpertConfig, TrainConfig

Floats = NDArray[np.float32]


class CoreSettings(NamedTuple):
    """What SAC and TD3 are told: the sections of a configuration."""

    train: TrainConfig
    expert: ExpertConfig


def core_settings(**values: Any) -> CoreSettings:
    """Sections with these values; unlike a configuration's they may lie outside of its bounds."""
    train = {k: v for k, v in values.items() if k in TrainConfig.model_fields}
    expert = {k: v for k, v in values.items() if k not in train}
    rates = {"lr_actor": 3e-4, "lr_critic": 3e-4}
    return CoreSettings(
        TrainConfig.model_construct(**(rates | train)), ExpertConfig.model_construct(**expert)
    )


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


class GaussianGroup(nn.Module):
    """Actors of G learners as one: rows go round the learners, the learner changing fastest."""

    def __init__(self, members: Sequence[GaussianMLP]) -> None:
        super().__init__()
        layers = [[*member.layers, member.last] for member in members]
        self.weights, self.biases = _stacked(layers)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, log_std)[B·G,A] at obs[B·G,O]."""
        h = by_learner(obs, len(self.weights[0]))
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias, torch.relu(h) if k else h, weight)
        mean, log_std = h.transpose(0, 1).flatten(0, 1).chunk(2, dim=-1)
        return mean, log_std

    def free(self, obs: Tensor) -> Tensor | None:
        """Everything counts."""
        return None


class TwinGroup(nn.Module):
    """Twin critics of G learners as one; rows as in `GaussianGroup`."""

    def __init__(self, members: Sequence[TwinMLP]) -> None:
        super().__init__()
        (first,), (bias,) = _stacked([[member.first] for member in members])
        self.first, self.first_bias = nn.Parameter(first), nn.Parameter(bias)
        later = [[m.weights for m in members], [m.biases for m in members]]
        # [2·G,…], the learner changing fastest.
        self.weights, self.biases = (
            nn.ParameterList(
                torch.stack([*layer], dim=1).flatten(0, 1).detach()
                for layer in zip(*parts, strict=True)
            )
            for parts in later
        )

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """q[2,B·G]."""
        n = len(self.first)
        x = by_learner(torch.cat([obs, action], dim=-1), n)
        h = torch.cat(torch.baddbmm(self.first_bias, x, self.first).chunk(2, dim=-1))
        for weight, bias in zip(self.weights, self.biases, strict=True):
            h = torch.baddbmm(bias, torch.relu(h), weight)
        return h.view(2, n, -1).transpose(1, 2).flatten(1)


def by_learner(rows: Tensor, n_learners: int) -> Tensor:
    """[B·G,…] → [G,B,…]."""
    return rows.view(-1, n_learners, *rows.shape[1:]).transpose(0, 1)


def _stacked(layers: Sequence[Sequence[nn.Linear]]) -> tuple[nn.ParameterList, nn.ParameterList]:
    """Weights [G,in,out] and biases [G,1,out] of each layer; layers: of each learner."""
    rows = [*zip(*layers, strict=True)]
    weights = (torch.stack([layer.weight.detach().T for layer in row]) for row in rows)
    biases = (torch.stack([layer.bias.detach()[None] for layer in row]) for row in rows)
    return nn.ParameterList(weights), nn.ParameterList(biases)


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

    def sample(self, n: int, rng: np.random.Generator) -> ReplayBatch:
        """Draw n of them, with repetition."""
        slots = rng.integers(0, min(self.added, len(self.reward)), n)
        parts = (self.obs, self.action, self.reward, self.discount, self.next_obs)
        return ReplayBatch(*(torch.from_numpy(part.take(slots, axis=0)) for part in parts))


class Lived(NamedTuple):
    """Steps, with the Gaussian that each action came from.

    obs, next_obs[…,O]; action = tanh(raw), raw, mean, log_std[…,A]; raw_log_prob[…]: of raw
    """

    obs: Tensor
    action: Tensor
    raw: Tensor
    raw_log_prob: Tensor
    mean: Tensor
    log_std: Tensor
    next_obs: Tensor


class Drawn(NamedTuple):
    """Sequences of n for each of G learners.

    steps[L,n,G,…]; source[n,G]: who made them; last[L,n,G] bool: the last step of its episode
    """

    steps: Lived
    source: Tensor
    last: Tensor


class Episodes:
    """Whole episodes of G learners side by side, who may learn from those of their population."""

    def __init__(
        self, n_learners: int, capacity: int, n_steps: int, n_obs: int, n_actions: int
    ) -> None:
        """capacity: episodes of each learner, all that it will ever live through."""
        place = (n_learners, capacity, n_steps)
        wide, acts = (*place, n_obs), (*place, n_actions)
        shapes = (wide, acts, acts, place, acts, acts, wide)
        self.steps = Lived(*(torch.zeros(shape) for shape in shapes))
        self.size = 0

    def add(self, lived: Lived) -> None:
        """Remember episodes [E,T,G,…], E of each learner."""
        end = self.size + len(lived.obs)
        if end > self.steps.obs.shape[1]:
            raise ValueError(f"no room for episode {end} among {self.steps.obs.shape[1]}")
        for column, part in zip(self.steps, lived, strict=True):
            column[:, self.size : end] = part.movedim(2, 0)
        self.size = end

    def draw(
        self,
        n: int,
        length: int,
        rng: np.random.Generator,
        *,
        n_own: int,
        fresh: int,
        population: int,
    ) -> Drawn:
        """Sequences within an episode, every start as likely as any other.

        n_own of the n come from the learner's latest `fresh` episodes, the others from everybody's
        in its population: learners k·population and following. 1: from all its own
        """
        n_learners, _, n_steps = self.steps.obs.shape[:3]
        learner = np.arange(n_learners)
        source = np.tile(learner, (n, 1))
        among = rng.integers(0, population, (n - n_own, n_learners))
        source[n_own:] = learner // population * population + among
        first = np.where(np.arange(n) < n_own, max(0, self.size - fresh), 0)
        episode = rng.integers(first[:, None], self.size, (n, n_learners))
        begin = rng.integers(0, n_steps - length + 1, (n, n_learners))
        step = begin + np.arange(length)[:, None, None]
        steps = Lived(*(column[source, episode, step] for column in self.steps))
        return Drawn(steps, torch.from_numpy(source), torch.from_numpy(step == n_steps - 1))
