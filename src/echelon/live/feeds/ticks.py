"""Ticks as they come become bars by the very functions that import tick files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from echelon.data.derive import PanelKind
from echelon.data.sources.ticks import Sessions, bars_of_ticks, place_ticks, sessions_of
from echelon.live.feeds import Message
from echelon.live.feeds.messages import refuse

_COLUMNS = {
    "symbol": pl.String,
    **dict.fromkeys(("price", "volume", "amount", "pre_close"), pl.Float64),
}


class TickBars:
    """Bars of a panel's symbols out of ticks.

    1. `place` gives each tick the time of the bar that it belongs to.
    2. `bars`, once nothing more of that time comes, makes bars of its ticks.
    """

    def __init__(self, kind: PanelKind) -> None:
        self._kind = kind

    @cached_property
    def _sessions(self) -> Sessions:
        return sessions_of(self._kind.calendar)

    def place(self, messages: Sequence[Message]) -> list[Message]:
        """The messages; a tick with the time of its bar, and its own as `at` in the body."""
        at = [k for k, message in enumerate(messages) if message.kind == "tick"]
        placed = list(messages)
        if not at:
            return placed
        times = np.array([messages[k].time for k in at], dtype="datetime64[us]")
        ends = place_ticks(pl.Series(times), self._sessions, self._kind.freq).to_numpy()
        for k, end in zip(at, ends.astype("datetime64[us]"), strict=True):
            source, offset, kind, time, body = messages[k]
            if np.isnat(end):
                detail = f"{body['symbol']} at {time}: outside the session of {self._kind.calendar}"
                placed[k] = refuse(source, offset, "session", detail)
            else:
                placed[k] = Message(source, offset, kind, end, {**body, "at": time})
        return placed

    def bars(self, ticks: Sequence[Message]) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        """(bodies of bars, as of messages; (number of a tick, what is wrong with it)) of one time.

        ticks: that `place` gave this time, in the order in which they count as traded
        """
        columns: dict[str, Any] = {
            name: pl.Series([message.body.get(name) for message in ticks], dtype=kind)
            for name, kind in _COLUMNS.items()
        }
        times = np.array([message.body["at"] for message in ticks], dtype="datetime64[us]")
        frame = pl.DataFrame({**columns, "time": times})
        frame, problems = bars_of_ticks(frame, self._sessions, self._kind.freq)
        names = [name for name in frame.columns if name in self._kind.fields]
        rows = frame.select("symbol", *names).iter_rows(named=True)
        bodies = [{name: v for name, v in row.items() if v is not None} for row in rows]
        return bodies, [(problem.row or 0, problem.message) for problem in problems]
