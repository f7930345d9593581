"""Measures of execution: how much was filled, and at what price against what could be had.

Two kinds of price measure, both in basis points and better when higher:

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

Axes: `E` orders.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

import numpy as np

from echelon.errors import UsageError
from echelon.execution.history import BASIS_POINTS, History, price_advantage
from echelon.types import Bools, Floats

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


def signed_gain(price: Floats, base: Floats, arrival: Floats, buying: Bools) -> Floats:
    """Basis points of the arrival price; 0 where there is no price."""
    gain = (price - base) / arrival
    return np.nan_to_num(np.where(buying, -gain, gain) * BASIS_POINTS, nan=0.0)


@metric("ffr")
def fulfilment(history: History) -> Floats:
    """Share of the amount that was executed."""
    return history.executed / history.orders.amount


@metric("pa")
def pa(history: History) -> Floats:
    """Price advantage against the TWAP of the order's ticks."""
    return price_advantage(history.price, history.benchmarks.twap, history.orders.buying)


@metric("gain_twap")
def gain_twap(history: History) -> Floats:
    """Gain over TWAP, for claims."""
    return _gain(history, history.benchmarks.twap)


@metric("gain_vwap")
def gain_vwap(history: History) -> Floats:
    """Gain over the market's VWAP during the order."""
    return _gain(history, history.benchmarks.vwap)


@metric("gain_arrival")
def gain_arrival(history: History) -> Floats:
    """Gain over the arrival price: minus the shortfall."""
    return _gain(history, history.benchmarks.arrival)


@metric("shortfall")
def shortfall(history: History) -> Floats:
    """Implementation shortfall, a cost: the whole order against the arrival price."""
    return -_gain(history, history.benchmarks.arrival)


def gain_loss_ratio(values: Floats) -> float:
    """GLR: mean of the gains over mean of the losses; infinite without losses, NaN without both."""
    gains, losses = values[values > 0.0], values[values < 0.0]
    if not len(losses):
        return float("inf") if len(gains) else float("nan")
    return float(gains.mean() / -losses.mean()) if len(gains) else 0.0


def _gain(history: History, base: Floats) -> Floats:
    arrival, buying = history.benchmarks.arrival, history.orders.buying
    # Ticks that never traded have no mean: then all there is to be held to is the arrival price.
    return signed_gain(
        history.whole_price, np.where(np.isnan(base), arrival, base), arrival, buying
    )
