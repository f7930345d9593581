"""`echelon evaluate` and `echelon report`: what trained agents are worth."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.console import add_row, out, set_up_logging, titled
from echelon.cli.options import Level, LogLevel

if TYPE_CHECKING:
    from echelon.evaluation.evaluate import Evaluation, SplitName

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a trained run.")]


class SplitChoice(StrEnum):
    """Windows of a run."""

    train = "train"
    valid = "valid"
    test = "test"


class Language(StrEnum):
    """Languages of the report."""

    en = "en"
    zh = "zh"


def evaluate(
    run: RunPath,
    split: Annotated[
        SplitChoice, typer.Option("--split", help="Window to trade; test counts its readings.")
    ] = SplitChoice.valid,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Backtest a run's agents and the baselines on a window; save tables and measures."""
    set_up_logging(log_level.value)
    result = evaluate_run(run, split.value)
    typer.echo(f"tables: {result.directory}")
    typer.echo(f"next: echelon report {run}")


def report(
    run: RunPath,
    split: Annotated[
        list[SplitChoice] | None,
        typer.Option("--split", help="Windows to show; default: all that were evaluated."),
    ] = None,
    lang: Annotated[Language, typer.Option("--lang", help="Language.")] = Language.en,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Write a run's report: one HTML page that needs no network, and pictures."""
    from echelon.report import write_report

    set_up_logging(log_level.value)
    page = write_report(run, [s.value for s in split] if split else None, lang.value)
    typer.echo(f"report: {page}")


def evaluate_run(run: Path, split: SplitName) -> Evaluation:
    """Evaluate, and print the measures beside the baselines'."""
    from echelon.agents.training import TrainedRun
    from echelon.evaluation.evaluate import evaluate as evaluate_split

    trained = TrainedRun.open(run)
    result = evaluate_split(trained, split)
    print_evaluation(result, trained.config.eval.metrics)
    return result


_SHOWN = {
    "total_return": ("total_return",),
    "sharpe": ("sharpe_period", "sharpe_annual"),
    "volatility": ("volatility_annual",),
    "max_drawdown": ("max_drawdown",),
}
"""What a name of `eval.metrics` stands for in the summary."""


def print_evaluation(result: Evaluation, metrics: tuple[str, ...]) -> None:
    """Measures of the agents, mean ± std over seeds, and of the baselines."""
    from echelon.ops.measures import LABELS

    facts = result.facts
    shown = [name for metric in metrics for name in _SHOWN[metric]] + ["turnover_annual"]
    title = (
        f"{facts['split']}: {facts['first']} to {facts['last']}, fills at {facts['ledger']['fill']}"
    )
    table = titled(title, "", *(LABELS[name].text for name in shown))
    seeds = f"agent, {len(result.seeds)} seed{'s' if len(result.seeds) > 1 else ''}"
    means = {name: result.over_seeds(name) for name in shown}
    add_row(table, seeds, *(LABELS[n].format(means[n].mean, means[n].std) for n in shown))
    for name, values in result.baselines.items():
        add_row(table, name, *(LABELS[n].format(values[n]) for n in shown))
    out.print(table)
    if facts["split"] == "test":
        times = "time" if facts["reads"] == 1 else "times"
        typer.echo(f"this run's test window has been read {facts['reads']} {times}")
