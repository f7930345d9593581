"""The alpha158 family against Qlib's own Alpha158 on the same bars: values and speed.

    python -m bench alpha158
    python -m bench.alpha158 --data cn_wide.parquet --symbols 100 --rounds 3

Bars are those a factor sees (`bars_of`), of a synthetic market or of the development symbols of a
file; days without trade are left out for both. Qlib gets the same open, high, low, close and vwap,
traded value for its volume, in float64 from memory. Both compute all 158 columns on one core, in
turns, every round a part of the symbols; compilation counts for neither; processor time does.

Values are compared where Qlib has a finite one and ours has warmed up: Qlib has none where nothing
varies in a window. Fails under 20 ×, or where values differ by more than 1e-5 (of the value, where
that is above 1).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from bench import _peers
from bench.execution import QLIB
from bench.wide import split_symbols
from echelon.config import load_config
from echelon.config.features import WINDOWS
from echelon.data.build import build_panel
from echelon.data.datasets import ensure_dataset
from echelon.data.store import Store
from echelon.features.base import Bars
from echelon.features.engine import bars_of
from echelon.features.indicators import alpha158_features
from echelon.features.prepare import panel_request
from echelon.features.registry import run
from echelon.types import Floats

GOAL, TOLERANCE = 20.0, 1e-5
FEATURES = alpha158_features(WINDOWS)
FIELDS = {"open": "open", "high": "high", "low": "low", "close": "close", "volume": "value"}
NEEDS = (
    *(
        "numpy",
        "pandas",
        "scipy",
        "ruamel.yaml",
        "joblib",
        "python-redis-lock",
        "redis",
        "requests",
    ),
    *(
        "filelock",
        "dill",
        "tqdm",
        "pyyaml",
        "loguru",
        "fire",
        "pydantic-settings",
        "setuptools_scm",
    ),
    "mlflow-skinny",
)


class Round(NamedTuple):
    """Processor seconds of both, and what was compared."""

    ours: float
    theirs: float
    worst: dict[str, float]  # column → largest difference
    compared: int
    unknown: int  # values that Qlib has no number for


def market(data: Path | None, symbols: int, root: Path) -> list[tuple[str, Bars]]:
    """(symbol, bars) of so many symbols, evenly chosen, without bars that have no trade."""
    overrides = ["data.source=synthetic", f"data.synthetic.n_symbols={symbols}"]
    if data is not None:
        bars = pl.read_parquet(data)
        names, _ = split_symbols(bars["symbol"].to_list())
        names = [names[k] for k in np.linspace(0, len(names) - 1, symbols).astype(int)]
        bars.filter(pl.col("symbol").is_in(names)).write_parquet(root / "bars.parquet")
        overrides = ["data.source=parquet", f"data.path={root / 'bars.parquet'}"]
    config = load_config(None, [*overrides, f"data.store={root / 'store'}"])
    dataset = ensure_dataset(config)
    request = panel_request(config)._replace(end=dataset.span[1].date())
    panel = build_panel(Store(config.data.store), dataset.name, request)
    return [
        (symbol, _traded(bars_of(panel, n)[0]))
        for n, symbol in enumerate(panel.symbols)
        if (~np.isnan(panel.close[:, n])).sum() > 2 * max(WINDOWS)
    ]


def _traded(bars: Bars) -> Bars:
    assert bars.value is not None
    on = bars.value > 0
    have = [name for name in Bars.__slots__ if getattr(bars, name) is not None]
    return replace(bars, **{name: getattr(bars, name)[on] for name in have})


def ours(bars: Bars) -> dict[str, Floats]:
    """Every column of one symbol."""
    return {
        name: column
        for feature in FEATURES
        for name, column in zip(feature.names, run(feature, bars).T, strict=True)
    }


def compare(part: list[tuple[str, Bars]], python: Path, wheel: Path, root: Path) -> Round:
    """One round: both on the same symbols."""
    began = time.process_time()
    values = {symbol: ours(bars) for symbol, bars in part}
    mine = time.process_time() - began
    fields = FIELDS | {"vwap": "vwap"}
    arrays = {f"{s}/{name}": getattr(b, field) for s, b in part for name, field in fields.items()}
    np.savez(root / "bars.npz", **arrays)
    script = Path(__file__).with_name("_qlib_alpha158.py")
    files = [str(root / "bars.npz"), str(root / "out.npz"), str(wheel)]
    done = subprocess.run(
        [str(python), str(script), *files], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"Qlib's side failed:\n{done.stderr.strip()[-2000:]}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    worst, compared, unknown = dict.fromkeys(report["names"], 0.0), 0, 0
    with np.load(root / "out.npz") as theirs:
        for symbol, columns in values.items():
            if set(columns) != set(report["names"]):
                raise SystemExit(f"columns differ: {sorted(set(columns) ^ set(report['names']))}")
            for k, name in enumerate(report["names"]):
                a, b = columns[name], theirs[symbol][:, k].astype(np.float64)
                warm, known = ~np.isnan(a), np.isfinite(b)
                gap = np.abs(a - b)[warm & known] / np.maximum(np.abs(b[warm & known]), 1.0)
                worst[name] = max(worst[name], float(gap.max(initial=0.0)))
                compared, unknown = compared + len(gap), unknown + int((warm & ~known).sum())
    return Round(mine, report["seconds"], worst, compared, unknown)


def main(argv: list[str] | None = None) -> int:
    """Print times, their ratio and the largest differences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a Parquet file of bars")
    parser.add_argument("--symbols", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    # `python -m bench alpha158` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    python, wheel = _peers.environment("qlib-features", NEEDS), _peers.unpacked("Qlib", QLIB)
    with tempfile.TemporaryDirectory() as scratch:
        symbols = market(args.data, args.symbols, Path(scratch))
        ours(symbols[0][1])
        parts = [symbols[k :: args.rounds] for k in range(args.rounds)]
        rounds = [compare(part, python, wheel, Path(scratch)) for part in parts if part]
    for k, turn in enumerate(rounds, 1):
        ratio = turn.theirs / turn.ours
        print(f"round {k}: echelon {turn.ours:.2f} s, Qlib {turn.theirs:.2f} s, {ratio:.0f} ×")
    bars = sum(len(bars) for _, bars in symbols)
    worst = {name: max(turn.worst[name] for turn in rounds) for name in rounds[0].worst}
    ratio = sum(turn.theirs for turn in rounds) / sum(turn.ours for turn in rounds)
    print(f"{len(symbols)} symbols, {bars:,} bars × {len(worst)} columns, one core: {ratio:.0f} ×")
    print(f"{sum(turn.compared for turn in rounds):,} values compared; {QLIB} has no number for")
    print(f"{sum(turn.unknown for turn in rounds):,} more. Largest differences:")
    for name in sorted(worst, key=lambda name: -worst[name])[:8]:
        print(f"  {name:<8}{worst[name]:.1e}")
    good = ratio >= GOAL and max(worst.values()) <= TOLERANCE
    print(f"goal: {GOAL:g} × and within {TOLERANCE:g}: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
