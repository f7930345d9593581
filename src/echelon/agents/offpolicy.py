"""What SAC and TD3 have in common: their inputs, a careful step of descent, targets, states.

The cores know nothing of trading. An observation is a tensor or a NamedTuple of tensors, [B,…]
each; actions are in (−1, 1), one per dimension; `free` says which dimensions of which observation
count. Where none does, the action is 0, has no part in any probability, and the entropy aimed at
is less by it.

Axes: `B` rows of a batch, `A` dimensions of an action.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from echelon.agents.learner import refuse_divergence
from echelon.config.agents import ExpertConfig, TrainConfig
from echelon.rng import torch_generator
from echelon.runs.checkpoint import below_prefix, flatten_optimizer, restore_optimizer, with_prefix
from echelon.types import Metrics

Obs = Any
"""A Tensor, or a NamedTuple of them."""


class GaussianActor(Protocol):
    """A module: observation → the Gaussian before the tanh. TD3 takes its mean."""

    def __call__(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """(mean[B,A], log_std[B,A]); log_std is clipped by the learner."""

    def free(self, obs: Obs) -> Tensor | None:
        """[B,A] bool: which dimensions count; None: all."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As of any module."""


class ReplayBatch(NamedTuple):
    """Transitions to learn from.

    action[B,A]: squashed; reward[B]; discount[B]: γ, 0 where the episode ended for good
    obs may require gradients: the critic's reach it, the actor's never do
    """

    obs: Obs
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_obs: Obs


class SequenceBatch(NamedTuple):
    """Sequences of L steps, B side by side, made by this policy or by others.

    obs, next_obs, action, raw: of all steps, time first: [L·B,…]; raw: action before the tanh
    raw_log_prob, reward, discount[L,B]: of the step, as in `ReplayBatch`; truncated[L,B] bool
    loss_weights[L,B]: of the step in the losses of critics and actor
    shared[B] bool: made by another policy; mean, log_std[L·B,A]: the Gaussian it was drawn from
    slow_obs: obs as the target critics see them, where that is by other embeddings (those that
    next_obs has, which follow slowly); None: as they are
    """

    obs: Obs
    action: Tensor
    raw: Tensor
    raw_log_prob: Tensor
    reward: Tensor
    discount: Tensor
    truncated: Tensor
    next_obs: Obs
    loss_weights: Tensor
    shared: Tensor
    mean: Tensor
    log_std: Tensor
    slow_obs: Obs | None = None


class ActionSample(NamedTuple):
    """Actions and how probable they were.

    action[B,A] = tanh(raw); raw[B,A]: before the tanh; both 0 where not free
    log_prob[B]: of the action; raw_log_prob[B]: the Gaussian's, of raw; free dimensions only
    mean, log_std[B,A]: of the Gaussian; as actors that have none would, TD3 gives no spread
    """

    action: Tensor
    raw: Tensor
    log_prob: Tensor
    raw_log_prob: Tensor
    mean: Tensor
    log_std: Tensor


class Descent:
    """One network's steps: gradient, its norm, clipping, Adam."""

    def __init__(
        self, name: str, parameters: Iterator[nn.Parameter], lr: float, grad_clip: float
    ) -> None:
        self.name, self.lr, self.grad_clip, self.norm = name, lr, grad_clip, 0.0
        self.parameters: list[Tensor] = [p for p in parameters if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr, fused=True)
        self._moments: list[list[Tensor]] | None = None
        """Adam's state of each weight: first moments, second moments, steps."""

    def gradient(self, loss: Tensor, *, only: bool) -> None:
        """Leave the loss's gradients in the weights, and note their norm.

        only: nowhere else. Then just the products that lead there are computed: the actor's loss
        goes through the critics without the gradients of their weights.
        """
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(inputs=self.parameters if only else None)  # type: ignore[no-untyped-call]
        self.norm = float(
            torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._gradients())))
        )

    @torch.no_grad()
    def step(self, warmth: float) -> None:
        """Move the weights along the clipped gradient, at a share of the learning rate.

        As `optimizer.step()` does it, without its wrapping, which costs more than the step. The
        optimizer keeps the state; only where a weight has no gradient does it step itself.
        """
        gradients = self._gradients()
        if self.norm > self.grad_clip:
            torch._foreach_mul_(gradients, self.grad_clip / (self.norm + 1e-6))
        group = self.optimizer.param_groups[0]
        group["lr"] = self.lr * warmth
        count = len(self.parameters)
        if len(self.optimizer.state) < count or len(gradients) < count:
            self.optimizer.step()
            return
        if self._moments is None:
            states = [self.optimizer.state[p] for p in self.parameters]
            names = ("exp_avg", "exp_avg_sq", "step")
            self._moments = [[state[name] for state in states] for name in names]
        first, second, steps = self._moments
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            self.parameters,
            gradients,
            first,
            second,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        restore_optimizer(self.optimizer, tensors, state)
        self._moments = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]


class Target:
    """A network's slow copy: its weights follow by a share τ, its buffers at once."""

    def __init__(self, online: nn.Module, tau: float) -> None:
        self.net = copy.deepcopy(online).requires_grad_(requires_grad=False)
        self.tau = tau
        self._weights: list[Tensor] = list(self.net.parameters())
        self._online: list[Tensor] = list(online.parameters())
        self._buffers = list(zip(self.net.buffers(), online.buffers(), strict=True))

    @torch.no_grad()
    def follow(self) -> None:
        """Target ← target + τ (online − target)."""
        torch._foreach_lerp_(self._weights, self._online, self.tau)
        for slow, online in self._buffers:
            slow.copy_(online)


class OffPolicy(ABC):
    """A learner from replayed transitions: actor, twin critics, their optimizers and targets."""

    def __init__(
        self,
        actor: GaussianActor,
        critic: nn.Module,
        train: TrainConfig,
        expert: ExpertConfig,
        seed: int,
    ) -> None:
        """critic: observation, action[B,A] → q[2,B], two values that have no weight in common"""
        self.actor, self.critic, self.expert, self.updates = actor, critic, expert, 0
        self.target_critic = Target(critic, expert.tau)
        clip = train.grad_clip
        self.actor_descent = Descent("actor", actor.parameters(), train.lr_actor, clip)
        self.critic_descent = Descent("critic", critic.parameters(), train.lr_critic, clip)
        self.generator = torch_generator(seed, "updates")
        """Of the noise inside updates; acting has the caller's."""
        self._begin(train)

    @abstractmethod
    def _begin(self, train: TrainConfig) -> None:
        """Make what this algorithm has besides actor and critics."""

    @property
    def warmth(self) -> float:
        """Share of the learning rates at the next update."""
        return warmup_share(self.updates, self.expert.warmup_updates)

    @abstractmethod
    def act(self, obs: Obs, generator: torch.Generator, *, explore: bool) -> ActionSample:
        """Actions for observations, without gradients; explore: with the noise of collecting."""

    @abstractmethod
    def update(self, batch: ReplayBatch, *, want_metrics: bool = True) -> Metrics:
        """One step of gradient descent of each network that is due."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {"chance.updates": self.generator.get_state()}
        for name, module in self._modules().items():
            tensors |= with_prefix(f"{name}.", module.state_dict())
        optimizers = {}
        for descent in self._descents():
            flat, optimizers[descent.name] = flatten_optimizer(descent.optimizer)
            tensors |= with_prefix(f"optimizer.{descent.name}.", flat)
        return tensors, {"updates": self.updates, "optimizers": optimizers}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        for name, module in self._modules().items():
            module.load_state_dict(below_prefix(f"{name}.", tensors))
        for descent in self._descents():
            flat = below_prefix(f"optimizer.{descent.name}.", tensors)
            descent.restore(flat, state["optimizers"][descent.name])
        self.generator.set_state(tensors["chance.updates"])
        self.updates = int(state["updates"])

    def _modules(self) -> dict[str, nn.Module]:
        return {
            "actor": cast(nn.Module, self.actor),
            "critic": self.critic,
            "target_critic": self.target_critic.net,
        }

    def _descents(self) -> list[Descent]:
        return [self.actor_descent, self.critic_descent]

    def _learn_critic(
        self, obs: Obs, action: Tensor, target_q: Tensor, scale: float, weight: Tensor | None = None
    ) -> Tensor:
        """One step of the critics towards target_q[B]; the loss, Σ over both of scale · MSE."""
        q = self.critic(obs, action)
        if weight is None:
            loss = mse_loss(q, target_q.expand_as(q)) * (2 * scale)
        else:
            loss = ((q - target_q).square() * weight).mean() * (2 * scale)
        self.critic_descent.gradient(loss, only=False)
        self._descend(self.critic_descent, loss)
        return loss.detach()

    def _descend(self, descent: Descent, loss: Tensor) -> None:
        """Step, unless loss or gradient is not a number."""
        name = descent.name
        metrics = {f"losses/{name}": loss.item(), f"losses/{name}_gradient_norm": descent.norm}
        self._refuse_divergence(metrics, name)
        descent.step(self.warmth)

    def _refuse_divergence(self, metrics: Metrics, name: str) -> None:
        advice = "train.lr_actor, train.lr_critic or reward.scale"
        refuse_divergence(metrics, f"update {self.updates + 1:,}", advice, f" of the {name}")


def warmup_share(updates: int, warmup_updates: int) -> float:
    """Share of the learning rates at an update, `updates` having gone before: (0, 1]."""
    return min(1.0, (updates + 1) / warmup_updates) if warmup_updates else 1.0


def detach_obs(obs: Obs) -> Obs:
    """The same observation without a history."""
    if isinstance(obs, Tensor):
        return obs.detach()
    return obs._make(part.detach() for part in obs)
