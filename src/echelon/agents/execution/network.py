"""The network of execution: a public branch, a private branch, the direction.

1. **Public**: yesterday's ticks are encoded; the last of them says where today's encoding begins,
   and each is looked at again at its own time of day. Today's ticks go on from there, causally. Row
   t of the table is what is known of the market as tick t *begins*: it saw ticks up to t − 1. The
   oracle's table, for teachers only, also holds an encoding of ticks t to the day's end, run
   backwards.
2. **Private**: the order's own steps so far (`PRIVATE`), causally.
3. Public, public × direction, private and direction meet in two small networks, for the policy and
   for the value. Nearly all that the market says has the opposite sense for the opposite side.
4. A **head** makes a distribution over actions of what the policy's network says, and shares of
   actions; in an order's last step all that is left.

Sequences are read by a GRU, an LSTM or self-attention, whole or place by place with a hidden state;
both give the same numbers. With `NetworkSettings.block` several ticks side by side are one input.

The table depends on the day alone, never on an order: **a day is encoded once and looked up by all
orders and steps on it**, which Stable-Baselines3's observations would not allow.

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

from echelon.config.execution import ExecutionConfig
from echelon.errors import DataError
from echelon.execution.days import Days
from echelon.execution.features import PublicArrays
from echelon.execution.orders import ParentOrders
from echelon.execution.simulator import Simulator, next_step, steps_of
from echelon.ops.information import mlp
from echelon.ops.squashed import clip_log_std, gaussian_log_prob
from echelon.types import Floats, Floats32, Ints

QLIB_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
PRIVATE = ("left", "time_left", "day_left", "day_gone", "even", "executed", "filled")
"""What an order knows of itself, each about between 0 and 1: share of the amount left; share of the
order's ticks left, and of the day's that are the order's still; share of the day gone; what TWAP
would take of what is left; executed in the step before, of the amount; executed of what was asked
for then."""
_DAYS_AT_ONCE = 128
"""Days encoded together where no gradient is wanted: their tables stay in the cache."""

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
        # Sines and cosines of the place (Vaswani et al., 2017).
        place = torch.arange(h.shape[1], dtype=torch.float32)[:, None]
        rate = torch.exp(torch.arange(0, h.shape[2], 2) * (-math.log(10_000.0) / h.shape[2]))
        waves = torch.cat([torch.sin(place * rate), torch.cos(place * rate)], dim=1)
        h = h + waves[:, : h.shape[2]]
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
class FractionHead:
    """Categorical: action a asks for values[a] of the whole order; params[…,A] are logits."""

    values: tuple[float, ...] = QLIB_FRACTIONS

    def first_bias(self) -> Tensor:
        """[A] of an untrained policy: all alike."""
        return torch.zeros(len(self.values))

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(params.shape, generator=generator).clamp_min(1e-20)
        return (params - torch.log(-torch.log(uniform))).argmax(-1)

    def greedy(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return torch.log_softmax(params, -1).gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_pi = torch.log_softmax(params, -1)
        return -(log_pi.exp() * log_pi).sum(-1)

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """KL(teacher ‖ student) = Σ p_teacher (log p_teacher − log p_student)."""
        log_t, log_s = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
        return (log_t.exp() * (log_t - log_s)).sum(-1)

    def shares(self, actions: Tensor, simulator: Simulator) -> Floats:
        """[E] that actions[E] ask of the simulator."""
        asked = np.asarray(self.values)[actions.numpy()] * simulator.orders.amount
        return np.where(next_step(simulator).final, simulator.progress.left, asked)


@dataclass(frozen=True)
class RateHead:
    """u ~ N(mean, σ²), rate = rate_max · sigmoid(u) of TWAP; an action is u.

    params[…,2]: mean and log σ, one for all states. Probabilities are those of u: the squashing is
    the same for old and new policy, so that it cancels in PPO's ratio and in divergences.
    """

    rate_max: float = 4.0

    def first_bias(self) -> Tensor:
        """[1] of an untrained policy, at TWAP: rate_max · sigmoid(u) = 1."""
        return torch.tensor([-math.log(self.rate_max - 1.0)])

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        mean, log_std = self._parts(params)
        return mean + log_std.exp() * torch.randn(mean.shape, generator=generator)

    def greedy(self, params: Tensor) -> Tensor:
        return params[..., 0]

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = self._parts(params)
        noise = (actions - mean) * torch.exp(-log_std)
        return gaussian_log_prob(noise[..., None], log_std[..., None])

    def entropy(self, params: Tensor) -> Tensor:
        return self._parts(params)[1] + 0.5 * math.log(2.0 * math.pi * math.e)

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """KL(teacher ‖ student) between two Gaussians, in closed form."""
        mean_t, log_t = self._parts(teacher)
        mean_s, log_s = self._parts(student)
        apart = ((2.0 * log_t).exp() + (mean_t - mean_s).square()) * (-2.0 * log_s).exp()
        return log_s - log_t + 0.5 * (apart - 1.0)

    def shares(self, actions: Tensor, simulator: Simulator) -> Floats:
        """[E] that actions[E] ask of the simulator: the rate × TWAP's pace, counted in ticks.

        An order whose first or last step is short asks for a short step's share there.
        """
        rate = (self.rate_max * torch.sigmoid(actions.double())).numpy()
        coming, left = next_step(simulator), simulator.progress.left
        return np.where(coming.final, left, rate * (left * coming.ticks / coming.left))

    def _parts(self, params: Tensor) -> tuple[Tensor, Tensor]:
        return params[..., 0], clip_log_std(params[..., 1])


@dataclass(frozen=True)
class NetworkSettings:
    """Shape of the network.

    sequence: of both branches; heads: of attention
    fractions: categorical actions; empty: a continuous rate, up to `rate_max` × TWAP
    first_std: of u, at first, for the continuous rate
    block: ticks of an input of the public sequences
    oracle: sees the rest of the day, too; to teach, never to trade
    """

    sequence: Literal["gru", "lstm", "attention"] = "gru"
    hidden: int = 64
    heads: int = 4
    fractions: tuple[float, ...] = QLIB_FRACTIONS
    rate_max: float = 4.0
    first_std: float = 0.5
    oracle: bool = False
    block: int = 1

    @property
    def head(self) -> FractionHead | RateHead:
        return FractionHead(self.fractions) if self.fractions else RateHead(self.rate_max)

    @staticmethod
    def from_config(config: ExecutionConfig) -> NetworkSettings:
        return NetworkSettings(
            sequence=config.sequence,
            hidden=config.hidden,
            fractions=config.fractions if config.actions == "fractions" else (),
            rate_max=config.rate_max,
            block=config.block,
        )

    @staticmethod
    def from_json(facts: dict[str, Any]) -> NetworkSettings:
        return NetworkSettings(**{**facts, "fractions": tuple(facts["fractions"])})


class PolicyOutput(NamedTuple):
    """params[…,A]: of the policy; value[…]: expected of the steps to come."""

    params: Tensor
    value: Tensor


class ExecutionNet(nn.Module):
    def __init__(self, settings: NetworkSettings, n_features: int) -> None:
        super().__init__()
        self.settings, self.n_features, self.head = settings, n_features, settings.head
        bias, hidden = self.head.first_bias(), settings.hidden

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
        self.actor = mlp(3 * hidden + 1, hidden, len(bias))
        self.critic = mlp(3 * hidden + 1, hidden, 1)
        # A policy that begins near its bias begins as TWAP, or choosing evenly.
        last = self.actor[-1]
        assert isinstance(last, nn.Linear)
        nn.init.orthogonal_(last.weight, 0.01)
        last.bias.data.copy_(bias)
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


def private_inputs(simulator: Simulator) -> Floats32:
    """[E,P] as the coming step begins; in the order of `PRIVATE`."""
    progress, orders, steps = simulator.progress, simulator.orders, simulator.steps
    n_ticks = simulator.days.shape[1]
    coming = next_step(simulator)
    left = np.maximum(orders.end - progress.tick, 0)
    at = (np.arange(len(orders)), np.maximum(progress.step - 1, 0))
    began = progress.step > 0
    executed = np.where(began, steps.executed[at], 0.0)
    asked = np.where(began, steps.requested[at], 0.0)
    filled = np.where(asked > 0.0, executed / np.where(asked > 0.0, asked, 1.0), 1.0)
    columns = (
        progress.left / orders.amount,
        left / (orders.end - orders.start),
        left / n_ticks,
        progress.tick / n_ticks,
        coming.ticks / coming.left,
        executed / orders.amount,
        np.minimum(filled, 1.0),
    )
    return np.stack(columns, axis=1).astype(np.float32)


def step_ticks(orders: ParentOrders, ticks_per_step: int) -> Ints:
    """[E,S] tick at which each step begins; after an order's last step, its last tick."""
    count = np.arange(int(steps_of(orders, ticks_per_step).max(initial=1)))
    grid = (orders.start[:, None] // ticks_per_step + count) * ticks_per_step
    ticks = np.maximum(grid, orders.start[:, None])
    return np.asarray(np.minimum(ticks, orders.end[:, None] - 1), dtype=np.int64)


def look_up(
    net: ExecutionNet, public: PublicArrays, orders: ParentOrders, ticks_per_step: int
) -> Tensor:
    """[E,S,H] what the net knows of the market as each step begins; every day is encoded once."""
    ticks = torch.from_numpy(step_ticks(orders, ticks_per_step))
    days, which = np.unique(orders.day, return_inverse=True)
    at = torch.from_numpy(which)

    def table(days: Ints) -> Tensor:
        arrays = (public.today[days], public.yesterday[days])
        return net.table(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))

    if torch.is_grad_enabled():
        return table(days)[at[:, None], ticks]
    out = torch.empty(*ticks.shape, net.settings.hidden)
    for first in range(0, len(days), _DAYS_AT_ONCE):
        chunk = days[first : first + _DAYS_AT_ONCE]
        mine = torch.from_numpy((which >= first) & (which < first + len(chunk)))
        out[mine] = table(chunk)[(at[mine] - first)[:, None], ticks[mine]]
    return out


def check_public(public: PublicArrays, days: Days) -> None:
    """Refuse features that are not of these days."""
    for name in ("today", "yesterday"):
        array = getattr(public, name)
        what = f"public features {name!r} are"
        if array.ndim != 3 or array.shape[:2] != days.shape:
            raise DataError(
                f"{what} {array.shape}, expected [D,T,F] with (D, T) = {days.shape}. Make them "
                "from these days."
            )
        if not np.isfinite(array).all():
            raise DataError(f"{what} not all numbers. Fill or mask what is missing.")


def side_of(orders: ParentOrders) -> Tensor:
    """[E] +1 for buys, −1 for sells."""
    return torch.from_numpy(np.where(orders.buying, 1.0, -1.0).astype(np.float32))


def _blocks(features: Tensor, block: int) -> Tensor:
    """[D,T/block,block·F] of features[D,T,F]; a last block that is not whole ends with zeros."""
    if block == 1:
        return features
    missing = -features.shape[1] % block
    padded = nn.functional.pad(features, (0, 0, 0, missing))
    return padded.reshape(len(features), -1, block * features.shape[2])
