"""Ray clusters of several nodes on this machine, on loopback, and commands that are run on them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from echelon.files import scratch_directory
from reliability._commands import COMMANDS, write_world
from reliability._results import fingerprint

STORE = 80_000_000
"""Bytes of a node's object store."""
PATIENCE_SECONDS = 60.0
_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # where there are no clusters, it is on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # A node that was killed is known to be dead after three seconds, and not after fifteen.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "150",  # a busy machine is no fault
}


class Nodes:
    """A head and the other nodes, which can be killed and replaced."""

    def __init__(self, cpus: Sequence[int], place: Path) -> None:
        from ray.cluster_utils import Cluster

        self._place = place
        self._common: dict[str, Any] = {
            "node_ip_address": "127.0.0.1",
            "object_store_memory": STORE,
        }
        head = {"num_cpus": cpus[0], "include_dashboard": False, **self._common}
        self._cluster: Any = Cluster(True, head_node_args=head, shutdown_at_exit=False)
        self.address: str = self._cluster.address
        self._others = [self._add(number) for number in cpus[1:]]

    def _add(self, cpus: int) -> Any:
        return self._cluster.add_node(num_cpus=cpus, **self._common), cpus

    def replace(self, number: int) -> None:
        """Kill a node that is not the head, with all its processes, and start another."""
        node, cpus = self._others[number]
        self._cluster.remove_node(node, allow_graceful=False)
        self._others[number] = self._add(cpus)

    def close(self) -> None:
        """End all of it, and make sure that all of it has ended."""
        self._cluster.shutdown()
        left = wait_until_empty(lambda: _processes_of(self._place))
        assert not left, f"processes of the cluster live on: {left}"

    def left(self) -> list[int]:
        """Actors that live on, after as much time as they need to end with their owner."""
        return wait_until_empty(lambda: actors_left(self._place))

    @contextmanager
    def losing(self, moments: Sequence[float], rng: random.Random) -> Iterator[list[float]]:
        """Have a node die at each of the moments, in seconds from now; those at which one did."""
        done: list[float] = []
        ended, start = threading.Event(), time.monotonic()

        def kill() -> None:
            for moment in sorted(moments):
                if ended.wait(max(0.0, start + moment - time.monotonic())):
                    return
                self.replace(rng.randrange(len(self._others)))
                done.append(moment)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield done
        finally:
            ended.set()
            thread.join()


def wait_until_empty(numbers: Callable[[], list[int]]) -> list[int]:
    """The numbers, empty as soon as they are: those that stay so long."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (left := numbers()) and time.monotonic() < until:
        time.sleep(0.2)
    return left


@contextmanager
def cluster(*cpus: int, **settings: str) -> Iterator[Nodes]:
    """A node with so many CPUs for each number; the first is the head. settings: Ray's variables"""
    with scratch_directory("ray") as temporary:
        before = dict(os.environ)
        os.environ.update(
            _SETTINGS | settings, RAY_TMPDIR=str(temporary)
        )  # short: sockets are in it
        nodes = Nodes(cpus, temporary)
        try:
            yield nodes
        finally:
            nodes.close()
            os.environ.clear()
            os.environ.update(before)


def bare_world(directory: Path) -> Path:
    """The world of `reliability._commands`, with its bars imported."""
    directory.mkdir(parents=True)
    write_world(directory)
    run(directory, *COMMANDS["import"].argv)
    return directory


def run(directory: Path, *argv: str) -> None:
    """`echelon argv` in a directory, in this process; a tiny agent need not pass a proof."""
    from echelon.cli.app import app
    from echelon.errors import EchelonError

    before = Path.cwd()
    os.chdir(directory)
    try:
        app(list(argv), standalone_mode=False)
    except EchelonError as error:
        if argv[0] != "prove" or "not p" not in str(error):
            raise
    finally:
        os.chdir(before)


def results(directory: Path, leave: Sequence[str] = ()) -> dict[str, str]:
    """Digests of all that was written below runs/, but for files of these names."""
    names = fingerprint(directory)
    kept = {name: digest for name, digest in names.items() if name.startswith("runs/")}
    assert kept, f"{directory}: nothing was written there"
    return {name: digest for name, digest in kept.items() if Path(name).name not in leave}


def actors_left(place: Path) -> list[int]:
    """Process ids of actors of Echelon that a cluster with this directory started."""
    return [
        number
        for number in _processes_of(place)
        if _read(Path(f"/proc/{number}/cmdline")).startswith(b"ray::_Host")
    ]


def _processes_of(place: Path) -> list[int]:
    """Process ids of all that belong to a cluster: their output or their words name its place."""
    numbers = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            output = str((process / "fd/1").readlink())
            if str(place) in output or os.fsencode(place) in _read(process / "cmdline"):
                numbers.append(int(process.name))
    return sorted(numbers)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
