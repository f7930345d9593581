"""What a journal says came out: the book as a backtest has one, what orders cost, what was not
traded and why.

Implementation shortfall of an order, in money (Perold 1988): what a book would have had that fills
everything asked for, free, at the close of the decision, minus what was had.

    market      price at the fill before slippage, against the arrival price
    slippage    as the venue says it, inside the price
    fees        commission and stamp duty
    unfilled    what was asked for and not filled, at the close of the bar that ended the order

Axes: `S` steps, `N` assets; a step is from one decision to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from echelon.backtest.run import Backtest
from echelon.envs.act import Action
from echelon.envs.world import World
from echelon.live.brokers import OPEN
from echelon.live.journal import Journal
from echelon.live.tables import read_table_of
from echelon.market import Fills, Reason
from echelon.types import Floats, Times

SHORTFALL = ("market", "slippage", "fees", "unfilled")
"""Parts of the implementation shortfall."""
TRADED = "traded"
PENDING = "pending"
"""Of an order that may still be filled."""
_NONE_FILLED = "none_filled"
"""Of an order that ended without a fill, and without a reason of the venue."""


class LiveRows(NamedTuple):
    """The bars that were decided on. times[S+1]; rows[S+1]: theirs in `world`"""

    world: World
    times: Times
    rows: np.ndarray[Any, np.dtype[np.intp]]

    @classmethod
    def find(cls, journal: Journal, world: World) -> LiveRows:
        """Those of a journal in the world that its replay made."""
        entries = journal.entries(kinds=("decision",))
        times = np.array([entry.body["time"] for entry in entries], dtype="datetime64[us]")
        return cls(world, times, np.searchsorted(world.times, times).astype(np.intp))

    @property
    def close(self) -> Floats:
        """[S+1,N]."""
        return np.asarray(self.world.rows.close[self.rows])


def live_backtest(journal: Journal, world: World) -> Backtest:
    """What the engine did, in the form of a backtest, so that every chart and measure takes it."""
    at = LiveRows.find(journal, world)
    symbols = world.symbols
    column = {symbol: n for n, symbol in enumerate(symbols)}
    value, cash = np.zeros(len(at.times)), np.zeros(len(at.times))
    shares = np.zeros((len(at.times), len(symbols)))
    decided: list[list[Any]] = []
    kind = "weights"
    for k, entry in enumerate(journal.entries(kinds=("decision",))):
        body = entry.body
        kind, account = body["kind"], body["account"]
        value[k], cash[k] = account["equity"], account["cash"]
        for symbol, held in account["positions"].items():
            shares[k, column[symbol]] = held
        decided.append([_action(kind, body["target"][symbol]) for symbol in symbols])
    worth = np.maximum(value, 1e-12)
    discrete = kind == "discrete"
    actions: Floats | NDArray[np.int8] = np.array(decided[:-1], dtype=np.float64)
    if discrete:
        actions = actions.astype(np.int8)
    return Backtest(
        policy="live",
        kind="discrete" if discrete else "weights",
        symbols=symbols,
        times=at.times,
        value=value,
        weights=(shares * np.nan_to_num(at.close) / worth[:, None]).astype(np.float32),
        cash_share=(cash / worth).astype(np.float32),
        actions=actions,
        fills=_fills(journal, at, column),
        fill_times=at.times[1:],
        periods_per_year=world.periods_per_year,
    )


def _action(kind: str, target: Any) -> float:  # noqa: ANN401 (a name, a weight, or None)
    if kind == "discrete":
        return int(Action[target.upper()])
    return np.nan if target is None else float(target)


def _fills(journal: Journal, at: LiveRows, column: Mapping[str, int]) -> Fills:
    """[S,N] each: the fills of a symbol between two decisions as one, and what was not filled."""
    grids = {name: np.zeros((len(at.times) - 1, len(column))) for name in Fills._fields[:-1]}
    money = np.zeros_like(grids["price"])
    size = np.zeros_like(money)
    fills = read_table_of(journal, "fills").filter(pl.col("after").is_not_null())
    step = np.searchsorted(at.times, fills["after"].to_numpy())
    for k, fill in zip(step.tolist(), fills.iter_rows(named=True), strict=True):
        n = column.get(fill["symbol"])
        if n is None or k >= len(money):  # of a symbol that is not ours, or behind the last bars
            continue
        for name in ("shares", "commission", "stamp", "slippage"):
            grids[name][k, n] += fill[name]
        size[k, n] += abs(fill["shares"])
        money[k, n] += abs(fill["shares"]) * fill["price"]
    grids["price"] = np.divide(money, size, out=np.zeros_like(money), where=size > 0.0)
    reasons = np.zeros(money.shape, dtype=np.int8)
    known = {reason.name.lower(): int(reason) for reason in Reason}
    orders = read_table_of(journal, "orders")
    step = np.searchsorted(at.times, orders["time"].to_numpy())
    for k, symbol, reason in zip(step.tolist(), orders["symbol"], orders["reason"], strict=True):
        if k < len(reasons) and symbol in column:
            reasons[k, column[symbol]] = known.get(reason or "none", 0)
    return Fills(**grids, reason=reasons)


def shortfalls(journal: Journal, world: World) -> pl.DataFrame:
    """A row an order that has ended: see the module's text; `total` is the sum of `SHORTFALL`.

    Besides: time, symbol, side, by, asked (shares), filled, arrival, price (of the fills), value
    (asked, at arrival), reason.
    """
    fills = (
        read_table_of(journal, "fills")
        .with_columns(money=pl.col("shares").abs() * pl.col("price"), filled=pl.col("shares").abs())
        .group_by("order_id")
        .agg(pl.sum("money", "filled", "commission", "stamp", "slippage"))
    )
    signed = pl.when(pl.col("side") == "buy").then(1.0).otherwise(-1.0)
    spent = pl.when(pl.col("spend") > 0).then(pl.col("spend") / pl.col("price"))
    wished = spent.otherwise(pl.col("wanted").abs())
    asked = pl.when(pl.col("shares") > 0).then(pl.col("shares")).otherwise(wished)
    orders = read_table_of(journal, "orders").filter(~pl.col("state").is_in(["intent", *OPEN]))
    orders = orders.with_columns(
        asked=asked, arrival=pl.col("price"), sign=signed, ended=_next_close(orders, journal, world)
    )
    joined = orders.drop("filled", "price").join(
        fills, left_on="id", right_on="order_id", how="left", maintain_order="left"
    )
    joined = joined.with_columns(
        pl.col("money", "filled", "commission", "stamp", "slippage").fill_null(0.0)
    )
    moved = pl.col("sign") * (pl.col("money") - pl.col("filled") * pl.col("arrival"))
    missed = (pl.col("asked") - pl.col("filled")).clip(0.0)
    return joined.with_columns(
        value=pl.col("asked") * pl.col("arrival"),
        price=pl.when(pl.col("filled") > 0).then(pl.col("money") / pl.col("filled")),
        market=moved - pl.col("slippage"),
        fees=pl.col("commission") + pl.col("stamp"),
        unfilled=pl.col("sign") * missed * (pl.col("ended") - pl.col("arrival")).fill_null(0.0),
    ).with_columns(total=pl.sum_horizontal(SHORTFALL))


def _next_close(orders: pl.DataFrame, journal: Journal, world: World) -> pl.Series:
    """Close of each order's symbol at the bar set behind the one it was decided at; else null."""
    at = LiveRows.find(journal, world)
    column = {symbol: n for n, symbol in enumerate(world.symbols)}
    close = at.close
    step = np.searchsorted(at.times, orders["time"].to_numpy()) + 1
    values = [
        float(close[k, column[symbol]]) if k < len(close) and symbol in column else None
        for k, symbol in zip(step.tolist(), orders["symbol"], strict=True)
    ]
    return pl.Series(values, dtype=pl.Float64).fill_nan(None)


def outcomes(journal: Journal) -> pl.DataFrame:
    """Every symbol at every decision: time, symbol, kind, code.

    kind: traded; pending; stopped (code of `limits.STOPPED`); unfilled (what the venue said);
    untraded (code of `serving.decision.WHY`)
    """
    targets = read_table_of(journal, "targets").select("time", "symbol", "why")
    orders = read_table_of(journal, "orders").filter(pl.col("by").is_null())
    state = pl.col("state")
    sent = orders.select(
        "time",
        "symbol",
        kind=pl.when(pl.col("filled") > 0)
        .then(pl.lit(TRADED))
        .when(state.is_in(["intent", *OPEN]))
        .then(pl.lit(PENDING))
        .otherwise(pl.lit("unfilled")),
        code=pl.when((pl.col("filled") == 0) & ~state.is_in(["intent", *OPEN])).then(
            pl.coalesce("reason", pl.lit(_NONE_FILLED))
        ),
    )
    barred = read_table_of(journal, "stopped").select(
        "time", "symbol", kind=pl.lit("stopped"), code="code"
    )
    known = pl.concat([sent, barred]).unique(["time", "symbol"], keep="last", maintain_order=True)
    every = targets.join(known, on=["time", "symbol"], how="left", maintain_order="left")
    untold = pl.col("kind").is_null()
    return every.select(
        "time",
        "symbol",
        kind=pl.when(untold).then(pl.lit("untraded")).otherwise(pl.col("kind")),
        code=pl.when(untold)
        .then(pl.coalesce("why", pl.lit("no_order")))
        .otherwise(pl.coalesce("code", "kind")),
    )
