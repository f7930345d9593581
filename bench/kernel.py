"""The kernel with the full `us` rules, books × bars per second, against FinRL's StockTradingEnv.

    python -m bench kernel
    python -m bench.kernel --rounds 5

30 assets, 500 days, the same closes, one core each. A step of ours is settle, trade at the next
open and mark for E books at once: commission and its minimum, square-root impact, participation
cap, least order value, suspensions and dividends, no shorting and no negative cash. A step of
FinRL's is its environment's: sells and buys at the close with a proportional fee, and a state
vector. Orders are alike and made before the clock starts: up to 100 shares of each asset, bought or
sold at random. FinRL is taken as its tutorials set it up, for training (no turbulence threshold,
which is faster and what the ratios are taken of) and for trading (threshold 70).

FinRL 0.3.7 does not import whole: its wheel is unpacked, not installed, and the one module
`finrl/meta/env_stock_trading/env_stocktrading.py` is loaded from it in an environment that has what
that module imports (`bench/_peers.py` says where and how, `bench/_finrl.py` is what runs in it).

Both run in turn, several rounds. What counts is the processor time of the best episode of each
side, so that a busy machine favours neither. A second table gives the cost per book, asset and
step for growing E, N and T.

Fails under 300× at E=64 or 1,000× at E=1,024, or where the cost per book, asset and step of the
largest E, N or T is over twice that of the smallest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import _peers
from echelon.config import load_config
from echelon.market import (
    MarketRows,
    Orders,
    PriceHistory,
    Rules,
    market_rows,
    new_book,
    resolve_rules,
    step,
)
from echelon.types import Floats

ASSETS, DAYS, SEED = 30, 500, 7
FIRST_ROW = 20
"""Trailing volumes are known from here."""
GOALS = {64: 300.0, 1024: 1000.0}
GROWTH = 2.0
FINRL = "finrl==0.3.7"
MODULE = "finrl/meta/env_stock_trading/env_stocktrading.py"
NEEDS = ("numpy", "pandas", "gymnasium", "matplotlib", "stable-baselines3")


def walk(days: int, assets: int) -> Floats:
    """Closes [T,N] that wander between about 20 and 120."""
    rng = np.random.default_rng(SEED)
    level, out = np.zeros(assets), np.empty((days, assets))
    for t in range(days):
        level = 0.995 * level + 0.015 * rng.standard_t(4, assets)
        out[t] = level
    return 50 * np.exp(out)


def market_of(close: Floats) -> MarketRows:
    """A market of these closes with opens, volumes, quarterly dividends and suspensions."""
    rng = np.random.default_rng(SEED + 1)
    days, assets = close.shape
    paid = np.arange(days)[:, None] % 63 == np.arange(assets) % 63
    history = PriceHistory(
        times=np.datetime64("2010-01-04", "us") + np.arange(days) * np.timedelta64(1, "D"),
        symbols=tuple(f"T{n:02d}" for n in range(assets)),
        price_basis="split_adjusted",
        close=close,
        tradable=rng.random(close.shape) > 0.005,
        delisted=np.zeros(close.shape, dtype=bool),
        open=close * np.exp(rng.normal(0, 0.004, close.shape)),
        volume=rng.lognormal(14, 1, close.shape),
        factor=np.cumprod(np.where(paid, 1.005, 1.0), axis=0),
    )
    return market_rows(history, lots=False, stamp_duty=False)


def rules_of() -> Rules:
    config = load_config(None, ["market.preset=us"])
    return resolve_rules(config, calendar=None).rules


def whims(n_books: int, n_assets: int) -> list[Orders]:
    """A few batches of orders, used in turn."""
    rng = np.random.default_rng(SEED + 2)
    shape = (n_books, n_assets)
    nothing = np.zeros(shape)
    return [Orders(np.trunc(rng.uniform(-1, 1, shape) * 100), nothing) for _ in range(8)]


class Ours:
    """E books that run through a market, again and again."""

    def __init__(self, market: MarketRows, n_books: int) -> None:
        self.market, self.rules = market, rules_of()
        self.orders = whims(n_books, market.close.shape[1])
        self.n_books = n_books
        self.episode(FIRST_ROW + 10)

    def best(self, budget: float = 1.0) -> float:
        """Seconds per step in the best of at least three episodes, more while time is left."""
        runs: list[float] = []
        began = time.monotonic()
        while len(runs) < 3 or time.monotonic() - began < budget:
            runs.append(self.episode())
        return min(runs)

    def episode(self, stop: int | None = None) -> float:
        """Seconds per step of E books from a million each, up to the row `stop`."""
        last = (stop or len(self.market.close)) - 1
        book = new_book(1e6, self.n_books, self.market.close.shape[1])
        rows = np.arange(len(self.market.close))[:, None] + np.zeros(self.n_books, dtype=np.int64)
        began = time.process_time()
        for t in range(FIRST_ROW, last):
            orders = self.orders[t % len(self.orders)]
            book, fills, value = step(
                book, orders, self.market, rows[t], self.rules, fill_open=True
            )
        seconds = time.process_time() - began
        traded = np.count_nonzero(fills.shares)
        assert traded > fills.shares.size / 4, "the books hardly traded"
        assert (book.cash >= 0).all()
        assert (value > 0).all()
        return seconds / (last - FIRST_ROW)


def finrl_rates(python: Path, module: Path, closes: Path) -> dict[str, float]:
    """Best steps/s of FinRL's environment: as for training, and as for trading."""
    command = [str(python), str(Path(__file__).with_name("_finrl.py")), str(module), str(closes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"FinRL's environment did not run:\n{done.stderr.strip()}")
    rates = json.loads(done.stdout.splitlines()[-1])
    return {name: max(of_episodes) for name, of_episodes in rates.items()}


def compare(rounds: int) -> bool:
    """Print steps/s of both and their ratios; whether the goals are met."""
    python = _peers.environment("finrl", NEEDS)
    module = _peers.unpacked("FinRL", FINRL) / MODULE
    close = walk(DAYS, ASSETS)
    market = market_of(close)
    contestants = {n_books: Ours(market, n_books) for n_books in (1, *GOALS)}
    best = dict.fromkeys(contestants, np.inf)
    theirs = {"none": 0.0, "70": 0.0}
    with tempfile.TemporaryDirectory() as scratch:
        closes = Path(scratch) / "closes.npy"
        np.save(closes, close)
        for _ in range(rounds):
            for name, rate in finrl_rates(python, module, closes).items():
                theirs[name] = max(theirs[name], rate)
            for n_books, ours in contestants.items():
                best[n_books] = min(best[n_books], ours.best())
    base = theirs["none"]
    print(f"{ASSETS} assets, {DAYS} days, one core, best of {rounds} rounds")
    print(f"{'':<34}{'steps/s':>12}{'ratio':>9}{'goal':>7}")
    print(f"{'FinRL, as for training':<34}{base:>12,.0f}{1:>9.0f}×")
    print(
        f"{'FinRL, turbulence threshold 70':<34}{theirs['70']:>12,.0f}{theirs['70'] / base:>9.1f}×"
    )
    good = True
    for n_books, seconds in best.items():
        rate = n_books / seconds
        goal = GOALS.get(n_books, 0.0)
        good &= rate / base >= goal
        wanted = f"{goal:>6,.0f}×" if goal else ""
        print(f"{f'ours, us rules, E={n_books:,}':<34}{rate:>12,.0f}{rate / base:>9,.0f}×{wanted}")
    return good


def growth() -> bool:
    """Print ns per book, asset and step as E, N and T grow; whether cost is linear in each."""
    sizes = {
        "E": [(n_books, ASSETS, DAYS) for n_books in (64, 256, 1024, 4096)],
        "N": [(256, assets, DAYS) for assets in (10, 30, 100, 300)],
        "T": [(64, ASSETS, days) for days in (250, 1000, 4000, 16000)],
    }
    print("\nns per book, asset and step")
    good = True
    for axis, cases in sizes.items():
        cost = []
        for n_books, assets, days in cases:
            ours = Ours(market_of(walk(days, assets)), n_books)
            seconds = ours.best()
            cost.append(seconds / n_books / assets * 1e9)
            print(
                f"  {axis}: E={n_books:<5} N={assets:<4} T={days:<6}{cost[-1]:>8.1f}"
                f"{seconds * days:>10.3f} s in all"
            )
        good &= cost[-1] <= GROWTH * cost[0]
    return good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    # `python -m bench kernel` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if args.rounds < 1:
        parser.error("at least 1 round")
    fast, linear = compare(args.rounds), growth()
    goals = " and ".join(f"{goal:,.0f}× at E={n_books:,}" for n_books, goal in GOALS.items())
    print(f"goal: at least {goals}: {'met' if fast else 'MISSED'}")
    print(
        f"goal: the largest costs at most {GROWTH:g}× the smallest: {'met' if linear else 'MISSED'}"
    )
    return 0 if fast and linear else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
