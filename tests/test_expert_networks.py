"""The expert's networks: any number of assets in any order, absent ones without a say."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from torch import Tensor

from echelon.config import load_config
from echelon.config.agents import StateConfig
from echelon.envs.act import Action, Holdings, free, weights_of_actions
from echelon.errors import ConfigError
from echelon.models.expert import ExpertActor, ExpertCritic, ExpertObs

D, H = 6, 8


def make_obs(batch: int, assets: int, seed: int = 0) -> ExpertObs:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(batch, assets, generator=generator)
    weights = weights / (weights.sum(-1, keepdim=True) + 0.5)
    return ExpertObs(
        torch.randn(batch, assets, D, generator=generator),
        weights,
        1.0 - weights.sum(-1),
        torch.ones(batch, assets, dtype=torch.bool),
        torch.ones(batch, assets, dtype=torch.bool),
    )


def over_assets(obs: ExpertObs, change: Callable[[Tensor], Tensor]) -> ExpertObs:
    return ExpertObs(
        change(obs.z), change(obs.weights), obs.cash, change(obs.present), change(obs.free)
    )


@pytest.fixture
def actor() -> ExpertActor:
    torch.manual_seed(1)
    net = ExpertActor(D, H)
    with torch.no_grad():
        net.last.weight.normal_()
    return net


@pytest.fixture
def critic() -> ExpertCritic:
    torch.manual_seed(2)
    return ExpertCritic(D, H)


def test_assets_in_another_order_get_their_own_actions(actor: ExpertActor) -> None:
    obs = make_obs(3, 5)
    order = torch.tensor([4, 0, 3, 1, 2])
    mean, log_std = actor(obs)
    turned = actor(over_assets(obs, lambda part: part[:, order]))
    assert torch.allclose(turned[0], mean[:, order], atol=1e-6)
    assert torch.allclose(turned[1], log_std[:, order], atol=1e-6)


def test_value_does_not_depend_on_the_order_of_assets(critic: ExpertCritic) -> None:
    obs, order = make_obs(3, 5), torch.tensor([4, 0, 3, 1, 2])
    action = torch.rand(3, 5) * 2 - 1
    turned = critic(over_assets(obs, lambda part: part[:, order]), action[:, order])
    assert torch.allclose(turned, critic(obs, action), atol=1e-6)


def test_absent_assets_change_nothing(actor: ExpertActor, critic: ExpertCritic) -> None:
    """Five assets of which two are absent are the same as three assets."""
    obs = make_obs(4, 5)
    gone = torch.tensor([True, True, True, False, False])
    obs = obs._replace(weights=obs.weights * gone, present=obs.present & gone, free=obs.free & gone)
    few = over_assets(obs, lambda part: part[:, :3])
    assert torch.allclose(actor(obs)[0][:, :3], actor(few)[0], atol=1e-6)
    action = torch.rand(4, 5) * 2 - 1
    assert torch.allclose(critic(obs, action), critic(few, action[:, :3]), atol=1e-6)


def test_actions_of_assets_that_cannot_be_traded_have_no_value(critic: ExpertCritic) -> None:
    obs = make_obs(2, 4)
    obs = obs._replace(free=torch.tensor([[True, True, False, True]] * 2))
    action = torch.zeros(2, 4)
    other = action.clone()
    other[:, 2] = 0.9
    assert torch.equal(critic(obs, action), critic(obs, other))
    other[:, 0] = 0.9
    assert not torch.equal(critic(obs, action), critic(obs, other))


def test_a_book_without_any_asset_has_finite_outputs(
    actor: ExpertActor, critic: ExpertCritic
) -> None:
    obs = make_obs(2, 3)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    obs = obs._replace(present=nothing, free=nothing)
    assert torch.isfinite(actor(obs)[0]).all()
    assert torch.isfinite(critic(obs, torch.zeros(2, 3))).all()


def test_critic_is_what_its_layers_say_one_critic_and_book_at_a_time(critic: ExpertCritic) -> None:
    obs, action = make_obs(2, 3), torch.rand(2, 3) * 2 - 1
    got = critic(obs, action)
    for c in range(2):
        for b in range(2):
            columns = [obs.z[b], obs.weights[b, :, None] * 3, obs.cash[b].expand(3, 1)]
            x = torch.cat([*columns, action[b, :, None]], dim=1)
            rows = slice(c * H, (c + 1) * H)
            h = fn.relu(x @ critic.first.weight[rows].T + critic.first.bias[rows])
            joined = torch.cat([h, h.mean(0).expand(3, H)], dim=1)
            deep = fn.relu(joined @ critic.second.weight[c] + critic.second.bias[c])
            last = fn.relu(deep.mean(0) @ critic.third.weight[c] + critic.third.bias[c])
            value = last @ critic.last.weight[c] + critic.last.bias[c]
            assert float(got[c, b].detach()) == pytest.approx(float(value.detach()), abs=1e-5)


def test_inputs_are_scaled_by_what_is_present(actor: ExpertActor) -> None:
    z = torch.randn(50, 4, D) * 3.0 + 2.0
    present = torch.ones(50, 4, dtype=torch.bool)
    present[:, 3] = False
    z[:, 3] = 1e6
    actor.scale.fit(z, present)
    scaled = actor.scale(z)[present]
    assert torch.allclose(scaled.mean(0), torch.zeros(D), atol=1e-5)
    assert torch.allclose(scaled.std(0), torch.ones(D), atol=1e-4)
    assert set(actor.state_dict()) >= {"scale.shift", "scale.scale"}


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert\.hidden: .* a multiple of 4"):
        load_config(None, ["train.algo=SAC", "expert.hidden=10"])


def held_of(weights: list[float], buy: list[bool], sell: list[bool]) -> Holdings:
    allowed = np.ones((1, len(weights), 3), dtype=bool)
    allowed[0, :, Action.BUY], allowed[0, :, Action.SELL] = buy, sell
    row = np.array([weights], dtype=np.float32)
    return Holdings(row, 1.0 - row.sum(axis=1), allowed, np.ones(len(row)))


def test_actions_share_the_book_with_cash_at_zero() -> None:
    held = held_of([0.0, 0.0], [True, True], [False, False])
    got = weights_of_actions(np.array([[0.0, -1.0]], dtype=np.float32), held)
    powers = [1.0, math.exp(-6.0), 1.0]
    assert got[0] == pytest.approx([p / sum(powers) for p in powers[:2]])


def test_what_cannot_be_traded_keeps_its_weight_and_is_not_free() -> None:
    held = held_of([0.4, 0.1, 0.0], [False, True, False], [False, True, True])
    got = weights_of_actions(np.zeros((1, 3), dtype=np.float32), held)
    assert np.isnan(got[0, 0])
    assert free(held).tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("hidden", "shown"), [("include_pos", "cash"), ("include_cash", "weights")]
)
def test_what_the_state_hides_changes_nothing(hidden: str, shown: str) -> None:
    torch.manual_seed(0)
    state = StateConfig(**{hidden: False})
    actor, critic = ExpertActor(D, H, state), ExpertCritic(D, H, state)
    seen, action = make_obs(3, 5), torch.zeros(3, 5)
    other = {"weights": seen.weights * 0.5, "cash": seen.cash + 0.1}
    unseen = "weights" if shown == "cash" else "cash"
    for net in (lambda o: actor(o)[0], lambda o: critic(o, action)):
        assert torch.equal(net(seen), net(seen._replace(**{unseen: other[unseen]})))
        assert not torch.equal(net(seen), net(seen._replace(**{shown: other[shown]})))
