"""RL-Baselines3-Zoo: the hyperparameter files we ship are its own form, and it trains from them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO, SAC
from stable_baselines3.common.vec_env import VecNormalize
from worlds import make_config, make_world, prepared_run

from echelon.config import Config, load_config
from echelon.envs import BatchedVecEnv
from echelon.envs.registration import ENV_IDS
from echelon.population.meta_env import MetaEnv
from echelon.population.ppo import CLIP, EPOCHS, GRADIENT_NORM, VALUE_WEIGHT, RouterNet
from echelon.population.router import Router

FILES = Path(__file__).parents[1] / "configs" / "rl_zoo"
ALGORITHMS: dict[str, type] = {"a2c": A2C, "ppo": PPO, "sac": SAC}
ROUTER = "ppo_mask"
ZOO_KEYS = {"n_timesteps", "n_envs", "normalize"}
"""What the zoo reads itself; the rest goes to the algorithm."""
CASES = [
    ("a2c", "Echelon/Trading-v0"),
    ("a2c", "Echelon/TradingWeights-v0"),
    ("ppo", "Echelon/Trading-v0"),
    ("ppo", "Echelon/TradingWeights-v0"),
    ("sac", "Echelon/TradingWeights-v0"),
]


def hyperparameters(algorithm: str) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = yaml.safe_load((FILES / f"{algorithm}.yml").read_text())
    return tree


def test_every_file_is_of_a_known_algorithm_and_names_our_environments_only() -> None:
    assert sorted(path.stem for path in FILES.glob("*.yml")) == sorted({*ALGORITHMS, ROUTER})
    found = [(name, env) for name in sorted(ALGORITHMS) for env in hyperparameters(name)]
    assert found == CASES
    assert {env for _, env in found} == set(ENV_IDS)


@pytest.mark.parametrize(("algorithm", "env"), CASES)
def test_settings_are_arguments_of_the_algorithm(algorithm: str, env: str) -> None:
    settings = hyperparameters(algorithm)[env]
    known = inspect.signature(ALGORITHMS[algorithm].__init__).parameters
    assert settings.keys() - ZOO_KEYS <= known.keys()
    assert settings["n_timesteps"] > 0


def test_router_of_the_file_is_the_one_that_the_configuration_makes() -> None:
    (name, settings), *others = hyperparameters(ROUTER).items()
    assert (name, others) == (MetaEnv.__name__, [])
    known = inspect.signature(MaskablePPO.__init__).parameters
    assert settings.keys() - ZOO_KEYS <= known.keys()
    config = Config()
    meta, ppo = config.meta_router, Router(config, 5, 0).ppo
    for key in ("batch_size", "gamma", "gae_lambda", "ent_coef", "n_envs"):
        assert settings[key] == getattr(meta, key), key
    assert settings["n_epochs"] == EPOCHS
    assert settings["clip_range"] == CLIP
    assert settings["max_grad_norm"] == GRADIENT_NORM
    assert known["vf_coef"].default == VALUE_WEIGHT, "the file leaves it as it is"
    assert settings["learning_rate"] == ppo.lr == meta.lr
    assert settings["n_steps"] * settings["n_envs"] == meta.n_steps == 1024
    assert settings["n_timesteps"] == config.trainer.training_schedule.router.steps
    # The algorithm as the file makes it has our network: names and shapes.
    theirs = _algorithm_of(settings, ppo.net)
    assert {name: part.shape for name, part in theirs.policy.state_dict().items()} == {
        name: part.shape for name, part in ppo.net.state_dict().items()
    }
    shipped = load_config(FILES.parent / "hierarchical.yaml")
    assert shipped.meta_router == config.meta_router


def _algorithm_of(settings: dict[str, Any], net: RouterNet) -> MaskablePPO:
    """MaskablePPO of a file's settings for what `net` sees and chooses."""
    arguments = {key: value for key, value in settings.items() if key not in ZOO_KEYS}
    # The zoo evaluates this string as well.
    arguments["policy_kwargs"] = eval(arguments["policy_kwargs"])
    model = MaskablePPO(
        env=None,  # type: ignore[arg-type]
        device="cpu",
        _init_setup_model=False,
        **arguments,
    )
    model.observation_space = spaces.Box(-5.0, 5.0, (net.n_obs,), np.float32)
    model.action_space = spaces.Discrete(net.n_experts + 1)
    model.n_envs = settings["n_envs"]
    model._setup_model()
    return model


@pytest.mark.parametrize(("algorithm", "env"), CASES)
def test_algorithm_can_be_made_of_its_settings(algorithm: str, env: str) -> None:
    settings = hyperparameters(algorithm)[env]
    n_envs = settings.pop("n_envs", 1)
    del settings["n_timesteps"]
    vec = BatchedVecEnv(make_world(), make_config(), n_envs, actions=ENV_IDS[env])
    # The zoo evaluates these two strings as well.
    normalized = VecNormalize(vec, **eval(settings.pop("normalize")))
    settings["policy_kwargs"] = eval(settings["policy_kwargs"])
    if "buffer_size" in settings:
        settings["buffer_size"] = 100
    model = ALGORITHMS[algorithm](env=normalized, device="cpu", **settings)
    action, _ = model.predict(normalized.reset())
    assert action.shape == (n_envs, *vec.action_space.shape)


@pytest.mark.parametrize(("algorithm", "env"), [CASES[0], CASES[3], CASES[4]])
def test_zoo_trains_from_the_file(algorithm: str, env: str, tmp_path: Path, zoo_run: Path) -> None:
    command = [
        *(sys.executable, "-m", "rl_zoo3.train", "--algo", algorithm, "--env", env),
        *("--gym-packages", "echelon.envs", "--conf-file", str(FILES / f"{algorithm}.yml")),
        *("--eval-env-kwargs", "split:'valid'", "--eval-episodes", "1", "--eval-freq", "256"),
        *("--n-timesteps", "512", "--log-folder", str(tmp_path), "--seed", "1"),
        *("--device", "cpu", "--num-threads", "1", "--hyperparams", *_smaller(algorithm)),
    ]
    environment = os.environ | {"ECHELON_RUN": str(zoo_run)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tmp_path / algorithm / f"{env.replace('/', '-')}_1"
    assert (folder / f"{env.replace('/', '-')}.zip").is_file()
    assert (folder / "evaluations.npz").is_file()
    assert "Eval num_timesteps=512" in done.stdout


def _smaller(algorithm: str) -> list[str]:
    """What makes a few hundred steps contain updates."""
    if algorithm == "sac":
        return ["learning_starts:100", "buffer_size:1000"]
    return ["n_envs:2", "n_steps:32"] + (["batch_size:32"] if algorithm == "ppo" else [])


@pytest.fixture(scope="module")
def zoo_run(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    if importlib.util.find_spec("rl_zoo3") is None:
        pytest.skip('rl_zoo3 is not installed: pip install "echelon[zoo]"')
    return prepared_run(tmp_path_factory.mktemp("zoo"), bars_file)
