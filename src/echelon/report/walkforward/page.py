"""The page of a walk-forward: the verdict on the stitched test windows, and every fold.

    DIR/report/report.html      everything, self-contained; in Chinese report.zh.html

Made from what `echelon walk-forward` wrote; the same results give the same page, byte for byte.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.backtest.files import AGENT
from echelon.evaluation.statistics import interquartile_mean
from echelon.evaluation.trust import LEAST_BARS
from echelon.evaluation.walkforward import STITCHED, WalkForward
from echelon.files import write_atomic
from echelon.ops.measures import LABELS
from echelon.report.blocks import (
    Block,
    Card,
    Cell,
    ChartBox,
    Choice,
    Content,
    Facts,
    Folded,
    Lead,
    Named,
    Page,
    Panes,
    Part,
    Section,
    Summary,
    Table,
    Text,
    Two,
)
from echelon.report.charts.walkforward import sharpe_chart, windows_chart
from echelon.report.rules import recorded_rules
from echelon.report.run import tables
from echelon.report.run.gather import SplitData
from echelon.report.run.headline import lead
from echelon.report.run.page import (
    LEADS,
    STEM,
    equity_card,
    footer_of,
    measures_card,
    monthly_card,
    source_of,
)
from echelon.report.run.reference_policies import reference_differences
from echelon.report.run.trust import (
    DASH,
    Line,
    costs_part,
    deflation_lines,
    differences_part,
    search_part,
    seeds_part,
    span_of,
    verdict_text,
    with_difference,
    yearly,
)
from echelon.report.texts import Words, file_name, languages_with
from echelon.report.walkforward.data import WalkData, gather_walk

SHOWN = ("annual_return", "sharpe_annual", "calmar", "turnover_annual", "max_drawdown")
"""Measures of every fold at first sight; all others are folded."""
BASELINES = ("equal_weight", "benchmark")
"""Baselines next to the agents, at first sight."""


def is_walk_forward(directory: Path) -> bool:
    """Whether a directory holds a walk-forward."""
    return (directory / f"{WalkForward.stem}.json").is_file()


def write_walk_forward_report(directory: Path, lang: str = "en") -> Path:
    """Write DIR/report/report.html and return its path. lang: en, or zh: report.zh.html"""
    words, place = Words(lang), directory / "report"
    parts = ["echelon", "report", str(directory), *(("--lang", lang) if lang != "en" else ())]
    written = languages_with(place, STEM, lang)
    page = render_walk(gather_walk(directory), words, shlex.join(parts), written)
    path = place / file_name(STEM, "html", lang)
    write_atomic(path, page)
    return path


def render_walk(walk: WalkData, words: Words, command: str, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    stitched = walk.stitched
    parts: list[Block | None] = [_summary(walk, words), _windows(walk, words)]
    if stitched is not None:
        starts = [str(fold.test[0]) for fold in walk.folds[1:]]
        parts += [_trust(walk, stitched, words), equity_card(stitched, words, starts)]
    parts += [_by_fold(walk, words), _references(walk, words)]
    if stitched is not None:
        parts += [measures_card(stitched, words), monthly_card(stitched, words)]
    facts = [_facts(walk, words, command), source_of(walk.config_text, words)]
    parts.append(Card(words("facts"), "", facts))
    eyebrow = f"Echelon · {words('walk_title')}"
    body = [Section(STITCHED, parts)]
    page = Page(STEM, walk.name, eyebrow, body, footer_of(words), written=written)
    return page.render(words)


def verdict_of(walk: WalkData, words: Words) -> str:
    """What may be said of the stitched agents vs the yardstick."""
    statistics = walk.statistics
    name = statistics["verdict"]["baseline"]
    baseline, both = words.in_text(name), statistics["differences"].get(name)
    if both is None:
        if statistics["bars"] < LEAST_BARS:
            return words("verdict_few", bars=statistics["bars"], least=LEAST_BARS)
        return words("verdict_alone", baseline=baseline)
    looks = words.count("looks", statistics["looks"])
    said = words(f"verdict_{statistics['verdict']['key']}", baseline=baseline, tried=looks)
    return with_difference(said, span_of(both, yearly(statistics)), words, "difference_is")


def _summary(walk: WalkData, words: Words) -> Summary:
    folds, stitched = walk.folds, walk.stitched
    if stitched is None:
        command = f"echelon {WalkForward.command} --resume {walk.path}"
        notice = Text(words("walk_unstitched", command=command), "notice")
        return Summary(f"{folds[0].test[0]} – {folds[-1].test[1]}", [notice])
    facts = stitched.facts
    span = words(
        "walk_span",
        folds=len(folds),
        first=facts["first"],
        last=facts["last"],
        bars=f"{facts['periods']:,}",
    )
    body = [
        verdict_text(walk.statistics["verdict"]["key"], verdict_of(walk, words)),
        Lead([lead(stitched, words, name) for name in LEADS]),
        tables.headlines(stitched, words),
        Text(words("walk_caution")),
    ]
    return Summary(span, body)


def _windows(walk: WalkData, words: Words) -> Card:
    folds = walk.folds
    scheme = walk.config.walk_forward
    note = words(
        "windows_note",
        purge=words.count("bars", scheme.purge_bars),
        embargo=words.count("bars", scheme.embargo_bars),
    )
    if folds[-1].partial:
        note += " " + words("windows_partial", bars=folds[-1].bars.test)
    chart = ChartBox(f"{STITCHED}/windows", windows_chart(folds, words))
    return Card(words("windows"), note, [chart])


def _trust(walk: WalkData, stitched: SplitData, words: Words) -> Card:
    """What the stitched numbers are worth."""
    statistics = walk.statistics
    order = [r.key for r in stitched.baselines]
    looks = Line(words("walk_looks"), f"{statistics['looks']:,}", words("walk_looks_said"))
    lines = [*deflation_lines(statistics, words, "dsr_said_walk"), looks]
    ratios = [r.measures["sharpe_annual"] for r in stitched.agents]
    interval = statistics["sharpe_annual"]
    if interval is not None:
        interval = interval | {"iqm": interquartile_mean(ratios)}
    seeds = {"n": len(ratios), "measures": {"sharpe_annual": interval}}
    sweep = [
        line | {"sharpe_annual": _as_interval(line["sharpe_annual"])}
        for line in statistics["costs"]
    ]
    yardstick = statistics["verdict"]["baseline"]
    costs = costs_part(sweep, yardstick, words("sweep_folds"), words, ("sharpe_annual",))
    parts = [
        differences_part(statistics, order, STITCHED, words),
        search_part(lines, words),
        Two(seeds_part(seeds, words), costs),
    ]
    return Card(words("trust"), words("walk_uncounted"), parts)


def _as_interval(value: float | None) -> dict[str, Any] | None:
    """A mean without an interval, as the cost sweep of a run has it."""
    return None if value is None else {"estimate": value, "low": None, "high": None}


def _by_fold(walk: WalkData, words: Words) -> Card:
    baselines = [name for name in BASELINES if name in walk.baselines]
    note = words("by_fold_note", n=walk.seeds) if walk.seeds > 1 else words("by_fold_note_one")
    group = f"{STITCHED}/measures"
    by_measure = {name: _measure_table(walk, name, words) for name in LABELS}
    choice = Choice(group, {name: words.measure(name) for name in LABELS}, words("show"))
    every = Folded(words("every_measure"), [choice, Panes(group, by_measure)])
    chart = ChartBox(f"{STITCHED}/folds", sharpe_chart(walk, baselines, words))
    table = fold_table(walk, {name: words.name(name) for name in baselines}, words)
    return Card(words("by_fold"), note, [table, Part(words("sharpe_by_fold"), [chart]), every])


def _references(walk: WalkData, words: Words) -> Card | None:
    """The agents vs what is made of the same experts; None without."""
    if not walk.companions:
        return None
    names = {name: words(f"row_{name}") for name in walk.companions}
    body = [fold_table(walk, names, words), reference_differences(walk.statistics, words)]
    return Card(words("reference"), words("reference_folds_note"), body)


def fold_table(walk: WalkData, others: Mapping[str, str], words: Words) -> Table:
    """A row a fold and one of the stitched series; a group of columns a measure.

    others: books next to the agents → what they are called
    """
    rows = [
        [title, *_fold_cells(walk, fold, [AGENT, *others], words)]
        for fold, title in _rows(walk, words).items()
    ]
    groups = [Named(words.measure(name) + _unit(name), words.meaning(name)) for name in SHOWN]
    head = [words("fold"), words("agent"), *others.values()]
    return Table(head, rows, f"measures grouped narrow {_kind(walk)}", groups)


def _kind(walk: WalkData) -> str:
    """Class of a table by fold: its last line is of the whole."""
    return "" if walk.stitched is None else "whole"


def _rows(walk: WalkData, words: Words) -> dict[str, str]:
    """Folds and, where there is one, the stitched series → their titles."""
    rows = {fold.name: fold.name for fold in walk.folds}
    return rows if walk.stitched is None else rows | {STITCHED: words("stitched")}


def _fold_cells(walk: WalkData, fold: str, books: Sequence[str], words: Words) -> list[Content]:
    values = {who: walk.values(fold, who) for who in books}
    if values[AGENT] is None:
        problem = walk.problem(fold)
        text = words("fold_failed", problem=problem) if problem else words("fold_incomplete")
        return [Cell(text, "failed", columns=len(books) * len(SHOWN))]
    return [
        Cell(_measure_text(values[who], name, unit=False), "agent" * (who == AGENT))
        for name in SHOWN
        for who in books
    ]


def _unit(name: str) -> str:
    """Unit of a measure, for the head of a column without it."""
    unit = LABELS[name].suffix.strip()
    return f", {unit}" if unit else ""


def _measure_text(values: Mapping[str, float] | None, name: str, *, unit: bool = True) -> str:
    """A measure as a table has it; a dash where there are none."""
    if values is None:
        return DASH
    label = LABELS[name]
    text = label.format(values[name], values[f"{name}_std"])
    return text if unit else text.removesuffix(label.suffix)


def _measure_table(walk: WalkData, name: str, words: Words) -> Table:
    """One measure: a row a fold, a column a book."""
    books = [AGENT, *walk.baselines]
    head = [words("fold"), words("agent"), *(words.name(key) for key in walk.baselines)]
    rows = [
        [title, *(_measure_text(walk.values(fold, who), name) for who in books)]
        for fold, title in _rows(walk, words).items()
    ]
    return Table(head, rows, f"measures against {_kind(walk)}")


def _facts(walk: WalkData, words: Words, command: str) -> Facts:
    config, unknown = walk.config, words("unknown")
    about = walk.facts or {}
    run = about.get("run", {})
    data, ledger = run.get("data", {}), about.get("ledger", {})
    scheme = config.walk_forward
    train = words("all_before") if scheme.scheme == "expanding" else scheme.train
    assets = sorted({len(fold.assets) for fold in walk.folds})
    rows = [
        (
            "fact_scheme",
            [
                words(
                    "scheme",
                    scheme=words(f"scheme_{scheme.scheme}"),
                    unit=words(f"unit_{scheme.unit}"),
                    train=train,
                    valid=scheme.valid,
                    test=scheme.test,
                )
            ],
        ),
        ("fact_folds", [str(len(walk.folds))]),
        ("fact_seeds", [str(walk.seeds)]),
        ("fact_steps", [f"{config.train.total_env_steps:,}"]),
        ("fact_assets", [" – ".join(dict.fromkeys((f"{assets[0]:,}", f"{assets[-1]:,}")))]),
        (
            "fact_data",
            [f"{data.get('name', unknown)} · {tables.short(data, 'content_hash', unknown)}"],
        ),
        ("fact_code", [f"Echelon {run.get('echelon', unknown)} · {run.get('code', unknown)}"]),
        ("fact_fill", [words.ledger(ledger["fill"]) if ledger else unknown]),
        ("fact_prices", [words.ledger(ledger["prices"]) if ledger else unknown]),
        *tables.rules_rows(recorded_rules(about, config), words),
        ("fact_actions", [words("greedy" if config.eval.deterministic else "sampled")]),
        ("fact_directory", [str(walk.path / f"{WalkForward.member}s")]),
        ("fact_report", [command]),
    ]
    return tables.named_facts(rows, words)
