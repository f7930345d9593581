"""The networks: encoders, masks, the split first layer, and what each optimizer moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.config import Config
from echelon.envs.act import Action
from echelon.errors import ConfigError
from echelon.models import encoders
from echelon.models.actor_critic import (
    N_ACTIONS,
    ActorCritic,
    ActorCriticOutput,
    JoinedLinear,
    MarketTensors,
    join,
)
from echelon.models.encoders import Encoder, TimeCNN, TransformerEncoder, build_encoder

G, S, N, F, W, D, E, P = 2, 17, 5, 6, 9, 16, 3, 2
BARS = S - W + 1
ENCODERS = ("TimeCNN", "Transformer", "TimesNet")
CROSS = ("mlp", "attention", "none")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only wait for one another on networks this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _config(*, window: int = W, state: dict[str, bool] | None = None, **model: Any) -> Config:
    model = {"d_model": D, "n_layers": 2, "hidden": 8, "periods": (9, 4), **model}
    return Config.model_validate({"window": window, "state": state or {}, "model": model})


def _network(seed: int = 0, **model: Any) -> ActorCritic:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ActorCritic(_config(**model), F)


def _loud_network(seed: int = 0, **model: Any) -> ActorCritic:
    """A network whose logits are not all near zero, so that a change in them shows."""
    network = _network(seed, **model)
    with torch.no_grad():
        network.actor.outer.weight.mul_(100.0)
    return network


def _draws(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _books(*lead: int) -> tuple[Tensor, Tensor]:
    """Portfolio inputs [*lead, N, P] and all assets present [*lead, N]."""
    return _draws(*lead, N, P, seed=2).sigmoid(), torch.ones(*lead, N, dtype=torch.bool)


def _encoder(kind: str, **model: Any) -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build_encoder(_config(encoder=kind, **model), F)


# Encoders


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_stretch_encodes_like_each_of_its_windows(kind: str) -> None:
    encoder, x = _encoder(kind), _draws(S, N, F)
    z = encoder(x)
    assert z.shape == (BARS, N, D)
    assert z.dtype == torch.float32
    assert z.std() > 0.1
    for k in range(BARS):
        torch.testing.assert_close(encoder(x[k : k + W])[0], z[k], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ENCODERS)
def test_groups_encode_like_each_stretch_alone(kind: str) -> None:
    encoder, x = _encoder(kind), _draws(G, S, N, F)
    z = encoder(x)
    assert z.shape == (G, BARS, N, D)
    for g in range(G):
        torch.testing.assert_close(z[g], encoder(x[g]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_row_changes_the_windows_that_hold_it_and_no_other(kind: str) -> None:
    encoder, x = _encoder(kind), _draws(S, N, F)
    z = encoder(x)
    for row in range(S):
        other = x.clone()
        other[row] += 1.0
        same = (encoder(other) == z).flatten(1).all(1)
        holds = torch.tensor([k <= row < k + W for k in range(BARS)])
        assert torch.equal(same, ~holds)


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_future_of_a_stretch_changes_no_earlier_embedding(kind: str) -> None:
    encoder, x = _encoder(kind), _draws(S, N, F)
    for cut in range(W, S):
        other = x.clone()
        other[cut:] = 1.0e6
        assert torch.equal(encoder(other)[: cut - W + 1], encoder(x)[: cut - W + 1])


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_asset_is_encoded_without_the_others(kind: str) -> None:
    encoder, x = _encoder(kind), _draws(S, N, F)
    other = x.clone()
    other[:, 1] = 7.0
    kept = [0, 2, 3, 4]
    assert torch.equal(encoder(other)[:, kept], encoder(x)[:, kept])
    assert not torch.equal(encoder(other)[:, 1], encoder(x)[:, 1])


def test_time_cnn_equals_torch_convolutions_and_pooling() -> None:
    encoder, x = _encoder("TimeCNN", n_layers=3), _draws(S, N, F)
    assert isinstance(encoder, TimeCNN)
    h = x.permute(1, 2, 0)
    for layer in encoder.layers:
        weight = layer.weight.view(2 * D, 3, -1).transpose(1, 2)
        h = torch.nn.functional.glu(torch.nn.functional.conv1d(h, weight, layer.bias), dim=1)
    mean, last = torch.nn.functional.avg_pool1d(h, W - 6, 1), h[..., W - 7 :]
    expected = torch.cat([mean[:, : D // 2], last[:, D // 2 :]], dim=1).permute(2, 0, 1)
    torch.testing.assert_close(encoder(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", range(1, 10))
def test_sliding_mean_equals_the_mean_of_each_slice(size: int) -> None:
    h = _draws(10, 2, 3)
    expected = torch.stack([h[k : k + size].mean(0) for k in range(10 - size + 1)])
    torch.testing.assert_close(encoders._sliding_mean(h, size), expected)


@pytest.mark.parametrize(("grad", "kept"), [(False, 0), (True, 0), (True, 1 << 30)])
def test_transformer_in_chunks_equals_in_one_piece(
    grad: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, x = _encoder("Transformer"), _draws(G, S, N, F)

    def run() -> list[Tensor]:
        encoder.zero_grad()
        with torch.set_grad_enabled(grad):
            z = encoder(x)
        if grad:
            z.square().sum().backward()
        return [z.detach(), *(p.grad.clone() for p in encoder.parameters() if p.grad is not None)]

    whole = run()
    monkeypatch.setattr(encoders, "_CHUNK_TOKENS", 2 * G * N * W)  # two windows at a time
    monkeypatch.setattr(encoders, "_KEPT_BYTES", kept)
    chunked = run()
    assert len(whole) == (1 + len(list(encoder.parameters())) if grad else 1)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_dropout_acts_in_training_and_not_in_evaluation() -> None:
    for kind in ENCODERS:
        encoder, x = _encoder(kind, dropout=0.5), _draws(S, N, F)
        assert not torch.equal(encoder(x), encoder(x))
        encoder.eval()
        assert torch.equal(encoder(x), encoder(x))


def test_a_window_too_short_for_the_layers_names_the_least_window() -> None:
    build_encoder(_config(window=7, n_layers=3), F)
    with pytest.raises(ConfigError, match=r"window = 6 .* model\.n_layers = 3.* least window is 7"):
        build_encoder(_config(window=6, n_layers=3), F)


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.d_model = 18 .* 4 heads.* 20"):
        build_encoder(_config(encoder="Transformer", d_model=18), F)
    with pytest.raises(ConfigError, match=r"model\.hidden = 10 .* 4 heads"):
        ActorCritic(_config(cross_asset="attention", hidden=10), F)


def test_config_chooses_the_encoder_its_width_and_its_depth() -> None:
    cnn, transformer = _encoder("TimeCNN", n_layers=4), _encoder("Transformer", d_model=24)
    assert isinstance(cnn, TimeCNN)
    assert isinstance(transformer, TransformerEncoder)
    assert (len(cnn.layers), cnn.d_model, cnn.window) == (4, D, W)
    assert (len(transformer.blocks), transformer.d_model) == (2, 24)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((S, N, F + 1), r"expected features \[S, N, 6\].*found \[17, 5, 7\]"),
        ((N, F), r"expected features \[S, N, 6\].*found \[5, 6\]"),
        ((W - 1, N, F), r"S >= 9 rows.*found \[8, 5, 6\]"),
    ],
)
def test_features_of_a_wrong_shape_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _encoder("TimeCNN")(torch.zeros(shape))


def test_float64_features_are_refused() -> None:
    with pytest.raises(AssertionError, match="expected float32 features"):
        _encoder("TimeCNN")(torch.zeros(S, N, F, dtype=torch.float64))


# Actor and critic


def test_split_first_layer_worked_by_hand() -> None:
    layer = JoinedLinear(d_model=2, n_portfolio=1, hidden=2)
    assert layer.portfolio is not None
    with torch.no_grad():
        layer.market.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, -1.0]]))
        layer.market.bias.copy_(torch.tensor([0.5, 0.0]))
        layer.portfolio.copy_(torch.tensor([[10.0, 100.0]]))
    market = layer.market(torch.tensor([[3.0, 4.0]]))  # one asset: [1·3+2·4+0.5, −4]
    assert market.tolist() == [[11.5, -4.0]]
    books = join(market, torch.tensor([[[0.0]], [[0.25]]]), layer.portfolio)  # two books
    assert books.tolist() == [[[11.5, -4.0]], [[14.0, 21.0]]]


def test_split_first_layer_equals_one_layer_over_the_joined_input() -> None:
    layer, z, p = JoinedLinear(D, P, 8), _draws(N, D), _draws(E, N, P)
    assert layer.portfolio is not None
    weight = torch.cat([layer.market.weight, layer.portfolio.T], dim=1)
    joined = torch.cat([z.expand(E, N, D), p], dim=-1)
    expected = torch.nn.functional.linear(joined, weight, layer.market.bias)
    got = join(layer.market(z), p, layer.portfolio)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ENCODERS)
def test_shapes_and_float32_everywhere(cross: str, shared: bool, kind: str) -> None:
    network = _network(cross_asset=cross, shared_encoder=shared, encoder=kind)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    market = network.encode(_draws(G, S, N, F))
    assert market.actor.shape == (G, BARS, N, 8)
    assert (market.critic is None) == shared
    portfolio, present = _books(G, BARS, E)
    out = network(market.map(lambda m: m.unsqueeze(2)), portfolio, present)
    assert out.logits.shape == (G, BARS, E, N, N_ACTIONS)
    assert out.value.shape == (G, BARS, E)
    assert out.logits.dtype == out.value.dtype == torch.float32
    single = network(network.encode(_draws(W, N, F)).map(lambda m: m[0]), *_books(E))
    assert single.logits.shape == (E, N, N_ACTIONS)
    assert single.value.shape == (E,)


@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("shared", [True, False])
def test_many_bars_at_once_equal_bar_by_bar(cross: str, shared: bool) -> None:
    network = _loud_network(cross_asset=cross, shared_encoder=shared)
    market = network.encode(_draws(G, S, N, F))
    portfolio, present = _books(G, BARS, E)
    present = present.clone()
    present[:, 2:, :, 1] = False
    whole = network(market.map(lambda m: m.unsqueeze(2)), portfolio, present)
    for g, k in itertools.product(range(G), range(BARS)):
        step = network(market.map(lambda m: m[g, k]), portfolio[g, k], present[g, k, 0])  # noqa: B023
        torch.testing.assert_close(step.logits, whole.logits[g, k], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(step.value, whole.value[g, k], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("state", "n_inputs"),
    [
        ({}, 2),
        ({"include_pos": False}, 1),
        ({"include_cash": False}, 1),
        ({"include_pos": False, "include_cash": False}, 0),
    ],
)
def test_state_config_decides_the_portfolio_inputs(state: dict[str, bool], n_inputs: int) -> None:
    network = ActorCritic(_config(state=state), F)
    market = network.encode(_draws(W, N, F)).map(lambda m: m[0])
    present = torch.ones(N, dtype=torch.bool)
    out = network(market, torch.zeros(E, N, n_inputs), present)
    assert out.logits.shape == (E, N, N_ACTIONS)
    assert out.value.shape == (E,)
    out.value.sum().backward()
    with pytest.raises(AssertionError, match=rf"portfolio \[..., E, N, {n_inputs}\]"):
        network(market, torch.zeros(E, N, n_inputs + 1), present)


def _run(network: ActorCritic, x: Tensor, portfolio: Tensor, present: Tensor) -> ActorCriticOutput:
    out: ActorCriticOutput = network(network.encode(x).map(lambda m: m[0]), portfolio, present)
    return out


@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("shared", [True, False])
def test_an_absent_asset_changes_nothing_for_the_others(cross: str, shared: bool) -> None:
    network = _loud_network(cross_asset=cross, shared_encoder=shared)
    x, (portfolio, _) = _draws(W, N, F), _books(E)
    present = torch.tensor([True, True, False, True, True])
    before = _run(network, x, portfolio, present)
    x[:, 2] += 3.0
    portfolio[:, 2] += 1.0
    after = _run(network, x, portfolio, present)
    odds = (before.logits.softmax(-1), after.logits.softmax(-1))
    torch.testing.assert_close(*odds, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(after.value, before.value, atol=1e-6, rtol=1e-6)
    # … nor does leaving it out altogether.
    kept = [0, 1, 3, 4]
    without = _run(network, x[:, kept], portfolio[:, kept], present[kept])
    torch.testing.assert_close(without.logits, before.logits[:, kept], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(without.value, before.value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cross", ["mlp", "attention"])
def test_a_present_asset_is_seen_by_the_others_and_by_the_critic(cross: str) -> None:
    network = _loud_network(cross_asset=cross)
    x, (portfolio, present) = _draws(W, N, F), _books(E)
    before = _run(network, x, portfolio, present)
    x[:, 2] += 3.0
    after = _run(network, x, portfolio, present)
    assert (after.logits[:, 0] - before.logits[:, 0]).abs().min() > 1e-4
    assert (after.value - before.value).abs().min() > 1e-4


def test_without_a_cross_asset_layer_assets_do_not_see_one_another() -> None:
    network = _loud_network(cross_asset="none")
    x, (portfolio, present) = _draws(W, N, F), _books(E)
    before = _run(network, x, portfolio, present)
    x[:, 2] += 3.0
    kept = [0, 1, 3, 4]
    after = _run(network, x, portfolio, present)
    torch.testing.assert_close(after.logits[:, kept], before.logits[:, kept])


@pytest.mark.parametrize("cross", CROSS)
def test_reordering_assets_reorders_logits_and_keeps_the_value(cross: str) -> None:
    network = _loud_network(cross_asset=cross)
    x, (portfolio, _) = _draws(W, N, F), _books(E)
    present = torch.tensor([True, False, True, True, True])
    order = [3, 0, 4, 1, 2]
    plain = _run(network, x, portfolio, present)
    moved = _run(network, x[:, order], portfolio[:, order], present[order])
    torch.testing.assert_close(moved.logits, plain.logits[:, order], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.value, plain.value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cross", CROSS)
def test_a_book_without_any_asset_stays_finite(cross: str) -> None:
    network = _loud_network(cross_asset=cross)
    x, (portfolio, _) = _draws(W, N, F), _books(E)
    out = _run(network, x, portfolio, torch.zeros(N, dtype=torch.bool))
    assert torch.isfinite(out.logits).all()
    assert torch.isfinite(out.value).all()
    out.value.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_an_absent_asset_can_only_be_held() -> None:
    network = _loud_network()
    present = torch.tensor([True, True, False, True, True])
    out = _run(network, _draws(W, N, F), _books(E)[0], present)
    odds = out.logits.softmax(-1)
    hold_only = torch.zeros(N_ACTIONS)
    hold_only[Action.HOLD] = 1.0
    assert torch.equal(odds[:, 2], hold_only.expand(E, -1))
    assert (odds[:, present] > 0).all()


def test_masked_actions_have_zero_probability_and_finite_entropy() -> None:
    network = _loud_network()
    market = network.encode(_draws(W, N, F)).map(lambda m: m[0])
    portfolio, present = _books(E)
    mask = torch.ones(E, N, N_ACTIONS, dtype=torch.bool)
    mask[0, :, Action.BUY] = False
    mask[1, 2, Action.SELL] = False
    mask[2, 0] = False  # even so, holding is allowed
    out = network(market, portfolio, present, mask)
    odds = out.logits.softmax(-1)
    assert (odds[0, :, Action.BUY] == 0).all()
    assert odds[1, 2, Action.SELL] == 0
    assert odds[2, 0, Action.HOLD] == 1
    mask[2, 0, Action.HOLD] = True
    assert (odds[mask] > 0).all()
    free = network(market, portfolio, present)
    assert torch.equal(free.logits[mask], out.logits[mask])
    assert torch.equal(free.value, out.value)
    entropy = -(odds * out.logits.log_softmax(-1)).sum()
    entropy.backward()
    assert torch.isfinite(entropy)
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_the_first_policy_buys_and_sells_alike_and_holds_less() -> None:
    out = _run(_network(), _draws(W, N, F), *_books(E))
    first = torch.tensor([-1.0, 0.0, 0.0]).softmax(-1)
    assert (out.logits.softmax(-1) - first).abs().max() < 0.02


def test_actions_are_in_the_order_of_the_environments() -> None:
    assert list(range(N_ACTIONS)) == [Action.HOLD, Action.BUY, Action.SELL]


@pytest.mark.parametrize("shared", [True, False])
def test_two_optimizers_share_all_parameters_and_none_twice(shared: bool) -> None:
    network = _network(shared_encoder=shared)
    actor, critic = network.actor_parameters(), network.critic_parameters()
    assert {id(p) for p in actor}.isdisjoint({id(p) for p in critic})
    assert len(actor) + len(critic) == len(list(network.parameters()))
    assert {id(p) for p in network.encoder.parameters()} <= {id(p) for p in actor}
    if not shared:
        assert network.critic_encoder is not None
        assert {id(p) for p in network.critic_encoder.parameters()} <= {id(p) for p in critic}


def _grad_norms(parameters: list[torch.nn.Parameter]) -> list[float]:
    return [0.0 if p.grad is None else p.grad.norm().item() for p in parameters]


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("part", ["logits", "value"])
def test_either_loss_reaches_a_shared_encoder(kind: str, part: str) -> None:
    network = _network(encoder=kind)
    out = _run(network, _draws(W, N, F), *_books(E))
    getattr(out, part).square().sum().backward()
    assert min(_grad_norms(list(network.encoder.parameters()))) > 0


@pytest.mark.parametrize("shared", [True, False])
def test_small_batches_of_books_give_the_gradients_of_one_large_batch(shared: bool) -> None:
    portfolio, present = _books(BARS, E)
    pieces = (slice(0, 4), slice(4, 7), slice(7, BARS))

    def loss(network: ActorCritic, market: MarketTensors, bars: slice) -> Tensor:
        out = network(market.map(lambda m: m[bars, None]), portfolio[bars], present[bars])
        return out.logits.square().sum() + out.value.square().sum()

    whole, parts = _network(shared_encoder=shared), _network(shared_encoder=shared)
    x = _draws(S, N, F)
    loss(whole, whole.encode(x), slice(None)).backward()
    market = parts.encode(x)
    gathered = market.cut()
    for bars in pieces:
        loss(parts, gathered, bars).backward()
    market.backward(gathered)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert a.grad is not None
        assert a.grad.norm() > 0
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5, rtol=1e-4)


def test_with_separate_encoders_each_loss_moves_its_own_part_only() -> None:
    for part in ("logits", "value"):
        network = _network(shared_encoder=False)
        out = _run(network, _draws(W, N, F), *_books(E))
        getattr(out, part).square().sum().backward()
        actor = _grad_norms(network.actor_parameters())
        critic = _grad_norms(network.critic_parameters())
        own, other = (actor, critic) if part == "logits" else (critic, actor)
        assert max(other) == 0
        assert min(own) > 0


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_same_seed_gives_the_same_weights(kind: str) -> None:
    a, b, c = (_network(seed, encoder=kind).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_shapes_that_would_broadcast_wrongly_are_refused() -> None:
    network = _network()
    market = network.encode(_draws(S, N, F))
    portfolio, present = _books(BARS, E)
    good = market.map(lambda m: m.unsqueeze(1))
    network(good, portfolio, present)
    with pytest.raises(AssertionError, match=r"expected market.actor \[9, 3, 5, 8\]"):
        network(market, portfolio, present)
    with pytest.raises(AssertionError, match=r"expected present \[9, 3, 5\]"):
        network(good, portfolio, present[:, 0])
    with pytest.raises(AssertionError, match=r"expected mask \[9, 3, 5, 3\]"):
        network(good, portfolio, present, torch.ones(BARS, E, N, 2, dtype=torch.bool))
    with pytest.raises(AssertionError, match="expected present as bool"):
        network(good, portfolio, present.float())
    with pytest.raises(AssertionError, match="expected portfolio as float32"):
        network(good, portfolio.double(), present)
    with pytest.raises(AssertionError, match="found a critic part"):
        network(MarketTensors(good.actor, good.actor), portfolio, present)
