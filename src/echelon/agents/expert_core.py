"""An expert's networks, what they stand on, and the policy they make.

The actor and its critics see the market as embeddings, looked up in tables of a frozen encoder
(`agents.tables`). With `lora.enabled` one update in `lora.every_updates` encodes its rows with
gradients, and what the critics leave in an adapter on the encoder moves it; a slow copy follows,
for targets. Tables are computed again every `lora.refresh_updates` updates. Policies act with the
encoder that made the table, so what validation sees is what was learned on.

Axes: `E` books, `B` rows of a batch, `T` rows of a span, `N` assets, `D` embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.agents.learner import refuse_divergence
from echelon.agents.offpolicy import OffPolicy
from echelon.agents.replay import Transitions
from echelon.agents.tables import EmbeddingTable, encode_rows, encode_span
from echelon.config import Config
from echelon.envs.act import (
    ActionKind,
    Holdings,
    free,
    weights_of_actions,
    weights_of_targets,
)
from echelon.envs.world import World
from echelon.market import Rows
from echelon.models.encoders import Encoder
from echelon.models.expert import ExpertActor, ExpertCritic, ExpertObs, InputScale, TopKActor
from echelon.models.lora import (
    adapt,
    adapter_parameters,
    adapter_state,
    load_adapter_state,
    merged_weights,
)
from echelon.ops.squashed import clip_log_std
from echelon.rng import global_draws, torch_generator
from echelon.runs.checkpoint import below_prefix, flatten_optimizer, restore_optimizer, with_prefix
from echelon.types import Floats, Floats32

_CHUNK = 512
"""Rows that a policy acts on at once, where it does not see its book."""
_LEARNING, _TARGET = "expert", "target"
"""Names of the adapter that learns and of the one that follows it."""


def frozen_copy(encoder: Encoder) -> Encoder:
    """A copy that does not learn, to serve embeddings with."""
    return copy.deepcopy(encoder).requires_grad_(requires_grad=False).eval()


def fit_scale(scale: InputScale, world: World, table: EmbeddingTable) -> None:
    """Bring the embeddings of the train window to mean 0 and deviation 1."""
    rows = np.concatenate([np.arange(s.start, s.stop) for s in world.spans("train")])
    some = rows[:: max(1, len(rows) // 4_096)]
    scale.fit(table.look(some), torch.from_numpy(world.present[some]))


def draw_networks(
    config: Config, world: World, table: EmbeddingTable, seed: int, skill_dim: int = 0
) -> tuple[ExpertActor, ExpertCritic]:
    hidden, state = config.expert.hidden, config.state
    with global_draws(seed, "weights"):
        actor = ExpertActor(table.d_model, hidden, state, skill_dim)
        critic = ExpertCritic(table.d_model, hidden, state)
    fit_scale(actor.scale, world, table)
    critic.scale.load_state_dict(actor.scale.state_dict())
    return actor, critic


CoreT = TypeVar("CoreT", bound=OffPolicy)


class ExpertCore(Generic[CoreT]):
    """Networks of an expert that learns off-policy, its tables, and an adapter on their encoder."""

    def __init__(
        self,
        config: Config,
        world: World,
        encoder: Encoder,
        tables: Sequence[EmbeddingTable],
        algorithm: type[CoreT],
        seed: int,
        directory: Path | None,
        skill_dim: int = 0,
    ) -> None:
        """tables: of the encoder, which is not changed here, those of `world` first

        directory: where the table of an adapter's slow copy is kept; None: in memory
        """
        self.config = config
        self.tables = tables
        self.serving = frozen_copy(encoder)
        self.adapter: AdapterTraining | None = None
        if config.lora.enabled:
            self.adapter = AdapterTraining(config, world, encoder, seed, directory, tables[0])
        self.actor, critic = draw_networks(config, world, tables[0], seed, skill_dim)
        self.core = algorithm(self.actor, critic, config.train, config.expert, seed)
        self._moving = False

    @property
    def slow_table(self) -> EmbeddingTable:
        """Embeddings that targets are computed from."""
        return self.tables[0] if self.adapter is None else self.adapter.slow_table

    def embed(self, rows: NDArray[np.int32]) -> Tensor:
        """Embeddings[B,N,D] for an update, with the adapter's gradients where it is to move."""
        adapter, every = self.adapter, self.config.lora.every_updates
        self._moving = adapter is not None and self.core.updates % every == 0
        if adapter is not None and self._moving:
            return adapter.encode(rows)
        return self.tables[0].look(rows)

    def finish_update(self) -> bool:
        """Move the adapter after an update on what `embed` gave; whether tables are new now."""
        if self.adapter is None:
            return False
        if self._moving:
            self.adapter.step()
        if self.core.updates % self.config.lora.refresh_updates:
            return False
        self.adapter.serve(self.serving, self.tables[0])
        for table in self.tables[1:]:
            table.refresh(self.serving)
        return True

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        json_state: dict[str, Any] = {}
        core, json_state["core"] = self.core.state()
        tensors = with_prefix("core.", core)
        if self.adapter is not None:
            own, json_state["adapter"] = self.adapter.state()
            tensors |= with_prefix("adapter.", own)
            tensors |= with_prefix("serving.", self.serving.state_dict())
            json_state["table_version"] = self.tables[0].version
        return tensors, json_state

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.core.restore(below_prefix("core.", tensors), state["core"])
        if self.adapter is not None:
            self.serving.load_state_dict(below_prefix("serving.", tensors))
            for table in self.tables:
                table.refresh(self.serving)
            self.tables[0].version = int(state["table_version"])
            self.adapter.restore(below_prefix("adapter.", tensors), state["adapter"])

    def close(self) -> None:
        if self.adapter is not None:
            self.adapter.slow_table.close()
            for table in self.tables:
                table.close()


class AdapterTraining:
    """The encoder with an adapter that learns, a slow copy of it, and the table of the copy."""

    def __init__(
        self,
        config: Config,
        world: World,
        encoder: Encoder,
        seed: int,
        tables: Path | None,
        plain: EmbeddingTable,
    ) -> None:
        """plain: the table of the encoder as it is, which a fresh adapter does not change"""
        self.world, self.norm = world, 0.0
        self.clip, self.tau = config.train.grad_clip, config.expert.tau
        self.encoder = copy.deepcopy(encoder).eval()
        with global_draws(seed, "adapter"):
            adapt(self.encoder, config.lora, (_LEARNING, _TARGET))
        load_adapter_state(self.encoder, _TARGET, adapter_state(self.encoder, _LEARNING))
        self.parameters = list(adapter_parameters(self.encoder, _LEARNING).values())
        self.slow = list(adapter_parameters(self.encoder, _TARGET).values())
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.lora.lr)
        self.slow_serving = frozen_copy(encoder)
        self.slow_table = EmbeddingTable(world, encoder.d_model, table_file(tables, "target"))
        self.slow_table.share(plain)

    def encode(self, rows: NDArray[np.int32]) -> Tensor:
        """Embeddings[B,N,D] of rows[B], with the adapter's gradients, which begin at zero."""
        self.optimizer.zero_grad(set_to_none=True)
        return encode_rows(self.encoder, self.world, rows)

    def step(self) -> None:
        """Move the adapter along the gradient that the critics left in it; the copy follows."""
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.clip))
        metrics, advice = {"losses/adapter_gradient_norm": self.norm}, "lora.lr or train.lr_critic"
        refuse_divergence(metrics, "update of the adapter", advice, " of the adapter")
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.slow, self.parameters, strict=True):
                slow.lerp_(fast, self.tau)

    def serve(self, serving: Encoder, table: EmbeddingTable) -> None:
        """Compute both tables again from the adapters as they are."""
        serving.load_state_dict(merged_weights(self.encoder, _LEARNING))
        table.refresh(serving)
        self.slow_serving.load_state_dict(merged_weights(self.encoder, _TARGET))
        self.slow_table.refresh(self.slow_serving)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer, optimizer_state = flatten_optimizer(self.optimizer)
        tensors = with_prefix("optimizer.", optimizer)
        for name in (_LEARNING, _TARGET):
            tensors |= with_prefix(f"{name}.", adapter_state(self.encoder, name))
        tensors |= with_prefix("slow_serving.", self.slow_serving.state_dict())
        return tensors, {"optimizer": optimizer_state, "norm": self.norm}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        for name in (_LEARNING, _TARGET):
            load_adapter_state(self.encoder, name, below_prefix(f"{name}.", tensors))
        restore_optimizer(self.optimizer, below_prefix("optimizer.", tensors), state["optimizer"])
        self.norm = float(state["norm"])
        self.slow_serving.load_state_dict(below_prefix("slow_serving.", tensors))
        self.slow_table.refresh(self.slow_serving)


def table_file(directory: Path | None, name: str) -> Path | None:
    """Where a table of that name is kept; None: in memory."""
    return None if directory is None else directory / f"{name}.npy"


class WeightPolicy:
    """An expert: the middle of its actions, or a draw from them, as target weights.

    The actor of wide universes has no draws: it is the same however `eval.deterministic` is set.
    """

    kind: ActionKind = "weights"

    def __init__(
        self,
        encoder: Encoder,
        actor: ExpertActor | TopKActor,
        config: Config,
        seed: int,
        name: str = "agent",
        *,
        keep: bool = False,
        tables: Sequence[EmbeddingTable] = (),
    ) -> None:
        """seed: of the draws, where `eval.deterministic` is off

        keep: embeddings of a span for the next start on it, until `forget`
        tables: of worlds in which nothing needs to be encoded
        """
        self.name, self.encoder, self.actor = name, encoder, actor
        self._config, self._seed, self._keep, self._tables = config, seed, keep, tables
        # The world is held too, since its identity stands for it.
        self._kept: dict[tuple[int, range], tuple[World, Tensor]] = {}
        # Who does not see its book acts alike in all of them: a row is worked out once.
        state = config.state
        sees = state.include_pos or state.include_cash or isinstance(actor, TopKActor)
        self._blind = config.eval.deterministic and not sees
        self._table: EmbeddingTable | None = None
        self._z: Tensor | None = None
        self._actions: Floats32 | None = None

    def forget(self) -> None:
        """The encoder has changed: what was encoded with it no longer holds."""
        self._kept.clear()

    def start(self, world: World, span: range) -> None:
        """Encode every row of the span, once, where no table has it."""
        self.encoder.eval()
        self.actor.eval()
        self._first = span.start
        self._present = torch.from_numpy(np.array(world.present[span.start : span.stop]))
        self._generator = torch_generator(self._seed, "evaluation")
        self._table = next((table for table in self._tables if table.covers(world)), None)
        self._z = None
        if self._table is None:
            key = id(world), span
            kept = self._kept.get(key)
            self._z = encode_span(self.encoder, world, span) if kept is None else kept[1]
            if self._keep:
                self._kept[key] = world, self._z
        self._actions = self._act_everywhere(span) if self._blind else None

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Look the encodings of the rows up and ask the actor."""
        at = row - self._first
        if self._actions is not None:
            return weights_of_actions(self._actions[at], held)
        obs = expert_obs(self._look(row), self._present[torch.from_numpy(at)], held)
        if isinstance(self.actor, TopKActor):
            with torch.no_grad():
                return weights_of_targets(self.actor(obs).numpy(), held)
        return weights_of_actions(self._act(obs), held)

    def _look(self, row: Rows) -> Tensor:
        """Embeddings[E,N,D] of rows[E], from the span's own or from the table."""
        if self._table is not None:
            return self._table.look(row)
        assert self._z is not None, "`start` comes first"
        return self._z[torch.from_numpy(row - self._first)]

    def _act_everywhere(self, span: range) -> Floats32:
        """[T,N] actions at every row of the span, whatever the book; 0 where none can stand."""
        actions = np.zeros(self._present.shape, dtype=np.float32)
        rows = np.arange(span.start, span.stop)
        if self._table is not None:
            rows = rows[self._table.stands(rows)]
        for low in range(0, len(rows), _CHUNK):
            row = rows[low : low + _CHUNK]
            at = row - self._first
            present = self._present[at]
            nothing = torch.zeros(present.shape)
            obs = ExpertObs(self._look(row), nothing, nothing[:, 0], present, present)
            actions[at] = self._act(obs)
        return actions

    def _act(self, obs: ExpertObs) -> Floats32:
        assert isinstance(self.actor, ExpertActor), "the other gives weights at once"
        with torch.no_grad():
            mean, log_std = self.actor(obs)
            if not self._config.eval.deterministic:
                noise = torch.randn(mean.shape, generator=self._generator)
                mean = mean + noise * clip_log_std(log_std).exp()
            actions: Floats32 = torch.tanh(mean).numpy()
        return actions


def expert_obs(z: Tensor, present: Tensor, held: Holdings) -> ExpertObs:
    """What an expert sees of E books: z[E,N,D] and present[E,N] of their rows, and the books."""
    return ExpertObs(
        z,
        torch.from_numpy(held.weights),
        torch.from_numpy(held.cash_share),
        present,
        torch.from_numpy(free(held)),
    )


def replayed_obs(
    step: Transitions, z: Tensor, next_z: Tensor, present: Tensor
) -> tuple[ExpertObs, ExpertObs]:
    """(now, next): what an expert saw at B remembered steps, of all sequences one after another.

    z, next_z[B,N,D]: embeddings of the steps' rows and of those after; present[T,N]
    """
    rows = torch.from_numpy(step.row.reshape(-1)).long()

    def make_obs(z: Tensor, rows: Tensor, *book: NDArray[Any]) -> ExpertObs:
        weights, cash, free = (torch.from_numpy(part).reshape(len(rows), -1) for part in book)
        return ExpertObs(z, weights, cash[:, 0], present[rows], free)

    return (
        make_obs(z, rows, step.weights, step.cash, step.free),
        make_obs(next_z, rows + 1, step.next_weights, step.next_cash, step.next_free),
    )
