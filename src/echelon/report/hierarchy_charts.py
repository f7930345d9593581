"""Interactive charts of a hierarchy at work: who was in charge, how experts differ, what paid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from echelon.population.attribution import SUMMED, Attribution
from echelon.population.record import CommandRecord
from echelon.report.charts import MOST_BARS, MOST_POINTS
from echelon.report.figures import (
    DATES,
    Figure,
    axis,
    axis_title,
    colour,
    legend_above,
    make_layout,
    numbers,
    stamps,
)
from echelon.report.gather import Record
from echelon.report.hierarchy_data import (
    DISTANCE_BARS,
    ENTROPY_DECISIONS,
    Plane,
    correlations,
    expert_role,
    marked,
    reigns,
    trailing_mean,
    usage,
    usage_entropy,
)
from echelon.report.hierarchy_sayings import said_name
from echelon.report.series import shortest_period, thinned
from echelon.report.texts import Words
from echelon.types import Floats, Times


def choice_name(name: str, k: int, record: CommandRecord, words: Words) -> str:
    """What an expert, or cash, is called."""
    return words("free_cash") if k == len(record.experts) else said_name(name, words)


def command_chart(agent: Record, words: Words) -> Figure:
    """Growth of the real book and of the experts' own; below it a band of who was in charge."""
    record = agent.command
    assert record is not None
    rows = thinned(agent.times, MOST_POINTS)
    x = stamps(agent.times[rows])
    own = record.own_values / record.own_values[0]
    experts = len(record.experts)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": words("real_book"),
            "x": x,
            "y": numbers(agent.growth[rows]),
            "line": {"color": colour("accent"), "width": 2.6},
            "legendrank": 1,
            "hovertemplate": "%{y:.3f}",
        }
    ]
    for k, name in enumerate(record.choices):
        shown = choice_name(name, k, record, words)
        role = colour(expert_role(k, experts))
        data.append(_band(record, agent.times, k, shown, role))
        if k < experts:
            line = {"color": role, "width": 1.2}
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": words("own_book", name=shown),
                    "x": x,
                    "y": numbers(own[rows, k]),
                    "line": line,
                    "legendgroup": shown,
                    "showlegend": False,
                    "hovertemplate": "%{y:.3f}",
                }
            )
    data += _marks(agent, record, words)
    layout = make_layout(
        height=520,
        hovermode="x unified",
        barmode="overlay",
        bargap=0,
        legend=legend_above(),
        margin={"l": 62, "r": 16, "t": 74, "b": 26},
        xaxis=axis(anchor="y2", type="date", tickformatstops=DATES, range=[x[0], x[-1]]),
        yaxis=axis(domain=[0.17, 1.0], title=axis_title(words("growth")), tickformat="~g"),
        yaxis2=axis(
            domain=[0.0, 0.10],
            range=[0, 1],
            showticklabels=False,
            showgrid=False,
            zeroline=False,
            fixedrange=True,
        ),
        annotations=[
            {
                "text": words("in_charge"),
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": 0.105,
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11, "color": colour("faint")},
            }
        ],
    )
    return {"data": data, "layout": layout}


def _band(record: CommandRecord, times: Times, k: int, name: str, role: Figure) -> Figure:
    """The reigns of one choice, as bars as wide as they lasted. times[S+1]"""
    mine = [reign for reign in reigns(record) if reign.who == k]
    first = times[[reign.first for reign in mine]].astype("datetime64[ms]")
    stop = times[[reign.stop for reign in mine]].astype("datetime64[ms]")
    middle = first + (stop - first) // 2
    spans = [f"{a} – {b}" for a, b in zip(_days(first), _days(stop), strict=True)]
    # A choice that was never in charge keeps its place in the legend.
    return {
        "type": "bar",
        "name": name,
        "x": [str(t).replace("T", " ") for t in middle] or [None],
        "y": [1] * len(mine) or [None],
        "width": (stop - first).astype(np.int64).tolist() or [None],
        "customdata": spans or [""],
        "yaxis": "y2",
        "marker": {"color": role, "line": {"width": 0}},
        "legendgroup": name,
        "hovertemplate": "%{customdata}",
    }


def _days(times: Times) -> list[str]:
    return [str(t.astype("datetime64[D]")) for t in times]


def _marks(agent: Record, record: CommandRecord, words: Words) -> list[Figure]:
    traces: list[Figure] = []
    for found in marked(record):
        rows = list(found.rows)
        frequent = found.mark.key == "mark_cut"
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": words(found.mark.key),
                "x": [_stamp(agent.times, row) for row in rows],
                "y": numbers(agent.growth[rows]),
                "text": [
                    "<br>".join(
                        f"{words(f'risk_{e.kind}')}: {said_name(e.who, words)}" for e in events
                    )
                    for events in found.events
                ],
                "marker": {
                    "symbol": found.mark.plotly,
                    "size": 6 if frequent else 11,
                    "color": colour(found.mark.role),
                    "line": {"width": 1.5, "color": colour(found.mark.role)},
                },
                "cliponaxis": False,
                "visible": "legendonly" if frequent else True,
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return traces


def _stamp(times: Times, row: int) -> str:
    return str(times[row].astype("datetime64[m]")).replace("T", " ").removesuffix(" 00:00")


def usage_chart(record: CommandRecord, words: Words) -> Figure:
    """Shares of the bars by period, stacked, and below them the entropy of the decisions."""
    period = shortest_period(record.times, MOST_BARS)
    found = usage(record, period)
    x = stamps(found.starts)
    experts = len(record.experts)
    data: list[Figure] = [
        {
            "type": "bar",
            "name": choice_name(name, k, record, words),
            "x": x,
            "y": [round(v, 4) for v in found.shares[:, k].tolist()],
            "marker": {"color": colour(expert_role(k, experts)), "line": {"width": 0}},
            "hovertemplate": "%{y:.0%}",
        }
        for k, name in enumerate(record.choices)
    ]
    curve = usage_entropy(record)
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": words("usage_entropy"),
            "x": stamps(curve.times),
            "y": numbers(curve.values),
            "yaxis": "y2",
            "line": {"color": colour("accent"), "width": 2},
            "showlegend": False,
            "hovertemplate": "%{y:.2f}",
        }
    )
    layout = make_layout(
        height=380,
        barmode="stack",
        bargap=0.06,
        hovermode="x unified",
        showlegend=False,
        margin={"l": 56, "r": 10, "t": 14, "b": 30},
        xaxis=axis(anchor="y2", type="date", tickformatstops=DATES, showgrid=False),
        yaxis=axis(
            domain=[0.42, 1.0],
            range=[0, 1],
            tickformat=".0%",
            title=axis_title(words("usage_share")),
        ),
        yaxis2=axis(
            domain=[0.0, 0.33],
            range=[0, 1.05],
            nticks=4,
            title=axis_title(words("entropy_axis", n=ENTROPY_DECISIONS)),
        ),
    )
    return {"data": data, "layout": layout}


def distance_chart(record: CommandRecord, threshold: float, words: Words) -> Figure:
    """How far apart the experts' portfolios are at each bar, and how far they should be."""
    distance = record.portfolios.distance
    rows = thinned(record.times, MOST_POINTS)
    x = stamps(record.times[rows])
    lines = (
        (words("each_bar"), distance, {"color": colour("accent_soft"), "width": 1}),
        (
            words("trailing", n=DISTANCE_BARS),
            trailing_mean(distance, DISTANCE_BARS),
            {"color": colour("accent"), "width": 2.2},
        ),
    )
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": x,
            "y": numbers(values[rows]),
            "line": line,
            "hovertemplate": "%{y:.3f}",
        }
        for name, values, line in lines
    ]
    data.append(
        threshold_line([x[0], x[-1]], threshold, words("threshold", value=f"{threshold:g}"))
    )
    layout = make_layout(
        height=380,
        hovermode="x unified",
        legend=legend_above(),
        margin={"l": 56, "r": 10, "t": 44, "b": 30},
        xaxis=axis(type="date", tickformatstops=DATES, showgrid=False),
        yaxis=axis(title=axis_title(words("mapd_axis")), rangemode="tozero"),
    )
    return {"data": data, "layout": layout}


def threshold_line(x: Sequence[object], value: float, name: str) -> Figure:
    """A dashed line at `value`, from the first to the last of x."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": [value] * len(x),
        "line": {"color": colour("loss"), "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
    }


def correlation_chart(record: CommandRecord, words: Words) -> Figure:
    """Correlations of the returns of the experts' own books, as a coloured matrix."""
    found = correlations(record)
    names = [said_name(name, words) for name in record.experts]
    data: list[Figure] = [
        {
            "type": "heatmap",
            "x": names,
            "y": names,
            "z": [numbers(row) for row in found],
            "text": [["" if math.isnan(v) else f"{v:.2f}" for v in row] for row in found.tolist()],
            "texttemplate": "%{text}",
            "zmin": -1,
            "zmax": 1,
            "colorscale": [[0, colour("loss")], [0.5, colour("card")], [1, colour("gain")]],
            "xgap": 2,
            "ygap": 2,
            "colorbar": {"thickness": 10, "outlinewidth": 0, "tickvals": [-1, 0, 1]},
            "hovertemplate": "%{y} · %{x}: %{z:.3f}<extra></extra>",
        }
    ]
    layout = make_layout(
        height=360,
        margin={"l": 90, "r": 10, "t": 14, "b": 60},
        xaxis=axis(showgrid=False, automargin=True, type="category"),
        yaxis=axis(showgrid=False, automargin=True, autorange="reversed", type="category"),
    )
    return {"data": data, "layout": layout}


def plane_chart(found: Plane, names: Sequence[str], words: Words) -> Figure:
    """Experts as points in the plane in which they differ most. names[K]: of their files"""
    names = [said_name(name, words) for name in names]
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": name,
            "x": numbers(found.points[k : k + 1, 0]),
            "y": numbers(found.points[k : k + 1, 1]),
            "text": [name],
            "textposition": "top center",
            "textfont": {"size": 12, "color": colour("ink")},
            "cliponaxis": False,
            "marker": {
                "size": 14,
                "color": colour(expert_role(k, len(names))),
                "line": {"width": 1, "color": colour("card")},
            },
            "hovertemplate": f"{name}<br>%{{x:.3g}}, %{{y:.3g}}<extra></extra>",
        }
        for k, name in enumerate(names)
    ]
    titles = [
        axis_title(words("component", n=n + 1, share=f"{share:.0%}"))
        for n, share in enumerate(found.explained.tolist())
    ]
    ranges = [padded_range(found.points[:, n]) for n in range(2)]
    layout = make_layout(
        height=360,
        hovermode="closest",
        showlegend=False,
        margin={"l": 56, "r": 16, "t": 14, "b": 44},
        xaxis=axis(title=titles[0], range=ranges[0]),
        yaxis=axis(title=titles[1], range=ranges[1]),
    )
    return {"data": data, "layout": layout}


def padded_range(values: Floats, room: float = 0.2) -> list[float]:
    """From below the least to above the greatest, with room for names."""
    low, high = float(values.min()), float(values.max())
    more = room * (high - low) or 1.0
    return [low - more, high + more]


def attribution_chart(found: Attribution, words: Words) -> Figure:
    """The parts of the result as bars with intervals; the whole at the bottom."""
    parts = [*((name, found.parts[name]) for name in SUMMED), ("total", found.total)]
    total = np.array([part.total for _, part in parts]) * 100.0
    low, high = (np.array([getattr(p, end) for _, p in parts]) * 100.0 for end in ("low", "high"))
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [words(f"part_{name}") for name, _ in parts],
            "x": numbers(total),
            "marker": {
                "color": [
                    colour("accent" if name == "total" else "gain" if part.total >= 0 else "loss")
                    for name, part in parts
                ],
                "opacity": 0.85,
            },
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": numbers(high - total),
                "arrayminus": numbers(total - low),
                "color": colour("soft"),
                "thickness": 1.4,
                "width": 4,
            },
            "customdata": list(zip(numbers(low), numbers(high), strict=True)),
            "hovertemplate": "%{y}: %{x:.2f} % (%{customdata[0]:.2f}, %{customdata[1]:.2f})"
            "<extra></extra>",
        }
    ]
    layout = make_layout(
        height=300,
        bargap=0.42,
        hovermode="closest",
        showlegend=False,
        margin={"l": 120, "r": 16, "t": 14, "b": 44},
        xaxis=axis(
            title=axis_title(words("log_return_axis")),
            zeroline=True,
            zerolinecolor=colour("soft"),
        ),
        yaxis=axis(
            autorange="reversed",
            showgrid=False,
            automargin=True,
            tickfont={"size": 12, "color": colour("ink")},
        ),
    )
    return {"data": data, "layout": layout}
