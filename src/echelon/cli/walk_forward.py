"""`echelon walk-forward`: train, choose and test again and again, each time on later data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.batch import (
    batch_directory,
    claimed,
    raise_failures,
    refuse_beside_resume,
    run_batch,
)
from echelon.cli.console import add_row, err, numbers, out, set_up_logging
from echelon.cli.evaluate import COLUMNS, ROWS, Column, beside_lines
from echelon.cli.options import (
    ConfigFile,
    Level,
    LogLevel,
    OutputDir,
    Overrides,
    Quarantine,
    TrustCode,
    configured,
)
from echelon.cli.train import Seeds, Workers, default_workers

if TYPE_CHECKING:
    from echelon.evaluation.folds import Fold
    from echelon.evaluation.walkforward import Step, WalkForward, WalkForwardResult

ResumeWalk = Annotated[
    Path | None, typer.Option("--resume", help="Go on with the walk-forward in this directory.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Run anew where the directory holds a walk-forward.")
]
PlanOnly = Annotated[
    bool, typer.Option("--plan-only", help="Show the folds and stop; nothing is trained.")
]

_COLUMNS = {
    **COLUMNS,
    "annual_return": Column("return\n% a year", True, 1),
    "calmar": Column("Calmar", False, 2),
}
_MEASURES = ("total_return", "sharpe_annual", "max_drawdown", "turnover_annual")
_BESIDE = ("equal_weight", "benchmark")
"""Baselines whose Sharpe ratio stands beside each fold's."""


def walk_forward(
    config: ConfigFile = None,
    override: Overrides = None,
    output_dir: OutputDir = None,
    seeds: Seeds = None,
    workers: Workers = None,
    resume: ResumeWalk = None,
    trust_code: TrustCode = None,
    overwrite: Overwrite = False,
    plan_only: PlanOnly = False,
    quarantine: Quarantine = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Train and test fold by fold through the data, and put the test windows together.

    The section `walk_forward` of the configuration says which windows; by default a test year at
    a time from 2008 to 2025, as far as the data reach. Each fold has its own features, scaler,
    agents and checkpoints, made from its train and validation windows. Ctrl-C stops in order, and
    `--resume` goes on.
    """
    from echelon.evaluation.batch import with_seeds
    from echelon.evaluation.walkforward import WalkForward, plan_steps

    if resume is not None:
        refuse_beside_resume("walk-forward", config, override, output_dir, overwrite)
        set_up_logging(log_level.value)
        walk = WalkForward.open(resume, seeds=seeds, trust_code=trust_code or ())
    else:
        base = configured(config, override, log_level, None, trust_code)
        if seeds is not None:
            base = with_seeds(base, seeds)
        directory = batch_directory(config, output_dir, base, "walk-forward")
        walk = WalkForward.of(directory, base, plan_steps(base, quarantine=quarantine))
    if plan_only:
        print_plan(walk.steps)
        return
    with claimed(walk, resumed=resume is not None, overwrite=overwrite):
        run_walk(walk, workers or default_workers(walk.batch.base), quarantine)


def run_walk(walk: WalkForward, workers: int, quarantine: bool) -> None:
    """Prepare, train, test, print, write and draw; raises at the end where a fold failed."""
    from echelon.evaluation.walkforward import summarise
    from echelon.report.charts.walkforward import draw_splits
    from echelon.report.walkforward import write_walk_forward_report

    batch, directory = walk.batch, walk.batch.directory
    picture = directory / "splits.png"
    draw_splits(directory.name, walk.folds, batch.base.walk_forward, picture)
    course = run_batch(batch, workers, quarantine)
    with err.status("putting the test windows together"):
        result = summarise(walk, course)
        result.write(directory)
        walk.save(result)
        page = write_walk_forward_report(directory)
    print_result(result)
    typer.echo(f"picture: {picture}")
    typer.echo(f"table: {directory / 'walk_forward.csv'}")
    typer.echo(f"report: {page}")
    raise_failures(batch, course)


def print_plan(steps: Sequence[Step]) -> None:
    """A line per fold: its windows, their bars, and how many symbols trade in it."""
    table = numbers(f"{len(steps)} folds", "fold", "train", "valid", "test", "bars", "symbols")
    for fold, assets in ((step.fold, step.assets) for step in steps):
        spans = (f"{first}\n{last}" for first, last in (fold.train, fold.valid, fold.test))
        name = f"{fold.name}\npartial" if fold.partial else fold.name
        bars = "\n".join((f"{fold.bars.train:,} +", f"{fold.bars.valid:,} + {fold.bars.test:,}"))
        add_row(table, name, *spans, bars, f"{len(assets):,}")
    out.print(table)


def print_result(result: WalkForwardResult) -> None:
    """Mean over seeds of each fold beside two baselines, then everybody's stitched measures."""
    seeds = max((len(e.seeds) for e in result.evaluations.values()), default=0)
    if not seeds:
        return
    beside = [
        name for name in _BESIDE if any(name in e.baselines for e in result.evaluations.values())
    ]
    shown = [_COLUMNS[m].heading for m in _MEASURES]
    headings = [*shown, "± std", *(f"{name.split('_')[0]}\nSharpe" for name in beside)]
    title = f"test windows by fold, mean over {seeds} seed{'s' if seeds > 1 else ''}"
    table = numbers(title, "fold", *headings)
    for fold in result.folds:
        add_row(table, fold.name, *_fold_cells(result, fold, beside, len(headings)))
    out.print(table)
    if result.stitched is not None:
        _print_stitched(result)


def _fold_cells(
    result: WalkForwardResult, fold: Fold, beside: Sequence[str], width: int
) -> list[str]:
    evaluation = result.evaluations.get(fold.name)
    if evaluation is None:
        return ["failed", *("–",) * (width - 1)]
    sharpe = _COLUMNS["sharpe_annual"]
    cells = [_COLUMNS[m].format(evaluation.over_seeds(m).mean) for m in _MEASURES]
    cells.append(sharpe.format(evaluation.over_seeds("sharpe_annual").std))
    for name in beside:
        values = evaluation.baselines.get(name)
        cells.append("–" if values is None else sharpe.format(values["sharpe_annual"]))
    return cells


def _print_stitched(result: WalkForwardResult) -> None:
    from echelon.evaluation.reference_policies import by_row, over_seeds

    stitched = result.stitched
    assert stitched is not None
    about = stitched.tree()
    shown = ("annual_return", "sharpe_annual", "calmar", "max_drawdown", "turnover_annual")
    title = f"stitched: {about['first']} to {about['last']}, {about['periods']:,} returns"
    table = numbers(title, "", *(_COLUMNS[m].heading for m in shown))
    found = {m: stitched.over_seeds(m) for m in shown}
    several = len(stitched.seeds) > 1
    means = [_COLUMNS[m].format(found[m].mean) for m in shown]
    add_row(table, "agent, mean" if several else "agent", *means)
    if several:
        stds = [_COLUMNS[m].format(found[m].std) for m in shown]
        add_row(table, f"± std of {len(stitched.seeds)}", *stds)
    for row, seeds in by_row(stitched.companion_measures).items():
        beside = {m: over_seeds(seeds, m) for m in shown}
        add_row(table, ROWS[row], *(_COLUMNS[m].format(beside[m].mean) for m in shown))
        if several:
            add_row(table, "± std", *(_COLUMNS[m].format(beside[m].std) for m in shown))
    for name in stitched.baselines:
        add_row(table, name, *_cells(stitched.measures[name], shown))
    out.print(table)
    for line in _how_sure(result.statistics, math.sqrt(stitched.periods_per_year)):
        typer.echo(line)


def _how_sure(statistics: Mapping[str, Any], annual: float) -> Iterator[str]:
    """The stitched Sharpe ratio over seeds, and its distance to the baselines, in words."""
    number = _COLUMNS["sharpe_annual"].format
    found = statistics["sharpe_annual"]
    if found is not None and found["low"] is not None:
        span = f"{number(found['low'])} to {number(found['high'])}"
        yield f"Sharpe {number(found['estimate'])} a year; over other seeds, 95 %: {span}"
    yield from beside_lines(statistics.get("companions", {}), annual)
    for name, both in statistics["differences"].items():
        lows, highs = ([part[end] for part in both.values()] for end in ("low", "high"))
        if None in (*lows, *highs):
            continue
        # The wider of both block lengths: what is said must hold at either.
        low, high = min(lows), max(highs)
        words = "indistinguishable at these costs"
        if low > 0 or high < 0:
            words = f"{'above' if low > 0 else 'below'} it, what was tried before not counted"
        middle = number(both["single"]["estimate"] * annual)
        span = f"{number(low * annual)} to {number(high * annual)}"
        yield f"Sharpe less that of {name}: {middle}; over other days, 95 %: {span}: {words}"


def _cells(values: Mapping[str, float], shown: Sequence[str]) -> list[str]:
    return [_COLUMNS[m].format(values[m]) for m in shown]
