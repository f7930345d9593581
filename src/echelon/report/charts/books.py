"""Charts of a run: equity, months, holdings, actions, costs, differences, and its training.

Of what training logged, a plot a metric: a curve a seed, their mean, the checkpoints chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from echelon.envs.act import Action
from echelon.population.attribution import COST_PARTS
from echelon.report.charts.chart import (
    ASSET_COLOURS,
    BACKTEST,
    DATES,
    Axis,
    BarStack,
    Cells,
    Chart,
    Curve,
    Plot,
    Points,
    RefLine,
    colour_of,
)
from echelon.report.charts.slides import Slide
from echelon.report.run.gather import Record, RunData, SplitData
from echelon.report.run.tables import lead, monthly_by_key, monthly_text, rivals
from echelon.report.series import (
    choice_shares,
    decisions,
    largest_weights,
    rows_to_show,
    shortest_period,
)
from echelon.report.texts import MEAN, Words
from echelon.types import Floats, Times

MOST_POINTS = 3000
"""Of a line; longer ones are thinned."""
MOST_AREA_POINTS = 700
MOST_BARS = 84
_LEAST_HELD = 1e-4
"""Share of the book from which on an asset counts as held."""
_Curves = Mapping[int, pl.DataFrame]
"""Seed → `step` and `value` of a metric."""
MOST_ROWS = 250
"""Of a curve; longer ones are averaged in blocks, validations excepted."""
_COLUMNS = 3
_DASHES = {"random": "dot", "cash": "dot", "benchmark": "dash", BACKTEST: "dash"}
_METRICS = (
    ("charts/reward", "reward"),
    ("losses/value", "value_loss"),
    ("charts/explained_variance", "explained_variance"),
    ("losses/policy", "policy_loss"),
    ("losses/entropy", "entropy"),
    ("losses/critic", "critic_loss"),
    ("losses/actor", "actor_loss"),
    ("charts/entropy", "action_entropy"),
    ("charts/temperature", "temperature"),
    ("router/relative_return", "router_gain"),
    ("router/entropy", "router_entropy"),
    ("router/kl_lambda", "router_lambda"),
    ("router/kl_prior", "router_prior"),
)


def equity_chart(split: SplitData, words: Words, fold_starts: Sequence[str] = ()) -> Chart:
    """Growth above, drawdown below. fold_starts: days with a thin line"""
    deepest = [int(r.tables.equity["drawdown"].to_numpy().argmax()) for r in split.records]
    rows = rows_to_show(split.times, MOST_POINTS, deepest)
    times = split.times[rows]
    starts = [RefLine(day, "x", "dot", 0.7, role="faint") for day in fold_starts]
    growth: list[Curve] = []
    drawdown: list[Curve] = []

    def add(upper: Floats, lower: Floats, line: Curve) -> None:
        growth.append(replace(line, y=upper[rows]))
        below = replace(line, y=-lower[rows], listed=False, hover=line.hover and ".1%")
        drawdown.append(below)

    always = {BACKTEST, "benchmark", "equal_weight", "buy_and_hold", *rivals(split)}

    def add_other(record: Record) -> None:
        key = record.key
        look = Curve(times, (), 1.5, name=words.name(key), role=colour_of(key), group=key)
        dash, shown = _DASHES.get(key, "solid"), key in always
        add(*_curves(split, record), replace(look, dash=dash, shown=shown, hover=".3f"))  # type: ignore[arg-type]

    for record in split.baselines:
        if record.key != BACKTEST:
            add_other(record)
    for k, record in enumerate(split.agents if len(split.agents) > 1 else ()):
        look = Curve(times, (), 1.0, name=words("seeds"), role="accent_soft", group="seeds")
        add(*_curves(split, record), replace(look, listed=k == 0, hover=""))
    name = words("agent_mean", n=len(split.agents))
    if len(split.agents) == 1:
        name = words("agent_one", seed=split.agents[0].seed)
    look = Curve(times, (), 3.0, name=name, group=MEAN, lead=True, hover=".3f")
    # Money spread evenly over the seeds at the start. The mean of their drawdowns is deeper than
    # the drawdown of their mean.
    drawdowns = [r.tables.equity["drawdown"].to_numpy() for r in split.agents]
    add(split.mean([r.growth for r in split.agents]), split.mean(drawdowns), look)
    drawdown[-1] = replace(drawdown[-1], width=2.0, fill="zero")
    for record in split.baselines:  # upon live, which it equals where all is well
        if record.key == BACKTEST:
            add_other(record)
    upper = Plot([*starts, *growth], DATES, Axis(words("growth")))
    lower = Plot([*starts, *drawdown], DATES, Axis(words("drawdown"), form="percent"))
    return Chart(((upper,), (lower,)), 560, (2.5, 1), shared=True)


def _curves(split: SplitData, record: Record) -> tuple[Floats, Floats]:
    drawdown = record.tables.equity["drawdown"].to_numpy()
    return split.over_span(record.growth), split.over_span(drawdown)


def monthly_chart(split: SplitData, words: Words) -> Chart:
    """Returns of the first book by month, and by year in the last column."""
    returns = next(iter(monthly_by_key(split).values()))
    totals = returns.totals[:, None]
    written = [
        [*map(monthly_text, months), monthly_text(total) + " %" * (not math.isnan(total))]
        for months, total in zip(returns.months.tolist(), returns.totals.tolist(), strict=True)
    ]
    values = np.concatenate([returns.months, np.full_like(totals, np.nan)], axis=1)
    months = Axis(kind="category", labels=[*words("months").split(), words("year")], top=True)
    years = Axis(kind="category", labels=[str(year) for year in returns.years])
    return Chart([[Plot([Cells(values, written, 0.10)], months, years)]], 300)


def holdings_charts(split: SplitData, words: Words) -> dict[str, Chart]:
    """Key of an agent, the median first, or `mean` → stacked shares; an asset keeps its colour."""
    stacks = {r.key: _weights(split, r) for r in split.agents}
    overall = np.mean(list(stacks.values()), axis=0)
    if len(stacks) > 1:
        stacks[MEAN] = overall
    symbols = [c for c in split.agents[0].tables.weights.columns if c != "time"]
    shown, rest = largest_weights(overall[:, :-1], ASSET_COLOURS)
    rows = rows_to_show(split.times, MOST_AREA_POINTS)
    axis = Axis(words("share"), form="percent", low=0, high=1)
    median = split.median_agent.key
    charts = {}
    for key, stack in ({median: stacks[median]} | stacks).items():
        parts = [(symbols[n], f"asset{k}", stack[:, n]) for k, n in enumerate(shown)]
        if len(rest):
            parts.append((words("other_assets", n=len(rest)), "rest", stack[:, rest].sum(axis=1)))
        parts.append((words("free_cash"), "free_cash", stack[:, -1]))
        layers = [
            Curve(split.times[rows], y[rows], fill="stack", name=name, role=role, hover=".1%")
            for name, role, y in parts
        ]
        shares = Plot(layers, DATES, axis)
        if not len(rest):
            charts[key] = Chart([[shares]], 430, legend="right")
            continue
        counts = _names_held(split.times[rows], stack[rows, :-1], words)
        charts[key] = Chart([[shares], [counts]], 560, (2.2, 1), legend="right", shared=True)
    return charts


def _names_held(times: Times, weights: Floats, words: Words) -> Plot:
    """Of weights[T,N], where they are too many to show: how many there are, and as if equal."""
    square, total = np.square(weights).sum(axis=1), weights.sum(axis=1)
    equal = np.divide(total**2, square, out=np.zeros_like(square), where=square > 0.0)
    numbers = (("names_held", (weights > _LEAST_HELD).sum(axis=1)), ("names_equal", equal))
    roles = ("accent", "loss")
    curves = [
        Curve(times, y, name=words(name), role=role, hover=".0f")
        for (name, y), role in zip(numbers, roles, strict=True)
    ]
    return Plot(curves, DATES, Axis(words("names"), low=0))


def _weights(split: SplitData, record: Record) -> Floats:
    """[T,N+1] shares of the assets and, last, of cash; a ruined book stays where it ended."""
    weights = record.tables.weights.drop("time").to_numpy().astype(np.float64)
    cash = record.tables.equity["cash_share"].to_numpy().astype(np.float64)
    return np.stack([split.over_span(column) for column in (*weights.T, cash)], axis=1)


def actions_charts(split: SplitData, words: Words) -> dict[str, Chart]:
    """Key of an agent, or `mean`, which is first → share of buys, holds and sells by period."""
    period = shortest_period(split.times, MOST_BARS)
    shares, starts = {}, split.times[:0]
    for record in split.agents:
        actions = record.tables.actions
        chosen = decisions(actions, record.tables.weights)
        own = choice_shares(actions["time"].to_numpy(), chosen, len(Action), period)
        shares[record.key] = own.shares
        starts = max(starts, own.starts, key=len)
    if len(shares) > 1:
        # Some end early: of every period the mean of those that have it.
        every = np.full((len(shares), len(starts), len(Action)), np.nan)
        for k, part in enumerate(shares.values()):
            every[k, : len(part)] = part
        shares = {MEAN: np.asarray(np.nanmean(every, axis=0))} | shares
    axis = Axis(words("decided"), form="percent", low=0, high=1)
    charts = {}
    for key, part in shares.items():
        layers = [
            BarStack(starts[: len(part)], part[:, a], name=words(name), role=name, hover=".1%")
            for a, name in ((a, a.name.lower()) for a in (Action.BUY, Action.HOLD, Action.SELL))
        ]
        charts[key] = Chart([[Plot(layers, DATES, axis)]], 300)
    return charts


def costs_over_time(split: SplitData, words: Words) -> dict[str, Chart]:
    """Key of an agent, or `mean`, which is first → costs so far, stacked, in % of initial value."""
    paid = {r.key: _costs(split, r) for r in split.agents}
    if len(paid) > 1:
        paid = {MEAN: np.mean(list(paid.values()), axis=0)} | paid
    rows = rows_to_show(split.times, MOST_AREA_POINTS)
    times, axis = split.times[rows], Axis(words("of_initial"), low=0)
    charts = {}
    for key, costs in paid.items():
        layers = [
            Curve(times, costs[rows, k], fill="stack", name=name, role=kind, hover=".2f")
            for k, kind, name in _kinds(split, words)
        ]
        charts[key] = Chart([[Plot(layers, DATES, axis)]], 320)
    return charts


def costs_by_book(split: SplitData, words: Words) -> Chart:
    """What each agent and baseline paid in all, as stacked bars."""
    records = [r for r in split.records if r.key not in ("benchmark", "cash")]
    paid = np.array([_costs(split, r)[-1] for r in records])
    layers = [
        BarStack(range(len(records)), paid[:, k], across=True, name=name, role=kind, hover=".2f")
        for k, kind, name in _kinds(split, words)
    ]
    books = Axis(labels=[words.name(r.key) for r in records])
    plot = Plot(layers, Axis(words("of_initial"), low=0), books)
    return Chart([[plot]], 320, legend="none", hover="y unified")


def _kinds(split: SplitData, words: Words) -> Iterator[tuple[int, str, str]]:
    """Kinds of cost that any book paid, with number and name; commission also where it is zero."""
    for k, kind in enumerate(COST_PARTS):
        paid = any(r.tables.equity[kind].to_numpy().any() for r in split.records)
        if paid or kind == "commission":
            yield k, kind, words(kind)


def _costs(split: SplitData, record: Record) -> Floats:
    """[T,3] costs so far, in per cent of the initial value."""
    parts = [np.cumsum(record.tables.equity[kind].to_numpy()) for kind in COST_PARTS]
    share = 100.0 / record.value[0]
    return np.stack([split.over_span(part * share) for part in parts], axis=1)


def differences_chart(
    differences: Mapping[str, Mapping[str, Any]], annual: float, words: Words
) -> Chart:
    """Sharpe ratios of the agents minus those of baselines, with intervals and a line at zero."""
    names = [words.name(key) for key in differences]
    layers: list[Points | RefLine] = [RefLine(0.0, "x", "solid", role="loss")]
    looks = (("single", -0.14, "accent", 9), ("double", 0.14, "faint", 6))
    titles = {"single": words("interval_95"), "double": words("interval_double")}
    for kind, shift, role, size in looks:
        intervals = [both[kind] for both in differences.values()]
        ends = [
            annual * np.array([math.nan if i[end] is None else i[end] for i in intervals])
            for end in ("estimate", "low", "high")
        ]
        texts = [
            f"{name}<br>{estimate:.2f} ({low:.2f}, {high:.2f})"
            for name, estimate, low, high in zip(names, *ends, strict=True)
        ]
        y = [row + shift for row in range(len(names))]
        points = Points(ends[0], y, size=size, low=ends[1], high=ends[2])
        layers.append(replace(points, name=titles[kind], role=role, texts=texts))
    plot = Plot(layers, Axis(words("sharpe_difference")), Axis(labels=names))
    return Chart([[plot]], 100 + 38 * len(names), hover="closest")


def book_slides(run: RunData, words: Words) -> dict[str, Slide]:
    split = run.main
    span = span_text(split, words)
    who = f"{words.name(next(iter(monthly_by_key(split))))} · {span}"
    median = split.median_agent
    headline = lead(split, words, "sharpe_annual")
    below = agent_text(split, median, words)
    holdings = holdings_charts(split, words)[median.key]
    name = f"{run.name} · {words('equity')}"
    return {
        "equity": Slide(name, headline, equity_chart(split, words), span),
        "monthly": Slide(f"{run.name} · {words('monthly')} (%)", who, monthly_chart(split, words)),
        "holdings": Slide(f"{run.name} · {words('holdings')}", below, holdings),
    }


def span_text(split: SplitData, words: Words) -> str:
    facts = split.facts
    span = words("span", first=facts["first"], last=facts["last"], bars=f"{facts['bars']:,}")
    return f"{words(f'split_{split.name}')} · {span}"


def agent_text(split: SplitData, agent: Record, words: Words) -> str:
    """Which agent of a split, and the split."""
    name = words.name(agent.key)
    if len(split.agents) > 1 and agent is split.median_agent:
        name = words("median_seed", name=name)
    return f"{name} · {span_text(split, words)}"


def training_chart(run: RunData, words: Words) -> Chart:
    """What training logged, a plot a metric; those that no seed has, or only as 0, are left out."""
    chosen_by = run.config.train.select_by
    titles = {metric: words(text) for metric, text in _METRICS}
    for measure in dict.fromkeys(("sharpe_annual", chosen_by)):
        titles[f"valid/{measure}"] = words("valid_measure", measure=words.measure(measure))
    if chosen_by == "sharpe_annual":
        titles["losses/gradient_norm"] = words("gradient_norm")
    known: dict[str, dict[int, pl.DataFrame]] = {}
    for metric in titles:
        for seed, log in run.logs.items():
            if metric in log.columns:
                rows = log.select("step", value=pl.col(metric).cast(pl.Float64)).drop_nulls()
                # Learners log zeros before their first update, which are no losses.
                rows = rows[int((rows["value"] != 0.0).arg_max() or 0) :]
                if (rows["value"] != 0.0).any():
                    known.setdefault(metric, {})[seed] = rows
    plots: list[Plot | None] = []
    for k, (metric, own) in enumerate(known.items()):
        x = Axis(words("steps") if k + _COLUMNS >= len(known) else "", form="steps", ticks=5)
        layers = [
            *_lines(metric, own, words, listed=k == 0),
            *_chosen_points(run, metric, own, words),
        ]
        values = np.concatenate([rows["value"].to_numpy() for rows in own.values()])
        values = values[np.isfinite(values)]
        # Where positive values spread so far that nothing else shows them.
        wide = len(values) and values.min() > 0 and values.max() > 100.0 * values.min()
        y = Axis(kind="log" if wide else "linear", ticks=5)
        plots.append(Plot(layers, x, y, titles[metric], legend="none"))
    plots += [None] * (-len(plots) % _COLUMNS)
    grid = [plots[k : k + _COLUMNS] for k in range(0, len(plots), _COLUMNS)] or [[None]]
    return Chart(grid, 120 + 220 * len(grid), hover="closest")


def training_slide(run: RunData, words: Words) -> Slide:
    note = words("training_note" if len(run.logs) > 1 else "training_note_one")
    return Slide(f"{run.name} · {words('training')}", note, training_chart(run, words))


def _lines(metric: str, curves: _Curves, words: Words, *, listed: bool) -> Iterator[Curve]:
    """A line a seed, and their mean. listed: whether the legend has them"""
    several = len(curves) > 1
    if not metric.startswith("valid/"):
        # Checkpoints are chosen by validations, which are never averaged.
        curves = {seed: _blocks(rows) for seed, rows in curves.items()}
    for n, (seed, rows) in enumerate(curves.items()):
        name = words("seed_n", seed=seed)
        yield Curve(
            rows["step"].to_numpy(),
            rows["value"].to_numpy(),
            1.0 if several else 2.0,
            name=words("seeds") if several else name,
            label=name,
            role="accent_soft" if several else "accent",
            group="seeds",
            listed=listed and n == 0,
            hover=".4g",
        )
    if several:
        # At the steps that all seeds have; of two rows of one step the last one counts.
        rows = pl.concat([own.unique("step", keep="last") for own in curves.values()])
        mean = rows.group_by("step").agg(pl.mean("value"), seeds=pl.len()).sort("step")
        mean = mean.filter(pl.col("seeds") == len(curves))
        steps, values = mean["step"].to_numpy(), mean["value"].to_numpy()
        name = words("mean_of_seeds")
        yield Curve(steps, values, 2.4, name=name, group=MEAN, listed=listed, hover=".4g")


def _chosen_points(run: RunData, metric: str, curves: _Curves, words: Words) -> Iterator[Points]:
    if metric != f"valid/{run.config.train.select_by}":
        return
    points = [
        (step, value, f"{words('seed_n', seed=seed)}<br>{step:,}<br>{value:.4g}")
        for seed, rows in curves.items()
        for step, value in rows.filter(step=run.best_steps.get(seed)).tail(1).iter_rows()
    ]
    if points:
        steps, values, texts = zip(*points, strict=True)
        yield Points(steps, values, "diamond", name=words("chosen"), role="loss", texts=texts)


def _blocks(rows: pl.DataFrame) -> pl.DataFrame:
    """Means of blocks of rows where there are many; at the last step of each block."""
    block = pl.int_range(pl.len()) // math.ceil(len(rows) / MOST_ROWS)
    blocks = rows.group_by(block.alias("block"), maintain_order=True)
    return blocks.agg(pl.last("step"), pl.mean("value")).drop("block")
