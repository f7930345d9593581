"""Returns, advantages and targets: time first, `[T, B]`.

Two are for sequences that another policy made, V-trace for state values and Retrace for Q. Both
look one step ahead and add what the steps after it found, as far as π would have taken them:

    V-trace  v_t + ρ_t δ_t + γ_t c_t (target_{t+1} − v_{t+1}),  δ_t = r_t + γ_t V(s_{t+1}) − v_t
    Retrace  r_t + γ_t [V(s_{t+1}) + c_{t+1} (target_{t+1} − Q(s_{t+1}, a_{t+1}))]

`[L, B]` are L steps of B sequences (a replay that draws `[n, L]` is transposed before). Values of
the state a step led to are an argument of their own, since the state after a cut is not the one at
which the next step began. Three things end a sequence:

1. terminated: `discount_t` is 0 there, and nothing comes back from beyond;
2. truncated: the step bootstraps with `v_next`, and the trace stops;
3. there is no next step: as if truncated.

Targets carry no gradient.
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
def vtrace(
    r_t: Tensor,
    discount_t: Tensor,
    v_t: Tensor,
    v_next: Tensor,
    log_ratio_t: Tensor,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    trace: float = 1.0,
    truncated: Tensor | None = None,
) -> Tensor:
    """V-trace targets [L,B] of state values (Espeholt et al., 2018).

    r_t, discount_t[L,B]: of the step; v_t, v_next[L,B]: values of its state and of the one after
    log_ratio_t[L,B]: log π(a_t) − log μ(a_t)
    rho_bar, c_bar: bounds of the ratio before the step's own error and in the trace; trace: λ
    truncated[L,B] bool: cut off after this step; None: nowhere

    The values that fit these targets are those of the policy ∝ min(ρ̄ μ, π): of π itself where ρ̄
    bounds nothing. c̄ and λ change only how fast and how noisily one gets there.
    """
    if not 0.0 <= trace <= 1.0:
        raise ValueError(f"expected trace within [0, 1], found {trace}")
    if not 0.0 < c_bar <= rho_bar:
        raise ValueError(f"expected 0 < c_bar ≤ rho_bar, found c_bar={c_bar}, rho_bar={rho_bar}")
    _require_alike(r_t, discount_t=discount_t, v_t=v_t, v_next=v_next, log_ratio_t=log_ratio_t)
    ratio = log_ratio_t.exp()
    error = ratio.clamp(max=rho_bar) * (r_t + discount_t * v_next - v_t)
    weight = discount_t * (trace * ratio.clamp(max=c_bar)) * _goes_on(r_t, truncated)
    return v_t + _accumulate(error, weight)


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
    _require_alike(r_t, discount_t=discount_t, v_next=v_next, q_t=q_t, c_t=c_t)
    one_step = r_t + discount_t * v_next
    weight = discount_t * _next(c_t) * _goes_on(r_t, truncated)
    surprise = _accumulate(one_step - q_t, weight)
    return one_step + weight * _next(surprise)


def _accumulate(error: Tensor, weight: Tensor) -> Tensor:
    """x[L,B] with x_t = error_t + weight_t · x_{t+1}, and nothing after the last."""
    total = error.clone()
    for t in reversed(range(len(error) - 1)):
        total[t].addcmul_(weight[t], total[t + 1])
    return total


def _next(values: Tensor) -> Tensor:
    """What the following step has, 0 for the last."""
    return torch.cat([values[1:], torch.zeros_like(values[:1])])


def _goes_on(like: Tensor, truncated: Tensor | None) -> Tensor:
    """1.0 where the following step belongs to the same sequence, otherwise 0.0: [L,B]."""
    on = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    on[-1:] = False
    if truncated is not None:
        assert truncated.shape == like.shape, "truncated is not [L,B]"
        assert truncated.dtype == torch.bool, f"truncated is {truncated.dtype}, not bool"
        on &= ~truncated
    return on.to(like.dtype)


def _require_alike(r_t: Tensor, **others: Tensor) -> None:
    assert r_t.dim() == 2, f"r_t should be [L,B], is {tuple(r_t.shape)}"
    assert len(r_t) > 0, "a sequence has at least one step"
    for name, values in others.items():
        assert values.shape == r_t.shape, (
            f"{name} should be [L,B] = {tuple(r_t.shape)}, is {tuple(values.shape)}"
        )
        assert values.dtype == r_t.dtype, f"{name} is {values.dtype}, r_t {r_t.dtype}"
