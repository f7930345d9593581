"""The tables of a report: readable without JavaScript, on paper and by screen readers.

The lead says what came out in plain words that claim no more than the numbers do. The agent is held
to two others: the benchmark index and the baseline with the best annualised Sharpe ratio on the
same span (chosen afterwards, which favours the baseline).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from echelon.backtest.ensemble import ENSEMBLE
from echelon.evaluation.trust import by_row
from echelon.ops.measures import LABELS, MeanStd, mean_std
from echelon.report.pages import Cell, Content, Headline, Named, NotedTable, Table
from echelon.report.run.gather import SplitData
from echelon.report.series import MonthlyReturns, mean_monthly, monthly_returns
from echelon.report.series import rejections as count_orders
from echelon.report.texts import DASH, MEAN, Words

HEADLINES = ("sharpe_annual", "total_return", "max_drawdown", "volatility_period", "sharpe_period")
"""Those of the design notes, and the annualised Sharpe ratio."""
REFERENCES = (
    *("total_return", "annual_return", "sharpe_annual", "calmar", "max_drawdown"),
    *("turnover_annual", "cost_share"),
)
"""Measures of reference policies over the same experts."""
PARTS = ("spread", "impact", "timing", "fees", "total", "against_twap", "against_vwap")
"""Of the cost of execution."""
_RANGES = {1: "range_1m", 3: "range_3m", 6: "range_6m", 12: "range_1y", 36: "range_3y"}
"""Months that a button shows."""


def rivals(split: SplitData) -> dict[str, bool]:
    """The best baseline by Sharpe ratio first, then the benchmark → whether it is the best."""
    ranked = {r.key: r.measures["sharpe_annual"] for r in split.baselines}
    finite = {key: value for key, value in ranked.items() if math.isfinite(value)}
    best = max(finite, key=lambda key: finite[key]) if finite else None
    return {key: key == best for key in (best, "benchmark") if key is not None and key in ranked}


def verdict(agent: MeanStd, other: float) -> str:
    """Where the agent's mean stands: above, below or, within the std of the seeds, level."""
    if not math.isnan(agent.std) and abs(agent.mean - other) <= agent.std:
        return "level"
    return "above" if agent.mean > other else "below"


def lead(split: SplitData, words: Words, measure: str) -> str:
    """One sentence: the agent's value, its rivals', and how they compare."""
    label = LABELS[measure]
    agent = split.evaluation.over_seeds(measure)
    seeds = words.count("over_seeds", len(split.agents))
    value = label.format(agent.mean, agent.std)
    parts = [words("lead_agent", measure=words.measure(measure), value=value, seeds=seeds)]
    by_verdict: dict[str, list[str]] = {"above": [], "level": [], "below": []}
    for key, best in rivals(split).items():
        name, other = words.in_text(key), split.evaluation.baselines[key][measure]
        shown = words("best_baseline", name=name) if best else name
        parts.append(words("lead_other", name=shown, value=label.format(other)))
        if not math.isnan(agent.mean + other):  # what is not known is not compared
            by_verdict[verdict(agent, other)].append(name)
    if len(parts) == 1:
        parts.append(words("lead_alone"))
    compared = words("comma").join(
        words(f"lead_{kind}", names=words("and").join(names))
        for kind, names in by_verdict.items()
        if names
    )
    return words("join").join(parts) + (compared and words("colon") + compared) + words("stop")


def leads(split: SplitData, words: Words) -> list[str]:
    """The sentences that a page begins with."""
    return [lead(split, words, name) for name in ("sharpe_annual", "total_return")]


def limits_note(facts: Mapping[str, Any], words: Words) -> str:
    """What limits every real book, of agents and baselines alike; empty: nothing does."""
    limits = facts.get("limits", {})
    percent = LABELS["max_drawdown"].format
    set_ones = [
        words(f"limits_{name}", value=percent(limits[name]))
        for name in ("max_drawdown", "target_volatility")
        if limits.get(name) is not None
    ]
    if not set_ones:
        return ""
    return words("limits_note", limits=words("and").join(set_ones))


def headlines(
    split: SplitData, words: Words, held_to: Mapping[str, bool] | None = None
) -> list[Headline]:
    """The headline measures: the agent large, what it is held to (as of `rivals`) below."""
    items = []
    others_by_key = rivals(split) if held_to is None else held_to
    for name in HEADLINES:
        label, agent = LABELS[name], split.evaluation.over_seeds(name)
        others = {}
        for key, best in others_by_key.items():
            title = words.name(key)
            shown = words("best_short", name=title) if best else title
            others[shown] = label.format(split.evaluation.baselines[key][name])
        spread = label.format(agent.mean, agent.std).partition(" ± ")[2]
        texts = words.measure(name), words.meaning(name)
        items.append(Headline(*texts, label.format(agent.mean), spread, others))
    return items


def range_titles(split: SplitData, words: Words) -> dict[str, str]:
    """Months of a button → what it says: spans shorter than the split, and all of it."""
    months = (split.times[-1] - split.times[0]).astype("timedelta64[D]").astype(int) / 30.4
    spans = {str(n): words(text) for n, text in _RANGES.items() if n < months}
    return spans | {"0": words("range_all")}


def measure_name(name: str, words: Words) -> Named:
    return Named(words.measure(name), words.meaning(name))


def measures_table(split: SplitData, words: Words) -> Table:
    """A row a measure: the agent's mean ± std, the ensemble, the baselines; the best is marked."""
    joined = split.evaluation.ensemble
    books = {} if joined is None else {ENSEMBLE: joined}
    books |= {r.key: r.measures for r in split.baselines}
    head = [words("measure"), words("agent"), *map(words.name, books)]
    rows: list[list[Content]] = []
    for name, label in LABELS.items():
        agent = split.evaluation.over_seeds(name)
        values = {"agent": agent.mean} | {key: own[name] for key, own in books.items()}
        best = best_of(name, values)
        shown = {key: label.format(value) for key, value in values.items()}
        shown["agent"] = label.format(agent.mean, agent.std)
        kinds = {key: ["agent"] * (key == "agent") + ["best"] * (key in best) for key in shown}
        cells = [Cell(text, " ".join(kinds[key])) for key, text in shown.items()]
        rows.append([measure_name(name, words), *cells])
    return Table(head, rows, "measures against")


def seeds_table(split: SplitData, words: Words) -> Table:
    books = {record.key: record.measures for record in split.agents}
    head = [words("measure"), *map(words.name, books)]
    rows: list[list[Content]] = [
        [measure_name(name, words), *(label.format(own[name]) for own in books.values())]
        for name, label in LABELS.items()
    ]
    return Table(head, rows)


def best_of(measure: str, values: Mapping[str, float]) -> frozenset[str]:
    """Keys of the best values of a measure, by what is printed; none where no order is better.

    Cash risks nothing and the index pays nothing, by construction: where less is better cash is
    left out, and costs are not ranked.
    """
    label = LABELS[measure]
    if label.higher_is_better is None or measure.startswith("cost_"):
        return frozenset()
    entered = {k: v for k, v in values.items() if not math.isnan(v)}
    if not label.higher_is_better:
        entered.pop("cash", None)
    if not entered:
        return frozenset()
    best = (max if label.higher_is_better else min)(entered.values())
    return frozenset(k for k, v in entered.items() if label.format(v) == label.format(best))


def monthly_by_key(split: SplitData) -> dict[str, MonthlyReturns]:
    """Key → monthly returns; `mean` is the mean over the seeds, first where there are several."""
    months = {r.key: monthly_returns(split.times, split.over_span(r.value)) for r in split.records}
    if len(split.agents) > 1:
        return {MEAN: mean_monthly([months[r.key] for r in split.agents])} | months
    return months


def monthly_tables(split: SplitData, words: Words) -> dict[str, Table]:
    """Key of an agent or baseline, or `mean` → heat map of its monthly returns."""
    head = ["", *words("months").split(), words("year")]
    tables = {}
    for key, returns in monthly_by_key(split).items():
        rows: list[list[Content]] = []
        for year, months, total in zip(returns.years, returns.months, returns.totals, strict=True):
            cells = [_heat(float(value)) for value in months]
            rows.append([str(year), *cells, _heat(float(total), total=True)])
        tables[key] = Table(head, rows, "heat")
    return tables


def monthly_text(value: float) -> str:
    """Per cent to one decimal; empty for NaN."""
    text = "" if math.isnan(value) else f"{value * 100:.1f}".replace("-", "−")
    return "0.0" if text == "−0.0" else text


def _heat(value: float, *, total: bool = False) -> Cell:
    text = monthly_text(value)
    if not text:
        return Cell("", "none")
    if total:
        return Cell(f"{text} %", "total")
    strength = min(abs(value) / 0.10, 1.0)  # a month of 10 % has the full colour
    side = "gain" if value >= 0 else "loss"
    strong = " strong" if strength > 0.75 else ""
    return Cell(text, side + strong, strength=f"{strength * 100:.0f}")


def orders_table(split: SplitData, words: Words) -> Table | None:
    """Orders in all, filled whole, and cut by reason; None where none was cut."""
    others = [r for r in split.baselines if r.key not in ("benchmark", "cash")]
    every = [count_orders(r.tables.blotter) for r in (*split.agents, *others)]
    total = Counter[str]()
    for counted in every:
        total.update(counted.by_reason)
    if not total:
        return None

    def row(name: str, counts: Sequence[int]) -> list[Content]:
        mean = float(np.mean(counts[: len(split.agents)]))
        rest = counts[len(split.agents) :]
        return [name, Cell(f"{mean:,.0f}", "agent"), *(f"{n:,}" for n in rest)]

    rows = [
        row(words("orders"), [counted.orders for counted in every]),
        row(words("orders_whole"), [counted.whole for counted in every]),
        *(
            row(
                words.term("reason", reason),
                [counted.by_reason.get(reason, 0) for counted in every],
            )
            for reason in sorted(total, key=lambda reason: (-total[reason], reason))
        ),
    ]
    head = [words("reason"), words("agent"), *(words.name(r.key) for r in others)]
    return Table(head, rows, "measures against")


def references_table(split: SplitData, words: Words) -> Table:
    """A row a measure: the agent and the rows over its experts, mean ± std over seeds."""
    columns = by_row(split.evaluation.reference_policies, best=True)
    head = [words("measure"), words("agent"), *map(words.reference, columns)]
    rows: list[list[Content]] = []
    for name in REFERENCES:
        every = [list(split.evaluation.seeds.values()), *columns.values()]
        means = (mean_std([values[name] for values in seeds]) for seeds in every)
        agent, *others = (LABELS[name].format(*mean) for mean in means)
        rows.append([measure_name(name, words), Cell(agent, "agent"), *others])
    return Table(head, rows, "measures against")


def references_by_seed(split: SplitData, words: Words) -> Table:
    references, seeds = split.evaluation.reference_policies, split.evaluation.seeds
    ratio = LABELS["sharpe_annual"].format
    head = [words.measure("sharpe_annual"), *(words.name(f"seed-{seed}") for seed in seeds)]
    rows = [[words("agent"), *(ratio(values["sharpe_annual"]) for values in seeds.values())]]
    for name in dict.fromkeys(name for own in references.values() for name in own):
        books = [references.get(seed, {}).get(name) for seed in seeds]
        cells = [DASH if values is None else ratio(values["sharpe_annual"]) for values in books]
        rows.append([words.reference(name), *cells])
    return Table(head, rows)


def forecast_table(split: SplitData, words: Words) -> NotedTable | None:
    """Rank ICs of the forecaster by window, and how it is traded; None where there is none."""
    facts = split.facts.get("forecast")
    if facts is None:
        return None
    head = [words(key) for key in ("forecast_window", "rank_ic", "interval_95", "icir", "days")]
    rows: list[list[Content]] = []
    for name, ic in facts["rank_ic"].items():
        low, high = ("" if ic[end] is None else f"{ic[end]:.3f}" for end in ("low", "high"))
        interval = words("range", low=low, high=high) if low and high else DASH
        numbers = (DASH if value is None else value for value in (ic["ic"], ic["icir"]))
        mean, ratio = (n if isinstance(n, str) else f"{n:.3f}" for n in numbers)
        rows.append([words(f"split_{name}"), mean, interval, ratio, f"{ic['days']:,}"])
    shown = {name: facts[name] for name in ("top", "tranches", "horizon", "cells")}
    note = words(
        "forecast_note",
        model=words(f"forecast_{facts['model']}"),
        kept=f"{facts['top'] * facts['buffer']:.0f}",
        choices=len(facts["choices"]),
        **{name: f"{number:,}" for name, number in shown.items()},
    )
    return NotedTable(Table(head, rows), note)


def forecast_choices(split: SplitData, words: Words) -> Table:
    """What was tried on the validation window, the chosen one marked."""
    facts = split.facts["forecast"]
    head = [words(key) for key in ("forecast_top", "forecast_buffer", "forecast_ratio")]
    rows: list[list[Content]] = []
    for choice in facts["choices"]:
        mark = "best" if all(choice[n] == facts[n] for n in ("top", "buffer")) else ""
        ratios = (choice["information_ratio"], choice["sharpe_annual"])
        cells = (DASH if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        texts = (f"{choice['top']:,}", f"{choice['buffer']:g}×", *cells)
        rows.append([Cell(text, mark) for text in texts])
    return Table([*head, words.measure("sharpe_annual")], rows, "measures")


def execution_table(split: SplitData, words: Words) -> NotedTable | None:
    """What working the orders cost by book, in basis points; None where nothing is known."""
    blotters = {
        r.key: r.tables.blotter for r in split.records if "arrival" in r.tables.blotter.columns
    }
    costs = {key: execution_costs(blotter) for key, blotter in blotters.items()}
    shown = {key: own for key, own in costs.items() if own}
    if not shown:
        return None
    head = [words("worked_book"), *(words(f"worked_{name}") for name in PARTS)]
    rows = [
        [words.name(key), *(f"{own[name]:+.2f}" for name in PARTS)] for key, own in shown.items()
    ]
    fills = pl.concat([blotters[key].select("shares", "worked", "twap") for key in shown])
    fills = fills.filter(pl.col("shares") > 0)
    unknown = fills["twap"].null_count() / len(fills)
    at_once = int((~fills["worked"]).sum()) / len(fills)
    note = ""
    # Fills that no executor worked: all by choice, or some for want of bars.
    if at_once == 1.0 and unknown < 1.0:
        note = words("worked_immediate", share=f"{1.0 - unknown:.1%}")
    elif at_once:
        note = words("worked_at_once", share=f"{at_once:.1%}")
    return NotedTable(Table(head, rows), words("worked_note") + note)


def execution_costs(blotter: pl.DataFrame) -> dict[str, float]:
    """Basis points of the value at arrival, less fees against TWAP and VWAP; may be nothing."""
    sign = pl.when(pl.col("side") == "buy").then(1.0).otherwise(-1.0)
    fills = blotter.filter((pl.col("shares") > 0) & pl.col("arrival").is_not_null()).with_columns(
        value=pl.col("shares") * pl.col("arrival"),
        fees=pl.col("commission") + pl.col("stamp"),
        **{
            f"against_{base}": sign * pl.col("shares") * (pl.col("price") - pl.col(base))
            for base in ("twap", "vwap")
        },
    )
    arrived = float(fills["value"].sum())
    if arrived <= 0.0:
        return {}
    costs = {name: float(fills[name].sum()) / arrived for name in PARTS[:4]}
    costs["total"] = sum(costs.values())
    known = fills.drop_nulls(["against_twap", "against_vwap"])
    some = float(known["value"].sum())
    for name in PARTS[5:]:
        costs[name] = float(known[name].sum()) / some if some > 0.0 else 0.0
    return {name: value * 1e4 for name, value in costs.items()}
