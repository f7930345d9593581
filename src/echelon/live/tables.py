"""A journal as tables: for people, for pandas, and for the report.

bars        time, symbol, open … as they passed the gate
decisions   time, equity, cash, who was in charge, why nothing else was traded
targets     time, symbol, target, why: code where there is no order
orders      every intent with what became of it
stopped     orders that the risk gate stopped, with the code
fills       the venue's trades
refused     messages that the gate refused, with reason
events      halts, commands, differences
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.data.derive import FIELDS
from echelon.files import write_parquet
from echelon.live.engine import LiveState
from echelon.live.journal import Entry, Journal, decode_bars
from echelon.serving.state_file import decode_state

Rows = Iterator[dict[str, Any]]


def export_tables(journal: Journal, directory: Path) -> dict[Path, int]:
    """Write every table as Parquet; path → number of rows."""
    written = {}
    for name in TABLES:
        frame = read_table_of(journal, name)
        path = directory / f"{name}.parquet"
        write_parquet(path, frame)
        written[path] = frame.height
    return written


def read_table_of(journal: Journal, name: str) -> pl.DataFrame:
    """One table of a journal; see the module's text."""
    kinds, make = TABLES[name]
    symbols = journal.about().get("symbols", [])
    rows = [row for entry in journal.entries(kinds=kinds) for row in make(entry, symbols)]
    if name == "orders":
        rows = list(_last_by_id(rows))
    frame = pl.DataFrame(rows, infer_schema_length=None)
    if "time" in frame.columns:
        frame = frame.with_columns(pl.col("time").str.to_datetime(time_unit="us", strict=False))
    return frame


def last_status(journal: Journal) -> dict[str, Any]:
    """How the engine of a journal stood when it last wrote."""
    last = journal.last_snapshot()
    state, seq = LiveState(), 0
    if last is not None:
        seq = last[0]
        _, facts = decode_state(last[1], journal.path, "Run `echelon live journal verify`.")
        state = LiveState.from_dict(facts["live"])
    for entry in journal.entries(seq):
        state.apply(entry.kind, entry.body)
    about = journal.about()
    return {
        **state.summary(),
        **{name: about.get(name) for name in ("policy", "broker")},
        "entries": journal.seq,
    }


def _bars(entry: Entry, symbols: list[str]) -> Rows:
    bars = decode_bars(entry.body, entry.data or b"")
    have = {name: getattr(bars, name) for name in FIELDS if getattr(bars, name) is not None}
    for n in np.flatnonzero(~np.isnan(bars.close)).tolist():
        values = {name: float(array[n]) for name, array in have.items()}
        yield {"time": entry.body["time"], "symbol": symbols[n], **values}


def _decisions(entry: Entry, _symbols: list[str]) -> Rows:
    body, charge = entry.body, entry.body["in_charge"] or {}
    yield {
        "time": body["time"],
        "equity": body["account"]["equity"],
        "cash": body["account"]["cash"],
        "orders": len(body["orders"]),
        "expert": charge.get("expert"),
        "masked": ", ".join(charge.get("masked", ())),
        "halted": charge.get("halted"),
    }


def _targets(entry: Entry, _symbols: list[str]) -> Rows:
    body = entry.body
    for symbol, target in body["target"].items():
        why = body["why"].get(symbol)
        yield {"time": body["time"], "symbol": symbol, "target": str(target), "why": why}


def _orders(entry: Entry, _symbols: list[str]) -> Rows:
    body = entry.body
    if entry.kind == "order":
        names = ("id", "symbol", "side", "shares", "price", "wanted", "spend")
        row = {name: body[name] for name in names}
        yield {"time": body["bar"], **row, "by": body.get("by"), "state": "intent", "filled": 0.0}
    else:
        yield {name: body[name] for name in ("id", "state", "filled", "reason")}


def _last_by_id(rows: list[dict[str, Any]]) -> Rows:
    """Orders with the last that was said of each."""
    orders: dict[str, dict[str, Any]] = {}
    for row in rows:
        orders[row["id"]] = {"reason": None, **orders.get(row["id"], {}), **row}
    yield from orders.values()


def _fills(entry: Entry, _symbols: list[str]) -> Rows:
    yield from entry.body["fills"]


def _stopped(entry: Entry, _symbols: list[str]) -> Rows:
    names = ("symbol", "side", "shares", "price", "code")
    yield {"time": entry.body["bar"], **{name: entry.body[name] for name in names}}


def _refused(entry: Entry, _symbols: list[str]) -> Rows:
    yield {"entry": entry.seq, **{name: str(value) for name, value in entry.body.items()}}


def _events(entry: Entry, _symbols: list[str]) -> Rows:
    body = entry.body
    detail = body.get("detail") or "; ".join(body.get("differences", ()))
    name = body.get("reason") or body.get("name")
    yield {"entry": entry.seq, "kind": entry.kind, "name": name, "detail": detail}


TABLES: dict[str, tuple[tuple[str, ...], Callable[[Entry, list[str]], Rows]]] = {
    "bars": (("bars",), _bars),
    "decisions": (("decision",), _decisions),
    "targets": (("decision",), _targets),
    "orders": (("order", "status"), _orders),
    "stopped": (("stopped",), _stopped),
    "fills": (("fills",), _fills),
    "refused": (("refused",), _refused),
    "events": (("halt", "command", "difference"), _events),
}
"""Name → kinds of entries it is made of, and the rows of one."""
