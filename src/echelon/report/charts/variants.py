"""Pictures of an ablation and of a comparison: a row per variant or agent, the reference behind.

A dot is a row's mean over seeds, its bar one standard deviation, the rings are single seeds. A full
grid has too many variants for that: there a row is a level of a factor, its rings are all variants
with that level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from echelon.config import Config
from echelon.evaluation.ablation import MATRIX, AblationResult, Choice, choices
from echelon.evaluation.batch import MeasuredRow
from echelon.evaluation.comparison import ComparisonResult
from echelon.files import write_atomic
from echelon.ops.measures import LABELS, MeanStd, mean_std
from echelon.report.charts.chart import Axis, Chart, Layer, Plot, Points, RefLine
from echelon.report.charts.slides import Slide, draw_slide

_MEASURE = "sharpe_annual"


@dataclass(frozen=True)
class VariantRow:
    """One row: points are its rings; reference: what their mean is compared with, NaN: nothing."""

    group: str
    label: str
    points: tuple[float, ...]
    reference: float = math.nan
    is_base: bool = False

    @property
    def centre(self) -> MeanStd:
        """Mean and std of the points; NaN without any."""
        return mean_std(self.points) if self.points else MeanStd(math.nan, math.nan)


def draw_ablation(result: AblationResult, base: Config, path: Path) -> None:
    changes = [row.variant.settings for row in result.rows]
    known = all(setting.factor in MATRIX for settings in changes for setting in settings)
    grid = known and any(len(settings) > 1 for settings in changes)
    rows = list(grid_rows(result, base) if grid else variant_rows(result, base))
    facts = result.facts
    seeds = max(len(row.seeds) for row in result.rows)
    below = f"Validation window {facts['first']} to {facts['last']} · "
    if grid:
        below += (
            f"{len(result.rows)} combinations, {seeds} seed{'s' if seeds > 1 else ''} each · ring: "
            "mean of a combination with that level · dot and bar: mean ± standard deviation of the "
            "rings · band: the base"
        )
    else:
        below += _seeds_text(seeds) + (" · band: the base" if seeds > 1 else "")
    title = f"{result.name} · {LABELS[_MEASURE].text} by variant"
    write_atomic(path, draw_slide(_rows_slide(title, below, rows, "validation", "base")))


def draw_comparison(result: ComparisonResult, path: Path) -> None:
    facts = result.facts
    window = "validation" if facts["split"] == "valid" else facts["split"]
    seeds = max(len(row.seeds) for row in result.rows)
    below = f"{window.capitalize()} window {facts['first']} to {facts['last']} · "
    below += f"{_seeds_text(seeds)} · dashed, band: {result.reference} · "
    below += f"fills at {facts['ledger']['fill']}"
    title = f"{result.name} · {LABELS[_MEASURE].text} by agent"
    rows = list(comparison_rows(result))
    write_atomic(path, draw_slide(_rows_slide(title, below, rows, window, result.reference)))


def _seeds_text(seeds: int) -> str:
    if seeds > 1:
        return f"dot and bar: mean ± standard deviation over {seeds} seeds · ring: a seed"
    return "1 seed each: how much of a difference is chance cannot be seen"


def _points(row: MeasuredRow) -> tuple[float, ...]:
    return tuple(v for v in row.values(_MEASURE) if math.isfinite(v))


def comparison_rows(result: ComparisonResult) -> Iterator[VariantRow]:
    """Agents with the steps they were trained for, then baselines."""
    reference = next(row for row in result.rows if row.name == result.reference)
    centre = reference.over_seeds(_MEASURE).mean
    for row in result.rows:
        own = row is reference
        label = f"{row.name}, {row.steps:,} steps" if row.kind == "agent" else row.name
        group = {"agent": "agents", "baseline": "baselines"}[row.kind]
        yield VariantRow(group, label, _points(row), math.nan if own else centre, own)


def variant_rows(result: AblationResult, base: Config) -> Iterator[VariantRow]:
    """The base, then every variant below the factor it changes."""
    own = {choice.factor: choice.own for choice in choices(base)}
    mean = VariantRow("", "", _points(result.base)).centre.mean
    factors = list(dict.fromkeys(row.variant.factor for row in result.rows))
    for row in sorted(result.rows, key=lambda row: factors.index(row.variant.factor)):
        variant, factor = row.variant, row.variant.factor
        if row is result.base:
            yield VariantRow("", variant.name, _points(row), is_base=True)
            continue
        group = factor
        if len(variant.settings) == 1:
            value: Any = base
            for part in factor.split("."):
                value = getattr(value, part, "–")
            group = f"{factor} (base: {own.get(factor) or value})"
        label = variant.value if factor in own else variant.name
        yield VariantRow(group, label, _points(row), mean)


def grid_rows(result: AblationResult, base: Config) -> Iterator[VariantRow]:
    """The base, then every level of every factor with the means of all variants that have it."""
    yield VariantRow("", result.base.variant.name, _points(result.base), is_base=True)
    for choice in choices(base):
        own = VariantRow(choice.factor, f"{choice.own} (base)", _means(result, choice, choice.own))
        yield own
        for level in choice.others:
            means = _means(result, choice, level.value)
            yield VariantRow(choice.factor, level.value, means, own.centre.mean)


def _means(result: AblationResult, choice: Choice, value: str) -> tuple[float, ...]:
    rows = (
        row
        for row in result.rows
        if dict(row.variant.settings).get(choice.factor, choice.own) == value
    )
    return tuple(float(np.mean(points)) for row in rows if (points := _points(row)))


def _rows_slide(
    title: str, below: str, rows: Sequence[VariantRow], window: str, reference: str
) -> Slide:
    shown = LABELS[_MEASURE].format
    lines: list[tuple[str, str, str]] = []
    strong: list[int] = []
    layers: list[Layer] = []
    for before, row in pairwise((VariantRow("", "", ()), *rows)):
        mean, std = row.centre
        if row.group != before.group:
            strong.append(len(lines))
            lines.append((shorten(row.group, 46, placeholder=" …"), "", ""))
        if row.is_base:
            strong.append(len(lines))
            if math.isfinite(std):
                layers.insert(0, RefLine(mean - std, "x", until=mean + std, role="benchmark"))
            if math.isfinite(mean):
                layers.insert(0, RefLine(mean, "x", width=1.1, role="benchmark"))
        layers += _row_points(row, len(lines))
        gap = mean - row.reference
        more = f"{'+' if gap > 0 else ''}{shown(gap)}" if math.isfinite(gap) else ""
        lines.append((row.label, shown(mean, std) if row.points else "failed", more))
    labels, means, gaps = zip(*lines, strict=True)
    several = any(len(row.points) > 1 for row in rows)
    columns = (("mean ± std" if several else "value", means), (f"vs {reference}", gaps))
    x = Axis(f"{LABELS[_MEASURE].text}, {window}")
    plot = Plot(layers, x, Axis(labels=labels, strong=strong, columns=columns))
    return Slide(title, below, Chart([[plot]], 0), height=2.0 + 0.36 * len(lines))


def _row_points(row: VariantRow, y: int) -> list[Points]:
    mean, std = row.centre
    role = "benchmark" if row.is_base else "accent"
    n = len(row.points)
    layers = []
    if n > 1:
        # Many rings lie on one another: spread them a little, the same way every time.
        many = n > 12
        heights = y + (np.linspace(-0.16, 0.16, n) if many else np.zeros(n))
        size = 6.0 if many else 9.0
        layers.append(Points(row.points, heights, "circle-open", size, role=role, opacity=0.55))
    if n:
        low, high = (np.array([mean - std]), np.array([mean + std])) if n > 1 else (None, None)
        symbol = "diamond" if row.is_base else "circle"
        layers.append(Points([mean], [y], symbol, 13.0, low=low, high=high, role=role))
    return layers
