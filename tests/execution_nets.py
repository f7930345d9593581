"""Networks of execution for tests."""

from __future__ import annotations

import torch

from echelon.agents.execution.network import ExecutionNet, NetworkSettings


def build_net(settings: NetworkSettings, n_features: int, seed: int) -> ExecutionNet:
    """With weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ExecutionNet(settings, n_features)
