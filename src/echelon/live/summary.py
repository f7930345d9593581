"""The summary of a day of live trading: a page, and a short text for robots.

    DIR/summary-2024-01-05.html     a page without a script, for e-mail too; in Chinese .zh.html
    JOURNAL.day                     whether the day's decisions came out the same: for the metrics

1. The journal is run again (`report.gather`): what was decided must follow from what was seen.
2. A step is from one decision to the next and belongs to the day of its end: so do its profit, its
   fills and their costs. The model's are those of the backtest of the same bars.
3. Alerts are those that the day's entries make (`live.alerts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from echelon.backtest.run import Backtest
from echelon.errors import DataError
from echelon.live.alerts import AlertReader, note_check
from echelon.live.journal import Journal
from echelon.live.report import Results, gather
from echelon.live.results import LiveRows
from echelon.live.tables import read_table_of
from echelon.monitoring.alerts import Alert
from echelon.monitoring.channels import Message
from echelon.report.pages import Cell, Content, Headline, Named, Table, render_page
from echelon.report.texts import DASH, Words
from echelon.serving.bundle import Bundle
from echelon.types import Floats

_BP = 1e4
_CURVE = 120
"""Bars of the equity that are drawn, up to the day's last."""
_MOST_ROWS, _MOST_LINES, _MOST_POSITIONS = 200, 5, 5


class Cost(NamedTuple):
    """What trading cost. value: traded; money"""

    value: float
    fees: float
    slippage: float

    @property
    def bp(self) -> float | None:
        """Basis points of the value traded; None: nothing was."""
        return (self.fees + self.slippage) / self.value * _BP if self.value > 0.0 else None


@dataclass(frozen=True)
class Day:
    """A day of a journal. bodies: of its decisions, the one before them first where there is one.

    first: number of the first of `bodies` among all; close[S+1,N]: at all decisions
    """

    day: date
    results: Results
    bodies: Sequence[Mapping[str, Any]]
    first: int
    close: Floats
    fills: pl.DataFrame
    alerts: Sequence[Alert]

    @property
    def steps(self) -> slice:
        """Of the day, among all."""
        return slice(self.first, self.first + len(self.bodies) - 1)

    @cached_property
    def own(self) -> Sequence[Mapping[str, Any]]:
        """Decisions of the day."""
        return [body for body in self.bodies if body["time"][:10] == str(self.day)]

    @property
    def equity(self) -> float:
        """At the last decision."""
        return float(self.bodies[-1]["account"]["equity"])

    @property
    def profit(self) -> float:
        """Money since the last decision of the day before."""
        return self.equity - float(self.bodies[0]["account"]["equity"])

    @cached_property
    def drawdown(self) -> float:
        """From the highest equity so far, at the last decision."""
        return 1.0 - self.equity / float(self._equities.max())

    @property
    def _equities(self) -> Floats:
        return self.results.decisions["equity"].to_numpy()[: self.steps.stop + 1]

    @property
    def differences(self) -> list[str]:
        """What did not come out the same when the day's decisions were made again."""
        every = self.results.replay.differences
        return [text for text in every if text.startswith((str(self.day), "bars:"))]

    def held(self, k: int) -> Floats:
        """[N] shares at the k-th of `bodies`."""
        positions = self.bodies[k]["account"]["positions"]
        return np.array([positions.get(symbol, 0.0) for symbol in self.results.bundle.symbols])

    @cached_property
    def gains(self) -> Floats:
        """[N] money that each symbol brought, after its costs."""
        symbols = {symbol: n for n, symbol in enumerate(self.results.bundle.symbols)}
        close = np.nan_to_num(self.close[[self.steps.start, self.steps.stop]])
        gains = np.array(self.held(-1) * close[1] - self.held(0) * close[0])
        for fill in self.fills.iter_rows(named=True):
            paid = fill["shares"] * fill["price"] + fill["commission"] + fill["stamp"]
            gains[symbols[fill["symbol"]]] -= paid
        return gains

    def cost(self, book: Backtest | None) -> Cost | None:
        """What the day's fills cost in a book."""
        if book is None:
            return None
        fills = [getattr(book.fills, name)[self.steps] for name in book.fills._fields[:5]]
        shares, price, commission, stamp, slippage = fills
        fees = float((commission + stamp).sum())
        return Cost(float(np.abs(shares * price).sum()), fees, float(slippage.sum()))

    def curve(self) -> str:
        """The equity up to the day as points of a line, 600 by 100."""
        value = self._equities[-_CURVE:]
        low, high = float(value.min()), float(value.max())
        x = np.linspace(0.0, 600.0, len(value)) if len(value) > 1 else np.zeros(1)
        y = 100.0 * (high - value) / max(high - low, 1e-12)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def summarise(
    bundle: Bundle, journal: Journal, day: date | None = None, drawdown: float | None = None
) -> Day:
    """A day of a journal. day: None: the last one; drawdown: that is alerted of"""
    results = gather(bundle, journal)
    times = results.decisions["time"].cast(pl.Date)
    day = times[-1] if day is None else day
    rows = (times == day).arg_true().to_list()
    if not rows:
        raise DataError(
            f"{journal.path}: nothing was decided on {day}; it has decisions from {times[0]} to "
            f"{times[-1]}. Name a day with a bar in it."
        )
    first = max(rows[0] - 1, 0)
    bodies = [
        entry.body
        for k, entry in enumerate(journal.entries(kinds=("decision",)))
        if first <= k <= rows[-1]
    ]
    close = LiveRows.find(journal, results.replay.world).close
    after = results.decisions["time"][first : rows[-1]]
    fills = read_table_of(journal, "fills").filter(pl.col("after").is_in(after.implode()))
    alerts = _alerts(journal, str(day), drawdown)
    checked = Day(day, results, bodies, first, close, fills, alerts)
    note_check(journal.path, str(day), equal=not checked.differences)
    return checked


def _alerts(journal: Journal, day: str, drawdown: float | None) -> list[Alert]:
    reader, today = AlertReader(drawdown), ""
    alerts: list[Alert] = []
    entries: list[tuple[str, Mapping[str, Any]]] = []
    for entry in journal.entries():
        if entry.kind == "bars":
            if entry.body["time"][:10] != today:
                batch = reader.read(entries)
                alerts, entries = (batch if today == day else alerts), []
            today = entry.body["time"][:10]
        entries.append((entry.kind, entry.body))
    return reader.read(entries) if today == day else alerts


# What it says.


def _signed(value: float, form: str = ",.2f") -> str:
    return f"{value:+{form}}".replace("-", "\N{MINUS SIGN}")


def _bp(cost: Cost | None) -> str:
    return DASH if cost is None or cost.bp is None else f"{cost.bp:.1f}"


def _facts(day: Day, words: Words) -> dict[str, Any]:
    """What both the page and the text say."""
    start = day.equity - day.profit
    orders = day.results.orders.filter(pl.col("time").cast(pl.Date) == day.day)
    stopped = day.results.stopped.filter(pl.col("time").cast(pl.Date) == day.day)
    paid = day.cost(day.results.live)
    return {
        "profit": _signed(day.profit),
        "share": _signed(day.profit / start if start > 0.0 else 0.0, ".2%"),
        "equity": f"{day.equity:,.2f}",
        "drawdown": f"{day.drawdown:.1%}",
        "fills": f"{day.fills.height:,}",
        "value": f"{paid.value:,.0f}" if paid else "0",
        "orders": f"{orders.height:,}",
        "stopped": f"{stopped.height:,}",
        "rejected": f"{orders.filter(pl.col('state') == 'rejected').height:,}",
        "cash": f"{day.bodies[-1]['account']['cash'] / day.equity:.1%}" if day.equity else DASH,
        "costs": f"{paid.fees + paid.slippage:,.2f}" if paid else DASH,
        "bp": _bp(paid),
        "model": _bp(day.cost(day.results.replay.backtest)),
        "charge": _charge(day.own[-1], words),
        "decisions": f"{len(day.own):,}",
    }


def verdict(day: Day, words: Words) -> str:
    """Whether the decisions came out the same when they were made again."""
    key = "summary_differs" if day.differences else "summary_equal"
    return words(key, n=f"{len(day.own):,}", differences=f"{len(day.differences):,}")


def _charge(body: Mapping[str, Any], words: Words) -> str:
    """Who is in charge, and why."""
    charge = body["in_charge"]
    if charge is None:
        return ""
    odds, who = charge["probabilities"], words.who(charge["expert"])
    now = charge["decided_now"]
    said = words("summary_chosen" if now else "summary_kept", who=who)
    if odds:
        said += words("summary_odds", p=f"{odds.get(charge['expert'], 0.0):.0%}")
    more = [words("summary_masked", who=words("comma").join(map(words.who, charge["masked"])))]
    parts = [said, *(more if charge["masked"] else [])]
    if charge["position_scale"] < 1.0:
        parts.append(words("event_halved", factor=charge["position_scale"]))
    parts += [words("event_halted")] * charge["halted"]
    parts += [words("untraded_turnover_limit")] * charge["turnover_limited"]
    return words("join").join(parts)


def _positions(day: Day) -> Iterator[tuple[str, float, float, float]]:
    """(symbol, shares, share of the equity, gain), the largest first; what was sold comes last."""
    held, close = day.held(-1), np.nan_to_num(day.close[day.steps.stop])
    worth = held * close / max(day.equity, 1e-12)
    symbols = day.results.bundle.symbols
    for n in np.argsort(-worth, kind="stable").tolist():
        if held[n] or abs(day.gains[n]) > 0.005:
            yield symbols[n], float(held[n]), float(worth[n]), float(day.gains[n])


def message(day: Day, words: Words, page: str | None = None) -> Message:
    """The text for robots; an e-mail has the page besides."""
    facts = _facts(day, words)
    policy = f"{day.results.bundle.manifest['policy']} · {day.results.status['broker']}"
    held = [f"{symbol} {share:.1%}" for symbol, shares, share, _ in _positions(day) if shares]
    lines = [f"Echelon · {policy} · {day.day}"]
    lines += [words(f"summary_text_{name}", **facts) for name in ("profit", "trades", "costs")]
    some = words("comma").join(held[:_MOST_POSITIONS]) or words("summary_none")
    more = f" (+{len(held) - _MOST_POSITIONS})" if len(held) > _MOST_POSITIONS else ""
    lines.append(words("summary_text_positions", held=some + more, **facts))
    if facts["charge"]:
        lines.append(words("summary_text_charge", **facts))
    loud = [alert for alert in day.alerts if alert.severity != "info"]
    lines.append(words("summary_text_alerts", n=len(loud)))
    lines += [f"· {words.alert(alert)}" for alert in loud[:_MOST_LINES]]
    lines.append(verdict(day, words))
    subject = f"[Echelon] {policy} · {day.day} · {facts['profit']} ({facts['share']})"
    attached = None if page is None else (f"summary-{day.day}.html", page)
    return Message(subject, "\n".join(lines), (), attached)


def render(day: Day, words: Words) -> str:
    """The page."""
    facts, differs = _facts(day, words), bool(day.differences)
    names = ("profit", "equity", "trades", "costs", "cash")
    others: Mapping[str, Sequence[str]] = {
        "profit": ("share",),
        "equity": ("drawdown",),
        "trades": ("value", "orders"),
        "costs": ("bp", "model"),
        "cash": (),
    }
    headlines = [
        Headline(
            words(f"summary_{name}"),
            words(f"summary_{name}_note"),
            facts["fills" if name == "trades" else name],
            "",
            {words(f"summary_{other}"): facts[other] for other in others[name]},
        )
        for name in names
    ]
    return render_page(
        "summary",
        words,
        f"{day.results.bundle.manifest['policy']} · {day.day}",
        stem=f"summary-{day.day}",
        interactive=False,
        span=f"{day.results.status['broker']} · {words('summary_decisions', **facts)}",
        verdict=verdict(day, words),
        differs=differs,
        differences=day.differences[:100],
        headlines=headlines,
        curve=day.curve(),
        curve_note=words("summary_curve", n=min(len(day._equities), _CURVE)),
        positions=_positions_table(day, words),
        trades=_trades_table(day, words),
        charge=_charge_table(day, words),
        costs=_costs_table(day, words),
        alerts=_alerts_table(day, words),
        none=words("summary_none"),
    )


def _positions_table(day: Day, words: Words) -> Table | None:
    rows: list[list[Content]] = [
        [symbol, f"{shares:,.6g}", f"{share:.1%}", _signed(gain)]
        for symbol, shares, share, gain in _positions(day)
    ]
    rest = day.profit - float(day.gains.sum())
    if abs(rest) > 0.005:
        rows.append([words("summary_rest"), "", "", _signed(rest)])
    head = [words(f"summary_{name}") for name in ("symbol", "shares", "weight", "profit")]
    return Table(head, rows[:_MOST_ROWS]) if rows else None


def _trades_table(day: Day, words: Words) -> Table | None:
    rows: list[list[Content]] = []
    for fill in day.fills.iter_rows(named=True):
        side = words(f"execution_{'buy' if fill['shares'] > 0 else 'sell'}")
        fees = fill["commission"] + fill["stamp"]
        size, price = abs(fill["shares"]), fill["price"]
        numbers = (f"{size:,.6g}", f"{price:,.6g}", f"{size * price:,.0f}", f"{fees:,.2f}")
        rows.append([fill["symbol"], side, *numbers])
    names = ("symbol", "side", "shares", "price", "value", "fees")
    return Table([words(f"summary_{name}") for name in names], rows[:_MOST_ROWS]) if rows else None


def _charge_table(day: Day, words: Words) -> Table | None:
    """A row when somebody else took over, or was masked."""
    rows: list[list[Content]] = []
    last = None
    for body in day.own:
        charge = body["in_charge"]
        if charge is None:
            return None
        now = charge["expert"], charge["masked"], charge["halted"], charge["position_scale"]
        if now != last:
            stamp = body["time"][:16].replace("T", " ").removesuffix(" 00:00")
            who = Named(words.who(charge["expert"]), strong=True)
            rows.append([stamp, Cell(who.text, "text"), Cell(_charge(body, words), "text")])
        last = now
    head = [words(name) for name in ("time", "who", "summary_why")]
    return Table(head, rows[-_MOST_ROWS:], "measures events") if rows else None


def _costs_table(day: Day, words: Words) -> Table | None:
    """Paid and by the model, in money and basis points of what was traded."""
    paid, model = day.cost(day.results.live), day.cost(day.results.replay.backtest)
    if paid is None or model is None or not (paid.value or model.value):
        return None
    rows: list[list[Content]] = []
    for name in ("value", "fees", "slippage"):
        numbers = [getattr(cost, name) for cost in (paid, model)]
        shares = [
            DASH if name == "value" or not cost.value else f"{number / cost.value * _BP:.2f}"
            for cost, number in zip((paid, model), numbers, strict=True)
        ]
        cells = zip((f"{number:,.2f}" for number in numbers), shares, strict=True)
        rows.append([words(f"summary_{name}"), *(cell for pair in cells for cell in pair)])
    both = (
        (f"{paid.fees + paid.slippage:,.2f}", _bp(paid)),
        (
            f"{model.fees + model.slippage:,.2f}",
            _bp(model),
        ),
    )
    rows.append([words("summary_costs"), *both[0], *both[1]])
    head = [words(f"summary_{name}") for name in ("part", "money", "basis_points")]
    groups = [words("summary_paid"), words("summary_model")]
    return Table(head, rows, "measures whole", groups)


def _alerts_table(day: Day, words: Words) -> Table | None:
    rows: list[list[Content]] = [
        [alert.time[:16].replace("T", " ").removesuffix(" 00:00"), Cell(words.alert(alert), "text")]
        for alert in day.alerts
    ]
    head = [words("time"), words("summary_alert")]
    return Table(head, rows[:_MOST_ROWS], "measures events") if rows else None
