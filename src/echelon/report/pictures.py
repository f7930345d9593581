"""The main charts as PNGs for slides, 16:9, in the report's light colours.

Chinese texts need a Chinese font; where the machine has none, the pictures are in English.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, PercentFormatter

from echelon.report.charts import ALWAYS_SHOWN, agent_name, holdings_parts
from echelon.report.gather import RunData, SplitData
from echelon.report.headline import lead, rivals
from echelon.report.languages import file_name
from echelon.report.palette import LIGHT, colour_of
from echelon.report.tables import monthly_by_key
from echelon.report.texts import Words
from echelon.report.training import COLUMNS, Panel, training_panels

_SIZE = (12.8, 7.2)
_DPI = 150
_LINE = {"en": 150, "zh": 78}
"""Characters of a line below a title."""
_CHINESE = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei"),
    *("Noto Sans CJK JP", "Arial Unicode MS"),
)
_HEAT_LIMIT = 0.10
STYLE = {
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


@contextmanager
def house_style(words: Words) -> Iterator[Words]:
    """Draw in the report's style; gives the words to use, English where no font has Chinese."""
    fonts = ["DejaVu Sans"]
    if words.lang == "zh":
        known = {font.name for font in font_manager.fontManager.ttflist}
        chinese = [name for name in _CHINESE if name in known]
        fonts = chinese[:1] + fonts
        words = words if chinese else Words("en")
    with mpl.rc_context({"font.family": fonts} | STYLE):  # type: ignore[arg-type]
        yield words


def save_pictures(pictures: Mapping[str, Figure], directory: Path, lang: str) -> None:
    """Write each figure as NAME.png, or as its name is in `lang`; inside `house_style`."""
    for name, figure in pictures.items():
        figure.savefig(directory / file_name(name, "png", lang), dpi=_DPI)


def draw_pictures(run: RunData, words: Words, directory: Path) -> None:
    """Write equity.png, monthly.png, holdings.png and training.png."""
    with house_style(words) as said:
        pictures = {
            "equity": _equity(run, said),
            "monthly": _monthly(run, said),
            "holdings": _holdings(run, said),
            "training": _training(run, said),
        }
        save_pictures(pictures, directory, words.lang)


def new_figure(run: RunData, words: Words, title: str, below: str) -> Figure:
    """An empty picture of slide size below its title. below: text under the title"""
    lines = wrap(below, _LINE[words.lang])
    top = 0.905 - 0.026 * len(lines)
    figure = Figure(figsize=_SIZE, layout=ConstrainedLayoutEngine(rect=(0.01, 0.015, 0.98, top)))
    figure.text(0.018, 0.945, f"{run.name} · {title}", fontsize=17, fontweight="bold")
    said = "\n".join(lines)
    figure.text(0.018, 0.93, said, fontsize=10.5, color=LIGHT["soft"], va="top", linespacing=1.4)
    return figure


def span_text(split: SplitData, words: Words) -> str:
    """Which split, from when to when."""
    facts = split.facts
    span = words("span", first=facts["first"], last=facts["last"], bars=f"{facts['bars']:,}")
    return f"{words(f'split_{split.name}')} · {span}"


def _equity(run: RunData, words: Words) -> Figure:
    split = run.main
    figure = new_figure(run, words, words("equity"), lead(split, words, "sharpe_annual"))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    times = split.times
    shown = {*ALWAYS_SHOWN, *(r.key for r in rivals(split))}
    for record in split.baselines:
        if record.key in shown:
            line: dict[str, Any] = {"color": LIGHT[colour_of(record.key)], "linewidth": 1.5}
            line["linestyle"] = "--" if record.key == "benchmark" else "-"
            growth = split.whole(record.growth)
            top.plot(times, growth, label=words.name(record.key), **line)
            bottom.plot(times, -split.whole(_drawdown(record.tables.equity)), **line)
    several = len(split.agents) > 1
    thin = {"color": LIGHT["accent"], "alpha": 0.28, "linewidth": 0.9}
    for record in split.agents if several else ():
        top.plot(times, split.whole(record.growth), **thin)
        bottom.plot(times, -split.whole(_drawdown(record.tables.equity)), **thin)
    name = agent_name(split, words)
    top.plot(times, split.mean_growth, color=LIGHT["accent"], linewidth=2.8, label=name)
    bottom.plot(times, -split.mean_drawdown, color=LIGHT["accent"], linewidth=2.0)
    bottom.fill_between(times, -split.mean_drawdown, color=LIGHT["accent"], alpha=0.10, lw=0)
    handles, labels = top.get_legend_handles_labels()
    top.legend(handles[::-1], labels[::-1], loc="upper left", ncols=len(labels))
    top.set_ylabel(words("growth"))
    top.margins(x=0.005, y=0.12)
    bottom.set_ylabel(words("drawdown"))
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    date_axis(bottom)
    figure.text(
        0.982, 0.945, span_text(split, words), fontsize=10.5, color=LIGHT["soft"], ha="right"
    )
    return figure


def _drawdown(equity: Any) -> np.ndarray:  # noqa: ANN401 (a polars frame)
    return np.asarray(equity["drawdown"].to_numpy())


def _monthly(run: RunData, words: Words) -> Figure:
    split = run.main
    key, returns = next(iter(monthly_by_key(split).items()))
    who = words("mean_of_seeds") if key == "mean" else words.name(key)
    figure = new_figure(run, words, f"{words('monthly')} (%)", f"{who} · {span_text(split, words)}")
    axes = figure.subplots()
    scale = LinearSegmentedColormap.from_list("", [LIGHT["loss"], "#ffffff", LIGHT["gain"]])
    table = np.concatenate([returns.months, np.full((len(returns.years), 1), np.nan)], axis=1)
    axes.imshow(table, cmap=scale, vmin=-_HEAT_LIMIT, vmax=_HEAT_LIMIT, aspect="auto")
    size = 12.0 if len(returns.years) <= 12 else 9.0
    for row, total in enumerate(returns.totals):
        for month, value in enumerate(returns.months[row]):
            if np.isfinite(value):
                strong = abs(value) > 0.75 * _HEAT_LIMIT
                ink = "#ffffff" if strong else LIGHT["ink"]
                _write(axes, month, row, f"{value * 100:.1f}", size, ink)
        if np.isfinite(total):
            text = f"{total * 100:.1f} %"
            _write(axes, 12, row, text, size, LIGHT["ink"], fontweight="bold")
    axes.set_xticks(range(13), [*words("months").split(), words("year")])
    axes.set_yticks(range(len(returns.years)), [str(year) for year in returns.years])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_xticks(np.arange(-0.5, 13), minor=True)
    axes.set_yticks(np.arange(-0.5, len(returns.years)), minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(visible=False)
    axes.grid(which="minor", color="#ffffff", linewidth=3)
    axes.spines[:].set_visible(False)
    return figure


def _write(axes: Axes, x: int, y: int, text: str, size: float, ink: str, **more: Any) -> None:  # noqa: ANN401
    shown = "0.0" if text == "-0.0" else text.replace("-", "−")
    axes.text(x, y, shown, ha="center", va="center", fontsize=size, color=ink, **more)


def _holdings(run: RunData, words: Words) -> Figure:
    split = run.main
    record = split.median_agent
    who = words.name(record.key)
    if len(split.agents) > 1:
        who = words("median_seed", name=who)
    figure = new_figure(run, words, words("holdings"), f"{who} · {span_text(split, words)}")
    axes = figure.subplots()
    parts = holdings_parts(split, words)[record.key]
    axes.stackplot(
        split.times,
        [part.share for part in parts],
        labels=[part.name for part in parts],
        colors=[LIGHT[part.role] for part in parts],
        lw=0,
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    axes.set_ylabel(words("share"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    date_axis(axes)
    return figure


def _training(run: RunData, words: Words) -> Figure:
    several = len(run.logs) > 1
    note = words("training_note" if several else "training_note_one")
    figure = new_figure(run, words, words("training"), note)
    panels = training_panels(run, words)
    grid = figure.subplots(max(1, math.ceil(len(panels) / COLUMNS)), COLUMNS).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, several=several)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[max(0, len(panels) - COLUMNS) : len(panels)]:
        axes.set_xlabel(words("steps"))
    return figure


def _draw_panel(axes: Axes, panel: Panel, *, several: bool) -> None:
    accent = LIGHT["accent"]
    for curve in panel.curves:
        alpha, width = (0.3, 0.9) if several else (1.0, 1.6)
        axes.plot(curve.steps, curve.values, color=accent, alpha=alpha, linewidth=width)
    if several:
        axes.plot(panel.mean.steps, panel.mean.values, color=accent, linewidth=2.2)
    if panel.chosen:
        at = [point.step for point in panel.chosen], [point.value for point in panel.chosen]
        axes.plot(*at, "D", color=LIGHT["loss"], markersize=6.5, markeredgecolor="white", zorder=5)
    if panel.log:
        axes.set_yscale("log")
    else:
        # Whole numbers on the axis: "+1.234e2" above it is easily overlooked.
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_title(panel.title, loc="left", fontsize=12)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(axis="x", nbins=5)


def date_axis(axes: Axes) -> None:
    """Let the x axis show dates, short."""
    locator = AutoDateLocator(minticks=4, maxticks=9)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formats = ["%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M", "%S"]
    years = ["", "%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M"]
    shown = ConciseDateFormatter(locator, formats=formats, zero_formats=years, show_offset=False)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(shown)
