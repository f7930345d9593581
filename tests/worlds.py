"""Small worlds for tests, made from arrays: no files, no features to compute.

`make_world` gives a random walk in which everything may be traded, and takes changes to any part
of it: prices and masks, the market's rows, the rules, the world. What a test is about stands in
its own call:

    make_world(close=[[10.0], [11.0], [12.0]])          these prices
    make_world(commission=0.001, t_plus_one=True)       these rules
    make_world(tradable=mask, new_session=starts)       these rows
    make_world(window=3, splits={"train": range(0, 9)}) this world
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from markets import qtmrl_config
from numpy.typing import ArrayLike

from echelon.config import Config, load_config
from echelon.envs.world import World
from echelon.features import prepare
from echelon.features.prepared import content_hash, facts_hash, file_hashes
from echelon.files import write_json
from echelon.market import CostSplit, MarketRows, PriceHistory, Rules, market_rows
from echelon.runs import RunDirectory

FREE = Rules(
    commission=0.0,
    min_commission=0.0,
    slippage_model=0,
    slippage=0.0,
    participation=np.inf,
    t_plus_one=False,
    price_limits=False,
    spend_proceeds=True,
    in_order=False,
    min_value=0.0,
)
"""Rules under which trading costs nothing and nothing is forbidden."""
PAPER_FEE = 0.0005
_WORLD = frozenset(field.name for field in fields(World)) - {"rows", "rules"}
_DTYPES = {"tradable": bool, "gone": bool, "new_session": bool}


def make_config(*overrides: str) -> Config:
    """The default configuration under the design note's rules, with `a.b=value` changes."""
    return load_config(None, ["market.preset=paper", *overrides])


def make_world(
    *,
    n_rows: int = 60,
    n_assets: int = 3,
    n_features: int = 2,
    seed: int = 0,
    close: ArrayLike | None = None,
    open: ArrayLike | None = None,  # noqa: A002 (the field's name)
    **changes: Any,
) -> World:
    """A world of T rows, N assets and F features; sizes follow from `close`[T,N] where it is given.

    open[T,N]: a little off the close before, by default; the close itself where `close` is given
    changes: any field of `MarketRows`, `Rules` (5 bp a side by default) or `World`; lists will do
    """
    rng = np.random.default_rng(seed)
    if close is None:
        closes = 20.0 * np.exp(np.cumsum(rng.normal(0.0, 0.015, (n_rows, n_assets)), axis=0))
        gap = np.exp(rng.normal(0.0, 0.004, closes.shape))
        opens = np.concatenate([closes[:1], closes[:-1]]) * gap
    else:
        closes = np.asarray(close, dtype=np.float64)
        opens = closes.copy()
    if open is not None:
        opens = np.asarray(open, dtype=np.float64)
    n_rows, n_assets = closes.shape
    world = {k: v for k, v in changes.items() if k in _WORLD}
    rules = {k: v for k, v in changes.items() if k in Rules._fields}
    rows = {k: v for k, v in changes.items() if k in MarketRows._fields}
    unknown = changes.keys() - world.keys() - rules.keys() - rows.keys()
    assert not unknown, f"no part of a world is called {sorted(unknown)}"
    given = {k: np.asarray(v, dtype=_DTYPES.get(k, np.float64)) for k, v in rows.items()}
    times = np.asarray(
        world.get("times", np.datetime64("2020-01-01", "us") + np.arange(n_rows) * 86_400_000_000)
    )
    symbols = tuple(f"S{n}" for n in range(n_assets))
    everywhere = np.ones(closes.shape, dtype=bool)
    parts: dict[str, Any] = {
        "rows": _plain_rows(opens, closes, times, symbols)._replace(**given),
        "rules": (FREE._replace(commission=PAPER_FEE))._replace(**rules),
        "x": rng.standard_normal((n_rows, n_assets, n_features)).astype(np.float32),
        "present": everywhere,
        "member": everywhere.copy(),
        "growth": closes,
        "times": times,
        "symbols": symbols,
        "splits": _splits(n_rows),
        "window": min(4, n_rows - 1),
        "fill_open": True,
        "initial_cash": 1_000_000.0,
        "periods_per_year": 252.0,
        "benchmark": 100.0 * closes.mean(axis=1) / closes[0].mean(),
        "ledger": {"fill": "the next bar's open", "prices": "adjusted", "preset": "paper"},
    }
    for name in ("present", "member"):
        if name in world:
            world[name] = np.asarray(world[name], dtype=bool)
    return World(**(parts | world))


def at(*rows: int) -> np.ndarray:
    """Row numbers as books take them."""
    return np.array(rows, dtype=np.int64)


def basis_points(split: CostSplit) -> dict[str, float]:
    """Every cost over the value it is of; NaN where nothing was filled."""
    all_, some = split.arrived or np.nan, split.benchmarked or np.nan
    parts = {name: getattr(split, name) / all_ for name in CostSplit._fields[:5]}
    parts |= {name: getattr(split, name) / some for name in ("against_twap", "against_vwap")}
    return {name: float(value * 1e4) for name, value in parts.items()}


def _plain_rows(
    opens: np.ndarray, closes: np.ndarray, times: np.ndarray, symbols: tuple[str, ...]
) -> MarketRows:
    """Rows in which everything may be traded in any amount."""
    history = PriceHistory(
        times=times,
        symbols=symbols,
        price_basis="adjusted",
        close=closes,
        open=opens,
        tradable=np.ones(closes.shape, dtype=bool),
        delisted=np.zeros(closes.shape, dtype=bool),
    )
    return market_rows(history, lots=False, stamp_duty=False)


def _splits(n_rows: int) -> dict[str, range]:
    """60 % of the rows to train on, 20 % each to validate and to test."""
    first, second = int(n_rows * 0.6), int(n_rows * 0.8)
    return {"train": range(first), "valid": range(first, second), "test": range(second, n_rows)}


def prepared_run(directory: Path, bars: Path, *overrides: str) -> Path:
    """A run directory as `echelon prepare` leaves it, of few features of the stocks in `bars`."""
    few = (
        "features.indicators={rsi: [14]}",
        "features.stationary.enabled=false",
        "window=5",
        *overrides,
    )
    config = qtmrl_config(directory, bars, *few)
    content = prepare(config, directory).prepared.manifest["content_hash"]
    RunDirectory(directory).record(config, "prepare", prepared=content)
    return directory


def reseal(run: Path, *, record: bool = True, **changes: Any) -> None:
    """Make a changed prepared set fit its own manifest again, as one who forges it would.

    changes: to the manifest; record: in run.json too
    """
    prepared = run / "prepared"
    tree = json.loads((prepared / "manifest.json").read_text(encoding="utf-8")) | changes
    tree["files"] = file_hashes(prepared)
    tree["content_hash"] = content_hash(tree["files"])
    write_json(prepared / "manifest.json", tree | {"facts_hash": facts_hash(tree)})
    if record:
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
        write_json(run / "run.json", facts | {"prepared": tree["content_hash"]})
