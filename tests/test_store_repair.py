"""The store when things go wrong: damage is found and mended, and readers see one version."""

from __future__ import annotations

import json
import logging
import os
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from markets import FrameSource, make_bars, qtmrl_config

from echelon.data import checking
from echelon.data import store as store_module
from echelon.data.build import build_panel
from echelon.data.checking import check_source, check_stored
from echelon.data.datasets import ensure_dataset
from echelon.data.importing import Extras, import_source
from echelon.data.store import Store
from echelon.data.views import TruncatedView
from echelon.errors import StoreError
from echelon.files import link_or_copy


@pytest.fixture(autouse=True)
def _audible() -> None:
    logging.getLogger("echelon").propagate = True


def _tenfold(bars: pl.DataFrame) -> pl.DataFrame:
    return bars.with_columns(pl.col("open", "high", "low", "close") * 10)


def _only_aaa() -> pl.DataFrame:
    return pl.DataFrame(
        {"symbol": ["AAA"], "start": [date(2015, 1, 2)], "end": [None]},
        schema={"symbol": pl.String, "start": pl.Date, "end": pl.Date},
    )


def test_pinned_store_shows_one_version_while_another_is_imported(tmp_path: Path) -> None:
    bars = make_bars()
    store = Store(tmp_path)
    old = import_source(FrameSource(bars), store, "m").manifest
    pinned = store.pin_dataset("m")
    before = build_panel(store, "m")
    new = import_source(FrameSource(_tenfold(bars), timezone="Asia/Tokyo"), store, "m").manifest
    assert pinned.manifest("m") == old
    assert store.manifest("m") == new
    after = build_panel(pinned, "m")
    assert (after.close == before.close).all()
    assert (after.anchor == before.anchor).all()
    assert after.timezone == "America/New_York"
    assert build_panel(store, "m").close[0, 0] == pytest.approx(10 * before.close[0, 0])


def test_pinned_version_that_two_imports_removed_is_a_store_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_source(FrameSource(make_bars()), store, "m")
    pinned = store.pin_dataset("m")
    for seed in (1, 2):
        import_source(FrameSource(make_bars(seed=seed)), store, "m")
    with pytest.raises(StoreError, match=r"symbols\.parquet: missing or damaged"):
        pinned.symbols("m")


def test_pinned_view_stays_a_view(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_source(FrameSource(make_bars()), store, "m")
    cut = store.manifest("m").span[0]
    view = TruncatedView(store, cut).pin_dataset("m")
    import_source(FrameSource(make_bars(seed=1)), store, "m")
    assert build_panel(view, "m").shape == (1, 3)


def test_view_of_a_pinned_store_is_pinned(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_source(FrameSource(make_bars()), store, "m")
    first, last = store.manifest("m").span
    view = TruncatedView(store.pin_dataset("m"), last)
    import_source(FrameSource(make_bars(last=first.date())), store, "m")
    assert build_panel(view, "m").times[-1] == np.datetime64(last)


def test_import_while_a_panel_is_built_does_not_mix_versions(tmp_path: Path) -> None:
    bars = make_bars()

    class Racing(Store):
        def symbols(self, name: str) -> pl.DataFrame:
            table = super().symbols(name)
            import_source(FrameSource(_tenfold(bars)), Store(tmp_path), name)
            return table

    import_source(FrameSource(bars), Store(tmp_path), "m")
    before = build_panel(Store(tmp_path), "m")
    during = build_panel(Racing(tmp_path), "m")
    assert (during.close == before.close).all()
    assert (during.close[0] == during.anchor).all()


@pytest.mark.parametrize(
    "other",
    [
        {"timezone": "Asia/Tokyo"},
        {"calendar": "data"},
        {"price_basis": "raw"},
        {"fields": frozenset({"close", "volume"})},
    ],
)
def test_hash_depends_on_the_kind_of_bars(other: dict[str, Any], tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = import_source(FrameSource(make_bars()), store, "one").manifest
    two = import_source(FrameSource(make_bars(), **other), store, "two").manifest
    assert one.partitions == two.partitions
    assert one.content_hash != two.content_hash


def test_import_of_the_same_content_mends_a_damaged_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = import_source(FrameSource(make_bars()), store, "m").manifest
    (tmp_path / "m" / first.version / "bars" / "2015.parquet").write_bytes(b"junk")
    (tmp_path / "m" / first.version / "symbols.parquet").unlink()
    for _ in range(3):  # whichever name the version has by now
        again = import_source(FrameSource(make_bars()), store, "m").manifest
        assert again.content_hash == first.content_hash
        assert check_stored(store, "m") == []
        shutil.rmtree(tmp_path / "m" / again.version / "bars")


@pytest.mark.parametrize("text", ["", '{"format": 1', '{"format": 99}', "[]", '{"format": 1}'])
def test_unusable_manifest_does_not_prevent_an_import(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    import_source(FrameSource(make_bars()), store, "m")
    (tmp_path / "m" / "CURRENT.json").write_text(text)
    with pytest.raises(StoreError, match=r"CURRENT\.json"):
        store.manifest("m")
    import_source(FrameSource(make_bars(seed=1)), store, "m")
    assert "counts as not there" in caplog.text
    assert check_stored(store, "m") == []


def test_update_of_an_unusable_dataset_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_source(FrameSource(make_bars()), store, "m")
    (tmp_path / "m" / "CURRENT.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StoreError, match="another version"):
        import_source(FrameSource(make_bars()), store, "m", update=True)


def test_unusable_manifest_is_replaced_by_ensure_dataset(tmp_path: Path, bars_file: Path) -> None:
    config = qtmrl_config(tmp_path, bars_file)
    before = ensure_dataset(config)
    (tmp_path / "store" / before.name / "CURRENT.json").write_text("{")
    assert ensure_dataset(config).content_hash == before.content_hash
    assert check_stored(Store(tmp_path / "store"), before.name) == []


def test_new_importing_code_imports_the_same_file_again(
    tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qtmrl_config(tmp_path, bars_file)
    done: list[object] = []
    before = ensure_dataset(config, notice=done.append)
    ensure_dataset(config, notice=done.append)
    assert len(done) == 1
    monkeypatch.setattr(store_module, "digest_code", lambda *_: "other code")
    after = ensure_dataset(config, notice=done.append)
    assert len(done) == 2
    assert (after.name, after.content_hash) == (before.name, before.content_hash)
    assert after.fingerprint != before.fingerprint


def test_importing_code_is_all_of_the_sources(tmp_path: Path) -> None:
    package = Path(store_module.__file__).parents[1]
    wanted = {p.stem for p in (package / "data" / "sources").glob("*.py")}
    assert {"files", "qlib", "ticks", "_vendor"} <= wanted
    some = store_module.digest_code("data/sources/files.py")
    assert some != store_module.digest_code("data/sources/*.py")
    assert some == store_module.digest_code("data/sources/files.py", "data/sources/fil*.py")


def test_version_is_on_disk_before_the_manifest_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    real_sync, real_write = os.fsync, store_module.files.write_json

    def note(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        real_sync(handle)

    def write(path: Path, tree: dict[str, Any], **how: Any) -> None:
        version = tmp_path / "m" / tree["version"]
        files = list(version.rglob("*"))
        assert len(files) >= 4  # bars, two years, symbols
        assert {f.stat().st_ino for f in (version, *files)} <= synced
        real_write(path, tree, **how)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(store_module.files, "write_json", write)
    import_source(FrameSource(make_bars()), Store(tmp_path), "m")
    assert "m" in Store(tmp_path)


def _no_links(source: object, target: object) -> None:
    raise OSError(95, "Operation not supported")


def test_store_works_on_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _no_links)
    bars = make_bars()
    store = Store(tmp_path)
    import_source(FrameSource(bars), store, "m")
    store.replace_table("m", "membership", _only_aaa())
    tail = bars.filter(pl.col("time") >= date(2016, 12, 1))
    import_source(FrameSource(tail), store, "m", update=True)
    assert store.manifest("m").rows == bars.height
    assert check_stored(store, "m") == []


def test_link_or_copy_never_writes_through_an_existing_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("one")
    two.write_text("two")
    with pytest.raises(FileExistsError):
        link_or_copy(one, two)
    assert two.read_text() == "two"


@pytest.mark.parametrize("table", ["symbols", "membership", "benchmark"])
def test_changed_table_is_found_by_check(table: str, tmp_path: Path) -> None:
    bars = make_bars()
    index = bars.group_by("time").agg(pl.col("close").mean()).sort("time")
    store = Store(tmp_path)
    source = FrameSource(bars, membership=_only_aaa(), benchmark=index)
    done = import_source(source, store, "m").manifest
    assert check_stored(store, "m") == []
    path = tmp_path / "m" / done.version / f"{table}.parquet"
    frame = pl.read_parquet(path)
    frame.head(frame.height - 1).write_parquet(path)
    (problem,) = check_stored(store, "m")
    assert (problem.file, problem.severity) == (str(path), "error")
    assert "not what was imported" in problem.message
    path.write_bytes(b"junk")
    assert [p.file for p in check_stored(store, "m")] == [str(path)]


def test_oddities_are_the_same_in_chunks_and_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = make_bars(tuple("ABCDEFG")).with_columns(amount=pl.col("close") * pl.col("volume") * 100)
    late = pl.col("time") >= date(2016, 3, 1)
    broken = bars.filter(pl.col("time").dt.date() != date(2015, 7, 7)).with_columns(
        close=pl.when(late & pl.col("symbol").is_in(["B", "F"]))
        .then(pl.col("close") * 3)
        .when(late & (pl.col("symbol") == "D"))
        .then(20.0)
        .otherwise(pl.col("close"))
    )
    source = FrameSource(
        broken.drop("open", "high", "low"),
        price_basis="raw",
        fields=frozenset({"close", "volume", "amount", "factor"}),
    )
    whole = check_source(source, Extras(), tmp_path / "whole")
    fields = {p.field for p in whole}
    assert {"close", "time", "volume, amount"} <= fields
    monkeypatch.setattr(checking, "_CHUNK_ROWS", 1000)  # two symbols
    assert check_source(source, Extras(), tmp_path / "chunks") == whole
