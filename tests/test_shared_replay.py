"""Shared replay: whose data a batch holds, and that it is the same in any process."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memories import (
    PART,
    Crew,
    E,
    K,
    N,
    Walk,
    collect_in_a_process,
    draw_in_a_process,
    numbers,
    parts,
    rng,
)

from echelon.agents import replay as replay_module
from echelon.agents.replay import Replay
from echelon.errors import ConfigError, DataError, StoreError
from echelon.ops.returns import retrace
from echelon.ops.squashed import by_source, too_far
from echelon.population.shared_replay import Marks, SharedBatch, SharedReplay


def crew(*steps: int, ends: float = 0.1, each: int = 62, directory: Path | None = None) -> Crew:
    """Experts after so many steps each."""
    made = Crew(each, directory)
    for k, count in enumerate(steps):
        made.collect(k, count, ends)
    return made


def drawn(batch: SharedBatch, which: slice = slice(None)) -> set[tuple[int, ...]]:
    """The stretches of a batch, by the numbers of their transitions."""
    return {tuple(line) for line in numbers(batch.transitions).T[which].tolist()}


def assert_same(found: SharedBatch, wanted: SharedBatch) -> None:
    for left, right in zip(parts(found), parts(wanted), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


def assert_same_state(found: SharedReplay, wanted: SharedReplay) -> None:
    (left, facts), (right, other) = found.state(), wanted.state()
    assert facts == other == json.loads(json.dumps(facts))
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


# --- what is drawn ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("steps", [(6, 9, 7), (20, 21, 6), (33, 64, 50)])
@pytest.mark.parametrize("ends", [0.0, 0.15])
def test_batch_holds_all_stretches_within_episodes_and_no_others(
    ends: float, steps: tuple[int, ...], length: int
) -> None:
    made = crew(*steps, ends=ends)
    batch = made.shared.batch(1, 6000, length, 0.0, 1000, rng())
    assert drawn(batch) == set.union(*(made.stretches(k, length) for k in range(K)))
    np.testing.assert_array_equal(batch.transitions.row[1:], batch.transitions.next_row[:-1])


@pytest.mark.parametrize("fresh_steps", [15, 16, 30, 1000])
def test_own_share_is_drawn_from_the_latest_own_steps_alone(fresh_steps: int) -> None:
    made = crew(20, 33, 20)
    batch = made.shared.batch(1, 3000, 3, 0.5, fresh_steps, rng())
    first = PART + 33 * E - fresh_steps
    fresh = {line for line in made.stretches(1, 3) if min(line) >= first}
    assert drawn(batch, slice(1500)) == fresh
    assert (batch.source[:1500] == 1).all()
    assert drawn(batch, slice(1500, None)) > fresh


def test_every_number_comes_back_where_it_belongs() -> None:
    made = crew(33, 40, 12)
    batch = made.shared.batch(2, 40, 5, 0.4, 30, rng())
    held = {int(t.reward / 2): t for ring in made.held for book in ring for t in book}
    for step in range(5):
        for i in range(40):
            number = int(numbers(batch.transitions)[step, i])
            for name, values in batch.transitions._asdict().items():
                np.testing.assert_array_equal(values[step, i], getattr(held[number], name))
            assert batch.source[i] == batch.behaviour.skill[step, i] == number // PART
    np.testing.assert_array_equal(batch.behaviour.mean, batch.transitions.raw + np.float32(0.25))
    np.testing.assert_array_equal(batch.shared, batch.source != 2)


def test_shares_are_as_asked_and_the_rest_by_size() -> None:
    made = crew(5, 10, 20, ends=0.0)
    batch = made.shared.batch(0, 40_000, 1, 0.25, 1000, rng())
    assert (batch.source[:10_000] == 0).all()
    counts = np.bincount(batch.source[10_000:], minlength=K)
    expected = 30_000 * np.array([5, 10, 20]) / 35
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    for n, own_share, own in ((25, 0.5, 12), (25, 1.0, 25), (7, 0.9, 6)):
        batch = made.shared.batch(0, n, 2, own_share, 1000, rng())
        assert len(batch.source) == n
        assert (batch.source[:own] == 0).all()


def test_stretches_are_equally_likely_even_where_few_are_whole() -> None:
    made = crew(200, 200, 200, ends=0.75, each=600)
    wanted = set.union(*(made.stretches(k, 5) for k in range(K)))
    assert 2 <= len(wanted) <= 20  # so rare that drawing again and again gives up
    batch = made.shared.batch(0, 5000, 5, 0.0, 1000, rng())
    found, counts = np.unique(numbers(batch.transitions).T, axis=0, return_counts=True)
    assert {tuple(line) for line in found.tolist()} == wanted
    assert np.abs(counts - 5000 / len(wanted)).max() < 5 * np.sqrt(5000 / len(wanted))


def test_alone_an_expert_learns_from_its_own() -> None:
    made = crew(0, 12)
    batch = made.shared.batch(1, 50, 2, 0.5, 1000, rng())
    assert not batch.shared.any()
    assert drawn(batch) <= made.stretches(1, 2)


def test_nothing_to_draw_is_said_with_what_to_do() -> None:
    made = crew(0, 12, 2)
    with pytest.raises(DataError, match=r"none of the 0 .* of 2 .*experts\.sharing\.fresh_steps"):
        made.shared.batch(0, 4, 2, 0.5, 1000, rng())
    with pytest.raises(DataError, match=r"none of the 6 .* of 5 .*expert\.learning_starts"):
        made.shared.batch(2, 4, 5, 0.5, 1000, rng())
    with pytest.raises(DataError, match=r"none of the 42 .*experts\.sharing\.buffer_size"):
        made.shared.batch(2, 4, 19, 0.0, 1000, rng())


def test_batch_goes_straight_into_the_operators() -> None:
    batch = crew(20, 20, 20).shared.batch(0, 25, 5, 0.5, 1000, rng())
    source, shared = torch.from_numpy(batch.source), torch.from_numpy(batch.shared)
    reward, truncated = (
        torch.from_numpy(part) for part in (batch.transitions.reward, batch.transitions.truncated)
    )
    dropped = too_far(torch.full((5, 25), 2.0), shared, 1.0)
    found = by_source(source, torch.ones(5, 25), dropped, K)
    assert int(found.steps.sum()) == 125
    torch.testing.assert_close(found.dropped_share, torch.tensor([0.0, 1, 1]).double())
    zero = torch.zeros(5, 25)
    torch.testing.assert_close(retrace(reward, zero, zero, zero, zero, truncated=truncated), reward)


# --- phases -----------------------------------------------------------------------------------


def test_same_chance_draws_the_same() -> None:
    batches = [crew(33, 64, 50).shared.batch(1, 25, 5, 0.5, 30, rng(seed)) for seed in (3, 3, 4)]
    assert_same(batches[0], batches[1])
    assert drawn(batches[0]) != drawn(batches[2])


# --- processes --------------------------------------------------------------------------------


def test_processes_draw_what_one_process_draws(tmp_path: Path) -> None:
    alone, mapped = crew(33, 64, 50), crew(33, 64, 50, directory=tmp_path)
    marks = mapped.shared.snapshot()
    assert marks == alone.shared.snapshot()
    drawn = in_processes(draw_in_a_process, tmp_path, marks)
    written = in_processes(collect_in_a_process, tmp_path, marks)
    for k in (0, 1):
        batch = alone.shared.batch(k, 25, 3, 0.5, 30, rng(k))
        for left, right in zip(drawn[k], parts(batch), strict=True):
            np.testing.assert_array_equal(left, right)
    for k in (0, 1):
        alone.walks[k] = Walk(seed=50 + k, first=k * PART + 5000)
        alone.collect(k, 5)
    mapped.shared.refresh((written[0], written[1], marks[2]))
    assert_same_state(mapped.shared, alone.shared)


def in_processes(work: Callable[..., None], directory: Path, marks: Marks) -> dict[int, Any]:
    """What the experts 0 and 1 give, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(directory, k, marks, results)) for k in (0, 1)]
    for worker in workers:
        worker.start()
    given = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return given


def test_refresh_moves_all_rings_but_those_kept(tmp_path: Path) -> None:
    writer, reader = crew(5, 6, 7, directory=tmp_path), Crew(directory=tmp_path)
    reader.collect(1, 2)
    reader.shared.refresh(writer.shared.snapshot(), keep=[1])
    assert [reader.shared.snapshot()[k].size for k in range(K)] == [15, 6, 21]
    reader.shared.refresh(writer.shared.snapshot())
    assert len(reader.shared) == len(writer.shared) == 54


def test_refresh_refuses_marks_that_cannot_be(tmp_path: Path) -> None:
    mapped, memory = crew(5, 6, 7, directory=tmp_path), crew(5, 6, 7)
    marks = mapped.shared.snapshot()
    for wrong in ({"size": 61}, {"next": 60}, {"books": 0}):
        with pytest.raises(ValueError, match="no ring of 62 slots can stand at RingMark"):
            mapped.shared.refresh((marks[0]._replace(**wrong), *marks[1:]))
    with pytest.raises(ValueError, match="expected the marks of 3 experts, found 1"):
        mapped.shared.refresh(marks[:1])
    memory.shared.refresh(marks)
    with pytest.raises(ValueError, match=r"ring 0 stands at .* give the replay a directory"):
        memory.shared.refresh((marks[0]._replace(size=18, next=18), *marks[1:]))


def test_bytes_of_a_transition_with_behaviour() -> None:
    shared = SharedReplay(1000, K, 16)
    assert Replay(10, 16).bytes_per_transition == 217
    with_behaviour = Replay(10, 16, behaviour=True).bytes_per_transition
    assert with_behaviour == 217 + 2 * 16 * 4 + 3 * 4
    assert (shared.capacity, shared.ring_capacity) == (999, 333)


def test_memory_is_checked_for_the_whole_before_any_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "memory_available", lambda: 3_000 * 357)
    message = r"experts\.sharing\.buffer_size = 6,000 .* At most 3,000 fit"
    with pytest.raises(ConfigError, match=message):
        SharedReplay(6_000, K, 16)
    assert len(SharedReplay(3_000, K, 16)) == 0
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000 * 357)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=message):
        SharedReplay(6_000, K, 16, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- going on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(0, 0, 0), (4, 0, 33), (33, 64, 50)])
@pytest.mark.parametrize("mapped", [False, True])
def test_restored_replay_goes_on_as_the_other_one(
    tmp_path: Path, mapped: bool, steps: tuple[int, ...]
) -> None:
    directory = tmp_path / "rings" if mapped else None
    made, wanted = crew(*steps, directory=directory), crew(*steps)
    arrays, facts = made.shared.state()
    saved = {name: values.copy() for name, values in arrays.items()}
    # What was written after the checkpoint is in the mapped files, and must not come back.
    made.collect(0, 30)
    other = Crew(directory=directory) if mapped else crew(2, 2, 2)
    other.shared.restore(saved, facts)
    assert_same_state(other.shared, wanted.shared)
    for k in range(K):
        for one in (other, wanted):
            one.walks[k] = Walk(seed=9, first=k * PART + 5000)
            one.collect(k, 6)
    assert_same_state(other.shared, wanted.shared)
    found, expected = (one.shared.batch(1, 25, 2, 0.5, 30, rng()) for one in (other, wanted))
    assert found.source.tolist() == expected.source.tolist()
    assert_same(found, expected)


def test_rings_of_another_population_are_refused_and_change_nothing() -> None:
    saved, made, untouched = crew(20, 21, 22), crew(5, 6, 7), crew(5, 6, 7)
    arrays, facts = saved.shared.state()
    with pytest.raises(StoreError, match=r"of 3 experts, this one of 2\. .*experts\.n_experts"):
        SharedReplay(124, 2, N).restore(arrays, facts)
    with pytest.raises(StoreError, match=r"capacity = 62, .*experts\.sharing\.buffer_size it was"):
        SharedReplay(200, K, N).restore(arrays, facts)
    with pytest.raises(StoreError, match="buffer's row is"):
        made.shared.restore(arrays | {"2.row": arrays["2.row"][1:]}, facts)
    assert_same_state(made.shared, untouched.shared)


def test_closed_replay_leaves_no_file(tmp_path: Path) -> None:
    made = crew(4, 5, 6, directory=tmp_path / "rings")
    assert list((tmp_path / "rings").glob("*.bin"))
    made.shared.close()
    made.shared.close()
    assert list(tmp_path.iterdir()) == []
    crew(1, 1, 1).shared.close()
