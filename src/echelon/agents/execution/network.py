"""The network of execution: a public branch, a private branch, the direction.

1. **Public**: yesterday's ticks are encoded; the last of them says where today's encoding begins,
   and each is looked at again at its own time of day. Today's ticks go on from there, causally. Row
   t of the table is what is known of the market as tick t *begins*: it saw ticks up to t − 1. The
   oracle's table, for teachers only, also holds an encoding of ticks t to the day's end, run
   backwards.
2. **Private**: the order's own steps so far (`task.PRIVATE`), causally.
3. Public, public × direction, private and direction meet in two small networks, for the policy and
   for the value. Nearly all that the market says has the opposite sense for the opposite side, so
   the product saves the network from finding that out.

Sequences are read causally, by a GRU, an LSTM or a block of self-attention: what comes out at a
place depends on it and on what is before it. Each runs over a whole sequence, or place by place
with a hidden state; both give the same numbers.

Sequences may be read in blocks of several ticks (`NetworkSettings.block`): those of a block side
by side are one input. What a block says is known when it is whole, so that a step which begins
inside one knows the ticks before it. A day of 390 minutes has 39 inputs at ten ticks a block.

The table depends on the day alone, never on an order: **a day is encoded once and looked up by all
orders and steps on it**. That is where the speed comes from, and why the learners are our own: with
observations of Stable-Baselines3, every order would carry the whole day and have it encoded again
at each of its steps.

Axes: `E` orders, `D` days, `T` ticks, `F` features, `S` steps, `H` hidden units, `A` numbers that
say a policy; `B` sequences, `L` places, `I` inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from echelon.agents.execution.heads import FractionHead, RateHead
from echelon.agents.execution.task import PRIVATE, step_ticks
from echelon.config.execution import ExecutionConfig
from echelon.errors import ConfigError
from echelon.execution.features import PublicArrays
from echelon.execution.interpreters import QLIB_FRACTIONS, Fractions, TwapRate
from echelon.execution.orders import ParentOrders

_DAYS_AT_ONCE = 128
"""Days encoded together where no gradient is wanted: their tables stay in the cache."""

SequenceKind = Literal["gru", "lstm", "attention"]
HiddenState = Any
"""What a sequence network carries from place to place; None at the beginning."""


class Recurrent(nn.Module):
    """A GRU or an LSTM, after a layer that mixes the inputs: x[B,L,I] → [B,L,H]."""

    def __init__(self, kind: Literal["gru", "lstm"], n_inputs: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.inputs = nn.Linear(n_inputs, hidden)
        make = nn.GRU if kind == "gru" else nn.LSTM
        self.cells = make(hidden, hidden, batch_first=True)

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """[B,L,H] of x[B,L,I]; first[B,H]: what is known before the first place."""
        state: HiddenState = None
        if first is not None:
            h = first[None].contiguous()
            state = h if self.kind == "gru" else (h, torch.zeros_like(h))
        out: Tensor = self.cells(torch.relu(self.inputs(x)), state)[0]
        return out

    def step(self, x: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """(out[B,H], state) of one place x[B,I]."""
        out, state = self.cells(torch.relu(self.inputs(x))[:, None], state)
        return out[:, 0], state


class CausalAttention(nn.Module):
    """The same by one block: attention to this and earlier places, then a layer for each place."""

    def __init__(self, n_inputs: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(n_inputs, hidden)
        self.before = nn.LayerNorm(hidden)
        self.to_heads = nn.Linear(hidden, 3 * hidden)
        self.mixed = nn.Linear(hidden, hidden)
        self.between = nn.LayerNorm(hidden)
        self.own = nn.Sequential(
            nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden)
        )

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """[B,L,H] of x[B,L,I]; first[B,H] is a place before the others."""
        h = self.inputs(x)
        h = h + _places(h.shape[1], h.shape[2])
        if first is None:
            return self._block(h)
        return self._block(torch.cat([first[:, None], h], dim=1))[:, 1:]

    def step(self, x: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """(out[B,H], state) of one place x[B,I]; the state is all inputs so far."""
        seen = x[:, None] if state is None else torch.cat([state, x[:, None]], dim=1)
        return self(seen)[:, -1], seen

    def _block(self, h: Tensor) -> Tensor:
        batch, length, hidden = h.shape
        parts = self.to_heads(self.before(h)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.mixed(seen.transpose(1, 2).reshape(batch, length, hidden))
        out: Tensor = h + self.own(self.between(h))
        return out


@dataclass(frozen=True)
class NetworkSettings:
    """Shape of the network.

    sequence: of both branches; heads: of attention
    fractions: categorical actions; empty: a continuous rate, up to `rate_max` × TWAP
    first_std: of u, at first, for the continuous rate
    block: ticks of an input of the public sequences
    oracle: sees the rest of the day, too; to teach, never to trade
    """

    sequence: SequenceKind = "gru"
    hidden: int = 64
    heads: int = 4
    fractions: tuple[float, ...] = QLIB_FRACTIONS
    rate_max: float = 4.0
    first_std: float = 0.5
    oracle: bool = False
    block: int = 1

    def __post_init__(self) -> None:
        if self.sequence not in ("gru", "lstm", "attention"):
            raise ConfigError(
                f"sequence = {self.sequence!r} must be 'gru', 'lstm' or 'attention'. Correct it."
            )
        if self.hidden < 2 or self.hidden % 2 or self.hidden % self.heads:
            raise ConfigError(
                f"hidden = {self.hidden} must be even and a multiple of heads = {self.heads}."
                " Correct one of them."
            )

        if self.block < 1:
            raise ConfigError(f"block = {self.block} must be a number of ticks from 1. Correct it.")

    @property
    def act(self) -> Fractions | TwapRate:
        """What actions mean."""
        return Fractions(self.fractions) if self.fractions else TwapRate(self.rate_max)

    @staticmethod
    def from_config(config: ExecutionConfig) -> NetworkSettings:
        """As the section `execution` has it."""
        return NetworkSettings(
            sequence=config.sequence,
            hidden=config.hidden,
            fractions=config.fractions if config.actions == "fractions" else (),
            rate_max=config.rate_max,
            block=config.block,
        )

    @staticmethod
    def from_json(facts: dict[str, Any]) -> NetworkSettings:
        """As `asdict` gave it, through JSON."""
        return NetworkSettings(**{**facts, "fractions": tuple(facts["fractions"])})


class PolicyOutput(NamedTuple):
    """params[…,A]: of the policy; value[…]: expected of the steps to come."""

    params: Tensor
    value: Tensor


class ExecutionNet(nn.Module):
    """See the module."""

    def __init__(self, settings: NetworkSettings, n_features: int) -> None:
        super().__init__()
        self.settings = settings
        self.n_features = n_features
        act = settings.act
        self.head = FractionHead(act) if isinstance(act, Fractions) else RateHead(act)
        hidden = settings.hidden

        def over_time(n_inputs: int) -> Recurrent | CausalAttention:
            if settings.sequence == "attention":
                return CausalAttention(n_inputs, hidden, settings.heads)
            return Recurrent(settings.sequence, n_inputs, hidden)

        n_inputs = settings.block * n_features
        self.yesterday = over_time(n_inputs)
        self.morning = nn.Linear(hidden, hidden)
        self.today = over_time(n_inputs)
        self.future = over_time(n_inputs) if settings.oracle else None
        self.public = nn.Linear((3 if settings.oracle else 2) * hidden, hidden)
        self.private = over_time(len(PRIVATE))
        self.actor = _mixer(3 * hidden + 1, hidden, self.head.n_outputs)
        self.critic = _mixer(3 * hidden + 1, hidden, 1)
        # A policy that begins near its bias begins as TWAP, or choosing evenly.
        last = self.actor[-1]
        assert isinstance(last, nn.Linear)
        nn.init.orthogonal_(last.weight, 0.01)
        last.bias.data.copy_(self.head.first_bias())
        spread = 0 if settings.fractions else 1
        self.log_std = nn.Parameter(torch.full((spread,), float(np.log(settings.first_std))))

    def table(self, today: Tensor, yesterday: Tensor) -> Tensor:
        """[D,T,H] of features[D,T,F]: row t is what is known as tick t begins."""
        n_ticks, block = today.shape[1], self.settings.block
        today, yesterday = _blocks(today, block), _blocks(yesterday, block)
        before = self.yesterday(yesterday)
        morning = torch.tanh(self.morning(before[:, -1]))
        sofar = torch.cat([morning[:, None], self.today(today, morning)[:, :-1]], dim=1)
        parts = [sofar, before]
        if self.future is not None:
            parts.append(self.future(today.flip(1)).flip(1))
        known = torch.relu(self.public(torch.cat(parts, dim=-1)))
        return known if block == 1 else known.repeat_interleave(block, dim=1)[:, :n_ticks]

    def sequence(self, public: Tensor, private: Tensor, side: Tensor) -> PolicyOutput:
        """params[E,S,A], value[E,S] of public[E,S,H], private[E,S,P] and side[E]: ±1."""
        return self._mix(public, self.private(private), side[:, None].expand(public.shape[:2]))

    def step(
        self, public: Tensor, private: Tensor, side: Tensor, state: HiddenState
    ) -> tuple[PolicyOutput, HiddenState]:
        """The same, one step at a time: public[E,H], private[E,P], side[E]."""
        own, state = self.private.step(private, state)
        return self._mix(public, own, side), state

    def _mix(self, public: Tensor, private: Tensor, side: Tensor) -> PolicyOutput:
        side = side[..., None]
        joined = torch.cat([public, public * side, private, side], dim=-1)
        params = self.actor(joined)
        if len(self.log_std):
            params = torch.cat([params, self.log_std.expand_as(params)], dim=-1)
        return PolicyOutput(params, self.critic(joined).squeeze(-1))


def look_up(
    net: ExecutionNet, public: PublicArrays, orders: ParentOrders, ticks_per_step: int
) -> Tensor:
    """[E,S,H] what the net knows of the market as each step of each order begins.

    Every day is encoded once, whatever the number of orders. With gradients all days at once;
    without, a few at a time.
    """
    ticks = torch.from_numpy(step_ticks(orders, ticks_per_step))
    days, which = np.unique(orders.day, return_inverse=True)
    at = torch.from_numpy(which)
    if torch.is_grad_enabled():
        return _table(net, public, days)[at[:, None], ticks]
    out = torch.empty(*ticks.shape, net.settings.hidden)
    for first in range(0, len(days), _DAYS_AT_ONCE):
        chunk = days[first : first + _DAYS_AT_ONCE]
        mine = torch.from_numpy((which >= first) & (which < first + len(chunk)))
        out[mine] = _table(net, public, chunk)[(at[mine] - first)[:, None], ticks[mine]]
    return out


def build_net(settings: NetworkSettings, n_features: int, seed: int) -> ExecutionNet:
    """With weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ExecutionNet(settings, n_features)


def side_of(orders: ParentOrders) -> Tensor:
    """[E] +1 for buys, −1 for sells."""
    return torch.from_numpy(np.where(orders.buying, 1.0, -1.0).astype(np.float32))


def _table(net: ExecutionNet, public: PublicArrays, days: np.ndarray) -> Tensor:
    today = torch.from_numpy(np.ascontiguousarray(public.today[days]))
    return net.table(today, torch.from_numpy(np.ascontiguousarray(public.yesterday[days])))


def _blocks(features: Tensor, block: int) -> Tensor:
    """[D,T/block,block·F] of features[D,T,F]; a last block that is not whole ends with zeros."""
    if block == 1:
        return features
    missing = -features.shape[1] % block
    padded = nn.functional.pad(features, (0, 0, 0, missing))
    return padded.reshape(len(features), -1, block * features.shape[2])


def _mixer(n_inputs: int, hidden: int, n_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(n_inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, n_outputs),
    )


def _places(length: int, hidden: int) -> Tensor:
    """[L,H] sines and cosines of the place (Vaswani et al., 2017)."""
    place = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    return torch.cat([torch.sin(place * rate), torch.cos(place * rate)], dim=1)[:, :hidden]
