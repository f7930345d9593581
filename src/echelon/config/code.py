"""Whose code a configuration names: the user's own, or that of a run directory, maybe a stranger's.

`features.modules` and `execution.extensions` name Python files, and the commands that
need them run them. In the user's own configuration (--config, -o) that is a wish; in a run
directory it may be a stranger's. A section read from a run therefore carries a `RunCode`, also
through copies, overrides and worker processes, and a file it names runs only where the user has
named the same file: with --trust-code, or by an override.

Files run with the rights of the caller. One may import installed packages, not its neighbours;
nothing of it stays in `sys.modules`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from importlib.abc import SourceLoader
from pathlib import Path

from pydantic import PrivateAttr

from echelon.config._base import Section
from echelon.errors import EchelonError, FeatureError, UsageError

MAX_CODE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class RunCode:
    """The run directory that names code, and the files (absolute) that the user named too."""

    run: Path
    trusted: tuple[str, ...]

    def trusts(self, path: Path) -> bool:
        """Whether the user has named this very file."""
        return real_path(path) in self.trusted

    def refuse(self, path: Path, key: str) -> None:
        """Raise unless the user has named the file; `key` of the configuration names it."""
        if self.trusts(path):
            return
        raise UsageError(
            f"{self.run}: its {key} names code, {path} ({real_path(path)}, {describe_file(path)}). "
            "Code that a run directory names runs only if you name the file too. Read it; if you "
            f"trust it, add --trust-code {path}"
        )


class CodeSection(Section):
    """A section that names Python files."""

    _run_code: RunCode | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Of settings alone, not of where they were read: `exclude_defaults` compares by this."""
        if not isinstance(other, CodeSection):
            return NotImplemented
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @property
    def run_code(self) -> RunCode | None:
        """Which run directory the section was read from; None: the user's own configuration."""
        return self._run_code

    def read_from(self, run_code: RunCode | None) -> CodeSection:
        """The same section, as read from a run directory."""
        section = self.model_copy()
        section._run_code = run_code
        return section


def describe_file(path: Path) -> str:
    """The SHA-256 of a file, or why there is none: 'sha256 …', for a message."""
    try:
        if not path.is_file():
            return "no such file here"
        if path.stat().st_size > MAX_CODE_BYTES:
            return "larger than any program"
        return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"


def real_path(path: Path) -> str:
    # Not Path.resolve, which raises at a link that leads to itself.
    return os.path.realpath(path)


def read_user_file(path: Path, what: str, key: str, run_code: RunCode | None = None) -> bytes:
    """Its bytes, where its run may name it. what, key: what it is and names it, for messages"""
    if run_code is not None:
        run_code.refuse(path, key)
    try:
        with path.open("rb") as handle:
            content = handle.read(MAX_CODE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        what_ = getattr(error, "strerror", None) or error
        raise FeatureError(
            f"{path}: cannot read this {what} file ({what_}). Correct {key}."
        ) from error
    if len(content) > MAX_CODE_BYTES:
        raise FeatureError(f"{path}: larger than {MAX_CODE_BYTES >> 20} MiB. Correct {key}.")
    return content


def run_user_file(path: Path, content: bytes, name: str, what: str) -> None:
    """Run the file as a module `name` of its own; every failure is a FeatureError that names it."""
    spec = importlib.util.spec_from_loader(name, _Loader(path, content), origin=str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and type hints of the file look their module up here.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except EchelonError as error:
        raise FeatureError(f"{path}{line_in(path, error)}: {error}") from error
    except SyntaxError as error:
        raise FeatureError(
            f"{path}, line {error.lineno}: {error.msg}. Correct the syntax of this {what} file."
        ) from error
    except (Exception, SystemExit) as error:
        # Anything can go wrong in someone else's code; the user must learn whose and where.
        raise FeatureError(
            f"{path}{line_in(path, error)}: running this {what} file failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        del sys.modules[name]


def line_in(path: Path, error: BaseException) -> str:
    """Return ', line 12': the last place in `path` that `error` came through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


class _Loader(SourceLoader):
    """Runs exactly the bytes that were hashed; reads and writes no byte-code cache."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return self._content
