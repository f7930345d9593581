"""Whole-or-nothing file operations: write to a temporary name, then rename."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from echelon.errors import StoreError

_OLD = ".old"


class Closing(ABC):
    """What is closed at the end of its `with` block, however that ends."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data.encode() if isinstance(data, str) else data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def staging_directory(parent: Path, prefix: str = ".staging-") -> Iterator[Path]:
    """Give a fresh directory below `parent`; whatever is still in it at the end is removed."""
    parent.mkdir(parents=True, exist_ok=True)
    directory = parent / f"{prefix}{secrets.token_hex(6)}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def swap_directory(staging: Path, target: Path) -> None:
    """Put the finished directory `staging` in the place of `target`, which may not be there yet.

    `staging` is named `.{target.name}-…` and lies beside `target`. A kill between the two renames
    leaves the earlier directory under the name `{staging.name}.old`: `recover_directory` gives it
    its name back, `standing_directory` finds it without touching anything.
    """
    old = staging.with_name(staging.name + _OLD)
    if target.exists():
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def recover_directory(target: Path) -> None:
    """Clean up after a killed writer of `target`, perhaps inside `swap_directory`.

    For the one writer only: it removes the staging directories it finds.
    """
    for old in target.parent.glob(f".{target.name}-*{_OLD}"):
        if not target.exists():
            old.rename(target)
    for stale in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)


def standing_directory(target: Path) -> Path | None:
    """Where the content of `target` is: there, or set aside by a swap that did not end."""
    if target.is_dir():
        return target
    return next(target.parent.glob(f".{target.name}-*{_OLD}"), None)


@contextmanager
def exclusive_lock(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; a second holder is refused at once, unless it is told to wait.

    The lock is the kernel's (flock), so a killed process leaves none behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise StoreError(
                f"{what} is being written by another process. Wait for it to end, then try again."
            ) from None
        yield


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Wait until a directory and everything below it are on disk."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name; a second copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise  # copying would write through the name that is there
    except OSError:
        shutil.copy2(source, target)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, read in pieces, as hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
