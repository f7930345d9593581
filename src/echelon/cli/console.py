"""Output: results to stdout, everything else to stderr; progress only where someone watches.

Paths, symbols and names are the user's, or a stranger's. They may hold square brackets, which Rich
would read as markup, and control characters, which a terminal would obey: text goes through
`warn`, `fail`, `text_table` and `add_row` here, which print it as it is, as far as it is printable.

Trainings that run side by side are shown by `watching`: bars on a terminal, else a line now and
then. A few trainings have a bar each from the start. Of many, only those that are running have one,
and a line above them counts all. The rules in force are one line on stderr (`say_rules`), said by
all commands that trade or work orders.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from echelon.errors import ConfigError, bound_message, printable

if TYPE_CHECKING:
    from echelon.config.alerts import AlertsConfig
    from echelon.monitoring.alerts import Alerter
    from echelon.training.loop import Outcome
    from echelon.training.loop import Progress as Standing

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    fail("warning:", text, style="yellow")


def fail(label: str, text: object, *, style: str = "bold red") -> None:
    err.print(Text.assemble((label, style), " ", bound_message(str(text))), soft_wrap=True)


def text_table(title: str, *columns: str) -> Table:
    """An empty table; what does not fit into a cell goes on in the next line."""
    table = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    return table


def number_table(title: str, *columns: str) -> Table:
    """An empty table of names, in the first column, and numbers, which are aligned."""
    table = text_table(title, *columns)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def add_row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(printable(cell)) for cell in cells))


class _Printable(logging.Formatter):
    """The message alone, printable: it may name symbols, columns and files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging(level: str) -> None:
    """Send log records at `level` and above to stderr, each message once."""
    seen: set[str] = set()

    def first_time(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in seen
        seen.add(text)
        return new

    handler = RichHandler(console=err, show_path=False, show_time=False, markup=False)
    handler.addFilter(first_time)
    handler.setFormatter(_Printable("%(message)s"))
    root = logging.getLogger("echelon")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False


class ProgressBar:
    """A progress bar one can set from callbacks."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None)

    def show(self, done: int, total: int | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def label(self, text: str) -> None:
        self._progress.update(self._task, description=text)


@contextmanager
def progress_bar(label: str) -> Iterator[ProgressBar]:
    """A bar on stderr that goes away at the end; nothing at all where stderr is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield ProgressBar(progress, label)


class Watch:
    """The display; trainings are numbered in the order they were named."""

    def __init__(self, bars: Progress, labels: Sequence[str], totals: Sequence[int]) -> None:
        self._bars = bars
        self._labels = labels
        self._totals = totals
        self._many = len(labels) > 8  # fewer have a bar each from the start
        self._start = time.monotonic()
        self._started_at: dict[int, int] = {}
        self._steps = dict.fromkeys(range(len(labels)), 0)
        self._ended: set[int] = set()
        self._tenths_said: dict[int, int] = {}
        self._tasks: dict[int, TaskID] = {}
        self._overall: TaskID | None = None
        if self._many:
            total, standing = sum(totals), self._count()
            self._overall = bars.add_task("all trainings", total=total, standing=standing)
        else:
            for k in range(len(labels)):
                self._add(k)

    def progress(self, k: int, now: Standing) -> None:
        """Show where training k stands."""
        if k not in self._tasks:
            self._add(k)
        self._started_at.setdefault(k, now.step)
        self._steps[k] = now.step
        self._bars.update(self._tasks[k], completed=now.step, standing=_words(now, brief=True))
        self._show_overall()
        tenth = now.step * 10 // now.total
        if self._bars.disable and not self._many and tenth > self._tenths_said.get(k, 0):
            self._tenths_said[k] = tenth
            err.print(f"{self._labels[k]}: {now.step:,} steps, {_words(now)}", soft_wrap=True)

    def end(self, k: int, outcome: Outcome) -> None:
        self._ended.add(k)
        self._started_at.setdefault(k, self._totals[k])
        self._steps[k] = self._totals[k]
        if not self._many:
            self._bars.update(self._tasks[k], completed=self._totals[k], standing="done")
            return
        if k in self._tasks:
            self._bars.remove_task(self._tasks.pop(k))
        self._show_overall()
        if self._bars.disable:
            err.print(
                f"{self._labels[k]}: {outcome.step:,} steps, best validation "
                f"{outcome.best_score:.2f} at {outcome.best_step:,} ({self._count()})",
                soft_wrap=True,
            )

    def _add(self, k: int) -> None:
        label = self._labels[k]
        self._tasks[k] = self._bars.add_task(label, total=self._totals[k], standing="waiting")

    def _show_overall(self) -> None:
        if self._overall is not None:
            done = sum(self._steps.values())
            self._bars.update(self._overall, completed=done, standing=self._count())

    def _count(self) -> str:
        text = f"{len(self._ended)} of {len(self._labels)} done"
        made = sum(self._steps[k] - start for k, start in self._started_at.items())
        if not made:
            return text
        left = sum(self._totals) - sum(self._steps.values())
        return f"{text}, {clock(left * (time.monotonic() - self._start) / made)} left"


@contextmanager
def watching(labels: Sequence[str], totals: Sequence[int]) -> Iterator[Watch]:
    """Show trainings by these names, of so many steps each."""
    # No column for the time gone by: with it, a line is wider than a terminal of 80.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[standing]}", markup=False),
    )
    bars = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    with bars:
        yield Watch(bars, labels, totals)


def _words(now: Standing, *, brief: bool = False) -> str:
    """Pace, reward, validation score and time left; brief: for a bar, which has little room."""
    score, best = ("–" if math.isnan(v) else f"{v:.2f}" for v in (now.score, now.best))
    pace, reward = f"{now.steps_per_second:,.0f} steps/s", f"{now.reward * 1e4:+.1f} bp"
    left = f"{clock(now.seconds_left)} left"
    if brief:
        return f"{pace} {reward} valid {score} (best {best}) {left}"
    return f"{pace}, reward {reward}, validation {score} (best {best}), {left}"


def clock(seconds: float) -> str:
    """`3:05`, or `2:03:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def open_alerter(config: AlertsConfig, source: str, *, needed: bool = True) -> Alerter:
    """Who sends the alerts of a configuration, in its language. source: what they are of

    needed: False where the configuration is a run's, whose addresses this machine may not have
    """
    from echelon.config.alerts import AlertsConfig
    from echelon.monitoring.alerts import Alerter
    from echelon.report.texts import Words

    try:
        return Alerter(config, source, Words(config.language).alert)
    except ConfigError as error:
        if needed:
            raise
        warn(f"no alerts are sent: {error}")
        return Alerter(AlertsConfig())


def say_rules(facts: Mapping[str, Any], of: str = "") -> None:
    """Those of the market. facts: as run.json keeps them; of: whose, where there are several"""
    from echelon.report.rules import rules_line
    from echelon.report.texts import Words

    say_line(rules_line(facts, Words("en")), of)


def say_execution_rules(rules: Mapping[str, Any], price: str) -> None:
    """Those by which orders are worked. rules: as the fields of `ExecutionRules`"""
    from echelon.report.rules import execution_line
    from echelon.report.texts import Words

    say_line(execution_line(rules, price, Words("en")))


def say_line(line: str, of: str = "") -> None:
    """Any others; who asks for less with --log-level has it."""
    if logging.getLogger("echelon").isEnabledFor(logging.INFO):
        err.print(Text(f"rules{f' of {of}' if of else ''}: {line}"), soft_wrap=True)
