"""The wide A-share universe: which symbols may be looked at while anything is tuned.

    python -m bench.wide PARQUET development.parquet [held-out.parquet]

A hundred of the 500 symbols are set aside by a hash of their names, before anything is tuned: the
others are the development data, and the hundred are looked at once, at the end.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl

HELD_OUT = 100


def split_symbols(symbols: Sequence[str]) -> tuple[list[str], list[str]]:
    """(development, set aside): the 100 names whose SHA-256 is lowest are set aside."""
    ranked = sorted(set(symbols), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return sorted(ranked[HELD_OUT:]), sorted(ranked[:HELD_OUT])


def main(argv: Sequence[str] = ()) -> int:
    """Write the bars of each part to a file of its own."""
    if not argv:
        print("needs data: python -m bench.wide PARQUET development.parquet [held-out.parquet]")
        return 0
    bars = pl.read_parquet(argv[0])
    parts = split_symbols(bars["symbol"].to_list())
    for target, names in zip(argv[1:], parts, strict=False):
        bars.filter(pl.col("symbol").is_in(names)).write_parquet(Path(target))
        print(f"{target}: {len(names)} symbols, from {names[0]} to {names[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
