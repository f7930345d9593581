"""Rank targets and cross-fitting: what learners see of a row was fitted without that row."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from worlds import make_config, make_world

from echelon.agents import encoder_training, pretraining
from echelon.agents.apg import APG
from echelon.agents.cross_fit import cut_folds, fit_fold, purged_bars
from echelon.agents.expert import SACLearner
from echelon.agents.foresight import Forecasts, boosted_forecasts, scores, summary
from echelon.agents.outcomes import Scale, Targets, fit_scale, last_values, outcomes
from echelon.agents.pretraining import Pretrained, ensure_encoder, pretrain
from echelon.agents.tables import EmbeddingTable, encode_span
from echelon.config import Config, load_config
from echelon.envs.world import World
from echelon.errors import ConfigError, DamagedError, DataError
from echelon.models.encoders import Encoder, build_encoder, build_served
from echelon.ops.ranks import rank_ic
from echelon.serving.graphs import as_graph

W, N, F = 4, 12, 8
FOLDS = 3


def planted(n_rows: int = 240, seed: int = 0, signal: float = 0.3, **changes: Any) -> World:
    """What an asset earns from the next open on, over a bar, is a little of its first feature."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_rows, N, F)).astype(np.float32)
    earned = rng.standard_normal((n_rows, N))
    earned[2:] += signal * x[:-2, :, 0]  # decided at t, held from the open of t + 1 to t + 2
    close = 20.0 * np.exp(0.01 * np.cumsum(earned, axis=0))
    return make_world(close=close, x=x, window=W, **changes)


def settings(*overrides: str) -> Config:
    return make_config(
        *(f"window={W}", "model.d_model=8", "model.n_layers=1", "model.direct=16"),
        *("pretrain.targets=[rank]", "pretrain.horizons=[1]", "pretrain.loss=ic"),
        *("pretrain.epochs=12", "pretrain.patience=12", "pretrain.batch_rows=16"),
        *("pretrain.masked_share=0.0", "pretrain.lr=0.01", f"pretrain.cross_fit={FOLDS}"),
        *overrides,
    )


@pytest.fixture(scope="module")
def fitted() -> Pretrained:
    made = pretrain(settings(), planted(), 0)
    assert made is not None
    return made


def states(encoder: Encoder) -> list[dict[str, torch.Tensor]]:
    return [encoder.state_dict(), *(fold.encoder.state_dict() for fold in encoder.folds)]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(value, right[name]) for name, value in left.items())


# Targets


def test_rank_is_of_the_return_from_the_next_open() -> None:
    opens = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 4.0]])
    world = make_world(
        close=np.full((4, 3), 5.0), open=opens, growth=np.full((4, 3), 5.0), window=1
    )
    targets = Targets(("rank", "return"), (1,))
    y = outcomes(world, (range(4),), targets, Scale(np.zeros(2), np.ones(2), 1e-6))
    # Opens of rows 1 and 2 decide on row 0: three assets, ranks of variance 1.
    unit = np.sqrt(1.5)
    np.testing.assert_allclose(y[0, :, 0], [unit, 0.0, -unit], rtol=1e-6)
    np.testing.assert_allclose(y[1, :, 0], [-unit / 2, -unit / 2, unit], rtol=1e-6)
    assert np.isnan(y[2:, :, 0]).all(), "a rank reached past the end of its stretch"
    assert np.isfinite(y[:3, :, 1]).all()
    assert targets.names == ["rank_1", "return_1"]
    assert targets.reach == 2


def test_last_rank_is_over_at_the_row_that_knows_it() -> None:
    world = planted(40)
    piece, targets = range(10, 40), Targets(("rank",), (3,))
    plain = Scale(np.zeros(1), np.ones(1), 1e-6)
    last = last_values(world, (piece,), targets, plain)
    opens = world.rows.open
    assert np.isnan(last[0]).all(), "its fill lies before the first window"
    for row in (12, 25, 39):
        earned = opens[row] / opens[row - 3]
        ranks = stats.rankdata(earned)
        np.testing.assert_allclose(stats.rankdata(last[row - 10, :, 0]), ranks)


def test_ranks_keep_their_scale_and_others_take_that_of_the_train_window() -> None:
    world = planted(200)
    targets = Targets(("rank", "return"), (1, 5))
    scale = fit_scale(world, world.spans("train"), targets)
    assert scale.mean[:2].tolist() == [0.0, 0.0]
    assert scale.sd[:2].tolist() == [1.0, 1.0]
    y = outcomes(world, world.spans("train"), targets, scale)
    np.testing.assert_allclose(np.nanstd(y, axis=(0, 1)), 1.0, atol=1e-4)


# Losses


def with_gaps(seed: int = 0, rows: int = 5, assets: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    said, y = rng.standard_normal((2, 2, rows, assets, 3))
    y[0, 1, :3] = np.nan
    y[1, 2] = np.nan
    return torch.from_numpy(said), torch.from_numpy(y)


def test_correlation_loss_is_one_minus_the_mean_correlation_of_the_rows() -> None:
    said, y = with_gaps()
    ics = []
    for g in range(2):
        for row in range(5):
            for k in range(3):
                mine, theirs = said[g, row, :, k].numpy(), y[g, row, :, k].numpy()
                known = np.isfinite(theirs)
                if known.any():
                    ics.append(np.corrcoef(mine[known], theirs[known])[0, 1])
    assert len(ics) == 27, "a row without outcomes counts for nothing"
    loss = encoder_training.correlation_loss(said, y)
    np.testing.assert_allclose(float(loss), 1.0 - np.mean(ics), atol=1e-5)
    np.testing.assert_allclose(
        float(encoder_training.correlation_loss(3.0 * said + 1.0, y)), loss, 1e-5
    )


def test_pairwise_loss_is_the_mean_over_pairs_of_known_assets() -> None:
    said, y = with_gaps()
    pairs = []
    for step in (1, 2, 3):
        ahead, better = said - said.roll(step, -2), y - y.roll(step, -2)
        for d, b in zip(ahead.flatten().tolist(), better.flatten().tolist(), strict=True):
            if np.isfinite(b):
                pairs.append(np.log1p(np.exp(-d * np.sign(b))))
    loss = encoder_training.pairwise_loss(said, y)
    np.testing.assert_allclose(float(loss), np.mean(pairs), rtol=1e-12)
    order = torch.from_numpy(np.nan_to_num(y.numpy()))
    assert float(encoder_training.pairwise_loss(9.0 * order, y)) < float(loss)


def test_losses_of_what_is_unknown_are_finite_and_have_no_gradient() -> None:
    said = torch.zeros(2, 3, 1, requires_grad=True)
    nothing = torch.full((2, 3, 1), torch.nan)
    for loss in (encoder_training.correlation_loss, encoder_training.pairwise_loss):
        loss(said, nothing).backward()  # type: ignore[no-untyped-call]
        assert said.grad is not None
        assert not said.grad.any()


def test_each_kind_of_target_has_its_share_of_the_loss() -> None:
    said, y = with_gaps()
    ranked = np.array([True, False, False])
    whole = encoder_training.forecast_loss(said, y, ranked, "ic")
    ic = encoder_training.correlation_loss(said[..., :1], y[..., :1])
    squares = (said - y)[..., 1:].square()
    np.testing.assert_allclose(float(whole), ic / 3 + 2 / 3 * squares.nanmean(), rtol=1e-12)
    plain = encoder_training.forecast_loss(said, y, ranked, "mse")
    np.testing.assert_allclose(float(plain), (said - y).square().nanmean(), rtol=1e-12)


@pytest.mark.parametrize("loss", ["mse", "ic", "pairwise"])
def test_every_loss_foresees_the_planted_order(loss: str) -> None:
    made = pretrain(
        settings(f"pretrain.loss={loss}", "pretrain.cross_fit=0"), planted(800, signal=0.6), 0
    )
    assert made is not None
    score = made.facts["scores"]["rank_1"]
    # The planted correlation is 0.6 / √1.36, of which a rank loses a little.
    assert 0.35 < score["ic"]["encoder"] < 0.55
    assert score["interval"]["low"] > 0.25
    assert made.facts["valid_loss"][-1] < made.facts["valid_loss"][0]


# Rivals


def test_rank_scores_are_daily_correlations_paired_by_day() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal((300, 9, 1)).astype(np.float32)
    near, far = (y + s * rng.standard_normal(y.shape).astype(np.float32) for s in (1, 3))
    forecasts = Forecasts(y, near, far, y, np.full_like(y, np.nan))
    score = scores(forecasts, Targets(("rank",), (1,)), 0)["rank_1"]
    daily = np.array([stats.spearmanr(a[:, 0], b[:, 0])[0] for a, b in zip(near, y, strict=True)])
    other = np.array([stats.spearmanr(a[:, 0], b[:, 0])[0] for a, b in zip(far, y, strict=True)])
    np.testing.assert_allclose(score["ic"]["encoder"], daily.mean(), rtol=1e-9)
    np.testing.assert_allclose(score["icir"]["encoder"], daily.mean() / daily.std(ddof=1), 1e-9)
    np.testing.assert_allclose(score["over_linear"]["estimate"], (daily - other).mean(), rtol=1e-9)
    assert score["over_linear"]["low"] > 0.0
    assert score["ic"]["boosted"] is None
    assert score["over_boosted"]["estimate"] is None
    facts = {"enabled": True, "epochs": 1, "best_epoch": 1, "scores": {"rank_1": score}}
    ic, icir = score["ic"]["encoder"], score["icir"]["encoder"]
    line = f"  rank over 1 bar: rank IC {ic:.3f}, ICIR {icir:.3f} a day (linear "
    assert summary(facts)[1].startswith(line)
    assert summary(facts)[1].endswith("boosted n/a); better than linear")


def test_boosted_rival_sees_the_train_window_and_ranks_alone() -> None:
    world, targets = planted(400), Targets(("rank", "return"), (1,))
    pieces = world.spans("train")
    y = outcomes(world, pieces, targets, fit_scale(world, pieces, targets))
    valid = world.spans("valid")
    said = boosted_forecasts(world, pieces, y, world, valid, targets, 0)
    came = outcomes(world, valid, targets, Scale(np.zeros(2), np.ones(2), 1e-6))
    ic = rank_ic(said[..., 0].astype(float), came[valid[0].start : valid[0].stop, :, 0])
    assert np.nanmean(ic) > 0.1
    assert np.isnan(said[..., 1]).all()
    later = world.x.copy()
    later[valid[0].stop :] += 9.0
    again = boosted_forecasts(replace(world, x=later), pieces, y, world, valid, targets, 0)
    assert np.array_equal(said, again, equal_nan=True)


# Encoders


@pytest.mark.parametrize("kind", ["TimeCNN", "Transformer", "TimesNet"])
def test_direct_features_join_the_embedding_of_their_own_bar(kind: str) -> None:
    config = settings(f"model.encoder={kind}", "pretrain.cross_fit=0")
    x = torch.randn(9, N, F)
    encoder = build_encoder(config, F)
    encoder.fit(x)
    with torch.no_grad():
        z = encoder.eval()(x)
        moved = x.clone()
        moved[:-1] += 1.0  # all but the last bar, whose own features stay
        inner = encoder.inner(x)  # type: ignore[operator]
        own = encoder.join(torch.zeros_like(inner), x[W - 1 :])  # type: ignore[operator]
        torch.testing.assert_close(z, inner + own)
        other = encoder(moved)
        torch.testing.assert_close(
            other[-1] - encoder.inner(moved)[-1],  # type: ignore[operator]
            own[-1],
            rtol=0,
            atol=1e-5,
        )
        for k in range(len(z)):
            torch.testing.assert_close(encoder(x[k : k + W])[0], z[k], rtol=0, atol=1e-5)


def test_scores_are_standardised_across_the_assets_that_are_there() -> None:
    config = settings("pretrain.targets=[rank, return]")
    encoder = build_served(config, F).eval()
    assert encoder.d_model == 2
    x = torch.randn(6, N, F)
    x[:, 3] = 0.0
    with torch.no_grad():
        z = encoder(x)
        assert z.shape == (3, N, 2)
        assert not z[:, 3].any()
        others = [n for n in range(N) if n != 3]
        raw = encoder.join.ahead(encoder.inner(x))[:, others]  # type: ignore[operator, union-attr]
        wanted = (raw - raw.mean(1, keepdim=True)) / raw.std(1, keepdim=True, correction=0)
        torch.testing.assert_close(z[:, others], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(encoder(x[:, others]), z[:, others], rtol=1e-4, atol=1e-5)
        assert not encoder(torch.zeros(6, N, F)).any()
        assert not encoder(x[:, :1]).any(), "one asset alone is neither ahead nor behind"


def test_exported_scores_equal_the_encoder() -> None:
    encoder = build_served(settings("model.encoder=TimesNet", "model.periods=[2, 3]"), F).eval()
    x = torch.randn(5, W, N, F)
    x[2, :, 4] = 0.0
    with torch.no_grad():
        wanted = torch.stack([encoder(window)[0] for window in x])
    exported = as_graph(encoder.for_export())(x.numpy())
    np.testing.assert_allclose(exported, wanted.numpy(), atol=1e-5)
    assert not exported[2, 4].any()


# Folds


def test_folds_cover_every_row_once_and_leave_a_gap_on_each_side() -> None:
    pieces, purge = (range(3, 103), range(120, 150), range(160, 310)), 7
    blocks = cut_folds(pieces, 4, purge)
    held = [row for block in blocks for rows in block.held for row in rows]
    assert held == [row for piece in pieces for row in piece]
    sizes = [sum(len(rows) for rows in block.held) for block in blocks]
    assert sizes == [70, 70, 70, 70]
    for block in blocks:
        rows = {row for part in block.fitted for row in part}
        assert rows <= set(held)
        for piece in pieces:
            near = [
                row
                for rows_held in block.held
                for row in range(rows_held.start - purge, rows_held.stop + purge)
                if any(h in piece for h in rows_held) and row in piece
            ]
            assert not rows & set(near), "a row next to the block was fitted on"
        assert all(len(part) >= 16 for part in block.fitted)
    # The other stretches lie elsewhere: nothing of them needs to be left out.
    assert range(120, 150) in blocks[0].fitted


def test_blocks_that_leave_nothing_to_fit_on_are_refused() -> None:
    with pytest.raises(DataError, match=r"pretrain\.cross_fit=2.*30 bars.*15 of them with 16"):
        cut_folds((range(30),), 2, 16)


def test_in_sample_scores_flatter_and_those_out_of_fold_do_not(fitted: Pretrained) -> None:
    ic = fitted.facts["cross_fit"]["rank_1"]
    assert ic["in_sample"] > ic["out_of_fold"] + 0.05
    assert ic["out_of_fold"] == pytest.approx(0.25, abs=0.08)
    assert [rows for fold in fitted.facts["folds"] for rows in fold] == [
        [fold.rows.start, fold.rows.stop] for fold in fitted.encoder.folds
    ]


def test_table_of_a_learner_is_out_of_fold_and_later_rows_are_of_the_whole_fit(
    fitted: Pretrained, tmp_path: Path
) -> None:
    world, encoder = planted(), fitted.encoder
    config = settings("train.algo=APG", "expert.horizon=4", "train.books=2")
    learner = APG(config, world, 0, encoder, tmp_path)
    train, valid = world.span("train"), world.span("valid")
    z = learner.table.look(np.arange(len(world.times))[train.start : valid.stop])
    assert z.shape == (valid.stop - train.start, N, 1)
    rows = [row for fold in encoder.folds for row in fold.rows]
    assert rows == list(train)
    for fold in encoder.folds:
        own = encode_span(fold.encoder, world, fold.rows)
        at = slice(fold.rows.start - train.start, fold.rows.stop - train.start)
        torch.testing.assert_close(z[at], own, rtol=0, atol=1e-6)
    whole = encode_span(encoder, world, range(train.start, valid.stop))
    later = slice(valid.start - train.start, None)
    torch.testing.assert_close(z[later], whole[later], rtol=0, atol=1e-6)
    assert not torch.allclose(z[: len(train)], whole[: len(train)], atol=0.1)
    policy = learner.policy()
    policy.start(world, valid)
    torch.testing.assert_close(policy._look(np.array([valid.start])), whole[later][:1])


def test_table_of_another_world_is_of_the_whole_fit(fitted: Pretrained) -> None:
    world = planted(seed=1)
    table = EmbeddingTable(world, 1, fitted=False)
    table.refresh(fitted.encoder)
    train = world.span("train")
    whole = encode_span(fitted.encoder, world, train)
    assert torch.equal(table.look(np.arange(train.start, train.stop)), whole)


def test_what_happens_in_a_block_does_not_reach_who_scores_it() -> None:
    world, config = planted(), settings("pretrain.epochs=2")
    purge = purged_bars(config)
    blocks = cut_folds(world.spans("train"), FOLDS, purge)
    for k, block in enumerate(blocks):
        (rows,) = block.held
        x, growth = world.x.copy(), world.growth.copy()
        x[rows.start : rows.stop] = 3.0
        growth[rows.start : rows.stop] *= np.random.default_rng(1).uniform(0.5, 2.0, (len(rows), N))
        changed = replace(world, x=x, growth=growth)
        for other, inside in ((k, False), ((k + 1) % FOLDS, True)):
            fits = [
                fit_fold(config, where, blocks[other], 2, (0, other), lambda: False)
                for where in (world, changed)
            ]
            first, second = (fit.state_dict() for fit in fits if fit is not None)
            assert same(first, second) is not inside


def test_no_fold_shares_a_bar_of_windows_or_targets_with_its_block() -> None:
    config = settings("pretrain.horizons=[3]")
    reach = Targets.from_config(config.pretrain).reach
    assert reach == 4
    for block in cut_folds((range(W - 1, 200),), 4, purged_bars(config)):
        (held,) = block.held
        # What block rows look at, and what comes of them.
        bars = range(held.start - W + 1, held.stop + reach)
        for rows in block.fitted:
            # A target never crosses the end of the stretch it begins in.
            seen = range(rows.start - W + 1, rows.stop)
            assert seen.stop <= bars.start or seen.start >= bars.stop


def test_changing_the_future_changes_nothing_before_it(fitted: Pretrained) -> None:
    world = planted()
    valid = world.splits["valid"]
    x, growth = world.x.copy(), world.growth.copy()
    x[valid.stop :] += 1.0
    growth[valid.stop :] *= np.random.default_rng(2).uniform(0.5, 2.0, growth[valid.stop :].shape)
    again = pretrain(settings(), replace(world, x=x, growth=growth), 0)
    assert again is not None
    assert again.facts == fitted.facts
    for left, right in zip(states(fitted.encoder), states(again.encoder), strict=True):
        assert same(left, right)
    tables = [EmbeddingTable(where, 1) for where in (world, replace(world, x=x, growth=growth))]
    for table in tables:
        table.refresh(fitted.encoder)
    rows = np.arange(W - 1, valid.stop)
    assert torch.equal(tables[0].look(rows), tables[1].look(rows))


def test_rows_of_validation_change_no_weight_of_a_fold_but_through_the_pass_they_choose() -> None:
    world, config = planted(), settings("pretrain.epochs=1")
    growth = world.growth.copy()
    valid = world.splits["valid"]
    growth[valid.start :] *= np.random.default_rng(3).uniform(0.5, 2.0, growth[valid.start :].shape)
    left, right = (pretrain(config, w, 0) for w in (world, replace(world, growth=growth)))
    assert left is not None
    assert right is not None
    assert left.facts["scores"] != right.facts["scores"]
    for a, b in zip(states(left.encoder), states(right.encoder), strict=True):
        assert same(a, b)


# Files and configuration


def test_folds_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, config = planted(), settings("pretrain.epochs=1")

    def ensure() -> Pretrained:
        made = ensure_encoder(config, world, tmp_path, 0, data="abc")
        assert made is not None
        return made

    first = ensure()
    monkeypatch.setattr(pretraining, "pretrain", None)  # not a second time
    again = ensure()
    assert again.facts == first.facts
    assert [fold.rows for fold in again.encoder.folds] == [
        fold.rows for fold in first.encoder.folds
    ]
    for left, right in pairwise([states(first.encoder), states(again.encoder)]):
        assert all(same(a, b) for a, b in zip(left, right, strict=True))
    assert not any(fold.encoder.training for fold in again.encoder.folds)
    assert "folds" not in "".join(again.encoder.state_dict()), "a bundle needs no folds"


def test_folds_without_their_weights_are_damage(tmp_path: Path) -> None:
    world, config = planted(), settings("pretrain.epochs=1")
    made = ensure_encoder(config, world, tmp_path, 0, data="abc")
    assert made is not None
    origin = pretraining.Origin.from_config(config, F, "abc", 0)
    pretraining.write_encoder(tmp_path, origin, made.encoder.state_dict(), made.facts)
    with pytest.raises(DamagedError, match=r"weights\.safetensors.*another network"):
        ensure_encoder(config, world, tmp_path, 0, data="abc")


@pytest.mark.parametrize("after", [3, 110, 160])
def test_ctrl_c_while_folds_are_fitted_leaves_nothing(after: int, tmp_path: Path) -> None:
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    assert ensure_encoder(settings(), planted(), tmp_path, 0, stop, data="abc") is None
    assert [file.name for file in tmp_path.iterdir()] == [".encoder.lock"]


def test_policy_on_scores_is_loaded_as_it_was_saved(fitted: Pretrained) -> None:
    config = settings("train.algo=SAC", "train.books=2")
    learner = SACLearner(config, planted(), 0, fitted.encoder)
    loaded = SACLearner.load_policy(config, learner.weights(), F, 0, "agent")
    world = planted()
    span = world.span("valid")
    for policy in (learner.policy(), loaded):
        policy.start(world, span)
    rows = np.array([span.start, span.stop - 1])
    assert torch.equal(learner.policy()._look(rows), loaded._look(rows))
    assert loaded.encoder.folds == ()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pretrain.targets=[return]", "loss=ic is of ranks"),
        ("pretrain.targets=[rank, rank]", "name one twice"),
        ("pretrain.cross_fit=1", "take 2 blocks or more"),
        ("pretrain.enabled=false", "cross_fit scores rows by fitted encoders"),
        ("lora.enabled=true", "goes on fitting one"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(override: str, words: str) -> None:
    given = ["pretrain.targets=[rank]", "pretrain.loss=ic", "pretrain.cross_fit=2", override]
    with pytest.raises(ConfigError, match=words):
        load_config(None, given)
