"""The HTML page of a run: its texts, tables and charts, a tab a split (see document.py)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from echelon.report import tables
from echelon.report.charts import books as charts
from echelon.report.charts.training import training_chart
from echelon.report.document import (
    book_names,
    card,
    chart,
    choice,
    document,
    folded,
    new_data,
    panes,
    part,
    two,
)
from echelon.report.execution_costs import worked_card
from echelon.report.gather import RunData, SplitData
from echelon.report.headline import lead
from echelon.report.hierarchy import hierarchy_cards, population_card
from echelon.report.languages import language_links
from echelon.report.other_runs import beside_card
from echelon.report.reference_policies import companions_card
from echelon.report.rules import idle_text, recorded_rules
from echelon.report.series import MEAN, shortest_period
from echelon.report.texts import Words
from echelon.report.trust import trust_card

_RANGES = ((1, "range_1m"), (3, "range_3m"), (6, "range_6m"), (12, "range_1y"), (36, "range_3y"))


STEM = "report"
"""Of the names of a page in all languages."""


def render(run: RunData, words: Words, command: str, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    data = new_data()
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
        f'<header class="top"><div><p class="eyebrow">Echelon · {escape(words("title"))}'
        f"{language_links(STEM, words.lang, written)}</p>"
        f"<h1>{escape(run.name)}</h1></div>"
        f'<nav role="tablist" aria-label="{escape(words("title"))}">{tabs}</nav></header>',
        f"<noscript><p class='notice'>{escape(words('no_script'))}</p></noscript>",
        *sections,
        card(words("training"), note, chart("training")),
        population_card(run, words, data),
        card(words("facts"), "", tables.facts_table(run, words, command) + _config(run, words)),
    ]
    return document(run.name, words, body, data)


def _split_section(run: RunData, split: SplitData, words: Words, data: dict[str, Any]) -> str:
    """Everything about one split; its charts go into `data`."""
    parts = [
        _summary(run, split, words),
        trust_card(run.path, split, words, data),
        equity_card(split, words, data),
        beside_card(run, split, words),
        companions_card(split, words),
        hierarchy_cards(run, split, words, data),
        measures_card(split, words),
        monthly_card(split, words),
        _holdings(split, words, data),
        _actions(split, words, data),
        _costs(run, split, words, data),
        worked_card(split, words),
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


def equity_card(
    split: SplitData, words: Words, data: dict[str, Any], fold_starts: Sequence[str] = ()
) -> str:
    """Growth and drawdown, with buttons for the span and the scale; its chart goes into `data`.

    fold_starts: days on which a new fold begins
    """
    key = f"{split.name}/equity"
    data["charts"][key] = charts.equity_chart(split, words, fold_starts)
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
    return card(words("equity"), note, chart(key), tools)


def measures_card(split: SplitData, words: Words) -> str:
    """Every measure of agents and baselines, and of each seed."""
    note = words("measures_note" if len(split.agents) > 1 else "measures_note_one")
    by_seed = ""
    if len(split.agents) > 1:
        by_seed = folded(words("by_seed"), tables.seeds_table(split, words))
    return card(words("measures"), note, tables.measures_table(split, words) + by_seed)


def monthly_card(split: SplitData, words: Words) -> str:
    """Heat maps of the monthly returns."""
    found = tables.monthly_tables(split, words)
    group = f"{split.name}/monthly"
    tools = choice(group, book_names(found, words), words)
    return card(words("monthly"), words("monthly_note"), panes(group, found), tools)


def _holdings(split: SplitData, words: Words, data: dict[str, Any]) -> str:
    key = f"{split.name}/holdings"
    figures = charts.holdings_charts(split, words)
    median = split.median_agent.key
    chosen = {median: figures[median]} | figures
    data["charts"][key] = chosen
    names = book_names(chosen, words, median=median if len(split.agents) > 1 else None)
    tools = choice(key, names, words)
    return card(words("holdings"), words("holdings_note"), chart(key), tools)


def _actions(split: SplitData, words: Words, data: dict[str, Any]) -> str:
    key = f"{split.name}/actions"
    figures = _mean_first(charts.actions_charts(split, words))
    data["charts"][key] = figures
    period = shortest_period(split.times, charts.MOST_BARS)
    note = words("actions_note", period=words(f"period_{period}"))
    if tables.is_targets(split.agents[0]):
        note += " " + words("actions_targets")
    return card(words("actions"), note, chart(key), choice(key, book_names(figures, words), words))


def _costs(run: RunData, split: SplitData, words: Words, data: dict[str, Any]) -> str:
    over, total = f"{split.name}/costs", f"{split.name}/costs-by-book"
    figures = _mean_first(charts.costs_over_time(split, words))
    data["charts"][over] = figures
    data["charts"][total] = charts.costs_by_book(split, words)
    both = two(
        part(words("costs_over_time"), chart(over)), part(words("costs_by_book"), chart(total))
    )
    note = words("costs_note" if split.facts["fees"] else "costs_free")
    idle = idle_text(recorded_rules(split.facts, run.config), words)
    if idle:
        note += " " + words("costs_idle", idle=idle)
    return card(words("costs"), note, both, choice(over, book_names(figures, words), words))


def _orders(split: SplitData, words: Words) -> str:
    html = tables.orders_table(split, words)
    note = words("rejected_note" if html else "rejected_none")
    return card(words("rejected"), note, html)


def _config(run: RunData, words: Words) -> str:
    return folded(words("config_folded"), f"<pre>{escape(run.config_text)}</pre>")


def _mean_first(figures: dict[str, Any]) -> dict[str, Any]:
    return {MEAN: figures[MEAN]} | figures if MEAN in figures else figures
