"""What a feature is, and how a user adds one.

A feature is a pure function of *one symbol's own bars, gaps removed*, that returns one column or
more. It declares how many bars it needs before its first valid value; the pipeline does the
rest: alignment, gaps, warm-up, masks, scaling, the leakage check.

    from echelon.features import Bars, factor

    @factor(lookback=21, needs=("close",))
    def momentum_20(bars: Bars):
        out = np.full(len(bars), np.nan)
        out[20:] = bars.close[20:] / bars.close[:-20] - 1
        return out

Ranks and z-scores compare symbols with one another on one bar; see `CrossSection`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from echelon.features._kernels import relative_to_close
from echelon.types import Floats, Times

Group = Literal["OHLCV", "indicators", "stationary", "calendar", "custom", "exogenous"]
Field = Literal["open", "high", "low", "close", "volume", "vwap", "limits", "time"]
"""What a feature may need of a source; time: bars that have a time of day."""


@dataclass(frozen=True, slots=True)
class Bars:
    """One symbol's own bars in order, days without a bar left out: arrays of shape [L].

    Prices are start-anchored total-return prices in units of the symbol's first close, so they
    carry no trace of later splits or dividends and do not change when the whole history is
    multiplied by a constant. Fields the source does not have are None; a feature that `needs`
    them is left out before it is called. The arrays are read-only: features share them, and one
    that wrote into its input would change the next one's.

    value: traded value in money (price × volume), also called `volume`
    vwap: average price of the bar's trades, traded value over shares; where that is not a price of
        the bar (no trade, another unit) the mean of high, low and close stands in
    limit_up, limit_down: the day's limits before rounding, in the same unit; NaN: no limit
    raw_close: the close as the source has it. Its *level* is not point-in-time for adjusted
        sources: use it only in ratios within one day.
    """

    times: Times
    close: Floats
    raw_close: Floats
    open: Floats | None = None
    high: Floats | None = None
    low: Floats | None = None
    value: Floats | None = None
    limit_up: Floats | None = None
    limit_down: Floats | None = None
    vwap: Floats | None = None

    def __post_init__(self) -> None:
        # A kernel answers NaN with NaN ever after; here it is caught at the door.
        for name in self.__slots__:
            array = getattr(self, name)
            if array is None:
                continue
            assert array.shape == self.times.shape, f"{name} is not [L]"
            if name != "times":
                assert array.dtype == np.float64, f"{name} is {array.dtype}, not float64"
            if name not in ("times", "limit_up", "limit_down"):
                assert np.isfinite(array).all(), f"{name} has a NaN or an infinity"
                lowest = array >= 0 if name == "value" else array > 0
                assert lowest.all(), f"{name} has an entry that is not positive"
            # A view: the array itself may be the panel's, whose flag is not ours to change.
            view = array.view()
            view.setflags(write=False)
            object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return len(self.close)

    # What a feature declares with `needs` is here under that name.

    @property
    def volume(self) -> Floats | None:
        """What was traded: `value`, in money. A number of shares would change with every split."""
        return self.value

    @property
    def limits(self) -> Floats | None:
        """`limit_down` and `limit_up` side by side: [L, 2]."""
        if self.limit_down is None or self.limit_up is None:
            return None
        return np.column_stack([self.limit_down, self.limit_up])

    @property
    def time(self) -> Times:
        return self.times


Compute = Callable[[Bars], Floats]


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a feature of ours is computed, in history and in a stream alike: see `_kernels`.

    advance: the compiled function, (state [N,S], on [N], out [N,L,C], *fields [N,L], *settings)
    size: S, numbers it keeps of each symbol
    fields: what it reads, attributes of `Bars`
    """

    advance: Callable[..., None]
    size: int
    fields: tuple[str, ...]
    settings: tuple[float, ...] = ()
    relative: tuple[float, ...] = ()
    """Of each column: what is taken off its ratio to the close, NaN if it stays as it is."""

    def fold(self, state: Floats, bars: Bars, columns: int) -> Floats:
        """The feature [L,C] on one symbol's bars, from `state` [1,S], which then follows them."""
        out: Floats = np.empty((1, len(bars), columns))
        fields = []
        for name in self.fields:
            array = getattr(bars, name)
            assert array is not None, f"a feature was asked for {name}, which its source lacks"
            fields.append((array.view(np.int64) if name == "times" else array)[None])
        self.advance(state, _ON, out, *fields, *self.settings)
        if self.relative:
            relative_to_close(np.array(self.relative), _ON, out, bars.close[None])
        return out.reshape(-1, columns)


_ON = np.ones(1, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Feature:
    """A time-series feature: columns `names`, computed symbol by symbol.

    compute: Bars [L] → [L] or [L, len(names)], NaN (or anything) in the first `lookback` − 1 rows
    lookback: bars up to and including the current one before the value is valid
    on_gap: what a day without a bar gets: the last value again, or zero
    kernel: how one of ours streams; None (a user's): it is computed over its last `lookback` bars
    """

    names: tuple[str, ...]
    compute: Compute
    lookback: int
    needs: frozenset[Field]
    group: Group
    on_gap: Literal["carry", "zero"] = "carry"
    source_id: str = ""
    """Of a user's: hash of its file, part of the cache key; ours are in that with all our code."""
    kernel: Kernel | None = None


@dataclass(frozen=True, slots=True)
class CrossSection:
    """A feature across the symbols of one bar: `base` compared among its present members.

    method: its rank in [−1, 1], or its distance to their mean in their standard deviations
    replaces: `base` itself is no column of X
    """

    name: str
    base: str
    group: Group = "stationary"
    method: Literal["rank", "zscore"] = "rank"
    replaces: bool = False


FeatureSpec = Feature | CrossSection
