"""Replay: what the books did, remembered compactly and drawn again at random.

A transition keeps the row of the market instead of the window that was seen there, and the book in
weights: the learner looks the market up again (`agents.tables`). The next row is the row after it.

    slot   0   1   …  E−1    E   E+1  …        E books side by side, one `add` after another, in a
    book   0   1   …  E−1    0    1   …        ring: a book's transitions lie at a stride of E

So a stretch of one book is a slice of the ring, and `sequences` can draw some that cross neither
the end of an episode nor the seam at which the newest transitions overwrite the oldest
(`agents.sequences`).

Two options serve the experts that learn from one another (`population.shared_replay`): a ring can
keep who acted and how (`Behaviour`) beside what happened, and its columns can lie in files that
several processes map. What is in such files is only ever as good as the process that writes it. A
run goes on from what `state` gave its checkpoint, which is checked whole (`runs.checkpoint`).

Axes: `C` slots, `E` books, `N` assets, `n` drawn transitions, `L` steps of a sequence.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.agents.sequences import Mark, Share, draw, window
from echelon.config.sizes import memory_available
from echelon.errors import ConfigError, DataError, StoreError

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

Columns = dict[str, NDArray[Any]]
"""Arrays by name, [C,…] each, as `layout` has them."""

_TERMINATED, _TRUNCATED = np.uint8(1), np.uint8(2)
_BITS = ("free", "next_free")


class Transitions(NamedTuple):
    """What E books saw, did and got; drawn ones have n, or n × L, in the place of E.

    row[E] int32: of the market, where they decided; the next is row + 1
    weights[E,N], cash[E]: the book at the decision; free[E,N]: what could be traded
    raw[E,N]: the action before the tanh; raw_log_prob[E]: its density when it was drawn
    reward[E]; terminated, truncated[E] bool: ended for good, or merely cut off
    next_weights[E,N], next_cash[E], next_free[E,N]: at the next row, before any new beginning
    """

    row: NDArray[np.int32]
    weights: Floats
    cash: Floats
    free: Bools
    raw: Floats
    raw_log_prob: Floats
    reward: Floats
    terminated: Bools
    truncated: Bools
    next_weights: Floats
    next_cash: Floats
    next_free: Bools

    @property
    def next_row(self) -> NDArray[np.int32]:
        """Row of the market after the decision."""
        return self.row + np.int32(1)


class Behaviour(NamedTuple):
    """Who acted, and how: what others need to know before they learn from it.

    mean[E,N], log_std[E,N]: of the policy's Gaussian before the tanh
    version[E] int32: of that policy; skill[E] int32: the skill it acted with
    bar_return[E]: simple return of the book over the bar, from which costs are computed anew
    """

    mean: Floats
    log_std: Floats
    version: NDArray[np.int32]
    skill: NDArray[np.int32]
    bar_return: Floats


class Remembered(NamedTuple):
    """What a ring that keeps behaviour gives back."""

    transitions: Transitions
    behaviour: Behaviour


class Column(NamedTuple):
    """What one transition takes in an array of the ring."""

    shape: tuple[int, ...]
    kind: type[np.generic]

    @property
    def bytes(self) -> int:
        """Of one transition."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.kind).itemsize


def layout(n_assets: int, *, behaviour: bool = False) -> dict[str, Column]:
    """The columns of a ring: masks packed into bits, both kinds of end in one byte."""
    one, each = Column((), np.float32), Column((n_assets,), np.float32)
    bits = Column(((n_assets + 7) // 8,), np.uint8)
    number = Column((), np.int32)
    columns = {
        "row": number,
        "weights": each,
        "cash": one,
        "free": bits,
        "raw": each,
        "raw_log_prob": one,
        "reward": one,
        "ended": Column((), np.uint8),
        "next_weights": each,
        "next_cash": one,
        "next_free": bits,
    }
    if behaviour:
        columns |= {"mean": each, "log_std": each}
        columns |= {"version": number, "skill": number, "bar_return": one}
    return columns


def allocate(
    columns: Mapping[str, Column], capacity: int, setting: str, directory: Path | None = None
) -> Columns:
    """Zeroed arrays [C,…] in memory, or mapped from files, one per column, in a directory.

    Refused where they cannot fit: a ring fills slowly, and would be killed hours later. Files that
    another process has made are opened as they are; new ones take room on disk as they fill.
    """
    each = sum(column.bytes for column in columns.values())
    if directory is None:
        _require_room(capacity, each, setting, memory_available(), "of memory")
        return {
            name: np.zeros((capacity, *shape), dtype=kind)
            for name, (shape, kind) in columns.items()
        }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = {name: directory / f"{name}.bin" for name in columns}
        taken = sum(path.stat().st_blocks * 512 for path in paths.values() if path.exists())
        _require_room(capacity, each, setting, shutil.disk_usage(directory).free + taken, "on disk")
        return {name: _mapped(paths[name], capacity, columns[name]) for name in columns}
    except OSError as error:
        raise StoreError(
            f"{directory}: the replay buffer's files cannot be made ({error}). Mend the disk, or "
            "keep the replay buffer in memory."
        ) from error


def read_columns(columns: Mapping[str, NDArray[Any]], slots: NDArray[np.int64]) -> Transitions:
    """The transitions at slots[…] of the columns."""
    found = {name: values.take(slots, axis=0) for name, values in columns.items()}
    ended = found["ended"]
    n_assets = found["raw"].shape[-1]
    found |= {
        name: np.unpackbits(found[name], axis=-1, count=n_assets).view(np.bool_) for name in _BITS
    }
    found["terminated"] = (ended & _TERMINATED).astype(np.bool_)
    found["truncated"] = (ended & _TRUNCATED).astype(np.bool_)
    return Transitions(**{name: found[name] for name in Transitions._fields})


def read_behaviour(columns: Mapping[str, NDArray[Any]], slots: NDArray[np.int64]) -> Behaviour:
    """Who made the transitions at slots[…], and how."""
    return Behaviour(*(columns[name].take(slots, axis=0) for name in Behaviour._fields))


class Replay:
    """The ring; every array of it is allocated at the beginning."""

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
        """capacity: transitions (`setting`); the number of books is the first add's.

        behaviour: keep `Behaviour` too; directory: map the columns from files there
        columns: arrays of `layout` that were allocated elsewhere
        """
        self.capacity = capacity
        self.n_assets = n_assets
        self.setting = setting
        self.mark = Mark()
        self.behaviour = behaviour
        kinds = layout(n_assets, behaviour=behaviour)
        self.bytes_per_transition = sum(column.bytes for column in kinds.values())
        if columns is None:
            columns = allocate(kinds, capacity, setting, directory)
        self._arrays = columns
        self._plain = {name: columns[name] for name in layout(n_assets)}

    def __len__(self) -> int:
        return self.mark.size

    @property
    def books(self) -> int:
        """Books side by side; 0 before the first step."""
        return self.mark.books

    @property
    def size(self) -> int:
        """Transitions in use."""
        return self.mark.size

    def add(self, step: Transitions, behaviour: Behaviour | None = None) -> None:
        """Remember one step of every book, in the place of the oldest one if the ring is full."""
        if (behaviour is not None) != self.behaviour:
            raise ValueError(f"expected a behaviour: {self.behaviour}, found {type(behaviour)}")
        books = len(step.row)
        mark = self.mark if self.mark.books else self._begin(books)
        if books != mark.books:
            raise ValueError(f"expected a step of {mark.books} books, found one of {books}")
        values = step._asdict() | ({} if behaviour is None else behaviour._asdict())
        _require_finite(values)
        values |= {name: np.packbits(values[name], axis=-1) for name in _BITS}
        values["ended"] = step.terminated * _TERMINATED | step.truncated * _TRUNCATED
        for name, array in self._arrays.items():
            array[mark.next : mark.next + books] = values[name]
        usable = mark.usable(self.capacity)
        self.mark = Mark(books, min(mark.size + books, usable), (mark.next + books) % usable)

    def sample(self, n: int, rng: np.random.Generator) -> Transitions:
        """Transitions drawn at random, each as likely as any other, with repetition: [n,…]."""
        return read_columns(self._plain, self._slots(n, rng))

    def sequences(self, n: int, length: int, rng: np.random.Generator) -> Transitions:
        """Stretches of one book within one episode, each as likely as any other: [n,L,…].

        Only its last transition may end an episode. Raises DataError where there is no such
        stretch.
        """
        return read_columns(self._plain, self._stretches(n, length, rng))

    def sample_both(self, n: int, rng: np.random.Generator) -> Remembered:
        """As `sample`, with who acted and how, of a ring that keeps it."""
        return self._both(self._slots(n, rng))

    def sequences_both(self, n: int, length: int, rng: np.random.Generator) -> Remembered:
        """As `sequences`, with who acted and how, of a ring that keeps it."""
        return self._both(self._stretches(n, length, rng))

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """(arrays, JSON): the slots in use, and where the ring stands. The arrays are views."""
        arrays = {name: values[: self.size] for name, values in self._arrays.items()}
        facts = {"capacity": self.capacity, "n_assets": self.n_assets, **self.mark._asdict()}
        return arrays, facts

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, into a ring of the same size."""
        mark = self.accept(arrays, state)
        for name, values in self._arrays.items():
            values[: mark.size] = arrays[name]
        self.mark = mark

    def accept(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> Mark:
        """Where the ring would stand after `restore`; StoreError where that cannot be."""
        for name, setting in (("capacity", self.setting), ("n_assets", "the assets")):
            if state[name] != getattr(self, name):
                raise StoreError(
                    f"the saved replay buffer has {name} = {state[name]:,}, this one "
                    f"{getattr(self, name):,}. Resume with the {setting} it was made with."
                )
        if arrays.keys() != self._arrays.keys():
            differing = sorted(arrays.keys() ^ self._arrays.keys())
            raise StoreError(
                f"the saved replay buffer and this one do not keep the same: {differing} are in "
                "one of them only. Resume with the settings it was made with."
            )
        mark = Mark(*(int(state[name]) for name in Mark._fields))
        for name, values in self._arrays.items():
            saved = arrays[name]
            if saved.shape != (mark.size, *values.shape[1:]) or saved.dtype != values.dtype:
                raise StoreError(
                    f"the saved replay buffer's {name} is {saved.dtype}{list(saved.shape)}, "
                    f"expected {values.dtype}{[mark.size, *values.shape[1:]]}. Start the run anew."
                )
        return mark

    def _begin(self, books: int) -> Mark:
        if not 1 <= books <= self.capacity:
            raise ConfigError(
                f"{self.setting} = {self.capacity:,} cannot hold a step of {books:,} books "
                f"(train.books). Take at least {books:,}."
            )
        return Mark(books)

    def _at(self, slots: NDArray[np.int64]) -> Transitions:
        return read_columns(self._plain, slots)

    def _both(self, slots: NDArray[np.int64]) -> Remembered:
        if not self.behaviour:
            raise ValueError("this replay buffer keeps no behaviour; make it with behaviour=True")
        return Remembered(self._at(slots), read_behaviour(self._arrays, slots))

    def _slots(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        if self.size == 0:
            raise ValueError("nothing can be drawn from an empty replay buffer")
        return rng.integers(0, self.size, n)

    def _stretches(self, n: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Slots[n,L]."""
        advice = (
            "Take shorter sequences, longer episodes (train.episode_steps) or a larger "
            f"{self.setting}."
        )
        share = Share([window(self.mark, self.capacity, length)], n, advice)
        slots = draw(self._arrays["row"], self._arrays["ended"], [share], length, rng)
        return np.ascontiguousarray(slots.T)


def _require_room(capacity: int, each: int, setting: str, available: int, where: str) -> None:
    if capacity * each > available:
        raise ConfigError(
            f"{setting} = {capacity:,} transitions of {each} bytes need "
            f"{capacity * each / 1e9:.1f} GB; {available / 1e9:.1f} GB {where} are available. "
            f"At most {available // each:,} fit: lower {setting}."
        )


def _mapped(path: Path, capacity: int, column: Column) -> NDArray[Any]:
    """The column's file as an array; it is made, all holes, where it is not there yet."""
    with path.open("ab") as file:
        found, wanted = os.fstat(file.fileno()).st_size, capacity * column.bytes
        if found not in (0, wanted):  # another process may have it mapped at that size
            raise StoreError(
                f"{path}: {found:,} bytes, expected {wanted:,}: made with another size of the "
                "replay buffer or another number of assets. Remove the directory, or take another."
            )
        file.truncate(wanted)
    mapped = np.memmap(path, dtype=column.kind, mode="r+", shape=(capacity, *column.shape))
    return np.asarray(mapped)


def _require_finite(values: Mapping[str, NDArray[Any]]) -> None:
    for name, found in values.items():
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            row = values["row"]
            raise DataError(
                f"a transition's {name} is not finite; in the replay buffer it would spoil every "
                "batch that draws it. Check prices and features around rows "
                f"{int(row.min())} to {int(row.max()) + 1}."
            )
