"""Low-rank adapters on every encoder: they alone move, and merging them changes nothing."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from worlds import make_config

from echelon.config.agents import LoraConfig
from echelon.errors import ConfigError, StoreError
from echelon.models.encoders import Encoder, build_encoder
from echelon.models.lora import (
    adapt,
    adapted_layers,
    adapter_parameters,
    adapter_size,
    adapter_state,
    load_adapter_state,
    merged_weights,
)

F, D, W, N = 5, 16, 12, 3
LORA, NAME = LoraConfig(rank=4), ("expert",)
X = torch.randn((30, N, F), generator=torch.Generator().manual_seed(1))


def use_adapter(encoder: Encoder, name: str) -> None:
    """Let one adapter act and be trained, and no other."""
    for _, layer in adapted_layers(encoder):
        layer.set_adapter(name)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Adapters are drawn from torch's own generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


@pytest.fixture(params=["TimeCNN", "Transformer", "TimesNet"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return make_encoder(request.param)


def make_encoder(kind: str = "TimeCNN") -> Encoder:
    config = make_config(
        f"model.encoder={kind}", f"model.d_model={D}", "model.n_layers=2", f"window={W}"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(config, F).eval()
    encoder.fit(X)
    return encoder


def encode(encoder: Encoder) -> Tensor:
    with torch.no_grad():
        return encoder(X)


def encode_exactly(encoder: Encoder) -> Tensor:
    """Of an encoder in float64; `forward` itself takes float32 alone."""
    with torch.no_grad():
        return encoder._encode(X.double())


def train(encoder: Encoder, name: str, steps: int = 3, target: float = 1.0) -> None:
    """Move an adapter so far that rounding cannot hide it."""
    use_adapter(encoder, name)
    optimizer = torch.optim.Adam(adapter_parameters(encoder, name).values(), lr=0.005)
    for _ in range(steps):
        optimizer.zero_grad()
        ((encoder(X) - target) ** 2).mean().backward()
        optimizer.step()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Equal to 1e-6 in float32: no error beyond 1e-6 of the largest output, nor of their norm.

    Not of each output by itself: merging rounds W + BA once, to 6e-8 of W, and an output near zero
    is a sum whose large terms cancel, so that its error is 1e-3 of itself and still 1e-7 of them.
    `assert_each_close` asks it of every output, in float64.
    """
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert float((found - wanted).norm()) <= 1e-6 * float(wanted.norm())


def assert_each_close(found: Tensor, wanted: Tensor) -> None:
    """Every output equal to 1e-6 of itself; below 1e-12 of the largest one it counts as zero."""
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12 * float(wanted.abs().max()))


def base_of(encoder: Encoder) -> dict[str, Tensor]:
    """The base's weights under the names they had before the layers were wrapped."""
    return {
        name.replace(".base_layer", ""): value.clone()
        for name, value in encoder.state_dict().items()
        if "lora_" not in name
    }


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_new_adapters_leave_every_output_as_it_was(encoder: Encoder) -> None:
    before = encode(encoder)
    adapt(encoder, LORA, ("one", "two"))
    for name in ("one", "two"):
        use_adapter(encoder, name)
        assert torch.equal(encode(encoder), before)


def test_every_linear_layer_is_adapted(encoder: Encoder) -> None:
    layers = [n for n, m in encoder.named_modules() if isinstance(m, nn.Linear)]
    adapt(encoder, LORA, NAME)
    state = adapter_state(encoder, "expert")
    assert set(state) == {f"{n}.lora_{m}" for n in layers for m in "AB"}
    assert all(state[f"{n}.lora_A"].shape[0] == LORA.rank for n in layers)


def test_loss_moves_the_adapter_in_use_and_nothing_else(encoder: Encoder) -> None:
    base = base_of(encoder)
    adapt(encoder, LORA, ("one", "two"))
    one, two = adapter_state(encoder, "one"), adapter_state(encoder, "two")
    use_adapter(encoder, "one")
    trained = [p for p in encoder.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in adapter_parameters(encoder, "one").values()}
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        encoder(X).square().mean().backward()
        optimizer.step()
    assert_same(base_of(encoder), base)
    assert_same(adapter_state(encoder, "two"), two)
    moved = adapter_state(encoder, "one")
    assert all(not torch.equal(moved[name], one[name]) for name in one)


def test_each_adapter_has_its_own_output(encoder: Encoder) -> None:
    before = encode(encoder)
    adapt(encoder, LORA, ("up", "down"))
    train(encoder, "up", target=1.0)
    train(encoder, "down", target=-1.0)
    outputs = {}
    for name in ("up", "down"):
        use_adapter(encoder, name)
        outputs[name] = encode(encoder)
    assert (outputs["up"] - outputs["down"]).abs().mean() > 0.01
    assert not torch.equal(outputs["up"], before)
    use_adapter(encoder, "up")
    assert torch.equal(encode(encoder), outputs["up"])


def merged(encoder: Encoder, plain: Encoder, name: str) -> Encoder:
    """The plain encoder with the weights that this one has with an adapter."""
    plain.to(next(encoder.parameters()).dtype).load_state_dict(merged_weights(encoder, name))
    return plain


def test_merged_weights_give_the_same_output_and_leave_the_adapted_encoder_alone(
    encoder: Encoder,
) -> None:
    plain, base = copy.deepcopy(encoder), base_of(encoder)
    adapt(encoder, LORA, ("one", "two"))
    train(encoder, "one")
    output = encode(encoder)
    use_adapter(encoder, "two")
    assert_close(encode(merged(encoder, plain, "one")), output)
    assert any(not torch.equal(value, base[key]) for key, value in plain.state_dict().items())
    assert_same(base_of(encoder), base)
    use_adapter(encoder, "one")
    assert torch.equal(encode(encoder), output)


def test_merging_is_exact_but_for_rounding(encoder: Encoder) -> None:
    plain = copy.deepcopy(encoder)
    adapt(encoder, LORA, NAME)
    train(encoder, "expert")
    encoder.double()
    output = encode_exactly(encoder)
    assert_each_close(encode_exactly(merged(encoder, plain, "expert")), output)


def saved_and_reloaded(encoder: Encoder, file: Path) -> tuple[Encoder, Encoder]:
    """An encoder with a trained adapter, and a twin of its base with the adapter from a file."""
    other = copy.deepcopy(encoder)
    base = encode(encoder)
    adapt(encoder, LORA, ("one",))
    train(encoder, "one")
    assert (encode(encoder) - base).abs().mean() > 0.01, "the adapter does something"
    save_file(adapter_state(encoder, "one"), file)
    torch.manual_seed(99)
    adapt(other, LORA, ("another_name",))
    load_adapter_state(other, "another_name", load_file(file))
    return encoder, other


def test_adapter_saved_to_a_file_and_reloaded_gives_the_same_output_merged_too(
    encoder: Encoder, tmp_path: Path
) -> None:
    plain = copy.deepcopy(encoder)
    one, other = saved_and_reloaded(encoder, tmp_path / "adapter.safetensors")
    output = encode(one)
    assert torch.equal(encode(other), output), "reloaded"
    assert_close(encode(merged(other, plain, "another_name")), output)


def test_adapters_are_drawn_from_the_seed_alone() -> None:
    states = []
    for seed in (5, 5, 6):
        encoder = make_encoder()
        torch.manual_seed(seed)
        adapt(encoder, LORA, NAME)
        states.append(adapter_state(encoder, "expert"))
    assert_same(states[0], states[1])
    assert not torch.equal(states[0]["layers.0.lora_A"], states[2]["layers.0.lora_A"])


def test_trainable_share_counts_the_adapter_in_use() -> None:
    encoder = make_encoder()
    assert adapter_size(encoder).share == 1.0
    base = sum(p.numel() for p in encoder.parameters())
    adapt(encoder, LORA, ("one", "two"))
    own = sum(p.numel() for p in adapter_parameters(encoder, "one").values())
    # TimeCNN: each layer has A [r, 3·in] and B [2·D, r].
    assert own == LORA.rank * (3 * F + 2 * D) + LORA.rank * (3 * D + 2 * D)
    assert adapter_size(encoder) == (own, base + own)


def test_state_of_another_rank_is_refused_by_name() -> None:
    encoder, other = make_encoder(), make_encoder()
    adapt(encoder, LORA, NAME)
    adapt(other, LoraConfig(rank=2), NAME)
    before = adapter_state(encoder, "expert")
    with pytest.raises(StoreError, match=r"layers\.0\.lora_A.*lora\.rank"):
        load_adapter_state(encoder, "expert", adapter_state(other, "expert"))
    with pytest.raises(StoreError, match=r"layers\.0\.lora_B"):
        load_adapter_state(encoder, "expert", {"layers.0.lora_A": before["layers.0.lora_A"]})
    assert_same(adapter_state(encoder, "expert"), before)


def test_missing_peft_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"echelon\[lora\]"):
        adapt(make_encoder(), LORA, NAME)
