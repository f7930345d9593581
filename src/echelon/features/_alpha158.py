"""The arithmetic of the `alpha158` family: kernels over windows, of the shape `_kernels` describes.

Each keeps the last bars of a symbol, joins those of the call to them, and computes every bar's
window from its own values alone: no sum is carried from one window to the next, so a stream that
starts anywhere agrees with the whole history in every bit. Sums run over the windows of all bars at
once, the oldest value of each first: side by side a processor adds several of them in one step,
where a single window's sum would wait for itself.

Definitions are those of Qlib's Alpha158, made free of units: where it adds 1e-12 to a denominator
that can be zero, a share of nothing is 0 here, and CORR takes the logarithm of the traded value
without its "+ 1". Where it leaves a bar without a finite number, each kernel says what is there.
"""

from __future__ import annotations

import math

import numpy as np

from echelon.features._kernels import _compiled
from echelon.types import Bools, Floats, Ints

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
def _sums(x: Floats, window: int) -> Floats:
    """Sum of every window of x [W−1+L]: [L]."""
    length = x.shape[0] - window + 1
    total = np.zeros(length)
    for i in range(window):
        part = x[i : i + length]
        for t in range(length):
            total[t] += part[t]
    return total


@_compiled
def _deviations(x: Floats, window: int) -> tuple[Floats, Floats, Floats]:
    """Of every window of x: its mean, Σ(i − ī)·x and Σ(x − mean)², i = 1 … W; each [L]."""
    mean = _sums(x, window) / window
    length, middle = mean.shape[0], (window - 1) / 2.0
    moment, squares = np.zeros(length), np.zeros(length)
    for i in range(window):
        part, weight = x[i : i + length], i - middle
        for t in range(length):
            gap = part[t] - mean[t]
            moment[t] += weight * gap
            squares[t] += gap * gap
    return mean, moment, squares


@_compiled
def _correlations(x: Floats, y: Floats, window: int) -> Floats:
    """Pearson's of every window [L], 0 where one of the two does not vary."""
    mean_x, mean_y = _sums(x, window) / window, _sums(y, window) / window
    length = mean_x.shape[0]
    xx, yy, xy = np.zeros(length), np.zeros(length), np.zeros(length)
    for i in range(window):
        left, right = x[i : i + length], y[i : i + length]
        for t in range(length):
            a, b = left[t] - mean_x[t], right[t] - mean_y[t]
            xx[t] += a * a
            yy[t] += b * b
            xy[t] += a * b
    for t in range(length):
        size = window * _FLAT
        if xx[t] <= size * mean_x[t] * mean_x[t] or yy[t] <= size * mean_y[t] * mean_y[t]:
            xy[t] = 0.0
        else:
            xy[t] = min(max(xy[t] / math.sqrt(xx[t]) / math.sqrt(yy[t]), -1.0), 1.0)
    return xy


@_compiled
def _correlation_with_idle(price: Floats, value: Floats, level: Floats, floor: float) -> float:
    """CORR of one window [W] in which some bars have no trade."""
    mean = _sums(value, value.shape[0])[0] / value.shape[0]
    if mean <= 0:
        return 0.0
    filled = np.where(value > 0, level, math.log(floor * mean))
    return float(_correlations(price, filled, value.shape[0])[0])


@_compiled
def _rises(x: Floats) -> tuple[Floats, Floats]:
    """How far each value of x [K] is above the one before it, and how far below: each [K−1]."""
    up, down = np.empty(x.shape[0] - 1), np.empty(x.shape[0] - 1)
    for i in range(up.shape[0]):
        move = x[i + 1] - x[i]
        up[i], down[i] = max(move, 0.0), max(-move, 0.0)
    return up, down


@_compiled
def _replace_sorted(ordered: Floats, old: float, new: float) -> int:
    """Take `old` out of the sorted values and put `new` in; returns its place."""
    at = np.searchsorted(ordered, old)
    while at + 1 < ordered.shape[0] and ordered[at + 1] < new:
        ordered[at] = ordered[at + 1]
        at += 1
    while at > 0 and ordered[at - 1] > new:
        ordered[at] = ordered[at - 1]
        at -= 1
    ordered[at] = new
    return int(at)


@_compiled
def _quantile(ordered: Floats, share: float) -> float:
    """Linear between the two values around it."""
    place = share * (ordered.shape[0] - 1)
    below = int(place)
    if below + 1 >= ordered.shape[0]:
        return float(ordered[below])
    return float(ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below))


@_compiled
def _middle_rank(ordered: Floats, at: int) -> float:
    """Mean rank, from 1 on, of the values that equal the one at `at`."""
    first = last = at
    while first > 0 and ordered[first - 1] == ordered[at]:
        first -= 1
    while last + 1 < ordered.shape[0] and ordered[last + 1] == ordered[at]:
        last += 1
    return (first + last) / 2.0 + 1.0


@_compiled
def _order_columns(out: Floats, joined: Floats, window: int, start: int) -> None:
    """QTLU, QTLD, RANK of the bars from `start` on, in columns 6 to 8 of out [L,15].

    joined [W+L]: the bars; the sorted values of a window become those of the next by one exchange.
    """
    if start >= out.shape[0]:
        return
    ordered = np.sort(joined[start : start + window])
    for t in range(start, out.shape[0]):
        last = joined[t + window]
        at = _replace_sorted(ordered, joined[t], last)
        out[t, 6], out[t, 7] = _quantile(ordered, 0.8) / last, _quantile(ordered, 0.2) / last
        out[t, 8] = _middle_rank(ordered, at) / window


@_compiled
def close_windows(state: Floats, on: Bools, out: Floats, close: Floats, window: int) -> None:
    """ROC, MA, STD, BETA, RSQR, RESI, QTLU, QTLD, RANK, CNTP, CNTN, CNTD, SUMP, SUMN, SUMD.

    State: bars seen, the last closes [window]. RSQR of a flat window is 0.
    """
    spread, length = window * (window * window - 1.0) / 12.0, close.shape[1]
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        start = min(max(window - seen, 0), length)
        joined = _join(state[n, 1 : 1 + window], close[n])
        mean, moment, squares = _deviations(joined[1:], window)
        rises, falls = _rises(joined)
        ups, downs = _sums(rises, window), _sums(falls, window)
        rises[:], falls[:] = np.sign(rises), np.sign(falls)
        more, fewer = _sums(rises, window), _sums(falls, window)
        _order_columns(out[n], joined, window, start)
        out[n, :start] = np.nan
        for t in range(start, length):
            row, last, slope = out[n, t], close[n, t], moment[t] / spread
            flat = squares[t] <= _FLAT * window * mean[t] * mean[t]
            row[0], row[1] = joined[t] / last, mean[t] / last
            row[2], row[3] = math.sqrt(squares[t] / (window - 1)) / last, slope / last
            row[4] = 0.0 if flat else moment[t] * moment[t] / (spread * squares[t])
            row[5] = (last - mean[t] - slope * (window - 1) / 2.0) / last
            row[9], row[10] = more[t] / window, fewer[t] / window
            row[11] = (more[t] - fewer[t]) / window
            whole = ups[t] + downs[t]
            row[12], row[13] = _share(ups[t], whole), _share(downs[t], whole)
            row[14] = _share(ups[t] - downs[t], whole)
        state[n, 0] = seen + length


@_compiled
def _highest(x: Floats, window: int) -> Ints:
    """Where the highest of every window of x [W−1+L] is, the oldest of equals: [L]."""
    where = np.empty(x.shape[0] - window + 1, dtype=np.int64)
    top = -1
    for t in range(where.shape[0]):
        if top < t:
            top = t
            for i in range(t + 1, t + window):
                top = i if x[i] > x[top] else top
        elif x[t + window - 1] > x[top]:
            top = t + window - 1
        where[t] = top
    return where


@_compiled
def range_windows(
    state: Floats, on: Bools, out: Floats, high: Floats, low: Floats, close: Floats, window: int
) -> None:
    """MAX, MIN, RSV, IMAX, IMIN, IMXD. State: bars seen, the last highs and lows [window − 1]."""
    kept, length = window - 1, close.shape[1]
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        start = min(max(kept - seen, 0), length)
        highs = _join(state[n, 1 : 1 + kept], high[n])
        lows = _join(state[n, 1 + kept : 1 + 2 * kept], low[n])
        tops, bottoms = _highest(highs, window), _highest(-lows, window)
        out[n, :start] = np.nan
        for t in range(start, length):
            row, c, top, bottom = out[n, t], close[n, t], tops[t], bottoms[t]
            most, least = highs[top], lows[bottom]
            row[0], row[1], row[2] = most / c, least / c, _share(c - least, most - least)
            row[3], row[4] = (top - t + 1) / window, (bottom - t + 1) / window
            row[5] = (top - bottom) / window
        state[n, 0] = seen + length


@_compiled
def volume_windows(
    state: Floats, on: Bools, out: Floats, value: Floats, window: int, floor: float
) -> None:
    """VMA, VSTD, VSUMP, VSUMN, VSUMD. State: bars seen, the last values [window].

    Where nothing is traded today, `floor` times the mean stands for it; where nothing was traded in
    the whole window, today is as usual: VMA is 1 and VSTD 0.
    """
    length = value.shape[1]
    for n in range(value.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        start = min(max(window - seen, 0), length)
        joined = _join(state[n, 1 : 1 + window], value[n])
        mean, _, squares = _deviations(joined[1:], window)
        rises, falls = _rises(joined)
        ups, downs = _sums(rises, window), _sums(falls, window)
        out[n, :start] = np.nan
        for t in range(start, length):
            row = out[n, t]
            today = value[n, t] if value[n, t] > 0 else floor * mean[t]
            row[0] = mean[t] / today if mean[t] > 0 else 1.0
            row[1] = _share(math.sqrt(squares[t] / (window - 1)), today)
            whole = ups[t] + downs[t]
            row[2], row[3] = _share(ups[t], whole), _share(downs[t], whole)
            row[4] = _share(ups[t] - downs[t], whole)
        state[n, 0] = seen + length


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
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        start = min(max(window - seen, 0), length)
        prices = _join(state[n, 1 : 1 + window], close[n])
        values = _join(state[n, 1 + window : 1 + 2 * window], value[n])
        level, move, turn = np.zeros((3, window + length))
        for i in range(max(0, window - seen), window + length):
            level[i] = math.log(values[i]) if values[i] > 0 else 0.0
        for i in range(max(0, window - seen) + 1, window + length):
            move[i] = prices[i] / prices[i - 1]
            turn[i] = math.log((values[i] / values[i - 1] if values[i - 1] > 0 else 1.0) + 1.0)
        corr = _correlations(prices[1:], level[1:], window)
        cord = _correlations(move[1:], turn[1:], window)
        idle = _sums((values[1:] <= 0).astype(np.float64), window)
        for t in range(start, length):
            if idle[t] > 0:
                part = slice(t + 1, t + 1 + window)
                corr[t] = _correlation_with_idle(prices[part], values[part], level[part], floor)
        mean, _, squares = _deviations(np.abs(move[1:] - 1.0) * values[1:], window)
        out[n, :start] = np.nan
        for t in range(start, length):
            out[n, t, 0], out[n, t, 1] = corr[t], cord[t]
            out[n, t, 2] = _share(math.sqrt(squares[t] / (window - 1)), mean[t])
        state[n, 0] = seen + length
