"""A single expert: SAC or TD3 on many books that trade by target weights.

One round, `train.rollout_steps` bars long:

1. Every book stands at a row of its own. Embeddings of the rows are looked up; the actor says one
   action per asset, `envs.act` makes target weights of them, the books go one bar on, and what
   happened goes into the replay buffer. A book whose episode is over begins another somewhere in
   the train window.
2. `expert.updates_per_step` updates are due for each of these steps. An update draws transitions
   and looks their embeddings up again, in the learner's present table.
3. With adapters (`lora.enabled`), some updates move the encoder too (`agents.expert_core`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from echelon.agents.expert_core import (
    ExpertCore,
    WeightPolicy,
    expert_obs,
    replayed_obs,
    table_file,
)
from echelon.agents.learner import (
    Learner,
    LearnerFacts,
    ReplaySize,
    TrainingSetup,
    refuse_long_episode,
)
from echelon.agents.offpolicy import ActionSample, OffPolicy, ReplayBatch
from echelon.agents.replay import Replay, Transitions
from echelon.agents.sac import SAC
from echelon.agents.tables import EmbeddingTable
from echelon.agents.td3 import TD3
from echelon.config import Config
from echelon.config.sizes import refuse_idle_expert
from echelon.envs.act import ActionRule, free, weights_of_actions
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.market import Rows
from echelon.models.encoders import Encoder, build_served
from echelon.models.expert import ExpertActor, TopKActor, build_actor
from echelon.models.lora import adapter_size
from echelon.rng import stream, torch_generator
from echelon.runs.checkpoint import below_prefix, pack_generator, unpack_generator, with_prefix
from echelon.types import Bools, Floats, Metrics

_EVEN_LOG_STD = math.log(0.5 * math.pi / math.sqrt(3.0))


class Starts:
    """Draws first and last rows of episodes, every bar of every stretch as likely as another."""

    def __init__(
        self, spans: Sequence[range], episode_steps: int | None, rng: np.random.Generator
    ) -> None:
        """episode_steps: None: from the start to the end of its stretch"""
        if episode_steps is not None:
            refuse_long_episode("train.episode_steps", episode_steps, spans)
        self.rng = rng
        self._steps = episode_steps
        self._first = np.array([span.start for span in spans])
        self._last = np.array([span.stop - 1 for span in spans])
        # From its last row a book cannot step.
        rooms = self._last - self._first + 1 - (1 if episode_steps is None else episode_steps)
        self._until = np.cumsum(rooms)

    @property
    def whole(self) -> range:
        """From the first row of all stretches to the last."""
        return range(int(self._first.min()), int(self._last.max()) + 1)

    def fits(self, rows: Rows) -> Bools:
        """[E] whether an episode begun at rows[E] would end within its stretch."""
        assert self._steps is not None, "episodes are of no length"
        ends = rows[:, None] + self._steps
        inside = (rows[:, None] >= self._first) & (ends <= self._last)
        return np.asarray(inside.any(axis=1))

    def draw(self, count: int) -> tuple[Rows, Rows]:
        place = self.rng.integers(0, self._until[-1], count)
        which = np.searchsorted(self._until, place, side="right")
        before = np.concatenate([[0], self._until])[which]
        first = self._first[which] + place - before
        last = self._last[which] if self._steps is None else first + self._steps
        return first.astype(np.int64), last.astype(np.int64)


class Collected(NamedTuple):
    """One bar of E books: what is remembered of it, how the actions came about, bar_return[E]."""

    transitions: Transitions
    chosen: ActionSample
    bar_return: Floats


class Collector:
    """E books and where their episodes end."""

    def __init__(self, config: Config, world: World, seed: int) -> None:
        self.present = torch.from_numpy(np.array(world.present))
        self.starts = Starts(
            world.spans("train"), config.train.episode_steps, stream(seed, "starts")
        )
        rule = ActionRule.from_config(config, "weights")
        self.books = Books(world, rule, config.reward, config.train.books, self.starts.whole)
        self.ends = np.empty(config.train.books, dtype=np.int64)
        self._generator = torch_generator(seed, "actions")
        self._begin(np.ones(config.train.books, dtype=bool))

    def step(self, core: OffPolicy, table: EmbeddingTable, *, lot: bool) -> Collected:
        """One bar of every book; lot: actions are drawn evenly, there being no policy yet."""
        row, held, before = self.books.row, self.books.holdings(), self.books.value
        obs = expert_obs(table.look(row), self.present[torch.from_numpy(row)], held)
        if lot:
            chosen = draw_evenly(obs.free, self._generator)
        else:
            chosen = core.act(obs, self._generator, explore=True)
        result = self.books.step(weights_of_actions(chosen.action.numpy(), held))
        after = self.books.holdings()
        truncated = (self.books.row >= self.ends) & ~result.terminated
        transitions = Transitions(
            row=row.astype(np.int32),
            weights=held.weights,
            cash=held.cash_share,
            free=free(held),
            raw=chosen.raw.numpy(),
            raw_log_prob=chosen.raw_log_prob.numpy(),
            reward=result.reward.astype(np.float32),
            terminated=result.terminated,
            truncated=truncated,
            next_weights=after.weights,
            next_cash=after.cash_share,
            next_free=free(after),
        )
        self._begin(truncated | result.terminated)
        return Collected(transitions, chosen, bar_return=result.value / before - 1.0)

    def _begin(self, which: Bools) -> None:
        """New episodes for the books `which`[E]."""
        if which.any():
            rows, ends = self.starts.draw(int(which.sum()))
            starts = self.books.row.copy()
            starts[which], self.ends[which] = rows, ends
            self.books.reset(starts, which)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        books = self.books.state() | {"ends": self.ends}
        tensors = {f"books.{k}": torch.from_numpy(np.array(v)) for k, v in books.items()}
        tensors["chance.actions"] = self._generator.get_state()
        return tensors, pack_generator(self.starts.rng)

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        books = {k: v.numpy().copy() for k, v in below_prefix("books.", tensors).items()}
        self.ends = books.pop("ends")
        self.books.restore(books)
        self._generator.set_state(tensors["chance.actions"])
        self.starts.rng = unpack_generator(state)


def draw_evenly(free: Tensor, generator: torch.Generator) -> ActionSample:
    """Actions drawn evenly from (−1, 1), for collecting before there is a policy."""
    action = (2.0 * torch.rand(free.shape, generator=generator) - 1.0) * (1.0 - 1e-6) * free
    density = torch.full_like(action, math.log(0.5)) * free
    # Of what comes before the tanh: da/du = 1 − a².
    raw_density = density + torch.log1p(-action.square())
    # Seen from before the tanh these are half a logistic variable, of this mean and deviation.
    mean, log_std = torch.zeros_like(action), torch.full_like(action, _EVEN_LOG_STD)
    return ActionSample(
        action, torch.atanh(action), density.sum(-1), raw_density.sum(-1), mean, log_std
    )


class SingleExpert(Learner):
    """A learner of one expert on the run's encoder (`serving`) and a table of it."""

    serving: Encoder
    actor: ExpertActor | TopKActor

    def __init__(
        self, config: Config, world: World, seed: int, encoder: Encoder, tables: Path | None = None
    ) -> None:
        """encoder: pre-trained, with nothing of it changed here; tables: where to keep them"""
        self.config, self.world, self.seed, self.steps = config, world, seed, 0
        self.table = EmbeddingTable(world, encoder.d_model, table_file(tables, "embeddings"))
        self.table.refresh(encoder)
        self._policy: WeightPolicy | None = None

    @classmethod
    def from_setup(cls, setup: TrainingSetup) -> Self:
        assert setup.encoder is not None, "experts stand on a pre-trained encoder"
        tables = setup.directory / "tables"
        return cls(setup.config, setup.train, setup.seed, setup.encoder, tables)

    @classmethod
    def load_policy(
        cls, config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str
    ) -> WeightPolicy:
        encoder = build_served(config, n_features)
        encoder.load_state_dict(below_prefix("encoder.", weights))
        actor = build_actor(config, encoder.d_model)
        actor.load_state_dict(below_prefix("actor.", weights))
        return WeightPolicy(encoder, actor, config, seed, name)

    def policy(self) -> WeightPolicy:
        if self._policy is None:
            self._policy = WeightPolicy(self.serving, self.actor, self.config, self.seed, keep=True)
        return self._policy

    def weights(self) -> dict[str, Tensor]:
        encoder = with_prefix("encoder.", self.serving.state_dict())
        return encoder | with_prefix("actor.", self.actor.state_dict())

    def close(self) -> None:
        self.table.close()


class ExpertLearner(SingleExpert):
    """The learner: networks, books, replay, tables, and where they stand."""

    algorithm: ClassVar[type[OffPolicy]]

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
        settings, books = self.config.expert, self.config.train.books
        rewards: list[float] = []
        for _ in range(self.config.train.rollout_steps):
            lot = self.steps < settings.learning_starts
            done = self.collector.step(self.core, self.table, lot=lot).transitions
            self.replay.add(done)
            self.steps += books
            rewards.append(float(done.reward.mean()))
            if self.steps < settings.learning_starts:
                continue
            self._due += books * settings.updates_per_step
            while self._due >= 1.0:
                self._due -= 1.0
                metrics = self._update(want_metrics=self._due < 1.0)
                self._latest = metrics or self._latest
        metrics = dict(self._latest)
        metrics["charts/reward"] = float(np.mean(rewards))
        metrics["charts/replay"] = float(len(self.replay))
        metrics["charts/updates"] = float(self.core.updates)
        if (adapter := self.networks.adapter) is not None:
            if self._latest:
                metrics["losses/adapter_gradient_norm"] = adapter.norm
            metrics["charts/table_version"] = float(self.table.version)
        return metrics

    def facts(self) -> LearnerFacts:
        adapter, replay = self.networks.adapter, self.replay
        trained = None if adapter is None else adapter_size(adapter.encoder)
        return LearnerFacts(trained, ReplaySize(replay.bytes_per_transition, replay.capacity))

    def close(self) -> None:
        super().close()
        self.networks.close()

    def _update(self, *, want_metrics: bool) -> Metrics:
        drawn = self.replay.sample(self.config.expert.batch_size, self._draws)
        z = self.networks.embed(drawn.row)
        next_z = self.networks.slow_table.look(drawn.next_row)
        obs, next_obs = replayed_obs(drawn, z, next_z, self.collector.present)
        batch = ReplayBatch(
            obs=obs,
            action=torch.tanh(torch.from_numpy(drawn.raw)),
            reward=torch.from_numpy(drawn.reward),
            discount=torch.where(torch.from_numpy(drawn.terminated), 0.0, self.config.train.gamma),
            next_obs=next_obs,
        )
        metrics = self.core.update(batch, want_metrics=want_metrics)
        if self.networks.finish_update():
            self.policy().forget()
        return metrics

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
        self.networks.restore(tensors, state)
        replay = {k: v.numpy() for k, v in below_prefix("replay.", tensors).items()}
        self.replay.restore(replay, state["replay"])
        self.collector.restore(tensors, state["starts"])
        self._draws = unpack_generator(state["draws"])
        self.steps, self._due = int(state["steps"]), float(state["due"])
        self._latest = {name: float(value) for name, value in state["latest"].items()}
        self.policy().forget()


class SACLearner(ExpertLearner):
    algorithm = SAC


class TD3Learner(ExpertLearner):
    algorithm = TD3
