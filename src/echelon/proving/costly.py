"""Costly: does the agent trade what is worth its costs, and leave alone what is not?

The trend market with signs that flip at 4 % of the bars: a trend of 25 bars is worth 5 basis
points a side and not nearly worth 500. An agent is trained and tested at each fee.

    at 5 bp     its share of the Bayes filter's Sharpe ratio
    at 500 bp   its turnover, as a share of what it trades at 5 bp

The filter buys above one half and sells below at any fee, as in the trend market. Beside it stands
the filter with the two thresholds that earned most on the seed's validation draws: what knowing
the fee is worth to a filter. Agents that say target weights are compared with filters that do:
1/N of the book in each asset above the hurdle of `continuous`, rebalanced at every bar whatever
that costs; and 1/N bought above one threshold, sold below the other and left alone in between.
Experts train on several draws, as in the trend market (see `capture`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.agents.jobs import Report, ShouldStop
from echelon.backtest.baselines import only_allowed
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.envs.act import Action, ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.proving.certificate import Bar, MarketResult, over_seeds
from echelon.proving.continuous import continuous_reference
from echelon.proving.parts import Done, Finding
from echelon.proving.planted import PlantedMarket, planted_worlds, reference
from echelon.proving.planted_proof import EXPERT_DRAWS, own_draws
from echelon.proving.trial import trade, train_agent
from echelon.proving.worlds import together
from echelon.training.learners import Worlds
from echelon.types import Floats

MARKET = PlantedMarket(drift=0.003, flip=0.04)
FEES = (5.0, 500.0)
"""Basis points a side: worth trading, and not."""
SHARE_BAR = Bar("estimate", "at least", 0.50)
TURNOVER_BAR = Bar("estimate", "at most", 0.05)
_BUY_ABOVE = (0.5, 0.6, 0.7, 0.8, 0.9)
_SELL_BELOW = (0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class CostlyPart:
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

    @property
    def steps(self) -> int:
        """Of one training."""
        return self.config.train.total_env_steps

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train one agent at the fee; let it and the filters trade the test draws at it."""
        config = at_fee(self.config, self.fee_bps)
        own = own_draws(self.market, config, self.seed, self.valid_bars, self.own)
        unseen = [self.market.draw(k, "proof") for k in range(self.n_draws)]
        worlds = planted_worlds([*own.train, *own.valid, *unseen], config)
        n_train, n_own = len(own.train), len(own.train) + len(own.valid)
        train, valid, tests = worlds[:n_train], worlds[n_train:n_own], worlds[n_own:]
        trained = train_agent(
            config,
            Worlds(together(train), together(valid), self.key),
            directory / "seeds" / str(self.seed),
            self.seed,
            report,
            should_stop,
        )
        if trained is None:
            return None
        policies: dict[str, Policy] = {"agent": trained.policy}
        thresholds: tuple[float, ...] = ()
        kind = trained.policy.kind
        if self.references:
            shorter = replace(self.market, n_bars=self.valid_bars)
            thresholds = best_thresholds(shorter, valid, config, kind)
            plain = reference if kind == "discrete" else continuous_reference
            policies["bayes"] = plain(self.market)
            policies["thresholds"] = threshold_filter(self.market, np.array([thresholds]), kind)
        done = {name: trade(policy, tests, config) for name, policy in policies.items()}
        return {
            "seed": self.seed,
            "kind": kind,
            "fee_bps": self.fee_bps,
            "steps": trained.outcome.step,
            "best_step": trained.outcome.best_step,
            "thresholds": list(thresholds),
            "sharpes": {name: traded.sharpes.tolist() for name, traded in done.items()},
            "turnover": {name: traded.turnover.tolist() for name, traded in done.items()},
        }


def at_fee(config: Config, fee_bps: float) -> Config:
    """The configuration with a fee per side and no other cost."""
    market = config.market.model_copy(
        update={
            "commission_bps": None,
            "min_commission": 0.0,
            "stamp_duty": "none",
            "slippage": "none",
        }
    )
    return config.model_copy(update={"fee_rate": fee_bps / 1e4, "market": market})


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
        close, length = world.rows.close, self._market.n_bars
        draws = np.split(close, range(length, len(close), length))
        self._up = np.concatenate([self._market.filtered(draw) for draw in draws])

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
    returns = trade(policy, [*worlds] * len(pairs), config).returns
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
            over_seeds("costly_share", "share", shares.tolist(), SHARE_BAR),
            over_seeds("costly_turnover", "share", turnover.tolist(), TURNOVER_BAR),
        ),
        seconds=sum(part.seconds for part in parts),
        cpu_seconds=sum(part.cpu_seconds for part in parts),
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
