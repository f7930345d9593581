"""Stretches of one book within one episode, drawn at random from rings of transitions.

Rings lie one after another in the same columns. In each of them E books stand side by side, so a
book's transitions are E slots apart, and a *window* is the part of a ring that may be drawn from:

    slots of a ring   … newest │ oldest …………………………… newest │        (the seam is at the bar)
    by age                       0   1  …  skip ……… size − 1
    window                                 └── first transitions of stretches, `starts` of them

Every start of every window is as likely as any other; one whose stretch would leave its episode is
drawn again. So a stretch crosses neither the end of an episode nor the seam.

Axes: `K` windows, `n` stretches, `L` steps of a stretch, time first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.errors import DataError

Ints = NDArray[np.int64]

_ROUNDS = 16


class Mark(NamedTuple):
    """How far a ring was written: E books, transitions in use, the slot to be written next."""

    books: int = 0
    size: int = 0
    next: int = 0

    def usable(self, capacity: int) -> int:
        """Slots, of `capacity`, that the books fill evenly; 0 before their number is known."""
        return capacity - capacity % self.books if self.books else 0


class Window(NamedTuple):
    """Part of a ring that may be drawn from.

    base: slot of the columns at which the ring begins; usable: its slots; books: E
    first: slot of the ring that holds the window's oldest transition
    size: transitions of the window; starts: those with L − 1 of their book after them
    """

    base: int
    usable: int
    books: int
    first: int
    size: int
    starts: int


def window(mark: Mark, capacity: int, length: int, *, base: int = 0, skip: int = 0) -> Window:
    """The window of a ring of `capacity` slots, without its oldest `skip` transitions."""
    usable = mark.usable(capacity)
    if skip >= mark.size:
        return Window(base, max(usable, 1), mark.books, 0, 0, 0)
    oldest = mark.next if mark.size == usable else 0
    size = mark.size - skip
    starts = max(0, size - (length - 1) * mark.books)
    return Window(base, usable, mark.books, oldest + skip, size, starts)


class Share(NamedTuple):
    """How many stretches to draw from which windows, and what to tell where there are none."""

    windows: Sequence[Window]
    n: int
    advice: str


def draw(
    row: NDArray[np.int32],
    ended: NDArray[np.uint8],
    shares: Sequence[Share],
    length: int,
    rng: np.random.Generator,
) -> Ints:
    """Slots[L,n] of stretches, share after share, each as likely as any other of its share.

    row, ended: columns of the rings, ended 0 where an episode goes on; only the last transition of
    a stretch may end one. Raises DataError, with the share's advice, where there is no such
    stretch.
    """
    if length < 1:
        raise ValueError(f"expected length ≥ 1, found {length}")
    table = np.array([one for share in shares for one in share.windows], dtype=np.int64).T
    ends = table[5].cumsum()
    # Starts are counted through all windows: those of share i lie from bounds[i] to bounds[i + 1].
    bounds = np.cumsum([0, *(sum(one.starts for one in share.windows) for share in shares)])
    for share, possible in zip(shares, np.diff(bounds), strict=True):
        if possible == 0:
            raise _none(share, length)
    which = np.repeat(np.arange(len(shares)), [share.n for share in shares])
    low, count = bounds[which], np.diff(bounds)[which]
    broken, slots = np.arange(len(which)), np.empty((length, len(which)), dtype=np.int64)
    # Most stretches are whole where episodes are long: draw, and draw again for the rest.
    for _ in range(_ROUNDS):
        # A remainder of 62 bits is even to 2⁻⁴⁰, and much quicker than bounds for each.
        starts = low[broken] + rng.integers(0, 1 << 62, len(broken)) % count[broken]
        anew = _follow(table, ends, starts, length)
        slots[:, broken] = anew
        broken = broken[~_whole(row, ended, anew)]
        if len(broken) == 0:
            return slots
    for i in np.unique(which[broken]):
        everything = _follow(table, ends, np.arange(bounds[i], bounds[i + 1]), length)
        whole = everything[:, _whole(row, ended, everything)]
        if whole.shape[1] == 0:
            raise _none(shares[i], length)
        again = broken[which[broken] == i]
        slots[:, again] = whole[:, rng.integers(0, whole.shape[1], len(again))]
    return slots


def _follow(table: Ints, ends: Ints, starts: Ints, length: int) -> Ints:
    """Slots[L,n] of the stretches that begin at these starts, counted through all windows."""
    numbers = ends.searchsorted(starts, side="right")
    base, usable, books, first, _, count = table[:, numbers]
    first += starts - (ends[numbers] - count)
    slots: Ints = base + (first + np.arange(length)[:, None] * books) % usable
    return slots


def _whole(row: NDArray[np.int32], ended: NDArray[np.uint8], slots: Ints) -> NDArray[np.bool_]:
    """Whether each of the stretches[L,n] stays in one episode."""
    rows = row.take(slots)
    jumps = (rows[1:] - rows[:-1] != 1) | (ended.take(slots[:-1]) != 0)
    whole: NDArray[np.bool_] = ~jumps.any(axis=0)
    return whole


def _none(share: Share, length: int) -> DataError:
    size = sum(window.size for window in share.windows)
    return DataError(
        f"none of the {size:,} transitions in the replay buffer begins a stretch of {length} "
        f"within an episode. {share.advice}"
    )
