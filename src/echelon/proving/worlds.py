"""Worlds of drawn histories, in which agents train and policies trade as in prepared ones.

Every split of such a world is its whole draw: draws, not windows, keep train and test apart. An
agent trains on one draw, its checkpoint is chosen on another, and it is tested on draws that nobody
has seen. All test draws are stepped together, one book in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.signal import lfilter

from echelon.backtest.policy import Policy
from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.config.features import FeaturesConfig, NormalizationConfig, StationaryConfig
from echelon.data.panel import Panel
from echelon.envs.act import ActionKind, ActionRule, Holdings
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.features.engine import FeaturePlan, compute
from echelon.features.prepare import SplitLayout, fit_scaler
from echelon.features.registry import select
from echelon.features.scaler import Scaler
from echelon.files import scratch_directory
from echelon.market import PriceHistory, Rows, drawn_market, market_rows
from echelon.ops.measures import sharpe_annual
from echelon.proving.parts import Part
from echelon.runs.checkpoint import below_prefix, best_checkpoint, load_checkpoint
from echelon.training.loop import Outcome
from echelon.training.run import (
    Training,
    Worlds,
    finished_outcome,
    load_policy,
    ready,
    resume_point,
)
from echelon.types import Bools, Floats, Floats32, Times
from echelon.workers import Report, ShouldStop

YEAR = 252.0
"""Bars of a year in every drawn market."""
WARMUP = 60
"""Bars before the first with all features of the stationary set."""
_FIRST_DAY = np.datetime64("2000-01-03", "us")
_DAY = np.timedelta64(1, "D")


class Draw(NamedTuple):
    """One history: hidden state at each bar, open, close, each [T,N]."""

    hidden: Floats
    open: Floats
    close: Floats


def autoregressive(first: Floats, shocks: Floats, persistence: float) -> Floats:
    """[T,N]: `first`[N], then persistence · the row before + shocks[T,N] of the row."""
    driven = np.vstack([first, shocks[1:]])
    return np.asarray(lfilter([1.0], [1.0, -persistence], driven, axis=0))


def planted_worlds(draws: Sequence[Draw], config: Config) -> list[World]:
    """Worlds of draws, features by the configuration, all scaled by the first one."""
    scaler: Scaler | None = None
    worlds = []
    for draw in draws:
        times, symbols = _calendar(draw.close.shape)
        yes = np.ones(draw.close.shape, dtype=bool)
        panel = Panel(
            times=times,
            symbols=symbols,
            close=draw.close,
            present=yes,
            member=yes,
            suspended=~yes,
            tradable=yes,
            delisted=~yes,
            anchor=draw.close[0],
            freq="1d",
            calendar="data",
            timezone="UTC",
            price_basis="adjusted",
            open=draw.open,
        )
        plan = FeaturePlan.from_specs(select(config.features, panel.fields).specs)
        whole = range(panel.shape[0])
        with scratch_directory("worlds") as scratch:
            present, moments = compute(panel, plan, scratch / "X.npy", train=whole)
            raw = np.load(scratch / "X.npy", allow_pickle=False)
        if scaler is None:
            scaler = fit_scaler(config, plan, moments, panel, SplitLayout(0, {"train": whole}))
        x = scaler.transform(raw)
        x[~present] = 0.0
        worlds.append(drawn_world(draw.open, draw.close, x, present, config))
    return worlds


def _calendar(shape: tuple[int, ...]) -> tuple[Times, tuple[str, ...]]:
    """Dates[T] and symbols[N] of a draw of this shape."""
    times = np.asarray(_FIRST_DAY + np.arange(shape[0]) * _DAY)
    return times, tuple(f"P{n}" for n in range(shape[1]))


def drawn_world(open_: Floats, close: Floats, x: Floats32, present: Bools, config: Config) -> World:
    """The world of one draw under the configuration's rules: no lots, no stamp duty.

    open_, close[T,N]: prices; x[T,N,F]: features as the agent sees them; present[T,N]: has them
    """
    times, symbols = _calendar(close.shape)
    yes = np.ones(close.shape, dtype=bool)
    history = PriceHistory(
        times=times,
        symbols=symbols,
        price_basis="adjusted",
        close=close,
        tradable=yes,
        delisted=~yes,
        open=open_,
    )
    whole = range(int(np.flatnonzero(present.all(axis=1))[0]), len(x))
    in_force = drawn_market(config)
    return World(
        rows=market_rows(history, lots=False, stamp_duty=False),
        rules=in_force.resolved.rules,
        x=x,
        present=present,
        member=yes,
        growth=close,
        times=times,
        symbols=symbols,
        splits={"train": whole, "valid": whole, "test": whole},
        window=config.window,
        fill_open=config.market.fill == "open",
        initial_cash=config.market.initial_cash,
        periods_per_year=YEAR,
        benchmark=None,
        ledger={"fill": config.market.fill, "prices": "adjusted", "preset": in_force.preset},
        in_force=in_force,
    )


def join_worlds(worlds: Sequence[World]) -> tuple[World, Rows]:
    """(one world of all the draws' rows in turn, first row to decide at of each draw)."""
    first = worlds[0]
    per_row = {
        name: np.concatenate([getattr(world.rows, name) for world in worlds])
        for name in first.rows._fields
        if len(getattr(first.rows, name)) == len(first.times)
    }
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(world, name) for world in worlds])
        for name in ("x", "present", "member", "growth", "times")
    }
    ends = np.cumsum([len(world.times) for world in worlds])
    starts = np.array([0, *ends[:-1]]) + [world.span("test").start for world in worlds]
    splits = dict.fromkeys(("train", "valid", "test"), range(int(ends[-1])))
    pieces = tuple(range(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True))
    stretches = dict.fromkeys(splits, pieces)
    rows = first.rows._replace(**per_row)
    joined = replace(first, rows=rows, splits=splits, stretches=stretches, **arrays)
    return joined, starts.astype(np.int64)


class Trained(NamedTuple):
    policy: Policy
    outcome: Outcome


class TradedDraws(NamedTuple):
    """What a policy did in D draws: returns[S,D] of its books, traded[S,D] as shares of them."""

    returns: Floats
    traded: Floats

    @property
    def sharpes(self) -> Floats:
        return np.array([sharpe_annual(series, YEAR) for series in self.returns.T])

    @property
    def turnover(self) -> Floats:
        """[D] traded in a year, as a multiple of the book's value; buys and sells both count."""
        return np.asarray(self.traded.mean(axis=0) * YEAR)


def proof_config(config: Config) -> Config:
    """The configuration on a drawn market: its assets, and features that hold on any draw.

    Levels of prices mean nothing from one draw to the next: the stationary set is used, and scaled.
    """
    features = FeaturesConfig(stationary=StationaryConfig(enabled=True))
    changes = {"assets": (), "features": features, "normalization": NormalizationConfig()}
    return config.model_copy(update=changes)


def with_steps(config: Config, steps: int, validations: int | None = None) -> Config:
    """The configuration with at most so many environment steps, and so many validations."""
    total = min(steps, config.train.total_env_steps)
    changes = {"total_env_steps": total}
    if validations is not None:
        # Rounded up: the last validation, at the end of training, is one of them.
        changes["validate_every_steps"] = -(-total // validations)
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def at_fee(config: Config, fee_bps: float) -> Config:
    free = {"commission_bps": None, "min_commission": 0.0, "stamp_duty": "none", "slippage": "none"}
    market = config.market.model_copy(update=free)
    return config.model_copy(update={"fee_rate": fee_bps / 1e4, "market": market})


def train_agent(
    config: Config,
    worlds: Worlds,
    directory: Path,
    seed: int,
    report: Report,
    should_stop: ShouldStop,
) -> Trained | None:
    """Train, or go on, or take what is trained already; None: stopped before the end."""
    outcome = finished_outcome(config, directory)
    if outcome is None:
        if not ready(config, worlds, directory, should_stop):
            return None
        training = Training(config, worlds, directory, seed, resume=resume_point(directory))
        outcome = training.run(report, should_stop)
        if outcome.ending == "stopped":
            return None
    torch.set_num_threads(config.train.threads)
    best = best_checkpoint(directory / "checkpoints")
    if best is None:
        raise StoreError(
            f"{directory}: no validation of this training gave a number, so there is no agent to "
            "test. Train longer, or look at its log (metrics.jsonl)."
        )
    weights = below_prefix("net.", load_checkpoint(best).tensors)
    return Trained(load_policy(config, weights, worlds.train.x.shape[2], seed), outcome)


class SeedWorlds(NamedTuple):
    """Worlds of one seed: to learn in, to choose its checkpoint in, and unseen ones to trade."""

    train: Sequence[World]
    valid: Sequence[World]
    test: Sequence[World]


class TrainingPart(Part):
    """A part with one training by one seed; its subclasses are frozen dataclasses."""

    config: Config
    seed: int

    @property
    def steps(self) -> int:
        return self.config.train.total_env_steps

    def train(
        self,
        config: Config,
        worlds: SeedWorlds,
        directory: Path,
        report: Report,
        should_stop: ShouldStop,
    ) -> Trained | None:
        """Train its agent by `config` in the part's directory; None: stopped before the end."""
        both = (worlds.train, worlds.valid)
        train, valid = (own[0] if len(own) == 1 else join_worlds(own)[0] for own in both)
        place, given = directory / "seeds" / str(self.seed), Worlds(train, valid, self.key)
        return train_agent(config, given, place, self.seed, report, should_stop)


class Arena(NamedTuple):
    """The test windows of D draws in one world: a book in each from starts[D], stepped together."""

    world: World
    starts: Rows
    n_steps: int

    @staticmethod
    def from_draws(draws: Sequence[World]) -> Arena:
        """Of draws whose test windows have the same length."""
        lengths = {len(draw.span("test")) for draw in draws}
        assert len(lengths) == 1, "draws differ in length"
        return Arena(*join_worlds(draws), lengths.pop() - 1)

    def values(self, policy: Policy, config: Config) -> Floats:
        """[S+1,D] values of a policy's books."""
        return run_values(policy, self.world, self.starts, self.n_steps, config)


def trade_draws(
    policy: Policy,
    draws: Sequence[World] | Arena,
    config: Config,
    on_decision: Callable[[], None] = lambda: None,
) -> TradedDraws:
    """Let a policy trade the test window of every draw; on one `Arena` embeddings are shared."""
    arena = draws if isinstance(draws, Arena) else Arena.from_draws(draws)
    starts, n_steps = arena.starts, arena.n_steps
    rule = ActionRule.from_config(config, policy.kind)
    span = range(int(starts.min()), int(starts.max()) + n_steps + 1)
    books = Books(arena.world, rule, RewardConfig(), len(starts), span)
    books.reset(starts)
    policy.start(arena.world, span)
    returns, traded = np.empty((2, n_steps, len(starts)))
    for k in range(n_steps):
        before = books.value.copy()
        decided = policy.decide(books.row, books.holdings())
        on_decision()
        result = books.step(decided)
        amount = np.abs(result.fills.shares * result.fills.price).sum(axis=1)
        returns[k] = result.value / before - 1.0
        traded[k] = amount / before
    return TradedDraws(returns, traded)


def with_test_window(world: World, rows: range) -> World:
    """The world with `rows` as its test window; features still look back before them."""
    return replace(world, splits={**world.splits, "test": rows})


def last_bars(world: World, bars: int) -> World:
    """The world with its last `bars` as the test window."""
    return with_test_window(world, range(len(world.times) - bars, len(world.times)))


class EqualWeight:
    """The baseline `equal_weight` for many draws at once, counting from the first decision."""

    kind: ActionKind = "weights"
    name = "equal_weight"

    def __init__(self, config: Config) -> None:
        self._every = config.eval.rebalance_bars

    def start(self, world: World, span: range) -> None:
        self._steps = 0

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Equal weights at a rebalancing, otherwise what there is."""
        due = self._steps % self._every == 0
        self._steps += 1
        return np.full(held.weights.shape, 1.0 / held.weights.shape[1] if due else np.nan)
