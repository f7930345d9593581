"""Pre-training: targets inside their window, honest rivals, files that are whole or absent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markets import CONFIGS
from worlds import make_config, make_world

from echelon.agents import encoder_training, foresight, pretraining
from echelon.agents.foresight import Forecasts, fit_linear, linear_forecasts, scores, summary
from echelon.agents.outcomes import Scale, Targets, fit_scale, last_values, outcomes
from echelon.agents.pretraining import Pretrained, ensure_encoder, pretrain
from echelon.config import Config, load_config
from echelon.envs.world import World
from echelon.errors import DataError, StoreError, TrainingError
from echelon.ops import ridge
from echelon.ops.blocks import MIN_BLOCK_PERIODS, mean_interval
from echelon.proving.planted import PlantedMarket
from echelon.proving.worlds import join_worlds, planted_worlds, proof_config

W = 5
PLAIN = Scale(np.zeros(4), np.ones(4), 1e-6)


def of(*horizons: int) -> Targets:
    return Targets(("return", "volatility"), horizons)


def tiny(*overrides: str) -> Config:
    return make_config(
        *(f"window={W}", "model.d_model=8", "model.n_layers=2", "pretrain.horizons=[1, 3]"),
        *("pretrain.epochs=2", "pretrain.batch_rows=16", *overrides),
    )


def a_world(n_rows: int = 120, **changes: Any) -> World:
    return make_world(n_rows=n_rows, n_features=4, window=W, **changes)


def state_of(found: Pretrained | None) -> dict[str, torch.Tensor]:
    assert found is not None
    return found.encoder.state_dict()


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


# Targets


def test_targets_are_the_returns_and_volatilities_of_the_next_bars() -> None:
    close = np.exp([[0.0], [0.1], [-0.1], [0.2], [0.1], [0.4]])
    world = make_world(close=close, window=2)
    y = outcomes(world, (range(1, 6),), of(1, 2), PLAIN)
    nan = math.nan
    np.testing.assert_allclose(y[:, 0, 0], [nan, -0.2, 0.3, -0.1, 0.3, nan], rtol=1e-5)
    np.testing.assert_allclose(y[:, 0, 1], [nan, 0.1, 0.2, 0.2, nan, nan], rtol=1e-5)
    np.testing.assert_allclose(np.exp(y[:, 0, 2]), [nan, 0.2, 0.3, 0.1, 0.3, nan], rtol=1e-5)
    rms = [math.sqrt((a * a + b * b) / 2) for a, b in ((0.2, 0.3), (0.3, 0.1), (0.1, 0.3))]
    np.testing.assert_allclose(np.exp(y[:, 0, 3]), [nan, *rms, nan, nan], rtol=1e-5)
    assert of(1, 2).names == ["return_1", "return_2", "volatility_1", "volatility_2"]


def test_no_target_crosses_the_end_of_its_stretch() -> None:
    world = a_world(30)
    pieces = (range(4, 12), range(16, 30))
    y = outcomes(world, pieces, of(1, 3), PLAIN)
    level = np.log(world.growth)
    for k, h in enumerate((1, 3)):
        known = np.flatnonzero(np.isfinite(y[:, 0, k]))
        assert known.tolist() == [*range(4, 12 - h), *range(16, 30 - h)]
        assert np.flatnonzero(np.isfinite(y[:, 0, 2 + k])).tolist() == known.tolist()
        np.testing.assert_allclose(y[known, :, k], level[known + h] - level[known], atol=1e-6)


def test_what_comes_after_the_train_window_changes_no_target_and_no_scale() -> None:
    world = a_world()
    growth = world.growth.copy()
    growth[72:] *= 3.0
    other = replace(world, growth=growth)
    pieces = world.spans("train")
    assert pieces[-1].stop == 72
    for a, b in zip(
        fit_scale(world, pieces, of(1, 3)), fit_scale(other, pieces, of(1, 3)), strict=True
    ):
        assert np.array_equal(a, b)
    scale = fit_scale(world, pieces, of(1, 3))
    same = outcomes(world, pieces, of(1, 3), scale), outcomes(other, pieces, of(1, 3), scale)
    assert np.array_equal(*same, equal_nan=True)


def test_cells_of_absent_and_suspended_assets_have_no_target() -> None:
    tradable = np.ones((30, 3), dtype=bool)
    tradable[10, 0] = False
    present = np.ones((30, 3), dtype=bool)
    present[20:, 1] = False
    world = a_world(30, tradable=tradable, present=present)
    y = outcomes(world, (range(4, 30),), of(1, 3), PLAIN)
    unknown = [np.flatnonzero(~np.isfinite(y[4:26, 0, k])) + 4 for k in range(4)]
    # A return needs its two ends, a volatility every bar between.
    assert [u.tolist() for u in unknown] == [[9, 10], [7, 10], [9, 10], [7, 8, 9, 10]]
    assert np.isfinite(y[:, 1, 0]).nonzero()[0].max() == 18
    assert np.isfinite(y[4:26, 2]).all()


def test_targets_of_the_train_window_have_mean_zero_and_deviation_one() -> None:
    world = a_world(400)
    pieces = world.spans("train")
    y = outcomes(world, pieces, of(1, 3), fit_scale(world, pieces, of(1, 3)))
    np.testing.assert_allclose(np.nanmean(y, axis=(0, 1)), 0.0, atol=1e-5)
    np.testing.assert_allclose(np.nanstd(y, axis=(0, 1)), 1.0, atol=1e-5)


def test_window_too_short_for_a_horizon_is_refused() -> None:
    world = a_world(30)
    with pytest.raises(DataError, match=r"return_20 .*14 bars; shorten the horizons"):
        fit_scale(world, (range(4, 18),), of(1, 20))


def test_last_value_is_what_the_target_was_before() -> None:
    world = a_world(40)
    piece = range(10, 40)
    level = np.log(world.growth)
    last = last_values(world, (piece,), of(1, 3, 20), Scale(np.zeros(6), np.ones(6), 1e-6))
    rows = np.arange(10, 40)
    np.testing.assert_allclose(last[:, :, 0], level[rows] - level[rows - 1], atol=1e-6)
    np.testing.assert_allclose(last[:, :, 1], level[rows] - level[rows - 3], atol=1e-6)
    # Twenty bars back lies outside of the stretch and its first window until row 26.
    assert not np.isfinite(last[:16, :, 2]).any()
    np.testing.assert_allclose(last[16:, :, 2], level[26:40] - level[6:20], atol=1e-6)
    steps = np.diff(level, axis=0)
    usual = np.sqrt((steps[11:14] ** 2).mean(axis=0))
    np.testing.assert_allclose(np.exp(last[4, :, 4]), usual, rtol=1e-5)


# Rivals


def test_ridge_finds_a_linear_law_and_shrinks_noise_away() -> None:
    world = a_world(900)
    y = np.full((900, 3, 2), np.nan, dtype=np.float32)
    noise = np.random.default_rng(0).standard_normal((900, 3))
    y[4:, :, 0] = 2.0 * world.x[4:, :, 1] - world.x[2:-2, :, 3] + 0.5
    y[4:, :, 1] = noise[4:]
    piece = range(4, 700)
    weights = fit_linear(world, (piece,), y, 3)
    said = linear_forecasts(world, (range(700, 900),), weights)
    assert said.shape == (200, 3, 2)
    np.testing.assert_allclose(said[..., 0], y[700:, :, 0], atol=0.01)
    assert (said[..., 1] ** 2).mean() < 0.01


def test_ridge_equals_least_squares_where_it_hardly_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ridge, "STRENGTHS", (1e-9,))
    monkeypatch.setattr(foresight, "_CHUNK_CELLS", 1000)  # several chunks
    world = a_world(300)
    y = np.random.default_rng(1).standard_normal((300, 3, 1)).astype(np.float32)
    y[50, 1] = np.nan
    weights = fit_linear(world, (range(4, 100), range(110, 300)), y, 1)
    rows = [t for t in range(4, 300) if not 100 <= t < 110]
    cells = [(t, n) for t in rows for n in range(3) if (t, n) != (50, 1)]
    flat = np.array([np.append(world.x[t - W + 1 : t + 1, n].T.ravel(), 1.0) for t, n in cells])
    wanted = np.linalg.lstsq(flat, np.array([y[cell] for cell in cells]), rcond=None)[0]
    np.testing.assert_allclose(weights, wanted, atol=1e-4)


def test_scores_say_who_was_better_and_by_how_much() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal((300, 4, 2)).astype(np.float32)
    y[-5:] = np.nan
    found = scores(Forecasts(y, 0.9 * y, 0.5 * y, -y, y), of(1), 0)
    score = found["return_1"]
    assert score["cells"] == 295 * 4
    square = float(np.nanmean(y[..., 0].astype(np.float64) ** 2))
    np.testing.assert_allclose(score["mse"]["encoder"], 0.01 * square, rtol=1e-4)
    np.testing.assert_allclose(score["r2"]["linear"], 0.75, rtol=1e-4)
    np.testing.assert_allclose(score["r2"]["last"], -3.0, rtol=1e-4)
    np.testing.assert_allclose(score["over_linear"]["estimate"], 0.24 * square, rtol=1e-4)
    assert score["over_linear"]["low"] < 0.24 * square < score["over_linear"]["high"]
    assert all(score[f"over_{rival}"]["low"] > 0.0 for rival in ("linear", "last", "mean"))
    worse = scores(Forecasts(y, 0.5 * y, 0.9 * y, -y, y), of(1), 0)["return_1"]
    assert worse["over_linear"]["low"] < 0.0
    json.dumps(found, allow_nan=False)


def test_scores_of_too_few_bars_have_no_interval_and_beat_nobody() -> None:
    y = np.ones((MIN_BLOCK_PERIODS - 1, 2, 2), dtype=np.float32)
    score = scores(Forecasts(y, y, 0 * y, np.full_like(y, np.nan), y), of(1), 0)["return_1"]
    assert score["over_linear"]["low"] is None
    assert score["mse"]["last"] is None
    assert scores(Forecasts(*(np.full_like(y, np.nan),) * 5), of(1), 0)["return_1"] == {"cells": 0}


def test_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = {"right": 0, "blind": 0}
    for _ in range(200):
        noise = rng.standard_normal(400)
        series = np.convolve(noise, np.ones(8), mode="valid")
        right = mean_interval(series, rng, least_block=8, replications=400)
        covered["right"] += right.low < 0.0 < right.high
        alone = 1.96 * series.std() / math.sqrt(len(series))
        covered["blind"] += abs(series.mean()) < alone
    assert covered["right"] >= 178, "95 % intervals cover at least 89 %"
    assert covered["blind"] < 140, "the series is dependent, and blocks are what is needed"


def test_interval_of_a_constant_is_that_constant() -> None:
    found = mean_interval(np.full(50, 2.0), np.random.default_rng(0))
    assert found[:3] == (2.0, 2.0, 2.0)


# Training


@pytest.mark.parametrize("kind", ["TimeCNN", "Transformer", "TimesNet"])
def test_pretraining_gives_an_encoder_and_its_facts(kind: str) -> None:
    config = tiny(f"model.encoder={kind}")
    found = pretrain(config, a_world(160), 3)
    assert found is not None
    facts = found.facts
    assert not found.encoder.training
    assert len(facts["valid_loss"]) == len(facts["train_loss"]) == facts["epochs"] == 2
    assert facts["best_epoch"] == 1 + int(np.argmin(facts["valid_loss"]))
    assert list(facts["scores"]) == ["return_1", "return_3", "volatility_1", "volatility_3"]
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    lines = summary(facts)
    assert "second half of validation" in lines[0]
    assert lines[1].startswith("  return over 1 bar: R²")
    assert all(line.endswith("too few bars to compare them") for line in lines[1:])


def test_same_seed_gives_the_same_weights_and_another_others() -> None:
    world, config = a_world(), tiny("model.dropout=0.1")
    torch.manual_seed(1)
    first = state_of(pretrain(config, world, 3))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert_same(first, state_of(pretrain(config, world, 3)))
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator was moved"
    other = state_of(pretrain(config, world, 4))
    assert not torch.equal(first["layers.0.weight"], other["layers.0.weight"])


def test_the_best_weights_are_kept_and_patience_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.0, 0.5])
    monkeypatch.setattr(pretraining, "_loss", lambda *_: next(losses))
    seen: list[dict[str, torch.Tensor]] = []
    world = a_world()
    real = pretraining.Pretraining._forecasts

    def spy(self: Any, where: World, pieces: Any) -> Any:
        seen.append({k: v.clone() for k, v in self.net.encoder.state_dict().items()})
        return real(self, where, pieces)

    monkeypatch.setattr(pretraining.Pretraining, "_forecasts", spy)
    found = pretrain(tiny("pretrain.epochs=9", "pretrain.patience=2"), world, 0)
    assert found is not None
    assert (found.facts["epochs"], found.facts["best_epoch"]) == (4, 2)
    assert found.facts["ending"] == "patience"
    assert_same(state_of(found), seen[1])


def test_pretraining_depends_on_nothing_after_the_validation_window() -> None:
    world, config = a_world(), tiny()
    x, growth = world.x.copy(), world.growth.copy()
    x[96:] += 1.0
    growth[96:] *= 2.0
    assert world.splits["valid"].stop == 96
    first, second = (
        pretrain(config, world, 0),
        pretrain(config, replace(world, x=x, growth=growth), 0),
    )
    assert_same(state_of(first), state_of(second))
    assert first is not None
    assert second is not None
    assert first.facts == second.facts


def test_weights_of_a_pass_depend_on_the_train_window_alone() -> None:
    world, config = a_world(), tiny("pretrain.epochs=1")
    x, growth = world.x.copy(), world.growth.copy()
    x[72:] += 1.0
    growth[72:] *= np.linspace(1.0, 2.0, 48)[:, None]
    changed = replace(world, x=x, growth=growth)
    assert_same(state_of(pretrain(config, world, 0)), state_of(pretrain(config, changed, 0)))


def test_the_half_that_scores_chooses_nothing() -> None:
    world, config = a_world(200), tiny("pretrain.epochs=4", "pretrain.patience=4")
    valid = world.splits["valid"]
    growth = world.growth.copy()
    growth[valid.start + len(valid) // 2 :] *= np.linspace(1.0, 2.0, 60)[:, None]
    first = pretrain(config, world, 0)
    second = pretrain(config, replace(world, growth=growth), 0)
    assert first is not None
    assert second is not None
    assert first.facts["valid_loss"] == second.facts["valid_loss"]
    assert first.facts["scores"] != second.facts["scores"]


def test_several_validation_stretches_stop_by_the_first_and_score_on_the_rest() -> None:
    pieces = (range(4, 30), range(40, 60), range(70, 100))
    assert pretraining._halves(pieces) == (pieces[:1], pieces[1:])
    assert pretraining._halves((range(4, 30),)) == ((range(4, 17),), (range(17, 30),))


def test_batches_cover_the_train_rows_and_no_others() -> None:
    world = a_world(stretches={"train": (range(4, 40), range(50, 72))})
    config = tiny()
    encoder = build(config, world)
    training = pretraining.Pretraining(config, world, world, encoder, 0)
    seen: set[int] = set()
    for _ in range(40):
        batches = list(training.descent.batches())
        rows = [row for runs in batches for run in runs for row in run]
        assert len(rows) == len(set(rows)), "a row twice in a pass"
        assert len(rows) == 32 + 16
        assert all(len(run) == 16 for runs in batches for run in runs)
        seen.update(rows)
    assert seen == {*range(4, 40), *range(50, 72)}


def test_a_pass_may_be_part_of_the_train_rows_another_each_time() -> None:
    world = a_world(stretches={"train": (range(4, 40), range(50, 72))})
    config = tiny()
    config = config.model_copy(
        update={"pretrain": config.pretrain.model_copy(update={"pass_rows": 20})}
    )
    training = pretraining.Pretraining(config, world, world, build(config, world), 0)
    passes = [[run for runs in training.descent.batches() for run in runs] for _ in range(20)]
    assert all(len(runs) == 1 for runs in passes), "20 rows hold one whole run of 16"
    assert len({runs[0].start // 16 for runs in passes}) > 1


def build(config: Config, world: World) -> Any:
    from echelon.models.encoders import build_encoder

    return build_encoder(config, world.x.shape[2])


def test_hidden_rows_are_not_seen_and_absent_ones_do_not_count() -> None:
    world, config = a_world(), tiny()
    net = encoder_training.Forecaster(build(config, world), 4, np.zeros(4, dtype=bool))
    x = torch.from_numpy(world.x[:12].copy())[None]
    hide = torch.zeros(1, 12, 3, dtype=torch.bool)
    hide[0, 6] = True
    present = torch.ones_like(hide)
    sd = torch.ones(4)
    other = x.clone()
    other[0, 6] += 1.0
    with torch.no_grad():
        found = net.masked_errors(x, hide, present, sd)
        # The row lies in 5 of the 8 windows, of 3 assets with 4 features.
        assert int(found.cells) == 5 * 3 * 4
        np.testing.assert_allclose(
            float(found.square), 5 * float(x[0, 6].square().sum()), rtol=1e-5
        )
        hidden = torch.where(hide[..., None], 0.0, x), torch.where(hide[..., None], 0.0, other)
        assert torch.equal(*hidden)
        assert float(net.masked_errors(other, hide, present, sd).error) != float(found.error)
        present[0, 6, 1] = False
        assert int(net.masked_errors(x, hide, present, sd).cells) == 5 * 2 * 4


def test_no_rows_hidden_trains_all_the_same() -> None:
    found = pretrain(tiny("pretrain.masked_share=0.0"), a_world(), 0)
    assert found is not None
    assert found.facts["masked_r2"] is None


def test_features_that_explode_stop_pretraining() -> None:
    world = a_world()
    x = world.x.copy()
    x[40] = 1e30
    with pytest.raises(TrainingError, match=r"diverged.*pretrain\.lr"):
        pretrain(tiny(), replace(world, x=x), 0)


def test_overlapping_windows_are_refused() -> None:
    world = a_world(splits={"train": range(0, 80), "valid": range(70, 120)})
    with pytest.raises(DataError, match="overlap"):
        pretrain(tiny(), world, 0)
    whole = {"train": range(0, 120), "valid": range(0, 120)}
    drawn = a_world(splits=whole)
    assert pretrain(tiny(), drawn, 0, valid=a_world(splits=whole, seed=1)) is not None


def test_validation_window_too_short_to_stop_by_is_refused() -> None:
    splits = {"train": range(0, 80), "valid": range(80, 83)}
    with pytest.raises(DataError, match=r"split\.valid"):
        pretrain(tiny("pretrain.horizons=[3]"), a_world(splits=splits), 0)


def test_disabled_pretraining_leaves_the_encoder_as_drawn() -> None:
    found = pretrain(tiny("pretrain.enabled=false", "model.encoder=TimesNet"), a_world(), 0)
    assert found is not None
    assert found.facts == {"enabled": False}
    assert (found.encoder.periods >= 2).all(), "the periods are chosen all the same"
    assert "not pre-trained" in summary(found.facts)[0]


def test_periods_are_chosen_in_windows_of_one_stretch_each() -> None:
    world = a_world(stretches={"train": (range(6, 20), range(30, 42))})
    x = encoder_training.whole_windows(world, world.spans("train"))
    wanted = [*range(5, 20), *range(27, 42)]
    assert torch.equal(x, torch.from_numpy(world.x[wanted]))


# Files


def ensured(directory: Path, config: Config, world: World, **changes: Any) -> Pretrained | None:
    return ensure_encoder(config, world, directory, **({"seed": 0, "data": "abc"} | changes))


@pytest.mark.parametrize("kind", ["TimeCNN", "TimesNet"])
def test_encoder_is_computed_once_and_loaded_afterwards(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, config = a_world(), tiny(f"model.encoder={kind}")
    first = ensured(tmp_path, config, world)
    assert first is not None
    names = {file.name for file in (tmp_path / "encoder").iterdir()}
    assert names == {"weights.safetensors", "encoder.json"}
    monkeypatch.setattr(pretraining.Pretraining, "run", _fail)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = ensured(tmp_path, config, world)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(state_of(again), state_of(first))
    assert again is not None
    assert again.facts == first.facts
    assert not again.encoder.training


def _fail(*_: object) -> None:
    raise AssertionError("pre-trained a second time")


def test_encoder_of_something_else_is_refused(tmp_path: Path) -> None:
    world, config = a_world(), tiny()
    wider = make_world(n_rows=120, n_features=5, window=W)
    ensured(tmp_path, config, world)
    for refused, word in (
        (lambda: ensured(tmp_path, tiny("pretrain.lr=0.1"), world), "configuration"),
        (lambda: ensured(tmp_path, tiny("model.d_model=16"), world), "configuration"),
        (lambda: ensured(tmp_path, config, world, data="xyz"), "data"),
        (lambda: ensured(tmp_path, config, world, seed=1), "seed"),
        (lambda: ensured(tmp_path, config, wider), "features"),
    ):
        with pytest.raises(StoreError, match=rf"encoder\.json.*another .*{word}"):
            refused()
    # What pre-training does not depend on may change.
    other = tiny("train.gamma=0.5", "lora.enabled=true", "model.hidden=8", "fee_rate=0.01")
    same = ensured(tmp_path, other, world)
    assert same is not None
    assert same.facts["enabled"]


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["weights.safetensors", "encoder.json"])
@pytest.mark.parametrize(
    "damage",
    [Path.unlink, _flip_a_byte, lambda path: path.write_bytes(path.read_bytes()[:100])],
    ids=["missing", "one byte", "cut off"],
)
def test_damaged_files_are_named_with_what_to_do(
    name: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    world, config = a_world(), tiny("pretrain.epochs=1")
    ensured(tmp_path, config, world)
    damage(tmp_path / "encoder" / name)
    with pytest.raises(StoreError, match=rf"{name}.*[Rr]emove the directory"):
        ensured(tmp_path, config, world)


def test_file_of_another_format_is_refused(tmp_path: Path) -> None:
    world, config = a_world(), tiny("pretrain.epochs=1")
    ensured(tmp_path, config, world)
    path = tmp_path / "encoder" / "encoder.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"format": 99}))
    with pytest.raises(StoreError, match="format 99"):
        ensured(tmp_path, config, world)
    path.write_text("[]")
    with pytest.raises(StoreError, match="Input should be an object"):
        ensured(tmp_path, config, world)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    config = tiny()
    origin = pretraining.Origin.from_config(config, 4, "abc", 0)
    pretraining.write_encoder(tmp_path, origin, {"w": torch.zeros(2)}, {"enabled": False})
    with pytest.raises(StoreError, match=r"weights\.safetensors.*another network"):
        ensured(tmp_path, config, a_world())


@pytest.mark.parametrize("after", [0, 1, 7])
def test_ctrl_c_leaves_no_file_and_can_be_begun_again(after: int, tmp_path: Path) -> None:
    world, config = a_world(), tiny()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    assert ensured(tmp_path, config, world, should_stop=stop) is None
    assert [file.name for file in tmp_path.iterdir()] == [".encoder.lock"]
    whole = ensured(tmp_path, config, world)
    assert_same(state_of(whole), state_of(pretrain(config, world, 0)))


def test_kill_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    world, config = a_world(), tiny("pretrain.epochs=1")
    first = ensured(tmp_path, config, world)
    (tmp_path / "encoder").rename(tmp_path / ".encoder-0123.old")
    assert_same(state_of(ensured(tmp_path, config, world)), state_of(first))


# The planted market


@pytest.mark.slow
def test_on_the_planted_trend_it_beats_linear_and_last_value_on_unseen_draws() -> None:
    """Trained on 8 draws, stopped by one, compared on two that nobody has looked at."""
    config = proof_config(
        load_config(
            CONFIGS / "qtmrl-fast.yaml",
            ["pretrain.epochs=4", "pretrain.patience=2", "pretrain.horizons=[1, 5]"],
        )
    )
    market = PlantedMarket()
    worlds = planted_worlds([market.draw(542 + k, "pretrain") for k in range(11)], config)
    train, valid = join_worlds(worlds[:8])[0], join_worlds(worlds[8:])[0]
    found = pretrain(config, train, 542, valid=valid)
    assert found is not None
    for name in ("return_1", "return_5"):
        score = found.facts["scores"][name]
        for rival in ("linear", "last", "mean"):
            assert score[f"over_{rival}"]["low"] > 0.0, (name, rival, score)
        # Nobody can foresee more than the Bayes filter, here on the same cells.
        assert score["r2"]["encoder"] < _bayes_r2(market, worlds[9:], int(name[7:])) + 0.002


def _bayes_r2(market: PlantedMarket, worlds: list[World], horizon: int) -> float:
    """Of the exact filter's expectation of the next bars' drifts, over the mean of zero."""
    came, said = [], []
    reach = sum((1.0 - 2.0 * market.flip) ** k for k in range(horizon))
    for world in worlds:
        rows = np.arange(world.span("valid").start, len(world.times) - horizon)
        level = np.log(world.growth)
        came.append(level[rows + horizon] - level[rows])
        said.append(reach * market.expected_drift(world.growth)[rows])
    y, f = np.concatenate(came), np.concatenate(said)
    return float(1.0 - ((y - f) ** 2).mean() / (y**2).mean())


def test_facts_are_read_without_the_weights_and_only_whole(tmp_path: Path) -> None:
    assert pretraining.read_encoder_document(tmp_path) is None
    made = ensured(tmp_path, tiny("pretrain.epochs=1"), a_world())
    assert made is not None
    (tmp_path / "encoder" / "weights.safetensors").unlink()
    document = pretraining.read_encoder_document(tmp_path)
    assert document is not None
    assert document["facts"] == made.facts
    _flip_a_byte(tmp_path / "encoder" / "encoder.json")
    with pytest.raises(StoreError, match=r"encoder\.json.*damaged"):
        pretraining.read_encoder_document(tmp_path)


def test_summary_tells_rivals_that_are_beaten_from_those_that_are_not() -> None:
    def over(low: float, high: float) -> dict[str, float]:
        return {"low": low, "high": high}

    score = {
        "cells": 9,
        "r2": {"encoder": 0.1, "linear": 0.2, "last": -1.0},
        "over_linear": over(-2.0, -1.0),
        "over_last": over(1.0, 2.0),
        "over_mean": over(-1.0, 1.0),
    }
    scores = {"return_20": score, "return_5": score | {"cells": 0}}
    lines = summary({"enabled": True, "epochs": 5, "best_epoch": 2, "scores": scores})
    assert lines[1:] == [
        "  return over 5 bars: no data",
        "  return over 20 bars: R² 10.00 % (linear 20.00 %, last value -100.00 %); better than "
        "last, not distinguished from mean, worse than linear",
    ]
