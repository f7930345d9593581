"""Backtests on disk: tables of all policies, which anyone can open, with what a report needs.

Every table has the columns `policy` and `seed`. A policy is the `agent` of a seed, what a
hierarchy's seed brings along (`hedge`, `expert-0`, …), or a baseline, which has no seed.

equity.parquet     time, value, return, drawdown, cash_share, traded, commission, stamp, slippage,
                   orders_cut; where a budget limits the book also exposure_cap (share of the
                   wish that may be held), unscaled (value without), budget_jumped
weights.parquet    time, a column per asset: its share of the book
actions.parquet    kind, time, a column per asset: what was decided, by kind a code of HOLD, BUY and
                   SELL (discrete) or a target weight (weights)
blotter.parquet    every order that was filled or cut

equity.csv and blotter.csv are written where they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from echelon.backtest.run import Backtest
from echelon.errors import DamagedError
from echelon.files import ColumnKind, read_table, write_csv, write_parquet
from echelon.market import Execution

_AGAIN = "Run `echelon evaluate` again."
_BOOK: Mapping[str, ColumnKind] = {"policy": "text", "seed": "number"}
_COLUMNS: Mapping[str, Mapping[str, ColumnKind]] = {
    "equity": {
        **_BOOK,
        "time": "time",
        **dict.fromkeys(("value", "return", "drawdown", "cash_share", "traded"), "number"),
        **dict.fromkeys(("commission", "stamp", "slippage", "orders_cut"), "number"),
    },
    "weights": {**_BOOK, "time": "time"},
    "actions": {**_BOOK, "kind": "text", "time": "time"},
    "blotter": {**_BOOK, "time": "time", "symbol": "text"},
}
"""What the tables have at least."""


AGENT = "agent"  # the policy of a seed's own agent


class Tables(NamedTuple):
    """A backtest as tables; those of a whole evaluation have columns that tell books apart."""

    equity: pl.DataFrame
    weights: pl.DataFrame
    actions: pl.DataFrame
    blotter: pl.DataFrame


def tables_of(backtest: Backtest) -> Tables:
    """The tables of a backtest. A step's costs stand next to the value after it."""
    fills = backtest.fills
    cut = (fills.reason != 0).sum(axis=1)
    equity = backtest.equity().with_columns(
        traded=_after(backtest.traded),
        commission=_after(fills.commission.sum(axis=1)),
        stamp=_after(fills.stamp.sum(axis=1)),
        slippage=_after(fills.slippage.sum(axis=1)),
        orders_cut=_after(cut.astype(np.float64)).cast(pl.Int64),
    )
    if (budget := backtest.budget) is not None:
        equity = equity.with_columns(
            exposure_cap=pl.Series([*budget.cap.tolist(), None], dtype=pl.Float64),
            unscaled=budget.unscaled,
            budget_jumped=_after(budget.jumped.astype(np.float64)),
        )
    weights = _by_asset(backtest, backtest.weights, backtest.times)
    actions = _by_asset(backtest, backtest.actions, backtest.times[:-1])
    return Tables(equity, weights, actions, backtest.blotter())


class Book(NamedTuple):
    """Whose book it is among those of an evaluation; seed: None of a baseline."""

    policy: str
    seed: int | None = None


def save_tables(directory: Path, books: Mapping[Book, Tables], *, csv: bool = False) -> None:
    for kind in Tables._fields:
        for old in directory.glob(f"*.{kind}.*"):
            old.unlink()  # of a version that wrote tables for each book
        labelled = [_label(getattr(tables, kind), kind, book) for book, tables in books.items()]
        frame = pl.concat(labelled, how="diagonal_relaxed")
        write_parquet(directory / f"{kind}.parquet", frame)
        text = directory / f"{kind}.csv"
        if csv and kind in ("equity", "blotter"):
            write_csv(text, frame)
        else:
            text.unlink(missing_ok=True)  # of an earlier evaluation, perhaps


def read_tables(directory: Path) -> Tables:
    return Tables(*(_read(directory / f"{kind}.parquet", kind) for kind in Tables._fields))


def tables_of_book(every: Tables, book: Book, directory: Path) -> Tables:
    """The tables of one of the books in `every`, which were read from `directory`."""
    mine = pl.col("policy") == book.policy
    mine &= pl.col("seed").is_null() if book.seed is None else pl.col("seed") == book.seed
    equity, weights, actions, blotter = (
        frame.filter(mine).drop("policy", "seed") for frame in every
    )
    if equity.is_empty():
        of = book.policy if book.seed is None else f"{book.policy} of seed {book.seed}"
        raise DamagedError(directory / "equity.parquet", f"nothing of {of}", _AGAIN)
    # The benchmark trades an index of its own, without an executor: columns that only others have.
    weights, actions = (
        frame.drop(c for c in frame.columns if 0 < frame.height == frame[c].null_count())
        for frame in (weights, actions)
    )
    _refuse_odd_shapes(equity, weights, actions.drop("kind"), directory)
    executed = [name for name in Execution._fields if name in blotter.columns]
    if all(blotter[name].null_count() == blotter.height for name in executed):
        blotter = blotter.drop(executed)
    if (actions["kind"] == "discrete").all():
        actions = actions.cast(dict.fromkeys(actions.columns[2:], pl.Int8))
    return Tables(equity, weights, actions.drop("kind"), blotter)


def _refuse_odd_shapes(
    equity: pl.DataFrame, weights: pl.DataFrame, actions: pl.DataFrame, directory: Path
) -> None:
    """A book has weights of the same assets as actions: a row a bar, and a decision fewer."""
    if actions.columns != weights.columns:
        strange = sorted(set(actions.columns) ^ set(weights.columns)) or ["their order"]
        what = f"its assets are not those of weights.parquet: {', '.join(strange[:3])}"
        raise DamagedError(directory / "actions.parquet", what, _AGAIN)
    for kind, frame, rows in (
        ("weights", weights, equity.height),
        ("actions", actions, equity.height - 1),
    ):
        if frame.height != rows:
            what = f"{frame.height} rows of a book, expected {rows} by equity.parquet"
            raise DamagedError(directory / f"{kind}.parquet", what, _AGAIN)


def _label(frame: pl.DataFrame, kind: str, book: Book) -> pl.DataFrame:
    labels = {"policy": pl.lit(book.policy), "seed": pl.lit(book.seed, dtype=pl.Int64)}
    if kind == "actions":
        codes = all(dtype.is_integer() for dtype in frame.dtypes[1:])
        labels["kind"] = pl.lit("discrete" if codes else "weights")
    return frame.with_columns(**labels).select(*labels, *frame.columns)


def _read(path: Path, kind: str) -> pl.DataFrame:
    frame = read_table(path, _COLUMNS[kind], _AGAIN)
    if kind in ("weights", "actions"):
        known = _COLUMNS[kind]
        odd = [c for c, dtype in frame.schema.items() if c not in known and not dtype.is_numeric()]
        if odd:
            raise DamagedError(path, f"column {odd[0]!r} holds no numbers", _AGAIN)
    return frame


def _after(values: np.ndarray) -> pl.Series:
    """[S] values of the steps, next to the S + 1 values of the book: 0 at the first."""
    return pl.Series(np.concatenate([[0.0], values]))


def _by_asset(backtest: Backtest, values: np.ndarray, times: np.ndarray) -> pl.DataFrame:
    columns = {symbol: values[:, n] for n, symbol in enumerate(backtest.symbols)}
    return pl.DataFrame({"time": times, **columns})
