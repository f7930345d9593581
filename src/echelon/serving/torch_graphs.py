"""The graphs of a bundle by torch, from its weights: where ONNX Runtime is not installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from echelon.backtest.ensemble import EnsemblePolicy
from echelon.config import Config
from echelon.errors import DamagedError
from echelon.files import blaming
from echelon.serving.graphs import PolicySplit
from echelon.serving.policies import Graph
from echelon.training.run import load_policy

_REMEDY = "Take the bundle again from where it was made."


def weights_file(seed: int) -> str:
    return f"weights-{seed}.safetensors"


def load_torch_graphs(
    path: Path, config: Config, seeds: Sequence[int], n_features: int
) -> Mapping[str, Graph]:
    """The modules of the policies of all `seeds`, named as at the export."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    torch.set_num_threads(1)
    policies = []
    for seed in seeds:
        file = path / weights_file(seed)
        try:
            weights = load(file.read_bytes())
        except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
            raise DamagedError(file, str(error), _REMEDY) from None
        with blaming(file, _REMEDY):
            policies.append(load_policy(config, weights, n_features, seed, f"seed {seed}"))
    policy = policies[0] if len(policies) == 1 else EnsemblePolicy(policies)
    return PolicySplit(policy, config, n_features).graphs()
