"""Replace the future of days by noise, and see whether anything before it changes.

What an agent decides at a tick may depend on the ticks before it and on days before; nothing else.
`scramble_after` makes days that agree up to a moment and then go another way; whatever is
computed from both must agree up to that moment, too.

Axes: `D` days, `T` ticks of a day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from echelon.errors import LeakageError
from echelon.execution.days import Days
from echelon.execution.features import PublicFeatures
from echelon.rng import stream
from echelon.types import Bools


def scramble_after(days: Days, day: int, tick: int, seed: int = 0) -> Days:
    """Days that are the same up to the end of `tick` of `day`, and noise after that.

    After it come the day's later ticks, and those of any symbol on the same date, and all later
    dates.
    """
    rng = stream(seed, "execution", "scrambled", day, tick)
    later = ~_until(days, day, tick)
    price = np.where(later, np.exp(rng.normal(3.0, 1.0, days.shape)), 1.0)
    price[later & (rng.random(days.shape) < 0.1)] = np.nan
    volume = np.floor(rng.exponential(1e4, days.shape)) * (rng.random(days.shape) > 0.1)
    return replace(
        days,
        buy=np.where(later, price * 1.001, days.buy),
        sell=np.where(later, price, days.sell),
        known=np.where(later, price, days.known),
        volume=np.where(later, np.where(np.isnan(price), 0.0, volume), days.volume),
    )


def check_causal(
    compute: Callable[[Days], PublicFeatures], days: Days, *, cuts: int = 4, seed: int = 0
) -> None:
    """Refuse features that change when what comes after them does.

    compute: makes them from days, as `public_features` does; it is called `cuts` + 1 times
    """
    true = compute(days)
    rng = stream(seed, "execution", "cuts")
    for _ in range(cuts):
        day, tick = (int(rng.integers(n)) for n in days.shape)
        other = compute(scramble_after(days, day, tick, seed))
        shown = _until(days, day, tick)
        whole = days.dates <= days.dates[day]  # whose yesterday is over
        for f, name in enumerate(true.names):
            same_today = _same(true.today[shown, f], other.today[shown, f])
            same_before = _same(true.yesterday[whole, :, f], other.yesterday[whole, :, f])
            if not (same_today and same_before):
                raise LeakageError(
                    f"execution feature {name!r} changes before the end of tick {tick} of "
                    f"{days.name(day)} when only what comes later does. Compute it from ticks up "
                    "to now and from earlier days."
                )


def _until(days: Days, day: int, tick: int) -> Bools:
    """[D,T] what is over as `tick` of `day` ends."""
    before = days.dates < days.dates[day]
    same = days.dates == days.dates[day]
    return np.asarray(before[:, None] | (same[:, None] & (np.arange(days.shape[1]) <= tick)))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one, other, equal_nan=True))
