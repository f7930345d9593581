"""State interpreters: what a policy sees of its orders, as batches of 32-bit arrays.

Two, with the names and meanings of Qlib's: the full history (features of today up to now, of
yesterday, positions after every step) and the current step alone. Here `num_step` is the number of
steps of the order itself, and `position_history` has a place for the position after the last step
too (Qlib cuts it off).

Networks of ours do not need `data_processed` copied for every order: they encode features once a
day and look them up at (day, cur_tick - 1). These arrays are for policies that come from elsewhere.

Axes: `E` orders, `T` ticks of a day, `F` features, `S` steps of the longest order.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from echelon.execution.features import PublicFeatures
from echelon.execution.simulator import LEFT, Simulator
from echelon.types import Floats32

Ints32 = NDArray[np.int32]


class CurrentStep(TypedDict):
    """acquiring[E]: 1 for buys; cur_step, num_step[E]; target, position[E]: whole and left."""

    acquiring: Ints32
    cur_step: Ints32
    num_step: Ints32
    target: Floats32
    position: Floats32


class FullHistory(CurrentStep):
    """What is known as the coming step begins.

    data_processed[E,T,F]: today, zero from cur_tick on; data_processed_prev[E,T,F]: yesterday
    cur_tick[E]: next tick, at most T-1
    position_history[E,S+1]: left before the first step and after each, zero for those to come
    """

    data_processed: Floats32
    data_processed_prev: Floats32
    cur_tick: Ints32
    position_history: Floats32


def current_step(simulator: Simulator) -> CurrentStep:
    """The orders' own state and nothing of the market."""
    progress, orders = simulator.progress, simulator.orders
    return {
        "acquiring": orders.buying.astype(np.int32),
        # A finished order still needs a step that exists.
        "cur_step": np.minimum(progress.step, simulator.n_steps - 1).astype(np.int32),
        "num_step": simulator.n_steps.astype(np.int32),
        "target": orders.amount.astype(np.float32),
        "position": _nothing_below(progress.left).astype(np.float32),
    }


def full_history(simulator: Simulator, features: PublicFeatures) -> FullHistory:
    """The orders' state with the features of their days, masked from the next tick on."""
    assert features.today.shape[:2] == simulator.days.shape, "features are of other days"
    progress, orders = simulator.progress, simulator.orders
    n_ticks = simulator.days.shape[1]
    over = np.arange(n_ticks) < progress.tick[:, None]
    today = np.where(over[:, :, None], features.today[orders.day], np.float32(0.0))
    history = np.zeros((len(orders), simulator.steps.left.shape[1] + 1), dtype=np.float32)
    history[:, 0] = orders.amount
    # Steps not taken hold zero left already.
    history[:, 1:] = _nothing_below(simulator.steps.left)
    return {
        **current_step(simulator),
        "data_processed": today,
        "data_processed_prev": features.yesterday[orders.day],
        "cur_tick": np.minimum(progress.tick, n_ticks - 1).astype(np.int32),
        "position_history": history,
    }


def _nothing_below(left: NDArray[np.float64]) -> NDArray[np.float64]:
    """Less than 1e-6 left is nothing."""
    return np.where(left < LEFT, 0.0, left)
