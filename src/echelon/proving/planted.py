"""Planted and costly: how much of what the optimal filter earns does the agent capture?

Each market has a hidden state s per asset; at bar t it gives the log return to t + 1 its drift, and
the rest is noise. The same share of both falls between the close and the next open: fills at the
open pay for what happened overnight, and closes tell a filter as much as opens and closes do.

    trend          s = ±1 flips with a small probability; the drift is in its direction
    reversion      s = deviation of the log price from a random walk; it decays, and the drift is
                   the way back
    cross_section  s = strength of an asset, a slow AR(1); only s less its mean over the assets
                   gives drift, and noise common to all assets hides it

The reference (`BayesFilter`) is the exact expectation of the next drift given all returns so far,
bought where it is above a hurdle and sold elsewhere, under the same rule, costs and clock as the
agent. Nobody can predict better; the way it buys is simple, so it is a reference and not a bound.

    trend    p_t = P(s_t = 1 | r_1..t): odds ← odds · exp(2 · drift · r_t / noise²), then the flip
    others   Kalman filters; the states are Gaussian, so nothing is approximated

The hurdle is a probability for the trend, elsewhere standard deviations of what the filter expects;
by target weights there are others (`HURDLES`), lest the filter trade too often for the fee. All
were chosen on draws that serve nothing else. By weights, over 16 draws of 6000 bars at 5 bp a side,
fills at the next open (at the same close), sd of a draw 0.1 to 0.3:

    signal          reference     best rule of thumb
    trend           4.84 (4.87)   4.31 (4.34), momentum over 20 bars
    reversion       3.31 (3.37)   2.41 (2.48), reversal over 20 bars
    cross_section   2.94 (2.95)   2.05 (2.07), momentum over 20 bars relative to the median

Every seed has draws of its own to train on and to choose its checkpoint by (experts several: from a
replay they would learn one path by heart); test draws are the same for all, and so are those on
which claims are counted (see `null`). A seed's score is the ratio of mean Sharpe ratios.

Costly is the trend with signs that flip at 4 % of the bars: a trend of 25 bars is worth 5 basis
points a side and not nearly 500. Next to the filter, which trades alike at any fee, stands the one
with the two thresholds that earned most on the seed's validation draws.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.baselines import only_allowed
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.algorithms import ALGORITHMS
from echelon.envs.act import Action, ActionKind, Holdings
from echelon.envs.world import World
from echelon.files import write_atomic
from echelon.market import Rows
from echelon.proving.certificate import Bar, MarketResult, seed_check
from echelon.proving.parts import Done, Finding, time_spent
from echelon.proving.worlds import (
    WARMUP,
    Draw,
    SeedWorlds,
    TradedDraws,
    Trained,
    TrainingPart,
    at_fee,
    autoregressive,
    last_bars,
    planted_worlds,
    trade_draws,
)
from echelon.rng import stream
from echelon.types import Bools, Floats
from echelon.workers import Report, ShouldStop


@dataclass(frozen=True)
class PlantedMarket:
    """Trend: numbers of the market; overnight: share of drift and variance before the open."""

    signal: ClassVar[str] = "trend"

    n_assets: int = 8
    n_bars: int = 6000
    drift: float = 0.003
    noise: float = 0.012
    flip: float = 0.015
    overnight: float = 0.2
    hurdle: float = field(default=0.5, repr=False)  # parts of proofs are known by the others

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
        """[T,N] what the reference wants to hold: the sign is likely enough up."""
        return np.asarray(self.probability_up(close) > self.hurdle)


@dataclass(frozen=True)
class ReversionMarket:
    """Mean reversion: log price = random walk + AR(1) deviation, seen only as their sum.

    noise: sd of a bar's shock, to walk and deviation together
    deviation: sd of the deviation, the strength of the signal; at most noise / √(1 − persistence²)
    persistence: of the deviation, per bar

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
        return -self._pull * self.filter_state(close).state

    def wants(self, close: Floats) -> Bools:
        state, known = self.filter_state(close)
        return np.asarray(-state > self.hurdle * known[:, None])

    def filter_state(self, close: Floats) -> FilterState:
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

    The mean return of the assets says nothing about relative strengths: the exact joint filter is
    one scalar Kalman filter, applied to each asset's return less the mean over assets. Half the
    variance is taken off the log returns, as in `ReversionMarket`.
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
        return 0.5 * (self.noise**2 + self.drift**2 * (1.0 - 1.0 / self.n_assets))

    def draw(self, seed: int, name: str) -> Draw:
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


PlantedSignal: TypeAlias = PlantedMarket | ReversionMarket | CrossSectionMarket

PLANTED: Mapping[str, type[PlantedSignal]] = {
    kind.signal: kind for kind in (PlantedMarket, ReversionMarket, CrossSectionMarket)
}
"""Name of the signal → market; `PLANTED["trend"]()` has the default strength."""
HURDLES: Mapping[str, float] = {"trend": 0.65, "reversion": 0.5, "cross_section": 1.0}
"""Signal → hurdle of its reference by target weights."""


class BayesFilter:
    """Holds what the market's exact filter wants: the reference, acting in the way of `kind`.

    BUY and SELL the rest; or 1/N of the book in each asset, rebalanced at every bar, the rest cash.
    """

    name = "bayes"

    def __init__(self, market: PlantedSignal, kind: ActionKind = "discrete") -> None:
        hurdle = market.hurdle if kind == "discrete" else HURDLES[market.signal]
        self._market = replace(market, hurdle=hurdle)
        self.kind: ActionKind = kind

    def start(self, world: World, span: range) -> None:
        """Run the filter over the closes of each draw; row t of it knows those up to t."""
        self._wants = filter_each_draw(world, self._market.n_bars, self._market.wants)

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        wants = self._wants[row]
        if self.kind == "weights":
            return np.asarray(wants / held.weights.shape[1])
        return only_allowed(np.where(wants, Action.BUY, Action.SELL), held)


def filter_each_draw(
    world: World, n_bars: int, run: Callable[[Floats], NDArray[Any]]
) -> NDArray[Any]:
    """[T,N] what a filter makes of the closes of each draw of `n_bars` in a joined world."""
    draws = np.split(world.rows.close, range(n_bars, len(world.times), n_bars))
    return np.concatenate([run(draw) for draw in draws])


class Rule:
    """BUY what rose (reversal: fell; relative: vs the median asset), SELL the rest; or 1/N."""

    def __init__(
        self,
        bars: int,
        *,
        reversal: bool = False,
        relative: bool = False,
        kind: ActionKind = "discrete",
    ) -> None:
        self.name = " ".join(
            ["relative"] * relative + ["reversal" if reversal else "momentum", str(bars)]
        )
        self._bars, self._relative = bars, relative
        self._side = -1.0 if reversal else 1.0
        self.kind: ActionKind = kind

    def start(self, world: World, span: range) -> None:
        self._growth = world.growth

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        rise = self._growth[row] / self._growth[np.maximum(row - self._bars, 0)] - 1.0
        if self._relative:
            rise = rise - np.median(rise, axis=1, keepdims=True)
        wish = only_allowed(np.where(self._side * rise > 0.0, Action.BUY, Action.SELL), held)
        return wish if self.kind == "discrete" else np.asarray((wish == Action.BUY) / rise.shape[1])


def rules_of_thumb(bars: Sequence[int]) -> list[Policy]:
    """Momentum and reversal, of each asset by itself and relative to the median, over `bars`."""
    every = product((False, True), (False, True), bars)
    return [Rule(count, reversal=rev, relative=rel) for rel, rev, count in every]


def weighted_rules_of_thumb(market: PlantedSignal) -> list[Policy]:
    """The rules that fit the market's signal: momentum, reversal, or momentum among the assets."""
    reversal, relative = market.signal == "reversion", market.signal == "cross_section"
    every = (5, 10, 20, 40)
    return [Rule(bars, reversal=reversal, relative=relative, kind="weights") for bars in every]


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


RETURNS = "returns.npz"
SHOWN_RULES: Mapping[str, tuple[Rule, ...]] = {
    "trend": (Rule(10), Rule(20)),
    "reversion": (Rule(5, reversal=True), Rule(10, reversal=True)),
    "cross_section": (Rule(20, relative=True), Rule(60, relative=True)),
}
"""Rules of thumb that are shown next to the agent, by what is planted."""
TREND_BARS = (Bar("estimate", "at least", 0.85), Bar("low", "at least", 0.80))
OTHER_BARS = (Bar("low", "above", 0.0),)
EXPERT_BARS = (Bar("estimate", "at least", 0.80),)
"""Bars of the share of the Bayes filter's Sharpe ratio: the trend's and the other signals' where
agents buy, sell and hold; and where they say weights, of which the filter's are harder to reach."""
EXPERT_DRAWS = (16, 4)
"""Draws that an expert trains on, and on which its checkpoint is chosen."""


@dataclass(frozen=True)
class PlantedPart(TrainingPart):
    """One seed's training on a market with a planted signal, and its test.

    references: trade them too; they are the same for all seeds, so one part is enough
    claim_draws, claim_bars: draws kept for counting claims, and bars to trade in each
    own: see `EXPERT_DRAWS`
    """

    KEY = "planted-{0.market.signal}-{0.seed}"

    config: Config
    market: PlantedSignal
    seed: int
    n_draws: int
    references: bool = True
    claim_draws: int = 0
    claim_bars: int = 0
    own: tuple[int, int] = EXPERT_DRAWS

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        config = self.config
        own = own_draws(self.market, config, self.seed, self.own)
        worlds = own.with_unseen(self.market, self.n_draws, config)
        trained = self.train(config, worlds, directory, report, should_stop)
        if trained is None:
            return None
        references: list[Policy] = []
        if self.references:
            kind, signal = trained.policy.kind, self.market.signal
            by_weights = weighted_rules_of_thumb(self.market)
            shown = SHOWN_RULES[signal] if kind == "discrete" else by_weights
            references = [BayesFilter(self.market, kind), *shown]
        finding, traded = _test(trained, references, worlds, config)
        if self.claim_draws:
            # Keep the returns on the first validation draw and on the draws for claims.
            others = claim_draws(self.market, config, self.claim_draws, self.claim_bars)
            _, choosing, *rest = planted_worlds([own.train[0], own.valid[0], *others], config)
            claims = [last_bars(world, self.claim_bars) for world in rest]
            policy, buffer = trained.policy, io.BytesIO()
            valid = trade_draws(policy, [choosing], config).returns[:, 0]
            np.savez(buffer, valid=valid, claims=trade_draws(policy, claims, config).returns)
            write_atomic(directory / RETURNS, buffer.getvalue())
        turnover = {name: float(draws.turnover.mean()) for name, draws in traded.items()}
        return {"seed": self.seed, **finding, "turnover": turnover}


class OwnDraws(NamedTuple):
    """Draws that one seed learns from, and that choose its checkpoint."""

    train: list[Draw]
    valid: list[Draw]

    def with_unseen(self, market: PlantedSignal, count: int, config: Config) -> SeedWorlds:
        """The worlds of these, and of `count` draws that no seed has seen, the same for all."""
        unseen = [market.draw(k, "proof") for k in range(count)]
        worlds = planted_worlds([*self.train, *self.valid, *unseen], config)
        n_train, n_own = len(self.train), len(self.train) + len(self.valid)
        return SeedWorlds(worlds[:n_train], worlds[n_train:n_own], worlds[n_own:])


def own_draws(
    market: PlantedSignal,
    config: Config,
    seed: int,
    counts: tuple[int, int],
    valid_bars: int | None = None,
) -> OwnDraws:
    """Draws of one seed alone: one of each kind, `counts` of each for whoever says weights."""
    shorter = replace(market, n_bars=valid_bars or market.n_bars)
    if ALGORITHMS[config.train.algo].family == "flat":
        return OwnDraws([market.draw(seed, "train")], [shorter.draw(seed, "valid")])
    n_train, n_valid = counts
    return OwnDraws(
        [market.draw(1000 * seed + k, "trains") for k in range(n_train)],
        [shorter.draw(1000 * seed + k, "valids") for k in range(n_valid)],
    )


def _test(
    trained: Trained, references: Sequence[Policy], worlds: SeedWorlds, config: Config
) -> tuple[dict[str, Any], dict[str, TradedDraws]]:
    """Let an agent and references trade the test draws: (what is found of it, what they did)."""
    policies = {"agent": trained.policy} | {policy.name: policy for policy in references}
    traded = {name: trade_draws(policy, worlds.test, config) for name, policy in policies.items()}
    return {
        "kind": trained.policy.kind,
        "steps": trained.outcome.step,
        "best_step": trained.outcome.best_step,
        "sharpes": {name: draws.sharpes.tolist() for name, draws in traded.items()},
    }, traded


def claim_draws(market: PlantedSignal, config: Config, count: int, bars: int) -> list[Draw]:
    """Draws on which claims are counted: `bars` to trade, after warm-up and a window."""
    longer = replace(market, n_bars=WARMUP + config.window + bars)
    return [longer.draw(k, "proof claims") for k in range(count)]


def assess_planted(parts: Sequence[Done]) -> MarketResult:
    """The planted markets: the trend is held to its bars, the others inform."""
    by_signal: dict[str, list[Done]] = {}
    for part in parts:
        by_signal.setdefault(part.key.split("-")[1], []).append(part)
    checks, rows = [], {}
    by_weights = parts[0].finding.get("kind") == "weights"
    notes = ("planted_weights",) if by_weights else ("planted_others",) * (len(by_signal) > 1)
    for signal, done in by_signal.items():
        own_bars = TREND_BARS if signal == "trend" else OTHER_BARS
        bars = EXPERT_BARS if by_weights else own_bars
        # References trade in one of the parts: they are the same for all seeds.
        shared = {name: v for part in done for name, v in part.finding["sharpes"].items()}
        for name in ("agent", *(name for name in shared if name != "agent")):
            every = [part.finding["sharpes"].get(name, shared[name]) for part in done]
            rows[f"{signal}/{name}"] = [float(np.mean(sharpes)) for sharpes in every]
        shares = np.divide(rows[f"{signal}/agent"], rows[f"{signal}/bayes"]).tolist()
        checks.append(seed_check(f"{signal}_share", "share", shares, *bars))
    return MarketResult(
        name="planted",
        checks=tuple(checks),
        **time_spent(parts),
        facts={
            "seeds": sorted({part.finding["seed"] for part in parts}),
            "steps": max(part.finding["steps"] for part in parts),
            "draws": len(parts[0].finding["sharpes"]["agent"]),
            "best_steps": {part.key: part.finding["best_step"] for part in parts},
        },
        rows=rows,
        notes=notes,
    )


COSTLY_MARKET = PlantedMarket(drift=0.003, flip=0.04)
FEES = (5.0, 500.0)
"""Basis points a side: worth trading, and not."""
COSTLY_BAR = Bar("estimate", "at least", 0.50)
TURNOVER_BAR = Bar("estimate", "at most", 0.05)
_BUY_ABOVE = (0.5, 0.6, 0.7, 0.8, 0.9)
_SELL_BELOW = (0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class CostlyPart(TrainingPart):
    """One seed's training and test at one fee, fields as in `PlantedPart`."""

    KEY = "costly-{0.fee_bps:g}bp-{0.seed}"

    config: Config
    market: PlantedMarket
    fee_bps: float
    seed: int
    n_draws: int
    valid_bars: int
    references: bool = True
    own: tuple[int, int] = EXPERT_DRAWS

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        config = at_fee(self.config, self.fee_bps)
        own = own_draws(self.market, config, self.seed, self.own, self.valid_bars)
        worlds = own.with_unseen(self.market, self.n_draws, config)
        trained = self.train(config, worlds, directory, report, should_stop)
        if trained is None:
            return None
        filters: list[Policy] = []
        thresholds: tuple[float, ...] = ()
        kind = trained.policy.kind
        if self.references:
            shorter = replace(self.market, n_bars=self.valid_bars)
            thresholds = best_thresholds(shorter, worlds.valid, config, kind)
            chosen = ThresholdFilter(self.market, np.array([thresholds]), kind)
            filters = [BayesFilter(self.market, kind), chosen]
        finding, traded = _test(trained, filters, worlds, config)
        return {
            "seed": self.seed,
            "fee_bps": self.fee_bps,
            "thresholds": list(thresholds),
            **finding,
            "turnover": {name: draws.turnover.tolist() for name, draws in traded.items()},
        }


class ThresholdFilter:
    """BUY where the trend is surely enough up, SELL where it is surely enough down, else HOLD.

    By weights: 1/N bought or sold whole, and nothing in between.
    pairs[E,2]: buy above, sell below, of each book; one pair serves any number of books
    """

    name = "thresholds"

    def __init__(self, market: PlantedMarket, pairs: Floats, kind: ActionKind = "discrete") -> None:
        self._market = market
        self._buy_above, self._sell_below = pairs[:, :1], pairs[:, 1:]
        self.kind: ActionKind = kind

    def start(self, world: World, span: range) -> None:
        self._up = filter_each_draw(world, self._market.n_bars, self._market.probability_up)

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        """Compare with the thresholds; what is held already is not bought again by weight."""
        up = self._up[row]
        buys, sells = up > self._buy_above, up < self._sell_below
        if self.kind == "weights":
            share = 1.0 / held.weights.shape[1]
            buys &= held.weights < 0.5 * share
            return np.where(buys, share, np.where(sells, 0.0, np.nan))
        wish = np.where(sells, Action.SELL, Action.HOLD)
        return only_allowed(np.where(buys, Action.BUY, wish), held)


def best_thresholds(
    market: PlantedMarket, worlds: Sequence[World], config: Config, kind: ActionKind = "discrete"
) -> tuple[float, float]:
    """(buy above, sell below) with the highest growth over the test windows of all worlds."""
    pairs = list(product(_BUY_ABOVE, _SELL_BELOW))
    policy = ThresholdFilter(market, np.repeat(pairs, len(worlds), axis=0), kind)
    returns = trade_draws(policy, [*worlds] * len(pairs), config).returns
    growth = np.log1p(returns).sum(axis=0).reshape(len(pairs), len(worlds))
    return pairs[int(np.argmax(growth.sum(axis=1)))]


def assess_costly(parts: Sequence[Done]) -> MarketResult:
    """Both fees: the share at the low one, the turnover at the high one."""
    findings = [part.finding for part in parts]
    rows: dict[str, list[float]] = {}
    for finding in findings:
        for kind, name in product(("sharpes", "turnover"), finding["sharpes"]):
            key = f"{finding['fee_bps']:g}/{kind}/{name}"
            rows.setdefault(key, []).append(float(np.mean(finding[kind][name])))
    low, high = (f"{fee:g}" for fee in FEES)
    shares = np.divide(rows[f"{low}/sharpes/agent"], rows[f"{low}/sharpes/bayes"][0])
    # Seeds are compared with themselves; one that traded nothing at the low fee shows nothing.
    traded = np.maximum(rows[f"{low}/turnover/agent"], np.finfo(float).tiny)
    turnover = np.divide(rows[f"{high}/turnover/agent"], traded)
    return MarketResult(
        name="costly",
        checks=(
            seed_check("costly_share", "share", shares.tolist(), COSTLY_BAR),
            seed_check("costly_turnover", "share", turnover.tolist(), TURNOVER_BAR),
        ),
        **time_spent(parts),
        facts={
            "seeds": sorted({finding["seed"] for finding in findings}),
            "steps": {f"{f['fee_bps']:g}": f["steps"] for f in findings},
            "draws": len(findings[0]["sharpes"]["agent"]),
            "kind": findings[0].get("kind", "discrete"),
            "fees_bps": list(FEES),
            "thresholds": {
                f"{f['fee_bps']:g}": f["thresholds"] for f in findings if f["thresholds"]
            },
        },
        rows=rows,
        notes=("costly_weights",) if findings[0].get("kind") == "weights" else (),
    )
