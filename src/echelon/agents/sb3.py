"""Agents of Stable-Baselines3 behind our interface: its PPO and SAC, to compare ours with.

Network (`MultiInputPolicy`: everything an agent sees, flattened into an MLP), learning rates,
discount and batches are SB3's defaults, on our `BatchedVecEnv`. What is set here, and why:

- Observations are row numbers. The networks look the windows up, and get just what they would get
  from `observation="window"`, number for number; a stored transition is a hundred times smaller.
- PPO: an update has 2,048 transitions as in SB3 with one environment, shared out among the books.
- SAC: as many updates for a step as ours, `expert.updates_per_step`; no larger buffer than steps.
- Random numbers: SB3 draws from the global generators of torch and numpy. It gets its own state of
  them, and they are put back afterwards: same seeds give same numbers whatever else runs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import BasePolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.sac.policies import MultiInputPolicy
from torch import Tensor

from echelon.agents.learner import Learner
from echelon.config import Config
from echelon.envs.act import ActionKind, ActionRule, Holdings
from echelon.envs.env_spec import EnvSpec
from echelon.envs.vec import BatchedVecEnv
from echelon.envs.world import World
from echelon.errors import TrainingError
from echelon.market import Rows
from echelon.rng import stream
from echelon.runs.checkpoint import (
    below_prefix,
    flatten_optimizer,
    pack_generator,
    restore_optimizer,
    unpack_generator,
    with_prefix,
)
from echelon.types import Floats, Metrics

_ROLLOUT, _BATCH, _BUFFER = 2048, 64, 1_000_000
"""SB3's defaults: transitions of an update of PPO, of a minibatch of it, and that SAC keeps."""
_MEMORY = ("actions", "rewards", "dones", "timeouts")
"""Arrays of SB3's replay buffer besides the observations."""


class WindowLookup:
    """What all networks of a policy see of a row: its window of features, which assets have any."""

    def __init__(self, window: int, n_assets: int, n_features: int) -> None:
        self.n_assets, self._window = n_assets, window
        self.length = window * n_assets * n_features
        """Numbers in a window."""
        self._world: World | None = None

    def look_at(self, world: World) -> None:
        """Take rows as those of this world from now on."""
        if world is self._world:
            return
        step = world.n_assets * world.x.shape[2]
        assert world.window * step == self.length, "another window, or other assets or features"
        flat = torch.from_numpy(np.array(world.x, dtype=np.float32)).ravel()
        # The bars of a window lie one after another: a view of all windows costs nothing.
        self._windows = flat.unfold(0, self.length, step)
        self._present = torch.from_numpy(world.present.astype(np.float32))
        self._world = world

    def look_up(self, row: Tensor) -> dict[str, Tensor]:
        """Of rows[B]: x[B, W·N·F], and present[B,N], 1 where an asset has features, else 0."""
        return {"present": self._present[row], "x": self._windows[row - (self._window - 1)]}


class WindowExtractor(BaseFeaturesExtractor):
    """Row numbers, weights and cash → what SB3's own extractor makes of windows, in its order."""

    def __init__(self, observation_space: gymnasium.Space[Any], sight: WindowLookup) -> None:
        assert isinstance(observation_space, spaces.Dict)
        shown = {name: math.prod(space.shape or ()) for name, space in observation_space.items()}
        del shown["row"]
        super().__init__(observation_space, sight.length + sight.n_assets + sum(shown.values()))
        # Alphabetical, as Gymnasium sorts the parts of an observation.
        self._order = sorted([*shown, "present", "x"])
        self._sight = sight

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """[B, features]."""
        seen = self._sight.look_up(observations["row"][:, 0].long())
        seen |= {name: part.flatten(1) for name, part in observations.items() if name != "row"}
        return torch.cat([seen[name] for name in self._order], dim=1)


class _GlobalRng:
    """A state of the global generators of torch and numpy that belongs to one agent."""

    def __init__(self, seed: int, name: str) -> None:
        lots = stream(seed, "sb3", name)
        self.torch = torch.Generator().manual_seed(int(lots.integers(2**62))).get_state()
        self.numpy = np.random.Generator(np.random.MT19937(int(lots.integers(2**62))))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the global generators are the agent's."""
        outer_torch, outer_numpy = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
        torch.set_rng_state(self.torch)
        np.random.set_state(dict(self.numpy.bit_generator.state))  # noqa: NPY002 (SB3 draws from it)
        try:
            yield
        finally:
            self.torch = torch.get_rng_state()
            self.numpy.bit_generator.state = np.random.get_state(legacy=False)  # noqa: NPY002
            torch.set_rng_state(outer_torch)
            np.random.set_state(outer_numpy)  # noqa: NPY002


class _Watch(BaseCallback):
    """Adds up rewards, and ends training when a loss is no longer a number."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards: list[float] = []

    def _on_rollout_start(self) -> None:
        refuse_divergence(self.model.logger.name_to_value, self.model.num_timesteps)

    def _on_step(self) -> bool:
        self.rewards.append(float(np.mean(self.locals["rewards"])))
        return True


class Sb3Learner(Learner):
    """SB3's PPO or SAC, and where it stands.

    policy_class: that SB3 makes of `MultiInputPolicy`
    last_layer: its name among the weights; as long as an action, a score for each asset and for
        cash
    metrics: what SB3 calls its numbers → what our logs call them
    """

    policy_class: ClassVar[type[MultiInputActorCriticPolicy] | type[MultiInputPolicy]]
    last_layer: ClassVar[str]
    metrics: ClassVar[Mapping[str, str]]
    model: PPO | SAC
    _round: int
    """Environment steps of one `train_once`."""

    def __init__(self, config: Config, world: World, seed: int) -> None:
        self.config, self.world, self.seed, self.steps = config, world, seed, 0
        self._sight = WindowLookup(world.window, *world.x.shape[1:])
        self._sight.look_at(world)
        self._global_rng = _GlobalRng(seed, "training")
        self.env = BatchedVecEnv(
            world, config, config.train.books, actions="weights", observation="index"
        )
        self.env.seed(int(stream(seed, "starts").integers(2**31)))
        with self._global_rng.in_use():
            looks = {
                "features_extractor_class": WindowExtractor,
                "features_extractor_kwargs": {"sight": self._sight},
            }
            self.model = self._make_model(
                policy="MultiInputPolicy", env=self.env, policy_kwargs=looks, device="cpu"
            )
        self.model.set_logger(Logger(folder=None, output_formats=[]))
        self.model.action_space.seed(int(stream(seed, "actions").integers(2**31)))
        # As `learn` would, but before the first checkpoint, which can be gone on from too.
        self.model._last_obs = self.env.reset()
        self.model._last_episode_starts = np.ones(config.train.books, dtype=bool)
        self._latest: Metrics = {}

    @classmethod
    def load_policy(
        cls, config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str
    ) -> Sb3Policy:
        last = weights.get(cls.last_layer)
        if last is None:
            raise RuntimeError(
                f"{cls.last_layer} is missing: not the weights of {config.train.algo}"
            )
        n_assets = len(last) - 1
        sight = WindowLookup(config.window, n_assets, n_features)
        # What the environment shows; how many rows there are matters to no network.
        shown: dict[str, spaces.Space[Any]] = {"row": spaces.Box(0.0, np.inf, (1,), np.float32)}
        if config.state.include_pos:
            shown["weights"] = spaces.Box(0.0, 1.0, (n_assets,), np.float32)
        if config.state.include_cash:
            shown["cash"] = spaces.Box(0.0, 1.0, (1,), np.float32)
        with torch.random.fork_rng(devices=[]):  # its first weights, drawn by lot, are not kept
            policy = cls.policy_class(
                spaces.Dict(shown),
                spaces.Box(-1.0, 1.0, (n_assets + 1,), np.float32),
                lambda _left: 0.0,
                features_extractor_class=WindowExtractor,
                features_extractor_kwargs={"sight": sight},
            )
        _acting_part(policy).load_state_dict(dict(weights))
        return Sb3Policy(policy, sight, config, seed, name)

    @abstractmethod
    def _make_model(self, **common: Any) -> PPO | SAC:  # noqa: ANN401
        """SB3's algorithm; common: settings of both."""

    def train_once(self) -> Metrics:
        """PPO: one update. SAC: `train.rollout_steps` bars of every book and their updates."""
        self._sight.look_at(self.world)
        watch = _Watch()
        with self._global_rng.in_use():
            self.model.learn(
                self._round,
                callback=watch,
                log_interval=None,  # type: ignore[arg-type]  # never: SB3's lines are ours to write
                reset_num_timesteps=False,
            )
        logged = self.model.logger.name_to_value
        refuse_divergence(logged, self.model.num_timesteps)
        self.steps = self.model.num_timesteps
        self._latest |= {
            ours: float(logged[name]) for name, ours in self.metrics.items() if name in logged
        }
        return self._latest | {
            "charts/reward": float(np.mean(watch.rewards)),
            "charts/updates": float(self.model._n_updates),
        }

    def policy(self) -> Sb3Policy:
        return Sb3Policy(self.model.policy, self._sight, self.config, self.seed)

    def weights(self) -> dict[str, Tensor]:
        return dict(_acting_part(self.model.policy).state_dict())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = self.model
        env, env_state = self.env.state()
        tensors = with_prefix("policy.", model.policy.state_dict())
        tensors |= {f"env.{name}": torch.from_numpy(part) for name, part in env.items()}
        tensors["chance.torch"] = self._global_rng.torch
        assert model._last_episode_starts is not None
        tensors["episode_starts"] = torch.from_numpy(model._last_episode_starts.copy())
        state: dict[str, Any] = {
            "steps": self.steps,
            "updates": model._n_updates,
            "latest": self._latest,
            "env": env_state,
            "numpy": pack_generator(self._global_rng.numpy),
            "lots": pack_generator(model.action_space.np_random),
            "optimizers": {},
        }
        for name, optimizer in self._optimizers().items():
            flat, state["optimizers"][name] = flatten_optimizer(optimizer)
            tensors |= with_prefix(f"optimizer.{name}.", flat)
        if isinstance(model, SAC):
            assert model.log_ent_coef is not None
            tensors["temperature"] = model.log_ent_coef
            memory = model.replay_buffer
            assert isinstance(memory, DictReplayBuffer)
            filled = memory.buffer_size if memory.full else memory.pos
            for name, part in _memory_arrays(memory).items():
                tensors[f"memory.{name}"] = torch.from_numpy(part[:filled])
            state["memory"] = {"pos": memory.pos, "full": memory.full}
        return tensors, state

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        model = self.model
        model.policy.load_state_dict(below_prefix("policy.", tensors))
        env = {name: part.numpy() for name, part in below_prefix("env.", tensors).items()}
        model._last_obs = self.env.restore(env, state["env"])
        model._last_episode_starts = tensors["episode_starts"].numpy().copy()
        self._global_rng.torch = tensors["chance.torch"].clone()
        self._global_rng.numpy = unpack_generator(state["numpy"])
        lots = unpack_generator(state["lots"])
        model.action_space.np_random.bit_generator.state = lots.bit_generator.state
        for name, optimizer in self._optimizers().items():
            flat = below_prefix(f"optimizer.{name}.", tensors)
            restore_optimizer(optimizer, flat, state["optimizers"][name])
        if isinstance(model, SAC):
            assert model.log_ent_coef is not None
            model.log_ent_coef.data.copy_(tensors["temperature"])
            memory, saved = model.replay_buffer, below_prefix("memory.", tensors)
            assert isinstance(memory, DictReplayBuffer)
            for name, part in _memory_arrays(memory).items():
                part[: len(saved[name])] = saved[name].numpy()
            memory.pos, memory.full = int(state["memory"]["pos"]), bool(state["memory"]["full"])
        self.steps = model.num_timesteps = int(state["steps"])
        model._n_updates = int(state["updates"])
        self._latest = {name: float(value) for name, value in state["latest"].items()}

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        model = self.model
        if isinstance(model, PPO):
            return {"policy": model.policy.optimizer}
        assert model.ent_coef_optimizer is not None, "SB3 learns the temperature by default"
        return {
            "actor": model.actor.optimizer,
            "critic": model.critic.optimizer,
            "temperature": model.ent_coef_optimizer,
        }


class Sb3Policy:
    """An SB3 policy in a backtest: the middle of its actions, or a draw, as target weights."""

    kind: ActionKind = "weights"

    def __init__(
        self,
        policy: BasePolicy,
        sight: WindowLookup,
        config: Config,
        seed: int,
        name: str = "agent",
    ) -> None:
        """seed: of the draws, where `eval.deterministic` is off."""
        self.name, self._policy, self._sight = name, policy, sight
        self._config, self._seed = config, seed

    def start(self, world: World, span: range) -> None:
        state = self._config.state
        self._sight.look_at(world)
        self._spec = EnvSpec(
            world=world,
            span=span,
            rule=ActionRule.from_config(self._config, self.kind),
            reward=self._config.reward,
            observation="index",
            include_pos=state.include_pos,
            include_cash=state.include_cash,
            random_start=False,
            episode_steps=None,
        )
        self._global_rng = _GlobalRng(self._seed, "evaluation")

    def decide(self, row: Rows, held: Holdings) -> Floats:
        seen = self._spec.observe(row, held)
        with self._global_rng.in_use():
            scores, _ = self._policy.predict(seen, deterministic=self._config.eval.deterministic)
        return self._spec.actions(scores, held)


class Sb3PPO(Sb3Learner):
    policy_class = MultiInputActorCriticPolicy
    last_layer = "action_net.bias"
    metrics = MappingProxyType(
        {
            "train/policy_gradient_loss": "losses/policy",
            "train/value_loss": "losses/value",
            "train/explained_variance": "charts/explained_variance",
            "train/approx_kl": "charts/approx_kl",
        }
    )

    def _make_model(self, **common: Any) -> PPO:  # noqa: ANN401
        train = self.config.train
        steps = ppo_steps(train.books, train.total_env_steps)
        self._round = steps * train.books
        return PPO(n_steps=steps, batch_size=_BATCH, **common)


class Sb3SAC(Sb3Learner):
    policy_class = MultiInputPolicy
    last_layer = "mu.bias"
    metrics = MappingProxyType(
        {
            "train/critic_loss": "losses/critic",
            "train/actor_loss": "losses/actor",
            "train/ent_coef": "charts/temperature",
        }
    )

    def _make_model(self, **common: Any) -> SAC:  # noqa: ANN401
        train = self.config.train
        self._round = train.rollout_steps * train.books
        updates = self.config.expert.updates_per_step * train.books
        return SAC(
            buffer_size=max(min(_BUFFER, train.total_env_steps + self._round), train.books),
            train_freq=max(1, round(1.0 / updates)),
            gradient_steps=max(1, round(updates)),
            **common,
        )


def ppo_steps(books: int, total: int) -> int:
    """Bars of a rollout: 2,048 transitions in all, or `total`, and whole minibatches of them."""
    least = _BATCH // math.gcd(_BATCH, books)
    return least * max(1, round(min(_ROLLOUT, total) / (books * least)))


def refuse_divergence(logged: Mapping[str, Any], steps: int) -> None:
    """Raise `TrainingError` where a loss that SB3 logged is not a finite number."""
    bad = sorted(k for k, v in logged.items() if "loss" in k and not math.isfinite(float(v)))
    if bad:
        raise TrainingError(
            f"{', '.join(bad)} of Stable-Baselines3 is not a finite number after {steps:,} steps: "
            "training has diverged. Lower reward.scale, or leave extreme features out; the "
            "checkpoints on disk are from before."
        )


def _acting_part(policy: BasePolicy) -> torch.nn.Module:
    return policy.actor if isinstance(policy, MultiInputPolicy) else policy


def _memory_arrays(memory: DictReplayBuffer) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {name: getattr(memory, name) for name in _MEMORY}
    arrays |= {f"now.{name}": part for name, part in memory.observations.items()}
    return arrays | {f"next.{name}": part for name, part in memory.next_observations.items()}
