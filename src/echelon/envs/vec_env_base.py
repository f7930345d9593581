"""A Stable-Baselines3 VecEnv whose environments are places in one batch, not objects of their own.

SB3 reads, sets and calls things of each environment. It meets `_places`[E], small views of the
batch; `render_mode` and `spec` are what it asks for before anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices


class PlacesVecEnv(VecEnv):
    """Access to the places; a subclass sets `_places` before it calls `__init__`."""

    _places: Sequence[object]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The attribute of each place."""
        return [getattr(self._places[e], attr_name) for e in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Set an attribute of each place."""
        for e in self._get_indices(indices):
            setattr(self._places[e], attr_name, value)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,  # noqa: ANN401 (SB3's signature)
        indices: VecEnvIndices = None,
        **method_kwargs: Any,  # noqa: ANN401 (SB3's signature)
    ) -> list[Any]:
        """Call a method of each place."""
        methods: list[Callable[..., Any]] = self.get_attr(method_name, indices)
        return [method(*method_args, **method_kwargs) for method in methods]

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]],
        indices: VecEnvIndices = None,
    ) -> list[bool]:
        """There are no wrappers."""
        return [False for _ in self._get_indices(indices)]
