"""`echelon demo`: the whole line on the bundled sample, ending in reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli import options
from echelon.cli.evaluate import evaluate_run
from echelon.cli.prepare import print_summary
from echelon.cli.train import print_outcomes, train_run
from echelon.errors import UsageError

if TYPE_CHECKING:
    from echelon.config import Config

_Hierarchy = Annotated[
    Path | None,
    typer.Option(
        "--hierarchy",
        help="Configuration of a hierarchy to train after them and compare with them.",
        exists=True,
        dir_okay=False,
    ),
]
_Execution = Annotated[
    Path | None,
    typer.Option(
        "--execution",
        help="Configuration of an execution policy to train at the end.",
        exists=True,
        dir_okay=False,
    ),
]
_MONTH = 21
_SHARED = ("assets", "data", "split", "features", "normalization", "window", "market", "fee_rate")
"""Sections in which both configurations must agree: what is traded, and at what cost."""


def demo(
    config: options.ConfigFile = None,
    hierarchy: _Hierarchy = None,
    execution: _Execution = None,
    override: options.Overrides = None,
    output_dir: options.OutputDir = None,
    seeds: options.Seeds = None,
    workers: options.Workers = None,
    log_level: options.Level = "INFO",
) -> None:
    """Train agents on the bundled sample, test them and write a report; then a hierarchy.

    The hierarchy is exported, and a month of validation replayed through the decision engine.

    Needs no network and no service. A demo that was run before is run again. Overrides and
    --seeds are of both configurations; the hierarchy's run is NAME-hierarchy, next to the agents'.
    Last comes an execution policy, on bars within the day, in NAME-execution.
    """
    tree = options.read_config(config, override, log_level, seeds=seeds)
    above = None
    if hierarchy is not None:
        # The learning algorithm of the agents is not the hierarchy's.
        kept = [text for text in override or () if not text.startswith("train.algo=")]
        above = options.read_config(hierarchy, kept, log_level, seeds=seeds)
        _refuse_mismatch(tree, above, hierarchy)
    fallback = config if config is not None else Path("demo")
    directory = options.run_directory(fallback, output_dir, None, tree.logging.output_dir)
    given = options.RunOptions(workers=workers, overwrite=True)
    outcomes = train_run(tree, directory, "demo", given, on_prepared=print_summary)
    print_outcomes(outcomes, tree.train.select_by)
    for split in ("valid", "test"):
        evaluate_run(directory, split)
    if above is not None:
        _train_hierarchy(above, _sibling(directory), directory, given)
    from echelon.features import Prepared
    from echelon.report.prepared import draw_prepared
    from echelon.report.run.page import write_report

    picture = directory / "prepared.png"
    draw_prepared(Prepared.open(directory), picture)
    typer.echo(f"picture of the data: {picture}")
    for run in (directory,) if above is None else (directory, _sibling(directory)):
        typer.echo(f"report: {write_report(run)}")
    if above is not None:
        _serve_hierarchy(_sibling(directory), _sibling(directory, "bundle"))
    if execution is not None:
        # What says where things are, the execution policy shares.
        shared = [text for text in override or () if text.startswith(("data.store=", "logging."))]
        _work_orders(options.read_config(execution, shared, log_level), directory)


def _sibling(directory: Path, what: str = "hierarchy") -> Path:
    return directory.parent / f"{directory.resolve().name}-{what}"


def _refuse_mismatch(agents: Config, hierarchy: Config, file: Path) -> None:
    if hierarchy.train.algo != "HIERARCHY":
        raise UsageError(
            f"--hierarchy {file}: expected train.algo: HIERARCHY, found {hierarchy.train.algo}."
        )
    for name in _SHARED:
        if getattr(agents, name) != getattr(hierarchy, name):
            raise UsageError(
                f"--hierarchy {file}: its `{name}` is not that of --config, so the two cannot be "
                "compared. Make it the same in both files, or leave --hierarchy out."
            )


def _train_hierarchy(
    config: Config, directory: Path, agents: Path, given: options.RunOptions
) -> None:
    from echelon.cli.compare import compare_trained

    typer.echo("the hierarchy: experts, and a router that chooses who is in charge")
    outcomes = train_run(config, directory, "demo", given)
    print_outcomes(outcomes, config.train.select_by)
    evaluate_run(directory, "test")
    compare_trained([agents, directory], "test", directory, with_rules=False)


def _serve_hierarchy(run: Path, bundle: Path) -> None:
    from echelon.cli.export import replay_bundle
    from echelon.serving import sessions
    from echelon.serving.export import ExportRequest, export_bundle
    from echelon.training.run import TrainedRun

    typer.echo("export: the hierarchy as a bundle that decides bar by bar")
    if not sessions.is_available():
        typer.echo("left out: needs the extra `serving` (onnxruntime, onnx, onnxscript)")
        return
    seeds = TrainedRun.open(run).seeds
    request = ExportRequest(ensemble=True) if len(seeds) > 1 else ExportRequest(seed=seeds[0])
    export_bundle(run, bundle, request, overwrite=True)
    replay_bundle(bundle, run, _MONTH)
    typer.echo(f"bundle: {bundle}")


def _work_orders(config: Config, agents: Path) -> None:
    from echelon.cli.execution import evaluate_execution_run, train_execution_run

    typer.echo("execution: a policy that works orders into the market of a day")
    directory = _sibling(agents, "execution")
    train_execution_run(config, directory, options.RunOptions(workers=1, overwrite=True))
    evaluate_execution_run(directory, "test")
    typer.echo(f"picture of a day: {directory / 'evaluations' / 'test' / 'day.png'}")
