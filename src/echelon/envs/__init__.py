"""Environments: books stepped together on the market kernel, and their standard faces.

Importing this package makes `Echelon/Trading-v0` and `Echelon/TradingWeights-v0` known to
Gymnasium.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.envs.act import Action, ActionRule, Holdings
from echelon.envs.books import Books
from echelon.envs.gym import TradingEnv
from echelon.envs.registration import register
from echelon.envs.world import World, index_world, world_of

if TYPE_CHECKING:
    from echelon.envs.vec import BatchedVecEnv

__all__ = [
    "Action",
    "ActionRule",
    "BatchedVecEnv",
    "Books",
    "Holdings",
    "TradingEnv",
    "World",
    "index_world",
    "world_of",
]

register()


def __getattr__(name: str) -> object:
    # Stable-Baselines3 takes a second or two to import, and our own loops never use it.
    if name == "BatchedVecEnv":
        from echelon.envs.vec import BatchedVecEnv

        return BatchedVecEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
