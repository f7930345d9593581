"""Judge execution policies on a split: the same orders worked by each, measured and compared.

    RUN/evaluations/SPLIT/orders.parquet      every order, and its measures by policy
    RUN/evaluations/SPLIT/history.parquet     where asked for: every step of every order and policy
    RUN/evaluations/SPLIT/shapes.parquet      mean trajectories by tick, and gains by hour
    RUN/evaluations/SPLIT/summary.json        means with intervals, differences, provenance

Orders of one day share its prices, so the day is the unit: a policy's measure is averaged over the
orders of each date, and intervals are Student's over dates. Several seeds of a learned policy are
averaged order by order first; each is also told by itself. Differences are paired, order by order,
against each of the schedules (TWAP, VWAP, Almgren-Chriss), in `gain_twap`: basis points of the
arrival price, unbiased on a martingale (see `execution.metrics`).

Axes: `E` orders, `T` ticks of a day, `C` dates.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from scipy import stats

from echelon.execution import History, ParentOrders, measure_orders
from echelon.execution.history import order_frame
from echelon.execution.metrics import gain_loss_ratio
from echelon.execution.policies import ExecutionPolicy, run_orders
from echelon.execution.schedules import AlmgrenChriss, Twap, Vwap
from echelon.execution.simulator import steps_of
from echelon.files import read_json, write_atomic, write_json
from echelon.training.execution import ExecutionData, Split
from echelon.training.execution_runs import open_trained
from echelon.types import Floats

SUMMARY, ORDERS, SHAPES = "summary.json", "orders.parquet", "shapes.parquet"
HISTORY = "history.parquet"
SCHEDULES = ("twap", "vwap", "almgren_chriss")
_TAKEN = (*SCHEDULES, "minute", "volume")  # columns of shapes.parquet, all of them
_NOISE = 1e-6
"""Basis points: a smaller gain or loss is of floating point."""
CLAIMED = "gain_twap"
"""The measure that claims are made of."""


class Mean(NamedTuple):
    """A mean over dates with Student's 95 % interval and standard error; None: of one date."""

    estimate: float
    low: float | None
    high: float | None
    error: float | None


class PolicyOrders(NamedTuple):
    """What one policy made of the orders.

    measures: [E] by name; seeds: of a learned policy, its measures by seed
    path[T]: mean share of the order executed in each tick; hourly: gain by hour of the day
    """

    name: str
    measures: Mapping[str, Floats]
    seeds: Mapping[int, Mapping[str, Floats]]
    path: Floats
    hourly: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class ExecutionEvaluation:
    """All policies on the orders of a split.

    volume[T]: mean share of the day's; clock[T]: minutes after midnight; facts: provenance
    example: one order by itself, worked by each policy (of a learned one, by its first seed)
    orders: one a row, see `order_frame`; steps: of every policy and seed, None: not kept
    """

    split: Split
    dates: tuple[str, ...]
    policies: tuple[PolicyOrders, ...]
    volume: Floats
    clock: Floats
    facts: Mapping[str, Any]
    example: Mapping[str, History]
    orders: pl.DataFrame
    steps: pl.DataFrame | None = None

    def __post_init__(self) -> None:
        names = [one.name for one in self.policies]
        assert len(set(names)) == len(names), f"two policies have one name: {names}"

    def mean(self, name: str, measure: str) -> Mean:
        """Over dates, of one policy."""
        return over_dates(self.of(name).measures[measure], self.dates)

    def difference(self, name: str, against: str, measure: str = CLAIMED) -> Mean:
        """Paired order by order, then over dates."""
        apart = self.of(name).measures[measure] - self.of(against).measures[measure]
        return over_dates(np.asarray(apart), self.dates)

    def of(self, name: str) -> PolicyOrders:
        """By name."""
        return next(one for one in self.policies if one.name == name)

    def summary(self) -> dict[str, Any]:
        """Means, intervals and differences, as JSON has them."""
        against = [name for name in SCHEDULES if any(p.name == name for p in self.policies)]
        found: dict[str, Any] = {"split": self.split, "facts": dict(self.facts), "policies": {}}
        for one in self.policies:
            found["policies"][one.name] = {
                "measures": {m: self.mean(one.name, m)._asdict() for m in one.measures},
                "glr": _known(gain_loss_ratio(_without_noise(one.measures["pa"]))),
                "seeds": {
                    str(seed): {m: _known(float(v.mean())) for m, v in measures.items()}
                    for seed, measures in one.seeds.items()
                },
                "less": {
                    other: self.difference(one.name, other)._asdict()
                    for other in against
                    if other != one.name
                },
            }
        return found

    def write(self, directory: Path) -> Path:
        """Tables first, the summary last: where it is, all is."""
        directory.mkdir(parents=True, exist_ok=True)
        measures = {
            f"{one.name}/{m}": values for one in self.policies for m, values in one.measures.items()
        }
        _write_table(self.orders.hstack(pl.DataFrame(measures)), directory / ORDERS)
        if self.steps is None:  # one of an earlier evaluation would be of other orders
            (directory / HISTORY).unlink(missing_ok=True)
        else:
            _write_table(self.steps, directory / HISTORY)
        shapes = {"minute": self.clock, "volume": self.volume}
        shapes |= {one.name: one.path for one in self.policies}
        _write_table(pl.DataFrame(shapes), directory / SHAPES)
        target = directory / SUMMARY
        hourly = {
            one.name: {str(h): list(v) for h, v in one.hourly.items()} for one in self.policies
        }
        write_json(target, self.summary() | {"hourly": hourly})
        return target


def schedules_of(data: ExecutionData, kappa: float) -> list[ExecutionPolicy]:
    """The baselines; kappa: of the longest order's whole time."""
    longest = max(
        int(steps_of(orders, data.rules.ticks_per_step).max(initial=1))
        for orders in data.orders.values()
    )
    return [Twap(), Vwap(data.profile), AlmgrenChriss(kappa / longest)]


def evaluate_trained(
    runs: Mapping[str, Path],
    split: Split,
    orders: Path | None = None,
    *,
    history: bool = False,
    trust_code: Sequence[Path] = (),
) -> ExecutionEvaluation:
    """Trained runs by name, and the schedules, on the orders of the first run's split.

    orders: a file of them, in place of the run's own; history: keep every step
    trust_code: files of the runs' extensions that may run
    """
    config, data, learned = open_trained(_apart(runs), split, orders, trust_code)
    schedules = schedules_of(data, config.execution.kappa)
    facts: dict[str, Any] = {
        "runs": {name: sorted(seeds) for name, seeds in learned.items()},
        "algo": config.execution.learner.algo,
        "steps": config.execution.learner.total_steps,
    }
    if orders is not None:
        others = data.asked - len(data.orders[split])
        facts |= {"orders_file": str(orders), "orders_elsewhere": others}
    return evaluate_execution(data, split, schedules, learned, facts, history=history)


def _apart(runs: Mapping[str, Path]) -> dict[str, Path]:
    """Runs by names that no schedule has: a run called twap is `run twap`."""
    found: dict[str, Path] = {}
    for name, run in runs.items():
        while name in _TAKEN or name in found:
            name = f"run {name}"
        found[name] = run
    return found


def evaluate_execution(
    data: ExecutionData,
    split: Split,
    policies: Sequence[ExecutionPolicy],
    learned: Mapping[str, Mapping[int, ExecutionPolicy]],
    facts: Mapping[str, Any],
    *,
    history: bool = False,
) -> ExecutionEvaluation:
    """Work the split's orders with every policy; learned: by name, then by seed.

    history: keep every step of every order
    """
    orders = data.orders[split]
    steps: list[pl.DataFrame] | None = [] if history else None
    found = [_judged(one.name, {None: one}, data, split, steps) for one in policies]
    found += [_judged(name, seeds, data, split, steps) for name, seeds in learned.items()]
    share = data.days.volume[orders.day]
    total = np.maximum(share.sum(axis=1, keepdims=True), 1e-12)
    dates = tuple(np.datetime_as_string(data.days.dates[orders.day], unit="D").tolist())
    provenance = {
        "orders": len(orders),
        "dates": len(set(dates)),
        "first": min(dates),
        "last": max(dates),
        "symbols": sorted(set(data.days.symbols)),
        "price": data.days.price_source,
        "rules": {k: _known(float(v)) for k, v in data.rules._asdict().items()},
        "content": data.content,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    shown = orders.take(np.array([_typical(found[-1], orders)]))
    each = {one.name: one for one in policies}
    each |= {name: next(iter(seeds.values())) for name, seeds in learned.items()}
    return ExecutionEvaluation(
        split,
        dates,
        tuple(found),
        np.asarray((share / total).mean(axis=0)),
        data.days.clock,
        provenance | dict(facts),
        {name: run_orders(one, data.days, shown, data.rules) for name, one in each.items()},
        order_frame(orders, data.days),
        None if steps is None else pl.concat(steps),
    )


def _typical(policy: PolicyOrders, orders: ParentOrders) -> int:
    """The order whose gain is the median of the longest ones': neither luck nor the lack of it."""
    length = orders.end - orders.start
    longest = np.flatnonzero(length == length.max())
    gain = policy.measures[CLAIMED][longest]
    return int(longest[np.argsort(gain, kind="stable")[len(gain) // 2]])


def over_dates(values: Floats, dates: Sequence[str]) -> Mean:
    """Mean of values[E] by date, then over dates."""
    _, which = np.unique(np.asarray(dates), return_inverse=True)
    means = np.bincount(which, weights=values) / np.bincount(which)
    estimate = float(means.mean())
    if len(means) < 2:
        return Mean(estimate, None, None, None)
    error = float(means.std(ddof=1) / np.sqrt(len(means)))
    reach = float(stats.t.ppf(0.975, len(means) - 1)) * error
    return Mean(estimate, estimate - reach, estimate + reach, error)


def read_summary(directory: Path) -> dict[str, Any]:
    """What `write` left."""
    return read_json(directory / SUMMARY, dict[str, Any], "Run `echelon execution evaluate` again.")


def _judged(
    name: str,
    seeds: Mapping[int, ExecutionPolicy] | Mapping[None, ExecutionPolicy],
    data: ExecutionData,
    split: Split,
    steps: list[pl.DataFrame] | None,
) -> PolicyOrders:
    """What a policy, by seed, makes of the orders; `steps` is added to, where there is one."""
    by_seed, paths, hours = {}, [], []
    for seed, policy in seeds.items():
        # One history at a time: its [E,T] arrays are most of the memory.
        history = run_orders(policy, data.days, data.orders[split], data.rules)
        by_seed[seed] = measure_orders(history)
        paths.append(_path(history))
        hours.append(_hours(history))
        if steps is not None:
            steps.append(_kept(name, seed, history))
    names = next(iter(by_seed.values()))
    return PolicyOrders(
        name,
        {m: np.mean([found[m] for found in by_seed.values()], axis=0) for m in names},
        {seed: found for seed, found in by_seed.items() if seed is not None},
        np.asarray(np.mean(paths, axis=0)),
        _hourly(data.days.clock, np.mean(hours, axis=0)),
    )


def _kept(name: str, seed: int | None, history: History) -> pl.DataFrame:
    """Every step of every order, with whose it is; no price is null, as readers average it."""
    return history.steps_frame().select(
        pl.lit(name).alias("policy"),
        pl.lit(seed, dtype=pl.Int64).alias("seed"),
        pl.exclude("price", "market_price"),
        pl.col("price", "market_price").fill_nan(None),
    )


def _path(history: History) -> Floats:
    """[T] mean share of the order executed in each tick."""
    assert history.ticks is not None, "evaluations record ticks"
    share = history.ticks.executed / history.orders.amount[:, None]
    return np.asarray(share.mean(axis=0))


def _hours(history: History) -> Floats:
    """[2,T] mean over orders of the share executed in each tick, and of its gain over TWAP."""
    assert history.ticks is not None, "evaluations record ticks"
    share = history.ticks.executed / history.orders.amount[:, None]
    price = np.where(share > 0.0, history.ticks.price, history.benchmarks.twap[:, None])
    apart = (price - history.benchmarks.twap[:, None]) / history.benchmarks.arrival[:, None]
    gain = np.nan_to_num(-history.side[:, None] * apart * 1e4) * share
    return np.stack([share.mean(axis=0), gain.mean(axis=0)])


def _hourly(clock: Floats, ticks: Floats) -> dict[int, tuple[float, float]]:
    """By hour of the day: share of what was executed then, and its gain; ticks: see `_hours`."""
    hours = (clock // 60).astype(int)
    found = {}
    for hour in sorted(set(hours.tolist())):
        share, gained = (float(one) for one in ticks[:, hours == hour].sum(axis=1))
        found[hour] = (share, gained / share if share > 0.0 else 0.0)
    return found


def _without_noise(values: Floats) -> Floats:
    """Gains and losses so small that they are of floating point become none."""
    return np.where(np.abs(values) < _NOISE, 0.0, values)


def _write_table(frame: pl.DataFrame, path: Path) -> None:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    write_atomic(path, buffer.getvalue())


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
