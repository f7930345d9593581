"""E books as one Stable-Baselines3 VecEnv, stepped together by `Books`: no environment per book.

The same spaces, starts and numbers as E of `TradingEnv` (with `reward.cvar_penalty` the books share
their memory of the tail, and rewards differ). Infos are empty but at the end of an episode, where
they carry what SB3 reads (`episode`, `terminal_observation`, `TimeLimit.truncated`) and how the
book did (pv, total_return, drawdown, max_drawdown, cvar95, sharpe_annual, costs, time, row).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from echelon.config import Config
from echelon.envs.env_spec import EnvOptions, EnvSpec, Observation, OneBook, zero_if_nan
from echelon.envs.gym import COST_PARTS
from echelon.envs.world import World
from echelon.ops.measures import cvar, drawdown_series, sharpe_annual
from echelon.runs.checkpoint import pack_generator, unpack_generator
from echelon.types import Bools


class PlacesVecEnv(VecEnv):
    """A VecEnv whose environments are places in one batch, not objects of their own.

    SB3 meets `_places`[E], small views of the batch, which a subclass sets before `__init__`.
    """

    _places: Sequence[object]
    _tells_episodes = False

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self._places[e], attr_name) for e in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        for e in self._get_indices(indices):
            setattr(self._places[e], attr_name, value)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,  # noqa: ANN401 (SB3's signature)
        indices: VecEnvIndices = None,
        **method_kwargs: Any,  # noqa: ANN401 (SB3's signature)
    ) -> list[Any]:
        methods: list[Callable[..., Any]] = self.get_attr(method_name, indices)
        return [method(*method_args, **method_kwargs) for method in methods]

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]],
        indices: VecEnvIndices = None,
    ) -> list[bool]:
        """There are none; SB3 asks for `Monitor` to know whether `episode` is in the infos."""
        monitored = self._tells_episodes and issubclass(wrapper_class, Monitor)
        return [monitored for _ in self._get_indices(indices)]


class BatchedVecEnv(PlacesVecEnv):
    """E books on a world, restarted by themselves when an episode ends."""

    _tells_episodes = True

    def __init__(
        self, world: World, config: Config, n_envs: int, **options: Unpack[EnvOptions]
    ) -> None:
        """n_envs: E."""
        assert n_envs > 0, f"n_envs={n_envs}: at least one book is needed"
        self.world = world
        self.config = config
        self.split = options.get("split", "train")
        self._spec = EnvSpec.from_config(world, config, **options)
        self.observation_space = self._spec.observation_space()
        self.action_space = self._spec.action_space()
        self._books = self._spec.books(n_envs)
        self._places = self._views = [BookView(self, e) for e in range(n_envs)]
        super().__init__(n_envs, self.observation_space, self.action_space)
        self._rngs: list[np.random.Generator] = [seeding.np_random()[0] for _ in range(n_envs)]
        self._began = time.time()
        self._held = self._books.holdings()
        self._actions: NDArray[Any] | None = None
        self._steps = np.zeros(n_envs, dtype=np.int64)
        self._length = np.zeros(n_envs, dtype=np.int64)
        self._rewards = np.zeros(n_envs)
        self._costs = np.zeros((len(COST_PARTS), n_envs))
        # Value[step,E] since each book's own start; longer when an episode is.
        self._values = np.empty((64, n_envs))

    def reset(self) -> Observation:
        for e, seed in enumerate(self._seeds):
            if seed is not None:
                self._rngs[e] = seeding.np_random(seed)[0]
        self._begin(np.ones(self.num_envs, dtype=bool), self._options)
        self._reset_seeds()
        self._reset_options()
        return self._spec.observe(self._books.row, self._held)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take the actions[E,…]; `step_wait` carries them out."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Act, go one bar on, and begin new episodes where one ended."""
        assert self._actions is not None, "step_wait() without step_async()"
        result = self._books.step(self._spec.actions(self._actions, self._held))
        self._actions = None
        self._held = self._books.holdings()
        self._steps += 1
        self._rewards += result.reward
        for total, name in zip(self._costs, COST_PARTS, strict=True):
            total += getattr(result.fills, name).sum(axis=1)
        if self._steps.max() >= len(self._values):
            self._values = np.concatenate([self._values, np.empty_like(self._values)])
        self._values[self._steps, np.arange(self.num_envs)] = result.value
        truncated = self._steps >= self._length
        done = result.terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            self._report(infos, done, truncated & ~result.terminated)
            self._begin(done, [{}] * self.num_envs)
        seen = self._spec.observe(self._books.row, self._held)
        return seen, result.reward.astype(np.float32), done, infos

    def close(self) -> None:
        """Nothing is open."""

    def action_masks(self) -> Bools:
        """[E,N·3] which of HOLD, BUY and SELL each asset allows now."""
        return self._spec.masks(self._held.allowed)

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """(arrays, JSON) from which `restore` goes on bit for bit, in an env made alike."""
        lived = int(self._steps.max()) + 1
        arrays = {f"books.{name}": part for name, part in self._books.state().items()}
        arrays |= {"steps": self._steps, "length": self._length, "rewards": self._rewards}
        arrays |= {"costs": self._costs, "values": self._values[:lived]}
        packed = {"chances": [pack_generator(rng) for rng in self._rngs]}
        return {name: np.array(part) for name, part in arrays.items()}, packed

    def restore(self, arrays: dict[str, NDArray[Any]], packed: dict[str, Any]) -> Observation:
        """Go on from what `state` gave; returns what the books see now."""
        own = {name: part.copy() for name, part in arrays.items()}
        books = {n.removeprefix("books."): v for n, v in own.items() if n.startswith("books.")}
        self._books.restore(books)
        self._steps, self._length = own["steps"], own["length"]
        self._rewards, self._costs, self._values = own["rewards"], own["costs"], own["values"]
        self._rngs = [unpack_generator(rng) for rng in packed["chances"]]
        self._held = self._books.holdings()
        return self._spec.observe(self._books.row, self._held)

    def _report(self, infos: list[dict[str, Any]], done: Bools, cut: Bools) -> None:
        """Fill the infos of the books `done`[E]; cut[E]: truncated, not terminated."""
        last = self._spec.observe(self._books.row[done], self._held.take(done))
        seconds = round(time.time() - self._began, 6)
        for k, e in enumerate(np.flatnonzero(done).tolist()):
            steps, row = int(self._steps[e]), int(self._books.row[e])
            value = self._values[: steps + 1, e]
            returns = value[1:] / value[:-1] - 1.0
            drawdown = drawdown_series(returns)
            infos[e] |= {
                "episode": {"r": float(self._rewards[e]), "l": steps, "t": seconds},
                "terminal_observation": {name: part[k] for name, part in last.items()},
                "TimeLimit.truncated": bool(cut[e]),
                "pv": float(value[-1]),
                "total_return": float(value[-1] / value[0] - 1.0),
                "drawdown": float(drawdown[-1]),
                "max_drawdown": float(drawdown.max()),
                "cvar95": zero_if_nan(cvar(returns)),
                "sharpe_annual": zero_if_nan(sharpe_annual(returns, self.world.periods_per_year)),
                "costs": dict(zip(COST_PARTS, self._costs[:, e].tolist(), strict=True)),
                "time": self.world.times[row].item(),
                "row": row,
            }

    def _begin(self, which: Bools, options: list[dict[str, Any]]) -> None:
        rows = self._books.row.copy()
        for e in np.flatnonzero(which).tolist():
            spec = self._views[e]._spec
            rows[e] = spec.start(self._rngs[e], options[e])
            self._length[e] = spec.steps_from(int(rows[e]))
            facts = {"time": self.world.times[rows[e]].item(), "row": int(rows[e])}
            self.reset_infos[e] = {"pv": self.world.initial_cash, **facts}
        self._books.reset(rows, which)
        self._held = self._books.holdings()
        self._steps[which] = 0
        self._rewards[which] = 0.0
        self._costs[:, which] = 0.0
        self._values[0, which] = self._books.value[which]


class BookView(OneBook):
    """One book as `get_attr`, `set_attr` and `env_method` see it; other names may be set."""

    render_mode: None = None
    spec: None = None

    def __init__(self, env: BatchedVecEnv, index: int) -> None:
        self._env, self._spec, self._books, self._index = env, env._spec, env._books, index
        self.world, self.config, self.split = env.world, env.config, env.split
        self.observation_space, self.action_space = env.observation_space, env.action_space

    @property
    def np_random(self) -> np.random.Generator:
        return self._env._rngs[self._index]

    def action_masks(self) -> Bools:
        """[N·3] which of HOLD, BUY and SELL each asset allows now, for MaskablePPO."""
        return self._env._spec.masks(self._env._held.allowed[self._index])
