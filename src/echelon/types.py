"""Named types and bounds that several layers share.

Axes, one letter each, the same everywhere: `T` time, `N` assets, `F` features, `W` window,
`L` the bars of one symbol with its gaps removed.

Arrays are named in quotes, so that what only reads a configuration does without numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
"""float64 array; prices and money."""
Floats32: TypeAlias = "NDArray[np.float32]"
"""float32 array; features."""
Bools: TypeAlias = "NDArray[np.bool_]"
Ints: TypeAlias = "NDArray[np.int64]"
Times: TypeAlias = "NDArray[np.datetime64]"
"""datetime64[us], naive, in the exchange's local time."""

Metrics: TypeAlias = dict[str, float]
"""Numbers for the training log by name, such as `losses/critic` or `charts/reward`."""
Freq: TypeAlias = Literal["1d", "5min", "1min"]
PriceBasis: TypeAlias = Literal["raw", "split_adjusted", "adjusted"]
"""What a source's OHLC are: as traded, adjusted for splits, or for splits and dividends."""

MOST_PROCESSES = 1024
"""Threads or worker processes that can be asked for."""
MOST_SEEDS = 10_000
