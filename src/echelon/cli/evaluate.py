"""`echelon evaluate` and `echelon report`: what trained agents are worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from echelon.cli.console import add_row, numbers, out, set_up_logging
from echelon.cli.options import Level, LogLevel, TrustCode
from echelon.cli.rules import say_rules
from echelon.errors import UsageError
from echelon.files import sweep

if TYPE_CHECKING:
    from echelon.evaluation.evaluate import Evaluation
    from echelon.evaluation.test_access import SplitName

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a trained run.")]
ReportPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a trained run, or of a walk-forward.")
]


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
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            "-o",
            help="Another executor for the same agents: -o market.executor=vwap; no key but those "
            "that begin with market.executor. Saved in RUN/executors/NAME.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="NAME of that executor; default: market.executor."),
    ] = None,
    trust_code: TrustCode = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Backtest a run's agents and the baselines on a window; save tables and measures."""
    set_up_logging(log_level.value)
    if name is not None and not override:
        raise UsageError("--name: is of another executor, which -o market.executor=… names.")
    result = evaluate_run(run, split.value, override or (), name, trust_code or (), with_rules=True)
    typer.echo(f"tables: {result.directory}")
    if not override:
        typer.echo(f"next: echelon report {run}")


def report(
    run: ReportPath,
    split: Annotated[
        list[SplitChoice] | None,
        typer.Option("--split", help="Windows to show; default: all that were evaluated."),
    ] = None,
    lang: Annotated[Language, typer.Option("--lang", help="Language.")] = Language.en,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Write the report of a run or a walk-forward: one HTML page that needs no network.

    A run's also has pictures; a walk-forward's is of its test windows, one after another.
    """
    from echelon.report import write_report
    from echelon.report.walkforward import is_walk_forward, write_walk_forward_report

    set_up_logging(log_level.value)
    if is_walk_forward(run):
        if split:
            raise UsageError(
                f"--split: {run} holds a walk-forward, whose report is of its test windows. Leave "
                f"the option out, or name one of its runs below {run / 'folds'}."
            )
        typer.echo(f"report: {write_walk_forward_report(run, lang.value)}")
        return
    page = write_report(run, [s.value for s in split] if split else None, lang.value)
    typer.echo(f"report: {page}")


def evaluate_run(
    run: Path,
    split: SplitName,
    executor: Sequence[str] = (),
    name: str | None = None,
    trust_code: Sequence[Path] = (),
    *,
    with_rules: bool = False,
) -> Evaluation:
    """Evaluate, and print the measures beside the baselines'.

    executor: overrides that put another executor in place of the run's; name: of it
    trust_code: files that the run's configuration names and that may run
    with_rules: say the rules in force first; a training has said them
    """
    from echelon.envs.world import rules_of
    from echelon.evaluation.evaluate import evaluate as evaluate_split
    from echelon.training.run import TrainedRun

    trained = TrainedRun.open(run, trust_code)
    sweep(run, deep=True)
    if executor:
        trained = trained.executed_by(executor, name)
    if with_rules:
        say_rules(rules_of(trained.prepared, trained.config).facts())
    result = evaluate_split(trained, split)
    print_evaluation(result, trained.config.eval.metrics)
    for line in (*_worked(result), *how_sure(trained.home, split)):
        typer.echo(line)
    return result


def _worked(result: Evaluation) -> Iterator[str]:
    """What the agents' execution cost, mean over seeds, where the executor told it."""
    from echelon.report.execution_costs import PARTS, worked_costs

    blotters = [result.tables(seed).blotter for seed in result.seeds]
    found = [worked_costs(one) for one in blotters if "arrival" in one.columns]
    found = [costs for costs in found if costs]
    if found:
        means = {part: sum(costs[part] for costs in found) / len(found) for part in PARTS}
        told = ", ".join(f"{part.replace('_', ' ')} {value:+.2f}" for part, value in means.items())
        yield f"execution ({result.facts['executor']}), bp of the value at arrival: {told}"


def how_sure(run: Path, split: SplitName) -> Iterator[str]:
    """What trust.json says of a split, in a few lines: the verdict first."""
    from echelon.evaluation.trust import load_trust
    from echelon.ops.measures import LABELS
    from echelon.report.gather import tried_on
    from echelon.report.texts import Words
    from echelon.report.trust import probability, verdict_sentence, yearly

    trust = load_trust(run, split)
    if trust is None:
        return
    ratio = LABELS["sharpe_annual"].format
    yield verdict_sentence(trust, Words("en"), tried_on(run))
    seeds = trust["seeds"]["measures"]["sharpe_annual"]
    if seeds is not None and seeds["low"] is not None:
        yield (
            f"Sharpe {ratio(seeds['estimate'])} a year; over other seeds, 95 %: "
            f"{ratio(seeds['low'])} to {ratio(seeds['high'])} ({seeds['method']}, n = {seeds['n']})"
        )
    yield from beside_lines(trust.get("companions", {}), yearly(trust))
    found, counted = trust["deflation"], trust["registry"]
    if split != "train" and found is not None:
        what = "look" if split == "test" else "configuration"
        trials = _many(found["n_trials"], what)
        yield (
            f"probabilistic Sharpe ratio {probability(found['psr'])}; deflated by {trials} "
            f"{probability(found['probability'])} (hurdle {ratio(found['hurdle'] * yearly(trust))} "
            "a year)"
        )
    if split == "test":
        yield (
            f"this test window has been read {_many(counted['reads'], 'time')}, by "
            f"{_many(counted['runs'], 'run')}"
        )


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


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
    if result.companions:
        _print_companions(result, shown)


ROWS: Mapping[str, str] = MappingProxyType(
    {"hedge": "hedge", "best": "best expert*", "experts": "experts, mean"}
)
"""What the rows of `evaluation.reference_policies` are called in a table."""


def _print_companions(result: Evaluation, shown: Sequence[str]) -> None:
    """The agent beside what is made of the same experts, mean and std over seeds."""
    from echelon.evaluation.reference_policies import over_seeds, with_best

    table = numbers("over the same experts", "", *(COLUMNS[name].heading for name in shown))
    several = len(result.seeds) > 1
    rows = {"agent": list(result.seeds.values())}
    rows |= {ROWS[name]: seeds for name, seeds in with_best(result.companions).items()}
    for title, seeds in rows.items():
        found = {name: over_seeds(seeds, name) for name in shown}
        add_row(table, title, *(COLUMNS[name].format(found[name].mean) for name in shown))
        if several:
            add_row(table, "± std", *(COLUMNS[name].format(found[name].std) for name in shown))
    out.print(table)
    typer.echo("* alone, chosen in hindsight on this window: nobody could have traded it")


def beside_lines(differences: Mapping[str, Any], annual: float) -> Iterator[str]:
    """The agent's Sharpe ratio less those of its companions, as trust.json has them."""
    number = COLUMNS["sharpe_annual"].format
    said = {"hedge": "the hedge over the same experts", "experts": "the experts alone, mean"}
    for name, title in said.items():
        both = differences.get(name)
        if both is None:
            continue
        # The wider of both block lengths: what is said must hold at either.
        lows, highs = ([part[end] for part in both.values()] for end in ("low", "high"))
        if None in (*lows, *highs):
            continue
        middle = number(both["single"]["estimate"] * annual)
        span = f"{number(min(lows) * annual)} to {number(max(highs) * annual)}"
        yield f"Sharpe less that of {title}: {middle}; over other days, 95 %: {span}"
