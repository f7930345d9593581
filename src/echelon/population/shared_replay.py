"""Replay that the experts share: one ring each, drawn from together.

    expert      0        1     …    K−1
    slots    │ ring 0 │ ring 1 │ … │ ring K−1 │      of the same columns: one look-up serves a batch

Each expert writes its own ring (`agents.replay`), with the policy that acted. A batch is made of
stretches of one book within one episode: a set share from the expert's own latest steps, the rest
from everybody's, each start as likely as any other.

What is drawn must not depend on how experts are spread over processes, nor on which is ahead. So a
phase goes by what stood at its beginning:

1. the coordinator takes `marks = shared.snapshot()` and hands them, plain numbers, to the workers;
2. each worker lets its view stand there, `shared.refresh(marks)`, and either collects for its
   experts with `add` or draws with `batch`: nobody writes while others draw;
3. the coordinator takes over how far each ring was written, and the next phase begins.

With a `directory` the columns are files that every process maps; without one, all experts are in
one process. Mapped files may be ahead of the last checkpoint, so a run goes on from what `state`
gave it, copied back, never from them.

Axes: `K` experts, `E` books, `N` assets, `n` sequences, `L` steps of a sequence, time first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.agents.replay import (
    Behaviour,
    Columns,
    Replay,
    RingMark,
    SequenceDraw,
    Transitions,
    allocate,
    draw_sequences,
    read_behaviour,
    read_columns,
    replay_columns,
    ring_window,
)
from echelon.errors import StoreError

Marks = tuple[RingMark, ...]
"""How far each expert's ring was written: plain numbers, fit for JSON and other processes."""

SETTING = "experts.sharing.buffer_size"


class SharedBatch(NamedTuple):
    """Sequences[L,n,…] to learn from, time first; those of the expert's own fresh steps come first.

    source[n] int64: the expert that made the sequence; shared[n] bool: it is another one
    """

    transitions: Transitions
    behaviour: Behaviour
    source: NDArray[np.int64]
    shared: NDArray[np.bool_]


class News(NamedTuple):
    """What was written to a ring: its slots[n] and their columns[n,…], and how far it is now."""

    expert: int
    mark: RingMark
    slots: NDArray[np.int64]
    columns: Columns


class SharedReplay:
    def __init__(
        self, capacity: int, n_experts: int, n_assets: int, directory: Path | None = None
    ) -> None:
        """capacity: transitions in all (`experts.sharing.buffer_size`), an equal part for each.

        directory: of the mapped files; made where it is not there, opened where it is
        """
        each = capacity // n_experts
        assert each > 0, f"{SETTING} = {capacity:,} leaves none of {n_experts} experts a step"
        kinds = replay_columns(n_assets, behaviour=True)
        self.capacity, self.ring_capacity = each * n_experts, each
        self.n_experts = n_experts
        self.n_assets = n_assets
        self.directory = directory
        self._columns = allocate(kinds, self.capacity, SETTING, directory)
        self._plain = {name: self._columns[name] for name in replay_columns(n_assets)}
        self._rings = tuple(
            Replay(
                each,
                n_assets,
                behaviour=True,
                columns={n: v[k * each : (k + 1) * each] for n, v in self._columns.items()},
                setting=SETTING,
            )
            for k in range(n_experts)
        )

    def __len__(self) -> int:
        return sum(len(ring) for ring in self._rings)

    def add(self, expert: int, transitions: Transitions, behaviour: Behaviour) -> None:
        """Remember one step [E,…] of every book of an expert."""
        self._rings[expert].add(transitions, behaviour)

    def batch(
        self,
        expert: int,
        n_sequences: int,
        length: int,
        own_share: float,
        fresh_steps: int,
        rng: np.random.Generator,
    ) -> SharedBatch:
        """Sequences of one book within one episode, to learn from as `expert`.

        round(own_share · n) come from its own latest `fresh_steps` transitions, the rest from
        everybody's (own_share 1 and a fresh_steps as large as the ring: from all its own). Raises
        DataError where no sequence is long enough.
        """
        n_own, each = round(own_share * n_sequences), self.ring_capacity
        shares = []
        if n_own:
            mark = self._rings[expert].mark
            assert fresh_steps >= length * mark.books, "the fresh steps hold no sequence"
            skip = max(0, mark.size - fresh_steps)
            fresh = ring_window(mark, each, length, base=expert * each, skip=skip)
            shares.append(SequenceDraw((fresh,), n_own, _advice("fresh_steps")))
        if n_own < n_sequences:
            windows = tuple(
                ring_window(ring.mark, each, length, base=k * each)
                for k, ring in enumerate(self._rings)
            )
            shares.append(SequenceDraw(windows, n_sequences - n_own, _advice("buffer_size")))
        row, ended = self._columns["row"], self._columns["ended"]
        slots = draw_sequences(row, ended, shares, length, rng)
        transitions = read_columns(self._plain, slots)
        source = slots[0] // each
        behaviour = read_behaviour(self._columns, slots)
        return SharedBatch(transitions, behaviour, source, source != expert)

    def snapshot(self) -> Marks:
        """How far each ring is written now."""
        return tuple(ring.mark for ring in self._rings)

    def refresh(self, marks: Marks, keep: Collection[int] = ()) -> None:
        """Let the rings stand at the marks that other processes reached, but those in `keep`."""
        if len(marks) != self.n_experts:
            raise ValueError(f"expected the marks of {self.n_experts} experts, found {len(marks)}")
        for k, (ring, mark) in enumerate(zip(self._rings, marks, strict=True)):
            if k in keep or mark == ring.mark:
                continue
            usable = mark.usable(self.ring_capacity)
            if not (0 <= mark.size <= usable and 0 <= mark.next < max(usable, 1)):
                raise ValueError(f"no ring of {self.ring_capacity} slots can stand at {mark}")
            if self.directory is None:
                raise ValueError(
                    f"ring {k} stands at {ring.mark}, not at {mark}, and what another process "
                    "writes cannot be seen here: give the replay a directory"
                )
            ring.mark = mark

    def news(self, expert: int, before: RingMark, written: int) -> News:
        """The latest `written` transitions of a ring, which stood at `before`."""
        ring = self._rings[expert]
        usable = ring.mark.usable(self.ring_capacity)
        slots = (before.next + np.arange(min(written, usable))) % usable
        if written > usable:
            slots = np.arange(usable)
        return News(expert, ring.mark, slots, {n: v[slots] for n, v in ring.columns.items()})

    def take_news(self, news: Iterable[News]) -> None:
        """Write what was written elsewhere; a second time changes nothing."""
        for own in news:
            ring = self._rings[own.expert]
            for name, values in own.columns.items():
                ring.columns[name][own.slots] = values
            ring.mark = own.mark

    def state(self) -> tuple[Columns, dict[str, Any]]:
        """(arrays, JSON) from which `restore` goes on bit for bit. The arrays are views."""
        states = [ring.state() for ring in self._rings]
        arrays = {f"{k}.{n}": v for k, (own, _) in enumerate(states) for n, v in own.items()}
        return arrays, {"n_experts": self.n_experts, "rings": [facts for _, facts in states]}

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        if state["n_experts"] != self.n_experts:
            raise StoreError(
                f"the saved replay has rings of {state['n_experts']} experts, this one of "
                f"{self.n_experts}. Resume with the experts.n_experts it was made with."
            )
        parts = [
            {name.removeprefix(own): v for name, v in arrays.items() if name.startswith(own)}
            for own in (f"{k}." for k in range(self.n_experts))
        ]
        saved = list(zip(self._rings, parts, state["rings"], strict=True))
        for ring, part, facts in saved:
            ring.accept(part, facts)
        for ring, part, facts in saved:
            ring.restore(part, facts)

    def close(self) -> None:
        """Remove the mapped files, if there are any: checkpoints have what they hold."""
        if self.directory is None:
            return
        for name in self._columns:
            (self.directory / f"{name}.bin").unlink(missing_ok=True)
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()


def _advice(key: str) -> str:
    return (
        "Collect more before the first update (expert.learning_starts), take shorter sequences "
        "(experts.sharing.sequence_steps), longer episodes (train.episode_steps) or a larger "
        f"experts.sharing.{key}."
    )
