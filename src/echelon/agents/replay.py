"""Replay: what the books did, remembered compactly and drawn again at random.

A transition keeps the row of the market instead of the window that was seen there, and the book in
weights: the learner looks the market up again (`agents.tables`). The next row is the row after it.

    slot   0   1   …  E−1    E   E+1  …        E books side by side, one `add` after another, in a
    book   0   1   …  E−1    0    1   …        ring: a book's transitions lie at a stride of E

So a stretch of one book is a slice of the ring, and `sequences` can draw some that cross neither
the end of an episode nor the seam at which the newest transitions overwrite the oldest.

`save` writes one safetensors file with a checksum; a file that is damaged, cut short or of
something else is refused before anything in memory changes.

Axes: `C` slots, `E` books, `N` assets, `n` drawn transitions, `L` steps of a sequence.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from echelon.errors import ConfigError, DataError, StoreError
from echelon.files import sync

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

FORMAT = "echelon-replay-1"
_ROUNDS = 16
_TERMINATED, _TRUNCATED = np.uint8(1), np.uint8(2)


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


class Replay:
    """The ring; every array of it is allocated at the beginning."""

    def __init__(self, capacity: int, n_assets: int) -> None:
        """capacity: transitions (`expert.buffer_size`); the number of books is the first add's."""
        self.capacity = capacity
        self.n_assets = n_assets
        self.books = 0
        self.size = 0
        self._next = 0
        packed = (n_assets + 7) // 8
        layout: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "row": ((), np.int32),
            "weights": ((n_assets,), np.float32),
            "cash": ((), np.float32),
            "free": ((packed,), np.uint8),
            "raw": ((n_assets,), np.float32),
            "raw_log_prob": ((), np.float32),
            "reward": ((), np.float32),
            "ended": ((), np.uint8),
            "next_weights": ((n_assets,), np.float32),
            "next_cash": ((), np.float32),
            "next_free": ((packed,), np.uint8),
        }
        self.bytes_per_transition = sum(
            int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
            for shape, kind in layout.values()
        )
        _require_memory(capacity, self.bytes_per_transition)
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.zeros((capacity, *shape), dtype=kind) for name, (shape, kind) in layout.items()
        }

    def __len__(self) -> int:
        return self.size

    def add(self, step: Transitions) -> None:
        """Remember one step of every book, in the place of the oldest one if the ring is full."""
        books = len(step.row)
        if self.books == 0:
            self._begin(books)
        if books != self.books:
            raise ValueError(f"expected a step of {self.books} books, found one of {books}")
        _require_finite(step)
        place = slice(self._next, self._next + books)
        arrays = self._arrays
        for name in ("row", "weights", "cash", "raw", "raw_log_prob", "reward"):
            arrays[name][place] = getattr(step, name)
        arrays["next_weights"][place] = step.next_weights
        arrays["next_cash"][place] = step.next_cash
        arrays["free"][place] = np.packbits(step.free, axis=-1)
        arrays["next_free"][place] = np.packbits(step.next_free, axis=-1)
        arrays["ended"][place] = step.terminated * _TERMINATED | step.truncated * _TRUNCATED
        self._next = (self._next + books) % self._usable
        self.size = min(self.size + books, self._usable)

    def sample(self, n: int, chance: np.random.Generator) -> Transitions:
        """Transitions drawn at random, each as likely as any other, with repetition: [n,…]."""
        if self.size == 0:
            raise ValueError("nothing can be drawn from an empty replay buffer")
        return self._at(chance.integers(0, self.size, n))

    def sequences(self, n: int, length: int, chance: np.random.Generator) -> Transitions:
        """Stretches of one book within one episode, each as likely as any other: [n,L,…].

        Only its last transition may end an episode. Raises DataError where there is no such
        stretch.
        """
        starts = self._starts(n, length, chance)
        return self._at(self._follow(starts, length))

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """(arrays, JSON): the slots in use, and where the ring stands. The arrays are views."""
        arrays = {name: values[: self.size] for name, values in self._arrays.items()}
        facts = {
            "capacity": self.capacity,
            "n_assets": self.n_assets,
            "books": self.books,
            "size": self.size,
            "next": self._next,
        }
        return arrays, facts

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, into a ring of the same size."""
        for name, setting in (("capacity", "expert.buffer_size"), ("n_assets", "the assets")):
            if state[name] != getattr(self, name):
                raise StoreError(
                    f"the saved replay buffer has {name} = {state[name]:,}, this one "
                    f"{getattr(self, name):,}. Resume with the {setting} it was made with."
                )
        size = int(state["size"])
        for name, values in self._arrays.items():
            saved = arrays[name]
            if saved.shape != (size, *values.shape[1:]) or saved.dtype != values.dtype:
                raise StoreError(
                    f"the saved replay buffer's {name} is {saved.dtype}{list(saved.shape)}, "
                    f"expected {values.dtype}{[size, *values.shape[1:]]}. Start the run anew."
                )
        for name, values in self._arrays.items():
            values[:size] = arrays[name]
        self.books, self.size, self._next = int(state["books"]), size, int(state["next"])

    def save(self, path: Path) -> None:
        """Write the ring to one file, whole or not at all."""
        arrays, facts = self.state()
        text = json.dumps(facts, sort_keys=True)
        header = {"format": FORMAT, "facts": text, "sha256": _digest(arrays, text)}
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(arrays, temporary, metadata=header)
            sync(temporary)
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"{path}: the replay buffer cannot be written ({error}). Make room or mend the "
                "disk, then resume from the last checkpoint."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote; it is checked before anything here changes."""
        advice = "Resume from an earlier checkpoint, or start the run anew."
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                if header.get("format") != FORMAT:
                    raise StoreError(
                        f"{path}: not a replay buffer of this version (format "
                        f"{header.get('format')!r}, expected {FORMAT!r}). {advice}"
                    )
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path}: missing or damaged ({error}). {advice}") from error
        if _digest(arrays, header.get("facts", "")) != header.get("sha256"):
            raise StoreError(
                f"{path}: damaged: its content does not have the hash it states. {advice}"
            )
        try:
            self.restore(arrays, json.loads(header["facts"]))
        except StoreError as error:
            raise StoreError(f"{path}: {error}") from None

    @property
    def _usable(self) -> int:
        """Slots that the books fill evenly."""
        return self.capacity - self.capacity % self.books

    def _begin(self, books: int) -> None:
        if not 1 <= books <= self.capacity:
            raise ConfigError(
                f"expert.buffer_size = {self.capacity:,} cannot hold a step of {books:,} books "
                f"(train.books). Take at least {books:,}."
            )
        self.books = books

    def _at(self, slots: NDArray[np.int64]) -> Transitions:
        arrays, n_assets = self._arrays, self.n_assets
        ended = arrays["ended"].take(slots)

        def bits(name: str) -> Bools:
            packed = arrays[name].take(slots, axis=0)
            return np.unpackbits(packed, axis=-1, count=n_assets).view(np.bool_)

        return Transitions(
            row=arrays["row"].take(slots),
            weights=arrays["weights"].take(slots, axis=0),
            cash=arrays["cash"].take(slots),
            free=bits("free"),
            raw=arrays["raw"].take(slots, axis=0),
            raw_log_prob=arrays["raw_log_prob"].take(slots),
            reward=arrays["reward"].take(slots),
            terminated=(ended & _TERMINATED).astype(np.bool_),
            truncated=(ended & _TRUNCATED).astype(np.bool_),
            next_weights=arrays["next_weights"].take(slots, axis=0),
            next_cash=arrays["next_cash"].take(slots),
            next_free=bits("next_free"),
        )

    def _starts(self, n: int, length: int, chance: np.random.Generator) -> NDArray[np.int64]:
        """Positions by age (0: the oldest slot) at which a whole stretch begins."""
        if length < 1:
            raise ValueError(f"expected length ≥ 1, found {length}")
        possible = self.size - (length - 1) * self.books
        found = np.empty(0, dtype=np.int64)
        if possible > 0:
            # Most stretches are whole where episodes are long: draw, and draw again for the rest.
            for _ in range(_ROUNDS):
                drawn = chance.integers(0, possible, n)
                found = np.concatenate([found, drawn[self._whole(drawn, length)]])
                if len(found) >= n:
                    return found[:n]
            everything = np.arange(possible)
            whole = everything[self._whole(everything, length)]
            if len(whole):
                return chance.choice(whole, n)
        raise DataError(
            f"none of the {self.size:,} transitions in the replay buffer begins a stretch of "
            f"{length} within an episode. Take shorter sequences, longer episodes "
            "(train.episode_steps) or a larger expert.buffer_size."
        )

    def _whole(self, starts: NDArray[np.int64], length: int) -> Bools:
        """Whether a stretch of `length` from each position stays in one episode."""
        row, ended = self._arrays["row"], self._arrays["ended"]
        whole = np.ones(len(starts), dtype=np.bool_)
        for slots, after in zip(
            *(self._follow(starts, length).T[k:] for k in (0, 1)), strict=False
        ):
            whole &= (ended[slots] == 0) & (row[after] == row[slots] + 1)
        return whole

    def _follow(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Slots[n,L] of the stretches that begin at these ages."""
        oldest = self._next if self.size == self._usable else 0
        ages = starts[:, None] + np.arange(length) * self.books
        return (oldest + ages) % self._usable


def memory_available() -> int:
    """Bytes that can still be had, as far as the system tells."""
    known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in fields:
            known.append(int(fields["MemAvailable"].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and (limit := group.read_text().strip()).isdecimal():
        known.append(int(limit))
    return min(known)


def _require_memory(capacity: int, per_transition: int) -> None:
    """Refuse a ring that cannot fit: it fills slowly, and would be killed hours later."""
    available = memory_available()
    if capacity * per_transition > available:
        raise ConfigError(
            f"expert.buffer_size = {capacity:,} transitions of {per_transition} bytes need "
            f"{capacity * per_transition / 1e9:.1f} GB; {available / 1e9:.1f} GB are available. "
            f"At most {available // per_transition:,} fit: lower expert.buffer_size."
        )


def _require_finite(step: Transitions) -> None:
    for name in ("weights", "cash", "raw", "raw_log_prob", "reward", "next_weights", "next_cash"):
        if not np.isfinite(getattr(step, name)).all():
            raise DataError(
                f"a transition's {name} is not finite; in the replay buffer it would spoil every "
                "batch that draws it. Check prices and features around rows "
                f"{int(step.row.min())} to {int(step.row.max()) + 1}."
            )


def _digest(arrays: Mapping[str, NDArray[Any]], text: str) -> str:
    """SHA-256 of facts, names and contents."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(f"\0{name}\0".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
