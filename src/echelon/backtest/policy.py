"""The policy protocol: whatever decides what books do, from a rule of thumb to a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.errors import UsageError
from echelon.market import Rows
from echelon.states import State


class Policy(Protocol):
    """Decides for E books at once. What it reads of the world must not lie after a book's row."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def kind(self) -> ActionKind:
        """What `decide` gives: discrete actions or target weights."""

    def start(self, world: World, span: range) -> None:
        """Make ready to decide at the rows of `span`; called before each run."""

    def decide(self, row: Rows, held: Holdings) -> NDArray[Any]:
        """Actions[E,N] of books at `row`[E] that hold and may do `held`.

        By `envs.Action`, or target weights (NaN: leave the asset as it is).
        """


@runtime_checkable
class StatefulPolicy(Protocol):
    """A policy that can decide on a world that grows, stop between two bars, and go on later.

    After `start` and `restore` it decides as if it had never stopped, bit for bit.
    """

    @property
    def lookback(self) -> int:
        """Rows of the world before a book's own that `decide` reads; older ones may be let go."""

    def state(self) -> State:
        """All that its decisions depend on beside world and books, after the last decision."""

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave; called after `start`. StoreError: not of such a policy."""


def lookback_of(policy: Policy) -> int:
    """How many rows before the current one a policy reads; refuses one that does not say."""
    if not isinstance(policy, StatefulPolicy):
        raise UsageError(
            f"{policy.name!r} does not say how far it looks back, so it cannot decide on a world "
            "that lets old rows go. Give it lookback, state() and restore(), or export it."
        )
    return policy.lookback
