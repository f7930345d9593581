"""Actions become orders: the 20/50 rule, target weights, and what may be done at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import at, make_config, make_world

from echelon.envs import Action, ActionRule, Books, Holdings, World
from echelon.envs.act import (
    ActionKind,
    cap_weights,
    discrete_orders,
    holdings,
    members_only,
    rules_for,
    weight_orders,
    weights_of_scores,
)
from echelon.market import Book, Orders, Reason

HOLD, BUY, SELL = (int(a) for a in Action)
RULE = ActionRule("discrete")
FREELY: dict[str, Any] = {"lot": np.zeros(2), "min_value": 0.0}


def book_of(cash: float, shares: list[float], locked: list[float] | None = None) -> Book:
    return Book(np.array([cash]), np.array([shares]), np.array([locked or [0.0] * len(shares)]))


def flat_world(n_assets: int, n_rows: int = 6, price: float = 10.0, **changes: Any) -> World:
    """Prices that do not move, an initial cash of 1000, one split over all rows."""
    usual: dict[str, Any] = {
        "close": np.full((n_rows, n_assets), price),
        "initial_cash": 1000.0,
        "window": 1,
        "splits": {"train": range(n_rows)},
    }
    return make_world(**(usual | changes))


def books_of(world: World, kind: ActionKind = "discrete", *overrides: str) -> Books:
    config = make_config(*overrides)
    return Books(world, ActionRule.from_config(config, kind), config.reward, 1, world.span("train"))


def allowed(
    world: World, book: Book, row: int = 1, kind: ActionKind = "discrete", **rule: float
) -> dict[str, list[bool]]:
    """Name of the action → [N] whether it is allowed."""
    value = book.cash + (book.shares * world.rows.close[[row]]).sum(axis=1)
    held = holdings(world, book, value, at(row), ActionRule(kind, **rule))
    return {a.name: held.allowed[0, :, a].tolist() for a in Action}


# The 20/50 rule.


def test_buy_spends_a_fifth_of_the_cash_and_sell_takes_half_of_the_holding() -> None:
    book = book_of(1000.0, [8.0, 6.0])
    orders = discrete_orders(np.array([[BUY, SELL]]), book, RULE, np.full((1, 2), 10.0), **FREELY)
    assert orders.spend.tolist() == [[200.0, 0.0]]
    assert orders.shares.tolist() == [[0.0, -3.0]]


def test_percentages_are_those_of_the_configuration() -> None:
    rule = ActionRule.from_config(make_config("buy_pct=0.1", "sell_pct=0.3"), "discrete")
    orders = discrete_orders(
        np.array([[BUY, SELL]]), book_of(1000.0, [8.0, 6.0]), rule, np.ones((1, 2)), **FREELY
    )
    assert orders.spend[0, 0] == pytest.approx(100.0)
    assert orders.shares[0, 1] == pytest.approx(-1.8)


def test_hold_orders_nothing() -> None:
    orders = discrete_orders(
        np.array([[HOLD, HOLD]]), book_of(1000.0, [8.0, 6.0]), RULE, np.ones((1, 2)), **FREELY
    )
    assert not orders.shares.any()
    assert not orders.spend.any()


def test_five_buys_use_the_cash_up_and_the_sixth_is_skipped_for_cash() -> None:
    books = books_of(flat_world(6, commission=0.001))
    fills = books.step(np.full((1, 6), BUY)).fills
    # Fee included: each of the five costs exactly a fifth of the cash at the start of the step.
    cost = fills.shares[0] * fills.price[0] + fills.commission[0]
    assert cost[:5] == pytest.approx([200.0] * 5)
    assert fills.shares[0, 5] == 0.0
    assert fills.reason[0].tolist() == [Reason.NONE] * 5 + [Reason.CASH]
    assert books.book.cash[0] == pytest.approx(0.0, abs=1e-9)


def test_buys_are_served_in_the_order_of_assets_and_skipped_whole() -> None:
    books = books_of(flat_world(3), "discrete", "buy_pct=0.4")
    fills = books.step(np.full((1, 3), BUY)).fills
    assert (fills.shares[0] > 0).tolist() == [True, True, False]
    assert books.book.cash[0] == pytest.approx(200.0)


def test_proceeds_are_spent_from_the_next_step_on() -> None:
    books = books_of(flat_world(2, commission=0.0), "discrete", "buy_pct=1.0")
    books.step(np.array([[BUY, HOLD]]))
    assert books.book.cash[0] == pytest.approx(0.0, abs=1e-9)
    fills = books.step(np.array([[SELL, BUY]])).fills
    assert fills.shares[0].tolist() == [-50.0, 0.0]
    assert books.book.cash[0] == pytest.approx(500.0)
    fills = books.step(np.array([[HOLD, BUY]])).fills
    assert fills.shares[0, 1] == pytest.approx(50.0)
    assert books.book.cash[0] == pytest.approx(0.0, abs=1e-9)


def test_repeated_sells_halve_the_holding_each_time() -> None:
    books = books_of(flat_world(1, commission=0.0))
    books.step(np.array([[BUY]]))
    held = [float(books.book.shares[0, 0])]
    for _ in range(3):
        books.step(np.array([[SELL]]))
        held.append(float(books.book.shares[0, 0]))
    assert held == pytest.approx([20.0, 10.0, 5.0, 2.5])


def test_last_lot_can_be_sold_though_half_of_it_cannot() -> None:
    world = flat_world(1, lot=[100.0], min_lot=[100.0], initial_cash=10_000.0)
    books = books_of(world)
    books.book = book_of(0.0, [300.0])
    held = []
    for _ in range(3):
        books.step(np.array([[SELL]]))
        held.append(float(books.book.shares[0, 0]))
    assert held == [200.0, 100.0, 0.0]


def test_odd_lot_is_sold_whole() -> None:
    books = books_of(flat_world(1, lot=[100.0], min_lot=[100.0]))
    books.book = book_of(0.0, [130.0])
    books.step(np.array([[SELL]]))
    assert books.book.shares[0, 0] == 30.0
    books.step(np.array([[SELL]]))
    assert books.book.shares[0, 0] == 0.0


def test_remainder_below_the_least_order_is_sold_whole() -> None:
    books = books_of(flat_world(1, min_value=100.0))
    books.book = book_of(0.0, [19.0])  # half is worth 95
    fills = books.step(np.array([[SELL]])).fills
    assert fills.shares[0, 0] == -19.0
    books.book = book_of(0.0, [21.0])  # half is worth 105
    fills = books.step(np.array([[SELL]])).fills
    assert fills.shares[0, 0] == -10.5


def test_half_that_is_worth_enough_only_before_it_is_rounded_to_lots_is_sold_whole() -> None:
    # Half of 300 at 7 is worth 1,050, but the lot of it that can be sold only 700.
    orders = discrete_orders(
        np.array([[SELL]]),
        book_of(0.0, [300.0]),
        ActionRule("discrete"),
        np.array([[7.0]]),
        np.array([100.0]),
        1000.0,
    )
    assert orders.shares.tolist() == [[-300.0]]


def test_selling_nothing_by_configuration_sells_nothing() -> None:
    rule = ActionRule("discrete", sell_pct=0.0)
    orders = discrete_orders(
        np.array([[SELL]]), book_of(0.0, [5.0]), rule, np.ones((1, 1)), np.full(1, 100.0), 100.0
    )
    assert orders.shares[0, 0] == 0.0


def test_kernel_serves_buys_in_order_for_discrete_actions_only() -> None:
    rules = make_world().rules
    discrete, weights = rules_for(rules, "discrete"), rules_for(rules, "weights")
    assert (discrete.in_order, discrete.spend_proceeds) == (True, False)
    assert (weights.in_order, weights.spend_proceeds) == (False, True)
    assert discrete._replace(in_order=False, spend_proceeds=True) == weights


# Target weights.


def test_quantity_is_fixed_at_the_decision() -> None:
    """w·V/close of the decision, whatever the open it is filled at."""
    world = flat_world(
        2, close=[[10.0, 20.0], [11.0, 22.0], [1.0, 1.0]], open=np.full((3, 2), 9.0), n_rows=3
    )
    books = books_of(world, "weights")
    fills = books.step(np.array([[0.3, 0.4]])).fills
    assert fills.shares[0] == pytest.approx([0.3 * 1000 / 10, 0.4 * 1000 / 20])
    assert fills.price[0].tolist() == [9.0, 9.0]


def test_orders_are_the_difference_to_what_is_held_and_nan_leaves_it() -> None:
    book = book_of(100.0, [10.0, 10.0, 10.0])
    close = np.array([[10.0, 20.0, 30.0]])
    value = np.array([700.0])
    orders = weight_orders(np.array([[0.5, 0.0, np.nan]]), book, value, close)
    assert orders.shares[0] == pytest.approx([0.5 * 700 / 10 - 10, -10.0, 0.0])
    assert not orders.spend.any()


def test_asset_without_a_price_is_left() -> None:
    orders = weight_orders(
        np.array([[0.5, 0.5]]),
        book_of(100.0, [0.0, 0.0]),
        np.array([100.0]),
        np.array([[0.0, 5.0]]),
    )
    assert orders.shares[0].tolist() == [0.0, 10.0]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ([0.5, 0.3], [0.5, 0.3]),
        ([1.5, 0.5], [0.75, 0.25]),
        ([-0.5, 0.5], [0.0, 0.5]),
        ([np.nan, 2.0], [np.nan, 1.0]),
        ([np.nan, np.nan], [np.nan, np.nan]),
    ],
)
def test_weights_are_cut_to_long_only_and_at_most_one(
    given_: list[float], expected: list[float]
) -> None:
    assert cap_weights(np.array([given_]))[0] == pytest.approx(expected, nan_ok=True)


def test_rotation_of_a_full_book_is_paid_by_what_it_sells() -> None:
    """Without any cash, the scores move everything from one asset to the other in one step."""
    books = books_of(flat_world(2, commission=0.0), "weights")
    books.step(np.array([[1.0, 0.0]]))
    assert books.book.cash[0] == pytest.approx(0.0, abs=1e-9)
    held = books.holdings()
    assert held.allowed[0, 1].tolist() == [True, True, False]
    target = weights_of_scores(np.array([[-1.0, 1.0, -1.0]]), held)
    books.step(target)
    rest = np.exp(-8.0)  # four times the distance of the scores
    expected = 100.0 * np.array([rest, 1.0]) / (1.0 + 2.0 * rest)
    assert books.book.shares[0] == pytest.approx(expected)


def held_of(weights: list[float], buy: list[bool], sell: list[bool]) -> Holdings:
    mask = np.stack([np.ones(len(buy), dtype=bool), buy, sell], axis=-1)
    return Holdings(
        np.array([weights], dtype=np.float32),
        np.array([1.0 - sum(weights)], dtype=np.float32),
        mask[None],
        np.ones(1),
    )


def test_scores_are_shared_out_by_a_softmax_over_assets_and_cash() -> None:
    held = held_of([0.0, 0.0], [True, True], [False, False])
    target = weights_of_scores(np.array([[1.0, 0.5, -1.0]]), held)
    power = np.exp(4.0 * np.array([1.0, 0.5, -1.0]))
    assert target[0] == pytest.approx(power[:2] / power.sum())


def test_frozen_asset_keeps_its_weight_and_the_rest_is_shared_out() -> None:
    held = held_of([0.4, 0.1, 0.0], [False, True, False], [False, True, False])
    target = weights_of_scores(np.zeros((1, 4)), held)
    assert np.isnan(target[0, [0, 2]]).all()
    assert target[0, 1] == pytest.approx(0.6 / 2)


def test_asset_that_can_only_be_sold_never_grows() -> None:
    held = held_of([0.2, 0.0], [False, True], [True, False])
    assert weights_of_scores(np.array([[1.0, -1.0, -1.0]]), held)[0, 0] == pytest.approx(0.2)
    assert weights_of_scores(np.array([[-1.0, 1.0, 1.0]]), held)[0, 0] < 0.01


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 3))
def test_target_weights_are_long_only_and_fit_the_book(
    seed: int, n_assets: int, n_books: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(n_assets + 1), n_books).astype(np.float32)
    mask = rng.random((n_books, n_assets, 3)) > 0.4
    held = Holdings(weights[:, :-1], weights[:, -1], mask, np.ones(len(mask)))
    target = weights_of_scores(rng.uniform(-1, 1, (n_books, n_assets + 1)), held)
    kept = np.where(np.isnan(target), held.weights, target)
    assert (kept >= 0).all()
    assert (kept.sum(axis=1) <= 1.0 + 1e-6).all()
    assert np.array_equal(np.isnan(target), ~mask[:, :, 1:].any(axis=-1))


# What may be done.


def test_everything_open_allows_what_cash_and_holdings_do() -> None:
    world = flat_world(2)
    assert allowed(world, book_of(100.0, [0.0, 5.0])) == {
        "HOLD": [True, True],
        "BUY": [True, True],
        "SELL": [False, True],
    }
    assert allowed(world, book_of(0.0, [0.0, 5.0]))["BUY"] == [False, False]


@pytest.mark.parametrize(
    ("changes", "buy", "sell"),
    [
        ({"tradable": [[True, True], [False, True], [True, True]]}, [False, True], [False, True]),
        ({"gone": [[False, False], [True, False], [True, False]]}, [False, True], [False, True]),
        ({"present": [[True, True], [False, True], [True, True]]}, [False, True], [True, True]),
        ({"member": [[True, True], [False, True], [True, True]]}, [False, True], [True, True]),
    ],
)
def test_suspended_delisted_absent_and_foreign_assets(
    changes: dict[str, Any], buy: list[bool], sell: list[bool]
) -> None:
    world = flat_world(2, n_rows=3, **changes)
    may = allowed(world, book_of(100.0, [5.0, 5.0]))
    assert (may["BUY"], may["SELL"]) == (buy, sell)
    assert may["HOLD"] == [True, True]
    assert allowed(world, book_of(100.0, [5.0, 5.0]), row=0)["BUY"] == [True, True]


def test_limits_forbid_their_side_where_fills_are_at_the_close_of_the_decision() -> None:
    rows = {"limit_up": np.full((6, 2), [10.0, 11.0]), "limit_down": np.full((6, 2), [9.0, 10.0])}
    book = book_of(100.0, [5.0, 5.0])
    world = flat_world(2, price_limits=True, fill_open=False, **rows)
    assert allowed(world, book)["BUY"] == [False, True]
    assert allowed(world, book)["SELL"] == [True, False]
    # At the next open the price may have left its limit: nobody knows yet.
    world = flat_world(2, price_limits=True, fill_open=True, **rows)
    assert allowed(world, book)["BUY"] == allowed(world, book)["SELL"] == [True, True]
    world = flat_world(2, price_limits=False, fill_open=False, **rows)
    assert allowed(world, book)["BUY"] == [True, True]


def test_t_plus_one_forbids_selling_what_was_bought_in_the_session() -> None:
    book = book_of(0.0, [5.0, 5.0, 5.0], [5.0, 3.0, 0.0])
    world = flat_world(3, t_plus_one=True, fill_open=False)
    assert allowed(world, book)["SELL"] == [False, True, True]
    assert allowed(flat_world(3, fill_open=False), book)["SELL"] == [True, True, True]


def test_least_order_and_its_fee_must_be_affordable() -> None:
    world = flat_world(1, min_value=100.0, min_commission=1.0, commission=0.0)
    # A BUY is for a fifth of the cash: 101 of 505, of which a hundred after the fee.
    assert allowed(world, book_of(505.0, [0.0]))["BUY"] == [True]
    assert allowed(world, book_of(504.0, [0.0]))["BUY"] == [False]
    assert allowed(world, book_of(252.5, [0.0]), buy_pct=0.4)["BUY"] == [True]


def test_least_lot_must_be_affordable() -> None:
    world = flat_world(2, commission=0.0, lot=[100.0, 100.0], min_lot=[100.0, 200.0])
    assert allowed(world, book_of(5000.0, [0.0, 0.0]))["BUY"] == [True, False]
    assert allowed(world, book_of(10_000.0, [0.0, 0.0]))["BUY"] == [True, True]


def test_as_many_lots_as_the_least_value_takes_must_be_affordable() -> None:
    # A lot is worth 600 and an order must be worth 1,000: two lots, 1,200 of 6,000.
    world = flat_world(1, price=6.0, commission=0.0, lot=[100.0], min_lot=[100.0], min_value=1000.0)
    assert allowed(world, book_of(5999.0, [0.0]))["BUY"] == [False]
    assert allowed(world, book_of(6000.0, [0.0]))["BUY"] == [True]


def test_holding_worth_less_than_its_fee_cannot_be_sold() -> None:
    world = flat_world(2, min_commission=5.0)
    assert allowed(world, book_of(0.0, [0.4, 0.6]))["SELL"] == [False, True]


def test_target_weights_may_buy_without_cash() -> None:
    may = allowed(flat_world(2), book_of(0.0, [0.0, 5.0]), kind="weights")
    assert may["BUY"] == [True, True]


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_what_is_allowed_at_the_close_is_filled(seed: int) -> None:
    """Fills at the close of the decision hold no surprise: one allowed action is never rejected."""
    rng = np.random.default_rng(seed)
    shape = (6, 4)
    close = rng.uniform(5.0, 50.0, shape).round(2)
    world = make_world(
        close=close,
        tradable=rng.random(shape) > 0.2,
        member=rng.random(shape) > 0.2,
        gone=np.zeros(shape),
        limit_up=np.where(rng.random(shape) > 0.8, close, close + 1.0),
        limit_down=np.where(rng.random(shape) > 0.8, close, close - 1.0),
        lot=[0.0, 100.0, 100.0, 0.0],
        min_lot=[0.0, 100.0, 200.0, 0.0],
        price_limits=True,
        t_plus_one=True,
        min_value=float(rng.choice([0.0, 500.0, 1700.0])),
        min_commission=float(rng.choice([0.0, 5.0])),
        initial_cash=float(rng.choice([3_000.0, 30_000.0, 300_000.0])),
        fill_open=False,
        window=1,
        splits={"train": range(6)},
    )
    books = books_of(world)
    for _ in range(5):
        held = books.holdings()
        chosen = np.zeros((1, 4), dtype=int)
        asset = int(rng.integers(4))
        chosen[0, asset] = rng.choice(np.flatnonzero(held.allowed[0, asset]))
        fills = books.step(chosen).fills
        if chosen[0, asset] != HOLD:
            assert fills.shares[0, asset] != 0.0, Reason(fills.reason[0, asset]).name


def test_buys_of_assets_outside_the_universe_are_refused_and_sells_are_not() -> None:
    orders = Orders(np.array([[5.0, -5.0, 0.0, 5.0]]), np.array([[0.0, 0.0, 100.0, 0.0]]))
    buyable = np.array([[False, False, False, True]])
    kept, refused = members_only(orders, buyable)
    assert kept.shares.tolist() == [[0.0, -5.0, 0.0, 5.0]]
    assert kept.spend.tolist() == [[0.0] * 4]
    assert refused is not None
    assert refused.tolist() == [[True, False, True, False]]
    assert members_only(orders, np.ones((1, 4), dtype=bool)) == (orders, None)


@pytest.mark.parametrize("kind", ["discrete", "weights"])
def test_refused_buy_of_a_stranger_says_so_and_takes_no_cash(kind: ActionKind) -> None:
    member = np.ones((6, 2), dtype=bool)
    member[:, 0] = False
    books = books_of(flat_world(2, member=member), kind, "buy_pct=1.0")
    action = np.array([[BUY, BUY]]) if kind == "discrete" else np.array([[0.5, 0.5]])
    fills = books.step(action).fills
    assert fills.reason[0].tolist() == [Reason.NOT_MEMBER, Reason.NONE]
    assert (fills.shares[0] > 0).tolist() == [False, True]


def test_holdings_are_shares_of_the_value() -> None:
    world = flat_world(2, close=np.full((6, 2), [10.0, 30.0]))
    book = book_of(400.0, [30.0, 10.0])
    held = holdings(world, book, np.array([1000.0]), at(2), RULE)
    assert held.weights[0] == pytest.approx([0.3, 0.3])
    assert held.cash_share[0] == pytest.approx(0.4)
    assert held.weights.dtype == held.cash_share.dtype == np.float32
