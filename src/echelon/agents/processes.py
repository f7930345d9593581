"""Worker processes: how they are started, for `agents.jobs` and `population.crew`.

    worker = hire(_work, threads)       # _work(pipe, threads) runs in a process of its own

A worker is forked from a helper process that does nothing but import torch and fork (Python's
forkserver). Forking this process instead would be quicker still, but a copy of a process that uses
threads may hang, and polars starts some as soon as it is imported; a new interpreter for each
worker is as safe, but takes seconds, most of them torch's. The helper is started with the first
worker and ends with this process.

- A worker is born deaf to Ctrl-C and SIGTERM, which reach all processes of a terminal or a
  service: it would die of them before it can be asked to stop, and so would the helper.
- It sees the environment variables and the directory that this process has now, not those of the
  time at which the helper was started. Libraries that read theirs when they are imported keep what
  they read: OMP_NUM_THREADS is 1 in the helper, since a copy of a process whose OpenMP has threads
  hangs when it wants some itself; who trains says how many torch may use. OpenBLAS keeps its
  number, on which results depend: it ends its threads before a fork and starts new ones on demand.
- Its temporary files, and those of Python's process helpers, are in a directory of ours, which the
  next process removes where this one and all its workers were killed (see `files.sweep`).
- It knows the digests of files that this process has computed: what a command has verified is not
  verified again in each worker.
- It leaves without clearing up what it imported, which would take another second.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from echelon.digests import Mark, adopt_digests, known_digests
from echelon.files import scratch_directory, share_directory
from echelon.stopping import SIGNALS

IMPORTED = ("torch._dynamo", "numba")
"""What the helper imports: slow to import, and starts no thread by that.

torch._dynamo: optimizers import it when the first one is made. polars, pandas and pyarrow, and
what imports them, are not for here.
"""
_SOCKET_BYTES = 107
"""Longest path of a socket."""
_BELOW = len("/echelon-mp-0123456789abcdef/pymp-12345678/listener-12345678")
_daemons: weakref.WeakSet[Any] = weakref.WeakSet()


class Worker(NamedTuple):
    """A process, and our end of the pipe between it and us."""

    process: Any  # a multiprocessing.context.ForkServerProcess
    pipe: Connection


def hire(work: Callable[..., None], *args: object, daemon: bool = False) -> Worker:
    """Start a process that does `work(pipe, *args)`; daemon: it is ended when this one exits."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    temporary = _temp_directory()
    environment = dict(os.environ) | ({} if temporary is None else {"TMPDIR": str(temporary)})
    process = context.Process(
        target=_begin, args=(environment, known_digests(), work, theirs, *args), daemon=daemon
    )
    if daemon:
        _daemons.add(process)
    context.set_forkserver_preload(list(IMPORTED))
    # Python's other helper would unblock the signals when it is started: it goes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with _started_from(_for_helper(temporary)):
            forkserver.ensure_running()  # the workers inherit what it blocks
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return Worker(process, ours)


def _begin(
    environment: dict[str, str],
    digests: Mapping[Mark, str],
    work: Callable[..., None],
    pipe: Connection,
    *args: object,
) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a library may unblock them
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # what the helper had
    if temporary := environment.get("TMPDIR"):
        share_directory(Path(temporary))
    adopt_digests(digests)
    work(pipe, *args)


@cache
def _temp_directory() -> Path | None:
    """For temporary files of the workers; None: as it is, in a worker or where names are long."""
    long = len(os.fsencode(tempfile.gettempdir())) + _BELOW > _SOCKET_BYTES
    if long or multiprocessing.parent_process() is not None:
        return None
    stack = ExitStack()
    directory = stack.enter_context(scratch_directory("mp"))
    # After the workers have been waited for, and after what multiprocessing has in it.
    util.Finalize(None, stack.close, exitpriority=-1000)
    return directory


def _for_helper(temporary: Path | None) -> dict[str, str]:
    """Variables of the helper: one thread of OpenMP, OpenBLAS with as many as it would have."""
    blas = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return ({} if temporary is None else {"TMPDIR": str(temporary)}) | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": blas or str(len(os.sched_getaffinity(0))),
    }


@contextmanager
def _started_from(environment: Mapping[str, str]) -> Iterator[None]:
    """Have what is started meanwhile see other variables, and multiprocessing its directory."""
    before, place = {name: os.environ.get(name) for name in environment}, tempfile.tempdir
    os.environ.update(environment)
    tempfile.tempdir = None
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = place


@atexit.register
def _end_daemons() -> None:
    """Before multiprocessing would: it sends SIGTERM, to which they are deaf, and waits."""
    for process in tuple(_daemons):
        if process.is_alive():
            process.kill()
