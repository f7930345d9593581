"""How orders meet the bar: at once, or worked into it by an executor.

The kernel fills orders at one price of a bar, at once. An `Executor` works them through the hours
of the bar instead and says, for each order, how much it could execute and at what mean price. The
kernel stays the authority for cash, holdings, lots, T+1 and fees; it settles with those prices and
amounts in place of the open. Without an executor nothing here is called.

A step of books whose orders were decided at the close of row t, worked during row t + 1:

1. What happens by itself before the bar (`settle`); orders are split with the shares.
2. Parent orders: sells cut to what may be sold and to lots, buys floored to lots. Orders for money
   become shares at the close of the decision, the last price that all sources have.
3. The executor works them. It knows nothing of cash: how much money a buy takes is known only when
   the day is over.
4. Settlement by `trade`: sells first, at the prices they achieved; then all buys, which are scaled
   by one factor to the cash there is, proceeds and fees inside, and floored to lots.
5. Orders that the executor has no market for are filled at once, at the open, by the kernel's own
   slippage and volume cap. A book of which it worked no order goes through `trade` unchanged.

So no book owes money at the close. During the day it may, which takes a broker that settles at the
end of it. What step 4 takes away from a buy counts as never bought (`Execution.cut`); its price
stays the one of the whole order, whose impact was larger: the error is against us.

`cost_split` measures a fill against the arrival price, the last one known as the order began:

    shortfall = side·shares·(price − arrival) + fees
              = spread + impact + timing + fees

timing is what the market did between arrival and the fill. Against TWAP and VWAP of the order's
own time the market's move is in both prices, so what remains is the executor's doing.

Axes: `E` books, `N` assets.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numba import njit

from echelon.market.kernel import _sell_size, _why_barred, mark, settle, trade
from echelon.market.rules import (
    SLIPPAGE_FIXED,
    SLIPPAGE_NONE,
    Rules,
    after_fee,
    slippage,
    volume_cap,
    whole_lots,
)
from echelon.market.types import Book, Codes, Fills, MarketRows, Orders, Reason, Rows, Stepped
from echelon.types import Bools, Floats

_VOLUME = int(Reason.VOLUME)


class Worked(NamedTuple):
    """What an executor made of parent orders, [E,N] each.

    Means are weighted by shares. What the price is worse than the market, beyond spread, is impact.
    """

    worked: Bools  # there was a market to work the order in; of others only twap and vwap count
    executed: Floats  # shares, from 0 to the amount of the order
    price: Floats  # mean price paid or received
    market: Floats  # mean of the market's price (the middle of two) at the times of the fills
    spread: Floats  # paid per share for crossing the spread
    arrival: Floats  # price known as the order began
    twap: Floats  # of the market over the order's time, NaN where not known
    vwap: Floats  # likewise
    reason: Codes  # why not all of it


class Executor(Protocol):
    """Works orders through a bar."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def work(self, parents: Floats, row: Rows) -> Worked:
        """Work parents[E,N] (shares to buy, negative: to sell) during the bars `row`[E].

        Same orders and bars, same answer: books are simulated more than once.
        """


class Execution(NamedTuple):
    """How orders were executed, next to their `Fills`; [E,N] each, of what was filled."""

    worked: Bools  # by an executor; False: filled at once, or nothing was
    arrival: Floats  # price, NaN where nothing was executed
    twap: Floats  # likewise, and NaN where the day's bars are missing
    vwap: Floats
    spread: Floats  # money, a cost where positive, as are the next two
    impact: Floats
    timing: Floats  # from arrival to the market's price at the time of the fills
    cut: Floats  # shares executed that had to be left for want of cash, or of a whole lot


class ImmediateExecutor:
    """Fills at once, as without an executor, but with an `Execution` to split costs by."""

    name = "immediate"

    def work(self, parents: Floats, row: Rows) -> Worked:
        return nothing_worked(parents.shape)


def nothing_worked(shape: tuple[int, ...]) -> Worked:
    """No order worked yet; arrays to write into."""
    executed, price, spread = np.zeros((3, *shape))
    market, arrival, twap, vwap = np.full((4, *shape), np.nan)
    worked, reason = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.int8)
    return Worked(worked, executed, price, market, spread, arrival, twap, vwap, reason)


def step_worked(
    book: Book, orders: Orders, market: MarketRows, row: Rows, rules: Rules, executor: Executor
) -> tuple[Stepped, Execution]:
    """`kernel.step` with an executor: from the close of the bar `row`[E] to the next."""
    after = row + 1
    split = market.share_step[after]
    if (split != 1.0).any():
        orders = orders._replace(shares=orders.shares * split)
    settled = settle(book, market, after)
    parents = np.zeros_like(settled.shares)
    reference = market.close[row] / split
    _parents(settled, orders, reference, market.lot, market.min_lot, rules, parents)
    worked = executor.work(parents, after)
    _check(worked, parents, executor)
    traded, fills, execution = _settle_orders(
        settled, orders, market, after, rules, parents, worked
    )
    return Stepped(traded, fills, mark(traded, market, after)), execution


class CostSplit(NamedTuple):
    """Costs in money, of all fills together; a gain is negative."""

    spread: float
    impact: float
    timing: float
    fees: float
    total: float  # of these four: the shortfall against arrival
    arrived: float  # value of the fills at their arrival prices, which basis points are of
    against_twap: float  # paid over those prices, fees left out; of fills that have them
    against_vwap: float
    benchmarked: float  # value at arrival of the fills whose twap and vwap are known
    fills: int
    at_once: int  # how many of them no executor worked
    cut: float  # value at arrival of what was executed but could not be kept


def cost_split(fills: Fills, execution: Execution | None = None) -> CostSplit:
    """Split the costs of fills; without `execution` (filled at once) slippage counts as impact."""
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


def _check(worked: Worked, parents: Floats, executor: Executor) -> None:
    """An executor's fault must not become money."""
    for name, array in worked._asdict().items():
        assert array.shape == parents.shape, f"{executor.name}: {name} is not [E,N]"
    counts = worked.worked & (worked.executed > 0.0)
    assert (worked.executed[worked.worked] >= 0.0).all(), f"{executor.name}: executed less than 0"
    assert (worked.executed <= np.abs(parents))[counts].all(), f"{executor.name}: executed too much"
    assert (worked.price[counts] > 0.0).all(), f"{executor.name}: a price is not positive"


def _settle_orders(
    book: Book,
    orders: Orders,
    market: MarketRows,
    row: Rows,
    rules: Rules,
    parents: Floats,
    worked: Worked,
) -> tuple[Book, Fills, Execution]:
    """Step 4 and 5 of the module's text; the books have been settled."""
    which = (worked.worked & (parents != 0.0)).any(axis=1)
    if not which.any():
        return _at_once(book, orders, market, row, rules, worked)
    if which.all():
        return _at_prices(book, orders, market, row, rules, parents, worked)
    rest, subset = (Worked(*(array[part] for array in worked)) for part in (~which, which))
    books = [Book(*(array[part] for array in book)) for part in (~which, which)]
    wishes = [Orders(*(array[part] for array in orders)) for part in (~which, which)]
    one = _at_once(books[0], wishes[0], market, row[~which], rules, rest)
    other = _at_prices(books[1], wishes[1], market, row[which], rules, parents[which], subset)
    joined = []
    for left, right in zip(one, other, strict=True):
        arrays = []
        for a, b in zip(left, right, strict=True):
            whole = np.empty((len(row), *a.shape[1:]), dtype=a.dtype)
            whole[~which], whole[which] = a, b
            arrays.append(whole)
        joined.append(arrays)
    return Book(*joined[0]), Fills(*joined[1]), Execution(*joined[2])


def _at_once(
    book: Book, orders: Orders, market: MarketRows, row: Rows, rules: Rules, worked: Worked
) -> tuple[Book, Fills, Execution]:
    after, fills = trade(book, orders, market, row, rules, at_open=True)
    filled = fills.shares != 0.0
    arrival = np.where(filled, market.open[row], np.nan)
    flat = rules.slippage_model == SLIPPAGE_FIXED
    nothing = np.zeros_like(arrival)
    execution = Execution(
        worked=np.zeros_like(filled),
        arrival=arrival,
        twap=np.where(filled, worked.twap, np.nan),
        vwap=np.where(filled, worked.vwap, np.nan),
        spread=fills.slippage.copy() if flat else nothing,
        impact=nothing.copy() if flat else fills.slippage.copy(),
        timing=nothing.copy(),
        cut=nothing.copy(),
    )
    return after, fills, execution


def _at_prices(
    book: Book,
    orders: Orders,
    market: MarketRows,
    row: Rows,
    rules: Rules,
    parents: Floats,
    worked: Worked,
) -> tuple[Book, Fills, Execution]:
    """The kernel's `trade` on a market of one row a book, whose open is what was achieved."""
    quoted = market.open[row]
    price, cap, because = quoted.copy(), np.zeros_like(parents), np.zeros(parents.shape, np.int8)
    _open_fills(parents, quoted, market, row, rules, price, cap, because)
    done = worked.worked
    arrival = np.where(worked.arrival > 0.0, worked.arrival, quoted)
    cap = np.where(done, worked.executed, cap)
    price = np.where(done, np.where(cap > 0.0, worked.price, np.maximum(arrival, 1e-12)), price)
    because = np.where(done, worked.reason, because).astype(np.int8)
    # Prices have the slippage inside, and `cap` is what the volume allowed.
    plain = rules._replace(slippage_model=SLIPPAGE_NONE, participation=1.0, price_limits=False)
    # A market of E rows: the one that each book looks at.
    shared = ("haircut", "lot", "min_lot")
    seen = {n: a if n in shared else a[row] for n, a in market._asdict().items()}
    view = MarketRows(**(seen | {"open": price, "volume_open": cap}))
    after, fills = trade(book, orders, view, np.arange(len(row)), plain, at_open=True)

    size = np.abs(fills.shares)
    side = np.sign(fills.shares)
    moved = np.where(done, worked.market, quoted)
    spread = np.where(done, worked.spread, 0.0)
    worse = side * (price - moved)
    if rules.slippage_model == SLIPPAGE_FIXED:
        spread = np.where(done, spread, worse)
    some = size > 0.0
    tried = np.where(done, worked.executed > 0.0, some)
    execution = Execution(
        worked=done & some,
        arrival=np.where(tried, np.where(done, arrival, quoted), np.nan),
        twap=np.where(tried, worked.twap, np.nan),
        vwap=np.where(tried, worked.vwap, np.nan),
        spread=np.where(some, size * spread, 0.0),
        impact=np.where(some, size * (worse - spread), 0.0),
        timing=np.where(some & done, side * size * (moved - arrival), 0.0),
        cut=np.where(done, np.maximum(worked.executed - size, 0.0), 0.0),
    )
    fills = fills._replace(
        slippage=np.maximum(execution.spread + execution.impact, 0.0),
        reason=_reasons(fills, orders, parents, cap, because),
    )
    return after, fills, execution


def _reasons(fills: Fills, orders: Orders, parents: Floats, cap: Floats, because: Codes) -> Codes:
    """What `trade` calls the volume is whatever stopped the executor, if anything did."""
    whole = cap >= np.abs(parents)
    short = np.abs(fills.shares) < cap * (1.0 - 1e-9)
    wished = (orders.spend <= 0.0) & (np.abs(orders.shares) > np.abs(parents))
    ended = np.where(wished, int(Reason.LOT), int(Reason.NONE))
    ended = np.where(short, int(Reason.CASH), ended)
    why = np.where(whole, ended, because)
    return np.where(fills.reason == _VOLUME, why, fills.reason).astype(np.int8)


@njit(cache=True, error_model="numpy")
def _parents(
    book: Book,
    orders: Orders,
    reference: Floats,
    lot: Floats,
    min_lot: Floats,
    rules: Rules,
    parents: Floats,
) -> None:
    """Write parent orders[E,N]; reference[E,N]: price that money is turned into shares at."""
    for e in range(parents.shape[0]):
        for n in range(parents.shape[1]):
            wish, money, price = orders.shares[e, n], orders.spend[e, n], reference[e, n]
            if wish < 0.0:
                held, locked = book.shares[e, n], book.locked[e, n]
                # The least value is for the settlement to look at, at the price achieved.
                size, _ = _sell_size(-wish, held, locked, np.inf, np.inf, lot[n], rules)
                parents[e, n] = -size
                continue
            if money > 0.0:
                wish = max(after_fee(money, rules), 0.0) / price if price > 0.0 else 0.0
            parents[e, n] = whole_lots(wish, lot[n], min_lot[n])


@njit(cache=True, error_model="numpy")
def _open_fills(
    parents: Floats,
    quoted: Floats,
    market: MarketRows,
    row: Rows,
    rules: Rules,
    price: Floats,
    cap: Floats,
    because: Codes,
) -> None:
    """Write price, most shares and why not all of orders filled at once, at the open."""
    for e in range(parents.shape[0]):
        r = row[e]
        for n in range(parents.shape[1]):
            size, selling = abs(parents[e, n]), parents[e, n] < 0.0
            gone, tradable = market.gone[r, n], market.tradable[r, n]
            up, down = market.limit_up[r, n], market.limit_down[r, n]
            volume = market.volume_open[r, n]
            why = _why_barred(gone, tradable, quoted[e, n], up, down, rules, selling)
            if why != 0:
                because[e, n] = why
                continue
            most = volume_cap(volume, rules)
            if size > most:
                because[e, n], size = _VOLUME, most
            cap[e, n] = size
            move = slippage(size, volume, rules)
            price[e, n] = quoted[e, n] * (1.0 - move if selling else 1.0 + move)
