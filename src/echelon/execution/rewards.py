"""Rewards of execution, by step; each is a function of the history after the step.

    pa_penalty   PA of the step × its share of the order − α · Σ over ticks (share of the order)²;
                 at the order's end also of what is left, as if one tick had traded it
    ratio        at the order's end: VWAP of the order over TWAP, in classes (sell; buy: inverse)
    shortfall    cost against arrival of what the step executed, and of what is left at the end
                 (`History.rest_price`)
    risk         −λ·σ²·(share left)² a step: the price of waiting, as Almgren and Chriss have it

They count what was executed, never what was asked for. A reward that is not a number stops the run
and names the order and the step.

Axes: `E` orders, `S` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echelon.config.execution import ExecutionRewardConfig
from echelon.errors import TrainingError
from echelon.execution.history import BASIS_POINTS, History, price_advantage
from echelon.execution.simulator import LEFT, StepRecords
from echelon.types import Bools, Floats, Ints


class Reward(Protocol):
    """What the steps `number`[E] of the orders were worth."""

    def __call__(self, history: History, number: Ints) -> Floats:
        """[E]; of orders whose step was not taken the value does not count."""


def _step(history: History, number: Ints) -> tuple[StepRecords, Floats]:
    """(step `number`[E] of each order, [E] shares that are left as the order's time is over)."""
    at = (np.arange(len(number)), np.minimum(number, history.steps.left.shape[1] - 1))
    step = StepRecords(*(by_step[at] for by_step in history.steps))
    last = step.last >= history.orders.end
    return step, np.where(last & (step.left >= LEFT), step.left, 0.0)


@dataclass(frozen=True)
class PAPenalty:
    """Price advantage with a penalty on concentration."""

    penalty: float = 100.0

    def __call__(self, history: History, number: Ints) -> Floats:
        (step, left), orders = _step(history, number), history.orders
        with np.errstate(divide="ignore", invalid="ignore"):
            price = step.value / step.executed
        gained = price_advantage(price, history.benchmarks.twap, orders.buying)
        share, rest = step.executed / orders.amount, left / orders.amount
        charged = price_advantage(history.rest_price, history.benchmarks.twap, orders.buying)
        concentration = step.concentration + rest**2
        return np.asarray(gained * share + charged * rest - self.penalty * concentration)


@dataclass(frozen=True)
class Ratio:
    """Classes of the order's VWAP over TWAP by thresholds (rising), paid when it is done."""

    thresholds: tuple[float, ...] = (1.0, 1.1)
    classes: tuple[float, ...] = (-1.0, 0.0, 1.0)

    def __call__(self, history: History, number: Ints) -> Floats:
        """[E]; 0 for an order of which nothing was executed."""
        price, base = history.price, history.benchmarks.twap
        ratio = np.where(history.orders.buying, base / price, price / base)
        paid = np.asarray(self.classes)[np.searchsorted(self.thresholds, ratio, side="right")]
        ended = history.progress.done & (history.progress.step == number + 1)
        return np.where(ended & np.isfinite(ratio), paid, 0.0)


@dataclass(frozen=True)
class Shortfall:
    """Minus the implementation shortfall, in basis points of the whole order at arrival."""

    def __call__(self, history: History, number: Ints) -> Floats:
        (step, left), marks = _step(history, number), history.benchmarks
        paid = step.value - step.executed * marks.arrival
        rest = np.where(left > 0.0, left * (history.rest_price - marks.arrival), 0.0)
        cost = history.side * (paid + rest) / (history.orders.amount * marks.arrival)
        return np.asarray(np.nan_to_num(-BASIS_POINTS * cost, nan=0.0))


@dataclass(frozen=True)
class Risk:
    """Minus aversion · (share of the order left after the step)²."""

    aversion: float

    def __call__(self, history: History, number: Ints) -> Floats:
        share = _step(history, number)[0].left / history.orders.amount
        return np.asarray(-self.aversion * share**2)


@dataclass(frozen=True)
class Weighted:
    """A sum of rewards, each times its weight."""

    parts: Sequence[tuple[float, Reward]]

    def __call__(self, history: History, number: Ints) -> Floats:
        return np.asarray(sum(weight * reward(history, number) for weight, reward in self.parts))


def reward_from_config(config: ExecutionRewardConfig) -> Weighted:
    """The weighted sum that the section `execution.reward` says."""
    parts: list[tuple[float, Reward]] = [
        (config.pa_penalty, PAPenalty(config.penalty)),
        (config.ratio, Ratio(config.thresholds, config.classes)),
        (config.shortfall, Shortfall()),
    ]
    if config.risk > 0.0:
        parts.append((1.0, Risk(config.risk)))
    return Weighted([(weight, reward) for weight, reward in parts if weight > 0.0])


def reward_of(reward: Reward, history: History, number: Ints, taken: Bools) -> Floats:
    """[E] of the step `number`[E], 0 where none was `taken`[E]; refuses what is not a number."""
    values = np.where(taken, reward(history, number), 0.0)
    wrong = ~np.isfinite(values)
    if wrong.any():
        e = int(np.argmax(wrong))
        raise TrainingError(
            f"the reward of {history.name(e)} at step {int(number[e])} is {values[e]}: "
            f"expected a number. Its steps so far:\n" + history.step_frame(e).write_csv()
        )
    return values
