"""The full qtmrl indicator set, 200 symbols × 4,000 days, against pandas-ta-classic.

    python -m bench indicators
    python bench/indicators.py --symbols 20

One thread, one process, the same 29 columns (all but volume, which is copied) from both, every
symbol by both, in turn. Both are run once on a small piece before the clock starts, so that numba's
compilation and lazy imports count for neither. Ours is timed with everything `run` checks;
pandas-ta gets its Series ready-made and computes natively, as is its default. A symbol's whole
set by us, then the whole set by them: a busy machine disturbs both alike. The outputs are
compared after warm-up. Fails under a ratio of 20, or where they differ by more than 1e-6.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

for _name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402 (threads are set first)
import pandas as pd  # noqa: E402
import pandas_ta_classic as pta  # noqa: E402

from echelon.features import indicators  # noqa: E402
from echelon.features.base import Bars, Feature  # noqa: E402
from echelon.features.registry import run  # noqa: E402
from echelon.types import Floats  # noqa: E402

SYMBOLS, DAYS, SEED = 200, 4_000, 7
WARM_UP = 300
"""Rows left out of the comparison: pandas-ta seeds MACD's fast average earlier than TA-Lib."""
GOAL = 20.0

Frame = dict[str, pd.Series]
PRICES = ("open", "high", "low", "close")

SETS: dict[str, tuple[tuple[Feature, ...], Callable[[Frame], list[pd.Series]]]] = {
    "ohlc": (indicators.ohlcv_features()[:4], lambda f: [f[p] for p in PRICES]),
    "sma": (
        tuple(indicators.sma(p) for p in (10, 20, 50)),
        lambda f: [pta.sma(f["close"], p) for p in (10, 20, 50)],
    ),
    "ema": (
        tuple(indicators.ema(p) for p in (12, 26)),
        lambda f: [pta.ema(f["close"], p) for p in (12, 26)],
    ),
    "rsi": ((indicators.rsi(14),), lambda f: [pta.rsi(f["close"], 14)]),
    "macd": (
        (indicators.macd(12, 26, 9),),
        lambda f: pick(
            pta.macd(f["close"], 12, 26, 9), "MACD_12_26_9", "MACDs_12_26_9", "MACDh_12_26_9"
        ),
    ),
    "atr": ((indicators.atr(14),), lambda f: [pta.atr(f["high"], f["low"], f["close"], 14)]),
    "bbands": (
        (indicators.bbands(20, 2.0),),
        lambda f: pick(
            pta.bbands(f["close"], 20, 2.0), *(f"BB{column}_20_2.0" for column in "LMUBP")
        ),
    ),
    "ichimoku": (
        (indicators.ichimoku(9, 26, 52),),
        lambda f: pick(
            pta.ichimoku(
                f["high"], f["low"], f["close"], 9, 26, 52, include_chikou=False, as_dataframe=True
            ),
            *("ITS_9", "IKS_26", "ISA_9", "ISB_26"),
        ),
    ),
    "heikin-ashi": (
        (indicators.heikin_ashi(),),
        lambda f: pick(pta.ha(*(f[p] for p in PRICES)), *(f"HA_{p}" for p in PRICES)),
    ),
    "supertrend": (
        (indicators.supertrend(10, 3.0),),
        lambda f: pick(
            pta.supertrend(f["high"], f["low"], f["close"], 10, 3.0),
            *("SUPERT_10_3.0", "SUPERTd_10_3.0"),
        ),
    ),
}


def pick(frame: pd.DataFrame, *columns: str) -> list[pd.Series]:
    return [frame[column] for column in columns]


def market(symbols: int, days: int) -> list[Bars]:
    """Fat-tailed walks, one per symbol."""
    rng = np.random.default_rng(SEED)
    times = np.datetime64("2000-01-03", "us") + np.arange(days) * np.timedelta64(1, "D")
    out = []
    for _ in range(symbols):
        close = np.exp(np.cumsum(0.01 * rng.standard_t(3, days)))
        open_ = close * np.exp(rng.normal(0, 0.005, days))
        high = np.maximum(open_, close) * np.exp(np.abs(rng.normal(0, 0.005, days)))
        low = np.minimum(open_, close) * np.exp(-np.abs(rng.normal(0, 0.005, days)))
        out.append(Bars(times, close, close, open_, high, low, rng.lognormal(16, 1, days)))
    return out


def frame_of(bars: Bars) -> Frame:
    return {p: pd.Series(getattr(bars, p), name=p) for p in PRICES}


def ours(features: tuple[Feature, ...], bars: Bars) -> list[Floats]:
    return [run(feature, bars) for feature in features]


def worst(parts: list[Floats], expected: list[pd.Series]) -> float:
    """Return the largest relative difference after warm-up (absolute below 1)."""
    actual = np.hstack(parts)
    theirs = np.column_stack([column.to_numpy() for column in expected])
    if actual.shape != theirs.shape:
        raise SystemExit(f"columns differ: {actual.shape} and {theirs.shape}")
    a, b = actual[WARM_UP:], theirs[WARM_UP:]
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1.0)))


def measure(symbols: int, days: int) -> dict[str, tuple[float, float, float]]:
    """Time both on every symbol: name → (our seconds, their seconds, largest difference)."""
    (warm,) = market(1, WARM_UP + 50)
    for features, peer in SETS.values():
        ours(features, warm)
        peer(frame_of(warm))
    mine = dict.fromkeys(SETS, 0.0)
    theirs, error = mine.copy(), mine.copy()
    for bars in market(symbols, days):
        frame, actual = frame_of(bars), {}
        for name, (features, _) in SETS.items():
            with clock(mine, name):
                actual[name] = ours(features, bars)
        for name, (_, peer) in SETS.items():
            with clock(theirs, name):
                expected = peer(frame)
            error[name] = max(error[name], worst(actual[name], expected))
    return {name: (mine[name], theirs[name], error[name]) for name in SETS}


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add what the block takes to seconds[name]."""
    begin = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - begin


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--symbols", type=int, default=SYMBOLS)
    parser.add_argument("--days", type=int, default=DAYS)
    # `python -m bench indicators` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if args.symbols < 1 or args.days <= WARM_UP:
        parser.error(f"at least 1 symbol and more than {WARM_UP} days")
    table = measure(args.symbols, args.days)
    print(f"{args.symbols} symbols × {args.days} days, one thread, numba warmed up before")
    print(f"{'indicator':<14}{'echelon s':>10}{'pandas-ta s':>13}{'ratio':>8}{'max diff':>11}")
    for name, (mine, theirs, error) in table.items():
        print(f"{name:<14}{mine:>10.3f}{theirs:>13.3f}{theirs / mine:>8.1f}{error:>11.1e}")
    mine, theirs = (sum(row[k] for row in table.values()) for k in (0, 1))
    error = max(row[2] for row in table.values())
    print(f"{'all':<14}{mine:>10.3f}{theirs:>13.3f}{theirs / mine:>8.1f}{error:>11.1e}")
    good = theirs / mine >= GOAL and error <= 1e-6
    print(f"goal: at least {GOAL:g}× and within 1e-6: {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
