"""The batched VecEnv: equal to as many single environments, and all of SB3's interface."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import InvalidAction
from learners import TRAINED, assert_learns, make_learner
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from worlds import make_config, make_world

from echelon.envs import BatchedVecEnv, TradingEnv, World
from echelon.envs.act import ActionKind
from echelon.envs.env_spec import ObservationKind
from echelon.errors import DataError, UsageError

ALL_FACES = [(a, o) for a in ("discrete", "weights") for o in ("window", "index")]


def make_vec(n_envs: int = 4, world: World | None = None, *over: str, **kwargs: Any) -> Any:
    return BatchedVecEnv(world or make_world(), make_config(*over), n_envs, **kwargs)


def make_dummy(n_envs: int = 4, world: World | None = None, *over: str, **kwargs: Any) -> Any:
    """The slow twin: as many single environments."""
    shared, config = world or make_world(), make_config(*over)
    return DummyVecEnv([lambda: Monitor(TradingEnv(shared, config, **kwargs))] * n_envs)


def hard_world() -> World:
    """Suspensions, leavers, fees, slippage, T+1: whatever can go differently."""
    rng = np.random.default_rng(8)
    shape = (60, 3)
    gone = np.zeros(shape, dtype=bool)
    gone[25:, 2] = True
    return make_world(
        tradable=rng.random(shape) > 0.2,
        member=rng.random(shape) > 0.1,
        gone=gone,
        volume_open=rng.uniform(1e3, 1e5, shape),
        slippage_model=3,
        slippage=0.01,
        participation=0.1,
        min_value=100.0,
        min_commission=1.0,
        stamp=np.full(60, 0.001),
    )


def random_actions(env: Any, rng: np.random.Generator, n_envs: int) -> np.ndarray:
    space = env.action_space
    if hasattr(space, "nvec"):
        return rng.integers(0, 3, (n_envs, len(space.nvec)))
    return rng.uniform(-1.0, 1.0, (n_envs, *space.shape)).astype(np.float32)


@pytest.mark.parametrize(("actions", "observation"), ALL_FACES)
@pytest.mark.parametrize("steps", [None, 7])
def test_batched_books_equal_single_environments_to_the_bit(
    actions: ActionKind, observation: ObservationKind, steps: int | None
) -> None:
    """Over several episodes that end and begin at different times, autoresets included."""
    kwargs: dict[str, Any] = {
        "actions": actions,
        "observation": observation,
        "episode_steps": steps,
    }
    world = hard_world()
    fast, slow = make_vec(4, world, **kwargs), make_dummy(4, world, **kwargs)
    assert fast.observation_space == slow.observation_space
    assert fast.action_space == slow.action_space
    fast.seed(11)
    slow.seed(11)
    rng = np.random.default_rng(0)
    assert_same(fast.reset(), slow.reset())
    finished = 0
    for _ in range(90):
        chosen = random_actions(fast, rng, 4)
        if actions == "discrete":
            assert np.array_equal(get_action_masks(fast), get_action_masks(slow))
        seen, reward, done, infos = fast.step(chosen)
        seen_slow, reward_slow, done_slow, infos_slow = slow.step(chosen)
        assert_same(seen, seen_slow)
        assert reward.dtype == reward_slow.dtype == np.float32
        assert np.array_equal(reward, reward_slow)
        assert np.array_equal(done, done_slow)
        for info, info_slow in zip(infos, infos_slow, strict=True):
            finished += _compare_ends(info, info_slow)
    assert finished > 6


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        assert np.array_equal(first[name], second[name]), name


def _compare_ends(info: dict[str, Any], slow: dict[str, Any]) -> bool:
    """Whether an episode ended, the same in both."""
    assert ("episode" in info) == ("episode" in slow)
    if "episode" not in info:
        assert info == {}
        return False
    assert_same(info["terminal_observation"], slow["terminal_observation"])
    assert info["TimeLimit.truncated"] == slow["TimeLimit.truncated"]
    assert info["episode"]["l"] == slow["episode"]["l"]
    assert info["episode"]["r"] == pytest.approx(slow["episode"]["r"], abs=1e-6)
    for name in ("pv", "row", "time"):
        assert info[name] == slow[name]
    for name in ("drawdown", "max_drawdown", "cvar95", "sharpe_annual"):
        assert info[name] == pytest.approx(slow[name], abs=1e-9), name
    assert info["costs"] == pytest.approx(slow["costs"]["total"])
    return True


def test_pinned_starts_put_each_book_at_its_row() -> None:
    env = make_vec(3, observation="index")
    env.set_options([{"row": 5}, {"row": 9}, {"row": 20}])
    assert env.reset()["row"].ravel().tolist() == [5.0, 9.0, 20.0]
    assert [info["row"] for info in env.reset_infos] == [5, 9, 20]
    assert env.get_attr("row") == [5, 9, 20]


def test_seed_is_honoured_and_used_once() -> None:
    first, second = make_vec(8, observation="index"), make_vec(8, observation="index")
    starts = []
    for env in (first, second):
        env.seed(3)
        starts.append([env.reset()["row"].tolist(), env.reset()["row"].tolist()])
    assert starts[0] == starts[1]
    assert starts[0][0] != starts[0][1]
    first.seed(4)
    assert first.reset()["row"].tolist() != starts[0][0]


def test_end_of_span_is_truncation_and_the_book_begins_anew() -> None:
    env = make_vec(2, split="test")
    env.reset()
    for step in range(11):
        seen, _, done, infos = env.step(np.zeros((2, 3), dtype=int))
        assert done.tolist() == [step == 10] * 2
    assert infos[0]["TimeLimit.truncated"] is True
    assert infos[0]["row"] == 59
    assert infos[0]["episode"]["l"] == 11
    assert np.array_equal(infos[0]["terminal_observation"]["x"], env.world.x[56:60])
    assert np.array_equal(seen["x"][0], env.world.x[45:49])
    assert env.get_attr("pv") == [1e6, 1e6]


def test_ruin_is_no_truncation() -> None:
    close = np.full((12, 1), 10.0)
    close[6:] = 1e-9
    world = make_world(close=close, splits={"train": range(12)}, window=1, initial_cash=1e9)
    env = make_vec(2, world, "buy_pct=1.0", random_start=False)
    env.reset()
    for _ in range(6):
        _, _, done, infos = env.step(np.array([[1], [0]]))
    assert done.tolist() == [True, False]
    assert infos[0]["TimeLimit.truncated"] is False
    assert infos[1] == {}
    assert env.get_attr("row") == [0, 6]


def test_episode_longer_than_the_first_buffer_is_measured_whole() -> None:
    world = make_world(n_rows=300, splits={"train": range(300)})
    env = make_vec(2, world, random_start=False)
    env.reset()
    rng = np.random.default_rng(1)
    values = [env.get_attr("pv")[1]]
    done = np.zeros(2, dtype=bool)
    while not done[1]:
        _, _, done, infos = env.step(rng.integers(0, 3, (2, 3)))
        if not done[1]:
            values.append(env.get_attr("pv")[1])
    values.append(infos[1]["pv"])
    assert infos[1]["episode"]["l"] == 296
    path = np.array(values)
    assert infos[1]["max_drawdown"] == pytest.approx((1 - path / np.maximum.accumulate(path)).max())
    assert infos[1]["total_return"] == pytest.approx(path[-1] / path[0] - 1)


def test_attributes_of_single_books_can_be_read_set_and_called() -> None:
    env = make_vec(3)
    env.reset()
    assert env.get_attr("render_mode") == [None] * 3
    assert env.get_attr("split", indices=[0, 2]) == ["train", "train"]
    assert env.get_attr("observation_space", 1) == [env.observation_space]
    env.set_attr("label", "mine", indices=1)
    assert env.get_attr("label", 1) == ["mine"]
    with pytest.raises(AttributeError, match="label"):
        env.get_attr("label", 0)
    assert env.has_attr("action_masks")
    assert not env.has_attr("no_such_thing")
    with pytest.raises(AttributeError):
        env.set_attr("row", 5)
    masks = env.env_method("action_masks", indices=[2])
    assert np.array_equal(masks[0], env.action_masks()[2])


def test_episode_length_and_start_of_one_book_can_be_changed() -> None:
    env = make_vec(2, random_start=False)
    env.set_attr("episode_steps", 4, indices=0)
    env.set_attr("random_start", True, indices=1)
    env.seed(0)
    env.reset()
    assert env.get_attr("episode_steps") == [4, None]
    assert env.get_attr("row")[0] == 3
    assert env.get_attr("row")[1] != 3
    ended = [env.step(np.zeros((2, 3), dtype=int))[2][0] for _ in range(8)]
    assert ended == [False, False, False, True] * 2
    with pytest.raises(DataError, match="episode_steps=99"):
        env.set_attr("episode_steps", 99)


def test_masks_are_those_of_discrete_actions_only() -> None:
    env = make_vec(2)
    env.reset()
    assert is_masking_supported(env)
    assert get_action_masks(env).tolist() == [[True, True, False] * 3] * 2
    with pytest.raises(UsageError, match="actions='discrete'"):
        make_vec(2, actions="weights").env_method("action_masks")


def test_books_report_episodes_as_a_monitor_does() -> None:
    env = make_vec(2, episode_steps=5)
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.env_is_wrapped(VecNormalize, indices=1) == [False]
    model = make_learner("A2C", env)
    # Without what a monitor reports this would warn, and warnings are errors.
    mean, deviation = evaluate_policy(model, env, n_eval_episodes=3)
    assert np.isfinite([mean, deviation]).all()


def test_wrappers_of_sb3_fit() -> None:
    with pytest.warns(UserWarning, match="already wrapped with a `Monitor`"):
        monitored = VecMonitor(make_vec(2, episode_steps=3))
    env = VecNormalize(monitored, norm_obs_keys=["x"])
    env.seed(0)
    env.reset()
    ends = [env.step(np.ones((2, 3), dtype=int)) for _ in range(3)][-1]
    assert ends[2].all()
    assert ends[3][0]["episode"]["l"] == 3


@pytest.mark.parametrize(
    ("actions", "wrong", "message"),
    [
        ("discrete", np.zeros((3, 3), dtype=int), "for each of 2 book"),
        ("discrete", np.zeros((2, 4), dtype=int), r"shape \(3,\)"),
        ("discrete", np.array([[0, 1, 2], [0, 1, 9]]), "found 9"),
        ("weights", np.full((2, 4), np.nan), "not a finite number"),
    ],
)
def test_wrong_actions_are_refused(actions: ActionKind, wrong: np.ndarray, message: str) -> None:
    env = make_vec(2, actions=actions)
    env.reset()
    with pytest.raises(InvalidAction, match=message):
        env.step(wrong)


@pytest.mark.parametrize(("name", "actions"), TRAINED)
def test_learners_train_on_many_books(name: str, actions: ActionKind) -> None:
    env = make_vec(4, hard_world(), actions=actions, episode_steps=10)
    if name == "MaskablePPO":
        _forbid_masked_actions(env)
    assert_learns(make_learner(name, env), 256)


def _forbid_masked_actions(env: Any) -> None:
    """Make the environment fail on an action that the mask forbids."""
    carry_out = env.step_async

    def step_async(actions: np.ndarray) -> None:
        allowed = env.action_masks().reshape(4, 3, 3)
        chosen = np.take_along_axis(allowed, actions[..., None], axis=-1)
        assert chosen.all(), "a masked action was chosen"
        carry_out(actions)

    env.step_async = step_async


def test_learning_twice_from_one_seed_gives_the_same_weights() -> None:
    weights = []
    for _ in range(2):
        model = make_learner("A2C", make_vec(4, episode_steps=10))
        model.learn(192)
        weights.append([p.detach().numpy().copy() for p in model.policy.parameters()])
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))


def test_example_trains_and_trades_the_validation_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_with_sb3.py"))
    result = example["main"](["--steps", "256", "--books", "2", "--output-dir", "run"])
    assert all(np.isfinite(value) for value in result.values())
    assert result["costs"] > 0
    assert (tmp_path / "run" / "ppo.zip").is_file()
    assert "validation window, up to 2017-12-29" in capsys.readouterr().out
