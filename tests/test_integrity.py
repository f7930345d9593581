"""What is on disk is verified when it is opened: prepared sets of runs, and the store."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from markets import qtmrl_config
from shells import Shell, tiny
from worlds import prepared_run, reseal

from echelon import files as files_module
from echelon.data.store import Store
from echelon.errors import DamagedError, StoreError
from echelon.features import Prepared, prepare
from echelon.features import prepared as prepared_module
from echelon.files import write_json
from echelon.runs import RunDirectory
from echelon.training.run import TrainedRun
from echelon.workers import start_worker


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Path:
    """A directory with a trained run in `run`; copy it before changing anything."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("sys.argv", ["echelon"])
        from echelon.cli.app import app

        words = ["train", *tiny(bars_file), "--output-dir", "run", "--seeds", "1"]
        app(words, standalone_mode=False)
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, `run` in the present directory, with its store."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "evaluations")
    shutil.rmtree(tmp_path / "cache")
    return tmp_path / "run"


def _edit_array(name: str, edit: Callable[[np.ndarray], None]) -> Callable[[Path], None]:
    def harm(prepared: Path) -> None:
        path = prepared / f"{name}.npy"
        array = np.load(path)
        edit(array)
        np.save(path, array)

    return harm


def _edit_json(name: str, edit: Callable[[Any], None]) -> Callable[[Path], None]:
    def harm(prepared: Path) -> None:
        tree = json.loads((prepared / name).read_text(encoding="utf-8"))
        edit(tree)
        write_json(prepared / name, tree)

    return harm


def _double_close(array: np.ndarray) -> None:
    array[100, 1] *= 2.0


def _flip_member(array: np.ndarray) -> None:
    array[...] = ~array


def _swap_splits(tree: dict[str, Any]) -> None:
    tree["valid"], tree["test"] = tree["test"], tree["valid"]


def _swap_symbols(tree: dict[str, Any]) -> None:
    tree["symbols"].reverse()


def _flip_header(prepared: Path) -> None:
    path = prepared / "close.npy"
    data = bytearray(path.read_bytes())
    data[20] ^= 0x15
    path.write_bytes(bytes(data))


def _lay_pipe(prepared: Path) -> None:
    (prepared / "X.npy").unlink()
    os.mkfifo(prepared / "X.npy")


HARMS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "doubled close": ("close.npy", _edit_array("close", _double_close)),
    "flipped member": ("member.npy", _edit_array("member", _flip_member)),
    "swapped splits": ("splits.json", _edit_json("splits.json", _swap_splits)),
    "other scaler": ("scaler.json", _edit_json("scaler.json", lambda t: t["mean"].reverse())),
    "swapped symbols": ("manifest.json", _edit_json("manifest.json", _swap_symbols)),
    "other T": ("manifest.json", _edit_json("manifest.json", lambda t: t.update(T=7))),
    "one more array": (
        "limit_up.npy",
        lambda p: np.save(p / "limit_up.npy", np.ones_like(np.load(p / "close.npy"))),
    ),
    "flipped header": ("close.npy", _flip_header),
    "empty X": ("X.npy", lambda p: os.truncate(p / "X.npy", 0)),
    "X is a pipe": ("X.npy", _lay_pipe),
    "odd manifest": ("manifest.json", lambda p: write_json(p / "manifest.json", {"format": 1})),
    "empty manifest": ("manifest.json", lambda p: write_json(p / "manifest.json", {})),
    "manifest of a list": ("manifest.json", lambda p: write_json(p / "manifest.json", [1])),
    "no splits": ("splits.json", lambda p: (p / "splits.json").unlink()),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_prepared_set_is_refused_by_evaluate_and_mended_by_prepare(
    harm: str, shell: Shell, run: Path
) -> None:
    file, apply = HARMS[harm]
    apply(run / "prepared")
    code, out, err = shell("evaluate", "run")
    assert code == 5, out + err
    assert file in err
    assert "prepare --resume" in err
    assert not (run / "evaluations").exists()
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "run.json")}
    shell.works("prepare", "--resume", "run")
    assert before == {name: (run / name).read_bytes() for name in before}
    _ = TrainedRun.open(run).prepared


@pytest.mark.parametrize(
    "changes", [{"T": 7}, {"N": 2}, {"symbols": ["A", "B"]}, {"features": ["f"]}, {"W": 0}]
)
def test_manifest_that_does_not_fit_the_arrays_is_refused(
    changes: dict[str, Any], tmp_path: Path, bars_file: Path
) -> None:
    prepared_run(tmp_path / "run", bars_file)
    reseal(tmp_path / "run", **changes)
    with pytest.raises(DamagedError):
        Prepared.open(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("splits.json", lambda t: t["valid"]["rows"].reverse()),
        ("splits.json", lambda t: t["valid"].update(rows=[0, 10**9])),
        ("splits.json", lambda t: t.pop("test")),
        ("splits.json", lambda t: t["test"].update(last="2016-01-05")),
        ("scaler.json", lambda t: t["mean"].pop()),
        ("scaler.json", lambda t: t["names"].reverse()),
        ("scaler.json", lambda t: t["std"].__setitem__(0, 0.0)),
    ],
)
def test_splits_and_scaler_that_do_not_fit_are_refused(
    name: str, edit: Callable[[Any], None], tmp_path: Path, bars_file: Path
) -> None:
    run = prepared_run(tmp_path / "run", bars_file)
    _edit_json(name, edit)(run / "prepared")
    reseal(run)
    with pytest.raises(DamagedError, match=name):
        Prepared.open(run)


def test_consistent_set_is_refused_where_the_run_recorded_another(shell: Shell, run: Path) -> None:
    _edit_array("close", _double_close)(run / "prepared")
    reseal(run, record=False)
    Prepared.open(run / "prepared")  # in itself it is whole
    code, _, err = shell("evaluate", "run")
    assert code == 5
    assert "run.json" in err
    with pytest.raises(StoreError, match=r"run\.json"):
        _ = TrainedRun.open(run).prepared
    # Going on makes the set of the record again.
    shell.works("train", "--resume", "run")
    assert Prepared.open(run).manifest["content_hash"] == RunDirectory(run).trained_on()


def test_set_that_cannot_be_made_again_leaves_the_run_alone(shell: Shell, run: Path) -> None:
    facts = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", facts | {"prepared": "0" * 64})
    manifest = (run / "prepared" / "manifest.json").read_bytes()
    record = (run / "run.json").read_bytes()
    for words in (("train", "--resume", "run"), ("prepare", "--resume", "run")):
        code, _, err = shell(*words)
        assert code == 5
        assert "Train in another directory" in err
        assert (run / "prepared" / "manifest.json").read_bytes() == manifest
        assert (run / "run.json").read_bytes() == record


def test_prepare_over_a_trained_run_is_refused(shell: Shell, run: Path, bars_file: Path) -> None:
    before = (run / "config.yaml").read_bytes()
    for words in (
        (*tiny(bars_file), "--output-dir", "run"),
        (*tiny(bars_file, "window=6"), "--output-dir", "run"),
        ("--resume", "run", "-o", "window=6"),
    ):
        code, _, err = shell("prepare", *words)
        assert code == 2
        assert "holds a trained run" in err
        assert (run / "config.yaml").read_bytes() == before
    shell.works("evaluate", "run")


def test_contents_are_hashed_once_a_command(
    tmp_path: Path, bars_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared_run(tmp_path / "run", bars_file)
    other = tmp_path / "other"
    shutil.copytree(run / "prepared", other / "prepared", copy_function=os.link)
    hashed: list[Path] = []

    def count(path: Path) -> str:
        hashed.append(path)
        return "not what it was"

    monkeypatch.setattr(files_module, "sha256_file", count)
    monkeypatch.setattr(files_module, "_KNOWN", files_module.known_digests())
    Prepared.open(run)
    Prepared.open(other)  # hard links are the same files
    assert hashed == []
    _edit_array("close", _double_close)(run / "prepared")
    with pytest.raises(DamagedError, match=r"close\.npy"):
        Prepared.open(run)
    assert [path.name for path in hashed] == ["close.npy"]


def _open_in_worker(pipe: Connection, run: Path) -> None:
    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was hashed again")

    files_module.sha256_file = refuse  # type: ignore[assignment]
    try:
        pipe.send(Prepared.open(run).manifest["content_hash"])
    except AssertionError as error:
        pipe.send(str(error))


def test_worker_does_not_verify_again(tmp_path: Path, bars_file: Path) -> None:
    run = prepared_run(tmp_path / "run", bars_file)
    worker = start_worker(_open_in_worker, run)
    process, pipe = worker.process, worker.pipe
    assert pipe.poll(120)
    assert pipe.recv() == Prepared.open(run).manifest["content_hash"]
    process.join()
    pipe.close()


def test_old_set_without_a_hash_of_its_facts_is_read(tmp_path: Path, bars_file: Path) -> None:
    run = prepared_run(tmp_path / "run", bars_file)
    path = run / "prepared" / "manifest.json"
    tree = json.loads(path.read_text())
    del tree["facts_hash"]
    write_json(path, tree | {"sizes": {"X.npy": 3}})
    assert Prepared.open(run).symbols == tuple(tree["symbols"])


def _dataset(tmp_path: Path) -> Path:
    store = Store(tmp_path / "store")
    name = store.datasets()[0]
    return store.directory(name)


@pytest.fixture
def stored(tmp_path: Path, bars_file: Path) -> Path:
    """The directory of a dataset, imported by a `prepare`."""
    prepare(qtmrl_config(tmp_path, bars_file), tmp_path / "run")
    return _dataset(tmp_path)


def _version(home: Path) -> Path:
    return home / str(json.loads((home / "CURRENT.json").read_text())["version"])


def test_swapped_partition_does_not_pass_prepare(
    stored: Path, tmp_path: Path, bars_file: Path
) -> None:
    bars = _version(stored) / "bars"
    one, two = sorted(bars.iterdir())[:2]
    other = pl.read_parquet(two).with_columns(pl.col("time").dt.offset_by("-1y"))
    one.unlink()
    other.write_parquet(one)
    config = qtmrl_config(tmp_path, bars_file, "data.cache.enabled=false")
    with pytest.raises(DamagedError, match=rf"{one.name}.*not what was imported.*data import"):
        prepare(config, tmp_path / "new")
    assert not (tmp_path / "new" / "prepared").exists()


def test_swapped_table_does_not_pass_prepare(stored: Path, tmp_path: Path, bars_file: Path) -> None:
    path = _version(stored) / "symbols.parquet"
    table = pl.read_parquet(path)
    path.unlink()
    table.with_columns(pl.col("symbol").reverse()).write_parquet(path)
    with pytest.raises(DamagedError, match=r"symbols\.parquet.*not what was imported"):
        prepare(qtmrl_config(tmp_path, bars_file, "data.cache.enabled=false"), tmp_path / "new")


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.update(version="../../elsewhere"),
        lambda t: t.update(version="v-0123456789abcdef/../.."),
        lambda t: t["partitions"][0].update(key="../../x"),
        lambda t: t["partitions"][0].update(key="2015\x00"),
        lambda t: t["partitions"][0].update(digest="0" * 64),
        lambda t: t["partitions"][0].update(rows="many"),
        lambda t: t.update(partitions=[]),
        lambda t: t.update(partitions=7),
        lambda t: t["tables"].update({"../x": "0"}),
        lambda t: t.update(tables=None),
        lambda t: t["info"].update(freq="2h"),
        lambda t: t.update(info=[]),
        lambda t: t.update(name="other"),
        lambda t: t.update(content_hash="0" * 64),
    ],
)
def test_odd_manifest_of_a_dataset_is_refused(
    edit: Callable[[Any], None], stored: Path, tmp_path: Path
) -> None:
    _edit_json("CURRENT.json", edit)(stored)
    with pytest.raises(DamagedError, match=r"CURRENT\.json.*data import"):
        Store(tmp_path / "store").manifest(stored.name)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "7", '{"format": 1}', "\x00"])
def test_senseless_manifest_of_a_dataset_is_refused(
    text: str, stored: Path, tmp_path: Path
) -> None:
    (stored / "CURRENT.json").write_text(text)
    with pytest.raises(DamagedError, match=r"CURRENT\.json"):
        Store(tmp_path / "store").manifest(stored.name)


def test_partition_facts_that_its_file_denies_are_refused(stored: Path, tmp_path: Path) -> None:
    def forget(tree: Any) -> None:
        tree["partitions"][0]["last"] = tree["partitions"][0]["first"]

    _edit_json("CURRENT.json", forget)(stored)
    store = Store(tmp_path / "store")
    with pytest.raises(DamagedError, match="not what was imported"):
        store.read_bars(stored.name, store.partitions(stored.name)[0])


def test_damaged_bytes_of_a_partition_are_one_of_our_errors(stored: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    key = store.partitions(stored.name)[0]
    path = _version(stored) / "bars" / f"{key}.parquet"
    whole = path.read_bytes()
    draw = np.random.default_rng(5)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for k in draw.integers(len(data), size=3):
            data[k] ^= int(draw.integers(1, 256))
        path.unlink()
        path.write_bytes(bytes(data))
        try:
            store.read_bars(stored.name, key)
        except DamagedError:
            refused += 1
    assert refused > 100  # the rest hit bytes that hold nothing


def test_every_manifest_key_is_typed(tmp_path: Path, bars_file: Path) -> None:
    run = prepared_run(tmp_path / "run", bars_file)
    tree = json.loads((run / "prepared" / "manifest.json").read_text())
    assert set(tree) == set(prepared_module.PreparedManifest.__annotations__)


def test_run_that_does_not_say_what_it_was_trained_on_is_warned_about_once(
    shell: Shell, run: Path
) -> None:
    _, err = shell.works("evaluate", "run", "--split", "valid")
    assert "does not say which prepared set" not in err
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    del facts["prepared"]
    write_json(run / "run.json", facts)
    _, err = shell.works("evaluate", "run", "--split", "valid")
    assert err.count("does not say which prepared set") == 1
    assert "run.json" in err
