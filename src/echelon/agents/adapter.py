"""An adapter on an expert's encoder, moved by the critics' gradient at a low frequency.

1. Now and then an update encodes its rows with gradients (`encode`), and what the critics leave in
   the adapter moves it (`step`). A slow copy follows, for targets.
2. Between such updates everybody looks embeddings up in tables; `serve` computes them anew.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.agents.tables import EmbeddingTable, encode_rows
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import TrainingError
from echelon.models import Encoder
from echelon.models.lora import (
    adapt,
    adapter_parameters,
    adapter_state,
    load_adapter_state,
    merged,
    use_adapter,
)
from echelon.rng import stream
from echelon.runs.checkpoint import (
    below_prefix,
    flatten_optimizer,
    restore_optimizer,
    with_prefix,
)

_MINE, _SLOW = "expert", "target"
"""Names of the adapter that learns and of the one that follows it."""


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
        self.world = world
        self.clip = config.train.grad_clip
        self.tau = config.expert.tau
        self.norm = 0.0
        self.encoder = copy.deepcopy(encoder).eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(seed, "adapter").integers(2**62)))
            adapt(self.encoder, config.lora, (_MINE, _SLOW))
        load_adapter_state(self.encoder, _SLOW, adapter_state(self.encoder, _MINE))
        self.parameters = adapter_parameters(self.encoder, _MINE)
        self.slow = adapter_parameters(self.encoder, _SLOW)
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.lora.lr)
        self.slow_serving = copy.deepcopy(encoder).requires_grad_(requires_grad=False).eval()
        self.slow_table = EmbeddingTable(world, encoder.d_model, table_file(tables, "target"))
        self.slow_table.share(plain)

    def encode(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
        """Embeddings[B,N,D] of rows[B], with the adapter's gradients, which begin at zero."""
        self.optimizer.zero_grad(set_to_none=True)
        return encode_rows(self.encoder, self.world, rows)

    def step(self) -> None:
        """Move the adapter along the gradient that the critics left in it; the copy follows."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.norm = float(norm)
        if not math.isfinite(self.norm):
            raise TrainingError(
                f"training diverged: the gradient of the adapter is {self.norm}. The adapter was "
                "not changed; the last checkpoint is good. Lower lora.lr or train.lr_critic."
            )
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.slow, self.parameters, strict=True):
                slow.lerp_(fast, self.tau)

    def serve(self, serving: Encoder, table: EmbeddingTable) -> None:
        """Compute both tables anew from the adapters as they are."""
        serving.load_state_dict(_plain(self.encoder, _MINE))
        table.refresh(serving)
        self.slow_serving.load_state_dict(_plain(self.encoder, _SLOW))
        self.slow_table.refresh(self.slow_serving)
        use_adapter(self.encoder, _MINE)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON)."""
        optimizer, json_state = flatten_optimizer(self.optimizer)
        tensors = with_prefix("optimizer.", optimizer)
        for name in (_MINE, _SLOW):
            tensors |= with_prefix(f"{name}.", adapter_state(self.encoder, name))
        return tensors | with_prefix("slow_serving.", self.slow_serving.state_dict()), {
            "optimizer": json_state,
            "norm": self.norm,
        }

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        for name in (_MINE, _SLOW):
            load_adapter_state(self.encoder, name, below_prefix(f"{name}.", tensors))
        restore_optimizer(self.optimizer, below_prefix("optimizer.", tensors), state["optimizer"])
        self.norm = float(state["norm"])
        self.slow_serving.load_state_dict(below_prefix("slow_serving.", tensors))
        self.slow_table.refresh(self.slow_serving)


def _plain(encoder: Encoder, name: str) -> dict[str, Tensor]:
    """Weights of the encoder without adapters that computes what this one does with `name`."""
    with merged(encoder, name):
        return {
            key.replace(".base_layer.", "."): value.clone()
            for key, value in encoder.state_dict().items()
            if ".lora_" not in key
        }


def table_file(directory: Path | None, name: str) -> Path | None:
    """Where a table of that name is kept; None: in memory."""
    return None if directory is None else directory / f"{name}.npy"
