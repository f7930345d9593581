"""What an action or a book tells of the skill behind it, as a reward.

Two estimates of mutual information, both a score per candidate skill turned into

    log e^{f_k} / Σ_j p_j e^{f_j},        k the expert's own skill, p its prior,

whose mean over samples is at most the true information, and equal to it for the best scores where
the candidates are all the skills there are (8 drawn from a Gaussian leave 0.43 nats of 0.51):

- `SkillCritic`, InfoNCE (van den Oord et al., 2018): I(a; z | s), scores of the K skills of the
  population at one state and action, the other experts' skills being the contrast;
- `SkillDiscriminator`, DIAYN (Eysenbach et al., 2019): log q(z|s) − log p(z), scores from a book.

The state of both is the *book*: every expert visits the same market and time. A bonus is divided by
log K and lies in [−1, 1]; it is paid to experts whose return is near the best only (`quality_gate`;
SMERL, Kumar et al., 2020), and next to an extrinsic reward divided by its own standard deviation.

Axes: `B` samples, `K` skills, `S` size of a state, `A` of an action, `Z` of a skill.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from echelon.types import Bools


def pointwise_information(scores: Tensor, own: Tensor, log_prior: Tensor | None = None) -> Tensor:
    """Information[B] log e^{f_own} − log Σ_j p_j e^{f_j}, in nats; at most −log p_own.

    scores[B,K]: of each candidate skill; own[B] int64: the one that acted
    log_prior[K] or [B,K]: log-probabilities of the candidates, None: even. For I(a; z | s) where
    skills are not spread evenly over states, log p(z|s) belongs here.
    """
    assert scores.dim() == 2, f"scores should be [B,K], are {tuple(scores.shape)}"
    assert own.shape == scores.shape[:1], "own is not [B]"
    n_skills = scores.shape[1]
    if log_prior is None:
        log_prior = scores.new_full((n_skills,), -math.log(n_skills))
    return scores.gather(1, own[:, None])[:, 0] - torch.logsumexp(scores + log_prior, dim=1)


def normalise_information(information: Tensor, n_skills: int) -> Tensor:
    """Information[B] in units of log K, within [−1, 1], without gradient: what β multiplies."""
    assert n_skills >= 2, "one skill has no information to give"
    return (information.detach() / math.log(n_skills)).clamp(-1.0, 1.0)


class SkillCritic(nn.Module):
    """Scores f(s, a, z) = g(s, a)·h(z) of state-action pairs against any set of skills.

    A product of two embeddings, so K skills cost K products and not K passes; with at least K
    dimensions it can represent every table of scores over K skills.
    """

    def __init__(self, state: int, action: int, skill: int, hidden: int = 64) -> None:
        super().__init__()
        self.pair = mlp(state + action, hidden, hidden)
        self.skill = mlp(skill, hidden, hidden)
        self._scale = 1.0 / math.sqrt(hidden)

    def forward(self, state: Tensor, action: Tensor, skills: Tensor) -> Tensor:
        """Scores[B,K] of state[B,S], action[B,A] for skills[K,Z] or, by sample, [B,K,Z]."""
        pair = self.pair(torch.cat([state, action], dim=-1)) * self._scale
        names = self.skill(skills)
        if skills.dim() == 2:
            return torch.matmul(pair, names.T)
        return torch.matmul(names, pair[:, :, None])[:, :, 0]


class SkillDiscriminator(nn.Module):
    """Logits of q(z | book) over K skills; the book is holdings and target weights, cash too."""

    def __init__(self, n_assets: int, n_skills: int, hidden: int = 64) -> None:
        super().__init__()
        self.net = mlp(2 * n_assets + 2, hidden, n_skills)

    @staticmethod
    def book(holdings: Tensor, targets: Tensor) -> Tensor:
        """[B,2N+2] of holdings[B,N] and target weights[B,N], shares of the book's value."""
        cash = [1.0 - weights.sum(dim=-1, keepdim=True) for weights in (holdings, targets)]
        return torch.cat([holdings, targets, *cash], dim=-1)

    def forward(self, book: Tensor) -> Tensor:
        """Logits[B,K] of what `book` gave, scaled or not."""
        logits: Tensor = self.net(book)
        return logits


def quality_gate(returns: NDArray[np.floating[Any]], margin: float) -> Bools:
    """Which of K experts earn a bonus: return[K] no more than `margin` below the best; no NaN."""
    r = np.asarray(returns, dtype=np.float64)
    assert r.ndim == 1, f"returns should be [K], are {r.shape}"
    # Of what is not finite nothing is near anything, and of none at all there is no best.
    quality = np.where(np.isfinite(r), r, -np.inf)
    near: Bools = np.isfinite(r) & (quality >= quality.max(initial=-np.inf) - margin)
    return near


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of one width."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def mutual_information(
    left: NDArray[np.integer[Any]], right: NDArray[np.integer[Any]]
) -> dict[str, float]:
    """Of two series of labels[n], each from 0 on, in bits: {"information", "of"}.

    information: Σ p(a,b) log₂ p(a,b)/(p(a)p(b)) of their joint frequencies; of: entropy of `right`,
    which is the most it can be. Few samples of many labels overstate it by (A−1)(B−1)/2n nats.
    """
    assert left.shape == right.shape, "the series are not of the same length"
    joint = np.zeros((int(left.max()) + 1, int(right.max()) + 1))
    np.add.at(joint, (left, right), 1.0)
    joint /= joint.sum()
    product = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    seen = joint > 0.0
    information = float((joint[seen] * np.log2(joint[seen] / product[seen])).sum())
    share = joint.sum(axis=0)
    known = share[share > 0.0]
    return {"information": information, "of": float(-(known * np.log2(known)).sum())}
