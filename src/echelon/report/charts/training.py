"""What training logged, a plot a metric: a curve a seed, their mean, the checkpoints chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import polars as pl

from echelon.report.charts.chart import Axis, Chart, Curve, Plot, Points
from echelon.report.charts.slides import Slide
from echelon.report.run.gather import RunData
from echelon.report.texts import MEAN, Words

_Curves = Mapping[int, pl.DataFrame]
"""Seed → `step` and `value` of a metric."""
MOST_ROWS = 250
"""Of a curve; longer ones are averaged in blocks, validations excepted."""
_COLUMNS = 3
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


def training_chart(run: RunData, words: Words) -> Chart:
    """What training logged, a plot a metric; those that no seed has, or only as 0, are left out."""
    chosen_by = run.config.train.select_by
    titles = {metric: words(text) for metric, text in _METRICS}
    for measure in dict.fromkeys(("sharpe_annual", chosen_by)):
        titles[f"valid/{measure}"] = words("valid_measure", measure=words.measure(measure))
    if chosen_by == "sharpe_annual":
        titles["losses/gradient_norm"] = words("gradient_norm")
    known: dict[str, dict[int, pl.DataFrame]] = {}
    for metric in titles:
        for seed, log in run.logs.items():
            if metric in log.columns:
                rows = log.select("step", value=pl.col(metric).cast(pl.Float64)).drop_nulls()
                # Learners log zeros before their first update, which are no losses.
                rows = rows[int((rows["value"] != 0.0).arg_max() or 0) :]
                if (rows["value"] != 0.0).any():
                    known.setdefault(metric, {})[seed] = rows
    plots: list[Plot | None] = []
    for k, (metric, own) in enumerate(known.items()):
        x = Axis(words("steps") if k + _COLUMNS >= len(known) else "", form="steps", ticks=5)
        layers = [
            *_lines(metric, own, words, listed=k == 0),
            *_chosen_points(run, metric, own, words),
        ]
        values = np.concatenate([rows["value"].to_numpy() for rows in own.values()])
        values = values[np.isfinite(values)]
        # Where positive values spread so far that nothing else shows them.
        wide = len(values) and values.min() > 0 and values.max() > 100.0 * values.min()
        y = Axis(kind="log" if wide else "linear", ticks=5)
        plots.append(Plot(layers, x, y, titles[metric], legend="none"))
    plots += [None] * (-len(plots) % _COLUMNS)
    grid = [plots[k : k + _COLUMNS] for k in range(0, len(plots), _COLUMNS)] or [[None]]
    return Chart(grid, 120 + 220 * len(grid), hover="closest")


def training_slide(run: RunData, words: Words) -> Slide:
    """The same below what it shows."""
    note = words("training_note" if len(run.logs) > 1 else "training_note_one")
    return Slide(f"{run.name} · {words('training')}", note, training_chart(run, words))


def _lines(metric: str, curves: _Curves, words: Words, *, listed: bool) -> Iterator[Curve]:
    """A line a seed, and their mean. listed: whether the legend has them"""
    several = len(curves) > 1
    if not metric.startswith("valid/"):
        # Checkpoints are chosen by validations, which are never averaged.
        curves = {seed: _blocks(rows) for seed, rows in curves.items()}
    for n, (seed, rows) in enumerate(curves.items()):
        name = words("seed_n", seed=seed)
        yield Curve(
            rows["step"].to_numpy(),
            rows["value"].to_numpy(),
            1.0 if several else 2.0,
            name=words("seeds") if several else name,
            label=name,
            role="accent_soft" if several else "accent",
            group="seeds",
            listed=listed and n == 0,
            hover=".4g",
        )
    if several:
        # At the steps that all seeds have; of two rows of one step the last one counts.
        rows = pl.concat([own.unique("step", keep="last") for own in curves.values()])
        mean = rows.group_by("step").agg(pl.mean("value"), seeds=pl.len()).sort("step")
        mean = mean.filter(pl.col("seeds") == len(curves))
        steps, values = mean["step"].to_numpy(), mean["value"].to_numpy()
        name = words("mean_of_seeds")
        yield Curve(steps, values, 2.4, name=name, group=MEAN, listed=listed, hover=".4g")


def _chosen_points(run: RunData, metric: str, curves: _Curves, words: Words) -> Iterator[Points]:
    """The checkpoints that were chosen, on the curves that chose them."""
    if metric != f"valid/{run.config.train.select_by}":
        return
    points = [
        (step, value, f"{words('seed_n', seed=seed)}<br>{step:,}<br>{value:.4g}")
        for seed, rows in curves.items()
        for step, value in rows.filter(step=run.best_steps.get(seed)).tail(1).iter_rows()
    ]
    if points:
        steps, values, texts = zip(*points, strict=True)
        yield Points(steps, values, "diamond", name=words("chosen"), role="loss", texts=texts)


def _blocks(rows: pl.DataFrame) -> pl.DataFrame:
    """Means of blocks of rows where there are many; at the last step of each block."""
    block = pl.int_range(pl.len()) // math.ceil(len(rows) / MOST_ROWS)
    blocks = rows.group_by(block.alias("block"), maintain_order=True)
    return blocks.agg(pl.last("step"), pl.mean("value")).drop("block")
