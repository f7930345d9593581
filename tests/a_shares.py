"""A-shares by lot: splits, suspensions, listings, delistings, changes of the universe."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
from markets import FrameSource

from echelon.data.calendars import sessions
from echelon.data.importing import import_source
from echelon.data.store import Store

SYMBOLS = ("600000.SH", "000001.SZ", "688981.SH", "300750.SZ", "600001.SH", "000002.SZ")
FIRST, LAST = date(2023, 3, 1), date(2023, 12, 29)


MINUTES_FIRST, MINUTES_LAST = date(2023, 8, 23), date(2023, 8, 30)


def a_share_times(freq: str, first: date | None = None) -> list[datetime]:
    """Bar ends; first: where they begin, if earlier than by default."""
    if freq == "1d":
        return [t.item() for t in sessions("XSHG", first or FIRST, LAST)]
    open_at = [timedelta(hours=9, minutes=35 + 5 * k) for k in range(24)]
    open_at += [timedelta(hours=13, minutes=5 + 5 * k) for k in range(24)]
    days = sessions("XSHG", first or MINUTES_FIRST, MINUTES_LAST)
    return [day.item() + minute for day in days for minute in open_at]


def a_share_bars(freq: str, basis: str, first: date | None = None) -> pl.DataFrame:
    """Random walks with splits or dividends, suspensions, a late listing and two that leave."""
    rng = np.random.default_rng(5)
    times = a_share_times(freq, first)
    n = len(times)
    frames = []
    for k, symbol in enumerate(SYMBOLS):
        total = 20 * np.exp(np.cumsum(rng.standard_t(4, n) * 0.02))
        step = np.ones(n)
        step[rng.choice(np.arange(3, n), 6, replace=False)] = rng.choice([1.013, 1.4, 10 / 9.7], 6)
        factor = np.cumprod(step)
        close = np.round(total / factor if basis == "raw" else total, 2)
        keep = rng.random(n) >= 0.05
        if k == 1:
            keep[15:40] = False  # suspended as X begins
        if k == 2:
            keep[: n // 3] = False
        if k >= 4:
            keep[n - n // (2 * k) :] = False
        frames.append(
            pl.DataFrame(
                {
                    "time": times,
                    "symbol": [symbol] * n,
                    "open": np.round(close * np.exp(rng.normal(0, 0.01, n)), 2),
                    "high": close * 1.1,
                    "low": close * 0.9,
                    "close": close,
                    "volume": rng.integers(0, 300_000, n).astype(float),
                    "factor": factor,
                }
            ).filter(pl.Series(keep))
        )
    return pl.concat(frames)


def import_a_shares(store: Path, freq: str, basis: str, first: date | None = None) -> None:
    """Put them into a store, as the dataset `m`."""
    bars = a_share_bars(freq, basis, first)
    last = bars["time"].max()
    leaves = [bars.filter(pl.col("symbol") == s)["time"].max().date() for s in SYMBOLS[4:]]
    day = timedelta(days=1)
    instruments = pl.DataFrame(
        {
            "symbol": SYMBOLS,
            "delisted": [None] * 4 + [leaves[0] + day, leaves[1] + day],
            "reason": [None] * 4 + ["merger", None],
        }
    )
    membership = pl.DataFrame(
        {
            "symbol": [*SYMBOLS, SYMBOLS[0]],
            "start": [date(2015, 1, 1)] * 6 + [date(2023, 11, 1)],
            "end": [date(2023, 10, 9), *[None] * 6],
        },
        schema_overrides={"start": pl.Date, "end": pl.Date},
    )
    index = pl.DataFrame({"time": [datetime(2023, 4, 20), last], "close": [100.0, 110.0]})
    info = {"freq": freq, "calendar": "XSHG", "timezone": "Asia/Shanghai", "price_basis": basis}
    source = FrameSource(
        bars, instruments=instruments, membership=membership, benchmark=index, **info
    )
    import_source(source, Store(store), "m")
