"""The panel: what is known of a market, day by day, as arrays over time and assets.

Every value at row t was known at the close of bar t. A symbol that leaves keeps its history and
its last price; nothing is dropped because it has gaps, nothing is ever filled backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echelon.types import Bools, Floats, Freq, PriceBasis, Times


@dataclass(frozen=True)
class Panel:
    """Point-in-time market data, `T` bars of `N` symbols.

    times[T]; symbols[N]
    open, high, low, close[T,N]: prices on `price_basis`, NaN where there is no bar; open, high
        and low are None where the source has closes only
    volume[T,N]: shares, 0 where there is no bar; None where the source has none
    amount[T,N]: traded value in money, 0 where there is no bar; None where it is close × volume
    factor[T,N]: start-anchored adjustment factor (1 at a symbol's first bar), carried forward;
        None where the prices are adjusted already
    anchor[N]: close of the symbol's first bar in the store, the unit of its feature prices
    pre_close[T,N]: the exchange's reference price; None where limits are off
    band[T,N]: half-width of the day's price limit (0.1 = 10 %), NaN: no limit; None: limits off
    limit_up, limit_down[T,N]: rounded limit prices, NaN: none; None where limits are off
    present[T,N]: listed and not yet delisted
    member[T,N]: in the universe that day, as known that day
    suspended[T,N]: listed, yet without a trade
    tradable[T,N]: has a bar with a trade in it
    delisted[T,N]: gone, from the first day on which that is known
    benchmark[T]: level of the benchmark index, NaN before its start; None without a benchmark
    """

    times: Times
    symbols: tuple[str, ...]
    close: Floats
    present: Bools
    member: Bools
    suspended: Bools
    tradable: Bools
    delisted: Bools
    anchor: Floats
    freq: Freq
    calendar: str
    timezone: str
    price_basis: PriceBasis
    open: Floats | None = None
    high: Floats | None = None
    low: Floats | None = None
    volume: Floats | None = None
    amount: Floats | None = None
    factor: Floats | None = None
    pre_close: Floats | None = None
    band: Floats | None = None
    limit_up: Floats | None = None
    limit_down: Floats | None = None
    benchmark: Floats | None = None

    def __post_init__(self) -> None:
        shape = (len(self.times), len(self.symbols))
        for name in ("close", "present", "member", "suspended", "tradable", "delisted"):
            assert getattr(self, name).shape == shape, f"{name} is not [T,N]"
        for name in ("open", "high", "low", "volume", "amount", "factor", "pre_close", "band"):
            array = getattr(self, name)
            assert array is None or array.shape == shape, f"{name} is not [T,N]"
        assert self.anchor.shape == (shape[1],), "anchor is not [N]"

    @property
    def shape(self) -> tuple[int, int]:
        """(T, N)."""
        return len(self.times), len(self.symbols)

    @cached_property
    def fields(self) -> frozenset[str]:
        """What the source has, of open, high, low, close, volume, limits and time (of day)."""
        have = {f for f in ("open", "high", "low", "volume") if getattr(self, f) is not None}
        if self.band is not None:
            have.add("limits")
        if self.freq != "1d":
            have.add("time")
        return frozenset(have | {"close"})

    def valuation_close(self) -> Floats:
        """Close[T,N], the last known price carried forward: for valuation, never for trading."""
        return forward_fill(self.close)


def forward_fill(values: Floats) -> Floats:
    """Carry the last finite value of each column forward; NaN stays before the first one.

    values: [T,N]. Returns a new array.
    """
    rows = np.where(np.isnan(values), -1, np.arange(len(values))[:, None])
    np.maximum.accumulate(rows, axis=0, out=rows)
    filled = np.take_along_axis(values, np.maximum(rows, 0), axis=0)
    return np.asarray(np.where(rows < 0, np.nan, filled), dtype=np.float64)
