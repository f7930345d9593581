"""The Gymnasium environment: checkers, spaces, episodes, info, bad actions, learners on it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check
from learners import TRAINED, assert_learns, make_learner
from stable_baselines3.common.env_checker import check_env as sb3_check
from worlds import make_config, make_world

from echelon.data.calendars import periods_per_year
from echelon.envs import Action, TradingEnv, World
from echelon.envs.act import ActionKind
from echelon.envs.env_spec import ObservationKind
from echelon.errors import DataError, UsageError
from echelon.ops import measures

HOLD, BUY, SELL = (int(a) for a in Action)


def make_env(world: World | None = None, *overrides: str, **kwargs: Any) -> TradingEnv:
    return TradingEnv(world or make_world(), make_config(*overrides), **kwargs)


def intraday_world(**changes: Any) -> World:
    """Four sessions of 48 five-minute bars, as Shanghai has them, with T+1."""
    day = np.datetime64("2020-01-06T09:30", "us") + np.arange(48) * np.timedelta64(5, "m")
    times = np.concatenate([day + np.timedelta64(k, "D") for k in range(4)])
    year = periods_per_year("XSHG", "5min")
    starts = np.arange(192) % 48 == 0
    return make_world(
        n_rows=192,
        times=times,
        new_session=starts,
        t_plus_one=True,
        periods_per_year=year,
        **changes,
    )


def same(first: Any, second: Any) -> bool:
    """Whether two observations are equal to the bit."""
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) for name in first
    )


ALL_FACES = [(a, o) for a in ("discrete", "weights") for o in ("window", "index")]


@pytest.mark.parametrize(("actions", "observation"), ALL_FACES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_both_checkers_accept_every_face(
    actions: ActionKind, observation: ObservationKind, split: str
) -> None:
    env = make_env(split=split, actions=actions, observation=observation)
    with warnings.catch_warnings():
        # The window has three axes and features no bounds: neither is an image, and neither is
        # wrong. Any other remark fails the test.
        warnings.filterwarnings("ignore", ".*observation (space )?x is an image.*")
        warnings.filterwarnings("ignore", ".*minimal resolution for an image.*")
        warnings.filterwarnings("ignore", ".*(minimum|maximum) value is -?infinity.*")
        sb3_check(env)
        gymnasium_check(
            make_env(split=split, actions=actions, observation=observation),
            skip_render_check=True,  # nothing is drawn
        )
    observed, _ = env.reset(seed=0)
    assert env.observation_space.contains(observed)


def test_spaces_follow_world_and_state() -> None:
    world = make_world(n_assets=3, n_features=2)
    space = make_env(world).observation_space
    assert {name: part.shape for name, part in space.items()} == {
        "x": (4, 3, 2),
        "present": (3,),
        "weights": (3,),
        "cash": (1,),
    }
    bare = make_env(world, "state.include_pos=false", "state.include_cash=false")
    assert set(bare.observation_space.spaces) == {"x", "present"}
    index = make_env(world, observation="index").observation_space
    assert set(index.spaces) == {"row", "weights", "cash"}
    assert make_env(world).action_space == gymnasium.spaces.MultiDiscrete([3, 3, 3])
    assert make_env(world, actions="weights").action_space.shape == (4,)


def test_observation_is_the_window_up_to_the_row_and_the_holdings() -> None:
    world = make_world(present=np.arange(180).reshape(60, 3) % 7 > 0)
    env = make_env(world)
    seen, info = env.reset(options={"row": 10})
    assert np.array_equal(seen["x"], world.x[7:11])
    assert np.array_equal(seen["present"], world.present[10])
    assert seen["weights"].tolist() == [0.0, 0.0, 0.0]
    assert seen["cash"].tolist() == [1.0]
    assert (info["row"], info["time"]) == (10, world.times[10].item())
    seen, *_ = env.step(np.array([BUY, HOLD, HOLD]))
    assert np.array_equal(seen["x"], world.x[8:12])
    assert seen["weights"][0] == pytest.approx(0.2, abs=0.01)
    assert seen["weights"].sum() + seen["cash"][0] == pytest.approx(1.0, abs=1e-6)


def test_index_observation_gives_the_row_exactly() -> None:
    env = make_env(observation="index")
    seen, _ = env.reset(options={"row": 17})
    assert seen["row"].dtype == np.float32
    assert seen["row"].tolist() == [17.0]


def test_observation_belongs_to_the_caller() -> None:
    env = make_env()
    seen, _ = env.reset(options={"row": 5})
    for part in seen.values():
        part[...] = 0
    again, _ = env.reset(options={"row": 5})
    assert np.array_equal(again["x"], env.world.x[2:6])
    assert again["cash"][0] == 1.0


def test_reset_honours_its_seed() -> None:
    env, twin = make_env(), make_env()
    starts = [env.reset(seed=7)[1]["row"], *(env.reset()[1]["row"] for _ in range(20))]
    again = [twin.reset(seed=7)[1]["row"], *(twin.reset()[1]["row"] for _ in range(20))]
    assert starts == again
    assert len(set(starts)) > 5
    assert [env.reset(seed=s)[1]["row"] for s in range(20)] != [starts[0]] * 20


def test_training_starts_anywhere_and_evaluation_at_the_first_row() -> None:
    world = make_world()
    rows = {make_env(world).reset(seed=s)[1]["row"] for s in range(300)}
    assert rows == set(range(3, 35))  # 35, the last row of the split, has no bar ahead
    for split, first in (("valid", 36), ("test", 48)):
        assert {make_env(world, split=split).reset(seed=s)[1]["row"] for s in range(9)} == {first}
    pinned = make_env(world, random_start=False)
    assert {pinned.reset(seed=s)[1]["row"] for s in range(9)} == {3}


def test_episode_of_fixed_length_fits_into_the_split_wherever_it_starts() -> None:
    env = make_env(episode_steps=30)
    rows = {env.reset(seed=s)[1]["row"] for s in range(100)}
    assert rows == {3, 4, 5}
    steps = 0
    truncated = False
    while not truncated:
        *_, terminated, truncated, _ = env.step(np.zeros(3, dtype=int))
        assert not terminated
        steps += 1
    assert steps == 30


def test_training_takes_the_episode_length_of_the_configuration() -> None:
    world = make_world()
    assert make_env(world, "train.episode_steps=9").episode_steps == 9
    assert make_env(world, "train.episode_steps=9", split="test").episode_steps is None
    assert make_env(world, "train.episode_steps=9", episode_steps=5).episode_steps == 5
    with pytest.raises(DataError, match="episode_steps=99, but an episode takes 1 to 32 steps"):
        make_env(world, episode_steps=99)


def test_evaluation_runs_the_whole_split_and_is_truncated_at_its_end() -> None:
    env = make_env(split="test")
    env.reset()
    rows, ends = [], []
    for _ in range(11):
        *_, terminated, truncated, info = env.step(np.zeros(3, dtype=int))
        rows.append(info["row"])
        ends.append((terminated, truncated))
    assert rows == list(range(49, 60))
    assert ends == [(False, False)] * 10 + [(False, True)]
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(np.zeros(3, dtype=int))


def test_ruin_terminates_and_is_not_truncation() -> None:
    close = np.full((12, 1), 10.0)
    close[6:] = 1e-9
    world = make_world(close=close, splits={"train": range(12)}, window=1)
    env = make_env(world, actions="weights", random_start=False)
    env.reset()
    ended = []
    for _ in range(6):
        *_, terminated, truncated, info = env.step(np.array([1.0, -1.0]))
        ended.append((terminated, truncated))
    # e⁸ : 1 for the asset leaves 0.03 % in cash: nearly all is lost, which is no ruin.
    assert not any(ended[-1])
    assert info["pv"] == pytest.approx(335, rel=0.02)
    assert info["max_drawdown"] > 0.999
    everything = make_world(close=close, splits={"train": range(12)}, window=1, initial_cash=1e9)
    env = TradingEnv(everything, make_config("buy_pct=1.0"), random_start=False)
    env.reset()
    for _ in range(6):
        *_, terminated, truncated, info = env.step(np.array([BUY]))
    assert (terminated, truncated) == (True, False)
    with pytest.raises(ResetNeeded):
        env.step(np.array([HOLD]))
    env.reset()
    assert env.pv == 1e9


def test_info_tells_fills_costs_and_value_worked_out_by_hand() -> None:
    # 5 bp a side, BUY at the next open, 10; marked at its close, 11; SELL half at the open after.
    world = make_world(
        close=[[9.0], [11.0], [12.0], [13.0]],
        open=[[9.0], [10.0], [12.0], [13.0]],
        initial_cash=1000.0,
        splits={"train": range(4)},
        window=1,
    )
    env = make_env(world, random_start=False)
    env.reset()
    *_, info = env.step(np.array([BUY]))
    shares = 200.0 / 1.0005 / 10.0
    assert info["fills"] == [
        {"symbol": "S0", "side": "buy", "shares": pytest.approx(shares), "price": 10.0}
    ]
    fee = shares * 10.0 * 0.0005
    assert info["costs"]["step"] == {
        "commission": pytest.approx(fee),
        "stamp": 0.0,
        "slippage": 0.0,
    }
    assert info["pv"] == pytest.approx(800.0 + shares * 11.0)
    assert info["rejected"] == []
    _, reward, *_, info = env.step(np.array([SELL]))
    half = shares / 2
    assert info["fills"][0]["side"] == "sell"
    assert info["fills"][0]["shares"] == pytest.approx(half)
    value = 800.0 + half * 12.0 * 0.9995 + half * 12.0
    assert info["pv"] == pytest.approx(value)
    assert reward == pytest.approx(value / (800.0 + shares * 11.0) - 1.0)
    assert info["costs"]["total"]["commission"] == pytest.approx(fee + half * 12.0 * 0.0005)
    assert info["costs"]["step"]["commission"] == pytest.approx(half * 12.0 * 0.0005)


def test_info_measures_agree_with_the_series_of_values() -> None:
    env = make_env(split="train", random_start=False)
    rng = np.random.default_rng(3)
    env.reset()
    values = [env.pv]
    for _ in range(32):
        *_, info = env.step(rng.integers(0, 3, 3))
        values.append(info["pv"])
        returns = np.array(values[1:]) / np.array(values[:-1]) - 1.0
        assert info["drawdown"] == pytest.approx(measures.drawdown_series(returns)[-1])
        assert info["max_drawdown"] == pytest.approx(measures.max_drawdown(returns))
        assert info["cvar95"] == pytest.approx(measures.cvar(returns))
        if len(returns) > 1:
            assert info["sharpe_annual"] == pytest.approx(measures.sharpe_annual(returns, 252))
    assert env.reset()[1]["max_drawdown"] == 0.0


def test_annualisation_follows_the_calendar_of_five_minute_bars() -> None:
    # 244 sessions of 4 hours: 48 bars each.
    assert periods_per_year("XSHG", "5min") == 244 * 48
    env = make_env(intraday_world(), random_start=False)
    env.reset()
    returns = []
    for k in range(20):
        before = env.pv
        *_, info = env.step(np.full(3, BUY if k == 0 else HOLD))
        returns.append(info["pv"] / before - 1.0)
    per_bar = np.mean(returns) / np.std(returns, ddof=1)
    assert info["sharpe_annual"] == pytest.approx(per_bar * np.sqrt(11712))


def test_t_plus_one_rejects_a_sale_within_the_session_and_says_so() -> None:
    env = make_env(intraday_world(), random_start=False)
    env.reset(options={"row": 10})
    env.step(np.array([BUY, HOLD, HOLD]))
    *_, info = env.step(np.array([SELL, HOLD, HOLD]))
    assert info["rejected"] == [{"symbol": "S0", "reason": "T_PLUS_ONE", "filled": 0.0}]
    for _ in range(36):
        env.step(np.zeros(3, dtype=int))
    *_, info = env.step(np.array([SELL, HOLD, HOLD]))
    assert info["row"] == 49
    assert info["fills"][0]["side"] == "sell"


def test_forbidden_actions_are_rejected_with_a_reason_and_never_crash() -> None:
    shape = (60, 4)
    tradable, member, gone = np.ones((3, *shape), dtype=bool)
    tradable[:, 0] = False
    member[:, 1] = False
    gone[:, [0, 1, 3]] = False
    world = make_world(n_assets=4, tradable=tradable, member=member, gone=gone)
    env = make_env(world, random_start=False)
    env.reset()
    assert env.action_masks().reshape(4, 3)[:, BUY].tolist() == [False, False, False, True]
    *_, info = env.step(np.full(4, BUY))
    reasons = {r["symbol"]: r["reason"] for r in info["rejected"]}
    assert reasons == {"S0": "SUSPENDED", "S1": "NOT_MEMBER", "S2": "DELISTED"}
    assert [f["symbol"] for f in info["fills"]] == ["S3"]
    env.reset()
    *_, info = env.step(np.full(4, SELL))
    assert info["fills"] == []
    assert info["pv"] == world.initial_cash


@pytest.mark.parametrize("actions", ["discrete", "weights"])
@pytest.mark.parametrize("seed", range(6))
def test_observations_stay_in_their_space_whatever_is_done(actions: ActionKind, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gone = np.zeros((300, 3), dtype=bool)
    gone[200:, 1] = True
    world = make_world(
        n_rows=300,
        seed=seed,
        tradable=rng.random((300, 3)) > 0.1,
        gone=gone,
        commission=0.003,
        min_commission=5.0,
        dividend=np.where(rng.random((300, 3)) > 0.95, 1.0, 0.0),
        splits={"train": range(300)},
    )
    env = make_env(world, "buy_pct=1.0", actions=actions, random_start=False)
    seen, _ = env.reset()
    assert seen in env.observation_space
    env.action_space.seed(seed)
    over = False
    while not over:
        seen, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert seen in env.observation_space
        assert np.isfinite(reward)
        over = terminated or truncated


def test_masks_are_flat_and_ordered_by_asset() -> None:
    env = make_env(random_start=False)
    env.reset()
    assert env.action_masks().tolist() == [True, True, False] * 3
    env.step(np.array([HOLD, BUY, HOLD]))
    assert env.action_masks().tolist() == [True, True, False, True, True, True, True, True, False]
    with pytest.raises(UsageError, match="actions='discrete'"):
        make_env(actions="weights").action_masks()


@pytest.mark.parametrize(
    ("actions", "action", "message"),
    [
        ("discrete", np.zeros(2, dtype=int), r"shape \(3,\).*found shape \(2,\)"),
        ("discrete", np.zeros((3, 1), dtype=int), r"found shape \(3, 1\)"),
        ("discrete", 1, r"found shape \(\)"),
        ("discrete", np.array([0.0, 1.0, np.nan]), "found numbers of type float64"),
        ("discrete", np.array([0, 3, 0]), r"0 \(HOLD\), 1 \(BUY\) or 2 \(SELL\).*found 3"),
        ("discrete", np.array([0, -1, 0]), "found -1"),
        ("discrete", [[1], [1, 2], 3], "must be an array"),
        ("weights", np.zeros(3), r"4 scores.*shape \(4,\).*found shape \(3,\)"),
        ("weights", np.array([0, 0, np.nan, 0]), "not a finite number"),
        ("weights", np.array([0, 0, np.inf, 0]), "not a finite number"),
        ("weights", np.array(["a", "b", "c", "d"]), "not a finite number"),
    ],
)
def test_action_outside_the_space_is_refused_and_changes_nothing(
    actions: ActionKind, action: Any, message: str
) -> None:
    env = make_env(actions=actions, random_start=False)
    env.reset()
    with pytest.raises(InvalidAction, match=message):
        env.step(action)
    assert (env.row, env.pv) == (3, 1e6)


def test_scores_beyond_the_bounds_count_as_the_bounds() -> None:
    env = make_env(actions="weights", random_start=False)
    env.reset()
    wide, *_ = env.step(np.array([5.0, -3.0, 0.0, 0.5]))
    env.reset()
    cut, *_ = env.step(np.array([1.0, -1.0, 0.0, 0.5]))
    assert same(wide, cut)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "tests"}, "split='tests': expected one of train, valid, test"),
        ({"actions": "softmax"}, "actions='softmax': expected one of discrete, weights"),
        ({"observation": "rows"}, "observation='rows': expected one of window, index"),
    ],
)
def test_unknown_argument_is_named_with_what_is_known(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_env(**arguments)


@pytest.mark.parametrize("row", [2, 35, 3.5, "a"])
def test_start_outside_the_split_is_refused(row: Any) -> None:
    with pytest.raises(UsageError, match="expected a whole number from 3 to 34"):
        make_env().reset(options={"row": row})


def test_unknown_reset_option_is_refused() -> None:
    with pytest.raises(UsageError, match="begin: unknown"):
        make_env().reset(options={"begin": 3})


def test_environment_neither_prints_nor_writes(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = make_env()
    env.reset(seed=0)
    env.step(np.array([BUY, SELL, HOLD]))
    env.close()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("actions", ["discrete", "weights"])
def test_everything_up_to_a_row_is_the_same_whatever_comes_after_it(actions: ActionKind) -> None:
    """A fixed policy on two worlds that agree up to row 20 and on nothing after it."""
    cut = 20
    world, other = make_world(seed=1), make_world(seed=2)
    rows = {
        name: np.concatenate([a[: cut + 1], b[cut + 1 :]]) if len(a) == 60 else a
        for name, a, b in zip(world.rows._fields, world.rows, other.rows, strict=True)
    }
    changed = make_world(seed=1, **rows)
    object.__setattr__(changed, "x", np.concatenate([world.x[: cut + 1], other.x[cut + 1 :]]))
    first, second = (make_env(w, actions=actions, random_start=False) for w in (world, changed))
    policy = torch.nn.Linear(world.x[0].size * 4 + 4, 12)
    first_seen, second_seen = first.reset()[0], second.reset()[0]
    while first.row < cut:
        assert same(first_seen, second_seen)
        chosen = []
        for env, seen in ((first, first_seen), (second, second_seen)):
            parts = np.concatenate([seen["x"].ravel(), seen["weights"], seen["cash"]])
            with torch.no_grad():
                out = policy(torch.from_numpy(parts)).tanh().numpy()
            if actions == "discrete":
                scores = np.where(env.action_masks(), out[:9], -9.0).reshape(3, 3)
                chosen.append(scores.argmax(axis=1))
            else:
                chosen.append(out[:4])
        assert np.array_equal(*chosen)
        first_seen, *first_result = first.step(chosen[0])
        second_seen, *second_result = second.step(chosen[1])
        assert first_result == second_result
    assert same(first_seen, second_seen)
    third, fourth = first.step(chosen[0])[0], second.step(chosen[1])[0]
    assert not same(third, fourth), "the worlds should differ after the cut"


class Masked(gymnasium.Wrapper):
    """Fails on an action that the mask forbids."""

    def step(self, action: Any) -> Any:
        allowed = self.env.unwrapped.action_masks().reshape(-1, 3)
        assert allowed[np.arange(len(action)), action].all(), "a masked action was chosen"
        return self.env.step(action)


@pytest.mark.parametrize("bars", ["daily", "5min"])
@pytest.mark.parametrize(("name", "actions"), TRAINED)
def test_learners_train_on_one_book(name: str, actions: ActionKind, bars: str) -> None:
    make = make_world if bars == "daily" else intraday_world
    tradable = np.random.default_rng(5).random((60 if bars == "daily" else 192, 3)) > 0.3
    env: Any = make_env(make(tradable=tradable), actions=actions, episode_steps=20)
    if name == "MaskablePPO":
        env = Masked(env)
    assert_learns(make_learner(name, env), 128)


def test_learner_trains_on_row_numbers_too() -> None:
    env = make_env(observation="index", episode_steps=20)
    assert_learns(make_learner("A2C", env), 64)
