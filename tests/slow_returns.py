"""Discounted returns, a step at a time: what faster or more general ones must agree with."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(r_t: Tensor, discount_t: Tensor, v_last: Tensor) -> Tensor:
    """G[T,B] with G_t = r_t + discount_t · G_{t+1} and G_T = v_last[B]."""
    returns = torch.empty_like(r_t)
    following = v_last
    for t in reversed(range(len(r_t))):
        following = r_t[t] + discount_t[t] * following
        returns[t] = following
    return returns
