"""A hierarchy vs what is made of the same experts: is its router worth having?

There only where the evaluation has such reference policies; older ones have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.evaluation.reference_policies import EXPERTS_MEAN, with_best
from echelon.ops.measures import LABELS, mean_std
from echelon.population.reference_policies import HEDGE
from echelon.report.blocks import Card, Cell, Content, Folded, Part, Table, Text
from echelon.report.run.gather import SplitData
from echelon.report.run.tables import measure_name
from echelon.report.run.trust import DASH, differences_table, yearly
from echelon.report.texts import Words

SHOWN = (
    *("total_return", "annual_return", "sharpe_annual", "calmar", "max_drawdown"),
    *("turnover_annual", "cost_share"),
)


def reference_card(split: SplitData, words: Words) -> Card | None:
    """The agents, Fixed-Share, the best expert in hindsight and the mean expert; None without."""
    if not split.evaluation.companions:
        return None
    several = len(split.agents) > 1
    note = words("reference_note") + (" " + words("reference_note_seeds") if several else "")
    by_seed = Folded(words("reference_by_seed"), [sharpe_table(split, words)])
    differences = reference_differences(split.trust, words)
    return Card(words("reference"), note, [rows_table(split, words), differences, by_seed])


def rows_table(split: SplitData, words: Words) -> Table:
    """A row a measure: the agent and the rows over its experts, mean ± std over seeds."""
    columns = with_best(split.evaluation.companions)
    head = [words("measure"), words("agent"), *(words(f"row_{key}") for key in columns)]
    rows: list[list[Content]] = []
    for name in SHOWN:
        every = [list(split.evaluation.seeds.values()), *columns.values()]
        means = (mean_std([values[name] for values in seeds]) for seeds in every)
        agent, *others = (LABELS[name].format(*mean) for mean in means)
        rows.append([measure_name(name, words), Cell(agent, "agent"), *others])
    return Table(head, rows, "measures against")


def sharpe_table(split: SplitData, words: Words) -> Table:
    """Annual Sharpe ratios: a row a book, a column a seed."""
    references, seeds = split.evaluation.companions, split.evaluation.seeds
    measure = "sharpe_annual"
    ratio = LABELS[measure].format
    head = [words.measure(measure), *(words.name(f"seed-{seed}") for seed in seeds)]
    rows = [[words("agent"), *(ratio(values[measure]) for values in seeds.values())]]
    for name in dict.fromkeys(name for own in references.values() for name in own):
        books = [references.get(seed, {}).get(name) for seed in seeds]
        cells = [DASH if values is None else ratio(values[measure]) for values in books]
        rows.append([reference_title(name, words), *cells])
    return Table(head, rows)


def reference_differences(trust: Mapping[str, Any] | None, words: Words) -> Part | None:
    """Sharpe ratio of the agents minus those of Fixed-Share and the experts; None without."""
    known = {} if trust is None else trust.get("companions", {})
    if trust is None or not known:
        return None
    named = {words(f"row_{name}"): known[name] for name in (HEDGE, EXPERTS_MEAN) if name in known}
    note = Text(words("reference_differences_note"))
    table = differences_table(named, yearly(trust), words)
    return Part(words("reference_differences"), [note, table])


def reference_title(name: str, words: Words) -> str:
    """What a reference policy is called: Fixed-Share, or an expert by its number."""
    kind, _, number = name.partition("-")
    return words("expert_n", n=number) if number else words(f"row_{kind}")
