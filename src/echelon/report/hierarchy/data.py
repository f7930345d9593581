"""What a report shows of a hierarchy, from its record and its population: numbers, no drawing.

Axes: `S` bars, `K` experts, `P` periods; the choice of number K is cash.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from echelon.config import Config
from echelon.ops.diversity import entropy
from echelon.population.attribution import COST_PARTS, Attribution, RealBook, attribute
from echelon.population.measurement import return_correlations, rolling_usage_entropy
from echelon.population.record import CommandRecord, PopulationHistory
from echelon.report.run.gather import Record, SplitData
from echelon.report.series import Period, period_numbers, period_starts
from echelon.risk.events import RiskEvent, RiskKind
from echelon.types import Floats, Times

ENTROPY_DECISIONS = 50
"""Decisions over which the entropy of usage is measured."""
DISTANCE_BARS = 20
"""Bars of the trailing mean of the portfolios' distance."""
_ROLES = (4, 2, 8, 6, 1, 10, 14, 12, 0, 5, 3, 9, 7, 11, 15, 13)
"""Experts' colours among the assets'; the one like the real book's blue is of the ninth."""
_MARKET = ("equal_weight", "benchmark")
_MARK_WIDTH = 0.013
"""Of a mark in a family tree, as a share of all rounds."""


class EventMark(NamedTuple):
    """How a kind of risk event is shown on a curve: words' key, colour and symbol."""

    key: str
    role: str
    symbol: str


_STOPPED = EventMark("mark_halted", "loss", "x")
_MASKED = EventMark("mark_masked", "loss", "triangle-down")
_HALVED = EventMark("mark_halved", "slippage", "diamond")
_FREED = EventMark("mark_freed", "gain", "circle-open")
_CUT = EventMark("mark_cut", "faint", "line-ns-open")
_FAILED = EventMark("mark_failed", "ink", "star")
MARKS = {
    RiskKind.HALTED: _STOPPED,
    RiskKind.MASKED: _MASKED,
    RiskKind.FORCED: _MASKED,
    RiskKind.HALVED: _HALVED,
    RiskKind.RELEASED: _FREED,
    RiskKind.RESTORED: _FREED,
    RiskKind.RESUMED: _FREED,
    RiskKind.TURNOVER_CUT: _CUT,
    RiskKind.ALERT_FAILED: _FAILED,
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


class Usage(NamedTuple):
    """Share of the bars of each period at which each choice was in charge.

    starts[P]; shares[P,K+1]
    """

    starts: Times
    shares: Floats


def usage(record: CommandRecord, period: Period) -> Usage:
    """Who was in charge how often, by period."""
    periods, group = np.unique(period_numbers(record.times, period), return_inverse=True)
    counts = np.zeros((len(periods), len(record.choices)))
    np.add.at(counts, (group, record.in_charge), 1.0)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return Usage(period_starts(record.times, period), np.asarray(shares))


class UsageEntropy(NamedTuple):
    """times[P], values[P]."""

    times: Times
    values: Floats


def recent_entropy(record: CommandRecord, decisions: int = ENTROPY_DECISIONS) -> UsageEntropy:
    """Entropy of the last decisions, at each decision that has as many before it.

    As a share of log(K+1): 0 where one alone was chosen, 1 where all were alike often.
    """
    at = np.flatnonzero(record.decided)
    shares = rolling_usage_entropy(record.in_charge[at], len(record.choices), decisions)
    return UsageEntropy(record.times[at[decisions - 1 :]], shares[decisions - 1 :])


def whole_entropy(record: CommandRecord) -> float:
    """The same of all decisions of the run."""
    chosen = record.in_charge[record.decided]
    if not len(chosen):
        return float("nan")
    shares = np.bincount(chosen, minlength=len(record.choices)) / len(chosen)
    return entropy(shares) / float(np.log(len(record.choices)))


def trailing_mean(values: Floats, bars: int) -> Floats:
    """[S] mean of the last `bars` values that are known; NaN before, and where none is."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    out = np.full(len(values), np.nan)
    if len(values) >= bars:
        n = counts[bars:] - counts[:-bars]
        total = sums[bars:] - sums[:-bars]
        out[bars - 1 :] = np.where(n > 0, total / np.maximum(n, 1), np.nan)
    return out


def correlations(record: CommandRecord) -> Floats:
    """[K,K] of the returns of the experts' own books; NaN for one that never moved."""
    return return_correlations(record.own_returns.T)


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
    """A life on its member's line, from its round to that of the next decision about it.

    mark: where the decision's mark stands: at `first`, or next to the marks of earlier decisions of
        the same round about the same member
    """

    life: int
    member: int
    niche: int
    kind: str
    first: int
    last: int
    mark: float


class Copy(NamedTuple):
    """What a life took from another member. at: its mark; weights: or hyperparameters"""

    source: int
    member: int
    niche: int
    at: float
    weights: bool


class FamilyTree(NamedTuple):
    """A lineage as lines to draw.

    last: round at which the living end
    lead: rounds by which the line of a copy begins before it, so that copies of one round, which
        would lie upon one another, stay distinct
    """

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
        marks.append(life.round + place * _MARK_WIDTH * last)
    branches = tuple(
        Branch(
            life.id, life.member, life.niche, life.kind, life.round, ends[life.id], marks[life.id]
        )
        for life in lives
    )
    copies = []
    for life in lives:
        for source, weights in ((life.parent, True), (life.lender, False)):
            if source is not None and lives[source].member != life.member:
                member = lives[source].member
                if weights or life.parent is None or lives[life.parent].member != member:
                    copies.append(Copy(member, life.member, life.niche, marks[life.id], weights))
    gaps = np.diff(np.unique([life.round for life in lives]))
    lead = min(0.05 * last, 0.6 * float(gaps.min())) if len(gaps) else 0.0
    return FamilyTree(branches, tuple(copies), history.members, last, lead)


def newest_first(events: Sequence[RiskEvent]) -> list[RiskEvent]:
    """The last that happened comes first, also among those of one bar."""
    order = sorted(range(len(events)), key=lambda n: (events[n].time, n), reverse=True)
    return [events[n] for n in order]


class MarkedEvents(NamedTuple):
    """Events of one kind of mark: rows of the equity they stand at, each once, and the events."""

    mark: EventMark
    rows: tuple[int, ...]
    events: tuple[tuple[RiskEvent, ...], ...]


def marked_events(record: CommandRecord) -> list[MarkedEvents]:
    """Risk events by mark, in the order of `MARKS`; the frequent cuts come first, below others."""
    by_mark: dict[EventMark, dict[int, list[RiskEvent]]] = {_CUT: {}}
    for event in record.events:
        by_mark.setdefault(MARKS[event.kind], {}).setdefault(event.time, []).append(event)
    return [
        MarkedEvents(mark, tuple(rows), tuple(tuple(events) for events in rows.values()))
        for mark, rows in by_mark.items()
        if rows
    ]


def commanding_agents(split: SplitData) -> list[Record]:
    """Agents that command others, the median one first."""
    every = [r for r in split.agents if r.command is not None]
    median = split.median_agent
    return [median, *(r for r in every if r is not median)] if median in every else every


def real_book(record: Record) -> RealBook:
    """Values and costs of a saved backtest."""
    equity = record.tables.equity
    paid = [equity[kind].to_numpy()[1:] for kind in COST_PARTS]
    return RealBook(record.value, *paid)


def market_baseline(split: SplitData) -> str | None:
    """The baseline that stands for the market: equal weight, or the index; None: cash."""
    known = {r.key for r in split.baselines}
    return next((key for key in _MARKET if key in known), None)


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
    assert agent.command is not None, f"{agent.key} commands nobody"
    market = market_returns(split, agent.command.bars)
    horizon = config.meta_router.every_bars
    return attribute(agent.command, real_book(agent), market, horizon=horizon, seed=config.seed)
