"""`echelon tune`: search settings within ranges, on the validation window."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from echelon.cli import options
from echelon.cli.batch import open_batch, run_steps
from echelon.cli.console import add_row, err, number_table, out
from echelon.errors import Stopped, UsageError

if TYPE_CHECKING:
    from echelon.config import Config
    from echelon.evaluation.tuning import Tuning, TuningResult

_SHOWN = 10


@options.with_run_options
def tune(
    given: options.RunOptions,
    ranges: Annotated[
        Path | None,
        typer.Option("--ranges", help="YAML: key: {low, high, log, step} or key: [value, …]."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="How many in all; default: 20.")
    ] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            "--generation",
            min=1,
            help="Trials that are asked for together; default: 4. The search depends on it, and "
            "not on --workers.",
        ),
    ] = None,
    sampler: Annotated[
        Literal["tpe", "random"] | None, typer.Option("--sampler", help="Default: tpe.")
    ] = None,
    pruner: Annotated[
        Literal["median", "hyperband", "halving", "none"] | None,
        typer.Option("--pruner", help="Which ends trials early; default: median."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option("--storage", help="URL of the study; default: SQLite in the directory."),
    ] = None,
) -> None:
    """Search settings within declared ranges, by how agents do on the validation window.

    Every trial is trained, and entered into the registry of trials, so that a claim made later is
    deflated by all of them. The test window is not touched. Ctrl-C stops in order, and `--resume`
    goes on, also with more --trials.
    """
    from echelon.evaluation.tuning import Tuning, import_optuna, read_ranges
    from echelon.report.tuning import write_tuning_report

    import_optuna()

    def make(place: Path, base: Config) -> Tuning:
        if ranges is None:
            raise UsageError("name the file of what to search: --ranges ranges.yaml.")
        return Tuning(
            place,
            base,
            read_ranges(ranges, base),
            trials or 20,
            generation or 4,
            sampler or "tpe",
            pruner or "median",
            storage,
        )

    changes = {} if trials is None else {"n_trials": trials}
    own = (ranges, generation, sampler, pruner, storage)
    tuning = open_batch(Tuning, given, make, *own, also="--trials, --seeds", **changes)
    result = search(tuning, given)
    page = write_tuning_report(tuning.directory)
    print_tuning(result, tuning)
    typer.echo(f"report: {page}")


def search(tuning: Tuning, given: options.RunOptions) -> TuningResult:
    """Ask, train and tell until there are as many trials as are wanted; write what came of it."""
    from dataclasses import replace

    from echelon.config.sizes import refuse_sizes
    from echelon.evaluation.batch import Course

    refuse_sizes(tuning.base)
    with tuning.lock():
        if given.resume is None:
            tuning.make_room(overwrite=given.overwrite)
        tuning = replace(tuning, trials=() if given.resume is None else tuning.trials)
        tuning.save()
        study = tuning.open_study()
        base = options.on_engine(tuning.base, given)
        with options.working_on(base, given.workers):
            while (batch := tuning.ask(study)) is not None:
                known = {trial.number: trial for trial in (*tuning.trials, *batch.trials)}
                tuning = replace(tuning, trials=tuple(known.values()))
                tuning.save()
                err.print(f"trials {batch.trials[0].number} to {batch.trials[-1].number}")
                course = Course()
                try:
                    run_steps(
                        batch,
                        course,
                        given,
                        batch.pruning(study),
                        partial(batch.note_progress, study),
                    )
                except KeyboardInterrupt:
                    course.stopped = True
                if course.stopped:
                    raise Stopped(
                        f"trial {batch.trials[0].number} of {tuning.n_trials}. Go on with: echelon "
                        f"tune --resume {tuning.directory}{options.trust_flags(tuning.base)}"
                    )
                for errors in course.errors.values():
                    for error in errors:
                        err.print(f"a trial failed: {error}", soft_wrap=True, markup=False)
                batch.tell(study, course)
        result = tuning.summarise(study)
        tuning.keep_result(result)
    return result


def print_tuning(result: TuningResult, tuning: Tuning) -> None:
    """The best trials, and what to do with the first."""
    count = {state: sum(t.state == state for t in result.trials) for state in ("pruned", "fail")}
    title = (
        f"{len(result.trials)} trials: {result.complete} complete, {count['pruned']} pruned, "
        f"{count['fail']} failed; validation {tuning.base.train.select_by}, mean over seeds"
    )
    table = number_table(title, "trial", "value", *(r.key for r in result.ranges))
    for trial in result.ranked[: min(_SHOWN, result.complete)]:
        cells = (_cell(trial.settings.get(r.key)) for r in result.ranges)
        add_row(table, trial.trial.name, _cell(trial.value), *cells)
    out.print(table)
    directory = tuning.directory
    typer.echo(f"picture: {directory / 'tuning.png'}")
    typer.echo(f"table: {directory / 'tuning.csv'}")
    if (best := result.best) is not None:
        run = directory / "trials" / best.trial.name
        typer.echo(f"best: {run} ({', '.join(best.trial.overrides)})")
        typer.echo(
            "The validation window chose it among all trials, by which its test is deflated. next: "
            f"echelon evaluate {run} --split test"
        )


def _cell(value: object) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.3g}"
    return str(value)
