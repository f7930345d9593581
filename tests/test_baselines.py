"""Baselines: each by hand, the estimators against skfolio, and markets with gaps in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from skfolio.optimization import HierarchicalRiskParity, MeanRisk
from worlds import at, make_config, make_world

from echelon.backtest.baselines import make_baseline, only_allowed, run_baselines
from echelon.backtest.forecaster import fit_forecaster
from echelon.backtest.run import Backtest, run_backtest
from echelon.envs import Action, ActionRule, Books, World
from echelon.envs.act import Holdings
from echelon.types import Floats

HOLD, BUY, SELL = (int(a) for a in Action)
ESTIMATORS = {"min_variance": MeanRisk, "hrp": HierarchicalRiskParity}


def run(name: str, world: World, span: range, *overrides: str) -> Backtest:
    """A baseline as evaluation runs it."""
    return run_baselines(world, span, make_config(f"eval.baselines=[{name}]", *overrides))[name]


def targets(
    name: str, world: World, row: int, *overrides: str, weights: list[float] | None = None
) -> Floats:
    """What a baseline that begins at `row` wants to hold, being given these weights already."""
    config = make_config(*overrides)
    policy = make_baseline(name, config)
    policy.start(world, range(row, len(world.times)))
    books = Books(
        world, ActionRule.from_config(config, "weights"), config.reward, 1, range(len(world.times))
    )
    books.reset(at(row))
    if weights is not None:
        shares = np.array([weights]) * world.initial_cash / world.rows.close[row]
        cash = np.array([world.initial_cash * (1.0 - sum(weights))])
        books.book = books.book._replace(shares=shares, cash=cash)
    return np.asarray(policy.decide(books.row, books.holdings())[0])


def two_assets(**changes: Any) -> World:
    usual: dict[str, Any] = {
        "close": [[10.0, 20.0], [12.0, 21.0], [9.0, 24.0], [15.0, 18.0]],
        "open": [[10.0, 20.0], [8.0, 25.0], [9.0, 9.0], [9.0, 9.0]],
        "initial_cash": 1000.0,
        "commission": 0.0,
        "window": 1,
        "splits": {"test": range(4)},
    }
    return make_world(**(usual | changes))


def test_buy_and_hold_by_hand_at_the_same_close() -> None:
    # 500 each at 10 and 20: 50 and 25 shares for good.
    found = run("buy_and_hold", two_assets(fill_open=False), range(4))
    assert found.value == pytest.approx(
        [1000, 50 * 12 + 25 * 21, 50 * 9 + 25 * 24, 50 * 15 + 25 * 18]
    )
    assert found.blotter().height == 2


def test_buy_and_hold_by_hand_at_the_next_open() -> None:
    # 50 and 25 shares were wanted; at 8 and 25 they cost 400 + 625, more than there is: all buys
    # are scaled by 1000/1025.
    found = run("buy_and_hold", two_assets(), range(4))
    a, b = 50 * 1000 / 1025, 25 * 1000 / 1025
    assert found.value[1:] == pytest.approx([a * 12 + b * 21, a * 9 + b * 24, a * 15 + b * 18])
    assert found.cash_share[1:] == pytest.approx(0.0, abs=1e-6)


def test_buy_and_hold_pays_its_fee_once() -> None:
    found = run("buy_and_hold", two_assets(fill_open=False, commission=0.01), range(4))
    share = 1.0 / 1.01
    assert found.costs.commission == pytest.approx(1000 - 1000 * share)
    assert found.value[-1] == pytest.approx(share * (50 * 15 + 25 * 18))


def test_buy_and_hold_leaves_out_what_cannot_be_bought_on_the_first_bar() -> None:
    tradable = np.ones((4, 2), dtype=bool)
    tradable[0, 1] = False
    found = run("buy_and_hold", two_assets(tradable=tradable, fill_open=False), range(4))
    assert found.value[-1] == pytest.approx(1500.0)
    assert np.isnan(found.actions[1:]).all()


def test_buy_and_hold_goes_on_buying_what_the_volume_cap_cut_and_then_stops() -> None:
    # 10 of the 50 shares a bar: five bars, and then no more.
    world = make_world(
        close=np.full((12, 1), 10.0),
        open=np.full((12, 1), 10.0),
        volume_open=np.full((12, 1), 100.0),
        volume_close=np.full((12, 1), 100.0),
        participation=0.1,
        commission=0.0,
        initial_cash=500.0,
        window=1,
        splits={"test": range(12)},
    )
    found = run("buy_and_hold", world, range(12))
    assert found.fills.shares[:, 0].tolist() == [10.0] * 5 + [0.0] * 6
    assert found.cash_share[-1] == 0.0
    assert np.isnan(found.actions[5:]).all()


def test_buy_and_hold_gives_up_what_is_not_for_sale_after_its_first_bar() -> None:
    tradable = np.ones((12, 1), dtype=bool)
    tradable[1] = False
    world = make_world(
        close=np.full((12, 1), 10.0),
        tradable=tradable,
        volume_open=np.full((12, 1), 100.0),
        volume_close=np.full((12, 1), 100.0),
        participation=0.1,
        window=1,
        splits={"test": range(12)},
    )
    found = run("buy_and_hold", world, range(12))
    assert found.blotter()["not_filled"].to_list() == ["suspended"]


def test_equal_weight_rebalances_every_so_many_bars() -> None:
    world = make_world(n_rows=40, n_assets=4, fill_open=False, commission=0.0)
    found = run("equal_weight", world, range(5, 38), "eval.rebalance_bars=7")
    steps = np.flatnonzero(np.isfinite(found.actions).all(axis=1))
    assert steps.tolist() == [0, 7, 14, 21, 28]
    assert np.isnan(np.delete(found.actions, steps, axis=0)).all()
    assert found.actions[steps] == pytest.approx(0.25)
    assert sorted(set(found.blotter()["time"])) == [t.item() for t in world.times[5 + steps]]


def test_equal_weight_by_hand_over_two_rebalancings() -> None:
    # 50 and 25 shares are worth 600 + 525 = 1125: 562.5 each at 12 and 21, and so on.
    found = run("equal_weight", two_assets(fill_open=False), range(4), "eval.rebalance_bars=1")
    second = 562.5 / 12 * 9 + 562.5 / 21 * 24
    third = second / 2 / 9 * 15 + second / 2 / 24 * 18
    assert found.value == pytest.approx([1000, 1125, second, third])


def moving_world(n_rows: int = 90, n_assets: int = 5, **changes: Any) -> World:
    """Assets of different volatility that move together to different degrees."""
    rng = np.random.default_rng(17)
    market = rng.normal(0.0005, 0.01, (n_rows, 1))
    own = rng.normal(0.0, 1.0, (n_rows, n_assets)) * np.linspace(0.004, 0.03, n_assets)
    beta = np.linspace(0.3, 1.5, n_assets)
    close = 30.0 * np.exp(np.cumsum(market * beta + own, axis=0))
    return make_world(**({"close": close, "window": 2, "growth": close} | changes))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bars", [62, 70])
def test_estimators_equal_skfolio_on_the_past_window(name: str, bars: int) -> None:
    world = moving_world()
    row = 80
    got = targets(name, world, row, f"eval.estimation_bars={bars}")
    past = world.growth[row - bars : row + 1]
    returns = past[1:] / past[:-1] - 1.0
    assert len(returns) == bars
    wanted = ESTIMATORS[name]().fit(returns).weights_
    assert got == pytest.approx(wanted, abs=1e-9)
    assert got.sum() == pytest.approx(1.0)
    assert got.std() > 0.01


def test_min_variance_of_uncorrelated_assets_is_the_inverse_of_their_variances() -> None:
    # Columns of a Hadamard matrix are exactly uncorrelated; standard deviations 1 : 2.
    pattern = np.tile([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], (16, 1))
    returns = pattern * [0.01, 0.02]
    close = 10.0 * np.cumprod(np.vstack([np.ones(2), 1.0 + returns]), axis=0)
    world = make_world(close=close, window=1)
    got = targets("min_variance", world, 64, "eval.estimation_bars=64")
    assert got == pytest.approx([0.8, 0.2], abs=1e-3)  # as near as the solver goes


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_with_a_short_window_still_estimate(name: str) -> None:
    world = moving_world()
    got = targets(name, world, 40, "eval.estimation_bars=30")
    past = world.growth[10:41]
    wanted = ESTIMATORS[name]().fit(past[1:] / past[:-1] - 1.0).weights_
    assert got == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_hold_equal_weights_until_there_is_a_past(name: str) -> None:
    world = moving_world()
    assert targets(name, world, 59) == pytest.approx(0.2)
    assert targets(name, world, 60).std() > 0.01


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_newly_listed_asset_waits_for_its_history(name: str) -> None:
    world = moving_world()
    growth = world.growth.copy()
    growth[:75, 2] = np.nan
    late = moving_world(growth=growth)
    got = targets(name, late, 80, "eval.estimation_bars=62")
    assert got[2] == 0.0
    assert got.sum() == pytest.approx(1.0)
    rest = np.array([0, 1, 3, 4])
    past = world.growth[18:81, rest]
    wanted = ESTIMATORS[name]().fit(past[1:] / past[:-1] - 1.0).weights_
    assert got[rest] == pytest.approx(wanted, abs=1e-9)
    assert targets(name, late, 89, "eval.estimation_bars=10")[2] > 0.0


@pytest.mark.parametrize("name", [*ESTIMATORS, "equal_weight", "buy_and_hold"])
@pytest.mark.parametrize("mask", ["present", "member", "tradable"])
def test_absent_foreign_and_suspended_assets_are_not_bought(name: str, mask: str) -> None:
    out = np.ones((90, 5), dtype=bool)
    out[80, [0, 3]] = False
    got = targets(name, moving_world(**{mask: out}), 80)
    assert not (got[[0, 3]] > 0).any()
    assert np.nansum(got) == pytest.approx(1.0)


@pytest.mark.parametrize("name", [*ESTIMATORS, "equal_weight"])
def test_a_suspended_holding_is_left_and_its_share_kept_free(name: str) -> None:
    tradable = np.ones((90, 5), dtype=bool)
    tradable[80, 1] = False
    world = moving_world(tradable=tradable)
    got = targets(name, world, 80, weights=[0.1, 0.3, 0.0, 0.0, 0.2])
    assert np.isnan(got[1])
    assert np.nansum(got) == pytest.approx(0.7, abs=1e-6)


@pytest.mark.parametrize("name", [*ESTIMATORS, "equal_weight"])
def test_a_holding_that_left_the_universe_is_sold(name: str) -> None:
    member = np.ones((90, 5), dtype=bool)
    member[80:, 1] = False
    got = targets(name, moving_world(member=member), 80, weights=[0.0, 0.5, 0.0, 0.0, 0.0])
    assert got[1] == 0.0
    assert got.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("name", [*ESTIMATORS, "equal_weight", "buy_and_hold"])
def test_a_universe_without_anyone_stays_in_cash(name: str) -> None:
    nobody = np.zeros((90, 5), dtype=bool)
    found = run(name, moving_world(present=nobody), range(70, 85))
    assert set(found.value) == {1_000_000.0}
    assert found.blotter().height == 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_assets_that_never_move_get_nothing_from_the_estimators(name: str) -> None:
    world = moving_world()
    growth = world.growth.copy()
    growth[:, 0] = 5.0
    got = targets(name, moving_world(growth=growth), 80)
    assert got[0] == 0.0
    assert got.sum() == pytest.approx(1.0)
    growth[:] = 5.0
    assert targets(name, moving_world(growth=growth), 80) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_take_assets_that_move_as_one(name: str) -> None:
    world = moving_world()
    growth = world.growth.copy()
    growth[:, 1] = 3.0 * growth[:, 0]
    got = targets(name, moving_world(growth=growth), 80)
    assert np.isfinite(got).all()
    assert (got >= 0).all()
    assert got.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_run_through_a_market_with_comings_and_goings(name: str) -> None:
    rng = np.random.default_rng(3)
    n_rows = 130
    present = np.ones((n_rows, 5), dtype=bool)
    present[:100, 3] = False
    gone = np.zeros((n_rows, 5), dtype=bool)
    gone[110:, 0] = True
    present[110:, 0] = False
    world = moving_world(
        n_rows,
        present=present,
        gone=gone,
        tradable=(rng.random((n_rows, 5)) > 0.2) & ~gone,
        haircut=np.full(5, 0.3),
    )
    found = run(name, world, range(70, n_rows), "eval.rebalance_bars=3", "eval.estimation_bars=61")
    assert np.isfinite(found.value).all()
    assert (found.weights >= 0).all()
    assert (found.weights.sum(axis=1) <= 1.0 + 1e-6).all()
    assert (found.cash_share >= -1e-9).all()
    assert (found.weights[:30, 3] == 0).all()
    assert (found.weights[-1, [1, 2, 3, 4]] > 0).any()
    assert found.weights[-1, 0] == 0


def test_momentum_by_hand() -> None:
    close = np.array([[10.0, 10.0, 10.0], [11.0, 9.0, 10.0], [12.0, 12.0, 10.0], [9.0, 9.5, 10.0]])
    world = make_world(close=close, window=1)
    policy = make_baseline("momentum", make_config("eval.momentum_bars=2"))
    policy.start(world, range(4))
    everything = Holdings(np.zeros((4, 3)), np.zeros(4), np.ones((4, 3, 3), dtype=bool), np.ones(4))  # type: ignore[arg-type]
    got = policy.decide(at(0, 1, 2, 3), everything)
    # Against the bar two before, or the first there is; what did not move is sold.
    wanted = [[SELL, SELL, SELL], [BUY, SELL, SELL], [BUY, BUY, SELL], [SELL, BUY, SELL]]
    assert got.tolist() == wanted


def test_momentum_trades_under_the_rule_of_the_configuration() -> None:
    close = 10.0 * 1.01 ** np.arange(12.0)[:, None]
    world = make_world(close=close, window=1, commission=0.0, fill_open=False)
    found = run("momentum", world, range(3, 6), "buy_pct=0.4", "eval.momentum_bars=3")
    assert found.fills.shares[0, 0] * found.fills.price[0, 0] == pytest.approx(400_000)


def test_only_allowed_turns_the_forbidden_into_holding() -> None:
    allowed = np.ones((1, 3, 3), dtype=bool)
    allowed[0, 0, BUY] = allowed[0, 1, SELL] = False
    held = Holdings(np.zeros((1, 3)), np.zeros(1), allowed, np.ones(1))  # type: ignore[arg-type]
    assert only_allowed(np.array([[BUY, SELL, SELL]]), held).tolist() == [[HOLD, HOLD, SELL]]


def test_random_is_the_same_for_a_seed_and_another_for_another() -> None:
    world = make_world()
    first, again = (run("random", world, range(5, 50), "seed=1").actions for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, run("random", world, range(5, 50), "seed=2").actions)


def test_random_draws_what_is_allowed_with_equal_chances() -> None:
    policy = make_baseline("random", make_config())
    world = make_world()
    policy.start(world, range(60))
    allowed = np.ones((20_000, 3, 3), dtype=bool)
    allowed[:, 1, BUY] = False
    allowed[:, 2, 1:] = False
    held = Holdings(np.zeros((20_000, 3)), np.zeros(20_000), allowed, np.ones(20_000))  # type: ignore[arg-type]
    drawn = policy.decide(np.zeros(20_000, dtype=np.int64), held)
    shares = [np.bincount(drawn[:, n], minlength=3) / 20_000 for n in range(3)]
    assert shares[0] == pytest.approx([1 / 3] * 3, abs=0.015)
    assert shares[1] == pytest.approx([0.5, 0.0, 0.5], abs=0.015)
    assert shares[2].tolist() == [1.0, 0.0, 0.0]


def test_cash_stays_flat() -> None:
    found = run("cash", make_world(), range(5, 50))
    assert set(found.value) == {1_000_000.0}
    assert found.measures["sharpe_annual"] == 0.0


@pytest.mark.parametrize("fill_open", [True, False])
def test_benchmark_equals_the_index_without_costs(fill_open: bool) -> None:
    level = 3000.0 * np.exp(np.cumsum(np.random.default_rng(1).normal(0, 0.01, 60)))
    world = make_world(
        benchmark=level,
        fill_open=fill_open,
        commission=0.01,
        min_commission=50.0,
        participation=0.01,
        price_limits=True,
        min_value=1e9,
    )
    found = run("benchmark", world, range(10, 55))
    assert found.value == pytest.approx(1e6 * level[10:55] / level[10], rel=1e-12)
    assert found.symbols == ("benchmark",)
    assert sum(found.costs) == 0.0


def test_benchmark_carries_its_last_level_over_days_without_one() -> None:
    level = np.linspace(100.0, 159.0, 60)
    level[20] = np.nan
    found = run("benchmark", make_world(benchmark=level), range(10, 30))
    assert found.value[10] == found.value[9]
    assert found.value[11] == pytest.approx(1e6 * 121 / 110)


def test_benchmark_is_left_out_where_the_data_have_none_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config("eval.baselines=[benchmark, cash]")
    assert set(run_baselines(make_world(benchmark=None), range(5, 9), config)) == {"cash"}
    late = np.full(60, 100.0)
    late[:20] = np.nan
    world = make_world(benchmark=late)
    assert caplog.text == ""
    assert set(run_baselines(world, range(5, 30), config)) == {"cash"}
    assert "the benchmark has no level on 2020-01-06 or before" in caplog.text
    assert set(run_baselines(world, range(20, 30), config)) == {"benchmark", "cash"}


def test_every_baseline_of_the_configuration_runs_in_its_order() -> None:
    config = make_config("eval.estimation_bars=61")
    world = moving_world()
    found = run_baselines(world, range(70, 85), config, fit_forecaster(config, world))
    assert tuple(found) == config.eval.baselines
    unfitted = tuple(name for name in config.eval.baselines if name != "forecast")
    assert tuple(run_baselines(world, range(70, 85), config)) == unfitted
    assert all(backtest.policy == name for name, backtest in found.items())
    assert all(len(backtest.value) == 15 for backtest in found.values())
    few = make_config("eval.baselines=[cash, random]")
    assert tuple(run_baselines(world, range(70, 85), few)) == ("cash", "random")


def test_a_delisted_holding_of_buy_and_hold_becomes_cash() -> None:
    gone = np.zeros((4, 2), dtype=bool)
    gone[2:, 0] = True
    tradable = ~gone
    world = two_assets(gone=gone, tradable=tradable, haircut=[0.5, 0.0], fill_open=False)
    found = run("buy_and_hold", world, range(4))
    # 50 shares at the last price of the row of the delisting, 9, less half of it.
    assert found.value[2] == pytest.approx(50 * 9 * 0.5 + 25 * 24)
    assert found.value[3] == pytest.approx(225 + 25 * 18)


def test_run_backtest_serves_one_baseline_by_itself() -> None:
    config = make_config()
    world = make_world()
    alone = run_backtest(make_baseline("momentum", config), world, range(5, 50), config)
    assert np.array_equal(alone.value, run("momentum", world, range(5, 50)).value)
