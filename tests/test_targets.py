"""Targets: forward returns by hand, what makes a cell unknown, and ranks of a row."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import make_world

from echelon.envs.targets import forward_returns, section_ranks

CLOSE = np.array([[10.0, 20.0], [11.0, 20.0], [12.0, 25.0], [13.0, 20.0], [15.0, 30.0]])
OPEN = np.array([[10.0, 20.0], [10.0, 21.0], [12.5, 24.0], [12.0, 22.0], [14.0, 25.0]])


def test_forward_returns_run_from_the_next_open_to_an_open_and_end_with_the_stretch() -> None:
    known = forward_returns(make_world(close=CLOSE, open=OPEN), range(0, 5), 2)
    assert known[0] == pytest.approx([12.0 / 10.0 - 1.0, 22.0 / 21.0 - 1.0])
    assert known[1] == pytest.approx([14.0 / 12.5 - 1.0, 25.0 / 24.0 - 1.0])
    assert np.isnan(known[2:]).all()


def test_forward_returns_of_fills_at_the_close_begin_there() -> None:
    known = forward_returns(make_world(close=CLOSE, fill_open=False), range(1, 5), 3)
    assert known[0] == pytest.approx([15.0 / 11.0 - 1.0, 30.0 / 20.0 - 1.0])
    assert np.isnan(known[1:]).all()


def test_dividends_are_inside_of_forward_returns() -> None:
    growth = CLOSE * np.array([1.0, 1.0, 1.1, 1.1, 1.1])[:, None]
    known = forward_returns(make_world(close=CLOSE, open=OPEN, growth=growth), range(0, 5), 1)
    assert known[0] == pytest.approx([1.1 * 12.5 / 10.0 - 1.0, 1.1 * 24.0 / 21.0 - 1.0])
    assert known[1] == pytest.approx([12.0 / 12.5 - 1.0, 22.0 / 24.0 - 1.0])


@pytest.mark.parametrize(
    ("mask", "row", "unknown"), [("tradable", 2, [0, 1, 2]), ("present", 2, [2])]
)
def test_what_is_absent_or_does_not_trade_has_no_forward_return(
    mask: str, row: int, unknown: list[int]
) -> None:
    # At row 2 the asset is decided on, filled from row 1, and left from row 0.
    known = np.ones((6, 1), dtype=bool)
    known[row] = False
    close = np.linspace(10.0, 15.0, 6)[:, None]
    returns = forward_returns(make_world(close=close, **{mask: known}), range(0, 6), 1)
    assert np.flatnonzero(np.isnan(returns[:4, 0])).tolist() == unknown


def test_a_stretch_too_short_for_its_horizon_has_nothing_known() -> None:
    assert np.isnan(forward_returns(make_world(close=CLOSE), range(0, 3), 9)).all()


def test_ranks_of_a_row_have_mean_zero_and_variance_one_and_leave_gaps() -> None:
    ranks = section_ranks(np.array([[3.0, np.nan, 1.0, 9.0], [np.nan, 2.0, np.nan, np.nan]]))
    assert ranks[0, [0, 2, 3]] == pytest.approx([0.0, -np.sqrt(1.5), np.sqrt(1.5)])
    assert np.isnan(ranks[0, 1])
    assert np.isnan(ranks[1]).all()
    many = section_ranks(np.random.default_rng(0).standard_normal((3, 200)))
    assert many.mean(axis=1) == pytest.approx(0.0, abs=1e-12)
    assert many.var(axis=1) == pytest.approx(1.0)


def test_equal_values_share_their_rank() -> None:
    ranks = section_ranks(np.array([[1.0, 1.0, 5.0]]))
    assert ranks[0, 0] == ranks[0, 1] < ranks[0, 2]
