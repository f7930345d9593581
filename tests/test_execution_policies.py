"""Schedules against closed forms, and the loop that works orders with a policy."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.errors import DataError, TrainingError
from echelon.execution import Days, ExecutionRules, Simulator, measure_orders, parent_orders
from echelon.execution.policies import (
    AlmgrenChriss,
    Twap,
    Vwap,
    almgren_chriss_cost,
    almgren_chriss_left,
    eta_of,
    run_orders,
    schedule_cost,
)
from echelon.types import Floats

N_STEPS, KAPPA = 13, 3.0 / 13
IMPACT = Days.from_prices(np.full((1, 130), 50.0), np.full((1, 130), 400.0))
RULES = ExecutionRules(ticks_per_step=10, temporary=0.2)


def solved(kappa: float, n_steps: int) -> Floats:
    """Left[N+1] of the quadratic program: its first-order conditions are a tridiagonal system."""
    middle = np.full(n_steps - 1, 2.0 + 2.0 * (np.cosh(kappa) - 1.0))
    beside = np.full(n_steps - 2, -1.0)
    system = np.diag(middle) + np.diag(beside, 1) + np.diag(beside, -1)
    first = np.zeros(n_steps - 1)
    first[0] = 1.0
    return np.concatenate([[1.0], np.linalg.solve(system, first), [0.0]])


@pytest.mark.parametrize("n_steps", [8, 13])
@pytest.mark.parametrize("total", [0.1, 1.0, 3.0, 40.0])
def test_almgren_chriss_equals_the_quadratic_program(total: float, n_steps: int) -> None:
    kappa = total / n_steps
    left = solved(kappa, n_steps)
    np.testing.assert_allclose(almgren_chriss_left(kappa, n_steps), left, atol=1e-12)
    least = almgren_chriss_cost(kappa, n_steps, eta=0.3, amount=7.0)
    assert least == pytest.approx(float(schedule_cost(left, kappa, eta=0.3, amount=7.0)))
    for step in range(1, n_steps):
        moved = left.copy()
        moved[step] += 1e-3
        assert schedule_cost(moved, kappa, eta=0.3, amount=7.0) > least


def test_twap_costs_36_percent_more_at_three() -> None:
    even = np.linspace(1.0, 0.0, N_STEPS + 1)
    twap = float(schedule_cost(even, KAPPA, eta=1.0, amount=1.0))
    assert twap / almgren_chriss_cost(KAPPA, N_STEPS, eta=1.0, amount=1.0) == pytest.approx(
        1.364, abs=5e-4
    )


def test_simulated_cost_of_almgren_chriss_is_the_closed_form() -> None:
    amount, price, volume = 900.0, 50.0, 400.0
    eta = eta_of(RULES, price=price, volume=volume)
    aversion_sigma2 = 2.0 * (np.cosh(KAPPA) - 1.0) * eta
    history = run_orders(
        AlmgrenChriss(KAPPA), IMPACT, parent_orders(0, amount, True, 0, 130), RULES
    )
    left = np.concatenate([[1.0], history.steps.left[0] / amount])
    np.testing.assert_allclose(left, solved(KAPPA, N_STEPS), atol=1e-12)
    impact = history.value[0] - amount * price
    waited = aversion_sigma2 * (history.steps.left[0] ** 2).sum()
    least = almgren_chriss_cost(KAPPA, N_STEPS, eta=eta, amount=amount)
    assert impact + waited == pytest.approx(least, rel=1e-12)


def test_permanent_impact_counts_half_against_haste() -> None:
    """Any two schedules differ in simulated cost by what η says, permanent impact and all."""
    rules = RULES._replace(permanent=0.1)
    eta = eta_of(rules, price=50.0, volume=400.0)
    orders = parent_orders(0, 900.0, True, 0, 130)
    paid, squares = [], []
    for policy in (Twap(), AlmgrenChriss(KAPPA)):
        history = run_orders(policy, IMPACT, orders, rules)
        paid.append(history.value[0])
        squares.append((history.steps.executed[0] ** 2).sum())
    assert paid[1] - paid[0] == pytest.approx(eta * (squares[1] - squares[0]), rel=1e-9)


def test_almgren_chriss_goes_from_twap_to_immediate() -> None:
    orders = parent_orders(0, 900.0, True, [0, 7], [130, 93])
    twap = run_orders(Twap(), IMPACT, orders, RULES)
    calm = run_orders(AlmgrenChriss(0.0), IMPACT, orders, RULES)
    np.testing.assert_allclose(calm.steps.executed, twap.steps.executed)
    hasty = run_orders(AlmgrenChriss(60.0), IMPACT, orders.take(slice(0, 1)), RULES)
    assert hasty.steps.executed[0, 0] == pytest.approx(900.0)


def test_twap_trades_the_same_in_every_tick_also_off_the_grid() -> None:
    history = run_orders(Twap(), IMPACT, parent_orders(0, 86.0, False, 7, 93), RULES)
    assert history.ticks is not None
    np.testing.assert_allclose(history.ticks.executed[0, 7:93], 1.0)
    assert measure_orders(history, ["ffr"])["ffr"][0] == pytest.approx(1.0)


def test_twap_makes_up_for_what_a_cap_held_back() -> None:
    volume = np.full((1, 40), 100.0)
    volume[0, :10] = 1.0
    days = Days.from_prices(np.full((1, 40), 10.0), volume)
    history = run_orders(
        Twap(), days, parent_orders(0, 40.0, True, 0, 40), ExecutionRules(10, volume_cap=0.5)
    )
    np.testing.assert_allclose(history.steps.executed[0], [5.0, 35 / 3, 35 / 3, 35 / 3])


def test_vwap_follows_the_mean_share_of_the_train_days() -> None:
    volume = np.array([[1.0, 1.0, 2.0, 0.0], [30.0, 10.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    days = Days.from_prices(np.full((3, 4), 10.0), volume)
    profile = Vwap(days)
    np.testing.assert_allclose(profile.pooled, [0.5, 0.25, 0.25, 0.0])
    rules = ExecutionRules(ticks_per_step=1)
    fresh = Days.from_prices(np.full((1, 4), 10.0), np.full((1, 4), 5.0), symbol="NEW")
    for market in (days, fresh):
        history = run_orders(profile, market, parent_orders(0, 0.8, True, 0, 4), rules)
        np.testing.assert_allclose(history.steps.executed[0][:3], [0.4, 0.2, 0.2])
    # An order where the profile has nothing goes evenly.
    history = run_orders(profile, fresh, parent_orders(0, 4.0, True, 3, 4), rules)
    assert history.executed[0] == 4.0


def test_vwap_knows_symbols_apart() -> None:
    volume = np.array([[3.0, 1.0], [1.0, 3.0]])
    days = Days.from_prices(np.full((2, 2), 10.0), volume)
    days = Days(("A", "B"), *(getattr(days, n) for n in DAY_ARRAYS))
    orders = parent_orders([0, 1], 4.0, True, 0, 2)
    history = run_orders(Vwap(days), days, orders, ExecutionRules(1))
    np.testing.assert_allclose(history.steps.executed, volume)


DAY_ARRAYS = ("dates", "clock", "buy", "sell", "known", "volume")


def test_profiles_that_cannot_be_used_are_refused() -> None:
    halted = Days.from_prices(np.full((2, 4), np.nan), np.zeros((2, 4)))
    with pytest.raises(DataError, match="none of the 2 train days"):
        Vwap(halted)
    profile = Vwap(IMPACT)
    short = Days.from_prices(np.full((1, 4), 1.0), np.ones((1, 4)))
    with pytest.raises(DataError, match="130 ticks a day, these days have 4"):
        run_orders(profile, short, parent_orders(0, 1.0, True, 0, 4), RULES)


class Asks:
    """Asks for the same of every order."""

    name = "asks"

    def __init__(self, amount: Floats) -> None:
        self.amount = amount

    def start(self, simulator: Simulator) -> None:
        self.started = True

    def request(self, simulator: Simulator) -> Floats:
        return self.amount


@pytest.mark.parametrize("amount", [np.nan, -1.0, np.inf])
def test_a_request_that_is_no_amount_names_policy_order_and_step(amount: float) -> None:
    orders = parent_orders([0, 0], 10.0, True, 0, 130)
    with pytest.raises(TrainingError, match=r"'asks' asked for .* order 1 .* at step 0"):
        run_orders(Asks(np.array([1.0, amount])), IMPACT, orders, RULES)
    with pytest.raises(TrainingError, match="expected one an order"):
        run_orders(Asks(np.ones(3)), IMPACT, orders, RULES)
