"""`echelon compare`: agents on one market, side by side with the baselines.

Several kinds of agents are trained for it; with run directories given, nothing is trained: the
runs are compared on one window, with intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from echelon.cli import options
from echelon.cli.batch import open_batch, work_through
from echelon.cli.console import add_row, err, number_table, out, say_rules, set_up_logging
from echelon.cli.evaluate import MEASURE_COLUMNS
from echelon.errors import DamagedError, UsageError
from echelon.files import read_json

if TYPE_CHECKING:
    from echelon.evaluation.batch import Course, MeasuredRow
    from echelon.evaluation.comparison import Comparison, ComparisonResult, SharpeGap
    from echelon.evaluation.runs_comparison import RunDifference, RunsComparison
    from echelon.evaluation.test_access import SplitName
    from echelon.report.texts import Words
    from echelon.training.run import TrainedRun


_Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN", help="Directories of trained runs to compare, the others with the first."
    ),
]
_Agents = Annotated[
    str | None,
    typer.Option(
        "--agents", help="Which, with commas between; default: a2c,sb3-ppo,sb3-sac,sac,td3,apg."
    ),
]
_Steps = Annotated[
    list[str] | None,
    typer.Option(
        "--steps",
        help="NAME=N: environment steps of one agent, where not train.total_env_steps, e.g. "
        "--steps sb3-sac=100000.",
    ),
]
_Split = Annotated[
    Literal["valid", "test"] | None,
    typer.Option("--split", help="Window to compare on; default: valid. test counts its readings."),
]
_MEASURES = ("total_return", "max_drawdown", "turnover_annual", "cost_share")


@options.with_run_options
def compare(
    given: options.RunOptions,
    runs: _Runs = None,
    agents: _Agents = None,
    steps: _Steps = None,
    split: _Split = None,
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
    window: SplitName = split or "valid"
    if runs:
        values = given._asdict() | {"agents": agents, "steps": steps}
        kept = ("output_dir", "trust_code", "log_level")
        training = [f"--{name}" for name, value in values.items() if value and name not in kept]
        if training:
            raise UsageError(
                f"{', '.join(training)}: nothing is trained where runs are named; only --split, "
                "--output-dir, --trust-code and --log-level go with them. Leave out either the "
                "runs or these."
            )
        set_up_logging(given.log_level)
        compare_trained(runs, window, given.output_dir, given.trust_code or ())
        return
    from echelon.evaluation.comparison import AGENTS, Comparison

    names = tuple(AGENTS)
    if agents is not None:
        names = tuple(name.strip() for name in agents.split(",") if name.strip())
    comparison = open_batch(
        Comparison,
        given,
        lambda place, base: Comparison(place, base, names, _steps(steps or []), split=window),
        *(agents, steps),
        also="--split, --seeds",
        **({} if split is None else {"split": split}),
    )
    with work_through(comparison, given) as course:
        _show_comparison(comparison, course)


def _show_comparison(comparison: Comparison, course: Course) -> None:
    from echelon.report.charts.variants import draw_comparison

    directory, split = comparison.directory, comparison.split
    with err.status("comparing"):
        result = comparison.summarise(course)
    picture = directory / f"comparison-{split}.png"
    picture.unlink(missing_ok=True)  # of an earlier session, perhaps
    result.write(directory, split)
    if result.facts:
        draw_comparison(result, picture)
        print_comparison(result)
        if split == "valid":
            typer.echo(
                "This window chose the checkpoints; nothing can be claimed from it. "
                f"`echelon compare --resume {directory} --split test` looks at the test window."
            )
        typer.echo(f"picture: {picture}")
    typer.echo(f"table: {directory / f'comparison-{split}.csv'}")


def print_comparison(result: ComparisonResult) -> None:
    """Two lines per agent, mean and ± std over seeds, and its Sharpe ratio vs the reference's."""
    shown = [MEASURE_COLUMNS[m].heading for m in _MEASURES]
    sharpe = MEASURE_COLUMNS["sharpe_annual"]
    headings = (sharpe.heading, f"vs {result.reference}\n95 %", *shown)
    table = number_table(_title(result.facts), "agent\nsteps", *headings)
    before = "agent"
    for row in result.rows:
        if row.kind != before:
            table.add_section()
            before = row.kind
        name = f"{row.name}\n{row.steps:,}" if row.kind == "agent" else row.name
        if not row.seeds:
            add_row(table, name, "failed", *("–",) * (len(shown) + 1))
            continue
        gap = ""
        if row.gap is not None:
            bounds = f"{sharpe.format(row.gap.low)} to {sharpe.format(row.gap.high)}"
            gap = f"{sharpe.format_signed(row.gap.estimate)}\n{bounds}"
        cells = [_cell(row, measure) for measure in _MEASURES]
        add_row(table, name, _cell(row, "sharpe_annual"), gap, *cells)
    out.print(table)


def _title(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['split']}: {facts['first']} to {facts['last']}, fills at "
        f"{facts['ledger']['fill']}; mean over seeds, below it ± std"
    )


def _cell(row: MeasuredRow, measure: str) -> str:
    mean, std = row.over_seeds(measure)
    number = MEASURE_COLUMNS[measure].format
    return f"{number(mean)}\n± {number(std)}" if len(row.seeds) > 1 else number(mean)


def _steps(items: list[str]) -> dict[str, int]:
    steps = {}
    for item in items:
        name, _, count = item.partition("=")
        try:
            steps[name.strip()] = int(count.replace("_", ""))
        except ValueError:
            raise UsageError(
                f"--steps {item!r}: expected NAME=N, such as sb3-sac=100000."
            ) from None
    return steps


def compare_trained(
    paths: Sequence[Path],
    split: SplitName,
    output_dir: Path | None,
    trust_code: Sequence[Path] = (),
    *,
    with_rules: bool = True,
) -> None:
    from echelon.envs.world import rules_of
    from echelon.evaluation.runs_comparison import compare_runs, open_runs

    _refuse_taken(output_dir)
    runs = open_runs(paths, split, trust_code)
    if with_rules:
        say_rules(rules_of(runs[0].prepared, runs[0].config).facts())

    def say(run: TrainedRun, why: str) -> None:
        look = "; the registry counts this look" if split == "test" else ""
        typer.echo(f"evaluating {run.path} on {split}: {why}{look}", err=True)

    with err.status("comparing"):
        result = compare_runs(runs, split, on_evaluation=say)
    print_runs(result)
    typer.echo(conclusion(result))
    if output_dir is not None:
        typer.echo(f"result: {result.write(output_dir)}")


def print_runs(result: RunsComparison) -> None:
    """Measures of the runs and the first one's baselines, then the differences."""
    measures = ("sharpe_annual", *_MEASURES)
    headings = [MEASURE_COLUMNS[measure].heading for measure in measures]
    table = number_table(_title(result.facts), "run\nalgo, seeds", *headings)
    for line in result.runs:
        name = f"{line.row.name}\n{line.algo}, {len(line.row.seeds)}"
        add_row(table, name, *(_cell(line.row, measure) for measure in measures))
    table.add_section()
    for row in result.baselines:
        add_row(table, row.name, *(_cell(row, measure) for measure in measures))
    out.print(table)
    gaps = number_table(
        f"Sharpe ratio a year vs {result.first}, each interval 95 % by itself",
        *("run", "difference", "over days\nblock bootstrap", "over seeds\nWelch's t"),
    )
    for line in result.runs:
        if (difference := line.difference) is not None:
            days, seeds = difference.days, difference.seeds
            known = seeds if math.isnan(days.estimate) else days
            signed = MEASURE_COLUMNS["sharpe_annual"].format_signed(known.estimate)
            add_row(gaps, line.row.name, signed, _bounds(days), _bounds(seeds))
    out.print(gaps)


def conclusion(result: RunsComparison) -> str:
    """In a line, whether it may be claimed that a run is better than the first, or worse."""
    from echelon.evaluation.trust import LEAST_BARS
    from echelon.report.texts import Words

    words = Words("en")
    if result.facts["split"] != "test":
        return f"{words('verdict_valid')}."
    if result.returns < LEAST_BARS:
        return words("verdict_few", bars=result.returns, least=LEAST_BARS)
    pairs = [(line.row.name, d) for line in result.runs if (d := line.difference) is not None]
    claims = [_sentence(name, result.first, d, words) for name, d in pairs if d.claimed]
    others = [_sentence(name, result.first, d, words) for name, d in pairs if not d.claimed]
    if not claims:
        return f"Nothing can be claimed: {'; '.join(others)}."
    rest = f" Of the others, nothing: {'; '.join(others)}." if others else ""
    return f"It can be claimed: {'; '.join(claims)}.{rest}"


def _sentence(name: str, first: str, difference: RunDifference, words: Words) -> str:
    """What may be said of a run vs the first, in the words of the reports."""
    standing = difference.standing
    if difference.ahead is None or standing is None:
        if math.isnan(difference.seeds.low):
            return f"{name} or {first} has one seed, and other seeds may turn it round"
        return f"no significant difference between {name} and {first}"
    behind = first if difference.ahead == name else name
    key = "uncounted" if standing.deflated is None else "undeflated"
    tried = words("tried_some") if standing.tried is None else words.count("tried", standing.tried)
    said = words(f"verdict_{'better' if difference.claimed else key}", baseline=behind, tried=tried)
    return f"{difference.ahead} is {said[0].lower()}{said[1:]}"


def _bounds(gap: SharpeGap) -> str:
    if math.isnan(gap.low):
        return "–"
    signed = MEASURE_COLUMNS["sharpe_annual"].format_signed
    return f"{signed(gap.low)} to {signed(gap.high)}"


def _refuse_taken(output_dir: Path | None) -> None:
    from echelon.evaluation.runs_comparison import RUNS_RESULT

    if output_dir is None:
        return
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"--output-dir {output_dir}: is a file. Name a directory.")
    path = output_dir / RUNS_RESULT
    mine = not path.exists()
    with suppress(DamagedError):
        mine = mine or read_json(path, dict[str, Any], "").get("kind") == "runs"
    if not mine:
        raise UsageError(
            f"--output-dir {output_dir}: its {RUNS_RESULT} is not of compared runs; a "
            "comparison that trains agents needs its own to go on. Name another directory."
        )
