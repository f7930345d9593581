"""Work many orders at once with a network: to keep what is to be learned from, or as a policy.

Axes: `E` orders, `S` steps, `H` hidden units, `P` private inputs, `A` numbers that say a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.execution.network import (
    ExecutionNet,
    HiddenState,
    PolicyOutput,
    look_up,
    side_of,
)
from echelon.agents.execution.task import ExecutionTask, check_public, private_inputs
from echelon.errors import DataError
from echelon.execution.features import PublicArrays
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders
from echelon.execution.rewards import reward_of
from echelon.execution.simulator import Simulator
from echelon.types import Floats, Ints

Choose = Callable[[PolicyOutput], Tensor]
"""From what the net says to actions[E]."""


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
    net: ExecutionNet, task: ExecutionTask, orders: ParentOrders, choose: Choose
) -> OrderRollout:
    """Work `orders` to their end."""
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
    """Numbers of the orders in `parts` groups of one size, those of a day together.

    A day is then encoded for one group, not for all; which days meet is random.
    """
    days, which = np.unique(orders.day, return_inverse=True)
    place = rng.permutation(len(days))[which]
    # Within a day, too, so that groups that cut a day in two do so differently each time.
    mixed = rng.permutation(len(orders))
    sorted_by_day = mixed[np.argsort(place[mixed], kind="stable")]
    return [part for part in np.array_split(sorted_by_day, parts) if len(part)]


class LearnedPolicy:
    """Does the likeliest, or the mean; it does not explore.

    `start` encodes the days of the orders, whole; by the network's construction what it looks up
    for a step has seen only the ticks before it.
    """

    def __init__(self, net: ExecutionNet, public: PublicArrays, name: str = "learned") -> None:
        self.net = net
        self.public = public
        self.name = name
        self._known: Tensor | None = None
        self._side: Tensor | None = None
        self._state: HiddenState = None
        features = int(public.today.shape[2])
        if features != net.n_features:
            raise DataError(
                f"policy {name!r} was made for {net.n_features} public features, these days have "
                f"{features}. Use the features it was trained with."
            )

    def start(self, simulator: Simulator) -> None:
        """Encode the days."""
        check_public(self.public, simulator.days)
        self.net.eval()
        with torch.no_grad():
            self._known = look_up(
                self.net, self.public, simulator.orders, simulator.rules.ticks_per_step
            )
        self._side = side_of(simulator.orders)
        self._state = None

    @torch.no_grad()
    def request(self, simulator: Simulator) -> Floats:
        """[E] shares."""
        assert self._known is not None, "the policy was asked before it got the orders"
        assert self._side is not None, "the policy was asked before it got the orders"
        # Orders step side by side, so that those not done are all at the same step.
        k = int(simulator.progress.step.max())
        private = torch.from_numpy(private_inputs(simulator))
        output, self._state = self.net.step(self._known[:, k], private, self._side, self._state)
        return self.net.head.shares(self.net.head.greedy(output.params), simulator)
