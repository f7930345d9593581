"""Python files of the user's that a configuration names: factors, extensions of execution.

Only files that the configuration names are ever run, and they run with the rights of the caller. A
file may import installed packages, not its neighbours; nothing of it stays in `sys.modules`.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from importlib.abc import SourceLoader
from pathlib import Path

from echelon.errors import EchelonError, FeatureError


def read_user_file(path: Path, what: str, key: str) -> bytes:
    """Its bytes; `what` it is and the configuration `key` that names it are for the message."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FeatureError(
            f"{path}: cannot read this {what} file ({error.strerror}). Correct {key}."
        ) from error


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
