"""The journal: append-only, chained, whole commits, one writer, and what was written comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest

from echelon.data.stream import BarSet
from echelon.errors import DamagedError, StoreError, UsageError
from echelon.live.journal import Journal, decode_bars, encode_bars

ABOUT = {"bundle": "b" * 64, "broker": "paper"}


def _filled(path: Path, commits: int = 5, each: int = 3) -> Path:
    with Journal.open(path, ABOUT) as journal:
        for commit in range(commits):
            for k in range(each):
                journal.append("note", {"commit": commit, "k": k}, bytes([commit, k]))
            journal.commit()
    return path


def test_what_is_committed_is_read_again_in_order(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.db")
    with Journal.read(path) as journal:
        entries = list(journal.entries(kinds=("note",)))
        assert journal.verify() == 16
        assert journal.about()["broker"] == "paper"
    assert [(e.body["commit"], e.body["k"]) for e in entries] == [
        (c, k) for c in range(5) for k in range(3)
    ]
    assert entries[4].data == bytes([1, 1])


def test_a_reader_has_the_journal_as_it_was_opened(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.db")
    with Journal.open(path, ABOUT) as writing:
        writing.snapshot(b"before")
        writing.commit()
        with Journal.read(path) as reading:
            seen = [entry.seq for entry in reading.entries()]
            for state in (b"one", b"two", b"three", b"four"):
                writing.append("note", {"new": True})
                writing.snapshot(state)
                writing.commit()
            assert [entry.seq for entry in reading.entries()] == seen
            assert reading.last_snapshot() == (reading.seq, b"before")
            last = reading.last("note")
            assert last is not None
            assert "new" not in last.body
            assert reading.verify() == reading.seq == seen[-1]
        with Journal.read(path) as reading:
            assert reading.seq == writing.seq


def test_what_is_not_committed_is_gone(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.db")
    with Journal.open(path, ABOUT) as journal:
        journal.append("note", {"commit": 9, "k": 9})
    with Journal.read(path) as journal:
        assert journal.verify() == 16


def test_entries_cannot_be_changed_or_deleted(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.db")
    db = sqlite3.connect(path)
    for statement in ("DELETE FROM entries WHERE seq=3", "UPDATE entries SET kind='x' WHERE seq=3"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET body=replace(body, '1', '2') WHERE seq=6",
        "UPDATE entries SET kind='other' WHERE seq=6",
        "UPDATE entries SET data=x'ff' WHERE seq=6",
        "DELETE FROM entries WHERE seq=6",
    ],
)
def test_an_edited_entry_breaks_the_chain_and_is_named(tmp_path: Path, statement: str) -> None:
    path = _filled(tmp_path / "j.db")
    db = sqlite3.connect(path)
    db.executescript("DROP TRIGGER entries_stay; DROP TRIGGER entries_keep;")
    db.execute(statement)
    db.commit()
    db.close()
    with Journal.read(path) as journal, pytest.raises(DamagedError, match="entry 6"):
        journal.verify()


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.db")
    with Journal.open(path, ABOUT) as journal:
        with pytest.raises(StoreError, match=r"j\.db"):
            Journal.open(path, ABOUT)
        journal.append("note", {})
        with Journal.read(path) as reading:
            assert reading.verify() == 16
        journal.commit()


def test_the_journal_of_another_bundle_or_broker_is_refused(tmp_path: Path) -> None:
    path = _filled(tmp_path / "j.db")
    with pytest.raises(StoreError, match="another bundle"):
        Journal.open(path, {**ABOUT, "bundle": "c" * 64})
    with pytest.raises(StoreError, match="another broker"):
        Journal.open(path, {**ABOUT, "broker": "alpaca"})
    with Journal.open(path, ABOUT) as journal:  # the lock was let go
        assert journal.seq == 16


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be one" * 99])
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"j\.db"):
        Journal.read(path)
    with pytest.raises(UsageError, match="no such file"):
        Journal.read(tmp_path / "none.db")


def test_snapshots_keep_the_first_and_the_last_two(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with Journal.open(path, ABOUT) as journal:
        for k in range(6):
            journal.append("note", {"k": k})
            journal.snapshot(b"state %d" % k)
            journal.commit()
        assert journal.last_snapshot() == (13, b"state 5")
        assert journal.last_snapshot(first=True) == (3, b"state 0")
    count = sqlite3.connect(path).execute("SELECT count(*) FROM snapshots").fetchone()[0]
    assert count == 3


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with Journal.open(path, ABOUT) as journal:
        journal.snapshot(b"state")
        journal.commit()
    db = sqlite3.connect(path)
    db.execute("UPDATE snapshots SET data=x'00'")
    db.commit()
    db.close()
    with Journal.read(path) as journal, pytest.raises(DamagedError, match="snapshot 2"):
        journal.verify()


def test_every_cut_of_the_write_ahead_log_leaves_a_prefix_of_commits(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    pid = os.fork()
    if pid == 0:  # dies with its log unmerged, as a crash leaves it
        journal = Journal.open(path, ABOUT)
        for commit in range(12):
            for k in range(3):
                journal.append("note", {"commit": commit, "k": k}, bytes(200))
            journal.commit()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    log = Path(f"{path}-wal").read_bytes()
    assert len(log) > 20_000
    counts = set()
    for length in np.linspace(0, len(log), 120).astype(int).tolist():
        copy = tmp_path / f"cut-{length}"
        copy.mkdir()
        shutil.copy(path, copy / "j.db")
        (copy / "j.db-wal").write_bytes(log[:length])
        with Journal.open(copy / "j.db", ABOUT) as journal:
            notes = sum(1 for _ in journal.entries(kinds=("note",)))
            assert notes % 3 == 0, "half of a commit"
            assert journal.verify() == 1 + notes
            counts.add(notes)
        shutil.rmtree(copy)
    assert min(counts) == 0
    assert max(counts) == 36
    assert len(counts) > 8


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full or RLIMIT_FSIZE of Linux")
def test_a_full_disk_is_named_and_leaves_the_last_commit(tmp_path: Path) -> None:
    import resource

    path = _filled(tmp_path / "j.db")
    size = Path(f"{path}").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with Journal.open(path, ABOUT) as journal:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
            with pytest.raises(StoreError, match="disk's space"):  # noqa: PT012 (any of them)
                for _ in range(50):
                    journal.append("note", {}, bytes(4096))
                    journal.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    with Journal.read(path) as journal:
        assert journal.verify() >= 16


def test_bar_sets_survive_to_the_last_bit() -> None:
    rng = np.random.default_rng(3)
    grids = {name: rng.lognormal(size=4) for name in ("close", "open", "high", "volume")}
    grids["close"][2] = np.nan
    bars = BarSet(
        time=np.datetime64("2020-01-03T09:35", "us"),
        st=np.array([True, False, False, True]),
        members=np.array([True] * 4),
        delisted=np.array(["NaT", "2020-01-02", "NaT", "NaT"], dtype="datetime64[D]"),
        reasons=(None, "merged", None, None),
        benchmark=1 / 3,
        exogenous=rng.normal(size=(4, 2)),
        **grids,
    )
    body, data = encode_bars(bars)
    again = decode_bars(json.loads(json.dumps(body)), data)
    for name, value in vars(bars).items():
        if isinstance(value, np.ndarray):
            other = getattr(again, name)
            assert other.dtype == value.dtype
            assert other.tobytes() == value.tobytes(), name
        else:
            assert getattr(again, name) == value, name


@pytest.mark.parametrize("kind", ["append", "snapshot"])
def test_nothing_is_written_behind_a_write_that_failed(tmp_path: Path, kind: str) -> None:
    path = _filled(tmp_path / "j.db")
    with Journal.open(path, ABOUT) as journal:
        journal.append("note", {"lost": True})  # SQLite may drop it with the one that fails
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count={pages}")
        large = bytes(1 << 20)
        write_large = {
            "append": lambda: journal.append("note", {}, large),
            "snapshot": lambda: journal.snapshot(large),
        }
        with pytest.raises(StoreError, match="disk is full"):
            write_large[kind]()
        journal._db.execute("PRAGMA max_page_count=1000000")  # there is room again
        for write in (lambda: journal.append("note", {}), journal.commit):
            with pytest.raises(StoreError, match="a write failed"):
                write()
    with Journal.open(path, ABOUT) as journal:
        assert journal.verify() == 16
        journal.append("note", {})
        journal.commit()
        assert journal.verify() == 17
