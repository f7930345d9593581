"""Python files of the user's that a configuration names: factors, extensions of execution.

Only files that the configuration names are ever run, and they run with the rights of the caller;
those that a run directory names, only where the user has named them too (`config.code`). A file may
import installed packages, not its neighbours; nothing of it stays in `sys.modules`.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from importlib.abc import SourceLoader
from pathlib import Path

from echelon.config.code import MAX_CODE_BYTES, RunCode
from echelon.errors import EchelonError, FeatureError


def read_user_file(path: Path, what: str, key: str, run_code: RunCode | None = None) -> bytes:
    """Its bytes; `what` it is and the configuration `key` that names it are for the message.

    run_code: of a configuration that is a run directory's; a file that the user has not named is
    refused
    """
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
