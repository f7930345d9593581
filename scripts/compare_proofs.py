"""What one setting changes: two certificates of `echelon prove` on the planted market.

    python scripts/compare_proofs.py runs/frozen/certificate.json runs/lora/certificate.json

Seeds are paired: a seed has the same draws in both, so their differences have less noise than the
shares themselves. Prints, per signal, both shares of the filter's Sharpe ratio and the mean
difference (the second minus the first) with Student's interval over the seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, UsageError
from echelon.proving.certificate import Certificate, Check, over_seeds


def shares(certificate: Certificate, path: Path) -> dict[str, list[float]]:
    """Signal → share of the filter's Sharpe ratio, one per seed."""
    for market in certificate.markets:
        if market.name == "planted":
            rows = market.rows
            return {
                name.split("/")[0]: [
                    agent / filtered
                    for agent, filtered in zip(
                        values, rows[name.replace("/agent", "/bayes")], strict=True
                    )
                ]
                for name, values in rows.items()
                if name.endswith("/agent")
            }
    raise UsageError(f"{path}: holds no planted market. Make it with `echelon prove planted`.")


class Compared(NamedTuple):
    """Shares of the filter's Sharpe ratio under one signal, and what the second has more."""

    signal: str
    first: Check
    second: Check
    difference: Check


def compared(first: Path, second: Path) -> list[Compared]:
    """The signals that both certificates have."""
    certificates = [Certificate.read(path) for path in (first, second)]
    seeds = [
        market.facts["seeds"]
        for certificate in certificates
        for market in certificate.markets
        if market.name == "planted"
    ]
    a, b = (shares(c, path) for c, path in zip(certificates, (first, second), strict=True))
    if seeds[0] != seeds[1]:
        raise UsageError(
            f"{first} has the seeds {seeds[0]} and {second} {seeds[1]}; only the same seeds can be "
            "paired. Prove both with the same --seeds and seed."
        )
    if not a.keys() & b.keys():
        raise UsageError(
            f"{first} has {sorted(a)} and {second} {sorted(b)}: no signal in common. Prove "
            "the same one in both."
        )
    found = []
    for signal in sorted(a.keys() & b.keys()):
        gains = [y - x for x, y in zip(a[signal], b[signal], strict=True)]
        each = (over_seeds(signal, "share", values) for values in (a[signal], b[signal], gains))
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
