"""Run a policy over a span of bars: the one function behind validation, evaluation and baselines.

It steps one book through the same `Books` that training uses, so that a backtest cannot trade in
another way than the agent learned to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from echelon.backtest.budget import BudgetPolicy, BudgetTrack, find_jumps, under_budget
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs.act import ActionKind, ActionRule
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.market import (
    CostSplit,
    Execution,
    Executor,
    Fills,
    ImmediateExecutor,
    Reason,
    Rows,
    cost_split,
)
from echelon.ops.measures import Costs, measure
from echelon.types import Floats, Floats32, Times

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backtest:
    """What a policy did over S steps of N assets."""

    policy: str
    kind: ActionKind
    symbols: tuple[str, ...]
    times: Times  # [S+1] the first decision's, and after each step
    value: Floats  # [S+1] likewise
    weights: Floats32  # [S+1,N] holdings at each decision, and at the end
    cash_share: Floats32  # [S+1] likewise
    actions: NDArray[np.float64] | NDArray[np.int8]  # [S,N] target weights or `envs.Action`
    fills: Fills  # [S,N] each
    fill_times: Times  # [S] the bar an order was filled at
    periods_per_year: float
    execution: Execution | None = None  # [S,N] each; None: at once, without an executor
    budget: BudgetTrack | None = None  # None: nothing limited the real book
    yardstick: Floats | None = None  # [S] returns that the information ratio is over

    @cached_property
    def returns(self) -> Floats:
        """[S]."""
        return np.asarray(self.value[1:] / self.value[:-1] - 1.0)

    @cached_property
    def traded(self) -> Floats:
        """[S] value of what was bought and sold, as a share of the book's value before it."""
        amount = np.abs(self.fills.shares * self.fills.price).sum(axis=1)
        return np.asarray(amount / np.maximum(self.value[:-1], 1e-12))

    @cached_property
    def costs(self) -> Costs:
        fills = self.fills
        return Costs(
            float(fills.commission.sum()), float(fills.stamp.sum()), float(fills.slippage.sum())
        )

    @cached_property
    def cost_split(self) -> CostSplit:
        """What trading cost, and what for: spread, impact, timing, fees."""
        return cost_split(self.fills, self.execution)

    @cached_property
    def measures(self) -> dict[str, float]:
        return measure(
            self.returns,
            periods_per_year=self.periods_per_year,
            turnover=self.traded,
            exposure=1.0 - self.cash_share[:-1].astype(np.float64),
            costs=self.costs,
            initial_value=float(self.value[0]),
            times=self.times[1:],
            jumped=None if self.budget is None else self.budget.jumped,
            yardstick=self.yardstick,
        )

    def against(self, yardstick: Backtest | None) -> Backtest:
        """The same, measured against another book of the same bars, while this one lasts."""
        if yardstick is None:
            return self
        returns = stack_returns([yardstick.returns], len(self.returns))[:, 0]
        return replace(self, yardstick=returns)

    def equity(self) -> pl.DataFrame:
        """time, value, return (null at the first row), drawdown, cash_share."""
        peak = np.maximum.accumulate(self.value)
        return pl.DataFrame(
            {
                "time": self.times,
                "value": self.value,
                "return": [None, *self.returns.tolist()],
                "drawdown": 1.0 - self.value / peak,
                "cash_share": self.cash_share,
            }
        )

    def blotter(self) -> pl.DataFrame:
        """Every order that was filled or cut: time, symbol, side, shares, price, costs, reason.

        With an executor also: worked, arrival, twap, vwap, spread, impact, timing, cut.
        """
        fills = self.fills
        step, asset = np.nonzero((fills.shares != 0) | (fills.reason != 0))
        shares = fills.shares[step, asset]
        reasons = [Reason(code).name.lower() for code in fills.reason[step, asset].tolist()]
        orders = pl.DataFrame(
            {
                "time": self.fill_times[step],
                "symbol": np.array(self.symbols)[asset],
                "side": np.select([shares > 0, shares < 0], ["buy", "sell"], "none"),
                "shares": np.abs(shares),
                "price": fills.price[step, asset],
                "amount": np.abs(shares) * fills.price[step, asset],
                "commission": fills.commission[step, asset],
                "stamp": fills.stamp[step, asset],
                "slippage": fills.slippage[step, asset],
                "not_filled": pl.Series(
                    [None if r == "none" else r for r in reasons], dtype=pl.String
                ),
            }
        )
        if self.execution is None:
            return orders
        facts = {name: a[step, asset] for name, a in self.execution._asdict().items()}
        return orders.with_columns(**{n: pl.Series(a, nan_to_null=True) for n, a in facts.items()})


def stack_returns(series: Iterable[Floats], length: int | None = None) -> Floats:
    """[T,S] returns of S books side by side; a ruined book earns nothing more.

    length: T, where it is not that of the book that lasted longest
    """
    every = list(series)
    bars = max(map(len, every)) if length is None else length
    return np.column_stack([np.pad(r[:bars], (0, max(0, bars - len(r)))) for r in every])


def run_backtest(
    policy: Policy,
    world: World,
    span: range,
    config: Config,
    executor: Executor | None = None,
    *,
    past: Floats | None = None,
) -> Backtest:
    """Let `policy` trade one book from the first row of `span` to its last.

    executor: works the orders in place of the world's own; past: of the book, see `under_budget`
    """
    if executor is not None:
        world = replace(world, executor=executor)
    policy = under_budget(policy, config, past)
    caps, unscaled = list[float](), list[float]()
    rule = ActionRule.from_config(config, policy.kind)
    books = Books(world, rule, RewardConfig(), 1, span)
    policy.start(world, span)
    n_steps, n_assets = len(span) - 1, world.n_assets
    value = np.empty(n_steps + 1)
    weights = np.empty((n_steps + 1, n_assets), dtype=np.float32)
    cash_share = np.empty(n_steps + 1, dtype=np.float32)
    actions, fills, executions = [], [], []
    value[0] = books.value[0]
    for k in range(n_steps):
        held = books.holdings()
        weights[k], cash_share[k] = held.weights[0], held.cash_share[0]
        decided = policy.decide(books.row, held)
        if isinstance(policy, BudgetPolicy):
            caps.append(float(policy.verdict.cap[0]))
            unscaled.append(float(policy.unscaled[0]))
        result = books.step(decided)
        actions.append(decided[0])
        fills.append(result.fills)
        if result.execution is not None:
            executions.append(result.execution)
        value[k + 1] = result.value[0]
        if result.terminated[0]:
            n_steps = k + 1
            break
    held = books.holdings()
    weights[n_steps], cash_share[n_steps] = held.weights[0], held.cash_share[0]
    rows = np.arange(span.start, span.start + n_steps + 1)
    execution = None
    if executions:
        execution = Execution(*(np.concatenate(parts) for parts in zip(*executions, strict=True)))
    track = None
    if isinstance(policy, BudgetPolicy):
        marks = np.array([*unscaled, float(policy.settle()[0])])
        jumped = find_jumps(value[: n_steps + 1], world, config.risk, past)
        track = BudgetTrack(np.array(caps), marks, jumped, tuple(policy.log))
    backtest = Backtest(
        policy=policy.name,
        kind=policy.kind,
        symbols=world.symbols,
        times=world.times[rows],
        value=value[: n_steps + 1],
        weights=weights[: n_steps + 1],
        cash_share=cash_share[: n_steps + 1],
        actions=np.array(actions),
        fills=Fills(*(np.concatenate(parts) for parts in zip(*fills, strict=True))),
        fill_times=world.times[rows[1:] if world.fill_open else rows[:-1]],
        periods_per_year=world.periods_per_year,
        execution=execution,
        budget=track,
    )
    if world.executor is None or isinstance(world.executor, ImmediateExecutor):
        return backtest
    split = backtest.cost_split
    if split.at_once:
        log.warning(
            "%s: %d of %d fills were at the open, not by %s: their days have no intraday data",
            *(backtest.policy, split.at_once, split.fills, world.executor.name),
        )
    return backtest


def run_values(policy: Policy, world: World, starts: Rows, n_steps: int, config: Config) -> Floats:
    """Values[S+1,E] of E books that `policy` trades side by side, from the rows `starts`[E] on.

    For many runs of one policy when only their returns matter; same steps as `run_backtest`.
    """
    span = range(int(starts.min()), int(starts.max()) + n_steps + 1)
    books = Books(
        world, ActionRule.from_config(config, policy.kind), RewardConfig(), len(starts), span
    )
    books.reset(starts)
    policy.start(world, span)
    value = np.empty((n_steps + 1, len(starts)))
    value[0] = books.value
    for k in range(n_steps):
        value[k + 1] = books.step(policy.decide(books.row, books.holdings())).value
    return value
