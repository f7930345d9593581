"""Experts for tests of the hierarchy: rules of which one can say beforehand what they do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows
from echelon.types import Floats


class Always:
    """The same target weights at every bar."""

    kind: ActionKind = "weights"

    def __init__(self, name: str, weights: Sequence[float]) -> None:
        self.name = name
        self._weights = np.array(weights)

    def start(self, world: World, span: range) -> None:
        """Nothing to prepare."""

    def decide(self, row: Rows, held: Holdings) -> Floats:
        return np.tile(self._weights, (len(row), 1))


class Tilted:
    """Softmax of the first feature; of rows outside the span it was started on it knows nothing."""

    kind: ActionKind = "weights"

    def __init__(self, name: str, tilt: float) -> None:
        self.name = name
        self._tilt = tilt

    def start(self, world: World, span: range) -> None:
        power = np.exp(self._tilt * world.x[..., 0].astype(np.float64))
        self._weights = np.full(power.shape, np.inf)
        inside = slice(span.start, span.stop)
        self._weights[inside] = (power / power.sum(axis=1, keepdims=True))[inside]

    def decide(self, row: Rows, held: Holdings) -> Floats:
        wanted = self._weights[row]
        assert np.isfinite(wanted).all(), "asked about a row it was not started on"
        return wanted


class Moving:
    """Halfway from what is held to all in the asset of the highest feature: books have a past."""

    kind: ActionKind = "weights"

    def __init__(self, name: str, sign: float = 1.0) -> None:
        self.name = name
        self._sign = sign

    def start(self, world: World, span: range) -> None:
        best = (self._sign * world.x[..., 0]).argmax(axis=1)
        self._goal = np.eye(world.n_assets)[best]

    def decide(self, row: Rows, held: Holdings) -> Floats:
        return 0.5 * held.weights.astype(np.float64) + 0.5 * self._goal[row]
