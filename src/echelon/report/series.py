"""Numbers a report shows, from the tables of backtests: pure functions, no drawing.

Long series are thinned by leaving rows out, never by averaging: what is shown at the end of a
day, week or month is what the book was worth then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from echelon.envs.act import Action
from echelon.types import Floats, Ints, Times

Period = Literal["bar", "day", "week", "month", "quarter", "year"]
Index = NDArray[np.intp]

_PERIODS: dict[Period, str] = dict(
    zip(get_args(Period), ("", "1d", "1w", "1mo", "1q", "1y"), strict=True)
)
"""The shortest first, as polars writes them."""
_MOVED = 0.001
"""A target weight this far from the holding, as a share of the book, is a wish to trade."""


class MonthlyReturns(NamedTuple):
    """Returns by month: years[Y], months[Y,12] (NaN where the span has none), totals[Y]."""

    years: tuple[int, ...]
    months: Floats
    totals: Floats


class PeriodShares(NamedTuple):
    """Shares[P,C] of C kinds in each period; starts[P]: when they begin."""

    starts: Times
    shares: Floats


def period_starts(times: Times, period: Period) -> Times:
    """[T] when the period of each bar begins, by the calendar; a week begins on Monday."""
    if period == "bar":
        return times
    starts = pl.Series(times.astype("datetime64[us]")).dt.truncate(_PERIODS[period])
    return starts.to_numpy().astype("datetime64[D]")


def shortest_period(times: Times, most: int) -> Period:
    """The shortest period of which `times`[T] has at most `most`; years if none has."""
    for period in _PERIODS:
        if len(last_rows(times, period)) <= most:
            return period
    return "year"


def last_rows(times: Times, period: Period) -> Index:
    """Row of each period's last bar."""
    starts = period_starts(times, period)
    return np.flatnonzero(np.append(starts[1:] != starts[:-1], len(starts) > 0))


def rows_to_show(times: Times, most: int, also: Sequence[int] = ()) -> Index:
    """Rows to show of a long series: the first, the last of each period, and the rows `also`."""
    rows = last_rows(times, shortest_period(times, most))
    return np.unique(np.concatenate([[0], rows, np.asarray(also, dtype=np.intp)])).astype(np.intp)


def monthly_returns(times: Times, value: Floats) -> MonthlyReturns:
    """Returns by month and by year of value[T]."""
    months = times.astype("datetime64[M]").astype(np.int64)
    years = tuple(range(int(months[0] // 12) + 1970, int(months[-1] // 12) + 1971))
    table = np.full((len(years), 12), np.nan)
    rows = last_rows(times, "month")
    worth = value[rows]
    before = np.concatenate([value[:1], worth[:-1]])
    at = months[rows] - (years[0] - 1970) * 12
    # After ruin there is nothing to gain or lose.
    alive = before > 0
    table[at // 12, at % 12] = np.where(alive, worth / np.where(alive, before, 1.0) - 1.0, 0.0)
    # A span that begins on a month's last bar has no return in that month yet.
    if rows[0] == 0:
        table[at[0] // 12, at[0] % 12] = np.nan
    known = np.isfinite(table)
    growth = np.where(known, 1.0 + table, 1.0).prod(axis=1)
    totals = np.where(known.any(axis=1), growth - 1.0, np.nan)
    return MonthlyReturns(years, table, totals)


def mean_monthly(parts: Sequence[MonthlyReturns]) -> MonthlyReturns:
    """Mean over books of the same span, of each month and of each year."""
    months = np.mean([part.months for part in parts], axis=0)
    totals = np.mean([part.totals for part in parts], axis=0)
    return MonthlyReturns(parts[0].years, months, totals)


def decisions(actions: pl.DataFrame, weights: pl.DataFrame) -> Ints:
    """[S,N] by `Action`: as decided, or what target weights asked for compared with holdings."""
    decided = actions.drop("time").to_numpy()
    if np.issubdtype(decided.dtype, np.integer):
        return decided.astype(np.int64)
    held = weights.drop("time").to_numpy()[: len(decided)]
    change = np.where(np.isnan(decided), 0.0, decided - held)
    moved = [change > _MOVED, change < -_MOVED]
    return np.select(moved, [int(Action.BUY), int(Action.SELL)], int(Action.HOLD))


def choice_shares(times: Times, chosen: Ints, kinds: int, period: Period) -> PeriodShares:
    """Shares of the numbers below `kinds` among chosen[S,N], by period of times[S]."""
    starts, group = np.unique(period_starts(times, period), return_inverse=True)
    shares = np.zeros((len(starts), kinds))
    for kind in range(kinds):
        np.add.at(shares[:, kind], group, (chosen == kind).mean(axis=1))
    return PeriodShares(starts, shares / np.bincount(group)[:, None])


def largest_weights(weights: Floats, most: int) -> tuple[Index, Index]:
    """Columns of weights[T,N] to show by themselves, largest mean first, and those to sum."""
    mean = weights.mean(axis=0)
    order = np.argsort(-mean, kind="stable")
    held = order[mean[order] > 0]
    shown = held if len(held) <= most else held[: most - 1]
    return shown, held[len(shown) :]


class Rejections(NamedTuple):
    """Orders of a book, those filled whole or with all the cash, and by reason the others."""

    orders: int
    whole: int
    by_reason: dict[str, int]


def rejections(blotter: pl.DataFrame) -> Rejections:
    """Count a blotter's orders by why they were not filled, or not whole.

    Target weights ask for all of the money, so fees and the way from the decision to the fill have
    every buy scaled by a hair: who has spent all the cash there was is filled, not cut.
    """
    spent = (pl.col("not_filled") == "cash") & (pl.col("shares") > 0)
    cut = blotter.filter(pl.col("not_filled").is_not_null() & ~spent)
    counts = cut["not_filled"].value_counts().sort("not_filled")
    by_reason = {str(name): int(n) for name, n in counts.iter_rows()}
    return Rejections(len(blotter), len(blotter) - sum(by_reason.values()), by_reason)
