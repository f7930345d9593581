"""Several trainings side by side: a few processes, one progress display, one stop.

A task is a module-level function `task(job, report, should_stop) -> result`; jobs, reports and
results are pickled between our own processes only. A worker that has done a job gets the next one:
starting one takes seconds, most of them imports. With one worker everything happens in this
process.

Ctrl-C and SIGTERM ask every task to stop at its next good moment (a checkpoint, say) and wait for
it; a second one does not wait. Where this process is killed, its workers stop in the same way. What
fails in one process does not stop the others; see `Failure`.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from echelon.agents.processes import Worker, hire
from echelon.errors import EchelonError, TrainingError
from echelon.stopping import stop_requests

J = TypeVar("J")
R = TypeVar("R")

Report = Callable[[object], None]
ShouldStop = Callable[[], bool]
Task = Callable[[J, Report, ShouldStop], R]

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Failure:
    """A job that failed: the error, as the process it ran in raised it."""

    error: BaseException


@dataclass(frozen=True)
class JobResults(Generic[R]):
    """Results in the order of the jobs; None: not begun, because of a stop.

    stopped: Ctrl-C or SIGTERM came
    """

    results: list[R | Failure | None]
    stopped: bool

    def all_or_raise(self) -> list[R]:
        """The results of jobs that were begun; raises the first failure."""
        done: list[R] = []
        for result in self.results:
            if isinstance(result, Failure):
                raise result.error
            if result is not None:
                done.append(result)
        return done


def run_jobs(
    task: Task[J, R],
    jobs: Sequence[J],
    *,
    workers: int,
    on_report: Callable[[int, object], None] = lambda _k, _message: None,
) -> JobResults[R]:
    """Run every job; `on_report(k, message)` passes on what the task of job k reports."""
    if workers == 1 or len(jobs) == 1:
        return _run_here(task, jobs, on_report)
    return _Pool(task, jobs, min(workers, len(jobs)), on_report).run()


def _run_here(
    task: Task[J, R], jobs: Sequence[J], on_report: Callable[[int, object], None]
) -> JobResults[R]:
    results: list[R | Failure | None] = [None] * len(jobs)
    with stop_requests() as stop:
        for k, job in enumerate(jobs):
            if stop():
                break
            try:
                results[k] = task(job, lambda message, k=k: on_report(k, message), stop)  # type: ignore[misc]
            except EchelonError as error:
                results[k] = Failure(error)
        return JobResults(results, stop())


def _dismiss(worker: Worker) -> None:
    """Ask it to stop, or to end where it has nothing to do."""
    with suppress(BrokenPipeError):  # it has ended already
        worker.pipe.send(None)


class _Pool(Generic[J, R]):
    """Worker processes, each of which does one job after the other.

    One is given (number, job), and None where there are no more or where it is to stop; it gives
    (number, kind, content). Each has a pipe of its own: what workers share (a queue, an event)
    has a lock, and one that is killed while it holds the lock would halt the others.
    """

    def __init__(
        self,
        task: Task[J, R],
        jobs: Sequence[J],
        workers: int,
        on_report: Callable[[int, object], None],
    ) -> None:
        self._task = task
        self._jobs = jobs
        self._workers = workers
        self._on_report = on_report
        self._running: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self._results: list[R | Failure | None] = [None] * len(jobs)

    def run(self) -> JobResults[R]:
        waiting = list(range(len(self._jobs)))
        asked = False
        with stop_requests() as stopped:
            try:
                while waiting or self._running:
                    if stopped() and not asked:
                        asked = True
                        waiting.clear()
                        for worker in self._running.values():
                            _dismiss(worker)
                    while waiting and len(self._running) < self._workers:
                        self._start(waiting.pop(0))
                    self._listen()
            finally:
                for worker in self._running.values():
                    worker.process.kill()  # deaf to anything less
                for worker in self._idle:
                    _dismiss(worker)
                for worker in (*self._running.values(), *self._idle):
                    worker.process.join()
                    worker.pipe.close()
            return JobResults(self._results, stopped())

    def _start(self, k: int) -> None:
        alive = [worker for worker in self._idle if worker.process.is_alive()]
        worker = alive.pop() if alive else hire(_work, self._task)
        self._idle = alive
        worker.pipe.send((k, self._jobs[k]))
        self._running[k] = worker

    def _listen(self) -> None:
        by_pipe = {worker.pipe: k for k, worker in self._running.items()}
        for pipe in wait(list(by_pipe), timeout=_POLL_SECONDS):
            assert isinstance(pipe, Connection), "nothing else is waited for"
            try:
                k, kind, content = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._bury(by_pipe[pipe])
                continue
            if kind == "report":
                self._on_report(k, content)
                continue
            self._results[k] = content if kind == "result" else Failure(_error(kind, content))
            self._idle.append(self._running.pop(k))

    def _bury(self, k: int) -> None:
        """A process ended without a word: killed, or out of memory."""
        worker = self._running.pop(k)
        worker.process.join()
        worker.pipe.close()
        exitcode = worker.process.exitcode
        how = f"exit code {exitcode}"
        if exitcode < 0:
            how = f"killed by {signal.Signals(-exitcode).name}"
        self._results[k] = Failure(
            TrainingError(
                f"a worker process ended unexpectedly ({how}), perhaps for want of memory. "
                "Go on with --resume, with fewer --workers."
            )
        )


def _work(pipe: Connection, task: Task[J, R]) -> None:
    """Do one job after the other in a process of its own, and say how each went."""
    stopped = False

    def should_stop() -> bool:
        # While a job is done nothing is sent but the wish to stop; where the parent was killed,
        # the pipe has an end, which counts as one: else we would train on unwatched.
        nonlocal stopped
        stopped = stopped or pipe.poll()
        return stopped

    def tell(k: int, kind: str, content: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody is there any more
            pipe.send((k, kind, content))

    while not stopped:
        try:
            given = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        if given is None:
            break
        k, job = given
        tell(k, *_done(task, job, partial(tell, k, "report"), should_stop))
    pipe.close()
    sys.exit(0)


def _done(task: Task[J, R], job: J, report: Report, should_stop: ShouldStop) -> tuple[str, object]:
    """(kind, content) of what a job came to, such that it can be sent."""
    try:
        return "result", task(job, report, should_stop)
    except EchelonError as error:
        return "error", (type(error), str(error))
    except OSError as error:
        return "os", (error.errno, error.strerror or str(error), error.filename)
    except Exception:  # noqa: BLE001 (carried to the parent, which shows it as a bug)
        return "bug", traceback.format_exc()


def _error(kind: str, content: Any) -> BaseException:  # noqa: ANN401 (what `_done` gave)
    if kind == "error":
        error_class, text = content
        error = EchelonError.__new__(error_class)
        Exception.__init__(error, text)
        return error  # type: ignore[no-any-return]
    if kind == "os":
        return OSError(*content)
    return RuntimeError(f"in a worker process:\n{content}")
