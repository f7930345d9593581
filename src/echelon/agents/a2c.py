"""Advantage actor-critic on many books at once (seed 003; Mnih et al., 2016).

One update:

1. Each offset group stands at a row of its own. The bars of its next R steps are encoded once,
   with gradients, for all the group's books.
2. The books trade R steps, sampling from the policy on those encodings; no gradient is kept.
3. G_t = r_t + γ G_{t+1}, bootstrapped with V where the rollout or the train window ends and with 0
   where a book was ruined.
4. L = −mean log π(a_t) (G_t − V_t) + c_v · mean (V_t − G_t)² − c_e · mean H(π_t), with log π and H
   summed over the heads and means over time and books; gradients clipped; one step of Adam.

The encodings of step 1 serve both the acting and the loss: the weights do not change in between.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.config import Config
from echelon.envs.act import ActionRule, Holdings
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.errors import DataError, TrainingError
from echelon.models import ActorCritic, Market, build_actor_critic
from echelon.ops.returns import discounted_returns, standardized
from echelon.rng import stream
from echelon.runs.checkpoint import (
    below_prefix,
    flatten_optimizer,
    pack_generator,
    restore_optimizer,
    unpack_generator,
)

Metrics = dict[str, float]


class Rollout(NamedTuple):
    """What the books of one rollout saw, did and got: `G` groups, `L` steps, `B` books a group.

    market: encodings of L + 1 rows, [G,L+1,N,H] each, with gradients
    portfolio[G,L+1,B,N,P]; allowed[G,L,B,N,3]; present[G,L+1,1,N]
    actions[G,L,B,N]; reward, discount[G,L,B]
    """

    market: Market
    portfolio: Tensor
    present: Tensor
    allowed: Tensor
    actions: Tensor
    reward: Tensor
    discount: Tensor


class A2C:
    """The learner: network, optimizer, books, and where they stand."""

    def __init__(self, config: Config, world: World, seed: int) -> None:
        self.config = config
        self.world = world
        self.seed = seed
        train = config.train
        self.span = world.span("train")
        self.episode = train.episode_steps
        if self.episode is not None and self.episode + 1 > len(self.span):
            raise DataError(
                f"train.episode_steps={self.episode} does not fit into split.train, in which a "
                f"book can take {len(self.span) - 1} steps. Shorten the episode."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(seed, "weights").integers(2**62)))
            self.net = build_actor_critic(config, world.x.shape[2])
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.net.actor_parameters(), "lr": train.lr_actor},
                {"params": self.net.critic_parameters(), "lr": train.lr_critic},
            ],
            fused=True,
        )
        self.steps = 0
        self._actions_chance = torch.Generator().manual_seed(
            int(stream(seed, "actions").integers(2**62))
        )
        self._dropout_seed = int(stream(seed, "dropout").integers(2**62))
        self._starts_chance = stream(seed, "starts")
        rule = ActionRule.of(config, "discrete")
        self.books = Books(world, rule, config.reward, train.books, self.span)
        groups = train.offset_groups
        self.rows = np.full(groups, self.span.start, dtype=np.int64)
        self.ends = self.rows.copy()
        self._begin_episodes(first=True)

    @property
    def books_per_group(self) -> int:
        """B."""
        return self.config.train.books // self.config.train.offset_groups

    def train_once(self) -> Metrics:
        """One rollout and one update."""
        self._begin_episodes()
        if self.config.model.dropout:
            torch.manual_seed(self._dropout_seed + self.steps)
        self.net.train()
        rollout = self.collect()
        return self.update(rollout)

    def collect(self) -> Rollout:
        """Encode the next bars and trade them; the books move on."""
        length = int(min(self.config.train.rollout_steps, (self.ends - self.rows).min()))
        groups, per_group = len(self.rows), self.books_per_group
        market, present = self._encode(length + 1)
        frozen = market.map(Tensor.detach)
        n_assets = self.world.n_assets
        width = self.net.n_portfolio
        portfolio = torch.empty(groups, length + 1, per_group, n_assets, width)
        allowed = torch.empty(groups, length, per_group, n_assets, 3, dtype=torch.bool)
        actions = torch.empty(groups, length, per_group, n_assets, dtype=torch.long)
        reward = torch.empty(groups, length, per_group)
        discount = torch.full((groups, length, per_group), self.config.train.gamma)
        with torch.no_grad():
            for k in range(length):
                held = self.books.holdings()
                portfolio[:, k] = self._portfolio(held)
                mask = torch.from_numpy(held.allowed).view(groups, per_group, n_assets, 3)
                allowed[:, k] = mask
                at = frozen.map(itemgetter((slice(None), k, None)))
                logits = self.net(at, portfolio[:, k], present[:, k], mask).logits
                actions[:, k] = sample(logits, self._actions_chance)
                result = self.books.step(actions[:, k].reshape(-1, n_assets).numpy())
                reward[:, k] = torch.from_numpy(result.reward).view(groups, per_group)
                if result.terminated.any():
                    ruined = torch.from_numpy(result.terminated).view(groups, per_group)
                    discount[:, k][ruined] = 0.0
                    self.books.reset(self.books.row, result.terminated)
            portfolio[:, length] = self._portfolio(self.books.holdings())
        self.rows = self.rows + length
        self.steps += length * self.config.train.books
        return Rollout(market, portfolio, present, allowed, actions, reward, discount)

    def update(self, rollout: Rollout) -> Metrics:
        """One step of gradient descent on a rollout."""
        train = self.config.train
        learning_rates = self._set_learning_rates()
        losses = a2c_losses(self.net, rollout, normalize=train.normalize_advantages)
        loss = losses.policy + train.value_coef * losses.value - train.entropy_coef * losses.entropy
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), train.grad_clip)
        metrics = {
            "losses/total": float(loss.detach()),
            "losses/policy": float(losses.policy.detach()),
            "losses/value": float(losses.value.detach()),
            "losses/entropy": float(losses.entropy.detach()) / self.world.n_assets,
            "losses/gradient_norm": float(norm),
            "charts/reward": float(rollout.reward.mean()),
            "charts/learning_rate": learning_rates,
        }
        self._refuse_divergence(metrics)
        self.optimizer.step()
        return metrics

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) from which `restore` goes on bit for bit."""
        optimizer, optimizer_state = flatten_optimizer(self.optimizer)
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in optimizer.items()}
        books = self.books.state() | {"rows": self.rows, "ends": self.ends}
        tensors |= {f"books.{k}": torch.from_numpy(np.array(v)) for k, v in books.items()}
        tensors["chance.actions"] = self._actions_chance.get_state()
        json_state = {
            "steps": self.steps,
            "optimizer": optimizer_state,
            "starts": pack_generator(self._starts_chance),
        }
        return tensors, json_state

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.net.load_state_dict(below_prefix("net.", tensors))
        restore_optimizer(self.optimizer, below_prefix("optimizer.", tensors), state["optimizer"])
        books = {
            name: value.numpy().copy() for name, value in below_prefix("books.", tensors).items()
        }
        self.rows, self.ends = books.pop("rows"), books.pop("ends")
        self.books.restore(books)
        self._actions_chance.set_state(tensors["chance.actions"])
        self._starts_chance = unpack_generator(state["starts"])
        self.steps = int(state["steps"])

    def _begin_episodes(self, *, first: bool = False) -> None:
        """Start a new episode in every group whose own has ended, and in all of them at first."""
        last = self.span.stop - 1
        for g in range(len(self.rows)):
            if not first and self.rows[g] < self.ends[g]:
                continue
            if self.episode is not None:
                latest = last - self.episode
                start = int(self._starts_chance.integers(self.span.start, latest + 1))
                self.ends[g] = start + self.episode
            else:
                # Full runs through the window, the groups spread over it to begin with.
                share = g / len(self.rows) if first else 0.0
                start = self.span.start + int(share * (last - self.span.start))
                self.ends[g] = last
            self.rows[g] = start
            which = np.zeros(self.books.n_books, dtype=bool)
            which[g * self.books_per_group : (g + 1) * self.books_per_group] = True
            self.books.reset(np.where(which, start, self.books.row), which)

    def _encode(self, length: int) -> tuple[Market, Tensor]:
        """Encodings of the next `length` rows of every group, and who is present in them."""
        window, world = self.world.window, self.world
        starts = self.rows.tolist()
        x = np.stack([world.x[t - window + 1 : t + length] for t in starts])
        present = np.stack([world.present[t : t + length] for t in starts])
        return self.net.encode(torch.from_numpy(x)), torch.from_numpy(present)[:, :, None]

    def _portfolio(self, held: Holdings) -> Tensor:
        groups = len(self.rows)
        return portfolio_inputs(held, self.config).view(
            groups, self.books_per_group, self.world.n_assets, self.net.n_portfolio
        )

    def _set_learning_rates(self) -> float:
        train = self.config.train
        share = learning_rate_share(train.lr_schedule, self.steps / train.total_env_steps)
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, (train.lr_actor, train.lr_critic), strict=True):
            group["lr"] = rate * share
        return float(train.lr_actor * share)

    def _refuse_divergence(self, metrics: Metrics) -> None:
        bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        if bad:
            shown = ", ".join(f"{name} = {metrics[name]}" for name in bad)
            raise TrainingError(
                f"training diverged at step {self.steps:,}: {shown}. The weights were not changed "
                "by this step; the last checkpoint is good. Lower train.lr_actor, train.lr_critic "
                "or reward.scale, and check the features for outliers."
            )


class Losses(NamedTuple):
    """The parts of the loss, each a mean over time and books."""

    policy: Tensor
    value: Tensor
    entropy: Tensor


def a2c_losses(net: ActorCritic, rollout: Rollout, *, normalize: bool) -> Losses:
    """The parts of the loss on a rollout; gradients flow into the network."""
    length = rollout.reward.shape[1]
    market = rollout.market.map(lambda part: part[:, :, None])
    # The row after the last step has a value only; what is allowed there does not matter.
    allowed = torch.nn.functional.pad(rollout.allowed, (0, 0, 0, 0, 0, 0, 0, 1), value=True)
    output = net(market, rollout.portfolio, rollout.present, allowed)
    values = output.value
    with torch.no_grad():
        returns = discounted_returns(
            rollout.reward.transpose(0, 1).flatten(1),
            rollout.discount.transpose(0, 1).flatten(1),
            values[:, length].flatten(),
        )
        returns = returns.view(length, *values.shape[::2]).transpose(0, 1)
        advantage = returns - values[:, :length]
        if normalize:
            advantage = standardized(advantage)
    log_pi = torch.log_softmax(output.logits[:, :length], dim=-1)
    chosen = log_pi.gather(-1, rollout.actions[..., None]).squeeze(-1).sum(-1)
    entropy = -(log_pi.exp() * log_pi).sum((-1, -2))
    return Losses(
        policy=-(chosen * advantage).mean(),
        value=(values[:, :length] - returns).square().mean(),
        entropy=entropy.mean(),
    )


def sample(logits: Tensor, chance: torch.Generator) -> Tensor:
    """Draw from softmax(logits) over the last axis, by the Gumbel-max trick."""
    noise = torch.empty_like(logits).exponential_(generator=chance)
    return (logits - noise.log_()).argmax(-1)


def portfolio_inputs(held: Holdings, config: Config) -> Tensor:
    """[E,N,P]: weight of the holding and cash share, those of them the state includes."""
    parts: list[NDArray[np.float32]] = []
    if config.state.include_pos:
        parts.append(held.weights)
    if config.state.include_cash:
        parts.append(np.broadcast_to(held.cash_share[:, None], held.weights.shape))
    if not parts:
        return torch.empty(*held.weights.shape, 0)
    return torch.from_numpy(np.stack(parts, axis=-1))


def learning_rate_share(schedule: str, progress: float) -> float:
    """What is left of a learning rate after `progress` ∈ [0, 1] of the training."""
    done = min(max(progress, 0.0), 1.0)
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0
