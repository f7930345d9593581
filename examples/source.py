"""How to add a source: copy this file to `data/sources`, change what is numbered, and add a test.

The example is whole and works (tests/test_files_source.py runs it). It reads one symbol from a
small text format::

    symbol ACME
    2020-01-02  10.00  10.50   9.90  10.20  12000
    2020-01-03  10.20  10.40  10.10  10.30   9000

A source does three things: it says what it has (`info`), it yields canonical bars in pieces that
fit in memory (`frames`), and it lists what it could not read (`problems`). It does not judge:
negative prices, duplicates and days off the calendar are found by `data.validate`, sorting and
the anchoring of adjustment factors are done by the import. Nothing is dropped in silence: a line
that is no bar becomes a `Problem` with file, row, field and remedy.

To make `data.source: acme` work, add its line to `SOURCES` in sources.py. There is no other
place: what it reads, and whether it is a vendor who delivers more every day, stand in that line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from echelon.data.bars import SCHEMA, RawFrame, conform
from echelon.data.calendars import timezone_of
from echelon.data.sources import PathSource
from echelon.errors import Problem, SourceError
from echelon.sources import SourceInfo

# (1) The canonical names (`bars.SCHEMA`) of what your format holds, in its order. Leave out what
# it lacks: a field that is not there switches features off by name, a made-up one misleads.
_FIELDS = ("open", "high", "low", "close", "volume")


# (2) `PathSource` takes path, calendar and time zone from the `data` section, and answers "none"
# for instruments, membership and benchmark: override what you have. A vendor, who is asked over
# the network, is a subclass of `_vendor.Vendor` instead; what makes its own bars is a `Source`.
class TemplateSource(PathSource):
    """Daily bars of one symbol from a file of the format above."""

    def __init__(self, path: Path, *, calendar: str = "auto", **query: Any) -> None:  # noqa: ANN401
        super().__init__(path, calendar=calendar, **query)
        self._calendar = "XNYS" if calendar == "auto" else calendar
        self._problems: list[Problem] = []

    # (3) What you have, before a bar is read. `price_basis` matters: as traded ("raw"), adjusted
    # for splits, or for splits and dividends ("adjusted"). The fingerprint must change whenever
    # what you would deliver changes, or a stale import is taken for current: hash the content and
    # every option that has an effect.
    def info(self) -> SourceInfo:
        """Describe the file."""
        digest = hashlib.sha256(self._content())
        digest.update(self._calendar.encode())
        return SourceInfo(
            name="template",
            freq="1d",
            calendar=self._calendar,
            timezone=timezone_of(self._calendar),
            price_basis="adjusted",
            fields=frozenset(_FIELDS),
            fingerprint=digest.hexdigest(),
        )

    # (4) The bars. `since` (symbol → last stored time) is for sources that can ask for less, such
    # as a vendor: yield from that bar on, including it. A file may ignore it. A large source
    # yields many pieces; each names its origin, and `row` counts as the user would.
    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """Yield the bars of the file."""
        del since
        self._problems = []
        lines = self._content().decode().splitlines()
        symbol = self._symbol(lines)
        rows = [
            values
            for number, line in enumerate(lines[1:], start=2)
            if line.strip() and (values := self._bar(number, line)) is not None
        ]
        schema = {"row": pl.Int64(), **{c: SCHEMA[c] for c in ("time", *_FIELDS)}}
        frame = pl.DataFrame(rows, schema=schema, orient="row").with_columns(symbol=pl.lit(symbol))
        # `conform` adds the canonical columns that are missing, as nulls, and sets the types.
        yield RawFrame(conform(frame), str(self._path))

    # (5) What could not be read, known once `frames` has run.
    def problems(self) -> list[Problem]:
        """Lines that are no bars."""
        return list(self._problems)

    # (6) What cannot be read at all is a `SourceError` that names the file and the remedy.
    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError as error:
            raise SourceError(f"{self._path}: does not exist. Check data.path.") from error

    def _symbol(self, lines: list[str]) -> str:
        words = lines[0].split() if lines else []
        if len(words) != 2 or words[0] != "symbol":
            raise SourceError(
                f"{self._path}: the first line must be 'symbol NAME', it is "
                f"{lines[0] if lines else ''!r}. Correct it."
            )
        return words[1]

    # (7) Times are naive and local to the exchange: midnight for daily bars, the *end* of the bar
    # for intraday ones, because a bar is known when it ends.
    def _bar(self, number: int, line: str) -> tuple[object, ...] | None:
        """The values of a line, or None and a problem."""
        words = line.split()
        if len(words) != 1 + len(_FIELDS):
            self._note(number, None, f"{len(words)} words, not {1 + len(_FIELDS)}")
            return None
        try:
            time = datetime.strptime(words[0], "%Y-%m-%d")
        except ValueError:
            self._note(number, "time", f"{words[0]!r} is not a date such as 2020-01-02")
            return None
        values = []
        for field, word in zip(_FIELDS, words[1:], strict=True):
            try:
                values.append(float(word))
            except ValueError:
                self._note(number, field, f"{word!r} is not a number")
                return None
        return (number, time, *values)

    def _note(self, row: int, field: str | None, message: str) -> None:
        remedy = "Correct the line, or set it aside with --quarantine"
        self._problems.append(Problem(str(self._path), row, field, message, remedy))


# (8) How the `data` section of a configuration becomes the source.
from_config = TemplateSource.from_config
