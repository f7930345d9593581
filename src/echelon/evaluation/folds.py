"""Folds of a walk-forward: windows of time that move through the data, by the calendar.

    fold 2008   |------- train -------|p|-- valid --|e|- test -|
    fold 2009           |------- train -------|p|-- valid --|e|- test -|

1. Test windows tile the calendar, one beginning where the one before ends.
2. Before each lies its validation window, before that its train window.
3. `purge_bars` (p) at the end of train and `embargo_bars` (e) at the end of validation belong to
   no window.

Why p and e are short. Purging and embargo come from cross-validation (López de Prado 2018), where
training data lie on both sides of the test window. Here nothing is ever trained on what follows it.
A reward reaches one bar ahead, so one bar is dropped between train and validation. And volatility
clusters, so that what was chosen by the last days of validation looks better than it should on the
first of the test: a trading week is dropped between them. That features look *back* into earlier
windows is no leak: that past is known on the day, in live trading too.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np

from echelon.config.tree import DateSpan, SplitConfig, WalkForwardConfig
from echelon.errors import ConfigError, DataError
from echelon.types import Times

_MONTHS = {"year": 12, "month": 1}
_REST = timedelta(days=10)
"""A window whose first or last days have no bars is whole all the same, up to this: markets rest
at new year and in golden weeks."""
_LEAST = 2
"""Bars of a window: one to decide on and one to be marked at."""


@dataclass(frozen=True)
class FoldBars:
    """How many bars each window of a fold has."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True)
class Fold:
    """One train, validation and test window.

    name: the calendar units of the test window, `2008`, `2008-03` or `2008..2009`
    train, valid, test: days of the first and the last bar; assets: symbols that trade in it
    partial: the test window is shorter than asked for, because data or `last_test` end in it
    """

    name: str
    train: DateSpan
    valid: DateSpan
    test: DateSpan
    bars: FoldBars
    partial: bool = False
    assets: tuple[str, ...] = ()

    @property
    def split(self) -> SplitConfig:
        """The windows as a configuration has them."""
        return SplitConfig(train=self.train, valid=self.valid, test=self.test)


def plan_folds(config: WalkForwardConfig, times: Times) -> tuple[Fold, ...]:
    """The folds that fit bars at `times`[T]; raises where there is none."""
    days = times.astype("datetime64[D]")
    unit, test = _MONTHS[config.unit], _first_test(config, days)
    form = "%Y" if config.unit == "year" else "%Y-%m"
    folds: list[Fold] = []
    while not (folds and folds[-1].partial):
        valid, end = test - config.valid * unit, test + config.test * unit
        rows = _rows(config, days, (valid - config.train * unit, valid, test, end))
        last = _day(end) - timedelta(days=1)
        partial = last - days[-1].astype(date) > _REST
        partial |= config.last_test is not None and last > config.last_test
        if partial and not (config.partial and len(rows["test"]) >= _LEAST):
            break
        name = "..".join(dict.fromkeys(_day(month).strftime(form) for month in (test, end - 1)))
        for window, bars in rows.items():
            if len(bars) < _LEAST:
                raise ConfigError(
                    f"walk-forward fold {name}: its {window} window has {len(bars)} bars, and "
                    f"needs {_LEAST} at least. Lengthen walk_forward.{window} "
                    f"({getattr(config, window)} {config.unit}), or drop fewer bars (purge_bars "
                    f"{config.purge_bars}, embargo_bars {config.embargo_bars})."
                )
        spans = {w: (days[r.start].item(), days[r.stop - 1].item()) for w, r in rows.items()}
        counts = FoldBars(**{window: len(r) for window, r in rows.items()})
        folds.append(Fold(name, **spans, bars=counts, partial=partial))
        test = end
    if not folds:
        raise DataError(_no_fold(config, days))
    return tuple(folds)


def _first_test(config: WalkForwardConfig, days: Times) -> int:
    """Month of the first test window: after a whole train and validation window, and as asked."""
    unit = _MONTHS[config.unit]
    begin = days[0].astype(date)
    start = _month(begin) // unit * unit
    if begin - _day(start) > _REST:
        start += unit
    test = start + (config.train + config.valid) * unit
    if config.first_test is not None:
        asked = _month(config.first_test) + (config.first_test.day > 1)
        test = max(test, -(-asked // unit) * unit)
    return test


def _rows(
    config: WalkForwardConfig, days: Times, months: tuple[int, int, int, int]
) -> dict[str, range]:
    """Rows of the bars in each window. months: in which they begin, and the one after the last"""
    train, valid, test, end = (int(np.searchsorted(days, np.datetime64(_day(m)))) for m in months)
    if config.scheme == "expanding":
        train = 0
    if config.last_test is not None:
        last = np.datetime64(config.last_test)
        end = min(end, int(np.searchsorted(days, last, side="right")))
    return {
        "train": range(train, _before(days, train, valid, config.purge_bars)),
        "valid": range(valid, _before(days, valid, test, config.embargo_bars)),
        "test": range(test, end),
    }


def _before(days: Times, start: int, stop: int, bars: int) -> int:
    """End of the window [start, stop) with that many bars dropped from it, by whole days."""
    if stop - start <= bars:
        return start
    return int(np.searchsorted(days, days[stop - bars])) if bars else stop


def _no_fold(config: WalkForwardConfig, days: Times) -> str:
    first, last = (days[k].astype(date) for k in (0, -1))
    test = _first_test(config, days)
    end = _day(test + config.test * _MONTHS[config.unit]) - timedelta(days=1)
    asked = (
        f"walk_forward asks for {config.train} + {config.valid} + {config.test} {config.unit}s to "
        f"train, validate and test"
    )
    given = {name: getattr(config, name) for name in ("first_test", "last_test")}
    bounds = [f"{name}={day}" for name, day in given.items() if day is not None]
    if bounds:
        asked += f", tests within {' and '.join(bounds)}"
    remedy = "Shorten the windows, count them in months (unit: month), or use more data"
    if not config.partial:
        remedy += ", or allow a test window that the data end in (partial: true)"
    return (
        f"no fold fits: the data run from {first} to {last}, and {asked}. The first test window "
        f"would be {_day(test)} to {end}. {remedy}."
    )


def _month(day: date) -> int:
    return day.year * 12 + day.month - 1


def _day(month: int) -> date:
    return date(month // 12, month % 12 + 1, 1)
