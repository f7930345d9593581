"""A market with planted momentum, and the best any filter of past returns can do in it.

Each of N assets has a hidden sign that flips with a small probability at every bar. The sign at
bar t gives the log return from t to t + 1 its drift; the rest is noise. A share of both falls
between the close and the next open, so that fills at the open pay for what happened overnight.

The reference is the Bayes filter: the exact probability of the hidden sign given all returns so
far, bought above one half and sold below, under the same 20/50 rule, costs and clock.

    sign s_t,   r_{t+1} = drift · s_t + noise · ε,   P(s_{t+1} ≠ s_t) = flip
    p_t = P(s_t = 1 | r_1..t):   odds ← odds · exp(2 · drift · r_t / noise²), then the flip
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.baselines import only_allowed
from echelon.config import Config
from echelon.data.panel import Panel
from echelon.envs.act import Action, Holdings, Kind, Rows
from echelon.envs.world import World
from echelon.features.engine import Plan, compute
from echelon.features.prepare import Layout, fit_scaler
from echelon.features.registry import select
from echelon.features.scaler import Scaler
from echelon.market import PriceHistory, market_rows, resolve_rules
from echelon.rng import stream
from echelon.types import Bools, Floats

_FIRST_DAY = np.datetime64("2000-01-03", "us")
_DAY = np.timedelta64(1, "D")


@dataclass(frozen=True)
class PlantedMarket:
    """Numbers of the market.

    overnight: share of a bar's drift and variance that falls between close and open
    """

    n_assets: int = 8
    n_bars: int = 6000
    drift: float = 0.003
    noise: float = 0.012
    flip: float = 0.015
    overnight: float = 0.2

    def draw(self, seed: int, name: str) -> Draw:
        """One history of the market; `name` tells train, validation and test draws apart."""
        chance = stream(seed, "planted", name)
        shape = (self.n_bars, self.n_assets)
        flips = chance.random(shape) < self.flip
        flips[0] = chance.random(self.n_assets) < 0.5
        sign = np.where(np.cumsum(flips, axis=0) % 2 == 0, 1.0, -1.0)
        drift = np.zeros(shape)
        drift[1:] = self.drift * sign[:-1]
        night, day = self.overnight, 1.0 - self.overnight
        gap = night * drift + np.sqrt(night) * self.noise * chance.standard_normal(shape)
        session = day * drift + np.sqrt(day) * self.noise * chance.standard_normal(shape)
        gap[0] = session[0] = 0.0
        close = 100.0 * np.exp(np.cumsum(gap + session, axis=0))
        return Draw(sign, close * np.exp(-session), close)

    def filtered(self, close: Floats) -> Floats:
        """[T,N] probability that the sign is +1, given the closes up to and including each row."""
        returns = np.diff(np.log(close), axis=0)
        probability = np.full(close.shape, 0.5)
        belief = np.full(close.shape[1], 0.5)
        for t, r in enumerate(returns, start=1):
            odds = belief / (1.0 - belief) * np.exp(2.0 * self.drift * r / self.noise**2)
            belief = odds / (1.0 + odds)
            belief = belief * (1.0 - self.flip) + (1.0 - belief) * self.flip
            probability[t] = belief
        return probability


class Draw(NamedTuple):
    """One history: sign, open, close, each [T,N]."""

    sign: Floats
    open: Floats
    close: Floats


class BayesFilter:
    """BUY where the sign is more likely up, SELL elsewhere."""

    kind: Kind = "discrete"
    name = "bayes"

    def __init__(self, market: PlantedMarket) -> None:
        self._market = market

    def start(self, world: World, span: range) -> None:
        """Run the filter over the closes of each draw; row t of it knows those up to t."""
        close = world.rows.close
        draws = np.split(close, range(self._market.n_bars, len(close), self._market.n_bars))
        self._probability = np.concatenate([self._market.filtered(draw) for draw in draws])

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        """Follow the filter."""
        wish = np.where(self._probability[row] > 0.5, Action.BUY, Action.SELL)
        return only_allowed(wish, held)


def planted_worlds(draws: Sequence[Draw], config: Config) -> list[World]:
    """Worlds of draws, features by the configuration, all scaled as the first one's train window.

    Every split of a world is its whole draw: draws, not windows, keep train and test apart.
    """
    scaler: Scaler | None = None
    worlds = []
    for draw in draws:
        panel = _panel(draw)
        x, present, scaler = _features(panel, config, scaler)
        resolved = resolve_rules(config, discrete=False)
        history = PriceHistory(
            times=panel.times,
            symbols=panel.symbols,
            price_basis="adjusted",
            close=panel.close,
            tradable=panel.tradable,
            delisted=panel.delisted,
            open=panel.open,
        )
        whole = range(int(np.flatnonzero(present.all(axis=1))[0]), len(x))
        worlds.append(
            World(
                rows=market_rows(history, lots=False, stamp_duty=False),
                rules=resolved.rules,
                x=x,
                present=present,
                member=panel.member,
                growth=panel.close,
                times=panel.times,
                symbols=panel.symbols,
                splits={"train": whole, "valid": whole, "test": whole},
                window=config.window,
                fill_open=config.market.fill == "open",
                initial_cash=config.market.initial_cash,
                periods_per_year=252.0,
                benchmark=None,
                ledger={"fill": config.market.fill, "prices": "adjusted", "preset": "paper"},
            )
        )
    return worlds


def joined(worlds: Sequence[World]) -> tuple[World, Rows]:
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
    return replace(first, rows=rows, splits=splits, **arrays), starts.astype(np.int64)


def _panel(draw: Draw) -> Panel:
    n_bars, n_assets = draw.close.shape
    yes = np.ones(draw.close.shape, dtype=bool)
    return Panel(
        times=_FIRST_DAY + np.arange(n_bars) * _DAY,
        symbols=tuple(f"P{n}" for n in range(n_assets)),
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
) -> tuple[NDArray[np.float32], Bools, Scaler]:
    plan = Plan.of(select(config.features, panel.fields).specs)
    everything = range(panel.shape[0])
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "X.npy"
        present, moments = compute(panel, plan, path, train=everything)
        raw = np.load(path, allow_pickle=False)
    if scaler is None:
        scaler = fit_scaler(config, plan, moments, panel, Layout(0, {"train": everything}))
    x = scaler.transform(raw)
    x[~present] = 0.0
    return x, present, scaler
