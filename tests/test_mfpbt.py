"""MF-PBT: selection and migration by hand, bounds, one member per niche, and the family tree."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.agents.mfpbt import (
    Cause,
    Decision,
    Hyperparameters,
    Lineage,
    PopulationPlan,
    Proposal,
    Range,
    conclude_trial,
    evolve,
    perturb_hyperparameters,
    propose,
    rank_members,
    reseed,
    restart_members,
)
from echelon.errors import StoreError
from echelon.rng import stream
from echelon.types import Floats

NAN = math.nan
CAUSE = Cause("not_finite", {})


def records_of(lineage: Lineage) -> list[dict[str, Any]]:
    return [asdict(life) for life in lineage.lives]


def ancestors(lineage: Lineage, life: int) -> list[int]:
    """Ids from the parent of a life to the root of its weights, the parent first."""
    parent = lineage.lives[life].parent
    return [] if parent is None else [parent, *ancestors(lineage, parent)]


SPACE = {"lr": Range(1e-5, 1.0), "discount": Range(0.9, 0.999, of_rest=True)}
POPULATION = PopulationPlan(niches=4, per_niche=8, frequencies=(1, 2), space=SPACE)
FIVE = PopulationPlan(niches=5, per_niche=1, frequencies=(1,), space=SPACE)

# Fitness by niche: four fast members, then four slow ones.
ROUNDS = [
    np.array(
        [
            [4.0, 3.0, 2.0, 1.0, 10.0, 0.0, 0.5, 0.25],
            [1.0, 4.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0],
            [7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0],
            [12.0, 11.0, 10.5, NAN, 5.0, 5.0, 5.0, 5.0],
        ]
    ).ravel(),
    np.array(
        [
            [1.0, 2.0, 3.0, 20.0, 5.0, 6.0, 7.0, 8.0],
            [NAN, NAN, NAN, NAN, 1.0, 2.0, 3.0, 4.0],
            [30.0, 29.0, 28.0, 27.0, 0.4, 0.3, 0.2, 0.1],
            [1.0, 1.0, 1.0, 1.0, 9.0, 0.0, 0.0, 0.0],
        ]
    ).ravel(),
    np.array([[4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * 4).ravel(),
]
# (member, kind, weights from, hyperparameters from), worked out by hand from the table above.
EXPECTED: list[list[tuple[int, str, int | None, int | None]]] = [
    [  # only the fast ones evolve
        (2, "migrate", 4, 4),
        (3, "exploit", 0, 0),
        (8, "exploit", 9, 9),
        (10, "borrow", None, 24),
        (18, "borrow", None, 24),  # its own niche is all equal, hence not better
        (19, "exploit", 16, 16),
        (27, "exploit", 24, 24),  # not a number ranks last; 26 is fitter than any other niche
    ],
    [  # all evolve
        (0, "exploit", 3, 3),
        (1, "migrate", 7, 7),
        (4, "exploit", 7, 7),
        (5, "migrate", 3, 7),  # from a faster one: weights only, hyperparameters of its own best
        (10, "migrate", 15, 15),  # nobody in its own group has a fitness
        (12, "exploit", 15, 15),
        (13, "borrow", None, 28),  # 3 and 16 are fitter, but faster
        (19, "exploit", 16, 16),
        (22, "migrate", 16, 20),
        (23, "exploit", 20, 20),
        (26, "migrate", 28, 28),
        (27, "exploit", 24, 24),
        (30, "migrate", 24, 28),
        (31, "exploit", 28, 28),
    ],
    [
        (2, "borrow", None, 8),
        (3, "exploit", 0, 0),
        (10, "borrow", None, 0),
        (11, "exploit", 8, 8),
        (18, "borrow", None, 0),
        (19, "exploit", 16, 16),
        (26, "borrow", None, 0),
        (27, "exploit", 24, 24),
    ],
]


def beginnings(plan: PopulationPlan) -> list[Hyperparameters]:
    """A set of hyperparameters for each member, no two alike."""
    return [{"lr": 1e-3 * (1 + m / 100), "discount": 0.99} for m in range(plan.members)]


def three_rounds(seed: int) -> tuple[Lineage, list[list[Decision]]]:
    lineage = Lineage(POPULATION, beginnings(POPULATION))
    made = []
    for number, fit in enumerate(ROUNDS, start=1):
        made.append(evolve(POPULATION, number, fit, lineage.hyperparameters(), seed))
        lineage.apply(made[-1])
    return lineage, made


def test_three_rounds_of_32_members_decide_as_worked_out_by_hand() -> None:
    _, made = three_rounds(seed=7)
    got = [[(d.member, d.kind, d.weights_from, d.hyperparameters_from) for d in r] for r in made]
    assert got == EXPECTED
    assert [{d.round for d in r} for r in made] == [{1}, {2}, {3}]
    assert not any(d.fresh for r in made for d in r)


def test_three_rounds_of_32_members_leave_the_family_tree_worked_out_by_hand() -> None:
    lineage, _ = three_rounds(seed=7)
    assert len(lineage.lives) == 32 + 7 + 14 + 8
    # (life, member, parent, lender); a life's number follows from the order of decisions.
    told = {x.id: (x.member, x.parent, x.lender) for x in lineage.lives}
    assert told[33] == (3, 0, 0)
    assert told[39] == (0, 33, 33)  # copies member 3, which had just copied member 0
    assert told[42] == (5, 33, 7)
    assert told[43] == (10, 15, 15)  # was life 35, of borrowed hyperparameters
    assert told[45] == (13, 13, 28)
    assert told[54] == (3, 39, 39)
    assert told[55] == (10, 43, 39)
    assert told[56] == (11, 34, 34)
    assert ancestors(lineage, 54) == [39, 33, 0]
    assert ancestors(lineage, 55) == [43, 15]
    assert ancestors(lineage, 56) == [34, 9]
    assert ancestors(lineage, 6) == []
    assert [life.id for life in lineage.lives if life.parent == 16] == [37, 46, 47, 58]
    assert [life.id for life in lineage.lives if life.parent == 33] == [39, 42]
    assert [lineage.living(m).id for m in range(8)] == [39, 40, 53, 54, 41, 42, 6, 7]
    assert {x.niche for x in lineage.lives} == {0, 1, 2, 3}
    for life in lineage.lives:
        assert all(lineage.lives[a].niche == life.niche for a in ancestors(lineage, life.id))


def test_three_rounds_change_hyperparameters_of_copies_only() -> None:
    lineage, _ = three_rounds(seed=7)
    for life in lineage.lives[32:]:
        assert life.lender is not None
        source = lineage.lives[life.lender].hyperparameters
        if life.kind == "exploit":
            assert life.hyperparameters["lr"] / source["lr"] == pytest.approx(0.8) or (
                life.hyperparameters["lr"] / source["lr"] == pytest.approx(1.25)
            )
            rest = (1 - life.hyperparameters["discount"]) / (1 - source["discount"])
            assert rest == pytest.approx(0.8) or rest == pytest.approx(1.25)
        else:
            assert life.hyperparameters == source


def test_same_seed_same_decisions_and_another_seed_changes_only_the_perturbations() -> None:
    first, again, other = three_rounds(7)[1], three_rounds(7)[1], three_rounds(8)[1]
    assert str(first) == str(again)  # a fitness may be NaN
    assert first != other
    assert [[d.weights_from for d in r] for r in first] == [
        [d.weights_from for d in r] for r in other
    ]


def test_both_factors_occur_about_as_often() -> None:
    raised = Counter(
        perturb_hyperparameters(FIVE, {"lr": 0.01, "discount": 0.99}, r, 0, 3)["lr"] > 0.01
        for r in range(400)
    )
    assert 150 < raised[True] < 250


def test_two_of_a_quarter_pair_with_winners_and_migrants_by_rank_each_once() -> None:
    # One niche of two subpopulations of eight; fast 0…7 fit 8…1, slow 8…15: 8 and 9 are better.
    plan = PopulationPlan(1, 16, (1, 10), SPACE)
    fit = np.array([8.0, 7, 6, 5, 4, 3, 2, 1, 20, 4.5, 0, 0, 0, 0, 0, 0])
    got = {d.member: d.weights_from for d in evolve(plan, 1, fit, beginnings(plan), 0)}
    assert got == {6: 0, 7: 1, 4: 8, 5: 9}
    fit[9] = 3.5  # still better than member 5, no longer than member 4
    assert {d.member: d.weights_from for d in evolve(plan, 1, fit, beginnings(plan), 0)} == got
    fit[8] = 3.5  # better than member 5 alone, and the first of two equals
    got = {d.member: d.weights_from for d in evolve(plan, 1, fit, beginnings(plan), 0)}
    assert got == {6: 0, 7: 1, 5: 8}


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), round_=st.integers(1, 6))
def test_whatever_the_fitness_weights_stay_in_the_niche_and_the_fast_teach_no_slow(
    seed: int, round_: int
) -> None:
    plan = PopulationPlan(3, 8, (1, 3), SPACE)
    rng = stream(seed, "fitness")
    fit: Floats = rng.integers(0, 5, plan.members).astype(float)
    fit[rng.random(plan.members) < 0.15] = NAN
    decisions = evolve(plan, round_, fit, beginnings(plan), seed)
    members = [d.member for d in decisions]
    assert members == sorted(set(members))
    for d in decisions:
        assert round_ % plan.delta_of(d.member) == 0
        group = rank_members(
            plan.group(plan.niche_of(d.member), d.member % plan.per_niche // plan.size), fit
        )
        assert d.member in group[2:]  # the better half is left alone
        for source in (d.weights_from, d.hyperparameters_from):
            assert source is None or math.isfinite(fit[source])
        if d.weights_from is not None:
            assert plan.niche_of(d.weights_from) == plan.niche_of(d.member)
        if d.hyperparameters_from is not None:
            assert plan.delta_of(d.hyperparameters_from) >= plan.delta_of(d.member)
        for name, value in d.hyperparameters.items():
            assert SPACE[name].low <= value <= SPACE[name].high


def test_perturbation_stays_within_bounds_and_moves_a_discount_by_its_horizon() -> None:
    bounds = Range(1e-4, 1e-3)
    assert bounds.times(5e-4, 1.25) == pytest.approx(6.25e-4)
    assert bounds.times(9e-4, 1.25) == 1e-3
    assert bounds.times(1.1e-4, 0.8) == 1e-4
    discount = Range(0.9, 0.999, of_rest=True)
    assert discount.times(0.99, 0.8) == pytest.approx(0.992)
    assert discount.times(0.99, 1.25) == pytest.approx(0.9875)
    assert Range(-2.0, -0.5).times(-1.0, 1.25) == -1.25
    assert Range(0.0, 1.0).times(0.0, 1.25) == 0.0  # a bonus that is off stays off


def test_weakest_of_five_is_tried_with_other_hyperparameters_and_keeps_what_does_not_harm() -> None:
    fit = np.array([1.0, 0.2, NAN, 0.5, 0.7])
    present = beginnings(FIVE)
    proposal = propose(FIVE, 4, fit, present, seed=1)
    assert proposal is not None
    trial = proposal.decision
    assert (trial.member, trial.kind, trial.weights_from) == (1, "propose", None)
    assert trial.hyperparameters == perturb_hyperparameters(FIVE, present[1], 4, 1, 1)
    assert trial.hyperparameters["lr"] != present[1]["lr"]
    for now, kind in ((0.3, "keep"), (0.2, "keep"), (0.19, "revert"), (NAN, "revert")):
        end = conclude_trial(proposal, 5, now)
        kept = trial.hyperparameters if kind == "keep" else present[1]
        assert (end.kind, end.member, end.round, end.hyperparameters) == (kind, 1, 5, kept)
        assert not end.fresh
    assert propose(FIVE, 4, np.full(5, NAN), present, seed=1) is None


def test_proposal_goes_through_json() -> None:
    proposal = propose(FIVE, 4, np.arange(5.0), beginnings(FIVE), seed=1)
    assert proposal is not None
    assert json.loads(json.dumps(proposal.as_json())) == proposal.as_json()
    assert Proposal.from_json(proposal.as_json()) == proposal


def test_worst_expert_begins_anew_only_when_experts_have_become_alike() -> None:
    fit, present = np.array([1.0, 0.2, 0.9, 0.5, 0.7]), beginnings(FIVE)
    assert reseed(FIVE, 3, fit, present, mapd=0.25) == []
    (decision,) = reseed(FIVE, 3, fit, present, mapd=0.2499)
    assert (decision.member, decision.kind, decision.fresh) == (1, "reseed", True)
    assert (decision.weights_from, decision.hyperparameters_from) == (None, 0)
    assert decision.hyperparameters == present[0]
    assert decision.cause == ("experts_alike", {"mapd": 0.2499, "threshold": 0.25})
    lineage = Lineage(FIVE, present)
    (life,) = lineage.apply([decision])
    assert (life.parent, life.lender) == (None, 0)


def test_worst_niche_of_many_members_begins_anew_as_a_whole() -> None:
    # The niche whose best is least: niche 1 (4), though niche 0 holds the least fit member.
    fit = np.array([[9.0, 1, 1, 1, 1, 1, 1, -5], [4.0] * 8, [8.0] * 8, [7.0] * 8]).ravel()
    got = reseed(POPULATION, 1, fit, beginnings(POPULATION), mapd=0.1)
    assert [d.member for d in got] == list(range(8, 16))
    assert all(d.fresh and d.weights_from is None for d in got)
    # Hyperparameters: fast members of the best of all, slow ones of the best slow one.
    assert [d.hyperparameters_from for d in got] == [0] * 4 + [20] * 4


def test_expert_that_is_no_longer_a_number_begins_anew_from_its_niche_if_it_can() -> None:
    fit = np.array([1.0, NAN, 0.9, 0.5, 0.7])
    (alone,) = restart_members(FIVE, 2, [1], fit, beginnings(FIVE), CAUSE)
    assert (alone.fresh, alone.weights_from, alone.hyperparameters_from) == (True, None, 0)
    many = np.arange(32.0)
    many[3] = NAN
    (mate,) = restart_members(POPULATION, 2, [3], many, beginnings(POPULATION), CAUSE)
    assert (mate.fresh, mate.weights_from, mate.hyperparameters_from) == (False, 7, 31)
    nobody = restart_members(FIVE, 2, range(5), np.full(5, NAN), beginnings(FIVE), CAUSE)
    assert [d.hyperparameters for d in nobody] == beginnings(FIVE)


def test_hyperparameters_outside_bounds_or_of_other_names_are_refused() -> None:
    present = beginnings(FIVE)
    present[2] = {"lr": 2.0, "discount": 0.99}
    with pytest.raises(AssertionError, match=r"lr.* of member 2 are out of bounds"):
        propose(FIVE, 1, np.zeros(5), present, 0)
    present[2] = {"lr": 0.1}
    with pytest.raises(AssertionError, match="member 2 has"):
        propose(FIVE, 1, np.zeros(5), present, 0)


def test_quarters_of_a_single_member_are_refused() -> None:
    with pytest.raises(AssertionError, match="propose, conclude_trial and reseed"):
        evolve(FIVE, 1, np.zeros(5), beginnings(FIVE), 0)


def test_lineage_and_decisions_go_through_json() -> None:
    lineage, made = three_rounds(seed=7)
    again = Lineage.from_json(POPULATION, json.loads(json.dumps(records_of(lineage))))
    assert again.lives == lineage.lives
    assert again.hyperparameters() == lineage.hyperparameters()
    decision = made[1][3]
    assert Decision.from_json(json.loads(json.dumps(asdict(decision)))) == decision


@pytest.mark.parametrize(
    "damage",
    [
        {"id": 41},
        {"parent": 55},
        {"lender": 40},
        {"member": 32},
        {"niche": 1},
        {"kind": "founder"},
    ],
)
def test_lineage_that_is_damaged_is_refused(damage: dict[str, Any]) -> None:
    records = records_of(three_rounds(seed=7)[0])
    records[40] |= damage
    with pytest.raises(StoreError, match="lineage"):
        Lineage.from_json(POPULATION, records)


def test_lineage_of_another_population_is_refused() -> None:
    records = records_of(three_rounds(seed=7)[0])
    with pytest.raises(StoreError, match="another population"):
        Lineage.from_json(FIVE, records)
    with pytest.raises(StoreError, match="at least 32 founders"):
        Lineage.from_json(POPULATION, records[:31])


def test_two_decisions_about_one_member_are_refused() -> None:
    lineage, made = three_rounds(seed=7)
    with pytest.raises(AssertionError, match="two decisions"):
        lineage.apply([made[2][0], made[2][0]])
