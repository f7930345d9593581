"""What one sees of trainings that run side by side: bars on a terminal, else a line now and then.

A few trainings have a bar each from the start. Of many, only those that are running have one, and
a line above them counts all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from echelon.cli.console import err

if TYPE_CHECKING:
    from echelon.training.loop import Outcome
    from echelon.training.loop import Progress as Standing

_FEW = 8


class Watch:
    """The display; trainings are numbered in the order they were named."""

    def __init__(self, bars: Progress, labels: Sequence[str], totals: Sequence[int]) -> None:
        self._bars = bars
        self._labels = labels
        self._totals = totals
        self._many = len(labels) > _FEW
        self._started = time.monotonic()
        self._begun_at: dict[int, int] = {}
        self._steps = dict.fromkeys(range(len(labels)), 0)
        self._ended: set[int] = set()
        self._told: dict[int, int] = {}
        self._tasks: dict[int, TaskID] = {}
        self._overall: TaskID | None = None
        if self._many:
            self._overall = bars.add_task(
                "all trainings", total=sum(totals), standing=self._count()
            )
        else:
            for k in range(len(labels)):
                self._add(k)

    def progress(self, k: int, now: Standing) -> None:
        """Show where training k stands."""
        if k not in self._tasks:
            self._add(k)
        self._begun_at.setdefault(k, now.step)
        self._steps[k] = now.step
        self._bars.update(self._tasks[k], completed=now.step, standing=_brief(now))
        self._show_overall()
        tenth = now.step * 10 // now.total
        if self._bars.disable and not self._many and tenth > self._told.get(k, 0):
            self._told[k] = tenth
            err.print(f"{self._labels[k]}: {now.step:,} steps, {_words(now)}", soft_wrap=True)

    def ended(self, k: int, outcome: Outcome) -> None:
        """Show that training k ended, or had ended before."""
        self._ended.add(k)
        self._begun_at.setdefault(k, self._totals[k])
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
        made = sum(self._steps[k] - begun for k, begun in self._begun_at.items())
        if not made:
            return text
        left = sum(self._totals) - sum(self._steps.values())
        return f"{text}, {clock(left * (time.monotonic() - self._started) / made)} left"


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


def _words(now: Standing) -> str:
    """Pace, reward, validation score and time left."""
    score, best = _scores(now)
    return (
        f"{now.steps_per_second:,.0f} steps/s, reward {now.reward * 1e4:+.1f} bp, "
        f"validation {score} (best {best}), {clock(now.seconds_left)} left"
    )


def _brief(now: Standing) -> str:
    """The same for a bar, beside which there is little room."""
    score, best = _scores(now)
    return (
        f"{now.steps_per_second:,.0f} steps/s {now.reward * 1e4:+.1f} bp "
        f"valid {score} (best {best}) {clock(now.seconds_left)} left"
    )


def _scores(now: Standing) -> tuple[str, str]:
    score, best = ("–" if math.isnan(v) else f"{v:.2f}" for v in (now.score, now.best))
    return score, best


def clock(seconds: float) -> str:
    """`3:05`, or `2:03:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
