"""The price of a constraint: a Lagrange multiplier set by a PID controller.

Stooke, Achiam and Abbeel (2020). Plain dual ascent is a controller with an integral term alone: it
answers late, overshoots and swings. With the cost J of the policy so far, its limit d and

    Δ  = J − d                          error
    D  = (J̄ − J̄_before)⁺                rise of the smoothed cost; a fall earns nothing
    I  = (I + Δ)⁺                       integral, never negative: no credit is saved up
    λ  = (k_p·Δ + k_i·I + k_d·D)⁺       at most `cap`

While λ is at its cap the integral grows no further than the cap needs (anti-windup), so that λ
leaves the cap as soon as the error falls, and not when all that piled up meanwhile is paid back.

The learner then climbs (A_r − λ·A_c) / (1 + λ): `combine_advantages`. Dividing keeps the size of
its steps when λ is large.

Gains are in multiplier per unit of cost: with CVaR as cost, Δ = 0.01 is one percent too much.

Axes: any shape, one multiplier each, usually `K` experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.errors import TrainingError
from echelon.risk._memory import GuardMemory, expand_mask, require, require_shape
from echelon.types import Bools, Floats

if TYPE_CHECKING:
    from torch import Tensor

Advantage = TypeVar("Advantage", float, "NDArray[Any]", "Tensor")


@dataclass(frozen=True, slots=True)
class PidSettings:
    """Gains, limit and bounds."""

    limit: float = 0.05
    """d: what the cost may be."""
    k_p: float = 10.0
    k_i: float = 1.0
    k_d: float = 10.0
    smoothing: float = 0.9
    """Decay of the cost whose rise is D; 0 takes the cost as it comes."""
    cap: float = 10.0
    """λ is never more."""

    def __post_init__(self) -> None:
        for name in ("k_p", "k_i", "k_d"):
            value = getattr(self, name)
            require(0 <= value < np.inf, f"lagrange.{name}", value, "a number of 0 or more")
        require(np.isfinite(self.limit), "lagrange.limit", self.limit, "a number")
        require(
            0 <= self.smoothing < 1, "lagrange.smoothing", self.smoothing, "0 or more and below 1"
        )
        require(0 < self.cap < np.inf, "lagrange.cap", self.cap, "a number above 0")


class Pid(NamedTuple):
    """Where the controller is.

    integral[...]: I; smoothed[...]: J̄, NaN before the first cost; multiplier[...]: λ
    """

    integral: Floats
    smoothed: Floats
    multiplier: Floats


def new_pid(shape: tuple[int, ...]) -> Pid:
    """Nothing seen yet, λ = 0."""
    return Pid(np.zeros(shape), np.full(shape, np.nan), np.zeros(shape))


def pid_step(pid: Pid, cost: Floats, settings: PidSettings) -> Pid:
    """One step of the controller with the costs J[...]."""
    require_shape("cost", cost, pid.integral.shape)
    if not np.isfinite(cost).all():
        raise TrainingError(
            f"the cost of the constraint is {cost}, expected finite numbers. Quarantine the "
            "expert whose returns are not."
        )
    error = cost - settings.limit
    before = np.where(np.isnan(pid.smoothed), cost, pid.smoothed)
    smoothed = settings.smoothing * before + (1.0 - settings.smoothing) * cost
    quick = settings.k_p * error + settings.k_d * np.maximum(smoothed - before, 0.0)
    integral = pid.integral
    if settings.k_i > 0:
        needed = (settings.cap - quick) / settings.k_i
        integral = np.maximum(integral + error, 0.0)
        integral = np.minimum(integral, np.maximum(pid.integral, needed))
    multiplier = np.clip(quick + settings.k_i * integral, 0.0, settings.cap)
    return Pid(integral, smoothed, multiplier)


class PidLagrangian(GuardMemory):
    """`pid_step` with a memory that can be saved and resumed."""

    WHAT = "Lagrange multiplier"
    REMEMBERED = ("integral", "smoothed", "multiplier")

    def __init__(self, shape: tuple[int, ...], settings: PidSettings) -> None:
        self.settings = settings
        self._integral, self._smoothed, self._multiplier = new_pid(shape)

    @property
    def multiplier(self) -> Floats:
        """λ[...], as of the last step."""
        return self._multiplier.copy()

    def update(self, cost: Floats) -> Floats:
        """Take the costs J[...] of the policies as they are now; return λ[...]."""
        now = Pid(self._integral, self._smoothed, self._multiplier)
        self._integral, self._smoothed, self._multiplier = pid_step(now, cost, self.settings)
        return self.multiplier

    def restart(self, which: Bools) -> None:
        """Forget what is known of the policies `which`[...], which were replaced."""
        chosen = expand_mask(which, self._integral.shape)
        self._integral[chosen] = 0.0
        self._smoothed[chosen] = np.nan
        self._multiplier[chosen] = 0.0


def combine_advantages(adv_r: Advantage, adv_c: Advantage, lam: Advantage | float) -> Advantage:
    """(A_r − λ·A_c) / (1 + λ): advantages of reward and cost as one; λ is broadcast to them.

    >>> combine_advantages(1.0, 0.5, 1.0)
    0.25
    """
    return (adv_r - lam * adv_c) / (1.0 + lam)
