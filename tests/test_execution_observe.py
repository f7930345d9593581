"""State interpreters of execution: what policies see, and that they see nothing to come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scrambled_days import scramble_after

from echelon.execution import ExecutionRules, Simulator, parent_orders
from echelon.execution.days import Days
from echelon.execution.features import public_features
from echelon.execution.policies import current_step, full_history

DAYS = Days.from_prices(
    np.tile(np.linspace(10.0, 12.0, 12), (2, 1)), np.tile(np.arange(1.0, 13.0) * 100.0, (2, 1))
)
FEATURES = public_features(DAYS, names=["return_1", "time"])


def test_current_step_has_the_orders_own_state() -> None:
    orders = parent_orders([0, 1], [90.0, 30.0], [True, False], [0, 4], [12, 10])
    simulator = Simulator(DAYS, orders, ExecutionRules(ticks_per_step=4))
    simulator.step(np.array([30.0, 10.0]))
    found = current_step(simulator)
    assert {name: array.tolist() for name, array in found.items()} == {
        "acquiring": [1, 0],
        "cur_step": [1, 1],
        "num_step": [3, 2],
        "target": [90.0, 30.0],
        "position": [60.0, 20.0],
    }
    dtypes = {name: array.dtype for name, array in found.items()}
    assert dtypes == {
        name: np.int32 if name in ("acquiring", "cur_step", "num_step") else np.float32
        for name in found
    }


def test_full_history_shows_today_up_to_now_and_all_of_yesterday() -> None:
    orders = parent_orders(1, 90.0, True, 0, 12)
    simulator = Simulator(DAYS, orders, ExecutionRules(ticks_per_step=4))
    before = full_history(simulator, FEATURES)
    assert not before["data_processed"].any()
    assert before["position_history"].tolist() == [[90.0, 0.0, 0.0, 0.0]]
    assert before["cur_tick"].tolist() == [0]
    simulator.step(np.array([30.0]))
    found = full_history(simulator, FEATURES)
    np.testing.assert_array_equal(found["data_processed"][0, :4], FEATURES.today[1, :4])
    assert not found["data_processed"][0, 4:].any()
    np.testing.assert_array_equal(found["data_processed_prev"][0], FEATURES.today[0])
    assert found["position_history"].tolist() == [[90.0, 60.0, 0.0, 0.0]]
    assert found["cur_tick"].tolist() == [4]
    kinds = {name: array.dtype.kind + str(array.dtype.itemsize) for name, array in found.items()}
    assert set(kinds.values()) == {"i4", "f4"}  # type: ignore[comparison-overlap]


def test_finished_orders_keep_places_that_exist() -> None:
    orders = parent_orders(0, 90.0, True, 0, 12)
    simulator = Simulator(DAYS, orders, ExecutionRules(ticks_per_step=4))
    while not simulator.over:
        simulator.step(np.array([30.0]))
    found = full_history(simulator, FEATURES)
    assert (found["cur_tick"][0], found["cur_step"][0]) == (11, 2)
    assert found["position"][0] == 0.0
    assert found["position_history"][0] == pytest.approx([90.0, 60.0, 30.0, 0.0])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_scrambling_the_future_changes_no_observation_before_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_ticks = 12
    price = np.exp(rng.normal(0, 0.02, (4, n_ticks)).cumsum(axis=1)) * 20
    price[rng.random(price.shape) < 0.1] = np.nan
    volume = np.where(np.isnan(price), 0.0, np.floor(rng.exponential(100, price.shape)))
    days = Days.from_prices(price, volume)
    start = int(rng.integers(0, n_ticks))
    orders = parent_orders(2, 50.0, bool(rng.integers(2)), start, n_ticks)
    rules = ExecutionRules(int(rng.integers(1, 6)), float(rng.choice([0.1, np.inf])))
    cut = int(rng.integers(0, n_ticks))
    runs = []
    for world in (days, scramble_after(days, 2, cut, seed)):
        features = public_features(world)
        simulator = Simulator(world, orders, rules)
        asked = np.random.default_rng(seed + 1)
        seen = []
        while not simulator.over and simulator.progress.tick[0] <= cut + 1:
            seen.append((int(simulator.progress.tick[0]), full_history(simulator, features)))
            simulator.step(asked.uniform(0, 20, 1))
        runs.append(seen)
    assert len(runs[0]) == len(runs[1])
    for (tick, one), (other_tick, other) in zip(*runs, strict=True):
        assert tick == other_tick <= cut + 1
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)  # type: ignore[literal-required]
