"""Charts of execution: trajectories, the distribution of PA, and one order's day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from echelon.evaluation.execution import ExecutionEvaluation
from echelon.execution import History
from echelon.report.charts.chart import Axis, Chart, Curve, Layer, Plot, Points, RefLine
from echelon.report.charts.slides import Slide
from echelon.report.texts import Words
from echelon.types import Floats

_BINS = 41
_LARGEST = 48
"""Pixels across of a fill that is the whole order."""
_ROLES = ("equal_weight", "momentum", "min_variance", "hrp", "buy_and_hold")
"""Colours of schedules and of further policies; the first learned one has the accent."""


def _look(learned: bool, k: int) -> tuple[str, float]:
    """Role of the colour and width of the lines of policy k. learned: the first that is"""
    return ("accent", 2.4) if learned else (_ROLES[k % len(_ROLES)], 1.6)


def first_learned(evaluation: ExecutionEvaluation) -> str | None:
    """Name of the policy with the accent."""
    return next((policy.name for policy in evaluation.policies if policy.seeds), None)


def _looks(evaluation: ExecutionEvaluation) -> list[tuple[str, float]]:
    learned = first_learned(evaluation)
    return [_look(policy.name == learned, k) for k, policy in enumerate(evaluation.policies)]


def _clock_axis(clock: Floats) -> Axis:
    """Times of day; ticks are evenly apart, so that a lunch break takes no room."""
    labels = [f"{int(m) // 60:02d}:{int(m) % 60:02d}" for m in clock]
    return Axis(kind="category", labels=labels, ticks=8)


def paths_chart(evaluation: ExecutionEvaluation, words: Words) -> Chart:
    """What share of an order each policy has executed by each tick, on average."""
    return Chart([[_paths_plot(evaluation, words)]], 360)


def _paths_plot(evaluation: ExecutionEvaluation, words: Words, title: str = "") -> Plot:
    axis = _clock_axis(evaluation.clock)
    volume = evaluation.volume.cumsum()
    layers: list[Layer] = [_volume_line(axis, volume, words)]
    for policy, (role, width) in zip(evaluation.policies, _looks(evaluation), strict=True):
        path = policy.path.cumsum()
        layers.append(Curve(axis.labels, path, width, name=policy.name, role=role, hover=".1%"))
    y = Axis(words("execution_of_order"), form="percent", low=0)
    return Plot(layers, axis, y, title, legend="inside")


def _volume_line(axis: Axis, volume: Floats, words: Words) -> Curve:
    name = words("execution_volume")
    return Curve(axis.labels, volume, 1.5, "dot", name=name, role="faint", hover=".1%")


def spread_chart(evaluation: ExecutionEvaluation, words: Words) -> Chart:
    """The distribution of PA over the orders, a line a policy."""
    return Chart([[_spread_plot(evaluation, words)]], 360)


def _spread_plot(evaluation: ExecutionEvaluation, words: Words, title: str = "") -> Plot:
    """Bins hold 98 % of all orders; those outside are in the outermost."""
    every = np.concatenate([policy.measures["pa"] for policy in evaluation.policies])
    reach = max(1.0, float(np.quantile(np.abs(every), 0.98)))
    edges = np.linspace(-reach, reach, _BINS + 1)
    middles = np.asarray((edges[1:] + edges[:-1]) / 2)
    layers = []
    for policy, (role, width) in zip(evaluation.policies, _looks(evaluation), strict=True):
        own = policy.measures["pa"]
        share = np.histogram(np.clip(own, -reach, reach), edges)[0] / len(own)
        line = Curve(middles, share, width, step=True, name=policy.name, role=role, hover=".1%")
        layers.append(line)
    y = Axis(form="percent", low=0)
    return Plot(layers, Axis(words("execution_bp")), y, title, legend="inside")


def day_chart(
    histories: Mapping[str, History], words: Words, learned: str | None = None, e: int = 0
) -> Chart:
    """One order's day: above the price and each policy's fills, below how far each had come.

    histories: policy → its history; learned: the policy with the accent
    """
    first = next(iter(histories.values()))
    axis = _clock_axis(first.days.clock)
    price = Curve(axis.labels, first.market_price[e], 1.2, role="ink", group="market", hover=".4g")
    twap = RefLine(float(first.benchmarks.twap[e]), width=1.0, name="TWAP", role="faint")
    above: list[Layer] = [replace(price, name=words("execution_market_price")), twap]
    volume = first.market_volume[e].cumsum()
    below = [_volume_line(axis, volume / max(float(volume[-1]), 1e-12), words)]
    for k, (name, history) in enumerate(histories.items()):
        role, width = _look(name == learned, k)
        assert history.ticks is not None, "the chart needs ticks"
        share = history.ticks.executed[e] / history.orders.amount[e]
        done = np.flatnonzero(share > 0.0)
        fills = Points(
            [axis.labels[tick] for tick in done.tolist()],
            history.ticks.price[e, done],
            size=_LARGEST * np.sqrt(share[done]),
            opacity=0.4,
            texts=[f"{name}: {part:.1%}" for part in share[done].tolist()],
        )
        above.append(replace(fills, name=name, role=role, group=name, listed=False))
        label = f"{name} ({_gain(history, e):+.1f} bp)"
        line = Curve(axis.labels, share.cumsum(), width, name=label, role=role, hover=".1%")
        below.append(replace(line, group=name))
    y = Axis(words("execution_of_order"), form="percent", low=0)
    prices = Plot(above, axis, Axis(words("execution_market_price")))
    return Chart(((prices,), (Plot(below, axis, y),)), 560, (1.5, 1), shared=True)


def _gain(history: History, e: int) -> float:
    """Gain over TWAP of one order, in basis points of the arrival price."""
    apart = float(history.price[e]) - float(history.benchmarks.twap[e])
    return -float(history.side[e]) * apart / float(history.benchmarks.arrival[e]) * 1e4


def day_title(histories: Mapping[str, History], words: Words, e: int = 0) -> str:
    """Which asset, day, side and amount."""
    first = next(iter(histories.values()))
    return words(
        "execution_day",
        name=first.days.name(int(first.orders.day[e])),
        side=words("execution_buy" if first.orders.buying[e] else "execution_sell"),
        amount=f"{first.orders.amount[e]:,.0f}",
    )


def execution_slide(evaluation: ExecutionEvaluation, title: str, below: str, words: Words) -> Slide:
    """Trajectories and the distribution of PA, side by side."""
    left = _paths_plot(evaluation, words, words("execution_paths"))
    right = _spread_plot(evaluation, words, words("execution_spread"))
    return Slide(title, below, Chart(((left, right),), 0), height=6.2)
