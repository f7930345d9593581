"""Oracle policy distillation (Fang et al., "Universal Trading for Order Execution with Oracle
Policy Distillation", AAAI 2021).

1. The **teacher** learns by PPO on the same orders, with a network that also sees the rest of the
   day (`NetworkSettings.oracle`). It cannot trade; it knows what would have been best.
2. The **student**, which sees what can be seen, works orders. At every state it comes to, the
   teacher is asked what it would do there: same order, same position, with the future known.
3. Student's loss = PPO's + μ · L_d, with L_d = −mean log π_student(teacher's action), or, by
   setting, the mean KL(π_teacher ‖ π_student). The published weight is μ = 0.01 throughout; with
   `distill_decay` it falls to 0: what is mostly right is where to begin and not where to end, as it
   takes no account of how much is at stake, which the reward does.

What the teacher does hangs on the future, of which the student can know part. Made likelier in each
state is what was *mostly* right there: a target with the market's noise in it once, in one action,
where PPO's reward has the noise of all the moves to come.

Axes: `E` orders, `S` steps, `A` numbers that say a policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from echelon.agents.execution.learner import taken_mean
from echelon.agents.execution.network import ExecutionNet, NetworkSettings, look_up, side_of
from echelon.agents.execution.ppo import PPO
from echelon.agents.execution.rollout import ExecutionTask, OrderRollout
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import ConfigError
from echelon.types import Ints, Metrics


def make_teacher(
    config: ExecutionLearnerConfig, network: NetworkSettings, task: ExecutionTask, seed: int
) -> PPO:
    """The learner of a teacher: PPO with a network that sees the whole day."""
    return PPO(config, replace(network, oracle=True), task, seed)


def distillation(
    student: Tensor, teacher: Tensor, net: ExecutionNet, target: Literal["action", "distribution"]
) -> Tensor:
    """[…] of params student, teacher[…,A]."""
    if target == "distribution":
        return net.head.divergence(teacher, student)
    return -net.head.log_prob(student, net.head.greedy(teacher))


class Student(PPO):
    """PPO that also listens to a teacher, which stays as it is."""

    algo = "opd"

    def __init__(
        self,
        config: ExecutionLearnerConfig,
        network: NetworkSettings,
        task: ExecutionTask,
        teacher: ExecutionNet,
        seed: int,
    ) -> None:
        super().__init__(config, network, task, seed)
        if teacher.head != self.net.head:
            raise ConfigError(
                f"the teacher's actions are {teacher.head}, the student's {self.net.head}: "
                "expected the same. Train a teacher with the student's actions."
            )
        if network.oracle:
            raise ConfigError("a student must not see the future. Set oracle to false.")
        self.teacher = teacher
        self._taught = torch.zeros(0)

    @property
    def weight(self) -> float:
        """Μ now."""
        decay = self.config.distill_decay
        if decay is None:
            return self.config.distill
        until = max(1, round(decay * self.config.total_steps))
        return self.config.distill * max(0.0, 1.0 - self.steps / until)

    def update(self, rollout: OrderRollout) -> Metrics:
        """Ask the teacher about all states of the rollout, then learn."""
        with torch.no_grad():
            public = look_up(
                self.teacher, self.task.public, rollout.orders, self.task.rules.ticks_per_step
            )
            asked = self.teacher.sequence(public, rollout.private, side_of(rollout.orders))
        self._taught = asked.params.transpose(0, 1)
        return super().update(rollout)

    def _networks(self) -> dict[str, ExecutionNet]:
        return {**super()._networks(), "teacher": self.teacher}

    def _further(self, params: Tensor, which: Ints, taken: Tensor) -> tuple[Tensor, Metrics]:
        taught = self._taught[: len(params), torch.from_numpy(which)]
        apart = distillation(params, taught, self.net, self.config.distill_target)
        loss = taken_mean(apart, taken)
        return self.weight * loss, {"losses/distillation": float(loss.detach())}
