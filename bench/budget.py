"""The drawdown budget: worst year, whole span, exposure, Sharpe. `python -m bench.budget DATA`

    python -m bench.budget ../shared/data [--budget 0.15] [--target 0.2] [RUN …]

Equal weight, rebalanced every `eval.rebalance_bars`, on 16 US stocks, on 60 A-shares and on the 400
development symbols of the wide universe (`bench.wide`), each over all of its days and under its
market's rules, without and with the budget. RUN: trained runs, whose agents are traded over their
train and validation windows in one go, and the baselines beside them; no test window is read.

Returns 1 where a book with the budget falls by more than 17 % in a calendar year or 25 % in all,
holds less than 0.4 on average, or has a Sharpe ratio that is more than 0.05 lower than without.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from bench.wide import split_symbols
from echelon.backtest.baselines import make_baseline
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.config import Config, load_config, override_config
from echelon.envs.world import World, world_of
from echelon.features import prepare
from echelon.training.executors import with_executor
from echelon.training.run import TrainedRun

US = "[AAPL, MSFT, NVDA, CVX, OXY, AAL, UAL, DAL, CCL, RCL, WYNN, LVS, AXP, BAC, JNJ, GOOGL]"
_CHEAP = (
    *("window=1", "features.ohlcv=true", "features.indicators={}", "market.preset_confirmed=true"),
    "eval.baselines=[equal_weight]",
)
MOST_YEAR, MOST_ALL, LEAST_EXPOSURE, LEAST_GAIN = 0.17, 0.25, 0.4, -0.05


class Case(NamedTuple):
    """A policy in a world; make: a fresh one each time."""

    name: str
    make: Callable[[], Policy]
    world: World
    span: range
    config: Config


def universes(data: Path, scratch: Path) -> Iterator[Case]:
    """Equal weight on the three universes, over all of their days."""
    wide = pl.read_parquet(data / "cn_wide_2010_2020.parquet")
    names = split_symbols(wide["symbol"].to_list())[0]
    wide.filter(pl.col("symbol").is_in(names)).write_parquet(scratch / "wide.parquet")
    settings = {
        "us": (data / "us_daily_2000_2018.parquet", f"assets={US}", "market.preset=us", 2000, 2018),
        "cn_daily": (
            data / "cn_daily_2010_2020.parquet",
            "assets=[]",
            "market.preset=cn",
            2010,
            2020,
        ),
        "cn_wide": (scratch / "wide.parquet", "assets=[]", "market.preset=cn", 2010, 2020),
    }
    for name, (path, assets, preset, first, last) in settings.items():
        split = (
            f"split={{train: [{first}-01-01, {first}-01-08], valid: [{first}-01-09, {last}-12-20], "
            f"test: [{last}-12-21, {last}-12-31]}}"
        )
        place = (f"data.store={scratch}/store", f"data.cache.dir={scratch}/cache")
        source = ("data.source=parquet", f"data.path={path}", "market.initial_cash=10000000")
        config = load_config(None, [*_CHEAP, *source, *place, assets, preset, split])
        world = world_of(prepare(config, scratch / name).prepared, config)
        span = range(world.span("train").start, world.span("valid").stop)
        yield Case(
            f"{name} equal weight",
            lambda c=config: make_baseline("equal_weight", c),
            world,
            span,
            config,
        )


def trained(path: Path) -> Iterator[Case]:
    """The agents of a run and its equal weight, over train and validation."""
    run = TrainedRun.open(path)
    config = run.config
    world = with_executor(world_of(run.prepared, config), config, costs=1.0)
    span = range(world.span("train").start, world.span("valid").stop)
    yield Case(
        f"{path.name} equal weight",
        lambda: make_baseline("equal_weight", config),
        world,
        span,
        config,
    )
    for seed in run.seeds:
        yield Case(f"{path.name} seed {seed}", lambda s=seed: run.policy(s), world, span, config)


def main(argv: Sequence[str] = ()) -> int:
    """Print the table; 1: a bar is missed."""
    parser = argparse.ArgumentParser(prog="bench.budget", description=__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=Path("../shared/data"))
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--budget", type=float, default=0.15)
    parser.add_argument("--target", type=float, help="volatility a year")
    parser.add_argument("--runs-only", action="store_true", help="leave equal weight out")
    given = parser.parse_args(argv)
    limits = [f"risk.max_drawdown={given.budget}"]
    limits += [] if given.target is None else [f"risk.target_volatility={given.target}"]
    missed = 0
    head = ("year", "all", "exposure", "Sharpe", "return", "turnover", "jumps")
    print(f"{'':34}" + "".join(f"{name:>10}" for name in head))
    with tempfile.TemporaryDirectory() as scratch:
        if not given.data.is_dir():
            parser.error(f"{given.data}: no such directory; name the one with the bars")
        cases = [] if given.runs_only else list(universes(given.data, Path(scratch)))
        for case in [*cases, *(case for path in given.runs for case in trained(path))]:
            plain = run_backtest(case.make(), case.world, case.span, case.config)
            config = override_config(case.config, limits)
            limited = run_backtest(case.make(), case.world, case.span, config)
            show(case.name, plain)
            show(f"{case.name}, budget", limited)
            missed += not _kept(plain, limited)
    print(f"{missed} books miss a bar")
    return int(missed > 0)


def show(name: str, backtest: Backtest) -> None:
    m = backtest.measures
    shares = (m["max_drawdown_year"], m["max_drawdown"], m["exposure"])
    print(
        f"{name:34}"
        + "".join(f"{share:10.1%}" for share in shares)
        + f"{m['sharpe_annual']:10.2f}{m['annual_return']:10.1%}{m['turnover_annual']:10.1f}"
        + f"{m['budget_jumps']:10.0f}",
        flush=True,
    )


def _kept(plain: Backtest, limited: Backtest) -> bool:
    a, b = plain.measures, limited.measures
    falls = b["max_drawdown_year"] <= MOST_YEAR and b["max_drawdown"] <= MOST_ALL
    held = b["exposure"] >= LEAST_EXPOSURE
    return falls and held and b["sharpe_annual"] - a["sharpe_annual"] >= LEAST_GAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
