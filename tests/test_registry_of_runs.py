"""The registry of runs: what is counted stays counted, and is read again as it was written."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from echelon.errors import StoreError
from echelon.runs.registry import Entry, TrialRegistry, Window, new_entry, window_of

VALID = Window("stocks", "abc", "2011-01-03", "2016-12-30")
TEST = Window("stocks", "abc", "2017-01-03", "2018-12-31")
TIMES = np.arange("2011-01-03", "2011-01-08", dtype="datetime64[D]").astype("datetime64[us]")
RETURNS = np.array([0.01, -0.02, 0.005, 0.0, 0.03])


def entry(config: str = "one", window: Window = VALID) -> Entry:
    return new_entry(window, Path("runs/some"), config, 3)


def test_trial_is_read_again_with_its_returns(tmp_path: Path) -> None:
    registry = TrialRegistry(tmp_path / "registry")
    registry.add_trial(entry(), TIMES, RETURNS, 0.25)
    (found,) = TrialRegistry(tmp_path / "registry").trials(VALID)
    assert (found.sharpe, found.periods, found.seeds, found.run) == (0.25, 5, 3, "some")
    assert found.window == VALID
    frame = registry.returns(found)
    assert np.array_equal(frame["return"].to_numpy(), RETURNS)
    assert np.array_equal(frame["time"].to_numpy(), TIMES)


def test_same_configuration_on_the_same_window_is_one_trial(tmp_path: Path) -> None:
    registry = TrialRegistry(tmp_path)
    registry.add_trial(entry(), TIMES, RETURNS, 0.1)
    registry.add_trial(entry(), TIMES, RETURNS, 0.2)
    registry.add_trial(entry("two"), TIMES, RETURNS, 0.3)
    assert [e.sharpe for e in registry.trials(VALID)] == [0.2, 0.3]


def test_every_read_counts_also_of_the_same_run(tmp_path: Path) -> None:
    registry = TrialRegistry(tmp_path)
    for sharpe in (0.1, 0.2):
        read = registry.begin_read(entry(window=TEST))
        registry.end_read(read, TIMES, RETURNS, sharpe)
    assert [e.sharpe for e in registry.reads(TEST)] == [0.1, 0.2]


def test_read_is_written_down_before_there_is_a_result(tmp_path: Path) -> None:
    registry = TrialRegistry(tmp_path)
    registry.begin_read(entry(window=TEST))
    (found,) = TrialRegistry(tmp_path).reads(TEST)
    assert found.sharpe is None


def test_look_that_was_cut_short_and_begun_again_is_one_look(tmp_path: Path) -> None:
    registry = TrialRegistry(tmp_path)
    registry.begin_read(entry(window=TEST), resumed=True)  # and killed
    registry.begin_read(entry("other", TEST), resumed=True)
    read = registry.begin_read(entry(window=TEST), resumed=True)
    registry.end_read(read, TIMES, RETURNS, 0.1)
    assert len(registry.reads(TEST)) == 2
    registry.begin_read(entry(window=TEST), resumed=True)  # the look before has its result
    assert len(registry.reads(TEST)) == 3


def test_windows_count_together_where_they_share_days_of_the_same_data(tmp_path: Path) -> None:
    registry = TrialRegistry(tmp_path)
    others = {
        "overlapping": VALID._replace(first="2016-12-30", last="2020-01-01"),
        "renamed": VALID._replace(dataset="other"),
        "updated": VALID._replace(data_hash="def"),
        "later": VALID._replace(first="2017-01-01", last="2017-02-01"),
        "foreign": VALID._replace(dataset="other", data_hash="def"),
    }
    for name, window in others.items():
        registry.add_trial(entry(name, window), TIMES, RETURNS, 0.0)
    counted = {e.config_hash for e in registry.trials(VALID)}
    assert counted == {"overlapping", "renamed", "updated"}


def test_registry_is_beside_the_run_or_the_study_it_is_part_of(tmp_path: Path) -> None:
    expected = tmp_path.resolve() / "runs" / "registry"
    (tmp_path / "runs" / "study").mkdir(parents=True)
    for name in ("ablation.json", "walk_forward.json", "comparison.json"):
        (tmp_path / "runs" / "study" / name).touch()
    nested = ("variants/base", "folds/2008", "agents/sac")
    for run in ("runs/a", *(f"runs/study/{name}" for name in nested)):
        assert TrialRegistry.for_run(tmp_path / run).path == expected
    alone = tmp_path.resolve() / "data" / "folds"
    assert TrialRegistry.for_run(alone / "run").path == alone / "registry"
    named = tmp_path / "elsewhere"
    assert TrialRegistry.for_run(tmp_path / "runs" / "a", named).path == named


def test_window_comes_from_the_manifest() -> None:
    data = {"name": "stocks", "content_hash": "abc", "more": 1}
    assert window_of(data, "2011-01-03", "2016-12-30") == VALID


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "lines": [{"key": 1}]}'])
def test_damaged_registry_is_an_error_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "trials.json").write_text(text)
    with pytest.raises(StoreError, match=r"trials\.json: missing or damaged .*backup"):
        TrialRegistry(tmp_path).trials(VALID)
    with pytest.raises(StoreError, match="damaged"):
        TrialRegistry(tmp_path).add_trial(entry(), TIMES, RETURNS, 0.0)
    assert (tmp_path / "trials.json").read_text() == text


def test_registry_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reads.json").write_text(json.dumps({"format": 99, "lines": []}))
    with pytest.raises(StoreError, match="another version"):
        TrialRegistry(tmp_path).reads(TEST)


def test_missing_returns_are_named(tmp_path: Path) -> None:
    registry = TrialRegistry(tmp_path)
    registry.add_trial(entry(), TIMES, RETURNS, 0.1)
    (found,) = registry.trials(VALID)
    (tmp_path / "returns" / f"{found.key}.parquet").unlink()
    with pytest.raises(StoreError, match=r"Evaluate some again"):
        registry.returns(found)


def _add_many(path: Path, name: str) -> None:
    for k in range(10):
        TrialRegistry(path).add_trial(entry(f"{name}-{k}"), TIMES, RETURNS, 0.0)


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_many, args=(tmp_path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(TrialRegistry(tmp_path).trials(VALID)) == 20
