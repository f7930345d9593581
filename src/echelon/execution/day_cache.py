"""Loaded days, kept by everything that makes them what they are, up to a size.

Axes: `T` ticks of a day.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import date
from threading import Lock
from typing import NamedTuple

from echelon.execution.days import PriceSource
from echelon.types import Floats


class DayKey(NamedTuple):
    """Everything that makes a loaded day what it is."""

    content: str
    symbol: str
    day: date
    clock: bytes
    price_source: PriceSource
    adjusted: bool
    outside: str


class OneDay(NamedTuple):
    """One symbol's day, [T]; `factor` is of its last bar."""

    price: Floats
    known: Floats
    volume: Floats
    factor: float

    @property
    def n_bytes(self) -> int:
        """What it takes in memory."""
        return int(self.price.nbytes + self.known.nbytes + self.volume.nbytes)


class DayCache:
    """The days used last, up to `max_bytes`; a day without bars is remembered as None."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = self.hits = self.misses = 0
        self._days: OrderedDict[DayKey, OneDay | None] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._days)

    def __contains__(self, key: DayKey) -> bool:
        return key in self._days

    def get(self, key: DayKey) -> tuple[bool, OneDay | None]:
        """(whether it is there, the day)."""
        with self._lock:
            if key not in self._days:
                self.misses += 1
                return False, None
            self.hits += 1
            self._days.move_to_end(key)
            return True, self._days[key]

    def put(self, key: DayKey, day: OneDay | None) -> None:
        """Add a day, and drop those that were not used for longest."""
        with self._lock:
            if key in self._days:
                self.n_bytes -= _size(self._days.pop(key))
            self._days[key] = day
            self.n_bytes += _size(day)
            while self.n_bytes > self.max_bytes and self._days:
                self.n_bytes -= _size(self._days.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all days."""
        with self._lock:
            self._days.clear()
            self.n_bytes = 0


def _size(day: OneDay | None) -> int:
    return 256 + (0 if day is None else day.n_bytes)  # key and entry are some 256 bytes
