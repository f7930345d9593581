"""`echelon demo`: the whole line so far on the bundled sample, ending in a picture."""

from __future__ import annotations

from pathlib import Path

import typer

from echelon.cli.options import (
    ConfigFile,
    Level,
    LogLevel,
    OutputDir,
    Overrides,
    configured,
    run_directory,
)
from echelon.cli.prepare import prepare_run, print_summary


def demo(
    config: ConfigFile = None,
    override: Overrides = None,
    output_dir: OutputDir = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Import the bundled sample, prepare features, print a summary and draw a picture.

    Needs no network and no service.
    """
    from echelon.report import draw_prepared

    tree = configured(config, override, log_level)
    fallback = config if config is not None else Path("demo")
    directory = run_directory(fallback, output_dir, None, tree.logging.output_dir)
    report = prepare_run(tree, directory, "demo")
    print_summary(report, directory, tree)
    picture = directory / "prepared.png"
    draw_prepared(report.prepared, picture)
    typer.echo(f"picture: {picture}")
