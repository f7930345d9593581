"""The summary of a day of live trading: a page without a script, and a short text for robots.

1. The journal is run again (`report.gather`): what was decided must follow from what was seen.
2. A step is from one decision to the next and belongs to the day of its end: so do its profit, its
   fills and their costs. The model's costs are those of the backtest of the same bars.
3. Alerts are those that the day's entries make (`live.alerts`).

Axes: `N` assets; `S` steps of the whole journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import islice
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
from echelon.report.pages import Cell, Content, Headline, Table, headed_table, render_page
from echelon.report.texts import DASH, Words, time_text
from echelon.serving.bundle import Bundle
from echelon.types import Floats

_BP = 1e4
_CURVE = 120
"""Bars of the equity that are drawn, up to the day's last."""
_MOST_ROWS, _MOST_LINES = 200, 5


class Cost(NamedTuple):
    """What trading cost, in money. value: traded; total: fees and slippage"""

    value: float
    fees: float
    slippage: float
    total: float

    def bp(self, part: float) -> str:
        return f"{part / self.value * _BP:.1f}" if self.value > 0.0 else DASH


class Holding(NamedTuple):
    """A symbol at the day's last decision. share: of the equity; gain: money of the day"""

    symbol: str
    shares: float
    share: float
    gain: float


@dataclass(frozen=True)
class Day:
    """A day of a journal. bodies: of its decisions, the one before them first where there is one.

    steps: of the day, among all; start, close[N]: closes at the first and last of `bodies`
    """

    day: date
    results: Results
    bodies: Sequence[Mapping[str, Any]]
    steps: slice
    start: Floats
    close: Floats
    fills: pl.DataFrame
    alerts: Sequence[Alert]

    @property
    def own(self) -> Sequence[Mapping[str, Any]]:
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
    def equities(self) -> Floats:
        """At all decisions so far."""
        return self.results.decisions["equity"].to_numpy()[: self.steps.stop + 1]

    @property
    def differences(self) -> list[str]:
        """What did not come out the same when the day's decisions were made again."""
        every = self.results.replay.differences
        return [text for text in every if text.startswith((str(self.day), "bars:"))]

    @cached_property
    def holdings(self) -> list[Holding]:
        """What is held, the largest first, then what was sold; gains are after costs."""
        before, now = (self.bodies[k]["account"]["positions"] for k in (0, -1))
        symbols = self.results.bundle.symbols
        paid = dict.fromkeys(symbols, 0.0)
        for fill in self.fills.iter_rows(named=True):
            money = fill["shares"] * fill["price"] + fill["commission"] + fill["stamp"]
            paid[fill["symbol"]] = paid.get(fill["symbol"], 0.0) + money
        held = []
        for symbol, start, close in zip(symbols, self.start, self.close, strict=True):
            worth = now.get(symbol, 0.0) * close
            gain = worth - before.get(symbol, 0.0) * start - paid[symbol]
            if symbol in now or symbol in before or paid[symbol]:
                share = worth / self.equity if self.equity else 0.0
                held.append(Holding(symbol, now.get(symbol, 0.0), float(share), float(gain)))
        return sorted(held, key=lambda holding: -holding.share)

    def cost(self, book: Backtest | None) -> Cost:
        """What the day's fills cost in a book; None: of a single bar."""
        if book is None:
            return Cost(0.0, 0.0, 0.0, 0.0)
        fills = book.fills
        value, fees, slippage = (
            float(part[self.steps].sum())
            for part in (
                np.abs(fills.shares * fills.price),
                fills.commission + fills.stamp,
                fills.slippage,
            )
        )
        return Cost(value, fees, slippage, fees + slippage)

    def curve(self) -> str:
        """The equity up to the day as points of a line, 600 by 100."""
        value = self.equities[-_CURVE:]
        low, high = float(value.min()), float(value.max())
        x = np.linspace(0.0, 600.0, len(value))
        y = 100.0 * (high - value) / max(high - low, 1e-12)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def summarise(
    bundle: Bundle, journal: Journal, day: date | None = None, drawdown: float | None = None
) -> Day:
    """A day of a journal. day: None: the last one; drawdown: that is alerted of"""
    results = gather(bundle, journal)
    times = results.decisions["time"]
    days = times.cast(pl.Date)
    day = days[-1] if day is None else day
    rows = (days == day).arg_true().to_list()
    if not rows:
        raise DataError(
            f"{journal.path}: nothing was decided on {day}; it has decisions from {days[0]} to "
            f"{days[-1]}. Name a day with a bar in it."
        )
    first, last = max(rows[0] - 1, 0), rows[-1]
    decisions = enumerate(journal.entries(kinds=("decision",)))
    bodies = [entry.body for k, entry in decisions if first <= k <= last]
    close = np.nan_to_num(LiveRows.find(journal, results.replay.world).close[[first, last]])
    after = pl.col("after").is_in(times[first:last].implode())
    fills = read_table_of(journal, "fills").filter(after)
    alerts = _alerts(journal, str(day), drawdown)
    done = Day(day, results, bodies, slice(first, last), close[0], close[1], fills, alerts)
    note_check(journal.path, str(day), equal=not done.differences)
    return done


def _alerts(journal: Journal, day: str, drawdown: float | None) -> list[Alert]:
    reader, today = AlertReader(drawdown), ""
    alerts: list[Alert] = []
    entries: list[tuple[str, Mapping[str, Any]]] = []
    for entry in journal.entries():
        if entry.kind == "bars" and entry.body["time"][:10] != today:
            batch = reader.read(entries)
            alerts, entries = (batch if today == day else alerts), []
            today = entry.body["time"][:10]
        entries.append((entry.kind, entry.body))
    return reader.read(entries) if today == day else alerts


# What it says.


def verdict(day: Day, words: Words) -> str:
    """Whether the decisions came out the same when they were made again."""
    key = "summary_differs" if day.differences else "summary_equal"
    return words(key, n=f"{len(day.own):,}", differences=f"{len(day.differences):,}")


def message(day: Day, words: Words, page: str | None = None) -> Message:
    """The text for robots; an e-mail has the page besides."""
    facts, name = _facts(day, words), _name(day)
    keys = ["profit", "trades", "costs", "positions", *(["charge"] if facts["charge"] else [])]
    loud = [alert for alert in day.alerts if alert.severity != "info"]
    lines = [
        f"Echelon · {name} · {day.day}",
        *(words(f"summary_text_{key}", **facts) for key in keys),
        words("summary_text_alerts", n=len(loud)),
        *(f"· {words.alert(alert)}" for alert in loud[:_MOST_LINES]),
        verdict(day, words),
    ]
    subject = f"[Echelon] {name} · {day.day} · {facts['profit']} ({facts['share']})"
    attached = None if page is None else (f"summary-{day.day}.html", page)
    return Message(subject, "\n".join(lines), (), attached)


def render(day: Day, words: Words) -> str:
    """The page."""
    facts = _facts(day, words)
    headlines = [
        Headline(
            words(f"summary_{name}"),
            words(f"summary_{name}_note"),
            facts[name],
            "",
            {words(f"summary_{below}"): facts[below] for below in names},
        )
        for name, names in _HEADLINES.items()
    ]
    return render_page(
        "summary",
        words,
        f"{day.results.bundle.manifest['policy']} · {day.day}",
        stem=f"summary-{day.day}",
        interactive=False,
        span=_name(day),
        verdict=verdict(day, words),
        differences=day.differences[:100],
        headlines=headlines,
        curve=day.curve(),
        curve_note=words("summary_curve", n=min(len(day.equities), _CURVE)),
        tables={
            "alerts": _table(words, ("time", "alert"), _alert_rows(day, words), "events"),
            "command": _table(words, ("time", "who", "why"), _charge_rows(day, words), "events"),
            "positions": _table(
                words, ("symbol", "shares", "weight", "profit"), _position_rows(day, words)
            ),
            "fills": _table(
                *(words, ("symbol", "side", "shares", "price", "value", "fees")),
                _fill_rows(day, words),
            ),
            "costs": _table(
                *(words, ("part", "paid", "model", "paid_bp", "model_bp")),
                _cost_rows(day, words),
                "whole",
            ),
        },
    )


_HEADLINES: Mapping[str, Sequence[str]] = {
    "profit": ("share",),
    "equity": ("drawdown",),
    "trades": ("value", "orders"),
    "costs": ("bp", "model"),
    "cash": (),
}
"""What stands large on the page → what stands below it."""


def _name(day: Day) -> str:
    return f"{day.results.bundle.manifest['policy']} · {day.results.status['broker']}"


def _money(value: float, sign: str = "") -> str:
    text = f"{value:{sign},.{0 if abs(value) >= 1e4 else 2}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _facts(day: Day, words: Words) -> dict[str, str]:
    """What both the page and the text say."""
    own = pl.col("time").cast(pl.Date) == day.day
    orders, stopped = day.results.orders.filter(own), day.results.stopped.filter(own)
    start = day.equity - day.profit
    paid, model = day.cost(day.results.live), day.cost(day.results.replay.backtest)
    held = [f"{h.symbol} {h.share:.1%}" for h in day.holdings if h.shares]
    more = f" (+{len(held) - _MOST_LINES})" if len(held) > _MOST_LINES else ""
    share = f"{day.profit / start if start else 0.0:+.2%}"
    return {
        "profit": _money(day.profit, "+"),
        "share": share.replace("-", "\N{MINUS SIGN}"),
        "equity": _money(day.equity),
        "drawdown": f"{1.0 - day.equity / float(day.equities.max()):.1%}",
        "trades": f"{day.fills.height:,}",
        "value": _money(paid.value),
        "orders": f"{orders.height:,}",
        "stopped": f"{stopped.height:,}",
        "rejected": f"{orders.filter(pl.col('state') == 'rejected').height:,}",
        "cash": f"{day.bodies[-1]['account']['cash'] / day.equity if day.equity else 0.0:.1%}",
        "held": (words("comma").join(held[:_MOST_LINES]) or words("summary_none")) + more,
        "costs": _money(paid.total),
        "bp": paid.bp(paid.total),
        "model": model.bp(model.total),
        "charge": "" if (charge := day.own[-1]["in_charge"]) is None else words.in_charge(charge),
    }


def _table(
    words: Words, names: Sequence[str], rows: Iterable[Sequence[Content]], kind: str = ""
) -> Table | None:
    return headed_table(words, "summary", names, islice(rows, _MOST_ROWS), kind)


def _alert_rows(day: Day, words: Words) -> Iterator[list[Content]]:
    for alert in day.alerts:
        yield [time_text(alert.time), Cell(words.alert(alert), "text")]


def _charge_rows(day: Day, words: Words) -> Iterator[list[Content]]:
    """When somebody else took over, or risk control changed something."""
    last = None
    for body in day.own:
        charge = body["in_charge"]
        if charge is None:
            continue
        now = [charge[name] for name in ("expert", "masked", "halted", "position_scale")]
        if now != last:
            texts = words.who(charge["expert"]), words.in_charge(charge)
            yield [time_text(body["time"]), *(Cell(text, "text") for text in texts)]
        last = now


def _position_rows(day: Day, words: Words) -> Iterator[list[Content]]:
    for symbol, shares, share, gain in day.holdings:
        yield [symbol, f"{shares:,.6g}", f"{share:.1%}", _money(gain, "+")]
    rest = day.profit - sum(holding.gain for holding in day.holdings)
    if abs(rest) > 0.005:
        yield [words("summary_rest"), "", "", _money(rest, "+")]


def _fill_rows(day: Day, words: Words) -> Iterator[list[Content]]:
    for fill in day.fills.iter_rows(named=True):
        side = words(f"execution_{'buy' if fill['shares'] > 0 else 'sell'}")
        shares, price = abs(fill["shares"]), fill["price"]
        money = shares * price, fill["commission"] + fill["stamp"]
        yield [fill["symbol"], side, f"{shares:,.6g}", f"{price:,.6g}", *map(_money, money)]


def _cost_rows(day: Day, words: Words) -> Iterator[list[Content]]:
    """Of the account, and of the backtest of the same bars."""
    books = day.cost(day.results.live), day.cost(day.results.replay.backtest)
    if not any(book.value for book in books):
        return
    for name in Cost._fields:
        parts = [getattr(book, name) for book in books]
        shares = [book.bp(part) for book, part in zip(books, parts, strict=True)]
        yield [
            words("summary_costs" if name == "total" else f"summary_{name}"),
            *map(_money, parts),
            *(shares if name != "value" else (DASH, DASH)),
        ]
