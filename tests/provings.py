"""Tiny proofs for tests: seconds instead of minutes, with nothing left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from markets import CONFIGS

from echelon.config import Config, load_config
from echelon.proving import leaky
from echelon.proving import prove as proof_module
from echelon.proving.null import NullMarket, NullWindows
from echelon.proving.prove import Sizes

TINY = (
    *("window=8", "model.d_model=8", "model.n_layers=1", "model.hidden=8", "train.books=4"),
    *("train.offset_groups=2", "train.rollout_steps=10", "train.episode_steps=40"),
    *("train.total_env_steps=400", "train.log_interval_steps=200", "logging.tensorboard=false"),
)
"""Overrides under which an agent trains in a fraction of a second, and learns nothing."""
NULL = NullMarket(windows=NullWindows(120, 80, 80))
SIZES = Sizes(
    mode="quick",
    signals=("trend",),
    planted_seeds=2,
    planted_steps=400,
    validations=1,
    null_draws=5,
    null_agents=1,
    claim_draws=2,
    leaky_seeds=1,
    costly_seeds=1,
    costly_steps=(400, 200),
    n_draws=2,
    n_bars=200,
    null_market=NULL,
    null_steps=200,
    leaky_steps=200,
    costly_valid_bars=150,
    regime_pairs=2,
    regime_bars=250,
    regime_seeds=1,
    hierarchy_seeds=0,
    regime_steps=200,
    chunk=3,
)


def tiny_config(*overrides: str) -> Config:
    """configs/qtmrl-fast.yaml with an agent too small to learn."""
    return load_config(CONFIGS / "qtmrl-fast.yaml", [*TINY, *overrides])


def shrink_leaky(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 400 bars in the place of 4,000."""
    monkeypatch.setattr(leaky, "LEAKY_MARKET", replace(leaky.LEAKY_MARKET, n_bars=400, n_assets=3))
    rows = {"train": (80, 240), "valid": (240, 320), "test": (320, 400)}
    monkeypatch.setattr(leaky, "_WINDOWS", rows)


def shrink_quick(monkeypatch: pytest.MonkeyPatch, sizes: Sizes = SIZES) -> None:
    """`--quick` has these sizes, whatever agent is proved."""
    for name in ("QUICK", "QUICK_EXPERTS", "QUICK_HIERARCHY"):
        monkeypatch.setattr(proof_module, name, sizes)
