"""Policies that an agent brings along, made of its own parts: is the whole worth having?

    hedge           the fixed-share hedge over a hierarchy's experts, in the router's place: the
                    same decisions' rhythm, risk control and switching costs
    expert-0, …     each of its experts by itself, with no router and no risk control above it

Whoever evaluates an agent backtests its companions on the same window. They are no rivals chosen
beforehand, so that no verdict rests on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from echelon.backtest.policy import Policy

HEDGE = "hedge"
_EXPERT = "expert-"


@runtime_checkable
class Accompanied(Protocol):
    """A policy with companions."""

    def companions(self) -> Mapping[str, Policy]:
        """Name → policy; a name is `HEDGE` or of `expert_key`, and part of file names."""


def companions_of(policy: object) -> Mapping[str, Policy]:
    """The companions of a policy; none of one that has no parts."""
    return policy.companions() if isinstance(policy, Accompanied) else {}


def expert_key(number: int) -> str:
    """Name of the expert with this number among the companions."""
    return f"{_EXPERT}{number}"


def in_order(names: Iterable[str]) -> list[str]:
    """The hedge, then the experts by number."""
    return sorted(names, key=lambda n: int(n.removeprefix(_EXPERT)) if is_expert(n) else -1)


def is_expert(name: str) -> bool:
    """Whether a companion is an expert by itself."""
    return name.startswith(_EXPERT)
