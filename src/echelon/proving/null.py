"""Null: a market like the others, in which there is nothing to find.

Prices have what real ones have and the planted markets lack: a common factor, volatility that
comes in clusters, heavy tails, a risk premium. What they lack is anything to earn beyond it. The
premium of an asset is the price of risk times its covariance with equal weight,

    E[R_{n,t} | past] = price · Cov(R_{n,t}, mean of R_t | past),

so equal weight, held all the time, has the highest Sharpe ratio any policy can have: who leaves
the market when it is calm or wild, or prefers the quiet assets, is paid exactly as much less as
he risks less. (With a constant premium, a policy that flees volatility would be truly better, and
counting its claims as false would be wrong.)

    volatility of factor and assets    exp of an AR(1), each its own
    innovations                        Student's t, five degrees of freedom
    a bar                              a fifth of drift and variance overnight, the rest after

Costs are the configuration's, as on the planted markets; like those it has no volumes, so every
order is filled in full. A draw is traded in three windows, one after the other: train, validation,
test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from echelon.config import Config
from echelon.envs.world import World
from echelon.proving.planted import Draw, planted_worlds
from echelon.proving.trial import WARMUP, YEAR
from echelon.proving.worlds import autoregressive
from echelon.rng import stream
from echelon.types import Floats

_TAIL = 5
"""Degrees of freedom of the innovations: the least with a finite kurtosis."""


class Windows(NamedTuple):
    """Bars of the three windows of a draw."""

    train: int
    valid: int
    test: int


WINDOWS = Windows(2520, 1260, 1260)
"""Ten, five and five years."""


@dataclass(frozen=True)
class NullMarket:
    """Numbers of the market; as in the planted ones, 8 assets with 1.2 % a bar.

    windows: bars of train, validation and test
    common: standard deviation of the common factor; own: of what is an asset's alone
    premium: of equal weight, per year
    persistence, spread: of the logarithms of the volatilities
    overnight: share of a bar's drift and variance that falls between close and open
    """

    windows: Windows = WINDOWS
    n_assets: int = 8
    common: float = 0.008
    own: float = 0.009
    premium: float = 0.06
    persistence: float = 0.98
    spread: float = 0.4
    overnight: float = 0.2

    def draw(self, seed: int, name: str, warmup: int) -> Draw:
        """One history; its hidden state is the standard deviation of each asset at each bar.

        warmup: bars before the train window
        """
        rng = stream(seed, "null", name)
        shape = (warmup + sum(self.windows), self.n_assets)
        factor = self.common * self._volatility(rng, (shape[0], 1))
        own = self.own * self._volatility(rng, shape)
        night, day = (
            self._part(rng, share, factor, own) for share in (self.overnight, 1 - self.overnight)
        )
        close = 100.0 * np.exp(np.cumsum(night + day, axis=0))
        return Draw(np.sqrt(factor**2 + own**2), close * np.exp(-day), close)

    def rows(self, warmup: int) -> dict[str, tuple[int, int]]:
        """First row of each window of a draw, and the row after its last."""
        train, valid, test = self.windows
        ends = np.cumsum([warmup, train, valid, test]).tolist()
        return dict(zip(self.windows._fields, pairwise(ends), strict=True))

    @property
    def price_of_risk(self) -> float:
        """Expected return per unit of variance of equal weight."""
        return self.premium / YEAR / (self.common**2 + self.own**2 / self.n_assets)

    def _volatility(self, rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        """[T,N]: around 1, in the sense that its square has mean 1."""
        first = rng.standard_normal(shape[1])
        size = np.sqrt(1.0 - self.persistence**2)
        level = autoregressive(first, size * rng.standard_normal(shape), self.persistence)
        return np.asarray(np.exp(self.spread * level - self.spread**2))

    def _part(self, rng: np.random.Generator, share: float, factor: Floats, own: Floats) -> Floats:
        """[T,N] log returns of a part of each bar: premium, moves, and half the variance less."""
        shape = own.shape
        moves = np.sqrt(share) * (
            factor * _student(rng, (shape[0], 1)) + own * _student(rng, shape)
        )
        with_equal_weight = factor**2 + own**2 / self.n_assets
        drift = self.price_of_risk * with_equal_weight - 0.5 * (factor**2 + own**2)
        return np.asarray(share * drift + moves)


def null_world(market: NullMarket, seed: int, name: str, config: Config) -> World:
    """The world of a draw, with its three windows; features scaled by the train window alone."""
    before = WARMUP + config.window
    draw = market.draw(seed, name, before)
    splits = {name: range(*rows) for name, rows in market.rows(before).items()}
    known = Draw(*(part[: splits["train"].stop] for part in draw))
    _, world = planted_worlds([known, draw], config)
    return replace(world, splits=splits)


def _student(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Student's t, scaled to variance 1."""
    return np.asarray(rng.standard_t(_TAIL, shape) * np.sqrt((_TAIL - 2) / _TAIL))
