"""Work in other processes: members that live there and are called, and jobs done one by one.

    with Pool(make_member, size=5, workers=2) as pool:
        rewards = pool.call(Member.collect, range(5), 1000)    # number → result or Failure
    done = run_jobs(train_seed, jobs, workers=2)               # results or Failures, in order

Both ask the engine in force (`engine`, `use_engine`) for workers: processes of this machine, or
actors of a Ray cluster (`echelon.cluster`). Members of one worker work one after the other, workers
side by side. Values travel as copies, in one process too, so results do not depend on the number of
workers as long as members share nothing that changes and draw random numbers from generators of
their own. A task of jobs is a module-level function `task(job, report, should_stop) -> result`.
What goes wrong:

- An `EchelonError` is a `Failure` in the result's place; the others go on. Any other exception is
  a bug: a pool raises it once all have answered, a job's is a Failure with the traceback.
- A process dies, killed or out of memory: a `Failure` for its job; of a pool, one with `lost` for
  each of its members, until `rebuild` has made them again.
- Ctrl-C and SIGTERM do not reach workers. `run_jobs` asks every task to stop at its next good
  moment (a checkpoint, say) and waits for it; a call of a pool is finished. A second signal does
  not wait (see `echelon.stopping`).
- This process is killed: tasks are asked to stop; workers of a pool leave at once.

A worker is forked from a helper process that does nothing but import torch and fork (Python's
forkserver). A fork of this process may hang, since polars starts threads as soon as it is imported;
a new interpreter for each worker takes seconds, most of them torch's.

- A worker ignores Ctrl-C and SIGTERM from its first moment, which reach all processes of a terminal
  or a service: it would die of them before it can be asked to stop, and so would the helper.
- It sees the environment variables that this process has now, not the helper's. There
  OMP_NUM_THREADS is 1: a copy of a process whose OpenMP has threads hangs when it wants some.
  OpenBLAS keeps its number, on which results depend; it ends its threads before a fork.
- Its temporary files, and those of Python's process helpers, are in a directory of ours, which the
  next process removes where this one and all its workers were killed (see `files.sweep`).
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from echelon.errors import EchelonError, TrainingError, WorkersLostError
from echelon.files import (
    Closing,
    Mark,
    adopt_digests,
    known_digests,
    scratch_directory,
    share_directory,
)
from echelon.stopping import SIGNALS, stop_requests

_A = TypeVar("_A")
_J = TypeVar("_J")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_T_co = TypeVar("_T_co", covariant=True)

Report = Callable[[object], None]
ShouldStop = Callable[[], bool]
_Task = Callable[[_J, Report, ShouldStop], _R]

IMPORTED = ("torch._dynamo", "numba")
"""What the helper imports: slow to import, and starts no thread by that (as polars would).

torch._dynamo: optimizers import it when the first one is made.
"""
_PATIENCE_SECONDS = 5.0
"""That a process is given to leave when asked, before it is ended."""
_daemons: weakref.WeakSet[Any] = weakref.WeakSet()


class Engine:
    """Where workers are started, and how they are heard: here, processes of this machine."""

    away = False
    """Workers may be on other machines: they see neither the files nor the memory of this one."""
    slots: int | None = None
    """Jobs at a time; None: as many as whoever starts them says."""
    retries = 0
    """Times that a job is begun again whose worker died, as long as nothing more of it is done."""

    def start(self, work: Callable[..., None], *args: object, daemon: bool = False) -> Worker:
        """Start a worker that does `work(end, *args)`."""
        return start_worker(_work_at_end, work, *args, daemon=daemon)

    def ready(self, workers: Iterable[Worker], timeout: float | None = None) -> list[Worker]:
        """Those that have sent something, or have ended."""
        workers = list(workers)
        ready = wait([worker.pipe for worker in workers], timeout)
        return [worker for worker in workers if worker.pipe in ready]

    def task_of(self, task: _Task[_J, _R]) -> _Task[Any, _R]:
        """What a worker does with what `parcel` made of a job."""
        return task

    def parcel(self, job: Any, *, again: bool) -> Any:  # noqa: ANN401 (any job)
        """A job as it is sent; again: a worker began it before."""
        del again
        return job

    def hold(self, job: object) -> AbstractContextManager[object]:
        """Keep others out of what the job writes, where its worker cannot."""
        del job
        return nullcontext()

    def accept(self, job: object, message: object) -> bool:
        """Whether the message is the engine's own, which it has dealt with, and no report."""
        del job, message
        return False

    def name(self, job: object) -> str:
        """What to call a job whose worker died, before the message; empty: nothing."""
        del job
        return ""


_engine = Engine()


def engine() -> Engine:
    """The one in force."""
    return _engine


@contextmanager
def use_engine(other: Engine) -> Iterator[Engine]:
    """Have pools and jobs of the block started by another engine."""
    global _engine
    before, _engine = _engine, other
    try:
        yield other
    finally:
        _engine = before


@dataclass(frozen=True)
class Failure:
    """An error in a result's place; lost: the process died, and the member's state with it."""

    error: Exception
    lost: bool = False


# --- members that live on


class Pool(Closing, Generic[_T_co]):
    """Members in a few processes, or in this one; results are by number, as members were named."""

    def __init__(
        self, make: Callable[[int], _T_co], size: int, workers: int = 1, threads: int = 1
    ) -> None:
        """make: pickled to get to the process; threads: of torch, in this one during a call"""
        self.size = size
        self.members: dict[int, _T_co] = {}
        """Those that live in this process."""
        self.workers: list[Worker] = []
        """None where all live in this process. Of W, number w hosts the members w, w + W, …"""
        self._make_member, self._threads, self._closed = make, threads, False
        self._engine = engine()
        self._started: list[_Call] = []
        self._busy: dict[Worker, list[int]] = {}
        """Members whose answers are still to come."""
        self.remote = min(workers, size) > 1
        """Whether members live in other processes, with which they can be lost."""
        self.away = self.remote and self._engine.away
        """Whether they see no file of this one's."""
        try:
            if self.remote:
                self.workers.extend(self._start() for _ in range(min(workers, size)))
            failures = self._make(range(size))
            for _ in range(self._engine.retries):
                ended = [w for w, worker in enumerate(self.workers) if worker.ended is not None]
                for w in ended:
                    self.workers[w] = self._start()
                again = [number for w in ended for number in self._housemates(w)]
                failures = [*(f for f in failures if not f.lost), *self._make(again)]
            for failure in failures:
                raise failure.error
        except BaseException:
            self.close()
            raise

    def call(
        self,
        method: Callable[Concatenate[_T_co, _P], _R],
        numbers: Iterable[int],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> dict[int, _R | Failure]:
        """Call a method of the members' class, with the same arguments for each one named."""
        # By its name: the member's own class may have its own.
        self._begin(method.__name__, dict.fromkeys(numbers, _pack((args, kwargs))))
        return self.finish()

    def call_each(
        self, method: Callable[[_T_co, _A], _R], arguments: Mapping[int, _A]
    ) -> dict[int, _R | Failure]:
        """Call a method with an argument of its own for each member named."""
        self.begin_each(method, arguments)
        return self.finish()

    def begin_each(
        self, method: Callable[[_T_co, _A], object], arguments: Mapping[int, _A]
    ) -> None:
        """Have members in other processes begin a `call_each`; in this one they wait for `finish`.

        Nothing else may be asked before `finish` has given the answers.
        """
        self._begin(method.__name__, {m: _pack(((own,), {})) for m, own in arguments.items()})

    def finish(self) -> dict[int, Any]:
        """Answers to what was begun."""
        calls, self._started = self._started, []
        answers = self._answers_to(calls)
        return {call.number: self._result(call.number, answers[call.number]) for call in calls}

    def rebuild(self, number: int) -> list[int]:
        """Make a member again; where its process died, all that lived there, in a new process.

        Gives all their numbers, rising. Raises what `make` raises; where the new process dies too,
        they are lost still.
        """
        numbers = [number]
        if self.workers and self.workers[number % len(self.workers)].ended is not None:
            self.workers[number % len(self.workers)] = self._start()
            numbers = self._housemates(number)
        for failure in self._make(numbers):
            if not failure.lost:
                raise failure.error
        return numbers

    def close(self) -> None:
        """Let the members go and end their processes; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self.members.clear()
        for worker in self.workers:
            worker.dismiss(busy=worker in self._busy)
        for worker in self.workers:
            worker.end()

    def _start(self) -> Worker:
        worker = self._engine.start(_host_members, self._threads, daemon=True)
        worker.send(self._make_member)
        return worker

    def _housemates(self, number: int) -> list[int]:
        """Numbers of all that live in the process of one."""
        return list(range(number % len(self.workers), self.size, len(self.workers)))

    def _begin(self, method: str | None, arguments: Mapping[int, bytes]) -> None:
        unknown = [number for number in arguments if not 0 <= number < self.size]
        assert not unknown, f"members are numbered 0 to {self.size - 1}, found {unknown}"
        assert not self._started, "answers to what was begun before have not been taken"
        if self._closed:
            raise RuntimeError("the pool is closed: its members are gone")
        self._started = [_Call(number, method, packed) for number, packed in arguments.items()]
        for w, worker in enumerate(self.workers):
            own = [call for call in self._started if call.number % len(self.workers) == w]
            if own:
                self._busy[worker] = [call.number for call in own]
                worker.send(own)

    def _make(self, numbers: Iterable[int]) -> list[Failure]:
        self._begin(None, dict.fromkeys(numbers, b""))
        return [result for result in self.finish().values() if isinstance(result, Failure)]

    def _answers_to(self, calls: Sequence[_Call]) -> dict[int, _Outcome]:
        """Outcomes of all calls; all processes work at the same time."""
        if not self.workers:
            import torch

            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                return {
                    call.number: _outcome_of(_perform, self.members, self._make_member, call)
                    for call in calls
                }
            finally:
                torch.set_num_threads(before)
        outcomes: dict[int, _Outcome] = {}
        try:
            while self._busy:
                for worker in self._engine.ready(self._busy):
                    answers = worker.receive()
                    if answers is None:
                        answers = dict.fromkeys(self._busy[worker], _Outcome("lost", worker.ended))
                    outcomes |= answers
                    del self._busy[worker]
        except BaseException:
            # Answers that nobody has read would be taken for those of the next call.
            self.close()
            raise
        return outcomes

    def _result(self, number: int, outcome: _Outcome) -> Any:  # noqa: ANN401 (of any method)
        if outcome.kind == "result":
            return _unpack(outcome.content)
        if outcome.kind == "lost":
            others = ", ".join(map(str, self._housemates(number)))
            error: Exception = WorkersLostError(
                f"member {number}: its process (members {others}) ended unexpectedly "
                f"({outcome.content}), perhaps for want of memory. Resume the run with fewer "
                "trainer.workers."
            )
        else:
            error = _error_of(outcome, f"member {number}: ")
        if outcome.kind not in ("lost", "error"):
            raise error
        return Failure(error, lost=outcome.kind == "lost")


class _Call(NamedTuple):
    """What a member is to do; method None: to be made."""

    number: int
    method: str | None
    arguments: bytes  # of its own: two members must not get the same array, and change it


def _host_members(end: End, threads: int) -> None:
    """Host members in a worker of their own, until asked to leave."""
    import torch

    parent = multiprocessing.parent_process()
    if parent is not None:  # an actor ends with its owner

        def leave_with_parent() -> None:
            """However it ends, which a call under way would not notice."""
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=leave_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    members: dict[int, Any] = {}
    with suppress(EOFError, OSError):  # the parent has gone
        make = end.receive()
        while (calls := end.receive()) is not None:
            outcomes = {call.number: _outcome_of(_perform, members, make, call) for call in calls}
            end.send(outcomes)
    end.close()


def _perform(members: dict[int, Any], make: Callable[[int], object], call: _Call) -> bytes:
    """Make a member or call it."""
    if call.method is None:
        members.pop(call.number, None)
        members[call.number] = make(call.number)
        return _pack(None)
    if call.number not in members:
        raise TrainingError("it could not be made when it was last tried: rebuild it")
    args, kwargs = _unpack(call.arguments)
    return _pack(getattr(members[call.number], call.method)(*args, **kwargs))


# --- jobs


@dataclass(frozen=True)
class JobResults(Generic[_R]):
    """Results in the order of the jobs; None: not started, because Ctrl-C or SIGTERM came."""

    results: list[_R | Failure | None]
    stopped: bool

    def all_or_raise(self) -> list[_R]:
        """The results of jobs that were started; raises the first failure."""
        done: list[_R] = []
        for result in self.results:
            if isinstance(result, Failure):
                raise result.error
            if result is not None:
                done.append(result)
        return done


class JobCounts(NamedTuple):
    """Jobs of this process by state, and how often a worker died over one."""

    waiting: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    deaths: int = 0


_counts = JobCounts()


def job_counts() -> JobCounts:
    """So far: those at work, and of all that were done before. Any thread may ask."""
    return _counts


def run_jobs(
    task: _Task[_J, _R],
    jobs: Sequence[_J],
    *,
    workers: int,
    on_report: Callable[[int, object], None] = lambda _k, _message: None,
) -> JobResults[_R]:
    """Run every job; `on_report(k, message)` passes on what the task of job k reports."""
    run = _JobRun(task, jobs, min(workers, len(jobs)), on_report)
    with stop_requests() as stop:
        if engine().away or (workers > 1 and len(jobs) > 1):
            run.in_workers(stop)
        else:
            run.here(stop)
        return JobResults(run.results, stop())


class _JobRun(Generic[_J, _R]):
    """Jobs, those that wait, and who does which of the others.

    A worker is given a job, or None to stop, and gives reports and an outcome, by a pipe of its
    own: one killed while it holds the lock of a shared queue would halt the others.
    """

    def __init__(
        self,
        task: _Task[_J, _R],
        jobs: Sequence[_J],
        workers: int,
        on_report: Callable[[int, object], None],
    ) -> None:
        self.results: list[_R | Failure | None] = [None] * len(jobs)
        self._task, self._jobs, self._workers, self._on_report = task, jobs, workers, on_report
        self._engine, self._held = engine(), ExitStack()
        self._waiting = list(range(len(jobs)))
        self._sent: set[int] = set()
        self._running: dict[Worker, int] = {}
        self._idle: list[Worker] = []
        self._deaths = [0] * len(jobs)
        """Since a job last got on."""
        self._before, self._lost = job_counts(), 0

    def here(self, stop: ShouldStop) -> None:
        """Do all jobs in this process, or those that were begun before a stop."""
        while self._waiting and not stop():
            k = self._waiting.pop(0)
            self._count(running=1)
            try:
                self.results[k] = self._task(self._jobs[k], partial(self._on_report, k), stop)
            except EchelonError as error:
                self.results[k] = Failure(error)
        self._count()

    def in_workers(self, stop: ShouldStop) -> None:
        """The same in workers, side by side."""
        asked = False
        with self._held:
            try:
                while self._waiting or self._running:
                    if stop() and not asked:
                        asked = True
                        for worker in self._running:
                            worker.send(None)
                    # A signal while they are started: the others are not.
                    while self._waiting and len(self._running) < self._workers and not stop():
                        self._begin(self._waiting.pop(0))
                    self._count(running=len(self._running))
                    for worker in self._engine.ready(self._running, timeout=0.2):
                        self._hear(worker)
                    if asked:
                        self._waiting.clear()
            finally:
                for worker in (*self._running, *self._idle):
                    worker.dismiss(busy=worker in self._running)
                for worker in (*self._running, *self._idle):
                    worker.end()
                self._waiting.clear()
                self._count()

    def _begin(self, k: int) -> None:
        here, job = self._engine, self._jobs[k]
        if k not in self._sent:
            try:
                self._held.enter_context(here.hold(job))
            except EchelonError as locked:
                self.results[k] = Failure(locked)
                return
        self._idle = [worker for worker in self._idle if worker.is_alive()]
        worker = self._idle.pop() if self._idle else here.start(_do_jobs, here.task_of(self._task))
        worker.send(here.parcel(job, again=k in self._sent))
        self._sent.add(k)
        self._running[worker] = k

    def _hear(self, worker: Worker) -> None:
        """Take in a report, a result, or that the worker has died."""
        here, outcome, k = self._engine, worker.receive(), self._running[worker]
        if outcome is not None and outcome.kind == "report":
            if here.accept(self._jobs[k], outcome.content):
                self._deaths[k] = 0
            else:
                self._on_report(k, outcome.content)
            return
        del self._running[worker]
        # One on a node that is gone, and does not know it yet, loses its own workers.
        goes_on = self._deaths[k] < here.retries
        if outcome is None or (_lost_workers(outcome) and goes_on):
            worker.end()
            self._deaths[k] += 1
            self._lost += 1
            if goes_on:
                self._waiting.insert(0, k)
                return
        if outcome is not None:
            done = outcome.kind == "result"
            self.results[k] = outcome.content if done else Failure(_error_of(outcome))
            self._idle.append(worker)
            return
        error = TrainingError(
            f"{here.name(self._jobs[k])}a worker process ended unexpectedly ({worker.ended}), "
            "perhaps for want of memory. Go on with --resume, with fewer --workers."
        )
        self.results[k] = Failure(error)

    def _count(self, running: int = 0) -> None:
        global _counts
        before = self._before
        failed = sum(isinstance(result, Failure) for result in self.results)
        done = sum(result is not None for result in self.results) - failed
        _counts = JobCounts(
            *(len(self._waiting), running, before.done + done, before.failed + failed),
            before.deaths + self._lost,
        )


def _do_jobs(end: End, task: _Task[_J, _R]) -> None:
    """Do one job after the other in a worker of its own, and say how each went."""
    stopped = False

    def should_stop() -> bool:
        # While a job is done nothing is sent but the wish to stop; where the parent was killed,
        # the pipe has an end, which counts as one: else we would train on unwatched.
        nonlocal stopped
        stopped = stopped or end.poll()
        return stopped

    def send(outcome: _Outcome) -> None:
        with suppress(OSError):  # nobody is there any more
            end.send(outcome)

    def report(message: object) -> None:
        send(_Outcome("report", message))

    with suppress(EOFError, OSError):  # the parent has gone
        while not stopped and (job := end.receive()) is not None:
            send(_outcome_of(task, job, report, should_stop))
    end.close()
    sys.exit(0)


# --- what is sent


class _Outcome(NamedTuple):
    """What came of a call; kind: result, error, os, bug, lost, report (of a job under way)."""

    kind: str
    content: Any


def _outcome_of(function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> _Outcome:
    try:
        return _Outcome("result", function(*args, **kwargs))
    except EchelonError as error:
        return _Outcome("error", (type(error), str(error)))
    except OSError as error:
        return _Outcome("os", (error.errno, error.strerror or str(error), error.filename))
    except Exception:  # noqa: BLE001 (carried to the parent, which shows it as a bug)
        return _Outcome("bug", traceback.format_exc())


def _error_of(outcome: _Outcome, who: str = "") -> Exception:
    """The error that was raised in the other process."""
    if outcome.kind == "error":
        error_class, text = outcome.content
        error: EchelonError = EchelonError.__new__(error_class)
        Exception.__init__(error, who + text)
        return error
    if outcome.kind == "os":
        return OSError(*outcome.content)
    return RuntimeError(f"{who}in a worker process:\n{outcome.content}")


def _lost_workers(outcome: _Outcome) -> bool:
    """Whether a job failed for want of its own workers."""
    return outcome.kind == "error" and issubclass(outcome.content[0], WorkersLostError)


class _Pickler(ForkingPickler):
    """Tensors go by value: torch would share memory by descriptors that die with the process."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 (of pickle's making)
        torch = sys.modules.get("torch")  # without it there are no tensors
        if torch is not None and isinstance(value, torch.Tensor):
            return _tensor_from, (value.detach().cpu().contiguous().numpy(),)
        if isinstance(value, MappingProxyType):
            return _read_only, (dict(value),)
        return NotImplemented


def _read_only(values: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(values)


def _tensor_from(values: Any) -> object:  # noqa: ANN401 (an array: numpy is imported on use)
    import numpy as np
    import torch

    return torch.from_numpy(values if values.flags.writeable else np.array(values))


def _pack(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _unpack(data: bytes) -> Any:  # noqa: ANN401 (whatever was packed)
    return ForkingPickler.loads(data)  # between our own processes only


# --- processes


class End:
    """A worker's end of what connects it with whoever started it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, message: object) -> None:
        """Give it to whoever started this worker."""
        self._pipe.send_bytes(_pack(message))

    def receive(self) -> Any:  # noqa: ANN401 (whatever is sent)
        """Wait for the next; raises EOFError or OSError where nobody is there any more."""
        return _unpack(self._pipe.recv_bytes())

    def poll(self) -> bool:
        """Whether there is something to receive, or nobody to send it."""
        return self._pipe.poll()

    def close(self) -> None:
        """Say no more."""
        self._pipe.close()


@dataclass(eq=False)
class Worker:
    """A process, and our end of the pipe between it and us; ended: how, where it died."""

    process: Any
    pipe: Connection
    ended: str | None = None

    def send(self, message: object) -> None:
        if self.ended is not None:
            return
        data = _pack(message)
        try:
            self.pipe.send_bytes(data)
        except OSError:  # nobody reads any more
            self._note_end()

    def receive(self) -> Any:  # noqa: ANN401 (whatever it sends)
        """Wait for what it sends, which is never None: that is, it has ended."""
        try:
            return _unpack(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self._note_end()
            return None

    def is_alive(self) -> bool:
        """Whether it can be given something to do."""
        return bool(self.process.is_alive())

    def dismiss(self, *, busy: bool) -> None:
        """Ask it to leave, or end it where it is at work and would not hear."""
        if busy and self.ended is None:
            self.process.kill()
        else:
            self.send(None)

    def end(self) -> None:
        """Wait until it has left, not for ever."""
        self.process.join(_PATIENCE_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.pipe.close()

    def _note_end(self) -> None:
        self.process.join()
        code = self.process.exitcode
        self.ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def start_worker(work: Callable[..., None], *args: object, daemon: bool = False) -> Worker:
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
        with _environment_of_helper(temporary):
            forkserver.ensure_running()  # the workers inherit what it blocks
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return Worker(process, ours)


def _work_at_end(pipe: Connection, work: Callable[..., None], *args: object) -> None:
    work(End(pipe), *args)


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
    below = "/echelon-mp-0123456789abcdef/pymp-12345678/listener-12345678"
    long = len(os.fsencode(tempfile.gettempdir())) + len(below) > 107  # bytes of a socket's path
    if long or multiprocessing.parent_process() is not None:
        return None
    stack = ExitStack()
    directory = stack.enter_context(scratch_directory("mp"))
    # After the workers have been waited for, and after what multiprocessing has in it.
    util.Finalize(None, stack.close, exitpriority=-1000)
    return directory


@contextmanager
def _environment_of_helper(temporary: Path | None) -> Iterator[None]:
    """Have a helper started meanwhile see other variables, and multiprocessing its directory."""
    blas = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["OPENBLAS_NUM_THREADS"] = blas or str(len(os.sched_getaffinity(0)))
    if temporary is not None:
        environment["TMPDIR"] = str(temporary)
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
