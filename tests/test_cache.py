"""The cache never changes a result: cold, warm, shared, damaged, or with Redis down."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import redis
from markets import qtmrl_config

from echelon.data.build import build_panel
from echelon.data.importing import import_source
from echelon.data.sources import open_source
from echelon.data.store import Store
from echelon.errors import ConfigError, SourceError
from echelon.features import cache as cache_module
from echelon.features import prepare
from echelon.features.cache import LocalCache, RedisCache
from echelon.features.registry import select

# The package offers the function under the module's name.
prepare_module = importlib.import_module("echelon.features.prepare")


@pytest.fixture(autouse=True)
def _audible() -> None:
    logging.getLogger("echelon").propagate = True


def test_second_prepare_comes_from_the_cache_and_is_the_same(
    tmp_path: Path, bars_file: Path
) -> None:
    cold = prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "one")
    warm = prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "two")
    assert (cold.cached, warm.cached) == (False, True)
    assert warm.prepared.manifest == cold.prepared.manifest
    warm.prepared.verify()
    assert np.array_equal(warm.prepared.x, cold.prepared.x)


@pytest.mark.parametrize(
    "change",
    [
        "window=21",
        "features.indicators.sma=[10]",
        "normalization.include=[OHLCV]",
        "split.train=[2015-01-02, 2016-01-28]",
        "assets=[AAPL, MSFT]",
        "data.delist_after=100",
        "data.end=2016-12-29",
        "data.start=2015-01-05",
        "data.limits='on'",
        "data.timezone=Asia/Tokyo",
        "data.calendar=data",
        "data.price_basis=raw",
    ],
)
def test_anything_that_matters_misses_the_cache(
    change: str, tmp_path: Path, bars_file: Path
) -> None:
    prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "one")
    assert not prepare(qtmrl_config(tmp_path, bars_file, change), tmp_path / "two").cached


def _series(path: Path, value: float) -> Path:
    rows = [f"cpi,2015-{m:02d},2015-{m:02d}-20T20:30:00+00:00,{value + m}" for m in range(1, 13)]
    path.write_text("\n".join(["series,period,published,value", *rows]) + "\n")
    return path


def test_content_of_an_exogenous_file_is_part_of_the_key(tmp_path: Path, bars_file: Path) -> None:
    file = _series(tmp_path / "cpi.csv", 100.0)
    config = qtmrl_config(tmp_path, bars_file, f"data.exogenous=[{{path: {file}}}]")
    prepare(config, tmp_path / "one")
    assert prepare(config, tmp_path / "two").cached
    _series(file, 200.0)
    assert not prepare(config, tmp_path / "three").cached


def test_timezone_of_the_bars_reaches_a_series_through_the_cache(
    tmp_path: Path, bars_file: Path
) -> None:
    file = _series(tmp_path / "cpi.csv", 100.0)
    sets = [
        prepare(
            qtmrl_config(
                tmp_path,
                bars_file,
                *("data.calendar=data", f"data.timezone={zone}"),
                f"data.exogenous=[{{path: {file}}}]",
            ),
            tmp_path / str(k),
        ).prepared
        for k, zone in enumerate(("America/New_York", "Asia/Tokyo"))
    ]
    assert [s.manifest["timezone"] for s in sets] == ["America/New_York", "Asia/Tokyo"]
    # Published at 20:30 UTC: on the same day in New York, on the next morning in Tokyo.
    assert not np.array_equal(sets[0].x, sets[1].x)


def test_missing_exogenous_file_is_named(tmp_path: Path, bars_file: Path) -> None:
    config = qtmrl_config(tmp_path, bars_file, f"data.exogenous=[{{path: {tmp_path}/no.csv}}]")
    with pytest.raises(ConfigError, match=r"data\.exogenous.*no\.csv does not exist"):
        prepare(config, tmp_path / "one")
    prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "one")  # imports the bars
    dataset = Store(tmp_path / "store").manifest(Store(tmp_path / "store").datasets()[0])
    selection = select(config.features, frozenset({"close"}))
    with pytest.raises(SourceError, match=r"no\.csv: cannot be read .*data\.exogenous"):
        prepare_module.cache_key(config, dataset, prepare_module.source_ids(selection))


def test_content_of_a_factor_file_is_part_of_the_key(tmp_path: Path, bars_file: Path) -> None:
    file = tmp_path / "mine.py"
    code = "from echelon.features import factor\n\n@factor(lookback=1)\ndef mine(bars):\n"
    file.write_text(f"{code}    return bars.close\n")
    config = qtmrl_config(tmp_path, bars_file, f"features.modules=[{file}]")
    prepare(config, tmp_path / "one")
    assert prepare(config, tmp_path / "two").cached
    file.write_text(f"{code}    return bars.close * 2\n")
    assert not prepare(config, tmp_path / "three").cached


@pytest.mark.parametrize("library", ["numpy", "numba", "polars", "exchange_calendars"])
def test_another_version_of_a_library_misses_the_cache(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = prepare_module.metadata.version
    prepare_module.code_hash.cache_clear()
    now = prepare_module.code_hash()
    monkeypatch.setattr(
        prepare_module.metadata, "version", lambda name: "0" if name == library else real(name)
    )
    prepare_module.code_hash.cache_clear()
    other = prepare_module.code_hash()
    prepare_module.code_hash.cache_clear()
    assert now != other


def test_import_during_prepare_neither_mixes_versions_nor_spoils_the_cache(
    tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qtmrl_config(tmp_path, bars_file, "data.dataset=m")
    store = Store(tmp_path / "store")
    nobody = pl.DataFrame(
        {"symbol": ["AAPL"], "start": [date(2015, 1, 2)], "end": [date(2015, 1, 5)]}
    )

    def racing(*args: object) -> object:
        store.replace_table("m", "membership", nobody)
        return build_panel(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "build_panel", racing)
        first = prepare(config, tmp_path / "one")
    assert store.manifest("m").content_hash != first.dataset.content_hash
    member = first.prepared.array("member")
    assert member is not None
    assert member[-1].all()
    again = import_source(open_source(config), store, "m").manifest
    second = prepare(config, tmp_path / "two")
    assert again.content_hash == first.dataset.content_hash
    assert second.cached
    assert second.prepared.manifest == first.prepared.manifest


def test_seed_and_training_keys_do_not_miss_the_cache(tmp_path: Path, bars_file: Path) -> None:
    prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "one")
    assert prepare(qtmrl_config(tmp_path, bars_file, "train.gamma=0.5"), tmp_path / "two").cached


def test_damaged_entry_costs_a_warning_and_a_computation(
    tmp_path: Path, bars_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cold = prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "one")
    good = cold.prepared.manifest["content_hash"]
    entry = next(p for p in (tmp_path / "cache").iterdir() if p.is_dir())
    size = (entry / "X.npy").stat().st_size
    with (entry / "X.npy").open("r+b") as handle:  # the same size, other bytes
        handle.seek(size // 2)
        handle.write(b"\xff" * 64)
    again = prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "two")
    assert not again.cached
    assert "damaged" in caplog.text
    assert again.prepared.manifest["content_hash"] == good
    again.prepared.verify()


@pytest.fixture
def entry(tmp_path: Path) -> LocalCache:
    """A cache with the entry `k` of the files a and b."""
    cache = LocalCache(tmp_path / "cache", 10**9)
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_text(name)
    cache.put("k", source)
    (tmp_path / "into").mkdir()
    return cache


def test_entry_removed_while_it_is_fetched_is_a_miss(
    entry: LocalCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = cache_module.link_or_copy

    def vanishing(source: Path, target: Path) -> None:
        real(source, target)
        shutil.rmtree(tmp_path / "cache" / "k")

    monkeypatch.setattr(cache_module, "link_or_copy", vanishing)
    assert not entry.get("k", tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []
    assert "computing again" in caplog.text


def test_read_only_cache_is_still_read(
    entry: LocalCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", refuse)
        patch.setattr(os, "link", refuse)  # another device: files are copied
        patch.setattr(cache_module, "link_or_copy", lambda s, t: shutil.copyfile(s, t))
        assert entry.get("k", tmp_path / "into")
    assert (tmp_path / "into" / "b").read_text() == "b"


def test_read_only_cache_costs_a_warning_when_written(
    entry: LocalCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    entry.put("other", tmp_path / "source")
    assert "entry not kept" in caplog.text
    assert not (tmp_path / "cache" / "other").exists()


@pytest.mark.parametrize("text", ["", "[]", "7", '{"a": 3}', '{"a": [1, 2]}'])
def test_senseless_description_of_an_entry_is_a_miss(
    text: str, entry: LocalCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache" / "k" / "entry.json").write_text(text)
    assert not entry.get("k", tmp_path / "into")
    assert "damaged" in caplog.text


def test_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache", max_bytes=2500)
    for k, name in enumerate(("a", "b", "c")):
        source = tmp_path / name
        source.mkdir()
        (source / "x").write_bytes(os.urandom(1000))
        cache.put(name, source)
        os.utime(tmp_path / "cache" / name, (k, k))
    into = tmp_path / "into"
    into.mkdir()
    assert not cache.get("a", into)
    assert cache.get("b", into)
    other = tmp_path / "other"
    other.mkdir()
    assert cache.get("c", other)


def test_entry_travels_through_redis(
    tmp_path: Path, bars_file: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_REDIS_URL", redis_url)
    monkeypatch.setattr("echelon.features.cache._PIECE", 100_000)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    here = prepare(qtmrl_config(tmp_path, bars_file, "data.cache.redis=true"), tmp_path / "one")
    elsewhere = qtmrl_config(
        tmp_path, bars_file, "data.cache.redis=true", f"data.cache.dir={tmp_path}/other-machine"
    )
    there = prepare(elsewhere, tmp_path / "two")
    assert (here.cached, there.cached) == (False, True)
    there.prepared.verify()
    assert there.prepared.manifest == here.prepared.manifest


def test_damaged_or_partly_evicted_redis_entry_is_computed_anew(
    tmp_path: Path,
    bars_file: Path,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ECHELON_REDIS_URL", redis_url)
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    config = qtmrl_config(tmp_path, bars_file, "data.cache.redis=true")
    good = prepare(config, tmp_path / "one").prepared.manifest["content_hash"]
    chunk = next(k for k in client.scan_iter(match="*X.npy:0"))
    for harm in ("change", "delete"):
        client.set(chunk, b"other bytes") if harm == "change" else client.delete(chunk)
        other = qtmrl_config(
            tmp_path, bars_file, "data.cache.redis=true", f"data.cache.dir={tmp_path}/{harm}"
        )
        again = prepare(other, tmp_path / f"run-{harm}")
        assert not again.cached
        assert again.prepared.manifest["content_hash"] == good
        again.prepared.verify()
    assert caplog.text.count("is damaged") == 2
    client.close()


def test_redis_that_is_down_costs_a_warning(
    tmp_path: Path,
    bars_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ECHELON_REDIS_URL", "redis://127.0.0.1:1/0")
    report = prepare(qtmrl_config(tmp_path, bars_file, "data.cache.redis=true"), tmp_path / "one")
    report.prepared.verify()
    assert not report.cached
    assert "Redis cache: cannot read" in caplog.text
    assert "Redis cache: cannot write" in caplog.text


def test_redis_without_or_with_a_senseless_url_is_a_config_error(
    tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qtmrl_config(tmp_path, bars_file, "data.cache.redis=true")
    monkeypatch.delenv("ECHELON_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="ECHELON_REDIS_URL is not set"):
        prepare(config, tmp_path / "one")
    with pytest.raises(ConfigError, match="ECHELON_REDIS_URL"):
        RedisCache.from_url("nonsense")
