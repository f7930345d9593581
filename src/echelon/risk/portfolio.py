"""Limits on the portfolio that is really held, whoever is in charge.

In this order, between the policy's target weights and the orders made of them:

1. `limit_positions` caps each weight and the sum of them, both times the factor that CVaR left;
2. `PortfolioHalt` stops a portfolio that has fallen too far since its peak: its target is cash;
3. `TurnoverLimit` goes only so far towards the target as the turnover allowed at this bar and in
   the last `window` bars permits. A halted portfolio is exempt: leaving must not be slow.

What a limit takes away becomes cash; nothing is handed on to other assets. Turnover is two-way,
as everywhere in Echelon: Σ|change of weight| over the assets, so exchanging everything counts 2.
It is that of the decision; what the market then does to prices and fills is not known yet.

Axes: `E` books, `N` assets. Weights are shares of the book's value; what they leave is cash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from echelon.errors import DataError
from echelon.risk._memory import GuardMemory, below_peak, expand_mask, require, require_shape
from echelon.risk.events import RiskEvent, RiskKind
from echelon.types import Bools, Floats

CUT_SLACK = 1e-9
"""A limit is always kept, but a cut smaller than this is rounding and no event."""


@dataclass(frozen=True, slots=True)
class PositionSettings:
    """How much may be held."""

    per_asset: float = 1.0
    """Largest share of the book in one asset, long or short."""
    total: float = 1.0
    """Largest sum of the shares."""

    def __post_init__(self) -> None:
        for name in ("per_asset", "total"):
            value = getattr(self, name)
            require(0 <= value < np.inf, f"position.{name}", value, "a number of 0 or more")


class Positions(NamedTuple):
    """weights[E,N] within the limits; cut[E]: others were asked for (`CUT_SLACK`)."""

    weights: Floats
    cut: Bools


def limit_positions(target: Floats, settings: PositionSettings, scale: Floats) -> Positions:
    """Bring target[E,N] within the limits times scale[E] (`CvarVerdict.scale`).

    Each asset is cut to its limit first; if together they are still too many, all shrink alike.
    """
    n_books, _ = target.shape
    require_shape("scale", scale, (n_books,))
    _require_finite("target", target)
    most = (settings.per_asset * scale)[:, None]
    weights = np.clip(target, -most, most)
    exposure = np.abs(weights).sum(axis=1)
    shrink = _fraction(settings.total * scale, exposure)
    weights = weights * shrink[:, None]
    cut = np.abs(weights - target).max(axis=1, initial=0.0) > CUT_SLACK
    return Positions(weights, np.asarray(cut))


@dataclass(frozen=True, slots=True)
class HaltSettings:
    """When trading halts, and for how long."""

    limit: float = 0.25
    """Halted above this share lost since the peak."""
    cooldown: int | None = 20
    """Bars in cash; None: until `PortfolioHalt.resume` is called."""

    def __post_init__(self) -> None:
        require(0 < self.limit < 1, "halt.limit", self.limit, "a share between 0 and 1")
        require(
            self.cooldown is None or self.cooldown >= 1,
            "halt.cooldown",
            self.cooldown,
            "at least 1 bar, or none to wait for a person",
        )


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
    REMEMBERED = ("peak", "halted", "age", "asked")

    def __init__(self, n_books: int, settings: HaltSettings) -> None:
        self.settings = settings
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
        if self.settings.cooldown is not None:
            due |= self._age >= self.settings.cooldown
        resumed_now = halted & due & ~broken & (equity > 0.0)
        self._peak[resumed_now] = -np.inf
        self._peak[:] = np.maximum(self._peak, np.where(broken, -np.inf, equity))
        drawdown = below_peak(self._peak, equity)
        halted_now = ~halted & (broken | (drawdown > self.settings.limit))
        self._halted[:] = (halted & ~resumed_now) | halted_now
        self._asked &= self._halted
        return HaltVerdict(drawdown, self.halted, halted_now, resumed_now)

    def resume(self, which: Bools) -> None:
        """Let the halted books `which`[E] trade again from the next bar on."""
        self._asked |= expand_mask(which, self._halted.shape) & self._halted

    def restart(self, which: Bools) -> None:
        """Forget the past of the books `which`[E]."""
        chosen = expand_mask(which, self._halted.shape)
        self._peak[chosen] = -np.inf
        self._halted[chosen] = False
        self._age[chosen] = 0
        self._asked[chosen] = False

    def events(self, verdict: HaltVerdict, time: int, who: str = "portfolio") -> list[RiskEvent]:
        """What to log of a verdict."""
        limit = self.settings.limit
        return [
            RiskEvent(time, kind, who, float(verdict.drawdown[e]), limit, int(e))
            for happened, kind in (
                (verdict.halted_now, RiskKind.HALTED),
                (verdict.resumed_now, RiskKind.RESUMED),
            )
            for e in np.flatnonzero(happened)
        ]


@dataclass(frozen=True, slots=True)
class TurnoverSettings:
    """How much may be traded, two-way, in multiples of the book's value."""

    per_bar: float = 2.0
    """At one bar; 2 exchanges everything."""
    per_window: float = 20.0
    window: int = 20
    """Bars, this one included."""

    def __post_init__(self) -> None:
        for name in ("per_bar", "per_window"):
            value = getattr(self, name)
            require(value > 0, f"turnover.{name}", value, "a number above 0")
        require(self.window >= 1, "turnover.window", self.window, "at least 1 bar")


class Turnover(NamedTuple):
    """What remains of a change of weights.

    weights[E,N]: as far towards the target as may be; share[E]: of the way
    wanted, traded[E]: turnover of the whole way, and of that part
    allowed[E]: what the limits left for this bar; cut[E]: less was traded than wanted (`CUT_SLACK`)
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
    REMEMBERED = ("traded",)

    def __init__(self, n_books: int, settings: TurnoverSettings) -> None:
        self.settings = settings
        self.slots = settings.window
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
        left = self.settings.per_window - self._traded.sum(axis=0)
        allowed = np.clip(left, 0.0, self.settings.per_bar)
        change = target - current
        wanted = np.abs(change).sum(axis=1)
        share = np.where(exempt, 1.0, _fraction(allowed, wanted))
        # A whole way ends at the target itself, not at a rounding of it.
        weights = np.where((share == 1.0)[:, None], target, current + share[:, None] * change)
        traded = share * wanted
        self._traded[self.cursor] = traded
        self._advance()
        return Turnover(weights, share, wanted, traded, allowed, wanted - traded > CUT_SLACK)

    def restart(self, which: Bools) -> None:
        """Forget the past of the books `which`[E]."""
        self._traded[:, expand_mask(which, self._traded.shape[1:])] = 0.0

    def events(self, turnover: Turnover, time: int, who: str = "portfolio") -> list[RiskEvent]:
        """What to log: every bar at which less was traded than wanted."""
        logged = []
        for e in np.flatnonzero(turnover.cut):
            wanted, allowed = float(turnover.wanted[e]), float(turnover.allowed[e])
            values = {"share": float(turnover.share[e])}
            logged.append(
                RiskEvent(time, RiskKind.TURNOVER_CUT, who, wanted, allowed, int(e), values)
            )
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
