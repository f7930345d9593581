"""Halt, turnover and position limits of the portfolio, by hand and on random targets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import DataError
from echelon.risk.events import RiskKind
from echelon.risk.portfolio import PortfolioHalt, TurnoverLimit, limit_positions
from echelon.rng import stream
from echelon.types import Floats

NOT_EXEMPT = np.array([False])


# --- positions ----------------------------------------------------------------------------------


def test_halved_limit_halves_both_the_largest_weight_and_the_sum() -> None:
    target = np.array([[0.6, 0.4], [0.6, 0.4], [0.3, 0.1]])
    got = limit_positions(target, np.array([1.0, 0.5, 0.5]))
    # 0.6 → 0.5, 0.4 stays, together 0.9 → 0.5
    assert got == pytest.approx(np.array([[0.6, 0.4], [0.25 / 0.9, 0.2 / 0.9], [0.3, 0.1]]))


def test_short_positions_count_as_long_ones_and_keep_their_sign() -> None:
    got = limit_positions(np.array([[-0.9, 0.3]]), np.array([0.5]))
    assert got == pytest.approx(np.array([[-0.25 / 0.8, 0.15 / 0.8]]))


def test_weights_within_the_limits_pass_untouched_rounding_included() -> None:
    target = np.array([[0.1, 0.7, 0.2 + 4e-16]])  # a softmax may sum to a little more than 1
    assert limit_positions(target, np.ones(1)) == pytest.approx(target, abs=1e-15)


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_position_limits_hold_for_any_target(seed: int, scale: float) -> None:
    target = stream(seed, "positions").normal(0.0, 0.5, (3, 5))
    got = limit_positions(target, np.full(3, scale))
    assert np.abs(got).sum(axis=1).max() <= scale + 1e-12
    assert (got * target >= 0.0).all()


# --- halt ---------------------------------------------------------------------------------------


def halts(path: list[float], limit: float, cooldown: int) -> list[bool]:
    halt = PortfolioHalt(1, limit, cooldown)
    return [bool(halt.update(np.array([value])).halted[0]) for value in path]


def test_portfolio_halts_at_once_and_trades_again_after_the_cooldown() -> None:
    got = halts([100, 120, 90, 89.9, 89.9, 89.9, 89.9, 80, 67], 0.25, 3)
    # 90 of 120 are lost exactly 25 %: no more than that. Halted at bar 3, for bars 3, 4 and 5.
    # The new peak is 89.9 (bar 6): 80 is 11 % below it, 67 is 25.5 %.
    assert got == [False, False, False, True, True, True, False, False, True]


def test_halt_without_cooldown_lasts_until_somebody_resumes() -> None:
    halt = PortfolioHalt(2, 0.2, None)
    halt.update(np.array([100.0, 100.0]))
    for _ in range(50):
        assert halt.update(np.array([70.0, 70.0])).halted.all()
    halt.resume(np.array([True, False]))
    verdict = halt.update(np.array([70.0, 70.0]))
    assert verdict.resumed_now.tolist() == [True, False]
    assert verdict.halted.tolist() == [False, True]
    assert verdict.drawdown == pytest.approx([0.0, 0.3])


def test_resuming_a_book_that_is_not_halted_is_not_saved_up() -> None:
    halt = PortfolioHalt(1, 0.2, None)
    halt.update(np.array([100.0]))
    halt.resume(np.array([True]))
    halt.update(np.array([70.0]))
    assert halt.update(np.array([70.0])).halted[0]


def test_resuming_once_does_not_resume_the_next_halt() -> None:
    halt = PortfolioHalt(1, 0.2, None)
    halt.update(np.array([100.0]))
    halt.update(np.array([70.0]))
    halt.resume(np.array([True]))
    got = [bool(halt.update(np.array([v])).halted[0]) for v in (70.0, 50.0, 50.0)]
    assert got == [False, True, True]


def test_value_that_is_no_number_halts_and_does_not_resume() -> None:
    halt = PortfolioHalt(1, 0.2, 2)
    halt.update(np.array([100.0]))
    for _ in range(4):
        verdict = halt.update(np.array([np.nan]))
        assert verdict.halted[0]
        assert np.isnan(verdict.drawdown[0])
    assert halt.update(np.array([95.0])).resumed_now[0]


def test_ruined_book_never_resumes() -> None:
    got = halts([100, *[0.0] * 6], 0.2, 2)
    assert got == [False, *[True] * 6]


def test_halt_resumes_from_its_state() -> None:
    paths = np.exp(np.cumsum(stream(8, "halt").normal(0, 0.03, (150, 3)), axis=0))
    whole, resumed = PortfolioHalt(3, 0.1, 5), PortfolioHalt(3, 0.1, 5)
    for row in paths[:75]:
        whole.update(row)
    resumed.restore(*whole.state())
    n_halts = 0
    for row in paths[75:]:
        one, other = whole.update(row), resumed.update(row)
        n_halts += int(one.halted_now.sum())
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert n_halts > 3


def test_halt_events_say_how_deep_it_was() -> None:
    halt = PortfolioHalt(1, 0.25, 1)
    found = []
    for t, value in enumerate([100.0, 70.0, 70.0]):
        found += halt.events(halt.update(np.array([value])), t)
    assert [(e.time, e.kind, e.who, e.value, e.limit) for e in found] == [
        (1, RiskKind.HALTED, "portfolio", 0.3, 0.25),
        (2, RiskKind.RESUMED, "portfolio", 0.0, 0.25),
    ]


# --- turnover -----------------------------------------------------------------------------------


def test_change_is_scaled_to_the_turnover_of_a_bar() -> None:
    limit = TurnoverLimit(1, 0.5, 10.0, 5)
    got = limit.apply(np.array([[0.5, 0.0]]), np.array([[0.0, 0.5]]), NOT_EXEMPT)
    assert got.weights.tolist() == [[0.25, 0.25]]
    assert (got.share[0], got.wanted[0], got.traded[0], got.cut[0]) == (0.5, 1.0, 0.5, True)
    [event] = limit.events(got, 3)
    assert (event.time, event.kind, event.value, event.limit) == (3, "turnover_cut", 1.0, 0.5)
    assert event.values == {"share": 0.5}


def test_window_leaves_what_is_not_yet_spent() -> None:
    limit = TurnoverLimit(1, 2.0, 1.0, 3)
    held, traded = np.array([[0.0]]), []
    for target in (0.6, 0.0, 0.6, 0.0, 0.6):
        got = limit.apply(held, np.array([[target]]), NOT_EXEMPT)
        held = got.weights
        traded.append(float(got.traded[0]))
    # 0.6; 0.4 left; none left; the first 0.6 leaves the window, but only 0.2 is held; and so on
    assert traded == pytest.approx([0.6, 0.4, 0.0, 0.2, 0.6])


def test_small_change_reaches_its_target_to_the_bit() -> None:
    limit = TurnoverLimit(1, 2.0, 20.0)
    target = np.array([[0.1, 0.7, 0.2]])
    got = limit.apply(np.array([[0.3, 0.3, 0.4]]), target, NOT_EXEMPT)
    np.testing.assert_array_equal(got.weights, target)
    assert not got.cut[0]
    assert limit.events(got, 0) == []
    assert limit.apply(target, target, NOT_EXEMPT).share[0] == 1.0


def test_halted_book_leaves_at_once_and_has_then_nothing_left_to_trade() -> None:
    limit = TurnoverLimit(1, 0.2, 0.4, 3)
    full, none = np.array([[0.5, 0.5]]), np.zeros((1, 2))
    assert limit.apply(full, none, np.array([True])).weights.tolist() == [[0.0, 0.0]]
    for _ in range(2):
        assert limit.apply(none, full, NOT_EXEMPT).weights.tolist() == [[0.0, 0.0]]
    got = limit.apply(none, full, NOT_EXEMPT)
    assert got.weights == pytest.approx(np.array([[0.1, 0.1]]))


@given(
    st.integers(0, 10_000),
    st.floats(0.05, 2.0),
    st.floats(0.05, 4.0),
    st.integers(1, 7),
)
@settings(max_examples=20, deadline=None)
def test_turnover_limits_hold_and_long_books_stay_long(
    seed: int, per_bar: float, per_window: float, window: int
) -> None:
    rng = stream(seed, "turnover")
    limit, held = TurnoverLimit(2, per_bar, per_window, window), np.zeros((2, 4))
    traded: list[Floats] = []
    for _ in range(25):
        target = rng.dirichlet(np.full(5, 0.3), 2)[:, :4]
        got = limit.apply(held, target, np.array([False, False]))
        traded.append(np.abs(got.weights - held).sum(axis=1))
        np.testing.assert_allclose(traded[-1], got.traded, atol=1e-12)
        held = got.weights
        assert held.min() >= -1e-12
        assert held.sum(axis=1).max() <= 1.0 + 1e-9
        assert traded[-1].max() <= per_bar + 1e-12
        assert np.sum(traded[-window:], axis=0).max() <= per_window + 1e-12


def test_turnover_resumes_from_its_state() -> None:
    rng = stream(7, "turnover")
    targets = rng.dirichlet(np.ones(3), (30, 2))
    whole, resumed = TurnoverLimit(2, 0.5, 0.8, 4), TurnoverLimit(2, 0.5, 0.8, 4)
    held, free = np.zeros((2, 3)), np.array([False, False])
    for target in targets[:13]:
        held = whole.apply(held, target, free).weights
    resumed.restore(*whole.state())
    for target in targets[13:]:
        one, other = whole.apply(held, target, free), resumed.apply(held, target, free)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
        held = one.weights


# --- bad input ----------------------------------------------------------------------------------


def test_weights_that_are_no_numbers_are_refused_by_book() -> None:
    spoilt = np.array([[0.1, 0.2], [np.nan, 0.1]])
    with pytest.raises(DataError, match=r"target weights of book \[1\] are not finite"):
        limit_positions(spoilt, np.ones(2))
    limit = TurnoverLimit(2, 2.0, 20.0)
    with pytest.raises(DataError, match=r"current weights of book \[1\]"):
        limit.apply(spoilt, np.zeros((2, 2)), np.zeros(2, dtype=bool))
    with pytest.raises(ValueError, match=r"target has shape \(2, 3\), expected \(2, 2\)"):
        limit.apply(np.zeros((2, 2)), np.zeros((2, 3)), np.zeros(2, dtype=bool))
