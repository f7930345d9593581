"""5,000 symbols × 4,000 days from bars to features: peak memory and time, beside pandas.

    python -m bench prepare                              # about 10 GB in a temporary directory
    python -m bench.prepare --symbols 200 --dir /data/scratch

Import, and prepare with the qtmrl set (30 columns) and with the stationary set (ranks, price
limits), each in a process of its own, so that peak memory (VmHWM) is its own; wall time
includes the start of the interpreter and writing the store or the prepared set and its hashes.

The peer does what the field's preprocessing scripts do with the qtmrl set: one long pandas frame
in memory, groupby("symbol").apply over pandas-ta-classic, z-score on the train window. It runs on
a slice of the symbols; its time, and its peak beyond that of the imports, are multiplied up
linearly. It has neither masks nor limits nor hashes. Fails where a peak is over 4 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.config import Config, load_config
from echelon.data.bars import RawFrame, conform
from echelon.data.calendars import sessions
from echelon.data.importing import import_source
from echelon.data.sources import Source
from echelon.data.store import Manifest, Store
from echelon.sources import SourceInfo
from echelon.types import Bools, Times

ROOT = Path(__file__).parents[1]
SYMBOLS, DAYS, PEER_SYMBOLS = 5_000, 4_000, 50
LIMIT_GB = 4.0
DATASET = "bench"
SEED = 7
FIRST, LAST = date(2005, 1, 4), date(2024, 12, 31)
PIECE = 200
SETS = {"qtmrl": "qtmrl", "stationary": "hierarchical"}
"""Feature set → the configuration that asks for it."""


def axis(days: int) -> Times:
    """The first `days` sessions [T]."""
    known = sessions("XSHG", FIRST, LAST)
    if days > len(known):
        raise SystemExit(f"at most {len(known)} days")
    return known[:days]


class WalkSource(Source):
    """Random walks of `symbols` × `days`; `seconds` is what making them took.

    Like A-shares: raw prices in cents, dividends in the factor, late listings, names that go,
    suspensions, and price limits, which give the panel four arrays more than US stocks have.
    A few hundred symbols at a time are made when asked for: the market itself needs no memory.
    """

    def __init__(self, symbols: int, days: int) -> None:
        self.symbols = symbols
        self.times = axis(days)
        self.seconds = 0.0

    def info(self) -> SourceInfo:
        """Raw daily prices on the Shanghai calendar."""
        return SourceInfo(
            name="walk",
            freq="1d",
            calendar="XSHG",
            timezone="Asia/Shanghai",
            price_basis="raw",
            fields=frozenset({"open", "high", "low", "close", "volume", "factor"}),
            fingerprint=f"{self.symbols}x{len(self.times)}",
        )

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Yield `PIECE` symbols at a time."""
        for first in range(0, self.symbols, PIECE):
            began = time.perf_counter()
            numbers = np.arange(first, min(first + PIECE, self.symbols))
            frame = self._piece(numbers)
            self.seconds += time.perf_counter() - began
            yield RawFrame(frame, f"symbols from {first}")

    def _piece(self, numbers: np.ndarray) -> pl.DataFrame:
        """Bars of some symbols, one symbol after the other."""
        rng = np.random.default_rng([SEED, int(numbers[0])])
        shape = (len(numbers), len(self.times))
        moves = np.clip(0.02 * rng.standard_t(4, shape), -0.095, 0.095)
        # A level that drifts back: a walk of 4,000 steps would end in fractions of a cent.
        close = np.empty(shape)
        level = np.zeros(shape[0])
        for t in range(shape[1]):
            level = 0.999 * level + moves[:, t]
            close[:, t] = level
        close = np.round(15 * np.exp(close), 2)
        open_ = np.round(close * (1 + rng.normal(0, 0.005, shape)), 2)
        high = np.round(np.maximum(open_, close) * (1 + rng.exponential(0.004, shape)), 2)
        low = np.round(np.minimum(open_, close) * (1 - rng.exponential(0.004, shape)), 2)
        paid = np.arange(shape[1])[None, :] % 244 == (numbers % 244)[:, None]
        keep = self._has_bar(rng, shape)
        frame = pl.DataFrame(
            {
                "time": np.tile(self.times, shape[0]),
                "symbol": np.repeat(codes(numbers), shape[1]),
                "open": open_.ravel(),
                "high": high.ravel(),
                "low": low.ravel(),
                "close": close.ravel(),
                "volume": np.round(rng.lognormal(13, 1, shape), -2).ravel() + 100,
                "factor": np.cumprod(np.where(paid, 1.02, 1.0), axis=1).ravel(),
            }
        )
        return conform(frame.with_row_index("row", offset=1).filter(pl.Series(keep.ravel())))

    def _has_bar(self, rng: np.random.Generator, shape: tuple[int, int]) -> Bools:
        """[n,T]: a fifth lists late, a twentieth goes early, a suspension now and then."""
        n, days = shape
        born = np.where(rng.random(n) < 0.2, rng.integers(0, days // 2, n), 0)
        gone = np.where(rng.random(n) < 0.05, rng.integers(3 * days // 4, days, n), days)
        here = (np.arange(days) >= born[:, None]) & (np.arange(days) < gone[:, None])
        return here & (rng.random(shape) >= 0.003)


def codes(numbers: Sequence[int] | np.ndarray) -> list[str]:
    """A-share codes of the main boards and, from the 4,000th symbol on, ChiNext."""
    return [
        f"{600_000 + k}.SH" if k < 4000 else f"{300_000 + k - 4000}.SZ" for k in map(int, numbers)
    ]


def fill_store(directory: Path, symbols: int, days: int) -> tuple[Manifest, float]:
    """Import the market into `directory`/store; returns also the seconds spent on making it."""
    source = WalkSource(symbols, days)
    report = import_source(source, Store(directory / "store"), DATASET)
    return report.manifest, source.seconds


def configuration(directory: Path, name: str, days: int, *more: str) -> Config:
    """`configs/<name>.yaml` on the market in `directory`: 70 % train, 15 % valid, 15 % test."""
    day = [str(t) for t in axis(days).astype("datetime64[D]")]
    a, b = int(0.7 * days), int(0.85 * days)
    return load_config(
        ROOT / "configs" / f"{name}.yaml",
        [
            *("data.source=store", f"data.dataset={DATASET}", f"data.store={directory}/store"),
            *(f"data.cache.dir={directory}/cache", "assets=[]", "market.preset=auto"),
            f"split={{train: [{day[0]}, {day[a - 1]}], valid: [{day[a]}, {day[b - 1]}], "
            f"test: [{day[b]}, {day[-1]}]}}",
            *more,
        ],
    )


def run_import(directory: Path, symbols: int, days: int) -> dict[str, float]:
    manifest, making = fill_store(directory, symbols, days)
    return {"rows": manifest.rows, "making": making}


def run_prepare(directory: Path, days: int, name: str) -> dict[str, float]:
    from echelon.features import prepare

    report = prepare(configuration(directory, SETS[name], days), directory / name)
    assert not report.cached, "nothing was measured: the set came from the cache"
    manifest = report.prepared.manifest
    size = sum(f.stat().st_size for f in report.prepared.path.iterdir())
    return {axis: manifest[axis] for axis in "TNF"} | {"gb": size / 1e9}


def run_peer(directory: Path, symbols: int, days: int) -> dict[str, float]:
    """Long frame → groupby-apply → z-score → X.npy, with pandas and pandas-ta-classic."""
    import pandas as pd

    from bench.indicators import PRICES
    from bench.indicators import SETS as INDICATORS

    source = WalkSource(symbols, days)
    bars = pd.concat([raw.frame.to_pandas() for raw in source.frames()])
    bars = bars[["time", "symbol", *PRICES, "volume", "factor"]]
    # The time of importing and generating is not the peer's; its memory is counted from here.
    before, began = _peak_gb(), time.perf_counter()
    bars[list(PRICES)] = bars[list(PRICES)].mul(bars["factor"], axis=0)

    def features(group: pd.DataFrame) -> pd.DataFrame:
        frame = {p: group[p] for p in PRICES}
        found = [column for _, peer in INDICATORS.values() for column in peer(frame)]
        return pd.concat([*found, group["close"] * group["volume"]], axis=1, ignore_index=True)

    columns = bars.groupby("symbol", group_keys=False)[[*PRICES, "volume"]].apply(features)
    long = pd.concat([bars[["time", "symbol"]], columns], axis=1)
    train = long[long["time"] <= source.times[int(0.7 * days) - 1]].iloc[:, 2:]
    long.iloc[:, 2:] = (long.iloc[:, 2:] - train.mean()) / train.std()
    grid = pd.MultiIndex.from_product([source.times, long["symbol"].unique()])
    x = long.set_index(["time", "symbol"]).reindex(grid).fillna(0.0).to_numpy(np.float32)
    np.save(directory / "peer.npy", x)
    return {"F": x.shape[1], "seconds": time.perf_counter() - began, "before_gb": before}


def _peak_gb() -> float:
    # Not ru_maxrss, which would count the parent's memory from before exec.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


def in_child(args: argparse.Namespace, directory: Path, what: str) -> dict[str, Any]:
    """Run one part in a fresh process: what it says, its wall time and its peak memory."""
    threads = {
        name: str(args.threads)
        for name in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }
    command = [sys.executable, "-m", "bench.prepare", "--child", what, "--dir", str(directory)]
    command += ["--symbols", str(args.symbols), "--days", str(args.days)]
    command += ["--peer-symbols", str(args.peer_symbols)]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | threads, stdout=subprocess.PIPE, check=True, text=True
    )
    wall = time.perf_counter() - began
    return {"seconds": wall} | dict(json.loads(done.stdout))


def child(args: argparse.Namespace) -> None:
    if args.child == "import":
        result = run_import(args.dir, args.symbols, args.days)
    elif args.child == "peer":
        result = run_peer(args.dir, args.peer_symbols, args.days)
    else:
        result = run_prepare(args.dir, args.days, args.child)
    print(json.dumps(result | {"peak_gb": _peak_gb()}))


def report(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> bool:
    """Print the table; whether every peak is under the limit."""
    print(f"{args.symbols:,} symbols × {args.days:,} days, {args.threads} thread(s)")
    print(f"{'':<24}{'seconds':>9}{'peak GB':>9}  ")
    for name, r in results.items():
        if name == "import":
            note = f"{r['rows']:,} bars; {r['making']:.0f} s of it making them"
        elif name == "peer":
            continue
        else:
            note = f"X {r['T']:,} × {r['N']:,} × {r['F']}; {r['gb']:.1f} GB written"
        label = name if name == "import" else f"prepare, {name} set"
        print(f"{label:<24}{r['seconds']:>9.1f}{r['peak_gb']:>9.2f}  {note}")
    peer, ours = results["peer"], results["qtmrl"]
    scale = args.symbols / args.peer_symbols
    seconds = peer["seconds"] * scale
    memory = peer["before_gb"] + (peer["peak_gb"] - peer["before_gb"]) * scale
    measured = f"{peer['seconds']:.1f} s, {peer['peak_gb']:.2f} GB at {args.peer_symbols} symbols"
    print(f"{'pandas, qtmrl set':<24}{seconds:>9.1f}{memory:>9.2f}  extrapolated from {measured}")
    print(
        f"ratio, qtmrl set: {seconds / ours['seconds']:.1f}× faster and "
        f"{memory / ours['peak_gb']:.1f}× less memory than pandas (extrapolated)"
    )
    worst = max(r["peak_gb"] for name, r in results.items() if name != "peer")
    good = worst < LIMIT_GB
    verdict = "met" if good else "MISSED"
    print(f"goal: under {LIMIT_GB:g} GB, highest peak {worst:.2f} GB: {verdict}")
    return good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--symbols", type=int, default=SYMBOLS)
    parser.add_argument("--days", type=int, default=DAYS)
    parser.add_argument("--peer-symbols", type=int, default=PEER_SYMBOLS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    # `python -m bench prepare` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if args.child:
        child(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="echelon-bench-", dir=args.dir) as name:
        directory = Path(name)
        results = {"import": in_child(args, directory, "import")}
        for name in SETS:
            results[name] = in_child(args, directory, name)
        results["peer"] = in_child(args, directory, "peer")
    return 0 if report(args, results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
