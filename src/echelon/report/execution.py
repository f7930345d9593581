"""The page of execution: measures with intervals, trajectories, distributions, hours.

DIR/report.html        everything, self-contained; in Chinese report.zh.html, and so the pictures
DIR/execution.png      trajectories and the distribution of PA, for slides
DIR/day.png            one order's day: price, volume, and what each policy did
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from echelon.evaluation.execution import ExecutionEvaluation, Mean, PolicyOrders
from echelon.files import write_atomic
from echelon.report.charts import execution as charts
from echelon.report.charts.slides import Slide, draw_slide, slide_words
from echelon.report.document import card, chart, document, new_data, two
from echelon.report.languages import file_name, language_links, languages_with
from echelon.report.page import STEM
from echelon.report.rules import execution_line
from echelon.report.tables import facts_list, grouped_table, table
from echelon.report.texts import Words

PICTURE, DAY = "execution", "day"
_MEASURES = ("gain_twap", "gain_vwap", "gain_arrival", "shortfall", "pa")


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
        said = slide_words(words)
        for stem, slide in _slides(found, name, said).items():
            write_atomic(directory / file_name(stem, "png", each), draw_slide(slide, said.lang))
        page = render(found, name, words, written)
        write_atomic(directory / file_name(STEM, "html", each), page)
    return directory / file_name(STEM, "html", lang)


def render(found: ExecutionEvaluation, name: str, words: Words, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    data = new_data()
    data["charts"] |= {
        "paths": charts.paths_chart(found, words),
        "spread": charts.spread_chart(found, words),
        "day": charts.day_chart(found.example, words, charts.first_learned(found)),
    }
    body = [
        f'<header class="top"><div><p class="eyebrow">Echelon · '
        f"{escape(words('execution_title'))}{language_links(STEM, words.lang, written)}</p>"
        f"<h1>{escape(name)}</h1></div></header>",
        f"<noscript><p class='notice'>{escape(words('no_script'))}</p></noscript>",
        f"<p>{escape(_span(found, words))}</p>",
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
        card(charts.day_title(found.example, words), words("execution_day_note"), chart("day")),
        card(words("execution_hours"), words("execution_hours_note"), _hours(found, words)),
        card(words("execution_facts"), "", _facts(found, words)),
    ]
    return document(name, words, body, data)


def _span(found: ExecutionEvaluation, words: Words) -> str:
    facts = found.facts
    return words(
        "execution_span",
        split=words(f"split_{found.split}"),
        orders=f"{facts['orders']:,}",
        dates=f"{facts['dates']:,}",
        first=facts["first"],
        last=facts["last"],
    )


def _slides(found: ExecutionEvaluation, name: str, words: Words) -> dict[str, Slide]:
    """By the stems of their files."""
    title = f"{name} · {words('execution_title')}"
    day = charts.day_chart(found.example, words, charts.first_learned(found))
    return {
        PICTURE: charts.execution_slide(found, title, _span(found, words), words),
        DAY: Slide(charts.day_title(found.example, words), title, day),
    }


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
