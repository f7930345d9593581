"""Worker processes: how they are started, for `agents.jobs` and `population.crew`.

    worker = hire(_work, threads)       # _work(pipe, threads) runs in a process of its own

A worker is forked from a helper process that does nothing but import torch and fork (Python's
forkserver). Forking this process instead would be quicker still, but a copy of a process that uses
threads may hang, and polars starts some as soon as it is imported; a new interpreter for each
worker is as safe, but takes seconds, most of them torch's. The helper is started with the first
worker and ends with this process.

- A worker is born deaf to Ctrl-C, which reaches all processes of a terminal: one that is still
  importing would die of it before it can be asked to stop.
- It sees the environment variables and the directory that this process has now, not those of the
  time at which the helper was started. (Libraries that read theirs when they are imported, such as
  OMP_NUM_THREADS, keep what they read.)
- It knows the digests of files that this process has computed: what a command has verified is not
  verified again in each worker.
- It leaves without clearing up what it imported, which would take another second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from echelon.digests import Mark, adopt_digests, known_digests

IMPORTED = ("torch._dynamo", "numba")
"""What the helper imports: slow to import, and starts no thread by that.

torch._dynamo: optimizers import it when the first one is made. polars, pandas and pyarrow, and
what imports them, are not for here.
"""


class Worker(NamedTuple):
    """A process, and our end of the pipe between it and us."""

    process: Any  # a multiprocessing.context.ForkServerProcess
    pipe: Connection


def hire(work: Callable[..., None], *args: object, daemon: bool = False) -> Worker:
    """Start a process that does `work(pipe, *args)`; daemon: it is ended when this one exits."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_begin,
        args=(dict(os.environ), known_digests(), work, theirs, *args),
        daemon=daemon,
    )
    context.set_forkserver_preload(list(IMPORTED))
    # Python's other helper would unblock Ctrl-C when it is started: it goes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
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
    os.environ.clear()
    os.environ.update(environment)
    adopt_digests(digests)
    work(pipe, *args)
