"""The canonical bar frame: what every source hands over and what the store keeps.

One row is one bar of one symbol. Times are naive and local to the exchange: midnight of the
session for daily bars, the *end* of the bar for intraday ones, so that a bar's time is when it
became known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

PRICES = ("open", "high", "low", "close")

SCHEMA: Mapping[str, pl.DataType] = {
    "time": pl.Datetime("us"),
    "symbol": pl.String(),
    "open": pl.Float64(),
    "high": pl.Float64(),
    "low": pl.Float64(),
    "close": pl.Float64(),
    "volume": pl.Float64(),  # shares, on the same basis as the prices
    "amount": pl.Float64(),  # traded value in money; null: close × volume stands in
    "factor": pl.Float64(),  # close × factor is the total-return price, at any anchor
    "pre_close": pl.Float64(),  # the exchange's reference price of the day (ex-right)
    "st": pl.Boolean(),  # A-share special treatment on that day; null: not
}
"""Columns and types of a bar frame. Only time, symbol and close are always filled."""


class ValueRange(NamedTuple):
    """The smallest and the largest value, besides zero where that is allowed, that can be meant."""

    low: float
    high: float

    def excludes(self, values: pl.Expr) -> pl.Expr:
        """Which positive, finite values lie outside; what is neither has rules of its own."""
        beyond = (values < self.low) | (values > self.high)
        return beyond & (values > 0) & values.is_finite()


BOUNDS: Mapping[str, ValueRange] = {
    **dict.fromkeys((*PRICES, "pre_close", "factor"), ValueRange(1e-12, 1e12)),
    "volume": ValueRange(1e-12, 1e18),
    "amount": ValueRange(1e-12, 1e24),
}
"""Field → what it can be, wider than any market: price × volume, and price × factor anchored
anywhere, stay within what single precision holds (1e-38 to 3e38), so nothing overflows later."""

MAX_SYMBOL = 64  # characters of the longest symbol; an option's has 21
ODD_IN_SYMBOL = (
    r"[\p{C}\p{Zl}\p{Zp}[\p{Zs}--[ ]]"
    r"\x{34F}\x{115F}\x{1160}\x{180B}-\x{180F}\x{2800}\x{3164}\x{FE00}-\x{FE0F}\x{FFA0}\x{FFFD}]"
)
"""Characters that no symbol has: control, invisible or blank ones, such as turn the direction of
writing, and the one that stands for what could not be decoded."""

MAX_PROBLEMS = 10_000
"""Problems of rows that are spelled out for one piece of a source; the rest are counted."""

OPTIONAL = tuple(c for c in SCHEMA if c not in ("time", "symbol", "close"))


@dataclass(frozen=True, slots=True)
class RawFrame:
    frame: pl.DataFrame  # columns of `SCHEMA`, null where there is nothing, and `row` (Int64)
    origin: str  # in which `row` counts as a user would


def conform(frame: pl.DataFrame) -> pl.DataFrame:
    """Give `frame` exactly the canonical columns and types, null where absent; keeps `row`."""
    columns = [
        (pl.col(name).cast(dtype) if name in frame.columns else pl.lit(None, dtype=dtype)).alias(
            name
        )
        for name, dtype in SCHEMA.items()
    ]
    if "row" in frame.columns:
        columns.append(pl.col("row").cast(pl.Int64))
    return frame.select(columns)
