"""The router: PPO with masks over K experts and cash (`population.ppo`).

- It learns in phases, each on a `MetaEnv` whose episodes start from cash. All random numbers of a
  phase come from the seed and the phase's number, so that a run that is resumed between phases goes
  on with the same ones.
- It is stored as weights and JSON, and rebuilt: nothing is pickled.
- It can be asked before it has learned anything: its first weights come from the seed too.
- `meta_router.command: select` puts the most probable choice in charge, `blend` holds the mix of
  the experts' targets in the proportions of its probabilities. Both are learned alike, from draws:
  what drawn choices earn on average is a lower bound of what their mix earns. (The logarithm is
  concave: the mix of growths grows at least as fast as the mean logarithm; and |Σ p·w − w'| is at
  most Σ p·|w − w'|: the mix trades at most what the draws trade on average.) So PPO's gradient,
  that of the mean over draws, goes up the bound; where experts agree, it is exact. What a network
  sees of itself, usage and who is in charge, is with `blend` the mean of what it saw in training.

Axes: `E` decisions made together, `K` experts, `N` assets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from echelon.config import Config
from echelon.errors import StoreError, TrainingError
from echelon.population import router_task
from echelon.population.expert_books import Survey
from echelon.population.ppo import Ppo, RouterNet
from echelon.population.router_task import RouterReward
from echelon.rng import stream
from echelon.runs.checkpoint import below_prefix, flatten_optimizer, restore_optimizer, with_prefix
from echelon.types import Bools, Floats, Floats32, Ints, Metrics

if TYPE_CHECKING:
    from echelon.population.meta_env import MetaEnv

_ADVICE = "Lower meta_router.lr; the checkpoints on disk are from before."


class Router:
    """A network and what its training has to remember; a `RouterPolicy`."""

    def __init__(self, config: Config, n_experts: int, seed: int) -> None:
        self.config = config
        self.n_experts = n_experts
        self.seed = seed
        meta = config.meta_router
        self.incentive = RouterReward(meta, n_experts)
        n_obs = router_task.observation_size(n_experts, meta)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(seed, "router", "weights").integers(2**62)))
            net = RouterNet(n_obs, n_experts, prior=meta.prior != "none")
        self.ppo = Ppo(net, meta)

    @property
    def net(self) -> RouterNet:
        return self.ppo.net

    def learn(self, env: MetaEnv, steps: int, phase: int) -> Metrics:
        """At least `steps` decisions on `env`, renewed for this phase, in whole rollouts."""
        began, incentive, lots = (
            time.perf_counter(),
            self.incentive,
            stream(self.seed, "router", phase),
        )
        generator = torch.Generator().manual_seed(int(lots.integers(2**62)))
        rng = np.random.RandomState(int(lots.integers(2**32)))
        env.incentive = incentive
        try:
            learned, relative = self.ppo.learn(env, steps, rng, generator, incentive.adapt)
        finally:
            env.incentive = None
        if not math.isfinite(learned.entropy):
            raise TrainingError(
                f"the router's losses are not finite numbers after {self.decisions:,} decisions: "
                f"training has diverged. {_ADVICE}"
            )
        metrics = {
            "router/relative_return": float(np.mean(relative)),
            "router/usage_entropy": incentive.usage.entropy(),
            "router/kl_lambda": incentive.weight,
            "router/reward_scale": incentive.scale.std,
            "router/explained_variance": learned.explained_variance,
            "router/entropy": learned.entropy,
            "router/decisions": float(self.decisions),
            "time/router_updates": time.perf_counter() - began,
        }
        return metrics | ({"router/kl_prior": learned.kl} if self.net.has_prior else {})

    @property
    def decisions(self) -> int:
        return self.ppo.decisions

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
        self.ppo.lr = lr

    def weights(self) -> dict[str, Tensor]:
        """All a policy needs: see `load`."""
        return {name: part.clone() for name, part in self.net.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take what `weights` gave; refuses those of another population or other horizons."""
        try:
            self.net.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise StoreError(
                f"the router's weights do not fit {self.n_experts} experts seen over "
                f"{self.config.meta_router.horizons} bars: {error}. Use the configuration of the "
                "run they are from."
            ) from error

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        flat, optimizer = flatten_optimizer(self.ppo.optimizer)
        tensors = with_prefix("policy.", self.weights())
        tensors |= with_prefix("optimizer.", {name: part.clone() for name, part in flat.items()})
        return tensors, {
            "decisions": self.decisions,
            "updates": self.ppo.updates,
            "lr": self.ppo.lr,
            "optimizer": optimizer,
            "incentive": self.incentive.state(),
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.load(below_prefix("policy.", tensors))
        flat = below_prefix("optimizer.", tensors)
        restore_optimizer(self.ppo.optimizer, flat, state["optimizer"])
        self.ppo.decisions = int(state["decisions"])
        self.ppo.updates = int(state["updates"])
        self.set_lr(float(state["lr"]))
        self.incentive.restore(state["incentive"])

    @torch.no_grad()
    def _logits(self, obs: Floats32, allowed: Bools) -> Floats:
        """[E,K+1], −∞ where not allowed."""
        assert allowed.any(axis=1).all(), "there is nobody to choose"
        said = self.net.logits(torch.from_numpy(obs))
        logits = (said - said.logsumexp(dim=-1, keepdim=True)).numpy().astype(np.float64)
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
    blends = router.config.meta_router.command == "blend"
    for bar in range(int(length.max())):
        inside = bar < length
        row = np.where(inside, first + bar, first)
        view = survey.view.at(row)
        allowed = router_task.with_cash(view.allowed)
        ask = (age >= every) | ~allowed[np.arange(n_places), in_charge]
        if ask.any():
            now = current if blends and bar else in_charge
            obs = router_task.make_observation(view, usage, now, survey.market[row])
            said = router.probabilities(obs, allowed)
            current = np.where(ask[:, None], said, current)
            in_charge = np.where(ask, said.argmax(axis=1), in_charge)
            usage = router_task.update_usage(usage, said if blends else in_charge, ask)
        age = np.where(ask, 1, age + 1)
        out[row[inside]] = current[inside]
    return out
