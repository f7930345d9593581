"""Policies of execution: what they are asked, the one loop that works orders, and schedules.

A policy gets a batch of orders (`start`) and is then asked, step by step, how many shares of
each it wants in the coming step. It may read the days only before `progress.tick`: what the tick
itself brings is not known when it is asked.

Schedules are policies that look at the clock, not at the market:

    twap              evenly over the order's ticks
    vwap              by the share of the day's volume that each tick had on the train days
    almgren_chriss    the optimum between the impact of haste and the risk of waiting, closed form

Each asks for its share of what is *left*, not of the whole: what a volume cap or a halt held up is
spread over the time there still is. Within a step the simulator trades evenly. One more schedule is
a class here and a line in `SCHEDULES`: evaluations then compare with it, and portfolios trade
through it once `market.executor` (`config.market`) names it.

Almgren and Chriss (2000): minimise η·Σ n_k² + λσ²·Σ x_k² over the trades n_k of N steps, x_k being
left after step k. Then x_k = X·sinh(κ(N−k))/sinh(κN) with 2(cosh κ − 1) = λσ²/η, and the least cost
is η·X·n_1. From the simulator's rules: a tick of volume v and price p costs p·ϑ·n²/v by temporary
impact ϑ; permanent impact π, which moves only the ticks after it, costs p·π/v·Σ_{s<t} n_s n_t, that
is a constant less p·(π/2)·n²/v. A step of m ticks trades n/m in each, hence η = p·(ϑ − π/2)/(m·v).

Axes: `E` orders, `D` days, `T` ticks of a day.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.errors import DataError, TrainingError
from echelon.execution.days import Days
from echelon.execution.features import PublicFeatures
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders
from echelon.execution.simulator import LEFT, ExecutionRules, Simulator, next_step
from echelon.types import Floats, Floats32, Ints


class ExecutionPolicy(Protocol):
    @property
    def name(self) -> str:
        """How reports call it."""

    def start(self, simulator: Simulator) -> None:
        """Once for a batch of orders, before the first step."""

    def request(self, simulator: Simulator) -> Floats:
        """[E] shares for the coming step, at least 0; more than is left is cut to that."""


def run_orders(
    policy: ExecutionPolicy,
    days: Days,
    orders: ParentOrders,
    rules: ExecutionRules,
    *,
    record: bool = True,
) -> History:
    """Work all orders to their end; record: keep what every tick did, too."""
    simulator = Simulator(days, orders, rules, record=record)
    policy.start(simulator)
    while not simulator.over:
        asked = np.asarray(policy.request(simulator), dtype=np.float64)
        if asked.shape != orders.amount.shape:
            raise TrainingError(
                f"policy {policy.name!r} asked for {asked.shape} amounts, expected one an order: "
                f"{orders.amount.shape}."
            )
        live = ~simulator.progress.done
        wrong = live & ~(np.isfinite(asked) & (asked >= 0.0))
        if wrong.any():
            e = int(np.argmax(wrong))
            order, step = History.from_simulator(simulator).name(e), int(simulator.progress.step[e])
            raise TrainingError(
                f"policy {policy.name!r} asked for {asked[e]} shares of {order} at step {step}: "
                "expected a number from 0. If it was learned, its weights have diverged: take an "
                "earlier checkpoint."
            )
        simulator.step(np.where(live, asked, 0.0))
    return History.from_simulator(simulator)


def current_step(simulator: Simulator) -> dict[str, NDArray[Any]]:
    """The orders' own state and nothing of the market, by Qlib's names, for policies from there.

    acquiring[E]: 1 for buys; cur_step, num_step[E]: of the order itself; target, position[E]: whole
    and left. Integers and numbers have 32 bits.
    """
    progress, orders = simulator.progress, simulator.orders
    return {
        "acquiring": orders.buying.astype(np.int32),
        # A finished order still needs a step that exists.
        "cur_step": np.minimum(progress.step, simulator.n_steps - 1).astype(np.int32),
        "num_step": simulator.n_steps.astype(np.int32),
        "target": orders.amount.astype(np.float32),
        "position": _nothing_below(progress.left),
    }


def full_history(simulator: Simulator, features: PublicFeatures) -> dict[str, NDArray[Any]]:
    """The orders' state with the features of their days, as known when the coming step begins.

    Networks of ours do not need features copied for every order: they encode a day once.

    data_processed[E,T,F]: today, zero from cur_tick on; data_processed_prev[E,T,F]: yesterday
    cur_tick[E]: next tick, at most T-1
    position_history[E,S+1]: left before the first step and after each (Qlib cuts the last off),
        zero for those to come
    """
    assert features.today.shape[:2] == simulator.days.shape, "features are of other days"
    progress, orders = simulator.progress, simulator.orders
    n_ticks = simulator.days.shape[1]
    over = np.arange(n_ticks) < progress.tick[:, None]
    # Steps not taken hold zero left already.
    history = np.concatenate([orders.amount[:, None], simulator.steps.left], axis=1)
    return {
        **current_step(simulator),
        "data_processed": np.where(over[:, :, None], features.today[orders.day], np.float32(0.0)),
        "data_processed_prev": features.yesterday[orders.day],
        "cur_tick": np.minimum(progress.tick, n_ticks - 1).astype(np.int32),
        "position_history": _nothing_below(history),
    }


def _nothing_below(left: Floats) -> Floats32:
    """Less than 1e-6 left is nothing."""
    return np.where(left < LEFT, 0.0, left).astype(np.float32)


class _Schedule:
    def start(self, simulator: Simulator) -> None:
        """Nothing has to be made ready."""


@dataclass(frozen=True)
class Twap(_Schedule):
    """Evenly over the ticks that are left."""

    name: str = "twap"

    def request(self, simulator: Simulator) -> Floats:
        coming = next_step(simulator)
        return np.asarray(simulator.progress.left * coming.ticks / coming.left)


class Vwap(_Schedule):
    """By the mean over train days of each tick's share of its day's volume.

    pooled[T]: of all days, for symbols never seen. Days without volume do not count; the others all
    count alike, however much they traded.
    """

    name = "vwap"

    def __init__(self, train: Days) -> None:
        total = train.volume.sum(axis=1)
        traded = total > 0.0
        if not traded.any():
            raise DataError(
                f"none of the {len(total)} train days, whose volume profile vwap follows, has any "
                "volume. Import bars of split.train with volume, or use twap."
            )
        share = train.volume[traded] / total[traded, None]
        symbols = np.asarray(train.symbols)[traded]
        self.by_symbol = {str(s): share[symbols == s].mean(axis=0) for s in np.unique(symbols)}
        self.pooled: Floats = np.asarray(share.mean(axis=0))
        self._before = np.zeros((0, 0))

    def start(self, simulator: Simulator) -> None:
        days = simulator.days
        if days.shape[1] != len(self.pooled):
            raise DataError(
                f"the volume profile has {len(self.pooled)} ticks a day, these days have "
                f"{days.shape[1]}. Fit it on days of the same grid."
            )
        shares = np.stack([self.by_symbol.get(symbol, self.pooled) for symbol in days.symbols])
        # [D,T+1]: share of the volume before the tick
        self._before = np.concatenate([np.zeros((len(shares), 1)), shares.cumsum(axis=1)], axis=1)

    def request(self, simulator: Simulator) -> Floats:
        """[E]; evenly where the profile has no volume to the order's end."""
        coming, orders, progress = next_step(simulator), simulator.orders, simulator.progress
        now = self._before[orders.day, np.minimum(progress.tick, orders.end)]
        step = self._before[orders.day, coming.end] - now
        rest = self._before[orders.day, orders.end] - now
        share = np.where(rest > 1e-12, step / np.maximum(rest, 1e-12), coming.ticks / coming.left)
        return np.asarray(progress.left * np.where(coming.final, 1.0, np.clip(share, 0.0, 1.0)))


@dataclass(frozen=True)
class AlmgrenChriss(_Schedule):
    """The closed form, with κ a whole step.

    Orders on the grid get the optimum of their steps. Those with a short first or last step follow
    the same curve, read at the ticks where their steps end.
    """

    kappa: float
    name: str = "almgren_chriss"

    def request(self, simulator: Simulator) -> Floats:
        coming = next_step(simulator)
        per_tick = self.kappa / simulator.rules.ticks_per_step
        kept = _sinh_ratio(per_tick, coming.left - coming.ticks, coming.left)
        return np.asarray(simulator.progress.left * np.where(coming.final, 1.0, 1.0 - kept))


class ScheduleInputs(NamedTuple):
    """train: days to fit on; n_steps: of the longest order; kappa: `execution.kappa`"""

    train: Days
    n_steps: int
    kappa: float


SCHEDULES: Mapping[str, Callable[[ScheduleInputs], ExecutionPolicy]] = {
    "twap": lambda _: Twap(),
    "vwap": lambda given: Vwap(given.train),
    "almgren_chriss": lambda given: AlmgrenChriss(given.kappa / given.n_steps),
}
"""Name → maker."""


def eta_of(rules: ExecutionRules, *, price: float, volume: float) -> float:
    """Η of a step: what a step's trade costs over its shares², at a typical price and tick."""
    haste = rules.temporary - 0.5 * rules.permanent
    return price * haste / (rules.ticks_per_step * volume)


def almgren_chriss_left(kappa: float, n_steps: int) -> Floats:
    """[N+1] share of the order left at the start and after each step of the optimal schedule."""
    over = np.arange(n_steps, -1, -1, dtype=np.int64)
    return _sinh_ratio(kappa, over, np.full_like(over, n_steps))


def almgren_chriss_cost(kappa: float, n_steps: int, *, eta: float, amount: float) -> float:
    """Least value of η·Σ n² + λσ²·Σ x²: η·X·n_1."""
    left = almgren_chriss_left(kappa, n_steps)
    return float(eta * amount**2 * (1.0 - left[1]))


def schedule_cost(left: Floats, kappa: float, *, eta: float, amount: float) -> Floats:
    """η·Σ n² + λσ²·Σ x² of any schedule, given as left[…,N+1] with 1 first and 0 last."""
    assert np.allclose(left[..., 0], 1.0), "left does not begin with the whole order"
    aversion = 2.0 * (math.cosh(kappa) - 1.0)
    traded = (np.diff(left, axis=-1) ** 2).sum(axis=-1)
    waited = (left[..., 1:-1] ** 2).sum(axis=-1)
    return np.asarray(eta * amount**2 * (traded + aversion * waited))


def _sinh_ratio(kappa: float, over: Ints, under: Ints) -> Floats:
    """sinh(κ·over)/sinh(κ·under) for 0 <= over <= under, without overflow; over/under at κ = 0."""
    if kappa < 1e-9:
        return np.asarray(over / under)
    shrunk = np.exp(-kappa * (under - over))
    # Of both sines e^{κ·…}/2 is taken out.
    return np.asarray(shrunk * np.expm1(-2.0 * kappa * over) / np.expm1(-2.0 * kappa * under))
