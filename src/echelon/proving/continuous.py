"""References for agents that say target weights: the planted markets' filters, held in equal parts.

The reference of a market (`continuous_reference`) holds 1/N of the book in each asset of which its
exact filter expects enough, and cash for the rest, rebalanced at every bar. "Enough" is a hurdle:
for the trend a probability that the sign is up, elsewhere standard deviations of what the filter
expects, as in `planted`. Buying above no hurdle at all trades too often for the fee.

Hurdles were chosen by `hurdle_curve`, on draws called "hurdle" that serve nothing else, with fills
at the next open; the Sharpe ratio is flat around them. Nobody can predict better than the filter,
but weights in proportion to what it expects do a little better than equal ones: these are
references, not bounds. Beside them stand the rules of thumb of `planted`, held in equal parts too.

Annual Sharpe ratios over 16 draws of 6000 bars, 5 bp a side, fills at the next open (at the same
close), the standard deviation of a draw's being 0.1 to 0.3:

    signal          reference     best rule of thumb
    trend           4.84 (4.87)   4.31 (4.34), momentum over 20 bars
    reversion       3.31 (3.37)   2.41 (2.48), reversal over 20 bars
    cross_section   2.94 (2.95)   2.05 (2.07), momentum over 20 bars relative to the median
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.envs.act import Action, ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.proving.planted import CrossSectionMarket, PlantedMarket, ReversionMarket, Rule
from echelon.proving.trial import Traded, trade
from echelon.proving.worlds import Draw, drawn_world
from echelon.types import Bools, Floats

FilteredMarket: TypeAlias = PlantedMarket | ReversionMarket | CrossSectionMarket

HURDLES: Mapping[str, float] = MappingProxyType(
    {"trend": 0.65, "reversion": 0.5, "cross_section": 1.0}
)
"""Signal → hurdle of its reference."""
CURVES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "trend": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75),
        "reversion": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25),
        "cross_section": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25),
    }
)
"""Signal → hurdles compared."""


def wanted_above(market: FilteredMarket, close: Floats, hurdle: float) -> Bools:
    """[T,N] what the filter expects enough of, given the closes[T,N] up to each row."""
    if isinstance(market, PlantedMarket):
        return np.asarray(market.filtered(close) > hurdle)
    return replace(market, hurdle=hurdle).wanted(close)


class FilterWeights:
    """1/N of the book in each asset that the market's exact filter wants, the rest cash."""

    kind: ActionKind = "weights"
    name = "bayes"

    def __init__(self, market: FilteredMarket, hurdle: float | None = None) -> None:
        """hurdle: None: the one chosen for the market's signal"""
        self._market = market
        self._hurdle = HURDLES[market.signal] if hurdle is None else hurdle

    def start(self, world: World, span: range) -> None:
        """Run the filter over the closes of each draw; row t of it knows those up to t."""
        close, n_bars = world.rows.close, self._market.n_bars
        draws = np.split(close, range(n_bars, len(close), n_bars))
        wanted = [wanted_above(self._market, draw, self._hurdle) for draw in draws]
        self._weights = np.concatenate(wanted) / world.n_assets

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Follow the filter."""
        return np.asarray(self._weights[row])


def continuous_reference(market: FilteredMarket) -> Policy:
    """What agents with target weights are compared with in `market`."""
    return FilterWeights(market)


class Equally:
    """A rule of HOLD, BUY and SELL by target weights: 1/N in each asset it buys, the rest cash."""

    kind: ActionKind = "weights"

    def __init__(self, rule: Policy) -> None:
        self.name = rule.name
        self._rule = rule

    def start(self, world: World, span: range) -> None:
        """Start the rule."""
        self._rule.start(world, span)

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Hold what the rule buys."""
        buys = self._rule.decide(row, held) == Action.BUY
        return np.asarray(buys / held.weights.shape[1])


def weighted_rules_of_thumb(
    market: FilteredMarket, bars: Sequence[int] = (5, 10, 20, 40)
) -> list[Policy]:
    """The rules that fit the market's signal: momentum, reversal, or momentum among the assets."""
    reversal, relative = market.signal == "reversion", market.signal == "cross_section"
    return [Equally(Rule(count, reversal=reversal, relative=relative)) for count in bars]


def bare_worlds(draws: Sequence[Draw], config: Config) -> list[World]:
    """Worlds of draws for policies that read prices only: there are no features in them."""
    shape = draws[0].close.shape
    x, present = np.zeros((*shape, 1), dtype=np.float32), np.ones(shape, dtype=bool)
    return [drawn_world(draw.open, draw.close, x, present, config) for draw in draws]


class Scored(NamedTuple):
    """Annual Sharpe ratios of a policy over D draws: their mean and standard deviation."""

    name: str
    mean: float
    sd: float

    @staticmethod
    def of(name: str, traded: Traded) -> Scored:
        """Of what was traded."""
        return Scored(name, float(traded.sharpes.mean()), float(traded.sharpes.std()))


def hurdle_curve(
    market: FilteredMarket,
    config: Config,
    *,
    seeds: Sequence[int],
    hurdles: Sequence[float] | None = None,
) -> list[Scored]:
    """The reference at each hurdle, on draws that serve nothing else."""
    worlds = bare_worlds([market.draw(seed, "hurdle") for seed in seeds], config)
    return [
        Scored.of(f"{hurdle:g}", trade(FilterWeights(market, hurdle), worlds, config))
        for hurdle in (CURVES[market.signal] if hurdles is None else hurdles)
    ]
