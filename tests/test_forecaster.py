"""The forecaster: learns on the train window, is chosen on validation, kept and read again."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import trained_run
from worlds import make_config, make_world

from echelon.backtest import forecaster as module
from echelon.backtest.baselines import make_baseline, run_baselines
from echelon.backtest.forecaster import (
    Forecaster,
    Ridge,
    ensure_forecaster,
    fit_forecaster,
    forecast_ic,
    forecaster_hash,
    model_of_arrays,
    refusal,
    scorer_of,
)
from echelon.backtest.run import run_backtest
from echelon.cli.evaluate import print_evaluation
from echelon.config import Config
from echelon.envs import World
from echelon.envs.targets import forward_returns, section_ranks
from echelon.envs.world import world_of
from echelon.errors import ConfigError, DamagedError, StoreError, UsageError
from echelon.evaluation.evaluate import Evaluation, evaluate, load_evaluation
from echelon.ops.ranks import rank_ic
from echelon.report.pages import Cell
from echelon.report.run.gather import SplitData
from echelon.report.run.page import write_report
from echelon.report.run.tables import forecast_choices, forecast_table
from echelon.report.texts import Words
from echelon.runs.tensor_files import TensorFiles
from echelon.training.run import TrainedRun

QUICK = ("forecast.trees=30", "eval.rebalance_bars=5")
MODELS = ("boosting", "ridge")


def quick(*overrides: str) -> Config:
    return make_config(*QUICK, *overrides)


def planted_world(n_rows: int = 300, n_assets: int = 30, **changes: Any) -> World:
    """The first feature foretells the next bars' returns; the others say nothing."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((n_rows, n_assets, 4)).astype(np.float32)
    signal = np.zeros((n_rows, n_assets))
    for t in range(1, n_rows):
        signal[t] = 0.9 * signal[t - 1] + 0.436 * rng.standard_normal(n_assets)
    x[..., 0] = signal
    returns = 0.02 * rng.standard_normal((n_rows, n_assets))
    returns[2:] += 0.01 * signal[:-2]  # the bar after the one that is filled
    close = 20.0 * np.exp(np.cumsum(returns, axis=0))
    opens = np.concatenate([close[:1], close[:-1]])
    return make_world(**({"close": close, "open": opens, "x": x, "window": 3} | changes))


def fitted(config: Config, world: World) -> Forecaster:
    made = fit_forecaster(config, world)
    assert made is not None
    return made


@pytest.mark.parametrize("model", MODELS)
def test_a_planted_signal_is_foreseen_and_traded(model: str) -> None:
    world, config = planted_world(), quick(f"forecast.model={model}")
    made = fitted(config, world)
    for split in ("valid", "test"):
        ic = forecast_ic(made, world, world.span(split), 1)
        mean, low, days = ic["ic"], ic["low"], ic["days"]
        assert mean is not None
        assert low is not None
        assert mean > 0.25
        assert low > 0.1
        assert days == len(world.span(split)) - 6  # the rest reaches beyond the window
    span = world.span("test")
    done = run_baselines(world, span, config, made)
    sharpe = {name: own.measures["sharpe_annual"] for name, own in done.items()}
    assert sharpe["forecast"] > sharpe["equal_weight"] + 3.0
    assert done["forecast"].kind == "weights"


def test_rank_ics_are_those_of_the_scores_at_each_row() -> None:
    world = planted_world()
    made, span = fitted(quick(), world), world.span("test")
    table = np.stack([scorer_of(made.model)(world.x[row]) for row in span])
    daily = rank_ic(table, forward_returns(world, span, 5))
    ic = forecast_ic(made, world, span, 1)
    assert ic["ic"] == pytest.approx(np.nanmean(daily))
    assert ic["icir"] == pytest.approx(np.nanmean(daily) / np.nanstd(daily, ddof=1))


def arrays_of(made: Forecaster) -> dict[str, np.ndarray]:
    return dict(made.model._asdict())


def same(first: Forecaster, second: Forecaster) -> bool:
    a, b = arrays_of(first), arrays_of(second)
    equal = a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    return equal and first.rule == second.rule and first.facts == second.facts


@pytest.mark.parametrize("model", MODELS)
def test_the_same_data_and_seed_give_the_same_bits(model: str) -> None:
    config = quick(f"forecast.model={model}")
    assert same(fitted(config, planted_world()), fitted(config, planted_world()))


@pytest.mark.parametrize("model", MODELS)
def test_what_follows_the_train_window_changes_no_model_and_the_test_window_nothing(
    model: str,
) -> None:
    config, world = quick(f"forecast.model={model}"), planted_world()
    made = fitted(config, world)
    rng = np.random.default_rng(4)
    for split in ("valid", "test"):
        first = world.splits[split].start
        later = (np.arange(len(world.times)) >= first)[:, None]
        noise = np.exp(0.05 * rng.standard_normal(world.growth.shape))
        other = replace(
            world,
            x=np.where(later[..., None], rng.permutation(world.x), world.x),
            growth=np.where(later, world.growth * noise, world.growth),
            rows=world.rows._replace(
                close=np.where(later, world.rows.close * noise, world.rows.close),
                open=np.where(later, world.rows.open * noise, world.rows.open),
                tradable=world.rows.tradable & ~(later & (noise > 1.05)),
            ),
        )
        again = fitted(config, other)
        assert all(np.array_equal(a, b) for a, b in zip(made.model, again.model, strict=True))
        assert same(made, again) == (split == "test")


def test_the_choice_is_the_best_on_validation_and_everything_tried_is_kept() -> None:
    world, config = planted_world(), quick()
    made = fitted(config, world)
    choices = made.facts["choices"]
    # A tenth, a fifth and a third of 30 assets; 2 and 3 times as many before one is sold.
    tried = [(c["top"], c["buffer"]) for c in choices]
    assert tried == [(3, 2.0), (3, 3.0), (6, 2.0), (6, 3.0), (10, 2.0)]
    best = max(choices, key=lambda choice: choice["information_ratio"])
    assert (made.rule.top, made.rule.buffer) == (best["top"], best["buffer"])
    span = world.span("valid")
    own = run_backtest(made.policy(), world, span, config)
    usual = run_backtest(make_baseline("equal_weight", config), world, span, config)
    active = own.returns - usual.returns
    ratio = active.mean() / active.std(ddof=1) * np.sqrt(252.0)
    assert best["information_ratio"] == pytest.approx(ratio)
    assert best["sharpe_annual"] == pytest.approx(own.measures["sharpe_annual"])


def test_where_rows_are_many_only_some_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    world = planted_world()
    every = fitted(quick(), world).facts
    monkeypatch.setattr(module, "_MOST_CELLS", 1_000)
    some = fitted(quick(), world).facts
    # 178 rows of the train window with a whole window, the last six without a target.
    assert (every["rows"], every["cells"]) == (172, 172 * 30)
    assert (some["rows"], some["cells"]) == (35, 35 * 30)


def test_ridge_finds_the_slopes_of_a_linear_market() -> None:
    model = fitted(quick("forecast.model=ridge"), planted_world()).model
    assert isinstance(model, Ridge)
    slopes = np.abs(model.weights[:-1])
    assert slopes[0] > 5.0 * slopes[1:].max()
    x = planted_world().x[9]
    by_hand = [sum(float(a) * w for a, w in zip(row, model.weights, strict=False)) for row in x]
    assert scorer_of(model)(x) == pytest.approx(np.array(by_hand) + model.weights[-1], abs=1e-9)


def test_small_universes_hold_fewer() -> None:
    tops = {c["top"] for c in fitted(quick(), planted_world(n_assets=16)).facts["choices"]}
    assert tops == {2, 3, 5}
    pair = fitted(quick(), planted_world(n_assets=2))
    assert {c["top"] for c in pair.facts["choices"]} == {1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_assets": 1}, "of a single asset there is no cross-section"),
        ({"splits": {"train": range(200), "test": range(200, 300)}}, "there is no valid window"),
        ({"splits": {"test": range(300)}}, "there is no train and no valid window"),
        ({"splits": {"train": range(9), "valid": range(9, 300)}}, "the train window has 30 ranks"),
    ],
)
def test_data_that_cannot_support_it_leave_it_out_and_say_why(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    world, config = planted_world(**changes), quick()
    with caplog.at_level(logging.WARNING):
        assert fit_forecaster(config, world) is None
    assert f"the baseline forecast is left out: {words}" in caplog.text
    assert words in str(refusal(config, world))
    assert "forecast" not in run_baselines(world, range(4, 20), quick("eval.baselines=[forecast]"))


def test_it_is_fitted_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, config = planted_world(), quick()
    fits = []
    fit = module.fit_forecaster
    monkeypatch.setattr(module, "fit_forecaster", lambda *args: fits.append(1) or fit(*args))
    with ThreadPoolExecutor(4) as pool:  # all at once: the others wait for whoever is first
        waiting = [
            pool.submit(ensure_forecaster, config, world, tmp_path, data="d") for _ in range(4)
        ]
        made = [each.result() for each in waiting]
    assert len(fits) == 1
    assert all(one is not None and same(one, fitted(config, world)) for one in made)
    for other, data in ((quick("forecast.trees=9"), "d"), (config, "e")):
        assert ensure_forecaster(other, world, tmp_path, data=data) is not None
    assert len(fits) == 3


def test_the_hash_is_of_what_the_forecaster_depends_on() -> None:
    base = forecaster_hash(quick(), "d")
    for other in ("forecast.horizon=6", "market.commission_bps=9", "seed=9", "eval.use_fee=false"):
        assert forecaster_hash(quick(other), "d") != base
    for free in ("train.books=4", "market.executor_step_minutes=9", "eval.baselines=[cash]"):
        assert forecaster_hash(quick(free), "d") == base
    assert forecaster_hash(quick(), "e") != base


@pytest.mark.parametrize("name", ["model.safetensors", "forecast.json"])
def test_a_damaged_file_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    world, config = planted_world(), quick()
    ensure_forecaster(config, world, tmp_path, data="d")
    file = tmp_path / "forecast" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"forecast.*Remove the directory"):
        ensure_forecaster(config, world, tmp_path, data="d")


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFiles, "write", fail)
    with pytest.raises(StoreError, match=r"forecast: .*\(No space left on device\)\. Make room"):
        ensure_forecaster(quick(), planted_world(), tmp_path, data="d")


def test_what_is_kept_is_plain_and_says_what_was_tried(tmp_path: Path) -> None:
    ensure_forecaster(quick(), planted_world(), tmp_path, data="d")
    document = json.loads((tmp_path / "forecast" / "forecast.json").read_text())
    assert document["facts"]["model"] == "boosting"
    assert len(document["facts"]["choices"]) == 5
    files = sorted(file.name for file in (tmp_path / "forecast").iterdir())
    assert files == ["forecast.json", "model.safetensors"]


def test_arrays_of_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match="of no model"):
        model_of_arrays({"layers": np.zeros(3)}, 2)
    with pytest.raises(ValueError, match=r"\[2\] weights for 2 features"):
        model_of_arrays({"weights": np.zeros(2)}, 2)
    with pytest.raises(ValueError, match="not a number"):
        model_of_arrays({"weights": np.array([0.0, np.nan, 1.0])}, 2)
    trees = fitted(quick(), planted_world()).model._asdict()
    with pytest.raises(ValueError, match="none of the 1"):
        model_of_arrays({**trees, "feature": trees["feature"] + 9}, 1)


def test_the_baseline_asks_for_a_fitted_forecaster() -> None:
    with pytest.raises(UsageError, match="has to be fitted before it can decide"):
        make_baseline("forecast", quick())


def test_more_tranches_than_bars_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tranches \(6\) exceeds horizon \(5\)"):
        quick("forecast.tranches=6")


def test_targets_are_the_ranks_of_tradable_returns() -> None:
    world = planted_world()
    cells = module._cells(world, 5)
    span = world.span("train")
    ranks = section_ranks(forward_returns(world, span, 5))
    row, asset = np.nonzero(np.isfinite(ranks))
    assert np.array_equal(cells.y, ranks[row, asset])
    assert np.array_equal(cells.x, world.x[row + span.start, asset])
    assert cells.row.max() + 6 == span.stop - 1


def test_an_evaluation_has_its_rank_ics_on_both_windows_and_reports_show_them(
    tmp_path: Path, bars_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baselines = "eval.baselines=[equal_weight, forecast]"
    path = trained_run(tmp_path / "run", bars_file, "A2C", baselines, "forecast.trees=9")
    run = TrainedRun.open(path)
    evaluate(run, "valid")
    result = evaluate(run, "test")
    facts = result.facts["forecast"]
    assert set(facts["rank_ic"]) == {"valid", "test"}
    assert list(result.baselines) == ["equal_weight", "forecast"]
    world = world_of(run.prepared, run.config)
    content = str(run.prepared.manifest["content_hash"])
    kept = ensure_forecaster(run.config, world, path, data=content)
    assert kept is not None
    assert facts["top"] == kept.rule.top
    ic = forecast_ic(kept, world, world.span("valid"), run.config.seed)
    assert facts["rank_ic"]["valid"] == ic
    done = run_backtest(kept.policy(), world, world.span("valid"), run.config)
    shown = load_evaluation(path, "valid").baselines["forecast"]["sharpe_annual"]
    assert done.measures["sharpe_annual"] == pytest.approx(shown)
    print_evaluation(result, ("sharpe",))
    assert "rank IC of the forecaster, test:" in capsys.readouterr().out
    for lang, words in (("en", "Boosted trees (LightGBM)"), ("zh", "提升树（LightGBM）")):
        page = write_report(path, lang=lang).read_text(encoding="utf-8")
        assert words in page
        assert page.count("ICIR") >= 2
    # Evaluations of before have no forecaster, and are read and shown as they are.
    for split in ("valid", "test"):
        file = path / "evaluations" / split / "summary.json"
        tree = json.loads(file.read_text(encoding="utf-8"))
        del tree["forecast"], tree["baselines"]["forecast"]
        file.write_text(json.dumps(tree), encoding="utf-8")
    assert "Boosted trees" not in write_report(path).read_text(encoding="utf-8")


def test_the_tables_mark_what_was_chosen_and_leave_open_what_is_not_known() -> None:
    facts: dict[str, Any] = {
        "model": "ridge",
        **{"cells": 1234, "rows": 9, "top": 3, "buffer": 2.0, "tranches": 5, "horizon": 5},
        "choices": [
            {"top": 3, "buffer": 2.0, "sharpe_annual": 1.0, "information_ratio": 0.5},
            {"top": 5, "buffer": 2.0, "sharpe_annual": 0.9, "information_ratio": None},
        ],
        "rank_ic": {
            "valid": {"ic": 0.0812, "low": 0.02, "high": 0.13, "icir": 0.69, "days": 240},
            "test": {"ic": None, "low": None, "high": None, "icir": None, "days": 0},
        },
    }
    evaluation = Evaluation(Path(), {}, {}, {"forecast": facts})
    split, words = SplitData("test", evaluation, (), ()), Words("en")
    shown = forecast_table(split, words)
    assert shown is not None
    assert shown.table.rows[0] == ["Validation", "0.081", "0.020 to 0.130", "0.690", "240"]
    assert shown.table.rows[1] == ["Test", "–", "–", "–", "0"]
    assert "Ridge regression" in shown.note
    assert "sells below rank 6 (the best of 2" in shown.note
    chosen, other = forecast_choices(split, words).rows
    assert [cell.kind for cell in chosen if isinstance(cell, Cell)] == ["best"] * 4
    assert [cell.text for cell in other if isinstance(cell, Cell)] == ["5", "2×", "–", "0.90"]
    assert forecast_table(SplitData("test", Evaluation(Path(), {}, {}, {}), (), ()), words) is None
