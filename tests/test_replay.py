"""The replay buffer: what comes out is what went in, in one piece, or an error that says why."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from echelon.agents import replay as module
from echelon.agents.replay import Replay, Transitions
from echelon.errors import ConfigError, DataError, StoreError

N, E = 11, 3


class Walk:
    """Books that walk through rows; every number of a transition tells which one it is."""

    def __init__(self, books: int = E, n_assets: int = N, seed: int = 0) -> None:
        self.chance = np.random.default_rng(seed)
        self.row = self.chance.integers(0, 1000, books).astype(np.int32)
        self.n_assets = n_assets
        self.count = 0

    def step(self, ends: float = 0.0) -> Transitions:
        books, n_assets = len(self.row), self.n_assets
        number = np.arange(self.count, self.count + books, dtype=np.float32)
        self.count += books
        each = number[:, None] + np.arange(n_assets, dtype=np.float32) / 100
        ended = self.chance.random(books) < ends
        terminated = ended & (self.chance.random(books) < 0.5)
        step = Transitions(
            row=self.row,
            weights=each,
            cash=number + 0.5,
            free=self.chance.random((books, n_assets)) < 0.5,
            raw=-each,
            raw_log_prob=-number,
            reward=number * 2,
            terminated=terminated,
            truncated=ended & ~terminated,
            next_weights=each + 1,
            next_cash=number + 1.5,
            next_free=self.chance.random((books, n_assets)) < 0.5,
        )
        anew = self.chance.integers(0, 1000, books)
        self.row = np.where(ended, anew, self.row + 1).astype(np.int32)
        return step


class Filled(NamedTuple):
    """A ring, and the transitions it should hold: those of each book, the oldest first."""

    replay: Replay
    books: list[deque[Transitions]]


def fill(capacity: int, steps: int, ends: float = 0.0, books: int = E) -> Filled:
    replay, walk = Replay(capacity, N), Walk(books)
    held: list[deque[Transitions]] = [deque(maxlen=capacity // books) for _ in range(books)]
    for _ in range(steps):
        step = walk.step(ends)
        replay.add(step)
        for e in range(books):
            held[e].append(Transitions(*(part[e] for part in step)))
    return Filled(replay, held)


def numbers(drawn: Transitions) -> np.ndarray[Any, Any]:
    """Which transitions were drawn."""
    return (drawn.reward / 2).astype(np.int64)


def same(found: Transitions, wanted: Transitions) -> None:
    for name, left, right in zip(Transitions._fields, found, wanted, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)
        assert np.asarray(left).dtype == np.asarray(right).dtype, name


def everything(replay: Replay) -> Transitions:
    return replay._at(np.arange(replay.size))


# --- drawing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 7, 10, 11, 64])
def test_sample_gives_what_was_added_and_not_yet_overwritten(steps: int) -> None:
    replay, books = fill(capacity=31, steps=steps, ends=0.2)
    held = {int(t.reward / 2): t for book in books for t in book}
    assert len(replay) == len(held) == min(steps * E, 30)  # 31 slots, of which 3 books fill 30
    drawn = replay.sample(2000, np.random.default_rng(1))
    assert set(numbers(drawn).tolist()) == held.keys()
    for k in range(0, 2000, 50):
        one = Transitions(*(part[k] for part in drawn))
        same(one, held[int(one.reward / 2)])
        assert drawn.next_row[k] == one.row + 1


def test_every_transition_is_as_likely_as_any_other() -> None:
    replay, _ = fill(capacity=30, steps=25)
    drawn = numbers(replay.sample(60_000, np.random.default_rng(0)))
    counts = np.bincount(drawn - drawn.min(), minlength=30)
    assert len(counts) == 30
    assert np.abs(counts / 2000 - 1).max() < 5 / np.sqrt(2000)


def test_same_chance_draws_the_same() -> None:
    replay, _ = fill(capacity=60, steps=30, ends=0.1)
    for draw in (replay.sample, lambda n, chance: replay.sequences(n, 4, chance)):
        same(draw(20, np.random.default_rng(5)), draw(20, np.random.default_rng(5)))


def slow_sequences(books: list[deque[Transitions]], length: int) -> set[tuple[int, ...]]:
    """Every stretch within an episode, by looking at all of them."""
    found = set()
    for book in books:
        line = list(book)
        for first in range(len(line) - length + 1):
            part = line[first : first + length]
            if not any(t.terminated or t.truncated for t in part[:-1]):
                found.add(tuple(int(t.reward / 2) for t in part))
    return found


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("steps", [6, 20, 33])
@pytest.mark.parametrize("ends", [0.0, 0.15, 0.6])
def test_sequences_are_all_those_within_an_episode_and_no_others(
    ends: float, steps: int, length: int
) -> None:
    replay, books = fill(capacity=62, steps=steps, ends=ends)
    wanted = slow_sequences(books, length)
    if not wanted:
        with pytest.raises(DataError, match=r"begins a stretch of 5 .*expert\.buffer_size"):
            replay.sequences(1, length, np.random.default_rng(0))
        return
    drawn = replay.sequences(4000, length, np.random.default_rng(0))
    assert drawn.weights.shape == (4000, length, N)
    assert {tuple(row) for row in numbers(drawn).tolist()} == wanted
    np.testing.assert_array_equal(drawn.row[:, 1:], drawn.next_row[:, :-1])


def test_sequences_are_equally_likely_even_where_few_are_whole() -> None:
    replay, books = fill(capacity=600, steps=200, ends=0.75)
    wanted = slow_sequences(books, 5)
    assert 1 <= len(wanted) <= 10  # so rare that drawing again and again gives up
    drawn = numbers(replay.sequences(5000, 5, np.random.default_rng(0)))
    stretches, counts = np.unique(drawn, axis=0, return_counts=True)
    assert {tuple(row) for row in stretches.tolist()} == wanted
    expected = 5000 / len(wanted)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_new_beginning_without_a_flag_breaks_a_sequence_too() -> None:
    replay, walk = Replay(100, N), Walk()
    for k in range(6):
        if k == 3:
            walk.row = walk.row + np.int32(50)
        replay.add(walk.step())
    drawn = numbers(replay.sequences(500, 3, np.random.default_rng(0))) // E
    assert {tuple(row) for row in drawn.tolist()} == {(0, 1, 2), (3, 4, 5)}


# --- size -------------------------------------------------------------------------------------


def test_transition_takes_a_fiftieth_of_two_windows_or_less() -> None:
    replay = Replay(1000, 16)
    held = sum(array.nbytes for array in replay._arrays.values())
    assert held == 1000 * replay.bytes_per_transition
    windows = 2 * 20 * 16 * 30 * 4
    assert windows / replay.bytes_per_transition >= 50
    assert replay.bytes_per_transition == 217


def test_buffer_larger_than_memory_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_available", lambda: 1_000_000)
    with pytest.raises(ConfigError, match=r"expert\.buffer_size = 1,000,000 .* 0\.2 GB; 0\.0 GB"):
        Replay(1_000_000, 16)
    assert len(Replay(1_000_000 // 217, 16)) == 0


def test_memory_available_is_some_of_the_machines() -> None:
    assert 2**20 < module.memory_available() < 2**50


def test_buffer_smaller_than_a_step_of_all_books_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert\.buffer_size = 2 .* 3 books \(train\.books\)"):
        Replay(2, N).add(Walk().step())


def test_step_of_another_number_of_books_is_refused() -> None:
    replay, _ = fill(capacity=30, steps=1)
    with pytest.raises(ValueError, match="expected a step of 3 books, found one of 4"):
        replay.add(Walk(4).step())


def test_transition_that_is_no_number_is_refused_and_leaves_nothing() -> None:
    replay, _ = fill(capacity=30, steps=2)
    step = Walk().step()
    for name in ("reward", "weights", "next_cash"):
        spoilt = getattr(step, name).copy()
        spoilt[1] = np.nan
        with pytest.raises(DataError, match=f"a transition's {name} is not finite"):
            replay.add(step._replace(**{name: spoilt}))
    assert len(replay) == 6


def test_empty_buffer_draws_nothing() -> None:
    with pytest.raises(ValueError, match="empty replay buffer"):
        Replay(10, N).sample(1, np.random.default_rng(0))
    with pytest.raises(DataError, match="none of the 0 transitions"):
        Replay(10, N).sequences(1, 2, np.random.default_rng(0))


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 4, 33])
def test_loaded_buffer_goes_on_as_the_saved_one(tmp_path: Path, steps: int) -> None:
    replay, _ = fill(capacity=31, steps=steps, ends=0.2)
    replay.save(tmp_path / "below" / "replay.safetensors")
    other, _ = fill(capacity=31, steps=2)
    other.load(tmp_path / "below" / "replay.safetensors")
    same(everything(other), everything(replay))
    walks = Walk(seed=3), Walk(seed=3)
    for _ in range(5):
        replay.add(walks[0].step())
        other.add(walks[1].step())
    same(everything(other), everything(replay))
    drawn = [r.sequences(9, 2, np.random.default_rng(1)) for r in (replay, other)]
    same(*drawn)
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["replay.safetensors"]


def test_state_and_restore_carry_everything() -> None:
    replay, _ = fill(capacity=31, steps=33, ends=0.2)
    arrays, facts = replay.state()
    other = Replay(31, N)
    other.restore({name: values.copy() for name, values in arrays.items()}, facts)
    same(everything(other), everything(replay))
    assert other.state()[1] == facts == json.loads(json.dumps(facts))


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped bit":
        data[-7] ^= 1
    elif how == "cut short":
        del data[-100:]
    elif how == "empty":
        data.clear()
    elif how == "noise":
        data[:] = np.random.default_rng(0).bytes(len(data))
    elif how == "missing":
        path.unlink()
        return
    path.write_bytes(data)


def rewritten(path: Path, **facts: int) -> None:
    """Another position of the ring, the hash left as it was."""
    with safe_open(path, framework="numpy") as file:
        header = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header["facts"] = json.dumps(json.loads(header["facts"]) | facts, sort_keys=True)
    save_file(arrays, path, metadata=header)


@pytest.mark.parametrize(
    "how", ["flipped bit", "cut short", "empty", "noise", "missing", "foreign", "moved"]
)
def test_damaged_file_is_refused_and_changes_nothing(tmp_path: Path, how: str) -> None:
    path = tmp_path / "replay.safetensors"
    fill(capacity=31, steps=12, ends=0.2).replay.save(path)
    if how == "foreign":
        save_file({"weight": np.zeros(3, dtype=np.float32)}, path)
    elif how == "moved":
        rewritten(path, next=9)
    else:
        damaged(path, how)
    replay, _ = fill(capacity=31, steps=5)
    before, facts = everything(replay), replay.state()[1]
    with pytest.raises(StoreError) as caught:
        replay.load(path)
    assert str(path) in str(caught.value)
    assert "Resume from an earlier checkpoint, or start the run anew." in str(caught.value)
    same(everything(replay), before)
    assert replay.state()[1] == facts


def test_file_of_another_size_is_refused_with_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "replay.safetensors"
    fill(capacity=31, steps=12).replay.save(path)
    with pytest.raises(StoreError, match=r"capacity = 31, .* expert\.buffer_size it was made") as e:
        Replay(60, N).load(path)
    assert str(path) in str(e.value)
    with pytest.raises(StoreError, match=r"n_assets = 11, this one 12"):
        Replay(31, 12).load(path)


def test_save_that_fails_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "replay.safetensors"
    first, _ = fill(capacity=31, steps=3)
    first.save(path)

    def full(arrays: object, target: Path, metadata: object = None) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(StoreError, match=r"replay\.safetensors: .*No space left .* Make room"):
        fill(capacity=31, steps=9).replay.save(path)
    monkeypatch.undo()
    assert [item.name for item in tmp_path.iterdir()] == ["replay.safetensors"]
    other = Replay(31, N)
    other.load(path)
    same(everything(other), everything(first))
