"""The picture of an ablation: a line per variant, grouped by what it changes, the base behind all.

One factor at a time (or variants of one's own): a dot is a variant's mean over seeds, its bar one
standard deviation, the rings are single seeds. A full grid has too many variants for that: there a
line is a level of a factor, its rings are all variants with that level.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echelon.config import Config
from echelon.evaluation.ablation import AblationResult, VariantResult
from echelon.evaluation.variants import MATRIX, Choice, choices
from echelon.files import write_atomic
from echelon.ops.measures import LABELS, MeanStd, mean_std
from echelon.report.palette import LIGHT
from echelon.report.pictures import STYLE

_MEASURE = "sharpe_annual"
_WIDTH = 12.8
_LINE_HEIGHT = 0.36
_DPI = 150


@dataclass(frozen=True)
class Line:
    """One line of the picture.

    group: what it belongs to, written above the first line of a group; empty: no heading
    points: the rings
    reference: what the mean is compared with; NaN: nothing, as for the base itself
    """

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
    """Draw the result as a PNG at `path`."""
    grid = _is_grid(result)
    lines = list(_grid_lines(result, base) if grid else _variant_lines(result, base))
    headings = len({line.group for line in lines if line.group})
    height = 2.1 + _LINE_HEIGHT * (len(lines) + 1.4 * headings)
    with mpl.rc_context({"font.family": ["DejaVu Sans"]} | STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(_WIDTH, height))
        top = 1.0 - 1.25 / height
        axes = figure.add_axes((0.235, 0.62 / height, 0.55, top - 0.62 / height))
        _write_titles(figure, result, height, grid=grid)
        draw_lines(axes, lines, _values(result.base), grid=grid)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    write_atomic(path, buffer.getvalue())


def _is_grid(result: AblationResult) -> bool:
    settings = [row.variant.settings for row in result.rows]
    known = all(setting.factor in MATRIX for each in settings for setting in each)
    return known and any(len(each) > 1 for each in settings)


def _values(row: VariantResult) -> tuple[float, ...]:
    return tuple(v for v in row.values(_MEASURE) if math.isfinite(v))


def _variant_lines(result: AblationResult, base: Config) -> Iterator[Line]:
    """The base, then every variant below the factor it changes."""
    own = {choice.factor: choice.own for choice in choices(base)}
    mean = Line("", "", _values(result.base)).centre.mean
    for row in _grouped(result.rows):
        factor = row.variant.factor
        is_base = row is result.base
        group = factor
        if is_base:
            group = ""
        elif len(row.variant.settings) == 1:
            group = f"{factor} (base: {own.get(factor) or _configured(base, factor)})"
        value = row.variant.value if factor in own else row.variant.name
        reference = math.nan if is_base else mean
        label = row.variant.name if is_base else value
        yield Line(group, label, _values(row), reference, is_base)


def _grouped(rows: Sequence[VariantResult]) -> list[VariantResult]:
    """Rows of one factor side by side, factors in the order they first appear."""
    order = list(dict.fromkeys(row.variant.factor for row in rows))
    return sorted(rows, key=lambda row: order.index(row.variant.factor))


def _configured(base: Config, key: str) -> str:
    """The base's value of a dotted key."""
    node: Any = base
    for part in key.split("."):
        node = getattr(node, part, "–")
    return str(node)


def _grid_lines(result: AblationResult, base: Config) -> Iterator[Line]:
    """The base, then every level of every factor with the means of all variants that have it."""
    yield Line("", result.base.variant.name, _values(result.base), is_base=True)
    for choice in choices(base):
        own = Line(choice.factor, f"{choice.own} (base)", _means(result, choice, choice.own))
        yield own
        for level in choice.others:
            means = _means(result, choice, level.value)
            yield Line(choice.factor, level.value, means, own.centre.mean)


def _means(result: AblationResult, choice: Choice, value: str) -> tuple[float, ...]:
    """Means of the variants in which a factor has this value."""
    rows = (
        row
        for row in result.rows
        if dict(row.variant.settings).get(choice.factor, choice.own) == value
    )
    return tuple(float(np.mean(found)) for row in rows if (found := _values(row)))


def _write_titles(figure: Figure, result: AblationResult, height: float, *, grid: bool) -> None:
    facts = result.facts
    seeds = max(len(row.seeds) for row in result.rows)
    count = f"{seeds} seed{'s' if seeds > 1 else ''}"
    below = f"Validation window {facts['first']} to {facts['last']} · "
    if grid:
        below += (
            f"{len(result.rows)} combinations, {count} each · ring: mean of a combination with "
            "that level · dot and bar: mean ± standard deviation of the rings · band: the base"
        )
    elif seeds > 1:
        below += (
            f"dot and bar: mean ± standard deviation over {count} · ring: a seed · band: the base"
        )
    else:
        below += f"{count} each: how much of a difference is chance cannot be seen"
    title = f"{result.name} · {LABELS[_MEASURE].text} by variant"
    figure.text(0.018, 1 - 0.42 / height, title, fontsize=17, fontweight="bold")
    figure.text(
        0.018,
        1 - 0.56 / height,
        "\n".join(wrap(below, 150)),
        fontsize=10.5,
        color=LIGHT["soft"],
        va="top",
        linespacing=1.4,
    )


def draw_lines(
    axes: Axes,
    lines: Sequence[Line],
    base: Sequence[float],
    *,
    grid: bool = False,
    window: str = "validation",
    reference: str = "base",
) -> None:
    """Draw a line each, with `base`, the points of the reference, behind them."""
    centre = mean_std(base) if base else MeanStd(math.nan, math.nan)
    if math.isfinite(centre.mean):
        axes.axvline(centre.mean, color=LIGHT["benchmark"], linewidth=1.1, linestyle="--", zorder=1)
    if math.isfinite(centre.std):
        low, high = centre.mean - centre.std, centre.mean + centre.std
        axes.axvspan(low, high, color=LIGHT["benchmark"], alpha=0.07, lw=0, zorder=0)
    y, ticks, before = 0.0, [], ""
    for line in lines:
        if line.group != before:
            y -= 1.4
            heading = shorten(line.group, 46, placeholder=" …")
            axes.text(-0.405, y + 0.75, heading, **_at_left(axes, fontweight="bold"))
            before = line.group
        _draw_line(axes, line, y, grid=grid)
        ticks.append((y, line.label))
        y -= 1.0
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    for tick, line in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_fontweight("bold" if line.is_base else "normal")
        tick.set_color(LIGHT["ink"])
    axes.set_ylim(y + 0.3, 0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    axes.set_xlabel(f"{LABELS[_MEASURE].text}, {window}")
    several = any(len(line.points) > 1 for line in lines)
    over = "mean ± std" if several else "value"
    axes.text(1.03, 0.62, over, **_at_left(axes, color=LIGHT["soft"], fontsize=10))
    axes.text(1.235, 0.62, f"less {reference}", **_at_left(axes, color=LIGHT["soft"], fontsize=10))


def _draw_line(axes: Axes, line: Line, y: float, *, grid: bool) -> None:
    mean, std = line.centre
    colour = LIGHT["benchmark"] if line.is_base else LIGHT["accent"]
    if not math.isfinite(mean):
        axes.text(0.02, y, "failed", **_at_left(axes, color=LIGHT["loss"]))
        return
    if len(line.points) > 1:
        # Many rings lie on one another: spread them a little, the same way every time.
        spread = np.linspace(-0.16, 0.16, len(line.points)) if grid else 0.0
        heights = np.full(len(line.points), y) + spread
        ring = {"mfc": "none", "mec": colour, "markersize": 4.5 if grid else 6.5, "alpha": 0.55}
        axes.plot(line.points, heights, "o", linestyle="none", zorder=3, **ring)  # type: ignore[arg-type]
    if math.isfinite(std):
        axes.plot([mean - std, mean + std], [y, y], color=colour, linewidth=2.6, zorder=2)
    marker = "D" if line.is_base else "o"
    axes.plot(mean, y, marker, color=colour, markersize=9.5, mec="white", mew=1.2, zorder=4)
    shown = LABELS[_MEASURE].format(mean, std)
    axes.text(1.03, y, shown, **_at_left(axes, fontweight="bold" if line.is_base else "normal"))
    gap = mean - line.reference
    if math.isfinite(gap):
        text = f"{'+' if gap > 0 else ''}{LABELS[_MEASURE].format(gap)}"
        axes.text(1.235, y, text, **_at_left(axes, color=LIGHT["gain" if gap > 0 else "loss"]))


def _at_left(axes: Axes, **more: Any) -> dict[str, Any]:  # noqa: ANN401 (text properties)
    """Text placed by a share of the width and by a line's height, left-aligned."""
    usual = {"ha": "left", "va": "center", "fontsize": 11, "color": LIGHT["ink"]}
    return {"transform": axes.get_yaxis_transform()} | usual | more
