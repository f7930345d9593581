"""The execution simulator: scenarios with numbers worked out by hand, and its plain twin."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_execution import PlainOrder

from echelon.errors import DataError, TrainingError, UsageError
from echelon.execution import (
    METRICS,
    Days,
    ExecutionRules,
    History,
    PAPenalty,
    Ratio,
    Risk,
    Shortfall,
    Simulator,
    Weighted,
    measure_orders,
    metric,
    parent_orders,
)
from echelon.execution.history import gain_loss_ratio
from echelon.execution.rewards import reward_of
from echelon.types import Floats

RISING = Days.from_prices(
    100.0 + 0.01 * np.arange(390.0)[None, :], 1000.0 + 10.0 * np.arange(390.0)[None, :]
)
"""One day of 390 minutes; the price rises by a cent and the volume by ten shares a minute."""


def whole_day(amount: float, *, buying: bool = False) -> Simulator:
    return Simulator(RISING, parent_orders(0, amount, buying, 0, 390), ExecutionRules())


def test_first_step_of_a_sell_has_the_numbers_of_the_scenario() -> None:
    simulator = whole_day(30.0)
    assert simulator.benchmarks.twap[0] == pytest.approx(101.945, abs=1e-9)
    simulator.step(np.array([15.0]))
    history = History.from_simulator(simulator)
    assert history.steps.market_volume[0, 0] == 34350.0
    assert history.step_price[0, 0] == pytest.approx(100.145, abs=1e-9)
    assert history.steps.value[0, 0] == pytest.approx(1502.175, abs=1e-9)
    assert history.step_frame(0)["pa"][0] == pytest.approx(-176.565795, abs=1e-6)
    assert history.tick_frame(0)["pa"][0] == pytest.approx(-190.789151, abs=1e-6)
    assert history.left[0] == pytest.approx(15.0)


@pytest.mark.parametrize(("buying", "expected"), [(False, -89.1162309742), (True, 87.4495643076)])
def test_penalty_reward_of_that_step(buying: bool, expected: float) -> None:
    simulator = whole_day(30.0, buying=buying)
    number = simulator.step(np.array([15.0]))
    paid = PAPenalty(penalty=100.0)(History.from_simulator(simulator), number)
    assert paid[0] == pytest.approx(expected, abs=1e-9)


def test_volume_cap_cuts_ticks_and_leaves_a_rest() -> None:
    rules = ExecutionRules(volume_cap=0.005)
    simulator = Simulator(RISING, parent_orders(0, 3900.0, False, 0, 390), rules)
    for _ in range(13):
        simulator.step(np.array([300.0]))
    executed = [171.75, 216.75, 261.75, 297.25, *[300.0] * 8, 314.45]
    np.testing.assert_allclose(simulator.steps.executed[0], executed, rtol=0, atol=1e-9)
    history = History.from_simulator(simulator)
    assert history.left[0] == pytest.approx(238.05, abs=1e-9)
    assert simulator.over
    assert measure_orders(history)["ffr"][0] == pytest.approx(1.0 - 238.05 / 3900.0)


def test_request_over_what_is_left_is_cut_and_ends_the_order() -> None:
    simulator = whole_day(30.0)
    simulator.step(np.array([1000.0]))
    assert simulator.over
    assert simulator.steps.requested[0, 0] == 30.0
    assert History.from_simulator(simulator).executed[0] == pytest.approx(30.0)


def test_a_negative_request_executes_nothing() -> None:
    simulator = whole_day(30.0)
    simulator.step(np.array([-5.0]))
    assert simulator.steps.executed[0, 0] == 0.0


def test_order_off_the_grid_has_a_short_first_and_last_step() -> None:
    simulator = Simulator(RISING, parent_orders(0, 10.0, True, 25, 70), ExecutionRules())
    assert simulator.n_steps[0] == 3
    for _ in range(3):
        simulator.step(np.array([1.0]))
    assert simulator.steps.first[0].tolist() == [25, 30, 60]
    assert simulator.steps.last[0].tolist() == [30, 60, 70]
    # All that is left goes on the last tick.
    assert simulator.ticks.executed[0, 69] == pytest.approx(10.0 - 2.0 - 0.9)
    assert simulator.benchmarks.twap[0] == pytest.approx(100.0 + 0.01 * (25 + 69) / 2)


def test_halted_day_leaves_the_order_whole_and_gains_nothing() -> None:
    days = Days.from_prices(np.full((1, 60), np.nan), np.zeros((1, 60)))
    simulator = Simulator(days, parent_orders(0, 10.0, True, 0, 60), ExecutionRules())
    while not simulator.over:
        simulator.step(np.array([10.0]))
    measured = measure_orders(History.from_simulator(simulator))
    assert measured["ffr"][0] == 0.0
    assert {name: measured[name][0] for name in ("pa", "gain_twap", "shortfall")} == {
        "pa": 0.0,
        "gain_twap": 0.0,
        "shortfall": 0.0,
    }


def test_halted_day_after_a_known_price_is_charged_that_price() -> None:
    days = Days.from_prices(np.full((1, 60), np.nan), np.zeros((1, 60)))
    days = replace(days, known=np.full((1, 60), 100.0))
    rules = ExecutionRules(half_spread=0.001, temporary=0.01, volume_cap=0.1)
    orders = parent_orders(0, 10.0, [True, False], 0, 60)
    simulator, paid = Simulator(days, orders, rules), np.zeros(2)
    while not simulator.over:
        number = simulator.step(np.full(2, 10.0))
        paid += Shortfall()(History.from_simulator(simulator), number)
    measured = measure_orders(History.from_simulator(simulator))
    # Half the spread, and a tenth of the impact of a whole tick: 10 + 10 basis points.
    for name in ("gain_twap", "gain_vwap", "gain_arrival"):
        np.testing.assert_allclose(measured[name], -20.0)
    np.testing.assert_allclose(measured["shortfall"], 20.0)
    np.testing.assert_allclose(paid, -20.0)


def test_whoever_does_not_trade_gains_nothing_by_it() -> None:
    rng = np.random.default_rng(5)
    price = 100.0 * np.exp(rng.normal(0.0, 0.001, (400, 40)).cumsum(axis=1))
    days = Days.from_prices(price, np.full(price.shape, 100.0))
    orders = parent_orders(np.arange(400), 100.0, rng.random(400) < 0.5, 0, 40)
    rules = ExecutionRules(10, volume_cap=0.1, half_spread=0.0005, temporary=0.01)
    rewards, gains = [], []
    for asked in (100.0, 0.0):
        simulator, paid = Simulator(days, orders, rules), np.zeros(400)
        while not simulator.over:
            number = simulator.step(np.full(400, asked / 4.0))
            paid += PAPenalty()(History.from_simulator(simulator), number)
        rewards.append(paid.mean())
        gains.append(
            measure_orders(History.from_simulator(simulator), ["gain_twap"])["gain_twap"].mean()
        )
    assert rewards[0] > rewards[1] + 10.0, "waiting is charged for the rest, in one piece"
    assert gains[0] > gains[1]


def test_rest_counts_in_the_reward_as_if_one_tick_had_traded_it() -> None:
    days = Days.from_prices(np.full((1, 2), 100.0), np.full((1, 2), 10.0))
    rules = ExecutionRules(2, volume_cap=0.1, half_spread=0.001, temporary=0.01)
    simulator = Simulator(days, parent_orders(0, 4.0, True, 0, 2), rules)
    number = simulator.step(np.array([4.0]))
    # Each tick takes 1 of 4 at 100·(1 + 0.001 + 0.001); 2 are left, charged the same.
    share = np.array([0.25, 0.25, 0.5])
    expected = (-20.0 * share).sum() - 100.0 * (share**2).sum()
    assert PAPenalty()(History.from_simulator(simulator), number)[0] == pytest.approx(expected)


def test_no_order_takes_more_than_a_tick_traded() -> None:
    days = Days.from_prices(np.full((1, 4), 10.0), np.full((1, 4), 5.0))
    simulator = Simulator(days, parent_orders(0, 1000.0, False, 0, 4), ExecutionRules(2))
    while not simulator.over:
        simulator.step(np.array([1000.0]))
    assert simulator.ticks.executed[0].tolist() == [5.0] * 4


def test_impact_that_takes_a_price_below_zero_is_refused_by_name() -> None:
    days = Days.from_prices(np.full((1, 4), 10.0), np.full((1, 4), 5.0))
    rules = ExecutionRules(2, temporary=1.5)
    simulator = Simulator(days, parent_orders(0, 20.0, False, 0, 4), rules)
    with pytest.raises(DataError, match=r"order 0 \(20 shares of SYM on 2020-01-06\).*below zero"):
        simulator.step(np.array([20.0]))


def test_order_without_a_known_price_arrives_at_its_first() -> None:
    days = Days.from_prices(np.array([[np.nan, 102.0, 104.0]]), np.full((1, 3), 10.0))
    simulator = Simulator(days, parent_orders(0, 1.0, True, 0, 3), ExecutionRules(3))
    simulator.step(np.array([1.0]))
    history = History.from_simulator(simulator)
    assert simulator.benchmarks.arrival[0] == 102.0
    expected = -(history.price[0] - 103.0) / 102.0 * 1e4
    assert measure_orders(history)["gain_twap"][0] == pytest.approx(expected)


def test_session_of_a_date_is_when_any_symbol_traded() -> None:
    price = np.full((4, 4), 10.0)
    price[1, 2:] = np.nan  # halted at noon, beside another that trades on
    price[2:, 3] = np.nan  # an early close: nobody trades
    days = Days.from_prices(price, np.nan_to_num(price))
    monday, tuesday = days.dates[:2]
    days = replace(
        days, dates=np.array([monday, monday, tuesday, tuesday]), symbols=("A", "B", "A", "B")
    )
    begin, end = days.sessions
    assert (begin.tolist(), end.tolist()) == ([0] * 4, [4, 4, 3, 3])


def test_ticks_without_volume_trade_nothing() -> None:
    volume = np.full((1, 4), 100.0)
    volume[0, 1] = 0.0
    days = Days.from_prices(np.full((1, 4), 10.0), volume)
    simulator = Simulator(days, parent_orders(0, 8.0, True, 0, 4), ExecutionRules(ticks_per_step=4))
    simulator.step(np.array([8.0]))
    assert simulator.ticks.executed[0].tolist() == [2.0, 0.0, 2.0, 4.0]


def test_order_larger_than_the_days_volume_is_filled_in_part() -> None:
    rules = ExecutionRules(ticks_per_step=10, volume_cap=1.0)
    days = Days.from_prices(np.full((1, 20), 10.0), np.full((1, 20), 5.0))
    simulator = Simulator(days, parent_orders(0, 1000.0, True, 0, 20), rules)
    while not simulator.over:
        simulator.step(np.array([500.0]))
    history = History.from_simulator(simulator)
    assert history.executed[0] == 100.0
    # The rest is charged at the last price, which is the arrival's.
    assert measure_orders(history, ["shortfall"])["shortfall"][0] == pytest.approx(0.0)


def test_spread_and_impact_by_hand() -> None:
    rules = ExecutionRules(2, half_spread=0.001, temporary=0.01, permanent=0.02)
    days = Days.from_prices(np.full((1, 2), 100.0), np.full((1, 2), 10.0))
    simulator = Simulator(days, parent_orders(0, 4.0, True, 0, 2), rules)
    simulator.step(np.array([4.0]))
    # A fifth of the volume each: 0.001 + 0.01/5, and in the second tick 0.02/5 more.
    np.testing.assert_allclose(simulator.ticks.price[0], [100.3, 100.7])
    selling = Simulator(days, parent_orders(0, 4.0, False, 0, 2), rules)
    selling.step(np.array([4.0]))
    np.testing.assert_allclose(selling.ticks.price[0], [99.7, 99.3])


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ((0, -5.0, True, 0, 390), "amount = -5 must be a positive number"),
        ((0, math.nan, True, 0, 390), "amount = nan"),
        ((1, 5.0, True, 0, 390), "day = 1 must be one of the 1 days"),
        ((0, 5.0, True, 390, 391), "start = 390 must be inside the market's hours"),
        ((0, 5.0, True, 10, 10), "end = 10 must be after start"),
        ((0, 5.0, True, 10, 400), "end = 400"),
    ],
)
def test_impossible_orders_are_refused_by_number_and_field(
    order: tuple[int, float, bool, int, int], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        Simulator(RISING, parent_orders(*order), ExecutionRules())


def test_pa_is_biased_on_a_martingale_and_gain_is_not() -> None:
    """Selling everything at the first tick 'earns' 1.33 bp of PA where nothing can be earned."""
    rng = np.random.default_rng(0)
    n_days, n_ticks, daily = 60_000, 24, 0.02
    moves = rng.normal(0.0, daily / math.sqrt(n_ticks), (n_days // 2, n_ticks))
    moves = np.concatenate([moves, -moves])
    moves[:, 0] = 0.0
    price = 100.0 * (1.0 + np.cumsum(moves, axis=1))
    orders = parent_orders(np.arange(n_days), 1.0, False, 0, n_ticks)
    rules = ExecutionRules(ticks_per_step=1)
    simulator = Simulator(Days.from_prices(price, np.ones_like(price)), orders, rules, record=False)
    simulator.step(np.ones(n_days))
    measured = measure_orders(History.from_simulator(simulator), ["pa", "gain_twap"])
    variance = daily**2 * sum((1 - k / n_ticks) ** 2 for k in range(1, n_ticks)) / n_ticks
    assert measured["pa"].mean() == pytest.approx(variance * 1e4, abs=0.03)  # 1.25 with 24 ticks
    assert abs(measured["gain_twap"].mean()) < 1e-6


def test_ratio_reward_is_paid_once_at_the_orders_end_by_class() -> None:
    reward = Ratio()
    simulator = whole_day(30.0)
    paid = []
    while not simulator.over:
        number = simulator.step(np.array([0.0]))
        paid.append(
            float(reward_of(reward, History.from_simulator(simulator), number, np.array([True]))[0])
        )
    # Everything at the day's last tick: 103.89 / 101.945 lies between 1 and 1.1.
    assert paid == [0.0] * 13
    early = whole_day(30.0)
    number = early.step(np.array([30.0]))
    assert reward(History.from_simulator(early), number)[0] == -1.0
    buying = whole_day(30.0, buying=True)
    number = buying.step(np.array([30.0]))
    assert Ratio((1.0, 1.01))(History.from_simulator(buying), number)[0] == 1.0


def test_shortfall_rewards_of_all_steps_are_minus_the_shortfall() -> None:
    rules = ExecutionRules(volume_cap=0.002)
    simulator = Simulator(RISING, parent_orders(0, 3900.0, True, 0, 390), rules)
    total = 0.0
    while not simulator.over:
        number = simulator.step(np.array([300.0]))
        total += float(Shortfall()(History.from_simulator(simulator), number)[0])
    measured = measure_orders(History.from_simulator(simulator), ["shortfall"])
    assert History.from_simulator(simulator).left[0] > 0.0
    assert total == pytest.approx(-measured["shortfall"][0])


def test_weighted_rewards_add_up() -> None:
    simulator = whole_day(30.0)
    number = simulator.step(np.array([15.0]))
    history = History.from_simulator(simulator)
    both = Weighted([(2.0, PAPenalty()), (0.5, Risk(4.0))])(history, number)
    assert both[0] == pytest.approx(2.0 * PAPenalty()(history, number)[0] - 0.5 * 4.0 * 0.25)


def test_a_reward_that_is_no_number_names_order_step_and_history() -> None:
    simulator = whole_day(30.0)
    number = simulator.step(np.array([15.0]))

    def broken(history: History, number: np.ndarray) -> Floats:
        return np.array([np.nan])

    with pytest.raises(TrainingError, match=r"order 0 \(sell 30 SYM on 2020-01-06.*step 0") as told:
        reward_of(broken, History.from_simulator(simulator), number, np.array([True]))
    assert "1502.175" in str(told.value)


def test_a_metric_of_ones_own_reads_raw_prices_and_volumes() -> None:
    @metric("test_highest_price")
    def highest(history: History) -> Floats:
        return np.asarray(np.where(history.inside, history.market_price, -np.inf).max(axis=1))

    try:
        simulator = whole_day(30.0)
        simulator.step(np.array([30.0]))
        assert measure_orders(History.from_simulator(simulator))["test_highest_price"][0] == 103.89
        with pytest.raises(UsageError, match="did you mean 'test_highest_price'"):
            measure_orders(History.from_simulator(simulator), ["test_highest_prise"])
    finally:
        del METRICS["test_highest_price"]


def test_gain_loss_ratio_by_hand() -> None:
    assert gain_loss_ratio(np.array([2.0, 4.0, -1.0, -2.0, 0.0])) == 2.0
    assert gain_loss_ratio(np.array([1.0])) == math.inf
    assert gain_loss_ratio(np.array([-1.0])) == 0.0
    assert math.isnan(gain_loss_ratio(np.array([0.0])))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_batch_equals_the_plain_twin_on_random_orders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_days, n_ticks, n_orders = 3, int(rng.integers(5, 50)), 8
    price = np.exp(rng.normal(0, 0.01, (n_days, n_ticks)).cumsum(axis=1)) * 20
    price[rng.random(price.shape) < 0.1] = np.nan
    volume = np.floor(rng.exponential(100, price.shape)) * (rng.random(price.shape) > 0.1)
    days = Days.from_prices(price, np.where(np.isnan(price), 0.0, volume))
    cap = float(rng.choice([0.01, 0.3, math.inf]))
    rules = ExecutionRules(int(rng.integers(1, 12)), cap, *rng.uniform(0, 0.01, 3).tolist())
    start = rng.integers(0, n_ticks, n_orders)
    end = start + 1 + np.floor(rng.random(n_orders) * (n_ticks - start)).astype(int)
    orders = parent_orders(
        rng.integers(0, n_days, n_orders),
        rng.uniform(1, 500, n_orders),
        rng.random(n_orders) < 0.5,
        start,
        end,
    )
    simulator = Simulator(days, orders, rules)
    plain = [PlainOrder(days, rules, *(v.item() for v in one)) for one in zip(*orders, strict=True)]
    while not simulator.over:
        asked = rng.uniform(-10, 200, n_orders)
        simulator.step(asked)
        for order, amount in zip(plain, asked, strict=True):
            order.step(float(amount))
    assert all(order.done for order in plain)
    for e, order in enumerate(plain):
        taken = len(order.steps)
        assert simulator.progress.step[e] == taken
        executed, value = np.array(order.steps).T
        np.testing.assert_allclose(simulator.steps.executed[e, :taken], executed, atol=1e-9)
        np.testing.assert_allclose(simulator.steps.value[e, :taken], value, rtol=1e-10, atol=1e-7)
        ticks = simulator.ticks.executed[e]
        assert set(np.nonzero(ticks)[0].tolist()) == set(order.executed)
        for tick, price_paid in order.prices.items():
            assert simulator.ticks.price[e, tick] == pytest.approx(price_paid, rel=1e-12)
