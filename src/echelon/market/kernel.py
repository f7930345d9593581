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
   as the rules say). What would not even bring its fees is not sold.
2. Buys, each cut by tradable, limit-up and the volume cap.
3. Buys together against the cash, fees included: scaled by one factor so that they fit, then
   floored to lots (what is left stays cash); or, for the 20/50 rule, in the order of assets,
   each whole or skipped.

The result does not depend on the order of assets, except under `in_order`, and where least
commissions are so large a part of the cash that the factor is not found in a few rounds: of the
buys so scaled, the first are served.

The compiled functions have three habits for speed. Orders are listed by side first, and holdings
of zero are computed with like any other: a branch on what a policy does is guessed wrong half the
time. Rows and assets are unsigned: no index is asked whether it is negative. Loops index whole
arrays [e, n]: a view of one book's row counts references.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from echelon.market.rules import (
    Rules,
    after_fee,
    commission,
    sellable_lots,
    slippage,
    volume_cap,
    whole_lots,
)
from echelon.market.types import Book, Fills, MarketRows, Orders, Reason, Rows, Stepped
from echelon.types import Floats

# Compiled code takes plain numbers.
_NONE, _SUSPENDED, _DELISTED = int(Reason.NONE), int(Reason.SUSPENDED), int(Reason.DELISTED)
_LIMIT_UP, _LIMIT_DOWN = int(Reason.LIMIT_UP), int(Reason.LIMIT_DOWN)
_NOT_HELD, _T_PLUS_ONE = int(Reason.NOT_HELD), int(Reason.T_PLUS_ONE)
_VOLUME, _CASH = int(Reason.VOLUME), int(Reason.CASH)
_LOT, _TOO_SMALL = int(Reason.LOT), int(Reason.TOO_SMALL)

# Buys may cost this much more than the cash by rounding; what is then below zero is set to zero.
_SLACK = 1e-9
_SCALINGS = 8

# What is divided by zero below is not used, and the check for it would keep loops from SIMD.
_compiled = njit(cache=True, error_model="numpy")


def new_book(cash: float | Floats, n_books: int, n_assets: int) -> Book:
    money = np.broadcast_to(np.asarray(cash, dtype=np.float64), (n_books,)).copy()
    return Book(money, np.zeros((n_books, n_assets)), np.zeros((n_books, n_assets)))


def settle(book: Book, market: MarketRows, row: Rows) -> Book:
    """The books after what happens by itself before the bar `row`[E] opens."""
    _check(book, market, row)
    after = _copy(book)
    _settle(after, market, row)
    return after


def trade(
    book: Book, orders: Orders, market: MarketRows, row: Rows, rules: Rules, *, at_open: bool
) -> tuple[Book, Fills]:
    """Fill `orders` at the open (or the close) of the bar `row`[E]."""
    _check(book, market, row, orders)
    after, fills = _copy(book), _no_fills(book)
    _trade(after, orders, market, row, rules, at_open, fills)
    return after, fills


def mark(book: Book, market: MarketRows, row: Rows) -> Floats:
    """Value[E] of the books at the close of the bar `row`[E], at the last known prices."""
    _check(book, market, row)
    value = np.empty_like(book.cash)
    _mark(book, market, row, value)
    return value


def step(
    book: Book, orders: Orders, market: MarketRows, row: Rows, rules: Rules, *, fill_open: bool
) -> Stepped:
    """Take the books from the close of the bar `row`[E], where orders were decided, to the next.

    Filled at the next open: settle(row+1), trade at the open of row+1, mark at the close of row+1.
    Filled at the same close: trade at the close of row, settle(row+1), mark at the close of row+1.
    Orders are in shares as they were at the decision: a split before the fill splits them too.
    """
    _check(book, market, row, orders, ahead=1)
    if fill_open:
        split = market.share_step[row + 1]
        if (split != 1.0).any():
            orders = orders._replace(shares=orders.shares * split)
    after, fills, value = _copy(book), _no_fills(book), np.empty_like(book.cash)
    _step(after, orders, market, row, rules, fill_open, fills, value)
    return Stepped(after, fills, value)


def _check(
    book: Book, market: MarketRows, row: Rows, orders: Orders | None = None, ahead: int = 0
) -> None:
    """Compiled code does not look at bounds: shapes and rows must fit before it begins."""
    shape = book.shares.shape
    assert book.cash.shape == shape[:1], "cash is not [E]"
    assert book.locked.shape == shape, "locked is not [E,N]"
    assert market.close.shape[1] == shape[1], "the market has another number of assets"
    assert row.shape == shape[:1], "row is not [E]"
    assert _inside(row, len(market.close) - ahead), "row is not a row of the market"
    if orders is not None:
        assert orders.shares.shape == orders.spend.shape == shape, "orders are not [E,N]"


def _copy(book: Book) -> Book:
    return Book(book.cash.copy(), book.shares.copy(), book.locked.copy())


def _no_fills(book: Book) -> Fills:
    filled, price, fee, stamp, slip = np.zeros((5, *book.shares.shape))
    return Fills(filled, price, fee, stamp, slip, np.zeros(book.shares.shape, dtype=np.int8))


# Below, compiled: functions write into the books and fills they are given.


@_compiled
def _inside(row: Rows, n_rows: int) -> bool:
    inside = True
    for r in row:
        inside &= 0 <= r < n_rows
    return inside


@_compiled
def _step(
    book: Book,
    orders: Orders,
    market: MarketRows,
    row: Rows,
    rules: Rules,
    fill_open: bool,
    fills: Fills,
    value: Floats,
) -> None:
    after = row + 1
    if fill_open:
        _settle(book, market, after)
        _trade(book, orders, market, after, rules, True, fills)
    else:
        _trade(book, orders, market, row, rules, False, fills)
        _settle(book, market, after)
    _mark(book, market, after, value)


@_compiled
def _settle(book: Book, market: MarketRows, row: Rows) -> None:
    shares, locked, gone = book.shares, book.locked, market.gone
    close, dividend, share_step = market.close, market.dividend, market.share_step
    for e in range(len(row)):
        r = np.uint64(row[e])
        unlock = market.new_session[r]
        cash = book.cash[e]
        for n in range(shares.shape[1]):
            held = shares[e, n]
            kept = 0.0 if unlock else locked[e, n]
            if gone[r, n] and held != 0.0:
                cash += held * close[r, n] * (1.0 - market.haircut[n])
                shares[e, n] = locked[e, n] = 0.0
                continue
            cash += held * dividend[r, n]
            shares[e, n] = held * share_step[r, n]
            locked[e, n] = kept * share_step[r, n]
        book.cash[e] = cash


@_compiled
def _mark(book: Book, market: MarketRows, row: Rows, value: Floats) -> None:
    shares, close = book.shares, market.close
    for e in range(len(row)):
        r = np.uint64(row[e])
        worth = book.cash[e]
        for n in range(shares.shape[1]):
            worth += shares[e, n] * close[r, n]
        value[e] = worth


@_compiled
def _trade(
    book: Book,
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
    shares, locked, wish, money = book.shares, book.locked, orders.shares, orders.spend
    filled, paid, reason = fills.shares, fills.price, fills.reason
    fee, duty, slip = fills.commission, fills.stamp, fills.slippage
    room = shares.shape[1] + 1
    sells, buys = np.empty(room, np.uint64), np.empty(room, np.uint64)
    want, at, of, costs = np.empty(room), np.empty(room), np.empty(room), np.empty(room)
    for e in range(len(row)):
        r = np.uint64(row[e])
        n_sells, n_buys = _by_side(wish, money, e, sells, buys)
        proceeds = 0.0
        for k in range(n_sells):
            n = sells[k]
            price, volume = prices[r, n], volumes[r, n]
            why = _why_barred(
                gone[r, n], tradable[r, n], price, limit_up[r, n], limit_down[r, n], rules, True
            )
            if why != _NONE:
                reason[e, n] = why
                continue
            quantity, why = _sell_size(
                -wish[e, n], shares[e, n], locked[e, n], price, volume, lot[n], rules
            )
            move = slippage(quantity, volume, rules)
            amount = quantity * price * (1.0 - move)
            charge, tax = commission(amount, rules), amount * stamp[r]
            if amount - charge - tax < 0.0:
                why = _TOO_SMALL
            elif quantity > 0.0:
                filled[e, n] = -quantity
                paid[e, n] = price * (1.0 - move)
                fee[e, n] = charge
                duty[e, n] = tax
                slip[e, n] = quantity * price * move
                shares[e, n] -= quantity
                proceeds += amount - charge - tax
            reason[e, n] = why
        n_wanted = 0
        for k in range(n_buys):
            n = buys[k]
            price, volume = prices[r, n], volumes[r, n]
            why = _why_barred(
                gone[r, n], tradable[r, n], price, limit_up[r, n], limit_down[r, n], rules, False
            )
            if why != _NONE:
                reason[e, n] = why
                continue
            quantity, why = _buy_size(wish[e, n], money[e, n], price, volume, rules)
            reason[e, n] = why
            buys[n_wanted], want[n_wanted] = n, quantity
            at[n_wanted], of[n_wanted] = price, volume
            n_wanted += quantity > 0.0
        cash = book.cash[e]
        spendable = cash + (proceeds if rules.spend_proceeds else 0.0)
        scale = 1.0 if rules.in_order else _fit(spendable, n_wanted, want, at, of, costs, rules)
        spent = claimed = 0.0
        for k in range(n_wanted):
            n, price, volume, asked = buys[k], at[k], of[k], want[k] * scale
            quantity = whole_lots(asked, lot[n], min_lot[n])
            if reason[e, n] == _NONE:  # else the volume cut it before
                if asked < want[k]:
                    reason[e, n] = _CASH
                elif quantity < want[k]:
                    reason[e, n] = _LOT
            move = slippage(quantity, volume, rules)
            amount = quantity * price * (1.0 + move)
            charge = commission(amount, rules)
            cost = amount + charge
            # Under the 20/50 rule what was set aside counts, not what was used, so that five
            # buys of 20 % use the cash up.
            claim = max(cost, money[e, n]) if rules.in_order else cost
            if claimed + claim > spendable * (1.0 + _SLACK):
                reason[e, n] = _CASH
            elif quantity > 0.0 and quantity * price < rules.min_value:
                reason[e, n] = _TOO_SMALL
            elif quantity > 0.0:
                filled[e, n] = quantity
                paid[e, n] = price * (1.0 + move)
                fee[e, n] = charge
                slip[e, n] = quantity * price * move
                shares[e, n] += quantity
                locked[e, n] += quantity
                claimed += claim
                spent += cost
        left = cash + proceeds - spent
        book.cash[e] = 0.0 if -_SLACK * max(1.0, spent) <= left < 0.0 else left


@_compiled
def _by_side(wish: Floats, money: Floats, e: int, sells: Rows, buys: Rows) -> tuple[int, int]:
    """List which assets the book e sells and which it buys; how many there are of each."""
    # There is no branch: a place is written in both lists and counted in one, or in none.
    n_sells = n_buys = 0
    for n in range(wish.shape[1]):
        selling = wish[e, n] < 0.0
        idle = (wish[e, n] == 0.0) & (money[e, n] <= 0.0)
        sells[n_sells] = n
        buys[n_buys] = n
        n_sells += selling
        n_buys += (not selling) & (not idle)
    return n_sells, n_buys


@_compiled
def _why_barred(
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


@_compiled
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


@_compiled
def _buy_size(
    shares: float, money: float, price: float, volume: float, rules: Rules
) -> tuple[float, int]:
    """(shares a buy is for, why not all) before cash and lots.

    For `money`, slippage is taken at the shares it would buy without costs: no less than needed.
    """
    quantity = shares
    if money > 0.0:
        move = slippage(money / price, volume, rules)
        quantity = max(after_fee(money, rules), 0.0) / (price * (1.0 + move))
    cap = volume_cap(volume, rules)
    if quantity > cap:
        return cap, _VOLUME
    return quantity, _NONE


@_compiled
def _fit(
    spendable: float,
    n_buys: int,
    want: Floats,
    prices: Floats,
    volumes: Floats,
    costs: Floats,
    rules: Rules,
) -> float:
    """The factor that scales all `n_buys` to fit the cash; `costs` is room to work in."""
    if spendable <= 0.0 or after_fee(spendable * (1.0 + _SLACK), rules) < 0.0:
        return 0.0
    scale = 1.0
    for _ in range(_SCALINGS):
        for k in range(n_buys):
            quantity = want[k] * scale
            amount = quantity * prices[k] * (1.0 + slippage(quantity, volumes[k], rules))
            costs[k] = amount + commission(amount, rules)
        total = 0.0
        for k in range(n_buys):
            total += costs[k]
        if total <= spendable * (1.0 + 1e-12):
            break
        # Slippage and least commissions make cost other than proportional: approach from above.
        scale *= spendable / total * (1.0 - 1e-12)
    return scale
