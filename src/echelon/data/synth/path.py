"""The life of one symbol, day by day: volatility, returns, suspensions, corporate actions.

1. Own volatility: a slow and a fast AR(1) in logs, higher in turbulent regimes.
2. Overnight and intraday log returns: factors × loadings, own moves, drift, quarterly results;
   in the last weeks of a company, a bid or distress.
3. Suspensions: no bars, while the latent price moves on, so trading resumes with a gap.
4. Raw prices: the total-return path divided by the adjustment factor, rounded to the tick. On an
   ex-date the reference price is (previous close − cash) / ratio, rounded as an exchange does,
   and the factor grows by previous close / reference price.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echelon.data.synth.market import OVERNIGHT_SHARE, SyntheticMarket, ar1, student
from echelon.rng import stream
from echelon.types import Bools, Floats, Ints

TICKS_PER_UNIT = 100.0  # prices are whole multiples of 0.01
FLOOR_TICKS = 10.0  # no price falls below 0.10, so that five bid levels always fit under it

# Persistence and spread of the two parts of a symbol's own log volatility.
OWN_SLOW, OWN_FAST = (0.99, 0.45), (0.85, 0.25)
OWN_REGIME = np.array([1.0, 1.2, 1.9])  # by regime, in units of `SyntheticMarket.sigma`
RESULTS_EVERY, RESULTS_MOVE = 63, 0.05  # sessions; standard deviation of the gap they cause
DIVIDEND_EVERY = 252
# How long before its end a bankruptcy begins to show, and a merger is announced.
DISTRESS_DAYS, BID_DAYS = 60, 40
REVERSE_BELOW = 2.0  # a close under it forces a reverse split, where there are splits at all


class CorporateAction(NamedTuple):
    """Shares × `ratio` and `cash` per old share, from session `day` on."""

    day: int
    ratio: float
    cash: float


class Suspension(NamedTuple):
    """Sessions from `start` to before `end` without trading."""

    start: int
    end: int


@dataclass(frozen=True)
class _Risk:
    """What the returns of the days are drawn with, each [T]."""

    volatility: Floats  # conditional standard deviation of the day's log return
    own_volatility: Floats  # the idiosyncratic part of it, without the gaps of quarterly results
    session_volatility: Floats  # that of the log return from open to close
    tied: Floats  # share of the factors' moves that reaches the symbol; small once there is a bid
    drift: Floats  # expected log return of the day


@dataclass(frozen=True)
class _Tape:
    """What a tape shows of the days, each [T]."""

    open_ticks: Floats  # raw, as are the next two; NaN where the symbol does not trade
    close_ticks: Floats
    pre_ticks: Floats  # the reference price
    # close × factor is the total-return price; 1 at the first bar, carried through suspensions, NaN
    # outside the listing.
    factor: Floats
    shares: Floats  # outstanding, like `factor`
    actions: tuple[CorporateAction, ...]


@dataclass(frozen=True)
class SymbolPath(_Tape, _Risk):
    """One symbol's latent days and what the tape shows of them; arrays of shape [T]."""

    n: int
    listed: int
    delisted: int
    trades: Bools  # has bars that day
    log_open: Floats  # of the unrounded total-return price; NaN outside the listing
    log_close: Floats
    lots: Floats  # expected volume of the day in lots of 100
    suspensions: tuple[Suspension, ...]


def trace(market: SyntheticMarket, n: int) -> SymbolPath:
    first, end = int(market.listed[n]), int(market.delisted[n])
    risk, overnight, intraday, results = _returns(market, n)
    suspensions = _suspensions(market, n)
    trades = np.zeros(market.n_days, dtype=np.bool_)
    trades[first:end] = True
    for gap in suspensions:
        trades[gap.start : gap.end] = False
    log_close = np.full(market.n_days, np.nan)
    step = overnight[first:end] + intraday[first:end]
    log_close[first:end] = np.log(market.price[n]) + np.cumsum(step)
    log_open = log_close - intraday
    tape = _tape(market, n, trades, log_open, log_close)
    # Expected volume in lots of 100: busier when prices move.
    noise = stream(market.seed, "synthetic", "activity", n).standard_normal(market.n_days)
    activity = np.exp(ar1(noise, 0.8, 0.35) - 0.5 * 0.35**2)
    excitement = (risk.own_volatility / market.sigma[n]) ** 0.7 * (1.0 + 1.5 * results)
    return SymbolPath(
        n=n,
        listed=first,
        delisted=end,
        trades=trades,
        log_open=log_open,
        log_close=log_close,
        lots=market.turnover[n] * tape.shares / 100.0 * activity * excitement,
        suspensions=suspensions,
        **vars(risk),
        **vars(tape),
    )


def to_ticks(log_price: Floats) -> Floats:
    """Round a log price to whole ticks, not below the floor; any shape, NaN stays."""
    return np.maximum(np.rint(np.exp(log_price) * TICKS_PER_UNIT), FLOOR_TICKS)


def _returns(market: SyntheticMarket, n: int) -> tuple[_Risk, Floats, Floats, Bools]:
    """Risk, log returns overnight and in the session, and days of quarterly results; each [T]."""
    n_days, seed = market.n_days, market.seed
    beta, sector_beta = market.beta[n], market.sector_beta[n]
    common, sector = market.market, market.sectors[market.sector[n]]
    normals = stream(seed, "synthetic", "days", n).standard_normal((n_days, 4))
    night = student(stream(seed, "synthetic", "nights", n), n_days)
    log_volatility = ar1(normals[:, 0], *OWN_SLOW) + ar1(normals[:, 1], *OWN_FAST)
    own = market.sigma[n] * OWN_REGIME[market.regime]
    own = own * np.exp(log_volatility - OWN_SLOW[1] ** 2 - OWN_FAST[1] ** 2)
    fate_scale, fate_drift, fate_gap = _fate(market, n)
    own = own * fate_scale
    phase = int(stream(seed, "synthetic", "results", n).integers(RESULTS_EVERY))
    results = np.arange(n_days) % RESULTS_EVERY == phase
    surprise = RESULTS_MOVE * results * fate_scale
    # In a company whose price is fixed by a bid, factors hardly matter either.
    tied = np.minimum(fate_scale, 1.0)
    variance = (tied * beta * common.volatility) ** 2 + own**2
    variance = variance + (tied * sector_beta * sector.volatility) ** 2
    own_drift = market.alpha[n] + fate_drift - 0.5 * (own**2 + surprise**2)
    overnight = tied * (beta * common.overnight + sector_beta * sector.overnight)
    intraday = tied * (beta * common.intraday + sector_beta * sector.intraday)
    night_move = np.sqrt(OVERNIGHT_SHARE) * own * night + surprise * normals[:, 3]
    risk = _Risk(
        volatility=np.sqrt(variance + surprise**2),
        own_volatility=own,
        session_volatility=np.sqrt((1 - OVERNIGHT_SHARE) * variance),
        tied=tied,
        drift=own_drift + fate_gap + tied * (beta * common.drift + sector_beta * sector.drift),
    )
    overnight = overnight + OVERNIGHT_SHARE * own_drift + fate_gap + night_move
    day_move = np.sqrt(1 - OVERNIGHT_SHARE) * own * normals[:, 2]
    return risk, overnight, intraday + (1 - OVERNIGHT_SHARE) * own_drift + day_move, results


def _fate(market: SyntheticMarket, n: int) -> tuple[Floats, Floats, Floats]:
    """How the end of a company shows: volatility scale, extra drift, announcement gap; each [T]."""
    scale, drift, gap = np.ones(market.n_days), np.zeros(market.n_days), np.zeros(market.n_days)
    first, end = int(market.listed[n]), int(market.delisted[n])
    if market.reasons[n] == "merger":
        day = max(first, end - BID_DAYS)
        gap[day] = stream(market.seed, "synthetic", "bid", n).uniform(0.15, 0.35)
        scale[day:end] = 0.15
    elif market.reasons[n] == "bankruptcy":
        day = max(first, end - DISTRESS_DAYS)
        drift[day:end] = -0.015
        scale[day:end] = np.linspace(1.0, 2.5, end - day)
    return scale, drift, gap


def _suspensions(market: SyntheticMarket, n: int) -> tuple[Suspension, ...]:
    """When the symbol is suspended; never on its first day, so that every symbol has a bar."""
    first, end = int(market.listed[n]), int(market.delisted[n])
    rng = stream(market.seed, "synthetic", "suspensions", n)
    draws = rng.random((market.n_days, 2))
    gaps: list[Suspension] = []
    for day in np.flatnonzero(draws[:, 0] < market.config.suspension_rate).tolist():
        if day <= first or day >= end or (gaps and day < gaps[-1].end):
            continue
        # Two days at least, six on average, a month at most.
        length = min(2 + int(-4.5 * np.log1p(-draws[day, 1])), 21)
        gaps.append(Suspension(day, min(day + length, end)))
    return tuple(gaps)


def _plan(market: SyntheticMarket, n: int, days: Ints) -> tuple[dict[int, float], dict[int, float]]:
    """Positions in `days` of splits (→ a uniform that picks the ratio) and dividends (→ yield).

    What falls on a day without trading happens on the next day with; nothing on the first bar.
    """
    config, end = market.config, int(market.delisted[n])
    rng = stream(market.seed, "synthetic", "actions", n)
    phase, generosity = int(rng.integers(DIVIDEND_EVERY)), rng.uniform(0.5, 1.5)
    draws = rng.random((market.n_days, 2))
    first = int(days[0])

    def positions(planned: Iterable[int]) -> Iterator[tuple[int, int]]:
        at = ((int(np.searchsorted(days, day)), day) for day in planned if first < day < end)
        return ((position, day) for position, day in at if position < len(days))

    split_days = np.flatnonzero(draws[:, 0] < config.split_rate).tolist()
    splits = {position: float(draws[day, 1]) for position, day in positions(split_days)}
    paid = range(phase, market.n_days, DIVIDEND_EVERY) if config.dividend_yield else ()
    amount = float(config.dividend_yield * generosity)
    return splits, {position: amount for position, _ in positions(paid)}


def _ratio(price: float, pick: float) -> float:
    """New shares per old one: companies split to bring the price back into the usual range."""
    if price < 5.0:
        return 0.1
    if price < 20.0:
        return 1.2 if pick < 0.5 else 1.5
    return (1.5, 2.0, 2.0, 3.0)[int(4 * pick)]


def _tape(
    market: SyntheticMarket, n: int, trades: Bools, log_open: Floats, log_close: Floats
) -> _Tape:
    """Turn the total-return path [T] into raw prices, event by event."""
    days = np.flatnonzero(trades)
    splits, dividends = _plan(market, n, days)
    planned = sorted({*splits, *dividends, len(days)})
    open_ticks, close_ticks, pre_ticks, factors, shares = (
        np.full(market.n_days, np.nan) for _ in range(5)
    )
    pre_ticks[days[0]] = np.rint(market.price[n] * TICKS_PER_UNIT)
    factor, outstanding = 1.0, float(market.shares[n])
    actions: list[CorporateAction] = []
    position = 0
    while position < len(days):
        stop = next(p for p in planned if p > position)
        stretch = days[position:stop]
        closes = to_ticks(log_close[stretch] - np.log(factor))
        low = np.flatnonzero(closes < REVERSE_BELOW * TICKS_PER_UNIT)
        forced = market.config.split_rate > 0 and low.size > 0 and position + low[0] + 1 < stop
        if forced:
            stop = position + int(low[0]) + 1
            stretch, closes = days[position:stop], closes[: low[0] + 1]
        close_ticks[stretch] = closes
        open_ticks[stretch] = to_ticks(log_open[stretch] - np.log(factor))
        pre_ticks[stretch[1:]] = closes[:-1]
        until = days[stop] if stop < len(days) else int(market.delisted[n])
        factors[stretch[0] : until] = factor
        shares[stretch[0] : until] = outstanding
        if stop < len(days):
            close = float(closes[-1])
            ratio = 0.1 if forced else 1.0
            if stop in splits:
                ratio = _ratio(close / TICKS_PER_UNIT, splits[stop])
            cash = min(np.rint(close * dividends.get(stop, 0.0)), np.floor(0.9 * close))
            reference = max(np.rint((close - cash) / ratio), FLOOR_TICKS)
            pre_ticks[days[stop]] = reference
            if ratio != 1.0 or cash > 0:
                factor *= close / reference
                outstanding = outstanding * ratio
                actions.append(CorporateAction(int(days[stop]), ratio, cash / TICKS_PER_UNIT))
        position = stop
    return _Tape(open_ticks, close_ticks, pre_ticks, factors, shares, tuple(actions))
