"""The market kernel: what happens to books when orders meet a bar.

Pure functions over a batch of E books; training, backtest and live use them unchanged.

    settle(book, market, row)            what happens by itself before a bar: splits, dividends,
                                         delistings, the end of T+1
    trade(book, orders, market, row, …)  orders filled at the bar's open or close
    mark(book, market, row)              what the books are worth at the bar's close
    step(book, orders, market, row, …)   the three in the order of the clock: one bar further

`trade`, per book:

1. Sells, each cut by what may be sold (held, T+1), tradable, limit-down, the volume cap, lots and
   the least value; their proceeds less fees are added to the cash (spendable now or only later,
   as the rules say).
2. Buys, each cut by tradable, limit-up and the volume cap.
3. Buys together against the cash, fees included: scaled by one factor so that they fit, then
   floored to lots (what is left stays cash); or, for the 20/50 rule, in the order of assets,
   each whole or skipped.

The result does not depend on the order of assets, except under `in_order`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from echelon.market.rules import (
    Rules,
    commission,
    sellable_lots,
    slippage,
    volume_cap,
    whole_lots,
)
from echelon.market.types import Book, Fills, MarketRows, Orders, Reason, Rows, Stepped
from echelon.types import Floats

_NONE = int(Reason.NONE)
_SUSPENDED = int(Reason.SUSPENDED)
_DELISTED = int(Reason.DELISTED)
_LIMIT_UP = int(Reason.LIMIT_UP)
_LIMIT_DOWN = int(Reason.LIMIT_DOWN)
_NOT_HELD = int(Reason.NOT_HELD)
_T_PLUS_ONE = int(Reason.T_PLUS_ONE)
_VOLUME = int(Reason.VOLUME)
_CASH = int(Reason.CASH)
_LOT = int(Reason.LOT)
_TOO_SMALL = int(Reason.TOO_SMALL)

# Buys may cost this much more than the cash by rounding; what is then below zero is set to zero.
_SLACK = 1e-9
_SCALINGS = 8


def new_book(cash: float | Floats, n_books: int, n_assets: int) -> Book:
    """E books that hold `cash` and nothing else."""
    money = np.broadcast_to(np.asarray(cash, dtype=np.float64), (n_books,)).copy()
    return Book(money, np.zeros((n_books, n_assets)), np.zeros((n_books, n_assets)))


def settle(book: Book, market: MarketRows, row: Rows) -> Book:
    """The books after what happens by itself before the bar `row`[E] opens.

    Dividends are paid on the shares held, splits multiply them, a delisted holding becomes cash
    at the last price less the haircut, and a new session unlocks what T+1 held back.
    """
    _check(book, market, row)
    cash, shares, locked = book.cash.copy(), book.shares.copy(), book.locked.copy()
    _settle(cash, shares, locked, market, row)
    return Book(cash, shares, locked)


def trade(
    book: Book, orders: Orders, market: MarketRows, row: Rows, rules: Rules, *, at_open: bool
) -> tuple[Book, Fills]:
    """Fill `orders` at the open (or the close) of the bar `row`[E]."""
    _check(book, market, row)
    assert orders.shares.shape == orders.spend.shape == book.shares.shape, "orders are not [E,N]"
    cash, shares, locked = book.cash.copy(), book.shares.copy(), book.locked.copy()
    shape = book.shares.shape
    filled, price, fee, stamp, slip = np.zeros((5, *shape))
    reason = np.zeros(shape, dtype=np.int8)
    fills = Fills(filled, price, fee, stamp, slip, reason)
    _trade(cash, shares, locked, orders, market, row, rules, at_open, fills)
    return Book(cash, shares, locked), fills


def mark(book: Book, market: MarketRows, row: Rows) -> Floats:
    """Value[E] of the books at the close of the bar `row`[E], at the last known prices."""
    _check(book, market, row)
    return _mark(book.cash, book.shares, market.close, row)


def step(
    book: Book, orders: Orders, market: MarketRows, row: Rows, rules: Rules, *, fill_open: bool
) -> Stepped:
    """Take the books from the close of the bar `row`[E], where orders were decided, to the next.

    Filled at the next open: settle(row+1), trade at the open of row+1, mark at the close of row+1.
    Filled at the same close: trade at the close of row, settle(row+1), mark at the close of row+1.
    """
    after = row + 1
    if fill_open:
        traded, fills = trade(
            settle(book, market, after), orders, market, after, rules, at_open=True
        )
    else:
        traded, fills = trade(book, orders, market, row, rules, at_open=False)
        traded = settle(traded, market, after)
    return Stepped(traded, fills, mark(traded, market, after))


def _check(book: Book, market: MarketRows, row: Rows) -> None:
    n_books, n_assets = book.shares.shape
    assert book.cash.shape == (n_books,), "cash is not [E]"
    assert book.locked.shape == book.shares.shape, "locked is not [E,N]"
    assert market.close.shape[1] == n_assets, "the market has another number of assets"
    assert row.shape == (n_books,), "row is not [E]"


@njit(cache=True)
def _settle(cash: Floats, shares: Floats, locked: Floats, market: MarketRows, row: Rows) -> None:
    for e in range(len(cash)):
        r = row[e]
        unlock = market.new_session[r]
        for n in range(shares.shape[1]):
            if unlock:
                locked[e, n] = 0.0
            held = shares[e, n]
            if held == 0.0:
                continue
            if market.gone[r, n]:
                cash[e] += held * market.close[r, n] * (1.0 - market.haircut[n])
                shares[e, n] = 0.0
                locked[e, n] = 0.0
                continue
            cash[e] += held * market.dividend[r, n]
            shares[e, n] = held * market.share_step[r, n]
            locked[e, n] *= market.share_step[r, n]


@njit(cache=True)
def _mark(cash: Floats, shares: Floats, close: Floats, row: Rows) -> Floats:
    value = cash.copy()
    for e in range(len(cash)):
        for n in range(shares.shape[1]):
            if shares[e, n] != 0.0:
                value[e] += shares[e, n] * close[row[e], n]
    return value


@njit(cache=True)
def _trade(
    cash: Floats,
    shares: Floats,
    locked: Floats,
    orders: Orders,
    market: MarketRows,
    row: Rows,
    rules: Rules,
    at_open: bool,
    fills: Fills,
) -> None:
    # One long function on purpose: compiled code passes a NamedTuple of arrays by value, and calls
    # that pass them per asset made this four times slower. The rules it applies are functions.
    prices = market.open if at_open else market.close
    volumes = market.volume_open if at_open else market.volume_close
    tradable, gone, lot, min_lot = market.tradable, market.gone, market.lot, market.min_lot
    limit_up, limit_down, stamp = market.limit_up, market.limit_down, market.stamp
    wish, money, reason = orders.shares, orders.spend, fills.reason
    filled, paid, fee, duty, slip = (
        fills.shares,
        fills.price,
        fills.commission,
        fills.stamp,
        fills.slippage,
    )
    n_assets = shares.shape[1]
    want = np.empty(n_assets)
    for e in range(len(cash)):
        r = row[e]
        proceeds = 0.0
        any_buy = False
        for n in range(n_assets):
            want[n] = 0.0
            selling = wish[e, n] < 0.0
            if not selling and wish[e, n] == 0.0 and money[e, n] <= 0.0:
                continue
            price, volume = prices[r, n], volumes[r, n]
            why = _barred(
                gone[r, n], tradable[r, n], price, limit_up[r, n], limit_down[r, n], rules, selling
            )
            if why != _NONE:
                reason[e, n] = why
            elif selling:
                quantity, why = _sell_size(
                    -wish[e, n], shares[e, n], locked[e, n], price, volume, lot[n], rules
                )
                reason[e, n] = why
                if quantity > 0.0:
                    move = slippage(quantity, volume, rules)
                    amount = quantity * price * (1.0 - move)
                    filled[e, n] = -quantity
                    paid[e, n] = price * (1.0 - move)
                    fee[e, n] = commission(amount, rules)
                    duty[e, n] = amount * stamp[r]
                    slip[e, n] = quantity * price * move
                    shares[e, n] -= quantity
                    proceeds += amount - fee[e, n] - duty[e, n]
            else:
                want[n], why = _buy_size(wish[e, n], money[e, n], price, volume, rules)
                reason[e, n] = why
                any_buy = True
        spent = 0.0
        if any_buy:
            spendable = cash[e] + (proceeds if rules.spend_proceeds else 0.0)
            if not rules.in_order:
                scale = _scale(spendable, want, prices[r], volumes[r], rules)
            claimed = 0.0
            for n in range(n_assets):
                if want[n] <= 0.0:
                    continue
                price, volume = prices[r, n], volumes[r, n]
                asked = want[n] if rules.in_order else want[n] * scale
                quantity = whole_lots(asked, lot[n], min_lot[n])
                if asked < want[n]:
                    reason[e, n] = _CASH
                elif quantity < want[n]:
                    reason[e, n] = _LOT
                cost = _cost(quantity, price, volume, rules)
                # Under the 20/50 rule what was set aside counts, not what was used, so that five
                # buys of 20 % use the cash up.
                claim = max(cost, money[e, n]) if rules.in_order else cost
                if claimed + claim > spendable * (1.0 + _SLACK):
                    reason[e, n] = _CASH
                elif quantity > 0.0 and quantity * price < rules.min_value:
                    reason[e, n] = _TOO_SMALL
                elif quantity > 0.0:
                    move = slippage(quantity, volume, rules)
                    amount = quantity * price * (1.0 + move)
                    filled[e, n] = quantity
                    paid[e, n] = price * (1.0 + move)
                    fee[e, n] = commission(amount, rules)
                    slip[e, n] = quantity * price * move
                    shares[e, n] += quantity
                    locked[e, n] += quantity
                    claimed += claim
                    spent += cost
        left = cash[e] + proceeds - spent
        cash[e] = 0.0 if -_SLACK * max(1.0, spent) <= left < 0.0 else left


@njit(cache=True)
def _barred(
    gone: bool,
    tradable: bool,
    price: float,
    limit_up: float,
    limit_down: float,
    rules: Rules,
    selling: bool,
) -> int:
    """Why the asset cannot be traded on this side at all, if so."""
    if gone:
        return _DELISTED
    if not tradable or not price > 0.0:
        return _SUSPENDED
    if rules.price_limits:
        # Limits and prices are whole cents in binary: a millionth is not a difference.
        if not selling and price >= limit_up - 1e-6:
            return _LIMIT_UP
        if selling and price <= limit_down + 1e-6:
            return _LIMIT_DOWN
    return _NONE


@njit(cache=True)
def _sell_size(
    quantity: float,
    held: float,
    locked: float,
    price: float,
    volume: float,
    lot: float,
    rules: Rules,
) -> tuple[float, int]:
    """(shares to sell, why not all): no shorting, T+1, the volume cap, lots, the least value."""
    why = _NONE
    free = held - locked if rules.t_plus_one else held
    if quantity > held * (1.0 + 1e-12):
        why = _NOT_HELD
    if quantity > free and free < held:
        why = _T_PLUS_ONE
    quantity = min(quantity, free)
    cap = volume_cap(volume, rules)
    if quantity > cap:
        quantity, why = cap, _VOLUME
    whole = sellable_lots(quantity, held, lot)
    if whole < quantity:
        quantity = whole
        why = why if why != _NONE else _LOT
    if 0.0 < quantity < held and quantity * price < rules.min_value:
        return 0.0, _TOO_SMALL
    return max(quantity, 0.0), why


@njit(cache=True)
def _buy_size(
    shares: float, money: float, price: float, volume: float, rules: Rules
) -> tuple[float, int]:
    """(shares a buy is for, why not all) before cash and lots.

    For `money`, slippage is taken at the shares it would buy without costs, which is no less than
    what is bought: the true price is no higher, and the money suffices.
    """
    quantity = shares
    if money > 0.0:
        move = slippage(money / price, volume, rules)
        after_fee = min(money / (1.0 + rules.commission), money - rules.min_commission)
        quantity = max(after_fee, 0.0) / (price * (1.0 + move))
    cap = volume_cap(volume, rules)
    if quantity > cap:
        return cap, _VOLUME
    return quantity, _NONE


@njit(cache=True)
def _cost(quantity: float, price: float, volume: float, rules: Rules) -> float:
    """What a buy takes out of the cash."""
    if quantity <= 0.0:
        return 0.0
    amount = quantity * price * (1.0 + slippage(quantity, volume, rules))
    return amount + commission(amount, rules)


@njit(cache=True)
def _scale(spendable: float, want: Floats, prices: Floats, volumes: Floats, rules: Rules) -> float:
    """The one factor by which all buys are scaled so that they fit the cash."""
    scale = 1.0
    for _ in range(_SCALINGS):
        total = 0.0
        for n in range(len(want)):
            if want[n] > 0.0:
                total += _cost(want[n] * scale, prices[n], volumes[n], rules)
        if total <= spendable * (1.0 + 1e-12):
            break
        # Slippage and least commissions make cost other than proportional: approach from above.
        scale *= spendable / total * (1.0 - 1e-12)
    return scale
