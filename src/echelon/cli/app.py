"""The command line: Typer for the grammar, Rich for the looks, our errors without tracebacks."""

from __future__ import annotations

import io
import sys
import traceback
from typing import Annotated, NoReturn

import typer

import echelon
from echelon.cli import (
    ablate,
    compare,
    config,
    demo,
    evaluate,
    execution,
    prepare,
    prove,
    runs,
    study,
    train,
    walk_forward,
)
from echelon.cli.console import err, fail
from echelon.cli.data import app as data_app
from echelon.errors import EchelonError, Stopped, UsageError, shorten
from echelon.stopping import exit_code, interruptible

_SMALLER = (
    "Ask for less: fewer assets, books or workers, a narrower network, a smaller replay buffer."
)

_MAX_WORD = 8_000
"""Characters of an argument: some hundred symbols."""

app = typer.Typer(
    name="echelon",
    help="Hierarchical reinforcement-learning trading on one market kernel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(data_app, name="data")
app.add_typer(config.app, name="config")
app.command("prepare")(prepare.prepare)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("ablate")(ablate.ablate)
app.command("compare")(compare.compare)
app.command("walk-forward")(walk_forward.walk_forward)
app.command("report")(evaluate.report)
app.add_typer(runs.app, name="runs")
app.add_typer(execution.app, name="execution")
app.command("prove")(prove.prove)
app.command("study")(study.study)
app.command("demo")(demo.demo)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"echelon {echelon.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Take options that go before the command."""


def _refuse_long_words(words: list[str]) -> None:
    """Refuse what would come back whole in an error message."""
    for k, word in enumerate(words, 1):
        if len(word) > _MAX_WORD:
            raise UsageError(
                f"argument {k} has {len(word):,} characters ({shorten(word, 40)!r}), at most "
                f"{_MAX_WORD:,} are read. Put long values into a configuration file (--config)."
            )


def main() -> None:
    """Run the command line.

    A user's mistake costs one message and an exit code (see `echelon.errors`), never a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 gets a ? for a ×
            stream.reconfigure(errors="replace")
    try:
        _refuse_long_words(sys.argv[1:])
        with interruptible():
            app()
    except Stopped as stopped:
        fail("stopped:", stopped, style="bold")
        sys.exit(exit_code())
    except EchelonError as error:
        fail("error:", error)
        sys.exit(error.exit_code)
    except OSError as error:
        # A full disk, a directory that may not be written: the user's to mend, not ours.
        place = f" {error.filename}" if error.filename else ""
        fail("error:", f"{error.strerror or error}{place}")
        sys.exit(EchelonError.exit_code)
    except MemoryError as error:
        fail("error:", f"not enough memory ({error or 'none left'}). {_SMALLER}")
        sys.exit(EchelonError.exit_code)
    except Exception as error:  # noqa: BLE001 (the last resort: shown, named a bug, and left with 70)
        if "os error" in str(error):
            # Compiled libraries wrap the system's errors (a full disk) in errors of their own.
            fail("error:", error)
            sys.exit(EchelonError.exit_code)
        if "can't allocate memory" in str(error):  # torch's
            fail("error:", f"not enough memory ({error}). {_SMALLER}")
            sys.exit(EchelonError.exit_code)
        traceback.print_exc()
        err.print(
            "[bold red]bug:[/] this should not happen. Please report it with the lines above and "
            "what you ran."
        )
        sys.exit(70)
    except KeyboardInterrupt:  # before click, which makes it an exit of 130, was at work
        _leave_interrupted()
    except SystemExit as leave:
        if leave.code == 130:
            _leave_interrupted()
        raise


def _leave_interrupted() -> NoReturn:
    err.print("\n[bold]interrupted:[/] nothing half-done was kept; run it again to go on.")
    sys.exit(exit_code())
