"""Feeds: where bars come from. A feed reads messages and keeps their order and offsets.

A message is one JSON document (schema 1; see docs/guide/live.md):

    {"schema": 1, "type": "bar", "time": "2020-01-03", "symbol": "AAPL", "open": …, "close": …}
    {"schema": 1, "type": "facts", "time": …, "symbol": …, "listed"|"delisted"|"reason"|"member"}
    {"schema": 1, "type": "benchmark", "time": …, "level": …}
    {"schema": 1, "type": "close", "time": …}        nothing more of this time comes on this source

A feed judges nothing but whether a message can be read: the gate decides what passes. Offsets are
ours (they are kept in the journal), so a bar is taken exactly once whatever dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

SCHEMA = 1


class Message(NamedTuple):
    """A message as it came.

    source: partition or file it came from; offset: its own, of which `source` has each once, rising
    kind: bar, facts, benchmark, close, or refused
    body: by the schema, time and schema taken out; of a refused one: {"reason": …, "detail": …}
    """

    source: str
    offset: int
    kind: str
    time: np.datetime64  # [us]; NaT of one that was refused
    body: Mapping[str, Any]


class Feed(Protocol):
    """Where bars come from.

    live: bars come as they happen, and the wall clock says how late they are; False: history
    sources: names of partitions or files, known after `start`
    """

    live: bool
    sources: tuple[str, ...]

    def start(self, offsets: Mapping[str, int], after: np.datetime64) -> None:
        """Begin at these offsets by source (those to be read next); {}: behind the time `after`."""

    def poll(self, seconds: float) -> list[Message]:
        """What has come, waiting for so long at most; [] if nothing has."""

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""

    def close(self) -> None:
        """Let go of what is open."""
