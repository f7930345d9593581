"""Policies on a book: worked out by hand, in batches, and the example that compares them."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from test_execution_book import book_of, random_book

from echelon.execution import History, measure_orders, parent_orders
from echelon.execution.book_days import BookDays
from echelon.execution.book_simulator import (
    BookPolicy,
    BookRules,
    LimitAtTouch,
    MarketTwap,
    run_book_orders,
)

EXAMPLE = Path(__file__).parents[1] / "examples" / "execution_book.py"


def bought(policy: BookPolicy, amount: float, per_step: int) -> History:
    """An order over six snapshots of bids 9.99 × 100 …, asks 10.01 × 50, 10.02 × 150, 10.03 × 400.

    60 are sold to the bids in every tick.
    """
    book = book_of(6)
    return run_book_orders(policy, book, parent_orders(0, amount, True, 0, 6), BookRules(per_step))


def test_market_twap_takes_the_same_from_the_asks_in_every_step() -> None:
    history = bought(MarketTwap(), 300.0, 2)
    assert history.steps.executed[0].tolist() == [100.0, 100.0, 100.0]
    # 50 at 10.01 and 50 at 10.02, three times: 10.015 where the middle was 10.
    assert history.value[0] == pytest.approx(3 * (50 * 10.01 + 50 * 10.02))
    assert measure_orders(history)["gain_arrival"][0] == pytest.approx(-15.0)


def test_market_twap_asks_again_for_what_the_book_did_not_hold() -> None:
    # 600 are displayed. 2100 in three steps: 700 asked; then (2100 - 600) / 2 = 750; then 900.
    history = bought(MarketTwap(), 2100.0, 2)
    assert history.steps.requested[0].tolist() == [700.0, 750.0, 900.0]
    # In the last step 600 at once, and at the last snapshot what is left.
    assert history.steps.executed[0].tolist() == [600.0, 600.0, 900.0]


def test_posting_anew_waits_behind_the_queue_in_every_step() -> None:
    history = bought(LimitAtTouch(), 300.0, 2)
    # 100 ahead and 120 sold in a step of two ticks: 20 filled at 9.99. In the last step the second
    # tick is the order's end: 260 cross.
    assert history.steps.executed[0].tolist() == [20.0, 20.0, 260.0]
    crossed = 50 * 10.01 + 150 * 10.02 + 60 * 10.03
    assert history.value[0] == pytest.approx(40 * 9.99 + crossed)
    gain = measure_orders(history)["gain_arrival"][0]
    assert gain == pytest.approx(-(3004.9 / 300.0 / 10.0 - 1.0) * 1e4)


def test_one_step_keeps_the_place_in_the_queue_and_earns_the_spread() -> None:
    history = bought(LimitAtTouch(), 300.0, 6)
    # 0, 20, then 60 a tick at 9.99; the last 100 cross: 50 at 10.01, 50 at 10.02.
    assert history.ticks is not None
    assert history.ticks.executed[0].tolist() == [0.0, 20.0, 60.0, 60.0, 60.0, 100.0]
    assert measure_orders(history)["gain_arrival"][0] == pytest.approx(10.0 / 6.0)


def test_an_offset_ahead_of_the_quote_fills_sooner() -> None:
    # At 10.00, inside the spread, nothing is ahead: 60 in each of the first five ticks.
    history = bought(LimitAtTouch(offset=-1.0), 310.0, 6)
    assert history.ticks is not None
    assert history.ticks.executed[0].tolist() == [60.0] * 5 + [10.0]


@pytest.mark.parametrize("policy", [MarketTwap(), LimitAtTouch()])
def test_a_batch_of_orders_is_the_orders_one_by_one(policy: BookPolicy) -> None:
    rng = np.random.default_rng(3)
    book: BookDays = random_book(rng, 3, 20, 4)
    start = rng.integers(0, 10, 12)
    orders = parent_orders(
        *(rng.integers(0, 3, 12), rng.uniform(10, 300, 12), rng.random(12) < 0.5),
        *(start, start + rng.integers(1, 11, 12)),
    )
    together = run_book_orders(policy, book, orders, BookRules(3))
    for e in range(12):
        alone = run_book_orders(policy, book, orders.take(slice(e, e + 1)), BookRules(3))
        assert together.value[e] == alone.value[0]
        assert together.left[e] == alone.left[0]


def test_the_example_compares_both_on_a_synthetic_book(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLE))["main"](["--minutes", "120"])
    assert set(found) == {"market_twap", "limit_at_touch"}
    for one in found.values():
        assert one["filled"] == pytest.approx(1.0)
    # Buys and sells at the same moments: the market's moves cancel, and the taker paid the spread.
    assert -10.0 < found["market_twap"]["gain_arrival"] < 0.0
    assert found["limit_at_touch"]["gain_arrival"] != found["market_twap"]["gain_arrival"]
    assert "gain over the arrival mid" in capsys.readouterr().out


def test_the_example_takes_a_recording(shared_data: Path) -> None:
    path = shared_data / "crypto_lob15_btc_20210417.parquet"
    if not path.is_file():
        pytest.skip(f"no real order book: {path.name} is not in ../shared/data")
    found = runpy.run_path(str(EXAMPLE))["main"]([str(path)])
    assert found["market_twap"]["filled"] == pytest.approx(1.0)
