"""The HTML page: texts, tables and charts of a run, style and script inside, in one file.

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

from echelon.report import charts, tables
from echelon.report.figures import MEAN
from echelon.report.gather import RunData, SplitData
from echelon.report.headline import lead
from echelon.report.palette import DARK, LIGHT
from echelon.report.series import shortest_period
from echelon.report.texts import Words
from echelon.report.training import training_chart

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)
"""No connection of any kind; plotly.js draws and saves pictures through data: and blob: only."""
_RANGES = ((1, "range_1m"), (3, "range_3m"), (6, "range_6m"), (12, "range_1y"), (36, "range_3y"))


def render(run: RunData, words: Words, command: str) -> str:
    """The whole page."""
    data: dict[str, Any] = {"palette": {"light": dict(LIGHT), "dark": dict(DARK)}}
    data["charts"], data["arrays"] = {}, {}
    sections = [_split_section(run, split, words, data) for split in run.splits]
    data["charts"]["training"] = training_chart(run, words)
    tabs = "".join(
        f'<button role="tab" id="tab-{s.name}" aria-controls="split-{s.name}" '
        f'data-tab="split-{s.name}">{escape(words(f"split_{s.name}"))}'
        f"<small>{s.facts['first']} – {s.facts['last']}</small></button>"
        for s in run.splits
    )
    several = len(run.main.agents) > 1
    note = words("training_note" if several else "training_note_one")
    body = [
        f'<header class="top"><div><p class="eyebrow">Echelon · {escape(words("title"))}</p>'
        f"<h1>{escape(run.name)}</h1></div>"
        f'<nav role="tablist" aria-label="{escape(words("title"))}">{tabs}</nav></header>',
        f"<noscript><p class='notice'>{escape(words('no_script'))}</p></noscript>",
        *sections,
        _card(words("training"), note, _chart("training")),
        _card(words("facts"), "", tables.facts_table(run, words, command) + _config(run, words)),
        f"<footer>{escape(words('footer'))} {escape(words('past'))}</footer>",
    ]
    return _document(run, words, "\n".join(body), data)


def _document(run: RunData, words: Words, body: str, data: Mapping[str, Any]) -> str:
    here = files("echelon.report")
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    script = here.joinpath("script.js").read_text(encoding="utf-8")
    title = f"{run.name} · Echelon"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{"zh-CN" if words.lang == "zh" else "en"}">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_variables()}\n{style}</style></head>",
            f"<body><main>\n{body}\n</main>",
            f'<script type="application/json" id="report-data">{_json(data)}</script>',
            f'<script id="plotly">{get_plotlyjs()}</script>',
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


def _json(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _variables() -> str:
    """The palettes as CSS variables; paper is always light."""

    def block(palette: Mapping[str, str]) -> str:
        names = ("page", "card", "ink", "soft", "faint", "line", "accent", "gain", "loss")
        return "".join(f"--{name}:{palette[name]};" for name in names)

    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {block(DARK)} }} }}"
    paper = f"@media print {{ :root {{ {block(LIGHT)} }} }}"
    return f":root {{ {block(LIGHT)} }}\n{dark}\n{paper}"


def _split_section(run: RunData, split: SplitData, words: Words, data: dict[str, Any]) -> str:
    """Everything about one split; its charts go into `data`."""
    parts = [
        _summary(run, split, words),
        _equity(split, words, data),
        _measures(split, words),
        _monthly(split, words),
        _holdings(split, words, data),
        _actions(split, words, data),
        _costs(split, words, data),
        _orders(split, words),
    ]
    return (
        f'<section class="split" id="split-{split.name}" role="tabpanel" '
        f'aria-labelledby="tab-{split.name}">{"".join(parts)}</section>'
    )


def _summary(run: RunData, split: SplitData, words: Words) -> str:
    facts = split.facts
    span = words("span", first=facts["first"], last=facts["last"], bars=f"{facts['bars']:,}")
    leads = "".join(
        f"<p>{escape(lead(split, words, name))}</p>" for name in ("sharpe_annual", "total_return")
    )
    reads = int(facts["reads"])
    looked = words("reads_once") if reads == 1 else words("reads_many", n=reads)
    stale = ""
    if facts["run"] != run.facts:
        command = f"echelon evaluate {run.path} --split {split.name}"
        stale = f'<p class="notice">{escape(words("stale", command=command))}</p>'
    return (
        f'<div class="card summary"><p class="eyebrow">{escape(words(f"split_{split.name}"))} · '
        f'{escape(span)}</p><div class="lead">{leads}</div>{stale}{tables.cards(split, words)}'
        f'<p class="note">{escape(words(f"caution_{split.name}"))} {escape(looked)}</p></div>'
    )


def _equity(split: SplitData, words: Words, data: dict[str, Any]) -> str:
    key = f"{split.name}/equity"
    data["charts"][key], data["arrays"][split.name] = charts.equity_chart(split, words)
    note = words("equity_note" if len(split.agents) > 1 else "equity_note_one")
    period = shortest_period(split.times, charts.MOST_POINTS)
    if period != "bar":
        note += " " + words("thinned", period=words(f"period_{period}"))
    months = (split.times[-1] - split.times[0]).astype("timedelta64[D]").astype(int) / 30.4
    ranges = [
        f'<button data-range="{n}" data-for="{key}" aria-pressed="false">'
        f"{escape(words(t))}</button>"
        for n, t in _RANGES
        if n < months
    ]
    whole = (
        f'<button data-range="0" data-for="{key}" aria-pressed="true">'
        f"{escape(words('range_all'))}</button>"
    )
    scales = "".join(
        f'<button data-scale="{scale}" data-for="{key}" '
        f'aria-pressed="{"true" if scale == "linear" else "false"}">{escape(words(scale))}</button>'
        for scale in ("linear", "log")
    )
    tools = (
        f'<div class="buttons">{"".join(ranges)}{whole}</div><div class="buttons">{scales}</div>'
    )
    return _card(words("equity"), note, _chart(key), tools)


def _measures(split: SplitData, words: Words) -> str:
    note = words("measures_note" if len(split.agents) > 1 else "measures_note_one")
    folded = ""
    if len(split.agents) > 1:
        folded = _folded(words("by_seed"), tables.seeds_table(split, words))
    return _card(words("measures"), note, tables.measures_table(split, words) + folded)


def _monthly(split: SplitData, words: Words) -> str:
    found = tables.monthly_tables(split, words)
    group = f"{split.name}/monthly"
    first = next(iter(found))
    panes = "".join(
        f'<div data-pane="{group}" data-key="{escape(key)}"{"" if key == first else " hidden"}>'
        f"{html}</div>"
        for key, html in found.items()
    )
    return _card(words("monthly"), words("monthly_note"), panes, _choice(group, found, words))


def _holdings(split: SplitData, words: Words, data: dict[str, Any]) -> str:
    key = f"{split.name}/holdings"
    figures = charts.holdings_charts(split, words)
    median = split.median_agent.key
    chosen = {median: figures[median]} | figures
    data["charts"][key] = {"variants": chosen}
    tools = _choice(key, chosen, words, median=median if len(split.agents) > 1 else None)
    return _card(words("holdings"), words("holdings_note"), _chart(key), tools)


def _actions(split: SplitData, words: Words, data: dict[str, Any]) -> str:
    key = f"{split.name}/actions"
    figures = _mean_first(charts.actions_charts(split, words))
    data["charts"][key] = {"variants": figures}
    period = shortest_period(split.times, charts.MOST_BARS)
    note = words("actions_note", period=words(f"period_{period}"))
    if tables.is_targets(split.agents[0]):
        note += " " + words("actions_targets")
    return _card(words("actions"), note, _chart(key), _choice(key, figures, words))


def _costs(split: SplitData, words: Words, data: dict[str, Any]) -> str:
    over, total = f"{split.name}/costs", f"{split.name}/costs-by-book"
    figures = _mean_first(charts.costs_over_time(split, words))
    data["charts"][over] = {"variants": figures}
    data["charts"][total] = charts.costs_by_book(split, words)
    both = (
        f'<div class="two"><div><h3>{escape(words("costs_over_time"))}</h3>{_chart(over)}</div>'
        f"<div><h3>{escape(words('costs_by_book'))}</h3>{_chart(total)}</div></div>"
    )
    note = words("costs_note" if split.facts["fees"] else "costs_free")
    return _card(words("costs"), note, both, _choice(over, figures, words))


def _orders(split: SplitData, words: Words) -> str:
    html = tables.orders_table(split, words)
    note = words("rejected_note" if html else "rejected_none")
    return _card(words("rejected"), note, html)


def _config(run: RunData, words: Words) -> str:
    return _folded(words("config_folded"), f"<pre>{escape(run.config_text)}</pre>")


def _mean_first(figures: dict[str, Any]) -> dict[str, Any]:
    return {MEAN: figures[MEAN]} | figures if MEAN in figures else figures


def _choice(
    group: str, keys: Sequence[str] | Mapping[str, Any], words: Words, median: str | None = None
) -> str:
    """A list to choose a seed or baseline from; nothing where there is only one."""
    if len(keys) < 2:
        return ""
    names = {}
    for key in keys:
        name = words("mean_of_seeds") if key == MEAN else words.name(key)
        names[key] = words("median_seed", name=name) if key == median else name
    options = "".join(
        f'<option value="{escape(key)}">{escape(name)}</option>' for key, name in names.items()
    )
    return (
        f'<label class="choice">{escape(words("show"))} '
        f'<select data-choose="{group}" autocomplete="off">{options}</select></label>'
    )


def _chart(key: str) -> str:
    return f'<div class="chart" data-chart="{key}"></div>'


def _folded(title: str, html: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _card(title: str, note: str, html: str, tools: str = "") -> str:
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<div class="card"><div class="head"><h2>{escape(title)}</h2>'
        f'<div class="tools">{tools}</div></div>{said}{html}</div>'
    )
