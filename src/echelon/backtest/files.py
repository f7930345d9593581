"""Backtests on disk: tables anyone can open, and everything a report needs.

NAME.equity.parquet, .csv    time, value, return, drawdown, cash_share, traded, commission,
                             stamp, slippage, orders_cut
NAME.weights.parquet         time, a column per asset: its share of the book
NAME.actions.parquet         time, a column per asset: what was decided
NAME.blotter.parquet, .csv   every order that was filled or cut
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from echelon.backtest.run import Backtest
from echelon.errors import DamagedError
from echelon.files import ColumnKind, read_table, write_atomic, write_csv

_AGAIN = "Run `echelon evaluate` again."
_COLUMNS: Mapping[str, Mapping[str, ColumnKind]] = {
    "equity": {
        "time": "time",
        **dict.fromkeys(("value", "return", "drawdown", "cash_share", "traded"), "number"),
        **dict.fromkeys(("commission", "stamp", "slippage", "orders_cut"), "number"),
    },
    "weights": {"time": "time"},
    "actions": {"time": "time"},
    "blotter": {"time": "time", "symbol": "text"},
}
"""What the tables have at least."""


class Tables(NamedTuple):
    """A saved backtest, as read again."""

    equity: pl.DataFrame
    weights: pl.DataFrame
    actions: pl.DataFrame
    blotter: pl.DataFrame


def tables_of(backtest: Backtest) -> Tables:
    """The tables of a backtest. A step's costs stand beside the value after it."""
    fills = backtest.fills
    cut = (fills.reason != 0).sum(axis=1)
    equity = backtest.equity().with_columns(
        traded=_after(backtest.traded),
        commission=_after(fills.commission.sum(axis=1)),
        stamp=_after(fills.stamp.sum(axis=1)),
        slippage=_after(fills.slippage.sum(axis=1)),
        orders_cut=_after(cut.astype(np.float64)).cast(pl.Int64),
    )
    weights = _by_asset(backtest, backtest.weights, backtest.times)
    actions = _by_asset(backtest, backtest.actions, backtest.times[:-1])
    return Tables(equity, weights, actions, backtest.blotter())


def save_backtest(backtest: Backtest, directory: Path, name: str) -> None:
    """Write the tables of a backtest below `directory`."""
    tables = tables_of(backtest)
    for kind, frame in tables._asdict().items():
        buffer = io.BytesIO()
        frame.write_parquet(buffer, compression="zstd")
        write_atomic(directory / f"{name}.{kind}.parquet", buffer.getvalue())
        if kind in ("equity", "blotter"):
            write_csv(directory / f"{name}.{kind}.csv", frame)


def load_tables(directory: Path, name: str) -> Tables:
    """Read the tables of the backtest `name` again."""
    return Tables(*(_read(directory / f"{name}.{kind}.parquet", kind) for kind in Tables._fields))


def _read(path: Path, kind: str) -> pl.DataFrame:
    frame = read_table(path, _COLUMNS[kind], _AGAIN)
    if kind in ("weights", "actions"):
        odd = [c for c, dtype in frame.schema.items() if c != "time" and not dtype.is_numeric()]
        if odd:
            raise DamagedError(path, f"column {odd[0]!r} holds no numbers", _AGAIN)
    return frame


def _after(values: np.ndarray) -> pl.Series:
    """[S] values of the steps, beside the S + 1 values of the book: 0 at the first."""
    return pl.Series(np.concatenate([[0.0], values]))


def _by_asset(backtest: Backtest, values: np.ndarray, times: np.ndarray) -> pl.DataFrame:
    columns = {symbol: values[:, n] for n, symbol in enumerate(backtest.symbols)}
    return pl.DataFrame({"time": times, **columns})
