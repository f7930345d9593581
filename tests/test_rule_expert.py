"""Rules as experts: a portfolio at every bar, worked out once a row, that nothing later changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hierarchies import assert_same, everything, make_learner, trained
from worlds import make_config, make_world

from echelon.backtest.baselines import make_baseline
from echelon.backtest.forecaster import fit_forecaster
from echelon.backtest.run import run_backtest
from echelon.config import load_config
from echelon.envs import World
from echelon.envs.act import Holdings
from echelon.errors import ConfigError, DataError, StoreError
from echelon.population.learner import HierarchyLearner
from echelon.population.measurement import parts_of
from echelon.population.reference_policies import sort_reference_policies
from echelon.population.rule_expert import ForecastExpert, RuleExpert, rule_experts
from echelon.report.texts import Words
from echelon.training.run import training_hash

EVERY = 5
RULES = ("equal_weight", "min_variance", "hrp", "momentum")
EVAL = (f"eval.rebalance_bars={EVERY}", "eval.estimation_bars=20", "eval.momentum_bars=4")


def rule(name: str, world: World, *more: str) -> RuleExpert:
    config = make_config(f"experts.rules=[{name}]", *EVAL, *more)
    (expert,) = rule_experts(config)
    expert.start(world, range(len(world.times)))
    return expert


def books(*weights: list[float]) -> Holdings:
    """Books that may do everything."""
    held = np.array(weights, dtype=np.float32)
    allowed = np.ones((*held.shape, 3), dtype=bool)
    return Holdings(held, (1.0 - held.sum(axis=1)), allowed, np.full(len(held), 1e5))


def drifted(world: World, weights: np.ndarray, since: int, row: int) -> np.ndarray:
    """What weights[N] of the row `since` have become, price by price."""
    worth = [w * world.growth[row, n] / world.growth[since, n] for n, w in enumerate(weights)]
    return np.array(worth) / (sum(worth) + 1.0 - sum(weights))


def test_rule_holds_its_last_rebalancing_as_prices_have_moved_it() -> None:
    world = make_world(n_rows=60, window=3)
    expert = rule("equal_weight", world)
    cash = books([0.0, 0.0, 0.0])
    for row in (20, 21, 24, 25):
        since = row // EVERY * EVERY
        expected = drifted(world, np.full(3, 1 / 3), since, row)
        np.testing.assert_allclose(expert.decide(np.array([row]), cash)[0], expected, rtol=1e-12)


def test_first_row_of_a_world_is_a_rebalancing_row() -> None:
    world = make_world(n_rows=60, window=13)
    expert = rule("equal_weight", world)
    got = expert.decide(np.array([12, 14]), books([0.0] * 3, [0.0] * 3))
    np.testing.assert_allclose(got[0], 1 / 3)
    np.testing.assert_allclose(got[1], drifted(world, np.full(3, 1 / 3), 12, 14))


def test_book_near_the_portfolio_is_left_alone_until_the_rule_rebalances() -> None:
    world = make_world(n_rows=60, window=3)
    expert = rule("equal_weight", world)
    wanted = drifted(world, np.full(3, 1 / 3), 20, 22)
    apart = np.array([1.0, -1.0, 0.0])
    near, far = wanted + 0.01 * apart, wanted + 0.03 * apart
    got = expert.decide(np.array([22, 22, 25]), books(list(near), list(far), [1 / 3] * 3))
    assert np.isnan(got[0]).all()
    np.testing.assert_allclose(got[1], wanted)
    np.testing.assert_allclose(got[2], 1 / 3)


def test_momentum_holds_what_rose_in_equal_shares_and_cash_where_nothing_did() -> None:
    close = np.tile([10.0, 10.0, 10.0], (40, 1))
    close[18:, 0], close[18:, 1], close[18:, 2] = 11.0, 12.0, 9.0
    close[33:] = 5.0
    world = make_world(close=close, window=3)
    got = rule("momentum", world).decide(np.array([20, 35]), books([0.0] * 3, [0.2] * 3))
    np.testing.assert_allclose(got[0], [0.5, 0.5, 0.0])
    np.testing.assert_allclose(got[1], 0.0)


def test_what_cannot_be_traded_stays_and_the_rest_fits_beside_it() -> None:
    world = make_world(n_rows=60, window=3)
    held = books([0.6, 0.1, 0.0], [0.6, 0.1, 0.0])
    held.allowed[:, 0, 1:] = False
    held.allowed[1, 1, 1] = False  # may only be sold
    got = rule("equal_weight", world).decide(np.array([20, 20]), held)
    assert np.isnan(got[:, 0]).all()
    np.testing.assert_allclose(got[0, 1:], 0.2, rtol=1e-6)
    np.testing.assert_allclose(got[1, 1:], [0.4 * 0.1 / (0.1 + 1 / 3), 0.4 / 3 / (0.1 + 1 / 3)])


@pytest.mark.parametrize("name", RULES)
def test_answer_is_the_same_whoever_asks_and_when(name: str) -> None:
    world = make_world(n_rows=80, n_assets=4, window=3)
    expert, rng = rule(name, world), np.random.default_rng(3)
    rows = rng.integers(30, 80, 12)
    held = books(*rng.dirichlet(np.ones(5), 12)[:, :4].tolist())
    together = expert.decide(rows, held)
    for e in rng.permutation(12).tolist():
        alone = rule(name, world)
        alone.start(world, range(int(rows[e]), int(rows[e]) + 1))
        np.testing.assert_array_equal(
            alone.decide(rows[e : e + 1], held.take(slice(e, e + 1)))[0], together[e]
        )


@pytest.mark.parametrize("name", RULES)
def test_rule_looks_at_nothing_after_the_row(name: str) -> None:
    past, other = (make_world(n_rows=80, n_assets=4, window=3) for _ in range(2))
    other.growth[51:] *= 7.0
    other.rows.close[51:] *= 7.0
    held = books([0.1] * 4, [0.2, 0.0, 0.3, 0.0])
    rows = np.array([50, 48])
    np.testing.assert_array_equal(
        rule(name, past).decide(rows, held), rule(name, other).decide(rows, held)
    )


def test_each_rebalancing_is_estimated_once_for_all_books_and_worlds_of_one_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(n_rows=80, window=3)
    expert, asked = rule("min_variance", world), []
    real = RuleExpert._ask
    monkeypatch.setattr(RuleExpert, "_ask", lambda self, row: asked.append(row) or real(self, row))
    held = books(*[[0.1] * 3] * 6)
    expert.decide(np.array([40, 41, 44, 45, 46, 40]), held)
    expert.start(replace(world, splits=dict(world.splits)), range(30, 70))
    expert.decide(np.array([42] * 6), held)
    assert asked == [40, 45]
    expert.start(make_world(n_rows=80, window=3, seed=5), range(30, 70))
    expert.decide(np.array([42] * 6), held)
    assert asked == [40, 45, 40]
    expert.start(world, range(30, 70))
    expert.decide(np.array([42] * 6), held)
    assert asked == [40, 45, 40]


def test_own_book_of_a_rule_trades_when_the_baseline_does_and_earns_what_it_earns() -> None:
    world = make_world(n_rows=120, n_assets=4, window=3)
    expert, span = rule("min_variance", world), range(20, 110)
    own = run_backtest(expert, world, span, make_config(*EVAL))
    baseline = run_backtest(
        make_baseline("min_variance", make_config(*EVAL)), world, span, make_config(*EVAL)
    )
    assert set((np.flatnonzero(own.traded > 1e-9) % EVERY).tolist()) == {0}
    np.testing.assert_allclose(own.value, baseline.value, rtol=1e-12)


def test_state_of_another_policy_is_refused() -> None:
    expert = rule("hrp", make_world())
    assert expert.state() == {}
    expert.restore({})
    with pytest.raises(StoreError, match="hrp: a rule remembers nothing"):
        expert.restore({"trust": np.zeros(1)})
    assert expert.lookback == 20 + EVERY


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("[cash]", "the router may choose cash anyway"),
        ("[hrp, random]", "random is no expert: it decides by lot"),
        ("[benchmark]", "an index, which nobody trades"),
        ("[buy_and_hold]", "what a book did once"),
        ("[hrp, hrp]", "names a rule twice"),
    ],
)
def test_baselines_that_nobody_can_put_in_charge_are_refused(rules: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, [f"experts.rules={rules}"])


def test_settings_of_rules_belong_to_the_training_that_has_them() -> None:
    plain, other = make_config(), make_config("eval.rebalance_bars=7")
    assert training_hash(plain) == training_hash(other)
    ruled = make_config("experts.rules=[hrp]")
    assert training_hash(ruled) != training_hash(plain)
    assert training_hash(ruled) != training_hash(
        make_config("experts.rules=[hrp]", "eval.rebalance_bars=7")
    )
    assert training_hash(ruled) == training_hash(
        make_config("experts.rules=[hrp]", "eval.baselines=[cash]")
    )


DESK = ("experts.rules=[equal_weight, momentum]", *EVAL)


def test_hierarchy_routes_between_learned_experts_and_rules(tmp_path: Path) -> None:
    world = make_world(n_rows=200, window=6, seed=2)
    learner = trained(make_learner(world, tmp_path, *DESK), 8)
    policy = learner.policy()
    names = ("expert 0", "expert 1", "expert 2", "equal_weight", "momentum")
    assert policy.expert_names == names
    assert learner.router.n_experts == 5
    assert learner._skills().shape == (3, 4), "rules have no skill and no niche"
    done = run_backtest(policy, world, range(40, 120), learner.config)
    record = policy.record
    assert record is not None
    assert record.own_values.shape == (80, 5)
    keys = list(policy.reference_policies())
    assert keys == [
        "hedge",
        "expert-0",
        "expert-1",
        "expert-2",
        "expert-3-equal_weight",
        "expert-4-momentum",
    ]
    assert sort_reference_policies(reversed(keys)) == keys
    loaded = HierarchyLearner.load_policy(learner.config, learner.weights(), 2, 7, "again")
    again = run_backtest(loaded, world, range(40, 120), learner.config)
    np.testing.assert_array_equal(done.value, again.value)
    learner.close()


def test_rules_count_in_the_distance_but_only_learned_experts_are_compared_for_reseeding(
    tmp_path: Path,
) -> None:
    world = make_world(n_rows=200, window=6, seed=2)
    learner = trained(make_learner(world, tmp_path / "a", *DESK), 2)
    plain = trained(make_learner(world, tmp_path / "b", *EVAL), 2)
    assert learner._alike == plain._alike == plain._diversity.mapd
    assert learner._diversity.mapd > learner._alike, "rules differ from networks that begin alike"
    for made in (learner, plain):
        made.close()


def test_training_with_rules_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    world = make_world(n_rows=200, window=6, seed=2)
    whole = trained(make_learner(world, tmp_path / "a", *DESK), 4)
    half = trained(make_learner(world, tmp_path / "b", *DESK), 2)
    rest = make_learner(world, tmp_path / "c", *DESK)
    saved = everything(half)
    rest.restore(*saved)
    assert_same(whole, trained(rest, 2))
    for learner in (whole, half, rest):
        learner.close()


FORECAST = ("experts.rules=[hrp, forecast]", "forecast.model=ridge", *EVAL)


def test_forecaster_on_the_desk_is_fitted_on_the_experts_part_and_kept_with_the_weights(
    tmp_path: Path,
) -> None:
    world = make_world(n_rows=300, window=6, seed=2)
    world = replace(world, splits={"train": range(200), "valid": range(200, 290)})
    learner = trained(make_learner(world, tmp_path / "a", *FORECAST), 4)
    policy = learner.policy()
    assert policy.expert_names[-2:] == ("hrp", "forecast")
    expert = learner.rules[1]
    assert isinstance(expert, ForecastExpert)
    config = learner.config
    for seen, same in (
        (parts_of(world, config.meta_router.window_share).experts, True),
        (world, False),
    ):
        fitted = fit_forecaster(config, seen)
        assert fitted is not None
        equal = np.array_equal(fitted.model.weights, expert.model.weights)  # type: ignore[union-attr]
        assert equal == same, "bars of the router's part count"
    weights = learner.weights()
    assert {"forecast.weights", "forecast.rule"} <= weights.keys()
    loaded = HierarchyLearner.load_policy(config, weights, 2, 7, "again")
    done, again = (run_backtest(p, world, range(210, 280), config) for p in (policy, loaded))
    np.testing.assert_array_equal(done.value, again.value)
    assert list(policy.reference_policies())[-1] == "expert-4-forecast"
    learner.close()
    other = make_config(*FORECAST, "forecast.horizon=7")
    assert training_hash(other) != training_hash(make_config(*FORECAST))
    assert training_hash(make_config("forecast.horizon=7")) == training_hash(make_config())


def test_forecaster_without_data_is_refused(tmp_path: Path) -> None:
    world = make_world(n_rows=60, n_assets=1, window=6, seed=2)
    with pytest.raises(DataError, match="names forecast, but of a single asset"):
        rule_experts(make_config(*FORECAST), world)


def test_report_calls_rules_by_their_names() -> None:
    words = Words("en")
    assert words.who("expert 3") == "Expert 3"
    assert words.who("equal_weight") == words.reference("expert-3-equal_weight") == "Equal weight"
    assert words.reference("expert-3") == "Expert 3"
