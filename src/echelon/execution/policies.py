"""Policies of execution: what they are asked, and the one loop that works orders with them.

A policy is told of a batch of orders (`start`) and then asked, step by step, how many shares of
each it wants in the coming step. It may read the days only before `progress.tick`: what the tick
itself brings is not known when it is asked.

Axes: `E` orders.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from echelon.errors import TrainingError
from echelon.execution.days import Days
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders
from echelon.execution.simulator import ExecutionRules, Simulator
from echelon.types import Floats


class ExecutionPolicy(Protocol):
    """Says how a parent order is worked."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def start(self, simulator: Simulator) -> None:
        """Once for a batch of orders, before the first step."""

    def request(self, simulator: Simulator) -> Floats:
        """[E] shares for the coming step, at least 0; of orders that are done it does not count.

        More than is left is cut to what is left.
        """


def run_orders(
    policy: ExecutionPolicy,
    days: Days,
    orders: ParentOrders,
    rules: ExecutionRules,
    *,
    record: bool = True,
) -> History:
    """Work all orders to their end.

    record: keep what every tick did, too
    """
    simulator = Simulator(days, orders, rules, record=record)
    policy.start(simulator)
    while not simulator.over:
        simulator.step(_requested(policy, simulator))
    return History.of(simulator)


def _requested(policy: ExecutionPolicy, simulator: Simulator) -> Floats:
    """What the policy asks for; stops where that is no number of shares."""
    asked = np.asarray(policy.request(simulator), dtype=np.float64)
    if asked.shape != simulator.orders.amount.shape:
        raise TrainingError(
            f"policy {policy.name!r} asked for {asked.shape} amounts, expected one an order: "
            f"{simulator.orders.amount.shape}."
        )
    live = ~simulator.progress.done
    wrong = live & ~(np.isfinite(asked) & (asked >= 0.0))
    if wrong.any():
        e = int(np.argmax(wrong))
        raise TrainingError(
            f"policy {policy.name!r} asked for {asked[e]} shares of "
            f"{History.of(simulator).name(e)} at step {int(simulator.progress.step[e])}: expected "
            "a number from 0. If it was learned, its weights have diverged: take an earlier "
            "checkpoint."
        )
    return np.where(live, asked, 0.0)
