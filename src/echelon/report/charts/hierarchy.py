"""Charts of a hierarchy: who was in charge, how experts differ, what paid; its population.

Of a population in training: how different and how fit its members were, who came from whom.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from echelon.config import Config
from echelon.population.attribution import SUMMED, Attribution
from echelon.population.measurement import return_correlations
from echelon.population.record import CommandRecord, PopulationHistory
from echelon.report.charts.books import MOST_BARS, MOST_POINTS, agent_text
from echelon.report.charts.chart import (
    DATES,
    Axis,
    BarStack,
    Cells,
    Chart,
    Curve,
    Layer,
    Plot,
    Points,
    RefLine,
    Spans,
)
from echelon.report.charts.slides import Slide
from echelon.report.hierarchy import (
    DISTANCE_BARS,
    ENTROPY_DECISIONS,
    FamilyTree,
    Plane,
    attribution_of,
    choice_name,
    expert_role,
    family_tree,
    marked_events,
    plane,
    portfolio_plane,
    recent_entropy,
    reigns,
    router_sentence,
    trailing_mean,
)
from echelon.report.run.gather import Record, RunData
from echelon.report.series import choice_shares, rows_to_show, shortest_period
from echelon.report.texts import Words

LIFE_SYMBOLS: Mapping[str, str] = {
    "founder": "circle",
    "exploit": "triangle-up",
    "migrate": "triangle-right",
    "borrow": "square",
    "propose": "circle-open",
    "keep": "cross",
    "revert": "triangle-left",
    "reseed": "star",
}


def command_chart(agent: Record, words: Words) -> Chart:
    """Growth of the real book and of the experts' own; below it a band of who was in charge."""
    plots = ((_growth_plot(agent, words),), (_band_plot(agent, words),))
    return Chart(plots, 520, (8.3, 1), shared=True)


def _growth_plot(agent: Record, words: Words) -> Plot:
    record = agent.commanded
    rows = rows_to_show(agent.times, MOST_POINTS)
    times = agent.times[rows]
    own = record.own_values / record.own_values[0]
    layers: list[Layer] = []
    for k, name in enumerate(record.experts):
        shown, role = words.who(name), expert_role(k, len(record.experts))
        line = Curve(times, own[rows, k], 1.2, name=words("own_book", name=shown), role=role)
        layers.append(replace(line, group=shown, listed=False, hover=".3f"))
    real = Curve(times, agent.growth[rows], 2.6, name=words("real_book"), lead=True, hover=".3f")
    return Plot([*layers, real, *_mark_points(agent, words)], DATES, Axis(words("growth")))


def _mark_points(agent: Record, words: Words) -> Iterator[Points]:
    for (key, role, symbol), by_row in marked_events(agent.commanded).items():
        at, frequent = list(by_row), key == "mark_cut"
        points = Points(agent.times[at], agent.growth[at], symbol, 6.0 if frequent else 11.0)
        texts = [
            "<br>".join(f"{words(f'risk_{e.kind}')}: {words.who(e.who)}" for e in events)
            for events in by_row.values()
        ]
        yield replace(points, at_foot=frequent, name=words(key), role=role, texts=texts)


def _band_plot(agent: Record, words: Words) -> Plot:
    record, layers = agent.commanded, []
    for k, name in enumerate(record.choices):
        shown = choice_name(name, k, len(record.experts), words)
        mine = [reign for reign in reigns(record) if reign.who == k]
        first = agent.times[[reign.first for reign in mine]]
        stop = agent.times[[reign.stop for reign in mine]]
        days = zip(first.astype("datetime64[D]"), stop.astype("datetime64[D]"), strict=True)
        texts = [f"{shown}: {a} – {b}" for a, b in days]
        role = expert_role(k, len(record.experts))
        span = Spans([0.5] * len(mine), first, stop, 1.0, name=shown, role=role)
        layers.append(replace(span, group=shown, texts=texts or [""]))
    return Plot(layers, DATES, Axis(words("in_charge"), low=0, high=1, bare=True))


def usage_chart(record: CommandRecord, words: Words) -> Chart:
    """Shares of the bars by period, stacked, and below them the entropy of the decisions."""
    period = shortest_period(record.times, MOST_BARS)
    in_charge, choices = record.in_charge[:, None], len(record.choices)
    starts, shares = choice_shares(record.times, in_charge, choices, period)
    layers = [
        BarStack(
            starts,
            shares[:, k],
            name=choice_name(name, k, len(record.experts), words),
            role=expert_role(k, len(record.experts)),
            hover=".0%",
        )
        for k, name in enumerate(record.choices)
    ]
    upper = Plot(layers, DATES, Axis(words("usage_share"), form="percent", low=0, high=1))
    lower = _entropy_plot(record, words("entropy_axis", n=ENTROPY_DECISIONS), words)
    return Chart(((upper,), (lower,)), 380, (1.7, 1), shared=True, legend="none")


def _entropy_plot(record: CommandRecord, title: str, words: Words) -> Plot:
    times, values = recent_entropy(record)
    line = Curve(times, values, 2.0, name=words("usage_entropy"), listed=False, hover=".2f")
    return Plot([line], DATES, Axis(title, low=0, high=1.05, ticks=4))


def distance_plot(record: CommandRecord, threshold: float, words: Words) -> Plot:
    """How far apart the experts' portfolios are at each bar, and how far they should be."""
    distance = record.portfolios.distance
    mean, name = trailing_mean(distance, DISTANCE_BARS), words("trailing", n=DISTANCE_BARS)
    rows = rows_to_show(record.times, MOST_POINTS)
    times = record.times[rows]
    layers = [
        Curve(times, distance[rows], 1.0, name=words("each_bar"), role="accent_soft", hover=".3f"),
        Curve(times, mean[rows], 2.2, name=name, hover=".3f"),
        RefLine(threshold, name=words("threshold", value=f"{threshold:g}"), role="loss"),
    ]
    return Plot(layers, DATES, Axis(words("mapd_axis"), low=0, ticks=5), legend="inside")


def correlation_plot(record: CommandRecord, words: Words, title: str = "") -> Plot:
    """Correlations of the returns of the experts' own books; NaN for one that never moved."""
    values = return_correlations(record.own_returns.T)
    written = [["" if math.isnan(v) else f"{v:.2f}" for v in row] for row in values.tolist()]
    names = Axis(kind="category", labels=[words.who(name) for name in record.experts])
    return Plot([Cells(values, written)], names, names, title)


def plane_plot(flat: Plane | None, names: Sequence[str], words: Words, title: str = "") -> Plot:
    """Experts as points in the plane in which they differ most. names[K]: of their files"""
    if flat is None:
        return Plot([], title=title, note=words("no_map"))
    low, high = flat.points.min(axis=0), flat.points.max(axis=0)
    room = np.where(high > low, 0.22 * (high - low), 1.0)  # for the names
    ends = list(zip((low - room).tolist(), (high + room).tolist(), strict=True))
    shown = [words.who(name) for name in names]
    places = zip(shown, flat.points.tolist(), strict=True)
    points = Points(
        flat.points[:, 0],
        flat.points[:, 1],
        size=14.0,
        labels=shown,
        below=_names_below(flat, ends),
        roles=[expert_role(k, len(names)) for k in range(len(names))],
        texts=[f"{name}<br>{x:.3g}, {y:.3g}" for name, (x, y) in places],
    )
    x, y = (
        Axis(words("component", n=n + 1, share=f"{share:.0%}"), low=low, high=high, ticks=6)
        for n, (share, (low, high)) in enumerate(zip(flat.explained.tolist(), ends, strict=True))
    )
    return Plot([points], x, y, title)


def _names_below(flat: Plane, ends: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether a point's name goes below it: where another point lies closely above."""
    size = [high - low for low, high in ends]
    below = [False] * len(flat.points)
    for a, b in combinations(range(len(below)), 2):
        dx, dy = np.abs(flat.points[a] - flat.points[b]) / size
        if dx < 0.22 and dy < 0.13:
            below[a if flat.points[a, 1] < flat.points[b, 1] else b] = True
    return below


def parts_plot(attribution: Attribution, words: Words, title: str = "") -> Plot:
    parts = {name: attribution.parts[name] for name in SUMMED} | {"total": attribution.total}
    values, low, high = (
        100.0 * np.array([getattr(part, end) for part in parts.values()])
        for end in ("total", "low", "high")
    )
    names = [words(f"part_{name}") for name in parts]
    bars = BarStack(
        range(len(parts)),
        values,
        across=True,
        roles=[
            "accent" if name == "total" else "gain" if part.total >= 0 else "loss"
            for name, part in parts.items()
        ],
        low=low,
        high=high,
        texts=[
            f"{name}: {value:.2f} % ({a:.2f}, {b:.2f})"
            for name, value, a, b in zip(names, values, low, high, strict=True)
        ],
    )
    zero = RefLine(0.0, "x", "solid", 1.0, role="soft")
    return Plot([zero, bars], Axis(words("log_return_axis")), Axis(labels=names), title)


def rounds_chart(history: PopulationHistory, config: Config, words: Words) -> Chart:
    """MAPD, population volume, entropy of usage and fitness by round, a plot each."""
    mapd, entropy, fitness = _round_plots(history, config, words)
    watched = [look.round for look in history.watched]
    volumes = [look.volume for look in history.watched]
    volume = _round_plot([_round_line(watched, volumes, words("volume"))], words("volume"))
    with_title = [
        replace(plot, x=replace(plot.x, title=words("round"))) for plot in (entropy, fitness)
    ]
    return Chart(((mapd, volume), with_title), 520)


def _round_plots(
    history: PopulationHistory, config: Config, words: Words
) -> tuple[Plot, Plot, Plot]:
    threshold, floor = config.trainer.diversity_threshold, config.meta_router.entropy_floor
    rounds = [r.round for r in history.rounds]
    watched = [look.round for look in history.watched]
    most = math.log(len(history.experts)) or 1.0
    entropies = [r.usage_entropy / most for r in history.rounds]
    mapd: list[Layer] = [
        _round_line(watched, [look.mapd for look in history.watched], "MAPD"),
        RefLine(threshold, name=words("threshold", value=f"{threshold:g}"), role="loss"),
    ]
    used: list[Layer] = [
        _round_line(rounds, entropies, words("usage_entropy")),
        RefLine(floor, name=words("entropy_floor", value=f"{floor:g}"), role="loss"),
    ]
    fitness: list[Layer] = []
    for k, name in enumerate(history.experts):
        line = _round_line(rounds, [r.fitness[k] for r in history.rounds], words.who(name))
        role = expert_role(k, len(history.experts))
        fitness.append(replace(line, role=role, width=1.6, listed=True))
    return (
        _round_plot(mapd, words("mapd_axis")),
        _round_plot(used, words("usage_entropy_rounds")),
        replace(_round_plot(fitness, words("fitness")), y=Axis(ticks=5)),
    )


def _round_line(rounds: Sequence[int], values: Sequence[float], name: str) -> Curve:
    few = len(rounds) <= 20  # a round alone would not be seen on a line
    return Curve(rounds, values, 2.0, marked=few, name=name, listed=False)


def _round_plot(layers: Sequence[Layer], title: str) -> Plot:
    x = Axis(form="integer", ticks=6)
    return Plot(layers, x, Axis(low=0, ticks=5), title, legend="inside")


def lineage_chart(history: PopulationHistory, words: Words) -> Chart | None:
    tree = family_tree(history)
    if tree is None:
        return None
    height = 110 + max(200, min(22 * tree.members, 900))
    return Chart([[_lineage_plot(tree, history, words)]], height, hover="closest")


def _lineage_plot(tree: FamilyTree, history: PopulationHistory, words: Words) -> Plot:
    """Lives as lines, a layer a niche; copies as lines between members; decisions as symbols."""
    lives: dict[int, tuple[list[float], list[float]]] = {}
    for branch in tree.branches:
        life = branch.life
        x, y = lives.setdefault(life.niche, ([], []))
        x += [life.round, branch.last, math.nan]
        y += [life.member, life.member, math.nan]
    layers: list[Layer] = [
        Curve(x, y, 2.4, role=expert_role(niche, 10**6), hover="")
        for niche, (x, y) in lives.items()
    ]
    for weights, key, role in ((True, "copy_weights", "soft"), (False, "copy_hyper", "faint")):
        copies = [copy for copy in tree.copies if copy.weights is weights]
        x = [v for c in copies for v in (c.at - tree.lead, c.at, math.nan)]
        y = [v for c in copies for v in (c.source, c.member, math.nan)]
        if copies:
            line = Curve(x, y, 1.3, name=words(key), role=role, hover="")
            layers.append(line if weights else replace(line, dash="dot"))
    for kind in [*LIFE_SYMBOLS, *sorted({b.life.kind for b in tree.branches} - set(LIFE_SYMBOLS))]:
        decided = [branch for branch in tree.branches if branch.life.kind == kind]
        if decided:
            name, restart = words.term("life", kind), kind == "reseed"
            marks = np.array([branch.mark for branch in decided])
            members = [branch.life.member for branch in decided]
            symbol = LIFE_SYMBOLS.get(kind, "diamond")
            points = Points(marks, members, symbol, 13.0 if restart else 9.0, name=name)
            texts = [f"{name}, {words('round')} {branch.life.round}" for branch in decided]
            layers.append(replace(points, role="loss" if restart else "ink", texts=texts))
    low, high = -0.02 * tree.last - 0.5, 1.02 * tree.last + 0.5
    rounds = Axis(words("round"), form="integer", low=low, high=high)
    return Plot(layers, rounds, Axis(labels=member_names(history, words)), legend="above")


def member_names(history: PopulationHistory, words: Words) -> list[str]:
    """[M] what members are called: as their expert, with a number where a niche has several."""
    niches: dict[int, list[int]] = {}
    for life in history.lineage:
        members = niches.setdefault(life.niche, [])
        if life.member not in members:
            members.append(life.member)
    names = [""] * history.members
    for niche, members in niches.items():
        named = niche < len(history.experts)
        name = words.who(history.experts[niche]) if named else f"niche {niche}"
        for place, member in enumerate(sorted(members)):
            names[member] = name if len(members) == 1 else f"{name} · {place + 1}"
    return names


def hierarchy_slides(run: RunData, agent: Record, words: Words) -> dict[str, Slide]:
    """Who was in charge, and how the experts differ, by the names of their files."""
    record = agent.commanded
    who = agent_text(run.main, agent, words)
    threshold = run.config.trainer.diversity_threshold
    plots = (
        _growth_plot(agent, words),
        _band_plot(agent, words),
        _entropy_plot(record, words("entropy_short"), words),
        distance_plot(record, threshold, words),
    )
    command = Chart([[plot] for plot in plots], 0, (3.3, 0.32, 0.85, 0.95), shared=True)
    attribution = attribution_of(run.main, agent, run.config)
    below = who
    parts = Plot([], title=words("attribution"), note=words("attribution_none"))
    if attribution is not None:
        # A number is not parted from its sign where the line is broken.
        said = router_sentence(attribution.router, words).replace(" %", "\N{NO-BREAK SPACE}%")
        below += f" · {said}"
        title = f"{words('over_run')} · {words('interval_95')}"
        parts = parts_plot(attribution, words, title)
    related = correlation_plot(record, words, words("correlations"))
    flat = portfolio_plane(record)
    portfolios = plane_plot(flat, record.experts, words, words("portfolio_map"))
    skills = None
    if agent.key in run.populations:
        history = run.populations[agent.key]
        skills = plane_plot(plane(history.skills), history.experts, words, words("skill_map"))
    experts = Chart(((parts, related), (portfolios, skills)), 0, legend="none")
    return {
        "command": Slide(f"{run.name} · {words('command')}", who, command),
        "experts": Slide(f"{run.name} · {words('attribution')}", below, experts),
    }


def population_slide(run: RunData, key: str, words: Words) -> Slide:
    """Rounds above, lineage below. key: of the agent whose population it is"""
    history = run.populations[key]
    mapd, entropy, fitness = _round_plots(history, run.config, words)
    tree = family_tree(history)
    if tree is not None or len(history.experts) > 8:
        # The lineage names the same colours.
        fitness = replace(fitness, legend="none")
    rows = [[mapd, entropy, fitness]]
    if tree is not None:
        rows.append([replace(_lineage_plot(tree, history, words), title=words("lineage"))])
    below = f"{words.name(key)} · {words('lineage_note')}"
    ratios = (1.0, 1.9)[: len(rows)]
    return Slide(f"{run.name} · {words('population')}", below, Chart(rows, 0, ratios))
