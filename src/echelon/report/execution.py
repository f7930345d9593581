"""The report of execution: measures with intervals, trajectories, distributions, hours.

DIR/report.html        everything, self-contained; in Chinese report.zh.html, and so the pictures
DIR/execution.png      trajectories and the distribution of PA, for slides
DIR/day.png            one order's day: price, volume, and what each policy did

templates/execution.html says what is on the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from echelon.evaluation.execution import ExecutionEvaluation, Mean
from echelon.execution import History
from echelon.files import write_atomic
from echelon.report.charts.chart import Axis, Chart, Curve, Layer, Plot, Points, RefLine
from echelon.report.charts.slides import Slide, draw_slide, slide_words
from echelon.report.pages import Cell, Content, Table, render_page
from echelon.report.rules import execution_line
from echelon.report.run.facts import CODE, FactRows
from echelon.report.run.page import STEM
from echelon.report.texts import DASH, Words, file_name, languages_with
from echelon.types import Floats

_MEASURES = ("gain_twap", "gain_vwap", "gain_arrival", "shortfall", "pa")
_ROLES = ("equal_weight", "momentum", "min_variance", "hrp", "buy_and_hold")
"""Colours of schedules and of further policies; the first learned one has the accent."""


def write_execution_report(
    evaluation: ExecutionEvaluation, directory: Path, name: str, lang: str
) -> Path:
    """Write page and pictures, and again those in other languages; returns the path asked for."""
    Words(lang)  # refuses a language that there is not
    written = languages_with(directory, STEM, lang)
    for language in written:
        words = Words(language)
        shown = slide_words(words)
        title = f"{name} · {shown('execution_title')}"
        paths = _paths_plot(evaluation, shown, shown("execution_paths"))
        spread = _spread_plot(evaluation, shown, shown("execution_spread"))
        both = Chart(((paths, spread),), 0)
        day = day_chart(evaluation.example, shown, _first_learned(evaluation))
        slides = {
            "execution": Slide(title, _span(evaluation, shown), both, height=6.2),
            "day": Slide(_day_title(evaluation.example, shown), title, day),
        }
        for stem, slide in slides.items():
            path = directory / file_name(stem, "png", language)
            write_atomic(path, draw_slide(slide, shown.lang))
        page = render(evaluation, name, words, written)
        write_atomic(directory / file_name(STEM, "html", language), page)
    return directory / file_name(STEM, "html", lang)


def render(
    evaluation: ExecutionEvaluation, name: str, words: Words, written: Sequence[str] = ()
) -> str:
    """The whole page. written: languages that there are pages in"""
    return render_page(
        "execution",
        words,
        name,
        stem=STEM,
        written=written,
        span=_span(evaluation, words),
        measures=_measures_table(evaluation, words),
        seeds=_seeds_table(evaluation, words),
        differences=_differences_table(evaluation, words),
        paths=_paths_plot(evaluation, words),
        spread=_spread_plot(evaluation, words),
        day=day_chart(evaluation.example, words, _first_learned(evaluation)),
        day_title=_day_title(evaluation.example, words),
        hours=_hours_table(evaluation, words),
        facts=_facts(evaluation, words),
        code=CODE,
    )


def _span(evaluation: ExecutionEvaluation, words: Words) -> str:
    facts = evaluation.facts
    return words(
        "execution_span",
        split=words(f"split_{evaluation.split}"),
        orders=f"{facts['orders']:,}",
        dates=f"{facts['dates']:,}",
        first=facts["first"],
        last=facts["last"],
    )


def _measures_table(evaluation: ExecutionEvaluation, words: Words) -> Table:
    names = [*_MEASURES, "glr", "ffr"]
    rows: list[list[Content]] = []
    for name, policy in evaluation.summary()["policies"].items():
        cells = [_mean_cell(Mean(**policy["measures"][m])) for m in _MEASURES]
        glr = DASH if policy["glr"] is None else f"{policy['glr']:.2f}"
        rows.append([name, *cells, glr, f"{policy['measures']['ffr']['estimate']:.1%}"])
    return Table([words("execution_policy"), *(words(f"execution_{m}") for m in names)], rows)


def _mean_cell(mean: Mean) -> Cell:
    known = mean.low is not None and mean.high is not None
    interval = f"{mean.low:+.2f} … {mean.high:+.2f}" if known else ""
    return Cell(f"{mean.estimate:+.2f}", small=interval)


def _differences_table(evaluation: ExecutionEvaluation, words: Words) -> Table:
    schedules = [policy.name for policy in evaluation.policies if not policy.seeds]
    rows: list[list[Content]] = [
        [name, *(_mean_cell(evaluation.difference(name, schedule)) for schedule in schedules)]
        for name in (policy.name for policy in evaluation.policies if policy.seeds)
    ]
    return Table([words("execution_policy"), *schedules], rows)


def _seeds_table(evaluation: ExecutionEvaluation, words: Words) -> Table | None:
    rows = [
        [f"{policy.name}, {seed}", *(f"{float(measures[m].mean()):+.2f}" for m in _MEASURES)]
        for policy in evaluation.policies
        if len(policy.seeds) > 1
        for seed, measures in policy.seeds.items()
    ]
    head = [words("execution_seeds"), *(words(f"execution_{m}") for m in _MEASURES)]
    return Table(head, rows) if rows else None


def _hours_table(evaluation: ExecutionEvaluation, words: Words) -> Table:
    shown = [policy for policy in evaluation.policies if policy.hourly]
    rows = []
    for hour in shown[0].hourly:
        both = [policy.hourly[hour] for policy in shown]
        cells = [text for share, gain in both for text in (f"{share:.1%}", f"{gain:+.2f}")]
        rows.append([f"{hour:02d}:00", *cells])
    head = [words(f"execution_{name}") for name in ("hour", "share", "gain")]
    return Table(head, rows, "measures grouped", [policy.name for policy in shown])


def _facts(evaluation: ExecutionEvaluation, words: Words) -> FactRows:
    facts = evaluation.facts
    return [
        (
            "execution_seeds",
            [f"{name}: {', '.join(map(str, seeds))}" for name, seeds in facts["runs"].items()],
        ),
        ("execution_symbols", [", ".join(facts["symbols"][:20])]),
        ("execution_rules", [execution_line(facts["rules"], facts["price"], words)]),
        ("fact_data", [facts["content"][:20]]),
    ]


def _looks(names: Iterable[str], learned: str | None) -> dict[str, tuple[str, float]]:
    """Policy → role of the colour and width of its lines. learned: the first that is"""
    roles = {name: (_ROLES[k % len(_ROLES)], 1.6) for k, name in enumerate(names)}
    return roles if learned is None else roles | {learned: ("accent", 2.4)}


def _first_learned(evaluation: ExecutionEvaluation) -> str | None:
    return next((policy.name for policy in evaluation.policies if policy.seeds), None)


def _clock_axis(clock: Floats) -> Axis:
    """Times of day; ticks are evenly apart, so that a lunch break takes no room."""
    labels = [f"{int(m) // 60:02d}:{int(m) % 60:02d}" for m in clock]
    return Axis(kind="category", labels=labels, ticks=8)


def _paths_plot(evaluation: ExecutionEvaluation, words: Words, title: str = "") -> Plot:
    axis = _clock_axis(evaluation.clock)
    layers: list[Layer] = [_volume_line(axis, evaluation.volume.cumsum(), words)]
    looks = _looks((p.name for p in evaluation.policies), _first_learned(evaluation))
    for policy in evaluation.policies:
        role, width = looks[policy.name]
        path = policy.path.cumsum()
        layers.append(Curve(axis.labels, path, width, name=policy.name, role=role, hover=".1%"))
    y = Axis(words("execution_of_order"), form="percent", low=0)
    return Plot(layers, axis, y, title, legend="inside")


def _volume_line(axis: Axis, volume: Floats, words: Words) -> Curve:
    name = words("execution_volume")
    return Curve(axis.labels, volume, 1.5, "dot", name=name, role="faint", hover=".1%")


def _spread_plot(evaluation: ExecutionEvaluation, words: Words, title: str = "") -> Plot:
    """The distribution of PA over the orders; the outermost bins hold the 2 % beyond."""
    every = np.concatenate([policy.measures["pa"] for policy in evaluation.policies])
    reach = max(1.0, float(np.quantile(np.abs(every), 0.98)))
    edges = np.linspace(-reach, reach, 42)
    middles = np.asarray((edges[1:] + edges[:-1]) / 2)
    layers = []
    looks = _looks((p.name for p in evaluation.policies), _first_learned(evaluation))
    for policy in evaluation.policies:
        role, width = looks[policy.name]
        own = policy.measures["pa"]
        share = np.histogram(np.clip(own, -reach, reach), edges)[0] / len(own)
        line = Curve(middles, share, width, step=True, name=policy.name, role=role, hover=".1%")
        layers.append(line)
    y = Axis(form="percent", low=0)
    return Plot(layers, Axis(words("execution_bp")), y, title, legend="inside")


def day_chart(histories: Mapping[str, History], words: Words, learned: str | None = None) -> Chart:
    """One order's day: price and fills above, below how far each policy had come."""
    first = next(iter(histories.values()))
    axis = _clock_axis(first.days.clock)
    price = Curve(axis.labels, first.market_price[0], 1.2, role="ink", group="market", hover=".4g")
    twap = RefLine(float(first.benchmarks.twap[0]), width=1.0, name="TWAP", role="faint")
    above: list[Layer] = [replace(price, name=words("execution_market_price")), twap]
    volume = first.market_volume[0].cumsum()
    below = [_volume_line(axis, volume / max(float(volume[-1]), 1e-12), words)]
    looks = _looks(histories, learned)
    for name, history in histories.items():
        role, width = looks[name]
        assert history.ticks is not None, "the chart needs ticks"
        share = history.ticks.executed[0] / history.orders.amount[0]
        done = np.flatnonzero(share > 0.0)
        fills = Points(
            [axis.labels[tick] for tick in done.tolist()],
            history.ticks.price[0, done],
            size=48 * np.sqrt(share[done]),  # so many pixels across is the whole order
            opacity=0.4,
            texts=[f"{name}: {part:.1%}" for part in share[done].tolist()],
        )
        above.append(replace(fills, name=name, role=role, group=name, listed=False))
        # Gain over TWAP, in basis points of the arrival price.
        apart = float(history.price[0]) - float(history.benchmarks.twap[0])
        gain = -float(history.side[0]) * apart / float(history.benchmarks.arrival[0]) * 1e4
        label = f"{name} ({gain:+.1f} bp)"
        line = Curve(axis.labels, share.cumsum(), width, name=label, role=role, hover=".1%")
        below.append(replace(line, group=name))
    y = Axis(words("execution_of_order"), form="percent", low=0)
    prices = Plot(above, axis, Axis(words("execution_market_price")))
    return Chart(((prices,), (Plot(below, axis, y),)), 560, (1.5, 1), shared=True)


def _day_title(histories: Mapping[str, History], words: Words) -> str:
    first = next(iter(histories.values()))
    return words(
        "execution_day",
        name=first.days.name(int(first.orders.day[0])),
        side=words("execution_buy" if first.orders.buying[0] else "execution_sell"),
        amount=f"{first.orders.amount[0]:,.0f}",
    )
