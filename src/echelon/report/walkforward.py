"""The page of a walk-forward: the verdict on the stitched test windows, and every fold.

    DIR/report/report.html      everything, self-contained; in Chinese report.zh.html

Made from what `echelon walk-forward` wrote; the same results give the same page, byte for byte.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from echelon.backtest.files import AGENT
from echelon.evaluation.statistics import interquartile_mean
from echelon.evaluation.trust import LEAST_BARS
from echelon.evaluation.walkforward import STITCHED, WalkForward
from echelon.files import write_atomic
from echelon.ops.measures import LABELS, Label
from echelon.report import tables
from echelon.report.charts.walkforward import sharpe_chart, windows_chart
from echelon.report.document import (
    card,
    chart,
    choice,
    document,
    folded,
    new_data,
    panes,
    part,
    two,
)
from echelon.report.gather import SplitData
from echelon.report.headline import lead
from echelon.report.languages import file_name, language_links, languages_with
from echelon.report.page import STEM, equity_card, measures_card, monthly_card
from echelon.report.reference_policies import companion_differences
from echelon.report.rules import recorded_rules
from echelon.report.texts import Words
from echelon.report.trust import (
    Line,
    costs_part,
    deflation_lines,
    differences_part,
    search_part,
    seeds_part,
    span_of,
    verdict_html,
    with_difference,
    yearly,
)
from echelon.report.walkforward_data import WalkData, gather_walk

SHOWN = ("annual_return", "sharpe_annual", "calmar", "turnover_annual", "max_drawdown")
"""Measures of every fold at first sight; all others are folded."""
_NARROW = {name: replace(LABELS[name], digits=1) for name in SHOWN} | {
    "sharpe_annual": LABELS["sharpe_annual"],
    "calmar": LABELS["calmar"],
    "turnover_annual": replace(LABELS["turnover_annual"], digits=0),
}
"""How they are shown where 15 columns stand side by side."""
BESIDE = ("equal_weight", "benchmark")
"""Baselines beside the agents, at first sight."""


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
    data = new_data()
    stitched = walk.stitched
    parts = [_summary(walk, words), _windows(walk, words, data)]
    if stitched is not None:
        parts.append(_trust(walk, stitched, words, data))
        starts = [str(fold.test[0]) for fold in walk.folds[1:]]
        parts.append(equity_card(stitched, words, data, starts))
    parts += [_by_fold(walk, words, data), _companions(walk, words)]
    if stitched is not None:
        parts += [measures_card(stitched, words), monthly_card(stitched, words)]
    config = folded(words("config_folded"), f"<pre>{escape(walk.config_text)}</pre>")
    parts.append(card(words("facts"), "", _facts(walk, words, command) + config))
    body = [
        f'<header class="top"><div><p class="eyebrow">Echelon · {escape(words("walk_title"))}'
        f"{language_links(STEM, words.lang, written)}</p>"
        f"<h1>{escape(walk.name)}</h1></div></header>",
        f"<noscript><p class='notice'>{escape(words('no_script'))}</p></noscript>",
        f'<section class="split" id="split-{STITCHED}">{"".join(parts)}</section>',
    ]
    return document(walk.name, words, body, data)


def verdict_of(walk: WalkData, words: Words) -> str:
    """What may be said of the stitched agents beside the yardstick."""
    found = walk.statistics
    name = found["verdict"]["baseline"]
    baseline, both = words.in_text(name), found["differences"].get(name)
    if both is None:
        if found["bars"] < LEAST_BARS:
            return words("verdict_few", bars=found["bars"], least=LEAST_BARS)
        return words("verdict_alone", baseline=baseline)
    looks = words.count("looks", found["looks"])
    said = words(f"verdict_{found['verdict']['key']}", baseline=baseline, tried=looks)
    return with_difference(said, span_of(both, yearly(found)), words, "difference_is")


def _summary(walk: WalkData, words: Words) -> str:
    folds, stitched = walk.folds, walk.stitched
    if stitched is None:
        command = f"echelon {WalkForward.command} --resume {walk.path}"
        span = f"{folds[0].test[0]} – {folds[-1].test[1]}"
        said = f'<p class="notice">{escape(words("walk_unstitched", command=command))}</p>'
        return f'<div class="card summary"><p class="eyebrow">{escape(span)}</p>{said}</div>'
    facts = stitched.facts
    span = words(
        "walk_span",
        folds=len(folds),
        first=facts["first"],
        last=facts["last"],
        bars=f"{facts['periods']:,}",
    )
    leads = "".join(
        f"<p>{escape(lead(stitched, words, m))}</p>" for m in ("sharpe_annual", "total_return")
    )
    verdict = verdict_html(walk.statistics["verdict"]["key"], verdict_of(walk, words))
    return (
        f'<div class="card summary"><p class="eyebrow">{escape(span)}</p>{verdict}'
        f'<div class="lead">{leads}</div>{tables.cards(stitched, words)}'
        f'<p class="note">{escape(words("walk_caution"))}</p></div>'
    )


def _windows(walk: WalkData, words: Words, data: dict[str, Any]) -> str:
    key = f"{STITCHED}/windows"
    folds = walk.folds
    data["charts"][key] = windows_chart(folds, words)
    scheme = walk.config.walk_forward
    note = words(
        "windows_note",
        purge=words.count("bars", scheme.purge_bars),
        embargo=words.count("bars", scheme.embargo_bars),
    )
    if folds[-1].partial:
        note += " " + words("windows_partial", bars=folds[-1].bars.test)
    return card(words("windows"), note, chart(key))


def _trust(walk: WalkData, stitched: SplitData, words: Words, data: dict[str, Any]) -> str:
    """What the stitched numbers are worth."""
    found = walk.statistics
    order = [r.key for r in stitched.baselines]
    looks = Line(words("walk_looks"), f"{found['looks']:,}", words("walk_looks_said"))
    lines = [*deflation_lines(found, words, "dsr_said_walk"), looks]
    ratios = [r.measures["sharpe_annual"] for r in stitched.agents]
    interval = found["sharpe_annual"]
    if interval is not None:
        interval = interval | {"iqm": interquartile_mean(ratios)}
    seeds = {"n": len(ratios), "measures": {"sharpe_annual": interval}}
    sweep = [line | {"sharpe_annual": _alone(line["sharpe_annual"])} for line in found["costs"]]
    yardstick = found["verdict"]["baseline"]
    costs = costs_part(sweep, yardstick, words("sweep_folds"), words, ("sharpe_annual",))
    parts = [
        differences_part(found, order, STITCHED, words, data),
        search_part(lines, words),
        two(seeds_part(seeds, words), costs),
    ]
    return card(words("trust"), words("walk_uncounted"), "".join(parts))


def _alone(value: float | None) -> dict[str, Any] | None:
    """A mean without an interval, as the cost sweep of a run has it."""
    return None if value is None else {"estimate": value, "low": None, "high": None}


def _by_fold(walk: WalkData, words: Words, data: dict[str, Any]) -> str:
    key = f"{STITCHED}/folds"
    beside = [name for name in BESIDE if name in walk.baselines]
    data["charts"][key] = sharpe_chart(walk, beside, words)
    note = words("by_fold_note", n=walk.seeds) if walk.seeds > 1 else words("by_fold_note_one")
    group = f"{STITCHED}/measures"
    found = {name: _measure_table(walk, name, words) for name in LABELS}
    names = {name: words.measure(name) for name in LABELS}
    every = folded(
        words("every_measure"), f"<p>{choice(group, names, words)}</p>{panes(group, found)}"
    )
    picture = part(words("sharpe_by_fold"), chart(key))
    shown = fold_table(walk, {name: words.name(name) for name in beside}, words)
    return card(words("by_fold"), note, shown + picture + every)


def _companions(walk: WalkData, words: Words) -> str:
    """The agents beside what is made of the same experts; nothing without."""
    if not walk.companions:
        return ""
    names = {name: words(f"row_{name}") for name in walk.companions}
    body = fold_table(walk, names, words) + companion_differences(walk.statistics, words)
    return card(words("companions"), words("companions_folds_note"), body)


def fold_table(walk: WalkData, beside: Mapping[str, str], words: Words) -> str:
    """A row a fold and one of the stitched series; a group of columns a measure.

    beside: books beside the agents → what they are called
    """
    names = [words("agent"), *beside.values()]
    rows = [
        [escape(title), *_fold_cells(walk, fold, [AGENT, *beside], words)]
        for fold, title in _rows(walk, words).items()
    ]
    groups = [tables.measure_name(name, words) + _unit(name) for name in SHOWN]
    return tables.grouped_table(words("fold"), groups, names, rows, f"narrow {_kind(walk)}")


def _kind(walk: WalkData) -> str:
    """Class of a table by fold: its last line is of the whole."""
    return "" if walk.stitched is None else "whole"


def _rows(walk: WalkData, words: Words) -> dict[str, str]:
    """Folds and, where there is one, the stitched series → their titles."""
    rows = {fold.name: fold.name for fold in walk.folds}
    return rows if walk.stitched is None else rows | {STITCHED: words("stitched")}


def _fold_cells(walk: WalkData, fold: str, books: list[str], words: Words) -> list[str]:
    found = {who: walk.values(fold, who) for who in books}
    if found[AGENT] is None:
        problem = walk.problem(fold)
        said = words("fold_failed", problem=problem) if problem else words("fold_incomplete")
        return [f'<td class="failed" colspan="{len(books) * len(SHOWN)}">{escape(said)}</td>']
    cells = []
    for name in SHOWN:
        for who in books:
            kind = ' class="agent"' if who == AGENT else ""
            text = _shown(found[who], name, _NARROW[name]).removesuffix(" %")
            cells.append(f"<td{kind}>{escape(text)}</td>")
    return cells


def _unit(name: str) -> str:
    """Unit of a measure, for the head of a column without it."""
    return ", %" if LABELS[name].unit == "percent" else ""


def _shown(values: Mapping[str, float] | None, name: str, label: Label) -> str:
    """A measure as a table has it; a dash where there are none."""
    if values is None:
        return "–"
    return label.format(values[name], values[f"{name}_std"])


def _measure_table(walk: WalkData, name: str, words: Words) -> str:
    """One measure: a row a fold, a column a book."""
    books = [AGENT, *walk.baselines]
    head = [words("fold"), words("agent"), *(words.name(key) for key in walk.baselines)]
    rows = [
        [
            escape(title),
            *(
                f"<td>{escape(_shown(walk.values(fold, who), name, LABELS[name]))}</td>"
                for who in books
            ),
        ]
        for fold, title in _rows(walk, words).items()
    ]
    return tables.table([escape(h) for h in head], rows, f"measures against {_kind(walk)}")


def _facts(walk: WalkData, words: Words, command: str) -> str:
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
    return tables.facts_list(rows, words)
