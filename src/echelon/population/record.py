"""What the hierarchy did over a run of one book: who was in charge, and what everybody's book made.

A policy that commands others leaves one behind after each run of a single book; reports and
attribution are made from it.

Axes: `S` bars traded, `K` experts; the expert of number K is cash.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.risk import RiskEvent
from echelon.types import Bools, Floats, Times


@dataclass(frozen=True)
class CommandRecord:
    """One run of the hierarchy with one book.

    experts[K]: names; times[S]: of the bars at whose close was decided
    in_charge[S]: expert whose orders were sent, K: cash; decided[S]: the router was asked
    allowed[S,K]: whom it might choose; target[S,K,N]: what every expert would hold
    own_values[S+1,K]: of the experts' own books, the first before the first bar
    own_costs[S,K]: what these paid for trading at the bar, as a share of their value
    events: of risk control
    """

    experts: tuple[str, ...]
    times: Times
    in_charge: NDArray[np.int64]
    decided: Bools
    allowed: Bools
    target: Floats
    own_values: Floats
    own_costs: Floats
    events: tuple[RiskEvent, ...]

    @property
    def own_returns(self) -> Floats:
        """[S,K] of the experts' own books."""
        return np.asarray(self.own_values[1:] / self.own_values[:-1] - 1.0)
