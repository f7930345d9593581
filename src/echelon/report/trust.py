"""Can this be believed? The verdict of trust.json in words, and the numbers it rests on.

trust.json has Sharpe ratios per period; here they are shown a year. What it has no number for is
printed as a dash, and the line says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from echelon.evaluation.statistics.claims import DEFLATED_ABOVE
from echelon.evaluation.statistics.overfitting import MIN_CONFIGURATIONS
from echelon.evaluation.trust import LEAST_BARS, SEED_MEASURES
from echelon.ops.measures import LABELS
from echelon.report.charts.books import differences_chart
from echelon.report.document import card, chart, part, two
from echelon.report.gather import SplitData
from echelon.report.tables import grouped_table, measure_name, table
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
    """What may be said of the agents beside the yardstick, and by how much they differ.

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


def verdict_html(key: str, sentence: str) -> str:
    """The verdict, large. key: of trust.json, for its colour"""
    kind = {"better": "good", "worse": "bad"}.get(key, "open")
    return f'<p class="verdict {kind}">{escape(sentence)}</p>'


def trust_card(run: Path, split: SplitData, words: Words, data: dict[str, Any]) -> str:
    """All that is known of how far a split's numbers can be believed; its chart goes into `data`.

    run: for the command that makes what is missing
    """
    trust = split.trust
    if trust is None:
        command = f"echelon evaluate {run} --split {split.name}"
        notice = f'<p class="notice">{escape(words("trust_missing", command=command))}</p>'
        return card(words("trust"), "", notice)
    key = trust["verdict"]["key"] if split.name == "test" else "open"
    order = [r.key for r in split.baselines]
    parts = [
        verdict_html(key, verdict_sentence(trust, words, split.tried)),
        differences_part(trust, order, split.name, words, data),
    ]
    if split.name != "train":  # nothing was chosen there
        parts.append(search_part(search_lines(trust, words), words))
    note = words("sweep_note" if trust["seeds"]["n"] > 1 else "sweep_note_one")
    sweep = costs_part(trust["costs"], trust["verdict"]["baseline"], note, words)
    parts.append(two(seeds_part(trust["seeds"], words), sweep))
    return card(words("trust"), "", "".join(parts))


def differences_part(
    trust: Tree, order: Sequence[str], name: str, words: Words, data: dict[str, Any]
) -> str:
    """Chart and table of the differences. order: of the baselines; name: of the split"""
    known = trust["differences"]
    found = {key: known[key] for key in order if key in known}
    title = words("differences")
    if not found:
        few = trust["bars"] < LEAST_BARS
        why = words("differences_none", bars=trust["bars"], least=LEAST_BARS)
        return part(title, _note(why if few else words("differences_alone")))
    annual = yearly(trust)
    data["charts"][f"{name}/differences"] = differences_chart(found, annual, words)
    replications = next(iter(found.values()))["single"]["replications"]
    note = _note(words("differences_note", replications=replications))
    numbers = differences_table({words.name(k): v for k, v in found.items()}, annual, words)
    return f"<h3>{escape(title)}</h3>{note}" + two(
        chart(f"{name}/differences"), f"<div>{numbers}</div>"
    )


def differences_table(found: Mapping[str, Tree], annual: float, words: Words) -> str:
    """A row a difference at both block lengths. found: by what the agents are compared with"""
    head = [words(k) for k in ("baseline", "difference", "interval_95", "interval_double", "block")]
    rows = []
    for name, both in found.items():
        single, double = both["single"], both["double"]
        rows.append(
            [
                escape(name),
                _cell(_RATIO.format(_number(single["estimate"]) * annual)),
                _interval_cell(single, annual, words),
                _interval_cell(double, annual, words),
                _cell(f"{single['block_length']:.1f}"),
            ]
        )
    return table([escape(h) for h in head], rows, "measures")


class Line(NamedTuple):
    """A number, what it is called, and what it says."""

    name: str
    value: str
    said: str


def search_part(lines: Sequence[Line], words: Words) -> str:
    """Lines as a table of three columns."""
    body = "".join(
        f'<tr><th scope="row">{escape(line.name)}</th><td>{escape(line.value)}</td>'
        f"<td>{escape(line.said)}</td></tr>"
        for line in lines
    )
    return part(words("search"), f'<table class="explained"><tbody>{body}</tbody></table>')


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
    found = trust["deflation"]
    if found is None or found["psr"] is None:
        few = trust["bars"] < LEAST_BARS
        why = words("few_bars", bars=trust["bars"], least=LEAST_BARS)
        for name in ("psr", "dsr"):
            yield Line(words(name), DASH, why if few else words("no_variance"))
        return
    yield Line(words("psr"), probability(found["psr"]), words("psr_said"))
    hurdle, n = _RATIO.format(found["hurdle"] * yearly(trust)), found["n_trials"]
    text = words(said or f"dsr_said_{trust['split']}", hurdle=hurdle, n=f"{n:,}")
    if n == 1:
        text = words("dsr_said_one")
    yield Line(words("dsr"), probability(found["probability"]), text)
    if f"{found['n_effective']:.1f}" != f"{n:.1f}":
        text = words("dsr_effective_said", n=_trials(found["n_effective"]))
        value = probability(found["probability_effective"])
        yield Line(words("dsr_effective"), value, text)


def _counted_line(trust: Tree, words: Words) -> Line:
    """How many trials or looks there were."""
    known, found = trust["registry"], trust["deflation"]
    test = trust["split"] == "test"
    count = known["reads" if test else "trials"]
    effective = DASH if found is None else _trials(found["n_effective"])
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
    found = trust["overfitting"]
    if found is None:
        said = words("pbo_few", least=MIN_CONFIGURATIONS, n=count)
        return Line(words("pbo"), DASH, said)
    low, high = probability(found["null_low"]), probability(found["null_high"])
    said = words("pbo_said", n=found["n_configurations"], low=low, high=high)
    return Line(words("pbo"), probability(found["probability"]), said)


def _superiority_line(trust: Tree, count: int, words: Words) -> Line:
    found = trust["superiority"]
    if found is None:
        return Line(words("spa"), DASH, words("spa_few", n=count))
    baseline = words.in_text(trust["verdict"]["baseline"])
    said = words("spa_said", n=found["n_models"], baseline=baseline)
    return Line(words("spa"), probability(found["p_value"]), said)


def seeds_part(seeds: Tree, words: Words) -> str:
    """Mean, interval and interquartile mean over the seeds. seeds: as in trust.json"""
    n = seeds["n"]
    if n == 1:
        return part(words("trust_seed"), _note(words("seeds_none")))
    known = [one for one in seeds["measures"].values() if one is not None]
    note = words(f"seeds_{known[0]['method']}", n=n) if known else ""
    head = [escape(words(k)) for k in ("measure", "mean", "interval_95")]
    head.append(f'<span title="{escape(words("iqm_said"))}">{escape(words("iqm"))}</span>')
    rows = []
    for name in (m for m in SEED_MEASURES if m in seeds["measures"]):
        label, found = LABELS[name], seeds["measures"][name]
        cells = [_cell(DASH, words("no_number"))] * 3
        if found is not None:
            low, high = label.format(found["low"]), label.format(found["high"])
            between = words("range", low=low.removesuffix(" %"), high=high)
            iqm = label.format(found["iqm"])
            cells = [_cell(t) for t in (label.format(found["estimate"]), between, iqm)]
        rows.append([measure_name(name, words), *cells])
    title = words("trust_seeds", n=n)
    return part(title, _note(note) + table(head, rows, "measures"))


def costs_part(
    sweep: Sequence[Tree],
    yardstick: str,
    note: str,
    words: Words,
    measures: Sequence[str] = ("sharpe_annual", "total_return"),
) -> str:
    """The cost sweep: agents and yardstick at each multiple of the costs."""
    books = [words("agent"), words.name(yardstick)]
    rows = []
    for line in sweep:
        cells = []
        for name in measures:
            cells.append(_mean_cell(line[name], name, words))
            other = _number(line[f"{yardstick}_{name}"])
            cells.append(_cell(LABELS[name].format(other)))
        rows.append([f"{line['factor']:g}×", *cells])
    groups = [measure_name(name, words) for name in measures]
    grouped = grouped_table(words("cost_factor"), groups, books, rows)
    return part(words("sweep"), _note(note) + grouped)


def _mean_cell(found: Tree | None, name: str, words: Words) -> str:
    """A mean over seeds, its interval below it in small."""
    if found is None:
        return _cell(DASH, words("no_number"))
    label = LABELS[name]
    text = escape(label.format(found["estimate"]))
    if found["low"] is not None:
        low, high = label.format(found["low"]), label.format(found["high"])
        text += f"<small>{escape(words('range', low=low.removesuffix(' %'), high=high))}</small>"
    return f"<td>{text}</td>"


def _interval_cell(found: Tree, annual: float, words: Words) -> str:
    if found["low"] is None or found["high"] is None:
        return _cell(DASH, words("no_error"))
    low, high = (_RATIO.format(found[end] * annual) for end in ("low", "high"))
    return _cell(words("range", low=low, high=high))


def _cell(text: str, why: str = "") -> str:
    return f'<td title="{escape(why)}">{escape(text)}</td>' if why else f"<td>{escape(text)}</td>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def probability(value: float | None) -> str:
    """To three decimals; a dash for none."""
    return DASH if value is None else f"{value:.3f}"


def _trials(n: float) -> str:
    return f"{n:,.1f}".removesuffix(".0")


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
