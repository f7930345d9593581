"""The rules of trading, one small function each, and the numbers they take.

Every function is scalar and compiled; the kernel applies them per book and asset. A reader who
wants to know what an order costs or why it was cut need look nowhere else.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

SLIPPAGE_NONE, SLIPPAGE_FIXED, SLIPPAGE_LINEAR, SLIPPAGE_SQRT = 0, 1, 2, 3
"""In the order of the names (`config.market.SlippageModel`)."""


class Rules(NamedTuple):
    """Numbers of the rules, as the compiled kernel takes them."""

    commission: float  # share of the traded amount, per side
    min_commission: float  # in money, per order
    slippage_model: int  # one of the SLIPPAGE_ constants
    # Its coefficient, a share of the price: flat, at full participation, or there under the root.
    slippage: float
    participation: float  # an order takes at most this share of the volume; inf: no cap
    t_plus_one: bool
    price_limits: bool
    spend_proceeds: bool  # whether what a bar's sells bring can pay for the same bar's buys
    # Whether buys for money are served in the order of assets and skipped when the cash does not
    # suffice, instead of being scaled together.
    in_order: bool
    min_value: float  # least value of an order that does not close a position

    def scale_costs(self, factor: float) -> Rules:
        """The same with all that trading costs, but the market's stamp duty, times `factor`."""
        return self._replace(
            commission=self.commission * factor,
            min_commission=self.min_commission * factor,
            slippage=self.slippage * factor,
        )

    @property
    def charge_share(self) -> float:
        """What an order pays of its amount, of a size at which no least charge binds."""
        return self.commission


@njit(cache=True, inline="always", error_model="numpy")
def commission(amount: float, rules: Rules) -> float:
    """Commission on a traded amount."""
    return 0.0 if amount <= 0.0 else max(amount * rules.commission, rules.min_commission)


@njit(cache=True, inline="always", error_model="numpy")
def after_fee(money: float, rules: Rules) -> float:
    """What of `money` is left to buy for once the commission on it is paid; below 0: not enough."""
    return min(money / (1.0 + rules.commission), money - rules.min_commission)


@njit(cache=True, inline="always", error_model="numpy")
def slippage(quantity: float, volume: float, rules: Rules) -> float:
    """How far the price moves against an order, as a share of the price."""
    if rules.slippage_model == SLIPPAGE_NONE:
        return 0.0
    if rules.slippage_model == SLIPPAGE_FIXED:
        return rules.slippage
    share = min(quantity / volume, 1.0) if volume > 0.0 else 1.0
    if rules.slippage_model != SLIPPAGE_LINEAR:
        share = math.sqrt(share)
    # No volume known: nothing to take a share of.
    return rules.slippage * share if np.isfinite(volume) else 0.0


@njit(cache=True, inline="always", error_model="numpy")
def volume_cap(volume: float, rules: Rules) -> float:
    """The most shares one order may take."""
    if not np.isfinite(rules.participation):
        return np.inf
    return rules.participation * volume


@njit(cache=True, inline="always", error_model="numpy")
def whole_lots(quantity: float, lot: float, min_lot: float) -> float:
    """A buy rounded down to whole lots, 0 below the least; as it is where there are no lots."""
    if lot <= 0.0:
        return quantity
    rounded = math.floor(quantity / lot + 1e-9) * lot
    return rounded if rounded >= min_lot else 0.0


@njit(cache=True, inline="always", error_model="numpy")
def sellable_lots(quantity: float, held: float, lot: float) -> float:
    """A sell rounded down to whole lots; an odd lot goes only together with all the rest."""
    if lot <= 0.0 or quantity >= held:
        return min(quantity, held)
    return math.floor(quantity / lot + 1e-9) * lot
