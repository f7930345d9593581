"""The experts' books: traded side by side in many places at once, and how each stands.

In each of E places stand K books (`ExpertBooks`), one for every expert. Two uses, one class:

- **own books** (`survey`, `HierarchyPolicy`): each expert trades its own, whoever is in charge;
- **forks** (`MetaEnv`): all are copies of the real book; expert k trades fork k until the next
  decision, one more, number K, goes to cash, and then the fork of the one in charge is the real
  book.

All books are one `Books`, so a bar is one call of the kernel; each expert is asked once a bar,
about its books in all places together: what a bar costs hardly depends on E.

`ExpertStanding` follows own books as they are traded: their past for the router's observation, and
the two guards that judge experts by them (`DrawdownGuard` masks, `CvarGuard` scales). `survey`
trades them over whole spans and keeps how they stood at every row. Own books depend on nobody but
the experts, so for the router's training they are traded once for each state of the experts, and
looked up by however many environments visit a row; policies trade theirs bar by bar.

Axes: `K` experts, `E` places, `N` assets, `T` rows of the world, `H` horizons. Books are stored
expert by expert, [K,E], those that go to cash after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs.act import ActionRule
from echelon.envs.books import RUIN, Books
from echelon.envs.world import World
from echelon.errors import ConfigError, DataError, StoreError
from echelon.market import Rows
from echelon.population.reference_policies import HedgeRouter
from echelon.population.router_task import (
    ExpertView,
    Trail,
    macro_view,
    market_view,
    refuse_macro,
)
from echelon.risk.cvar import CvarGuard, CvarVerdict
from echelon.risk.drawdown import DrawdownGuard, DrawdownVerdict
from echelon.risk.portfolio import limit_positions
from echelon.states import State, below_prefix, copy_state, match_state, with_prefix
from echelon.types import Bools, Floats, Floats32, Ints

_PIECE_ROWS = 500  # most rows that one place trades; longer spans go in pieces, side by side
_SIDE_BY_SIDE = 16  # pieces that a short window is cut into
_LEAST_ROWS = 120  # rows that a piece has at least: each is traded behind a warm-up of its own


class BookStep(NamedTuple):
    """Values[K,E] after a bar; cost[K,E]: of trading, as a share of the value before it.

    [K+1,E] each where one more goes to cash.
    """

    value: Floats
    cost: Floats


class ExpertBooks:
    """K books in each of E places, or K + 1; see the module's text."""

    def __init__(
        self,
        experts: Sequence[Policy],
        world: World,
        config: Config,
        n_places: int,
        span: range,
        *,
        cash: bool = False,
    ) -> None:
        """span: rows a book may stand at; `experts` must have been started on it.

        cash: in each place one more book, number K, goes to cash
        """
        self.world = world
        self.n_experts = len(experts)
        self.n_places = n_places
        self._experts = experts
        self._n = len(experts) + cash
        rule, n_books = ActionRule.from_config(config, "weights"), self._n * n_places
        self._books = Books(world, rule, RewardConfig(), n_books, span)
        self._held = self._books.holdings()

    @property
    def row(self) -> Rows:
        """[E] where the books stand."""
        return self._books.row[: self.n_places]

    @property
    def value(self) -> Floats:
        """[K,E], or [K+1,E]: what the books are worth."""
        return self._books.value.reshape(-1, self.n_places)

    @property
    def weights(self) -> Floats32:
        """[K,E,N] what the experts' books hold."""
        held = self._held.weights.reshape(self._n, self.n_places, -1)
        return held[: self.n_experts]

    def begin(self, rows: Rows, which: Bools) -> None:
        """Give all books of the places `which`[E] new cash and put them at `rows`[E]."""
        self._books.reset(np.tile(rows, self._n), np.tile(which, self._n))
        self._held = self._books.holdings()

    def ask(self) -> Floats:
        """Target weights[K,E,N] that every expert wants in its own books; NaN: as it is."""
        row, width = self.row, self.n_places
        wanted = np.empty((self.n_experts, width, self.world.n_assets))
        for k, expert in enumerate(self._experts):
            wanted[k] = expert.decide(row, self._held.take(slice(k * width, (k + 1) * width)))
        return wanted

    def step(self, targets: Floats) -> BookStep:
        """Trade all books one bar on; targets[K,E,N] of the experts' books."""
        before = self.value
        actions = targets.reshape(-1, targets.shape[-1])
        if self._n > self.n_experts:
            actions = np.concatenate([actions, np.zeros((self.n_places, actions.shape[1]))])
        fills = self._books.step(actions).fills
        self._held = self._books.holdings()
        cost = (fills.commission + fills.stamp + fills.slippage).sum(axis=1).reshape(before.shape)
        return BookStep(self.value, cost / np.maximum(before, 1e-12))

    def peek(self, targets: Floats) -> BookStep:
        books, held = self._books, self._held
        self._books = books.take(np.arange(books.n_books))
        try:
            return self.step(targets)
        finally:
            self._books, self._held = books, held

    def state(self) -> State:
        return copy_state(self._books.state())

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        taken = match_state("own books", self._books.state(), state)
        try:
            self._books.restore(taken)
        except ValueError as error:
            raise StoreError(
                f"the saved own books: {error}. Restore the world that they were saved with first."
            ) from None
        self._held = self._books.holdings()

    def gather(self, chosen: Ints) -> None:
        """Make all books of each place copies of the one of number `chosen`[E] there."""
        places = np.arange(self.n_places)
        source = np.tile(chosen * self.n_places + places, self._n)
        self._books = self._books.take(source)
        self._held = self._books.holdings()

    def is_ruined(self) -> Bools:
        """[K,E], or [K+1,E]: books that are worth nothing any more."""
        return np.asarray(self.value < RUIN * self.world.initial_cash)


def start_experts(experts: Sequence[Policy], world: World, span: range) -> None:
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


def within_limits(target: Floats, current: Floats32, scale: Floats) -> Floats:
    """Target[B,N] with position limits scaled by scale[B]; current[B,N]: what is held.

    Assets left as they are (NaN) stay so and use up their part of the limit.
    """
    if (scale == 1.0).all():
        return target
    frozen = np.isnan(target)
    stays = np.where(frozen, current, 0.0).sum(axis=1)
    free = limit_positions(np.where(frozen, 0.0, target), scale)
    total = free.sum(axis=1)
    room = np.maximum(scale - stays, 0.0)
    shrink = np.ones_like(total)
    np.divide(room, total, out=shrink, where=total > room)
    limited = np.where(frozen, np.nan, free * shrink[:, None])
    return np.where((scale == 1.0)[:, None], target, limited)


class Verdicts(NamedTuple):
    drawdown: DrawdownVerdict
    cvar: CvarVerdict


class ExpertStanding:
    """How K experts stand in E places, by the values of their own books."""

    def __init__(
        self, n_places: int, n_experts: int, config: Config, bars_per_day: int = 1
    ) -> None:
        self.shape = (n_places, n_experts)
        self._enabled = config.risk.enabled
        self._trail = Trail(n_places, n_experts, config.meta_router.horizons)
        self._limit = config.risk.drawdown_limit
        self._prior = HedgeRouter() if config.meta_router.prior != "none" else None
        self.drawdown = DrawdownGuard(n_places, n_experts + 1, n_experts, config.risk, bars_per_day)
        self.cvar = CvarGuard(self.shape, config.risk)
        self._value: Floats = np.ones(self.shape)
        self._first: Floats = np.ones(self.shape)
        self._lost: Floats = np.zeros(self.shape)
        self.returns: Floats = np.zeros(self.shape)
        """[E,K] of the last bar; 0 in books that begin."""

    def mark(self, value: Floats, fresh: Bools, in_charge: Ints) -> Verdicts:
        """Take the values[E,K] at a close; fresh[E]: books that begin there.

        in_charge[E]: who traded up to this close, K for cash, −1 for nobody
        """
        begins = fresh[:, None]
        self._first = np.where(begins, value, self._first)
        # A ruined book has no returns any more; its guard knows.
        worth = np.where(self._value > 0.0, self._value, 1.0)
        self.returns = np.where(begins, 0.0, value / worth - 1.0)
        self._value = value.copy()
        self._trail.push(value / self._first, fresh)
        if self._prior is not None:
            self._prior.follow(self.returns, fresh)
        if fresh.any():
            self.drawdown.restart(fresh)
        cash = np.ones((len(value), 1))
        masked = self.drawdown.update(np.concatenate([value, cash], axis=1), in_charge)
        self._lost = masked.drawdown[:, :-1]
        scaled = self.cvar.update(self.returns)
        if fresh.any():
            self.cvar.restart(fresh)
        return Verdicts(masked, scaled)

    def state(self) -> State:
        parts = with_prefix("trail.", self._trail.state())
        parts |= with_prefix("drawdown.", self.drawdown.flat_state())
        parts |= with_prefix("cvar.", self.cvar.flat_state())
        if self._prior is not None:
            parts |= with_prefix("prior.", self._prior.memory())
        return parts | copy_state(self._marks())

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        marks = match_state("standing of the experts", self._marks(), state)
        self._trail.restore(below_prefix("trail.", state))
        self.drawdown.restore_flat(below_prefix("drawdown.", state))
        self.cvar.restore_flat(below_prefix("cvar.", state))
        if self._prior is not None:
            self._prior.recall(below_prefix("prior.", state))
        self._value, self._first, self._lost, self.returns = marks.values()

    def _marks(self) -> State:
        return {
            "value": self._value,
            "first": self._first,
            "lost": self._lost,
            "returns": self.returns,
        }

    @property
    def allowed(self) -> Bools:
        """[E,K] whom the router may choose."""
        if not self._enabled:
            return np.ones(self.shape, dtype=np.bool_)
        return self.drawdown.allowed[:, :-1]

    @property
    def scale(self) -> Floats:
        """[E,K] of the position limits."""
        return self.cvar.scale if self._enabled else np.ones(self.shape)

    def view(self) -> ExpertView:
        """What the router sees of the experts."""
        relative, level = self._trail.returns()
        lost = np.nan_to_num(self._lost, nan=1.0) / self._limit
        trust = np.zeros((len(lost), 0)) if self._prior is None else np.log(self._prior.trust)
        return ExpertView(
            relative,
            level,
            *(lost.astype(np.float32), self.allowed, self.scale.astype(np.float32)),
            trust.astype(np.float32),
        )


class Survey(NamedTuple):
    """Own books over the rows of `spans`; elsewhere nothing is known. view[T,…], market[T,M]."""

    spans: tuple[range, ...]
    view: ExpertView
    market: Floats32


def survey(
    experts: Sequence[Policy],
    world: World,
    spans: Sequence[range],
    config: Config,
    market: Floats32 | None = None,
) -> Survey:
    """Let the experts trade their own books over the rows of `spans`.

    Every piece of a span begins `warm_bars` before its first row, where there are so many.
    market: the world's `market_view` and `macro_view`, where they are known already
    """
    spans = tuple(spans)
    if not spans or min(len(span) for span in spans) < 2:
        raise DataError(
            f"rows to survey: {[f'{s.start}:{s.stop}' for s in spans]}; expected spans of at least "
            "2 rows, one to decide at and one to be marked at. Lengthen the router's window "
            "(meta_router.window_share)."
        )
    every = np.arange(len(world.times))
    first = world.first_rows(every)
    plan = _Pieces.from_spans(spans, first, warm_bars(config))
    whole = range(int(plan.begin.min()), int(plan.stop.max()))
    start_experts(experts, world, whole)
    books = ExpertBooks(experts, world, config, len(plan.begin), whole)
    if market is None:
        meta = config.meta_router
        refuse_macro(world, meta.macro)
        parts = market_view(world, first, meta.horizons), macro_view(world, every, meta.macro)
        market = np.concatenate(parts, axis=1)
    return Survey(spans, _walk(books, plan, config), market)


class _Pieces(NamedTuple):
    """Pieces to be traded side by side, [P] each: begin at `begin`, noted from `low` to `stop`."""

    begin: Ints
    low: Ints
    stop: Ints

    @staticmethod
    def from_spans(spans: Sequence[range], first: Rows, warm: int) -> _Pieces:
        pieces = []
        rows = max(_LEAST_ROWS, sum(len(span) for span in spans) // _SIDE_BY_SIDE)
        for span in spans:
            lows = list(range(span.start, span.stop, min(rows, _PIECE_ROWS)))
            if len(lows) > 1 and span.stop - lows[-1] < 2:
                lows.pop()
            for low, stop in pairwise([*lows, span.stop]):
                pieces.append((max(low - warm, int(first[low])), low, stop))
        return _Pieces(*(np.array(part) for part in zip(*pieces, strict=True)))


def _walk(books: ExpertBooks, plan: _Pieces, config: Config) -> ExpertView:
    """[T,…] of the pieces, all stepped together."""
    n_rows, n_places, n_experts = len(books.world.times), books.n_places, books.n_experts
    horizons = len(config.meta_router.horizons)
    out = ExpertView(
        np.zeros((n_rows, n_experts, horizons), dtype=np.float32),
        np.zeros((n_rows, horizons), dtype=np.float32),
        np.zeros((n_rows, n_experts), dtype=np.float32),
        np.ones((n_rows, n_experts), dtype=np.bool_),
        np.ones((n_rows, n_experts), dtype=np.float32),
        np.zeros((n_rows, n_experts * (config.meta_router.prior != "none")), dtype=np.float32),
    )
    standing = ExpertStanding(n_places, n_experts, config, books.world.bars_per_day)
    nobody = np.full(n_places, -1, dtype=np.int64)
    done, fresh = np.zeros(n_places, dtype=np.bool_), np.ones(n_places, dtype=np.bool_)
    books.begin(plan.begin, fresh)
    while True:
        row = books.row
        standing.mark(books.value.T, fresh, nobody)
        note = ~done & (row >= plan.low) & (row < plan.stop)
        if note.any():
            for table, part in zip(out, standing.view(), strict=True):
                table[row[note]] = part[note]
        done = done | (row >= plan.stop - 1)
        if done.all():
            return out
        if done.any():  # those trade their pieces again, unnoticed, until the longest is done
            books.begin(np.where(done, plan.begin, row), done)
        books.step(books.ask())
        fresh = np.zeros(n_places, dtype=np.bool_)


def warm_bars(config: Config) -> int:
    """Bars that own books are traded before they are looked at.

    As many as the router sees and, on daily bars, the guards remember, and one more: the first bar,
    in which a book comes out of cash, is like no other. Without them the guard of the tail, which
    wants `risk.cvar_window` returns, could say nothing in a test window of a year.
    """
    risk = config.risk
    tail = risk.cvar_window if risk.enabled else 0
    return max(*config.meta_router.horizons, risk.drawdown_window, tail) + 1
