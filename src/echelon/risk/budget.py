"""How much of what a policy wants its real book may hold: drawdown budget and target volatility.

At the close of a bar, for each book:

1. The drawdown d is what the book has lost since its highest mark M of the last 252 trading days.
   A peak of all time would never be reached again from cash; one that decays, or that restarts
   after a loss, gives the budget out twice.
2. Grossman and Zhou (1993) hold risky assets in proportion to the surplus over (1 − b)·M, b being
   the budget: of the book's value that is (b − d) / (1 − d). Divided by b it is 1 at the peak;
   0.85 of that to the power 1.25 is the cap of the drawdown: less than theirs, as it is decided a
   bar late. Nothing is held once the budget is spent.
3. The cap of the volatility is target / σ, σ being that of the book *without* any cap over the last
   60 trading days, of which 20 must be known: of the book as it is it would chase itself.
4. The cap is the smaller one. It is decided at the close and traded at the next bar, so a loss
   within that bar can jump the budget (`BudgetVerdict.jumped_now`).

Axes: `E` books, `H` marks of the past.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from echelon.config.hierarchy import RiskConfig
from echelon.risk._memory import GuardMemory, below_peak, require_shape
from echelon.risk.events import RiskEvent, RiskKind
from echelon.types import Bools, Floats

PEAK_DAYS = 252
"""Trading days that a peak is remembered."""
_VOLATILITY_DAYS, _LEAST_DAYS = 60, 20
_AT_PEAK, _POWER = 0.85, 1.25
"""Share of the wish that is held at the peak, and power of the surplus; 1 and 1 are the paper's, of
an investor who trades without pause. Decided a bar late, those fell by 24 to 28 % over the whole
spans of docs/results.md, these by 20 to 26 %."""
CUT_CAP, RESTORED_CAP = 0.5, 0.75
"""Below the one exposure counts as cut, from the other on as restored."""


def budget_cap(drawdown: Floats, budget: float) -> Floats:
    """[...] share of the wish that may be held at drawdown[...]; nothing where that is NaN.

    >>> budget_cap(np.array([0.0, 0.05, 0.15]), 0.15).round(3).tolist()
    [0.85, 0.546, 0.0]
    """
    lost = np.where(np.isnan(drawdown), 1.0, drawdown)
    surplus = (budget - lost) / np.maximum(1.0 - lost, 1e-12)
    return np.asarray(_AT_PEAK * np.clip(surplus / budget, 0.0, 1.0) ** _POWER)


class BudgetVerdict(NamedTuple):
    """What holds for the decision at this bar.

    cap[E]: share of the wish that may be held; drawdown[E]: since the peak; volatility[E]: a year,
        of the book without a cap, NaN where too little of it is known
    cut_now, restored_now, jumped_now[E]: the cap fell below a half, it is back above three
        quarters, the drawdown went beyond the budget
    """

    cap: Floats
    drawdown: Floats
    volatility: Floats
    cut_now: Bools
    restored_now: Bools
    jumped_now: Bools


class ExposureBudget(GuardMemory):
    """The caps of E books, bar by bar."""

    WHAT = "drawdown budget"
    REMEMBERED: ClassVar = {"marks": np.nan, "wishes": np.nan, "cut": False, "over": False}

    def __init__(
        self, n_books: int, risk: RiskConfig, periods_per_year: float, bars_per_day: int = 1
    ) -> None:
        self.shape = (n_books,)
        self.risk, self._rate, self._day = risk, periods_per_year, bars_per_day
        self.slots = PEAK_DAYS * bars_per_day + 1
        self._marks = np.full((n_books, self.slots), np.nan)
        self._wishes = np.full((n_books, self.slots), np.nan)
        self._cut = np.zeros(n_books, dtype=np.bool_)
        self._over = np.zeros(n_books, dtype=np.bool_)

    def remember(self, past: Floats, value: Floats) -> None:
        """Take past[H,2], marks of the book and of the one without a cap, as the books' own.

        For books that go on with the money of others, at value[E]: the last marks become that.
        """
        for mark in (past / past[-1])[-self.slots :]:
            self._marks[:, self.cursor], self._wishes[:, self.cursor] = np.outer(mark, value)
            self._advance()

    def update(self, equity: Floats, wish: Floats) -> BudgetVerdict:
        """Take what the books[E] are worth at the close, and would be without a cap: wish[E]."""
        require_shape("equity", equity, self.shape)
        require_shape("wish", wish, self.shape)
        self._marks[:, self.cursor] = np.where(np.isfinite(equity), equity, np.nan)
        self._wishes[:, self.cursor] = wish
        self._advance()
        budget, target = self.risk.max_drawdown, self.risk.target_volatility
        drawdown = below_peak(np.fmax.reduce(self._marks, axis=1), equity)
        volatility = self._volatility()
        cap, over = np.ones(self.shape), np.zeros(self.shape, dtype=np.bool_)
        if budget is not None:
            cap, over = budget_cap(drawdown, budget), drawdown > budget
        if target is not None:
            limit = target / np.where(volatility > 0.0, volatility, np.inf)
            cap = np.where(volatility > 0.0, np.minimum(cap, limit), cap)
        cut_now = ~self._cut & (cap < CUT_CAP)
        restored_now = self._cut & (cap >= RESTORED_CAP)
        jumped_now = over & ~self._over
        self._cut[:] = (self._cut | cut_now) & ~restored_now
        self._over[:] = over
        return BudgetVerdict(cap, drawdown, volatility, cut_now, restored_now, jumped_now)

    def _volatility(self) -> Floats:
        """[E] a year, of the last marks without a cap."""
        if self.risk.target_volatility is None:
            return np.full(self.shape, np.nan)
        back = self.cursor - 1 - np.arange(_VOLATILITY_DAYS * self._day + 1)[::-1]
        marks = self._wishes[:, back]
        with np.errstate(invalid="ignore", divide="ignore"):
            returns = marks[:, 1:] / marks[:, :-1] - 1.0
        known = np.isfinite(returns)
        n = known.sum(axis=1)
        kept = np.where(known, returns, 0.0)
        mean = kept.sum(axis=1) / np.maximum(n, 1)
        square = (np.where(known, returns - mean[:, None], 0.0) ** 2).sum(axis=1)
        volatility = np.sqrt(square / np.maximum(n - 1, 1) * self._rate)
        return np.where(n >= _LEAST_DAYS * self._day, volatility, np.nan)

    def events(self, verdict: BudgetVerdict, time: int, who: str = "portfolio") -> list[RiskEvent]:
        """What to log of a verdict."""
        logged = []
        for happened, kind in (
            (verdict.jumped_now, RiskKind.BUDGET_JUMPED),
            (verdict.cut_now, RiskKind.EXPOSURE_CUT),
            (verdict.restored_now, RiskKind.EXPOSURE_RESTORED),
        ):
            for e in np.flatnonzero(happened).tolist():
                value, limit = float(verdict.drawdown[e]), self.risk.max_drawdown
                if limit is None:
                    value, limit = float(verdict.volatility[e]), self.risk.target_volatility or 0.0
                cap = {"cap": float(verdict.cap[e])}
                logged.append(RiskEvent(time, kind, who, value, limit, e, cap))
        return logged
