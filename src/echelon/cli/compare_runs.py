"""`echelon compare RUN RUN …`: trained runs on one window, with intervals; nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.compare import MEASURE_COLUMNS, MEASURES, cell
from echelon.cli.console import add_row, err, numbers, out
from echelon.cli.rules import say_rules
from echelon.errors import DamagedError, UsageError
from echelon.files import read_json

if TYPE_CHECKING:
    from echelon.evaluation.comparison import Gap
    from echelon.evaluation.runs_comparison import Difference, RunsComparison
    from echelon.evaluation.test_access import SplitName
    from echelon.training.run import TrainedRun


def compare_trained(
    paths: Sequence[Path],
    split: SplitName,
    output_dir: Path | None,
    training: Mapping[str, object],
    trust_code: Sequence[Path] = (),
    *,
    with_rules: bool = True,
) -> None:
    """Compare, print, and write comparison.json where a directory is named.

    training: options that belong to training, with what was given; trust_code: files of code that
    the runs' configurations name and that may run
    with_rules: say the rules in force, which the runs share
    """
    from echelon.envs.world import rules_of
    from echelon.evaluation.runs_comparison import compare_runs, open_runs

    given = [option for option, value in training.items() if value]
    if given:
        raise UsageError(
            f"{', '.join(given)}: nothing is trained where runs are named; only --split, "
            "--output-dir, --trust-code and --log-level go with them. Leave out either the runs or "
            "these."
        )
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
    facts = result.facts
    title = (
        f"{facts['split']}: {facts['first']} to {facts['last']}, fills at "
        f"{facts['ledger']['fill']}; mean over seeds, below it ± std"
    )
    measures = ("sharpe_annual", *MEASURES)
    headings = [MEASURE_COLUMNS[measure].heading for measure in measures]
    table = numbers(title, "run\nalgo, seeds", *headings)
    for line in result.runs:
        name = f"{line.row.name}\n{line.algo}, {len(line.row.seeds)}"
        add_row(table, name, *(cell(line.row, measure) for measure in measures))
    table.add_section()
    for row in result.baselines:
        add_row(table, row.name, *(cell(row, measure) for measure in measures))
    out.print(table)
    less = numbers(
        f"Sharpe ratio a year less that of {result.first}, each interval 95 % by itself",
        *("run", "difference", "over days\nblock bootstrap", "over seeds\nWelch's t"),
    )
    for line in result.runs:
        if (found := line.difference) is not None:
            known = found.seeds if math.isnan(found.days.estimate) else found.days
            shown = (_signed(known.estimate), _bounds(found.days), _bounds(found.seeds))
            add_row(less, line.row.name, *shown)
    out.print(less)


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
    claims = [_sentence(name, result.first, d) for name, d in pairs if d.claimed]
    others = [_sentence(name, result.first, d) for name, d in pairs if not d.claimed]
    if not claims:
        return f"Nothing can be claimed: {'; '.join(others)}."
    rest = f" Of the others, nothing: {'; '.join(others)}." if others else ""
    return f"It can be claimed: {'; '.join(claims)}.{rest}"


def _sentence(name: str, first: str, difference: Difference) -> str:
    """What may be said of a run beside the first, in the words of the reports."""
    from echelon.report.texts import Words

    words, found = Words("en"), difference.standing
    if difference.ahead is None or found is None:
        if math.isnan(difference.seeds.low):
            return f"{name} or {first} has one seed, and other seeds may turn it round"
        said = words("verdict_same", baseline=first)
        return f"{name} is {_within(said)}"
    behind = first if difference.ahead == name else name
    key = "uncounted" if found.deflated is None else "undeflated"
    tried = words("tried_some") if found.tried is None else words.count("tried", found.tried)
    said = words(f"verdict_{'better' if difference.claimed else key}", baseline=behind, tried=tried)
    return f"{difference.ahead} is {_within(said)}"


def _within(sentence: str) -> str:
    """A sentence inside another."""
    return sentence[0].lower() + sentence[1:]


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + MEASURE_COLUMNS["sharpe_annual"].format(value)


def _bounds(gap: Gap) -> str:
    return "–" if math.isnan(gap.low) else f"{_signed(gap.low)} to {_signed(gap.high)}"


def _refuse_taken(output_dir: Path | None) -> None:
    """Refuse a directory whose comparison.json says how to go on with a training."""
    from echelon.evaluation.runs_comparison import RESULT

    if output_dir is None:
        return
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"--output-dir {output_dir}: is a file. Name a directory.")
    path = output_dir / RESULT
    if not path.exists():
        return
    try:
        mine = read_json(path, dict[str, Any], "").get("kind") == "runs"
    except DamagedError:
        mine = False
    if not mine:
        raise UsageError(
            f"--output-dir {output_dir}: its {RESULT} is not of compared runs; a comparison that "
            "trains agents needs its own to go on. Name another directory."
        )
