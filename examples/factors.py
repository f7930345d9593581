"""Three factors of your own, to copy from.

Name the file in `features.modules` and prepare as usual::

    echelon prepare --config configs/demo.yaml -o 'features.modules=[examples/factors.py]'

Each function sees one symbol's own bars, days without a bar left out, and returns one row per
bar. Prices are start-anchored total-return prices: a split or a dividend is no jump in them.
docs/guide/factors.md explains the interface.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from echelon.features import Bars, factor
from echelon.types import Floats


@factor(lookback=253, needs=("close",))
def momentum_12_1(bars: Bars) -> Floats:
    """Log return over the last year without its last month, which tends to reverse."""
    out = np.full(len(bars), np.nan)
    out[252:] = np.log(bars.close[231:-21] / bars.close[:-252])
    return out


@factor(
    lookback=2,
    needs=("open", "close"),
    names=("overnight", "intraday"),
    on_gap="zero",  # a suspended day has neither: yesterday's values would be a lie
)
def session_returns(bars: Bars) -> Floats:
    """Log return from the last close to the open, and from the open to the close: two columns."""
    out = np.full((len(bars), 2), np.nan)
    out[1:, 0] = np.log(bars.open[1:] / bars.close[:-1])
    out[1:, 1] = np.log(bars.close[1:] / bars.open[1:])
    return out


@factor(lookback=21, needs=("close", "volume"))
def illiquidity_20(bars: Bars) -> Floats:
    """Amihud's ratio of move to traded value over 20 bars, in logs."""
    out = np.full(len(bars), np.nan)
    if len(bars) > 20:
        move = np.abs(np.diff(np.log(bars.close)))
        # The two constants keep the log finite where nothing moved or nothing traded.
        moved = sliding_window_view(move, 20).mean(axis=1) + 1e-6
        traded = sliding_window_view(bars.value[1:], 20).mean(axis=1) + 1.0
        out[20:] = np.log(moved / traded)
    return out
