"""What PPO and DQN share: the task, how orders are worked to be learned from, network and state.

Axes: `E` orders, `S` steps, `P` private inputs, `A` numbers that say a policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.execution.network import (
    ExecutionNet,
    HiddenState,
    NetworkSettings,
    PolicyOutput,
    check_public,
    look_up,
    private_inputs,
    side_of,
)
from echelon.agents.execution.policy import LearnedPolicy, load_weights
from echelon.agents.learner import RoundLearner, refuse_divergence
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import DataError, StoreError
from echelon.execution.days import Days
from echelon.execution.features import PublicArrays
from echelon.execution.history import History
from echelon.execution.orders import ParentOrders
from echelon.execution.rewards import Reward, reward_of
from echelon.execution.simulator import ExecutionRules, Simulator
from echelon.rng import global_draws, stream, torch_generator
from echelon.runs.checkpoint import (
    below_prefix,
    flatten_optimizer,
    pack_generator,
    restore_optimizer,
    unpack_generator,
    with_prefix,
)
from echelon.types import Ints, Metrics


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

    def some(self, which: Ints) -> OrderRollout:
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


class ReturnScale:
    """Running root mean square of what orders got from a step on, or 1 where it is off.

    The mean is not taken away: it would pay each step, and move the optimum where orders end early.
    """

    def __init__(self, *, on: bool) -> None:
        self.on, self.total, self.count = on, 0.0, 0.0

    def see(self, reward: Tensor, taken: Tensor) -> None:
        """reward, taken[S,E]."""
        to_go = (reward * taken).flip(0).cumsum(0).flip(0).double()
        self.total += float((to_go.square() * taken).sum())
        self.count += float(taken.sum())

    @property
    def scale(self) -> float:
        """What rewards are divided by."""
        if not self.on or self.total <= 0.0:
            return 1.0
        return math.sqrt(self.total / self.count)


class ExecutionLearner(RoundLearner):
    """A network that learns from a task; steps: taken so far by all orders."""

    algo = "none"

    def __init__(
        self,
        config: ExecutionLearnerConfig,
        network: NetworkSettings,
        task: ExecutionTask,
        seed: int,
    ) -> None:
        self.config, self.task, self.seed = config, task, seed
        with global_draws(seed, "execution", "weights"):
            self.net = ExecutionNet(network, task.public.today.shape[2])
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.lr, fused=True)
        self.scale = ReturnScale(on=config.normalize_rewards)
        self.steps = 0
        self._order_rng = stream(seed, "execution", "orders")
        self._action_generator = torch_generator(seed, "execution", "actions")

    def policy(self, public: PublicArrays | None = None, name: str | None = None) -> LearnedPolicy:
        """As it is now, on days with these features; None: on those it learns from."""
        return LearnedPolicy(self.net, public or self.task.public, name or self.algo)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer, optimizer_state = flatten_optimizer(self.optimizer)
        tensors = with_prefix("optimizer.", optimizer)
        for name, net in self._networks().items():
            tensors |= with_prefix(f"{name}.", net.state_dict())
        tensors["chance.actions"] = self._action_generator.get_state()
        facts = {
            "algo": self.algo,
            "steps": self.steps,
            "optimizer": optimizer_state,
            "orders": pack_generator(self._order_rng),
            "returns": {"total": self.scale.total, "count": self.scale.count},
        }
        return tensors, facts

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        if state["algo"] != self.algo:
            raise StoreError(
                f"the state is of {state['algo']!r}, this learner is {self.algo!r}. Make the "
                "learner that wrote it."
            )
        for name, net in self._networks().items():
            load_weights(net, below_prefix(f"{name}.", tensors), f"the state of {name}")
        restore_optimizer(self.optimizer, below_prefix("optimizer.", tensors), state["optimizer"])
        self._action_generator.set_state(tensors["chance.actions"])
        self._order_rng = unpack_generator(state["orders"])
        self.scale.total = float(state["returns"]["total"])
        self.scale.count = float(state["returns"]["count"])
        self.steps = int(state["steps"])

    def _networks(self) -> dict[str, ExecutionNet]:
        return {"net": self.net}

    def _set_learning_rate(self) -> None:
        """It falls linearly to 0 at the last step."""
        share = max(0.0, 1.0 - self.steps / self.config.total_steps)
        self.optimizer.param_groups[0]["lr"] = self.config.lr * share

    def _draw_orders(self, count: int, copies: int = 1) -> ParentOrders:
        n = len(self.task.orders)
        which = self._order_rng.permutation(n)[: min(n, max(1, count // copies))]
        return self.task.orders.take(np.repeat(which, copies))

    def _foretell(self, net: ExecutionNet, orders: ParentOrders, private: Tensor) -> PolicyOutput:
        """Of the S steps of the longest order; private[E,≥S,P] may be of longer ones, too."""
        public = look_up(net, self.task.public, orders, self.task.rules.ticks_per_step)
        return net.sequence(public, private[:, : public.shape[1]], side_of(orders))

    def _descend(self, loss: Tensor, grad_clip: float) -> float:
        """One step of Adam; the norm of the gradient. Refuses what is not a number."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self.net.parameters(), grad_clip))
        metrics = {"losses/total": loss.item(), "losses/gradient_norm": norm}
        advice = "execution.learner.lr, set execution.learner.normalize_rewards"
        refuse_divergence(metrics, f"step {self.steps:,}", advice, f" of {self.algo}")
        self.optimizer.step()
        return norm


def mean_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Of each metric, over updates that all have it."""
    return {name: sum(m[name] for m in updates) / len(updates) for name in updates[0]}


def taken_mean(values: Tensor, taken: Tensor) -> Tensor:
    """Mean of the values[…] of steps that were taken; an order that was done takes none."""
    return (values * taken).sum() / taken.sum().clamp_min(1)
