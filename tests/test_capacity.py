"""Capacity: the same policy with more money, and its share of the bars' volume, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import make_config, make_world

from echelon.backtest.baselines import make_baseline
from echelon.backtest.run import run_backtest
from echelon.evaluation.capacity import capacity_sweep, mean_capacity, participation

CONFIG = make_config("eval.rebalance_bars=1000")
PRICES = np.full((6, 2), 10.0)
VOLUME = np.array([[1.0, 1.0], [40_000.0, 100_000.0], *[[5.0, 5.0]] * 4])


def test_participation_is_of_the_bar_that_filled_the_order() -> None:
    world = make_world(close=PRICES, volume_close=VOLUME, commission=0.0, initial_cash=100_000.0)
    span = range(0, 6)
    # 5,000 shares of each, decided at row 0 and filled at row 1.
    bought = run_backtest(make_baseline("equal_weight", CONFIG), world, span, CONFIG)
    assert participation(bought, world, span) == pytest.approx([0.125, 0.05])
    at_close = make_world(
        close=PRICES,
        volume_close=np.roll(VOLUME, -1, axis=0),
        commission=0.0,
        initial_cash=100_000.0,
        fill_open=False,
    )
    bought = run_backtest(make_baseline("equal_weight", CONFIG), at_close, span, CONFIG)
    assert participation(bought, at_close, span) == pytest.approx([0.125, 0.05])


def test_ten_times_the_money_is_ten_times_the_volume_until_the_cap_cuts_it() -> None:
    cap = 0.4
    world = make_world(
        close=PRICES,
        volume_close=VOLUME,
        volume_open=VOLUME,
        participation=cap,
        commission=0.0,
        initial_cash=100_000.0,
    )
    policy = make_baseline("equal_weight", CONFIG)
    usual, tenfold = capacity_sweep(policy, world, range(0, 6), CONFIG)
    assert (usual["cash"], tenfold["cash"]) == (100_000.0, 1_000_000.0)
    assert (usual["orders"], usual["cut"]) == (2, 0.0)
    assert usual["participation_mean"] == pytest.approx(0.0875)
    # 50,000 shares of each: 40 % of 40,000 and of 100,000 are 16,000 and 40,000.
    assert (tenfold["orders"], tenfold["cut"]) == (2, 1.0)
    assert tenfold["participation_mean"] == pytest.approx(cap)
    assert tenfold["participation_95"] == pytest.approx(cap)
    assert usual["information_ratio"] == tenfold["information_ratio"] == 0.0  # it is equal weight


def test_known_backtest_is_not_run_again() -> None:
    world = make_world(close=PRICES, volume_close=VOLUME, initial_cash=100_000.0)
    policy = make_baseline("equal_weight", CONFIG)
    known = run_backtest(policy, world, range(0, 6), CONFIG)
    with_it = capacity_sweep(policy, world, range(0, 6), CONFIG, usual=known.against(known))
    assert with_it == capacity_sweep(policy, world, range(0, 6), CONFIG)


def test_market_without_volume_has_no_capacity() -> None:
    policy = make_baseline("equal_weight", CONFIG)
    assert capacity_sweep(policy, make_world(close=PRICES), range(0, 6), CONFIG) == []


def test_folds_are_averaged_and_their_orders_added() -> None:
    first = {"factor": 1.0, "cash": 5.0, "orders": 3, "cut": 0.5, "sharpe_annual": 1.0}
    second = first | {"orders": 4, "cut": None, "sharpe_annual": 2.0}
    (line,) = mean_capacity([[first], [second]])
    assert line == {"factor": 1.0, "cash": 5.0, "orders": 7, "cut": None, "sharpe_annual": 1.5}
    assert mean_capacity([[first], []]) == mean_capacity([]) == []
