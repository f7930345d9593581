"""MF-PBT acted out: decisions of `agents.mfpbt` made in order, remembered, and carried out.

An evolution, `Evolution.step`, from the members' fitness and the experts' diversity:

1. With one member per niche: the change on trial is settled; where MAPD is under the threshold the
   worst expert restarts with a fresh skill; the weakest of the others tries new hyperparameters.
2. With niches of several members: the published rules, each subpopulation at its own pace; under
   the threshold the worst niche restarts instead, as a whole.

Members whose numbers are no longer finite do not wait for it: `Evolution.quarantine`.

Of the router there is one. `RouterEvolution` tries other settings of it as those of the weakest
expert are tried, and keeps them unless the fitness of the whole hierarchy falls.

`Evolution.apply` carries decisions out on a `workers.Pool` of members: all sources are
read before anything is overwritten, so that copies are of the population as it was.

Axes: `M` members, `K` niches (each an expert's place, with a skill), `W` windows, `Z` of a skill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.agents import mfpbt
from echelon.agents.mfpbt import Decision, Hyperparameters, Lineage, PopulationPlan, Proposal
from echelon.config import Config
from echelon.errors import StoreError
from echelon.population import settings
from echelon.population.measurement import draw_skills, fresh_skill
from echelon.population.member import Member, Noise
from echelon.rng import stream
from echelon.types import Floats
from echelon.workers import Failure, Pool

_A = TypeVar("_A")


def fitness(windows: NDArray[np.floating[Any]], penalty: float) -> Floats:
    """Mean over validation windows[...,W] less `penalty` times their standard deviation (over W).

    windows: extrinsic results only, such as Sharpe ratios; NaN where one of them is not finite
    """
    x = np.asarray(windows, dtype=np.float64)
    known = np.asarray(np.isfinite(x).all(axis=-1, keepdims=True))
    safe = np.where(known, x, 0.0)
    return np.where(known[..., 0], safe.mean(axis=-1) - penalty * safe.std(axis=-1), np.nan)


class Evolution:
    def __init__(
        self,
        plan: PopulationPlan,
        founders: Sequence[Hyperparameters],
        seed: int,
        *,
        skills: Floats,
        threshold: float = 0.25,
        mutation_rate: float = 0.0,
        enabled: bool = True,
        every: int = 1,
    ) -> None:
        """founders[M]: hyperparameters to begin with; skills[K,Z]: of the niches.

        threshold: of MAPD; mutation_rate: noise on weights that are copied; enabled: False only
        restarts what is alike or in quarantine; every: rounds of training between two
        evolutions, in which the lineage counts
        """
        self.plan = plan
        self.seed = seed
        self.threshold = threshold
        self.mutation_rate = mutation_rate
        self.enabled = enabled
        self.every = every
        self.round = 0
        """Evolutions so far."""
        self.lineage = Lineage(plan, founders)
        self.skills: Floats = np.array(skills, dtype=np.float64)
        self.pending: Proposal | None = None
        self._drawn = plan.niches
        # Before anything is known of them all members are equals.
        self._fit: Floats = np.zeros(plan.members)

    @classmethod
    def from_config(cls, config: Config, seed: int) -> Evolution:
        settings.refuse_outside(config)
        plan = settings.plan_of(config)
        return cls(
            plan,
            settings.founders(config, plan, seed),
            seed,
            skills=draw_skills(plan.niches, config.experts.skill_dim, seed),
            threshold=config.trainer.diversity_threshold,
            mutation_rate=config.trainer.training_schedule.population.mutation_rate,
            enabled=config.trainer.evolution.enabled,
            every=config.trainer.training_schedule.population.freq,
        )

    def hyperparameters(self) -> list[Hyperparameters]:
        """Present ones of all members[M]."""
        return self.lineage.hyperparameters()

    def step(self, fit: Floats, mapd: float) -> list[Decision]:
        """Decisions of the next evolution round, in order, already in the lineage.

        fit[M]: NaN where unknown; mapd: NaN where unknown, which restarts nobody
        """
        self.round += 1
        self._fit = np.array(fit, dtype=np.float64)
        if self.plan.per_niche == 1:
            return self._single(mapd)
        decisions = self._restart_alike(mapd)
        gone = {d.member for d in decisions}
        if self.enabled:
            bred = mfpbt.evolve(self.plan, self.round, self._fit, self.hyperparameters(), self.seed)
            decisions = [d for d in bred if d.member not in gone] + decisions
        return self._record(sorted(decisions, key=lambda d: d.member))

    def quarantine(self, members: Sequence[int]) -> list[Decision]:
        """Restart members whose numbers are no longer finite; a trial of theirs ends unjudged."""
        known = np.array(self._fit)
        known[list(members)] = np.nan
        if self.pending is not None and self.pending.decision.member in members:
            self.pending = None
        cause, present = mfpbt.Cause("not_finite", {}), self.hyperparameters()
        return self._record(
            mfpbt.restart_members(self.plan, self.round, sorted(members), known, present, cause)
        )

    def apply(self, decisions: Sequence[Decision], pool: Pool[Member]) -> dict[int, Failure]:
        """Carry decisions out on the members of `pool`; the failures of those that could not.

        A member that failed, or whose source did, is not what the lineage says: restore it.
        """
        copying = {d.member: d.weights_from for d in decisions if d.weights_from is not None}
        niche_of = self.plan.niche_of
        fresh = {d.member: self.skills[niche_of(d.member)].copy() for d in decisions if d.fresh}
        assert not copying.keys() & fresh.keys(), "a member cannot both copy and begin afresh"
        values = {d.member: dict(d.hyperparameters) for d in decisions}  # the last one holds
        states = pool.call(Member.copy_state, sorted(set(copying.values())))
        failed: dict[int, Failure] = {}
        taken: dict[int, dict[str, Any]] = {}
        noise: dict[int, Noise] = {}
        for member, source in copying.items():
            state = states[source]
            if isinstance(state, Failure):
                failed[source], failed[member] = state, replace(state, lost=False)
            else:
                taken[member] = state
            if self.mutation_rate > 0.0:
                # Of the member's present life: it may restart twice in a round.
                rng = stream(self.seed, "mutation", self.lineage.living(member).id)
                noise[member] = Noise(self.mutation_rate, int(rng.integers(2**62)))

        def carry_out(method: Callable[[Member, _A], None], arguments: Mapping[int, _A]) -> None:
            due = {m: argument for m, argument in arguments.items() if m not in failed}
            done = pool.call_each(method, due)
            failed.update({m: r for m, r in done.items() if isinstance(r, Failure)})

        carry_out(Member.take_state, taken)
        carry_out(Member.restart, fresh)
        carry_out(Member.perturb, noise)
        carry_out(Member.set_hyperparameters, values)
        return failed

    def state(self) -> dict[str, Any]:
        """What `restore` needs; fit for JSON (NaN as Python writes it)."""
        return {
            "round": self.round,
            "lineage": [asdict(life) for life in self.lineage.lives],
            "pending": None if self.pending is None else self.pending.as_json(),
            "fitness": self._fit.tolist(),
            "skills": self.skills.tolist(),
            "drawn": self._drawn,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; refuses that of another population."""
        lineage = Lineage.from_json(self.plan, state["lineage"])
        skills, fit = np.array(state["skills"]), np.array(state["fitness"], dtype=np.float64)
        if skills.shape != self.skills.shape or fit.shape != self._fit.shape:
            raise StoreError(
                f"expected skills {list(self.skills.shape)} and fitness {list(self._fit.shape)} of "
                f"the population, found {list(skills.shape)} and {list(fit.shape)}: resume with "
                "the configuration of the run"
            )
        names = set(lineage.hyperparameters()[0])
        if names != set(self.plan.space):
            raise StoreError(
                f"expected hyperparameters {sorted(self.plan.space)} in the lineage, found "
                f"{sorted(names)}: resume with the configuration of the run"
            )
        self.lineage, self.skills, self._fit = lineage, skills, fit
        self.round, self._drawn = int(state["round"]), int(state["drawn"])
        pending = state["pending"]
        self.pending = None if pending is None else Proposal.from_json(pending)

    def _single(self, mapd: float) -> list[Decision]:
        """One member per niche: settle, restart, propose."""
        decisions = []
        if self.pending is not None:
            now = float(self._fit[self.pending.decision.member])
            decisions += self._record([mfpbt.conclude_trial(self.pending, self.round, now)])
            self.pending = None
        restarts = self._record(self._restart_alike(mapd))
        if not self.enabled:
            return decisions + restarts
        # Of one that has just restarted no fitness is known that a trial could be held against.
        standing = np.array(self._fit)
        standing[[d.member for d in restarts]] = np.nan
        present = self.hyperparameters()
        self.pending = mfpbt.propose(self.plan, self.round, standing, present, self.seed)
        tried = [] if self.pending is None else self._record([self.pending.decision])
        return decisions + restarts + tried

    def _restart_alike(self, mapd: float) -> list[Decision]:
        if math.isnan(mapd):
            return []
        present = self.hyperparameters()
        return mfpbt.reseed(self.plan, self.round, self._fit, present, mapd, self.threshold)

    def _record(self, decisions: list[Decision]) -> list[Decision]:
        """Into the lineage; a niche that begins afresh as a whole gets a fresh skill.

        The lineage stands next to what else training tells, so it counts rounds of training; a
        quarantine between two evolutions is in it under the round of the first.
        """
        self.lineage.apply([replace(d, round=d.round * self.every) for d in decisions])
        fresh = {d.member for d in decisions if d.fresh}
        for niche in range(self.plan.niches):
            if fresh.issuperset(self.plan.niche(niche)):
                self.skills[niche] = fresh_skill(self.skills, self._drawn, self.seed)
                self._drawn += 1
        return decisions


class RouterEvolution:
    """The router's hyperparameters, and the change of them that is on trial.

    At every evolution a change on trial is settled, by the hierarchy's fitness then and now, unless
    the router has not learned meanwhile; then another begins. Experts learn at the same time, so
    that a trial is a noisy one.
    """

    def __init__(
        self, space: Mapping[str, mfpbt.Range], values: Hyperparameters, seed: int
    ) -> None:
        """space: what evolves, maybe nothing; values: to begin with, of the same names"""
        self.seed = seed
        self.round = 0
        self.values = dict(values)
        self.pending: Proposal | None = None
        self._plan = PopulationPlan(niches=1, per_niche=1, frequencies=(1,), space=space)
        self._learned = 0

    @classmethod
    def from_config(cls, config: Config, seed: int) -> RouterEvolution:
        settings.refuse_outside(config)
        names, values = settings.router_space(config), settings.config_values(config, router=True)
        return cls(names, {name: values[name] for name in names}, seed)

    def step(self, fit: float, learned: int) -> list[Decision]:
        """Decisions about `values`, which are those to go on with.

        fit: the hierarchy's, NaN where unknown; learned: decisions that the router has learned from
        """
        self.round += 1
        if not self._plan.space:
            return []
        done: list[Decision] = []
        if self.pending is not None:
            if learned == self._learned:
                return []
            done = [mfpbt.conclude_trial(self.pending, self.round, fit)]
            self.values = dict(done[0].hyperparameters)
        fits, present = np.array([fit]), [self.values]
        self.pending = mfpbt.propose(self._plan, self.round, fits, present, self.seed)
        if self.pending is not None:
            self._learned = learned
            self.values = dict(self.pending.decision.hyperparameters)
            cause = mfpbt.Cause("router_on_trial", {"fitness": fit})
            done.append(replace(self.pending.decision, cause=cause))
        return done

    def state(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "values": dict(self.values),
            "pending": None if self.pending is None else self.pending.as_json(),
            "learned": self._learned,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; refuses that of other hyperparameters."""
        if state["values"].keys() != self.values.keys():
            raise StoreError(
                f"expected hyperparameters {sorted(self.values)} of the router, found "
                f"{sorted(state['values'])}: resume with the configuration of the run"
            )
        self.round, self._learned = int(state["round"]), int(state["learned"])
        self.values = {name: float(value) for name, value in state["values"].items()}
        pending = state["pending"]
        self.pending = None if pending is None else Proposal.from_json(pending)
