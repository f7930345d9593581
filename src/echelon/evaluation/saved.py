"""What summary.json and trust.json of an evaluation hold, as readers count on it.

Others may have written the files: whatever differs from this is damage (see `files.read_json`).
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from echelon.runs.directory import RunFacts

AGAIN = "Run `echelon evaluate` again."
"""What to do about a damaged one."""

Number = Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)]
"""Finite, and so after it is made one of a year."""
Count = Annotated[int, Field(ge=0, le=2**53)]
Seed = Annotated[str, StringConstraints(pattern=r"^\d{1,18}$")]
"""As a key of JSON."""
MeasureValues = dict[str, Number | None]


class Summary(TypedDict):
    """summary.json."""

    split: str
    first: str
    last: str
    bars: Count
    periods_per_year: Annotated[float, Field(gt=0, le=1e9)]
    ledger: dict[str, str]
    fees: bool
    executor: NotRequired[str]
    deterministic: bool
    reads: Count
    evaluated: str
    run: RunFacts
    best_steps: dict[Seed, int]
    seeds: dict[Seed, MeasureValues]
    baselines: dict[str, MeasureValues]
    companions: NotRequired[dict[Seed, dict[str, MeasureValues]]]


class Reads(TypedDict):
    """Of summary.json, how often the split was evaluated."""

    reads: Count


class MeasureInterval(TypedDict):
    """Of a measure over the seeds."""

    estimate: Number
    low: Number | None
    high: Number | None
    iqm: Number | None
    method: Literal["t", "bootstrap", "none"]


class Block(TypedDict):
    """A difference at one block length."""

    estimate: Number | None
    low: Number | None
    high: Number | None
    block_length: Number
    replications: Count


class BothBlocks(TypedDict):
    """A difference at both."""

    single: Block
    double: Block


class Counted(TypedDict):
    """What the registry counted."""

    trials: Count
    reads: Count
    runs: Count


class SeedIntervals(TypedDict):
    """Of all measures shown."""

    n: Count
    measures: dict[str, MeasureInterval | None]


class Deflated(TypedDict):
    """See `statistics.sharpe.Deflation`."""

    psr: Number | None
    probability: Number | None
    hurdle: Number
    n_trials: Count
    n_effective: Number
    probability_effective: Number | None


class Overfitted(TypedDict):
    """See `statistics.overfitting.Overfitting`."""

    probability: Number | None
    null_low: Number | None
    null_high: Number | None
    n_configurations: Count


class Superior(TypedDict):
    """See `statistics.overfitting.Superiority`."""

    p_value: Number | None
    n_models: Count


class CostLine(TypedDict):
    """Agents and yardstick at a multiple of the costs."""

    factor: Number
    sharpe_annual: MeasureInterval | None
    total_return: MeasureInterval | None
    equal_weight_sharpe_annual: Number | None
    equal_weight_total_return: Number | None


class Claimed(TypedDict):
    """What is claimed, and what that rests on."""

    deflated: Number | None
    trials: NotRequired[Count | None]


class Judged(TypedDict):
    """The verdict."""

    key: Literal["better", "undeflated", "worse", "same", "unknown"]
    baseline: Literal["equal_weight"]


class Trust(TypedDict):
    """trust.json."""

    split: Literal["train", "valid", "test"]
    bars: Count
    periods_per_year: Annotated[float, Field(gt=0, le=1e9)]
    registry: Counted
    seeds: SeedIntervals
    differences: dict[str, BothBlocks]
    deflation: Deflated | None
    overfitting: Overfitted | None
    superiority: Superior | None
    costs: list[CostLine]
    claim: Claimed
    verdict: Judged
    companions: NotRequired[dict[str, BothBlocks]]
