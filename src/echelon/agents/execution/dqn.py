"""Double DQN on whole orders (van Hasselt et al., 2016), with the network that PPO has.

1. Some train orders are worked to their end, a random fraction asked for with probability ε, else
   the one of highest Q (what PPO takes for logits are the Q here). They go into a replay memory of
   whole orders: the private branch needs an order from its beginning.
2. Orders are drawn from the memory; their days are encoded once, by the online and by the target
   network; Q(s, a) moves towards r + γ·Q'(s', argmax Q(s', ·)), by Huber's loss.
3. The target network is replaced by the online one every `target_every` updates.

Axes: `E` orders, `S` steps, `A` actions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from echelon.agents.execution.learner import ExecutionLearner, load_weights
from echelon.agents.execution.losses import double_q_target, taken_mean
from echelon.agents.execution.network import (
    ExecutionNet,
    NetworkSettings,
    Output,
    look_up,
    side_of,
)
from echelon.agents.execution.rollout import Rollout, roll_out
from echelon.agents.execution.task import Task
from echelon.errors import ConfigError
from echelon.execution.orders import ParentOrders
from echelon.runs.checkpoint import below_prefix, with_prefix
from echelon.types import Metrics


@dataclass(frozen=True)
class DQNSettings:
    """How double DQN learns.

    orders: worked before each round of `updates`; batch: orders of an update; memory: orders kept
    explore: ε at first and at last; it falls linearly over `explore_steps` steps of orders
    lr falls linearly to 0 at `decay_steps`; None: it stays
    """

    lr: float = 5e-4
    orders: int = 256
    batch: int = 256
    updates: int = 8
    memory: int = 8192
    gamma: float = 1.0
    explore: tuple[float, float] = (1.0, 0.05)
    explore_steps: int = 100_000
    target_every: int = 100
    grad_clip: float = 10.0
    normalize_rewards: bool = True
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "orders", "batch", "updates", "memory", "target_every", "explore_steps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be over 0. Correct it.")
        if not all(0.0 <= epsilon <= 1.0 for epsilon in self.explore):
            raise ConfigError(f"explore = {self.explore} must be two shares from 0 to 1.")


class Memory:
    """Whole orders, the latest `size` of them; arrays as in `Rollout`, orders first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.parts["reward"]) if self.parts else 0

    def add(self, rollout: Rollout) -> None:
        """The oldest make room."""
        orders = {f"order_{k}": torch.from_numpy(np.array(v)) for k, v in _named(rollout.orders)}
        new = orders | {
            "private": rollout.private,
            "actions": rollout.actions.transpose(0, 1),
            "reward": rollout.reward.transpose(0, 1),
            "taken": rollout.taken.transpose(0, 1),
            "ended": rollout.ended.transpose(0, 1),
        }
        if not self.parts:
            self.parts = {name: value[:0] for name, value in new.items()}
        length = max(one["reward"].shape[1] for one in (self.parts, new))
        self.parts = {
            name: torch.cat([_padded(kept, length), _padded(new[name], length)])[-self.size :]
            for name, kept in self.parts.items()
        }

    def orders(self, which: Tensor) -> ParentOrders:
        """The parent orders of some of them."""
        return ParentOrders(
            *(self.parts[f"order_{name}"][which].numpy() for name in ParentOrders._fields)
        )


class DQN(ExecutionLearner):
    """The learner."""

    algo = "dqn"

    def __init__(
        self, settings: DQNSettings, network: NetworkSettings, task: Task, seed: int
    ) -> None:
        if not network.fractions:
            raise ConfigError("double DQN chooses among fractions; it has no continuous rate.")
        super().__init__(
            network,
            task,
            seed,
            lr=settings.lr,
            normalize_rewards=settings.normalize_rewards,
        )
        self.settings = settings
        self.target: ExecutionNet = copy.deepcopy(self.net)
        self.updates = 0
        self.memory = Memory(settings.memory)

    @property
    def epsilon(self) -> float:
        """Share of random actions now."""
        first, last = self.settings.explore
        gone = min(1.0, self.steps / self.settings.explore_steps)
        return first + (last - first) * gone

    def train_once(self) -> Metrics:
        """Work some orders, remember them, and learn from some that are remembered."""
        rollout = self.collect()
        self.steps += rollout.env_steps
        self.scale.see(rollout.reward, rollout.taken)
        self.memory.add(rollout)
        told = [self.update() for _ in range(self.settings.updates)]
        metrics = {name: sum(one[name] for one in told) / len(told) for name in told[0]}
        return metrics | {
            "charts/reward": float(rollout.reward.sum() / len(rollout.orders)),
            "charts/epsilon": self.epsilon,
        }

    def collect(self) -> Rollout:
        """Work orders with some random actions."""
        orders = self._draw_orders(self.settings.orders)
        generator, epsilon = self._action_generator, self.epsilon

        def choose(output: Output) -> Tensor:
            best = output.params.argmax(-1)
            other = torch.randint(output.params.shape[-1], best.shape, generator=generator)
            return torch.where(torch.rand(best.shape, generator=generator) < epsilon, other, best)

        return roll_out(self.net, self.task, orders, choose)

    def update(self) -> Metrics:
        """One step of descent on orders from the memory."""
        settings, parts = self.settings, self.memory.parts
        until = settings.decay_steps
        share = 1.0 if until is None else max(0.0, 1.0 - self.steps / until)
        self.optimizer.param_groups[0]["lr"] = settings.lr * share
        which = torch.from_numpy(
            self._order_rng.integers(len(self.memory), size=min(settings.batch, len(self.memory)))
        )
        orders, side = self.memory.orders(which), side_of(self.memory.orders(which))
        per_step = self.task.rules.ticks_per_step
        public = look_up(self.net, self.task.public, orders, per_step)
        length = public.shape[1]  # what is remembered may be longer, as other orders were
        private = parts["private"][which, :length]
        q = self.net.sequence(public, private, side).params
        with torch.no_grad():
            known = look_up(self.target, self.task.public, orders, per_step)
            q_target = self.target.sequence(known, private, side).params
            aim = double_q_target(
                parts["reward"][which, :length] / self.scale.scale,
                torch.where(parts["ended"][which, :length], 0.0, settings.gamma),
                _next(q),
                _next(q_target),
            )
        chosen = q.gather(-1, parts["actions"][which, :length, None]).squeeze(-1)
        taken = parts["taken"][which, :length]
        loss = taken_mean(smooth_l1_loss(chosen, aim, reduction="none"), taken)
        norm = self._descend(loss, settings.grad_clip)
        self.updates += 1
        if self.updates % settings.target_every == 0:
            self.target.load_state_dict(self.net.state_dict())
        return {
            "losses/q": float(loss.detach()),
            "losses/gradient_norm": norm,
            "charts/q": float(taken_mean(chosen, taken).detach()),
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """With the target network and the memory."""
        tensors, facts = super().state()
        tensors |= with_prefix("target.", self.target.state_dict())
        tensors |= with_prefix("memory.", self.memory.parts)
        return tensors, facts | {"updates": self.updates}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """With the target network and the memory."""
        super().restore(tensors, state)
        load_weights(self.target, below_prefix("target.", tensors), "the target's state")
        self.memory.parts = below_prefix("memory.", tensors)
        self.updates = int(state["updates"])


def _named(orders: ParentOrders) -> list[tuple[str, Any]]:
    return [(name, getattr(orders, name)) for name in ParentOrders._fields]


def _next(q: Tensor) -> Tensor:
    """[E,S,A] one step on; after the last step zeros, which no discount lets in."""
    return torch.cat([q[:, 1:], torch.zeros_like(q[:, :1])], dim=1)


def _padded(value: Tensor, length: int) -> Tensor:
    """With steps that were not taken, where value[E,S,…] has fewer than `length` of them."""
    if value.dim() < 2 or value.shape[1] == length:
        return value
    rest = value.new_zeros(len(value), length - value.shape[1], *value.shape[2:])
    return torch.cat([value, rest], dim=1)
