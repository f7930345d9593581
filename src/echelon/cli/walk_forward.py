"""`echelon walk-forward`: train, choose and test again and again, each time on later data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli import options
from echelon.cli.batch import open_batch, work_through
from echelon.cli.console import add_row, err, number_table, out
from echelon.cli.evaluate import (
    LIMITED,
    MEASURE_COLUMNS,
    active_lines,
    difference_line,
    print_measures,
    reference_lines,
)

if TYPE_CHECKING:
    from echelon.evaluation.folds import Fold
    from echelon.evaluation.walkforward import WalkForwardResult

_PlanOnly = Annotated[
    bool, typer.Option("--plan-only", help="Show the folds and stop; nothing is trained.")
]
_MEASURES = ("total_return", "sharpe_annual", "max_drawdown", "turnover_annual")
_STITCHED = (
    *("annual_return", "sharpe_annual", "information_ratio", "max_drawdown"),
    "turnover_annual",
)


@options.with_run_options
def walk_forward(given: options.RunOptions, plan_only: _PlanOnly = False) -> None:
    """Train and test fold by fold through the data, and put the test windows together.

    The section `walk_forward` of the configuration says which windows; by default a test year at
    a time from 2008 to 2025, as far as the data reach. Each fold has its own features, scaler,
    agents and checkpoints, made from its train and validation windows. Ctrl-C stops in order, and
    `--resume` goes on.
    """
    from echelon.evaluation.walkforward import WalkForward, plan_walk
    from echelon.report.walkforward import draw_splits, write_walk_forward_report

    walk = open_batch(
        WalkForward,
        given,
        lambda place, base: WalkForward(place, base, plan_walk(base, quarantine=given.quarantine)),
    )
    if plan_only:
        print_plan(walk.folds)
        return
    directory, picture = walk.directory, walk.directory / "splits.png"

    def draw() -> None:
        draw_splits(directory.name, walk.folds, walk.base.walk_forward, picture)

    with work_through(walk, given, before=draw) as course:
        with err.status("putting the test windows together"):
            result = walk.summarise(course)
            result.write(directory)
            walk.save_result(result)
            page = write_walk_forward_report(directory)
        print_walk(result)
        typer.echo(f"picture: {picture}")
        typer.echo(f"table: {directory / 'walk_forward.csv'}")
        typer.echo(f"report: {page}")


def print_plan(folds: Sequence[Fold]) -> None:
    table = number_table(f"{len(folds)} folds", "fold", "train", "valid", "test", "bars", "symbols")
    for fold in folds:
        spans = (f"{first}\n{last}" for first, last in (fold.train, fold.valid, fold.test))
        name = f"{fold.name}\npartial" if fold.partial else fold.name
        bars = "\n".join((f"{fold.bars.train:,} +", f"{fold.bars.valid:,} + {fold.bars.test:,}"))
        add_row(table, name, *spans, bars, f"{len(fold.assets):,}")
    out.print(table)


def print_walk(result: WalkForwardResult) -> None:
    """Mean over seeds of each fold and two baselines, then everybody's stitched measures."""
    from echelon.evaluation.trust import by_row
    from echelon.report.walkforward import BASELINES

    seeds = max((len(e.seeds) for e in result.evaluations.values()), default=0)
    if not seeds:
        return
    baselines = [
        name for name in BASELINES if any(name in e.baselines for e in result.evaluations.values())
    ]
    shown = [MEASURE_COLUMNS[m].heading for m in _MEASURES]
    headings = [*shown, "± std", *(f"{name.split('_')[0]}\nSharpe" for name in baselines)]
    title = f"test windows by fold, mean over {seeds} seed{'s' if seeds > 1 else ''}"
    table = number_table(title, "fold", *headings)
    sharpe = MEASURE_COLUMNS["sharpe_annual"]
    for fold in result.folds:
        evaluation = result.evaluations.get(fold.name)
        if evaluation is None:
            add_row(table, fold.name, "failed", *("–",) * (len(headings) - 1))
            continue
        cells = [MEASURE_COLUMNS[m].format(evaluation.over_seeds(m).mean) for m in _MEASURES]
        cells.append(sharpe.format(evaluation.over_seeds("sharpe_annual").std))
        for name in baselines:
            values = evaluation.baselines.get(name)
            cells.append("–" if values is None else sharpe.format(values["sharpe_annual"]))
        add_row(table, fold.name, *cells)
    out.print(table)
    if result.stitched is None:
        return
    about, measures = result.stitched.tree(), result.stitched.measures
    title = f"stitched: {about['first']} to {about['last']}, {about['periods']:,} returns"
    limited = any("limits" in e.facts for e in result.evaluations.values())
    names = (*_STITCHED, *LIMITED) if limited else _STITCHED
    print_measures(title, names, measures, by_row(measures.reference_policies))
    for line in _how_sure(result.statistics, math.sqrt(result.stitched.periods_per_year)):
        typer.echo(line)


def _how_sure(statistics: Mapping[str, Any], annual: float) -> Iterator[str]:
    from echelon.report.run.trust import span_of

    number = MEASURE_COLUMNS["sharpe_annual"].format
    sharpe = statistics["sharpe_annual"]
    if sharpe is not None and sharpe["low"] is not None:
        bounds = f"{number(sharpe['low'])} to {number(sharpe['high'])}"
        yield f"Sharpe {number(sharpe['estimate'])} a year; over other seeds, 95 %: {bounds}"
    yield from active_lines(statistics, annual)
    yield from reference_lines(statistics.get("reference_policies", {}), annual)
    for name, both in statistics["differences"].items():
        span = span_of(both, annual)
        if math.isnan(span.low):
            continue
        words = "no significant difference"
        if span.low > 0 or span.high < 0:
            words = f"{'above' if span.low > 0 else 'below'} it, what was tried before not counted"
        yield f"{difference_line(name, span)}: {words}"
