"""Orders worked on an order book: market, limit and cancel, many parent orders side by side.

At the first snapshot of a step an order may

- **wait**: what rests goes on resting;
- **cancel** what rests;
- send a **market** order: it walks the levels displayed on the other side and takes no more than
  they hold; what they do not hold is not kept;
- place a **limit** order, which replaces the one that rests: so many ticks (or basis points,
  rounded to ticks) behind its side's best quote, ahead of it where negative. Up to its price it
  takes what the other side displays, as a market order would; the rest of it rests.

A resting order has ahead of it what its side displayed at its price or better when it was placed.
Only volume that takers trade against its side in later ticks wears that down, and only what exceeds
it fills the order, at its own price. With `touch` (the default) it must moreover be at the best
quote, or better, as the tick begins or ends: what trades at better prices is not ours.

At the order's last tick what rests is cancelled and the remainder crosses the book. Displayed sizes
are those recorded: our own trades do not move the market. The simulator changes through `step`
alone; `tests/slow_book.py` is its plain twin. A policy (`MarketTwap`, `LimitAtTouch`) may read the
book up to the snapshot of `progress.tick` and the trades before it.

Axes: `E` orders, `T` ticks of a day, `S` steps of the longest order, `L` levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from echelon.errors import ConfigError, UsageError
from echelon.execution.book_days import BookDays
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders
from echelon.execution.simulator import (
    LEFT,
    OrderArrays,
    OrderBatch,
    OrderProgress,
    StepRecords,
    TickRecords,
    compiled,
    end_step,
    order_arrays,
)
from echelon.types import Floats, Ints

WAIT, MARKET, LIMIT, CANCEL = range(4)
"""Kinds of actions."""

PRICE_SLACK = 0.1
"""Prices this share of a tick apart are the same: those of files are rounded."""


class BookRules(NamedTuple):
    """ticks_per_step: snapshots from one action to the next; unit: of limit offsets."""

    ticks_per_step: int = 1
    unit: Literal["ticks", "bp"] = "ticks"
    touch: bool = True


class BookActions(NamedTuple):
    """What to do at the coming step.

    kind[E]: WAIT, MARKET, LIMIT or CANCEL; size[E]: shares of a market or limit order
    offset[E]: of a limit order behind its side's best quote, in the rules' unit
    """

    kind: Ints
    size: Floats
    offset: Floats


class Resting(NamedTuple):
    """[E] limit orders in the book: shares, price (NaN without one), and size still ahead."""

    size: Floats
    price: Floats
    ahead: Floats


class BookSimulator(OrderBatch):
    """Orders on days of a book; benchmarks are on the best quotes."""

    def __init__(
        self, book: BookDays, orders: ParentOrders, rules: BookRules, *, record: bool = True
    ) -> None:
        if rules.ticks_per_step < 1 or rules.unit not in ("ticks", "bp"):
            raise ConfigError(f"{rules}: ticks_per_step is at least 1 and unit is ticks or bp.")
        # With the last snapshot: the remainder may cross it.
        super().__init__(book.to_days(last=True), orders, rules.ticks_per_step, record=record)
        self.book, self.rules = book, rules
        n = len(orders)
        self.resting = Resting(np.zeros(n), np.full(n, np.nan), np.zeros(n))

    def step(self, actions: BookActions) -> Ints:
        """Take one step with each order; those done ignore it. Number[E] of the step."""
        kind = np.asarray(actions.kind, dtype=np.int64)
        size, offset = (np.ascontiguousarray(a, dtype=np.float64) for a in actions[1:])
        for name, array in (("kind", kind), ("size", size), ("offset", offset)):
            assert array.shape == self.orders.amount.shape, f"{name} is not [E]"
        sends = (kind == MARKET) | (kind == LIMIT)
        wrong = (kind < WAIT) | (kind > CANCEL)
        wrong |= sends & ~(np.isfinite(size) & (size >= 0.0))
        wrong |= (kind == LIMIT) & ~np.isfinite(offset)
        wrong &= ~self.progress.done
        if wrong.any():
            e = int(np.argmax(wrong))
            raise UsageError(
                f"order {e}: action kind {kind[e]}, size {size[e]:g}, offset {offset[e]:g}; "
                "expected a kind from 0 to 3 (wait, market, limit, cancel), a size of at least 0 "
                "and a finite offset."
            )
        number, book = self.progress.step.copy(), self.book
        _advance(
            (book.bid_price, book.bid_size, book.sold),
            (book.ask_price, book.ask_size, book.bought),
            order_arrays(self.orders),
            (kind, size, offset),
            (book.tick_size, self.rules.unit == "bp", self.rules.touch),
            self.rules.ticks_per_step,
            self.progress,
            self.resting,
            self.steps,
            self.ticks,
            self.records,
        )
        return number


@compiled
def _walk(
    price: Floats, size: Floats, d: int, t: int, want: float, side: float, limit: float
) -> tuple[float, float]:
    """Shares and money taken from the levels of a snapshot, up to the price `limit`."""
    taken = money = 0.0
    for level in range(price.shape[2]):
        p = price[d, t, level]
        if want - taken <= 0.0 or not p > 0.0 or side * (p - limit) > 0.0:
            break
        part = min(want - taken, size[d, t, level])
        taken += part
        money += part * p
    return taken, money


@compiled
def _ahead(
    price: Floats, size: Floats, d: int, t: int, side: float, limit: float, slack: float
) -> float:
    """Size displayed on a side at the price `limit` or better."""
    total = 0.0
    for level in range(price.shape[2]):
        if side * (price[d, t, level] - limit) >= -slack:
            total += size[d, t, level]
    return total


@compiled
def _is_best(price: Floats, d: int, t: int, side: float, limit: float, slack: float) -> bool:
    """Whether no quote of its side is better than `limit` as tick t begins, or as it ends."""
    for u in range(t, min(t + 2, price.shape[1])):
        if not side * (price[d, u, 0] - limit) > slack:
            return True
    return False


@compiled
def _place(
    own: tuple[Floats, Floats, Floats],
    other: tuple[Floats, Floats, Floats],
    d: int,
    t: int,
    side: float,
    want: float,
    offset: float,
    tick_size: float,
    in_bp: bool,
) -> tuple[float, float, float, float, float]:
    """A new limit order: shares and money taken at once, then what rests, its price, and ahead."""
    slack = PRICE_SLACK * tick_size
    best = own[0][d, t, 0]
    away = offset * 1e-4 * best / tick_size if in_bp else offset
    price = best - side * np.rint(away) * tick_size
    if not (want > 0.0 and price > 0.0):
        return 0.0, 0.0, 0.0, np.nan, 0.0
    fill, money = _walk(other[0], other[1], d, t, want, side, price + side * slack)
    if want - fill <= 0.0:
        return fill, money, 0.0, np.nan, 0.0
    ahead = _ahead(own[0], own[1], d, t, side, price, slack)
    return fill, money, want - fill, price, ahead


@compiled
def _advance(
    bids: tuple[Floats, Floats, Floats],
    asks: tuple[Floats, Floats, Floats],
    orders: OrderArrays,
    actions: tuple[Ints, Floats, Floats],
    rules: tuple[float, bool, bool],
    per_step: int,
    progress: OrderProgress,
    resting: Resting,
    steps: StepRecords,
    ticks: TickRecords,
    record: bool,
) -> None:
    day, amount, buying, _, end = orders
    kind, size, offset = actions
    tick_size, in_bp, touch = rules
    for e in range(len(day)):
        if progress.done[e]:
            continue
        d, lo = day[e], progress.tick[e]
        hi = min((lo // per_step + 1) * per_step, end[e])
        side = 1.0 if buying[e] else -1.0
        own, other = (bids, asks) if buying[e] else (asks, bids)
        left = progress.left[e]
        rests, limit, ahead = resting.size[e], resting.price[e], resting.ahead[e]
        act = kind[e]
        asked = min(size[e], left) if act in (MARKET, LIMIT) else 0.0
        executed = value = market = total = squares = 0.0
        count = 0
        for t in range(lo, hi):
            fill = money = 0.0
            last = t == end[e] - 1
            if last or left < LEFT or (t == lo and act == CANCEL):
                rests, limit, ahead = 0.0, np.nan, 0.0
            want = rests
            if last and left >= LEFT:
                want = left
                fill, money = _walk(other[0], other[1], d, t, left, side, side * math.inf)
            elif t == lo and act == MARKET:
                want = asked
                fill, money = _walk(other[0], other[1], d, t, asked, side, side * math.inf)
                rests = min(rests, left - fill)
            elif t == lo and act == LIMIT:
                want = asked
                fill, money, rests, limit, ahead = _place(
                    own, other, d, t, side, asked, offset[e], tick_size, in_bp
                )
            if rests > 0.0:
                beyond = own[2][d, t] - ahead
                ahead = max(-beyond, 0.0)
                if beyond > 0.0 and (
                    not touch or _is_best(own[0], d, t, side, limit, PRICE_SLACK * tick_size)
                ):
                    part = min(rests, beyond)
                    rests -= part
                    fill += part
                    money += part * limit
            if not rests > 0.0:
                rests, limit, ahead = 0.0, np.nan, 0.0
            left -= fill
            executed += fill
            value += money
            squares += (fill / amount[e]) ** 2
            market += bids[2][d, t] + asks[2][d, t]
            if other[0][d, t, 0] > 0.0:
                total += other[0][d, t, 0]
                count += 1
            if record:
                ticks.requested[e, t] = want
                ticks.executed[e, t] = fill
                ticks.left[e, t] = left
                if fill > 0.0:
                    ticks.price[e, t] = money / fill
        price_mean = total / count if count > 0 else np.nan
        row = (asked, executed, value, market, price_mean, squares, left)
        end_step(progress, steps, e, hi, hi >= end[e], row)
        if progress.done[e]:
            rests, limit, ahead = 0.0, np.nan, 0.0
        resting.size[e], resting.price[e], resting.ahead[e] = rests, limit, ahead


class BookPolicy(Protocol):
    """Says how a parent order is worked on a book."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def act(self, simulator: BookSimulator) -> BookActions:
        """What to do at the coming step; of orders that are done it does not count."""


@dataclass(frozen=True)
class MarketTwap:
    """Market orders, which pay the spread: of what is left, an even share of the steps left."""

    name: str = "market_twap"

    def act(self, simulator: BookSimulator) -> BookActions:
        """[E]; all in the last step."""
        left = simulator.progress.left
        steps = np.maximum(simulator.n_steps - simulator.progress.step, 1)
        kind = np.full(len(left), MARKET)
        return BookActions(kind, np.maximum(left, 0.0) / steps, np.zeros(len(left)))


@dataclass(frozen=True)
class LimitAtTouch:
    """All that is left at the best quote of its side, posted again at every step.

    That follows the quote where it goes, and loses the place in the queue. offset: behind the best
    quote, in the unit of the rules; ahead of it where negative
    """

    offset: float = 0.0
    name: str = "limit_at_touch"

    def act(self, simulator: BookSimulator) -> BookActions:
        left = simulator.progress.left
        kind, offset = np.full(len(left), LIMIT), np.full(len(left), self.offset)
        return BookActions(kind, np.maximum(left, 0.0), offset)


def run_book_orders(
    policy: BookPolicy, book: BookDays, orders: ParentOrders, rules: BookRules, record: bool = True
) -> History:
    """Work all orders to their end; record: keep what every tick did, too."""
    simulator = BookSimulator(book, orders, rules, record=record)
    while not simulator.over:
        simulator.step(policy.act(simulator))
    return History.from_simulator(simulator)
