"""Factors that leak on purpose; the leakage check must name every one of them."""

from __future__ import annotations

import numpy as np

from echelon.features import Bars, factor
from echelon.types import Floats


@factor(lookback=5, needs=("close",))
def leak_backfill(bars: Bars) -> Floats:
    """The close of the week's last bar, filled backwards over the week."""
    out = np.full(len(bars), np.nan)
    out[4::5] = bars.close[4::5]
    for k in range(len(out) - 2, -1, -1):
        if np.isnan(out[k]):
            out[k] = out[k + 1]
    out[np.isnan(out)] = bars.close[np.isnan(out)]
    return out


@factor(lookback=3, needs=("close",))
def leak_centred(bars: Bars) -> Floats:
    """A moving average centred on the bar: half of it is the future."""
    return np.convolve(bars.close, np.ones(5) / 5, mode="same")


@factor(lookback=1, needs=("close",))
def leak_scaling(bars: Bars) -> Floats:
    """A z-score over the whole sample."""
    return (bars.close - bars.close.mean()) / (bars.close.std() + 1e-12)


@factor(lookback=1, needs=("close",))
def leak_level(bars: Bars) -> Floats:
    """The price level as the vendor has it today, later splits and dividends included."""
    return np.log(bars.raw_close)


@factor(lookback=1, needs=("close",))
def leak_end_anchor(bars: Bars) -> Floats:
    """The total-return price, anchored at the last bar instead of the first."""
    return bars.close / bars.close[-1]


@factor(lookback=21, needs=("close",))
def honest_momentum(bars: Bars) -> Floats:
    """Twenty-bar momentum, which looks back only."""
    out = np.full(len(bars), np.nan)
    out[20:] = bars.close[20:] / bars.close[:-20] - 1
    return out


_KEPT: dict[float, tuple[float, float]] = {}


@factor(lookback=1, needs=("close",))
def leak_remembered(bars: Bars) -> Floats:
    """A z-score whose mean and spread are fitted once, on whatever comes first, and kept."""
    key = float(bars.close[0])
    if key not in _KEPT:
        _KEPT[key] = (float(bars.close.mean()), float(bars.close.std()))
    mean, std = _KEPT[key]
    return (bars.close - mean) / (std + 1e-12)


@factor(lookback=1, needs=("close",))
def leak_behind_outlier(bars: Bars) -> Floats:
    """Tomorrow's direction, behind one early value that dwarfs any spread."""
    out = np.zeros(len(bars))
    out[:-1] = np.sign(bars.close[1:] - bars.close[:-1])
    out[0] = 1e8
    return out


@factor(lookback=2, needs=("close",))
def leak_in_a_rare_regime(bars: Bars) -> Floats:
    """Tomorrow's return, but only after a day of more than −2.5 %."""
    step = np.zeros(len(bars))
    step[1:] = bars.close[1:] / bars.close[:-1] - 1
    ahead = np.append(step[1:], 0.0)
    return np.where(step < -0.025, ahead, step)
