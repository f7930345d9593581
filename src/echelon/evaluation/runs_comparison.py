"""Trained runs of any kind compared on one window: which one is ahead, and how sure is that?

1. `open_runs` refuses what does not compare: fewer than two, one twice, other assets, data,
   windows, features, fills or costs. Nothing was evaluated then, and no test window looked at.
2. `compare_runs` reads the runs' evaluations, and evaluates a run that has none, or whose agents
   are others by now.
3. Each run's annual Sharpe ratio, the mean over its seeds, minus the first run's, twice:

   days    what other days like these would change, for these agents: the studentised block
           bootstrap of `evaluation.statistics`, by the wider bounds of two block lengths
   seeds   what other seeds would change, on these days: Welch's t-interval, from two seeds each on

4. A run is ahead where both intervals lie on one side of 0. That is claimed on the test window
   only, and only if the run that is ahead has a deflated Sharpe ratio above 0.95, by all trials
   and looks counted up to now, those of this comparison included (see evaluation.trust).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from echelon.errors import StoreError, UsageError
from echelon.evaluation.comparison import (
    ComparedRow,
    SharpeGap,
    baseline_rows,
    saved_returns,
    sharpe_gap,
    window_facts,
)
from echelon.evaluation.evaluate import Evaluation, evaluate, load_evaluation
from echelon.evaluation.statistics import DEFLATED_ABOVE, LEVEL
from echelon.evaluation.test_access import SplitName
from echelon.evaluation.trust import ClaimBasis, claim_basis
from echelon.files import finite_values, write_json
from echelon.market import resolve_rules
from echelon.training.run import TrainedRun

RUNS_FORMAT = 1
RUNS_RESULT = "comparison.json"
_NAMED = 5

OnEvaluation = Callable[[TrainedRun, str], None]
"""Called before a run is evaluated, with why."""


@dataclass(frozen=True)
class RunDifference:
    """A run's annual Sharpe ratio minus the first run's; bounds are NaN where there are too few.

    ahead: name of the run that is ahead in both; standing: of it, on the test window only
    """

    days: SharpeGap
    seeds: SharpeGap
    ahead: str | None
    standing: ClaimBasis | None

    @property
    def claimed(self) -> bool:
        """Whether it may be claimed that one is ahead of the other."""
        deflated = None if self.standing is None else self.standing.deflated
        return deflated is not None and deflated > DEFLATED_ABOVE

    def tree(self) -> dict[str, Any]:
        days = {"method": "studentised stationary block bootstrap of paired returns"}
        rests_on = self.standing or ClaimBasis(None, None)
        return {
            "days": days | finite_values(self.days._asdict()),
            "seeds": {"method": "Welch's t"} | finite_values(self.seeds._asdict()),
            "ahead": self.ahead,
            "claimed": self.claimed,
            **rests_on._asdict(),
        }


@dataclass(frozen=True)
class RunLine:
    """One run. row: its measures by seed; difference: None for the first"""

    path: Path
    algo: str
    row: ComparedRow
    difference: RunDifference | None

    def tree(self) -> dict[str, Any]:
        return self.row.tree() | {
            "path": str(self.path),
            "algo": self.algo,
            "difference": None if self.difference is None else self.difference.tree(),
        }


@dataclass(frozen=True)
class RunsComparison:
    """Runs, compared with the first, and the first one's baselines. facts: of the window"""

    runs: tuple[RunLine, ...]
    baselines: tuple[ComparedRow, ...]
    facts: Mapping[str, Any]

    @property
    def first(self) -> str:
        return self.runs[0].row.name

    @property
    def returns(self) -> int:
        """Returns of a book on the window: it is marked once before the first."""
        return int(self.facts["bars"]) - 1

    def tree(self) -> dict[str, Any]:
        baselines = {row.name: finite_values(row.seeds[-1]) for row in self.baselines}
        return {
            "format": RUNS_FORMAT,
            "kind": "runs",
            "first_run": self.first,
            "level": LEVEL,
            **self.facts,
            "runs": [line.tree() for line in self.runs],
            "baselines": baselines,
        }

    def write(self, directory: Path) -> Path:
        write_json(directory / RUNS_RESULT, self.tree())
        return directory / RUNS_RESULT


def open_runs(
    paths: Sequence[Path], split: SplitName, trust_code: Sequence[Path] = ()
) -> list[TrainedRun]:
    """Open runs that compare on a window; otherwise raise, naming the first difference."""
    if len(paths) < 2:
        raise UsageError(
            f"compare needs at least two runs; it got {len(paths)}. Name another one, or none to "
            "train several agents of --config."
        )
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise UsageError(f"{seen[path.resolve()]} and {path} are the same run. Name it once.")
        seen[path.resolve()] = path
        if (path / "base.yaml").is_file():
            inside = sorted(p.parent.relative_to(path) for p in path.glob("*/*/config.yaml"))
            shown = ", ".join(str(path / p) for p in inside[:_NAMED]) or "none yet"
            raise UsageError(f"{path}: a study, not a run. Name runs inside it: {shown}.")
    runs = [TrainedRun.open(path, trust_code) for path in paths]
    first = _conditions(runs[0], split)
    for run in runs[1:]:
        _refuse_difference(runs[0], first, run, _conditions(run, split))
    return runs


def compare_runs(
    runs: Sequence[TrainedRun],
    split: SplitName,
    *,
    on_evaluation: OnEvaluation = lambda _run, _why: None,
) -> RunsComparison:
    """Compare runs that `open_runs` opened."""
    evaluations = [_find_or_evaluate(run, split, on_evaluation) for run in runs]
    names = [run.path.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    entrants = [_Entrant(*parts) for parts in zip(names, runs, evaluations, strict=True)]
    first = entrants[0]
    for entrant in entrants[1:]:
        # What was prepared is the same; how far back an agent looks may shift its first bar.
        _refuse_difference(first.run, _trading_facts(first), entrant.run, _trading_facts(entrant))
    lines = []
    for entrant in entrants:
        row = ComparedRow(
            name=entrant.name,
            kind="agent",
            seeds=entrant.evaluation.seeds,
            best_steps={seed: entrant.run.best_step(seed) for seed in entrant.run.seeds},
            config_hash=str(entrant.run.facts.get("config_hash", "")),
        )
        difference = None if entrant is first else _difference(first, entrant, split)
        lines.append(RunLine(entrant.run.path, entrant.run.config.train.algo, row, difference))
    baselines = tuple(baseline_rows(first.evaluation))
    return RunsComparison(tuple(lines), baselines, window_facts(first.evaluation))


class _Entrant(NamedTuple):
    name: str
    run: TrainedRun
    evaluation: Evaluation


def _difference(first: _Entrant, other: _Entrant, split: SplitName) -> RunDifference:
    theirs, mine = first.evaluation, other.evaluation
    days = sharpe_gap(mine, list(mine.seeds), theirs, first.run.config.seed)
    both = [[v["sharpe_annual"] for v in e.seeds.values()] for e in (mine, theirs)]
    seeds = welch(*both)
    bounds = (*days[1:], *seeds[1:])
    ahead = None
    if not any(math.isnan(bound) for bound in bounds):
        ahead = other if min(bounds) > 0.0 else first if max(bounds) < 0.0 else None
    if ahead is None:
        return RunDifference(days, seeds, None, None)
    rests_on = None
    if split == "test":
        returns = saved_returns(ahead.evaluation, list(ahead.evaluation.seeds))
        rests_on = claim_basis(ahead.run, split, returns.mean(axis=1))
    return RunDifference(days, seeds, ahead.name, rests_on)


def welch(mine: Sequence[float], theirs: Sequence[float]) -> SharpeGap:
    """Mean of `mine` minus that of `theirs`, and Welch's t-interval; NaN where it has none."""
    x, y = (np.asarray(values, dtype=np.float64) for values in (mine, theirs))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return SharpeGap(math.nan, math.nan, math.nan)
    estimate = float(x.mean() - y.mean())
    if min(len(x), len(y)) < 2:
        return SharpeGap(estimate, math.nan, math.nan)
    parts = [float(values.var(ddof=1)) / len(values) for values in (x, y)]
    variance = sum(parts)
    if variance == 0.0:
        return SharpeGap(estimate, estimate, estimate)
    freedom = variance**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (x, y), strict=True)
    )
    margin = float(stats.t.ppf(0.5 + LEVEL / 2.0, freedom)) * math.sqrt(variance)
    return SharpeGap(estimate, estimate - margin, estimate + margin)


def _conditions(run: TrainedRun, split: SplitName) -> dict[str, Any]:
    """What runs must share, the most telling first."""
    prepared, config, market = run.prepared, run.config, run.config.market
    days, learned = prepared.splits[split], prepared.splits["train"]
    data = prepared.manifest["dataset"]["content_hash"]
    resolved = resolve_rules(config, calendar=prepared.manifest["calendar"])
    rules = {f"market rule {name}": value for name, value in resolved.rules._asdict().items()}
    return {
        "assets": prepared.symbols,
        "data (hash)": data[:12],
        f"{split} window": f"{days.first} to {days.last}",
        "fill convention (market.fill)": market.fill,
        "fees (eval.use_fee)": config.eval.use_fee,
        **rules,
        "stamp duty": resolved.stamp_duty,
        "lots": resolved.lots,
        "market.initial_cash": market.initial_cash,
        "market.delist_haircut": market.delist_haircut,
        "market.median_days": market.median_days,
        "features": prepared.names,
        "train window": f"{learned.first} to {learned.last}",
        "prepared set (hash)": prepared.manifest["content_hash"][:12],
    }


def _trading_facts(entrant: _Entrant) -> dict[str, Any]:
    """What evaluations must share."""
    facts = entrant.evaluation.facts
    return {
        "bars traded": f"{facts['bars']} from {facts['first']} to {facts['last']}",
        "fills": facts["ledger"]["fill"],
        "fees": facts["fees"],
    }


def _refuse_difference(
    first: TrainedRun, theirs: Mapping[str, Any], run: TrainedRun, mine: Mapping[str, Any]
) -> None:
    for what, value in theirs.items():
        if mine[what] == value:
            continue
        if isinstance(value, tuple):
            both, parts = set(value) & set(mine[what]), []
            for path, names in ((first.path, value), (run.path, mine[what])):
                extra = [name for name in names if name not in both]
                more = f" and {len(extra) - _NAMED} more" if len(extra) > _NAMED else ""
                if extra:
                    parts.append(f"only {path} has {', '.join(extra[:_NAMED])}{more}")
            difference = "; ".join(parts) or "the same in another order"
        else:
            difference = f"{value} in {first.path}, {mine[what]} in {run.path}"
        raise UsageError(
            f"{first.path} and {run.path} do not compare: they differ in {what}: {difference}. "
            "Train both on the same market; `echelon runs compare` shows measures side by side, "
            "without a judgement."
        )


def _find_or_evaluate(run: TrainedRun, split: SplitName, on_evaluation: OnEvaluation) -> Evaluation:
    """The run's evaluation, made where there is none of its present agents."""
    try:
        saved = load_evaluation(run.path, split)
    except StoreError:
        on_evaluation(run, "not evaluated on it yet")
        return evaluate(run, split)
    # As run.json says, not as a hash of now would: a later version may know more keys.
    made_from = saved.facts["run"]
    same = saved.facts["best_steps"] == {str(seed): run.best_step(seed) for seed in run.seeds}
    if same and all(made_from.get(k) == run.facts.get(k) for k in ("config_hash", "prepared")):
        return saved
    on_evaluation(run, "trained or prepared again since it was")
    return evaluate(run, split)
