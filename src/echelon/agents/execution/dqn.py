"""Double DQN on whole orders (van Hasselt et al., 2016), with the network that PPO has.

1. Some train orders are worked to their end, a random fraction asked for with probability ε, else
   the one of highest Q (what PPO takes for logits are the Q here). They go into a replay of
   whole orders: the private branch needs an order from its beginning.
2. Orders are drawn from the replay; their days are encoded once, by the online and by the target
   network; Q(s, a) moves towards r + γ·Q'(s', argmax Q(s', ·)), by Huber's loss.
3. The target network is replaced by the online one every `target_every` updates.

Axes: `E` orders, `S` steps, `A` actions.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from echelon.agents.execution.learner import (
    ExecutionLearner,
    ExecutionTask,
    OrderRollout,
    mean_metrics,
    roll_out,
    taken_mean,
)
from echelon.agents.execution.network import ExecutionNet, NetworkSettings, PolicyOutput
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import ConfigError
from echelon.execution.orders import ParentOrders
from echelon.runs.checkpoint import below_prefix, with_prefix
from echelon.types import Metrics

BATCH = 256
"""Most orders of an update."""
_GRAD_CLIP = 10.0


class OrderReplay:
    """Whole orders, the latest `size` of them; arrays as in `OrderRollout`, orders first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.parts["reward"]) if self.parts else 0

    def add(self, rollout: OrderRollout) -> None:
        """The oldest make room."""
        new = {
            f"order_{name}": torch.from_numpy(np.array(getattr(rollout.orders, name)))
            for name in ParentOrders._fields
        }
        new["private"] = rollout.private
        for name in ("actions", "reward", "taken", "ended"):
            new[name] = getattr(rollout, name).transpose(0, 1)
        if not self.parts:
            self.parts = {name: value[:0] for name, value in new.items()}
        length = max(parts["reward"].shape[1] for parts in (self.parts, new))
        self.parts = {
            name: torch.cat([_pad(kept, length), _pad(new[name], length)])[-self.size :]
            for name, kept in self.parts.items()
        }

    def orders(self, which: Tensor) -> ParentOrders:
        return ParentOrders(
            *(self.parts[f"order_{name}"][which].numpy() for name in ParentOrders._fields)
        )


class DQN(ExecutionLearner):
    algo = "dqn"

    def __init__(
        self,
        config: ExecutionLearnerConfig,
        network: NetworkSettings,
        task: ExecutionTask,
        seed: int,
    ) -> None:
        if not network.fractions:
            raise ConfigError("double DQN chooses among fractions; it has no continuous rate.")
        super().__init__(config, network, task, seed)
        self.target: ExecutionNet = copy.deepcopy(self.net)
        self.updates = 0
        self.replay = OrderReplay(config.memory)

    @property
    def epsilon(self) -> float:
        """Share of random actions now: from 1 to 0.05 over the first half of the training."""
        gone = min(1.0, self.steps / max(1, self.config.total_steps // 2))
        return 1.0 + (0.05 - 1.0) * gone

    def train_once(self) -> Metrics:
        rollout = self.collect()
        self.steps += int(rollout.taken.sum())
        self.scale.see(rollout.reward, rollout.taken)
        self.replay.add(rollout)
        metrics = mean_metrics([self.update() for _ in range(self.config.updates)])
        return metrics | {
            "charts/reward": float(rollout.reward.sum() / len(rollout.orders)),
            "charts/epsilon": self.epsilon,
        }

    def collect(self) -> OrderRollout:
        orders = self._draw_orders(self.config.orders)
        generator, epsilon = self._action_generator, self.epsilon

        def choose(output: PolicyOutput) -> Tensor:
            best = output.params.argmax(-1)
            other = torch.randint(output.params.shape[-1], best.shape, generator=generator)
            return torch.where(torch.rand(best.shape, generator=generator) < epsilon, other, best)

        return roll_out(self.net, self.task, orders, choose)

    def update(self) -> Metrics:
        config, parts = self.config, self.replay.parts
        self._set_learning_rate()
        size = min(config.orders, BATCH, len(self.replay))
        which = torch.from_numpy(self._order_rng.integers(len(self.replay), size=size))
        orders, private = self.replay.orders(which), parts["private"][which]
        q = self._foretell(self.net, orders, private).params
        length = q.shape[1]  # what is kept may be longer, as other orders were
        with torch.no_grad():
            q_target = self._foretell(self.target, orders, private).params
            reward = parts["reward"][which, :length] / self.scale.scale
            discount = torch.where(parts["ended"][which, :length], 0.0, config.gamma)
            aim = double_q_target(reward, discount, _next(q), _next(q_target))
        chosen = q.gather(-1, parts["actions"][which, :length, None]).squeeze(-1)
        taken = parts["taken"][which, :length]
        loss = taken_mean(smooth_l1_loss(chosen, aim, reduction="none"), taken)
        norm = self._descend(loss, _GRAD_CLIP)
        self.updates += 1
        if self.updates % config.target_every == 0:
            self.target.load_state_dict(self.net.state_dict())
        return {
            "losses/q": float(loss.detach()),
            "losses/gradient_norm": norm,
            "charts/q": float(taken_mean(chosen, taken).detach()),
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        tensors |= with_prefix("memory.", self.replay.parts)
        return tensors, facts | {"updates": self.updates}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        super().restore(tensors, state)
        self.replay.parts = below_prefix("memory.", tensors)
        self.updates = int(state["updates"])

    def _networks(self) -> dict[str, ExecutionNet]:
        return {**super()._networks(), "target": self.target}


def double_q_target(
    reward: Tensor, discount: Tensor, online_next: Tensor, target_next: Tensor
) -> Tensor:
    """Target r + γ·Q'(s', argmax_a Q(s', a))[…] of Q and Q'[…,A] after the step."""
    best = online_next.argmax(-1, keepdim=True)
    return reward + discount * target_next.gather(-1, best).squeeze(-1)


def _next(q: Tensor) -> Tensor:
    """[E,S,A] one step on; after the last step zeros, which no discount lets in."""
    return torch.cat([q[:, 1:], torch.zeros_like(q[:, :1])], dim=1)


def _pad(value: Tensor, length: int) -> Tensor:
    """With steps that were not taken, where value[E,S,…] has fewer than `length` of them."""
    if value.dim() < 2 or value.shape[1] == length:
        return value
    rest = value.new_zeros(len(value), length - value.shape[1], *value.shape[2:])
    return torch.cat([value, rest], dim=1)
