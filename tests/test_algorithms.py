"""The table of algorithms: every line leads to a learner, and names cost no import of torch."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from worlds import make_config

from echelon.agents.learner import Learner, learner_class
from echelon.config.algorithms import ALGORITHMS
from echelon.errors import ConfigError


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_line_names_a_learner_and_what_it_refuses(algo: str) -> None:
    assert issubclass(learner_class(make_config(f"train.algo={algo}")), Learner)
    refuses = ALGORITHMS[algo].refuses
    if refuses is not None:
        module, _, name = refuses.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"train\.algo.*'A2C'.*'HIERARCHY'.*\(found 'DDPG'\)"):
        make_config("train.algo=DDPG")


def test_configuration_is_checked_without_torch() -> None:
    code = (
        "import sys; from echelon.config import load_config; load_config(None, ['train.algo=SAC']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'stable_baselines3')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
