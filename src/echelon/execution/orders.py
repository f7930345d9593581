"""Parent orders: how much of what to buy or sell, on which day, between which ticks.

They come from a file of the user's, or are drawn by rule. A file names, order by order, symbol,
date, direction, amount and the time from start to end; all that is wrong with it is listed at once,
by row and field. An order is worked in the ticks that lie wholly within its time: a bar that began
before it already holds trades it had no part in.

Drawn orders are sized by what the symbol traded on days **before** theirs. Each day draws from a
stream named after its symbol and date, so adding days changes no other day's orders.

Axes: `E` orders, `D` days, `T` ticks of a day.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from echelon.config.execution import ExecutionOrdersConfig
from echelon.data.sources._columns import Sheet, is_missing
from echelon.data.sources._times import UNDERSTOOD, join_clock, parse_times
from echelon.errors import ConfigError, DataError
from echelon.execution.days import Days
from echelon.rng import stream
from echelon.types import Bools, Floats, Ints

TRAILING_DAYS = 20
"""Earlier days of a symbol that its volume is compared with."""
LEAST_DAYS = 5
"""Fewest earlier days that the size of a drawn order needs."""

ORDER_COLUMNS: Mapping[str, str] = {
    "symbol": "symbol ticker code instrument stock_code ts_code 代码 股票代码 证券代码 标的",
    "date": "date day trade_date datetime 日期 交易日期 交易日",
    "direction": "direction side order_type 方向 买卖 买卖方向",
    "amount": "amount quantity qty shares volume size 数量 股数 委托数量 成交数量",
    "start": "start start_time begin from 开始 开始时间",
    "end": "end end_time until to 结束 结束时间",
}
"""Our name → aliases of an order file's columns; start and end may be absent: the whole day."""

DIRECTIONS: Mapping[str, bool] = {"buy": True, "b": True, "买": True, "买入": True} | {
    "sell": False,
    "s": False,
    "卖": False,
    "卖出": False,
}
"""Spelling → whether it buys."""

_MIDNIGHT = ("24:00", "24:00:00")


class ParentOrders(NamedTuple):
    """`E` orders; all ticks of one lie within its day.

    day[E]: number of the day in `Days`; amount[E]: shares, positive
    buying[E]; start, end[E]: first tick, and the one after the last
    """

    day: Ints
    amount: Floats
    buying: Bools
    start: Ints
    end: Ints

    def __len__(self) -> int:  # of orders, not of fields
        return len(self.day)

    def take(self, which: Ints | slice) -> ParentOrders:
        """Some of them."""
        return ParentOrders(
            self.day[which],
            self.amount[which],
            self.buying[which],
            self.start[which],
            self.end[which],
        )


def parent_orders(
    day: object, amount: object, buying: object, start: object, end: object
) -> ParentOrders:
    """Orders from anything that broadcasts to one length."""
    given = (np.atleast_1d(np.asarray(part)) for part in (day, amount, buying, start, end))
    days, amounts, sides, starts, ends = np.broadcast_arrays(*given)
    return ParentOrders(
        days.astype(np.int64),
        amounts.astype(np.float64),
        sides.astype(np.bool_),
        starts.astype(np.int64),
        ends.astype(np.int64),
    )


def check_orders(orders: ParentOrders, days: Days) -> None:
    """Refuse orders that no day can work; the message names the first one and its fault."""
    n_days, n_ticks = days.shape
    faults = (
        (~np.isfinite(orders.amount) | (orders.amount <= 0.0), "amount", "a positive number"),
        ((orders.day < 0) | (orders.day >= n_days), "day", f"one of the {n_days} days"),
        ((orders.start < 0) | (orders.start >= n_ticks), "start", "inside the market's hours"),
        ((orders.end <= orders.start) | (orders.end > n_ticks), "end", "after start, by the close"),
    )
    for wrong, name, expected in faults:
        if wrong.any():
            k = int(np.argmax(wrong))
            value = getattr(orders, name)[k]
            raise DataError(
                f"order {k}: {name} = {value:g} must be {expected}"
                f" (the day has ticks 0 to {n_ticks - 1}). Correct the order or leave it out;"
                f" {int(wrong.sum())} of {len(orders)} orders have this fault."
            )


def draw_orders(days: Days, rule: ExecutionOrdersConfig, seed: int) -> ParentOrders:
    """Orders by rule, in order of day; none on days without enough earlier ones of the symbol.

    All lie between the day's opening and its close, which may be an early one.
    """
    if rule.window == "random" and rule.min_ticks > days.shape[1]:
        raise ConfigError(
            f"execution.orders.min_ticks is {rule.min_ticks}; it must be at most the day's "
            f"{days.shape[1]} ticks."
        )
    usual = trailing_volume(days, least=LEAST_DAYS)
    opens, closes = days.sessions
    low, high = rule.share
    rows: list[tuple[int, float, bool, int, int]] = []
    for day in np.flatnonzero(usual > 0.0):
        name = np.datetime_as_string(days.dates[day], unit="D")
        rng = stream(seed, "execution", "orders", days.symbols[day], str(name))
        for _ in range(rule.per_day):
            amount = usual[day] * (low + (high - low) * rng.random())
            buying = bool(rng.random() < rule.buys)
            n_ticks = int(closes[day] - opens[day])
            length = int(rng.integers(min(rule.min_ticks, n_ticks), n_ticks, endpoint=True))
            start = int(opens[day] + rng.integers(0, n_ticks - length, endpoint=True))
            if rule.window == "day":
                start, length = int(opens[day]), n_ticks
            if rule.lot > 0.0:
                amount = np.floor(amount / rule.lot) * rule.lot
            if amount > 0.0:
                rows.append((int(day), float(amount), buying, start, start + length))
    if not rows:
        raise DataError(
            f"no order can be drawn: no day of {days.shape[0]} has {LEAST_DAYS} earlier days "
            "of its symbol with volume enough. Load more days, or lower the lot."
        )
    return parent_orders(*zip(*rows, strict=True))


def trailing_volume(days: Days, trailing: int = TRAILING_DAYS, least: int = 1) -> Floats:
    """[D] median daily volume of the symbol over up to `trailing` days before.

    NaN where there are fewer than `least` such days.
    """
    total = days.volume.sum(axis=1)
    out = np.full(len(total), np.nan)
    for which, before in days.by_symbol():
        for day, n in zip(which, before, strict=True):
            if n >= max(least, 1):
                out[day] = np.median(total[which[max(n - trailing, 0) : n]])
    return out


def read_orders(
    path: Path, days: Days, *, own: Mapping[str, str] | None = None, timezone: str = "UTC"
) -> ParentOrders:
    """Orders of a CSV or Parquet file, in the order of its rows.

    own: your column name → ours (`execution.orders.columns`)
    timezone: of the exchange, for times that say their offset
    What lies after an early close is cut off.
    """
    required = ("symbol", "date", "direction", "amount")
    sheet = _OrderSheet.read(path, ORDER_COLUMNS, required, own, "execution.orders.columns")
    sheet.market = days
    dates = sheet.order_dates(timezone)
    places = sheet.days(dates)
    buying = sheet.directions()
    amount = sheet.amounts()
    start, end = sheet.within_session(places, *sheet.windows(dates, timezone))
    sheet.refuse("orders")
    orders = parent_orders(places, amount, buying, start, end)
    check_orders(orders, days)
    return orders


@dataclass
class _OrderSheet(Sheet):
    """An order file; `market` holds the days that its orders are worked on."""

    market: Days = field(init=False)

    def note_at(self, k: int, ours: str, message: str, remedy: str) -> None:
        """Add a problem of order `k`."""
        self.note(int(self.rows[k]), ours, message, remedy)

    def strings(self, ours: str) -> list[str]:
        """Cells without blanks around them; empty where there is none."""
        cells = self.cells(ours)
        empty = is_missing(cells)
        if isinstance(cells.dtype, pl.Datetime) and cells.dtype.time_zone is not None:
            cells = cells.dt.convert_time_zone("UTC")  # else its text has a zone's name: CST
        text = cells.cast(pl.String).str.strip_chars().fill_null("")
        return ["" if none else cell for cell, none in zip(text, empty, strict=True)]

    def order_dates(self, timezone: str) -> list[date | None]:
        cells = self.cells("date")
        dates = parse_times(cells, freq="1d", timezone=timezone)["time"].cast(pl.Date).to_list()
        for k, (day, cell) in enumerate(zip(dates, self.strings("date"), strict=True)):
            if day is None:
                self.note_at(k, "date", f"{cell!r} is not a date", f"Understood: {UNDERSTOOD}")
        return dates

    def days(self, dates: list[date | None]) -> list[int]:
        """Number of each order's day; what is not in the data is a problem."""
        market = self.market
        days = market.dates.astype("datetime64[D]").tolist()
        places = {(s, d): k for k, (s, d) in enumerate(zip(market.symbols, days, strict=True))}
        known = set(market.symbols)
        numbers = []
        for k, (symbol, day) in enumerate(zip(self.strings("symbol"), dates, strict=True)):
            numbers.append(places.get((symbol, day), -1))
            if not symbol:
                self.note_at(k, "symbol", "the cell is empty", "Fill it in, or remove the row")
            elif symbol not in known:
                near = difflib.get_close_matches(symbol, known, n=1)
                hint = f"Did you mean {near[0]}?" if near else "Load days of it"
                self.note_at(k, "symbol", f"{symbol!r} is not in the data", hint)
            elif day is not None and numbers[-1] < 0:
                have = [d for s, d in places if s == symbol]
                message = f"{symbol} has no day {day} in the data ({min(have)} to {max(have)})"
                remedy = "Choose a day on which it trades, or load more days"
                self.note_at(k, "date", message, remedy)
        return numbers

    def directions(self) -> list[bool]:
        buying = []
        for k, cell in enumerate(self.strings("direction")):
            buying.append(DIRECTIONS.get(cell.lower(), False))
            if cell.lower() not in DIRECTIONS:
                message = f"{cell!r} is no direction"
                self.note_at(k, "direction", message, f"Write one of {', '.join(DIRECTIONS)}")
        return buying

    def amounts(self) -> list[float]:
        amounts = []
        for k, cell in enumerate(self.strings("amount")):
            try:
                value = float(cell.replace(",", ""))
            except ValueError:
                value = float("nan")
            amounts.append(value)
            if not (np.isfinite(value) and value > 0.0):
                message = f"{cell!r} is not a positive number of shares"
                remedy = "Write a positive number; the direction says whether to buy or sell"
                self.note_at(k, "amount", message, remedy)
        return amounts

    def windows(self, dates: list[date | None], timezone: str) -> tuple[list[int], list[int]]:
        """First tick of each order, and the one after its last."""
        clock, length = self.market.clock, self.market.tick_minutes
        opens, closes = float(clock[0]), float(clock[-1]) + length
        begin = self._minutes("start", dates, timezone, opens)
        until = self._minutes("end", dates, timezone, closes)
        hours = f"{_clock_text(opens)} to {_clock_text(closes)}"
        for k, (low, high) in enumerate(zip(begin, until, strict=True)):
            for ours, value, wrong in (
                ("start", low, not opens <= low < closes),
                ("end", high, not opens < high <= closes),
            ):
                if wrong and not np.isnan(value):
                    message = f"{_clock_text(value)} lies outside the market's hours, {hours}"
                    self.note_at(k, ours, message, "Write a time within, or leave the cell empty")
        start = np.searchsorted(clock, np.array(begin) - 1e-9, side="left").tolist()
        end = np.searchsorted(clock + length, np.array(until) + 1e-9, side="right").tolist()
        for k, (low, high) in enumerate(zip(begin, until, strict=True)):
            if opens <= low < closes and opens < high <= closes and start[k] >= end[k]:
                message = f"no tick lies wholly within {_clock_text(low)} to {_clock_text(high)}"
                remedy = f"Give the order at least one tick of {length:g} minute(s) in {hours}"
                self.note_at(k, "end", message, remedy)
        return start, end

    def within_session(
        self, places: list[int], start: list[int], end: list[int]
    ) -> tuple[list[int], list[int]]:
        """The same ticks, without those before the day's opening and after its close."""
        opens, closes = self.market.sessions
        first, last = list(start), list(end)
        for k, (day, low, high) in enumerate(zip(places, start, end, strict=True)):
            if not 0 <= day < len(opens) or low >= high:
                continue  # noted already
            first[k], last[k] = max(low, int(opens[day])), min(high, int(closes[day]))
            if first[k] >= last[k]:
                clock, length = self.market.clock, self.market.tick_minutes
                close = _clock_text(clock[closes[day] - 1] + length)
                hours = f"{_clock_text(clock[opens[day]])} to {close}"
                message = f"the market traded from {hours} on that day, the order lies outside"
                self.note_at(k, "start", message, "Write a time within, or leave the order out")
        return first, last

    def _minutes(
        self, ours: str, dates: list[date | None], timezone: str, default: float
    ) -> list[float]:
        """Minutes after midnight of the order's day; NaN where a cell cannot be read."""
        text = self.strings(ours)
        day = pl.Series("date", dates, dtype=pl.Date)
        clock = pl.Series("clock", text, dtype=pl.String)
        times = parse_times(join_clock(day, clock), freq="1min", timezone=timezone)["time"]
        since = (times - day.cast(pl.Datetime("us"))).dt.total_seconds().to_list()
        minutes = []
        for k, (cell, seconds) in enumerate(zip(text, since, strict=True)):
            if not cell:
                minutes.append(default)
            elif cell in _MIDNIGHT:
                minutes.append(1440.0)
            elif seconds is not None:
                minutes.append(seconds / 60.0)
            else:
                minutes.append(float("nan"))
                if dates[k] is not None:
                    remedy = "Write a time of day such as 09:30, or a whole time (2016-01-04 09:30)"
                    self.note_at(k, ours, f"{cell!r} is not a time", remedy)
        return minutes


def _clock_text(minutes: float) -> str:
    whole = round(minutes)
    if not 0 <= whole <= 1440:
        return f"{whole:d} minutes from the day's midnight"
    return f"{whole // 60:02d}:{whole % 60:02d}"
