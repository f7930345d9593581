"""Limits on the portfolio that is really held, whoever is in charge.

In this order, between the policy's target weights and the orders made of them:

1. `limit_positions` caps each weight and the sum of them at the factor that CVaR left;
2. `PortfolioHalt` stops a portfolio that has fallen too far since its peak: its target is cash;
3. `TurnoverLimit` goes only so far towards the target as the turnover allowed at this bar and in
   the last `window` bars permits. A halted portfolio is exempt: leaving must not be slow.

What a limit takes away becomes cash. Turnover is two-way, Σ|change of weight| over the assets, so
exchanging everything counts 2; it is that of the decision, before prices and fills are known.

Axes: `E` books, `N` assets. Weights are shares of the book's value; what they leave is cash.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from echelon.errors import DataError
from echelon.risk._memory import GuardMemory, below_peak, require_shape
from echelon.risk.events import RiskEvent, RiskKind
from echelon.types import Bools, Floats

CUT_SLACK = 1e-9
"""A limit is always kept, but a cut smaller than this is rounding and no event."""
MONTH = 20
"""Trading days."""


def limit_positions(target: Floats, scale: Floats) -> Floats:
    """Target weights[E,N], each cut to scale[E]; if together still more, all shrink alike."""
    require_shape("scale", scale, target.shape[:1])
    _require_finite("target", target)
    most = scale[:, None]
    weights = np.clip(target, -most, most)
    shrink = _fraction(scale, np.abs(weights).sum(axis=1))
    return np.asarray(weights * shrink[:, None])


class HaltVerdict(NamedTuple):
    """What holds for the decision at this bar.

    drawdown[E]: since the peak, NaN where the mark is no number; halted[E]: hold cash only
    halted_now, resumed_now[E]: changed at this bar
    """

    drawdown: Floats
    halted: Bools
    halted_now: Bools
    resumed_now: Bools


class PortfolioHalt(GuardMemory):
    """All to cash after too deep a fall, in E books.

    The peak is the highest mark since the book began, or since it resumed: what was lost before
    a halt is not held against it again. A mark that is not a finite number halts as a loss does,
    and a book resumes neither at such a one nor with nothing left.
    """

    WHAT = "portfolio halt"
    REMEMBERED: ClassVar = {"peak": -np.inf, "halted": False, "age": 0, "asked": False}

    def __init__(self, n_books: int, limit: float, cooldown: int | None) -> None:
        """limit: share lost since the peak; cooldown: bars in cash; None: until `resume`"""
        self._limit = limit
        self._cooldown = cooldown
        self._peak = np.full(n_books, -np.inf)
        self._halted = np.zeros(n_books, dtype=np.bool_)
        self._age = np.zeros(n_books, dtype=np.int64)
        self._asked = np.zeros(n_books, dtype=np.bool_)

    @property
    def halted(self) -> Bools:
        """[E]: to hold cash only, as of the last bar."""
        return self._halted.copy()

    def update(self, equity: Floats) -> HaltVerdict:
        """Take the values[E] of the books at the close; the first are what they begin with."""
        require_shape("equity", equity, self._peak.shape)
        broken = ~np.isfinite(equity)
        halted = self._halted.copy()
        self._age[:] = np.where(halted, self._age + 1, 0)
        due = self._asked.copy()
        if self._cooldown is not None:
            due |= self._age >= self._cooldown
        resumed_now = halted & due & ~broken & (equity > 0.0)
        self._peak[resumed_now] = -np.inf
        self._peak[:] = np.maximum(self._peak, np.where(broken, -np.inf, equity))
        drawdown = below_peak(self._peak, equity)
        halted_now = ~halted & (broken | (drawdown > self._limit))
        self._halted[:] = (halted & ~resumed_now) | halted_now
        self._asked &= self._halted
        return HaltVerdict(drawdown, self.halted, halted_now, resumed_now)

    def resume(self, which: Bools) -> None:
        """Let the halted books `which`[E] trade again from the next bar on."""
        require_shape("which", which, self._halted.shape)
        self._asked |= which & self._halted

    def events(self, verdict: HaltVerdict, time: int, who: str = "portfolio") -> list[RiskEvent]:
        """What to log of a verdict."""
        return [
            RiskEvent(time, kind, who, float(verdict.drawdown[e]), self._limit, int(e))
            for happened, kind in (
                (verdict.halted_now, RiskKind.HALTED),
                (verdict.resumed_now, RiskKind.RESUMED),
            )
            for e in np.flatnonzero(happened)
        ]


class Turnover(NamedTuple):
    """What remains of a change of weights.

    weights[E,N]: as far towards the target as may be; share[E]: of the way; allowed[E]: at this bar
    wanted, traded[E]: turnover of the whole way, and of that part; cut[E]: by more than rounding
    """

    weights: Floats
    share: Floats
    wanted: Floats
    traded: Floats
    allowed: Floats
    cut: Bools


class TurnoverLimit(GuardMemory):
    """The turnover of E books over the last `window` bars."""

    WHAT = "turnover limit"
    REMEMBERED: ClassVar = {"traded": 0.0}

    def __init__(
        self, n_books: int, per_bar: float, per_window: float, window: int = MONTH
    ) -> None:
        """per_bar, per_window: two-way, in multiples of the book's value"""
        self._per_bar = per_bar
        self._per_window = per_window
        self.slots = window
        self._traded = np.zeros((self.slots, n_books))

    def apply(self, current: Floats, target: Floats, exempt: Bools) -> Turnover:
        """Go from current[E,N] towards target[E,N]; call it at every bar, also without a change.

        exempt[E]: these go all the way (a halt), and what they trade still counts afterwards
        """
        n_books = self._traded.shape[1]
        require_shape("target", target, current.shape)
        require_shape("current", current, (n_books, current.shape[-1]))
        require_shape("exempt", exempt, (n_books,))
        _require_finite("current", current)
        _require_finite("target", target)
        self._traded[self.cursor] = 0.0  # this bar's own slot: the one that leaves the window
        left = self._per_window - self._traded.sum(axis=0)
        allowed = np.clip(left, 0.0, self._per_bar)
        change = target - current
        wanted = np.abs(change).sum(axis=1)
        share = np.where(exempt, 1.0, _fraction(allowed, wanted))
        # A whole way ends at the target itself, not at a rounding of it.
        weights = np.where((share == 1.0)[:, None], target, current + share[:, None] * change)
        traded = share * wanted
        self._traded[self.cursor] = traded
        self._advance()
        return Turnover(weights, share, wanted, traded, allowed, wanted - traded > CUT_SLACK)

    def events(self, turnover: Turnover, time: int, who: str = "portfolio") -> list[RiskEvent]:
        """What to log: every bar at which less was traded than wanted."""
        logged = []
        for e in np.flatnonzero(turnover.cut).tolist():
            wanted, allowed = float(turnover.wanted[e]), float(turnover.allowed[e])
            values = {"share": float(turnover.share[e])}
            logged.append(RiskEvent(time, RiskKind.TURNOVER_CUT, who, wanted, allowed, e, values))
        return logged


def _fraction(most: Floats, wanted: Floats) -> Floats:
    """min(1, most / wanted), 1 where nothing is wanted."""
    share = np.ones_like(wanted)
    np.divide(most, wanted, out=share, where=wanted > most)
    return share


def _require_finite(name: str, weights: Floats) -> None:
    if not np.isfinite(weights).all():
        books = np.flatnonzero(~np.isfinite(weights).all(axis=1))
        raise DataError(
            f"{name} weights of book {books.tolist()} are not finite: quarantine the policy"
        )
