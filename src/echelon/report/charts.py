"""Interactive charts of backtests: equity, holdings, actions, costs (see figures.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.envs.act import Action
from echelon.report.figures import (
    DATES,
    MEAN,
    Figure,
    array,
    axis,
    axis_title,
    colour,
    legend_above,
    make_layout,
    numbers,
    stamps,
)
from echelon.report.gather import Record, SplitData
from echelon.report.headline import rivals
from echelon.report.palette import ASSET_COLOURS, colour_of
from echelon.report.series import (
    ActionShares,
    Index,
    action_shares,
    decisions,
    largest_weights,
    shortest_period,
    thinned,
)
from echelon.report.texts import Words
from echelon.types import Floats

MOST_POINTS = 3000
"""Of a line; longer ones are thinned."""
MOST_AREA_POINTS = 700
MOST_BARS = 84
ALWAYS_SHOWN = ("benchmark", "equal_weight", "buy_and_hold")
COSTS = ("commission", "stamp", "slippage")


def shown_rows(split: SplitData) -> Index:
    """Rows of the equity chart; where it is thinned, the deepest drawdowns stay in."""
    deepest = [int(r.tables.equity["drawdown"].to_numpy().argmax()) for r in split.records]
    return thinned(split.times, MOST_POINTS, deepest)


def equity_chart(split: SplitData, words: Words) -> tuple[Figure, dict[str, list[Any]]]:
    """Growth above, drawdown below, on one time axis; and the arrays both use."""
    rows = shown_rows(split)
    arrays: dict[str, list[Any]] = {"times": stamps(split.times[rows])}
    data: list[Figure] = []

    def draw(key: str, growth: Floats, drawdown: Floats, style: Figure) -> None:
        arrays[f"growth {key}"] = numbers(growth[rows])
        arrays[f"drawdown {key}"] = numbers(-drawdown[rows])
        data.extend(_two_lines(key, style))

    always = {*ALWAYS_SHOWN, *(r.key for r in rivals(split))}
    for record in split.baselines:
        shown = record.key in always
        draw(record.key, *_curves(split, record), _baseline_style(record.key, shown, words))
    several = len(split.agents) > 1
    for record in split.agents if several else ():
        first = record is split.agents[0]
        draw(record.key, *_curves(split, record), _seed_style(first, words))
    style = {
        "name": agent_name(split, words),
        "line": {"color": colour("accent"), "width": 3},
        "legendrank": 1,
    }
    draw(MEAN, split.mean_growth, split.mean_drawdown, style)
    data[-1] |= {"fill": "tozeroy", "fillcolor": colour("accent_area")}
    data[-1]["line"] = {"color": colour("accent"), "width": 2}
    intraday = len(arrays["times"][0]) > len("2020-01-02")
    return {"data": data, "layout": _equity_layout(words, intraday)}, arrays


def agent_name(split: SplitData, words: Words) -> str:
    """What the agent's bold line is called."""
    if len(split.agents) > 1:
        return words("agent_mean", n=len(split.agents))
    return words("agent_one", seed=split.agents[0].seed)


def _two_lines(key: str, style: Figure) -> list[Figure]:
    """The lines of a book in both panels; its name in the legend shows or hides both."""
    common: Figure = {"type": "scatter", "mode": "lines", "x": array("times"), "legendgroup": key}
    upper = {"y": array(f"growth {key}"), "hovertemplate": "%{y:.3f}"}
    lower = {
        "y": array(f"drawdown {key}"),
        "yaxis": "y2",
        "hovertemplate": "%{y:.1%}",
    }
    return [common | upper | style, common | lower | style | {"showlegend": False}]


def _baseline_style(key: str, shown: bool, words: Words) -> Figure:
    dash = {"random": "dot", "cash": "dot", "benchmark": "dash"}.get(key, "solid")
    return {
        "name": words.name(key),
        "line": {"color": colour(colour_of(key)), "width": 1.5, "dash": dash},
        "visible": True if shown else "legendonly",
    }


def _seed_style(first: bool, words: Words) -> Figure:
    return {
        "name": words("seeds"),
        "line": {"color": colour("accent_soft"), "width": 1},
        "legendgroup": "seeds",
        "showlegend": first,
        "legendrank": 2,
        "hoverinfo": "skip",
        "hovertemplate": None,
    }


def _curves(split: SplitData, record: Record) -> tuple[Floats, Floats]:
    drawdown = record.tables.equity["drawdown"].to_numpy()
    return split.whole(record.growth), split.whole(drawdown)


def _equity_layout(words: Words, intraday: bool) -> Figure:
    hover = "%Y-%m-%d %H:%M" if intraday else "%Y-%m-%d"
    return make_layout(
        height=560,
        hovermode="x unified",
        legend=legend_above(),
        margin={"l": 62, "r": 16, "t": 62, "b": 26},
        xaxis=axis(anchor="y2", type="date", tickformatstops=DATES, hoverformat=hover),
        yaxis=axis(domain=[0.33, 1.0], title=axis_title(words("growth")), tickformat="~g"),
        yaxis2=axis(domain=[0.0, 0.27], title=axis_title(words("drawdown")), tickformat=".0%"),
    )


class Part(NamedTuple):
    """One layer of a stack of holdings: its name, its colour's role, its share[T] of the book."""

    name: str
    role: str
    share: Floats


def holdings_parts(split: SplitData, words: Words) -> dict[str, list[Part]]:
    """Key of an agent, or `mean` → layers from the bottom up: assets, the rest of them, cash.

    An asset has one place and one colour, whichever seed is looked at: by its mean over all.
    """
    stacks = {r.key: _weights(split, r) for r in split.agents}
    overall = np.mean(list(stacks.values()), axis=0)
    if len(stacks) > 1:
        stacks[MEAN] = overall
    symbols = [c for c in split.agents[0].tables.weights.columns if c != "time"]
    shown, rest = largest_weights(overall[:, :-1], ASSET_COLOURS)
    found = {}
    for key, stack in stacks.items():
        parts = [Part(symbols[n], f"asset{k}", stack[:, n]) for k, n in enumerate(shown)]
        if len(rest):
            name = words("other_assets", n=len(rest))
            parts.append(Part(name, "rest", stack[:, rest].sum(axis=1)))
        found[key] = [*parts, Part(words("free_cash"), "free_cash", stack[:, -1])]
    return found


def holdings_charts(split: SplitData, words: Words) -> dict[str, Figure]:
    """Key of an agent, or `mean` → stacked shares of the book."""
    rows = thinned(split.times, MOST_AREA_POINTS)
    x = stamps(split.times[rows])
    return {
        key: _holdings_figure(x, parts, rows, words)
        for key, parts in holdings_parts(split, words).items()
    }


def _weights(split: SplitData, record: Record) -> Floats:
    """[T,N+1] shares of the assets and, last, of cash; a ruined book stays where it ended."""
    weights = record.tables.weights.drop("time").to_numpy().astype(np.float64)
    cash = record.tables.equity["cash_share"].to_numpy().astype(np.float64)
    columns = [*weights.T, cash]
    return np.stack([split.whole(column) for column in columns], axis=1)


def _holdings_figure(x: list[str], parts: Sequence[Part], rows: Index, words: Words) -> Figure:
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": x,
            "y": [None if v is None else round(v, 4) for v in numbers(values[rows])],
            "stackgroup": "book",
            "line": {"width": 0.4, "color": colour("card")},
            "fillcolor": colour(role),
            "hovertemplate": "%{y:.1%}",
        }
        for name, role, values in parts
    ]
    layout = make_layout(
        height=430,
        hovermode="x unified",
        legend={"traceorder": "reversed", "x": 1.01, "y": 1, "font": {"size": 12}},
        margin={"l": 62, "r": 16, "t": 14, "b": 26},
        xaxis=axis(type="date", tickformatstops=DATES, showgrid=False),
        yaxis=axis(tickformat=".0%", range=[0, 1], title=axis_title(words("share"))),
    )
    return {"data": data, "layout": layout}


def actions_charts(split: SplitData, words: Words) -> dict[str, Figure]:
    """Key of an agent, or `mean` → share of buys, holds and sells by period."""
    period = shortest_period(split.times, MOST_BARS)
    found = {}
    for record in split.agents:
        actions = record.tables.actions
        chosen = decisions(actions, record.tables.weights)
        found[record.key] = action_shares(actions["time"].to_numpy(), chosen, period)
    longest = max(found.values(), key=lambda f: len(f.starts))
    if len(found) > 1:
        found[MEAN] = ActionShares(longest.starts, _mean_known([f.shares for f in found.values()]))
    x = stamps(longest.starts)
    return {key: _actions_figure(x, f.shares, words) for key, f in found.items()}


def _mean_known(parts: Sequence[Floats]) -> Floats:
    """[P,3] mean of several tables, of which some end early, over those that have the row."""
    most = max(len(part) for part in parts)
    total, count = np.zeros((most, len(Action))), np.zeros((most, 1))
    for part in parts:
        total[: len(part)] += part
        count[: len(part)] += 1
    return np.asarray(total / count)


def _actions_figure(x: list[str], shares: Floats, words: Words) -> Figure:
    data = [
        {
            "type": "bar",
            "name": words(action.name.lower()),
            "x": x[: len(shares)],
            "y": [None if v is None else round(v, 4) for v in numbers(shares[:, action])],
            "marker": {"color": colour(action.name.lower()), "line": {"width": 0}},
            "hovertemplate": "%{y:.1%}",
        }
        for action in (Action.BUY, Action.HOLD, Action.SELL)
    ]
    layout = make_layout(
        height=300,
        barmode="stack",
        bargap=0.12,
        hovermode="x unified",
        legend=legend_above(),
        margin={"l": 62, "r": 16, "t": 44, "b": 26},
        xaxis=axis(type="date", tickformatstops=DATES, showgrid=False),
        yaxis=axis(tickformat=".0%", range=[0, 1], title=axis_title(words("decided"))),
    )
    return {"data": data, "layout": layout}


def costs_over_time(split: SplitData, words: Words) -> dict[str, Figure]:
    """Key of an agent, or `mean` → costs so far, stacked, in per cent of the initial value."""
    paid = {r.key: _costs(split, r) for r in split.agents}
    if len(paid) > 1:
        paid[MEAN] = np.mean(list(paid.values()), axis=0)
    rows = thinned(split.times, MOST_AREA_POINTS)
    x = stamps(split.times[rows])
    figures = {}
    for key, costs in paid.items():
        data = [
            {
                "type": "scatter",
                "mode": "lines",
                "name": words(kind),
                "x": x,
                "y": numbers(costs[rows, k]),
                "stackgroup": "costs",
                "line": {"width": 0.8, "color": colour(kind)},
                "fillcolor": colour(kind),
                "hovertemplate": "%{y:.2f} %",
            }
            for k, kind in enumerate(COSTS)
            if paid_at_all(split, kind)
        ]
        layout = make_layout(
            height=320,
            hovermode="x unified",
            showlegend=True,
            legend=legend_above(),
            margin={"l": 56, "r": 10, "t": 44, "b": 34},
            xaxis=axis(type="date", tickformatstops=DATES, showgrid=False),
            yaxis=axis(title=axis_title(words("of_initial")), rangemode="tozero"),
        )
        figures[key] = {"data": data, "layout": layout}
    return figures


def paid_at_all(split: SplitData, kind: str) -> bool:
    """Whether any book paid this kind of cost; commission always shows, if only as zero."""
    paid = any(r.tables.equity[kind].to_numpy().any() for r in split.records)
    return paid or kind == "commission"


def _costs(split: SplitData, record: Record) -> Floats:
    """[T,3] costs so far, in per cent of the initial value."""
    parts = [np.cumsum(record.tables.equity[kind].to_numpy()) for kind in COSTS]
    share = 100.0 / record.value[0]
    return np.stack([split.whole(part * share) for part in parts], axis=1)


def costs_by_book(split: SplitData, words: Words) -> Figure:
    """What each agent and baseline paid in all, as stacked bars."""
    records = [r for r in split.records if r.key not in ("benchmark", "cash")][::-1]
    names = [words.name(r.key) for r in records]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words(kind),
            "y": names,
            "x": numbers(np.array([_costs(split, r)[-1, k] for r in records])),
            "marker": {"color": colour(kind), "line": {"width": 0}},
            "hovertemplate": "%{x:.2f} %",
        }
        for k, kind in enumerate(COSTS)
        if paid_at_all(split, kind)
    ]
    layout = make_layout(
        height=320,
        barmode="stack",
        bargap=0.35,
        hovermode="y unified",
        showlegend=False,
        margin={"l": 120, "r": 16, "t": 44, "b": 46},
        xaxis=axis(title=axis_title(words("of_initial")), rangemode="tozero"),
        yaxis=axis(showgrid=False, automargin=True),
    )
    return {"data": data, "layout": layout}


def differences_chart(
    differences: Mapping[str, Mapping[str, Any]], annual: float, words: Words
) -> Figure:
    """Sharpe ratios of the agents less those of baselines, with intervals, beside a line at zero.

    differences: baseline → `single` and `double`, as in trust.json, from the top down
    annual: what makes a ratio per period one a year
    """
    keys = list(differences)
    rows = np.arange(len(keys))[::-1]
    looks = (("single", 0.14, "accent", 9, 2.4), ("double", -0.14, "faint", 6, 1.4))
    names = {"single": words("interval_95"), "double": words("interval_double")}
    data = []
    for kind, shift, role, size, width in looks:
        found = [differences[key][kind] for key in keys]
        estimate, low, high = (
            annual * np.array([math.nan if one[end] is None else one[end] for one in found])
            for end in ("estimate", "low", "high")
        )
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": names[kind],
                "x": numbers(estimate),
                "y": (rows + shift).tolist(),
                "customdata": list(
                    zip(map(words.name, keys), numbers(low), numbers(high), strict=True)
                ),
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": numbers(high - estimate),
                    "arrayminus": numbers(estimate - low),
                    "color": colour(role),
                    "thickness": width,
                    "width": 0,
                },
                "marker": {"color": colour(role), "size": size},
                "hovertemplate": "%{customdata[0]}<br>%{x:.2f} "
                "(%{customdata[1]:.2f}, %{customdata[2]:.2f})",
            }
        )
    layout = make_layout(
        height=86 + 38 * len(keys),
        hovermode="closest",
        legend=legend_above(),
        margin={"l": 100, "r": 12, "t": 30, "b": 44},
        xaxis=axis(
            title=axis_title(words("sharpe_less")),
            zeroline=True,
            zerolinecolor=colour("loss"),
            zerolinewidth=1.5,
        ),
        yaxis=axis(
            tickvals=rows.tolist(),
            ticktext=[words.name(key) for key in keys],
            tickfont={"size": 12, "color": colour("ink")},
            range=[-0.6, len(keys) - 0.4],
            showgrid=False,
            zeroline=False,
            automargin=True,
        ),
    )
    return {"data": data, "layout": layout}
