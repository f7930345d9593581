"""The portfolio's orders, worked through the hours of the day: daily books, intraday execution.

The portfolio says what, execution says how: `IntradayExecutor` takes the orders that books decided
on at the close of one day and works each through the ticks of the next by an `ExecutionPolicy`, in
the same simulator that such policies are trained and judged in. The market kernel settles what it
brings (see `market.executor`).

Daily rows and intraday days must speak of the same prices (`align_days`):

- where both sources have prices of one basis, ticks are taken as they are;
- otherwise (adjusted days, raw ticks) each day's ticks are multiplied by the daily close over the
  day's last price, which is what a change of basis amounts to, and its volumes divided by it.

What then still differs by more than a tolerance is refused: the close from the last price, or the
open from the first. Exchange limits, where they are rules, bar single ticks: there is no buying in
a tick at the upper limit and no selling at the lower one.

An order has the whole session of its date (`Days.sessions`).

Axes: `E` books, `R` rows and `N` assets of the market, `D` days, `T` ticks of a day, `O` orders.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from echelon.errors import DataError
from echelon.execution.days import Days
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders, parent_orders
from echelon.execution.policies import ExecutionPolicy, run_orders
from echelon.execution.simulator import ExecutionRules, Simulator
from echelon.market.executor import ImmediateExecutor, Worked, nothing_worked
from echelon.market.rules import SLIPPAGE_FIXED, SLIPPAGE_LINEAR, SLIPPAGE_SQRT, Rules
from echelon.market.types import Codes, MarketRows, Reason, Rows
from echelon.types import Floats, Ints, Times

log = logging.getLogger(__name__)

DAY_TOLERANCE = 0.10
"""How far a day's prices may be apart: the close from the last tick, the open from the first."""
SYMBOL_TOLERANCE = 0.01
"""How far they may be apart on a symbol's middle day."""
LINEAR_AT = 0.01
"""Square-root slippage becomes a line that costs the same at this share of a tick's volume."""
_CENT = 1e-6  # limits and prices are whole cents in binary


class AlignedDays(NamedTuple):
    """Days on the ledger's prices.

    day_of[R,N]: number of the day to work a row's orders in; -1: there is none
    begin, end[D]: ticks between which orders are worked, the latter excluded
    """

    days: Days
    day_of: Ints
    begin: Ints
    end: Ints


def align_days(
    days: Days,
    rows: MarketRows,
    times: Times,
    symbols: tuple[str, ...],
    *,
    same_prices: bool,
    price_limits: bool = False,
) -> AlignedDays:
    """Bring intraday days to the prices of daily rows, by symbol and date.

    times[R]: of the rows, one a day; same_prices: both have the same basis (raw, both)
    price_limits: whether ticks at the rows' limits are barred
    """
    row, asset = _places(days, times, symbols)
    price = (days.buy + days.sell) / 2.0  # NaN where nothing trades
    traded = price > 0.0
    first, last = traded.argmax(axis=1), traded.shape[1] - 1 - traded[:, ::-1].argmax(axis=1)
    used = (row >= 0) & traded.any(axis=1)
    used[used] &= rows.tradable[row[used], asset[used]]
    day, at = np.flatnonzero(used), (row[used], asset[used])
    opening, closing = price[day, first[day]], price[day, last[day]]
    ratio = np.ones((len(row), 1))
    if not same_prices:
        ratio[day, 0] = rows.close[at] / closing
    opening, closing = opening * ratio[day, 0], closing * ratio[day, 0]
    _refuse_apart(days, day, rows.close[at], closing, "close", "last price")
    if not np.array_equal(rows.open, rows.close):  # else the source has no opens
        _refuse_apart(days, day, rows.open[at], opening, "open", "first price")
    day_of = np.full(rows.close.shape, -1, dtype=np.int64)
    day_of[at] = day
    missing = int((rows.tradable & (day_of < 0)).sum())
    if missing:
        which = f"{missing} of {int(rows.tradable.sum())} tradable bars have no intraday data"
        log.warning("%s; orders for them are filled at the open", which)
    up, down = np.full(ratio.shape, np.inf), np.zeros(ratio.shape)
    if price_limits:
        up[day, 0], down[day, 0] = rows.limit_up[at], rows.limit_down[at]
    buy, sell = days.buy * ratio, days.sell * ratio
    on_basis = replace(
        days,
        buy=np.where(buy >= up - _CENT, np.nan, buy),
        sell=np.where(sell <= down + _CENT, np.nan, sell),
        known=days.known * ratio,
        volume=days.volume / ratio,
    )
    return AlignedDays(on_basis, day_of, *days.sessions)


def _places(days: Days, times: Times, symbols: tuple[str, ...]) -> tuple[Ints, Ints]:
    """(row, asset) of each day, [D]; -1 where the market has no such row or asset."""
    dates = times.astype("datetime64[D]")
    if len(np.unique(dates)) != len(dates):
        raise DataError(
            "the portfolio's bars are intraday already: several rows have one date. Orders are "
            "worked through the day only for daily bars; set market.executor to 'immediate'."
        )
    rows = {date: t for t, date in enumerate(dates.tolist())}
    assets = {symbol: n for n, symbol in enumerate(symbols)}
    day = days.dates.astype("datetime64[D]").tolist()
    row = np.array([rows.get(date, -1) for date in day], dtype=np.int64)
    asset = np.array([assets.get(symbol, -1) for symbol in days.symbols], dtype=np.int64)
    row[asset < 0] = -1
    place = row * len(symbols) + asset
    known, count = np.unique(place[row >= 0], return_counts=True)
    if (count > 1).any():
        twice = int(np.argmax(place == known[count > 1][0]))
        raise DataError(f"{days.name(twice)} occurs more than once among the intraday days.")
    return row, asset


def _refuse_apart(
    days: Days, day: Ints, daily: Floats, intraday: Floats, what: str, tick: str
) -> None:
    """Refuse prices that cannot be of the same asset, or not of the same basis."""
    apart = np.abs(intraday / daily - 1.0)
    hint = (
        "The two datasets do not have the same prices: import both from one source, or set "
        "data.price_basis of each to what it is."
    )
    wrong = np.flatnonzero(~(apart <= DAY_TOLERANCE))
    if len(wrong):
        k = int(wrong[0])
        raise DataError(
            f"{days.name(int(day[k]))}: the daily {what} is {daily[k]:g}, the day's {tick} "
            f"{intraday[k]:g}, expected within {DAY_TOLERANCE:.0%} ({len(wrong)} such days). {hint}"
        )
    names = np.asarray(days.symbols)[day]
    for symbol in np.unique(names):
        middle = float(np.median(apart[names == symbol]))
        if middle > SYMBOL_TOLERANCE:
            raise DataError(
                f"{symbol}: on the middle day the daily {what} and the day's {tick} are "
                f"{middle:.2%} apart, expected at most {SYMBOL_TOLERANCE:.0%}. {hint}"
            )


def ticks_in(days: Days, minutes: float) -> int:
    """How many ticks a step of that many minutes has, at least 1."""
    if len(days.clock) < 2:
        return 1
    return max(1, round(minutes / float(np.median(np.diff(days.clock)))))


def execution_rules(
    rules: Rules,
    ticks_per_step: int,
    *,
    half_spread: float | None = None,
    temporary: float | None = None,
    permanent: float = 0.0,
) -> ExecutionRules:
    """How ticks fill, by the market's own rules where nothing else is said.

    The cap is the share of each tick's volume that may be taken. Fixed slippage is half the spread;
    linear slippage is temporary impact; that by the square root becomes a line (`LINEAR_AT`).
    """
    model, size = rules.slippage_model, rules.slippage
    if half_spread is None:
        half_spread = size if model == SLIPPAGE_FIXED else 0.0
    if temporary is None:
        slopes = {SLIPPAGE_LINEAR: size, SLIPPAGE_SQRT: size / LINEAR_AT**0.5}
        temporary = slopes.get(model, 0.0)
    return ExecutionRules(ticks_per_step, rules.participation, half_spread, temporary, permanent)


class IntradayExecutor:
    """Works the orders of daily books through the ticks of the day after the decision.

    Every order has the whole day. Orders of different books do not meet: each book trades as if it
    were alone, as in the kernel. Orders without a day are left to be filled at once.
    """

    def __init__(
        self,
        aligned: AlignedDays,
        policy: ExecutionPolicy,
        rules: ExecutionRules,
        *,
        whole: bool = False,
    ) -> None:
        """whole: show the policy all days at once, for those that look at earlier ones and keep
        what they made of the days; otherwise it sees those of the bar's orders only.
        """
        self.policy = policy
        self.rules = rules
        self._aligned = aligned
        self._whole = whole

    @property
    def name(self) -> str:
        return self.policy.name

    def work(self, parents: Floats, row: Rows) -> Worked:
        """Work parents[E,N] during the days of the rows `row`[E]."""
        worked = nothing_worked(parents.shape)
        day = self._aligned.day_of[row]
        where = np.nonzero((parents != 0.0) & (day >= 0))
        if not len(where[0]):
            return worked
        days, orders = _orders_on(self._aligned, parents[where], day[where], whole=self._whole)
        history = run_orders(self.policy, days, orders, self.rules)
        executed = np.where(history.left > 0.0, history.executed, orders.amount)
        executed = np.where(history.executed > 0.0, executed, 0.0)
        worked.worked[where] = True
        worked.executed[where] = np.minimum(executed, orders.amount)
        worked.price[where] = np.nan_to_num(history.price)
        worked.market[where], worked.spread[where] = _paid_for(history, self.rules.half_spread)
        for name in ("arrival", "twap", "vwap"):
            getattr(worked, name)[where] = getattr(history.benchmarks, name)
        worked.reason[where] = _reasons(history)
        return worked


class ImmediateWithBenchmarks(ImmediateExecutor):
    """Fills everything at once, bit for bit as without it, and reports the day's TWAP and VWAP."""

    def __init__(self, aligned: AlignedDays) -> None:
        """aligned: the days of TWAP and VWAP."""
        self._aligned = aligned

    def work(self, parents: Floats, row: Rows) -> Worked:
        """Nothing is worked; twap and vwap[E,N] on each order's side, where there is a day."""
        worked = nothing_worked(parents.shape)
        day = self._aligned.day_of[row]
        where = np.nonzero(day >= 0)
        if not len(where[0]):
            return worked
        # Money too little for a lot at the last close may buy one at the open: none is left out.
        amounts = np.where(parents == 0.0, 1.0, parents)[where]
        days, orders = _orders_on(self._aligned, amounts, day[where])
        rules = ExecutionRules(ticks_per_step=days.shape[1])
        marks = Simulator(days, orders, rules, record=False).benchmarks
        worked.twap[where], worked.vwap[where] = marks.twap, marks.vwap
        return worked


def _orders_on(
    aligned: AlignedDays, amounts: Floats, day: Ints, *, whole: bool = False
) -> tuple[Days, ParentOrders]:
    """Orders of amounts[O] (negative: to sell) on day[O], and those days (whole: all days)."""
    days, _, begin, end = aligned
    begin, end = begin[day], end[day]
    if not whole:
        shown, day = np.unique(day, return_inverse=True)
        days = days.take(shown)
    return days, parent_orders(day, np.abs(amounts), amounts > 0.0, begin, end)


def _paid_for(history: History, half_spread: float) -> tuple[Floats, Floats]:
    """(mean middle price at the fills, what crossing the spread cost a share), [O] each."""
    days, orders, ticks = history.days, history.orders, history.ticks
    assert ticks is not None, "ticks are recorded here"
    buying = orders.buying[:, None]
    price = history.market_price
    other = np.where(buying, days.sell[orders.day], days.buy[orders.day])
    middle = np.where(np.isfinite(other), (price + other) / 2.0, price)
    crossed = np.abs(price - middle) + half_spread * price
    filled = ticks.executed > 0.0
    total = np.maximum(ticks.executed.sum(axis=1), np.finfo(np.float64).tiny)
    market, spread = (
        np.where(filled, ticks.executed * part, 0.0).sum(axis=1) / total
        for part in (middle, crossed)
    )
    return market, spread


def _reasons(history: History) -> Codes:
    """[O] why not all of it: no trading at all, or none on this side, or too little of it."""
    days, orders = history.days, history.orders
    own = (history.market_price > 0.0) & (history.market_volume > 0.0)
    other = np.where(orders.buying[:, None], days.sell[orders.day], days.buy[orders.day]) > 0.0
    other &= history.market_volume > 0.0
    limit = np.where(orders.buying, int(Reason.LIMIT_UP), int(Reason.LIMIT_DOWN))
    barred = np.where(other.any(axis=1), limit, int(Reason.SUSPENDED))
    why = np.where(own.any(axis=1), int(Reason.VOLUME), barred)
    return np.where(history.left > 0.0, why, int(Reason.NONE)).astype(np.int8)
