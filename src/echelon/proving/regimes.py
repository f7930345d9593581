"""Regime: can what is hidden from an agent be found in returns?

1. The references trade draws and their mirrors (see `regime_references`). A pair's Sharpe ratio is
   the mean of both. Who chooses between the experts by what they earned must beat every rule that
   does not, in the sense of the interval over pairs.
2. Flat agents, in the full mode: one that sees x alone, which can earn nothing over a pair, and one
   that is also shown what a router sees. Neither is held to a bar: they say that the advantage is
   information. Neither sees its holdings, which drift with returns and would give the regime away.
   Experts, which would learn one path by heart, have several mirrored pairs to learn from, and one
   that chooses their checkpoint.

The hierarchy is proved in `hierarchies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from echelon.agents.jobs import Report, ShouldStop
from echelon.config import Config
from echelon.config.agents import StateConfig
from echelon.config.algorithms import ALGORITHMS
from echelon.ops.measures import sharpe_annual
from echelon.proving.certificate import Bar, Check, MarketResult, over_seeds
from echelon.proving.costly import at_fee
from echelon.proving.parts import Done, Finding
from echelon.proving.regime import RegimeDraw, RegimeMarket, regime_worlds
from echelon.proving.regime_references import router_view, run_references
from echelon.proving.trial import YEAR, trade, train_agent
from echelon.proving.worlds import together
from echelon.training.learners import Worlds
from echelon.types import Floats

FEE_BPS = 5.0
BLIND = ("equal weight", "follow", "oppose")
"""References that do not look at what was earned."""
CHOOSING = ("trailing 40", "fixed-share hedge", "regime filter")
"""References that do."""
ADVANTAGE_BAR = Bar("low", "above", 0.0)
EXPERT_PAIRS = (4, 1)
"""Mirrored pairs that an expert trains on, and on which its checkpoint is chosen."""


@dataclass(frozen=True)
class RegimePart:
    """All references on mirrored pairs."""

    config: Config
    market: RegimeMarket
    n_pairs: int

    @property
    def key(self) -> str:
        """Where it is kept."""
        return "regime-references"

    @property
    def steps(self) -> int:
        """None: nothing is trained."""
        return 0

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Let the references trade."""
        draws = self.market.pairs(self.n_pairs, "test")
        found = run_references(self.market, draws, at_fee(self.config, FEE_BPS))
        sharpes = {name: by_pair(returns) for name, returns in found.items()}
        return {"sharpes": sharpes}


@dataclass(frozen=True)
class RegimeAgentPart:
    """One flat agent; shown: whether it sees what a router sees."""

    config: Config
    market: RegimeMarket
    n_pairs: int
    seed: int
    shown: bool

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"regime-{'shown' if self.shown else 'flat'}-{self.seed}"

    @property
    def steps(self) -> int:
        """Of one training."""
        return self.config.train.total_env_steps

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train on draws of its own, choose on others, trade the test pairs."""
        blind = StateConfig(include_pos=False, include_cash=False)
        config = at_fee(self.config, FEE_BPS).model_copy(update={"state": blind})
        train, valid = own_draws(self.market, config, self.seed)
        draws = [*train, *valid, *self.market.pairs(self.n_pairs, "test")]
        view = router_view(draws, config) if self.shown else None
        worlds = regime_worlds(draws, config, shown=view)
        first = len(train) + len(valid)
        trained = train_agent(
            config,
            Worlds(together(worlds[: len(train)]), together(worlds[len(train) : first]), self.key),
            directory / "seeds" / str(self.seed),
            self.seed,
            report,
            should_stop,
        )
        if trained is None:
            return None
        return {
            "seed": self.seed,
            "steps": trained.outcome.step,
            "sharpes": by_pair(trade(trained.policy, worlds[first:], config).returns),
        }


class Own(NamedTuple):
    """Draws that one seed learns from, and that choose its checkpoint."""

    train: list[RegimeDraw]
    valid: list[RegimeDraw]


def own_draws(market: RegimeMarket, config: Config, seed: int) -> Own:
    """Draws of one seed alone: one of each kind, mirrored pairs of each for who says weights."""
    if ALGORITHMS[config.train.algo].family == "flat":
        return Own([market.draw(seed, "train")], [market.draw(seed, "valid")])
    n_train, n_valid = EXPERT_PAIRS
    return Own(
        market.pairs(n_train, "trains", 1_000 * seed), market.pairs(n_valid, "valids", 1_000 * seed)
    )


def by_pair(returns: Floats) -> list[float]:
    """[P] mean annual Sharpe ratio of each draw and its mirror; returns[S,2·P] in turn."""
    sharpes = np.array([sharpe_annual(series, YEAR) for series in returns.T])
    return [float(s) for s in sharpes.reshape(-1, 2).mean(axis=1)]


def assess_regime(references: Done, agents: Sequence[Done]) -> MarketResult:
    """Each of those that choose, less the best in each pair of those that do not."""
    sharpes: Mapping[str, list[float]] = references.finding["sharpes"]
    best = np.max([sharpes[name] for name in BLIND], axis=0)
    checks: list[Check] = [
        over_seeds(f"regime_{name}", "sharpe", (sharpes[name] - best).tolist(), ADVANTAGE_BAR)
        for name in CHOOSING
    ]
    rows = {name: list(values) for name, values in sharpes.items()}
    for kind in ("flat", "shown"):
        found = [p.finding["sharpes"] for p in agents if p.key.startswith(f"regime-{kind}")]
        if found:
            rows[f"{kind} agent"] = np.mean(found, axis=0).tolist()
            checks.append(over_seeds(f"regime_{kind}_agent", "sharpe", rows[f"{kind} agent"]))
    parts = [references, *agents]
    return MarketResult(
        name="regime",
        checks=tuple(checks),
        seconds=sum(part.seconds for part in parts),
        cpu_seconds=sum(part.cpu_seconds for part in parts),
        facts={
            "pairs": len(best),
            "seeds": sorted({p.finding["seed"] for p in agents}),
            "steps": max((p.finding["steps"] for p in agents), default=0),
            "fee_bps": FEE_BPS,
        },
        rows=rows,
        notes=("regime_information", "regime_agents" if agents else "regime_references_only"),
    )
