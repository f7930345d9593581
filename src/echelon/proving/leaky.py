"""Leaky: a feature that peeks one bar ahead, in a factor file like a user's.

1. The leakage check (`echelon data check --leakage`) must refuse it, by name, and nothing else.
2. Who does not run that command, trains on what the file says. So the same agent is trained with
   the file and without, through the whole line: bars in a store, prepared set, run directory, test
   window. With the file its Sharpe ratio must be absurd: a pipeline that could not show an edge
   this large could show none.

The market is the trend's without the trend: noise. What the agent without the file earns is luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echelon.config import Config
from echelon.config.features import FeaturesConfig, NormalizationConfig, StationaryConfig
from echelon.config.market import MarketConfig
from echelon.data.datasets import ensure_dataset
from echelon.data.store import Store
from echelon.evaluation.evaluate import evaluate
from echelon.features import check_leakage
from echelon.proving.certificate import Bar, Check, MarketResult, seed_check
from echelon.proving.parts import Done, Finding, Part, time_spent
from echelon.proving.pipeline import on_file, train_through, write_bars
from echelon.proving.planted import PlantedMarket
from echelon.proving.worlds import WARMUP, TrainingPart
from echelon.workers import Report, ShouldStop

PEEKING = Path(__file__).with_name("peeking.py")
FACTOR = "tomorrows_return"
ABSURD_BAR = Bar("estimate", "above", 5.0)
GAP_BAR = Bar("estimate", "above", 3.0)
"""Annual Sharpe ratio of the peeking agent, and how far above the honest one's it must be."""
LEAKY_MARKET = PlantedMarket(drift=0.0, n_bars=4000)
_WINDOWS = {"train": (WARMUP + 20, 2500), "valid": (2500, 3250), "test": (3250, 4000)}
"""Rows of the windows, the last one not included."""
_OTHER_FEATURES = StationaryConfig(
    enabled=True, returns=(1, 5), volatility=(), volume_ratio=(), ranks=False
)
"""Features besides the file's: few, as among many that say nothing a brief training misses it."""


@dataclass(frozen=True)
class LeakyCheckPart(Part):
    """Does the leakage check refuse the file?"""

    KEY = "leaky-check"

    config: Config

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        config = leaky_config(self.config, directory, peeks=True)
        dataset = ensure_dataset(config)
        checked = check_leakage(config, Store(config.data.store), dataset)
        first = next((leak for leak in checked.leaks if leak.name == FACTOR), None)
        return {
            "refused": list(checked.names),
            "checked": len(checked.features),
            **{name: getattr(first, name, "") for name in ("where", "detail")},
        }


@dataclass(frozen=True)
class LeakyAgentPart(TrainingPart):
    """One seed's training and test with the file, or without."""

    KEY = "leaky-{0.who}-{0.seed}"

    config: Config
    seed: int
    peeks: bool

    @property
    def who(self) -> str:
        return "peeking" if self.peeks else "honest"

    def run(self, directory: Path, report: Report, should_stop: ShouldStop) -> Finding | None:
        """Prepare, train and evaluate a run directory like any other."""
        config = leaky_config(self.config, directory, peeks=self.peeks, seed=self.seed)
        trained = train_through(config, directory / "run", [self.seed], report, should_stop)
        if trained is None:
            return None
        run, (outcome,) = trained
        tested = evaluate(run, "test", trust=False)
        return {
            "seed": self.seed,
            "peeks": self.peeks,
            "steps": outcome.step,
            "best_step": outcome.best_step,
            "sharpe": tested.seeds[self.seed]["sharpe_annual"],
            "equal_weight": tested.baselines["equal_weight"]["sharpe_annual"],
        }


def leaky_config(config: Config, directory: Path, *, peeks: bool, seed: int = 0) -> Config:
    """The agent on a file of bars, with the file's factor or without, at the fee alone."""
    bars = write_bars(directory / "bars.parquet", LEAKY_MARKET.draw(0, "leaky"), 0)
    features = FeaturesConfig(stationary=_OTHER_FEATURES, modules=(str(PEEKING),) if peeks else ())
    plain = {
        "features": features,
        "normalization": NormalizationConfig(),
        "market": MarketConfig(preset="paper"),
    }
    return on_file(config, directory, bars, _WINDOWS, seed).model_copy(update=plain)


def assess_leaky(parts: Sequence[Done]) -> MarketResult:
    """The refusal, the absurd Sharpe ratio, and its distance to an honest one; the check first."""
    check, *agents = parts
    refused = tuple(check.finding["refused"])
    sharpes = {
        name: [p.finding["sharpe"] for p in agents if p.finding["peeks"] == peeks]
        for name, peeks in (("peeking", True), ("honest", False))
    }
    gap = np.subtract(sharpes["peeking"], sharpes["honest"]).tolist()
    return MarketResult(
        name="leaky",
        checks=(
            Check(
                name="leaky_refused",
                unit="names",
                estimate=float(refused == (FACTOR,)),
                n=check.finding["checked"],
                bars=(Bar("estimate", "at least", 1.0),),
                names=refused,
            ),
            seed_check("leaky_sharpe", "sharpe", sharpes["peeking"], ABSURD_BAR),
            seed_check("leaky_gap", "sharpe", gap, GAP_BAR),
        ),
        **time_spent(parts),
        facts={
            "seeds": sorted({part.finding["seed"] for part in agents}),
            "steps": max(part.finding["steps"] for part in agents),
            "where": check.finding["where"],
            "detail": check.finding["detail"],
            "bars": {name: last - first for name, (first, last) in _WINDOWS.items()},
        },
        rows=sharpes | {"equal_weight": [agents[0].finding["equal_weight"]]},
        notes=("leaky_separate",),
    )
