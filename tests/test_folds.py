"""Folds of a walk-forward, checked by hand against the calendar."""

from __future__ import annotations

from datetime import date
from itertools import pairwise

import numpy as np
import pytest

from echelon.config import load_config
from echelon.config.tree import WalkForwardConfig
from echelon.data.calendars import sessions
from echelon.errors import ConfigError, DataError, EchelonError
from echelon.evaluation.folds import Fold, FoldBars, plan_folds
from echelon.types import Times


def _days(first: str, last: str) -> Times:
    """Every day, weekends too, so that bars can be counted by hand."""
    days = np.arange(np.datetime64(first), np.datetime64(last) + 1)
    return days.astype("datetime64[us]")


def _plan(times: Times, **changes: object) -> tuple[Fold, ...]:
    plain = {"first_test": None, "last_test": None, "purge_bars": 0, "embargo_bars": 0}
    return plan_folds(WalkForwardConfig.model_validate(plain | changes), times)


def _day(text: str) -> date:
    return date.fromisoformat(text)


def _spans(fold: Fold) -> list[tuple[str, str]]:
    return [(str(a), str(b)) for a, b in (fold.train, fold.valid, fold.test)]


def test_rolling_windows_have_one_length_and_follow_one_another() -> None:
    folds = _plan(_days("2001-01-01", "2006-12-31"), train=2, valid=1, test=1)
    assert [f.name for f in folds] == ["2004", "2005", "2006"]
    assert _spans(folds[0]) == [
        ("2001-01-01", "2002-12-31"),
        ("2003-01-01", "2003-12-31"),
        ("2004-01-01", "2004-12-31"),
    ]
    assert _spans(folds[2])[0] == ("2003-01-01", "2004-12-31")
    assert folds[0].bars == FoldBars(730, 365, 366)
    assert not any(f.partial for f in folds)


def test_expanding_windows_all_begin_with_the_data() -> None:
    times = _days("2000-05-17", "2006-12-31")
    folds = _plan(times, scheme="expanding", train=2, valid=1)
    # The part of 2000 is trained on too, but two whole years must lie before the validation.
    assert [f.name for f in folds] == ["2004", "2005", "2006"]
    assert [f.train for f in folds] == [
        (_day("2000-05-17"), _day(f"{year}-12-31")) for year in (2002, 2003, 2004)
    ]


def test_purge_and_embargo_take_bars_off_the_end_of_the_window_before() -> None:
    (fold,) = _plan(
        _days("2001-01-01", "2004-12-31"), train=2, valid=1, purge_bars=3, embargo_bars=10
    )
    assert _spans(fold) == [
        ("2001-01-01", "2002-12-28"),
        ("2003-01-01", "2003-12-21"),
        ("2004-01-01", "2004-12-31"),
    ]
    assert fold.bars == FoldBars(727, 355, 366)


def test_dropped_bars_are_sessions_not_days() -> None:
    times = sessions("XNYS", date(2015, 1, 1), date(2018, 12, 31))
    (fold,) = _plan(times, train=2, valid=1, purge_bars=1, embargo_bars=5)
    assert _spans(fold) == [
        ("2015-01-02", "2016-12-29"),
        ("2017-01-03", "2017-12-21"),  # left out: 22, 26, 27, 28 and 29 December
        ("2018-01-02", "2018-12-31"),
    ]


def test_bars_of_a_day_are_dropped_together() -> None:
    days = _days("2001-01-01", "2001-04-30")
    bars = (days[:, None] + np.arange(9, 13).astype("timedelta64[h]")).ravel()  # four a day
    (fold,) = _plan(bars, unit="month", train=2, valid=1, purge_bars=1, embargo_bars=5)
    assert fold.train == (_day("2001-01-01"), _day("2001-02-27"))
    assert fold.valid == (_day("2001-03-01"), _day("2001-03-29"))
    assert fold.bars == FoldBars(58 * 4, 29 * 4, 30 * 4)


def test_months_cross_the_year_and_several_make_one_window() -> None:
    folds = _plan(_days("2001-07-01", "2002-08-31"), unit="month", train=4, valid=1, test=3)
    assert [f.name for f in folds] == ["2001-12..2002-02", "2002-03..2002-05", "2002-06..2002-08"]
    assert _spans(folds[1]) == [
        ("2001-10-01", "2002-01-31"),
        ("2002-02-01", "2002-02-28"),
        ("2002-03-01", "2002-05-31"),
    ]
    single = _plan(_days("2001-07-01", "2002-01-31"), unit="month", train=4, valid=1)
    assert [f.name for f in single] == ["2001-12", "2002-01"]


def test_several_years_are_named_by_their_first_and_last() -> None:
    folds = _plan(_days("2001-01-01", "2009-12-31"), train=2, valid=1, test=2)
    assert [f.name for f in folds] == ["2004..2005", "2006..2007", "2008..2009"]


def test_year_counts_as_whole_where_only_holidays_are_missing() -> None:
    folds = _plan(_days("2001-01-08", "2005-12-24"), train=2, valid=1)
    assert [f.name for f in folds] == ["2004", "2005"]
    assert folds[0].train[0] == _day("2001-01-08")
    assert not folds[1].partial
    later = _plan(_days("2001-01-15", "2005-12-31"), train=2, valid=1)
    assert [f.name for f in later] == ["2005"]


def test_last_window_may_be_partial_only_if_told() -> None:
    times = _days("2001-01-01", "2005-06-30")
    assert [f.name for f in _plan(times, train=2, valid=1)] == ["2004"]
    folds = _plan(times, train=2, valid=1, partial=True)
    assert [(f.name, f.partial) for f in folds] == [("2004", False), ("2005", True)]
    assert folds[1].test == (_day("2005-01-01"), _day("2005-06-30"))
    asked = _plan(times, train=2, valid=1, partial=True, last_test=_day("2005-03-31"))
    assert asked[1].test == (_day("2005-01-01"), _day("2005-03-31"))
    for last in ("2004-12-31", "2005-01-01"):  # one bar is not enough to trade on
        whole = _plan(_days("2001-01-01", last), train=2, valid=1, partial=True)
        assert [f.name for f in whole] == ["2004"]


def test_tests_lie_between_the_days_asked_for() -> None:
    times = _days("2001-01-01", "2009-12-31")
    span = {"first_test": _day("2005-03-01"), "last_test": _day("2008-06-30")}
    assert [f.name for f in _plan(times, train=2, valid=1, **span)] == ["2006", "2007"]
    months = _plan(times, unit="month", train=2, valid=1, **span)
    assert (months[0].name, months[-1].name) == ("2005-03", "2008-06")
    within = _plan(times, unit="month", train=2, valid=1, first_test=_day("2005-03-02"))
    assert within[0].name == "2005-04"


def test_default_is_a_test_year_at_a_time_from_2008_to_2025() -> None:
    config = load_config().walk_forward
    folds = plan_folds(config, sessions("XNYS", date(1990, 1, 2), date(2026, 6, 30)))
    assert [f.name for f in folds] == [str(year) for year in range(2008, 2026)]
    us = plan_folds(config, sessions("XNYS", date(2000, 1, 3), date(2018, 12, 31)))
    assert [f.name for f in us] == [str(year) for year in range(2008, 2019)]
    assert us[0].train == (date(2000, 1, 3), date(2005, 12, 29))


def test_windows_of_a_fold_share_no_day_and_stand_in_order() -> None:
    times = sessions("XSHG", date(2010, 1, 4), date(2020, 12, 31))
    for changes in ({}, {"unit": "month", "train": 9, "valid": 2}, {"scheme": "expanding"}):
        folds = _plan(times, purge_bars=1, embargo_bars=5, **({"train": 3} | changes))
        for fold, after in pairwise(folds):
            assert fold.split.test == fold.test  # the configuration refuses overlap
            assert fold.test[1] < after.test[0]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"train": 9}, DataError, ("2001-01-01 to 2004-12-31", "9 + 2 + 1 years", "2012-01-01")),
        ({"first_test": _day("2030-01-01")}, DataError, ("first_test=2030-01-01", "more data")),
        ({"train": 2, "test": 2}, DataError, ("partial: true", "2005-01-01 to 2006-12-31")),
        (
            {"unit": "month", "train": 1, "valid": 1, "embargo_bars": 27},
            ConfigError,
            ("valid window has 1 bars", "walk_forward.valid (1 month)", "embargo_bars 27"),
        ),
        (
            {"unit": "month", "train": 1, "valid": 1, "purge_bars": 40},
            ConfigError,
            ("fold 2001-03", "train window has 0 bars"),
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_needed(
    changes: dict[str, object], error: type[EchelonError], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as refused:
        _plan(_days("2001-01-01", "2004-12-31"), **changes)
    for word in words:
        assert word in str(refused.value)


def test_last_test_before_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"walk_forward.last_test \(2007-12-31\) is before"):
        load_config(None, ["walk_forward.last_test=2007-12-31"])
