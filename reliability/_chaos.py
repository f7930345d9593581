"""What the classes of `reliability.chaos` share: cases, outcomes, worlds and references."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reliability._live import (
    ENGINE,
    VENUE,
    EngineJob,
    Kill,
    Points,
    Venue,
    World,
    load_world,
    make_seeds,
    run_engine,
    start_engine,
)
from reliability._live_facts import (
    Facts,
    chain_problems,
    differences,
    engine_facts,
    paper_problems,
    venue_facts,
)
from reliability._processes import Running, in_process
from reliability.worlds import SERVED

RUN_SECONDS = 180.0


@dataclass(frozen=True)
class Case:
    """One case of a class; everything that is by lot in it follows from `seed`.

    kills: in a row; how: what the class makes of it; fresh: without a warm history in the journal
    """

    number: int
    kind: str
    world: str
    seed: int
    kills: tuple[Kill, ...] = ()
    how: str = ""
    fresh: bool = False

    @property
    def place(self) -> str:
        """For people."""
        words = [self.how] if self.how else []
        return "; ".join([*words, *(kill.place for kill in self.kills)]) or "control"


@dataclass
class Outcome:
    """What came of a case. events: what the class counts; counts: what else happened, by name"""

    number: int
    kind: str
    events: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    covered: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, name: str, more: int = 1) -> None:
        """Note something that happened."""
        self.counts[name] = self.counts.get(name, 0) + more


@dataclass
class Reference:
    """An undisturbed run: what it left, how long it took, and the points that were passed.

    about: what its journal is of; engine, venue: point → how often one process passes it at most
    """

    seconds: float
    facts: Facts
    about: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, int] = field(default_factory=dict)
    venue: dict[str, int] = field(default_factory=dict)


@dataclass
class Session:
    """Worlds, references and directories.

    work/references/WORLD   an undisturbed run
    work/cases/NUMBER       a case on its way; moved to work/failures where it failed
    """

    work: Path
    places: Path
    plant: bool = False
    worlds: dict[str, World] = field(default_factory=dict)
    references: dict[str, Reference] = field(default_factory=dict)

    def load(self) -> None:
        """Load the worlds into this process, and run each undisturbed."""
        for name in SERVED:
            world = self.worlds[name] = load_world(name, self.places / name, self.work)
            world.plant = self.plant
            if not (world.seeds / VENUE).exists():
                in_process(lambda world=world: make_seeds(world, world.seeds), self.log(name))  # type: ignore[misc]
            self._warm_up(world)
            self.references[name] = self._make_reference(world)

    def _warm_up(self, world: World) -> None:
        """Trade once in this process, for all that is imported or compiled on the way."""
        room = self.work / "references" / f"{world.name}-warm"
        room.mkdir(parents=True)
        world.seed(room, (ENGINE,))
        shutil.copyfile(world.seeds / VENUE, room / f"{ENGINE}.venue")
        if run_engine(world, room, EngineJob("paper")):
            raise RuntimeError(f"{world.name} does not trade")

    def log(self, name: str) -> Path:
        """A file for what a helping process prints."""
        return self.work / f"{name}.log"

    def _make_reference(self, world: World) -> Reference:
        from echelon.live.journal import Journal

        room = self.work / "references" / world.name
        room.mkdir(parents=True)
        world.seed(room)
        recorded = {name: room / f"{name}.points" for name in ("engine", "venue")}
        with Venue(world, room, Points(record=recorded["venue"])) as venue:
            started = time.monotonic()
            run_to_end(world, room, EngineJob(venue.address))
            seconds = time.monotonic() - started
        facts = engine_facts(room / ENGINE)
        problems = paper_problems(facts, venue_facts(room / VENUE)) + self._parity(world, room)
        if problems or not facts["orders"] or not facts["fills"]:
            raise RuntimeError(f"{world.name}, undisturbed: {problems or 'no orders or fills'}")
        with Journal.read(room / ENGINE) as journal:
            about = {name: value for name, value in journal.about().items() if name != "format"}
        reference = Reference(seconds, facts, about)
        reference.engine = self._engine_points(world)
        reference.venue = _count_points(recorded["venue"])
        return reference

    def _parity(self, world: World, room: Path) -> list[str]:
        """How the undisturbed journal differs from the backtest of its bars."""

        def replay() -> list[str]:
            from echelon.live.journal import Journal
            from echelon.live.replay import replay_journal

            with Journal.read(room / ENGINE) as journal:
                done = replay_journal(world.bundle, journal)
            compared = [] if done.compared == len(done.decisions) > 10 else ["too few compared"]
            return [*done.differences, *compared]

        problems: list[str] = in_process(replay, self.log(f"parity-{world.name}"))
        return problems

    def _engine_points(self, world: World) -> dict[str, int]:
        """Those of a run from the beginning, and of one that recovers with an order on its way."""
        room = self.work / "references" / f"{world.name}-points"
        room.mkdir(parents=True)
        world.seed(room)
        records = [room / f"points-{k}" for k in range(3)]
        with Venue(world, room) as venue:
            for kill, record in zip(
                (Kill("after append order", 2), Kill("before submit", 3), None),
                records,
                strict=True,
            ):
                job = EngineJob(venue.address, Points(kill, record))
                if kill is None:
                    run_to_end(world, room, job)
                else:
                    start_engine(world, room, job).wait()
        counts = [_count_points(record) for record in records]
        names = sorted({name for passed in counts for name in passed})
        return {name: max(passed.get(name, 0) for passed in counts) for name in names}

    def room(self, case: Case) -> Path:
        """An empty directory for a case."""
        room = self.work / "cases" / f"{case.kind}-{case.number}"
        room.mkdir(parents=True)
        return room


def _count_points(record: Path) -> dict[str, int]:
    return dict(sorted(Counter(record.read_text(encoding="utf-8").splitlines()).items()))


def run_to_end(world: World, room: Path, job: EngineJob) -> None:
    """Run an engine that must come to its end."""
    running = start_engine(world, room, job)
    if running.wait(RUN_SECONDS) != 0:
        raise RuntimeError(f"{world.name}: exit code {running.code}\n{last_log(room)}")


def last_log(room: Path, name: str = "engine") -> str:
    """What the last process of a kind printed."""
    logs = sorted(room.glob(f"{name}-*.log"))
    return logs[-1].read_text(encoding="utf-8", errors="replace")[-4000:] if logs else ""


def kill_after(running: Running, seconds: float) -> None:
    """SIGKILL at a moment, unless the process ends before."""
    end = running.started + seconds
    while time.monotonic() < end and not running.ended():
        time.sleep(min(0.002, max(0.0, end - time.monotonic())))
    if not running.ended():
        os.kill(running.pid, signal.SIGKILL)


def finish(session: Session, case: Case, room: Path, outcome: Outcome, running: Running) -> None:
    """Wait for the engine that runs to the end, and compare all that it left."""
    code = running.wait(RUN_SECONDS)
    if code != 0:
        how = "hangs" if code is None else f"exit code {code}"
        outcome.problems.append(f"the last engine: {how}: {last_log(room)[-400:]}")
        return
    facts = engine_facts(room / ENGINE)
    outcome.problems += differences(facts, session.references[case.world].facts)
    outcome.problems += paper_problems(facts, venue_facts(room / VENUE))


def look(room: Path, outcome: Outcome) -> None:
    """Both chains must be whole whenever a process died."""
    for name in (ENGINE, VENUE, f"{ENGINE}.venue"):
        outcome.problems += chain_problems(room / name)


def points_in_turn(points: dict[str, int], rng: random.Random) -> Iterator[Kill]:
    """Every named point, by lot; when all have had their turn, they begin again."""
    while True:
        names = list(points)
        rng.shuffle(names)
        for name in names:
            yield Kill(name, rng.randint(1, points[name]))


def close_case(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Remove what went well; keep what failed."""
    if not outcome.problems:
        shutil.rmtree(room)
        return
    kept = session.work / "failures" / room.name
    kept.parent.mkdir(exist_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    room.rename(kept)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """JSON."""
    return dict(vars(outcome))
