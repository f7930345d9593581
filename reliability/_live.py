"""Live trading for `reliability.chaos`: engines and venues in processes forked from a loaded one.

A process of these has its bundle loaded already, and begins behind a warm history (`World.seed`),
so a case costs a fraction of a second. `Points` are put around the classes from here: product code
knows nothing of them. At the point that it is told, a process kills itself.
"""

from __future__ import annotations

import ctypes
import functools
import http.client
import importlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from reliability._processes import Running, fork, tolerate_threads

TOKEN = "a-token-of-the-chaos-harness-0123456789"
FIRST = date(2015, 11, 9)
"""Day of the first bar to trade: fifteen are left."""
UNTIL = FIRST - timedelta(days=1)
SNAPSHOT_EVERY = 4
REFUSED = 6
"""Exit code of an engine that ended by an error of ours."""
ENGINE, VENUE, MESSAGES = "live.db", "venue.db", "messages.jsonl"
START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_MODULES = (
    *("echelon.live.engine", "echelon.live.replay", "echelon.live.brokers.remote"),
    *("echelon.live.feeds.history", "echelon.config.secrets", "exchange_calendars"),
)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL. point, nth: the nth time the process passes it; nth 0: after so many seconds."""

    point: str = ""
    nth: int = 0
    seconds: float = 0.0

    @property
    def place(self) -> str:
        """For people."""
        if self.nth:
            return f"{self.point} ({self.nth})"
        return f"{self.seconds:.3f} s {self.point or 'after its begin'}"


@dataclass
class World:
    """A bundle that is loaded, its store and messages, and journals that have begun (`seeds`).

    plant: whether its venues forget orders (`plant_forgetful_venue`)
    """

    name: str
    place: Path
    seeds: Path
    bundle: Any = field(repr=False)
    plant: bool = False

    @property
    def messages(self) -> Path:
        """Lines of the bars to trade."""
        return self.seeds / MESSAGES

    @property
    def store(self) -> Path:
        """Where the history is."""
        return self.place / "store"

    def seed(self, room: Path, names: tuple[str, ...] = (ENGINE, VENUE)) -> None:
        """Put journals into a directory that hold the warm history, and nothing else."""
        for name in names:
            shutil.copyfile(self.seeds / name, room / name)


def preload() -> None:
    """Import what engines and venues need, so that forked processes need not; not torch."""
    importlib.import_module("onnxruntime")
    tolerate_threads()  # the runtime's own, which sleeps from the import on
    for name in _MODULES:
        importlib.import_module(name)
    from echelon.data.calendars import sessions

    sessions("XNYS", UNTIL, UNTIL + timedelta(days=30))  # with pandas, and a calendar of all years


def load_world(name: str, place: Path, work: Path) -> World:
    """A world, its bundle loaded into this process."""
    from echelon.serving.bundle import load_bundle

    seeds = work / "seeds" / name
    seeds.mkdir(parents=True, exist_ok=True)
    return World(name, place, seeds, load_bundle(place / "bundle"))


# --- named points, and faults between


class Points:
    """Counts the points that this process passes; notes them, or dies at one."""

    def __init__(self, kill: Kill | None = None, record: Path | None = None) -> None:
        self._kill, self._record = kill, record
        self._passed: Counter[str] = Counter()

    def at(self, point: str) -> None:
        """Pass a point."""
        self._passed[point] += 1
        if self._record is not None:
            with self._record.open("a", encoding="utf-8") as handle:
                handle.write(f"{point}\n")
        kill = self._kill
        if kill is not None and kill.point == point and kill.nth == self._passed[point]:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: type, method: str, name: Callable[..., str] | str) -> None:
        """Put a point before and one after a method."""
        call = getattr(owner, method)

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            point = name if isinstance(name, str) else name(*args)
            self.at(f"before {point}")
            result = call(*args, **kwargs)
            self.at(f"after {point}")
            return result

        setattr(owner, method, wrapped)

    def around_journal(self) -> None:
        """Between every two writes."""
        from echelon.live.journal import Journal

        self.around(Journal, "append", lambda _journal, kind, *_: f"append {kind}")
        self.around(Journal, "commit", "commit")
        self.around(Journal, "snapshot", "snapshot")

    def into_engine(self) -> None:
        """All points of an engine."""
        from echelon.live.brokers.remote import RemoteBroker
        from echelon.live.engine import LiveEngine
        from echelon.live.feeds.history import FileFeed
        from echelon.live.gate import Gate
        from echelon.live.http import Client
        from echelon.serving.engine import DecisionEngine

        self.around_journal()
        for method in ("submit", "orders", "show_bars"):
            self.around(RemoteBroker, method, method)
        calls: list[str] = []
        call = Client.call

        def noted(client: Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
            calls[:] = [path.rpartition("/")[2]]
            return call(client, method, path, body)

        Client.call = noted  # type: ignore[method-assign, assignment]
        # Before: sent, and not acknowledged.
        answer = "getresponse"
        self.around(http.client.HTTPConnection, answer, lambda *_: f"answer to {calls[0]}")
        for owner, method in ((DecisionEngine, "push"), (DecisionEngine, "complete")):
            self.around(owner, method, method)
        for method in ("_replay", "_resolve", "_take_answers", "reconcile"):
            self.around(LiveEngine, method, method.strip("_"))
        self.around(Gate, "note_set", "note of a set")
        self.around(FileFeed, "start", "start of the feed")
        self.around(FileFeed, "poll", "poll")

    def into_venue(self) -> None:
        """All points of a paper venue."""
        from echelon.live import http as live_http
        from echelon.live.brokers.paper import PaperVenue

        self.around_journal()
        self.around(PaperVenue, "_go_on", "fill")
        self.around(PaperVenue, "_replay", "replay")
        self.around(live_http._Requests, "_send", "answer")


class CallFaults:
    """Calls to the venue that go wrong, by lot: as a network does it, seen from the engine."""

    KINDS = ("lost", "unanswered", "twice", "late")

    def __init__(self, seed: int, rate: float, record: Path) -> None:
        self._rng, self._rate, self._record = random.Random(seed), rate, record

    def install(self) -> None:
        """Put them between the engine and its connection."""
        from echelon.live.brokers import BrokerError
        from echelon.live.http import Client

        call = Client.call

        def faulty(client: Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
            fault = self._draw(path)
            if fault == "lost":
                raise BrokerError("planted: the request was lost")
            if fault == "late":
                time.sleep(self._rng.uniform(0.001, 0.05))
            answer = call(client, method, path, body)
            if fault == "unanswered":
                client.close()
                raise BrokerError("planted: the answer was lost")
            return call(client, method, path, body) if fault == "twice" else answer

        Client.call = faulty  # type: ignore[method-assign, assignment]

    def _draw(self, path: str) -> str | None:
        if self._rng.random() >= self._rate:
            return None
        fault = self._rng.choice(self.KINDS)
        with self._record.open("a", encoding="utf-8") as handle:
            handle.write(f"{fault} {path.rpartition('/')[2]}\n")
        return fault


def plant_forgetful_venue() -> None:
    """A fault for the harness to find: a venue that takes an order that it has for a new one."""
    from echelon.live.brokers.paper import PaperVenue

    PaperVenue.orders = lambda _venue, _ids: {}  # type: ignore[method-assign, assignment]


# --- processes


class EngineJob(NamedTuple):
    """An engine to run. address: of the venue; prepare: done in its process before anything else

    settings: of `LiveConfig`; feed: "": the world's messages; bars: of the journal at the end, 0:
    until the feed ends; clock: of the engine
    """

    address: str
    points: Points | None = None
    prepare: Callable[[], None] | None = None
    settings: Mapping[str, Any] = {}
    feed: str = ""
    bars: int = 0
    clock: Any = None


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that forked it ends, however that comes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_engine(world: World, room: Path, job: EngineJob) -> Running:
    """An engine on the room's journal, in a process of its own."""

    def work() -> int:
        die_with_parent()
        if job.points is not None:
            job.points.into_engine()
        if job.prepare is not None:
            job.prepare()
        return run_engine(world, room, job)

    return Running(fork(work, room / f"engine-{time.monotonic_ns()}.log"))


def run_engine(world: World, room: Path, job: EngineJob) -> int:
    """Run an engine to the end of its feed, in this process; its exit code."""
    from echelon.config.live import LiveConfig
    from echelon.errors import EchelonError
    from echelon.live.brokers import open_broker
    from echelon.live.engine import LiveEngine
    from echelon.live.feeds import open_feed

    bundle, store, journal = world.bundle, world.store, room / ENGINE
    os.environ["ECHELON_TOKEN"] = TOKEN
    config = LiveConfig.model_validate({"snapshot_every": SNAPSHOT_EVERY, **job.settings})
    try:
        feed = open_feed(job.feed or f"file:{world.messages}", bundle, store)
        broker = open_broker(job.address, bundle, journal, store, UNTIL, config)
        opened = LiveEngine.open(
            *(bundle, store, journal, feed, broker, config), until=UNTIL, clock=job.clock
        )
        with opened as engine:
            left = job.bars - engine.state.bars
            engine.run(bars=left if job.bars else None)
    except EchelonError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return REFUSED
    return 0


class Venue:
    """A paper venue in a process of its own, that outlives engines; killed at the end."""

    def __init__(self, world: World, room: Path, points: Points | None = None) -> None:
        self._world, self._room = world, room
        self._running: Running | None = None
        self.port = 0
        self.start(points)

    def __enter__(self) -> Venue:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """For `--broker`."""
        return f"paper:http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._running is not None, "started"
        return self._running.pid

    def start(
        self, points: Points | None = None, prepare: Callable[[], None] | None = None
    ) -> None:
        """Start it, on the same port as before; returns when it answers, or died of its points."""
        ready = self._room / "venue.json"
        ready.unlink(missing_ok=True)
        port = self.port

        def work() -> int:
            from echelon.live.brokers.remote import serve_venue

            die_with_parent()
            if self._world.plant:
                plant_forgetful_venue()
            if points is not None:
                points.into_venue()
            if prepare is not None:
                prepare()
            world, journal = self._world, self._room / VENUE
            with serve_venue(world.bundle, journal, world.store, UNTIL, TOKEN, port) as url:
                staging = ready.with_suffix(".tmp")
                staging.write_text(json.dumps({"port": int(url.rpartition(":")[2])}))
                staging.rename(ready)
                while True:
                    time.sleep(60.0)

        log = self._room / f"venue-{time.monotonic_ns()}.log"
        running = self._running = Running(fork(work, log))
        if wait_for(ready, running, log):
            self.port = int(json.loads(ready.read_text())["port"])

    def ended(self) -> bool:
        """Whether it died."""
        assert self._running is not None, "started"
        return self._running.ended()

    def kill(self) -> None:
        """SIGKILL."""
        if self._running is not None and not self._running.ended():
            os.kill(self._running.pid, signal.SIGKILL)
            self._running.wait()


def wait_for(ready: Path, running: Running, log: Path) -> bool:
    """Wait until a process has written a file; False: it was killed before."""
    end = time.monotonic() + START_SECONDS
    while not ready.exists():
        if running.ended():
            if running.code == -signal.SIGKILL:
                return False
            raise RuntimeError(f"ended by itself ({running.code}):\n{log.read_text()}")
        if time.monotonic() > end:
            raise RuntimeError(f"does not start:\n{log.read_text()}")
        time.sleep(0.002)
    return True


def make_seeds(world: World, room: Path) -> None:
    """Messages of the bars; journals of an engine and a venue that have begun, and taken none."""
    from echelon.config.live import LiveConfig
    from echelon.live.brokers.paper import PaperVenue
    from echelon.live.engine import LiveEngine
    from echelon.live.feeds import open_feed, publish_bars

    bundle, store = world.bundle, world.store
    publish_bars(bundle, store, f"file:{world.messages}", UNTIL)
    feed = open_feed(f"file:{world.messages}", bundle, store)
    venue = PaperVenue.open(bundle, room / VENUE, store, UNTIL)
    LiveEngine.open(*(bundle, store, room / ENGINE, feed, venue, LiveConfig()), until=UNTIL).close()
