"""`echelon evaluate` and `echelon report`: what trained agents are worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.table import Table

from echelon.cli.console import (
    add_row,
    number_table,
    open_alerter,
    out,
    say_rules,
    set_up_logging,
)
from echelon.cli.options import Level, TrustCode
from echelon.errors import UsageError
from echelon.files import sweep

if TYPE_CHECKING:
    from echelon.evaluation.evaluate import Evaluation
    from echelon.evaluation.test_access import SplitName
    from echelon.evaluation.walkforward import StitchedMeasures
    from echelon.report.run.trust import Span

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a trained run.")]
ReportPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a trained run, or of a walk-forward.")
]


Split = Literal["train", "valid", "test"]
Language = Literal["en", "zh"]


def evaluate(
    run: RunPath,
    split: Annotated[
        Split, typer.Option("--split", help="Window to trade; test counts its readings.")
    ] = "valid",
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            "-o",
            help="Another executor for the same agents, or other limits of their books: "
            "-o market.executor=vwap, -o risk.max_drawdown=0.15, risk.target_volatility; no other "
            "key. Saved in RUN/executors/NAME.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="NAME of that; default: market.executor, or limits."),
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="Write equity and blotter as CSV files too.")
    ] = False,
    ensemble: Annotated[
        bool,
        typer.Option("--ensemble/--no-ensemble", help="Judge several seeds as one policy, too."),
    ] = True,
    trust_code: TrustCode = None,
    log_level: Level = "INFO",
) -> None:
    """Backtest a run's agents and the baselines on a window; save tables and measures."""
    set_up_logging(log_level)
    if name is not None and not override:
        raise UsageError("--name: is of another executor, which -o market.executor=… names.")
    result = evaluate_run(
        *(run, split, override or (), name, trust_code or ()),
        with_rules=True,
        csv=csv,
        ensemble=ensemble,
    )
    typer.echo(f"tables: {result.directory}")
    if not override:
        typer.echo(f"next: echelon report {run}")


def report(
    run: ReportPath,
    split: Annotated[
        list[str] | None,
        typer.Option(
            "--split",
            metavar="[train|valid|test]",
            help="Windows to show; default: all that were evaluated.",
        ),
    ] = None,
    lang: Annotated[Language, typer.Option("--lang", help="Language.")] = "en",
    log_level: Level = "INFO",
) -> None:
    """Write the report of a run, a walk-forward or a search: one HTML page that needs no network.

    A run's also has pictures; a walk-forward's is of its test windows, one after another.
    """
    from echelon.report.run.page import write_report
    from echelon.report.tuning import is_tuning, write_tuning_report
    from echelon.report.walkforward import is_walk_forward, write_walk_forward_report

    set_up_logging(log_level)
    if is_tuning(run):
        if split:
            raise UsageError(f"--split: {run} holds a search, which has trials on validation only.")
        typer.echo(f"report: {write_tuning_report(run, lang)}")
        return
    if is_walk_forward(run):
        if split:
            raise UsageError(
                f"--split: {run} holds a walk-forward, whose report is of its test windows. Leave "
                f"the option out, or name one of its runs below {run / 'folds'}."
            )
        page = write_walk_forward_report(run, lang)
    else:
        page = write_report(run, split or None, lang)
    typer.echo(f"report: {page}")


def evaluate_run(
    run: Path,
    split: SplitName,
    executor: Sequence[str] = (),
    name: str | None = None,
    trust_code: Sequence[Path] = (),
    *,
    with_rules: bool = False,
    csv: bool = False,
    ensemble: bool = False,
) -> Evaluation:
    """Evaluate and print. executor, name: overrides for another one than the run has"""
    from echelon.envs.world import rules_of
    from echelon.evaluation.evaluate import evaluate as evaluate_split
    from echelon.training.run import TrainedRun

    trained = TrainedRun.open(run, trust_code)
    sweep(run, deep=True)
    if executor:
        trained = trained.executed_by(executor, name)
    if with_rules:
        say_rules(rules_of(trained.prepared, trained.config).facts())
    with open_alerter(trained.config.alerts, f"{run.name} · {split}", needed=False) as alert:
        result = evaluate_split(trained, split, csv=csv, ensemble=ensemble, alert_callbacks=[alert])
    print_evaluation(result, trained.config.eval.metrics)
    for line in (*_execution_costs(result), *how_sure(trained.home, split)):
        typer.echo(line)
    return result


def _execution_costs(result: Evaluation) -> Iterator[str]:
    from echelon.report.run.tables import PARTS, execution_costs

    blotters = [result.tables(seed).blotter for seed in result.seeds]
    split = [execution_costs(blotter) for blotter in blotters if "arrival" in blotter.columns]
    every = [costs for costs in split if costs]
    if every:
        means = {part: sum(costs[part] for costs in every) / len(every) for part in PARTS}
        parts = ", ".join(f"{part.replace('_', ' ')} {value:+.2f}" for part, value in means.items())
        yield f"execution ({result.facts['executor']}), bp of the value at arrival: {parts}"


def how_sure(run: Path, split: SplitName) -> Iterator[str]:
    """What trust.json says of a split, in a few lines: the verdict first."""
    from echelon.evaluation.trust import load_trust
    from echelon.ops.measures import LABELS
    from echelon.report.run.gather import tried_on
    from echelon.report.run.trust import probability, verdict_sentence, yearly
    from echelon.report.texts import Words

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
    yield from active_lines(trust, yearly(trust))
    yield from reference_lines(trust.get("reference_policies", {}), yearly(trust))
    deflation, counted = trust["deflation"], trust["registry"]
    if split != "train" and deflation is not None:
        what = "look" if split == "test" else "configuration"
        trials = _many(deflation["n_trials"], what)
        hurdle = ratio(deflation["hurdle"] * yearly(trust))
        yield (
            f"probabilistic Sharpe ratio {probability(deflation['psr'])}; deflated by {trials} "
            f"{probability(deflation['probability'])} (hurdle {hurdle} a year)"
        )
    if split == "test":
        yield (
            f"this test window has been read {_many(counted['reads'], 'time')}, by "
            f"{_many(counted['runs'], 'run')}"
        )


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


class MeasureColumn(NamedTuple):
    """A measure in a narrow table: a heading of two short lines, and how its values are shown."""

    heading: str
    percent: bool
    digits: int

    def format(self, value: float) -> str:
        """The value without its unit, which the heading has."""
        from echelon.ops.measures import Label

        plain = Label(self.heading, "ratio", None, self.digits)
        return plain.format(value * 100.0 if self.percent else value)

    def format_signed(self, value: float) -> str:
        return ("+" if value > 0 else "") + self.format(value)


MEASURE_COLUMNS: Mapping[str, MeasureColumn] = {
    "total_return": MeasureColumn("return\n%", True, 1),
    "sharpe_period": MeasureColumn("Sharpe\na bar", False, 4),
    "sharpe_annual": MeasureColumn("Sharpe\na year", False, 2),
    "volatility_annual": MeasureColumn("volat.\n% a year", True, 1),
    "max_drawdown": MeasureColumn("max DD\n%", True, 1),
    "turnover_annual": MeasureColumn("turnover\n× a year", False, 1),
    "cost_share": MeasureColumn("costs\n%", True, 1),
    "annual_return": MeasureColumn("return\n% a year", True, 1),
    "exposure": MeasureColumn("held\n%", True, 0),
    "max_drawdown_year": MeasureColumn("worst year\nDD %", True, 1),
    "budget_jumps": MeasureColumn("budget\njumped", False, 0),
    "calmar": MeasureColumn("Calmar", False, 2),
    "information_ratio": MeasureColumn("inform.\nratio", False, 2),
}
"""Measures as a table of 80 columns can show them side by side."""

LIMITED = ("exposure", "max_drawdown_year", "budget_jumps")
"""Measures that are shown too where every real book is limited."""
_SHOWN = {
    "total_return": ("total_return",),
    "sharpe": ("sharpe_period", "sharpe_annual"),
    "volatility": ("volatility_annual",),
    "max_drawdown": ("max_drawdown",),
}
"""What a name of `eval.metrics` stands for in the summary."""


def print_evaluation(result: Evaluation, metrics: tuple[str, ...]) -> None:
    """Measures of the agents, mean and std over seeds, and of the baselines.

    Of a hierarchy also those of what is made of the same experts.
    """
    from echelon.evaluation.trust import by_row

    facts = result.facts
    shown = [name for metric in metrics for name in _SHOWN[metric]] + ["turnover_annual"]
    shown += LIMITED if "limits" in facts else ()
    span = f"{facts['split']}: {facts['first']} to {facts['last']}"
    print_measures(f"{span}, fills at {facts['ledger']['fill']}", shown, result, {})
    for split, ic in facts.get("forecast", {"rank_ic": {}})["rank_ic"].items():
        mean, low, high, icir = (
            "–" if ic[name] is None else f"{ic[name]:.3f}" for name in ("ic", "low", "high", "icir")
        )
        typer.echo(
            f"rank IC of the forecaster, {split}: {mean} (95 %: {low} to {high}), ICIR {icir}, "
            f"{ic['days']:,} days"
        )
    if result.reference_policies:
        headings = (MEASURE_COLUMNS[name].heading for name in shown)
        table = number_table("over the same experts", "", *headings)
        add_mean_rows(table, "agent", list(result.seeds.values()), shown)
        for name, seeds in by_row(result.reference_policies, best=True).items():
            add_mean_rows(table, ROWS[name], seeds, shown)
        out.print(table)
        typer.echo("* alone, chosen in hindsight on this window: nobody could have traded it")


def print_measures(
    title: str,
    shown: Sequence[str],
    measures: Evaluation | StitchedMeasures,
    references: Mapping[str, Sequence[Mapping[str, float]]],
) -> None:
    """A table of the agents, their ensemble, rows over their experts, and the baselines."""
    table = number_table(title, "", *(MEASURE_COLUMNS[name].heading for name in shown))
    seeds = list(measures.seeds.values())
    name = "agent, mean" if len(seeds) > 1 else "agent"
    add_mean_rows(table, name, seeds, shown, f"± std of {len(seeds)}")
    if measures.ensemble is not None:
        add_mean_rows(table, "ensemble", [measures.ensemble], shown)
    for row, over_seeds in references.items():
        add_mean_rows(table, ROWS[row], over_seeds, shown)
    for name, values in measures.baselines.items():
        add_row(table, name, *(MEASURE_COLUMNS[n].format(values[n]) for n in shown))
    out.print(table)


def add_mean_rows(
    table: Table,
    title: str,
    seeds: Sequence[Mapping[str, float]],
    shown: Sequence[str],
    std_title: str = "± std",
) -> None:
    """Mean of measures over the seeds and, where there are several, their standard deviation."""
    from echelon.ops.measures import mean_std

    cells = [
        (MEASURE_COLUMNS[name], mean_std([values[name] for values in seeds])) for name in shown
    ]
    add_row(table, title, *(column.format(value.mean) for column, value in cells))
    if len(seeds) > 1:
        add_row(table, std_title, *(column.format(value.std) for column, value in cells))


ROWS: Mapping[str, str] = {
    "hedge": "Fixed-Share",
    "best": "best expert*",
    "experts": "experts, mean",
}
"""What the rows of `evaluation.trust.by_row` are called in a table."""


def reference_lines(differences: Mapping[str, Any], annual: float) -> Iterator[str]:
    """The agent's Sharpe ratio vs those of its reference policies, as trust.json has them."""
    from echelon.report.run.trust import span_of

    titles = {"hedge": "Fixed-Share over the same experts", "experts": "the experts alone, mean"}
    for name, title in titles.items():
        span = span_of(differences[name], annual) if name in differences else None
        if span is not None and not math.isnan(span.low):
            yield difference_line(title, span)


def active_lines(tree: Mapping[str, Any], annual: float) -> Iterator[str]:
    """Information ratios over equal weight, the forecast's too; the ensemble vs the baselines."""
    from echelon.backtest.ensemble import ENSEMBLE
    from echelon.report.run.trust import span_of

    ratio = MEASURE_COLUMNS["sharpe_annual"].format
    for who in ("agent", ENSEMBLE, "forecast"):
        if who in tree.get("active", {}):
            estimate, low, high = map(ratio, span_of(tree["active"][who], annual))
            yield (
                f"information ratio over equal_weight, {who}: {estimate}; over other days, 95 %: "
                f"{low} to {high}"
            )
    for name, both in tree.get("ensemble", {}).items():
        yield difference_line(name, span_of(both, annual), "ensemble's Sharpe")


def difference_line(name: str, span: Span, what: str = "Sharpe") -> str:
    """A difference of Sharpe ratios a year in words."""
    estimate, low, high = map(MEASURE_COLUMNS["sharpe_annual"].format, span)
    return f"{what} vs {name}: {estimate}; over other days, 95 %: {low} to {high}"
