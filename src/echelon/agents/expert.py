"""A single expert: SAC or TD3 on many books that trade by target weights.

One round, `train.rollout_steps` bars long:

1. Every book stands at a row of its own. Embeddings of the rows are looked up; the actor says one
   action per asset, `envs.act` makes target weights of them, the books go one bar on, and what
   happened goes into the replay buffer: row, weights, action, reward, never a window.
2. `expert.updates_per_step` updates are due for each of these steps. An update draws transitions
   and looks their embeddings up again, in the learner's present table.
3. With adapters (`lora.enabled`), one update in `lora.every_updates` encodes its rows anew, with
   gradients, and the critics' gradient moves the adapter. The tables follow every
   `lora.refresh_updates` updates; the one that targets are computed from follows by a slow copy of
   the adapter.

Policies act with the encoder that made the table, so what validation sees is what was learned on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.agents.adapter import AdapterTraining, table_file
from echelon.agents.collector import Collector
from echelon.agents.offpolicy import Batch, OffPolicy, OffPolicySettings
from echelon.agents.policy import WeightPolicy
from echelon.agents.replay import Replay, Transitions
from echelon.agents.sac import SAC
from echelon.agents.tables import EmbeddingTable
from echelon.agents.td3 import TD3
from echelon.config import Config
from echelon.config.sizes import refuse_idle_expert
from echelon.envs.world import World
from echelon.models import Encoder, ExpertActor, ExpertCritic, ExpertObs
from echelon.rng import stream
from echelon.runs.checkpoint import below_prefix, pack_generator, unpack_generator, with_prefix
from echelon.types import Metrics

_SCALE_ROWS = 4_096
"""Rows of the train window that the scale of embeddings is taken from."""


_COMMON = (
    *("losses/critic", "losses/actor", "losses/critic_gradient_norm"),
    *("losses/actor_gradient_norm", "charts/value", "charts/learning_rate"),
)
METRICS: Mapping[str, tuple[str, ...]] = {
    "SAC": (*_COMMON, "losses/temperature", "charts/temperature", "charts/entropy"),
    "TD3": _COMMON,
}
"""Names of what an update tells, by algorithm."""


class ExpertLearner:
    """The learner: networks, books, replay, tables, and where they stand."""

    def __init__(
        self, config: Config, world: World, seed: int, encoder: Encoder, tables: Path | None = None
    ) -> None:
        """encoder: pre-trained, with nothing of it changed here; tables: where to keep them"""
        refuse_idle_expert(config)
        self.config = config
        self.world = world
        self.seed = seed
        self.steps = 0
        expert = config.expert
        self.table = EmbeddingTable(world, encoder.d_model, table_file(tables, "embeddings"))
        self.serving = copy.deepcopy(encoder).requires_grad_(requires_grad=False).eval()
        self.table.refresh(self.serving)
        self.adapter: AdapterTraining | None = None
        if config.lora.enabled:
            self.adapter = AdapterTraining(config, world, encoder, seed, tables, self.table)
        self.core = self._core(encoder.d_model)
        self.collector = Collector(config, world, seed)
        self.replay = Replay(expert.buffer_size, world.n_assets)
        self._due = 0.0
        self._latest: Metrics = {}
        self._draws = stream(seed, "replay")
        self._policy = WeightPolicy(self.serving, self._actor(), config, seed, keep=True)

    def train_once(self) -> Metrics:
        """One round: bars and the updates that are due for them."""
        rewards: list[float] = []
        for _ in range(self.config.train.rollout_steps):
            rewards.append(self._collect())
            if self.steps < self.config.expert.learning_starts:
                continue
            self._due += self.collector.n_books * self.config.expert.updates_per_step
            while self._due >= 1.0:
                self._due -= 1.0
                found = self._update(want_metrics=self._due < 1.0)
                self._latest = found or self._latest
        return self._told() | {"charts/reward": float(np.mean(rewards))}

    def policy(self) -> WeightPolicy:
        """The actor on the encoder of the present table."""
        return self._policy

    def weights(self) -> dict[str, Tensor]:
        """What `training.load_policy` makes the policy from again."""
        encoder = with_prefix("encoder.", self.serving.state_dict())
        return encoder | with_prefix("actor.", self._actor().state_dict())

    def close(self) -> None:
        """Remove the files of the tables."""
        self.table.close()
        if self.adapter is not None:
            self.adapter.slow_table.close()

    def _core(self, d_model: int) -> OffPolicy:
        """The networks, with the scale of the embeddings on the train window, and their learner."""
        hidden = self.config.expert.hidden
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(self.seed, "weights").integers(2**62)))
            actor = ExpertActor(d_model, hidden, self.config.state)
            critic = ExpertCritic(d_model, hidden, self.config.state)
        rows = np.concatenate([np.arange(s.start, s.stop) for s in self.world.spans("train")])
        some = rows[:: max(1, len(rows) // _SCALE_ROWS)]
        z, present = self.table.look(some), torch.from_numpy(self.world.present[some])
        actor.scale.fit(z, present)
        critic.scale.fit(z, present)
        kind = {"SAC": SAC, "TD3": TD3}[self.config.train.algo]
        return kind(actor, critic, OffPolicySettings.of(self.config), self.seed)

    def _actor(self) -> ExpertActor:
        actor = self.core.actor
        assert isinstance(actor, ExpertActor), "the networks are made here"
        return actor

    def _collect(self) -> float:
        """One bar of every book; the mean of the rewards."""
        lot = self.steps < self.config.expert.learning_starts
        done = self.collector.step(self.core, self.table, lot=lot).transitions
        self.replay.add(done)
        self.steps += self.collector.n_books
        return float(done.reward.mean())

    def _update(self, *, want_metrics: bool) -> Metrics:
        drawn = self.replay.sample(self.config.expert.batch_size, self._draws)
        adapter = self.adapter
        moves = adapter is not None and self.core.updates % self.config.lora.every_updates == 0
        if adapter is not None and moves:
            z = adapter.encode(drawn.row)
        else:
            z = self.table.look(drawn.row)
        later = self.table if adapter is None else adapter.slow_table
        metrics = self.core.update(self._batch(drawn, z, later), want_metrics=want_metrics)
        if adapter is not None:
            if moves:
                adapter.step()
            if self.core.updates % self.config.lora.refresh_updates == 0:
                adapter.serve(self.serving, self.table)
                self._policy.forget()
        return metrics

    def _batch(self, drawn: Transitions, z: Tensor, later: EmbeddingTable) -> Batch:
        rows = torch.from_numpy(drawn.row)
        reward, weights, cash, next_weights, next_cash = (
            torch.from_numpy(part)
            for part in (
                *(drawn.reward, drawn.weights, drawn.cash),
                *(drawn.next_weights, drawn.next_cash),
            )
        )
        gamma, present = self.config.train.gamma, self.collector.present
        return Batch(
            obs=ExpertObs(z, weights, cash, present[rows], torch.from_numpy(drawn.free)),
            action=torch.tanh(torch.from_numpy(drawn.raw)),
            reward=reward,
            discount=torch.where(torch.from_numpy(drawn.terminated), 0.0, gamma),
            next_obs=ExpertObs(
                later.look(drawn.next_row),
                next_weights,
                next_cash,
                present[rows + 1],
                torch.from_numpy(drawn.next_free),
            ),
        )

    def _told(self) -> Metrics:
        """What a log line says of the updates: their latest numbers, nothing before the first."""
        found = dict(self._latest)
        found["charts/replay"] = float(len(self.replay))
        found["charts/updates"] = float(self.core.updates)
        if self.adapter is not None:
            if self._latest:
                found["losses/adapter_gradient_norm"] = self.adapter.norm
            found["charts/table_version"] = float(self.table.version)
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) from which `restore` goes on bit for bit, replay included."""
        core, core_state = self.core.state()
        replay, replay_state = self.replay.state()
        tensors = with_prefix("core.", core)
        tensors |= {f"replay.{k}": torch.from_numpy(v) for k, v in replay.items()}
        collector, starts = self.collector.state()
        tensors |= collector
        json_state: dict[str, Any] = {
            "steps": self.steps,
            "due": self._due,
            "latest": self._latest,
            "core": core_state,
            "replay": replay_state,
            "starts": starts,
            "draws": pack_generator(self._draws),
        }
        if self.adapter is not None:
            tensors |= with_prefix("serving.", self.serving.state_dict())
            own, json_state["adapter"] = self.adapter.state()
            tensors |= with_prefix("adapter.", own)
            json_state["table_version"] = self.table.version
        return tensors, json_state

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.core.restore(below_prefix("core.", tensors), state["core"])
        replay = {k: v.numpy() for k, v in below_prefix("replay.", tensors).items()}
        self.replay.restore(replay, state["replay"])
        self.collector.restore(tensors, state["starts"])
        self._draws = unpack_generator(state["draws"])
        self.steps, self._due = int(state["steps"]), float(state["due"])
        self._latest = {name: float(value) for name, value in state["latest"].items()}
        if self.adapter is not None:
            self.serving.load_state_dict(below_prefix("serving.", tensors))
            self.table.refresh(self.serving)
            self.table.version = int(state["table_version"])
            self.adapter.restore(below_prefix("adapter.", tensors), state["adapter"])
            self._policy.forget()
