"""The forecaster by itself, walk-forward: rank IC, and what it earns over equal weight.

    python -m bench.forecast configs/wide.yaml -o data.path=development.parquet [-o key=value …]

Every fold of the configuration is prepared, fitted on its train window, chosen on its validation
window and traded on its test window, as `echelon walk-forward` does with the agents beside it;
each look at a test window is written down below the directory of the folds (`--dir`).

Traded as configured, and in a single tranche. Printed by fold, for all, and for the later half:
mean daily rank IC, ICIR, Sharpe ratios, information ratio over equal weight, net of costs; of many
folds with a 95 % interval by circular blocks of 20 and of 60 days.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from echelon.backtest.baselines import make_baseline
from echelon.backtest.forecaster import Forecaster, ensure_forecaster, fit_forecaster
from echelon.backtest.run import run_backtest
from echelon.config import Config, load_config
from echelon.config.load import fingerprint
from echelon.envs.targets import forward_returns
from echelon.envs.world import World, world_of
from echelon.evaluation.folds import Fold
from echelon.evaluation.walkforward import plan_walk
from echelon.features import Prepared, prepare
from echelon.ops.measures import sharpe_annual
from echelon.ops.ranks import rank_ic
from echelon.rng import stream
from echelon.runs.registry import TrialRegistry, new_entry, window_of
from echelon.types import Floats

BLOCKS = (20, 60)
DRAWS = 2_000


class Traded(NamedTuple):
    """A fold, or all of them one after another: ic[T], and returns[T] of each."""

    ic: Floats
    staggered: Floats
    single: Floats
    equal_weight: Floats
    turnover: float
    year: float  # bars

    def line(self, name: str) -> str:
        active, alone = self.staggered - self.equal_weight, self.single - self.equal_weight
        known = self.ic[np.isfinite(self.ic)]
        ratios = (
            sharpe_annual(r, self.year) for r in (self.staggered, self.equal_weight, active, alone)
        )
        numbers = (known.mean(), known.std(ddof=1), *ratios)
        mean, deviation, own, usual, staggered, single = numbers
        return (
            f"{name:>9}  IC {mean:6.4f}  ICIR {mean / deviation:5.2f}  Sharpe {own:5.2f} "
            f"(equal weight {usual:5.2f})  IR {staggered:5.2f}, one tranche {single:5.2f}  "
            f"turnover {self.turnover:4.1f}×"
        )


def open_world(prepared: Prepared, config: Config, directory: Path) -> World:
    """With the test window, the look at which is written down."""
    split = prepared.splits["test"]
    window = window_of(prepared.manifest["dataset"], split.first, split.last)
    registry = TrialRegistry(directory / "registry")
    read = registry.begin_read(new_entry(window, directory, fingerprint(config), 0))
    return world_of(prepared, config, read=read)


def trade_fold(config: Config, fold: Fold, directory: Path) -> Traded:
    config = config.model_copy(update={"split": fold.split, "assets": fold.assets})
    began, home = time.perf_counter(), directory / fold.name
    prepared = prepare(config, home).prepared
    content = str(prepared.manifest["content_hash"])
    sealed = world_of(prepared, config)
    made = ensure_forecaster(config, sealed, home, data=content)
    alone = config.forecast.model_copy(update={"tranches": 1})
    single = fit_forecaster(config.model_copy(update={"forecast": alone}), sealed)
    assert made is not None
    assert single is not None
    seconds = time.perf_counter() - began
    world = open_world(prepared, config, directory)
    span = world.span("test")

    def trade(forecaster: Forecaster | None) -> tuple[Floats, float]:
        usual = make_baseline("equal_weight", config)
        policy = usual if forecaster is None else forecaster.policy()
        done = run_backtest(policy, world, span, config)
        return done.returns, float(done.traded.mean() * world.periods_per_year)

    scores = np.stack([made.row_scores.at(world, row) for row in span])
    ic = rank_ic(scores, forward_returns(world, span, made.rule.horizon))
    (staggered, turnover), (one, _), (usual, _) = trade(made), trade(single), trade(None)
    traded = Traded(ic, staggered, one, usual, turnover, world.periods_per_year)
    print(
        f"{traded.line(fold.name)}  top {made.rule.top}, buffer {made.rule.buffer:g}; one tranche "
        f"{single.rule.top}, {single.rule.buffer:g}  ({world.n_assets} assets, "
        f"{made.facts['cells']:,} cells, {seconds:.0f} s to prepare and fit both)",
        flush=True,
    )
    return traded


def ratio_interval(active: Floats, block: int, year: float) -> tuple[float, float]:
    """95 % of the annual information ratio of active[T], by circular blocks."""
    rng, n = stream(0, "bench forecast", block), len(active)
    starts = rng.integers(0, n, size=(DRAWS, -(-n // block)))
    rows = ((starts[:, :, None] + np.arange(block)) % n).reshape(DRAWS, -1)[:, :n]
    drawn = active[rows]
    ratios = drawn.mean(axis=1) / drawn.std(axis=1, ddof=1) * np.sqrt(year)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def summarise(name: str, folds: Sequence[Traded]) -> None:
    """Folds one after another, with intervals."""
    parts = list(zip(*folds, strict=True))
    series, year = [np.concatenate(part) for part in parts[:4]], folds[0].year
    whole = Traded(*series, turnover=float(np.mean(parts[4])), year=year)
    print(whole.line(name))
    for what, returns in (("tranches", whole.staggered), ("one tranche", whole.single)):
        active = returns - whole.equal_weight
        bounds = (ratio_interval(active, block, year) for block in BLOCKS)
        shown = ", ".join(f"{low:.2f} to {high:.2f}" for low, high in bounds)
        print(f"           IR of {what}: {sharpe_annual(active, year):.2f} ({shown})")


def main(argv: Sequence[str] = ()) -> int:
    if not argv:
        print("needs data: python -m bench.forecast CONFIG [-o key=value …]")
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    parser.add_argument("--dir", type=Path, default=Path("runs/forecast"))
    given = parser.parse_args(argv)
    config = load_config(given.config, given.overrides)
    planned = plan_walk(config)
    folds = [trade_fold(config, fold, given.dir) for fold in planned]
    half = len(folds) // 2
    summarise("all", folds)
    summarise(f"{planned[half].name} on", folds[half:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
