"""Markets of execution whose answer is known.

    impact       constant price and volume, linear temporary impact, a price of waiting: the optimum
                 is Almgren and Chriss's, and at κT = 3 TWAP costs 36 % more
    drift        a day drifts up or down; its own returns and yesterday's tell which way, so whoever
                 listens beats TWAP
    foretold     noisy signs of how the rest of the day will compare with now: an oracle, which
                 sees it, gains much; what the signs allow is little against the noise of a reward
    martingale   nothing is to be known; who seems to gain was lucky or looked ahead

Each gives days with features and orders. Draws differ by name, so that what is tuned on
some is reported on others.

Axes: `E` orders, `D` days, `T` ticks, `F` features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from echelon.agents.execution.rollout import ExecutionTask
from echelon.execution.days import Days
from echelon.execution.features import PublicArrays
from echelon.execution.history import BASIS_POINTS
from echelon.execution.orders import ParentOrders, parent_orders
from echelon.execution.policies import almgren_chriss_cost, eta_of, schedule_cost
from echelon.execution.rewards import PAPenalty, Reward, Risk, Shortfall, Weighted
from echelon.execution.simulator import ExecutionRules, Simulator, next_step
from echelon.rng import stream
from echelon.types import Floats, Floats32

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
        """To learn from."""
        return ExecutionTask(self.days, self.public, self.orders, self.rules, reward)


@dataclass(frozen=True)
class ImpactMarket:
    """Constant price and volume, linear impact, λσ²x² in the reward.

    total: κT; twap_cost: impact of TWAP in basis points, a unit only
    """

    n_steps: int = 13
    total: float = 3.0
    twap_cost: float = 10.0
    n_orders: int = 256

    @property
    def kappa(self) -> float:
        """Of a step."""
        return self.total / self.n_steps

    @property
    def eta(self) -> float:
        """What trading a share n of the order in one step costs, over n²: basis points."""
        return self.twap_cost * self.n_steps

    @property
    def aversion(self) -> float:
        """λσ² for shares of the order, over η: 2(cosh κ − 1)."""
        return 2.0 * (math.cosh(self.kappa) - 1.0)

    @property
    def reward(self) -> Reward:
        """Minus cost and risk, in basis points."""
        return Weighted([(1.0, Shortfall()), (1.0, Risk(self.eta * self.aversion))])

    @property
    def least(self) -> float:
        """Cost of the optimum, closed form."""
        return almgren_chriss_cost(self.kappa, self.n_steps, eta=self.eta, amount=1.0)

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
        buying = np.arange(self.n_orders) % 2 == 0
        orders = parent_orders(0, amount, buying, 0, n_ticks)
        return Drawn(days, _without_yesterday(np.zeros((1, n_ticks, 1), np.float32)), orders, rules)


@dataclass(frozen=True)
class DriftMarket:
    """Days that drift one way; features are the returns.

    drift, noise: a tick, in basis points; persistence: probability that today goes yesterday's way
    With no drift it is a martingale.
    """

    drift: float = 4.0
    noise: float = 20.0
    persistence: float = 0.75
    n_ticks: int = 26
    ticks_per_step: int = 2

    reward: ClassVar[Reward] = _PRICE_ADVANTAGE

    def draw(self, n_days: int, seed: int, name: str) -> Drawn:
        """One order a day, the whole day, buying or selling."""
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
    """Works orders of a `DriftMarket` by the exact odds that the day goes up.

    Whoever expects the price to go against the order trades at once, else waits. Nobody knows the
    way of the day better; that waiting also teaches is not counted, so that it is a reference and
    not a bound.
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


def martingale() -> DriftMarket:
    """Nothing to be known."""
    return DriftMarket(drift=0.0, persistence=0.5)


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
        """One order a day, the whole day, buying or selling; a tick a step."""
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
        return _whole_day_orders(price, _without_yesterday(today), rules, rng)


def _without_yesterday(today: Floats32) -> PublicArrays:
    return PublicArrays(today, np.zeros_like(today))


def _whole_day_orders(
    price: Floats, public: PublicArrays, rules: ExecutionRules, rng: np.random.Generator
) -> Drawn:
    """Orders of one share over whole days of volume 1 a tick, either side."""
    n_days, n_ticks = price.shape
    days = Days.from_prices(price, np.ones_like(price))
    buying = rng.random(n_days) < 0.5
    return Drawn(days, public, parent_orders(np.arange(n_days), 1.0, buying, 0, n_ticks), rules)
