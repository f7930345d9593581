"""The density of squashed actions, put together from its parts: what tests hold learners to."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.ops.squashed import gaussian_log_prob, squash_log_det


def squashed_log_prob(
    raw: Tensor, mean: Tensor, log_std: Tensor, free: Tensor | None = None
) -> Tensor:
    """Log-density [B] of tanh(raw) under N(mean, e^{2 log_std}) squashed; all [B,A]."""
    noise = (raw - mean) * torch.exp(-log_std)
    return gaussian_log_prob(noise, log_std, free) - squash_log_det(raw, free)
