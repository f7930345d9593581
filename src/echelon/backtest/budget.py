"""The real book under risk limits that hold for every policy: `risk.max_drawdown` and volatility.

`run_backtest` and the decision engine put every policy behind a `BudgetPolicy` where the
configuration sets one of the two, so agents, hierarchies, ensembles and baselines are scaled alike,
and live as in the backtest. At the close of each bar:

1. A book of the policy's own, without any limit, has gone one bar on: the same kernel, the same
   market, the same money at first. The policy is asked about that book only, so it decides as it
   would without limits, by whatever kind of action, and what it leaves as it is drifts there.
2. What that book will hold by its orders is the wish. `ExposureBudget` says which share of it the
   real book may hold: by the real book's drawdown and by the volatility of the book without limit.
3. The real book's target is that share of the wish: of all assets, where what it holds is off by
   more than a band; else only of those the policy trades, at the share that is held at present.

Axes: `E` books, `N` assets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from echelon.backtest.policy import Policy, StatefulPolicy, lookback_of
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.config.hierarchy import RiskConfig
from echelon.envs.act import ActionKind, ActionRule, Holdings, cap_weights, free
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.market import Orders, Rows
from echelon.risk._memory import below_peak
from echelon.risk.budget import PEAK_DAYS, BudgetVerdict, ExposureBudget
from echelon.risk.events import RiskEvent, RiskLog
from echelon.states import State, below_prefix, copy_state, match_state, with_prefix
from echelon.types import Bools, Floats

_BAND = 0.05
"""Shares that are nearer to the cap than this are left; the first per cent below all of it too."""
_WHOLE_BAND = 0.01
_LAST_EVENTS = 1_000


class BudgetTrack(NamedTuple):
    """How a backtest of S steps was limited.

    cap[S]: share of the wish that might be held; unscaled[S+1]: value of the book without limits
    jumped[S]: the drawdown went beyond the budget at the bar after that decision
    """

    cap: Floats
    unscaled: Floats
    jumped: Bools
    events: tuple[RiskEvent, ...]


def is_limited(risk: RiskConfig) -> bool:
    """Whether real books are scaled."""
    limits = risk.max_drawdown, risk.target_volatility
    return risk.enabled and any(limit is not None for limit in limits)


def under_budget(policy: Policy, config: Config, past: Floats | None = None) -> Policy:
    """The policy as its real book is traded; itself where nothing limits it, or it is already.

    past[H,2]: earlier values of the book, and of it without limits, which its peak goes on from
    """
    if isinstance(policy, BudgetPolicy) or not is_limited(config.risk):
        return policy
    return BudgetPolicy(policy, config, past)


def decider(policy: Policy) -> Policy:
    """The policy that decides what is wanted, without the limits of the real book."""
    return policy.policy if isinstance(policy, BudgetPolicy) else policy


def find_jumps(value: Floats, world: World, risk: RiskConfig, past: Floats | None) -> Bools:
    """[S] whether the drawdown of value[S+1] went beyond the budget at each step."""
    if risk.max_drawdown is None:
        return np.zeros(len(value) - 1, dtype=np.bool_)
    before = np.empty(0) if past is None else past[:, 0] / past[-1, 0] * value[0]
    marks = pl.Series(np.concatenate([before, value]))
    peak = marks.rolling_max(PEAK_DAYS * world.bars_per_day + 1, min_samples=1).to_numpy()
    over = below_peak(peak, marks.to_numpy())[len(before) :] > risk.max_drawdown
    return np.asarray(over[1:] & ~over[:-1])


class BudgetPolicy:
    """A policy whose real book is scaled; see the module's text."""

    kind: ActionKind = "weights"

    def __init__(self, policy: Policy, config: Config, past: Floats | None = None) -> None:
        """past: see `under_budget`"""
        self.policy, self.config, self.name = policy, config, policy.name
        self._past = past
        self.log = RiskLog(most=_LAST_EVENTS)
        """What the limits did in the present run; times count bars of the book."""
        self._run: _Run | None = None

    @property
    def lookback(self) -> int:
        return lookback_of(self.policy)

    def start(self, world: World, span: range) -> None:
        self._world, self._span, self._run = world, span, None
        self.log = RiskLog(most=_LAST_EVENTS)
        self.policy.start(world, span)

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Target weights[E,N] of the real books at `row`[E]; NaN: leave as it is."""
        run = self._run
        if run is not None and np.array_equal(row, run.books.row + 1):
            run.advance()
        else:
            run = self._run = self._new_run(row)
            if self._past is not None:
                run.budget.remember(self._past, held.value)
        target = run.decide(self.policy, held)
        bars = run.books.row - run.start
        events = run.budget.events(run.verdict, 0)
        self.log.extend(replace(event, time=int(bars[event.book])) for event in events)
        return target

    @property
    def verdict(self) -> BudgetVerdict:
        """Of the last decision."""
        assert self._run is not None, "nothing was decided yet"
        return self._run.verdict

    @property
    def unscaled(self) -> Floats:
        """[E] values of the books without limits at the last decision."""
        assert self._run is not None, "nothing was decided yet"
        return self._run.books.value

    def settle(self) -> Floats:
        """[E] the same one bar later; nothing is decided after it."""
        assert self._run is not None, "nothing was decided yet"
        self._run.advance()
        return self._run.books.value

    def state(self) -> State:
        """All that the next decision depends on beside the world and the real books."""
        inner = self.policy.state() if isinstance(self.policy, StatefulPolicy) else {}
        parts = with_prefix("policy.", inner)
        return parts if self._run is None else parts | with_prefix("run.", self._run.state())

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        if isinstance(self.policy, StatefulPolicy):
            self.policy.restore(below_prefix("policy.", state))
        run = below_prefix("run.", state)
        if not run:
            return
        row = run.get("books.row")
        if row is None or row.ndim != 1 or row.dtype != np.int64:
            raise StoreError(
                "the saved drawdown budget says no rows[E] of its books. Restore what state() gave."
            )
        self._run = self._new_run(row)
        self._run.restore(run)

    def _new_run(self, row: Rows) -> _Run:
        rule = ActionRule.from_config(self.config, self.policy.kind)
        books = Books(self._world, rule, RewardConfig(), len(row), self._span)
        books.reset(row)
        return _Run(books, self.config.risk)


class _Run:
    """E books that began together."""

    verdict: BudgetVerdict

    def __init__(self, books: Books, risk: RiskConfig) -> None:
        world = books.world
        self.books, self.start = books, books.row
        rate, day = world.periods_per_year, world.bars_per_day
        self.budget = ExposureBudget(books.n_books, risk, rate, day)
        shape = (books.n_books, world.n_assets)
        self._orders, self._refused = Orders(*np.zeros((2, *shape))), np.zeros(shape, dtype=bool)

    def advance(self) -> None:
        """The books without limits go one bar on, by the orders of the last decision."""
        self.books.fill(self._orders, self._refused)

    def decide(self, policy: Policy, held: Holdings) -> Floats:
        """Target weights[E,N] of the real books that hold `held`."""
        books = self.books
        own = books.holdings()
        orders, refused = books.orders(policy.decide(books.row, own))
        self._orders = orders
        self._refused = np.zeros_like(self._refused) if refused is None else refused
        self.verdict = self.budget.update(held.value, books.value)
        wish, moved = _wish(books, orders)
        return _target(wish, moved, own, held, self.verdict.cap)

    def state(self) -> State:
        parts = copy_state(self._numbers())
        parts |= with_prefix("books.", copy_state(self.books.state()))
        return parts | with_prefix("budget.", self.budget.flat_state())

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        what = "drawdown budget"
        numbers = match_state(what, self._numbers(), state)
        books = match_state(what, self.books.state(), below_prefix("books.", state))
        try:
            self.books.restore(books)
        except ValueError as error:
            raise StoreError(
                f"the saved drawdown budget: {error}. Restore the world that it was saved with "
                "first."
            ) from None
        self.budget.restore_flat(below_prefix("budget.", state))
        self.start, self._refused = numbers["start"], numbers["refused"]
        self._orders = Orders(numbers["shares"], numbers["spend"])

    def _numbers(self) -> State:
        return {"start": self.start, "refused": self._refused, **self._orders._asdict()}


def _wish(books: Books, orders: Orders) -> tuple[Floats, Bools]:
    """(weights[E,N] that the books will hold by their orders, at this close; moved[E,N])."""
    close, value = books.world.rows.close[books.row], np.maximum(books.value, 1e-12)[:, None]
    # Under the 20/50 rule buys are served in the order of assets, while the cash lasts.
    served = np.cumsum(orders.spend, axis=1) <= books.book.cash[:, None] * (1.0 + 1e-9)
    spend = np.where(served, orders.spend, 0.0)
    money = (books.book.shares + orders.shares) * close + spend
    return cap_weights(money / value), (orders.shares != 0.0) | (spend > 0.0)


def _target(wish: Floats, moved: Bools, own: Holdings, held: Holdings, cap: Floats) -> Floats:
    """Target weights[E,N]; own: of the books without limits, held: of the real ones."""
    invested, real = (h.weights.sum(axis=1, dtype=np.float64) for h in (own, held))
    share = np.where(invested > 1e-9, real / np.maximum(invested, 1e-9), cap)
    band = np.where(cap < 1.0, _BAND, _WHOLE_BAND)
    near = (np.abs(share - cap) <= band) & (cap > 0.0)
    scale = np.where(near, np.minimum(share, 1.0), cap)[:, None]
    due = (moved | ~near[:, None]) & free(held)
    due &= (wish > 0.0) | (held.weights > 0.0)
    return np.where(due, scale * wish, np.nan)
