"""Interactive charts of a walk-forward: its windows in time, and the Sharpe ratio of each fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from echelon.evaluation.folds import Fold
from echelon.evaluation.walkforward import AGENT
from echelon.report.figures import (
    DATES,
    Figure,
    axis,
    axis_title,
    colour,
    legend_above,
    make_layout,
    numbers,
)
from echelon.report.palette import colour_of
from echelon.report.texts import Words
from echelon.report.walkforward_data import WalkData

_DAY_MS = 86_400_000
_COLOURS = {"train": "rest", "valid": "commission", "test": "accent"}
_SYMBOLS = {"equal_weight": "diamond", "benchmark": "line-ew"}
_MOST_HIGH = 24
"""Folds that have a full line each; of more, lines are thinner."""


def windows_chart(folds: Sequence[Fold], words: Words) -> Figure:
    """A line per fold: its train, validation and test windows in time."""
    data = []
    for window, role in _COLOURS.items():
        spans = [getattr(fold, window) for fold in folds]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": words(f"split_{window}"),
                "y": [fold.name for fold in folds],
                "base": [str(first) for first, _ in spans],
                "x": [(last - first + timedelta(days=1)).days * _DAY_MS for first, last in spans],
                "customdata": [
                    [str(first), str(last), getattr(fold.bars, window)]
                    for fold, (first, last) in zip(folds, spans, strict=True)
                ],
                "marker": {"color": colour(role), "line": {"width": 0}},
                "hovertemplate": "%{y}: %{customdata[0]} – %{customdata[1]} (%{customdata[2]:,})",
            }
        )
    line = 24 if len(folds) <= _MOST_HIGH else max(7, 24 * _MOST_HIGH // len(folds))
    layout = make_layout(
        height=88 + line * max(len(folds), 3),
        barmode="overlay",
        bargap=0.3,
        hovermode="closest",
        legend=legend_above(),
        margin={"l": 70, "r": 16, "t": 40, "b": 28},
        xaxis=axis(type="date", tickformatstops=DATES),
        yaxis=axis(
            type="category",
            autorange="reversed",
            showgrid=False,
            automargin=True,
            tickfont={"size": 12, "color": colour("ink")},
        ),
    )
    return {"data": data, "layout": layout}


def fold_starts(days: Sequence[str]) -> list[Figure]:
    """Thin lines through a chart where a new fold begins; the first has none."""
    return [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": day,
            "x1": day,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"color": colour("faint"), "width": 0.7, "dash": "dot"},
        }
        for day in days[1:]
    ]


def sharpe_chart(walk: WalkData, beside: Sequence[str], words: Words) -> Figure:
    """Sharpe ratio of every fold: the agents' mean ± std, and baselines."""
    folds = [step.fold.name for step in walk.steps]
    name = "sharpe_annual"
    data: list[Figure] = []
    for who in (*beside, AGENT):
        values = [walk.values(fold, who) for fold in folds]
        mean = np.array([math.nan if v is None else v[name] for v in values])
        trace: Figure = {
            "type": "scatter",
            "mode": "markers",
            "x": folds,
            "y": numbers(mean),
            "name": words("agent") if who == AGENT else words.name(who),
            "hovertemplate": "%{y:.2f}",
        }
        if who == AGENT:
            std = np.array([math.nan if v is None else v[f"{name}_std"] for v in values])
            trace["marker"] = {"color": colour("accent"), "size": 10}
            trace["legendrank"] = 1
            trace["error_y"] = {
                "type": "data",
                "array": numbers(np.nan_to_num(std)),
                "color": colour("accent"),
                "thickness": 2,
                "width": 0,
            }
        else:
            role = colour_of(who)
            line = {"color": colour(role), "width": 2.5}
            trace["marker"] = {
                "symbol": _SYMBOLS.get(who, "circle-open"),
                "size": 9,
                "color": colour(role),
                "line": line if who == "benchmark" else {"width": 0},
            }
        data.append(trace)
    layout = make_layout(
        height=300,
        hovermode="x unified",
        legend=legend_above(),
        margin={"l": 62, "r": 16, "t": 40, "b": 30},
        xaxis=axis(type="category", showgrid=False),
        yaxis=axis(
            title=axis_title(words.measure(name)),
            zeroline=True,
            zerolinecolor=colour("faint"),
        ),
    )
    return {"data": data, "layout": layout}
