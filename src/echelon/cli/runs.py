"""`echelon runs`: what runs there are, and how they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.console import add_row, out, text_table, warn
from echelon.cli.evaluate import Split
from echelon.errors import StoreError, UsageError

app = typer.Typer(help="List runs and compare them.", no_args_is_help=True)


@app.command("list")
def list_(
    directory: Annotated[
        Path, typer.Argument(help="Directory of runs; looked through to any depth.")
    ] = Path("runs"),
) -> None:
    """List the runs below a directory."""
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory. Name the one your runs are in.")
    heads = ("run, and its data", "command", "finished", "best validation", "evaluated")
    table = text_table("", *heads)
    paths = sorted(path.parent for path in directory.rglob("run.json"))
    for path in paths:
        try:
            add_row(table, *_line(path, directory))
        except StoreError as error:
            warn(str(error))
    if not paths:
        typer.echo(f"no runs below {directory}")
        return
    out.print(table)


def _line(path: Path, parent: Path) -> tuple[str, ...]:
    from echelon.ops.measures import mean_std
    from echelon.runs import RunDirectory

    run = RunDirectory(path)
    facts = run.facts()
    scores, best = [outcome["best_score"] for outcome in facts.get("outcomes", [])], ""
    if scores:
        mean, std = (round(value, 2) + 0.0 for value in mean_std(scores))  # never -0.00
        several = len(scores) > 1
        best = f"{mean:.2f} ± {std:.2f}\n{len(scores)} seeds" if several else f"{mean:.2f}\n1 seed"
    return (
        f"{path.relative_to(parent)}\n{facts.get('data', {}).get('name', '')}",
        str(facts.get("command", "")),
        str(facts.get("finished", ""))[:16].replace("T", "\n"),
        best,
        "\n".join(run.evaluated_splits()),
    )


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Directories of evaluated runs.")],
    split: Annotated[Split, typer.Option("--split", help="Window to compare on.")] = "valid",
) -> None:
    """Compare evaluated runs side by side, mean ± std over seeds."""
    from echelon.evaluation.evaluate import load_evaluation
    from echelon.ops.measures import LABELS

    loaded = [load_evaluation(path, split) for path in runs]
    table = text_table(f"{split}, mean ± std over seeds", "measure", *(str(p) for p in runs))
    add_row(table, "seeds", *(str(len(evaluation.seeds)) for evaluation in loaded))
    for name, label in LABELS.items():
        values = [evaluation.over_seeds(name) for evaluation in loaded]
        add_row(table, label.text, *(label.format(m.mean, m.std) for m in values))
    out.print(table)
    spans = {(e.facts["first"], e.facts["last"]) for e in loaded}
    data = {e.facts["run"].get("data", {}).get("content_hash") for e in loaded}
    if len(spans) > 1 or len(data) > 1:
        warn("these runs traded different windows or different data; the numbers do not compare.")
