"""What learner and policy of the flat agent have in common: its inputs, and draws from it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from echelon.config import Config
from echelon.envs.act import Holdings

_TINY = torch.finfo(torch.float32).tiny


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from softmax(logits) over the last axis, by the Gumbel-max trick."""
    # Not `exponential_`, which takes three times as long. At 0 the noise would be infinite, and
    # with it an action chosen that is not allowed.
    chances = torch.rand(logits.shape, generator=generator).clamp_(min=_TINY)
    return (logits - chances.log_().neg_().log_()).argmax(-1)


def portfolio_inputs(held: Holdings, config: Config) -> Tensor:
    """[E,N,P]: weight of the holding and cash share, those of them the state includes."""
    state, shape = config.state, held.weights.shape
    inputs = np.empty((*shape, state.include_pos + state.include_cash), dtype=np.float32)
    if state.include_pos:
        inputs[..., 0] = held.weights
    if state.include_cash:
        inputs[..., -1] = held.cash_share[:, None]
    return torch.from_numpy(inputs)
