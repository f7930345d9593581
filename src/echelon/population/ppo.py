"""The router's network and how it learns: PPO with masks, written for a network this small.

The same as sb3-contrib's MaskablePPO with its defaults, number for number, without what that spends
on being general: of two layers of 64 there is less to compute than to administer.

1. `collect` lets the network act in all environments for a rollout, by draws among what is allowed.
2. `advantages` (GAE; Schulman et al., 2016): an episode that was cut short goes on with its value.
3. `Ppo.update` makes `EPOCHS` passes over the rollout in minibatches of `meta_router.batch_size`;
   `ppo_loss` is the clipped surrogate (Schulman et al., 2017), the value's error and the entropy.

With `meta_router.prior` the network begins at the fixed-share rule: logits are the rule's log
weights, the last K entries of what it sees, plus what it has learned, which is exactly 0 at first;
and the loss has a penalty on KL(policy ‖ prior). The rule knows no cash: in the prior it has as
much as the rule leaves to an expert that was always bad.

Axes: `S` steps of a rollout, `E` environments, `B` decisions, `K` experts, number K is cash, `O`
entries of an observation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from echelon.config.hierarchy import MetaRouterConfig
from echelon.population.reference_policies import HEDGE_SHARE
from echelon.types import Bools, Floats32

if TYPE_CHECKING:
    from echelon.population.meta_env import MetaEnv

EPOCHS, CLIP, VALUE_WEIGHT, GRADIENT_NORM = 10, 0.2, 0.5, 0.5
"""Of MaskablePPO, by default."""
_HIDDEN = 64
_MASKED = -1e8  # the logit of what is not allowed


class _Layers(nn.Module):
    """Hidden layers of policy and value, each of its own. (Names are SB3's, as in older runs.)"""

    def __init__(self, n_obs: int) -> None:
        super().__init__()
        self.policy_net, self.value_net = (
            nn.Sequential(
                *(nn.Linear(n_obs, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _HIDDEN), nn.Tanh())
            )
            for _ in range(2)
        )


class RouterNet(nn.Module):
    """Logits of K experts and cash, and the value of a place."""

    def __init__(self, n_obs: int, n_experts: int, *, prior: bool) -> None:
        super().__init__()
        self.n_obs, self.n_experts, self.has_prior = n_obs, n_experts, prior
        self.mlp_extractor = _Layers(n_obs)
        self.action_net = nn.Linear(_HIDDEN, n_experts + 1)
        self.value_net = nn.Linear(_HIDDEN, 1)
        for part, gain in (
            (self.mlp_extractor, math.sqrt(2.0)),
            (self.action_net, 0.01),
            (self.value_net, 1.0),
        ):
            for layer in part.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, gain=gain)
                    nn.init.zeros_(layer.bias)
        if prior:
            nn.init.zeros_(self.action_net.weight)

    def prior(self, obs: Tensor) -> Tensor:
        """Logits[B,K+1] of the fixed-share rule at obs[B,O]."""
        trust = obs[:, -self.n_experts :]
        cash = torch.full_like(trust[:, :1], math.log(HEDGE_SHARE / self.n_experts))
        return torch.cat([trust, cash], dim=1)

    def logits(self, obs: Tensor) -> Tensor:
        """[B,K+1], of what is not allowed too."""
        learned: Tensor = self.action_net(self.mlp_extractor.policy_net(obs))
        return learned + self.prior(obs) if self.has_prior else learned

    def values(self, obs: Tensor) -> Tensor:
        """[B]."""
        value: Tensor = self.value_net(self.mlp_extractor.value_net(obs))
        return value.flatten()


def masked_log_probs(logits: Tensor, allowed: Tensor) -> Tensor:
    """[B,K+1] log probabilities of what is allowed[B,K+1]; of the rest about −1e8.

    Normalised before and after masking, as MaskablePPO does: the same bits.
    """
    logits = logits - logits.logsumexp(dim=-1, keepdim=True)
    masked = torch.where(allowed, logits, _MASKED)
    return masked - masked.logsumexp(dim=-1, keepdim=True)


class Rollout(NamedTuple):
    """Decisions of a rollout, [B,…] or, while it is collected, [S,E,…] each."""

    obs: Tensor
    allowed: Tensor
    actions: Tensor
    log_prob: Tensor
    advantage: Tensor
    returns: Tensor

    def minibatches(self, order: Tensor, size: int) -> Iterator[Rollout]:
        """The decisions in this order[B], `size` at a time."""
        mixed = [part[order] for part in self]
        for low in range(0, len(order), size):
            yield Rollout._make(part[low : low + size] for part in mixed)


class Losses(NamedTuple):
    """What an update went down; entropy: of the policy, kl: from the prior (0 without one)."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor


def ppo_loss(net: RouterNet, batch: Rollout, meta: MetaRouterConfig) -> Losses:
    """Of a minibatch of B decisions."""
    log_probs = masked_log_probs(net.logits(batch.obs), batch.allowed)
    log_prob = log_probs.gather(-1, batch.actions[:, None]).squeeze(-1)
    advantage = batch.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = torch.exp(log_prob - batch.log_prob)
    clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    policy = -torch.min(advantage * ratio, advantage * clipped).mean()
    value = functional.mse_loss(batch.returns, net.values(batch.obs))
    probs = torch.softmax(log_probs, dim=-1)
    zero = torch.zeros((), dtype=probs.dtype)
    entropy = -torch.where(batch.allowed, log_probs * probs, zero).sum(-1).mean()
    total = policy - meta.ent_coef * entropy + VALUE_WEIGHT * value
    kl = zero
    if net.has_prior:
        prior = masked_log_probs(net.prior(batch.obs), batch.allowed)
        kl = torch.where(batch.allowed, probs * (log_probs - prior), zero).sum(-1).mean()
        total = total + meta.prior_kl * kl
    return Losses(total, policy, value, entropy, kl)


def advantages(
    rewards: Floats32,
    values: Floats32,
    begins: Floats32,
    last: Floats32,
    gamma: float,
    decay: float,
) -> Floats32:
    """[S,E] by GAE; values[S,E], begins[S+1,E]: 1 where an episode begins, last[E]: values after.

    rewards[S,E]: with the discounted value of what a truncation cut off
    """
    out, ahead = np.zeros_like(rewards), np.zeros_like(last)
    for s in reversed(range(len(rewards))):
        goes_on = 1.0 - begins[s + 1]
        after = last if s == len(rewards) - 1 else values[s + 1]
        delta = rewards[s] + gamma * after * goes_on - values[s]
        ahead = delta + gamma * decay * goes_on * ahead
        out[s] = ahead
    return out


class Learned(NamedTuple):
    """Means over the minibatches of an update, and how well values fit their targets."""

    entropy: float
    kl: float
    explained_variance: float


class Ppo:
    """A network in training. shuffle, draws: where its random numbers come from"""

    def __init__(self, net: RouterNet, meta: MetaRouterConfig) -> None:
        self.net, self.meta = net, meta
        # One call for all parameters.
        self.optimizer = torch.optim.Adam(net.parameters(), lr=meta.lr, eps=1e-5, fused=True)
        self.lr, self.decisions, self.updates = meta.lr, 0, 0

    def learn(
        self,
        env: MetaEnv,
        steps: int,
        rng: np.random.RandomState,
        generator: torch.Generator,
        after_rollout: Callable[[], None],
    ) -> tuple[Learned, list[float]]:
        """At least `steps` decisions from the start of episodes on, in whole rollouts.

        (what the last update was like, mean relative return of every step)
        """
        total, relative = self.decisions + steps, []
        obs, begins = env.reset(), np.ones(env.num_envs, dtype=np.float32)
        learned = Learned(math.nan, math.nan, math.nan)
        while self.decisions < total:
            rollout, values, obs, begins = self._collect(env, obs, begins, generator, relative)
            after_rollout()
            learned = self.update(rollout, values, rng)
        return learned, relative

    def _collect(
        self,
        env: MetaEnv,
        obs: Floats32,
        begins: Floats32,
        generator: torch.Generator,
        relative: list[float],
    ) -> tuple[Rollout, Floats32, Floats32, Floats32]:
        """(a rollout, the values[B] it was collected with, observations[E] and begins[E] after)."""
        n_steps, n_envs = self.meta.n_steps // self.meta.n_envs, env.num_envs
        shape = (n_steps, n_envs)
        seen = np.empty((*shape, self.net.n_obs), dtype=np.float32)
        allowed = np.empty((*shape, self.net.n_experts + 1), dtype=np.bool_)
        actions = np.empty(shape, dtype=np.int64)
        log_prob, values, rewards = np.empty((3, *shape), dtype=np.float32)
        started = np.empty((n_steps + 1, n_envs), dtype=np.float32)
        for s in range(n_steps):
            seen[s], allowed[s], started[s] = obs, env.action_masks(), begins
            actions[s], log_prob[s], values[s] = self._act(obs, allowed[s], generator)
            obs, rewards[s], done, infos = env.step(actions[s])  # type: ignore[assignment]
            relative.append(float(env.relative.mean()))
            for e in np.flatnonzero(done):
                if infos[e]["TimeLimit.truncated"]:
                    rewards[s, e] += (
                        self.meta.gamma * self._values(infos[e]["terminal_observation"][None])[0]
                    )
            begins = done.astype(np.float32)
        self.decisions += n_steps * n_envs
        started[n_steps] = begins
        last = self._values(obs)
        ahead = advantages(rewards, values, started, last, self.meta.gamma, self.meta.gae_lambda)
        parts = (seen, allowed, actions, log_prob, ahead, ahead + values)
        rollout = Rollout._make(torch.from_numpy(_by_environment(part)) for part in parts)
        return rollout, _by_environment(values), obs, begins

    @torch.no_grad()
    def _act(
        self, obs: Floats32, allowed: Bools, generator: torch.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(choices[E] by draws, their log probabilities, values)."""
        seen = torch.from_numpy(obs)
        log_probs = masked_log_probs(self.net.logits(seen), torch.from_numpy(allowed))
        drawn = torch.multinomial(torch.softmax(log_probs, dim=-1), 1, True, generator=generator)
        log_prob = log_probs.gather(-1, drawn).squeeze(-1)
        return drawn.squeeze(-1).numpy(), log_prob.numpy(), self.net.values(seen).numpy()

    @torch.no_grad()
    def _values(self, obs: Floats32) -> Floats32:
        """[E] of obs[E,O]."""
        return self.net.values(torch.from_numpy(obs)).numpy()

    def update(self, rollout: Rollout, values: Floats32, rng: np.random.RandomState) -> Learned:
        """`EPOCHS` passes over a rollout of B decisions that had values[B]."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        parameters, entropies, kls = list(self.net.parameters()), [], []
        for _ in range(EPOCHS):
            order = torch.from_numpy(rng.permutation(len(values)))
            for batch in rollout.minibatches(order, self.meta.batch_size):
                losses = ppo_loss(self.net, batch, self.meta)
                self.optimizer.zero_grad()
                losses.total.backward()
                nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
                self.optimizer.step()
                entropies.append(losses.entropy.detach())
                kls.append(losses.kl.detach())
        self.updates += EPOCHS
        # A loss that is no number makes all parameters so, and with them the entropy.
        target = rollout.returns.numpy()
        spread = float(np.var(target))
        fit = 1.0 - float(np.var(target - values)) / spread if spread else math.nan
        return Learned(*(float(torch.stack(part).mean()) for part in (entropies, kls)), fit)


def _by_environment(part: np.ndarray) -> np.ndarray:
    """[S,E,…] -> [E·S,…], an environment after the other."""
    return np.ascontiguousarray(part.swapaxes(0, 1)).reshape(-1, *part.shape[2:])
