"""A learned network as a policy that works orders.

Axes: `E` orders, `S` steps, `H` hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.agents.execution.network import ExecutionNet, look_up, side_of
from echelon.agents.execution.sequences import Memory
from echelon.agents.execution.task import PublicArrays, check_public, private_inputs
from echelon.errors import DataError
from echelon.execution.simulator import Simulator
from echelon.types import Floats


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
        self._memory: Memory = None
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
        self._memory = None

    @torch.no_grad()
    def request(self, simulator: Simulator) -> Floats:
        """[E] shares."""
        assert self._known is not None, "the policy was asked before it was told of the orders"
        assert self._side is not None, "the policy was asked before it was told of the orders"
        # Orders step side by side, so that those not done are all at the same step.
        k = int(simulator.progress.step.max())
        private = torch.from_numpy(private_inputs(simulator))
        output, self._memory = self.net.step(self._known[:, k], private, self._side, self._memory)
        return self.net.head.shares(self.net.head.greedy(output.params), simulator)
