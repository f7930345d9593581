"""A look at a window of a run: the world it opens, and its entry in the registry of the runs.

Train and validation are open; a look at the test window is written down before it is opened (see
runs.registry). What came of it is added afterwards: the mean return of the seeds, which is one
trial, however many seeds there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from echelon.backtest.run import Backtest, stack_returns
from echelon.config import refuse_places
from echelon.config.load import REGISTRY
from echelon.envs.world import World, world_of
from echelon.ops.measures import sharpe_annual
from echelon.runs.registry import Entry, TestRead, TrialRegistry, Window, new_entry, window_of
from echelon.training.executors import with_executor
from echelon.training.run import TrainedRun, training_hash

SplitName = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Look:
    """At one window of a run. read: of the test window only"""

    run: TrainedRun
    split: SplitName
    registry: TrialRegistry
    window: Window
    read: TestRead | None

    @staticmethod
    def at(run: TrainedRun, split: SplitName) -> Look:
        """Begin a look; at the test window it is written down here."""
        look = Look.back(run, split)
        if split != "test":
            return look
        return replace(look, read=look.registry.begin_read(look.entry(), resumed=True))

    @staticmethod
    def back(run: TrainedRun, split: SplitName) -> Look:
        """Go back to looks of before, which counts as none: the test window stays sealed."""
        refuse_places(run.config, run.path, keys=(REGISTRY,))
        registry = TrialRegistry.for_run(run.path, run.config.logging.registry)
        days = run.prepared.splits[split]
        window = window_of(run.prepared.manifest["dataset"], days.first, days.last)
        return Look(run, split, registry, window, None)

    def entry(self) -> Entry:
        """What the registry keeps of it."""
        train = self.run.config.train
        # How long a training goes on is chosen by its validation too, and not in its hash.
        identity = f"{training_hash(self.run.config)}-{train.total_env_steps}-{train.patience}"
        return new_entry(self.window, self.run.path, identity, len(self.run.seeds))

    def world(self, costs: float) -> World:
        """The run's world, the test window inside where this is a look at it."""
        world = world_of(self.run.prepared, self.run.config, costs=costs, read=self.read)
        return with_executor(world, self.run.config, costs=costs)

    def note(self, agents: Mapping[int, Backtest]) -> None:
        """Write down what the agents came to: a trial on validation, or the end of a read."""
        # The seeds have equal shares of the money; a ruined book earns nothing from then on.
        times = max((backtest.times[1:] for backtest in agents.values()), key=len)
        returns = stack_returns(backtest.returns for backtest in agents.values()).mean(axis=1)
        ratio = sharpe_annual(returns, 1.0)  # per period
        sharpe = ratio if np.isfinite(ratio) else 0.0  # a book that never moves found nothing
        if self.read is not None:
            self.registry.end_read(self.read, times, returns, sharpe)
        elif self.split == "valid":
            self.registry.add_trial(self.entry(), times, returns, sharpe)

    def rivals(self) -> list[Entry]:
        """Whose best this one may be, itself included: trials on this window, or looks at it.

        To choose on the days of a test window is to look at them: a configuration whose validation
        window shares some counts with the looks, where it is not among them already.
        """
        trials = self.registry.trials(self.window)
        if self.split != "test":
            return trials
        looks = self.registry.reads(self.window)
        counted = {entry.config_hash for entry in looks}
        return [*looks, *(trial for trial in trials if trial.config_hash not in counted)]
