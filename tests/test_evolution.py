"""MF-PBT acted out: 32 toy members for three rounds by hand, one per niche, faults, resuming."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_mfpbt import EXPECTED, FIVE, POPULATION, ROUNDS, ancestors, beginnings
from worlds import make_config

from echelon.agents.mfpbt import Cause, Decision, PopulationPlan, Range
from echelon.errors import ConfigError, StoreError, TrainingError
from echelon.population.evolution import (
    Evolution,
    RouterEvolution,
    fitness,
)
from echelon.population.measurement import draw_skills
from echelon.population.member import Noise
from echelon.population.settings import founders, plan_of, router_space
from echelon.types import Floats
from echelon.workers import Failure, Pool

NAN = math.nan
# Whose weights, as they were at first, each member has after the rounds of test_mfpbt: by hand.
ROOTS = [
    *(0, 7, 4, 0, 7, 0, 6, 7),
    *(9, 9, 15, 9, 15, 13, 14, 15),
    *(16, 17, 18, 16, 20, 21, 16, 20),
    *(24, 25, 28, 24, 28, 29, 24, 28),
]


class Toy:
    """A member whose weights say whose they were at first, and who trained them since."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.weights = np.full(50, float(member))
        self.trail: list[int] = []
        self.hyperparameters: dict[str, float] = {}
        self.skill: Floats | None = None
        self.noise: list[Noise] = []
        self.broken = ""

    def train(self) -> None:
        self.trail.append(self.member)

    def facts(self) -> dict[str, Any]:
        return vars(self)

    def take_facts(self, facts: dict[str, Any]) -> None:
        vars(self).update(facts)

    def break_down(self, method: str) -> None:
        self.broken = method

    def copy_state(self) -> dict[str, Any]:
        self._fail("copy_state")
        return {"weights": self.weights, "trail": self.trail}

    def take_state(self, state: dict[str, Any]) -> None:
        self._fail("take_state")
        self.weights, self.trail = state["weights"], state["trail"]

    def perturb(self, noise: Noise) -> None:
        self.noise.append(noise)
        self.weights += noise.rate * np.random.default_rng(noise.seed).standard_normal(50)

    def set_hyperparameters(self, values: dict[str, float]) -> None:
        self.hyperparameters = values

    def restart(self, skill: Floats) -> None:
        self.weights, self.trail, self.skill = np.full(50, -1.0), [], skill

    def _fail(self, method: str) -> None:
        if self.broken == method:
            raise TrainingError(f"planted in {method}")


IN_BOUNDS = "train.lr_actor=1e-3"
"""The default rate is that of flat agents."""


def _evolution(plan: PopulationPlan, seed: int = 7, **settings: Any) -> Evolution:
    given = draw_skills(plan.niches, 10, seed)
    return Evolution(plan, beginnings(plan), seed, skills=given, **settings)


def _round(evolution: Evolution, crew: Pool[Toy], fit: Floats, mapd: float = 1.0) -> list[Decision]:
    """Train, evolve, and carry it out."""
    crew.call(Toy.train, range(evolution.plan.members))
    decisions = evolution.step(fit, mapd)
    assert evolution.apply(decisions, crew) == {}
    return decisions


def _all(crew: Pool[Toy]) -> list[dict[str, Any]]:
    return list(crew.call(Toy.facts, range(crew.size)).values())


def _told(decisions: Sequence[Decision]) -> list[tuple[int, str, int | None, int | None]]:
    return [(d.member, d.kind, d.weights_from, d.hyperparameters_from) for d in decisions]


@pytest.mark.parametrize("workers", [1, 2])
def test_three_rounds_of_32_members_copy_what_was_worked_out_by_hand(workers: int) -> None:
    evolution = _evolution(POPULATION)
    with Pool(Toy, 32, workers) as crew:
        made = [_round(evolution, crew, fit) for fit in ROUNDS]
        facts = _all(crew)
    assert [_told(decisions) for decisions in made] == EXPECTED
    assert [int(toy["weights"][0]) for toy in facts] == ROOTS
    assert all(root // 8 == member // 8 for member, root in enumerate(ROOTS))
    assert facts[3]["trail"] == [0, 3, 0]  # copied 0, lent it back to 0, copied it again
    assert facts[5]["trail"] == [0, 3, 5]
    assert facts[11]["trail"] == [9, 8, 8]
    assert facts[2]["trail"] == [4, 2, 2]
    for member, toy in enumerate(facts):
        life = evolution.lineage.living(member)
        chain = [life, *(evolution.lineage.lives[i] for i in ancestors(evolution.lineage, life.id))]
        path = [next(x.member for x in chain if x.round < r) for r in (1, 2, 3)]
        assert toy["trail"] == path, member
        assert chain[-1].member == ROOTS[member]
        expected = {} if life.kind == "founder" else dict(life.hyperparameters)
        assert toy["hyperparameters"] == expected
        assert toy["skill"] is None


def test_same_seed_same_population_and_resuming_in_the_middle_changes_nothing() -> None:
    straight, resumed = _evolution(POPULATION), _evolution(POPULATION)
    with Pool(Toy, 32) as crew, Pool(Toy, 32) as after:
        for fit in ROUNDS[:2]:
            _round(straight, crew, fit)
        resumed.restore(json.loads(json.dumps(straight.state())))
        after.call_each(Toy.take_facts, dict(enumerate(_all(crew))))
        for evolution, host in ((straight, crew), (resumed, after)):
            _round(evolution, host, ROUNDS[2], mapd=0.1)
            evolution.apply(evolution.quarantine([9]), host)
        for one, other in zip(_all(crew), _all(after), strict=True):
            np.testing.assert_equal(one, other)
    assert straight.state() == resumed.state()
    other = _evolution(POPULATION, seed=8)
    other.step(ROUNDS[0], 1.0)
    made = [life.hyperparameters for life in other.lineage.lives[32:]]
    assert made != [life.hyperparameters for life in straight.lineage.lives[32 : len(made) + 32]]


def test_copied_weights_mutate_each_by_its_own_chance_and_sources_do_not() -> None:
    evolution = _evolution(POPULATION, mutation_rate=0.1)
    with Pool(Toy, 32) as crew:
        _round(evolution, crew, ROUNDS[0])
        facts = _all(crew)
    copied = {m for m, _, source, _ in EXPECTED[0] if source is not None}
    assert {m for m, toy in enumerate(facts) if toy["noise"]} == copied
    assert {rate for toy in facts for rate, _ in toy["noise"]} == {0.1}
    assert len({seed for toy in facts for _, seed in toy["noise"]}) == len(copied)
    assert facts[3]["weights"].std() > 0.05
    assert (facts[0]["weights"] == 0.0).all()


def test_sources_are_read_before_anything_is_overwritten() -> None:
    evolution = _evolution(POPULATION)
    values = dict(evolution.hyperparameters()[0])
    swap = [
        Decision(1, a, "exploit", b, b, values, Cause("planted", {})) for a, b in ((0, 1), (1, 0))
    ]
    with Pool(Toy, 32) as crew:
        assert evolution.apply(swap, crew) == {}
        assert [toy["weights"][0] for toy in _all(crew)[:2]] == [1.0, 0.0]


def test_a_member_that_fails_is_named_and_so_is_one_whose_source_failed() -> None:
    evolution = _evolution(POPULATION)
    with Pool(Toy, 32) as crew:
        crew.call(Toy.break_down, [0], "copy_state")
        crew.call(Toy.break_down, [8], "take_state")
        failed = evolution.apply(evolution.step(ROUNDS[0], 1.0), crew)
        facts = _all(crew)
    assert sorted(failed) == [0, 3, 8]
    assert all(isinstance(failure, Failure) for failure in failed.values())
    assert "member 0: planted in copy_state" in str(failed[3].error)
    assert facts[3]["weights"][0] == 3.0
    assert facts[3]["hyperparameters"] == facts[8]["hyperparameters"] == {}
    assert facts[2]["weights"][0] == 4.0  # the others go on


def test_one_member_per_niche_tries_keeps_and_reverts() -> None:
    evolution = _evolution(FIVE)
    first = dict(evolution.hyperparameters()[4])
    with Pool(Toy, 5) as crew:
        tried = _round(evolution, crew, np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
        assert _told(tried) == [(4, "propose", None, None)]
        assert crew.call(Toy.facts, [4])[4]["hyperparameters"] == tried[0].hyperparameters != first
        fell = _round(evolution, crew, np.array([5.0, 4.0, 3.0, 2.0, 0.5]))
        assert [d.kind for d in fell] == ["revert", "propose"]
        assert [d.member for d in fell] == [4, 4]
        assert fell[0].hyperparameters == first
        second = dict(fell[1].hyperparameters)
        assert (
            crew.call(Toy.facts, [4])[4]["hyperparameters"] == second
        )  # the later of the two holds
        rose = _round(evolution, crew, np.array([5.0, 4.0, 3.0, 2.0, 3.5]))
        assert [(d.member, d.kind) for d in rose] == [(4, "keep"), (3, "propose")]
        assert evolution.hyperparameters()[4] == second
        assert [toy["trail"] for toy in _all(crew)] == [[m] * 3 for m in range(5)]


def test_under_the_threshold_the_worst_begins_anew_and_the_next_weakest_tries() -> None:
    evolution = _evolution(FIVE)
    before = evolution.skills.copy()
    with Pool(Toy, 5) as crew:
        _round(evolution, crew, np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
        decisions = _round(evolution, crew, np.array([5.0, 4.0, 3.0, 2.0, 1.5]), mapd=0.2)
        facts = _all(crew)
    assert [(d.member, d.kind) for d in decisions] == [(4, "keep"), (4, "reseed"), (3, "propose")]
    assert decisions[1].fresh
    assert decisions[1].hyperparameters_from == 0
    assert (facts[4]["weights"] == -1.0).all()
    assert facts[4]["hyperparameters"] == evolution.hyperparameters()[0]
    assert facts[4]["skill"].tolist() == evolution.skills[4].tolist()
    assert np.abs(before @ evolution.skills[4]).max() < 1e-12  # of none before it, its own included
    assert (evolution.skills[:4] == before[:4]).all()
    assert all(toy["skill"] is None for toy in facts[:4])


def test_no_diversity_known_begins_nobody_anew() -> None:
    evolution = _evolution(FIVE)
    assert [d.kind for d in evolution.step(np.arange(5.0), NAN)] == ["propose"]
    assert evolution.step(np.full(5, NAN), NAN)[0].kind == "revert"
    assert evolution.pending is None  # nothing is known that a trial could be held against


def test_without_evolution_only_what_is_alike_begins_anew() -> None:
    evolution = _evolution(FIVE, enabled=False)
    assert evolution.step(np.arange(5.0), 0.5) == []
    assert [(d.member, d.kind) for d in evolution.step(np.arange(5.0), 0.1)] == [(0, "reseed")]
    many = _evolution(POPULATION, enabled=False)
    assert many.step(ROUNDS[0], 0.5) == []


def test_the_lineage_counts_rounds_of_training_and_decides_alike() -> None:
    alone, fourth = _evolution(FIVE), _evolution(FIVE, every=4)
    for fit in (np.arange(5.0), np.arange(5.0) + 1.0):
        assert alone.step(fit, 1.0) == fourth.step(fit, 1.0)
    rounds = [life.round for life in alone.lineage.lives]
    assert [life.round for life in fourth.lineage.lives] == [4 * r for r in rounds]
    assert rounds[5:] == [1, 2, 2]
    config = make_config(IN_BOUNDS, "trainer.training_schedule.population.freq=7")
    assert Evolution.from_config(config, 0).every == 7


def test_a_quarantined_expert_begins_anew_and_its_trial_ends() -> None:
    evolution = _evolution(FIVE)
    evolution.step(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), 1.0)
    assert evolution.pending is not None
    before = evolution.skills.copy()
    (decision,) = evolution.quarantine([4])
    assert (decision.member, decision.kind, decision.fresh) == (4, "reseed", True)
    assert decision.hyperparameters == evolution.hyperparameters()[0]
    assert evolution.pending is None
    assert (evolution.skills[4] != before[4]).any()
    assert evolution.lineage.living(4).parent is None


def test_quarantine_before_any_fitness_copies_a_mate_and_keeps_the_niche_skill() -> None:
    evolution = _evolution(POPULATION)
    before = evolution.skills.copy()
    assert _told(evolution.quarantine([0, 9])) == [(0, "reseed", 1, 1), (9, "reseed", 8, 1)]
    assert (evolution.skills == before).all()
    evolution.quarantine(range(8, 16))
    assert (evolution.skills[1] != before[1]).any()
    assert (np.delete(evolution.skills, 1, 0) == np.delete(before, 1, 0)).all()


def test_a_niche_of_which_no_fitness_is_known_gives_fresh_weights_but_its_own_skill() -> None:
    evolution = _evolution(POPULATION)
    fit = np.arange(32.0)
    fit[8:16] = NAN
    evolution.step(fit, 1.0)
    before = evolution.skills.copy()
    (decision,) = evolution.quarantine([9])
    assert decision.fresh
    with Pool(Toy, 32) as crew:
        evolution.apply([decision], crew)
        assert crew.call(Toy.facts, [9])[9]["skill"].tolist() == before[1].tolist()
    assert (evolution.skills == before).all()


def test_alike_niches_begin_the_worst_anew_as_a_whole_and_breed_the_others() -> None:
    evolution = _evolution(POPULATION)
    with Pool(Toy, 32) as crew:
        decisions = _round(evolution, crew, ROUNDS[0], mapd=0.1)
        facts = _all(crew)
    # The best of niche 1 is fit for 4, the least of 10, 4, 7 and 12.
    assert [d.member for d in decisions if d.fresh] == list(range(8, 16))
    rest = [told for told in _told(decisions) if told[0] // 8 != 1]
    assert rest == [told for told in EXPECTED[0] if told[0] // 8 != 1]
    assert all(toy["skill"].tolist() == evolution.skills[1].tolist() for toy in facts[8:16])


def test_state_of_another_population_is_refused() -> None:
    state = _evolution(FIVE).state()
    with pytest.raises(StoreError, match="another population"):
        _evolution(POPULATION).restore(state)
    with pytest.raises(StoreError, match="skills"):
        _evolution(FIVE).restore(state | {"skills": [[1.0]]})
    spaced = PopulationPlan(5, 1, (1,), {"lr": FIVE.space["lr"]})
    other = Evolution(spaced, [{"lr": 1e-3}] * 5, 7, skills=draw_skills(5, 10, 7))
    with pytest.raises(StoreError, match=r"expected hyperparameters \['lr'\]"):
        other.restore(state)


def test_fitness_is_the_mean_less_the_penalised_deviation() -> None:
    found = fitness(np.array([[1.0, 3.0], [2.0, 2.0], [5.0, NAN], [math.inf, 0.0]]), 0.5)
    np.testing.assert_array_equal(found, [1.5, 2.0, NAN, NAN])
    assert float(fitness(np.array([1.0, 3.0]), 2.0)) == 0.0


def test_founders_are_the_configuration_and_spread_inside_the_bounds_beyond_the_first() -> None:
    config = make_config(
        "experts.n_experts=2",
        "trainer.evolution.members_per_niche=4",
        "train.lr_actor=3e-4",
        "train.gamma=0.97",
    )
    plan = plan_of(config)
    found = founders(config, plan, seed=1)
    assert found[0] == found[4]
    assert found[0] == {
        "lr": 3e-4,
        "target_entropy": -1.0,
        "mi_reward_weight": 0.5,
        "gamma": 0.97,
    }
    for name, bounds in plan.space.items():
        values = [values[name] for values in found]
        assert all(bounds.low <= value <= bounds.high for value in values)
        assert name == "lr" or len(set(values)) == 7  # half of the rates end at the bound
    # Of the discount the horizon is spread: 1 − 0.97 by at most 2.
    assert all(0.94 <= values["gamma"] <= 0.985 for values in found)
    assert found == founders(config, plan, seed=1)
    assert found != founders(config, plan, seed=2)


def test_switches_do_not_evolve() -> None:
    assert sorted(plan_of(make_config()).space) == [
        "gamma",
        "lr",
        "mi_reward_weight",
        "target_entropy",
    ]
    off = make_config("experts.mi_reward_weight=0", "expert.entropy=0.2")
    assert sorted(plan_of(off).space) == ["gamma", "lr"]
    assert sorted(router_space(make_config())) == ["kl_lambda", "router_lr"]
    assert sorted(router_space(make_config("meta_router.kl_lambda=0"))) == ["router_lr"]
    capped = router_space(make_config("meta_router.kl_lambda_max=0.15"))["kl_lambda"]
    assert (capped.low, capped.high) == (0.01, 0.15)
    fixed = make_config("trainer.evolution.enabled=false", "train.lr_actor=1e-5")
    assert router_space(fixed) == {}
    evolution = Evolution.from_config(fixed, seed=3)
    assert evolution.hyperparameters()[4]["lr"] == 1e-5  # outside the bounds, which do not matter
    assert evolution.skills.shape == (5, 10)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.lr_actor=1e-5", r"train.lr_actor = 1e-05 .*evolution\.lr = \[0.0003, 0.003\]"),
        ("train.gamma=0.999", r"train.gamma = 0.999 .*evolution\.gamma = \[0.8, 0.995\]"),
        ("expert.target_entropy=-3", r"expert.target_entropy = -3 .* \[-2, -0.2\]"),
        ("experts.mi_reward_weight=2", r"experts.mi_reward_weight = 2 .* \[0.05, 1\]"),
        ("meta_router.lr=0.01", r"meta_router.lr = 0.01 .*evolution.router_lr = \[0.0001, 0.001\]"),
        ("meta_router.kl_lambda=0.005", r"meta_router.kl_lambda = 0.005 .* \[0.01, 0.2\]"),
    ],
)
def test_what_would_begin_outside_its_bounds_is_refused_by_key_and_value(
    setting: str, said: str
) -> None:
    config = make_config(IN_BOUNDS, setting)
    with pytest.raises(ConfigError, match=said):
        Evolution.from_config(config, seed=0)
    with pytest.raises(ConfigError, match=said):
        RouterEvolution.from_config(config, seed=0)
    off = make_config(IN_BOUNDS, setting, "trainer.evolution.enabled=false")
    assert Evolution.from_config(off, seed=0).plan.members == 5
    assert RouterEvolution.from_config(off, seed=0).step(1.0, 100) == []


def _router(seed: int = 7) -> RouterEvolution:
    bounds = {"router_lr": Range(1e-4, 1e-3), "kl_lambda": Range(0.01, 0.2)}
    return RouterEvolution(bounds, {"router_lr": 3e-4, "kl_lambda": 0.1}, seed)


def test_router_tries_keeps_and_reverts_by_the_fitness_of_the_hierarchy() -> None:
    router = _router()
    first = dict(router.values)
    (tried,) = router.step(1.0, learned=1000)
    assert (tried.kind, *tried.cause) == ("propose", "router_on_trial", {"fitness": 1.0})
    for name, value in first.items():
        assert router.values[name] / value == pytest.approx(0.8) or router.values[
            name
        ] / value == pytest.approx(1.25)
    second = dict(router.values)
    kept, tried = router.step(1.0, learned=2000)  # the same fitness has not fallen
    assert (kept.kind, dict(kept.hyperparameters), tried.kind) == ("keep", second, "propose")
    assert router.values == dict(tried.hyperparameters) != second
    undone, tried = router.step(0.9, learned=3000)
    assert (undone.kind, dict(undone.hyperparameters)) == ("revert", second)
    (undone,) = router.step(NAN, learned=4000)  # nothing is known, and nothing tried
    assert (undone.kind, router.values, router.pending) == ("revert", second, None)


def test_a_trial_goes_on_until_the_router_has_learned() -> None:
    router = _router()
    router.step(1.0, learned=1000)
    tried = dict(router.values)
    assert router.step(0.1, learned=1000) == []
    assert router.values == tried
    undone, _ = router.step(0.1, learned=1024)
    assert undone.kind == "revert"


def test_router_settings_stay_within_their_bounds() -> None:
    router = _router()
    for n in range(1, 200):
        router.step(float(n), learned=n)  # ever fitter: every change is kept
        assert 1e-4 <= router.values["router_lr"] <= 1e-3
        assert 0.01 <= router.values["kl_lambda"] <= 0.2


def test_a_resumed_router_evolves_on_alike_and_refuses_other_settings() -> None:
    whole, half = _router(), _router()
    whole.step(1.0, 10)
    half.restore(json.loads(json.dumps(whole.state())))
    for n, fit in ((20, 0.5), (30, 2.0)):
        assert whole.step(fit, n) == half.step(fit, n)
    assert whole.values == half.values
    other = RouterEvolution({}, {}, 7)
    with pytest.raises(StoreError, match="of the router"):
        other.restore(whole.state())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("members_per_niche=3",), "members_per_niche = 3 does not divide.*Take 4 members"),
        (("members_per_niche=6",), "members_per_niche = 6 does not divide.*Take 4 or 8 members"),
        (("members_per_niche=12", "subpopulations=2", "paces=[1,5]"), "niche = 12.*Take 8 or 16"),
        (("members_per_niche=1", "subpopulations=2", "paces=[1,5]"), "niche = 1 .*Take 8 members"),
        (("members_per_niche=8", "subpopulations=2", "paces=[5,1]"), r"paces = \[5, 1\]: each"),
        (("gamma=[-3,2]",), r"trainer\.evolution\.gamma\.0: .*found -3"),
        (("gamma=[0.9,1]",), r"trainer\.evolution\.gamma\.1: .*less than 1 \(found 1\)"),
        (("lr=[0,0.001]",), r"trainer\.evolution\.lr\.0: .*greater than 0 \(found 0\)"),
        (("router_lr=[-1,0.001]",), r"trainer\.evolution\.router_lr\.0: .*found -1"),
        (("mi_reward_weight=[-1,1]",), r"trainer\.evolution\.mi_reward_weight\.0: .*found -1"),
        (("kl_lambda=[-1,1]",), r"trainer\.evolution\.kl_lambda\.0: .*found -1"),
    ],
)
def test_evolution_that_cannot_be_is_refused_with_key_and_value(
    settings: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(*(f"trainer.evolution.{setting}" for setting in settings))
