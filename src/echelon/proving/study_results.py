"""What the study found: measures of each variant by seed, and what each component adds.

Differences are of the same seeds on the same draws, so that what a seed has in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echelon.config import Config
from echelon.evaluation.statistics.seeds import seed_interval
from echelon.files import write_json
from echelon.proving.parts import Done, Finding
from echelon.proving.study_parts import (
    HELD,
    ONE,
    UNWEIGHTED,
    VARIANTS,
    WEIGHTED,
    changes_of,
    known,
)
from echelon.types import Floats

FORMAT = 1
FILE = "study.json"


@dataclass(frozen=True)
class Row:
    """One variant; values: measure → one for each seed, None where it is not known."""

    variant: str
    title: str
    changes: tuple[str, ...]
    steps: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]

    def known(self, measure: str) -> list[float]:
        """Of the seeds that have one."""
        return [v for v in self.values.get(measure, ()) if v is not None]


@dataclass(frozen=True)
class Difference:
    """Sharpe ratio of one thing less another's, by seed; verdict: of the 95 % interval."""

    name: str
    of: str
    values: tuple[float, ...]
    estimate: float
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True)
class Study:
    """What was found. references: Sharpe ratios on the same pairs; notes: what to know of it."""

    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    references: Mapping[str, float]
    seeds: tuple[int, ...]
    pairs: int
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def write(self, directory: Path) -> None:
        """Write study.json."""
        tree = {"format": FORMAT, **asdict(self)}
        write_json(directory / FILE, _rounded(tree))


def assess(
    done: Mapping[str, Done], seeds: Sequence[int], config: Config, made: Mapping[str, Any]
) -> Study:
    """All parts put together."""
    references = {
        name: float(np.mean(found)) for name, found in done["references"].finding["sharpes"].items()
    }
    filtered = references["regime filter"]
    rows = []
    for variant in VARIANTS:
        findings = [done[f"{variant.name}-{seed}"].finding for seed in seeds]
        by_seed = [_measures(found, filtered) for found in findings]
        values = {name: tuple(one[name] for one in by_seed) for name in by_seed[0]}
        steps = tuple(int(found["steps"]) for found in findings)
        changes = changes_of(variant, config)
        rows.append(Row(variant.name, variant.title, changes, steps, values))
    first = next(iter(done["references"].finding["sharpes"].values()))
    return Study(
        tuple(rows),
        tuple(_differences({row.variant: row for row in rows})),
        references,
        tuple(seeds),
        len(first),
        made,
        tuple(_notes(config, rows)),
    )


def _measures(found: Finding, filtered: float) -> dict[str, float | None]:
    """Measure → value of one seed."""
    sharpes = found["sharpes"]
    if isinstance(sharpes, list):
        ours = float(np.mean(sharpes))
        return {"sharpe": ours, "share": ours / filtered}
    means = {name: float(np.mean(values)) for name, values in sharpes.items()}
    ours = means["hierarchy"]
    population = found["population"]
    experts = np.array(found["usage"][:-1])
    return {
        "sharpe": ours,
        "share": ours / filtered,
        "best expert": max(v for name, v in means.items() if name.startswith("expert ")),
        "hedge": means["hedge"],
        "oracle": means["oracle"],
        "information": found["information"]["information"],
        "information of": found["information"]["of"],
        "mapd end": population["mapd_end"],
        "mapd lowest": population["mapd_lowest"],
        "volume": population["volume"],
        "begun anew": population["begun_anew"],
        "usage entropy, training": population["usage_entropy"],
        "usage entropy, test": _evenness(experts),
        "cash, test": found["usage"][-1],
    }


def _evenness(shares: Floats) -> float | None:
    """Entropy of the experts' shares[K], as a share of log K; None where nobody was chosen."""
    if not shares.sum() > 0.0:
        return None
    share = shares[shares > 0.0] / shares.sum()
    return max(0.0, float(-(share * np.log(share)).sum())) / math.log(len(shares))


def _differences(rows: Mapping[str, Row]) -> list[Difference]:
    """What each component adds, alone and over both settings of the other."""
    m2, m3, evolved = (one.name for one in WEIGHTED)
    plain = {one.name: other.name for one, other in zip(WEIGHTED, UNWEIGHTED, strict=True)}
    asked: list[tuple[str, str, list[tuple[str, str]]]] = []
    for name, more, less in (
        ("the bonuses", m3, m2),
        ("MF-PBT", evolved, m3),
    ):
        pairs = [(more, less), (plain[more], plain[less])]
        asked += [
            (name, "with responsibility weighting", pairs[:1]),
            (name, "without it", pairs[1:]),
            (name, "over both", pairs),
        ]
    weighting = [(one, plain[one]) for one in (m2, m3, evolved)]
    for on, off in weighting:
        asked.append(("responsibility weighting", f"in {rows[on].title}", [(on, off)]))
    asked.append(("responsibility weighting", "over all three", weighting))
    for one in WEIGHTED:
        pair = [(one.name, ONE.name)]
        asked.append(("the hierarchy", f"{one.title}, over {ONE.title}", pair))
    return [_difference(name, of, pairs, rows) for name, of, pairs in asked]


def _difference(
    name: str, of: str, pairs: Sequence[tuple[str, str]], rows: Mapping[str, Row]
) -> Difference:
    """The mean over `pairs` (more, less) of their differences, seed by seed."""
    each = [
        np.array(rows[more].known("sharpe")) - np.array(rows[less].known("sharpe"))
        for more, less in pairs
    ]
    values = np.mean(each, axis=0).tolist()
    found = seed_interval(values)
    low, high = known(found.low), known(found.high)
    verdict = "not resolved"
    if low is not None and low > 0.0:
        verdict = "helps"
    elif high is not None and high < 0.0:
        verdict = "hurts"
    return Difference(name, of, tuple(values), found.estimate, low, high, verdict)


def _notes(config: Config, rows: Sequence[Row]) -> list[str]:
    """What must be known to read the numbers."""
    notes = [
        f"Experts that are alike (MAPD under {config.trainer.diversity_threshold:g}) begin anew in "
        "every hierarchy, with bonuses or without: a collapse shows in the lowest MAPD and in how "
        "many began anew.",
    ]
    for row in rows:
        lowest = row.known("mapd lowest")
        if not lowest:
            continue
        held = sum(one >= HELD for one in lowest)
        anew = sum(row.known("begun anew"))
        notes.append(
            f"{row.title}: MAPD of at least {HELD:g} reached and held in {held} of "
            f"{len(lowest)} seeds (lowest {min(lowest):.2f}); {anew:g} experts began anew."
        )
    return notes


def _rounded(value: Any) -> Any:  # noqa: ANN401 (any tree of JSON)
    """To six digits."""
    if isinstance(value, Mapping):
        return {str(name): _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
