"""Where every member's weights came from: the family tree that evolution grows.

A *life* is what a member is between two decisions about it. A decision ends one life and begins
the next, whose parent is the life its weights go on from: the member's own last one, that of the
member it copied, or none where it begins afresh. Lives are only ever added, so the records of a
run are an append-only list fit for JSON, and the living are the last of each member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.agents.mfpbt import Decision, Hyperparameters, Plan
from echelon.errors import StoreError

FOUNDER = "founder"


@dataclass(frozen=True, slots=True)
class Life:
    """One member from one decision about it to the next.

    id: its place in the list; round: in which it began, 0 for a founder
    kind: of the decision that began it (`mfpbt.Kind`), or "founder"
    parent: id of the life whose weights it goes on from; None: fresh weights
    lender: id of the life whose hyperparameters it took, if another's
    """

    id: int
    member: int
    niche: int
    round: int
    kind: str
    parent: int | None
    lender: int | None
    hyperparameters: Hyperparameters
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """The record in plain types."""
        return asdict(self) | {"hyperparameters": dict(self.hyperparameters)}


class Lineage:
    """All lives of a population, from its founders on."""

    def __init__(self, plan: Plan, founders: Sequence[Hyperparameters]) -> None:
        """founders[M]: hyperparameters that the members begin with"""
        assert len(founders) == plan.members, f"{len(founders)} founders of {plan.members}"
        self.plan = plan
        self.lives: list[Life] = [
            Life(m, m, plan.niche_of(m), 0, FOUNDER, None, None, dict(values))
            for m, values in enumerate(founders)
        ]
        self._living = list(range(plan.members))

    def living(self, member: int) -> Life:
        """The present life of a member."""
        return self.lives[self._living[member]]

    def hyperparameters(self) -> list[Hyperparameters]:
        """Present hyperparameters of all members[M]."""
        return [self.living(m).hyperparameters for m in range(self.plan.members)]

    def apply(self, decisions: Sequence[Decision]) -> list[Life]:
        """Record the decisions of one round, at most one for each member; returns the new lives.

        Sources are meant as they were before the round, whatever order the decisions are in.
        """
        members = [d.member for d in decisions]
        assert len(set(members)) == len(members), f"two decisions about one member: {members}"
        before = list(self._living)
        new = []
        for decision in decisions:
            member = decision.member
            source = member if decision.weights_from is None else decision.weights_from
            lender = decision.hyperparameters_from
            life = Life(
                id=len(self.lives),
                member=member,
                niche=self.plan.niche_of(member),
                round=decision.round,
                kind=decision.kind,
                parent=None if decision.fresh else before[source],
                lender=None if lender is None else before[lender],
                hyperparameters=dict(decision.hyperparameters),
                reason=decision.reason,
            )
            self.lives.append(life)
            self._living[member] = life.id
            new.append(life)
        return new

    def ancestors(self, life: int) -> list[int]:
        """Ids from the parent of a life to the root of its weights, the parent first."""
        out = []
        parent = self.lives[life].parent
        while parent is not None:
            out.append(parent)
            parent = self.lives[parent].parent
        return out

    def depth(self, life: int) -> int:
        """Number of ancestors; 0 for fresh weights."""
        return len(self.ancestors(life))

    def root(self, life: int) -> int:
        """Id of the life in which the weights of this one began."""
        return [life, *self.ancestors(life)][-1]

    def children(self, life: int) -> list[int]:
        """Ids of the lives that went on directly from the weights of this one."""
        return [other.id for other in self.lives if other.parent == life]

    def as_json(self) -> list[dict[str, Any]]:
        """All lives in plain types, by id."""
        return [life.as_json() for life in self.lives]

    @classmethod
    def from_json(cls, plan: Plan, records: Sequence[Mapping[str, Any]]) -> Lineage:
        """The lineage that `as_json` wrote; refuses one that is no tree of this population."""
        out = cls.__new__(cls)
        out.plan = plan
        try:
            out.lives = [Life(**record) for record in records]
        except TypeError as error:
            raise StoreError(
                f"expected the fields of a life in every record of the lineage, found otherwise "
                f"({error}): restore the file or begin a new run"
            ) from error
        out._living = list(range(plan.members))
        for place, life in enumerate(out.lives):
            _require_sound(plan, place, life)
            out._living[life.member] = life.id
        if len(out.lives) < plan.members:
            raise StoreError(
                f"expected at least {plan.members} founders in the lineage, found "
                f"{len(out.lives)} lives: restore the file or begin a new run"
            )
        return out


def _require_sound(plan: Plan, place: int, life: Life) -> None:
    earlier = all(source is None or 0 <= source < place for source in (life.parent, life.lender))
    known = 0 <= life.member < plan.members and life.niche == plan.niche_of(life.member)
    founds = place < plan.members
    in_order = (life.kind == FOUNDER) == founds and (not founds or life.member == place)
    if life.id == place and earlier and known and in_order:
        return
    raise StoreError(
        f"expected life {place} of the lineage to be of a member of {plan.niches} niches × "
        f"{plan.per_niche} and to descend from earlier lives, found {life.as_json()}: it belongs "
        "to another population or is damaged"
    )
