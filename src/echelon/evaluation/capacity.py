"""Capacity: the same policy with more money, and how much of the market it then is.

What is traded (the ensemble of the seeds, or the only seed) and equal weight trade the window again
with ten times the cash, under the same rules: an order may be cut by the volume cap, pays slippage
by its share of the volume where the rules say so, and is less often rounded away by lots. A line of
trust.json, one per multiple of the cash:

    factor, cash            multiple, and the money itself
    sharpe_annual, information_ratio, cost_share    costs: of the first value, over the window
    orders, cut             orders, and the share of them that was not filled, or not whole
    participation_mean, _95 of filled orders, shares over the volume of the bar that filled them:
                            mean and 95th percentile

Volume counts after the fact here; the cap and slippage of fills at the open go by what was known
before it (`market.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from echelon.backtest.baselines import make_baseline
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.config import Config
from echelon.envs.world import World
from echelon.files import finite_values
from echelon.types import Floats

CASH_FACTORS = (1.0, 10.0)


def capacity_sweep(
    policy: Policy,
    world: World,
    span: range,
    config: Config,
    *,
    usual: Backtest | None = None,
    yardstick: str = "equal_weight",
    past: tuple[Floats | None, Floats | None] = (None, None),
) -> list[dict[str, Any]]:
    """A line per multiple of the cash; none where the market has no volume.

    usual: the policy with the configured cash, measured against the yardstick, if known
    past: of the policy's book and of the yardstick's, see `backtest.budget.under_budget`
    """
    if not np.isfinite(world.rows.volume_close).any():
        return []
    lines = []
    for factor in CASH_FACTORS:
        cash = factor * world.initial_cash
        done = usual if factor == 1.0 else None
        if done is None:
            richer = replace(world, initial_cash=cash)
            rule = make_baseline(yardstick, config)
            other = run_backtest(rule, richer, span, config, past=past[1])
            done = run_backtest(policy, richer, span, config, past=past[0]).against(other)
        lines.append({"factor": factor, "cash": cash, **capacity_line(done, world, span)})
    return lines


def capacity_line(backtest: Backtest, world: World, span: range) -> dict[str, Any]:
    """Measures of a backtest over `span`, and how much of the volume its orders were."""
    fills = backtest.fills
    shares = participation(backtest, world, span)
    orders = int(((fills.shares != 0.0) | (fills.reason != 0)).sum())
    names = ("sharpe_annual", "information_ratio", "cost_share")
    line = {
        **{name: backtest.measures[name] for name in names},
        "cut": float((fills.reason != 0).sum()) / orders if orders else np.nan,
        "participation_mean": float(shares.mean()) if len(shares) else np.nan,
        "participation_95": float(np.quantile(shares, 0.95)) if len(shares) else np.nan,
    }
    return {"orders": orders, **finite_values(line)}


def participation(backtest: Backtest, world: World, span: range) -> Floats:
    """[fills] shares of each fill over the volume of its bar, where that is known."""
    traded = np.abs(backtest.fills.shares)
    first = span.start + int(world.fill_open)
    volume = world.rows.volume_close[first : first + len(traded)]
    known = (traded > 0.0) & np.isfinite(volume) & (volume > 0.0)
    return traded[known] / volume[known]


def mean_capacity(sweeps: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """At each multiple of the cash, the means over folds, and the sum of their orders.

    Empty where a fold has no sweep; a number that a fold lacks is None.
    """
    if not sweeps or not all(sweeps):
        return []
    lines = []
    for folds in zip(*sweeps, strict=True):
        line: dict[str, Any] = {name: folds[0][name] for name in ("factor", "cash")}
        line["orders"] = sum(fold["orders"] for fold in folds)
        for name in (n for n in folds[0] if n not in line):
            values = [fold[name] for fold in folds]
            line[name] = None if None in values else float(np.mean(values))
        lines.append(line)
    return lines
