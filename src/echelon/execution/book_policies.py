"""Policies on an order book: two to compare with, and the one loop that works orders with them.

    market_twap       a market order in every step: the spread is paid, and time is spread evenly
    limit_at_touch    all that is left rests at the best quote of its side, cancelled and posted
                      anew at each step; what does not fill crosses the book at the order's end

A policy is asked step by step what to do with each order. It may read the book up to the snapshot
of `progress.tick` and the trades before it: what trades after that snapshot is not known yet.

Axes: `E` orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echelon.execution.book_days import BookDays
from echelon.execution.book_simulator import (
    LIMIT,
    MARKET,
    BookActions,
    BookRules,
    BookSimulator,
)
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders


class BookPolicy(Protocol):
    """Says how a parent order is worked on a book."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def act(self, simulator: BookSimulator) -> BookActions:
        """What to do at the coming step; of orders that are done it does not count."""


@dataclass(frozen=True)
class MarketTwap:
    """Market orders: of what is left, an even share of the steps that are left."""

    name: str = "market_twap"

    def act(self, simulator: BookSimulator) -> BookActions:
        """[E]; all in the last step."""
        left = simulator.progress.left
        steps = np.maximum(simulator.n_steps - simulator.progress.step, 1)
        kind = np.full(len(left), MARKET)
        return BookActions(kind, np.maximum(left, 0.0) / steps, np.zeros(len(left)))


@dataclass(frozen=True)
class LimitAtTouch:
    """All that is left at the best quote of its side, posted anew at every step.

    Posting anew follows the quote where it goes, and loses the place in the queue. At the order's
    last tick the simulator itself cancels what rests and crosses the book with it.

    offset: behind the best quote, in the unit of the rules; ahead of it where negative
    """

    offset: float = 0.0
    name: str = "limit_at_touch"

    def act(self, simulator: BookSimulator) -> BookActions:
        """[E]."""
        left = simulator.progress.left
        kind, offset = np.full(len(left), LIMIT), np.full(len(left), self.offset)
        return BookActions(kind, np.maximum(left, 0.0), offset)


def run_book_orders(
    policy: BookPolicy,
    book: BookDays,
    orders: ParentOrders,
    rules: BookRules,
    *,
    record: bool = True,
) -> History:
    """Work all orders to their end.

    record: keep what every tick did, too
    """
    simulator = BookSimulator(book, orders, rules, record=record)
    while not simulator.over:
        simulator.step(policy.act(simulator))
    return simulator.history()
