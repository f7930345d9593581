"""One case: its files laid out, the command or function run on them, and what came of it judged.

A case is plain data, so that it can be saved and replayed: which world it starts from, which
files of it are replaced, and what is then run. It runs in a directory of its own, in a yard of
the worker:

    yard/keep, yard/a/keep, yard/a/b/keep    a sentinel on every level that `..` leads to
    yard/a/b/case/                           the case: current directory, HOME and TMPDIR inside
    marker                                   what code of an input would leave

The outcome is good if it is a result or an error of ours, with a message of bounded length and
without control characters, with nothing written beside the case and nothing of the input run.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from reliability.mutate import MARKER

MAX_MESSAGE = 20_000
MAX_OUTPUT = 2_000_000
MAX_FILE = 1 << 29
OUTPUT = "output.txt"
"""Where a worker's process prints to, compiled libraries that give up included."""
_FRAME = re.compile(r'File "[^"]*?(echelon/[^"]+)", line (\d+),? in (\S+)')


@dataclass(frozen=True)
class Case:
    """What is run. A command is `argv`; a function takes what it needs from `extra` and the files.

    world, parts: which directories of which world are laid out first, by their names
    files: path in the case's directory → content; None removes the file
    """

    argv: Sequence[str] = ()
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    world: str = ""
    parts: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("argv", "parts"):  # JSON knows no tuples; a case is the same after it
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        files = {
            name: None if data is None else base64.b64encode(data).decode()
            for name, data in self.files.items()
        }
        return asdict(self) | {"files": files}

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Case:
        """The inverse of `to_json`."""
        files = {
            name: None if text is None else base64.b64decode(text)
            for name, text in tree["files"].items()
        }
        return Case(**(dict(tree) | {"files": files}))


class Outcome(NamedTuple):
    """kind: result, error or failure; name: of the error's class, or of what failed; where: the
    innermost frame of ours; text: the first lines of what was said; seconds: of processor time,
    which does not depend on what else the machine does; grown: bytes of peak memory
    """

    kind: str
    name: str
    where: str = ""
    text: str = ""
    seconds: float = 0.0
    grown: int = 0


class Yard:
    """Where one worker runs its cases."""

    def __init__(self, root: Path, worlds: Path) -> None:
        self.root = root
        self.worlds = worlds
        self.marker = root / "marker"
        self.case = root / "yard" / "a" / "b" / "case"
        self.case.mkdir(parents=True)
        for place in (*self.case.parents[:3],):
            (place / "keep").write_text("a sentinel\n")
        for name, inner in {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "home"}.items():
            os.environ[name] = str(self.case / inner)
        os.environ[MARKER] = str(self.marker)

    def lay_out(self, case: Case) -> None:
        """Make the case's directory anew, with its files, and go there."""
        os.chdir(self.root)
        shutil.rmtree(self.case, ignore_errors=True)
        for inner in (".", "home", "tmp"):
            (self.case / inner).mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = None
        for part in case.parts:
            _copy(self.worlds / case.world / part, self.case / part)
        for name, data in case.files.items():
            path = self.case / name
            if data is None:
                path.unlink(missing_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        os.chdir(self.case)

    def around(self) -> dict[str, tuple[int, int]]:
        """Size and time of everything beside the case."""
        seen: dict[str, tuple[int, int]] = {}
        for place in (self.root, *self.case.parents[:3]):
            for entry in os.scandir(place):
                if entry.name == OUTPUT:
                    continue
                if entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    seen[entry.path] = (stat.st_size, stat.st_mtime_ns)
                else:
                    seen[entry.path] = (0, 0)
        return seen


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(source):
        _copy(Path(entry.path), target / entry.name)


def run_case(yard: Yard, case: Case, run: Callable[[Case], object], *, roams: bool) -> Outcome:
    """Lay a case out, run it and judge it.

    roams: the user named the places it may write to, so what is beside the case is not looked at
    """
    yard.lay_out(case)
    before = yard.around()
    _reset_peak()
    resident = _memory("VmRSS")
    started = time.process_time()
    with _captured() as (out, err):
        outcome = _outcome(case, run)
    seconds = time.process_time() - started
    grown = _memory("VmHWM") - resident
    os.chdir(yard.root)
    if outcome.kind != "failure":
        outcome = _judge_text(outcome, out(), err())
    if yard.marker.exists():
        yard.marker.unlink()
        outcome = Outcome("failure", "ran code of the input", outcome.where, err()[:500])
    after = yard.around() if not roams else before
    if after != before:
        changed = sorted(set(after.items()) ^ set(before.items()))
        _clear(yard, before)
        outcome = Outcome("failure", "wrote outside", outcome.where, str(changed)[:500])
    return outcome._replace(seconds=seconds, grown=max(0, grown))


def _clear(yard: Yard, before: Mapping[str, object]) -> None:
    """Make the yard as it was: remove what a case left beside itself, put sentinels back."""
    for name in yard.around().keys() - before.keys():
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for place in yard.case.parents[:3]:
        (place / "keep").write_text("a sentinel\n")


def _outcome(case: Case, run: Callable[[Case], object]) -> Outcome:
    from echelon.errors import EchelonError

    try:
        run(case)
        return Outcome("result", "result")
    except EchelonError as error:
        return _our_error(error)
    except CommandEnd as end:
        return end.outcome
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is what we look for)
        return failure_of(error)


def _our_error(error: BaseException) -> Outcome:
    """An error of ours; where it was raised is told only if its message is at fault."""
    return Outcome("error", type(error).__name__, innermost(error.__traceback__), str(error))


def failure_of(error: BaseException) -> Outcome:
    """An exception that should not have come, with its innermost frame of ours."""
    return Outcome(
        "failure", type(error).__name__, innermost(error.__traceback__), str(error)[:500]
    )


def innermost(trace: TracebackType | None) -> str:
    """`echelon/x.py:12 name` of the deepest frame in Echelon."""
    frames = [frame for frame in traceback.extract_tb(trace) if "/echelon/" in frame.filename]
    if not frames:
        return ""
    last = frames[-1]
    return f"echelon/{last.filename.rpartition('/echelon/')[2]}:{last.lineno} {last.name}"


def innermost_of_text(text: str) -> str:
    """As `innermost`, of what faulthandler wrote, which has the deepest frame first."""
    match = _FRAME.search(text)
    return f"{match[1]}:{match[2]} {match[3]}" if match else ""


class CommandEnd(Exception):
    """How a command line ended, where that was not an error of ours."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def run_command(case: Case) -> None:
    """Run `echelon argv` as its own `main` does, in this process."""
    app_module = sys.modules["echelon.cli.app"]
    raised: list[BaseException] = []
    command = _command()

    def app() -> None:
        try:
            command()
        except BaseException as error:
            raised.append(error)
            raise

    sys.argv = ["echelon", *case.argv]
    original, app_module.app = app_module.app, app  # type: ignore[attr-defined]
    try:
        app_module.main()
    except SystemExit as leave:
        raise CommandEnd(_ended(leave, raised)) from None
    finally:
        app_module.app = original  # type: ignore[attr-defined]


_COMMANDS: list[Any] = []


def _command() -> Any:
    """The click command, which takes longer to build than most commands take to run."""
    if not _COMMANDS:
        import typer.main

        from echelon.cli.app import app

        _COMMANDS.append(typer.main.get_command(app))
    return _COMMANDS[0]


def _ended(leave: SystemExit, raised: Sequence[BaseException]) -> Outcome:
    """What an exit code and the exception behind it mean."""
    error = raised[0] if raised else leave
    code = leave.code or 0
    if code == 70:
        return failure_of(error)
    if not isinstance(error, SystemExit):
        return _our_error(error)
    if code == 0:
        return Outcome("result", "result")
    if code == 1 and error.__context__ is not None:  # click's `Aborted.`: an EOFError swallowed
        cause = error.__context__.__cause__ or error.__context__.__context__ or error.__context__
        if type(cause).__name__ == "Exit":  # a command's own, such as that of --show-completion
            return Outcome("error", "usage")
        return Outcome(
            "failure", f"Aborted ({type(cause).__name__})", innermost(cause.__traceback__)
        )
    if code == 2:
        return Outcome("error", "usage")
    return Outcome("failure", f"exit {code}")


def _judge_text(outcome: Outcome, out: str, err: str) -> Outcome:
    """Messages are bounded and hold no control characters, errors' own texts too."""
    said = err + outcome.text
    if len(err) > MAX_MESSAGE or len(outcome.text) > MAX_MESSAGE:
        name = f"message unbounded ({outcome.name})"
        return Outcome("failure", name, outcome.where, f"{len(said):,} characters: {said[:300]}")
    if len(out) > MAX_OUTPUT:
        return Outcome("failure", f"output unbounded ({outcome.name})", "", out[:300])
    for character in set(said + out):
        if unicodedata.category(character) == "Cc" and character not in "\n\t":
            place = (said + out).index(character)
            shown = repr((said + out)[max(0, place - 100) : place + 50])
            return Outcome("failure", f"control character ({outcome.name})", outcome.where, shown)
    return outcome._replace(text=outcome.text[:200])


@contextlib.contextmanager
def _captured() -> Iterator[tuple[Callable[[], str], Callable[[], str]]]:
    """Give stdout and stderr as text, whatever is written to them."""
    before = sys.stdout, sys.stderr, sys.argv
    streams = [
        io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", newline="") for _ in "oe"
    ]
    sys.stdout, sys.stderr = streams

    def text(k: int) -> str:
        stream = streams[k]
        stream.flush()
        buffer = stream.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("utf-8", "replace")

    try:
        yield lambda: text(0), lambda: text(1)
    finally:
        sys.stdout, sys.stderr, sys.argv = before


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    """Bytes of VmRSS or VmHWM, the peak since `_reset_peak`; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def save_case(path: Path, target: str, case: Case, facts: Mapping[str, Any]) -> None:
    """Write a case with which it can be replayed."""
    tree = {"target": target, "case": case.to_json(), **facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")


def load_case(path: Path) -> tuple[str, Case]:
    """The name of the target and the case of a saved failure."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    return tree["target"], Case.from_json(tree["case"])
