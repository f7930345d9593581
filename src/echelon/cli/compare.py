"""`echelon compare`: agents on one market, side by side with the baselines.

Several kinds of agents are trained for it; with run directories given, nothing is trained (see
cli.compare_runs).
"""

from __future__ import annotations

from enum import StrEnum
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
from echelon.cli.console import add_row, err, numbers, out, set_up_logging
from echelon.cli.evaluate import COLUMNS, Column
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
    from echelon.evaluation.comparison import Comparison, ComparisonResult, Row
    from echelon.evaluation.test_access import SplitName


class Window(StrEnum):
    """Windows to compare on."""

    valid = "valid"
    test = "test"


Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN", help="Directories of trained runs to compare, the others with the first."
    ),
]
Agents = Annotated[
    str | None,
    typer.Option(
        "--agents",
        help="Which, with commas between; default: a2c,sb3-ppo,sb3-sac,sac,td3,apg.",
    ),
]
Steps = Annotated[
    list[str] | None,
    typer.Option(
        "--steps",
        help="NAME=N: environment steps of one agent, where not train.total_env_steps, e.g. "
        "--steps sb3-sac=100000.",
    ),
]
Split = Annotated[
    Window | None,
    typer.Option("--split", help="Window to compare on; default: valid. test counts its readings."),
]
ResumeComparison = Annotated[
    Path | None, typer.Option("--resume", help="Go on with the comparison in this directory.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Run anew where the directory holds a comparison.")
]

MEASURE_COLUMNS = {**COLUMNS, "cost_share": Column("costs\n%", True, 1)}
MEASURES = ("total_return", "max_drawdown", "turnover_annual", "cost_share")


def compare(
    runs: Runs = None,
    config: ConfigFile = None,
    override: Overrides = None,
    output_dir: OutputDir = None,
    agents: Agents = None,
    steps: Steps = None,
    split: Split = None,
    seeds: Seeds = None,
    workers: Workers = None,
    resume: ResumeComparison = None,
    trust_code: TrustCode = None,
    overwrite: Overwrite = False,
    quarantine: Quarantine = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Compare agents on one market: of several kinds, trained for it, or of runs that exist.

    With RUN RUN …, nothing is trained: trained runs of any kind, on the same assets, data, windows,
    features, fills and costs, are compared on one window, each with the first. A run that was not
    evaluated on it is. Differences of Sharpe ratios have an interval over days and one over seeds;
    --output-dir gets them as comparison.json.

    Without, agents are trained: our experts (sac, td3, apg), QTMRL's a2c, and PPO and SAC of
    Stable-Baselines3, all on the configuration's data, windows, features, costs, fills and reward;
    the best checkpoint of each is chosen on the validation window, and one backtest measures all of
    them and the baselines. Ctrl-C stops in order, and `--resume` goes on, also with another
    `--split`: nothing is trained again for it.
    """
    from echelon.evaluation.batch import with_seeds
    from echelon.evaluation.comparison import AGENTS, Comparison

    if runs:
        from echelon.cli.compare_runs import compare_trained

        training = {
            **{"--config": config, "--override": override, "--agents": agents, "--steps": steps},
            **{"--seeds": seeds, "--workers": workers, "--resume": resume},
            **{"--overwrite": overwrite, "--quarantine": quarantine},
        }
        set_up_logging(log_level.value)
        chosen = split or Window.valid
        compare_trained(runs, chosen.value, output_dir, training, trust_code or ())
        return
    if resume is not None:
        refuse_beside_resume(
            *("comparison", config, override, output_dir, agents, steps, overwrite),
            also="--split, --seeds",
        )
        set_up_logging(log_level.value)
        wanted: SplitName | None = None if split is None else split.value
        comparison = Comparison.open(resume, seeds=seeds, split=wanted, trust_code=trust_code or ())
    else:
        base = configured(config, override, log_level, None, trust_code)
        if seeds is not None:
            base = with_seeds(base, seeds)
        comparison = Comparison.of(
            batch_directory(config, output_dir, base, "comparison"),
            base,
            list(AGENTS) if agents is None else _names(agents),
            steps=_steps(steps or []),
            split=(split or Window.valid).value,
        )
    with claimed(comparison, resumed=resume is not None, overwrite=overwrite):
        run_comparison(comparison, workers or default_workers(comparison.batch.base), quarantine)


def run_comparison(comparison: Comparison, workers: int, quarantine: bool) -> None:
    """Prepare, train, evaluate, print, write and draw; raises at the end where an agent failed."""
    from echelon.evaluation.comparison import summarise
    from echelon.report.charts.variants import draw_comparison

    batch, directory, split = (
        comparison.batch,
        comparison.batch.directory,
        comparison.batch.kind.split,
    )
    course = run_batch(batch, workers, quarantine)
    with err.status("comparing"):
        result = summarise(comparison, course)
    picture = directory / f"comparison-{split}.png"
    picture.unlink(missing_ok=True)  # of an earlier session, perhaps
    result.write(directory, split)
    if result.facts:
        draw_comparison(result, picture)
        print_result(result)
        if split == "valid":
            typer.echo(
                "This window chose the checkpoints; nothing can be claimed from it. "
                f"`echelon compare --resume {directory} --split test` looks at the test window."
            )
        typer.echo(f"picture: {picture}")
    typer.echo(f"table: {directory / f'comparison-{split}.csv'}")
    raise_failures(batch, course)


def print_result(result: ComparisonResult) -> None:
    """Two lines per agent, mean and ± std over seeds, and its Sharpe ratio less the reference's."""
    facts = result.facts
    title = (
        f"{facts['split']}: {facts['first']} to {facts['last']}, fills at "
        f"{facts['ledger']['fill']}; mean over seeds, below it ± std"
    )
    sharpe = MEASURE_COLUMNS["sharpe_annual"].heading
    shown = [MEASURE_COLUMNS[m].heading for m in MEASURES]
    table = numbers(title, "agent\nsteps", sharpe, f"less {result.reference}\n95 %", *shown)
    before = "agent"
    for row in result.rows:
        if row.kind != before:
            table.add_section()
            before = row.kind
        name = f"{row.name}\n{row.steps:,}" if row.kind == "agent" else row.name
        if not row.seeds:
            add_row(table, name, "failed", *("–",) * (len(shown) + 1))
            continue
        cells = [cell(row, measure) for measure in MEASURES]
        add_row(table, name, cell(row, "sharpe_annual"), _gap(row), *cells)
    out.print(table)


def cell(row: Row, measure: str) -> str:
    """Mean over seeds, and ± std below it where there are several."""
    found = row.over_seeds(measure)
    number = MEASURE_COLUMNS[measure].format
    return (
        f"{number(found.mean)}\n± {number(found.std)}" if len(row.seeds) > 1 else number(found.mean)
    )


def _gap(row: Row) -> str:
    if row.gap is None:
        return ""
    number = MEASURE_COLUMNS["sharpe_annual"].format
    sign = "+" if row.gap.estimate > 0 else ""
    return f"{sign}{number(row.gap.estimate)}\n{number(row.gap.low)} to {number(row.gap.high)}"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _steps(items: list[str]) -> dict[str, int]:
    found = {}
    for item in items:
        name, _, count = item.partition("=")
        try:
            found[name.strip()] = int(count.replace("_", ""))
        except ValueError:
            raise UsageError(
                f"--steps {item!r}: expected NAME=N, such as sb3-sac=100000."
            ) from None
    return found
