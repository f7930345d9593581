"""Interpreters: what a policy sees of its orders, and what its actions ask of the simulator.

States, with the names and meanings of Qlib's, as batches of 32-bit arrays: the full history
(features of today up to now, of yesterday, positions after every step) and the current step alone.
Here `num_step` is the number of steps of the order itself, and `position_history` has a place for
the position after the last step too (Qlib cuts it off). Networks of ours do not need
`data_processed` copied for every order: they encode features once a day and look them up at
(day, cur_tick - 1). These arrays are for policies that come from elsewhere.

Actions:

    fractions    one of a few shares of the whole order (Qlib's categorical actions: 0, 1/4, … 1)
    rate         a multiple of the pace that would spread what is left evenly to the order's end

Both ask for all that is left in an order's last step. The even pace is counted in ticks, so that an
order which begins or ends off the grid of steps, and whose first or last step is therefore short,
asks for a short step's share there.

Axes: `E` orders, `T` ticks of a day, `F` features, `S` steps of the longest order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from echelon.errors import ConfigError
from echelon.execution.features import PublicFeatures
from echelon.execution.simulator import LEFT, Simulator, next_step
from echelon.types import Floats, Floats32, Ints

QLIB_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
Ints32 = NDArray[np.int32]


@dataclass(frozen=True)
class Fractions:
    """Categorical actions: number a asks for values[a] of the whole order."""

    values: tuple[float, ...] = QLIB_FRACTIONS

    def __post_init__(self) -> None:
        if len(self.values) < 2 or not all(0.0 <= value <= 1.0 for value in self.values):
            raise ConfigError(
                f"fractions {self.values} must be two or more shares of the order, each from 0 to "
                "1. Correct them."
            )

    def shares(self, actions: Ints, simulator: Simulator) -> Floats:
        """[E] shares asked for by actions[E]."""
        asked = np.asarray(self.values)[actions] * simulator.orders.amount
        return np.where(next_step(simulator).final, simulator.progress.left, asked)


@dataclass(frozen=True)
class TwapRate:
    """A continuous action: rate × what TWAP would ask for, the rate from 0 to `rate_max`."""

    rate_max: float = 4.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.rate_max) and self.rate_max > 1.0):
            raise ConfigError(
                f"rate_max = {self.rate_max} must be a number over 1: at 1 no policy could be "
                "faster than TWAP. Raise it."
            )

    def shares(self, rate: Floats, simulator: Simulator) -> Floats:
        """[E] shares asked for by rate[E]; a rate out of its range is cut to it."""
        coming, left = next_step(simulator), simulator.progress.left
        even = left * coming.ticks / coming.left
        return np.where(coming.final, left, np.clip(rate, 0.0, self.rate_max) * even)


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
