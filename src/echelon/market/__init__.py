"""The market kernel: one ledger for training, backtest and live."""

from echelon.market.executor import (
    CostSplit,
    Execution,
    Executor,
    ImmediateExecutor,
    cost_split,
    step_worked,
)
from echelon.market.kernel import new_book, step
from echelon.market.presets import (
    RulesInForce,
    TradedData,
    drawn_market,
    resolve_rules,
    rules_in_force,
)
from echelon.market.rows import (
    PriceHistory,
    RowSettings,
    RowState,
    fixed_rows,
    haircuts,
    lay_rows,
    market_rows,
)
from echelon.market.rules import Rules
from echelon.market.types import Book, Fills, MarketRows, Orders, Reason, Rows

__all__ = [
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
    "RowSettings",
    "RowState",
    "Rows",
    "Rules",
    "RulesInForce",
    "TradedData",
    "cost_split",
    "drawn_market",
    "fixed_rows",
    "haircuts",
    "lay_rows",
    "market_rows",
    "new_book",
    "resolve_rules",
    "rules_in_force",
    "step",
    "step_worked",
]
