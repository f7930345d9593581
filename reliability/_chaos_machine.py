"""What the machine around an engine does: a full disk (class `disk`), a clock that jumps (`clock`),
a Kafka broker that is killed while the engine reads from it (`kafka`).
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from reliability._chaos import (
    RUN_SECONDS,
    Case,
    Outcome,
    Session,
    finish,
    kill_after,
    last_log,
    look,
)
from reliability._live import (
    ENGINE,
    REFUSED,
    VENUE,
    EngineJob,
    Kill,
    Venue,
    World,
    die_with_parent,
    start_engine,
    wait_for,
)
from reliability._live_facts import (
    differences,
    engine_facts,
    identity_problems,
    paper_problems,
    venue_facts,
)
from reliability._processes import Running, fork
from reliability.worlds import SERVED

DISKS = ("engine: file size", "engine: pages", "venue: file size")
CLOCKS = ("history", "live")
CLOSE = ZoneInfo("America/New_York")
BAR_SECONDS = 0.2
"""Between two bar sets that are published."""
QUIET_SECONDS = 2.0
"""After which a message that the broker acknowledged counts as lost."""


# --- a full disk


def plan_disk(_session: Session, seed: int) -> Iterator[Case]:
    """Room for a part of what an engine or its venue writes."""
    rng = random.Random(f"{seed}-disk")
    number = 0
    while True:
        how = DISKS[number // 2 % len(DISKS)]
        yield Case(number, "disk", SERVED[number % 2], rng.randrange(1 << 30), how=how)
        number += 1


def run_disk(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Fill the disk: a clear end, and nothing lost when there is room again."""
    world, rng = session.worlds[case.world], random.Random(case.seed)
    world.seed(room)
    share = rng.uniform(0.0, 1.0)
    whole = session.work / "references" / case.world
    with Venue(world, room) as venue:
        if case.how.startswith("venue"):
            _limit_file(venue.pid, _between(room / VENUE, whole / VENUE, share))
            running = start_engine(world, room, EngineJob(venue.address))
            running.wait(3.0 * session.references[case.world].seconds + 1.0)
            if running.code is None or running.code != 0:
                outcome.events += 1
            venue.kill()
            look(room, outcome)
            venue.start()
        else:
            prepare = _full_disk(case.how, room, whole, share)
            running = start_engine(world, room, EngineJob(venue.address, prepare=prepare))
            code = running.wait(RUN_SECONDS)
            if code == REFUSED:
                outcome.events += 1
                outcome.count(last_log(room).partition("(")[2].partition(")")[0][:40])
            elif code != 0:
                outcome.problems.append(f"exit code {code}: {last_log(room)}")
                return
            look(room, outcome)
        finish(session, case, room, outcome, start_engine(world, room, EngineJob(venue.address)))


def _between(seed: Path, whole: Path, share: float) -> int:
    """Bytes: more than a journal begins with, less than it needs."""
    least = seed.stat().st_size
    return least + int(share * max(0, whole.stat().st_size - least))


def _limit_file(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def _full_disk(how: str, room: Path, whole: Path, share: float) -> Callable[[], None]:
    """No file grows above a size; or SQLite is told that the disk has so many pages."""
    size = _between(room / ENGINE, whole / ENGINE, share)

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _limit_file(os.getpid(), size)

    def few_pages() -> None:
        from echelon.live.journal import Journal

        check = Journal._check_start

        def checked(journal: Journal, about: Any) -> None:
            page = journal._db.execute("PRAGMA page_size").fetchone()[0]
            journal._db.execute(f"PRAGMA max_page_count={size // page + 1}")
            check(journal, about)

        Journal._check_start = checked  # type: ignore[method-assign, assignment]

    return few_pages if how.endswith("pages") else limit


# --- a clock that jumps


def plan_clock(_session: Session, seed: int) -> Iterator[Case]:
    """History, whose decisions no clock may change; live bars, of which a clock says the age."""
    rng = random.Random(f"{seed}-clock")
    number = 0
    while True:
        how = CLOCKS[number // 2 % 2]
        kills = (Kill(seconds=round(rng.uniform(0.0, 1.0), 3)),) if rng.random() < 0.5 else ()
        yield Case(number, "clock", SERVED[number % 2], rng.randrange(1 << 30), kills, how)
        number += 1


class JumpingClock:
    """Thirty seconds behind the close of the bar, or years away: by lot, again at each look."""

    def __init__(self, seed: int, jumps: float) -> None:
        self._rng, self._jumps = random.Random(seed), jumps
        self._bar = datetime(2015, 1, 2)

    def follow(self) -> None:
        """Learn the bar's time from the gate."""
        from echelon.live.gate import Gate

        is_complete = Gate._is_complete

        def looked(gate: Gate, pending: Any) -> bool:
            self._bar = pending.time.item()
            return is_complete(gate, pending)

        Gate._is_complete = looked  # type: ignore[method-assign, assignment]

    def wall(self) -> datetime:
        """As `Clock.wall`."""
        close = self._bar.replace(hour=16, minute=0, second=30, tzinfo=CLOSE).astimezone(UTC)
        if self._rng.random() >= self._jumps:
            return close
        return close + timedelta(days=self._rng.choice((-3_000, -400, -1, 1, 400, 3_000)))


def run_clock(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Trade by a clock that jumps."""
    from echelon.live.engine import Clock

    world = session.worlds[case.world]
    world.seed(room)
    live = case.how == "live"
    clock = JumpingClock(case.seed, 0.03 if live else 0.5)
    bars = len(session.references[case.world].facts["bars"])
    with Venue(world, room) as venue:
        address = f"file:{world.messages}?mode=live" if live else ""
        job = EngineJob(
            *(venue.address, None, clock.follow),
            feed=address,
            clock=Clock(wall=clock.wall),
            bars=bars,
        )
        running = start_engine(world, room, job)
        for kill in case.kills:
            kill_after(running, kill.seconds * session.references[case.world].seconds)
            if running.wait(RUN_SECONDS) == -signal.SIGKILL:
                outcome.count("with a kill of the engine")
                look(room, outcome)
                running = start_engine(world, room, job)
        if live:
            _finish_live(session, case, room, outcome, running)
        else:
            finish(session, case, room, outcome, running)
    outcome.events += 1
    outcome.count(case.how)


def _finish_live(
    session: Session, case: Case, room: Path, outcome: Outcome, running: Running
) -> None:
    """Orders may have been stopped by the clock's word, and then other trades follow."""
    code = running.wait(RUN_SECONDS)
    if code != 0:
        outcome.problems.append(f"the last engine: exit code {code}: {last_log(room)}")
        return
    facts, venue = engine_facts(room / ENGINE), venue_facts(room / VENUE)
    reference = session.references[case.world].facts
    outcome.problems += differences(facts, reference, but=tuple(reference.keys() - {"bars"}))
    codes = {code for _, code in facts["stopped"]}
    odd = codes - {"halted", "old_data", "closed"} | set(facts["halts"]) - {"clock"}
    outcome.problems += [f"stopped or halted by {name}" for name in sorted(odd)]
    outcome.count("stopped orders", len(facts["stopped"]))
    outcome.count("halts by the clock", len(facts["halts"]))
    # What was written down and never sent is cancelled: the venue has not seen it.
    gone = [i for i, (state, _) in facts["statuses"].items() if state == "cancelled"]
    never = set(gone) - set(venue["orders"])
    facts["orders"] = [order for order in facts["orders"] if order[0] not in never]
    outcome.problems += paper_problems(facts, venue)
    begin = facts["accounts"][0]["cash"]
    outcome.problems += identity_problems(facts, begin, venue["account"])


# --- a Kafka broker that is killed


def plan_kafka(_session: Session, seed: int) -> Iterator[Case]:
    """Four kills of the broker in each case, while bars are published and read."""
    rng = random.Random(f"{seed}-kafka")
    number = 0
    while True:
        kills = tuple(Kill(seconds=round(rng.uniform(0.0, 1.2), 3)) for _ in range(4))
        yield Case(number, "kafka", SERVED[number % 2], rng.randrange(1 << 30), kills)
        number += 1


def run_kafka(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Publish bar by bar, read, kill the broker, start it again on the same port and storage."""
    from scripts.services import running_durable_kafka

    world, rng = session.worlds[case.world], random.Random(case.seed)
    world.seed(room)
    bars = len(session.references[case.world].facts["bars"])
    partitions = rng.choice((1, 3))
    with running_durable_kafka() as broker, Venue(world, room) as venue:
        topic = f"{broker.url}/bars"
        publisher = Running(
            fork(lambda: _publish(world, topic, partitions, room), room / "publisher.log")
        )
        wait_for(room / "begins", publisher, room / "publisher.log")
        job = EngineJob(venue.address, feed=f"{topic}?mode=history", bars=bars)
        engine = start_engine(world, room, job)
        for kill in case.kills:
            time.sleep(kill.seconds)
            if engine.ended():
                outcome.count("too late")
                continue
            broker.kill()
            outcome.events += 1
            time.sleep(rng.uniform(0.0, 0.5))
            broker.restart()
        code = publisher.wait(RUN_SECONDS)
        if code != 0:
            log = (room / "publisher.log").read_text()
            outcome.problems.append(f"the publisher: exit code {code}: {log[-2000:]}")
            engine.end_all()
        code = engine.wait(RUN_SECONDS)
        if code != 0:
            outcome.problems.append(f"the engine: exit code {code}: {last_log(room)[-2000:]}")
            return
    facts = engine_facts(room / ENGINE)
    # What was sent twice is refused at the gate; what the broker lost leaves a gap of offsets.
    lost = int((room / "lost").read_text())
    outcome.count("messages the broker acknowledged and lost", lost)
    reasons = [reason for *_, reason in facts["refused"]]
    outcome.count("messages refused as duplicates", len(reasons) - reasons.count("unreadable"))
    outcome.count("gaps of offsets seen", reasons.count("unreadable"))
    expected = {"duplicate", "late"} | ({"unreadable"} if lost else set())
    odd = sorted(set(reasons) - expected)
    outcome.problems += [f"refused: {reason}" for reason in odd]
    reference = session.references[case.world].facts
    outcome.problems += differences(facts, reference, but=("offsets", "refused"))
    outcome.problems += paper_problems(facts, venue_facts(room / VENUE))


def _publish(world: World, topic: str, partitions: int, room: Path) -> int:
    """Publish bar by bar; what the broker acknowledged and has not is sent again.

    (This broker stores a producer's sequence before the batch: a write in flight when it is killed
    is acknowledged when it is sent again, and is nowhere.) A set is closed when all of it is there.
    """
    from confluent_kafka import Consumer, TopicPartition

    from echelon.live.feeds.kafka import KafkaSink, TopicAddress, partition_of

    die_with_parent()
    server, _, name = topic.removeprefix("kafka://").partition("/")
    sink = KafkaSink(TopicAddress(server, name), partitions)
    reader = Consumer({"bootstrap.servers": server, "group.id": "publisher", "log_level": 0})
    reader.assign([TopicPartition(name, part, 0) for part in range(partitions)])
    there: set[tuple[int, bytes]] = set()
    lost = 0
    (room / "begins").touch()

    def send(messages: list[tuple[str | None, bytes]]) -> int:
        """Send, look, and send again, until all of it is in the topic; how many were lost."""
        again = 0
        while messages:
            for symbol, line in messages:
                sink.send(symbol, line)
            sink.finish()
            wanted = {
                (symbol, line): {
                    (part, line)
                    for part in range(partitions)
                    if symbol is None or part == partition_of(symbol, partitions)
                }
                for symbol, line in messages
            }
            _read(reader, there, set().union(*wanted.values()))
            messages = [message for message, places in wanted.items() if not places <= there]
            again += len(messages)
        return again

    lines = world.messages.read_bytes().splitlines()
    for _, group in groupby(lines, key=lambda line: json.loads(line)["time"]):
        bodies = [(json.loads(line), line) for line in group]
        lost += send([(body.get("symbol", ""), line) for body, line in bodies if not _closes(body)])
        lost += send([(None, line) for body, line in bodies if _closes(body)])
        time.sleep(BAR_SECONDS)
    reader.close()
    (room / "lost").write_text(str(lost))
    return 0


def _closes(body: Mapping[str, object]) -> bool:
    return body["type"] == "close"


def _read(reader: Any, there: set[tuple[int, bytes]], wanted: set[tuple[int, bytes]]) -> None:
    """Read on until `wanted` is there, or nothing has come for two seconds of a living broker."""
    deadline = time.monotonic() + QUIET_SECONDS
    while not wanted <= there and time.monotonic() < deadline:
        for item in reader.consume(100, 0.1):
            if item.error() is None:
                there.add((item.partition(), item.value()))
            deadline = time.monotonic() + QUIET_SECONDS
