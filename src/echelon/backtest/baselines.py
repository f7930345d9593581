"""Baselines: what an agent must beat, run by the same function on the same market.

    benchmark      the index, bought on the first bar without costs
    buy_and_hold   equal amounts of what can be bought on the first bar, never touched again; what
                   is more than the volume cap lets through is bought on the bars that follow
    equal_weight   the same share of every member, again every `eval.rebalance_bars`
    min_variance   least variance over the last `eval.estimation_bars` (skfolio), long only
    hrp            hierarchical risk parity on the same returns (skfolio)
    momentum       BUY what rose over `eval.momentum_bars`, SELL the rest, under the 20/50 rule
    forecast       the best by boosted trees or a ridge, in staggered tranches (`forecaster`)
    random         BUY, SELL or HOLD by lot among what is allowed
    cash           nothing

Those that estimate see returns up to the row they decide at, and no later.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.files import Book
from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.config import Config
from echelon.envs.act import Action, ActionKind, Holdings
from echelon.envs.world import World, index_world
from echelon.errors import UsageError
from echelon.market import Rows
from echelon.market.rows import next_volume
from echelon.rng import pack_stream, stream, unpack_stream
from echelon.states import State, copy_state, match_state, with_prefix
from echelon.types import Bools, Floats

if TYPE_CHECKING:
    from echelon.backtest.forecaster import Forecaster

log = logging.getLogger(__name__)

FORECAST = "forecast"

_BOUGHT = 0.99
"""An asset that has this share of its target weight is bought, and so is a book without cash."""
_LEAST_HISTORY = 60
"""Bars an asset needs behind it before a covariance is estimated from them, unless
`eval.estimation_bars` asks for fewer."""

Estimate = Callable[[Floats], Floats]
"""Returns[L,M] of M assets over L bars → weights[M]."""


class _Unfilled(NamedTuple):
    """What a first order left to be bought: goal, now[N] weights; pending[N]: not whole yet."""

    goal: Floats
    pending: Bools
    now: Floats

    def after(self, now: Floats, cash_share: float) -> _Unfilled:
        """The same a bar later; what the last order did not add to is given up."""
        more = (now > self.now) & (now < _BOUGHT * self.goal) & (cash_share > 1.0 - _BOUGHT)
        return _Unfilled(self.goal, self.pending & more, now)


class _Rebalanced:
    kind: ActionKind = "weights"

    def __init__(
        self,
        name: str,
        every: int | None,
        bars: int,
        estimate: Estimate | None,
        median_bars: int = 1,
    ) -> None:
        """every: bars between rebalancings, None: once; estimate: None for equal weights.

        median_bars: of the trailing volume that caps the first order
        """
        self.name = name
        self._every = every
        self._bars = bars
        self._estimate = estimate
        self._median_bars = median_bars

    def start(self, world: World, span: range) -> None:
        self._world = world
        self._first = span.start
        self._unfilled: dict[int, _Unfilled] = {}

    @property
    def lookback(self) -> int:
        return max(self._bars, self._median_bars - 1)

    def state(self) -> State:
        left = self._unfilled
        parts = {
            f"unfilled.{name}": np.array([getattr(u, name) for u in left.values()])
            for name in _Unfilled._fields
            if left
        }
        books = np.array(list(left), dtype=np.int64)
        return copy_state({"first": self._first, "unfilled.books": books, **parts})

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        first = match_state(self.name, {"first": 0}, state)["first"]
        books = state.get("unfilled.books", np.zeros(0, dtype=np.int64)).tolist()
        shape = (len(books), self._world.n_assets)
        like = {"goal": np.zeros(shape), "pending": np.zeros(shape, bool), "now": np.zeros(shape)}
        parts = match_state(self.name, with_prefix("unfilled.", like) if books else {}, state)
        self._first = int(first)
        self._unfilled = {
            book: _Unfilled(*(parts[f"unfilled.{name}"][k] for name in _Unfilled._fields))
            for k, book in enumerate(books)
        }

    def decide(self, row: Rows, held: Holdings) -> Floats:
        target = np.full(held.weights.shape, np.nan)
        for e, t in enumerate(row.tolist()):
            since, now = t - self._first, held.weights[e].astype(np.float64)
            if since == 0 or (self._every is not None and since % self._every == 0):
                target[e] = self._weights(t, held.allowed[e], now)
                if self._every is None:
                    self._unfilled[e] = _Unfilled(target[e], self._beyond_cap(t, target[e]), now)
            elif e in self._unfilled:
                left = self._unfilled.pop(e).after(now, float(held.cash_share[e]))
                if left.pending.any():
                    self._unfilled[e] = left
                    target[e] = np.where(left.pending, left.goal, np.nan)
        return target

    def _beyond_cap(self, t: int, weights: Floats) -> Bools:
        """[N] of which the first order, at row t, is more than the volume cap lets through."""
        world = self._world
        share, rows = world.rules.participation, world.rows
        if not np.isfinite(share):
            return np.zeros(len(weights), dtype=bool)
        volume = rows.volume_close[t]
        if world.fill_open:  # at t + 1, by the median of the bars up to t
            volume = next_volume(rows, t, self._median_bars)
        amount = np.nan_to_num(weights) * world.initial_cash
        return np.asarray(amount > share * volume * rows.close[t])

    def _weights(self, t: int, allowed: Bools, current: Floats) -> Floats:
        """Weights[N]; assets that cannot be traded are left, and their share is kept free."""
        world = self._world
        wanted = world.present[t] & world.member[t] & world.rows.tradable[t]
        movable = allowed[:, Action.SELL] | wanted
        free = max(0.0, 1.0 - float(current[~movable].sum()))
        weights = np.where(movable, 0.0, np.nan)
        if not wanted.any():
            return weights
        weights[wanted] = free / wanted.sum()
        if self._estimate is None:
            return weights
        low = int(world.history_rows(np.array([t]))[0])
        past = world.growth[max(low, t - self._bars) : t + 1]
        enough = len(past) > min(_LEAST_HISTORY, self._bars)
        known = wanted & np.isfinite(past).all(axis=0) & enough
        if known.sum() >= 2:
            returns = past[1:, known] / past[:-1, known] - 1.0
            weights[wanted] = 0.0
            weights[known] = free * self._estimate(returns)
        return weights


def _fit_weights(estimator: str, returns: Floats) -> Floats:
    """Weights[N] by an estimator of skfolio's, by its name."""
    from skfolio import optimization

    moving = returns.std(axis=0) > 0
    weights = np.zeros(returns.shape[1])
    if moving.sum() < 2:
        return np.full(returns.shape[1], 1.0 / returns.shape[1])
    with warnings.catch_warnings():
        # Remarks of the solver and of pandas; a failure raises.
        warnings.simplefilter("ignore")
        fitted = getattr(optimization, estimator)().fit(returns[:, moving])
        weights[moving] = fitted.weights_
    positive = np.maximum(weights, 0.0)
    return np.asarray(positive / positive.sum())


class Momentum:
    """BUY what rose over the last `bars`, SELL the rest."""

    kind: ActionKind = "discrete"

    def __init__(self, bars: int, name: str = "momentum") -> None:
        self.name = name
        self._bars = bars

    def start(self, world: World, span: range) -> None:
        self._world = world

    @property
    def lookback(self) -> int:
        return self._bars

    def state(self) -> State:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to take back."""

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        world = self._world
        low = np.maximum(row - self._bars, world.history_rows(row))
        now, then = world.growth[row], world.growth[low]
        with np.errstate(invalid="ignore"):
            wish = np.where(now > then, Action.BUY, Action.SELL)
        return only_allowed(wish, held)


class Random:
    """Any allowed action, each as likely as the others."""

    kind: ActionKind = "discrete"
    name = "random"
    lookback = 0

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def start(self, world: World, span: range) -> None:
        self._rng = stream(self._seed, "baseline", "random")

    def state(self) -> State:
        return {"generator": pack_stream(self._rng)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        saved = match_state(self.name, self.state(), state)
        unpack_stream(self._rng, saved["generator"])

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        lots = self._rng.random(held.allowed.shape)
        best = np.where(held.allowed, lots, -1.0).argmax(axis=-1)
        return np.asarray(best, dtype=np.int8)


class Cash:
    kind: ActionKind = "discrete"
    name = "cash"
    lookback = 0

    def start(self, world: World, span: range) -> None:
        """Nothing to make ready."""

    def state(self) -> State:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to take back."""

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        return np.zeros(held.weights.shape, dtype=np.int8)


def only_allowed(actions: NDArray[Any], held: Holdings) -> NDArray[np.int8]:
    """The actions[E,N], HOLD in place of those that are not allowed."""
    allowed = np.take_along_axis(held.allowed, actions[..., None].astype(np.int64), axis=-1)[..., 0]
    return np.where(allowed, actions, Action.HOLD).astype(np.int8)


def _policy_by_estimator(name: str, estimator: str, config: Config) -> Policy:
    every, bars = config.eval.rebalance_bars, config.eval.estimation_bars
    return _Rebalanced(name, every, bars, partial(_fit_weights, estimator))


_MAKERS: Mapping[str, Callable[[Config], Policy]] = {
    "buy_and_hold": lambda c: _Rebalanced("buy_and_hold", None, 0, None, c.market.median_days),
    "equal_weight": lambda c: _Rebalanced("equal_weight", c.eval.rebalance_bars, 0, None),
    "min_variance": partial(_policy_by_estimator, "min_variance", "MeanRisk"),
    "hrp": partial(_policy_by_estimator, "hrp", "HierarchicalRiskParity"),
    "momentum": lambda c: Momentum(c.eval.momentum_bars),
    "random": lambda c: Random(c.seed),
    "cash": lambda c: Cash(),
}


def make_baseline(name: str, config: Config, forecaster: Forecaster | None = None) -> Policy:
    """forecaster: the fitted one, without which there is no `forecast`"""
    if name == FORECAST:
        if forecaster is None:
            raise UsageError(
                "the baseline 'forecast' has to be fitted before it can decide. Hand in the "
                "forecaster of a run: `ensure_forecaster`."
            )
        return forecaster.policy()
    return _MAKERS[name](config)


def run_baselines(
    world: World,
    span: range,
    config: Config,
    forecaster: Forecaster | None = None,
    past: Mapping[Book, Floats] | None = None,
) -> dict[str, Backtest]:
    """Name → backtest of every baseline of `eval.baselines` that the data support.

    forecaster: see `make_baseline`; without one `forecast` is left out
    past: book → its earlier values, see `under_budget`
    """
    done: dict[str, Backtest] = {}
    for name in config.eval.baselines:
        before = (past or {}).get(Book(name))
        if name == FORECAST and forecaster is None:
            continue  # whoever could not fit it has said why
        if name == "benchmark":
            index = index_world(world)
            if index is None:
                continue
            if not index.present[span.start, 0]:
                log.warning(
                    "the benchmark has no level on %s or before, so it is left out",
                    world.times[span.start].astype("datetime64[D]"),
                )
                continue
            policy = _Rebalanced("benchmark", None, 0, None)
            done[name] = run_backtest(policy, index, span, config, past=before)
        else:
            made = make_baseline(name, config, forecaster)
            done[name] = run_backtest(made, world, span, config, past=before)
    return done
