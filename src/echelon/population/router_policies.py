"""Who can choose the expert in charge, and rules that a router must beat.

A chooser is told, bar by bar, what the experts' own books earned, and at its decisions what the
router would see. A network needs only the one, a rule over returns only the other.

    FixedRouter   always the same expert: with the best one, the best single expert
    EqualRouter   each in turn, equally often: what switching alone brings
    HedgeRouter   the one that a fixed-share hedge over the own books trusts most
                  (Herbster & Warmuth 1998, Tracking the best expert)

Whoever is masked is passed over; where nobody is left, cash is chosen.

Axes: `E` books, `K` experts, `O` entries of an observation.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from echelon.types import Bools, Floats, Floats32, Ints


class Chooser(Protocol):
    """Chooses among K experts and cash, which has the number K, for E books at once."""

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Hear what the own books earned at a bar: returns[E,K].

        fresh[E]: books that begin here; what was heard of them before is to be forgotten
        """

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        """[E] who is to be in charge, by obs[E,O] (see `view`) and allowed[E,K+1].

        Also asked about books at which no decision is due; such an answer must change nothing.
        """


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


class HedgeRouter:
    """The expert in which a fixed-share hedge trusts most.

    Trust grows by exp(rate · return) of the own books; a small share is spread anew at every bar,
    so that an expert that was bad for long can be trusted again soon.
    """

    def __init__(self, *, rate: float = 60.0, share: float = 0.004) -> None:
        self._rate = rate
        self._share = share
        self.trust: Floats = np.zeros((0, 0))

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Move trust to those who earned."""
        even = 1.0 / returns.shape[1]
        if self.trust.shape != returns.shape:
            self.trust = np.full(returns.shape, even)
        earned = self._rate * np.where(np.isfinite(returns), returns, -1.0)
        weight = self.trust * np.exp(earned - earned.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        spread = (1.0 - self._share) * weight + self._share * even
        self.trust = np.where(fresh[:, None], even, spread)

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        """The most trusted who may."""
        cash = allowed.shape[1] - 1
        may = allowed[:, :cash]
        best = np.where(may, self.trust, -1.0).argmax(axis=1)
        return np.asarray(np.where(may.any(axis=1), best, cash), dtype=np.int64)
