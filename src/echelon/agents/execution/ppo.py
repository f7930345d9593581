"""PPO on whole orders, thousands at once (Schulman et al., 2017).

One update:

1. Some of the train orders are drawn and worked to their end, sampling from the policy; their days
   are encoded once for all of them.
2. G_t by λ-returns with γ (1 by default: an order is short and ends), A = G − V, standardised over
   all steps taken.
3. `epochs` times the orders are split by days into minibatches; of each the days are encoded again,
   with gradients, and L = clipped policy loss + c_v · (V − G)² − c_e · entropy is descended.

With `copies` over 1 each order is worked several times side by side, and from each advantage the
mean of its copies' at the same step is taken: what the market did to all of them cancels. Copies
act independently, so the gradient stays unbiased.

**Oracle policy distillation** (OPD; Fang et al., "Universal Trading for Order Execution with Oracle
Policy Distillation", AAAI 2021) is PPO with a teacher:

1. The **teacher** learns by PPO on the same orders, with a network that also sees the rest of the
   day (`NetworkSettings.oracle`). It cannot trade; it knows what would have been best.
2. The **student**, which sees what can be seen, works orders. At every state it comes to, the
   teacher is asked what it would do there: same order, same position, with the future known.
3. Student's loss = PPO's + μ · L_d, with L_d = −mean log π_student(teacher's action), or, by
   setting, the mean KL(π_teacher ‖ π_student). The published weight is μ = 0.01 throughout; with
   `distill_decay` it falls to 0, since the teacher's action takes no account of how much is at
   stake, which the reward does.

Axes: `E` orders, `S` steps, `A` numbers that say a policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from echelon.agents.execution.learner import (
    ExecutionLearner,
    ExecutionTask,
    OrderRollout,
    by_day,
    mean_metrics,
    roll_out,
    taken_mean,
)
from echelon.agents.execution.network import ExecutionNet, FractionHead, NetworkSettings, RateHead
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import ConfigError
from echelon.ops.returns import explained_variance, lambda_returns
from echelon.types import Metrics

_VALUE_COEF, _GRAD_CLIP = 0.5, 1.0


class PPO(ExecutionLearner):
    algo = "ppo"

    def __init__(
        self,
        config: ExecutionLearnerConfig,
        network: NetworkSettings,
        task: ExecutionTask,
        seed: int,
        teacher: ExecutionNet | None = None,
    ) -> None:
        super().__init__(config, network, task, seed)
        self.teacher = teacher
        if teacher is None:
            return
        self.algo = "opd"
        if teacher.head != self.net.head:
            raise ConfigError(
                f"the teacher's actions are {teacher.head}, the student's {self.net.head}: "
                "expected the same. Train a teacher with the student's actions."
            )
        if network.oracle:
            raise ConfigError("a student must not see the future. Set oracle to false.")

    @property
    def distill_weight(self) -> float:
        """μ now."""
        decay = self.config.distill_decay
        if decay is None:
            return self.config.distill
        until = max(1, round(decay * self.config.total_steps))
        return self.config.distill * max(0.0, 1.0 - self.steps / until)

    def train_once(self) -> Metrics:
        rollout = self.collect()
        metrics = self.update(rollout)
        self.steps += int(rollout.taken.sum())
        return metrics

    def collect(self) -> OrderRollout:
        orders = self._draw_orders(self.config.orders, self.config.copies)
        head, generator = self.net.head, self._action_generator
        return roll_out(
            self.net, self.task, orders, lambda output: head.sample(output.params, generator)
        )

    def update(self, rollout: OrderRollout) -> Metrics:
        """Descend on a rollout; means over its minibatches."""
        config, head = self.config, self.net.head
        self._set_learning_rate()
        self.scale.see(rollout.reward, rollout.taken)
        discount = torch.where(rollout.ended, 0.0, config.gamma)
        reward = rollout.reward / self.scale.scale
        returns = order_returns(reward, discount, rollout.value, config.trace)
        advantage = (returns - rollout.value) * rollout.taken
        if config.copies > 1:
            advantage = less_copies(advantage, rollout.taken, config.copies)
        if config.normalize_advantages:
            advantage = standardize_where(advantage, rollout.taken)
        old = head.log_prob(rollout.params, rollout.actions)
        taught: Tensor | None = None  # [S,E,A] what the teacher would do in all these states
        if self.teacher is not None:
            with torch.no_grad():
                asked = self._foretell(self.teacher, rollout.orders, rollout.private)
                taught = asked.params.transpose(0, 1)
        updates: list[Metrics] = []
        for _ in range(config.epochs):
            for which in by_day(rollout.orders, config.minibatches, self._order_rng):
                e = torch.from_numpy(which)
                targets = old[:, e], advantage[:, e], returns[:, e]
                answers = None if taught is None else taught[:, e]
                updates.append(self._descend_on(rollout.some(which), *targets, answers))
        taken = rollout.taken.bool()
        return mean_metrics(updates) | {
            "charts/reward": float(rollout.reward.sum() / len(rollout.orders)),
            "charts/explained_variance": explained_variance(returns[taken], rollout.value[taken]),
            "charts/learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }

    def _descend_on(
        self,
        part: OrderRollout,
        old: Tensor,
        advantage: Tensor,
        returns: Tensor,
        taught: Tensor | None,
    ) -> Metrics:
        config, head = self.config, self.net.head
        output = self._foretell(self.net, part.orders, part.private)
        params, value = output.params.transpose(0, 1), output.value.transpose(0, 1)
        # Orders of a minibatch may all be shorter than the rollout's longest.
        length = len(value)
        taken = part.taken[:length]
        log_prob = head.log_prob(params, part.actions[:length])
        policy = clipped_policy_loss(log_prob, old[:length], advantage[:length], taken, config.clip)
        worth = taken_mean((value - returns[:length]).square(), taken)
        entropy = taken_mean(head.entropy(params), taken)
        total = policy + _VALUE_COEF * worth - config.entropy * entropy
        metrics: Metrics = {}
        if taught is not None:
            apart = distillation(params, taught[:length], head, config.distill_target)
            loss = taken_mean(apart, taken)
            total = total + self.distill_weight * loss
            metrics["losses/distillation"] = float(loss.detach())
        norm = self._descend(total, _GRAD_CLIP)
        return metrics | {
            "losses/policy": float(policy.detach()),
            "losses/value": float(worth.detach()),
            "losses/entropy": float(entropy.detach()),
            "losses/gradient_norm": norm,
        }

    def _networks(self) -> dict[str, ExecutionNet]:
        teacher = {} if self.teacher is None else {"teacher": self.teacher}
        return super()._networks() | teacher


def make_teacher(
    config: ExecutionLearnerConfig, network: NetworkSettings, task: ExecutionTask, seed: int
) -> PPO:
    """The learner of a teacher: PPO with a network that sees the whole day."""
    return PPO(config, replace(network, oracle=True), task, seed)


def distillation(
    student: Tensor,
    teacher: Tensor,
    head: FractionHead | RateHead,
    target: Literal["action", "distribution"],
) -> Tensor:
    """[…] of params student, teacher[…,A]."""
    if target == "distribution":
        return head.divergence(teacher, student)
    return -head.log_prob(student, head.greedy(teacher))


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, taken: Tensor, clip: float
) -> Tensor:
    """−mean min(ρA, clip(ρ, 1 ± ε)A), ρ being new over old probability (Schulman et al., 2017)."""
    ratio = torch.exp(log_prob - old_log_prob)
    cut = ratio.clamp(1.0 - clip, 1.0 + clip)
    return -taken_mean(torch.minimum(ratio * advantage, cut * advantage), taken)


def order_returns(reward: Tensor, discount: Tensor, value: Tensor, trace: float) -> Tensor:
    """G[S,E], λ-returns of whole orders; discount[S,E]: γ, 0 at an order's last step and after."""
    # All orders end, so there is nothing to bootstrap from after the last step.
    after = torch.cat([value, torch.zeros_like(value[:1])])
    return lambda_returns(reward, discount, after, trace)


def standardize_where(values: Tensor, taken: Tensor) -> Tensor:
    """Less their mean, over their standard deviation, both of taken steps only; 0 elsewhere."""
    apart = (values - taken_mean(values, taken)) * taken
    return apart / (taken_mean(apart.square(), taken).sqrt() + 1e-8)


def less_copies(advantage: Tensor, taken: Tensor, copies: int) -> Tensor:
    """Advantages[S,E] less the mean of the order's other copies (neighbours) that took the step."""
    length = advantage.shape[0]
    a, t = advantage.view(length, -1, copies), taken.view(length, -1, copies)
    others = t.sum(-1, keepdim=True) - t
    mean = ((a * t).sum(-1, keepdim=True) - a * t) / others.clamp_min(1)
    return ((a - mean) * t).view(length, -1)
