"""Test windows of a walk-forward put together to one series, and how sure its result is.

Stitched is what somebody got who trained a new agent before every test window and traded it
through that window: the test returns of the folds, one after the other, per seed and per baseline.
Every fold begins with cash and a new book, and the first bar of its window is the one it first
decides on, so that one return per fold is not in the series, neither the agents' nor the
baselines'. Costs are the sum over the folds, each of which began with the same money; their share
is that sum over the money of one.

Companions of a hierarchy (see evaluation.companions) are stitched by seed and name. An expert of
one fold has nothing but its number from that of another, which is why their mean is shown and no
best one: that would be chosen after the fact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from echelon.evaluation.evaluate import Evaluation
from echelon.evaluation.reference_policies import Measured, Track, columns, companion_name
from echelon.evaluation.statistics import Claim, deflate_by_sharpes, judge, seed_interval
from echelon.evaluation.trust import LEAST_BARS, YARDSTICK, both_blocks, verdict
from echelon.ops.measures import Costs, MeanStd, mean_std, measure, sharpe_annual
from echelon.types import Floats, Times


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

    def over_seeds(self, measure: str) -> MeanStd:
        """Mean and standard deviation of a measure over the seeds."""
        return mean_std([self.measures[seed_name(seed)][measure] for seed in self.seeds])

    @property
    def companion_measures(self) -> dict[int, dict[str, Measured]]:
        """Seed → name → measures of the companions."""
        return {
            s: {n: one.measures for n, one in own.items()} for s, own in self.companions.items()
        }

    def frame(self) -> pl.DataFrame:
        """time, fold, and a column of returns for each seed, baseline and companion."""
        beside = {
            companion_name(seed, name): one.returns
            for seed, own in self.companions.items()
            for name, one in own.items()
        }
        return pl.DataFrame({"time": self.times, "fold": self.folds, **self.returns, **beside})

    def tree(self) -> dict[str, Any]:
        """Measures and span as JSON has them."""
        first, last = (str(self.times[k].astype("datetime64[D]")) for k in (0, -1))
        measures = {name: plain(values) for name, values in self.measures.items()}
        tree = {
            "first": first,
            "last": last,
            "periods": len(self.times),
            "periods_per_year": self.periods_per_year,
            "measures": measures,
        }
        if self.companions:
            tree["companions"] = {
                str(seed): {name: plain(values) for name, values in own.items()}
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
    def of(evaluation: Evaluation, name: str, length: int) -> _Series:
        """Of a seed or a baseline, from its saved tables, over a window of so many steps."""
        table = evaluation.tables(name).equity
        missing = length - (table.height - 1)

        def padded(values: pl.Series) -> Floats:
            return np.pad(values.to_numpy().astype(np.float64), (0, missing))

        return _Series(
            padded(table["return"][1:]),
            padded(table["traded"][1:]),
            padded(1.0 - table["cash_share"][:-1].cast(pl.Float64)),
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
    names = [*map(seed_name, seeds), *baselines]
    windows = [_times(e, names) for e in every]
    rate = float(every[0].facts["periods_per_year"])

    def whole(name: str) -> Track:
        parts = [_Series.of(e, name, len(w)) for e, w in zip(every, windows, strict=True)]
        return _joined(parts, rate)

    found = {name: whole(name) for name in names}
    returns = {name: one.returns for name, one in found.items()}
    measures = {name: one.measures for name, one in found.items()}
    companions = {
        seed: {name: whole(companion_name(seed, name)) for name in beside}
        for seed in seeds
        if (beside := _companions_of(every, seed))
    }
    folds = [fold for fold, w in zip(evaluations, windows, strict=True) for _ in w]
    return Stitched(
        np.concatenate(windows), tuple(folds), seeds, returns, measures, rate, companions
    )


def _companions_of(every: Sequence[Evaluation], seed: int) -> list[str]:
    """Names of the companions that a seed has in every fold."""
    first, *others = (e.companions.get(seed, {}) for e in every)
    return [name for name in first if all(name in one for one in others)]


def _joined(parts: Sequence[_Series], rate: float) -> Track:
    """One series of a book's folds, and its measures. rate: periods a year"""
    returns = np.concatenate([part.returns for part in parts])
    found = measure(
        returns,
        periods_per_year=rate,
        turnover=np.concatenate([part.traded for part in parts]),
        exposure=np.concatenate([part.invested for part in parts]),
        costs=Costs(*map(sum, zip(*(part.costs for part in parts), strict=True))),
        initial_value=parts[0].initial,
    )
    return Track(found.as_dict(), returns)


def _times(evaluation: Evaluation, names: Sequence[str]) -> Times:
    """[T] times of the returns in a test window, as the book that lasted longest has them."""
    found = (evaluation.tables(name).equity["time"][1:].to_numpy() for name in names)
    return np.asarray(max(found, key=len))


def statistics(
    stitched: Stitched, seed: int, *, looks: int, sweeps: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """How sure the stitched result is: over the seeds, beside the baselines, after the looks.

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
    found: dict[str, Claim] = {
        name: judge(stitched.agents, stitched.returns[name], math.nan, seed=seed)
        for name in stitched.baselines
        if enough
    }
    deflated = None if deflation is None else deflation.probability
    return {
        "sharpe_annual": None if interval is None else plain(interval),
        "differences": {name: both_blocks(claim) for name, claim in found.items()},
        **(_beside(stitched, seed) if enough else {}),
        "deflation": None if deflation is None else plain(deflation._asdict()),
        "looks": looks,
        "costs": _mean_sweep(sweeps),
        "verdict": {"key": verdict("test", found.get(YARDSTICK), deflated), "baseline": YARDSTICK},
    }


def _beside(stitched: Stitched, seed: int) -> dict[str, Any]:
    """Differences to the companions, if there are any; no verdict rests on them."""
    if not stitched.companions:
        return {}
    found = {
        s: {n: one.returns for n, one in own.items()} for s, own in stitched.companions.items()
    }
    return {
        "companions": {
            name: both_blocks(judge(stitched.agents, theirs, math.nan, seed=seed))
            for name, theirs in columns(found, len(stitched.times)).items()
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
            None if None in mine else float(np.mean([one["estimate"] for one in mine]))
        )
        line[f"{YARDSTICK}_sharpe_annual"] = None if None in theirs else float(np.mean(theirs))
        lines.append(line)
    return lines


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has them: what is not a number is null."""
    return {
        name: None if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in values.items()
    }
