"""The store and the import into it: whole or not at all, point-in-time, joined rightly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path

import polars as pl
import pytest
from markets import FrameSource, make_bars

from echelon.data.checking import check_stored
from echelon.data.importing import import_source
from echelon.data.store import Store
from echelon.errors import DataError, InvalidDataError, StoreError
from echelon.files import exclusive_lock


def _all_bars(store: Store, name: str = "m") -> pl.DataFrame:
    return pl.concat([store.read_bars(name, k) for k in store.partitions(name)])


def test_imported_bars_come_back_with_factors_anchored_at_the_first_bar(tmp_path: Path) -> None:
    bars = make_bars().with_columns(factor=pl.col("factor") * 0.37)
    store = Store(tmp_path)
    report = import_source(FrameSource(bars), store, "m")
    back = _all_bars(store)
    assert report.added == back.height == bars.height
    both = back.join(bars, on=["time", "symbol"], suffix="_in")
    for column in ("open", "high", "low", "close", "volume"):
        assert both[column].equals(both[f"{column}_in"])
    assert (both["factor"] - both["factor_in"] / 0.37).abs().max() < 1e-12
    first = back.sort("time").group_by("symbol").first()
    assert first["factor"].to_list() == [1.0, 1.0, 1.0]


def test_hash_depends_on_content_not_on_row_order_or_pieces(tmp_path: Path) -> None:
    bars = make_bars()
    store = Store(tmp_path)
    one = import_source(FrameSource(bars), store, "one").manifest
    shuffled = bars.sample(fraction=1.0, shuffle=True, seed=1)
    assert not shuffled["time"].equals(bars["time"])
    two = import_source(FrameSource(shuffled, pieces=5), store, "two").manifest
    changed = bars.with_columns(close=pl.col("close") * (1 + 1e-9))
    three = import_source(FrameSource(changed), store, "three").manifest
    assert one.content_hash == two.content_hash
    assert one.content_hash != three.content_hash


def test_only_partitions_in_the_span_are_opened(tmp_path: Path) -> None:
    store = Store(tmp_path)
    manifest = import_source(FrameSource(make_bars()), store, "m").manifest
    (tmp_path / "m" / manifest.version / "bars" / "2015.parquet").write_bytes(b"not parquet")
    keys = store.partitions("m", datetime(2016, 2, 1), datetime(2016, 3, 1))
    assert keys == ["2016"]
    assert store.read_bars("m", "2016").height > 0
    with pytest.raises(StoreError, match=r"2015\.parquet: missing or damaged.*Import"):
        store.read_bars("m", "2015")


def test_duplicate_across_pieces_is_refused_and_names_both_rows(tmp_path: Path) -> None:
    bars = make_bars(("AAA",))
    twice = pl.concat([bars, bars.slice(3, 1)])
    source = FrameSource(twice, pieces=2)
    with pytest.raises(InvalidDataError, match=r"AAA at 2015-01-07.*also in piece-0, row 3"):
        import_source(source, Store(tmp_path), "m")
    assert Store(tmp_path).datasets() == []


def test_quarantine_of_a_whole_partition_leaves_it_out(tmp_path: Path) -> None:
    bars = make_bars(("AAA",))
    first_year = bars.filter(pl.col("time").dt.year() == 2015)
    other = first_year.with_columns(volume=pl.col("volume") + 1.0)
    store = Store(tmp_path)
    both = FrameSource(pl.concat([first_year, other]), pieces=2)
    with pytest.raises(InvalidDataError, match="not one row is good"):
        import_source(both, store, "m", quarantine=True)
    assert store.datasets() == []
    # 2015 twice with different volumes: nobody knows which is right. What is later stays.
    later = bars.filter(pl.col("time").dt.year() > 2015).head(first_year.height)
    pieces = pl.concat([first_year, later, other, later])
    report = import_source(FrameSource(pieces, pieces=2), store, "m", quarantine=True)
    assert [partition.key for partition in report.manifest.partitions] == ["2016"]
    assert report.manifest.quarantined == 2 * first_year.height + later.height


def test_quarantine_sets_bad_rows_aside_in_a_file_and_counts_them(tmp_path: Path) -> None:
    bars = make_bars(("AAA",))
    broken = bars.with_columns(
        close=pl.when(pl.int_range(pl.len()) == 7).then(-1.0).otherwise(pl.col("close"))
    )
    twice = pl.concat([broken, bars.slice(3, 1)])
    with pytest.raises(InvalidDataError, match="nothing was imported"):
        import_source(FrameSource(twice), Store(tmp_path), "m")
    report = import_source(FrameSource(twice, pieces=2), Store(tmp_path), "m", quarantine=True)
    assert report.manifest.quarantined == 2
    assert report.quarantine is not None
    aside = pl.read_csv(report.quarantine)
    assert aside.height == 2
    assert set(aside.columns) >= {"file", "row", "problem", "symbol"}
    assert report.manifest.rows == bars.height - 1


def test_update_adds_new_bars_and_joins_a_restated_factor(tmp_path: Path) -> None:
    bars = make_bars(last=date(2016, 12, 30))
    cut = datetime(2016, 6, 30)
    store = Store(tmp_path)
    import_source(FrameSource(bars.filter(pl.col("time") <= cut)), store, "m")
    # The vendor now anchors at another day and has split every share in four.
    again = bars.filter(pl.col("time") >= cut).with_columns(
        pl.col("open", "high", "low", "close") / 4,
        volume=pl.col("volume") * 4,
        factor=pl.col("factor") * 0.83,
    )
    report = import_source(FrameSource(again), store, "m", update=True)
    import_source(FrameSource(bars), store, "whole")
    updated, whole = (_all_bars(store, n).sort("symbol", "time") for n in ("m", "whole"))
    assert report.added == bars.filter(pl.col("time") > cut).height
    for column in ("time", "symbol"):
        assert updated[column].equals(whole[column])
    for column in ("open", "close", "volume", "factor"):
        assert ((updated[column] - whole[column]) / whole[column]).abs().max() < 1e-9


def test_update_leaves_untouched_partitions_as_they_are(tmp_path: Path) -> None:
    bars = make_bars()
    store = Store(tmp_path)
    old = import_source(FrameSource(bars), store, "m").manifest
    tail = bars.filter(pl.col("time") >= datetime(2016, 12, 1))
    extra = tail.filter(pl.col("symbol") == "AAA").with_columns(symbol=pl.lit("NEW"))
    new = import_source(FrameSource(extra), store, "m", update=True).manifest
    inode = {
        m.version: (tmp_path / "m" / m.version / "bars" / "2015.parquet").stat().st_ino
        for m in (old, new)
    }
    assert len(set(inode.values())) == 1
    assert new.rows == old.rows + extra.height


def test_update_of_raw_prices_that_changed_is_refused(tmp_path: Path) -> None:
    bars = make_bars()
    store = Store(tmp_path)
    import_source(FrameSource(bars, price_basis="raw"), store, "m")
    tail = bars.filter(pl.col("time") >= datetime(2016, 12, 1)).with_columns(pl.col("close") * 1.01)
    tail = tail.with_columns(high=pl.max_horizontal("high", "close"))
    with pytest.raises(DataError, match="other raw closes"):
        import_source(FrameSource(tail, price_basis="raw"), store, "m", update=True)


def test_update_without_overlap_is_refused(tmp_path: Path) -> None:
    bars = make_bars()
    store = Store(tmp_path)
    before = import_source(
        FrameSource(bars.filter(pl.col("time") <= datetime(2016, 6, 30))), store, "m"
    ).manifest
    later = FrameSource(bars.filter(pl.col("time") > datetime(2016, 6, 30)))
    with pytest.raises(DataError, match="AAA, BBB, CCC does not begin with a bar that is stored"):
        import_source(later, store, "m", update=True)
    assert store.manifest("m") == before


def test_update_of_another_kind_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_source(FrameSource(make_bars()), store, "m")
    with pytest.raises(DataError, match="has price_basis 'split_adjusted', the update has 'raw'"):
        import_source(FrameSource(make_bars(), price_basis="raw"), store, "m", update=True)


def test_pre_close_chain_makes_the_factor_of_a_shares(tmp_path: Path) -> None:
    days = [datetime(2015, 1, d) for d in (5, 6, 7, 8)]
    bars = pl.DataFrame(
        {
            "time": days,
            "symbol": ["600000.SH"] * 4,
            "close": [10.0, 10.5, 5.3, 5.4],
            "pre_close": [9.9, 10.0, 5.25, 5.3],  # ten for ten on the 7th
        }
    )
    source = FrameSource(bars, calendar="XSHG", timezone="Asia/Shanghai", price_basis="raw")
    store = Store(tmp_path)
    import_source(source, store, "m")
    assert _all_bars(store)["factor"].to_list() == [1.0, 1.0, 2.0, 2.0]


def test_intraday_pre_close_steps_once_a_session(tmp_path: Path) -> None:
    stamps = [datetime(2015, 1, d, 9, m) for d in (5, 6, 7) for m in (35, 40)]
    bars = pl.DataFrame(
        {
            "time": stamps,
            "symbol": ["600000.SH"] * 6,
            "close": [10.0, 10.4, 10.6, 10.5, 5.3, 5.4],
            "pre_close": [9.9, 9.9, 10.4, 10.4, 5.25, 5.25],  # ten for ten on the 7th
        }
    )
    kind = {"calendar": "XSHG", "timezone": "Asia/Shanghai", "price_basis": "raw"}
    store = Store(tmp_path)
    import_source(FrameSource(bars, freq="5min", **kind), store, "m")
    assert _all_bars(store)["factor"].to_list() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


def test_step_of_pre_close_across_a_long_gap_is_warned_of(tmp_path: Path) -> None:
    bars = pl.DataFrame(
        {
            "time": [datetime(2015, 1, 5), datetime(2015, 3, 5), datetime(2015, 3, 6)],
            "symbol": ["600000.SH"] * 3,
            "close": [10.0, 12.0, 12.1],
            "pre_close": [9.9, 11.8, 12.0],
        }
    )
    kind = {"calendar": "XSHG", "timezone": "Asia/Shanghai", "price_basis": "raw"}
    report = import_source(FrameSource(bars, **kind), Store(tmp_path), "m")
    assert [p.severity for p in report.problems] == ["warning"]
    assert "corporate action of 0.8475" in report.problems[0].message
    assert report.problems[0].row == 1


def test_update_keeps_listing_facts_it_does_not_bring(tmp_path: Path) -> None:
    bars = make_bars()
    facts = pl.DataFrame(
        {"symbol": ["AAA", "BBB"], "listed": [date(2010, 1, 4)] * 2, "name": ["a", "b"]}
    )
    store = Store(tmp_path)
    import_source(FrameSource(bars, instruments=facts), store, "m")
    tail = bars.filter(pl.col("time") >= datetime(2016, 12, 1))
    newer = pl.DataFrame({"symbol": ["BBB"], "delisted": [date(2017, 1, 3)]})
    import_source(FrameSource(tail, instruments=newer), store, "m", update=True)
    table = store.symbols("m")
    assert table["listed"].to_list() == [date(2010, 1, 4), date(2010, 1, 4), None]
    assert table["delisted"].to_list() == [None, date(2017, 1, 3), None]
    twice = pl.concat([facts, facts])
    with pytest.raises(DataError, match="AAA, BBB more than once"):
        import_source(FrameSource(bars, instruments=twice), store, "m")


def test_dividend_restated_by_the_vendor_leaves_volume_alone(tmp_path: Path) -> None:
    bars = make_bars().drop("factor")
    store = Store(tmp_path)
    import_source(FrameSource(bars, price_basis="adjusted"), store, "m")
    before = _all_bars(store).filter(pl.col("time") >= datetime(2016, 12, 1))
    tail = bars.filter(pl.col("time") >= datetime(2016, 12, 1)).with_columns(
        pl.col("open", "high", "low", "close") * 0.9
    )
    import_source(FrameSource(tail, price_basis="adjusted"), store, "m", update=True)
    after = _all_bars(store).filter(pl.col("time") >= datetime(2016, 12, 1))
    for column in ("close", "volume"):
        assert ((after[column] - before[column]) / before[column]).abs().max() < 1e-9


def test_field_without_a_single_value_is_not_a_field_of_the_dataset(tmp_path: Path) -> None:
    bars = make_bars().with_columns(volume=pl.lit(None, dtype=pl.Float64))
    manifest = import_source(FrameSource(bars), Store(tmp_path), "m").manifest
    assert "volume" not in manifest.info.fields
    assert "open" in manifest.info.fields


def test_membership_can_be_replaced_without_touching_bars(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = import_source(FrameSource(make_bars()), store, "m").manifest
    intervals = pl.DataFrame({"symbol": ["AAA"], "start": [date(2015, 1, 2)], "end": [None]})
    new = store.replace_table(
        "m", "membership", intervals.with_columns(pl.col("end").cast(pl.Date))
    )
    assert new.content_hash != old.content_hash
    assert new.partitions == old.partitions
    table = store.table("m", "membership")
    assert table is not None
    assert table["symbol"].to_list() == ["AAA"]
    assert check_stored(store, "m") == []


def test_changed_file_is_found_by_check(tmp_path: Path) -> None:
    store = Store(tmp_path)
    manifest = import_source(FrameSource(make_bars()), store, "m").manifest
    path = tmp_path / "m" / manifest.version / "bars" / "2015.parquet"
    pl.read_parquet(path).with_columns(pl.col("volume") + 1).write_parquet(path)
    problems = check_stored(store, "m")
    assert [p.file for p in problems if "not what was imported" in p.message] == [str(path)]
    path.write_bytes(path.read_bytes()[:-100])
    assert any("damaged" in p.message for p in check_stored(store, "m"))


def test_second_import_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with (
        exclusive_lock(tmp_path / "m" / ".lock", "dataset 'm'"),
        pytest.raises(StoreError, match="another process"),
    ):
        import_source(FrameSource(make_bars()), Store(tmp_path), "m")


def test_source_without_one_good_row_lists_what_is_wrong(tmp_path: Path) -> None:
    bad = make_bars(("AAA",)).with_columns(close=-pl.col("close"))
    for quarantine in (False, True):
        with pytest.raises(InvalidDataError, match="is not positive"):
            import_source(FrameSource(bad), Store(tmp_path), "m", quarantine=quarantine)
    assert not (tmp_path / "m").exists()  # nothing is left behind


def test_clean_import_removes_the_quarantine_of_the_one_before(tmp_path: Path) -> None:
    bars = make_bars(("AAA",))
    bad = bars.with_columns(
        close=pl.when(pl.int_range(pl.len()) == 7).then(-1.0).otherwise(pl.col("close"))
    )
    aside = import_source(FrameSource(bad), Store(tmp_path), "m", quarantine=True).quarantine
    assert aside is not None
    assert aside.exists()
    import_source(FrameSource(bars), Store(tmp_path), "m")
    assert not aside.exists()


def test_source_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no bars to import"):
        import_source(FrameSource(make_bars().clear()), Store(tmp_path), "m")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
def test_dataset_names_stay_inside_the_store(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="dataset name"):
        Store(tmp_path).directory(name)


def test_damaged_manifest_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_source(FrameSource(make_bars()), store, "m")
    current = tmp_path / "m" / "CURRENT.json"
    current.write_text(current.read_text()[:50])
    with pytest.raises(StoreError, match=r"CURRENT\.json: missing or damaged"):
        store.manifest("m")
    current.write_text(json.dumps({"format": 99}))
    with pytest.raises(StoreError, match="another version"):
        store.manifest("m")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from markets import FrameSource, make_bars
from echelon.data import importing
from echelon.data.store import Store
import echelon.data.store as store_module

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

class Dying(FrameSource):
    def frames(self, since=None):
        pieces = super().frames(since)
        yield next(pieces)
        if {stage!r} == "reading":
            die()
        yield from pieces

importing._SPILL_ROWS = 100
if {stage!r} == "merging":
    importing.symbols_table = die
if {stage!r} == "publishing":
    store_module.files.write_json = die
bars = make_bars(seed=9)
importing.import_source(Dying(bars, pieces=4), Store(Path({root!r})), "m")
"""


@pytest.fixture
def stored(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    import_source(FrameSource(make_bars(seed=1)), store, "m")
    return store


@pytest.mark.parametrize("stage", ["reading", "merging", "publishing"])
def test_killed_import_leaves_the_store_as_it_was(stage: str, stored: Store) -> None:
    before = stored.manifest("m")
    bars = _all_bars(stored)
    script = KILLED.format(tests=str(Path(__file__).parent), stage=stage, root=str(stored.root))
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert stored.manifest("m") == before
    assert _all_bars(stored).equals(bars)
    assert check_stored(stored, "m") == []
    # The next import cleans up after the dead one and works.
    after = import_source(FrameSource(make_bars(seed=9)), stored, "m").manifest
    assert after.content_hash != before.content_hash
    assert not list(stored.directory("m").glob(".staging-*"))
