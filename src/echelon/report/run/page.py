"""The page of a run: its texts, tables and charts, a tab a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.report.blocks import (
    Block,
    Body,
    Buttons,
    Card,
    ChartBox,
    Choice,
    Folded,
    Lead,
    Page,
    Panes,
    Part,
    Section,
    Source,
    Summary,
    Tab,
    Text,
    Two,
)
from echelon.report.charts import books as charts
from echelon.report.charts.chart import Chart
from echelon.report.charts.training import training_chart
from echelon.report.hierarchy.page import hierarchy_cards, population_card
from echelon.report.rules import idle_text, recorded_rules
from echelon.report.run import tables
from echelon.report.run.execution_costs import execution_card
from echelon.report.run.gather import RunData, SplitData
from echelon.report.run.headline import lead
from echelon.report.run.other_runs import other_runs_card
from echelon.report.run.reference_policies import reference_card
from echelon.report.run.trust import trust_card
from echelon.report.series import MEAN, shortest_period
from echelon.report.texts import Words

STEM = "report"
"""Of the names of a page in all languages."""
LEADS = ("sharpe_annual", "total_return")
"""Measures that a page begins with, a sentence each."""
_RANGES = {1: "range_1m", 3: "range_3m", 6: "range_6m", 12: "range_1y", 36: "range_3y"}
"""Months that a button shows."""


def render(run: RunData, words: Words, command: str, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    note = words("training_note" if len(run.main.agents) > 1 else "training_note_one")
    facts = [tables.facts_list(run, words, command), source_of(run.config_text, words)]
    page = Page(
        STEM,
        run.name,
        f"Echelon · {words('title')}",
        [
            *(Section(split.name, _split(run, split, words), tab=True) for split in run.splits),
            Card(words("training"), note, [ChartBox("training", training_chart(run, words))]),
            population_card(run, words),
            Card(words("facts"), "", facts),
        ],
        footer_of(words),
        [_tab(split, words) for split in run.splits],
        written,
    )
    return page.render(words)


def footer_of(words: Words) -> str:
    """What every page of results ends with."""
    return f"{words('footer')} {words('past')}"


def source_of(text: str, words: Words) -> Folded:
    """A configuration, folded."""
    return Folded(words("config_folded"), [Source(text)])


def _tab(split: SplitData, words: Words) -> Tab:
    span = f"{split.facts['first']} – {split.facts['last']}"
    return Tab(split.name, words(f"split_{split.name}"), span)


def _split(run: RunData, split: SplitData, words: Words) -> Body:
    """Everything about one split."""
    return [
        _summary(run, split, words),
        trust_card(run.path, split, words),
        equity_card(split, words),
        other_runs_card(run, split, words),
        reference_card(split, words),
        *hierarchy_cards(run, split, words),
        measures_card(split, words),
        monthly_card(split, words),
        _holdings(split, words),
        _actions(split, words),
        _costs(run, split, words),
        execution_card(split, words),
        _orders(split, words),
    ]


def _summary(run: RunData, split: SplitData, words: Words) -> Summary:
    looked = words.count("reads", int(split.facts["reads"]))
    stale = None
    if split.facts["run"] != run.facts:
        command = f"echelon evaluate {run.path} --split {split.name}"
        stale = Text(words("stale", command=command), "notice")
    body = [
        Lead([lead(split, words, name) for name in LEADS]),
        stale,
        tables.headlines(split, words),
        Text(f"{words(f'caution_{split.name}')} {looked}"),
    ]
    return Summary(charts.span_text(split, words), body)


def equity_card(split: SplitData, words: Words, fold_starts: Sequence[str] = ()) -> Card:
    """Growth and drawdown, with buttons for the span and the scale.

    fold_starts: days on which a new fold begins
    """
    key = f"{split.name}/equity"
    note = words("equity_note" if len(split.agents) > 1 else "equity_note_one")
    period = shortest_period(split.times, charts.MOST_POINTS)
    if period != "bar":
        note += " " + words("thinned", period=words(f"period_{period}"))
    months = (split.times[-1] - split.times[0]).astype("timedelta64[D]").astype(int) / 30.4
    spans = {str(n): words(text) for n, text in _RANGES.items() if n < months}
    spans["0"] = words("range_all")
    scales = {scale: words(scale) for scale in ("linear", "log")}
    tools = [Buttons("range", key, spans, "0"), Buttons("scale", key, scales, "linear")]
    chart = charts.equity_chart(split, words, fold_starts)
    return Card(words("equity"), note, [ChartBox(key, chart)], tools)


def measures_card(split: SplitData, words: Words) -> Card:
    """Every measure of agents and baselines, and of each seed."""
    several = len(split.agents) > 1
    note = words("measures_note" if several else "measures_note_one")
    by_seed = Folded(words("by_seed"), [tables.seeds_table(split, words)]) if several else None
    return Card(words("measures"), note, [tables.measures_table(split, words), by_seed])


def monthly_card(split: SplitData, words: Words) -> Card:
    """Heat maps of the monthly returns."""
    maps = tables.monthly_tables(split, words)
    group = f"{split.name}/monthly"
    tools = book_choice(group, maps, words)
    return Card(words("monthly"), words("monthly_note"), [Panes(group, maps)], [tools])


def book_choice(
    group: str, keys: Mapping[str, Chart | Block], words: Words, median: str | None = None
) -> Choice:
    """A choice among agents, baselines and their mean. median: key of the median agent"""
    names = {key: words("mean_of_seeds") if key == MEAN else words.name(key) for key in keys}
    if median is not None:
        names[median] = words("median_seed", name=names[median])
    return Choice(group, names, words("show"))


def _holdings(split: SplitData, words: Words) -> Card:
    key = f"{split.name}/holdings"
    median = split.median_agent.key
    by_book = charts.holdings_charts(split, words)
    by_book = {median: by_book[median]} | by_book
    tools = book_choice(key, by_book, words, median if len(split.agents) > 1 else None)
    return Card(words("holdings"), words("holdings_note"), [ChartBox(key, by_book)], [tools])


def _actions(split: SplitData, words: Words) -> Card:
    key = f"{split.name}/actions"
    by_book = _mean_first(charts.actions_charts(split, words))
    period = shortest_period(split.times, charts.MOST_BARS)
    note = words("actions_note", period=words(f"period_{period}"))
    if tables.is_targets(split.agents[0]):
        note += " " + words("actions_targets")
    tools = book_choice(key, by_book, words)
    return Card(words("actions"), note, [ChartBox(key, by_book)], [tools])


def _costs(run: RunData, split: SplitData, words: Words) -> Card:
    over, total = f"{split.name}/costs", f"{split.name}/costs-by-book"
    by_book = _mean_first(charts.costs_over_time(split, words))
    both = Two(
        Part(words("costs_over_time"), [ChartBox(over, by_book)]),
        Part(words("costs_by_book"), [ChartBox(total, charts.costs_by_book(split, words))]),
    )
    note = words("costs_note" if split.facts["fees"] else "costs_free")
    idle = idle_text(recorded_rules(split.facts, run.config), words)
    if idle:
        note += " " + words("costs_idle", idle=idle)
    return Card(words("costs"), note, [both], [book_choice(over, by_book, words)])


def _orders(split: SplitData, words: Words) -> Card:
    table = tables.orders_table(split, words)
    note = words("rejected_none" if table is None else "rejected_note")
    return Card(words("rejected"), note, [table])


def _mean_first(by_book: Mapping[str, Chart]) -> Mapping[str, Chart]:
    return {MEAN: by_book[MEAN], **by_book} if MEAN in by_book else by_book
