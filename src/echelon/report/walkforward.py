"""The report of a walk-forward: the verdict on the stitched test windows, and every fold.

    DIR/report/report.html      everything, self-contained; in Chinese report.zh.html

Made from what `echelon walk-forward` wrote; the same results give the same page, byte for byte.
The stitched test windows are made into a split like that of a run, so that the same charts and
tables show them. templates/walkforward.html says what is on the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from echelon.backtest.ensemble import ENSEMBLE
from echelon.backtest.files import AGENT, Tables
from echelon.config import Config
from echelon.config.tree import WalkForwardConfig
from echelon.errors import StoreError
from echelon.evaluation.evaluate import Evaluation, load_evaluation
from echelon.evaluation.folds import Fold
from echelon.evaluation.statistics import interquartile_mean
from echelon.evaluation.walkforward import STITCHED, WalkForward
from echelon.files import read_table, write_atomic
from echelon.ops.measures import LABELS
from echelon.report.charts.chart import (
    DATES,
    MOST_LABELS,
    Axis,
    Chart,
    Plot,
    Points,
    Spans,
    colour_of,
)
from echelon.report.charts.slides import Slide, draw_slide
from echelon.report.pages import Cell, Content, Named, Table, render_page
from echelon.report.rules import recorded_rules
from echelon.report.run.facts import FactRows, data_facts, rules_facts
from echelon.report.run.gather import Record, SplitData, in_order
from echelon.report.run.page import PARTS, STEM, command_for
from echelon.report.run.trust import REFERENCES, Line, deflation_lines, verdict_sentence
from echelon.report.texts import DASH, Words, file_name, languages_with

SHOWN = ("annual_return", "sharpe_annual", "information_ratio", "turnover_annual", "max_drawdown")
"""Measures of every fold at first sight; all others are folded."""
BY_YEAR = SHOWN[:3]
"""Of every calendar year."""
BASELINES = ("equal_weight", "benchmark", "forecast")
"""Baselines next to the agents, at first sight."""
_YEAR = "year-"
_STATISTICS = ("sharpe_annual", "differences", "deflation", "looks", "costs", "verdict")
_LATER = ("reference_policies", "ensemble", "active", "active_deflation", "capacity", "from")
"""Statistics that walk-forwards made before do not have."""
_SEED = "seed-"
_COLOURS = {"train": "rest", "valid": "commission", "test": "accent"}
_SYMBOLS = {"equal_weight": "diamond", "benchmark": "line-ew"}
_MOST_HIGH = 24
"""Folds that have a full line each in the chart of windows; of more, lines are thinner."""


@dataclass(frozen=True)
class WalkData:
    """A walk-forward, as its page needs it.

    table: walk_forward.parquet, a line per fold and agent or baseline
    stitched: the test windows as one split; None: a fold failed or is missing
    statistics: of the stitched series, with its `bars`, `periods_per_year` and `split`
    facts: provenance of the first fold that was evaluated; empty: none was
    """

    path: Path
    config: Config
    config_text: str
    folds: tuple[Fold, ...]
    table: pl.DataFrame
    stitched: SplitData | None
    statistics: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def baselines(self) -> list[str]:
        """Baselines that any fold has, in the order of a report."""
        known = self.table["who"].unique(maintain_order=True)
        others = (AGENT, ENSEMBLE, *REFERENCES)
        return in_order([w for w in known if w not in others and not w.startswith(_SEED)])

    @property
    def joined(self) -> list[str]:
        """The ensemble, where the folds have it."""
        return [ENSEMBLE] if ENSEMBLE in set(self.table["who"]) else []

    @property
    def years(self) -> dict[str, str]:
        """Calendar years of the stitched series, as the table calls them → as readers do."""
        names = self.table["fold"].unique(maintain_order=True)
        return {name: name.removeprefix(_YEAR) for name in names if name.startswith(_YEAR)}

    @property
    def references(self) -> list[str]:
        """Rows over a hierarchy's experts that the folds have; none of another agent."""
        known = set(self.table["who"])
        return [who for who in REFERENCES if who in known]

    @property
    def seeds(self) -> int:
        return int(self.table["seeds"].max() or 0)  # type: ignore[arg-type]

    def values(self, fold: str, who: str) -> Mapping[str, float] | None:
        """Measures of an agent (with `_std`) or baseline in a fold; None where it has none."""
        rows = self.table.filter((pl.col("fold") == fold) & (pl.col("who") == who))
        if rows.is_empty() or (who == AGENT and not rows["seeds"][0]):
            return None
        (row,) = rows.to_dicts()
        names = [name + ending for name in LABELS for ending in ("", "_std")]
        return {name: math.nan if row[name] is None else float(row[name]) for name in names}

    def problem(self, fold: str) -> str:
        rows = self.table.filter(pl.col("fold") == fold)["problem"]
        return str(rows[0]) if len(rows) else ""


def gather_walk(directory: Path) -> WalkData:
    """Read a walk-forward that came to an end, be it that some of its folds failed."""
    walk = WalkForward.open(directory)
    resume = f"Go on with `echelon {WalkForward.command} --resume {directory}`."
    wanted = ("fold", "who", "seeds", "problem", *(n + e for n in LABELS for e in ("", "_std")))
    table = _read(directory / f"{WalkForward.stem}.parquet", wanted, resume)
    stitched, statistics = None, {}
    with WalkForward.reading(directory) as tree:
        if STITCHED in tree:
            about = tree[STITCHED]
            returns = _read(directory / f"{STITCHED}.parquet", about["measures"], resume)
            stitched = _split(directory, walk, about, returns)
            statistics = {name: tree["statistics"][name] for name in _STATISTICS}
            statistics |= {name: tree["statistics"].get(name) or {} for name in _LATER}
            statistics["active_deflation"] = tree["statistics"].get("active_deflation")
            rate = about["periods_per_year"]
            statistics |= {"bars": about["periods"], "periods_per_year": rate, "split": "test"}
    text = (directory / "base.yaml").read_text(encoding="utf-8")
    runs = (walk.run(k) for k in range(len(walk.folds)))
    file = Path("evaluations", WalkForward.split, "summary.json")
    first = next((run for run in runs if (run / file).is_file()), None)
    facts = {} if first is None else load_evaluation(first, WalkForward.split).facts
    return WalkData(directory, walk.base, text, walk.folds, table, stitched, statistics, facts)


def _read(path: Path, columns: Iterable[str], resume: str) -> pl.DataFrame:
    if not path.is_file():
        raise StoreError(f"{path}: no such file, so the walk-forward has not ended. {resume}")
    table = read_table(path, {}, resume)
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise StoreError(f"{path}: has no column {missing[0]!r}. {resume}")
    return table


def _split(
    directory: Path, walk: WalkForward, about: Mapping[str, Any], returns: pl.DataFrame
) -> SplitData:
    """The stitched series as a split: growth of 1 from the first day of the first test window."""
    begin = np.datetime64(walk.folds[0].test[0], "us")
    times = np.concatenate([[begin], returns["time"].to_numpy().astype("datetime64[us]")])
    nothing = pl.DataFrame({"time": times}).clear()  # a stitched book has no holdings and orders
    records = {}
    for key, saved in about["measures"].items():
        values = dict.fromkeys(LABELS) | saved  # one that came later is not known
        measures = {name: math.nan if values[name] is None else values[name] for name in LABELS}
        seed = int(key.removeprefix(_SEED)) if key.startswith(_SEED) else None
        value = np.concatenate([[1.0], np.cumprod(1.0 + returns[key].to_numpy())])
        drawdown = 1.0 - value / np.maximum.accumulate(value)
        equity = pl.DataFrame({"time": times, "value": value, "drawdown": drawdown})
        records[key] = Record(key, seed, measures, Tables(equity, nothing, nothing, nothing))
    agents = tuple(r for r in records.values() if r.seed is not None)
    joined = records.pop(ENSEMBLE, None)
    baselines = tuple(records[k] for k in in_order([k for k in records if records[k].seed is None]))
    evaluation = Evaluation(
        directory,
        {r.seed: r.measures for r in agents if r.seed is not None},
        {r.key: r.measures for r in baselines},
        about,
        ensemble=None if joined is None else joined.measures,
    )
    return SplitData(STITCHED, evaluation, agents, baselines)


def is_walk_forward(directory: Path) -> bool:
    return (directory / f"{WalkForward.stem}.json").is_file()


def write_walk_forward_report(directory: Path, lang: str = "en") -> Path:
    """Write DIR/report/report.html and return its path. lang: en, or zh: report.zh.html"""
    words, place = Words(lang), directory / "report"
    written = languages_with(place, STEM, lang)
    page = render_walk(gather_walk(directory), words, command_for(directory, None, lang), written)
    path = place / file_name(STEM, "html", lang)
    write_atomic(path, page)
    return path


def render_walk(walk: WalkData, words: Words, command: str, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    baselines = [name for name in BASELINES if name in walk.baselines]
    folds = _rows(walk, words)

    def short(key: str) -> str:
        return words("ensemble_short") if key == ENSEMBLE else words.name(key)

    own: dict[str, Any] = {
        "walk": walk,
        "resume": f"echelon {WalkForward.command} --resume {walk.path}",
        "windows": windows_chart(walk.folds, words),
        "sharpes": sharpe_chart(walk, baselines, words),
        "folds": fold_table(walk, folds, [*walk.joined, *baselines], short, words),
        "years": walk.years
        and fold_table(walk, walk.years, [*walk.joined, *baselines], short, words, BY_YEAR),
        "by_measure": {name: _measure_table(walk, name, words) for name in LABELS},
        "references": walk.references
        and fold_table(walk, folds, walk.references, words.reference, words),
        "facts": _facts(walk, words, command),
    }
    if walk.stitched is not None:
        statistics = walk.statistics
        ratios = [r.measures["sharpe_annual"] for r in walk.stitched.agents]
        interval = statistics["sharpe_annual"]
        if interval is not None:
            interval = interval | {"iqm": interquartile_mean(ratios)}
        looks = Line(words("walk_looks"), f"{statistics['looks']:,}", words("walk_looks_said"))
        own |= {
            "sentence": verdict_sentence(statistics, words, statistics["looks"], "looks"),
            "lines": [*deflation_lines(statistics, words, "dsr_said_walk"), looks],
            "over_seeds": {"sharpe_annual": interval},
        }
    name = walk.path.resolve().name
    return render_page("walkforward", words, name, stem=STEM, written=written, **PARTS | own)


def fold_table(
    walk: WalkData,
    folds: Mapping[str, str],
    others: Sequence[str],
    title: Callable[[str], str],
    words: Words,
    shown: Sequence[str] = SHOWN,
) -> Table:
    """A row a fold (name → title) and one of the stitched series; a group of columns a measure."""
    books = (AGENT, *others)
    rows: list[list[Content]] = []
    for fold, name in folds.items():
        values = {who: walk.values(fold, who) for who in books}
        cells: list[Content] = [
            Cell(_measure_text(values[who], measure, unit=False), "agent" * (who == AGENT))
            for measure in shown
            for who in books
        ]
        if values[AGENT] is None:
            problem = walk.problem(fold)
            text = words("fold_failed", problem=problem) if problem else words("fold_incomplete")
            cells = [Cell(text, "failed", columns=len(cells))]
        rows.append([name, *cells])
    groups = []
    for measure in shown:
        unit = LABELS[measure].suffix.strip()
        text = words.measure(measure) + (f", {unit}" if unit else "")
        groups.append(Named(text, words.meaning(measure)))
    head = [words("fold" if shown is SHOWN else "span_of_years"), words("agent")]
    head += map(title, others)
    kind = _kind(walk) if shown is SHOWN else ""
    return Table(head, rows, f"measures grouped narrow {kind}", groups)


def _measure_table(walk: WalkData, name: str, words: Words) -> Table:
    books = [*walk.joined, *walk.baselines]
    head = [words("fold"), words("agent"), *map(words.name, books)]
    rows = [
        [title, *(_measure_text(walk.values(fold, who), name) for who in (AGENT, *books))]
        for fold, title in _rows(walk, words).items()
    ]
    return Table(head, rows, f"measures against {_kind(walk)}")


def _kind(walk: WalkData) -> str:
    return "" if walk.stitched is None else "whole"


def _rows(walk: WalkData, words: Words) -> dict[str, str]:
    rows = {fold.name: fold.name for fold in walk.folds}
    return rows if walk.stitched is None else rows | {STITCHED: words("stitched")}


def _measure_text(values: Mapping[str, float] | None, name: str, *, unit: bool = True) -> str:
    if values is None:
        return DASH
    label = LABELS[name]
    text = label.format(values[name], values[f"{name}_std"])
    return text if unit else text.removesuffix(label.suffix)


def _facts(walk: WalkData, words: Words, command: str) -> FactRows:
    config, scheme = walk.config, walk.config.walk_forward
    ledger = walk.facts.get("ledger", {})
    assets = sorted({len(fold.assets) for fold in walk.folds})
    sizes = {
        "scheme": words(f"scheme_{scheme.scheme}"),
        "unit": words(f"unit_{scheme.unit}"),
        "train": words("all_before") if scheme.scheme == "expanding" else scheme.train,
        "valid": scheme.valid,
        "test": scheme.test,
    }
    return [
        ("fact_scheme", [words("scheme", **sizes)]),
        ("fact_folds", [str(len(walk.folds))]),
        ("fact_seeds", [str(walk.seeds)]),
        ("fact_steps", [f"{config.train.total_env_steps:,}"]),
        ("fact_assets", [" – ".join(dict.fromkeys((f"{assets[0]:,}", f"{assets[-1]:,}")))]),
        *data_facts(walk.facts.get("run", {}), words),
        *(
            (f"fact_{name}", [words.term("ledger", ledger[name]) if ledger else words("unknown")])
            for name in ("fill", "prices")
        ),
        *rules_facts(recorded_rules(walk.facts, config), words),
        ("fact_actions", [words("greedy" if config.eval.deterministic else "sampled")]),
        ("fact_directory", [str(walk.path / f"{WalkForward.member}s")]),
        ("fact_report", [command]),
    ]


def windows_chart(folds: Sequence[Fold], words: Words) -> Chart:
    """A row per fold: its train, validation and test windows in time."""
    layers = []
    for window, role in _COLOURS.items():
        spans = [getattr(fold, window) for fold in folds]
        first, last = np.array(spans, dtype="datetime64[D]").T
        texts = [
            f"{fold.name}: {a} – {b} ({getattr(fold.bars, window):,})"
            for fold, (a, b) in zip(folds, spans, strict=True)
        ]
        stop = last + np.timedelta64(1, "D")
        layer = Spans(range(len(folds)), first, stop, name=words(f"split_{window}"), role=role)
        layers.append(replace(layer, texts=texts))
    high = 24 if len(folds) <= _MOST_HIGH else max(7, 24 * _MOST_HIGH // len(folds))
    plot = Plot(layers, DATES, Axis(labels=[fold.name for fold in folds]))
    return Chart([[plot]], 88 + high * max(len(folds), 3), hover="closest")


def draw_splits(name: str, folds: Sequence[Fold], config: WalkForwardConfig, path: Path) -> None:
    high = 0.34 if len(folds) <= MOST_LABELS else 0.34 * MOST_LABELS / len(folds)
    title = f"{name} · {len(folds)} fold{'s' if len(folds) > 1 else ''}"
    train = "all before" if config.scheme == "expanding" else config.train
    lengths = f"{config.unit}s: {train} to train, {config.valid} to validate, {config.test} to test"
    text = (
        f"Tests from {folds[0].test[0]} to {folds[-1].test[1]} · {config.scheme}, in {lengths} · "
        "each fold chooses its checkpoints on its validation window and is then tested on the "
        f"window after it · dropped: {_bars_text(config.purge_bars)} between train and validation, "
        f"{_bars_text(config.embargo_bars)} between validation and test"
    )
    if folds[-1].partial:
        text += f" · the last test window is partial: {folds[-1].bars.test} bars"
    height = 2.3 + high * max(len(folds), 3)
    slide = Slide(title, text, windows_chart(folds, Words("en")), height=height)
    write_atomic(path, draw_slide(slide))


def _bars_text(n: int) -> str:
    return f"{n} bar{'' if n == 1 else 's'}" if n else "none"


def sharpe_chart(walk: WalkData, baselines: Sequence[str], words: Words) -> Chart:
    """Sharpe ratio of every fold: the agents' mean ± std, and baselines."""
    folds = [fold.name for fold in walk.folds]
    name = "sharpe_annual"
    layers = []
    for who in (*baselines, AGENT):
        values = [walk.values(fold, who) for fold in folds]
        mean, std = (
            np.array([math.nan if v is None else v[f"{name}{end}"] for v in values])
            for end in ("", "_std")
        )
        points = Points(folds, mean, along="y", hover=".2f")
        if who == AGENT:
            low, high = mean - np.nan_to_num(std), mean + np.nan_to_num(std)
            points = replace(points, name=words("agent"), lead=True, low=low, high=high, size=10.0)
        else:
            symbol = _SYMBOLS.get(who, "circle-open")
            points = replace(points, name=words.name(who), role=colour_of(who), symbol=symbol)
        layers.append(points)
    x = Axis(kind="category", labels=folds)
    return Chart([[Plot(layers, x, Axis(words.measure(name)))]], 300)
