"""Trading days on one grid of ticks: what orders are worked against.

A tick is a bar of the day's grid (a minute, five minutes) or the time between two snapshots of a
book. All days of one `Days` have the same grid; a tick that does not occur on a day (a halt, an
early close) has no price and no volume, and nothing trades there.

Axes: `D` days (each of one symbol), `T` ticks of a day, `E` orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from echelon.types import Bools, Floats, Ints, Times

PriceSource = Literal["close", "vwap", "book"]
"""What a trade in a tick is priced at: the bar's close, its volume-weighted mean, or the best
opposite quote."""


@dataclass(frozen=True)
class Days:
    """`D` days of `T` ticks.

    symbols[D]; dates[D]: midnight, or the moment at which a session of a book begins
    clock[T]: minutes after that at which a tick begins
    buy, sell[D,T]: price of a share bought or sold in the tick; NaN: no trading
    known[D,T]: last price known as the tick begins, NaN before the first; the arrival price
    volume[D,T]: shares traded in the tick, 0 where there is no trading
    """

    symbols: tuple[str, ...]
    dates: Times
    clock: Floats
    buy: Floats
    sell: Floats
    known: Floats
    volume: Floats
    price_source: PriceSource = "close"

    def __post_init__(self) -> None:
        shape = (len(self.dates), len(self.clock))
        assert len(self.symbols) == shape[0], "symbols are not [D]"
        for name in ("buy", "sell", "known", "volume"):
            array = getattr(self, name)
            assert array.shape == shape, f"{name} is not [D,T]"
            assert array.dtype == np.float64, f"{name} is not float64"
            assert array.flags.c_contiguous, f"{name} is not one block of memory"
        assert np.isfinite(self.volume).all(), "volume is not a number somewhere"
        assert (self.volume >= 0.0).all(), "volume is negative somewhere"

    @property
    def shape(self) -> tuple[int, int]:
        """(D, T)."""
        return len(self.dates), len(self.clock)

    def name(self, day: int) -> str:
        """Symbol and date, for messages; of a session its time, too."""
        date = self.dates[day]
        midnight = date == date.astype("datetime64[D]")
        return (
            f"{self.symbols[day]} on {np.datetime_as_string(date, unit='D' if midnight else 's')}"
        )

    @property
    def tick_minutes(self) -> float:
        """How long a tick is: the shortest time from one to the next (a lunch break is longer)."""
        return float(np.diff(self.clock).min()) if len(self.clock) > 1 else 1.0

    @property
    def sessions(self) -> tuple[Ints, Ints]:
        """(first tick, the one after the last) of each day's date, [D]: when the market was open.

        Of a date on which one symbol alone is known, that of all days together: its silence may
        have been a halt, which nobody knew beforehand. Early closes are known beforehand.
        """
        traded = (self.buy > 0.0) | (self.sell > 0.0)
        which, count = np.unique(self.dates, return_inverse=True, return_counts=True)[1:]
        open_ = np.zeros((len(count), traded.shape[1]), dtype=np.bool_)
        np.logical_or.at(open_, which, traded)
        open_[(count == 1) | ~open_.any(axis=1)] = traded.any(axis=0)
        begin, end = open_.argmax(axis=1), open_.shape[1] - open_[:, ::-1].argmax(axis=1)
        return begin[which], end[which]

    def take(self, which: Ints | Bools) -> Days:
        """Some of the days, in that order."""
        which = np.flatnonzero(which) if which.dtype == np.bool_ else which
        buy, sell, known, volume = (
            np.ascontiguousarray(array[which])
            for array in (self.buy, self.sell, self.known, self.volume)
        )
        return replace(
            self,
            symbols=tuple(self.symbols[k] for k in which.tolist()),
            dates=self.dates[which],
            buy=buy,
            sell=sell,
            known=known,
            volume=volume,
        )

    def by_symbol(self) -> list[tuple[Ints, Ints]]:
        """For each symbol its days in order of date, and how many of them lie before each."""
        _, number = np.unique(np.asarray(self.symbols), return_inverse=True)
        order = np.lexsort((self.dates, number))
        groups = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
        dates = [self.dates[which] for which in groups]
        return [
            (which, np.searchsorted(own, own, side="left").astype(np.int64))
            for which, own in zip(groups, dates, strict=True)
        ]

    @staticmethod
    def from_prices(
        price: Floats,
        volume: Floats,
        *,
        symbol: str = "SYM",
        opens_at: float = 570.0,
        minutes: float = 1.0,
        first_date: str = "2020-01-06",
    ) -> Days:
        """Days of one symbol made from price[D,T] and volume[D,T]: for markets of one's own.

        Known as a tick begins is the price of the tick before; at the first, its own.
        """
        price, volume = np.ascontiguousarray(price, float), np.ascontiguousarray(volume, float)
        n_days, n_ticks = price.shape
        known = np.concatenate([price[:, :1], price[:, :-1]], axis=1)
        return Days(
            symbols=(symbol,) * n_days,
            dates=np.datetime64(first_date, "us") + np.arange(n_days) * np.timedelta64(1, "D"),
            clock=np.asarray(opens_at + minutes * np.arange(n_ticks), dtype=np.float64),
            buy=price,
            sell=price,
            known=np.ascontiguousarray(known),
            volume=volume,
        )
