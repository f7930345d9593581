"""Executors in the kernel: settlement at achieved prices, by hand and on random orders; costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from worlds import FREE, at, basis_points, make_config, make_world

from echelon.backtest.baselines import make_baseline
from echelon.backtest.run import Backtest, run_backtest
from echelon.config.agents import RewardConfig
from echelon.envs import World
from echelon.envs.act import ActionKind, ActionRule
from echelon.envs.books import Books
from echelon.errors import ConfigError
from echelon.market import (
    Book,
    Execution,
    Executor,
    Fills,
    ImmediateExecutor,
    Orders,
    Reason,
    Rows,
    Rules,
    cost_split,
    new_book,
    step,
    step_worked,
)
from echelon.market.executor import Worked, nothing_worked
from echelon.types import Floats

STRICT: dict[str, Any] = {
    "commission": 0.0005,
    "min_commission": 5.0,
    "slippage_model": 3,
    "slippage": 0.01,
    "participation": 0.1,
    "t_plus_one": True,
    "price_limits": True,
    "min_value": 1000.0,
}


class Told:
    """Executes what it is told: a price, a share of the order and the market's price of each."""

    name = "told"

    def __init__(self, price: object, share: object = 1.0, market: object = None) -> None:
        self.price, self.share = np.asarray(price, float), np.asarray(share, float)
        self.market = self.price if market is None else np.asarray(market, float)
        self.asked: list[Floats] = []

    def work(self, parents: Floats, row: Rows) -> Worked:
        self.asked.append(parents.copy())
        shape = parents.shape
        price, share, market = (
            np.broadcast_to(one, shape).copy() for one in (self.price, self.share, self.market)
        )
        done = nothing_worked(shape)
        return done._replace(
            worked=np.isfinite(share),
            executed=np.nan_to_num(np.abs(parents) * share),
            price=price,
            market=market,
            arrival=np.full(shape, 10.0),
            twap=np.where(np.isfinite(share), 10.5, np.nan),
            vwap=np.where(np.isfinite(share), 10.25, np.nan),
            reason=np.where(share < 1.0, int(Reason.VOLUME), 0).astype(np.int8),
        )


def world_of_rules(kind: str, **changes: Any) -> World:
    """A random walk under free or strict rules."""
    if kind == "free":
        return make_world(seed=3, n_assets=4, **changes)
    shape = (60, 4)
    volume = np.random.default_rng(1).uniform(5e3, 5e5, shape)
    more = STRICT | {"volume_open": volume, "lot": [100.0, 100.0, 0.0, 1.0]} | changes
    return make_world(
        seed=3,
        n_assets=4,
        min_lot=[100.0, 200.0, 0.0, 1.0],
        share_step=np.where(np.arange(60)[:, None] == 30, 2.0, 1.0) * np.ones(shape),
        stamp=np.full(60, 0.001),
        **more,
    )


def books_run(world: World, kind: ActionKind) -> tuple[list[Floats], Books]:
    """Five books at different rows, acting at random."""
    books = Books(world, ActionRule(kind), RewardConfig(), 5, range(4, 60))
    books.reset(np.array([4, 4, 9, 20, 25]))
    rng, seen = np.random.default_rng(0), []
    for _ in range(30):
        if kind == "discrete":
            actions: NDArray[Any] = rng.integers(0, 3, (5, 4)).astype(np.int8)
        else:
            actions = rng.dirichlet(np.ones(5), 5)[:, :4]
            actions[rng.random((5, 4)) < 0.2] = np.nan
        result = books.step(actions)
        seen += [result.value, *result.fills, books.book.cash, books.book.shares, books.book.locked]
    return seen, books


@pytest.mark.parametrize("kind", ["discrete", "weights"])
@pytest.mark.parametrize("rules", ["free", "strict"])
def test_an_executor_that_works_nothing_changes_no_bit(rules: str, kind: ActionKind) -> None:
    plain, _ = books_run(world_of_rules(rules), kind)
    same, _ = books_run(world_of_rules(rules, executor=ImmediateExecutor()), kind)
    assert all(np.array_equal(a, b) for a, b in zip(plain, same, strict=True))


def test_a_backtest_with_the_immediate_executor_is_the_one_without_and_knows_its_costs() -> None:
    world, config = world_of_rules("strict"), make_config()
    momentum: Callable[[], Any] = lambda: make_baseline("momentum", config)  # noqa: E731
    plain = run_backtest(momentum(), world, range(20, 50), config)
    told = run_backtest(momentum(), world, range(20, 50), config, executor=ImmediateExecutor())
    assert plain.execution is None
    assert told.execution is not None
    assert plain.value.tobytes() == told.value.tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(plain.fills, told.fills, strict=True))
    assert plain.cost_split.total == pytest.approx(told.cost_split.total)
    assert told.cost_split.impact == pytest.approx(plain.costs.slippage)
    assert told.cost_split.arrived == pytest.approx(plain.cost_split.arrived)
    assert plain.blotter().columns == told.blotter().columns[: len(plain.blotter().columns)]
    assert "timing" in told.blotter().columns


def one_step(
    executor: Executor,
    shares: object,
    *,
    held: object = 0.0,
    cash: float = 1000.0,
    spend: object = 0.0,
    in_order: bool = False,
    **changes: Any,
) -> tuple[Book, Fills, Execution, Floats]:
    """One book of two assets at 10 whose orders are worked during the next row, closing at 11."""
    world = make_world(close=[[10.0, 10.0], [11.0, 11.0]], open=[[10.0, 10.0]] * 2, **changes)
    book = new_book(cash, 1, 2)
    book.shares[:] = held
    orders = Orders(
        *(np.broadcast_to(np.asarray(x, float), (1, 2)).copy() for x in (shares, spend))
    )
    rules = world.rules._replace(in_order=in_order, spend_proceeds=not in_order)
    stepped, execution = step_worked(book, orders, world.rows, at(0), rules, executor)
    return stepped.book, stepped.fills, execution, stepped.value


def test_sells_pay_for_buys_at_the_prices_achieved() -> None:
    # 50 sold at 12 less 60 of fee: 540. 60 bought at 8, 480 and 48 of fee: 528.
    book, fills, execution, value = one_step(
        Told([12.0, 8.0]), [-50.0, 60.0], held=[50.0, 0.0], cash=0.0, commission=0.1
    )
    assert fills.shares.tolist() == [[-50.0, 60.0]]
    assert fills.price.tolist() == [[12.0, 8.0]]
    assert fills.commission == pytest.approx(np.array([[60.0, 48.0]]))
    assert book.cash == pytest.approx([12.0])
    assert value == pytest.approx([12.0 + 60.0 * 11.0])
    assert fills.reason.tolist() == [[0, 0]]
    assert execution.worked.all()
    assert execution.timing.tolist() == [[-100.0, -120.0]]  # both better than the arrival at 10


def test_buys_are_cut_pro_rata_to_the_cash_and_the_cut_is_recorded() -> None:
    # 100 of each at 20 and 5 would take 2500 of the 1000 there are: 40 % of both.
    book, fills, execution, _ = one_step(Told([20.0, 5.0]), 100.0, commission=0.0)
    assert fills.shares == pytest.approx(np.array([[40.0, 40.0]]))
    assert book.cash == pytest.approx([0.0], abs=1e-6)
    assert book.cash[0] >= 0.0
    assert execution.cut == pytest.approx(np.array([[60.0, 60.0]]))
    assert fills.reason.tolist() == [[Reason.CASH, Reason.CASH]]
    assert cost_split(fills, execution).cut == pytest.approx(1200.0)


def test_what_was_not_executed_is_left_with_the_executors_reason() -> None:
    told = Told(10.0, [0.25, 0.0])
    book, fills, execution, _ = one_step(told, 40.0, commission=0.0)
    assert fills.shares.tolist() == [[10.0, 0.0]]
    assert book.cash.tolist() == [900.0]
    assert fills.reason.tolist() == [[Reason.VOLUME, Reason.VOLUME]]
    assert execution.worked.tolist() == [[True, False]]
    assert np.isnan(execution.arrival[0, 1])


def test_orders_without_a_day_are_filled_at_the_open_with_the_kernels_slippage() -> None:
    rules = {"commission": 0.0, "slippage_model": 1, "slippage": 0.01, "participation": 0.5}
    told = Told(10.0, [1.0, np.nan])
    _, fills, execution, _ = one_step(
        told, 40.0, **rules, volume_open=[[np.inf, 60.0], [np.inf, 60.0]]
    )
    assert fills.shares.tolist() == [[40.0, 30.0]]
    assert fills.price == pytest.approx(np.array([[10.0, 10.1]]))
    assert fills.slippage == pytest.approx(np.array([[0.0, 3.0]]))
    assert execution.spread == pytest.approx(np.array([[0.0, 3.0]]))
    assert execution.worked.tolist() == [[True, False]]
    assert fills.reason.tolist() == [[0, Reason.VOLUME]]


def test_an_open_at_the_limit_bars_only_orders_that_are_not_worked() -> None:
    told = Told(10.0, [1.0, np.nan])
    limit = {"limit_up": [[10.0, 10.0]] * 2, "price_limits": True}
    _, fills, _, _ = one_step(told, 40.0, **limit)
    assert fills.shares.tolist() == [[40.0, 0.0]]
    assert fills.reason.tolist() == [[0, Reason.LIMIT_UP]]


def test_parent_orders_are_whole_lots_of_what_may_be_sold() -> None:
    told = Told(10.0)
    world = make_world(
        close=[[10.0] * 3] * 2, t_plus_one=True, lot=[100.0] * 3, min_lot=[100.0] * 3
    )
    world.rows.new_session[:] = False
    book = new_book(10_000.0, 1, 3)
    book.shares[:], book.locked[:] = [[500.0, 350.0, 0.0]], [[300.0, 0.0, 0.0]]
    orders = Orders(np.array([[-400.0, -350.0, 270.0]]), np.zeros((1, 3)))
    stepped, _ = step_worked(book, orders, world.rows, at(0), world.rules, told)
    # 200 are free of T+1, the odd lot goes with all the rest, 270 are two lots.
    assert told.asked[0].tolist() == [[-200.0, -350.0, 200.0]]
    assert stepped.fills.shares.tolist() == [[-200.0, -350.0, 200.0]]
    assert stepped.fills.reason.tolist() == [[Reason.T_PLUS_ONE, 0, Reason.LOT]]
    assert stepped.book.locked.tolist() == [[300.0, 0.0, 200.0]]


def test_orders_for_money_fix_their_shares_at_the_decision_and_never_spend_more() -> None:
    told = Told([16.0, 8.0])
    book, fills, _, _ = one_step(told, 0.0, spend=200.0, in_order=True, commission=0.25)
    # 160 after the fee are 16 shares at 10. At 16 the money is for ten; at 8, still 16.
    assert told.asked[0].tolist() == [[16.0, 16.0]]
    assert fills.shares == pytest.approx(np.array([[10.0, 16.0]]))
    assert book.cash == pytest.approx([1000.0 - 200.0 - 160.0])
    assert fills.reason.tolist() == [[0, 0]]


def test_a_split_before_the_bar_splits_the_order_and_its_reference_price() -> None:
    told = Told(5.0)
    split = {"share_step": [[1.0, 1.0], [2.0, 1.0]]}
    _, fills, _, _ = one_step(told, [10.0, 0.0], spend=[0.0, 0.0], commission=0.0, **split)
    assert fills.shares[0, 0] == 20.0
    one_step(told, 0.0, spend=[100.0, 100.0], commission=0.0, **split)
    assert told.asked[1].tolist() == [[20.0, 10.0]]


def test_books_without_a_worked_order_trade_as_in_the_kernel_beside_those_with_one() -> None:
    world = world_of_rules("strict")
    rng = np.random.default_rng(5)
    book = new_book(50_000.0, 2, 4)
    book.shares[:] = 500.0
    orders = Orders(rng.normal(0.0, 400.0, (2, 4)), np.zeros((2, 4)))
    told = Told(20.0, [[1.0] * 4, [np.nan] * 4])
    stepped, execution = step_worked(book, orders, world.rows, at(7, 9), world.rules, told)
    plain = step(book, orders, world.rows, at(7, 9), world.rules, fill_open=True)
    for mixed, kernel in zip(stepped.book, plain.book, strict=True):
        assert mixed[1].tobytes() == kernel[1].tobytes()
    for mixed, kernel in zip(stepped.fills, plain.fills, strict=True):
        assert mixed[1].tobytes() == kernel[1].tobytes()
    assert stepped.book.cash[0] != plain.book.cash[0]
    assert execution.worked[0].any()
    assert not execution.worked[1].any()


def test_fills_at_the_decisions_close_leave_no_day_to_work_in() -> None:
    with pytest.raises(ConfigError, match=r"market\.fill to 'open'"):
        make_world(fill_open=False, executor=ImmediateExecutor())


@given(seed=st.integers(0, 10_000), strict=st.booleans(), in_order=st.booleans())
@settings(max_examples=80, deadline=None)
def test_on_random_orders_cash_lots_holdings_and_t_plus_one_hold_and_parts_add_up(
    seed: int, strict: bool, in_order: bool
) -> None:
    rng = np.random.default_rng(seed)
    n_books, n = 3, 4
    lots = [100.0, 1.0, 0.0, 200.0] if strict else [0.0] * 4
    volume = rng.uniform(10, 1e5, (3, n))
    gates = {"tradable": rng.random((3, n)) < 0.9, "volume_open": volume, "lot": lots}
    world = make_world(seed=seed, n_rows=3, n_assets=n, min_lot=lots, stamp=[0.001] * 3, **gates)
    rules: Rules = FREE._replace(commission=0.001, in_order=in_order, spend_proceeds=not in_order)
    if strict:
        rules = rules._replace(**STRICT)
    book = new_book(rng.uniform(0, 5e4, n_books), n_books, n)
    book.shares[:] = np.floor(rng.uniform(0, 2000, (n_books, n)))
    book.locked[:] = book.shares * (rng.random((n_books, n)) < 0.3)
    world.rows.new_session[:] = False
    buys = rng.random((n_books, n)) < 0.5
    spend = np.where(buys & in_order, rng.uniform(0, 2e4, buys.shape), 0.0)
    shares = np.where(spend > 0.0, 0.0, rng.normal(0.0, 1500.0, buys.shape))
    price = 20.0 * np.exp(rng.normal(0.0, 0.3, buys.shape))
    share = np.where(rng.random(buys.shape) < 0.3, np.nan, rng.random(buys.shape))
    told = Told(price, np.where(rng.random(buys.shape) < 0.5, np.ceil(share), share), price * 0.99)
    stepped, execution = step_worked(
        book, Orders(shares, spend), world.rows, np.arange(3) % 2, rules, told
    )
    after, fills = stepped.book, stepped.fills
    assert (after.cash >= 0.0).all()
    assert (after.shares >= -1e-9).all()
    if rules.t_plus_one:
        assert (after.shares >= book.locked - 1e-9).all()
    bought = fills.shares > 0.0
    for k, lot in enumerate(lots):
        if lot > 0.0:
            assert np.allclose(fills.shares[bought[:, k], k] % lot, 0.0)
    money = (fills.shares * fills.price + fills.commission + fills.stamp).sum(axis=1)
    assert after.cash == pytest.approx(book.cash - money, abs=1e-6)
    split = cost_split(fills, execution)
    filled = fills.shares != 0.0
    paid = (fills.shares * (fills.price - execution.arrival))[filled].sum()
    fees = (fills.commission + fills.stamp).sum()
    assert split.total == pytest.approx(paid + fees, abs=1e-6)
    worked = filled & execution.worked
    assert (np.abs(fills.shares) <= np.abs(told.asked[0]) + 1e-9)[worked].all()


def hand_made() -> tuple[Fills, Execution]:
    """Bought 100, sold 50, bought 8 at once; arrivals 10, 20 and 30."""
    zero = np.zeros(3)
    fills = Fills(
        shares=np.array([100.0, -50.0, 8.0]),
        price=np.array([10.75, 19.25, 30.5]),
        commission=np.array([2.0, 1.0, 0.25]),
        stamp=np.array([0.0, 0.5, 0.0]),
        slippage=np.array([50.0, 12.5, 4.0]),
        reason=np.zeros(3, np.int8),
    )
    execution = Execution(
        worked=np.array([True, True, False]),
        arrival=np.array([10.0, 20.0, 30.0]),
        twap=np.array([10.5, 19.0, np.nan]),
        vwap=np.array([10.25, 19.5, np.nan]),
        spread=np.array([20.0, 5.0, 0.0]),
        impact=np.array([30.0, 7.5, 4.0]),
        timing=np.array([25.0, 25.0, 0.0]),
        cut=zero,
    )
    return fills, execution


def test_costs_split_by_hand_add_up_to_the_shortfall() -> None:
    split = cost_split(*hand_made())
    # Shortfalls: 100·0.75 + 50·0.75 + 8·0.5 = 116.5, fees 3.75.
    assert (split.spread, split.impact, split.timing, split.fees) == (25.0, 41.5, 50.0, 3.75)
    assert split.total == 116.5 + 3.75
    assert split.spread + split.impact + split.timing + split.fees == split.total
    assert split.arrived == 1000.0 + 1000.0 + 240.0
    # 100·0.25 − 50·(19.25 − 19); 100·0.5 − 50·(19.25 − 19.5).
    assert (split.against_twap, split.against_vwap) == (12.5, 62.5)
    assert (split.benchmarked, split.fills, split.at_once) == (2000.0, 3, 1)
    points = basis_points(split)
    assert points["total"] == pytest.approx(120.25 / 2240.0 * 1e4)
    assert points["against_twap"] == pytest.approx(62.5)
    assert points["timing"] == pytest.approx(50.0 / 2240.0 * 1e4)


def test_costs_of_plain_fills_are_slippage_and_fees() -> None:
    fills, _ = hand_made()
    split = cost_split(fills)
    assert (split.impact, split.fees, split.total) == (66.5, 3.75, 70.25)
    assert (split.fills, split.at_once) == (3, 3)
    assert split.arrived == 1075.0 - 50.0 + 962.5 + 12.5 + 244.0 - 4.0


def test_costs_of_nothing_are_nothing() -> None:
    nothing = Fills(*np.zeros((5, 2, 3)), np.zeros((2, 3), np.int8))
    assert cost_split(nothing).total == 0.0
    assert np.isnan(basis_points(cost_split(nothing))["total"])


def test_backtests_keep_the_executors_facts(caplog: pytest.LogCaptureFixture) -> None:
    world, config = make_world(seed=2, commission=0.0), make_config()
    told = Told(world.rows.close.mean(), [1.0, np.nan, 1.0])
    run: Backtest = run_backtest(
        make_baseline("momentum", config), world, range(20, 40), config, executor=told
    )
    assert run.execution is not None
    assert run.execution.timing.shape == run.fills.shares.shape
    assert run.cost_split.at_once == (run.fills.shares[:, 1] != 0.0).sum() > 0
    assert f"{run.cost_split.at_once} of {run.cost_split.fills} fills" in caplog.text
    assert run.blotter()["twap"].null_count() > 0
