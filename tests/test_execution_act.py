"""From actions to shares, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echelon.agents.execution.network import FractionHead, RateHead
from echelon.execution import Days, ExecutionRules, Simulator, parent_orders
from echelon.execution.simulator import next_step

FLAT = Days.from_prices(np.full((1, 60), 10.0), np.full((1, 60), 100.0))
TENS = ExecutionRules(ticks_per_step=10)


def order(amount: float, start: int, end: int) -> Simulator:
    return Simulator(FLAT, parent_orders(0, amount, True, start, end), TENS)


def test_fraction_is_of_the_whole_order_and_the_last_step_takes_all() -> None:
    simulator, act = order(80.0, 0, 30), FractionHead()
    asked = []
    for action in (1, 0, 0):
        asked.append(float(act.shares(torch.tensor([action]), simulator)[0]))
        simulator.step(np.array([asked[-1]]))
    assert asked == [20.0, 0.0, 60.0]


def test_rate_one_is_even_over_ticks_also_off_the_grid() -> None:
    simulator, act = order(45.0, 5, 50), RateHead()
    asked = []
    while not simulator.over:
        asked.append(float(act.shares(act.first_bias(), simulator)[0]))
        simulator.step(np.array([asked[-1]]))
    # Five ticks to the grid, then whole steps of ten: a share a tick, not a fifth a step.
    np.testing.assert_allclose(asked, [5.0, 10.0, 10.0, 10.0, 10.0])
    np.testing.assert_allclose(simulator.ticks.executed[0, 5:50], 1.0)


def test_rate_is_within_its_range_and_scales_what_is_left() -> None:
    simulator, act = order(40.0, 0, 40), RateHead(rate_max=3.0)
    u = torch.logit(torch.tensor([2.0 / 3.0], dtype=torch.float64))
    assert act.shares(u, simulator)[0] == pytest.approx(20.0)
    assert act.shares(torch.tensor([99.0]), simulator)[0] == 30.0
    assert act.shares(torch.tensor([-99.0]), simulator)[0] == pytest.approx(0.0)
    simulator.step(np.array([20.0]))
    assert act.shares(torch.zeros(1), simulator)[0] == pytest.approx(1.5 * 20.0 / 3.0)


def test_coming_step_of_an_order_that_is_over_is_harmless() -> None:
    simulator = order(10.0, 0, 60)
    simulator.step(np.array([10.0]))
    for _ in range(3):
        assert RateHead().shares(torch.zeros(1), simulator)[0] == 0.0
        simulator.step(np.zeros(1))
    ended = order(10.0, 50, 60)
    ended.step(np.array([10.0]))
    coming = next_step(ended)
    assert (coming.left[0], coming.ticks[0], bool(coming.final[0])) == (1, 1, True)
