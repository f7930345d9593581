"""The command line: Typer for the grammar, Rich for the looks, our errors without tracebacks."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

import echelon
from echelon.cli import (
    ablate,
    compare,
    config,
    data,
    demo,
    evaluate,
    execution,
    export,
    live,
    prepare,
    prove,
    runs,
    train,
    tune,
    walk_forward,
)
from echelon.cli.console import err, fail
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
COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare.prepare,
    "train": train.train,
    "evaluate": evaluate.evaluate,
    "ablate": ablate.ablate,
    "compare": compare.compare,
    "walk-forward": walk_forward.walk_forward,
    "tune": tune.tune,
    "report": evaluate.report,
    "export": export.export,
    "serve": export.serve,
    "prove": prove.prove,
    "study": prove.study,
    "demo": demo.demo,
}
"""Verb → its function. A new one is a function in a module of its own and a line here."""
GROUPS = {
    "data": data.app,
    "config": config.app,
    "runs": runs.app,
    "execution": execution.app,
    "bundle": export.app,
    "live": live.app,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


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


def main() -> None:
    """Run the command line: a user's mistake costs a message and an exit code, no traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 gets a ? for a ×
            stream.reconfigure(errors="replace")
    try:
        for k, word in enumerate(sys.argv[1:], 1):  # it would come back whole in an error message
            if len(word) > _MAX_WORD:
                raise UsageError(
                    f"argument {k} has {len(word):,} characters ({shorten(word, 40)!r}), at most "
                    f"{_MAX_WORD:,} are read. Put long values into a configuration file (--config)."
                )
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
    except Exception as error:  # noqa: BLE001 (the last resort: shown, named a bug, and left with 70)
        if "os error" in str(error):
            # Compiled libraries wrap the system's errors (a full disk) in errors of their own.
            fail("error:", error)
            sys.exit(EchelonError.exit_code)
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's
            fail("error:", f"not enough memory ({str(error) or 'none left'}). {_SMALLER}")
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
