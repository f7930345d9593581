"""Parent orders: how much of what to buy or sell, on which day, between which ticks.

Axes: `E` orders.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.errors import DataError
from echelon.execution.days import Days
from echelon.types import Bools, Floats

Ints = NDArray[np.int64]


class ParentOrders(NamedTuple):
    """`E` orders; all ticks of one lie within its day.

    day[E]: number of the day in `Days`; amount[E]: shares, positive
    buying[E]; start, end[E]: first tick, and the one after the last
    """

    day: Ints
    amount: Floats
    buying: Bools
    start: Ints
    end: Ints

    def __len__(self) -> int:  # of orders, not of fields
        return len(self.day)

    def take(self, which: Ints | slice) -> ParentOrders:
        """Some of them."""
        return ParentOrders(
            self.day[which],
            self.amount[which],
            self.buying[which],
            self.start[which],
            self.end[which],
        )


def parent_orders(
    day: object, amount: object, buying: object, start: object, end: object
) -> ParentOrders:
    """Orders from anything that broadcasts to one length."""
    given = (np.atleast_1d(np.asarray(one)) for one in (day, amount, buying, start, end))
    days, amounts, sides, starts, ends = np.broadcast_arrays(*given)
    return ParentOrders(
        days.astype(np.int64),
        amounts.astype(np.float64),
        sides.astype(np.bool_),
        starts.astype(np.int64),
        ends.astype(np.int64),
    )


def check_orders(orders: ParentOrders, days: Days) -> None:
    """Refuse orders that no day can work; the message names the first one and its fault."""
    n_days, n_ticks = days.shape
    faults = (
        (~np.isfinite(orders.amount) | (orders.amount <= 0.0), "amount", "a positive number"),
        ((orders.day < 0) | (orders.day >= n_days), "day", f"one of the {n_days} days"),
        ((orders.start < 0) | (orders.start >= n_ticks), "start", "inside the market's hours"),
        ((orders.end <= orders.start) | (orders.end > n_ticks), "end", "after start, by the close"),
    )
    for wrong, field, expected in faults:
        if wrong.any():
            k = int(np.argmax(wrong))
            value = getattr(orders, field)[k]
            raise DataError(
                f"order {k}: {field} = {value:g} must be {expected}"
                f" (the day has ticks 0 to {n_ticks - 1}). Correct the order or leave it out;"
                f" {int(wrong.sum())} of {len(orders)} orders have this fault."
            )
