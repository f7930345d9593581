"""Bars of a store and messages of a file, as a feed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import numpy as np

from echelon.data.build import PanelRequest, read_bar_sets, stream_facts
from echelon.data.store import Store
from echelon.data.stream import BarSet
from echelon.errors import DataError, UsageError
from echelon.files import Closing, atomic_file
from echelon.live.feeds import MAX_BYTES, Address, Message
from echelon.live.feeds.messages import BarSetWriter, read_message, refuse
from echelon.serving.bundle import Bundle
from echelon.serving.engine import bundle_request

_PLACES = 1 << 21
"""Offsets of a bar set's messages: more than any has."""
_CHUNK = 1 << 19
_LOOK_SECONDS = 0.05


class StoredBars:
    """The bars of a bundle's symbols in a store, behind a time."""

    def __init__(self, store: Store, name: str, request: PanelRequest) -> None:
        self._store, self._name, self._request = store, name, request

    @staticmethod
    def from_bundle(bundle: Bundle, store: Path) -> StoredBars:
        """Those that the bundle was made for."""
        name = bundle.universe["dataset"]["name"]
        return StoredBars(Store(store).pin_dataset(name), name, bundle_request(bundle))

    def sets(self, after: datetime) -> Iterator[BarSet]:
        return read_bar_sets(self._store, self._name, self._request, after)

    def writer(self, after: datetime) -> BarSetWriter:
        facts = stream_facts(self._store, self._name, self._request, after)
        return BarSetWriter(facts.kind.symbols, facts)


def open_store(address: Address, bundle: Bundle, store: Path) -> StoreFeed:
    """`store[:PATH][?speed=60|realtime]`."""
    address.refuse_options("speed")
    text = address.options.get("speed")
    speed = math.inf
    if text is not None:
        try:
            speed = 1.0 if text == "realtime" else float(text)
        except ValueError:
            speed = math.nan
        if not speed > 0:
            raise UsageError(f"store: speed={text}: expected a number above 0, or realtime.")
    place = Path(address.place) if address.place else store
    return StoreFeed(StoredBars.from_bundle(bundle, place), speed)


class StoreFeed(Closing):
    """Stored bars, a set at a time, at `speed` times the time that passed between them.

    An offset is a bar's time in minutes and a place among the messages of that time, so it means
    the same whatever the store holds before.
    """

    live = False
    sources = ("store",)

    def __init__(self, bars: StoredBars, speed: float = math.inf) -> None:
        self._bars, self._speed = bars, speed
        self._sets: Iterator[BarSet] = iter(())
        self._next: BarSet | None = None
        self._begin: tuple[np.datetime64, float] | None = None
        self._first = 0
        self.ended = False

    def start(self, offsets: Mapping[str, int], after: np.datetime64) -> None:
        """Begin behind `after`, and at the offset."""
        behind = datetime.min if np.isnat(after) else after.astype("datetime64[us]").item()
        self._first = offsets.get("store", 0)
        self._writer, self._sets = self._bars.writer(behind), self._bars.sets(behind)
        self._next, self._begin, self.ended = None, None, False

    def poll(self, seconds: float) -> list[Message]:
        """The messages of the next bar set, when it is due."""
        if self._next is None:
            self._next = next(self._sets, None)
        if self._next is None:
            self.ended = True
            return []
        wait = self._seconds_until(self._next.time)
        if wait > 0:
            time.sleep(min(wait, seconds))
            if wait > seconds:
                return []
        bars, self._next = self._next, None
        start = int(bars.time.astype("datetime64[m]").astype(np.int64)) * _PLACES
        messages = (
            Message("store", offset, kind, bars.time, body)
            for offset, (kind, body) in enumerate(self._writer.bodies(bars), start)
        )
        return [message for message in messages if message.offset >= self._first]

    def _seconds_until(self, at: np.datetime64) -> float:
        now = time.monotonic()
        if self._begin is None:
            self._begin = at, now
        first, began = self._begin
        passed = (at - first).astype("timedelta64[us]").astype(np.int64) / 1e6
        return float(began + passed / self._speed - now)

    def hold(self, sources: frozenset[str]) -> None:
        """There is one source, which is ahead of none."""

    def close(self) -> None:
        """Nothing is open."""


def open_file(address: Address, _bundle: Bundle, _store: Path) -> FileFeed:
    """`file:PATH[?mode=once|history|live]`."""
    address.refuse_options("mode")
    path = Path(address.place)
    if not path.is_file():
        raise UsageError(f"--feed {address.text}: no such file. `echelon live publish` makes one.")
    return FileFeed(path, address.mode("once"))


class FileFeed(Closing):
    """Lines of messages; an offset is the number of a line, counted from 0.

    A file may grow while it is read. A line is read when its end is there; only of a file that is
    read once, what stands behind the last end of a line counts too.
    """

    def __init__(self, path: Path, mode: str = "once") -> None:
        self.live = mode == "live"
        self.sources = (path.name,)
        self.ended = False
        self._path, self._once = path, mode == "once"
        self._file: BinaryIO | None = None
        self._rest = b""
        self._line = 0
        self._after: np.datetime64 | None = None

    def start(self, offsets: Mapping[str, int], after: np.datetime64) -> None:
        """Begin at a line, or at the first one behind `after`."""
        self.close()
        self._file = self._path.open("rb")
        self._rest, self.ended = b"", False
        self._line = offsets.get(self._path.name, 0)
        self._after = None if self._path.name in offsets or np.isnat(after) else after
        self._skip_lines(self._file, self._line)

    def poll(self, seconds: float) -> list[Message]:
        assert self._file is not None, "start comes first"
        deadline = time.monotonic() + seconds
        while not (data := self._file.read(_CHUNK)):
            if self._once:
                return self._end()
            self._refuse_replaced(self._file)
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            time.sleep(min(left, _LOOK_SECONDS))
        *lines, rest = data.split(b"\n")
        messages = []
        for line in lines:
            messages += self._read(self._rest + line)
            self._rest = b""
        # No more of it than says that it is too long.
        self._rest = (self._rest + rest)[: MAX_BYTES + 1]
        return messages

    def hold(self, sources: frozenset[str]) -> None:
        """There is one source, which is ahead of none."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end(self) -> list[Message]:
        self.ended = True
        rest, self._rest = self._rest, b""
        return [
            refuse(*message[:2], "malformed", f"the file ends within the line; {detail}")
            if (detail := message.body.get("detail")) and message.kind == "refused"
            else message
            for message in self._read(rest)
        ]

    def _read(self, line: bytes) -> list[Message]:
        number, self._line = self._line, self._line + 1
        if not line.strip():
            return []
        message = read_message(self._path.name, number, line)
        if self._after is not None and message.time <= self._after:
            return []
        return [message]

    def _skip_lines(self, file: BinaryIO, count: int) -> None:
        """Go behind so many lines; a file that has fewer is not the one that was read."""
        place, left, rest = 0, count, b""
        while left and (rest := file.read(_CHUNK)):
            n_ends = rest.count(b"\n")
            if n_ends >= left:
                at = -1
                for _ in range(left):
                    at = rest.index(b"\n", at + 1)
                file.seek(place + at + 1)
                return
            place, left = place + len(rest), left - n_ends
            tail = not rest.endswith(b"\n")
            if left == 1 and tail and file.tell() == os.fstat(file.fileno()).st_size:
                return  # of a file that was read once, to its last line without an end
        if left:
            raise DataError(
                f"{self._path}: has {count - left:,} lines, and {count:,} were read before: it was "
                "cut or made anew. Put the old file back, or start a new journal."
            )

    def _refuse_replaced(self, file: BinaryIO) -> None:
        """Say so where the file is no longer the one that is open."""
        opened = os.fstat(file.fileno())
        try:
            there = self._path.stat()
        except OSError as error:
            raise DataError(f"{self._path}: gone ({error.strerror}). Put it back.") from None
        if opened.st_size < file.tell() or there.st_ino != opened.st_ino:
            raise DataError(
                f"{self._path}: was cut or replaced while it was read. Append to it; what was read "
                "is in the journal."
            )


@contextmanager
def file_sink(address: Address) -> Iterator[_FileSink]:
    """`file:PATH`, a new file, there when all is written."""
    address.refuse_options()
    path = Path(address.place)
    if path.exists():
        raise UsageError(f"--to {address.text}: is there already. Remove it, or name another.")
    with atomic_file(path) as handle:
        yield _FileSink(handle)


class _FileSink:
    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle

    def send(self, _symbol: str | None, data: bytes) -> int:
        self._handle.write(data + b"\n")
        return 1
