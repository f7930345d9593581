"""Whose code a configuration names: the user's own, or that of a run directory, maybe a stranger's.

`features.modules` and `execution.extensions` name Python files, and the commands that
need them run them. In the user's own configuration (--config, -o) that is a wish; in a run
directory it may be a stranger's. A section read from a run therefore carries a `RunCode`, also
through copies, overrides and worker processes, and a file it names runs only where the user has
named the same file: with --trust-code, or by an override.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import PrivateAttr

from echelon.config._base import Section
from echelon.errors import UsageError

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
    """The file or directory that a path leads to."""
    # Not Path.resolve, which raises at a link that leads to itself.
    return os.path.realpath(path)
