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

`regime_references` has what rules of thumb, the exact filter and knowledge of g make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echelon.config import Config
from echelon.envs.world import World
from echelon.proving.worlds import autoregressive, drawn_world
from echelon.rng import stream
from echelon.types import Floats

HORIZONS = (5, 20, 40, 120)
"""Bars over which a router sees the returns of the experts' books."""


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

    def filtered(self, x: Floats, close: Floats) -> Floats:
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
