"""Several trainings side by side: one process each, one progress display, one Ctrl-C.

A task is a module-level function `task(job, report, should_stop) -> result`; jobs, reports and
results are pickled between our own processes only. With one worker everything happens in this
process.

Ctrl-C asks every task to stop at its next good moment (a checkpoint, say) and waits for it; a
second one does not wait. Where this process is killed, its workers stop in the same way. What
fails in one process does not stop the others; see `Failure`.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

from echelon.errors import EchelonError, TrainingError

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

    stopped: Ctrl-C came
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
    with _ctrl_c() as stop:
        for k, job in enumerate(jobs):
            if stop():
                break
            try:
                results[k] = task(job, lambda message, k=k: on_report(k, message), stop)  # type: ignore[misc]
            except EchelonError as error:
                results[k] = Failure(error)
        return JobResults(results, stop())


@contextmanager
def _ctrl_c() -> Iterator[ShouldStop]:
    """Count Ctrl-C instead of raising it, the first time."""
    asked = False

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: whoever owns that one handles signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


class _Pool(Generic[J, R]):
    """Worker processes, one per job, so many at a time."""

    def __init__(
        self,
        task: Task[J, R],
        jobs: Sequence[J],
        workers: int,
        on_report: Callable[[int, object], None],
    ) -> None:
        # spawn: a forked child of a process that uses threads (torch, polars) may hang.
        self._context = multiprocessing.get_context("spawn")
        self._task = task
        self._jobs = jobs
        self._workers = workers
        self._on_report = on_report
        self._messages: Any = self._context.Queue()
        self._stop = self._context.Event()
        self._running: dict[int, Any] = {}
        self._results: list[R | Failure | None] = [None] * len(jobs)

    def run(self) -> JobResults[R]:
        waiting = list(range(len(self._jobs)))
        with _ctrl_c() as stopped:
            try:
                while waiting or self._running:
                    if stopped():
                        self._stop.set()
                        waiting.clear()
                    while waiting and len(self._running) < self._workers:
                        self._start(waiting.pop(0))
                    self._listen()
            finally:
                for process in self._running.values():
                    process.terminate()
                    process.join()
            return JobResults(self._results, stopped())

    def _start(self, k: int) -> None:
        process = self._context.Process(
            target=_work, args=(self._task, k, self._jobs[k], self._messages, self._stop)
        )
        # Born deaf to Ctrl-C, which also reaches workers from a terminal: one that is still
        # importing would die of it before it can be asked to stop. Ours is kept until after.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._running[k] = process

    def _listen(self) -> None:
        try:
            k, kind, content = self._messages.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            self._bury()
            return
        if kind == "report":
            self._on_report(k, content)
            return
        self._results[k] = content if kind == "result" else Failure(_error(kind, content))
        self._running.pop(k).join()

    def _bury(self) -> None:
        """Find processes that ended without a word: killed, or out of memory."""
        for k, process in list(self._running.items()):
            if process.exitcode is not None and self._messages.empty():
                how = f"exit code {process.exitcode}"
                if process.exitcode < 0:
                    how = f"killed by {signal.Signals(-process.exitcode).name}"
                self._results[k] = Failure(
                    TrainingError(
                        f"a worker process ended unexpectedly ({how}), perhaps for want of memory. "
                        "Go on with --resume, with fewer --workers."
                    )
                )
                del self._running[k]


def _work(task: Task[J, R], k: int, job: J, messages: Any, stop: Any) -> None:  # noqa: ANN401
    """Run one job in a process of its own, and say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which asks us
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker process has a parent"

    def should_stop() -> bool:
        # A killed parent asks nobody: on its own, a worker would train to the end unwatched.
        return stop.is_set() or not parent.is_alive()

    try:
        result = task(job, lambda message: messages.put((k, "report", message)), should_stop)
        messages.put((k, "result", result))
    except EchelonError as error:
        messages.put((k, "error", (type(error), str(error))))
    except OSError as error:
        messages.put((k, "os", (error.errno, error.strerror or str(error), error.filename)))
    except Exception:  # noqa: BLE001 (carried to the parent, which shows it as a bug)
        messages.put((k, "bug", traceback.format_exc()))
    messages.close()
    if parent.is_alive():
        messages.join_thread()
    else:
        messages.cancel_join_thread()  # nobody reads them any more
    sys.exit(0)


def _error(kind: str, content: Any) -> BaseException:  # noqa: ANN401 (what `_work` sent)
    if kind == "error":
        error_class, text = content
        error = EchelonError.__new__(error_class)
        Exception.__init__(error, text)
        return error  # type: ignore[no-any-return]
    if kind == "os":
        return OSError(*content)
    return RuntimeError(f"in a worker process:\n{content}")
