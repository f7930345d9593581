"""Classical rules as experts that do not learn: what `experts.rules` puts next to the population.

A baseline trades on its own rhythm from its own first bar, and between two rebalancings leaves a
book as it is. A router may put it in charge of any book at any bar, so as an expert a rule is a
portfolio at every bar:

1. Rebalancing rows are those that `eval.rebalance_bars` divides, in every world alike, and the
   first row that a book may stand on. There the baseline is asked what it would do with a book that
   is all cash: target weights, or equal shares of what it would BUY. (So `momentum` holds what
   rose, in equal shares.) That is worked out once a row, for all books, forks and phases.
2. Between them the portfolio drifts with prices: what the rule would hold now.
3. A book that holds nearly that is left alone, so a rule's own book trades only when it
   rebalances, and at a rebalancing row every book is; one that was in other hands gets there.

An answer depends on row and book alone. Nothing after the row counts.

`forecast` says by itself what it holds at every bar, whoever asks (`backtest.top_k`). It is fitted
on the experts' part of the train window, so that the router judges it on bars it has not seen, and
is kept with the weights of the hierarchy.

Axes: `E` books, `N` assets.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.baselines import FORECAST, make_baseline
from echelon.backtest.forecaster import Model, fit_forecaster, model_of_arrays, refusal, scorer_of
from echelon.backtest.policy import Policy, lookback_of
from echelon.backtest.top_k import RowScores, TopKPolicy, TopKRule
from echelon.config import Config
from echelon.envs.act import Action, ActionKind, ActionRule, Holdings, free, holdings
from echelon.envs.world import World
from echelon.errors import DataError, StoreError
from echelon.market import Book, Rows
from echelon.states import State
from echelon.types import Floats

if TYPE_CHECKING:
    from torch import Tensor

_RULE = "rule"  # among the arrays of a forecaster
_NEAR = 0.02
"""Books this near to the portfolio, by half the L1 distance with cash, are left alone."""
_WORLDS = 4  # worlds whose portfolios are remembered: experts' and router's part, validation, test
_ROWS = 4_096  # most portfolios of one world: a world that grows would fill the memory


class RuleExpert:
    """A baseline as an expert; see the module's text."""

    kind: ActionKind = "weights"

    def __init__(self, baseline: Policy, config: Config) -> None:
        self.name, self.baseline = baseline.name, baseline
        self._every = config.eval.rebalance_bars
        self._rule = ActionRule.from_config(config, baseline.kind)
        self._worlds: list[tuple[weakref.ref[World], dict[int, Floats]]] = []

    def start(self, world: World, span: range) -> None:
        """Portfolios that are known of the same history stay known."""
        self._world = world
        kept = [(ref, made) for ref, made in self._worlds if ref() is not None]
        for ref, made in kept:
            old = ref()
            if old is not None and (old is world or old.growth is world.growth):
                self._made = made
                return
        self._made = {}
        self._worlds = [*kept[1 - _WORLDS :], (weakref.ref(world), self._made)]

    @property
    def lookback(self) -> int:
        """The baseline's, from the rebalancing row."""
        return lookback_of(self.baseline) + self._every

    def state(self) -> State:
        return {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to go on from; what another policy left is refused."""
        if state:
            raise StoreError(
                f"{self.name}: a rule remembers nothing, and the saved state has "
                f"{', '.join(state)}. Restore it with the policy it was saved with."
            )

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Target weights[E,N] of books at `row`[E]; NaN: leave as it is."""
        since = np.maximum(row // self._every * self._every, self._world.first_rows(row))
        wanted = self._drift(np.minimum(since, row), row)
        current = held.weights.astype(np.float64)
        movable = free(held)
        # As for a learned expert: what cannot be bought is not added to, nor more than fits.
        target = np.where(held.allowed[..., Action.BUY], wanted, np.minimum(wanted, current))
        room = np.maximum(1.0 - np.where(movable, 0.0, current).sum(axis=1), 0.0)
        total = np.where(movable, target, 0.0).sum(axis=1)
        shrink = np.divide(room, total, out=np.ones_like(total), where=total > room)
        target = np.where(movable, target * shrink[:, None], np.nan)
        apart = np.abs(wanted - current).sum(axis=1)
        apart += np.abs(wanted.sum(axis=1) - current.sum(axis=1))
        stays = (apart <= 2.0 * _NEAR) & (since != row)
        return np.where(stays[:, None], np.nan, target)

    def _drift(self, since: Rows, row: Rows) -> Floats:
        """[E,N] the portfolios of the rows since[E], as prices have moved them until row[E]."""
        weights = np.stack([self._portfolio(t) for t in since.tolist()])
        growth = self._world.growth
        then, now = growth[since], growth[row]
        known = np.isfinite(then) & np.isfinite(now) & (then > 0.0)
        worth = weights * np.divide(now, then, out=np.ones_like(weights), where=known)
        cash = 1.0 - weights.sum(axis=1, keepdims=True)
        return np.asarray(worth / np.maximum(worth.sum(axis=1, keepdims=True) + cash, 1e-12))

    def _portfolio(self, row: int) -> Floats:
        """Weights[N] that the baseline gives a book of cash at a rebalancing row."""
        weights = self._made.get(row)
        if weights is None:
            weights = self._ask(row)
            if len(self._made) >= _ROWS:
                del self._made[next(iter(self._made))]
            self._made[row] = weights
        return weights

    def _ask(self, row: int) -> Floats:
        world, cash = self._world, np.array([self._world.initial_cash])
        nothing = np.zeros((1, world.n_assets))
        rows = np.array([row], dtype=np.int64)
        held = holdings(world, Book(cash, nothing, nothing.copy()), cash, rows, self._rule)
        self.baseline.start(world, range(row, row + 1))
        answer = self.baseline.decide(rows, held)[0]
        if self.baseline.kind == "discrete":
            bought = answer == Action.BUY
            return np.asarray(bought / max(int(bought.sum()), 1), dtype=np.float64)
        return np.nan_to_num(np.asarray(answer, dtype=np.float64))


class ForecastExpert(TopKPolicy):
    """The forecaster as an expert: it says at every bar what it holds, whatever the book."""

    def __init__(self, model: Model, rule: TopKRule) -> None:
        super().__init__(RowScores(scorer_of(model)), rule, FORECAST)
        self.model = model

    def weights(self) -> dict[str, Tensor]:
        """Model and rule, for `load`."""
        import torch  # a bundle is decided on without it

        arrays = self.model._asdict() | {_RULE: np.array(self.rule, dtype=np.float64)}
        return {name: torch.from_numpy(np.array(part)) for name, part in arrays.items()}

    @classmethod
    def load(cls, weights: Mapping[str, Tensor], n_features: int) -> Self:
        """What `weights` gave; ValueError: these are no such model."""
        arrays = {name: part.numpy() for name, part in weights.items()}
        top, buffer, tranches, horizon = arrays.pop(_RULE).tolist()
        rule = TopKRule(int(top), buffer, int(tranches), int(horizon))
        if problem := rule.problem:
            raise ValueError(problem)
        return cls(model_of_arrays(arrays, n_features), rule)


Rule = RuleExpert | ForecastExpert


def rule_experts(config: Config, world: World | None = None) -> tuple[Rule, ...]:
    """The experts of `experts.rules`, in that order; world: whose train window is fitted on."""
    return tuple(
        RuleExpert(make_baseline(name, config), config)
        if name != FORECAST
        else _fit_forecast(config, world)
        for name in config.experts.rules
    )


def load_rules(config: Config, weights: Mapping[str, Tensor], n_features: int) -> tuple[Rule, ...]:
    """The same, a forecaster being that of weights which `ForecastExpert.weights` gave."""
    return tuple(
        RuleExpert(make_baseline(name, config), config)
        if name != FORECAST
        else ForecastExpert.load(weights, n_features)
        for name in config.experts.rules
    )


def _fit_forecast(config: Config, world: World | None) -> ForecastExpert:
    assert world is not None, "a forecaster is fitted on a world"
    fitted = fit_forecaster(config, world)
    if fitted is None:
        raise DataError(
            f"experts.rules names forecast, but {refusal(config, world)}. Leave it out."
        )
    return ForecastExpert(fitted.model, fitted.rule)
