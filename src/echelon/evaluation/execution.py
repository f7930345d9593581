"""Judge execution policies on a split: the same orders worked by each, measured and compared.

    RUN/evaluations/SPLIT/orders.parquet      measures of every order and policy
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
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from scipy import stats

from echelon.errors import StoreError
from echelon.execution import History, ParentOrders, measure_orders
from echelon.execution.metrics import gain_loss_ratio
from echelon.execution.policies import ExecutionPolicy, run_orders
from echelon.execution.schedules import AlmgrenChriss, Twap, Vwap
from echelon.execution.simulator import steps_of
from echelon.files import write_atomic
from echelon.training.execution import ExecutionData, Split
from echelon.training.execution_runs import open_trained
from echelon.types import Floats

SUMMARY, ORDERS, SHAPES = "summary.json", "orders.parquet", "shapes.parquet"
SCHEDULES = ("twap", "vwap", "almgren_chriss")
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
    """

    split: Split
    dates: tuple[str, ...]
    policies: tuple[PolicyOrders, ...]
    volume: Floats
    clock: Floats
    facts: Mapping[str, Any]
    example: Mapping[str, History]

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
                "glr": _known(gain_loss_ratio(one.measures["pa"])),
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
        columns: dict[str, Any] = {"date": list(self.dates)}
        for one in self.policies:
            columns |= {f"{one.name}/{m}": values for m, values in one.measures.items()}
        _write_table(pl.DataFrame(columns), directory / ORDERS)
        shapes = {"minute": self.clock, "volume": self.volume}
        shapes |= {one.name: one.path for one in self.policies}
        _write_table(pl.DataFrame(shapes), directory / SHAPES)
        target = directory / SUMMARY
        hourly = {
            one.name: {str(h): list(v) for h, v in one.hourly.items()} for one in self.policies
        }
        tree = self.summary() | {"hourly": hourly}
        write_atomic(target, json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return target


def schedules_of(data: ExecutionData, kappa: float) -> list[ExecutionPolicy]:
    """The baselines; kappa: of the longest order's whole time."""
    longest = max(
        int(steps_of(orders, data.rules.ticks_per_step).max()) for orders in data.orders.values()
    )
    return [Twap(), Vwap(data.profile), AlmgrenChriss(kappa / longest)]


def evaluate_trained(runs: Mapping[str, Path], split: Split) -> ExecutionEvaluation:
    """Trained runs by name, and the schedules, on the orders of the first run's split."""
    config, data, learned = open_trained(runs)
    schedules = schedules_of(data, config.execution.kappa)
    facts = {
        "runs": {name: sorted(seeds) for name, seeds in learned.items()},
        "algo": config.execution.learner.algo,
        "steps": config.execution.learner.total_steps,
    }
    return evaluate_execution(data, split, schedules, learned, facts)


def evaluate_execution(
    data: ExecutionData,
    split: Split,
    policies: Sequence[ExecutionPolicy],
    learned: Mapping[str, Mapping[int, ExecutionPolicy]],
    facts: Mapping[str, Any],
) -> ExecutionEvaluation:
    """Work the split's orders with every policy; learned: by name, then by seed."""
    orders = data.orders[split]
    found = [_judged(policy.name, {0: policy}, data, split) for policy in policies]
    found = [one._replace(seeds={}) for one in found]
    found += [_judged(name, seeds, data, split) for name, seeds in learned.items()]
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
    path = directory / SUMMARY
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: missing or damaged ({error}). Run `echelon execution evaluate` again."
        ) from None
    assert isinstance(tree, dict), "summary.json is not a mapping"
    return tree


def _judged(
    name: str, seeds: Mapping[int, ExecutionPolicy], data: ExecutionData, split: Split
) -> PolicyOrders:
    histories = {
        seed: run_orders(policy, data.days, data.orders[split], data.rules)
        for seed, policy in seeds.items()
    }
    by_seed = {seed: measure_orders(history) for seed, history in histories.items()}
    names = next(iter(by_seed.values()))
    measures = {m: np.mean([found[m] for found in by_seed.values()], axis=0) for m in names}
    paths = [_path(history) for history in histories.values()]
    hourly = _hourly(list(histories.values()))
    return PolicyOrders(name, measures, by_seed, np.asarray(np.mean(paths, axis=0)), hourly)


def _path(history: History) -> Floats:
    """[T] mean share of the order executed in each tick."""
    assert history.ticks is not None, "evaluations record ticks"
    share = history.ticks.executed / history.orders.amount[:, None]
    return np.asarray(share.mean(axis=0))


def _hourly(histories: Sequence[History]) -> dict[int, tuple[float, float]]:
    """By hour of the day: share of what was executed then, and its gain over TWAP."""
    first = histories[0]
    hours = (first.days.clock // 60).astype(int)
    shares = dict.fromkeys(sorted(set(hours.tolist())), 0.0)
    gained = dict.fromkeys(shares, 0.0)
    for history in histories:
        assert history.ticks is not None, "evaluations record ticks"
        share = history.ticks.executed / history.orders.amount[:, None]
        price = np.where(share > 0.0, history.ticks.price, history.benchmarks.twap[:, None])
        apart = (price - history.benchmarks.twap[:, None]) / history.benchmarks.arrival[:, None]
        gain = np.nan_to_num(-history.side[:, None] * apart * 1e4) * share
        for hour in shares:
            at = hours == hour
            shares[hour] += float(share[:, at].sum(axis=1).mean()) / len(histories)
            gained[hour] += float(gain[:, at].sum(axis=1).mean()) / len(histories)
    return {
        hour: (shares[hour], gained[hour] / shares[hour] if shares[hour] > 0.0 else 0.0)
        for hour in shares
    }


def _write_table(frame: pl.DataFrame, path: Path) -> None:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    write_atomic(path, buffer.getvalue())


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
