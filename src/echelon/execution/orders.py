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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

DIRECTIONS: Mapping[str, bool] = {
    **dict.fromkeys(("buy", "b", "买", "买入"), True),
    **dict.fromkeys(("sell", "s", "卖", "卖出"), False),
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
        day, amount, buying, start, end = self
        return ParentOrders(day[which], amount[which], buying[which], start[which], end[which])


def parent_orders(
    day: object, amount: object, buying: object, start: object, end: object
) -> ParentOrders:
    """Orders from anything that broadcasts to one length."""
    given = (np.atleast_1d(np.asarray(part)) for part in (day, amount, buying, start, end))
    kinds = (np.int64, np.float64, np.bool_, np.int64, np.int64)
    arrays = zip(np.broadcast_arrays(*given), kinds, strict=True)
    return ParentOrders(*(array.astype(kind) for array, kind in arrays))


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
    """Orders by rule, in order of day, within the session; none without enough earlier days."""
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
    """[D] median daily volume of the symbol over up to `trailing` days before, at least `least`."""
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
    sheet = Sheet.read(path, ORDER_COLUMNS, required, own, "execution.orders.columns")
    cells = {ours: _strings(sheet.cells(ours)) for ours in ORDER_COLUMNS}
    dates = parse_times(sheet.cells("date"), freq="1d", timezone=timezone)["time"].cast(pl.Date)
    begin, until = (_minutes(cells[ours], dates, timezone) for ours in ("start", "end"))
    columns = pl.DataFrame({**cells, "day": dates, "begin": begin, "until": until})
    market = _Market(days)
    rows = []
    for row, order in zip(sheet.rows, columns.iter_rows(named=True), strict=True):
        note = partial(sheet.note, row)
        day = market.find_day(order, note)
        side = order["direction"].lower()
        if side not in DIRECTIONS:
            remedy = f"Write one of {', '.join(DIRECTIONS)}"
            note("direction", f"{order['direction']!r} is no direction", remedy)
        try:
            amount = float(order["amount"].replace(",", ""))
        except ValueError:
            amount = float("nan")
        if not (np.isfinite(amount) and amount > 0.0):
            message = f"{order['amount']!r} is not a positive number of shares"
            remedy = "Write a positive number; the direction says whether to buy or sell"
            note("amount", message, remedy)
        ticks = market.find_ticks(order, day, note)
        rows.append((day, amount, DIRECTIONS.get(side, False), *ticks))
    sheet.refuse("orders")
    return parent_orders(*zip(*rows, strict=True))


_Note = Callable[[str, str, str], None]
"""Takes a field of ours, what is wrong with it, and the remedy."""


class _Market:
    """The days of a file's orders; what a row asks for and they do not have is noted."""

    def __init__(self, days: Days) -> None:
        dates = days.dates.astype("datetime64[D]").tolist()
        self.places = {place: k for k, place in enumerate(zip(days.symbols, dates, strict=True))}
        self.symbols = set(days.symbols)
        self.begins, self.ends = days.clock, days.clock + days.tick_minutes
        self.sessions = np.stack(days.sessions, axis=1)
        self.length = days.tick_minutes

    def find_day(self, order: Mapping[str, Any], note: _Note) -> int:
        """Number of the order's day; -1: there is none."""
        symbol, day = order["symbol"], order["day"]
        if day is None:
            note("date", f"{order['date']!r} is not a date", f"Understood: {UNDERSTOOD}")
        if not symbol:
            note("symbol", "the cell is empty", "Fill it in, or remove the row")
        elif symbol not in self.symbols:
            near = difflib.get_close_matches(symbol, self.symbols, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Load days of it"
            note("symbol", f"{symbol!r} is not in the data", hint)
        elif day is not None and (symbol, day) not in self.places:
            have = [date for name, date in self.places if name == symbol]
            message = f"{symbol} has no day {day} in the data ({min(have)} to {max(have)})"
            note("date", message, "Choose a day on which it trades, or load more days")
        return self.places.get((symbol, day), -1)

    def find_ticks(self, order: Mapping[str, Any], day: int, note: _Note) -> tuple[int, int]:
        """First tick of an order, and the one after its last."""
        opens, closes = float(self.begins[0]), float(self.ends[-1])
        low, high = (
            default if not order[ours] else order[minutes]
            for ours, minutes, default in (("start", "begin", opens), ("end", "until", closes))
        )
        hours = f"{_clock_text(opens)} to {_clock_text(closes)}"
        within = opens <= low < closes, opens < high <= closes
        for ours, value, fits in (("start", low, within[0]), ("end", high, within[1])):
            if np.isnan(value) and order["day"] is not None:
                remedy = "Write a time of day such as 09:30, or a whole time (2016-01-04 09:30)"
                note(ours, f"{order[ours]!r} is not a time", remedy)
            elif not (fits or np.isnan(value)):
                message = f"{_clock_text(value)} lies outside the market's hours, {hours}"
                note(ours, message, "Write a time within, or leave the cell empty")
        if not all(within):
            return 0, 0
        start = int(np.searchsorted(self.begins, low - 1e-9, side="left"))
        end = int(np.searchsorted(self.ends, high + 1e-9, side="right"))
        if start >= end:
            message = f"no tick lies wholly within {_clock_text(low)} to {_clock_text(high)}"
            remedy = f"Give the order at least one tick of {self.length:g} minute(s) in {hours}"
            note("end", message, remedy)
        elif day >= 0:
            first, last = (int(tick) for tick in self.sessions[day])
            start, end = max(start, first), min(end, last)
            if start >= end:
                hours = f"{_clock_text(self.begins[first])} to {_clock_text(self.ends[last - 1])}"
                message = f"the market traded from {hours} on that day, the order lies outside"
                note("start", message, "Write a time within, or leave the order out")
        return start, end


def _strings(cells: pl.Series) -> pl.Series:
    """Cells without blanks around them; empty where there is none."""
    empty = is_missing(cells)
    if isinstance(cells.dtype, pl.Datetime) and cells.dtype.time_zone is not None:
        cells = cells.dt.convert_time_zone("UTC")  # else its text has a zone's name: CST
    text = cells.cast(pl.String).str.strip_chars().fill_null("")
    return pl.select(pl.when(empty).then(pl.lit("")).otherwise(text)).to_series()


def _minutes(text: pl.Series, dates: pl.Series, timezone: str) -> pl.Series:
    """Minutes after midnight of the order's day; NaN where a cell cannot be read."""
    times = parse_times(join_clock(dates, text), freq="1min", timezone=timezone)["time"]
    since = (times - dates.cast(pl.Datetime("us"))).dt.total_seconds() / 60.0
    midnight = pl.when(text.is_in(_MIDNIGHT)).then(1440.0)
    return pl.select(midnight.otherwise(since).fill_null(np.nan)).to_series()


def _clock_text(minutes: float) -> str:
    whole = round(minutes)
    if not 0 <= whole <= 1440:
        return f"{whole:d} minutes from the day's midnight"
    return f"{whole // 60:02d}:{whole % 60:02d}"
