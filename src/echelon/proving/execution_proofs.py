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
Proofs run in parts, seed by seed (see `parts`), and leave

    DIR/execution.json    every claim with its numbers by seed
    DIR/parts/…           the finding of each proof and seed

Ctrl-C keeps what is done; the same command goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from echelon.agents.execution import (
    DQN,
    PPO,
    ExecutionLearner,
    NetworkSettings,
    Student,
    make_teacher,
)
from echelon.config import Config
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import Stopped
from echelon.evaluation.statistics import seed_interval
from echelon.execution.interpreters import QLIB_FRACTIONS
from echelon.execution.metrics import measure_orders
from echelon.execution.policies import ExecutionPolicy, run_orders
from echelon.files import write_json
from echelon.proving.execution_markets import (
    Drawn,
    DriftFilter,
    DriftMarket,
    ForetoldMarket,
    ImpactMarket,
    martingale,
)
from echelon.proving.parts import Done, Finding, Part, clear_proof, proof_facts, run_all
from echelon.types import Floats
from echelon.workers import Report, ShouldStop

FORMAT = 1
CERTIFICATE = "execution.json"

RATE = NetworkSettings(fractions=(), hidden=32, first_std=1.0)
TWENTIETHS = tuple(k / 20 for k in range(21))
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


QUICK_SIZES = ProofSizes(
    seeds=2,
    impact_steps=30_000,
    grid_steps=60_000,
    drift_steps=50_000,
    teacher_steps=50_000,
    student_steps=40_000,
    null_steps=30_000,
    test_days=8000,
)


class SeedFinding(NamedTuple):
    """Of one seed: the number the claim is of, and what else is worth knowing."""

    value: float
    facts: Mapping[str, float]


Train = Callable[[ExecutionLearner, int], None]
"""Trains a learner for so many steps; may be interrupted."""


def _learning(steps: int, **changes: Any) -> ExecutionLearnerConfig:  # noqa: ANN401 (its fields)
    """PPO's, for a training of so many steps."""
    chosen = {"lr": 1e-3, "orders": 512, "epochs": 8} | changes
    return ExecutionLearnerConfig(total_steps=steps, **chosen)


def _learning_impact(steps: int, entropy: float) -> ExecutionLearnerConfig:
    return _learning(steps, orders=256, minibatches=2, entropy=entropy)


@dataclass(frozen=True)
class Proof:
    """One claim.

    unit: of its number; run: (sizes, seed, name of the draws, trainer) → what the seed found
    holds: whether the claim does, given all seeds' findings; None: nothing is claimed
    """

    name: str
    unit: str
    claim: str
    run: Callable[[ProofSizes, int, str, Train], SeedFinding]
    holds: Callable[[Sequence[SeedFinding]], bool] | None

    def prove(self, sizes: ProofSizes, first: int = 0, draw: str = "test") -> list[SeedFinding]:
        """All seeds from `first` on, one after the other."""

        def train(learner: ExecutionLearner, steps: int) -> None:
            learner.train(steps)

        return [self.run(sizes, seed, draw, train) for seed in range(first, first + sizes.seeds)]


def schedule_costs(policy: ExecutionPolicy, market: ImpactMarket, drawn: Drawn) -> Floats:
    """[2] exact cost of the policy's schedule for a buy and a sell; nothing in it is random."""
    both = drawn.orders.take(slice(0, 2))
    history = run_orders(policy, drawn.days, both, drawn.rules)
    left = history.steps.left / both.amount[:, None]
    left[:, -1] = 0.0  # less than 1e-6 of a share
    return market.cost(np.concatenate([np.ones((2, 1)), left], axis=1))


def gains_over_twap(policy: ExecutionPolicy, drawn: Drawn) -> Floats:
    """[E] over TWAP, in basis points of the arrival price."""
    history = run_orders(policy, drawn.days, drawn.orders, drawn.rules, record=False)
    return measure_orders(history, ["gain_twap"])["gain_twap"]


def _impact(sizes: ProofSizes, seed: int, _draw: str, train: Train) -> SeedFinding:
    """A continuous rate finds Almgren and Chriss's optimum."""
    market = ImpactMarket()
    drawn = market.draw()
    settings = _learning_impact(sizes.impact_steps, entropy=0.0)
    learner = PPO(settings, RATE, drawn.task(market.reward), seed)
    train(learner, sizes.impact_steps)
    cost = schedule_costs(learner.policy(), market, drawn) / market.least
    twap = market.cost(np.linspace(1.0, 0.0, market.n_steps + 1)) / market.least
    return SeedFinding(float(cost.max()), {"twap": float(twap)})


def _on_grid(
    algo: str, fractions: tuple[float, ...]
) -> Callable[[ProofSizes, int, str, Train], SeedFinding]:
    """Fractions of the order find the best schedule that they allow; algo: 'ppo' or 'dqn'."""

    def run(sizes: ProofSizes, seed: int, _draw: str, train: Train) -> SeedFinding:
        market = ImpactMarket()
        drawn = market.draw()
        least = market.least_on_grid(fractions)
        learner = _grid_learner(algo, fractions, drawn, market, sizes.grid_steps, seed)
        train(learner, sizes.grid_steps)
        cost = schedule_costs(learner.policy(), market, drawn) / least
        return SeedFinding(float(cost.max()), {"grid_over_closed_form": least / market.least})

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
        return PPO(_learning_impact(steps, entropy=0.003), network, task, seed)
    # What a step is worth goes back one step whenever the target is replaced: with 13 steps that
    # must happen many times over.
    settings = _learning(steps, orders=256, updates=16, target_every=20)
    return DQN(settings, network, task, seed)


def _drift(sizes: ProofSizes, seed: int, draw: str, train: Train) -> SeedFinding:
    """Returns of today and yesterday are used."""
    market = DriftMarket()
    test = market.draw(sizes.test_days, seed, draw)
    gained = _learned_gains(market, sizes, sizes.drift_steps, seed, draw, train, test)
    filtered = gains_over_twap(DriftFilter(market, test.public), test)
    return SeedFinding(
        float(gained.mean()), {"se": standard_error(gained), "filter": float(filtered.mean())}
    )


def _null(sizes: ProofSizes, seed: int, draw: str, train: Train) -> SeedFinding:
    """Nothing is found where nothing is."""
    market = martingale()
    test = market.draw(sizes.test_days, seed, draw)
    gained = _learned_gains(market, sizes, sizes.null_steps, seed, draw, train, test)
    return SeedFinding(float(gained.mean()), {"se": standard_error(gained), "orders": len(gained)})


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
    learner = PPO(_learning(steps, copies=8), RATE, drawn.task(market.reward), seed)
    train(learner, steps)
    return gains_over_twap(learner.policy(test.public), test)


def _distillation(
    market: DriftMarket | ForetoldMarket,
) -> Callable[[ProofSizes, int, str, Train], SeedFinding]:
    """A teacher that knows the future makes the student learn sooner than its rewards do."""

    def run(sizes: ProofSizes, seed: int, draw: str, train: Train) -> SeedFinding:
        task = market.draw(sizes.train_days, seed, f"{draw} train").task(market.reward)
        test = market.draw(sizes.test_days, seed, draw)
        own, taught = sizes.student_steps, sizes.teacher_steps
        teacher = make_teacher(_learning(taught), RATE, task, seed)
        train(teacher, taught)
        distill = _learning(own, distill=1.0, distill_decay=1.0)
        learners = {
            "student": (Student(distill, RATE, task, teacher.net, seed), own),
            "plain_student_steps": (PPO(_learning(own), RATE, task, seed), own),
            "plain": (PPO(_learning(own + taught), RATE, task, seed), own + taught),
        }
        gained = {}
        for name, (learner, steps) in learners.items():
            train(learner, steps)
            gained[name] = gains_over_twap(learner.policy(test.public), test)
        apart = gained["student"] - gained["plain"]
        oracle = gains_over_twap(teacher.policy(test.public), test)
        facts = {name: float(values.mean()) for name, values in gained.items()}
        facts |= {"teacher": float(oracle.mean()), "se": standard_error(apart)}
        return SeedFinding(float(apart.mean()), facts)

    return run


def all_within(seeds: Sequence[SeedFinding]) -> bool:
    """Every seed's cost is near the optimum."""
    return max(seed.value for seed in seeds) <= WITHIN


def above_zero(seeds: Sequence[SeedFinding]) -> bool:
    """The interval over seeds is."""
    return seed_interval([seed.value for seed in seeds]).low > 0.0


def no_gain(seeds: Sequence[SeedFinding]) -> bool:
    """All seeds' orders together, on days of their own, gained nothing that differs from 0."""
    mean, error = pool_seeds(seeds)
    return abs(mean) < 2.0 * error and error <= MOST_ERROR


def pool_seeds(seeds: Sequence[SeedFinding]) -> tuple[float, float]:
    """(mean, its standard error) over the orders of all seeds, each with its own on its own days.

    From each seed's mean and standard error: within and between seeds, as if all orders were put
    together.
    """
    n = np.array([seed.facts["orders"] for seed in seeds])
    mean, error = (
        np.array(x) for x in zip(*((s.value, s.facts["se"]) for s in seeds), strict=True)
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
        Proof("distilled", _MORE, _ABOVE, _distillation(ForetoldMarket()), above_zero),
        Proof("distilled_clear", _MORE, "", _distillation(CLEAR), None),
        Proof("distilled_drift", _MORE, "", _distillation(DriftMarket()), None),
        Proof("distilled_null", _MORE, "", _distillation(martingale()), None),
        Proof("null", _GAIN, f"mean within 2 SE of 0, SE <= {MOST_ERROR}", _null, no_gain),
    )
}


def standard_error(values: Floats) -> float:
    """Of the mean of independent orders, one a day."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))


@dataclass(frozen=True)
class ExecutionPart:
    """One proof with one seed; draw: name of the days it is made on."""

    proof: str
    sizes: ProofSizes
    seed: int
    draw: str = "test"

    @property
    def key(self) -> str:
        """Where it is kept."""
        return f"{self.proof}-{self.seed}"

    @property
    def steps(self) -> int:
        """One: parts are short, and counted by number."""
        return 1

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """On one core: parts run side by side."""
        torch.set_num_threads(1)

        def train(learner: ExecutionLearner, steps: int) -> None:
            while learner.steps < steps:
                learner.train_once()
                if should_stop():
                    raise Stopped("in the middle of a training")

        try:
            finding = PROOFS[self.proof].run(self.sizes, self.seed, self.draw, train)
        except Stopped:
            return None
        return {"value": finding.value, "facts": dict(finding.facts)}


class Proved(NamedTuple):
    """One claim and what was measured.

    values: by seed; low, high: of the mean over seeds, 95 %; holds: None where nothing is claimed
    facts: what else is worth knowing, by seed
    """

    name: str
    unit: str
    claim: str
    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    holds: bool | None
    facts: Mapping[str, tuple[float, ...]]


class ExecutionCertificate(NamedTuple):
    """All of them, and what they were made with."""

    proofs: tuple[Proved, ...]
    about: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether no claim failed."""
        return all(proved.holds is not False for proved in self.proofs)

    def write(self, directory: Path) -> Path:
        """Write execution.json."""
        tree = {
            "format": FORMAT,
            "passed": self.passed,
            "proofs": [proved._asdict() for proved in self.proofs],
            "about": dict(self.about),
        }
        path = directory / CERTIFICATE
        write_json(path, tree)
        return path


def plan_execution(names: Sequence[str], sizes: ProofSizes) -> list[Part]:
    """Parts of the proofs named, a seed of each after the other."""
    return [ExecutionPart(name, sizes, seed) for seed in range(sizes.seeds) for name in names]


def prove_execution(
    directory: Path,
    names: Sequence[str],
    sizes: ProofSizes,
    *,
    workers: int = 1,
    command: str = "",
    overwrite: bool = False,
    on_report: Callable[[Part, object], None] = lambda _part, _message: None,
) -> ExecutionCertificate:
    """Run what has no finding yet and write execution.json; raises `Stopped` after Ctrl-C."""
    began = time.perf_counter()
    if overwrite:
        clear_proof(directory, (CERTIFICATE,))
    parts = plan_execution(names, sizes)
    done = run_all(parts, directory, workers=workers, on_report=on_report)
    made = proof_facts(Config(), command, done.values())
    # The proofs have settings of their own: the configuration plays no part.
    made = {k: v for k, v in made.items() if k not in ("config_hash", "rules", "seed")}
    made |= {"seconds": time.perf_counter() - began, "sizes": asdict(sizes)}
    certificate = ExecutionCertificate(
        tuple(summarize_proof(name, _findings(name, sizes, done)) for name in names), made
    )
    certificate.write(directory)
    return certificate


def summarize_proof(name: str, seeds: Sequence[SeedFinding]) -> Proved:
    """What all seeds of a proof say."""
    proof = PROOFS[name]
    values = tuple(seed.value for seed in seeds)
    interval = seed_interval(values)
    low, high = (None, None) if len(values) < 2 else (interval.low, interval.high)
    facts = {fact: tuple(seed.facts[fact] for seed in seeds) for fact in seeds[0].facts}
    holds = None if proof.holds is None else proof.holds(seeds)
    return Proved(name, proof.unit, proof.claim, values, interval.estimate, low, high, holds, facts)


def _findings(name: str, sizes: ProofSizes, done: Mapping[str, Done]) -> list[SeedFinding]:
    kept = [done[f"{name}-{seed}"].finding for seed in range(sizes.seeds)]
    return [SeedFinding(part["value"], part["facts"]) for part in kept]
