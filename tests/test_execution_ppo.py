"""The network and PPO of execution: causal, exact by hand, restorable."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from execution_nets import build_net

from echelon.agents.execution.learner import ExecutionTask, by_day, roll_out, taken_mean
from echelon.agents.execution.network import (
    PRIVATE,
    FractionHead,
    NetworkSettings,
    RateHead,
    look_up,
    private_inputs,
    side_of,
    step_ticks,
)
from echelon.agents.execution.policy import (
    LearnedPolicy,
    load_execution_policy,
    save_execution_policy,
)
from echelon.agents.execution.ppo import (
    PPO,
    clipped_policy_loss,
    less_copies,
    order_returns,
    standardize_where,
)
from echelon.config.execution import ExecutionLearnerConfig
from echelon.errors import DataError, StoreError, TrainingError
from echelon.execution import (
    Days,
    ExecutionRules,
    History,
    PAPenalty,
    Simulator,
    Weighted,
    parent_orders,
)
from echelon.execution.features import PublicArrays
from echelon.execution.policies import run_orders
from echelon.runs.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from echelon.types import Floats, Floats32

RULES = ExecutionRules(ticks_per_step=5)
SEQUENCES = ("gru", "lstm", "attention")


def market(seed: int = 0, n_days: int = 6, n_ticks: int = 24) -> tuple[Days, PublicArrays]:
    rng = np.random.default_rng(seed)
    price = 100.0 + rng.normal(0, 0.3, (n_days, n_ticks)).cumsum(axis=1)
    today = rng.normal(size=(n_days, n_ticks, 3)).astype(np.float32)
    yesterday = rng.normal(size=(n_days, n_ticks, 3)).astype(np.float32)
    return Days.from_prices(price, np.full(price.shape, 50.0)), PublicArrays(today, yesterday)


def task(seed: int = 0) -> ExecutionTask:
    days, public = market(seed)
    orders = parent_orders(
        [0, 1, 1, 2, 3, 4, 5, 5], 10.0, [True, False] * 4, [0, 3, 0, 7, 0, 2, 11, 0], 24
    )
    return ExecutionTask(days, public, orders, RULES, PAPenalty(penalty=1.0))


def network(**changes: object) -> NetworkSettings:
    return NetworkSettings(hidden=8, heads=2, **changes)  # type: ignore[arg-type]


# --- the maths


def test_clipped_loss_by_hand() -> None:
    new = torch.log(torch.tensor([1.5, 0.5, 1.1, 9.0]))
    advantage = torch.tensor([2.0, -1.0, -3.0, 1.0])
    taken = torch.tensor([1.0, 1.0, 1.0, 0.0])
    loss = clipped_policy_loss(new, torch.zeros(4), advantage, taken, 0.2)
    # 1.2·2 (cut), −0.8 (cut: the worse), −3.3 (inside); the last step was not taken.
    assert float(loss) == pytest.approx(-(2.4 - 0.8 - 3.3) / 3)


def test_advantage_of_orders_by_hand() -> None:
    reward = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    discount = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # the second order ends after its first step
    value = torch.tensor([[0.5, 1.0], [2.0, 7.0]])
    returns = order_returns(reward, discount, value, 0.5)
    # δ_0 = 1 + 2 − 0.5 = 2.5, δ_1 = 3 − 2 = 1; A_0 = 2.5 + 0.5·1 = 3, A_1 = 1.
    np.testing.assert_allclose((returns - value)[:, 0], [3.0, 1.0])
    assert float(returns[0, 1]) == 2.0


def test_standardised_where_taken_by_hand() -> None:
    values, taken = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([1.0, 1.0, 0.0])
    np.testing.assert_allclose(standardize_where(values, taken), [-1.0, 1.0, 0.0], atol=1e-6)
    assert float(taken_mean(values, taken)) == 2.0


def test_copies_lose_what_they_have_in_common() -> None:
    advantage = torch.tensor([[5.0, 7.0, 1.0, 4.0]])
    taken = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    # The third has no other copy at this step and stays; the fourth was not there.
    np.testing.assert_allclose(less_copies(advantage, taken, 2), [[-2.0, 2.0, 1.0, 0.0]])


def test_fraction_head_by_hand() -> None:
    head = FractionHead((0.0, 1.0))
    params = torch.tensor([[0.0, math.log(3.0)]])
    assert float(head.log_prob(params, torch.tensor([1]))) == pytest.approx(math.log(0.75))
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(head.entropy(params)) == pytest.approx(entropy)
    even = torch.zeros(1, 2)
    apart = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(head.divergence(params, even)) == pytest.approx(apart)
    assert int(head.greedy(params)) == 1
    drawn = head.sample(params.expand(20_000, 2), torch.Generator().manual_seed(0))
    assert float(drawn.float().mean()) == pytest.approx(0.75, abs=0.01)


def test_rate_head_agrees_with_torch_and_begins_at_twap() -> None:
    head = RateHead(4.0)
    one, two = torch.tensor([[0.3, -0.5]]), torch.tensor([[-0.2, 0.4]])
    a, b = (torch.distributions.Normal(p[0, 0], p[0, 1].exp()) for p in (one, two))
    u = torch.tensor([0.9])
    assert float(head.log_prob(one, u)) == pytest.approx(float(a.log_prob(u)))
    assert float(head.entropy(one)) == pytest.approx(float(a.entropy()))
    apart = torch.distributions.kl_divergence(a, b)
    assert float(head.divergence(one, two)) == pytest.approx(float(apart), rel=1e-5)
    assert 4.0 * torch.sigmoid(head.first_bias()).item() == pytest.approx(1.0)


# --- the network


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("oracle", [False, True])
def test_row_t_knows_ticks_before_t_only_unless_it_is_the_oracles(
    sequence: str, oracle: bool
) -> None:
    net = build_net(network(sequence=sequence, oracle=oracle), 3, 1)
    _, public = market()
    today, yesterday = torch.from_numpy(public.today), torch.from_numpy(public.yesterday)
    other = today.clone()
    other[:, 10:] = torch.randn(other[:, 10:].shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before, after = net.table(today, yesterday), net.table(other, yesterday)
    same = (before == after).all(dim=(0, 2)) if not oracle else None
    if same is None:
        assert not torch.equal(before[:, :11], after[:, :11])
    else:
        assert bool(same[:11].all())
        assert not torch.equal(before[:, 11], after[:, 11])


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_yesterday_is_used_from_the_first_tick(sequence: str) -> None:
    net = build_net(network(sequence=sequence), 3, 1)
    _, public = market()
    today, yesterday = torch.from_numpy(public.today), torch.from_numpy(public.yesterday)
    today.requires_grad_(False)
    yesterday.requires_grad_(True)
    net.table(today, yesterday)[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert yesterday.grad is not None
    assert bool((yesterday.grad[:, -1].abs().sum(-1) > 0).all())


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_step_by_step_equals_the_whole_sequence(sequence: str) -> None:
    work = task()
    net = build_net(network(sequence=sequence), 3, 2)
    rollout = roll_out(net, work, work.orders, lambda out: net.head.greedy(out.params))
    with torch.no_grad():
        public = look_up(net, work.public, work.orders, RULES.ticks_per_step)
        whole = net.sequence(public, rollout.private, side_of(work.orders))
    torch.testing.assert_close(whole.params.transpose(0, 1), rollout.params)
    torch.testing.assert_close(whole.value.transpose(0, 1), rollout.value)


def test_lookup_is_the_same_with_and_without_gradients_and_by_order() -> None:
    work = task()
    net = build_net(network(), 3, 2)
    with_grad = look_up(net, work.public, work.orders, 5)
    with torch.no_grad():
        without = look_up(net, work.public, work.orders, 5)
        table = net.table(
            *(torch.from_numpy(a) for a in (work.public.today, work.public.yesterday))
        )
    torch.testing.assert_close(with_grad, without)
    for e, ticks in enumerate(step_ticks(work.orders, 5)):
        for s, tick in enumerate(ticks):
            torch.testing.assert_close(without[e, s], table[work.orders.day[e], tick])


def test_step_ticks_are_where_the_simulator_steps() -> None:
    work = task()
    simulator = Simulator(work.days, work.orders, RULES)
    ticks = step_ticks(work.orders, 5)
    while not simulator.over:
        live, step = ~simulator.progress.done, simulator.progress.step
        assert (ticks[live, step[live]] == simulator.progress.tick[live]).all()
        simulator.step(np.zeros(len(work.orders)))


def test_private_inputs_by_hand() -> None:
    days, _ = market()
    simulator = Simulator(
        days, parent_orders(0, 100.0, True, 2, 12), ExecutionRules(5, volume_cap=0.1)
    )
    first = dict(zip(PRIVATE, private_inputs(simulator)[0].tolist(), strict=True))
    assert first == pytest.approx(
        {
            "left": 1.0,
            "time_left": 1.0,
            "day_left": 10 / 24,
            "day_gone": 2 / 24,
            "even": 0.3,
            "executed": 0.0,
            "filled": 1.0,
        },
        abs=1e-6,
    )
    simulator.step(np.array([30.0]))  # the cap lets through 5 in each of three ticks
    then = dict(zip(PRIVATE, private_inputs(simulator)[0].tolist(), strict=True))
    assert then == pytest.approx(
        {
            "left": 0.85,
            "time_left": 0.7,
            "day_left": 7 / 24,
            "day_gone": 5 / 24,
            "even": 5 / 7,
            "executed": 0.15,
            "filled": 0.5,
        },
        abs=1e-6,
    )


# --- the policy


@pytest.mark.parametrize("fractions", [(), (0.0, 0.25, 0.5, 1.0)])
def test_scrambling_the_future_changes_no_request_before_it(fractions: tuple[float, ...]) -> None:
    work = task()
    net = build_net(network(fractions=fractions), 3, 3)
    for weight in net.actor.parameters():  # far from its start, so that it reacts
        weight.data.mul_(3.0)

    def requested(price: Floats, today: Floats32) -> Floats:
        days = Days.from_prices(price, work.days.volume)
        policy = LearnedPolicy(net, PublicArrays(today, work.public.yesterday))
        return run_orders(policy, days, work.orders, RULES).steps.requested

    price, today = work.days.buy.copy(), work.public.today.copy()
    before = requested(price, today)
    price[:, 10:] *= 1.3
    today[:, 10:] += 2.0
    after = requested(price, today)
    known = step_ticks(work.orders, 5) <= 10
    np.testing.assert_array_equal(before[known], after[known])
    assert not np.array_equal(before, after)


def test_untrained_rate_policy_is_nearly_twap() -> None:
    work = task()
    net = build_net(network(fractions=()), 3, 4)
    history = run_orders(LearnedPolicy(net, work.public), work.days, work.orders, RULES)
    assert history.ticks is not None
    executed = history.ticks.executed[0, :20]
    np.testing.assert_allclose(executed, 10.0 / 24, rtol=0.15)


def test_features_of_other_days_are_refused() -> None:
    work = task()
    net = build_net(network(), 3, 4)
    few = PublicArrays(work.public.today[:, :, :2], work.public.yesterday[:, :, :2])
    with pytest.raises(DataError, match="made for 3 public features, these days have 2"):
        LearnedPolicy(net, few)
    short = PublicArrays(work.public.today[:4], work.public.yesterday[:4])
    with pytest.raises(DataError, match=r"\(D, T\) = \(6, 24\)"):
        run_orders(LearnedPolicy(net, short), work.days, work.orders, RULES)
    broken = PublicArrays(np.full_like(work.public.today, np.nan), work.public.yesterday)
    with pytest.raises(DataError, match="not all numbers"):
        ExecutionTask(work.days, broken, work.orders, RULES, PAPenalty())


# --- the learner


def learner(seed: int = 0, **changes: object) -> PPO:
    settings = ExecutionLearnerConfig(orders=8, minibatches=2, epochs=2, **changes)  # type: ignore[arg-type]
    return PPO(settings, network(fractions=()), task(), seed)


def weights(of: PPO) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in of.net.parameters()])


def test_same_seed_same_weights_other_seed_others() -> None:
    trained = []
    for seed in (0, 0, 1):
        one = learner(seed)
        for _ in range(3):
            one.train_once()
        trained.append(weights(one))
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


def test_restored_learner_goes_on_bit_for_bit() -> None:
    one = learner(copies=2)
    one.train_once()
    tensors, state = one.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    expected = one.train_once()
    other = learner(seed=9, copies=2)
    other.restore(tensors, state)
    assert other.train_once() == expected
    assert torch.equal(weights(one), weights(other))


def test_a_learner_goes_on_from_a_stored_checkpoint_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    one = learner()
    one.train_once()
    tensors, state = one.state()
    save_checkpoint(tmp_path, one.steps, tensors, state, config_hash="none", keep=1)
    path = latest_checkpoint(tmp_path)
    assert path is not None
    stored = load_checkpoint(path, config_hash="none")
    expected = one.train_once()
    other = learner(seed=9)
    other.restore(stored.tensors, stored.state)
    assert other.train_once() == expected


def test_minibatches_take_every_order_once_and_keep_days_together() -> None:
    orders = parent_orders(np.repeat(np.arange(8), 4), 1.0, True, 0, 24)
    parts = by_day(orders, 4, np.random.default_rng(0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(32))
    assert all(len(np.unique(orders.day[part])) == 2 for part in parts)


def test_reward_scale_makes_the_unit_of_rewards_irrelevant() -> None:
    losses = []
    for unit in (1.0, 1000.0):
        settings = ExecutionLearnerConfig(orders=8, minibatches=2, epochs=2, normalize_rewards=True)
        base = task()
        paid = ExecutionTask(
            base.days, base.public, base.orders, RULES, Weighted([(unit, PAPenalty(1.0))])
        )
        losses.append(PPO(settings, network(fractions=()), paid, 0).train_once()["losses/value"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_learning_rate_falls_to_nothing_at_the_end() -> None:
    one = learner(total_steps=60)
    rates = [one.train_once()["charts/learning_rate"] for _ in range(3)]
    assert rates[0] == pytest.approx(one.config.lr)
    assert rates[0] > rates[1] > rates[2] >= 0.0


def test_a_loss_that_is_no_number_stops_and_leaves_the_weights() -> None:
    one = learner()
    rollout = one.collect()
    before = weights(one)
    broken = rollout._replace(reward=torch.full_like(rollout.reward, math.inf))
    with pytest.raises(TrainingError, match=r"diverged at step .* of ppo"):
        one.update(broken)
    assert torch.equal(before, weights(one))


def test_a_reward_that_is_no_number_names_the_order() -> None:
    base = task()

    def broken(history: History, number: np.ndarray) -> Floats:
        return np.full(len(number), np.nan)

    bad = PPO(
        ExecutionLearnerConfig(orders=8),
        network(),
        ExecutionTask(base.days, base.public, base.orders, RULES, broken),
        0,
    )
    with pytest.raises(TrainingError, match=r"the reward of order 0 .* at step 0 is nan"):
        bad.train_once()


# --- files


def test_saved_policy_asks_for_the_same(tmp_path: Path) -> None:
    work = task()
    net = build_net(network(sequence="lstm", fractions=()), 3, 4)
    save_execution_policy(tmp_path / "policy", net, ("a", "b", "c"), {"seed": 4})
    stored = load_execution_policy(tmp_path / "policy", ("a", "b", "c"))
    assert stored.net.settings == net.settings
    assert stored.facts == {"seed": 4}
    asked = [
        run_orders(LearnedPolicy(one, work.public), work.days, work.orders, RULES).steps.requested
        for one in (net, stored.net)
    ]
    np.testing.assert_array_equal(*asked)


def test_policy_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    save_execution_policy(path, build_net(network(), 3, 4), ("a", "b", "c"))
    with pytest.raises(StoreError, match=r"3 public features \(a, b, c\), expected 2 \(a, x\)"):
        load_execution_policy(path, ("a", "x"))
    one = learner()
    tensors, state = one.state()
    wide = PPO(one.config, NetworkSettings(hidden=16, heads=2, fractions=()), one.task, 0)
    with pytest.raises(StoreError, match="is of another network"):
        wide.restore(tensors, state)
    other = PPO(one.config, network(sequence="attention", fractions=()), one.task, 0)
    with pytest.raises(StoreError, match="is of another network"):
        other.restore(tensors, state)
    (path / "policy.safetensors").write_bytes(b"nothing")
    with pytest.raises(StoreError, match="do not have the hash"):
        load_execution_policy(path)
    with pytest.raises(StoreError, match="Give the directory of an execution policy"):
        load_execution_policy(tmp_path / "nowhere")
