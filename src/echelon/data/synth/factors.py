"""Regimes and factors: what moves every symbol at once.

1. A hidden Markov chain walks through the regimes bull, bear and turbulent.
2. The log volatility of a factor is an AR(1) around the regime's level. A fall today raises
   volatility tomorrow (the leverage effect); today's volatility is known before today's return.
3. A day's return is an overnight part with Student tails and a Gaussian part in the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from echelon.rng import stream
from echelon.types import Floats

Ints = NDArray[np.int64]

REGIMES = ("bull", "bear", "turbulent")
STAY = np.array([0.995, 0.990, 0.975])
"""Probability per day of staying: regimes last 200, 100 and 40 sessions on average."""
LEAVE = np.array([[0.0, 0.6, 0.4], [0.6, 0.0, 0.4], [0.5, 0.5, 0.0]])
"""Where a regime goes when it ends, row by row."""
MARKET_DRIFT = np.array([0.0007, -0.0005, -0.0003])
"""Expected simple return of the market factor per day, by regime."""
MARKET_VOLATILITY = np.array([0.0075, 0.0120, 0.0220])
"""Standard deviation of the market factor per day, by regime."""
SECTOR_SCALE = 0.6
"""A sector factor's volatility, as a share of the market's in the same regime."""

OVERNIGHT_SHARE = 0.25
"""Share of a day's variance that falls between the close and the next open."""
TAIL_DF = 5
"""Degrees of freedom of overnight moves: the least with a finite kurtosis."""
PERSISTENCE = 0.98
"""AR(1) coefficient of a factor's log volatility."""
VOLATILITY_SPREAD = 0.40
"""Standard deviation of a factor's log volatility around its regime's level."""
LEVERAGE = -0.5
"""Correlation of today's market return with tomorrow's volatility shock."""


@dataclass(frozen=True)
class Factor:
    """One common factor; arrays of shape [T].

    volatility: standard deviation of the day's log return, known before the day
    drift: expected log return of the day
    overnight, intraday: the two parts of the day's log return, drift included
    """

    volatility: Floats
    drift: Floats
    overnight: Floats
    intraday: Floats

    @property
    def returns(self) -> Floats:
        """Log return of the day, [T]."""
        return self.overnight + self.intraday


def regime_path(seed: int, n_days: int) -> Ints:
    """Regime of each day, an index into `REGIMES`, [T]; starts in the bull regime."""
    draws = stream(seed, "synthetic", "regime").random((n_days, 2))
    onward = np.cumsum(LEAVE, axis=1)
    path = np.empty(n_days, dtype=np.int64)
    state = 0
    for day, (leaves, where) in enumerate(draws):
        if day > 0 and leaves >= STAY[state]:
            state = int(np.searchsorted(onward[state], where, side="right"))
        path[day] = state
    return path


def market_factor(seed: int, regime: Ints) -> Factor:
    """Make the market factor of a regime path [T]."""
    level, drift = MARKET_VOLATILITY[regime], MARKET_DRIFT[regime]
    return _factor(seed, "market", level, drift, leverage=LEVERAGE)


def sector_factor(seed: int, sector: int, regime: Ints) -> Factor:
    """Make the factor of one sector: what its members share beyond the market."""
    level = SECTOR_SCALE * MARKET_VOLATILITY[regime]
    return _factor(seed, f"sector {sector}", level, np.zeros(len(regime)), leverage=0.0)


def _factor(seed: int, name: str, level: Floats, drift: Floats, leverage: float) -> Factor:
    n_days = len(level)
    normals = stream(seed, "synthetic", "factor", name).standard_normal((n_days, 2))
    inside = normals[:, 0]
    night = student(stream(seed, "synthetic", "factor", name, "overnight"), n_days)
    # The shock that reaches day t's volatility was drawn on day t−1.
    mix = leverage * inside + np.sqrt(1 - leverage**2) * normals[:, 1]
    shock = np.concatenate([[0.0], mix[:-1]])
    log_volatility = ar1(shock, PERSISTENCE, VOLATILITY_SPREAD)
    volatility = level * np.exp(log_volatility - VOLATILITY_SPREAD**2)
    log_drift = drift - 0.5 * volatility**2
    return Factor(
        volatility=volatility,
        drift=log_drift,
        overnight=OVERNIGHT_SHARE * log_drift + np.sqrt(OVERNIGHT_SHARE) * volatility * night,
        intraday=(1 - OVERNIGHT_SHARE) * log_drift
        + np.sqrt(1 - OVERNIGHT_SHARE) * volatility * inside,
    )


def student(rng: np.random.Generator, size: int) -> Floats:
    """Student draws scaled to unit variance, [size]."""
    return np.asarray(rng.standard_t(TAIL_DF, size) * np.sqrt((TAIL_DF - 2) / TAIL_DF))


def ar1(shocks: Floats, persistence: float, spread: float) -> Floats:
    """AR(1) path of unit-variance `shocks` [T], with stationary standard deviation `spread`."""
    scale = spread * np.sqrt(1 - persistence**2)
    steps: Iterator[float] = accumulate(
        (scale * shocks).tolist(), lambda level, step: persistence * level + step
    )
    return np.fromiter(steps, dtype=np.float64, count=len(shocks))
