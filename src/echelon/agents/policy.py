"""Actors as policies: what validation, backtest and reports run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.agents.acting import portfolio_inputs, sample
from echelon.agents.tables import EmbeddingTable
from echelon.config import Config
from echelon.envs.act import ActionKind, Holdings, free, weights_of_actions
from echelon.envs.world import World
from echelon.market import Rows
from echelon.models import (
    Acting,
    ActorCritic,
    Encoder,
    ExpertActor,
    ExpertObs,
    MarketTensors,
)
from echelon.ops.squashed import clip_log_std
from echelon.rng import stream
from echelon.types import Floats, Floats32

_CHUNK = 512
"""Rows encoded at once: memory stays small however long the span is."""


class ActorPolicy:
    """The most probable action of every head, or a draw from it."""

    kind: ActionKind = "discrete"

    def __init__(self, net: ActorCritic, config: Config, seed: int, name: str = "agent") -> None:
        """seed: of the draws, where `eval.deterministic` is off."""
        self.name = name
        self._net = net
        self._config = config
        self._seed = seed

    def start(self, world: World, span: range) -> None:
        """Encode every row of the span, once."""
        self._net.eval()
        self._first = span.start
        present = torch.from_numpy(np.array(world.present[span.start : span.stop]))
        self._generator = torch.Generator().manual_seed(
            int(stream(self._seed, "evaluation").integers(2**62))
        )
        parts: list[Tensor] = []
        with torch.no_grad():
            for low in range(span.start, span.stop, _CHUNK):
                high = min(low + _CHUNK, span.stop)
                x = np.array(world.x[low - world.window + 1 : high])
                parts.append(self._net.encode(torch.from_numpy(x)).actor)
        actor = torch.cat(parts)
        # An axis for the one book that looks at each row asked about.
        self._acting = Acting(self._net, MarketTensors(actor[:, None], None), present[:, None])

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        """Look the encodings of the rows up and ask the actor."""
        at = torch.from_numpy(row - self._first)
        portfolio = portfolio_inputs(held, self._config)
        allowed = torch.from_numpy(held.allowed)
        logits = self._acting.logits(at, portfolio[:, None], allowed[:, None])[:, 0]
        if self._config.eval.deterministic:
            chosen = logits.argmax(-1)
        else:
            chosen = sample(logits, self._generator)
        return np.asarray(chosen.numpy().astype(np.int8))


class _Known(NamedTuple):
    """What was worked out for a span of `world`.

    z[T,N,D]: embeddings, None: a table has them
    actions[T,N]: of a policy that does not see its book, otherwise None
    """

    world: World
    z: Tensor | None
    actions: Floats32 | None


class WeightPolicy:
    """An expert: the middle of its actions, or a draw from them, as target weights."""

    kind: ActionKind = "weights"

    def __init__(
        self,
        encoder: Encoder,
        actor: ExpertActor,
        config: Config,
        seed: int,
        name: str = "agent",
        *,
        keep: bool = False,
        tables: Sequence[EmbeddingTable] = (),
    ) -> None:
        """seed: of the draws, where `eval.deterministic` is off.

        keep: what was worked out for a span is kept for the next start on it, until `forget`;
        for networks that no longer change
        tables: of worlds in which nothing needs to be encoded
        """
        self.name = name
        self._encoder = encoder
        self._actor = actor
        self._config = config
        self._seed = seed
        self._keep = keep
        self._kept: dict[tuple[int, range], _Known] = {}
        self._tables = tables
        # Who does not see its book acts alike in all of them: a row is worked out once.
        state = config.state
        self._blind = config.eval.deterministic and not (state.include_pos or state.include_cash)
        self._known: _Known | None = None
        self._table: EmbeddingTable | None = None

    def forget(self) -> None:
        """The encoder has changed: what was encoded with it no longer holds."""
        self._kept.clear()

    def start(self, world: World, span: range) -> None:
        """Encode every row of the span, once, where no table has it."""
        self._encoder.eval()
        self._actor.eval()
        self._first = span.start
        self._present = torch.from_numpy(np.array(world.present[span.start : span.stop]))
        self._generator = torch.Generator().manual_seed(
            int(stream(self._seed, "evaluation").integers(2**62))
        )
        self._table = next((table for table in self._tables if table.covers(world)), None)
        self._known = self._kept.get((id(world), span))
        if self._known is None:
            z = self._encoded(world, span) if self._table is None else None
            actions = self._acted(z, span) if self._blind else None
            self._known = _Known(world, z, actions)
        if self._keep:
            self._kept[id(world), span] = self._known

    def _encoded(self, world: World, span: range) -> Tensor:
        parts = []
        with torch.no_grad():
            for low in range(span.start, span.stop, _CHUNK):
                high = min(low + _CHUNK, span.stop)
                x = np.array(world.x[low - world.window + 1 : high])
                parts.append(self._encoder(torch.from_numpy(x)))
        return torch.cat(parts)

    def decide(self, row: Rows, held: Holdings) -> Floats:
        """Look the encodings of the rows up and ask the actor."""
        assert self._known is not None, "`start` comes first"
        at = row - self._first
        if self._known.actions is not None:
            return weights_of_actions(self._known.actions[at], held)
        z = self._looked_up(row, self._known.z)
        obs = expert_obs(z, self._present[torch.from_numpy(at)], held)
        return weights_of_actions(self._asked(obs), held)

    def _looked_up(self, row: Rows, z: Tensor | None) -> Tensor:
        """Embeddings[E,N,D] of rows[E], from the span's own or from the table."""
        if z is not None:
            return z[torch.from_numpy(row - self._first)]
        assert self._table is not None, "a span without embeddings has a table"
        return self._table.look(row)

    def _acted(self, z: Tensor | None, span: range) -> Floats32:
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
            looked = self._looked_up(row, z)
            actions[at] = self._asked(ExpertObs(looked, nothing, nothing[:, 0], present, present))
        return actions

    def _asked(self, obs: ExpertObs) -> Floats32:
        """[E,N] actions."""
        with torch.no_grad():
            mean, log_std = self._actor(obs)
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
