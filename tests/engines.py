"""Bundles with the store behind them, and the bars that an engine has not seen yet."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from a_shares import import_a_shares
from bundles import tiny_settings, train_prepared, trained_run
from markets import CONFIGS

from echelon.config import load_config
from echelon.data.build import PanelRequest, read_bar_sets
from echelon.data.store import Store
from echelon.data.stream import BarSet
from echelon.envs.world import World, world_of
from echelon.features import Prepared, prepare
from echelon.runs import RunDirectory
from echelon.serving.bundle import Bundle
from echelon.serving.engine import DecisionEngine
from echelon.serving.export import ExportRequest, export_bundle
from echelon.serving.replay import session_rows

_DAYS = (
    "split={train: [2023-04-03, 2023-08-31], valid: [2023-09-01, 2023-10-31], "
    "test: [2023-11-01, 2023-12-29]}",
)
_MINUTES = (
    "split={train: [2023-08-24, 2023-08-25], valid: [2023-08-28, 2023-08-29], "
    "test: [2023-08-30, 2023-08-30]}",
    # Windows are in days: who is masked by one of 30 would be so to the end.
    "risk.drawdown_window=1",
)
_RICH = (
    "features.indicators={sma: [5], ema: [4], rsi: [6], macd: [3, 6, 3], atr: [5], "
    "bbands: [5, 2.0], heikin_ashi: true, supertrend: [5, 3.0]}"
)


class Served(NamedTuple):
    """A run, its bundle, its store and its loaded world up to the end of validation."""

    run: Path
    bundle: Bundle
    store: Path
    world: World

    def rows(self, bars: int) -> range:
        """The last rows of validation, from the first bar of a session on."""
        return session_rows(self.world, self.world.span("valid"), bars)

    def engine(self, bars: int, state: Path | None = None) -> DecisionEngine:
        """An engine that has seen everything before the last `bars` of validation."""
        day = self.world.times[self.rows(bars).start - 1].astype("datetime64[D]").item()
        return DecisionEngine.from_store(self.bundle, self.store, until=day, state=state)

    def bar_sets(self, engine: DecisionEngine, count: int | None = None) -> Iterator[BarSet]:
        """What follows the engine's last bar, up to the end of validation."""
        data, last = self.bundle.config.data, self.world.times[-1]
        until = last.astype("datetime64[D]").item()
        request = PanelRequest(self.bundle.symbols, None, until, data.limits, data.delist_after)
        name = self.bundle.universe["dataset"]["name"]
        sets = read_bar_sets(Store(self.store), name, request, engine.time.item())
        return islice((bars for bars in sets if bars.time <= last), count)


def daily(
    path: Path,
    bars: Path,
    algo: str,
    request: ExportRequest | None = None,
    *overrides: str,
    seeds: tuple[int, ...] = (1,),
) -> Served:
    """US-like daily bars of four stocks."""
    run = trained_run(path / "run", bars, algo, *overrides, seeds=seeds)
    return _export(run, path, request)


def a_share(
    path: Path,
    freq: str,
    algo: str,
    request: ExportRequest | None = None,
    *overrides: str,
    first: date | None = None,
) -> Served:
    """A-shares with splits, suspensions, listings, delistings, limits, lots and T+1.

    first: day of the first bar; overrides: the splits that belong to it
    """
    import_a_shares(path / "store", freq, "raw", first)
    settings = (
        *("data.source=store", "data.dataset=m", "assets=[]", "data.delist_after=20"),
        *_rules(algo),
        *("features.stationary.enabled=true", "features.calendar=true", _RICH),
        *("features.stationary.returns=[1, 3]", "features.stationary.volatility=[5]"),
        *("features.stationary.volume_ratio=[5]", "features.alpha158=[4]"),
        "features.cross_section={method: zscore, of: [CORR4, VWAP0, ret_3]}",
        *(f"data.store={path}/store", f"data.cache.dir={path}/cache"),
        *(_DAYS if freq == "1d" else _MINUTES),
        *tiny_settings(algo),
        *overrides,
    )
    config = load_config(CONFIGS / "qtmrl.yaml", list(settings))
    content = prepare(config, path / "run").prepared.manifest["content_hash"]
    RunDirectory(path / "run").record(config, "prepare", prepared=content)
    return _export(train_prepared(path / "run"), path, request)


def sample(path: Path, algo: str) -> Served:
    """Daily closes of the bundled sample: a year of validation."""
    settings = (
        *("data.source=sample", "assets=[AAPL, JNJ, KO, MSFT, XOM, WMT]", "market.preset=paper"),
        *("features.stationary.enabled=true", f"data.store={path}/store", "train.offset_groups=2"),
        f"data.cache.dir={path}/cache",
        "split={train: [2015-01-02, 2016-12-30], valid: [2017-01-03, 2017-12-29], "
        "test: [2018-01-02, 2018-06-29]}",
        *(setting for setting in tiny_settings(algo) if not setting.startswith("assets")),
    )
    config = load_config(CONFIGS / "demo.yaml", list(settings))
    content = prepare(config, path / "run").prepared.manifest["content_hash"]
    RunDirectory(path / "run").record(config, "prepare", prepared=content)
    return _export(train_prepared(path / "run"), path, None)


def _rules(algo: str) -> tuple[str, ...]:
    return "market.preset=cn", "fee_rate=null", "market.initial_cash=5000000"


def _export(run: Path, path: Path, request: ExportRequest | None) -> Served:
    bundle = export_bundle(run, path / "bundle", request or ExportRequest(seed=1))
    prepared = Prepared.open(run)
    world = world_of(prepared, bundle.config, costs=float(bundle.config.eval.use_fee))
    return Served(run, bundle, bundle.config.data.store, world)


def payload(engine: DecisionEngine, bars: BarSet) -> list[dict[str, object]]:
    """The bars of a set, as a client sends them."""
    names = ("open", "high", "low", "close", "volume", "amount", "factor", "pre_close")
    rows = []
    for n, symbol in enumerate(engine.symbols):
        if np.isnan(bars.close[n]):
            continue
        row: dict[str, object] = {"symbol": symbol}
        for name in names:
            values = getattr(bars, name)
            if values is not None and not np.isnan(values[n]):
                row[name] = float(values[n])
        if bars.st is not None and bars.st[n]:
            row["st"] = True
        rows.append(row)
    return rows
