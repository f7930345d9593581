"""Networks of an expert: from embeddings and a book to one number per asset, and its value.

The market comes as embeddings z that are looked up, never encoded here. Actor and critics work on
each asset with the same weights, so the number of assets may change; absent assets are left out.

    actor    [z, weight, cash] per asset → layer → attention over the assets → layer → mean, log_std
             (in a population the expert's skill, the same for all assets, joins the first layer)
    critics  [z, weight, cash, action] per asset → layer → joined with its mean over the assets →
             layer → mean over the assets → layer → value; two of them, worked out as one batch

Actions are in (−1, 1), one per asset; what they mean is decided in `envs.act`, where the softmax
is. So the critics see the action and learn its meaning.

Axes: `B` rows of a batch, `N` assets, `D` embedding, `H` hidden width, `C` = 2 critics.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from echelon.config.agents import StateConfig
from echelon.models.encoders import init_linear

_HEADS = 4
_RELU_GAIN = math.sqrt(2)
N_CRITICS = 2
_ALL = StateConfig()
"""What is seen of the book where nothing else is said: all of it."""


class ExpertObs(NamedTuple):
    """What an expert sees: z[B,N,D]; weights[B,N]; cash[B]; present, free[B,N] bool.

    free: can be traded at this bar; of the others the action does not count
    """

    z: Tensor
    weights: Tensor
    cash: Tensor
    present: Tensor
    free: Tensor


class InputScale(nn.Module):
    """Embeddings brought to mean 0 and deviation 1 by what they are on the train window."""

    shift: Tensor
    scale: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(d_model))
        self.register_buffer("scale", torch.ones(d_model))

    def fit(self, z: Tensor, present: Tensor) -> None:
        """Take mean and deviation of z[..,N,D] over the cells that are present[..,N]."""
        cells = z[present].double()
        self.shift.copy_(cells.mean(0))
        self.scale.copy_(1.0 / cells.std(0).clamp(min=1e-4))

    def forward(self, z: Tensor) -> Tensor:
        """[..,D] -> [..,D]."""
        return (z - self.shift) * self.scale


def _inputs(obs: ExpertObs, z: Tensor, state: StateConfig) -> list[Tensor]:
    """Per asset: embedding, weight in units of an equal share, cash share; 0 for what is hidden."""
    count = obs.present.sum(-1, keepdim=True).clamp(min=1)
    weights = (obs.weights * count)[..., None]
    cash = obs.cash[:, None, None].expand_as(weights)
    if not state.include_pos:
        weights = torch.zeros_like(weights)
    return [z, weights, cash if state.include_cash else torch.zeros_like(cash)]


class ExpertActor(nn.Module):
    """A Gaussian per asset, before the tanh: mean and log of the standard deviation."""

    skill: Tensor

    def __init__(
        self, d_model: int, hidden: int, state: StateConfig = _ALL, skill_dim: int = 0
    ) -> None:
        """hidden: a multiple of 4 (`expert.hidden`); skill_dim: 0 for who has no skill"""
        super().__init__()
        self.state = state
        self.scale = InputScale(d_model)
        self.first = init_linear(nn.Linear(d_model + 2, hidden), _RELU_GAIN)
        self.ask = init_linear(nn.Linear(hidden, 3 * hidden))
        self.join = init_linear(nn.Linear(hidden, hidden))
        self.second = init_linear(nn.Linear(hidden, hidden), _RELU_GAIN)
        # A small gain: the first policy hardly depends on the state.
        self.last = init_linear(nn.Linear(hidden, 2), 0.01)
        with torch.no_grad():
            self.last.bias[1] = -1.0  # log_std
        self.skilled: nn.Linear | None = None
        if skill_dim:
            self.skilled = init_linear(nn.Linear(skill_dim, hidden, bias=False), _RELU_GAIN)
            self.register_buffer("skill", torch.zeros(skill_dim))

    def forward(self, obs: ExpertObs) -> tuple[Tensor, Tensor]:
        """(mean[B,N], log_std[B,N])."""
        h = self.first(torch.cat(_inputs(obs, self.scale(obs.z), self.state), dim=-1))
        if self.skilled is not None:
            # As if the skill were joined to every asset's input: it is the same for all of them.
            h = h + self.skilled(self.skill)
        h = fn.relu(h)
        # Attention of each asset over those present.
        batch, assets, width = h.shape
        shape = (batch, assets, 3, _HEADS, width // _HEADS)
        query, key, value = self.ask(h).view(shape).permute(2, 0, 3, 1, 4)
        # A book without any asset present attends to all of them: nothing of it counts.
        seen = (obs.present | ~obs.present.any(-1, keepdim=True))[:, None, None, :]
        # Without a mask attention is faster; an exported graph takes the mask as it comes.
        every = not torch.compiler.is_exporting() and bool(obs.present.all())
        mask = None if every else seen
        mixed = fn.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        h = h + self.join(mixed.transpose(1, 2).reshape(h.shape))
        mean, log_std = self.last(fn.relu(self.second(h))).unbind(-1)
        return mean, log_std

    def free(self, obs: ExpertObs) -> Tensor:
        """[B,N] which actions count."""
        return obs.free


class ExpertCritic(nn.Module):
    """Two values of an action in a state, from weights that have nothing in common."""

    def __init__(self, d_model: int, hidden: int, state: StateConfig = _ALL) -> None:
        super().__init__()
        self.state = state
        self.scale = InputScale(d_model)
        # The first layer of both reads the same input: one matrix product.
        self.first = nn.Linear(d_model + 3, N_CRITICS * hidden)
        init_linear(self.first, _RELU_GAIN)
        self.second = _Twin(2 * hidden, hidden, _RELU_GAIN)
        self.third = _Twin(hidden, hidden, _RELU_GAIN)
        self.last = _Twin(hidden, 1, 1.0)

    def forward(self, obs: ExpertObs, action: Tensor) -> Tensor:
        """q[2,B] of action[B,N]."""
        batch, assets = action.shape
        counts = (action * obs.free)[..., None]
        x = torch.cat([*_inputs(obs, self.scale(obs.z), self.state), counts], dim=-1)
        share = obs.present / obs.present.sum(-1, keepdim=True).clamp(min=1)
        h = fn.relu(self.first(x)).view(batch, assets, N_CRITICS, -1).permute(2, 0, 1, 3)
        # Of [h, mean over the assets] the second part is the same for all assets: one product.
        mean = _weighted_mean(h, share)
        deep = self.second(h.reshape(N_CRITICS, batch * assets, -1), rows=slice(None, h.shape[-1]))
        common = self.second(mean, rows=slice(h.shape[-1], None), bias=False)
        deep = deep.view(N_CRITICS, batch, assets, -1) + common[:, :, None]
        pooled = _weighted_mean(fn.relu(deep), share)
        q: Tensor = self.last(fn.relu(self.third(pooled))).squeeze(-1)
        return q


def _weighted_mean(h: Tensor, share: Tensor) -> Tensor:
    """[C,B,N,H] with shares[B,N] -> [C,B,H]."""
    return (h * share[None, :, :, None]).sum(2)


class _Twin(nn.Module):
    """Two linear layers applied to two inputs: [2,B,I] -> [2,B,O]."""

    def __init__(self, n_in: int, n_out: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N_CRITICS, n_in, n_out) * (gain / math.sqrt(n_in)))
        self.bias = nn.Parameter(torch.zeros(N_CRITICS, 1, n_out))

    def forward(self, x: Tensor, rows: slice = slice(None), *, bias: bool = True) -> Tensor:
        """rows: of the weights, where x is a part of the input"""
        weight = self.weight[:, rows]
        return torch.baddbmm(self.bias, x, weight) if bias else torch.bmm(x, weight)
