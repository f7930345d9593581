"""What the kernel works on: books, the market's rows, orders and fills.

All are NamedTuples of arrays, so that compiled code takes them as they are. `E` books trade `N`
assets; money, prices and shares are float64.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.types import Bools, Floats

Codes = NDArray[np.int8]
Rows = NDArray[np.int64]
"""Which row of the market each book looks at, [E]."""


class Book(NamedTuple):
    cash: Floats  # [E]
    shares: Floats  # [E,N]
    locked: Floats  # [E,N] of them bought in the current session, which T+1 forbids to sell


class MarketRows(NamedTuple):
    """The market as the ledger sees it, row by row: `R` rows of N assets.

    A book looks at one row at a time, so a whole history serves books at different times, and a
    live bar is a history of one row. Close, share_step and dividend are finite everywhere, also
    where an asset is not held. Arrays are [R,N] where nothing else is said.
    """

    open: Floats  # prices on the ledger's basis
    close: Floats  # the last known one, 0 before the first
    tradable: Bools  # there is a bar with a trade in it
    gone: Bools  # delisted
    # Shares the participation cap is taken of; inf: no cap.
    volume_open: Floats  # for fills at the open: known before it, a trailing median
    volume_close: Floats  # for fills at the close: the bar's own
    limit_up: Floats  # limit prices; +inf and 0 where there are none
    limit_down: Floats
    share_step: Floats  # shares are multiplied by it before the row's open (splits, ex-rights)
    dividend: Floats  # cash per share held at the row before, paid before the row's open
    haircut: Floats  # [N] share of the last price that is lost when the asset is delisted
    lot: Floats  # [N] buys come in multiples of it; 0: fractions are fine
    min_lot: Floats  # [N] and are at least this
    new_session: Bools  # [R] the row opens a session, which unlocks T+1 shares
    stamp: Floats  # [R] stamp duty on sells


class Orders(NamedTuple):
    shares: Floats  # [E,N] to buy (positive) or sell (negative)
    spend: Floats  # [E,N] money to buy for, fees included, in place of shares; 0: none


class Reason(IntEnum):
    """Why an order was not filled, or not whole. The first that applies is given."""

    NONE = 0  # filled as ordered, or nothing was ordered
    SUSPENDED = 1  # no trade takes place in this asset at this bar
    DELISTED = 2  # the asset is gone
    LIMIT_UP = 3  # at its upper limit nobody sells
    LIMIT_DOWN = 4  # at its lower limit nobody buys
    NOT_HELD = 5  # there is less to sell than ordered: no shorting
    T_PLUS_ONE = 6  # what was bought today may not be sold today
    VOLUME = 7  # the order is larger than the allowed share of the volume
    CASH = 8  # there is not enough cash
    LOT = 9  # rounded down to whole lots
    TOO_SMALL = 10  # below the least value of an order, or worth less than its fees
    NOT_MEMBER = 11  # not in the universe at the decision, or without features


class Fills(NamedTuple):
    """What came of the orders, [E,N] each; costs are in money and ≥ 0."""

    shares: Floats  # bought (positive) or sold (negative)
    price: Floats  # paid or received per share, slippage included; 0 where nothing was filled
    commission: Floats
    stamp: Floats
    slippage: Floats  # inside the price
    reason: Codes  # `Reason` of what was not filled


class Stepped(NamedTuple):
    """The books one bar on, what was filled on the way, and value[E] at the new bar's close."""

    book: Book
    fills: Fills
    value: Floats
