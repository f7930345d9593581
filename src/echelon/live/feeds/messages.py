"""Messages of schema 1 (see the package's text): bytes to messages, and bar sets to messages.

Reading is most of what a bar costs on its way in, so it does little: one pass of the JSON parser,
one look at each field's type, and times from a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from echelon.data.derive import FIELDS
from echelon.data.stream import BarSet, StreamFacts
from echelon.errors import DataError, shorten
from echelon.files import json_line
from echelon.live.feeds import MAX_BYTES, SCHEMA, Message
from echelon.serving.engine import parse_time

_NUMBERS: dict[str, type] = dict.fromkeys(FIELDS, float)
_SHAPES: Mapping[str, tuple[Mapping[str, type], tuple[str, ...]]] = {
    "bar": ({"symbol": str, **_NUMBERS, "st": bool}, ("symbol", "close")),
    "facts": (
        {"symbol": str, "member": bool, "listed": str, "delisted": str, "reason": str},
        ("symbol",),
    ),
    "benchmark": ({"level": float}, ("level",)),
    "tick": (
        {"symbol": str, "price": float, "volume": float, "amount": float, "pre_close": float},
        ("symbol", "price", "volume"),
    ),
    "close": ({}, ()),
}
"""Kind → its fields and their types, and those that it must have."""
_NAMES = {float: "a number", str: "text", bool: "true or false"}
_NEVER = np.datetime64("NaT", "us")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_decode = json.JSONDecoder(parse_int=float, parse_constant=_refuse_constant).decode
# The same text again and again: a time is that of thousands of bars.
_time_of = lru_cache(maxsize=4096)(parse_time)


class _Unfit(Exception):
    """(reason, detail)."""


def read_message(source: str, offset: int, data: bytes) -> Message:
    """The message in `data`, or one of the kind `refused` that says why it is none."""
    if len(data) > MAX_BYTES:
        detail = f"more than {MAX_BYTES:,} bytes, expected one bar"
        return refuse(source, offset, "oversized", detail)
    try:
        body = _decode(data.decode())
        if type(body) is not dict or "schema" not in body:
            raise _Unfit("foreign", "no message of ours: a JSON object with a schema")
        if body.pop("schema") != SCHEMA:
            raise _Unfit("schema", f"of another schema, expected {SCHEMA}")
        kind = body.pop("type", None)
        shape = _SHAPES.get(kind) if type(kind) is str else None
        if shape is None:
            raise _Unfit("foreign", f"type {kind!r}, expected one of {', '.join(_SHAPES)}")
        text = body.pop("time", None)
        if type(text) is not str:
            raise _Unfit("fields", "time: expected text, such as 2020-01-03")
        time = _time_of(text)
        types, needed = shape
        for name, value in body.items():
            if type(value) is not types.get(name):
                body = _without_nulls(kind, body)
                break
        for name in needed:
            if name not in body:
                raise _Unfit("fields", f"{kind} without {name}")
        if kind == "facts":
            _check_days(body)
    except _Unfit as unfit:
        return refuse(source, offset, *unfit.args)
    except DataError as error:  # the time
        return refuse(source, offset, "fields", str(error))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        return refuse(source, offset, "malformed", f"no JSON in UTF-8: {error}")
    return Message(source, offset, kind, time, body)


def refuse(source: str, offset: int, reason: str, detail: str) -> Message:
    """A message of which nothing but this is kept."""
    body = {"reason": reason, "detail": shorten(detail)}
    return Message(source, offset, "refused", _NEVER, body)


def _without_nulls(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields but those that are null; raises where one is not as the schema has it."""
    types = _SHAPES[kind][0]
    for name, value in body.items():
        if name not in types:
            raise _Unfit("fields", f"{kind} has no field {name!r}")
        if value is not None and type(value) is not types[name]:
            raise _Unfit("fields", f"{kind}: {name} is {value!r}, expected {_NAMES[types[name]]}")
    return {name: value for name, value in body.items() if value is not None}


def _check_days(body: Mapping[str, Any]) -> None:
    for name in ("listed", "delisted"):
        if name in body and len(body[name]) != len("2020-01-03"):
            raise _Unfit("fields", f"facts: {name} is {body[name]!r}, expected a day")
        if name in body:
            _time_of(body[name])


class BarSetWriter:
    """Bar sets as messages; facts only when they change."""

    def __init__(self, symbols: Sequence[str], facts: StreamFacts) -> None:
        """Behind the bars that `facts` are of, whose reader knows them."""
        self._symbols = tuple(symbols)
        self._members = facts.members.tolist()
        self._listed = facts.known.listed.astype("datetime64[D]").astype(str).tolist()
        self._delisted = facts.known.delisted.astype("datetime64[D]").astype(str).tolist()
        self._reasons: list[str | None] = list(facts.reasons)

    def bodies(self, bars: BarSet) -> Iterator[tuple[str, dict[str, Any]]]:
        """(kind, body) of each message of a set, the closing one last."""
        yield from (("facts", body) for body in self._news(bars))
        if bars.benchmark is not None:
            yield "benchmark", {"level": float(bars.benchmark)}
        names = [name for name in FIELDS if getattr(bars, name) is not None]
        columns = [getattr(bars, name).tolist() for name in names]
        special = [False] * len(self._symbols) if bars.st is None else bars.st.tolist()
        close = names.index("close")
        for symbol, st, *values in zip(self._symbols, special, *columns, strict=True):
            if values[close] == values[close]:
                body = {"symbol": symbol}
                body |= {n: v for n, v in zip(names, values, strict=True) if v == v}
                yield "bar", {**body, "st": True} if st else body
        yield "close", {}

    def lines(self, bars: BarSet) -> Iterator[tuple[str | None, bytes]]:
        head = {"schema": SCHEMA}
        time = str(bars.time.astype("datetime64[us]").item()).replace(" ", "T")
        for kind, body in self.bodies(bars):
            text = json_line(
                {**head, "type": kind, "time": time.removesuffix("T00:00:00"), **body},
                ensure_ascii=False,
            )
            yield None if kind == "close" else body.get("symbol", ""), text.encode()

    def _news(self, bars: BarSet) -> Iterator[dict[str, Any]]:
        news: dict[int, dict[str, Any]] = {}
        for name, known, given in (
            ("member", self._members, None if bars.members is None else bars.members.tolist()),
            ("listed", self._listed, _days(bars.listed)),
            ("delisted", self._delisted, _days(bars.delisted)),
            ("reason", self._reasons, bars.reasons),
        ):
            if given is None:
                continue
            for n, value in enumerate(given):
                if value != known[n] and value not in (None, "NaT"):
                    known[n] = value
                    news.setdefault(n, {"symbol": self._symbols[n]})[name] = value
        return iter(news.values())


def _days(times: np.ndarray | None) -> list[str] | None:
    if times is None:
        return None
    days: list[str] = times.astype("datetime64[D]").astype(str).tolist()
    return days
