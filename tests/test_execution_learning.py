"""Execution is learned where the answer is known; the whole proofs are `echelon execution prove`.

Here one or two seeds of each, briefly: that learning still works, and that nothing is found where
nothing is.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from echelon.cli import app
from echelon.errors import UsageError
from echelon.execution import measure_orders
from echelon.execution.policies import AlmgrenChriss, Twap, run_orders
from echelon.proving.execution_proofs import (
    MARTINGALE,
    PROOFS,
    QUICK_SIZES,
    DriftFilter,
    DriftMarket,
    ForetoldMarket,
    ImpactMarket,
    ProofSizes,
    SeedFinding,
    Trial,
    above_zero,
    all_within,
    gains_over_twap,
    no_gain,
    pool_seeds,
    prove_execution,
    schedule_costs,
)
from echelon.proving.parts import Done

ONE = Trial(QUICK_SIZES, seed=0)


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
    gained = gains_over_twap(DriftFilter(market, drawn.public), drawn)
    assert 16.0 < gained.mean() < 20.0
    # Without yesterday less is known.
    blind = drawn._replace(
        public=type(drawn.public)(drawn.public.today, np.zeros_like(drawn.public.today))
    )
    assert gains_over_twap(DriftFilter(market, blind.public), blind).mean() < gained.mean() - 1.0
    assert abs(gains_over_twap(AlmgrenChriss(60.0), drawn).mean()) < 3.0


def test_martingale_gives_the_filter_nothing() -> None:
    market = MARTINGALE
    drawn = market.draw(8000, 100, "development")
    gained = gains_over_twap(DriftFilter(DriftMarket(), drawn.public), drawn)
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
@pytest.mark.parametrize("name", ["impact", "quarters", "quarters_dqn"])
def test_learned_schedules_cost_little_more_than_the_best(name: str) -> None:
    assert all_within([PROOFS[name].run(ONE)])


@pytest.mark.slow
def test_drift_is_used_and_a_martingale_is_not() -> None:
    found = PROOFS["drift"].run(ONE)
    assert found.value > 4.0 * found.facts["se"]
    nothing = PROOFS["null"].run(ONE)
    assert nothing.facts["se"] <= 0.3
    assert abs(nothing.value) < 3.0 * nothing.facts["se"]


@pytest.mark.slow
def test_a_teacher_makes_the_student_learn_sooner() -> None:
    found = PROOFS["distilled"].run(ONE)
    ahead = found.facts["student"] - found.facts["plain_student_steps"]
    assert ahead > 4.0 * found.facts["se"]
    assert found.facts["teacher"] > found.facts["student"]


# --- what the seeds say together


def test_orders_of_all_seeds_are_pooled_as_if_put_together() -> None:
    rng = np.random.default_rng(0)
    seeds = [rng.normal(0.1 * k, 1.0 + k, 50 + 10 * k) for k in range(3)]
    found = [
        SeedFinding(float(x.mean()), {"se": stats.sem(x), "orders": float(len(x))}) for x in seeds
    ]
    whole = np.concatenate(seeds)
    assert pool_seeds(found) == pytest.approx((whole.mean(), stats.sem(whole)))


def test_claims_hold_only_where_they_should() -> None:
    def found(*values: float, **facts: float) -> list[SeedFinding]:
        return [SeedFinding(value, facts) for value in values]

    assert all_within(found(1.0, 1.05))
    assert not all_within(found(1.0, 1.06))
    assert above_zero(found(1.0, 1.1, 0.9))
    assert not above_zero(found(1.0, -1.0, 0.5))
    assert no_gain(found(0.1, -0.1, se=0.2, orders=100))
    assert not no_gain(found(0.9, 1.1, se=0.2, orders=100)), "a gain that can be told"
    assert not no_gain(found(0.0, 0.0, se=0.9, orders=100)), "measured too coarsely"


def test_proofs_run_in_parts_and_go_on(tmp_path: Path) -> None:
    tiny = ProofSizes(
        **dict.fromkeys((f.name for f in fields(ProofSizes)), 200) | {"seeds": 2, "train_days": 64}
    )
    names = ["impact", "null", "distilled_null"]
    first = prove_execution(tmp_path, names, tiny)
    assert [one.name for one in first.proofs] == names
    assert first.proofs[2].holds is None
    assert not first.passed, "nothing can have been learned"
    kept = json.loads((tmp_path / "execution.json").read_text())
    assert kept["proofs"][0]["values"] == list(first.proofs[0].values)
    again: list[object] = []
    second = prove_execution(tmp_path, names, tiny, on_report=lambda part, done: again.append(done))
    assert second.proofs == first.proofs
    assert all(isinstance(one, Done) for one in again), "nothing was trained again"


def test_unknown_proof_is_named_with_those_there_are(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["execution", "prove", "impacts", "--output-dir", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert "quarters_dqn" in str(done.exception)
