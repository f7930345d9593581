"""The study as Markdown: results, diversity, differences with a plain verdict, notes."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.evaluation.statistics.seeds import seed_interval
from echelon.proving.study_parts import HELD
from echelon.proving.study_results import Difference, Row, Study

TABLE = "study.md"
NONE = "–"
RESULTS = ("sharpe", "share", "best expert", "hedge", "oracle", "information")
DIVERSITY = (
    *("mapd end", "mapd lowest", "begun anew", "volume"),
    *("usage entropy, training", "usage entropy, test", "cash, test"),
)
_HEADS = {
    "sharpe": "Sharpe ratio",
    "share": "of the filter's",
    "information": "choice tells of the regime, bits",
    "mapd end": "MAPD, last check",
    "mapd lowest": "lowest",
    "volume": "DvD volume",
}
_SHARES = ("share", "usage entropy, training", "usage entropy, test", "cash, test")
_WHOLE = ("sharpe", "share")
"""Measures shown with their interval."""


def sentence(found: Difference) -> str:
    """A difference in plain words."""
    return f"{found.name}, {found.of}: {_signed(found)}: {found.verdict}"


def markdown(study: Study) -> str:
    """All of it."""
    references = study.references
    steps = {step for row in study.rows for step in row.steps}
    shown = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
    about = study.about
    lines = [
        "# Study of the hierarchy on the regime market",
        f"{len(study.seeds)} seeds ({', '.join(map(str, study.seeds))}), {shown} environment steps "
        f"each, {study.pairs} unseen mirrored pairs. Means over pairs, then over seeds with "
        "Student's 95 % interval. On the same pairs: "
        + ", ".join(f"{name} {value:.2f}" for name, value in references.items())
        + ".",
        "## Results",
        _table(study.rows, RESULTS),
        "Best expert, hedge and oracle are of the variant's own experts: the best by itself on the "
        "test pairs, the fixed-share hedge over all, and the better one of each regime, knowing "
        "the regime.",
        "## How different the experts are",
        _table([row for row in study.rows if row.known("oracle")], DIVERSITY, held=True),
        f"MAPD: at the last check of the population; lowest: since it first reached {HELD:g}, the "
        "training log between checks included (where it never did, the highest there was), for "
        "networks begin alike. Usage entropy: of the experts, as a share of its most; in training "
        "of the last 1,000 decisions.",
        "## What helps",
        _differences(study.differences),
        "Differences of Sharpe ratios, paired by seed. Each interval is a 95 % one by itself: of "
        f"{len(study.differences)}, one in twenty would miss 0 by chance.",
        "## Notes",
        "\n".join(f"- {note}" for note in study.notes),
        "## Variants",
        "\n".join(f"- {row.title}: `{' '.join(row.changes)}`" for row in study.rows),
        f"Configuration {about['config_hash'][:12]}, {about['cpu_seconds'] / 3600:.1f} hours of "
        f"processor time, finished {about['finished']}. `{about['command']}`",
    ]
    return "\n\n".join(lines) + "\n"


def cell(row: Row, measure: str) -> str:
    """The mean over seeds; of some with the interval."""
    known = row.known(measure)
    if not known:
        return NONE
    found = seed_interval(known)
    if measure == "begun anew":
        return f"{sum(known):g}"
    if measure == "mapd lowest":
        return f"{min(known):.2f}"

    def said(value: float) -> str:
        return f"{value:.0%}" if measure in _SHARES else f"{value:.2f}"

    if measure not in _WHOLE or found.method == "none":
        return said(found.estimate)
    return f"{said(found.estimate)} [{said(found.low)}, {said(found.high)}]"


def _table(rows: Sequence[Row], measures: Sequence[str], *, held: bool = False) -> str:
    heads = ["variant", *(_HEADS.get(name, name) for name in measures)]
    lines = [[row.title, *(cell(row, name) for name in measures)] for row in rows]
    if held:
        heads.insert(3, f"≥ {HELD:g} held, seeds")
        for row, line in zip(rows, lines, strict=True):
            lowest = row.known("mapd lowest")
            kept = sum(one >= HELD for one in lowest)
            line.insert(3, f"{kept} of {len(lowest)}" if lowest else NONE)
    return _markdown(heads, lines)


def _differences(found: Sequence[Difference]) -> str:
    lines = [[one.name, one.of, _signed(one), one.verdict] for one in found]
    return _markdown(["what", "where", "Sharpe ratio", "verdict"], lines)


def _signed(found: Difference) -> str:
    if found.low is None or found.high is None:
        return f"{found.estimate:+.2f}"
    return f"{found.estimate:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *lines))
