"""Replay: stored bars through the engine, and the same window through `run_backtest`, side by side.

Both run the same policy of the same bundle. Decisions, fills and equity must agree to the last bit:
a difference is a bug, and is named with its bar.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.run import Backtest, run_backtest
from echelon.data.build import read_bar_sets
from echelon.data.store import Store
from echelon.envs.world import World
from echelon.serving.bundle import Bundle
from echelon.serving.decision import Decision
from echelon.serving.engine import DecisionEngine, bundle_request


class Replay(NamedTuple):
    """What a replay showed; differences: what differed and at which bar, none: all is equal."""

    first: np.datetime64
    last: np.datetime64
    bars: int
    orders: int
    differences: tuple[str, ...]
    seconds: float  # of the pushes alone


def replay(bundle: Bundle, store: Path, world: World, rows: range) -> Replay:
    """Push the stored bars of `rows` of a loaded world, and compare with its backtest.

    rows: at least two; of bars within the day, from the first bar of a session on
    """
    backtest = run_backtest(bundle.policy(), world, rows, bundle.config)
    day_before = world.times[rows.start - 1].astype("datetime64[D]").item()
    engine = DecisionEngine.from_store(bundle, store, until=day_before)
    decisions, took = [], 0.0
    until = world.times[rows.stop - 1]
    request = bundle_request(bundle, until.astype("datetime64[D]").item())
    name, behind = bundle.universe["dataset"]["name"], engine.time.astype("datetime64[us]").item()
    for bars in read_bar_sets(Store(store), name, request, behind):
        if bars.time > until:
            break
        began = time.perf_counter()
        decisions.append(engine.push(bars))
        took += time.perf_counter() - began
        engine.complete()
    differences = tuple(compare_decisions(decisions, backtest))
    n_orders = sum(len(decision.orders) for decision in decisions)
    times = world.times
    return Replay(
        times[rows.start], times[rows.stop - 1], len(decisions), n_orders, differences, took
    )


def session_rows(world: World, rows: range, bars: int) -> range:
    """The last `bars` of `rows`, or some more, so that they begin with a session."""
    first = max(rows.start + 1, rows.stop - bars)
    while first > rows.start + 1 and not world.rows.new_session[first]:
        first -= 1
    return range(first, rows.stop)


def compare_decisions(
    decisions: Sequence[Decision], backtest: Backtest, fills: Mapping[str, Filled] | None = None
) -> Iterator[str]:
    """What differs from a backtest, bar by bar, from its first one on.

    fills: time → what was filled at that bar, where the decisions do not say so themselves
    """
    times, done = backtest.times, backtest.fills
    if [decision.time for decision in decisions] != list(times[: len(decisions)]):
        yield f"bars: {len(decisions)} were pushed, the backtest has {len(times)}"
        return
    for k, decision in enumerate(decisions):
        if decision.equity != backtest.value[k]:
            yield f"{times[k]}: equity {decision.equity!r}, in the backtest {backtest.value[k]!r}"
        if k < len(backtest.actions) and not _same(decision.action, backtest.actions[k]):
            yield f"{times[k]}: another decision than in the backtest"
        if not k:
            continue
        if fills is None:
            filled: Filled = {fill.symbol: (fill.shares, fill.price) for fill in decision.fills}
        else:
            filled = fills[str(decision.time)]
        shares = np.array([filled.get(symbol, _NOTHING) for symbol in decision.symbols])
        expected = np.stack([done.shares[k - 1], done.price[k - 1]], axis=1)
        if not _same(shares, expected):
            yield f"{times[k]}: other fills than in the backtest"


Filled = Mapping[str, tuple[float, float]]
"""Symbol → shares bought (positive) or sold, and their price."""
_NOTHING = (0.0, 0.0)


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
