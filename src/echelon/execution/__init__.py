"""Order execution: parent orders worked into the market of a day, many at once."""

from echelon.execution.days import Days, PriceSource
from echelon.execution.extensions import Extensions, execution_feature, load_extensions
from echelon.execution.features import Past
from echelon.execution.history import History
from echelon.execution.metrics import METRICS, measure_orders, metric
from echelon.execution.orders import ParentOrders, check_orders, parent_orders
from echelon.execution.portfolio import AlignedDays, IntradayExecutor, align_days
from echelon.execution.rewards import (
    PAPenalty,
    Ratio,
    Reward,
    Risk,
    Shortfall,
    Weighted,
    reward_of,
)
from echelon.execution.simulator import (
    Benchmarks,
    ExecutionRules,
    Progress,
    Simulator,
    Steps,
    Ticks,
    steps_of,
)

__all__ = [
    "METRICS",
    "AlignedDays",
    "Benchmarks",
    "Days",
    "ExecutionRules",
    "Extensions",
    "History",
    "IntradayExecutor",
    "PAPenalty",
    "ParentOrders",
    "Past",
    "PriceSource",
    "Progress",
    "Ratio",
    "Reward",
    "Risk",
    "Shortfall",
    "Simulator",
    "Steps",
    "Ticks",
    "Weighted",
    "align_days",
    "check_orders",
    "execution_feature",
    "load_extensions",
    "measure_orders",
    "metric",
    "parent_orders",
    "reward_of",
    "steps_of",
]
