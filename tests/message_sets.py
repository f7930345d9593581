"""Bar sets from messages, the slow and obvious way: what the gate must come to."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from echelon.data.stream import BarSet, StreamFacts
from echelon.live.feeds import Feed, Message


def bar_sets_of(messages: Iterable[Message], facts: StreamFacts, sources: int = 1) -> list[BarSet]:
    """The sets that are closed on every source, in order, with all that is known by then."""
    kind, known = facts.kind, facts.known
    column = {symbol: n for n, symbol in enumerate(kind.symbols)}
    by_time: dict[np.datetime64, list[Message]] = {}
    for message in messages:
        assert message.kind != "refused", message
        by_time.setdefault(message.time, []).append(message)
    members, listed = facts.members.copy(), known.listed.astype("datetime64[D]")
    delisted, reasons = known.delisted.astype("datetime64[D]"), list(facts.reasons)
    sets = []
    for time in sorted(by_time):
        grids = {name: np.full(len(column), np.nan) for name in kind.fields}
        st, level, closed = np.zeros(len(column), dtype=np.bool_), None, 0
        for message in by_time[time]:
            body = message.body
            n = column.get(body.get("symbol", ""), -1)
            if message.kind == "bar":
                for name in kind.fields & body.keys():
                    grids[name][n] = body[name]
                st[n] = body.get("st", False)
            elif message.kind == "facts":
                members[n] = body.get("member", members[n])
                listed[n] = body.get("listed", listed[n])
                delisted[n] = body.get("delisted", delisted[n])
                reasons[n] = body.get("reason", reasons[n])
            elif message.kind == "benchmark":
                level = body["level"]
            else:
                closed += message.kind == "close"
        assert closed == sources, (time, closed)
        sets.append(
            BarSet(
                time=time,
                st=st,
                members=members.copy(),
                listed=listed.copy(),
                delisted=delisted.copy(),
                reasons=tuple(reasons),
                benchmark=level,
                **grids,
            )
        )
    return sets


def assert_same_bits(mine: list[BarSet], expected: list[BarSet]) -> None:
    assert len(mine) == len(expected) > 0
    for a, b in zip(mine, expected, strict=True):
        for name, value in vars(b).items():
            there = getattr(a, name)
            if isinstance(value, np.ndarray):
                assert there.dtype == value.dtype, name
                assert there.tobytes() == value.tobytes(), (b.time, name, there, value)
            else:
                assert there == value, (b.time, name)


def drain(
    feed: Feed, count: int | None = None, seconds: float = 0.2, tries: int = 200
) -> list[Message]:
    """What a feed gives until it has ended, or so many messages."""
    messages: list[Message] = []
    for _ in range(tries):
        messages += feed.poll(seconds)
        if feed.ended:
            feed.close()
        if feed.ended or (count is not None and len(messages) >= count):
            break
    return messages
