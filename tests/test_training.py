"""Training: the same twice, resumed as if never stopped, the best kept, and faults survived."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from worlds import make_config, make_world

from echelon.config import Config
from echelon.errors import ConfigError, DataError, StoreError, TrainingError
from echelon.runs import tensor_files
from echelon.runs.checkpoint import best_checkpoint, list_checkpoints, load_checkpoint
from echelon.runs.metrics import is_timing, read_metrics
from echelon.training.loop import Outcome, Progress
from echelon.training.run import Training, Worlds, finished_outcome, resume_point, training_hash

SMALL = (
    *("window=4", "model.d_model=8", "model.n_layers=1", "model.hidden=8", "reward.scale=100"),
    *("train.rollout_steps=5", "train.books=4", "train.offset_groups=2", "train.episode_steps=10"),
    *("train.lr_actor=0.01", "train.lr_critic=0.01", "train.total_env_steps=120"),
    *("train.log_interval_steps=40", "train.validate_every_steps=40"),
    *("train.checkpoint_every_steps=40", "train.keep_checkpoints=2", "logging.tensorboard=false"),
)
"""An update is 20 steps: six updates, three of everything else."""
SPLITS = {"train": range(40), "valid": range(40, 60), "test": range(60, 70)}
SEED = 11


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_config(*overrides: str) -> Config:
    return make_config(*SMALL, *overrides)


def make_worlds(**changes: Any) -> Worlds:
    world = make_world(**({"n_rows": 70, "seed": 3, "splits": SPLITS} | changes))
    return Worlds(world, world, "data")


def training(
    directory: Path, *overrides: str, seed: int = SEED, resume: Path | None = None
) -> Training:
    return Training(small_config(*overrides), make_worlds(), directory, seed, resume=resume)


def trained(directory: Path, *overrides: str, **options: Any) -> Training:
    agent = training(directory, *overrides, **options)
    agent.run()
    return agent


def test_validation_window_too_short_to_choose_by_is_refused(tmp_path: Path) -> None:
    short = make_worlds(splits=SPLITS | {"valid": range(40, 42)})
    with pytest.raises(DataError, match=r"split\.valid has 2 bars .* needs 3"):
        Training(small_config(), short, tmp_path, SEED)


def stop_after(updates: int) -> Callable[[], bool]:
    """Says stop when it is asked for the so-manieth time: after that many updates."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= updates

    return stop


def steps_of(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(directory / "checkpoints")]


def log_of(directory: Path) -> pl.DataFrame:
    frame = read_metrics(directory)
    return frame.select(name for name in frame.columns if not is_timing(name))


def scores_of(directory: Path, measure: str = "sharpe_annual") -> pl.DataFrame:
    return read_metrics(directory).select("step", score=f"valid/{measure}").drop_nulls()


def assert_same_end(one: Training, two: Training, *, kept: bool = True) -> None:
    """Weights, optimizer, books, random streams, log, checkpoints and result are equal."""
    (tensors, state), (others, other) = one.learner.state(), two.learner.state()
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert _bits(tensor) == _bits(others[name]), name
    assert state == other
    assert log_of(one.directory).equals(log_of(two.directory))
    best = [load_checkpoint(t.checkpoints / "best") for t in (one, two)]
    assert (best[0].step, best[0].state) == (best[1].step, best[1].state)
    for name, tensor in best[0].tensors.items():
        assert torch.equal(tensor, best[1].tensors[name]), name
    steps = [steps_of(training.directory)[None if kept else -1 :] for training in (one, two)]
    assert steps[0] == steps[1]
    results = [json.loads((t.directory / "result.json").read_text()) for t in (one, two)]
    assert all(result.pop("seconds") >= 0 for result in results)
    assert results[0] == results[1]


def _bits(tensor: torch.Tensor) -> bytes:
    """Bytes, in which NaN equals itself."""
    return tensor.detach().numpy().tobytes()


def test_the_same_seed_twice_gives_the_same_training(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "one"), trained(tmp_path / "two")
    assert_same_end(one, two)
    other = trained(tmp_path / "other", seed=SEED + 1)
    assert not torch.equal(one.learner.net.actor.outer.weight, other.learner.net.actor.outer.weight)


STATEFUL = [
    (),
    ("model.dropout=0.3", "train.lr_schedule=linear"),
    ("reward.kind=differential_sharpe", "reward.drawdown_penalty=1"),
    # Enough books that 500 returns are known half-way: from there on the tail costs.
    (
        *("reward.cvar_penalty=0.5", "train.books=60", "train.total_env_steps=1800"),
        *("train.log_interval_steps=500", "train.validate_every_steps=600"),
        "train.checkpoint_every_steps=600",
    ),
]


@pytest.mark.parametrize("overrides", STATEFUL)
def test_stopped_and_resumed_equals_straight(overrides: tuple[str, ...], tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", *overrides)
    half = training(tmp_path / "half", *overrides)
    stopped = half.run(should_stop=stop_after(3))
    assert stopped.ending == "stopped"
    assert stopped.step == straight.learner.steps // 2
    point = resume_point(tmp_path / "half")
    assert point is not None
    resumed = trained(tmp_path / "half", *overrides, resume=point)
    assert_same_end(straight, resumed)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Six updates without a stop; do not train it further."""
    return trained(tmp_path_factory.mktemp("straight"))


@pytest.mark.parametrize("updates", range(1, 6))
def test_stop_at_each_update_and_resume_equals_straight(
    updates: int, straight: Training, tmp_path: Path
) -> None:
    assert training(tmp_path).run(should_stop=stop_after(updates)).step == 20 * updates
    assert steps_of(tmp_path)[-1] == 20 * updates
    resumed = trained(tmp_path, resume=resume_point(tmp_path))
    assert resumed.resumed_at == 20 * updates
    assert_same_end(straight, resumed)


def test_stop_at_every_update_and_resume_equals_straight(
    straight: Training, tmp_path: Path
) -> None:
    training(tmp_path).run(should_stop=stop_after(1))
    for _ in range(5):
        resumed = training(tmp_path, resume=resume_point(tmp_path))
        outcome = resumed.run(should_stop=stop_after(1))
    assert outcome.ending == "done"
    assert_same_end(straight, resumed)


@pytest.mark.parametrize("updates", range(1, 6))
def test_killed_at_an_update_and_resumed_equals_straight(
    updates: int, straight: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash writes no checkpoint of its own: the periodic one before it is gone back to."""
    victim = training(tmp_path)
    learn = victim.learner.train_once

    def crash() -> dict[str, float]:
        if victim.learner.steps == 20 * updates:
            raise KeyboardInterrupt
        return learn()

    monkeypatch.setattr(victim.learner, "train_once", crash)
    with pytest.raises(KeyboardInterrupt):
        victim.run()
    assert not (tmp_path / "result.json").exists()
    resumed = trained(tmp_path, resume=resume_point(tmp_path))
    assert resumed.resumed_at == 20 * updates // 40 * 40
    assert_same_end(straight, resumed)


@pytest.mark.parametrize("step", [0, 40, 80])
def test_resume_from_an_older_checkpoint_equals_straight(
    step: int, straight: Training, tmp_path: Path
) -> None:
    trained(tmp_path, "train.keep_checkpoints=9")
    assert steps_of(tmp_path) == [0, 40, 80, 120]
    older = tmp_path / "checkpoints" / f"step-{step:09d}"
    resumed = trained(tmp_path, "train.keep_checkpoints=9", resume=older)
    assert resumed.resumed_at == step
    assert_same_end(straight, resumed, kept=False)


def test_resume_with_more_steps_goes_on_where_it_ended(tmp_path: Path) -> None:
    trained(tmp_path)
    resumed = trained(tmp_path, "train.total_env_steps=200", resume=resume_point(tmp_path))
    whole = trained(tmp_path / "whole", "train.total_env_steps=200")
    assert resumed.resumed_at == 120
    for one, two in zip(
        resumed.learner.net.parameters(), whole.learner.net.parameters(), strict=True
    ):
        assert torch.equal(one, two)


def test_resuming_a_finished_training_changes_nothing(straight: Training, tmp_path: Path) -> None:
    trained(tmp_path)
    again = training(tmp_path, resume=resume_point(tmp_path))
    outcome = again.run()
    assert (outcome.ending, outcome.step) == ("done", 120)
    assert_same_end(straight, again)


def test_two_trainings_of_one_seed_differ_in_nothing_that_is_not_marked_as_timing(
    straight: Training, tmp_path: Path
) -> None:
    again = trained(tmp_path)
    assert_same_end(straight, again)
    columns = read_metrics(straight.directory).columns
    assert {name for name in columns if is_timing(name)} == {"seconds", "time/steps_per_second"}


def test_log_has_losses_at_their_interval_and_validations_at_theirs(straight: Training) -> None:
    log = read_metrics(straight.directory)
    losses = log.filter(pl.col("losses/total").is_not_null())
    assert losses["step"].to_list() == [40, 80, 120]
    assert scores_of(straight.directory)["step"].to_list() == [40, 80, 120]
    wanted = {f"losses/{n}" for n in ("total", "policy", "value", "entropy", "gradient_norm")}
    wanted |= {f"charts/{n}" for n in ("reward", "explained_variance", "learning_rate")}
    wanted.add("time/steps_per_second")
    assert wanted <= set(log.columns)
    assert losses.select(sorted(wanted)).null_count().sum_horizontal().item() == 0


def test_logged_losses_are_means_over_the_updates_of_the_interval(tmp_path: Path) -> None:
    agent = training(tmp_path)
    learn, seen = agent.learner.train_once, []
    agent.learner.train_once = lambda: seen.append(learn()) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    agent.run()
    assert len(seen) == 6
    log = read_metrics(tmp_path).filter(pl.col("losses/value").is_not_null())
    for name in ("losses/value", "charts/reward", "losses/gradient_norm"):
        wanted = [(a[name] + b[name]) / 2 for a, b in zip(seen[::2], seen[1::2], strict=True)]
        assert log[name].to_list() == pytest.approx(wanted, rel=1e-12), name


def test_rounds_without_a_loss_do_not_count_in_its_mean(tmp_path: Path) -> None:
    """Before learning starts there is no loss, which is not a loss of 0."""
    agent = training(tmp_path)
    learn, seen = agent.learner.train_once, []

    def learn_late() -> dict[str, float]:
        seen.append(dict(learn()))
        told = dict(seen[-1])
        if len(seen) <= 3:  # the first interval, and half of the second
            del told["losses/value"]
        return told

    agent.learner.train_once = learn_late  # type: ignore[method-assign]
    agent.run()
    log = read_metrics(tmp_path).filter(pl.col("charts/reward").is_not_null())
    late = [round_["losses/value"] for round_ in seen]
    mean = (late[4] + late[5]) / 2
    assert log["losses/value"].to_list() == [None, late[3], pytest.approx(mean, rel=1e-12)]


def test_progress_tells_steps_rewards_before_scaling_and_scores(tmp_path: Path) -> None:
    told: list[Progress] = []
    training(tmp_path).run(on_progress=told.append)
    assert [p.step for p in told] == [40, 80, 120]
    log = read_metrics(tmp_path).filter(pl.col("charts/reward").is_not_null())
    assert [p.reward for p in told] == pytest.approx((log["charts/reward"] / 100.0).to_list())
    scores = scores_of(tmp_path)
    known = [scores.filter(pl.col("step") <= p.step)["score"].to_list() for p in told]
    assert [p.score for p in told[1:]] == [so_far[-1] for so_far in known[1:]]
    assert told[2].best == max(known[2])
    assert {(p.seed, p.total) for p in told} == {(SEED, 120)}
    assert told[0].seconds_left == pytest.approx(80 / told[0].steps_per_second)
    assert told[-1].seconds_left == 0


@pytest.mark.parametrize("measure", ["sharpe_annual", "total_return"])
def test_best_checkpoint_is_the_first_of_the_highest_scores(measure: str, tmp_path: Path) -> None:
    agent = training(tmp_path, f"train.select_by={measure}", "train.validate_every_steps=20")
    kept: dict[int, torch.Tensor] = {}
    validate = agent.validate

    def watched() -> dict[str, float]:
        kept[agent.learner.steps] = agent.learner.net.actor.outer.weight.detach().clone()
        return validate()

    agent.validate = watched  # type: ignore[method-assign]
    outcome = agent.run()
    scores = scores_of(tmp_path, measure)
    assert scores["step"].to_list() == [20, 40, 60, 80, 100, 120]
    assert scores["score"].n_unique() > 1
    top = scores.row(int(scores["score"].arg_max() or 0), named=True)
    best = load_checkpoint(tmp_path / "checkpoints" / "best")
    assert best.step == outcome.best_step == top["step"]
    assert best.state["score"] == outcome.best_score == top["score"]
    assert torch.equal(best.tensors["net.actor.outer.weight"], kept[best.step])


def with_scores(agent: Training, *scores: float) -> Training:
    """Validations that give these scores, one after the other."""
    told = iter(scores)
    agent.validate = lambda: {"sharpe_annual": next(told)}  # type: ignore[method-assign]
    return agent


EVERY = "train.validate_every_steps=20"


def test_training_stops_after_so_many_validations_without_a_better_one(tmp_path: Path) -> None:
    agent = with_scores(training(tmp_path, EVERY, "train.patience=2"), 1.0, 2.0, 1.5, 2.0)
    outcome = agent.run()
    assert (outcome.ending, outcome.step) == ("patience", 80)
    assert (outcome.best_step, outcome.best_score) == (40, 2.0)
    assert steps_of(tmp_path)[-1] == 80
    done = finished_outcome(agent.config, tmp_path)
    assert done is not None
    assert done.ending == "patience"


def test_more_patience_goes_on_where_less_had_ended(tmp_path: Path) -> None:
    agent = with_scores(training(tmp_path, EVERY, "train.patience=2"), 1.0, 0.5, 0.5)
    assert agent.run().ending == "patience"
    for patience, ended in (("1", True), ("2", True), ("3", False), ("null", False)):
        config = small_config(EVERY, f"train.patience={patience}")
        assert (finished_outcome(config, tmp_path) is not None) == ended


def test_a_better_score_renews_the_patience(tmp_path: Path) -> None:
    agent = with_scores(training(tmp_path, EVERY, "train.patience=2"), 1, 0, 2, 0, 3, 0)
    assert agent.run().ending == "done"
    assert agent.course.best_step == 100


def test_patience_is_remembered_by_a_checkpoint(tmp_path: Path) -> None:
    settings = (EVERY, "train.patience=3")
    with_scores(training(tmp_path, *settings), 5, 1, 1).run(should_stop=stop_after(3))
    resumed = with_scores(training(tmp_path, *settings, resume=resume_point(tmp_path)), 1, 1)
    outcome = resumed.run()
    assert (outcome.ending, outcome.step, outcome.best_step) == ("patience", 80, 20)


def test_a_score_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    agent = with_scores(training(tmp_path, EVERY), math.nan, -3.0, math.nan, -2.0, math.nan, -4.0)
    outcome = agent.run()
    assert (outcome.best_step, outcome.best_score) == (80, -2.0)
    nothing = tmp_path / "nothing"
    agent = with_scores(training(nothing, EVERY), *[math.nan] * 6)
    assert agent.run().best_step == -1
    assert best_checkpoint(nothing / "checkpoints") is None


def test_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    every = ("train.checkpoint_every_steps=20", "train.keep_checkpoints=3")
    agent = with_scores(training(tmp_path, *every), 9.0, 1.0, 2.0)
    agent.run()
    assert steps_of(tmp_path) == [80, 100, 120]
    assert load_checkpoint(tmp_path / "checkpoints" / "best").step == 40


def test_last_checkpoint_is_the_end_wherever_the_interval_falls(tmp_path: Path) -> None:
    trained(tmp_path, "train.checkpoint_every_steps=1000")
    assert steps_of(tmp_path) == [0, 120]
    state = load_checkpoint(tmp_path / "checkpoints" / "step-000000120").state
    assert state["learner"]["steps"] == 120


def test_result_says_how_it_ended(straight: Training) -> None:
    found = Outcome(**json.loads((straight.directory / "result.json").read_text()))
    assert (found.seed, found.ending, found.step) == (SEED, "done", 120)
    assert found.seconds > 0
    assert finished_outcome(straight.config, straight.directory) == found
    longer = small_config("train.total_env_steps=200")
    assert finished_outcome(longer, straight.directory) is None


def test_result_of_an_earlier_training_does_not_outlive_a_later_one(tmp_path: Path) -> None:
    """Resumed from an older checkpoint and killed: the training is not finished any more."""
    trained(tmp_path, "train.keep_checkpoints=9")
    older = tmp_path / "checkpoints" / "step-000000040"
    victim = training(tmp_path, "train.keep_checkpoints=9", resume=older)

    def crash() -> dict[str, float]:
        raise KeyboardInterrupt

    victim.learner.train_once = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        victim.run()
    assert finished_outcome(victim.config, tmp_path) is None


def test_diverging_loss_stops_and_leaves_a_good_checkpoint(
    straight: Training, tmp_path: Path
) -> None:
    agent = training(tmp_path)
    learn = agent.learner.train_once

    def poisoned() -> dict[str, float]:
        if agent.learner.steps == 60:
            with torch.no_grad():
                agent.learner.net.critic.outer.bias.fill_(math.nan)
        return learn()

    agent.learner.train_once = poisoned  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"diverged at step 80: .*losses/value = nan"):
        agent.run()
    assert steps_of(tmp_path) == [0, 40]
    point = resume_point(tmp_path)
    assert point is not None
    tensors = load_checkpoint(point).tensors
    assert all(torch.isfinite(t).all() for n, t in tensors.items() if n.startswith("net."))
    assert read_metrics(tmp_path)["step"].max() == 40
    assert (tmp_path / "metrics.parquet").exists()
    assert_same_end(straight, trained(tmp_path, resume=point))


def test_full_disk_at_a_checkpoint_surfaces_and_leaves_the_earlier_one(
    straight: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tensor_files.write_atomic

    def full(path: Path, data: bytes | str) -> None:
        if ".step-000000080" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "write_atomic", full)
        with pytest.raises(StoreError, match=r"step-000000080.*No space left.*resume"):
            trained(tmp_path)
    assert steps_of(tmp_path) == [0, 40]
    assert not list((tmp_path / "checkpoints").glob(".step*"))
    assert_same_end(straight, trained(tmp_path, resume=resume_point(tmp_path)))


def test_damaged_checkpoint_is_an_error_that_names_another(tmp_path: Path) -> None:
    trained(tmp_path)
    file = tmp_path / "checkpoints" / "step-000000120" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(StoreError, match=r"damaged.*--resume .*step-000000080"):
        resume_point(tmp_path)
    with pytest.raises(StoreError, match="damaged"):
        training(tmp_path, resume=file.parent)


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        (("model.hidden=12",), {}, "another configuration"),
        (("train.lr_actor=0.02",), {}, "another configuration"),
        (("reward.scale=10",), {}, "another configuration"),
        ((), {"seed": SEED + 1}, r"another seed \(11, here 12\)"),
        ((), {"data": "other"}, r"another data \(data, here other\)"),
    ],
)
def test_checkpoint_of_something_else_is_refused(
    overrides: tuple[str, ...],
    changes: dict[str, Any],
    message: str,
    straight: Training,
) -> None:
    point = resume_point(straight.directory)
    worlds = make_worlds()._replace(data=changes.get("data", "data"))
    with pytest.raises(StoreError, match=message):
        Training(
            small_config(*overrides),
            worlds,
            straight.directory,
            changes.get("seed", SEED),
            resume=point,
        )


def test_hash_of_a_training_leaves_out_how_long_and_where_it_is_logged() -> None:
    mine = training_hash(small_config())
    free = (
        *("train.total_env_steps=7", "train.patience=3", "train.keep_checkpoints=1", "seed=9"),
        *("train.checkpoint_every_steps=3", "train.seeds=4", "logging.output_dir=elsewhere"),
        *("eval.baselines=[cash]", "eval.rebalance_bars=5", "eval.momentum_bars=9"),
    )
    assert training_hash(small_config(*free)) == mine
    for bound in (
        "train.gamma=0.9",
        "buy_pct=0.1",
        "window=5",
        "market.fill=close",
        "eval.use_fee=false",
    ):
        assert training_hash(small_config(bound)) != mine, bound
    # With a schedule the rates depend on how long it goes on.
    linear = "train.lr_schedule=linear"
    longer = small_config(linear, "train.total_env_steps=7")
    assert training_hash(longer) != training_hash(small_config(linear))


def test_splits_without_enough_bars_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = small_config("train.episode_steps=null")
    for split in ("train", "valid"):
        worlds = make_worlds(splits=SPLITS | {split: range(1, 4)})
        with pytest.raises(DataError, match=rf"split.{split} has 3 bars.*at least 2"):
            Training(config, worlds, tmp_path / "run", SEED)
    worlds = make_worlds(window=50)
    with pytest.raises(DataError, match=r"window=50 bars behind them.*shorten the window"):
        Training(make_config(*SMALL, "window=50"), worlds, tmp_path / "run", SEED)
    with pytest.raises(DataError, match=r"episode_steps=37 does not fit"):
        Training(small_config("train.episode_steps=37"), make_worlds(), tmp_path / "run", SEED)
    assert not (tmp_path / "run").exists()


def test_validation_is_a_backtest_of_the_most_probable_actions(straight: Training) -> None:
    last = scores_of(straight.directory, "total_return").row(-1, named=True)
    found = straight.validate()
    assert found["total_return"] == last["score"]
    # Some are NaN: there is neither a budget nor another book to compare with.
    assert found == pytest.approx(straight.validate(), rel=0.0, abs=0.0, nan_ok=True)
    assert not straight.learner.net.training


def test_service_that_cannot_be_opened_ends_training_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match="use_wandb"):
        trained(tmp_path, "logging.use_wandb=true")
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_tensorboard_gets_what_the_log_gets(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, "logging.tensorboard=true")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    log = read_metrics(tmp_path)
    for name in ("losses/value", "valid/total_return"):
        rows = log.select("step", name).drop_nulls()
        scalars = events.Scalars(name)
        assert [e.step for e in scalars] == rows["step"].to_list()
        assert [e.value for e in scalars] == pytest.approx(rows[name].to_list(), rel=1e-6)
