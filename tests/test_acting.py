"""The fast ways through the network give what the plain ones do: acting, values, chunks; and what
the benchmark of A2C compares is comparable.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gymnasium.utils.env_checker import check_env
from torch import Tensor
from worlds import make_config

from bench import a2c as bench
from bench._a2c_peer import WindowEnv
from echelon.config import Config
from echelon.models import encoders
from echelon.models.actor_critic import Acting, ActorCritic, MarketTensors
from echelon.models.encoders import build_encoder

L, G, E, N, F, W = 4, 2, 3, 5, 2, 4
SMALL = (f"window={W}", "model.d_model=8", "model.n_layers=1", "model.hidden=8")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draws(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(config: Config) -> ActorCritic:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = ActorCritic(config, F)
    with torch.no_grad():  # far from the uniform policy that a new network has
        net.actor.outer.weight.mul_(100.0)
    return net


CASES = [
    *[(f"model.cross_asset={cross}",) for cross in ("mlp", "attention", "none")],
    ("model.shared_encoder=false",),
    ("state.include_pos=false", "state.include_cash=false"),
]


@pytest.mark.parametrize("overrides", CASES)
def test_acting_and_values_equal_the_network_asked_whole(overrides: tuple[str, ...]) -> None:
    net = network(make_config(*SMALL, *overrides))
    market = net.encode(draws(L, G, W, N, F).flatten(0, 1))
    market = market.map(lambda part: part.view(L, G, 1, N, -1))
    portfolio = draws(L, G, E, N, net.n_portfolio, seed=2)
    present = draws(L, G, 1, N, seed=3) > -0.5
    mask = draws(L, G, E, N, 3, seed=4) > 0.0
    assert not present.all()
    whole = net(market, portfolio, present, mask)
    acting = Acting(net, market, present)
    for k in range(L):
        logits = acting.logits(k, portfolio[k], mask[k])
        assert not logits.requires_grad
        torch.testing.assert_close(logits, whole.logits[k])
    bars = torch.tensor([2, 0])
    looked_up = acting.logits(bars, portfolio[bars], mask[bars])
    torch.testing.assert_close(looked_up, whole.logits[bars])
    torch.testing.assert_close(net.values(market, portfolio, present), whole.value)


def test_acting_refuses_a_mask_of_another_shape() -> None:
    net = network(make_config(*SMALL))
    acting = Acting(
        net, MarketTensors(draws(L, 1, N, 8), None), torch.ones(L, 1, N, dtype=torch.bool)
    )
    with pytest.raises(AssertionError, match=r"expected mask \[3, 5, 3\], found \[1, 5, 3\]"):
        acting.logits(0, draws(E, N, 2), torch.ones(1, N, 3, dtype=torch.bool))


@pytest.mark.parametrize("rows", [1, 2 * 9, 9 * N, 2 * 9 * N])
@pytest.mark.parametrize("lead", [(), (5,)])
def test_encoding_in_chunks_equals_encoding_at_once(
    rows: int, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 1 and 2 assets, and of 1 and 2 groups."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(make_config(*SMALL), F)
    x = draws(*lead, 9, N, F)
    whole = encoder(x)
    gradient = torch.autograd.grad(whole.square().sum(), list(encoder.parameters()))
    monkeypatch.setattr(encoders, "_CHUNK_ROWS", rows)
    chunked = encoder(x)
    torch.testing.assert_close(chunked, whole)
    again = torch.autograd.grad(chunked.square().sum(), list(encoder.parameters()))
    for one, two in zip(gradient, again, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_benchmark_compares_the_same_market_and_the_same_network() -> None:
    config = bench.config_of()
    world = bench.make_world(config)
    bench.check_environments(world, config)
    bench.check_networks(world, config)


@pytest.mark.filterwarnings("ignore:.*Box observation space.*:UserWarning")
def test_environment_of_the_benchmark_is_an_ordinary_one() -> None:
    config = bench.config_of()
    env = WindowEnv(bench.make_world(config), config)
    check_env(env, skip_render_check=True)
    first, _ = env.reset(seed=4)
    again, _ = env.reset(seed=4)
    assert (first["x"] == again["x"]).all()
