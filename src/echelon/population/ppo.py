"""The router's network and how it learns: PPO with masks, written for a network this small.

The same as sb3-contrib's MaskablePPO with its defaults, up to rounding, without what that spends on
being general: of two layers of 64 there is less to compute than to administer, so gradients are
written out (`Gradients`).

1. `collect` lets the network act in all environments for a rollout, by draws among what is allowed.
2. `advantages` (GAE; Schulman et al., 2016): an episode that was cut short goes on with its value.
3. `Ppo.update` makes `EPOCHS` passes over the rollout in minibatches of `meta_router.batch_size`.
   The loss is the clipped surrogate (Schulman et al., 2017), the value's error and the entropy.

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
        """The decisions in this order[B], `size` at a time, with advantages of deviation 1."""
        mixed = Rollout._make(part[order] for part in self)
        each = mixed.advantage.view(-1, size)
        each = (each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-8)
        mixed = mixed._replace(advantage=each.view(-1))
        for low in range(0, len(order), size):
            yield Rollout._make(part[low : low + size] for part in mixed)


class Spread(NamedTuple):
    """Of the policy, mean over a minibatch: its entropy, its KL from the prior (0 without one)."""

    entropy: Tensor
    kl: Tensor


class Gradients:
    """Of the loss of minibatches, written out: autograd would take most of the time.

    1. Forward, keeping what every layer says.
    2. d loss / d logits: of the clipped surrogate through the choice's log probability, which is
       0 where the clipped part is the smaller; of the entropy −p·(log p + H), of the divergence
       p·(log p/q − KL); d loss / d value.
    3. Back through both networks, into one vector that all `grad` are views of.
    """

    def __init__(self, net: RouterNet, meta: MetaRouterConfig) -> None:
        self.net, self.meta = net, meta
        hidden = net.mlp_extractor
        self.policy_layers = (*_linear_layers(hidden.policy_net), net.action_net)
        self.value_layers = (*_linear_layers(hidden.value_net), net.value_net)
        parameters, low = list(net.parameters()), 0
        self.flat = torch.zeros(sum(part.numel() for part in parameters))
        for part in parameters:
            part.grad = self.flat[low : low + part.numel()].view_as(part)
            low += part.numel()

    @torch.no_grad()
    def fill(self, batch: Rollout) -> Spread:
        """Of a minibatch of B decisions, whose advantages have a mean of 0 and a deviation of 1."""
        net, meta, count = self.net, self.meta, len(batch.obs)
        said, kept = _forward(self.policy_layers, batch.obs)
        values, kept_values = _forward(self.value_layers, batch.obs)
        prior = net.prior(batch.obs) if net.has_prior else None
        log_probs = _mask(said if prior is None else said + prior, batch.allowed)
        probs = log_probs.exp()
        choice = batch.actions[:, None]
        log_prob = log_probs.gather(1, choice)[:, 0]
        ratio = torch.exp(log_prob - batch.log_prob)
        plain = batch.advantage * ratio
        clipped = batch.advantage * ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
        into = torch.where(plain <= clipped, plain, 0.0)[:, None] / -count  # d / d log_prob
        slope = (probs * -into).scatter_add_(1, choice, into)
        entropy = -(probs * log_probs).sum(1, keepdim=True)
        slope += (meta.ent_coef / count) * probs * (log_probs + entropy)
        kl = torch.zeros(())
        if prior is not None:
            apart = log_probs - _mask(prior, batch.allowed)
            each = (probs * apart).sum(1, keepdim=True)
            slope += (meta.prior_kl / count) * probs * (apart - each)
            kl = each.mean()
        error = values - batch.returns[:, None]
        _backward(self.policy_layers, kept, slope)
        _backward(self.value_layers, kept_values, (2.0 * VALUE_WEIGHT / count) * error)
        return Spread(entropy.mean(), kl)

    def clip(self) -> None:
        """Shorten the gradient to `GRADIENT_NORM`."""
        self.flat.mul_((GRADIENT_NORM / (self.flat.norm() + 1e-6)).clamp_(max=1.0))


def _linear_layers(net: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in net if isinstance(layer, nn.Linear)]


def _mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """[B,K+1] as `masked_log_probs`, normalised once."""
    return torch.log_softmax(torch.where(allowed, logits, _MASKED), dim=1)


def _forward(layers: tuple[nn.Linear, ...], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(what the last of the layers says[B,·], inputs of each); tanh between them."""
    inputs = [x]
    for layer in layers[:-1]:
        inputs.append(torch.addmm(layer.bias, inputs[-1], layer.weight.t()).tanh_())
    return torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.t()), inputs


def _backward(layers: tuple[nn.Linear, ...], inputs: list[Tensor], slope: Tensor) -> None:
    """Write the gradients of layers, whose last has slope[B,·]."""
    for layer, x in zip(reversed(layers), reversed(inputs), strict=True):
        assert layer.weight.grad is not None
        torch.mm(slope.t(), x, out=layer.weight.grad)
        torch.sum(slope, 0, out=layer.bias.grad)
        if x is not inputs[0]:
            slope = torch.mm(slope, layer.weight) * (1.0 - x.square())


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
        self.gradients = Gradients(net, meta)
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
        total, relative = self.decisions + steps, list[float]()
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
        entropies, kls = [], []
        for _ in range(EPOCHS):
            order = torch.from_numpy(rng.permutation(len(values)))
            for batch in rollout.minibatches(order, self.meta.batch_size):
                spread = self.gradients.fill(batch)
                self.gradients.clip()
                self.optimizer.step()
                entropies.append(spread.entropy)
                kls.append(spread.kl)
        self.updates += EPOCHS
        # A loss that is no number makes all parameters so, and with them the entropy.
        target = rollout.returns.numpy()
        varies = float(np.var(target))
        fit = 1.0 - float(np.var(target - values)) / varies if varies else math.nan
        entropy, kl = (float(torch.stack(part).mean()) for part in (entropies, kls))
        return Learned(entropy, kl, fit)


def _by_environment(part: np.ndarray) -> np.ndarray:
    """[S,E,…] -> [E·S,…], an environment after the other."""
    return np.ascontiguousarray(part.swapaxes(0, 1)).reshape(-1, *part.shape[2:])
