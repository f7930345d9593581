"""The lead of a report: what came out, in plain words that claim no more than the numbers do.

The agent is held to two others: the benchmark index and the baseline with the best annualised
Sharpe ratio on the same span (chosen afterwards, which favours the baseline).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from echelon.ops.measures import LABELS, MeanStd
from echelon.report.run.gather import SplitData
from echelon.report.texts import Words

MEASURES = ("sharpe_annual", "total_return", "max_drawdown", "volatility_period", "sharpe_period")
"""Those of the design notes, and the annualised Sharpe ratio."""
_RANKED_BY = "sharpe_annual"

Verdict = Literal["above", "below", "level"]


class Rival(NamedTuple):
    """A baseline the agent is held to; best: it has the best Sharpe ratio of all."""

    key: str
    best: bool

    def label(self, words: Words, *, in_text: bool = False) -> str:
        """Its name, saying whether it is the best."""
        name = words.in_text(self.key) if in_text else words.name(self.key)
        return words("best_baseline", name=name) if self.best else name

    def short_label(self, words: Words) -> str:
        """The same, for a narrow column."""
        name = words.name(self.key)
        return words("best_short", name=name) if self.best else name


def rivals(split: SplitData) -> tuple[Rival, ...]:
    """The best baseline first, then the benchmark where that is another one."""
    ranked = {r.key: r.measures[_RANKED_BY] for r in split.baselines}
    finite = {key: value for key, value in ranked.items() if math.isfinite(value)}
    best = max(finite, key=lambda key: finite[key]) if finite else None
    keys = [key for key in (best, "benchmark") if key is not None and key in ranked]
    return tuple(Rival(key, key == best) for key in dict.fromkeys(keys))


def verdict(agent: MeanStd, other: float) -> Verdict:
    """Where the agent's mean stands; level: within one standard deviation of the seeds."""
    if not math.isnan(agent.std) and abs(agent.mean - other) <= agent.std:
        return "level"
    return "above" if agent.mean > other else "below"


def lead(split: SplitData, words: Words, measure: str) -> str:
    """One sentence: the agent's value, its rivals', and how they compare."""
    label = LABELS[measure]
    agent = split.evaluation.over_seeds(measure)
    n = len(split.agents)
    seeds = words.count("over_seeds", n)
    parts = [
        words(
            "lead_agent",
            measure=words.measure(measure),
            value=label.format(agent.mean, agent.std),
            seeds=seeds,
        )
    ]
    against = rivals(split)
    if not against:
        return words("join").join([*parts, words("lead_alone")]) + words("stop")
    values = split.evaluation.baselines
    for rival in against:
        value = label.format(values[rival.key][measure])
        parts.append(words("lead_other", name=rival.label(words, in_text=True), value=value))
    verdicts = [
        (verdict(agent, values[r.key][measure]), words.in_text(r.key))
        for r in against
        if not math.isnan(agent.mean + values[r.key][measure])  # what is not known is not compared
    ]
    if not verdicts:
        return words("join").join(parts) + words("stop")
    return words("join").join(parts) + words("colon") + _comparison(verdicts, words) + words("stop")


def _comparison(verdicts: Sequence[tuple[Verdict, str]], words: Words) -> str:
    parts = []
    for kind in ("above", "level", "below"):
        names = [name for v, name in verdicts if v == kind]
        if names:
            parts.append(words(f"lead_{kind}", names=words("and").join(names)))
    return words("comma").join(parts)
