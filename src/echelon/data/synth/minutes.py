"""Minute bars between a known open and a known close, and longer bars made of them.

1. Each source of randomness (market, sector, the symbol itself) gets a Brownian bridge over the
   session, in a clock that runs faster near the open and the close. A bridge ends at zero, so
   the day's close stays what `path` says; symbols share the bridges of their factors, so they
   move together inside the day as well.
2. The high and the low of a minute are drawn from the law of a bridge's extremes.
3. Volume follows a U over the session, and the size of the minute's move.
4. A session that closes early is played faster. The minutes it lacks are placeholders, flat at
   the close and without volume, that change no aggregate; `TradingHours.has_bar` tells them apart.

Prices are whole ticks and volumes whole lots of 100 shares, so a minute's traded value is a whole
number and sums are exact in float64: every longer bar, whoever aggregates it, is the same.

`order_book` puts five levels around the close of each minute. The spread widens with the minute's
volatility in ticks; depth grows with the day's expected volume, shrinks when prices move fast, and
rises from the best level outwards as it does in real books.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from echelon.data.synth.market import OVERNIGHT_SHARE, SyntheticMarket
from echelon.data.synth.path import FLOOR_TICKS, TICKS_PER_UNIT, SymbolPath, trace
from echelon.errors import DataError
from echelon.rng import stream
from echelon.types import Floats, Ints, Times

BLOCK = 32  # sessions that share one random stream: the unit in which minutes are made


class BarBlock(NamedTuple):
    """Bars of one symbol in one block of sessions; `B` sessions with trading, `M` bars in each."""

    days: Ints  # [B] positions of the sessions
    open: Floats  # [B,M] in ticks, as are the next three
    high: Floats
    low: Floats
    close: Floats
    lots: Floats  # [B,M] volume in lots of 100
    amount: Floats  # [B,M] traded value in money, whole numbers


def variance_profile(minutes: int) -> Floats:
    """Share of a session's variance that falls into each minute, [M]: highest at the open."""
    x = (np.arange(minutes) + 0.5) / minutes
    u = 0.7 + 0.7 * (2.0 * x - 1.0) ** 2 + 2.0 * np.exp(-x / 0.06)
    return np.asarray(u / u.sum())


class MinuteEngine:
    """Makes the minute bars of any symbol in any block; the factors' bridges are kept for all."""

    def __init__(self, market: SyntheticMarket) -> None:
        self.market = market
        self._minutes = market.config.minutes_per_day
        self._bridges: dict[tuple[str, int], Floats] = {}
        self._profiles: dict[int, _Profile] = {}

    @property
    def n_blocks(self) -> int:
        return -(-self.market.n_days // BLOCK)

    def block(self, path: SymbolPath, block: int) -> BarBlock | None:
        """Minute bars of the symbol of `path` in block `block`; None where it does not trade."""
        start = block * BLOCK
        days = start + np.flatnonzero(path.trades[start : start + BLOCK])
        if not days.size:
            return None
        market, n = self.market, path.n
        rng = stream(market.seed, "synthetic", "minutes", n, block)
        shape = (BLOCK, self._minutes)
        # Whole blocks are drawn, trading or not, so that no event shifts another day's numbers.
        rows = days - start
        moves = rng.standard_normal(shape)
        up, down, size = (rng.standard_exponential(shape)[rows] for _ in range(3))
        profile = self._profile(block)
        prices = self._prices(path, block, days, moves)
        spread = path.session_volatility[days, None] * profile.root[rows]
        before, after = prices[:, :-1], prices[:, 1:]
        lots = path.lots[days, None] * profile.volume[rows]
        lots *= (0.35 + 0.65 * size) * (0.6 + 0.5 * np.abs(moves[rows]))
        lots = np.floor(lots) + (profile.volume[rows] > 0)
        high, low = _extremes(before, after, after * spread, up, down)
        bars = BarBlock(days, np.rint(before), high, low, np.rint(after), lots, amount=lots)
        self._pin(bars, path)
        typical = np.rint((bars.open + bars.high + bars.low + bars.close) / 4.0)
        return bars._replace(amount=typical * lots)

    def _pin(self, bars: BarBlock, path: SymbolPath) -> None:
        """Give days their own open and close, rounded where corporate actions were worked out."""
        close = path.close_ticks[bars.days]
        bars.open[:, 0] = path.open_ticks[bars.days]
        bars.close[:, -1] = close
        ends = self.market.clock.open_minutes[bars.days]
        for row in np.flatnonzero(ends < self._minutes):
            bars.close[row, ends[row] - 1 :] = close[row]
            for values in (bars.open, bars.high, bars.low):
                values[row, ends[row] :] = close[row]
        np.maximum(bars.high, np.maximum(bars.open, bars.close), out=bars.high)
        np.minimum(bars.low, np.minimum(bars.open, bars.close), out=bars.low)

    def _prices(self, path: SymbolPath, block: int, days: Ints, moves: Floats) -> Floats:
        """Unrounded raw price, in ticks, at the open and at the end of each minute: [B, M+1]."""
        market, n = self.market, path.n
        inside = np.sqrt(1 - OVERNIGHT_SHARE)
        rows = days - block * BLOCK
        sector = int(market.sector[n])
        total = path.log_close[days] - path.log_open[days]
        walk = total[:, None] * self._profile(block).clock[rows]
        common = market.beta[n] * market.market.volatility[days]
        shared = market.sector_beta[n] * market.sectors[sector].volatility[days]
        tied = path.tied[days]
        walk += (inside * tied * common)[:, None] * self._bridge("market", block)[rows]
        walk += (inside * tied * shared)[:, None] * self._bridge(f"sector {sector}", block)[rows]
        own = self._to_bridge(moves, block)[rows]
        walk += (inside * path.own_volatility[days])[:, None] * own
        start = path.log_open[days] - np.log(path.factor[days])
        prices = np.empty((len(days), self._minutes + 1))
        prices[:, 0] = start
        np.add(start[:, None], walk, out=prices[:, 1:])
        np.exp(prices, out=prices)
        prices *= TICKS_PER_UNIT
        return np.maximum(prices, FLOOR_TICKS, out=prices)

    def _to_bridge(self, moves: Floats, block: int) -> Floats:
        """Unit Brownian bridges of standard normals, [BLOCK, M] both."""
        profile = self._profile(block)
        walk = np.cumsum(moves * profile.root, axis=1)
        walk -= profile.clock * walk[:, -1:]
        return walk

    def _bridge(self, name: str, block: int) -> Floats:
        """Bridges of a factor in a block, [BLOCK, M]."""
        key = (name, block)
        if key not in self._bridges:
            rng = stream(self.market.seed, "synthetic", "bridge", name, block)
            moves = rng.standard_normal((BLOCK, self._minutes))
            self._bridges[key] = self._to_bridge(moves, block)
        return self._bridges[key]

    def _profile(self, block: int) -> _Profile:
        if block not in self._profiles:
            ends = self.market.clock.open_minutes[block * BLOCK : (block + 1) * BLOCK]
            # Days beyond the last are drawn but never shown.
            ends = np.pad(ends, (0, BLOCK - len(ends)), constant_values=self._minutes)
            within = np.arange(self._minutes) < ends[:, None]
            variance = np.where(within, variance_profile(self._minutes), 0.0)
            variance /= variance.sum(axis=1, keepdims=True)
            # A U over the day, higher at the close.
            x = (np.arange(self._minutes) + 0.5) / self._minutes
            u = 0.55 + 1.35 * (2.0 * x - 1.0) ** 2
            u = u + 0.6 * np.exp(-x / 0.05) + 0.9 * np.exp((x - 1) / 0.04)
            volume = np.where(within, u / u.sum(), 0.0)
            volume /= volume.sum(axis=1, keepdims=True)
            clock = np.cumsum(variance, axis=1)
            # A bridge must end at zero exactly, and stay there.
            clock[np.arange(self._minutes) >= ends[:, None] - 1] = 1.0
            self._profiles[block] = _Profile(clock, np.sqrt(variance), volume)
        return self._profiles[block]


class _Profile(NamedTuple):
    """How the sessions of a block run, each [BLOCK, M]."""

    clock: Floats  # share of the session's variance up to the minute's end, 1 from the close on
    root: Floats  # square root of the minute's own share, 0 after the close
    volume: Floats  # the minute's share of the volume, 0 after the close


def _extremes(
    before: Floats, after: Floats, spread: Floats, up: Floats, down: Floats
) -> tuple[Floats, Floats]:
    """Highs and lows in ticks between prices at the start and end of bars; all [B,M].

    The maximum of a Brownian bridge from a to b with variance s² is distributed as
    (a + b + √((b−a)² + 2s²E)) / 2 with E standard exponential; the minimum mirrors it.
    """
    middle, gap2, scale = before + after, (after - before) ** 2, 2.0 * spread * spread
    high = np.rint(0.5 * (middle + np.sqrt(gap2 + scale * up)))
    low = np.maximum(np.rint(0.5 * (middle - np.sqrt(gap2 + scale * down))), FLOOR_TICKS)
    return high, low


def aggregate(block: BarBlock, step: int) -> BarBlock:
    """Bars of `step` minutes each; the last of a session may be shorter."""
    minutes = block.close.shape[1]
    if step == 1:
        return block
    starts = np.arange(0, minutes, step)
    ends = np.minimum(starts + step, minutes) - 1
    return BarBlock(
        days=block.days,
        open=block.open[:, starts],
        high=np.maximum.reduceat(block.high, starts, axis=1),
        low=np.minimum.reduceat(block.low, starts, axis=1),
        close=block.close[:, ends],
        lots=np.add.reduceat(block.lots, starts, axis=1),
        amount=np.add.reduceat(block.amount, starts, axis=1),
    )


def join(blocks: Sequence[BarBlock]) -> BarBlock:
    return BarBlock(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))


LEVELS = 5
DEPTH_SHAPE = np.array([1.0, 1.5, 1.8, 1.9, 1.8])
"""Mean depth of each level, in units of the best one."""
DEPTH_PER_MINUTE = 0.5  # mean depth at the best level, in minutes of average volume


class OrderBook(NamedTuple):
    """Snapshots of one session, best level first: `M` minutes, 5 levels."""

    time: Times  # [M] end of the minute
    close: Floats  # [M]
    bid_price: Floats  # [M,5], as are the next three; sizes are in shares
    bid_size: Floats
    ask_price: Floats
    ask_size: Floats


def order_book(engine: MinuteEngine, symbol: str, day: int) -> OrderBook:
    """Snapshots of `symbol` at the end of each minute of session number `day`."""
    market = engine.market
    n = market.position(symbol)
    path = trace(market, n)
    made = engine.block(path, day // BLOCK) if path.trades[day] else None
    if made is None:
        raise DataError(
            f"{symbol} does not trade on {market.clock.sessions[day]}: it is suspended or not "
            "listed, so there is no order book"
        )
    minutes = int(market.clock.open_minutes[day])
    close = made.close[made.days == day][0, :minutes]
    rng = stream(market.seed, "synthetic", "book", n, day)
    # One minute's standard deviation in ticks sets the scale of the spread.
    root = np.sqrt(variance_profile(minutes))
    swing = close * root * path.session_volatility[day]
    spread = 1.0 + rng.poisson(0.25 * swing)
    # The last trade hit the bid, lifted the ask or was in between.
    below = np.floor(rng.random(minutes) * (spread + 1.0))
    bid = np.maximum(close - below, float(LEVELS))
    ask = np.maximum(bid + spread, close)
    steps = 1.0 + rng.poisson((0.1 * swing)[:, None, None], (minutes, 2, LEVELS - 1))
    # Where a low price leaves no room, levels follow each other tick by tick.
    cramped = bid - steps[:, 0].sum(axis=1) < 1.0
    steps[cramped] = 1.0
    offsets = np.concatenate([np.zeros((minutes, 2, 1)), np.cumsum(steps, axis=2)], axis=2)
    quiet = root.mean() / root
    per_minute = path.lots[day] / minutes
    depth = DEPTH_PER_MINUTE * per_minute * np.sqrt(quiet)[:, None, None] * DEPTH_SHAPE
    calm = np.clip(market.sigma[n] / path.own_volatility[day], 0.25, 4.0)
    lots = 1.0 + np.floor(depth * calm * rng.gamma(2.0, 0.5, (minutes, 2, LEVELS)))
    return OrderBook(
        time=market.clock.midnights[day] + market.clock.bar_ends(1)[:minutes],
        close=close / TICKS_PER_UNIT,
        bid_price=(bid[:, None] - offsets[:, 0]) / TICKS_PER_UNIT,
        bid_size=100.0 * lots[:, 0],
        ask_price=(ask[:, None] + offsets[:, 1]) / TICKS_PER_UNIT,
        ask_size=100.0 * lots[:, 1],
    )
