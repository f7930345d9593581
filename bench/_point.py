"""A point pushed over a plane: a control task of which the best result is known.

    v′ = v + Δ·u,  x′ = x + Δ·v′,  u = 2·action,  reward = −Δ·(|x − goal|² + |u|²),  Δ = 0.1

from a random place and a small velocity, for 50 steps; an episode is cut, it never ends. Walls stop
what would leave the square. Learners have goals of their own and otherwise the same world, so each
can pay itself for what another did. System and costs are a linear-quadratic regulator's, which
comes near neither the walls nor the bounds of the force: its value is what is possible.

Axes: `…` any, such as points side by side; `T` steps; `O` = 4 numbers of an observation: place,
velocity.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Law = Callable[[Tensor, int], Tensor]
"""Observations […,O] and the number of the step → actions […,2]."""

N_OBS, N_ACTIONS, STEPS = 4, 2, 50
INTERVAL, FORCE, WALL = 0.1, 2.0, 1.5
STARTS = (1.0, 0.3)
"""Largest coordinate of place and velocity at the start. With goals at ±½ the regulator's greatest
force is about 1.5 + 0.3·√2 < 2."""

_SYSTEM = np.array([[1.0, INTERVAL], [0.0, 1.0]])
_PUSH = np.array([INTERVAL**2, INTERVAL])
"""Of one coordinate: (x, v)′ = system·(x, v) + push·u."""


def starts(n: int, rng: np.random.Generator) -> Tensor:
    """Observations [n,O] at the start of an episode."""
    bounds = np.repeat(STARTS, 2)
    return torch.from_numpy(rng.uniform(-bounds, bounds, (n, N_OBS))).float()


def advance(obs: Tensor, action: Tensor) -> Tensor:
    """Observations […,O] one step later."""
    place, velocity = obs.chunk(2, dim=-1)
    velocity = velocity + INTERVAL * FORCE * action
    free = place + INTERVAL * velocity
    place = free.clamp(-WALL, WALL)
    return torch.cat([place, torch.where(place == free, velocity, 0.0)], dim=-1)


def reward(goal: Tensor, obs: Tensor, action: Tensor) -> Tensor:
    """Reward […] of an action […,2] at obs[…,O], for who wants to be at goal[…,2]."""
    away = (obs[..., :2] - goal).square().sum(-1)
    return -INTERVAL * (away + FORCE**2 * action.square().sum(-1))


def rollout(goal: Tensor, first: Tensor, law: Law) -> Tensor:
    """Return […], undiscounted, of an episode from each of first[…,O]."""
    obs, total = first, torch.zeros(first.shape[:-1])
    for step in range(STEPS):
        action = law(obs, step)
        total += reward(goal, obs, action)
        obs = advance(obs, action)
    return total


def regulator(gamma: float, horizon: int) -> Floats:
    """Best gains [T,2] of an episode of T = `horizon` steps, rewards discounted by gamma.

    The force in a coordinate is −gain·(x − goal, v). By Riccati's recursion, last step first.
    """
    value = np.zeros((2, 2))
    gains = np.zeros((horizon, 2))
    for step in reversed(range(horizon)):
        ahead = gamma * value @ _SYSTEM
        gain = _PUSH @ ahead / (INTERVAL + gamma * _PUSH @ value @ _PUSH)
        closed = _SYSTEM - np.outer(_PUSH, gain)
        value = np.diag([INTERVAL, 0.0]) + _SYSTEM.T @ (gamma * value) @ closed
        gains[step] = gain
    return gains


def regulated(goal: Tensor, gains: Floats) -> Law:
    """The regulator as a law; the bounds of the force are left to who looks at it."""

    def law(obs: Tensor, step: int) -> Tensor:
        k_place, k_velocity = gains[step]
        force = -k_place * (obs[..., :2] - goal) - k_velocity * obs[..., 2:]
        return force.float() / FORCE

    return law


def idle(obs: Tensor, step: int) -> Tensor:
    """The law of who does nothing."""
    return torch.zeros_like(obs[..., :N_ACTIONS])
