"""From prices and masks to the rows the kernel trades on.

The ledger uses the source's own prices. What the adjustment factor stands for depends on them:
with raw prices its steps are splits and ex-rights, which change the number of shares; with
split-adjusted prices they are dividends, which pay cash; adjusted prices contain both already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def market_rows(
    history: PriceHistory,
    *,
    lots: bool,
    stamp_duty: bool,
    unknown_haircut: float = 0.30,
    median_bars: int = 20,
) -> MarketRows:
    """Lay a price history out for the kernel; rows are the history's bars."""
    shape = history.close.shape
    close = np.nan_to_num(np.asarray(history.close, dtype=np.float64))
    opens = close if history.open is None else np.nan_to_num(np.asarray(history.open))
    share_step, dividend = corporate_actions(history)
    volume_open = volume_close = np.full(shape, np.inf)
    if history.volume is not None:
        volume_close = np.nan_to_num(np.asarray(history.volume))
        # In the shares of each row: before a split there were fewer of them.
        split = np.cumprod(share_step, axis=0)
        volume_open = trailing_median(volume_close / split, median_bars) * split
    days = history.times.astype("datetime64[D]")
    stamp = np.zeros(shape[0])
    for since, rate in _STAMP_CN if stamp_duty else ():
        stamp[days >= since] = rate
    reasons = history.reasons or (None,) * len(history.symbols)
    return MarketRows(
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
        haircut=np.array([HAIRCUTS.get((why or "").lower(), unknown_haircut) for why in reasons]),
        lot=_lots(history.symbols, lots, 100.0, 100.0),
        min_lot=_lots(history.symbols, lots, 100.0, 200.0),
        new_session=np.concatenate([[True], days[1:] != days[:-1]]),
        stamp=stamp,
    )


def trailing_median(volume: Floats, bars: int) -> Floats:
    """Median[T,N] of the `bars` rows *before* each row; of fewer at the start, 0 at row 0."""
    out = np.zeros_like(volume)
    for t in range(1, min(bars, len(volume))):
        out[t] = np.median(volume[:t], axis=0)
    if len(volume) > bars:
        out[bars:] = np.median(sliding_window_view(volume[:-1], bars, axis=0), axis=-1)
    return out


def corporate_actions(history: PriceHistory) -> tuple[Floats, Floats]:
    """(share_step, dividend), each [T,N], from the steps of the factor."""
    shape = history.close.shape
    share_step, dividend = np.ones(shape), np.zeros(shape)
    if history.factor is None or history.price_basis == "adjusted":
        return share_step, dividend
    factor = np.asarray(history.factor)
    step = np.ones(shape)
    known = np.isfinite(factor[:-1]) & np.isfinite(factor[1:])
    np.divide(factor[1:], factor[:-1], out=step[1:], where=known)
    step = np.where(np.abs(step - 1) < _NOISE, 1.0, step)
    if history.price_basis == "raw":
        return step, dividend
    # close[t−1] / (close[t−1] − dividend) is what a dividend does to the factor.
    dividend[1:] = np.nan_to_num(history.close[:-1]) * (1 - 1 / step[1:])
    return share_step, dividend


def _or_else(values: Floats | None, shape: tuple[int, ...], otherwise: float) -> Floats:
    if values is None:
        return np.full(shape, otherwise)
    return np.ascontiguousarray(np.where(np.isnan(values), otherwise, values))


def _lots(symbols: Sequence[str], lots: bool, usual: float, star: float) -> Floats:
    """Lot sizes: A-shares trade in hundreds, STAR stocks from 200; other assets in fractions."""
    boards = [board_of(symbol) if lots else None for symbol in symbols]
    return np.array([0.0 if b is None else star if b == "star" else usual for b in boards])
