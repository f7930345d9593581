"""Truncations of the write-ahead log (class `truncations`): each must give a prefix of commits.

A source is the journal of an engine that was killed at the end of its run, with its write-ahead
log; beside each of its commits the venue's journal was copied. A case cuts the log at a byte, opens
the journal as an engine does, and must find exactly the commits whose frames are whole, with a
whole chain of the same entries. In one case of a hundred an engine goes on from there, with the
venue as it was at that commit, and must come to the end of the undisturbed run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reliability._chaos import Case, Outcome, Session, finish
from reliability._live import ENGINE, VENUE, EngineJob, Venue, World, start_engine
from reliability.worlds import SERVED

WAL = f"{ENGINE}-wal"
_HEADER, _FRAME = 32, 24
CHECKPOINTED = 60
"""Pages after which the second kind of source moves its log into the file, and begins it anew."""
RESUMED = 100
"""One case of so many goes on to the end."""


@dataclass
class Source:
    """A journal with its log. ends: of each whole commit in the log, in bytes

    seqs: last entry of each commit of the journal; known: how many of them the file has without the
    log; hashes: of each entry
    """

    room: Path
    ends: list[int]
    seqs: list[int]
    known: int
    hashes: list[bytes]

    def expected(self, length: int) -> int:
        """How many commits a log of so many bytes leaves."""
        return self.known + sum(end <= length for end in self.ends)


_sources: dict[tuple[str, str], Source] = {}


def source_of(session: Session, world: World, kind: str) -> Source:
    """The source of a world; kind: `whole`, all of it in the log, or `begun anew`."""
    if (world.name, kind) not in _sources:
        _sources[world.name, kind] = _make(session, world, kind)
    return _sources[world.name, kind]


def _make(session: Session, world: World, kind: str) -> Source:
    room = session.work / "sources" / f"{world.name}-{kind.replace(' ', '-')}"
    room.mkdir(parents=True)
    world.seed(room, (VENUE,))
    (room / "venues").mkdir()

    def prepare() -> None:
        from echelon.live.engine import LiveEngine
        from echelon.live.journal import Journal

        commit, run, connect = Journal.commit, LiveEngine.run, Journal._check_start
        last = [0]

        def committed(journal: Journal) -> None:
            commit(journal)
            if journal.seq == last[0]:
                return
            last[0] = journal.seq
            copy = room / "venues" / str(journal.seq)
            copy.mkdir()
            for file in room.glob(f"{VENUE}*"):
                if not file.name.endswith(("-shm", ".lock")):
                    shutil.copyfile(file, copy / file.name)

        def checked(journal: Journal, about: dict[str, object]) -> None:
            pages = CHECKPOINTED if kind == "begun anew" else 0
            journal._db.execute(f"PRAGMA wal_autocheckpoint={pages}")
            connect(journal, about)

        def ran(engine: LiveEngine, **options: Any) -> None:
            run(engine, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        Journal.commit, LiveEngine.run = committed, ran  # type: ignore[method-assign, assignment]
        Journal._check_start = checked  # type: ignore[method-assign, assignment]

    with Venue(world, room) as venue:
        running = start_engine(world, room, EngineJob(venue.address, prepare=prepare))
        if running.wait() != -signal.SIGKILL:
            raise RuntimeError(f"no source: {running.code}")
    seqs = sorted(int(path.name) for path in (room / "venues").iterdir())
    ends = commit_ends((room / WAL).read_bytes())
    known = _entries(room, without_log=True)
    hashes = _hashes(room)
    if kind == "whole":  # the first commit of all makes the tables
        if known or len(ends) != len(seqs) + 1:
            raise RuntimeError(f"{len(ends)} commits in the log, {len(seqs)} were made")
        return Source(room, ends, [0, *seqs], 0, hashes)
    if known not in seqs or seqs.index(known) + 1 + len(ends) != len(seqs):
        raise RuntimeError(f"the log does not begin behind entry {known}: choose CHECKPOINTED anew")
    return Source(room, ends, seqs, seqs.index(known) + 1, hashes)


def commit_ends(log: bytes) -> list[int]:
    """Where in a write-ahead log each commit ends; frames of an older log do not count."""
    page = int.from_bytes(log[8:12], "big")
    salts = log[16:24]
    ends = []
    for at in range(_HEADER, len(log) - _FRAME - page + 1, _FRAME + page):
        frame = log[at : at + _FRAME]
        if frame[8:16] != salts:
            break
        if int.from_bytes(frame[4:8], "big"):  # the file's size after a commit
            ends.append(at + _FRAME + page)
    return ends


def _entries(room: Path, *, without_log: bool) -> int:
    """Last entry of a copy."""
    place = room / "look"
    place.mkdir()
    shutil.copyfile(room / ENGINE, place / ENGINE)
    if not without_log:
        shutil.copyfile(room / WAL, place / WAL)
    db = sqlite3.connect(place / ENGINE)
    try:
        row = db.execute("SELECT max(seq) FROM entries").fetchone()
    except sqlite3.OperationalError:  # no table yet
        row = (0,)
    finally:
        db.close()
        shutil.rmtree(place)
    return int(row[0] or 0)


def _hashes(room: Path) -> list[bytes]:
    place = room / "look"
    place.mkdir()
    for name in (ENGINE, WAL):
        shutil.copyfile(room / name, place / name)
    db = sqlite3.connect(place / ENGINE)
    rows = [bytes(row[0]) for row in db.execute("SELECT hash FROM entries ORDER BY seq")]
    db.close()
    shutil.rmtree(place)
    return rows


def plan_truncations(session: Session, seed: int) -> Iterator[Case]:
    """Of two worlds and two kinds of log, in turn; without end."""
    rng = random.Random(f"{seed}-truncations")
    number = 0
    while True:
        world = SERVED[number % 2]
        kind = ("whole", "begun anew")[number // 2 % 2]
        source_of(session, session.worlds[world], kind)
        yield Case(number, "truncations", world, rng.randrange(1 << 30), how=kind)
        number += 1


def run_truncation(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Cut, open, compare; now and then go on to the end."""
    from echelon.errors import EchelonError
    from echelon.live.journal import Journal

    world = session.worlds[case.world]
    source = _sources[case.world, case.how]
    rng = random.Random(case.seed)
    log = (source.room / WAL).read_bytes()
    length = _draw_length(rng, source, len(log))
    tail = b""
    if rng.random() < 0.2:  # a page that was half written
        tail = rng.randbytes(rng.randint(1, 4096))
        outcome.count("with a torn page")
    shutil.copyfile(source.room / ENGINE, room / ENGINE)
    (room / WAL).write_bytes(log[:length] + tail)
    about = session.references[case.world].about
    expected = max(1, source.seqs[source.expected(length) - 1] if source.expected(length) else 0)
    try:
        with Journal.open(room / ENGINE, about) as journal:
            count, digest = journal.verify(), journal._hash
    except EchelonError as error:
        outcome.problems.append(f"cut at {length}: {error}")
        return
    outcome.events += 1
    if count != expected:
        outcome.problems.append(f"cut at {length}: {count} entries, expected {expected}")
    elif digest != source.hashes[count - 1]:
        outcome.problems.append(f"cut at {length}: other entries up to {count}")
    elif case.number == 0 or rng.randrange(RESUMED) == 0:
        _go_on(session, case, world, source, room, count, outcome)


def _draw_length(rng: random.Random, source: Source, size: int) -> int:
    """Anywhere, or a few bytes beside the end of a commit."""
    if rng.random() < 0.5:
        return rng.randint(0, size)
    return min(size, max(0, rng.choice(source.ends) + rng.randint(-40, 40)))


def _go_on(
    session: Session,
    case: Case,
    world: World,
    source: Source,
    room: Path,
    seq: int,
    outcome: Outcome,
) -> None:
    for file in (source.room / "venues" / str(seq)).iterdir():
        shutil.copyfile(file, room / file.name)
    with Venue(world, room) as venue:
        finish(session, case, room, outcome, start_engine(world, room, EngineJob(venue.address)))
    outcome.count("went on to the end")
