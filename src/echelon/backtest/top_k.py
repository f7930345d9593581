"""Hold the best k by a score, in staggered tranches, each with a buffer.

The book is the mean of `tranches` sub-books. Each of them, every `horizon` bars and on bars of its
own, so that at most one decides at a bar where there are no more of them than bars:

1. Ranks what is present, a member and traded at this bar by its score, the best first.
2. Keeps what it holds and whose rank is still below `top · buffer`; what cannot be traded now stays
   as well. All else is sold.
3. Fills the places left with the best that it does not hold, and gives each place 1/`top`.

Between its decisions prices move its weights. All that is of the market alone: what is wanted at a
row depends on that row and those before it, neither on what the book holds nor on when anybody
asked. Memory is kept short by counting from the beginning of the block of rows before (`_BLOCK`
decisions of each tranche), by when who was held first is long forgotten.

The book leaves alone what is within a tenth of one place of one tranche, and what is not traded.

Axes: `E` books, `N` assets, `I` tranches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.market import Rows
from echelon.states import State
from echelon.types import Floats, Floats32, Ints

_BLOCK = 16
"""Decisions of a tranche in a block of rows."""
_KEPT_ROWS = 4_096
"""Rows whose scores, or wishes, are remembered: as many as books at different rows may ask for."""
_LEFT_ALONE = 0.1


Scorer = Callable[[Floats32], Floats]
"""Scores[N] of the features x[N,F] of a row: the higher, the more an asset is wanted."""


class TopKRule(NamedTuple):
    """top: assets held; buffer: kept while ranked below top · buffer; horizon: bars between
    decisions of a tranche.
    """

    top: int
    buffer: float
    tranches: int
    horizon: int

    @property
    def problem(self) -> str | None:
        """Why nobody can trade by it; None: it is sound."""
        if not (self.top > 0 and self.buffer >= 1.0 and self.horizon > 0):
            return f"expected at least one asset, a buffer of 1 and a bar, not {tuple(self)}"
        if not 0 < self.tranches <= self.horizon:
            return f"{self.tranches} tranches do not fit into {self.horizon} bars"
        return None

    @property
    def block(self) -> int:
        return _BLOCK * self.horizon


class RowScores:
    """Scores by row of the last world asked about; policies with one scorer may share it."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._world: World | None = None
        self._rows: dict[int, Floats] = {}

    def at(self, world: World, row: int) -> Floats:
        """[N]."""
        if world is not self._world:
            self._world, self._rows = world, {}
        if row not in self._rows:
            self._rows[row] = self._scorer(np.ascontiguousarray(world.x[row]))
            _forget(self._rows)
        return self._rows[row]


class _Path(NamedTuple):
    """Tranches after their decisions at a row. weights[I,N] of each tranche's own value"""

    row: int
    weights: Floats


class TopKPolicy:
    kind: ActionKind = "weights"

    def __init__(self, scores: RowScores, rule: TopKRule, name: str = "top_k") -> None:
        self.name, self.rule = name, rule
        self._scores = scores
        self._world: World | None = None
        self._paths: dict[int, _Path] = {}
        self._wishes: dict[int, Floats] = {}

    @property
    def lookback(self) -> int:
        """As far as the beginning of the block before."""
        return 2 * self.rule.block - 1

    def start(self, world: World, span: range) -> None:
        """Nothing is computed ahead: the world may still grow."""
        if world is not self._world:
            self._world, self._paths, self._wishes = world, {}, {}

    def state(self) -> State:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to go on from; what another policy left is refused."""
        if state:
            raise StoreError(
                f"{self.name}: remembers nothing, and the saved state has {', '.join(state)}. "
                "Restore it with the policy it was saved with."
            )

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Target weights[E,N] of books at `row`[E]; NaN: leave as it is."""
        assert self._world is not None, "start() comes before decide()"
        wish = np.stack([self._wish(t) for t in row.tolist()])
        near = np.abs(wish - held.weights) < _LEFT_ALONE / (self.rule.top * self.rule.tranches)
        left = (near & (wish > 0.0)) | ~self._world.rows.tradable[row]
        return np.where(left, np.nan, wish)

    def _wish(self, row: int) -> Floats:
        """[N] mean of the tranches' weights after their decisions at a row."""
        if row not in self._wishes:
            world, block = self._world, self.rule.block
            assert world is not None, "start() comes before decide()"
            first = int(world.first_rows(np.array([row]))[0])
            begin = min(row, max(first, (row // block - 1) * block))
            path = self._paths.get(begin)
            if path is None or path.row >= row:
                nothing = np.zeros((self.rule.tranches, world.n_assets))
                path = _Path(begin, self._decide(world, begin, nothing, range(len(nothing))))
            while path.row < row:
                path = self._advance(world, path)
                if path.row // block == row // block:  # rows of the block before begin earlier
                    self._wishes[path.row] = path.weights.mean(axis=0)
            self._wishes[row] = path.weights.mean(axis=0)
            self._paths[begin] = path
            _forget(self._wishes)
            _forget(self._paths)
        return self._wishes[row]

    def _advance(self, world: World, path: _Path) -> _Path:
        """A bar on: prices move the weights, then the tranches decide whose bar it is."""
        row, before = path.row + 1, path.weights
        with np.errstate(invalid="ignore", divide="ignore"):
            growth = world.growth[row] / world.growth[row - 1]
        moved = before * np.where(np.isfinite(growth), growth, 1.0)
        gained = (moved - before).sum(axis=1, keepdims=True)
        moved /= np.maximum(1.0 + gained, 1e-12)
        count, horizon = self.rule.tranches, self.rule.horizon
        due = [i for i in range(count) if row % horizon == i * horizon // count]
        return _Path(row, self._decide(world, row, moved, due))

    def _decide(self, world: World, row: int, weights: Floats, due: Iterable[int]) -> Floats:
        """weights[I,N] after those tranches that are `due` have decided."""
        top, weights = self.rule.top, weights.copy()
        trades = world.rows.tradable[row] & ~world.rows.gone[row]
        eligible = np.flatnonzero(trades & world.present[row] & world.member[row])
        best: Ints | None = None
        for i in due:
            if best is None:
                best = eligible[np.argsort(-self._scores.at(world, row)[eligible], kind="stable")]
            mine = weights[i] > 0.0
            stuck = mine & ~trades & ~world.rows.gone[row]
            places = top - int(stuck.sum())
            near = best[: int(top * self.rule.buffer)]
            kept = near[mine[near]][: max(places, 0)]
            fresh = best[~mine[best]][: max(places - len(kept), 0)]
            share = max(0.0, 1.0 - float(weights[i, stuck].sum())) / max(places, 1)
            weights[i, ~stuck] = 0.0
            weights[i, kept] = weights[i, fresh] = share
        return weights


def _forget(rows: dict[int, Any]) -> None:
    """Let the oldest go where there are too many."""
    while len(rows) > _KEPT_ROWS:
        del rows[next(iter(rows))]
