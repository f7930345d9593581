"""Proofs of execution: what the learners make of markets whose answer is known.

    impact      cost of the learned schedule over the closed form's, at most 1.05
    quarters    the same for fractions of the order, against dynamic programming on their own grid,
                by PPO; `quarters_dqn` by double DQN; `twentieths` on a finer grid
    drift       gain over TWAP on days never seen, an interval above zero
    distilled   gain of the distilled student over plain PPO, which has the steps of student and
                teacher together, on faint signs in much noise: an interval above zero. What
                distillation does elsewhere, without a bar: `distilled_clear` (signs that rewards
                teach as well), `distilled_drift`, `distilled_null`
    null        gain over TWAP where nothing is to be known: within 2 SE of 0, with SE <= 0.3 bp

Every seed has train days, test days and weights of its own. Settings were chosen on draws named
"development" with seeds from 100; what is reported is on draws named "test" with seeds from 0.
`execution_certificate` runs them all and writes down what was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
MOST_ERROR = 0.3
"""Standard error in basis points with which the null market must be measured."""


CLEAR = ForetoldMarket(correlation=0.3, noise=25.0)
"""Signs that are easier to tell from noise."""


@dataclass(frozen=True)
class ProofSizes:
    """How much each proof takes: steps of orders in one training, days drawn."""

    seeds: int = 5
    impact_steps: int = 80_000
    grid_steps: int = 120_000
    drift_steps: int = 200_000
    teacher_steps: int = 60_000
    student_steps: int = 60_000
    null_steps: int = 100_000
    train_days: int = 4096
    test_days: int = 20_000


QUICK = ProofSizes(
    seeds=2,
    impact_steps=30_000,
    grid_steps=60_000,
    drift_steps=50_000,
    teacher_steps=50_000,
    student_steps=40_000,
    null_steps=30_000,
    test_days=8000,
)


class Found(NamedTuple):
    """What one seed found: the number the claim is of, and what else is worth knowing."""

    value: float
    facts: Mapping[str, float]


Train = Callable[[ExecutionLearner, int], None]
"""Trains a learner for so many steps; may be interrupted."""


def train_on(learner: ExecutionLearner, steps: int) -> None:
    """Without interruption."""
    learner.train(steps)


@dataclass(frozen=True)
class Proof:
    """One claim.

    unit: of its number; run: (sizes, seed, name of the draws, trainer) → what the seed found
    holds: whether the claim does, given all seeds' findings; None: nothing is claimed
    """

    name: str
    unit: str
    claim: str
    run: Callable[[ProofSizes, int, str, Train], Found]
    holds: Callable[[Sequence[Found]], bool] | None

    def prove(self, sizes: ProofSizes, first: int = 0, draw: str = "test") -> list[Found]:
        """All seeds from `first` on, one after the other."""
        return [self.run(sizes, seed, draw, train_on) for seed in range(first, first + sizes.seeds)]


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


def _impact(sizes: ProofSizes, seed: int, _draw: str, train: Train) -> Found:
    """A continuous rate finds Almgren and Chriss's optimum."""
    market = ImpactMarket()
    drawn = market.draw()
    settings = replace(ON_IMPACT, decay_steps=sizes.impact_steps)
    learner = PPO(settings, RATE, drawn.task(market.reward), seed)
    train(learner, sizes.impact_steps)
    cost = schedule_costs(learner.policy(), market, drawn) / market.least
    twap = market.cost(np.linspace(1.0, 0.0, market.n_steps + 1)) / market.least
    return Found(float(cost.max()), {"twap": float(twap)})


def _on_grid(
    algo: str, fractions: tuple[float, ...]
) -> Callable[[ProofSizes, int, str, Train], Found]:
    """Fractions of the order find the best schedule that they allow; algo: 'ppo' or 'dqn'."""

    def run(sizes: ProofSizes, seed: int, _draw: str, train: Train) -> Found:
        market = ImpactMarket()
        drawn = market.draw()
        least = market.least_on_grid(fractions)
        learner = _grid_learner(algo, fractions, drawn, market, sizes.grid_steps, seed)
        train(learner, sizes.grid_steps)
        cost = schedule_costs(learner.policy(), market, drawn) / least
        return Found(float(cost.max()), {"grid_over_closed_form": least / market.least})

    return run


def _grid_learner(
    algo: str,
    fractions: tuple[float, ...],
    drawn: Drawn,
    market: ImpactMarket,
    steps: int,
    seed: int,
) -> ExecutionLearner:
    network, task = replace(RATE, fractions=fractions), drawn.task(market.reward)
    if algo == "ppo":
        chosen = replace(ON_IMPACT, entropy_coef=0.003, decay_steps=steps)
        return PPO(chosen, network, task, seed)
    # What a step is worth goes back one step whenever the target is replaced: with 13 steps that
    # must happen many times over.
    settings = DQNSettings(
        lr=1e-3, updates=16, target_every=20, explore_steps=steps // 2, decay_steps=steps
    )
    return DQN(settings, network, task, seed)


def _drift(sizes: ProofSizes, seed: int, draw: str, train: Train) -> Found:
    """Returns of today and yesterday are used."""
    market = DriftMarket()
    test = market.draw(sizes.test_days, seed, draw)
    gained = _learned_gains(market, sizes, sizes.drift_steps, seed, draw, train, test)
    filtered = gains(DriftFilter(market, test.public), test)
    return Found(
        float(gained.mean()), {"se": standard_error(gained), "filter": float(filtered.mean())}
    )


def _null(sizes: ProofSizes, seed: int, draw: str, train: Train) -> Found:
    """Nothing is found where nothing is."""
    market = martingale()
    test = market.draw(sizes.test_days, seed, draw)
    gained = _learned_gains(market, sizes, sizes.null_steps, seed, draw, train, test)
    return Found(float(gained.mean()), {"se": standard_error(gained), "orders": len(gained)})


def _learned_gains(
    market: DriftMarket,
    sizes: ProofSizes,
    steps: int,
    seed: int,
    draw: str,
    train: Train,
    test: Drawn,
) -> Floats:
    """[E] of PPO on the test orders."""
    drawn = market.draw(sizes.train_days, seed, f"{draw} train")
    settings = replace(LEARNING, copies=8, decay_steps=steps)
    learner = PPO(settings, RATE, drawn.task(market.reward), seed)
    train(learner, steps)
    return gains(learner.policy(test.public), test)


def _distilled(
    market: DriftMarket | ForetoldMarket,
) -> Callable[[ProofSizes, int, str, Train], Found]:
    """A teacher that knows the future makes the student learn sooner than its rewards do."""

    def run(sizes: ProofSizes, seed: int, draw: str, train: Train) -> Found:
        task = market.draw(sizes.train_days, seed, f"{draw} train").task(market.reward)
        test = market.draw(sizes.test_days, seed, draw)
        own, taught = sizes.student_steps, sizes.teacher_steps
        teacher = teacher_of(replace(LEARNING, decay_steps=taught), RATE, task, seed)
        train(teacher, taught)
        distill = DistillSettings(weight=1.0, decay_steps=own)
        settings = replace(LEARNING, decay_steps=own)
        learners = {
            "student": (Student(settings, distill, RATE, task, teacher.net, seed), own),
            "plain_student_steps": (PPO(settings, RATE, task, seed), own),
            "plain": (
                PPO(replace(LEARNING, decay_steps=own + taught), RATE, task, seed),
                own + taught,
            ),
        }
        found = {}
        for name, (learner, steps) in learners.items():
            train(learner, steps)
            found[name] = gains(learner.policy(test.public), test)
        apart = found["student"] - found["plain"]
        oracle = gains(teacher.policy(test.public), test)
        facts = {name: float(gained.mean()) for name, gained in found.items()}
        facts |= {"teacher": float(oracle.mean()), "se": standard_error(apart)}
        return Found(float(apart.mean()), facts)

    return run


def all_within(found: Sequence[Found]) -> bool:
    """Every seed's cost is near the optimum."""
    return max(one.value for one in found) <= WITHIN


def above_zero(found: Sequence[Found]) -> bool:
    """The interval over seeds is."""
    return seed_interval([one.value for one in found]).low > 0.0


def nothing_found(found: Sequence[Found]) -> bool:
    """All seeds' orders together, on days of their own, gained nothing that can be told from 0."""
    mean, error = pooled(found)
    return abs(mean) < 2.0 * error and error <= MOST_ERROR


def pooled(found: Sequence[Found]) -> tuple[float, float]:
    """(mean, its standard error) over the orders of all seeds, each with its own on its own days.

    From each seed's mean and standard error: within and between seeds, as if all orders were put
    together.
    """
    n = np.array([one.facts["orders"] for one in found])
    mean, error = (
        np.array(x) for x in zip(*((f.value, f.facts["se"]) for f in found), strict=True)
    )
    whole = float((n * mean).sum() / n.sum())
    squares = (n * (n - 1) * error**2 + n * (mean - whole) ** 2).sum()
    return whole, math.sqrt(squares / (n.sum() - 1) / n.sum())


_COST = "cost over the optimum's"
_GAIN = "gain over TWAP, bp"
_MORE = "gain over plain PPO's, bp"
_NEAR = f"every seed at most {WITHIN}"
_ABOVE = "interval above 0"
PROOFS: Mapping[str, Proof] = {
    proof.name: proof
    for proof in (
        Proof("impact", _COST, _NEAR, _impact, all_within),
        Proof("quarters", _COST, _NEAR, _on_grid("ppo", QLIB_FRACTIONS), all_within),
        Proof("twentieths", _COST, _NEAR, _on_grid("ppo", TWENTIETHS), all_within),
        Proof("quarters_dqn", _COST, _NEAR, _on_grid("dqn", QLIB_FRACTIONS), all_within),
        Proof("drift", _GAIN, _ABOVE, _drift, above_zero),
        Proof("distilled", _MORE, _ABOVE, _distilled(ForetoldMarket()), above_zero),
        Proof("distilled_clear", _MORE, "", _distilled(CLEAR), None),
        Proof("distilled_drift", _MORE, "", _distilled(DriftMarket()), None),
        Proof("distilled_null", _MORE, "", _distilled(martingale()), None),
        Proof("null", _GAIN, f"mean within 2 SE of 0, SE <= {MOST_ERROR}", _null, nothing_found),
    )
}


def standard_error(values: Floats) -> float:
    """Of the mean of independent orders, one a day."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))
