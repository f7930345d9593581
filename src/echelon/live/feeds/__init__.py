"""Feeds: where bars come from. A feed reads messages and keeps their order and offsets.

docs/guide/live.md has their addresses and the schema of messages (`messages` reads and writes it).
What cannot be read becomes a message of the kind `refused`, never an error: whoever writes into a
topic must not be able to stop the engine.

A feed judges nothing but whether a message can be read: the gate decides what passes. Offsets are
ours (they are kept in the journal), so a bar is taken exactly once whatever dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast
from urllib.parse import parse_qsl

import numpy as np

from echelon.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from echelon.serving.bundle import Bundle

SCHEMA = 1
MAX_BYTES = 1 << 16
"""Of a message: a bar takes 200."""
MODES = ("once", "history", "live")

FEEDS: Mapping[str, str] = {
    "store": "echelon.live.feeds.history:open_store",
    "file": "echelon.live.feeds.history:open_file",
    "kafka": "echelon.live.feeds.kafka:open_kafka",
    "alpaca": "echelon.live.feeds.alpaca:open_alpaca",
}
"""Scheme → opener(address, bundle, store) of a feed; imported when it is asked for."""
SINKS: Mapping[str, str] = {
    "file": "echelon.live.feeds.history:file_sink",
    "kafka": "echelon.live.feeds.kafka:kafka_sink",
}
"""Scheme → (address) to a context manager of a `Sink`."""


class Message(NamedTuple):
    """A message as it came.

    source: partition or file it came from; offset: its own, of which `source` has each once, rising
    kind: bar, facts, benchmark, tick, close, or refused
    time: of the bar set it belongs to, also of a tick
    body: by the schema, without time and schema; numbers are float. Of a refused one:
        {"reason": malformed | oversized | foreign | schema | fields | session | gap, "detail": …}
    """

    source: str
    offset: int
    kind: str
    time: np.datetime64  # [us]; NaT of one that was refused
    body: Mapping[str, Any]


class Feed(Protocol):
    """Where bars come from.

    live: bars come as they happen, and the wall clock says how late they are; False: history
    sources: names of partitions or files, known after `start`; a topic may get more
    """

    live: bool
    sources: tuple[str, ...]

    def start(self, offsets: Mapping[str, int], after: np.datetime64) -> None:
        """Begin at these offsets by source (those to be read next).

        A source without one begins at its first message; bars up to the time `after` are skipped.
        """

    def poll(self, seconds: float) -> list[Message]:
        """What has come, waiting for so long at most; [] if nothing has."""

    def hold(self, sources: frozenset[str]) -> None:
        """Read these sources no further until they are left out again: they are ahead of others."""

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""

    def close(self) -> None:
        """Let go of what is open."""


class Sink(Protocol):
    """Where messages are published."""

    def send(self, symbol: str | None, data: bytes) -> int:
        """Send one message, of None to every partition; how many were sent."""


class Address(NamedTuple):
    """What a `--feed` or `--to` says: scheme, place and options."""

    text: str
    scheme: str
    place: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str, known: Mapping[str, str], flag: str) -> Address:
        """The address in `text`, whose scheme must be `known`."""
        head, _, query = text.partition("?")
        scheme, _, place = head.partition(":")
        if scheme not in known:
            raise UsageError(f"{flag} {scheme!r}: expected one of {', '.join(known)}.")
        try:
            options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        except ValueError:
            raise UsageError(f"{flag} {scheme}: write options as ?name=value&…") from None
        return cls(text, scheme, place.removeprefix("//") if scheme == "kafka" else place, options)

    def refuse_options(self, *known: str) -> None:
        """Raise UsageError where there is an option that the scheme does not have."""
        odd = sorted(self.options.keys() - set(known))
        if odd:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise UsageError(f"{self.scheme}: no option {odd[0]!r}; {there}.")

    def mode(self, default: str) -> str:
        mode = self.options.get("mode", default)
        if mode not in MODES:
            raise UsageError(f"{self.scheme}: mode={mode}: expected one of {', '.join(MODES)}.")
        return mode


def open_feed(text: str, bundle: Bundle, store: Path) -> Feed:
    """The feed that `text` names (see the module's text) for a bundle.

    store: where `store` without a path finds its bars
    """
    address = Address.parse(text, FEEDS, "--feed")
    opener = cast("Callable[[Address, Bundle, Path], Feed]", _load(FEEDS[address.scheme]))
    return opener(address, bundle, store)


def publish_bars(
    bundle: Bundle, store: Path, to: str, until: date | None = None, bars: int | None = None
) -> int:
    """Send bars of a store as messages, each set closed by its `close`; how many were sent.

    until: last day that is not sent; None: from the first bar on. bars: sets to send; None: all
    """
    from echelon.live.feeds.history import StoredBars

    address = Address.parse(to, SINKS, "--to")
    after = datetime.min if until is None else datetime.combine(until, time.max)
    stored = StoredBars.from_bundle(bundle, store)
    opener = cast("Callable[[Address], AbstractContextManager[Sink]]", _load(SINKS[address.scheme]))
    sent = 0
    with opener(address) as sink:
        writer = stored.writer(after)
        for bar_set in islice(stored.sets(after), bars):
            sent += sum(sink.send(symbol, data) for symbol, data in writer.lines(bar_set))
    return sent


def _load(name: str) -> object:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
