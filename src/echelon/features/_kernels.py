"""Every shipped feature's arithmetic, compiled by numba: one function for history and stream.

A kernel takes N symbols by L bars: `kernel(state, on, out, *fields, *settings)`.

    state [N,S]: what the symbol's bars so far have left; zeros before its first. Changed in place.
    on [N]: whose bars these are; the others' state and output stay as they are
    out [N,L,C]: the feature's columns, NaN until it has warmed up
    fields [N,L]: the bars, each symbol's own in order

Preparing folds one symbol's whole history (N = 1), a stream steps all symbols by one bar (L = 1):
since both run the same code from the same state, they agree in every bit. A kernel reads bars up to
t to write row t, so a longer history never changes an earlier row. There is no fastmath, and
logarithms and sines are the C library's (`math`), never numpy's, whose last bit depends on the
processor and may depend on an element's place in its array.

Averages of prices (SMA, the middle of Bollinger's bands) keep a running sum, as TA-Lib does; those
of squares, of returns and of traded value are taken afresh for every window, for there a running
sum would carry the rounding of one huge bar into all later ones.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from echelon.types import Bools, Floats, Ints

_DAY_US = 86_400_000_000
_EARLY = 20
"""Bars whose mean is the unit of relative traded value."""
DAY_OF_WEEK, MONTH, TIME_OF_DAY = range(3)

_compiled = njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def copy_field(state: Floats, on: Bools, out: Floats, values: Floats) -> None:
    """The field itself; no state."""
    for n in range(values.shape[0]):
        if on[n]:
            for t in range(values.shape[1]):
                out[n, t, 0] = values[n, t]


@_compiled
def relative_to_close(less: Floats, on: Bools, out: Floats, close: Floats) -> None:
    """Divide each column by the close, and take `less` [C] off; NaN there leaves a column alone."""
    for k in range(less.shape[0]):
        if np.isnan(less[k]):
            continue
        for n in range(close.shape[0]):
            if on[n]:
                for t in range(close.shape[1]):
                    out[n, t, k] = out[n, t, k] / close[n, t] - less[k]


@_compiled
def simple_average(state: Floats, on: Bools, out: Floats, close: Floats, period: int) -> None:
    """Simple moving average. State: bars seen, sum of the last period − 1, ring [period]."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, total = int(state[n, 0]), state[n, 1]
        ring = state[n, 2:]
        at = seen % period
        for t in range(close.shape[1]):
            x = close[n, t]
            ring[at] = x
            at = at + 1 if at + 1 < period else 0
            total += x
            seen += 1
            out[n, t, 0] = np.nan
            if seen >= period:
                out[n, t, 0] = total / period
                total -= ring[at]
        state[n, 0], state[n, 1] = seen, total


@_compiled
def _ema_step(value: float, seen: int, x: float, period: int, k: float) -> float:
    """The average after x, the sum until its seed; seen: how many came before x."""
    if seen >= period:
        return (x - value) * k + value
    return value + x if seen < period - 1 else (value + x) / period


@_compiled
def exponential_average(state: Floats, on: Bools, out: Floats, close: Floats, period: int) -> None:
    """Exponential moving average. State: bars seen, the average (the sum until its seed)."""
    k = 2.0 / (period + 1)
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, value = int(state[n, 0]), state[n, 1]
        for t in range(close.shape[1]):
            value = _ema_step(value, seen, close[n, t], period, k)
            seen += 1
            out[n, t, 0] = value if seen >= period else np.nan
        state[n, 0], state[n, 1] = seen, value


@_compiled
def _wilder_step(value: float, seen: int, x: float, period: int) -> float:
    """Wilder's average after x, the sum until its seed; seen: how many bars came before this one,
    of which the first has no x.
    """
    if seen > period:
        return value * ((period - 1.0) / period) + x * (1.0 / period)
    if seen == 0:
        return 0.0
    return value + x if seen < period else (value + x) / period


@_compiled
def relative_strength(state: Floats, on: Bools, out: Floats, close: Floats, period: int) -> None:
    """Wilder's RSI. State: bars seen, last close, mean gain, mean loss, whether it ever moved."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, last, gain, loss = int(state[n, 0]), state[n, 1], state[n, 2], state[n, 3]
        moved = state[n, 4] > 0
        for t in range(close.shape[1]):
            move = close[n, t] - last if seen else 0.0
            last = close[n, t]
            moved = moved or move != 0
            gain = _wilder_step(gain, seen, max(move, 0.0), period)
            loss = _wilder_step(loss, seen, max(-move, 0.0), period)
            seen += 1
            if seen <= period:
                out[n, t, 0] = np.nan
            elif not moved:
                out[n, t, 0] = 50.0
            else:
                total = gain + loss
                out[n, t, 0] = 100.0 * (gain / total) if total > 0 else 0.0
        state[n, 0], state[n, 1], state[n, 2], state[n, 3] = seen, last, gain, loss
        state[n, 4] = 1.0 if moved else 0.0


@_compiled
def convergence(
    state: Floats, on: Bools, out: Floats, close: Floats, fast: int, slow: int, signal: int
) -> None:
    """MACD line, signal, histogram. State: bars seen, the fast, slow and signal averages."""
    k_fast, k_slow, k_signal = 2.0 / (fast + 1), 2.0 / (slow + 1), 2.0 / (signal + 1)
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, quick, calm, smooth = int(state[n, 0]), state[n, 1], state[n, 2], state[n, 3]
        for t in range(close.shape[1]):
            x = close[n, t]
            if seen >= slow - fast:
                quick = _ema_step(quick, seen - (slow - fast), x, fast, k_fast)
            calm = _ema_step(calm, seen, x, slow, k_slow)
            line = quick - calm
            if seen >= slow - 1:
                smooth = _ema_step(smooth, seen - (slow - 1), line, signal, k_signal)
            seen += 1
            ready = seen >= slow + signal - 1
            out[n, t, 0] = line if ready else np.nan
            out[n, t, 1] = smooth if ready else np.nan
            out[n, t, 2] = line - smooth if ready else np.nan
        state[n, 0], state[n, 1], state[n, 2], state[n, 3] = seen, quick, calm, smooth


@_compiled
def _true_range(high: float, low: float, last: float) -> float:
    """How far the bar reaches, the close before it included."""
    return max(high - low, abs(last - high), abs(last - low))


@_compiled
def average_range(
    state: Floats,
    on: Bools,
    out: Floats,
    high: Floats,
    low: Floats,
    close: Floats,
    period: int,
) -> None:
    """Average true range. State: bars seen, last close, the average (the sum until its seed)."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, last, value = int(state[n, 0]), state[n, 1], state[n, 2]
        for t in range(close.shape[1]):
            reach = _true_range(high[n, t], low[n, t], last)
            value = _wilder_step(value, seen, reach, period)
            last = close[n, t]
            seen += 1
            out[n, t, 0] = value if seen > period else np.nan
        state[n, 0], state[n, 1], state[n, 2] = seen, last, value


@_compiled
def _squares(ring: Floats, mean: float) -> float:
    """Sum of squared deviations; in four strands, which a processor adds side by side."""
    a = b = c = d = 0.0
    whole = ring.shape[0] // 4 * 4
    for i in range(0, whole, 4):
        a += (ring[i] - mean) ** 2
        b += (ring[i + 1] - mean) ** 2
        c += (ring[i + 2] - mean) ** 2
        d += (ring[i + 3] - mean) ** 2
    for i in range(whole, ring.shape[0]):
        a += (ring[i] - mean) ** 2
    return (a + b) + (c + d)


@_compiled
def bollinger(
    state: Floats,
    on: Bools,
    out: Floats,
    close: Floats,
    period: int,
    deviations: float,
    flat_width: float,
) -> None:
    """Lower, mid, upper, bandwidth, percent. State: as of `simple_average`."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, total = int(state[n, 0]), state[n, 1]
        ring = state[n, 2:]
        at = seen % period
        for t in range(close.shape[1]):
            x = close[n, t]
            ring[at] = x
            at = at + 1 if at + 1 < period else 0
            total += x
            seen += 1
            if seen < period:
                out[n, t, :] = np.nan
                continue
            mid = total / period
            total -= ring[at]
            reach = math.sqrt(_squares(ring, mid) / period) * deviations
            lower, upper = mid - reach, mid + reach
            width = upper - lower
            out[n, t, 0] = lower
            out[n, t, 1] = mid
            out[n, t, 2] = upper
            out[n, t, 3] = 100.0 * width / mid
            out[n, t, 4] = 0.5 if width <= flat_width * mid else (x - lower) / width
        state[n, 0], state[n, 1] = seen, total


@_compiled
def _widen(best: Floats, work: Floats, width: int, period: int) -> tuple[Floats, Floats]:
    """From the highest of each last `width` values [M] to that of each last `period`.

    The window at most doubles in a step. Returns (the highest, the other array); the first
    period − 1 rows say nothing.
    """
    while width < period:
        step = min(width, period - width)
        for i in range(width + step - 1, best.shape[0]):
            work[i] = best[i] if best[i] > best[i - step] else best[i - step]
        best, work = work, best
        width += step
    return best, work


@_compiled
def ichimoku_lines(
    state: Floats,
    on: Bools,
    out: Floats,
    high: Floats,
    low: Floats,
    tenkan: int,
    kijun: int,
    senkou: int,
) -> None:
    """Tenkan, kijun and the two leading spans.

    State: bars seen; the last highs [longest], −lows [longest] and the spans still ahead [kijun,2],
    the newest last.
    """
    periods = np.array([tenkan, kijun, senkou])
    order = np.argsort(periods)  # a longer window grows out of the shorter
    size, length = max(tenkan, kijun, senkou), high.shape[1]
    highs, lows = np.empty(size + length), np.empty(size + length)
    tops, bottoms = np.empty(size + length), np.empty(size + length)
    work, more = np.empty(size + length), np.empty(size + length)
    lines, spans = np.empty((3, length)), np.empty((kijun + length, 2))
    for n in range(high.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        for i in range(size + length):
            highs[i] = state[n, 1 + i] if i < size else high[n, i - size]
            lows[i] = state[n, 1 + size + i] if i < size else -low[n, i - size]
            tops[i], bottoms[i] = highs[i], lows[i]
        width = 1
        for k in order:
            tops, work = _widen(tops, work, width, periods[k])
            bottoms, more = _widen(bottoms, more, width, periods[k])
            width = periods[k]
            for t in range(length):
                middle = 0.5 * (tops[size + t] - bottoms[size + t])
                lines[k, t] = middle if seen + t >= width - 1 else np.nan
        for i in range(kijun):
            spans[i, 0] = state[n, 1 + 2 * size + 2 * i]
            spans[i, 1] = state[n, 2 + 2 * size + 2 * i]
        for t in range(length):
            spans[kijun + t, 0] = 0.5 * (lines[0, t] + lines[1, t])
            spans[kijun + t, 1] = lines[2, t]
            ahead = seen + t >= kijun
            out[n, t, 0] = lines[0, t]
            out[n, t, 1] = lines[1, t]
            out[n, t, 2] = spans[t, 0] if ahead else np.nan
            out[n, t, 3] = spans[t, 1] if ahead else np.nan
        state[n, 0] = seen + length
        for i in range(size):
            state[n, 1 + i], state[n, 1 + size + i] = highs[length + i], lows[length + i]
        for i in range(kijun):
            state[n, 1 + 2 * size + 2 * i] = spans[length + i, 0]
            state[n, 2 + 2 * size + 2 * i] = spans[length + i, 1]


@_compiled
def heikin_ashi_candles(
    state: Floats,
    on: Bools,
    out: Floats,
    open_: Floats,
    high: Floats,
    low: Floats,
    close: Floats,
) -> None:
    """Heikin-Ashi open, high, low, close. State: bars seen, last candle's open and close."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, ha_open, ha_close = state[n, 0], state[n, 1], state[n, 2]
        for t in range(close.shape[1]):
            o, h, l, c = open_[n, t], high[n, t], low[n, t], close[n, t]  # noqa: E741
            ha_open = 0.5 * (ha_open + ha_close) if seen else 0.5 * (o + c)
            ha_close = 0.25 * (o + h + l + c)
            out[n, t, 0] = ha_open
            out[n, t, 1] = max(h, ha_open, ha_close)
            out[n, t, 2] = min(l, ha_open, ha_close)
            out[n, t, 3] = ha_close
            seen += 1
        state[n, 0], state[n, 1], state[n, 2] = seen, ha_open, ha_close


@_compiled
def supertrend_line(
    state: Floats,
    on: Bools,
    out: Floats,
    high: Floats,
    low: Floats,
    close: Floats,
    period: int,
    multiplier: float,
) -> None:
    """SuperTrend line and direction.

    State: bars seen, last close, average range, upper and lower band of the bar before, direction.
    """
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, last, value = int(state[n, 0]), state[n, 1], state[n, 2]
        upper_tm1, lower_tm1, direction = state[n, 3], state[n, 4], state[n, 5]
        for t in range(close.shape[1]):
            reach = _true_range(high[n, t], low[n, t], last)
            value = _wilder_step(value, seen, reach, period)
            last = close[n, t]
            seen += 1
            if seen <= period:
                out[n, t, :] = np.nan
                continue
            middle = 0.5 * (high[n, t] + low[n, t])
            upper, lower = middle + multiplier * value, middle - multiplier * value
            if seen == period + 1 or last > upper_tm1:
                direction = 1.0
            elif last < lower_tm1:
                direction = -1.0
            elif direction > 0:
                lower = max(lower, lower_tm1)
            else:
                upper = min(upper, upper_tm1)
            out[n, t, 0] = lower if direction > 0 else upper
            out[n, t, 1] = direction
            upper_tm1, lower_tm1 = upper, lower
        state[n, 0], state[n, 1], state[n, 2] = seen, last, value
        state[n, 3], state[n, 4], state[n, 5] = upper_tm1, lower_tm1, direction


@_compiled
def log_returns(state: Floats, on: Bools, out: Floats, close: Floats, horizon: int) -> None:
    """Log return over `horizon` bars. State: bars seen, ring of closes [horizon]."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        ring = state[n, 1:]
        at = seen % horizon
        for t in range(close.shape[1]):
            x = close[n, t]
            out[n, t, 0] = math.log(x / ring[at]) if seen >= horizon else np.nan
            ring[at] = x
            at = at + 1 if at + 1 < horizon else 0
            seen += 1
        state[n, 0] = seen


@_compiled
def _mean(ring: Floats, oldest: int) -> float:
    """Mean of a ring's values, summed from the oldest on."""
    total = 0.0
    for i in range(oldest, ring.shape[0]):
        total += ring[i]
    for i in range(oldest):
        total += ring[i]
    return float(total / ring.shape[0])


@_compiled
def return_deviations(state: Floats, on: Bools, out: Floats, close: Floats, window: int) -> None:
    """Sample standard deviation (n − 1) of one-bar log returns, in two passes.

    State: bars seen, last close, ring of returns [window].
    """
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        seen, last = int(state[n, 0]), state[n, 1]
        ring = state[n, 2:]
        at = max(seen - 1, 0) % window
        for t in range(close.shape[1]):
            x = close[n, t]
            if seen:
                ring[at] = math.log(x / last)
                at = at + 1 if at + 1 < window else 0
            last = x
            seen += 1
            if seen <= window:
                out[n, t, 0] = np.nan
                continue
            mean = _mean(ring, at)
            squares = 0.0
            for i in range(at, window):
                squares += (ring[i] - mean) ** 2
            for i in range(at):
                squares += (ring[i] - mean) ** 2
            out[n, t, 0] = math.sqrt(squares / (window - 1))
        state[n, 0], state[n, 1] = seen, last


@_compiled
def volume_ratios(
    state: Floats, on: Bools, out: Floats, value: Floats, window: int, floor: float
) -> None:
    """Log of traded value over its mean, at least log floor. State: bars seen, ring [window]."""
    for n in range(value.shape[0]):
        if not on[n]:
            continue
        seen = int(state[n, 0])
        ring = state[n, 1:]
        at = seen % window
        for t in range(value.shape[1]):
            ring[at] = value[n, t]
            at = at + 1 if at + 1 < window else 0
            seen += 1
            if seen < window:
                out[n, t, 0] = np.nan
                continue
            mean = _mean(ring, at)
            ratio = value[n, t] / mean if mean > 0 else 1.0
            out[n, t, 0] = math.log(max(ratio, floor))
        state[n, 0] = seen


@_compiled
def limit_room(
    state: Floats,
    on: Bools,
    out: Floats,
    close: Floats,
    limit_up: Floats,
    limit_down: Floats,
    none: float,
) -> None:
    """Distance to the upper and the lower limit, `none` where there is no limit; no state."""
    for n in range(close.shape[0]):
        if not on[n]:
            continue
        for t in range(close.shape[1]):
            up = limit_up[n, t] / close[n, t] - 1.0
            down = close[n, t] / limit_down[n, t] - 1.0
            out[n, t, 0] = none if np.isnan(up) else up
            out[n, t, 1] = none if np.isnan(down) else down


@_compiled
def _month(day: int) -> int:
    """Month, 0 to 11, of a day counted from 1970-01-01 (proleptic Gregorian calendar).

    Days are counted from 0000-03-01, in eras of 400 years, so that leap days come last.
    """
    of_era = (day + 719_468) % 146_097
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    return ((5 * of_year + 2) // 153 + 2) % 12


@_compiled
def clock_turns(state: Floats, on: Bools, out: Floats, times: Ints, cycle: int) -> None:
    """Sine and cosine of the share of a week, a year or a day that has passed; no state.

    times: microseconds since 1970-01-01; day 0 was a Thursday
    """
    for n in range(times.shape[0]):
        if not on[n]:
            continue
        for t in range(times.shape[1]):
            day = times[n, t] // _DAY_US
            if cycle == DAY_OF_WEEK:
                share = (day + 3) % 7 / 7.0
            elif cycle == MONTH:
                share = _month(day) / 12.0
            else:
                share = times[n, t] % _DAY_US / _DAY_US
            out[n, t, 0] = math.sin(2.0 * math.pi * share)
            out[n, t, 1] = math.cos(2.0 * math.pi * share)


@_compiled
def relative_value(state: Floats, on: Bools, out: Floats, value: Floats) -> None:
    """Traded value in units of its mean over the first bars, as far as they are known.

    Fully adjusted prices times volume is not money: a later dividend scales the prices of the
    past but not its volume. Relative to the symbol's own beginning the scale drops out.
    State: bars counted, their sum.
    """
    for n in range(value.shape[0]):
        if not on[n]:
            continue
        seen, total = state[n, 0], state[n, 1]
        for t in range(value.shape[1]):
            if seen < _EARLY:
                seen += 1
                total += value[n, t]
            unit = total / seen
            out[n, t, 0] = value[n, t] / unit if unit > 0 else 0.0
        state[n, 0], state[n, 1] = seen, total


@_compiled
def standard_rows(values: Floats, mask: Bools) -> Floats:
    """Each row's masked, non-NaN values less their mean, over their standard deviation (divisor n).

    values, mask: [T,N] → [T,N]; 0 where masked out, NaN, or where they do not differ.
    """
    out = np.zeros(values.shape)
    for t in range(values.shape[0]):
        m, total, squares = 0, 0.0, 0.0
        for n in range(values.shape[1]):
            if mask[t, n] and not np.isnan(values[t, n]):
                m += 1
                total += values[t, n]
        mean = total / max(m, 1)
        for n in range(values.shape[1]):
            if mask[t, n] and not np.isnan(values[t, n]):
                squares += (values[t, n] - mean) ** 2
        if squares <= 1e-24 * m * mean * mean:
            continue
        deviation = math.sqrt(squares / m)
        for n in range(values.shape[1]):
            if mask[t, n] and not np.isnan(values[t, n]):
                out[t, n] = (values[t, n] - mean) / deviation
    return out


@_compiled
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
