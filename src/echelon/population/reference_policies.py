"""Who can be in the router's place, and the policies that an agent is compared with.

A `RouterPolicy` chooses the expert in charge, by what the experts' own books earned bar by bar, or
by what the router would see. `HedgeRouter` is the rule that a router must beat.

Reference policies are policies made of an agent's own parts (is the whole worth having?):

    hedge           Fixed-Share over a hierarchy's experts, in the router's place: the same
                    decisions' rhythm, risk control and switching costs
    expert-0, …     each of its experts by itself, with no router and no risk control above it; of
                    a rule with its name, expert-5-hrp

They are backtested on the same window, but not chosen beforehand: no verdict rests on them.

Axes: `E` books, `K` experts, `O` entries of an observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from echelon.backtest.policy import Policy
from echelon.errors import StoreError
from echelon.states import State, copy_state
from echelon.types import Bools, Floats, Floats32, Ints

HEDGE = "hedge"
HEDGE_RATE, HEDGE_SHARE = 60.0, 0.004
"""Of the rule: how fast trust follows returns, and how much of it is spread again at each bar."""
_EXPERT = "expert-"


class RouterPolicy(Protocol):
    """Chooses among K experts and cash, which has the number K, for E books at once."""

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Hear what the own books earned at a bar: returns[E,K]; fresh[E]: books that begin."""

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        """[E] who is to be in charge, by obs[E,O] (see `router_task`) and allowed[E,K+1].

        Also asked about books at which no decision is due; such an answer must change nothing.
        """


@runtime_checkable
class RouterMemory(Protocol):
    """A router that remembers something from bar to bar, beyond what it has learned."""

    def memory(self) -> State:
        """What `recall` goes on from."""

    def recall(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `memory` gave."""


@runtime_checkable
class RouterOdds(Protocol):
    """A router that can say how probable its choices are."""

    def probabilities(self, obs: Floats32, allowed: Bools) -> Floats:
        """[E,K+1] of every choice at obs[E,O]; 0 for those not allowed[E,K+1]."""


class HedgeRouter:
    """The expert in which a fixed-share hedge trusts most: trust grows by exp(rate · return).

    A small share is spread again at every bar: an expert that was bad for long can soon be back.
    """

    def __init__(self, *, rate: float = HEDGE_RATE, share: float = HEDGE_SHARE) -> None:
        self._rate = rate
        self._share = share
        self.trust: Floats = np.zeros((0, 0))

    def follow(self, returns: Floats, fresh: Bools) -> None:
        even = 1.0 / returns.shape[1]
        if self.trust.shape != returns.shape:
            self.trust = np.full(returns.shape, even)
        earned = self._rate * np.where(np.isfinite(returns), returns, -1.0)
        weight = self.trust * np.exp(earned - earned.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        spread = (1.0 - self._share) * weight + self._share * even
        self.trust = np.where(fresh[:, None], even, spread)

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        cash = allowed.shape[1] - 1
        may = allowed[:, :cash]
        best = np.where(may, self.trust, -1.0).argmax(axis=1)
        return np.asarray(np.where(may.any(axis=1), best, cash), dtype=np.int64)

    def probabilities(self, obs: Floats32, allowed: Bools) -> Floats:
        """[E,K+1] the trust in those allowed, shared out; all cash where nobody is."""
        trusted = np.where(allowed[:, :-1], self.trust, 0.0)
        shares = np.column_stack([trusted, ~allowed[:, :-1].any(axis=1)])
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))

    def memory(self) -> State:
        return copy_state({"trust": self.trust})

    def recall(self, state: Mapping[str, NDArray[Any]]) -> None:
        trust = state.get("trust")
        if trust is None or trust.ndim != 2 or trust.dtype != np.float64:
            raise StoreError(
                "the saved hedge has no trust[E,K]. Restore it with the router it was saved with."
            )
        self.trust = trust.copy()


@runtime_checkable
class Accompanied(Protocol):
    def reference_policies(self) -> Mapping[str, Policy]:
        """Name → policy; a name is `HEDGE` or of `expert_key`, and part of file names."""


def reference_policies_of(policy: object) -> Mapping[str, Policy]:
    """The reference policies of a policy; none of one that has no parts."""
    return policy.reference_policies() if isinstance(policy, Accompanied) else {}


def expert_key(number: int, rule: str = "") -> str:
    """Of the expert of this number; rule: what it is called, where it is one that does not learn"""
    return f"{_EXPERT}{number}{rule and f'-{rule}'}"


def sort_reference_policies(names: Iterable[str]) -> list[str]:
    """The hedge, then the experts by number."""
    return sorted(names, key=lambda n: int(n.split("-")[1]) if is_expert_key(n) else -1)


def is_expert_key(name: str) -> bool:
    """Whether a reference policy is an expert by itself."""
    return name.startswith(_EXPERT)
