"""The maths of the learners, apart from any network.

Where `taken` is false an order was done already: that step counts in no mean.

Axes: `E` orders, `S` steps, `A` actions; what is `…` is any shape, the same for all arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.ops.returns import lambda_returns


def taken_mean(values: Tensor, taken: Tensor) -> Tensor:
    """Mean of the values[…] of steps that were taken."""
    return (values * taken).sum() / taken.sum().clamp_min(1)


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, taken: Tensor, clip: float
) -> Tensor:
    """−mean min(ρA, clip(ρ, 1 ± ε)A), ρ being new over old probability (Schulman et al., 2017)."""
    ratio = torch.exp(log_prob - old_log_prob)
    cut = ratio.clamp(1.0 - clip, 1.0 + clip)
    return -taken_mean(torch.minimum(ratio * advantage, cut * advantage), taken)


def value_loss(value: Tensor, returns: Tensor, taken: Tensor) -> Tensor:
    """Mean (V − G)²."""
    return taken_mean((value - returns).square(), taken)


def order_returns(reward: Tensor, discount: Tensor, value: Tensor, trace: float) -> Tensor:
    """G[S,E], λ-returns of whole orders; G − V is the generalised advantage.

    reward, value[S,E]; discount[S,E]: γ, 0 at an order's last step and after it. All orders end, so
    there is nothing to bootstrap from after the last step.
    """
    after = torch.cat([value, torch.zeros_like(value[:1])])
    return lambda_returns(reward, discount, after, trace)


def standardize_where(values: Tensor, taken: Tensor) -> Tensor:
    """Less their mean, over their standard deviation, both of taken steps only; 0 elsewhere."""
    apart = (values - taken_mean(values, taken)) * taken
    return apart / (taken_mean(apart.square(), taken).sqrt() + 1e-8)


def double_q_target(
    reward: Tensor, discount: Tensor, online_next: Tensor, target_next: Tensor
) -> Tensor:
    """Target r + γ·Q'(s', argmax_a Q(s', a)) (van Hasselt et al., 2016); all without a gradient.

    reward, discount[…]; online_next, target_next[…,A]: Q and Q' after the step
    """
    best = online_next.argmax(-1, keepdim=True)
    return reward + discount * target_next.gather(-1, best).squeeze(-1)
