"""Tick file → minute bars: rows per second and peak memory, against pandas in the same run.

    python bench/ticks.py                        # 50 million rows, about 3 GB in a temporary dir
    python bench/ticks.py --rows 2000000 --dir /data/scratch

The file is a generated day-by-day market of snapshots in Wind's columns, sorted by time. Both
contestants run in a process of their own on the same number of threads, so that peak memory
(VmHWM of the child) is theirs alone. pandas reads the first rows of the same file in chunks
and aggregates them with groupby; its rate is what the ratio compares with.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl

from echelon.data.calendars import sessions

SYMBOLS = 1_000
PEER_ROWS = 2_000_000
SEED = 7
LIMIT_MB = 500


def generate(path: Path, rows: int, *, symbols: int = SYMBOLS, seed: int = SEED) -> None:
    """Write `rows` snapshots, sorted by time: every symbol once in each 3-second round."""
    rng = np.random.default_rng(seed)
    codes = np.array([f"{600_000 + i:06d}.SH" for i in range(symbols)])
    cents = rng.integers(300, 30_000, symbols)
    days = sessions("XSHG", date(2024, 1, 2), date(2024, 12, 31))
    days = np.array([int(str(d)[:10].replace("-", "")) for d in days])
    seconds = np.r_[9 * 3600 + 1800 : 11 * 3600 + 1800 : 3, 13 * 3600 : 15 * 3600 : 3]
    clock = (seconds // 3600 * 10_000 + seconds // 60 % 60 * 100 + seconds % 60) * 1000
    rounds = -(-rows // symbols)
    batch = max(1, 500_000 // symbols)
    with path.open("wb") as handle:
        handle.write("万得代码,自然日,时间,成交价,成交量,成交额,申买价1,申卖价1\n".encode())
        for start in range(0, rounds, batch):
            n = min(batch, rounds - start)
            walk = cents + rng.integers(-3, 4, (n, symbols)).cumsum(axis=0)
            cents = np.maximum(walk[-1], 100)
            price = np.maximum(walk, 100).ravel() / 100
            volume = rng.integers(0, 50, n * symbols) * 100
            order = np.arange(start, start + n)
            frame = pl.DataFrame(
                {
                    "symbol": np.tile(codes, n),
                    "date": np.repeat(days[order // len(clock) % len(days)], symbols),
                    "time": np.repeat(clock[order % len(clock)], symbols) + 17,
                    "price": price,
                    "volume": volume,
                    "amount": np.round(price * volume, 2),
                    "bid": price - 0.01,
                    "ask": price + 0.01,
                }
            ).head(rows - start * symbols)
            frame.write_csv(handle, include_header=False, float_precision=2)


def count_rows(path: Path) -> int:
    with path.open("rb") as handle:
        return sum(1 for _ in handle) - 1


def run_ours(path: Path, freq: str) -> dict[str, float]:
    from echelon.data.sources.ticks import TicksSource

    source = TicksSource(path, freq=freq, calendar="XSHG")  # type: ignore[arg-type]
    began = time.perf_counter()
    bars = sum(piece.frame.height for piece in source.frames())
    seconds = time.perf_counter() - began
    assert not source.problems(), source.problems()[:3]
    return {"rows": count_rows(path), "bars": bars, "seconds": seconds}


def run_import(path: Path, freq: str) -> dict[str, float]:
    """What `echelon data import ticks` does: validated, partitioned, published."""
    from echelon.data.importing import import_source
    from echelon.data.sources.ticks import TicksSource
    from echelon.data.store import Store

    source = TicksSource(path, freq=freq, calendar="XSHG")  # type: ignore[arg-type]
    began = time.perf_counter()
    manifest = import_source(source, Store(path.parent / "store"), "ticks").manifest
    seconds = time.perf_counter() - began
    return {"rows": count_rows(path), "bars": manifest.rows, "seconds": seconds}


def run_pandas(path: Path, rows: int) -> dict[str, float]:
    import pandas as pd

    began = time.perf_counter()
    parts, n = [], 0
    for chunk in pd.read_csv(path, chunksize=250_000, nrows=rows):
        n += len(chunk)
        chunk = chunk[chunk["成交量"] > 0]
        minute = chunk["时间"] // 100_000
        groups = chunk.groupby(["万得代码", "自然日", minute], sort=False)
        parts.append(
            groups.agg(
                open=("成交价", "first"),
                high=("成交价", "max"),
                low=("成交价", "min"),
                close=("成交价", "last"),
                volume=("成交量", "sum"),
                amount=("成交额", "sum"),
            )
        )
    merged = pd.concat(parts).groupby(level=[0, 1, 2], sort=False)
    bars = merged.agg(
        {"open": "first", "high": "max", "low": "min", "close": "last"}
        | {"volume": "sum", "amount": "sum"}
    )
    return {"rows": n, "bars": len(bars), "seconds": time.perf_counter() - began}


def peak_mb() -> float:
    """Most memory this process ever held; ru_maxrss would count its parent's, from before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def in_child(threads: int, *arguments: str) -> dict[str, float]:
    """Run this script with `arguments` in a fresh process and give its answer."""
    environment = os.environ | {
        "POLARS_MAX_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "ARROW_NUM_THREADS": str(threads),
    }
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(done.stdout))


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--peer-rows", type=int, default=PEER_ROWS)
    parser.add_argument("--freq", default="1min", choices=["1min", "5min", "1d"])
    parser.add_argument("--dir", type=Path, help="where to put the file; default: a temporary dir")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", choices=["ours", "import", "pandas"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(list(argv))
    if args.child:
        if args.child == "pandas":
            result = run_pandas(args.file, args.peer_rows)
        else:
            result = (run_ours if args.child == "ours" else run_import)(args.file, args.freq)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        result["peak_mb"] = peak_mb()
        result["cpu"] = usage.ru_utime + usage.ru_stime
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory(prefix="echelon-bench-", dir=args.dir) as directory:
        path = Path(directory) / "ticks.csv"
        generate(path, args.rows)
        size = path.stat().st_size / 1e9
        print(f"{args.rows:,} rows, {size:.2f} GB, {args.threads} thread(s), {args.freq} bars")
        common = ("--file", str(path), "--freq", args.freq, "--peer-rows", str(args.peer_rows))
        ours = in_child(args.threads, "--child", "ours", *common)
        whole = in_child(args.threads, "--child", "import", *common)
        peer = in_child(args.threads, "--child", "pandas", *common)
    print(
        f"{'':10}{'rows':>14}{'bars':>12}{'seconds':>10}{'cpu s':>8}{'rows/s':>14}{'peak MB':>10}"
    )
    for name, r in (("bars", ours), ("import", whole), ("pandas", peer)):
        rate = r["rows"] / r["seconds"]
        print(
            f"{name:10}{r['rows']:>14,.0f}{r['bars']:>12,.0f}{r['seconds']:>10.1f}"
            f"{r['cpu']:>8.1f}{rate:>14,.0f}{r['peak_mb']:>10.0f}"
        )
    ratio = (ours["rows"] / ours["seconds"]) / (peer["rows"] / peer["seconds"])
    peak = max(ours["peak_mb"], whole["peak_mb"])
    print(f"ratio: {ratio:.1f}x the rate of pandas; peak {peak:.0f} MB of {LIMIT_MB} MB")
    if peak > LIMIT_MB:
        sys.exit(f"peak memory {peak:.0f} MB is over the limit of {LIMIT_MB} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
