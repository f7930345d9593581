"""A journal as tables (`TABLES`): for people, for pandas, and for the report.

docs/guide/live.md says what each is of. Every table has `entry`, the sequence number in the
journal; every kind of entry is in some table, one that is not known here among the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import polars as pl

from echelon.data.derive import FIELDS
from echelon.files import blaming, json_line, write_parquet
from echelon.live.engine import LiveState
from echelon.live.journal import Entry, Journal, decode_bars
from echelon.serving.state_file import decode_state

Row: TypeAlias = dict[str, Any]
_TIME = pl.Datetime("us")
_TEXT, _NUMBER, _COUNT = pl.String(), pl.Float64(), pl.Int64()


class Table(NamedTuple):
    """How a table is made. kinds: of entries; (): all that no other table has

    make: (entries of these kinds in order, the journal's symbols) → rows, of which more columns
        than those of the schema are left out
    """

    kinds: tuple[str, ...]
    schema: Mapping[str, pl.DataType]
    make: Callable[[Iterable[Entry], list[str]], Iterator[Row]]


_REMEDY = "Run `echelon live journal verify`."


def export_tables(journal: Journal, directory: Path) -> dict[Path, int]:
    written = {}
    for name in TABLES:
        frame = read_table_of(journal, name)
        path = directory / f"{name}.parquet"
        write_parquet(path, frame)
        written[path] = frame.height
    return written


def read_table_of(journal: Journal, name: str) -> pl.DataFrame:
    """One table of a journal; see the module's text."""
    table = TABLES[name]
    schema = {"entry": _COUNT, **table.schema}
    with blaming(journal.path, _REMEDY):
        rows = list(table.make(journal.entries(kinds=table.kinds), journal.about()["symbols"]))
        columns = {
            column: np.array([row.get(column) for row in rows], dtype="datetime64[us]")
            if dtype == _TIME
            else [row.get(column) for row in rows]
            for column, dtype in schema.items()
        }
        try:
            return pl.DataFrame(columns, schema=schema)
        except pl.exceptions.PolarsError as error:  # a text where a number should be
            raise ValueError(str(error)) from error


def last_status(journal: Journal) -> dict[str, Any]:
    """How the engine of a journal stood when it last wrote."""
    last = journal.last_snapshot()
    state, seq = LiveState(), 0
    with blaming(journal.path, _REMEDY):
        if last is not None:
            seq = last[0]
            _, facts = decode_state(last[1], journal.path, _REMEDY)
            state = LiveState.from_dict(facts["live"])
        for entry in journal.entries(seq):
            state.apply(entry.kind, entry.body)
        about = journal.about()
        return {
            **state.summary(),
            **{name: about.get(name) for name in ("policy", "broker")},
            "entries": journal.seq,
        }


def _sets(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    for entry in entries:
        body = entry.body
        have = int(np.isfinite(decode_bars(body, entry.data or b"").close).sum())
        offsets = json_line(body["offsets"])
        row = {"time": body["time"], "received": body["received"], "offsets": offsets}
        yield {"entry": entry.seq, **row, "bars": have}


def _bars(entries: Iterable[Entry], symbols: list[str]) -> Iterator[Row]:
    for entry in entries:
        bars = decode_bars(entry.body, entry.data or b"")
        have = {name: getattr(bars, name) for name in FIELDS if getattr(bars, name) is not None}
        for n in np.flatnonzero(~np.isnan(bars.close)).tolist():
            values = {name: float(array[n]) for name, array in have.items()}
            yield {"entry": entry.seq, "time": entry.body["time"], "symbol": symbols[n], **values}


def _decisions(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    for entry in entries:
        body, charge = entry.body, entry.body["in_charge"] or {}
        row = {**body["account"], **charge, "time": body["time"], "orders": len(body["orders"])}
        yield {"entry": entry.seq, **row, "masked": ", ".join(charge.get("masked", ()))}


def _targets(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    for entry in entries:
        body = entry.body
        for symbol, target in body["target"].items():
            text = None if target is None else str(target)
            row = {"symbol": symbol, "target": text, "why": body["why"].get(symbol)}
            yield {"entry": entry.seq, "time": body["time"], **row}


def _accounts(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    """Rows of the symbols held, then one of the cash, whose symbol is null."""
    time = None
    for entry in entries:
        if entry.kind == "bars":
            time = entry.body["time"]
            continue
        body, stamp = entry.body, {"entry": entry.seq, "time": time}
        for symbol, shares in body["positions"].items():
            locked = body["locked"].get(symbol, 0.0)
            yield {**stamp, "symbol": symbol, "shares": shares, "locked": locked}
        yield {**stamp, "cash": body["cash"]}


def _orders(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    orders: dict[str, Row] = {}
    for entry in entries:
        body = entry.body
        if entry.kind == "order":
            new = {"time": body["bar"], "state": "intent", "filled": 0.0}
            orders[body["id"]] = {"entry": entry.seq, **body, **new}
        elif body["id"] in orders:
            orders[body["id"]] |= {name: body[name] for name in ("state", "filled", "reason")}
    yield from orders.values()


def _list_stopped(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    for entry in entries:
        yield {"entry": entry.seq, **entry.body, "time": entry.body["bar"]}


def _fills(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    """`after`: the last decision before the fill; null: before the first."""
    after = None
    for entry in entries:
        if entry.kind == "decision":
            after = entry.body["time"]
            continue
        for fill in entry.body["fills"]:
            yield {"entry": entry.seq, "after": after, **fill}


def _list_refused(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    for entry in entries:
        yield {"entry": entry.seq, **entry.body}


def _events(entries: Iterable[Entry], _symbols: list[str]) -> Iterator[Row]:
    after = None
    for entry in entries:
        kind, body = entry.kind, entry.body
        if kind == "bars":
            after = body["time"]
        if kind in _TABLED:
            continue
        name = body.get("reason") if kind == "halt" else body.get("name")
        detail = body.get("detail") or "; ".join(body.get("differences", ()))
        row = {"kind": kind, "name": name, "by": body.get("by"), "detail": detail or None}
        yield {"entry": entry.seq, "after": after, **row, "document": json_line(body)}


_ORDER: dict[str, pl.DataType] = {
    **{"id": _TEXT, "symbol": _TEXT, "side": _TEXT},
    **dict.fromkeys(("shares", "price", "wanted", "spend"), _NUMBER),
}
_CHARGE: dict[str, pl.DataType] = {
    **{"expert": _TEXT, "decided_now": pl.Boolean(), "masked": _TEXT, "position_scale": _NUMBER},
    **dict.fromkeys(("halted", "turnover_limited"), pl.Boolean()),
}
TABLES: dict[str, Table] = {
    "sets": Table(
        ("bars",), {"time": _TIME, "received": _TEXT, "bars": _COUNT, "offsets": _TEXT}, _sets
    ),
    "bars": Table(
        ("bars",), {"time": _TIME, "symbol": _TEXT, **dict.fromkeys(FIELDS, _NUMBER)}, _bars
    ),
    "decisions": Table(
        ("decision",),
        {"time": _TIME, "equity": _NUMBER, "cash": _NUMBER, "orders": _COUNT, **_CHARGE},
        _decisions,
    ),
    "targets": Table(
        ("decision",),
        {"time": _TIME, **dict.fromkeys(("symbol", "target", "why"), _TEXT)},
        _targets,
    ),
    "accounts": Table(
        ("bars", "account"),
        {"time": _TIME, "symbol": _TEXT, **dict.fromkeys(("shares", "locked", "cash"), _NUMBER)},
        _accounts,
    ),
    "orders": Table(
        ("order", "status"),
        {"time": _TIME, **_ORDER, "by": _TEXT, "state": _TEXT, "filled": _NUMBER, "reason": _TEXT},
        _orders,
    ),
    "stopped": Table(("stopped",), {"time": _TIME, **_ORDER, "code": _TEXT}, _list_stopped),
    "fills": Table(
        ("decision", "fills"),
        {
            **{"after": _TIME, "trade_id": _TEXT, "order_id": _TEXT, "symbol": _TEXT},
            **dict.fromkeys(("shares", "price", "commission", "stamp", "slippage"), _NUMBER),
            "time": _TEXT,
        },
        _fills,
    ),
    "refused": Table(
        ("refused",),
        {
            **{"source": _TEXT, "offset": _COUNT},
            **dict.fromkeys(("time", "symbol", "reason", "detail"), _TEXT),
        },
        _list_refused,
    ),
    "events": Table(
        (),
        {"after": _TIME, **dict.fromkeys(("kind", "name", "by", "detail", "document"), _TEXT)},
        _events,
    ),
}
"""Name → how it is made."""
_TABLED = frozenset(kind for table in TABLES.values() for kind in table.kinds)
