"""Proofs of execution: what the learners make of markets whose answer is known.

    impact       constant price and volume, linear temporary impact, a price of waiting: the optimum
                 is Almgren and Chriss's, and at κT = 3 TWAP costs 36 % more
    drift        a day drifts up or down; its own returns and yesterday's tell which way
    foretold     noisy signs of how the rest of the day will compare with now: an oracle, which
                 sees it, gains much; what the signs allow is little against the noise of a reward
    martingale   nothing is to be known; who seems to gain was lucky or looked ahead

Each of `PROOFS` says what it measures and claims; those without a claim show what distillation does
elsewhere (`distilled_clear`: signs that rewards teach as well). A student is held to plain PPO with
the steps of student and teacher together, fractions of the order to dynamic programming on their
own grid.

Every seed has train days, test days and weights of its own. Settings were chosen on draws named
"development" with seeds from 100; what is reported is on draws named "test" with seeds from 0.
Proofs run in parts, seed by seed (see `parts`); DIR/execution.json has every claim by seed.

Axes: `E` orders, `D` days, `T` ticks, `F` features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from scipy import stats

from echelon.agents.execution.dqn import DQN
from echelon.agents.execution.learner import ExecutionLearner, ExecutionTask
from echelon.agents.execution.network import QLIB_FRACTIONS, NetworkSettings
from echelon.agents.execution.ppo import PPO, make_teacher
from echelon.config import Config
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import Stopped
from echelon.evaluation.statistics import seed_interval
from echelon.execution.days import Days
from echelon.execution.features import PublicArrays
from echelon.execution.history import BASIS_POINTS, measure_orders
from echelon.execution.orders import ParentOrders, parent_orders
from echelon.execution.policies import (
    ExecutionPolicy,
    almgren_chriss_cost,
    eta_of,
    run_orders,
    schedule_cost,
)
from echelon.execution.rewards import PAPenalty, Reward, Risk, Shortfall, Weighted
from echelon.execution.simulator import ExecutionRules, Simulator, next_step
from echelon.files import write_json
from echelon.proving.parts import Finding, Part, clear_proof, proof_facts, run_all
from echelon.rng import stream
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
_PRICE = 100.0
_PRICE_ADVANTAGE = PAPenalty(penalty=0.0)
"""Over TWAP."""


class Drawn(NamedTuple):
    """Days of a market and orders on them, one a day unless said otherwise."""

    days: Days
    public: PublicArrays
    orders: ParentOrders
    rules: ExecutionRules

    def task(self, reward: Reward) -> ExecutionTask:
        return ExecutionTask(self.days, self.public, self.orders, self.rules, reward)


class ImpactMarket:
    """Constant price and volume, linear impact, λσ²x² in the reward; costs in basis points.

    eta: what trading a share n of the order in one step costs, over n²: TWAP pays 10 in all
    aversion: λσ² for shares of the order, over η; least: cost of the optimum, closed form
    """

    n_steps = 13
    kappa = 3.0 / n_steps
    eta = 10.0 * n_steps
    aversion = 2.0 * (math.cosh(kappa) - 1.0)
    reward: ClassVar[Reward] = Weighted([(1.0, Shortfall()), (1.0, Risk(eta * aversion))])
    least = almgren_chriss_cost(kappa, n_steps, eta=eta, amount=1.0)

    def cost(self, left: Floats) -> Floats:
        """Exact cost and risk of schedules, as share left[…,N+1]."""
        return schedule_cost(left, self.kappa, eta=self.eta, amount=1.0)

    def least_on_grid(self, fractions: tuple[float, ...]) -> float:
        """Cost of the best schedule whose steps ask for these fractions, by dynamic programming.

        What is left is always 1 less a sum of fractions, so the states are these sums, exactly: on
        a grid of thousandths, to which the fractions must belong. The last step takes all.
        """
        grid = 1000
        steps = [round(f * grid) for f in fractions]
        assert np.allclose(np.array(steps) / grid, fractions), "fractions are not on the grid"
        share = np.arange(grid + 1) / grid
        best = share**2  # of the last step
        for _ in range(self.n_steps - 1):
            options = []
            for step in steps:
                traded = np.minimum(np.arange(grid + 1), step)
                after = np.arange(grid + 1) - traded
                risk = self.aversion * share[after] ** 2
                options.append((traded / grid) ** 2 + risk + best[after])
            best = np.min(options, axis=0)
        return float(self.eta * best[-1])

    def draw(self) -> Drawn:
        """One day, orders of one size on both sides; the features say nothing."""
        rules = ExecutionRules(ticks_per_step=2)
        n_ticks = self.n_steps * rules.ticks_per_step
        volume = 1000.0
        # η in basis points of the order's value: that of the rules for one share, at temporary 1.
        unit = eta_of(rules._replace(temporary=1.0), price=1.0, volume=volume)
        amount = 100.0
        rules = rules._replace(temporary=self.eta / (BASIS_POINTS * unit * amount))
        days = Days.from_prices(np.full((1, n_ticks), _PRICE), np.full((1, n_ticks), volume))
        buying = np.arange(256) % 2 == 0
        orders = parent_orders(0, amount, buying, 0, n_ticks)
        nothing = np.zeros((1, n_ticks, 1), np.float32)
        return Drawn(days, PublicArrays(nothing, nothing), orders, rules)


@dataclass(frozen=True)
class DriftMarket:
    """Days that drift one way, or with no drift a martingale; features are the returns.

    drift, noise: a tick, in basis points; persistence: probability that today goes yesterday's way
    """

    drift: float = 4.0
    noise: float = 20.0
    persistence: float = 0.75
    n_ticks: int = 26
    ticks_per_step: int = 2

    reward: ClassVar[Reward] = _PRICE_ADVANTAGE

    def draw(self, n_days: int, seed: int, name: str) -> Drawn:
        rng = stream(seed, "drift market", name)
        way = rng.choice([-1.0, 1.0], n_days)
        before = np.where(rng.random(n_days) < self.persistence, way, -way)
        today, yesterday = self._returns(rng, way), self._returns(rng, before)
        price = _PRICE * (1.0 + np.cumsum(today, axis=1) / BASIS_POINTS)
        features = [(r / self.noise)[:, :, None].astype(np.float32) for r in (today, yesterday)]
        rules = ExecutionRules(self.ticks_per_step)
        return _whole_day_orders(price, PublicArrays(*features), rules, rng)

    def _returns(self, rng: np.random.Generator, way: Floats) -> Floats:
        """[D,T] in basis points; with the first tick's known price being its own, none there."""
        moves = self.drift * way[:, None] + rng.normal(0.0, self.noise, (len(way), self.n_ticks))
        moves[:, 0] = 0.0
        return moves


class DriftFilter:
    """Works orders of a `DriftMarket` by the exact odds that the day goes up: all at once, or none.

    Nobody knows the way of the day better; that waiting also teaches is not counted, so that it is
    a reference and not a bound.
    """

    name = "filter"

    def __init__(self, market: DriftMarket, public: PublicArrays) -> None:
        self.market = market
        self.public = public
        self._odds = np.zeros((0, 0))

    def start(self, simulator: Simulator) -> None:
        """Log odds[D,T] of a day that goes up, known as each tick begins."""
        market = self.market
        odds = 2.0 * market.drift / market.noise  # by a return in units of the noise
        today = odds * self.public.today[:, :, 0].astype(np.float64)
        before = 1.0 / (1.0 + np.exp(-odds * self.public.yesterday[:, :, 0].sum(axis=1)))
        up = market.persistence * before + (1.0 - market.persistence) * (1.0 - before)
        sofar = np.concatenate([np.zeros((len(today), 1)), today.cumsum(axis=1)[:, :-1]], axis=1)
        self._odds = np.log(up / (1.0 - up))[:, None] + sofar

    def request(self, simulator: Simulator) -> Floats:
        """[E] all or nothing."""
        orders, progress = simulator.orders, simulator.progress
        tick = np.minimum(progress.tick, simulator.days.shape[1] - 1)
        against = self._odds[orders.day, tick] * np.where(orders.buying, 1.0, -1.0) > 0.0
        return np.where(against | next_step(simulator).final, progress.left, 0.0)


MARTINGALE = DriftMarket(drift=0.0, persistence=0.5)


@dataclass(frozen=True)
class ForetoldMarket:
    """Row t of the features holds a sign of how the rest of the day will compare with tick t + 1.

    A step that begins at t + 1 trades at tick t + 1's price; the sign is of the mean price after
    it, less that price, with noise of its own in every row.
    correlation: of a sign with what it foretells; noise: of a move, in basis points
    twap_cost: temporary impact of TWAP in basis points, so that haste has a price
    """

    correlation: float = 0.15
    noise: float = 60.0
    twap_cost: float = 4.0
    n_ticks: int = 13

    reward: ClassVar[Reward] = _PRICE_ADVANTAGE

    def draw(self, n_days: int, seed: int, name: str) -> Drawn:
        rng = stream(seed, "foretold market", name)
        moves = rng.normal(0.0, self.noise, (n_days, self.n_ticks))
        moves[:, 0] = 0.0
        path = np.cumsum(moves, axis=1)
        sign = rng.normal(0.0, 1.0, (n_days, self.n_ticks))
        for t in range(self.n_ticks - 2):
            after = path[:, t + 2 :].mean(axis=1) - path[:, t + 1]
            rest = self.n_ticks - 2 - t
            # Each move counts for the share of later ticks that it is before.
            size = self.noise * math.sqrt(sum((k / rest) ** 2 for k in range(1, rest + 1)))
            rho = self.correlation
            sign[:, t] = rho * after / size + math.sqrt(1.0 - rho**2) * sign[:, t]
        today = np.stack([moves / self.noise, sign], axis=2).astype(np.float32)
        price = _PRICE * (1.0 + path / BASIS_POINTS)
        temporary = self.twap_cost / BASIS_POINTS * self.n_ticks
        rules = ExecutionRules(1, temporary=temporary)
        public = PublicArrays(today, np.zeros_like(today))
        return _whole_day_orders(price, public, rules, rng)


def _whole_day_orders(
    price: Floats, public: PublicArrays, rules: ExecutionRules, rng: np.random.Generator
) -> Drawn:
    """Orders of one share over whole days of volume 1 a tick, either side."""
    n_days, n_ticks = price.shape
    days = Days.from_prices(price, np.ones_like(price))
    buying = rng.random(n_days) < 0.5
    return Drawn(days, public, parent_orders(np.arange(n_days), 1.0, buying, 0, n_ticks), rules)


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


@dataclass(frozen=True)
class Trial:
    """One seed of a proof; draw: name of the days it is made on."""

    sizes: ProofSizes
    seed: int
    draw: str = "test"
    should_stop: ShouldStop = lambda: False

    def train(self, learner: ExecutionLearner, steps: int) -> None:
        while learner.steps < steps:
            learner.train_once()
            if self.should_stop():
                raise Stopped("in the middle of a training")

    def train_task(self, market: DriftMarket | ForetoldMarket) -> ExecutionTask:
        drawn = market.draw(self.sizes.train_days, self.seed, f"{self.draw} train")
        return drawn.task(market.reward)

    def test_days(self, market: DriftMarket | ForetoldMarket) -> Drawn:
        return market.draw(self.sizes.test_days, self.seed, self.draw)

    def learned_gains(self, market: DriftMarket, steps: int, test: Drawn) -> Floats:
        """[E] of PPO on the test orders."""
        learner = PPO(_learning(steps, copies=8), RATE, self.train_task(market), self.seed)
        self.train(learner, steps)
        return gains_over_twap(learner.policy(test.public), test)


def _learning(steps: int, **changes: Any) -> ExecutionLearnerConfig:  # noqa: ANN401 (its fields)
    chosen = {"lr": 1e-3, "orders": 512, "epochs": 8} | changes
    return ExecutionLearnerConfig(total_steps=steps, **chosen)


class Proof(NamedTuple):
    """One claim: its unit, what a seed finds, and whether all findings hold it; None: no claim."""

    unit: str
    claim: str
    run: Callable[[Trial], SeedFinding]
    holds: Callable[[Sequence[SeedFinding]], bool] | None


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


def _schedule(
    algo: type[ExecutionLearner], fractions: tuple[float, ...] = ()
) -> Callable[[Trial], SeedFinding]:
    """Fractions of the order find the best schedule they allow; a rate, Almgren and Chriss's."""
    # What a step is worth goes back one step whenever DQN's target is replaced: with 13 steps that
    # must happen many times over.
    chosen: dict[str, Any] = {"minibatches": 2, "entropy": 0.003 if fractions else 0.0}
    if algo is DQN:
        chosen = {"updates": 16, "target_every": 20}

    def run(trial: Trial) -> SeedFinding:
        market, network = ImpactMarket(), replace(RATE, fractions=fractions)
        drawn = market.draw()
        if fractions:
            steps, least = trial.sizes.grid_steps, market.least_on_grid(fractions)
            facts = {"grid_over_closed_form": least / market.least}
        else:
            steps, least = trial.sizes.impact_steps, market.least
            facts = {"twap": float(market.cost(np.linspace(1.0, 0.0, market.n_steps + 1)) / least)}
        settings = _learning(steps, orders=256, **chosen)
        learner = algo(settings, network, drawn.task(market.reward), trial.seed)
        trial.train(learner, steps)
        cost = schedule_costs(learner.policy(), market, drawn) / least
        return SeedFinding(float(cost.max()), facts)

    return run


def _drift(trial: Trial) -> SeedFinding:
    market = DriftMarket()
    test = trial.test_days(market)
    gained = trial.learned_gains(market, trial.sizes.drift_steps, test)
    filtered = gains_over_twap(DriftFilter(market, test.public), test)
    facts = {"se": float(stats.sem(gained)), "filter": float(filtered.mean())}
    return SeedFinding(float(gained.mean()), facts)


def _null(trial: Trial) -> SeedFinding:
    test = trial.test_days(MARTINGALE)
    gained = trial.learned_gains(MARTINGALE, trial.sizes.null_steps, test)
    return SeedFinding(
        float(gained.mean()), {"se": float(stats.sem(gained)), "orders": len(gained)}
    )


def _distillation(market: DriftMarket | ForetoldMarket) -> Callable[[Trial], SeedFinding]:
    """A teacher that knows the future makes the student learn sooner than its rewards do."""

    def run(trial: Trial) -> SeedFinding:
        task, test, seed = trial.train_task(market), trial.test_days(market), trial.seed
        own, taught = trial.sizes.student_steps, trial.sizes.teacher_steps
        teacher = make_teacher(_learning(taught), RATE, task, seed)
        trial.train(teacher, taught)
        distill = _learning(own, distill=1.0, distill_decay=1.0)
        learners = {
            "student": (PPO(distill, RATE, task, seed, teacher.net), own),
            "plain_student_steps": (PPO(_learning(own), RATE, task, seed), own),
            "plain": (PPO(_learning(own + taught), RATE, task, seed), own + taught),
        }
        gained = {}
        for name, (learner, steps) in learners.items():
            trial.train(learner, steps)
            gained[name] = gains_over_twap(learner.policy(test.public), test)
        apart = gained["student"] - gained["plain"]
        oracle = gains_over_twap(teacher.policy(test.public), test)
        facts = {name: float(values.mean()) for name, values in gained.items()}
        facts |= {"teacher": float(oracle.mean()), "se": float(stats.sem(apart))}
        return SeedFinding(float(apart.mean()), facts)

    return run


def all_within(seeds: Sequence[SeedFinding]) -> bool:
    return max(seed.value for seed in seeds) <= WITHIN


def above_zero(seeds: Sequence[SeedFinding]) -> bool:
    return seed_interval([seed.value for seed in seeds]).low > 0.0


def no_gain(seeds: Sequence[SeedFinding]) -> bool:
    """All seeds' orders together, on days of their own, gained nothing that differs from 0."""
    mean, error = pool_seeds(seeds)
    return abs(mean) < 2.0 * error and error <= MOST_ERROR


def pool_seeds(seeds: Sequence[SeedFinding]) -> tuple[float, float]:
    """(mean, its standard error) as if the orders of all seeds were put together."""
    n, error = (np.array([seed.facts[name] for seed in seeds]) for name in ("orders", "se"))
    mean = np.array([seed.value for seed in seeds])
    whole = float((n * mean).sum() / n.sum())
    squares = (n * (n - 1) * error**2 + n * (mean - whole) ** 2).sum()
    return whole, math.sqrt(squares / (n.sum() - 1) / n.sum())


_COST = "cost over the optimum's"
_GAIN = "gain over TWAP, bp"
_MORE = "gain over plain PPO's, bp"
_NEAR = f"every seed at most {WITHIN}"
_ABOVE = "interval above 0"
PROOFS: Mapping[str, Proof] = {
    "impact": Proof(_COST, _NEAR, _schedule(PPO), all_within),
    "quarters": Proof(_COST, _NEAR, _schedule(PPO, QLIB_FRACTIONS), all_within),
    "twentieths": Proof(_COST, _NEAR, _schedule(PPO, TWENTIETHS), all_within),
    "quarters_dqn": Proof(_COST, _NEAR, _schedule(DQN, QLIB_FRACTIONS), all_within),
    "drift": Proof(_GAIN, _ABOVE, _drift, above_zero),
    "distilled": Proof(_MORE, _ABOVE, _distillation(ForetoldMarket()), above_zero),
    "distilled_clear": Proof(_MORE, "", _distillation(CLEAR), None),
    "distilled_drift": Proof(_MORE, "", _distillation(DriftMarket()), None),
    "distilled_null": Proof(_MORE, "", _distillation(MARTINGALE), None),
    "null": Proof(_GAIN, f"mean within 2 SE of 0, SE <= {MOST_ERROR}", _null, no_gain),
}


@dataclass(frozen=True)
class ExecutionPart(Part):
    """One proof with one seed; draw: name of the days it is made on."""

    KEY = "{0.proof}-{0.seed}"

    proof: str
    sizes: ProofSizes
    seed: int
    draw: str = "test"

    @property
    def steps(self) -> int:
        """One: parts are short, and counted by number."""
        return 1

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """On one core: parts run side by side."""
        torch.set_num_threads(1)
        try:
            finding = PROOFS[self.proof].run(Trial(self.sizes, self.seed, self.draw, should_stop))
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
    proofs: tuple[Proved, ...]
    about: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        return all(proved.holds is not False for proved in self.proofs)


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
    proved = []
    for name in names:
        unit, claim, _, claimed = PROOFS[name]
        seeds = [SeedFinding(**done[f"{name}-{seed}"].finding) for seed in range(sizes.seeds)]
        values = tuple(seed.value for seed in seeds)
        interval = seed_interval(values)
        low, high = (None, None) if len(values) < 2 else (interval.low, interval.high)
        facts = {fact: tuple(seed.facts[fact] for seed in seeds) for fact in seeds[0].facts}
        holds = None if claimed is None else claimed(seeds)
        proved.append(Proved(name, unit, claim, values, interval.estimate, low, high, holds, facts))
    certificate = ExecutionCertificate(tuple(proved), made)
    tree = {"proofs": [entry._asdict() for entry in proved], "about": made}
    write_json(directory / CERTIFICATE, {"format": FORMAT, "passed": certificate.passed, **tree})
    return certificate
