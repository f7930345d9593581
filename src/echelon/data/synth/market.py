"""The latent state of a synthetic market: what an observer of its bars has to guess.

`Market` is small: what all symbols share, and the true parameters of each. The path of one
symbol is made from it on demand (`path.trace`), so memory does not grow with symbols × days.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from echelon.config import SyntheticConfig
from echelon.data.synth.clock import Clock, make_clock
from echelon.data.synth.factors import Factor, Ints, market_factor, regime_path, sector_factor
from echelon.errors import ConfigError, UniverseError
from echelon.rng import stream
from echelon.types import Floats

GENERATOR_VERSION = 1
"""Part of the source's fingerprint: raise it whenever the numbers for a seed change."""

SECTORS = (
    "Technology",
    "Financials",
    "Health Care",
    "Industrials",
    "Energy",
    "Consumer",
    "Materials",
    "Utilities",
)

Reason = Literal["merger", "bankruptcy"]


@dataclass(frozen=True)
class Market:
    """The hidden truth of a synthetic market, `T` sessions of `N` symbols.

    regime[T]: index into `factors.REGIMES`
    market, sectors: the common factors
    sector[N]: index into `sectors`
    beta, sector_beta[N]: true loadings on the market and on the symbol's sector factor
    sigma[N]: level of the own (idiosyncratic) volatility per day
    alpha[N]: own expected simple return per day
    price[N]: reference price before the first bar
    shares[N]: shares outstanding at the listing
    turnover[N]: share of the shares outstanding that changes hands on an ordinary day
    listed[N]: first session; delisted[N]: first session after the last one, T: never
    reasons: why each symbol delists, None where it does not
    """

    config: SyntheticConfig
    seed: int
    clock: Clock
    regime: Ints
    market: Factor
    sectors: tuple[Factor, ...]
    symbols: tuple[str, ...]
    sector: Ints
    beta: Floats
    sector_beta: Floats
    sigma: Floats
    alpha: Floats
    price: Floats
    shares: Floats
    turnover: Floats
    listed: Ints
    delisted: Ints
    reasons: tuple[Reason | None, ...]

    @property
    def n_days(self) -> int:
        """T."""
        return len(self.regime)

    @property
    def n_symbols(self) -> int:
        """N."""
        return len(self.symbols)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {symbol: n for n, symbol in enumerate(self.symbols)}

    def position(self, symbol: str) -> int:
        """Column of `symbol`."""
        if symbol not in self._positions:
            raise UniverseError(
                f"unknown symbol {symbol!r}; this market has {self.symbols[0]} to "
                f"{self.symbols[-1]}"
            )
        return self._positions[symbol]

    def name(self, n: int) -> str:
        """Full name of symbol `n`."""
        return f"Synthetic {SECTORS[self.sector[n]]} {n}"


def build_market(config: SyntheticConfig, seed: int, calendar: str = "XNYS") -> Market:
    """Draw the latent state of the market that `config` and `seed` name."""
    if seed < 0:
        raise ConfigError(f"the seed of a synthetic market is {seed}; use 0 or more")
    clock = make_clock(calendar, config.start, config.n_days, config.minutes_per_day)
    regime = regime_path(seed, config.n_days)
    width = max(4, len(str(config.n_symbols - 1)))
    symbols = tuple(f"S{n:0{width}d}" for n in range(config.n_symbols))
    traits = np.array([_traits(seed, n) for n in range(config.n_symbols)])
    price = np.round(40.0 * np.exp(0.5 * traits[:, 4]), 2)
    capital = 5e9 * np.exp(1.1 * traits[:, 5])
    listed, delisted, reasons = _lives(config, seed)
    return Market(
        config=config,
        seed=seed,
        clock=clock,
        regime=regime,
        market=market_factor(seed, regime),
        sectors=tuple(sector_factor(seed, s, regime) for s in range(len(SECTORS))),
        symbols=symbols,
        sector=np.arange(config.n_symbols) % len(SECTORS),
        beta=np.clip(1.0 + 0.25 * traits[:, 0], 0.3, 2.0),
        sector_beta=np.clip(1.0 + 0.25 * traits[:, 1], 0.3, 2.0),
        sigma=0.011 * np.exp(0.25 * traits[:, 2]),
        alpha=0.03 / 252 * traits[:, 3],
        price=price,
        shares=100.0 * np.ceil(capital / price / 100.0),
        turnover=0.005 * np.exp(0.3 * traits[:, 6]),
        listed=listed,
        delisted=delisted,
        reasons=reasons,
    )


def _traits(seed: int, n: int) -> Floats:
    """Seven standard normals, clipped to ±3, from the symbol's own stream."""
    return np.clip(stream(seed, "synthetic", "traits", n).standard_normal(7), -3.0, 3.0)


def _lives(config: SyntheticConfig, seed: int) -> tuple[Ints, Ints, tuple[Reason | None, ...]]:
    """Listing and delisting sessions of all symbols, and why they leave.

    The configured shares are met exactly (rounded to whole symbols) wherever the days allow: a
    symbol trades at least one session, and one that delists leaves at least one session before
    the end.
    """
    n_symbols, n_days = config.n_symbols, config.n_days
    rng = stream(seed, "synthetic", "lives")
    late = rng.permutation(n_symbols) < round(config.late_listings * n_symbols)
    leaves = rng.permutation(n_symbols) < round(config.delistings * n_symbols)
    listed = np.zeros(n_symbols, dtype=np.int64)
    delisted = np.full(n_symbols, n_days, dtype=np.int64)
    reasons: list[Reason | None] = [None] * n_symbols
    for n, (when, life, why) in enumerate(rng.random((n_symbols, 3))):
        if late[n] and n_days > 1:
            listed[n] = 1 + int(when * max(1, int(0.6 * n_days) - 1))
        if leaves[n] and n_days - listed[n] > 1:
            room = n_days - int(listed[n]) - 1
            delisted[n] = listed[n] + 1 + int((0.3 + 0.7 * life) * (room - 1))
            reasons[n] = "merger" if why < 0.6 else "bankruptcy"
    return listed, delisted, tuple(reasons)
