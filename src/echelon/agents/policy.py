"""Actors as policies: what validation, backtest and reports run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.agents.acting import portfolio_inputs, sample
from echelon.agents.tables import EmbeddingTable
from echelon.config import Config
from echelon.envs.act import Holdings, Kind, Rows, free, weights_of_actions
from echelon.envs.world import World
from echelon.models import (
    Acting,
    ActorCritic,
    Encoder,
    ExpertActor,
    ExpertObs,
    Market,
)
from echelon.ops.squashed import clip_log_std
from echelon.rng import stream
from echelon.types import Floats

_CHUNK = 512
"""Rows encoded at once: memory stays small however long the span is."""


class ActorPolicy:
    """The most probable action of every head, or a draw from it."""

    kind: Kind = "discrete"

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
        self._chance = torch.Generator().manual_seed(
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
        self._acting = Acting(self._net, Market(actor[:, None], None), present[:, None])

    def decide(self, row: Rows, held: Holdings) -> NDArray[np.int8]:
        """Look the encodings of the rows up and ask the actor."""
        at = torch.from_numpy(row - self._first)
        portfolio = portfolio_inputs(held, self._config)
        allowed = torch.from_numpy(held.allowed)
        logits = self._acting.logits(at, portfolio[:, None], allowed[:, None])[:, 0]
        if self._config.eval.deterministic:
            chosen = logits.argmax(-1)
        else:
            chosen = sample(logits, self._chance)
        return np.asarray(chosen.numpy().astype(np.int8))


class WeightPolicy:
    """An expert: the middle of its actions, or a draw from them, as target weights."""

    kind: Kind = "weights"

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

        keep: embeddings of a span are kept for the next start on it, until `forget`
        tables: of worlds in which nothing needs to be encoded
        """
        self.name = name
        self._encoder = encoder
        self._actor = actor
        self._config = config
        self._seed = seed
        self._keep = keep
        self._kept: dict[tuple[int, range], Tensor] = {}
        self._tables = tables
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
        self._chance = torch.Generator().manual_seed(
            int(stream(self._seed, "evaluation").integers(2**62))
        )
        self._table = next((table for table in self._tables if table.covers(world)), None)
        if self._table is not None:
            return
        known = self._kept.get((id(world), span))
        self._z = self._encoded(world, span) if known is None else known
        if self._keep:
            self._kept[id(world), span] = self._z

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
        at = torch.from_numpy(row - self._first)
        z = self._z[at] if self._table is None else self._table.look(row)
        obs = expert_obs(z, self._present[at], held)
        with torch.no_grad():
            mean, log_std = self._actor(obs)
            if not self._config.eval.deterministic:
                noise = torch.randn(mean.shape, generator=self._chance)
                mean = mean + noise * clip_log_std(log_std).exp()
            actions = torch.tanh(mean).numpy()
        return weights_of_actions(actions, held)


def expert_obs(z: Tensor, present: Tensor, held: Holdings) -> ExpertObs:
    """What an expert sees of E books: z[E,N,D] and present[E,N] of their rows, and the books."""
    return ExpertObs(
        z,
        torch.from_numpy(held.weights),
        torch.from_numpy(held.cash_share),
        present,
        torch.from_numpy(free(held)),
    )
