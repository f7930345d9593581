"""Loops that neither TA-Lib nor numpy has, compiled by numba.

Plain sequential recursions over one symbol's bars, float64, without the GIL. Each reads bars up
to t to write row t, so a longer history never changes an earlier row, not even in the last bit.
The windowed sums are taken afresh for every window: a running sum would carry the rounding of
one huge bar into all later ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from echelon.types import Bools, Floats


@njit(cache=True, nogil=True)
def heikin_ashi_candles(open_: Floats, high: Floats, low: Floats, close: Floats) -> Floats:
    """Heikin-Ashi open, high, low, close: [L] each → [L,4]."""
    n = close.shape[0]
    out = np.empty((n, 4))
    ha_open = ha_close = 0.0
    for t in range(n):
        ha_open = 0.5 * (ha_open + ha_close) if t else 0.5 * (open_[0] + close[0])
        ha_close = 0.25 * (open_[t] + high[t] + low[t] + close[t])
        out[t, 0] = ha_open
        out[t, 1] = max(high[t], ha_open, ha_close)
        out[t, 2] = min(low[t], ha_open, ha_close)
        out[t, 3] = ha_close
    return out


@njit(cache=True, nogil=True)
def supertrend_line(
    high: Floats, low: Floats, close: Floats, atr: Floats, multiplier: float, start: int
) -> Floats:
    """SuperTrend line and direction: [L] each → [L,2], NaN before `start`.

    start: the first bar at which `atr` is valid; the trend is taken to be up (+1) there.
    """
    n = close.shape[0]
    out = np.full((n, 2), np.nan)
    upper_tm1 = np.inf
    lower_tm1 = -np.inf
    direction = 1.0
    for t in range(start, n):
        middle = 0.5 * (high[t] + low[t])
        upper = middle + multiplier * atr[t]
        lower = middle - multiplier * atr[t]
        if close[t] > upper_tm1:
            direction = 1.0
        elif close[t] < lower_tm1:
            direction = -1.0
        elif direction > 0:
            lower = max(lower, lower_tm1)
        else:
            upper = min(upper, upper_tm1)
        out[t, 0] = lower if direction > 0 else upper
        out[t, 1] = direction
        upper_tm1 = upper
        lower_tm1 = lower
    return out


@njit(cache=True, nogil=True)
def rolling_mean(values: Floats, window: int) -> Floats:
    """Mean of the last `window` values: [L] → [L], NaN in the first `window` − 1 rows."""
    n = values.shape[0]
    out = np.full(n, np.nan)
    for t in range(window - 1, n):
        total = 0.0
        for i in range(t - window + 1, t + 1):
            total += values[i]
        out[t] = total / window
    return out


@njit(cache=True, nogil=True)
def rolling_std(values: Floats, window: int) -> Floats:
    """Sample standard deviation (n − 1) of the last `window` values, in two passes: [L] → [L]."""
    n = values.shape[0]
    out = np.full(n, np.nan)
    for t in range(window - 1, n):
        mean = 0.0
        for i in range(t - window + 1, t + 1):
            mean += values[i]
        mean /= window
        squares = 0.0
        for i in range(t - window + 1, t + 1):
            squares += (values[i] - mean) ** 2
        out[t] = np.sqrt(squares / (window - 1))
    return out


@njit(cache=True, nogil=True)
def rank_rows(values: Floats, mask: Bools) -> Floats:
    """Rank of each row's masked, non-NaN values, ties averaged, mapped to [−1, 1].

    values, mask: [T,N] → [T,N]; 0 where masked out, NaN, or alone in its row. Rows are
    independent: a long panel may be ranked in pieces.
    """
    rows, columns = values.shape
    out = np.zeros((rows, columns))
    where = np.empty(columns, dtype=np.int64)
    ranked = np.empty(columns, dtype=np.float64)
    for t in range(rows):
        m = 0
        for n in range(columns):
            if mask[t, n] and not np.isnan(values[t, n]):
                where[m] = n
                ranked[m] = values[t, n]
                m += 1
        if m < 2:
            continue
        order = np.argsort(ranked[:m])
        first = 0
        while first < m:
            last = first
            while last + 1 < m and ranked[order[last + 1]] == ranked[order[first]]:
                last += 1
            # (first + last) / 2 is the mean 0-based rank of the tie; whole numbers until here,
            # so the result cannot depend on the order of the columns.
            rank = (first + last) / (m - 1) - 1.0
            for i in range(first, last + 1):
                out[t, where[order[i]]] = rank
            first = last + 1
    return out
