"""The section of a report that compares a run with others it was compared with.

`echelon compare A B --output-dir RUN`, and the demo, leave RUN/comparison.json. The section is
there where that is a comparison of runs on the split, this run among them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from typing_extensions import TypedDict

from echelon.errors import DamagedError
from echelon.evaluation.runs_comparison import RUNS_FORMAT, RUNS_RESULT
from echelon.evaluation.trust import MeasureValues, Number, Seed
from echelon.files import check_tree, read_json
from echelon.ops.measures import LABELS, mean_std
from echelon.report.pages import Content, Named, NotedTable, Table
from echelon.report.run.gather import RunData, SplitData
from echelon.report.run.trust import number, range_text
from echelon.report.texts import DASH, Words

_MEASURES = ("sharpe_annual", "total_return", "max_drawdown")


class _Gap(TypedDict):
    estimate: Number | None
    low: Number | None
    high: Number | None


class _Run(TypedDict):
    name: str
    algo: str
    best_steps: dict[Seed, int]
    seeds: dict[Seed, MeasureValues]
    difference: dict[Literal["days", "seeds"], _Gap] | None


class _Comparison(TypedDict):
    """comparison.json of runs, as far as it is shown."""

    format: int
    first_run: str
    runs: list[_Run]
    baselines: dict[str, MeasureValues]


def other_runs(run: RunData, split: SplitData, words: Words) -> NotedTable | None:
    """Measures of the runs and baselines, and differences to the first run; None without."""
    path = run.path / RUNS_RESULT
    if not path.exists():
        return None
    again = f"compare the runs again (echelon compare RUN RUN --output-dir {run.path})"
    remedy = f"Delete it, or {again}."
    tree = read_json(path, dict[str, Any], remedy)
    if tree.get("kind") != "runs" or tree.get("split") != split.name:
        return None
    comparison = check_tree(tree, _Comparison, path, remedy)
    if comparison["format"] != RUNS_FORMAT:
        raise DamagedError(path, f"format {comparison['format']}, expected {RUNS_FORMAT}", remedy)
    lines = comparison["runs"]
    own = next((line for line in lines if line["name"] == run.name), None)
    if own is None:
        return None
    first = comparison["first_run"]
    stale = own["best_steps"] != split.facts["best_steps"]  # trained again since
    note = words("other_runs_stale") if stale else words("other_runs_note", first=first)
    head = [words("other_runs_run"), *(words.measure(name) for name in _MEASURES)]
    head += [words("other_runs_difference", first=first)]
    head += [words("other_runs_days"), words("other_runs_seeds")]
    rows = [_run_row(line, words) for line in lines]
    for key, values in comparison["baselines"].items():
        cells = [LABELS[name].format(number(values.get(name))) for name in _MEASURES]
        rows.append([words.name(key), *cells, "", "", ""])
    return NotedTable(Table(head, rows), note)


def _run_row(line: _Run, words: Words) -> list[Content]:
    seeds = list(line["seeds"].values())
    cells = []
    for name in _MEASURES:
        over = mean_std([number(values.get(name)) for values in seeds])
        cells.append(LABELS[name].format(over.mean, over.std if len(seeds) > 1 else math.nan))
    difference = line["difference"]
    if difference is None:
        cells += [DASH] * 3
    else:
        days, other = difference["days"], difference["seeds"]
        estimate = other["estimate"] if days["estimate"] is None else days["estimate"]
        cells.append(LABELS["sharpe_annual"].format(number(estimate)))
        for gap in (days, other):
            low, high = number(gap["low"]), number(gap["high"])
            cells.append(DASH if math.isnan(low) else range_text(low, high, words))
    about = words("other_runs_of", algo=line["algo"], seeds=words.count("n_seeds", len(seeds)))
    return [Named(line["name"] + about, strong=True), *cells]
