"""Where the hierarchy's result came from: the market, its experts, its router, and what it paid.

In log returns, bar by bar, so that the parts add up to the whole exactly. Of a bar let

    net     log(V' / V) of the real book
    gross   log(V' / V + c), c being what was paid for trading, as a share of V: as if trading
            had been free at that bar
    e_k     the same gross return of expert k's own book; 0 of cash
    chosen  e of whoever was in charge; of blended experts log Σ share · exp(e), what own books in
            these proportions would make together
    mean    of e_k over the K experts, cash not among them
    market  log return of the benchmark: equal weight of the assets, or the index given

Then net = market + skill + routing + holding + costs, with

    skill    mean − market      what an expert drawn by lot adds to the benchmark
    routing  chosen − mean      what choosing adds to drawing by lot
    holding  gross − chosen     the real book does not hold what the expert in charge holds in its
                                own book: it is on its way there after a switch, was cut by risk
                                control, or is of another size
    costs    net − gross ≤ 0    commission, stamp duty and slippage of the real book, shared out by
                                the money each of them took

What experts' own books pay is in no part. The interval of a part is that of its mean bar by a block
bootstrap (`ops.blocks`), times the number of bars: how it would vary on other days like these.

Axes: `S` bars, `K` experts; the choice of number K is cash.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from echelon.ops.blocks import mean_interval
from echelon.population.record import CommandRecord
from echelon.rng import stream
from echelon.types import Bools, Floats, Ints


class RealBook(NamedTuple):
    """What the real book was worth, values[S+1], and the money it paid at each bar, [S] each."""

    values: Floats
    commission: Floats
    stamp: Floats
    slippage: Floats


class PartSeries(NamedTuple):
    """Log return[S] of each part; together they are the net log return of the real book."""

    market: Floats
    skill: Floats
    routing: Floats
    holding: Floats
    commission: Floats
    stamp: Floats
    slippage: Floats

    @property
    def total(self) -> Floats:
        """[S] of the real book, after costs."""
        return np.asarray(np.sum(self, axis=0))

    @property
    def costs(self) -> Floats:
        """[S] all costs; never above 0."""
        return np.asarray(self.commission + self.stamp + self.slippage)


class ReturnPart(NamedTuple):
    """A part's log return over the run, with a 95 % interval (NaN: too short to resample)."""

    total: float
    low: float
    high: float
    block: int


class HitRate(NamedTuple):
    """How often a choice was right: the chosen book's next return was above the experts' mean.

    random_rate: of a choice by lot among those allowed, cash included
    """

    rate: float
    low: float
    high: float
    random_rate: float
    decisions: int


class ExpertAccount(NamedTuple):
    """One of those whom the router can choose.

    share: of the bars at which it was in charge; chosen: decisions for it. Of blended experts: mean
        part of what was held; decisions that gave it the largest
    in_charge: log return of the real book, after costs, over those bars, or in these parts
    own, own_gross: log return of its own book over the whole run, after and before costs
    hit_rate: share of the decisions for it that were right; NaN where there is none to judge
    """

    name: str
    share: float
    chosen: int
    in_charge: float
    own: float
    own_gross: float
    hit_rate: float


class Attribution(NamedTuple):
    """parts: by name, in the order in which they add up; costs is the sum of the three after it

    horizon: bars over which a choice is judged
    """

    bars: int
    total: ReturnPart
    parts: dict[str, ReturnPart]
    experts: tuple[ExpertAccount, ...]
    router: HitRate
    horizon: int
    series: PartSeries


SUMMED = ("market", "skill", "routing", "holding", "costs")
"""The parts that add up to the whole."""
COST_PARTS = ("commission", "stamp", "slippage")
"""The parts of costs."""


def attribute(
    record: CommandRecord, book: RealBook, market: Floats, *, horizon: int, seed: int = 0
) -> Attribution | None:
    """Share the result of a run out; None where a book lost everything: it has no log return.

    market: [S] simple returns of the benchmark; horizon: bars between the router's decisions
    """
    series = part_series(record, book, market)
    if series is None:
        return None
    every = series._asdict() | {"costs": series.costs}
    parts = {name: _part(every[name], seed, name) for name in (*SUMMED, *COST_PARTS)}
    return Attribution(
        bars=record.bars,
        total=_part(series.total, seed, "total"),
        parts=parts,
        experts=_accounts(record, series, horizon),
        router=router_hit_rate(record, horizon, seed),
        horizon=horizon,
        series=series,
    )


def part_series(record: CommandRecord, book: RealBook, market: Floats) -> PartSeries | None:
    """Every part by bar; None where a book lost everything. market: [S] simple returns"""
    bars = record.bars
    for name, values, length in (
        ("values", book.values, bars + 1),
        *((name, getattr(book, name), bars) for name in COST_PARTS),
        ("market", market, bars),
    ):
        assert values.shape == (length,), f"{name} should be [{length}], is {values.shape}"
    # Asked in this way a value that is not a number counts as lost too.
    if not (
        (book.values > 0.0).all() and (record.own_values > 0.0).all() and (market > -1.0).all()
    ):
        return None
    paid = np.stack([book.commission, book.stamp, book.slippage])  # [3,S]
    ratio = book.values[1:] / book.values[:-1]
    gross = np.log(ratio + paid.sum(axis=0) / book.values[:-1])
    net = np.log(ratio)
    own = gross_returns(record)
    mean = own.mean(axis=1)
    with_cash = np.concatenate([own, np.zeros((bars, 1))], axis=1)
    if record.shares is None:
        chosen = with_cash[np.arange(bars), record.in_charge]
    else:
        chosen = np.log((record.shares * np.exp(with_cash)).sum(axis=1))
    base = np.log1p(market)
    shares = paid / np.maximum(paid.sum(axis=0), np.finfo(np.float64).tiny)
    costs = dict(zip(COST_PARTS, (net - gross) * shares, strict=True))
    return PartSeries(base, mean - base, chosen - mean, gross - chosen, **costs)


def gross_returns(record: CommandRecord) -> Floats:
    """[S,K] log returns of the experts' own books, as if their trading had been free."""
    return np.asarray(np.log1p(record.own_returns + record.own_costs))


def router_hit_rate(record: CommandRecord, horizon: int, seed: int = 0) -> HitRate:
    """How often the router's choice was right, over the `horizon` bars after it (if in the run)."""
    _, right, random_rate = _judge_decisions(record, horizon)
    if not len(right):
        return HitRate(math.nan, math.nan, math.nan, math.nan, 0)
    rate = mean_interval(right.astype(np.float64), stream(seed, "attribution", "hit rate"))
    return HitRate(rate.estimate, rate.low, rate.high, random_rate, len(right))


def _judge_decisions(record: CommandRecord, horizon: int) -> tuple[Ints, Bools, float]:
    """(chosen[D], right[D]) of decisions that can be judged, and the rate of a choice by lot."""
    at = np.flatnonzero(record.decided)
    at = at[at + horizon <= record.bars]
    values = record.own_values
    later = values[at + horizon] / values[at] - 1.0
    above = np.concatenate([later, np.zeros((len(at), 1))], axis=1) > later.mean(axis=1)[:, None]
    chosen = record.in_charge[at]
    right = above[np.arange(len(at)), chosen]
    # Cash may always be chosen, so nobody is divided by.
    allowed = np.concatenate([record.allowed[at], np.ones((len(at), 1), dtype=bool)], axis=1)
    by_lot = (above & allowed).sum(axis=1) / allowed.sum(axis=1)
    return chosen, right, float(by_lot.mean()) if len(at) else math.nan


def _accounts(record: CommandRecord, series: PartSeries, horizon: int) -> tuple[ExpertAccount, ...]:
    choices, rights, _ = _judge_decisions(record, horizon)
    net = np.log(record.own_values[-1] / record.own_values[0])
    gross = gross_returns(record).sum(axis=0)
    total, held = series.total, record.held_shares
    accounts = []
    for k, name in enumerate(record.choices):
        mine = held[:, k]
        right = rights[choices == k]
        is_expert = k < len(record.experts)
        accounts.append(
            ExpertAccount(
                name=name,
                share=float(mine.mean()) if len(mine) else 0.0,
                chosen=int(((record.in_charge == k) & record.decided).sum()),
                in_charge=float((total * mine).sum()),
                own=float(net[k]) if is_expert else 0.0,
                own_gross=float(gross[k]) if is_expert else 0.0,
                hit_rate=float(right.mean()) if len(right) else math.nan,
            )
        )
    return tuple(accounts)


def _part(values: Floats, seed: int, name: str) -> ReturnPart:
    """Sum of values[S], and its interval."""
    mean = mean_interval(values, stream(seed, "attribution", name))
    bars = len(values)
    return ReturnPart(float(values.sum()), mean.low * bars, mean.high * bars, mean.block)
