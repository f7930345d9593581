"""The content-addressed cache: a key that names everything a result depends on → its files.

Two places are looked in, in order: a directory on this machine, and a Redis shared by several.
An entry is a flat set of files. Whatever goes wrong with a cache costs a warning and a
computation, never a wrong or a missing result: files fetched from Redis are hashed, files on
disk are compared by size and time and hashed where those differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import redis

from echelon.config.data import CacheConfig
from echelon.config.secrets import secrets
from echelon.errors import ConfigError
from echelon.files import link_or_copy, sha256_file, staging_directory, sweep, sync

log = logging.getLogger(__name__)

_ENTRY = "entry.json"
_CHUNK = 32 * 1024 * 1024
_TIMEOUT = 5.0
_NONE: Mapping[str, str] = MappingProxyType({})


class Cache(Protocol):
    """A place that may know a result."""

    def get(self, key: str, into: Path) -> bool:
        """Put the entry's files into the empty directory `into`; False where there is none."""
        ...

    def put(self, key: str, directory: Path, digests: Mapping[str, str] = _NONE) -> None:
        """Keep the files of `directory` under `key`.

        digests: SHA-256 of files whose hash the caller knows already, by name
        """
        ...


def open_caches(config: CacheConfig) -> list[Cache]:
    """The caches the configuration turns on, nearest first."""
    if not config.enabled:
        return []
    sweep(config.dir)
    caches: list[Cache] = [LocalCache(config.dir, int(config.max_gb * 1e9))]
    if config.redis:
        caches.append(
            RedisCache.from_url(secrets().require("echelon_redis_url").get_secret_value())
        )
    return caches


class LocalCache:
    """A directory of entries, the least recently used removed beyond `max_bytes`."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes

    def get(self, key: str, into: Path) -> bool:
        """Hard-link (or copy) the entry's files into `into`."""
        entry = self.root / key
        names = self._checked(entry)
        if names is None:
            return False
        try:
            for name in names:
                link_or_copy(entry / name, into / name)
        except OSError as error:  # removed meanwhile by another process, or not to be read
            log.warning("cache entry %s cannot be read (%s): computing anew", entry, error)
            _empty(into)
            return False
        try:
            os.utime(entry)
        except OSError as error:  # a cache that is read-only still knows; only its order suffers
            log.debug("cache entry %s: its last use is not noted (%s)", entry, error)
        return True

    def put(self, key: str, directory: Path, digests: Mapping[str, str] = _NONE) -> None:
        """Keep hard links to the files; a full disk costs a warning."""
        entry = self.root / key
        try:
            with staging_directory(self.root) as staging:
                meta = {}
                for file in sorted(directory.iterdir()):
                    link_or_copy(file, staging / file.name)
                    sync(file)  # an entry is trusted later by size and time: it must be on disk
                    stat = file.stat()
                    digest = digests.get(file.name) or sha256_file(file)
                    meta[file.name] = [stat.st_size, stat.st_mtime_ns, digest]
                (staging / _ENTRY).write_text(json.dumps(meta))
                shutil.rmtree(entry, ignore_errors=True)
                staging.rename(entry)
            self._evict(keep=entry)
        except OSError as error:
            log.warning("cache %s: entry not kept (%s)", self.root, error)

    def _checked(self, entry: Path) -> list[str] | None:
        """Names of the entry's files, or None where it is absent or was changed."""
        try:
            meta = json.loads((entry / _ENTRY).read_text())
            for name, (size, mtime, digest) in meta.items():
                stat = (entry / name).stat()
                if stat.st_size != size or (
                    stat.st_mtime_ns != mtime and sha256_file(entry / name) != digest
                ):
                    raise ValueError(f"{name} was changed")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("cache entry %s is damaged (%s): removed, computing anew", entry, error)
            shutil.rmtree(entry, ignore_errors=True)
            return None
        return list(meta)

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
    """Entries in a Redis, in chunks; the description is written last and read first."""

    def __init__(self, client: redis.Redis, prefix: str = "echelon:prepared") -> None:
        self.client = client
        self.prefix = prefix

    @staticmethod
    def from_url(url: str) -> RedisCache:
        """Connect lazily; a URL that cannot be one is refused here."""
        try:
            client = redis.Redis.from_url(
                url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT
            )
        except ValueError as error:
            raise ConfigError(
                f"ECHELON_REDIS_URL: {error}. Expected redis://host:port/db."
            ) from None
        return RedisCache(client)

    def get(self, key: str, into: Path) -> bool:
        """Fetch and verify the entry."""
        with self._tolerant("read"):
            text = self.client.get(f"{self.prefix}:{key}")
            if text is None:
                return False
            assert isinstance(text, bytes)
            for name, (chunks, digest) in json.loads(text).items():
                if not self._fetch(f"{self.prefix}:{key}:{name}", chunks, digest, into / name):
                    log.warning("Redis cache: %s of %s is damaged, computing anew", name, key[:12])
                    _empty(into)
                    return False
            return True
        _empty(into)
        return False

    def _fetch(self, prefix: str, chunks: int, digest: str, path: Path) -> bool:
        state = hashlib.sha256()
        with path.open("wb") as handle:
            for k in range(chunks):
                piece = self.client.get(f"{prefix}:{k}")
                if not isinstance(piece, bytes):
                    return False
                state.update(piece)
                handle.write(piece)
        return state.hexdigest() == digest

    def put(self, key: str, directory: Path, digests: Mapping[str, str] = _NONE) -> None:
        """Send the files, then the description that makes them an entry.

        What is sent is hashed as it is sent, whatever `digests` says.
        """
        with self._tolerant("write"):
            meta = {}
            for file in sorted(directory.iterdir()):
                state = hashlib.sha256()
                chunks = 0
                with file.open("rb") as handle:
                    while piece := handle.read(_CHUNK):
                        self.client.set(f"{self.prefix}:{key}:{file.name}:{chunks}", piece)
                        state.update(piece)
                        chunks += 1
                meta[file.name] = [chunks, state.hexdigest()]
            self.client.set(f"{self.prefix}:{key}", json.dumps(meta))

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """A Redis that is down, full, slow or speaks nonsense costs a warning, never the result."""
        try:
            yield
        except (redis.RedisError, OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("Redis cache: cannot %s (%s); going on without it", what, error)


def _empty(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
