"""The single expert: what it remembers is what happened, and a stop changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import make_config, make_world

from echelon.agents.expert import ExpertLearner, SACLearner, Starts, draw_evenly
from echelon.agents.expert_core import WeightPolicy
from echelon.agents.learner import learner_class
from echelon.backtest.run import run_backtest
from echelon.config import Config
from echelon.envs import World
from echelon.envs.act import Holdings, weights_of_actions
from echelon.errors import ConfigError, DataError, TrainingError
from echelon.models.encoders import build_encoder
from echelon.models.expert import ExpertActor, ExpertObs
from echelon.rng import stream
from echelon.training.run import Worlds, load_policy, ready

UPDATE_METRICS = {
    *("losses/critic", "losses/actor", "losses/critic_gradient_norm"),
    *("losses/actor_gradient_norm", "charts/value", "charts/learning_rate"),
}
SAC_METRICS = {"losses/temperature", "charts/temperature", "charts/entropy"}
SMALL = (
    *("window=6", "model.d_model=8", "model.n_layers=1", "expert.hidden=8", "train.algo=SAC"),
    *("train.books=4", "train.rollout_steps=5", "train.episode_steps=12", "train.gamma=0.9"),
    *("train.lr_actor=0.003", "train.lr_critic=0.003", "reward.scale=100", "lora.rank=2"),
    *("expert.batch_size=16", "expert.buffer_size=200", "expert.learning_starts=20"),
    *("expert.updates_per_step=0.25", "expert.warmup_updates=0", "lora.every_updates=2"),
    *("lora.refresh_updates=10", "lora.lr=0.01"),
)
LORA = (*SMALL, "lora.enabled=true")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(n_rows=120, n_assets=3, window=6)


def make_learner(
    world: World, *overrides: str, seed: int = 7, tables: Path | None = None
) -> ExpertLearner:
    config = make_config(*(overrides or SMALL))
    torch.manual_seed(3)
    encoder = build_encoder(config, world.x.shape[2])
    return learner_class(config)(config, world, seed, encoder, tables)


def trained(learner: ExpertLearner, rounds: int) -> ExpertLearner:
    for _ in range(rounds):
        learner.train_once()
    return learner


def everything(learner: ExpertLearner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, state = learner.state()
    return {name: value.clone() for name, value in tensors.items()}, state


def same(left: ExpertLearner, right: ExpertLearner) -> bool:
    (a, state_a), (b, state_b) = everything(left), everything(right)
    return (
        state_a == state_b
        and a.keys() == b.keys()
        and all(torch.equal(a[name], b[name]) for name in a)
    )


def test_a_transition_is_what_the_book_saw_did_and_got(world: World) -> None:
    learner = make_learner(world)
    before, held = learner.collector.books.row.copy(), learner.collector.books.holdings()
    learner.train_once()
    arrays, _ = learner.replay.state()
    first = {name: values[:4] for name, values in arrays.items()}
    assert first["row"].tolist() == before.tolist()
    assert np.array_equal(first["weights"], held.weights)
    # The next step of the same book begins where this one ended.
    later = {name: values[4:8] for name, values in arrays.items()}
    ended = first["ended"] > 0
    assert np.array_equal(first["next_weights"][~ended], later["weights"][~ended])
    assert (later["row"] == first["row"] + 1)[~ended].all()


def test_episodes_end_on_time_and_are_bootstrapped(world: World) -> None:
    learner = trained(make_learner(world), 10)
    arrays, _ = learner.replay.state()
    assert set(np.unique(arrays["ended"])) == {0, 2}, "cut off, never ruined"
    per_book = arrays["ended"].reshape(-1, 4)
    for book in per_book.T:
        gaps = np.diff(np.flatnonzero(book))
        assert set(gaps) <= {12}


@pytest.mark.parametrize("settings", [SMALL, LORA, (*SMALL, "train.algo=TD3")])
def test_an_interrupted_run_equals_one_that_was_not(
    world: World, settings: tuple[str, ...]
) -> None:
    whole = trained(make_learner(world, *settings), 12)
    part = trained(make_learner(world, *settings), 5)
    tensors, state = everything(part)
    resumed = make_learner(world, *settings)
    resumed.restore(tensors, state)
    trained(resumed, 7)
    assert same(resumed, whole)
    assert resumed.core.updates > 20


def test_another_seed_is_another_run(world: World) -> None:
    assert not same(trained(make_learner(world), 3), trained(make_learner(world, seed=8), 3))


def test_every_log_line_has_the_same_names(world: World) -> None:
    for algo in ("SAC", "TD3"):
        learner = make_learner(world, *SMALL, f"train.algo={algo}")
        lines = [learner.train_once() for _ in range(4)]
        assert len({frozenset(line) for line in lines}) == 1
        assert set(lines[0]) > UPDATE_METRICS
        assert lines[-1]["losses/critic"] > 0.0
        assert all(np.isfinite(value) for line in lines for value in line.values())


def test_the_adapter_and_the_table_move_and_the_base_does_not(world: World, tmp_path: Path) -> None:
    learner = make_learner(world, *LORA, tables=tmp_path)
    assert learner.networks.adapter is not None
    base = {k: v.clone() for k, v in learner.networks.adapter.encoder.state_dict().items()}
    rows = np.array(world.span("train"))
    first = learner.table.look(rows)
    trained(learner, 12)
    after = learner.networks.adapter.encoder.state_dict()
    moved = {name for name in base if not torch.equal(base[name], after[name])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert any("expert" in name for name in moved)
    assert any("target" in name for name in moved)
    assert learner.table.version > 1
    assert not torch.equal(first, learner.table.look(rows))
    assert learner.networks.adapter.norm > 0.0
    # What serves has no adapters, and computes what the adapted encoder did at the last refresh.
    assert not any("lora" in name for name in learner.serving.state_dict())


def test_the_table_is_what_the_adapted_encoder_gives(world: World) -> None:
    learner = trained(make_learner(world, *LORA), 9)
    assert learner.networks.adapter is not None
    learner.networks.adapter.serve(learner.serving, learner.table)
    rows = np.array(world.span("train"))
    with torch.no_grad():
        direct = learner.networks.adapter.encode(rows)
    assert torch.allclose(learner.table.look(rows), direct, atol=1e-6)


def test_without_adapters_the_encoder_never_moves(world: World) -> None:
    learner = make_learner(world)
    before = {k: v.clone() for k, v in learner.serving.state_dict().items()}
    trained(learner, 8)
    after = learner.serving.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert learner.table.version == 1


@pytest.mark.parametrize("settings", [SMALL, LORA])
def test_the_loaded_policy_trades_as_the_learners(world: World, settings: tuple[str, ...]) -> None:
    learner = trained(make_learner(world, *settings), 10)
    config, span = learner.config, world.span("valid")
    own = run_backtest(learner.policy(), world, span, config)
    weights = {name: value.clone() for name, value in learner.weights().items()}
    loaded = run_backtest(load_policy(config, weights, world.x.shape[2], 7), world, span, config)
    assert np.array_equal(own.value, loaded.value)
    assert own.kind == "weights"
    assert own.value[-1] != own.value[0]


def test_a_policy_that_draws_differs_from_its_middle(world: World) -> None:
    learner = trained(make_learner(world), 6)
    config, span = learner.config, world.span("valid")
    middle = run_backtest(learner.policy(), world, span, config)
    drawn = load_policy(with_draws(config), learner.weights(), world.x.shape[2], 7)
    first, again = (run_backtest(drawn, world, span, config) for _ in range(2))
    assert not np.array_equal(first.value, middle.value)
    assert np.array_equal(first.value, again.value)


def with_draws(config: Config) -> Config:
    return config.model_copy(
        update={"eval": config.eval.model_copy(update={"deterministic": False})}
    )


def test_a_loss_that_is_no_number_stops_before_the_weights_change(world: World) -> None:
    learner = trained(make_learner(world), 4)
    before = {k: v.clone() for k, v in learner.weights().items()}
    learner.replay.columns["reward"][:] = np.nan
    with pytest.raises(TrainingError, match="diverged"):
        trained(learner, 2)
    after = learner.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_actions_by_lot_have_the_density_of_an_even_draw() -> None:
    free = torch.tensor([[True, True, False]]).expand(20_000, 3)
    drawn = draw_evenly(free, torch.Generator().manual_seed(0))
    assert drawn.action[:, 2].abs().max() == 0.0
    assert drawn.action[:, :2].abs().max() < 1.0
    assert torch.allclose(torch.tanh(drawn.raw), drawn.action, atol=1e-6)
    assert float(drawn.action[:, 0].var()) == pytest.approx(1 / 3, rel=0.03)
    assert torch.allclose(drawn.log_prob, torch.full((20_000,), 2 * np.log(0.5)).float())
    want = np.log(0.5) * 2 + np.log1p(-drawn.action[:, :2].double().square().numpy()).sum(1)
    assert drawn.raw_log_prob.numpy() == pytest.approx(want, abs=1e-4)


def test_starts_are_spread_over_all_stretches_and_cross_none() -> None:
    starts = Starts((range(10, 40), range(60, 160)), 20, stream(1, "x"))
    first, last = starts.draw(20_000)
    assert (last - first == 20).all()
    inside = ((first >= 10) & (last < 40)) | ((first >= 60) & (last < 160))
    assert inside.all()
    assert (first.min(), first.max(), last.max()) == (10, 139, 159)
    share = (first < 40).mean()
    assert share == pytest.approx(10 / 90, abs=0.01)
    assert starts.whole == range(10, 160)


def test_starts_without_a_length_go_to_the_end_of_their_stretch() -> None:
    starts = Starts((range(10, 40), range(60, 160)), None, stream(1, "x"))
    first, last = starts.draw(5_000)
    assert set(last) == {39, 159}
    assert (first < last).all()
    assert {38, 158} <= set(first)


def test_an_episode_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"train\.episode_steps=30 does not fit"):
        Starts((range(10, 40),), 30, stream(1, "x"))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("expert.learning_starts=100000", r"leaves no update"),
        ("train.books=300", r"expert\.buffer_size = 200 cannot hold a bar of 300 books"),
        ("lora.refresh_updates=1000", r"the adapter would never reach the policy"),
    ],
)
def test_training_that_could_learn_nothing_is_refused_before_pretraining(
    setting: str, told: str, world: World, tmp_path: Path
) -> None:
    config = make_config(*LORA, "train.total_env_steps=2000", setting)
    with pytest.raises(ConfigError, match=told):
        ready(config, Worlds(world, world, "data"), tmp_path / "seeds" / "7", lambda: False)
    assert not list(tmp_path.iterdir()), "nothing was made"


@pytest.mark.parametrize("setting", ["expert.hidden=10", "expert.batch_size=201"])
def test_settings_that_cannot_be_used_are_refused_with_the_configuration(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.split("=")[0].split(".")[1]):
        make_config(*SMALL, setting)


def test_expert_that_does_not_see_its_book_is_asked_once_a_row() -> None:
    world = make_world(n_rows=60, n_assets=3, window=6)
    config = make_config(
        *("window=6", "model.d_model=8", "model.n_layers=1", "expert.hidden=8"),
        *("state.include_pos=false", "state.include_cash=false"),
    )
    torch.manual_seed(5)
    encoder = build_encoder(config, world.x.shape[2])
    actor = ExpertActor(8, 8, config.state)
    asked: list[int] = []
    actor.register_forward_hook(lambda _net, _given, found: asked.append(len(found[0])))
    policy = WeightPolicy(encoder, actor, config, 1)
    policy.start(world, range(10, 50))
    assert sum(asked) == 40
    row = np.array([12, 30, 12])
    allowed = np.ones((3, 3, 3), dtype=np.bool_)
    rich = Holdings(np.zeros((3, 3), np.float32), np.ones(3, np.float32), allowed, np.ones(3))
    full = Holdings(
        np.full((3, 3), 1 / 3, np.float32), np.zeros(3, np.float32), allowed, np.ones(3)
    )
    found = policy.decide(row, rich)
    np.testing.assert_array_equal(found, policy.decide(row, full))
    np.testing.assert_array_equal(found[0], found[2])
    assert sum(asked) == 40, "a row was worked out again"
    with torch.no_grad():
        z = encoder(torch.from_numpy(np.array(world.x[7:31])))[[0, -1]]
        obs = ExpertObs(
            z, torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3).bool(), torch.ones(2, 3).bool()
        )
        mean, _ = actor(obs)
    expected = weights_of_actions(
        torch.tanh(mean).numpy(),
        rich.take(slice(2)),
    )
    np.testing.assert_allclose(found[:2], expected, atol=1e-6)
    keeping = WeightPolicy(encoder, actor, config, 1, keep=True)
    keeping.start(world, range(10, 50))
    with torch.no_grad():
        actor.last.weight.add_(0.5)
    for learned in (policy, keeping):  # what is kept is the encoder's, not the actor's
        learned.start(world, range(10, 50))
        assert np.abs(learned.decide(row, rich) - found).max() > 1e-3


def test_losses_are_told_from_the_first_update_on(world: World, tmp_path: Path) -> None:
    config = make_config(*SMALL, "expert.learning_starts=40")
    torch.manual_seed(3)
    learner = SACLearner(config, world, 7, build_encoder(config, world.x.shape[2]), tmp_path)
    first = learner.train_once()
    assert learner.core.updates == 0
    assert not UPDATE_METRICS & set(first)
    assert "charts/reward" in first
    while not learner.core.updates:
        told = learner.train_once()
    assert set(told) >= UPDATE_METRICS | SAC_METRICS
