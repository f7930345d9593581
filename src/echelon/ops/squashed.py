"""The squashed Gaussian: u ~ N(mean, σ²), a = tanh(u) (Haarnoja et al., 2018).

log p(a) = log N(u) − Σ log(1 − tanh(u)²), and log(1 − tanh(u)²) = 2 (log 2 − u − softplus(−2u)),
which neither overflows nor loses its digits where the tanh is flat. `free[…,A]` says which
dimensions count: the others have probability 1, hence no part in any sum.

How far what another policy did may be believed goes by ratios of densities *before* the tanh:
replay keeps u and its Gaussian log-density, and the tanh's own factor is the same for π and μ. The
ratio of a whole action is a product over its dimensions and vanishes as they become many, even of
two policies that differ little in each. So what is *dropped* goes by the divergence per dimension,
which does not depend on their number.

Axes: `…` any (such as [L,B], time first), `A` dimensions of the action, `K` experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
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
    """Log-density[…] of u = mean + σ · noise[…,A], summed over the free dimensions; None: all."""
    return _sum(-0.5 * noise.square() - log_std - _HALF_LOG_2PI, free)


def squash_log_det(raw: Tensor, free: Tensor | None = None) -> Tensor:
    """Σ log(1 − tanh(u)²)[B] over the free dimensions of u = raw[B,A]."""
    return _sum(2.0 * (_LOG_2 - raw - softplus(-2.0 * raw)), free)


def _sum(terms: Tensor, free: Tensor | None) -> Tensor:
    # A product, not a choice: what does not count is finite, and a product costs less.
    return (terms if free is None else terms * free).sum(-1)


@torch.no_grad()
def log_ratio(
    raw: Tensor, raw_log_prob: Tensor, mean: Tensor, log_std: Tensor, free: Tensor | None = None
) -> Tensor:
    """The log-ratio log π(u) − log μ(u)[…] of remembered actions, over the free dimensions.

    raw[…,A]: u, before the tanh; raw_log_prob[…]: log μ(u), stored when it was drawn
    mean, log_std[…,A]: of π at the same observations, log σ bounded here as where π draws
    free[…,A] bool, None: all; where none is, both densities are empty products and the ratio is 1
    """
    assert raw.shape == mean.shape == log_std.shape, "raw, mean and log_std differ in shape"
    assert raw_log_prob.shape == raw.shape[:-1], "raw_log_prob is not […] of raw […,A]"
    _require_free(free, raw)
    log_std = clip_log_std(log_std)
    noise = (raw - mean) * torch.exp(-log_std)
    return gaussian_log_prob(noise, log_std, free) - raw_log_prob


@torch.no_grad()
def trace_coefficients(log_ratio: Tensor, trace: float) -> Tensor:
    """Coefficients c = λ · min(1, π/μ)[…], as Retrace has them; trace: λ."""
    if not 0.0 <= trace <= 1.0:
        raise ValueError(f"expected trace within [0, 1], found {trace}")
    # Bounded before the exponential: a ratio that overflows is above 1 all the same.
    return trace * log_ratio.clamp(max=0.0).exp()


@torch.no_grad()
def kl_per_dimension(
    mean: Tensor,
    log_std: Tensor,
    other_mean: Tensor,
    other_log_std: Tensor,
    free: Tensor | None = None,
) -> Tensor:
    """KL(N(mean, σ²) ‖ N(other_mean, other σ²))[…], its mean over the free dimensions.

    All […,A], log σ bounded as where policies draw; free[…,A] bool, None: all. 0 where no
    dimension is free: there was nothing to choose, hence nothing to differ in. The tanh leaves a
    divergence as it is.
    """
    assert mean.shape == log_std.shape == other_mean.shape == other_log_std.shape, (
        "means and log_stds differ in shape"
    )
    _require_free(free, mean)
    log_std, other_log_std = clip_log_std(log_std), clip_log_std(other_log_std)
    narrower = other_log_std - log_std
    shift = (mean - other_mean) * torch.exp(-other_log_std)
    # expm1 keeps the digits where the two are nearly the same.
    terms = narrower + 0.5 * (torch.expm1(-2.0 * narrower) + shift.square())
    if free is None:
        return terms.mean(-1)
    return (terms * free).sum(-1) / free.sum(-1).clamp(min=1)


def too_far(kl: Tensor, shared: Tensor, limit: float) -> Tensor:
    """Which steps are dropped: shared[…] bool ones whose kl[…] is above the limit, or unknown."""
    assert shared.dtype == torch.bool, f"shared is {shared.dtype}, not bool"
    return shared & ~(kl <= limit)


class SourceTraces(NamedTuple):
    """What a batch took from each expert; NaN for those it holds nothing of.

    steps[K] int64: their number; mean_trace[K]: of their coefficients, the dropped ones included
    dropped_share[K]: of those steps, how many were dropped
    """

    steps: Tensor
    mean_trace: Tensor
    dropped_share: Tensor


@torch.no_grad()
def by_source(source: Tensor, c_t: Tensor, dropped: Tensor, n_sources: int) -> SourceTraces:
    """Means by the expert that made the step: source[L,B] or [B] in 0 … K−1; c_t, dropped[L,B]."""
    assert dropped.shape == c_t.shape, "dropped and c_t differ in shape"
    ids = source.expand_as(c_t).flatten().long()
    low, high = int(ids.min()), int(ids.max())
    if not 0 <= low <= high < n_sources:
        raise ValueError(f"expected sources from 0 to {n_sources - 1}, found {low} to {high}")

    def total(values: Tensor) -> Tensor:
        return torch.bincount(ids, weights=values.flatten().double(), minlength=n_sources)

    steps = torch.bincount(ids, minlength=n_sources)
    return SourceTraces(steps, total(c_t) / steps, total(dropped) / steps)


def _require_free(free: Tensor | None, like: Tensor) -> None:
    assert free is None or (free.shape == like.shape and free.dtype == torch.bool), (
        f"free should be bool {tuple(like.shape)}"
    )
