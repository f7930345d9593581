"""The section of a report that shows a run beside others it was compared with.

`echelon compare A B --output-dir RUN`, and the demo, leave RUN/comparison.json. The section is
there where that is a comparison of runs on the split, this run among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from echelon.errors import DamagedError
from echelon.evaluation.runs_comparison import RUNS_FORMAT, RUNS_RESULT
from echelon.evaluation.saved import MeasureValues, Number, Seed
from echelon.files import check_tree, read_json
from echelon.ops.measures import LABELS, mean_std
from echelon.report.document import card
from echelon.report.gather import RunData, SplitData
from echelon.report.tables import table
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


def beside_card(run: RunData, split: SplitData, words: Words) -> str:
    """Measures of the runs and baselines, and differences to the first run; maybe nothing."""
    found = _comparison(run, split.name)
    if found is None:
        return ""
    first = str(found["first_run"])
    note = words("beside_note", first=first)
    if _stale(found, run, split):
        note = words("beside_stale")
    head = [words("beside_run"), *(words.measure(name) for name in _MEASURES)]
    head += [words("beside_less", first=first), words("beside_days"), words("beside_seeds")]
    rows = [_run_row(one, words) for one in found["runs"]]
    rows += [_baseline_row(name, values, words) for name, values in found["baselines"].items()]
    html = table([escape(text) for text in head], rows, "measures")
    return card(words("beside"), note, html)


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
    return comparison if _own(comparison, run) is not None else None


def _own(tree: _Comparison, run: RunData) -> _Run | None:
    """The run's own line."""
    return next((one for one in tree["runs"] if one["name"] == run.name), None)


def _stale(tree: _Comparison, run: RunData, split: SplitData) -> bool:
    """Whether the run was trained anew since."""
    own = _own(tree, run)
    assert own is not None
    return bool(own["best_steps"] != split.facts["best_steps"])


def _run_row(one: _Run, words: Words) -> list[str]:
    seeds = list(one["seeds"].values())
    n = words("beside_seed" if len(seeds) == 1 else "beside_n_seeds", n=len(seeds))
    cells = []
    for name in _MEASURES:
        over = mean_std([_number(values.get(name)) for values in seeds])
        cells.append(LABELS[name].format(over.mean, over.std if len(seeds) > 1 else math.nan))
    difference = one["difference"]
    cells += ["–"] * 3 if difference is None else _difference(difference, words)
    name = f"{one['name']}{words('beside_of', algo=one['algo'], seeds=n)}"
    return [f"<b>{escape(name)}</b>", *_cells(cells)]


def _difference(found: _Difference, words: Words) -> list[str]:
    days, seeds = found["days"], found["seeds"]
    estimate = seeds["estimate"] if days["estimate"] is None else days["estimate"]
    return [_RATIO.format(_number(estimate)), _range(days, words), _range(seeds, words)]


def _range(gap: _Gap, words: Words) -> str:
    low, high = _number(gap["low"]), _number(gap["high"])
    if math.isnan(low):
        return "–"
    return words("range", low=_RATIO.format(low), high=_RATIO.format(high))


def _baseline_row(key: str, values: Mapping[str, float | None], words: Words) -> list[str]:
    cells = [LABELS[name].format(_number(values.get(name))) for name in _MEASURES]
    return [escape(words.name(key)), *_cells([*cells, "", "", ""])]


def _cells(texts: Sequence[str]) -> list[str]:
    return [f"<td>{escape(text)}</td>" for text in texts]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(np.float64(value))
