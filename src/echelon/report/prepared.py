"""A picture of a prepared set: what the market did, who was there, what the agent will see."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echelon.features import Prepared
from echelon.files import write_atomic
from echelon.report.charts.chart import DATES, Axis, Cells, Chart, Curve, Plot
from echelon.report.charts.slides import Slide, draw_slide

_WINDOWS = {"train": "gain", "valid": "loss", "test": "equal_weight"}


def draw_prepared(prepared: Prepared, path: Path) -> None:
    sizes = "{T} bars × {N} assets × {F} features, window {W}".format(**prepared.manifest)
    title = prepared.manifest["dataset"]["name"]
    plots = [_growth_plot(prepared), _presence_plot(prepared)]
    shown = [k for k, n in enumerate(prepared.names) if not n.startswith(("rank_", "zscore_"))]
    if shown:
        plots.append(_features_plot(prepared, shown))
    chart = Chart([[plot] for plot in plots], 0, (3, 1, 4)[: len(plots)])
    write_atomic(path, draw_slide(Slide(title, sizes, chart, height=10.0)))


def _growth_plot(prepared: Prepared) -> Plot:
    """Growth of 1 spread over the present assets at every bar, before costs, and the benchmark."""
    times = prepared.times
    total = np.array(prepared.close)
    factor = prepared.array("factor")
    if factor is not None:
        total = total * factor
    ratio = np.full_like(total, np.nan)
    ratio[1:] = total[1:] / total[:-1] - 1
    held = np.zeros_like(prepared.present)
    held[1:] = prepared.present[1:] & prepared.present[:-1]
    count = np.maximum(held.sum(axis=1), 1)
    gain = np.where(held & np.isfinite(ratio), ratio, 0.0).sum(axis=1) / count
    growth = np.asarray(np.cumprod(1 + gain))
    layers = [Curve(times, growth, role="soft", name="equal weight of those present")]
    for name, split in prepared.splits.items():
        rows = slice(split.rows.start, split.rows.stop)
        layers.append(Curve(times[rows], growth[rows], 2.4, role=_WINDOWS[name], name=name))
    benchmark = prepared.array("benchmark")
    if benchmark is not None:
        known = np.flatnonzero(np.isfinite(benchmark))
        level = benchmark[known] / benchmark[known[0]]
        layers.append(Curve(times[known], level, 1.2, role="benchmark", name="benchmark"))
    return Plot(layers, DATES, Axis("growth of 1 (log)", kind="log"), legend="inside")


def _presence_plot(prepared: Prepared) -> Plot:
    present, tradable = np.asarray(prepared.present), prepared.array("tradable")
    counts = {"present": present.sum(axis=1)}
    if tradable is not None:
        both = (present & tradable).sum(axis=1)
        counts = {"tradable": both, "present, not tradable": counts["present"] - both}
    layers = [
        Curve(prepared.times, n.astype(np.float64), fill="stack", name=name, role=role)
        for (name, n), role in zip(counts.items(), ("gain", "rest"), strict=False)
    ]
    y = Axis("assets", low=0, high=1.4 * len(prepared.symbols), ticks=4)
    return Plot(layers, DATES, y, legend="above")


def _features_plot(prepared: Prepared, shown: list[int]) -> Plot:
    """Mean of each scaled feature over the assets present; of ranks it is always zero."""
    rows = slice(None, None, max(1, len(prepared.times) // 1000))  # about as many columns
    present = np.asarray(prepared.present[rows])
    total = np.asarray(prepared.x[rows])[:, :, shown].sum(axis=1)  # absent rows are zero
    mean = total / np.maximum(present.sum(axis=1), 1)[:, None]
    months = [str(month) for month in prepared.times[rows].astype("datetime64[M]")]
    names = [prepared.names[k] for k in shown]
    x = Axis(kind="category", labels=months, ticks=8)
    y = Axis(kind="category", labels=names, ticks=len(names))
    title = "features: mean over assets, −3 (orange) to 3 (blue) train standard deviations"
    return Plot([Cells(mean.T, (), 3.0)], x, y, title)
