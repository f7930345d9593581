"""Analytic policy gradient: the actor is moved by gradients that flow through the market itself.

What a book earns can be differentiated in its weights (`market.differentiable`), and no critic has
to guess it. One update:

1. `train.books` books begin at rows by lot of the train window, with weights by lot. Those of the
   actor of wide universes (`expert.actor: top_k`) go on where the update before left them, and
   only at the end of their stretch begin elsewhere, with what the actor would hold there: its
   costs are those of a book that has been traded for long.
2. They trade `expert.horizon` bars. At each the actor says tanh(mean), the softmax of `act` makes
   target weights of it (the other actor says the weights), and the market a return and new weights;
   the graph is kept.
3. U = mean over books and bars of r − c·r², c being `reward.variance_penalty`; where the reward is
   `active`, U = mean / deviation of the active return, its information ratio. −U goes back through
   all bars: costs paid now against what the holding earns later. Clipped; one step of AdamW.

It learns one path by heart quickly, because its gradients have no noise but the market's: train it
on several draws or with `expert.weight_decay`, and let validation choose the checkpoint. Rules that
jump with an order's size are left out while it learns, and named (`dropped_rules`); its policy is
validated, evaluated and traded under all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.expert import SingleExpert, Starts
from echelon.agents.expert_core import fit_scale, frozen_copy
from echelon.agents.learner import (
    LearnerFacts,
    learning_rate_share,
    refuse_divergence,
    refuse_long_episode,
)
from echelon.agents.offpolicy import warmup_share
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs.act import EXPERT_GAIN
from echelon.envs.books import equal_weight_returns
from echelon.envs.world import World
from echelon.errors import ConfigError
from echelon.market.differentiable import (
    DiffMarket,
    allowed_trades,
    diff_market,
    diff_weights_of_scores,
    diff_weights_of_targets,
    differentiable_step,
    dropped_rules,
)
from echelon.models.encoders import Encoder
from echelon.models.expert import ExpertActor, ExpertObs, TopKActor, build_actor
from echelon.rng import global_draws, stream
from echelon.runs.checkpoint import (
    below_prefix,
    flatten_optimizer,
    pack_generator,
    restore_optimizer,
    unpack_generator,
    with_prefix,
)
from echelon.types import Metrics


class Standing(NamedTuple):
    """Where books stand: row[E], and weights[E,N] and cash[E] there."""

    row: Tensor
    weights: Tensor
    cash: Tensor


class BookPaths(NamedTuple):
    """What books did over H bars, with gradients: gain, cash[H,E], the share of it after each."""

    gain: Tensor
    cash: Tensor
    end: Standing


class APG(SingleExpert):
    def __init__(
        self, config: Config, world: World, seed: int, encoder: Encoder, tables: Path | None = None
    ) -> None:
        """encoder: pre-trained, with nothing of it changed here; tables: where to keep them"""
        self.refuse_world(config, world)
        super().__init__(config, world, seed, encoder, tables)
        self.updates = 0
        self.market = _market(world)
        self.serving = frozen_copy(encoder)
        self.starts = Starts(world.spans("train"), config.expert.horizon, stream(seed, "starts"))
        self.actor = self._draw_actor()
        self.optimizer = torch.optim.AdamW(
            self.actor.parameters(),
            lr=config.train.lr_actor,
            weight_decay=config.expert.weight_decay,
            fused=True,
        )
        self._present = torch.from_numpy(np.array(world.present))
        self._known = torch.from_numpy(np.array(world.present & (world.rows.close > 0.0)))
        self._standing: Standing | None = None
        self._mean_asset: Tensor | None = None
        if config.reward.kind == "active":
            returns = equal_weight_returns(world, self.starts.whole)
            self._mean_asset = torch.from_numpy(returns.astype(np.float32))

    def _draw_actor(self) -> ExpertActor | TopKActor:
        with global_draws(self.seed, "weights"):
            actor = build_actor(self.config, self.table.d_model)
        fit_scale(actor.scale, self.world, self.table)
        return actor

    def facts(self) -> LearnerFacts:
        dropped = dropped_rules(self.world.rows, self.world.rules)
        return LearnerFacts(None, None, tuple(dropped))

    @classmethod
    def refuse_world(cls, config: Config, world: World) -> None:
        """Raise where the configuration asks for what gradients through the market cannot give."""
        reward, kinds = config.reward, ("return", "log_return", "active")
        penalties = ["drawdown_penalty", "cvar_penalty"]
        if reward.kind == "active":  # the ratio weighs risk already
            penalties.append("variance_penalty")
        limits = [
            (reward.kind not in kinds, f"reward.kind={reward.kind}", "return or active"),
            *(
                (getattr(reward, name) > 0, f"reward.{name}={getattr(reward, name):g}", "0")
                for name in penalties
            ),
            (config.lora.enabled, "lora.enabled=true", "false"),
        ]
        wrong = [f"{given} (take {instead})" for bad, given, instead in limits if bad]
        if wrong:
            raise ConfigError(
                f"train.algo=APG cannot learn with {', '.join(wrong)}: its gradient is that of "
                "each bar's return and of its square, or of the information ratio, and adapters "
                "are moved by critics, of which it has none. Change these, or learn with SAC or "
                "TD3."
            )
        refuse_long_episode("expert.horizon", config.expert.horizon, world.spans("train"))

    def train_once(self) -> Metrics:
        """Let the books trade, and move the actor along the gradient of what they made of it."""
        begin = self._begin()
        self.actor.train()
        paths = self.trade(*begin)
        self._standing = Standing(*(part.detach() for part in paths.end))
        self.steps += paths.gain.numel()
        paid = self._utility(paths.gain, begin.row)
        loss, train = -paid, self.config.train
        share = learning_rate_share(train.lr_schedule, self.steps / train.total_env_steps)
        warmth = warmup_share(self.updates, self.config.expert.warmup_updates)
        rate = train.lr_actor * share * warmth
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), train.grad_clip)
        metrics = {"losses/total": float(loss.detach()), "losses/gradient_norm": float(norm)}
        refuse_divergence(metrics, f"step {self.steps:,}", "train.lr_actor or expert.horizon")
        self.optimizer.step()
        self.updates += 1
        return metrics | {
            "charts/learning_rate": float(rate),
            "charts/updates": float(self.updates),
            "charts/reward": float(paid.detach()),
            "charts/exposure": 1.0 - float(paths.cash.detach().mean()),
        }

    def trade(self, rows: Tensor, weights: Tensor, cash: Tensor) -> BookPaths:
        """H bars of books that stand at rows[E] with weights[E,N] and cash[E]."""
        horizon = self.config.expert.horizon
        gains, shares = [], []
        for row in rows[None, :] + torch.arange(horizon)[:, None]:
            buy, sell = allowed_trades(self.market, weights, row)
            z = self.table.look(row)
            obs = ExpertObs(z, weights, cash, self._present[row], buy | sell)
            if isinstance(self.actor, TopKActor):
                target = diff_weights_of_targets(self.actor(obs), weights, buy, sell)
            else:
                scores = torch.tanh(self.actor(obs)[0])
                target = diff_weights_of_scores(scores, weights, buy, sell, EXPERT_GAIN)
            gain, weights, cash = differentiable_step(self.market, weights, cash, target, row)
            gains.append(gain)
            shares.append(cash)
        end = Standing(rows + horizon, weights, cash)
        return BookPaths(torch.stack(gains), torch.stack(shares), end)

    def _begin(self) -> Standing:
        """Where the books of this update stand."""
        rows, _ = self.starts.draw(self.config.train.books)
        fresh = torch.from_numpy(rows)
        if not isinstance(self.actor, TopKActor):
            return Standing(fresh, *self._draw_weights(fresh))
        ended = torch.ones(len(fresh), dtype=torch.bool)
        if self._standing is not None:
            ended = torch.from_numpy(~self.starts.fits(self._standing.row.numpy()))
        nothing = torch.zeros(len(fresh), self.world.n_assets)
        buy, _ = allowed_trades(self.market, nothing, fresh)
        obs = ExpertObs(
            self.table.look(fresh), nothing, 1.0 - nothing[:, 0], self._present[fresh], buy
        )
        with torch.no_grad():
            held, _ = self.actor.wish(obs)
        new = Standing(fresh, held, 1.0 - held.sum(-1))
        old = self._standing or new
        return Standing(
            torch.where(ended, fresh, old.row),
            torch.where(ended[:, None], new.weights, old.weights),
            torch.where(ended, new.cash, old.cash),
        )

    def _utility(self, gain: Tensor, rows: Tensor) -> Tensor:
        """What the gains[H,E] of books that began at rows[E] are worth in all."""
        reward = self.config.reward
        if self._mean_asset is None:
            return utility(gain, reward).mean()
        passed = rows[None, :] + torch.arange(len(gain))[:, None]
        return reward.scale * information_ratio(gain - self._mean_asset[passed])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer, optimizer_state = flatten_optimizer(self.optimizer)
        tensors = with_prefix("actor.", self.actor.state_dict())
        json_state = {
            "steps": self.steps,
            "updates": self.updates,
            "optimizer": optimizer_state,
            "starts": pack_generator(self.starts.rng),
        }
        if self._standing is not None:
            tensors |= with_prefix("standing.", self._standing._asdict())
        return tensors | with_prefix("optimizer.", optimizer), json_state

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.actor.load_state_dict(below_prefix("actor.", tensors))
        restore_optimizer(self.optimizer, below_prefix("optimizer.", tensors), state["optimizer"])
        self.starts.rng = unpack_generator(state["starts"])
        self.steps, self.updates = int(state["steps"]), int(state["updates"])
        standing = below_prefix("standing.", tensors)
        self._standing = Standing(**standing) if standing else None

    def _draw_weights(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(weights[E,N], cash[E]) drawn evenly from all portfolios of what is there at rows[E]."""
        n_assets = self.world.n_assets
        lots = self.starts.rng.standard_exponential((len(rows), n_assets + 1), dtype=np.float32)
        parts = torch.from_numpy(lots)
        parts[:, :n_assets] *= self._known[rows]
        parts /= parts.sum(-1, keepdim=True)
        return parts[:, :n_assets], parts[:, n_assets]


def utility(gain: Tensor, reward: RewardConfig) -> Tensor:
    """What returns are worth, elementwise: what `rewards.reward` pays for them."""
    base = torch.log1p(gain) if reward.kind == "log_return" else gain
    return (base - reward.variance_penalty * gain.square()) * reward.scale


def information_ratio(active: Tensor) -> Tensor:
    """Mean over deviation of active returns[H,E], a bar's; 0 where none of them is active."""
    return active.mean() / active.std().clamp(min=1e-6)


def _market(world: World) -> DiffMarket:
    members = world.present & world.member
    return diff_market(
        *(world.rows, world.rules),
        fill_open=world.fill_open,
        members=members,
        capital=world.initial_cash,
    )
