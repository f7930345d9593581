"""Digests of file contents, computed once a command.

Contents are verified whenever something is opened, which must not cost a reading each time. A file
is known by device, inode, size and time of its last change: a second name (a hard link, a renamed
directory) is the same file, one that was written to is another. Worker processes begin with what
their parent knows (`workers`), so they compute nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from echelon.files import sha256_file

Mark = tuple[str, int, int, int, int]
"""Kind of digest, device, inode, size and time of a file."""

_KNOWN: dict[Mark, str] = {}


def digest_once(path: Path, kind: str, compute: Callable[[Path], str]) -> str:
    """`compute(path)`, or what it gave before in this command. kind: names the computation"""
    mark = _mark(path, kind)
    if mark in _KNOWN:
        return _KNOWN[mark]
    digest = compute(path)
    if _mark(path, kind) == mark:  # else it was written to meanwhile
        _KNOWN[mark] = digest
    return digest


def sha256_once(path: Path) -> str:
    """SHA-256 of a file's content, as hex."""
    return digest_once(path, "sha256", sha256_file)


def note_sha256(path: Path, digest: str) -> None:
    """Keep the digest of a file that was computed while it was written."""
    _KNOWN[_mark(path, "sha256")] = digest


def known_digests() -> dict[Mark, str]:
    """All that this process knows, for a worker's `adopt_digests`."""
    return dict(_KNOWN)


def adopt_digests(known: Mapping[Mark, str]) -> None:
    """Begin with what another process of this command has computed."""
    _KNOWN.update(known)


def _mark(path: Path, kind: str) -> Mark:
    stat = path.stat()
    return kind, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
