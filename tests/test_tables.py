"""Embedding tables hold what direct encoding gives, row by row and version by version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import at, make_config, make_world

from echelon.agents import tables
from echelon.agents.tables import EmbeddingTable, encode_rows, standing_rows
from echelon.config.agents import LoraConfig
from echelon.envs.world import World
from echelon.errors import DataError, StoreError
from echelon.models.encoders import Encoder, build_encoder
from echelon.models.lora import adapt, adapter_parameters
from echelon.proving.worlds import join_worlds

W, D, F, N = 6, 8, 4, 3


def make_encoder(kind: str = "TimeCNN", seed: int = 0, *overrides: str) -> Encoder:
    settings = ("model.n_layers=2", f"model.encoder={kind}", f"model.d_model={D}", f"window={W}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = build_encoder(make_config(*settings, *overrides), F)
    encoder.fit(torch.from_numpy(one_world().x[:36].copy()))
    return encoder


def one_world(n_rows: int = 60, seed: int = 0) -> World:
    return make_world(n_rows=n_rows, n_assets=N, n_features=F, seed=seed, window=W)


def drawn(n_rows: int, seed: int) -> World:
    whole = range(n_rows)
    splits = {"train": whole, "valid": whole, "test": whole}
    return replace(one_world(n_rows, seed), splits=splits)


def direct(encoder: Encoder, x: np.ndarray, row: int) -> torch.Tensor:
    """The slow twin: one window by itself."""
    with torch.no_grad():
        return encoder.eval()(torch.from_numpy(x[row - W + 1 : row + 1].copy()))[0]


@pytest.mark.parametrize("kind", ["TimeCNN", "Transformer", "TimesNet"])
@pytest.mark.parametrize("mapped", [False, True])
def test_every_row_equals_its_direct_encoding(
    kind: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_CHUNK_BARS", 7)  # chunks begin and end inside the stretch
    world, encoder = one_world(), make_encoder(kind)
    table = EmbeddingTable(world, D, tmp_path / "z.npy" if mapped else None)
    table.refresh(encoder)
    rows = np.arange(W - 1, 60)
    found = table.look(rows)
    assert found.shape == (len(rows), N, D)
    assert found.dtype == torch.float32
    for z, row in zip(found, rows, strict=True):
        torch.testing.assert_close(z, direct(encoder, world.x, row), rtol=0, atol=1e-6)


def test_windows_of_joined_draws_stay_inside_their_draw(tmp_path: Path) -> None:
    draws = [drawn(20, 1), drawn(31, 2), drawn(15, 3)]
    together, starts = join_worlds(draws)
    encoder = make_encoder()
    table = EmbeddingTable(together, D, tmp_path / "z.npy")
    table.refresh(encoder)
    assert starts.tolist() == [W - 1, 20 + W - 1, 51 + W - 1]
    for draw, start in zip(draws, starts.tolist(), strict=True):
        first = start - W + 1
        for row in range(W - 1, len(draw.times)):
            z = table.look(at(first + row))[0]
            torch.testing.assert_close(z, direct(encoder, draw.x, row), rtol=0, atol=1e-6)
    stored = np.load(tmp_path / "z.npy")
    assert not stored[20 : 20 + W - 1].any(), "a window crossed from the first draw to the second"
    with pytest.raises(AssertionError, match="no whole window"):
        table.look(at(20 + W - 2))


def test_stretch_whose_windows_reach_into_the_one_before_is_refused() -> None:
    world = replace(one_world(), stretches={"train": (range(W - 1, 20), range(22, 40))})
    with pytest.raises(DataError, match=r"row 22 .*ends at row 20"):
        EmbeddingTable(world, D)


def test_rows_of_the_splits_and_between_them_are_encoded_and_no_others() -> None:
    splits = {"train": range(0, 20), "valid": range(25, 38)}
    standing = standing_rows(replace(one_world(), splits=splits))
    assert np.flatnonzero(standing).tolist() == [*range(W - 1, 38)]


def test_rows_between_stretches_are_not_encoded() -> None:
    pieces = (range(W - 1, 15), range(15 + W, 38))
    whole = range(W - 1, 38)
    world = replace(one_world(), splits={"train": whole}, stretches={"train": pieces})
    assert np.flatnonzero(standing_rows(world)).tolist() == [*pieces[0], *pieces[1]]


def test_refresh_gives_the_next_version_and_leaves_readers_the_last(tmp_path: Path) -> None:
    world, path = one_world(), tmp_path / "z.npy"
    table = EmbeddingTable(world, D, path)
    assert table.version == 0
    table.refresh(make_encoder(seed=1))
    reader = np.load(path, mmap_mode="r")
    before = reader.copy()
    table.refresh(make_encoder(seed=2))
    assert table.version == 2
    assert np.array_equal(reader, before), "a reader's version was written over"
    rows = np.arange(W - 1, 60)
    assert np.array_equal(table.look(rows).numpy(), np.load(path)[rows])
    assert not np.array_equal(np.load(path), before)
    assert [file.name for file in tmp_path.iterdir()] == ["z.npy"]


def test_failed_refresh_keeps_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_CHUNK_BARS", 7)
    world, path, encoder = one_world(), tmp_path / "z.npy", make_encoder()
    table = EmbeddingTable(world, D, path)
    table.refresh(encoder)
    before = table.look(at(30))
    calls = 0

    def fail(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        return torch.zeros(len(x) - W + 1, N, D)

    broken = make_encoder(seed=3).train()
    monkeypatch.setattr(broken, "forward", fail)
    with pytest.raises(StoreError, match=r"z\.npy.*No space left"):
        table.refresh(broken)
    assert broken.training, "the encoder's mode is given back"
    assert table.version == 1
    assert torch.equal(table.look(at(30)), before)
    assert [file.name for file in tmp_path.iterdir()] == ["z.npy"]


def test_table_is_made_without_dropout_and_gradients() -> None:
    world = one_world()
    encoder = make_encoder("TimeCNN", 0, "model.dropout=0.5").train()
    first, second = EmbeddingTable(world, D), EmbeddingTable(world, D)
    first.refresh(encoder)
    second.refresh(encoder)
    assert encoder.training
    rows = torch.arange(W - 1, 60)
    assert torch.equal(first.look(rows), second.look(rows))
    assert not first.look(rows).requires_grad


def test_looked_up_embeddings_are_copies(tmp_path: Path) -> None:
    table = EmbeddingTable(one_world(), D, tmp_path / "z.npy")
    table.refresh(make_encoder())
    before = table.look(at(10)).clone()
    table.look(at(10)).zero_()
    assert torch.equal(table.look(at(10)), before)


@pytest.mark.parametrize("kind", ["TimeCNN", "Transformer", "TimesNet"])
def test_rows_encoded_for_training_equal_the_table(kind: str) -> None:
    world, encoder = one_world(), make_encoder(kind).eval()
    table = EmbeddingTable(world, D)
    table.refresh(encoder)
    rows = at(40, 7, 40, W - 1, 59, 8)
    z = encode_rows(encoder, world, rows)
    assert z.requires_grad
    torch.testing.assert_close(z.detach(), table.look(rows), rtol=0, atol=1e-6)
    sorted_rows = at(7, 8, 40)
    again = encode_rows(encoder, world, sorted_rows).detach()
    torch.testing.assert_close(again, table.look(sorted_rows), rtol=0, atol=1e-6)


def test_gradients_of_a_row_asked_for_twice_add_up() -> None:
    world, encoder = one_world(), make_encoder()

    def gradient(*rows: int) -> torch.Tensor:
        encoder.zero_grad()
        encode_rows(encoder, world, at(*rows)).sum().backward()
        return encoder.layers[0].weight.grad.clone()

    torch.testing.assert_close(gradient(9, 9), 2 * gradient(9))


def test_loss_on_looked_up_rows_moves_adapter_and_table_but_not_the_base() -> None:
    world, encoder = one_world(), make_encoder()
    torch.manual_seed(0)
    adapt(encoder, LoraConfig(rank=2), ("expert",))
    base = {k: v.clone() for k, v in encoder.state_dict().items() if "lora_" not in k}
    table = EmbeddingTable(world, D)
    table.refresh(encoder)
    rows = at(10, 20, 30)
    before = table.look(rows)
    optimizer = torch.optim.Adam(adapter_parameters(encoder, "expert").values(), lr=0.01)
    encode_rows(encoder, world, rows).square().mean().backward()
    optimizer.step()
    table.refresh(encoder)
    assert table.version == 2
    assert not torch.equal(table.look(rows), before)
    after = encoder.state_dict()
    assert all(torch.equal(after[name], value) for name, value in base.items())
