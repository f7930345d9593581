"""Double DQN of execution: its target by hand, its memory, and that it can be restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_execution_ppo import RULES, network, task

from echelon.agents.execution.dqn import DQN, OrderReplay, double_q_target
from echelon.agents.execution.learner import OrderRollout
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import ConfigError, StoreError
from echelon.execution import parent_orders


def learner(seed: int = 0) -> DQN:
    settings = ExecutionLearnerConfig(orders=6, updates=2, memory=10, target_every=3)
    return DQN(settings, network(), task(), seed)


def test_double_q_target_by_hand() -> None:
    online = torch.tensor([[1.0, 5.0, 2.0], [3.0, 0.0, 1.0]])
    target = torch.tensor([[10.0, 20.0, 30.0], [7.0, 8.0, 9.0]])
    reward, discount = torch.tensor([0.5, 1.0]), torch.tensor([0.9, 0.0])
    # The online net chooses (1), the target net says what that is worth (20); the end is worth 0.
    aim = double_q_target(reward, discount, online, target)
    np.testing.assert_allclose(aim, [18.5, 1.0])


def rollout_of(day: list[int], n_steps: int) -> OrderRollout:
    n = len(day)
    by_step = torch.tensor(day, dtype=torch.float32).expand(n_steps, n)
    return OrderRollout(
        parent_orders(day, 1.0, True, 0, 24),
        torch.zeros(n, n_steps, 7),
        torch.zeros(n_steps, n, 5),
        torch.zeros(n_steps, n),
        torch.zeros(n_steps, n, dtype=torch.int64),
        by_step,
        torch.ones(n_steps, n),
        torch.zeros(n_steps, n, dtype=torch.bool),
    )


def test_memory_keeps_the_latest_orders_whole() -> None:
    memory = OrderReplay(3)
    assert len(memory) == 0
    memory.add(rollout_of([0, 1], 4))
    memory.add(rollout_of([2, 3], 3))  # shorter orders: the missing step was not taken
    assert len(memory) == 3
    orders = memory.orders(torch.arange(3))
    assert orders.day.tolist() == [1, 2, 3]
    assert memory.parts["taken"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert memory.parts["reward"][:, 0].tolist() == [1.0, 2.0, 3.0]


def test_memory_takes_longer_orders_than_it_has() -> None:
    memory = OrderReplay(4)
    memory.add(rollout_of([0, 1], 3))
    memory.add(rollout_of([2], 5))
    assert memory.parts["taken"].sum(1).tolist() == [3.0, 3.0, 5.0]


def test_target_network_follows_only_every_so_often() -> None:
    one = learner()
    first = {k: v.clone() for k, v in one.target.state_dict().items()}
    one.train_once()  # two updates
    assert all(torch.equal(v, first[k]) for k, v in one.target.state_dict().items())
    one.train_once()  # the third of them replaces it
    assert any(not torch.equal(v, first[k]) for k, v in one.target.state_dict().items())


def test_exploration_falls_linearly() -> None:
    one = learner()
    assert one.epsilon == 1.0
    one.steps = one.config.total_steps // 4
    assert one.epsilon == pytest.approx(0.525)
    one.steps = one.config.total_steps * 9
    assert one.epsilon == pytest.approx(0.05)


def test_restored_learner_goes_on_bit_for_bit() -> None:
    one = learner()
    for _ in range(2):
        one.train_once()
    tensors, state = one.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    expected = one.train_once()
    other = learner(seed=5)
    other.restore(tensors, state)
    assert other.train_once() == expected
    with pytest.raises(StoreError, match="the state is of 'ppo', this learner is 'dqn'"):
        other.restore(tensors, state | {"algo": "ppo"})


def test_dqn_needs_fractions() -> None:
    with pytest.raises(ConfigError, match="no continuous rate"):
        DQN(ExecutionLearnerConfig(), network(fractions=()), task(), 0)


def test_its_policy_asks_for_fractions_of_the_order() -> None:
    one = learner()
    one.train_once()
    work = one.task
    from echelon.execution.policies import run_orders

    history = run_orders(one.policy(), work.days, work.orders, RULES)
    asked = history.steps.requested / work.orders.amount[:, None]
    early = history.steps.last < work.orders.end[:, None]
    left = 1.0 - np.cumsum(history.steps.executed, axis=1) / work.orders.amount[:, None]
    before = np.concatenate([np.ones((len(left), 1)), left[:, :-1]], axis=1)
    grid = np.minimum(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), before[..., None])
    apart = np.abs(grid - asked[..., None]).min(-1)
    assert apart[early & history.taken].max() < 1e-9
