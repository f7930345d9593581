"""Analytic policy gradient: the actor is moved by gradients that flow through the market itself.

Without impact prices do not react to orders, so what a book earns can be differentiated in its
weights (`market.differentiable`), and no critic has to guess it. One update:

1. `train.books` books begin at rows by lot of the train window, with weights by lot. Embeddings of
   the rows they will pass are looked up.
2. They trade `expert.horizon` bars. At each the actor says tanh(mean), the softmax of `act` makes
   target weights of it, and the market a return and new weights; the graph is kept.
3. U = mean over books and bars of r − c·r², c being `reward.variance_penalty`; −U goes back through
   all bars: costs paid now against what the holding earns later. Clipped; one step of AdamW.

It learns one path by heart quickly, because its gradients have no noise but the market's: train it
on several draws or with `expert.weight_decay`, and let validation choose the checkpoint. Rules that
make the return depend on an order's size are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.expert import SingleExpert, Starts
from echelon.agents.expert_core import draw_networks, frozen_copy
from echelon.agents.learner import learning_rate_share, refuse_divergence, refuse_long_episode
from echelon.agents.offpolicy import warmup_share
from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs.act import EXPERT_GAIN
from echelon.envs.world import World
from echelon.errors import ConfigError
from echelon.market.differentiable import (
    DiffMarket,
    allowed_trades,
    diff_market,
    diff_weights_of_scores,
    differentiable_step,
)
from echelon.models.encoders import Encoder
from echelon.models.expert import ExpertObs
from echelon.rng import stream
from echelon.runs.checkpoint import (
    below_prefix,
    flatten_optimizer,
    pack_generator,
    restore_optimizer,
    unpack_generator,
    with_prefix,
)
from echelon.types import Metrics


class BookPaths(NamedTuple):
    """What books did over H bars, with gradients: gain, cash[H,E], the share of it after each."""

    gain: Tensor
    cash: Tensor


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
        self.actor = draw_networks(config, world, self.table, seed)[0]
        self.optimizer = torch.optim.AdamW(
            self.actor.parameters(),
            lr=config.train.lr_actor,
            weight_decay=config.expert.weight_decay,
            fused=True,
        )
        self._present = torch.from_numpy(np.array(world.present))
        self._known = torch.from_numpy(np.array(world.present & (world.rows.close > 0.0)))

    @classmethod
    def refuse_world(cls, config: Config, world: World) -> None:
        """Raise where the configuration asks for what gradients through the market cannot give."""
        _market(world)  # refuses rules by name
        reward = config.reward
        limits = [
            (reward.kind not in ("return", "log_return"), f"reward.kind={reward.kind}", "return"),
            *(
                (getattr(reward, name) > 0, f"reward.{name}={getattr(reward, name):g}", "0")
                for name in ("drawdown_penalty", "cvar_penalty")
            ),
            (config.lora.enabled, "lora.enabled=true", "false"),
        ]
        wrong = [f"{given} (take {instead})" for bad, given, instead in limits if bad]
        if wrong:
            raise ConfigError(
                f"train.algo=APG cannot learn with {', '.join(wrong)}: its gradient is that of "
                "each bar's return and of its square, and adapters are moved by critics, of which "
                "it has none. Change these, or learn with SAC or TD3."
            )
        refuse_long_episode("expert.horizon", config.expert.horizon, world.spans("train"))

    def train_once(self) -> Metrics:
        """Let the books trade, and move the actor along the gradient of what they made of it."""
        first, _ = self.starts.draw(self.config.train.books)
        rows = torch.from_numpy(first)
        weights, cash = self._draw_weights(rows)
        self.actor.train()
        paths = self.trade(rows, weights, cash)
        self.steps += paths.gain.numel()
        paid = utility(paths.gain, self.config.reward)
        loss, train = -paid.mean(), self.config.train
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
            "charts/reward": float(paid.detach().mean()),
            "charts/exposure": 1.0 - float(paths.cash.detach().mean()),
        }

    def trade(self, rows: Tensor, weights: Tensor, cash: Tensor) -> BookPaths:
        """H bars of books that stand at rows[E] with weights[E,N] and cash[E]."""
        horizon = self.config.expert.horizon
        passed = rows[None, :] + torch.arange(horizon)[:, None]
        z = self.table.look(passed.flatten()).view(*passed.shape, self.world.n_assets, -1)
        gains, shares = [], []
        for row, z_t in zip(passed, z, strict=True):
            buy, sell = allowed_trades(self.market, weights, row)
            mean, _ = self.actor(ExpertObs(z_t, weights, cash, self._present[row], buy | sell))
            target = diff_weights_of_scores(torch.tanh(mean), weights, buy, sell, EXPERT_GAIN)
            gain, weights, cash = differentiable_step(self.market, weights, cash, target, row)
            gains.append(gain)
            shares.append(cash)
        return BookPaths(torch.stack(gains), torch.stack(shares))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer, optimizer_state = flatten_optimizer(self.optimizer)
        tensors = with_prefix("actor.", self.actor.state_dict())
        json_state = {
            "steps": self.steps,
            "updates": self.updates,
            "optimizer": optimizer_state,
            "starts": pack_generator(self.starts.rng),
        }
        return tensors | with_prefix("optimizer.", optimizer), json_state

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.actor.load_state_dict(below_prefix("actor.", tensors))
        restore_optimizer(self.optimizer, below_prefix("optimizer.", tensors), state["optimizer"])
        self.starts.rng = unpack_generator(state["starts"])
        self.steps, self.updates = int(state["steps"]), int(state["updates"])

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


def _market(world: World) -> DiffMarket:
    members = world.present & world.member
    return diff_market(world.rows, world.rules, fill_open=world.fill_open, members=members)
