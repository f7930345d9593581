"""Kills of the engine: forked (class `kills`), and by the real command line (class `fresh`)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from reliability._chaos import (
    RUN_SECONDS,
    Case,
    Outcome,
    Session,
    finish,
    kill_after,
    last_log,
    look,
    points_in_turn,
)
from reliability._live import (
    ENGINE,
    FIRST,
    TOKEN,
    VENUE,
    EngineJob,
    Kill,
    Points,
    Venue,
    World,
    start_engine,
)
from reliability._live_facts import differences, engine_facts, paper_problems, venue_facts
from reliability._processes import Running
from reliability.worlds import ROOT, SERVED

FRESH_SHARE = 0.1
CHAIN = (1, 1, 2, 3, 5)
FEED_SPEED = 600_000
FEED_SECONDS = 3.0
"""That the store's fifteen daily bars take at this speed."""
BEHIND_START = "behind the start"


def plan_kills(session: Session, seed: int) -> Iterator[Case]:
    """Half at named points, each in turn, half at random moments; chains of up to five."""
    rng = random.Random(f"{seed}-kills")
    turns = {
        name: points_in_turn(session.references[name].engine, random.Random(f"{seed}-{name}"))
        for name in SERVED
    }
    number = 0
    while True:
        world = SERVED[number % len(SERVED)]
        longest = session.references[world].seconds
        kills = [
            next(turns[world]) if rng.random() < 0.5 else _moment(rng, longest)
            for _ in range(rng.choice(CHAIN))
        ]
        fresh = rng.random() < FRESH_SHARE
        yield Case(number, "kills", world, rng.randrange(1 << 30), tuple(kills), fresh=fresh)
        number += 1


def _moment(rng: random.Random, longest: float) -> Kill:
    return Kill(seconds=round(rng.uniform(0.0, longest), 4))


def run_kills(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Kill, look, start again; compare at the end."""
    world = session.worlds[case.world]
    if not case.fresh:
        world.seed(room)
    with Venue(world, room) as venue:
        for kill in case.kills:
            points = Points(kill) if kill.point else None
            running = start_engine(world, room, EngineJob(venue.address, points))
            if not kill.point:
                kill_after(running, kill.seconds)
            code = running.wait()
            if code == 0:
                outcome.count("too late")
                break
            if code != -signal.SIGKILL:
                outcome.problems.append(f"exit code {code} at {kill.place}: {last_log(room)}")
                return
            outcome.events += 1
            outcome.count("at named points" if kill.point else "at random moments")
            if kill.point:
                outcome.covered.append(kill.point)
            if random.Random(f"{case.seed}-{kill}").random() < 0.5:
                look(room, outcome)  # the other half starts on the files as they were left
        finish(session, case, room, outcome, start_engine(world, room, EngineJob(venue.address)))


# --- the real command line


def plan_fresh(session: Session, seed: int) -> Iterator[Case]:
    """Up to three kills in a row; at a venue of its own process, and in the engine's by turns.

    Half come so long after the process began, half after it began to trade.
    """
    rng = random.Random(f"{seed}-fresh")
    number = 0
    while True:
        world = SERVED[number % len(SERVED)]
        how = ("remote venue", "venue within")[number // len(SERVED) % 2]
        kills = tuple(
            Kill(rng.choice(("", BEHIND_START)), seconds=round(rng.uniform(0.0, FEED_SECONDS), 3))
            for _ in range(rng.choice((2, 3)))
        )
        yield Case(number, "fresh", world, rng.randrange(1 << 30), kills, how)
        number += 1


def run_fresh(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """`echelon live run`, killed while it starts or trades; at the end, all is as undisturbed."""
    world = session.worlds[case.world]
    if case.how == "remote venue":
        with Venue(world, room) as venue:
            _run_fresh(case, world, room, venue.address, outcome)
    else:
        _run_fresh(case, world, room, "paper", outcome)
    if outcome.problems:
        return
    place = room / (VENUE if case.how == "remote venue" else f"{ENGINE}.venue")
    facts, venue_side = engine_facts(room / ENGINE), venue_facts(place)
    reference = dict(session.references[case.world].facts)
    # Offsets are the feed's own, and this one is another.
    outcome.problems += differences(facts, reference, but=("offsets", "refused"))
    outcome.problems += paper_problems(facts, venue_side)


def _run_fresh(case: Case, world: World, room: Path, broker: str, outcome: Outcome) -> None:
    for kill in case.kills:
        running = _command(world, room, broker)
        log = next(iter(sorted(room.glob("engine-*.log"), reverse=True)))
        while kill.point and not log.stat().st_size and not running.ended():
            time.sleep(0.005)  # it says a line when it begins to trade
        waited = time.monotonic() - running.started if kill.point else 0.0
        kill_after(running, waited + kill.seconds)
        code = running.wait(RUN_SECONDS)
        if code == -signal.SIGKILL:
            outcome.events += 1
            outcome.count("while it trades" if log.stat().st_size else "while it starts")
        elif code == 0:
            outcome.count("too late")
        else:
            outcome.problems.append(f"exit code {code} at {kill.place}: {last_log(room)}")
            return
        look(room, outcome)
    code = _command(world, room, broker).wait(RUN_SECONDS)
    if code != 0:
        outcome.problems.append(f"the last engine: exit code {code}: {last_log(room)}")


class _Command(Running):
    """A process that is no fork of this one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process.pid)
        self._process = process

    def ended(self) -> bool:
        """As of `Running`."""
        self.code = self._process.poll()
        return self.code is not None


def _command(world: World, room: Path, broker: str) -> Running:
    argv = [sys.executable, "-m", "echelon", "live", "run", "--bundle", str(world.place / "bundle")]
    argv += ["--journal", str(room / ENGINE), "--broker", broker, "--store", str(world.store)]
    argv += ["--feed", f"store:{world.store}?speed={FEED_SPEED}", "--from", str(FIRST)]
    argv += ["--no-control", "-o", "snapshot_every=4"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "ECHELON_TOKEN": TOKEN}
    with (room / f"engine-{time.monotonic_ns()}.log").open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=room, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    return _Command(process)
