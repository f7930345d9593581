"""The order-execution simulator: many parent orders worked side by side, step by step.

A step goes to the next point of the day's grid of `ticks_per_step`, or to the order's end. The
amount asked for in a step is

1. cut to what is left of the order,
2. split evenly over the step's ticks,
3. cut in each tick to the volume cap, at most to what was traded, and to nothing where the tick has
   no price or no volume. In the order's last step all that is left is put on its last tick, which
   is capped too.

What a tick trades pays half the spread and moves the price: for itself (temporary impact) and for
all of the order's later ticks (permanent impact), both linear in the share of the tick's volume.
An order is done when less than 1e-6 is left or its time is over. The simulator changes through
`step` alone. It is compiled and written for speed; `tests/slow_execution.py` is its plain twin.

Axes: `E` orders, `T` ticks of a day, `S` steps of the longest order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from echelon.config.execution import ExecutionConfig
from echelon.errors import DataError
from echelon.execution.days import Days
from echelon.execution.orders import ParentOrders, check_orders
from echelon.types import Bools, Floats, Ints

LEFT = 1e-6
"""Less than this left of an order is nothing."""

compiled = njit(cache=True, error_model="numpy")


class ExecutionRules(NamedTuple):
    """How a tick fills.

    volume_cap: most of a tick's volume that an order may take; never more than all of it
    half_spread, temporary, permanent: shares of the price; impacts at a tick's whole volume
    """

    ticks_per_step: int = 30
    volume_cap: float = 1.0
    half_spread: float = 0.0
    temporary: float = 0.0
    permanent: float = 0.0

    @staticmethod
    def from_config(config: ExecutionConfig) -> ExecutionRules:
        cap = 1.0 if config.volume_cap is None else config.volume_cap
        return ExecutionRules(
            config.ticks_per_step, cap, config.half_spread, config.temporary, config.permanent
        )


class OrderProgress(NamedTuple):
    """Where the orders stand: what a policy may know of its own doing.

    tick, step[E]: next tick and step; left[E]: of the amount; done[E]
    drift[E]: by how much, as a share of the price, permanent impact has moved it
    """

    tick: Ints
    step: Ints
    left: Floats
    done: Bools
    drift: Floats


class StepRecords(NamedTuple):
    """What happened, by step: [E,S], 0 where a step was not taken (or nothing filled).

    first, last: ticks of the step, the latter excluded
    requested: shares, as the policy asked for them, cut to what was left
    executed: shares; value: money paid or received
    market_volume: shares traded by all; market_price: mean price of the ticks, NaN without one
    concentration: sum over ticks of (executed / amount)²
    left: of the amount after the step
    """

    first: Ints
    last: Ints
    requested: Floats
    executed: Floats
    value: Floats
    market_volume: Floats
    market_price: Floats
    concentration: Floats
    left: Floats


class TickRecords(NamedTuple):
    """What happened, by tick of the day: [E,T]; price is NaN where nothing was executed."""

    requested: Floats
    executed: Floats
    price: Floats
    left: Floats


class Benchmarks(NamedTuple):
    """[E] prices that an order is measured against, over its own ticks; NaN: never traded.

    twap: mean of the prices on the order's side; vwap: weighted by volume
    arrival: known as it begins, else its first price; last: of its last tick with a price
    volume: shares traded by all
    """

    twap: Floats
    vwap: Floats
    arrival: Floats
    last: Floats
    volume: Floats


class OrderBatch:
    """Orders on their days and how far they have come: what simulators of bars and books share.

    n_steps[E]; ticks: what every tick did; empty unless they are recorded (`records`)
    rest_cost: what a share that is left at the end would still pay, over the price
    """

    rest_cost: float = 0.0

    def __init__(
        self, days: Days, orders: ParentOrders, ticks_per_step: int, *, record: bool
    ) -> None:
        check_orders(orders, days)
        self.days, self.orders, self.ticks_per_step = days, orders, ticks_per_step
        n = len(orders)
        tick, left, done = orders.start.copy(), orders.amount.copy(), np.zeros(n, np.bool_)
        self.progress = OrderProgress(tick, np.zeros(n, np.int64), left, done, np.zeros(n))
        self.n_steps = steps_of(orders, ticks_per_step)
        most = int(self.n_steps.max(initial=0))
        self.steps = StepRecords(
            *np.zeros((2, n, most), np.int64), *np.zeros((4, n, most)), *np.zeros((3, n, most))
        )
        self.records = record
        self.ticks = TickRecords(*np.zeros((4, n if record else 0, days.shape[1])))
        self.ticks.price[:] = np.nan
        self.benchmarks = Benchmarks(*np.full((5, n), np.nan))
        prices = (days.buy, days.sell, days.known, days.volume)
        _benchmarks(prices, order_arrays(orders), self.benchmarks)

    @property
    def over(self) -> bool:
        return bool(self.progress.done.all())


class Simulator(OrderBatch):
    """Orders worked on bars, or on the best quotes of a book."""

    def __init__(
        self, days: Days, orders: ParentOrders, rules: ExecutionRules, *, record: bool = True
    ) -> None:
        super().__init__(days, orders, rules.ticks_per_step, record=record)
        self.rules = rules
        # Half the spread and the impact of trading a tick to its cap.
        self.rest_cost = rules.half_spread + rules.temporary * min(rules.volume_cap, 1.0)

    def step(self, requested: Floats) -> Ints:
        """Ask for so many shares[E] of each order; those done ignore it. Number[E] of the step.

        NaN and infinity must have been refused before: a policy's fault is the policy's to name.
        Raises `DataError` where impact would take a price below zero.
        """
        assert np.isfinite(requested).all(), "a request is not a number"
        number = self.progress.step.copy()
        below_zero = _advance(
            (self.days.buy, self.days.sell, self.days.volume),
            order_arrays(self.orders),
            np.ascontiguousarray(requested, dtype=np.float64),
            self.rules,
            self.progress,
            self.steps,
            self.ticks,
            self.records,
        )
        if below_zero >= 0:
            raise DataError(
                f"order {below_zero} ({self.orders.amount[below_zero]:g} shares of "
                f"{self.days.name(int(self.orders.day[below_zero]))}): its impact takes the price "
                f"below zero. Lower half_spread, temporary or permanent of {self.rules}, or the "
                "volume cap."
            )
        return number


class NextStep(NamedTuple):
    """The step that comes next.

    end[E]: the tick after its last; ticks[E]: how many it has; left[E]: ticks to the order's end,
    the step's own among them; final[E]: whether it is the order's last. Of orders that are done,
    whose time may be over, ticks and left are 1 and final is true.
    """

    end: Ints
    ticks: Ints
    left: Ints
    final: Bools


def next_step(simulator: OrderBatch) -> NextStep:
    """Where the next step of each order goes, by the simulator's own grid."""
    tick, end = simulator.progress.tick, simulator.orders.end
    per_step = simulator.ticks_per_step
    until = np.minimum((tick // per_step + 1) * per_step, end)
    return NextStep(
        until, np.maximum(until - tick, 1), np.maximum(end - tick, 1), np.asarray(until >= end)
    )


def steps_of(orders: ParentOrders, ticks_per_step: int) -> Ints:
    """[E] how many steps the orders have; those that begin or end off the grid have short ones."""
    first = orders.start // ticks_per_step
    return np.asarray((orders.end - 1) // ticks_per_step - first + 1, dtype=np.int64)


OrderArrays = tuple[Ints, Floats, Bools, Ints, Ints]
StepRow = tuple[float, float, float, float, float, float, float]


def order_arrays(orders: ParentOrders) -> OrderArrays:
    """As the compiled functions take them: a NamedTuple with a length of its own is no tuple."""
    return orders.day, orders.amount, orders.buying, orders.start, orders.end


@compiled
def _benchmarks(
    days: tuple[Floats, Floats, Floats, Floats], orders: OrderArrays, marks: Benchmarks
) -> None:
    buy, sell, known, volume = days
    day, _, buying, start, end = orders
    twap, vwap, arrival, last, traded = marks
    for e in range(len(day)):
        d = day[e]
        price = buy if buying[e] else sell
        total = weighted = priced = shares = 0.0
        count = 0
        arrival[e] = known[d, start[e]]
        for t in range(start[e], end[e]):
            p = price[d, t]
            if p > 0.0:
                if not arrival[e] > 0.0:
                    arrival[e] = p
                total += p
                count += 1
                weighted += p * volume[d, t]
                priced += volume[d, t]
                last[e] = p
            shares += volume[d, t]
        traded[e] = shares
        if count > 0:
            twap[e] = total / count
            # At a price limit there is volume, but on this side no price.
            vwap[e] = weighted / priced if weighted > 0.0 else twap[e]


@compiled
def end_step(
    progress: OrderProgress, steps: StepRecords, e: int, until: int, over: bool, row: StepRow
) -> None:
    """Write down what order `e` did in the step that ends before tick `until`.

    over: its time is; row: the fields of `StepRecords` from `requested` on
    """
    s = progress.step[e]
    steps.first[e, s], steps.last[e, s] = progress.tick[e], until
    steps.requested[e, s], steps.executed[e, s], steps.value[e, s] = row[0], row[1], row[2]
    steps.market_volume[e, s], steps.market_price[e, s] = row[3], row[4]
    steps.concentration[e, s], steps.left[e, s] = row[5], row[6]
    progress.left[e] = row[6]
    progress.tick[e], progress.step[e] = until, s + 1
    progress.done[e] = over or row[6] < LEFT


@compiled
def _advance(
    days: tuple[Floats, Floats, Floats],
    orders: OrderArrays,
    requested: Floats,
    rules: ExecutionRules,
    progress: OrderProgress,
    steps: StepRecords,
    ticks: TickRecords,
    record: bool,
) -> int:
    """Number of an order whose price was not above zero; -1: there is none."""
    buy, sell, volume = days
    day, amount, buying, _, end = orders
    per_step, half_spread = rules.ticks_per_step, rules.half_spread
    cap = min(rules.volume_cap, 1.0)
    temporary, permanent = rules.temporary, rules.permanent
    below_zero = -1
    for e in range(len(day)):
        if progress.done[e]:
            continue
        d, lo = day[e], progress.tick[e]
        hi = min((lo // per_step + 1) * per_step, end[e])
        price = buy if buying[e] else sell
        side = 1.0 if buying[e] else -1.0
        left, drift = progress.left[e], progress.drift[e]
        ask = min(max(requested[e], 0.0), left)
        even = ask / (hi - lo)
        executed = value = market = total = squares = 0.0
        count = 0
        for t in range(lo, hi):
            p, v = price[d, t], volume[d, t]
            want = left if t == end[e] - 1 else min(even, left)
            market += v
            fill = 0.0
            if p > 0.0:
                total += p
                count += 1
                fill = min(want, cap * v) if v > 0.0 else 0.0
            if fill > 0.0:
                share = fill / v
                paid = p * (1.0 + side * (drift + half_spread + temporary * share))
                if paid <= 0.0:
                    below_zero = e
                drift += permanent * share
                left -= fill
                executed += fill
                value += fill * paid
                squares += (fill / amount[e]) ** 2
                if record:
                    ticks.executed[e, t] = fill
                    ticks.price[e, t] = paid
            if record:
                ticks.requested[e, t] = want
                ticks.left[e, t] = left
        price_mean = total / count if count > 0 else np.nan
        row = (ask, executed, value, market, price_mean, squares, left)
        end_step(progress, steps, e, hi, hi >= end[e], row)
        progress.drift[e] = drift
    return below_zero
