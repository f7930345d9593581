"""The replay buffer: what comes out is what went in, in one piece, or an error that says why."""

from __future__ import annotations

import json
import shutil
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from memories import (
    E,
    N,
    Walk,
    assert_same,
    behaviour_of,
    numbers,
    sequence_slots,
    sequences,
    slow_sequences,
)

from echelon.agents import replay as module
from echelon.agents.replay import Replay, Transitions, read_behaviour, read_columns
from echelon.errors import ConfigError, DataError, StoreError


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


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def everything(replay: Replay) -> Transitions:
    return read_columns(replay.columns, np.arange(len(replay)))


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
        assert_same(one, held[int(one.reward / 2)])
        assert drawn.next_row[k] == one.row + 1


def test_every_transition_is_as_likely_as_any_other() -> None:
    replay, _ = fill(capacity=30, steps=25)
    drawn = numbers(replay.sample(60_000, np.random.default_rng(0)))
    counts = np.bincount(drawn - drawn.min(), minlength=30)
    assert len(counts) == 30
    assert np.abs(counts / 2000 - 1).max() < 5 / np.sqrt(2000)


def test_same_chance_draws_the_same() -> None:
    replay, _ = fill(capacity=60, steps=30, ends=0.1)
    for draw in (replay.sample, lambda n, rng: sequences(replay, n, 4, rng)):
        one, again, another = (draw(20, np.random.default_rng(seed)) for seed in (5, 5, 6))
        assert_same(one, again)
        assert not np.array_equal(one.reward, another.reward)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("steps", [6, 20, 33])
@pytest.mark.parametrize("ends", [0.0, 0.15, 0.6])
def test_sequences_are_all_those_within_an_episode_and_no_others(
    ends: float, steps: int, length: int
) -> None:
    replay, books = fill(capacity=62, steps=steps, ends=ends)
    wanted = slow_sequences(books, length)
    if not wanted:
        with pytest.raises(DataError, match=r"begins a sequence of 5 .*some advice"):
            sequences(replay, 1, length, np.random.default_rng(0))
        return
    drawn = sequences(replay, 4000, length, np.random.default_rng(0))
    assert drawn.weights.shape == (4000, length, N)
    assert {tuple(row) for row in numbers(drawn).tolist()} == wanted
    np.testing.assert_array_equal(drawn.row[:, 1:], drawn.next_row[:, :-1])


def test_sequences_are_equally_likely_even_where_few_are_whole() -> None:
    replay, books = fill(capacity=600, steps=200, ends=0.75)
    wanted = slow_sequences(books, 5)
    assert 1 <= len(wanted) <= 10  # so rare that drawing again and again gives up
    drawn = numbers(sequences(replay, 5000, 5, np.random.default_rng(0)))
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
    drawn = numbers(sequences(replay, 500, 3, np.random.default_rng(0))) // E
    assert {tuple(row) for row in drawn.tolist()} == {(0, 1, 2), (3, 4, 5)}


def test_end_breaks_a_sequence_even_where_the_next_episode_begins_at_the_next_row() -> None:
    replay, walk = Replay(100, N), Walk()
    for k in range(6):
        cut = np.full(E, k == 2)
        step = walk.step()
        replay.add(step._replace(truncated=cut))
    drawn = numbers(sequences(replay, 500, 3, np.random.default_rng(0))) // E
    assert {tuple(row) for row in drawn.tolist()} == {(0, 1, 2), (3, 4, 5)}


# --- size -------------------------------------------------------------------------------------


def test_transition_takes_a_fiftieth_of_two_windows_or_less() -> None:
    replay = Replay(1000, 16)
    held = sum(array.nbytes for array in replay.columns.values())
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
        sequences(Replay(10, N), 1, 2, np.random.default_rng(0))


# --- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 4, 33])
def test_restored_buffer_goes_on_as_the_other_one(steps: int) -> None:
    replay, _ = fill(capacity=31, steps=steps, ends=0.2)
    other, _ = fill(capacity=31, steps=2)
    other.restore(*replay.state())
    assert_same(everything(other), everything(replay))
    walks = Walk(seed=3), Walk(seed=3)
    for _ in range(5):
        replay.add(walks[0].step())
        other.add(walks[1].step())
    assert_same(everything(other), everything(replay))
    drawn = [sequences(r, 9, 2, np.random.default_rng(1)) for r in (replay, other)]
    assert_same(*drawn)


def test_state_and_restore_carry_everything() -> None:
    replay, _ = fill(capacity=31, steps=33, ends=0.2)
    arrays, facts = replay.state()
    other = Replay(31, N)
    other.restore({name: values.copy() for name, values in arrays.items()}, facts)
    assert_same(everything(other), everything(replay))
    assert other.state()[1] == facts == json.loads(json.dumps(facts))


def test_state_of_another_size_is_refused_with_the_setting_and_changes_nothing() -> None:
    saved = fill(capacity=31, steps=12).replay.state()
    other = Replay(60, N)
    with pytest.raises(StoreError, match=r"capacity = 31, .* expert\.buffer_size it was made"):
        other.restore(*saved)
    assert len(other) == 0
    with pytest.raises(StoreError, match=r"n_assets = 11, this one 12"):
        Replay(31, 12).restore(*saved)


def test_buffer_without_behaviour_is_drawn_as_it_always_was() -> None:
    # Numbers of the version before rings could keep behaviour: earlier runs can be gone on from.
    replay, _ = fill(capacity=31, steps=33, ends=0.2)
    assert numbers(replay.sample(8, np.random.default_rng(0))).tolist() == [
        85,
        79,
        75,
        98,
        69,
        91,
        92,
        90,
    ]


# --- behaviour, and files that are mapped -----------------------------------------------------


def with_behaviour(steps: int, directory: Path | None = None) -> Replay:
    replay, walk = Replay(31, N, behaviour=True, directory=directory), Walk()
    for k in range(steps):
        step = walk.step(0.2)
        replay.add(step, behaviour_of(step, skill=k))
    return replay


def test_behaviour_comes_back_beside_the_transition_it_made() -> None:
    replay, plain = with_behaviour(33), fill(capacity=31, steps=33, ends=0.2).replay
    for slots in (rng().integers(0, len(replay), 50), sequence_slots(replay, 50, 3, rng())):
        behaviour = read_behaviour(replay.columns, slots)
        alone = read_columns(plain.columns, slots)
        assert_same(read_columns(replay.columns, slots), alone)
        number = alone.reward / 2
        np.testing.assert_array_equal(behaviour.version, number // E)
        np.testing.assert_array_equal(behaviour.skill, number // E)
        np.testing.assert_array_equal(behaviour.bar_return, number / np.float32(1000))
        np.testing.assert_array_equal(behaviour.mean, alone.raw + np.float32(0.25))
        np.testing.assert_array_equal(behaviour.log_std, -alone.weights / np.float32(1000))
        assert [part.dtype for part in behaviour] == ["f4", "f4", "i4", "i4", "f4"]
    assert_same(replay.sample(50, rng()), plain.sample(50, rng()))


def test_behaviour_is_wanted_where_it_is_kept_and_only_there() -> None:
    step = Walk().step()
    with pytest.raises(ValueError, match="expected a behaviour: True"):
        Replay(31, N, behaviour=True).add(step)
    with pytest.raises(ValueError, match="expected a behaviour: False"):
        Replay(31, N).add(step, behaviour_of(step))


def test_behaviour_that_is_no_number_is_refused_and_leaves_nothing() -> None:
    replay, step = with_behaviour(2), Walk().step()
    for name in ("mean", "log_std", "bar_return"):
        spoilt = getattr(behaviour_of(step), name).copy()
        spoilt[1] = np.inf
        with pytest.raises(DataError, match=f"a transition's {name} is not finite"):
            replay.add(step, behaviour_of(step)._replace(**{name: spoilt}))
    assert len(replay) == 6


def test_state_that_keeps_other_columns_is_refused() -> None:
    with pytest.raises(StoreError, match="do not keep the same"):
        Replay(31, N).restore(*with_behaviour(12).state())
    with pytest.raises(StoreError, match="do not keep the same"):
        Replay(31, N, behaviour=True).restore(*fill(capacity=31, steps=12).replay.state())


def test_mapped_buffer_is_the_one_in_memory_and_others_can_read_it(tmp_path: Path) -> None:
    mapped, memory = with_behaviour(33, tmp_path / "ring"), with_behaviour(33)
    files = {path.name for path in (tmp_path / "ring").iterdir()}
    assert files == {f"{name}.bin" for name in module.replay_columns(N, behaviour=True)}
    other = Replay(31, N, behaviour=True, directory=tmp_path / "ring")
    assert len(other) == 0  # what files hold is nothing before somebody vouches for it
    other.mark = mapped.mark
    for replay in (mapped, other):
        slots = sequence_slots(replay, 40, 3, rng())
        np.testing.assert_array_equal(slots, sequence_slots(memory, 40, 3, rng()))
        for read in (read_columns, read_behaviour):
            assert_same(read(replay.columns, slots), read(memory.columns, slots))


def test_mapped_file_of_another_size_is_refused_and_left_alone(tmp_path: Path) -> None:
    Replay(31, N, directory=tmp_path)
    sizes = {path: path.stat().st_size for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=r"row\.bin: 124 bytes, expected 128: .* Remove the dir"):
        Replay(32, N, directory=tmp_path)
    assert {path: path.stat().st_size for path in tmp_path.iterdir()} == sizes


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/ring: the replay buffer's files cannot be made"):
        Replay(31, N, directory=tmp_path / "file" / "ring")


def test_mapped_buffer_larger_than_the_disk_is_refused_before_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"expert\.buffer_size = 1,000,000 .* GB on disk are"):
        Replay(1_000_000, 16, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(Replay(1000, 16, directory=tmp_path)) == 0
