"""PPO on whole orders, thousands at once (Schulman et al., 2017).

One update:

1. Some of the train orders are drawn and worked to their end, sampling from the policy; their days
   are encoded once for all of them.
2. G_t by λ-returns with γ (1 by default: an order is short and ends), A = G − V, standardised over
   all steps taken.
3. `epochs` times the orders are split by days into minibatches; of each the days are encoded again,
   with gradients, and L = clipped policy loss + c_v · (V − G)² − c_e · entropy is descended.

It is our own and not Stable-Baselines3's, which would keep a whole day in every observation and
encode it again for every order and step (see `network`).

With `copies` over 1 each order is worked several times side by side, and from each advantage the
mean of its copies' at the same step is taken: what the market did to all of them cancels, and what
is left is what acting differently was worth. Copies act independently, so the gradient stays
unbiased.

Axes: `E` orders, `S` steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.agents.execution.learner import ExecutionLearner
from echelon.agents.execution.losses import (
    clipped_policy_loss,
    order_returns,
    standardized_where,
    taken_mean,
    value_loss,
)
from echelon.agents.execution.network import NetworkSettings, Output, look_up, side_of
from echelon.agents.execution.rollout import Rollout, by_day, roll_out
from echelon.agents.execution.task import Task
from echelon.errors import ConfigError
from echelon.execution.orders import Ints
from echelon.ops.returns import explained_variance
from echelon.types import Metrics


@dataclass(frozen=True)
class PPOSettings:
    """How PPO learns.

    orders: worked for an update; copies: of each of them; epochs, minibatches: of an update
    clip: ε; gamma; trace: λ of the advantage; value_coef, entropy_coef
    normalize_advantages, normalize_rewards: the latter by the running size of returns
    lr falls linearly to 0 at `decay_steps` steps of orders; None: it stays
    """

    lr: float = 5e-4
    orders: int = 1024
    copies: int = 1
    epochs: int = 5
    minibatches: int = 4
    clip: float = 0.2
    gamma: float = 1.0
    trace: float = 0.95
    value_coef: float = 0.5
    entropy_coef: float = 0.01
    grad_clip: float = 1.0
    normalize_advantages: bool = True
    normalize_rewards: bool = True
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "orders", "copies", "epochs", "minibatches", "clip", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be over 0. Correct it.")
        for name in ("gamma", "trace"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be from 0 to 1.")
        if self.orders < self.copies:
            raise ConfigError(f"copies = {self.copies} must be at most orders = {self.orders}.")


PUBLISHED = PPOSettings(
    lr=1e-4,
    orders=1250,
    epochs=5,
    minibatches=10,
    clip=0.3,
    trace=1.0,
    value_coef=1.0,
    entropy_coef=0.01,
    grad_clip=100.0,
    normalize_advantages=False,
    normalize_rewards=False,
)
"""Those of oracle policy distillation (Fang et al., AAAI 2021), of its teacher too: 10,000 steps
collected for an update, in batches of 1,024."""


class PPO(ExecutionLearner):
    """The learner."""

    algo = "ppo"

    def __init__(
        self, settings: PPOSettings, network: NetworkSettings, task: Task, seed: int
    ) -> None:
        super().__init__(
            network,
            task,
            seed,
            lr=settings.lr,
            normalize_rewards=settings.normalize_rewards,
        )
        self.settings = settings

    def train_once(self) -> Metrics:
        """One rollout, and the update on it."""
        rollout = self.collect()
        metrics = self.update(rollout)
        self.steps += rollout.env_steps
        return metrics

    def collect(self) -> Rollout:
        """Draw orders and work them to their end."""
        orders = self._draw_orders(self.settings.orders, self.settings.copies)

        def choose(output: Output) -> Tensor:
            return self.net.head.sample(output.params, self._action_generator)

        return roll_out(self.net, self.task, orders, choose)

    def update(self, rollout: Rollout) -> Metrics:
        """Descend on a rollout; means over its minibatches."""
        settings, head = self.settings, self.net.head
        self._set_learning_rate()
        self.scale.see(rollout.reward, rollout.taken)
        discount = torch.where(rollout.ended, 0.0, settings.gamma)
        reward = rollout.reward / self.scale.scale
        returns = order_returns(reward, discount, rollout.value, settings.trace)
        advantage = (returns - rollout.value) * rollout.taken
        if settings.copies > 1:
            advantage = less_copies(advantage, rollout.taken, settings.copies)
        if settings.normalize_advantages:
            advantage = standardized_where(advantage, rollout.taken)
        old = head.log_prob(rollout.params, rollout.actions)
        told: list[Metrics] = []
        for _ in range(settings.epochs):
            for which in by_day(rollout.orders, settings.minibatches, self._order_rng):
                e = torch.from_numpy(which)
                told.append(
                    self._descend_on(
                        rollout.some(which), which, old[:, e], advantage[:, e], returns[:, e]
                    )
                )
        taken = rollout.taken.bool()
        metrics = {name: sum(one[name] for one in told) / len(told) for name in told[0]}
        return metrics | {
            "charts/reward": float(rollout.reward.sum() / len(rollout.orders)),
            "charts/explained_variance": explained_variance(returns[taken], rollout.value[taken]),
            "charts/learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }

    def _descend_on(
        self, part: Rollout, which: Ints, old: Tensor, advantage: Tensor, returns: Tensor
    ) -> Metrics:
        """One minibatch: the orders `which` of the rollout."""
        settings, head = self.settings, self.net.head
        public = look_up(self.net, self.task.public, part.orders, self.task.rules.ticks_per_step)
        # Orders of a minibatch may all be shorter than the rollout's longest.
        length = public.shape[1]
        output = self.net.sequence(public, part.private[:, :length], side_of(part.orders))
        params, value = output.params.transpose(0, 1), output.value.transpose(0, 1)
        taken = part.taken[:length]
        policy = clipped_policy_loss(
            head.log_prob(params, part.actions[:length]),
            old[:length],
            advantage[:length],
            taken,
            settings.clip,
        )
        worth = value_loss(value, returns[:length], taken)
        entropy = taken_mean(head.entropy(params), taken)
        total = policy + settings.value_coef * worth - settings.entropy_coef * entropy
        further, metrics = self._further(params, which, taken)
        norm = self._descend(total + further, settings.grad_clip)
        return metrics | {
            "losses/policy": float(policy.detach()),
            "losses/value": float(worth.detach()),
            "losses/entropy": float(entropy.detach()),
            "losses/gradient_norm": norm,
        }

    def _further(self, params: Tensor, which: Ints, taken: Tensor) -> tuple[Tensor, Metrics]:
        """What else is descended on, for params[S,E,A] of a minibatch; plain PPO has nothing."""
        return torch.zeros(()), {}

    def _set_learning_rate(self) -> None:
        until = self.settings.decay_steps
        share = 1.0 if until is None else max(0.0, 1.0 - self.steps / until)
        self.optimizer.param_groups[0]["lr"] = self.settings.lr * share


def less_copies(advantage: Tensor, taken: Tensor, copies: int) -> Tensor:
    """Advantages[S,E] less the mean of an order's other copies that took the step.

    Copies are neighbours. Where no other copy took the step, the advantage stays.
    """
    length = advantage.shape[0]
    a, t = advantage.view(length, -1, copies), taken.view(length, -1, copies)
    others = t.sum(-1, keepdim=True) - t
    mean = ((a * t).sum(-1, keepdim=True) - a * t) / others.clamp_min(1)
    return ((a - mean) * t).view(length, -1)
