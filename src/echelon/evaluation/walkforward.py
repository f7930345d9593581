"""A walk-forward: train, choose and test again and again, each time on later data.

    DIR/base.yaml               the configuration
    DIR/walk_forward.json       the folds, for going on later; at the end also what they came to
    DIR/folds/NAME/             a run directory like any other
    DIR/walk_forward.csv, .parquet    every measure, by fold and stitched, of agents and baselines
                                and of a hierarchy's companions (evaluation.reference_policies)
    DIR/stitched.csv, .parquet  time, fold, and returns of each of them, one after another
    DIR/splits.png              the windows
    DIR/report/report.html      all of it as a page

Each fold is a whole experiment of its own (see evaluation.batch): features, scaler, training and
the choice of a checkpoint know the fold's train and validation windows only. Its assets are those
with a bar between the first day of its train window and the last of its test window, delisted
ones included; who is in the universe on a day (`member`) is what was known on that day.

Stitched is what somebody got who trained a new agent before every test window and traded it
through that window: the test returns of the folds, one after the other, per seed and per baseline.
Every fold begins with cash and a new book, and the first bar of its window is the one it first
decides on, so that one return per fold is not in the series, neither the agents' nor the
baselines'. Costs are the sum over the folds, each of which began with the same money; their share
is that sum over the money of one.

Companions of a hierarchy (see evaluation.reference_policies) are stitched by seed and name. An
expert of one fold has nothing but its number from that of another, which is why their mean is shown
and no best one: that would be chosen after the fact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.backtest.files import AGENT, Book
from echelon.config import Config
from echelon.data.build import PanelRequest, panel_times
from echelon.data.datasets import ensure_dataset
from echelon.data.store import Store
from echelon.evaluation.batch import BatchMember, Course, RunBatch, evaluation_of, write_table
from echelon.evaluation.evaluate import Evaluation
from echelon.evaluation.folds import Fold, FoldBars, plan_folds
from echelon.evaluation.reference_policies import (
    Measured,
    Track,
    by_row,
    companion_name,
    companion_returns,
)
from echelon.evaluation.statistics import Claim, deflate_by_sharpes, judge, seed_interval
from echelon.evaluation.test_access import SplitName
from echelon.evaluation.trust import LEAST_BARS, YARDSTICK, both_blocks, load_trust, verdict
from echelon.files import finite_values
from echelon.ops.measures import LABELS, Costs, mean_std, measure, sharpe_annual
from echelon.types import Floats, Times

STITCHED = "stitched"


def plan_walk(config: Config, *, quarantine: bool = False) -> tuple[Fold, ...]:
    """The folds of the configured data, which are imported where they are not there yet."""
    dataset = ensure_dataset(config, quarantine=quarantine)
    store = Store(config.data.store, pin=dataset)
    request = PanelRequest(symbols=config.assets, end=config.data.end)
    times = panel_times(store, dataset.name, request)
    if config.data.start is not None:
        times = times[times >= np.datetime64(config.data.start)]
    facts = store.symbols(dataset.name)
    folds = plan_folds(config.walk_forward, times)
    return tuple(replace(fold, assets=_assets(config, facts, fold)) for fold in folds)


def _assets(config: Config, facts: pl.DataFrame, fold: Fold) -> tuple[str, ...]:
    """Symbols with a bar inside the fold, in the order a run of them all would have.

    Symbols that list later are left out: nobody knew of them, and the random numbers an agent
    draws depend on how many assets there are.
    """
    listed = (pl.col("first").dt.date() <= fold.test[1]) & (
        pl.col("last").dt.date() >= fold.train[0]
    )
    known = facts.filter(listed)["symbol"].to_list()
    return tuple(s for s in config.assets if s in known) if config.assets else tuple(known)


@dataclass(frozen=True)
class WalkForward(RunBatch):
    """Folds and their runs."""

    noun = command = "walk-forward"
    stem = "walk_forward"
    member = "fold"
    trust = True
    results = (
        *("walk_forward.csv", "walk_forward.parquet", "stitched.csv", "stitched.parquet"),
        *("splits.png", "report/report.html", "report/report.zh.html"),
    )

    folds: tuple[Fold, ...]
    split: SplitName = field(default="test", kw_only=True)

    @classmethod
    def read_plan(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The folds, from what `plan` gave."""
        return {"folds": tuple(_read_fold(entry) for entry in tree["folds"])}

    def plan(self) -> dict[str, Any]:
        """The folds."""
        return {"folds": [_fold_tree(fold) for fold in self.folds]}

    def make_members(self) -> Iterator[BatchMember]:
        """A run of each fold, through its windows and of its assets."""
        for fold in self.folds:
            config = self.base.model_copy(update={"split": fold.split, "assets": fold.assets})
            yield BatchMember(fold.name, config, {"fold": fold.name})

    def summarise(self, course: Course) -> WalkForwardResult:
        """Gather the folds' evaluations; stitch them where every fold has one of every seed."""
        evaluations, problems = {}, {}
        for k, fold in enumerate(self.folds):
            evaluation = evaluation_of(self, course, k)
            if evaluation is not None:
                evaluations[fold.name] = evaluation
            problems[fold.name] = course.problem(k)
        complete = len(evaluations) == len(self.folds) and not any(problems.values())
        stitched = stitch(evaluations) if complete else None
        sure: Mapping[str, Any] = {}
        if stitched is not None:
            trusts = [load_trust(self.run(k), self.split) for k in range(len(self.folds))]
            sweeps = [trust["costs"] for trust in trusts if trust is not None]
            looks = max((t["registry"]["reads"] for t in trusts if t is not None), default=1)
            sure = statistics(stitched, self.base.seed, looks=looks, sweeps=sweeps)
        return WalkForwardResult(self.folds, evaluations, problems, stitched, sure)

    def save_result(self, result: WalkForwardResult) -> None:
        """Write down what is to be done, and what came out of it."""
        done: dict[str, Any] = {}
        if result.stitched is not None:
            done = {STITCHED: result.stitched.tree(), "statistics": result.statistics}
        self.save(**done)


def _fold_tree(fold: Fold) -> dict[str, Any]:
    spans = {name: [str(d) for d in getattr(fold, name)] for name in ("train", "valid", "test")}
    about = {"name": fold.name, **spans, "bars": fold.bars._asdict(), "partial": fold.partial}
    return about | {"assets": fold.assets}


def _read_fold(entry: Mapping[str, Any]) -> Fold:
    train, valid, test = (
        (date.fromisoformat(entry[name][0]), date.fromisoformat(entry[name][1]))
        for name in ("train", "valid", "test")
    )
    bars = FoldBars(**entry["bars"])
    assets = tuple(entry["assets"])
    return Fold(entry["name"], train, valid, test, bars, bool(entry["partial"]), assets)


@dataclass(frozen=True)
class WalkForwardResult:
    """Every fold's evaluation, by name, but of those that failed; stitched only if none did.

    statistics: of the stitched series, see `stitched.statistics`; empty without one
    """

    folds: tuple[Fold, ...]
    evaluations: Mapping[str, Evaluation]
    problems: Mapping[str, str]
    stitched: Stitched | None
    statistics: Mapping[str, Any]

    def frame(self) -> pl.DataFrame:
        """A line per fold and per seed, mean of the seeds (with std) and baseline; then stitched.

        who: `agent` (the mean over seeds), `seed-42`, or a baseline; of a hierarchy then `hedge`
        and `experts` (means over seeds), `seed-42-hedge`, `seed-42-expert-0` and so on
        """
        lines: list[dict[str, object]] = []
        for fold in self.folds:
            about = {
                "fold": fold.name,
                "first": str(fold.test[0]),
                "last": str(fold.test[1]),
                "problem": self.problems.get(fold.name, ""),
            }
            evaluation = self.evaluations.get(fold.name)
            if evaluation is None:
                lines.append(about | {"who": AGENT, "seeds": 0})
                continue
            measures = {seed_name(s): values for s, values in evaluation.seeds.items()}
            lines += _lines(about, measures, evaluation.baselines)
            lines += _companion_lines(about, evaluation.companions)
        if self.stitched is not None:
            tree = self.stitched.tree()
            about = {"fold": STITCHED, "first": tree["first"], "last": tree["last"], "problem": ""}
            measures = dict(self.stitched.measures)
            baselines = {name: measures.pop(name) for name in self.stitched.baselines}
            lines += _lines(about, measures, baselines)
            lines += _companion_lines(about, self.stitched.companion_measures)
        return pl.DataFrame(lines, schema=_SCHEMA)

    def write(self, directory: Path) -> None:
        """Write walk_forward.csv and .parquet, and the stitched returns."""
        write_table(self.frame(), directory / WalkForward.stem)
        if self.stitched is None:
            return
        write_table(self.stitched.frame(), directory / STITCHED)


_SCHEMA: Mapping[str, Any] = {
    **dict.fromkeys(("fold", "first", "last", "who"), pl.String),
    "seeds": pl.Int64,
    **{name + ending: pl.Float64 for name in LABELS for ending in ("", "_std")},
    "problem": pl.String,
}


def _lines(
    about: Mapping[str, object],
    seeds: Mapping[str, Mapping[str, float]],
    baselines: Mapping[str, Mapping[str, float]],
) -> list[dict[str, object]]:
    """The mean over the seeds with its std, then each seed, then each baseline."""
    mean = _mean_line(about, AGENT, list(seeds.values()))
    return [mean, *_single_lines(about, {**seeds, **baselines})]


def _companion_lines(
    about: Mapping[str, object], companions: Mapping[int, Mapping[str, Measured]]
) -> list[dict[str, object]]:
    """The rows of the companions, means over the seeds with std, then each seed's."""
    means = [_mean_line(about, who, seeds) for who, seeds in by_row(companions).items()]
    every = {
        companion_name(seed, name): values
        for seed, own in companions.items()
        for name, values in own.items()
    }
    return [*means, *_single_lines(about, every)]


def _mean_line(
    about: Mapping[str, object], who: str, seeds: Sequence[Measured]
) -> dict[str, object]:
    mean: dict[str, object] = {**about, "who": who, "seeds": len(seeds)}
    for name in LABELS:
        value = mean_std([values[name] for values in seeds])
        mean |= finite_values({name: value.mean, f"{name}_std": value.std})
    return mean


def _single_lines(
    about: Mapping[str, object], books: Mapping[str, Measured]
) -> list[dict[str, object]]:
    return [
        {**about, "who": who, "seeds": None, **finite_values(values)}
        for who, values in books.items()
    ]


@dataclass(frozen=True)
class Stitched:
    """Test windows one after another: T returns of S seeds and of the baselines of every fold.

    times[T], folds[T]: of each return; returns, measures: by `seed-42` or name of the baseline
    companions: of a hierarchy, by seed and name, measures and returns[T] of those every fold has
    """

    times: Times
    folds: tuple[str, ...]
    seeds: tuple[int, ...]
    returns: Mapping[str, Floats]
    measures: Mapping[str, Mapping[str, float]]
    periods_per_year: float
    companions: Mapping[int, Mapping[str, Track]] = field(default_factory=dict)

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of the baselines."""
        return tuple(self.returns)[len(self.seeds) :]

    @property
    def agents(self) -> Floats:
        """[T,S] returns of the seeds."""
        return np.column_stack([self.returns[seed_name(seed)] for seed in self.seeds])

    @property
    def seed_measures(self) -> list[Measured]:
        """Measures of each seed."""
        return [self.measures[seed_name(seed)] for seed in self.seeds]

    @property
    def companion_measures(self) -> dict[int, dict[str, Measured]]:
        """Seed → name → measures of the companions."""
        return {
            s: {n: track.measures for n, track in own.items()} for s, own in self.companions.items()
        }

    def frame(self) -> pl.DataFrame:
        """time, fold, and a column of returns for each seed, baseline and companion."""
        companions = {
            companion_name(seed, name): track.returns
            for seed, own in self.companions.items()
            for name, track in own.items()
        }
        return pl.DataFrame({"time": self.times, "fold": self.folds, **self.returns, **companions})

    def tree(self) -> dict[str, Any]:
        """Measures and span as JSON has them."""
        first, last = (str(self.times[k].astype("datetime64[D]")) for k in (0, -1))
        measures = {name: finite_values(values) for name, values in self.measures.items()}
        tree = {
            "first": first,
            "last": last,
            "periods": len(self.times),
            "periods_per_year": self.periods_per_year,
            "measures": measures,
        }
        if self.companions:
            tree["companions"] = {
                str(seed): {name: finite_values(values) for name, values in own.items()}
                for seed, own in self.companion_measures.items()
            }
        return tree


def seed_name(seed: int) -> str:
    """What a seed's backtest is called."""
    return f"seed-{seed}"


@dataclass(frozen=True)
class _Series:
    """What a book did over a test window of T steps; nothing, after a ruin.

    returns, traded, invested: [T] each; costs: commission, stamp and slippage, in money
    """

    returns: Floats
    traded: Floats
    invested: Floats
    costs: list[float]
    initial: float

    @staticmethod
    def from_tables(evaluation: Evaluation, book: Book, length: int) -> _Series:
        """Of a seed or a baseline, from its saved tables, over a window of so many steps."""
        table = evaluation.tables(*book).equity
        missing = length - (table.height - 1)

        def pad(values: pl.Series) -> Floats:
            return np.pad(values.to_numpy().astype(np.float64), (0, missing))

        return _Series(
            pad(table["return"][1:]),
            pad(table["traded"][1:]),
            pad(1.0 - table["cash_share"][:-1].cast(pl.Float64)),
            [float(table[part].sum()) for part in ("commission", "stamp", "slippage")],
            float(table["value"][0]),
        )


def stitch(evaluations: Mapping[str, Evaluation]) -> Stitched:
    """Put the test windows of folds, by name and in the order of time, one after another.

    Of seeds and baselines, those that every fold has.
    """
    every = list(evaluations.values())
    seeds = tuple(s for s in every[0].seeds if all(s in e.seeds for e in every))
    baselines = [n for n in every[0].baselines if all(n in e.baselines for e in every)]
    books = {seed_name(seed): Book(AGENT, seed) for seed in seeds}
    books |= {name: Book(name) for name in baselines}
    windows = [_times(e, books.values()) for e in every]
    rate = float(every[0].facts["periods_per_year"])

    def join(book: Book) -> Track:
        parts = [_Series.from_tables(e, book, len(w)) for e, w in zip(every, windows, strict=True)]
        return _join(parts, rate)

    tracks = {name: join(book) for name, book in books.items()}
    returns = {name: track.returns for name, track in tracks.items()}
    measures = {name: track.measures for name, track in tracks.items()}
    companions = {
        seed: {name: join(Book(name, seed)) for name in shared}
        for seed in seeds
        if (shared := _companions_of(every, seed))
    }
    folds = [fold for fold, w in zip(evaluations, windows, strict=True) for _ in w]
    return Stitched(
        np.concatenate(windows), tuple(folds), seeds, returns, measures, rate, companions
    )


def _companions_of(every: Sequence[Evaluation], seed: int) -> list[str]:
    """Names of the companions that a seed has in every fold."""
    first, *others = (e.companions.get(seed, {}) for e in every)
    return [name for name in first if all(name in fold for fold in others)]


def _join(parts: Sequence[_Series], rate: float) -> Track:
    """One series of a book's folds, and its measures. rate: periods a year"""
    returns = np.concatenate([part.returns for part in parts])
    measures = measure(
        returns,
        periods_per_year=rate,
        turnover=np.concatenate([part.traded for part in parts]),
        exposure=np.concatenate([part.invested for part in parts]),
        costs=Costs(*map(sum, zip(*(part.costs for part in parts), strict=True))),
        initial_value=parts[0].initial,
    )
    return Track(measures.as_dict(), returns)


def _times(evaluation: Evaluation, books: Iterable[Book]) -> Times:
    """[T] times of the returns in a test window, as the book that lasted longest has them."""
    times = (evaluation.tables(*book).equity["time"][1:].to_numpy() for book in books)
    return np.asarray(max(times, key=len))


def statistics(
    stitched: Stitched, seed: int, *, looks: int, sweeps: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """How sure the stitched result is: over the seeds, against the baselines, after the looks.

    looks: how often these test windows were looked at, this time included; the trials of the
           deflated Sharpe ratio, taken as independent ones
    sweeps: the cost sweep of each fold, as trust.json has it

    Ratios in `differences` are per period, each at the block length of the difference and at
    twice that; empty where there are too few returns to resample. `costs`: means over the folds.
    """
    ratios = [stitched.measures[seed_name(s)]["sharpe_annual"] for s in stitched.seeds]
    interval = seed_interval(ratios)._asdict() if np.isfinite(ratios).all() else None
    enough = len(stitched.times) >= LEAST_BARS
    mean = stitched.agents.mean(axis=1)
    deflation = None
    if enough:
        # The Sharpe ratios of earlier looks are not known here, so that of all is this one's, and
        # their variance is the least that `deflate_by_sharpes` takes.
        deflation = deflate_by_sharpes(mean, [sharpe_annual(mean, 1.0)] * looks)
    claims: dict[str, Claim] = {
        name: judge(stitched.agents, stitched.returns[name], math.nan, seed=seed)
        for name in stitched.baselines
        if enough
    }
    deflated = None if deflation is None else deflation.probability
    return {
        "sharpe_annual": None if interval is None else finite_values(interval),
        "differences": {name: both_blocks(claim) for name, claim in claims.items()},
        **(_companion_differences(stitched, seed) if enough else {}),
        "deflation": None if deflation is None else finite_values(deflation._asdict()),
        "looks": looks,
        "costs": _mean_sweep(sweeps),
        "verdict": {"key": verdict("test", claims.get(YARDSTICK), deflated), "baseline": YARDSTICK},
    }


def _companion_differences(stitched: Stitched, seed: int) -> dict[str, Any]:
    """Differences to the companions, if there are any; no verdict rests on them."""
    if not stitched.companions:
        return {}
    returns = {
        s: {n: track.returns for n, track in own.items()} for s, own in stitched.companions.items()
    }
    return {
        "companions": {
            name: both_blocks(judge(stitched.agents, theirs, math.nan, seed=seed))
            for name, theirs in companion_returns(returns, len(stitched.times)).items()
        }
    }


def _mean_sweep(sweeps: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """At each cost, the mean over the folds of the agents' and the yardstick's Sharpe ratio."""
    lines = []
    for folds in zip(*sweeps, strict=True):
        mine = [fold["sharpe_annual"] for fold in folds]
        theirs = [fold[f"{YARDSTICK}_sharpe_annual"] for fold in folds]
        line: dict[str, Any] = {"factor": folds[0]["factor"]}
        line["sharpe_annual"] = (
            None if None in mine else float(np.mean([interval["estimate"] for interval in mine]))
        )
        line[f"{YARDSTICK}_sharpe_annual"] = None if None in theirs else float(np.mean(theirs))
        lines.append(line)
    return lines
