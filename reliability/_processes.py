"""Processes of `reliability.kill`: forked from one that has imported everything and used nothing.

Python, torch and the libraries take seconds to import, and a command here less than one. Forking
is safe as long as the process has no threads but those of `HARMLESS_THREADS`, so it never reads a
table itself: what has to, is done `in_process`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

HARMLESS_THREADS = frozenset({"jemalloc_bg_thd", "polars-ooc-clea"})
"""Of polars and pyarrow, from their import on: jemalloc's know of forks, polars' cleaner sleeps."""
_tolerated: set[str] = set()
"""Ids of threads that `tolerate_threads` found."""
RUN_SECONDS = 180.0
"""A command takes a second or a few; one that takes longer than this hangs."""


def preload() -> None:
    """Import all of echelon, so that forked processes need not; nothing is used yet."""
    os.environ["MPLBACKEND"] = "Agg"
    for name in ("torch._dynamo", "scipy.stats", "matplotlib.pyplot"):
        importlib.import_module(name)
    package = importlib.import_module("echelon")
    for module in pkgutil.walk_packages(package.__path__, "echelon."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def tolerate_threads() -> None:
    """Take the threads that there are for harmless: call it where one sleeps from an import on."""
    _tolerated.update(os.listdir("/proc/self/task"))  # noqa: PTH208 (names)
    _tolerated.discard(str(os.getpid()))


def _threads() -> set[str]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name not in _tolerated]
    names = Counter((task / "comm").read_text().strip() for task in tasks)
    names[Path("/proc/self/comm").read_text().strip()] -= 1
    return {name for name, count in names.items() if count > 0}


def fork(work: Callable[[], int], log: Path) -> int:
    """Do `work` in a process of its own session, what it prints in a file; its process id."""
    foreign = _threads() - HARMLESS_THREADS
    if foreign:
        raise RuntimeError(f"cannot fork safely: threads {', '.join(sorted(foreign))}")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        # What the parent cleans up when it ends, its temporary directories, stays its own.
        for inherited in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            inherited.atexit = False
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(handle, stream)
        code = work()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    except BaseException:  # noqa: BLE001 (this process ends here, whatever happened)
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def lend_forkserver() -> None:
    """Make a copy of this process be Python's forkserver, when the command comes to need one.

    A new interpreter would import torch for it, which takes longer than the command. What the
    copy runs from then on is `multiprocessing.forkserver.main`, as the new one would.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as `workers` does
            _, handles, _, _ = socket.recv_fds(theirs, 1, 2)
            if len(handles) == 2:  # else the command has ended, and needed none
                forkserver.main(handles[0], handles[1], [])
        finally:
            os._exit(0)
    theirs.close()
    spawn = util.spawnv_passfds

    def lend(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(args[-1]) or ours.fileno() < 0:
            return spawn(path, args, passfds)
        socket.send_fds(ours, [b"!"], list(passfds))
        ours.close()
        return pid

    util.spawnv_passfds = lend


def session_of(pid: int) -> int | None:
    """The session of a process, None: it has ended (or is a zombie)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if status[0] in "ZX" else int(status[3])


def members(session: int) -> list[int]:
    """Living processes of a session."""
    ids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in ids if session_of(pid) == session]


def workers_of(main: int) -> list[int]:
    """Worker processes of a command: forked by the helper that it started."""

    def parent(pid: int) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    helpers = {pid for pid in members(main) if parent(pid) == main}
    return sorted(pid for pid in members(main) if parent(pid) in helpers)


class Running:
    """A command on its way."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.started = time.monotonic()
        self.code: int | None = None

    def ended(self) -> bool:
        """Whether it has; then `code` says how."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, seconds: float = RUN_SECONDS) -> int | None:
        """The exit code; None: it hung, and was killed."""
        end = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > end:
                self.end_all()
                self.wait(10.0)
                return None
            time.sleep(0.01)
        return self.code

    def end_all(self) -> None:
        """Kill what is left of it, by number."""
        for pid in members(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def in_process(work: Callable[[], Any], log: Path) -> Any:
    """What `work` gives, from a forked process: this one must not use the libraries."""
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)

    def write() -> int:
        answer.write_text(json.dumps(work()), encoding="utf-8")
        return 0

    code = Running(fork(write, log)).wait()
    if code != 0:
        raise RuntimeError(f"the harness itself failed ({code}):\n{log.read_text()[-4000:]}")
    return json.loads(answer.read_text(encoding="utf-8"))
