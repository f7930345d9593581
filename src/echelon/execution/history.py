"""What became of orders: prices, fills and benchmarks, by tick, by step and in all.

`History` is the one interface for whoever measures: every metric, reward and report reads it, and
so does a metric of one's own (`metrics.metric`), with the raw prices and volumes of the order's
ticks in it. It can be taken at any time; what has not happened is not in it.

Axes: `E` orders, `T` ticks of a day, `S` steps of the longest order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import polars as pl

from echelon.execution.days import Days
from echelon.execution.orders import ParentOrders
from echelon.execution.simulator import LEFT, Benchmarks, Progress, Simulator, Steps, Ticks
from echelon.types import Bools, Floats

_Arrays = TypeVar("_Arrays", bound="tuple[Any, ...]")


@dataclass(frozen=True)
class History:
    """Orders and what became of them so far.

    ticks: None where the simulator did not record them
    """

    days: Days
    orders: ParentOrders
    benchmarks: Benchmarks
    progress: Progress
    steps: Steps
    ticks: Ticks | None

    @staticmethod
    def of(simulator: Simulator) -> History:
        """As it stands; later steps do not change it."""
        ticks = simulator.ticks if simulator.records else None
        return History(
            simulator.days,
            simulator.orders,
            simulator.benchmarks,
            _copied(simulator.progress),
            _copied(simulator.steps),
            None if ticks is None else _copied(ticks),
        )

    # --- in all, [E]

    @cached_property
    def executed(self) -> Floats:
        """Shares."""
        return np.asarray(self.steps.executed.sum(axis=1))

    @cached_property
    def value(self) -> Floats:
        """Money paid or received."""
        return np.asarray(self.steps.value.sum(axis=1))

    @cached_property
    def price(self) -> Floats:
        """Mean price of what was executed; NaN where nothing was."""
        return _ratio(self.value, self.executed)

    @cached_property
    def left(self) -> Floats:
        """Shares not executed; less than 1e-6 is none."""
        return np.where(self.progress.left < LEFT, 0.0, self.progress.left)

    @cached_property
    def side(self) -> Floats:
        """+1 for buys, -1 for sells."""
        return np.where(self.orders.buying, 1.0, -1.0)

    # --- by step, [E,S]

    @cached_property
    def taken(self) -> Bools:
        """Whether the step has been taken."""
        return np.asarray(self.steps.last > 0)

    @cached_property
    def step_price(self) -> Floats:
        """Mean price of what a step executed; NaN where nothing was."""
        return _ratio(self.steps.value, self.steps.executed)

    # --- by tick, [E,T]

    @cached_property
    def market_price(self) -> Floats:
        """Price on the order's side at every tick of its day, those before and after it too."""
        buying = self.orders.buying[:, None]
        return np.where(buying, self.days.buy[self.orders.day], self.days.sell[self.orders.day])

    @cached_property
    def market_volume(self) -> Floats:
        """Shares traded by all at every tick of its day."""
        return np.asarray(self.days.volume[self.orders.day])

    @cached_property
    def inside(self) -> Bools:
        """Whether the tick is one of the order's."""
        tick = np.arange(self.days.shape[1])
        return (tick >= self.orders.start[:, None]) & (tick < self.orders.end[:, None])

    # --- for reading

    def name(self, e: int) -> str:
        """One order in words."""
        orders, days = self.orders, self.days
        side = "buy" if orders.buying[e] else "sell"
        when = f"ticks {orders.start[e]} to {orders.end[e] - 1}"
        return f"order {e} ({side} {orders.amount[e]:g} {days.name(int(orders.day[e]))}, {when})"

    def step_frame(self, e: int) -> pl.DataFrame:
        """The steps that one order has taken."""
        upto = int(self.taken[e].sum())
        columns = {name: getattr(self.steps, name)[e, :upto] for name in Steps._fields}
        return pl.DataFrame(
            {"step": np.arange(upto), **columns, "price": self.step_price[e, :upto]}
        )

    def tick_frame(self, e: int) -> pl.DataFrame:
        """The ticks that one order has gone through, with the market's prices and volumes."""
        assert self.ticks is not None, "the simulator was told not to record ticks"
        which = np.arange(self.orders.start[e], self.progress.tick[e])
        return pl.DataFrame(
            {
                "tick": which,
                "market_price": self.market_price[e, which],
                "market_volume": self.market_volume[e, which],
                **{name: getattr(self.ticks, name)[e, which] for name in Ticks._fields},
            }
        )


def _copied(arrays: _Arrays) -> _Arrays:
    return type(arrays)(*(one.copy() for one in arrays))


def _ratio(over: Floats, under: Floats) -> Floats:
    """Quotient; NaN where `under` is zero."""
    out = np.full(over.shape, np.nan)
    np.divide(over, under, out=out, where=under > 0.0)
    return out
