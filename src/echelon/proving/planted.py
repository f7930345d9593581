"""Markets with a planted signal, and what the exact filter of past returns makes of them.

Each market has a hidden state s per asset. The state at bar t gives the log return from t to t + 1
its drift; the rest is noise. A share of both falls between the close and the next open, so that
fills at the open pay for what happened overnight. The closes tell a filter as much as opens and
closes together: drift and variance are split in the same proportion.

    trend          s = ±1 flips with a small probability; the drift is in its direction
    reversion      s = deviation of the log price from a random walk; it decays, and the drift is
                   the way back
    cross_section  s = strength of an asset, a slow AR(1); only s less its mean over the assets
                   gives drift, and noise common to all assets hides it

The reference (`BayesFilter`) is the Bayes filter: the exact expectation of the next drift
given all returns so far, bought where it is above a hurdle and sold elsewhere, under the same 20/50
rule, costs and clock. For the trend the hurdle is zero: the sign is more likely up than down. Where
drifts come in all sizes, cash is better kept for the larger ones, and a filter that buys above zero
loses to rules of thumb: there the hurdle is `hurdle` standard deviations of the expectation, chosen
on draws that serve nothing else (the Sharpe ratio is flat around it, from 0.5 to 1).

Nobody can predict better than the filter. The way it buys is simple, so it is a reference and not a
bound: under the 20/50 rule momentum over 10 bars does 5 % better than it on the trend.

    trend    p_t = P(s_t = 1 | r_1..t): odds ← odds · exp(2 · drift · r_t / noise²), then the flip
    others   Kalman filters; the states are Gaussian, so nothing is approximated

Agents that say target weights have a reference of their own (`FilterWeights`): 1/N of the book in
each asset of which the exact filter expects enough, and cash for the rest, rebalanced at every bar.
"Enough" is a hurdle: for the trend a probability that the sign is up, elsewhere standard deviations
of what the filter expects. Buying above no hurdle at all trades too often for the fee. The hurdles
were chosen on draws called "hurdle" that serve nothing else, with fills at the next open; the
Sharpe ratio is flat around them. Weights in proportion to what the filter expects do a little
better than equal ones: these too are references, not bounds. Next to them stand the rules of thumb,
held in equal parts. Annual Sharpe ratios over 16 draws of 6000 bars, 5 bp a side, fills at the next
open (at the same close), the standard deviation of a draw's being 0.1 to 0.3:

    signal          reference     best rule of thumb
    trend           4.84 (4.87)   4.31 (4.34), momentum over 20 bars
    reversion       3.31 (3.37)   2.41 (2.48), reversal over 20 bars
    cross_section   2.94 (2.95)   2.05 (2.07), momentum over 20 bars relative to the median
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.baselines import only_allowed
from echelon.backtest.policy import Policy
from echelon.envs.act import Action, ActionKind, Holdings
from echelon.envs.world import World
from echelon.errors import UsageError
from echelon.market import Rows
from echelon.proving.worlds import Draw, autoregressive
from echelon.rng import stream
from echelon.types import Bools, Floats


class PlantedSignal(Protocol):
    """A market with a planted signal."""

    signal: ClassVar[str]
    """What is planted: its name in `PLANTED`."""

    @property
    def n_assets(self) -> int:
        """N."""

    @property
    def n_bars(self) -> int:
        """T."""

    def draw(self, seed: int, name: str) -> Draw:
        """One history of the market; `name` tells train, validation and test draws apart."""

    def expected_drift(self, close: Floats) -> Floats:
        """[T,N] expected drift of the next bar, given the closes[T,N] up to each row."""

    def wants(self, close: Floats) -> Bools:
        """[T,N] what the reference wants to hold, given the closes[T,N] up to each row."""


@dataclass(frozen=True)
class PlantedMarket:
    """Trend: numbers of the market.

    overnight: share of a bar's drift and variance that falls between close and open
    """

    signal: ClassVar[str] = "trend"

    n_assets: int = 8
    n_bars: int = 6000
    drift: float = 0.003
    noise: float = 0.012
    flip: float = 0.015
    overnight: float = 0.2

    def draw(self, seed: int, name: str) -> Draw:
        """One history of the market; `name` tells train, validation and test draws apart."""
        rng = stream(seed, "planted", name)
        shape = (self.n_bars, self.n_assets)
        flips = rng.random(shape) < self.flip
        flips[0] = rng.random(self.n_assets) < 0.5
        sign = np.where(np.cumsum(flips, axis=0) % 2 == 0, 1.0, -1.0)
        drift = np.zeros(shape)
        drift[1:] = self.drift * sign[:-1]
        night, day = self.overnight, 1.0 - self.overnight
        gap = night * drift + np.sqrt(night) * self.noise * rng.standard_normal(shape)
        session = day * drift + np.sqrt(day) * self.noise * rng.standard_normal(shape)
        return _draw_from_returns(sign, gap, session)

    def probability_up(self, close: Floats) -> Floats:
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

    def expected_drift(self, close: Floats) -> Floats:
        """[T,N] expected drift of the next bar, given the closes[T,N] up to each row."""
        return self.drift * (2.0 * self.probability_up(close) - 1.0)

    def wants(self, close: Floats) -> Bools:
        """[T,N]: the sign is more likely up."""
        return np.asarray(self.probability_up(close) > 0.5)


@dataclass(frozen=True)
class ReversionMarket:
    """Mean reversion: log price = random walk + AR(1) deviation, seen only as their sum.

    noise: sd of a bar's shock, to walk and deviation together
    deviation: sd of the deviation, the strength of the signal; a share of the shocks, 1/noise² ·
        deviation² · (1 − persistence²), is undone later, and that cannot be more than all
    persistence: of the deviation, per bar
    overnight: share of a bar's drift and variance that falls between close and open
    hurdle: of the reference, in standard deviations of what it expects

    Half the variance is taken off the log returns, so that prices are fair to whoever knows
    nothing: the expected simple return of a bar is zero.
    """

    signal: ClassVar[str] = "reversion"

    n_assets: int = 8
    n_bars: int = 6000
    deviation: float = 0.025
    noise: float = 0.012
    persistence: float = 0.9
    overnight: float = 0.2
    hurdle: float = 0.75

    def __post_init__(self) -> None:
        most = self.noise / np.sqrt(1.0 - self.persistence**2)
        if not 0.0 <= self.deviation <= most:
            raise UsageError(
                f"deviation={self.deviation}: expected 0 to {most:.4f}, which is all of noise="
                f"{self.noise} at persistence={self.persistence}. Lower it, or raise the noise."
            )

    @property
    def _fleeting(self) -> float:
        """Variance of the shocks to the deviation."""
        return self.deviation**2 * (1.0 - self.persistence**2)

    @property
    def _pull(self) -> float:
        """Part of the deviation that is undone per bar."""
        return 1.0 - self.persistence

    @property
    def _fair(self) -> float:
        """What is taken off every log return."""
        return 0.5 * (self.noise**2 + (self._pull * self.deviation) ** 2)

    def draw(self, seed: int, name: str) -> Draw:
        """One history of the market; `name` tells train, validation and test draws apart."""
        rng = stream(seed, "planted", self.signal, name)
        shape = (self.n_bars, self.n_assets)
        night, day = self.overnight, 1.0 - self.overnight
        lasting = np.sqrt(self.noise**2 - self._fleeting)
        to_walk, to_deviation = [
            (
                np.sqrt(night) * size * rng.standard_normal(shape),
                np.sqrt(day) * size * rng.standard_normal(shape),
            )
            for size in (lasting, np.sqrt(self._fleeting))
        ]
        first = self.deviation * rng.standard_normal(self.n_assets)
        hidden = autoregressive(first, to_deviation[0] + to_deviation[1], self.persistence)
        drift = np.zeros(shape)
        drift[1:] = -self._pull * hidden[:-1] - self._fair
        gap = night * drift + to_walk[0] + to_deviation[0]
        session = day * drift + to_walk[1] + to_deviation[1]
        return _draw_from_returns(hidden, gap, session)

    def expected_drift(self, close: Floats) -> Floats:
        """[T,N] expected drift of the next bar, given the closes[T,N] up to each row."""
        return -self._pull * self.filter_state(close).state

    def wants(self, close: Floats) -> Bools:
        """[T,N]: the price is expected to rise, by enough."""
        state, known = self.filter_state(close)
        return np.asarray(-state > self.hurdle * known[:, None])

    def filter_state(self, close: Floats) -> FilterState:
        """The hidden state as the closes[T,N] tell it."""
        return _kalman(
            np.diff(np.log(close), axis=0) + self._fair,
            load=-self._pull,
            persistence=self.persistence,
            variance=self.deviation**2,
            noise=self.noise**2,
            shared=self._fleeting,
        )


@dataclass(frozen=True)
class CrossSectionMarket:
    """Cross-section: assets differ in strength, and only the differences pay.

    drift: size of an asset's drift per unit of relative strength, the strength of the signal
    noise: sd of a bar's noise; common: share of its variance that all assets have in common
    persistence: of the strengths, per bar; they have variance 1
    overnight: share of a bar's drift and variance that falls between close and open
    hurdle: of the reference, in standard deviations of what it expects

    As strengths count relative to their mean, the mean return of the assets says nothing about
    them, and the rest is alike for all assets: the exact joint filter is one scalar Kalman filter,
    applied to each asset's return less the mean over assets. Half the variance is taken off the
    log returns, as in `ReversionMarket`.
    """

    signal: ClassVar[str] = "cross_section"

    n_assets: int = 8
    n_bars: int = 6000
    drift: float = 0.0027
    noise: float = 0.012
    common: float = 0.3
    persistence: float = 0.97
    overnight: float = 0.2
    hurdle: float = 0.75

    @property
    def _fair(self) -> float:
        """What is taken off every log return."""
        return 0.5 * (self.noise**2 + self.drift**2 * (1.0 - 1.0 / self.n_assets))

    def draw(self, seed: int, name: str) -> Draw:
        """One history of the market; `name` tells train, validation and test draws apart."""
        rng = stream(seed, "planted", self.signal, name)
        shape = (self.n_bars, self.n_assets)
        first = rng.standard_normal(self.n_assets)
        size = np.sqrt(1.0 - self.persistence**2)
        strength = autoregressive(first, size * rng.standard_normal(shape), self.persistence)
        hidden = strength - strength.mean(axis=1, keepdims=True)
        drift = np.zeros(shape)
        drift[1:] = self.drift * hidden[:-1] - self._fair
        both, own = self.noise * np.sqrt(self.common), self.noise * np.sqrt(1.0 - self.common)

        def part(share: float) -> Floats:
            alike = both * rng.standard_normal((self.n_bars, 1))
            noise = alike + own * rng.standard_normal(shape)
            return np.asarray(share * drift + np.sqrt(share) * noise)

        return _draw_from_returns(hidden, part(self.overnight), part(1.0 - self.overnight))

    def expected_drift(self, close: Floats) -> Floats:
        """[T,N] expected relative drift of the next bar, given the closes[T,N] up to each row."""
        return self.drift * self.filter_state(close).state

    def wants(self, close: Floats) -> Bools:
        """[T,N]: expected to do better than the mean of the assets, by enough."""
        state, known = self.filter_state(close)
        return np.asarray(state > self.hurdle * known[:, None])

    def filter_state(self, close: Floats) -> FilterState:
        """The hidden state as the closes[T,N] tell it."""
        returns = np.diff(np.log(close), axis=0)
        relative = 1.0 - 1.0 / self.n_assets
        return _kalman(
            returns - returns.mean(axis=1, keepdims=True),
            load=self.drift,
            persistence=self.persistence,
            variance=relative,
            noise=relative * self.noise**2 * (1.0 - self.common),
            shared=0.0,
        )


FilteredMarket: TypeAlias = PlantedMarket | ReversionMarket | CrossSectionMarket

PLANTED: Mapping[str, type[FilteredMarket]] = {
    kind.signal: kind for kind in (PlantedMarket, ReversionMarket, CrossSectionMarket)
}
"""Name of the signal → market; `PLANTED["trend"]()` has the default strength."""
HURDLES: Mapping[str, float] = {"trend": 0.65, "reversion": 0.5, "cross_section": 1.0}
"""Signal → hurdle of its reference by target weights."""


class BayesFilter:
    """BUY what the market's exact filter wants to hold, SELL the rest: the reference of agents
    that buy, sell and hold, under the 20/50 rule.
    """

    kind: ActionKind = "discrete"
    name = "bayes"

    def __init__(self, market: PlantedSignal) -> None:
        self._market = market

    def start(self, world: World, span: range) -> None:
        """Run the filter over the closes of each draw; row t of it knows those up to t."""
        self._wants = filter_each_draw(world, self._market.n_bars, self._market.wants)

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        """Follow the filter."""
        return only_allowed(np.where(self._wants[row], Action.BUY, Action.SELL), held)


class FilterWeights:
    """1/N of the book in each asset that the market's exact filter wants, the rest cash.

    The reference of agents that say target weights, rebalanced at every bar.
    """

    kind: ActionKind = "weights"
    name = "bayes"

    def __init__(self, market: FilteredMarket, hurdle: float | None = None) -> None:
        """hurdle: None: the one chosen for the market's signal"""
        self._market = market
        self._hurdle = HURDLES[market.signal] if hurdle is None else hurdle

    def start(self, world: World, span: range) -> None:
        """Run the filter over the closes of each draw; row t of it knows those up to t."""
        wants = filter_each_draw(world, self._market.n_bars, self._wants)
        self._weights = wants / world.n_assets

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Follow the filter."""
        return np.asarray(self._weights[row])

    def _wants(self, close: Floats) -> Bools:
        """[T,N] what the filter expects enough of, given the closes[T,N] up to each row."""
        if isinstance(self._market, PlantedMarket):
            return np.asarray(self._market.probability_up(close) > self._hurdle)
        return replace(self._market, hurdle=self._hurdle).wants(close)


def filter_each_draw(
    world: World, n_bars: int, run: Callable[[Floats], NDArray[Any]]
) -> NDArray[Any]:
    """[T,N] what a filter makes of the closes of each draw of `n_bars` in a joined world."""
    close = world.rows.close
    draws = np.split(close, range(n_bars, len(close), n_bars))
    return np.concatenate([run(draw) for draw in draws])


class Rule:
    """BUY what rose (reversal: fell) over the last bars, SELL the rest.

    relative: rose or fell in comparison with the median asset
    """

    kind: ActionKind = "discrete"

    def __init__(self, bars: int, *, reversal: bool = False, relative: bool = False) -> None:
        self.name = " ".join(
            ["relative"] * relative + ["reversal" if reversal else "momentum", str(bars)]
        )
        self._bars, self._relative = bars, relative
        self._side = -1.0 if reversal else 1.0

    def start(self, world: World, span: range) -> None:
        """Take the total-return index."""
        self._growth = world.growth

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        """Compare with the index so many bars ago."""
        rise = self._growth[row] / self._growth[np.maximum(row - self._bars, 0)] - 1.0
        if self._relative:
            rise = rise - np.median(rise, axis=1, keepdims=True)
        return only_allowed(np.where(self._side * rise > 0.0, Action.BUY, Action.SELL), held)


def rules_of_thumb(bars: Sequence[int] = (5, 10, 20, 40, 60)) -> list[Policy]:
    """Momentum and reversal, of each asset by itself and relative to the median, over `bars`."""
    return [
        Rule(count, reversal=reversal, relative=relative)
        for relative in (False, True)
        for reversal in (False, True)
        for count in bars
    ]


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


def _draw_from_returns(hidden: Floats, gap: Floats, session: Floats) -> Draw:
    """The history of log returns overnight and in the session[T,N]; those of bar 0 are dropped."""
    gap[0] = session[0] = 0.0
    close = 100.0 * np.exp(np.cumsum(gap + session, axis=0))
    return Draw(hidden, close * np.exp(-session), close)


class FilterState(NamedTuple):
    """state[T,N]: expectation of the hidden state; known[T]: standard deviation of it."""

    state: Floats
    known: Floats


def _kalman(
    returns: Floats,
    *,
    load: float,
    persistence: float,
    variance: float,
    noise: float,
    shared: float,
) -> FilterState:
    """Expectation of the state s at each row, given the returns[T−1,N] up to it.

    r_t = load · s_{t−1} + e_t,  s_t = persistence · s_{t−1} + w_t,  s_0 ~ N(0, variance)
    Var e = noise, Cov(e, w) = shared, and Var w such that s keeps its variance
    """
    state = np.zeros((len(returns) + 1, returns.shape[1]))
    left = np.full(len(state), variance)
    for t, r_t in enumerate(returns, start=1):
        unknown = left[t - 1]
        spread = load**2 * unknown + noise
        gain = (persistence * load * unknown + shared) / spread
        state[t] = persistence * state[t - 1] + gain * (r_t - load * state[t - 1])
        left[t] = variance - persistence**2 * (variance - unknown) - gain**2 * spread
    return FilterState(state, np.sqrt(np.maximum(variance - left, 0.0)))
