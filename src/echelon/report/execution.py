"""The page of execution: measures with intervals, trajectories, distributions, hours.

DIR/report.html        everything, self-contained; in Chinese report.zh.html, and so the pictures
DIR/execution.png      trajectories and the distribution of PA, for slides
DIR/day.png            one order's day: price, volume, and what each policy did
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.evaluation.execution import ExecutionEvaluation, Mean, PolicyOrders
from echelon.files import write_atomic
from echelon.report.blocks import Card, Cell, ChartBox, Content, Facts, Page, Table, Text, Two
from echelon.report.charts import execution as charts
from echelon.report.charts.slides import Slide, draw_slide, slide_words
from echelon.report.rules import execution_line
from echelon.report.run.page import STEM, footer_of
from echelon.report.run.tables import named_facts
from echelon.report.run.trust import DASH
from echelon.report.texts import Words, file_name, languages_with

PICTURE, DAY = "execution", "day"
_MEASURES = ("gain_twap", "gain_vwap", "gain_arrival", "shortfall", "pa")


def write_execution_report(
    evaluation: ExecutionEvaluation, directory: Path, name: str, lang: str
) -> Path:
    """Write the page and its pictures, and those in other languages that are there already.

    The tables next to them are of this evaluation: a page of an earlier one must not stay.
    Returns the path of the page asked for.
    """
    Words(lang)  # refuses a language that there is not
    written = languages_with(directory, STEM, lang)
    for language in written:
        words = Words(language)
        shown = slide_words(words)
        for stem, slide in _slides(evaluation, name, shown).items():
            write_atomic(
                directory / file_name(stem, "png", language), draw_slide(slide, shown.lang)
            )
        page = render(evaluation, name, words, written)
        write_atomic(directory / file_name(STEM, "html", language), page)
    return directory / file_name(STEM, "html", lang)


def render(
    evaluation: ExecutionEvaluation, name: str, words: Words, written: Sequence[str] = ()
) -> str:
    """The whole page. written: languages that there are pages in"""

    def card(key: str, *body: Content | None) -> Card:
        return Card(words(f"execution_{key}"), words(f"execution_{key}_note"), body)

    day = charts.day_chart(evaluation.example, words, charts.first_learned(evaluation))
    title = charts.day_title(evaluation.example, words)
    body = [
        Text(_span(evaluation, words), ""),
        card(
            "measures",
            _measures_table(evaluation, words),
            _seeds_table(evaluation, words),
            Text(words("execution_intervals")),
            Text(words("execution_rest")),
        ),
        card("differences", _differences_table(evaluation, words)),
        Two(
            card("paths", ChartBox("paths", charts.paths_chart(evaluation, words))),
            card("spread", ChartBox("spread", charts.spread_chart(evaluation, words))),
        ),
        Card(title, words("execution_day_note"), [ChartBox("day", day)]),
        card("hours", _hours_table(evaluation, words)),
        Card(words("execution_facts"), "", [_facts(evaluation, words)]),
    ]
    eyebrow = f"Echelon · {words('execution_title')}"
    return Page(STEM, name, eyebrow, body, footer_of(words), written=written).render(words)


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


def _slides(evaluation: ExecutionEvaluation, name: str, words: Words) -> dict[str, Slide]:
    """By the stems of their files."""
    title = f"{name} · {words('execution_title')}"
    day = charts.day_chart(evaluation.example, words, charts.first_learned(evaluation))
    return {
        PICTURE: charts.execution_slide(evaluation, title, _span(evaluation, words), words),
        DAY: Slide(charts.day_title(evaluation.example, words), title, day),
    }


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


def _learned_policies(evaluation: ExecutionEvaluation) -> list[PolicyOrders]:
    return [policy for policy in evaluation.policies if policy.seeds]


def _differences_table(evaluation: ExecutionEvaluation, words: Words) -> Table:
    schedules = [policy.name for policy in evaluation.policies if not policy.seeds]
    rows: list[list[Content]] = [
        [name, *(_mean_cell(evaluation.difference(name, schedule)) for schedule in schedules)]
        for name in (policy.name for policy in _learned_policies(evaluation))
    ]
    return Table([words("execution_policy"), *schedules], rows)


def _seeds_table(evaluation: ExecutionEvaluation, words: Words) -> Table | None:
    rows = [
        [f"{policy.name}, {seed}", *(f"{float(measures[m].mean()):+.2f}" for m in _MEASURES)]
        for policy in _learned_policies(evaluation)
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


def _facts(evaluation: ExecutionEvaluation, words: Words) -> Facts:
    facts = evaluation.facts
    runs = [f"{name}: {', '.join(map(str, seeds))}" for name, seeds in facts["runs"].items()]
    rows: list[tuple[str, Sequence[str]]] = [
        ("execution_seeds", runs),
        ("execution_symbols", [", ".join(facts["symbols"][:20])]),
        ("execution_rules", [execution_line(facts["rules"], facts["price"], words)]),
        ("fact_data", [facts["content"][:20]]),
    ]
    return named_facts(rows, words)
