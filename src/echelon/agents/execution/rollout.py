"""Work many orders at once with a network, and keep what is to be learned from.

Axes: `E` orders, `S` steps, `P` private inputs, `A` numbers that say a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.execution.network import ExecutionNet, Output, look_up, side_of
from echelon.agents.execution.task import Task, private_inputs
from echelon.execution.history import History, rest_cost_of
from echelon.execution.orders import Ints, ParentOrders
from echelon.execution.rewards import reward_of
from echelon.execution.simulator import Simulator

Choose = Callable[[Output], Tensor]
"""From what the net says to actions[E]."""


class Rollout(NamedTuple):
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

    def some(self, which: Ints) -> Rollout:
        """Of some orders."""
        e = torch.from_numpy(which)
        rest = (part[:, e] for part in self[2:])
        return Rollout(self.orders.take(which), self.private[e], *rest)


@torch.no_grad()
def roll_out(net: ExecutionNet, task: Task, orders: ParentOrders, choose: Choose) -> Rollout:
    """Work `orders` to their end."""
    public = look_up(net, task.public, orders, task.rules.ticks_per_step)
    side = side_of(orders)
    simulator = Simulator(task.days, orders, task.rules, record=False)
    memory = None
    private, said, actions, reward, taken, ended = [], [], [], [], [], []
    for k in range(public.shape[1]):
        live = ~simulator.progress.done
        private.append(torch.from_numpy(private_inputs(simulator)))
        output, memory = net.step(public[:, k], private[k], side, memory)
        said.append(output)
        actions.append(choose(output))
        number = simulator.step(net.head.shares(actions[k], simulator))
        history = _as_it_stands(simulator)
        reward.append(torch.from_numpy(reward_of(task.reward, history, number, live)))
        taken.append(torch.from_numpy(live))
        ended.append(torch.from_numpy(simulator.progress.done.copy()))
    return Rollout(
        orders,
        torch.stack(private, dim=1),
        torch.stack([one.params for one in said]),
        torch.stack([one.value for one in said]),
        torch.stack(actions),
        torch.stack(reward).float(),
        torch.stack(taken).float(),
        torch.stack(ended),
    )


def by_day(orders: ParentOrders, parts: int, rng: np.random.Generator) -> list[Ints]:
    """Numbers of the orders in `parts` groups of one size, those of a day together.

    A day is then encoded for one group, not for all; which days meet is left to chance.
    """
    days, which = np.unique(orders.day, return_inverse=True)
    place = rng.permutation(len(days))[which]
    # Within a day, too, so that groups that cut a day in two do so differently each time.
    mixed = rng.permutation(len(orders))
    sorted_by_day = mixed[np.argsort(place[mixed], kind="stable")]
    return [part for part in np.array_split(sorted_by_day, parts) if len(part)]


def _as_it_stands(simulator: Simulator) -> History:
    """Without copies: it is read and dropped before the next step."""
    return History(
        simulator.days,
        simulator.orders,
        simulator.benchmarks,
        simulator.progress,
        simulator.steps,
        None,
        rest_cost_of(simulator.rules),
    )
