"""Learners of order execution: PPO, double DQN and oracle policy distillation on one network."""

from echelon.agents.execution.dqn import DQN, DQNSettings
from echelon.agents.execution.files import load_policy, save_policy
from echelon.agents.execution.network import ExecutionNet, NetworkSettings
from echelon.agents.execution.opd import DistillSettings, Student, teacher_of
from echelon.agents.execution.policy import LearnedPolicy
from echelon.agents.execution.ppo import PPO, PUBLISHED, PPOSettings
from echelon.agents.execution.task import Public, Task

__all__ = [
    "DQN",
    "PPO",
    "PUBLISHED",
    "DQNSettings",
    "DistillSettings",
    "ExecutionNet",
    "LearnedPolicy",
    "NetworkSettings",
    "PPOSettings",
    "Public",
    "Student",
    "Task",
    "load_policy",
    "save_policy",
    "teacher_of",
]
