"""Whole-or-nothing file operations: write to a temporary name, then rename.

Reading is here too: `read_json` and `read_array` give what the file was said to hold, or a
`DamagedError` that names it. Nothing that a stranger put into a file leaves here as any other
error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tokenize import TokenError
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from echelon.errors import DamagedError, StoreError

if TYPE_CHECKING:
    import polars as pl

_OLD = ".old"
MAX_JSON_BYTES = 256 * 1024 * 1024
"""A larger document than any of ours; reading one would only fill the memory."""

T = TypeVar("T")


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


def write_json(
    path: Path,
    tree: Any,  # noqa: ANN401 (JSON)
    *,
    sort_keys: bool = False,
    allow_nan: bool = False,
) -> None:
    """Write `tree` as JSON, whole or not at all; NaN is refused unless it is allowed."""
    text = json.dumps(tree, indent=1, ensure_ascii=False, sort_keys=sort_keys, allow_nan=allow_nan)
    write_atomic(path, text + "\n")


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """What a JSON file holds, checked against `kind`, or a DamagedError with `remedy`.

    kind: a dataclass, NamedTuple, TypedDict or a type such as `dict[str, float]`; types are taken
        strictly, unknown keys of a class are ignored
    A file that may be missing is asked for with `path.is_file()` first.
    """
    try:
        with path.open("rb") as handle:
            data = handle.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        raise DamagedError(path, getattr(error, "strerror", None) or str(error), remedy) from None
    if len(data) > MAX_JSON_BYTES:
        raise DamagedError(path, f"larger than {MAX_JSON_BYTES >> 20} MiB", remedy)
    return parse_json(data, kind, path, remedy)


def parse_json(data: bytes | str, kind: type[T], path: Path, remedy: str) -> T:
    """As `read_json`, of what was read already; `path` is named in the error."""
    try:
        value: T = _adapter(cast(Any, kind)).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DamagedError(
            path, f"{place}: {first['msg']}" if place else first["msg"], remedy
        ) from None
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 (any type; making one takes a while)
    return TypeAdapter(kind)


def read_array(path: Path, remedy: str, *, mmap: bool = True) -> np.ndarray:
    """The array of a .npy file, memory-mapped and read-only unless `mmap` is off; never pickled."""
    try:
        return np.asarray(np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False))
    except (
        OSError,
        EOFError,  # an empty file
        ValueError,
        SyntaxError,  # a header that is no literal
        TokenError,
        TypeError,
        KeyError,
        OverflowError,
        MemoryError,  # a shape that no machine holds
        RecursionError,
    ) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DamagedError(path, what, remedy) from None


_FORMULA = r"(?P<before>(?:^|[;\t\r\n])\s*)(?P<sign>[=+\-@＝＋－＠])"
"""What a spreadsheet takes for a formula: at the start of a cell, or of what it may split off."""
_NUMBER = r"^[+-]?\d*\.?\d*(?:[eE][+-]?\d+)?$"


def write_csv(path: Path, frame: pl.DataFrame) -> None:
    """Write a table for people: a spreadsheet that opens it runs none of its text.

    Text that would be a formula gets an apostrophe before it, which a spreadsheet hides. Numbers
    are left alone; the Parquet file beside, where there is one, has the text as it is.
    """
    import polars as pl  # here: `echelon --help` does without it

    inert = "${before}'${sign}"
    text = pl.col(pl.String, pl.Categorical, pl.Enum).cast(pl.String)
    mended = pl.when(text.str.contains(_NUMBER)).then(text)
    safe = frame.with_columns(mended.otherwise(text.str.replace_all(_FORMULA, inert)))
    names = pl.Series(frame.columns, dtype=pl.String).str.replace_all(_FORMULA, inert)
    write_atomic(path, safe.rename(dict(zip(frame.columns, names, strict=True))).write_csv())


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
