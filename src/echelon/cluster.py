"""Workers on a Ray cluster, behind the interface of local processes (`echelon.workers`).

    with ray_engine("auto") as engine, use_engine(engine):
        run_jobs(train_seed, jobs, workers=8)

A worker is an actor. In a thread of its own it does the same work as a local process, reading from
one queue and writing to another: `put` fills the first, `take` empties the second.

1. **Data.** What is sent is pickled, as for processes. Arrays that nobody can write to (worlds,
   tables, prepared sets) and long byte strings go into the object store instead, each once,
   whoever it is sent to; workers read them there without a copy.
2. **Files.** A worker may be on another machine. A `Portable` job says which directories it works
   in; their files go along, it works on them in a scratch directory of the node, and what it
   changes comes back between two rounds. Only the driver writes the run directory.
3. **Deaths.** An actor that is lost is not restarted by Ray, which would restart it empty: pools
   put its members back and do the phase again, `run_jobs` sends the job again with the files of
   its last checkpoint. So results are those of a run in which nobody died.
4. **Numbers.** They are the same on equal processors with equal packages. A worker with another
   Python, code or version of a package is refused; another processor is warned of.

An actor reserves its threads and its memory. Where actors are lost the machine they were on may be
gone for good: those that replace them reserve memory only, and share the processors that are left.
A pool within a job (the members of a hierarchy) has actors too, which end with the job's.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import platform
import queue
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from echelon.errors import TrainingError, UsageError, shorten
from echelon.files import exclusive_lock, scratch_directory, staging_directory, swap_directory
from echelon.files import write_atomic as write_file
from echelon.stopping import SIGNALS
from echelon.workers import (
    End,
    Engine,
    Report,
    ShouldStop,
    Worker,
    _Call,
    _pack,
    _Pickler,
    _unpack,
    use_engine,
)

log = logging.getLogger(__name__)

EXTRA = "scale"
_SHARED_BYTES = 64 * 1024
"""From which an array or byte string goes into the object store."""
_BYTES_KEPT = 4
"""Long byte strings whose place in the store is remembered: one goes to many workers in a row."""
_TAKE_SECONDS, _REACH_SECONDS, _START_SECONDS = 10.0, 5.0, 300.0
_SYNC_SECONDS = 5.0
"""Between two rounds after which changed files come back, without a new checkpoint."""
_RETRIES = 3
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = b"\x04"
"""How a client of gRPC begins, and the kind of what it is answered."""
_STORE_BYTES = 512 * 1024 * 1024
"""Of the object store of a cluster that is started for one command; what is more spills to disk."""
_LOCKED = (
    *("torch", "numpy", "numba", "scipy", "pandas", "polars", "pyarrow", "TA-Lib", "peft"),
    *("stable-baselines3", "sb3-contrib", "scikit-learn", "ray"),
)
"""Packages whose version results depend on."""
_HIDDEN = "tables"
"""Directories of mapped files, which are made again where they are needed."""


@runtime_checkable
class Portable(Protocol):
    """A job that can be done on another machine."""

    @property
    def title(self) -> str:
        """What to call it in messages."""

    @property
    def home(self) -> Path:
        """The directory below which it reads and writes."""

    @property
    def trees(self) -> tuple[str, ...]:
        """Directories below `home` whose files go along and come back; '.' is all of it."""

    @property
    def locks(self) -> tuple[Path, ...]:
        """Files that it locks while it is at work, which the driver does in its place."""

    def at(self, home: Path) -> Self:
        """The same job with another home."""

    def again(self) -> Self:
        """The same job, going on from the files in its home."""


class Files(NamedTuple):
    """Changes below a job's home, by relative path.

    files: each written by itself; folders: content of those that are replaced as a whole
    gone: files and folders that are no longer there
    """

    files: dict[str, Any]
    folders: dict[str, dict[str, Any]]
    gone: tuple[str, ...]


class _Parcel(NamedTuple):
    """A job and the files it begins with."""

    job: Any
    files: dict[str, Any]


class _Facts(NamedTuple):
    """What a worker is, which it says before anything else."""

    where: str
    versions: dict[str, str]
    processor: str


class _Bye(NamedTuple):
    """The worker's thread has ended; error: by which, empty: in order."""

    error: str


# --- the driver's side


class RayEngine(Engine):
    """Workers as actors of the cluster that this process is connected to."""

    away = True
    retries = _RETRIES

    def __init__(self, cpus: float, memory: int, inside: float = 0.0, openblas: int = 0) -> None:
        """cpus, memory: that an actor reserves; inside: CPUs of the actors that it starts

        openblas: threads of an actor, 0: as here
        """
        self.cpus, self.memory, self.inside = cpus, memory, inside
        self.openblas = openblas or _openblas_threads()
        self.deaths = 0
        self.sent = self.heard = 0
        """Bytes given to actors, besides those in the object store, and said by them."""
        self.store = Store()
        self._facts = own_facts()
        self._warned: set[str] = set()

    def start(self, work: Callable[..., None], *args: object, daemon: bool = False) -> Worker:
        """Start an actor; nobody waits until it is there."""
        del daemon  # an actor ends with its owner
        data = _pack((work, args))

        def actor() -> Any:  # noqa: ANN401 (Ray's handle)
            options = {
                "num_cpus": 0 if self.deaths else self.cpus,
                "memory": self.memory or None,
                "max_restarts": 0,
                "max_concurrency": 4,
            }
            inside = (0.0 if self.deaths else self.inside, self.memory, 0.0, self.openblas)
            return import_ray().remote(_Host).options(**options).remote(data, inside, sys.path)

        return RayWorker(self, actor)

    def ready(self, workers: Iterable[Worker], timeout: float | None = None) -> list[Worker]:
        """Those that have sent something, or have ended."""
        import ray

        mine = [worker for worker in workers if isinstance(worker, RayWorker)]
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if heard := [worker for worker in mine if worker.heard or worker.ended is not None]:
                return list(heard)
            takes = {worker.take(): worker for worker in mine}
            left = 1.0 if until is None else min(1.0, max(0.0, until - time.monotonic()))
            done, _ = ray.wait(list(takes), num_returns=len(takes), timeout=left)
            for ref in done or ray.wait(list(takes), timeout=0)[0]:
                takes[ref].hear()
            for worker in mine:
                worker.refuse_waiting()
            if not done and until is not None and time.monotonic() >= until:
                return [worker for worker in mine if worker.heard or worker.ended is not None]

    def room(self) -> int:
        """Actors that fit on all nodes by their CPUs."""
        ray = import_ray()
        nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        return sum(int(cpus // self.cpus) for cpus in nodes)

    def task_of(self, task: Callable[..., Any]) -> Callable[..., Any]:
        """The task, with a job's files around it."""
        return _Away(task)

    def parcel(self, job: Any, *, again: bool) -> _Parcel:  # noqa: ANN401 (any job)
        """A job with the files it begins with."""
        if not isinstance(job, Portable):
            return _Parcel(job, {})
        return _Parcel(job.again() if again else job, read_trees(job.home, job.trees))

    def hold(self, job: object) -> AbstractContextManager[object]:
        """The locks of a job, which its worker cannot hold."""
        stack = ExitStack()
        for path in job.locks if isinstance(job, Portable) else ():
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(path, f"the training in {path.parent}"))
        return stack

    def accept(self, job: object, message: object) -> bool:
        """Write what a job changed."""
        if not isinstance(message, Files):
            return False
        assert isinstance(job, Portable), "only these have files"
        write_changes(job.home, message)
        return True

    def name(self, job: object) -> str:
        """For a message."""
        return f"{job.title}: " if isinstance(job, Portable) else ""

    def check(self, facts: _Facts) -> None:
        """Refuse a worker whose results would be others."""
        for name, mine in self._facts.versions.items():
            theirs = facts.versions.get(name, "missing")
            if theirs != mine:
                raise UsageError(
                    f"the Ray worker on {facts.where} has {name} {theirs}, this machine {mine}: "
                    "its results would be others. Install the same Echelon with the same lock on "
                    "every node."
                )
        if facts.processor != self._facts.processor and facts.where not in self._warned:
            self._warned.add(facts.where)
            log.warning(
                "the Ray worker on %s has another processor (%s, here %s): results may differ "
                "from those of this machine in the last digits",
                *(facts.where, facts.processor, self._facts.processor),
            )


class RayWorker(Worker):
    """An actor, and what was heard of it."""

    def __init__(self, engine: RayEngine, start: Callable[[], Any]) -> None:
        super().__init__(start(), None)  # type: ignore[arg-type]
        self._start = start
        self._early: list[tuple[bytes, list[Any]]] = []
        """What it was given before it was at work."""
        self._engine, self._where = engine, ""
        self._started_at = time.monotonic()
        self.heard: collections.deque[Any] = collections.deque()
        self._taking: Any = None
        self._number = 0

    def send(self, message: object) -> None:
        """Give it something; nothing where it has ended."""
        if self.ended is not None:
            return
        data, refs = _pickle(message, self._engine.store)
        self._engine.sent += len(data)
        if not self._where:
            self._early.append((data, refs))
        self._put(data, refs)

    def _put(self, data: bytes, refs: list[Any]) -> None:
        self.process.put.remote(self._number, data, refs)
        self._number += 1

    def take(self) -> Any:  # noqa: ANN401 (Ray's reference)
        """What is asked of it now: all that it has to say."""
        if self._taking is None:
            self._taking = self.process.take.remote()
        return self._taking

    def hear(self) -> None:
        """Take in what it has said; raises where it is no worker for us."""
        import ray

        taking, self._taking = self._taking, None
        try:
            messages = ray.get(taking)
        except ray.exceptions.RayError as error:
            if self._where or "node has died" not in str(error):
                self._lose(str(error))
                return
            # Ray had not noticed yet that the node was gone: no work was lost, so none is done.
            self._engine.deaths += 1
            self.process, self._number = self._start(), 0
            for data, refs in self._early:
                self._put(data, refs)
            return
        for data, refs in messages:
            self._engine.heard += len(data)
            message = _unpickle(data, refs, self._engine.store)
            if isinstance(message, _Facts):
                self._where, self._early = message.where, []
                self._engine.check(message)
            elif isinstance(message, _Bye):
                self._lose(message.error or "it left")
            else:
                self.heard.append(message)

    def receive(self) -> Any:  # noqa: ANN401 (whatever it sends)
        """Wait for what it sends, which is never None: that is, it has ended."""
        while not self.heard and self.ended is None:
            self._engine.ready([self])
        return self.heard.popleft() if self.heard else None

    def refuse_waiting(self) -> None:
        """Raise where no node has had room for it for long."""
        if self._where or self.ended or time.monotonic() - self._started_at < _START_SECONDS:
            return
        raise TrainingError(
            f"no node of the Ray cluster had room for an actor ({self._engine.cpus:g} CPUs, "
            f"{self._engine.memory / 1e9:.1f} GB) in {_START_SECONDS:.0f} seconds. Ask for fewer "
            "workers, or add nodes."
        )

    def is_alive(self) -> bool:
        """Whether it can be given something to do."""
        return self.ended is None

    def dismiss(self, *, busy: bool) -> None:
        """Ask it to leave, or end it where it is at work and would not hear."""
        if not busy:
            self.send(None)

    def end(self) -> None:
        """End it."""
        import ray

        with suppress(ray.exceptions.RayError, ValueError):  # gone already
            ray.kill(self.process, no_restart=True)
        self.ended = self.ended or "dismissed"

    def _lose(self, text: str) -> None:
        """Note that it has ended, and why."""
        why = shorten(text, 600)
        if any(words in text for words in ("low on memory", "memory pressure", "OutOfMemory")):
            why = f"out of memory; {why}"
        self._engine.deaths += 1
        self.ended = f"{self._where or 'before it was at work'}: {why}"


@contextmanager
def ray_engine(address: str, cpus: float, memory: int) -> Iterator[RayEngine]:
    """Connect with a cluster, or start one on this machine for as long as the block lasts.

    address: HOST:PORT; "auto": of the cluster that this machine is a node of, or one of its own;
    "local": one of its own. cpus, memory: that an actor reserves
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with ExitStack() as stack:
        where = reach_cluster(address)
        settings = stack.enter_context(_own_cluster()) if where is None else {"address": where}
        ray = import_ray()
        try:
            ray.init(**settings, log_to_driver=False, configure_logging=False)
        except (RuntimeError, ConnectionError, ValueError, OSError) as error:
            raise UsageError(
                f"--on ray:{address}: {shorten(error, 400)} Start the cluster with the Ray and "
                "Python of this machine (see docs/guide/scale.md)."
            ) from None
        finally:  # Ray takes them, and would leave without a checkpoint
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler)
        stack.callback(ray.shutdown)
        engine = RayEngine(cpus, _fitting_memory(ray, memory))
        with use_engine(engine):
            yield engine


def reach_cluster(address: str) -> str | None:
    """HOST:PORT of a head that is there, None: a cluster is to be started; raises where none is."""
    if importlib.util.find_spec("ray") is None:
        import_ray()  # says which extra has it
    where = _cluster_of(address)
    if where is not None:
        _refuse_unreachable(where)
    return where


def import_ray() -> Any:  # noqa: ANN401 (a module)
    """The package, or which extra has it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UsageError(
            f"Ray is not installed: it comes with the extra {EXTRA!r} (pip install "
            f"'echelon[{EXTRA}]')."
        ) from None
    logging.getLogger("ray").setLevel(logging.ERROR)  # what dies is said by whoever asked for it
    return ray


def _fitting_memory(ray: Any, memory: int) -> int:  # noqa: ANN401 (a module)
    """The memory of an actor, where a node has as much."""
    most = max(node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"])
    if memory > most:
        raise UsageError(
            f"an actor reserves {memory / 1e9:.1f} GB (compute.memory_gb), but the largest node of "
            f"the Ray cluster has {most / 1e9:.1f} GB. Lower it, or add a larger node."
        )
    return memory


def _cluster_of(address: str) -> str | None:
    """HOST:PORT; None: start one."""
    if address == "local":
        return None
    if address.startswith("ray://"):
        raise UsageError(
            f"--on ray:{address}: Ray's client is not supported. Run the command on a node of the "
            "cluster, with HOST:PORT of its head."
        )
    if address == "auto":
        given = os.environ.get("RAY_ADDRESS", "")
        note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray/ray_current_cluster")
        if given in ("", "auto", "local"):
            given = note.read_text().strip() if given != "local" and note.is_file() else ""
        return given or None
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--on ray:{address}: expected HOST:PORT, auto or local.")
    return address


def _refuse_unreachable(address: str) -> None:
    """Ask quickly whether the head of a cluster is there; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), _REACH_SECONDS) as plain,
            _wrap_tls(plain) as connection,
        ):
            connection.sendall(_GREETING)
            answer = connection.recv(4)
    except OSError as error:
        raise UsageError(
            f"--on ray:{address}: nobody answers there ({error.strerror or error}). Start the "
            "cluster (`ray start --head`), or name the address it says."
        ) from None
    if answer[3:] != _SETTINGS_FRAME:
        raise UsageError(
            f"--on ray:{address}: no head of a Ray cluster answers there, or one with TLS, for "
            "which RAY_USE_TLS and its certificates must be set here too. Name the address that "
            "`ray start --head` says."
        )


def _wrap_tls(plain: socket.socket) -> socket.socket:
    """The connection as Ray would have it: with TLS where its variables say so."""
    given = os.environ
    if given.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return plain
    context = ssl.create_default_context(cafile=given.get("RAY_TLS_CA_CERT"))
    context.check_hostname = False  # nor does Ray
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(
        given.get("RAY_TLS_SERVER_CERT", ""), given.get("RAY_TLS_SERVER_KEY", "")
    )
    return context.wrap_socket(plain)


@contextmanager
def _own_cluster() -> Iterator[dict[str, Any]]:
    """Settings of a cluster of this machine alone: on loopback, gone at the end."""
    # Ray would bind to the network's address; where clusters are not supported it does not. Read
    # when it is imported.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    with ExitStack() as stack:
        settings: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        }
        directory = stack.enter_context(scratch_directory("ray"))
        if len(os.fsencode(directory)) < 45:  # its sockets have names of up to 107 bytes
            settings["_temp_dir"] = str(directory)
        yield settings


# --- the actor's side


class _Host:
    """The actor: a thread that does the work, and the two queues between it and its owner."""

    def __init__(self, work: bytes, inside: tuple[float, int, float, int], path: list[str]) -> None:
        sys.path += [place for place in path if place not in sys.path]  # as processes have it
        self._in: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._early: dict[int, Any] = {}
        self._next, self._lock = 0, threading.Lock()
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(work, inside), daemon=True).start()

    def put(self, number: int, data: bytes, refs: list[Any]) -> None:
        """Give the work something, in the order of the numbers: calls may overtake each other."""
        with self._lock:
            self._early[number] = data, refs
            while self._next in self._early:
                self._in.put(self._early.pop(self._next))
                self._next += 1

    def take(self) -> list[Any]:
        """What the work has sent, after a while also nothing."""
        messages = []
        with suppress(queue.Empty):
            messages.append(self._out.get(timeout=_TAKE_SECONDS))
            while True:
                messages.append(self._out.get_nowait())
        return messages

    def _work(self, work: bytes, inside: tuple[float, int, float, int]) -> None:
        error = ""
        engine = RayEngine(*inside)
        end = _QueueEnd(self._in, self._out, engine.store)
        try:
            # Before numpy is imported, whose OpenBLAS reads it.
            os.environ["OPENBLAS_NUM_THREADS"] = str(engine.openblas)
            end.send(own_facts())
            function, args = _unpack(work)
            with use_engine(engine):
                function(end, *args)
        except SystemExit:
            pass
        except BaseException as failure:  # noqa: BLE001 (said to the owner, which shows it)
            import traceback

            error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
        end.send(_Bye(error))


class _QueueEnd(End):
    """The worker's end of the two queues."""

    def __init__(
        self, incoming: queue.SimpleQueue[Any], outgoing: queue.SimpleQueue[Any], store: Store
    ) -> None:
        self._in, self._out, self._store = incoming, outgoing, store

    def send(self, message: object) -> None:
        """Give it to the owner, when it asks."""
        self._out.put(_pickle(message, self._store))

    def receive(self) -> Any:  # noqa: ANN401 (whatever is sent)
        """Wait for the next."""
        data, refs = self._in.get()
        return _unpickle(data, refs, self._store)

    def poll(self) -> bool:
        """Whether there is something to receive."""
        return not self._in.empty()

    def close(self) -> None:
        """Nothing: queues end with the actor."""


class _Away:
    """A task, and the files of its job in a scratch directory of the node."""

    def __init__(self, task: Callable[..., Any]) -> None:
        self._task = task

    def __call__(self, parcel: _Parcel, report: Report, should_stop: ShouldStop) -> Any:  # noqa: ANN401
        """Do the job; what it changes is reported between rounds and at the end."""
        job = parcel.job
        if not isinstance(job, Portable):
            return self._task(job, report, should_stop)
        with scratch_directory("job") as scratch:
            home = scratch / (job.home.name or "home")
            write_changes(home, Files(parcel.files, {}, ()))
            watch = TreeWatch(home, job.trees)

            def stop_after_sync() -> bool:
                if (changes := watch.changes(force=False)) is not None:
                    report(changes)
                return should_stop()

            try:
                return self._task(job.at(home), report, stop_after_sync)
            finally:
                if (changes := watch.changes(force=True)) is not None:
                    report(changes)


# --- files of jobs


def read_trees(home: Path, trees: Iterable[str]) -> dict[str, Any]:
    """Content of all files of the trees, by path below `home`."""
    return {name: _content(home / name) for name in _marks(home, trees)}


def write_changes(home: Path, changes: Files) -> None:
    """Bring a directory to where another one is, so that a kill leaves it whole.

    Folders are replaced as a whole, after the files and in the order of their names: the log and
    the best weights stand before the checkpoint that goes with them.
    """
    for name, content in sorted(changes.files.items()):
        write_file(home / name, bytes(content))
    for name, content in sorted(changes.folders.items()):
        target = home / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with staging_directory(target.parent, f".{target.name}-") as staging:
            for inside, data in content.items():
                write_file(staging / inside, bytes(data))
            swap_directory(staging, target)
    for name in changes.gone:
        doomed = home / name
        if doomed.is_dir():
            aside = doomed.with_name(f".{doomed.name}-removed")
            doomed.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            doomed.unlink(missing_ok=True)


@dataclass
class TreeWatch:
    """What changed in a job's directories since it was last asked."""

    home: Path
    trees: tuple[str, ...]
    _known: dict[str, tuple[int, int]] = field(default_factory=dict)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._known, self._at = _marks(self.home, self.trees), time.monotonic()

    def changes(self, *, force: bool) -> Files | None:
        """None: nothing, or it may wait (without `force`) until there is a checkpoint."""
        marks = _marks(self.home, self.trees)
        folders = {str(Path(name).parent) for name in marks}
        before = {str(Path(name).parent) for name in self._known}
        early = time.monotonic() - self._at < _SYNC_SECONDS
        changed = {name for name, mark in marks.items() if self._known.get(name) != mark}
        lost = set(self._known) - set(marks)
        if not (changed or lost) or (early and not force and folders == before):
            return None
        self._known, self._at = marks, time.monotonic()
        outer = {str(parent) for name in folders for parent in Path(name).parents}
        # A folder of files is replaced as a whole, but for those that stand open or were there.
        roots = {str(Path(tree)) for tree in self.trees} - {"encoder"}
        touched = {str(Path(name).parent) for name in changed | lost} & folders
        whole = {name for name in touched if name not in outer | roots}
        contents = {
            folder: {
                Path(name).name: _content(self.home / name)
                for name in marks
                if str(Path(name).parent) == folder
            }
            for folder in whole
        }
        files = {n: _content(self.home / n) for n in changed if str(Path(n).parent) not in whole}
        gone = before - folders
        single = {name for name in lost if str(Path(name).parent) not in whole | gone}
        return Files(files, contents, tuple(sorted(gone | single)))


def _marks(home: Path, trees: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size and time of every file of the trees that others may see."""
    marks = {}
    for tree in trees:
        for place, folders, files in os.walk(home / tree):
            folders[:] = [name for name in folders if name[0] != "." and name != _HIDDEN]
            for name in files:
                if name[0] != ".":
                    path = Path(place, name)
                    facts = path.stat()
                    marks[str(path.relative_to(home))] = (facts.st_size, facts.st_mtime_ns)
    return marks


def _content(path: Path) -> Any:  # noqa: ANN401 (bytes, or an array of them that may be shared)
    import numpy as np

    data = np.fromfile(path, dtype=np.uint8)
    data.flags.writeable = False
    return data


# --- what is sent


class Store:
    """Where arrays and byte strings are in the object store, while they are in use here."""

    def __init__(self) -> None:
        self.bytes_put = 0
        self._arrays: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._bytes: collections.OrderedDict[int, tuple[bytes, Any]] = collections.OrderedDict()

    def place_of(self, value: Any) -> Any:  # noqa: ANN401 (an array or bytes, Ray's reference)
        """The reference of a value; put there now if it is not yet."""
        import ray

        if isinstance(value, bytes):
            known = self._bytes.get(id(value))
            if known is None:
                known = self._bytes[id(value)] = (value, ray.put(value))
                self.bytes_put += len(value)
                while len(self._bytes) > _BYTES_KEPT:
                    self._bytes.popitem(last=False)
            return known[1]
        if id(value) not in self._arrays:
            self.remember(value, ray.put(value))
            self.bytes_put += value.nbytes
        return self._arrays[id(value)][1]

    def value_of(self, ref: Any) -> Any:  # noqa: ANN401 (see place_of)
        """The array of a reference, where it is in use here."""
        for known, place in self._arrays.values():
            if place == ref:
                return known()
        return None

    def remember(self, array: Any, ref: Any) -> None:  # noqa: ANN401 (see place_of)
        """Keep where an array came from, as long as somebody has it."""
        number = id(array)

        def forget(_: object) -> None:
            self._arrays.pop(number, None)

        self._arrays[number] = weakref.ref(array, forget), ref


class _StorePickler(_Pickler):
    """Long values that nobody changes go by reference."""

    def __init__(self, file: Any, store: Store, refs: list[Any]) -> None:  # noqa: ANN401
        super().__init__(file)
        self._own_store, self._refs = store, refs

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 (of pickle's making)
        if isinstance(value, _Call) and len(value.arguments) >= _SHARED_BYTES:
            return _call_with, (value.number, value.method, self._number_of(value.arguments))
        if _is_shareable(value):
            return _value_at, (self._number_of(value),)
        return super().reducer_override(value)

    def _number_of(self, value: Any) -> int:  # noqa: ANN401 (an array or bytes)
        self._refs.append(self._own_store.place_of(value))
        return len(self._refs) - 1


class _Arriving(threading.local):
    """What a message that is being unpickled refers to."""

    refs: Sequence[Any] = ()
    store: Store


_arriving = _Arriving()


def _value_at(number: int) -> Any:  # noqa: ANN401 (an array or bytes)
    """The value of a reference: one object, however many there are to it."""
    import ray

    ref = _arriving.refs[number]
    known = _arriving.store.value_of(ref)
    if known is not None:
        return known
    value = ray.get(ref)
    if not isinstance(value, bytes):
        _arriving.store.remember(value, ref)
    return value


def _call_with(number: int, method: str | None, arguments: int) -> _Call:
    return _Call(number, method, _value_at(arguments))


def _pickle(value: object, store: Store) -> tuple[bytes, list[Any]]:
    file, refs = io.BytesIO(), list[Any]()
    _StorePickler(file, store, refs).dump(value)
    return file.getvalue(), refs


def _unpickle(data: bytes, refs: Sequence[Any], store: Store) -> Any:  # noqa: ANN401
    _arriving.refs, _arriving.store = refs, store
    try:
        return _unpack(data)
    finally:
        _arriving.refs = ()


def _is_shareable(value: Any) -> bool:  # noqa: ANN401 (anything)
    """Long, and so that nobody can change it."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.hasobject:
        return False
    part: Any = value
    if part.nbytes < _SHARED_BYTES:
        return False
    while isinstance(part, numpy.ndarray):
        if part.flags.writeable:
            return False
        part = part.base
    return True


def freeze(value: Any) -> Any:  # noqa: ANN401 (any tree of ours)
    """The value, whose arrays can no longer be written to: they go to workers without a copy."""
    numpy = sys.modules["numpy"]
    parts: Iterable[Any] = ()
    if isinstance(value, numpy.ndarray):
        value.flags.writeable = False
    elif isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif type(value).__module__.startswith("echelon."):
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        freeze(part)
    return value


# --- what a worker is


@cache
def own_facts() -> _Facts:
    """Of this process."""
    versions = {"Python": platform.python_version(), "Echelon's code": _code_digest()}
    for name in _LOCKED:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    where = f"{socket.gethostname()} (process {os.getpid()})"
    with suppress(OSError):  # an actor's output is a file
        log_file = os.readlink("/proc/self/fd/1")  # noqa: PTH115 (no path where it is a terminal)
        if log_file.endswith((".out", ".log")):
            where = f"{socket.gethostname()} (process {os.getpid()}, log {log_file})"
    return _Facts(where, versions, _processor())


def _code_digest() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _processor() -> str:
    lines: Mapping[str, str] = {}
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        pairs = (line.partition(":") for line in text.splitlines())
        lines = {name.strip(): value.strip() for name, _, value in pairs}
    flags = hashlib.sha256(lines.get("flags", "").encode()).hexdigest()[:8]
    return f"{lines.get('model name', platform.machine())}, features {flags}"


def _openblas_threads() -> int:
    """Threads of OpenBLAS, on which the rounding of products depends."""
    given = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    return int(given) if given.isdecimal() else len(os.sched_getaffinity(0))
