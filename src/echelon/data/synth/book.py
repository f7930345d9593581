"""Five levels of an order book at the end of each minute, around that minute's close.

The last trade lies between the best bid and the best ask. The spread widens with the minute's
volatility in ticks; depth grows with the day's volume and shrinks when prices move fast, and
rises from the best level outwards as it does in real books. Snapshots look at their own minute
and at the day's expected volume and volatility, which are known before the day.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from echelon.data.synth.minutes import BLOCK, MinuteEngine, variance_profile
from echelon.data.synth.path import TICKS_PER_UNIT, trace
from echelon.errors import DataError
from echelon.rng import stream
from echelon.types import Floats, Times

LEVELS = 5
DEPTH_SHAPE = np.array([1.0, 1.5, 1.8, 1.9, 1.8])
"""Mean depth of each level, in units of the best one."""
DEPTH_PER_MINUTE = 0.5
"""Mean depth at the best level, in minutes of average volume."""


class OrderBook(NamedTuple):
    """Snapshots of one session, best level first: `M` minutes, 5 levels.

    time[M]: end of the minute; close[M]: the minute's close
    bid_price, ask_price[M,5]; bid_size, ask_size[M,5]: shares
    """

    time: Times
    close: Floats
    bid_price: Floats
    bid_size: Floats
    ask_price: Floats
    ask_size: Floats

    def to_frame(self) -> pl.DataFrame:
        """One row per minute: time, close, bid_price_1 … ask_size_5."""
        columns: dict[str, Times | Floats] = {"time": self.time, "close": self.close}
        for name in ("bid_price", "bid_size", "ask_price", "ask_size"):
            values: Floats = getattr(self, name)
            columns |= {f"{name}_{level + 1}": values[:, level] for level in range(LEVELS)}
        return pl.DataFrame(columns)


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
