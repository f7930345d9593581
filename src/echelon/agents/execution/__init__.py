"""Learners of order execution: PPO, double DQN and oracle policy distillation on one network."""
