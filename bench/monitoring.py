"""What metrics and guards cost a live engine, and what a scrape takes.

    python -m bench monitoring
    python -m bench.monitoring --bars 2000

Two engines of one bundle on 20 assets, with a journal and a paper venue each, take the same bars in
turn, one with metrics and one without. Times are processor time of the engine's thread:

- to orders: from the complete bar set to the sent orders, which metrics must not delay
- metrics: what the watcher takes per bar, after the orders are out
- guards: what both of them take per bar, of which `check` is before the orders; in both engines
- scrape: the page that Prometheus reads, made by a thread of its own

Fails where metrics and guards together take more than 5 % of the 99th percentile of the time to
orders.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.decision import ASSETS, Case, Walks, make_case, time_calls
from echelon.config.live import LimitsConfig, LiveConfig
from echelon.live.brokers import open_broker
from echelon.live.engine import Clock, LiveEngine, Watcher
from echelon.live.feeds import open_feed
from echelon.live.guards import Guards
from echelon.live.monitor import Monitor
from echelon.monitoring.metrics import LIVE, Metrics

NAMES = ("qtmrl-fast", "hierarchical-tuned")
WARM_UP, BARS = 50, 2_000
GOAL = 0.05
CONFIG = LiveConfig(sync=False, snapshot_every=10_000, limits=LimitsConfig(trading_hours=False))


def open_engine(case: Case, journal: Path) -> LiveEngine:
    """An engine behind the history, whose clock is the processor time of its thread."""
    return LiveEngine.open(
        *(case.bundle, case.store, journal, open_feed("store", case.bundle, case.store)),
        open_broker("paper", case.bundle, journal, case.store, None, CONFIG),
        *(CONFIG,),
        clock=Clock(monotonic=time.thread_time),
    )


class Timed:
    """A watcher and what it takes, in milliseconds a bar."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.taken: list[float] = []

    def watch(self, engine: LiveEngine, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """As the watcher does."""
        began = time.thread_time()
        self.watcher.watch(engine, entries)
        self.taken.append(1e3 * (time.thread_time() - began))


class TimedGuards:
    """What the guards of an engine take, in milliseconds a bar.

    What they note of a bar's entries they note at its check, so that it is timed at once.
    """

    def __init__(self, guards: Guards) -> None:
        self.taken: list[float] = []
        entries: list[tuple[str, Mapping[str, Any]]] = []
        note, check = guards.note, guards.check

        def check_timed(*values: Any) -> list[dict[str, Any]]:
            began = time.thread_time()
            for entry in entries:
                note(*entry)
            bodies = check(*values)
            self.taken.append(1e3 * (time.thread_time() - began))
            entries.clear()
            return bodies

        vars(guards).update(note=lambda *entry: entries.append(entry), check=check_timed)


def measure(directory: Path, name: str, walks: Walks) -> bool:
    """Print a row of the table; whether the goal is met."""
    case, metrics = make_case(directory, name, walks), Metrics(*LIVE)
    latency: dict[bool, list[float]] = {False: [], True: []}
    with (
        open_engine(case, directory / f"{name}-plain.db") as plain,
        open_engine(case, directory / f"{name}-watched.db") as watched,
    ):
        timed = Timed(Monitor(metrics, watched, "store"))
        watched.watchers.append(timed)
        assert watched.guards.settings is not None, "the guards are on"
        guards = TimedGuards(watched.guards)
        for k, bars in enumerate(walks.bar_sets()):
            for engine in (plain, watched) if k % 2 else (watched, plain):
                engine.step(bars)
                assert engine.latency is not None
                latency[engine is watched].append(1e3 * engine.latency)
        assert not watched.errors, watched.errors
        orders = watched.state.counts["order"] / len(timed.taken)
        scrape = statistics.median(time_calls(metrics.render).tolist())
    both = np.add(timed.taken, guards.taken)
    taken = (latency[False], latency[True], timed.taken, guards.taken, both)
    parts = [np.percentile(part[WARM_UP:], [50, 99]) for part in taken]
    share = parts[-1][1] / parts[0][1]
    columns = " ".join(f"{p50:7.3f} /{p99:7.3f}" for p50, p99 in parts[:-1])
    print(f"{name:20} {columns} {scrape:7.2f} {share:7.1%} {orders:7.1f}")
    return bool(share <= GOAL)


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bars", type=int, default=BARS)
    args = parser.parse_args(list(argv))
    walks = Walks(args.bars + WARM_UP, ASSETS)
    print(f"{args.bars:,} bars of {ASSETS} assets; milliseconds of one core, p50 / p99")
    heads = "".join(f"{head:>17}" for head in ("to orders", "with metrics", "metrics", "guards"))
    print(f"{'':20}{heads}  scrape   share  orders")
    with tempfile.TemporaryDirectory() as directory:
        met = [measure(Path(directory), name, walks) for name in NAMES]
    word = "met" if all(met) else "MISSED"
    print(f"goal: metrics and guards take at most {GOAL:.0%} of p99: {word}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
