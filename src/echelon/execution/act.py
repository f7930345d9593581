"""From actions to shares: what a policy's choice asks of the simulator.

    fractions    one of a few shares of the whole order (Qlib's categorical actions: 0, 1/4, … 1)
    rate         a multiple of the pace that would spread what is left evenly to the order's end

Both ask for all that is left in an order's last step. The even pace is counted in ticks, so that an
order which begins or ends off the grid of steps, and whose first or last step is therefore short,
asks for a short step's share there.

Axes: `E` orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echelon.errors import ConfigError
from echelon.execution.orders import Ints
from echelon.execution.simulator import Simulator
from echelon.types import Bools, Floats

QLIB_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Coming(NamedTuple):
    """The step that comes next.

    end[E]: the tick after its last; ticks[E]: how many it has; left[E]: ticks to the order's end,
    the step's own among them; final[E]: whether it is the order's last. Of orders that are done,
    whose time may be over, ticks and left are 1 and final is true.
    """

    end: Ints
    ticks: Ints
    left: Ints
    final: Bools


def coming_step(simulator: Simulator) -> Coming:
    """Where the next step of each order goes, by the simulator's own grid."""
    tick, end = simulator.progress.tick, simulator.orders.end
    per_step = simulator.rules.ticks_per_step
    until = np.minimum((tick // per_step + 1) * per_step, end)
    return Coming(
        until, np.maximum(until - tick, 1), np.maximum(end - tick, 1), np.asarray(until >= end)
    )


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

    @property
    def n_actions(self) -> int:
        """How many there are to choose from."""
        return len(self.values)

    def shares(self, actions: Ints, simulator: Simulator) -> Floats:
        """[E] shares asked for by actions[E]."""
        asked = np.asarray(self.values)[actions] * simulator.orders.amount
        return np.where(coming_step(simulator).final, simulator.progress.left, asked)


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
        coming, left = coming_step(simulator), simulator.progress.left
        even = left * coming.ticks / coming.left
        return np.where(coming.final, left, np.clip(rate, 0.0, self.rate_max) * even)
