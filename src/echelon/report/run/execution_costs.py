"""How a portfolio's orders were worked through the day: the split of their cost, by book.

Read from the blotters, which have these columns where there was an executor: one that worked the
orders, or the immediate one with a dataset of intraday bars to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from echelon.report.blocks import Card, Table
from echelon.report.run.gather import Record, SplitData
from echelon.report.texts import Words

PARTS = ("spread", "impact", "timing", "fees", "total", "against_twap", "against_vwap")
_BASIS_POINTS = 1e4


def execution_card(split: SplitData, words: Words) -> Card | None:
    """A card; None where orders were filled at once and nothing else is known of their day."""
    books = [r for r in split.records if "arrival" in r.tables.blotter.columns]
    costs = {record.key: execution_costs(record.tables.blotter) for record in books}
    shown = [record for record in books if costs[record.key]]
    if not shown:
        return None
    head = [words("worked_book"), *(words(f"worked_{name}") for name in PARTS)]
    rows = [
        [words.name(record.key), *(f"{costs[record.key][name]:+.2f}" for name in PARTS)]
        for record in shown
    ]
    note = words("worked_note") + _filled_at_once(shown, words)
    return Card(words("worked"), note, [Table(head, rows)])


def execution_costs(blotter: pl.DataFrame) -> dict[str, float]:
    """Basis points of the value at arrival; nothing where nothing was filled.

    Against TWAP and VWAP: of the fills that have them, fees left out.
    """
    sign = pl.when(pl.col("side") == "buy").then(1.0).otherwise(-1.0)
    fills = blotter.filter((pl.col("shares") > 0) & pl.col("arrival").is_not_null()).with_columns(
        value=pl.col("shares") * pl.col("arrival"),
        fees=pl.col("commission") + pl.col("stamp"),
        **{
            f"against_{base}": sign * pl.col("shares") * (pl.col("price") - pl.col(base))
            for base in ("twap", "vwap")
        },
    )
    arrived = float(fills["value"].sum())
    if arrived <= 0.0:
        return {}
    costs = {name: float(fills[name].sum()) / arrived for name in PARTS[:4]}
    costs["total"] = sum(costs.values())
    known = fills.filter(
        pl.col("against_twap").is_not_null() & pl.col("against_vwap").is_not_null()
    )
    some = float(known["value"].sum())
    for name in ("against_twap", "against_vwap"):
        costs[name] = float(known[name].sum()) / some if some > 0.0 else 0.0
    return {name: value * _BASIS_POINTS for name, value in costs.items()}


def _filled_at_once(records: Sequence[Record], words: Words) -> str:
    """What to say of fills that no executor worked: all by choice, or some for want of bars."""
    fills = pl.concat([r.tables.blotter.select("shares", "worked", "twap") for r in records])
    fills = fills.filter(pl.col("shares") > 0)
    if fills.is_empty():
        return ""
    unknown = fills["twap"].null_count() / len(fills)
    if not fills["worked"].any() and unknown < 1.0:
        return words("worked_immediate", share=f"{1.0 - unknown:.1%}")
    at_once = int((~fills["worked"]).sum()) / len(fills)
    return words("worked_at_once", share=f"{at_once:.1%}") if at_once else ""
