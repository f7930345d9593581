"""The router: sb3-contrib's MaskablePPO over K experts and cash.

- It learns in phases, each on a `MetaEnv` whose episodes start from cash. All random numbers of a
  phase come from the seed and the phase's number, so that a run that is resumed between phases goes
  on with the same ones; SB3 draws from the global generators of torch and numpy, put back after.
- It is stored as weights and JSON, and rebuilt: nothing is pickled.
- It can be asked before it has learned anything: its first weights come from the seed too.

SB3 is imported when a router is made, not with this module: that takes seconds.

Axes: `E` decisions made together, `K` experts, `N` assets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from echelon.config import Config
from echelon.errors import StoreError, TrainingError
from echelon.population import router_task
from echelon.population.expert_books import Survey
from echelon.population.router_task import RouterReward
from echelon.rng import stream
from echelon.runs.checkpoint import below_prefix, flatten_optimizer, restore_optimizer, with_prefix
from echelon.types import Bools, Floats, Floats32, Ints, Metrics

if TYPE_CHECKING:
    from sb3_contrib import MaskablePPO

    from echelon.population.meta_env import MetaEnv


_HIDDEN = (64, 64)
"""Widths of the layers of policy and value, each of its own."""
_ADVICE = "Lower meta_router.lr; the checkpoints on disk are from before."


class Router:
    """MaskablePPO and what its training has to remember; a `RouterPolicy`."""

    def __init__(self, config: Config, n_experts: int, seed: int) -> None:
        self.config = config
        self.n_experts = n_experts
        self.seed = seed
        self.incentive = RouterReward(config.meta_router, n_experts)
        with _seeded_globals(seed, "weights"):
            self.model = _new_model(config, n_experts)

    def learn(self, env: MetaEnv, steps: int, phase: int) -> Metrics:
        """At least `steps` decisions on `env`, renewed for this phase, in whole rollouts."""
        from stable_baselines3.common.callbacks import BaseCallback

        began, incentive = time.perf_counter(), self.incentive
        relative: list[float] = []

        class Follow(BaseCallback):
            def _on_step(self) -> bool:
                relative.append(float(env.relative.mean()))
                return True

            def _on_rollout_end(self) -> None:
                incentive.adapt()

        env.incentive = incentive
        try:
            with _seeded_globals(self.seed, phase):
                self.model.set_env(env)
                self.model._last_obs = None  # begin with an episode, not where another phase ended
                self.model.learn(
                    steps,
                    callback=Follow(),
                    log_interval=None,  # type: ignore[arg-type]  # never: the lines are ours
                    reset_num_timesteps=False,
                )
        finally:
            env.incentive = None
        logged = self.model.logger.name_to_value
        bad = sorted(k for k, v in logged.items() if "loss" in k and not math.isfinite(float(v)))
        if bad:
            raise TrainingError(
                f"{', '.join(bad)} of the router is not a finite number after "
                f"{self.model.num_timesteps:,} decisions: training has diverged. {_ADVICE}"
            )
        return {
            "router/relative_return": float(np.mean(relative)),
            "router/usage_entropy": incentive.usage.entropy(),
            "router/kl_lambda": incentive.weight,
            "router/reward_scale": incentive.scale.std,
            "router/explained_variance": float(logged["train/explained_variance"]),
            "router/entropy": -float(logged["train/entropy_loss"]),
            "router/decisions": float(self.model.num_timesteps),
            "time/router_updates": time.perf_counter() - began,
        }

    @property
    def decisions(self) -> int:
        return int(self.model.num_timesteps)

    def follow(self, returns: Floats, fresh: Bools) -> None:
        """Not needed: what was earned is in the observations."""

    def choose(self, obs: Floats32, allowed: Bools) -> Ints:
        """[E] the most probable choice of each of obs[E,O] among allowed[E,K+1]."""
        return np.asarray(self._logits(obs, allowed).argmax(axis=1), dtype=np.int64)

    def probabilities(self, obs: Floats32, allowed: Bools) -> Floats:
        """[E,K+1] of every choice; 0 for those not allowed."""
        logits = self._logits(obs, allowed)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def set_lr(self, lr: float) -> None:
        self.model.learning_rate = lr
        self.model._setup_lr_schedule()

    def weights(self) -> dict[str, Tensor]:
        """All a policy needs: see `load`."""
        return {name: part.clone() for name, part in self.model.policy.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take what `weights` gave; refuses those of another population or other horizons."""
        try:
            self.model.policy.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise StoreError(
                f"the router's weights do not fit {self.n_experts} experts seen over "
                f"{self.config.meta_router.horizons} bars: {error}. Use the configuration of the "
                "run they are from."
            ) from error

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        flat, optimizer = flatten_optimizer(self.model.policy.optimizer)
        tensors = with_prefix("policy.", self.weights())
        tensors |= with_prefix("optimizer.", {name: part.clone() for name, part in flat.items()})
        return tensors, {
            "decisions": self.model.num_timesteps,
            "updates": self.model._n_updates,
            "lr": float(self.model.learning_rate),  # type: ignore[arg-type]  # never a schedule
            "optimizer": optimizer,
            "incentive": self.incentive.state(),
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.load(below_prefix("policy.", tensors))
        flat = below_prefix("optimizer.", tensors)
        restore_optimizer(self.model.policy.optimizer, flat, state["optimizer"])
        self.model.num_timesteps = int(state["decisions"])
        self.model._n_updates = int(state["updates"])
        self.set_lr(float(state["lr"]))
        self.incentive.restore(state["incentive"])

    def _logits(self, obs: Floats32, allowed: Bools) -> Floats:
        """[E,K+1], −∞ where not allowed."""
        assert allowed.any(axis=1).all(), "there is nobody to choose"
        policy = self.model.policy
        policy.set_training_mode(False)
        with torch.no_grad():
            distribution = policy.get_distribution(torch.from_numpy(obs)).distribution
        assert isinstance(distribution, torch.distributions.Categorical)
        logits = distribution.logits.numpy().astype(np.float64)
        if not np.isfinite(logits).all():
            raise TrainingError(
                "the router's network gives no finite numbers: its training has diverged. "
                + _ADVICE
            )
        return np.where(allowed, logits, -np.inf)


def probabilities_along(router: Router, survey: Survey) -> Floats:
    """[T,K+1] how probable each choice is at every row of a survey's spans, NaN elsewhere.

    The router goes through each span as in a backtest: from cash on, asked every
    `meta_router.every_bars` bars or when the one in charge is masked; in between they stand.
    """
    first = np.array([span.start for span in survey.spans])
    length = np.array([len(span) for span in survey.spans])
    n_places, cash, every = len(first), router.n_experts, router.config.meta_router.every_bars
    out = np.full((len(survey.market), cash + 1), np.nan)
    usage = router_task.even_usage(n_places, cash + 1)
    in_charge = np.full(n_places, cash, dtype=np.int64)
    age = np.full(n_places, every, dtype=np.int64)
    current = np.zeros((n_places, cash + 1))
    for bar in range(int(length.max())):
        inside = bar < length
        row = np.where(inside, first + bar, first)
        view = survey.view.at(row)
        allowed = router_task.with_cash(view.allowed)
        ask = (age >= every) | ~allowed[np.arange(n_places), in_charge]
        if ask.any():
            obs = router_task.make_observation(view, usage, in_charge, survey.market[row])
            said = router.probabilities(obs, allowed)
            current = np.where(ask[:, None], said, current)
            in_charge = np.where(ask, said.argmax(axis=1), in_charge)
            usage = router_task.update_usage(usage, in_charge, ask)
        age = np.where(ask, 1, age + 1)
        out[row[inside]] = current[inside]
    return out


def _new_model(config: Config, n_experts: int) -> MaskablePPO:
    """MaskablePPO without an environment: made as SB3 itself rebuilds a stored one."""
    from gymnasium import spaces
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.logger import Logger

    meta = config.meta_router
    model = MaskablePPO(
        "MlpPolicy",
        None,  # type: ignore[arg-type]  # the spaces are set below
        learning_rate=meta.lr,
        n_steps=meta.n_steps // meta.n_envs,
        batch_size=meta.batch_size,
        gamma=meta.gamma,
        gae_lambda=meta.gae_lambda,
        ent_coef=meta.ent_coef,
        # Adam as SB3 sets it up, but in one call for all parameters: an update takes 7 % less.
        policy_kwargs={"net_arch": list(_HIDDEN), "optimizer_kwargs": {"eps": 1e-5, "fused": True}},
        device="cpu",
        _init_setup_model=False,
    )
    model.observation_space = router_task.observation_space(n_experts, meta.horizons)
    model.action_space = spaces.Discrete(n_experts + 1)
    model.n_envs = meta.n_envs
    model._setup_model()
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


@contextmanager
def _seeded_globals(seed: int, phase: int | str) -> Iterator[None]:
    """Inside, the global generators of torch and numpy are the phase's own."""
    lots = stream(seed, "router", phase)
    outer_torch, outer_numpy = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    torch.manual_seed(int(lots.integers(2**62)))
    np.random.seed(int(lots.integers(2**32)))  # noqa: NPY002 (SB3 draws from it)
    try:
        yield
    finally:
        torch.set_rng_state(outer_torch)
        np.random.set_state(outer_numpy)  # noqa: NPY002
