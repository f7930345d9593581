"""What the router is paid in training: relative return, and for not using always the same expert.

    pay = relative return / its running standard deviation + λ · KL

A 5-bar relative return has a standard deviation of about 0.01, λ · log K is 0.16: undivided, the
bonus would be all that counts. KL is one of two (see ops.diversity), both in [0, log K]: `usage`
of the chosen expert, or how unlike the others' its portfolio is, `policy`. Cash is nobody's skill:
choosing it is paid no bonus and is no usage. λ follows the entropy of usage, once a rollout; one
that is set to 0 is a switch, and stays 0.

Axes: `E` decisions made together, `K` experts, `N` assets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from echelon.config.hierarchy import MetaRouterConfig
from echelon.ops.diversity import KlWeightRule, UsageWindow, policy_kl
from echelon.ops.information import RunningStd
from echelon.types import Floats, Floats32, Ints


class Incentive:
    """Makes rewards of relative returns; remembers scale, usage and λ."""

    def __init__(self, config: MetaRouterConfig, n_experts: int) -> None:
        self.n_experts = n_experts
        self.weight = config.kl_lambda
        """λ."""
        self._adapts = config.kl_lambda > 0.0
        self._kind = config.kl_bonus
        self._rule = KlWeightRule(floor=config.entropy_floor, most=config.kl_lambda_max)
        self.scale = RunningStd()
        self.usage = UsageWindow(n_experts)

    def unlikeness(
        self, targets: Floats, current: Floats32, rng: np.random.Generator
    ) -> Floats | None:
        """KL[K,E] of the experts' target weights[K,E,N] on the same books; None: not paid for.

        current[K,E,N]: what these hold, which stays where a target is NaN
        """
        if self._kind != "policy" or self.weight == 0.0:
            return None
        held = np.maximum(np.where(np.isnan(targets), current, targets), 0.0)
        total = held.sum(axis=-1, keepdims=True)
        return policy_kl(held / np.maximum(total, 1.0), rng)

    def pay(self, relative: Floats, chosen: Ints, kl: Floats | None) -> Floats:
        """Reward[E] of relative returns[E] of the decisions chosen[E], number K being cash."""
        self.scale.update(relative)
        paid = self.scale.scale(relative)
        expert = np.flatnonzero(chosen < self.n_experts)
        if self.weight > 0.0:
            if kl is not None:
                bonus = kl[chosen[expert], expert]
            else:
                bonus = self.usage.bonus(chosen[expert])
            paid[expert] += self.weight * bonus
        self.usage.record(chosen[expert])
        return paid

    def adapt(self) -> None:
        """Move λ by what usage was; once a rollout."""
        if not self._adapts:
            return
        self.weight = self._rule.next(self.weight, self.usage.entropy(), self.n_experts)

    def state(self) -> dict[str, Any]:
        """What `restore` needs; fit for JSON."""
        return {
            "weight": self.weight,
            "scale": self.scale.state(),
            "usage": self.usage.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, bit by bit."""
        self.weight = float(state["weight"])
        self.scale.restore(state["scale"])
        self.usage.restore(state["usage"])
