"""The market kernel: one ledger for training, backtest and live."""

from echelon.market.executor import (
    CostSplit,
    Execution,
    Executor,
    ImmediateExecutor,
    Worked,
    cost_split,
    step_worked,
)
from echelon.market.kernel import mark, new_book, settle, step, trade
from echelon.market.presets import (
    PRESETS,
    RulesInForce,
    TradedData,
    drawn_market,
    resolve_rules,
    rules_in_force,
)
from echelon.market.rows import HAIRCUTS, PriceHistory, market_rows
from echelon.market.rules import Rules
from echelon.market.types import Book, Fills, MarketRows, Orders, Reason, Rows

__all__ = [
    "HAIRCUTS",
    "PRESETS",
    "Book",
    "CostSplit",
    "Execution",
    "Executor",
    "Fills",
    "ImmediateExecutor",
    "MarketRows",
    "Orders",
    "PriceHistory",
    "Reason",
    "Rows",
    "Rules",
    "RulesInForce",
    "TradedData",
    "Worked",
    "cost_split",
    "drawn_market",
    "mark",
    "market_rows",
    "new_book",
    "resolve_rules",
    "rules_in_force",
    "settle",
    "step",
    "step_worked",
    "trade",
]
