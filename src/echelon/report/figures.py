"""What all interactive charts share: the plain trees plotly.js draws, their axes and legends.

A figure is `{"data": […], "layout": {…}}`. Two kinds of node stand for something the page fills
in (see script.js):

    {"$": "accent"}    a colour of the palette, by role: light or dark as the reader's screen is
    {"#": "times"}     an array of the split, written into the page once and used by many traces
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.types import Floats, Times

Figure = dict[str, Any]

MEAN = "mean"
"""Key of what is a mean over seeds."""

_FONT = (
    '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", "PingFang SC", "Microsoft YaHei", '
    '"Noto Sans CJK SC", Arial, sans-serif'
)
DATES = [
    {"dtickrange": [None, 43_200_000], "value": "%m-%d %H:%M"},
    {"dtickrange": [86_400_000, 2_592_000_000], "value": "%Y-%m-%d"},
    {"dtickrange": ["M1", "M6"], "value": "%Y-%m"},
    {"dtickrange": ["M12", None], "value": "%Y"},
]


def colour(role: str) -> dict[str, str]:
    """A colour of the palette."""
    return {"$": role}


def array(name: str) -> dict[str, str]:
    """An array of the page."""
    return {"#": name}


def numbers(values: Floats) -> list[float | None]:
    """As JSON has them, to six significant digits; what is not finite is null."""
    shown = np.asarray(values, dtype=np.float64)
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in shown.tolist()]


def stamps(times: Times) -> list[str]:
    """Days, or minutes where the bars are shorter."""
    whole = (times == times.astype("datetime64[D]")).all()
    unit = "D" if whole or len(np.unique(times.astype("datetime64[D]"))) == len(times) else "m"
    return [str(t).replace("T", " ") for t in times.astype(f"datetime64[{unit}]")]


def make_layout(**parts: Any) -> Figure:  # noqa: ANN401 (plotly's tree)
    """A layout of `parts`, in the report's font and colours."""
    return {
        "font": {"family": _FONT, "size": 12, "color": colour("soft")},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {
            "bgcolor": colour("card"),
            "bordercolor": colour("line"),
            "font": {"color": colour("ink")},
        },
        "dragmode": "zoom",
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": colour("faint"),
            "activecolor": colour("accent"),
        },
    } | parts


def axis(**parts: Any) -> Figure:  # noqa: ANN401 (plotly's tree)
    """An axis of `parts`, quiet."""
    return {
        "gridcolor": colour("line"),
        "linecolor": colour("line"),
        "zerolinecolor": colour("line"),
        "zerolinewidth": 1,
        "tickfont": {"size": 11, "color": colour("faint")},
        "fixedrange": False,
    } | parts


def axis_title(text: str) -> Figure:
    """The title of an axis."""
    return {"text": text, "font": {"size": 11, "color": colour("faint")}, "standoff": 8}


def panel_title(text: str, suffix: str) -> Figure:
    """The title of one of several panels, above its left end. suffix: of its axes, "" or "2" …"""
    return {
        "text": text,
        "xref": f"x{suffix} domain",
        "yref": f"y{suffix} domain",
        "x": 0,
        "y": 1.02,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 13, "color": colour("ink")},
    }


def legend_above() -> Figure:
    """A legend in a row above the chart."""
    return {
        "orientation": "h",
        "traceorder": "normal",
        "x": 0,
        "y": 1.02,
        "yanchor": "bottom",
        "font": {"size": 12, "color": colour("soft")},
    }
