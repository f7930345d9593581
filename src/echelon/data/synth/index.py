"""The index of a synthetic market: who is in it, and its level.

Reviews every quarter take the largest companies by market capitalisation at the close before;
incumbents get a bonus, so that names near the edge do not go in and out. A member that delists
leaves that day and the largest company outside takes its place. The level is a total-return one:
each day's return is that of the members as of that morning, weighted by their capitalisation at
the close before. Suspended members count at their last price.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from echelon.data.panel import forward_fill
from echelon.data.synth.market import SyntheticMarket
from echelon.data.synth.minutes import BLOCK, MinuteEngine, aggregate
from echelon.data.synth.path import TICKS_PER_UNIT, SymbolPath, trace
from echelon.types import Bools, Floats

REVIEW_EVERY = 63
INCUMBENT_BONUS = 1.15
FIRST_LEVEL = 1000.0  # level of the index at the close before the first session


class MembershipSpan(NamedTuple):
    """Symbol `n` is in the index from session `start` to before `end`; None: still in."""

    n: int
    start: int
    end: int | None


def index_membership(market: SyntheticMarket) -> tuple[MembershipSpan, ...]:
    """Membership intervals of all symbols, by symbol and then by start."""
    reviews = set(range(0, market.n_days, REVIEW_EVERY))
    exits = {int(d) for d in market.delisted if d < market.n_days}
    days = np.array(sorted(reviews | exits))
    capital = np.stack([_prior(trace(market, n))[1][days] for n in range(market.n_symbols)])
    since: dict[int, int] = {}
    intervals: list[MembershipSpan] = []
    for at, day in enumerate(days.tolist()):
        alive = np.asarray((market.listed < max(day, 1)) & (market.delisted > day))
        gone = [n for n in since if not alive[n]]
        intervals.extend(MembershipSpan(n, since.pop(n), day) for n in gone)
        # Between reviews incumbents stay whatever their size; only free places are filled.
        bonus = INCUMBENT_BONUS if day in reviews else np.inf
        score = np.where(alive, capital[:, at], -1.0)
        score[list(since)] *= bonus
        places = min(market.config.index_size, int(alive.sum()))
        chosen: list[int] = np.argsort(-score, kind="stable")[:places].tolist()
        dropped = [n for n in since if n not in chosen]
        intervals.extend(MembershipSpan(n, since.pop(n), day) for n in dropped)
        for n in chosen:
            since.setdefault(n, day)
    intervals.extend(MembershipSpan(n, start, None) for n, start in since.items())
    return tuple(sorted(intervals, key=lambda i: (i.n, i.start)))


def index_levels(
    market: SyntheticMarket, intervals: Iterable[MembershipSpan], step: int | None = None
) -> Floats:
    """Level of the index at each bar's end: [T], or [T, bars] of `step` minutes where given."""
    engine = MinuteEngine(market)
    bars = 1 if step is None else -(-market.config.minutes_per_day // step)
    worth, before = np.zeros((market.n_days, bars)), np.zeros(market.n_days)
    member: dict[int, Bools] = {}
    for n, start, end in intervals:
        member.setdefault(n, np.zeros(market.n_days, dtype=np.bool_))[start:end] = True
    for n in sorted(member):
        path, days = trace(market, n), np.flatnonzero(member[n])
        price, capital = _prior(path)
        if step is None:
            prices = _carried_close(path)[:, None]
        else:  # the prior price where no bar trades
            prices = np.repeat(price[:, None], bars, axis=1)
            blocks = (engine.block(path, b) for b in range(path.listed // BLOCK, engine.n_blocks))
            for made in (block for block in blocks if block is not None):
                closes = aggregate(made, step).close
                prices[made.days] = closes / TICKS_PER_UNIT * path.factor[made.days, None]
        growth = prices[days] / price[days, None]
        worth[days] += capital[days, None] * growth
        before[days] += capital[days]
    # A day without any member leaves the level where it was.
    growth = np.divide(worth, before[:, None], out=np.ones_like(worth), where=before[:, None] > 0)
    opening = np.concatenate([[1.0], np.cumprod(growth[:-1, -1])])
    levels = FIRST_LEVEL * opening[:, None] * growth
    return levels[:, 0] if step is None else levels


def _carried_close(path: SymbolPath) -> Floats:
    """Total-return close, carried through suspensions and after the end, [T]."""
    return forward_fill((path.close_ticks / TICKS_PER_UNIT * path.factor)[:, None])[:, 0]


def _prior(path: SymbolPath) -> tuple[Floats, Floats]:
    """Total-return price and capitalisation at the close before each session, [T]; 0 unlisted."""
    price, capital = np.zeros(len(path.trades)), np.zeros(len(path.trades))
    close = forward_fill((path.close_ticks / TICKS_PER_UNIT)[:, None])[:, 0]
    first = path.listed
    price[first] = path.pre_ticks[first] / TICKS_PER_UNIT
    capital[first] = price[first] * path.shares[first]
    price[first + 1 :] = _carried_close(path)[first:-1]
    worth = close * forward_fill(path.shares[:, None])[:, 0]
    capital[first + 1 :] = worth[first:-1]
    return price, capital
