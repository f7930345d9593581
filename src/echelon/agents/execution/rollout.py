"""What execution is learned on, and how many orders at once are worked to be learned from.

Axes: `E` orders, `D` days, `T` ticks, `F` public features, `S` steps, `P` private inputs, `A`
numbers that say a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.execution.network import (
    ExecutionNet,
    HiddenState,
    PolicyOutput,
    look_up,
    private_inputs,
    side_of,
)
from echelon.errors import DataError
from echelon.execution.days import Days
from echelon.execution.features import PublicArrays
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders
from echelon.execution.rewards import Reward, reward_of
from echelon.execution.simulator import ExecutionRules, Simulator
from echelon.types import Ints


@dataclass(frozen=True)
class ExecutionTask:
    """Orders to learn from, and what they are paid."""

    days: Days
    public: PublicArrays
    orders: ParentOrders
    rules: ExecutionRules
    reward: Reward

    def __post_init__(self) -> None:
        check_public(self.public, self.days)
        if not len(self.orders):
            raise DataError("there are no orders to learn from. Draw some, or give a file of them.")

    @property
    def n_features(self) -> int:
        """F."""
        return int(self.public.today.shape[2])


def check_public(public: PublicArrays, days: Days) -> None:
    """Refuse features that are not of these days."""
    for name in ("today", "yesterday"):
        array = getattr(public, name)
        what = f"public features {name!r} are"
        if array.ndim != 3 or array.shape[:2] != days.shape:
            raise DataError(
                f"{what} {array.shape}, expected [D,T,F] with (D, T) = {days.shape}. Make them "
                "from these days."
            )
        if not np.isfinite(array).all():
            raise DataError(f"{what} not all numbers. Fill or mask what is missing.")


class OrderRollout(NamedTuple):
    """Whole orders; steps first where time runs, orders first where sequences are encoded.

    private[E,S,P]; params[S,E,A], value[S,E]: of the net that acted
    actions, reward[S,E]; taken[S,E]: 1.0 or 0.0; ended[S,E]: whether the order was done after it
    """

    orders: ParentOrders
    private: Tensor
    params: Tensor
    value: Tensor
    actions: Tensor
    reward: Tensor
    taken: Tensor
    ended: Tensor

    @property
    def env_steps(self) -> int:
        """Steps that orders have taken."""
        return int(self.taken.sum())

    def some(self, which: Ints) -> OrderRollout:
        """Of some orders."""
        e = torch.from_numpy(which)
        rest = (part[:, e] for part in self[2:])
        return OrderRollout(self.orders.take(which), self.private[e], *rest)


@torch.no_grad()
def roll_out(
    net: ExecutionNet,
    task: ExecutionTask,
    orders: ParentOrders,
    choose: Callable[[PolicyOutput], Tensor],
) -> OrderRollout:
    """Work `orders` to their end; choose: from what the net says to actions[E]."""
    public = look_up(net, task.public, orders, task.rules.ticks_per_step)
    side = side_of(orders)
    simulator = Simulator(task.days, orders, task.rules, record=False)
    state: HiddenState = None
    private, outputs, actions, reward, taken, ended = [], [], [], [], [], []
    for k in range(public.shape[1]):
        live = ~simulator.progress.done
        private.append(torch.from_numpy(private_inputs(simulator)))
        output, state = net.step(public[:, k], private[k], side, state)
        outputs.append(output)
        actions.append(choose(output))
        number = simulator.step(net.head.shares(actions[k], simulator))
        # Without a copy: it is read and dropped before the next step.
        history = History.from_simulator(simulator, copy=False)
        reward.append(torch.from_numpy(reward_of(task.reward, history, number, live)))
        taken.append(torch.from_numpy(live))
        ended.append(torch.from_numpy(simulator.progress.done.copy()))
    return OrderRollout(
        orders,
        torch.stack(private, dim=1),
        torch.stack([output.params for output in outputs]),
        torch.stack([output.value for output in outputs]),
        torch.stack(actions),
        torch.stack(reward).float(),
        torch.stack(taken).float(),
        torch.stack(ended),
    )


def by_day(orders: ParentOrders, parts: int, rng: np.random.Generator) -> list[Ints]:
    """Numbers of the orders in `parts` groups of one size; a day is encoded for one group only."""
    days, which = np.unique(orders.day, return_inverse=True)
    place = rng.permutation(len(days))[which]
    # Within a day, too, so that groups that cut a day in two do so differently each time.
    mixed = rng.permutation(len(orders))
    sorted_by_day = mixed[np.argsort(place[mixed], kind="stable")]
    return [part for part in np.array_split(sorted_by_day, parts) if len(part)]
