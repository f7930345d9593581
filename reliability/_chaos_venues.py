"""Venues that fail: the paper venue killed (class `venue`), calls to it that go wrong (`calls`), a
venue that speaks as Alpaca does and fails as a network does (`alpaca`).
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

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
    CallFaults,
    EngineJob,
    Kill,
    Points,
    Venue,
    World,
    die_with_parent,
    start_engine,
    wait_for,
)
from reliability._live_facts import Facts, differences, engine_facts, identity_problems, repeated
from reliability._processes import Running, fork, in_process
from reliability.worlds import ROOT, SERVED

ENGINE_KILLED = 0.3
"""Share of the cases in which the engine dies too."""
ALPACA_CASH = 1_000_000.0
ALPACA_SEED = "alpaca.db"
RATES: Mapping[str, float] = {
    **dict.fromkeys(("drop_before", "drop_after", "error_before", "error_after"), 0.02),
    **dict.fromkeys(("hang_before", "hang_after", "throttle", "replay", "garbage"), 0.01),
    **dict.fromkeys(("cut", "slow", "late"), 0.02),
}
"""Of one request; none of these changes what is traded."""
ALPACA_KINDS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "same trades": ("at_once", RATES),
    "refusals": ("at_once", {"reject": 0.3, **RATES}),
    "partial fills": ("parts", RATES),
}
"""Name → (how orders fill, faults). Only the first must end with the equity of the reference."""


# --- the paper venue dies


def plan_venue(session: Session, seed: int) -> Iterator[Case]:
    """The venue is killed one to three times, half at named points."""
    rng = random.Random(f"{seed}-venue")
    turns = {
        name: points_in_turn(session.references[name].venue, random.Random(f"{seed}-{name}-venue"))
        for name in SERVED
    }
    number = 0
    while True:
        world = SERVED[number % len(SERVED)]
        longest = session.references[world].seconds
        kills = tuple(
            next(turns[world])
            if rng.random() < 0.5
            else Kill(seconds=round(rng.uniform(0.0, longest), 4))
            for _ in range(rng.choice((1, 1, 2, 3)))
        )
        yield Case(number, "venue", world, rng.randrange(1 << 30), kills)
        number += 1


def run_venue(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Kill the venue, start it again; the engine waits for it, or dies too."""
    world = session.worlds[case.world]
    rng = random.Random(case.seed)
    world.seed(room)
    kills = list(case.kills)
    with Venue(world, room) as venue:
        venue.kill()  # its port is known now, whatever the points of the next one are
        venue.start(_points(kills[0]))
        running = start_engine(world, room, EngineJob(venue.address))
        dies = rng.uniform(0.0, session.references[case.world].seconds)
        engine_dies = rng.random() < ENGINE_KILLED
        started = end = time.monotonic()
        end += RUN_SECONDS
        while not running.ended() and time.monotonic() < end:
            kill = kills[0] if kills else None
            if kill and not kill.point and time.monotonic() - started > kill.seconds:
                venue.kill()
            if venue.ended():
                outcome.events += 1
                outcome.covered += [kill.point] if kill and kill.point else []
                look(room, outcome)
                kills = kills[1:]
                venue.start(_points(kills[0] if kills else None))
                started = time.monotonic()
            if engine_dies and time.monotonic() - running.started > dies and not running.ended():
                os.kill(running.pid, signal.SIGKILL)
                running.wait()
                outcome.count("with a kill of the engine")
                engine_dies = False
                running = start_engine(world, room, EngineJob(venue.address))
            time.sleep(0.002)
        finish(session, case, room, outcome, running)


def _points(kill: Kill | None) -> Points | None:
    return Points(kill) if kill is not None and kill.point else None


# --- calls go wrong


def plan_calls(_session: Session, seed: int) -> Iterator[Case]:
    """Two to thirty calls of a hundred go wrong."""
    rng = random.Random(f"{seed}-calls")
    number = 0
    while True:
        how = f"{rng.choice((2, 5, 10, 20, 30))} %"
        yield Case(number, "calls", SERVED[number % 2], rng.randrange(1 << 30), how=how)
        number += 1


def run_calls(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Lose requests and answers, send twice, be late."""
    world = session.worlds[case.world]
    world.seed(room)
    record = room / "faults"
    record.touch()
    faults = CallFaults(case.seed, int(case.how.split()[0]) / 100, record)
    rng = random.Random(case.seed)
    with Venue(world, room) as venue:
        job = EngineJob(venue.address, prepare=faults.install)
        running = start_engine(world, room, job)
        if rng.random() < ENGINE_KILLED:
            kill_after(running, rng.uniform(0.0, session.references[case.world].seconds))
            if running.wait() == -signal.SIGKILL:
                outcome.count("with a kill of the engine")
                look(room, outcome)
                running = start_engine(world, room, job)
        finish(session, case, room, outcome, running)
    outcome.events += 1
    for line in record.read_text(encoding="utf-8").splitlines():
        outcome.count(f"calls {line.split()[0]}")


# --- Alpaca


def fake_module() -> ModuleType:
    """The fake venue of the tests."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return importlib.import_module("fake_alpaca")


class FakeVenue:
    """The fake in a process of its own."""

    def __init__(self, world: World, room: Path, seed: int, how: str, rate: float = 1.0) -> None:
        ready = room / "fake.json"
        fill, rates = ALPACA_KINDS[how]
        # Some fault needs an answer that nobody waits for.
        settings: dict[str, Any] = {
            "rates": {name: rate * value for name, value in rates.items()},
            **{"seed": seed, "fill": fill, "hang": 0.1, "cash": ALPACA_CASH},
        }
        prices = first_prices(world)

        def work() -> int:
            die_with_parent()
            with fake_module().FakeAlpaca(room / "book.db", **settings) as fake:
                fake.do({"prices": prices})
                staging = ready.with_suffix(".tmp")
                staging.write_text(json.dumps({"url": fake.url}))
                staging.rename(ready)
                while True:
                    time.sleep(60.0)

        log = room / "fake.log"
        self._running = Running(fork(work, log))
        wait_for(ready, self._running, log)
        self.url: str = json.loads(ready.read_text())["url"]

    def __enter__(self) -> FakeVenue:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.end_all()
        self._running.wait()

    def state(self) -> dict[str, Any]:
        """What its book says."""
        answer: dict[str, Any] = fake_module().call(self.url)
        return answer

    def job(self, kill: Kill | None = None) -> EngineJob:
        """An engine that trades here."""

        def prepare() -> None:
            set_keys(self.url)

        return EngineJob("alpaca", _points(kill), prepare)


def set_keys(url: str) -> None:
    """What an engine finds in its environment."""
    fake = fake_module()
    os.environ |= {
        "ECHELON_ALPACA_URL": url,
        "APCA_API_KEY_ID": fake.KEY,
        "APCA_API_SECRET_KEY": fake.SECRET,
    }


def first_prices(world: World) -> dict[str, float]:
    """Symbol → first close of the bars to trade, at which the fake fills everything."""
    prices: dict[str, float] = {}
    for line in world.messages.read_text(encoding="utf-8").splitlines():
        body = json.loads(line)
        if body["type"] == "bar":
            prices.setdefault(body["symbol"], body["close"])
    return prices


_alpaca: dict[str, Facts] = {}


def _reference(session: Session, world: World) -> Facts:
    """The undisturbed run at the fake."""
    if world.name not in _alpaca:
        room = session.work / "references" / f"{world.name}-alpaca"
        room.mkdir(parents=True)
        in_process(lambda: _make_seed(world), session.log("alpaca"))
        with FakeVenue(world, room, 0, "same trades", rate=0.0) as fake:
            outcome = Outcome(0, "alpaca")
            _trade(world, room, fake, (), outcome)
            problems = outcome.problems or _book_problems(engine_facts(room / ENGINE), fake.state())
        facts = engine_facts(room / ENGINE)
        if problems or not facts["fills"]:
            raise RuntimeError(f"{world.name} at the fake, undisturbed: {problems or 'no fills'}")
        _alpaca[world.name] = facts
    return _alpaca[world.name]


def _make_seed(world: World) -> None:
    from echelon.config.live import LiveConfig
    from echelon.live.brokers import open_broker
    from echelon.live.engine import LiveEngine
    from echelon.live.feeds import open_feed
    from reliability._live import UNTIL

    set_keys("http://127.0.0.1:1")
    bundle, store, journal = world.bundle, world.store, world.seeds / ALPACA_SEED
    feed = open_feed(f"file:{world.messages}", bundle, store)
    broker = open_broker("alpaca", bundle, journal, store, UNTIL)
    LiveEngine.open(bundle, store, journal, feed, broker, LiveConfig(), until=UNTIL).close()


def plan_alpaca(session: Session, seed: int) -> Iterator[Case]:
    """Faults that change no trade, refusals, partial fills, in turn; some engines die too."""
    from echelon.live.alpaca_api import load_alpaca

    for module in ("alpaca.trading.client", "alpaca.trading.requests"):
        load_alpaca(module)
    rng = random.Random(f"{seed}-alpaca")
    number = 0
    while True:
        world = SERVED[number % 2]
        longest = 2.0 * session.references[world].seconds
        _reference(session, session.worlds[world])
        how = tuple(ALPACA_KINDS)[number // 2 % len(ALPACA_KINDS)]
        dies = rng.random() < ENGINE_KILLED
        kills = (Kill(seconds=round(rng.uniform(0.0, longest), 3)),) if dies else ()
        yield Case(number, "alpaca", world, rng.randrange(1 << 30), kills, how)
        number += 1


def run_alpaca(session: Session, case: Case, room: Path, outcome: Outcome) -> None:
    """Trade at a venue that fails, and compare with its book."""
    world = session.worlds[case.world]
    with FakeVenue(world, room, case.seed, case.how) as fake:
        _trade(world, room, fake, case.kills, outcome)
        if outcome.problems:
            return
        state = fake.state()
    facts = engine_facts(room / ENGINE)
    outcome.events += 1
    outcome.count(f"runs with {case.how}")
    for fault, count in state["struck"].items():
        if fault != "none":
            outcome.count(f"faults: {fault}", count)
    outcome.problems += _book_problems(facts, state)
    reference = _alpaca[case.world]
    if case.how == "same trades":
        plain, expected = _without_clocks(facts), _without_clocks(reference)
        outcome.problems += differences(plain, expected, but=("accounts", "refused"))
    else:
        names = reference.keys() - {"bars", "offsets", "halts"}
        outcome.problems += differences(facts, reference, but=tuple(names))


def _trade(
    world: World, room: Path, fake: FakeVenue, kills: tuple[Kill, ...], outcome: Outcome
) -> None:
    """To the end of the feed, and twice more: the last fills are of orders sent at the end.

    Before that the venue fills what is open, or a look at an order would make it fill more.
    """
    (room / ENGINE).write_bytes((world.seeds / ALPACA_SEED).read_bytes())
    for kill in kills:
        running = start_engine(world, room, fake.job())
        kill_after(running, kill.seconds)
        if running.wait(RUN_SECONDS) == -signal.SIGKILL:
            outcome.count("with a kill of the engine")
            look(room, outcome)
    for again in range(3):
        if again:
            fake_module().call(fake.url, {"settle": True})
        code = start_engine(world, room, fake.job()).wait(RUN_SECONDS)
        if code != 0:
            how = "hangs" if code is None else f"exit code {code}"
            outcome.problems.append(f"an engine at the fake: {how}: {last_log(room)[-1500:]}")
            return


def _without_clocks(facts: Facts) -> Facts:
    """Trades without the venue's own numbers and times."""
    plain = [[f["order_id"], f["symbol"], f["shares"], f["price"]] for f in facts["fills"]]
    return {**facts, "fills": plain}


def _book_problems(facts: Facts, state: Mapping[str, Any]) -> list[str]:
    """Orders exactly once, by the venue's own book; the fills written down are what is held."""
    sent = [order[0] for order in facts["orders"]]
    problems = repeated(sent, "order") + [f"halted: {reason}" for reason in facts["halts"]]
    if state["duplicates"]:
        problems.append(f"{state['duplicates']} orders twice at the venue")
    problems += [f"{name}: not ours" for name in state["orders"].keys() - set(sent)]
    final = ("rejected", "cancelled")
    for name in set(sent) - state["orders"].keys():
        if facts["statuses"].get(name, ("?",))[0] not in final:
            problems.append(f"{name}: the venue has no such order")
    if len(facts["fills"]) != len(state["fills"]):
        problems.append(f"{len(facts['fills'])} fills, {len(state['fills'])} at the venue")
    return problems + identity_problems(facts, ALPACA_CASH, state)
