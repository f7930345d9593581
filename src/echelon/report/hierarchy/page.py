"""The sections of a report that only a hierarchy has: command, attribution, risk, population.

Each is a card, with a list to choose a seed from, and there only where its record or its
population.json is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from echelon.config import Config
from echelon.ops.measures import LABELS, Label, mean_std
from echelon.population.attribution import COST_PARTS, SUMMED, Attribution, ReturnPart
from echelon.population.record import CommandRecord, PopulationHistory
from echelon.report.blocks import (
    Block,
    Card,
    Cell,
    ChartBox,
    Choice,
    Content,
    Named,
    Panes,
    Part,
    Table,
    Tall,
    Text,
    Two,
)
from echelon.report.charts import hierarchy as charts
from echelon.report.charts.books import MOST_BARS
from echelon.report.charts.palette import LIGHT
from echelon.report.charts.population import lineage_chart, rounds_chart
from echelon.report.hierarchy.data import (
    attribution_of,
    commanding_agents,
    expert_role,
    market_baseline,
    newest_first,
    plane,
    portfolio_plane,
    whole_entropy,
)
from echelon.report.run.gather import Record, RunData, SplitData
from echelon.report.run.trust import DASH, range_text
from echelon.report.series import shortest_period
from echelon.report.texts import Words
from echelon.risk.events import RiskEvent

MOST_EVENTS = 100
"""Risk events that are printed."""
_SHARE = Label("", "percent", None, "", 1)
_GAIN = LABELS["total_return"]
_PARTS = (*SUMMED, *COST_PARTS)


def hierarchy_cards(run: RunData, split: SplitData, words: Words) -> list[Card]:
    """All sections of a split; none where no agent commands others."""
    agents = commanding_agents(split)
    if not agents:
        return []
    parts = {agent.key: attribution_of(split, agent, run.config) for agent in agents}
    return [
        command_card(split, agents, run.config, words),
        attribution_card(split, parts, words),
        risk_card(split, agents, words),
    ]


def command_card(split: SplitData, agents: Sequence[Record], config: Config, words: Words) -> Card:
    """Who was in charge, how the experts were used and how they differ."""
    group = f"{split.name}/command"
    panes = {
        agent.key: _command_pane(f"{group}/{agent.key}", agent, config, words) for agent in agents
    }
    tools = [_seed_choice(group, split, panes, words)]
    return Card(words("command"), words("command_note"), [Panes(group, panes)], tools)


def _command_pane(key: str, agent: Record, config: Config, words: Words) -> Part:
    record = agent.command
    assert record is not None
    threshold = config.trainer.diversity_threshold
    period = words(f"period_{shortest_period(record.times, MOST_BARS)}")
    used = words("usage_note", period=period, entropy=_decimals(whole_entropy(record)))
    flat = portfolio_plane(record)
    usage = ChartBox(f"{key}/usage", charts.usage_chart(record, words))
    distance = ChartBox(f"{key}/distance", charts.distance_chart(record, threshold, words))
    correlations = ChartBox(f"{key}/correlations", charts.correlation_chart(record, words))
    shown: Block = Text(words("no_map"))
    if flat is not None:
        shown = ChartBox(f"{key}/map", charts.plane_chart(flat, record.experts, words))
    return Part(
        "",
        [
            ChartBox(key, charts.command_chart(agent, words)),
            Two(
                Part(words("usage"), [Text(used), usage]),
                Part(words("distance"), [Text(_distance_note(record, threshold, words)), distance]),
            ),
            Two(
                Part(words("correlations"), [Text(words("correlations_note")), correlations]),
                Part(words("portfolio_map"), [Text(words("portfolio_map_note")), shown]),
            ),
        ],
    )


def _distance_note(record: CommandRecord, threshold: float, words: Words) -> str:
    known = record.portfolios.distance[np.isfinite(record.portfolios.distance)]
    mean = float(known.mean()) if len(known) else math.nan
    below = float((known < threshold).mean()) if len(known) else math.nan
    return words("distance_note", mean=_decimals(mean), below=_SHARE.format(below))


def attribution_card(
    split: SplitData, attributions: Mapping[str, Attribution | None], words: Words
) -> Card:
    """Where the result came from: parts with intervals, experts, and all seeds side by side."""
    group = f"{split.name}/attribution"
    rate = float(split.facts["periods_per_year"])
    records = {agent.key: agent.command for agent in split.agents}
    panes = {
        key: _attribution_pane(f"{group}/{key}", attribution, records[key], rate, words)
        for key, attribution in attributions.items()
    }
    known = {key: parts for key, parts in attributions.items() if parts is not None}
    seeds = Part(words("by_seed_parts"), [seeds_table(known, words)]) if len(known) > 1 else None
    market = market_baseline(split)
    name = words("market_cash") if market is None else words.in_text(market)
    tools = [_seed_choice(group, split, panes, words)]
    note = words("attribution_note", market=name)
    return Card(words("attribution"), note, [Panes(group, panes), seeds], tools)


def _attribution_pane(
    key: str,
    attribution: Attribution | None,
    record: CommandRecord | None,
    rate: float,
    words: Words,
) -> Block:
    if attribution is None or record is None:
        return Text(words("attribution_none"))
    chart = ChartBox(key, charts.attribution_chart(attribution, words))
    accounts = [
        Text(words("accounts_note", horizon=attribution.horizon)),
        accounts_table(attribution, record, words),
        Text(charts.router_sentence(attribution.router, words)),
    ]
    both = Two(chart, Part("", [parts_table(attribution, rate, words)]))
    return Part("", [both, Part(words("accounts"), accounts)])


def parts_table(attribution: Attribution, rate: float, words: Words) -> Table:
    """A row a part: over the run, with its interval, and a year. rate: bars a year"""
    head = [words(k) for k in ("part", "over_run", "interval_95", "a_year")]
    years = attribution.bars / rate
    shown = {
        name: attribution.parts[name]
        for name in _PARTS
        if name in SUMMED or attribution.parts[name].total != 0.0
    }
    shown["total"] = attribution.total
    rows = [_part_row(words(f"part_{name}"), part, years, words) for name, part in shown.items()]
    return Table(head, rows, "measures whole")


def _part_row(name: str, part: ReturnPart, years: float, words: Words) -> list[str]:
    known = math.isfinite(part.low)
    between = range_text(part.low, part.high, words, _GAIN) if known else DASH
    return [name, _GAIN.format(part.total), between, _GAIN.format(part.total / years)]


def accounts_table(attribution: Attribution, record: CommandRecord, words: Words) -> Table:
    """A row for everyone whom the router can choose."""
    names = ("expert", "time_in_charge", "decisions_for", "while_in_charge")
    head = [words(k) for k in (*names, "own_return", "own_gross", "right_choices")]
    rows: list[list[Content]] = []
    for k, expert in enumerate(attribution.experts):
        name = charts.choice_name(expert.name, k, record, words)
        cells = (
            _SHARE.format(expert.share),
            f"{expert.chosen:,}",
            _GAIN.format(math.expm1(expert.in_charge)),
            _GAIN.format(math.expm1(expert.own)),
            _GAIN.format(math.expm1(expert.own_gross)),
            _SHARE.format(expert.hit_rate),
        )
        colour = LIGHT[expert_role(k, len(record.experts))]
        rows.append([Named(name, colour=colour), *cells])
    return Table(head, rows)


def seeds_table(attributions: Mapping[str, Attribution], words: Words) -> Table:
    """A row a part, a column a seed, and their mean."""
    keys = sorted(attributions, key=lambda key: int(key.removeprefix("seed-")))
    head = [words("part"), words("mean_of_seeds"), *(words.name(key) for key in keys)]
    rows = []
    for name in (*_PARTS, "total"):
        every = [attributions[key] for key in keys]
        values = [(a.total if name == "total" else a.parts[name]).total for a in every]
        if name in COST_PARTS and not any(values):
            continue
        mean = _GAIN.format(*mean_std(values))
        rows.append([words(f"part_{name}"), mean, *(_GAIN.format(value) for value in values)])
    return Table(head, rows, "measures whole")


def risk_card(split: SplitData, agents: Sequence[Record], words: Words) -> Card:
    """What risk control did, newest first."""
    group = f"{split.name}/risk"
    panes = {agent.key: _risk_pane(agent, words) for agent in agents}
    tools = [_seed_choice(group, split, panes, words)]
    return Card(words("risk_events"), "", [Panes(group, panes)], tools)


def _risk_pane(agent: Record, words: Words) -> Block:
    assert agent.command is not None
    events = newest_first(agent.command.events)
    if not events:
        return Text(words("risk_events_none"))
    kinds: dict[str, int] = {}
    for event in events:
        name = words(f"risk_{event.kind}")
        kinds[name] = kinds.get(name, 0) + 1
    counts = words("comma").join(f"{name} {n:,}" for name, n in sorted(kinds.items()))
    note = words("risk_events_note")
    if len(events) > MOST_EVENTS:
        file = f"{agent.key}.risk_events.jsonl"
        note = words("risk_events_cut", shown=MOST_EVENTS, n=f"{len(events):,}", file=file)
    table = events_table(events[:MOST_EVENTS], agent, words)
    return Part("", [Text(f"{note} {counts}{words('stop')}"), table])


def events_table(events: Sequence[RiskEvent], agent: Record, words: Words) -> Tall:
    """A row an event. Measured values and limits are shares of a book."""
    head = [words(k) for k in ("time", "what", "who", "measured", "limit", "done")]
    rows = []
    for event in events:
        stamp = str(agent.times[event.time].astype("datetime64[m]")).replace("T", " ")
        row = (
            stamp.removesuffix(" 00:00"),
            Cell(words(f"risk_{event.kind}"), "text"),
            Cell(words.who(event.who), "text"),
            _SHARE.format(event.value),
            _SHARE.format(event.limit),
            Cell(words.event(event.kind, event.values), "text"),
        )
        rows.append(row)
    return Tall(Table(head, rows, "measures events risk"))


def population_card(run: RunData, words: Words) -> Card | None:
    """What training left of the population; None where it left nothing."""
    if not run.populations:
        return None
    group = "population"
    panes = {
        f"seed-{seed}": _population_pane(f"{group}/{seed}", history, run.config, words)
        for seed, history in run.populations.items()
    }
    choice = Choice(group, {key: words.name(key) for key in panes}, words("show"))
    return Card(words("population"), words("population_note"), [Panes(group, panes)], [choice])


def _population_pane(key: str, history: PopulationHistory, config: Config, words: Words) -> Part:
    body: list[Block] = []
    if history.watched:
        floors = config.trainer.diversity_threshold, config.meta_router.entropy_floor
        body.append(ChartBox(f"{key}/rounds", rounds_chart(history, *floors, words)))
    flat = plane(history.skills)
    skills: list[Block] = [Text(words("no_map"))]
    if flat is not None:
        chart = ChartBox(f"{key}/skills", charts.plane_chart(flat, history.experts, words))
        skills = [Text(words("skill_map_note")), chart]
    left = Part(words("skill_map"), skills)
    if history.events:
        events = Part(words("population_events"), [_population_events(history, words)])
        body.append(Two(left, events))
    else:
        body.append(left)
    tree = lineage_chart(history, words)
    if tree is not None:
        lineage = [Text(words("lineage_note")), ChartBox(f"{key}/lineage", tree)]
        body.append(Part(words("lineage"), lineage))
    return Part("", body)


def _population_events(history: PopulationHistory, words: Words) -> Tall:
    """What happened to the population, newest first."""
    head = [words(k) for k in ("round", "what", "who", "done")]
    rows: list[list[Content]] = []
    for event in history.events[::-1][:MOST_EVENTS]:
        texts = (
            words.event_kind(event.kind),
            words.who(event.who),
            words.event(event.code, event.values),
        )
        rows.append([f"{event.round:,}", *(Cell(text, "text") for text in texts)])
    return Tall(Table(head, rows, "measures events"))


def _seed_choice(group: str, split: SplitData, panes: Mapping[str, Block], words: Words) -> Choice:
    names = {key: words.name(key) for key in panes}
    median = split.median_agent.key
    if len(split.agents) > 1 and median in names:
        names[median] = words("median_seed", name=names[median])
    return Choice(group, names, words("show"))


def _decimals(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:.2f}"
