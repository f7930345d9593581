"""Work orders on an order book: cross the spread, or wait at the best quote.

    python examples/execution_book.py                    a synthetic market
    python examples/execution_book.py book.parquet       a recording of your own

Buy and sell orders of one size begin at even distances through the day. Both policies work the
same ones; printed is what share of them was filled, what share before the order's last snapshot (at
which what is left crosses the book), and the gain over the middle of the book as the order arrived,
in basis points: a taker loses half the spread, one who waits may earn it, or chase the price.

The columns of a recording are those of `echelon.execution.book_days`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from echelon.config import SyntheticConfig
from echelon.data.sources.synthetic import SyntheticSource
from echelon.execution import ParentOrders, measure_orders, parent_orders
from echelon.execution.book_days import BookDays, read_book, synthetic_book_days
from echelon.execution.book_simulator import BookRules, LimitAtTouch, MarketTwap, run_book_orders


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Work the orders with both policies, print what became of them, and return it."""
    parser = argparse.ArgumentParser(description="market and limit orders on an order book")
    parser.add_argument("book", type=Path, nargs="?", help="recording; default: synthetic")
    parser.add_argument("--minutes", type=int, default=60, help="snapshots that an order has")
    parser.add_argument("--step", type=int, default=5, help="snapshots from action to action")
    parser.add_argument("--share", type=float, default=0.01, help="of the volume of such a stretch")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic market")
    given = parser.parse_args(arguments)

    book = synthetic(given.seed) if given.book is None else read_book(given.book, given.book.stem)
    orders = orders_of(book, given.minutes, given.share)
    results = {}
    console = Console()
    console.print(f"{len(orders)} orders on {book.shape[0]} day(s) of {book.symbols[0]}")
    for policy in (MarketTwap(), LimitAtTouch()):
        history = run_book_orders(policy, book, orders, BookRules(given.step))
        assert history.ticks is not None
        measured = measure_orders(history, ["ffr", "gain_arrival"])
        at_the_end = history.ticks.executed[np.arange(len(orders)), orders.end - 1]
        result = {
            "filled": float(measured["ffr"].mean()),
            "before_the_end": float((measured["ffr"] - at_the_end / orders.amount).mean()),
            "gain_arrival": float(measured["gain_arrival"].mean()),
        }
        results[policy.name] = result
        console.print(
            f"  {policy.name:<15} filled {result['filled']:.1%} ({result['before_the_end']:.1%} "
            f"before the end), gain over the arrival mid {result['gain_arrival']:+.2f} bp",
            soft_wrap=True,
        )
    return results


def synthetic(seed: int) -> BookDays:
    """Twenty days of one symbol, a snapshot a minute."""
    config = SyntheticConfig(n_symbols=1, n_days=20, minutes_per_day=390, index_size=1)
    source = SyntheticSource(config, seed=seed, freq="1min")
    sessions = [day.astype("datetime64[D]").item() for day in source.market.clock.sessions]
    return synthetic_book_days(source, source.market.symbols, sessions)


def orders_of(book: BookDays, minutes: int, share: float) -> ParentOrders:
    """A buy and a sell from every `minutes`-th snapshot to the next such one.

    Sizes are a share of the mean volume of such a stretch, over all days: fine for a demonstration;
    whoever trains on orders sizes them by days before (`execution.orders`).
    """
    n_days, n_ticks, _ = book.shape
    start = np.arange(0, n_ticks - minutes, minutes)
    amount = share * minutes * float((book.bought + book.sold).mean())
    day, begin, buying = (
        grid.ravel() for grid in np.meshgrid(np.arange(n_days), start, [True, False])
    )
    return parent_orders(day, amount, buying, begin, begin + minutes)


if __name__ == "__main__":
    main()
