"""The book simulator's plain twin: one order, one snapshot after the other.

Slow on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.execution.book_days import BookDays
from echelon.execution.book_simulator import CANCEL, LIMIT, MARKET, BookRules

Level = tuple[float, float]


@dataclass
class Rest:
    """A limit order in the book."""

    price: float
    size: float
    ahead: float


@dataclass
class PlainBookOrder:
    """One order, what is left of it, and its fills as (tick, shares, price)."""

    book: BookDays
    rules: BookRules
    day: int
    amount: float
    buying: bool
    start: int
    end: int
    rest: Rest | None = None
    fills: list[tuple[int, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tick, self.left, self.done = self.start, self.amount, False

    def step(self, kind: int, size: float, offset: float) -> None:
        """Act at the next snapshot, then let the step's ticks go by."""
        if self.done:
            return
        first = True
        while first or self.tick % self.rules.ticks_per_step != 0:
            first_now, first = first, False
            if self.left >= 1e-6:
                if self.tick == self.end - 1:
                    self.rest = None
                    self._take(self.left, None)
                else:
                    if first_now:
                        self._act(kind, size, offset)
                    self._trade_against_rest()
            self.tick += 1
            if self.tick == self.end:
                break
        self.done = self.tick == self.end or self.left < 1e-6

    def _levels(self, *, own: bool, tick: int) -> list[Level]:
        """Price and size of a side's levels that exist, best first."""
        bids = own == self.buying
        prices = (self.book.bid_price if bids else self.book.ask_price)[self.day, tick]
        sizes = (self.book.bid_size if bids else self.book.ask_size)[self.day, tick]
        return [(float(p), float(q)) for p, q in zip(prices, sizes, strict=True) if p > 0.0]

    def _better(self, one: float, two: float) -> float:
        """By how many ticks price one would come before price two in the order's own queue."""
        return (one - two if self.buying else two - one) / self.book.tick_size

    def _act(self, kind: int, size: float, offset: float) -> None:
        if kind == CANCEL:
            self.rest = None
        if kind == MARKET:
            self._take(min(size, self.left), None)
            if self.rest is not None:
                self.rest.size = min(self.rest.size, self.left)
        if kind == LIMIT:
            self.rest = None
            levels = self._levels(own=True, tick=self.tick)
            want = min(size, self.left)
            if levels and want > 0.0:
                self._place(want, offset, levels)

    def _place(self, want: float, offset: float, levels: list[Level]) -> None:
        best = levels[0][0]
        if self.rules.unit == "bp":
            offset = offset / 1e4 * best / self.book.tick_size
        away = round(offset) * self.book.tick_size
        price = best - away if self.buying else best + away
        if price <= 0.0:
            return
        want -= self._take(want, price)
        if want > 0.0:
            ahead = sum(size for level, size in levels if self._better(level, price) >= -0.1)
            self.rest = Rest(price, want, ahead)

    def _take(self, want: float, limit: float | None) -> float:
        """Walk the other side; returns what was had."""
        had = 0.0
        for price, size in self._levels(own=False, tick=self.tick):
            # The other side's price must be no worse than the limit.
            if limit is None or self._better(price, limit) <= 0.1:
                part = min(want - had, size)
                if part > 0.0:
                    self._fill(part, price)
                    had += part
        return had

    def _trade_against_rest(self) -> None:
        if self.rest is None or self.rest.size <= 0.0:
            return
        flow = self.book.sold if self.buying else self.book.bought
        volume = float(flow[self.day, self.tick])
        worn = min(volume, self.rest.ahead)
        self.rest.ahead -= worn
        volume -= worn
        if volume > 0.0 and (not self.rules.touch or self._at_the_touch(self.rest.price)):
            part = min(volume, self.rest.size)
            self.rest.size -= part
            self._fill(part, self.rest.price)

    def _at_the_touch(self, price: float) -> bool:
        for tick in (self.tick, self.tick + 1):
            if tick < self.book.shape[1]:
                levels = self._levels(own=True, tick=tick)
                if not levels or self._better(levels[0][0], price) <= 0.1:
                    return True
        return False

    def _fill(self, shares: float, price: float) -> None:
        self.fills.append((self.tick, shares, price))
        self.left -= shares
