"""Proofs of execution: what the learners make of markets whose answer is known.

    impact     cost of the learned schedule over the closed form's, at most 1.05
    grid       the same for fractions of the order, against dynamic programming on their own grid
    drift      gain over TWAP on days never seen, an interval above zero
    distilled  gain of the distilled student over plain PPO, same steps, an interval above zero
    null       gain over TWAP where nothing is to be known: within 2 SE of 0, with SE <= 0.3 bp

Every seed has train days, test days and weights of its own. Settings were chosen on draws named
"development" with seeds from 100; what is reported is on draws named "test" with seeds from 0.

Axes: `S` seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from echelon.agents.execution import (
    DQN,
    PPO,
    DistillSettings,
    DQNSettings,
    NetworkSettings,
    PPOSettings,
    Student,
    teacher_of,
)
from echelon.agents.execution.learner import ExecutionLearner
from echelon.evaluation.statistics.seeds import seed_interval
from echelon.execution.act import QLIB_FRACTIONS
from echelon.execution.metrics import measure_orders
from echelon.execution.policies import ExecutionPolicy, run_orders
from echelon.proving.execution_markets import (
    Drawn,
    DriftFilter,
    DriftMarket,
    ForetoldMarket,
    ImpactMarket,
    martingale,
)
from echelon.types import Floats

RATE = NetworkSettings(fractions=(), hidden=32, first_std=1.0)
TWENTIETHS = tuple(k / 20 for k in range(21))
LEARNING = PPOSettings(lr=1e-3, orders=512, minibatches=4, epochs=8)
ON_IMPACT = replace(LEARNING, orders=256, minibatches=2, entropy_coef=0.0)
WITHIN = 1.05
"""Most that a learned schedule may cost over the optimum."""


@dataclass(frozen=True)
class ProofSizes:
    """How much each proof takes: steps of orders in one training, days drawn."""

    seeds: int = 5
    impact_steps: int = 80_000
    grid_steps: int = 120_000
    drift_steps: int = 200_000
    teacher_steps: int = 80_000
    student_steps: int = 60_000
    null_steps: int = 100_000
    train_days: int = 4096
    test_days: int = 20_000


QUICK = ProofSizes(
    seeds=2,
    impact_steps=30_000,
    grid_steps=30_000,
    drift_steps=50_000,
    teacher_steps=50_000,
    student_steps=40_000,
    null_steps=30_000,
    test_days=8000,
)


class Proved(NamedTuple):
    """One claim and what was measured.

    values: by seed; low, high: of the mean over seeds, 95 %; seconds: of CPU, all seeds
    facts: what else is worth knowing, by seed
    """

    name: str
    claim: str
    values: tuple[float, ...]
    low: float
    high: float
    holds: bool
    seconds: float
    facts: dict[str, tuple[float, ...]]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(self.values))


@dataclass
class _Seeds:
    """Collects what seeds say."""

    name: str
    claim: str
    began: float = field(default_factory=time.process_time)
    values: list[float] = field(default_factory=list)
    facts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, value: float, **facts: float) -> None:
        self.values.append(value)
        for name, fact in facts.items():
            self.facts.setdefault(name, []).append(fact)

    def proved(self, holds: Callable[[Sequence[float], float], bool]) -> Proved:
        """holds: says it of the values and the low end of their interval."""
        interval = seed_interval(self.values)
        return Proved(
            self.name,
            self.claim,
            tuple(self.values),
            interval.low,
            interval.high,
            holds(self.values, interval.low),
            time.process_time() - self.began,
            {name: tuple(facts) for name, facts in self.facts.items()},
        )


def schedule_costs(policy: ExecutionPolicy, market: ImpactMarket, drawn: Drawn) -> Floats:
    """[2] exact cost of the policy's schedule for a buy and a sell; it has no chance in it."""
    both = drawn.orders.take(slice(0, 2))
    history = run_orders(policy, drawn.days, both, drawn.rules)
    left = history.steps.left / both.amount[:, None]
    left[:, -1] = 0.0  # less than 1e-6 of a share
    return market.cost(np.concatenate([np.ones((2, 1)), left], axis=1))


def gains(policy: ExecutionPolicy, drawn: Drawn) -> Floats:
    """[E] over TWAP, in basis points of the arrival price."""
    history = run_orders(policy, drawn.days, drawn.orders, drawn.rules, record=False)
    return measure_orders(history, ["gain_twap"])["gain_twap"]


def prove_impact(sizes: ProofSizes, first: int = 0) -> Proved:
    """A continuous rate finds Almgren and Chriss's optimum."""
    market = ImpactMarket()
    drawn = market.draw()
    twap = market.cost(np.linspace(1.0, 0.0, market.n_steps + 1)) / market.least
    seeds = _Seeds("impact", f"cost over the closed form's, at most {WITHIN}; TWAP's is {twap:.3f}")
    settings = replace(ON_IMPACT, decay_steps=sizes.impact_steps)
    for seed in range(first, first + sizes.seeds):
        learner = PPO(settings, RATE, drawn.task(market.reward), seed)
        learner.train(sizes.impact_steps)
        cost = schedule_costs(learner.policy(), market, drawn) / market.least
        seeds.add(float(cost.max()), steps=learner.steps)
    return seeds.proved(lambda values, _: max(values) <= WITHIN)


def prove_grid(
    sizes: ProofSizes,
    first: int = 0,
    *,
    algo: str = "ppo",
    fractions: tuple[float, ...] = QLIB_FRACTIONS,
) -> Proved:
    """Fractions of the order find the best schedule that they allow; algo: 'ppo' or 'dqn'."""
    market = ImpactMarket()
    drawn = market.draw()
    least = market.least_on_grid(fractions)
    seeds = _Seeds(
        f"grid_{algo}_{len(fractions) - 1}",
        f"cost over dynamic programming's, at most {WITHIN}; that is {least / market.least:.3f} "
        "of the closed form's",
    )
    network = replace(RATE, fractions=fractions)
    for seed in range(first, first + sizes.seeds):
        learner = _on_grid(algo, network, drawn, market, sizes.grid_steps, seed)
        learner.train(sizes.grid_steps)
        cost = schedule_costs(learner.policy(), market, drawn) / least
        seeds.add(float(cost.max()), steps=learner.steps)
    return seeds.proved(lambda values, _: max(values) <= WITHIN)


def _on_grid(
    algo: str, network: NetworkSettings, drawn: Drawn, market: ImpactMarket, steps: int, seed: int
) -> ExecutionLearner:
    task = drawn.task(market.reward)
    if algo == "ppo":
        chosen = replace(ON_IMPACT, entropy_coef=0.003, decay_steps=steps)
        return PPO(chosen, network, task, seed)
    settings = DQNSettings(
        lr=1e-3, updates=8, target_every=50, explore_steps=steps // 2, decay_steps=steps
    )
    return DQN(settings, network, task, seed)


def prove_drift(sizes: ProofSizes, first: int = 0, draw: str = "test") -> Proved:
    """Returns of today and yesterday are used."""
    market = DriftMarket()
    seeds = _Seeds("drift", "gain over TWAP in bp on unseen days, interval above 0")
    settings = replace(LEARNING, copies=8, decay_steps=sizes.drift_steps)
    for seed in range(first, first + sizes.seeds):
        train = market.draw(sizes.train_days, seed, f"{draw} train")
        test = market.draw(sizes.test_days, seed, draw)
        learner = PPO(settings, RATE, train.task(market.reward), seed)
        learner.train(sizes.drift_steps)
        gained = gains(learner.policy(test.public), test)
        filtered = gains(DriftFilter(market, test.public), test)
        seeds.add(float(gained.mean()), se=standard_error(gained), reference=float(filtered.mean()))
    return seeds.proved(lambda values, low: low > 0.0)


def prove_distilled(sizes: ProofSizes, first: int = 0, draw: str = "test") -> Proved:
    """A teacher that knows the future makes the student learn sooner than its rewards do."""
    market = ForetoldMarket()
    seeds = _Seeds(
        "distilled",
        f"gain of the student over plain PPO's in bp, both after {sizes.student_steps:,} steps of "
        f"their own (the teacher took {sizes.teacher_steps:,} before), interval above 0",
    )
    settings = replace(LEARNING, decay_steps=sizes.student_steps)
    teaching = replace(LEARNING, decay_steps=sizes.teacher_steps)
    for seed in range(first, first + sizes.seeds):
        train = market.draw(sizes.train_days, seed, f"{draw} train")
        test = market.draw(sizes.test_days, seed, draw)
        task = train.task(market.reward)
        teacher = teacher_of(teaching, RATE, task, seed)
        teacher.train(sizes.teacher_steps)
        distill = DistillSettings(weight=1.0, decay_steps=sizes.student_steps)
        student = Student(settings, distill, RATE, task, teacher.net, seed)
        plain = PPO(settings, RATE, task, seed)
        found = {}
        for name, learner in (("student", student), ("plain", plain)):
            learner.train(sizes.student_steps)
            found[name] = gains(learner.policy(test.public), test)
        oracle = gains(teacher.policy(test.public), test)
        seeds.add(
            float((found["student"] - found["plain"]).mean()),
            se=standard_error(found["student"] - found["plain"]),
            student=float(found["student"].mean()),
            plain=float(found["plain"].mean()),
            teacher=float(oracle.mean()),
        )
    return seeds.proved(lambda values, low: low > 0.0)


def prove_null(sizes: ProofSizes, first: int = 0, draw: str = "test") -> Proved:
    """Nothing is found where nothing is; all seeds' orders together, on days of their own."""
    market = martingale()
    seeds = _Seeds("null", "gain over TWAP in bp on a martingale: |mean| < 2 SE, SE <= 0.3")
    settings = replace(LEARNING, copies=8, decay_steps=sizes.null_steps)
    everything: list[Floats] = []
    for seed in range(first, first + sizes.seeds):
        train = market.draw(sizes.train_days, seed, f"{draw} train")
        test = market.draw(sizes.test_days, seed, draw)
        learner = PPO(settings, RATE, train.task(market.reward), seed)
        learner.train(sizes.null_steps)
        gained = gains(learner.policy(test.public), test)
        everything.append(gained)
        seeds.add(float(gained.mean()), se=standard_error(gained))
    whole = np.concatenate(everything)
    error = standard_error(whole)
    proved = seeds.proved(lambda _, __: abs(float(whole.mean())) < 2.0 * error and error <= 0.3)
    return proved._replace(facts=proved.facts | {"whole": (float(whole.mean()), error)})


def prove_execution(sizes: ProofSizes | None = None) -> list[Proved]:
    """All of them, by default in full."""
    chosen = sizes or ProofSizes()
    return [
        prove_impact(chosen),
        prove_grid(chosen),
        prove_grid(chosen, fractions=TWENTIETHS),
        prove_grid(chosen, algo="dqn"),
        prove_drift(chosen),
        prove_distilled(chosen),
        prove_null(chosen),
    ]


def standard_error(values: Floats) -> float:
    """Of the mean of independent orders, one a day."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))
