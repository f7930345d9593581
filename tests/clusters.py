"""Ray clusters of several nodes on this machine, on loopback, and what is run on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echelon.files import scratch_directory
from reliability._commands import COMMANDS, write_world
from reliability._results import fingerprint

STORE = 80_000_000
"""Bytes of a node's object store."""


@contextmanager
def cluster(*cpus: int) -> Iterator[Any]:
    """A node with so many CPUs for each number, the first is the head; `nodes` are the others."""
    with scratch_directory("ray") as temporary:
        os.environ |= {
            "RAY_TMPDIR": str(temporary),  # short: sockets are in it
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # where there are none it is on loopback
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        from ray.cluster_utils import Cluster

        common = {"node_ip_address": "127.0.0.1", "object_store_memory": STORE}
        head = {"num_cpus": cpus[0], "include_dashboard": False, **common}
        made = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        try:
            made.nodes = [made.add_node(num_cpus=n, **common) for n in cpus[1:]]
            made.common = common
            yield made
        finally:
            made.shutdown()
            del os.environ["RAY_TMPDIR"]


def bare_world(directory: Path) -> Path:
    """The world of `reliability._commands`, with its bars imported."""
    directory.mkdir(parents=True)
    write_world(directory)
    run(directory, *COMMANDS["import"].argv)
    return directory


def run(directory: Path, *argv: str) -> None:
    """`echelon argv` in a directory, in this process; a proof that fails is none of ours."""
    from echelon.cli.app import app
    from echelon.errors import EchelonError

    before = Path.cwd()
    os.chdir(directory)
    try:
        app(list(argv), standalone_mode=False)
    except EchelonError as error:
        if argv[0] != "prove":
            raise
        assert "not proved" in str(error) or "not passed" in str(error), error
    finally:
        os.chdir(before)


def results(directory: Path, leave: Sequence[str] = ()) -> dict[str, str]:
    """Digests of all that was written below runs/, but for files of these names."""
    names = fingerprint(directory)
    kept = {name: digest for name, digest in names.items() if name.startswith("runs/")}
    assert kept
    return {n: d for n, d in kept.items() if Path(n).name not in leave}
