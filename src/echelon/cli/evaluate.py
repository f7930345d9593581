"""`echelon evaluate` and `echelon report`: what trained agents are worth."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from echelon.cli.console import add_row, numbers, out, set_up_logging
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


class Column(NamedTuple):
    """A measure in a narrow table: a heading of two short lines, and how its values are shown."""

    heading: str
    percent: bool
    digits: int

    def format(self, value: float) -> str:
        """The value without its unit, which the heading has."""
        from echelon.ops.measures import Label

        plain = Label(self.heading, "ratio", None, "", self.digits)
        return plain.format(value * 100.0 if self.percent else value)


COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "total_return": Column("return\n%", True, 1),
        "sharpe_period": Column("Sharpe\na bar", False, 4),
        "sharpe_annual": Column("Sharpe\na year", False, 2),
        "volatility_annual": Column("volat.\n% a year", True, 1),
        "max_drawdown": Column("max DD\n%", True, 1),
        "turnover_annual": Column("turnover\n× a year", False, 1),
    }
)
"""Measures as a table of 80 columns can show them side by side."""

_SHOWN = {
    "total_return": ("total_return",),
    "sharpe": ("sharpe_period", "sharpe_annual"),
    "volatility": ("volatility_annual",),
    "max_drawdown": ("max_drawdown",),
}
"""What a name of `eval.metrics` stands for in the summary."""


def print_evaluation(result: Evaluation, metrics: tuple[str, ...]) -> None:
    """Measures of the agents, mean and std over seeds, and of the baselines."""
    facts = result.facts
    shown = [name for metric in metrics for name in _SHOWN[metric]] + ["turnover_annual"]
    title = (
        f"{facts['split']}: {facts['first']} to {facts['last']}, fills at {facts['ledger']['fill']}"
    )
    table = numbers(title, "", *(COLUMNS[name].heading for name in shown))
    means = {name: result.over_seeds(name) for name in shown}
    several = len(result.seeds) > 1
    mean = [COLUMNS[name].format(means[name].mean) for name in shown]
    add_row(table, "agent, mean" if several else "agent", *mean)
    if several:
        std = [COLUMNS[name].format(means[name].std) for name in shown]
        add_row(table, f"± std of {len(result.seeds)}", *std)
    for name, values in result.baselines.items():
        add_row(table, name, *(COLUMNS[n].format(values[n]) for n in shown))
    out.print(table)
    if facts["split"] == "test":
        times = "time" if facts["reads"] == 1 else "times"
        typer.echo(f"this run's test window has been read {facts['reads']} {times}")
