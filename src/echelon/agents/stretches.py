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


class Stretches(NamedTuple):
    """Slots of the columns [L,n], and the window[n] each stretch came from."""

    slots: Ints
    window: Ints


def window(mark: Mark, capacity: int, length: int, *, base: int = 0, skip: int = 0) -> Window:
    """The window of a ring of `capacity` slots, without its oldest `skip` transitions."""
    usable = mark.usable(capacity)
    if skip >= mark.size:
        return Window(base, max(usable, 1), mark.books, 0, 0, 0)
    oldest = mark.next if mark.size == usable else 0
    size = mark.size - skip
    starts = max(0, size - (length - 1) * mark.books)
    return Window(base, usable, mark.books, oldest + skip, size, starts)


def draw(
    row: NDArray[np.int32],
    ended: NDArray[np.uint8],
    windows: Sequence[Window],
    n: int,
    length: int,
    chance: np.random.Generator,
    advice: str,
) -> Stretches:
    """Stretches of `length` steps from anywhere in the windows, each as likely as any other.

    row, ended: columns of the rings, ended 0 where an episode goes on; only the last transition of
    a stretch may end one. Raises DataError, with the advice, where there is no such stretch.
    """
    if length < 1:
        raise ValueError(f"expected length ≥ 1, found {length}")
    table = np.array(windows, dtype=np.int64).T
    ends = table[5].cumsum()
    possible = int(ends[-1])
    if possible:
        found: list[Stretches] = []
        missing = n
        # Most stretches are whole where episodes are long: draw, and draw again for the rest.
        for _ in range(_ROUNDS):
            drawn = _follow(table, ends, chance.integers(0, possible, n), length)
            whole = _whole(row, ended, drawn.slots)
            if missing == n and whole.all():
                return drawn
            found.append(Stretches(drawn.slots[:, whole], drawn.window[whole]))
            missing -= len(found[-1].window)
            if missing <= 0:
                slots, numbers = zip(*found, strict=True)
                return Stretches(np.concatenate(slots, axis=1)[:, :n], np.concatenate(numbers)[:n])
        everything = _follow(table, ends, np.arange(possible), length)
        places = np.flatnonzero(_whole(row, ended, everything.slots))
        if len(places):
            chosen = chance.choice(places, n)
            return Stretches(everything.slots[:, chosen], everything.window[chosen])
    raise DataError(
        f"none of the {int(table[4].sum()):,} transitions in the replay buffer begins a stretch "
        f"of {length} within an episode. {advice}"
    )


def _follow(table: Ints, ends: Ints, starts: Ints, length: int) -> Stretches:
    """The stretches that begin at these starts, counted through all windows[n]."""
    numbers = ends.searchsorted(starts, side="right")
    base, usable, books, first, _, count = table[:, numbers]
    first += starts - (ends[numbers] - count)
    slots = base + (first + np.arange(length)[:, None] * books) % usable
    return Stretches(slots, numbers)


def _whole(row: NDArray[np.int32], ended: NDArray[np.uint8], slots: Ints) -> NDArray[np.bool_]:
    """Whether each of the stretches[L,n] stays in one episode."""
    rows = row.take(slots)
    jumps = (rows[1:] - rows[:-1] != 1) | (ended.take(slots[:-1]) != 0)
    whole: NDArray[np.bool_] = ~jumps.any(axis=0)
    return whole
