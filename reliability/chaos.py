"""Live trading under fire: kills, cut logs, venues and brokers that fail: `make chaos`.

    make chaos CHAOS_ARGS="--seed 1 --kills 100 --truncations 500 --fresh 15 --kafka 0 --alpaca 20"

1. Two bundles, a flat agent and a hierarchy, trade fifteen bars undisturbed, at a paper venue that
   is a process of its own. The journal must equal the backtest, and is the reference.
2. They do it again, and again, and each time something happens to them (see `CLASSES`).
3. After each: the hash chains are whole; every order is exactly once at the venue, by the venue's
   own book; no bar is lost or used twice; decisions, fills, accounts and final equity are those of
   the reference. Where a fault changes what is traded (an order that the venue refuses), the fills
   written down must add up to what the venue holds.

What fails is kept, and `--only CLASS --from NUMBER` runs it again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from reliability._chaos import Case, Outcome, Session, close_case, row_of
from reliability._chaos_kills import plan_fresh, plan_kills, run_fresh, run_kills
from reliability._chaos_machine import (
    plan_clock,
    plan_disk,
    plan_kafka,
    run_clock,
    run_disk,
    run_kafka,
)
from reliability._chaos_venues import (
    plan_alpaca,
    plan_calls,
    plan_venue,
    run_alpaca,
    run_calls,
    run_venue,
)
from reliability._chaos_wal import plan_truncations, run_truncation
from reliability._lanes import Row, run_in_lanes
from reliability._live import preload
from reliability.kill import THREADS
from reliability.worlds import SERVED, ensure

Plan = Callable[[Session, int], Iterator[Case]]
Run = Callable[[Session, Case, Path, Outcome], None]


class Class(NamedTuple):
    """A class of cases. default: how many of its events; per_case: at least, to plan a batch"""

    text: str
    default: int
    plan: Plan
    run: Run


CLASSES: Mapping[str, Class] = {
    "kills": Class("SIGKILL of forked engines", 1_000, plan_kills, run_kills),
    "truncations": Class("cuts of the write-ahead log", 5_000, plan_truncations, run_truncation),
    "fresh": Class("SIGKILL of `echelon live run`", 60, plan_fresh, run_fresh),
    "kafka": Class("SIGKILL of a Kafka broker", 20, plan_kafka, run_kafka),
    "venue": Class("SIGKILL of the paper venue", 100, plan_venue, run_venue),
    "calls": Class("runs in which calls to the paper venue go wrong", 100, plan_calls, run_calls),
    "alpaca": Class("runs at a venue like Alpaca, with faults", 100, plan_alpaca, run_alpaca),
    "disk": Class("full disks", 20, plan_disk, run_disk),
    "clock": Class("runs by a clock that jumps", 20, plan_clock, run_clock),
}


def run_case(session: Session, case: Case) -> Row:
    """One case, and what came of it."""
    outcome = Outcome(case.number, case.kind)
    room = session.room(case)
    started = time.monotonic()
    try:
        CLASSES[case.kind].run(session, case, room, outcome)
    except Exception:  # noqa: BLE001 (a case that cannot be judged has failed)
        outcome.problems.append(traceback.format_exc())
    outcome.seconds = time.monotonic() - started
    close_case(session, case, room, outcome)
    return row_of(outcome)


def run_class(session: Session, name: str, args: argparse.Namespace) -> list[Row]:
    """So many events of a class: where some cases had fewer than planned, more make up for them."""
    wanted: int = getattr(args, name)
    rows: list[Row] = []
    if not wanted:
        return rows
    cases = islice(CLASSES[name].plan(session, args.seed), args.first, None)
    while (left := wanted - sum(row["events"] for row in rows)) > 0:
        batch: list[Case] = []
        while left > 0:
            batch.append(next(cases))
            left -= max(1, len(batch[-1].kills))
        done = run_in_lanes(
            session.work, batch, lambda case: run_case(session, case), args.jobs, _show
        )
        rows += done
        if len(done) < len(batch):  # Ctrl-C
            break
        if sum(bool(row["problems"]) for row in rows) > args.give_up:
            print(f"{name}: more than {args.give_up} failures, the rest is left out")
            break
    return rows


def _show(case: Case, row: Row) -> None:
    """One line a case; a failure has its problems below it."""
    if case.kind == "truncations" and not row["problems"]:
        return
    verdict = "FAILED" if row["problems"] else "ok"
    name = f"{case.kind} {case.number}"
    print(f"{name:18} {case.world:15} {row['seconds']:5.1f} s {verdict:6} {case.place[:120]}")
    for problem in row["problems"][:8]:
        print(f"       {problem}")
    sys.stdout.flush()


def summarise(session: Session, rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Counts, for each class."""
    classes = {}
    for name, own in rows.items():
        counts: Counter[str] = Counter()
        for row in own:
            counts.update(row["counts"])
        classes[name] = {
            "cases": len(own),
            "events": sum(row["events"] for row in own),
            "failures": sum(bool(row["problems"]) for row in own),
            "points_covered": len({point for row in own for point in row["covered"]}),
            "mean_seconds": sum(row["seconds"] for row in own) / max(1, len(own)),
            "counts": dict(sorted(counts.items())),
        }
    engine = {point for ref in session.references.values() for point in ref.engine}
    venue = {point for ref in session.references.values() for point in ref.venue}
    return {
        "classes": classes,
        "failures": sum(row["failures"] for row in classes.values()),
        "engine_points": len(engine),
        "venue_points": len(venue),
        "bars": {name: len(ref.facts["bars"]) for name, ref in session.references.items()},
        "orders": {name: len(ref.facts["orders"]) for name, ref in session.references.items()},
    }


def print_table(summary: Mapping[str, Any]) -> None:
    """Of all classes."""
    print("\n{:14} {:>7} {:>7} {:>8} {:>7}  {}".format(*_HEADER))
    for name, row in summary["classes"].items():
        more = [f"{count:,} {what}" for what, count in row["counts"].items()]
        if row["points_covered"]:
            more.append(f"{row['points_covered']} named points")
        print(
            f"{name:14} {row['cases']:7,} {row['events']:7,} {row['failures']:8} "
            f"{row['mean_seconds']:7.2f}  {', '.join(more)}"
        )


_HEADER = ("class", "cases", "events", "failures", "mean s", "of which")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m reliability chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, row in CLASSES.items():
        text = f"{row.text}; default: {row.default:,}"
        parser.add_argument(f"--{name}", type=int, default=None, help=text)
    parser.add_argument("--only", default="", help="these classes alone, with commas")
    parser.add_argument("--seed", type=int, default=1, help="of the plan; default: 1")
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of a first case")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at a time")
    parser.add_argument("--give-up", type=int, default=20, help="failures of a class; default: 20")
    parser.add_argument(
        "--work", type=Path, help="directory for all of it; default: a new one, in memory if there"
    )
    parser.add_argument(
        "--worlds", type=Path, help="directory that keeps the worlds; default: work"
    )
    parser.add_argument(
        "--plant", action="store_true", help="plant a venue that forgets orders, to see it found"
    )
    args = parser.parse_args(argv)
    only = [name for name in args.only.split(",") if name]
    unknown = [name for name in only if name not in CLASSES]
    if unknown:
        parser.error(f"no class {', '.join(unknown)}; there are: {', '.join(CLASSES)}")
    for name, row in CLASSES.items():
        if getattr(args, name) is None:
            setattr(args, name, row.default if not only or name in only else 0)
    return args


def new_directory() -> Path:
    """Where the cases are: killed processes lose nothing of a file in memory, and it is fast."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="chaos-", dir=place))


def main(argv: Sequence[str]) -> int:
    """Plan, disturb, compare, tell."""
    args = parse(argv)
    for name in THREADS:
        os.environ[name] = "1"
    started = time.monotonic()
    work = (args.work or new_directory()).resolve()
    work.mkdir(parents=True, exist_ok=True)
    for part in ("references", "seeds", "sources", "cases", "failures"):
        shutil.rmtree(work / part, ignore_errors=True)
    places = ensure((args.worlds or work).resolve(), SERVED)
    preload()
    session = Session(work, places, args.plant)
    session.load()
    for name, reference in session.references.items():
        facts = reference.facts
        print(
            f"{name}: {len(facts['bars'])} bars, {len(facts['orders'])} orders, equity "
            f"{facts['equity']:,.2f}, {reference.seconds:.2f} s; {len(reference.engine)} points of "
            f"the engine, {len(reference.venue)} of the venue",
            flush=True,
        )
    rows = {name: run_class(session, name, args) for name in CLASSES if getattr(args, name)}
    summary = summarise(session, rows)
    minutes = (time.monotonic() - started) / 60
    tree = {"seed": args.seed, "jobs": args.jobs, "minutes": minutes, **summary, "rows": rows}
    (work / "chaos.json").write_text(json.dumps(tree, indent=1), encoding="utf-8")
    print_table(summary)
    print(f"{minutes:.1f} minutes, seed {args.seed}; {work / 'chaos.json'}")
    if summary["failures"]:
        print(f"{summary['failures']} failures, kept in {work / 'failures'}", file=sys.stderr)
    return int(bool(summary["failures"]))
