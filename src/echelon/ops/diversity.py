"""How different experts are, how evenly they are used, what a router is paid for either; scales.

Portfolios are compared as target weights, cash included, on probe states that all experts share:

- `mapd`: mean over states and pairs of half the L1 distance (0 the same portfolio, 1 disjoint);
- `population_volume`: the determinant of a kernel over whole behaviours (DvD, Parker-Holder et al.,
  2020). Two clones among five leave MAPD high and the volume at naught, so both are watched.

The router's bonus is one of two: `UsageWindow.bonus`, for the expert that was seldom chosen, and
`policy_kl`, for the one whose portfolio is unlike the population's. Both lie in [0, log K].
`RunningStd` is the scale of the extrinsic reward that a bonus is added to.

Axes: `K` experts, `S` probe states, `N` assets, `B` decisions. Weights are shares of the book's
value, none negative, their sum at most 1; the rest is cash, whether or not it has a column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.errors import StoreError, TrainingError
from echelon.types import Floats, Ints

_ROUNDING = 1e-4
_KL_RATE = 0.05
"""Step of λ, times how far the entropy's share of log K is from its floor."""


def with_cash(weights: NDArray[np.floating[Any]]) -> Floats:
    """Weights[...,N] in float64 with one more column, the cash that is left; sums to 1.

    A column of cash already among the N leaves 0 for the new one, which changes no distance.
    """
    w = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(w).all():
        raise TrainingError(
            "expected finite target weights, found NaN or infinity: leave out an expert that is "
            "in quarantine before its portfolio is compared with others'"
        )
    rest = 1.0 - w.sum(axis=-1, keepdims=True)
    assert w.min(initial=0.0) >= -_ROUNDING, f"weights should be ≥ 0, least is {w.min()}"
    assert rest.min(initial=0.0) >= -_ROUNDING, f"weights should sum to ≤ 1, found {1 - rest.min()}"
    return np.concatenate([w, np.maximum(rest, 0.0)], axis=-1)


def mapd(weights: NDArray[np.floating[Any]]) -> float:
    """Mean action pairwise distance of weights[K,S,N], in [0, 1]; K at least 2, S at least 1."""
    assert weights.ndim == 3, f"weights should be [K,S,N], are {weights.shape}"
    w = with_cash(weights)
    # An expert at a time: K² S N numbers at once would be too many.
    distance = np.stack([0.5 * np.abs(w - own).sum(axis=-1).mean(axis=-1) for own in w])
    return float(distance[np.triu_indices(len(distance), 1)].mean())


def population_volume(
    weights: NDArray[np.floating[Any]], length_scale: float = 0.5, jitter: float = 1e-6
) -> float:
    """Volume in (0, 1] that the behaviours of K experts span: about `jitter` with two clones.

    weights[K,S,N]; the kernel is exp(−d² / 2l²), d² the squared Euclidean distance of two
    portfolios, its mean over states
    jitter: added to the diagonal, which is then scaled back to 1: clones have a logarithm
    """
    assert weights.ndim == 3, f"weights should be [K,S,N], are {weights.shape}"
    w = with_cash(weights)
    squared = np.stack([np.square(w - expert).sum(axis=-1).mean(axis=-1) for expert in w])
    kernel = np.exp(-squared / (2.0 * length_scale**2))
    kernel = (kernel + jitter * np.eye(len(w))) / (1.0 + jitter)
    # The logarithm from the factor: the determinant of many experts would underflow.
    return math.exp(2.0 * float(np.log(np.diag(np.linalg.cholesky(kernel))).sum()))


def entropy(shares: Floats) -> float:
    """−Σ p log p in nats, of shares[K] that sum to 1; a share of 0 adds nothing."""
    p = np.asarray(shares, dtype=np.float64)
    assert abs(p.sum() - 1.0) < _ROUNDING, f"shares should sum to 1, sum to {p.sum()}"
    held = p[p > 0.0]
    return float(max(-(held * np.log(held)).sum(), 0.0))


class UsageWindow:
    """The router's last decisions among K experts. Read `bonus` of a decision, then `record` it."""

    def __init__(self, n_experts: int, length: int = 1000) -> None:
        self.n_experts, self.length = n_experts, length
        self._chosen: Ints = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def record(self, chosen: Ints) -> None:
        """Remember decisions[B], the oldest first."""
        new = np.asarray(chosen, dtype=np.int64)
        assert ((new >= 0) & (new < self.n_experts)).all(), f"no expert of that number: {new}"
        self._chosen = np.concatenate([self._chosen, new])[-self.length :]

    def shares(self) -> Floats:
        """Share[K] of each expert, each counted once more than it was chosen."""
        counts = np.bincount(self._chosen, minlength=self.n_experts)
        shares: Floats = (counts + 1.0) / (counts.sum() + self.n_experts)
        return shares

    def bonus(self, chosen: Ints) -> Floats:
        """−log of the share of the expert about to be chosen[B], clipped to [0, log K]."""
        return np.clip(-np.log(self.shares())[chosen], 0.0, math.log(self.n_experts))

    def entropy(self) -> float:
        return entropy(self.shares())

    def state(self) -> dict[str, Any]:
        return {"n_experts": self.n_experts, "length": self.length, "chosen": self._chosen.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; refuses that of another population."""
        shape = (state["n_experts"], state["length"])
        if shape != (self.n_experts, self.length):
            raise StoreError(
                f"expected usage of {self.n_experts} experts over {self.length} decisions, found "
                f"{shape[0]} over {shape[1]}: resume with the configuration of the run"
            )
        self._chosen = np.zeros(0, dtype=np.int64)
        self.record(np.asarray(state["chosen"], dtype=np.int64))


def policy_kl(
    weights: NDArray[np.floating[Any]],
    rng: np.random.Generator,
    *,
    sigma: float = 0.05,
    samples: int = 64,
) -> Floats:
    """KL(π_k ‖ mean_j π_j)[K,B] at the states of weights[K,B,N], clipped to [0, log K].

    π_k is the normal distribution of width `sigma` around expert k's target weights, cash
    included. The divergence of one part from a mixture has no closed form, hence the draws:
    x = w_k + σε, with the same ε for every expert and state. With d = w_k − w_j,

        log π_j(x) / π_k(x) = −(d·ε / σ + |d|² / 2σ²),

    so nothing overflows, and as the sum over j holds a 1 for j = k no draw exceeds log K.
    """
    assert weights.ndim == 3, f"weights should be [K,B,N], are {weights.shape}"
    w = with_cash(weights)
    n_experts = len(w)
    noise = rng.standard_normal((samples, w.shape[-1]))
    out = np.empty(w.shape[:2])
    for k in range(n_experts):
        gap = (w[k] - w) / sigma  # [K,B,N+1]
        log_ratio = -(gap @ noise.T + 0.5 * np.square(gap).sum(axis=-1)[..., None])  # [K,B,samples]
        top = log_ratio.max(axis=0)
        log_mean = top + np.log(np.exp(log_ratio - top).mean(axis=0))
        out[k] = -log_mean.mean(axis=-1)
    return np.clip(out, 0.0, math.log(n_experts))


def next_kl_weight(
    weight: float, usage_entropy: float, n_experts: int, *, floor: float, most: float
) -> float:
    """λ of the KL bonus after one look at the usage, in [0, most].

    A step of dual ascent: up while the entropy of usage, in nats, is below the share `floor` of
    log K, otherwise down to nothing. With a single expert there is nothing to spread: λ is 0.
    """
    if n_experts < 2:
        return 0.0
    share = usage_entropy / math.log(n_experts)
    return min(max(weight + _KL_RATE * (floor - share), 0.0), most)


class RunningStd:
    """Standard deviation of all values so far, by which rewards are divided.

    Counts, means and sums of squares of batches are merged (Welford, 1962; Chan et al., 1983): no
    difference of large sums, and no value is kept. The mean stays in: a reward's sign is its own.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def update(self, values: NDArray[np.floating[Any]]) -> None:
        """Count in values of any shape."""
        x = np.asarray(values, dtype=np.float64).ravel()
        if x.size == 0:
            return
        if not np.isfinite(x).all():
            raise TrainingError(
                "expected finite rewards, found NaN or infinity: one of them would spoil the "
                "scale of all that follow; find the expert that earned it and put it in quarantine"
            )
        mean = float(x.mean())
        gap, total = mean - self.mean, self.count + x.size
        self._squares += float(np.square(x - mean).sum()) + gap * gap * self.count * x.size / total
        self.mean += gap * x.size / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation (divisor n); 1 while the values do not differ, or there are none."""
        if self.count < 2:
            return 1.0
        spread = math.sqrt(self._squares / self.count)
        # What rounding alone makes of equal values is no scale.
        return spread if spread > 1e-12 + 1e-9 * abs(self.mean) else 1.0

    def scale(self, values: NDArray[np.floating[Any]]) -> Floats:
        return np.asarray(values, dtype=np.float64) / self.std

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`, bit by bit."""
        self.count, self.mean = int(state["count"]), float(state["mean"])
        self._squares = float(state["squares"])
