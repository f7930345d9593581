"""The dashboard of `echelon live`: how an engine stands, in a terminal of 80 columns or more.

What stands is the engine's status; what led there (equity, closes, refusals) is read from the end
of its journal, which may be looked at while the engine writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from echelon.errors import EchelonError, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = 60
"""Bar sets that are looked back on."""
_MOST_ROWS = 12
_MOST_EVENTS, _MOST_WARNINGS = 4, 8
_BLOCKS = "▁▂▃▄▅▆▇█"
_MODES = {"running": "bold green", "reduce_only": "bold yellow", "halted": "bold red"}
_METER = 10
"""Columns of a position's weight."""


class Recent(NamedTuple):
    """The end of a journal. equity: of its bar sets; close: symbol → last one known"""

    equity: tuple[float, ...] = ()
    close: Mapping[str, float] = {}
    warnings: tuple[str, ...] = ()
    in_charge: Mapping[str, Any] | None = None


class Recorder:
    """Reads the end of a journal, again only when there is more of it."""

    def __init__(self, journal: Path) -> None:
        self._path = journal
        self._seen, self._recent = -1, Recent()

    def look(self, status: Mapping[str, Any]) -> Recent:
        """The end of the journal as of a status."""
        if status["entries"] != self._seen:
            try:
                self._recent = read_recent(self._path, status)
                self._seen = status["entries"]
            except EchelonError:  # in the middle of a commit: the next look shows it
                return self._recent
        return self._recent


def read_recent(path: Path, status: Mapping[str, Any]) -> Recent:
    """What led to a status, over about the last `_BARS` bar sets."""
    from echelon.live.alerts import AlertReader
    from echelon.live.journal import Journal, decode_bars
    from echelon.report.texts import Words

    equity: list[float] = []
    close: dict[str, float] = {}
    entries: list[tuple[str, Mapping[str, Any]]] = []
    difference: list[str] = []
    charge: Mapping[str, Any] | None = None
    with Journal.read(path) as journal:
        symbols = journal.about()["symbols"]
        per_set = 1 + journal.seq // max(int(status["bars"]), 1)
        shown = ("halt", "guard", "command", "order", "status", "refused", "stopped")
        kinds = ("bars", "decision", "difference", *shown)
        for entry in journal.entries(max(0, journal.seq - _BARS * per_set), kinds):
            body = entry.body
            if entry.kind == "bars":
                values = decode_bars(body, entry.data or b"").close.tolist()
                close |= {s: v for s, v in zip(symbols, values, strict=True) if v == v}  # no NaN
            elif entry.kind == "decision":
                equity.append(body["account"]["equity"])
                charge = body["in_charge"]
            elif entry.kind == "difference":
                difference = [f"difference: {'; '.join(body['differences'])}"]
            else:
                entries.append((entry.kind, body))
    alerts = AlertReader(None).read(entries)[::-1]
    counts = [alert for alert in alerts if "count" in alert.values]
    text = Words("en").alert
    events = [text(alert) for alert in alerts if alert not in counts][:_MOST_EVENTS]
    warnings = *events, *difference, *map(text, counts)
    return Recent(tuple(equity[-_BARS:]), close, warnings, charge)


def status_view(status: Mapping[str, Any], recent: Recent | None = None) -> RenderableType:
    """How an engine stands: equity, positions, orders, who is in charge, latency, warnings."""
    recent = recent or Recent()
    parts: list[RenderableType] = [_head(status), _facts(status, recent)]
    warnings = _warnings(status, recent)
    if warnings:
        parts += [Text(), *(Text(printable(text), style="yellow") for text in warnings)]
    held, orders = _positions(status, recent), _orders(status)
    tables = Table.grid(padding=(0, 3))
    tables.add_row(*(table for table in (held, orders) if table is not None))
    if held or orders:
        parts += [Text(), tables]
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """Values as blocks of eight heights, the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return _BLOCKS[3] * len(values)
    steps = ((value - low) / (high - low) * (len(_BLOCKS) - 1) for value in values)
    return "".join(_BLOCKS[round(step)] for step in steps)


def _head(status: Mapping[str, Any]) -> Text:
    mode, style = status["mode"].replace("_", " "), _MODES.get(status["mode"], "")
    if not (running := status.get("running", True)):
        engine = (
            "no engine runs" if running is False else "as written down: ECHELON_TOKEN is not set"
        )
        mode = engine if mode == "running" else f"{mode}; {engine}"
        style = "bold" if status["mode"] == "running" else style
    text = Text(printable(f"{status['policy']} · {status['broker']}  "), style="bold")
    text.append(mode, style)
    if status["why"]:
        text.append(printable(f"  {status['why']}"), "yellow")
    return text


def _facts(status: Mapping[str, Any], recent: Recent) -> Table:
    from echelon.report.texts import Words, time_text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    equity, account = status["equity"], status["account"]
    value = Text(f"{equity:,.2f}" if status["bars"] else "none yet", style="bold")
    if len(recent.equity) > 1 and recent.equity[-2] > 0.0:
        change = recent.equity[-1] / recent.equity[-2] - 1.0
        value.append(f"  {change:+.2%} last bar", "green" if change >= 0.0 else "red")
    value.append(f"  drawdown {status['drawdown']:.1%}", "not bold")
    if account and equity > 0.0:
        cash = account.get("cash", 0.0)
        value.append(f"  cash {cash / equity:.1%}", "not bold")
    facts.add_row("equity", value)
    if len(recent.equity) > 1:
        line = Text(sparkline(recent.equity), style="cyan", no_wrap=True)
        facts.add_row("", line.append(f"  {len(recent.equity)} bars", "dim"))
    last = time_text(status["time"]) or "none yet"
    facts.add_row("last bar", Text(printable(f"{last}, {status['bars']:,} bars")))
    charge = recent.in_charge or status.get("in_charge")
    if charge is not None:
        facts.add_row("in charge", Text(printable(Words("en").in_charge(charge))))
    latency = status.get("latency")
    if latency is not None:
        facts.add_row("latency", f"{1e3 * latency:.1f} ms from bars to orders sent")
    counts = status["counts"]
    numbers = f"{counts.get('order', 0):,} orders, {counts.get('stopped', 0):,} stopped, "
    refused = f"{counts.get('refused', 0):,} messages refused, {status['entries']:,} entries"
    facts.add_row("so far", numbers + refused)
    return facts


def _warnings(status: Mapping[str, Any], recent: Recent) -> list[str]:
    """What an operator should look at, the newest first, what was counted last."""
    unknown = [order["symbol"] for order in status["orders"] if order["state"] == "unknown"]
    trouble = status.get("trouble")
    lines = [f"! the venue does not answer: {trouble}"] if trouble else []
    if unknown:
        lines.append(f"! the venue has not answered about {_few(unknown)}")
    lines += [f"! {warning}" for warning in recent.warnings]
    return lines[:_MOST_WARNINGS]


def _few(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - 5} more" if len(every) > 5 else ""
    return ", ".join(every[:5]) + more


def _positions(status: Mapping[str, Any], recent: Recent) -> Table | None:
    """Largest first, with weights where closes are known."""
    positions: Mapping[str, float] = status["account"].get("positions", {})
    if not positions:
        return None
    equity = status["equity"]
    worth = {symbol: shares * recent.close.get(symbol, 0.0) for symbol, shares in positions.items()}
    largest = max(*worth.values(), 1e-12)
    table = _table("position", "shares", "weight", "")
    table.columns[3].justify = "left"
    for symbol in sorted(positions, key=lambda symbol: (-worth[symbol], symbol))[:_MOST_ROWS]:
        share = f"{worth[symbol] / equity:.1%}" if worth[symbol] and equity > 0.0 else ""
        meter = Text("▪" * round(_METER * worth[symbol] / largest), style="cyan")
        name = Text(printable(symbol))
        table.add_row(name, f"{positions[symbol]:,.4g}", share, meter)
    if len(positions) > _MOST_ROWS:
        table.add_row(Text(f"{len(positions) - _MOST_ROWS} more", style="dim"))
    return table


def _orders(status: Mapping[str, Any]) -> Table | None:
    orders = status["orders"]
    if not orders:
        return None
    table = _table("order", "side", "shares", "state")
    table.columns[1].justify = table.columns[3].justify = "left"
    for order in orders[:_MOST_ROWS]:
        shares = order["shares"] or abs(order["wanted"])
        state = Text(order["state"], style="bold red" if order["state"] == "unknown" else "")
        side = Text(order["side"], style="green" if order["side"] == "buy" else "magenta")
        table.add_row(Text(printable(order["symbol"])), side, f"{shares:,.4g}", state)
    if len(orders) > _MOST_ROWS:
        table.add_row(Text(f"{len(orders) - _MOST_ROWS} more", style="dim"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left", no_wrap=True)
    return table
