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
   trading do not have to be lost first. An alarm takes the money away. Money, plus `limit` for
   every alarm, minus the years gone, is a supermartingale: whenever one stops and looks, the
   expected number of false alarms is at most years / limit, of all tests together what is stated.
   Nothing has to be renewed, at no turn of the year.

A difference of annual Sharpe ratios Δ takes about 2·ln(252·limit)/Δ² years to be seen: an edge with
a Sharpe ratio of 1 that is gone, decades, and no test can be much quicker. Costs and fills: days.

Axes: `T` bars, `Q` quantities, `K` tests, `J` bet sizes; `S` steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
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
_LEAST_MIDDLE = 0.05
"""Of y0, and of 1 − y0: a bound beyond what is clipped at is no test."""
_LEAST = 8
"""Observations that a test needs."""
_INDEPENDENT = 0.7
"""Part of the variance over many bars that observations must show when taken as independent."""
_LEAST_SLACK = 0.1
"""Standard deviations between mean and bound, where the mean is known well."""
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


@njit(cache=True, nogil=True, error_model="numpy")
def market_return(before: Floats, now: Floats, shown: Bools) -> float:
    """Mean return of the symbols that were shown[N] before, of their indices before[N], now[N]."""
    total, count = 0.0, 0
    for n in range(len(now)):
        earned = now[n] / before[n] - 1.0
        if shown[n] and math.isfinite(earned):
            total += earned
            count += 1
    return total / max(count, 1)


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
        sizes = sorted({1, 5, 20, 60, day, 5 * day, 20 * day, 60 * day})
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
    every = {size: ratios for size in sizes if len(ratios := observe(own, size)) >= _LEAST}
    if not every:
        return (0.0,) * len(Expectation._fields)
    # Of independent observations, the variance of a mean of b is 1/b of one's: as long as means of
    # more bars vary by more than that, observations depend on one another.
    first = next(iter(every.values()))
    least = max(_LEAST_SPREAD * abs(float(first.mean())), 1e-9)
    long_run = {size: size * float(ratios.var(ddof=1)) for size, ratios in every.items()}
    usual = _INDEPENDENT * max(long_run.values()) if first.std() > least else 0.0
    bars = next(size for size in every if long_run[size] >= usual)
    mean = float(every[bars].mean())
    spread = max(float(every[bars].std(ddof=1)), least)
    worse, better = test.bad * spread, test.good * spread
    below, above = (better, worse) if test.sign > 0.0 else (worse, better)
    low, high = mean - below, mean + above
    errors = [
        float(stdtrit(len(ratios) - 1, _CONFIDENCE) * ratios.std(ddof=1) / len(ratios) ** 0.5)
        for ratios in every.values()
    ]
    expected = float(np.clip(every[bars], low, high).mean())
    slack = max(*errors, _LEAST_SLACK * spread)
    return float(bars), expected, expected + test.sign * slack, low, high


class DriftTests:
    """The tests of one book; see the module's text."""

    def __init__(self, expectation: Expectation, per_year: float, periods_per_year: float) -> None:
        """per_year: false alarms, of all tests together."""
        self.expectation = expectation
        on = expectation.bars > 0.0
        self.limit = max(int(on.sum()), 1) / per_year
        sign = np.array([test.sign for test in TESTS])
        zero = np.where(sign > 0.0, expectation.low, expectation.high)
        scale = sign / np.where(on, expectation.high - expectation.low, 1.0)
        middle = np.clip((expectation.bound - zero) * scale, _LEAST_MIDDLE, 1.0 - _LEAST_MIDDLE)
        bars = np.where(on, expectation.bars, np.inf)
        weight = expectation.bars / (periods_per_year * len(_BETS))
        self._tests = np.stack([_QUANTITY, bars, zero, scale, middle, weight], axis=1)
        self.sums = np.zeros((len(TESTS), 2))
        self.counts = np.zeros(len(TESTS))
        self.money = np.zeros((len(TESTS), len(_BETS)))

    @property
    def evidence(self) -> Floats:
        """[K] money of each test; an alarm is at `limit`."""
        return np.asarray(self.money.sum(axis=-1))

    def step(self, pairs: Pairs) -> dict[int, float]:
        """Test → evidence, of those that have enough of it with the bar pairs[Q,2].

        Their money is taken: they start again.
        """
        most = _bet(pairs, self._tests, _BETS, self.sums, self.counts, self.money)
        if most < self.limit:
            return {}
        passed = np.flatnonzero(self.evidence >= self.limit).tolist()
        evidence = {k: float(self.money[k].sum()) for k in passed}
        self.money[passed] = 0.0
        return evidence

    def state(self) -> State:
        return {name: getattr(self, name).copy() for name in _STATE}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave; raises ValueError where it is other tests'."""
        for name in _STATE:
            if state[name].shape != getattr(self, name).shape:
                raise ValueError(f"drift: {name} is of other tests")
            getattr(self, name)[...] = state[name]


_STATE = ("sums", "counts", "money")
_QUANTITY = np.array([list(QUANTITIES).index(test.quantity) for test in TESTS], dtype=np.float64)


@njit(cache=True, nogil=True, error_model="numpy")
def _bet(
    pairs: Pairs, tests: Floats, bets: Floats, sums: Floats, counts: Floats, money: Floats
) -> float:
    """Take in a bar; the most evidence that any of the tests[K,6] has."""
    most = 0.0
    for k in range(len(tests)):
        quantity, bars, zero, scale, middle, weight = tests[k]
        sums[k] += pairs[int(quantity)]
        counts[k] += 1.0
        if counts[k] < bars or sums[k, 1] <= 0.0:
            continue
        y = min(max((sums[k, 0] / sums[k, 1] - zero) * scale, 0.0), 1.0)
        for j in range(len(bets)):
            money[k, j] = (money[k, j] + weight) * (1.0 + bets[j] / middle * (y - middle))
        sums[k] = 0.0
        counts[k] = 0.0
        most = max(most, money[k].sum())
    return most
