"""Tail loss: exact against sorting, the lowered limit by hand, and the online value at risk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.hierarchy import RiskConfig
from echelon.errors import DataError, StoreError
from echelon.ops.measures import cvar as sorted_cvar
from echelon.risk.cvar import CvarGuard, TailQuantile, cvar_cost, tail_of, tail_points
from echelon.risk.events import RiskKind
from echelon.rng import stream
from echelon.types import Floats

# --- the estimate -------------------------------------------------------------------------------


def test_tail_by_hand_counts_a_fraction_of_the_next_loss() -> None:
    returns = np.array([[-0.10, 0.01, -0.04, 0.02, 0.03]])
    # At 70 % the tail holds 1.5 returns: 0.10 and half of 0.04.
    tail = tail_of(returns, 0.7)
    assert tail.value_at_risk.tolist() == [0.04]
    assert tail.cvar[0] == pytest.approx(0.12 / 1.5)
    assert tail.n.tolist() == [5]


def test_thirty_days_are_the_worst_and_half_the_second_worst() -> None:
    returns = np.full(30, 0.001)
    returns[[4, 20]] = -0.06, -0.03
    assert tail_points(30) == pytest.approx(1.5)
    assert tail_of(returns).cvar == pytest.approx((0.06 + 0.03 / 2) / 1.5)


@given(
    st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=80),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
@settings(max_examples=80, deadline=None)
def test_estimate_equals_sorting_for_any_returns_and_ties(
    values: list[float], level: float
) -> None:
    returns = np.array(values)
    assert tail_of(returns, level).cvar == pytest.approx(sorted_cvar(returns, level), abs=1e-14)


@pytest.mark.parametrize("n", [1, 19, 20, 21, 30, 500])
def test_no_other_eta_gives_less(n: int) -> None:
    """Rockafellar and Uryasev: CVaR is the least value, so a grid finds nothing below it."""
    returns = stream(1, "cvar", n).standard_t(3, n) * 0.01
    tail = tail_of(returns)
    etas = np.append(np.linspace(-0.2, 0.2, 4001), -returns)
    means = cvar_cost(returns[None, :], etas[:, None]).mean(axis=1)
    assert means.min() >= tail.cvar - 1e-12
    assert cvar_cost(returns, tail.value_at_risk).mean() == pytest.approx(float(tail.cvar))


def test_windows_filled_unequally_are_each_judged_by_what_they_hold() -> None:
    rng = stream(2, "cvar")
    returns = rng.normal(0.0, 0.02, (3, 4, 60))
    counts = rng.integers(1, 61, (3, 4))
    returns[np.arange(60) >= counts[..., None]] = np.nan
    tail = tail_of(rng.permuted(returns, axis=-1))
    np.testing.assert_array_equal(tail.n, counts)
    for place in np.ndindex(3, 4):
        held = returns[place][: counts[place]]
        assert tail.cvar[place] == pytest.approx(sorted_cvar(held), abs=1e-15)


def test_empty_window_cannot_be_told() -> None:
    tail = tail_of(np.full((2, 5), np.nan))
    assert np.isnan(tail.cvar).all()
    assert np.isnan(tail.value_at_risk).all()


# --- the limit ----------------------------------------------------------------------------------

# Of windows so short the CVaR is the worst loss.
WORST = RiskConfig(cvar_window=10)


def run(path: list[float], rule: RiskConfig) -> tuple[list[float], list[float]]:
    guard = CvarGuard((1,), rule)
    verdicts = [guard.update(np.array([r])) for r in path]
    return [float(v.cvar[0]) for v in verdicts], [float(v.scale[0]) for v in verdicts]


def test_limit_is_halved_until_the_tail_was_inside_for_five_bars_in_a_row() -> None:
    path = [*[0.0] * 12, -0.06, *[0.0] * 15]
    cvar, scale = run(path, WORST)
    assert np.isnan(cvar[:9]).all()
    # The loss of bar 12 is in the window up to bar 21; bars 22–26 are the five inside.
    assert cvar[12:22] == pytest.approx([0.06] * 10)
    assert cvar[22:] == pytest.approx([0.0] * 6)
    assert scale == [1.0] * 12 + [0.5] * 14 + [1.0] * 2


def test_bar_beyond_among_the_five_begins_the_count_anew() -> None:
    rule = RiskConfig(cvar_window=2)  # the worst of two
    path = [0.0, -0.06, *[0.0] * 4, -0.051, *[0.0] * 7]
    _, scale = run(path, rule)
    # Beyond at 1, 2; inside at 3, 4, 5; beyond at 6, 7; inside from 8 on: restored at 12.
    assert scale == [1.0] + [0.5] * 11 + [1.0] * 2


def test_exactly_the_limit_is_inside() -> None:
    rule = RiskConfig(cvar_window=2)
    assert run([0.0, -0.05], rule)[1] == [1.0, 1.0]
    assert run([0.0, -0.0501], rule)[1] == [1.0, 0.5]


def test_fewer_returns_than_asked_for_are_not_judged() -> None:
    cvar, scale = run([-0.5] * 499, RiskConfig())
    assert np.isnan(cvar).all()
    assert scale == [1.0] * 499
    cvar, scale = run([-0.5] * 500, RiskConfig())
    assert cvar[-1] == pytest.approx(0.5)
    assert scale[-1] == 0.5


def returns_of(n_bars: int, *shape: int) -> Floats:
    return stream(5, "cvar guard", *shape).standard_t(3, (n_bars, *shape)) * 0.02


def test_rolling_tail_equals_the_window_looked_at_afresh_to_the_bit() -> None:
    rule = RiskConfig(cvar_window=60)
    returns = returns_of(300, 3, 4)
    returns[::17, 0, 0] = 0.0  # ties
    guard = CvarGuard((3, 4), rule)
    changes = 0
    for t in range(len(returns)):
        verdict = guard.update(returns[t])
        held = np.moveaxis(returns[max(0, t - 59) : t + 1], 0, -1)
        if t + 1 < 60:
            assert np.isnan(verdict.cvar).all()
            continue
        np.testing.assert_array_equal(verdict.cvar, tail_of(held).cvar)
        changes += int(verdict.halved_now.sum() + verdict.restored_now.sum())
    assert changes > 10


def test_return_that_is_no_number_halves_its_own_limit_and_is_not_remembered() -> None:
    rule = RiskConfig(cvar_window=2, release_bars=2)
    guard = CvarGuard((2,), rule)
    guard.update(np.array([0.01, 0.01]))
    verdict = guard.update(np.array([np.nan, 0.01]))
    assert verdict.scale.tolist() == [0.5, 1.0]
    assert np.isnan(verdict.cvar[0])  # one return only
    assert guard.update(np.array([0.01, 0.01])).scale.tolist() == [0.5, 1.0]
    verdict = guard.update(np.array([0.01, 0.01]))
    assert verdict.scale.tolist() == [1.0, 1.0]
    assert verdict.cvar.tolist() == [-0.01, -0.01]


def test_resumed_cvar_goes_on_bit_by_bit() -> None:
    rule = RiskConfig(cvar_window=50)
    returns = returns_of(200, 2, 3)
    whole, resumed = CvarGuard((2, 3), rule), CvarGuard((2, 3), rule)
    for row in returns[:93]:
        whole.update(row)
    resumed.restore(*whole.state())
    for row in returns[93:]:
        for a, b in zip(whole.update(row), resumed.update(row), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(StoreError, match=r"CVaR guard's returns is float64\[2, 3, 50\]"):
        CvarGuard((2, 3), RiskConfig()).restore(*whole.state())


def test_restarted_book_is_judged_anew() -> None:
    rule = RiskConfig(cvar_window=2)
    guard = CvarGuard((2,), rule)
    for _ in range(3):
        guard.update(np.array([-0.1, -0.1]))
    guard.restart(np.array([True, False]))
    assert guard.scale.tolist() == [1.0, 0.5]
    verdict = guard.update(np.array([0.0, 0.0]))
    assert np.isnan(verdict.cvar[0])
    assert verdict.cvar[1] == pytest.approx(0.1)
    assert guard.update(np.array([0.0, 0.0])).cvar[0] == 0.0


def test_events_say_what_was_halved_and_restored() -> None:
    rule = RiskConfig(cvar_window=2, release_bars=1)
    guard = CvarGuard((2, 2), rule)
    found = []
    for t, r in enumerate([0.0, -0.08, 0.0, 0.0]):
        verdict = guard.update(np.array([[0.0, 0.0], [0.0, r]]))
        found += guard.events(verdict, t, ["cash", "trend"])
    assert [(e.time, e.kind, e.who, e.value, e.limit, e.book) for e in found] == [
        (1, RiskKind.HALVED, "trend", 0.08, 0.05, 1),
        (3, RiskKind.RESTORED, "trend", 0.0, 0.05, 1),
    ]
    assert [e.values for e in found] == [{"factor": 0.5}, {}]


# --- the cost of a step -------------------------------------------------------------------------


def test_cost_by_hand() -> None:
    got = cvar_cost(np.array([0.02, -0.03, -0.05]), np.array(0.03))
    assert got == pytest.approx([0.03, 0.03, 0.03 + 0.02 / 0.05])


def test_eta_by_hand_rises_when_beyond_and_falls_when_not() -> None:
    tracker = TailQuantile(1)
    tracker.update(np.array([[-0.04]]))  # size 0.04, gain 1, all beyond η = 0
    assert tracker.eta[0] == pytest.approx(0.04 * 0.95)
    tracker.update(np.array([[0.02], [-0.06]]))  # size (0.04 + 0.04)/2, gain 1/√2, half beyond
    assert tracker.eta[0] == pytest.approx(0.038 + 0.04 * 0.45 / np.sqrt(2))
    eta = tracker.eta[0]
    tracker.update(np.array([[0.02]]))  # size (2·0.04 + 0.02)/3, gain 1/√3, none beyond
    assert tracker.eta[0] == pytest.approx(eta - 0.1 / 3 * 0.05 / np.sqrt(3))


@pytest.mark.parametrize("sigma", [0.001, 0.03])
def test_eta_finds_the_value_at_risk_and_the_mean_cost_the_cvar(sigma: float) -> None:
    rng = stream(9, "eta")
    tracker = TailQuantile(1)
    etas, costs = [], []
    for t in range(2500):
        cost = tracker.cost(rng.normal(0.0, sigma, (8, 1)))
        if t >= 500:
            etas.append(tracker.eta[0])
            costs.append(cost.mean())
    assert np.mean(etas) == pytest.approx(1.645 * sigma, rel=0.02)
    assert np.std(etas) < 0.05 * sigma
    assert np.mean(costs) == pytest.approx(2.063 * sigma, rel=0.02)


def test_eta_follows_when_the_market_grows_wilder() -> None:
    rng = stream(10, "eta")
    tracker = TailQuantile(2)
    for t in range(3000):
        tracker.update(rng.normal(0.0, 1.0, (8, 2)) * [0.01, 0.03 if t > 1500 else 0.01])
    assert tracker.eta == pytest.approx([0.01645, 0.04935], rel=0.1)


def test_cost_uses_the_eta_known_before_the_step() -> None:
    tracker = TailQuantile(1)
    assert tracker.cost(np.array([[-0.05]]))[0, 0] == pytest.approx(0.05 / 0.05)


def test_resumed_eta_goes_on_bit_by_bit_and_a_replaced_policy_begins_anew() -> None:
    returns = returns_of(60, 4, 2)
    whole, resumed = (TailQuantile(2) for _ in range(2))
    for row in returns[:30]:
        whole.update(row)
    resumed.restore(*whole.state())
    for row in returns[30:]:
        np.testing.assert_array_equal(whole.cost(row), resumed.cost(row))
    kept = whole.eta[0]
    whole.restart(np.array([False, True]))
    assert whole.eta.tolist() == [kept, 0.0]


def test_returns_that_are_no_numbers_are_refused_by_name() -> None:
    tracker = TailQuantile(3)
    with pytest.raises(DataError, match=r"policy \[1\] are not finite"):
        tracker.cost(np.array([[0.0, np.nan, 0.0]]))
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \[E, 3\]"):
        tracker.update(np.zeros(3))
    assert tracker.eta.tolist() == [0.0] * 3
