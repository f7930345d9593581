"""Daily price limits of A-shares, from dated board rules.

The exchange fixes each day's limits from that day's reference price (`pre_close`: the previous
close, adjusted on an ex-right day): round-half-up(pre_close × (1 ± b), 2). The band b depends on
the board, the day and whether the stock is under special treatment (ST).
"""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache
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
    eras = np.searchsorted(_SINCE, times.astype("datetime64[D]"), side="right")
    out = np.empty(st.shape)
    for era in np.unique(eras):
        rows, rules = eras == era, _rules_of(symbols, int(era))
        width = np.where(st[rows], rules.special, rules.ordinary)
        free = sessions_since_listing[rows] < rules.free_days
        out[rows] = np.where(free, np.nan, width)
    return out


_SINCE = np.unique(np.array([rule.since for rule in BANDS], dtype="datetime64[D]"))
"""Days on which a rule changes: era k is from _SINCE[k − 1] on, era 0 is before all."""


class _Rules(NamedTuple):
    """The rule of each symbol [N] in one era; NaN: no limit."""

    ordinary: Floats
    special: Floats
    free_days: Floats


@lru_cache(maxsize=64)
def _rules_of(symbols: tuple[str, ...], era: int) -> _Rules:
    rules = np.full((3, len(symbols)), np.nan)
    # In order of date: a later rule overrides an earlier one.
    current = {r.board: r for r in BANDS if era and np.datetime64(r.since) <= _SINCE[era - 1]}
    for n, symbol in enumerate(symbols):
        rule = current.get(board_of(symbol))  # type: ignore[arg-type]
        if rule is not None:
            rules[:, n] = rule.ordinary, rule.special, rule.free_days
    return _Rules(*rules)


def limit_prices(pre_close: Floats, band: Floats) -> tuple[Floats, Floats]:
    """(limit_up, limit_down) of the same shape, rounded half up to a cent; NaN without limit.

    >>> [float(x) for x in limit_prices(np.array(9.97), np.array(0.1))]
    [10.97, 8.97]
    """
    return round_half_up(pre_close * (1 + band)), round_half_up(pre_close * (1 - band))


def round_half_up(price: Floats) -> Floats:
    """Round to cents, halves up; a billionth absorbs binary noise (10.965 is 10.96499…)."""
    return np.asarray(np.floor(price * 100 + 0.5 + 1e-7) / 100, dtype=np.float64)
