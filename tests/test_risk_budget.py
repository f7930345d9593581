"""The drawdown budget and the target volatility: caps by hand, real books, states, all policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import trained_run
from commands import Always
from rule_routers import EqualRouter
from worlds import at, make_config, make_world

from echelon.backtest.baselines import make_baseline, run_baselines
from echelon.backtest.budget import BudgetPolicy, decider, find_jumps, under_budget
from echelon.backtest.ensemble import EnsemblePolicy
from echelon.backtest.run import run_backtest
from echelon.config.hierarchy import RiskConfig
from echelon.data.calendars import bars_per_day
from echelon.envs.act import Action, Holdings
from echelon.errors import StoreError
from echelon.evaluation.evaluate import evaluate
from echelon.population.expert_books import ExpertStanding
from echelon.population.policy import HierarchyPolicy
from echelon.risk.budget import PEAK_DAYS, ExposureBudget, budget_cap
from echelon.risk.events import RiskKind
from echelon.risk.portfolio import MONTH
from echelon.training.run import TrainedRun

BUDGET = "risk.max_drawdown=0.15"


def wild(seed: int = 3, n_rows: int = 400, scale: float = 0.03, **changes: Any) -> Any:
    steps = np.random.default_rng(seed).normal(-0.002, scale, (n_rows, 3))
    return make_world(close=100.0 * np.exp(np.cumsum(steps, axis=0)), **changes)


def deepest(value: np.ndarray) -> float:
    """The deepest drawdown from the peak of 252 trading days."""
    return max(
        1.0 - value[k] / value[max(0, k - PEAK_DAYS) : k + 1].max() for k in range(len(value))
    )


class Once:
    """Buys on the first bar and leaves all as it is from then on."""

    name, kind = "once", "weights"

    def start(self, world: Any, span: range) -> None:
        self._first = span.start

    def decide(self, row: np.ndarray, held: Holdings) -> np.ndarray:
        bought = np.array([0.5, 0.3, 0.2])
        return np.where((row == self._first)[:, None], bought, np.nan)


class Buys:
    """BUY of everything, at every bar: served in the order of assets while the cash lasts."""

    name, kind = "buys", "discrete"

    def start(self, world: Any, span: range) -> None:
        """Nothing to prepare."""

    def decide(self, row: np.ndarray, held: Holdings) -> np.ndarray:
        return np.full(held.weights.shape, Action.BUY, dtype=np.int8)


def test_cap_is_the_surplus_of_grossman_and_zhou_by_hand() -> None:
    """At 100 of a peak of 110 and a budget of 15 %, the surplus is 100 - 93.5 = 6.5 of 100."""
    caps = budget_cap(np.array([0.0, 1.0 - 100.0 / 110.0, 0.15, 0.4, np.nan]), 0.15)
    np.testing.assert_allclose(caps[:2], [0.85, 0.85 * (0.065 / 0.15) ** 1.25])
    assert caps[2:].tolist() == [0.0, 0.0, 0.0]


def test_peak_leaves_the_window_after_252_trading_days_whatever_the_bar() -> None:
    for day in (1, 3):
        budget = ExposureBudget(1, RiskConfig(max_drawdown=0.15), 252.0, day)
        budget.update(np.array([110.0]), np.array([110.0]))
        drawdowns = [
            float(budget.update(np.array([100.0]), np.array([100.0])).drawdown[0])
            for _ in range(PEAK_DAYS * day + 1)
        ]
        assert drawdowns[-2] == pytest.approx(10.0 / 110.0)
        assert drawdowns[-1] == 0.0


def test_volatility_is_of_the_book_without_a_cap_and_needs_twenty_days() -> None:
    budget = ExposureBudget(1, RiskConfig(target_volatility=0.1), 252.0)
    returns = np.random.default_rng(0).normal(0.0, 0.02, 100)
    wish = 50.0 * np.cumprod(1.0 + returns)
    verdicts = [budget.update(np.array([1.0]), wish[k : k + 1]) for k in range(100)]
    assert np.isnan(verdicts[19].volatility[0])  # 19 returns
    assert verdicts[19].cap[0] == 1.0
    first = (wish[1:21] / wish[:20] - 1.0).std(ddof=1) * np.sqrt(252.0)
    assert verdicts[20].volatility[0] == pytest.approx(first)
    last = returns[-60:].std(ddof=1) * np.sqrt(252.0)
    assert verdicts[-1].cap[0] == pytest.approx(0.1 / last)


@pytest.mark.parametrize("policy", [Once(), Always("all", (0.4, 0.3, 0.3)), Buys()])
def test_real_book_keeps_the_budget_where_the_policy_alone_loses_half(policy: Any) -> None:
    world = wild()
    span = range(3, 399)
    alone = run_backtest(policy, world, span, make_config())
    kept = run_backtest(policy, world, span, make_config(BUDGET))
    assert alone.measures["max_drawdown"] > 0.3
    assert deepest(kept.value) < 0.17
    assert kept.budget is not None
    # What is wanted does not depend on what is held: the book without limits is the policy's own.
    np.testing.assert_array_equal(kept.budget.unscaled, alone.value)
    share = (1.0 - kept.cash_share[1:-1]) / np.maximum(1.0 - alone.cash_share[1:-1], 1e-9)
    invested = alone.cash_share[1:-1] < 0.5
    assert (share - kept.budget.cap[:-1])[invested].max() < 0.15
    assert kept.budget.cap.min() < 0.3


def test_budget_that_never_binds_leaves_the_book_as_it_is() -> None:
    world = make_world(close=100.0 * 1.001 ** np.arange(60)[:, None] * np.ones((1, 3)))
    policy = Always("all", (0.4, 0.3, 0.3))
    config = make_config("risk.target_volatility=5")
    alone, kept = (run_backtest(policy, world, range(3, 59), c) for c in (make_config(), config))
    np.testing.assert_allclose(kept.value, alone.value, rtol=1e-6)


def test_off_by_default_and_where_risk_control_is_off() -> None:
    policy = Once()
    for config in (make_config(), make_config(BUDGET, "risk.enabled=false")):
        assert under_budget(policy, config) is policy
    limited = under_budget(policy, make_config(BUDGET))
    assert under_budget(limited, make_config(BUDGET)) is limited
    assert decider(limited) is policy


def test_restored_at_every_bar_decides_the_same() -> None:
    world, span = wild(n_rows=120), range(3, 119)
    config = make_config(BUDGET, "risk.target_volatility=0.2")
    once = run_backtest(make_baseline("equal_weight", config), world, span, config)

    class Restarting(BudgetPolicy):
        def decide(self, row: np.ndarray, held: Holdings) -> np.ndarray:
            if row[0] > span.start:
                state = self.state()
                self.start(world, span)
                self.restore(state)
            return super().decide(row, held)

    again = run_backtest(
        Restarting(make_baseline("equal_weight", config), config), world, span, config
    )
    np.testing.assert_array_equal(again.value, once.value)
    np.testing.assert_array_equal(again.actions, once.actions)


def test_state_of_another_shape_is_refused() -> None:
    world, config = wild(n_rows=40), make_config(BUDGET)
    policy = BudgetPolicy(Once(), config)
    run_backtest(policy, world, range(3, 20), config)
    state = policy.state()
    policy.start(world, range(3, 20))
    with pytest.raises(StoreError, match=r"rows\[E\]"):
        policy.restore({"run.other": np.zeros(1)})
    with pytest.raises(StoreError, match="shares"):
        policy.restore(state | {"run.shares": np.zeros((1, 2))})


def test_past_of_a_book_is_held_against_the_next_one() -> None:
    """A fall of 10 % before the first bar leaves a third of the budget, at the first decision."""
    world, config = make_world(), make_config(BUDGET)
    past = np.array([[100.0, 100.0], [90.0, 95.0]])
    kept = run_backtest(Once(), world, range(3, 50), config, past=past)
    assert kept.budget is not None
    assert kept.budget.cap[0] == pytest.approx(budget_cap(np.array([0.1]), 0.15)[0])
    fresh = run_backtest(Once(), world, range(3, 50), config)
    assert fresh.budget is not None
    assert fresh.budget.cap[0] == budget_cap(np.array([0.0]), 0.15)[0]


def test_two_runs_that_carry_the_past_keep_the_budget_of_one() -> None:
    """The second begins with the cap of one that went through both, and so does the path."""
    world, config = wild(), make_config(BUDGET)
    whole = run_backtest(Always("all", (0.4, 0.3, 0.3)), world, range(3, 399), config)
    first = run_backtest(Always("all", (0.4, 0.3, 0.3)), world, range(3, 201), config)
    assert first.budget is not None
    past = np.stack([first.value, first.budget.unscaled], axis=1)
    second = run_backtest(Always("all", (0.4, 0.3, 0.3)), world, range(200, 399), config, past=past)
    assert whole.budget is not None
    assert second.budget is not None
    assert second.budget.cap[0] == pytest.approx(whole.budget.cap[197])
    stitched = np.concatenate([first.value, second.value[1:] / second.value[0] * first.value[-1]])
    assert deepest(stitched) < 0.17


def test_jumps_are_counted_when_they_happen_also_across_a_past() -> None:
    world, risk = make_world(), RiskConfig(max_drawdown=0.15)
    value = np.array([100.0, 99.0, 84.0, 83.0, 90.0, 84.0])
    assert find_jumps(value, world, risk, None).tolist() == [False, True, False, False, True]
    past = np.array([[120.0, 1.0], [100.0, 1.0]])
    assert find_jumps(value, world, risk, past).tolist() == [False, False, False, False, False]


def test_events_say_when_exposure_is_cut_restored_and_jumped() -> None:
    config = RiskConfig(max_drawdown=0.15)
    budget, kinds = ExposureBudget(1, config, 252.0), []
    for value in (100.0, 99.0, 90.0, 84.0, 84.0, 99.5):
        verdict = budget.update(np.array([value]), np.array([value]))
        events = budget.events(verdict, 7)
        kinds.append([event.kind for event in events])
        assert all(event.time == 7 and event.limit == 0.15 for event in events)
    jumped = [RiskKind.BUDGET_JUMPED]
    assert kinds == [[], [], [RiskKind.EXPOSURE_CUT], jumped, [], [RiskKind.EXPOSURE_RESTORED]]


def test_baselines_ensembles_and_hierarchies_are_scaled_alike() -> None:
    world = wild()
    names = "[equal_weight, buy_and_hold, momentum, random, cash, benchmark]"
    config = make_config(BUDGET, f"eval.baselines={names}")
    done = run_baselines(world, range(3, 399), config)
    assert len(done) == 6
    experts = [Always("one", (0.5, 0.5, 0.0)), Always("two", (0.0, 0.5, 0.5))]
    policies = [EnsemblePolicy(experts), HierarchyPolicy(experts, EqualRouter(), config, 1)]
    done |= {p.name: run_backtest(p, world, range(3, 399), config) for p in policies}
    for name, backtest in done.items():
        assert backtest.budget is not None, name
        assert deepest(backtest.value) < 0.18, name
        assert np.isfinite(backtest.measures["budget_jumps"])


def test_discrete_wish_serves_buys_in_order_while_the_cash_lasts() -> None:
    """With 50 % of the cash a BUY, two of three are served; the real book wants the same two."""
    world = make_world(close=np.full((10, 3), 10.0), commission=0.0)
    config = make_config(BUDGET, "buy_pct=0.5")
    kept = run_backtest(Buys(), world, range(3, 9), config)
    cap = float(budget_cap(np.array([0.0]), 0.15)[0])
    np.testing.assert_allclose(kept.actions[0], [0.5 * cap, 0.5 * cap, np.nan])
    np.testing.assert_allclose(kept.weights[1], [0.5 * cap, 0.5 * cap, 0.0], atol=1e-6)


def test_books_side_by_side_have_budgets_of_their_own() -> None:
    world, config = wild(), make_config(BUDGET)
    policy = BudgetPolicy(Once(), config)
    policy.start(world, range(3, 399))
    held = Holdings(
        np.zeros((2, 3), dtype=np.float32),
        np.ones(2, dtype=np.float32),
        np.ones((2, 3, 3), dtype=bool),
        np.array([1e6, 2e6]),
    )
    policy.decide(at(3, 3), held)
    target = policy.decide(at(4, 4), held._replace(value=np.array([0.9e6, 2e6])))
    one, two = policy.verdict.cap
    assert one < two
    assert np.nansum(target[0]) < np.nansum(target[1])


def test_windows_of_risk_control_are_in_trading_days() -> None:
    """Two days of three bars each: a peak counts at the sixth bar after it, and no longer then."""
    assert [bars_per_day(*kind) for kind in (("XNYS", "1d"), ("XSHG", "5min"))] == [1, 48]
    assert bars_per_day("24/7", "1min") == 1440
    world = make_world(bars_per_day=3)
    config = make_config("risk.drawdown_window=2", "risk.turnover_per_month=1")
    standing = ExpertStanding(1, 1, config, world.bars_per_day)
    fresh, nobody = np.array([True]), np.array([-1])
    drawdowns = []
    for value in (100.0, *[90.0] * 8):
        verdict = standing.mark(np.array([[value]]), fresh, nobody)
        drawdowns.append(float(verdict.drawdown.drawdown[0, 0]))
        fresh = np.array([False])
    assert drawdowns == pytest.approx([0.0, *[0.1] * 6, 0.0, 0.0])
    policy = HierarchyPolicy([Always("one", (1.0, 0.0, 0.0))], EqualRouter(), config, 1)
    run_backtest(policy, world, range(3, 20), config)
    assert policy.state()["run.turnover.traded"].shape == (MONTH * 3, 1)


def test_agents_that_are_trained_get_a_budget_for_an_evaluation(
    tmp_path: Path, bars_file: Path
) -> None:
    run = TrainedRun.open(trained_run(tmp_path / "run", bars_file, "A2C"))
    free = evaluate(run, "valid", trust=False)
    limited = evaluate(run.executed_by(["risk.max_drawdown=0.05"]), "valid", trust=False)
    assert limited.directory == run.path / "executors/limits/evaluations/valid"
    assert "limits" not in free.facts
    assert limited.facts["limits"]["max_drawdown"] == 0.05
    with_it, without = (e.baselines["equal_weight"]["exposure"] for e in (limited, free))
    assert with_it < without - 0.05
