"""Evaluation of trained runs: what is saved is what the agents do, and is read again as it was."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from worlds import prepared_run, reseal

from echelon.backtest.baselines import run_baselines
from echelon.backtest.run import run_backtest
from echelon.config import load_config, to_yaml
from echelon.errors import DataError, StoreError
from echelon.evaluation.evaluate import evaluate, load_evaluation
from echelon.evaluation.test_access import Look
from echelon.features import Prepared
from echelon.files import exclusive_lock
from echelon.runs import RunDirectory
from echelon.runs.metrics import read_metrics
from echelon.training.run import TrainedRun, Training, Worlds, seed_directory

SMALL = (
    *("model.d_model=8", "model.n_layers=1", "model.hidden=8", "reward.scale=100"),
    *("train.rollout_steps=10", "train.books=4", "train.offset_groups=2", "train.lr_actor=0.01"),
    *("train.lr_critic=0.01", "train.total_env_steps=160", "train.validate_every_steps=40"),
    *("logging.tensorboard=false", "eval.estimation_bars=61", "seed=1"),
)
SEEDS = (1, 2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(run: Path, seed: int) -> None:
    config = load_config(run / "config.yaml")
    worlds = Worlds.from_prepared(Prepared.open(run), config)
    Training(config, worlds, seed_directory(run, seed), seed).run()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    """A run with two trained seeds; not evaluated. Copy it before changing anything."""
    run = prepared_run(tmp_path_factory.mktemp("trained") / "run", bars_file, *SMALL)
    for seed in SEEDS:
        train(run, seed)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to do with as one likes."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def evaluated(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy evaluated on test once, on valid once."""
    run = shutil.copytree(trained, tmp_path_factory.mktemp("evaluated") / "run")
    for split in ("test", "valid"):
        evaluate(TrainedRun.open(run), split)  # type: ignore[arg-type]
    return run


def test_trained_run_has_the_seeds_with_a_best_checkpoint(trained: Path) -> None:
    opened = TrainedRun.open(trained)
    assert opened.seeds == SEEDS
    for seed in SEEDS:
        assert opened.policy(seed).name == f"seed {seed}"
        best = json.loads((seed_directory(trained, seed) / "result.json").read_text())
        assert opened.best_step(seed) == best["best_step"] > 0


def test_validation_of_the_best_agent_is_the_score_training_logged(evaluated: Path) -> None:
    """One path from the network to the measure: training and evaluation agree to the last bit."""
    found = load_evaluation(evaluated, "valid")
    for seed in SEEDS:
        log = read_metrics(seed_directory(evaluated, seed))
        best = TrainedRun.open(evaluated).best_step(seed)
        logged = log.filter(pl.col("step") == best, pl.col("valid/sharpe_annual").is_not_null())
        for measure in ("sharpe_annual", "total_return", "turnover_annual"):
            assert found.seeds[seed][measure] == logged[f"valid/{measure}"].item()


def test_evaluation_holds_every_seed_and_every_baseline_the_data_support(evaluated: Path) -> None:
    found = load_evaluation(evaluated, "test")
    assert tuple(found.seeds) == SEEDS
    config = load_config(evaluated / "config.yaml")
    # The file of bars has no index.
    assert set(found.baselines) == set(config.eval.baselines) - {"benchmark"}


def test_measures_are_those_of_the_backtests(evaluated: Path) -> None:
    opened = TrainedRun.open(evaluated)
    world = Look.at(opened, "test").world(1.0)
    span = world.span("test")
    found = load_evaluation(evaluated, "test")
    others = run_baselines(world, span, opened.config)
    usual = others["equal_weight"]
    agent = run_backtest(opened.policy(2), world, span, opened.config).against(usual)
    assert found.seeds[2] == pytest.approx(agent.measures, nan_ok=True)
    assert np.array_equal(found.tables(2).equity["value"].to_numpy(), agent.value)
    for name, backtest in others.items():
        wanted = backtest.against(usual).measures
        wanted = {k: v if math.isfinite(v) else math.nan for k, v in wanted.items()}
        assert found.baselines[name] == pytest.approx(wanted, nan_ok=True), name
        assert found.tables(name).actions.height == len(span) - 1


def test_a_better_checkpoint_written_meanwhile_is_not_taken_for_the_one_evaluated(
    run: Path,
) -> None:
    opened = TrainedRun.open(run)
    opened.policy(1)
    step = opened.best_step(1)
    shutil.rmtree(run / "seeds" / "1" / "checkpoints" / "best")
    assert opened.best_step(1) == step


def test_span_of_the_tables_is_the_split(evaluated: Path) -> None:
    found = load_evaluation(evaluated, "test")
    prepared = Prepared.open(evaluated)
    rows = prepared.splits["test"].rows
    times = found.tables(1).equity["time"].to_numpy()
    assert np.array_equal(times, prepared.times[rows.start : rows.stop])
    assert (found.facts["first"], found.facts["last"]) == ("2016-07-01", "2016-12-30")
    assert found.facts["bars"] == len(rows)


def test_facts_name_fill_prices_fees_and_where_it_came_from(evaluated: Path) -> None:
    facts = load_evaluation(evaluated, "test").facts
    assert facts["split"] == "test"
    assert facts["ledger"] == {
        "fill": "the next bar's open",
        "prices": "split_adjusted",
        "preset": "paper",
    }
    assert facts["fees"] is True
    assert facts["deterministic"] is True
    assert facts["periods_per_year"] == 252
    assert facts["best_steps"].keys() == {"1", "2"}
    assert facts["run"]["config_hash"]


def test_mean_and_deviation_over_seeds(evaluated: Path) -> None:
    # Two small agents may happen to trade alike: numbers that differ are put in their place.
    one, two = 0.1, 0.3
    seeds = {1: {"total_return": one}, 2: {"total_return": two}}
    found = replace(load_evaluation(evaluated, "test"), seeds=seeds)
    over = found.over_seeds("total_return")
    assert over.mean == pytest.approx((one + two) / 2)
    assert over.std == pytest.approx(abs(one - two) / math.sqrt(2))


def test_summary_is_strict_json_with_null_for_what_cannot_be_told(evaluated: Path) -> None:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    text = (evaluated / "evaluations" / "test" / "summary.json").read_text()
    tree = json.loads(text, parse_constant=refuse)
    assert tree["baselines"]["cash"]["hit_rate"] is None
    assert math.isnan(load_evaluation(evaluated, "test").baselines["cash"]["hit_rate"])


def test_every_evaluation_of_a_split_is_counted(run: Path) -> None:
    opened = TrainedRun.open(run)
    first = evaluate(opened, "test")
    assert first.facts["reads"] == 1
    again = evaluate(opened, "test")
    assert again.facts["reads"] == 2
    assert again.seeds == first.seeds
    assert evaluate(opened, "valid").facts["reads"] == 1
    assert RunDirectory(run).evaluated_splits() == ["valid", "test"]


def test_split_that_was_not_evaluated_says_what_to_run(evaluated: Path) -> None:
    with pytest.raises(
        StoreError, match=r"not evaluated on train.*echelon evaluate .*--split train"
    ):
        load_evaluation(evaluated, "train")


def test_evaluation_of_an_older_format_is_refused_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "test" / "summary.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1}')
    with pytest.raises(StoreError, match=r"another version of Echelon. Run `echelon evaluate`"):
        load_evaluation(tmp_path, "test")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 2, "seeds": {"a": {}}}'])
def test_damaged_summary_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "test" / "summary.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(StoreError, match=r"summary.json: missing or damaged.*echelon evaluate"):
        load_evaluation(tmp_path, "test")


def test_summary_without_a_seed_is_damaged(evaluated: Path, tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "test" / "summary.json"
    path.parent.mkdir(parents=True)
    tree = json.loads((evaluated / "evaluations" / "test" / "summary.json").read_text())
    path.write_text(json.dumps(tree | {"seeds": {}}))
    with pytest.raises(StoreError, match=r"summary.json: missing or damaged.*seeds"):
        load_evaluation(tmp_path, "test")


def test_damaged_summary_is_mended_by_evaluating_again(run: Path) -> None:
    path = run / "evaluations" / "valid" / "summary.json"
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    assert evaluate(TrainedRun.open(run), "valid").facts["reads"] == 1


def test_summary_of_another_version_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "test" / "summary.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 99}')
    with pytest.raises(StoreError, match="another version"):
        load_evaluation(tmp_path, "test")


def test_a_second_evaluation_at_the_same_time_is_refused(run: Path) -> None:
    with (
        exclusive_lock(run / ".evaluate.lock", "the evaluations"),
        pytest.raises(StoreError, match="another process"),
    ):
        evaluate(TrainedRun.open(run), "valid")


def change_config(run: Path, *overrides: str) -> None:
    config = load_config(run / "config.yaml", overrides)
    (run / "config.yaml").write_text(to_yaml(config))


def test_without_fees_trading_costs_nothing_in_evaluation_and_validation(run: Path) -> None:
    change_config(run, "eval.use_fee=false", "train.total_env_steps=40")
    shutil.rmtree(run / "seeds")
    config = load_config(run / "config.yaml")
    worlds = Worlds.from_prepared(Prepared.open(run), config)
    assert worlds.train.rules.commission == 0.0005
    assert worlds.valid.rules.commission == 0.0
    train(run, 1)
    found = evaluate(TrainedRun.open(run), "valid")
    assert found.facts["fees"] is False
    assert found.baselines["random"]["turnover_annual"] > 0
    assert found.baselines["random"]["cost_total"] == 0.0
    assert found.seeds[1]["cost_total"] == 0.0


def test_directory_without_a_run_or_without_an_agent_says_so(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no config\.yaml there"):
        TrainedRun.open(tmp_path)
    shutil.rmtree(run / "seeds")
    with pytest.raises(StoreError, match=r"no trained agent there yet.*echelon train"):
        TrainedRun.open(run)


def test_agent_of_another_configuration_is_refused(run: Path) -> None:
    change_config(run, "model.hidden=12")
    with pytest.raises(StoreError, match="another configuration"):
        evaluate(TrainedRun.open(run), "valid")
    assert RunDirectory(run).evaluated_splits() == []


def test_agent_trained_on_other_data_is_refused(run: Path) -> None:
    path = run / "prepared" / "close.npy"
    np.save(path, np.load(path) * 2.0)
    reseal(run)
    with pytest.raises(StoreError, match=r"seed 1 was trained on other data.*Train again"):
        evaluate(TrainedRun.open(run), "valid")


def test_damaged_best_checkpoint_is_refused(run: Path) -> None:
    file = seed_directory(run, 1) / "checkpoints" / "best" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(StoreError, match=r"best.*damaged"):
        evaluate(TrainedRun.open(run), "valid")


def test_features_that_are_not_numbers_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / "prepared" / "X.npy"
    x = np.load(path)
    x[300, 2, 1] = np.nan
    np.save(path, x)
    monkeypatch.setattr(Prepared, "verify", lambda _self, **_: None)  # as if it were made so
    with pytest.raises(DataError, match=r"is not a number at 2016.*row 300"):
        evaluate(TrainedRun.open(run), "test")
    with pytest.raises(DataError, match="is not a number"):
        Worlds.from_prepared(Prepared.open(run), load_config(run / "config.yaml"))
