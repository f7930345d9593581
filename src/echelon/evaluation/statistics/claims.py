"""When a result may be called an edge: the one rule that reports and the proving ground apply.

A claim is made only if all three hold:

1. the lower 97.5 % bound of the agents' Sharpe ratio over the baseline's lies above 0, with the
   block length that fits the data;
2. the same with twice that block length, lest the claim hang on how long days are thought to
   depend on each other;
3. the deflated Sharpe ratio is above 0.95: the search that found the result does not explain it.
"""

from __future__ import annotations

from typing import NamedTuple

from echelon.evaluation.statistics._arrays import as_columns, matrix, same_length
from echelon.evaluation.statistics.bootstrap import (
    SharpeDifference,
    block_length,
    sharpe_difference,
)
from echelon.ops.blocks import MIN_BLOCK_PERIODS
from echelon.types import Floats

DEFLATED_ABOVE = 0.95
"""A claim needs a deflated Sharpe ratio above this."""


class Claim(NamedTuple):
    """The difference at the fitting block length and at twice it, and whether a claim is made."""

    single: SharpeDifference
    double: SharpeDifference
    deflated: float
    made: bool


def judge(
    agents: Floats, baseline: Floats, deflated: float, *, seed: int, replications: int = 2000
) -> Claim:
    """Judge agents[T, S] against baseline[T] or [T, R], given their deflated Sharpe ratio.

    What is not a number supports no claim: neither a `deflated` of NaN (a book that never moved)
    nor such a bound.
    """
    x = matrix(agents, "agents", MIN_BLOCK_PERIODS)
    y = as_columns(baseline, "baseline", MIN_BLOCK_PERIODS)
    same_length(x, "agents", y, "baseline")
    if deflated < 0.0 or deflated > 1.0:
        raise ValueError(f"deflated must be a probability or NaN; it is {deflated}")
    block = block_length(x.mean(axis=1) - y.mean(axis=1))
    single = sharpe_difference(x, y, seed=seed, replications=replications, block=block)
    longer = min(2.0 * block, float(len(y)))
    double = sharpe_difference(x, y, seed=seed, replications=replications, block=longer)
    made = single.low > 0.0 and double.low > 0.0 and deflated > DEFLATED_ABOVE
    return Claim(single, double, deflated, made)
