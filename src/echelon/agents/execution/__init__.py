"""Learners of order execution: PPO, double DQN and oracle policy distillation on one network."""

from echelon.agents.execution.dqn import DQN
from echelon.agents.execution.learner import ExecutionLearner
from echelon.agents.execution.network import NetworkSettings
from echelon.agents.execution.policy import (
    LearnedPolicy,
    load_execution_policy,
    save_execution_policy,
)
from echelon.agents.execution.ppo import PPO, make_teacher
from echelon.agents.execution.rollout import ExecutionTask

__all__ = [
    "DQN",
    "PPO",
    "ExecutionLearner",
    "ExecutionTask",
    "LearnedPolicy",
    "NetworkSettings",
    "load_execution_policy",
    "make_teacher",
    "save_execution_policy",
]
