"""Can this be believed? The verdict of trust.json in words, and the numbers it rests on.

trust.json has Sharpe ratios per period; here they are shown a year. What it has no number for is
printed as a dash, and the line says why.

`echelon compare A B --output-dir RUN`, and the demo, leave RUN/comparison.json: `other_runs` shows
it where that is a comparison of runs on the split, this run among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from echelon.backtest.ensemble import ENSEMBLE
from echelon.backtest.files import AGENT
from echelon.errors import DamagedError
from echelon.evaluation.overfitting import MIN_CONFIGURATIONS
from echelon.evaluation.runs_comparison import RUNS_FORMAT, RUNS_RESULT
from echelon.evaluation.statistics import DEFLATED_ABOVE
from echelon.evaluation.trust import (
    EXPERTS_MEAN,
    LEAST_BARS,
    SEED_MEASURES,
    MeasureValues,
    Number,
    Seed,
)
from echelon.files import check_tree, read_json
from echelon.ops.measures import LABELS, Label, mean_std
from echelon.population.reference_policies import HEDGE
from echelon.report.pages import Cell, Content, Named, NotedTable, Table
from echelon.report.run.gather import RunData, SplitData
from echelon.report.run.gather import in_order as sort_books
from echelon.report.run.tables import measure_name
from echelon.report.texts import DASH, Words

Tree = Mapping[str, Any]

REFERENCES = (HEDGE, EXPERTS_MEAN)
"""Reference policies over the same experts that differences are shown to."""

_COMPARED = ("sharpe_annual", "total_return", "max_drawdown")
"""Measures of runs that were compared."""
_RATIO = LABELS["sharpe_annual"]


class Span(NamedTuple):
    """A difference of Sharpe ratios a year and its wider interval, NaN without an error."""

    estimate: float
    low: float
    high: float


def yearly(tree: Tree) -> float:
    """What makes a Sharpe ratio per period one a year."""
    return math.sqrt(tree["periods_per_year"])


def span_of(both: Tree, annual: float) -> Span:
    """What must hold at either block length."""
    estimate = number(both["single"]["estimate"])
    lows, highs = ([number(both[k][end]) for k in ("single", "double")] for end in ("low", "high"))
    if any(math.isnan(bound) for bound in (*lows, *highs)):
        return Span(estimate * annual, math.nan, math.nan)
    return Span(estimate * annual, min(lows) * annual, max(highs) * annual)


def verdict_sentence(trust: Tree, words: Words, counted: int | None, what: str = "tried") -> str:
    """What may be said of the agents vs the yardstick, and the numbers it rests on.

    counted: configurations among which the validation window chose, or with `what` of "looks" the
        looks at a walk-forward's test windows; None: not known
    """
    key, baseline = trust["verdict"]["key"], words.in_text(trust["verdict"]["baseline"])
    both = trust["differences"].get(trust["verdict"]["baseline"])
    if both is None:
        if trust["bars"] < LEAST_BARS:
            return words("verdict_few", bars=trust["bars"], least=LEAST_BARS)
        return words("verdict_alone", baseline=baseline)
    if trust["split"] != "test":
        said, template = words(f"verdict_{trust['split']}"), "difference_to"
    else:
        if key == "undeflated" and trust.get("claim", {}).get("deflated", 0.0) is None:
            key = "uncounted"
        tried = words(f"{what}_some") if counted is None else words.count(what, counted)
        said = words(f"verdict_{key}", baseline=baseline, tried=tried)
        template = "difference_is"
    span = span_of(both, yearly(trust))
    estimate, low, high = (_RATIO.format(value) for value in span)
    active = trust.get("active", {}).get(AGENT)
    more = (
        "" if active is None else words("ratio_is", **_format_span(span_of(active, yearly(trust))))
    )
    if math.isnan(span.low):
        return words("difference_bare", verdict=said, estimate=estimate, more=more)
    bounds = {"estimate": estimate, "low": low, "high": high}
    return words(template, verdict=said, baseline=baseline, more=more, **bounds)


def _format_span(span: Span) -> dict[str, str]:
    return {name: _RATIO.format(value) for name, value in span._asdict().items()}


def range_text(low: float, high: float, words: Words, label: Label = _RATIO) -> str:
    """From low to high, the unit once; cut to what the measure can be."""
    first = label.format(max(low, label.least)).removesuffix(label.suffix)
    return words("range", low=first, high=label.format(high))


def differences_table(
    tree: Tree,
    differences: Tree,
    words: Words,
    *,
    over_experts: bool = False,
    columns: Sequence[str] = ("baseline", "difference"),
) -> Table:
    """A row a difference at both block lengths, to baselines or to reference policies.

    columns: what is in the first two
    """
    annual, title = yearly(tree), words.reference if over_experts else words.name
    head = [words(k) for k in (*columns, "interval_95", "interval_double", "block")]
    rows: list[list[Content]] = [
        [
            title(name),
            _RATIO.format(number(both["single"]["estimate"]) * annual),
            *(_interval_cell(both[kind], annual, words) for kind in ("single", "double")),
            f"{both['single']['block_length']:.1f}",
        ]
        for name, both in differences.items()
    ]
    return Table(head, rows)


def active_table(tree: Tree, words: Words) -> Table:
    """A row a book: its information ratio over the yardstick at both block lengths."""
    first = (AGENT, ENSEMBLE, *sorted(who for who in tree["active"] if who.startswith("seed-")))
    known = dict.fromkeys((*first, *sort_books(tree["active"])))
    books = {who: tree["active"][who] for who in known if who in tree["active"]}
    return differences_table(tree, books, words, columns=("book", "information_ratio"))


def spans_table(tree: Tree, first: str, last: str, words: Words) -> Table:
    """From each year to the end, at the wider of both block lengths: ratio, and difference."""
    annual, baseline = yearly(tree), tree["verdict"]["baseline"]
    whole = {
        who: {"information": tree["active"][who], "sharpe": tree[key][baseline]}
        for who, key in ((AGENT, "differences"), (ENSEMBLE, "ensemble"))
        if who in tree["active"]
    }
    books = list(whole)
    rows: list[list[Content]] = []
    for year, line in ({first: whole} | tree["from"]).items():
        cells: list[Content] = []
        for kind in ("information", "sharpe"):
            for who in books:
                span = span_of(line[who][kind], annual)
                known = not math.isnan(span.low)
                small = range_text(span.low, span.high, words) if known else ""
                cells.append(Cell(_RATIO.format(span.estimate), small=small))
        rows.append([f"{year} – {last}", *cells])
    groups = [Named(words(key)) for key in ("information_ratio", "sharpe_difference")]
    return Table(
        [words("span_of_years"), *map(words.name, books)], rows, "measures grouped", groups
    )


def capacity_table(sweep: Sequence[Tree], words: Words) -> Table:
    """A row a multiple of the cash: measures, orders, and their share of the bars' volume."""
    names = ("sharpe_annual", "information_ratio", "cost_share")
    shares = ("cut", "participation_mean", "participation_95")
    percent = Label("", "percent", None, 2)
    rows: list[list[Content]] = [
        [
            f"{line['factor']:g}×",
            f"{line['cash']:,.0f}",
            *(LABELS[name].format(number(line[name])) for name in names),
            f"{line['orders']:,}",
            *(percent.format(number(line[name])) for name in shares),
        ]
        for line in sweep
    ]
    head = [words("capacity_factor"), words("capacity_cash")]
    head += [*map(words.measure, names), words("orders"), *map(words, shares)]
    return Table(head, rows)


def in_order(differences: Tree, order: Sequence[str]) -> Tree:
    """Those of the differences that `order` names, in its order."""
    return {key: differences[key] for key in order if key in differences}


class Line(NamedTuple):
    """A number, what it is called, and what it says."""

    name: str
    value: str
    said: str


def search_lines(trust: Tree, words: Words) -> list[Line]:
    """What chance and search make of the result: a line a number."""
    known, deflation, test = trust["registry"], trust["deflation"], trust["split"] == "test"
    effective = DASH if deflation is None else _trials(deflation["n_effective"])
    lines = list(deflation_lines(trust, words))
    if test:
        runs = words.count("runs", known["runs"])
        said = words("looks_said", runs=runs, n=effective)
        lines.append(Line(words("looks"), f"{known['reads']:,}", said))
        value = trust["claim"]["deflated"]
        said = words("dsr_chosen_said", above=f"{DEFLATED_ABOVE:g}")
        said = words("dsr_chosen_none") if value is None else said
        lines.append(Line(words("dsr_chosen"), probability(value), said))
        if known["trials"]:
            lines.append(Line(words("overlap"), f"{known['trials']:,}", words("overlap_said")))
    else:
        said = words("trials_said", n=effective)
        lines.append(Line(words("trials"), f"{known['trials']:,}", said))
    n = known["runs" if test else "trials"]
    value, said = None, words("pbo_few", least=MIN_CONFIGURATIONS, n=n)
    if (pbo := trust["overfitting"]) is not None:
        low, high = probability(pbo["null_low"]), probability(pbo["null_high"])
        said = words("pbo_said", n=pbo["n_configurations"], low=low, high=high)
        value = pbo["probability"]
    lines.append(Line(words("pbo"), probability(value), said))
    value, said = None, words("spa_few", n=n)
    if (spa := trust["superiority"]) is not None:
        baseline = words.in_text(trust["verdict"]["baseline"])
        value, said = spa["p_value"], words("spa_said", n=spa["n_models"], baseline=baseline)
    lines.append(Line(words("spa"), probability(value), said))
    return lines


def deflation_lines(trust: Tree, words: Words, said: str = "") -> Iterator[Line]:
    """Probabilistic and deflated Sharpe ratio. said: key of other words for the latter"""
    deflation = trust["deflation"]
    if deflation is None or deflation["psr"] is None:
        few = trust["bars"] < LEAST_BARS
        why = words("few_bars", bars=trust["bars"], least=LEAST_BARS)
        for name in ("psr", "dsr"):
            yield Line(words(name), DASH, why if few else words("no_variance"))
        return
    yield Line(words("psr"), probability(deflation["psr"]), words("psr_said"))
    hurdle, n = _RATIO.format(deflation["hurdle"] * yearly(trust)), deflation["n_trials"]
    text = words(said or f"dsr_said_{trust['split']}", hurdle=hurdle, n=f"{n:,}")
    if n == 1:
        text = words("dsr_said_one")
    yield Line(words("dsr"), probability(deflation["probability"]), text)
    if f"{deflation['n_effective']:.1f}" != f"{n:.1f}":
        text = words("dsr_effective_said", n=_trials(deflation["n_effective"]))
        value = probability(deflation["probability_effective"])
        yield Line(words("dsr_effective"), value, text)
    if (active := trust.get("active_deflation")) is not None:
        hurdle, n = _RATIO.format(active["hurdle"] * yearly(trust)), active["n_trials"]
        said = "active_deflated_one" if n == 1 else "active_deflated_said"
        text = words(said, hurdle=hurdle, n=f"{n:,}", above=f"{DEFLATED_ABOVE:g}")
        yield Line(words("active_deflated"), probability(active["probability"]), text)


def seeds_table(measures: Tree, words: Words) -> Table:
    """Mean, interval and interquartile mean over the seeds. measures: `seeds` of trust.json"""
    rows = []
    for name in (m for m in SEED_MEASURES if m in measures):
        label, measure = LABELS[name], measures[name]
        cells: list[Content] = [Cell(DASH, why=words("no_number"))] * 3
        if measure is not None:
            between = range_text(measure["low"], measure["high"], words, label)
            cells = [label.format(measure["estimate"]), between, label.format(measure["iqm"])]
        rows.append([measure_name(name, words), *cells])
    head = [words("measure"), words("mean"), words("interval_95")]
    return Table([*head, Named(words("iqm"), words("iqm_said"))], rows)


def costs_table(
    sweep: Sequence[Tree], yardstick: str, words: Words, measures: Sequence[str]
) -> Table:
    """The cost sweep: agents and yardstick at each multiple of the costs."""
    rows = []
    for line in sweep:
        cells: list[Content] = []
        for name in measures:
            label, mean = LABELS[name], line[name]
            if mean is None:
                cells.append(Cell(DASH, why=words("no_number")))
            elif isinstance(mean, Mapping) and mean["low"] is not None:
                small = range_text(mean["low"], mean["high"], words, label)
                cells.append(Cell(label.format(mean["estimate"]), small=small))
            else:
                value = mean["estimate"] if isinstance(mean, Mapping) else mean
                cells.append(Cell(label.format(value)))
            cells.append(label.format(number(line[f"{yardstick}_{name}"])))
        rows.append([f"{line['factor']:g}×", *cells])
    head = [words("cost_factor"), words("agent"), words.name(yardstick)]
    groups = [measure_name(name, words) for name in measures]
    return Table(head, rows, "measures grouped", groups)


def _interval_cell(interval: Tree, annual: float, words: Words) -> Cell:
    if interval["low"] is None or interval["high"] is None:
        return Cell(DASH, why=words("no_error"))
    return Cell(range_text(interval["low"] * annual, interval["high"] * annual, words))


def probability(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def _trials(n: float) -> str:
    return f"{n:,.1f}".removesuffix(".0")


def number(value: float | None) -> float:
    """A number of a JSON file, which has null for NaN."""
    return math.nan if value is None else float(value)


class _Gap(TypedDict):
    estimate: Number | None
    low: Number | None
    high: Number | None


class _Difference(TypedDict):
    days: _Gap
    seeds: _Gap


class _Run(TypedDict):
    name: str
    algo: str
    best_steps: dict[Seed, int]
    seeds: dict[Seed, MeasureValues]
    difference: _Difference | None


class _Comparison(TypedDict):
    format: int
    first_run: str
    runs: list[_Run]
    baselines: dict[str, MeasureValues]


def other_runs(run: RunData, split: SplitData, words: Words) -> NotedTable | None:
    """Measures of the runs and baselines, and differences to the first run; None without."""
    path = run.path / RUNS_RESULT
    if not path.exists():
        return None
    again = f"compare the runs again (echelon compare RUN RUN --output-dir {run.path})"
    remedy = f"Delete it, or {again}."
    tree = read_json(path, dict[str, Any], remedy)
    if tree.get("kind") != "runs" or tree.get("split") != split.name:
        return None
    comparison = check_tree(tree, _Comparison, path, remedy)
    if comparison["format"] != RUNS_FORMAT:
        raise DamagedError(path, f"format {comparison['format']}, expected {RUNS_FORMAT}", remedy)
    lines = comparison["runs"]
    own = next((line for line in lines if line["name"] == run.name), None)
    if own is None:
        return None
    first = comparison["first_run"]
    stale = own["best_steps"] != split.facts["best_steps"]  # trained again since
    note = words("other_runs_stale") if stale else words("other_runs_note", first=first)
    head = [words("other_runs_run"), *(words.measure(name) for name in _COMPARED)]
    head += [words("other_runs_difference", first=first)]
    head += [words("other_runs_days"), words("other_runs_seeds")]
    rows = [_run_row(line, words) for line in lines]
    for key, values in comparison["baselines"].items():
        cells = [LABELS[name].format(number(values.get(name))) for name in _COMPARED]
        rows.append([words.name(key), *cells, "", "", ""])
    return NotedTable(Table(head, rows), note)


def _run_row(line: _Run, words: Words) -> list[Content]:
    seeds = list(line["seeds"].values())
    cells = []
    for name in _COMPARED:
        over = mean_std([number(values.get(name)) for values in seeds])
        cells.append(LABELS[name].format(over.mean, over.std if len(seeds) > 1 else math.nan))
    difference = line["difference"]
    if difference is None:
        cells += [DASH] * 3
    else:
        days, other = difference["days"], difference["seeds"]
        estimate = other["estimate"] if days["estimate"] is None else days["estimate"]
        cells.append(LABELS["sharpe_annual"].format(number(estimate)))
        for gap in (days, other):
            low, high = number(gap["low"]), number(gap["high"])
            cells.append(DASH if math.isnan(low) else range_text(low, high, words))
    about = words("other_runs_of", algo=line["algo"], seeds=words.count("n_seeds", len(seeds)))
    return [Named(line["name"] + about, strong=True), *cells]
