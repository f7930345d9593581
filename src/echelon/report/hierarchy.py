"""The sections of a report that only a hierarchy has: command, attribution, risk, population.

Each is a card, with a list to choose a seed from, and there only where its record or its
population.json is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from echelon.config import Config
from echelon.ops.measures import LABELS, Label, mean_std
from echelon.population.attribution import COST_PARTS, SUMMED, Attribution, ReturnPart
from echelon.population.record import CommandRecord, PopulationHistory
from echelon.report.charts import hierarchy as charts
from echelon.report.charts.books import MOST_BARS
from echelon.report.charts.hierarchy import router_sentence
from echelon.report.charts.palette import LIGHT
from echelon.report.charts.population import lineage_chart, rounds_chart
from echelon.report.document import book_names, card, chart, choice, panes, part, two
from echelon.report.gather import Record, RunData, SplitData
from echelon.report.hierarchy_data import (
    attribution_of,
    commanding_agents,
    expert_role,
    market_baseline,
    newest_first,
    plane,
    portfolio_plane,
    whole_entropy,
)
from echelon.report.hierarchy_sayings import event_kind, event_text, said_name
from echelon.report.series import shortest_period
from echelon.report.tables import table
from echelon.report.texts import Words
from echelon.risk import RiskEvent

MOST_EVENTS = 100
"""Risk events that are printed."""
_SHARE = Label("", "percent", None, "", 1)
_GAIN = LABELS["total_return"]
_PARTS = (*SUMMED, *COST_PARTS)


def hierarchy_cards(run: RunData, split: SplitData, words: Words, data: dict[str, Any]) -> str:
    """All sections of a split; nothing where no agent commands others. Charts go into `data`."""
    agents = commanding_agents(split)
    if not agents:
        return ""
    found = {agent.key: attribution_of(split, agent, run.config) for agent in agents}
    return (
        command_card(split, agents, run.config, words, data)
        + attribution_card(split, found, words, data)
        + risk_card(split, agents, words)
    )


def command_card(
    split: SplitData, agents: Sequence[Record], config: Config, words: Words, data: dict[str, Any]
) -> str:
    """Who was in charge, how the experts were used and how they differ."""
    group = f"{split.name}/command"
    found = {
        agent.key: _command_pane(f"{group}/{agent.key}", agent, config, words, data)
        for agent in agents
    }
    tools = _seed_choice(group, split, found, words)
    return card(words("command"), words("command_note"), panes(group, found), tools)


def _command_pane(
    key: str, agent: Record, config: Config, words: Words, data: dict[str, Any]
) -> str:
    record = agent.command
    assert record is not None
    threshold = config.trainer.diversity_threshold
    data["charts"] |= {
        key: charts.command_chart(agent, words),
        f"{key}/usage": charts.usage_chart(record, words),
        f"{key}/distance": charts.distance_chart(record, threshold, words),
        f"{key}/correlations": charts.correlation_chart(record, words),
    }
    period = shortest_period(record.times, MOST_BARS)
    used = words(
        "usage_note", period=words(f"period_{period}"), entropy=_decimals(whole_entropy(record))
    )
    flat = portfolio_plane(record)
    if flat is not None:
        data["charts"][f"{key}/map"] = charts.plane_chart(flat, record.experts, words)
    shown = chart(f"{key}/map") if flat is not None else _note(words("no_map"))
    return (
        chart(key)
        + two(
            part(words("usage"), _note(used) + chart(f"{key}/usage")),
            part(
                words("distance"),
                _note(_distance_note(record, threshold, words)) + chart(f"{key}/distance"),
            ),
        )
        + two(
            part(
                words("correlations"),
                _note(words("correlations_note")) + chart(f"{key}/correlations"),
            ),
            part(words("portfolio_map"), _note(words("portfolio_map_note")) + shown),
        )
    )


def _distance_note(record: CommandRecord, threshold: float, words: Words) -> str:
    known = record.portfolios.distance[np.isfinite(record.portfolios.distance)]
    mean = float(known.mean()) if len(known) else math.nan
    below = float((known < threshold).mean()) if len(known) else math.nan
    return words("distance_note", mean=_decimals(mean), below=_SHARE.format(below))


def attribution_card(
    split: SplitData,
    found: Mapping[str, Attribution | None],
    words: Words,
    data: dict[str, Any],
) -> str:
    """Where the result came from: parts with intervals, experts, and all seeds side by side."""
    group = f"{split.name}/attribution"
    rate = float(split.facts["periods_per_year"])
    records = {agent.key: agent.command for agent in split.agents}
    shown = {}
    for key, one in found.items():
        record = records[key]
        if one is None or record is None:
            shown[key] = _note(words("attribution_none"))
            continue
        data["charts"][f"{group}/{key}"] = charts.attribution_chart(one, words)
        shown[key] = two(chart(f"{group}/{key}"), parts_table(one, rate, words)) + part(
            words("accounts"),
            _note(words("accounts_note", horizon=one.horizon))
            + accounts_table(one, record, words)
            + _note(router_sentence(one.router, words)),
        )
    known = {key: one for key, one in found.items() if one is not None}
    seeds = part(words("by_seed_parts"), seeds_table(known, words)) if len(known) > 1 else ""
    market = market_baseline(split)
    name = words("market_cash") if market is None else words.in_text(market)
    note = words("attribution_note", market=name)
    tools = _seed_choice(group, split, shown, words)
    return card(words("attribution"), note, panes(group, shown) + seeds, tools)


def parts_table(found: Attribution, rate: float, words: Words) -> str:
    """A row a part: over the run, with its interval, and a year. rate: bars a year"""
    head = [escape(words(k)) for k in ("part", "over_run", "interval_95", "a_year")]
    years = found.bars / rate
    rows = [
        _part_row(words(f"part_{name}"), found.parts[name], years, words)
        for name in _PARTS
        if name in SUMMED or found.parts[name].total != 0.0
    ]
    rows.append(_part_row(words("part_total"), found.total, years, words))
    return f"<div>{table(head, rows, 'measures whole')}</div>"


def _part_row(name: str, one: ReturnPart, years: float, words: Words) -> list[str]:
    between = "–"
    if math.isfinite(one.low):
        low, high = _GAIN.format(one.low), _GAIN.format(one.high)
        between = words("range", low=low.removesuffix(" %"), high=high)
    cells = (_GAIN.format(one.total), between, _GAIN.format(one.total / years))
    return [escape(name), *(f"<td>{escape(text)}</td>" for text in cells)]


def accounts_table(found: Attribution, record: CommandRecord, words: Words) -> str:
    """A row for everyone whom the router can choose."""
    names = ("expert", "time_in_charge", "decisions_for", "while_in_charge")
    head = [escape(words(k)) for k in (*names, "own_return", "own_gross", "right_choices")]
    rows = []
    for k, one in enumerate(found.experts):
        name = charts.choice_name(one.name, k, record, words)
        cells = (
            _SHARE.format(one.share),
            f"{one.chosen:,}",
            _GAIN.format(math.expm1(one.in_charge)),
            _GAIN.format(math.expm1(one.own)),
            _GAIN.format(math.expm1(one.own_gross)),
            _SHARE.format(one.hit_rate),
        )
        colour = LIGHT[expert_role(k, len(record.experts))]
        swatch = f'<i class="swatch" style="background:{colour}"></i>'
        rows.append([swatch + escape(name), *(f"<td>{escape(text)}</td>" for text in cells)])
    return table(head, rows, "measures")


def seeds_table(found: Mapping[str, Attribution], words: Words) -> str:
    """A row a part, a column a seed, and their mean."""
    keys = sorted(found, key=lambda key: int(key.removeprefix("seed-")))
    head = [words("part"), words("mean_of_seeds"), *(words.name(key) for key in keys)]
    rows = []
    for name in (*_PARTS, "total"):
        values = [
            (found[key].total if name == "total" else found[key].parts[name]).total for key in keys
        ]
        if name in COST_PARTS and not any(values):
            continue
        mean = mean_std(values)
        texts = [_GAIN.format(mean.mean, mean.std), *(_GAIN.format(value) for value in values)]
        cells = [f"<td>{escape(text)}</td>" for text in texts]
        rows.append([escape(words(f"part_{name}")), *cells])
    return table([escape(h) for h in head], rows, "measures whole")


def risk_card(split: SplitData, agents: Sequence[Record], words: Words) -> str:
    """What risk control did, newest first."""
    group = f"{split.name}/risk"
    found = {agent.key: _risk_pane(agent, words) for agent in agents}
    tools = _seed_choice(group, split, found, words)
    return card(words("risk_events"), "", panes(group, found), tools)


def _risk_pane(agent: Record, words: Words) -> str:
    assert agent.command is not None
    events = newest_first(agent.command.events)
    if not events:
        return _note(words("risk_events_none"))
    kinds: dict[str, int] = {}
    for event in events:
        name = words(f"risk_{event.kind}")
        kinds[name] = kinds.get(name, 0) + 1
    counts = words("comma").join(f"{name} {n:,}" for name, n in sorted(kinds.items()))
    note = words("risk_events_note")
    if len(events) > MOST_EVENTS:
        file = f"{agent.key}.risk_events.jsonl"
        note = words("risk_events_cut", shown=MOST_EVENTS, n=f"{len(events):,}", file=file)
    return _note(f"{note} {counts}{words('stop')}") + events_table(
        events[:MOST_EVENTS], agent, words
    )


def events_table(events: Sequence[RiskEvent], agent: Record, words: Words) -> str:
    """A row an event. Measured values and limits are shares of a book."""
    head = [escape(words(k)) for k in ("time", "what", "who", "measured", "limit", "done")]
    rows = []
    for event in events:
        stamp = str(agent.times[event.time].astype("datetime64[m]")).replace("T", " ")
        cells = (
            ("text", words(f"risk_{event.kind}")),
            ("text", said_name(event.who, words)),
            ("", _SHARE.format(event.value)),
            ("", _SHARE.format(event.limit)),
            ("text", event_text(event.kind, event.values, words)),
        )
        rows.append(
            [
                escape(stamp.removesuffix(" 00:00")),
                *(f'<td class="{kind}">{escape(text)}</td>' for kind, text in cells),
            ]
        )
    return f'<div class="tall">{table(head, rows, "measures events risk")}</div>'


def population_card(run: RunData, words: Words, data: dict[str, Any]) -> str:
    """What training left of the population; nothing where it left nothing."""
    if not run.populations:
        return ""
    group = "population"
    found = {
        f"seed-{seed}": _population_pane(f"{group}/{seed}", history, run.config, words, data)
        for seed, history in run.populations.items()
    }
    tools = choice(group, book_names(found, words), words)
    return card(words("population"), words("population_note"), panes(group, found), tools)


def _population_pane(
    key: str, history: PopulationHistory, config: Config, words: Words, data: dict[str, Any]
) -> str:
    html = []
    if history.watched:
        data["charts"][f"{key}/rounds"] = rounds_chart(
            history, config.trainer.diversity_threshold, config.meta_router.entropy_floor, words
        )
        html.append(chart(f"{key}/rounds"))
    flat = plane(history.skills)
    skills = _note(words("no_map"))
    if flat is not None:
        data["charts"][f"{key}/skills"] = charts.plane_chart(flat, history.experts, words)
        skills = _note(words("skill_map_note")) + chart(f"{key}/skills")
    befell = _befell(history, words)
    left = part(words("skill_map"), skills)
    html.append(two(left, part(words("population_events"), befell)) if befell else left)
    tree = lineage_chart(history, words)
    if tree is not None:
        data["charts"][f"{key}/lineage"] = tree
        note = _note(words("lineage_note"))
        html.append(part(words("lineage"), note + chart(f"{key}/lineage")))
    return "".join(html)


def _befell(history: PopulationHistory, words: Words) -> str:
    """What befell the population, newest first; empty where nothing did."""
    if not history.events:
        return ""
    newest = history.events[::-1][:MOST_EVENTS]
    head = [escape(words(k)) for k in ("round", "what", "who", "done")]
    rows = [
        [
            f"{event.round:,}",
            *(
                f'<td class="text">{escape(text)}</td>'
                for text in (
                    event_kind(event.kind, words),
                    said_name(event.who, words),
                    event_text(event.code, event.values, words),
                )
            ),
        ]
        for event in newest
    ]
    return f'<div class="tall">{table(head, rows, "measures events")}</div>'


def _seed_choice(group: str, split: SplitData, found: Mapping[str, str], words: Words) -> str:
    median = split.median_agent.key if len(split.agents) > 1 else None
    return choice(group, book_names(found, words, median=median), words)


def _decimals(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
