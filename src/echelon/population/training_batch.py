"""What a member learns from: a batch that was drawn, as its learner wants it.

Axes: `L` steps of a sequence, `B` sequences, `N` assets, `D` embedding, `T` rows of the world.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.agents.offpolicy import SequenceBatch
from echelon.agents.sac import Traced
from echelon.models import ExpertObs
from echelon.ops.traces import by_source
from echelon.population.shared_replay import SharedBatch
from echelon.types import Floats32


class Lesson(NamedTuple):
    """Sequences with all steps one after the other, [L·B,…]; they are not paid for yet."""

    drawn: SharedBatch
    obs: ExpertObs
    next_obs: ExpertObs
    raw: Tensor
    action: Tensor

    @staticmethod
    def of(drawn: SharedBatch, z: Tensor, z_next: Tensor, present: Tensor) -> Lesson:
        """z, z_next: embeddings[L·B,N,D] of the steps' rows and of those after; present[T,N]."""
        step = drawn.transitions
        rows = _flat(step.row).long()
        obs = ExpertObs(z, _flat(step.weights), _flat(step.cash), present[rows], _flat(step.free))
        next_obs = ExpertObs(
            z_next,
            _flat(step.next_weights),
            _flat(step.next_cash),
            present[rows + 1],
            _flat(step.next_free),
        )
        raw = _flat(step.raw)
        assert raw.shape == (len(rows), z.shape[1]), "actions are not [L·B,N]"
        return Lesson(drawn, obs, next_obs, raw, torch.tanh(raw))

    def stretches(self, reward: Tensor, gamma: float, weight: Floats32) -> SequenceBatch:
        """As SAC wants it; reward[L,B]; weight[T]: of each row in the losses."""
        step, who = self.drawn.transitions, self.drawn.behaviour
        return SequenceBatch(
            obs=self.obs,
            action=self.action,
            raw=self.raw,
            raw_log_prob=torch.from_numpy(step.raw_log_prob),
            reward=reward,
            discount=torch.where(torch.from_numpy(step.terminated), 0.0, gamma),
            truncated=torch.from_numpy(step.truncated),
            next_obs=self.next_obs,
            loss_weights=torch.from_numpy(weight[step.row]).view(reward.shape),
            shared=torch.from_numpy(self.drawn.shared),
            mean=_flat(who.mean),
            log_std=_flat(who.log_std),
        )


def told_of(traced: Traced, drawn: SharedBatch, n_members: int) -> dict[str, float]:
    """What an update told, with how far others were believed, by whose data it was."""
    source = by_source(torch.from_numpy(drawn.source), traced.trace, traced.dropped, n_members)
    found = dict(traced.metrics)
    found["sharing/trace"] = float(traced.trace.mean())
    found["sharing/dropped"] = float(traced.dropped.float().mean())
    for k in range(n_members):
        found[f"sharing/trace_from_{k}"] = _known(source.mean_trace[k])
        found[f"sharing/dropped_from_{k}"] = _known(source.dropped_share[k])
    return found


def _flat(values: NDArray[Any]) -> Tensor:
    """[L,B,…] -> [L·B,…]."""
    tail = values.shape[2:]
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1, *tail))


def _known(value: Tensor) -> float:
    """0 for what a batch holds nothing of."""
    return 0.0 if math.isnan(float(value)) else float(value)
