"""The rules in force, in one line on stderr: said by all commands that trade or work orders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from echelon.cli.console import err


def say_rules(facts: Mapping[str, Any], of: str = "") -> None:
    """Those of the market. facts: as run.json keeps them; of: whose, where there are several"""
    from echelon.report.rules import rules_line
    from echelon.report.texts import Words

    _say(rules_line(facts, Words("en")), of)


def say_execution_rules(rules: Mapping[str, Any], price: str) -> None:
    """Those by which orders are worked. rules: as the fields of `ExecutionRules`"""
    from echelon.report.rules import execution_line
    from echelon.report.texts import Words

    _say(execution_line(rules, price, Words("en")))


def say_proof_rules() -> None:
    """Of the execution layer's proofs, which have settings of their own."""
    _say(
        "each proof of execution has a market with a spread, an impact and a volume cap of its "
        "own; no commission, stamp duty, lots, T+1 or price limits; the configuration plays no part"
    )


def _say(line: str, of: str = "") -> None:
    # Who asks for less with --log-level has it.
    if logging.getLogger("echelon").isEnabledFor(logging.INFO):
        err.print(Text(f"rules{f' of {of}' if of else ''}: {line}"), soft_wrap=True)
