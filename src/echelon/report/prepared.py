"""A picture of a prepared set: what the market did, who was there, what the agent will see."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echelon.features import Prepared
from echelon.files import write_atomic
from echelon.types import Floats

_COLOURS = {"train": "#4c72b0", "valid": "#dd8452", "test": "#55a868"}
_MAX_COLUMNS = 1000


def draw_prepared(prepared: Prepared, path: Path) -> None:
    """Draw `prepared` as a PNG at `path`."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 10), layout="constrained")
        top, middle, bottom = figure.subplots(3, 1, height_ratios=[3, 1, 4])
        _draw_growth(prepared, top)
        _draw_presence(prepared, middle)
        _draw_features(prepared, bottom)
        m = prepared.manifest
        figure.suptitle(
            f"{m['dataset']['name']}: {m['T']} bars × {m['N']} assets × {m['F']} features, "
            f"window {m['W']}",
            fontsize=12,
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    write_atomic(path, buffer.getvalue())


def _draw_growth(prepared: Prepared, axes: Axes) -> None:
    """Equal-weight growth of the assets present, and the benchmark."""
    times = prepared.times
    axes.semilogy(times, _growth(prepared), color="#333333", label="equal weight of those present")
    benchmark = prepared.array("benchmark")
    if benchmark is not None:
        known = np.flatnonzero(np.isfinite(benchmark))
        axes.semilogy(
            times[known], benchmark[known] / benchmark[known[0]], color="#c44e52", label="benchmark"
        )
    for name, split in prepared.splits.items():
        first, last = times[split.rows.start], times[split.rows.stop - 1]
        axes.axvspan(first, last, color=_COLOURS[name], alpha=0.12, label=name)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylabel("growth of 1 (log)")
    axes.legend(loc="upper left", ncols=5, frameon=False)


def _growth(prepared: Prepared) -> Floats:
    """[T] growth of 1 spread again over the present assets at every bar, before costs."""
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
    return np.asarray(np.cumprod(1 + gain))


def _draw_presence(prepared: Prepared, axes: Axes) -> None:
    """How many assets there are at each bar, by what can be done with them."""
    tradable = prepared.array("tradable")
    present = np.asarray(prepared.present)
    axes.fill_between(
        prepared.times, present.sum(axis=1), step="mid", color="#bbbbbb", label="present"
    )
    if tradable is not None:
        both = (present & tradable).sum(axis=1)
        axes.fill_between(prepared.times, both, step="mid", color="#4c72b0", label="tradable")
    axes.set_xlim(prepared.times[0], prepared.times[-1])
    axes.set_ylim(0, len(prepared.symbols) * 1.4)
    axes.set_ylabel("assets")
    axes.legend(loc="upper left", ncols=2, frameon=False)


def _draw_features(prepared: Prepared, axes: Axes) -> None:
    """Mean of each scaled feature over the assets present, through time.

    Ranks are not shown: their mean over assets is zero by construction.
    """
    shown = [k for k, name in enumerate(prepared.names) if not name.startswith("rank_")]
    step = max(1, len(prepared.times) // _MAX_COLUMNS)
    rows = slice(None, None, step)
    present = np.asarray(prepared.present[rows])
    total = np.asarray(prepared.x[rows])[:, :, shown].sum(axis=1)  # absent rows are zero
    mean = total / np.maximum(present.sum(axis=1), 1)[:, None]
    image = axes.imshow(
        np.clip(mean.T, -3, 3),
        aspect="auto",
        cmap="RdBu_r",
        vmin=-3,
        vmax=3,
        interpolation="nearest",
    )
    days = prepared.times[rows].astype("datetime64[D]")
    ticks = np.linspace(0, len(days) - 1, 9).astype(int)
    axes.set_xticks(ticks, [str(days[k]) for k in ticks])
    axes.set_yticks(range(len(shown)), [prepared.names[k] for k in shown], fontsize=6)
    axes.spines[:].set_visible(False)
    assert axes.figure is not None
    label = "mean over assets, in train standard deviations"
    axes.figure.colorbar(image, ax=axes, label=label, pad=0.01, aspect=30)
