"""`echelon ablate`: what each choice in a configuration is worth, on the validation window."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli import options
from echelon.cli.batch import open_batch, work_through
from echelon.cli.console import add_row, number_table, out, warn
from echelon.cli.evaluate import MEASURE_COLUMNS
from echelon.errors import UsageError

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.evaluation.ablation import AblationResult, Variant

_Grid = Annotated[
    bool, typer.Option("--grid", help="Every combination instead of one factor at a time.")
]
_VariantsFile = Annotated[
    Path | None,
    typer.Option("--variants", help="YAML file of your own variants: name: [key=value, …]."),
]

_MEASURES = ("total_return", "max_drawdown", "turnover_annual")


@options.with_run_options
def ablate(given: options.RunOptions, grid: _Grid = False, variants: _VariantsFile = None) -> None:
    """Train variants of a configuration and compare them on the validation window.

    By default one factor at a time around the configuration: window 20, 30, 60; OHLCV or all
    indicators; TimeCNN or Transformer; return or log return; rule 20/50 or 10/30; entropy 0 or
    0.05. The test window is not touched. Ctrl-C stops in order, and `--resume` goes on.
    """
    from echelon.evaluation.ablation import Ablation
    from echelon.report.charts.variants import draw_ablation

    ablation = open_batch(
        Ablation,
        given,
        lambda place, base: Ablation(place, base, tuple(_variants(base, grid, variants))),
        *(grid, variants),
    )
    with work_through(ablation, given) as course:
        directory = ablation.directory
        result = ablation.summarise(course)
        (directory / "ablation.png").unlink(missing_ok=True)  # of an earlier session, perhaps
        result.write(directory)
        if any(row.seeds for row in result.rows):
            draw_ablation(result, ablation.base, directory / "ablation.png")
            print_ablation(result)
            typer.echo(f"picture: {directory / 'ablation.png'}")
        typer.echo(f"table: {directory / 'ablation.csv'}")


def print_ablation(result: AblationResult) -> None:
    """One line per variant: Sharpe with its std over seeds and its difference to the base."""
    facts = result.facts
    title = f"validation: {facts['first']} to {facts['last']}, mean over seeds"
    sharpe = MEASURE_COLUMNS["sharpe_annual"]
    shown = [MEASURE_COLUMNS[m] for m in _MEASURES]
    headings = [sharpe.heading, "± std", "vs\nbase", *(column.heading for column in shown)]
    table = number_table(title, "variant", *headings)
    # Names of a grid's variants are long: they may go on in the next line, numbers may not.
    table.columns[0].no_wrap = all(len(row.name) <= 24 for row in result.rows)
    for row in result.rows:
        if not row.seeds:
            add_row(table, row.name, "failed", *("–",) * (len(headings) - 1))
            continue
        ratios = map(sharpe.format, row.over_seeds("sharpe_annual"))
        gap = sharpe.format_signed(result.difference(row, "sharpe_annual"))
        means = (row.over_seeds(m).mean for m in _MEASURES)
        cells = (column.format(mean) for column, mean in zip(shown, means, strict=True))
        add_row(table, row.name, *ratios, "" if row is result.base else gap, *cells)
    out.print(table)


def _variants(base: Config, grid: bool, file: Path | None) -> list[Variant]:
    from echelon.evaluation.ablation import full_grid, one_at_a_time, read_variants, unlike_base

    if file is None:
        return full_grid(base) if grid else one_at_a_time(base)
    if grid:
        raise UsageError("--grid and --variants are two ways to choose; give one of them.")
    named = read_variants(file)
    kept = unlike_base(base, named)
    for variant in named:
        if variant not in kept:
            warn(f"variant {variant.name!r} is what the base is already, and is left out")
    return kept
