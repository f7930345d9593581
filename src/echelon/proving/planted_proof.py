"""Planted: how much of what the optimal filter earns does the agent capture?

1. For each seed: a train and a validation draw of its own, and an agent trained on the first, its
   checkpoint chosen on the second. Experts, which learn from a replay of the past and would learn
   one path by heart, have several draws of each.
2. Test draws that no seed has seen, the same for all. Agent, Bayes filter and rules of thumb trade
   them under the same rules, costs and clock.
3. The score of a seed is the ratio of mean Sharpe ratios, agent over Bayes filter; over the seeds
   the mean and its interval.

The agents of the trend market also trade the draws on which the claims of the pipeline are
counted (see `null`): their returns there are kept next to the finding.

Costly: does the agent trade what is worth its costs, and leave alone what is not? The trend market
with signs that flip at 4 % of the bars: a trend of 25 bars is worth 5 basis points a side and not
nearly worth 500. An agent is trained and tested at each fee.

    at 5 bp     its share of the Bayes filter's Sharpe ratio
    at 500 bp   its turnover, as a share of what it trades at 5 bp

The filter buys above one half and sells below at any fee, as in the trend market. Next to it stands
the filter with the two thresholds that earned most on the seed's validation draws: what knowing
the fee is worth to a filter. Agents that say target weights are compared with filters that do:
1/N of the book in each asset above the hurdle of `planted`, rebalanced at every bar whatever that
costs; and 1/N bought above one threshold, sold below the other and left alone in between.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from echelon.proving.planted import (
    BayesFilter,
    FilterWeights,
    PlantedMarket,
    PlantedSignal,
    Rule,
    filter_each_draw,
    weighted_rules_of_thumb,
)
from echelon.proving.trial import (
    WARMUP,
    SeedWorlds,
    Trained,
    TrainingPart,
    at_fee,
    last_bars,
    trade_draws,
)
from echelon.proving.worlds import Draw, planted_worlds
from echelon.types import Floats
from echelon.workers import Report, ShouldStop

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
    own: draws of its own that an expert trains on, and on which its checkpoint is chosen
    """

    config: Config
    market: Any  # a Market, one of the dataclasses of `planted`
    seed: int
    n_draws: int
    references: bool = True
    claim_draws: int = 0
    claim_bars: int = 0
    own: tuple[int, int] = EXPERT_DRAWS

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"planted-{self.market.signal}-{self.seed}"

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train one agent and let it and the references trade the test draws."""
        market, config = self.market, self.config
        own = own_draws(market, config, self.seed, counts=self.own)
        worlds = own.with_unseen(market, self.n_draws, config)
        trained = self.train(config, worlds, directory, report, should_stop)
        if trained is None:
            return None
        policies: dict[str, Policy] = {"agent": trained.policy}
        if self.references:
            policies |= _references(market, trained.policy.kind)
        traded = {
            name: trade_draws(policy, worlds.test, config) for name, policy in policies.items()
        }
        if self.claim_draws:
            self._keep_returns(trained, own, directory)
        return {
            "seed": self.seed,
            "kind": trained.policy.kind,
            "steps": trained.outcome.step,
            "best_step": trained.outcome.best_step,
            "sharpes": {name: draws.sharpes.tolist() for name, draws in traded.items()},
            "turnover": {name: float(draws.turnover.mean()) for name, draws in traded.items()},
        }

    def _keep_returns(self, trained: Trained, own: OwnDraws, directory: Path) -> None:
        """Write the agent's returns on its first validation draw and on the draws for claims."""
        policy, config = trained.policy, self.config
        others = claim_draws(self.market, config, self.claim_draws, self.claim_bars)
        worlds = planted_worlds([own.train[0], own.valid[0], *others], config)
        claims = [last_bars(world, self.claim_bars) for world in worlds[2:]]
        valid = trade_draws(policy, worlds[1:2], config).returns[:, 0]
        buffer = io.BytesIO()
        np.savez(buffer, valid=valid, claims=trade_draws(policy, claims, config).returns)
        write_atomic(directory / RETURNS, buffer.getvalue())


class OwnDraws(NamedTuple):
    """Draws that one seed learns from, and that choose its checkpoint."""

    train: list[Draw]
    valid: list[Draw]

    def with_unseen(self, market: PlantedSignal, count: int, config: Config) -> SeedWorlds:
        """The worlds of these, and of `count` draws that no seed has seen, the same for all."""
        unseen = [market.draw(k, "proof") for k in range(count)]
        worlds = planted_worlds([*self.train, *self.valid, *unseen], config)
        return SeedWorlds.split(worlds, len(self.train), len(self.valid))


def own_draws(
    market: Any,  # noqa: ANN401 (one of the dataclasses of `planted`)
    config: Config,
    seed: int,
    valid_bars: int | None = None,
    counts: tuple[int, int] = EXPERT_DRAWS,
) -> OwnDraws:
    """Draws of one seed alone: one of each kind, several of each for whoever says weights.

    valid_bars: length of those for validation, if not the market's own
    counts: how many an expert has of each kind
    """
    shorter = replace(market, n_bars=valid_bars or market.n_bars)
    if ALGORITHMS[config.train.algo].family == "flat":
        return OwnDraws([market.draw(seed, "train")], [shorter.draw(seed, "valid")])
    n_train, n_valid = counts
    return OwnDraws(
        [market.draw(1000 * seed + k, "trains") for k in range(n_train)],
        [shorter.draw(1000 * seed + k, "valids") for k in range(n_valid)],
    )


def _references(market: Any, kind: ActionKind) -> dict[str, Policy]:  # noqa: ANN401
    """The filter and the rules of thumb, acting in the way the agent does."""
    if kind == "discrete":
        policies: list[Policy] = [BayesFilter(market), *SHOWN_RULES[market.signal]]
    else:
        policies = [FilterWeights(market), *weighted_rules_of_thumb(market)]
    return {policy.name: policy for policy in policies}


def claim_draws(market: Any, config: Config, count: int, bars: int) -> list[Draw]:  # noqa: ANN401
    """Draws on which claims are counted: `bars` to trade, after warm-up and a window."""
    longer = replace(market, n_bars=WARMUP + config.window + bars)
    return [longer.draw(k, "proof claims") for k in range(count)]


@dataclass(frozen=True)
class SeedScore:
    """One seed: Sharpe ratios[D] of agent and references on the test draws, by name."""

    seed: int
    best_step: int
    sharpes: Mapping[str, Floats]

    @staticmethod
    def from_parts(parts: Sequence[Done]) -> list[SeedScore]:
        """From what the parts of one market found; the references are in one of them."""
        every = {k: v for part in parts for k, v in part.finding["sharpes"].items()}
        shared = {name: np.array(v) for name, v in every.items() if name != "agent"}
        return [
            SeedScore(
                part.finding["seed"],
                part.finding["best_step"],
                {"agent": np.array(part.finding["sharpes"]["agent"]), **shared},
            )
            for part in parts
        ]

    def share(self, name: str = "agent") -> float:
        """Ratio of mean Sharpe ratios to the Bayes filter's."""
        return float(self.sharpes[name].mean() / self.sharpes["bayes"].mean())


def assess_planted(parts: Sequence[Done]) -> MarketResult:
    """The planted markets: the trend is held to its bars, the others inform."""
    by_signal: dict[str, list[Done]] = {}
    for part in parts:
        by_signal.setdefault(part.key.split("-")[1], []).append(part)
    checks, rows = [], {}
    by_weights = parts[0].finding.get("kind") == "weights"
    notes = ("planted_weights",) if by_weights else ("planted_others",) * (len(by_signal) > 1)
    for signal, done in by_signal.items():
        scores = SeedScore.from_parts(done)
        bars = TREND_BARS if signal == "trend" else OTHER_BARS
        if by_weights:
            bars = EXPERT_BARS
        checks.append(seed_check(f"{signal}_share", "share", [s.share() for s in scores], *bars))
        for name in scores[0].sharpes:
            rows[f"{signal}/{name}"] = [float(s.sharpes[name].mean()) for s in scores]
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
    """One seed's training and test at one fee.

    valid_bars: length of the validation draw
    references: trade the filters too; one part a fee is enough
    own: draws of its own that an expert trains on, and on which its checkpoint is chosen
    """

    config: Config
    market: PlantedMarket
    fee_bps: float
    seed: int
    n_draws: int
    valid_bars: int
    references: bool = True
    own: tuple[int, int] = EXPERT_DRAWS

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"costly-{self.fee_bps:g}bp-{self.seed}"

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train one agent at the fee; let it and the filters trade the test draws at it."""
        config = at_fee(self.config, self.fee_bps)
        own = own_draws(self.market, config, self.seed, self.valid_bars, self.own)
        worlds = own.with_unseen(self.market, self.n_draws, config)
        trained = self.train(config, worlds, directory, report, should_stop)
        if trained is None:
            return None
        policies: dict[str, Policy] = {"agent": trained.policy}
        thresholds: tuple[float, ...] = ()
        kind = trained.policy.kind
        if self.references:
            shorter = replace(self.market, n_bars=self.valid_bars)
            thresholds = best_thresholds(shorter, worlds.valid, config, kind)
            bayes = BayesFilter if kind == "discrete" else FilterWeights
            policies["bayes"] = bayes(self.market)
            policies["thresholds"] = threshold_filter(self.market, np.array([thresholds]), kind)
        traded = {
            name: trade_draws(policy, worlds.test, config) for name, policy in policies.items()
        }
        return {
            "seed": self.seed,
            "kind": kind,
            "fee_bps": self.fee_bps,
            "steps": trained.outcome.step,
            "best_step": trained.outcome.best_step,
            "thresholds": list(thresholds),
            "sharpes": {name: draws.sharpes.tolist() for name, draws in traded.items()},
            "turnover": {name: draws.turnover.tolist() for name, draws in traded.items()},
        }


class ThresholdFilter:
    """BUY where the trend is surely enough up, SELL where it is surely enough down, else HOLD."""

    kind: ActionKind = "discrete"
    name = "thresholds"

    def __init__(self, market: PlantedMarket, pairs: Floats) -> None:
        """pairs[E,2]: buy above, sell below, of each book; one pair serves any number of books."""
        self._market = market
        self._buy_above, self._sell_below = pairs[:, :1], pairs[:, 1:]

    def start(self, world: World, span: range) -> None:
        """Run the filter over the closes of each draw; row t of it knows those up to t."""
        self._up = filter_each_draw(world, self._market.n_bars, self._market.probability_up)

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        """Compare with the thresholds."""
        up = self._up[row]
        wish = np.where(up < self._sell_below, Action.SELL, Action.HOLD)
        return only_allowed(np.where(up > self._buy_above, Action.BUY, wish), held)


class ThresholdWeights(ThresholdFilter):
    """The same by target weights: 1/N bought or sold whole, and nothing in between."""

    kind: ActionKind = "weights"

    def decide(self, row: Rows, held: Holdings) -> Floats:  # type: ignore[override]
        """Compare with the thresholds; what is held already is not bought again."""
        up, share = self._up[row], 1.0 / held.weights.shape[1]
        buys = (up > self._buy_above) & (held.weights < 0.5 * share)
        return np.where(buys, share, np.where(up < self._sell_below, 0.0, np.nan))


def threshold_filter(market: PlantedMarket, pairs: Floats, kind: ActionKind) -> Policy:
    """The filter with thresholds that acts in the way of `kind`; pairs as it takes them."""
    return (ThresholdFilter if kind == "discrete" else ThresholdWeights)(market, pairs)


def best_thresholds(
    market: PlantedMarket, worlds: Sequence[World], config: Config, kind: ActionKind = "discrete"
) -> tuple[float, float]:
    """(buy above, sell below) with the highest growth over the test windows of all worlds."""
    pairs = list(product(_BUY_ABOVE, _SELL_BELOW))
    policy = threshold_filter(market, np.repeat(pairs, len(worlds), axis=0), kind)
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
