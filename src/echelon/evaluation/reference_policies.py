"""A hierarchy and what is made of the same experts: numbers of `population.reference_policies`.

Every seed has experts of its own, and so reference policies of its own. Over the seeds they make
three rows to hold the agent to:

    hedge      the fixed-share hedge over the experts
    best       of each seed the expert with the highest Sharpe ratio by itself: chosen in hindsight,
               on the very window it is shown for, so nobody could have traded it
    experts    the mean over a seed's experts, each by itself

Axes: `T` returns, `S` seeds, `K` experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from echelon.backtest.run import stack_returns
from echelon.population.reference_policies import HEDGE, is_expert_key
from echelon.types import Floats

BEST_EXPERT = "best"
EXPERTS_MEAN = "experts"

Measured: TypeAlias = Mapping[str, float]
"""Measures by name."""


class Track(NamedTuple):
    """What is kept of a book. returns: [T], fewer where it was ruined"""

    measures: Measured
    returns: Floats


def by_row(
    reference_policies: Mapping[int, Mapping[str, Measured]], *, best: bool = False
) -> dict[str, list[Measured]]:
    """Row → measures of each seed; empty where no agent has reference policies.

    reference_policies: seed → name → measures; best: with the best expert in hindsight
    """
    every = list(reference_policies.values())
    if not every:
        return {}
    experts = [[own[k] for k in own if is_expert_key(k)] for own in every]
    rows = {HEDGE: [own[HEDGE] for own in every]}
    if best:
        rows[BEST_EXPERT] = [max(own, key=_sharpe) for own in experts]
    rows[EXPERTS_MEAN] = [
        {name: float(np.mean([values[name] for values in own])) for name in own[0]}
        for own in experts
    ]
    return rows


def reference_returns(
    reference_policies: Mapping[int, Mapping[str, Track]], length: int
) -> dict[str, Floats]:
    """{hedge: [T,S], experts: [T,S·K]} returns of `length` bars; a ruined book earns nothing more.

    reference_policies: by seed and name
    """
    every = list(reference_policies.values())
    if not every:
        return {}
    experts = [own[k].returns for own in every for k in own if is_expert_key(k)]
    chosen = {HEDGE: [own[HEDGE].returns for own in every], EXPERTS_MEAN: experts}
    return {row: stack_returns(series, length) for row, series in chosen.items()}


def _sharpe(values: Measured) -> float:
    """For ranking: who has none comes last."""
    sharpe = values["sharpe_annual"]
    return -math.inf if math.isnan(sharpe) else sharpe
