"""Worlds of drawn histories, in which books trade as they do in prepared ones.

Every split of such a world is its whole draw: draws, not windows, keep train and test apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.signal import lfilter

from echelon.config import Config
from echelon.data.panel import Panel
from echelon.envs.world import World
from echelon.features.engine import FeaturePlan, compute
from echelon.features.prepare import SplitLayout, fit_scaler
from echelon.features.registry import select
from echelon.features.scaler import Scaler
from echelon.files import scratch_directory
from echelon.market import PriceHistory, Rows, drawn_market, market_rows
from echelon.types import Bools, Floats, Floats32, Times

_FIRST_DAY = np.datetime64("2000-01-03", "us")
_DAY = np.timedelta64(1, "D")


class Draw(NamedTuple):
    """One history: hidden state at each bar, open, close, each [T,N]."""

    hidden: Floats
    open: Floats
    close: Floats


def _days(n_bars: int) -> Times:
    """[T] dates of a draw's bars."""
    return np.asarray(_FIRST_DAY + np.arange(n_bars) * _DAY)


def _names(n_assets: int) -> tuple[str, ...]:
    """[N] symbols of a draw's assets."""
    return tuple(f"P{n}" for n in range(n_assets))


def autoregressive(first: Floats, shocks: Floats, persistence: float) -> Floats:
    """[T,N]: `first`[N], then persistence · the row before + shocks[T,N] of the row."""
    driven = np.vstack([first, shocks[1:]])
    return np.asarray(lfilter([1.0], [1.0, -persistence], driven, axis=0))


def planted_worlds(draws: Sequence[Draw], config: Config) -> list[World]:
    """Worlds of draws, features by the configuration, all scaled as the first one's train window.

    Every split of a world is its whole draw: draws, not windows, keep train and test apart.
    """
    scaler: Scaler | None = None
    worlds = []
    for draw in draws:
        x, present, scaler = _features(_panel(draw), config, scaler)
        worlds.append(drawn_world(draw.open, draw.close, x, present, config))
    return worlds


def drawn_world(open_: Floats, close: Floats, x: Floats32, present: Bools, config: Config) -> World:
    """The world of one draw under the configuration's rules: no lots, no stamp duty.

    open_, close[T,N]: prices; x[T,N,F]: features as the agent sees them; present[T,N]: has them
    """
    times, symbols = _days(len(close)), _names(close.shape[1])
    yes = np.ones(close.shape, dtype=bool)
    history = PriceHistory(
        times=times,
        symbols=symbols,
        price_basis="adjusted",
        close=close,
        tradable=yes,
        delisted=~yes,
        open=open_,
    )
    whole = range(int(np.flatnonzero(present.all(axis=1))[0]), len(x))
    in_force = drawn_market(config)
    return World(
        rows=market_rows(history, lots=False, stamp_duty=False),
        rules=in_force.resolved.rules,
        x=x,
        present=present,
        member=yes,
        growth=close,
        times=times,
        symbols=symbols,
        splits={"train": whole, "valid": whole, "test": whole},
        window=config.window,
        fill_open=config.market.fill == "open",
        initial_cash=config.market.initial_cash,
        periods_per_year=252.0,
        benchmark=None,
        ledger={"fill": config.market.fill, "prices": "adjusted", "preset": in_force.preset},
        in_force=in_force,
    )


def join_worlds(worlds: Sequence[World]) -> tuple[World, Rows]:
    """(one world of all the draws' rows one after the other, first row to decide at of each).

    Books can then trade all draws at once, one book in each. A book must not be stepped past the
    end of its draw.
    """
    first = worlds[0]
    per_row = {
        name: np.concatenate([getattr(world.rows, name) for world in worlds])
        for name in first.rows._fields
        if len(getattr(first.rows, name)) == len(first.times)
    }
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(world, name) for world in worlds])
        for name in ("x", "present", "member", "growth", "times")
    }
    lengths = np.array([len(world.times) for world in worlds])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    starts = starts + np.array([world.span("test").start for world in worlds])
    whole = range(0, int(lengths.sum()))
    splits = {"train": whole, "valid": whole, "test": whole}
    rows = first.rows._replace(**per_row)
    ends = np.cumsum(lengths)
    pieces = tuple(range(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True))
    whole_world = replace(
        first, rows=rows, splits=splits, stretches=dict.fromkeys(splits, pieces), **arrays
    )
    return whole_world, starts.astype(np.int64)


def single_world(worlds: Sequence[World]) -> World:
    """One world of several, or the one there is."""
    return worlds[0] if len(worlds) == 1 else join_worlds(worlds)[0]


def _panel(draw: Draw) -> Panel:
    n_bars, n_assets = draw.close.shape
    yes = np.ones(draw.close.shape, dtype=bool)
    return Panel(
        times=_days(n_bars),
        symbols=_names(n_assets),
        close=draw.close,
        present=yes,
        member=yes,
        suspended=~yes,
        tradable=yes,
        delisted=~yes,
        anchor=draw.close[0],
        freq="1d",
        calendar="data",
        timezone="UTC",
        price_basis="adjusted",
        open=draw.open,
    )


def _features(
    panel: Panel, config: Config, scaler: Scaler | None
) -> tuple[Floats32, Bools, Scaler]:
    plan = FeaturePlan.from_specs(select(config.features, panel.fields).specs)
    everything = range(panel.shape[0])
    with scratch_directory("worlds") as scratch:
        path = scratch / "X.npy"
        present, moments = compute(panel, plan, path, train=everything)
        raw = np.load(path, allow_pickle=False)
    if scaler is None:
        scaler = fit_scaler(config, plan, moments, panel, SplitLayout(0, {"train": everything}))
    x = scaler.transform(raw)
    x[~present] = 0.0
    return x, present, scaler
