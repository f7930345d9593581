"""The experts' own books: how each stands with risk control and the router, bar by bar.

`Standing` follows own books as they are traded, by whomever: their past for the router's view, and
the two guards that judge experts by them (`DrawdownGuard` masks, `CvarGuard` scales).

`survey` trades the own books over whole spans and keeps how they stood at every row. Own books
depend on nobody but the experts: not on who is in charge, nor on what the real book is worth. So
for the router's training they are traded once for each state of the experts, and looked up by
however many environments visit a row; policies trade theirs bar by bar, with the same functions.

Axes: `E` places, `K` experts, `T` rows of the world, `H` horizons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.hierarchy import RiskConfig
from echelon.envs.world import World
from echelon.errors import DataError
from echelon.market import Rows
from echelon.population.book_forks import Desk, first_rows, started
from echelon.population.router_observation import Sight, Trail, market_view
from echelon.risk import (
    CvarGuard,
    CvarSettings,
    CvarVerdict,
    DrawdownGuard,
    DrawdownSettings,
    DrawdownVerdict,
)
from echelon.types import Bools, Floats, Floats32, Ints

_PIECE_ROWS = 500
"""Most rows of a span that one place trades; long spans are traded in pieces, side by side."""
_SIDE_BY_SIDE = 16
"""Pieces that a short window is cut into."""
_LEAST_ROWS = 120
"""Rows that a piece has at least: each is traded behind a warm-up of its own."""


class Verdicts(NamedTuple):
    """What the guards said at a bar."""

    drawdown: DrawdownVerdict
    cvar: CvarVerdict


class Standing:
    """How K experts stand in E places, by the values of their own books."""

    def __init__(self, n_places: int, n_experts: int, config: Config) -> None:
        self.shape = (n_places, n_experts)
        self._enabled = config.risk.enabled
        self._trail = Trail(n_places, n_experts, config.meta_router.horizons)
        settings = drawdown_settings(config.risk)
        self._limit = settings.limit
        self.drawdown = DrawdownGuard(n_places, n_experts + 1, n_experts, settings)
        self.cvar = CvarGuard(self.shape, cvar_settings(config.risk))
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
        if fresh.any():
            self.drawdown.restart(fresh)
        cash = np.ones((len(value), 1))
        masked = self.drawdown.update(np.concatenate([value, cash], axis=1), in_charge)
        self._lost = masked.drawdown[:, :-1]
        scaled = self.cvar.update(self.returns)
        if fresh.any():
            self.cvar.restart(fresh)
        return Verdicts(masked, scaled)

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

    def sight(self) -> Sight:
        """What the router sees of the experts."""
        relative, level = self._trail.returns()
        lost = np.nan_to_num(self._lost, nan=1.0) / self._limit
        return Sight(
            relative,
            level,
            lost.astype(np.float32),
            self.allowed,
            self.scale.astype(np.float32),
        )


@dataclass(frozen=True)
class Survey:
    """Own books over the rows of `spans`, each row once; elsewhere nothing is known.

    spans: rows surveyed; sight: [T,…] at every row
    market[T,M]: the market's part of observations
    earned[T,K]: return of the own book from a row to the next, NaN where not known
    """

    spans: tuple[range, ...]
    sight: Sight
    market: Floats32
    earned: Floats


def survey(
    experts: Sequence[Policy],
    world: World,
    spans: Sequence[range],
    config: Config,
    market: Floats32 | None = None,
) -> Survey:
    """Let the experts trade their own books over the rows of `spans`.

    market: the world's `market_view`, where it is known already

    Every piece of a span begins `warm_bars` before its first row, where there are so many.
    """
    spans = tuple(spans)
    if not spans or min(len(span) for span in spans) < 2:
        raise DataError(
            f"rows to survey: {[f'{s.start}:{s.stop}' for s in spans]}; expected spans of at least "
            "2 rows, one to decide at and one to be marked at. Lengthen the router's window "
            "(meta_router.window_share)."
        )
    first = first_rows(world)
    plan = _Plan.of(spans, first, warm_bars(config))
    whole = range(int(plan.begin.min()), int(plan.stop.max()))
    started(experts, world, whole)
    desk = Desk(experts, world, config, len(plan.begin), whole)
    found = _walk(desk, plan, config)
    if market is None:
        market = market_view(world, first, config.meta_router.horizons)
    return Survey(spans, found[0], market, found[1])


class _Plan(NamedTuple):
    """Pieces to be traded side by side, [P] each: begin at `begin`, noted from `low` to `stop`.

    last[P]: the piece is the last of its span, and there is no row after it to go to
    """

    begin: Ints
    low: Ints
    stop: Ints
    last: Bools

    @staticmethod
    def of(spans: Sequence[range], first: Rows, warm: int) -> _Plan:
        pieces = []
        rows = max(_LEAST_ROWS, sum(len(span) for span in spans) // _SIDE_BY_SIDE)
        for span in spans:
            lows = list(range(span.start, span.stop, min(rows, _PIECE_ROWS)))
            if len(lows) > 1 and span.stop - lows[-1] < 2:
                lows.pop()
            for low, stop in zip(lows, [*lows[1:], span.stop], strict=True):
                begin = max(low - warm, int(first[low]))
                pieces.append((begin, low, stop, stop == span.stop))
        begins, froms, stops, lasts = (np.array(part) for part in zip(*pieces, strict=True))
        return _Plan(begins, froms, stops, lasts)


def _walk(desk: Desk, plan: _Plan, config: Config) -> tuple[Sight, Floats]:
    """(sight[T,…], earned[T,K]) of the pieces, all stepped together."""
    n_rows, n_places, n_experts = len(desk.world.times), desk.n_places, desk.n_experts
    horizons = len(config.meta_router.horizons)
    out = Sight(
        np.zeros((n_rows, n_experts, horizons), dtype=np.float32),
        np.zeros((n_rows, horizons), dtype=np.float32),
        np.zeros((n_rows, n_experts), dtype=np.float32),
        np.ones((n_rows, n_experts), dtype=np.bool_),
        np.ones((n_rows, n_experts), dtype=np.float32),
    )
    earned = np.full((n_rows, n_experts), np.nan)
    standing = Standing(n_places, n_experts, config)
    nobody = np.full(n_places, -1, dtype=np.int64)
    done = np.zeros(n_places, dtype=np.bool_)
    fresh = np.ones(n_places, dtype=np.bool_)
    desk.begin(plan.begin, fresh)
    cash = np.zeros((1, n_places, desk.world.n_assets))
    while True:
        row = desk.row
        standing.mark(desk.value[:-1].T, fresh, nobody)
        note = ~done & (row >= plan.low) & (row < plan.stop)
        if note.any():
            for table, part in zip(out, standing.sight(), strict=True):
                table[row[note]] = part[note]
        known = ~done & ~fresh & (row > plan.low)
        earned[row[known] - 1] = standing.returns[known]
        # A piece ends where the next begins: that row's return belongs to it still.
        done = done | (row >= np.where(plan.last, plan.stop - 1, plan.stop))
        if done.all():
            return out, earned
        # What is done trades its piece again, unnoticed, until the longest is.
        fresh = done
        if fresh.any():
            desk.begin(np.where(fresh, plan.begin, row), fresh)
        desk.step(np.concatenate([desk.ask().own, cash]))
        fresh = np.zeros(n_places, dtype=np.bool_)


def warm_bars(config: Config) -> int:
    """Bars that own books are traded before they are looked at.

    As many as the router sees and the guards remember, and one more: the first bar, in which a book
    comes out of cash, is like no other. Without them the guard of the tail, which wants
    `risk.cvar_window` returns, could say nothing in a test window of a year.
    """
    risk = config.risk
    tail = risk.cvar_window if risk.enabled else 0
    return max(*config.meta_router.horizons, risk.drawdown_window, tail) + 1


def drawdown_settings(risk: RiskConfig) -> DrawdownSettings:
    """Of the guard over own books."""
    return DrawdownSettings(
        window=risk.drawdown_window,
        limit=risk.drawdown_limit,
        release=risk.drawdown_release,
        confirm=risk.release_bars,
        cooldown=risk.cooldown_bars,
    )


def cvar_settings(risk: RiskConfig) -> CvarSettings:
    """Of the guard over own books."""
    return CvarSettings(
        limit=risk.cvar_limit,
        window=risk.cvar_window,
        min_returns=risk.cvar_window,
        confirm=risk.release_bars,
    )
