"""Test windows of a walk-forward put together to one series, and how sure its result is.

Stitched is what somebody got who trained a new agent before every test window and traded it
through that window: the test returns of the folds, one after the other, per seed and per baseline.
Every fold begins with cash and a new book, and the first bar of its window is the one it first
decides on, so that one return per fold is not in the series, neither the agents' nor the
baselines'. Costs are the sum over the folds, each of which began with the same money; their share
is that sum over the money of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from echelon.evaluation.evaluate import Evaluation
from echelon.evaluation.statistics import judge, seed_interval
from echelon.evaluation.trust import LEAST_BARS
from echelon.ops.measures import Costs, MeanStd, mean_std, measure
from echelon.types import Floats, Times

RIVALS = ("equal_weight", "benchmark")
"""Baselines the stitched agents are compared with, beside the measures."""


@dataclass(frozen=True)
class Stitched:
    """Test windows one after another: T returns of S seeds and of the baselines of every fold.

    times[T], folds[T]: of each return; returns, measures: by `seed-42` or name of the baseline
    """

    times: Times
    folds: tuple[str, ...]
    seeds: tuple[int, ...]
    returns: Mapping[str, Floats]
    measures: Mapping[str, Mapping[str, float]]
    periods_per_year: float

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

    def frame(self) -> pl.DataFrame:
        """time, fold, and a column of returns for each seed and baseline."""
        return pl.DataFrame({"time": self.times, "fold": self.folds, **self.returns})

    def tree(self) -> dict[str, Any]:
        """Measures and span as JSON has them."""
        first, last = (str(self.times[k].astype("datetime64[D]")) for k in (0, -1))
        measures = {name: plain(values) for name, values in self.measures.items()}
        return {
            "first": first,
            "last": last,
            "periods": len(self.times),
            "periods_per_year": self.periods_per_year,
            "measures": measures,
        }


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
    returns, measures = {}, {}
    for name in names:
        parts = [_Series.of(e, name, len(w)) for e, w in zip(every, windows, strict=True)]
        returns[name] = np.concatenate([part.returns for part in parts])
        measures[name] = measure(
            returns[name],
            periods_per_year=rate,
            turnover=np.concatenate([part.traded for part in parts]),
            exposure=np.concatenate([part.invested for part in parts]),
            costs=Costs(*map(sum, zip(*(part.costs for part in parts), strict=True))),
            initial_value=parts[0].initial,
        ).as_dict()
    folds = [fold for fold, w in zip(evaluations, windows, strict=True) for _ in w]
    return Stitched(np.concatenate(windows), tuple(folds), seeds, returns, measures, rate)


def _times(evaluation: Evaluation, names: Sequence[str]) -> Times:
    """[T] times of the returns in a test window, as the book that lasted longest has them."""
    found = (evaluation.tables(name).equity["time"][1:].to_numpy() for name in names)
    return np.asarray(max(found, key=len))


def statistics(stitched: Stitched, seed: int) -> dict[str, Any]:
    """How sure the stitched result is: over the seeds, and beside equal weight and benchmark.

    Ratios in `differences` are per period, each at the block length of the difference and at
    twice that; empty where there are too few returns to resample.
    """
    ratios = [stitched.measures[seed_name(s)]["sharpe_annual"] for s in stitched.seeds]
    interval = seed_interval(ratios)._asdict() if np.isfinite(ratios).all() else None
    differences: dict[str, Any] = {}
    for name in RIVALS:
        if name in stitched.baselines and len(stitched.times) >= LEAST_BARS:
            found = judge(stitched.agents, stitched.returns[name], math.nan, seed=seed)
            differences[name] = {
                "single": plain(found.single._asdict()),
                "double": plain(found.double._asdict()),
            }
    return {
        "sharpe_annual": None if interval is None else plain(interval),
        "differences": differences,
    }


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has them: what is not a number is null."""
    return {
        name: None if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in values.items()
    }
