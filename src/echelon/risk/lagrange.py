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

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.errors import TrainingError
from echelon.risk._memory import GuardMemory, require_shape
from echelon.types import Floats

if TYPE_CHECKING:
    from torch import Tensor

Advantage = TypeVar("Advantage", float, "NDArray[Any]", "Tensor")


class PidSettings(NamedTuple):
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


class PidLagrangian(GuardMemory):
    """The controller. integral[...]: I; smoothed[...]: J̄, NaN before the first cost."""

    WHAT = "Lagrange multiplier"
    REMEMBERED: ClassVar = {"integral": 0.0, "smoothed": np.nan, "multiplier": 0.0}

    def __init__(self, shape: tuple[int, ...], settings: PidSettings) -> None:
        self.shape = shape
        self.settings = settings
        self._integral = np.zeros(shape)
        self._smoothed = np.full(shape, np.nan)
        self._multiplier = np.zeros(shape)

    @property
    def multiplier(self) -> Floats:
        """λ[...], as of the last step."""
        return self._multiplier.copy()

    def update(self, cost: Floats) -> Floats:
        """Take the costs J[...] of the policies as they are now; return λ[...]."""
        require_shape("cost", cost, self.shape)
        if not np.isfinite(cost).all():
            raise TrainingError(
                f"the cost of the constraint is {cost}, expected finite numbers. Quarantine the "
                "expert whose returns are not."
            )
        rule = self.settings
        error = cost - rule.limit
        before = np.where(np.isnan(self._smoothed), cost, self._smoothed)
        self._smoothed = rule.smoothing * before + (1.0 - rule.smoothing) * cost
        quick = rule.k_p * error + rule.k_d * np.maximum(self._smoothed - before, 0.0)
        if rule.k_i > 0:
            needed = (rule.cap - quick) / rule.k_i
            grown = np.maximum(self._integral + error, 0.0)
            self._integral = np.minimum(grown, np.maximum(self._integral, needed))
        self._multiplier = np.clip(quick + rule.k_i * self._integral, 0.0, rule.cap)
        return self.multiplier


def combine_advantages(adv_r: Advantage, adv_c: Advantage, lam: Advantage | float) -> Advantage:
    """(A_r − λ·A_c) / (1 + λ): advantages of reward and cost as one; λ is broadcast to them.

    >>> combine_advantages(1.0, 0.5, 1.0)
    0.25
    """
    return (adv_r - lam * adv_c) / (1.0 + lam)
