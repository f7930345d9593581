"""The certificate: what each market showed, with intervals, and what it had to show.

    DIR/certificate.json    everything below, for machines
    DIR/certificate.html    the same for readers (see report.certificate)

A market passes when all its checks that have a bar pass it. A check without a bar informs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scipy import stats

from echelon.errors import StoreError, shorten
from echelon.evaluation.statistics import seed_interval
from echelon.files import read_json, write_json

_FORMAT = 1
CERTIFICATE = "certificate.json"

Mode = Literal["quick", "full", "reduced"]
Unit = Literal["share", "sharpe", "names"]
_SIDES = {"at least": operator.ge, "at most": operator.le, "above": operator.gt}


class Bar(NamedTuple):
    """What a check's estimate, or an end of its interval, is held to."""

    of: Literal["estimate", "low", "high"]
    side: Literal["at least", "at most", "above"]
    value: float

    def passes(self, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        return bool(_SIDES[self.side](value, self.value))


@dataclass(frozen=True)
class Check:
    """One number of a market, its 95 % interval and its bars.

    n: seeds, draws or pairs it was made from; method: of the interval
    count: (how many, of how many), where the estimate is their ratio
    names: what was found, where it is not a number
    """

    name: str
    unit: Unit
    estimate: float
    n: int
    low: float | None = None
    high: float | None = None
    method: Literal["t", "bootstrap", "exact", "none"] = "none"
    bars: tuple[Bar, ...] = ()
    count: tuple[int, int] | None = None
    names: tuple[str, ...] = ()

    @property
    def passed(self) -> bool | None:
        if not self.bars:
            return None
        return all(bar.passes(getattr(self, bar.of)) for bar in self.bars)


@dataclass(frozen=True)
class MarketResult:
    """What one market showed.

    facts: seeds, steps, draws and what else the numbers depend on
    rows: name → values, for tables and pictures
    notes: names of remarks (texts note_NAME of the report)
    """

    name: str
    checks: tuple[Check, ...]
    seconds: float
    cpu_seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, Sequence[float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)


@dataclass(frozen=True)
class Certificate:
    """All markets that were asked for, and what they were run with.

    mode: reduced: fewer seeds, draws or bars than the mode asked for has, by the command line
    about: command, configuration hash, code versions, times, machine, sizes
    """

    mode: Mode
    markets: tuple[MarketResult, ...]
    about: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        return all(market.passed for market in self.markets)

    def tree(self) -> dict[str, Any]:
        markets = []
        for market in self.markets:
            checks = [
                asdict(c) | {"passed": c.passed, "bars": [bar._asdict() for bar in c.bars]}
                for c in market.checks
            ]
            markets.append(asdict(market) | {"passed": market.passed, "checks": checks})
        whole = {"format": _FORMAT, "mode": self.mode, "passed": self.passed}
        return dict(round_tree(whole | {"about": dict(self.about), "markets": markets}))

    def write(self, directory: Path) -> None:
        write_json(directory / CERTIFICATE, self.tree())

    @staticmethod
    def read(path: Path) -> Certificate:
        again = "Run `echelon prove` again."
        number = read_json(path, dict[str, Any], again).get("format")
        if number != _FORMAT:
            raise StoreError(
                f"{path}: has format {shorten(number)}, this version reads {_FORMAT}. {again}"
            )
        return read_json(path, Certificate, again)


def seed_check(name: str, unit: Unit, values: Sequence[float], *bars: Bar) -> Check:
    interval = seed_interval(values)
    low, high = (None if math.isnan(end) else end for end in (interval.low, interval.high))
    return Check(name, unit, interval.estimate, interval.n, low, high, interval.method, bars)


def count_check(name: str, k: int, n: int, *bars: Bar) -> Check:
    """The share k of n, and its exact interval (Clopper and Pearson, 1934)."""
    low, high = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    return Check(name, "share", k / n, n, float(low), float(high), "exact", bars, (k, n))


def round_tree(value: Any) -> Any:  # noqa: ANN401 (any tree of JSON)
    """Floats to six digits; what is not a number is null."""
    if isinstance(value, Mapping):
        return {str(name): round_tree(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [round_tree(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
