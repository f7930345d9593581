"""Runs trained for a moment, one per algorithm, to be exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hierarchies import SMALL
from worlds import prepared_run

from echelon.config import load_config
from echelon.config.algorithms import ALGORITHMS
from echelon.features import Prepared
from echelon.training.run import Training, Worlds, ready, seed_directory

EXPORTED = tuple(name for name, algo in ALGORITHMS.items() if algo.family != "sb3")
_TINY = (
    "assets=[AAPL, MSFT, NVDA, JNJ]",
    *("window=6", "seed=1", "logging.tensorboard=false"),
    *("model.d_model=8", "model.n_layers=1", "model.hidden=8", "expert.hidden=8"),
    *("pretrain.epochs=1", "train.books=4", "train.total_env_steps=96"),
    *("train.validate_every_steps=48", "eval.baselines=[cash, equal_weight]"),
)
_FAMILY = {
    "flat": ("train.rollout_steps=12", "train.offset_groups=2", "train.lr_actor=0.05"),
    "expert": (
        *("train.rollout_steps=4", "train.episode_steps=12", "expert.batch_size=8"),
        *("expert.learning_starts=16", "train.lr_actor=0.01"),
    ),
    "hierarchy": (*SMALL, "train.total_env_steps=192", "train.validate_every_steps=96"),
}


def trained_run(
    directory: Path, bars: Path, algo: str, *overrides: str, seeds: Sequence[int] = (1,)
) -> Path:
    """A run directory with a best checkpoint of every seed."""
    settings = (*_TINY, *_FAMILY[ALGORITHMS[algo].family], f"train.algo={algo}", *overrides)
    return train_prepared(prepared_run(directory, bars, *settings), seeds)


def tiny_settings(algo: str) -> tuple[str, ...]:
    """Overrides that train an algorithm for a moment."""
    return (*_TINY[1:], *_FAMILY[ALGORITHMS[algo].family], f"train.algo={algo}")


def train_prepared(run: Path, seeds: Sequence[int] = (1,)) -> Path:
    """Train the seeds of a run directory that is prepared."""
    config = load_config(run / "config.yaml")
    worlds = Worlds.from_prepared(Prepared.open(run), config)
    for seed in seeds:
        place = seed_directory(run, seed)
        assert ready(config, worlds, place, lambda: False)
        Training(config, worlds, place, seed).run()
    return run
