"""The seeds of a run as one policy.

Policies that set target weights: the mean of what they want. One that leaves an asset as it is
(NaN) wants its present weight; where all of them do, so does the ensemble. Policies that buy, sell
or hold: the action that is most probable by the mean of their probabilities.

Axes: `E` books, `N` assets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy, StatefulPolicy, lookback_of
from echelon.envs.act import Holdings
from echelon.envs.world import World
from echelon.errors import UsageError
from echelon.market import Rows
from echelon.states import State, below_prefix, with_prefix
from echelon.types import Floats

ENSEMBLE = "ensemble"


class DiscretePolicy(Policy, Protocol):
    def probabilities(self, row: Rows, held: Holdings) -> Floats:
        """[E,N,3] by `envs.Action`, 0 for what is not allowed; arguments as of `decide`."""


class EnsemblePolicy:
    def __init__(self, members: Sequence[Policy], name: str = ENSEMBLE) -> None:
        if not members:
            raise UsageError("an ensemble needs at least one policy, and there is none.")
        kinds = sorted({member.kind for member in members})
        if len(kinds) > 1:
            raise UsageError(
                f"an ensemble of policies that act by {' and by '.join(kinds)}: expected one way "
                "to act. Average those that set weights and those that buy and sell apart."
            )
        self.name, self.members, self.kind = name, tuple(members), members[0].kind

    @property
    def lookback(self) -> int:
        return max(map(lookback_of, self.members))

    def start(self, world: World, span: range) -> None:
        for member in self.members:
            member.start(world, span)

    def state(self) -> State:
        parts: State = {}
        for k, member in enumerate(self.members):
            if isinstance(member, StatefulPolicy):
                parts |= with_prefix(f"member.{k}.", member.state())
        return parts

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        for k, member in enumerate(self.members):
            if isinstance(member, StatefulPolicy):
                member.restore(below_prefix(f"member.{k}.", state))

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        """Ask all members about the same books; the mean of their answers."""
        if self.kind == "discrete":
            return np.asarray(self.probabilities(row, held).argmax(axis=-1), dtype=np.int8)
        targets = np.stack([member.decide(row, held) for member in self.members])
        unmoved = np.isnan(targets)
        mean = np.where(unmoved, held.weights, targets).mean(axis=0)
        return np.where(unmoved.all(axis=0), np.nan, mean)

    def probabilities(self, row: Rows, held: Holdings) -> Floats:
        """[E,N,3] mean of the members', where they buy, sell or hold."""
        members = cast(Sequence[DiscretePolicy], self.members)
        return np.asarray(np.mean([member.probabilities(row, held) for member in members], axis=0))
