"""What a result is worth: trust.json says what the backtests and the registry say, no more."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import prepared_run

from echelon.config import load_config
from echelon.errors import StoreError
from echelon.evaluation.evaluate import evaluate, load_evaluation
from echelon.evaluation.statistics import (
    BothBlocks,
    SharpeDifference,
    active_ratio,
    seed_interval,
    sharpe_difference,
)
from echelon.evaluation.test_access import Look
from echelon.evaluation.trust import load_trust, verdict
from echelon.features import Prepared
from echelon.runs.registry import new_entry
from echelon.training.run import TrainedRun, Training, Worlds, seed_directory

SMALL = (
    *("model.d_model=8", "model.n_layers=1", "model.hidden=8", "reward.scale=100"),
    *("train.rollout_steps=10", "train.books=4", "train.offset_groups=2", "train.lr_actor=0.01"),
    *("train.lr_critic=0.01", "train.total_env_steps=160", "train.validate_every_steps=40"),
    *("logging.tensorboard=false", "eval.baselines=[equal_weight, momentum, cash]", "seed=1"),
)
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> TrainedRun:
    """Three trained seeds, evaluated on valid once, then on test once."""
    path = prepared_run(tmp_path_factory.mktemp("trust") / "runs" / "a", bars_file, *SMALL)
    config = load_config(path / "config.yaml")
    worlds = Worlds.from_prepared(Prepared.open(path), config)
    for seed in SEEDS:
        Training(config, worlds, seed_directory(path, seed), seed).run()
    opened = TrainedRun.open(path)
    evaluate(opened, "valid")
    evaluate(opened, "test")
    return opened


def trust(run: TrainedRun, split: str) -> dict[str, Any]:
    found = load_trust(run.path, split)
    assert found is not None
    return found


def test_intervals_over_seeds_are_those_of_the_saved_measures(run: TrainedRun) -> None:
    found = trust(run, "test")["seeds"]
    assert found["n"] == 3
    saved = load_evaluation(run.path, "test")
    for name in ("total_return", "max_drawdown"):
        interval = seed_interval([saved.seeds[seed][name] for seed in SEEDS])
        assert found["measures"][name]["estimate"] == pytest.approx(interval.estimate)
        assert found["measures"][name]["low"] == pytest.approx(interval.low)
        assert found["measures"][name]["method"] == "t"


def test_difference_is_that_of_the_saved_returns(run: TrainedRun) -> None:
    saved = load_evaluation(run.path, "test")
    agents = np.column_stack([saved.tables(seed).equity["return"][1:] for seed in SEEDS])
    baseline = saved.tables("equal_weight").equity["return"][1:].to_numpy()
    found = trust(run, "test")["differences"]
    assert set(found) == {"equal_weight", "momentum", "cash"}
    single, double = found["equal_weight"]["single"], found["equal_weight"]["double"]
    wanted = sharpe_difference(agents, baseline, seed=1, block=single["block_length"])
    assert single["estimate"] == pytest.approx(wanted.estimate)
    assert (single["low"], single["high"]) == pytest.approx((wanted.low, wanted.high))
    assert double["block_length"] == pytest.approx(2.0 * single["block_length"])


def test_information_ratios_are_of_the_saved_returns_above_equal_weight(run: TrainedRun) -> None:
    saved = load_evaluation(run.path, "test")
    baseline = saved.tables("equal_weight").equity["return"][1:].to_numpy()
    agents = np.column_stack([saved.tables(seed).equity["return"][1:] for seed in SEEDS])
    found = trust(run, "test")["active"]
    assert set(found) == {"agent", "seed-1", "seed-2", "seed-3", "momentum", "cash"}
    active = agents - baseline[:, None]
    by_seed = active.mean(axis=0) / active.std(axis=0, ddof=1)
    assert found["agent"]["single"]["estimate"] == pytest.approx(by_seed.mean())
    wanted = active_ratio(agents[:, [1]], baseline, seed=1)
    assert found["seed-2"]["double"]["low"] == pytest.approx(wanted.double.low)
    assert found["cash"]["single"]["estimate"] == pytest.approx(
        -baseline.mean() / baseline.std(ddof=1)
    )
    year = math.sqrt(saved.facts["periods_per_year"])
    for seed, ratio in zip(SEEDS, by_seed, strict=True):
        assert saved.seeds[seed]["information_ratio"] == pytest.approx(year * ratio)
    assert saved.baselines["equal_weight"]["information_ratio"] == 0.0


def test_ensemble_is_compared_with_every_baseline(run: TrainedRun) -> None:
    evaluate(run, "train", ensemble=True)
    saved = load_evaluation(run.path, "train")
    found = trust(run, "train")
    assert set(found["ensemble"]) == set(found["differences"])
    joined = saved.tables("ensemble").equity["return"][1:].to_numpy()[:, None]
    momentum = saved.tables("momentum").equity["return"][1:].to_numpy()
    wanted = sharpe_difference(joined, momentum, seed=1)
    single = found["ensemble"]["momentum"]["single"]
    assert (single["estimate"], single["low"]) == pytest.approx((wanted.estimate, wanted.low))
    assert "ensemble" in found["active"]
    # Evaluated without it, nothing of it stays.
    evaluate(run, "train")
    assert "ensemble" not in trust(run, "train") | trust(run, "train")["active"]


def test_twice_the_costs_are_never_better_and_the_usual_ones_are_the_evaluation(
    run: TrainedRun,
) -> None:
    none, once, twice = trust(run, "test")["costs"]
    assert [none["factor"], once["factor"], twice["factor"]] == [0.0, 1.0, 2.0]
    saved = load_evaluation(run.path, "test")
    mean = saved.over_seeds("total_return").mean
    assert once["total_return"]["estimate"] == pytest.approx(mean)
    assert once["equal_weight_total_return"] == saved.baselines["equal_weight"]["total_return"]
    returns = [line["equal_weight_total_return"] for line in (none, once, twice)]
    assert returns[0] > returns[1] > returns[2]


def test_first_trial_is_not_deflated_and_later_ones_raise_the_hurdle(run: TrainedRun) -> None:
    first = trust(run, "valid")["deflation"]
    assert first["n_trials"] == 1
    assert first["hurdle"] == 0.0
    look = Look.at(run, "valid")
    (mine,) = look.registry.trials(look.window)
    series = look.registry.returns(mine)
    rng = np.random.default_rng(0)
    for k in range(20):
        noise = rng.normal(0.0, 0.01, series.height)
        entry = new_entry(look.window, Path(f"runs/try-{k}"), f"try-{k}", 1)
        ratio = float(noise.mean() / noise.std(ddof=1))
        look.registry.add_trial(entry, series["time"].to_numpy(), noise, ratio)
    evaluate(run, "valid")
    later = trust(run, "valid")
    assert later["deflation"]["n_trials"] == 21
    assert 1.0 < later["deflation"]["n_effective"] <= 21.0
    assert later["deflation"]["hurdle"] > 0.0
    assert later["deflation"]["probability"] < later["deflation"]["psr"] == first["psr"]
    assert later["overfitting"]["n_configurations"] == 21
    assert 0.0 <= later["overfitting"]["null_low"] < later["overfitting"]["null_high"] <= 1.0
    assert later["superiority"]["n_models"] == 21
    assert later["registry"]["trials"] == 21


def test_with_few_trials_nothing_is_said_of_overfitting(run: TrainedRun) -> None:
    assert trust(run, "test")["overfitting"] is None


def test_claim_on_test_uses_the_deflation_of_validation(run: TrainedRun) -> None:
    evaluate(run, "test")
    claim = trust(run, "test")["claim"]
    assert claim["deflated"] == trust(run, "valid")["deflation"]["probability"]
    assert claim["made"] is False
    # The second look: what the test window shows counts too, deflated by both looks.
    twice = trust(run, "test")["deflation"]
    assert twice["n_trials"] == 2
    active = trust(run, "test")["active_deflation"]
    assert active["n_trials"] == 2
    assert claim["after_looks"] == min(
        claim["deflated"], twice["probability"], active["probability"]
    )
    assert trust(run, "test")["verdict"]["key"] != "better"


def test_what_was_tried_after_the_validation_counts_in_the_claim(run: TrainedRun) -> None:
    before = trust(run, "valid")["deflation"]
    look = Look.at(run, "valid")
    mine = next(t for t in look.registry.trials(look.window) if t.key == look.entry().key)
    series = look.registry.returns(mine)
    # The mirror of our own returns: many more trials, and far from one another.
    for k in range(10):
        entry = new_entry(look.window, Path(f"runs/later-{k}"), f"later-{k}", 1)
        returns = -series["return"].to_numpy()
        look.registry.add_trial(entry, series["time"].to_numpy(), returns, -0.5)
    evaluate(run, "test")
    claim = trust(run, "test")["claim"]
    assert trust(run, "valid")["deflation"] == before, "the validation was not evaluated again"
    assert claim["trials"] == before["n_trials"] + 10
    assert claim["deflated"] < before["probability"]


def test_nothing_is_known_of_the_choice_if_the_validation_was_of_other_seeds(
    run: TrainedRun,
) -> None:
    fewer = TrainedRun(run.path, run.config, SEEDS[:2])
    evaluate(fewer, "test")
    assert trust(run, "test")["claim"]["deflated"] is None
    assert trust(run, "test")["claim"]["made"] is False


def test_longer_rivals_and_second_looks_are_not_taken_for_configurations(run: TrainedRun) -> None:
    evaluate(run, "test")
    evaluate(run, "test")
    assert trust(run, "test")["registry"]["reads"] > 2
    assert trust(run, "test")["superiority"] is None, "one configuration, looked at again"
    look = Look.at(run, "valid")
    (mine, *_) = [t for t in look.registry.trials(look.window) if t.key == look.entry().key]
    series = look.registry.returns(mine)
    other = series["return"].to_numpy()[::-1].copy()
    entry = new_entry(look.window, Path("runs/reversed"), "reversed", 1)
    look.registry.add_trial(entry, series["time"].to_numpy(), other, 0.01)
    longer = look.window._replace(last="2999-12-31")
    times = np.arange(5_000).astype("datetime64[D]").astype("datetime64[us]")
    wide = new_entry(longer, Path("runs/longer"), "longer", 1)
    look.registry.add_trial(wide, times, np.sin(times.astype(np.float64)) / 100, 0.0)
    evaluate(run, "valid")
    assert trust(run, "valid")["superiority"]["n_models"] >= 2


def test_choosing_on_the_days_of_the_test_window_counts_as_a_look(run: TrainedRun) -> None:
    evaluate(run, "test")
    before = trust(run, "test")["deflation"]["n_trials"]
    look = Look.back(run, "test")
    times = np.array([look.window.first], dtype="datetime64[us]")
    for name in ("peeker", "peeker", "another"):
        entry = new_entry(look.window, Path(f"runs/{name}"), name, 1)
        look.registry.add_trial(entry, times, np.zeros(1), 0.0)
    evaluate(run, "test")
    found = trust(run, "test")
    assert found["deflation"]["n_trials"] == before + 1 + 2
    assert found["active_deflation"]["n_trials"] == before + 3
    assert found["registry"]["trials"] >= 2


def test_training_for_longer_is_another_trial_and_more_seeds_are_not(run: TrainedRun) -> None:
    def key(**train: int) -> str:
        changed = run.config.model_copy(update={"train": run.config.train.model_copy(update=train)})
        return Look.at(TrainedRun(run.path, changed, SEEDS), "valid").entry().key

    assert run.config.train.lr_schedule == "constant"
    assert len({key(), key(total_env_steps=320), key(patience=3)}) == 3
    assert key(seeds=7) == key()


def difference(low: float, high: float, *, low2: float | None = None) -> BothBlocks:
    def one(bottom: float) -> SharpeDifference:
        return SharpeDifference((bottom + high) / 2, bottom, high, 0.01, 0.5, 3.0, 2000, 0.95)

    return BothBlocks(one(low), one(low if low2 is None else low2))


AHEAD, OPEN = difference(0.01, 0.1), difference(-0.2, 0.1)


@pytest.mark.parametrize(
    ("split", "sharpe", "active", "deflated", "key"),
    [
        ("test", AHEAD, AHEAD, 0.96, "better"),
        ("test", AHEAD, AHEAD, 0.95, "undeflated"),
        ("test", AHEAD, AHEAD, None, "undeflated"),
        ("test", AHEAD, OPEN, 0.99, "calmer"),
        ("test", AHEAD, difference(0.01, 0.1, low2=-0.01), 0.99, "calmer"),
        ("test", AHEAD, difference(math.nan, math.nan), 0.99, "calmer"),
        ("test", AHEAD, None, 0.99, "unknown"),
        ("test", OPEN, AHEAD, 0.99, "same"),
        ("test", difference(0.01, 0.1, low2=-0.01), AHEAD, 0.99, "same"),
        ("valid", AHEAD, AHEAD, 0.99, "undeflated"),
        ("test", difference(-0.2, -0.1), OPEN, 0.99, "worse"),
        ("test", OPEN, OPEN, 0.99, "same"),
        ("test", difference(math.nan, math.nan), AHEAD, 0.99, "same"),
        ("test", None, None, 0.99, "unknown"),
    ],
)
def test_verdict_says_no_more_than_the_bounds(
    split: str,
    sharpe: BothBlocks | None,
    active: BothBlocks | None,
    deflated: float | None,
    key: str,
) -> None:
    assert verdict(split, sharpe, active, deflated) == key


def test_trust_is_strict_json_and_a_damaged_one_is_an_error(run: TrainedRun) -> None:
    path = run.path / "evaluations" / "test" / "trust.json"
    text = path.read_text()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(StoreError, match=r"trust\.json: missing or damaged.*echelon evaluate"):
        load_trust(run.path, "test")
    path.write_text(text)


def test_evaluation_without_trust_leaves_none_of_other_agents(run: TrainedRun) -> None:
    evaluate(run, "train", trust=True)
    assert load_trust(run.path, "train") is not None
    evaluate(run, "train", trust=False)
    assert load_trust(run.path, "train") is None
