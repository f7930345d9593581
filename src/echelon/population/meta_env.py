"""The router's environment: whom to put in charge of a book for the next bars.

A Stable-Baselines3 VecEnv of E environments in lockstep. An episode begins with cash at rows drawn
from the router's spans. A step, from the close at which everybody decides:

1. The fork of expert k is a copy of the real book, for every k, and one more goes to cash.
2. For `meta_router.every_bars` bars each expert trades its fork, under its position limit. If risk
   control masks an expert that is in charge anywhere, the step ends there for all, and all decide
   again.
3. The real book becomes the fork of the one in charge: what it cost to switch is in it.
4. The reward is the log return of the real book less the mean over the experts' forks (not cash),
   made into pay by the router's `RouterReward`; without one it is paid as it is (evaluation).

Episodes last `episode_decisions · every_bars` bars and are then truncated; a ruined book is
terminated and starts again with fresh cash where it stands. Own books come from a `survey`: call
`renew` when experts have changed, or have been started elsewhere.

The halt and the turnover limit of the whole portfolio bind whoever is in charge: not simulated.

Axes: `E` environments, `K` experts, number K is cash, `N` assets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from echelon.agents.expert import Starts
from echelon.backtest.policy import Policy
from echelon.config import Config
from echelon.envs.vec import PlacesVecEnv
from echelon.envs.world import World
from echelon.population import router_task
from echelon.population.expert_books import ExpertBooks, Survey, survey, within_limits
from echelon.population.router_task import RouterReward
from echelon.rng import stream
from echelon.types import Bools, Floats, Floats32, Ints

_RUINED = 1e-6  # growth below this is counted as this: the logarithm of nothing is not finite


class MetaEnv(PlacesVecEnv):
    def __init__(
        self,
        experts: Sequence[Policy],
        world: World,
        spans: Sequence[range],
        config: Config,
        seed: int,
        phase: int = 0,
    ) -> None:
        """spans: rows the router learns on, unseen by the experts; phase: as of `renew`"""
        meta = config.meta_router
        self.experts, self.world = experts, world
        self.config, self.seed_of_run = config, seed
        self.incentive: RouterReward | None = None
        """What rewards are made into; None: paid as they are."""
        self.relative: Floats = np.zeros(meta.n_envs)
        """[E] relative log return of the last step, before it was made into pay."""
        self._spans = tuple(spans)
        self._market: Floats32 | None = None
        n_choices = len(experts) + 1
        self._usage = router_task.even_usage(meta.n_envs, n_choices)
        self._in_charge: Ints = np.full(meta.n_envs, len(experts), dtype=np.int64)
        self._places = [_Place(self, e) for e in range(meta.n_envs)]
        seen = router_task.observation_space(len(experts), meta)
        super().__init__(meta.n_envs, seen, spaces.Discrete(n_choices))
        self.renew(phase)

    def renew(self, phase: int, experts: Sequence[Policy] | None = None) -> None:
        """Trade the own books (of other experts, if given) again; draw starts of this phase."""
        if experts is not None:
            self.experts = experts
        experts, world, meta = self.experts, self.world, self.config.meta_router
        self.survey: Survey = survey(experts, world, self._spans, self.config, self._market)
        self._market = self.survey.market
        shortest = min(len(span) for span in self._spans)
        self._bars = min(meta.episode_decisions * meta.every_bars, shortest - 1)
        rng = stream(self.seed_of_run, "router starts", phase)
        self._starts = Starts(self._spans, self._bars, rng)
        self._noise = stream(self.seed_of_run, "router portfolios", phase)
        whole = self._starts.whole
        self._books = ExpertBooks(experts, world, self.config, self.num_envs, whole, cash=True)
        self._begin()

    def reset(self) -> Floats32:
        self._reset_seeds()
        self._reset_options()
        self._begin()
        return self._observe()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take who is to be in charge[E]; `step_wait` carries it out."""
        self._actions = np.asarray(actions, dtype=np.int64)

    def step_wait(self) -> VecEnvStepReturn:
        chosen, places = self._actions, np.arange(self.num_envs)
        assert self.action_masks()[places, chosen].all(), "a masked expert was chosen"
        before = self._books.value[0].copy()
        kl = self._trade(chosen)
        growth = np.log(np.maximum(self._books.value / before, _RUINED))
        self.relative = growth[chosen, places] - growth[:-1].mean(axis=0)
        everyone = np.ones(self.num_envs, dtype=np.bool_)
        self._usage = router_task.update_usage(self._usage, chosen, everyone)
        self._in_charge = chosen
        self._books.gather(chosen)
        paid = self.relative
        if self.incentive is not None:
            paid = self.incentive.pay(self.relative, chosen, kl)
        return self._end_step(paid.astype(np.float32))

    def action_masks(self) -> Bools:
        """[E,K+1] who may be chosen now; cash always."""
        return router_task.with_cash(self.survey.view.allowed[self._books.row])

    def close(self) -> None:
        """Nothing is open."""

    def _trade(self, chosen: Ints) -> Floats | None:
        """Step all forks to the next decision; [K,E] policy KL where that is paid for."""
        books, view = self._books, self.survey.view
        expert = np.minimum(chosen, len(self.experts) - 1)
        kl = None
        for bar in range(min(self.config.meta_router.every_bars, self._left)):
            targets, current = books.ask(), books.weights
            if bar == 0 and self.incentive is not None:
                kl = self.incentive.unlikeness(targets, current, self._noise)
            scale = view.scale[books.row]
            if (scale != 1.0).any():
                flat = (-1, targets.shape[-1])
                limited = within_limits(
                    targets.reshape(flat), current.reshape(flat), scale.T.astype(np.float64).ravel()
                )
                targets = limited.reshape(targets.shape)
            books.step(targets)
            self._left -= 1
            masked = ~view.allowed[books.row, expert] & (chosen < len(self.experts))
            if masked.any():
                break
        return kl

    def _end_step(self, paid: Floats32) -> VecEnvStepReturn:
        """What SB3 gets of a step, with new episodes started where one ended."""
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        seen, ruined, truncated = self._observe(), self._books.is_ruined()[0], self._left <= 0
        done = ruined | truncated
        if not done.any():
            return seen, paid, done, infos
        for e in np.flatnonzero(done):
            infos[e] = {"terminal_observation": seen[e], "TimeLimit.truncated": not ruined[e]}
        if truncated:
            self._begin()
        else:
            self._fresh(self._books.row, done)
        return self._observe(), paid, done, infos

    def _begin(self) -> None:
        rows, _ = self._starts.draw(self.num_envs)
        self._left = self._bars
        self._fresh(rows, np.ones(self.num_envs, dtype=np.bool_))

    def _fresh(self, rows: Ints, which: Bools) -> None:
        """Cash at `rows`[E] for the environments `which`[E], with nobody's history."""
        self._books.begin(rows, which)
        even = router_task.even_usage(self.num_envs, len(self.experts) + 1)
        self._usage = np.where(which[:, None], even, self._usage)
        self._in_charge = np.where(which, len(self.experts), self._in_charge)

    def _observe(self) -> Floats32:
        row = self._books.row
        return router_task.make_observation(
            self.survey.view.at(row), self._usage, self._in_charge, self.survey.market[row]
        )

    def env_method(
        self,
        method_name: str,
        *method_args: Any,  # noqa: ANN401 (SB3's signature)
        indices: VecEnvIndices = None,
        **method_kwargs: Any,  # noqa: ANN401 (SB3's signature)
    ) -> list[Any]:
        """Call a method of each environment; masks, asked for at every step, all at once."""
        if method_name == "action_masks":
            return list(self.action_masks()[np.array(self._get_indices(indices))])
        return super().env_method(method_name, *method_args, indices=indices, **method_kwargs)


class _Place:
    """One environment as code that expects one of its own sees it."""

    render_mode: None = None
    spec: None = None

    def __init__(self, env: MetaEnv, index: int) -> None:
        self._env = env
        self._index = index

    def action_masks(self) -> Bools:
        """[K+1] who may be chosen."""
        return np.asarray(self._env.action_masks()[self._index])
