"""What trading cost, and what for: spread, impact, timing, fees.

The cost of a fill is measured against the arrival price, the last one known as the order began:

    shortfall = side·shares·(price − arrival) + fees
              = spread + impact + timing + fees

timing is what the market did between arrival and the fill; it is as often a gain as a cost, unless
orders follow the market or an executor is clever. Against TWAP and VWAP of the order's own time the
market's move is in both prices, so what remains is the executor's doing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from echelon.market.executor import Execution
from echelon.market.types import Fills
from echelon.types import Floats

_BASIS_POINTS = 1e4


class CostSplit(NamedTuple):
    """Costs in money, of all fills together; a gain is negative.

    total: spread + impact + timing + fees, which is the shortfall against arrival
    arrived: value of the fills at their arrival prices, which basis points are of
    against_twap, against_vwap: what was paid over those prices, fees left out; of fills that have
        them
    benchmarked: value at arrival of the fills whose twap and vwap are known
    fills, at_once: how many, and how many of them no executor worked
    cut: value at arrival of what was executed but could not be kept
    """

    spread: float
    impact: float
    timing: float
    fees: float
    total: float
    arrived: float
    against_twap: float
    against_vwap: float
    benchmarked: float
    fills: int
    at_once: int
    cut: float

    def in_basis_points(self) -> dict[str, float]:
        """Every cost over the value it is of; NaN where nothing was filled."""
        all_, some = self.arrived or np.nan, self.benchmarked or np.nan
        parts = {name: getattr(self, name) / all_ for name in CostSplit._fields[:5]}
        parts |= {name: getattr(self, name) / some for name in ("against_twap", "against_vwap")}
        return {name: float(value * _BASIS_POINTS) for name, value in parts.items()}


def cost_split(fills: Fills, execution: Execution | None = None) -> CostSplit:
    """Split the costs of fills, of any shape.

    execution: None: filled at once, of which only the slippage is known; it counts as impact
    """
    filled = fills.shares != 0.0
    shares, price = fills.shares[filled], fills.price[filled]
    fees = float((fills.commission + fills.stamp)[filled].sum())
    n_fills = int(filled.sum())
    if execution is None:
        impact = float(fills.slippage[filled].sum())
        quoted = np.abs(shares) * price - np.sign(shares) * fills.slippage[filled]
        arrived = float(quoted.sum())
        return CostSplit(
            0.0, impact, 0.0, fees, impact + fees, arrived, 0.0, 0.0, 0.0, n_fills, n_fills, 0.0
        )
    arrival = execution.arrival[filled]
    spread, impact, timing = (
        float(part[filled].sum()) for part in (execution.spread, execution.impact, execution.timing)
    )
    known = np.isfinite(execution.twap[filled]) & np.isfinite(execution.vwap[filled])
    value = np.abs(shares) * arrival

    def against(base: Floats) -> float:
        return float((shares * (price - base[filled]))[known].sum())

    return CostSplit(
        spread=spread,
        impact=impact,
        timing=timing,
        fees=fees,
        total=spread + impact + timing + fees,
        arrived=float(value.sum()),
        against_twap=against(execution.twap),
        against_vwap=against(execution.vwap),
        benchmarked=float(value[known].sum()),
        fills=n_fills,
        at_once=n_fills - int(execution.worked[filled].sum()),
        cut=float(np.nansum(execution.cut * execution.arrival)),
    )
