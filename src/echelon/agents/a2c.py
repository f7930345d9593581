"""Advantage actor-critic on many books at once (design note 003; Mnih et al., 2016).

One update:

1. Each offset group stands at a row of its own. The bars of its next R steps are encoded once,
   with gradients, for all the group's books.
2. The books trade R steps, sampling from the policy on those encodings; no gradient is kept.
3. G_t = r_t + γ G_{t+1}, bootstrapped with V where the rollout or the train window ends and with 0
   where a book was ruined; with `train.gae_lambda` below 1, λ-returns in place of it.
4. L = −mean log π(a_t) (G_t − V_t) + c_v · mean (V_t − G_t)² − c_e · mean H(π_t), with log π and H
   summed over the heads and means over time and books; gradients clipped; one step of Adam.

The encodings of step 1 serve both the acting and the loss: the weights do not change in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.agents.learner import (
    Learner,
    learning_rate_share,
    refuse_divergence,
    refuse_long_episode,
)
from echelon.agents.tables import encode_span
from echelon.config import Config
from echelon.config.agents import TrainConfig
from echelon.envs.act import ActionKind, ActionRule, Holdings
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.market import Rows
from echelon.models.actor_critic import Acting, ActorCritic, ActorCriticOutput, MarketTensors
from echelon.ops.returns import explained_variance, lambda_returns, standardize
from echelon.rng import global_draws, stream, torch_generator
from echelon.runs.checkpoint import (
    below_prefix,
    flatten_optimizer,
    pack_generator,
    restore_optimizer,
    unpack_generator,
    with_prefix,
)
from echelon.types import Floats, Metrics

_TINY = torch.finfo(torch.float32).tiny
_PIECE_ROWS = 10_240
"""Bars × books × assets that the heads work on at a time in an update: 3 MB a tensor."""


class Rollout(NamedTuple):
    """What the books of one rollout saw, did and got: `G` groups, `L` steps, `B` books a group.

    market: encodings of L + 1 rows, [G,L+1,N,H] each, with gradients
    portfolio[G,L+1,B,N,P]; allowed[G,L,B,N,3]; present[G,L+1,1,N]
    actions[G,L,B,N]; reward, discount[G,L,B]
    """

    market: MarketTensors
    portfolio: Tensor
    present: Tensor
    allowed: Tensor
    actions: Tensor
    reward: Tensor
    discount: Tensor


class A2C(Learner):
    def __init__(self, config: Config, world: World, seed: int) -> None:
        self.config, self.world, self.seed = config, world, seed
        train = config.train
        self.span = world.span("train")
        self.episode = train.episode_steps
        if self.episode is not None:
            refuse_long_episode("train.episode_steps", self.episode, [self.span])
        with global_draws(seed, "weights"):
            self.net = ActorCritic(config, world.x.shape[2])
        # An encoder may choose something by what it sees of the train window.
        seen = np.array(world.x[self.span.start - world.window + 1 : self.span.stop])
        for encoder in (self.net.encoder, self.net.critic_encoder):
            if encoder is not None:
                encoder.fit(torch.from_numpy(seen))
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.net.actor_parameters(), "lr": train.lr_actor},
                {"params": self.net.critic_parameters(), "lr": train.lr_critic},
            ],
            fused=True,
        )
        self.steps = 0
        self._action_generator = torch_generator(seed, "actions")
        self._dropout_seed = int(stream(seed, "dropout").integers(2**62))
        self._start_rng = stream(seed, "starts")
        rule = ActionRule.from_config(config, "discrete")
        self.books = Books(world, rule, config.reward, train.books, self.span)
        self.rows = np.full(train.offset_groups, self.span.start, dtype=np.int64)
        self.ends = self.rows.copy()
        self._begin_episodes(first=True)

    @classmethod
    def load_policy(
        cls, config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str
    ) -> ActorPolicy:
        net = ActorCritic(config, n_features)
        net.load_state_dict(dict(weights))
        return ActorPolicy(net, config, seed, name)

    @property
    def books_per_group(self) -> int:
        return self.config.train.books // self.config.train.offset_groups

    def train_once(self) -> Metrics:
        self._begin_episodes()
        if self.config.model.dropout:
            torch.manual_seed(self._dropout_seed + self.steps)
        self.net.train()
        return self.update(self.collect())

    def collect(self) -> Rollout:
        """Encode the next bars and trade them; the books move on."""
        length = int(min(self.config.train.rollout_steps, (self.ends - self.rows).min()))
        groups, per_group, n_assets = len(self.rows), self.books_per_group, self.world.n_assets
        world, window = self.world, self.world.window
        x = np.stack([world.x[t - window + 1 : t + length + 1] for t in self.rows])
        market = self.net.encode(torch.from_numpy(x))
        seen = np.stack([world.present[t : t + length + 1] for t in self.rows])
        present = torch.from_numpy(seen)[:, :, None]
        # Bars first, and an axis for the books: [L+1,G,1,N,…].
        acting = Acting(
            self.net,
            market.map(lambda part: part.transpose(0, 1)[:, :, None]),
            present.transpose(0, 1),
        )
        portfolio: list[Tensor] = []
        allowed: list[Tensor] = []
        actions: list[Tensor] = []
        reward: list[NDArray[np.float64]] = []
        ruined: list[NDArray[np.bool_]] = []
        for k in range(length):
            held = self.books.holdings()
            portfolio.append(self._portfolio(held))
            allowed.append(torch.from_numpy(held.allowed).view(groups, per_group, n_assets, 3))
            logits = acting.logits(k, portfolio[k], allowed[k])
            actions.append(sample(logits, self._action_generator))
            result = self.books.step(actions[k].view(-1, n_assets).numpy())
            reward.append(result.reward)
            ruined.append(result.terminated)
            if result.terminated.any():
                self.books.reset(self.books.row, result.terminated)
        portfolio.append(self._portfolio(self.books.holdings()))
        self.rows = self.rows + length
        self.steps += length * self.config.train.books
        paid = torch.from_numpy(np.stack(reward)).view(length, groups, per_group)
        ended = torch.from_numpy(np.stack(ruined)).view(length, groups, per_group)
        return Rollout(
            market,
            torch.stack(portfolio, dim=1),
            present,
            torch.stack(allowed, dim=1),
            torch.stack(actions, dim=1),
            paid.transpose(0, 1).float(),
            torch.where(ended.transpose(0, 1), 0.0, self.config.train.gamma),
        )

    def update(self, rollout: Rollout) -> Metrics:
        train = self.config.train
        share = learning_rate_share(train.lr_schedule, self.steps / train.total_env_steps)
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, (train.lr_actor, train.lr_critic), strict=True):
            group["lr"] = rate * share
        self.optimizer.zero_grad(set_to_none=True)
        losses, explained = self._backward(rollout)
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), train.grad_clip)
        metrics = {
            "losses/total": float(self._total(losses)),
            "losses/policy": float(losses.policy),
            "losses/value": float(losses.value),
            "losses/entropy": float(losses.entropy) / self.world.n_assets,
            "losses/gradient_norm": float(norm),
            "charts/reward": float(rollout.reward.mean()),
            "charts/explained_variance": explained,
            "charts/learning_rate": float(train.lr_actor * share),
        }
        advice = "train.lr_actor, train.lr_critic or reward.scale"
        refuse_divergence(metrics, f"step {self.steps:,}", advice)
        self.optimizer.step()
        return metrics

    def _backward(self, rollout: Rollout) -> tuple[Losses, float]:
        """Leave the gradients in the network: (parts of the loss, detached; explained variance)."""
        gathered, pieces = rollout.market.cut(), []
        cut = rollout._replace(market=gathered)
        for piece in losses_by_piece(self.net, cut, self.config.train):
            self._total(piece.losses).backward()  # type: ignore[no-untyped-call]
            pieces.append(piece._replace(losses=Losses(*(part.detach() for part in piece.losses))))
        rollout.market.backward(gathered)
        parts, returns, values = zip(*pieces, strict=True)
        losses = Losses(*(torch.stack(part).sum() for part in zip(*parts, strict=True)))
        return losses, explained_variance(torch.cat(returns, dim=1), torch.cat(values, dim=1))

    def _total(self, losses: Losses) -> Tensor:
        train = self.config.train
        return losses.policy + train.value_coef * losses.value - train.entropy_coef * losses.entropy

    def policy(self) -> ActorPolicy:
        return ActorPolicy(self.net, self.config, self.seed)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.net.state_dict())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer, optimizer_state = flatten_optimizer(self.optimizer)
        tensors = with_prefix("net.", self.net.state_dict()) | with_prefix("optimizer.", optimizer)
        books = self.books.state() | {"rows": self.rows, "ends": self.ends}
        tensors |= {f"books.{k}": torch.from_numpy(np.array(v)) for k, v in books.items()}
        tensors["chance.actions"] = self._action_generator.get_state()
        json_state = {
            "steps": self.steps,
            "optimizer": optimizer_state,
            "starts": pack_generator(self._start_rng),
        }
        return tensors, json_state

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.net.load_state_dict(below_prefix("net.", tensors))
        restore_optimizer(self.optimizer, below_prefix("optimizer.", tensors), state["optimizer"])
        books = {k: v.numpy().copy() for k, v in below_prefix("books.", tensors).items()}
        self.rows, self.ends = books.pop("rows"), books.pop("ends")
        self.books.restore(books)
        self._action_generator.set_state(tensors["chance.actions"])
        self._start_rng = unpack_generator(state["starts"])
        self.steps = int(state["steps"])

    def _begin_episodes(self, *, first: bool = False) -> None:
        """Start a new episode in every group whose own has ended, and in all of them at first."""
        last = self.span.stop - 1
        for g in range(len(self.rows)):
            if not first and self.rows[g] < self.ends[g]:
                continue
            if self.episode is not None:
                latest = last - self.episode
                start = int(self._start_rng.integers(self.span.start, latest + 1))
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

    def _portfolio(self, held: Holdings) -> Tensor:
        groups = len(self.rows)
        return portfolio_inputs(held, self.config).view(
            groups, self.books_per_group, self.world.n_assets, self.net.n_portfolio
        )


class Losses(NamedTuple):
    policy: Tensor
    value: Tensor
    entropy: Tensor


class PieceLosses(NamedTuple):
    """Some bars' share of the loss; returns and the critic's value of them[G,L,B], detached."""

    losses: Losses
    returns: Tensor
    value: Tensor


class Targets(NamedTuple):
    """What values and log-probabilities are moved towards: returns, advantage[G,L,B]."""

    returns: Tensor
    advantage: Tensor


def a2c_losses(net: ActorCritic, rollout: Rollout, train: TrainConfig) -> PieceLosses:
    """The parts of the loss on a rollout; gradients flow into the network."""
    length = rollout.reward.shape[1]
    market = rollout.market.map(lambda part: part[:, :, None])
    # The row after the last step has a value only; what is allowed there does not matter.
    allowed = torch.nn.functional.pad(rollout.allowed, (0, 0, 0, 0, 0, 0, 0, 1), value=True)
    output = net(market, rollout.portfolio, rollout.present, allowed)
    aims = targets(rollout, output.value.detach(), train)
    until = ActorCriticOutput(output.logits[:, :length], output.value[:, :length])
    return _losses(until, rollout.actions, aims)


def losses_by_piece(
    net: ActorCritic, rollout: Rollout, train: TrainConfig
) -> Iterator[PieceLosses]:
    """The same in parts that add up to it, some bars at a time.

    Their gradients add up too. All at once, the tensors of a large rollout are tens of MB each,
    which costs more to allocate than to fill; in pieces they stay in the cache. What the pieces
    aim at needs the values of the whole rollout, so these are worked out first.
    """
    groups, length, per_group, n_assets = rollout.actions.shape
    bars = max(1, _PIECE_ROWS // (groups * per_group * n_assets))
    if length <= bars:
        yield a2c_losses(net, rollout, train)
        return
    with torch.no_grad():
        values = [
            net.values(*_bars(rollout, first, min(bars, length + 1 - first)))
            for first in range(0, length + 1, bars)
        ]
    aims = targets(rollout, torch.cat(values, dim=1), train)
    for first in range(0, length, bars):
        count = min(bars, length - first)
        output = net(*_bars(rollout, first, count), rollout.allowed.narrow(1, first, count))
        aim = Targets(*(part.narrow(1, first, count) for part in aims))
        piece = _losses(output, rollout.actions.narrow(1, first, count), aim)
        share = Losses(*(loss * (count / length) for loss in piece.losses))
        yield piece._replace(losses=share)


def targets(rollout: Rollout, values: Tensor, train: TrainConfig) -> Targets:
    """Returns and advantages of a rollout, given values[G,L+1,B]; no gradient flows.

    With `train.peer_baseline` the mean of its group's other books at the same bar is taken from
    each book's advantage: what the market did to all of them cancels. Their actions do not depend
    on the book's own, so the gradient stays unbiased.
    """
    length = rollout.reward.shape[1]
    returns = lambda_returns(
        rollout.reward.transpose(0, 1).flatten(1),
        rollout.discount.transpose(0, 1).flatten(1),
        values.transpose(0, 1).flatten(1),
        train.gae_lambda,
    )
    returns = returns.view(length, *values.shape[::2]).transpose(0, 1)
    advantage = returns - values[:, :length]
    if train.peer_baseline:
        others = advantage.shape[-1] - 1
        advantage = (advantage - advantage.mean(-1, keepdim=True)) * ((others + 1) / others)
    return Targets(returns, standardize(advantage) if train.normalize_advantages else advantage)


def _losses(output: ActorCriticOutput, actions: Tensor, aims: Targets) -> PieceLosses:
    """Means over the books and bars that are there: logits[G,L,B,N,3], value[G,L,B]."""
    log_pi = torch.log_softmax(output.logits, dim=-1)
    log_prob = log_pi.gather(-1, actions[..., None]).squeeze(-1).sum(-1)
    entropy = -(log_pi.exp() * log_pi).sum((-1, -2))
    losses = Losses(
        policy=-(log_prob * aims.advantage).mean(),
        value=(output.value - aims.returns).square().mean(),
        entropy=entropy.mean(),
    )
    return PieceLosses(losses, aims.returns, output.value.detach())


def _bars(rollout: Rollout, first: int, count: int) -> tuple[MarketTensors, Tensor, Tensor]:
    """What the network is asked about: the market, portfolios and presence at some bars."""
    return (
        rollout.market.map(lambda part: part.narrow(1, first, count)[:, :, None]),
        rollout.portfolio.narrow(1, first, count),
        rollout.present.narrow(1, first, count),
    )


class ActorPolicy:
    """The most probable action of every head, or a draw from it."""

    kind: ActionKind = "discrete"

    def __init__(self, net: ActorCritic, config: Config, seed: int, name: str = "agent") -> None:
        """seed: of the draws, where `eval.deterministic` is off."""
        self.name, self.net, self.config, self._seed = name, net, config, seed

    def start(self, world: World, span: range) -> None:
        """Encode every row of the span, once."""
        self.net.eval()
        self._first = span.start
        present = torch.from_numpy(np.array(world.present[span.start : span.stop]))
        self._generator = torch_generator(self._seed, "evaluation")
        actor = encode_span(lambda x: self.net.encode(x).actor, world, span)
        # An axis for the one book that looks at each row asked about.
        self._acting = Acting(self.net, MarketTensors(actor[:, None], None), present[:, None])

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        logits = self._logits(row, held)
        deterministic = self.config.eval.deterministic
        chosen = logits.argmax(-1) if deterministic else sample(logits, self._generator)
        return np.asarray(chosen.numpy().astype(np.int8))

    def probabilities(self, row: Rows, held: Holdings) -> Floats:
        """[E,N,3] of every action, by `envs.Action`; 0 for what is not allowed."""
        return np.asarray(torch.softmax(self._logits(row, held).double(), dim=-1).numpy())

    def _logits(self, row: Rows, held: Holdings) -> Tensor:
        at = torch.from_numpy(row - self._first)
        portfolio = portfolio_inputs(held, self.config)
        allowed = torch.from_numpy(held.allowed)
        return self._acting.logits(at, portfolio[:, None], allowed[:, None])[:, 0]


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from softmax(logits) over the last axis, by the Gumbel-max trick."""
    # Not `exponential_`, which takes three times as long. At 0 the noise would be infinite, and
    # with it an action chosen that is not allowed.
    chances = torch.rand(logits.shape, generator=generator).clamp_(min=_TINY)
    return (logits - chances.log_().neg_().log_()).argmax(-1)


def portfolio_inputs(held: Holdings, config: Config) -> Tensor:
    """[E,N,P]: weight of the holding and cash share, those of them the state includes."""
    state, shape = config.state, held.weights.shape
    inputs = np.empty((*shape, state.include_pos + state.include_cash), dtype=np.float32)
    if state.include_pos:
        inputs[..., 0] = held.weights
    if state.include_cash:
        inputs[..., -1] = held.cash_share[:, None]
    return torch.from_numpy(inputs)
