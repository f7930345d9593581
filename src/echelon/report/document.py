"""The frame of every interactive page: style, script and data inside, in one file; and its parts.

Nothing is loaded from anywhere: plotly.js is written into the page, and the page's own security
policy forbids the browser every connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from echelon.report.charts.chart import Chart
from echelon.report.charts.interactive import PlotlyTree, page_chart
from echelon.report.charts.palette import DARK, LIGHT, css_variables
from echelon.report.series import MEAN
from echelon.report.texts import Words

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)
"""No connection of any kind; plotly.js draws and saves pictures through data: and blob: only."""


def new_data() -> dict[str, Any]:
    """What the script of a page reads: palettes, and charts, which come later.

    A chart is a `Chart`, or several by key, of which the one chosen in `choice` is seen.
    """
    return {"palette": {"light": dict(LIGHT), "dark": dict(DARK)}, "charts": {}}


def document(title: str, words: Words, body: Sequence[str], data: Mapping[str, Any]) -> str:
    """The whole page. body: parts of its HTML"""
    here = files("echelon.report")
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    script = here.joinpath("script.js").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{"zh-CN" if words.lang == "zh" else "en"}">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} · Echelon</title>",
            f"<style>\n{css_variables()}\n{style}</style></head>",
            "<body><main>",
            *body,
            f"<footer>{escape(words('footer'))} {escape(words('past'))}</footer>",
            "</main>",
            f'<script type="application/json" id="report-data">{_json(data)}</script>',
            f'<script id="plotly">{get_plotlyjs()}</script>',
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


def _json(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    drawn = dict(data) | {"charts": {key: _tree(chart) for key, chart in data["charts"].items()}}
    text = json.dumps(drawn, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _tree(chart: Chart | Mapping[str, Chart]) -> PlotlyTree:
    if isinstance(chart, Chart):
        return page_chart(chart)
    return {"variants": {key: page_chart(variant) for key, variant in chart.items()}}


def card(title: str, note: str, html: str, tools: str = "") -> str:
    """A titled box. note: plain text below the title; tools: HTML beside it"""
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<div class="card"><div class="head"><h2>{escape(title)}</h2>'
        f'<div class="tools">{tools}</div></div>{said}{html}</div>'
    )


def chart(key: str) -> str:
    """Room for a chart of the page's data."""
    return f'<div class="chart" data-chart="{key}"></div>'


def folded(title: str, html: str) -> str:
    """HTML that a click on its title shows."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def part(title: str, html: str) -> str:
    """HTML below a small title, as part of a card."""
    return f"<div><h3>{escape(title)}</h3>{html}</div>"


def two(left: str, right: str) -> str:
    """Two parts side by side, where there is room."""
    return f'<div class="two">{left}{right}</div>'


def panes(group: str, found: Mapping[str, str]) -> str:
    """HTML by key, of which the one chosen in `choice` is seen; at first the first."""
    first = next(iter(found))
    return "".join(
        f'<div data-pane="{group}" data-key="{escape(key)}"{"" if key == first else " hidden"}>'
        f"{html}</div>"
        for key, html in found.items()
    )


def choice(group: str, names: Mapping[str, str], words: Words) -> str:
    """A list to choose one of several from, key → name; nothing where there is only one."""
    if len(names) < 2:
        return ""
    options = "".join(
        f'<option value="{escape(key)}">{escape(name)}</option>' for key, name in names.items()
    )
    return (
        f'<label class="choice">{escape(words("show"))} '
        f'<select data-choose="{group}" autocomplete="off">{options}</select></label>'
    )


def book_names(
    keys: Sequence[str] | Mapping[str, Any], words: Words, median: str | None = None
) -> dict[str, str]:
    """Key of an agent, a baseline or their mean → its name. median: the median agent"""
    names = {}
    for key in keys:
        name = words("mean_of_seeds") if key == MEAN else words.name(key)
        names[key] = words("median_seed", name=name) if key == median else name
    return names
