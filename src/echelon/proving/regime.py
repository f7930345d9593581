"""The regime market: a signal everybody sees, whose meaning flips and is hidden.

    x[t]    per asset an AR(1) of unit variance, seen by all
    g[t]    ±1, the same for all assets, flips with a small probability at every bar, hidden
    r[t+1] = strength · noise · g[t] · x[t] + noise · ε      simple returns

Whoever follows x earns while g = 1 and loses while g = −1; whoever opposes it does the reverse.
Each draw comes with its mirror: the same x, the same ε, and −g. Over the pair a rule that looks at
x alone gets the noise twice and the signal not at all (`RegimeMarket.pair`).

**The advantage of a router here is information, and nothing else.** Experts and flat agents are to
see 20 bars of x and their last *target* weights; they see no returns, and no holdings, for these
drift with returns and would give g away. The router sees the returns of the experts' books over the
last 5, 20, 40 and 120 bars (`book_returns`), from which g can be guessed. That a router beats flat
agents here shows that it uses what it alone is shown. It does not show that a hierarchy is better
than a flat agent that is shown the same: for that comparison `regime_worlds` takes `shown`.

What can be made of it, from knowing nothing to knowing the regime (`run_references`):

    equal weight       the same share of every asset, at every bar
    follow, oppose     experts: weights softmax(±1.5 · x)
    trailing 40        the expert whose book earned more over the last 40 bars
    fixed-share hedge  the expert in which exponential weights of the books' returns trust most, a
                       small share of trust being spread again at every bar
                       (Herbster & Warmuth 1998, Tracking the best expert)
    regime filter      the expert for the regime that is more likely, by the exact filter
    regime-aware       the expert for the regime as it is: beyond what can be known

Those that choose do so every 5 bars; the expert in charge says at every bar what to hold. All but
the last use nothing but the past: x and closes up to the row, or the books' values up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.proving.trial import Arena
from echelon.proving.worlds import autoregressive, drawn_world
from echelon.rng import stream
from echelon.types import Floats

HORIZONS = (5, 20, 40, 120)
"""Bars over which a router sees the returns of the experts' books."""
TILT = 1.5
"""Weights of the experts: softmax(±TILT · x)."""
EVERY = 5
"""Bars between the decisions of those that choose."""
TRAILING_BARS = 40
_RATE, _SHARE = 60.0, 0.004
"""Of the hedge: how fast trust follows returns, and how much of it is spread again at each bar."""


class RegimeDraw(NamedTuple):
    """One history: x[T,N] the signal, regime[T] its hidden meaning ±1, open[T,N], close[T,N]."""

    x: Floats
    regime: Floats
    open: Floats
    close: Floats


@dataclass(frozen=True)
class RegimeMarket:
    """Numbers of the market.

    noise: sd of a bar's noise; strength: drift per unit of x, in units of the noise
    persistence: of x, per bar; flip: probability that the regime turns, per bar
    overnight: share of a bar's drift and variance that falls between close and open
    """

    n_assets: int = 8
    n_bars: int = 10_000
    noise: float = 0.012
    strength: float = 0.12
    persistence: float = 0.98
    flip: float = 1 / 400
    overnight: float = 0.2

    def draw(self, seed: int, name: str, *, mirrored: bool = False) -> RegimeDraw:
        """One history; `mirrored`: the same x and noise under the opposite regime."""
        rng = stream(seed, "regime", name)
        shape = (self.n_bars, self.n_assets)
        size = np.sqrt(1.0 - self.persistence**2)
        first = rng.standard_normal(self.n_assets)
        x = autoregressive(first, size * rng.standard_normal(shape), self.persistence)
        flips = rng.random(self.n_bars) < self.flip
        flips[0] = rng.random() < 0.5
        regime = np.where(np.cumsum(flips) % 2 == int(mirrored), 1.0, -1.0)
        drift = np.zeros(shape)
        drift[1:] = self.strength * self.noise * regime[:-1, None] * x[:-1]
        night, day = self.overnight, 1.0 - self.overnight
        gap = night * drift + np.sqrt(night) * self.noise * rng.standard_normal(shape)
        session = day * drift + np.sqrt(day) * self.noise * rng.standard_normal(shape)
        gap[0] = session[0] = 0.0
        close = 100.0 * np.cumprod(1.0 + gap + session, axis=0)
        # Both parts of a bar's return count from the close before: their sum is exact.
        before = np.vstack([close[:1], close[:-1]])
        return RegimeDraw(x, regime, before * (1.0 + gap), close)

    def pair(self, seed: int, name: str) -> tuple[RegimeDraw, RegimeDraw]:
        """A draw and its mirror."""
        return self.draw(seed, name), self.draw(seed, name, mirrored=True)

    def pairs(self, n_pairs: int, name: str, first_seed: int = 0) -> list[RegimeDraw]:
        """Draws and their mirrors in turn: 2 · `n_pairs` of them."""
        seeds = range(first_seed, first_seed + n_pairs)
        return [draw for seed in seeds for draw in self.pair(seed, name)]

    def follow_probability(self, x: Floats, close: Floats) -> Floats:
        """[T] exact P(g = 1 | x[T,N] and close[T,N] up to and including each row).

        Opens would add nothing: drift and variance are split overnight in the same proportion.
        """
        returns = close[1:] / close[:-1] - 1.0
        evidence = 2.0 * self.strength / self.noise * (x[:-1] * returns).sum(axis=1)
        probability = np.full(len(close), 0.5)
        for t, more in enumerate(evidence, start=1):
            against = (1.0 - probability[t - 1]) * np.exp(-more)
            belief = probability[t - 1] / (probability[t - 1] + against)
            probability[t] = belief * (1.0 - self.flip) + (1.0 - belief) * self.flip
        return probability


def regime_worlds(
    draws: Sequence[RegimeDraw], config: Config, *, shown: Sequence[Floats] | None = None
) -> list[World]:
    """Worlds of draws whose only feature is x, as drawn: it needs no scaling.

    shown: [T,M] for each draw: M more features, the same for all assets. For flat agents that are
    given a router's observations, and for nobody else.
    """
    worlds = []
    for d, draw in enumerate(draws):
        features = [draw.x[..., None]]
        if shown is not None:
            n_bars, n_assets = draw.x.shape
            assert len(shown[d]) == n_bars, "shown is not [T,M]"
            features.append(np.repeat(shown[d][:, None], n_assets, axis=1))
        x = np.concatenate(features, axis=2).astype(np.float32)
        present = np.ones(draw.close.shape, dtype=bool)
        worlds.append(drawn_world(draw.open, draw.close, x, present, config))
    return worlds


def book_returns(values: Floats, horizons: Sequence[int] = HORIZONS) -> Floats:
    """[S+1,…,H] returns of books over the last h bars, for each h of `horizons`.

    values[S+1,…]: of books after each step, as `run_values` gives them. At step k only
    values up to k are used; before there are h bars, the return since the start stands in.
    """
    steps = np.arange(len(values))
    return np.stack(
        [values / values[np.maximum(steps - h, 0)] - 1.0 for h in horizons],
        axis=-1,
    )


class TiltedWeights:
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


FOLLOW, OPPOSE = TiltedWeights("follow", TILT), TiltedWeights("oppose", -TILT)
EQUAL = TiltedWeights("equal weight", 0.0)


class Switch:
    """Puts the expert of the highest score in charge, and decides again every so many bars.

    scores[T,K]: of K experts at each row of the world, from what is known at that row
    starts[D]: rows at which the draws' books begin, and with them the clock of decisions
    """

    kind: ActionKind = "weights"

    def __init__(
        self,
        name: str,
        experts: Sequence[TiltedWeights],
        scores: Floats,
        starts: Rows,
        every: int = EVERY,
    ) -> None:
        assert scores.shape[1] == len(experts), "scores is not [T,K]"
        self.name = name
        self._experts = experts
        rows = np.arange(len(scores))
        start = starts[np.maximum(np.searchsorted(starts, rows, side="right") - 1, 0)]
        decided = np.where(rows < start, rows, start + (rows - start) // every * every)
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
    experts: Sequence[TiltedWeights] = (FOLLOW, OPPOSE),
) -> Floats:
    """[S+1,D,K] values of the experts' books on each draw, from its first whole window on."""
    arena = Arena.from_draws(regime_worlds(draws, config))
    return np.stack([arena_values(expert, arena, config) for expert in experts], axis=-1)


def arena_values(policy: Policy, arena: Arena, config: Config) -> Floats:
    """[S+1,D] values of a policy's books, one on each draw."""
    return run_values(policy, arena.world, arena.starts, arena.n_steps, config)


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
    arena = Arena.from_draws(regime_worlds(draws, config))
    experts = (FOLLOW, OPPOSE)
    values = {expert.name: arena_values(expert, arena, config) for expert in (EQUAL, *experts)}
    books = np.stack([values[expert.name] for expert in experts], axis=-1)
    scores = _scores(market, draws, books)
    for name, score in scores.items():
        every = 1 if name == "regime-aware" else EVERY
        switch = Switch(name, experts, score, arena.starts, every)
        values[name] = arena_values(switch, arena, config)
    return {name: value[1:] / value[:-1] - 1.0 for name, value in values.items()}


def _scores(market: RegimeMarket, draws: Sequence[RegimeDraw], books: Floats) -> dict[str, Floats]:
    """Name → scores[D·T,2] of follow and oppose at each row of the joined draws.

    books[S+1,D,2]: values of their books
    """
    n_bars = len(draws[0].x)
    up = np.concatenate([market.follow_probability(draw.x, draw.close) for draw in draws])
    regime = np.concatenate([draw.regime for draw in draws])

    def by_row(score: Floats) -> Floats:
        padded = np.zeros((len(draws), n_bars, score.shape[-1]))
        padded[:, n_bars - len(score) :] = score.swapaxes(0, 1)
        return padded.reshape(-1, score.shape[-1])

    return {
        f"trailing {TRAILING_BARS}": by_row(book_returns(books, (TRAILING_BARS,))[..., 0]),
        "fixed-share hedge": by_row(hedge(books[1:] / books[:-1] - 1.0)),
        "regime filter": np.column_stack([up, 1.0 - up]),
        "regime-aware": np.column_stack([regime, -regime]),
    }
