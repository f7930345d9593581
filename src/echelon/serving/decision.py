"""What a decision is: orders under the market's rules, and why other symbols have none.

The kernel cuts an order when it meets the bar it is filled at. Whoever sends orders to a broker
needs them before that, so they are tried out on the close of the decision (`try_orders`): lots,
least values and cash as the kernel has them. What only the next bar knows (its price limits, its
halts) is left to whoever fills.

Axes: `N` assets; everything here is of one book.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.envs.act import Action, ActionKind
from echelon.envs.books import Books
from echelon.market import Fills, MarketRows, Orders, Reason
from echelon.market.kernel import trade
from echelon.market.rules import SLIPPAGE_FIXED, SLIPPAGE_NONE, Rules
from echelon.population.policy import Command
from echelon.types import Bools, Floats

NO_CHANGE = "no_change"
NO_FEATURES = "no_features"
RISK = "risk"
TURNOVER = "turnover_limit"
_CODES = {int(reason): reason.name.lower() for reason in Reason if reason is not Reason.NONE}
WHY = (NO_CHANGE, NO_FEATURES, RISK, TURNOVER, *_CODES.values())
"""Codes of why a symbol has no order, those of the kernel (`market.Reason`) among them; what they
mean is in the catalogues of texts."""


class Order(NamedTuple):
    """An order to send: shares > 0, whole lots where the market has such; price: the close."""

    symbol: str
    side: Literal["buy", "sell"]
    shares: float
    price: float


class Fill(NamedTuple):
    """What came of an order of the decision before, in a simulated account."""

    symbol: str
    shares: float  # bought (positive) or sold
    price: float
    cost: float  # commission, stamp duty and slippage
    not_filled: str | None


class InCharge(NamedTuple):
    """Of a hierarchy: who is in charge, and what the router and risk control said."""

    expert: str
    decided_now: bool
    probabilities: Mapping[str, float] | None
    masked: list[str]
    position_scale: float
    halted: bool
    turnover_limited: bool


@dataclass(frozen=True)
class Decision:
    """What to do at the close of a bar; arrays[N] are in the order of `symbols`."""

    time: np.datetime64
    symbols: tuple[str, ...]
    kind: ActionKind
    action: NDArray[Any]  # target weights (NaN: leave as it is), or `Action`
    weights: Floats  # held at this close
    wanted: Orders  # [1,N] before lots and cash, as the kernel will get them
    orders: tuple[Order, ...]
    why: Mapping[str, str]  # symbol without an order → code of `WHY`
    equity: float
    cash: float
    shares: Floats
    fills: tuple[Fill, ...]
    in_charge: InCharge | None
    exposure_cap: float | None = None  # share of the policy's wish that may be held

    def to_dict(self) -> dict[str, Any]:
        target: dict[str, Any]
        if self.kind == "discrete":
            codes = zip(self.symbols, self.action.tolist(), strict=True)
            target = {symbol: Action(code).name.lower() for symbol, code in codes}
        else:
            values = zip(self.symbols, self.action.tolist(), strict=True)
            target = {symbol: None if value != value else value for symbol, value in values}
        holding = zip(self.symbols, self.shares.tolist(), strict=True)
        return {
            "time": str(self.time),
            "kind": self.kind,
            "target": target,
            "orders": [order._asdict() for order in self.orders],
            "why": dict(self.why),
            "account": {
                "equity": self.equity,
                "cash": self.cash,
                "positions": {symbol: held for symbol, held in holding if held != 0.0},
            },
            "fills": [fill._asdict() for fill in self.fills],
            "in_charge": None if self.in_charge is None else self.in_charge._asdict(),
            **({} if self.exposure_cap is None else {"exposure_cap": self.exposure_cap}),
        }


def depends_on_volume(rules: Rules) -> bool:
    """Whether fills are cut, or their prices moved, by what is traded of an asset."""
    by_share = rules.slippage_model not in (SLIPPAGE_NONE, SLIPPAGE_FIXED)
    return by_share or bool(np.isfinite(rules.participation))


def try_orders(books: Books, orders: Orders, volume: Floats, *, new_session: bool) -> Fills:
    """What the kernel would fill of `orders`[1,N] at the close of the book's row.

    volume: [N] what the volume cap is taken of, infinite where nothing is; new_session: the next
    bar opens one, so that T+1 does not bind
    """
    world, row = books.world, books.row
    if not world.fill_open:
        return trade(books.book, orders, world.rows, row, books.rules, at_open=False)[1]
    rows, book = world.rows, books.book
    now: dict[str, Any] = {name: getattr(rows, name)[row] for name in _BY_ROW}
    nothing = np.zeros_like(now["close"])
    next_bar = MarketRows(
        open=now["close"],
        **now,
        volume_open=volume[None],
        volume_close=volume[None],
        limit_up=np.full_like(nothing, np.inf),
        limit_down=nothing,
        share_step=np.ones_like(nothing),
        dividend=nothing,
        haircut=rows.haircut,
        lot=rows.lot,
        min_lot=rows.min_lot,
        new_session=np.array([new_session]),
    )
    if new_session:
        book = book._replace(locked=np.zeros_like(book.locked))
    at = np.zeros(1, dtype=np.int64)
    return trade(book, orders, next_bar, at, books.rules, at_open=True)[1]


_BY_ROW = ("close", "tradable", "gone", "stamp")


def list_orders(symbols: Sequence[str], tried: Fills, close: Floats) -> tuple[Order, ...]:
    """The orders to send, of what the kernel would fill; close[N]."""
    return tuple(
        Order(symbol, "buy" if shares > 0 else "sell", abs(shares), price)
        for symbol, shares, price in zip(
            symbols, tried.shares[0].tolist(), close.tolist(), strict=True
        )
        if shares != 0.0
    )


def explain(
    books: Books,
    wanted: Orders,
    tried: Fills,
    refused: Bools | None,
    command: Command | None,
) -> dict[str, str]:
    """Symbol → why it has no order (`WHY`), for all that have none."""
    world, row = books.world, int(books.row[0])
    asked = (wanted.shares[0] != 0.0) | (wanted.spend[0] > 0.0)
    if refused is not None:
        asked |= refused[0]
    limited = command is not None and command.turnover_limited
    held_back = command is not None and (command.halted or command.scale < 1.0)
    why = {}
    for n in np.flatnonzero(tried.shares[0] == 0.0).tolist():
        symbol, reason = world.symbols[n], int(tried.reason[0, n])
        if refused is not None and refused[0, n]:
            reason = Reason.NOT_MEMBER
        if asked[n] and reason != Reason.NONE:
            why[symbol] = _CODES[reason]
        elif world.rows.gone[row, n]:
            why[symbol] = _CODES[Reason.DELISTED]
        elif not world.present[row, n]:
            why[symbol] = NO_FEATURES
        elif not world.rows.tradable[row, n]:
            why[symbol] = _CODES[Reason.SUSPENDED]
        elif limited:
            why[symbol] = TURNOVER
        elif held_back:
            why[symbol] = RISK
        else:
            why[symbol] = NO_CHANGE
    return why


def list_fills(symbols: Sequence[str], fills: Fills) -> tuple[Fill, ...]:
    """The fills and refusals of the orders before."""
    cost = fills.commission + fills.stamp + fills.slippage
    grids = (fills.shares, fills.price, cost, fills.reason)
    rows = zip(symbols, *(grid[0].tolist() for grid in grids), strict=True)
    return tuple(
        Fill(symbol, shares, price, paid, _CODES.get(reason))
        for symbol, shares, price, paid, reason in rows
        if shares != 0.0 or reason != Reason.NONE
    )


def name_command(command: Command, experts: Sequence[str]) -> InCharge:
    """A hierarchy's command with its experts by name; cash comes last."""
    names = (*experts, "cash")
    odds = command.probabilities
    return InCharge(
        expert=names[command.in_charge],
        decided_now=command.decided,
        probabilities=None if odds is None else dict(zip(names, odds.tolist(), strict=True)),
        masked=[n for n, may in zip(names, command.allowed.tolist(), strict=True) if not may],
        position_scale=command.scale,
        halted=command.halted,
        turnover_limited=command.turnover_limited,
    )
