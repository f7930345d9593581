"""Which experts the router may choose: one whose own book has fallen too far is masked.

At the close of a bar, after the books were marked and before anything is decided:

1. The drawdown of each expert's own book is what it has lost since its highest mark of the last
   `drawdown_window` trading days. A bar begins at the mark before it, so 30 bars span 31 marks:
   whoever loses 16 % in 30 days has a drawdown of at least 16 %, on whichever day it was lost.
2. Above `drawdown_limit` the expert is masked at once: no confirmation, no grace.
3. If it is in charge, `forced` says that the router decides again at this very bar, and so that
   its next order is already another expert's.
4. It is released when the drawdown has been below `drawdown_release` for `release_bars` bars in
   a row and at least `cooldown_bars` have gone by since it was masked. As the drawdown is a
   rolling one, time heals too: a fall older than `drawdown_window` no longer counts.
5. The cash expert is never masked, so that there is always something to choose.

A mark that is not a finite number masks its expert as a loss does; it is never a peak.

Axes: `E` books (episodes side by side), `K` experts, each with a book of its own in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.config.hierarchy import RiskConfig
from echelon.errors import DataError
from echelon.risk._memory import GuardMemory, below_peak, require_shape
from echelon.risk.events import RiskEvent, RiskKind
from echelon.types import Bools, Floats


class DrawdownVerdict(NamedTuple):
    """What holds for the decision at this bar.

    drawdown[E,K]: share lost since the rolling peak, NaN where the mark is no number
    allowed[E,K]: the router's action mask; the cash expert's is always True
    masked_now, released_now[E,K]: changed at this bar
    in_charge[E]: as handed in, −1 for nobody
    forced[E]: the expert in charge is not allowed, decide now
    """

    drawdown: Floats
    allowed: Bools
    masked_now: Bools
    released_now: Bools
    in_charge: NDArray[np.int64]
    forced: Bools


class DrawdownGuard(GuardMemory):
    """The masks of K experts in E books, bar by bar."""

    WHAT = "drawdown guard"
    REMEMBERED: ClassVar = {"marks": -np.inf, "masked": False, "calm": 0, "age": 0}

    def __init__(
        self, n_books: int, n_experts: int, cash: int, risk: RiskConfig, bars_per_day: int = 1
    ) -> None:
        """cash: index of the expert that is never masked; bars_per_day: of a trading day."""
        if not 0 <= cash < n_experts:
            raise ValueError(f"cash = {cash}: expected the index of one of {n_experts} experts")
        self.shape = (n_books, n_experts)
        self.cash = cash
        self.risk = risk
        self.slots = risk.drawdown_window * bars_per_day + 1
        self._marks = np.full((*self.shape, self.slots), -np.inf)
        self._masked = np.zeros(self.shape, dtype=np.bool_)
        self._calm = np.zeros(self.shape, dtype=np.int64)
        self._age = np.zeros(self.shape, dtype=np.int64)

    @property
    def allowed(self) -> Bools:
        """[E,K]: who may be chosen, as of the last bar."""
        return ~self._masked

    def update(self, equity: Floats, in_charge: NDArray[np.int64]) -> DrawdownVerdict:
        """Take equity[E,K] of the experts' own books at a close; the first is what they begin with.

        in_charge[E]: who traded up to this close, −1 for nobody
        """
        n_books, n_experts = self.shape
        require_shape("equity", equity, self.shape)
        require_shape("in_charge", in_charge, (n_books,))
        if in_charge.min(initial=0) < -1 or in_charge.max(initial=0) >= n_experts:
            raise ValueError(f"in_charge = {in_charge}: expected -1 to {n_experts - 1}")
        if not np.isfinite(equity[:, self.cash]).all():
            raise DataError(
                f"the cash expert (index {self.cash}) is worth {equity[:, self.cash]}: it is the "
                "last resort and must be a number. Check its book and the index."
            )
        risk = self.risk
        broken = ~np.isfinite(equity)
        self._marks[..., self.cursor] = np.where(broken, -np.inf, equity)
        self._advance()
        drawdown = below_peak(self._marks.max(axis=-1), equity)

        masked = self._masked.copy()
        self._age[:] = np.where(masked, self._age + 1, 0)
        self._calm[:] = np.where(masked & (drawdown < risk.drawdown_release), self._calm + 1, 0)
        released_now = masked & (self._calm >= risk.release_bars)
        released_now &= self._age >= risk.cooldown_bars
        masked_now = ~masked & (broken | (drawdown > risk.drawdown_limit))
        masked_now[:, self.cash] = False
        self._masked[:] = (masked & ~released_now) | masked_now

        chosen = np.maximum(in_charge, 0)[:, None]
        forced = np.take_along_axis(self._masked, chosen, axis=1)[:, 0] & (in_charge >= 0)
        return DrawdownVerdict(
            drawdown, self.allowed, masked_now, released_now, in_charge.copy(), forced
        )

    def events(self, verdict: DrawdownVerdict, time: int, names: Sequence[str]) -> list[RiskEvent]:
        """What to log of a verdict; `names`[K] are the experts'."""
        worst = self.risk.drawdown_limit
        kinds = (
            (verdict.masked_now, RiskKind.MASKED, worst),
            (verdict.released_now, RiskKind.RELEASED, self.risk.drawdown_release),
        )
        logged = [
            RiskEvent(time, kind, names[k], float(verdict.drawdown[e, k]), limit, int(e))
            for happened, kind, limit in kinds
            for e, k in np.argwhere(happened)
        ]
        for e in np.flatnonzero(verdict.forced):
            k = verdict.in_charge[e]
            value = float(verdict.drawdown[e, k])
            logged.append(RiskEvent(time, RiskKind.FORCED, names[k], value, worst, int(e)))
        return logged
