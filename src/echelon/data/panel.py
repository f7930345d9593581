"""The panel: what is known of a market, day by day, as arrays over time and assets.

Every value at row t was known at the close of bar t. A symbol that leaves keeps its history and
its last price; nothing is dropped because it has gaps, nothing is ever filled backwards.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echelon.types import Bools, Floats, Freq, PriceBasis, Times


@dataclass(frozen=True)
class Panel:
    """Point-in-time market data, `T` bars of `N` symbols: [T,N], where nothing else is said.

    Prices are on `price_basis` and NaN where there is no bar; what the source lacks is None.
    """

    times: Times  # [T]
    symbols: tuple[str, ...]  # [N]
    close: Floats
    present: Bools  # listed and not yet delisted
    member: Bools  # in the universe that day, as known that day
    suspended: Bools  # listed, yet without a trade
    tradable: Bools  # has a bar with a trade in it
    delisted: Bools  # gone, from the first day on which that is known
    anchor: Floats  # [N] close of the first bar in the store, the unit of feature prices
    freq: Freq
    calendar: str
    timezone: str
    price_basis: PriceBasis
    open: Floats | None = None
    high: Floats | None = None
    low: Floats | None = None
    volume: Floats | None = None  # shares, 0 where there is no bar
    amount: Floats | None = None  # traded value in money, 0 without a bar; None: close × volume
    # Start-anchored adjustment factor (1 at a symbol's first bar), carried forward; None where the
    # prices are adjusted already.
    factor: Floats | None = None
    pre_close: Floats | None = None  # the exchange's reference price; None: limits are off
    band: Floats | None = None  # half-width of the day's price limit (0.1 = 10 %), NaN: no limit
    limit_up: Floats | None = None  # rounded limit prices, NaN: none
    limit_down: Floats | None = None
    benchmark: Floats | None = None  # [T] level of the benchmark index, NaN before its start

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
        return len(self.times), len(self.symbols)

    @cached_property
    def fields(self) -> frozenset[str]:
        """What the source has, of open, high, low, close, volume, vwap, limits, time (of day)."""
        have = {f for f in ("open", "high", "low", "volume") if getattr(self, f) is not None}
        if self.band is not None:
            have.add("limits")
        if self.freq != "1d":
            have.add("time")
        have.add("close")
        if self.amount is not None and has_vwap(have, self.price_basis):
            have.add("vwap")
        return frozenset(have)


def has_vwap(fields: Set[str], price_basis: str) -> bool:
    """Whether bars with `fields` and traded value have an average price in the unit of the close.

    Adjusted prices do not: traded value and shares are as they were.
    """
    return price_basis == "raw" and {"high", "low", "volume"} <= fields


def forward_fill(values: Floats, before: Floats | None = None) -> Floats:
    """A copy of values[T,N] with the last finite one carried forward; before the first: NaN.

    before [N]: what to carry into the first rows instead
    """
    unknown = np.nan if before is None else before
    if len(values) == 1:
        return np.asarray(np.where(np.isnan(values), unknown, values), dtype=np.float64)
    rows = np.where(np.isnan(values), -1, np.arange(len(values))[:, None])
    np.maximum.accumulate(rows, axis=0, out=rows)
    filled = np.take_along_axis(values, np.maximum(rows, 0), axis=0)
    return np.asarray(np.where(rows < 0, unknown, filled), dtype=np.float64)
