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

from echelon.backtest.policy import Policy
from echelon.envs.act import Holdings
from echelon.envs.world import World
from echelon.errors import UsageError
from echelon.market import Rows
from echelon.types import Floats

ENSEMBLE = "ensemble"


class DiscretePolicy(Policy, Protocol):
    """A policy that buys, sells or holds, and says how probable each action is."""

    def probabilities(self, row: Rows, held: Holdings) -> Floats:
        """[E,N,3] by `envs.Action`, 0 for what is not allowed; arguments as of `decide`."""


class EnsemblePolicy:
    """The mean of several policies that act in the same way."""

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

    def start(self, world: World, span: range) -> None:
        """Make every member ready."""
        for member in self.members:
            member.start(world, span)

    @property
    def lookback(self) -> int:
        """Rows before a book's own that are read; AttributeError where a member says nothing."""
        return max(int(cast(Any, member).lookback) for member in self.members)

    def state(self) -> dict[str, NDArray[Any]]:
        """What every member remembers, the names numbered by member."""
        states = [cast(Any, member).state() for member in self.members]
        return {f"{k}.{name}": part for k, own in enumerate(states) for name, part in own.items()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave."""
        for k, member in enumerate(self.members):
            head = f"{k}."
            own = {n.removeprefix(head): part for n, part in state.items() if n.startswith(head)}
            cast(Any, member).restore(own)

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
