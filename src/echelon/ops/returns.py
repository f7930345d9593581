"""Returns, advantages and targets: time first, `[T, B]`.

Retrace is for sequences that another policy made. It looks one step ahead and adds what the steps
after it found, as far as π would have taken them:

    r_t + γ_t [V(s_{t+1}) + c_{t+1} (target_{t+1} − Q(s_{t+1}, a_{t+1}))]

`[L, B]` are L steps of B sequences (a replay that draws `[n, L]` is transposed before). Values of
the state a step led to are an argument of their own, since the state after a cut is not the one at
which the next step began. Three things end a sequence:

1. terminated: `discount_t` is 0 there, and nothing comes back from beyond;
2. truncated: the step bootstraps with `v_next`, and the trace stops;
3. there is no next step: as if truncated.

Its targets carry no gradient.
"""

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


@torch.no_grad()
def retrace(
    r_t: Tensor,
    discount_t: Tensor,
    v_next: Tensor,
    q_t: Tensor,
    c_t: Tensor,
    *,
    truncated: Tensor | None = None,
) -> Tensor:
    """Retrace targets [L,B] of Q(s_t, a_t) (Munos et al., 2016); soft where `v_next` is.

    r_t, discount_t[L,B]: of the step
    v_next[L,B]: E_π[min Q̄ − α log π] at the state after the step
    q_t[L,B]: min Q̄(s_t, a_t) of the action taken; c_t[L,B]: λ · min(1, π/μ) of it
    (`ops.squashed`). Neither of the first step counts: its action is the one being valued.
    truncated[L,B] bool: cut off after this step; None: nowhere

    Any c_t in [0, π/μ] has the values of π for its fixed point.
    """
    assert r_t.dim() == 2, f"r_t should be [L,B], is {tuple(r_t.shape)}"
    assert len(r_t) > 0, "a sequence has at least one step"
    parts = {"discount_t": discount_t, "v_next": v_next, "q_t": q_t, "c_t": c_t}
    for name, values in parts.items():
        shapes = f"should be [L,B] = {tuple(r_t.shape)}, is {tuple(values.shape)}"
        assert values.shape == r_t.shape, f"{name} {shapes}"
        assert values.dtype == r_t.dtype, f"{name} is {values.dtype}, r_t {r_t.dtype}"
    # Whether the following step belongs to the same sequence.
    goes_on = torch.ones(r_t.shape, dtype=torch.bool, device=r_t.device)
    goes_on[-1:] = False
    if truncated is not None:
        assert truncated.shape == r_t.shape, "truncated is not [L,B]"
        assert truncated.dtype == torch.bool, f"truncated is {truncated.dtype}, not bool"
        goes_on &= ~truncated
    one_step = r_t + discount_t * v_next
    weight = discount_t * _next(c_t) * goes_on.to(r_t.dtype)
    surprise = one_step - q_t
    for t in reversed(range(len(r_t) - 1)):
        surprise[t].addcmul_(weight[t], surprise[t + 1])
    return one_step + weight * _next(surprise)


def _next(values: Tensor) -> Tensor:
    """What the following step has, 0 for the last."""
    return torch.cat([values[1:], torch.zeros_like(values[:1])])
