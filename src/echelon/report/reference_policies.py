"""A hierarchy beside what is made of the same experts: is its router worth having?

There only where the evaluation has companions; those of before have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from echelon.evaluation.reference_policies import EXPERTS_MEAN, with_best
from echelon.ops.measures import LABELS, mean_std
from echelon.population.reference_policies import HEDGE
from echelon.report.document import card, folded, part
from echelon.report.gather import SplitData
from echelon.report.tables import measure_name, table
from echelon.report.texts import Words
from echelon.report.trust import differences_table, yearly

SHOWN = (
    *("total_return", "annual_return", "sharpe_annual", "calmar", "max_drawdown"),
    *("turnover_annual", "cost_share"),
)


def companions_card(split: SplitData, words: Words) -> str:
    """The agents, the hedge, the best expert in hindsight and the mean expert; nothing without."""
    if not split.evaluation.companions:
        return ""
    several = len(split.agents) > 1
    note = words("companions_note") + (" " + words("companions_note_seeds") if several else "")
    by_seed = folded(words("companions_by_seed"), seeds_table(split, words))
    body = rows_table(split, words) + companion_differences(split.trust, words) + by_seed
    return card(words("companions"), note, body)


def rows_table(split: SplitData, words: Words) -> str:
    """A row a measure: the agent and the rows over its experts, mean ± std over seeds."""
    rows = {"agent": list(split.evaluation.seeds.values())}
    rows |= with_best(split.evaluation.companions)
    head = [words("measure"), words("agent"), *(words(f"row_{k}") for k in rows if k != "agent")]
    lines = []
    for name in SHOWN:
        cells = []
        for key, seeds in rows.items():
            found = mean_std([values[name] for values in seeds])
            kind = ' class="agent"' if key == "agent" else ""
            cells.append(f"<td{kind}>{escape(LABELS[name].format(found.mean, found.std))}</td>")
        lines.append([measure_name(name, words), *cells])
    return table([escape(h) for h in head], lines, "measures against")


def seeds_table(split: SplitData, words: Words) -> str:
    """Annual Sharpe ratios: a row a book, a column a seed."""
    companions, seeds = split.evaluation.companions, split.evaluation.seeds
    ratio = LABELS["sharpe_annual"]
    names = dict.fromkeys(name for own in companions.values() for name in own)
    head = [words.measure("sharpe_annual"), *(words.name(f"seed-{seed}") for seed in seeds)]
    mine = [f"<td>{escape(ratio.format(v['sharpe_annual']))}</td>" for v in seeds.values()]
    rows = [[escape(words("agent")), *mine]]
    for name in names:
        cells = []
        for seed in seeds:
            values = companions.get(seed, {}).get(name)
            text = "–" if values is None else ratio.format(values["sharpe_annual"])
            cells.append(f"<td>{escape(text)}</td>")
        rows.append([escape(companion_title(name, words)), *cells])
    return table([escape(h) for h in head], rows, "measures")


def companion_differences(trust: Mapping[str, Any] | None, words: Words) -> str:
    """Sharpe ratio of the agents less those of the hedge and the experts; nothing without."""
    found = {} if trust is None else trust.get("companions", {})
    if trust is None or not found:
        return ""
    named = {words(f"row_{name}"): found[name] for name in (HEDGE, EXPERTS_MEAN) if name in found}
    return part(
        words("companions_differences"),
        f'<p class="note">{escape(words("companions_differences_note"))}</p>'
        + differences_table(named, yearly(trust), words),
    )


def companion_title(name: str, words: Words) -> str:
    """What a companion is called: the hedge, or an expert by its number."""
    kind, _, number = name.partition("-")
    return words("expert_n", n=number) if number else words(f"row_{kind}")
