"""Returns and advantages over rollouts: time first, `[T, B]`."""

from __future__ import annotations

import torch
from torch import Tensor


def lambda_returns(r_t: Tensor, discount_t: Tensor, v: Tensor, trace: float) -> Tensor:
    """G[T,B] with G_t = r_t + discount_t · ((1 − λ) · v_{t+1} + λ · G_{t+1}) and G_T = v_T.

    r_t[T,B]: rewards; discount_t[T,B]: γ, 0 where the step ended an episode for good
    v[T+1,B]: values; the last is that of the state after the last step, for what was merely cut off
    trace: λ; the advantage G − v is then the generalised one (Schulman et al., 2016)
    """
    assert r_t.dim() == 2, f"r_t should be [T,B], is {tuple(r_t.shape)}"
    assert discount_t.shape == r_t.shape, "discount_t is not [T,B]"
    assert v.shape == (len(r_t) + 1, r_t.shape[1]), "v is not [T+1,B]"
    returns = torch.empty_like(r_t)
    following = v[-1]
    for t in reversed(range(len(r_t))):
        following = r_t[t] + discount_t[t] * torch.lerp(v[t + 1], following, trace)
        returns[t] = following
    return returns


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """Share of the returns' variance that the values foresaw: 1 − Var(G − V) / Var(G).

    1: all of it; 0: no more than a constant would, or returns that do not vary; below 0: values
    that are worse than a constant. returns, values: of one shape, NaN where one of them is NaN.
    """
    assert returns.shape == values.shape, "returns and values differ in shape"
    # In float64 no quotient of finite float32 numbers overflows.
    g, v = returns.detach().double(), values.detach().double()
    whole = float(g.var(correction=0))
    return 1.0 - float((g - v).var(correction=0)) / whole if whole != 0.0 else 0.0


def standardize(values: Tensor, eps: float = 1e-8) -> Tensor:
    """`values` less their mean, over their standard deviation."""
    return (values - values.mean()) / (values.std(correction=0) + eps)
