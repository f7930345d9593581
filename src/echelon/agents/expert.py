"""A single expert: SAC or TD3 on many books that trade by target weights.

One round, `train.rollout_steps` bars long:

1. Every book stands at a row of its own. Embeddings of the rows are looked up; the actor says one
   action per asset, `envs.act` makes target weights of them, the books go one bar on, and what
   happened goes into the replay buffer: row, weights, action, reward, never a window.
2. `expert.updates_per_step` updates are due for each of these steps. An update draws transitions
   and looks their embeddings up again, in the learner's present table.
3. With adapters (`lora.enabled`), some updates move the encoder too (`agents.expert_core`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from echelon.agents.collector import Collector
from echelon.agents.expert_core import ExpertCore, SingleExpert
from echelon.agents.offpolicy import OffPolicy, ReplayBatch
from echelon.agents.replay import Replay, Transitions
from echelon.agents.sac import SAC
from echelon.agents.td3 import TD3
from echelon.config import Config
from echelon.config.sizes import refuse_idle_expert
from echelon.envs.world import World
from echelon.models import Encoder, ExpertObs
from echelon.models.lora import trainable
from echelon.rng import stream
from echelon.runs.checkpoint import below_prefix, pack_generator, unpack_generator
from echelon.types import Metrics

_COMMON = (
    *("losses/critic", "losses/actor", "losses/critic_gradient_norm"),
    *("losses/actor_gradient_norm", "charts/value", "charts/learning_rate"),
)


class ExpertLearner(SingleExpert):
    """The learner: networks, books, replay, tables, and where they stand."""

    algorithm: ClassVar[type[OffPolicy]]
    metrics: ClassVar[tuple[str, ...]]
    """Names of the numbers that an update gives."""

    def __init__(
        self, config: Config, world: World, seed: int, encoder: Encoder, tables: Path | None = None
    ) -> None:
        """encoder: pre-trained, with nothing of it changed here; tables: where to keep them"""
        refuse_idle_expert(config)
        super().__init__(config, world, seed, encoder, tables)
        self.networks = ExpertCore(
            config, world, encoder, [self.table], self.algorithm, seed, tables
        )
        self.core, self.actor = self.networks.core, self.networks.actor
        self.serving = self.networks.serving
        self.collector = Collector(config, world, seed)
        self.replay = Replay(config.expert.buffer_size, world.n_assets)
        self._due = 0.0
        self._latest: Metrics = {}
        self._draws = stream(seed, "replay")

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
                metrics = self._update(want_metrics=self._due < 1.0)
                self._latest = metrics or self._latest
        return self._metrics() | {"charts/reward": float(np.mean(rewards))}

    def facts(self) -> Mapping[str, Any]:
        """Weights of the adapter, bytes of the replay (`training.learner_facts`)."""
        adapter, replay = self.networks.adapter, self.replay
        size = {"transition_bytes": replay.bytes_per_transition, "capacity": replay.capacity}
        trained = None if adapter is None else trainable(adapter.encoder)._asdict()
        return {"adapter": trained, "replay": size}

    def close(self) -> None:
        """Remove the files of the tables."""
        super().close()
        self.networks.close()

    def _collect(self) -> float:
        """One bar of every book; the mean of the rewards."""
        lot = self.steps < self.config.expert.learning_starts
        done = self.collector.step(self.core, self.table, lot=lot).transitions
        self.replay.add(done)
        self.steps += self.collector.n_books
        return float(done.reward.mean())

    def _update(self, *, want_metrics: bool) -> Metrics:
        drawn = self.replay.sample(self.config.expert.batch_size, self._draws)
        batch = self._batch(drawn, self.networks.embed(drawn.row))
        metrics = self.core.update(batch, want_metrics=want_metrics)
        if self.networks.finish_update():
            self.policy().forget()
        return metrics

    def _batch(self, drawn: Transitions, z: Tensor) -> ReplayBatch:
        rows = torch.from_numpy(drawn.row)
        reward, weights, cash, next_weights, next_cash = (
            torch.from_numpy(part)
            for part in (
                *(drawn.reward, drawn.weights, drawn.cash),
                *(drawn.next_weights, drawn.next_cash),
            )
        )
        gamma, present = self.config.train.gamma, self.collector.present
        return ReplayBatch(
            obs=ExpertObs(z, weights, cash, present[rows], torch.from_numpy(drawn.free)),
            action=torch.tanh(torch.from_numpy(drawn.raw)),
            reward=reward,
            discount=torch.where(torch.from_numpy(drawn.terminated), 0.0, gamma),
            next_obs=ExpertObs(
                self.networks.slow_table.look(drawn.next_row),
                next_weights,
                next_cash,
                present[rows + 1],
                torch.from_numpy(drawn.next_free),
            ),
        )

    def _metrics(self) -> Metrics:
        """Of the updates, for a log line: their latest numbers, nothing before the first."""
        metrics = dict(self._latest)
        metrics["charts/replay"] = float(len(self.replay))
        metrics["charts/updates"] = float(self.core.updates)
        adapter = self.networks.adapter
        if adapter is not None:
            if self._latest:
                metrics["losses/adapter_gradient_norm"] = adapter.norm
            metrics["charts/table_version"] = float(self.table.version)
        return metrics

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) from which `restore` goes on bit for bit, replay included."""
        tensors, json_state = self.networks.state()
        replay, json_state["replay"] = self.replay.state()
        tensors |= {f"replay.{k}": torch.from_numpy(v) for k, v in replay.items()}
        collector, json_state["starts"] = self.collector.state()
        json_state |= {
            "steps": self.steps,
            "due": self._due,
            "latest": self._latest,
            "draws": pack_generator(self._draws),
        }
        return tensors | collector, json_state

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.networks.restore(tensors, state)
        replay = {k: v.numpy() for k, v in below_prefix("replay.", tensors).items()}
        self.replay.restore(replay, state["replay"])
        self.collector.restore(tensors, state["starts"])
        self._draws = unpack_generator(state["draws"])
        self.steps, self._due = int(state["steps"]), float(state["due"])
        self._latest = {name: float(value) for name, value in state["latest"].items()}
        self.policy().forget()


class SACLearner(ExpertLearner):
    """A single expert by SAC."""

    algorithm = SAC
    metrics = (*_COMMON, "losses/temperature", "charts/temperature", "charts/entropy")


class TD3Learner(ExpertLearner):
    """A single expert by TD3."""

    algorithm = TD3
    metrics = _COMMON
