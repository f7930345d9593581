"""From prices and masks to the rows the kernel trades on.

The ledger uses the source's own prices. What the adjustment factor stands for depends on them:
with raw prices its steps are splits and ex-rights, which change the number of shares; with
split-adjusted prices they are dividends, which pay cash; adjusted prices contain both already.

`market_rows` lays a whole history out. `lay_rows` lays out the bars that come after others, one or
many: what a row needs of those before it is carried along in a `RowState`, so that the rows are bit
for bit the same however a history is divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from echelon.data.limits import board_of
from echelon.market.types import MarketRows
from echelon.types import Bools, Floats, PriceBasis, Times

HAIRCUTS: Mapping[str, float] = {
    **dict.fromkeys(("merger", "acquisition", "privatization", "transfer"), 0.0),
    "bankruptcy": 1.0,
}
"""Share of the last price lost at a delisting, by reason."""

_NOISE = 1e-5
"""Steps of the factor below this are rounding: prices of seven digits leave up to 5e-6 on every
bar, while the smallest dividends are a few ten-thousandths of the price."""

_STAMP_CN = ((np.datetime64("1990-01-01"), 0.001), (np.datetime64("2023-08-28"), 0.0005))


@dataclass(frozen=True)
class PriceHistory:
    """What the rows are made of: T bars of N assets, absent parts None."""

    times: Times  # [T]
    symbols: tuple[str, ...]  # [N]
    price_basis: PriceBasis
    close: Floats  # [T,N] last known closes
    tradable: Bools  # [T,N]
    delisted: Bools  # [T,N]
    open: Floats | None = None  # [T,N] NaN where there is no bar
    volume: Floats | None = None  # [T,N] likewise
    factor: Floats | None = None  # [T,N] start-anchored adjustment factor, carried forward
    limit_up: Floats | None = None  # [T,N]
    limit_down: Floats | None = None  # [T,N]
    reasons: Sequence[str | None] | None = None  # [N] of delistings; None: not, or not known


class RowSettings(NamedTuple):
    lots: bool
    stamp_duty: bool
    unknown_haircut: float = 0.30
    median_bars: int = 20


class RowState(NamedTuple):
    """What the next row needs of the rows before it."""

    close: Floats  # [N] of the last row; NaN: none is known
    factor: Floats  # [N] likewise
    split: Floats  # [N] product of all share steps
    volume: Floats  # [B,N] of the last B ≤ `median_bars` rows, in the shares of the first row
    day: Times  # [] of the last row, in days; NaT: there is none

    @staticmethod
    def start(n_assets: int) -> RowState:
        unknown = np.full(n_assets, np.nan)
        day = np.array("NaT", dtype="datetime64[D]")
        return RowState(unknown, unknown, np.ones(n_assets), np.zeros((0, n_assets)), day)


def market_rows(
    history: PriceHistory,
    *,
    lots: bool,
    stamp_duty: bool,
    unknown_haircut: float = 0.30,
    median_bars: int = 20,
) -> MarketRows:
    """Lay a price history out for the kernel; rows are the history's bars."""
    settings = RowSettings(lots, stamp_duty, unknown_haircut, median_bars)
    return lay_rows(history, settings, RowState.start(len(history.symbols)))[0]


def lay_rows(
    history: PriceHistory,
    settings: RowSettings,
    state: RowState,
    fixed: Mapping[str, Floats] | None = None,
) -> tuple[MarketRows, RowState]:
    """(rows of the history's bars, which follow those of `state`; the state after them).

    fixed: what `fixed_rows` gave for the rows before, of which there is no news
    """
    shape = history.close.shape
    close = _without_nan(history.close)
    opens = close if history.open is None else _without_nan(history.open)
    share_step, dividend = corporate_actions(history, state)
    # In the shares of each row: before a split there were fewer of them.
    split = np.cumprod(np.concatenate([state.split[None], share_step]), axis=0)[1:]
    volume_open, volume_close, past = np.full(shape, np.inf), np.full(shape, np.inf), state.volume
    if history.volume is not None:
        volume_close = _without_nan(history.volume)
        known = np.concatenate([past, volume_close / split])
        volume_open = trailing_median(known, settings.median_bars, len(past)) * split
        past = known[-settings.median_bars :]
    days = history.times.astype("datetime64[D]")
    rows = MarketRows(
        open=np.ascontiguousarray(opens),
        close=np.ascontiguousarray(close),
        # Copies: compiled code would be compiled once more for arrays that are read-only.
        tradable=np.array(history.tradable, dtype=np.bool_, order="C"),
        gone=np.array(history.delisted, dtype=np.bool_, order="C"),
        volume_open=volume_open,
        volume_close=np.ascontiguousarray(volume_close),
        limit_up=_or_else(history.limit_up, shape, np.inf),
        limit_down=_or_else(history.limit_down, shape, 0.0),
        share_step=share_step,
        dividend=dividend,
        **(fixed or fixed_rows(history.symbols, settings, history.reasons)),
        new_session=days != np.concatenate([state.day[None], days[:-1]]),
        stamp=_stamp_duty(days) if settings.stamp_duty else np.zeros(shape[0]),
    )
    factor = np.ones(shape[1]) if history.factor is None else np.asarray(history.factor[-1])
    last = np.asarray(history.close[-1], dtype=np.float64)
    day = np.array(days[-1])
    return rows, RowState(last.copy(), factor.copy(), split[-1].copy(), past.copy(), day)


def next_volume(rows: MarketRows, t: int, bars: int) -> Floats:
    """[N] what `volume_open` of row t + 1 will be, by rows up to t, in the shares of row t."""
    past = slice(max(0, t + 1 - bars), t + 1)
    split = np.cumprod(rows.share_step[past], axis=0)
    return np.asarray(_median(rows.volume_close[past] / split) * split[-1])


def fixed_rows(
    symbols: Sequence[str], settings: RowSettings, reasons: Sequence[str | None] | None = None
) -> dict[str, Floats]:
    """haircut, lot and min_lot[N], the parts of `MarketRows` that are the same at all rows."""
    return {
        "haircut": haircuts(symbols, reasons, settings.unknown_haircut),
        "lot": _lots(symbols, settings.lots, 100.0, 100.0),
        "min_lot": _lots(symbols, settings.lots, 100.0, 200.0),
    }


def haircuts(
    symbols: Sequence[str], reasons: Sequence[str | None] | None, unknown: float
) -> Floats:
    """[N] share of the last price that is lost at a delisting, by its reason."""
    known = reasons or (None,) * len(symbols)
    return np.array([HAIRCUTS.get((why or "").lower(), unknown) for why in known])


def trailing_median(volume: Floats, bars: int, first: int = 0) -> Floats:
    """Median[T,N] of the `bars` rows *before* each row; of fewer at the start, 0 at row 0.

    first: only of the rows from this one on
    """
    out = np.zeros((len(volume) - first, volume.shape[1]))
    for t in range(max(first, 1), min(bars, len(volume))):
        out[t - first] = _median(volume[:t])
    low = max(first, bars)
    if len(volume) == low + 1:
        out[-1] = _median(volume[low - bars : low])
    elif len(volume) > low:
        windows = sliding_window_view(volume[low - bars : -1], bars, axis=0)
        out[low - first :] = np.median(windows, axis=-1)
    return out


def _median(values: Floats) -> Floats:
    """Median[N] of values[T,N], none of them NaN: `np.median` in a third of its time."""
    middle = len(values) // 2
    if len(values) % 2:
        return np.asarray(np.partition(values, middle, axis=0)[middle])
    near = np.partition(values, (middle - 1, middle), axis=0)
    return np.asarray((near[middle - 1] + near[middle]) / 2.0)


def _without_nan(values: Floats) -> Floats:
    """A copy with 0 for NaN; `np.nan_to_num` takes its time where there is none."""
    if np.isfinite(values).all():
        return np.array(values, dtype=np.float64)
    return np.nan_to_num(np.asarray(values, dtype=np.float64))


def corporate_actions(
    history: PriceHistory, state: RowState | None = None
) -> tuple[Floats, Floats]:
    """(share_step, dividend), each [T,N], from the steps of the factor since `state`'s row."""
    shape = history.close.shape
    share_step, dividend = np.ones(shape), np.zeros(shape)
    if history.factor is None or history.price_basis == "adjusted":
        return share_step, dividend
    before = RowState.start(shape[1]) if state is None else state
    factor = np.concatenate([before.factor[None], history.factor])
    step = np.ones(shape)
    known = np.isfinite(factor[:-1]) & np.isfinite(factor[1:])
    np.divide(factor[1:], factor[:-1], out=step, where=known)
    step = np.where(np.abs(step - 1) < _NOISE, 1.0, step)
    if history.price_basis == "raw":
        return step, dividend
    # close[t−1] / (close[t−1] − dividend) is what a dividend does to the factor.
    close = np.concatenate([before.close[None], history.close[:-1]])
    return share_step, np.asarray(np.nan_to_num(close) * (1 - 1 / step))


def _stamp_duty(days: Times) -> Floats:
    """[T] the rate of each day."""
    stamp = np.zeros(len(days))
    for since, rate in _STAMP_CN:
        stamp[days >= since] = rate
    return stamp


def _or_else(values: Floats | None, shape: tuple[int, ...], otherwise: float) -> Floats:
    if values is None:
        return np.full(shape, otherwise)
    return np.ascontiguousarray(np.where(np.isnan(values), otherwise, values))


def _lots(symbols: Sequence[str], lots: bool, usual: float, star: float) -> Floats:
    """Lot sizes: A-shares trade in hundreds, STAR stocks from 200; other assets in fractions."""
    boards = [board_of(symbol) if lots else None for symbol in symbols]
    return np.array([0.0 if b is None else star if b == "star" else usual for b in boards])
