"""Twin delayed deterministic policy gradients on replayed transitions (Fujimoto et al., 2018).

One update, in this order:

1. Critics: one step on Σᵢ (Qᵢ(s,a) − y)², y = r + discount · min Q̄(s′,a′), where a′ is the target
   actor's action plus noise, cut at `noise_clip`: a value that holds in a neighbourhood only.
2. At every `policy_delay`-th update the actor: one step on −Q₁(s, tanh(mean)), through the critics
   that have just moved; then the targets of critics and actor follow by τ.

The actor is SAC's; of its Gaussian only the mean is used. Exploration is noise added after the
tanh. It has no density worth the name: log-probabilities are zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from echelon.agents.offpolicy import ActionSample, Obs, OffPolicy, ReplayBatch, Target, detach_obs
from echelon.config.agents import TrainConfig
from echelon.types import Metrics

_LARGEST = 1.0 - 2.0**-20
"""Largest action: its atanh is finite in float32, and its tanh comes back to it."""


class TD3(OffPolicy):
    def _begin(self, train: TrainConfig) -> None:
        self.target_actor = Target(cast(nn.Module, self.actor), self.expert.tau)
        self._actor_loss = 0.0

    @torch.no_grad()
    def act(self, obs: Obs, generator: torch.Generator, *, explore: bool) -> ActionSample:
        """Actions for observations, without gradients; explore: with Gaussian noise on them."""
        mean, _ = self.actor(obs)
        raw = mean
        if explore and self.expert.exploration_noise:
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
            action = torch.tanh(mean) + self.expert.exploration_noise * noise
            raw = torch.atanh(action.clamp(-_LARGEST, _LARGEST))
        free = self.actor.free(obs)
        if free is not None:
            raw = raw * free
        nothing = mean.new_zeros(len(mean))
        return ActionSample(
            torch.tanh(raw), raw, nothing, nothing, mean, torch.full_like(mean, -math.inf)
        )

    def update(self, batch: ReplayBatch, *, want_metrics: bool = True) -> Metrics:
        """One step of gradient descent of the critics and, where it is due, of the actor."""
        with torch.no_grad():
            action = self._target_action(batch)
            q_next = torch.minimum(*self.target_critic.net(batch.next_obs, action))
            target_q = batch.reward + batch.discount * q_next
        warmth = self.warmth
        critic_loss = self._learn_critic(batch.obs, batch.action, target_q, scale=1.0)
        if (self.updates + 1) % self.expert.policy_delay == 0:
            obs = detach_obs(batch.obs)
            mean, free = self.actor(obs)[0], self.actor.free(obs)
            loss = -self.critic(obs, torch.tanh(mean if free is None else mean * free))[0].mean()
            self.actor_descent.gradient(loss, only=True)
            self._descend(self.actor_descent, loss)
            self._actor_loss = float(loss.detach())
            self.target_critic.follow()
            self.target_actor.follow()
        self.updates += 1
        if not want_metrics:
            return {}
        return {
            "losses/critic": float(critic_loss),
            "losses/actor": self._actor_loss,
            "losses/critic_gradient_norm": self.critic_descent.norm,
            "losses/actor_gradient_norm": self.actor_descent.norm,
            "charts/value": float(target_q.mean()),
            "charts/learning_rate": self.actor_descent.lr * warmth,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, json_state = super().state()
        # The actor's last numbers are shown next to those of the critics until it moves again.
        shown = {"actor_loss": self._actor_loss, "actor_norm": self.actor_descent.norm}
        return tensors, json_state | shown

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        super().restore(tensors, state)
        self._actor_loss = float(state["actor_loss"])
        self.actor_descent.norm = float(state["actor_norm"])

    def _target_action(self, batch: ReplayBatch) -> Tensor:
        """The target actor's actions at the next observations, smoothed."""
        settings = self.expert
        mean, _ = self.target_actor.net(batch.next_obs)
        noise = torch.randn(mean.shape, generator=self.generator, dtype=mean.dtype)
        noise.mul_(settings.target_noise).clamp_(-settings.noise_clip, settings.noise_clip)
        action = (torch.tanh(mean) + noise).clamp_(-1.0, 1.0)
        free = self.actor.free(batch.next_obs)
        return action if free is None else action * free

    def _modules(self) -> dict[str, nn.Module]:
        return super()._modules() | {"target_actor": self.target_actor.net}
