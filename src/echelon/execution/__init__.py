"""Order execution: parent orders worked into the market of a day, many at once.

What users' own files and examples import; everything else is imported from its module.
"""

from echelon.execution.days import Days
from echelon.execution.features import Extensions, Past, execution_feature, load_extensions
from echelon.execution.history import METRICS, History, measure_orders, metric
from echelon.execution.orders import ParentOrders, parent_orders
from echelon.execution.portfolio import IntradayExecutor
from echelon.execution.rewards import PAPenalty, Ratio, Risk, Shortfall, Weighted
from echelon.execution.simulator import ExecutionRules, OrderProgress, Simulator

__all__ = [
    "METRICS",
    "Days",
    "ExecutionRules",
    "Extensions",
    "History",
    "IntradayExecutor",
    "OrderProgress",
    "PAPenalty",
    "ParentOrders",
    "Past",
    "Ratio",
    "Risk",
    "Shortfall",
    "Simulator",
    "Weighted",
    "execution_feature",
    "load_extensions",
    "measure_orders",
    "metric",
    "parent_orders",
]
