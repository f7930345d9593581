"""Everything the page of a walk-forward shows, read and checked before anything is drawn.

The stitched test windows are made into a split like that of a run, so that the same charts and
tables show them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.backtest.files import AGENT, Tables
from echelon.config import Config
from echelon.errors import StoreError
from echelon.evaluation.evaluate import Evaluation, load_evaluation
from echelon.evaluation.folds import Fold
from echelon.evaluation.reference_policies import EXPERTS_MEAN
from echelon.evaluation.walkforward import STITCHED, WalkForward
from echelon.files import read_table
from echelon.ops.measures import LABELS
from echelon.population.reference_policies import HEDGE
from echelon.report.run.gather import Record, SplitData, in_order
from echelon.types import Floats, Times

_STATISTICS = ("sharpe_annual", "differences", "deflation", "looks", "costs", "verdict")
_SEED = "seed-"
COMPANIONS = (HEDGE, EXPERTS_MEAN)
"""Rows over the experts of a hierarchy, see evaluation.companions."""


@dataclass(frozen=True)
class WalkData:
    """A walk-forward, as its page needs it.

    path: as the user wrote it, for commands
    table: walk_forward.parquet, a line per fold and agent or baseline
    stitched: the test windows as one split; None: a fold failed or is missing
    statistics: of the stitched series, with its `bars`, `periods_per_year` and `split`
    facts: provenance of the first fold that was evaluated; None: none was
    """

    path: Path
    config: Config
    config_text: str
    folds: tuple[Fold, ...]
    table: pl.DataFrame
    stitched: SplitData | None
    statistics: Mapping[str, Any]
    facts: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def baselines(self) -> list[str]:
        """Baselines that any fold has, in the order of a report."""
        known = self.table["who"].unique(maintain_order=True)
        others = (AGENT, *COMPANIONS)
        return in_order([w for w in known if w not in others and not w.startswith(_SEED)])

    @property
    def companions(self) -> list[str]:
        """Rows over a hierarchy's experts that the folds have; none of another agent."""
        known = set(self.table["who"])
        return [who for who in COMPANIONS if who in known]

    @property
    def seeds(self) -> int:
        """Most seeds that a fold has."""
        return int(self.table["seeds"].max() or 0)  # type: ignore[arg-type]

    def values(self, fold: str, who: str) -> Mapping[str, float] | None:
        """Measures of an agent (with `_std`) or baseline in a fold; None where it has none."""
        rows = self.table.filter((pl.col("fold") == fold) & (pl.col("who") == who))
        if rows.is_empty() or (who == AGENT and not rows["seeds"][0]):
            return None
        (row,) = rows.to_dicts()
        names = [name + ending for name in LABELS for ending in ("", "_std")]
        return {name: math.nan if row[name] is None else float(row[name]) for name in names}

    def problem(self, fold: str) -> str:
        """What went wrong with a fold; empty if nothing did."""
        rows = self.table.filter(pl.col("fold") == fold)["problem"]
        return str(rows[0]) if len(rows) else ""


def gather_walk(directory: Path) -> WalkData:
    """Read a walk-forward that came to an end, be it that some of its folds failed."""
    walk = WalkForward.open(directory)
    resume = f"Go on with `echelon {WalkForward.command} --resume {directory}`."
    table = _read(directory / f"{WalkForward.stem}.parquet", resume)
    wanted = ("fold", "who", "seeds", "problem", *(n + e for n in LABELS for e in ("", "_std")))
    _require(directory / f"{WalkForward.stem}.parquet", table, wanted, resume)
    stitched, statistics = None, {}
    with WalkForward.reading(directory) as tree:
        if STITCHED in tree:
            about = tree[STITCHED]
            returns = _read(directory / f"{STITCHED}.parquet", resume)
            _require(directory / f"{STITCHED}.parquet", returns, about["measures"], resume)
            stitched = _split(directory, walk, about, returns)
            statistics = {name: tree["statistics"][name] for name in _STATISTICS}
            statistics["companions"] = tree["statistics"].get("companions", {})
            rate = about["periods_per_year"]
            statistics |= {"bars": about["periods"], "periods_per_year": rate, "split": "test"}
    text = (directory / "base.yaml").read_text(encoding="utf-8")
    base = walk.base
    return WalkData(directory, base, text, walk.folds, table, stitched, statistics, _facts(walk))


def _facts(walk: WalkForward) -> Mapping[str, Any] | None:
    """Provenance of the first fold with an evaluation."""
    for k in range(len(walk.folds)):
        run = walk.run(k)
        if (run / "evaluations" / WalkForward.split / "summary.json").is_file():
            return load_evaluation(run, WalkForward.split).facts
    return None


def _read(path: Path, resume: str) -> pl.DataFrame:
    if not path.is_file():
        raise StoreError(f"{path}: no such file, so the walk-forward has not ended. {resume}")
    return read_table(path, {}, resume)


def _require(path: Path, table: pl.DataFrame, columns: Iterable[str], resume: str) -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise StoreError(f"{path}: has no column {missing[0]!r}. {resume}")


def _split(
    directory: Path, walk: WalkForward, about: Mapping[str, Any], returns: pl.DataFrame
) -> SplitData:
    """The stitched series as a split: growth of 1 from the first day of the first test window."""
    begin = np.datetime64(walk.folds[0].test[0], "us")
    times = np.concatenate([[begin], returns["time"].to_numpy().astype("datetime64[us]")])
    records = {}
    for key, values in about["measures"].items():
        measures = {name: math.nan if values[name] is None else values[name] for name in LABELS}
        seed = int(key.removeprefix(_SEED)) if key.startswith(_SEED) else None
        records[key] = Record(key, seed, measures, _tables(times, returns[key].to_numpy()))
    agents = tuple(r for r in records.values() if r.seed is not None)
    baselines = tuple(records[k] for k in in_order([k for k in records if records[k].seed is None]))
    evaluation = Evaluation(
        directory,
        {r.seed: r.measures for r in agents if r.seed is not None},
        {r.key: r.measures for r in baselines},
        about,
    )
    return SplitData(STITCHED, evaluation, agents, baselines)


def _tables(times: Times, returns: Floats) -> Tables:
    """Value and drawdown of a book; it has no single one behind it, so no holdings and orders."""
    value = np.concatenate([[1.0], np.cumprod(1.0 + returns)])
    drawdown = 1.0 - value / np.maximum.accumulate(value)
    equity = pl.DataFrame({"time": times, "value": value, "drawdown": drawdown})
    nothing = equity.clear().select("time")
    return Tables(equity, nothing, nothing, nothing)
