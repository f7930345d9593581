"""The section of a report that compares a run with others it was compared with.

`echelon compare A B --output-dir RUN`, and the demo, leave RUN/comparison.json. The section is
there where that is a comparison of runs on the split, this run among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from echelon.errors import DamagedError
from echelon.evaluation.runs_comparison import RUNS_FORMAT, RUNS_RESULT
from echelon.evaluation.saved import MeasureValues, Number, Seed
from echelon.files import check_tree, read_json
from echelon.ops.measures import LABELS, mean_std
from echelon.report.blocks import Card, Content, Named, Table
from echelon.report.run.gather import RunData, SplitData
from echelon.report.run.trust import DASH, range_text
from echelon.report.texts import Words

_MEASURES = ("sharpe_annual", "total_return", "max_drawdown")
_RATIO = LABELS["sharpe_annual"]


class _Gap(TypedDict):
    estimate: Number | None
    low: Number | None
    high: Number | None


class _Difference(TypedDict):
    days: _Gap
    seeds: _Gap


class _Run(TypedDict):
    name: str
    algo: str
    best_steps: dict[Seed, int]
    seeds: dict[Seed, MeasureValues]
    difference: _Difference | None


class _Comparison(TypedDict):
    """comparison.json of runs, as far as it is shown."""

    format: int
    first_run: str
    runs: list[_Run]
    baselines: dict[str, MeasureValues]


def other_runs_card(run: RunData, split: SplitData, words: Words) -> Card | None:
    """Measures of the runs and baselines, and differences to the first run; None without."""
    comparison = _comparison(run, split.name)
    if comparison is None:
        return None
    first = str(comparison["first_run"])
    note = words("other_runs_note", first=first)
    if _stale(comparison, run, split):
        note = words("other_runs_stale")
    head = [words("other_runs_run"), *(words.measure(name) for name in _MEASURES)]
    head += [words("other_runs_difference", first=first)]
    head += [words("other_runs_days"), words("other_runs_seeds")]
    rows = [_run_row(line, words) for line in comparison["runs"]]
    rows += [_baseline_row(name, values, words) for name, values in comparison["baselines"].items()]
    return Card(words("other_runs"), note, [Table(head, rows)])


def _comparison(run: RunData, split: str) -> _Comparison | None:
    path = run.path / RUNS_RESULT
    if not path.exists():
        return None
    remedy = (
        f"Delete it, or compare the runs again (echelon compare RUN RUN --output-dir {run.path})."
    )
    tree = read_json(path, dict[str, Any], remedy)
    if tree.get("kind") != "runs" or tree.get("split") != split:
        return None
    comparison = check_tree(tree, _Comparison, path, remedy)
    if comparison["format"] != RUNS_FORMAT:
        raise DamagedError(path, f"format {comparison['format']}, expected {RUNS_FORMAT}", remedy)
    return comparison if _own_line(comparison, run) is not None else None


def _own_line(tree: _Comparison, run: RunData) -> _Run | None:
    """The run's own line."""
    return next((line for line in tree["runs"] if line["name"] == run.name), None)


def _stale(tree: _Comparison, run: RunData, split: SplitData) -> bool:
    """Whether the run was trained again since."""
    own = _own_line(tree, run)
    assert own is not None
    return bool(own["best_steps"] != split.facts["best_steps"])


def _run_row(line: _Run, words: Words) -> list[Content]:
    seeds = list(line["seeds"].values())
    cells = []
    for name in _MEASURES:
        over = mean_std([_number(values.get(name)) for values in seeds])
        cells.append(LABELS[name].format(over.mean, over.std if len(seeds) > 1 else math.nan))
    difference = line["difference"]
    cells += [DASH] * 3 if difference is None else _difference(difference, words)
    about = words("other_runs_of", algo=line["algo"], seeds=words.count("n_seeds", len(seeds)))
    return [Named(line["name"] + about, strong=True), *cells]


def _difference(difference: _Difference, words: Words) -> list[str]:
    days, seeds = difference["days"], difference["seeds"]
    estimate = seeds["estimate"] if days["estimate"] is None else days["estimate"]
    return [_RATIO.format(_number(estimate)), _range(days, words), _range(seeds, words)]


def _range(gap: _Gap, words: Words) -> str:
    low, high = _number(gap["low"]), _number(gap["high"])
    return DASH if math.isnan(low) else range_text(low, high, words)


def _baseline_row(key: str, values: Mapping[str, float | None], words: Words) -> list[Content]:
    cells = [LABELS[name].format(_number(values.get(name))) for name in _MEASURES]
    return [words.name(key), *cells, "", "", ""]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(np.float64(value))
