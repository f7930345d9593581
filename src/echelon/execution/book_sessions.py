"""A long recording of a book cut into sessions of one length, each a day to work orders on.

1. The recording is parted where it pauses: where the next snapshot is more than `PAUSE` usual
   distances away.
2. Each part is cut, from its first snapshot on, into sessions of `length` ticks. A session ends
   with the snapshot that begins the next one; nothing else is shared, so sessions follow one
   another in time.
3. What is left of a part is shorter than a session, and is left out.

A session's date is the moment it begins, and its clock counts minutes from there: date and clock
together are the time, as they are of a day that counts from midnight. Snapshots come at slightly
uneven moments; the clock that all sessions share has their usual distance.

Axes: `D` sessions, `T` snapshots of one, `L` levels.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np

from echelon.errors import DataError
from echelon.execution.book_days import BookDays
from echelon.types import Floats

PAUSE = 10.0
"""A snapshot this many usual distances after the one before begins a new part."""

log = logging.getLogger(__name__)


def cut_sessions(book: BookDays, length: int) -> BookDays:
    """Sessions of `length` ticks, hence of length + 1 snapshots, from a recording of one day."""
    n_days, n_snapshots, _ = book.shape
    assert n_days == 1, "one recording is one day"
    assert length >= 1, "a session has a tick"
    if n_snapshots <= length:
        raise DataError(
            f"the book of {book.symbols[0]} has {n_snapshots} snapshots, too few for a session of "
            f"{length} ticks. Set execution.book_session lower, or give a longer recording."
        )
    apart = np.diff(book.clock)
    usual = float(np.median(apart))
    bounds = [0, *(np.flatnonzero(apart > PAUSE * usual) + 1).tolist(), n_snapshots]
    first = [begin for low, high in pairwise(bounds) for begin in range(low, high - length, length)]
    if not first:
        raise DataError(
            f"the book of {book.symbols[0]} pauses {len(bounds) - 2} times, and no part in between "
            f"has {length + 1} snapshots. Set execution.book_session lower."
        )
    left_out = n_snapshots - len(np.unique(np.add.outer(first, np.arange(length + 1))))
    if left_out:
        log.info("%d of %d snapshots are left out: shorter than a session", left_out, n_snapshots)
    begins = np.array(first)
    at = begins[:, None] + np.arange(length + 1)

    def flow(shares: Floats) -> Floats:
        cut = shares[0, at]
        cut[:, -1] = 0.0  # what follows the last snapshot is the next session's
        return np.ascontiguousarray(cut)

    moments = np.round(book.clock[begins] * 60e6).astype("timedelta64[us]")
    return replace(
        book,
        symbols=book.symbols * len(begins),
        dates=book.dates[0] + moments,
        clock=np.asarray(np.arange(length + 1) * usual, dtype=np.float64),
        bid_price=np.ascontiguousarray(book.bid_price[0, at]),
        bid_size=np.ascontiguousarray(book.bid_size[0, at]),
        ask_price=np.ascontiguousarray(book.ask_price[0, at]),
        ask_size=np.ascontiguousarray(book.ask_size[0, at]),
        bought=flow(book.bought),
        sold=flow(book.sold),
    )
