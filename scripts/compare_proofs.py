"""What one setting changes: two certificates of `echelon prove` on the planted market.

    python scripts/compare_proofs.py runs/frozen/certificate.json runs/lora/certificate.json

Seeds are paired: a seed has the same draws in both, so their differences have less noise than the
shares themselves. Prints, per signal, both shares of the filter's Sharpe ratio and the mean
difference (the second minus the first) with Student's interval over the seeds. What was not made on
the same draws in the same way is refused: seeds, number and length of the draws, and whether agents
say weights or buy, sell and hold.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import EchelonError, StoreError, UsageError
from echelon.proving.certificate import Certificate, Check, seed_check

SAME = {
    "seeds": "only the same seeds can be paired",
    "draws": "the test draws are others",
    "bars": "the draws have another length",
    "kind": "their filters are others: agents that say weights, and agents that buy, sell and hold",
}
"""Facts that must be the same in both, and what is wrong where they are not."""


class Planted(NamedTuple):
    """A certificate's planted market: facts of `SAME`, and shares[S] of the filter by signal."""

    facts: Mapping[str, Any]
    shares: Mapping[str, list[float]]


def planted(path: Path) -> Planted:
    """What a certificate says of the planted market."""
    certificate = Certificate.read(path)
    for market in certificate.markets:
        if market.name == "planted":
            # Older certificates do not say how long draws are; the rows tell who said weights.
            told = {"bars": certificate.about.get("sizes", {}).get("bars"), **market.facts}
            weights = "planted_weights" in market.notes
            if not told.get("seeds"):
                raise StoreError(f"{path}: says no seeds of its planted market. {_AGAIN}")
            told.setdefault("kind", "weights" if weights else "discrete")
            names = [name for name in market.rows if name.endswith("/agent")]
            return Planted(
                {name: told.get(name) for name in SAME},
                {
                    name.removesuffix("/agent"): _shares(market.rows, name, told["seeds"], path)
                    for name in names
                },
            )
    raise UsageError(f"{path}: holds no planted market. Make it with `echelon prove planted`.")


def _shares(
    rows: Mapping[str, Sequence[float | None]], name: str, seeds: Sequence[int], path: Path
) -> list[float]:
    """Agent over filter, one per seed."""
    beside = name.replace("/agent", "/bayes")
    if beside not in rows:
        raise StoreError(f"{path}: has {name} and no {beside} to compare it with. {_AGAIN}")
    agent, filtered = rows[name], rows[beside]
    if not len(agent) == len(filtered) or len(agent) > len(seeds):
        raise StoreError(
            f"{path}: {name} has {len(agent)} values, {beside} {len(filtered)}, and there are "
            f"{len(seeds)} seeds. {_AGAIN}"
        )
    found = []
    for seed, a, b in zip(seeds, agent, filtered, strict=False):
        if a is None or not b or not math.isfinite(a / b):
            raise StoreError(
                f"{path}: seed {seed} has no number under {name} or {beside} ({a}, {b}): its agent "
                "never traded, or the file was changed. Leave that seed out of both proofs, or "
                "train longer."
            )
        found.append(a / b)
    return found


_AGAIN = "The file was changed or is of another version: run `echelon prove` again."


class Compared(NamedTuple):
    """Shares of the filter's Sharpe ratio under one signal, and what the second has more."""

    signal: str
    first: Check
    second: Check
    difference: Check


def compared(first: Path, second: Path) -> list[Compared]:
    """The signals that both certificates have."""
    a, b = planted(first), planted(second)
    for name, wrong in SAME.items():
        left, right = a.facts[name], b.facts[name]
        if left is not None and right is not None and left != right:
            raise UsageError(
                f"{first} has {name} {left} and {second} {right}: {wrong}. Prove both with the "
                "same options (--seeds, --draws, --bars) and the same seed."
            )
    signals = sorted(a.shares.keys() & b.shares.keys())
    if not signals:
        raise UsageError(
            f"{first} has {sorted(a.shares)} and {second} {sorted(b.shares)}: no signal in "
            "common. Prove the same one in both."
        )
    found = []
    for signal in signals:
        x, y = a.shares[signal], b.shares[signal]
        if len(x) != len(y):
            raise UsageError(
                f"{first} has {len(x)} seeds of {signal} and {second} {len(y)}: only the same "
                "seeds can be paired. Prove both with the same --seeds."
            )
        gains = [after - before for before, after in zip(x, y, strict=True)]
        each = (seed_check(signal, "share", values) for values in (x, y, gains))
        found.append(Compared(signal, *each))
    return found


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; 1 where a file cannot be read or compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    given = parser.parse_args(arguments)
    try:
        rows = compared(given.first, given.second)
    except EchelonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for signal, *checks in rows:
        told = [
            f"{100 * check.estimate:.1f} % ({_percent(check.low)} to {_percent(check.high)})"
            for check in checks
        ]
        print(f"{signal}, {checks[0].n} seeds: {told[0]}, {told[1]}; difference {told[2]}")
    return 0


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
