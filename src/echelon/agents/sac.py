"""Soft actor-critic on replayed transitions (Haarnoja et al., 2018, 1812.05905).

One update, in this order:

1. The actor draws actions ã for the observations, with gradients, and a′ for the next ones.
2. Critics: one step on ½ Σᵢ (Qᵢ(s,a) − y)², y = r + discount · (min Q̄(s′,a′) − α log π(a′)).
3. Actor: one step on α log π(ã) − min Q(s,ã), through the critics that have just moved.
4. Temperature, where it is learned: one step on −log α · (log π(ã) + H̄), H̄ being `target_entropy`
   for each free dimension.
5. The target critics follow by τ.

What is not a number is refused before the critics move, and again before the actor does.

No noise is added to actions: the policy's own is what explores, and its density is what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.agents.offpolicy import (
    Batch,
    Descent,
    GaussianActor,
    Metrics,
    Obs,
    OffPolicy,
    OffPolicySettings,
    Sampled,
    TwinCritic,
    detached,
)
from echelon.ops.squashed import clip_log_std, gaussian_log_prob, squash_log_det


class SAC(OffPolicy):
    """Actor, twin critics, temperature."""

    def __init__(
        self, actor: GaussianActor, critic: TwinCritic, settings: OffPolicySettings, seed: int
    ) -> None:
        super().__init__(actor, critic, settings, seed)
        given = settings.entropy
        first = settings.first_temperature if given == "auto" else given
        self.log_alpha = nn.Parameter(torch.tensor([math.log(first)]))
        self.alpha_descent = Descent(
            "temperature", iter([self.log_alpha]), settings.lr_actor, math.inf
        )

    @torch.no_grad()
    def act(self, obs: Obs, chance: torch.Generator, *, explore: bool) -> Sampled:
        """Actions for observations, without gradients; explore: drawn, otherwise the middle."""
        return self._sample(obs, chance if explore else None)

    def update(self, batch: Batch, *, want_metrics: bool = True) -> Metrics:
        """One step of gradient descent of temperature, critics and actor."""
        obs = detached(batch.obs)
        now = self._sample(obs, self.chance)
        alpha = math.exp(float(self.log_alpha.detach()))
        with torch.no_grad():
            ahead = self._sample(batch.next_obs, self.chance)
            q_next = torch.minimum(*self.target_critic.net(batch.next_obs, ahead.action))
            target_q = batch.reward + batch.discount * (q_next - alpha * ahead.log_prob)

        excess = self._excess(obs, now)
        critic_loss = self._learn_critic(batch, target_q, scale=0.5)

        q = torch.minimum(*self.critic(obs, now.action))
        actor_loss = (alpha * now.log_prob - q).mean()
        self.actor_descent.gradient(actor_loss, only=True)
        self._descend(self.actor_descent, actor_loss)

        if self.settings.entropy == "auto":
            self.log_alpha.grad = torch.full_like(self.log_alpha, -excess)
            self.alpha_descent.step(self.settings.warmth(self.updates))
        self.target_critic.follow()
        self.updates += 1
        if not want_metrics:
            return {}
        return {
            "losses/critic": float(critic_loss),
            "losses/actor": actor_loss.item(),
            "losses/temperature": -math.log(alpha) * excess,
            "losses/critic_gradient_norm": self.critic_descent.norm,
            "losses/actor_gradient_norm": self.actor_descent.norm,
            "charts/temperature": alpha,
            "charts/entropy": -float(now.log_prob.detach().mean()),
            "charts/value": q.detach().mean().item(),
            "charts/learning_rate": self.settings.lr_actor * self.settings.warmth(self.updates - 1),
        }

    def _sample(self, obs: Obs, chance: torch.Generator | None) -> Sampled:
        """Reparameterised actions; without chance, those of the mean."""
        mean, log_std = self.actor(obs)
        free = self.actor.free(obs)
        log_std = clip_log_std(log_std)
        if chance is None:
            noise, raw = torch.zeros_like(mean), mean
        else:
            noise = torch.randn(mean.shape, generator=chance, dtype=mean.dtype)
            raw = torch.addcmul(mean, noise, log_std.exp())
        if free is not None:
            raw = raw * free
        raw_log_prob = gaussian_log_prob(noise, log_std, free)
        log_prob = raw_log_prob - squash_log_det(raw, free)
        return Sampled(torch.tanh(raw), raw, log_prob, raw_log_prob)

    def _excess(self, obs: Obs, sampled: Sampled) -> float:
        """Mean of log π + H̄: how much too little is left to chance."""
        free = self.actor.free(obs)
        n_free = sampled.action.shape[1] if free is None else float(free.sum()) / len(free)
        excess = float(sampled.log_prob.detach().mean()) + self.settings.target_entropy * n_free
        if not math.isfinite(excess):
            self._refuse({"losses/entropy": excess}, "networks")
        return excess

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) from which `restore` goes on bit for bit."""
        tensors, json_state = super().state()
        return tensors | {"log_alpha": self.log_alpha.detach()}, json_state

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        super().restore(tensors, state)
        with torch.no_grad():
            self.log_alpha.copy_(tensors["log_alpha"])

    def _descents(self) -> list[Descent]:
        return [*super()._descents(), self.alpha_descent]
