"""What a member is paid, put together when a transition is drawn.

    reward = (r / σ_r − λ · c / σ_x) / (1 + λ) + β · information

r: what the book earned, as it was stored; σ_r: its running standard deviation, without which the
bonus would drown it or be drowned. c: what the bar adds to CVaR (`risk.cvar`), where that is
constrained, in units of the bars' returns x; λ its price, set by a PID controller. The information
is what the action tells of the skill (`population.bonus`), in [−1, 1], for members near the best.

Axes: `L` steps of a sequence, `B` sequences, `K` experts, `Z` skill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.config import Config
from echelon.models import ExpertObs
from echelon.ops.information import RunningStd
from echelon.population.bonus import SkillBonus, portfolios
from echelon.population.shared_replay import SharedBatch
from echelon.risk import PidLagrangian, PidSettings, QuantileSettings, TailQuantile, cvar_cost
from echelon.risk.lagrange import combined
from echelon.runs.checkpoint import below_prefix
from echelon.types import Floats, Floats32


class Pay:
    """Scales, price of the tail and bonus of one member."""

    def __init__(self, config: Config, n_assets: int, niche: int, seed: int) -> None:
        self.config = config
        self.n_assets = n_assets
        self.niche = niche
        self.seed = seed
        self.scale = RunningStd()
        self.return_scale = RunningStd()
        self.tail = TailQuantile(1, QuantileSettings())
        self.pid = PidLagrangian((1,), PidSettings(limit=config.risk.cvar_limit))
        self._costs: list[float] = []
        self._bonus: SkillBonus | None = None
        self._skills: Tensor | None = None

    @property
    def multiplier(self) -> float:
        """λ."""
        return float(self.pid.multiplier[0])

    def collected(self, reward: Floats32, bar_return: Floats) -> None:
        """Learn scales and tail from what books[E] earned at a bar."""
        self.scale.update(reward)
        if self.config.risk.cvar_constraint:
            self.return_scale.update(bar_return)
            self._costs.append(float(self.tail.cost(bar_return[:, None]).mean()))

    def settle(self, bonus: Mapping[str, NDArray[Any]] | None, skills: Floats32) -> None:
        """Fix λ and the bonus for a phase; bonus: weights of its model, None: none is paid."""
        if self._costs:
            self.pid.update(np.array([np.mean(self._costs)]))
            self._costs.clear()
        self._bonus, self._skills = None, torch.from_numpy(skills)
        if bonus is not None:
            n_skills, dim = skills.shape
            estimator = self.config.experts.mi_estimator
            self._bonus = SkillBonus(n_skills, self.n_assets, dim, estimator, self.seed)
            self._bonus.load({k: torch.from_numpy(np.array(v)) for k, v in bonus.items()})

    def of(
        self, drawn: SharedBatch, obs: ExpertObs, action: Tensor, beta: float
    ) -> tuple[Tensor, float]:
        """(reward[L,B], mean information); obs, action: of all steps, [L·B,…]."""
        reward = drawn.transitions.reward / self.scale.std
        if self.config.risk.cvar_constraint:
            cost = cvar_cost(drawn.behaviour.bar_return.astype(np.float64), self.tail.eta[0])
            reward = combined(reward, cost / self.return_scale.std, self.multiplier)
        paid = torch.from_numpy(np.ascontiguousarray(reward, dtype=np.float32))
        if self._bonus is None:
            return paid, 0.0
        assert self._skills is not None, "`settle` comes first"
        own = torch.full((action.shape[0],), self.niche, dtype=torch.int64)
        wanted = portfolios(action, obs.weights, obs.cash, obs.free)
        told = self._bonus.reward(obs.weights, obs.cash, wanted, own, self._skills)
        return paid + beta * told.view(paid.shape), float(told.mean())

    def restart(self) -> None:
        """Forget the tail of a policy that was replaced; scales are the market's and stay."""
        one = np.ones(1, dtype=bool)
        self.tail.restart(one)
        self.pid.restart(one)
        self._costs.clear()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) from which `restore` goes on bit for bit, between phases."""
        tail, tail_facts = self.tail.state()
        pid, pid_facts = self.pid.state()
        arrays = {f"tail.{k}": v for k, v in tail.items()} | {f"pid.{k}": v for k, v in pid.items()}
        return {name: torch.from_numpy(value) for name, value in arrays.items()}, {
            "scale": self.scale.state(),
            "return_scale": self.return_scale.state(),
            "costs": list(self._costs),
            "tail": tail_facts,
            "pid": pid_facts,
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.scale.restore(state["scale"])
        self.return_scale.restore(state["return_scale"])
        self._costs = [float(cost) for cost in state["costs"]]
        for name, memory in (("tail", self.tail), ("pid", self.pid)):
            arrays = {k: v.numpy() for k, v in below_prefix(f"{name}.", tensors).items()}
            memory.restore(arrays, state[name])
