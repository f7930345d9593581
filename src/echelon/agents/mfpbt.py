"""Who copies whom: population-based training at several frequencies, inside niches.

MF-PBT (Doulazmi et al., 2025, 2506.03225) as published, with one restriction of ours: a niche is a
skill, and weights never leave it, since copies across niches are the collapse that the population
is there to prevent. One evolution, of round r, in this order:

1. Subpopulation i of each niche evolves if δ_i divides r.
2. Its members are ranked by fitness into quarters. The last quarter copies the first (weights and
   hyperparameters) and perturbs each hyperparameter, ×0.8 or ×1.25.
3. Each of the third quarter is replaced by a better member of another subpopulation of its niche,
   the best first and each once: from a slower one with weights and hyperparameters, from a
   faster one with weights only. The hyperparameters are then those of the best of its own
   subpopulation: what pays at short sight does not spread to those that see far.
4. Where there is no such member, the best fitter one of another niche, of a subpopulation as slow
   or slower, gives its hyperparameters.

All copies are of the population as it was before the round. With one member per niche there are no
quarters: `propose` changes the weakest's hyperparameters, `conclude_trial` keeps the change unless
fitness fell, and `reseed` restarts the worst niche where the experts have become alike.

Nothing here holds a network: decisions are records that the caller carries out (with "weights" go
the optimizer's state and the adapter). A fitness that is not finite ranks last and is copied by
none.

`Lineage` is the family tree that decisions grow. A decision ends one *life* of a member and begins
the next, whose parent is the life its weights go on from; lives are only ever added.

Axes: `M` members, numbered niche by niche and within it subpopulation by subpopulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from echelon.errors import StoreError
from echelon.rng import stream
from echelon.types import Floats

FACTORS = (0.8, 1.25)
QUARTERS = 4
FOUNDER = "founder"

Hyperparameters = Mapping[str, float]
DecisionKind = Literal["exploit", "migrate", "borrow", "propose", "keep", "revert", "reseed"]


class Cause(NamedTuple):
    """Why a decision was made: a code (`event_CODE` in the report's catalogue), and its numbers."""

    code: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a hyperparameter; `of_rest`: factors act on 1 − value.

    A discount of 0.99 belongs to `of_rest`: ×0.8 would make it 0.79, a horizon of 5 bars for 100.
    """

    low: float
    high: float
    of_rest: bool = False

    def times(self, value: float, factor: float) -> float:
        """The value changed by the factor, within the bounds."""
        changed = 1.0 - (1.0 - value) * factor if self.of_rest else value * factor
        return min(max(changed, self.low), self.high)


@dataclass(frozen=True, slots=True)
class PopulationPlan:
    """The population's form: `niches` × `per_niche` members, by subpopulations of equal size.

    frequencies: δ of each subpopulation, in rounds, rising; their number is the subpopulations'
    space: the hyperparameters that evolve, each with its bounds
    """

    niches: int
    per_niche: int
    frequencies: tuple[int, ...]
    space: Mapping[str, Range]

    @property
    def members(self) -> int:
        return self.niches * self.per_niche

    @property
    def size(self) -> int:
        return self.per_niche // len(self.frequencies)

    def niche_of(self, member: int) -> int:
        return member // self.per_niche

    def delta_of(self, member: int) -> int:
        """Rounds between two evolutions of a member's subpopulation."""
        return self.frequencies[member % self.per_niche // self.size]

    def group(self, niche: int, subpopulation: int) -> range:
        first = niche * self.per_niche + subpopulation * self.size
        return range(first, first + self.size)

    def niche(self, niche: int) -> range:
        return range(niche * self.per_niche, (niche + 1) * self.per_niche)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one member; members without one go on as they are.

    weights_from: member whose weights, optimizer state and adapter it takes; None: keeps its own
    hyperparameters_from: member whose hyperparameters it takes, before any change; None: its own
    hyperparameters: what it goes on with
    fresh: begins with fresh weights and its niche's fresh skill
    """

    round: int
    member: int
    kind: DecisionKind
    weights_from: int | None
    hyperparameters_from: int | None
    hyperparameters: Hyperparameters
    cause: Cause
    fresh: bool = False

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Decision:
        return cls(**{**record, "cause": Cause(*record["cause"])})


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change on trial: what to do now, what it was before, and the fitness it must keep."""

    decision: Decision
    before: Hyperparameters
    fitness: float

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["decision"]["cause"] = list(self.decision.cause)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Proposal:
        return cls(**{**record, "decision": Decision.from_json(record["decision"])})


def evolve(
    plan: PopulationPlan, round_: int, fit: Floats, present: Sequence[Hyperparameters], seed: int
) -> list[Decision]:
    """Decisions of round 1, 2, …, by member, from fit[M] and present[M] hyperparameters."""
    _require_members(plan, fit, present)
    assert plan.per_niche > 1, "with one member per niche use propose, conclude_trial and reseed"
    assert round_ >= 1, f"rounds are counted from 1, found {round_}"
    decisions = []
    for niche in range(plan.niches):
        for sub, delta in enumerate(plan.frequencies):
            if round_ % delta:
                continue
            group, share = rank_members(plan.group(niche, sub), fit), plan.size // QUARTERS
            for winner, loser in zip(group[:share], group[-share:], strict=True):
                if math.isfinite(fit[winner]):
                    changed = perturb_hyperparameters(plan, present[winner], round_, loser, seed)
                    cause = _comparison("last_quarter", fit, loser, winner)
                    decisions.append(
                        Decision(round_, loser, "exploit", winner, winner, changed, cause)
                    )
            decisions += _migrate(plan, round_, group, fit, present)
    return sorted(decisions, key=lambda d: d.member)


def propose(
    plan: PopulationPlan, round_: int, fit: Floats, present: Sequence[Hyperparameters], seed: int
) -> Proposal | None:
    """Perturbed hyperparameters for the weakest, on trial; None if no fitness is known."""
    _require_members(plan, fit, present)
    known = [m for m in range(plan.members) if math.isfinite(fit[m])]
    if not known:
        return None
    weakest = rank_members(known, fit)[-1]
    changed = perturb_hyperparameters(plan, present[weakest], round_, weakest, seed)
    cause = Cause("weakest_on_trial", {"fitness": float(fit[weakest]), "members": len(known)})
    decision = Decision(round_, weakest, "propose", None, None, changed, cause)
    return Proposal(decision, dict(present[weakest]), float(fit[weakest]))


def conclude_trial(proposal: Proposal, round_: int, fitness_now: float) -> Decision:
    """The end of the trial: the change stays unless fitness fell; the weights stay all the same."""
    keep = fitness_now >= proposal.fitness
    values = {"before": proposal.fitness, "after": float(fitness_now)}
    return replace(
        proposal.decision,
        round=round_,
        kind="keep" if keep else "revert",
        hyperparameters=proposal.decision.hyperparameters if keep else proposal.before,
        cause=Cause("trial_kept" if keep else "trial_reverted", values),
    )


def reseed(
    plan: PopulationPlan,
    round_: int,
    fit: Floats,
    present: Sequence[Hyperparameters],
    mapd: float,
    threshold: float = 0.25,
) -> list[Decision]:
    """Restart the niche whose best member is the least fit, if MAPD is under the threshold.

    All its members share the skill, which is drawn afresh, so all of them restart, with the
    hyperparameters of the fittest niche's best.
    """
    _require_members(plan, fit, present)
    if mapd >= threshold or plan.niches < 2:
        return []
    best = [rank_members(plan.niche(niche), fit)[0] for niche in range(plan.niches)]
    order = rank_members(best, fit)
    cause = Cause("experts_alike", {"mapd": float(mapd), "threshold": threshold})
    return restart_members(plan, round_, plan.niche(plan.niche_of(order[-1])), fit, present, cause)


def restart_members(
    plan: PopulationPlan,
    round_: int,
    members: Sequence[int],
    fit: Floats,
    present: Sequence[Hyperparameters],
    cause: Cause,
) -> list[Decision]:
    """Decisions to restart these members, as for one whose numbers are no longer finite.

    Weights come from the fittest of the niche that goes on, or are fresh; hyperparameters from the
    fittest that goes on and whose δ is at least the member's own, or stay.
    """
    others = rank_members([m for m in range(plan.members) if m not in members], fit)
    others = [m for m in others if math.isfinite(fit[m])]
    decisions = []
    for member in members:
        mates = [m for m in others if plan.niche_of(m) == plan.niche_of(member)]
        lenders = [m for m in others if plan.delta_of(m) >= plan.delta_of(member)]
        source, mate = next(iter(lenders), None), next(iter(mates), None)
        values = dict(present[member if source is None else source])
        fresh = mate is None
        decisions.append(Decision(round_, member, "reseed", mate, source, values, cause, fresh))
    return decisions


def rank_members(members: Sequence[int], fit: Floats) -> list[int]:
    """Members, the fittest first; ties by number; those of no finite fitness last."""
    return sorted(members, key=lambda m: (-fit[m] if math.isfinite(fit[m]) else math.inf, m))


def perturb_hyperparameters(
    plan: PopulationPlan, values: Hyperparameters, round_: int, member: int, seed: int
) -> dict[str, float]:
    """Each hyperparameter ×0.8 or ×1.25 within its bounds, by its own random stream."""
    return {
        name: plan.space[name].times(
            value, FACTORS[stream(seed, "mfpbt", round_, member, name).integers(len(FACTORS))]
        )
        for name, value in values.items()
    }


def _migrate(
    plan: PopulationPlan,
    round_: int,
    group: list[int],
    fit: Floats,
    present: Sequence[Hyperparameters],
) -> list[Decision]:
    share = plan.size // QUARTERS
    home = plan.niche_of(group[0])
    outsiders = rank_members([m for m in plan.niche(home) if m not in group], fit)
    decisions = []
    for member in group[2 * share : 3 * share]:
        if outsiders and _fitter(fit, outsiders[0], member):
            migrant = outsiders.pop(0)
            slower = plan.delta_of(migrant) > plan.delta_of(member)
            # The best of its own group may have no fitness: then it has nothing to teach either.
            source = migrant if slower else group[0] if math.isfinite(fit[group[0]]) else None
            values = dict(present[member if source is None else source])
            code = "fitter_slower" if slower else "fitter_faster"
            cause = _comparison(code, fit, member, migrant)
            decisions.append(Decision(round_, member, "migrate", migrant, source, values, cause))
            continue
        lenders = rank_members([m for m in range(plan.members) if plan.niche_of(m) != home], fit)
        slow = [m for m in lenders if plan.delta_of(m) >= plan.delta_of(member)]
        lenders = [m for m in slow if _fitter(fit, m, member)]
        if lenders:
            cause = _comparison("fitter_niche", fit, member, lenders[0])
            values = dict(present[lenders[0]])
            decisions.append(Decision(round_, member, "borrow", None, lenders[0], values, cause))
    return decisions


def _comparison(code: str, fit: Floats, member: int, source: int) -> Cause:
    return Cause(code, {"fitness": float(fit[member]), "source": float(fit[source])})


def _fitter(fit: Floats, candidate: int, member: int) -> bool:
    if not math.isfinite(fit[candidate]):
        return False
    return not math.isfinite(fit[member]) or bool(fit[candidate] > fit[member])


def _require_members(plan: PopulationPlan, fit: Floats, present: Sequence[Hyperparameters]) -> None:
    assert fit.shape == (plan.members,), f"fit should be [{plan.members}], is {fit.shape}"
    assert len(present) == plan.members, f"{len(present)} sets of hyperparameters"
    for member, values in enumerate(present):
        bounds = plan.space
        assert values.keys() == bounds.keys(), f"member {member} has {sorted(values)}"
        outside = [n for n, v in values.items() if not bounds[n].low <= v <= bounds[n].high]
        assert not outside, f"{outside} of member {member} are out of bounds"


@dataclass(frozen=True, slots=True)
class Life:
    """One member from one decision about it to the next.

    id: its place in the list; round: in which it began, 0 for a founder
    kind: of the decision that began it (`DecisionKind`), or "founder"
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


class Lineage:
    def __init__(self, plan: PopulationPlan, founders: Sequence[Hyperparameters]) -> None:
        """founders[M]: hyperparameters that the members begin with"""
        assert len(founders) == plan.members, f"{len(founders)} founders of {plan.members}"
        self.plan = plan
        self.lives: list[Life] = [
            Life(m, m, plan.niche_of(m), 0, FOUNDER, None, None, dict(values))
            for m, values in enumerate(founders)
        ]
        self._living = list(range(plan.members))

    def living(self, member: int) -> Life:
        return self.lives[self._living[member]]

    def hyperparameters(self) -> list[Hyperparameters]:
        return [self.living(m).hyperparameters for m in range(self.plan.members)]

    def apply(self, decisions: Sequence[Decision]) -> list[Life]:
        """The new lives of one round's decisions; sources are meant as they were before it."""
        members = [d.member for d in decisions]
        assert len(set(members)) == len(members), f"two decisions about one member: {members}"
        before, first = list(self._living), len(self.lives)
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
            )
            self.lives.append(life)
            self._living[member] = life.id
        return self.lives[first:]

    @classmethod
    def from_json(cls, plan: PopulationPlan, records: Sequence[Mapping[str, Any]]) -> Lineage:
        """From `asdict` of its lives; refuses what is no tree of this population."""
        out = cls.__new__(cls)
        out.plan = plan
        out.lives = [Life(**record) for record in records]
        out._living = list(range(plan.members))
        for place, life in enumerate(out.lives):
            sources = (life.parent, life.lender)
            earlier = all(source is None or 0 <= source < place for source in sources)
            known = 0 <= life.member < plan.members and life.niche == plan.niche_of(life.member)
            founds = place < plan.members
            in_order = (life.kind == FOUNDER) == founds and (not founds or life.member == place)
            if not (life.id == place and earlier and known and in_order):
                raise StoreError(
                    f"expected life {place} of the lineage to be of a member of {plan.niches} "
                    f"niches × {plan.per_niche} and to descend from earlier lives, found "
                    f"{asdict(life)}: it belongs to another population or is damaged"
                )
            out._living[life.member] = life.id
        if len(out.lives) < plan.members:
            raise StoreError(
                f"expected at least {plan.members} founders in the lineage, found "
                f"{len(out.lives)} lives: restore the file or begin a new run"
            )
        return out
