"""Evaluate a trained run on a split: every seed's best agent and every baseline, one function.

RUN/evaluations/SPLIT/summary.json     measures of all, mean and std over seeds, provenance
RUN/evaluations/SPLIT/trust.json       what they are worth (see evaluation.trust)
RUN/evaluations/SPLIT/equity.parquet   and other tables of all backtests: agents, what the seeds of
                                       a hierarchy bring along (population.reference_policies) and
                                       baselines (see backtest.files), and the ensemble of several
                                       seeds where it was asked for
RUN/evaluations/SPLIT/seed-42.*        of a hierarchy, who was in charge (population.record)
RUN/executors/NAME/evaluations/SPLIT/  the same with another executor (`TrainedRun.executed_by`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from echelon.backtest.baselines import FORECAST, run_baselines
from echelon.backtest.budget import is_limited
from echelon.backtest.ensemble import ENSEMBLE, EnsemblePolicy
from echelon.backtest.files import (
    AGENT,
    Book,
    Tables,
    read_tables,
    save_tables,
    tables_of,
    tables_of_book,
)
from echelon.backtest.forecaster import Forecaster, ensure_forecaster, forecast_ic
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import DamagedError, StoreError
from echelon.evaluation.capacity import capacity_sweep
from echelon.evaluation.test_access import Look, SplitName
from echelon.evaluation.trust import (
    AGAIN,
    TRUST,
    YARDSTICK,
    Count,
    Measured,
    MeasureValues,
    Number,
    Seed,
    Track,
    assess_trust,
    read_saved,
)
from echelon.files import exclusive_lock, finite_values, read_json, write_json
from echelon.monitoring.alerts import AlertCallback
from echelon.ops.measures import LABELS, MeanStd, mean_std
from echelon.population.policy import risk_alerts
from echelon.population.record import CommandRecord, record_of, remove_record
from echelon.population.reference_policies import reference_policies_of, sort_reference_policies
from echelon.runs.directory import RunFacts
from echelon.training.run import TrainedRun
from echelon.types import Floats

_FORMAT = 2


class _Choice(TypedDict):
    top: Count
    buffer: Number
    sharpe_annual: Number | None
    information_ratio: Number | None


class _RankIC(TypedDict):
    ic: Number | None
    low: Number | None
    high: Number | None
    icir: Number | None
    days: Count


class ForecastFacts(TypedDict):
    """Of the baseline `forecast`: how it was made and is traded, and rank ICs by split."""

    model: Literal["boosting", "ridge"]
    cells: Count
    rows: Count
    top: Count
    buffer: Number
    tranches: Count
    horizon: Count
    choices: list[_Choice]
    rank_ic: dict[SplitName, _RankIC]


class _Summary(TypedDict):
    """summary.json; others may have written it, and whatever differs from this is damage."""

    split: str
    first: str
    last: str
    bars: Count
    periods_per_year: Annotated[float, Field(gt=0, le=1e9)]
    ledger: dict[str, str]
    fees: bool
    executor: NotRequired[str]
    limits: NotRequired[dict[str, float | bool | None]]
    deterministic: bool
    reads: Count
    evaluated: str
    run: RunFacts
    best_steps: dict[Seed, int]
    seeds: Annotated[dict[Seed, MeasureValues], Field(min_length=1)]
    baselines: dict[str, MeasureValues]
    forecast: NotRequired[ForecastFacts]
    reference_policies: NotRequired[dict[Seed, dict[str, MeasureValues]]]
    ensemble: NotRequired[MeasureValues]


class _Reads(TypedDict):
    reads: Count


@dataclass(frozen=True)
class Evaluation:
    """A saved evaluation: measures by seed and by name; facts: what else summary.json has.

    ensemble: of all seeds as one policy, where it was asked for
    """

    directory: Path
    seeds: Mapping[int, Measured]
    baselines: Mapping[str, Measured]
    facts: Mapping[str, Any]
    reference_policies: Mapping[int, Mapping[str, Measured]] = field(default_factory=dict)
    ensemble: Measured | None = None

    def over_seeds(self, measure: str) -> MeanStd:
        """Mean and standard deviation of a measure over the seeds."""
        return mean_std([values.get(measure, math.nan) for values in self.seeds.values()])

    def tables(self, policy: str | int, seed: int | None = None) -> Tables:
        """Tables of a baseline by name, an agent by seed, a reference policy by both."""
        book = Book(AGENT, policy) if isinstance(policy, int) else Book(policy, seed)
        return tables_of_book(self._every_table, book, self.directory)

    @cached_property
    def _every_table(self) -> Tables:
        return read_tables(self.directory)


def evaluate(
    run: TrainedRun,
    split: SplitName,
    *,
    trust: bool = True,
    csv: bool = False,
    ensemble: bool = False,
    alert_callbacks: Sequence[AlertCallback] = (),
    past: Mapping[Book, Floats] | None = None,
) -> Evaluation:
    """Backtest the run's agents and the baselines on a split, and save what came out.

    What is tried on validation and each look at the test window go into the registry, the look
    before the window is opened.
    trust: with trust.json (see evaluation.trust); csv: tables that people read as CSV too
    ensemble: with several seeds as one policy (see backtest.ensemble), which is what one trades
    alert_callbacks: called with what risk control did to the agents
    past: book → earlier values that its drawdown budget goes on from (see backtest.budget)
    """
    config, past = run.config, past or {}
    policies: dict[int, Policy] = {seed: run.policy(seed) for seed in run.seeds}
    with exclusive_lock(run.path / ".evaluate.lock", f"the evaluations of {run.path}"):
        look = Look.at(run, split)
        world = look.world(1.0 if config.eval.use_fee else 0.0)
        span = world.span(split)
        agents: dict[int, Backtest] = {}
        records: dict[int, CommandRecord | None] = {}
        for seed, policy in policies.items():
            agent = run_backtest(policy, world, span, config, past=past.get(Book(AGENT, seed)))
            agents[seed] = agent
            record = record_of(policy)  # before the policy is run at other costs
            if record is not None and agent.budget is not None:
                events = sorted([*record.events, *agent.budget.events], key=lambda e: e.time)
                record = replace(record, events=tuple(events))
            records[seed] = record
            for alert in risk_alerts(policy, agent):
                for callback in alert_callbacks:
                    callback(alert)
        forecaster = None
        if FORECAST in config.eval.baselines:
            data = str(run.prepared.manifest["content_hash"])
            forecaster = ensure_forecaster(config, world, run.path, data=data)
        baselines = run_baselines(world, span, config, forecaster, past)
        yardstick = baselines.get(YARDSTICK)
        agents = {seed: backtest.against(yardstick) for seed, backtest in agents.items()}
        baselines = {name: backtest.against(yardstick) for name, backtest in baselines.items()}
        look.note(agents)
        directory = run.home / "evaluations" / split
        reads = 1
        with suppress(DamagedError):  # of a split that was never evaluated, too
            reads += read_json(directory / "summary.json", _Reads, AGAIN)["reads"]
        for seed, record in records.items():
            if record is None:  # what is there is of another agent
                remove_record(directory, f"seed-{seed}")
            else:
                record.write(directory, f"seed-{seed}")
        books = {Book(AGENT, seed): tables_of(backtest) for seed, backtest in agents.items()}
        books |= {Book(name): tables_of(backtest) for name, backtest in baselines.items()}
        tracks = _backtest_references(policies, world, span, config, books, yardstick, past)
        joined: Backtest | None = None
        trader, traded = next(iter(policies.values())), next(iter(agents.values()))
        if ensemble and len(policies) > 1:
            trader = EnsemblePolicy(list(policies.values()))
            joined = run_backtest(trader, world, span, config, past=past.get(Book(ENSEMBLE)))
            joined = traded = joined.against(yardstick)
            books[Book(ENSEMBLE)] = tables_of(joined)
        save_tables(directory, books, csv=csv)
        first, last = (world.times[row] for row in (span.start, span.stop - 1))
        rules: dict[str, Any] = {}
        if world.in_force is not None:  # an executor fills elsewhere than the rules say
            rules = {"rules": world.in_force.facts() | {"fill": world.ledger["fill"]}}
        summary = {
            "format": _FORMAT,
            "split": split,
            "first": str(first.astype("datetime64[D]")),
            "last": str(last.astype("datetime64[D]")),
            "bars": len(span),
            "periods_per_year": world.periods_per_year,
            "ledger": dict(world.ledger),
            **rules,
            "fees": config.eval.use_fee,
            "executor": config.market.executor,
            "deterministic": config.eval.deterministic,
            **_limits(config, past),
            "reads": reads,
            "evaluated": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": run.facts,
            "best_steps": {str(seed): run.best_step(seed) for seed in run.seeds},
            "seeds": {str(seed): finite_values(b.measures) for seed, b in agents.items()},
            "baselines": {name: finite_values(b.measures) for name, b in baselines.items()},
        }
        if forecaster is not None:
            summary["forecast"] = _forecast_facts(forecaster, world, split, config.seed)
        if tracks:
            summary["reference_policies"] = {
                str(seed): {name: finite_values(track.measures) for name, track in own.items()}
                for seed, own in tracks.items()
            }
        if joined is not None:
            summary["ensemble"] = finite_values(joined.measures)
        if trust:
            trusted = assess_trust(look, policies, agents, baselines, tracks, joined, past)
            if joined is not None or len(policies) == 1:
                usual = traded if yardstick is not None else None
                book = Book(AGENT, next(iter(policies))) if joined is None else Book(ENSEMBLE)
                before = past.get(book), past.get(Book(YARDSTICK))
                trusted["capacity"] = capacity_sweep(
                    trader, world, span, config, usual=usual, past=before
                )
            write_json(directory / TRUST, trusted, sort_keys=True)
        else:
            (directory / TRUST).unlink(missing_ok=True)  # it would be of other agents
        write_json(directory / "summary.json", summary, sort_keys=True)
    return load_evaluation(run.home, split)


def _forecast_facts(
    forecaster: Forecaster, world: World, split: SplitName, seed: int
) -> dict[str, Any]:
    """What summary.json says of the forecaster: choices, and rank ICs out of sample."""
    splits = dict.fromkeys(("valid", split))
    return {
        **forecaster.facts,
        **forecaster.rule._asdict(),
        "rank_ic": {s: forecast_ic(forecaster, world, world.span(s), seed) for s in splits},
    }


def _backtest_references(
    policies: Mapping[int, Policy],
    world: World,
    span: range,
    config: Config,
    books: dict[Book, Tables],
    yardstick: Backtest | None,
    past: Mapping[Book, Floats],
) -> dict[int, dict[str, Track]]:
    """Backtest what the agents bring along, one at a time; tables and returns are kept."""
    tracks: dict[int, dict[str, Track]] = {}
    for seed, policy in policies.items():
        for name, reference in reference_policies_of(policy).items():
            book = Book(name, seed)
            backtest = run_backtest(reference, world, span, config, past=past.get(book))
            backtest = backtest.against(yardstick)
            books[book] = tables_of(backtest)
            track = Track(backtest.measures, backtest.returns)
            tracks.setdefault(seed, {})[name] = track
    return tracks


def _limits(config: Config, past: Mapping[Book, Floats]) -> dict[str, Any]:
    """What the summary says of the limits of every real book; nothing where there are none."""
    if not is_limited(config.risk):
        return {}
    risk = config.risk
    limits = {"max_drawdown": risk.max_drawdown, "target_volatility": risk.target_volatility}
    return {"limits": limits | {"carried": bool(past)}}


def load_evaluation(run: Path, split: str) -> Evaluation:
    directory = run / "evaluations" / split
    path = directory / "summary.json"
    if not path.exists():
        raise StoreError(
            f"{run}: not evaluated on {split}. Run `echelon evaluate {run} --split {split}`."
        )
    tree = read_saved(path, _Summary, _FORMAT)
    seeds = {int(seed): _measures(values) for seed, values in tree.pop("seeds").items()}
    baselines = {name: _measures(values) for name, values in tree.pop("baselines").items()}
    reference_policies = {
        int(seed): {name: _measures(own[name]) for name in sort_reference_policies(own)}
        for seed, own in tree.pop("reference_policies", {}).items()
    }
    ensemble = _measures(tree.pop("ensemble")) if "ensemble" in tree else None
    return Evaluation(directory, seeds, baselines, tree, reference_policies, ensemble)


def _measures(values: Mapping[str, float | None]) -> dict[str, float]:
    """Those of a file; one that came after it was written is NaN, since to measure is to look."""
    known = {name: math.nan if v is None else float(v) for name, v in values.items()}
    return dict.fromkeys(LABELS, math.nan) | known
