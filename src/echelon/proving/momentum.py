"""Does the agent learn? Train it on one draw of the planted market, test it on others.

1. For each seed: a train and a validation draw of its own, and an agent trained on the first, its
   checkpoint chosen on the second.
2. Test draws that no seed has seen, the same for all. Agent, Bayes filter and momentum rules trade
   them under the same rules, costs and clock.
3. The score of a seed is the ratio of mean Sharpe ratios, agent over Bayes filter; over the seeds
   the mean and Student's t-interval (a percentile bootstrap over five seeds claims too often).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from echelon.agents.jobs import JobResults, Report, ShouldStop, run_jobs
from echelon.agents.policy import ActorPolicy
from echelon.agents.training import Progress, Training, Worlds
from echelon.backtest.baselines import Momentum
from echelon.backtest.policy import Policy
from echelon.backtest.run import run_values
from echelon.config import Config
from echelon.config.features import FeaturesConfig, StationaryConfig
from echelon.envs.world import World
from echelon.models import build_actor_critic
from echelon.ops.measures import sharpe_annual
from echelon.proving.planted import BayesFilter, PlantedMarket, joined, planted_worlds
from echelon.runs.checkpoint import below_prefix, load_checkpoint
from echelon.types import Floats

RULES = (10, 20)
"""Bars of the momentum rules that are shown beside the agent."""


@dataclass(frozen=True)
class MomentumJob:
    """One seed's training and test."""

    config: Config
    market: PlantedMarket
    directory: Path
    seed: int
    n_draws: int


@dataclass(frozen=True)
class SeedScore:
    """One seed: Sharpe ratios[D] of agent and references on the test draws, by name."""

    seed: int
    best_step: int
    sharpes: Mapping[str, Floats]

    def share(self, name: str = "agent") -> float:
        """Ratio of mean Sharpe ratios to the Bayes filter's."""
        return float(self.sharpes[name].mean() / self.sharpes["bayes"].mean())


@dataclass(frozen=True)
class Verdict:
    """Over seeds: mean share of the Bayes filter's Sharpe ratio, and its t-interval at 95 %."""

    shares: tuple[float, ...]
    mean: float
    low: float
    high: float

    @staticmethod
    def of(shares: Sequence[float]) -> Verdict:
        """From the seeds' shares; without an interval for a single one."""
        mean = float(np.mean(shares))
        if len(shares) < 2:
            return Verdict(tuple(shares), mean, math.nan, math.nan)
        error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares))
        reach = float(stats.t.ppf(0.975, len(shares) - 1)) * error
        return Verdict(tuple(shares), mean, mean - reach, mean + reach)


def proof_config(config: Config) -> Config:
    """The configuration on the planted market: its assets, and features that hold on any draw.

    Levels of prices mean nothing from one draw to the next, so the stationary set is used.
    """
    features = FeaturesConfig(stationary=StationaryConfig(enabled=True))
    return config.model_copy(update={"assets": (), "features": features})


def prove_momentum(
    config: Config,
    directory: Path,
    *,
    seeds: Sequence[int],
    n_draws: int = 16,
    workers: int = 1,
    market: PlantedMarket | None = None,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> JobResults[SeedScore]:
    """Train and test every seed; checkpoints and logs go to `directory`/SEED."""
    planted = market or PlantedMarket()
    tuned = proof_config(config)
    jobs = [MomentumJob(tuned, planted, directory, seed, n_draws) for seed in seeds]

    def pass_on(_job: int, message: object) -> None:
        assert isinstance(message, Progress)
        on_progress(message)

    return run_jobs(prove_seed, jobs, workers=workers, on_report=pass_on)


def prove_seed(job: MomentumJob, report: Report, should_stop: ShouldStop) -> SeedScore:
    """Train one agent and let it and the references trade the test draws."""
    market, config = job.market, job.config
    own = [market.draw(job.seed, "train"), market.draw(job.seed, "valid")]
    unseen = [market.draw(k, "unseen") for k in range(job.n_draws)]
    train, valid, *tests = planted_worlds([*own, *unseen], config)
    training = Training(
        config,
        Worlds(train, valid, f"planted-{job.seed}"),
        job.directory / "seeds" / str(job.seed),
        job.seed,
    )
    outcome = training.run(report, should_stop)
    best = load_checkpoint(training.checkpoints / "best")
    net = build_actor_critic(config, train.x.shape[2])
    net.load_state_dict(below_prefix("net.", best.tensors))
    policies: dict[str, Policy] = {
        "agent": ActorPolicy(net, config, job.seed),
        "bayes": BayesFilter(market),
        **{f"momentum {bars}": Momentum(bars) for bars in RULES},
    }
    sharpes = {name: sharpes_on(policy, tests, config) for name, policy in policies.items()}
    return SeedScore(job.seed, outcome.best_step, sharpes)


def sharpes_on(policy: Policy, draws: Sequence[World], config: Config) -> Floats:
    """[D] annual Sharpe ratio of a policy on each draw; all draws are stepped together."""
    together, starts = joined(draws)
    n_steps = len(draws[0].span("test")) - 1
    value = run_values(policy, together, starts, n_steps, config)
    returns = value[1:] / value[:-1] - 1.0
    rate = together.periods_per_year
    return np.array([sharpe_annual(returns[:, d], rate) for d in range(len(draws))])
