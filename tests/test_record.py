"""Records of the hierarchy on disk: read as they were written, and nothing else is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from command_records import make_history, make_record

from echelon.errors import StoreError
from echelon.ops.diversity import mapd
from echelon.population.record import (
    POPULATION,
    CommandRecord,
    PopulationHistory,
    has_record,
    record_files,
    record_of,
    remove_record,
    summarise_targets,
)


@pytest.fixture(scope="module")
def record() -> CommandRecord:
    return make_record(bars=120, experts=3, assets=4)


@pytest.fixture
def written(record: CommandRecord, tmp_path: Path) -> Path:
    record.write(tmp_path, "seed-7")
    return tmp_path


def test_record_is_read_bit_for_bit_without_its_targets(
    record: CommandRecord, written: Path
) -> None:
    again = CommandRecord.read(written, "seed-7")
    assert again.experts == record.experts
    for name in ("times", "in_charge", "decided", "allowed", "own_values", "own_costs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(record, name), err_msg=name)
        assert getattr(again, name).dtype == getattr(record, name).dtype
    assert again.target.shape == (120, 3, 0)
    np.testing.assert_array_equal(again.portfolios.distance, record.portfolios.distance)
    np.testing.assert_array_equal(again.portfolios.mean, record.portfolios.mean)
    assert str(again.events) == str(record.events)  # one of them holds a NaN


def test_record_that_was_read_is_written_the_same(written: Path, tmp_path: Path) -> None:
    CommandRecord.read(written, "seed-7").write(tmp_path, "again")
    for one, other in zip(
        record_files(written, "seed-7"), record_files(tmp_path, "again"), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()


def test_table_can_be_opened_by_anyone(record: CommandRecord, written: Path) -> None:
    frame = pl.read_parquet(written / "seed-7.command.parquet")
    assert frame.columns[:4] == ["time", "in_charge", "decided", "distance"]
    assert frame["own_value/Trend"].to_list() == record.own_values[1:, 0].tolist()
    assert len(frame) == record.bars


def test_distance_of_a_bar_is_mapd_of_its_portfolios(record: CommandRecord) -> None:
    found = record.portfolios.distance
    for s in (0, 17, 119):
        assert found[s] == pytest.approx(mapd(record.target[s][:, None]), abs=1e-12)
    whole = mapd(record.target.swapaxes(0, 1))
    assert found.mean() == pytest.approx(whole, abs=1e-12)


def test_unknown_target_leaves_its_bar_without_distance_and_out_of_the_mean() -> None:
    target = np.array([[[1.0, 0.0], [0.0, 0.5]], [[np.nan, 0.0], [0.0, 0.3]]])
    found = summarise_targets(target)
    assert found.distance[0] == 1.0
    assert np.isnan(found.distance[1])
    np.testing.assert_array_equal(found.mean, [[1.0, 0.0], [0.0, 0.4]])
    assert np.isnan(summarise_targets(np.full((2, 2, 1), np.nan)).mean).all()
    assert np.isnan(summarise_targets(np.zeros((3, 1, 2))).distance).all()


@pytest.mark.parametrize("which", [0, 1])
def test_missing_file_is_refused_by_name(written: Path, which: int) -> None:
    path = record_files(written, "seed-7")[which]
    path.unlink()
    assert has_record(written, "seed-7")
    with pytest.raises(StoreError, match=path.name):
        CommandRecord.read(written, "seed-7")


@pytest.mark.parametrize("which", [0, 1])
def test_cut_file_is_refused_by_name(written: Path, which: int) -> None:
    path = record_files(written, "seed-7")[which]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StoreError, match=path.name):
        CommandRecord.read(written, "seed-7")


def test_events_of_another_run_are_refused(record: CommandRecord, written: Path) -> None:
    replace(record, events=record.events[:2]).write(written, "other")
    events = record_files(written, "seed-7")[1]
    record_files(written, "other")[1].replace(events)
    with pytest.raises(StoreError, match="belongs to another run"):
        CommandRecord.read(written, "seed-7")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f.drop("decided"), "decided"),
        (lambda f: f.drop("own_cost/Trend"), "own_cost/Trend"),
        (lambda f: f.with_columns(in_charge=pl.lit(9)), "in_charge"),
        (lambda f: f.with_columns(pl.lit("x").alias("allowed/Trend")), "allowed/Trend"),
        (lambda f: f.head(10), "an event at bar"),
    ],
)
def test_changed_table_is_refused(written: Path, damage: object, said: str) -> None:
    path = record_files(written, "seed-7")[0]
    metadata = pl.read_parquet_metadata(path)
    kept = {name: value for name, value in metadata.items() if name.startswith("echelon")}
    damage(pl.read_parquet(path)).write_parquet(path, metadata=kept)  # type: ignore[operator]
    with pytest.raises(StoreError, match=said):
        CommandRecord.read(written, "seed-7")


def test_table_without_our_facts_is_refused(written: Path) -> None:
    path = record_files(written, "seed-7")[0]
    pl.read_parquet(path).write_parquet(path)
    with pytest.raises(StoreError, match=path.name):
        CommandRecord.read(written, "seed-7")


def test_record_is_removed_whole(written: Path) -> None:
    remove_record(written, "seed-7")
    assert not has_record(written, "seed-7")
    remove_record(written, "seed-7")


def test_record_of_a_policy_that_commands_nobody_is_none(record: CommandRecord) -> None:
    class Commander:
        def __init__(self, left: CommandRecord | None) -> None:
            self.record = left

    assert record_of(object()) is None
    assert record_of(Commander(None)) is None
    assert record_of(Commander(record)) is record


def test_record_of_the_wrong_shape_is_refused(record: CommandRecord) -> None:
    with pytest.raises(AssertionError, match="own_values"):
        replace(record, own_values=record.own_values[:-1])
    with pytest.raises(AssertionError, match="two experts of one name"):
        replace(record, experts=("a", "a", "b"))


# What training leaves behind


def test_population_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = make_history(rounds=40)
    history.write(tmp_path)
    again = PopulationHistory.read(tmp_path)
    assert again.experts == history.experts
    np.testing.assert_array_equal(again.skills, history.skills)
    assert again.lineage == history.lineage
    assert str(again.rounds) == str(history.rounds)  # the first fitnesses are NaN
    assert again.events == history.events
    assert again.members == 5
    before = (tmp_path / POPULATION).read_bytes()
    again.write(tmp_path)
    assert (tmp_path / POPULATION).read_bytes() == before


def test_population_is_found_only_where_there_is_one(tmp_path: Path) -> None:
    assert PopulationHistory.find(tmp_path) is None
    with pytest.raises(StoreError, match=POPULATION):
        PopulationHistory.read(tmp_path)
    make_history(rounds=2).write(tmp_path)
    assert PopulationHistory.find(tmp_path) is not None


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("format", 1, "format 1, expected 2.*Train again"),
        ("experts", ["a", "a"], "different names"),
        ("skills", [[1.0], [1.0, 2.0]], "damaged"),
        ("skills", [[1.0]], "expected skills"),
        ("lineage", [{"id": 0}], "damaged"),
        ("rounds", [{"round": 1}], "rounds.0.step: Field required"),
        ("events", [{"round": 1}], "damaged"),
    ],
)
def test_damaged_population_is_refused(tmp_path: Path, part: str, value: object, said: str) -> None:
    make_history(rounds=20).write(tmp_path)
    path = tmp_path / POPULATION
    tree = json.loads(path.read_text()) | {part: value}
    path.write_text(json.dumps(tree))
    with pytest.raises(StoreError, match=said):
        PopulationHistory.read(tmp_path)


def test_round_of_other_experts_is_refused() -> None:
    history = make_history(rounds=20)
    with pytest.raises(ValueError, match="expected fitness of 5 experts, found 1"):
        replace(history, rounds=(replace(history.rounds[0], fitness=(1.0,)),))
    with pytest.raises(ValueError, match="in order"):
        replace(history, rounds=history.rounds[::-1])


def test_life_that_descends_from_a_later_one_is_refused() -> None:
    history = make_history(rounds=60)
    last = replace(history.lineage[-1], parent=len(history.lineage))
    with pytest.raises(ValueError, match="does not descend"):
        replace(history, lineage=(*history.lineage[:-1], last))
