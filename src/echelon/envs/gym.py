"""One book as a Gymnasium environment.

It never prints, draws or writes; `info` says what happened:

    pv                       value of the book
    drawdown, max_drawdown   below its highest value of the episode, now and at worst, in [0, 1]
    cvar95, sharpe_annual    of the episode's returns so far; 0 while they are unknown
    costs                    step and total, each with commission, stamp and slippage, in money
    fills                    symbol, side, shares, price (slippage included) of every fill
    rejected                 symbol, reason and filled shares of every order not filled whole
    time, row                of the bar the book now stands at

An action that the mask forbids is not an error: the kernel rejects the order and says why.
"""

from __future__ import annotations

from typing import Any, Unpack

import gymnasium
import numpy as np
from gymnasium.error import InvalidAction, ResetNeeded
from numpy.typing import NDArray

from echelon.config import Config
from echelon.envs.env_spec import EnvOptions, EnvSpec, Observation, OneBook, zero_if_nan
from echelon.envs.world import World
from echelon.market import Fills, Reason
from echelon.ops.measures import RunningMeasures
from echelon.types import Bools

COST_PARTS = ("commission", "stamp", "slippage")


class TradingEnv(gymnasium.Env[Any, NDArray[Any]], OneBook):
    """One book on a world. Spaces are described in `echelon.envs.env_spec`."""

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own form)

    def __init__(self, world: World, config: Config, **options: Unpack[EnvOptions]) -> None:
        self.world = world
        self.config = config
        self.split = options.get("split", "train")
        self._spec = EnvSpec.from_config(world, config, **options)
        self.observation_space = self._spec.observation_space()
        self.action_space = self._spec.action_space()
        self._books = self._spec.books(1)
        self._held = self._books.holdings()
        self._measures = RunningMeasures(world.periods_per_year)
        self._paid = _no_costs()
        self._steps_left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; options={"row": r} says where."""
        super().reset(seed=seed)
        row = self._spec.start(self.np_random, options)
        self._books.reset(np.array([row], dtype=np.int64))
        self._held = self._books.holdings()
        self._measures.reset()
        self._paid = _no_costs()
        self._steps_left = self._spec.steps_from(row)
        return self._observation(), self._info(_no_costs(), None)

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._steps_left <= 0:
            raise ResetNeeded("the episode is over, or none was started: call reset() first.")
        try:
            batch = np.asarray(action)[None]
        except ValueError as error:  # a ragged list
            said = f"an action must be an array; found {action!r} ({error})."
            raise InvalidAction(said) from None
        actions = self._spec.actions(batch, self._held)
        before = self.pv
        result = self._books.step(actions)
        self._held = self._books.holdings()
        self._steps_left -= 1
        costs = {name: float(getattr(result.fills, name).sum()) for name in COST_PARTS}
        self._paid = {name: self._paid[name] + costs[name] for name in COST_PARTS}
        self._measures.update(self.pv / before - 1.0)
        terminated, truncated = bool(result.terminated[0]), self._steps_left == 0
        if terminated:
            self._steps_left = 0
        info, reward = self._info(costs, result.fills), float(result.reward[0])
        return self._observation(), reward, terminated, truncated, info

    def action_masks(self) -> Bools:
        """[N·3] which of HOLD, BUY and SELL each asset allows now, for MaskablePPO."""
        return self._spec.masks(self._held.allowed[0])

    def _observation(self) -> Observation:
        seen = self._spec.observe(self._books.row, self._held)
        return {name: part[0] for name, part in seen.items()}

    def _info(self, costs: dict[str, float], fills: Fills | None) -> dict[str, Any]:
        measures, symbols = self._measures, self.world.symbols
        filled, rejected = [], []
        if fills is not None:
            shares, price, reason = fills.shares[0], fills.price[0], fills.reason[0]
            for n in np.flatnonzero(shares).tolist():
                side = "buy" if shares[n] > 0 else "sell"
                order = {"symbol": symbols[n], "side": side, "shares": abs(float(shares[n]))}
                filled.append({**order, "price": float(price[n])})
            for n in np.flatnonzero(reason).tolist():
                order = {"symbol": symbols[n], "reason": Reason(int(reason[n])).name}
                rejected.append({**order, "filled": abs(float(shares[n]))})
        return {
            "pv": self.pv,
            "drawdown": measures.drawdown,
            "max_drawdown": measures.max_drawdown,
            "cvar95": zero_if_nan(measures.cvar95),
            "sharpe_annual": zero_if_nan(measures.sharpe_annual),
            "costs": {"step": costs, "total": dict(self._paid)},
            "fills": filled,
            "rejected": rejected,
            "time": self.world.times[self.row].item(),
            "row": self.row,
        }


def _no_costs() -> dict[str, float]:
    return dict.fromkeys(COST_PARTS, 0.0)
