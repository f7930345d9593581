"""The simulator's plain twin: one order, one tick after the other, to be read and checked against.

Slow on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echelon.execution.days import Days
from echelon.execution.simulator import LEFT, ExecutionRules


@dataclass
class PlainOrder:
    """One order: what it is, what is left of it, and what its steps and ticks executed."""

    days: Days
    rules: ExecutionRules
    day: int
    amount: float
    buying: bool
    start: int
    end: int
    tick: int = 0
    left: float = 0.0
    drift: float = 0.0
    done: bool = False
    executed: dict[int, float] = field(default_factory=dict)
    prices: dict[int, float] = field(default_factory=dict)
    steps: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tick, self.left = self.start, self.amount

    def step(self, requested: float) -> None:
        """Work one step; adds (executed, value) to `steps`."""
        if self.done:
            return
        ticks = list(range(self.tick, self._step_end()))
        requested = min(max(requested, 0.0), self.left)
        before = len(self.executed)
        value = 0.0
        for tick in ticks:
            # The remainder goes on the last tick.
            share = self.left if tick == self.end - 1 else requested / len(ticks)
            fill = self._fill(tick, share)
            if fill > 0.0:
                price = self._price(tick, fill)
                self.executed[tick], self.prices[tick] = fill, price
                self.left -= fill
                value += fill * price
        filled = [self.executed[tick] for tick in list(self.executed)[before:]]
        self.steps.append((sum(filled), value))
        self.tick = ticks[-1] + 1
        self.done = self.tick >= self.end or self.left < LEFT

    def _step_end(self) -> int:
        tick = self.tick + 1
        while tick < self.end and tick % self.rules.ticks_per_step != 0:
            tick += 1
        return tick

    def _quote(self, tick: int) -> float:
        prices = self.days.buy if self.buying else self.days.sell
        return float(prices[self.day, tick])

    def _fill(self, tick: int, share: float) -> float:
        volume = float(self.days.volume[self.day, tick])
        if not self._quote(tick) > 0.0 or volume == 0.0:
            return 0.0
        return min(share, self.left, self.rules.volume_cap * volume, volume)

    def _price(self, tick: int, fill: float) -> float:
        """What the fill pays; it also moves the price of later ticks."""
        part = fill / float(self.days.volume[self.day, tick])
        against = self.drift + self.rules.half_spread + self.rules.temporary * part
        self.drift += self.rules.permanent * part
        return self._quote(tick) * (1.0 + against if self.buying else 1.0 - against)
