"""Can this be believed? The verdict of trust.json in words, and the numbers it rests on.

trust.json has Sharpe ratios per period; here they are shown a year. What it has no number for is
printed as a dash, and the line says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.evaluation.statistics.claims import DEFLATED_ABOVE
from echelon.evaluation.statistics.overfitting import MIN_CONFIGURATIONS
from echelon.evaluation.trust import LEAST_BARS, SEED_MEASURES
from echelon.ops.measures import LABELS, Label
from echelon.report.blocks import (
    Block,
    Card,
    Cell,
    ChartBox,
    Content,
    Named,
    Part,
    Table,
    Text,
    Two,
)
from echelon.report.charts.books import differences_chart
from echelon.report.run.gather import SplitData
from echelon.report.run.tables import measure_name
from echelon.report.texts import Words

Tree = Mapping[str, Any]

DASH = "–"
_RATIO = LABELS["sharpe_annual"]


class Span(NamedTuple):
    """A difference of Sharpe ratios a year, with the wider of the intervals at two block lengths.

    The bounds are NaN where there is no error to measure it by.
    """

    estimate: float
    low: float
    high: float


def yearly(tree: Tree) -> float:
    """What makes a Sharpe ratio per period one a year."""
    return math.sqrt(tree["periods_per_year"])


def span_of(both: Tree, annual: float) -> Span:
    """What must hold at either block length."""
    estimate = _number(both["single"]["estimate"])
    lows, highs = ([_number(both[k][end]) for k in ("single", "double")] for end in ("low", "high"))
    if any(math.isnan(bound) for bound in (*lows, *highs)):
        return Span(estimate * annual, math.nan, math.nan)
    return Span(estimate * annual, min(lows) * annual, max(highs) * annual)


def verdict_sentence(trust: Tree, words: Words, tried: int | None) -> str:
    """What may be said of the agents vs the yardstick, and by how much they differ.

    tried: configurations among which the validation window chose; None: not known
    """
    key, baseline = trust["verdict"]["key"], words.in_text(trust["verdict"]["baseline"])
    both = trust["differences"].get(trust["verdict"]["baseline"])
    if both is None:
        if trust["bars"] < LEAST_BARS:
            return words("verdict_few", bars=trust["bars"], least=LEAST_BARS)
        return words("verdict_alone", baseline=baseline)
    counted = words("tried_some") if tried is None else words.count("tried", tried)
    if trust["split"] != "test":
        said, template = words(f"verdict_{trust['split']}"), "difference_to"
    else:
        if key == "undeflated" and trust["claim"]["deflated"] is None:
            key = "uncounted"
        said = words(f"verdict_{key}", baseline=baseline, tried=counted)
        template = "difference_is"
    return with_difference(said, span_of(both, yearly(trust)), words, template, baseline)


def with_difference(said: str, span: Span, words: Words, template: str, baseline: str = "") -> str:
    """A verdict and the numbers it rests on. template: words for both"""
    estimate = _RATIO.format(span.estimate)
    if math.isnan(span.low):
        return words("difference_bare", verdict=said, estimate=estimate)
    low, high = _RATIO.format(span.low), _RATIO.format(span.high)
    return words(template, verdict=said, baseline=baseline, estimate=estimate, low=low, high=high)


def verdict_text(key: str, sentence: str) -> Text:
    """The verdict, large. key: of trust.json, for its colour"""
    return Text(sentence, f"verdict { {'better': 'good', 'worse': 'bad'}.get(key, 'open') }")


def range_text(low: float, high: float, words: Words, label: Label = _RATIO) -> str:
    """From low to high, the unit once."""
    first = label.format(low).removesuffix(label.suffix)
    return words("range", low=first, high=label.format(high))


def trust_card(run: Path, split: SplitData, words: Words) -> Card:
    """All that is known of how far a split's numbers can be believed.

    run: for the command that makes what is missing
    """
    trust = split.trust
    if trust is None:
        command = f"echelon evaluate {run} --split {split.name}"
        notice = Text(words("trust_missing", command=command), "notice")
        return Card(words("trust"), "", [notice])
    key = trust["verdict"]["key"] if split.name == "test" else "open"
    note = words("sweep_note" if trust["seeds"]["n"] > 1 else "sweep_note_one")
    parts: list[Block] = [
        verdict_text(key, verdict_sentence(trust, words, split.tried)),
        differences_part(trust, [r.key for r in split.baselines], split.name, words),
    ]
    if split.name != "train":  # nothing was chosen there
        parts.append(search_part(search_lines(trust, words), words))
    sweep = costs_part(trust["costs"], trust["verdict"]["baseline"], note, words)
    return Card(words("trust"), "", [*parts, Two(seeds_part(trust["seeds"], words), sweep)])


def differences_part(trust: Tree, order: Sequence[str], name: str, words: Words) -> Part:
    """Chart and table of the differences. order: of the baselines; name: of the split"""
    known = trust["differences"]
    shown = {key: known[key] for key in order if key in known}
    title = words("differences")
    if not shown:
        few = trust["bars"] < LEAST_BARS
        why = words("differences_none", bars=trust["bars"], least=LEAST_BARS)
        return Part(title, [Text(why if few else words("differences_alone"))])
    annual = yearly(trust)
    chart = ChartBox(f"{name}/differences", differences_chart(shown, annual, words))
    replications = next(iter(shown.values()))["single"]["replications"]
    numbers = differences_table({words.name(k): v for k, v in shown.items()}, annual, words)
    note = Text(words("differences_note", replications=replications))
    return Part(title, [note, Two(chart, Part("", [numbers]))])


def differences_table(differences: Mapping[str, Tree], annual: float, words: Words) -> Table:
    """A row a difference at both block lengths. differences: by what the agents are held to"""
    head = [words(k) for k in ("baseline", "difference", "interval_95", "interval_double", "block")]
    rows: list[list[Content]] = [
        [
            name,
            _RATIO.format(_number(both["single"]["estimate"]) * annual),
            *(_interval_cell(both[kind], annual, words) for kind in ("single", "double")),
            f"{both['single']['block_length']:.1f}",
        ]
        for name, both in differences.items()
    ]
    return Table(head, rows)


class Line(NamedTuple):
    """A number, what it is called, and what it says."""

    name: str
    value: str
    said: str


def search_part(lines: Sequence[Line], words: Words) -> Part:
    """Lines as a table of three columns."""
    return Part(words("search"), [Table((), lines, "explained")])


def search_lines(trust: Tree, words: Words) -> list[Line]:
    """What chance and search make of the result: a line a number."""
    test = trust["split"] == "test"
    count = trust["registry"]["runs" if test else "trials"]
    lines = [*deflation_lines(trust, words), _counted_line(trust, words)]
    if test:
        lines.append(_chosen_line(trust, words))
        if trust["registry"]["trials"]:
            n = trust["registry"]["trials"]
            lines.append(Line(words("overlap"), f"{n:,}", words("overlap_said")))
    return [*lines, _overfitting_line(trust, count, words), _superiority_line(trust, count, words)]


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


def _counted_line(trust: Tree, words: Words) -> Line:
    """How many trials or looks there were."""
    known, deflation = trust["registry"], trust["deflation"]
    test = trust["split"] == "test"
    count = known["reads" if test else "trials"]
    effective = DASH if deflation is None else _trials(deflation["n_effective"])
    if test:
        runs = words.count("runs", known["runs"])
        return Line(words("looks"), f"{count:,}", words("looks_said", runs=runs, n=effective))
    return Line(words("trials"), f"{count:,}", words("trials_said", n=effective))


def _chosen_line(trust: Tree, words: Words) -> Line:
    value = trust["claim"]["deflated"]
    if value is None:
        return Line(words("dsr_chosen"), DASH, words("dsr_chosen_none"))
    said = words("dsr_chosen_said", above=f"{DEFLATED_ABOVE:g}")
    return Line(words("dsr_chosen"), probability(value), said)


def _overfitting_line(trust: Tree, count: int, words: Words) -> Line:
    test = trust["overfitting"]
    if test is None:
        said = words("pbo_few", least=MIN_CONFIGURATIONS, n=count)
        return Line(words("pbo"), DASH, said)
    low, high = probability(test["null_low"]), probability(test["null_high"])
    said = words("pbo_said", n=test["n_configurations"], low=low, high=high)
    return Line(words("pbo"), probability(test["probability"]), said)


def _superiority_line(trust: Tree, count: int, words: Words) -> Line:
    test = trust["superiority"]
    if test is None:
        return Line(words("spa"), DASH, words("spa_few", n=count))
    baseline = words.in_text(trust["verdict"]["baseline"])
    said = words("spa_said", n=test["n_models"], baseline=baseline)
    return Line(words("spa"), probability(test["p_value"]), said)


def seeds_part(seeds: Tree, words: Words) -> Part:
    """Mean, interval and interquartile mean over the seeds. seeds: as in trust.json"""
    n = seeds["n"]
    if n == 1:
        return Part(words("trust_seed"), [Text(words("seeds_none"))])
    known = [measure for measure in seeds["measures"].values() if measure is not None]
    note = words(f"seeds_{known[0]['method']}", n=n) if known else ""
    head = [*(words(k) for k in ("measure", "mean", "interval_95"))]
    rows = []
    for name in (m for m in SEED_MEASURES if m in seeds["measures"]):
        label, measure = LABELS[name], seeds["measures"][name]
        cells: list[Content] = [Cell(DASH, why=words("no_number"))] * 3
        if measure is not None:
            between = range_text(measure["low"], measure["high"], words, label)
            cells = [label.format(measure["estimate"]), between, label.format(measure["iqm"])]
        rows.append([measure_name(name, words), *cells])
    iqm = Named(words("iqm"), words("iqm_said"))
    return Part(words("trust_seeds", n=n), [Text(note), Table([*head, iqm], rows)])


def costs_part(
    sweep: Sequence[Tree],
    yardstick: str,
    note: str,
    words: Words,
    measures: Sequence[str] = ("sharpe_annual", "total_return"),
) -> Part:
    """The cost sweep: agents and yardstick at each multiple of the costs."""
    head = [words("cost_factor"), words("agent"), words.name(yardstick)]
    rows = []
    for line in sweep:
        cells: list[Content] = []
        for name in measures:
            cells.append(_mean_cell(line[name], name, words))
            cells.append(LABELS[name].format(_number(line[f"{yardstick}_{name}"])))
        rows.append([f"{line['factor']:g}×", *cells])
    groups = [measure_name(name, words) for name in measures]
    return Part(words("sweep"), [Text(note), Table(head, rows, "measures grouped", groups)])


def _mean_cell(mean: Tree | None, name: str, words: Words) -> Cell:
    """A mean over seeds, its interval below it in small."""
    if mean is None:
        return Cell(DASH, why=words("no_number"))
    label, small = LABELS[name], ""
    if mean["low"] is not None:
        small = range_text(mean["low"], mean["high"], words, label)
    return Cell(label.format(mean["estimate"]), small=small)


def _interval_cell(interval: Tree, annual: float, words: Words) -> Cell:
    if interval["low"] is None or interval["high"] is None:
        return Cell(DASH, why=words("no_error"))
    return Cell(range_text(interval["low"] * annual, interval["high"] * annual, words))


def probability(value: float | None) -> str:
    """To three decimals; a dash for none."""
    return DASH if value is None else f"{value:.3f}"


def _trials(n: float) -> str:
    return f"{n:,.1f}".removesuffix(".0")


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
