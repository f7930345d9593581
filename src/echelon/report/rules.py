"""The rules of trading in words: one line, on the command line and in every report.

Facts are those of `market.RulesInForce.facts`, as run.json and summary.json keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.config import Config
from echelon.market import drawn_market
from echelon.report.texts import Words


def rules_line(facts: Mapping[str, Any], words: Words) -> str:
    """Everything in one line; what cannot act is named at its end."""
    idle = idle_text(facts, words)
    return rules_text(facts, words) + (words("rules_idle", idle=idle) if idle else "")


def rules_text(facts: Mapping[str, Any], words: Words) -> str:
    """Costs, what the exchange forbids, and where orders fill."""
    calendar, minimum = facts["calendar"], facts["min_commission"]
    cap = facts["participation"]
    whence = "" if calendar == "" else words("rules_calendar", calendar=calendar)
    if calendar is None:
        whence = words("rules_drawn")
    if facts["asked"] == "auto":
        whence = words("rules_auto") + whence
    fee = words("fee_minimum", amount=f"{minimum:g}") if minimum else ""
    parts = [
        words("rules_commission", bps=f"{facts['commission_bps']:g}", minimum=fee),
        words("stamp_cn" if facts["stamp_duty"] else "stamp_none"),
        words(f"slippage_{facts['slippage']}", bps=f"{facts['slippage_bps']:g}"),
        words("cap_none") if cap is None else words("cap", share=f"{100 * cap:g}"),
        *(
            words(f"{rule}_{'on' if facts[rule] else 'off'}")
            for rule in ("lots", "t_plus_one", "price_limits")
        ),
        # Numbers that at 0 are no rule: those that have a text of their own.
        *(
            words(f"rule_set_{rule}", value=f"{value:,.10g}")
            for rule, value in facts.items()
            if value and f"rule_set_{rule}" in words
        ),
    ]
    fill = words("rules_fill", fill=words.term("ledger", facts["fill"]))
    if facts["executor"] != "immediate":
        fill += words("rules_executor", executor=facts["executor"])
    if not facts["charged"]:
        fill += words("rules_uncharged")
    head = words("rules", preset=facts["preset"], whence=whence)
    return head + words("comma").join(parts) + fill


def idle_text(facts: Mapping[str, Any], words: Words) -> str:
    """Rules that are set and cannot act, with the reason; empty where all can."""
    by_reason: dict[str, list[str]] = {}
    for rule, why in facts["idle"].items():
        by_reason.setdefault(why, []).append(words(f"rule_{rule}"))
    return words("join").join(
        words("rules_why", rules=words("comma").join(rules), why=words(f"why_{why}"))
        for why, rules in by_reason.items()
    )


def execution_line(rules: Mapping[str, Any], price: str, words: Words) -> str:
    """How orders are worked through a day. rules: as the fields of `ExecutionRules`"""
    spread, temporary, permanent = (
        f"{1e4 * rules[name]:g}" for name in ("half_spread", "temporary", "permanent")
    )
    cap = rules["volume_cap"]
    return words(
        "execution_line",
        price=words(f"execution_at_{price}"),
        spread=spread,
        temporary=temporary,
        permanent=permanent,
        share=f"{100 * (1.0 if cap is None else min(cap, 1.0)):g}",
        bars=f"{rules['ticks_per_step']:g}",
    )


def recorded_rules(facts: Mapping[str, Any], config: Config) -> Mapping[str, Any]:
    """The rules that an evaluation wrote down; of one of before, what its configuration says."""
    recorded = facts.get("rules")
    if isinstance(recorded, Mapping):
        return recorded
    rules = drawn_market(config).facts()
    fill = facts.get("ledger", {}).get("fill", rules["fill"])
    return rules | {"idle": {}, "fill": fill, "calendar": ""}
