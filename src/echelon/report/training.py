"""What training logged, as panels to draw: one metric each, a curve a seed, their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from echelon.report.figures import (
    MEAN,
    Figure,
    axis,
    axis_title,
    colour,
    legend_above,
    make_layout,
    numbers,
    panel_title,
)
from echelon.report.gather import RunData
from echelon.report.texts import Words
from echelon.types import Floats

MOST_ROWS = 250
"""Of a curve; longer ones are averaged in blocks, validations excepted."""
COLUMNS = 3
"""Panels side by side."""
_LOG_SPREAD = 100.0
_METRICS = (
    ("charts/reward", "reward"),
    ("losses/value", "value_loss"),
    ("charts/explained_variance", "explained_variance"),
    ("losses/policy", "policy_loss"),
    ("losses/entropy", "entropy"),
    ("losses/critic", "critic_loss"),
    ("losses/actor", "actor_loss"),
    ("charts/entropy", "action_entropy"),
    ("charts/temperature", "temperature"),
    ("router/relative_return", "router_gain"),
    ("router/entropy", "router_entropy"),
    ("router/kl_lambda", "router_lambda"),
)


class Curve(NamedTuple):
    """A metric by step: steps[K], values[K]; seed is -1 for a mean."""

    seed: int
    steps: NDArray[np.int64]
    values: Floats


class Point(NamedTuple):
    """The checkpoint that was chosen for a seed."""

    seed: int
    step: int
    value: float


class Panel(NamedTuple):
    """One metric. log: values spread so far that only a log axis shows them."""

    title: str
    curves: tuple[Curve, ...]
    mean: Curve
    chosen: tuple[Point, ...]
    log: bool


def training_panels(run: RunData, words: Words) -> list[Panel]:
    """Reward, losses, what values explain, entropy, validation Sharpe, what else chose checkpoints.

    Where the Sharpe ratio chose, the last panel is the gradient's norm. Metrics that no seed has
    logged, or only as 0, are left out.
    """
    chosen_by = run.config.train.select_by
    panels = [_panel(run, name, words(text)) for name, text in _METRICS]
    sharpe = words("valid_measure", measure=words.measure("sharpe_annual"))
    panels.append(_panel(run, "valid/sharpe_annual", sharpe, marked=chosen_by == "sharpe_annual"))
    if chosen_by == "sharpe_annual":
        panels.append(_panel(run, "losses/gradient_norm", words("gradient_norm")))
    else:
        title = words("valid_measure", measure=words.measure(chosen_by))
        panels.append(_panel(run, f"valid/{chosen_by}", title, marked=True))
    return [panel for panel in panels if panel is not None]


def _panel(run: RunData, metric: str, title: str, *, marked: bool = False) -> Panel | None:
    whole = [c for seed, log in run.logs.items() if (c := _curve(seed, log, metric)) is not None]
    if not whole:
        return None
    chosen = [_chosen(curve, run.best_steps) for curve in whole] if marked else []
    curves = tuple(whole if metric.startswith("valid/") else [_blocks(curve) for curve in whole])
    every = np.concatenate([curve.values for curve in curves])
    every = every[np.isfinite(every)]
    log = bool(len(every) and every.min() > 0 and every.max() > _LOG_SPREAD * every.min())
    points = tuple(point for point in chosen if point is not None)
    return Panel(title, curves, _mean(curves), points, log)


def _curve(seed: int, log: pl.DataFrame, metric: str) -> Curve | None:
    if metric not in log.columns:
        return None
    rows = log.select("step", metric).drop_nulls()
    if rows.is_empty():
        return None
    steps, values = rows["step"].to_numpy(), rows[metric].to_numpy()
    # Before the first update learners log zeros, which are no losses: they are left out.
    known = np.flatnonzero(values)
    return Curve(seed, steps[known[0] :], values[known[0] :]) if len(known) else None


def _mean(curves: Sequence[Curve]) -> Curve:
    """Mean at the steps that all seeds have."""
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    # Of two rows of one step the last one counts.
    found = [dict(zip(c.steps.tolist(), c.values.tolist(), strict=True)) for c in curves]
    values = np.array([np.mean([f[step] for f in found]) for step in steps.tolist()])
    return Curve(-1, np.asarray(steps, dtype=np.int64), values.astype(np.float64))


def _blocks(curve: Curve) -> Curve:
    """The curve, as means of blocks of rows where it is long; at the last step of each block."""
    n = len(curve.steps)
    if n <= MOST_ROWS:
        return curve
    size = math.ceil(n / MOST_ROWS)
    starts = np.arange(0, n, size)
    ends = np.minimum(starts + size, n)
    means = np.add.reduceat(curve.values, starts) / (ends - starts)
    return Curve(curve.seed, curve.steps[ends - 1], means)


def _chosen(curve: Curve, best_steps: Mapping[int, int]) -> Point | None:
    step = best_steps.get(curve.seed)
    at = np.flatnonzero(curve.steps == step)
    if step is None or not len(at):
        return None
    return Point(curve.seed, step, float(curve.values[at[-1]]))


def training_chart(run: RunData, words: Words) -> Figure:
    """Small panels of what training logged, a line a seed and their mean."""
    panels = training_panels(run, words)
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    data: list[Figure] = []
    layout = make_layout(
        height=120 + 220 * rows,
        hovermode="closest",
        legend=legend_above() | {"y": 1.0 + 0.18 / rows},
        margin={"l": 56, "r": 12, "t": 76, "b": 44},
        grid={"rows": rows, "columns": COLUMNS, "pattern": "independent"}
        | {"xgap": 0.14, "ygap": 0.30},
        annotations=[],
    )
    for k, panel in enumerate(panels):
        suffix = "" if k == 0 else str(k + 1)
        data += _panel_traces(panel, suffix, first=k == 0, words=words)
        layout[f"xaxis{suffix}"] = axis(tickformat="~s", nticks=5, showgrid=False)
        layout[f"yaxis{suffix}"] = axis(
            nticks=5, type="log" if panel.log else "linear", exponentformat="power"
        )
        layout["annotations"].append(panel_title(panel.title, suffix))
        if k + COLUMNS >= len(panels):
            layout[f"xaxis{suffix}"]["title"] = axis_title(words("steps"))
    return {"data": data, "layout": layout}


def _panel_traces(panel: Panel, suffix: str, *, first: bool, words: Words) -> list[Figure]:
    axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "type": "scatter"}
    several = len(panel.curves) > 1
    traces: list[Figure] = []
    for n, curve in enumerate(panel.curves):
        name = words("seed_n", seed=curve.seed)
        thin = {"color": colour("accent_soft"), "width": 1}
        bold = {"color": colour("accent"), "width": 2}
        traces.append(
            axes
            | {
                "mode": "lines",
                "name": words("seeds") if several else name,
                "legendgroup": "seeds",
                "showlegend": first and n == 0,
                "x": curve.steps.tolist(),
                "y": numbers(curve.values),
                "line": thin if several else bold,
                "hovertemplate": f"{name}<br>%{{x:,}}<br>%{{y:.4g}}<extra></extra>",
            }
        )
    if several:
        traces.append(
            axes
            | {
                "mode": "lines",
                "name": words("mean_of_seeds"),
                "legendgroup": MEAN,
                "showlegend": first,
                "x": panel.mean.steps.tolist(),
                "y": numbers(panel.mean.values),
                "line": {"color": colour("accent"), "width": 2.4},
                "hovertemplate": "%{x:,}<br>%{y:.4g}<extra></extra>",
            }
        )
    if panel.chosen:
        traces.append(
            axes
            | {
                "mode": "markers",
                "name": words("chosen"),
                "x": [point.step for point in panel.chosen],
                "y": numbers(np.array([point.value for point in panel.chosen])),
                "text": [words("seed_n", seed=point.seed) for point in panel.chosen],
                "marker": {
                    "symbol": "diamond",
                    "size": 9,
                    "color": colour("loss"),
                    "line": {"width": 1, "color": colour("card")},
                },
                "hovertemplate": "%{text}<br>%{x:,}<br>%{y:.4g}<extra></extra>",
            }
        )
    return traces
