"""The squashed Gaussian: u ~ N(mean, σ²), a = tanh(u) (Haarnoja et al., 2018).

log p(a) = log N(u) − Σ log(1 − tanh(u)²), and log(1 − tanh(u)²) = 2 (log 2 − u − softplus(−2u)),
which neither overflows nor loses its digits where the tanh is flat. `free[B,A]` says which
dimensions count: the others have probability 1, hence no part in any sum.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import softplus

LOG_STD = (-5.0, 2.0)
"""Bounds of log σ. A policy narrower than e⁻⁵ of a unit would explore no more, and ratios of its
densities would be without meaning."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_2 = math.log(2.0)


def clip_log_std(log_std: Tensor) -> Tensor:
    """Log σ within its bounds; no gradient from beyond them."""
    return log_std.clamp(*LOG_STD)


def gaussian_log_prob(noise: Tensor, log_std: Tensor, free: Tensor | None = None) -> Tensor:
    """Log-density [B] of u = mean + σ · noise, summed over the free dimensions.

    noise, log_std[B,A]; free[B,A] bool, None: all
    """
    return _sum(-0.5 * noise.square() - log_std - _HALF_LOG_2PI, free)


def squash_log_det(raw: Tensor, free: Tensor | None = None) -> Tensor:
    """Σ log(1 − tanh(u)²)[B] over the free dimensions of u = raw[B,A]."""
    return _sum(2.0 * (_LOG_2 - raw - softplus(-2.0 * raw)), free)


def _sum(terms: Tensor, free: Tensor | None) -> Tensor:
    # A product, not a choice: what does not count is finite, and a product costs less.
    return (terms if free is None else terms * free).sum(-1)
