"""Ridge regression from sums over cells: one pass over data that need not fit into memory.

`Moments` adds up what a least-squares fit and its loss are made of. `fit_ridge` takes the sums of
early rows, of the bars whose targets reach from these into later ones, and of late rows: the
strength is the best one on the late rows for weights of the early ones, then all rows are used.

Axes: `P` inputs, the last of them a one; `K` targets.
"""

from __future__ import annotations

import numpy as np

from echelon.types import Floats, Floats32

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Strengths of the ridge, in units of each feature's own variance."""


class Moments:
    """Sums over cells that a least-squares fit and its loss are made of."""

    def __init__(self, n_weights: int, n_targets: int) -> None:
        self.count = 0
        self.gram = np.zeros((n_weights, n_weights))
        self.cross = np.zeros((n_weights, n_targets))
        self.squares = np.zeros(n_targets)

    def add(self, flat: Floats32, y: Floats32) -> None:
        """Inputs[..,P] and targets[..,K] of some cells; only those with every target take part."""
        known = np.isfinite(y).all(axis=1)
        if not known.all():
            flat, y = flat[known], y[known]
        self.count += len(y)
        self.gram += flat.T @ flat
        self.cross += flat.T @ y
        self.squares += (y.astype(np.float64) ** 2).sum(axis=0)

    def plus(self, other: Moments) -> Moments:
        total = Moments(*self.cross.shape)
        for name, value in vars(self).items():
            setattr(total, name, value + getattr(other, name))
        return total

    def solve(self, strength: float) -> Floats:
        """Weights[P,K], shrunk by `strength` but for the bias."""
        penalty = strength * np.diag(self.gram).copy()
        penalty[-1] = 0.0
        # Features that never move have no weight, whatever it would be.
        penalty += 1e-9 * max(float(penalty.max()), 1.0)
        return np.asarray(np.linalg.solve(self.gram + np.diag(penalty), self.cross))

    def loss(self, weights: Floats) -> Floats:
        """[K] mean squared error that `weights` have on these cells."""
        fitted = (weights * (self.gram @ weights)).sum(axis=0)
        return np.asarray(
            (fitted - 2.0 * (weights * self.cross).sum(axis=0) + self.squares) / self.count
        )


def fit_ridge(early: Moments, between: Moments, late: Moments) -> Floats:
    """Weights[P,K], each target with its own strength."""
    whole = early.plus(between).plus(late)
    if late.count == 0 or early.count == 0:
        return whole.solve(STRENGTHS[-1])
    tried = np.stack([late.loss(early.solve(strength)) for strength in STRENGTHS])
    best = tried.argmin(axis=0)
    solved = {int(k): whole.solve(STRENGTHS[int(k)]) for k in set(best.tolist())}
    return np.stack([solved[int(k)][:, target] for target, k in enumerate(best)], axis=1)
