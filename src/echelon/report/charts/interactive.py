"""Draw a chart on a page: the plain tree that plotly.js draws.

A tree is `{"data": […], "layout": {…}, "arrays": {…}}`. Two kinds of node stand for something that
script.js fills in:

    {"$": "accent"}    a colour of the palette, by role: light or dark as the reader's screen is
    {"#": "x0"}        one of the tree's arrays, which several traces use
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from echelon.report.charts.chart import (
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
from echelon.types import Floats

PlotlyTree = dict[str, Any]

_FORMS: dict[str, PlotlyTree] = {
    "": {},
    "percent": {"tickformat": ".0%"},
    "steps": {"tickformat": "~s", "hoverformat": ","},
    "integer": {"hoverformat": ",d"},
}


def page_chart(chart: Chart) -> PlotlyTree:
    data: list[PlotlyTree] = []
    layout = _layout(chart)
    for k, (plot, width, height) in enumerate(_boxes(chart)):
        own = "" if k == 0 else str(k + 1)
        x = "" if chart.shared else own
        place = {"xaxis": f"x{x}", "yaxis": f"y{own}"}
        unit = _unit(plot)
        for layer in plot.layers:
            if isinstance(layer, RefLine) and not layer.name:
                layout["shapes"].append(_shape(layer, f"x{x}", f"y{own}"))
            else:
                data.append(_trace(layer, plot, chart, unit) | place)
        layout[f"yaxis{own}"] = _axis(plot.y) | {"domain": height, "anchor": f"x{x}"}
        if plot.y.kind == "category":
            layout[f"yaxis{own}"]["autorange"] = "reversed"
        # Of plots that share their x axis the lowest, which comes last, has it.
        layout[f"xaxis{x}"] = _axis(plot.x) | {"domain": width, "anchor": f"y{own}"}
        if plot.x.kind == "date":
            layout[f"xaxis{x}"] |= _dates([trace for trace in data if trace["xaxis"] == f"x{x}"])
        if plot.title:
            ends = {"xref": f"x{x} domain", "yref": f"y{own} domain"}
            layout["annotations"].append({"text": plot.title} | ends | {"x": 0, "y": 1.02})
    return {"data": data, "layout": layout, "arrays": _share(data)}


def _layout(chart: Chart) -> PlotlyTree:
    """What charts differ in; script.js has what they share."""
    titled = 22 * any(plot.title for plot in chart.plots)  # pixels
    top = titled + (44 if chart.legend == "above" else 14)
    bottom = 44 if any(plot.x.title for plot in chart.plots) else 30
    legend: PlotlyTree = {"traceorder": "reversed", "x": 1.01, "y": 1}
    if chart.legend != "right":
        y = 1.02 + titled / (chart.height - top - bottom)
        legend = {"orientation": "h", "traceorder": "normal", "x": 0, "y": y, "yanchor": "bottom"}
    spans = any(isinstance(layer, Spans) for plot in chart.plots for layer in plot.layers)
    return {
        "height": chart.height,
        "hovermode": chart.hover,
        "showlegend": chart.legend != "none",
        "legend": legend,
        "margin": {"l": 60, "r": 16, "t": top, "b": bottom},
        "barmode": "overlay" if spans else "stack",
        "shapes": [],
        "annotations": [],
    }


def _boxes(chart: Chart) -> Iterator[tuple[Plot, list[float], list[float]]]:
    """Every plot with its part of the width and of the height, both as shares."""
    ratios = list(chart.ratios) or [1.0] * len(chart.rows)
    gap = (26 if chart.shared else 66) / (chart.height - 100)
    share = (1.0 - gap * (len(ratios) - 1)) / sum(ratios)
    top = 1.0
    for row, ratio in zip(chart.rows, ratios, strict=True):
        wide = (1.0 - 0.06 * (len(row) - 1)) / len(row)
        low = max(0.0, top - ratio * share)
        for k, plot in enumerate(row):
            left = k * (wide + 0.06)
            if plot is not None:
                yield plot, [round(left, 4), round(left + wide, 4)], [round(low, 4), round(top, 4)]
        top = low - gap


def _axis(axis: Axis) -> PlotlyTree:
    tree: PlotlyTree = {"type": axis.kind} | _FORMS[axis.form]
    if axis.title and not axis.bare:
        tree["title"] = {"text": axis.title}
    if axis.ticks:
        tree["nticks"] = axis.ticks
    if axis.low is not None and axis.high is not None:
        tree["range"] = [axis.low, axis.high]
    elif axis.low is not None:
        tree["rangemode"] = "tozero"
    if axis.labels or axis.bare:
        tree |= {"automargin": True, "showgrid": False, "zeroline": False}
    if axis.bare:
        middle = ((axis.low or 0.0) + (axis.high or 0.0)) / 2
        tree |= {"tickvals": [middle], "ticktext": [axis.title], "fixedrange": True}
    elif axis.labels and axis.kind != "category":
        n = len(axis.labels)
        step = -(-n // MOST_LABELS)
        tree |= {"tickvals": list(range(0, n, step)), "ticktext": list(axis.labels[::step])}
        tree |= {"range": [n - 0.4, -0.6], "tickfont": {"size": 12, "color": _colour("ink")}}
    return tree


def _dates(traces: list[PlotlyTree]) -> PlotlyTree:
    """What an axis of dates has besides: points do not widen it, hours show where there are."""
    lines = [trace["x"] for trace in traces if trace.get("mode") == "lines" and trace["x"]]
    hours = any(len(x[0]) > len("2020-01-02") for x in lines)
    tree: PlotlyTree = {"hoverformat": "%Y-%m-%d %H:%M" if hours else "%Y-%m-%d"}
    if lines and any(trace.get("mode") == "markers" for trace in traces):
        tree["range"] = [min(x[0] for x in lines), max(x[-1] for x in lines)]
    return tree


def _shape(rule: RefLine, x: str, y: str) -> PlotlyTree:
    """A rule without a name: it takes no part in the legend and in the range of its axis."""
    across = "y" if rule.axis == "x" else "x"
    colour, end = _colour(rule.role), rule.at if rule.until is None else rule.until
    shape: PlotlyTree = {"layer": "above", "xref": x, "yref": y, f"{across}0": 0, f"{across}1": 1}
    shape |= {f"{rule.axis}0": rule.at, f"{rule.axis}1": end}
    shape[f"{across}ref"] += " domain"
    if rule.until is not None:
        shape |= {"type": "rect", "layer": "below", "fillcolor": colour, "opacity": 0.07}
        return shape | {"line": {"width": 0}}
    return shape | {"type": "line", "line": _stroke(rule)}


def _trace(layer: Layer, plot: Plot, chart: Chart, unit: str) -> PlotlyTree:
    trace: PlotlyTree = {"name": layer.name, "showlegend": layer.listed and bool(layer.name)}
    if layer.group:
        trace["legendgroup"] = layer.group
    if layer.lead:
        trace["legendrank"] = 1
    match layer:
        case Curve():
            return trace | _line(layer, unit) | _hover(layer, chart, "y")
        case Points():
            return trace | _points(layer, unit) | _hover(layer, chart, layer.along)
        case BarStack():
            return trace | _bars(layer, unit) | _hover(layer, chart, "x" if layer.across else "y")
        case Spans():
            return trace | _spans(layer) | _hover(layer, chart, "y")
        case Cells():
            return trace | _cells(layer, plot)
        case RefLine():
            x = next(layer.x for layer in plot.layers if isinstance(layer, Curve))
            ends, y = _places(x, unit)[:: max(1, len(x) - 1)], [layer.at, layer.at]
            trace |= {"type": "scatter", "mode": "lines", "x": ends, "y": y[: len(ends)]}
            return trace | {"line": _stroke(layer), "hoverinfo": "skip"}
    raise TypeError(f"a page cannot draw {layer!r}")


def _hover(layer: Layer, chart: Chart, value: str) -> PlotlyTree:
    if layer.texts:
        return {"hovertext": list(layer.texts), "hovertemplate": "%{hovertext}<extra></extra>"}
    if not layer.hover:
        return {"hoverinfo": "skip"}
    shown = f"%{{{value}:{layer.hover}}}"
    if chart.hover == "closest":
        shown = f"{layer.label or layer.name}<br>%{{x}}<br>{shown}<extra></extra>"
    return {"hovertemplate": shown}


def _line(layer: Curve, unit: str) -> PlotlyTree:
    line = _stroke(layer) | {"shape": "hvh" if layer.step else "linear"}
    trace: PlotlyTree = {
        "type": "scatter",
        "mode": "lines+markers" if layer.marked else "lines",
        "x": _places(layer.x, unit),
        "y": _numbers(layer.y),
        "line": line,
    }
    if layer.fill == "zero":
        trace |= {"fill": "tozeroy", "fillcolor": _colour("accent_area")}
    elif layer.fill == "stack":
        line |= {"color": _colour("card"), "width": 0.4}
        trace |= {"stackgroup": "stack", "fillcolor": _colour(layer.role)}
    if not layer.shown:
        trace["visible"] = "legendonly"
    return trace


def _points(layer: Points, unit: str) -> PlotlyTree:
    colour = _colours(layer.role, layer.roles)
    drawn = layer.symbol.startswith("line") or layer.symbol.endswith("-open")
    size = layer.size if isinstance(layer.size, int | float) else _numbers(layer.size)
    trace: PlotlyTree = {
        "type": "scatter",
        "mode": "markers",
        "x": _places(layer.x, unit),
        "y": _numbers(layer.y),
        "cliponaxis": False,
        "marker": {
            "symbol": layer.symbol,
            "size": size,
            "sizemin": 2,
            "color": colour,
            "opacity": layer.opacity,
            "line": {"width": 2 if drawn else 1, "color": colour if drawn else _colour("card")},
        },
    }
    if layer.opacity < 1.0:
        trace["marker"]["line"]["width"] = 0
    if layer.labels:
        below = layer.below or [False] * len(layer.labels)
        trace |= {
            "mode": "markers+text",
            "text": list(layer.labels),
            "textposition": ["bottom center" if low else "top center" for low in below],
            "textfont": {"size": 12, "color": _colour("ink")},
        }
    if layer.low is not None and layer.high is not None:
        values = layer.x if layer.along == "x" else layer.y
        interval = _interval(values, layer.low, layer.high)
        trace[f"error_{layer.along}"] = interval | {"color": colour, "width": 0}
    if layer.at_foot:
        trace["visible"] = "legendonly"
    return trace


def _bars(layer: BarStack, unit: str) -> PlotlyTree:
    places = _places(layer.at, unit)
    trace: PlotlyTree = {
        "type": "bar",
        "x": places,
        "y": _numbers(layer.values),
        "marker": {"color": _colours(layer.role, layer.roles), "line": {"width": 0}},
    }
    if layer.across:
        trace |= {"orientation": "h", "y": places, "x": trace["y"], "width": 0.6}
    if layer.low is not None and layer.high is not None:
        interval = _interval(layer.values, layer.low, layer.high)
        interval |= {"color": _colour("soft"), "thickness": 1.4, "width": 4}
        trace["error_x" if layer.across else "error_y"] = interval
        trace["marker"]["opacity"] = 0.85
    return trace


def _spans(layer: Spans) -> PlotlyTree:
    """Bars as wide as the spans are long; without any, the name keeps its place in the legend."""
    first, stop = (times.astype("datetime64[ms]") for times in (layer.first, layer.stop))
    middle = first + (stop - first) // 2
    return {
        "type": "bar",
        "x": [str(time).replace("T", " ") for time in middle] or [None],
        "y": [layer.thickness] * len(middle) or [None],
        "base": [row - layer.thickness / 2 for row in layer.rows] or [None],
        "width": (stop - first).astype(np.int64).tolist() or [0],
        "marker": {"color": _colour(layer.role), "line": {"width": 0}},
    }


def _cells(layer: Cells, plot: Plot) -> PlotlyTree:
    limit = layer.limit
    return {
        "type": "heatmap",
        "x": list(plot.x.labels),
        "y": list(plot.y.labels),
        "z": [_numbers(row) for row in layer.values],
        "text": [list(row) for row in layer.written],
        "texttemplate": "%{text}",
        "zmin": -limit,
        "zmax": limit,
        "colorscale": [[0, _colour("loss")], [0.5, _colour("card")], [1, _colour("gain")]],
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "tickvals": [-limit, 0, limit]},
        "hovertemplate": "%{y} · %{x}: %{z:.3f}<extra></extra>",
    }


def _interval(values: Any, low: Floats, high: Floats) -> PlotlyTree:  # noqa: ANN401 (places)
    centre = np.asarray(values, dtype=np.float64)
    return {
        "type": "data",
        "symmetric": False,
        "array": _numbers(high - centre),
        "arrayminus": _numbers(centre - low),
        "thickness": 2,
    }


def _share(data: list[PlotlyTree]) -> dict[str, list[Any]]:
    users: dict[tuple[Any, ...], list[PlotlyTree]] = {}
    for trace in data:
        users.setdefault(tuple(trace["x"]), []).append(trace)
    arrays: dict[str, list[Any]] = {}
    for values, traces in users.items():
        if len(traces) > 1 and len(values) > 2:
            name = f"x{len(arrays)}"
            arrays[name] = list(values)
            for trace in traces:
                trace["x"] = {"#": name}
    return arrays


def _stroke(layer: Curve | RefLine) -> PlotlyTree:
    return {"color": _colour(layer.role), "width": layer.width, "dash": layer.dash}


def _colour(role: str) -> dict[str, str]:
    return {"$": role}


def _colours(role: str, roles: Any) -> Any:  # noqa: ANN401 (one colour, or a list of them)
    return [_colour(own) for own in roles] if roles else _colour(role)


def _numbers(values: ArrayLike) -> list[float | None]:
    """As JSON has them, to six significant digits; what is not finite is null."""
    shown = np.asarray(values, dtype=np.float64)
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in shown.tolist()]


def _places(values: Places, unit: str = "D") -> list[Any]:
    """Numbers or names as they are; times by day or minute."""
    places = np.asarray(values)
    if places.dtype.kind == "M":
        return [str(time).replace("T", " ") for time in places.astype(f"datetime64[{unit}]")]
    return places.tolist() if places.dtype.kind in "iU" else _numbers(places)


def _unit(plot: Plot) -> str:
    """What times are shown by: days, or minutes where bars are shorter."""
    every = [np.asarray(layer.x) for layer in plot.layers if isinstance(layer, Curve)]
    every += [np.asarray(layer.at) for layer in plot.layers if isinstance(layer, BarStack)]
    for times in (x for x in every if x.dtype.kind == "M"):
        days = times.astype("datetime64[D]")
        if not (times == days).all() and len(np.unique(days)) < len(times):
            return "m"
    return "D"
