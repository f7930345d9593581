"""Golden backtests: fixed data, seed and policies, and every trade and value they came to.

They go through the whole line (bars, store, features, scaler, policy, act, kernel), so that no
change anywhere in it moves a result unnoticed. Where a change is meant to move them:

    .venv/bin/python tests/golden.py        writes tests/golden/ anew

and the changelog says what moved and why.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import polars as pl
import torch
from markets import write_qtmrl_parquet
from worlds import prepared_run

from echelon.agents.a2c import ActorPolicy
from echelon.backtest.baselines import make_baseline
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.config import Config, load_config
from echelon.envs import world_of
from echelon.features import Prepared
from echelon.models.actor_critic import ActorCritic

HERE = Path(__file__).parent / "golden"
ASSETS = "assets=[AAPL, CVX, DAL, LVS, JNJ, GOOGL]"


class Case(NamedTuple):
    """A policy under some rules."""

    policy: str
    overrides: tuple[str, ...]


CASES: Mapping[str, Case] = {
    "momentum-paper": Case("momentum", ()),
    "momentum-us": Case("momentum", ("market.preset=us", "fee_rate=null")),
    "equal-weight-cn": Case(
        "equal_weight",
        (
            *("market.preset=cn", "market.preset_confirmed=true"),
            *("fee_rate=null", "eval.rebalance_bars=10"),
        ),
    ),
    "equal-weight-hierarchical": Case(
        "equal_weight", ("market.preset=hierarchical", "fee_rate=null", "eval.rebalance_bars=20")
    ),
    "random-same-close": Case("random", ("market.fill=close", "buy_pct=0.1", "sell_pct=0.3")),
    "agent-paper": Case("agent", ("model.d_model=8", "model.n_layers=1", "model.hidden=8")),
}


def agent(config: Config, n_features: int) -> Policy:
    """An untrained network: its weights follow from the seed alone."""
    torch.manual_seed(7)
    return ActorPolicy(ActorCritic(config, n_features), config, 7)


def backtests(directory: Path, bars: Path) -> dict[str, Backtest]:
    """Every case, run anew."""
    done = {}
    for name, case in CASES.items():
        run = prepared_run(directory / name, bars, ASSETS, "seed=5", *case.overrides)
        prepared, config = Prepared.open(run), load_config(run / "config.yaml")
        world = world_of(prepared, config)
        make: Callable[[], Policy] = (
            (lambda c=config, p=prepared: agent(c, len(p.names)))
            if case.policy == "agent"
            else (lambda c=config, n=case.policy: make_baseline(n, c))
        )
        done[name] = run_backtest(make(), world, world.span("valid"), config)
    return done


def read(name: str) -> tuple[pl.DataFrame, list[float]]:
    """(trades, values) as they were written down."""
    trades = pl.read_csv(HERE / f"{name}.csv", try_parse_dates=True)
    values = json.loads((HERE / "values.json").read_text())[name]
    return trades, values


def write(found: Mapping[str, Backtest]) -> None:
    """Write down every trade and value."""
    HERE.mkdir(exist_ok=True)
    for name, backtest in found.items():
        backtest.blotter().write_csv(HERE / f"{name}.csv")
    values = {name: backtest.value.tolist() for name, backtest in found.items()}
    (HERE / "values.json").write_text(json.dumps(values, indent=0) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write(backtests(place, write_qtmrl_parquet(place / "bars.parquet")))
