"""Order books: loading, and market, limit and cancel orders worked out by hand."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_book import PlainBookOrder

from echelon.config import SyntheticConfig
from echelon.data.sources.synthetic import SyntheticSource
from echelon.errors import ConfigError, DataError, InvalidDataError, UsageError
from echelon.execution import ExecutionRules, History, measure_orders, parent_orders
from echelon.execution.book_days import BookDays, read_book, synthetic_book_days
from echelon.execution.book_simulator import (
    CANCEL,
    LIMIT,
    MARKET,
    WAIT,
    BookActions,
    BookRules,
    BookSimulator,
)
from echelon.execution.features import public_features
from echelon.execution.policies import Twap, run_orders


def book_of(
    n_ticks: int = 6,
    *,
    bids: tuple[tuple[float, float], ...] = ((9.99, 100.0), (9.98, 200.0), (9.97, 300.0)),
    asks: tuple[tuple[float, float], ...] = ((10.01, 50.0), (10.02, 150.0), (10.03, 400.0)),
    sold: float = 60.0,
    bought: float = 40.0,
) -> BookDays:
    """The same book at every snapshot of one day, the same trades in between."""
    shape = (1, n_ticks, len(bids))
    sides = [np.array(s)[:, k] * np.ones(shape) for s in (bids, asks) for k in (0, 1)]
    flows = [np.full((1, n_ticks), f) for f in (bought, sold)]
    dates = np.array(["2020-01-06"], dtype="datetime64[us]")
    return BookDays(("SYM",), dates, 570.0 + np.arange(n_ticks), *sides, *flows, tick_size=0.01)


def one(kind: int = WAIT, size: float = 0.0, offset: float = 0.0) -> BookActions:
    return BookActions(np.array([kind]), np.array([size]), np.array([offset]))


def worked(
    book: BookDays,
    amount: float,
    *actions: BookActions,
    buying: bool = True,
    rules: BookRules = BookRules(),  # noqa: B008 (a tuple)
) -> BookSimulator:
    orders = parent_orders(0, amount, buying, 0, book.shape[1])
    simulator = BookSimulator(book, orders, rules)
    for action in actions:
        simulator.step(action)
    return simulator


def test_market_order_walks_the_levels_and_takes_no_more_than_they_hold() -> None:
    simulator = worked(book_of(), 1000.0, one(MARKET, 120.0))
    assert simulator.steps.executed[0, 0] == 120.0
    assert simulator.steps.value[0, 0] == pytest.approx(50 * 10.01 + 70 * 10.02)
    simulator.step(one(MARKET, 900.0))  # only 600 are displayed; the rest is not kept
    assert simulator.steps.executed[0, 1] == 600.0
    assert simulator.progress.left[0] == pytest.approx(280.0)
    assert simulator.resting.size[0] == 0.0
    selling = worked(book_of(), 1000.0, one(MARKET, 150.0), buying=False)
    assert selling.steps.value[0, 0] == pytest.approx(100 * 9.99 + 50 * 9.98)


def test_limit_order_at_the_best_quote_waits_until_the_size_ahead_has_traded() -> None:
    # 100 ahead; 60 sold a tick: 40 ahead, then 20 filled, then 60.
    simulator = worked(book_of(), 100.0, one(LIMIT, 100.0), one(), one())
    assert simulator.steps.executed[0, :3].tolist() == [0.0, 20.0, 60.0]
    assert simulator.steps.value[0, 1] == pytest.approx(20 * 9.99)
    assert simulator.resting.size[0] == pytest.approx(20.0)
    assert simulator.resting.price[0] == pytest.approx(9.99)
    history = History.from_simulator(simulator)
    assert history.ticks is not None
    assert history.ticks.price[0, 1] == pytest.approx(9.99)
    simulator.step(one())
    assert simulator.over
    measured = measure_orders(History.from_simulator(simulator))
    assert measured["ffr"][0] == pytest.approx(1.0)
    # Bought at 9.99 where the middle was 10 and takers paid 10.01.
    assert measured["gain_arrival"][0] == pytest.approx(10.0)
    assert measured["gain_twap"][0] == pytest.approx(20.0)


def test_volume_that_equals_the_size_ahead_fills_nothing() -> None:
    simulator = worked(book_of(sold=100.0), 10.0, one(LIMIT, 10.0))
    assert simulator.steps.executed[0, 0] == 0.0
    assert simulator.resting.ahead[0] == 0.0
    simulator.step(one())
    assert simulator.steps.executed[0, 1] == 10.0


def test_limit_order_behind_the_best_quote_has_all_better_levels_ahead() -> None:
    simulator = worked(book_of(), 50.0, one(LIMIT, 50.0, 1.0))
    assert simulator.resting.price[0] == pytest.approx(9.98)
    assert simulator.resting.ahead[0] == 300.0 - 60.0
    # Never the best quote, so what is sold is sold to others.
    for _ in range(4):
        simulator.step(one())
    assert simulator.steps.executed[0, :5].tolist() == [0.0] * 5
    book = book_of(12)
    eager = worked(book, 50.0, one(LIMIT, 50.0, 1.0), *[one()] * 5, rules=BookRules(touch=False))
    # Without that rule 360 sold in six ticks are 60 more than the 300 ahead.
    assert eager.steps.executed[0, :6].tolist() == [0.0] * 5 + [50.0]


def test_limit_order_inside_the_spread_has_nothing_ahead() -> None:
    simulator = worked(book_of(), 100.0, one(LIMIT, 100.0, -1.0))
    assert simulator.resting.price[0] == pytest.approx(10.0)
    assert simulator.steps.executed[0, 0] == 60.0
    assert simulator.steps.value[0, 0] == pytest.approx(600.0)


def test_limit_order_that_crosses_takes_up_to_its_price_and_rests() -> None:
    simulator = worked(book_of(sold=0.0), 300.0, one(LIMIT, 300.0, -3.0))
    # Best bid 9.99 + 3 ticks = 10.02: 50 at 10.01 and 150 at 10.02, the other 100 rest there.
    assert simulator.steps.executed[0, 0] == 200.0
    assert simulator.steps.value[0, 0] == pytest.approx(50 * 10.01 + 150 * 10.02)
    assert simulator.resting.size[0] == pytest.approx(100.0)
    assert simulator.resting.price[0] == pytest.approx(10.02)


def test_offsets_in_basis_points_are_rounded_to_ticks() -> None:
    rules = BookRules(unit="bp")
    simulator = worked(book_of(), 10.0, one(LIMIT, 10.0, 13.0), rules=rules)
    assert simulator.resting.price[0] == pytest.approx(9.98)  # 13 bp of 9.99 are 1.3 ticks


def test_cancel_and_replace_lose_the_place_in_the_queue() -> None:
    simulator = worked(book_of(), 100.0, one(LIMIT, 100.0), one(CANCEL), one(), one(LIMIT, 100.0))
    assert simulator.steps.executed[0, :4].tolist() == [0.0] * 4
    assert simulator.resting.ahead[0] == pytest.approx(40.0)
    simulator.step(one(LIMIT, 100.0))
    assert simulator.resting.ahead[0] == pytest.approx(40.0)


def test_market_order_leaves_no_more_resting_than_is_left() -> None:
    simulator = worked(book_of(sold=0.0), 100.0, one(LIMIT, 100.0), one(MARKET, 30.0))
    assert simulator.resting.size[0] == pytest.approx(70.0)
    assert simulator.progress.left[0] == pytest.approx(70.0)


def test_remainder_crosses_at_the_last_tick_as_far_as_the_book_goes() -> None:
    simulator = worked(book_of(3, sold=0.0), 1000.0, one(LIMIT, 1000.0), one(), one(WAIT))
    assert simulator.over
    assert simulator.steps.executed[0].tolist() == [0.0, 0.0, 600.0]
    assert simulator.steps.value[0, 2] == pytest.approx(50 * 10.01 + 150 * 10.02 + 400 * 10.03)
    assert simulator.resting.size[0] == 0.0
    history = History.from_simulator(simulator)
    assert history.left[0] == 400.0
    assert measure_orders(history, ["ffr"])["ffr"][0] == pytest.approx(0.6)


def test_steps_of_several_ticks_act_once_and_rest_in_between() -> None:
    rules = BookRules(ticks_per_step=3)
    simulator = worked(book_of(6), 500.0, one(LIMIT, 500.0), rules=rules)
    assert simulator.steps.executed[0, 0] == 80.0  # 180 sold, 100 of them to those ahead
    simulator.step(one(MARKET, 50.0))
    # 50 taken, 60 in each of two ticks, and at the last what is left.
    assert simulator.steps.executed[0, 1] == pytest.approx(420.0)
    assert simulator.over
    assert History.from_simulator(simulator).tick_frame(0)["executed"].to_list() == pytest.approx(
        [0.0, 20.0, 60.0, 110.0, 60.0, 250.0]
    )


def test_empty_book_fills_nothing_and_takes_no_limit_order() -> None:
    book = book_of(3)
    for array in (book.bid_price, book.ask_price):
        array[:] = np.nan
    for array in (book.bid_size, book.ask_size, book.bought, book.sold):
        array[:] = 0.0
    simulator = worked(book, 10.0, one(LIMIT, 10.0), one(MARKET, 10.0), one())
    assert History.from_simulator(simulator).executed[0] == 0.0
    assert measure_orders(History.from_simulator(simulator))["ffr"][0] == 0.0


@pytest.mark.parametrize(
    "action",
    [one(7), one(MARKET, -1.0), one(MARKET, np.nan), one(LIMIT, 1.0, np.inf)],
)
def test_actions_that_are_none_are_refused_by_order(action: BookActions) -> None:
    with pytest.raises(UsageError, match="order 0: action kind"):
        worked(book_of(), 10.0, action)


def test_orders_and_rules_that_cannot_be_are_refused() -> None:
    with pytest.raises(DataError, match="start = 6 must be inside"):
        BookSimulator(book_of(), parent_orders(0, 1.0, True, 6, 7), BookRules())
    with pytest.raises(DataError, match="amount = -1"):
        BookSimulator(book_of(), parent_orders(0, -1.0, True, 0, 6), BookRules())
    with pytest.raises(ConfigError, match="ticks_per_step is at least 1"):
        BookSimulator(book_of(), parent_orders(0, 1.0, True, 0, 6), BookRules(0))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"asks": ((9.98, 1.0), (10.0, 1.0), (10.1, 1.0))}, "best bid must be below the best ask"),
        ({"bids": ((9.9, 1.0), (9.95, 1.0), (9.8, 1.0))}, "from the best outwards"),
        ({"bids": ((9.9, -1.0), (9.8, 1.0), (9.7, 1.0))}, "sizes must be numbers"),
        ({"sold": -1.0}, "traded volumes must be"),
        ({"bids": ((9.9, 1.0), (9.8, 1.0), (-1.0, 1.0))}, "prices must be positive"),
    ],
)
def test_books_that_cannot_be_are_refused_with_the_snapshot(change: dict, told: str) -> None:
    with pytest.raises(DataError, match=rf"SYM on 2020-01-06, snapshot 0: .*{told}"):
        book_of(**change)


def random_book(rng: np.random.Generator, n_days: int, n_ticks: int, n_levels: int) -> BookDays:
    shape = (n_days, n_ticks)
    bid = 1000 + rng.integers(-2, 3, shape).cumsum(axis=1)
    steps = rng.integers(1, 3, (2, *shape, n_levels))
    bids = bid[..., None] - steps[0].cumsum(axis=2)
    asks = bid[..., None] + steps[1].cumsum(axis=2) - 1
    sizes = np.floor(rng.exponential(50, (2, *shape, n_levels)))
    prices = np.stack([bids, asks]) / 100.0
    gone = rng.random(shape) < 0.05
    prices[:, gone] = np.nan
    sizes[:, gone] = 0.0
    flows = np.floor(rng.exponential(60, (2, *shape)))
    dates = np.datetime64("2020-01-06", "us") + np.arange(n_days) * np.timedelta64(1, "D")
    return BookDays(
        *(("SYM",) * n_days, dates, np.arange(float(n_ticks))),
        *(np.ascontiguousarray(a) for a in (prices[0], sizes[0], prices[1], sizes[1])),
        *(np.ascontiguousarray(a) for a in flows),
        tick_size=0.01,
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_batch_equals_the_plain_twin_on_random_books_and_actions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_days, n_ticks, n_orders = 2, int(rng.integers(2, 25)), 6
    book = random_book(rng, n_days, n_ticks, int(rng.integers(1, 5)))
    rules = BookRules(
        int(rng.integers(1, 6)),
        "bp" if rng.random() < 0.3 else "ticks",
        bool(rng.random() < 0.5),
    )
    start = rng.integers(0, n_ticks, n_orders)
    end = start + 1 + np.floor(rng.random(n_orders) * (n_ticks - start)).astype(int)
    orders = parent_orders(
        *(rng.integers(0, n_days, n_orders), np.floor(rng.uniform(1, 400, n_orders))),
        *(rng.random(n_orders) < 0.5, start, end),
    )
    simulator = BookSimulator(book, orders, rules)
    plain = [
        PlainBookOrder(book, rules, *(v.item() for v in one)) for one in zip(*orders, strict=True)
    ]
    while not simulator.over:
        kinds = rng.choice([WAIT, MARKET, LIMIT, CANCEL], n_orders, p=[0.35, 0.15, 0.4, 0.1])
        sizes = np.floor(rng.uniform(0, 200, n_orders))
        offsets = rng.integers(-4, 4, n_orders).astype(float)
        simulator.step(BookActions(kinds, sizes, offsets))
        for e, order in enumerate(plain):
            order.step(int(kinds[e]), float(sizes[e]), float(offsets[e]))
            assert simulator.progress.left[e] == pytest.approx(order.left, abs=1e-9)
            resting = order.rest.size if order.rest is not None and not order.done else 0.0
            assert simulator.resting.size[e] == pytest.approx(resting, abs=1e-9)
    history = History.from_simulator(simulator)
    for e, order in enumerate(plain):
        assert order.done
        money = sum(shares * price for _, shares, price in order.fills)
        assert history.value[e] == pytest.approx(money, rel=1e-12)
        assert history.executed[e] + history.progress.left[e] == pytest.approx(orders.amount[e])
        assert history.ticks is not None
        for tick in range(n_ticks):
            shares = sum(s for t, s, _ in order.fills if t == tick)
            assert history.ticks.executed[e, tick] == pytest.approx(shares, abs=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 11))
def test_scrambling_the_books_future_changes_no_fill_before_it(seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    book, noise = (random_book(rng, 1, 12, 3) for _ in range(2))
    later = np.arange(12) >= cut
    fields = ("bid_price", "bid_size", "ask_price", "ask_size", "bought", "sold")
    mixed = {
        name: np.where(
            later if getattr(book, name).ndim == 2 else later[:, None],
            getattr(noise, name),
            getattr(book, name),
        )
        for name in fields
    }
    other = BookDays(("SYM",), book.dates, book.clock, **mixed, tick_size=0.01)
    actions = [
        one(int(rng.integers(4)), float(rng.integers(1, 80)), float(rng.integers(-2, 3)))
        for _ in range(12)
    ]
    fills = []
    for world in (book, other):
        simulator = worked(world, 500.0, *actions)
        ticks = History.from_simulator(simulator).ticks
        assert ticks is not None
        # A tick is over with the snapshot after it, which says whether it was at the touch.
        fills.append(ticks.executed[0, : cut - 1])
    np.testing.assert_array_equal(*fills)


def test_quotes_of_a_tick_are_those_of_the_snapshot_that_ends_it() -> None:
    book = book_of(3)
    book.bid_size[0, 2] = 0.0
    quotes = book.quotes()
    assert quotes.bid_depth[0].tolist() == [600.0, 0.0]
    found = public_features(book.to_days(), quotes=quotes)
    imbalance = found.today[0, :, found.names.index("imbalance")]
    assert imbalance.tolist() == [0.0, -1.0]
    spread = found.today[0, :, found.names.index("spread")]
    np.testing.assert_allclose(spread, 0.002, rtol=1e-6)


def test_the_last_snapshot_is_no_tick_so_that_twap_can_fill_all(tmp_path: Path) -> None:
    book_frame().write_parquet(tmp_path / "book.parquet")
    book = read_book(tmp_path / "book.parquet", "BTC")
    days = book.to_days()
    assert days.shape == (1, 2)
    np.testing.assert_allclose(days.volume[0], [3.0, 3.0])
    assert book.to_days(last=True).volume[0].tolist() == [*days.volume[0], 0.0]
    orders = parent_orders([0, 0], 2.0, [True, False], 0, 2)
    history = run_orders(Twap(), days, orders, ExecutionRules(1))
    assert measure_orders(history, ["ffr"])["ffr"].tolist() == [1.0, 1.0]
    with pytest.raises(DataError, match="one snapshot a day"):
        book_of(1).to_days()


def test_synthetic_market_has_books_with_trades_in_between() -> None:
    config = SyntheticConfig(n_symbols=2, n_days=5, minutes_per_day=390, index_size=1)
    source = SyntheticSource(config, seed=5, freq="1min")
    sessions = [day.astype("datetime64[D]").item() for day in source.market.clock.sessions[:2]]
    symbol = source.market.symbols[0]
    book = synthetic_book_days(source, [symbol], sessions)
    assert book.shape == (2, 390, 5)
    shown = source.order_book(symbol, sessions[1])
    np.testing.assert_array_equal(book.ask_price[1], shown.ask_price)
    bars = pl.concat([raw.frame for raw in source.frames()]).filter(
        pl.col("symbol") == symbol, pl.col("time").dt.date() == sessions[1]
    )
    volume = bars["volume"].to_numpy()
    np.testing.assert_allclose((book.bought + book.sold)[1, :-1], volume[1:])
    assert book.bought[1, -1] == 0.0
    simulator = BookSimulator(
        book, parent_orders([0, 1], 2000.0, [True, False], 0, 390), BookRules(30)
    )
    while not simulator.over:
        simulator.step(BookActions(np.full(2, LIMIT), np.full(2, 500.0), np.zeros(2)))
    assert measure_orders(History.from_simulator(simulator), ["ffr"])[
        "ffr"
    ].tolist() == pytest.approx([1, 1])
    with pytest.raises(DataError, match="is no session of this market"):
        synthetic_book_days(source, [symbol], [date(1999, 1, 1)])


def book_frame() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "ts": pl.Series(["2021-04-17 23:59", "2021-04-18 00:00", "2021-04-18 00:01"])
            .str.to_datetime()
            .dt.replace_time_zone("UTC"),
            "midpoint": [100.0, 101.0, 100.0],
            "spread": [0.02, 0.02, 0.02],
            "buys": [1.0, 202.0, 300.0],
            "sells": [1.0, 101.0, 0.0],
            "bids_distance_0": [-0.0001] * 3,
            "bids_distance_1": [-0.0002] * 3,
            "asks_distance_0": [0.0001] * 3,
            "asks_distance_1": [0.0002] * 3,
            **{
                f"{s}_notional_{k}": [999.9 * (k + 1)] * 3 for s in ("bids", "asks") for k in (0, 1)
            },
        }
    )


def test_book_file_becomes_prices_and_shares(tmp_path: Path) -> None:
    book_frame().write_parquet(tmp_path / "book.parquet")
    book = read_book(tmp_path / "book.parquet", "BTC")
    assert book.shape == (1, 3, 2)
    assert book.clock.tolist() == [1439.0, 1440.0, 1441.0]
    np.testing.assert_allclose(book.bid_price[0, 0], [99.99, 99.98])
    np.testing.assert_allclose(book.bid_size[0, 0, 0], 10.0)
    np.testing.assert_allclose(book.bought[0], [2.0, 3.0, 0.0])  # until the next snapshot
    np.testing.assert_allclose(book.sold[0], [1.0, 0.0, 0.0])


def test_bad_book_files_are_told_by_row_and_field(tmp_path: Path) -> None:
    path = tmp_path / "book.parquet"
    frame = book_frame()
    frame.with_columns(
        ts=pl.Series([frame["ts"][k] for k in (0, 0, 2)]),
        buys=pl.Series([1.0, -1.0, None]),
        bids_distance_1=pl.Series([-0.0002, -0.0002, -0.00005]),
        asks_notional_0=pl.Series([1.0, float("nan"), 1.0]),
    ).write_parquet(path)
    with pytest.raises(InvalidDataError) as caught:
        read_book(path, "BTC")
    assert [(p.row, p.field) for p in caught.value.problems] == [
        (1, "ts"),
        (1, "buys"),
        (1, "asks_notional"),
        (2, "buys"),
        (2, "bids_distance"),
    ]
    frame.drop("spread", "asks_notional_1").write_parquet(path)
    with pytest.raises(InvalidDataError) as caught:
        read_book(path, "BTC")
    assert [p.field for p in caught.value.problems] == ["spread", "asks_notional_1"]


def test_real_book_is_read_and_traded(shared_data: Path) -> None:
    path = shared_data / "crypto_lob15_btc_20210417.parquet"
    if not path.is_file():
        pytest.skip(f"no real order book: {path.name} is not in ../shared/data")
    book = read_book(path, "BTC")
    assert book.shape == (1, 600, 15)
    assert np.median(book.ask_price[0, :, 0] - book.bid_price[0, :, 0]) == pytest.approx(
        0.01, abs=1e-4
    )
    orders = parent_orders(0, 0.5, [True, False], 0, 600)
    passive, taker = (BookSimulator(book, orders, BookRules(20)) for _ in range(2))
    while not passive.over:
        passive.step(BookActions(np.full(2, LIMIT), np.full(2, 0.05), np.zeros(2)))
    while not taker.over:
        taker.step(BookActions(np.full(2, MARKET), np.full(2, 0.5 / 30), np.zeros(2)))
    for simulator in (passive, taker):
        assert measure_orders(History.from_simulator(simulator))["ffr"].tolist() == pytest.approx(
            [1.0, 1.0]
        )
    # A buyer and a seller in equal slices: the price moves one's way and the other's, and together
    # they lose the spread of a cent and the walk through levels.
    together = measure_orders(History.from_simulator(taker))["gain_arrival"].sum()
    assert -2.0 < together < 0.0
