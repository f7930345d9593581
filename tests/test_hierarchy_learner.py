"""The hierarchy as a learner: rounds, resuming, settings, and members that fail.

Processes that die are in `test_hierarchy_deaths.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hierarchies import SMALL, assert_same, everything, make_learner, trained
from markets import CONFIGS
from torch import Tensor
from worlds import make_config, make_world

from echelon.agents.pretraining import Origin, read_encoder, write_encoder
from echelon.backtest.run import run_backtest
from echelon.config import load_config, override_config
from echelon.config.hierarchy import ExpertsConfig
from echelon.envs import World
from echelon.errors import ConfigError, DataError, StoreError, TrainingError
from echelon.ops.diversity import next_kl_weight
from echelon.population.expert_reward import ActionSamples, BonusMetrics
from echelon.population.learner import HierarchyLearner
from echelon.population.measurement import (
    own_returns,
    parts_of,
    routed_weights,
    row_weights,
    window_sharpes,
)
from echelon.population.member import Member
from echelon.population.record import PopulationHistory
from echelon.population.settings import refuse_hierarchy
from echelon.runs.checkpoint import load_checkpoint
from echelon.runs.metrics import is_timing, read_metrics
from echelon.training.run import Training, Worlds, encoder_hash, ready, resume_point

TIMED = ("collect", "experts", "router", "population", "router_updates", "steps_per_second")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(n_rows=200, n_assets=3, window=6)


def test_a_round_does_what_is_due_and_counts_every_step(world: World, tmp_path: Path) -> None:
    learner = make_learner(world, tmp_path)
    first = learner.train_once()
    assert learner.steps == 3 * 16
    assert first["time/collect"] > 0.0
    assert first["time/experts"] == first["time/router"] == 0.0
    # Nothing is told of phases that have not come.
    assert not [name for name in first if name.startswith(("losses/", "population/", "router/"))]
    for _ in range(3):
        told = learner.train_once()
    assert first.keys() < told.keys()
    assert min(told[f"time/{phase}"] for phase in ("experts", "router", "population")) > 0.0
    assert learner.steps == 4 * 3 * 16 + 32 * 2
    assert told["router/decisions"] == 32
    assert 0.0 <= told["population/mapd"] <= 1.0
    assert told["losses/critic"] > 0.0
    history = PopulationHistory.read(tmp_path)
    assert [one.round for one in history.rounds] == [4]
    assert len(history.lineage) >= 3
    learner.close()


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("lora.enabled=true",),
        ("risk.cvar_constraint=true", "experts.responsibility_by=router"),
    ],
)
def test_a_resumed_population_goes_on_bit_for_bit(
    world: World, tmp_path: Path, more: tuple[str, ...]
) -> None:
    whole = trained(make_learner(world, tmp_path / "whole", *more), 9)
    half = trained(make_learner(world, tmp_path / "half", *more), 5)
    tensors, state = everything(half)
    half.close()
    resumed = make_learner(world, tmp_path / "again", *more)
    tensors_now, state_now = half_state(tensors, state)
    resumed.restore(tensors_now, state_now)
    assert_same(trained(resumed, 4), whole)
    whole.close()
    resumed.close()


def half_state(
    tensors: dict[str, Tensor], state: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    metrics = dict.fromkeys(("time/collect",), 0.0) | state["metrics"]
    return tensors, state | {"metrics": metrics}


def test_an_expert_that_is_no_longer_a_number_is_reseeded_and_the_rest_goes_on(
    world: World, tmp_path: Path
) -> None:
    learner = trained(make_learner(world, tmp_path), 3)
    before = learner.evolution.skills.copy()
    member = learner.members.pool.members[1]
    with torch.no_grad():
        member.actor.last.weight.fill_(float("nan"))
    trained(learner, 3)
    kinds = [(event.kind, event.who) for event in learner._events]
    assert ("quarantine", "expert 1") in kinds
    assert ("reseed", "expert 1") in kinds
    after = learner.evolution.skills
    assert (after[1] != before[1]).any()
    assert (after[0] == before[0]).all()
    weights = learner.weights()
    assert all(value.isfinite().all() for value in weights.values() if value.is_floating_point())
    learner.close()


def test_skills_are_told_apart_by_what_the_present_lives_did(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = trained(make_learner(world, tmp_path), 3)
    member = learner.members.pool.members[1]
    with torch.no_grad():
        member.actor.last.weight.fill_(float("nan"))
    seen: list[ActionSamples] = []
    learn = learner.bonus.learn

    def spy(actions: ActionSamples, skills: Tensor, updates: int) -> BonusMetrics:
        seen.append(actions)
        return learn(actions, skills, updates)

    monkeypatch.setattr(learner.bonus, "learn", spy)
    learner.train_once()
    assert learner.members.ask(Member.skill_number) == {0: 0, 1: 4, 2: 2}
    count = torch.bincount(seen[0].source, minlength=3)
    # Of its four rounds in the ring one is the new expert's.
    assert count[1] / count[0] == pytest.approx(0.25, abs=0.03)
    assert count[2] / count[0] == pytest.approx(1.0, abs=0.08)
    learner.close()


def test_a_loaded_hierarchy_trades_as_the_one_that_was_trained(
    world: World, tmp_path: Path
) -> None:
    learner = trained(make_learner(world, tmp_path), 4)
    config, span = learner.config, world.span("valid")
    ours = run_backtest(learner.policy(), world, span, config)
    loaded = HierarchyLearner.load_policy(config, learner.weights(), world.x.shape[2], 7, "seed 7")
    theirs = run_backtest(loaded, world, span, config)
    np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-9)
    assert loaded.record is not None
    assert set(loaded.record.in_charge.tolist()) <= {0, 1, 2, 3}
    learner.close()


def test_the_routers_settings_are_tried_and_put_into_it(world: World, tmp_path: Path) -> None:
    learner = trained(make_learner(world, tmp_path), 4)
    values = learner.router_evolution.values
    assert learner.router.ppo.lr == pytest.approx(values["router_lr"])
    usual = learner.config.meta_router
    # Evolution multiplies what adaptation has made of λ, here in one rollout.
    spread = learner.router.incentive.usage.entropy()
    limits = {"floor": usual.entropy_floor, "most": usual.kl_lambda_max}
    adapted = next_kl_weight(usual.kl_lambda, spread, 3, **limits)
    change = values["kl_lambda"] / usual.kl_lambda
    assert adapted < usual.kl_lambda
    assert learner.router.incentive.weight == pytest.approx(adapted * change)
    assert (values["router_lr"], values["kl_lambda"]) != (usual.lr, usual.kl_lambda)
    assert ("propose", "router") in [(event.kind, event.who) for event in learner._events]
    learner.close()
    still = trained(make_learner(world, tmp_path, "trainer.evolution.enabled=false"), 4)
    assert still.router.ppo.lr == usual.lr
    still.close()


def test_experts_that_begin_alike_have_time_to_become_different(
    world: World, tmp_path: Path
) -> None:
    more = ("trainer.diversity_threshold=1", "trainer.diversity_patience=8")
    learner = trained(make_learner(world, tmp_path, *more), 12)
    # The population is looked at in rounds 4, 8 and 12: alike in each, and only the second counts.
    assert [event.round for event in learner._events if event.kind == "reseed"] == [8]
    learner.close()


def test_a_gap_between_the_windows_is_gone_through(tmp_path: Path) -> None:
    # As in the folds of a walk-forward: own books come to the validation's first bar through bars
    # that belong to no window.
    splits = {"train": range(5, 120), "valid": range(126, 190)}
    world = make_world(n_rows=200, n_assets=3, window=6, splits=splits)
    learner = trained(make_learner(world, tmp_path), 4)
    run_backtest(learner.policy(), world, world.span("valid"), learner.config)
    record = learner.policy().record
    assert record is not None
    assert len(record.in_charge) == 63
    learner.close()


def test_rows_go_to_whom_the_router_finds_probable() -> None:
    nobody = math.nan
    found = np.array([[0.6, 0.2, 0.2], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [nobody, nobody, nobody]])
    weights = routed_weights(found[:, :2], floor=0.1)
    # 0.9 · 2 · (3/4, 1/4) + 0.1; where it wants cash, and where it was not asked, all are alike.
    np.testing.assert_allclose(weights, [[1.45, 1.0, 1.0, 1.0], [0.55, 1.0, 1.0, 1.0]], rtol=1e-6)


def test_responsibility_by_the_router_begins_when_it_has_learned(
    world: World, tmp_path: Path
) -> None:
    more = ("experts.responsibility_by=router",)
    plain, routed = (
        make_learner(world, tmp_path / name, *some) for name, some in (("a", ()), ("b", more))
    )
    # The router learns after the experts' phase of round 4: theirs of round 6 is the first to ask.
    for rounds, same in ((4, True), (2, False)):
        trained(plain, rounds)
        trained(routed, rounds)
        left, right = plain.weights(), routed.weights()
        assert all(torch.equal(left[name], right[name]) for name in left) == same
    weights, _ = routed._whose_bars()
    np.testing.assert_allclose(weights.mean(axis=0), 1.0, rtol=1e-5)
    plain.close()
    routed.close()


def test_without_information_bonus_there_is_nothing_to_pay(world: World, tmp_path: Path) -> None:
    learner = trained(make_learner(world, tmp_path, "experts.mi_reward_weight=0"), 4)
    assert learner._metrics["charts/information"] == 0.0
    learner.close()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.round_steps=2", r"trainer\.round_steps = 2 "),
        ("expert.updates_per_step=0.001", r"expert\.updates_per_step = 0\.001 "),
        ("experts.sharing.sequence_steps=40", r"experts\.sharing\.sequence_steps = 40 "),
        ("train.lr_actor=0.1", r"train\.lr_actor = 0\.1 is outside of trainer\.evolution\.lr"),
        ("experts.sharing.buffer_size=3", r"experts\.sharing\.buffer_size = 3 .*at least 36\."),
        ("experts.sharing.fresh_steps=10", r"experts\.sharing\.fresh_steps = 10 .*at least 12\."),
        ("train.episode_steps=2", r"train\.episode_steps = 2 "),
        ("train.total_env_steps=48", r"total_env_steps = 48 ends before the experts .*round 2 "),
        ("train.total_env_steps=144", r"total_env_steps = 144 ends before the router .*round 4 "),
        ("expert.learning_starts=1000000", r"expert\.learning_starts = 1,000,000"),
        (
            "trainer.training_schedule.experts.freq=90000",
            r"training_schedule\.experts\.freq = 90,000",
        ),
        (
            "trainer.training_schedule.router.freq=90000",
            r"training_schedule\.router\.freq = 90,000",
        ),
    ],
)
def test_settings_that_cannot_learn_are_refused_before_the_encoder_is_trained(
    world: World, tmp_path: Path, override: str, said: str
) -> None:
    config = make_config(*SMALL, override)
    seed = tmp_path / "seeds" / "7"
    with pytest.raises(ConfigError, match=said):
        ready(config, Worlds(world, world, "data"), seed, lambda: False)
    assert list(tmp_path.iterdir()) == []


def test_a_first_lesson_with_too_few_bars_behind_it_is_refused() -> None:
    more = ("trainer.training_schedule.experts={freq: 1, steps: 16}", "expert.learning_starts=1")
    refuse_hierarchy(make_config(*SMALL, *more, "trainer.round_steps=12"))
    with pytest.raises(ConfigError, match=r"sequence_steps = 3 is more than the 2 bars"):
        refuse_hierarchy(make_config(*SMALL, *more, "trainer.round_steps=8"))


def test_the_first_lessons_come_where_the_refusal_says(world: World, tmp_path: Path) -> None:
    # One step more than is refused: the router still learns, in the round that passes the end.
    learner = make_learner(world, tmp_path, "train.total_env_steps=145")
    while learner.steps < learner.config.train.total_env_steps:
        learner.train_once()
    assert (learner.round, learner.router.decisions) == (4, 32)
    learner.close()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("meta_router.kl_lambda=0.3", r"meta_router\.kl_lambda \(0\.3\) is above .*\(0\.2\)"),
        ("meta_router.horizons=[]", r"meta_router\.horizons: .*at least 1"),
        ("trainer.evolution.members_per_niche=6", r"trainer\.evolution\.members_per_niche = 6"),
    ],
)
def test_absurd_settings_are_no_configuration(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(*SMALL, override)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical-tuned", "demo-hierarchy"])
def test_shipped_hierarchies_can_be_trained_but_not_in_too_few_steps(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.train.algo == "HIERARCHY"
    refuse_hierarchy(config)
    with pytest.raises(ConfigError, match="ends before the experts learn for the first time"):
        refuse_hierarchy(override_config(config, ["train.total_env_steps=100"]))


@pytest.mark.parametrize("how", ["flipped bit", "cut short"])
def test_a_stopped_run_whose_replay_is_damaged_is_not_resumed_and_the_file_named(
    world: World, tmp_path: Path, how: str
) -> None:
    config = make_config(*SMALL, "pretrain.enabled=false", "logging.tensorboard=false")
    place = tmp_path / "seeds" / "7"
    training = Training(config, Worlds(world, world, "data"), place, 7)
    assert training.run(should_stop=lambda: True).ending == "stopped"
    point = resume_point(place)
    assert point is not None
    path = point / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    spans = json.loads(data[8 : 8 + size])
    if how == "flipped bit":
        data[8 + size + spans["replay.1.reward"]["data_offsets"][0]] ^= 1
    else:
        del data[8 + size + spans["replay.1.reward"]["data_offsets"][0] :]
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged") as caught:
        resume_point(place)
    assert str(path) in str(caught.value)
    # Asked for by name it is refused too.
    with pytest.raises(StoreError, match="damaged"):
        Training(config, Worlds(world, world, "data"), place, 7, resume=point)


def test_the_routers_steps_are_those_of_the_decisions_it_made(world: World, tmp_path: Path) -> None:
    # 40 decisions are asked for and two rollouts of 32 made, each of two bars.
    asked = "trainer.training_schedule.router={freq: 1, steps: 40}"
    learner = trained(make_learner(world, tmp_path, asked), 1)
    assert learner.router.decisions == 64
    assert learner.steps == 3 * 16 + 64 * 2
    learner.close()


def test_the_history_says_what_befell_after_the_last_evolution(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = trained(make_learner(world, tmp_path), 5)
    assert not caplog.records
    member = learner.members.pool.members[1]
    with torch.no_grad():
        member.actor.last.weight.fill_(float("nan"))
    learner.train_once()
    history = PopulationHistory.read(tmp_path)
    assert history.events[-1].round == 6
    assert history.events[-1].kind == "reseed"
    assert history.skills.tolist() == learner.evolution.skills.tolist()
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert told.getMessage().startswith("seed 7, round 6: quarantine, expert 1, error member 1: ")
    # A reading for each phase of the experts, of evolutions only one.
    assert [one.round for one in history.readings] == [2, 4, 6]
    assert [one.round for one in history.rounds] == [4]
    assert history.readings[1].mapd == history.rounds[0].mapd
    learner._event("worker_lost", "members [0]", "worker_lost", {})
    learner.close()
    assert PopulationHistory.read(tmp_path).events[-1].kind == "worker_lost"


def test_a_round_has_the_hyperparameters_that_its_fitness_was_measured_under(
    world: World, tmp_path: Path
) -> None:
    learner = make_learner(world, tmp_path)
    begun = learner.evolution.hyperparameters()
    trained(learner, 4)
    assert learner.evolution.pending is not None  # one of them has others by now
    assert [dict(values) for values in learner._rounds[0].hyperparameters] == begun
    assert learner.evolution.hyperparameters() != begun
    learner.close()


def test_a_closed_learner_leaves_no_replay_behind(world: World, tmp_path: Path) -> None:
    learner = trained(make_learner(world, tmp_path, "experts.sharing.on_disk=true"), 2)
    assert list((tmp_path / "tables" / "replay").glob("*.bin"))
    learner.close()
    assert not list(tmp_path.rglob("*.bin"))


def test_the_router_learns_where_no_expert_did(world: World) -> None:
    parts = parts_of(world, 0.25)
    whole = world.span("train")
    ours, theirs = parts.experts.span("train"), parts.router.span("train")
    assert (ours.start, theirs.stop) == (whole.start, whole.stop)
    assert ours.stop == theirs.start
    assert len(theirs) == int(0.25 * len(whole))
    assert parts.experts.x is world.x


def test_a_window_too_short_to_share_is_refused() -> None:
    short = make_world(n_rows=14, n_assets=2, window=6)
    with pytest.raises(DataError, match=r"meta_router\.window_share"):
        parts_of(short, 0.01)


def test_own_returns_in_pieces_are_those_of_one_long_run(world: World, tmp_path: Path) -> None:
    learner = trained(make_learner(world, tmp_path, "state.include_pos=false"), 2)
    policy, config = learner._experts()[0], learner.config
    part = learner.parts.experts
    span = part.span("train")
    found = own_returns(policy, part, config)
    assert np.isfinite(found[span.start : span.stop - 1]).all()
    assert np.isnan(found[: span.start]).all()
    long = run_backtest(policy, part, span, config).returns
    np.testing.assert_allclose(found[span.start : span.stop - 1], long, atol=1e-9)
    learner.close()


def test_row_weights_have_a_mean_of_one_over_the_experts(world: World) -> None:
    rng = np.random.default_rng(0)
    returns = rng.normal(size=(3, len(world.times)))
    experts = ExpertsConfig(
        responsibility_bars=5, responsibility_temperature=0.5, responsibility_floor=0.05
    )
    weights = row_weights(returns, world, experts)
    np.testing.assert_allclose(weights.mean(axis=0), 1.0, rtol=1e-5)
    span = world.span("train")
    assert weights[:, span.start + 5 : span.stop - 1].std() > 0.1
    assert (weights[:, : span.start] == 1.0).all()


def test_fitness_windows_are_equal_pieces_each_from_cash(world: World, tmp_path: Path) -> None:
    learner = make_learner(world, tmp_path)
    policy = learner._experts()[0]
    sharpes = window_sharpes(policy, world, learner.config)
    assert sharpes.shape == (2,)
    span = world.span("valid")
    steps = (len(span) - 1) // 2
    first = run_backtest(policy, world, range(span.start, span.start + steps + 1), learner.config)
    assert sharpes[0] == pytest.approx(first.measures["sharpe_annual"])
    many = override_config(learner.config, ["trainer.evolution.windows=1000"])
    with pytest.raises(DataError, match=r"trainer\.evolution\.windows"):
        window_sharpes(policy, world, many)
    learner.close()


def test_all_members_failing_stops_the_run(world: World, tmp_path: Path) -> None:
    learner = trained(make_learner(world, tmp_path), 3)
    for member in learner.members.pool.members.values():
        with torch.no_grad():
            member.actor.last.weight.fill_(float("nan"))
    with pytest.raises(TrainingError):
        trained(learner, 3)
    learner.close()


def test_two_trainings_of_one_seed_differ_in_nothing_that_is_not_marked_as_timing(
    world: World, tmp_path: Path
) -> None:
    more = ("pretrain.enabled=false", "logging.tensorboard=false", "train.total_env_steps=300")
    config = make_config(*SMALL, *more, "train.log_interval_steps=50")
    logs, results = [], []
    for name in "ab":
        place = tmp_path / name / "seeds" / "7"
        Training(config, Worlds(world, world, "data"), place, 7).run()
        logs.append(read_metrics(place))
        results.append(json.loads((place / "result.json").read_text()))
    unmarked = [name for name in logs[0].columns if not is_timing(name)]
    marked = set(logs[0].columns) - set(unmarked)
    assert marked == {"seconds", *(f"time/{what}" for what in TIMED)}
    assert {"losses/critic", "router/entropy", "valid/sharpe_annual"} < set(unmarked)
    assert logs[0].columns == logs[1].columns
    assert logs[0].select(unmarked).equals(logs[1].select(unmarked))
    left, right = ({k: v for k, v in r.items() if not is_timing(k)} for r in results)
    assert left == right
    assert results[0].keys() - left.keys() == {"seconds"}


ALIKE = ("trainer.diversity_threshold=1.0", "trainer.diversity_patience=1")
"""Whoever the experts are, they are too much alike: each evolution begins one of them anew."""


@pytest.mark.parametrize("rounds", [4, 5])
def test_no_expert_begins_anew_where_none_learns_again(
    world: World, tmp_path: Path, rounds: int
) -> None:
    # Experts learn in rounds 2, 4, 6; the evolution is due in round 4.
    measured = trained(make_learner(world, tmp_path / "a", *ALIKE), rounds)
    assert any(life.kind == "reseed" for life in measured.evolution.lineage.lives)
    total = f"train.total_env_steps={measured.steps}"
    learner = trained(make_learner(world, tmp_path / "b", *ALIKE, total), rounds)
    assert not any(life.kind == "reseed" for life in learner.evolution.lineage.lives)
    assert learner.evolution.round == 0


def test_a_postponed_evolution_is_made_when_training_goes_on(world: World, tmp_path: Path) -> None:
    longer = trained(make_learner(world, tmp_path / "a", *ALIKE), 4)
    total = f"train.total_env_steps={longer.steps}"
    ended = trained(make_learner(world, tmp_path / "b", *ALIKE, total), 4)
    tensors, state = ended.state()
    resumed = make_learner(world, tmp_path / "c", *ALIKE)
    resumed.restore(tensors, json.loads(json.dumps(state)))
    assert_same(trained(resumed, 2), trained(longer, 2))


def test_a_checkpoint_is_refused_with_another_encoder(world: World, tmp_path: Path) -> None:
    more = ("train.total_env_steps=400", "pretrain.enabled=false")
    config = make_config(*SMALL, "train.algo=SAC", *more, "train.checkpoint_every_steps=100")
    worlds = Worlds(world, world, "data")
    place = tmp_path / "seeds" / "7"
    calls: list[int] = []
    training = Training(config, worlds, place, 7)
    training.run(should_stop=lambda: bool(calls.append(0)) or len(calls) > 2)
    point = resume_point(place)
    assert point is not None
    assert load_checkpoint(point).state["encoder"] == encoder_hash(config, place)
    Training(config, worlds, place, 7, resume=point)
    # The same origin, other weights: as of one that was made again by another version.
    origin = Origin.from_config(config, world.x.shape[2], "data", config.seed)
    stored = read_encoder(tmp_path, origin)
    assert stored is not None
    other = {name: value + 1.0 for name, value in stored[0].items()}
    write_encoder(tmp_path, origin, other, dict(stored[1]))
    with pytest.raises(StoreError, match=r"another encoder.*start a new run"):
        Training(config, worlds, place, 7, resume=point)
