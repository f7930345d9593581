"""`echelon runs`: what runs there are, and how they compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.console import add_row, out, titled, warn
from echelon.cli.evaluate import SplitChoice
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
    table = titled(
        "", "run", "command", "finished", "data", "seeds", "best validation", "evaluated"
    )
    paths = sorted(path.parent for path in directory.rglob("run.json"))
    for path in paths:
        try:
            add_row(table, *_line(path))
        except StoreError as error:
            warn(str(error))
    if not paths:
        typer.echo(f"no runs below {directory}")
        return
    out.print(table)


def _line(path: Path) -> tuple[str, ...]:
    from echelon.evaluation.evaluate import evaluated_splits
    from echelon.runs import RunDirectory

    facts = RunDirectory(path).facts()
    outcomes: list[dict[str, Any]] = facts.get("outcomes", [])
    best = ", ".join(f"{o['best_score']:.2f}" for o in outcomes)
    return (
        str(path),
        str(facts.get("command", "")),
        str(facts.get("finished", ""))[:16].replace("T", " "),
        str(facts.get("data", {}).get("name", "")),
        str(len(outcomes) or ""),
        best,
        ", ".join(evaluated_splits(path)),
    )


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Directories of evaluated runs.")],
    split: Annotated[
        SplitChoice, typer.Option("--split", help="Window to compare on.")
    ] = SplitChoice.valid,
) -> None:
    """Compare evaluated runs side by side, mean ± std over seeds."""
    from echelon.evaluation.evaluate import load_evaluation
    from echelon.ops.measures import LABELS

    loaded = {path: load_evaluation(path, split.value) for path in runs}
    table = titled(f"{split.value}, mean ± std over seeds", "measure", *(str(p) for p in runs))
    seeds = [str(len(evaluation.seeds)) for evaluation in loaded.values()]
    add_row(table, "seeds", *seeds)
    for name, label in LABELS.items():
        found = [evaluation.over_seeds(name) for evaluation in loaded.values()]
        add_row(table, label.text, *(label.format(m.mean, m.std) for m in found))
    out.print(table)
    spans = {(e.facts["first"], e.facts["last"]) for e in loaded.values()}
    data = {e.facts["run"]["data"]["content_hash"] for e in loaded.values()}
    if len(spans) > 1 or len(data) > 1:
        warn("these runs traded different windows or different data; the numbers do not compare.")
