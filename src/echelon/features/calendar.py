"""When a bar is: day of the week, month and, for bars within the day, time of day.

Each goes round, so each is a sine and a cosine: December meets January. They are known before
the bar is and the same for all symbols, and a bar says them about itself alone; times are the
exchange's own. A day without a bar keeps what the last one said. Values lie in [−1, 1], so the
group is not scaled unless `normalization.include` names it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from echelon.features.base import Bars, Feature, Field, source_id
from echelon.types import Floats, Times

_DAY_US = 86_400_000_000


def calendar_features() -> tuple[Feature, ...]:
    """The whole set; the time of day needs a source whose bars have one."""
    return (
        _going_round("day_of_week", day_of_week),
        _going_round("month", month),
        _going_round("time_of_day", time_of_day, "time"),
    )


def day_of_week(times: Times) -> Floats:
    """Share of the week, in whole days: 0 on Mondays."""
    days = times.astype("datetime64[D]").astype(np.int64)
    # Day 0, 1970-01-01, was a Thursday.
    return np.asarray((days + 3) % 7 / 7.0)


def month(times: Times) -> Floats:
    """Share of the year, in whole months: 0 in January."""
    return np.asarray(times.astype("datetime64[M]").astype(np.int64) % 12 / 12.0)


def time_of_day(times: Times) -> Floats:
    """Share of the day: 0 at midnight, 0.5 at noon."""
    return np.asarray(times.astype("datetime64[us]").astype(np.int64) % _DAY_US / _DAY_US)


def _going_round(name: str, share: Callable[[Times], Floats], *needs: Field) -> Feature:
    """`{name}_sin` and `{name}_cos` of a `share` of a whole turn."""

    def compute(bars: Bars) -> Floats:
        angle = 2.0 * np.pi * share(bars.times)
        return np.column_stack([np.sin(angle), np.cos(angle)])

    return Feature(
        names=(f"{name}_sin", f"{name}_cos"),
        compute=compute,
        lookback=1,
        needs=frozenset(needs),
        group="calendar",
        source_id=source_id(__name__, parts=(name,)),
    )
