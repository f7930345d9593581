"""The arithmetic of the `alpha158` family: kernels over windows, of the shape `_kernels` describes.

Each keeps the last bars of a symbol, joins those of the call to them, and computes every bar's
window from its own values alone, oldest first: no sum is carried from one window to the next, so a
stream that starts anywhere agrees with the whole history in every bit.

Definitions are those of Qlib's Alpha158, made free of units: where it adds 1e-12 to a denominator
that can be zero, a share of nothing is 0 here, and CORR takes the logarithm of the traded value
without its "+ 1". Where it leaves a bar without a finite number, each kernel says what is there.
"""

from __future__ import annotations

import math

import numpy as np

from echelon.features._kernels import _compiled
from echelon.types import Bools, Floats

_FLAT = 1e-24
"""A variance below this share of the squared mean is rounding: there is nothing to explain."""


@_compiled
def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


@_compiled
def candle_shapes(
    state: Floats, on: Bools, out: Floats, open_: Floats, high: Floats, low: Floats, close: Floats
) -> None:
    """KMID … KSFT2, then open, high and low over close; no state."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        for t in range(close.shape[1]):
            o, h, l, c = open_[n, t], high[n, t], low[n, t], close[n, t]  # noqa: E741
            above, below, shift = h - max(o, c), min(o, c) - l, 2.0 * c - h - l
            row, reach = out[n, t], h - l
            row[0], row[1], row[2] = (c - o) / o, reach / o, _share(c - o, reach)
            row[3], row[4] = above / o, _share(above, reach)
            row[5], row[6] = below / o, _share(below, reach)
            row[7], row[8] = shift / o, _share(shift, reach)
            row[9], row[10], row[11] = o / c, h / c, l / c


@_compiled
def price_ratio(state: Floats, on: Bools, out: Floats, price: Floats, close: Floats) -> None:
    """A price over the close; no state."""
    for n in range(close.shape[0]):
        if on[n]:
            for t in range(close.shape[1]):
                out[n, t, 0] = price[n, t] / close[n, t]


@_compiled
def _join(kept: Floats, values: Floats) -> Floats:
    """The bars kept [K] and those of this call [L]: [K+L]; `kept` then has the last K of them."""
    k = kept.shape[0]
    joined = np.empty(k + values.shape[0])
    joined[:k], joined[k:] = kept, values
    kept[:] = joined[values.shape[0] :]
    return joined


@_compiled
def _replace_sorted(ordered: Floats, old: float, new: float) -> None:
    """Take `old` out of the sorted values and put `new` in."""
    at = np.searchsorted(ordered, old)
    while at + 1 < ordered.shape[0] and ordered[at + 1] < new:
        ordered[at] = ordered[at + 1]
        at += 1
    while at > 0 and ordered[at - 1] > new:
        ordered[at] = ordered[at - 1]
        at -= 1
    ordered[at] = new


@_compiled
def _quantile(ordered: Floats, share: float) -> float:
    """Linear between the two values around it."""
    place = share * (ordered.shape[0] - 1)
    below = int(place)
    if below + 1 >= ordered.shape[0]:
        return float(ordered[below])
    return float(ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below))


@_compiled
def _mean(x: Floats) -> float:
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i]
    return float(total / x.shape[0])


@_compiled
def _gains(x: Floats) -> tuple[float, float, int, int]:
    """Sum of the rises from value to value, of the falls, and how many there are of each."""
    up = down = 0.0
    rises = falls = 0
    for i in range(1, x.shape[0]):
        move = x[i] - x[i - 1]
        up += max(move, 0.0)
        down += max(-move, 0.0)
        rises += move > 0
        falls += move < 0
    return up, down, rises, falls


@_compiled
def _line(x: Floats, mean: float) -> tuple[float, float]:
    """Σ(i − ī)·x and Σ(x − mean)² of the window, i = 1 … W."""
    middle = (x.shape[0] - 1) / 2.0
    moment = squares = 0.0
    for i in range(x.shape[0]):
        gap = x[i] - mean
        moment += (i - middle) * gap
        squares += gap * gap
    return moment, squares


@_compiled
def close_windows(state: Floats, on: Bools, out: Floats, close: Floats, window: int) -> None:
    """ROC, MA, STD, BETA, RSQR, RESI, QTLU, QTLD, RANK, CNTP, CNTN, CNTD, SUMP, SUMN, SUMD.

    State: bars seen, the last closes [window]. RSQR of a flat window is 0.
    """
    spread = window * (window * window - 1.0) / 12.0
    ordered = np.empty(window)
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, is_sorted = int(state[n, 0]), False
        joined = _join(state[n, 1 : 1 + window], close[n])
        for t in range(close.shape[1]):
            row = out[n, t]
            if seen + t < window:
                row[:] = np.nan
                continue
            x = joined[t + 1 : t + 1 + window]
            last = x[window - 1]
            if is_sorted:
                _replace_sorted(ordered, joined[t], last)
            else:
                ordered[:], is_sorted = np.sort(x), True
            mean = _mean(x)
            moment, squares = _line(x, mean)
            slope = moment / spread
            flat = squares <= _FLAT * window * mean * mean
            row[0], row[1] = joined[t] / last, mean / last
            row[2], row[3] = math.sqrt(squares / (window - 1)) / last, slope / last
            row[4] = 0.0 if flat else moment * moment / (spread * squares)
            row[5] = (last - mean - slope * (window - 1) / 2.0) / last
            row[6], row[7] = _quantile(ordered, 0.8) / last, _quantile(ordered, 0.2) / last
            below, upto = np.searchsorted(ordered, last), np.searchsorted(ordered, last, "right")
            row[8] = (below + upto + 1) / (2.0 * window)
            up, down, rises, falls = _gains(joined[t : t + 1 + window])
            row[9], row[10], row[11] = rises / window, falls / window, (rises - falls) / window
            whole = up + down
            row[12], row[13] = _share(up, whole), _share(down, whole)
            row[14] = _share(up - down, whole)
        state[n, 0] = seen + close.shape[1]


@_compiled
def range_windows(
    state: Floats, on: Bools, out: Floats, high: Floats, low: Floats, close: Floats, window: int
) -> None:
    """MAX, MIN, RSV, IMAX, IMIN, IMXD. State: bars seen, the last highs and lows [window − 1]."""
    kept = window - 1
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        highs = _join(state[n, 1 : 1 + kept], high[n])
        lows = _join(state[n, 1 + kept : 1 + 2 * kept], low[n])
        for t in range(close.shape[1]):
            row = out[n, t]
            if seen + t < kept:
                row[:] = np.nan
                continue
            top, bottom = t, t  # the oldest of equals
            for i in range(t + 1, t + window):
                top = i if highs[i] > highs[top] else top
                bottom = i if lows[i] < lows[bottom] else bottom
            c, most, least = close[n, t], highs[top], lows[bottom]
            row[0], row[1], row[2] = most / c, least / c, _share(c - least, most - least)
            row[3], row[4] = (top - t + 1) / window, (bottom - t + 1) / window
            row[5] = (top - bottom) / window
        state[n, 0] = seen + close.shape[1]


@_compiled
def volume_windows(
    state: Floats, on: Bools, out: Floats, value: Floats, window: int, floor: float
) -> None:
    """VMA, VSTD, VSUMP, VSUMN, VSUMD. State: bars seen, the last values [window].

    Where nothing is traded today, `floor` times the mean stands for it; where nothing was traded in
    the whole window, today is as usual: VMA is 1 and VSTD 0.
    """
    for n in range(value.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        joined = _join(state[n, 1 : 1 + window], value[n])
        for t in range(value.shape[1]):
            row = out[n, t]
            if seen + t < window:
                row[:] = np.nan
                continue
            x = joined[t + 1 : t + 1 + window]
            mean = _mean(x)
            _, squares = _line(x, mean)
            today = x[window - 1] if x[window - 1] > 0 else floor * mean
            row[0] = mean / today if mean > 0 else 1.0
            row[1] = _share(math.sqrt(squares / (window - 1)), today)
            up, down, _, _ = _gains(joined[t : t + 1 + window])
            whole = up + down
            row[2], row[3] = _share(up, whole), _share(down, whole)
            row[4] = _share(up - down, whole)
        state[n, 0] = seen + value.shape[1]


@_compiled
def _correlation(x: Floats, y: Floats) -> float:
    """Pearson's; 0 where one of them does not vary."""
    mean_x, mean_y = _mean(x), _mean(y)
    xx = yy = xy = 0.0
    for i in range(x.shape[0]):
        a, b = x[i] - mean_x, y[i] - mean_y
        xx += a * a
        yy += b * b
        xy += a * b
    size = x.shape[0] * _FLAT
    if xx <= size * mean_x * mean_x or yy <= size * mean_y * mean_y:
        return 0.0
    return float(min(max(xy / math.sqrt(xx) / math.sqrt(yy), -1.0), 1.0))


@_compiled
def price_volume_windows(
    state: Floats,
    on: Bools,
    out: Floats,
    close: Floats,
    value: Floats,
    window: int,
    floor: float,
) -> None:
    """CORR, CORD, WVMA. State: bars seen, the last closes and values [window].

    CORR takes the logarithm of the value itself: the 1 which Qlib adds is a unit, and nothing
    beside a day's money. Of a bar without trade it is that of `floor` times the window's mean; the
    change after such a bar counts as none.
    """
    length = close.shape[1]
    move, turn = np.empty(window + length), np.empty(window + length)
    level, weight = np.empty(window + length), np.empty(window + length)
    filled = np.empty(window)
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        prices = _join(state[n, 1 : 1 + window], close[n])
        values = _join(state[n, 1 + window : 1 + 2 * window], value[n])
        for i in range(max(0, window - seen), window + length):
            level[i] = math.log(values[i]) if values[i] > 0 else np.nan
            if i > max(0, window - seen):
                move[i] = prices[i] / prices[i - 1]
                turn[i] = math.log((values[i] / values[i - 1] if values[i - 1] > 0 else 1.0) + 1.0)
                weight[i] = abs(move[i] - 1.0) * values[i]
        for t in range(length):
            row = out[n, t]
            if seen + t < window:
                row[:] = np.nan
                continue
            part = slice(t + 1, t + 1 + window)
            mean = _mean(values[part])
            idle = math.log(floor * mean) if mean > 0 else 0.0
            for i in range(window):
                filled[i] = idle if np.isnan(level[t + 1 + i]) else level[t + 1 + i]
            row[0] = _correlation(prices[part], filled)
            row[1] = _correlation(move[part], turn[part])
            mean = _mean(weight[part])
            _, squares = _line(weight[part], mean)
            row[2] = _share(math.sqrt(squares / (window - 1)), mean)
        state[n, 0] = seen + length
