"""The market kernel: worked out by hand, against a slow twin, and by property."""

from __future__ import annotations

from datetime import date
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow_kernel import SlowBook, slow_settle, slow_trade

from echelon.data.calendars import sessions
from echelon.market import (
    Book,
    MarketRows,
    Orders,
    PriceHistory,
    Reason,
    Rules,
    market_rows,
    new_book,
    step,
)
from echelon.market.kernel import mark, settle, trade

FREE = Rules(0.0, 0.0, 0, 0.0, np.inf, False, False, True, False, 0.0)
PAPER = FREE._replace(commission=0.0005, spend_proceeds=False, in_order=True)


def rows(open_: list[list[float]], close: list[list[float]], **changes: object) -> MarketRows:
    """A market of given prices in which everything may be traded, changed as asked."""
    opens, closes = np.array(open_, dtype=float), np.array(close, dtype=float)
    shape = closes.shape
    plain = MarketRows(
        open=opens,
        close=closes,
        tradable=np.ones(shape, dtype=bool),
        gone=np.zeros(shape, dtype=bool),
        volume_open=np.full(shape, np.inf),
        volume_close=np.full(shape, np.inf),
        limit_up=np.full(shape, np.inf),
        limit_down=np.zeros(shape),
        share_step=np.ones(shape),
        dividend=np.zeros(shape),
        haircut=np.full(shape[1], 0.3),
        lot=np.zeros(shape[1]),
        min_lot=np.zeros(shape[1]),
        new_session=np.ones(shape[0], dtype=bool),
        stamp=np.zeros(shape[0]),
    )
    return plain._replace(**{k: np.array(v) for k, v in changes.items()})


def at(row: int, n_books: int = 1) -> np.ndarray:
    return np.full(n_books, row, dtype=np.int64)


def order(shares: list[float], spend: list[float] | None = None) -> Orders:
    return Orders(np.array([shares]), np.array([spend or [0.0] * len(shares)]))


def one(cash: float, shares: list[float], locked: list[float] | None = None) -> Book:
    return Book(np.array([cash]), np.array([shares]), np.array([locked or [0.0] * len(shares)]))


def test_two_assets_worked_out_by_hand() -> None:
    """Fee 0.05 % a side, 20/50 rule, fills at the same close: design note 003's market."""
    market = rows([[0, 0]] * 3, [[10.0, 50.0], [11.0, 45.0], [12.0, 50.0]])
    book = new_book(1000.0, 1, 2)
    # Step 1, BUY A and BUY B: each 20 % of 1000, fee included.
    book, fills = trade(book, order([0, 0], [200.0, 200.0]), market, at(0), PAPER, at_open=False)
    # 200 / 1.0005 = 199.9000499750; at 10 and 50: 19.99000499750 and 3.99800099950 shares.
    assert fills.shares[0] == pytest.approx([19.9900049975, 3.9980009995], abs=1e-9)
    assert fills.commission[0] == pytest.approx([0.0999500250, 0.0999500250], abs=1e-9)
    assert book.cash[0] == pytest.approx(600.0, abs=1e-9)
    # Value at the next close: 600 + 19.990005·11 + 3.998001·45 = 999.80009995
    assert mark(book, market, at(1))[0] == pytest.approx(999.8000999500, abs=1e-8)
    # Step 2, SELL A (half), HOLD B: 9.99500249875 shares at 11 bring 109.94502749, fee 0.05497251.
    half = book.shares[0, 0] * 0.5
    book, fills = trade(book, order([-half, 0]), market, at(1), PAPER, at_open=False)
    assert fills.commission[0, 0] == pytest.approx(0.0549725137, abs=1e-9)
    assert book.cash[0] == pytest.approx(600.0 + 109.9450274863 - 0.0549725137, abs=1e-8)
    assert book.shares[0] == pytest.approx([9.9950024988, 3.9980009995], abs=1e-9)
    # Value at the last close: 709.8900549726 + 9.9950024988·12 + 3.9980009995·50 = 1029.73013493
    assert mark(book, market, at(2))[0] == pytest.approx(1029.7301349326, abs=1e-7)


def test_five_buys_use_the_cash_up_and_a_sixth_is_skipped() -> None:
    market = rows([[10.0] * 6], [[10.0] * 6])
    book, fills = trade(
        new_book(1000.0, 1, 6), order([0.0] * 6, [200.0] * 6), market, at(0), PAPER, at_open=True
    )
    assert book.cash[0] == pytest.approx(0.0, abs=1e-9)
    assert (fills.shares[0, :5] > 0).all()
    assert fills.shares[0, 5] == 0
    assert fills.reason[0, 5] == Reason.CASH


def test_proceeds_of_the_same_step_are_spent_from_the_next_under_the_20_50_rule() -> None:
    market = rows([[10.0, 10.0]], [[10.0, 10.0]])
    book = one(0.0, [100.0, 0.0])
    after, fills = trade(book, order([-50, 0], [0, 100]), market, at(0), PAPER, at_open=True)
    assert fills.shares[0].tolist() == [-50.0, 0.0]
    assert fills.reason[0, 1] == Reason.CASH
    assert after.cash[0] == pytest.approx(500 * 0.9995)


def test_target_weights_sell_first_and_scale_buys_to_the_cash() -> None:
    market = rows([[10.0, 10.0, 20.0]], [[10.0, 10.0, 20.0]])
    book = one(0.0, [100.0, 0.0, 0.0])
    rules = FREE._replace(commission=0.01)
    after, fills = trade(book, order([-50, 40, 10]), market, at(0), rules, at_open=True)
    # 500 less 5 fee; buys would cost 600 · 1.01 = 606: both are scaled by 495/606.
    assert fills.shares[0] == pytest.approx([-50, 40 * 495 / 606, 10 * 495 / 606])
    assert after.cash[0] == pytest.approx(0.0, abs=1e-9)
    assert fills.reason[0].tolist() == [Reason.NONE, Reason.CASH, Reason.CASH]


def test_short_sale_is_cut_to_what_is_held() -> None:
    market = rows([[10.0]], [[10.0]])
    book, fills = trade(one(0.0, [5.0]), order([-9.0]), market, at(0), FREE, at_open=True)
    assert fills.shares[0, 0] == -5.0
    assert fills.reason[0, 0] == Reason.NOT_HELD
    assert book.shares[0, 0] == 0.0


@pytest.mark.parametrize(
    ("changes", "wanted", "reason"),
    [
        ({"tradable": [[False]]}, 1.0, Reason.SUSPENDED),
        ({"tradable": [[False]]}, -1.0, Reason.SUSPENDED),
        ({"gone": [[True]]}, 1.0, Reason.DELISTED),
        ({"limit_up": [[10.0]]}, 1.0, Reason.LIMIT_UP),
        ({"limit_down": [[10.0]]}, -1.0, Reason.LIMIT_DOWN),
    ],
)
def test_forbidden_side_is_not_traded(
    changes: dict[str, object], wanted: float, reason: Reason
) -> None:
    market = rows([[10.0]], [[10.0]], **changes)
    rules = FREE._replace(price_limits=True)
    book = one(100.0, [5.0])
    after, fills = trade(book, order([wanted]), market, at(0), rules, at_open=True)
    assert fills.reason[0, 0] == reason
    assert fills.shares[0, 0] == 0
    assert after.cash[0] == 100.0


def test_limits_leave_the_other_side_open() -> None:
    market = rows([[10.0, 10.0]], [[10.0, 10.0]], limit_up=[[10, 20]], limit_down=[[5, 10]])
    rules = FREE._replace(price_limits=True)
    _, fills = trade(one(100.0, [5.0, 0.0]), order([-1, 1]), market, at(0), rules, at_open=True)
    assert fills.shares[0].tolist() == [-1.0, 1.0]


def test_volume_cap_uses_the_trailing_median_at_the_open_and_the_bar_at_the_close() -> None:
    market = rows([[10.0]], [[10.0]], volume_open=[[1000.0]], volume_close=[[50.0]])
    rules = FREE._replace(participation=0.1)
    for at_open, expected in ((True, 100.0), (False, 5.0)):
        _, fills = trade(one(1e6, [0.0]), order([500.0]), market, at(0), rules, at_open=at_open)
        assert fills.shares[0, 0] == expected
        assert fills.reason[0, 0] == Reason.VOLUME


def test_buy_cut_by_the_volume_says_so_though_lots_and_cash_cut_it_further() -> None:
    market = rows([[10.0]], [[10.0]], volume_open=[[2550.0]], lot=[100.0], min_lot=[100.0])
    rules = FREE._replace(participation=0.1)
    for cash, bought in ((1e6, 200.0), (1500.0, 100.0)):
        _, fills = trade(one(cash, [0.0]), order([500.0]), market, at(0), rules, at_open=True)
        assert fills.shares[0, 0] == bought
        assert fills.reason[0, 0] == Reason.VOLUME


def test_lots_round_buys_down_and_odd_lots_are_sold_whole() -> None:
    market = rows([[10.0, 10.0]], [[10.0, 10.0]], lot=[100.0, 100.0], min_lot=[100.0, 200.0])
    _, fills = trade(one(1e5, [0, 0]), order([250, 150]), market, at(0), FREE, at_open=True)
    assert fills.shares[0].tolist() == [200.0, 0.0]  # STAR buys begin at 200
    assert fills.reason[0].tolist() == [Reason.LOT, Reason.LOT]
    odd = one(0.0, [250.0, 30.0])
    _, fills = trade(odd, order([-130, -30]), market, at(0), FREE, at_open=True)
    assert fills.shares[0].tolist() == [-100.0, -30.0]
    _, fills = trade(odd, order([-250, -10]), market, at(0), FREE, at_open=True)
    assert fills.shares[0].tolist() == [-250.0, 0.0]


def test_t_plus_one_binds_within_a_session_only() -> None:
    market = rows([[10.0]] * 3, [[10.0]] * 3, new_session=[True, False, True])
    rules = FREE._replace(t_plus_one=True)
    book, _ = trade(one(1000.0, [40.0]), order([60]), market, at(0), rules, at_open=True)
    book = settle(book, market, at(1))
    book, fills = trade(book, order([-100]), market, at(1), rules, at_open=True)
    assert fills.shares[0, 0] == -40.0
    assert fills.reason[0, 0] == Reason.T_PLUS_ONE
    book = settle(book, market, at(2))
    _, fills = trade(book, order([-60]), market, at(2), rules, at_open=True)
    assert fills.shares[0, 0] == -60.0


def test_t_plus_one_binds_between_five_minute_bars_and_is_over_the_next_morning() -> None:
    two_days = sessions("XSHG", date(2024, 5, 6), date(2024, 5, 7)).astype("datetime64[D]")
    bars = np.array([9 * 60 + 35, 9 * 60 + 40, 14 * 60 + 55], dtype="timedelta64[m]")
    times = (two_days[:, None] + bars).ravel().astype("datetime64[us]")
    shape = (len(times), 1)
    flat = np.full(shape, 10.0)
    market = market_rows(
        PriceHistory(times, ("600000.SH",), "raw", flat, flat > 0, flat < 0, open=flat),
        lots=True,
        stamp_duty=False,
    )
    assert market.new_session.tolist() == [True, False, False, True, False, False]
    rules = FREE._replace(t_plus_one=True)
    wanted = [200.0, -300.0, -200.0, -200.0, 0.0]
    book, sold = one(1e4, [100.0]), []
    for row, shares in enumerate(wanted):
        book, fills, _ = step(book, order([shares]), market, at(row), rules, fill_open=True)
        sold.append((fills.shares[0, 0], Reason(fills.reason[0, 0])))
    # Bought at the second bar; the 100 of yesterday can go at once, the 200 only the next day.
    assert sold == [
        (200.0, Reason.NONE),
        (-100.0, Reason.T_PLUS_ONE),
        (-200.0, Reason.NONE),
        (0.0, Reason.NOT_HELD),
        (0.0, Reason.NONE),
    ]
    # With a fourth bar on the same day it would still be locked.
    same_day = market._replace(new_session=np.zeros(6, dtype=bool))
    book = one(0.0, [200.0], [200.0])
    _, fills, _ = step(book, order([-200.0]), same_day, at(2), rules, fill_open=True)
    assert fills.shares[0, 0] == 0.0
    assert fills.reason[0, 0] == Reason.T_PLUS_ONE


def test_sale_that_would_not_bring_its_fee_is_not_made() -> None:
    market = rows([[0.5, 0.5]], [[0.5, 0.5]])
    rules = FREE._replace(min_commission=1.0)
    after, fills = trade(one(0.0, [1.0, 3.0]), order([-1, -3]), market, at(0), rules, at_open=True)
    assert fills.shares[0].tolist() == [0.0, -3.0]
    assert fills.reason[0].tolist() == [Reason.TOO_SMALL, Reason.NONE]
    assert after.cash[0] == 0.5


def test_cash_below_one_commission_buys_nothing() -> None:
    market = rows([[0.5, 0.5]], [[0.5, 0.5]])
    rules = FREE._replace(min_commission=1.0)
    for cash in (0.0, 0.99):
        after, fills = trade(one(cash, [0, 0]), order([1, 1]), market, at(0), rules, at_open=True)
        assert fills.shares[0].tolist() == [0.0, 0.0]
        assert fills.reason[0].tolist() == [Reason.CASH, Reason.CASH]
        assert after.cash[0] == cash


@pytest.mark.parametrize("row", [-1, 1, 2])
def test_row_outside_the_market_is_refused(row: int) -> None:
    market = rows([[1.0], [1.0]], [[1.0], [1.0]])
    with pytest.raises(AssertionError, match="row of the market"):
        step(one(1.0, [0.0]), order([1.0]), market, at(row), FREE, fill_open=True)
    if row != 1:
        with pytest.raises(AssertionError, match="row of the market"):
            mark(one(1.0, [0.0]), market, at(row))


def test_costs_commission_minimum_stamp_and_slippage_by_hand() -> None:
    market = rows([[10.0]], [[10.0]], volume_open=[[1000.0]], stamp=[0.001])
    rules = FREE._replace(commission=0.0003, min_commission=5.0, slippage_model=2, slippage=0.01)
    book, fills = trade(one(0.0, [100.0]), order([-100]), market, at(0), rules, at_open=True)
    # A tenth of the volume: 0.1 % slippage, price 9.99, amount 999, fee 5 (least), stamp 0.999.
    assert fills.price[0, 0] == pytest.approx(9.99)
    assert fills.slippage[0, 0] == pytest.approx(1.0)
    assert fills.commission[0, 0] == 5.0
    assert fills.stamp[0, 0] == pytest.approx(0.999)
    assert book.cash[0] == pytest.approx(999 - 5 - 0.999)
    rules = rules._replace(slippage_model=3)
    _, fills = trade(one(0.0, [100.0]), order([-100]), market, at(0), rules, at_open=True)
    assert fills.price[0, 0] == pytest.approx(10 * (1 - 0.01 * np.sqrt(0.1)))


def test_small_orders_are_not_sent_but_positions_can_be_closed() -> None:
    market = rows([[10.0, 10.0]], [[10.0, 10.0]])
    rules = FREE._replace(min_value=100.0)
    _, fills = trade(one(1e3, [50.0, 3.0]), order([-5, -3]), market, at(0), rules, at_open=True)
    assert fills.shares[0].tolist() == [0.0, -3.0]
    assert fills.reason[0, 0] == Reason.TOO_SMALL
    _, fills = trade(one(1e3, [0.0, 0.0]), order([5, 20]), market, at(0), rules, at_open=True)
    assert fills.shares[0].tolist() == [0.0, 20.0]


def test_split_dividend_and_delisting_settle_before_the_bar() -> None:
    market = rows(
        [[5.0, 9.0, 8.0]],
        [[5.0, 9.0, 8.0]],
        share_step=[[2.0, 1.0, 1.0]],
        dividend=[[0.0, 0.5, 0.0]],
        gone=[[False, False, True]],
        haircut=[0.3, 0.3, 0.25],
    )
    book = settle(one(10.0, [100.0, 100.0, 10.0]), market, at(0))
    assert book.shares[0].tolist() == [200.0, 100.0, 0.0]
    assert book.cash[0] == pytest.approx(10 + 50 + 10 * 8 * 0.75)


# ---- random cases: the slow twin, conservation, monotonicity, order of assets

prices_ = st.floats(0.05, 100.0).map(lambda x: round(x, 2))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Book, Orders, MarketRows, Rules, bool]:
    n = draw(st.integers(1, 5))

    def vector(elements: st.SearchStrategy[float]) -> np.ndarray:
        return np.array([draw(st.lists(elements, min_size=n, max_size=n))])

    close = vector(prices_)
    lot = vector(st.sampled_from([0.0, 0.0, 100.0]))[0]
    market = rows(vector(prices_).tolist(), close.tolist())._replace(
        tradable=vector(st.sampled_from([1.0, 1.0, 1.0, 0.0])) > 0,
        gone=vector(st.sampled_from([0.0, 0.0, 0.0, 1.0])) > 0,
        volume_open=vector(st.sampled_from([0.0, 100.0, 5e3, np.inf])),
        volume_close=vector(st.sampled_from([0.0, 100.0, 5e3, np.inf])),
        limit_up=close * draw(st.sampled_from([1.0, 1.1, np.inf])),
        limit_down=close * draw(st.sampled_from([0.0, 0.9, 1.0])),
        share_step=vector(st.sampled_from([1.0, 1.0, 2.0])),
        dividend=vector(st.sampled_from([0.0, 0.0, 0.3])),
        lot=lot,
        min_lot=lot * draw(st.sampled_from([1.0, 2.0])),
        new_session=np.array([draw(st.booleans())]),
        stamp=np.array([draw(st.sampled_from([0.0, 0.001]))]),
    )
    rules = Rules(
        commission=draw(st.sampled_from([0.0, 0.0005, 0.01])),
        min_commission=draw(st.sampled_from([0.0, 5.0])),
        slippage_model=draw(st.sampled_from([0, 1, 2, 3])),
        slippage=draw(st.sampled_from([0.0, 0.001, 0.05])),
        participation=draw(st.sampled_from([np.inf, 0.1, 1.0])),
        t_plus_one=draw(st.booleans()),
        price_limits=draw(st.booleans()),
        spend_proceeds=draw(st.booleans()),
        in_order=draw(st.booleans()),
        min_value=draw(st.sampled_from([0.0, 500.0])),
    )
    held = vector(st.sampled_from([0.0, 30.0, 250.0, 1000.5]))
    book = Book(
        np.array([draw(st.sampled_from([0.0, 50.0, 1e4, 1e6]))]),
        held,
        held * draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    orders = Orders(
        vector(st.sampled_from([0.0, -20.0, -300.0, 10.0, 150.0, 2000.0])),
        vector(st.sampled_from([0.0, 0.0, 1000.0])),
    )
    spend = np.where(orders.shares == 0, orders.spend, 0.0)
    return book, orders._replace(spend=spend), market, rules, draw(st.booleans())


_CUT_TWICE = (
    one(50.0, [0.0]),
    order([10.0]),
    rows([[6.0]], [[6.0]]),
    FREE._replace(min_commission=5.0, min_value=500.0, in_order=False, spend_proceeds=False),
    True,
)
"""An order that the cash cuts, and that would be too small even whole: the cash is named."""


@settings(max_examples=400)
@example(_CUT_TWICE)
@given(cases())
def test_compiled_kernel_agrees_with_the_slow_twin(
    case: tuple[Book, Orders, MarketRows, Rules, bool],
) -> None:
    book, orders, market, rules, at_open = case
    slow = SlowBook(float(book.cash[0]), book.shares[0].tolist(), book.locked[0].tolist())
    fast = settle(book, market, at(0))
    slow_settle(slow, market, 0)
    assert fast.cash[0] == pytest.approx(slow.cash)
    assert fast.shares[0] == pytest.approx(slow.shares)
    fast, fills = trade(fast, orders, market, at(0), rules, at_open=at_open)
    expected = slow_trade(
        slow, orders.shares[0].tolist(), orders.spend[0].tolist(), market, 0, rules, at_open
    )
    assert fills.shares[0] == pytest.approx(expected.shares)
    assert fills.price[0] == pytest.approx(expected.price)
    assert [Reason(code) for code in fills.reason[0]] == expected.reason
    assert fast.cash[0] == pytest.approx(slow.cash, abs=1e-6)
    assert fast.shares[0] == pytest.approx(slow.shares)
    assert fast.locked[0] == pytest.approx(slow.locked)


@settings(max_examples=300)
@given(cases())
def test_cash_is_conserved_to_the_cent_and_nothing_is_negative(
    case: tuple[Book, Orders, MarketRows, Rules, bool],
) -> None:
    book, orders, market, rules, at_open = case
    before = Book(*(part.copy() for part in book))
    after, fills = trade(book, orders, market, at(0), rules, at_open=at_open)
    paid = (fills.shares * fills.price).sum() + fills.commission.sum() + fills.stamp.sum()
    assert after.cash[0] == pytest.approx(book.cash[0] - paid, abs=0.005)
    assert after.shares == pytest.approx(book.shares + fills.shares)
    assert (after.cash >= 0).all()
    assert (after.shares >= -1e-9).all()
    for part in ("commission", "stamp", "slippage"):
        assert (getattr(fills, part) >= 0).all()
    for old, new in zip(before, book, strict=True):
        assert np.array_equal(old, new)  # pure: the book that went in is as it was
    shut = ~market.tradable | market.gone
    assert (fills.shares[shut] == 0).all()
    if rules.price_limits:
        price = market.open if at_open else market.close
        assert (fills.shares[price >= market.limit_up] <= 0).all()
        assert (fills.shares[price <= market.limit_down] >= 0).all()
    if rules.t_plus_one:
        assert (-fills.shares <= book.shares - book.locked + 1e-9).all()


@settings(max_examples=200)
@given(cases(), st.sampled_from([0.0001, 0.001]))
def test_higher_fees_never_give_a_higher_value_for_the_same_fills(
    case: tuple[Book, Orders, MarketRows, Rules, bool], more: float
) -> None:
    book, orders, market, rules, at_open = case
    # So rich a book, and orders in shares, fill alike at either fee.
    book = book._replace(cash=book.cash + 1e9)
    orders = orders._replace(spend=np.zeros_like(orders.spend))
    cheap = rules._replace(min_commission=0.0)
    dear = cheap._replace(commission=rules.commission + more)
    cheap_book, fills = trade(book, orders, market, at(0), cheap, at_open=at_open)
    dear_book, same = trade(book, orders, market, at(0), dear, at_open=at_open)
    assert np.array_equal(fills.shares, same.shares)
    value, less = mark(cheap_book, market, at(0))[0], mark(dear_book, market, at(0))[0]
    traded = (np.abs(fills.shares) * fills.price).sum()
    # Money is about 1e9 here, in which a float64 tells 1e-7 apart.
    assert less == pytest.approx(value - more * traded, abs=1e-6)
    assert less <= value


@settings(max_examples=200)
@given(cases(), st.randoms(use_true_random=False))
def test_order_of_assets_does_not_matter_when_buys_are_scaled(
    case: tuple[Book, Orders, MarketRows, Rules, bool], random: object
) -> None:
    book, orders, market, rules, at_open = case
    rules = rules._replace(in_order=False, min_commission=0.0)
    order_ = list(range(book.shares.shape[1]))
    random.shuffle(order_)  # type: ignore[attr-defined]

    def turned(part: np.ndarray) -> np.ndarray:
        if (part.dtype == bool and part.ndim == 1) or part.shape == (1,):
            return part
        return part[..., order_]

    mixed = MarketRows(*(turned(part) for part in market))
    _, fills = trade(book, orders, market, at(0), rules, at_open=at_open)
    other_book = Book(book.cash, turned(book.shares), turned(book.locked))
    other_orders = Orders(turned(orders.shares), turned(orders.spend))
    _, other = trade(other_book, other_orders, mixed, at(0), rules, at_open=at_open)
    assert other.shares[0] == pytest.approx(fills.shares[0][order_], abs=1e-6)


@settings(max_examples=50)
@given(st.lists(cases(), min_size=2, max_size=2), st.integers(0, 3))
def test_books_in_a_batch_do_not_touch_one_another(
    pair: list[tuple[Book, Orders, MarketRows, Rules, bool]], copies: int
) -> None:
    book, orders, market, rules, at_open = pair[0]
    n_books = copies + 2
    batch = Book(*(np.repeat(part, n_books, axis=0) for part in book))
    batch.cash[1:] = 0.0
    many = Orders(*(np.repeat(part, n_books, axis=0) for part in orders))
    after, _ = trade(batch, many, market, at(0, n_books), rules, at_open=at_open)
    alone, _ = trade(book, orders, market, at(0), rules, at_open=at_open)
    assert after.cash[0] == alone.cash[0]
    assert np.array_equal(after.shares[0], alone.shares[0])


RULES = st.builds(
    Rules,
    commission=st.sampled_from([0.0, 0.0005, 0.01]),
    min_commission=st.sampled_from([0.0, 5.0]),
    slippage_model=st.sampled_from([0, 1, 2, 3]),
    slippage=st.sampled_from([0.0, 0.001, 0.05]),
    participation=st.sampled_from([np.inf, 0.1, 1.0]),
    t_plus_one=st.booleans(),
    price_limits=st.booleans(),
    spend_proceeds=st.booleans(),
    in_order=st.booleans(),
    min_value=st.sampled_from([0.0, 500.0]),
)


def crowd(seed: int, n_books: int, n_assets: int, n_rows: int = 6) -> tuple[Book, MarketRows]:
    """Books at random holdings in a market where everything that can happen does."""
    rng = np.random.default_rng(seed)
    shape = (n_rows, n_assets)
    close = rng.uniform(1, 100, shape).round(2)
    lot = rng.choice([0.0, 0.0, 100.0], n_assets)
    market = rows((close * rng.choice([0.9, 1.0, 1.1], shape)).tolist(), close.tolist())._replace(
        tradable=rng.random(shape) > 0.1,
        gone=rng.random(shape) > 0.9,
        volume_open=rng.choice([0.0, 100.0, 5e3, np.inf], shape),
        volume_close=rng.choice([0.0, 100.0, 5e3, np.inf], shape),
        limit_up=close * rng.choice([1.0, 1.1, np.inf], shape),
        limit_down=close * rng.choice([0.0, 0.9, 1.0], shape),
        share_step=rng.choice([1.0, 1.0, 1.5], shape),
        dividend=rng.choice([0.0, 0.0, 0.3], shape),
        lot=lot,
        min_lot=lot * rng.choice([1.0, 2.0], n_assets),
        new_session=rng.random(n_rows) > 0.5,
        stamp=rng.choice([0.0, 0.001], n_rows),
    )
    held = rng.choice([0.0, 30.0, 250.0, 1000.5], (n_books, n_assets))
    locked = held * rng.choice([0.0, 0.5, 1.0], held.shape)
    return Book(rng.choice([0.0, 50.0, 1e4, 1e6], n_books), held, locked), market


def whims(seed: int, n_books: int, n_assets: int) -> Orders:
    """Random orders, in shares or in money, never both."""
    rng = np.random.default_rng(seed)
    shape = (n_books, n_assets)
    shares = rng.choice([0.0, -20.0, -300.0, 10.0, 150.0, 2000.0], shape)
    spend = rng.choice([0.0, 1000.0], shape)
    return Orders(shares, np.where(shares == 0, spend, 0.0))


@settings(max_examples=200)
@given(RULES, st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 6), st.booleans())
def test_step_is_settle_trade_and_mark_in_the_order_of_the_clock(
    rules: Rules, seed: int, n_books: int, n_assets: int, fill_open: bool
) -> None:
    book, market = crowd(seed, n_books, n_assets)
    orders = whims(seed, n_books, n_assets)
    row = np.random.default_rng(seed).integers(0, len(market.close) - 1, n_books)
    given_ = [part.copy() for part in (*book, *orders, row)]
    done = step(book, orders, market, row, rules, fill_open=fill_open)
    if fill_open:
        settled = settle(book, market, row + 1)
        split = orders._replace(shares=orders.shares * market.share_step[row + 1])
        after, fills = trade(settled, split, market, row + 1, rules, at_open=True)
    else:
        traded, fills = trade(book, orders, market, row, rules, at_open=False)
        after = settle(traded, market, row + 1)
    expected = (*after, *fills, mark(after, market, row + 1))
    for ours, theirs in zip((*done.book, *done.fills, done.value), expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)  # to the last bit
    for old, new in zip(given_, (*book, *orders, row), strict=True):
        assert np.array_equal(old, new)  # pure


def test_a_split_before_the_fill_splits_the_order_too() -> None:
    # 100 shares at 50; 40 are ordered sold at the close of row 0; before the open of row 1 each
    # share becomes two at 25: 80 of the 200 are sold, for the 2,000 that 40 at 50 were worth.
    market = rows([[50.0], [25.0]], [[50.0], [25.0]], share_step=np.array([[1.0], [2.0]]))
    book = Book(np.zeros(1), np.array([[100.0]]), np.zeros((1, 1)))
    orders = Orders(np.array([[-40.0]]), np.zeros((1, 1)))
    done = step(book, orders, market, np.zeros(1, dtype=np.int64), FREE, fill_open=True)
    assert done.fills.shares[0, 0] == -80.0
    assert done.book.cash[0] == 2000.0
    assert done.book.shares[0, 0] == 120.0
    assert done.value[0] == 5000.0


@settings(max_examples=100)
@given(RULES, st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_cash_is_conserved_to_the_cent_over_a_run_of_random_trades(
    rules: Rules, seed: int, n_assets: int, fill_open: bool
) -> None:
    n_books, n_rows = 4, 30
    book, market = crowd(seed, n_books, n_assets, n_rows)
    cash = [Fraction(money) for money in book.cash.tolist()]
    for t in range(n_rows - 1):
        before = book
        orders = whims(seed + t, n_books, n_assets)
        book, fills, value = step(
            before, orders, market, at(t, n_books), rules, fill_open=fill_open
        )
        held = before.shares if fill_open else before.shares + fills.shares
        fate = np.where(
            market.gone[t + 1], market.close[t + 1] * (1 - market.haircut), market.dividend[t + 1]
        )
        paid = fills.shares * fills.price + fills.commission + fills.stamp
        for e in range(n_books):
            # Exact sums of what the fills say, never reset to what the book says.
            cash[e] += sum(map(Fraction, (held[e] * fate).tolist()), Fraction(0))
            cash[e] -= sum(map(Fraction, paid[e].tolist()), Fraction(0))
            assert abs(float(cash[e]) - book.cash[e]) < 0.005
        assert (book.cash >= 0).all()
        assert (book.shares >= 0).all()
        assert (fills.shares[:, market.gone[t + fill_open]] == 0).all()
        assert (fills.shares[:, ~market.tradable[t + fill_open]] == 0).all()
        assert value == pytest.approx(book.cash + book.shares @ market.close[t + 1])
