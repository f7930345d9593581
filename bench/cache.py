"""Warm against cold: the qtmrl set of 200 symbols × 4,000 days from the cache, and computed.

    python -m bench cache
    python -m bench.cache --symbols 20

One process, after imports and after numba's kernels have been loaded by a small prepare, so that
starting the interpreter counts for neither. Cold computes into an empty cache; warm goes into a
fresh run directory from the local cache; Redis, where redis-server is installed, into a fresh run
directory with an empty local cache, as another machine would. Each is the median of several runs.
Fails where local warm is not 20 times faster than cold, or gives anything else than cold did.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.prepare import configuration, fill_store
from echelon.config import Config
from echelon.features import PrepareReport, prepare
from scripts.services import REDIS, running

SYMBOLS, DAYS, RUNS = 200, 4_000, 5
GOAL = 20.0


def timed(runs: int, make: Callable[[int], Config], directory: Path) -> tuple[float, PrepareReport]:
    """Median seconds of `runs` prepares, each into a directory of its own, and the last report."""
    seconds = []
    for k in range(runs):
        config = make(k)
        target = directory / str(k)
        began = time.perf_counter()
        report = prepare(config, target)
        seconds.append(time.perf_counter() - began)
        if k + 1 < runs:
            shutil.rmtree(target)
    return statistics.median(seconds), report


def warm_up(directory: Path) -> None:
    """Load kernels and lazy imports on a market too small to matter."""
    fill_store(directory, 3, 400)
    prepare(configuration(directory, "qtmrl", 400), directory / "run")


def same(one: PrepareReport, other: PrepareReport) -> None:
    other.prepared.verify()
    if one.prepared.manifest != other.prepared.manifest:
        raise SystemExit("the cache gave another result than the computation")


def measure(directory: Path, symbols: int, days: int, runs: int) -> dict[str, float]:
    """Seconds of cold, warm and, where there is a redis-server, Redis."""
    warm_up(directory / "small")
    fill_store(directory, symbols, days)

    def local(name: str, *more: str) -> Config:
        return configuration(
            directory, "qtmrl", days, f"data.cache.dir={directory}/cache-{name}", *more
        )

    cold_s, cold = timed(3, lambda k: local(f"cold-{k}"), directory / "cold")
    assert not cold.cached, "nothing was measured: the set came from the cache"
    warm_s, warm = timed(runs, lambda _: local("cold-2"), directory / "warm")
    assert warm.cached, "nothing was measured: the set was computed"
    same(cold, warm)
    found = {"cold": cold_s, "warm, local": warm_s}
    if REDIS.missing():
        print(f"Redis left out: {REDIS.missing()}")
        return found
    with running(REDIS) as server:
        os.environ["ECHELON_REDIS_URL"] = server.url
        shared = "data.cache.redis=true"
        timed(1, lambda _: local("sender", shared), directory / "sender")
        redis_s, fetched = timed(
            runs, lambda k: local(f"receiver-{k}", shared), directory / "receiver"
        )
        assert fetched.cached, "nothing was measured: the set was computed"
        same(cold, fetched)
    return found | {"warm, Redis": redis_s}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--symbols", type=int, default=SYMBOLS)
    parser.add_argument("--days", type=int, default=DAYS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    # `python -m bench cache` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    with tempfile.TemporaryDirectory(prefix="echelon-bench-", dir=args.dir) as name:
        found = measure(Path(name), args.symbols, args.days, args.runs)
    print(f"{args.symbols} symbols × {args.days} days, in process, imports and kernels loaded")
    print(f"{'':<14}{'seconds':>10}{'ratio':>9}")
    for name, seconds in found.items():
        print(f"{name:<14}{seconds:>10.4f}{found['cold'] / seconds:>9.1f}")
    good = found["cold"] / found["warm, local"] >= GOAL
    print(f"goal: warm at least {GOAL:g}× faster than cold: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
