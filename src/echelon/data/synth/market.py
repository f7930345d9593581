"""The latent state of a synthetic market: what an observer of its bars has to guess.

1. `TradingHours`: sessions of the exchange, and when the bars of a session end.
2. Regimes: a hidden Markov chain walks through bull, bear and turbulent.
3. Factors, which move every symbol at once. The log volatility of one is an AR(1) around the
   regime's level. A fall today raises volatility tomorrow (the leverage effect); today's volatility
   is known before today's return. A day's return is an overnight part with Student tails and a
   Gaussian part in the session.
4. `SyntheticMarket` is small: what all symbols share, and the true parameters of each. The path of
   one symbol is made from it on demand (`path.trace`), so memory does not grow with symbols × days.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from echelon.config import SyntheticConfig
from echelon.data import calendars
from echelon.errors import ConfigError, UniverseError
from echelon.rng import stream
from echelon.types import Bools, Floats, Ints, Times


@dataclass(frozen=True)
class TradingHours:
    """The days and minutes a market trades, in the exchange's local time."""

    sessions: NDArray[np.datetime64]  # [T] datetime64[D]
    minute_ends: NDArray[np.int64]  # [M] minutes after midnight, of a regular session
    open_minutes: NDArray[np.int64]  # [T] how many a session has, fewer where it closes early
    timezone: str

    @cached_property
    def midnights(self) -> Times:
        """Midnight of each session, datetime64[us], [T]."""
        return self.sessions.astype("datetime64[us]")

    def bar_ends(self, step: int) -> NDArray[np.timedelta64]:
        """Time from midnight to the end of each bar of `step` minutes; the last may be short."""
        last = len(self.minute_ends)
        ends = np.minimum(np.arange(step, last + step, step), last) - 1
        return np.asarray(self.minute_ends[ends] * np.timedelta64(60_000_000, "us"))

    def has_bar(self, days: NDArray[np.int64], step: int) -> Bools:
        """Which bars of `step` minutes begin before the close of each of `days` [B]: [B, bars]."""
        starts = np.arange(0, len(self.minute_ends), step)
        return np.asarray(starts < self.open_minutes[days, None])

    def day_of(self, session: date) -> int | None:
        """Position of `session`, or None where the exchange is closed or nothing was made."""
        at = int(np.searchsorted(self.sessions, np.datetime64(session)))
        is_there = at < len(self.sessions) and self.sessions[at] == np.datetime64(session)
        return at if is_there else None


def _trading_hours(calendar: str, start: date, n_days: int, minutes_per_day: int) -> TradingHours:
    """Take `n_days` sessions of the exchange from `start` on, with minutes from its opening."""
    # 1.6 calendar days a session and three weeks leave room for weekends and holidays.
    end = start + timedelta(days=int(n_days * 1.6) + 21)
    sessions = calendars.sessions(calendar, start, min(end, calendars.bounds(calendar).last))
    if len(sessions) < n_days:
        raise ConfigError(
            f"data.synthetic.n_days is {n_days}, but {calendar} has only {len(sessions)} known "
            f"sessions from {start} on; take fewer days or an earlier data.synthetic.start"
        )
    sessions = sessions[:n_days]
    first, last = (sessions[k].item().date() for k in (0, -1))
    ends, closes = _minute_ends(calendar, first, minutes_per_day), np.full(n_days, 24 * 60)
    if calendar != calendars.ROUND_THE_CLOCK:  # minutes after midnight, [T]
        table = calendars.hours(calendar, first, last, calendars.timezone_of(calendar))
        closes = (table["close"] - table["session"]).dt.total_minutes().to_numpy()
    return TradingHours(
        sessions=sessions.astype("datetime64[D]"),
        minute_ends=ends,
        open_minutes=np.maximum(np.searchsorted(ends, closes, side="right"), 1),
        timezone=calendars.timezone_of(calendar),
    )


def _minute_ends(calendar: str, day: date, minutes_per_day: int) -> NDArray[np.int64]:
    """Minutes after midnight at which the minute bars of a regular session end, [M]."""
    if calendar == calendars.ROUND_THE_CLOCK:
        opening, closing, lunch = 0, 24 * 60, None
    else:
        until = min(day + timedelta(days=30), calendars.bounds(calendar).last)
        # Of a month, the first session with the latest close: an early close is no regular day.
        table = calendars.hours(calendar, day, until, calendars.timezone_of(calendar))
        hours = max(table.iter_rows(named=True), key=lambda row: _minute_of(row["close"]))
        opening, closing = _minute_of(hours["open"]), _minute_of(hours["close"])
        lunch = None if hours["break_start"] is None else hours
    ends = opening + np.arange(1, minutes_per_day + 1)
    if lunch is not None:
        pause, resume = _minute_of(lunch["break_start"]), _minute_of(lunch["break_end"])
        ends = np.where(ends > pause, ends + resume - pause, ends)
    # A bar that ended at midnight would carry the next day's date.
    fits = (ends <= closing) & (ends < 24 * 60)
    if not fits.all():
        raise ConfigError(
            f"data.synthetic.minutes_per_day is {minutes_per_day}, but a session of {calendar} "
            f"has room for {np.count_nonzero(fits)} minute bars; use at most that many"
        )
    return ends.astype(np.int64)


def _minute_of(moment: datetime) -> int:
    return moment.hour * 60 + moment.minute


REGIMES = ("bull", "bear", "turbulent")
# By regime: probability of staying a day (200, 100 and 40 sessions on average), where it goes when
# it ends, expected simple return and standard deviation of the market factor per day.
STAY = np.array([0.995, 0.990, 0.975])
LEAVE = np.array([[0.0, 0.6, 0.4], [0.6, 0.0, 0.4], [0.5, 0.5, 0.0]])
MARKET_DRIFT = np.array([0.0007, -0.0005, -0.0003])
MARKET_VOLATILITY = np.array([0.0075, 0.0120, 0.0220])
SECTOR_SCALE = 0.6  # a sector factor's volatility, as a share of the market's in the same regime

OVERNIGHT_SHARE = 0.25  # share of a day's variance that falls between the close and the next open
TAIL_DF = 5  # degrees of freedom of overnight moves: the least with a finite kurtosis
PERSISTENCE = 0.98  # AR(1) coefficient of a factor's log volatility
VOLATILITY_SPREAD = 0.40  # standard deviation of it around its regime's level
LEVERAGE = -0.5  # correlation of today's market return with tomorrow's volatility shock


@dataclass(frozen=True)
class Factor:
    """One common factor; arrays of shape [T]."""

    volatility: Floats  # standard deviation of the day's log return, known before the day
    drift: Floats  # expected log return of the day
    overnight: Floats  # the two parts of the day's log return, drift included
    intraday: Floats


def _regime_path(seed: int, n_days: int) -> Ints:
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

DelistReason = Literal["merger", "bankruptcy"]


@dataclass(frozen=True)
class SyntheticMarket:
    """The hidden truth of a synthetic market, `T` sessions of `N` symbols."""

    config: SyntheticConfig
    seed: int
    clock: TradingHours
    regime: Ints  # [T] index into `REGIMES`
    market: Factor
    sectors: tuple[Factor, ...]
    symbols: tuple[str, ...]
    sector: Ints  # [N] index into `sectors`
    beta: Floats  # [N] true loading on the market factor
    sector_beta: Floats  # [N] and on the symbol's sector factor
    sigma: Floats  # [N] level of the own (idiosyncratic) volatility per day
    alpha: Floats  # [N] own expected simple return per day
    price: Floats  # [N] reference price before the first bar
    shares: Floats  # [N] outstanding at the listing
    turnover: Floats  # [N] share of those outstanding that changes hands on an ordinary day
    listed: Ints  # [N] first session
    delisted: Ints  # [N] first session after the last one, T: never
    reasons: tuple[DelistReason | None, ...]  # [N] why each symbol delists, None: it does not

    @property
    def n_days(self) -> int:
        return len(self.regime)

    @property
    def n_symbols(self) -> int:
        return len(self.symbols)

    def position(self, symbol: str) -> int:
        if symbol not in self.symbols:
            raise UniverseError(
                f"unknown symbol {symbol!r}; this market has {self.symbols[0]} to "
                f"{self.symbols[-1]}"
            )
        return self.symbols.index(symbol)


def build_market(config: SyntheticConfig, seed: int, calendar: str = "XNYS") -> SyntheticMarket:
    clock = _trading_hours(calendar, config.start, config.n_days, config.minutes_per_day)
    regime = _regime_path(seed, config.n_days)
    level = MARKET_VOLATILITY[regime]
    width = max(4, len(str(config.n_symbols - 1)))
    symbols = tuple(f"S{n:0{width}d}" for n in range(config.n_symbols))
    # Seven standard normals from each symbol's own stream.
    draws = (stream(seed, "synthetic", "traits", n) for n in range(config.n_symbols))
    traits = np.array([np.clip(draw.standard_normal(7), -3.0, 3.0) for draw in draws])
    price = np.round(40.0 * np.exp(0.5 * traits[:, 4]), 2)
    capital = 5e9 * np.exp(1.1 * traits[:, 5])
    listed, delisted, reasons = _lives(config, seed)
    return SyntheticMarket(
        config=config,
        seed=seed,
        clock=clock,
        regime=regime,
        market=_factor(seed, "market", level, MARKET_DRIFT[regime], LEVERAGE),
        # What the members of a sector share beyond the market.
        sectors=tuple(
            _factor(seed, f"sector {s}", SECTOR_SCALE * level, np.zeros(config.n_days), 0.0)
            for s in range(len(SECTORS))
        ),
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


def _lives(
    config: SyntheticConfig, seed: int
) -> tuple[Ints, Ints, tuple[DelistReason | None, ...]]:
    """Listing and delisting sessions of all symbols, and why they leave.

    The configured shares are met exactly, as far as each symbol can trade for a session.
    """
    n_symbols, n_days = config.n_symbols, config.n_days
    rng = stream(seed, "synthetic", "lives")
    late = rng.permutation(n_symbols) < round(config.late_listings * n_symbols)
    leaves = rng.permutation(n_symbols) < round(config.delistings * n_symbols)
    listed = np.zeros(n_symbols, dtype=np.int64)
    delisted = np.full(n_symbols, n_days, dtype=np.int64)
    reasons: list[DelistReason | None] = [None] * n_symbols
    for n, (when, life, why) in enumerate(rng.random((n_symbols, 3))):
        if late[n] and n_days > 1:
            listed[n] = 1 + int(when * max(1, int(0.6 * n_days) - 1))
        if leaves[n] and n_days - listed[n] > 1:
            room = n_days - int(listed[n]) - 1
            delisted[n] = listed[n] + 1 + int((0.3 + 0.7 * life) * (room - 1))
            reasons[n] = "merger" if why < 0.6 else "bankruptcy"
    return listed, delisted, tuple(reasons)
