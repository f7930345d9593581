"""A walk-forward: train, choose and test again and again, each time on later data.

    DIR/base.yaml               the configuration
    DIR/walk_forward.json       the folds, for going on later; at the end also what they came to
    DIR/folds/NAME/             a run directory like any other
    DIR/walk_forward.csv, .parquet    every measure, by fold and stitched, of agents and baselines
                                and, of a hierarchy, of its companions (evaluation.companions)
    DIR/stitched.csv, .parquet  time, fold, and returns of each of them, one after another
    DIR/splits.png              the windows
    DIR/report/report.html      all of it as a page

Each fold is a whole experiment of its own (see evaluation.batch): features, scaler, training and
the choice of a checkpoint know the fold's train and validation windows only. Its assets are those
with a bar between the first day of its train window and the last of its test window, delisted
ones included; who is in the universe on a day (`member`) is what was known on that day.

The folds' test windows are also put together to one series: see evaluation.stitched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.config import Config
from echelon.data.build import PanelRequest, panel_times
from echelon.data.datasets import ensure_dataset
from echelon.data.store import Store
from echelon.evaluation.batch import (
    Batch,
    Course,
    Kind,
    Member,
    evaluation_of,
    reading,
    saved_base,
    write_table,
)
from echelon.evaluation.evaluate import Evaluation
from echelon.evaluation.folds import Bars, Fold, plan_folds
from echelon.evaluation.reference_policies import Measured, by_row, companion_name, over_seeds
from echelon.evaluation.stitched import Stitched, plain, seed_name, statistics, stitch
from echelon.evaluation.trust import load_trust
from echelon.ops.measures import LABELS

KIND = Kind(
    title="a walk-forward",
    command="walk-forward",
    member="fold",
    split="test",
    trust=True,
    results=(
        *("walk_forward.csv", "walk_forward.parquet", "stitched.csv", "stitched.parquet"),
        *("splits.png", "report/report.html", "report/report.zh.html"),
    ),
)
STITCHED = "stitched"
AGENT = "agent"
"""The mean over the seeds, in the tables."""


@dataclass(frozen=True)
class Step:
    """A fold and the symbols that trade in it."""

    fold: Fold
    assets: tuple[str, ...]


def plan_steps(config: Config, *, quarantine: bool = False) -> tuple[Step, ...]:
    """The folds of the configured data, which are imported where they are not there yet."""
    dataset = ensure_dataset(config, quarantine=quarantine)
    store = Store(config.data.store, pin=dataset)
    request = PanelRequest(symbols=config.assets, end=config.data.end)
    times = panel_times(store, dataset.name, request)
    if config.data.start is not None:
        times = times[times >= np.datetime64(config.data.start)]
    facts = store.symbols(dataset.name)
    folds = plan_folds(config.walk_forward, times)
    return tuple(Step(fold, _assets(config, facts, fold)) for fold in folds)


def _assets(config: Config, facts: pl.DataFrame, fold: Fold) -> tuple[str, ...]:
    """Symbols with a bar inside the fold, in the order a run of them all would have.

    Symbols that list later are left out: nobody knew of them, and the random numbers an agent
    draws depend on how many assets there are.
    """
    listed = (pl.col("first").dt.date() <= fold.test[1]) & (
        pl.col("last").dt.date() >= fold.train[0]
    )
    known = facts.filter(listed)["symbol"].to_list()
    return tuple(s for s in config.assets if s in known) if config.assets else tuple(known)


@dataclass(frozen=True)
class WalkForward:
    """Folds and their runs."""

    steps: tuple[Step, ...]
    batch: Batch

    @staticmethod
    def of(directory: Path, base: Config, steps: Sequence[Step]) -> WalkForward:
        """The walk-forward of a configuration through these folds."""
        members = tuple(
            Member(
                step.fold.name,
                base.model_copy(update={"split": step.fold.split, "assets": step.assets}),
                {"fold": step.fold.name},
            )
            for step in steps
        )
        return WalkForward(tuple(steps), Batch(KIND, directory, base, members))

    @staticmethod
    def open(
        directory: Path, *, seeds: int | None = None, trust_code: Sequence[Path] = ()
    ) -> WalkForward:
        """Go on with the one in a directory.

        seeds: another number of them than before; trust_code: files of code that may run
        """
        with reading(KIND, directory) as tree:
            steps = [_read_step(entry) for entry in tree["folds"]]
        return WalkForward.of(directory, saved_base(directory, seeds, trust_code), steps)

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The folds."""
        return tuple(step.fold for step in self.steps)

    def save(self, result: WalkForwardResult | None = None) -> None:
        """Write down what is to be done and, at the end, what came out of it."""
        tree: dict[str, Any] = {"folds": [_step_tree(step) for step in self.steps]}
        if result is not None and result.stitched is not None:
            tree |= {STITCHED: result.stitched.tree(), "statistics": result.statistics}
        self.batch.save(tree)


def _step_tree(step: Step) -> dict[str, Any]:
    fold = step.fold
    spans = {name: [str(d) for d in getattr(fold, name)] for name in ("train", "valid", "test")}
    about = {"name": fold.name, **spans, "bars": fold.bars._asdict(), "partial": fold.partial}
    return about | {"assets": step.assets}


def _read_step(entry: Mapping[str, Any]) -> Step:
    train, valid, test = (
        (date.fromisoformat(entry[name][0]), date.fromisoformat(entry[name][1]))
        for name in ("train", "valid", "test")
    )
    bars = Bars(**entry["bars"])
    fold = Fold(entry["name"], train, valid, test, bars, bool(entry["partial"]))
    return Step(fold, tuple(entry["assets"]))


@dataclass(frozen=True)
class WalkForwardResult:
    """Every fold's evaluation, by name, but of those that failed; stitched only if none did.

    statistics: of the stitched series, see `stitched.statistics`; empty without one
    """

    folds: tuple[Fold, ...]
    evaluations: Mapping[str, Evaluation]
    problems: Mapping[str, str]
    stitched: Stitched | None
    statistics: Mapping[str, Any]

    def frame(self) -> pl.DataFrame:
        """A line per fold and per seed, mean of the seeds (with std) and baseline; then stitched.

        who: `agent` (the mean over seeds), `seed-42`, or a baseline; of a hierarchy then `hedge`
        and `experts` (means over seeds), `seed-42-hedge`, `seed-42-expert-0` and so on
        """
        lines: list[dict[str, object]] = []
        for fold in self.folds:
            about = {
                "fold": fold.name,
                "first": str(fold.test[0]),
                "last": str(fold.test[1]),
                "problem": self.problems.get(fold.name, ""),
            }
            evaluation = self.evaluations.get(fold.name)
            if evaluation is None:
                lines.append(about | {"who": AGENT, "seeds": 0})
                continue
            measures = {seed_name(s): values for s, values in evaluation.seeds.items()}
            lines += _lines(about, measures, evaluation.baselines)
            lines += _beside(about, evaluation.companions)
        if self.stitched is not None:
            tree = self.stitched.tree()
            about = {"fold": STITCHED, "first": tree["first"], "last": tree["last"], "problem": ""}
            measures = dict(self.stitched.measures)
            baselines = {name: measures.pop(name) for name in self.stitched.baselines}
            lines += _lines(about, measures, baselines)
            lines += _beside(about, self.stitched.companion_measures)
        return pl.DataFrame(lines, schema=_SCHEMA)

    def write(self, directory: Path) -> None:
        """Write walk_forward.csv and .parquet, and the stitched returns."""
        write_table(self.frame(), directory / KIND.stem)
        if self.stitched is None:
            return
        write_table(self.stitched.frame(), directory / STITCHED)


_SCHEMA: Mapping[str, Any] = {
    **dict.fromkeys(("fold", "first", "last", "who"), pl.String),
    "seeds": pl.Int64,
    **{name + ending: pl.Float64 for name in LABELS for ending in ("", "_std")},
    "problem": pl.String,
}


def _lines(
    about: Mapping[str, object],
    seeds: Mapping[str, Mapping[str, float]],
    baselines: Mapping[str, Mapping[str, float]],
) -> list[dict[str, object]]:
    """The mean over the seeds with its std, then each seed, then each baseline."""
    mean = _mean_line(about, AGENT, list(seeds.values()))
    return [mean, *_single_lines(about, {**seeds, **baselines})]


def _beside(
    about: Mapping[str, object], companions: Mapping[int, Mapping[str, Measured]]
) -> list[dict[str, object]]:
    """The rows of the companions, means over the seeds with std, then each seed's."""
    means = [_mean_line(about, who, seeds) for who, seeds in by_row(companions).items()]
    every = {
        companion_name(seed, name): values
        for seed, own in companions.items()
        for name, values in own.items()
    }
    return [*means, *_single_lines(about, every)]


def _mean_line(
    about: Mapping[str, object], who: str, seeds: Sequence[Measured]
) -> dict[str, object]:
    mean: dict[str, object] = {**about, "who": who, "seeds": len(seeds)}
    for name in LABELS:
        found = over_seeds(seeds, name)
        mean |= plain({name: found.mean, f"{name}_std": found.std})
    return mean


def _single_lines(
    about: Mapping[str, object], books: Mapping[str, Measured]
) -> list[dict[str, object]]:
    return [{**about, "who": who, "seeds": None, **plain(values)} for who, values in books.items()]


def summarise(walk: WalkForward, course: Course) -> WalkForwardResult:
    """Gather the folds' evaluations, and stitch them where every fold has one of every seed."""
    found, problems = {}, {}
    for k, fold in enumerate(walk.folds):
        evaluation = evaluation_of(walk.batch, course, k)
        if evaluation is not None:
            found[fold.name] = evaluation
        problems[fold.name] = course.problem(k)
    whole = len(found) == len(walk.folds) and not any(problems.values())
    stitched = stitch(found) if whole else None
    sure: Mapping[str, Any] = {}
    if stitched is not None:
        trusts = [load_trust(walk.batch.run(k), KIND.split) for k in range(len(walk.folds))]
        sweeps = [trust["costs"] for trust in trusts if trust is not None]
        looks = max((t["registry"]["reads"] for t in trusts if t is not None), default=1)
        sure = statistics(stitched, walk.batch.base.seed, looks=looks, sweeps=sweeps)
    return WalkForwardResult(walk.folds, found, problems, stitched, sure)
