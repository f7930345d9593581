"""Charts of a walk-forward: its windows in time, and the Sharpe ratio of each fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from echelon.backtest.files import AGENT
from echelon.config.tree import WalkForwardConfig
from echelon.evaluation.folds import Fold
from echelon.files import write_atomic
from echelon.report.charts.chart import DATES, MOST_LABELS, Axis, Chart, Plot, Points, Spans
from echelon.report.charts.palette import colour_of
from echelon.report.charts.slides import Slide, draw_slide
from echelon.report.texts import Words
from echelon.report.walkforward.data import WalkData

_COLOURS = {"train": "rest", "valid": "commission", "test": "accent"}
_SYMBOLS = {"equal_weight": "diamond", "benchmark": "line-ew"}
_MOST_HIGH = 24
"""Folds that have a full line each; of more, lines are thinner."""


def windows_chart(folds: Sequence[Fold], words: Words) -> Chart:
    """A row per fold: its train, validation and test windows in time."""
    layers = []
    for window, role in _COLOURS.items():
        spans = [getattr(fold, window) for fold in folds]
        first, last = np.array(spans, dtype="datetime64[D]").T
        texts = [
            f"{fold.name}: {a} – {b} ({getattr(fold.bars, window):,})"
            for fold, (a, b) in zip(folds, spans, strict=True)
        ]
        stop = last + np.timedelta64(1, "D")
        layer = Spans(range(len(folds)), first, stop, name=words(f"split_{window}"), role=role)
        layers.append(replace(layer, texts=texts))
    high = 24 if len(folds) <= _MOST_HIGH else max(7, 24 * _MOST_HIGH // len(folds))
    rows = Axis(labels=[fold.name for fold in folds])
    plot = Plot(layers, DATES, rows)
    return Chart([[plot]], 88 + high * max(len(folds), 3), hover="closest")


def draw_splits(name: str, folds: Sequence[Fold], config: WalkForwardConfig, path: Path) -> None:
    """Draw the windows of the folds as a PNG at `path`.

    The gaps that purge and embargo leave are a few bars wide, less than the edge of a span in the
    picture; the lines below the title say how wide they are.
    """
    high = 0.34 if len(folds) <= MOST_LABELS else 0.34 * MOST_LABELS / len(folds)
    title = f"{name} · {len(folds)} fold{'s' if len(folds) > 1 else ''}"
    chart = windows_chart(folds, Words("en"))
    height = 2.3 + high * max(len(folds), 3)
    write_atomic(path, draw_slide(Slide(title, _windows_text(folds, config), chart, height=height)))


def _windows_text(folds: Sequence[Fold], config: WalkForwardConfig) -> str:
    """What the picture cannot show."""
    first, last = folds[0].test[0], folds[-1].test[1]
    train = "all before" if config.scheme == "expanding" else config.train
    lengths = f"{config.unit}s: {train} to train, {config.valid} to validate, {config.test} to test"
    text = (
        f"Tests from {first} to {last} · {config.scheme}, in {lengths} · each fold chooses its "
        "checkpoints on its validation window and is then tested on the window after it · dropped: "
        f"{_bars_text(config.purge_bars)} between train and validation, "
        f"{_bars_text(config.embargo_bars)} between validation and test"
    )
    if folds[-1].partial:
        text += f" · the last test window is partial: {folds[-1].bars.test} bars"
    return text


def _bars_text(n: int) -> str:
    return f"{n} bar{'' if n == 1 else 's'}" if n else "none"


def sharpe_chart(walk: WalkData, baselines: Sequence[str], words: Words) -> Chart:
    """Sharpe ratio of every fold: the agents' mean ± std, and baselines."""
    folds = [fold.name for fold in walk.folds]
    name = "sharpe_annual"
    layers = []
    for who in (*baselines, AGENT):
        values = [walk.values(fold, who) for fold in folds]
        mean, std = (
            np.array([math.nan if v is None else v[f"{name}{end}"] for v in values])
            for end in ("", "_std")
        )
        points = Points(folds, mean, along="y", hover=".2f")
        if who == AGENT:
            low, high = mean - np.nan_to_num(std), mean + np.nan_to_num(std)
            points = replace(points, name=words("agent"), lead=True, low=low, high=high, size=10.0)
        else:
            symbol = _SYMBOLS.get(who, "circle-open")
            points = replace(points, name=words.name(who), role=colour_of(who), symbol=symbol)
        layers.append(points)
    x = Axis(kind="category", labels=folds)
    return Chart([[Plot(layers, x, Axis(words.measure(name)))]], 300)
