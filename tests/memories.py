"""Transitions whose numbers tell which ones they are, and the slow twin of drawing them.

Free of torch, so that a process started for a test has little to import.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.agents.replay import (
    Behaviour,
    Replay,
    SequenceDraw,
    Transitions,
    draw_sequences,
    read_columns,
    ring_window,
)
from echelon.population.shared_replay import Marks, SharedBatch, SharedReplay

N, E, K = 11, 3, 3
PART = 10_000
"""Transitions of expert k are numbered from k · PART on."""


class Walk:
    """Books that walk through rows; every number of a transition tells which one it is."""

    def __init__(self, books: int = E, n_assets: int = N, seed: int = 0, first: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.row = self.rng.integers(0, 1000, books).astype(np.int32)
        self.n_assets = n_assets
        self.count = first

    def step(self, ends: float = 0.0) -> Transitions:
        books, n_assets = len(self.row), self.n_assets
        number = np.arange(self.count, self.count + books, dtype=np.float32)
        self.count += books
        each = number[:, None] + np.arange(n_assets, dtype=np.float32) / 100
        ended = self.rng.random(books) < ends
        terminated = ended & (self.rng.random(books) < 0.5)
        step = Transitions(
            row=self.row,
            weights=each,
            cash=number + 0.5,
            free=self.rng.random((books, n_assets)) < 0.5,
            raw=-each,
            raw_log_prob=-number,
            reward=number * 2,
            terminated=terminated,
            truncated=ended & ~terminated,
            next_weights=each + 1,
            next_cash=number + 1.5,
            next_free=self.rng.random((books, n_assets)) < 0.5,
        )
        anew = self.rng.integers(0, 1000, books)
        self.row = np.where(ended, anew, self.row + 1).astype(np.int32)
        return step


def behaviour_of(step: Transitions, skill: int = 0) -> Behaviour:
    """A policy for each transition, as different as they are."""
    number = step.reward / 2
    return Behaviour(
        mean=step.raw + np.float32(0.25),
        log_std=-step.weights / np.float32(1000),
        version=(number // len(number)).astype(np.int32),
        skill=np.full(len(number), skill, dtype=np.int32),
        bar_return=number / np.float32(1000),
    )


def numbers(drawn: Transitions) -> np.ndarray[Any, Any]:
    """Which transitions were drawn."""
    return (drawn.reward / 2).astype(np.int64)


def assert_same(found: Any, wanted: Any) -> None:
    """Two of the same NamedTuple hold the same, bit for bit."""
    assert type(found) is type(wanted)
    for name, left, right in zip(wanted._fields, found, wanted, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)
        assert np.asarray(left).dtype == np.asarray(right).dtype, name


def slow_sequences(books: Iterable[Iterable[Transitions]], length: int) -> set[tuple[int, ...]]:
    """Every stretch within an episode, by looking at all of them."""
    found = set()
    for book in books:
        line = list(book)
        for first in range(len(line) - length + 1):
            part = line[first : first + length]
            if not any(t.terminated or t.truncated for t in part[:-1]):
                found.add(tuple(int(t.reward / 2) for t in part))
    return found


class Crew:
    """K experts that walk and write, and by the side what their rings should hold."""

    def __init__(self, each: int = 62, directory: Path | None = None) -> None:
        self.shared = SharedReplay(each * K + 1, K, N, directory)
        self.walks = [Walk(seed=k, first=k * PART) for k in range(K)]
        self.held: list[list[deque[Transitions]]] = [
            [deque(maxlen=each // E) for _ in range(E)] for _ in range(K)
        ]

    def collect(self, expert: int, steps: int, ends: float = 0.1) -> None:
        for _ in range(steps):
            step = self.walks[expert].step(ends)
            self.shared.add(expert, step, behaviour_of(step, skill=expert))
            for e in range(E):
                self.held[expert][e].append(Transitions(*(part[e] for part in step)))

    def stretches(self, expert: int, length: int) -> set[tuple[int, ...]]:
        return slow_sequences(self.held[expert], length)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def parts(batch: SharedBatch) -> list[np.ndarray[Any, Any]]:
    return [*batch.transitions, *batch.behaviour, batch.source, batch.shared]


def draw_in_a_process(directory: Path, expert: int, marks: Marks, results: Any) -> None:
    """A worker's phase of learning: stand at the marks, and draw."""
    made = Crew(directory=directory)
    made.shared.refresh(marks)
    results.put((expert, parts(made.shared.batch(expert, 25, 3, 0.5, 30, rng(expert)))))


def collect_in_a_process(directory: Path, expert: int, marks: Marks, results: Any) -> None:
    """A worker's phase of collecting: stand at the marks, collect, tell how far it came."""
    made = Crew(directory=directory)
    made.shared.refresh(marks)
    made.walks[expert] = Walk(seed=50 + expert, first=expert * PART + 5000)
    made.collect(expert, 5)
    results.put((expert, made.shared.snapshot()[expert]))


def sequence_slots(
    replay: Replay, n: int, length: int, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Slots[n,L] of sequences drawn from the whole of one ring."""
    share = SequenceDraw([ring_window(replay.mark, replay.capacity, length)], n, "some advice")
    row, ended = replay.columns["row"], replay.columns["ended"]
    return np.ascontiguousarray(draw_sequences(row, ended, [share], length, rng).T)


def sequences(replay: Replay, n: int, length: int, rng: np.random.Generator) -> Transitions:
    """Sequences[n,L,…] drawn from the whole of one ring."""
    return read_columns(replay.columns, sequence_slots(replay, n, length, rng))
