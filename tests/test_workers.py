"""Members in processes: same numbers whatever their number, faults that stay apart, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.errors import ConfigError, TrainingError
from echelon.rng import stream
from echelon.workers import Failure, Pool


class _Walker:
    """A member with a state and chance of its own, and a few ways to go wrong."""

    def __init__(self, member: int, seed: int, refuse: Path | None = None) -> None:
        if refuse is not None and refuse.exists() and member == 1:
            raise ConfigError("planted in the making")
        self.member = member
        self.place = torch.zeros(3, dtype=torch.float64)
        self._rng = stream(seed, "walker", member)

    def walk(self, steps: int, push: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            self.place += torch.from_numpy(self._rng.standard_normal(3) + push)
        return {"place": self.place}

    def settle(self, given: dict[str, torch.Tensor]) -> None:
        self.place = given["place"]

    def spoil(self, given: dict[str, torch.Tensor]) -> None:
        given["place"].zero_()

    def stumble(self, who: int) -> int:
        if self.member == who:
            self.place += 1.0
            raise TrainingError("planted: not a number")
        return self.member

    def bug(self) -> None:
        raise ZeroDivisionError("planted")

    def disk(self) -> None:
        raise OSError(28, "No space left on device", "some/file")

    def die(self, who: int) -> int:
        if self.member == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.member

    def facts(self) -> tuple[int, int, bool]:
        blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return os.getpid(), torch.get_num_threads(), blocked

    def loiter(self, directory: str) -> None:
        (Path(directory) / f"{os.getpid()}.begun").touch()
        time.sleep(120)


def _walkers(member: int, seed: int = 7, refuse: Path | None = None) -> _Walker:
    return _Walker(member, seed, refuse)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool[_Walker]]:
    """Five members on two processes: 0, 2, 4 and 1, 3."""
    with Pool(_walkers, size=5, workers=2) as made:
        yield made


def _story(host: Pool[_Walker]) -> list[Any]:
    """Walks of some and of all, and what one of them thinks of it."""
    push = np.array([0.1, 0.0, -0.1])
    said: list[Any] = [{m: host.call(_Walker.walk, [m], m + 1, push)[m] for m in range(5)}]
    said.append(host.call(_Walker.walk, [4, 1], 2, push))
    said.append(host.call(_Walker.walk, [1], 1, push)[1])
    return said


def test_results_do_not_depend_on_the_number_of_workers(pool: Pool[_Walker]) -> None:
    for member in range(5):
        pool.rebuild(member)
    two = _story(pool)
    with Pool(_walkers, size=5) as here:
        one = _story(here)
    assert list(two[1]) == [4, 1]
    for a, b in zip(one[:2], two[:2], strict=True):
        for member in a:
            assert torch.equal(a[member]["place"], b[member]["place"])
            assert a[member]["place"].dtype == torch.float64
    assert torch.equal(one[2]["place"], two[2]["place"])
    assert not torch.equal(two[0][1]["place"], two[2]["place"])  # state was kept from call to call


def test_what_a_member_gives_or_takes_is_a_copy_in_one_process_too() -> None:
    with Pool(_walkers, size=2) as here:
        before = here.call(_Walker.walk, [0], 1, np.zeros(3))[0]
        kept = before["place"].clone()
        here.call(_Walker.spoil, [1], before)[1]
        here.call(_Walker.walk, [0], 5, np.zeros(3))[0]
    assert torch.equal(before["place"], kept)


@pytest.mark.parametrize("workers", [1, 2])
def test_members_that_are_given_the_same_thing_each_have_their_own(
    workers: int, pool: Pool[_Walker]
) -> None:
    host = pool if workers == 2 else Pool(_walkers, size=5)
    shared = {"place": torch.ones(3, dtype=torch.float64)}
    host.call(_Walker.settle, range(5), shared)
    host.call(_Walker.walk, [0], 3, np.ones(3))[0]
    rest = host.call(_Walker.walk, range(1, 5), 0, np.zeros(3))
    assert all(found["place"].tolist() == [1.0, 1.0, 1.0] for found in rest.values())


def test_processes_are_two_deaf_to_ctrl_c_and_have_the_threads_asked_for(
    pool: Pool[_Walker],
) -> None:
    facts = pool.call(_Walker.facts, range(5))
    assert len({pid for pid, _, _ in facts.values()}) == 2
    assert os.getpid() not in {pid for pid, _, _ in facts.values()}
    assert facts[0][0] == facts[2][0] == facts[4][0]
    assert {(threads, blocked) for _, threads, blocked in facts.values()} == {(1, True)}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_threads_of_this_process_are_its_own_again_after_a_call() -> None:
    before = torch.get_num_threads()
    with Pool(_walkers, size=1, threads=before + 1) as here:
        assert here.call(_Walker.facts, [0])[0][1] == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_one_member_names_it_and_leaves_the_others_and_its_state(
    workers: int, pool: Pool[_Walker]
) -> None:
    host = pool if workers == 2 else Pool(_walkers, size=5)
    host.rebuild(2)
    done = host.call(_Walker.stumble, range(5), 2)
    failed = done.pop(2)
    assert done == {m: m for m in (0, 1, 3, 4)}
    assert isinstance(failed, Failure)
    assert not failed.lost
    assert isinstance(failed.error, TrainingError)
    assert str(failed.error) == "member 2: planted: not a number"
    assert host.call(_Walker.walk, [2], 0, np.zeros(3))[2]["place"].tolist() == [1.0, 1.0, 1.0]
    assert host.rebuild(2) == [2]
    assert host.call(_Walker.walk, [2], 0, np.zeros(3))[2]["place"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bug_is_raised_and_the_pool_can_still_be_used(workers: int, pool: Pool[_Walker]) -> None:
    host = pool if workers == 2 else Pool(_walkers, size=5)
    with pytest.raises(RuntimeError, match=r"member 1:[\s\S]*ZeroDivisionError: planted"):
        host.call(_Walker.bug, [1, 0])
    with pytest.raises(OSError, match="No space left"):
        host.call(_Walker.disk, [3])[3]
    assert host.call(_Walker.stumble, [0, 3], 9) == {0: 0, 3: 3}


def test_a_killed_process_loses_its_members_until_they_are_rebuilt_in_a_new_one(
    pool: Pool[_Walker],
) -> None:
    pool.call(_Walker.walk, range(5), 1, np.ones(3))
    others = pool.call(_Walker.walk, [1, 3], 0, np.zeros(3))
    old = pool.call(_Walker.facts, [0])[0][0]
    done = pool.call(_Walker.die, range(5), 2)
    assert (done[1], done[3]) == (1, 3)
    for member in (0, 2, 4):  # 0 had answered, but the state it spoke of is gone
        assert isinstance(done[member], Failure)
        assert done[member].lost
        assert f"member {member}: its process (members 0, 2, 4)" in str(done[member].error)
        assert "killed by SIGKILL" in str(done[member].error)
    assert pool.call(_Walker.stumble, [4], 9)[4].lost
    assert pool.rebuild(2) == [0, 2, 4]
    new = pool.call(_Walker.facts, [0])[0][0]
    assert new not in (old, os.getpid())
    assert pool.call(_Walker.walk, [4], 0, np.zeros(3))[4]["place"].tolist() == [0.0, 0.0, 0.0]
    again = pool.call(_Walker.walk, [1, 3], 0, np.zeros(3))
    assert all(torch.equal(again[m]["place"], others[m]["place"]) for m in (1, 3))
    assert pool.rebuild(2) == [2]


def test_a_process_killed_between_calls_is_noticed_at_the_next(pool: Pool[_Walker]) -> None:
    os.kill(pool.call(_Walker.facts, [1])[1][0], signal.SIGKILL)
    found = pool.call(_Walker.stumble, range(5), 9)
    assert [m for m, result in found.items() if isinstance(result, Failure)] == [1, 3]
    assert pool.rebuild(3) == [1, 3]
    assert pool.call(_Walker.stumble, [1, 3], 9) == {1: 1, 3: 3}


def test_a_member_that_cannot_be_made_is_an_error_and_may_be_tried_again(tmp_path: Path) -> None:
    refuse = tmp_path / "refuse"
    make = partial(_walkers, refuse=refuse)
    refuse.touch()
    with pytest.raises(ConfigError, match="member 1: planted in the making"):
        Pool(make, size=2)
    refuse.unlink()
    with Pool(make, size=2) as here:
        refuse.touch()
        with pytest.raises(ConfigError, match="member 1: planted in the making"):
            here.rebuild(1)
        unmade = here.call(_Walker.facts, [1])[1]
        assert isinstance(unmade, Failure)
        assert "member 1: it could not be made" in str(unmade.error)
        refuse.unlink()
        assert here.rebuild(1) == [1]
        assert here.call(_Walker.stumble, [1], 0)[1] == 1


def test_a_closed_pool_says_so() -> None:
    here = Pool(_walkers, size=1)
    here.close()
    here.close()
    with pytest.raises(RuntimeError, match="closed"):
        here.call(_Walker.facts, [0])[0]


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # ended; whoever adopted it has not looked yet
            return True
        time.sleep(0.05)
    return False


def _begun(directory: Path) -> list[int]:
    """Ids of two processes that loiter."""
    deadline = time.monotonic() + 240
    while len(found := list(directory.glob("*.begun"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return [int(path.stem) for path in found]


def test_no_worker_outlives_a_parent_that_is_killed_in_a_call(tmp_path: Path) -> None:
    script = (
        "from test_workers import Pool, _Walker, _walkers\n"
        "if __name__ == '__main__':\n"
        "    with Pool(_walkers, size=2, workers=2) as pool:\n"
        f"        pool.call(_Walker.loiter, [0, 1], '{tmp_path}')\n"
    )
    file = tmp_path / "run.py"
    file.write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with (tmp_path / "err.txt").open("w") as err:  # a killed parent's helper complains there
        process = subprocess.Popen(
            [sys.executable, str(file)], env=os.environ | {"PYTHONPATH": paths}, stderr=err
        )
    workers = _begun(tmp_path)
    assert len(workers) == 2
    process.kill()
    assert process.wait(120) == -signal.SIGKILL
    assert all(_gone(pid) for pid in workers)


def test_an_interrupt_in_a_call_ends_the_processes(pool: Pool[_Walker], tmp_path: Path) -> None:
    """The last test of this pool, which is gone after it."""

    def interrupt() -> None:
        _begun(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.call(_Walker.loiter, [0, 1], str(tmp_path))
    thread.join()
    workers = _begun(tmp_path)
    assert len(workers) == 2
    assert all(_gone(pid) for pid in workers)
    with pytest.raises(RuntimeError, match="closed"):
        pool.call(_Walker.facts, [0])[0]
