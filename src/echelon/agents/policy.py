"""The actor as a policy: what validation, backtest and reports run."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.agents.a2c import portfolio_inputs, sample
from echelon.config import Config
from echelon.envs.act import Holdings, Kind, Rows
from echelon.envs.world import World
from echelon.models import Acting, ActorCritic, Market
from echelon.rng import stream

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
