"""`make fuzz`: wrong inputs by the thousand; a result or an error of ours must come of each.

    python -m reliability fuzz --minutes 5
    python -m reliability fuzz --cases 100000 --seed 7 --workers 2
    python -m reliability fuzz --only config --only csv --cases 1000
    python -m reliability fuzz --replay runs/fuzz/failures/config-1a2b3c4d.json

Case number n of a seed is the same case whatever the number of workers, and whichever targets ran
before it. Every distinct failure (target, kind and innermost frame of ours) is saved with its
input and a line that replays it. Exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reliability import targets as table
from reliability import worlds
from reliability.cases import Outcome, load_case, save_case
from reliability.watched import Finished, Job, Limits, Pool, Settings

MEMORY = 1 << 30
"""Bytes that a case may make a worker grow by."""
THREADS = (
    "POLARS_MAX_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


@dataclass
class Tally:
    """What came of a target's cases."""

    results: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """All of them."""
        return self.results + sum(self.errors.values()) + self.failures

    def add(self, outcome: Outcome) -> None:
        """Count one."""
        self.seconds += outcome.seconds
        if outcome.kind == "result":
            self.results += 1
        elif outcome.kind == "error":
            self.errors[outcome.name] += 1
        else:
            self.failures += 1

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "cases": self.cases,
            "results": self.results,
            "errors": dict(self.errors.most_common()),
            "failures": self.failures,
            "seconds": round(self.seconds, 2),
            "cases_per_second": round(self.cases / self.seconds, 1) if self.seconds else None,
        }


@dataclass
class Failure:
    """A distinct failure: the first case that showed it, and how many did."""

    target: str
    name: str
    where: str
    text: str
    first: int
    file: str
    replay: str
    count: int = 1


class Fuzz:
    """One session: what runs, what was counted, what failed."""

    def __init__(self, names: Sequence[str], seed: int, output: Path, place: Path) -> None:
        self.names = tuple(names)
        self.seed = seed
        self.output = output
        self.worlds = place
        self.tallies = {name: Tally() for name in names}
        self.failures: dict[tuple[str, str, str], Failure] = {}

    def jobs(self, cases: int | None, stop_at: float | None) -> Iterator[Job]:
        """Jobs in the order of their numbers, until there are enough or time is over."""
        weights = [table.TARGETS[name].weight for name in self.names]
        for index in itertools.count():
            if (cases is not None and index >= cases) or (stop_at and time.monotonic() > stop_at):
                return
            # Not the generator of the case itself: what is drawn here must not change the case.
            name = table.generator(self.seed, -1 - index).choices(self.names, weights)[0]
            yield job_of(name, index)

    def take(self, finished: Finished) -> None:
        """Count an outcome; save it if it is a failure of a new kind."""
        job, outcome = finished
        self.tallies[job.target].add(outcome)
        if outcome.kind != "failure":
            return
        key = (job.target, outcome.name, outcome.where)
        known = self.failures.get(key)
        if known is not None:
            known.count += 1
            return
        case = job.case or table.make_case(job.target, self.seed, job.number, self.worlds)
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:10]
        path = self.output / "failures" / f"{job.target}-{digest}.json"
        replay = f"python -m reliability fuzz --replay {path}"
        failure = Failure(
            job.target, outcome.name, outcome.where, outcome.text, job.number, str(path), replay
        )
        self.failures[key] = failure
        facts = {"failure": outcome.name, "where": outcome.where, "text": outcome.text}
        save_case(
            path,
            job.target,
            case,
            facts | {"seed": self.seed, "number": job.number, "replay": replay},
        )
        print(
            f"FAILED {job.target}: {outcome.name} {outcome.where}\n  {replay}",
            file=sys.stderr,
            flush=True,
        )

    def summary(self, seconds: float, workers: int) -> dict[str, Any]:
        """All counts and failures."""
        total = sum(tally.cases for tally in self.tallies.values())
        return {
            "seed": self.seed,
            "workers": workers,
            "seconds": round(seconds, 1),
            "cases": total,
            "cases_per_second": round(total / seconds, 1) if seconds else None,
            "failed": sum(tally.failures for tally in self.tallies.values()),
            "distinct_failures": len(self.failures),
            "targets": {name: tally.as_dict() for name, tally in self.tallies.items()},
            "failures": [vars(failure) for failure in self.failures.values()],
        }


def job_of(name: str, index: int) -> Job:
    """The job of a case's number, under the limits of its target."""
    return Job(index, name, Limits(table.TARGETS[name].seconds, MEMORY))


def fuzz(
    names: Sequence[str],
    *,
    seed: int,
    cases: int | None = None,
    minutes: float | None = None,
    workers: int = 2,
    output: Path,
) -> dict[str, Any]:
    """Run a session and write its counts; what `make fuzz` calls."""
    _set_environment()
    needed = dict.fromkeys(world for name in names for world in table.TARGETS[name].worlds)
    place = worlds.ensure(output, needed)
    session = Fuzz(names, seed, output, place)
    started = time.monotonic()
    stop_at = started + 60 * minutes if minutes is not None else None
    with _scratch() as scratch:
        settings = Settings(seed, place, Path(scratch), table.lookup)
        with Pool(settings, workers) as pool:
            shown = started
            try:
                for finished in pool.run(session.jobs(cases, stop_at)):
                    session.take(finished)
                    if time.monotonic() - shown > 30:
                        shown = time.monotonic()
                        _tell(session, shown - started)
            except KeyboardInterrupt:
                print("stopped; what was counted so far:", file=sys.stderr)
    summary = session.summary(time.monotonic() - started, workers)
    (output / "fuzz.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Where cases run: in memory where the system has such a place, since they write thousands."""
    memory = Path("/dev/shm")
    free = shutil.disk_usage(memory).free if os.access(memory, os.W_OK) else 0
    return tempfile.TemporaryDirectory(
        prefix="echelon-fuzz-", dir=memory if free > 2 << 30 else None, ignore_cleanup_errors=True
    )


def _set_environment() -> None:
    """One thread per worker, plain output, none of the user's secrets and settings."""
    for name in THREADS:
        os.environ.setdefault(name, "1")
    for name in [n for n in os.environ if n.startswith("ECHELON_")]:
        del os.environ[name]
    os.environ |= {"MPLBACKEND": "Agg", "COLUMNS": "200", "NO_COLOR": "1", "PYTHONHASHSEED": "0"}
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # The server that forks workers starts with a path of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(worlds.ROOT), *filter(None, path)])
    )


def _tell(session: Fuzz, seconds: float) -> None:
    total = sum(tally.cases for tally in session.tallies.values())
    print(
        f"{seconds:5.0f} s, {total:,} cases, {total / seconds:.0f}/s, "
        f"{len(session.failures)} distinct failures",
        file=sys.stderr,
        flush=True,
    )


def print_summary(summary: Mapping[str, Any]) -> None:
    """The counts as a table, then the failures."""
    titles = {
        "cases": 7,
        "results": 8,
        "our errors": 10,
        "failures": 8,
        "cases/s": 8,
    }  # of one processor
    head = f"{'target':<10} " + " ".join(f"{title:>{width}}" for title, width in titles.items())
    print(f"{head}  errors by class\n{'-' * (len(head) + 20)}")
    for name, tally in summary["targets"].items():
        errors = tally["errors"]
        classes = ", ".join(f"{kind} {n}" for kind, n in errors.items())
        print(
            f"{name:<10} {tally['cases']:>7} {tally['results']:>8} {sum(errors.values()):>10} "
            f"{tally['failures']:>8} {tally['cases_per_second'] or 0:>8}  {classes}"
        )
    for failure in summary["failures"]:
        where = failure["where"] or "?"
        print(f"\n{failure['target']}: {failure['name']} at {where} ({failure['count']} cases)")
        print(f"  {failure['text'][:160]!r}\n  {failure['replay']}")
    print(
        f"\n{summary['cases']:,} cases in {summary['seconds']:.0f} s, "
        f"{summary['workers']} workers, seed {summary['seed']}: "
        f"{summary['failed']} failed, {summary['distinct_failures']} distinct"
    )


def replay(path: Path, output: Path) -> Outcome:
    """Run a saved case again, watched as it was."""
    _set_environment()
    name, case = load_case(path)
    place = worlds.ensure(output, table.TARGETS[name].worlds)
    with _scratch() as scratch, Pool(Settings(0, place, Path(scratch), table.lookup), 1) as pool:
        (finished,) = pool.run(iter([job_of(name, 0)._replace(case=case)]))
    return finished.outcome


def main(argv: Sequence[str]) -> int:
    """Read the command line, run, print; exit code 1 where something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m reliability fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, help="stop after this long (default: 5)")
    parser.add_argument("--cases", type=int, help="stop after so many cases")
    parser.add_argument("--seed", type=int, default=1, help="which cases (default: 1)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TARGET",
        choices=list(table.TARGETS),
        help=f"one of {', '.join(table.TARGETS)}; may be given several times",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/fuzz"),
        help="where worlds, failures and fuzz.json go (default: runs/fuzz)",
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one saved case again")
    args = parser.parse_args(argv)
    output = args.output.resolve()
    if args.replay is not None:
        outcome = replay(args.replay, output)
        print(f"{outcome.kind}: {outcome.name} {outcome.where}\n{outcome.text}")
        return 1 if outcome.kind == "failure" else 0
    minutes = 5.0 if args.minutes is None and args.cases is None else args.minutes
    shutil.rmtree(output / "failures", ignore_errors=True)  # of a session before
    names = args.only or list(table.TARGETS)
    summary = fuzz(
        names,
        seed=args.seed,
        cases=args.cases,
        minutes=minutes,
        workers=args.workers,
        output=output,
    )
    print_summary(summary)
    return 1 if summary["failed"] else 0
