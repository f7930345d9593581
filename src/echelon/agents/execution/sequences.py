"""Causal networks over sequences: what comes out at a place depends on it and on what is before it.

    gru, lstm    recurrent
    attention    one block of self-attention that sees no later place, with places told by sines

Each can run over a whole sequence, or place by place with a memory; both give the same numbers.

Axes: `B` sequences, `L` places, `I` inputs, `H` hidden units.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

SequenceKind = Literal["gru", "lstm", "attention"]
Memory = Any
"""What a sequence network carries from place to place; None at the beginning."""


class SequenceNet(nn.Module, ABC):
    """Inputs[B,L,I] → out[B,L,H]."""

    @abstractmethod
    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """[B,L,H] of x[B,L,I]; first[B,H]: what is known before the first place."""

    @abstractmethod
    def step(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """(out[B,H], memory) of one place x[B,I]."""


class Recurrent(SequenceNet):
    """A GRU or an LSTM, after a layer that mixes the inputs."""

    def __init__(self, kind: Literal["gru", "lstm"], n_inputs: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.inputs = nn.Linear(n_inputs, hidden)
        make = nn.GRU if kind == "gru" else nn.LSTM
        self.cells = make(hidden, hidden, batch_first=True)

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """See `SequenceNet`."""
        state: Memory = None
        if first is not None:
            h = first[None].contiguous()
            state = h if self.kind == "gru" else (h, torch.zeros_like(h))
        out: Tensor = self.cells(torch.relu(self.inputs(x)), state)[0]
        return out

    def step(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """See `SequenceNet`."""
        out, memory = self.cells(torch.relu(self.inputs(x))[:, None], memory)
        return out[:, 0], memory


class CausalAttention(SequenceNet):
    """One block: attention to this and earlier places, then a layer of its own for each place."""

    def __init__(self, n_inputs: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(n_inputs, hidden)
        self.before = nn.LayerNorm(hidden)
        self.to_heads = nn.Linear(hidden, 3 * hidden)
        self.mixed = nn.Linear(hidden, hidden)
        self.between = nn.LayerNorm(hidden)
        self.own = nn.Sequential(
            nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden)
        )

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """See `SequenceNet`; `first` is a place before the others."""
        h = self.inputs(x)
        h = h + _places(h.shape[1], h.shape[2])
        if first is None:
            return self._block(h)
        return self._block(torch.cat([first[:, None], h], dim=1))[:, 1:]

    def step(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """See `SequenceNet`; the memory is all inputs so far."""
        seen = x[:, None] if memory is None else torch.cat([memory, x[:, None]], dim=1)
        return self(seen)[:, -1], seen

    def _block(self, h: Tensor) -> Tensor:
        batch, length, hidden = h.shape
        parts = self.to_heads(self.before(h)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.mixed(seen.transpose(1, 2).reshape(batch, length, hidden))
        out: Tensor = h + self.own(self.between(h))
        return out


def sequence_net(kind: SequenceKind, n_inputs: int, hidden: int, heads: int) -> SequenceNet:
    """One of a kind."""
    if kind == "attention":
        return CausalAttention(n_inputs, hidden, heads)
    return Recurrent(kind, n_inputs, hidden)


def _places(length: int, hidden: int) -> Tensor:
    """[L,H] sines and cosines of the place (Vaswani et al., 2017)."""
    place = torch.arange(length, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    return torch.cat([torch.sin(place * rate), torch.cos(place * rate)], dim=1)[:, :hidden]
