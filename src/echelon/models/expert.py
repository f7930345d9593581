"""Networks of an expert: from embeddings and a book to one number per asset, and its value.

The market comes as embeddings z that are looked up, never encoded here. Actor and critics work on
each asset with the same weights, so the number of assets may change; absent assets are left out.

    actor    [z, weight, cash] per asset → layer → attention over the assets → layer → mean, log_std
             (in a population the expert's skill, the same for all assets, joins the first layer)
    critics  [z, weight, cash, action] per asset → layer → joined with its mean over the assets →
             layer → mean over the assets → layer → value; two of them, worked out as one batch

Actions are in (−1, 1), one per asset; what they mean is decided in `envs.act`, where the softmax
is. So the critics see the action and learn its meaning.

`TopKActor` is for wide universes and gives target weights at once. Untrained it is the rule "hold
the K highest scores, and keep a holding until its rank leaves K · buffer":

1. An asset's rating is its score, the first entry of its embedding, in deviations of the section;
   plus what a small network adds, which begins at zero.
2. Among the K highest is a matter of degree: a threshold is found such that memberships
   (rating − threshold) / width + ½, cut at 0 and 1, add up to K. A whole one is 1/K of the book.
3. What is held and among the K · buffer highest stays as it is; the highest take the places left.
4. Weights go a share of the way to what is wished, which is trading in staggered tranches.

What is held never grows by itself, and so neither do gradients, however many bars they pass.

K, buffer, width and share are learned with the network, all as distances from the rule, so that
weight decay pulls towards it. Nothing is larger than [B,N,H].

Axes: `B` rows of a batch, `N` assets, `D` embedding, `H` hidden width, `C` = 2 critics.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from echelon.config import Config
from echelon.config.agents import ExpertConfig, StateConfig
from echelon.models.encoders import init_linear

_HEADS = 4
_RELU_GAIN = math.sqrt(2)
N_CRITICS = 2
_WIDTH = 0.25
"""Deviations of the section over which an asset becomes a member, before anything is learned."""
_LAST_BIT = 0.02
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


class TopKActor(nn.Module):
    """Target weights, one per asset: the top K by score, as adjusted by what was learned."""

    def __init__(self, d_model: int, config: ExpertConfig, state: StateConfig = _ALL) -> None:
        super().__init__()
        self.state, self.top_share, self.buffer = state, config.top_share, config.buffer
        self.speed = math.log(config.speed / (1.0 - config.speed))
        self.scale = InputScale(d_model)
        self.first = init_linear(nn.Linear(d_model + 2, config.hidden), _RELU_GAIN)
        self.second = init_linear(nn.Linear(config.hidden, config.hidden), _RELU_GAIN)
        self.last = nn.Linear(config.hidden, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        # Of the logarithms of K, width and buffer, and of the speed before the sigmoid.
        self.moved = nn.Parameter(torch.zeros(4))

    def forward(self, obs: ExpertObs) -> Tensor:
        """target[B,N] ≥ 0, 0 where not free."""
        wished, each = self.wish(obs)
        gap = wished - obs.weights
        share = torch.sigmoid(self.speed + self.moved[3])
        # The last bit goes at once: a way that only ever becomes shorter has no end.
        way = torch.minimum(gap.abs(), share * gap.abs() + _LAST_BIT * each)
        target = (obs.weights + gap.sign() * way) * (obs.free & obs.present)
        # Cash waits for nothing: what sells and small orders leave of it goes the same way.
        stuck = (obs.weights * ~obs.free).sum(-1, keepdim=True)
        idle = (1.0 - stuck - target.sum(-1, keepdim=True)).clamp(min=0.0)
        rest = (wished - target).clamp(min=0.0)
        share = (idle / rest.sum(-1, keepdim=True).clamp(min=1e-6)).clamp(max=1.0)
        return target + share * rest

    def wish(self, obs: ExpertObs) -> tuple[Tensor, Tensor]:
        """(weights[B,N] wished of what is free, weight[B,1] of a whole member)."""
        free = obs.free & obs.present
        count = obs.present.sum(-1, keepdim=True).clamp(min=1)
        k = (self.top_share * self.moved[0].exp() * count).clamp(min=1.0)
        width = _WIDTH * self.moved[1].exp()
        score = self._scores(obs, count)
        # What cannot be sold takes its places.
        stuck = (obs.weights * ~free).sum(-1, keepdim=True).clamp(0.0, 1.0)
        places = (k * (1.0 - stuck)).minimum(free.sum(-1, keepdim=True))
        if not self.state.include_pos:
            return memberships(score, places, width, free) / k, 1.0 / k
        kept = (k * self.buffer * self.moved[2].exp()).minimum(count)
        most = memberships(score, kept, width, obs.present)
        least = torch.minimum(obs.weights * k, most) * free
        return memberships(score, places, width, free, least, most) / k, 1.0 / k

    def _scores(self, obs: ExpertObs, count: Tensor) -> Tensor:
        """[B,N] the first embedding in deviations of the section, and what is added to it."""
        score = torch.where(obs.present, obs.z[..., 0], 0.0)
        mean = score.sum(-1, keepdim=True) / count
        off = torch.where(obs.present, score - mean, 0.0)
        deviation = (off.square().sum(-1, keepdim=True) / count).sqrt().clamp(min=1e-6)
        book = obs._replace(weights=obs.weights.detach(), cash=obs.cash.detach())
        x = torch.cat(_inputs(book, self.scale(obs.z), self.state), dim=-1)
        added: Tensor = self.last(fn.relu(self.second(fn.relu(self.first(x))))).squeeze(-1)
        return off / deviation + added


def memberships(
    rating: Tensor,
    places: Tensor,
    width: Tensor,
    free: Tensor,
    least: Tensor | None = None,
    most: Tensor | None = None,
) -> Tensor:
    """[B,N] in 0 to 1, together `places`[B,1] of those that are free[B,N], the highest of rating.

    least, most[B,N]: between which they are, whatever the rating
    The sum over the assets falls with the threshold along straight lines, from each place where one
    begins to fall or stops to the next: of these, in order, the threshold is read off. One step of
    Newton's then carries the gradient through it.
    """
    below = torch.zeros_like(rating) if least is None else least * free
    above = free.to(rating.dtype) if most is None else most * free

    def members(threshold: Tensor) -> Tensor:
        by_rating = ((rating - threshold) / width + 0.5).clamp(0.0, 1.0)
        return torch.maximum(torch.minimum(by_rating, above), below)

    with torch.no_grad():
        ends = torch.cat([rating + width * (0.5 - above), rating + width * (0.5 - below)], dim=-1)
        each = free / width
        falls = torch.cat([-each, each], dim=-1)
        ends, order = ends.sort(dim=-1)
        slope = falls.gather(-1, order).cumsum(-1)
        steps = slope[:, :-1] * (ends[:, 1:] - ends[:, :-1])
        sums = above.sum(-1, keepdim=True) + fn.pad(steps.cumsum(-1), (1, 0))
        at = ((sums >= places).sum(-1, keepdim=True) - 1).clamp(min=0)
        falling = slope.gather(-1, at).clamp(max=-1e-6)
        threshold = ends.gather(-1, at) + (places - sums.gather(-1, at)) / falling
        by_rating = (rating - threshold) / width + 0.5
        edge = (by_rating > below) & (by_rating < above)
        n_edge = edge.sum(-1, keepdim=True).clamp(min=1)
    surplus = members(threshold).sum(-1, keepdim=True) - places
    return members(threshold + surplus * width / n_edge)


def build_actor(config: Config, d_model: int) -> ExpertActor | TopKActor:
    """The actor that the configuration names, on embeddings of D = d_model."""
    if config.expert.actor == "top_k":
        return TopKActor(d_model, config.expert, config.state)
    return ExpertActor(d_model, config.expert.hidden, config.state)


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
