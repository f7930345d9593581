"""What a policy's network says about its action, and how that becomes shares.

    FractionHead    logits over fractions of the order; an action is a number of one of them
    RateHead        u ~ N(mean, σ²), rate = rate_max · sigmoid(u) of TWAP; an action is u

Probabilities of rates are those of u: the squashing is the same for old and new policy, so that it
cancels in PPO's ratio and in the divergence between two policies.

Both have `n_outputs` (how many of A the network gives; the others are weights that do not see the
state), `first_bias`[n_outputs] (where an untrained policy stands), `sample`, `greedy`, `log_prob`,
`entropy` and `divergence`, KL(teacher ‖ student), […] each of `params`[…,A], and `shares`[E] that
actions[E] ask of the simulator.

Axes: any `…`, `A` numbers that say a distribution.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from echelon.execution.interpreters import Fractions, TwapRate
from echelon.execution.simulator import Simulator
from echelon.ops.squashed import clip_log_std, gaussian_log_prob
from echelon.types import Floats

_HALF_LOG_2PIE = 0.5 * math.log(2.0 * math.pi * math.e)


class FractionHead:
    """Categorical."""

    def __init__(self, act: Fractions) -> None:
        self.act = act

    @property
    def n_outputs(self) -> int:
        """One logit a fraction."""
        return len(self.act.values)

    def first_bias(self) -> Tensor:
        """All alike."""
        return torch.zeros(self.n_outputs)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """By Gumbel's trick: logits and noise, the highest."""
        uniform = torch.rand(params.shape, generator=generator).clamp_min(1e-20)
        return (params - torch.log(-torch.log(uniform))).argmax(-1)

    def greedy(self, params: Tensor) -> Tensor:
        """The likeliest."""
        return params.argmax(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Of the fraction that was chosen."""
        return torch.log_softmax(params, -1).gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Of the choice."""
        log_pi = torch.log_softmax(params, -1)
        return -(log_pi.exp() * log_pi).sum(-1)

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Σ p_teacher (log p_teacher − log p_student)."""
        log_t, log_s = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
        return (log_t.exp() * (log_t - log_s)).sum(-1)

    def shares(self, actions: Tensor, simulator: Simulator) -> Floats:
        """Fractions of the order."""
        return self.act.shares(actions.numpy().astype(np.int64), simulator)


class RateHead:
    """A squashed Gaussian over the rate; params[…,2]: mean and log σ of u."""

    def __init__(self, act: TwapRate) -> None:
        self.act = act

    @property
    def n_outputs(self) -> int:
        """The mean; σ is one for all states."""
        return 1

    def first_bias(self) -> Tensor:
        """At TWAP: rate_max · sigmoid(u) = 1."""
        return torch.tensor([-math.log(self.act.rate_max - 1.0)])

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """U."""
        mean, log_std = self._parts(params)
        return mean + log_std.exp() * torch.randn(mean.shape, generator=generator)

    def greedy(self, params: Tensor) -> Tensor:
        """The mean of u."""
        return params[..., 0]

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Of u."""
        mean, log_std = self._parts(params)
        noise = (actions - mean) * torch.exp(-log_std)
        return gaussian_log_prob(noise[..., None], log_std[..., None])

    def entropy(self, params: Tensor) -> Tensor:
        """Of u."""
        return self._parts(params)[1] + _HALF_LOG_2PIE

    def divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Between two Gaussians, in closed form."""
        mean_t, log_t = self._parts(teacher)
        mean_s, log_s = self._parts(student)
        apart = ((2.0 * log_t).exp() + (mean_t - mean_s).square()) * (-2.0 * log_s).exp()
        return log_s - log_t + 0.5 * (apart - 1.0)

    def shares(self, actions: Tensor, simulator: Simulator) -> Floats:
        """Rate × TWAP's pace."""
        rate = self.act.rate_max * torch.sigmoid(actions.double())
        return self.act.shares(rate.numpy(), simulator)

    def _parts(self, params: Tensor) -> tuple[Tensor, Tensor]:
        return params[..., 0], clip_log_std(params[..., 1])
