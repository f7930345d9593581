"""What can be made of the regime market, from knowing nothing to knowing the regime.

    equal weight       the same share of every asset, at every bar
    follow, oppose     experts: weights softmax(±1.5 · x)
    trailing 40        the expert whose book earned more over the last 40 bars
    fixed-share hedge  the expert in which exponential weights of the books' returns trust most, a
                       small share of trust being spread anew at every bar
                       (Herbster & Warmuth 1998, Tracking the best expert)
    regime filter      the expert for the regime that is more likely, by the exact filter
    regime-aware       the expert for the regime as it is: beyond what can be known

Those that choose do so every 5 bars; the expert in charge says at every bar what to hold. All but
the last use nothing but the past: x and closes up to the row, or the books' values up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.proving.regime import (
    HORIZONS,
    RegimeDraw,
    RegimeMarket,
    book_returns,
    regime_worlds,
)
from echelon.proving.worlds import joined
from echelon.types import Floats

TILT = 1.5
"""Weights of the experts: softmax(±TILT · x)."""
EVERY = 5
"""Bars between the decisions of those that choose."""
TRAILING = 40
_RATE, _SHARE = 60.0, 0.004
"""Of the hedge: how fast trust follows returns, and how much of it is spread anew at each bar."""


class Expert:
    """Target weights softmax(tilt · x) at every bar; a tilt of 0 is equal weight."""

    kind: ActionKind = "weights"

    def __init__(self, name: str, tilt: float) -> None:
        self.name = name
        self._tilt = tilt

    def start(self, world: World, span: range) -> None:
        """Weights of every row, each from the x of that row."""
        self._weights = self.weights(world.x[..., 0])

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Look them up."""
        return self._weights[row]

    def weights(self, x: NDArray[np.floating]) -> Floats:
        """[T,N] of x[T,N]."""
        score = self._tilt * x.astype(np.float64)
        power = np.exp(score - score.max(axis=1, keepdims=True))
        return np.asarray(power / power.sum(axis=1, keepdims=True))


FOLLOW, OPPOSE = Expert("follow", TILT), Expert("oppose", -TILT)
EQUAL = Expert("equal weight", 0.0)


class Switch:
    """Puts the expert of the highest score in charge, and decides again every so many bars.

    scores[T,K]: of K experts at each row of the world, from what is known at that row
    starts[D]: rows at which the draws' books begin, and with them the clock of decisions
    """

    kind: ActionKind = "weights"

    def __init__(
        self,
        name: str,
        experts: Sequence[Expert],
        scores: Floats,
        starts: Rows,
        every: int = EVERY,
    ) -> None:
        assert scores.shape[1] == len(experts), "scores is not [T,K]"
        self.name = name
        self._experts = experts
        rows = np.arange(len(scores))
        begun = starts[np.maximum(np.searchsorted(starts, rows, side="right") - 1, 0)]
        decided = np.where(rows < begun, rows, begun + (rows - begun) // every * every)
        self.choice: Rows = scores.argmax(axis=1)[decided]

    def start(self, world: World, span: range) -> None:
        """Weights of the expert in charge, at every row."""
        every_expert = np.stack([e.weights(world.x[..., 0]) for e in self._experts])
        self._weights = every_expert[self.choice, np.arange(len(self.choice))]

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Look them up."""
        return self._weights[row]


def hedge(returns: Floats, *, rate: float = _RATE, share: float = _SHARE) -> Floats:
    """[S+1,…,K] trust of the fixed-share hedge in K experts, before and after each return.

    returns[S,…,K] of the experts' books
    """
    trust = np.full((len(returns) + 1, *returns.shape[1:]), 1.0 / returns.shape[-1])
    for k, earned in enumerate(returns):
        weight = trust[k] * np.exp(rate * earned)
        weight /= weight.sum(axis=-1, keepdims=True)
        trust[k + 1] = (1.0 - share) * weight + share / returns.shape[-1]
    return trust


def expert_values(
    draws: Sequence[RegimeDraw],
    config: Config,
    experts: Sequence[Expert] = (FOLLOW, OPPOSE),
) -> Floats:
    """[S+1,D,K] values of the experts' books on each draw, from its first whole window on."""
    worlds = regime_worlds(draws, config)
    together, starts = joined(worlds)
    n_steps = len(worlds[0].span("test")) - 1
    runs = [run_values(expert, together, starts, n_steps, config) for expert in experts]
    return np.stack(runs, axis=-1)


def router_view(draws: Sequence[RegimeDraw], config: Config, noise: float = 0.012) -> list[Floats]:
    """[T,K·H] for each draw: what a router sees, the experts' book returns over `HORIZONS`.

    In units of noise · √bars, and 0 before the books begin; `regime_worlds` takes it as `shown`.
    """
    seen = book_returns(expert_values(draws, config)) / (noise * np.sqrt(HORIZONS))
    n_bars = len(draws[0].x)
    views = np.zeros((len(draws), n_bars, seen.shape[2] * seen.shape[3]))
    views[:, n_bars - len(seen) :] = seen.transpose(1, 0, 2, 3).reshape(
        *views[:, -len(seen) :].shape
    )
    return list(views)


def run_references(
    market: RegimeMarket, draws: Sequence[RegimeDraw], config: Config
) -> Mapping[str, Floats]:
    """Name → returns[S,D] of every reference on every draw, by the market kernel."""
    worlds = regime_worlds(draws, config)
    together, starts = joined(worlds)
    n_steps = len(worlds[0].span("test")) - 1

    def values_of(policy: Policy) -> Floats:
        return run_values(policy, together, starts, n_steps, config)

    experts = (FOLLOW, OPPOSE)
    values = {expert.name: values_of(expert) for expert in (EQUAL, *experts)}
    books = np.stack([values[expert.name] for expert in experts], axis=-1)
    scores = _scores(market, draws, books)
    for name, score in scores.items():
        switch = Switch(name, experts, score, starts, 1 if name == "regime-aware" else EVERY)
        values[name] = values_of(switch)
    return {name: value[1:] / value[:-1] - 1.0 for name, value in values.items()}


def _scores(market: RegimeMarket, draws: Sequence[RegimeDraw], books: Floats) -> dict[str, Floats]:
    """Name → scores[D·T,2] of follow and oppose at each row of the joined draws.

    books[S+1,D,2]: values of their books
    """
    n_bars = len(draws[0].x)
    up = np.concatenate([market.filtered(draw.x, draw.close) for draw in draws])
    regime = np.concatenate([draw.regime for draw in draws])

    def by_row(score: Floats) -> Floats:
        padded = np.zeros((len(draws), n_bars, score.shape[-1]))
        padded[:, n_bars - len(score) :] = score.swapaxes(0, 1)
        return padded.reshape(-1, score.shape[-1])

    return {
        f"trailing {TRAILING}": by_row(book_returns(books, (TRAILING,))[..., 0]),
        "fixed-share hedge": by_row(hedge(books[1:] / books[:-1] - 1.0)),
        "regime filter": np.column_stack([up, 1.0 - up]),
        "regime-aware": np.column_stack([regime, -regime]),
    }
