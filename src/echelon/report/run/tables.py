"""The tables of a report: readable without JavaScript, on paper and by screen readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from echelon.files import blaming, read_json
from echelon.ops.measures import LABELS
from echelon.report.blocks import Cell, Content, Facts, Headline, Headlines, Named, Table
from echelon.report.rules import idle_text, recorded_rules, rules_text
from echelon.report.run.gather import Record, RunData, SplitData
from echelon.report.run.headline import MEASURES, rivals
from echelon.report.series import MonthlyReturns, Rejections, mean_monthly, monthly_returns
from echelon.report.series import rejections as count_orders
from echelon.report.texts import Words
from echelon.training.learner_facts import LEARNER_FACTS, read_learner_facts
from echelon.training.run import seed_directory

_REMEDY = "Train the run again."
_STRONGEST = 0.10
"""A monthly return this large has the full colour."""
_COSTS = frozenset(name for name in LABELS if name.startswith("cost_"))
_CODE = (
    *("fact_data", "fact_prepared", "fact_config", "fact_code", "fact_command"),
    *("fact_evaluate", "fact_report", "fact_directory"),
)
"""Facts that are set in a fixed width."""


def headlines(split: SplitData, words: Words) -> Headlines:
    """The headline measures: the agent large, what it is held to below."""
    items = []
    for name in MEASURES:
        label, agent = LABELS[name], split.evaluation.over_seeds(name)
        others = {
            rival.short_label(words): label.format(split.evaluation.baselines[rival.key][name])
            for rival in rivals(split)
        }
        spread = label.format(agent.mean, agent.std).partition(" ± ")[2]
        texts = words.measure(name), words.meaning(name)
        items.append(Headline(*texts, label.format(agent.mean), spread, others))
    return Headlines(items)


def measures_table(split: SplitData, words: Words) -> Table:
    """A row a measure: the agent's mean ± std, then the baselines; the best value is marked."""
    head = [words("measure"), words("agent"), *(words.name(r.key) for r in split.baselines)]
    rows: list[list[Content]] = []
    for name, label in LABELS.items():
        agent = split.evaluation.over_seeds(name)
        values = {"agent": agent.mean} | {r.key: r.measures[name] for r in split.baselines}
        best = best_of(name, values)
        shown = {key: label.format(value) for key, value in values.items()}
        shown["agent"] = label.format(agent.mean, agent.std)
        kinds = {key: ["agent"] * (key == "agent") + ["best"] * (key in best) for key in shown}
        cells = [Cell(text, " ".join(kinds[key])) for key, text in shown.items()]
        rows.append([measure_name(name, words), *cells])
    return Table(head, rows, "measures against")


def seeds_table(split: SplitData, words: Words) -> Table:
    """A row a measure, a column a seed."""
    head = [words("measure"), *(words.name(r.key) for r in split.agents)]
    rows: list[list[Content]] = [
        [measure_name(name, words), *(label.format(r.measures[name]) for r in split.agents)]
        for name, label in LABELS.items()
    ]
    return Table(head, rows)


def best_of(measure: str, values: Mapping[str, float]) -> frozenset[str]:
    """Keys of the best values of a measure, by what is printed; none where no order is better.

    Cash risks nothing and the index pays nothing, by construction: where less is better cash is
    left out, and costs are not ranked.
    """
    label = LABELS[measure]
    if label.higher_is_better is None or measure in _COSTS:
        return frozenset()
    entered = {k: v for k, v in values.items() if not math.isnan(v)}
    if not label.higher_is_better:
        entered.pop("cash", None)
    if not entered:
        return frozenset()
    best = (max if label.higher_is_better else min)(entered.values())
    return frozenset(k for k, v in entered.items() if label.format(v) == label.format(best))


def monthly_tables(split: SplitData, words: Words) -> dict[str, Table]:
    """Key of an agent or baseline, or `mean` → heat map of its monthly returns."""
    return {key: _heat_map(returns, words) for key, returns in monthly_by_key(split).items()}


def monthly_by_key(split: SplitData) -> dict[str, MonthlyReturns]:
    """Key → monthly returns; `mean` is the mean over the seeds, first where there are several."""
    months = {r.key: monthly_returns(split.times, split.over_span(r.value)) for r in split.records}
    if len(split.agents) > 1:
        return {"mean": mean_monthly([months[r.key] for r in split.agents])} | months
    return months


def _heat_map(returns: MonthlyReturns, words: Words) -> Table:
    head = ["", *words("months").split(), words("year")]
    rows: list[list[Content]] = []
    for year, months, total in zip(returns.years, returns.months, returns.totals, strict=True):
        cells = [_heat(float(value)) for value in months]
        rows.append([str(year), *cells, _heat(float(total), total=True)])
    return Table(head, rows, "heat")


def _heat(value: float, *, total: bool = False) -> Cell:
    if math.isnan(value):
        return Cell("", "none")
    text = f"{value * 100:.1f}".replace("-", "−")
    text = "0.0" if text == "−0.0" else text
    if total:
        return Cell(f"{text} %", "total")
    strength = min(abs(value) / _STRONGEST, 1.0)
    side = "gain" if value >= 0 else "loss"
    strong = " strong" if strength > 0.75 else ""
    return Cell(text, side + strong, strength=f"{strength * 100:.0f}")


def orders_table(split: SplitData, words: Words) -> Table | None:
    """Orders in all, filled whole, and cut by reason; None where none was cut."""
    agents = [count_orders(r.tables.blotter) for r in split.agents]
    others = {
        r.key: count_orders(r.tables.blotter)
        for r in split.baselines
        if r.key not in ("benchmark", "cash")
    }
    every = [*agents, *others.values()]
    reasons = _reasons(every)
    if not reasons:
        return None

    def row(name: str, counts: Sequence[int]) -> list[Content]:
        mean = float(np.mean(counts[: len(agents)]))
        return [name, Cell(f"{mean:,.0f}", "agent"), *(f"{n:,}" for n in counts[len(agents) :])]

    rows = [
        row(words("orders"), [counted.orders for counted in every]),
        row(words("orders_whole"), [counted.whole for counted in every]),
    ]
    for reason in reasons:
        counts = [counted.by_reason.get(reason, 0) for counted in every]
        rows.append(row(words.reason(reason), counts))
    head = [words("reason"), words("agent"), *(words.name(key) for key in others)]
    return Table(head, rows, "measures against")


def _reasons(rejections: Sequence[Rejections]) -> list[str]:
    """Most frequent first."""
    total: dict[str, int] = {}
    for counted in rejections:
        for reason, n in counted.by_reason.items():
            total[reason] = total.get(reason, 0) + n
    return sorted(total, key=lambda reason: (-total[reason], reason))


def facts_list(run: RunData, words: Words, command: str) -> Facts:
    """Where the results come from: hashes, versions, conventions, commands."""
    facts = run.main.facts["run"]
    data = facts.get("data", {})
    split = run.config.split
    spans = [
        f"{words(f'split_{name}')}: {first} {words('to')} {last}"
        for name, (first, last) in (
            ("train", split.train),
            ("valid", split.valid),
            ("test", split.test),
        )
    ]
    ledger = run.main.facts["ledger"]
    names = [words(f"split_{s.name}") for s in run.splits]
    # One line a split only where they differ.
    reads = [f"{name}: {s.facts['reads']}" for name, s in zip(names, run.splits, strict=True)]
    when = [f"{name}: {s.facts['evaluated']}" for name, s in zip(names, run.splits, strict=True)]
    evaluate = [f"echelon evaluate {run.path} --split {s.name}" for s in run.splits]
    unknown = words("unknown")
    versions = ", ".join(f"{k} {v}" for k, v in sorted(facts.get("libraries", {}).items()))
    rows = [
        ("fact_data", [f"{data.get('name', unknown)} · {short(data, 'content_hash', unknown)}"]),
        ("fact_prepared", [short(facts, "prepared", unknown)]),
        ("fact_config", [short(facts, "config_hash", unknown)]),
        ("fact_code", [f"Echelon {facts.get('echelon', unknown)} · {facts.get('code', unknown)}"]),
        ("fact_seeds", [", ".join(str(r.seed) for r in run.main.agents)]),
        ("fact_assets", [str(len(run.main.agents[0].tables.weights.columns) - 1)]),
        ("fact_splits", spans),
        ("fact_fill", [words.ledger(ledger["fill"])]),
        ("fact_prices", [words.ledger(ledger["prices"])]),
        *rules_rows(recorded_rules(run.main.facts, run.config), words),
        ("fact_actions", [words("greedy" if run.main.facts["deterministic"] else "sampled")]),
        ("fact_year", [f"{run.main.facts['periods_per_year']:,.6g}"]),
        ("fact_reads", reads),
        ("fact_evaluated", when),
        ("fact_command", [str(facts.get("command", unknown))]),
        ("fact_evaluate", evaluate),
        ("fact_report", [command]),
        ("fact_versions", [versions or unknown]),
    ]
    scores = encoder_lines(run.path, words)
    if scores:
        rows.insert(-1, ("fact_encoder", scores))
    # Of any seed: all are made alike.
    trained = next((r.seed for r in run.main.agents if r.seed is not None), None)
    if trained is not None:
        rows[-1:-1] = learner_lines(seed_directory(run.path, trained), words)
    return named_facts(rows, words)


class _Encoder(TypedDict):
    """encoder.json, as far as it is shown."""

    facts: dict[str, Any]


def encoder_lines(run: Path, words: Words) -> list[str]:
    """What the pre-trained encoder foresees out of sample, a line a target; none without one."""
    file = run / "encoder" / "encoder.json"
    if not file.is_file():
        return []
    facts = read_json(file, _Encoder, _REMEDY)["facts"]
    with blaming(file, _REMEDY):
        if not facts["enabled"]:
            return [words("encoder_drawn")]
        return [
            _score_line(target, score, words)
            for target, score in sorted(facts["scores"].items(), key=_by_horizon)
            if score["cells"]
        ]


def learner_lines(directory: Path, words: Words) -> list[tuple[str, list[str]]]:
    """Facts of a seed's learner: how much of the encoder it trains, how large its replay is."""
    adapter, replay = read_learner_facts(directory)
    rows = []
    if adapter is not None:
        with blaming(directory / LEARNER_FACTS, _REMEDY):
            share = f"{100 * adapter.share:.1f}"
        numbers = {"trained": f"{adapter.trained:,}", "whole": f"{adapter.whole:,}", "share": share}
        rows.append(("fact_adapter", [words("adapter_share", **numbers)]))
    if replay is not None:
        size, capacity = (f"{number:,}" for number in replay)
        line = words("replay_size", size=size, capacity=capacity, whole=replay.whole)
        rows.append(("fact_replay", [line]))
    return rows


def _by_horizon(item: tuple[str, Any]) -> tuple[str, int]:
    """Targets by kind, then by horizon as a number."""
    kind, _, bars = item[0].rpartition("_")
    return kind, int(bars)


def _score_line(target: str, score: Mapping[str, Any], words: Words) -> str:
    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.2f} %"

    r2, gain = score["r2"], score["over_linear"]
    # Errors are in units of the target's variance; shown is a share of the ridge's.
    ridge = score["mse"]["linear"]
    gain = {
        key: None if gain[key] is None else gain[key] / ridge for key in ("estimate", "low", "high")
    }
    return words(
        "encoder_score",
        target=target,
        own=percent(r2["encoder"]),
        linear=percent(r2["linear"]),
        last=percent(r2["last"]),
        gain=percent(gain["estimate"]),
        low=percent(gain["low"]),
        high=percent(gain["high"]),
    )


def named_facts(rows: Sequence[tuple[str, Sequence[str]]], words: Words) -> Facts:
    """Facts as a list: key of the name, and lines of plain text."""
    return Facts({words(key): lines for key, lines in rows}, frozenset(words(key) for key in _CODE))


def short(tree: Mapping[str, Any], key: str, unknown: str) -> str:
    """As much of a hash as tells it from any other; run.json has it whole."""
    return str(tree[key])[:20] if key in tree else unknown


def rules_rows(rules: Mapping[str, Any], words: Words) -> list[tuple[str, list[str]]]:
    """The rules in force and, where there are such, those that cannot act."""
    idle = idle_text(rules, words)
    rows = [("fact_rules", [rules_text(rules, words)])]
    return [*rows, ("fact_idle", [idle])] if idle else rows


def measure_name(name: str, words: Words) -> Named:
    """A measure, with what it means as a tooltip."""
    return Named(words.measure(name), words.meaning(name))


def is_targets(record: Record) -> bool:
    """Whether a book's actions are target weights."""
    actions = record.tables.actions.drop("time")
    return any(dtype.is_float() for dtype in actions.dtypes)
