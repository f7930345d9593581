"""The test window is sealed: nothing that learns, chooses or scales can see it.

By proof: every value of the test window is changed in the source file, and training, its choices
and the scaler come out the same to the bit. By construction: the worlds that training gets end
where validation does, and nobody gets the rest without an entry in the registry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from worlds import prepared_run

from echelon.config import load_config
from echelon.envs.registration import make_trading_env
from echelon.errors import DataError
from echelon.evaluation.evaluate import evaluate
from echelon.evaluation.trust import load_trust
from echelon.features import Prepared
from echelon.runs.checkpoint import best_checkpoint, latest_checkpoint, load_checkpoint
from echelon.runs.metrics import is_timing, read_metrics
from echelon.runs.registry import TrialRegistry, Window
from echelon.training.run import TrainedRun, Training, Worlds, seed_directory

TEST_STARTS = datetime(2016, 7, 1)
SMALL = (
    *("model.d_model=8", "model.n_layers=1", "model.hidden=8", "reward.scale=100"),
    *("train.rollout_steps=10", "train.books=4", "train.offset_groups=2", "train.lr_actor=0.01"),
    *("train.lr_critic=0.01", "train.total_env_steps=400", "train.validate_every_steps=80"),
    *("logging.tensorboard=false", "eval.baselines=[equal_weight, cash]", "seed=1"),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained_run(directory: Path, bars: Path) -> Path:
    run = prepared_run(directory / "runs" / "a", bars, *SMALL)
    config = load_config(run / "config.yaml")
    worlds = Worlds.from_prepared(Prepared.open(run), config)
    Training(config, worlds, seed_directory(run, 1), 1).run()
    return run


def with_another_test_window(bars: Path, target: Path) -> Path:
    """The same file, with every value of the test window changed and nothing before it."""
    frame = pl.read_parquet(bars)
    later = pl.col("date").cast(pl.Datetime("us")) >= TEST_STARTS
    rng = np.random.default_rng(99)
    shift = pl.Series(np.exp(rng.normal(0.5, 0.05, len(frame))))
    prices = ("open", "high", "low", "close", "adj_close")
    changed = frame.with_columns(
        *(pl.when(later).then(pl.col(p) * shift).otherwise(pl.col(p)).alias(p) for p in prices),
        pl.when(later)
        .then(pl.col("volume") * 7.0 + 1.0)
        .otherwise(pl.col("volume"))
        .alias("volume"),
    )
    before = frame.filter(~later)
    assert changed.filter(~later).equals(before)
    for name in (*prices, "volume"):
        differs = changed.filter(later)[name] != frame.filter(later)[name]
        assert differs.all(), f"every {name} of the test window must differ"
    changed.write_parquet(target)
    return target


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> tuple[Path, Path]:
    """Two trained runs whose data differ in every value of the test window, and nowhere else."""
    place = tmp_path_factory.mktemp("sealed")
    other = with_another_test_window(bars_file, place / "other.parquet")
    return trained_run(place / "one", bars_file), trained_run(place / "two", other)


def test_scaler_and_features_before_the_test_window_are_the_same(runs: tuple[Path, Path]) -> None:
    one, two = (Prepared.open(run) for run in runs)
    texts = [(run / "prepared" / "scaler.json").read_text() for run in runs]
    assert texts[0] == texts[1]
    stop = one.splits["valid"].rows.stop
    assert np.array_equal(one.x[:stop], two.x[:stop])
    assert not np.array_equal(one.x[stop:], two.x[stop:]), "the test windows must differ"


def test_training_and_selection_are_the_same_to_the_bit(runs: tuple[Path, Path]) -> None:
    logs = [read_metrics(seed_directory(run, 1)) for run in runs]
    shown = [log.drop([name for name in log.columns if is_timing(name)]) for log in logs]
    assert shown[0].equals(shown[1], null_equal=True)
    results = [json.loads((seed_directory(run, 1) / "result.json").read_text()) for run in runs]
    assert results[0]["best_step"] == results[1]["best_step"] > 0
    assert results[0]["best_score"] == results[1]["best_score"]
    for find in (best_checkpoint, latest_checkpoint):
        paths = [find(seed_directory(run, 1) / "checkpoints") for run in runs]
        one, two = (load_checkpoint(path).tensors for path in paths if path is not None)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_result_on_the_test_window_does_change(runs: tuple[Path, Path]) -> None:
    values = [
        evaluate(TrainedRun.open(run), "test", trust=False).baselines["equal_weight"][
            "total_return"
        ]
        for run in runs
    ]
    assert values[0] != values[1], "else the change above would prove nothing"


def test_worlds_of_training_end_where_validation_does(runs: tuple[Path, Path]) -> None:
    prepared, config = Prepared.open(runs[0]), load_config(runs[0] / "config.yaml")
    for world in Worlds.from_prepared(prepared, config)[:2]:
        assert len(world.times) == len(world.x) == prepared.splits["valid"].rows.stop
        assert len(world.rows.close) == len(world.times)
        assert world.times[-1] < np.datetime64(TEST_STARTS)
        assert "test" not in world.splits
        with pytest.raises(DataError, match="sealed"):
            world.span("test")


def test_every_look_at_the_test_window_is_counted_beside_the_runs(
    tmp_path: Path, bars_file: Path
) -> None:
    run = trained_run(tmp_path, bars_file)
    opened = TrainedRun.open(run)
    registry = TrialRegistry.for_run(run)
    data = opened.prepared.manifest["dataset"]
    window = Window(data["name"], data["content_hash"], "2016-07-01", "2016-12-30")
    evaluate(opened, "valid")
    assert registry.reads(window) == []
    evaluate(opened, "test")
    make_trading_env(run, split="test").reset(seed=0)
    make_trading_env(run, split="valid").reset(seed=0)
    evaluate(opened, "test")
    looks = registry.reads(window)
    assert [look.sharpe is None for look in looks] == [False, True, False]
    trust = load_trust(run, "test")
    assert trust is not None
    assert trust["registry"] == {"trials": 0, "reads": 3, "runs": 1}
    assert trust["deflation"]["n_trials"] == 3


def test_look_counts_even_if_the_evaluation_fails(
    tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained_run(tmp_path, bars_file)

    def fail(*_given: object) -> None:
        raise RuntimeError("the power went out")

    monkeypatch.setattr("echelon.evaluation.evaluate.run_baselines", fail)
    with pytest.raises(RuntimeError, match="power"):
        evaluate(TrainedRun.open(run), "test")
    (look,) = json.loads((TrialRegistry.for_run(run).path / "reads.json").read_text())["lines"]
    assert look["sharpe"] is None
