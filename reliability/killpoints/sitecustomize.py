"""Kill points: wrappers around what makes files durable or makes them disappear.

Python imports a module of this name at its start where this directory is on PYTHONPATH, so the
helper that worker processes are forked from has the wrappers too; `reliability.kill` calls
`install` in processes it forks itself. What to do is in the JSON file that `RELIABILITY_KILLPOINTS`
names (see `Spec` in `reliability.kill`):

    record    append a line for every point that is passed: role, operation, name
    kill      send a signal before or after the n-th time that a process passes one point

A point is named by its operation and the last part of the path, random and counting parts left
out. Paths outside `root` are none: compiled kernels and fonts are not the run's.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

SPEC = "RELIABILITY_KILLPOINTS"
MAIN = "RELIABILITY_KILLPOINTS_MAIN"
OPERATIONS = ("rename", "replace", "link", "fsync", "unlink", "remove", "rmtree")
_RANDOM = re.compile(r"(?<![a-z])[0-9a-f]{6,}(?![a-z])")
_DIGITS = re.compile(r"\d+")
_open, _write, _close, _getpid = os.open, os.write, os.close, os.getpid


def name_of(path: str) -> str:
    """The last part of a path, without what differs from run to run: `.state.json.*.tmp`."""
    return _DIGITS.sub("#", _RANDOM.sub("*", os.path.basename(path)))  # noqa: PTH119


class Points:
    """Counts points in this process, records them, and sends the signal at the one to die at."""

    def __init__(self, spec: dict[str, Any], main: int) -> None:
        self.root = os.path.realpath(spec["root"]) + os.sep
        self.record: str | None = spec.get("record")
        self.kill: dict[str, Any] | None = spec.get("kill")
        self.token: str = spec["token"]
        self.main = main
        self.passed: Counter[str] = Counter()

    def forget(self) -> None:
        """Of a forked process: it has passed nothing yet."""
        self.passed.clear()

    @property
    def role(self) -> str:
        """Whether this is the command's own process."""
        return "main" if _getpid() == self.main else "worker"

    def path_of(self, operation: str, args: tuple[Any, ...]) -> str | None:
        """What a point is about, as an absolute path; None: nothing of the run's."""
        target = args[1] if operation in ("rename", "replace", "link") else args[0]
        if isinstance(target, int):
            path = os.readlink(f"/proc/self/fd/{target}")  # noqa: PTH115
        else:
            path = os.path.join(os.getcwd(), os.fsdecode(target))  # noqa: PTH118, PTH109
        return path if os.path.realpath(path).startswith(self.root) else None

    def wrap(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with a point before and one after it."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = self.path_of(operation, args)
            if path is None:
                return call(*args, **kwargs)
            point = f"{self.role}:{operation}:{name_of(path)}"
            self.passed[point] += 1
            if self.record is not None:
                _append(self.record, f"{_getpid()} {point}\n")
            self.fire(point, "before")
            try:
                return call(*args, **kwargs)
            finally:
                self.fire(point, "after")

        return wrapped

    def fire(self, point: str, side: str) -> None:
        """Send the signal, if this is the place; once in a run, whoever comes first."""
        kill = self.kill
        if kill is None or kill["point"] != point or kill["side"] != side:
            return
        if self.passed[point] != kill["nth"]:
            return
        try:
            _close(_open(self.token, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        victim = self.main if kill["victim"] == "main" else _getpid()
        os.kill(victim, signal.Signals[kill["signal"]])


def _append(path: str, line: str) -> None:
    handle = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _write(handle, line.encode())
    _close(handle)


def install(spec: dict[str, Any], main: int) -> None:
    """Put the wrappers into `os` and `shutil`, for this process and those forked from it."""
    points = Points(spec, main)
    for operation in OPERATIONS:
        module = shutil if operation == "rmtree" else os
        wrapped = points.wrap(operation, getattr(module, operation))
        setattr(module, operation, wrapped)
        if operation == "unlink":
            os.supports_dir_fd.add(wrapped)  # tempfile and shutil ask
    os.register_at_fork(after_in_child=points.forget)


if SPEC in os.environ and MAIN in os.environ:
    with open(os.environ[SPEC], encoding="utf-8") as _handle:  # noqa: PTH123
        install(json.load(_handle), int(os.environ[MAIN]))
