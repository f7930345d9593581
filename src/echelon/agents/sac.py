"""Soft actor-critic on replayed transitions (Haarnoja et al., 2018, 1812.05905).

One update, in this order:

1. The actor draws actions ã for the observations, with gradients, and a′ for the next ones.
2. Critics: one step on ½ Σᵢ (Qᵢ(s,a) − y)², y = r + discount · (min Q̄(s′,a′) − α log π(a′)).
3. Actor: one step on α log π(ã) − min Q(s,ã), through the critics that have just moved.
4. Temperature, where it is learned: one step on −log α · (log π(ã) + H̄), H̄ being `target_entropy`
   for each free dimension.
5. The target critics follow by τ.

What is not a number is refused before the critics move, and again before the actor does.

`update_sequences` does the same on stretches of several steps, which may be other policies': then y
is Retrace's target with soft values (`ops.returns`), traces are cut where π would not
have acted so, and shared steps of a policy too far from π are left out of the critics' loss.

No noise is added to actions: the policy's own is what explores, and its density is what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.agents.offpolicy import (
    ActionSample,
    Descent,
    Obs,
    OffPolicy,
    ReplayBatch,
    SequenceBatch,
    detach_obs,
)
from echelon.config.agents import TrainConfig
from echelon.config.hierarchy import SharingConfig
from echelon.ops.returns import retrace
from echelon.ops.squashed import (
    clip_log_std,
    gaussian_log_prob,
    kl_per_dimension,
    log_ratio,
    squash_log_det,
    too_far,
    trace_coefficients,
)
from echelon.types import Metrics


class Traced(NamedTuple):
    """Metrics of an update on sequences, and which of its steps counted: c, dropped[L,B]."""

    metrics: Metrics
    trace: Tensor
    dropped: Tensor


class SAC(OffPolicy):
    def _begin(self, train: TrainConfig) -> None:
        expert = self.expert
        first = expert.first_temperature if expert.entropy == "auto" else expert.entropy
        self.target_entropy = expert.target_entropy
        self.log_alpha = nn.Parameter(torch.tensor([math.log(first)]))
        weights = iter([self.log_alpha])
        self.alpha_descent = Descent("temperature", weights, train.lr_actor, math.inf)

    @torch.no_grad()
    def act(self, obs: Obs, generator: torch.Generator, *, explore: bool) -> ActionSample:
        """Actions for observations, without gradients; explore: drawn, otherwise the middle."""
        return self._sample(obs, generator if explore else None)

    def update(self, batch: ReplayBatch, *, want_metrics: bool = True) -> Metrics:
        """One step of gradient descent of temperature, critics and actor."""
        obs = detach_obs(batch.obs)
        now = self._sample(obs, self.generator)
        target_q = batch.reward + batch.discount * self._next_value(batch.next_obs)
        return self._learn(batch.obs, obs, batch.action, now, target_q, want_metrics=want_metrics)

    def update_sequences(
        self, batch: SequenceBatch, sharing: SharingConfig, *, want_metrics: bool = True
    ) -> Traced:
        """One step of gradient descent of temperature, critics and actor, on sequences.

        sharing: how far those of others count: λ, the divergence beyond which a step is dropped,
        or no correction at all
        """
        obs = detach_obs(batch.obs)
        now = self._sample(obs, self.generator)
        shape = batch.reward.shape
        with torch.no_grad():
            v_next = self._next_value(batch.next_obs).view(shape)
            slow = obs if batch.slow_obs is None else batch.slow_obs
            q_taken = torch.minimum(*self.target_critic.net(slow, batch.action)).view(shape)
            trace = torch.full_like(batch.reward, sharing.trace)
            dropped = torch.zeros(shape, dtype=torch.bool)
            if sharing.corrected:
                free, log_prob = self.actor.free(obs), batch.raw_log_prob.reshape(-1)
                ratio = log_ratio(batch.raw, log_prob, now.mean, now.log_std, free).view(shape)
                kl = kl_per_dimension(now.mean, now.log_std, batch.mean, batch.log_std, free)
                dropped = too_far(kl.view(shape), batch.shared.expand(shape), sharing.kl_limit)
                trace = trace_coefficients(ratio, sharing.trace) * ~dropped
            target_q = retrace(
                *(batch.reward, batch.discount, v_next, q_taken, trace), truncated=batch.truncated
            )
        metrics = self._learn(
            *(batch.obs, obs, batch.action, now, target_q.view(-1)),
            weight=(batch.loss_weights * ~dropped).view(-1),
            actor_weight=batch.loss_weights.view(-1),
            want_metrics=want_metrics,
        )
        return Traced(metrics, trace, dropped)

    @torch.no_grad()
    def _next_value(self, next_obs: Obs) -> Tensor:
        """Min Q̄(s′,a′) − α log π(a′) of an action drawn for each of the next observations."""
        ahead = self._sample(next_obs, self.generator)
        q_next = torch.minimum(*self.target_critic.net(next_obs, ahead.action))
        alpha = math.exp(float(self.log_alpha.detach()))
        return q_next - alpha * ahead.log_prob

    def _learn(
        self,
        obs_with_history: Obs,
        obs: Obs,
        action: Tensor,
        now: ActionSample,
        target_q: Tensor,
        *,
        weight: Tensor | None = None,
        actor_weight: Tensor | None = None,
        want_metrics: bool,
    ) -> Metrics:
        """Steps of critics, actor and temperature towards target_q[B]."""
        alpha, warmth = math.exp(float(self.log_alpha.detach())), self.warmth
        # Mean of log π + H̄: by how much the policy is too certain.
        free = self.actor.free(obs)
        n_free = now.action.shape[1] if free is None else float(free.sum()) / len(free)
        excess = float(now.log_prob.detach().mean()) + self.target_entropy * n_free
        self._refuse_divergence({"losses/entropy": excess}, "networks")
        critic_loss = self._learn_critic(obs_with_history, action, target_q, 0.5, weight)

        q = torch.minimum(*self.critic(obs, now.action))
        regret = alpha * now.log_prob - q
        actor_loss = (regret if actor_weight is None else regret * actor_weight).mean()
        self.actor_descent.gradient(actor_loss, only=True)
        self._descend(self.actor_descent, actor_loss)

        if self.expert.entropy == "auto":
            self.log_alpha.grad = torch.full_like(self.log_alpha, -excess)
            self.alpha_descent.step(warmth)
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
            "charts/learning_rate": self.actor_descent.lr * warmth,
        }

    def _sample(self, obs: Obs, generator: torch.Generator | None) -> ActionSample:
        """Reparameterised actions; without noise, those of the mean."""
        mean, log_std = self.actor(obs)
        free = self.actor.free(obs)
        log_std = clip_log_std(log_std)
        if generator is None:
            noise, raw = torch.zeros_like(mean), mean
        else:
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
            raw = torch.addcmul(mean, noise, log_std.exp())
        if free is not None:
            raw = raw * free
        raw_log_prob = gaussian_log_prob(noise, log_std, free)
        log_prob = raw_log_prob - squash_log_det(raw, free)
        return ActionSample(
            torch.tanh(raw), raw, log_prob, raw_log_prob, mean.detach(), log_std.detach()
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, json_state = super().state()
        return tensors | {"log_alpha": self.log_alpha.detach()}, json_state

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        super().restore(tensors, state)
        with torch.no_grad():
            self.log_alpha.copy_(tensors["log_alpha"])

    def _descents(self) -> list[Descent]:
        return [*super()._descents(), self.alpha_descent]
