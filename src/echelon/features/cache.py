"""The content-addressed cache: a key that names everything a result depends on → its files.

Two places are looked in, in order: a directory on this machine, and a Redis shared by several.
An entry is a flat set of files. Whatever goes wrong with a cache costs a warning and a
computation, never a wrong or a missing result:

1. Names, numbers and sizes of an entry's description are checked before anything is written.
2. Every file is hashed and compared with the description.
3. `features.prepare` verifies the set itself, whose manifest must be of the key asked for.

Hashes next to data prove that nothing was damaged, not who wrote it. Whoever can write to a Redis
could give us any features, so with a key (ECHELON_CACHE_KEY) entries carry a MAC, and without one
only a Redis of this machine is used, or one that the configuration calls trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import redis
from pydantic import AfterValidator, Field, NonNegativeInt

from echelon.config.data import CacheConfig
from echelon.config.secrets import Secrets, is_loopback
from echelon.errors import ConfigError, DamagedError, shorten
from echelon.files import (
    link_or_copy,
    note_sha256,
    parse_json,
    read_json,
    sha256_once,
    staging_directory,
    sweep,
    sync,
    write_json,
)

log = logging.getLogger(__name__)

_ENTRY = "entry.json"
_PIECE = 32 * 1024 * 1024
_MAX_PIECES = 100_000
_MAX_DESCRIPTION = 64 * 1024
_TIMEOUT = 5.0
_REMEDY = "It is computed again."


def check_name(name: str) -> str:
    """The name; raises ValueError unless `name` is a plain name of a file in one directory."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*", name) or len(name) > 100:
        raise ValueError(f"{shorten(repr(name), 60)} is no file name of an entry")
    if name == _ENTRY:
        raise ValueError(f"{_ENTRY} is the description itself")
    return name


@dataclass(frozen=True)
class StoredFile:
    size: NonNegativeInt
    sha256: str

    @staticmethod
    def from_file(path: Path) -> StoredFile:
        return StoredFile(path.stat().st_size, sha256_once(path))


@dataclass(frozen=True)
class Description:
    """What an entry says of itself.

    key: that it was stored under; piece: bytes of all but the last piece of a file in Redis
    mac: of all the rest, where whoever wrote it had a key
    """

    format: Literal[2]
    key: str
    piece: Annotated[int, Field(gt=0, le=64 * 1024 * 1024)]
    files: Annotated[
        dict[Annotated[str, AfterValidator(check_name)], StoredFile],
        Field(min_length=1, max_length=64),
    ]
    mac: str | None = None

    def check(self, key: str, max_bytes: int) -> None:
        """Raise ValueError unless this can be the description of `key`'s entry."""
        if self.key != key:
            raise ValueError(f"of the key {shorten(self.key, 12)}, not {key[:12]}")
        sizes = [file.size for file in self.files.values()]
        if sum(sizes) > _MAX_PIECES * self.piece:
            raise ValueError(f"more than {_MAX_PIECES} pieces")
        if sum(sizes) > max_bytes:
            raise ValueError(
                f"{sum(sizes)} bytes in all, expected up to {max_bytes} (data.cache.max_gb)"
            )

    def signature(self, secret: bytes) -> str:
        """HMAC-SHA256 over key, names, sizes and digests."""
        tree = asdict(self) | {"mac": None}
        text = json.dumps(tree, sort_keys=True, ensure_ascii=True)
        return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def open_caches(config: CacheConfig) -> list[Cache]:
    """The caches the configuration turns on, nearest first."""
    if not config.enabled:
        return []
    sweep(config.dir)
    max_bytes = int(config.max_gb * 1e9)
    caches: list[Cache] = [LocalCache(config.dir, max_bytes)]
    if config.redis:
        known = Secrets()
        url = known.require("echelon_redis_url").get_secret_value()
        key = known.echelon_cache_key.get_secret_value().strip() if known.echelon_cache_key else ""
        shared = RedisCache.from_url(url, max_bytes=max_bytes, secret=key or None)
        if key or config.redis_trusted or shared.is_local():
            caches.append(shared)
        else:
            _warn_stranger()
    return caches


@cache  # once a command: a walk-forward prepares many sets
def _warn_stranger() -> None:
    log.warning(
        "Redis cache: not used, as ECHELON_REDIS_URL is of another machine and nothing says who "
        "writes to it. Set ECHELON_CACHE_KEY to the same long random text wherever it is used, or "
        "data.cache.redis_trusted: true."
    )


class LocalCache:
    """A directory of entries, the least recently used removed beyond `max_bytes`."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes

    def get(self, key: str, into: Path) -> bool:
        """Hard-link (or copy) the entry's files into `into`, empty yet; False: there is none."""
        entry = self.root / key
        names = self._check_entry(key)
        if names is None:
            return False
        try:
            for name in names:
                link_or_copy(entry / name, into / name)
        except OSError as error:  # removed meanwhile by another process, or not to be read
            log.warning("cache entry %s cannot be read (%s): computing again", entry, error)
            empty_directory(into)
            return False
        with suppress(OSError):  # a cache that is read-only still knows; only its order suffers
            os.utime(entry)
        return True

    def put(self, key: str, directory: Path) -> None:
        """Keep hard links to the files; a full disk costs a warning."""
        entry = self.root / key
        try:
            with staging_directory(self.root) as staging:
                files = {}
                for file in sorted(directory.iterdir()):
                    link_or_copy(file, staging / file.name)
                    sync(file)
                    files[file.name] = StoredFile.from_file(file)
                write_json(staging / _ENTRY, asdict(Description(2, key, _PIECE, files)))
                shutil.rmtree(entry, ignore_errors=True)
                staging.rename(entry)
            self._evict(keep=entry)
        except OSError as error:
            log.warning("cache %s: entry not kept (%s)", self.root, error)

    def _check_entry(self, key: str) -> list[str] | None:
        """Names of the entry's files, or None where it is absent or was changed."""
        entry = self.root / key
        try:
            (entry / _ENTRY).stat()
            description = read_json(entry / _ENTRY, Description, _REMEDY)
            # Written before `max_gb` was lowered, perhaps: no bound here but those of the disk.
            description.check(key, shutil.disk_usage(self.root).total)
            for name, file in description.files.items():
                facts = os.lstat(entry / name)
                if not stat.S_ISREG(facts.st_mode):  # a pipe would never end
                    raise ValueError(f"{name} is not a file")
                if facts.st_size != file.size or sha256_once(entry / name) != file.sha256:
                    raise ValueError(f"{name} was changed")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, DamagedError) as error:
            log.warning("cache entry %s is damaged (%s): removed, computing again", entry, error)
            shutil.rmtree(entry, ignore_errors=True)
            return None
        return list(description.files)

    def _evict(self, keep: Path) -> None:
        entries = sorted(
            (p for p in self.root.iterdir() if (p / _ENTRY).exists()),
            key=lambda p: p.stat().st_mtime_ns,
            reverse=True,
        )
        total = 0
        for entry in entries:
            total += sum(f.stat().st_size for f in entry.iterdir())
            if total > self.max_bytes and entry != keep:
                shutil.rmtree(entry, ignore_errors=True)


class RedisCache:
    """Entries in a Redis, in pieces, the description last; with a secret only signed ones count."""

    prefix = "echelon:prepared"

    def __init__(
        self, client: redis.Redis, *, max_bytes: int = 20 * 10**9, secret: str | None = None
    ) -> None:
        self.client = client
        self.max_bytes = max_bytes
        self._secret = None if secret is None else secret.encode()

    @staticmethod
    def from_url(url: str, *, max_bytes: int = 20 * 10**9, secret: str | None = None) -> RedisCache:
        """Connect lazily; a URL that cannot be one is refused here, and never printed."""
        client = None
        try:
            parts = urlsplit(url)
            # Else a password would be taken for a host, port or path, and then be printed.
            if (
                parts.scheme in ("redis", "rediss", "unix")
                and parts.port != 0
                and "#" not in url
                and "@" not in parts.path + parts.query
                and url.isprintable()
            ):
                timeouts = {"socket_timeout": _TIMEOUT, "socket_connect_timeout": _TIMEOUT}
                client = redis.Redis.from_url(url, **timeouts)
        except (ValueError, TypeError, AttributeError):  # their text may have the password in it
            pass
        if client is None:
            raise ConfigError(
                "ECHELON_REDIS_URL cannot be used (it is not shown, as it may hold a password). "
                "Expected redis://[user]:[password]@host:port/db, rediss://… or unix://…/redis.sock"
                "; in user and password write %2F for /, %3F for ?, %23 for #, %40 for @ and %25 "
                "for %."
            )
        return RedisCache(client, max_bytes=max_bytes, secret=secret)

    def is_local(self) -> bool:
        """Whether the server is reached by the loopback interface or a socket of this machine."""
        pool = self.client.connection_pool
        if issubclass(pool.connection_class, redis.UnixDomainSocketConnection):
            return True
        return is_loopback(str(pool.connection_kwargs.get("host") or "localhost"))

    def get(self, key: str, into: Path) -> bool:
        """Fetch and verify the entry, into the empty directory `into`; False: there is none."""
        with self._tolerant("read"):
            text = self.client.getrange(f"{self.prefix}:{key}", 0, _MAX_DESCRIPTION)
            if not text:
                return False
            try:
                description = self._parse_description(text, key)
                for name, file in description.files.items():
                    prefix = f"{self.prefix}:{key}:{name}"
                    self._fetch(prefix, file, description.piece, into / name)
            except (ValueError, DamagedError) as error:
                why = error.what if isinstance(error, DamagedError) else error
                log.warning("Redis cache: entry %s is damaged (%s): computing again", key[:12], why)
                empty_directory(into)
                return False
            return True
        empty_directory(into)
        return False

    def _parse_description(self, text: object, key: str) -> Description:
        if not isinstance(text, bytes) or len(text) > _MAX_DESCRIPTION:
            raise ValueError(f"a description of more than {_MAX_DESCRIPTION} bytes")
        description = parse_json(text, Description, Path("description"), _REMEDY)
        description.check(key, self.max_bytes)
        if self._secret is not None:
            mac = (description.mac or "").encode()
            if not hmac.compare_digest(mac, description.signature(self._secret).encode()):
                raise ValueError("not signed with this ECHELON_CACHE_KEY")
        return description

    def _fetch(self, prefix: str, file: StoredFile, piece: int, path: Path) -> None:
        state = hashlib.sha256()
        with path.open("xb") as handle:
            for k, begin in enumerate(range(0, file.size, piece)):
                wanted = min(piece, file.size - begin)
                # One byte more than there should be: never a value of any size.
                data = self.client.getrange(f"{prefix}:{k}", 0, wanted)
                if not isinstance(data, bytes) or len(data) != wanted:
                    raise ValueError(f"piece {k} of {path.name} is missing or of another size")
                state.update(data)
                handle.write(data)
        if state.hexdigest() != file.sha256:
            raise ValueError(f"{path.name} was changed")
        note_sha256(path, file.sha256)

    def put(self, key: str, directory: Path) -> None:
        """Send the files, then the description that makes them an entry."""
        files = sorted(directory.iterdir())
        if sum(file.stat().st_size for file in files) > self.max_bytes:
            log.warning("Redis cache: entry %s is larger than data.cache.max_gb", key[:12])
            return
        with self._tolerant("write"):
            sent: dict[str, StoredFile] = {}
            for file in files:
                with file.open("rb") as handle:
                    for k, data in enumerate(iter(partial(handle.read, _PIECE), b"")):
                        self.client.set(f"{self.prefix}:{key}:{file.name}:{k}", data)
                sent[file.name] = StoredFile.from_file(file)
            description = Description(2, key, _PIECE, sent)
            tree = asdict(description)
            if self._secret is not None:
                tree["mac"] = description.signature(self._secret)
            self.client.set(f"{self.prefix}:{key}", json.dumps(tree))

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """A Redis that is down, full, slow or speaks nonsense costs a warning, never the result."""
        try:
            yield
        except (
            *(redis.RedisError, OSError, ValueError, TypeError, AttributeError, RecursionError),
            MemoryError,  # of an answer that no machine holds
        ) as error:
            log.warning("Redis cache: cannot %s (%s); going on without it", what, _reason(error))


Cache = LocalCache | RedisCache
"""A place that may know a result."""


def _reason(error: Exception) -> str:
    """What is wrong, without a word that may come from the URL, as a password may."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    kind = type(error).__name__
    code = str(error).split(" ", 1)[0]
    shows = isinstance(error, redis.ResponseError) and re.fullmatch(r"[A-Z]{2,20}", code)
    return f"{kind}: {code}" if shows else kind


def empty_directory(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
