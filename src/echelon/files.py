"""Whole-or-nothing file operations: write to a temporary name, then rename.

Reading is here too: `read_json`, `read_table` and `read_array` give what the file was said to hold,
or a `DamagedError` that names it. Nothing that a stranger put into a file leaves here as any other
error. What only whoever uses the content can judge is used inside `blaming(path, remedy)`.

What a killed process leaves behind is removed by the next one (`sweep`). A temporary name ends in
16 hex digits: 8 of the kernel and the file system it was made on (boot id and device number), 8 at
random; and whoever made it holds the kernel's lock (flock) on it for as long as it is used.

1. The digits are of this kernel and file system: a lock that is free proves that the owner has
   ended, in whatever container it ran, and the leftover goes at once. Process ids prove nothing
   where containers share a directory.
2. They are of another machine, of an earlier boot or of an earlier version of Echelon, or the file
   system has no locks: it goes once nothing in it has changed for a day.
3. What belongs to another user stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import math
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib import resources
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, TypeVar, cast
from zipfile import BadZipFile
from zlib import error as ZlibError

from pydantic import TypeAdapter, ValidationError

from echelon.errors import DamagedError, StoreError

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

log = logging.getLogger(__name__)

_OLD = ".old"
MAX_JSON_BYTES = 256 * 1024 * 1024
"""A larger document than any of ours; reading one would only fill the memory."""

UNPROVEN_SECONDS = 24 * 3600.0
"""Without a change, after which a leftover goes whose owner cannot be proven to have ended."""
_MAX_ENTRIES = 100_000
"""That a sweep looks at: more than any run has; a home directory is not searched to its end."""
_DIGITS = r"(?P<token>[0-9a-f]{16})"
_FILE = re.compile(rf"\..+\.({_DIGITS}|[0-9a-f]{{8}})\.tmp")
_DIRECTORY = re.compile(rf"\..+-({_DIGITS}|[0-9a-f]{{12}})")
_SCRATCH = re.compile(rf"echelon-[a-z]+-{_DIGITS}")
"""In the system's directory of temporary files, where other programs have names of any kind."""
_swept: set[tuple[Path, re.Pattern[str]]] = set()
"""Where this process has looked, and for what."""

T = TypeVar("T")
ColumnKind = Literal["time", "number", "text", "flag"]


class Closing(ABC):
    """What is closed at the end of its `with` block, however that ends."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as handle:
        handle.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets the name `path` at the end of the block, or never if it raises."""
    temporary, handle = _own_file(path)
    try:
        with handle:  # its lock is held until it has its name
            yield handle
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
    indent: int | None = 1,
) -> None:
    """Write `tree` as JSON, whole or not at all; NaN is refused unless it is allowed."""
    text = json.dumps(
        tree, indent=indent, ensure_ascii=False, sort_keys=sort_keys, allow_nan=allow_nan
    )
    write_atomic(path, text + "\n")


def finite_or_none(value: float) -> float | None:
    """A number as JSON has it: null where it is not finite."""
    return float(value) if math.isfinite(value) else None


def finite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON has them: a number that is not finite is null."""
    return {
        name: finite_or_none(value) if isinstance(value, float) else value
        for name, value in values.items()
    }


def json_line(
    tree: Any,  # noqa: ANN401 (JSON)
    *,
    sort_keys: bool = False,
    allow_nan: bool = False,
    ensure_ascii: bool = True,
) -> str:
    """`tree` as JSON in one line, without its end: for logs, metadata and hashes."""
    return json.dumps(tree, sort_keys=sort_keys, allow_nan=allow_nan, ensure_ascii=ensure_ascii)


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """What a JSON file holds, checked against `kind`, or a DamagedError with `remedy`.

    kind: a dataclass, NamedTuple, TypedDict or a type such as `dict[str, float]`; types are taken
        strictly, unknown keys of a class are ignored
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
        raise _unlike(error, path, remedy) from None
    return value


def check_tree(tree: object, kind: type[T], path: Path, remedy: str) -> T:
    """As `read_json`, of a part of what was read already."""
    try:
        value: T = _adapter(cast(Any, kind)).validate_python(tree, strict=True)
    except ValidationError as error:
        raise _unlike(error, path, remedy) from None
    return value


def _unlike(error: ValidationError, path: Path, remedy: str) -> DamagedError:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return DamagedError(path, f"{place}: {first['msg']}" if place else first["msg"], remedy)


@contextmanager
def blaming(path: Path, remedy: str) -> Iterator[None]:
    """What goes wrong inside is the fault of a file's content: a DamagedError with `remedy`."""
    try:
        yield
    except (
        *(LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError),
        *(RuntimeError, MemoryError),  # torch: shapes that do not fit; a size no machine holds
    ) as error:
        said = str(error)
        what = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise DamagedError(path, what, remedy) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 (any type; making one takes a while)
    return TypeAdapter(kind)


_UNREADABLE = (
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
)


def package_yaml(package: str, name: str) -> Any:  # noqa: ANN401 (a tree of YAML)
    """What a YAML file that comes with a package of ours holds."""
    import yaml

    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml: the same, slower
    return yaml.load(text, Loader=loader)  # noqa: S506 (a SafeLoader)


def read_array(path: Path, remedy: str) -> np.ndarray:
    """The array of a .npy file, memory-mapped and read-only; never pickled."""
    import numpy as np

    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except _UNREADABLE as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DamagedError(path, what, remedy) from None


def read_arrays(path: Path, names: Iterable[str], remedy: str) -> dict[str, np.ndarray]:
    """Arrays of floats of a .npz file, by name; never pickled."""
    import numpy as np

    try:
        # Opened here: of a file that is no archive numpy would leave its own open.
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            return {name: np.asarray(arrays[name], dtype=np.float64) for name in names}
    except (*_UNREADABLE, AttributeError, BadZipFile, ZlibError) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DamagedError(path, what, remedy) from None


def read_table(path: Path, columns: Mapping[str, ColumnKind], remedy: str) -> pl.DataFrame:
    """The table of a Parquet file, which has at least these columns, or a DamagedError."""
    import polars as pl  # 0.1 s, and not every command reads a table

    try:
        frame = pl.read_parquet(path)
    except (
        *(OSError, ValueError, TypeError, MemoryError),
        *(pl.exceptions.PolarsError, pl.exceptions.PanicException),  # a panic, of a mangled page
    ) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DamagedError(path, what, remedy) from None
    for name, kind in columns.items():
        if name not in frame.columns:
            raise DamagedError(path, f"no column {name!r}", remedy)
        dtype = frame.schema[name]
        holds = {"time": dtype.is_temporal(), "number": dtype.is_numeric()}
        holds |= {"text": dtype == pl.String, "flag": dtype == pl.Boolean}
        if not holds[kind]:
            what = f"column {name!r} is {dtype}, expected a {kind}"
            raise DamagedError(path, what, remedy)
    return frame


_FORMULA = r"(?P<before>(?:^|[;\t\r\n])\s*)(?P<sign>[=+\-@＝＋－＠])"
"""What a spreadsheet takes for a formula: at the start of a cell, or of what it may split off."""
_NUMBER = r"^[+-]?\d*\.?\d*(?:[eE][+-]?\d+)?$"


def write_csv(path: Path, frame: pl.DataFrame) -> None:
    """Write a table for people: text that a spreadsheet would run gets an apostrophe before it."""
    import polars as pl  # here: `echelon --help` does without it

    inert = "${before}'${sign}"
    text = pl.col(pl.String, pl.Categorical, pl.Enum).cast(pl.String)
    mended = pl.when(text.str.contains(_NUMBER)).then(text)
    safe = frame.with_columns(mended.otherwise(text.str.replace_all(_FORMULA, inert)))
    names = pl.Series(frame.columns, dtype=pl.String).str.replace_all(_FORMULA, inert)
    write_atomic(path, safe.rename(dict(zip(frame.columns, names, strict=True))).write_csv())


def write_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Write a table to compute with, whole or not at all."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    write_atomic(path, buffer.getvalue())


def staging_directory(parent: Path, prefix: str = ".staging-") -> AbstractContextManager[Path]:
    """A fresh directory below `parent`, which is swept first; gone at the end of the block."""
    return _swept_directory(parent, prefix, 0o777, _DIRECTORY)


def scratch_directory(kind: str) -> AbstractContextManager[Path]:
    """A directory for temporary files, removed at the end. kind: lower case, in its name"""
    return _swept_directory(Path(tempfile.gettempdir()), f"echelon-{kind}-", 0o700, _SCRATCH)


@contextmanager
def _swept_directory(
    parent: Path, prefix: str, mode: int, leftovers: re.Pattern[str]
) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    _sweep_once(parent, leftovers)
    directory, lock = _own_directory(parent, prefix, mode)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def share_directory(directory: Path) -> None:
    """Keep a scratch directory of another process, too, until this one ends; others are let be."""
    if _SCRATCH.fullmatch(directory.name) is None:
        return
    with suppress(OSError):  # gone with its owner
        fcntl.flock(os.open(directory, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)


def sweep_scratch() -> None:
    """Remove scratch directories of killed processes, once in the life of this one."""
    _sweep_once(Path(tempfile.gettempdir()), _SCRATCH)


def _sweep_once(parent: Path, leftovers: re.Pattern[str]) -> None:
    if (parent, leftovers) not in _swept:
        _swept.add((parent, leftovers))
        _sweep(parent, (leftovers,), deep=False)


def sweep(directory: Path, *, deep: bool = False) -> None:
    """Remove what killed processes left in a directory of ours. deep: in those below, too"""
    if directory.is_dir():
        _sweep(directory, (_FILE, _DIRECTORY), deep=deep)


def _sweep(directory: Path, patterns: tuple[re.Pattern[str], ...], *, deep: bool) -> None:
    looked, removed, size = 0, 0, 0
    for place, folders, files in os.walk(directory):
        looked += len(folders) + len(files)
        names = [(name, pattern) for name in (*folders, *files) for pattern in patterns]
        ours = {name: match for name, pattern in names if (match := pattern.fullmatch(name))}
        for name, match in ours.items():
            freed = _remove_dead(Path(place, name), match["token"])
            if freed is not None:
                removed, size = removed + 1, size + freed
        folders[:] = [name for name in folders if name not in ours] if deep else []
        if looked > _MAX_ENTRIES:
            break
    if removed:
        what = "%s: removed %d leftover(s) of a killed process, %.1f MB"
        log.info(what, directory, removed, size / 1e6)


def _remove_dead(path: Path, token: str | None) -> int | None:
    """Remove a leftover whose owner has ended; the bytes it had, None: it stays."""
    try:
        facts = path.lstat()
        folder = stat.S_ISDIR(facts.st_mode)
        if facts.st_uid != os.geteuid() or not (folder or stat.S_ISREG(facts.st_mode)):
            return None
        # A network's file system wants to write where it is to lock.
        lock = os.open(path, (os.O_RDONLY if folder else os.O_RDWR) | os.O_NOFOLLOW)
    except OSError:  # gone, or not ours to open
        return None
    try:
        proven = token is not None and token.startswith(_mark(path.parent))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # no locks there
            proven = False
        size, changed = _measure(path)
        if not proven and time.time() - changed < UNPROVEN_SECONDS:
            return None
        if not _is_at(path, lock):  # finished and renamed before we had the lock
            return None
        if folder:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return size
    except OSError as error:
        log.debug("%s: a leftover that cannot be removed (%s)", path, error)
        return None
    finally:
        os.close(lock)


def _measure(path: Path) -> tuple[int, float]:
    """Bytes of a file or of all in a directory, and when something of it was changed last."""
    size, changed = 0, path.lstat().st_mtime
    for inside in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            facts = inside.lstat()
            size += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
            changed = max(changed, facts.st_mtime)
    return size, changed


def _own_file(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        temporary = path.with_name(f".{path.name}.{_token(path.parent)}.tmp")
        handle = temporary.open("xb")
        with suppress(OSError):  # no locks there: it will go by its age
            fcntl.flock(handle, fcntl.LOCK_EX)
        if _is_at(temporary, handle.fileno()):
            return temporary, handle
        handle.close()  # swept in the moment before it was locked


def _own_directory(parent: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """A new directory, and the handle that has its lock; shared, see `share_directory`."""
    while True:
        directory = parent / f"{prefix}{_token(parent)}"
        directory.mkdir(mode)
        with suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(directory, lock):
                return directory, lock
            os.close(lock)


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _token(directory: Path) -> str:
    return _mark(directory) + secrets.token_hex(4)


def _mark(directory: Path) -> str:
    """8 hex digits of this kernel and the directory's file system."""
    text = f"{_boot_id()} {directory.stat().st_dev}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@cache
def _boot_id() -> str:
    """Of the kernel: the same in all its containers, another one after a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def swap_directory(staging: Path, target: Path) -> None:
    """Put the finished directory `staging` in the place of `target`, which may not be there yet.

    `staging` is named `.{target.name}-…` and lies next to `target`. A kill between the two renames
    leaves the earlier directory under the name `{staging.name}.old`: `recover_directory` gives it
    its name back, `standing_directory` finds it without touching anything.
    """
    old = staging.with_name(staging.name + _OLD)
    if target.exists():
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def recover_directory(target: Path) -> None:
    """Clean up after a killed writer of `target`: for its one writer, as staging goes too."""
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
    """Hold the kernel's lock on a file; a second holder is refused, unless it asks to wait."""
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
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


Mark = tuple[str, int, int, int, int]
"""Kind of digest, device, inode, size and time of a file, by which it is known.

A second name (a hard link, a renamed directory) is the same file, one that was written to is
another: contents are verified whenever something is opened, and read once a command. Worker
processes begin with what their parent knows.
"""

_KNOWN: dict[Mark, str] = {}


def digest_once(path: Path, kind: str, compute: Callable[[Path], str]) -> str:
    """`compute(path)`, or what it gave before in this command. kind: names the computation"""
    mark = _file_mark(path, kind)
    if mark in _KNOWN:
        return _KNOWN[mark]
    digest = compute(path)
    if _file_mark(path, kind) == mark:  # else it was written to meanwhile
        _KNOWN[mark] = digest
    return digest


def sha256_once(path: Path) -> str:
    return digest_once(path, "sha256", sha256_file)


def note_sha256(path: Path, digest: str) -> None:
    """Keep the digest of a file that was computed while it was written."""
    _KNOWN[_file_mark(path, "sha256")] = digest


def known_digests() -> dict[Mark, str]:
    """All that this process knows, for a worker's `adopt_digests`."""
    return dict(_KNOWN)


def adopt_digests(known: Mapping[Mark, str]) -> None:
    """Begin with what another process of this command has computed."""
    _KNOWN.update(known)


def _file_mark(path: Path, kind: str) -> Mark:
    facts = path.stat()
    return kind, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
