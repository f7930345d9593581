"""Oracle policy distillation: the loss by hand, who sees what, and that it can be restored."""

from __future__ import annotations

import math

import pytest
import torch
from execution_nets import build_net
from test_execution_ppo import network, task

from echelon.agents.execution.ppo import PPO, distillation, make_teacher
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import ConfigError

SETTINGS = ExecutionLearnerConfig(orders=8, minibatches=2, epochs=2)


def student(seed: int = 0, **changes: object) -> PPO:
    teacher = make_teacher(SETTINGS, network(), task(), 3)
    settings = SETTINGS.model_copy(update={"distill": 1.0} | changes)
    return PPO(settings, network(), task(), seed, teacher.net)


def test_distillation_by_hand() -> None:
    net = build_net(network(fractions=(0.0, 1.0)), 3, 0)
    own, taught = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[1.0, 0.0]])
    # The teacher's action is 0, to which the student gives a quarter.
    told = distillation(own, taught, net.head, "action")
    assert float(told) == pytest.approx(-math.log(0.25))
    whole = distillation(own, own, net.head, "distribution")
    assert float(whole) == pytest.approx(0.0, abs=1e-7)
    p = 1.0 / (1.0 + math.exp(-1.0))
    apart = p * math.log(p / 0.25) + (1.0 - p) * math.log((1.0 - p) / 0.75)
    assert float(distillation(own, taught, net.head, "distribution")) == pytest.approx(apart)


def test_distillation_of_rates_by_hand() -> None:
    net = build_net(network(fractions=()), 3, 0)
    own, taught = torch.tensor([[0.5, 0.0]]), torch.tensor([[1.5, -3.0]])
    told = distillation(own, taught, net.head, "action")
    assert float(told) == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5)


def test_teacher_sees_the_future_and_is_not_moved() -> None:
    one = student()
    assert one.teacher.settings.oracle
    assert not one.net.settings.oracle
    before = {k: v.clone() for k, v in one.teacher.state_dict().items()}
    metrics = one.train_once()
    assert metrics["losses/distillation"] > 0.0
    assert all(torch.equal(v, before[k]) for k, v in one.teacher.state_dict().items())


def test_without_weight_the_student_is_plain_ppo() -> None:
    from echelon.agents.execution.ppo import PPO

    plain = PPO(SETTINGS, network(), task(), 0)
    one = student(distill=0.0)
    for _ in range(2):
        plain.train_once()
        one.train_once()
    for name, value in plain.net.state_dict().items():
        torch.testing.assert_close(one.net.state_dict()[name], value)


def test_student_comes_closer_to_what_the_teacher_does() -> None:
    one = student(distill=100.0, lr=1e-2)
    first = one.train_once()["losses/distillation"]
    for _ in range(15):
        last = one.train_once()["losses/distillation"]
    assert last < 0.8 * first


def test_weight_falls_to_nothing() -> None:
    one = student(distill_decay=0.5, total_steps=200)
    assert one.distill_weight == 1.0
    one.steps = 25
    assert one.distill_weight == pytest.approx(0.75)
    one.steps = 400
    assert one.distill_weight == 0.0


def test_restored_student_goes_on_bit_for_bit() -> None:
    one = student()
    one.train_once()
    tensors, state = one.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    expected = one.train_once()
    teacher = build_net(network(oracle=True), 3, 77)
    other = PPO(one.config, network(), task(), 8, teacher)
    other.restore(tensors, state)
    assert other.train_once() == expected


def test_teachers_and_students_that_do_not_fit_are_refused() -> None:
    rates = build_net(network(fractions=(), oracle=True), 3, 0)
    with pytest.raises(ConfigError, match="expected the same"):
        PPO(SETTINGS, network(), task(), 0, rates)
    seer = build_net(network(oracle=True), 3, 0)
    with pytest.raises(ConfigError, match="must not see the future"):
        PPO(SETTINGS, network(oracle=True), task(), 0, seer)
