"""`echelon study`: which part of the hierarchy helps, on the regime market."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.console import add_row, numbers, out, progress_bar
from echelon.cli.options import Level, LogLevel, OutputDir, Overrides, configured
from echelon.cli.prove import PartsDisplay
from echelon.cli.rules import say_rules
from echelon.cli.train import Workers
from echelon.runs import RunDirectory

if TYPE_CHECKING:
    from echelon.proving.study_results import Study

_TUNED = Path("configs/hierarchical-tuned.yaml")


def study(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="YAML configuration of a hierarchy.")
    ] = _TUNED,
    override: Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Of each variant.")] = 3,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Environment steps of one training; default: the configuration's.",
        ),
    ] = None,
    output_dir: OutputDir = None,
    workers: Workers = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew where the directory holds a study.")
    ] = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Compare one expert, a population, its bonuses, MF-PBT and responsibility weighting.

    Every variant is trained on the regime market of the proving ground with the same seeds and
    draws, and tested on unseen pairs; differences are paired by seed. Takes hours. Ctrl-C keeps
    what is done; the same command in the same directory goes on, more --seeds are added. Writes
    study.json and study.md.
    """
    from echelon.market import drawn_market
    from echelon.proving.study import study as run_study
    from echelon.proving.study_parts import SIZES, plan_study

    tree = configured(config, override, log_level)
    if steps is not None:
        from echelon.config import override_config

        tree = override_config(tree, [f"train.total_env_steps={steps}"])
    directory = output_dir or tree.logging.output_dir / f"study-{config.stem}"
    RunDirectory.claim(directory)
    say_rules(drawn_market(tree).facts())
    with progress_bar("studying") as bar:
        found = run_study(
            tree,
            directory,
            seeds=seeds,
            sizes=SIZES,
            workers=workers or max(1, (os.cpu_count() or 1) // tree.train.threads),
            command=shlex.join(["echelon", *sys.argv[1:]]),
            overwrite=overwrite,
            on_report=PartsDisplay(bar, plan_study(tree, seeds, SIZES), "studying"),
        )
    _print(found)
    typer.echo(f"study: {directory / 'study.json'}")
    typer.echo(f"tables: {directory / 'study.md'}")


def _print(found: Study) -> None:
    """Results, and in plain words what helps."""
    from echelon.proving.study_table import RESULTS, cell, sentence

    table = numbers("study of the hierarchy", "variant", *RESULTS)
    for row in found.rows:
        add_row(table, row.title, *(cell(row, measure) for measure in RESULTS))
    out.print(table)
    for difference in found.differences:
        typer.echo(sentence(difference))
    for note in found.notes:
        typer.echo(note)
