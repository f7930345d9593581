"""`echelon ablate`: what each choice in a configuration is worth, on the validation window."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.batch import (
    batch_directory,
    claimed,
    raise_failures,
    refuse_beside_resume,
    run_batch,
)
from echelon.cli.console import add_row, numbers, out, set_up_logging, warn
from echelon.cli.evaluate import COLUMNS
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
from echelon.errors import UsageError

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.evaluation.ablation import Ablation, AblationResult
    from echelon.evaluation.variants import Variant

Grid = Annotated[
    bool, typer.Option("--grid", help="Every combination instead of one factor at a time.")
]
VariantsFile = Annotated[
    Path | None,
    typer.Option("--variants", help="YAML file of your own variants: name: [key=value, …]."),
]
ResumeAblation = Annotated[
    Path | None, typer.Option("--resume", help="Go on with the ablation in this directory.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Run anew where the directory holds an ablation.")
]

_MEASURES = ("total_return", "max_drawdown", "turnover_annual")
_LONG_NAME = 24


def ablate(
    config: ConfigFile = None,
    override: Overrides = None,
    output_dir: OutputDir = None,
    grid: Grid = False,
    variants: VariantsFile = None,
    seeds: Seeds = None,
    workers: Workers = None,
    resume: ResumeAblation = None,
    trust_code: TrustCode = None,
    overwrite: Overwrite = False,
    quarantine: Quarantine = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Train variants of a configuration and compare them on the validation window.

    By default one factor at a time around the configuration: window 20, 30, 60; OHLCV or all
    indicators; TimeCNN or Transformer; return or log return; rule 20/50 or 10/30; entropy 0 or
    0.05. The test window is not touched. Ctrl-C stops in order, and `--resume` goes on.
    """
    from echelon.evaluation.ablation import Ablation
    from echelon.evaluation.batch import with_seeds

    if resume is not None:
        refuse_beside_resume("ablation", config, override, output_dir, grid, variants, overwrite)
        set_up_logging(log_level.value)
        ablation = Ablation.open(resume, seeds=seeds, trust_code=trust_code or ())
    else:
        base = configured(config, override, log_level, None, trust_code)
        if seeds is not None:
            base = with_seeds(base, seeds)
        chosen = _variants(base, grid, variants)
        directory = batch_directory(config, output_dir, base, "ablation")
        ablation = Ablation.of(directory, base, chosen)
    with claimed(ablation, resumed=resume is not None, overwrite=overwrite):
        run_ablation(ablation, workers or default_workers(ablation.batch.base), quarantine)


def run_ablation(ablation: Ablation, workers: int, quarantine: bool) -> None:
    """Prepare, train, evaluate, print, write and draw; raises at the end where a variant failed."""
    from echelon.evaluation.ablation import summarise
    from echelon.report.charts.variants import draw_ablation

    batch, directory = ablation.batch, ablation.batch.directory
    course = run_batch(batch, workers, quarantine)
    result = summarise(ablation, course)
    (directory / "ablation.png").unlink(missing_ok=True)  # of an earlier session, perhaps
    result.write(directory)
    if any(row.seeds for row in result.rows):
        draw_ablation(result, batch.base, directory / "ablation.png")
        print_result(result)
        typer.echo(f"picture: {directory / 'ablation.png'}")
    typer.echo(f"table: {directory / 'ablation.csv'}")
    raise_failures(batch, course)


def print_result(result: AblationResult) -> None:
    """One line per variant: Sharpe with its std over seeds and its difference to the base."""
    from echelon.ops.measures import mean_std

    facts = result.facts
    title = f"validation: {facts['first']} to {facts['last']}, mean over seeds"
    sharpe = COLUMNS["sharpe_annual"]
    headings = [sharpe.heading, "± std", "less\nbase", *(COLUMNS[m].heading for m in _MEASURES)]
    table = numbers(title, "variant", *headings)
    # Names of a grid's variants are long: they may go on in the next line, numbers may not.
    table.columns[0].no_wrap = all(len(row.variant.name) <= _LONG_NAME for row in result.rows)
    for row in result.rows:
        if not row.seeds:
            add_row(table, row.variant.name, "failed", *("–",) * (len(headings) - 1))
            continue
        found = mean_std(row.values("sharpe_annual"))
        gap = result.difference(row, "sharpe_annual")
        add_row(
            table,
            row.variant.name,
            sharpe.format(found.mean),
            sharpe.format(found.std),
            "" if row is result.base else f"{'+' if gap > 0 else ''}{sharpe.format(gap)}",
            *(COLUMNS[m].format(mean_std(row.values(m)).mean) for m in _MEASURES),
        )
    out.print(table)


def _variants(base: Config, grid: bool, file: Path | None) -> list[Variant]:
    from echelon.evaluation.variants import (
        full_grid,
        one_at_a_time,
        read_variants,
        unlike_base,
    )

    if file is not None:
        if grid:
            raise UsageError("--grid and --variants are two ways to choose; give one of them.")
        found = read_variants(file)
        kept = unlike_base(base, found)
        for variant in found:
            if variant not in kept:
                warn(f"variant {variant.name!r} is what the base is already, and is left out")
        return kept
    return full_grid(base) if grid else one_at_a_time(base)
