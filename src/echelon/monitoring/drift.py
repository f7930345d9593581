"""Drift: whether what happens live is still what the backtest led to expect.

The bundle holds what its policy did over the validation window. Live, each bar adds to it: what the
book earned, traded, paid and was filled. `DriftTests` bets against the hypothesis that this goes on
as it was; money made by such bets is evidence that it does not (an e-process; Shafer and Vovk 2019,
Waudby-Smith and Ramdas 2024).

1. A test is of one quantity and one direction. Its hypothesis is a mean that is no worse than the
   95 % confidence bound of the validation window's: an estimate is not held to be the truth.
2. An observation is of so many bars that one says little about the next; a ratio, as cost per value
   traded, is the ratio of their sums. It is clipped to an interval and scaled to y in [0, 1], where
   1 is bad, as the reference was. A bet of size b multiplies money by 1 + b (y − y0), which the
   hypothesis E[y | past] ≤ y0 makes no more on average. Several sizes share the money.
3. Every bar puts in new money: 1 for a year of bars. So evidence is collected from every start on
   (a Shiryaev–Roberts sum, the e-detector of Shin, Ramdas and Rinaldo 2024), and years of good
   trading do not have to be lost first. Money plus `limit` for every alarm, minus the years gone, is
   a supermartingale when an alarm takes the money away: whenever one stops and looks, the expected
   number of false alarms is at most years / limit. Nothing has to be renewed.

With a limit of 8 tests / alarms per year, a difference of annual Sharpe ratios Δ takes about
2·ln(limit·252)/Δ² years to be seen: a Sharpe ratio of 1 that is gone, decades. Costs and fills take days.

Axes: `T` bars, `Q` quantities, `K` tests, `J` bet sizes; any axes before them are books of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from echelon.states import State
from echelon.types import Bools, Floats

QUANTITIES: Mapping[str, str] = {
    "return": "return of the book",
    "active": "return of the book less that of the market on what is invested",
    "turnover": "value traded, as a share of the equity",
    "cost": "commission, stamp duty and slippage of the value traded",
    "filled": "share of the orders that are filled whole",
    "slippage": "how much worse than at arrival fills are, as a share",
    "gap": "how far from arrival fills are either way, as a share",
}
"""Name → what it is; arrival is the close of the decision."""


class Test(NamedTuple):
    """A quantity and the direction that is bad. good, bad: standard deviations to clip at"""

    quantity: str
    sign: float
    good: float
    bad: float


TESTS = (
    Test("return", -1.0, 4.0, 4.0),
    Test("active", -1.0, 4.0, 4.0),
    Test("turnover", 1.0, 2.0, 6.0),
    Test("turnover", -1.0, 2.0, 6.0),
    Test("cost", 1.0, 2.0, 6.0),
    Test("filled", -1.0, 2.0, 6.0),
    Test("slippage", 1.0, 4.0, 4.0),
    Test("gap", 1.0, 2.0, 6.0),
)
_BETS = np.array([0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.95])
"""Sizes, as a share of the largest that cannot lose more than there is."""
_CONFIDENCE = 0.95
_LEAST = 8
"""Observations that a test needs."""
_DEPENDENCE = 0.1
"""Correlation of an observation with the next that is little."""
_LEAST_SPREAD = 0.05
"""Standard deviation, as a share of the mean: a rate that never varied may do so a little."""

Pairs = Floats
"""[…,Q,2]: of each quantity what is added up, and what the sum is divided by."""


def pairs_of_backtest(
    value: Floats, exposure: Floats, market: Floats, fills: Mapping[str, Floats], whole: Bools
) -> Pairs:
    """[S,Q,2] of S steps of a book, each from one decision to the next.

    value[S+1]; exposure[S] invested at the decision, market[S] return of the market; fills: arrays
    [S,N] shares, price, cost, arrival and asked (whether there was an order); whole[S,N]
    """
    shares, price, arrival = fills["shares"], fills["price"], fills["arrival"]
    base = np.abs(shares) * arrival
    moved = np.where(shares != 0.0, shares * (price - arrival), 0.0)
    pairs = np.ones((len(value) - 1, len(QUANTITIES), 2))
    returns = value[1:] / value[:-1] - 1.0
    traded = (np.abs(shares) * price).sum(axis=1)
    pairs[:, 0, 0], pairs[:, 1, 0] = returns, returns - exposure * market
    pairs[:, 2, 0] = traded / value[:-1]
    pairs[:, 3] = np.stack([fills["cost"].sum(axis=1), traded], axis=1)
    pairs[:, 4] = np.stack([whole.sum(axis=1), fills["asked"].sum(axis=1)], axis=1)
    pairs[:, 5] = np.stack([moved.sum(axis=1), base.sum(axis=1)], axis=1)
    pairs[:, 6] = np.stack([np.abs(moved).sum(axis=1), base.sum(axis=1)], axis=1)
    return pairs


def market_returns(growth: Floats, shown: Bools) -> Floats:
    """[T−1] mean return of the symbols that were there before, of growth[T,N] and shown[T,N]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        returns = growth[1:] / growth[:-1] - 1.0
    counted = shown[:-1] & np.isfinite(returns)
    total = np.where(counted, returns, 0.0).sum(axis=1)
    return np.asarray(total / np.maximum(counted.sum(axis=1), 1))


def observe(pairs: Floats, bars: int) -> Floats:
    """Ratios of the sums of pairs[T,2] over as many bars each, or more until there is something."""
    sums, ratios, n = np.zeros(2), [], 0
    for pair in pairs:
        sums, n = sums + pair, n + 1
        if n >= bars and sums[1] > 0.0:
            ratios.append(sums[0] / sums[1])
            sums, n = np.zeros(2), 0
    return np.array(ratios)


class Expectation(NamedTuple):
    """What the validation window says of each test[K]; bars 0: too little to test it.

    bars: of an observation; expected: its mean; bound: worst mean of the hypothesis; low, high:
    what is clipped at
    """

    bars: Floats
    expected: Floats
    bound: Floats
    low: Floats
    high: Floats

    @classmethod
    def fit(cls, pairs: Pairs, periods_per_year: float) -> Expectation:
        """Of pairs[T,Q,2] of the validation window."""
        day = max(1, round(periods_per_year / 252.0))
        sizes = sorted({1, 5, 20, day, 5 * day, 20 * day})
        return cls(*np.array([_expect(pairs, test, sizes) for test in TESTS]).T)

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Expectation:
        """[5,K], as saved; raises ValueError where it is not that."""
        if array.shape != (len(cls._fields), len(TESTS)) or not np.isfinite(array).all():
            raise ValueError(f"drift: expected finite numbers [{len(cls._fields)},{len(TESTS)}]")
        made = cls(*array.astype(np.float64))
        on = made.bars > 0.0
        if (made.bars < 0.0).any() or not (made.low < made.high)[on].all():
            raise ValueError("drift: bars must be 0 or more, low below high")
        return made


def _expect(pairs: Pairs, test: Test, sizes: Sequence[int]) -> tuple[float, ...]:
    own = pairs[:, list(QUANTITIES).index(test.quantity)]
    chosen, bars = np.zeros(0), 0
    for size in sizes:
        ratios = observe(own, size)
        if len(ratios) < _LEAST:
            break
        chosen, bars = ratios, size
        if abs(_next_correlation(ratios)) <= _DEPENDENCE:
            break
    if not bars:
        return (0.0,) * len(Expectation._fields)
    spread = max(float(chosen.std(ddof=1)), _LEAST_SPREAD * abs(float(chosen.mean())), 1e-9)
    worse, better = test.bad * spread, test.good * spread
    below, above = (better, worse) if test.sign > 0.0 else (worse, better)
    low, high = float(chosen.mean()) - below, float(chosen.mean()) + above
    clipped = np.clip(chosen, low, high)
    error = float(clipped.std(ddof=1)) / len(clipped) ** 0.5
    slack = float(stdtrit(len(clipped) - 1, _CONFIDENCE)) * error
    mean = float(clipped.mean())
    return float(bars), mean, mean + test.sign * slack, low, high


def _next_correlation(series: Floats) -> float:
    """Of a series with its next values, less what chance gives."""
    centred = series - series.mean()
    total = float(centred @ centred)
    if total <= 0.0:
        return 0.0
    found = float(centred[1:] @ centred[:-1]) / total
    return np.sign(found) * max(0.0, abs(found) - 1.0 / len(series) ** 0.5)


class DriftAlarm(NamedTuple):
    """That a test has its evidence."""

    test: Test
    mean: float  # of the observation that completed it
    expected: float
    evidence: float
    limit: float


class DriftTests:
    """The tests of one book, or of books[…] side by side; see the module's text."""

    def __init__(
        self,
        expectation: Expectation,
        per_year: float,
        periods_per_year: float,
        books: tuple[int, ...] = (),
    ) -> None:
        """per_year: false alarms, of all tests together."""
        self.expectation = expectation
        self.on = expectation.bars > 0.0
        self.limit = max(int(self.on.sum()), 1) / per_year
        sign = np.array([test.sign for test in TESTS])
        width = np.where(self.on, expectation.high - expectation.low, 1.0)
        self._zero = np.where(sign > 0.0, expectation.low, expectation.high)
        self._scale = sign / width
        self._middle = np.clip((expectation.bound - self._zero) * self._scale, 0.01, 0.95)
        self._bets = _BETS / self._middle[:, None]
        self._bars = np.where(self.on, expectation.bars, np.inf)
        weight = np.where(self.on, expectation.bars, 0.0) / (periods_per_year * len(_BETS))
        self._weight = weight[:, None]
        self._index = np.array([list(QUANTITIES).index(test.quantity) for test in TESTS])
        k = len(TESTS)
        self.sums = np.zeros((*books, k, 2))
        self.counts = np.zeros((*books, k))
        self.money = np.zeros((*books, k, len(_BETS)))
        self.last = np.zeros((*books, k))
        """The last observations."""

    @property
    def evidence(self) -> Floats:
        """[…,K] money of each test; an alarm is at `limit`."""
        return np.asarray(self.money.sum(axis=-1))

    def step(self, pairs: Pairs) -> Bools:
        """Which tests[…,K] have their evidence with the bar pairs[…,Q,2]; these begin anew."""
        self.sums += pairs[..., self._index, :]
        self.counts += 1.0
        done = (self.counts >= self._bars) & (self.sums[..., 1] > 0.0)
        if not done.any():
            return done
        np.divide(self.sums[..., 0], self.sums[..., 1], out=self.last, where=done)
        y = np.clip((self.last - self._zero) * self._scale, 0.0, 1.0) - self._middle
        grown = (self.money + self._weight) * (1.0 + self._bets * y[..., None])
        np.copyto(self.money, grown, where=done[..., None])
        self.sums[done] = 0.0
        self.counts[done] = 0.0
        passed = done & (self.evidence >= self.limit)
        return np.asarray(passed)

    def begin_anew(self, passed: Bools) -> None:
        """Take the money of tests[…,K] that gave an alarm."""
        self.money[passed] = 0.0

    def state(self) -> State:
        """All that the next step depends on."""
        return {name: getattr(self, name).copy() for name in _STATE}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave; raises ValueError where it is other tests'."""
        for name in _STATE:
            if state[name].shape != getattr(self, name).shape:
                raise ValueError(f"drift: {name} is of other tests")
            getattr(self, name)[...] = state[name]


_STATE = ("sums", "counts", "money", "last")
