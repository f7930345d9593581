"""Output: results to stdout, everything else to stderr; progress only where someone watches."""

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

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def set_up_logging(level: str) -> None:
    """Send log records at `level` and above to stderr."""
    handler = RichHandler(console=err, show_path=False, show_time=False, markup=False)
    handler.setFormatter(logging.Formatter("%(message)s"))
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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield Bar(progress, label)
