"""The environments by name, for `gymnasium.make` and for tools such as RL-Baselines3-Zoo.

    Echelon/Trading-v0          HOLD, BUY or SELL for each asset
    Echelon/TradingWeights-v0   target weights

Both trade on a prepared run directory, `run` (or the variable ECHELON_RUN), under its config.yaml::

    import gymnasium
    import echelon.envs

    env = gymnasium.make("Echelon/Trading-v0", run="runs/demo", split="train")
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import gymnasium

from echelon.config import Config, fingerprint, load_run_config, refuse_places
from echelon.config.load import REGISTRY
from echelon.envs.act import ActionKind
from echelon.envs.gym import TradingEnv
from echelon.envs.world import World, world_of
from echelon.errors import UsageError
from echelon.features.prepared import Prepared
from echelon.runs import RunDirectory
from echelon.runs.registry import TrialRegistry, new_entry, window_of

RUN_VARIABLE = "ECHELON_RUN"
ENV_IDS: dict[str, ActionKind] = {
    "Echelon/Trading-v0": "discrete",
    "Echelon/TradingWeights-v0": "weights",
}
"""Name → how one acts."""


def register() -> None:
    for name, kind in ENV_IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                name,
                entry_point="echelon.envs.registration:make_trading_env",
                kwargs={"actions": kind},
            )


def make_trading_env(
    run: str | Path | None = None,
    split: str = "train",
    **kwargs: Any,  # noqa: ANN401 (those of TradingEnv)
) -> TradingEnv:
    """The environment of a prepared run directory (None: of ECHELON_RUN).

    Outside training, costs are left out where `eval.use_fee` is false. With split="test" the look
    at the test window is written down in the registry of the runs, once a process.
    """
    world, config = open_run(run, split)
    return TradingEnv(world, config, split=split, **kwargs)


def open_run(run: str | Path | None = None, split: str = "train") -> tuple[World, Config]:
    """World and configuration of a prepared run directory; read once while it does not change."""
    named = run or os.environ.get(RUN_VARIABLE)
    if not named:
        raise UsageError(
            f"no run directory: pass run=…, or set {RUN_VARIABLE}, to one that "
            "`echelon prepare` made."
        )
    path = Path(named).expanduser().resolve()
    parts = (path / "config.yaml", path / "prepared" / "manifest.json")
    missing = [str(part) for part in parts if not part.is_file()]
    if missing:
        raise UsageError(
            f"{named}: not a prepared run directory, {missing[0]} does not exist. Make one by "
            f"`echelon prepare --output-dir {named}`."
        )
    changed = tuple(part.stat().st_mtime_ns for part in parts)
    return _open_cached(path, split, changed)


@lru_cache(maxsize=4)
def _open_cached(path: Path, split: str, changed: tuple[int, ...]) -> tuple[World, Config]:
    """changed: times of the files, so that a set prepared again is read again."""
    config = load_run_config(path / "config.yaml")
    prepared = Prepared.open(path, RunDirectory(path).trained_on())
    costs = 1.0 if split == "train" or config.eval.use_fee else 0.0
    read = None
    if split == "test":
        test = prepared.splits["test"]
        window = window_of(prepared.manifest["dataset"], test.first, test.last)
        entry = new_entry(window, path, fingerprint(config), seeds=0)
        refuse_places(config, path, keys=(REGISTRY,))
        read = TrialRegistry.for_run(path, config.logging.registry).begin_read(entry)
    return world_of(prepared, config, costs=costs, read=read), config
