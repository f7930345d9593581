"""Kill commands at every moment, go on as a user would, and compare bits: `make kill`.

    make kill KILL_ARGS="--kills 300 --seed 1"

1. Each command (see `reliability._commands`) runs once undisturbed. What it left, reduced to
   values, is the reference; the calls that make files durable or remove them are recorded on the
   way: the points at which it can be killed by name.
2. It runs again and is killed: half the times at a random moment, half before or after such a
   point, in the command's own process or in a worker; some with SIGTERM; some of the runs that go
   on are killed again.
3. After each kill the processes that it left end by themselves, everything that was there opens
   and is old or new, and the commands that list and show work.
4. Then the command is given again, with --resume where it has that and nothing else, and comes to
   its end with the values of the reference.

Every case is a directory of its own; one that failed is kept, with the command that replays it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reliability._commands import COMMANDS, Command, write_world
from reliability._lanes import run_in_lanes
from reliability._processes import (
    Running,
    fork,
    in_process,
    lend_forkserver,
    members,
    preload,
    workers_of,
)
from reliability._results import (
    LOOK_PAGES,
    TEMPORARY,
    count_looks,
    digest_values,
    files_of,
    fingerprint,
    leftovers,
)
from reliability.killpoints import sitecustomize as killpoints

HERE = Path(__file__).resolve().parent
THREADS = (
    *("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("MKL_NUM_THREADS", "NUMBA_NUM_THREADS"),
)
ORPHAN_SECONDS = 20.0
"""Within which workers of a killed command end by themselves."""
STRICT_LEFTOVERS = True
"""Whether temporary files of killed processes that outlive the next run are failures."""
SIGTERM_SHARE = 0.2
CHAIN_SHARE = 0.2
"""Of the cases: their continuation is killed too, once or twice."""
STOPPED = {"SIGKILL": (-9,), "SIGTERM": (-15, 143, 130)}
"""Exit codes of a command that a signal ended."""


@dataclass(frozen=True)
class Kill:
    """One kill.

    point, side, nth: before or after the nth time a process passes the point; empty: at a moment
    moment: as a share of the time that the undisturbed command took
    victim: main, or the worker that passes the point, or any worker (at a moment)
    """

    signal: str
    victim: str
    moment: float = 0.0
    point: str = ""
    side: str = ""
    nth: int = 0

    @property
    def place(self) -> str:
        """For people."""
        if self.point:
            return f"{self.signal} to {self.victim} {self.side} {self.point} (time {self.nth})"
        return f"{self.signal} to {self.victim} at {self.moment:.0%} of its time"


@dataclass(frozen=True)
class Case:
    """Kills in a row of one command, which then comes to its end; without any: a control."""

    number: int
    command: str
    kills: tuple[Kill, ...]


@dataclass
class Reference:
    """An undisturbed run.

    before, after: file → digest; points: name → how often one process passes it at most
    """

    command: str
    seconds: float
    before: dict[str, str]
    after: dict[str, str]
    points: dict[str, int]


@dataclass
class Outcome:
    """What came of a case.

    kills: signals that ended a process; covered: points (with sides) at which they came
    """

    number: int
    command: str
    kills: int = 0
    seconds: float = 0.0
    orphans: int = 0
    slowest_orphan: float = 0.0
    covered: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


# --- what a forked process does


def run_command(command: Command, argv: Sequence[str], plant: bool) -> int:
    """Be `echelon argv`, in this forked process."""
    sys.modules["__main__"] = types.ModuleType("__main__")  # workers would import this harness
    sys.argv = ["echelon", *argv]
    if command.prepare is not None:
        command.prepare()
    if plant:
        plant_two_writes()
    spec = os.environ[killpoints.SPEC]
    killpoints.install(json.loads(Path(spec).read_text(encoding="utf-8")), os.getpid())
    if command.has_workers:
        lend_forkserver()
    from echelon.cli.app import main as echelon

    echelon()
    return 0


def plant_two_writes() -> None:
    """A fault for the harness to find: replacing a file writes it in two halves, in its place."""

    def replace_in_place(source: str, target: str) -> None:
        data = Path(source).read_bytes()
        with Path(target).open("wb") as handle:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                handle.write(half)
                handle.flush()
                os.fsync(handle.fileno())
        Path(source).unlink()

    os.replace = replace_in_place  # type: ignore[assignment]


# --- looking at what is there


def inspect(directory: Path, reference: Reference) -> list[str]:
    """What is not whole after a kill: files, datasets, checkpoints, commands that look at them."""
    from echelon.data.checking import check_stored
    from echelon.data.store import Store
    from echelon.runs.checkpoint import best_checkpoint, list_checkpoints, load_checkpoint

    problems = []
    digests = {}
    for name, path in files_of(directory):
        try:
            digests[name] = digest_values(path, directory)
        except Exception as error:  # noqa: BLE001 (whatever a half file makes its reader raise)
            problems.append(f"{name}: half written: {type(error).__name__}: {error}")
    for name, old in reference.before.items():
        new = reference.after.get(name)
        if name in digests and digests[name] not in (old, new):
            problems.append(f"{name}: neither as before nor as after the command")
        if name not in digests and new is not None:
            problems.append(f"{name}: was there before, and is in the reference; now it is not")
    os.chdir(directory)
    try:
        store = Store(Path("store"))
        for name in store.datasets():
            problems += [str(p) for p in check_stored(store, name) if p.severity == "error"]
        for place in Path("runs").rglob("checkpoints"):
            best = best_checkpoint(place)
            for checkpoint in (*list_checkpoints(place), *([best] if best else ())):
                load_checkpoint(checkpoint)
    except Exception as error:  # noqa: BLE001 (ours or not: what was there must open)
        problems.append(f"does not open: {type(error).__name__}: {error}")
    for argv in (("data", "show", "--store", "store"), ("runs", "list", "runs")):
        code = _look(argv) if Path(argv[-1]).is_dir() else 0
        if code:
            problems.append(f"echelon {' '.join(argv)}: exit code {code}")
    return problems


def _look(argv: Sequence[str]) -> int:
    from echelon.cli.app import main as echelon

    sys.argv = ["echelon", *argv]
    try:
        echelon()
    except SystemExit as leave:
        return int(leave.code or 0)
    return 0


def differences(directory: Path, base: Path, reference: Reference, log: Path) -> list[str]:
    """How the values below a directory differ from the reference's, which are below `base`."""
    found: dict[str, str] = in_process(lambda: fingerprint(directory), log)
    names = found.keys() | reference.after.keys()
    if count_looks(directory) > count_looks(base):
        names -= set(LOOK_PAGES)
    return [
        f"{name}: {_how(found.get(name), reference.after.get(name))}"
        for name in sorted(names)
        if found.get(name) != reference.after.get(name)
    ]


def _how(now: str | None, then: str | None) -> str:
    if now is None:
        return "missing"
    return "not in the reference" if then is None else "other values than the reference"


# --- the harness


@dataclass
class Harness:
    """Directories and settings of one session.

    work/base/NAME      what a command left undisturbed
    work/cases/NUMBER   a case on its way; moved to work/failures where it failed
    """

    work: Path
    plant: bool = False
    strict_leftovers: bool = STRICT_LEFTOVERS
    references: dict[str, Reference] = field(default_factory=dict)

    def base(self, name: str) -> Path:
        """Where an undisturbed command ran."""
        return self.work / "base" / name / "run"

    def start(
        self,
        command: Command,
        argv: Sequence[str],
        directory: Path,
        kill: Kill | None = None,
        record: Path | None = None,
    ) -> Running:
        """Start a command below `directory`/run, to be killed at a point, or recorded."""
        room = directory / "run"
        token = directory / "fired"
        token.unlink(missing_ok=True)
        spec = {"root": str(room), "token": str(token)}
        tree = spec | {"record": None if record is None else str(record), "kill": None}
        if kill is not None and kill.point:
            tree["kill"] = asdict(kill)  # type: ignore[assignment]
        place = directory / "killpoints.json"
        place.write_text(json.dumps(tree), encoding="utf-8")

        def work() -> int:
            temporary = room / TEMPORARY
            temporary.mkdir(exist_ok=True)
            os.chdir(room)
            tempfile.tempdir = None
            path = os.pathsep.join([str(HERE / "killpoints"), *filter(None, [_python_path()])])
            os.environ |= {
                "TMPDIR": str(temporary),
                "COLUMNS": "200",
                "PYTHONPATH": path,
                "GIT_DIR": os.devnull,  # results name the commit, which may change meanwhile
                killpoints.SPEC: str(place),
                killpoints.MAIN: str(os.getpid()),
            }
            return run_command(command, argv, self.plant and kill is not None)

        return Running(fork(work, directory / f"run-{time.monotonic_ns()}.log"))

    def make_reference(self, name: str) -> Reference:
        """Run a command undisturbed, and what it begins with before it."""
        if name in self.references:
            return self.references[name]
        command = COMMANDS[name]
        before = self.make_reference(command.after).after if command.after else {}
        directory = self.work / "base" / name
        directory.mkdir(parents=True)
        self.furnish(command, directory)
        record = directory / "points"
        planned = Kill("SIGKILL", "main") if self.plant else None
        running = self.start(command, command.argv, directory, planned, record)
        code = running.wait()
        seconds = time.monotonic() - running.started
        if code not in command.exits:
            raise RuntimeError(f"{name}, undisturbed: exit code {code}\n{last_log(directory)}")
        if not before:
            world = self.work / "base" / "world" / "run"
            before = in_process(lambda: fingerprint(world), directory / "before.log")
        room = directory / "run"
        after = in_process(lambda: fingerprint(room), directory / "after.log")
        reference = Reference(name, seconds, before, after, read_points(record))
        self.references[name] = reference
        return reference

    def furnish(self, command: Command, directory: Path) -> None:
        """Copy what a command begins with."""
        world = self.base("world")
        if not world.exists():
            world.mkdir(parents=True)

            def make() -> bool:
                write_world(world)
                return True

            in_process(make, world.parent / "world.log")
        origin = self.base(command.after) if command.after else world
        shutil.copytree(origin, directory / "run", ignore=shutil.ignore_patterns(TEMPORARY))

    def deliver(
        self, kill: Kill, running: Running, reference: Reference, rng: random.Random
    ) -> bool:
        """Send a signal at its moment, and say whether it was; a kill at a point sends itself."""
        if kill.point:
            return False
        end = running.started + kill.moment * reference.seconds
        if kill.victim == "worker":  # the moment counts from the first worker on
            while not running.ended() and not workers_of(running.pid):
                time.sleep(0.02)
            left = max(0.0, reference.seconds - (time.monotonic() - running.started))
            end = time.monotonic() + kill.moment * left
        while time.monotonic() < end and not running.ended():
            time.sleep(0.002)
        if running.ended():
            return False
        victims = workers_of(running.pid) if kill.victim == "worker" else [running.pid]
        if not victims:
            return False
        try:
            os.kill(rng.choice(victims), signal.Signals[kill.signal])
        except ProcessLookupError:  # a worker that has just ended
            return False
        return True

    def bury(self, running: Running, outcome: Outcome) -> None:
        """Wait for the processes that a killed command left; they must end by themselves."""
        started = time.monotonic()
        alive = members(running.pid)
        outcome.orphans += len(alive)
        while alive and time.monotonic() - started < ORPHAN_SECONDS:
            time.sleep(0.05)
            alive = members(running.pid)
        outcome.slowest_orphan = max(outcome.slowest_orphan, time.monotonic() - started)
        if alive:
            outcome.problems.append(
                f"{len(alive)} processes still live {ORPHAN_SECONDS:.0f} s after the command"
            )
            running.end_all()

    def run_case(self, case: Case) -> Outcome:
        """Kill, look, go on; compare at the end."""
        command, reference = COMMANDS[case.command], self.references[case.command]
        outcome = Outcome(case.number, case.command)
        directory = self.work / "cases" / str(case.number)
        directory.mkdir(parents=True)
        started = time.monotonic()
        self.furnish(command, directory)
        rng = random.Random(case.number)
        argv = command.argv
        finished = False
        for kill in case.kills:
            finished = self.run_killed(kill, argv, directory, outcome, rng)
            if finished or outcome.problems:
                break
            argv = command.argv_again(directory / "run")
        if not finished and not outcome.problems:
            code = self.start(command, argv, directory).wait()
            if code not in command.exits:
                what = "hangs" if code is None else f"exit code {code}"
                outcome.problems.append(f"echelon {' '.join(argv)}: {what}")
        if not outcome.problems:
            base, log = self.base(case.command), directory / "after.log"
            outcome.problems += differences(directory / "run", base, reference, log)
        outcome.leftovers = leftovers(directory / "run")
        if self.strict_leftovers:
            outcome.problems += [f"{name}: left behind" for name in outcome.leftovers]
        outcome.seconds = time.monotonic() - started
        self.close(case, outcome, directory)
        return outcome

    def run_killed(
        self,
        kill: Kill,
        argv: Sequence[str],
        directory: Path,
        outcome: Outcome,
        rng: random.Random,
    ) -> bool:
        """Run and kill once; whether the command came to its end all the same."""
        command, reference = COMMANDS[outcome.command], self.references[outcome.command]
        running = self.start(command, argv, directory, kill)
        sent = self.deliver(kill, running, reference, rng)
        code = running.wait()
        self.bury(running, outcome)
        fired = (directory / "fired").exists()
        if code is None:
            outcome.problems.append(f"hangs after {kill.place}")
            return False
        if fired:
            outcome.covered.append(f"{kill.side} {kill.point}")
        if code in command.exits:
            # It did without a worker, or came to its end in spite of SIGTERM. A SIGKILL that
            # leaves an exit code of its own came too late.
            survived = kill.victim == "worker" or kill.signal == "SIGTERM"
            outcome.kills += int((sent or fired) and survived)
            return True
        stopped = code in STOPPED[kill.signal] or (kill.victim == "worker" and 0 < code < 70)
        if not stopped:
            outcome.problems.append(f"exit code {code} after {kill.place}")
            return False
        outcome.kills += 1
        room = directory / "run"
        outcome.problems += in_process(lambda: inspect(room, reference), directory / "inspect.log")
        return False

    def close(self, case: Case, outcome: Outcome, directory: Path) -> None:
        """Remove what went well; keep what failed, with what it takes to run it again."""
        if not outcome.problems:
            shutil.rmtree(directory)
            return
        kept = self.work / "failures" / str(case.number)
        kept.parent.mkdir(exist_ok=True)
        directory.rename(kept)
        tree = {
            "case": asdict(case),
            "kills": [kill.place for kill in case.kills],
            "command": list(COMMANDS[case.command].argv),
            "problems": outcome.problems,
            "stderr": last_log(kept)[-4000:],
            "replay": f"python -m reliability kill --replay {kept / 'failure.json'}",
        }
        (kept / "failure.json").write_text(json.dumps(tree, indent=1), encoding="utf-8")


def _python_path() -> str:
    return os.environ.get("PYTHONPATH", "")


def last_log(directory: Path) -> str:
    """What the last command of a case printed."""
    logs = sorted(directory.glob("run-*.log"))
    return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""


def read_points(record: Path) -> dict[str, int]:
    """Point → how often a process passed it at most, from what was recorded."""
    if not record.exists():
        return {}
    times: Counter[tuple[str, str]] = Counter()
    for line in record.read_text(encoding="utf-8").splitlines():
        pid, point = line.split(" ", 1)
        times[pid, point] += 1
    most: dict[str, int] = defaultdict(int)
    for (_, point), count in times.items():
        most[point] = max(most[point], count)
    return dict(sorted(most.items()))


# --- the plan


def plan(references: Mapping[str, Reference], seed: int) -> Iterator[Case]:
    """Cases without end, the same for the same seed: controls, then commands in turn.

    A command's points come in an order by lot, renames first; when all have had their turn, they
    begin anew. Every second case is at a random moment.
    """
    number = 0
    for name in references:
        yield Case(number, name, ())
        number += 1
    rngs = {name: random.Random(f"{seed}-{name}") for name in references}
    points = {name: _points_in_turn(ref, rngs[name]) for name, ref in references.items()}
    turn = 0
    while True:
        for k, name in enumerate(references):
            rng = rngs[name]
            at_point = (turn + k) % 2 == 0
            first = next(points[name]) if at_point else _moment(COMMANDS[name], rng)
            more = rng.choice((1, 2)) if rng.random() < CHAIN_SHARE else 0
            rest = [
                next(points[name]) if rng.random() < 0.3 else _moment(COMMANDS[name], rng)
                for _ in range(more)
            ]
            yield Case(number, name, (first, *rest))
            number += 1
        turn += 1


def _signal(rng: random.Random) -> str:
    return "SIGTERM" if rng.random() < SIGTERM_SHARE else "SIGKILL"


def _moment(command: Command, rng: random.Random) -> Kill:
    victim = "worker" if command.has_workers and rng.random() < 0.4 else "main"
    kind = "SIGKILL" if victim == "worker" else _signal(rng)
    return Kill(kind, victim, moment=round(rng.uniform(0.0, 0.95), 3))


def _points_in_turn(reference: Reference, rng: random.Random) -> Iterator[Kill]:
    if not reference.points:
        while True:
            yield _moment(COMMANDS[reference.command], rng)
    while True:
        places = [(point, side) for point in reference.points for side in ("before", "after")]
        rng.shuffle(places)
        places.sort(key=lambda place: place[0].split(":")[1] not in ("rename", "replace", "link"))
        for point, side in places:
            in_worker = point.startswith("worker:") and rng.random() < 0.5
            victim = "worker" if in_worker else "main"
            nth = rng.randint(1, reference.points[point])
            yield Kill(_signal(rng), victim, point=point, side=side, nth=nth)


# --- lanes and tables


def run_cases(harness: Harness, cases: Sequence[Case], jobs: int) -> list[Outcome]:
    """Run cases in so many processes side by side, and print one line for each."""
    rows = run_in_lanes(
        harness.work,
        cases,
        lambda case: asdict(harness.run_case(case)),
        jobs,
        lambda case, row: print_outcome(case, Outcome(**row)),
    )
    return [Outcome(**row) for row in rows]


def print_outcome(case: Case, outcome: Outcome) -> None:
    """One line a case; a failure has its problems below it."""
    places = "; ".join(kill.place for kill in case.kills) or "control"
    verdict = "FAILED" if outcome.problems else "ok"
    print(f"{case.number:4} {case.command:16} {outcome.seconds:5.1f} s {verdict:6} {places}")
    for problem in outcome.problems[:5]:
        print(f"       {problem}")
    sys.stdout.flush()


def summarise(references: Mapping[str, Reference], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, for each command and in all."""
    rows = {}
    for name, reference in references.items():
        own = [outcome for outcome in outcomes if outcome.command == name]
        covered = {point for outcome in own for point in outcome.covered}
        rows[name] = {
            "cases": len(own),
            "kills": sum(outcome.kills for outcome in own),
            "points_covered": len(covered),
            "points_known": 2 * len(reference.points),
            "mean_seconds": sum(o.seconds for o in own) / max(1, len(own)),
            "undisturbed_seconds": reference.seconds,
            "orphans": sum(outcome.orphans for outcome in own),
            "slowest_orphan_seconds": max((o.slowest_orphan for o in own), default=0.0),
            "leftovers": sum(len(outcome.leftovers) for outcome in own),
            "failures": sum(bool(outcome.problems) for outcome in own),
        }
    keys = ("cases", "kills", "points_covered", "points_known", "orphans", "leftovers", "failures")
    return {"commands": rows} | {key: sum(row[key] for row in rows.values()) for key in keys}


def print_table(summary: Mapping[str, Any]) -> None:
    """Of all commands."""
    header = ("command", "cases", "kills", "points", "mean s", "orphans", "left", "failures")
    print("\n{:16} {:>6} {:>6} {:>9} {:>7} {:>8} {:>6} {:>9}".format(*header))
    rows = list(summary["commands"].items())
    for name, row in [*rows, ("all", summary)]:
        points = f"{row['points_covered']}/{row['points_known']}"
        mean = f"{row['mean_seconds']:.1f}" if "mean_seconds" in row else ""
        print(
            f"{name:16} {row['cases']:6} {row['kills']:6} {points:>9} {mean:>7} "
            f"{row['orphans']:8} {row['leftovers']:6} {row['failures']:9}"
        )


def select(names: str) -> list[str]:
    """Commands by name, with commas between; all where none is named."""
    chosen = [name for name in names.split(",") if name] or list(COMMANDS)
    unknown = [name for name in chosen if name not in COMMANDS]
    if unknown:
        raise SystemExit(f"no command {', '.join(unknown)}; there are: {', '.join(COMMANDS)}")
    return chosen


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m reliability kill", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=300, help="how many; default: 300")
    parser.add_argument("--seed", type=int, default=1, help="of the plan; default: 1")
    parser.add_argument("--commands", default="", help="which, with commas; default: all")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at a time")
    parser.add_argument("--work", type=Path, help="directory for all of it; default: a new one")
    parser.add_argument("--replay", type=Path, help="run the case of this failure.json again")
    parser.add_argument(
        "--strict-leftovers",
        action=argparse.BooleanOptionalAction,
        default=STRICT_LEFTOVERS,
        help="temporary files of killed processes after the next run are failures",
    )
    parser.add_argument(
        "--plant",
        action="store_true",
        help="plant a writer that is not atomic, to see that it is found",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Plan, kill, tell."""
    args = parse(argv)
    for name in THREADS:
        os.environ[name] = "1"
    started = time.monotonic()
    work = args.work or Path(tempfile.mkdtemp(prefix="kill-"))
    work.mkdir(parents=True, exist_ok=True)
    for part in ("base", "cases", "failures"):
        shutil.rmtree(work / part, ignore_errors=True)
    preload()
    harness = Harness(work.resolve(), args.plant, args.strict_leftovers)
    replayed = _replayed(args.replay)
    names = [replayed.command] if replayed else select(args.commands)
    for name in names:
        reference = harness.make_reference(name)
        print(f"{name}: {reference.seconds:.1f} s, {len(reference.points)} points", flush=True)
    references = {name: harness.references[name] for name in names}
    outcomes: list[Outcome] = []
    if replayed:
        outcomes = run_cases(harness, [replayed], 1)
    else:
        outcomes = _run_plan(harness, references, args)
    summary = summarise(references, outcomes)
    minutes = (time.monotonic() - started) / 60
    told = {"seed": args.seed, "jobs": args.jobs, "minutes": minutes, "plant": args.plant}
    tree = told | summary | {"outcomes": [asdict(outcome) for outcome in outcomes]}
    (work / "kill.json").write_text(json.dumps(tree, indent=1), encoding="utf-8")
    print_table(summary)
    print(f"{summary['kills']} kills in {minutes:.1f} minutes; {work / 'kill.json'}")
    if summary["failures"]:
        print(f"{summary['failures']} failures, kept in {work / 'failures'}", file=sys.stderr)
    return int(bool(summary["failures"]))


def _replayed(path: Path | None) -> Case | None:
    if path is None:
        return None
    tree = json.loads(path.read_text(encoding="utf-8"))["case"]
    return Case(tree["number"], tree["command"], tuple(Kill(**kill) for kill in tree["kills"]))


def _run_plan(
    harness: Harness, references: Mapping[str, Reference], args: argparse.Namespace
) -> list[Outcome]:
    """So many kills: where some came too late, more cases of the same plan make up for them."""
    cases = plan(references, args.seed)
    outcomes: list[Outcome] = []
    while (left := args.kills - sum(outcome.kills for outcome in outcomes)) > 0:
        batch: list[Case] = []
        while left > 0:
            batch.append(next(cases))
            left -= len(batch[-1].kills)
        done = run_cases(harness, batch, args.jobs)
        outcomes += done
        if len(done) < len(batch):  # Ctrl-C: the table is of what was done
            break
    return outcomes
