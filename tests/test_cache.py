"""The cache never changes a result: cold, warm, shared, damaged, or with Redis down."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import redis
from markets import qtmrl_config

from echelon.errors import ConfigError
from echelon.features import prepare
from echelon.features.cache import LocalCache, RedisCache


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
    ],
)
def test_anything_that_matters_misses_the_cache(
    change: str, tmp_path: Path, bars_file: Path
) -> None:
    prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "one")
    assert not prepare(qtmrl_config(tmp_path, bars_file, change), tmp_path / "two").cached


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
    monkeypatch.setattr("echelon.features.cache._CHUNK", 100_000)
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
