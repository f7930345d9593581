"""Charts of a hierarchy at work: who was in charge, how experts differ, what paid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from echelon.ops.measures import Label
from echelon.population.attribution import SUMMED, Attribution, HitRate
from echelon.population.record import CommandRecord
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
    padded_range,
)
from echelon.report.charts.slides import Slide
from echelon.report.hierarchy.data import (
    DISTANCE_BARS,
    ENTROPY_DECISIONS,
    Plane,
    attribution_of,
    correlations,
    expert_role,
    marked_events,
    plane,
    portfolio_plane,
    recent_entropy,
    reigns,
    trailing_mean,
    usage,
)
from echelon.report.run.gather import Record, RunData
from echelon.report.series import rows_to_show, shortest_period
from echelon.report.texts import Words

_SHARE = Label("", "percent", None, "", 1)


def choice_name(name: str, k: int, record: CommandRecord, words: Words) -> str:
    """What an expert, or cash, is called."""
    return words("free_cash") if k == len(record.experts) else words.who(name)


def command_chart(agent: Record, words: Words) -> Chart:
    """Growth of the real book and of the experts' own; below it a band of who was in charge."""
    record = _record(agent)
    plots = ((_growth_plot(agent, record, words),), (_band_plot(agent, record, words),))
    return Chart(plots, 520, (8.3, 1), shared=True)


def _record(agent: Record) -> CommandRecord:
    assert agent.command is not None, f"{agent.key} commands nobody"
    return agent.command


def _growth_plot(agent: Record, record: CommandRecord, words: Words) -> Plot:
    rows = rows_to_show(agent.times, MOST_POINTS)
    times = agent.times[rows]
    own = record.own_values / record.own_values[0]
    layers: list[Layer] = []
    for k, name in enumerate(record.experts):
        shown = words.who(name)
        layers.append(
            Curve(
                times,
                own[rows, k],
                1.2,
                name=words("own_book", name=shown),
                role=expert_role(k, len(record.experts)),
                group=shown,
                listed=False,
                hover=".3f",
            )
        )
    real = Curve(times, agent.growth[rows], 2.6, name=words("real_book"), lead=True, hover=".3f")
    return Plot([*layers, real, *_mark_points(agent, record, words)], DATES, Axis(words("growth")))


def _mark_points(agent: Record, record: CommandRecord, words: Words) -> list[Points]:
    """What risk control did, on the curve where it did."""
    points = []
    for kind in marked_events(record):
        rows = list(kind.rows)
        frequent = kind.mark.key == "mark_cut"
        texts = [
            "<br>".join(f"{words(f'risk_{e.kind}')}: {words.who(e.who)}" for e in events)
            for events in kind.events
        ]
        points.append(
            Points(
                agent.times[rows],
                agent.growth[rows],
                kind.mark.symbol,
                6.0 if frequent else 11.0,
                at_foot=frequent,
                name=words(kind.mark.key),
                role=kind.mark.role,
                texts=texts,
            )
        )
    return points


def _band_plot(agent: Record, record: CommandRecord, words: Words) -> Plot:
    """The reigns of each choice."""
    layers = []
    for k, name in enumerate(record.choices):
        shown = choice_name(name, k, record, words)
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
    used = usage(record, shortest_period(record.times, MOST_BARS))
    layers = [
        BarStack(
            used.starts,
            used.shares[:, k],
            name=choice_name(name, k, record, words),
            role=expert_role(k, len(record.experts)),
            hover=".0%",
        )
        for k, name in enumerate(record.choices)
    ]
    shares = Plot(layers, DATES, Axis(words("usage_share"), form="percent", low=0, high=1))
    title = words("entropy_axis", n=ENTROPY_DECISIONS)
    entropy = _entropy_plot(record, title, words)
    return Chart(((shares,), (entropy,)), 380, (1.7, 1), shared=True, legend="none")


def _entropy_plot(record: CommandRecord, title: str, words: Words) -> Plot:
    entropy = recent_entropy(record)
    name = words("usage_entropy")
    line = Curve(entropy.times, entropy.values, 2.0, name=name, listed=False, hover=".2f")
    return Plot([line], DATES, Axis(title, low=0, high=1.05, ticks=4))


def distance_chart(record: CommandRecord, threshold: float, words: Words) -> Chart:
    """How far apart the experts' portfolios are at each bar, and how far they should be."""
    return Chart([[_distance_plot(record, threshold, words)]], 380)


def _distance_plot(record: CommandRecord, threshold: float, words: Words) -> Plot:
    distance = record.portfolios.distance
    mean = trailing_mean(distance, DISTANCE_BARS)
    rows = rows_to_show(record.times, MOST_POINTS)
    times = record.times[rows]
    name = words("trailing", n=DISTANCE_BARS)
    layers = [
        Curve(times, distance[rows], 1.0, name=words("each_bar"), role="accent_soft", hover=".3f"),
        Curve(times, mean[rows], 2.2, name=name, hover=".3f"),
        RefLine(threshold, name=words("threshold", value=f"{threshold:g}"), role="loss"),
    ]
    return Plot(layers, DATES, Axis(words("mapd_axis"), low=0, ticks=5), legend="inside")


def correlation_chart(record: CommandRecord, words: Words) -> Chart:
    """Correlations of the returns of the experts' own books, as a coloured matrix."""
    return Chart([[_correlation_plot(record, words)]], 360, legend="none")


def _correlation_plot(record: CommandRecord, words: Words, title: str = "") -> Plot:
    values = correlations(record)
    written = [["" if math.isnan(v) else f"{v:.2f}" for v in row] for row in values.tolist()]
    names = Axis(kind="category", labels=[words.who(name) for name in record.experts])
    return Plot([Cells(values, written)], names, names, title)


def plane_chart(flat: Plane, names: Sequence[str], words: Words) -> Chart:
    """Experts as points in the plane in which they differ most. names[K]: of their files"""
    return Chart([[_plane_plot(flat, names, words)]], 360, legend="none", hover="closest")


def _plane_plot(flat: Plane | None, names: Sequence[str], words: Words, title: str = "") -> Plot:
    if flat is None:
        return Plot([], title=title, note=words("no_map"))
    ends = [padded_range(flat.points[:, n], 0.22) for n in range(2)]
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


def attribution_chart(attribution: Attribution, words: Words) -> Chart:
    """The parts of the result as bars with intervals; the total at the bottom."""
    return Chart([[_parts_plot(attribution, words)]], 300, legend="none", hover="closest")


def _parts_plot(attribution: Attribution, words: Words, title: str = "") -> Plot:
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


def router_sentence(hits: HitRate, words: Words) -> str:
    """How often the router chose right, and how often chance would have."""
    if not hits.decisions:
        return words("router_hits_none")
    fields = {
        "rate": _SHARE.format(hits.rate),
        "n": f"{hits.decisions:,}",
        "chance": _SHARE.format(hits.random_rate),
    }
    if math.isnan(hits.low):
        return words("router_hits_bare", **fields)
    low, high = _SHARE.format(hits.low), _SHARE.format(hits.high)
    return words("router_hits", low=low.removesuffix(" %"), high=high, **fields)


# --- slides


def hierarchy_slides(run: RunData, agent: Record, words: Words) -> dict[str, Slide]:
    """Who was in charge, and how the experts differ, by the names of their files."""
    record = _record(agent)
    who = agent_text(run.main, agent, words)
    threshold = run.config.trainer.diversity_threshold
    plots = (
        _growth_plot(agent, record, words),
        _band_plot(agent, record, words),
        _entropy_plot(record, words("entropy_short"), words),
        _distance_plot(record, threshold, words),
    )
    command = Chart([[plot] for plot in plots], 0, (3.3, 0.32, 0.85, 0.95), shared=True)
    attribution = attribution_of(run.main, agent, run.config)
    title = f"{words('over_run')} · {words('interval_95')}"
    below = who
    parts = Plot([], title=words("attribution"), note=words("attribution_none"))
    if attribution is not None:
        # A number is not parted from its sign where the line is broken.
        said = router_sentence(attribution.router, words).replace(" %", "\N{NO-BREAK SPACE}%")
        below += f" · {said}"
        parts = _parts_plot(attribution, words, title)
    related = _correlation_plot(record, words, words("correlations"))
    flat = portfolio_plane(record)
    portfolios = _plane_plot(flat, record.experts, words, words("portfolio_map"))
    history = run.populations.get(agent.seed) if agent.seed is not None else None
    skills = None
    if history is not None:
        flat = plane(history.skills)
        skills = _plane_plot(flat, history.experts, words, words("skill_map"))
    experts = Chart(((parts, related), (portfolios, skills)), 0, legend="none")
    return {
        "command": Slide(f"{run.name} · {words('command')}", who, command),
        "experts": Slide(f"{run.name} · {words('attribution')}", below, experts),
    }
