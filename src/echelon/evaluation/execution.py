"""Judge execution policies on a split: the same orders worked by each, measured and compared.

    RUN/evaluations/SPLIT/orders.parquet      every order, and its measures by policy
    RUN/evaluations/SPLIT/history.parquet     where asked for: every step of every order and policy
    RUN/evaluations/SPLIT/shapes.parquet      mean trajectories by tick, and gains by hour
    RUN/evaluations/SPLIT/summary.json        means with intervals, differences, provenance

Orders of one day share its prices, so the day is the unit: a policy's measure is averaged over the
orders of each date, and intervals are Student's over dates. Several seeds of a learned policy are
averaged order by order first. Differences are paired, order by order, against each of the
schedules, in `gain_twap`: basis points of the arrival price (see `execution.history`).

Axes: `E` orders, `T` ticks of a day, `C` dates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from scipy import stats

from echelon.execution import History, measure_orders
from echelon.execution.history import BASIS_POINTS, gain_loss_ratio, order_frame
from echelon.execution.policies import SCHEDULES, ExecutionPolicy, ScheduleInputs, run_orders
from echelon.execution.simulator import steps_of
from echelon.files import finite_or_none, write_json, write_parquet
from echelon.training.execution import open_trained
from echelon.training.execution_data import ExecutionData
from echelon.types import Floats

SUMMARY, ORDERS, SHAPES = "summary.json", "orders.parquet", "shapes.parquet"
HISTORY = "history.parquet"
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
    path[T]: mean share of the order executed in each tick
    hourly: by hour of the day, share of what was executed then, and its gain
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

    split: str
    dates: tuple[str, ...]
    policies: tuple[PolicyOrders, ...]
    volume: Floats
    clock: Floats
    facts: Mapping[str, Any]
    example: Mapping[str, History]
    orders: pl.DataFrame
    steps: pl.DataFrame | None = None

    def mean(self, name: str, measure: str) -> Mean:
        """Over dates, of one policy."""
        return over_dates(self.policy(name).measures[measure], self.dates)

    def difference(self, name: str, against: str) -> Mean:
        """In what claims are made of, paired order by order, then over dates."""
        apart = self.policy(name).measures[CLAIMED] - self.policy(against).measures[CLAIMED]
        return over_dates(np.asarray(apart), self.dates)

    def policy(self, name: str) -> PolicyOrders:
        return next(policy for policy in self.policies if policy.name == name)

    def summary(self) -> dict[str, Any]:
        """Means, intervals and differences, as JSON has them."""
        against = [name for name in SCHEDULES if any(p.name == name for p in self.policies)]
        policies = {}
        for policy in self.policies:
            pa = policy.measures["pa"]
            policies[policy.name] = {
                "measures": {m: self.mean(policy.name, m)._asdict() for m in policy.measures},
                "glr": finite_or_none(gain_loss_ratio(np.where(np.abs(pa) < _NOISE, 0.0, pa))),
                "seeds": {
                    str(seed): {m: finite_or_none(float(v.mean())) for m, v in measures.items()}
                    for seed, measures in policy.seeds.items()
                },
                "less": {
                    name: self.difference(policy.name, name)._asdict()
                    for name in against
                    if name != policy.name
                },
            }
        return {"split": self.split, "facts": dict(self.facts), "policies": policies}

    def write(self, directory: Path) -> None:
        """Tables first, the summary last: where it is, all is."""
        directory.mkdir(parents=True, exist_ok=True)
        measures = {
            f"{policy.name}/{measure}": values
            for policy in self.policies
            for measure, values in policy.measures.items()
        }
        write_parquet(directory / ORDERS, self.orders.hstack(pl.DataFrame(measures)))
        if self.steps is None:  # one of an earlier evaluation would be of other orders
            (directory / HISTORY).unlink(missing_ok=True)
        else:
            write_parquet(directory / HISTORY, self.steps)
        shapes = {"minute": self.clock, "volume": self.volume}
        shapes |= {policy.name: policy.path for policy in self.policies}
        write_parquet(directory / SHAPES, pl.DataFrame(shapes))
        hourly = {
            policy.name: {str(h): list(v) for h, v in policy.hourly.items()}
            for policy in self.policies
        }
        write_json(directory / SUMMARY, self.summary() | {"hourly": hourly})


def make_schedules(data: ExecutionData, kappa: float) -> list[ExecutionPolicy]:
    """The baselines; kappa: of the longest order's whole time."""
    longest = max(
        int(steps_of(orders, data.rules.ticks_per_step).max(initial=1))
        for orders in data.orders.values()
    )
    given = ScheduleInputs(data.days.take(data.inside["train"]), longest, kappa)
    return [make(given) for make in SCHEDULES.values()]


def evaluate_trained(
    runs: Mapping[str, Path],
    split: str,
    orders: Path | None = None,
    *,
    history: bool = False,
    trust_code: Sequence[Path] = (),
) -> ExecutionEvaluation:
    """Trained runs by name, and the schedules, on the orders of the first run's split.

    orders: a file of them, in place of the run's own; history: keep every step
    trust_code: files of the runs' extensions that may run
    """
    renamed: dict[str, Path] = {}  # by names that no schedule has: a run called twap is `run twap`
    for name, run in runs.items():
        while name in _TAKEN or name in renamed:
            name = f"run {name}"
        renamed[name] = run
    config, data, learned = open_trained(renamed, split, orders, trust_code)
    schedules = make_schedules(data, config.execution.kappa)
    facts: dict[str, Any] = {
        "runs": {name: sorted(seeds) for name, seeds in learned.items()},
        "algo": config.execution.learner.algo,
        "steps": config.execution.learner.total_steps,
    }
    if orders is not None:
        others = data.asked - len(data.orders[split])
        facts |= {"orders_file": str(orders), "orders_elsewhere": others}
    given = data.orders[split]
    steps: list[pl.DataFrame] | None = [] if history else None
    worked = [_work_orders(p.name, {None: p}, data, split, steps) for p in schedules]
    worked += [_work_orders(name, seeds, data, split, steps) for name, seeds in learned.items()]
    # An order whose gain is the median of the longest ones': neither luck nor the lack of it.
    length = given.end - given.start
    longest = np.flatnonzero(length == length.max())
    by_gain = longest[np.argsort(worked[-1].measures[CLAIMED][longest], kind="stable")]
    shown = given.take(by_gain[[len(longest) // 2]])
    examples = {policy.name: policy for policy in schedules}
    examples |= {name: next(iter(seeds.values())) for name, seeds in learned.items()}
    share = data.days.volume[given.day]
    total = np.maximum(share.sum(axis=1, keepdims=True), 1e-12)
    dates = tuple(np.datetime_as_string(data.days.dates[given.day], unit="D").tolist())
    return ExecutionEvaluation(
        split,
        dates,
        tuple(worked),
        np.asarray((share / total).mean(axis=0)),
        data.days.clock,
        _provenance(data, dates) | facts,
        {name: run_orders(p, data.days, shown, data.rules) for name, p in examples.items()},
        order_frame(given, data.days),
        None if steps is None else pl.concat(steps),
    )


def _provenance(data: ExecutionData, dates: Sequence[str]) -> dict[str, Any]:
    return {
        "orders": len(dates),
        "dates": len(set(dates)),
        "first": min(dates),
        "last": max(dates),
        "symbols": sorted(set(data.days.symbols)),
        "price": data.days.price_source,
        "rules": {k: finite_or_none(float(v)) for k, v in data.rules._asdict().items()},
        "content": data.content,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


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


def _work_orders(
    name: str,
    seeds: Mapping[int, ExecutionPolicy] | Mapping[None, ExecutionPolicy],
    data: ExecutionData,
    split: str,
    steps: list[pl.DataFrame] | None,
) -> PolicyOrders:
    """What a policy, by seed, makes of the orders; `steps` is added to, where there is one."""
    by_seed, ticks = {}, []
    for seed, policy in seeds.items():
        # One history at a time: its [E,T] arrays are most of the memory.
        history = run_orders(policy, data.days, data.orders[split], data.rules)
        by_seed[seed] = measure_orders(history)
        ticks.append(_by_tick(history))
        if steps is not None:
            frame = history.steps_frame().select(
                pl.lit(name).alias("policy"),
                pl.lit(seed, dtype=pl.Int64).alias("seed"),
                pl.exclude("price", "market_price"),
                # No price is null, as readers average it.
                pl.col("price", "market_price").fill_nan(None),
            )
            steps.append(frame)
    names, mean = next(iter(by_seed.values())), np.mean(ticks, axis=0)
    hours = (data.days.clock // 60).astype(int)
    hourly: dict[int, tuple[float, float]] = {}
    for hour in sorted(set(hours.tolist())):
        share, gained = (float(total) for total in mean[:, hours == hour].sum(axis=1))
        hourly[hour] = (share, gained / share if share > 0.0 else 0.0)
    return PolicyOrders(
        name,
        {m: np.mean([own[m] for own in by_seed.values()], axis=0) for m in names},
        {seed: own for seed, own in by_seed.items() if seed is not None},
        mean[0],
        hourly,
    )


def _by_tick(history: History) -> Floats:
    """[2,T] mean over orders of the share executed in each tick, and of its gain over TWAP."""
    assert history.ticks is not None, "evaluations record ticks"
    share = history.ticks.executed / history.orders.amount[:, None]
    price = np.where(share > 0.0, history.ticks.price, history.benchmarks.twap[:, None])
    apart = (price - history.benchmarks.twap[:, None]) / history.benchmarks.arrival[:, None]
    gain = np.nan_to_num(-history.side[:, None] * apart * BASIS_POINTS) * share
    return np.stack([share.mean(axis=0), gain.mean(axis=0)])
