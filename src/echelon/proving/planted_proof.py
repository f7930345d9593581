"""Planted: how much of what the optimal filter earns does the agent capture?

1. For each seed: a train and a validation draw of its own, and an agent trained on the first, its
   checkpoint chosen on the second. Experts, which learn from a replay of the past and would learn
   one path by heart, have several draws of each.
2. Test draws that no seed has seen, the same for all. Agent, Bayes filter and rules of thumb trade
   them under the same rules, costs and clock.
3. The score of a seed is the ratio of mean Sharpe ratios, agent over Bayes filter; over the seeds
   the mean and its interval.

The agents of the trend market also trade the draws on which the claims of the pipeline are
counted (see `claims`): their returns there are kept beside the finding.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon.agents.jobs import Report, ShouldStop
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.config.algorithms import ALGORITHMS
from echelon.envs.act import ActionKind
from echelon.files import write_atomic
from echelon.proving.certificate import Bar, MarketResult, over_seeds
from echelon.proving.continuous import continuous_reference, weighted_rules_of_thumb
from echelon.proving.parts import Done, Finding
from echelon.proving.planted import Draw, Rule, planted_worlds, reference
from echelon.proving.trial import WARMUP, Trained, last_bars, trade, train_agent
from echelon.proving.worlds import together
from echelon.training.learners import Worlds
from echelon.types import Floats

RETURNS = "returns.npz"
BESIDE: Mapping[str, tuple[Rule, ...]] = {
    "trend": (Rule(10), Rule(20)),
    "reversion": (Rule(5, reversal=True), Rule(10, reversal=True)),
    "cross_section": (Rule(20, relative=True), Rule(60, relative=True)),
}
"""Rules of thumb that are shown beside the agent, by what is planted."""
TREND_BARS = (Bar("estimate", "at least", 0.85), Bar("low", "at least", 0.80))
OTHER_BARS = (Bar("low", "above", 0.0),)
EXPERT_BARS = (Bar("estimate", "at least", 0.80),)
"""Bars of the share of the Bayes filter's Sharpe ratio: the trend's and the other signals' where
agents buy, sell and hold; and where they say weights, of which the filter's are harder to reach."""
EXPERT_DRAWS = (16, 4)
"""Draws that an expert trains on, and on which its checkpoint is chosen."""


@dataclass(frozen=True)
class PlantedPart:
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

    @property
    def steps(self) -> int:
        """Of one training."""
        return self.config.train.total_env_steps

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Train one agent and let it and the references trade the test draws."""
        market, config = self.market, self.config
        own = own_draws(market, config, self.seed, counts=self.own)
        unseen = [market.draw(k, "proof") for k in range(self.n_draws)]
        worlds = planted_worlds([*own.train, *own.valid, *unseen], config)
        first = len(own.train) + len(own.valid)
        trained = train_agent(
            config,
            Worlds(
                together(worlds[: len(own.train)]),
                together(worlds[len(own.train) : first]),
                f"planted-{market.signal}-{self.seed}",
            ),
            directory / "seeds" / str(self.seed),
            self.seed,
            report,
            should_stop,
        )
        if trained is None:
            return None
        policies: dict[str, Policy] = {"agent": trained.policy}
        if self.references:
            policies |= _references(market, trained.policy.kind)
        done = {name: trade(policy, worlds[first:], config) for name, policy in policies.items()}
        if self.claim_draws:
            self._keep_returns(trained, own, directory)
        return {
            "seed": self.seed,
            "kind": trained.policy.kind,
            "steps": trained.outcome.step,
            "best_step": trained.outcome.best_step,
            "sharpes": {name: traded.sharpes.tolist() for name, traded in done.items()},
            "turnover": {name: float(traded.turnover.mean()) for name, traded in done.items()},
        }

    def _keep_returns(self, trained: Trained, own: Own, directory: Path) -> None:
        """Write the agent's returns on its first validation draw and on the draws for claims."""
        others = claim_draws(self.market, self.config, self.claim_draws, self.claim_bars)
        worlds = planted_worlds([own.train[0], own.valid[0], *others], self.config)
        claims = [last_bars(world, self.claim_bars) for world in worlds[2:]]
        valid = trade(trained.policy, worlds[1:2], self.config).returns[:, 0]
        buffer = io.BytesIO()
        np.savez(buffer, valid=valid, claims=trade(trained.policy, claims, self.config).returns)
        write_atomic(directory / RETURNS, buffer.getvalue())


class Own(NamedTuple):
    """Draws that one seed learns from, and that choose its checkpoint."""

    train: list[Draw]
    valid: list[Draw]


def own_draws(
    market: Any,  # noqa: ANN401 (one of the dataclasses of `planted`)
    config: Config,
    seed: int,
    valid_bars: int | None = None,
    counts: tuple[int, int] = EXPERT_DRAWS,
) -> Own:
    """Draws of one seed alone: one of each kind, several of each for whoever says weights.

    valid_bars: length of those for validation, if not the market's own
    counts: how many an expert has of each kind
    """
    shorter = replace(market, n_bars=valid_bars or market.n_bars)
    if ALGORITHMS[config.train.algo].family == "flat":
        return Own([market.draw(seed, "train")], [shorter.draw(seed, "valid")])
    n_train, n_valid = counts
    return Own(
        [market.draw(1000 * seed + k, "trains") for k in range(n_train)],
        [shorter.draw(1000 * seed + k, "valids") for k in range(n_valid)],
    )


def _references(market: Any, kind: ActionKind) -> dict[str, Policy]:  # noqa: ANN401
    """The filter and the rules of thumb, acting in the way the agent does."""
    if kind == "discrete":
        found: list[Policy] = [reference(market), *BESIDE[market.signal]]
    else:
        found = [continuous_reference(market), *weighted_rules_of_thumb(market)]
    return {policy.name: policy for policy in found}


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
    def all_of(parts: Sequence[Done]) -> list[SeedScore]:
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
    found: dict[str, list[Done]] = {}
    for part in parts:
        found.setdefault(part.key.split("-")[1], []).append(part)
    checks, rows = [], {}
    by_weights = parts[0].finding.get("kind") == "weights"
    notes = ("planted_weights",) if by_weights else ("planted_others",) * (len(found) > 1)
    for signal, done in found.items():
        scores = SeedScore.all_of(done)
        bars = TREND_BARS if signal == "trend" else OTHER_BARS
        if by_weights:
            bars = EXPERT_BARS
        checks.append(over_seeds(f"{signal}_share", "share", [s.share() for s in scores], *bars))
        for name in scores[0].sharpes:
            rows[f"{signal}/{name}"] = [float(s.sharpes[name].mean()) for s in scores]
    return MarketResult(
        name="planted",
        checks=tuple(checks),
        seconds=sum(part.seconds for part in parts),
        cpu_seconds=sum(part.cpu_seconds for part in parts),
        facts={
            "seeds": sorted({part.finding["seed"] for part in parts}),
            "steps": max(part.finding["steps"] for part in parts),
            "draws": len(parts[0].finding["sharpes"]["agent"]),
            "best_steps": {part.key: part.finding["best_step"] for part in parts},
        },
        rows=rows,
        notes=notes,
    )
