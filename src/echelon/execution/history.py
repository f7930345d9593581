"""What became of orders, and how good that was: prices, fills and benchmarks, and measures of them.

`History` is the one interface for whoever measures: every metric, reward and report reads it, with
the raw prices and volumes of the order's ticks in it. It can be taken at any time; what has not
happened is not in it. Price measures are in basis points and better when higher:

- **PA**, price advantage against the TWAP of the order's ticks, as Qlib and the papers have it:
  sell (p/base - 1)·1e4, buy (1 - p/base)·1e4. It divides by a mean that the order's own ticks
  move, hence is biased by Jensen's inequality: on a martingale, selling all at the first tick
  seems to earn. For comparing with others.
- **gain** against TWAP, VWAP or arrival: ±(p - base)/arrival·1e4. Its mean is zero for any
  schedule on a martingale. For every claim of ours.

PA is of what was executed, 0 where nothing was. Gains and `shortfall` are of the whole order: what
was left is charged at the last price and what trading it would have cost (`History.rest_price`), so
that nobody gains by not trading.

A metric of one's own is a function from `History` to a number an order::

    @metric("first_step_share")
    def first_step_share(history: History) -> Floats:
        return history.steps.executed[:, 0] / history.orders.amount

Axes: `E` orders, `T` ticks of a day, `S` steps of the longest order.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from echelon.errors import UsageError
from echelon.execution.days import Days
from echelon.execution.orders import ParentOrders
from echelon.execution.simulator import (
    LEFT,
    Benchmarks,
    OrderBatch,
    OrderProgress,
    StepRecords,
    TickRecords,
)
from echelon.types import Bools, Floats, Ints, Times

BASIS_POINTS = 1e4


@dataclass(frozen=True)
class History:
    """Orders and what became of them so far.

    ticks: None where the simulator did not record them; rest_cost: what a share that is left would
    still pay, as a share of the price: half the spread and the impact of trading a tick to its cap
    """

    days: Days
    orders: ParentOrders
    benchmarks: Benchmarks
    progress: OrderProgress
    steps: StepRecords
    ticks: TickRecords | None
    rest_cost: float

    @staticmethod
    def from_simulator(simulator: OrderBatch, *, copy: bool = True) -> History:
        """As it stands; later steps do not change it, unless it is no copy."""
        progress, steps = simulator.progress, simulator.steps
        ticks = simulator.ticks if simulator.records else None
        if copy:
            progress, steps, ticks = deepcopy((progress, steps, ticks))
        days, orders, marks = simulator.days, simulator.orders, simulator.benchmarks
        return History(days, orders, marks, progress, steps, ticks, simulator.rest_cost)

    @cached_property
    def executed(self) -> Floats:
        """[E] shares."""
        return np.asarray(self.steps.executed.sum(axis=1))

    @cached_property
    def value(self) -> Floats:
        """[E] money paid or received."""
        return np.asarray(self.steps.value.sum(axis=1))

    @cached_property
    def price(self) -> Floats:
        """[E] mean price of what was executed; NaN where nothing was."""
        return _ratio(self.value, self.executed)

    @cached_property
    def left(self) -> Floats:
        """[E] shares not executed; less than 1e-6 is none."""
        return np.where(self.progress.left < LEFT, 0.0, self.progress.left)

    @cached_property
    def rest_price(self) -> Floats:
        """[E] what a share that is left is charged: the last price (else the arrival price), moved
        by the order's own permanent impact, and the cost of trading it; NaN without any price.

        Without that, an order would seem to gain by not being filled: whoever does not trade pays
        neither spread nor impact.
        """
        marks = self.benchmarks
        last = np.where(np.isnan(marks.last), marks.arrival, marks.last)
        return np.asarray(last * (1.0 + self.side * (self.progress.drift + self.rest_cost)))

    @cached_property
    def whole_price(self) -> Floats:
        """[E] mean price of the whole order, what is left charged at `rest_price`."""
        rest = np.where(self.left > 0.0, self.left * self.rest_price, 0.0)
        return np.asarray((self.value + rest) / (self.executed + self.left))

    @cached_property
    def side(self) -> Floats:
        """[E] +1 for buys, -1 for sells."""
        return np.where(self.orders.buying, 1.0, -1.0)

    @cached_property
    def taken(self) -> Bools:
        """[E,S] whether the step has been taken."""
        return np.asarray(self.steps.last > 0)

    @cached_property
    def step_price(self) -> Floats:
        """[E,S] mean price of what a step executed; NaN where nothing was."""
        return _ratio(self.steps.value, self.steps.executed)

    @cached_property
    def market_price(self) -> Floats:
        """[E,T] price on the order's side at every tick of its day, before and after it too."""
        buying = self.orders.buying[:, None]
        return np.where(buying, self.days.buy[self.orders.day], self.days.sell[self.orders.day])

    @cached_property
    def market_volume(self) -> Floats:
        """[E,T] shares traded by all at every tick of its day."""
        return np.asarray(self.days.volume[self.orders.day])

    @cached_property
    def inside(self) -> Bools:
        """[E,T] whether the tick is one of the order's."""
        tick = np.arange(self.days.shape[1])
        return (tick >= self.orders.start[:, None]) & (tick < self.orders.end[:, None])

    def name(self, e: int) -> str:
        """One order in words."""
        orders, days = self.orders, self.days
        side = "buy" if orders.buying[e] else "sell"
        when = f"ticks {orders.start[e]} to {orders.end[e] - 1}"
        return f"order {e} ({side} {orders.amount[e]:g} {days.name(int(orders.day[e]))}, {when})"

    def step_frame(self, e: int) -> pl.DataFrame:
        """The steps that one order has taken, with times, price advantage and share filled."""
        taken = np.flatnonzero(self.taken[e])
        return self._steps(np.full(len(taken), e), taken)

    def steps_frame(self) -> pl.DataFrame:
        """The steps of all orders, each with the order that it is of."""
        e, s = np.nonzero(self.taken)
        named = order_frame(self.orders, self.days).select("order", "symbol", "date", "side")[e]
        return named.hstack(self._steps(e, s))

    def _steps(self, e: Ints, s: Ints) -> pl.DataFrame:
        """Step `s` of order `e`, one a row."""
        fields = {name: getattr(self.steps, name)[e, s] for name in StepRecords._fields}
        price, day = self.step_price[e, s], self.orders.day[e]
        return pl.DataFrame(
            {
                "step": s,
                "begins": _begin(self.days, day, fields["first"]),
                "ends": _end(self.days, day, fields["last"]),
                **fields,
                "price": price,
                "pa": self._pa(price, e),
                "filled": 1.0 - fields["left"] / self.orders.amount[e],
            }
        )

    def tick_frame(self, e: int) -> pl.DataFrame:
        """The ticks that one order has gone through, with the market's prices and volumes."""
        assert self.ticks is not None, "the simulator does not record ticks"
        which = np.arange(self.orders.start[e], self.progress.tick[e])
        order = np.full(len(which), e)
        fields = {name: getattr(self.ticks, name)[e, which] for name in TickRecords._fields}
        return pl.DataFrame(
            {
                "tick": which,
                "begins": _begin(self.days, self.orders.day[order], which),
                "market_price": self.market_price[e, which],
                "market_volume": self.market_volume[e, which],
                **fields,
                "value": np.nan_to_num(fields["executed"] * fields["price"], nan=0.0),
                "pa": self._pa(fields["price"], order),
                "filled": 1.0 - fields["left"] / self.orders.amount[e],
            }
        )

    def _pa(self, price: Floats, e: Ints) -> Floats:
        """Price advantage of prices[…] of the orders e[…]; 0 where there is no price."""
        return price_advantage(price, self.benchmarks.twap[e], self.orders.buying[e])


def price_advantage(price: Floats, base: Floats, buying: Bools) -> Floats:
    """Basis points; 0 where there is no price, so that nothing executed gains nothing."""
    share = price / base - 1.0
    return np.nan_to_num(np.where(buying, -share, share) * BASIS_POINTS, nan=0.0)


def order_frame(orders: ParentOrders, days: Days) -> pl.DataFrame:
    """One order a row, with start and end in exchange time: of its first tick, and of its last."""
    day = orders.day
    return pl.DataFrame(
        {
            "order": np.arange(len(orders)),
            "symbol": [days.symbols[d] for d in day.tolist()],
            "date": np.datetime_as_string(days.dates[day], unit="D").tolist(),
            "side": np.where(orders.buying, "buy", "sell").tolist(),
            "amount": orders.amount,
            "start": _begin(days, day, orders.start),
            "end": _end(days, day, orders.end),
        },
        schema_overrides={"symbol": pl.String, "date": pl.String, "side": pl.String},
    )


def _begin(days: Days, day: Ints, tick: Ints) -> Times:
    seconds = np.round(days.clock[tick] * 60.0 * 1e6).astype("timedelta64[us]")
    return np.asarray(days.dates[day].astype("datetime64[us]") + seconds)


def _end(days: Days, day: Ints, until: Ints) -> Times:
    length = np.round(days.tick_minutes * 60.0 * 1e6).astype("timedelta64[us]")
    return np.asarray(_begin(days, day, until - 1) + length)


def _ratio(over: Floats, under: Floats) -> Floats:
    """Quotient; NaN where `under` is zero."""
    out = np.full(over.shape, np.nan)
    np.divide(over, under, out=out, where=under > 0.0)
    return out


Metric = Callable[[History], Floats]
METRICS: dict[str, Metric] = {}
"""All metrics by name, one's own too."""


def metric(name: str) -> Callable[[Metric], Metric]:
    """Add a metric by this name; it is asked for by name and shown in reports."""

    def add(function: Metric) -> Metric:
        if name in METRICS and METRICS[name].__module__ != function.__module__:
            raise UsageError(f"metric {name!r} exists already. Give yours another name.")
        METRICS[name] = function
        return function

    return add


def measure_orders(history: History, names: Iterable[str] | None = None) -> dict[str, Floats]:
    """[E] of each metric; None: all there are."""
    measured = {}
    for name in METRICS if names is None else names:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METRICS)}."
            raise UsageError(f"unknown metric {name!r}: {hint}")
        values = np.asarray(METRICS[name](history), dtype=np.float64)
        if values.shape != history.orders.amount.shape:
            raise UsageError(
                f"metric {name!r} gave {values.shape}, expected one number an order:"
                f" {history.orders.amount.shape}."
            )
        measured[name] = values
    return measured


@metric("ffr")
def fulfilment(history: History) -> Floats:
    return history.executed / history.orders.amount


@metric("pa")
def pa(history: History) -> Floats:
    """Price advantage against the TWAP of the order's ticks."""
    return price_advantage(history.price, history.benchmarks.twap, history.orders.buying)


def _gain(benchmark: str, sign: float = 1.0) -> Metric:
    """[E] of the whole order over a benchmark, in basis points of the arrival price."""

    def gain(history: History) -> Floats:
        base, arrival = getattr(history.benchmarks, benchmark), history.benchmarks.arrival
        # Ticks that never traded have no mean: all there is to be held to is the arrival price.
        apart = (history.whole_price - np.where(np.isnan(base), arrival, base)) / arrival
        apart = np.where(history.orders.buying, -apart, apart)
        return sign * np.nan_to_num(apart * BASIS_POINTS, nan=0.0)

    return gain


METRICS["gain_twap"] = _gain("twap")
METRICS["gain_vwap"] = _gain("vwap")
METRICS["gain_arrival"] = _gain("arrival")
METRICS["shortfall"] = _gain("arrival", -1.0)


def gain_loss_ratio(values: Floats) -> float:
    """GLR: mean of the gains over mean of the losses; infinite without losses, NaN without both."""
    gains, losses = values[values > 0.0], values[values < 0.0]
    if not len(losses):
        return float("inf") if len(gains) else float("nan")
    return float(gains.mean() / -losses.mean()) if len(gains) else 0.0
