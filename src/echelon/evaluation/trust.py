"""What the numbers of an evaluation are worth: intervals, selection, costs, and a verdict.

trust.json, next to summary.json (Sharpe ratios per period unless the name says annual):

    seeds         mean, interval and interquartile mean of the main measures over the seeds
    differences   to each baseline: Sharpe ratio, studentised interval at two block lengths
    ensemble      the same of the seeds traded as one book, where that was asked for
    active        information ratio over equal weight, at two block lengths: of the seeds' mean,
                  each seed, their ensemble and the other baselines
    reference_policies    of a hierarchy, the same to what is made of its experts (`by_row`); no
                  verdict, claim or count rests on these
    deflation     probability that the Sharpe ratio is above what the best of as many trials shows
                  by chance; the trials come from the registry of the runs
    active_deflation    the same of the seeds' mean active return over equal weight
    overfitting   probability of backtest overfitting, from 20 configurations on
    superiority   is the best of the trials better than equal weight, given that it is the best?
    costs         the same agents at no costs, at those configured and at twice them
    capacity      what would be traded, with more money (see evaluation.capacity)
    claim         may an edge over equal weight be claimed? Only ever on the test window
    verdict       better, worse, calmer (no more earned), indistinguishable, or unproven, for the
                  words of a report

The deflated Sharpe ratio in a claim is that of the validation window, which chose, by the trials
counted there up to now: what was tried after this run was evaluated on it counts too. On the test
window the trials are the looks at it. The active return is deflated by the looks alone: of earlier
trials it is not known, as not all of them ran equal weight, and their variance is taken as 1/T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, NotRequired, TypeAlias

import numpy as np
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from echelon.backtest.baselines import run_baselines
from echelon.backtest.ensemble import ENSEMBLE
from echelon.backtest.files import AGENT, Book
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest, stack_returns
from echelon.errors import StoreError
from echelon.evaluation.overfitting import backtest_overfitting, superior_ability
from echelon.evaluation.statistics import (
    DEFLATED_ABOVE,
    BothBlocks,
    Deflation,
    active_ratio,
    at_both_blocks,
    deflate_by_sharpes,
    effective_trials,
    interquartile_mean,
    seed_interval,
)
from echelon.evaluation.test_access import Look, SplitName
from echelon.files import check_tree, finite_or_none, finite_values, read_json
from echelon.ops.measures import active_returns, sharpe_annual
from echelon.population.reference_policies import HEDGE, is_expert_key
from echelon.runs.registry import Entry
from echelon.training.run import TrainedRun
from echelon.types import Floats

_FORMAT = 1
TRUST = "trust.json"
YARDSTICK: Final = "equal_weight"
"""The baseline an edge is claimed over: it needs no forecast."""
COST_FACTORS = (0.0, 1.0, 2.0)
LEAST_BARS = 60
"""Bars below which nothing is said about differences: there are too few blocks to resample."""
SEED_MEASURES = (
    *("sharpe_annual", "information_ratio", "total_return", "annual_return", "calmar"),
    *("max_drawdown", "turnover_annual"),
)
"""Measures with an interval over the seeds."""
BEST_EXPERT = "best"
EXPERTS_MEAN = "experts"
AGAIN = "Run `echelon evaluate` again."

VerdictKey = Literal["better", "undeflated", "calmer", "worse", "same", "unknown"]
Number = Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)]
"""Finite, and so after it is made one of a year."""
Count = Annotated[int, Field(ge=0, le=2**53)]
Seed = Annotated[str, StringConstraints(pattern=r"^\d{1,18}$")]
"""As a key of JSON."""
MeasureValues = dict[str, Number | None]
Measured: TypeAlias = Mapping[str, float]
"""Measures by name."""


class Track(NamedTuple):
    """What is kept of a book. returns: [T], fewer where it was ruined"""

    measures: Measured
    returns: Floats


class _MeasureInterval(TypedDict):
    estimate: Number
    low: Number | None
    high: Number | None
    iqm: Number | None
    method: Literal["t", "bootstrap", "none"]


class _AtBlock(TypedDict):
    estimate: Number | None
    low: Number | None
    high: Number | None
    block_length: Number
    replications: Count


class _BothBlocks(TypedDict):
    single: _AtBlock
    double: _AtBlock


class _Counted(TypedDict):
    trials: Count
    reads: Count
    runs: Count


class _SeedIntervals(TypedDict):
    n: Count
    measures: dict[str, _MeasureInterval | None]


class _Deflated(TypedDict):
    psr: Number | None
    probability: Number | None
    hurdle: Number
    n_trials: Count
    n_effective: Number
    probability_effective: Number | None


class _Overfitted(TypedDict):
    probability: Number | None
    null_low: Number | None
    null_high: Number | None
    n_configurations: Count


class _Superior(TypedDict):
    p_value: Number | None
    n_models: Count


class _CostLine(TypedDict):
    factor: Number
    sharpe_annual: _MeasureInterval | None
    total_return: _MeasureInterval | None
    equal_weight_sharpe_annual: Number | None
    equal_weight_total_return: Number | None


class _CapacityLine(TypedDict):
    factor: Number
    cash: Number
    sharpe_annual: Number | None
    information_ratio: Number | None
    cost_share: Number | None
    orders: Count
    cut: Number | None
    participation_mean: Number | None
    participation_95: Number | None


class _Claimed(TypedDict):
    deflated: Number | None
    trials: NotRequired[Count | None]


class _Judged(TypedDict):
    key: VerdictKey
    baseline: Literal["equal_weight"]


class _Trust(TypedDict):
    """trust.json; others may have written it, and whatever differs from this is damage."""

    split: Literal["train", "valid", "test"]
    bars: Count
    periods_per_year: Annotated[float, Field(gt=0, le=1e9)]
    registry: _Counted
    seeds: _SeedIntervals
    differences: dict[str, _BothBlocks]
    deflation: _Deflated | None
    overfitting: _Overfitted | None
    superiority: _Superior | None
    costs: list[_CostLine]
    claim: _Claimed
    verdict: _Judged
    reference_policies: NotRequired[dict[str, _BothBlocks]]
    ensemble: NotRequired[dict[str, _BothBlocks]]
    active: NotRequired[dict[str, _BothBlocks]]
    active_deflation: NotRequired[_Deflated | None]
    capacity: NotRequired[list[_CapacityLine]]


def assess_trust(
    look: Look,
    policies: Mapping[int, Policy],
    agents: Mapping[int, Backtest],
    baselines: Mapping[str, Backtest],
    reference_policies: Mapping[int, Mapping[str, Track]],
    ensemble: Backtest | None = None,
    past: Mapping[Book, Floats] | None = None,
) -> dict[str, Any]:
    """trust.json but for `capacity`, of backtests just made; `look` has their entry already.

    past: as of `evaluate`
    """
    seed = look.run.config.seed
    returns = stack_returns(b.returns for b in agents.values())
    rates = {b.periods_per_year for b in agents.values()}
    others = {name: stack_returns([b.returns], len(returns))[:, 0] for name, b in baselines.items()}
    joined = None if ensemble is None else stack_returns([ensemble.returns], len(returns))
    compared = compare_books(dict(zip(agents, returns.T, strict=True)), joined, others, seed)
    rivals = look.rivals()
    reads = look.registry.reads(look.window)
    deflation = _deflate(look, rivals, returns.mean(axis=1))
    chosen = _chosen_by(look, deflation)
    looks = 1 if deflation is None else deflation.n_trials
    active = deflate_active(returns.mean(axis=1), others.get(YARDSTICK), looks)
    strictest = stricter(_strictest(look, chosen, deflation), active)
    said = compared.verdict(look.split, strictest)
    return {
        "format": _FORMAT,
        "split": look.split,
        "bars": len(returns),
        "periods_per_year": rates.pop(),
        "registry": {
            "trials": len(look.registry.trials(look.window)),
            "reads": len(reads),
            "runs": len({entry.run for entry in reads}),
        },
        "seeds": {"n": len(agents), "measures": {m: _interval(agents, m) for m in SEED_MEASURES}},
        **compared.tree(),
        "deflation": None if deflation is None else finite_values(deflation._asdict()),
        "active_deflation": None if active is None else finite_values(active._asdict()),
        **_over_trials(look, rivals, others.get(YARDSTICK)),
        **reference_differences(returns, reference_policies, seed),
        "costs": _cost_sweep(look, policies, agents, baselines, past or {}),
        "claim": {
            "made": said == "better",
            "deflated": _probability(chosen),
            "after_looks": strictest,
            "trials": None if chosen is None else chosen.n_trials,
            "baseline": YARDSTICK,
        },
        "verdict": {"key": said, "baseline": YARDSTICK},
    }


@dataclass(frozen=True)
class ComparedBooks:
    """What a series of days says of books: see `compare_books`. Empty where there are too few."""

    differences: Mapping[str, BothBlocks]
    ensemble: Mapping[str, BothBlocks]
    active: Mapping[str, BothBlocks]

    def tree(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in ("differences", "ensemble", "active")}
        return {
            name: {who: both_blocks(both) for who, both in part.items()}
            for name, part in parts.items()
            if part or name != "ensemble"
        }

    def verdict(self, split: str, deflated: float | None) -> VerdictKey:
        return verdict(split, self.differences.get(YARDSTICK), self.active.get(AGENT), deflated)


def compare_books(
    agents: Mapping[int, Floats], ensemble: Floats | None, others: Mapping[str, Floats], seed: int
) -> ComparedBooks:
    """Compare agents[T] by seed, and their ensemble[T,1], with baselines[T] by name.

    differences, ensemble: Sharpe ratio of the agents' mean, and of the ensemble, to each baseline
    active: information ratio over the yardstick, by book
    """
    returns = np.column_stack(list(agents.values()))
    if len(returns) < LEAST_BARS:
        return ComparedBooks({}, {}, {})
    books = {AGENT: returns} | ({} if ensemble is None else {ENSEMBLE: ensemble})
    differences, joint = (
        {name: at_both_blocks(books[who], theirs, seed=seed) for name, theirs in others.items()}
        if who in books
        else {}
        for who in (AGENT, ENSEMBLE)
    )
    yardstick = others.get(YARDSTICK)
    if yardstick is None:
        return ComparedBooks(differences, joint, {})
    if len(agents) > 1:
        books |= {f"seed-{s}": own[:, None] for s, own in agents.items()}
    books |= {name: own[:, None] for name, own in others.items() if name != YARDSTICK}
    active = {who: active_ratio(own, yardstick, seed=seed) for who, own in books.items()}
    return ComparedBooks(differences, joint, active)


def verdict(
    split: str, sharpe: BothBlocks | None, active: BothBlocks | None, deflated: float | None
) -> VerdictKey:
    """What may be said of the agents vs the yardstick; both block lengths must agree.

    sharpe: difference of Sharpe ratios; active: information ratio
    """
    if sharpe is None or active is None:
        return "unknown"
    if sharpe.low > 0.0:
        if not active.low > 0.0:
            return "calmer"
        sure = split == "test" and deflated is not None and deflated > DEFLATED_ABOVE
        return "better" if sure else "undeflated"
    return "worse" if sharpe.high < 0.0 else "same"


def deflate_active(returns: Floats, yardstick: Floats | None, n_trials: int) -> Deflation | None:
    """Deflate the information ratio of returns[T] over yardstick[T] by so many trials.

    None where there is no yardstick or there are too few bars. Trials are taken as independent and
    as good as this one, with the least variance that `deflate_by_sharpes` takes.
    """
    if yardstick is None or len(returns) < LEAST_BARS:
        return None
    active = active_returns(returns, yardstick)
    ratio = sharpe_annual(active, 1.0)
    return deflate_by_sharpes(active, [ratio if math.isfinite(ratio) else 0.0] * n_trials)


def stricter(deflated: float | None, active: Deflation | None) -> float | None:
    """The lower of two deflated ratios; None where one is not known."""
    other = _probability(active)
    return None if deflated is None or other is None else min(deflated, other)


class ClaimBasis(NamedTuple):
    """What a claim rests on. deflated: Sharpe ratio, tried: configurations; None: not known"""

    deflated: float | None
    tried: int | None


def claim_basis(run: TrainedRun, split: SplitName, returns: Floats) -> ClaimBasis:
    """Of the mean returns[T] of an evaluation that was saved, by all that is counted up to now.

    trust.json has it as it was at that evaluation; whoever has looked since counts here too.
    """
    look = Look.back(run, split)
    deflation = _deflate(look, look.rivals(), returns)
    chosen = _chosen_by(look, deflation)
    tried = None if chosen is None else chosen.n_trials
    return ClaimBasis(_strictest(look, chosen, deflation), tried)


def load_trust(run: Path, split: str) -> dict[str, Any] | None:
    """What was saved of a split; None where nothing was."""
    path = run / "evaluations" / split / TRUST
    return read_saved(path, _Trust, _FORMAT) if path.exists() else None


def read_saved(path: Path, kind: type, number: int) -> dict[str, Any]:
    """A JSON file of an evaluation, of that format number and as `kind` says."""
    tree = read_json(path, dict[str, Any], AGAIN)
    if tree.get("format") != number:
        raise StoreError(f"{path}: written by another version of Echelon. {AGAIN}")
    check_tree(tree, kind, path, AGAIN)
    return tree


def both_blocks(both: BothBlocks) -> dict[str, Any]:
    """A difference at both block lengths, as JSON has it."""
    return {name: finite_values(part._asdict()) for name, part in both._asdict().items()}


def compare(returns: Floats, baseline: Floats, seed: int) -> BothBlocks | None:
    """Difference of Sharpe ratios at both block lengths; None where there are too few bars."""
    return None if len(returns) < LEAST_BARS else at_both_blocks(returns, baseline, seed=seed)


def by_row(
    reference_policies: Mapping[int, Mapping[str, Measured]], *, best: bool = False
) -> dict[str, list[Measured]]:
    """Row → measures of each seed, whose reference policies are of its own experts.

    hedge: over the experts; experts: their mean, each by itself
    best: the highest Sharpe ratio, chosen in hindsight on this very window; only if asked for
    """
    every = list(reference_policies.values())
    if not every:
        return {}
    experts = [[own[k] for k in own if is_expert_key(k)] for own in every]
    rows = {HEDGE: [own[HEDGE] for own in every]}
    if best:  # who has no ratio comes last
        ratio = "sharpe_annual"
        rows[BEST_EXPERT] = [
            max(own, key=lambda m: -math.inf if math.isnan(m[ratio]) else m[ratio])
            for own in experts
        ]
    rows[EXPERTS_MEAN] = [
        {name: float(np.mean([values[name] for values in own])) for name in own[0]}
        for own in experts
    ]
    return rows


def reference_returns(
    reference_policies: Mapping[int, Mapping[str, Track]], length: int
) -> dict[str, Floats]:
    """{hedge: [T,S], experts: [T,S·K]} of `length` bars; a ruined book earns nothing more."""
    every = list(reference_policies.values())
    experts = [own[k].returns for own in every for k in own if is_expert_key(k)]
    chosen = {HEDGE: [own[HEDGE].returns for own in every], EXPERTS_MEAN: experts}
    return {row: stack_returns(series, length) for row, series in chosen.items()}


def reference_differences(
    returns: Floats, reference_policies: Mapping[int, Mapping[str, Track]], seed: int
) -> dict[str, Any]:
    """Differences to the reference policies, if there are any."""
    if not reference_policies:
        return {}
    differences = {
        name: both_blocks(both)
        for name, theirs in reference_returns(reference_policies, len(returns)).items()
        if (both := compare(returns, theirs, seed))
    }
    return {"reference_policies": differences}


def _interval(agents: Mapping[int, Backtest], measure: str) -> dict[str, Any] | None:
    """Mean, interval and interquartile mean over seeds; None where one of them has no number."""
    values = [backtest.measures[measure] for backtest in agents.values()]
    if not np.isfinite(values).all():
        return None
    return finite_values(seed_interval(values)._asdict() | {"iqm": interquartile_mean(values)})


def _deflate(look: Look, rivals: Sequence[Entry], chosen: Floats) -> Deflation | None:
    """Deflated by all on this window; None where there are too few bars, or it chose nothing.

    Rivals whose days differ from ours count as independent of them; one whose result was lost
    counts as one that found nothing.
    """
    if len(chosen) < LEAST_BARS or not rivals:
        return None
    matrix = _matrix(look, rivals, len(chosen))
    alike = effective_trials(matrix) if matrix.shape[1] > 1 else float(matrix.shape[1])
    apart = len(rivals) - matrix.shape[1]
    sharpes = [0.0 if entry.sharpe is None else entry.sharpe for entry in rivals]
    return deflate_by_sharpes(chosen, sharpes, max(1.0, alike + apart))


def _matrix(look: Look, entries: Sequence[Entry], n_periods: int) -> Floats:
    """[T,K] returns of the entries whose days are just those of this window."""
    columns = [
        look.registry.returns(entry)["return"].to_numpy()
        for entry in entries
        if entry.periods == n_periods and entry.window[-2:] == look.window[-2:]
    ]
    return np.column_stack(columns) if columns else np.empty((n_periods, 0))


def _over_trials(look: Look, rivals: Sequence[Entry], yardstick: Floats | None) -> dict[str, Any]:
    """What needs the returns of all trials: overfitting and superiority."""
    known: dict[str, Any] = {"overfitting": None, "superiority": None}
    # A second look at the same configuration makes no second configuration.
    seen = [entry for entry in rivals if entry.periods and entry.window[-2:] == look.window[-2:]]
    mine = {entry.config_hash: entry for entry in seen}
    if not mine:
        return known
    matrix = _matrix(look, list(mine.values()), max(entry.periods for entry in mine.values()))
    distinct = matrix[:, matrix.std(axis=0) > 0.0]
    if distinct.shape[1] < 2 or len(distinct) < LEAST_BARS:
        return known
    seed = look.run.config.seed
    if (overfitting := backtest_overfitting(distinct, seed=seed)) is not None:
        known["overfitting"] = finite_values(overfitting._asdict())
    if yardstick is not None and len(yardstick) == len(distinct):
        better = superior_ability(distinct, yardstick, seed=seed)
        known["superiority"] = finite_values(better._asdict())
    return known


def _chosen_by(look: Look, deflation: Deflation | None) -> Deflation | None:
    """Deflation on the validation window, which chose, by the trials in the registry now.

    None where it is not known, or the validation was of fewer or of more seeds than there are.
    """
    if look.split == "valid":
        return deflation
    chose = Look.at(look.run, "valid")
    entry, trials = chose.entry(), chose.rivals()
    mine = next((t for t in trials if (t.key, t.seeds) == (entry.key, entry.seeds)), None)
    if mine is None:
        return None
    return _deflate(chose, trials, look.registry.returns(mine)["return"].to_numpy())


def _probability(chosen: Deflation | None) -> float | None:
    return None if chosen is None else finite_or_none(chosen.probability)


def _strictest(look: Look, chosen: Deflation | None, deflation: Deflation | None) -> float | None:
    """Deflated Sharpe ratio a claim rests on: that of validation.

    From the second look on, which chose by the test window too, the lower one of both windows.
    """
    on_validation = _probability(chosen)
    if on_validation is None or look.split != "test" or deflation is None or deflation.n_trials < 2:
        return on_validation
    on_test = _probability(deflation)
    return None if on_test is None else min(on_validation, on_test)


def _cost_sweep(
    look: Look,
    policies: Mapping[int, Policy],
    agents: Mapping[int, Backtest],
    baselines: Mapping[str, Backtest],
    past: Mapping[Book, Floats],
) -> list[dict[str, Any]]:
    """At each cost: the agents' and the yardstick's measures; decisions are made again."""
    config = look.run.config
    usual = 1.0 if config.eval.use_fee else 0.0
    only = config.eval.model_copy(update={"baselines": (YARDSTICK,)})
    lines = []
    for factor in COST_FACTORS:
        if factor == usual and YARDSTICK in baselines:
            mine, theirs = agents, baselines[YARDSTICK]
        else:
            world = look.world(factor)
            span = world.span(look.split)
            mine = {
                s: run_backtest(p, world, span, config, past=past.get(Book(AGENT, s)))
                for s, p in policies.items()
            }
            yardstick = config.model_copy(update={"eval": only})
            theirs = run_baselines(world, span, yardstick, past=past)[YARDSTICK]
        line: dict[str, Any] = {"factor": factor}
        for name in ("sharpe_annual", "total_return"):
            line[name] = _interval(mine, name)
            line[f"{YARDSTICK}_{name}"] = finite_or_none(theirs.measures[name])
        lines.append(line)
    return lines
