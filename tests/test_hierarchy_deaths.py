"""Hierarchies whose processes die: what is learned is what would have been, bit for bit.

Starting processes is what these tests spend their time on. So one hierarchy in two of them is set
back and disturbed in one test after the other, and compared with one that never was, made once.
"""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hierarchies import Everything, assert_equal, everything, make_learner, trained
from torch import Tensor
from worlds import make_world

from echelon.envs import World
from echelon.errors import TrainingError
from echelon.population.learner import HierarchyLearner
from echelon.population.member import Member
from echelon.types import Metrics
from echelon.workers import Engine, use_engine


class Story:
    """Five rounds of a hierarchy that was left in peace, and its like in two processes.

    after: of each round, what it had come to
    """

    def __init__(self, world: World, directory: Path, *more: str) -> None:
        alone = make_learner(world, directory / "alone", *more)
        self.after: dict[int, Everything] = {}
        self._checkpoints: dict[int, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        for _ in range(5):
            alone.train_once()
            self.after[alone.round] = everything(alone)
            tensors, state = alone.state()
            cloned = {name: value.clone() for name, value in tensors.items()}
            self._checkpoints[alone.round] = cloned, copy.deepcopy(state)
        alone.close()
        self._hurt = make_learner(world, directory / "hurt", "trainer.workers=2", *more)

    def checkpoint(self, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of the state after a round, as `restore` takes it."""
        tensors, state = self._checkpoints[number]
        return {name: value.clone() for name, value in tensors.items()}, copy.deepcopy(state)

    def third_round(self) -> HierarchyLearner:
        """The one in two processes, which has just made its third round."""
        self._hurt.restore(*self.checkpoint(2))
        return trained(self._hurt, 1)

    def close(self) -> None:
        self._hurt.close()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(n_rows=200, n_assets=3, window=6)


@pytest.fixture(scope="module")
def plain(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Three experts, one member each."""
    story = Story(world, tmp_path_factory.mktemp("plain"))
    yield story
    story.close()


@pytest.fixture(scope="module")
def many(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Two experts of four members, which copy each other."""
    more = ("trainer.evolution.members_per_niche=4", "experts.n_experts=2")
    story = Story(world, tmp_path_factory.mktemp("many"), *more)
    yield story
    story.close()


def kill_worker(learner: HierarchyLearner, worker: int = 0) -> None:
    process = learner.members.pool.workers[worker].process
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def without_losses(learner: HierarchyLearner) -> Everything:
    """What it has come to, but for the losses it tells of, of which there are some."""
    found = everything(learner)
    events = found.state["events"]
    kept = [event for event in events if event["kind"] != "worker_lost"]
    assert len(kept) < len(events)
    return Everything(found.tensors, found.state | {"events": kept})


Begin = Callable[[str | None, Mapping[int, Any]], None]


def dying(
    learner: HierarchyLearner, method: str, monkeypatch: pytest.MonkeyPatch, times: int = 1
) -> list[int]:
    """Kill one of two processes whenever it is to do `method`, so many times.

    How many times are left, as one number in a list.
    """
    pool = learner.members.pool
    begin: Begin = pool._begin
    left = [times]

    def fatal(called: str | None, arguments: Mapping[int, Any]) -> None:
        if called == method and left[0] and arguments:
            left[0] -= 1
            kill_worker(learner, min(arguments) % 2)
        begin(called, arguments)

    monkeypatch.setattr(pool, "_begin", fatal)
    return left


def test_neither_the_number_of_processes_nor_the_death_of_one_changes_a_result(
    world: World, plain: Story, tmp_path: Path
) -> None:
    hurt = trained(make_learner(world, tmp_path, "trainer.workers=2"), 3)
    kill_worker(hurt)
    assert_equal(without_losses(trained(hurt, 2)), plain.after[5])
    hurt.close()


class Elsewhere(Engine):
    """Processes of this machine that are treated as those of others: they see none of our files."""

    away = True


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Story, HierarchyLearner]]:
    """A story, and its like in two processes elsewhere, whose members collect ahead."""
    world = make_world(n_rows=200, n_assets=3, window=6)
    directory = tmp_path_factory.mktemp("far")
    story = Story(world, directory)
    with use_engine(Elsewhere()):
        learner = make_learner(world, directory / "far", "trainer.workers=2")
    yield story, learner
    learner.close()
    story.close()


def test_members_that_collect_ahead_change_nothing_that_is_saved_or_learned(
    far: tuple[Story, HierarchyLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    story, learner = far
    seen = []
    router_learns = learner.router.learn

    def learn(*args: Any, **kwargs: Any) -> Metrics:
        seen.append(learner.members.pool._busy != {})
        return router_learns(*args, **kwargs)

    monkeypatch.setattr(learner.router, "learn", learn)
    for number in range(1, 6):
        learner.train_once()
        assert learner.members._under_way
        learner.policy()  # is made without waiting for those who collect
        assert learner.members._under_way
        assert_equal(everything(learner), story.after[number])
    assert seen == [False]  # members evolve in the same round, after the router has learned
    learner.restore(*story.checkpoint(2))
    assert_equal(everything(trained(learner, 3)), story.after[5])


def test_members_that_die_while_they_collect_ahead_do_it_again(
    far: tuple[Story, HierarchyLearner],
) -> None:
    story, learner = far
    learner.restore(*story.checkpoint(2))
    learner.train_once()
    kill_worker(learner)
    assert_equal(everything(learner), story.after[3])  # it is not known yet
    assert_equal(without_losses(trained(learner, 1)), story.after[4])
    kill_worker(learner, 1)
    learner.members.ask(Member.skill_number)  # finds it out, while the others are ahead
    assert_equal(without_losses(trained(learner, 1)), story.after[5])


def test_a_worker_that_keeps_dying_stops_the_run_with_what_to_do(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(world, tmp_path, "trainer.workers=2")
    dying(learner, "collect", monkeypatch, times=99)
    with pytest.raises(TrainingError, match=r"died 3 times in one phase.*SIGKILL") as caught:
        learner.train_once()
    assert "want of memory" in str(caught.value)
    assert "Resume the run with fewer trainer.workers." in str(caught.value)
    assert caught.value.exit_code == 8
    assert [event.kind for event in learner._events] == ["worker_lost"] * 2
    learner.close()


@pytest.mark.parametrize(
    "method",
    ["collect", "state", "learn", "copy_state", "take_state", "set_hyperparameters", "stand"],
)
def test_a_worker_may_die_anywhere_in_a_round_twice(
    many: Story, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    hurt = many.third_round()
    if method == "stand":  # which is called where another has died before
        dying(hurt, "collect", monkeypatch)
    left = dying(hurt, method, monkeypatch, times=1 if method == "stand" else 2)
    trained(hurt, 2)
    assert left == [0]
    assert_equal(without_losses(hurt), many.after[5])


def test_a_worker_killed_between_rounds_does_not_spoil_the_checkpoint_nor_its_restoring(
    plain: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt = plain.third_round()
    kill_worker(hurt)
    tensors, state = hurt.state()
    tensors = {name: value.clone() for name, value in tensors.items()}
    assert_equal(everything(hurt), plain.after[3])  # nobody has to be asked
    before = state["events"]
    assert_equal(without_losses(trained(hurt, 1)), plain.after[4])
    dying(hurt, "restore", monkeypatch)
    hurt.restore(tensors, state)
    assert [event.kind for event in hurt._events[len(before) :]] == ["worker_lost"]
    assert_equal(without_losses(trained(hurt, 2)), plain.after[5])


@pytest.fixture(scope="module")
def poisoned(plain: Story) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state after three rounds, in which expert 2 is no longer a number."""
    tensors, state = plain.checkpoint(3)
    tensors["member.2.core.actor.last.weight"].fill_(math.nan)
    return tensors, state


@pytest.fixture(scope="module")
def quarantined(
    world: World,
    poisoned: tuple[dict[str, Tensor], dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Everything:
    """What comes of it in a round in peace: the expert is put into quarantine."""
    alone = make_learner(world, tmp_path_factory.mktemp("quarantined"))
    alone.restore(*copy.deepcopy(poisoned))
    found = everything(trained(alone, 1))
    alone.close()
    assert ("quarantine", "expert 2") in [(e["kind"], e["who"]) for e in found.state["events"]]
    return found


@pytest.mark.parametrize("method", ["collect", "state", "restart", "set_hyperparameters"])
def test_a_worker_may_die_while_an_expert_is_in_quarantine(
    plain: Story,
    poisoned: tuple[dict[str, Tensor], dict[str, Any]],
    quarantined: Everything,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    hurt = plain.third_round()
    hurt.restore(*copy.deepcopy(poisoned))
    # Member 2 fails in `collect`, and its process dies in what follows, with member 0 in it.
    left = dying(hurt, method, monkeypatch)
    trained(hurt, 1)
    assert left == [0]
    assert_equal(without_losses(hurt), quarantined)
