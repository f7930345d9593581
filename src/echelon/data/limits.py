"""Daily price limits of A-shares, from dated board rules.

The exchange fixes each day's limits from that day's reference price (`pre_close`: the previous
close, adjusted on an ex-right day): round-half-up(pre_close × (1 ± b), 2). The band b depends on
the board, the day and whether the stock is under special treatment (ST).
"""

from __future__ import annotations

import re
from datetime import date
from typing import Literal, NamedTuple

import numpy as np

from echelon.types import Bools, Floats, Times

Board = Literal["main", "chinext", "star", "bse"]


class Band(NamedTuple):
    """From `since` on, `board` moves at most `ordinary` a day, or `special` under ST."""

    board: Board
    since: date
    ordinary: float
    special: float
    free_days: int  # sessions after listing without any limit


BANDS: tuple[Band, ...] = (
    Band("main", date(1996, 12, 16), 0.10, 0.10, 1),
    Band("main", date(1998, 4, 22), 0.10, 0.05, 1),
    Band("main", date(2023, 4, 10), 0.10, 0.05, 5),
    Band("chinext", date(2009, 10, 30), 0.10, 0.05, 1),
    Band("chinext", date(2020, 8, 24), 0.20, 0.20, 5),
    Band("star", date(2019, 7, 22), 0.20, 0.20, 5),
    Band("bse", date(2021, 11, 15), 0.30, 0.30, 1),
)
"""The dated table. Before a board's first row there is no limit."""

_CODE = re.compile(r"\d{6}")
_BOARDS: tuple[tuple[str, Board], ...] = (
    (r"68[89]\d{3}", "star"),
    (r"30[012]\d{3}", "chinext"),
    (r"(?:4|8|92)\d+", "bse"),
    (r"(?:60|00)\d{4}", "main"),
)


def board_of(symbol: str) -> Board | None:
    """The board of an A-share code in any usual spelling (300750.SZ, SH600000); None: not one.

    >>> board_of("300750.SZ"), board_of("SH688981"), board_of("AAPL")
    ('chinext', 'star', None)
    """
    code = _CODE.search(symbol)
    if code is None:
        return None
    for pattern, board in _BOARDS:
        if re.fullmatch(pattern, code.group()):
            return board
    return None


def bands(
    times: Times, symbols: tuple[str, ...], st: Bools, sessions_since_listing: np.ndarray
) -> Floats:
    """Half-width of the limit for every symbol and bar: [T,N], NaN where there is none.

    st: [T,N] under special treatment; sessions_since_listing: [T,N], 0 on the listing day, a
    large number where the listing day is not known.
    """
    days = times.astype("datetime64[D]")
    out = np.full(st.shape, np.nan)
    for n, symbol in enumerate(symbols):
        board = board_of(symbol)
        for rule in BANDS:  # in order of date: a later rule overrides an earlier one
            if rule.board != board:
                continue
            rows = days >= np.datetime64(rule.since)
            width = np.where(st[rows, n], rule.special, rule.ordinary)
            width[sessions_since_listing[rows, n] < rule.free_days] = np.nan
            out[rows, n] = width
    return out


def limit_prices(pre_close: Floats, band: Floats) -> tuple[Floats, Floats]:
    """(limit_up, limit_down) of the same shape, rounded half up to a cent; NaN without limit.

    >>> [float(x) for x in limit_prices(np.array(9.97), np.array(0.1))]
    [10.97, 8.97]
    """
    return round_half_up(pre_close * (1 + band)), round_half_up(pre_close * (1 - band))


def round_half_up(price: Floats) -> Floats:
    """Round to cents, halves up; a billionth absorbs binary noise (10.965 is 10.96499…)."""
    return np.asarray(np.floor(price * 100 + 0.5 + 1e-7) / 100, dtype=np.float64)
