"""Which part of the train window teaches the experts, and which the router.

The router is to judge experts as they will be out of sample, so it learns on a window that no
expert's gradient has seen: the last part of the train window, or the last of its stretches where
it has several. Both parts are the same world with other spans; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from echelon.backtest.policy import Policy
from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import DataError
from echelon.ops.measures import sharpe_annual
from echelon.ops.responsibility import responsibilities
from echelon.types import Floats, Floats32

_PIECE = 500
"""Most bars that an own book trades at a time: pieces are traded side by side, hence quickly."""
_SIDE_BY_SIDE = 64
"""Pieces that a short window is cut into: a step of so many costs little more than one of one."""
_NOBODY = 1e-6
"""Where the router gives all experts together less than this, the row is everybody's."""
_LEAST_STRETCHES = 4
"""Stretches from which on whole ones are kept for the router."""


class Parts(NamedTuple):
    """The train window, shared out."""

    experts: World
    router: World


def parts_of(world: World, share: float) -> Parts:
    """The experts' and the router's part of `split.train`; share: the router's."""
    spans = world.spans("train")
    if len(spans) >= _LEAST_STRETCHES:
        kept = min(max(1, round(share * len(spans))), len(spans) - 1)
        return Parts(_with(world, spans[:-kept]), _with(world, spans[-kept:]))
    first, last = [], []
    for span in spans:
        cut = span.stop - int(share * len(span))
        if cut - span.start < 2 or span.stop - cut < 2:
            raise DataError(
                f"split.train has {len(span)} bars to decide on; shared out between experts and "
                f"router (meta_router.window_share = {share:g}) one of them has fewer than 2. "
                "Lengthen the split."
            )
        # The experts' last reward is paid at the row before the router's first.
        first.append(range(span.start, cut))
        last.append(range(cut, span.stop))
    return Parts(_with(world, first), _with(world, last))


def _with(world: World, spans: Sequence[range]) -> World:
    """The same world, whose train window is these spans."""
    whole = range(spans[0].start, spans[-1].stop)
    others = {name: pieces for name, pieces in world.stretches.items() if name != "train"}
    pieces = {"train": tuple(spans)} if len(spans) > 1 else {}
    return replace(world, splits={**world.splits, "train": whole}, stretches=others | pieces)


def own_returns(policy: Policy, world: World, config: Config, warm: int) -> Floats:
    """[T] return that the policy's own book earned by its decision at each row of the train window.

    NaN elsewhere. Traded in pieces side by side, each with cash at first and `warm` bars before
    those that count, so that a book's beginning does not matter.
    """
    earned = np.full(len(world.times), np.nan)
    spans = world.spans("train")
    counted = min(_PIECE, max(warm, sum(len(span) for span in spans) // _SIDE_BY_SIDE))
    steps = min(counted + warm, min(len(span) for span in spans) - 1)
    stride = max(1, steps - warm)
    starts = [
        min(first, span.stop - 1 - steps)
        for span in spans
        for first in range(span.start, span.stop - 1 - min(warm, steps - 1), stride)
    ]
    begun = np.array(sorted(set(starts)), dtype=np.int64)
    values = run_values(policy, world, begun, steps, config)
    returns = values[1:] / values[:-1] - 1.0
    firsts = {span.start for span in spans}
    for e, start in enumerate(begun.tolist()):
        skip = 0 if start in firsts else min(warm, steps - 1)
        earned[start + skip : start + steps] = returns[skip:, e]
    return earned


def row_weights(
    returns: Floats, world: World, *, window: int, temperature: float, floor: float
) -> Floats32:
    """[K,T] weight of each row in each expert's loss, K · responsibility; their mean over K is 1.

    returns[K,T]: of the experts' own books (`own_returns`); stretches are looked at by themselves
    """
    weights = np.ones(returns.shape, dtype=np.float32)
    for span in world.spans("train"):
        rows = slice(span.start, span.stop - 1)
        shares = responsibilities(returns[:, rows], window, temperature, floor)
        weights[:, rows] = len(returns) * shares
    return weights


def routed_weights(probabilities: Floats, floor: float) -> Floats32:
    """[K,T] weight of each row in each expert's loss, by how probable the router finds the expert.

    probabilities[T,K+1]: the last one of cash, which nobody learns from; NaN: a row of nobody's
    floor: share of every row that is spread over all experts
    """
    experts = np.nan_to_num(probabilities[:, :-1])
    total = experts.sum(axis=1, keepdims=True)
    n_experts = experts.shape[1]
    shares = np.full_like(experts, 1.0 / n_experts)
    np.divide(experts, total, out=shares, where=total > _NOBODY)
    weights = (1.0 - floor) * n_experts * shares + floor
    return np.ascontiguousarray(weights.T, dtype=np.float32)


def window_sharpes(policy: Policy, world: World, config: Config, pieces: int) -> Floats:
    """[P] Sharpe ratios (annual) on equal pieces of the validation window, each from cash on.

    Of a window that has stretches, each is cut into as many; all pieces are traded side by side.
    """
    spans = world.spans("valid")
    steps = min(len(span) - 1 for span in spans) // pieces
    if steps < 2:
        raise DataError(
            f"split.valid is too short for trainer.evolution.windows = {pieces}: a piece would "
            f"have {steps} bars, and a Sharpe ratio needs 2. Lengthen the split or take fewer."
        )
    starts = np.array([span.start + k * steps for span in spans for k in range(pieces)])
    values = run_values(policy, world, starts, steps, config)
    returns = values[1:] / values[:-1] - 1.0
    return np.array([sharpe_annual(r, world.periods_per_year) for r in returns.T])
