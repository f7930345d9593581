"""Output: results to stdout, everything else to stderr; progress only where someone watches.

Paths, symbols and names are the user's, or a stranger's. They may hold square brackets, which Rich
would read as markup, and control characters, which a terminal would obey: text goes through
`warn`, `fail`, `titled` and `add_row` here, which print it as it is, as far as it is printable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from echelon.errors import bound_message, printable

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    fail("warning:", text, style="yellow")


def fail(label: str, text: object, *, style: str = "bold red") -> None:
    """Print `label`, in `style`, and what happened to stderr."""
    err.print(Text.assemble((label, style), " ", bound_message(str(text))), soft_wrap=True)


def titled(title: str, *columns: str) -> Table:
    """An empty table; what does not fit into a cell goes on in the next line."""
    table = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    return table


def numbers(title: str, *columns: str) -> Table:
    """An empty table of names, in the first column, and numbers, which are aligned."""
    table = titled(title, *columns)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


class _Once(logging.Filter):
    """Lets a message through the first time only: many runs of one dataset would repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self._seen
        self._seen.add(text)
        return new


class _Printable(logging.Formatter):
    """The message alone, printable: it may name symbols, columns and files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging(level: str) -> None:
    """Send log records at `level` and above to stderr, each message once."""
    handler = RichHandler(console=err, show_path=False, show_time=False, markup=False)
    handler.addFilter(_Once())
    handler.setFormatter(_Printable("%(message)s"))
    root = logging.getLogger("echelon")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


class Bar:
    """A progress bar one can set from callbacks."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None)

    def count(self, done: int) -> None:
        """Show how many are done, the total not being known."""
        self._progress.update(self._task, completed=done)

    def of(self, done: int, total: int) -> None:
        """Show how many of how many are done."""
        self._progress.update(self._task, completed=done, total=total)

    def label(self, text: str) -> None:
        """Change what is being done."""
        self._progress.update(self._task, description=text)


@contextmanager
def progress_bar(label: str) -> Iterator[Bar]:
    """A bar on stderr that goes away at the end; nothing at all where stderr is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield Bar(progress, label)
