"""The report of live trading: live beside the backtest of the same bars, and why not more.

DIR/report.html    everything, self-contained; in Chinese report.zh.html
DIR/equity.png     equity and drawdown of both, for slides; in Chinese equity.zh.png

The journal is run again first (`replay_journal`), so that the page says whether live was what a
backtest is; then both books go through the charts and tables of a run's report.
templates/live.html says what is on the page.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from echelon.backtest.baselines import run_baselines
from echelon.backtest.files import tables_of
from echelon.backtest.run import Backtest
from echelon.evaluation.evaluate import Evaluation
from echelon.files import write_atomic
from echelon.live.journal import START, Journal
from echelon.live.replay import JournalReplay, replay_journal
from echelon.live.results import SHORTFALL, live_backtest, outcomes, shortfalls
from echelon.live.tables import last_status, read_table_of
from echelon.ops.measures import LABELS
from echelon.population.record import CommandRecord, record_of
from echelon.report import hierarchy
from echelon.report.charts import books as charts
from echelon.report.charts import hierarchy as hierarchy_charts
from echelon.report.charts.chart import BACKTEST, DATES, Axis, BarStack, Curve, Plot
from echelon.report.charts.slides import Slide, draw_slide, slide_words
from echelon.report.pages import Cell, Content, Named, Table, headed_table, render_page
from echelon.report.rules import rules_text
from echelon.report.run import tables
from echelon.report.run.facts import CODE, FactRows
from echelon.report.run.gather import Record, SplitData
from echelon.report.series import period_starts, shortest_period
from echelon.report.texts import DASH, Words, file_name, languages_with, time_text
from echelon.serving.bundle import Bundle

STEM = "report"
_MOST_ROWS = 500
"""Of a table; `echelon live journal export` writes all of them."""
_MOST_NAMES = 4
_BASELINES = ("benchmark", "buy_and_hold", "equal_weight")
"""Those that need no bar before the first one: a journal has none."""
_HELD_TO = (BACKTEST, "benchmark")
_BP = 1e4
_ROLES = {"traded": "accent_soft", "untraded/no_change": "hold", "pending": "faint"}
_MOST_REASONS = 12
"""Shown as areas of their own; the others are one."""


class Verdict(NamedTuple):
    """Whether live was what the backtest is. key: better, worse or open, as trust has them"""

    key: str
    sentence: str


@dataclass(frozen=True)
class Results:
    """All that the page shows, before it has words.

    live, split: None where fewer than two bars were decided on
    """

    bundle: Bundle
    journal: Path
    offsets: Mapping[str, int]
    replay: JournalReplay
    live: Backtest | None
    split: SplitData | None
    orders: pl.DataFrame
    costs: pl.DataFrame
    outcomes: pl.DataFrame
    stopped: pl.DataFrame
    refused: pl.DataFrame
    events: pl.DataFrame
    decisions: pl.DataFrame
    status: dict[str, Any]


class Shortfall(NamedTuple):
    """The card of implementation shortfall."""

    chart: Plot
    table: Table
    note: str
    orders: Table


class WhyNot(NamedTuple):
    """The card of what was not traded."""

    chart: Plot
    table: Table
    bars: Table
    period: str


def write_live_report(bundle: Bundle, journal: Journal, output_dir: Path, lang: str) -> Path:
    """Write page and picture, and again those in other languages; returns the path asked for."""
    Words(lang)  # refuses a language that there is not
    results = gather(bundle, journal)
    written = languages_with(output_dir, STEM, lang)
    for language in written:
        words = live_words(language)
        if results.split is not None:
            shown = slide_words(words).rename(**_NAMES)
            chart = charts.equity_chart(results.split, shown)
            title = f"{bundle.manifest['policy']} · {shown('equity')}"
            slide = Slide(title, verdict(results, shown).sentence, chart, _span(results, shown))
            path = output_dir / file_name("equity", "png", language)
            write_atomic(path, draw_slide(slide, shown.lang))
        page = render(results, words, output_dir, written)
        write_atomic(output_dir / file_name(STEM, "html", language), page)
    return output_dir / file_name(STEM, "html", lang)


_NAMES = {
    "agent": "live_agent",
    "agent_one": "live_agent",
    "equity_note_one": "live_equity_note",
    "measures_note_one": "live_measures_note",
}
"""Texts of a run's report that say something else here."""


def live_words(lang: str) -> Words:
    return Words(lang).rename(**_NAMES)


def gather(bundle: Bundle, journal: Journal) -> Results:
    """Run the journal again, and take from it what the page shows."""
    replay = replay_journal(bundle, journal)
    live = split = None
    if replay.backtest is not None:
        live = live_backtest(journal, replay.world)
        split = _split(bundle, replay, live)
    last = journal.last("bars")
    names = ("orders", "stopped", "refused", "events", "decisions")
    frames = {name: read_table_of(journal, name) for name in names}
    return Results(
        bundle,
        journal.path,
        {} if last is None else last.body["offsets"],
        replay,
        live,
        split,
        costs=shortfalls(journal, replay.world),
        outcomes=outcomes(journal),
        status=last_status(journal),
        **frames,
    )


def _split(bundle: Bundle, replay: JournalReplay, live: Backtest) -> SplitData:
    """Live as the agent of an evaluation, and what it is held to."""
    assert replay.backtest is not None
    world, times = replay.world, live.times
    config = bundle.config
    chosen = tuple(name for name in config.eval.baselines if name in _BASELINES)
    config = config.model_copy(
        update={"eval": config.eval.model_copy(update={"baselines": chosen})}
    )
    every = {BACKTEST: replay.backtest, **run_baselines(world, replay.span, config)}
    facts = {
        "first": str(times[0].astype("datetime64[D]")),
        "last": str(times[-1].astype("datetime64[D]")),
        "bars": len(times),
        "periods_per_year": world.periods_per_year,
        "ledger": dict(world.ledger),
        "fees": bundle.config.eval.use_fee,
    }
    measured = {name: dict(done.measures) for name, done in every.items()}
    evaluation = Evaluation(Path(), {0: dict(live.measures)}, measured, facts)
    record: CommandRecord | None = record_of(replay.policy)
    same = not replay.differences and replay.compared == len(replay.decisions)
    agent = Record("live", 0, live.measures, tables_of(live), record if same else None)
    others = tuple(
        Record(name, None, done.measures, tables_of(done)) for name, done in every.items()
    )
    return SplitData("live", evaluation, (agent,), others)


def render(results: Results, words: Words, output_dir: Path, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    status, bundle = results.status, results.bundle
    mode = status["mode"].replace("-", "_")
    standing = "" if mode == "running" else words(f"live_mode_{mode}", why=status["why"])
    split = results.split
    held_to = {r.key: False for r in split.baselines if r.key in _HELD_TO} if split else {}
    return render_page(
        "live",
        words,
        bundle.manifest["policy"],
        stem=STEM,
        written=written,
        span=_span(results, words),
        verdict=verdict(results, words),
        standing=standing,
        differences=results.replay.differences[:100],
        results=results,
        split=split,
        leads=[] if split is None else leads(results, words),
        headlines=[] if split is None else tables.headlines(split, words, held_to),
        run={"config": bundle.config},
        events=_events_table(results, words),
        refused=_refused_table(results, words),
        stopped=_stopped_table(results, words),
        costs=_shortfall(results, words),
        why=_why_not(results, words),
        in_charge=_charge_table(results, words),
        facts=_facts(results, words, output_dir),
        code=(*CODE, "fact_bundle", "fact_journal", "fact_run"),
        charts=charts,
        tables=tables,
        hierarchy=hierarchy,
        hierarchy_charts=hierarchy_charts,
    )


def _span(results: Results, words: Words) -> str:
    times = results.decisions["time"]
    return words(
        "live_span",
        policy=results.bundle.manifest["policy"],
        broker=results.status["broker"],
        first=time_text(times[0]),
        last=time_text(times[-1]),
        bars=f"{len(times):,}",
    )


def _format_signed(value: float, digits: int) -> str:
    """With its sign; 0 for nothing."""
    return f"{value:+,.{digits}f}".replace("-", "\N{MINUS SIGN}") if value else "0"


# Whether live was what the backtest is.


def verdict(results: Results, words: Words) -> Verdict:
    """One sentence; better where both are the same to the last bit."""
    replay, n_decisions = results.replay, f"{len(results.replay.decisions):,}"
    if replay.differences:
        return Verdict("worse", words("live_verdict_differs", n=len(replay.differences)))
    if results.split is None:
        return Verdict("open", words("live_verdict_short", decisions=n_decisions))
    if not replay.compared:
        broker = results.status["broker"]
        return Verdict("open", words("live_verdict_venue", decisions=n_decisions, broker=broker))
    bars = f"{replay.compared:,}"
    if replay.touched is not None:
        time = time_text(replay.touched)
        return Verdict(
            "open", words("live_verdict_touched", time=time, bars=bars, decisions=n_decisions)
        )
    orders = f"{replay.orders:,}"
    return Verdict(
        "better",
        words("live_verdict_equal", decisions=n_decisions, orders=orders, bars=bars),
    )


def leads(results: Results, words: Words) -> list[str]:
    """What came out, what orders cost, what the gates did."""
    assert results.live is not None
    assert results.replay.backtest is not None
    gain = LABELS["total_return"].format
    live, backtest = (
        float(book.value[-1] / book.value[0] - 1.0)
        for book in (results.live, results.replay.backtest)
    )
    costs, value = float(results.costs["total"].sum()), float(results.costs["value"].sum())
    sent = results.orders.height
    filled = results.orders.filter(pl.col("filled") > 0).height
    halts = results.events.filter(kind="halt").height
    gap = _format_signed((live - backtest) * _BP, 2)
    return [
        words("live_lead_return", live=gain(live), backtest=gain(backtest), gap=gap),
        words(
            "live_lead_orders",
            sent=f"{sent:,}",
            filled=f"{filled:,}",
            shortfall=DASH if value <= 0.0 else _format_signed(costs / value * _BP, 1),
            value=f"{value:,.0f}",
            share=f"{_format_signed(100 * costs / float(results.live.value[0]), 2)} %",
        ),
        words(
            "live_lead_gates",
            stopped=f"{results.stopped.height:,}",
            refused=f"{results.refused.height:,}",
            halts=f"{halts:,}",
        ),
    ]


# What happened.

_PLAIN = (START, "recovered", "command")
"""Events of which their name says all."""


def _events_table(results: Results, words: Words) -> Table | None:
    rows: list[list[Content]] = []
    for event in reversed(results.events.filter(pl.col("kind") != "snapshot").rows(named=True)):
        kind, name = event["kind"], event["name"]
        what = words.term("live_kind", kind)
        if kind in ("halt", "command") and name:
            what += words("colon") + words.term(f"live_{kind}", name)
        detail = event["detail"] or ("" if kind in _PLAIN else event["document"])
        cells = (Cell(text, "text") for text in (what, event["by"] or "", detail))
        rows.append([time_text(event["after"]), *cells])
    return headed_table(
        words, "live", ("after", "event", "by", "detail"), rows[:_MOST_ROWS], "events"
    )


def _refused_table(results: Results, words: Words) -> Table | None:
    names = ("reason", "count", "symbols", "first", "last")
    text = partial(words.term, "refused")
    return _count_table(results.refused, words, "reason", names, text)


def _stopped_table(results: Results, words: Words) -> Table | None:
    value = pl.max_horizontal(pl.col("wanted").abs(), "shares") * pl.col("price")
    worth = pl.when(pl.col("spend") > 0).then(pl.col("spend")).otherwise(value)
    names = ("reason", "count", "value", "symbols", "first", "last")
    text = partial(words.term, "stopped")
    return _count_table(
        results.stopped.with_columns(value=worth), words, "code", names, text, ",.0f"
    )


def _count_table(
    frame: pl.DataFrame,
    words: Words,
    by: str,
    names: Sequence[str],
    text: Callable[[str], str],
    form: str = "",
) -> Table | None:
    """A row a reason: how often, by `form` the sum of the column value, most symbols, and when."""
    often = pl.col("symbol").drop_nulls().value_counts(sort=True).struct.field("symbol")
    counts = frame.group_by(by).agg(
        *([pl.sum("value")] if form else []),
        n=pl.len(),
        symbols=often.head(_MOST_NAMES),
        first=pl.min("time"),
        last=pl.max("time"),
    )
    rows: list[list[Content]] = [
        [
            Named(text(row[by]), row[by].rpartition("/")[2]),
            f"{row['n']:,}",
            *([f"{row['value']:{form}}"] if form else []),
            ", ".join(filter(None, row["symbols"])),
            time_text(row["first"]),
            time_text(row["last"]),
        ]
        for row in counts.sort(["n", by], descending=[True, False]).iter_rows(named=True)
    ]
    return headed_table(words, "live", names, rows)


def _charge_table(results: Results, words: Words) -> Table | None:
    """Of a hierarchy: who was in charge how often."""
    decisions = results.decisions.filter(pl.col("expert").is_not_null())
    if decisions.is_empty():
        return None
    counts = decisions["expert"].value_counts(sort=True)
    rows: list[list[Content]] = []
    for name, n in counts.iter_rows():
        masked = decisions["masked"].str.split(", ").list.contains(name).sum()
        rows.append([words.who(name), f"{n / decisions.height:.1%}", f"{masked:,}"])
    return Table([words(name) for name in ("who", "live_bars_share", "live_masked")], rows)


# What orders cost.


def _shortfall(results: Results, words: Words) -> Shortfall | None:
    costs = results.costs.filter(pl.col("value") > 0)
    if costs.is_empty() or results.live is None:
        return None
    value = float(costs["value"].sum())
    filled = float((costs["filled"] * costs["arrival"]).sum())
    note = words(
        "live_shortfall_orders",
        orders=f"{costs.height:,}",
        value=f"{value:,.0f}",
        filled=f"{min(filled / value, 1.0):.1%}",
    )
    worst = costs.sort("total", descending=True).head(_MOST_ROWS)
    chart = _shortfall_plot(costs, float(results.live.value[0]), words)
    return Shortfall(chart, _parts_table(costs, words), note, _orders_table(worst, words))


def _shortfall_plot(costs: pl.DataFrame, initial: float, words: Words) -> Plot:
    """Parts and total so far, in per cent of the equity at the start."""
    by_bar = costs.group_by("time").agg(pl.sum("total", *SHORTFALL)).sort("time")
    times, layers = by_bar["time"].to_numpy(), []
    roles = dict(zip(SHORTFALL, ("asset1", "slippage", "commission", "loss"), strict=True))
    for name in (*SHORTFALL, "total"):
        if not (by_bar[name] != 0.0).any():
            continue
        so_far = by_bar[name].cum_sum().to_numpy() / initial * 100.0
        role, width = ("accent", 2.6) if name == "total" else (roles[name], 1.4)
        title = words(f"live_part_{name}")
        layers.append(Curve(times, so_far, width, name=title, role=role, hover=".3f"))
    return Plot(layers, DATES, Axis(words("live_shortfall_so_far")))


def _parts_table(costs: pl.DataFrame, words: Words) -> Table:
    """Money, and basis points of what was ordered: of all orders, of buys, of sells."""
    sides = [costs, costs.filter(side="buy"), costs.filter(side="sell")]
    rows: list[list[Content]] = []
    for name in (*SHORTFALL, "total"):
        worth = [float(side["value"].sum()) for side in sides]
        money = [float(side[name].sum()) for side in sides]
        shares = [
            _format_signed(part / whole * _BP, 2) if whole > 0.0 else DASH
            for part, whole in zip(money, worth, strict=True)
        ]
        rows.append([words(f"live_part_{name}"), _format_signed(money[0], 0), *shares])
    head = [words(f"live_{name}") for name in ("part", "money", "bp", "buys", "sells")]
    return Table(head, rows, "measures whole")


def _orders_table(costs: pl.DataFrame, words: Words) -> Table:
    rows: list[list[Content]] = []
    for order in costs.iter_rows(named=True):
        side = words(f"execution_{order['side']}")
        parts = [
            _format_signed(order[name] / order["value"] * _BP, 1) for name in (*SHORTFALL, "total")
        ]
        reason = "" if order["reason"] is None else words.term("reason", order["reason"])
        rows.append(
            [
                time_text(order["time"]),
                order["symbol"],
                side,
                f"{order['asked']:,.6g}",
                f"{order['filled']:,.6g}",
                f"{order['arrival']:,.6g}",
                DASH if order["price"] is None else f"{order['price']:,.6g}",
                *parts,
                _format_signed(order["total"], 2),
                Cell(reason, "text"),
            ]
        )
    names = ("after", "symbol", "side", "asked", "filled", "arrival", "price")
    titles = [words(f"live_{name}") for name in names]
    bp = [f"{words(f'live_part_{name}')}, {words('live_bp')}" for name in (*SHORTFALL, "total")]
    return Table([*titles, *bp, words("live_money"), words("live_reason")], rows, "measures events")


# Why nothing was traded.


def _why_not(results: Results, words: Words) -> WhyNot | None:
    every = results.outcomes
    if every.is_empty():
        return None
    keyed = every.with_columns(
        key=pl.when(pl.col("kind").is_in(["traded", "pending"]))
        .then(pl.col("kind"))
        .otherwise(pl.col("kind") + "/" + pl.col("code"))
    )
    period = shortest_period(keyed["time"].unique().sort().to_numpy(), charts.MOST_BARS)
    table = _count_table(
        keyed.with_columns(value=pl.lit(1.0 / keyed.height)),
        *(words, "key", ("reason", "count", "why_share", "why_often", "first", "last")),
        *(lambda key: _why_text(key, words), ".1%"),
    )
    assert table is not None, "there are outcomes"
    return WhyNot(_why_plot(keyed, words), table, _why_bars(keyed, words), period)


def _why_text(key: str, words: Words) -> str:
    """What came of a symbol at a bar, in words. key: kind, or kind/code"""
    kind, _, code = key.partition("/")
    if kind == "untraded":
        return words.term("untraded", code)
    if not code:
        return words(f"live_kind_{kind}")
    term = "stopped" if kind == "stopped" else "reason"
    return words(f"live_kind_{kind}") + words("colon") + words.term(term, code)


def _why_plot(keyed: pl.DataFrame, words: Words) -> Plot:
    """Shares of what came of symbols, by period."""
    times = keyed["time"].to_numpy()
    every = np.unique(times)
    starts, group = np.unique(
        period_starts(times, shortest_period(every, charts.MOST_BARS)), return_inverse=True
    )
    total = np.bincount(group, minlength=len(starts))
    counts = keyed["key"].value_counts(sort=True)["key"].to_list()
    keys = sorted(counts, key=lambda key: (key != "traded", key == "untraded/no_change"))
    shown, rest = keys[:_MOST_REASONS], keys[_MOST_REASONS:]
    codes = keyed["key"].to_numpy()
    layers = []
    for k, key in enumerate(shown):
        share = np.bincount(group, codes == key, len(starts)) / total
        role = _ROLES.get(key, f"asset{k % 16}")
        title = _why_text(key, words)
        layers.append(BarStack(starts, share, name=title, role=role, hover=".1%"))
    if rest:
        share = np.bincount(group, np.isin(codes, rest), len(starts)) / total
        title = words("other_assets", n=len(rest))
        layers.append(BarStack(starts, share, name=title, role="rest", hover=".1%"))
    return Plot(layers, DATES, Axis(words("live_why_share"), form="percent", low=0, high=1))


def _why_bars(keyed: pl.DataFrame, words: Words) -> Table:
    """A row a bar, newest first: what was traded, and of all other symbols why not."""
    times = keyed["time"].unique().sort(descending=True).head(_MOST_ROWS)
    parts = (
        keyed.filter(pl.col("time").is_in(times.implode()))
        .group_by("time", "key", maintain_order=True)
        .agg(pl.col("symbol"))
    )
    by_bar: dict[Any, dict[str, list[str]]] = {}
    for time, key, symbols in parts.iter_rows():
        by_bar.setdefault(time, {})[key] = symbols
    rows: list[list[Content]] = []
    for time in times:
        groups = by_bar[time]
        done = groups.pop("traded", [])
        text = words("join").join(
            _why_text(key, words) + words("colon") + _names(symbols)
            for key, symbols in sorted(groups.items(), key=lambda item: len(item[1]))
        )
        rows.append(
            [time_text(time), Cell(_names(done) if done else "0", "text"), Cell(text, "text")]
        )
    head = [words(name) for name in ("live_after", "live_kind_traded", "live_no_order")]
    return Table(head, rows, "measures events")


def _names(symbols: Sequence[str]) -> str:
    """The symbols, or of many how many there are."""
    return ", ".join(symbols) if len(symbols) <= _MOST_NAMES else f"{len(symbols):,}"


def _facts(results: Results, words: Words, output_dir: Path) -> FactRows:
    bundle, replay, offsets = results.bundle, results.replay, results.offsets
    origin = bundle.manifest["origin"]
    command = ["echelon", "live", "report", "--bundle", str(bundle.path)]
    command += ["--journal", str(results.journal), "--output-dir", str(output_dir)]
    if words.lang != "en":
        command += ["--lang", words.lang]
    rules: FactRows = []
    if replay.world.in_force is not None:
        facts = replay.world.in_force.facts() | {"fill": replay.world.ledger["fill"]}
        rules = [("fact_rules", [rules_text(facts, words)])]
    seq = f"{results.status['entries']:,}"
    entries = words("live_journal_entries", name=results.journal.name, entries=seq)
    return [
        ("fact_bundle", [f"{bundle.path} · {bundle.id[:20]}"]),
        ("fact_policy", [bundle.manifest["policy"]]),
        ("fact_run", [f"{origin['run']} · {origin['config_hash'][:20]}"]),
        ("fact_broker", [str(results.status["broker"])]),
        ("fact_journal", [entries]),
        ("fact_offsets", [f"{source}: {offset:,}" for source, offset in offsets.items()] or [DASH]),
        ("fact_replayed", [verdict(results, words).sentence]),
        ("fact_assets", [str(len(bundle.symbols))]),
        ("fact_fill", [words.term("ledger", replay.world.ledger["fill"])]),
        *rules,
        ("fact_report", [shlex.join(command)]),
    ]
