"""Features and metrics of one's own, from files that the configuration names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scrambled_days import check_causal, scramble_after
from test_execution_training import configured, flags, run

from echelon.errors import FeatureError, StoreError
from echelon.execution import METRICS, load_extensions
from echelon.execution.features import public_features
from echelon.training.execution import load_learned, train_execution
from echelon.training.execution_data import load_execution_data

MINE = """
import numpy as np
from echelon.execution import History, Past, execution_feature, metric

@execution_feature("since_open")
def since_open(past: Past) -> float:
    assert np.isnan(past.price.base[0, len(past.price):]).all(), "the future is there"
    return float(np.log(past.price[-1] / past.known[0]))

@metric("first_step_share")
def first_step_share(history: History):
    return history.steps.executed[:, 0] / history.orders.amount
"""


@pytest.fixture(autouse=True)
def metrics_as_before() -> Iterator[None]:
    """Metrics are one table for the process: other tests must not find those of these files."""
    before = dict(METRICS)
    yield
    METRICS.clear()
    METRICS.update(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("execution") / "store"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return path


def test_ones_own_feature_trains_and_evaluates_and_ones_own_metric_is_told(
    store: Path, mine: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    told = flags(store, f"execution.extensions=[{mine}]", "execution.features=[time, since_open]")
    run("train", *told, "--output-dir", str(place), "--workers", "1")
    run("evaluate", str(place), "--split", "test", "--trust-code", str(mine))
    saved = json.loads((place / "seeds" / "42" / "policy" / "policy.json").read_text())
    assert saved["features"] == ["time", "since_open"]
    summary = json.loads((place / "evaluations" / "test" / "summary.json").read_text())
    shares = summary["policies"]["twap"]["measures"]["first_step_share"]
    assert shares["estimate"] == pytest.approx(15.0 / 78.0)  # of 78 bars the first step has 15


def test_without_names_all_features_and_ones_own_are_used(store: Path, mine: Path) -> None:
    data = load_execution_data(configured(store, f"execution.extensions=[{mine}]"))
    usual = load_execution_data(configured(store))
    assert data.public.names == (*usual.public.names, "since_open")
    only = ("execution.features=[time]", f"execution.extensions=[{mine}]")
    assert load_execution_data(configured(store, *only)).public.names == ("time",)


def test_ones_own_feature_is_shown_no_future(store: Path, mine: Path) -> None:
    data = load_execution_data(configured(store, f"execution.extensions=[{mine}]"))
    few = np.arange(4)
    days = replace(
        data.days,
        symbols=data.days.symbols[:4],
        **{k: getattr(data.days, k)[few] for k in ("dates", "buy", "sell", "known", "volume")},
    )
    own = data.extensions.features
    check_causal(lambda world: public_features(world, own, names=["time"]), days)
    one, two = (
        public_features(world, own, names=[]).today[2, :, 0]
        for world in (days, scramble_after(days, 2, 30))
    )
    np.testing.assert_array_equal(one[:31], two[:31])
    assert not np.array_equal(one[31:], two[31:])  # it does look at the market


def test_a_policy_with_ones_own_feature_needs_the_file_it_came_from(
    store: Path, mine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(store, f"execution.extensions=[{mine}]", "execution.features=[since_open]")
    data = load_execution_data(config)
    train_execution(config, data, tmp_path / "one", 42)
    assert load_learned(tmp_path / "one", data).name == "learned"
    assert not caplog.text
    with pytest.raises(FeatureError, match=r"'since_open'.*execution\.extensions"):
        load_learned(tmp_path / "one", load_execution_data(configured(store)))
    mine.write_text(MINE + "\n# changed\n", encoding="utf-8")
    changed = load_execution_data(config)
    load_learned(tmp_path / "one", changed)
    assert "other versions of the files" in caplog.text
    # A checkpoint of other code is one of another configuration.
    with pytest.raises(StoreError, match="another configuration"):
        train_execution(config, changed, tmp_path / "one", 42, resume=True)


def test_two_configurations_do_not_see_each_others_features(mine: Path) -> None:
    assert list(load_extensions([mine]).features) == ["since_open"]
    assert not load_extensions([]).features
    assert load_extensions([]).digest == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "declares neither a feature nor a metric"),
        ("1 / 0", "line 1: running this extension file failed: ZeroDivisionError"),
        ("def f(:", "Correct the syntax of this extension file"),
        (
            "from echelon.execution import execution_feature\n"
            "@execution_feature('time')\ndef f(past): return 0.0",
            "line 2: execution feature 'time' exists",
        ),
        (
            "from echelon.execution import metric\n@metric('pa')\ndef f(history): return 0.0",
            "line 2: metric 'pa' exists already",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FeatureError, match=rf"bad\.py.*{told}"):
        load_extensions([path])
    with pytest.raises(FeatureError, match=r"cannot read this extension file .*extensions"):
        load_extensions([tmp_path / "nowhere.py"])


def test_a_file_loaded_again_replaces_its_own_metric(mine: Path) -> None:
    load_extensions([mine])
    first = METRICS["first_step_share"]
    load_extensions([mine])
    assert METRICS["first_step_share"] is not first
