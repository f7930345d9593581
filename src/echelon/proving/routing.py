"""Routing: does a router over fixed rules learn more than the fixed-share rule knows?

On the regime market (`regime`), in three forms; nobody but the router learns anything:

    steady    regimes flip at one rate: the rule is nearly the exact filter, little is to be learned
    rates     the rate changes: what was a good memory becomes too long or too short
    hint      so it does, and a series shows the regime, in noise, before returns can: the router
              sees it as a macro series (`meta_router.macro`), the rule does not

The experts are fixed: two that are right in one regime each, and three that are never. The router
learns on mirrored pairs of its own and trades test pairs that are the same for all seeds, next to
the fixed-share rule over the same experts and the exact filter, which knows the market's numbers.

Axes: `D` draws, `P` pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.config import Config, override_config
from echelon.envs.world import World
from echelon.population.meta_env import MetaEnv
from echelon.population.policy import HierarchyPolicy
from echelon.population.reference_policies import HEDGE
from echelon.population.router import Router
from echelon.proving.parts import Finding, Part
from echelon.proving.regime import (
    EQUAL,
    FOLLOW,
    OPPOSE,
    TILT,
    RegimeDraw,
    RegimeMarket,
    RegimeSetting,
    TiltedWeights,
    by_pair,
    regime_worlds,
    run_references,
)
from echelon.proving.worlds import Arena, join_worlds, trade_draws
from echelon.types import Floats
from echelon.workers import Report, ShouldStop

Form = Literal["steady", "rates", "hint"]
FORMS: dict[Form, RegimeMarket] = {
    "steady": RegimeMarket(),
    "rates": RegimeMarket(flip=1 / 1200, fast_flip=1 / 60, turns=1 / 800),
    "hint": RegimeMarket(flip=1 / 1200, fast_flip=1 / 60, turns=1 / 800, lead=1.0),
}
_NO_RISK = ("risk.enabled=false",)  # masks would tell what the rule is not told


class _Size(TiltedWeights):
    """What moved much, either way: right in no regime."""

    def weights(self, x: NDArray[np.floating]) -> Floats:
        """[T,N] of x[T,N]."""
        return super().weights(np.abs(x))


class _Half(TiltedWeights):
    """The first half of the assets, whatever they show."""

    def weights(self, x: NDArray[np.floating]) -> Floats:
        """[T,N] of x[T,N]."""
        return super().weights(np.broadcast_to(np.arange(x.shape[1]) < x.shape[1] / 2, x.shape))


def fixed_experts() -> list[Policy]:
    """Right in one regime, in the other, and in none."""
    return [FOLLOW, OPPOSE, EQUAL, _Size("size", TILT), _Half("half", TILT)]


@dataclass(frozen=True)
class RoutingPart(Part):
    """A router of one seed on one form of the market. counts: pairs to learn from and to trade"""

    config: Config
    form: Form
    seed: int
    decisions: int = 76_800
    counts: tuple[int, int] = (4, 4)
    names: tuple[str, str] = ("routed trains", "routed test")

    @property
    def key(self) -> str:
        return f"routing-{self.form}-{self.seed}"

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        market = FORMS[self.form]
        seen = (f"meta_router.macro={int(market.lead > 0.0)}",)
        train = market.pairs(self.counts[0], self.names[0], 1_000 * self.seed)
        test = market.pairs(self.counts[1], self.names[1])
        setting = RegimeSetting(override_config(self.config, [*_NO_RISK, *seen]), train, [], test)
        config, experts = setting.config, fixed_experts()
        router = Router(config, len(experts), self.seed)
        world, _ = join_worlds(hinted_worlds(train, config))
        env = MetaEnv(experts, world, world.spans("train"), config, self.seed)
        metrics = router.learn(env, self.decisions, 0) if self.decisions else {}
        policy = HierarchyPolicy(experts, router, config, self.seed, keep_record=False)
        arena = Arena.from_draws(hinted_worlds(test, config))
        known = run_references(market, test, config)
        traded = {
            "router": trade_draws(policy, arena, config).returns,
            "hedge": trade_draws(policy.reference_policies()[HEDGE], arena, config).returns,
            "filter": known["regime filter"],
        }
        return {
            "seed": self.seed,
            "decisions": router.decisions,
            "kl_prior": metrics.get("router/kl_prior"),
            "sharpes": {name: by_pair(returns) for name, returns in traded.items()},
        }


def hinted_worlds(draws: Sequence[RegimeDraw], config: Config) -> list[World]:
    """Worlds whose last feature is the hint, where the router sees one."""
    shown = [draw.hint[:, None] for draw in draws] if config.meta_router.macro else None
    return regime_worlds(draws, config, shown=shown)
