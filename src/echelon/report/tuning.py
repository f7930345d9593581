"""The report of a search: where it looked, what that came to on validation, and what it costs.

    DIR/report/report.html      everything, self-contained; in Chinese report.zh.html
    DIR/tuning.png              the picture of the search, for slides

Made from what `echelon tune` wrote. templates/tuning.html says what is on the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.evaluation.tuning import Tuning, TuningResult
from echelon.files import write_atomic
from echelon.report.charts.chart import Axis, Chart, Curve, Layer, Plot, Points
from echelon.report.charts.slides import Slide, draw_slide, slide_words
from echelon.report.pages import Cell, Content, Named, Table, render_page
from echelon.report.run.facts import CODE, FactRows
from echelon.report.run.page import STEM, command_for
from echelon.report.texts import DASH, Words, file_name, languages_with


def is_tuning(directory: Path) -> bool:
    return (directory / f"{Tuning.stem}.json").is_file()


def write_tuning_report(directory: Path, lang: str = "en") -> Path:
    """Write page and picture and return the page's path. lang: en, or zh: report.zh.html"""
    words, place = Words(lang), directory / "report"
    tuning = Tuning.open(directory)
    result = tuning.read_result()
    written = languages_with(place, STEM, lang)
    page = render_page(
        "tuning",
        words,
        result.name,
        stem=STEM,
        written=written,
        span=_span(result, tuning, words),
        search=search_chart(result, _measure(tuning, words), words),
        trials=_trials_table(result, _measure(tuning, words), words),
        deflation=words("tuning_deflation", n=len(result.trials)),
        facts=_facts(result, tuning, words, command_for(directory, None, lang)),
        code=CODE,
        config_text=(directory / "base.yaml").read_text(encoding="utf-8"),
    )
    path = place / file_name(STEM, "html", lang)
    write_atomic(path, page)
    shown = slide_words(words)
    measure = _measure(tuning, shown)
    chart = search_chart(result, measure, shown)
    title = f"{result.name} · {shown('tuning_by_trial', measure=measure)}"
    slide = Slide(title, shown("tuning_search_note"), chart, height=2.0 + 3.2 * len(chart.rows))
    picture = directory / file_name(Tuning.stem, "png", shown.lang)
    write_atomic(picture, draw_slide(slide, shown.lang))
    return path


def search_chart(result: TuningResult, measure: str, words: Words) -> Chart:
    """Values in the order of trials with the best so far, and by each setting."""
    shown = [trial for trial in result.trials if trial.value is not None]
    numbers = [float(trial.trial.number) for trial in shown]
    values = [trial.value or 0.0 for trial in shown]
    complete = np.array([trial.state == "complete" for trial in shown], dtype=np.bool_)
    done = np.where(complete, values, -math.inf)
    best = np.where(np.logical_or.accumulate(complete), np.maximum.accumulate(done), math.nan)
    look: dict[str, Any] = {
        "roles": ["accent" if own else "benchmark" for own in complete],
        "texts": [f"{t.trial.name}: {v:.3f}" for t, v in zip(shown, values, strict=True)],
    }
    y = Axis(measure)
    layers: list[Layer] = [Points(numbers, values, **look), Curve(numbers, best, step=True)]
    plots: list[Plot | None] = [Plot(layers, Axis(words("tuning_trial"), form="integer"), y)]
    for r in result.ranges:
        places: Any = [trial.settings.get(r.key, math.nan) for trial in shown]
        x = Axis(r.key, kind="log" if r.log else "linear")
        if r.choices:
            places = [str(place) for place in places]
            x = Axis(r.key, kind="category", labels=[str(choice) for choice in r.choices])
        plots.append(Plot([Points(places, values, **look)], x, y))
    rows = [plots[k : k + 2] for k in range(0, len(plots), 2)]
    if len(rows[-1]) == 1 and len(rows) > 1:
        rows[-1].append(None)
    return Chart(rows, 320 * len(rows), legend="none", hover="closest")


def _measure(tuning: Tuning, words: Words) -> str:
    return words("tuning_measure", measure=words.measure(tuning.base.train.select_by))


def _span(result: TuningResult, tuning: Tuning, words: Words) -> str:
    first, last = tuning.base.split.valid
    states = [trial.state for trial in result.trials]
    count = {state: states.count(state) for state in ("complete", "pruned", "fail")}
    seeds = len(tuning.seeds)
    return words("tuning_span", n=len(states), first=first, last=last, seeds=seeds, **count)


def _trials_table(result: TuningResult, measure: str, words: Words) -> Table:
    """All trials, the best first; those without a value last."""
    rows: list[list[Content]] = [
        [
            Named(trial.trial.name, strong=trial is result.best),
            Cell(words(f"tuning_{trial.state}")),
            DASH if trial.value is None else f"{trial.value:.3f}",
            *(_setting(trial.settings.get(r.key)) for r in result.ranges),
        ]
        for trial in result.ranked
    ]
    heads = words("tuning_trial"), words("tuning_state"), measure
    return Table([*heads, *(r.key for r in result.ranges)], rows)


def _setting(value: object) -> str:
    if value is None:
        return DASH
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _facts(result: TuningResult, tuning: Tuning, words: Words, command: str) -> FactRows:
    ranges: Sequence[str] = [
        f"{r.key}: {', '.join(map(str, r.choices))}"
        if r.choices
        else f"{r.key}: {_setting(r.low)} – {_setting(r.high)}"
        + (f" ({words('tuning_log')})" if r.log else "")
        for r in result.ranges
    ]
    how = words(
        "tuning_how", sampler=tuning.sampler, pruner=tuning.pruner, generation=tuning.generation
    )
    return [
        ("tuning_ranges", ranges),
        ("tuning_search_by", [how]),
        ("fact_directory", [str(tuning.directory)]),
        ("fact_report", [command]),
    ]
