"""A cache that holds anything at all costs a warning and a computation, and writes nowhere else."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from markets import qtmrl_config
from shells import Shell, tiny

from echelon.config.data import CacheConfig
from echelon.errors import ConfigError
from echelon.features import cache as cache_module
from echelon.features import prepare
from echelon.features.cache import LocalCache, RedisCache, check_name, open_caches
from echelon.files import write_json

KEY = "a-key-of-the-tests-0123456789abcdef"
PREFIX = "echelon:prepared"


@pytest.fixture(autouse=True)
def _audible() -> None:
    logging.getLogger("echelon").propagate = True
    cache_module._warn_stranger.cache_clear()


@pytest.fixture
def client(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an empty Redis, which the environment names."""
    monkeypatch.setenv("ECHELON_REDIS_URL", redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


def _config(tmp_path: Path, bars: Path, machine: str, *more: str) -> Any:
    return qtmrl_config(
        tmp_path, bars, "data.cache.redis=true", f"data.cache.dir={tmp_path}/{machine}", *more
    )


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


class Entry:
    """A good entry in Redis, to be spoiled again and again."""

    def __init__(self, client: Any) -> None:
        self.client = client
        keys = sorted(client.scan_iter(match=f"{PREFIX}:*"), key=len)
        self.name = keys[0].decode()
        self.key = self.name.removeprefix(f"{PREFIX}:")
        self.values = {key: client.get(key) for key in keys}
        self.tree = json.loads(self.values[keys[0]])

    def restore(self) -> dict[str, Any]:
        self.client.flushall()
        for key, value in self.values.items():
            self.client.set(key, value)
        tree: dict[str, Any] = json.loads(json.dumps(self.tree))
        return tree

    def describe(self, tree: object) -> None:
        self.client.set(self.name, json.dumps(tree))


def _replace(entry: Entry, tree: dict[str, Any], name: str, data: bytes) -> None:
    """Another content under a name, with the digest that fits."""
    entry.client.set(f"{entry.name}:{name}:0", data)
    tree["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _other_key(entry: Entry, tree: dict[str, Any]) -> None:
    manifest = json.loads(entry.values[f"{entry.name}:manifest.json:0".encode()])
    _replace(entry, tree, "manifest.json", json.dumps(manifest | {"key": "0" * 64}).encode())


def _rename(name: object) -> Callable[[Entry, dict[str, Any]], None]:
    def harm(entry: Entry, tree: dict[str, Any]) -> None:
        file = tree["files"].pop("member.npy")
        tree["files"][name] = file
        data = entry.values[f"{entry.name}:member.npy:0".encode()]
        entry.client.set(f"{entry.name}:{name}:0", data)

    return harm


def _update(**changes: Any) -> Callable[[Entry, dict[str, Any]], None]:
    return lambda _entry, tree: tree.update(changes)


def _update_file(**changes: Any) -> Callable[[Entry, dict[str, Any]], None]:
    return lambda _entry, tree: tree["files"]["X.npy"].update(changes)


def _wrong_type(entry: Entry, _tree: dict[str, Any]) -> None:
    entry.client.delete(f"{entry.name}:X.npy:0")
    entry.client.lpush(f"{entry.name}:X.npy:0", "x")


def _other_prices(entry: Entry, _tree: dict[str, Any]) -> None:
    """A last price changed, in as many bytes, under the description as it was."""
    name = f"{entry.name}:close.npy:0"
    data = entry.values[name.encode()]
    entry.client.set(name, data[:-8] + bytes(8))


POISON: dict[str, Callable[[Entry, dict[str, Any]], None]] = {
    "path upwards": _rename("../../../planted"),
    "absolute path": _rename("/tmp/planted"),
    "backslash": _rename("..\\planted"),
    "dots": _rename(".."),
    "hidden": _rename(".planted"),
    "line break": _rename("a\nb"),
    "control": _rename("a\x1bb"),
    "description": _rename("entry.json"),
    "empty name": _rename(""),
    "long name": _rename("a" * 5000),
    "no files": _update(files={}),
    "files a list": _update(files=[1, 2]),
    "files null": _update(files=None),
    "many files": _update(files={f"f{k}": {"size": 1, "sha256": "0"} for k in range(500)}),
    "another key": _update(key="0" * 64),
    "another format": _update(format=1),
    "format of text": _update(format="2"),
    "no piece": _update(piece=0),
    "negative piece": _update(piece=-1),
    "huge piece": _update(piece=10**15),
    "tiny pieces": _update(piece=1),
    "huge file": _update_file(size=10**18),
    "negative size": _update_file(size=-5),
    "size of text": _update_file(size="12"),
    "size a float": _update_file(size=1.5),
    "size true": _update_file(size=True),
    "other digest": _update_file(sha256="0" * 64),
    "digest null": _update_file(sha256=None),
    "missing piece": lambda e, _t: e.client.delete(f"{e.name}:X.npy:0"),
    "longer piece": lambda e, _t: e.client.append(f"{e.name}:X.npy:0", b"x" * 1000),
    "piece of a list": _wrong_type,
    "other prices": _other_prices,
    "manifest of another key": _other_key,
    "manifest no JSON": lambda e, t: _replace(e, t, "manifest.json", b"{"),
    "manifest of a list": lambda e, t: _replace(e, t, "manifest.json", b"[]"),
    "manifest of bytes": lambda e, t: _replace(e, t, "manifest.json", b"\xff\xfe\x00"),
    "no manifest": lambda _e, t: t["files"].pop("manifest.json"),
    "no close": lambda _e, t: t["files"].pop("close.npy"),
    "other close": lambda e, t: _replace(e, t, "close.npy", b"\x93NUMPY junk"),
    "other splits": lambda e, t: _replace(e, t, "splits.json", b'{"train": 3}'),
    "one more array": lambda e, t: _replace(e, t, "limit_up.npy", b"junk"),
}


def test_poisoned_redis_costs_a_warning_and_a_computation(
    tmp_path: Path, bars_file: Path, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good = prepare(_config(tmp_path, bars_file, "sender"), tmp_path / "sent").prepared
    entry = Entry(client)
    cache = RedisCache(client)
    into = tmp_path / "a" / "b" / "c" / "into"
    into.mkdir(parents=True)
    before = _files(tmp_path)
    for name, poison in POISON.items():
        tree = entry.restore()
        poison(entry, tree)
        entry.describe(tree)
        caplog.clear()
        if cache.get(entry.key, into):  # whole in itself: the set is what is wrong
            staged = prepare_fetch([cache], entry.key, into)
            assert staged is None, name
        assert list(into.iterdir()) == [], name
        assert "damaged" in caplog.text or "cannot read" in caplog.text, name
        assert len(caplog.text) < 3000, name
        assert _files(tmp_path) == before, name
    tree = entry.restore()
    report = prepare(_config(tmp_path, bars_file, "receiver"), tmp_path / "received")
    assert report.cached
    assert report.prepared.manifest == good.manifest


class Metered:
    """A client that counts the bytes it is sent, and gives nothing of unknown size."""

    def __init__(self, client: Any) -> None:
        self.client, self.received = client, 0

    def getrange(self, key: str, start: int, end: int) -> bytes:
        data: bytes = self.client.getrange(key, start, end)
        self.received += len(data)
        return data


def test_no_more_is_fetched_than_an_entry_may_have(
    tmp_path: Path, bars_file: Path, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(_config(tmp_path, bars_file, "sender"), tmp_path / "sent")
    entry, into = Entry(client), tmp_path / "into"
    into.mkdir()
    limit = 64 * 1024 + 1  # of a description
    size = sum(file["size"] for file in entry.tree["files"].values())
    assert size > 10_000
    huge = b"x" * (20 << 20)
    for max_bytes, poison, said, most in (
        (1_000, lambda tree: None, "expected up to 1000", limit),
        (10**9, lambda tree: tree.update(piece=1), "pieces", limit),
        (10**9, lambda tree: client.set(entry.name, huge), "a description of more than", limit),
        (
            *(10**9, lambda tree: client.set(f"{entry.name}:X.npy:0", huge)),
            *("X.npy is missing or of another size", limit + size + 1),
        ),
    ):
        tree = entry.restore()
        tree["files"]["X.npy"]["size"] = max(tree["files"]["X.npy"]["size"], 1)
        if said == "pieces":
            tree["files"]["X.npy"]["size"] = 200_000
        poison(tree)
        if client.strlen(entry.name) < limit:
            entry.describe(tree)
        caplog.clear()
        metered = Metered(client)
        assert not RedisCache(metered, max_bytes=max_bytes).get(entry.key, into)  # type: ignore[arg-type]
        assert said in caplog.text
        assert metered.received <= most
        assert list(into.iterdir()) == []


def prepare_fetch(caches: Any, key: str, into: Path) -> int | None:
    """As `prepare` looks for a set."""
    import importlib

    module = importlib.import_module("echelon.features.prepare")
    for file in into.iterdir():
        file.unlink()
    found: int | None = module._fetch(caches, key, into)
    return found


@pytest.mark.parametrize(
    "name", ["path upwards", "manifest of another key", "huge file", "files a list"]
)
@pytest.mark.parametrize("signed", [False, True])
def test_prepare_ends_well_on_a_poisoned_redis(
    name: str,
    signed: bool,
    shell: Shell,
    bars_file: Path,
    tmp_path: Path,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if signed:  # by one who has the key: the content is what is wrong
        monkeypatch.setenv("ECHELON_CACHE_KEY", KEY)
    words = ("prepare", *tiny(bars_file, "data.cache.redis=true"), "--output-dir")
    shell.works(*words, "one")
    entry = Entry(client)
    tree = entry.restore()
    POISON[name](entry, tree)
    if signed:
        with_mac(tree)
    entry.describe(tree)
    shutil.rmtree("cache")
    _, err = shell.works(*words, "deep/er/two")
    assert "from the cache" not in err
    assert "computing again" in err
    assert not list(tmp_path.rglob("planted"))
    assert (tmp_path / "one/prepared/manifest.json").read_bytes() == (
        tmp_path / "deep/er/two/prepared/manifest.json"
    ).read_bytes()


def with_mac(tree: dict[str, Any]) -> None:
    """Sign a description, sensible or not, as its writer would."""
    import hmac

    text = json.dumps(tree | {"mac": None}, sort_keys=True, ensure_ascii=True)
    tree["mac"] = hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


def _mutated(draw: random.Random, tree: Any) -> Any:
    """A JSON tree with something in it replaced."""
    junk = [None, True, -1, 0, 2**70, 1.5, "", "../x", "a" * 200, [], {}, [[[]]], {"a": None}]
    if draw.random() < 0.15 or not isinstance(tree, dict | list) or not tree:
        return draw.choice(junk)
    copy = tree.copy()
    at = draw.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    if draw.random() < 0.1:
        del copy[at]
    else:
        copy[at] = _mutated(draw, copy[at])
    return copy


def test_fuzzed_descriptions_are_never_an_error(
    tmp_path: Path, bars_file: Path, client: Any
) -> None:
    prepare(_config(tmp_path, bars_file, "sender"), tmp_path / "sent")
    entry = Entry(client)
    cache = RedisCache(client)
    into = tmp_path / "into"
    into.mkdir()
    draw = random.Random(7)
    hits = 0
    for _ in range(300):
        kind = draw.random()
        if kind < 0.8:
            text = json.dumps(_mutated(draw, entry.tree)).encode()
        elif kind < 0.9:
            text = draw.randbytes(draw.randrange(200))
        else:
            whole = bytearray(json.dumps(entry.tree).encode())
            whole[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
            text = bytes(whole)
        client.set(entry.name, text)
        hits += prepare_fetch([cache], entry.key, into) is not None
        assert {path.parent for path in tmp_path.rglob("x")} == set()
        for file in into.iterdir():
            file.unlink()
    assert hits < 100
    for nested in (b"[" * 50_000, b'{"files":' * 5_000, b"9" * 60_000, b"x" * 200_000):
        client.set(entry.name, nested)
        assert not cache.get(entry.key, into)


def test_entry_without_the_right_mac_is_not_used(
    tmp_path: Path,
    bars_file: Path,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def cached(machine: str) -> bool:
        caplog.clear()
        return prepare(_config(tmp_path, bars_file, machine), tmp_path / f"run-{machine}").cached

    assert not cached("sender")  # no key: not signed
    monkeypatch.setenv("ECHELON_CACHE_KEY", KEY)
    assert not cached("one")
    assert "not signed with this ECHELON_CACHE_KEY" in caplog.text
    assert KEY not in caplog.text
    assert cached("two")  # `one` has put its own there
    entry = Entry(client)
    for field, value in (("size", 1), ("sha256", "0" * 64)):
        tree = entry.restore()
        tree["files"]["X.npy"][field] = value
        entry.describe(tree)
        assert not cached(f"changed-{field}")
        assert "not signed" in caplog.text
    entry.restore()
    monkeypatch.setenv("ECHELON_CACHE_KEY", KEY + "x")
    assert not cached("other-key")
    monkeypatch.delenv("ECHELON_CACHE_KEY")
    assert cached("keyless")  # on this machine, a signature does no harm


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("redis://127.0.0.1:1/0", True),
        ("redis://127.8.9.1:1/0", True),
        ("redis://localhost:1/0", True),
        ("redis://[::1]:1/0", True),
        ("redis://", True),
        ("unix:///run/redis.sock", True),
        ("redis://10.0.0.7:6379/0", False),
        ("rediss://cache.example:6379/0", False),
        ("redis://localhost.example:6379/0", False),
    ],
)
def test_redis_of_another_machine_needs_a_key_or_trust(
    url: str,
    used: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ECHELON_REDIS_URL", url)
    config = CacheConfig(dir=tmp_path, redis=True)
    for _ in range(3):
        assert (len(open_caches(config)) == 2) is used
    assert caplog.text.count("data.cache.redis_trusted") == (0 if used else 1)
    assert len(open_caches(config.model_copy(update={"redis_trusted": True}))) == 2
    monkeypatch.setenv("ECHELON_CACHE_KEY", KEY)
    assert len(open_caches(config)) == 2
    monkeypatch.setenv("ECHELON_CACHE_KEY", "  ")
    assert (len(open_caches(config)) == 2) is used


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/", "a/b", "a\\b", "a\x00", "a\n", "-a", ".a", "a..b", "é", "a" * 101]
)
def test_names_that_are_no_plain_file_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        check_name(name)


@pytest.mark.parametrize("name", ["X.npy", "limit_up.npy", "manifest.json", "a-b"])
def test_plain_file_names_are_taken(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["../stolen", "link", "pipe", "sub/x"])
def test_poisoned_local_entry_is_a_miss(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = LocalCache(tmp_path / "cache", 10**9)
    source, into = tmp_path / "source", tmp_path / "in" / "to"
    source.mkdir()
    into.mkdir(parents=True)
    (source / "a").write_text("a")
    cache.put("k", source)
    entry = tmp_path / "cache" / "k"
    (tmp_path / "cache" / "stolen").write_text("a")
    (entry / "link").symlink_to(tmp_path / "cache" / "stolen")
    os.mkfifo(entry / "pipe")
    (entry / "sub").mkdir()
    (entry / "sub" / "x").write_text("a")
    tree = json.loads((entry / "entry.json").read_text())
    tree["files"] = {name: tree["files"]["a"]}
    write_json(entry / "entry.json", tree)
    assert not cache.get("k", into)
    assert "damaged" in caplog.text
    assert _files(tmp_path / "in") == set()


def test_local_entry_with_other_content_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = LocalCache(tmp_path / "cache", 10**9)
    source, into = tmp_path / "source", tmp_path / "into"
    source.mkdir()
    into.mkdir()
    (source / "a").write_text("abc")
    cache.put("k", source)
    kept = tmp_path / "cache" / "k" / "a"
    kept.unlink()  # a hard link of the source
    kept.write_text("abd")
    assert not cache.get("k", into)
    assert "a was changed" in caplog.text
    assert list(into.iterdir()) == []


SECRETS = ("hun/ter2", "hun?ter2", "hun#ter2", "hun@ter/2", "hun:ter/2", "123/ter2", "/ter2hun")


@pytest.mark.parametrize("password", SECRETS)
@pytest.mark.parametrize(
    "form",
    [
        "redis://:{}@127.0.0.1:1/0",
        "redis://user:{}@127.0.0.1:1/0",
        "redis://{}@127.0.0.1:1/0",
        "rediss://:{}@127.0.0.1:1/0",
        "unix://:{}@/nowhere.sock",
        "redis://:{}@127.0.0.1:port/0",
        "{}",
    ],
)
def test_password_is_never_printed(
    form: str, password: str, shell: Shell, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = form.format(password)
    monkeypatch.setenv("ECHELON_REDIS_URL", url)
    with pytest.raises(ConfigError, match="ECHELON_REDIS_URL") as caught:
        RedisCache.from_url(url)
    shown = "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None
    parts = [part for part in ("hun", "ter2", "123") if part in password]
    assert not [part for part in parts if part in shown.replace("test_cache", "")], shown


def test_password_is_not_printed_by_a_command(
    shell: Shell, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in ("redis://:hun/ter2@127.0.0.1:1/0", "redis://:hunter2@127.0.0.1:1/0?hunter2=1"):
        monkeypatch.setenv("ECHELON_REDIS_URL", url)
        code, out, err = shell(
            *("prepare", *tiny(bars_file, "data.cache.redis=true"), "--log-level", "DEBUG")
        )
        assert code in (0, 3)
        assert "hun" not in out + err
        assert "ter2" not in out + err
        assert "Redis cache: cannot" in err or "ECHELON_REDIS_URL cannot be used" in err


def test_encoded_password_reaches_the_server_as_it_is() -> None:
    cache = RedisCache.from_url("redis://:a%2Fb%3Fc%23d%40e@127.0.0.1:1/0")
    assert cache.client.connection_pool.connection_kwargs["password"] == "a/b?c#d@e"
