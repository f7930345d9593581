"""The desk: books that every expert trades side by side, in many places at once.

In each of E places stand K + 1 books: one for every expert, and one more, number K, that is traded
by whoever uses the desk. Three uses, one class:

- **own books** (`survey`): each expert trades its own, whoever is in charge;
- **forks** (`MetaEnv`): all are copies of the real book; expert k trades fork k until the next
  decision, the last one goes to cash, and then the fork of the one in charge is the real book;
- **command** (`HierarchyPolicy`): own books, and in the last one the real book as it is commanded.

All books are one `Books`, so a bar is one call of the kernel; each expert is asked once a bar,
about all its books together: what a bar costs hardly depends on E.

Axes: `K` experts, `E` places, `N` assets. Books are stored expert by expert, [K+1,E].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs.act import ActionRule, Holdings
from echelon.envs.books import RUIN, Books
from echelon.envs.world import World
from echelon.errors import ConfigError
from echelon.market import Rows
from echelon.risk import PositionSettings, limit_positions
from echelon.types import Bools, Floats, Floats32, Ints


class Asked(NamedTuple):
    """Target weights, NaN: leave as it is.

    own[K,E,N]: of each expert for its book at the desk
    real[K,E,N]: of each expert for the books that were shown beside them; None where none were
    """

    own: Floats
    real: Floats | None


class Traded(NamedTuple):
    """What a bar brought.

    before, value[K+1,E]: of the books; cost[K+1,E]: commission, duty and slippage, in money
    """

    before: Floats
    value: Floats
    cost: Floats


class Desk:
    """K + 1 books in each of E places; see the module's text."""

    def __init__(
        self, experts: Sequence[Policy], world: World, config: Config, n_places: int, span: range
    ) -> None:
        """span: rows a book may stand at. `experts` must have been started on it."""
        self.world = world
        self.n_experts = len(experts)
        self.n_places = n_places
        self._experts = experts
        rule = ActionRule.from_config(config, "weights")
        n_books = (self.n_experts + 1) * n_places
        self._books = Books(world, rule, RewardConfig(), n_books, span)
        self._held = self._books.holdings()

    @property
    def row(self) -> Rows:
        """[E] where the books stand."""
        return self._books.row[: self.n_places]

    @property
    def value(self) -> Floats:
        """[K+1,E] what the books are worth."""
        return self._books.value.reshape(-1, self.n_places)

    @property
    def weights(self) -> Floats32:
        """[K+1,E,N] what the books hold."""
        return self._held.weights.reshape(self.n_experts + 1, self.n_places, -1)

    def begin(self, rows: Rows, which: Bools) -> None:
        """Give all books of the places `which`[E] new cash and put them at `rows`[E]."""
        n = self.n_experts + 1
        self._books.reset(np.tile(rows, n), np.tile(which, n))
        self._held = self._books.holdings()

    def ask(self, real: Holdings | None = None) -> Asked:
        """What every expert wants to hold in its own book and, if given, in the books `real`[E]."""
        row, width = self.row, self.n_places
        targets = np.empty((self.n_experts, width, self.world.n_assets))
        beside = None if real is None else np.empty_like(targets)
        rows = row if real is None else np.concatenate([row, row])
        for k, expert in enumerate(self._experts):
            own = slice(k * width, (k + 1) * width)
            weights, cash_share, allowed = self._held
            held = Holdings(weights[own], cash_share[own], allowed[own])
            if real is None:
                targets[k] = expert.decide(rows, held)
                continue
            assert beside is not None
            wanted = expert.decide(rows, _together(held, real))
            targets[k], beside[k] = wanted[:width], wanted[width:]
        return Asked(targets, beside)

    def step(self, targets: Floats) -> Traded:
        """Trade all books one bar on; targets[K+1,E,N]."""
        before = self.value
        result = self._books.step(targets.reshape(self._books.n_books, -1))
        self._held = self._books.holdings()
        fills = result.fills
        cost = (fills.commission + fills.stamp + fills.slippage).sum(axis=1)
        return Traded(before, self.value, cost.reshape(before.shape))

    def peek(self, targets: Floats) -> Traded:
        """What `step` would bring; nothing changes."""
        books, held = self._books, self._held
        self._books = books.take(np.arange(books.n_books))
        try:
            return self.step(targets)
        finally:
            self._books, self._held = books, held

    def gather(self, chosen: Ints) -> None:
        """Make all books of each place copies of the one of number `chosen`[E] there."""
        places = np.arange(self.n_places)
        source = np.tile(chosen * self.n_places + places, self.n_experts + 1)
        self._books = self._books.take(source)
        self._held = self._books.holdings()

    def ruined(self) -> Bools:
        """[K+1,E] books that are worth nothing any more."""
        return np.asarray(self.value < RUIN * self.world.initial_cash)


def _together(one: Holdings, other: Holdings) -> Holdings:
    return Holdings(
        np.concatenate([one.weights, other.weights]),
        np.concatenate([one.cash_share, other.cash_share]),
        np.concatenate([one.allowed, other.allowed]),
    )


def started(experts: Sequence[Policy], world: World, span: range) -> None:
    """Make the experts ready for the rows of `span`; refuses those that do not give weights."""
    if not experts:
        raise ConfigError("a hierarchy needs at least one expert, and there is none")
    for expert in experts:
        if expert.kind != "weights":
            raise ConfigError(
                f"expert {expert.name!r} acts by {expert.kind!r}, but only experts by target "
                "weights can be commanded. Train it by SAC or TD3."
            )
        expert.start(world, span)


def first_rows(world: World) -> Rows:
    """[T] for each row the first one on which a book may stand that comes to it.

    Looking back is allowed, but not into another stretch, nor to rows without a whole window.
    """
    first = min(max(rows.start, world.window - 1) for rows in world.splits.values())
    out = np.full(len(world.times), first, dtype=np.int64)
    for pieces in world.stretches.values():
        for piece in pieces:
            inside = slice(piece.start, piece.stop)
            out[inside] = np.maximum(out[inside], piece.start)
    return out


def within_limits(target: Floats, current: Floats32, scale: Floats) -> Floats:
    """Target[B,N] with position limits scaled by scale[B]; current[B,N]: what is held.

    Assets left as they are (NaN) stay so and use up their part of the limit.
    """
    if (scale == 1.0).all():
        return target
    frozen = np.isnan(target)
    stays = np.where(frozen, current, 0.0).sum(axis=1)
    free = limit_positions(np.where(frozen, 0.0, target), PositionSettings(), scale).weights
    total = free.sum(axis=1)
    room = np.maximum(scale - stays, 0.0)
    shrink = np.ones_like(total)
    np.divide(room, total, out=shrink, where=total > room)
    limited = np.where(frozen, np.nan, free * shrink[:, None])
    return np.where((scale == 1.0)[:, None], target, limited)
