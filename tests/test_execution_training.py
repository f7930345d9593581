"""Execution policies from bars to a report: training, going on, evaluating, comparing."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from browsers import draw_page, drawn_charts
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.cli.execution import train_execution_run
from echelon.cli.options import RunOptions
from echelon.cli.train import make_room
from echelon.config import Config, load_config, to_yaml
from echelon.config.execution import ExecutionConfig
from echelon.data.datasets import ensure_dataset
from echelon.errors import ConfigError, DataError, StoreError, UsageError
from echelon.evaluation.execution import (
    ExecutionEvaluation,
    evaluate_trained,
    over_dates,
)
from echelon.execution.history import price_advantage
from echelon.execution.policies import SCHEDULES, Twap, run_orders
from echelon.execution.rewards import reward_from_config
from echelon.execution.simulator import ExecutionRules
from echelon.files import exclusive_lock
from echelon.report.charts.slides import Slide, draw_slide
from echelon.report.execution import day_chart, render, write_execution_report
from echelon.report.texts import Words
from echelon.training.execution import (
    is_trained,
    load_learned,
    refuse_other,
    train_execution,
    train_execution_seed,
)
from echelon.training.execution_data import ExecutionData, load_execution_data
from echelon.training.loop import Progress
from echelon.training.run import SeedJob

SMALL = (
    *("data.source=synthetic", "data.freq=5min", "data.synthetic.n_symbols=2"),
    *("data.synthetic.n_days=60", "data.synthetic.minutes_per_day=390"),
    *("data.synthetic.delistings=0", "data.synthetic.late_listings=0"),
    "data.synthetic.suspension_rate=0",
    "split.train=[2015-01-05, 2015-02-13]",
    "split.valid=[2015-02-16, 2015-03-06]",
    "split.test=[2015-03-09, 2015-03-31]",
    *("execution.ticks_per_step=15", "execution.hidden=8", "execution.orders.per_day=2"),
    *("execution.learner.memory=64", "execution.learner.minibatches=2"),
    *("execution.learner.total_steps=600", "execution.learner.validate_every=200"),
    *("execution.learner.orders=48", "execution.learner.epochs=2"),
)
"""Two symbols, sixty days of 78 bars; a network of eight units and a few updates."""
SHORT = ("execution.learner.total_steps=96",)
"""For runs that need not have learned anything."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("execution") / "store"


@pytest.fixture
def small(store: Path) -> Config:
    return configured(store)


def configured(store: Path, *more: str) -> Config:
    return load_config(None, [*SMALL, f"data.store={store}", *more])


@pytest.fixture(scope="module")
def data(store: Path) -> ExecutionData:
    return load_execution_data(configured(store))


def flags(store: Path, *more: str) -> list[str]:
    return [x for one in (*SMALL, f"data.store={store}", *more) for x in ("-o", one)]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["execution", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


# --- data


def test_splits_hold_their_own_days_and_orders(data: ExecutionData) -> None:
    for name, orders in data.orders.items():
        assert data.inside[name][orders.day].all()
    days = [set(data.days.dates[data.inside[name]].tolist()) for name in data.inside]
    assert not days[0] & days[1]
    assert not days[1] & days[2]


def test_features_of_validation_days_do_not_move_the_scaler(store: Path) -> None:
    shorter = configured(store, "split.test=[2015-03-09, 2015-03-20]")
    one, two = load_execution_data(configured(store)), load_execution_data(shorter)
    assert one.public.scaler is not None
    assert two.public.scaler is not None
    assert one.public.scaler.to_dict() == two.public.scaler.to_dict()


def test_daily_bars_and_empty_splits_are_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.freq = 1d"):
        load_execution_data(configured(store, "data.freq=1d"))
    with pytest.raises(DataError, match=r"split\.test .* has no day"):
        load_execution_data(configured(store, "split.test=[2019-01-01, 2019-02-01]"))


def test_orders_come_from_a_file_where_one_is_named(store: Path, tmp_path: Path) -> None:
    found = load_execution_data(configured(store))
    days = [found.days.name(int(np.flatnonzero(found.inside[s])[-1])) for s in found.inside]
    rows = [day.split(" on ") for day in days]
    path = tmp_path / "orders.csv"
    lines = [f"{symbol},{date},sell,1000" for symbol, date in rows]
    path.write_text("symbol,date,direction,amount\n" + "\n".join(lines) + "\n", encoding="utf-8")
    told = load_execution_data(configured(store, f"execution.orders.path={path}"))
    assert [len(orders) for orders in told.orders.values()] == [1, 1, 1]
    path.write_text("symbol,date,direction,amount\n" + "\n".join(lines[:2]), encoding="utf-8")
    two = configured(store, f"execution.orders.path={path}")
    assert [len(orders) for orders in load_execution_data(two).orders.values()] == [1, 1, 0]
    with pytest.raises(DataError, match=r"no orders in split\.test \(2015-03-09 to 2015-03-31\)"):
        load_execution_data(two, ("test",))
    path.write_text("symbol,date,direction,amount\n" + lines[0] + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no orders in split\.valid"):
        load_execution_data(two)


def test_times_of_an_order_file_are_of_the_datasets_zone(store: Path, tmp_path: Path) -> None:
    config = configured(store)
    zone = ensure_dataset(config).info.timezone
    opens = datetime(2015, 3, 10, 10, 0, tzinfo=ZoneInfo(zone)).astimezone(UTC)
    path = tmp_path / "orders.csv"
    row = f"S0001,2015-03-10,buy,10,{opens.isoformat()}"
    path.write_text(f"symbol,date,direction,amount,start\n{row}\n", encoding="utf-8")
    found = load_execution_data(config, ("test",), path)
    assert found.days.clock[found.orders["test"].start].tolist() == [600.0]


# --- training


@pytest.mark.parametrize("algo", ["PPO", "DQN", "OPD"])
def test_a_stopped_training_goes_on_bit_for_bit(
    algo: str, store: Path, data: ExecutionData, tmp_path: Path
) -> None:
    config = configured(store, f"execution.learner.algo={algo}")
    assert train_execution(config, data, tmp_path / "whole", 42).ending == "done"
    part, asked = tmp_path / "part", iter([False, True])
    stopped = train_execution(config, data, part, 42, should_stop=lambda: next(asked, True))
    assert stopped.ending == "stopped"
    assert train_execution(config, data, part, 42, resume=True).ending == "done"
    one, two = (load_learned(tmp_path / name, data).net.state_dict() for name in ("whole", "part"))
    assert all(np.array_equal(one[name].numpy(), two[name].numpy()) for name in one)


def test_progress_counts_the_teachers_steps_and_then_the_students(
    store: Path, data: ExecutionData, tmp_path: Path
) -> None:
    config = configured(store, "execution.learner.algo=OPD")
    reported: list[Progress] = []
    train_execution(config, data, tmp_path, 42, reported.append)
    steps = [now.step for now in reported]
    assert steps == sorted(steps)
    assert {now.total for now in reported} == {1200}
    assert min(steps) < 600 < max(steps)
    assert not load_learned(tmp_path, data).net.settings.oracle


def test_a_finished_seed_is_not_trained_again(store: Path, tmp_path: Path) -> None:
    config = configured(store)
    job = SeedJob(config, tmp_path, 42)
    done = train_execution_seed(job, lambda _: None, lambda: False)
    resumed = SeedJob(config, tmp_path, 42, resume=True)
    again = train_execution_seed(resumed, lambda _: None, lambda: True)
    assert again == replace(done, since_best=0)  # of use to a training that goes on only


def test_a_checkpoint_of_other_settings_is_refused(
    store: Path, data: ExecutionData, tmp_path: Path
) -> None:
    train_execution(configured(store), data, tmp_path, 42)
    (tmp_path / "result.json").unlink()
    other = configured(store, "execution.reward.penalty=50")
    with pytest.raises(StoreError, match="another configuration"):
        train_execution(other, data, tmp_path, 42, resume=True)


# --- the command


def test_train_evaluate_and_compare(store: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "ppo", tmp_path / "dqn"
    said = run("train", *flags(store), "--output-dir", str(first), "--seeds", "2", "--workers", "1")
    assert "echelon execution evaluate" in said
    assert said.count("rules: ") == 1
    run("train", *flags(store, "execution.learner.algo=DQN"), "--output-dir", str(second))
    said = run("evaluate", str(first), "--split", "test", "--lang", "zh")
    assert "almgren_chriss" in said
    place = first / "evaluations" / "test"
    page = (place / "report.zh.html").read_text(encoding="utf-8")
    assert "订单执行报告" in page
    assert not (place / "report.html").exists()
    for name in ("execution.zh.png", "day.zh.png"):
        assert (place / name).read_bytes().startswith(b"\x89PNG")
    summary = json.loads((place / "summary.json").read_text())
    assert set(summary["policies"]) == {"twap", "vwap", "almgren_chriss", "ppo"}
    assert set(summary["policies"]["ppo"]["seeds"]) == {"42", "43"}
    rows = pl.read_parquet(place / "orders.parquet")
    assert len(rows) == summary["facts"]["orders"]
    run("compare", str(first), str(second), "--output-dir", str(tmp_path / "both"))
    both = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert {"ppo", "dqn"} <= set(both["policies"])
    with pytest.raises(UsageError, match="holds a trained run"):
        run("train", *flags(store), "--output-dir", str(first))


def test_a_refused_start_is_in_nobodys_way(store: Path, tmp_path: Path) -> None:
    path, place = tmp_path / "orders.csv", tmp_path / "run"
    head = "symbol,date,direction,amount\n"
    path.write_text(head + "S0001,2015-01-20,hold,10\n", encoding="utf-8")
    config = configured(store, f"execution.orders.path={path}", *SHORT)
    with pytest.raises(DataError, match="no direction"):
        train_execution_run(config, place, RunOptions(workers=1))
    assert not place.exists()
    path.write_text(head + "S0001,2015-01-20,sell,10\nS0001,2015-02-20,buy,10\n", encoding="utf-8")
    done = train_execution_run(config, place, RunOptions(workers=1))
    assert [one.ending for one in done] == ["done"]


def test_room_is_made_where_nothing_was_trained(tmp_path: Path) -> None:
    lock = tmp_path / "seeds" / "42" / ".train.lock"
    with (
        exclusive_lock(lock, "it"),
        pytest.raises(StoreError, match="being written by another process"),
    ):
        make_room(tmp_path, overwrite=True, trained=is_trained(tmp_path))
    make_room(tmp_path, overwrite=False, trained=is_trained(tmp_path))
    assert not lock.exists()
    (tmp_path / "seeds" / "42" / "teacher" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds a trained run"):
        make_room(tmp_path, overwrite=False, trained=is_trained(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("compare", "one", "./one"), "names one run twice"),
        (("evaluate", "nowhere"), "no config.yaml there"),
        (("compare", "one"), "two or more"),
        (("train", "--resume", "nowhere"), "not a run directory"),
    ],
)
def test_what_is_not_a_run_is_refused(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run(*arguments)


def test_a_policy_of_other_features_is_refused(store: Path, tmp_path: Path) -> None:
    train_execution_seed(SeedJob(configured(store), tmp_path, 42), lambda _: None, lambda: False)
    policy = tmp_path / "seeds" / "42" / "policy" / "policy.json"
    policy.write_text(policy.read_text().replace('"hidden": 8', '"hidden": 16'))
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(StoreError, match="policy"):
        load_learned(tmp_path / "seeds" / "42", load_execution_data(configured(store)))


# --- evaluation


@pytest.fixture(scope="module")
def found(store: Path, tmp_path_factory: pytest.TempPathFactory) -> ExecutionEvaluation:
    """A policy of a few updates beside the schedules, on the test days."""
    run = tmp_path_factory.mktemp("judged") / "r"
    train_execution_seed(SeedJob(configured(store), run, 42), lambda _: None, lambda: False)
    (run / "config.yaml").write_text(to_yaml(configured(store)), encoding="utf-8")
    return evaluate_trained({"r": run}, "test")


def test_gain_of_twap_over_itself_is_nothing(found: ExecutionEvaluation) -> None:
    assert found.difference("twap", "twap").estimate == 0.0
    for one in found.policies:
        assert one.path.sum() == pytest.approx(float(one.measures["ffr"].mean()))
        hours = sum(share for share, _ in one.hourly.values())
        assert hours == pytest.approx(float(one.measures["ffr"].mean()))
        gained = sum(share * gain for share, gain in one.hourly.values())
        filled = one.measures["ffr"] * one.measures["gain_twap"]
        assert gained == pytest.approx(float(filled.mean()))


@pytest.fixture(scope="module")
def trained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(store, tmp_path_factory.mktemp("runs") / "twap")


def short_run(store: Path, place: Path, *more: str) -> Path:
    config = configured(store, *SHORT, *more)
    train_execution_seed(SeedJob(config, place, 42), lambda _: None, lambda: False)
    (place / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return place


def test_a_run_called_like_a_schedule_hides_neither(trained: Path) -> None:
    found = evaluate_trained({"twap": trained}, "test")
    assert [one.name for one in found.policies] == [*SCHEDULES, "run twap"]
    assert not found.policy("twap").seeds
    assert set(found.policy("run twap").seeds) == {42}


def test_noise_of_floating_point_is_no_gain(trained: Path) -> None:
    found = evaluate_trained({"r": trained}, "test")
    assert np.abs(found.policy("twap").measures["pa"]).max() < 1e-6
    assert found.summary()["policies"]["twap"]["glr"] is None
    assert found.summary()["policies"]["almgren_chriss"]["glr"] is not None


def test_orders_of_a_file_are_worked_and_every_step_is_kept(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "symbol,date,direction,amount,start,end\n"
        "S0001,2015-01-20,buy,10,,\n"
        "S0000,2015-03-10,sell,1000,10:00,14:00\n"
        "S0001,2015-03-11,buy,500,,\n",
        encoding="utf-8",
    )
    found = evaluate_trained({"r": trained}, "test", path, history=True)
    assert (found.facts["orders"], found.facts["orders_elsewhere"]) == (2, 1)
    found.write(tmp_path)
    orders = pl.read_parquet(tmp_path / "orders.parquet")
    assert orders.row(0)[:7] == (
        *(0, "S0000", "2015-03-10", "sell", 1000.0),
        *(datetime(2015, 3, 10, 10), datetime(2015, 3, 10, 14)),
    )
    steps = pl.read_parquet(tmp_path / "history.parquet")
    assert set(steps["policy"]) == {*SCHEDULES, "r"}
    assert set(steps.filter(policy="r")["seed"]) == {42}
    assert steps.filter(policy="twap")["seed"].null_count() == len(steps.filter(policy="twap"))
    for name in (*SCHEDULES, "r"):
        own = steps.filter(policy=name)
        each = own.group_by("order", maintain_order=True).agg(
            pl.col("filled").last(), share=pl.col("executed").sum()
        )
        assert each["filled"].to_list() == pytest.approx(orders[f"{name}/ffr"].to_list())
        assert (each["share"] / orders["amount"]).to_list() == pytest.approx(each["filled"])
    first = steps.filter(policy="twap", order=0).row(0, named=True)
    assert (first["begins"], first["ends"]) == (
        datetime(2015, 3, 10, 10),
        datetime(2015, 3, 10, 10, 45),
    )
    evaluate_trained({"r": trained}, "test").write(tmp_path)
    assert not (tmp_path / "history.parquet").exists()


def test_frames_of_an_order_have_times_advantage_and_share_filled(data: ExecutionData) -> None:
    history = run_orders(Twap(), data.days, data.orders["test"], data.rules)
    steps, ticks = history.step_frame(3), history.tick_frame(3)
    assert steps.equals(history.steps_frame().filter(order=3).select(steps.columns))
    for frame in (steps, ticks):
        twap, buying = history.benchmarks.twap[3], history.orders.buying[3]
        advantage = price_advantage(frame["price"].to_numpy(), twap, buying)
        np.testing.assert_array_equal(frame["pa"], advantage)
    assert ticks["value"].sum() == pytest.approx(history.value[3])
    assert steps["filled"][-1] == ticks["filled"][-1] == pytest.approx(1.0)
    assert steps["begins"][0] == ticks["begins"][0]
    assert steps["ends"][-1] - ticks["begins"][-1] == timedelta(minutes=5)


def test_a_run_that_has_seen_the_days_is_not_judged_on_them(
    trained: Path, store: Path, tmp_path: Path
) -> None:
    windows = (
        "split.train=[2015-01-05, 2015-01-30]",
        "split.valid=[2015-02-02, 2015-02-13]",
        "split.test=[2015-02-16, 2015-03-06]",
    )
    earlier = short_run(store, tmp_path / "earlier", *windows)
    told = r"twap: was trained with split\.valid = 2015-02-16 to 2015-03-06, .* split\.test of .*"
    with pytest.raises(UsageError, match=told + "earlier, 2015-02-16 to 2015-03-06"):
        evaluate_trained({"earlier": earlier, "later": trained}, "test")
    both = evaluate_trained({"later": trained, "earlier": earlier}, "test")
    assert {"later", "earlier"} <= {one.name for one in both.policies}
    # A run whose own windows were moved after training has seen them, too.
    moved = configured(store, *SHORT, "split.train=[2015-01-05, 2015-01-15]", *windows[1:])
    (tmp_path / "run" / "seeds").mkdir(parents=True)
    (tmp_path / "run" / "seeds" / "42").symlink_to(trained / "seeds" / "42")
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(moved), encoding="utf-8")
    with pytest.raises(UsageError, match=r"split\.train = .* overlaps split\.valid"):
        evaluate_trained({"run": tmp_path / "run"}, "valid")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rules": [30]}, r"b: .* execution\.ticks_per_step = 30, but a has 15\. Evaluate it"),
        ({"content": "other"}, "the dataset's content = other"),
        ({"clock": [570.0, 575.0]}, "grid of ticks = 2 ticks from 09:30 to 09:35"),
    ],
)
def test_a_policy_for_other_steps_ticks_or_data_is_refused(
    change: dict[str, object], told: str, data: ExecutionData
) -> None:
    facts = {"rules": list(data.rules), "content": data.content}
    refuse_other(Path("b"), facts | {"clock": data.days.clock.tolist()}, Path("a"), data)
    with pytest.raises(UsageError, match=told):
        refuse_other(Path("b"), facts | change, Path("a"), data)


def test_intervals_are_over_dates_not_over_orders() -> None:
    values = np.array([1.0, 1.0, 1.0, 3.0])
    mean = over_dates(values, ["a", "a", "a", "b"])
    assert mean.estimate == 2.0
    assert mean.error == pytest.approx(1.0)
    assert mean.low == pytest.approx(2.0 - 12.7062, abs=1e-3)
    assert over_dates(values, ["a"] * 4).low is None


def test_browser_draws_every_chart_of_the_page(found: ExecutionEvaluation, tmp_path: Path) -> None:
    page = write_execution_report(found, tmp_path, "r", "en")
    dom = draw_page(page, tmp_path / "profile")
    assert drawn_charts(dom) == {"paths", "spread", "day"}
    assert dom.count("main-svg") >= 3


def test_page_has_the_day_and_heads_over_both_columns_of_a_policy(
    found: ExecutionEvaluation,
) -> None:
    pages = {lang: render(found, "r", Words(lang)) for lang in ("en", "zh")}
    for one in found.policies:
        assert f'<th scope="colgroup" colspan="2">{one.name}</th>' in pages["en"]
    said = {"en": ("with the seeds held fixed", "to its cap"), "zh": ("种子固定不变", "至其上限")}
    for lang, phrases in said.items():
        assert all(phrase in pages[lang] for phrase in phrases)
    history = found.example["r"]
    assert history.ticks is not None
    chart = json.loads(pages["en"].split('id="report-data">')[1].split("</script>")[0])
    traces = {trace["name"]: trace for trace in chart["charts"]["day"]["data"]}
    assert traces["r"]["y"] == pytest.approx(
        history.ticks.price[0, history.ticks.executed[0] > 0.0], rel=1e-5
    )
    (progress,) = (trace for name, trace in traces.items() if name.startswith("r ("))
    filled = float(history.executed[0] / history.orders.amount[0])
    assert progress["y"][-1] == pytest.approx(filled, rel=1e-5)


def test_the_picture_of_a_day_is_drawn(data: ExecutionData) -> None:
    history = run_orders(Twap(), data.days, data.orders["test"], data.rules)
    chart = day_chart({"twap": history, "again": history}, Words("en"), "again")
    assert draw_slide(Slide("a day", "", chart)).startswith(b"\x89PNG")


# --- settings


def test_rules_and_rewards_are_as_configured() -> None:
    told = ExecutionConfig.model_validate(
        {"volume_cap": 0.2, "half_spread": 0.001, "temporary": 0.1, "permanent": 0.05}
    )
    assert ExecutionRules.from_config(told)[1:] == (0.2, 0.001, 0.1, 0.05)
    both = ExecutionConfig.model_validate({"reward": {"shortfall": 2.0, "risk": 3.0}}).reward
    parts = reward_from_config(both).parts
    assert [weight for weight, _ in parts] == [1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"reward": {"pa_penalty": 0}}, "must have a weight"),
        ({"reward": {"classes": [0.0]}}, "one more than"),
        ({"orders": {"share": [0.2, 0.1]}}, "the least and then the most"),
        ({"rate_max": 1.0}, "greater than 1"),
        ({"learner": {"orders": 2, "copies": 4}}, "copies = 4 must be at most orders = 2"),
    ],
)
def test_impossible_settings_are_refused(tree: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ExecutionConfig.model_validate(tree)
