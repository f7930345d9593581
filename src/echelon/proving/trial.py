"""What every proof does: train an agent on drawn worlds, and let policies trade many draws at once.

An agent trains on one draw, its checkpoint is chosen on another, and it is tested on draws that
nobody has seen. All test draws are stepped together, one book in each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.config.features import FeaturesConfig, NormalizationConfig, StationaryConfig
from echelon.envs.act import ActionKind, ActionRule, Holdings
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.market import Rows
from echelon.ops.measures import sharpe_annual
from echelon.proving.worlds import join_worlds, single_world
from echelon.runs.checkpoint import below_prefix, best_checkpoint, load_checkpoint
from echelon.training.learners import Worlds, load_policy, ready
from echelon.training.loop import Outcome
from echelon.training.run import Training, finished_outcome, resume_point
from echelon.types import Floats
from echelon.workers import Report, ShouldStop

YEAR = 252.0
"""Bars of a year in every drawn market."""
WARMUP = 60
"""Bars before the first with all features of the stationary set."""


class Trained(NamedTuple):
    """An agent at its best checkpoint, and how its training ended."""

    policy: Policy
    outcome: Outcome


class TradedDraws(NamedTuple):
    """What a policy did in D draws: returns[S,D] of its books, traded[S,D] as shares of them."""

    returns: Floats
    traded: Floats

    @property
    def sharpes(self) -> Floats:
        """[D] annual Sharpe ratios."""
        return np.array([sharpe_annual(series, YEAR) for series in self.returns.T])

    @property
    def turnover(self) -> Floats:
        """[D] traded in a year, as a multiple of the book's value; buys and sells both count."""
        return np.asarray(self.traded.mean(axis=0) * YEAR)


def proof_config(config: Config) -> Config:
    """The configuration on a drawn market: its assets, and features that hold on any draw.

    Levels of prices mean nothing from one draw to the next, so the stationary set is used, and
    scaled whatever the configuration scales of its own features.
    """
    features = FeaturesConfig(stationary=StationaryConfig(enabled=True))
    scaling = NormalizationConfig()
    changes = {"assets": (), "features": features, "normalization": scaling}
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
    """The configuration with a fee per side and no other cost."""
    market = config.market.model_copy(
        update={
            "commission_bps": None,
            "min_commission": 0.0,
            "stamp_duty": "none",
            "slippage": "none",
        }
    )
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

    @staticmethod
    def split(worlds: Sequence[World], n_train: int, n_valid: int) -> SeedWorlds:
        """From worlds one after the other: so many of the first two kinds, the rest unseen."""
        first = n_train + n_valid
        return SeedWorlds(worlds[:n_train], worlds[n_train:first], worlds[first:])


class TrainingPart(ABC):
    """A part with one training by one seed; its subclasses are frozen dataclasses."""

    config: Config
    seed: int

    @property
    @abstractmethod
    def key(self) -> str:
        """Where it is kept."""

    @property
    def steps(self) -> int:
        """Of its training."""
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
        joined = Worlds(single_world(worlds.train), single_world(worlds.valid), self.key)
        place = directory / "seeds" / str(self.seed)
        return train_agent(config, joined, place, self.seed, report, should_stop)


class Arena(NamedTuple):
    """The test windows of some draws in one world: a book in each, stepped together.

    starts[D]: rows of the first decisions; n_steps: of each book
    """

    world: World
    starts: Rows
    n_steps: int

    @staticmethod
    def from_draws(draws: Sequence[World]) -> Arena:
        """Of draws whose test windows have the same length."""
        world, starts = join_worlds(draws)
        n_steps = len(draws[0].span("test")) - 1
        same = all(len(draw.span("test")) == n_steps + 1 for draw in draws)
        assert same, "draws differ in length"
        return Arena(world, starts, n_steps)

    @property
    def span(self) -> range:
        """From the first row of the first book to the last of the last."""
        return range(int(self.starts.min()), int(self.starts.max()) + self.n_steps + 1)


def trade_draws(policy: Policy, draws: Sequence[World] | Arena, config: Config) -> TradedDraws:
    """Let a policy trade the test window of every draw, all draws together.

    Several policies on one `Arena` share what they keep of it, such as experts' embeddings.
    """
    arena = draws if isinstance(draws, Arena) else Arena.from_draws(draws)
    starts, n_steps = arena.starts, arena.n_steps
    rule = ActionRule.from_config(config, policy.kind)
    books = Books(arena.world, rule, RewardConfig(), len(starts), arena.span)
    books.reset(starts)
    policy.start(arena.world, arena.span)
    returns, traded = np.empty((2, n_steps, len(starts)))
    for k in range(n_steps):
        before = books.value.copy()
        result = books.step(policy.decide(books.row, books.holdings()))
        amount = np.abs(result.fills.shares * result.fills.price).sum(axis=1)
        returns[k] = result.value / before - 1.0
        traded[k] = amount / before
    return TradedDraws(returns, traded)


def trade_each(
    policies: Sequence[Policy], draws: Sequence[World], config: Config
) -> list[TradedDraws]:
    """Let each policy trade every draw, all at once: what `trade_draws` gives for each."""
    every = SideBySide(policies, len(draws))
    traded = trade_draws(every, [*draws] * len(policies), config)
    return [TradedDraws(*(part[:, rows] for part in traded)) for rows in every.books]


class SideBySide:
    """Several policies of one kind; the k-th has the k-th stretch of books, `books_each` long."""

    name = "side by side"

    def __init__(self, policies: Sequence[Policy], books_each: int) -> None:
        assert len({policy.kind for policy in policies}) == 1, "policies of several kinds"
        self.kind: ActionKind = policies[0].kind
        self._policies = policies
        self.books = [slice(k * books_each, (k + 1) * books_each) for k in range(len(policies))]

    def start(self, world: World, span: range) -> None:
        """Start them all."""
        for policy in self._policies:
            policy.start(world, span)

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        """Ask each about its own books."""
        return np.concatenate(
            [
                policy.decide(row[books], _part_of(held, books))
                for policy, books in zip(self._policies, self.books, strict=True)
            ]
        )


def _part_of(held: Holdings, books: slice) -> Holdings:
    """What some of the books hold and may do."""
    return Holdings(held.weights[books], held.cash_share[books], held.allowed[books])


def with_test_window(world: World, rows: range) -> World:
    """The world with `rows` as its test window; features still look back before them."""
    return replace(world, splits={**world.splits, "test": rows})


def last_bars(world: World, bars: int) -> World:
    """The world with its last `bars` as the test window."""
    return with_test_window(world, range(len(world.times) - bars, len(world.times)))


class EqualWeight:
    """The same share of every asset, again every so many bars, in many draws at once.

    What `equal_weight` of the baselines does in one: that one counts bars from its own first row,
    and each draw has another. Every asset of a drawn market can be bought at every bar.
    """

    kind: ActionKind = "weights"
    name = "equal_weight"

    def __init__(self, config: Config) -> None:
        self._every = config.eval.rebalance_bars

    def start(self, world: World, span: range) -> None:
        """Count from here."""
        self._steps = 0

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Equal weights at a rebalancing, otherwise what there is."""
        due = self._steps % self._every == 0
        self._steps += 1
        return np.full(held.weights.shape, 1.0 / held.weights.shape[1] if due else np.nan)
