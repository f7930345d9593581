"""What execution is learned on: days, their public features, orders, rules and a reward.

Axes: `E` orders, `D` days, `T` ticks, `F` public features, `S` steps, `P` private inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.errors import DataError
from echelon.execution.days import Days
from echelon.execution.features import PublicArrays
from echelon.execution.orders import ParentOrders
from echelon.execution.rewards import Reward
from echelon.execution.simulator import ExecutionRules, Simulator, next_step, steps_of
from echelon.types import Floats32, Ints

PRIVATE = ("left", "time_left", "day_left", "day_gone", "even", "executed", "filled")
"""What an order knows of itself, each about between 0 and 1: share of the amount left; share of the
order's ticks left, and of the day's that are the order's still; share of the day gone; what TWAP
would take of what is left; executed in the step before, of the amount; executed of what was asked
for then."""


@dataclass(frozen=True)
class ExecutionTask:
    """Orders to learn from, and what they are paid."""

    days: Days
    public: PublicArrays
    orders: ParentOrders
    rules: ExecutionRules
    reward: Reward

    def __post_init__(self) -> None:
        check_public(self.public, self.days)
        if not len(self.orders):
            raise DataError("there are no orders to learn from. Draw some, or give a file of them.")

    @property
    def n_features(self) -> int:
        """F."""
        return int(self.public.today.shape[2])

    @property
    def n_steps(self) -> int:
        """S: steps of the longest order."""
        return int(steps_of(self.orders, self.rules.ticks_per_step).max())


def check_public(public: PublicArrays, days: Days) -> None:
    """Refuse features that are not of these days."""
    for name in ("today", "yesterday"):
        array = getattr(public, name)
        if array.ndim != 3 or array.shape[:2] != days.shape:
            raise DataError(
                f"public features {name!r} are {array.shape}, expected [D,T,F] with (D, T) = "
                f"{days.shape}. Make them from these days."
            )
        if not np.isfinite(array).all():
            raise DataError(
                f"public features {name!r} are not all numbers. Fill or mask what is missing."
            )


def private_inputs(simulator: Simulator) -> Floats32:
    """[E,P] as the coming step begins; in the order of `PRIVATE`."""
    progress, orders, steps = simulator.progress, simulator.orders, simulator.steps
    n_ticks = simulator.days.shape[1]
    coming = next_step(simulator)
    left = np.maximum(orders.end - progress.tick, 0)
    at = (np.arange(len(orders)), np.maximum(progress.step - 1, 0))
    began = progress.step > 0
    executed = np.where(began, steps.executed[at], 0.0)
    asked = np.where(began, steps.requested[at], 0.0)
    filled = np.where(asked > 0.0, executed / np.where(asked > 0.0, asked, 1.0), 1.0)
    columns = (
        progress.left / orders.amount,
        left / (orders.end - orders.start),
        left / n_ticks,
        progress.tick / n_ticks,
        coming.ticks / coming.left,
        executed / orders.amount,
        np.minimum(filled, 1.0),
    )
    return np.stack(columns, axis=1).astype(np.float32)


def step_ticks(orders: ParentOrders, ticks_per_step: int) -> Ints:
    """[E,S] tick at which each step begins; after an order's last step, its last tick."""
    count = np.arange(int(steps_of(orders, ticks_per_step).max(initial=1)))
    grid = (orders.start[:, None] // ticks_per_step + count) * ticks_per_step
    ticks = np.maximum(grid, orders.start[:, None])
    return np.asarray(np.minimum(ticks, orders.end[:, None] - 1), dtype=np.int64)
