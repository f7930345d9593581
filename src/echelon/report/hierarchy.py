"""What a report shows of a hierarchy, from its record and its population: numbers and tables.

Axes: `S` bars, `K` experts, `P` periods; the choice of number K is cash.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl

from echelon.agents.mfpbt import Life
from echelon.config import Config
from echelon.ops.diversity import entropy
from echelon.ops.measures import LABELS, Label, mean_std
from echelon.population.attribution import (
    COST_PARTS,
    SUMMED,
    Attribution,
    HitRate,
    RealBook,
    attribute,
)
from echelon.population.measurement import rolling_usage_entropy
from echelon.population.record import CommandRecord, PopulationHistory
from echelon.report.charts.chart import LIGHT
from echelon.report.pages import Cell, Content, Named, Table
from echelon.report.run.gather import Record, SplitData
from echelon.report.run.trust import range_text
from echelon.report.texts import DASH, Words
from echelon.risk.events import RiskEvent, RiskKind
from echelon.types import Floats, Times

ENTROPY_DECISIONS = 50
"""Decisions over which the entropy of usage is measured."""
DISTANCE_BARS = 20
"""Bars of the trailing mean of the portfolios' distance."""
_ROLES = (4, 2, 8, 6, 1, 10, 14, 12, 0, 5, 3, 9, 7, 11, 15, 13)
"""Experts' colours among the assets'; the one like the real book's blue is of the ninth."""
MOST_EVENTS = 100
_SHARE = Label("", "percent", None, 1)
_GAIN = LABELS["total_return"]


class EventMark(NamedTuple):
    """How a kind of risk event is shown on a curve: words' key, colour and symbol."""

    key: str
    role: str
    symbol: str


_MASKED = EventMark("mark_masked", "loss", "triangle-down")
_FREED = EventMark("mark_freed", "gain", "circle-open")
_CUT = EventMark("mark_cut", "faint", "line-ns-open")
MARKS = {
    RiskKind.HALTED: EventMark("mark_halted", "loss", "x"),
    RiskKind.MASKED: _MASKED,
    RiskKind.FORCED: _MASKED,
    RiskKind.HALVED: EventMark("mark_halved", "slippage", "diamond"),
    RiskKind.RELEASED: _FREED,
    RiskKind.RESTORED: _FREED,
    RiskKind.RESUMED: _FREED,
    RiskKind.TURNOVER_CUT: _CUT,
    RiskKind.EXPOSURE_CUT: EventMark("mark_exposure", "slippage", "triangle-down-open"),
    RiskKind.EXPOSURE_RESTORED: _FREED,
    RiskKind.BUDGET_JUMPED: EventMark("mark_jumped", "loss", "x-open"),
    RiskKind.ALERT_FAILED: EventMark("mark_failed", "ink", "star"),
}


def expert_role(k: int, experts: int) -> str:
    """Role of the colour of expert k of `experts`; that of cash where k is their number."""
    return "free_cash" if k == experts else f"asset{_ROLES[k % len(_ROLES)]}"


class Reign(NamedTuple):
    """Bars first … stop − 1, at which one and the same was in charge."""

    who: int
    first: int
    stop: int


def reigns(record: CommandRecord) -> list[Reign]:
    """Who was in charge from when to when, in the order of time."""
    if not record.bars:
        return []
    changes = np.flatnonzero(np.diff(record.in_charge)) + 1
    edges = [0, *changes.tolist(), record.bars]
    return [Reign(int(record.in_charge[first]), first, stop) for first, stop in pairwise(edges)]


def recent_entropy(
    record: CommandRecord, decisions: int = ENTROPY_DECISIONS
) -> tuple[Times, Floats]:
    """When, and the entropy of the last decisions, as a share of log(K+1)."""
    at = np.flatnonzero(record.decided)
    shares = rolling_usage_entropy(record.in_charge[at], len(record.choices), decisions)
    return record.times[at[decisions - 1 :]], shares[decisions - 1 :]


def whole_entropy(record: CommandRecord) -> float:
    """The same of all decisions of the run."""
    chosen = record.in_charge[record.decided]
    if not len(chosen):
        return float("nan")
    shares = np.bincount(chosen, minlength=len(record.choices)) / len(chosen)
    return entropy(shares) / float(np.log(len(record.choices)))


def trailing_mean(values: Floats, bars: int) -> Floats:
    """[S] mean of the last `bars` values that are known; NaN before, and where none is."""
    means = pl.Series(values, dtype=pl.Float64).fill_nan(None).rolling_mean(bars, min_samples=1)
    out = means.to_numpy().copy()
    out[: bars - 1] = np.nan
    return out


class Plane(NamedTuple):
    """Points[K,2] in the plane in which they vary most, and the share[2] of variance it shows."""

    points: Floats
    explained: Floats


def plane(points: Floats) -> Plane | None:
    """The first two principal components of points[K,D]; None where all points coincide."""
    if len(points) < 2 or points.shape[1] == 0 or not np.isfinite(points).all():
        return None
    centred = points - points.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    variance = np.square(scale)
    if variance.sum() <= 1e-18:
        return None
    flat = np.zeros((len(points), 2))
    share = np.zeros(2)
    n = min(2, len(scale))
    flat[:, :n] = left[:, :n] * scale[:n]
    share[:n] = variance[:n] / variance.sum()
    # A component's sign is arbitrary: the farthest point is at the positive end.
    for axis in range(n):
        if flat[np.abs(flat[:, axis]).argmax(), axis] < 0.0:
            flat[:, axis] *= -1.0
    return Plane(flat, share)


def portfolio_plane(record: CommandRecord) -> Plane | None:
    """Where the experts' mean portfolios, cash included, lie to one another."""
    mean = record.portfolios.mean
    return plane(np.concatenate([mean, 1.0 - mean.sum(axis=1, keepdims=True)], axis=1))


class Branch(NamedTuple):
    """A life on its line, to the next decision; mark: where its own stands, beside earlier ones."""

    life: Life
    last: int
    mark: float


class Copy(NamedTuple):
    """What a life took from another member. at: its mark; weights: or hyperparameters"""

    source: int
    member: int
    at: float
    weights: bool


class FamilyTree(NamedTuple):
    """A lineage as lines to draw, up to round `last`; lead: how early the line of a copy begins."""

    branches: tuple[Branch, ...]
    copies: tuple[Copy, ...]
    members: int
    last: int
    lead: float


def family_tree(history: PopulationHistory) -> FamilyTree | None:
    """The population's lineage as branches and copies; None where none was kept."""
    lives = history.lineage
    if not lives:
        return None
    seen = [r.round for r in history.rounds] + [look.round for look in history.watched]
    last = max(*seen, *(life.round for life in lives), 0)
    ends = [last] * len(lives)
    living: dict[int, int] = {}
    taken: dict[tuple[int, int], int] = {}
    marks = []
    for life in lives:
        if life.member in living:
            ends[living[life.member]] = life.round
        living[life.member] = life.id
        place = taken[life.member, life.round] = taken.get((life.member, life.round), -1) + 1
        marks.append(life.round + place * 0.013 * last)
    branches = tuple(Branch(life, ends[life.id], marks[life.id]) for life in lives)
    copies = []
    for life in lives:
        for source, weights in ((life.parent, True), (life.lender, False)):
            if source is not None and lives[source].member != life.member:
                member = lives[source].member
                if weights or life.parent is None or lives[life.parent].member != member:
                    copies.append(Copy(member, life.member, marks[life.id], weights))
    gaps = np.diff(np.unique([life.round for life in lives]))
    lead = min(0.05 * last, 0.6 * float(gaps.min())) if len(gaps) else 0.0
    return FamilyTree(branches, tuple(copies), history.members, last, lead)


def marked_events(record: CommandRecord) -> dict[EventMark, dict[int, list[RiskEvent]]]:
    """Risk events by mark and row of the equity; the frequent cuts first, below the others."""
    by_mark: dict[EventMark, dict[int, list[RiskEvent]]] = {_CUT: {}}
    for event in record.events:
        by_mark.setdefault(MARKS[event.kind], {}).setdefault(event.time, []).append(event)
    return {mark: rows for mark, rows in by_mark.items() if rows}


def commanding_agents(split: SplitData) -> dict[str, Record]:
    """Agents that command others by their keys, the median one first."""
    every = {r.key: r for r in split.agents if r.command is not None}
    median = split.median_agent
    return {median.key: median} | every if median.key in every else every


def real_book(record: Record) -> RealBook:
    """Values and costs of a saved backtest."""
    equity = record.tables.equity
    paid = [equity[kind].to_numpy()[1:] for kind in COST_PARTS]
    return RealBook(record.value, *paid)


def market_baseline(split: SplitData) -> str | None:
    """The baseline that stands for the market: equal weight, or the index; None: cash."""
    known = {r.key for r in split.baselines}
    return next((key for key in ("equal_weight", "benchmark") if key in known), None)


def market_returns(split: SplitData, bars: int) -> Floats:
    """[bars] simple returns of the market, before costs; after its ruin 0."""
    key = market_baseline(split)
    out = np.zeros(bars)
    if key is None:
        return out
    book = real_book(next(r for r in split.baselines if r.key == key))
    paid = book.commission + book.stamp + book.slippage
    alive = book.values[:-1] > 0.0
    before = np.where(alive, book.values[:-1], 1.0)
    returns = np.where(alive, (book.values[1:] + paid) / before - 1.0, 0.0)[:bars]
    out[: len(returns)] = returns
    return out


def attribution_of(split: SplitData, agent: Record, config: Config) -> Attribution | None:
    """Where an agent's result came from; None where a book was lost whole."""
    record = agent.commanded
    market = market_returns(split, record.bars)
    horizon = config.meta_router.every_bars
    return attribute(record, real_book(agent), market, horizon=horizon, seed=config.seed)


def attributions(
    split: SplitData, agents: Mapping[str, Record], config: Config
) -> dict[str, Attribution | None]:
    return {key: attribution_of(split, agent, config) for key, agent in agents.items()}


def choice_name(name: str, k: int, experts: int, words: Words) -> str:
    return words("free_cash") if k == experts else words.who(name)


def distance_texts(record: CommandRecord, threshold: float) -> dict[str, str]:
    """Mean distance of the portfolios, and at how many bars it was below the threshold."""
    known = record.portfolios.distance[np.isfinite(record.portfolios.distance)]
    mean = float(known.mean()) if len(known) else math.nan
    below = float((known < threshold).mean()) if len(known) else math.nan
    return {"mean": decimals(mean), "below": _SHARE.format(below)}


def decimals(value: float) -> str:
    """To two decimals; a dash for NaN."""
    return DASH if math.isnan(value) else f"{value:.2f}"


def router_sentence(hits: HitRate, words: Words) -> str:
    """How often the router chose right, and how often chance would have."""
    if not hits.decisions:
        return words("router_hits_none")
    shares = (hits.rate, hits.random_rate, hits.low, hits.high)
    rate, random, low, high = map(_SHARE.format, shares)
    fields = {"rate": rate, "n": f"{hits.decisions:,}", "chance": random}
    if math.isnan(hits.low):
        return words("router_hits_bare", **fields)
    return words("router_hits", low=low.removesuffix(" %"), high=high, **fields)


def parts_table(attribution: Attribution, rate: float, words: Words) -> Table:
    """A row a part: over the run, with its interval, and a year. rate: bars a year"""
    years = attribution.bars / rate
    rows = []
    for name, part in (attribution.parts | {"total": attribution.total}).items():
        if name in COST_PARTS and part.total == 0.0:
            continue
        known = math.isfinite(part.low)
        between = range_text(part.low, part.high, words, _GAIN) if known else DASH
        gains = _GAIN.format(part.total), between, _GAIN.format(part.total / years)
        rows.append([words(f"part_{name}"), *gains])
    head = [words(k) for k in ("part", "over_run", "interval_95", "a_year")]
    return Table(head, rows, "measures whole")


def accounts_table(attribution: Attribution, words: Words) -> Table:
    """A row for everyone whom the router can choose."""
    names = ("expert", "time_in_charge", "decisions_for", "while_in_charge")
    head = [words(k) for k in (*names, "own_return", "own_gross", "right_choices")]
    rows: list[list[Content]] = []
    experts = len(attribution.experts) - 1
    for k, expert in enumerate(attribution.experts):
        name = choice_name(expert.name, k, experts, words)
        gains = (expert.in_charge, expert.own, expert.own_gross)
        cells = (
            _SHARE.format(expert.share),
            f"{expert.chosen:,}",
            *(_GAIN.format(math.expm1(gain)) for gain in gains),
            _SHARE.format(expert.hit_rate),
        )
        rows.append([Named(name, colour=LIGHT[expert_role(k, experts)]), *cells])
    return Table(head, rows)


def parts_by_seed(every: Mapping[str, Attribution | None], words: Words) -> Table | None:
    """A row a part, a column a seed, and their mean; None of less than two seeds."""
    known = {key: attribution for key, attribution in every.items() if attribution is not None}
    if len(known) < 2:
        return None
    keys = sorted(known, key=lambda key: int(key.removeprefix("seed-")))
    head = [words("part"), words("mean_of_seeds"), *(words.name(key) for key in keys)]
    rows = []
    for name in (*SUMMED, *COST_PARTS, "total"):
        books = [known[key] for key in keys]
        values = [(a.total if name == "total" else a.parts[name]).total for a in books]
        if name in COST_PARTS and not any(values):
            continue
        mean = _GAIN.format(*mean_std(values))
        rows.append([words(f"part_{name}"), mean, *(_GAIN.format(value) for value in values)])
    return Table(head, rows, "measures whole")


def events_note(key: str, events: Sequence[RiskEvent], words: Words) -> str:
    """How many risk events of each kind there were. key: of the agent"""
    kinds = Counter(words(f"risk_{event.kind}") for event in events)
    counts = words("comma").join(f"{name} {n:,}" for name, n in sorted(kinds.items()))
    note = words("risk_events_note")
    if len(events) > MOST_EVENTS:
        file = f"{key}.risk_events.jsonl"
        note = words("risk_events_cut", shown=MOST_EVENTS, n=f"{len(events):,}", file=file)
    return f"{note} {counts}{words('stop')}"


def risk_table(events: Sequence[RiskEvent], times: Times, words: Words) -> Table:
    """A row an event. Measured values and limits are shares of a book. times[T]: of the equity"""
    head = [words(k) for k in ("time", "what", "who", "measured", "limit", "done")]
    rows: list[list[Content]] = []
    for event in events[:MOST_EVENTS]:
        stamp = str(times[event.time].astype("datetime64[m]")).replace("T", " ")
        what, who, done = (
            Cell(text, "text")
            for text in (
                words(f"risk_{event.kind}"),
                words.who(event.who),
                words.event(event.kind, event.values),
            )
        )
        numbers = _SHARE.format(event.value), _SHARE.format(event.limit)
        rows.append([stamp.removesuffix(" 00:00"), what, who, *numbers, done])
    return Table(head, rows, "measures events risk")


def population_table(history: PopulationHistory, words: Words) -> Table:
    head = [words(k) for k in ("round", "what", "who", "done")]
    rows: list[list[Content]] = []
    for event in history.events[::-1][:MOST_EVENTS]:
        done = words.event(event.code, event.values)
        texts = (words.term("life", event.kind), words.who(event.who), done)
        rows.append([f"{event.round:,}", *(Cell(text, "text") for text in texts)])
    return Table(head, rows, "measures events")
