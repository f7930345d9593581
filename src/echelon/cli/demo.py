"""`echelon demo`: the whole line on the bundled sample, ending in a report."""

from __future__ import annotations

from pathlib import Path

import typer

from echelon.cli.evaluate import evaluate_run
from echelon.cli.options import (
    ConfigFile,
    Level,
    LogLevel,
    OutputDir,
    Overrides,
    configured,
    run_directory,
)
from echelon.cli.prepare import print_summary
from echelon.cli.train import Seeds, Workers, print_outcomes, train_run


def demo(
    config: ConfigFile = None,
    override: Overrides = None,
    output_dir: OutputDir = None,
    seeds: Seeds = None,
    workers: Workers = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Train agents on the bundled sample, test them and write a report.

    Needs no network and no service. A demo that was run before is run anew.
    """
    from echelon.report import draw_prepared, write_report

    tree = configured(config, override, log_level)
    if seeds is not None:
        tree = tree.model_copy(update={"train": tree.train.model_copy(update={"seeds": seeds})})
    fallback = config if config is not None else Path("demo")
    directory = run_directory(fallback, output_dir, None, tree.logging.output_dir)
    outcomes = train_run(
        tree, directory, "demo", workers=workers, overwrite=True, on_prepared=print_summary
    )
    print_outcomes(outcomes, tree)
    for split in ("valid", "test"):
        evaluate_run(directory, split)
    from echelon.features import Prepared

    picture = directory / "prepared.png"
    draw_prepared(Prepared.open(directory), picture)
    page = write_report(directory)
    typer.echo(f"picture of the data: {picture}")
    typer.echo(f"report: {page}")
