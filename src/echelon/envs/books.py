"""Books in a world: E of them stepped together, each at a row of its own.

This is the environment as our own loops use it: observations are row numbers and holdings, never
windows, so that a learner encodes each bar once. The Gymnasium and Stable-Baselines3 faces are
thin covers over it, and so is the backtest.

A step, for each book at its row t: actions become orders (`act`), the kernel fills and marks them
on the clock, the row becomes t + 1, the reward is paid. `truncated`: the span ends here; learners
bootstrap. `terminated`: the book is ruined.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.config.agents import RewardConfig
from echelon.envs import act, rewards
from echelon.envs.act import ActionRule, Holdings
from echelon.envs.world import World
from echelon.errors import DataError
from echelon.market import Book, Execution, Fills, Orders, Reason, Rows, new_book, step, step_worked
from echelon.types import Bools, Floats

RUIN = 1e-6  # a book that is worth less than this share of its initial cash is ruined


class StepResult(NamedTuple):
    """What a step brought: [E], and [E,N] of the orders."""

    reward: Floats
    value: Floats
    terminated: Bools
    truncated: Bools
    fills: Fills
    execution: Execution | None = None  # None where the world has no executor


class Books:
    def __init__(
        self, world: World, rule: ActionRule, reward: RewardConfig, n_books: int, span: range
    ) -> None:
        """span: rows a book may stand at; at its last one the episode is truncated.

        It may end after the rows that a growing world has so far: a book can stand at its newest
        row, and is stepped when there is one more.
        """
        self.world = world
        self.rule = rule
        self.reward_config = reward
        self.span = span
        self.rules = act.rules_for(world.rules, rule.kind)
        self._all_buyable = _all_buyable(world, span)
        returns = {"excess": _benchmark_returns, "active": equal_weight_returns}.get(reward.kind)
        self._benchmark = None if returns is None else returns(world, span)
        cash = np.full(n_books, world.initial_cash)
        self.book = new_book(cash, n_books, world.n_assets)
        self.value = cash
        self.row: Rows = np.full(n_books, span.start, dtype=np.int64)
        self.reward_state = rewards.new_state(cash, reward)

    @property
    def n_books(self) -> int:
        return len(self.value)

    def reset(self, rows: Rows, which: Bools | None = None) -> None:
        """Give the books `which`[E] (all by default) new cash and put them at `rows`[E]."""
        chosen = np.ones(self.n_books, dtype=bool) if which is None else which
        assert rows.shape == self.row.shape, "rows is not [E]"
        cash, pick = self.world.initial_cash, chosen[:, None]
        shares, locked = (np.where(pick, 0.0, part) for part in self.book[1:])
        self.book = Book(np.where(chosen, cash, self.book.cash), shares, locked)
        self.row = np.where(chosen, rows, self.row)
        self.value = np.where(chosen, cash, self.value)
        self.reward_state = rewards.restart(self.reward_state, self.value, chosen)

    def take(self, which: Rows) -> Books:
        """Copies of the books `which`[E'], in that order, any of them any number of times."""
        taken, state = copy.copy(self), self.reward_state
        taken.book = Book(*(part[which] for part in self.book))
        taken.value, taken.row = self.value[which], self.row[which]
        per_book = ("peak", "drawdown", "mean", "square")
        taken.reward_state = state._replace(**{k: getattr(state, k)[which] for k in per_book})
        return taken

    def holdings(self) -> Holdings:
        return act.holdings(self.world, self.book, self.value, self.row, self.rule)

    def orders(self, actions: NDArray[Any]) -> tuple[Orders, Bools | None]:
        """(orders[E,N] of actions[E,N], which buys were left out [E,N]); None: none were."""
        world, close = self.world, self.world.rows.close[self.row]
        if self.rule.kind == "discrete":
            orders = act.discrete_orders(
                actions, self.book, self.rule, close, world.rows.lot, world.rules.min_value
            )
        else:
            orders = act.weight_orders(act.cap_weights(actions), self.book, self.value, close)
        if self._all_buyable:
            return orders, None
        return act.members_only(orders, world.present[self.row] & world.member[self.row])

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Go one bar on by actions[E,N]: `act.Action`, or target weights (NaN: leave as is)."""
        return self.fill(*self.orders(actions))

    def fill(self, orders: Orders, refused: Bools | None = None) -> StepResult:
        """Go one bar on by orders[E,N]; refused[E,N]: buys that `orders` left out of them."""
        assert (self.row < self.span.stop - 1).all(), "a book is past the end of its span"
        world, before, execution = self.world, self.value, None
        if world.executor is None:
            stepped = step(
                self.book, orders, world.rows, self.row, self.rules, fill_open=world.fill_open
            )
        else:
            stepped, execution = step_worked(
                self.book, orders, world.rows, self.row, self.rules, world.executor
            )
        if refused is not None:
            stepped.fills.reason[refused] = Reason.NOT_MEMBER
        benchmark = None if self._benchmark is None else self._benchmark[self.row]
        paid, self.reward_state = rewards.reward(
            self.reward_state, before, stepped.value, benchmark, self.reward_config
        )
        self.book, self.value, self.row = stepped.book, stepped.value, self.row + 1
        ruined, ended = self.value < RUIN * world.initial_cash, self.row >= self.span.stop - 1
        return StepResult(paid, self.value, ruined, ended, stepped.fills, execution)

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything a continuation depends on, as arrays."""
        arrays = {"value": self.value, "row": self.row, **self.book._asdict()}
        memory = {f"reward.{k}": np.asarray(v) for k, v in self.reward_state._asdict().items()}
        return arrays | memory

    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave; ValueError where that is not of books like these."""
        own = self.state()
        for name, part in own.items():
            if state[name].shape != part.shape or state[name].dtype != part.dtype:
                raise ValueError(
                    f"{name} is {state[name].dtype}{list(state[name].shape)}, expected "
                    f"{part.dtype}{list(part.shape)}"
                )
        rows = state["row"]
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self.world.times):
            raise ValueError(f"a row outside of the {len(self.world.times)} there are")
        self.value, self.row = state["value"], state["row"]
        self.book = Book(*(state[name] for name in Book._fields))
        memory = {k: state[f"reward.{k}"] for k in rewards.RewardState._fields}
        cursor = int(memory.pop("cursor"))
        self.reward_state = rewards.RewardState(**memory, cursor=cursor)


def _all_buyable(world: World, span: range) -> bool:
    """Whether everything may be bought at every row of the span; no, where not all are known."""
    rows = slice(span.start, span.stop)
    if span.stop > len(world.times) or span.start < world.kept.start:
        return False
    return bool((world.present[rows] & world.member[rows]).all())


def equal_weight_returns(world: World, span: range) -> Floats:
    """[T] mean return, from each row to the next, of what may be bought there; NaN outside the
    span. Where nothing may be bought it is 0: as there, everything is in cash.
    """
    rows = slice(span.start, span.stop - 1)
    before, after = world.growth[rows], world.growth[span.start + 1 : span.stop]
    known = world.present[rows] & world.member[rows] & (before > 0.0) & np.isfinite(after)
    moved = np.where(known, after / np.where(known, before, 1.0) - 1.0, 0.0)
    returns = np.full(len(world.times), np.nan)
    returns[rows] = moved.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return returns


def _benchmark_returns(world: World, span: range) -> Floats:
    """[T] return of the benchmark from each row to the next; NaN outside the span."""
    if world.benchmark is None:
        raise DataError(
            "reward.kind is 'excess', but the data have no benchmark index. Name one by "
            "data.benchmark, or choose another reward.kind."
        )
    level = np.asarray(world.benchmark, dtype=np.float64)
    returns = np.full(len(level), np.nan)
    rows = np.arange(span.start, span.stop - 1)
    returns[rows] = level[rows + 1] / level[rows] - 1.0
    bad = rows[~np.isfinite(returns[rows])]
    if len(bad):
        raise DataError(
            f"reward.kind is 'excess', but the benchmark has no level at {world.times[bad[0]]} or "
            f"the bar after it ({len(bad)} such bars). Shorten the split or choose another reward."
        )
    return returns
