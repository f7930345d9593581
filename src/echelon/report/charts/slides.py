"""Draw a chart as a PNG for slides: 16:9, below its title, in the report's light colours.

Chinese texts need a Chinese font; where the machine has none, slides are in English.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from echelon.report.charts.chart import (
    LIGHT,
    MOST_LABELS,
    Axis,
    BarStack,
    Cells,
    Chart,
    Curve,
    Layer,
    Places,
    Plot,
    Points,
    RefLine,
    Spans,
)
from echelon.report.texts import Words

_CHINESE = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei"),
    *("Noto Sans CJK JP", "Arial Unicode MS"),
)
_STYLE = {
    "font.size": 11,
    "axes.unicode_minus": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["soft"],
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}
_DATES: dict[str, Any] = {
    "formats": ["%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M", "%S"],
    "zero_formats": ["", "%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M"],
    "show_offset": False,
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_SYMBOLS = {
    "circle": "o",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "triangle-left": "<",
    "triangle-right": ">",
    "square": "s",
    "cross": "P",
    "x": "X",
    "star": "*",
    "line-ns": "|",
    "line-ew": "_",
}
"""Symbol of plotly.js → of matplotlib; with `-open` they are hollow."""


@dataclass(frozen=True)
class Slide:
    """A chart below its title. below, right: texts there; height: in inches"""

    title: str
    below: str
    chart: Chart
    right: str = ""
    height: float = 7.2


@cache
def _chinese_font() -> str | None:
    known = {font.name for font in font_manager.fontManager.ttflist}
    return next((name for name in _CHINESE if name in known), None)


def slide_words(words: Words) -> Words:
    """The words to use on slides: English where no font has Chinese."""
    return words if words.lang == "en" or _chinese_font() else Words("en")


def draw_slide(slide: Slide, lang: str = "en") -> bytes:
    """The slide as a PNG. lang: of its texts"""
    chinese = _chinese_font() if lang == "zh" else None
    fonts = [chinese, "DejaVu Sans"] if chinese else ["DejaVu Sans"]
    lines = wrap(slide.below, 78 if lang == "zh" else 150)
    inch = 1 / slide.height
    top = 1.0 - (0.70 + 0.187 * len(lines)) * inch
    with mpl.rc_context({"font.family": fonts} | _STYLE):  # type: ignore[arg-type]
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.1 * inch, 0.98, top))
        figure = Figure(figsize=(12.8, slide.height), layout=layout)
        soft: dict[str, Any] = {"fontsize": 10.5, "color": LIGHT["soft"]}
        figure.text(0.018, 1 - 0.396 * inch, slide.title, fontsize=17, fontweight="bold")
        figure.text(0.982, 1 - 0.396 * inch, slide.right, ha="right", **soft)
        below = "\n".join(lines)
        figure.text(0.018, 1 - 0.504 * inch, below, va="top", linespacing=1.4, **soft)
        _draw_chart(figure, slide.chart)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw_chart(figure: Figure, chart: Chart) -> None:
    """Draw the plots of a chart; one that is alone in its row has all of it."""
    columns = max(len(row) for row in chart.rows)
    ratios = list(chart.ratios) or None
    grid = figure.add_gridspec(len(chart.rows), columns, height_ratios=ratios)
    handles: list[tuple[Layer, Artist]] = []
    drawn: list[Axes] = []
    for r, row in enumerate(chart.rows):
        for c, plot in enumerate(row):
            if plot is None:
                continue
            place = grid[r, :] if len(row) == 1 else grid[r, c]
            axes = figure.add_subplot(place, sharex=drawn[0] if chart.shared and drawn else None)
            own = _draw_plot(axes, plot)
            drawn.append(axes)
            if plot.legend == "chart":
                handles += own
            elif plot.legend != "none" and own:
                _legend(axes, own, plot.legend, wide=len(row) == 1)
    if chart.shared:
        for axes in drawn[:-1]:
            axes.tick_params(labelbottom=False)
        figure.align_ylabels(drawn)
    if chart.legend != "none" and handles:
        _legend(drawn[0], handles, chart.legend)


def _legend(
    axes: Axes, entries: Sequence[tuple[Layer, Artist]], where: str, *, wide: bool = True
) -> None:
    """A legend of layers. wide: the plot has the whole width"""
    entries = sorted(entries, key=lambda entry: not entry[0].lead)
    handles = [artist for _, artist in entries]
    if where == "right":
        axes.legend(handles=handles[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
        return
    if where == "inside":
        axes.legend(handles=handles, loc="best", fontsize=9, ncols=len(handles) if wide else 1)
        return
    titled = bool(axes.get_title(loc="left"))
    rows = -(-len(handles) // 8)
    columns = -(-len(handles) // rows)
    # matplotlib fills columns, the eye reads rows.
    handles = [handle for column in range(columns) for handle in handles[column::columns]]
    axes.legend(
        handles=handles,
        loc="lower right" if titled else "lower left",
        bbox_to_anchor=(1.0 if titled else 0.0, 1.0),
        ncols=columns,
        fontsize=9 if titled else 10,
        columnspacing=1.3,
        handlelength=1.6,
        handletextpad=0.5,
        borderaxespad=0.2,
    )


def _draw_plot(axes: Axes, plot: Plot) -> list[tuple[Layer, Artist]]:
    axes.set_title(plot.title, loc="left", fontsize=12)
    if plot.note:
        axes.text(0.5, 0.5, plot.note, ha="center", va="center", wrap=True, color=LIGHT["soft"])
        axes.set_axis_off()
        return []
    stacks = [layer for layer in plot.layers if isinstance(layer, Curve) and layer.fill == "stack"]
    if stacks:
        colours = [_colour(layer.role) for layer in stacks]
        axes.stackplot(
            np.asarray(stacks[0].x), np.array([s.y for s in stacks]), colors=colours, lw=0
        )
    ends: dict[bool, Any] = {}
    entries: list[tuple[Layer, Artist]] = []
    for layer in plot.layers:
        artist: Artist | None = Patch(color=_colour(layer.role), label=layer.name)
        match layer:
            case Curve():
                artist = artist if layer.fill == "stack" else _draw_line(axes, layer, plot)
            case Points():
                artist = _draw_points(axes, layer, plot)
            case BarStack():
                ends[layer.across] = _draw_bars(axes, layer, ends.get(layer.across, 0.0))
            case Spans():
                length = layer.stop - layer.first
                span = {"height": layer.thickness, "color": _colour(layer.role), "linewidth": 0}
                axes.barh(list(layer.rows), length, left=layer.first, **span)
            case Cells():
                _draw_cells(axes, layer)
            case RefLine():
                artist = _draw_rule(axes, layer)
        if artist is not None and layer.listed and layer.name:
            entries.append((layer, artist))
    _set_axis(axes, plot.x, vertical=False)
    _set_axis(axes, plot.y, vertical=True)
    return entries


def _colour(role: str) -> Any:  # noqa: ANN401 (a colour of matplotlib)
    """A colour of the palette, whose transparent ones are written as CSS has them."""
    text = LIGHT[role]
    if not text.startswith("rgba("):
        return text
    red, green, blue, alpha = (float(part) for part in text[5:-1].split(","))
    return red / 255, green / 255, blue / 255, alpha


def _places(values: Places, axis: Axis) -> Any:  # noqa: ANN401 (numbers or times)
    """Places along x; those of categories are their numbers."""
    if axis.kind != "category":
        return np.asarray(values)
    numbers = {label: k for k, label in enumerate(axis.labels)}
    return np.array([numbers[str(value)] for value in values], dtype=np.float64)


def _draw_line(axes: Axes, layer: Curve, plot: Plot) -> Artist | None:
    if not layer.shown:
        return None
    x, y = _places(layer.x, plot.x), np.asarray(layer.y, dtype=np.float64)
    (line,) = axes.plot(
        x,
        y,
        color=_colour(layer.role),
        linewidth=0.9 * layer.width,
        linestyle=_DASHES[layer.dash],
        drawstyle="steps-mid" if layer.step else "default",
        marker="o" if layer.marked else "",
        markersize=4,
        label=layer.name,
    )
    if layer.fill == "zero":
        axes.fill_between(x, y, color=_colour("accent_area"), lw=0)
    return line


def _draw_points(axes: Axes, layer: Points, plot: Plot) -> Artist:
    x, y = _places(layer.x, plot.x), np.asarray(layer.y, dtype=np.float64)
    hollow = layer.symbol.endswith("-open") and not layer.symbol.startswith("line")
    symbol = _SYMBOLS[layer.symbol.removesuffix("-open")]
    colours = [_colour(role) for role in layer.roles or [layer.role]]
    look: dict[str, Any] = {
        "s": np.square(0.72 * np.asarray(layer.size, dtype=np.float64)),  # a pixel in points
        "marker": symbol,
        "c": "white" if hollow else colours,
        "linewidths": 1.4 if hollow or symbol in "|_" else 0.8 * (layer.opacity == 1.0),
        # Symbols that are lines have no edge.
        "edgecolors": None if symbol in "|_" else colours if hollow else "white",
        "alpha": layer.opacity if layer.opacity < 1.0 else None,
        "clip_on": False,
        "label": layer.name,
        "zorder": 4,
    }
    if layer.low is not None and layer.high is not None:
        draw = axes.hlines if layer.along == "x" else axes.vlines
        draw(y if layer.along == "x" else x, layer.low, layer.high, colors=colours, lw=2)
    if layer.at_foot:
        foot = np.full(len(y), 0.018)
        return axes.scatter(x, foot, **look, transform=axes.get_xaxis_transform())
    for k, label in enumerate(layer.labels):
        down = bool(layer.below) and layer.below[k]
        axes.annotate(
            label,
            (x[k], y[k]),
            xytext=(0, -9 if down else 8),
            textcoords="offset points",
            ha="center",
            va="top" if down else "bottom",
            fontsize=10,
        )
    return axes.scatter(x, y, **look)


def _draw_bars(axes: Axes, layer: BarStack, before: Any) -> Any:  # noqa: ANN401 (numbers)
    """Draw bars from where those before them end; returns where these end."""
    places = np.asarray(layer.at)
    look: dict[str, Any] = {
        "color": [_colour(role) for role in layer.roles or [layer.role]],
        "linewidth": 0,
        "alpha": 1.0 if layer.low is None else 0.85,
    }
    if layer.across:
        axes.barh(places, layer.values, left=before, height=0.55, **look)
    else:
        width = 0.88 * np.diff(places).min() if len(places) > 1 else 0.88
        axes.bar(places, layer.values, bottom=before, width=width, **look)
    if layer.low is not None and layer.high is not None:
        draw = axes.hlines if layer.across else axes.vlines
        draw(places, layer.low, layer.high, colors=LIGHT["ink"], lw=1.2)
        ends = np.concatenate([layer.low, layer.high]), np.concatenate([places, places])
        flat, symbol = (ends, "|") if layer.across else (ends[::-1], "_")
        axes.plot(*flat, symbol, color=LIGHT["ink"], markersize=7)
    return before + np.nan_to_num(layer.values)


def _draw_cells(axes: Axes, layer: Cells) -> None:
    scale = LinearSegmentedColormap.from_list("", [LIGHT["loss"], "#ffffff", LIGHT["gain"]])
    look: dict[str, Any] = {"cmap": scale, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(layer.values, vmin=-layer.limit, vmax=layer.limit, **look)
    rows, columns = layer.values.shape
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    if not layer.written:
        return
    size = 11.5 if max(rows, columns) <= 13 else 8.5
    for row, column in np.ndindex(rows, columns):
        value = layer.values[row, column]
        axes.text(
            column,
            row,
            layer.written[row][column].replace("-", "−"),
            ha="center",
            va="center",
            fontsize=size,
            color="#ffffff" if abs(value) > 0.75 * layer.limit else LIGHT["ink"],
            fontweight="bold" if np.isnan(value) else "normal",
        )
    axes.set_xticks(np.arange(-0.5, columns), minor=True)
    axes.set_yticks(np.arange(-0.5, rows), minor=True)
    axes.grid(which="minor", color="#ffffff", linewidth=2.5)


def _draw_rule(axes: Axes, layer: RefLine) -> Artist:
    if layer.until is not None:
        draw = axes.axhspan if layer.axis == "y" else axes.axvspan
        return draw(float(layer.at), layer.until, color=_colour(layer.role), alpha=0.07, lw=0)
    look: dict[str, Any] = {
        "color": _colour(layer.role),
        "linewidth": layer.width,
        "linestyle": _DASHES[layer.dash],
        "label": layer.name,
        "zorder": 1.5,
    }
    if layer.axis == "y":
        return axes.axhline(float(layer.at), **look)
    at: Any = np.datetime64(layer.at) if isinstance(layer.at, str) else layer.at
    return axes.axvline(at, **look)


def _set_axis(axes: Axes, axis: Axis, *, vertical: bool) -> None:
    drawn: DrawnAxis = axes.yaxis if vertical else axes.xaxis
    if axis.title and not axis.bare:
        drawn.set_label_text(axis.title)
    if axis.labels or axis.bare:
        drawn.grid(visible=False, which="major")
    if axis.kind == "log":
        (axes.set_yscale if vertical else axes.set_xscale)("log")
    elif axis.kind == "date":
        axes.margins(x=0)
        locator = AutoDateLocator(minticks=4, maxticks=9)  # type: ignore[no-untyped-call]
        drawn.set_major_locator(locator)
        formatter = ConciseDateFormatter(locator, **_DATES)  # type: ignore[no-untyped-call]
        drawn.set_major_formatter(formatter)
    elif axis.bare:
        drawn.set_ticks([((axis.low or 0.0) + (axis.high or 0.0)) / 2], [axis.title])
        drawn.set_tick_params(length=0)
        axes.spines[:].set_visible(False)
    elif axis.labels:
        _set_labels(axes, drawn, axis, vertical=vertical)
    else:
        drawn.set_major_locator(
            MaxNLocator(axis.ticks or 7, steps=[1, 2, 2.5, 5, 10], integer=axis.form == "integer")
        )
        # Whole numbers on the axis: "+1.234e2" above it is easily overlooked.
        axes.ticklabel_format(axis="y" if vertical else "x", useOffset=False)
    if axis.form == "percent":
        drawn.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif axis.form == "steps":
        drawn.set_major_formatter(EngFormatter(sep=""))
    if axis.low is not None:
        set_ends = axes.set_ylim if vertical else axes.set_xlim
        set_ends(axis.low, axis.high)


def _set_labels(axes: Axes, drawn: DrawnAxis, axis: Axis, *, vertical: bool) -> None:
    n = len(axis.labels)
    step = -(-n // (axis.ticks or MOST_LABELS))
    assert isinstance(axes.figure, Figure)
    size = 6.5 if vertical and n // step > 2.8 * axes.figure.get_figheight() else 10
    turned = 0 if vertical or sum(map(len, axis.labels[::step])) <= 64 else 60
    drawn.set_ticks(range(0, n, step), axis.labels[::step], fontsize=size, rotation=turned)
    drawn.set_tick_params(length=0, labelcolor=LIGHT["ink"])
    for row in axis.strong:
        drawn.get_ticklabels()[row].set_fontweight("bold")
    for k, (head, texts) in enumerate(axis.columns):
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
        for row, text in enumerate((head, *texts), -1):
            colour = LIGHT["soft" if row < 0 else "ink"]
            axes.text(1.02 + 0.13 * k, row, text, fontsize=10, color=colour, **place)
    if axis.top:
        drawn.set_tick_params(labeltop=True, labelbottom=False)
    if vertical and not axes.yaxis_inverted():
        axes.set_ylim(n - 0.4, -0.6)
