"""Charts: every kind of layer is drawn on a page and on a slide, from the one definition."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest

from echelon.report.charts.books import _names_held
from echelon.report.charts.chart import (
    DATES,
    LIGHT,
    Axis,
    BarStack,
    Cells,
    Chart,
    Curve,
    Plot,
    Points,
    RefLine,
    Spans,
)
from echelon.report.charts.interactive import page_chart
from echelon.report.charts.slides import Slide, draw_slide
from echelon.report.texts import Words

DAYS = np.datetime64("2020-01-01") + np.arange(5).astype("timedelta64[D]")
RISING = np.arange(5.0)
NAMES = Axis(kind="category", labels=["a", "b"])
PLOTS = {
    "curves": Plot(
        [
            Curve(DAYS, RISING, name="x", fill="zero"),
            Curve(DAYS, RISING + 1.0, name="hidden", shown=False, dash="dot"),
            Points(DAYS[1:3], RISING[1:3], "circle-open", name="marks", texts=["one", "two"]),
            Points(DAYS[:1], RISING[:1], "line-ns-open", at_foot=True, name="cuts"),
            RefLine(1.0, name="threshold", role="loss"),
            RefLine("2020-01-03", "x", "dot", role="faint"),
        ]
    ),
    "stacks": Plot([Curve(DAYS, RISING, fill="stack", name=n) for n in "ab"], legend="inside"),
    "bars": Plot([BarStack(DAYS, RISING, name=n, low=RISING - 1, high=RISING) for n in "ab"]),
    "lying bars": Plot(
        [BarStack([0, 1], np.array([1.0, -2.0]), across=True, roles=["gain", "loss"], name="n")],
        Axis("value"),
        Axis(labels=["a", "b"], strong=[0], columns=[("head", ["1", "2"])]),
    ),
    "points": Plot(
        [
            RefLine(0.5, "x", until=1.5, role="benchmark"),
            Points(
                [0.0, 2.0],
                [0, 1],
                size=np.array([4.0, 9.0]),
                labels=["p", "q"],
                below=[True, False],
                low=np.array([-1.0, 1.0]),
                high=np.array([1.0, 3.0]),
            ),
        ],
        Axis(form="integer", low=-2, high=4),
    ),
    "spans": Plot(
        [Spans([0, 1], DAYS[:2], DAYS[2:4], name="s"), Spans([], DAYS[:0], DAYS[:0], name="t")],
        DATES,
        Axis(labels=["a", "b"]),
    ),
    "cells": Plot([Cells(np.array([[1.0, np.nan], [-1.0, 0.0]]), [["1", "t"]] * 2)], NAMES, NAMES),
    "categories": Plot([Curve(["b", "a"], [1.0, 100.0], marked=True)], NAMES, Axis(kind="log")),
    "band": Plot([Spans([0.5], DAYS[:1], DAYS[4:], 1.0)], y=Axis("b", low=0, high=1, bare=True)),
}


def resolved(node: object, arrays: dict[str, list[object]]) -> object:
    """What script.js does with a tree."""
    if isinstance(node, list):
        return [resolved(part, arrays) for part in node]
    if not isinstance(node, dict):
        return node
    if "$" in node:
        return LIGHT[node["$"]]
    if "#" in node:
        return arrays[node["#"]]
    return {name: resolved(part, arrays) for name, part in node.items()}


@pytest.mark.parametrize("name", PLOTS)
def test_every_layer_is_drawn_on_a_page_and_on_a_slide(name: str) -> None:
    chart = Chart([[PLOTS[name]]], 300)
    tree = page_chart(chart)
    figure = go.Figure(resolved({k: tree[k] for k in ("data", "layout")}, tree["arrays"]))
    assert len(figure.data) > 0  # plotly refuses unknown properties and values
    assert draw_slide(Slide(name, "below", chart, "right")).startswith(b"\x89PNG")


def test_x_of_several_layers_is_written_once() -> None:
    tree = page_chart(Chart([[PLOTS["stacks"]]], 300))
    assert [trace["x"] for trace in tree["data"]] == [{"#": "x0"}, {"#": "x0"}]
    assert tree["arrays"] == {"x0": [str(day) for day in DAYS]}


def test_plots_below_one_another_share_their_axis_and_fill_the_height() -> None:
    rows = [[PLOTS["curves"]], [PLOTS["band"]]]
    layout = page_chart(Chart(rows, 500, (3, 1), shared=True))["layout"]
    assert "xaxis2" not in layout
    assert layout["xaxis"]["anchor"] == "y2"
    assert layout["xaxis"]["range"] == ["2020-01-01", "2020-01-05"]
    upper, lower = layout["yaxis"]["domain"], layout["yaxis2"]["domain"]
    assert (upper[1], lower[0]) == (1.0, 0.0)
    assert upper[1] - upper[0] == pytest.approx(3 * (lower[1] - lower[0]), rel=1e-2)


def test_bars_before_the_first_point_of_a_curve_stay_in_sight() -> None:
    bars, curve = Plot([BarStack(DAYS, RISING)]), Plot([Curve(DAYS[3:], RISING[3:])])
    layout = page_chart(Chart([[bars], [curve]], 300, shared=True))["layout"]
    assert "range" not in layout["xaxis"]


def test_minutes_show_where_bars_are_shorter_than_days() -> None:
    minutes = np.datetime64("2020-01-01T09:30") + np.arange(3).astype("timedelta64[m]")
    layers = [Curve(minutes, RISING[:3]), Points(minutes[1:2], RISING[1:2])]
    _, point = page_chart(Chart([[Plot(layers)]], 300))["data"]
    assert point["x"] == ["2020-01-01 09:31"]


def test_names_of_a_wide_book_are_counted_and_as_if_equally_large() -> None:
    weights = np.array([[0.5, 0.5, 0.0], [0.8, 0.1, 0.1], [0.0, 0.0, 0.0], [0.9, 5e-5, 0.0]])
    plot = _names_held(np.arange(4).astype("datetime64[D]"), weights, Words("en"))
    held, equal = (layer.y for layer in plot.layers if isinstance(layer, Curve))
    assert list(held) == [2, 3, 0, 1]
    assert list(equal) == pytest.approx([2.0, 1.0 / 0.66, 0.0, 1.0], abs=1e-3)
