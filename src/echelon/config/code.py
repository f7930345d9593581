"""What the configuration of a run directory, which somebody else may have made, is allowed to do.

**Run code.** `features.modules` and `execution.extensions` name Python files, and the commands that
need them run them. In the user's own configuration (--config, -o) that is a wish; in a run
directory it may be a stranger's. A section read from a run therefore carries a `RunCode`, also
through copies, overrides and worker processes, and a file it names runs only where the user has
named the same file: with --trust-code, or by an override.

**Write files.** Store, cache and registry lie outside of the run directory, where its configuration
says. A directory that it names is written to only if it is the default, if it is Echelon's already,
or if it is new and lies below the current directory or beside the run (`refuse_places`): a
stranger's configuration puts nothing among the user's own files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from echelon.config._base import Section
from echelon.errors import UsageError

if TYPE_CHECKING:
    from echelon.config.tree import Config

MAX_CODE_BYTES = 4 * 1024 * 1024
REGISTRY = "logging.registry"
PLACES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "data.store": ("*/CURRENT.json",),
        "data.cache.dir": ("*/entry.json",),
        "data.ticks.parquet_dir": ("*.parquet",),
        REGISTRY: ("trials.json", "reads.json"),
    }
)
"""Key of a directory that is written to → what is in it where it is Echelon's already."""


@dataclass(frozen=True)
class RunCode:
    """The run directory that names code, and the files (absolute) that the user named too."""

    run: Path
    trusted: tuple[str, ...]

    def trusts(self, path: Path) -> bool:
        """Whether the user has named this very file."""
        return _place(path) in self.trusted

    def refuse(self, path: Path, key: str) -> None:
        """Raise unless the user has named the file; `key` of the configuration names it."""
        if self.trusts(path):
            return
        raise UsageError(
            f"{self.run}: its {key} names code, {path} ({_place(path)}, {describe_file(path)}). "
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


def name_files(run: Path, files: Iterable[str | Path]) -> RunCode:
    """The code of a run, of which the user has named these files, here and now."""
    return RunCode(run, tuple(_place(Path(file)) for file in files))


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


def _place(path: Path) -> str:
    # Not Path.resolve, which raises at a link that leads to itself.
    return os.path.realpath(path)


def refuse_places(
    config: Config, run: Path, overrides: Sequence[str] = (), keys: Iterable[str] = tuple(PLACES)
) -> None:
    """Refuse directories of a run's configuration that are somebody's own; see the module.

    overrides: those of the command; a key that the user names is the user's wish
    """
    defaults = type(config)()
    for key in keys:
        place = _value(config, key)
        named = any(item.partition("=")[0].strip() == key for item in overrides)
        if place is None or named or place == _value(defaults, key):
            continue
        if not _is_ours(place, PLACES[key]) and not _is_new(place, run):
            raise UsageError(
                f"{run}: its {key} is {place}, outside of the current directory and not a "
                "directory that Echelon made, and a run directory may be a stranger's. Nothing is "
                f"written there unless you name it: add -o {key}={place}, or change to the "
                "directory above it."
            )


def _value(config: Config, key: str) -> Path | None:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    assert value is None or isinstance(value, Path)
    return value


def _is_ours(place: Path, marks: Sequence[str]) -> bool:
    try:
        return any(any(place.glob(mark)) for mark in marks)
    except (OSError, ValueError):
        return False


def _is_new(place: Path, run: Path) -> bool:
    """Whether a directory is yet to be made, or empty, where the user works."""
    real = _place(place)
    homes = (_place(Path.cwd()), _place(run.parent))
    if not any(os.path.commonpath([real, home]) == home for home in homes):
        return False
    try:
        return not os.path.lexists(real) or not any(Path(real).iterdir())
    except OSError:
        return False
