"""What a panel says of a bar beyond its prices: listed, delisted, tradable, limits.

A row follows from its own bars and from what earlier rows left (`RowState`), and from nothing else.
So rows can be derived all at once (`build_panel`) or one by one as they come (`PanelStream`), by
the same functions and with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echelon.data import limits
from echelon.data.panel import Panel, forward_fill
from echelon.types import Bools, Floats, Freq, Ints, PriceBasis, Times

FIELDS = ("open", "high", "low", "close", "volume", "amount", "factor", "pre_close")
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True)
class PanelKind:
    """What all rows of a panel share.

    fields: what the dataset has, of `FIELDS`; close always, factor where prices are to be adjusted
    limits: whether there are price limits; delist_after: sessions of silence that mean a delisting
    """

    symbols: tuple[str, ...]
    freq: Freq
    calendar: str
    timezone: str
    price_basis: PriceBasis
    fields: frozenset[str]
    limits: bool
    delist_after: int


class Listings(NamedTuple):
    """Of each symbol [N]: what is known of its listing; NaT and NaN where nothing is."""

    first: Times  # datetime64[us], its first bar
    anchor: Floats  # close of that bar
    listed: Times  # datetime64[D], the day of listing
    delisted: Times  # datetime64[D], the day of delisting


class RawRows(NamedTuple):
    """Bars as they come, and what is known with them: T rows of N symbols."""

    times: Times  # [T]
    grids: Mapping[str, Floats]  # field → [T,N], NaN where there is no bar
    st: Bools  # [T,N] under special treatment
    member: Bools  # [T,N] in the universe, listed or not
    benchmark: Floats | None  # [T]


@dataclass(frozen=True)
class RowState:
    """What the rows so far leave to the next; arrays are [N]."""

    time: np.datetime64  # of the last row; NaT: there was none
    first_day: np.datetime64  # of the first row
    session: int  # number of the last row's session, counted from 0
    last_bar: Ints  # session of the symbol's last bar; −1: none
    listing: Ints  # session of its listing day; −1: not come yet, or not known
    returned: Bools  # has traded on or after its day of delisting
    factor: Floats  # last factor
    total: Floats  # last close × factor
    before: Floats  # the same at the end of the session before

    @staticmethod
    def start(n_symbols: int) -> RowState:
        unknown = np.full(n_symbols, np.nan)
        none = np.full(n_symbols, -1, dtype=np.int64)
        nat = np.datetime64("NaT")
        no = np.zeros(n_symbols, dtype=np.bool_)
        return RowState(nat, nat, -1, none, none, no, unknown, unknown, unknown)


def derive(
    kind: PanelKind, known: Listings, state: RowState, rows: RawRows
) -> tuple[Panel, RowState]:
    """The panel of `rows`, which follow those that left `state`, and what they leave in turn."""
    times, grids = rows.times, rows.grids
    session, first_day = number_sessions(times, state)
    close = grids["close"]
    has_bar = ~np.isnan(close)
    listed = times[:, None] >= known.first  # NaT compares false
    last_bar = np.maximum.accumulate(np.where(has_bar, session[:, None], -1), axis=0)
    last_bar = np.maximum(last_bar, state.last_bar)
    dated = times[:, None] >= known.delisted.astype("datetime64[us]")
    returned = np.maximum.accumulate(dated & has_bar, axis=0) | state.returned
    # Gone, as known on each day: by the listing facts, or by silence, until it trades again. A
    # silence is recognised only once it has lasted, and a delisting date is not known before it.
    silent = listed & (session[:, None] - last_bar >= kind.delist_after) & (last_bar >= 0)
    delisted = silent | (dated & ~returned)
    present = listed & ~delisted
    volume = _zero_where_unknown(grids["volume"]) if "volume" in grids else None
    traded = has_bar if volume is None else has_bar & (volume > 0)
    factor = forward_fill(grids["factor"], state.factor)
    total = forward_fill(close * factor, state.total)
    opening = np.searchsorted(session, session)  # first row of the bar's own session, if here
    before = _totals_before(session, opening, total, state)
    listing = _listing_sessions(times, session, first_day, known.listed, state.listing)
    since = sessions_since_listing(session, first_day, known.listed, listing)
    limited = _limits(kind, rows, before / factor, since, present)
    panel = Panel(
        times=times,
        symbols=kind.symbols,
        close=close,
        present=present,
        member=rows.member & present,
        suspended=present & ~traded,
        tradable=present & traded,
        delisted=delisted,
        anchor=known.anchor,
        freq=kind.freq,
        calendar=kind.calendar,
        timezone=kind.timezone,
        price_basis=kind.price_basis,
        open=grids.get("open"),
        high=grids.get("high"),
        low=grids.get("low"),
        volume=volume,
        amount=_amounts(grids, volume),
        factor=factor if "factor" in kind.fields else None,
        benchmark=rows.benchmark,
        **limited,
    )
    left = RowState(
        *(times[-1], first_day, int(session[-1]), last_bar[-1], listing, returned[-1]),
        *(factor[-1], total[-1], before[-1]),
    )
    return panel, left


def _limits(
    kind: PanelKind, rows: RawRows, reference: Floats, since: Ints, present: Bools
) -> dict[str, Floats]:
    """[T,N] reference price (`reference` where the source gives none), band and limits."""
    if not kind.limits:
        return {}
    pre_close = reference
    if "pre_close" in rows.grids:
        given = rows.grids["pre_close"]
        pre_close = np.where(np.isnan(given), reference, given)
    band = limits.bands(rows.times, kind.symbols, rows.st, since)
    band = np.where(np.isnan(pre_close) | ~present, np.nan, band)
    up, down = limits.limit_prices(pre_close, band)
    return {"pre_close": pre_close, "band": band, "limit_up": up, "limit_down": down}


def number_sessions(times: Times, state: RowState) -> tuple[Ints, np.datetime64]:
    """[T] the session of each row, counted from 0 on the first day of all, and that day."""
    days = times.astype("datetime64[D]")
    new = np.concatenate(
        [
            [state.session < 0 or days[0] != state.time.astype("datetime64[D]")],
            days[1:] != days[:-1],
        ]
    )
    first_day = days[0] if state.session < 0 else state.first_day
    return np.asarray(state.session + np.cumsum(new), dtype=np.int64), first_day


def _totals_before(session: Ints, opening: Ints, total: Floats, state: RowState) -> Floats:
    """[T,N] close × factor at the end of the session before each row's own; NaN: there was none."""
    before = total[np.maximum(opening - 1, 0)]
    if session[0] == state.session:  # goes on with the session of the rows before
        before[opening == 0] = state.before
    else:
        before[opening == 0] = state.total
    return before


def _listing_sessions(
    times: Times, session: Ints, first_day: np.datetime64, listed: Times, known: Ints
) -> Ints:
    """[N] the session of each listing day, or the next where it is none; −1: not reached, unknown.

    A listing before the first row is not known: how long ago it was cannot be said.
    """
    open_ = (known < 0) & (listed >= first_day)
    if not open_.any():
        return known
    at = np.searchsorted(times.astype("datetime64[D]"), listed)
    reached = open_ & (at < len(times))
    return np.where(reached, session[np.minimum(at, len(times) - 1)], known)


def sessions_since_listing(
    session: Ints, first_day: np.datetime64, listed: Times, listing: Ints
) -> Ints:
    """[T,N] sessions since the listing day, negative before it; large where it is not known."""
    # Not reached yet: every row is before it.
    since = session[:, None] - np.where(listing < 0, session[-1] + 1, listing)
    return np.where(np.isnat(listed) | (listed < first_day), _FAR, since)


def _amounts(grids: Mapping[str, Floats], volume: Floats | None) -> Floats | None:
    """[T,N] traded value; close × volume stands in where a bar has none."""
    if "amount" not in grids:
        return None
    close, amount = grids["close"], grids["amount"]
    stand_in = np.zeros_like(close) if volume is None else close * volume
    return _zero_where_unknown(np.where(np.isnan(amount), stand_in, amount))


def _zero_where_unknown(values: Floats) -> Floats:
    return np.where(np.isnan(values), 0.0, values)
