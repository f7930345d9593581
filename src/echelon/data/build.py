"""From the store to a panel: bars laid out over time and assets, with everything known that day.

1. Choose symbols and partitions; only partitions inside the asked span are opened.
2. Lay the time axis: the exchange's sessions (daily) or the bars' own times (intraday).
3. Scatter the bars.
4. Derive (`derive`), each row from itself and earlier rows only: present, delisted, tradable,
   suspended, limits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime, time
from typing import NamedTuple

import numpy as np
import polars as pl

from echelon.config.sizes import Need, memory_available, refuse_need
from echelon.data.calendars import sessions
from echelon.data.derive import FIELDS, Listings, PanelKind, RawRows, RowState, derive
from echelon.data.panel import Panel
from echelon.data.store import Manifest, Store
from echelon.data.stream import BarSet, StreamFacts
from echelon.errors import DataError, UniverseError
from echelon.sources import SourceInfo
from echelon.types import Bools, Floats, Freq, Times


class PanelRequest(NamedTuple):
    """Which part of a dataset to lay out. None means no bound, no symbols means all, sorted."""

    symbols: tuple[str, ...] = ()
    start: date | None = None
    end: date | None = None
    limits: str = "auto"
    delist_after: int = 250


def build_panel(store: Store, name: str, request: PanelRequest = PanelRequest()) -> Panel:  # noqa: B008
    store = store.pin_dataset(name)  # an import meanwhile must not mix two versions
    manifest = store.manifest(name)
    facts = _choose(store.symbols(name), request.symbols, name)
    keys, times = _time_axis(store, manifest, request)
    refuse_need(Need("assets", len(facts), lambda n: n * len(times) * 64), memory_available())
    symbols = tuple(facts["symbol"])
    grids, st = _scatter(store, manifest, keys, times, symbols, request.symbols)
    rows = RawRows(
        times,
        grids,
        st,
        _member(times, symbols, store.table(name, "membership")),
        _benchmark(times, store.table(name, "benchmark"), manifest.info.freq),
    )
    kind = panel_kind(manifest.info, symbols, request)
    if np.nanmax(np.abs(grids["factor"] - 1), initial=0.0) == 0:
        kind = replace(kind, fields=kind.fields - {"factor"})
    return derive(kind, listings(facts), RowState.start(len(facts)), rows)[0]


def panel_kind(info: SourceInfo, symbols: tuple[str, ...], request: PanelRequest) -> PanelKind:
    """What all rows of a panel share, with a factor whether or not it is ever other than 1."""
    # What a dataset has is a fact of the whole dataset, not of the rows that happen to be loaded.
    have = frozenset(f for f in FIELDS if f in info.fields or f in ("close", "factor"))
    return PanelKind(
        symbols=symbols,
        freq=info.freq,
        calendar=info.calendar,
        timezone=info.timezone,
        price_basis=info.price_basis,
        fields=have,
        limits=has_limits(request.limits, info),
        delist_after=request.delist_after,
    )


def listings(facts: pl.DataFrame) -> Listings:
    """Rows of a symbols table as arrays [N]."""
    return Listings(
        first=facts["first"].to_numpy().astype("datetime64[us]"),
        anchor=facts["anchor"].to_numpy().astype(np.float64),
        listed=facts["listed"].to_numpy().astype("datetime64[D]"),
        delisted=facts["delisted"].to_numpy().astype("datetime64[D]"),
    )


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
    have = [name for name in FIELDS if name in manifest.info.fields or name in ("close", "factor")]
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


def stream_facts(store: Store, name: str, request: PanelRequest, end: datetime) -> StreamFacts:
    """What a stream that continues `build_panel`'s panel behind its last bar, `end`, must know.

    Symbols that the store does not know yet have no facts. What the store knows of days after `end`
    is left out: it comes with the bars.
    """
    store = store.pin_dataset(name)
    info, table = store.manifest(name).info, store.symbols(name)
    wanted = request.symbols or tuple(table["symbol"])
    facts = pl.DataFrame({"symbol": list(wanted)}).join(
        table, on="symbol", how="left", maintain_order="left"
    )
    later, after = pl.col("first") > end, pl.lit(end.date())
    facts = facts.with_columns(
        first=pl.when(~later).then("first"),
        anchor=pl.when(~later).then("anchor"),
        listed=pl.when(pl.col("listed") <= after).then("listed"),
        delisted=pl.when(pl.col("delisted") <= after).then("delisted"),
        reason=pl.when(pl.col("delisted") <= after).then("reason"),
    )
    last = np.array([end], dtype="datetime64[us]")
    level = _benchmark(last, store.table(name, "benchmark"), info.freq)
    return StreamFacts(
        kind=panel_kind(info, wanted, request),
        known=listings(facts),
        reasons=tuple(facts["reason"]),
        members=_member(last, wanted, store.table(name, "membership"))[0],
        benchmark=None if level is None else float(level[0]),
    )


def read_bar_sets(
    store: Store, name: str, request: PanelRequest, after: datetime
) -> Iterator[BarSet]:
    """The stored bars behind `after`, set by set, each with the facts that become known with it."""
    store = store.pin_dataset(name)
    manifest = store.manifest(name)
    facts = _choose(store.symbols(name), request.symbols, name)
    symbols = tuple(facts["symbol"])
    keys, axis = _time_axis(store, manifest, request)
    times = axis[axis > np.datetime64(after, "us")]
    if not len(times):
        return
    grids, st = _scatter(store, manifest, keys, times, symbols, request.symbols)
    member = _member(times, symbols, store.table(name, "membership"))
    level = _benchmark(times, store.table(name, "benchmark"), manifest.info.freq)
    known, why = listings(facts), facts["reason"].to_list()
    for t, time_ in enumerate(times):
        day = time_.astype("datetime64[D]")
        gone = known.delisted <= day
        yield BarSet(
            time=time_,
            st=st[t],
            members=member[t],
            listed=np.where(known.listed <= day, known.listed, np.datetime64("NaT")),
            delisted=np.where(gone, known.delisted, np.datetime64("NaT")),
            reasons=tuple(w if g else None for w, g in zip(why, gone, strict=True)),
            benchmark=None if level is None or np.isnan(level[t]) else float(level[t]),
            **{field: grid[t] for field, grid in grids.items()},
        )
