"""Execution is learned where the answer is known; the whole proofs are `prove_execution`.

Here one or two seeds of each, briefly: that learning still works, and that nothing is found where
nothing is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.execution import measure_orders
from echelon.execution.policies import run_orders
from echelon.execution.schedules import AlmgrenChriss, Immediate, Twap
from echelon.proving.execution_markets import (
    DriftFilter,
    DriftMarket,
    ForetoldMarket,
    ImpactMarket,
    martingale,
)
from echelon.proving.execution_proofs import (
    QUICK,
    gains,
    prove_distilled,
    prove_drift,
    prove_grid,
    prove_impact,
    prove_null,
    schedule_costs,
)

ONE = replace(QUICK, seeds=1)


# --- the markets


def test_impact_market_pays_what_its_closed_form_says() -> None:
    market = ImpactMarket()
    drawn = market.draw()
    best = schedule_costs(AlmgrenChriss(market.kappa), market, drawn)
    np.testing.assert_allclose(best, market.least, rtol=1e-9)
    assert schedule_costs(Twap(), market, drawn)[0] / market.least == pytest.approx(1.364, abs=1e-3)
    # The rewards of an order add up to minus its cost.
    task = drawn.task(market.reward)
    history = run_orders(AlmgrenChriss(market.kappa), drawn.days, drawn.orders, drawn.rules)
    paid = sum(
        task.reward(history, np.full(len(drawn.orders), k))[:2] for k in range(market.n_steps)
    )
    np.testing.assert_allclose(paid, -market.least, rtol=1e-9)


def test_dynamic_programming_agrees_with_the_prototype() -> None:
    market = ImpactMarket()
    quarters = market.least_on_grid((0.0, 0.25, 0.5, 0.75, 1.0))
    twentieths = market.least_on_grid(tuple(k / 20 for k in range(21)))
    assert quarters / market.least == pytest.approx(1.432, abs=1e-3)
    assert twentieths / market.least == pytest.approx(1.018, abs=1e-3)


def test_drift_is_there_and_can_be_known() -> None:
    market = DriftMarket()
    drawn = market.draw(8000, 100, "development")
    gained = gains(DriftFilter(market, drawn.public), drawn)
    assert 16.0 < gained.mean() < 20.0
    # Without yesterday less is known.
    blind = drawn._replace(public=type(drawn.public).of(drawn.public.today))
    assert gains(DriftFilter(market, blind.public), blind).mean() < gained.mean() - 1.0
    assert abs(gains(Immediate(), drawn).mean()) < 3.0


def test_martingale_gives_the_filter_nothing() -> None:
    market = martingale()
    drawn = market.draw(8000, 100, "development")
    gained = gains(DriftFilter(DriftMarket(), drawn.public), drawn)
    assert abs(gained.mean()) < 3.0 * gained.std() / np.sqrt(len(gained))


def test_foretold_sign_has_the_correlation_it_says() -> None:
    market = ForetoldMarket(correlation=0.4)
    drawn = market.draw(20_000, 100, "development")
    price = drawn.days.buy
    for t in (0, 5, 10):
        after = price[:, t + 2 :].mean(axis=1) - price[:, t + 1]
        told = np.corrcoef(drawn.public.today[:, t, 1], after)[0, 1]
        assert told == pytest.approx(0.4, abs=0.03)
    history = run_orders(Twap(), drawn.days, drawn.orders, drawn.rules, record=False)
    cost = measure_orders(history, ["gain_twap"])["gain_twap"].mean()
    assert cost == pytest.approx(-market.twap_cost, abs=0.1)


def test_draws_of_other_names_and_seeds_differ_and_repeat() -> None:
    market = DriftMarket()
    first = market.draw(5, 0, "test").days.buy
    np.testing.assert_array_equal(first, market.draw(5, 0, "test").days.buy)
    assert not np.array_equal(first, market.draw(5, 0, "development").days.buy)
    assert not np.array_equal(first, market.draw(5, 1, "test").days.buy)


# --- learning


@pytest.mark.slow
def test_rate_policy_finds_the_optimal_schedule() -> None:
    assert prove_impact(ONE).holds


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_fractions_find_the_best_of_their_grid(algo: str) -> None:
    assert prove_grid(ONE, algo=algo).holds


@pytest.mark.slow
def test_drift_is_used_and_a_martingale_is_not() -> None:
    found = prove_drift(ONE)
    assert found.values[0] > 4.0 * found.facts["se"][0]
    nothing = prove_null(ONE)
    assert nothing.facts["whole"][1] <= 0.3
    assert abs(nothing.values[0]) < 3.0 * nothing.facts["se"][0]


@pytest.mark.slow
def test_a_teacher_makes_the_student_learn_sooner() -> None:
    found = prove_distilled(ONE)
    assert found.values[0] > 4.0 * found.facts["se"][0]
    assert found.facts["teacher"][0] > found.facts["student"][0]
