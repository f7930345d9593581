"""The picture of a walk-forward: a line per fold, its train, validation and test windows in time.

The gaps that purge and embargo leave are a few bars wide, less than the edge of a bar in the
picture; the lines below the title say how wide they are.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from echelon.config.walkforward import WalkForwardConfig
from echelon.evaluation.folds import Fold
from echelon.files import write_atomic
from echelon.report.palette import LIGHT
from echelon.report.pictures import STYLE

_WIDTH = 12.8
_DPI = 150
_COLOURS = {"train": LIGHT["rest"], "valid": LIGHT["commission"], "test": LIGHT["accent"]}
_NAMES = {"train": "train", "valid": "validation", "test": "test"}
_MOST_LABELS = 40
"""Folds of which every one is named; of more, one in so many is."""


def draw_splits(name: str, folds: Sequence[Fold], config: WalkForwardConfig, path: Path) -> None:
    """Draw the windows of the folds as a PNG at `path`."""
    line = 0.34 if len(folds) <= _MOST_LABELS else 0.34 * _MOST_LABELS / len(folds)
    height = 2.3 + line * max(len(folds), 3)
    with mpl.rc_context({"font.family": ["DejaVu Sans"]} | STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(_WIDTH, height))
        axes = figure.add_axes((0.11, 0.55 / height, 0.86, 1 - 2.05 / height))
        title = f"{name} · {len(folds)} fold{'s' if len(folds) > 1 else ''}"
        figure.text(0.018, 1 - 0.42 / height, title, fontsize=17, fontweight="bold")
        figure.text(
            0.018,
            1 - 0.56 / height,
            "\n".join(wrap(_said(folds, config), 150)),
            fontsize=10.5,
            color=LIGHT["soft"],
            va="top",
            linespacing=1.4,
        )
        _draw(axes, folds)
        handles = [Patch(color=_COLOURS[k], label=_NAMES[k]) for k in _COLOURS]
        figure.legend(
            handles=handles, loc="lower right", ncols=3, bbox_to_anchor=(0.975, 1 - 1.5 / height)
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    write_atomic(path, buffer.getvalue())


def _said(folds: Sequence[Fold], config: WalkForwardConfig) -> str:
    """What the picture cannot show."""
    first, last = folds[0].test[0], folds[-1].test[1]
    train = "all before" if config.scheme == "expanding" else config.train
    lengths = f"{config.unit}s: {train} to train, {config.valid} to validate, {config.test} to test"
    text = (
        f"Tests from {first} to {last} · {config.scheme}, in {lengths} · each fold chooses its "
        "checkpoints on its validation window and is then tested on the window after it · dropped: "
        f"{_bars(config.purge_bars)} between train and validation, "
        f"{_bars(config.embargo_bars)} between validation and test"
    )
    if folds[-1].partial:
        text += f" · the last test window is partial: {folds[-1].bars.test} bars"
    return text


def _bars(n: int) -> str:
    return f"{n} bar{'' if n == 1 else 's'}" if n else "none"


def _draw(axes: Axes, folds: Sequence[Fold]) -> None:
    for y, fold in enumerate(folds):
        for window, colour in _COLOURS.items():
            first, last = getattr(fold, window)
            left, right = _number(first), _number(last + timedelta(days=1))
            axes.barh(y, right - left, left=left, height=0.66, color=colour, linewidth=0)
    step = -(-len(folds) // _MOST_LABELS)
    shown = range(0, len(folds), step)
    axes.set_yticks(list(shown), [folds[k].name for k in shown])
    for tick in axes.get_yticklabels():
        tick.set_color(LIGHT["ink"])
    axes.set_ylim(len(folds) - 0.4, -0.6)
    axes.set_xlim(_number(min(f.train[0] for f in folds)), _number(folds[-1].test[1]) + 20)
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=5, maxticks=20))  # type: ignore[no-untyped-call]
    long = (folds[-1].test[1] - folds[0].train[0]).days > 4 * 365
    axes.xaxis.set_major_formatter(DateFormatter("%Y" if long else "%Y-%m"))  # type: ignore[no-untyped-call]
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _number(day: date) -> float:
    return float(date2num(day))  # type: ignore[no-untyped-call]
