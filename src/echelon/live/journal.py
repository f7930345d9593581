"""The journal: what an engine saw, decided and sent, in one file, and the only truth about it.

    entries      sequence, kind, JSON document, bytes, and a hash over those and the hash before
    snapshots    states to start from, the last two; an entry of the chain holds each one's hash

1. Append-only: triggers refuse to change or delete an entry. A changed byte breaks the chain.
2. `append` collects; `commit` writes what was collected, all of it or nothing (SQLite, write-ahead
   log, on disk before it returns). A crash leaves a prefix of whole commits.
3. One writer: the kernel's lock on `NAME.lock` refuses a second. Readers come at any time; each
   has the journal as it was when it opened it.

A journal is of one bundle and one account: its first entry says which, and another is refused. The
chain shows accidents and edits; whoever can write the file can also write it anew.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon.data.stream import BarSet
from echelon.errors import DamagedError, StoreError, UsageError
from echelon.files import Closing, exclusive_lock, json_line, parse_json

FORMAT = 1
START = "start"
"""Kind of the first entry: what the journal is of."""
_SNAPSHOT = "snapshot"
_KEPT = 2
_SCHEMA = """
CREATE TABLE entries(
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, data BLOB, hash BLOB NOT NULL);
CREATE TABLE snapshots(seq INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TRIGGER entries_stay BEFORE DELETE ON entries
    BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END;
CREATE TRIGGER entries_keep BEFORE UPDATE ON entries
    BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END;
"""
_REMEDY = (
    "Take the file from a backup, or start a new journal and adopt what the account holds "
    "(`echelon live reconcile --adopt`)."
)


class Entry(NamedTuple):
    seq: int
    kind: str
    body: dict[str, Any]
    data: bytes | None


class Journal(Closing):
    """A journal that is open: see the module's text. `read` opens one to look at."""

    def __init__(self, path: Path, db: sqlite3.Connection, held: ExitStack) -> None:
        """Use `open` or `read`."""
        self.path = path
        self._db, self._held = db, held
        self._open = self._failed = False
        with blaming_sqlite(self.path):
            row = db.execute("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
        self._seq, self._hash = (0, b"") if row is None else (int(row[0]), bytes(row[1]))

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], *, sync: bool = True) -> Journal:
        """The journal at `path`, made if there is none, to write to.

        about: what it is of, which must be what its first entry says. sync: False leaves it to the
        system when a commit is on disk: a killed process loses nothing, a power failure may
        """
        held = ExitStack()
        held.enter_context(exclusive_lock(path.with_name(f"{path.name}.lock"), f"journal {path}"))
        try:
            db = _connect(path, "rwc")
            held.callback(db.close)
            with blaming_sqlite(path):
                db.execute("PRAGMA journal_mode=WAL")
                db.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
                if not db.execute("SELECT name FROM sqlite_master LIMIT 1").fetchone():
                    db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
            journal = cls(path, db, held)
            journal._check_start({"format": FORMAT, **about})
        except BaseException:
            held.close()
            raise
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The journal at `path` as it is now, whatever an engine writes while one looks."""
        if not path.is_file():
            raise UsageError(f"--journal {path}: no such file. `echelon live run` makes one.")
        held = ExitStack()
        db = _connect(path, "ro")
        held.callback(db.close)
        try:
            db.execute("BEGIN")  # SQLite shows what there is at the first look, and nothing newer
            journal = cls(path, db, held)
            journal.about()
        except BaseException:
            held.close()
            raise
        return journal

    def close(self) -> None:
        """Forget what was not committed, and let go of the file."""
        self._held.close()

    @property
    def seq(self) -> int:
        """Of the last entry; 0: there is none."""
        return self._seq

    def about(self) -> dict[str, Any]:
        """What the journal is of: its first entry."""
        for entry in self.entries():
            if entry.kind == START and entry.body.get("format") == FORMAT:
                return entry.body
            break
        raise DamagedError(self.path, f"not a journal of format {FORMAT}", _REMEDY)

    def append(self, kind: str, body: Mapping[str, Any], data: bytes | None = None) -> int:
        """Add an entry to the coming commit; its sequence number."""
        text = json_line(body, sort_keys=True, allow_nan=True)
        digest = _digest(self._hash, kind, text, data)
        with self._writing():
            if not self._open:
                self._db.execute("BEGIN IMMEDIATE")
                self._open = True
            self._db.execute(
                "INSERT INTO entries VALUES(?,?,?,?,?)", (self._seq + 1, kind, text, data, digest)
            )
        self._seq, self._hash = self._seq + 1, digest
        return self._seq

    def snapshot(self, state: bytes) -> None:
        """Add a state to start from, as of the last entry; all but the last two go."""
        self.append(_SNAPSHOT, {"sha256": hashlib.sha256(state).hexdigest(), "bytes": len(state)})
        with self._writing():
            self._db.execute("INSERT INTO snapshots VALUES(?,?)", (self._seq, state))
            # The first one stays: it is where a replay of everything begins.
            self._db.execute(
                "DELETE FROM snapshots WHERE seq > (SELECT min(seq) FROM snapshots) AND seq NOT IN "
                "(SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?)",
                (_KEPT,),
            )

    def commit(self) -> None:
        """Write what was appended; on disk when this returns."""
        if self._open:
            with self._writing():
                self._db.execute("COMMIT")
            self._open = False

    def last_snapshot(self, *, first: bool = False) -> tuple[int, bytes] | None:
        """(sequence number, state) of the newest snapshot, or of the first one."""
        with blaming_sqlite(self.path):
            row = self._db.execute(
                "SELECT s.seq, s.data, e.body FROM snapshots s LEFT JOIN entries e "
                "ON e.seq = s.seq ORDER BY CASE WHEN ? THEN s.seq ELSE -s.seq END LIMIT 1",
                (first,),
            ).fetchone()
        if row is None:
            return None
        seq, state = int(row[0]), bytes(row[1])
        said = None if row[2] is None else self._parse(row[2]).get("sha256")
        if said != hashlib.sha256(state).hexdigest():
            raise DamagedError(self.path, f"snapshot {seq} is not what its entry says", _REMEDY)
        return seq, state

    def entries(self, after: int = 0, kinds: Sequence[str] = ()) -> Iterator[Entry]:
        """Entries behind the sequence number `after`, of these kinds or of all, in order."""
        marks = ",".join("?" * len(kinds))
        only = f" AND kind IN ({marks})" if kinds else ""
        query = f"SELECT seq, kind, body, data FROM entries WHERE seq > ?{only} ORDER BY seq"  # noqa: S608 (marks only)
        with blaming_sqlite(self.path):
            for seq, kind, body, data in self._db.execute(query, (after, *kinds)):
                yield Entry(seq, kind, self._parse(body), data)

    def _parse(self, body: str) -> dict[str, Any]:
        return parse_json(body, dict[str, Any], self.path, _REMEDY)

    def last(self, kind: str) -> Entry | None:
        with blaming_sqlite(self.path):
            row = self._db.execute(
                "SELECT seq, body, data FROM entries WHERE kind = ? ORDER BY seq DESC LIMIT 1",
                (kind,),
            ).fetchone()
            return None if row is None else Entry(row[0], kind, self._parse(row[1]), row[2])

    def verify(self) -> int:
        """How many entries there are; DamagedError names the first that breaks the chain."""
        before, count = b"", 0
        with blaming_sqlite(self.path):
            rows = self._db.execute("SELECT seq, kind, body, data, hash FROM entries ORDER BY seq")
            for seq, kind, body, data, digest in rows:
                count += 1
                if seq != count:
                    raise DamagedError(self.path, f"entry {count} is missing", _REMEDY)
                before = _digest(before, kind, body, data)
                if before != digest:
                    raise DamagedError(self.path, f"entry {seq} breaks the hash chain", _REMEDY)
        self.last_snapshot()
        return count

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around a write. Where one fails, SQLite may have dropped all that was collected.

        So nothing is written behind it: an entry would not follow the one before.
        """
        if self._failed:
            raise StoreError(
                f"{self.path}: a write failed, and nothing is written behind it. Start again: the "
                "journal goes on behind its last commit."
            )
        self._failed = True
        with blaming_sqlite(self.path):
            yield
        self._failed = False

    def _check_start(self, about: Mapping[str, Any]) -> None:
        if not self._seq:
            self.append(START, about)
            self.commit()
            return
        is_of = self.about()
        for name, value in about.items():
            if is_of.get(name) != value:
                raise StoreError(
                    f"{self.path}: the journal of another {name} ({str(is_of.get(name))[:60]}, not "
                    f"{str(value)[:60]}). Name its own, or start a new journal."
                )


@contextmanager
def blaming_sqlite(path: Path) -> Iterator[None]:
    """What SQLite finds wrong inside is the fault of the file or its disk."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"{path}: cannot be read or written ({error}). Look at the disk's space and the file's "
            "permissions; nothing that was not committed counts."
        ) from error
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(path, str(error), _REMEDY) from error


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    with blaming_sqlite(path):
        place = f"{path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(place, uri=True, isolation_level=None, timeout=10.0)


def _digest(before: bytes, kind: str, body: str, data: bytes | None) -> bytes:
    state = hashlib.sha256(before)
    for part in (kind.encode(), body.encode(), data or b""):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def encode_bars(bars: BarSet) -> tuple[dict[str, Any], bytes]:
    """(document, bytes) of a bar set, exact."""
    body: dict[str, Any] = {"time": str(bars.time.astype("datetime64[us]")), "arrays": []}
    parts = []
    for item in fields(bars):
        value = getattr(bars, item.name)
        if isinstance(value, np.ndarray):
            kind = value.dtype.str
            plain = value.astype("int64") if value.dtype.kind == "M" else value
            body["arrays"].append([item.name, kind, list(value.shape)])
            parts.append(np.ascontiguousarray(plain).tobytes())
    body["reasons"] = None if bars.reasons is None else list(bars.reasons)
    body["benchmark"] = bars.benchmark
    return body, b"".join(parts)


def decode_bars(body: Mapping[str, Any], data: bytes) -> BarSet:
    arrays: dict[str, Any] = {}
    at = 0
    for name, kind, shape in body["arrays"]:
        dtype = np.dtype(kind)
        size = int(np.prod(shape)) * dtype.itemsize
        flat = np.frombuffer(data[at : at + size], dtype="int64" if dtype.kind == "M" else dtype)
        arrays[name] = flat.astype(dtype).reshape(shape)
        at += size
    reasons = body["reasons"]
    return BarSet(
        time=np.datetime64(body["time"], "us"),
        reasons=None if reasons is None else tuple(reasons),
        benchmark=body["benchmark"],
        **arrays,
    )
