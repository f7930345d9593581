"""Worker processes that are watched: a time limit and a memory limit per case.

An alarm does not interrupt compiled code, and a process that takes all memory cannot judge
itself. So cases run in workers, and the parent looks at each every few milliseconds: at its
processor time, at the clock and at its resident memory. A worker over a limit says where it is
(faulthandler, which needs no cooperation of the interpreter), is killed with everything it
started, and another takes its place.

Workers are forked from a server that has imported everything once and run nothing, so a new one
costs milliseconds, and no lock of a thread that was not forked is held in it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from reliability.cases import (
    MAX_FILE,
    OUTPUT,
    Case,
    Outcome,
    Yard,
    innermost_of_text,
    run_case,
)

_TICK = 0.05
_IDLE = 3
"""A case that uses no processor for so many times its limit waits for what does not come."""
_PATIENCE = 30
"""The clock may run so many times longer than the processor: others use the machine too."""
_STACK = "stack.txt"


class Limits(NamedTuple):
    """Of one case: seconds of processor time, and bytes that resident memory may grow by."""

    seconds: float
    memory: int


class Job(NamedTuple):
    """A case for a worker: by its number, from which the worker makes it, or itself (a replay)."""

    number: int
    target: str
    limits: Limits
    case: Case | None = None


class Finished(NamedTuple):
    """A job and what came of it."""

    job: Job
    outcome: Outcome


Maker = Callable[[Job], Case]
Runner = tuple[Maker, Callable[[Case], object], bool]
"""How a worker makes the case of a job, runs it, and whether it may write anywhere."""
Lookup = Callable[[str, int, Path], Runner]
"""target, seed, directory of worlds → its runner; a function of a module, so that it can be sent"""


class Settings(NamedTuple):
    """What all workers are started with."""

    seed: int
    worlds: Path
    scratch: Path
    lookup: Lookup
    cases_per_worker: int = 3000


class _Worker:
    """One worker as its parent sees it."""

    def __init__(self, context: Any, number: int, settings: Settings) -> None:
        self.place = settings.scratch / f"worker-{number}"
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.place, settings))
        self.process.start()
        theirs.close()
        self.watched = psutil.Process(self.process.pid)
        self.job: Job | None = None
        self.done = 0

    def give(self, job: Job) -> None:
        self.job = job
        self.started = time.monotonic()
        self.cpu, self.resident = self._now()
        self.moved = (self.started, self.cpu)
        self.connection.send(job)

    def _now(self) -> tuple[float, int]:
        with suppress(psutil.Error):
            times = self.watched.cpu_times()
            return times.user + times.system, self.watched.memory_info().rss
        return 0.0, 0

    def excess(self) -> str:
        """Which limit the present case is over, or nothing."""
        assert self.job is not None
        cpu, resident = self._now()
        limits = self.job.limits
        if resident - self.resident > limits.memory:
            return "memory over limit"
        if cpu - self.cpu > limits.seconds:
            return "time over limit"
        now = time.monotonic()
        if cpu - self.moved[1] > 0.01:
            self.moved = (now, cpu)
        waits = now - self.moved[0] > limits.seconds * _IDLE
        return "hangs" if waits or now - self.started > limits.seconds * _PATIENCE else ""

    def spent(self) -> float:
        """Seconds of processor time since the case began."""
        return self._now()[0] - self.cpu

    def stack(self) -> str:
        """Where the worker is: it writes that down even from within compiled code."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        with suppress(OSError):
            return (self.place / _STACK).read_text(errors="replace")
        return ""

    def end(self) -> int:
        """Kill the worker and what it started; its exit code."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.join()
        self.connection.close()
        shutil.rmtree(self.place, ignore_errors=True)
        return int(self.process.exitcode or 0)


class Pool:
    """So many watched workers; `run` gives the jobs to them and yields what came of each."""

    def __init__(
        self, settings: Settings, workers: int, preload: Sequence[str] = ("reliability.warm",)
    ) -> None:
        self._settings = settings
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._numbers = 0
        self._workers = [self._start() for _ in range(workers)]

    def _start(self) -> _Worker:
        self._numbers += 1
        return _Worker(self._context, self._numbers, self._settings)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, jobs: Iterator[Job]) -> Iterator[Finished]:
        """Yield outcomes as they come; no more jobs than workers are ever under way."""
        for worker in self._workers:
            self._next(worker, jobs)
        while busy := [worker for worker in self._workers if worker.job is not None]:
            ready = wait([worker.connection for worker in busy], timeout=_TICK)
            for worker in busy:
                finished = (
                    self._receive(worker) if worker.connection in ready else self._watch(worker)
                )
                if finished is None:
                    continue
                yield finished
                place = self._workers.index(worker)
                if worker.process.exitcode is not None or self._is_spent(worker):
                    worker.end()
                    self._workers[place] = worker = self._start()
                self._next(worker, jobs)

    def _is_spent(self, worker: _Worker) -> bool:
        return worker.done >= self._settings.cases_per_worker

    def _next(self, worker: _Worker, jobs: Iterator[Job]) -> None:
        job = next(jobs, None)
        if job is None:
            worker.job = None
        else:
            worker.give(job)

    def _receive(self, worker: _Worker) -> Finished:
        """A worker's answer, or the news that it died."""
        assert worker.job is not None
        try:
            outcome = Outcome(*worker.connection.recv())
        except (EOFError, ConnectionError):
            worker.process.join(1.0)
            text = worker.stack()
            code = worker.end()
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            outcome = Outcome("failure", f"died ({name})", innermost_of_text(text), text[:500])
        worker.done += 1
        if outcome.kind != "failure" and outcome.grown > worker.job.limits.memory:
            text = f"grew by {outcome.grown >> 20} MiB"
            outcome = outcome._replace(kind="failure", name="memory over limit", text=text)
        return Finished(worker.job, outcome)

    def _watch(self, worker: _Worker) -> Finished | None:
        """End a worker whose case is over a limit."""
        assert worker.job is not None
        name = worker.excess()
        if not name:
            return None
        seconds = worker.spent()
        where = innermost_of_text(worker.stack())
        worker.end()
        return Finished(worker.job, Outcome("failure", name, where, seconds=seconds))


def _work(connection: Connection, place: Path, settings: Settings) -> None:
    """A worker's life: make, run and judge cases until the parent ends it."""
    os.setsid()  # so that what a case starts ends with its worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stack = (place / _STACK).open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    _silence(place / OUTPUT)
    # A backstop: what asks for more than the machine has fails at once, not after minutes of it.
    limit = psutil.Process().memory_info().vms + (8 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 (for as long as the process lives)
    yard = Yard(place, settings.worlds)
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:  # the parent is gone
            return
        make, run, roams = settings.lookup(job.target, settings.seed, settings.worlds)
        case = job.case or make(job)
        connection.send(tuple(run_case(yard, case, run, roams=roams)))
        if job.number % 50 == 0:
            gc.collect()


def _silence(path: Path) -> None:
    """What compiled libraries write (a panic of Rust's) goes to a file, not to the terminal."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
