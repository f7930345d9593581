"""Rules in the router's place, for tests: always the same expert, and each in turn."""

from __future__ import annotations

import numpy as np

from echelon.types import Bools, Floats, Floats32, Ints


class FixedRouter:
    """Always the same expert, or cash where it is masked."""

    def __init__(self, expert: int) -> None:
        """expert: its number, K for cash."""
        self.expert = expert

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Not needed."""

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        """The expert, or cash."""
        cash = allowed.shape[1] - 1
        return np.where(allowed[:, self.expert], self.expert, cash).astype(np.int64)


class EqualRouter:
    """The experts in turn, for `bars` bars each."""

    def __init__(self, bars: int = 5) -> None:
        """bars: as many as lie between two decisions, so that each gets one decision in turn."""
        self._bars = bars
        self._age: Ints = np.zeros(0, dtype=np.int64)

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Count bars."""
        if len(self._age) != len(fresh):
            self._age = np.zeros(len(fresh), dtype=np.int64)
        self._age = np.where(fresh, 0, self._age + 1)

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        """Whose turn it is, or the next who may."""
        cash = allowed.shape[1] - 1
        turns = (self._age // self._bars)[:, None] + np.arange(cash)
        order = turns % cash
        may = np.take_along_axis(allowed, order, axis=1)
        chosen = np.take_along_axis(order, may.argmax(axis=1)[:, None], axis=1)[:, 0]
        return np.where(may.any(axis=1), chosen, cash).astype(np.int64)
