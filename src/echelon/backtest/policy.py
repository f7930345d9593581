"""The policy protocol: whatever decides what books do, from a rule of thumb to a network."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from echelon.envs.act import ActionKind, Holdings
from echelon.envs.world import World
from echelon.market import Rows


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
