"""The picture of a comparison: a line per agent and baseline, the reference behind all."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
from matplotlib.figure import Figure

from echelon.evaluation.comparison import ComparisonResult, Row
from echelon.files import write_atomic
from echelon.ops.measures import LABELS
from echelon.report.ablation import Line, draw_lines
from echelon.report.palette import LIGHT
from echelon.report.pictures import STYLE

_MEASURE = "sharpe_annual"
_WIDTH = 12.8
_LINE_HEIGHT = 0.36
_DPI = 150
_WINDOWS = {"valid": "validation", "test": "test"}


def draw_comparison(result: ComparisonResult, path: Path) -> None:
    """Draw the result as a PNG at `path`."""
    lines = list(comparison_lines(result))
    headings = len({line.group for line in lines})
    height = 2.1 + _LINE_HEIGHT * (len(lines) + 1.4 * headings)
    reference = next(line.points for line in lines if line.is_base)
    window = _WINDOWS[result.facts["split"]]
    with mpl.rc_context({"font.family": ["DejaVu Sans"]} | STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(_WIDTH, height))
        bottom = 0.62 / height
        axes = figure.add_axes((0.235, bottom, 0.55, 1.0 - 1.25 / height - bottom))
        _write_titles(figure, result, window, height)
        draw_lines(axes, lines, reference, window=window, reference=result.reference)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    write_atomic(path, buffer.getvalue())


def comparison_lines(result: ComparisonResult) -> Iterator[Line]:
    """Agents with the steps they were trained for, then baselines."""
    reference = next(row for row in result.rows if row.name == result.reference)
    centre = reference.over_seeds(_MEASURE).mean
    for row in result.rows:
        own = row is reference
        label = f"{row.name}, {row.steps:,} steps" if row.kind == "agent" else row.name
        group = {"agent": "agents", "baseline": "baselines"}[row.kind]
        yield Line(group, label, _points(row), math.nan if own else centre, own)


def _points(row: Row) -> tuple[float, ...]:
    return tuple(v for v in row.values(_MEASURE) if math.isfinite(v))


def _write_titles(figure: Figure, result: ComparisonResult, window: str, height: float) -> None:
    facts = result.facts
    seeds = max(len(row.seeds) for row in result.rows)
    below = f"{window.capitalize()} window {facts['first']} to {facts['last']} · "
    if seeds > 1:
        below += f"dot and bar: mean ± standard deviation over {seeds} seeds · ring: a seed · "
    else:
        below += "1 seed each: how much of a difference is chance cannot be seen · "
    below += f"dashed, band: {result.reference} · fills at {facts['ledger']['fill']}"
    title = f"{result.name} · {LABELS[_MEASURE].text} by agent"
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
