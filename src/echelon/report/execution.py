"""The page of execution: measures with intervals, trajectories, distributions, hours.

DIR/report.html        everything, self-contained; in Chinese report.zh.html, and so the pictures
DIR/execution.png      trajectories and the distribution of PA, for slides
DIR/day.png            one order's day: price, volume, and what each policy did
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echelon.evaluation.execution import ExecutionEvaluation, Mean, PolicyOrders
from echelon.execution import History
from echelon.files import write_atomic
from echelon.report import figures
from echelon.report.document import card, chart, document, new_data, two
from echelon.report.languages import file_name, language_links, languages_with
from echelon.report.page import STEM
from echelon.report.palette import LIGHT
from echelon.report.pictures import house_style
from echelon.report.rules import execution_line
from echelon.report.tables import facts_list, grouped_table, table
from echelon.report.texts import Words
from echelon.types import Floats

PICTURE, DAY = "execution", "day"
_BINS = 41
_DPI = 150
_LARGEST = 48
"""Pixels across of a fill that is the whole order."""
_MEASURES = ("gain_twap", "gain_vwap", "gain_arrival", "shortfall", "pa")
_ROLES = ("equal_weight", "momentum", "min_variance", "hrp", "buy_and_hold")
"""Colours of schedules and of further policies; the first learned one has the accent."""


def write_execution_report(
    found: ExecutionEvaluation, directory: Path, name: str, lang: str
) -> Path:
    """Write the page and its pictures, and those in other languages that are there already.

    The tables beside them are of this evaluation: a page of an earlier one must not stay.
    Returns the path of the page asked for.
    """
    Words(lang)  # refuses a language that there is not
    written = languages_with(directory, STEM, lang)
    for each in written:
        words = Words(each)
        picture, day = (file_name(stem, "png", each) for stem in (PICTURE, DAY))
        write_atomic(directory / picture, draw_execution(found, words))
        write_atomic(directory / day, draw_day(found.example, words))
        page = render(found, name, words, written)
        write_atomic(directory / file_name(STEM, "html", each), page)
    return directory / file_name(STEM, "html", lang)


def render(found: ExecutionEvaluation, name: str, words: Words, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    data = new_data()
    data["charts"]["paths"] = _paths_chart(found, words)
    data["charts"]["spread"] = _spread_chart(found, words)
    data["charts"]["day"] = _day_chart(found, words)
    facts = found.facts
    span = words(
        "execution_span",
        split=words(f"split_{found.split}"),
        orders=f"{facts['orders']:,}",
        dates=f"{facts['dates']:,}",
        first=facts["first"],
        last=facts["last"],
    )
    body = [
        f'<header class="top"><div><p class="eyebrow">Echelon · '
        f"{escape(words('execution_title'))}{language_links(STEM, words.lang, written)}</p>"
        f"<h1>{escape(name)}</h1></div></header>",
        f"<noscript><p class='notice'>{escape(words('no_script'))}</p></noscript>",
        f"<p>{escape(span)}</p>",
        card(
            words("execution_measures"),
            words("execution_caution"),
            _measures_table(found, words) + _seeds(found, words) + _rules_of_reading(words),
        ),
        card(words("execution_less"), words("execution_less_note"), _less_table(found, words)),
        two(
            card(words("execution_paths"), words("execution_paths_note"), chart("paths")),
            card(words("execution_spread"), words("execution_spread_note"), chart("spread")),
        ),
        card(_day_title(found.example, words), words("execution_day_note"), chart("day")),
        card(words("execution_hours"), words("execution_hours_note"), _hours(found, words)),
        card(words("execution_facts"), "", _facts(found, words)),
    ]
    return document(name, words, body, data)


# --- tables


def _measures_table(found: ExecutionEvaluation, words: Words) -> str:
    tree = found.summary()["policies"]
    head = [
        words("execution_policy"),
        *(words(f"execution_{m}") for m in _MEASURES),
        words("execution_glr"),
        words("execution_ffr"),
    ]
    rows = []
    for name, one in tree.items():
        cells = [_mean_cell(Mean(**one["measures"][m])) for m in _MEASURES]
        glr = "–" if one["glr"] is None else f"{one['glr']:.2f}"
        filled = f"{one['measures']['ffr']['estimate']:.1%}"
        rows.append([escape(name), *cells, f"<td>{glr}</td>", f"<td>{filled}</td>"])
    return table([escape(h) for h in head], rows, "measures")


def _mean_cell(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return f"<td>{mean.estimate:+.2f}</td>"
    return f"<td>{mean.estimate:+.2f}<br><small>{mean.low:+.2f} … {mean.high:+.2f}</small></td>"


def _learned(found: ExecutionEvaluation) -> list[PolicyOrders]:
    return [one for one in found.policies if one.seeds]


def _less_table(found: ExecutionEvaluation, words: Words) -> str:
    others = [one.name for one in found.policies if not one.seeds]
    rows = [
        [
            escape(one.name),
            *(_mean_cell(found.difference(one.name, other)) for other in others),
        ]
        for one in _learned(found)
    ]
    return table([escape(words("execution_policy")), *map(escape, others)], rows, "measures")


def _seeds(found: ExecutionEvaluation, words: Words) -> str:
    rows = [
        [
            escape(f"{one.name}, {seed}"),
            *(f"<td>{float(measures[m].mean()):+.2f}</td>" for m in _MEASURES),
        ]
        for one in _learned(found)
        if len(one.seeds) > 1
        for seed, measures in one.seeds.items()
    ]
    if not rows:
        return ""
    head = [words("execution_seeds"), *(words(f"execution_{m}") for m in _MEASURES)]
    return table([escape(h) for h in head], rows, "measures")


def _rules_of_reading(words: Words) -> str:
    """What an interval is over, and what an order that was not filled is charged."""
    return "".join(
        f'<p class="note">{escape(words(key))}</p>'
        for key in ("execution_intervals", "execution_rest")
    )


def _hours(found: ExecutionEvaluation, words: Words) -> str:
    shown = [one for one in found.policies if one.hourly]
    groups = [escape(one.name) for one in shown]
    columns = [words("execution_share"), words("execution_gain")]
    rows = []
    for hour in shown[0].hourly:
        cells = []
        for one in shown:
            share, gain = one.hourly[hour]
            cells += [f"<td>{share:.1%}</td>", f"<td>{gain:+.2f}</td>"]
        rows.append([f"{hour:02d}:00", *cells])
    return grouped_table(words("execution_hour"), groups, columns, rows)


def _facts(found: ExecutionEvaluation, words: Words) -> str:
    facts = found.facts
    runs = [f"{name}: {', '.join(map(str, seeds))}" for name, seeds in facts["runs"].items()]
    rows: list[tuple[str, Sequence[str]]] = [
        ("execution_seeds", runs),
        ("execution_symbols", [", ".join(facts["symbols"][:20])]),
        ("execution_rules", [execution_line(facts["rules"], facts["price"], words)]),
        ("fact_data", [facts["content"][:20]]),
    ]
    return facts_list(rows, words)


# --- charts


def _role(found: ExecutionEvaluation, k: int) -> str:
    learned = [j for j, one in enumerate(found.policies) if one.seeds]
    return "accent" if learned and k == learned[0] else _ROLES[k % len(_ROLES)]


def _clock_labels(clock: Floats) -> list[str]:
    return [f"{int(m) // 60:02d}:{int(m) % 60:02d}" for m in clock]


def _paths_chart(found: ExecutionEvaluation, words: Words) -> figures.Figure:
    x = _clock_labels(found.clock)
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": words("execution_volume"),
            "x": x,
            "y": figures.numbers(found.volume.cumsum()),
            "line": {"color": figures.colour("faint"), "dash": "dot", "width": 1.5},
        }
    ]
    for k, one in enumerate(found.policies):
        role = _role(found, k)
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": one.name,
                "x": x,
                "y": figures.numbers(one.path.cumsum()),
                "line": {"color": figures.colour(role), "width": 2.4 if role == "accent" else 1.6},
            }
        )
    layout = figures.make_layout(
        xaxis=figures.axis(nticks=8, type="category"),
        yaxis=figures.axis(tickformat=".0%", rangemode="tozero"),
        legend=figures.legend_above(),
        margin={"l": 52, "r": 12, "t": 44, "b": 36},
        height=360,
    )
    return {"data": lines, "layout": layout}


def _binned(found: ExecutionEvaluation) -> tuple[Floats, list[Floats]]:
    """Middles of bins of PA that hold 98 % of all, and each policy's share of orders in them."""
    every = np.concatenate([one.measures["pa"] for one in found.policies])
    reach = max(1.0, float(np.quantile(np.abs(every), 0.98)))
    edges = np.linspace(-reach, reach, _BINS + 1)
    shares = [
        np.asarray(
            np.histogram(np.clip(one.measures["pa"], -reach, reach), edges)[0]
            / len(one.measures["pa"])
        )
        for one in found.policies
    ]
    return np.asarray((edges[1:] + edges[:-1]) / 2), shares


def _spread_chart(found: ExecutionEvaluation, words: Words) -> figures.Figure:
    middles, shares = _binned(found)
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": one.name,
            "x": figures.numbers(middles),
            "y": figures.numbers(share),
            "line": {"color": figures.colour(_role(found, k)), "width": 1.8, "shape": "hvh"},
        }
        for k, (one, share) in enumerate(zip(found.policies, shares, strict=True))
    ]
    layout = figures.make_layout(
        xaxis=figures.axis(title=figures.axis_title(words("execution_bp"))),
        yaxis=figures.axis(tickformat=".1%", rangemode="tozero"),
        legend=figures.legend_above(),
        margin={"l": 52, "r": 12, "t": 44, "b": 44},
        height=360,
    )
    return {"data": lines, "layout": layout}


def _day_chart(found: ExecutionEvaluation, words: Words, e: int = 0) -> figures.Figure:
    """One order's day: above the price and each policy's fills, below how far each had come."""
    first = next(iter(found.example.values()))
    x = _clock_labels(first.days.clock)
    market = {"mode": "lines", "type": "scatter", "x": x, "legendgroup": "market"}
    volume = first.market_volume[e].cumsum()
    traces: list[figures.Figure] = [
        market
        | {
            "name": words("execution_market_price"),
            "y": figures.numbers(first.market_price[e]),
            "line": {"color": figures.colour("ink"), "width": 1.2},
        },
        market
        | {
            "name": "TWAP",
            "y": figures.numbers(np.full(len(x), first.benchmarks.twap[e])),
            "line": {"color": figures.colour("faint"), "dash": "dash", "width": 1},
        },
        market
        | {
            "name": words("execution_volume"),
            "y": figures.numbers(volume / max(float(volume[-1]), 1e-12)),
            "yaxis": "y2",
            "line": {"color": figures.colour("faint"), "dash": "dot", "width": 1.5},
        },
    ]
    for k, (name, history) in enumerate(found.example.items()):
        traces += _day_traces(name, history, _role(found, k), x, e)
    layout = figures.make_layout(
        xaxis=figures.axis(nticks=8, type="category", anchor="y2"),
        yaxis=figures.axis(
            domain=[0.44, 1.0], title=figures.axis_title(words("execution_market_price"))
        ),
        yaxis2=figures.axis(
            domain=[0.0, 0.38],
            tickformat=".0%",
            rangemode="tozero",
            title=figures.axis_title(words("execution_of_order")),
        ),
        legend=figures.legend_above(),
        margin={"l": 60, "r": 12, "t": 44, "b": 36},
        height=560,
    )
    return {"data": traces, "layout": layout}


def _day_traces(
    name: str, history: History, role: str, x: Sequence[str], e: int
) -> list[figures.Figure]:
    """A policy's fills, of an area by their size, and what it had executed by each tick."""
    assert history.ticks is not None, "the chart needs ticks"
    share = history.ticks.executed[e] / history.orders.amount[e]
    done = share > 0.0
    colour = figures.colour(role)
    both = {"type": "scatter", "legendgroup": name}
    fills = both | {
        "mode": "markers",
        "name": name,
        "showlegend": False,
        "x": [label for label, some in zip(x, done.tolist(), strict=True) if some],
        "y": figures.numbers(history.ticks.price[e, done]),
        "text": [f"{one:.1%}" for one in share[done].tolist()],
        "marker": {
            "color": colour,
            "opacity": 0.4,
            "size": figures.numbers(np.sqrt(share[done])),
            "sizeref": 1.0 / _LARGEST,
            "sizemin": 2,
            "line": {"width": 0},
        },
    }
    progress = both | {
        "mode": "lines",
        "name": f"{name} ({_gained(history, e):+.1f} bp)",
        "x": x,
        "y": figures.numbers(share.cumsum()),
        "yaxis": "y2",
        "line": {"color": colour, "width": 2.4 if role == "accent" else 1.6},
    }
    return [fills, progress]


def _gained(history: History, e: int) -> float:
    """Gain over TWAP of one order, in basis points of the arrival price."""
    apart = float(history.price[e]) - float(history.benchmarks.twap[e])
    return -float(history.side[e]) * apart / float(history.benchmarks.arrival[e]) * 1e4


def _day_title(histories: Mapping[str, History], words: Words, e: int = 0) -> str:
    first = next(iter(histories.values()))
    return words(
        "execution_day",
        name=first.days.name(int(first.orders.day[e])),
        side=words("execution_buy" if first.orders.buying[e] else "execution_sell"),
        amount=f"{first.orders.amount[e]:,.0f}",
    )


# --- pictures


def draw_execution(found: ExecutionEvaluation, words: Words) -> bytes:
    """Trajectories and the distribution of PA, side by side, as a PNG."""
    with house_style(words) as said:
        figure = Figure(figsize=(12.8, 5.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        at = np.arange(len(found.clock))
        left.plot(
            at, found.volume.cumsum(), ":", color=LIGHT["faint"], label=said("execution_volume")
        )
        middles, shares = _binned(found)
        for k, (one, share) in enumerate(zip(found.policies, shares, strict=True)):
            role = _role(found, k)
            width = 2.4 if role == "accent" else 1.5
            left.plot(at, one.path.cumsum(), color=LIGHT[role], lw=width, label=one.name)
            right.step(middles, share, where="mid", color=LIGHT[role], lw=width, label=one.name)
        _mark_hours(left, found.clock)
        left.set_title(said("execution_paths"), loc="left", fontweight="bold")
        left.set_ylabel(said("execution_of_order"))
        left.legend(loc="upper left")
        right.set_title(said("execution_spread"), loc="left", fontweight="bold")
        right.set_xlabel(said("execution_bp"))
        return _png(figure)


def draw_day(histories: Mapping[str, History], words: Words, e: int = 0) -> bytes:
    """One order's day as a PNG: the price with its TWAP, and what each policy executed."""
    first = next(iter(histories.values()))
    with house_style(words) as said:
        figure = Figure(figsize=(12.8, 7.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        ticks = np.arange(first.days.shape[1])
        above.plot(ticks, first.market_price[e], color=LIGHT["ink"], lw=1.2)
        above.axhline(float(first.benchmarks.twap[e]), color=LIGHT["faint"], ls="--", lw=1)
        for k, (name, history) in enumerate(histories.items()):
            assert history.ticks is not None, "the picture needs ticks"
            role = "accent" if k == len(histories) - 1 else _ROLES[k % len(_ROLES)]
            share = history.ticks.executed[e].cumsum() / history.orders.amount[e]
            label = f"{name} ({_gained(history, e):+.1f} bp)"
            below.plot(ticks, share, color=LIGHT[role], lw=2, label=label)
            done = history.ticks.executed[e] > 0
            above.scatter(
                ticks[done],
                history.ticks.price[e, done],
                s=2000 * history.ticks.executed[e, done] / history.orders.amount[e],
                color=LIGHT[role],
                alpha=0.35,
                linewidths=0,
            )
        volume = first.market_volume[e].cumsum()
        below.plot(
            ticks,
            volume / max(float(volume[-1]), 1e-12),
            ":",
            color=LIGHT["faint"],
            label=said("execution_volume"),
        )
        below.legend(loc="upper left")
        below.set_ylabel(said("execution_of_order"))
        _mark_hours(below, first.days.clock)
        title = _day_title(histories, said, e)
        above.set_title(title, loc="left", fontweight="bold", fontsize=15)
        return _png(figure)


def _mark_hours(axes: Axes, clock: Floats) -> None:
    """Whole hours as labels; ticks are evenly apart, so that a lunch break takes no room."""
    step = max(1, len(clock) // 8)
    at = np.arange(0, len(clock), step)
    axes.set_xticks(at, [_clock_labels(clock)[k] for k in at])


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
