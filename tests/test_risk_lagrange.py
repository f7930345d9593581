"""PID-Lagrangian: sequences worked out by hand, and a simulated constraint it must settle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import StoreError, TrainingError
from echelon.risk.lagrange import PidLagrangian, PidSettings, combine_advantages
from echelon.rng import stream

ROUGH = {"limit": 1.0, "k_p": 0.0, "k_i": 0.0, "k_d": 0.0, "smoothing": 0.0, "cap": 100.0}


def multipliers(costs: list[float], **gains: float) -> list[float]:
    pid = PidLagrangian((), PidSettings(**(ROUGH | gains)))
    return [float(pid.update(np.asarray(cost, dtype=np.float64))) for cost in costs]


# --- by hand ------------------------------------------------------------------------------------


def test_proportional_part_is_the_error_and_never_negative() -> None:
    assert multipliers([3.0, 1.5, 1.0, 0.0], k_p=2.0) == [4.0, 1.0, 0.0, 0.0]


def test_integral_part_adds_errors_up_and_saves_no_credit() -> None:
    # I: 1, 3, 2, 0 (not −1), 0.5
    assert multipliers([2.0, 3.0, 0.0, -2.0, 1.5], k_i=0.5) == [0.5, 1.5, 1.0, 0.0, 0.25]


def test_derivative_part_answers_a_rise_and_ignores_a_fall() -> None:
    # The first cost has nothing before it; then +2, −1, +0.5.
    assert multipliers([1.0, 3.0, 2.0, 2.5], k_d=2.0) == [0.0, 4.0, 0.0, 1.0]


def test_derivative_is_of_the_smoothed_cost() -> None:
    # J̄: 1, then 0.75·1 + 0.25·5 = 2, then 0.75·2 + 0.25·6 = 3
    assert multipliers([1.0, 5.0, 6.0], k_d=1.0, smoothing=0.75) == [0.0, 1.0, 1.0]


def test_three_parts_together_by_hand() -> None:
    got = multipliers([2.0, 4.0, 0.5], k_p=1.0, k_i=0.5, k_d=0.25)
    # Δ 1, 3, −0.5; I 1, 4, 3.5; D 0, 2, 0
    assert got == [1.0 + 0.5, 3.0 + 2.0 + 0.5, -0.5 + 1.75]


def test_multiplier_stops_at_the_cap_and_leaves_it_at_once() -> None:
    # k_i alone: 1, 2, then held at 2 for three bars; without anti-windup the way back from I = 5
    # to below 2 would take seven bars of error −0.5.
    costs = [2.0] * 5 + [0.5] * 3
    assert multipliers(costs, k_i=1.0, cap=2.0) == [1.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5]


def test_integral_fills_up_to_the_cap_and_no_further() -> None:
    pid = PidLagrangian((1,), PidSettings(**(ROUGH | {"k_p": 1.0, "k_i": 2.0, "cap": 5.0})))
    integrals = []
    for cost in (2.0, 2.0, 2.0, 4.0, 1.5):
        pid.update(np.array([cost]))
        integrals.append(float(pid.state()[0]["integral"][0]))
    # With Δ = 1 the cap needs I = 2; with Δ = 3 it needs 1, and what there is stays.
    assert integrals == [1.0, 2.0, 2.0, 2.0, 2.25]
    assert float(pid.multiplier[0]) == 5.0


def test_gain_of_zero_keeps_no_integral() -> None:
    pid = PidLagrangian((), PidSettings(**(ROUGH | {"k_p": 1.0})))
    for _ in range(3):
        pid.update(np.asarray(9.0))
    assert pid.state()[0]["integral"] == 0.0


@given(st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=60), st.floats(0.1, 20.0))
@settings(max_examples=80, deadline=None)
def test_multiplier_and_integral_stay_within_their_bounds(costs: list[float], cap: float) -> None:
    rule = PidSettings(limit=0.3, k_p=2.0, k_i=0.7, k_d=1.0, smoothing=0.5, cap=cap)
    pid = PidLagrangian((1,), rule)
    for cost in costs:
        assert 0.0 <= pid.update(np.array([cost]))[0] <= cap
        integral = pid.state()[0]["integral"][0]
        assert 0.0 <= rule.k_i * integral <= cap + rule.k_p * rule.limit + 1e-9


def test_experts_have_multipliers_of_their_own() -> None:
    pid = PidLagrangian((2,), PidSettings(**(ROUGH | {"k_p": 1.0, "k_i": 1.0})))
    pid.update(np.array([2.0, 1.0]))
    assert pid.update(np.array([2.0, 1.5])).tolist() == [3.0, 1.0]
    pid.restart(np.array([True, False]))
    assert pid.multiplier.tolist() == [0.0, 1.0]
    assert pid.update(np.array([1.0, 1.0])).tolist() == [0.0, 0.5]


# --- a constraint -------------------------------------------------------------------------------


def simulate(rule: PidSettings, n_steps: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """A learner whose CVaR moves a twentieth of the way to 0.12 / (1 + λ) at each update.

    Its constraint of 0.05 is met by λ* = 0.12 / 0.05 − 1 = 1.4.
    """
    rng = stream(4, "lagrange")
    pid, cost, costs, lams = PidLagrangian((1,), rule), 0.12, [], []
    for _ in range(n_steps):
        lam = float(pid.update(np.array([cost + noise * rng.standard_normal()]))[0])
        cost += 0.05 * (0.12 / (1.0 + lam) - cost)
        costs.append(cost)
        lams.append(lam)
    return np.array(costs), np.array(lams)


def test_default_gains_settle_the_constraint_at_its_limit() -> None:
    costs, lams = simulate(PidSettings(), 600, noise=0.0)
    assert costs[300:] == pytest.approx(np.full(300, 0.05), rel=0.01)
    assert lams[-1] == pytest.approx(1.4, rel=0.01)


def test_default_gains_settle_a_noisy_constraint() -> None:
    costs, lams = simulate(PidSettings(), 1500, noise=0.005)
    assert costs[500:].mean() == pytest.approx(0.05, rel=0.02)
    assert np.abs(costs[500:] - 0.05).max() < 0.01
    assert 0.0 < lams[500:].min() < lams[500:].max() < 10.0


def test_proportional_part_calms_what_the_integral_alone_makes_swing() -> None:
    """The point of the paper: plain dual ascent overshoots, swings and breaks the limit for longer.

    Measured: overshoot 0.0012 against 0.0047, 2 crossings against 4, breach 1.43 against 1.70.
    """
    runs = [PidSettings(), PidSettings(k_p=0.0, k_d=0.0)]
    excess = [simulate(rule, 600, noise=0.0)[0] - 0.05 for rule in runs]
    overshoot = [-e.min() for e in excess]
    crossings = [np.count_nonzero(np.diff(np.sign(e))) for e in excess]
    breach = [np.maximum(e, 0.0).sum() for e in excess]  # over the whole run, as the paper counts
    assert overshoot[0] < 0.5 * overshoot[1]
    assert crossings[0] < crossings[1]
    assert breach[0] < 0.9 * breach[1]


def test_constraint_that_holds_costs_nothing() -> None:
    _, lams = simulate(PidSettings(limit=0.2), 100, noise=0.0)
    assert lams.tolist() == [0.0] * 100


def test_constraint_that_cannot_be_met_ends_at_the_cap() -> None:
    _, lams = simulate(PidSettings(limit=0.001, cap=3.0), 600, noise=0.0)
    assert lams[-1] == 3.0


# --- advantages ---------------------------------------------------------------------------------


def test_combined_advantage_by_hand_for_numbers_arrays_and_tensors() -> None:
    assert combine_advantages(1.0, 0.5, 1.0) == 0.25
    assert combine_advantages(1.0, 0.5, 0.0) == 1.0
    got = combine_advantages(np.array([[1.0, 4.0]]), np.array([[2.0, 1.0]]), np.array([1.0, 3.0]))
    assert got.tolist() == [[-0.5, 0.25]]
    tensor = combine_advantages(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]), 3.0)
    assert tensor.tolist() == [-1.25, 0.25]


def test_combined_advantage_of_a_large_multiplier_is_the_cost_alone() -> None:
    assert combine_advantages(5.0, 2.0, 1e12) == pytest.approx(-2.0)


# --- resumption, bad input ----------------------------------------------------------------------


def test_resumed_multiplier_goes_on_bit_by_bit() -> None:
    costs = stream(6, "lagrange").normal(0.06, 0.02, (80, 3))
    whole, resumed = (PidLagrangian((3,), PidSettings()) for _ in range(2))
    for cost in costs[:40]:
        whole.update(cost)
    resumed.restore(*whole.state())
    np.testing.assert_array_equal(whole.multiplier, resumed.multiplier)
    for cost in costs[40:]:
        np.testing.assert_array_equal(whole.update(cost), resumed.update(cost))
    with pytest.raises(
        StoreError, match=r"multiplier's integral is float64\[3\], expected .*\[2\]"
    ):
        PidLagrangian((2,), PidSettings()).restore(*whole.state())


def test_cost_that_is_no_number_is_refused_and_changes_nothing() -> None:
    pid = PidLagrangian((2,), PidSettings())
    before = pid.update(np.array([0.1, 0.1]))
    with pytest.raises(TrainingError, match=r"cost of the constraint is .*nan"):
        pid.update(np.array([0.1, np.nan]))
    np.testing.assert_array_equal(pid.multiplier, before)
    with pytest.raises(ValueError, match=r"cost has shape \(1,\), expected \(2,\)"):
        pid.update(np.array([0.1]))
