"""The environments by name: Gymnasium makes them from a prepared run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from worlds import prepared_run

import echelon.envs
from echelon.envs.registration import ENV_IDS, open_run, register
from echelon.errors import UsageError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    return prepared_run(tmp_path_factory.mktemp("run"), bars_file, "eval.use_fee=false")


def test_both_names_make_their_environment(run: Path) -> None:
    discrete = gymnasium.make("Echelon/Trading-v0", run=str(run))
    assert discrete.action_space == gymnasium.spaces.MultiDiscrete([3] * 16)
    weights = gymnasium.make("Echelon/TradingWeights-v0", run=run, split="test")
    assert weights.action_space.shape == (17,)
    assert isinstance(weights.unwrapped, echelon.envs.TradingEnv)
    assert weights.unwrapped.split == "test"
    assert discrete.observation_space["x"].shape == (5, 16, 6)


def test_variable_names_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_RUN", str(run))
    env = gymnasium.make("Echelon/Trading-v0", split="valid")
    _, info = env.reset(seed=0)
    assert info["time"].isoformat() == "2016-02-01T00:00:00"


@pytest.mark.filterwarnings("ignore:.*value is -?infinity.*")
@pytest.mark.parametrize("name", list(ENV_IDS))
def test_gymnasium_checks_what_it_made(name: str, run: Path) -> None:
    check_env(gymnasium.make(name, run=run).unwrapped)


def test_environments_of_one_run_share_its_world(run: Path) -> None:
    first, second = (gymnasium.make("Echelon/Trading-v0", run=run).unwrapped for _ in range(2))
    assert first.world is second.world
    os.utime(run / "config.yaml", ns=(1, 1))
    assert gymnasium.make("Echelon/Trading-v0", run=run).unwrapped.world is not first.world


def test_fees_are_charged_in_training_and_as_eval_says_outside_it(run: Path) -> None:
    assert open_run(run, "train")[0].rules.commission == pytest.approx(0.0005)
    assert open_run(run, "test")[0].rules.commission == 0.0


def test_vector_environment_of_gymnasium_steps(run: Path) -> None:
    envs = gymnasium.make_vec("Echelon/Trading-v0", num_envs=3, run=run, split="test")
    envs.reset(seed=0)
    seen, rewards, *_ = envs.step(np.ones((3, 16), dtype=int))
    assert seen["x"].shape == (3, 5, 16, 6)
    assert rewards.shape == (3,)
    envs.close()


def test_without_a_run_the_error_says_how_to_name_one() -> None:
    with pytest.raises(UsageError, match=r"pass run=…, or set ECHELON_RUN"):
        gymnasium.make("Echelon/Trading-v0")


def test_directory_without_a_prepared_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config.yaml does not exist.*echelon prepare"):
        gymnasium.make("Echelon/Trading-v0", run=tmp_path)


def test_registering_twice_does_no_harm() -> None:
    before = dict(gymnasium.registry)
    register()
    assert dict(gymnasium.registry) == before


def test_importing_the_package_registers_and_leaves_sb3_alone() -> None:
    code = (
        "import sys, echelon.envs, gymnasium; "
        "assert 'Echelon/Trading-v0' in gymnasium.registry; "
        "assert 'stable_baselines3' not in sys.modules; "
        "assert 'torch' not in sys.modules; "
        "assert echelon.envs.BatchedVecEnv.__name__ == 'BatchedVecEnv'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'NoSuchEnv'"):
        _ = echelon.envs.NoSuchEnv
