"""Replay: what the books did, remembered compactly and drawn again at random.

A transition keeps the row of the market instead of the window that was seen there, and the book in
weights: the learner looks the market up again (`agents.tables`).

    slot   0   1   …  E−1    E   E+1  …        E books side by side, one `add` after another, in a
    book   0   1   …  E−1    0    1   …        ring: a book's transitions lie at a stride of E

So a sequence of one book is a slice of the ring, and `draw_sequences` draws some that cross neither
the end of an episode nor the seam at which the newest transitions overwrite the oldest. Several
rings may lie one after another in the same columns; of each a *window* may be drawn from:

    slots of a ring   … newest │ oldest …………………………… newest │        (the seam is at the bar)
    by age                       0   1  …  skip ……… size − 1
    window                                 └── first transitions of sequences, `starts` of them

Every start of every window is as likely as any other; one whose sequence would leave its episode is
drawn again. For experts that learn from one another (`population.shared_replay`) a ring can keep
who acted and how (`Behaviour`), and its columns can lie in files that several processes map.

Axes: `C` slots, `E` books, `N` assets, `n` drawn transitions or sequences, `L` steps of a sequence.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.config.sizes import memory_available
from echelon.errors import ConfigError, DataError, StoreError
from echelon.types import Bools, Floats32, Ints

Columns = dict[str, NDArray[Any]]
"""Arrays by name, [C,…] each, as `replay_columns` has them."""

_TERMINATED, _TRUNCATED = np.uint8(1), np.uint8(2)
_BITS = ("free", "next_free")
_ROUNDS = 16
"""Times that sequences which leave their episode are drawn again; then every start is tried."""


class Transitions(NamedTuple):
    """What E books saw, did and got; drawn ones have n, or n × L, in the place of E.

    row[E] int32: of the market, where they decided; the next is row + 1
    weights[E,N], cash[E]: the book at the decision; free[E,N]: what could be traded
    raw[E,N]: the action before the tanh; raw_log_prob[E]: its density when it was drawn
    reward[E]; terminated, truncated[E] bool: ended for good, or merely cut off
    next_weights[E,N], next_cash[E], next_free[E,N]: at the next row, before any new beginning
    """

    row: NDArray[np.int32]
    weights: Floats32
    cash: Floats32
    free: Bools
    raw: Floats32
    raw_log_prob: Floats32
    reward: Floats32
    terminated: Bools
    truncated: Bools
    next_weights: Floats32
    next_cash: Floats32
    next_free: Bools

    @property
    def next_row(self) -> NDArray[np.int32]:
        return self.row + np.int32(1)


class Behaviour(NamedTuple):
    """Who acted, and how: what others need to know before they learn from it.

    mean[E,N], log_std[E,N]: of the policy's Gaussian before the tanh
    version[E] int32: of that policy; skill[E] int32: the skill it acted with
    bar_return[E]: simple return of the book over the bar, from which costs are computed again
    """

    mean: Floats32
    log_std: Floats32
    version: NDArray[np.int32]
    skill: NDArray[np.int32]
    bar_return: Floats32


def replay_columns(n_assets: int, *, behaviour: bool = False) -> dict[str, np.dtype[Any]]:
    """What a transition takes in each array of a ring: masks as bits, both kinds of end a byte."""
    one, number, byte = (np.dtype(kind) for kind in (np.float32, np.int32, np.uint8))
    each, bits = np.dtype((one, (n_assets,))), np.dtype((byte, ((n_assets + 7) // 8,)))
    columns = {
        "row": number,
        "weights": each,
        "cash": one,
        "free": bits,
        "raw": each,
        "raw_log_prob": one,
        "reward": one,
        "ended": byte,
        "next_weights": each,
        "next_cash": one,
        "next_free": bits,
    }
    if behaviour:
        columns |= {"mean": each, "log_std": each}
        columns |= {"version": number, "skill": number, "bar_return": one}
    return columns


def allocate(
    columns: Mapping[str, np.dtype[Any]], capacity: int, setting: str, directory: Path | None = None
) -> Columns:
    """Zeroed arrays [C,…] in memory, or mapped from files, one per column, in a directory.

    Refused where they cannot fit: a ring fills slowly, and would be killed hours later. Files that
    another process has made are opened as they are.
    """

    def require_room(available: int, where: str) -> None:
        each = sum(column.itemsize for column in columns.values())
        if capacity * each > available:
            raise ConfigError(
                f"{setting} = {capacity:,} transitions of {each} bytes need "
                f"{capacity * each / 1e9:.1f} GB; {available / 1e9:.1f} GB {where} are available. "
                f"At most {available // each:,} fit: lower {setting}."
            )

    if directory is None:
        require_room(memory_available(), "of memory")
        return {name: np.zeros(capacity, dtype=column) for name, column in columns.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = {name: directory / f"{name}.bin" for name in columns}
        taken = sum(path.stat().st_blocks * 512 for path in paths.values() if path.exists())
        require_room(shutil.disk_usage(directory).free + taken, "on disk")
        return {name: _map_file(paths[name], capacity, columns[name]) for name in columns}
    except OSError as error:
        raise StoreError(
            f"{directory}: the replay buffer's files cannot be made ({error}). Mend the disk, or "
            "keep the replay buffer in memory."
        ) from error


def read_columns(columns: Mapping[str, NDArray[Any]], slots: NDArray[np.int64]) -> Transitions:
    """The transitions at slots[…] of the columns."""
    fields = {name: values.take(slots, axis=0) for name, values in columns.items()}
    ended = fields["ended"]
    n_assets = fields["raw"].shape[-1]
    fields |= {
        name: np.unpackbits(fields[name], axis=-1, count=n_assets).view(np.bool_) for name in _BITS
    }
    fields["terminated"] = (ended & _TERMINATED).astype(np.bool_)
    fields["truncated"] = (ended & _TRUNCATED).astype(np.bool_)
    return Transitions(**{name: fields[name] for name in Transitions._fields})


def read_behaviour(columns: Mapping[str, NDArray[Any]], slots: NDArray[np.int64]) -> Behaviour:
    """Who made the transitions at slots[…], and how."""
    return Behaviour(*(columns[name].take(slots, axis=0) for name in Behaviour._fields))


class Replay:
    def __init__(
        self,
        capacity: int,
        n_assets: int,
        *,
        behaviour: bool = False,
        directory: Path | None = None,
        columns: Columns | None = None,
        setting: str = "expert.buffer_size",
    ) -> None:
        """directory: of files to map the columns from; columns: those allocated elsewhere"""
        self.capacity, self.n_assets, self.setting = capacity, n_assets, setting
        self.behaviour = behaviour
        self.mark = RingMark()
        kinds = replay_columns(n_assets, behaviour=behaviour)
        self.bytes_per_transition = sum(column.itemsize for column in kinds.values())
        self.columns = columns or allocate(kinds, capacity, setting, directory)
        self._plain = {name: self.columns[name] for name in replay_columns(n_assets)}

    def __len__(self) -> int:
        return self.mark.size

    def add(self, step: Transitions, behaviour: Behaviour | None = None) -> None:
        """Remember one step of every book, in the place of the oldest one if the ring is full."""
        if (behaviour is not None) != self.behaviour:
            raise ValueError(f"expected a behaviour: {self.behaviour}, found {type(behaviour)}")
        books = len(step.row)
        mark = self.mark
        if not mark.books:
            if not 1 <= books <= self.capacity:
                raise ConfigError(
                    f"{self.setting} = {self.capacity:,} cannot hold a step of {books:,} books "
                    f"(train.books). Take at least {books:,}."
                )
            mark = RingMark(books)
        if books != mark.books:
            raise ValueError(f"expected a step of {mark.books} books, found one of {books}")
        values = step._asdict() | ({} if behaviour is None else behaviour._asdict())
        for name, column in values.items():
            if column.dtype.kind == "f" and not np.isfinite(column).all():
                raise DataError(
                    f"a transition's {name} is not finite; in the replay buffer it would spoil "
                    "every batch that draws it. Check prices and features around rows "
                    f"{int(step.row.min())} to {int(step.row.max()) + 1}."
                )
        values |= {name: np.packbits(values[name], axis=-1) for name in _BITS}
        values["ended"] = step.terminated * _TERMINATED | step.truncated * _TRUNCATED
        for name, array in self.columns.items():
            array[mark.next : mark.next + books] = values[name]
        usable = mark.usable(self.capacity)
        self.mark = RingMark(books, min(mark.size + books, usable), (mark.next + books) % usable)

    def sample(self, n: int, rng: np.random.Generator) -> Transitions:
        """Transitions drawn at random, each as likely as any other, with repetition: [n,…]."""
        if self.mark.size == 0:
            raise ValueError("nothing can be drawn from an empty replay buffer")
        return read_columns(self._plain, rng.integers(0, self.mark.size, n))

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """(arrays, JSON): the slots in use, and where the ring stands. The arrays are views."""
        arrays = {name: values[: self.mark.size] for name, values in self.columns.items()}
        facts = {"capacity": self.capacity, "n_assets": self.n_assets, **self.mark._asdict()}
        return arrays, facts

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        mark = self.accept(arrays, state)
        for name, values in self.columns.items():
            values[: mark.size] = arrays[name]
        self.mark = mark

    def accept(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> RingMark:
        """Where the ring would stand after `restore`; StoreError where that cannot be."""
        for name, setting in (("capacity", self.setting), ("n_assets", "the assets")):
            if state[name] != getattr(self, name):
                raise StoreError(
                    f"the saved replay buffer has {name} = {state[name]:,}, this one "
                    f"{getattr(self, name):,}. Resume with the {setting} it was made with."
                )
        if arrays.keys() != self.columns.keys():
            differing = sorted(arrays.keys() ^ self.columns.keys())
            raise StoreError(
                f"the saved replay buffer and this one do not keep the same: {differing} are in "
                "one of them only. Resume with the settings it was made with."
            )
        mark = RingMark(*(int(state[name]) for name in RingMark._fields))
        for name, values in self.columns.items():
            saved = arrays[name]
            if saved.shape != (mark.size, *values.shape[1:]) or saved.dtype != values.dtype:
                raise StoreError(
                    f"the saved replay buffer's {name} is {saved.dtype}{list(saved.shape)}, "
                    f"expected {values.dtype}{[mark.size, *values.shape[1:]]}. Start the run again."
                )
        return mark


class RingMark(NamedTuple):
    """How far a ring was written: E books, transitions in use, the slot to be written next."""

    books: int = 0
    size: int = 0
    next: int = 0

    def usable(self, capacity: int) -> int:
        """Slots, of `capacity`, that the books fill evenly; 0 before their number is known."""
        return capacity - capacity % self.books if self.books else 0


class RingWindow(NamedTuple):
    """Part of a ring that may be drawn from.

    base: slot of the columns at which the ring begins; usable: its slots
    first: slot of the ring that holds the window's oldest transition
    size: transitions of the window; starts: those with L − 1 of their book after them
    """

    base: int
    usable: int
    books: int
    first: int
    size: int
    starts: int


def ring_window(
    mark: RingMark, capacity: int, length: int, *, base: int = 0, skip: int = 0
) -> RingWindow:
    """The window of a ring of `capacity` slots, without its oldest `skip` transitions."""
    usable = mark.usable(capacity)
    if skip >= mark.size:
        return RingWindow(base, max(usable, 1), mark.books, 0, 0, 0)
    oldest = mark.next if mark.size == usable else 0
    size = mark.size - skip
    starts = max(0, size - (length - 1) * mark.books)
    return RingWindow(base, usable, mark.books, oldest + skip, size, starts)


class SequenceDraw(NamedTuple):
    """How many sequences to draw from which windows, and what to tell where there are none."""

    windows: Sequence[RingWindow]
    n: int
    advice: str


def draw_sequences(
    row: NDArray[np.int32],
    ended: NDArray[np.uint8],
    shares: Sequence[SequenceDraw],
    length: int,
    rng: np.random.Generator,
) -> Ints:
    """Slots[L,n] of sequences, share after share, each as likely as any other of its share.

    row, ended: columns of the rings, ended 0 where an episode goes on; only the last transition of
    a sequence may end one. Raises DataError, with the share's advice, where there is none.
    """
    table = np.array([window for share in shares for window in share.windows], dtype=np.int64).T
    ends = table[5].cumsum()
    # Starts are counted through all windows: those of share i lie from bounds[i] to bounds[i + 1].
    bounds = np.cumsum([0, *(sum(window.starts for window in share.windows) for share in shares)])
    for share, possible in zip(shares, np.diff(bounds), strict=True):
        if possible == 0:
            raise _no_sequence(share, length)
    which = np.repeat(np.arange(len(shares)), [share.n for share in shares])
    low, count = bounds[which], np.diff(bounds)[which]
    broken, slots = np.arange(len(which)), np.empty((length, len(which)), dtype=np.int64)
    # Most sequences are whole where episodes are long: draw, and draw again for the rest.
    for _ in range(_ROUNDS):
        # A remainder of 62 bits is even to 2⁻⁴⁰, and much quicker than bounds for each.
        starts = low[broken] + rng.integers(0, 1 << 62, len(broken)) % count[broken]
        drawn = _follow(table, ends, starts, length)
        slots[:, broken] = drawn
        broken = broken[~_in_one_episode(row, ended, drawn)]
        if len(broken) == 0:
            return slots
    for i in np.unique(which[broken]):
        everything = _follow(table, ends, np.arange(bounds[i], bounds[i + 1]), length)
        whole = everything[:, _in_one_episode(row, ended, everything)]
        if whole.shape[1] == 0:
            raise _no_sequence(shares[i], length)
        again = broken[which[broken] == i]
        slots[:, again] = whole[:, rng.integers(0, whole.shape[1], len(again))]
    return slots


def _follow(table: Ints, ends: Ints, starts: Ints, length: int) -> Ints:
    """Slots[L,n] of the sequences that begin at these starts, counted through all windows."""
    numbers = ends.searchsorted(starts, side="right")
    base, usable, books, first, _, count = table[:, numbers]
    first += starts - (ends[numbers] - count)
    slots: Ints = base + (first + np.arange(length)[:, None] * books) % usable
    return slots


def _in_one_episode(row: NDArray[np.int32], ended: NDArray[np.uint8], slots: Ints) -> Bools:
    """Whether each of the sequences[L,n] stays in one episode."""
    jumps = (np.diff(row.take(slots), axis=0) != 1) | (ended.take(slots[:-1]) != 0)
    whole: Bools = ~jumps.any(axis=0)
    return whole


def _no_sequence(share: SequenceDraw, length: int) -> DataError:
    size = sum(window.size for window in share.windows)
    return DataError(
        f"none of the {size:,} transitions in the replay buffer begins a sequence of {length} "
        f"within an episode. {share.advice}"
    )


def _map_file(path: Path, capacity: int, column: np.dtype[Any]) -> NDArray[Any]:
    """The column's file as an array; it is made, all holes, where it is not there yet."""
    with path.open("ab") as file:
        size, wanted = os.fstat(file.fileno()).st_size, capacity * column.itemsize
        if size not in (0, wanted):  # another process may have it mapped at that size
            raise StoreError(
                f"{path}: {size:,} bytes, expected {wanted:,}: made with another size of the "
                "replay buffer or another number of assets. Remove the directory, or take another."
            )
        file.truncate(wanted)
    return np.asarray(np.memmap(path, dtype=column, mode="r+", shape=(capacity,)))
