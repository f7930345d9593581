"""From the store to a panel: bars laid out over time and assets, with everything known that day.

1. Choose symbols and partitions; only partitions inside the asked span are opened.
2. Lay the time axis: the exchange's sessions (daily) or the bars' own times (intraday).
3. Scatter the bars.
4. Derive, each row from itself and earlier rows only: present, delisted, tradable, suspended,
   member, limits, benchmark.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from datetime import date, datetime, time
from typing import NamedTuple

import numpy as np
import polars as pl

from echelon.config.sizes import Need, memory_available, refuse_need
from echelon.data import limits
from echelon.data.calendars import sessions
from echelon.data.panel import Panel, forward_fill
from echelon.data.store import Manifest, Store
from echelon.errors import DataError, UniverseError
from echelon.sources import SourceInfo
from echelon.types import Bools, Floats, Freq, Times

_FIELDS = ("open", "high", "low", "close", "volume", "amount", "factor", "pre_close")


class PanelRequest(NamedTuple):
    """Which part of a dataset to lay out. None means no bound, no symbols means all, sorted."""

    symbols: tuple[str, ...] = ()
    start: date | None = None
    end: date | None = None
    limits: str = "auto"
    delist_after: int = 250


def build_panel(store: Store, name: str, request: PanelRequest = PanelRequest()) -> Panel:  # noqa: B008
    """Lay a stored dataset out as a panel."""
    store = store.pin_dataset(name)  # an import meanwhile must not mix two versions
    manifest = store.manifest(name)
    facts = _choose(store.symbols(name), request.symbols, name)
    keys, times = _time_axis(store, manifest, request)
    refuse_need(Need("assets", len(facts), lambda n: n * len(times) * 64), memory_available())
    grids, st = _scatter(store, manifest, keys, times, tuple(facts["symbol"]), request.symbols)
    return _derive(manifest, store, request, times, facts, grids, st)


def panel_times(store: Store, name: str, request: PanelRequest) -> Times:
    """The time axis that `build_panel` would lay, without the bars."""
    store = store.pin_dataset(name)
    _choose(store.symbols(name), request.symbols, name)
    return _time_axis(store, store.manifest(name), request)[1]


def has_limits(mode: str, info: SourceInfo) -> bool:
    """Whether a panel has price limits: `mode` is data.limits; auto means raw A-share prices."""
    a_shares = info.calendar == "XSHG" and info.price_basis == "raw"
    return mode == "on" or (mode == "auto" and a_shares)


def _choose(table: pl.DataFrame, symbols: Sequence[str], name: str) -> pl.DataFrame:
    """Rows of the symbols table in the asked order."""
    if not symbols:
        return table
    known = set(table["symbol"])
    unknown = [s for s in symbols if s not in known]
    if unknown:
        hints = []
        for symbol in unknown:
            near = difflib.get_close_matches(symbol, known, n=1)
            hints.append(f"{symbol} (did you mean {near[0]}?)" if near else symbol)
        some = ", ".join(sorted(known)[:10]) + (" …" if len(known) > 10 else "")
        raise UniverseError(
            f"dataset {name!r} has no symbol {', '.join(hints)}. "
            f"It has {len(known)}: {some}. Change `assets`, or import these symbols."
        )
    order = pl.DataFrame({"symbol": list(symbols)})
    return order.join(table, on="symbol", how="left", maintain_order="left")


def _time_axis(store: Store, manifest: Manifest, request: PanelRequest) -> tuple[list[str], Times]:
    """Keys of the partitions inside the asked span, and the axis that their bars lie on."""
    name, wanted = manifest.name, request.symbols or None
    start = datetime.combine(request.start or date.min, time.min)
    end = datetime.combine(request.end or date.max, time.max)
    keys = store.partitions(name, start, end)
    if not keys:
        first, last = manifest.span
        raise DataError(
            f"dataset {name!r} has no bars between {request.start} and {request.end}; "
            f"it runs from {first.date()} to {last.date()}."
        )
    bars = (store.read_bars(name, key, symbols=wanted, columns=["time"]) for key in keys)
    times = pl.concat([part["time"].unique() for part in bars]).unique().sort()
    times = times.filter(times.is_between(start, end))
    if times.is_empty():
        raise DataError(f"dataset {name!r} has no bars of these symbols in that span.")
    axis = times.to_numpy().astype("datetime64[us]")
    if manifest.info.freq == "1d" and manifest.info.calendar != "data":
        first, last = (t.astype("datetime64[D]").item() for t in (axis[0], axis[-1]))
        # A session on which nobody trades is a hole to be seen, not a day to be skipped.
        axis = np.union1d(axis, sessions(manifest.info.calendar, first, last))
    return keys, axis


def _scatter(
    store: Store,
    manifest: Manifest,
    keys: Sequence[str],
    times: Times,
    symbols: tuple[str, ...],
    asked: Sequence[str],
) -> tuple[dict[str, Floats], Bools]:
    """Bars as [T,N] grids, NaN where there is no bar; fields nobody has are left out."""
    shape = (len(times), len(symbols))
    st = np.zeros(shape, dtype=np.bool_)
    lookup = pl.DataFrame({"symbol": symbols}, {"symbol": pl.String}).with_row_index("n")
    first, last = times[0].item(), times[-1].item()
    # What a dataset has is a fact of the whole dataset, not of the rows that happen to be loaded.
    have = [name for name in _FIELDS if name in manifest.info.fields or name in ("close", "factor")]
    grids = {name: np.full(shape, np.nan) for name in have}
    for key in keys:
        frame = store.read_bars(manifest.name, key, symbols=asked or None)
        frame = frame.filter(pl.col("time").is_between(first, last)).join(lookup, on="symbol")
        t = np.searchsorted(times, frame["time"].to_numpy().astype("datetime64[us]"))
        cell = t * len(symbols) + frame["n"].to_numpy()
        for name in have:
            column = frame[name].cast(pl.Float64)
            grids[name].ravel()[cell] = column.fill_null(np.nan).to_numpy()
        if frame["st"].any():
            st.ravel()[cell] = frame["st"].fill_null(False).to_numpy()
    return grids, st


def _derive(
    manifest: Manifest,
    store: Store,
    request: PanelRequest,
    times: Times,
    facts: pl.DataFrame,
    grids: dict[str, Floats],
    st: Bools,
) -> Panel:
    info = manifest.info
    symbols = tuple(facts["symbol"])
    close = grids["close"]
    has_bar = ~np.isnan(close)
    listed = times[:, None] >= facts["first"].to_numpy().astype("datetime64[us]")[None, :]
    delisted = _delistings(times, facts, has_bar, listed, request.delist_after)
    present = listed & ~delisted
    volume = grids.get("volume")
    traded = has_bar if volume is None else has_bar & (np.nan_to_num(volume) > 0)
    amount = grids.get("amount")
    if amount is not None:  # close × volume stands in where a bar has none
        stand_in = np.zeros_like(close) if volume is None else close * np.nan_to_num(volume)
        amount = np.nan_to_num(np.where(np.isnan(amount), stand_in, amount))
    factor = grids.get("factor")
    if factor is not None:
        factor = forward_fill(factor)
        if np.nanmax(np.abs(factor - 1), initial=0.0) == 0:
            factor = None
    pre_close = band = up = down = None
    if has_limits(request.limits, info):
        pre_close = _reference_price(times, close, grids.get("pre_close"), factor)
        since = _sessions_since_listing(times, facts)
        band = limits.bands(times, symbols, st, since)
        band = np.where(np.isnan(pre_close) | ~present, np.nan, band)
        up, down = limits.limit_prices(pre_close, band)
    return Panel(
        times=times,
        symbols=symbols,
        close=close,
        present=present,
        member=_member(times, symbols, store.table(manifest.name, "membership")) & present,
        suspended=present & ~traded,
        tradable=present & traded,
        delisted=delisted,
        anchor=facts["anchor"].to_numpy().astype(np.float64),
        freq=info.freq,
        calendar=info.calendar,
        timezone=info.timezone,
        price_basis=info.price_basis,
        open=grids.get("open"),
        high=grids.get("high"),
        low=grids.get("low"),
        volume=None if volume is None else np.nan_to_num(volume),
        amount=amount,
        factor=factor,
        pre_close=pre_close,
        band=band,
        limit_up=up,
        limit_down=down,
        benchmark=_benchmark(times, store.table(manifest.name, "benchmark"), info.freq),
    )


def _delistings(
    times: Times, facts: pl.DataFrame, has_bar: Bools, listed: Bools, delist_after: int
) -> Bools:
    """Gone, as known on each day: by the listing facts, or silence, until it trades again.

    A silence is recognised only once it has lasted, and a delisting date is not known before it.
    """
    session = _sessions(times)[:, None]
    last_bar = np.maximum.accumulate(np.where(has_bar, session, -1), axis=0)
    silent = listed & (session - last_bar >= delist_after) & (last_bar >= 0)
    known = facts["delisted"].to_numpy().astype("datetime64[us]")
    dated = times[:, None] >= known[None, :]  # NaT compares false
    back = np.maximum.accumulate(dated & has_bar, axis=0)
    return np.asarray(silent | (dated & ~back))


def _sessions(times: Times) -> np.ndarray:
    """[T] which session each bar belongs to, counted from 0."""
    days = times.astype("datetime64[D]")
    return np.cumsum(np.concatenate([[False], days[1:] != days[:-1]]))


def _sessions_since_listing(times: Times, facts: pl.DataFrame) -> np.ndarray:
    """[T,N] sessions since the listing day; large where that day is not known."""
    listed = facts["listed"].to_numpy().astype("datetime64[D]")
    days = np.unique(times.astype("datetime64[D]"))
    since = _sessions(times)[:, None] - np.searchsorted(days, listed)[None, :]
    unknown = np.isnat(listed) | (listed < days[0])
    return np.where(unknown[None, :], np.iinfo(np.int64).max, since)


def _reference_price(
    times: Times, close: Floats, pre_close: Floats | None, factor: Floats | None
) -> Floats:
    """[T,N] the session's reference price: the source's, or the last close before, ex-right."""
    total = forward_fill(close if factor is None else close * factor)
    session = _sessions(times)
    opening = np.searchsorted(session, session)  # first row of the bar's own session
    last = np.where((opening > 0)[:, None], total[np.maximum(opening - 1, 0)], np.nan)
    if factor is not None:
        last /= factor
    if pre_close is None:
        return np.asarray(last)
    return np.asarray(np.where(np.isnan(pre_close), last, pre_close))


def _member(times: Times, symbols: tuple[str, ...], intervals: pl.DataFrame | None) -> Bools:
    """[T,N] in the universe; everybody where there are no intervals. Ends are exclusive."""
    shape = (len(times), len(symbols))
    if intervals is None:
        return np.ones(shape, dtype=np.bool_)
    member = np.zeros(shape, dtype=np.bool_)
    column = {symbol: n for n, symbol in enumerate(symbols)}
    days = times.astype("datetime64[D]")
    for symbol, first, last in intervals.select("symbol", "start", "end").iter_rows():
        if symbol in column:
            inside = days >= np.datetime64(first)
            if last is not None:
                inside &= days < np.datetime64(last)
            member[:, column[symbol]] |= inside
    return member


def _benchmark(times: Times, series: pl.DataFrame | None, freq: Freq) -> Floats | None:
    """[T] the index level last known at each bar; NaN before its first."""
    if series is None:
        return None
    if series.is_empty():
        return np.full(len(times), np.nan)
    known = series["time"].to_numpy().astype("datetime64[us]")
    if freq != "1d" and (known == known.astype("datetime64[D]")).all():  # known at the close
        known = known + np.timedelta64(1, "D")
    at = np.searchsorted(known, times, side="right") - 1
    level = series["close"].to_numpy()[np.maximum(at, 0)]
    return np.asarray(np.where(at < 0, np.nan, level), dtype=np.float64)
