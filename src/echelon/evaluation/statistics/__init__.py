"""Statistics that say how far a backtest can be believed: pure functions on arrays.

seeds        intervals over training seeds
sharpe       probabilistic and deflated Sharpe ratio
bootstrap    Sharpe ratio over a baseline's, by a studentised block bootstrap
overfitting  probability of backtest overfitting; superior predictive ability
claims       when a result may be called an edge

Sharpe ratios, variances and standard errors are per period; annualise them only when shown. Axes:
`T` periods, `S` seeds, `K` trials. Wrong shapes, values that are not finite and series that are
too short raise ValueError.
"""

from echelon.evaluation.statistics.bootstrap import (
    SharpeDifference,
    block_length,
    sharpe_difference,
)
from echelon.evaluation.statistics.claims import DEFLATED_ABOVE, Claim, judge
from echelon.evaluation.statistics.overfitting import (
    MIN_CONFIGURATIONS,
    Overfitting,
    Superiority,
    backtest_overfitting,
    overfitting_probability,
    superior_ability,
)
from echelon.evaluation.statistics.seeds import SeedInterval, interquartile_mean, seed_interval
from echelon.evaluation.statistics.sharpe import (
    Deflation,
    ReturnMoments,
    deflate,
    deflate_by_sharpes,
    effective_trials,
    expected_max_sharpe,
    moments,
    probabilistic_sharpe,
)

__all__ = [
    "DEFLATED_ABOVE",
    "MIN_CONFIGURATIONS",
    "Claim",
    "Deflation",
    "Overfitting",
    "ReturnMoments",
    "SeedInterval",
    "SharpeDifference",
    "Superiority",
    "backtest_overfitting",
    "block_length",
    "deflate",
    "deflate_by_sharpes",
    "effective_trials",
    "expected_max_sharpe",
    "interquartile_mean",
    "judge",
    "moments",
    "overfitting_probability",
    "probabilistic_sharpe",
    "seed_interval",
    "sharpe_difference",
    "superior_ability",
]
