"""Everything Echelon raises on purpose, in one tree.

::

    EchelonError                 exit 1   anything below; catch this to catch all of ours
    ├── UsageError               exit 2   a flag or an argument that cannot be used
    ├── ConfigError              exit 3   the configuration: unknown key, bad value, bad file
    ├── DataError                exit 4   the user's data
    │   ├── SourceError                   a source cannot be read or reached
    │   ├── InvalidDataError              rows or columns are wrong; carries the list of problems
    │   ├── UniverseError                 an unknown symbol, or membership that cannot be used
    │   └── StaleBarsError                bars of a time that was decided on, or has gone by
    ├── StoreError               exit 5   the store, a run directory or a prepared set on disk
    │   └── DamagedError                  a file of ours is missing, or not what it should be
    ├── FeatureError             exit 6   a factor that is unknown, misdeclared or misbehaves
    ├── LeakageError             exit 7   something before a cut depends on what comes after it
    ├── TrainingError            exit 8   training cannot go on: a loss is not a number
    └── Stopped                  exit 130 Ctrl-C stopped it in an orderly way; it can be resumed
                                 exit 143 the same after SIGTERM

A message says what was expected, what was found and what to do; it is printable, and bounded in
lines and length, whatever a file held. The CLI prints the message without a traceback and leaves
with the exit code; 130 is Ctrl-C, 143 is SIGTERM, 70 a bug of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE = 10_000
"""Characters of a message."""


class EchelonError(Exception):
    """Root of all errors a user can cause and mend."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        """The message, printable and bounded: a part of it may be a stranger's."""
        return bound_message(super().__str__())


class UsageError(EchelonError):
    """A flag or argument that cannot be used as given."""

    exit_code = 2


class ConfigError(EchelonError):
    """The configuration cannot be used."""

    exit_code = 3


class DataError(EchelonError):
    """The user's data cannot be used."""

    exit_code = 4


class SourceError(DataError):
    """A source cannot be read or reached."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a user's data, and where.

    `row` counts as the user would: the line of a text file (the header is line 1), the 0-based
    row of a Parquet file, `None` where the whole file or column is meant.
    """

    file: str
    row: int | None
    field: str | None
    message: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        place = self.file
        if self.row is not None:
            place += f", row {self.row}"
        if self.field is not None:
            place += f", field {self.field!r}"
        # Cells of a stranger's file may be as long as the file.
        return f"{place}: {shorten(self.message, 600)}. {self.remedy}"


class InvalidDataError(DataError):
    """Rows or columns are wrong. `problems` lists every one that was found."""

    def __init__(self, problems: Sequence[Problem], summary: str = "") -> None:
        self.problems = tuple(problems)
        shown = [str(p) for p in self.problems[:20]]
        if len(self.problems) > len(shown):
            shown.append(f"… and {len(self.problems) - len(shown)} more")
        head = summary or f"{len(self.problems)} problem(s) in the data"
        super().__init__("\n".join([head, *shown]))


class UniverseError(DataError):
    """An unknown symbol, or membership that cannot be used."""


class StaleBarsError(DataError):
    """Bars of a time that was decided on already, or has gone by."""


class StoreError(EchelonError):
    """The store, a run directory or a prepared set on disk is missing or damaged."""

    exit_code = 5


class DamagedError(StoreError):
    """A file that Echelon wrote is missing, damaged, or holds something else than it should.

    path: the file. what: what is wrong with it, in a few words. remedy: what to do, a sentence
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        self.path = path
        self.what = shorten(what)
        self.remedy = remedy
        super().__init__(f"{path}: missing or damaged ({self.what}). {remedy}")


def shorten(text: object, limit: int = 300) -> str:
    """`text` in one line of at most `limit` characters, printable: for what a stranger wrote."""
    plain = printable(" ".join(str(text).split()))
    return plain if len(plain) <= limit else f"{plain[: limit - 1]}…"


def printable(text: str) -> str:
    """`text` without what a terminal would obey or nobody would see; its lines stay.

    Escape sequences, marks that turn the direction of writing and characters of no width can make
    a table show what is not in it.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def bound_message(text: str, lines: int = 60, length: int = MAX_MESSAGE) -> str:
    """`text`, printable, of at most so many lines and characters: it may quote a file."""
    rows = text.split("\n")
    plain = printable("\n".join(rows[:lines]))
    if len(plain) > length:
        plain = f"{plain[:length]} … ({len(plain) - length:,} more characters)"
    return plain if len(rows) <= lines else f"{plain}\n… and {len(rows) - lines:,} more lines"


class FeatureError(EchelonError):
    """A factor that is unknown, misdeclared or misbehaves; `feature` is its name, if any."""

    exit_code = 6

    def __init__(self, message: str, feature: str = "") -> None:
        self.feature = feature
        super().__init__(message)


class LeakageError(EchelonError):
    """Something before a cut depends on what comes after it."""

    exit_code = 7


class TrainingError(EchelonError):
    """Training cannot go on."""

    exit_code = 8


class WorkersLostError(TrainingError):
    """Processes that others depend on ended: elsewhere, or later, they may live."""


class Stopped(EchelonError):
    """Ctrl-C or SIGTERM (143) stopped the work in an orderly way; the message says how to go on."""

    exit_code = 130
