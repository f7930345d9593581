"""Rewards: what a step pays, from the values of the books before and after it.

    base      return, log return, excess over a benchmark or the mean asset, differential Sharpe
    − λ_v ·   square of the return
    − λ_d ·   deepening of the drawdown
    − λ_c ·   loss beyond the value at risk, over the tail's share (Rockafellar and Uryasev)
    × scale

Functions are pure and batched over E books; what must be remembered between steps is in
`RewardState`. A step's reward uses nothing later than the step's mark.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from echelon.config.agents import RewardConfig
from echelon.types import Bools, Floats

CVAR_LEAST = 500  # returns to have seen before a tail is spoken of: 5 % of fewer are too few points
_CVAR_MEMORY = 5000
SHARPE_BOUND = 10.0  # a bar's contribution to the Sharpe ratio is cut to ± this


class RewardState(NamedTuple):
    peak: Floats  # [E] highest value of the episode so far
    drawdown: Floats  # [E] below it, as a share
    mean: Floats  # [E] decaying moments of the returns (differential Sharpe)
    square: Floats  # [E]
    returns: Floats  # [M] the latest of all books, NaN where none yet (CVaR)
    cursor: int  # the next place in them


def new_state(value: Floats, config: RewardConfig) -> RewardState:
    """Nothing seen yet; books worth `value`[E]."""
    returns = np.full(_CVAR_MEMORY if config.cvar_penalty > 0 else 0, np.nan)
    drawdown, mean, square = np.zeros((3, len(value)))
    return RewardState(value.copy(), drawdown, mean, square, returns, 0)


def restart(state: RewardState, value: Floats, which: Bools) -> RewardState:
    """The state after the books `which`[E] began a new episode at `value`[E]."""
    return state._replace(
        peak=np.where(which, value, state.peak),
        drawdown=np.where(which, 0.0, state.drawdown),
        mean=np.where(which, 0.0, state.mean),
        square=np.where(which, 0.0, state.square),
    )


def reward(
    state: RewardState,
    before: Floats,
    after: Floats,
    benchmark: Floats | None,
    config: RewardConfig,
) -> tuple[Floats, RewardState]:
    """(rewards[E], state) of a step from value `before`[E] to `after`[E]; see `RewardConfig`."""
    gain = after / before - 1.0
    peak = np.maximum(state.peak, after)
    drawdown = 1.0 - after / peak
    paid, mean, square = _base(state, gain, benchmark, config)
    if config.variance_penalty:
        paid = paid - config.variance_penalty * gain**2
    if config.drawdown_penalty:
        deeper = np.maximum(drawdown - state.drawdown, 0.0)
        paid = paid - config.drawdown_penalty * deeper
    returns, cursor = state.returns, state.cursor
    if config.cvar_penalty:
        paid = paid - config.cvar_penalty * tail_cost(-gain, returns, config.cvar_tail)
        places, returns = (cursor + np.arange(len(gain))) % len(returns), returns.copy()
        returns[places] = gain
        cursor = int((cursor + len(gain)) % len(returns))
    return paid * config.scale, RewardState(peak, drawdown, mean, square, returns, cursor)


def _base(
    state: RewardState, gain: Floats, benchmark: Floats | None, config: RewardConfig
) -> tuple[Floats, Floats, Floats]:
    if config.kind == "differential_sharpe":
        return differential_sharpe(state.mean, state.square, gain, config.sharpe_decay)
    if config.kind == "log_return":
        return np.log1p(np.maximum(gain, -1.0 + 1e-9)), state.mean, state.square
    if config.kind in ("excess", "active"):
        assert benchmark is not None, "excess over a benchmark needs one"
        return gain - benchmark, state.mean, state.square
    return gain, state.mean, state.square


def differential_sharpe(
    mean: Floats, square: Floats, gain: Floats, decay: float
) -> tuple[Floats, Floats, Floats]:
    """(D[E], mean[E], square[E]): a return's contribution to a decaying Sharpe ratio.

    D = (B·ΔA − A·ΔB/2) / (B − A²)^{3/2}, with the decaying moments A and B before the step
    (Moody and Saffell, Learning to trade via direct reinforcement, 2001). 0 while the variance
    is; cut to ±10, as a first large return after small ones would give tens of thousands.
    """
    delta_mean, delta_square = gain - mean, gain**2 - square
    variance = square - mean**2
    known = variance > 1e-12
    top = square * delta_mean - 0.5 * mean * delta_square
    contribution = np.divide(top, np.where(known, variance, 1.0) ** 1.5, where=known, out=top * 0.0)
    contribution = np.clip(contribution, -SHARPE_BOUND, SHARPE_BOUND)
    return contribution, mean + decay * delta_mean, square + decay * delta_square


def tail_cost(loss: Floats, returns: Floats, tail: float) -> Floats:
    """(loss[E] − VaR)⁺ / tail, the value at risk being that of `returns`[M], NaN where none yet.

    Its mean plus the value at risk is the CVaR. 0 until `CVAR_LEAST` returns are known.
    """
    seen = returns[~np.isnan(returns)]
    if len(seen) < CVAR_LEAST:
        return np.zeros_like(loss)
    value_at_risk = -np.quantile(seen, tail)
    return np.asarray(np.maximum(loss - value_at_risk, 0.0) / tail)
