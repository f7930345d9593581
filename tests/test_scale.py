"""Work on Ray clusters: the numbers of local processes, whoever dies, and clear errors."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon import cluster as scale
from echelon.cli.options import with_engine
from echelon.config import fingerprint, load_config, to_yaml
from echelon.errors import DataError, TrainingError, UsageError
from echelon.workers import Failure, Pool, Report, ShouldStop, run_jobs
from reliability._clusters import Nodes, bare_world, cluster, results, run
from reliability._commands import COMMANDS, shrink_proof

HIERARCHY = (
    *("train", "-c", "hierarchy.yaml", "-o", "experts.n_experts=4"),
    *("-o", "train.total_env_steps=640", "-o", "train.validate_every_steps=320"),
    *("-o", "train.checkpoint_every_steps=128", "--output-dir", "runs/a"),
)
WALK = ("walk-forward", "-c", "walk.yaml", "--output-dir", "runs/a")
PROVE = tuple({"runs/prove": "runs/a", "1": "2"}.get(word, word) for word in COMMANDS["prove"].argv)
NOT_ON_CLUSTERS = ("config.yaml", "run.json", "summary.json")
"""Files that have the hash of a configuration, of which trainer.workers is a part."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_world(tmp_path_factory.mktemp("scale") / "bare")


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    with cluster(1, 2, 2) as nodes:
        yield nodes
        assert nodes.left() == []


@pytest.fixture(scope="module", params=[(4,), (1, 2, 2)], ids=["one node", "three nodes"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with cluster(*request.param) as own:
        yield own
        assert own.left() == []


class Worlds:
    """Runs commands in copies of the bare world; the local results of each, made once."""

    def __init__(self, bare: Path, place: Path) -> None:
        self._bare, self._place = bare, place
        self._known: dict[tuple[str, ...], dict[str, str]] = {}
        self._number = 0

    def done(self, argv: tuple[str, ...], *more: str) -> dict[str, str]:
        self._number += 1
        directory = self._place / str(self._number)
        shutil.copytree(self._bare, directory)
        run(directory, *argv, *more)
        return results(directory, NOT_ON_CLUSTERS)

    def local(self, argv: tuple[str, ...]) -> dict[str, str]:
        if argv not in self._known:
            self._known[argv] = self.done(argv)
        return self._known[argv]


@pytest.fixture(scope="module")
def worlds(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(bare, tmp_path_factory.mktemp("worlds"))


class Walker:
    """A member that adds up what it is given, and an array that all share."""

    def __init__(self, shared: Any, number: int) -> None:
        self.shared, self.number, self.total = shared, number, 0.0

    def walk(self, step: float) -> float:
        self.total += step * self.number + float(self.shared[-1])
        return self.total

    def writes(self) -> bool:
        return bool(self.shared.flags.writeable)

    def vanish(self) -> None:
        os._exit(1)


def odd_job(job: str, report: Report, _should_stop: ShouldStop) -> str:
    report(f"begun {job}")
    match job:
        case "data":
            raise DataError("planted in the data")
        case "bug":
            raise ZeroDivisionError("planted")
        case "killed":
            os._exit(1)
    return job.upper()


@pytest.mark.services
def test_pools_and_jobs_behave_as_with_processes_and_nothing_listens_beyond_loopback(
    three: Nodes,
) -> None:
    shared = scale.freeze(np.arange(20_000.0))
    seen: dict[int, object] = {}
    with scale.ray_engine(three.address, 1, 300_000_000) as engine:
        assert engine.room() == 5
        with Pool(partial(Walker, shared), size=4, workers=3) as pool:
            assert pool.away
            first = pool.call(Walker.walk, range(4), 2.0)
            assert first == {k: 19_999.0 + 2.0 * k for k in range(4)}
            assert not any(pool.call(Walker.writes, range(4)).values())
            lost = pool.call(Walker.vanish, [1])[1]
            assert isinstance(lost, Failure)
            assert lost.lost
            assert pool.rebuild(1) == [1]
            assert pool.call(Walker.walk, [0, 1], 1.0) == {0: 2 * 19_999.0, 1: 20_000.0}
        jobs = ["one", "data", "bug", "killed", "two"]
        done = run_jobs(odd_job, jobs, workers=2, on_report=seen.__setitem__)
        assert _listening_beyond_loopback() == []
    one, data, bug, killed, two = done.results
    assert (one, two) == ("ONE", "TWO")
    errors = [result.error for result in (data, bug, killed) if isinstance(result, Failure)]
    assert [type(error) for error in errors] == [DataError, RuntimeError, TrainingError]
    assert "ZeroDivisionError: planted" in str(errors[1])
    assert "ended unexpectedly" in str(errors[2])
    assert seen[4] == "begun two"


def _listening_beyond_loopback() -> list[str]:
    """Sockets of Ray's processes, and of this one, that others than this machine could reach."""
    ours = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
            if b"ray" not in words and int(place.name) != os.getpid():
                continue
            for handle in (place / "fd").iterdir():
                link = str(handle.readlink())
                if link.startswith("socket:["):
                    ours.add(link[8:-1])
        except OSError:
            continue
    loopback = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
    beyond = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words_ = line.split()
            if words_[3] == "0A" and words_[9] in ours and words_[1].split(":")[0] not in loopback:
                beyond.append(line)
    return beyond


@pytest.mark.services
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_hierarchy_is_the_same_on_any_number_of_actors_and_nodes(
    nodes: Nodes, worlds: Worlds, workers: int
) -> None:
    argv = (*HIERARCHY, "-o", f"trainer.workers={workers}")
    assert worlds.done(argv, "--on", f"ray:{nodes.address}") == worlds.local(HIERARCHY)


@pytest.mark.services
@pytest.mark.timeout(900)
def test_thirty_two_members_in_eight_niches_are_the_same_by_four_actors(
    three: Nodes, worlds: Worlds
) -> None:
    argv = (
        *("train", "-c", "hierarchy.yaml", "-o", "experts.n_experts=8"),
        *("-o", "trainer.evolution.members_per_niche=4", "--output-dir", "runs/a"),
        *("-o", "experts.sharing.buffer_size=12800", "-o", "train.total_env_steps=2560"),
        *("-o", "train.validate_every_steps=1280", "-o", "train.checkpoint_every_steps=1280"),
    )
    by_four = worlds.done((*argv, "-o", "trainer.workers=4"), "--on", f"ray:{three.address}")
    assert by_four == worlds.local(argv)


@pytest.mark.services
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "argv",
    [
        ("train", "-c", "flat.yaml", "--seeds", "2", "--output-dir", "runs/a"),
        ("train", "-c", "expert.yaml", "--seeds", "2", "--output-dir", "runs/a"),
        WALK,
        PROVE,
        ("execution", "train", "-c", "execution.yaml", "--output-dir", "runs/a"),
    ],
    ids=["flat", "expert", "walk-forward", "prove", "execution"],
)
def test_other_work_is_the_same_on_three_nodes(
    three: Nodes, worlds: Worlds, argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from echelon.proving import prove

    monkeypatch.setattr(prove, "QUICK", prove.QUICK)
    shrink_proof()
    assert worlds.done(argv, "--on", f"ray:{three.address}") == worlds.local(argv)


@pytest.mark.services
@pytest.mark.timeout(600)
def test_hierarchy_is_the_same_by_two_processes(worlds: Worlds) -> None:
    assert worlds.done((*HIERARCHY, "-o", "trainer.workers=2")) == worlds.local(HIERARCHY)


def look_around(job: str, _report: Report, _should_stop: ShouldStop) -> bool:
    """Whether what is named is below the directory that a worker is in."""
    return Path(job).exists()


@pytest.mark.services
def test_actors_are_where_the_data_are_not(
    three: Nodes, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what they do in the other tests, they do with what was sent to them."""
    monkeypatch.chdir(bare)
    names = ["bars.csv", "store", "flat.yaml"]
    assert all(Path(name).exists() for name in names)
    with scale.ray_engine(three.address, 1, 300_000_000):
        assert run_jobs(look_around, names, workers=2).all_or_raise() == [False] * 3


@pytest.mark.services
@pytest.mark.timeout(600)
def test_actor_out_of_memory_is_an_error_that_says_so_and_can_be_gone_on_with(
    bare: Path, worlds: Worlds, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(bare, tmp_path / "full"))
    argv = ("train", "-c", "flat.yaml", "--seeds", "2", "--output-dir", "runs/a")
    with (
        cluster(2, RAY_memory_usage_threshold="0.001", RAY_memory_monitor_refresh_ms="100") as full,
        pytest.raises(TrainingError, match=r"seed \d+: .*out of memory; ") as caught,
    ):
        run(place, *argv, "--on", f"ray:{full.address}")
    assert "Go on with --resume, with fewer --workers" in str(caught.value)
    assert str(caught.value).count("seed 42") == 1
    run(place, "train", "--resume", "runs/a")
    assert results(place, NOT_ON_CLUSTERS) == worlds.local(argv)


@pytest.mark.services
@pytest.mark.timeout(600)
def test_work_is_the_same_over_tls_and_a_driver_without_it_is_refused(
    bare: Path, worlds: Worlds, tmp_path: Path
) -> None:
    """In processes of their own: Ray reads its variables once."""
    from ray._common.tls_utils import generate_self_signed_tls_certs

    place = Path(shutil.copytree(bare, tmp_path / "tls"))
    argv = ("train", "-c", "flat.yaml", "--seeds", "2", "--output-dir", "runs/a")
    files = dict(zip(("CERT", "KEY"), generate_self_signed_tls_certs(), strict=True))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    secure = {f"RAY_TLS_SERVER_{name}": str(tmp_path / name) for name in files}
    secure |= {"RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": str(tmp_path / "CERT")}
    script = (
        "import subprocess, sys\n"
        "from reliability._clusters import cluster\n"
        "words = [sys.executable, '-m', 'echelon', *sys.argv[1:], '--on']\n"
        "plain = {k: v for k, v in __import__('os').environ.items() if k != 'RAY_USE_TLS'}\n"
        "with cluster(2) as nodes:\n"
        "    where = f'ray:{nodes.address}'\n"
        "    refused = subprocess.run([*words, where], env=plain, capture_output=True, text=True)\n"
        "    subprocess.run([*words, where], check=True)\n"
        "print(refused.returncode, refused.stderr)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        cwd=place,
        env=os.environ | secure | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused = done.stdout.splitlines()[-8:]
    assert any(line.startswith("2 ") for line in refused)
    assert "RAY_USE_TLS" in " ".join(refused)
    assert results(place, NOT_ON_CLUSTERS) == worlds.local(argv)


@pytest.mark.services
@pytest.mark.timeout(600)
def test_nodes_that_die_change_nothing(three: Nodes, worlds: Worlds) -> None:
    rng = random.Random(7)
    for argv, moments in (
        ((*HIERARCHY, "-o", "trainer.workers=4"), [4.0, 14.0]),
        (WALK, [3.0]),
    ):
        with three.losing(moments, rng):
            found = worlds.done(argv, "--on", f"ray:{three.address}")
        assert found == worlds.local(HIERARCHY if argv[0] == "train" else WALK)


@pytest.mark.services
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ending", "seconds"),
    [(signal.SIGKILL, 3.0), (signal.SIGKILL, 9.0), (signal.SIGINT, 9.0)],
    ids=["killed-early", "killed", "stopped"],
)
def test_driver_that_ends_leaves_no_actor_and_is_gone_on_with(
    three: Nodes,
    bare: Path,
    worlds: Worlds,
    tmp_path: Path,
    ending: signal.Signals,
    seconds: float,
) -> None:
    place, on = tmp_path / "killed", ("--on", f"ray:{three.address}")
    shutil.copytree(bare, place)
    argv = ("train", "-c", "flat.yaml", "--seeds", "2", "--output-dir", "runs/a")
    words = (sys.executable, "-m", "echelon", *argv, *on)
    process = subprocess.Popen(words, cwd=place, stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    process.send_signal(ending)
    assert process.wait() in (-ending, 0, 128 + ending)  # 0: it was faster
    again = ("train", "--resume", "runs/a") if (place / "runs/a/config.yaml").exists() else argv
    run(place, *again, *on)
    assert results(place, NOT_ON_CLUSTERS) == worlds.local(argv)
    assert three.left() == []


@pytest.mark.services
def test_what_an_actor_asks_for_must_fit_on_a_node(three: Nodes) -> None:
    engine = scale.ray_engine(three.address, 1, 10**15)
    with pytest.raises(UsageError, match=r"an actor reserves 1000000\.0 GB") as caught, engine:
        pass
    assert "compute.memory_gb" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "nobody answers there"),
        ("ray://10.0.0.1:10001", "Ray's client is not supported"),
        ("nonsense", "expected HOST:PORT, auto or local"),
    ],
)
def test_address_that_is_no_good_is_refused_at_once(address: str, words: str) -> None:
    with pytest.raises(UsageError, match=words), scale.ray_engine(address, 1, 0):
        pass


@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x01\x00\x02\x02\x46", b"HTTP/1.1 400"])
def test_address_where_something_else_listens_is_refused_at_once(answer: bytes) -> None:
    """It hangs up, as a cluster with TLS does; it says why; it is a web server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hear() -> None:
            connection, _ = listening.accept()
            with connection:
                assert connection.recv(100).startswith(b"PRI * HTTP/2.0")
                connection.sendall(answer)

        thread = threading.Thread(target=hear)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with (
            pytest.raises(UsageError, match="no head of a Ray cluster answers there, or one with"),
            scale.ray_engine(address, 1, 0),
        ):
            pass
        thread.join()


@pytest.mark.parametrize(
    "argv",
    [
        ("train", "-c", "flat.yaml", "--output-dir", "runs/a"),
        WALK,
        PROVE,
        ("tune", "-c", "flat.yaml", "--ranges", "ranges.yaml", "--output-dir", "runs/a"),
        ("execution", "train", "-c", "execution.yaml", "--output-dir", "runs/a"),
        ("execution", "prove", "--output-dir", "runs/a"),
    ],
    ids=["train", "walk-forward", "prove", "tune", "execution", "execution-prove"],
)
def test_command_whose_cluster_is_not_there_writes_nothing(
    bare: Path, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    place = Path(shutil.copytree(bare, tmp_path / "w"))
    (place / "ranges.yaml").write_text("train.gamma: [0.5, 0.9]\n")
    with pytest.raises(UsageError, match=r"--on ray:127\.0\.0\.1:1: nobody answers there"):
        run(place, *argv, "--on", "ray:127.0.0.1:1")
    runs = {str(p.relative_to(place)) for p in place.glob("runs/**/*") if p.is_file()}
    assert runs <= {"runs/registry/trials.json", "runs/registry/reads.json"}


def test_certificates_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(UsageError, match="No such file or directory"),
        scale.ray_engine(f"127.0.0.1:{listening.getsockname()[1]}", 1, 0),
    ):
        pass


def test_worker_with_another_lock_is_refused_and_another_processor_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, mine = scale.RayEngine(1, 0), scale.own_facts()
    engine.check(mine._replace(where="elsewhere"))
    assert not caplog.records
    engine.check(mine._replace(where="elsewhere", processor="another"))
    assert "may differ" in caplog.text
    other = mine._replace(where="elsewhere", versions=mine.versions | {"torch": "1.0"})
    with pytest.raises(UsageError, match=r"elsewhere has torch 1\.0, this machine"):
        engine.check(other)


def test_where_work_is_done_is_in_no_hash_and_in_no_run_directory() -> None:
    plain = load_config(None, [])
    away = load_config(None, with_engine(None, "ray:10.0.0.1:6379"))
    assert (away.compute.engine, away.compute.address) == ("ray", "10.0.0.1:6379")
    assert fingerprint(away) == fingerprint(plain)
    assert to_yaml(away) == to_yaml(plain)
    assert "compute" not in to_yaml(away)
    for word in ("spark", "local:1"):
        with pytest.raises(UsageError, match="expected ray"):
            with_engine(None, word)


def test_nothing_of_ray_is_imported_without_it_and_its_lack_names_the_extra(
    tmp_path: Path,
) -> None:
    hidden = (
        "import sys\n"
        "sys.modules['ray'] = sys.modules['optuna'] = None\n"
        "import echelon.cli, echelon.population.learner, echelon.proving.parts\n"
        "from echelon.__main__ import main\n"
        "main()\n"
    )
    for argv in (("train", "--on", "ray:local"), ("tune",)):
        done = subprocess.run(
            [sys.executable, "-c", hidden, *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "extra 'scale'" in done.stderr


def test_changes_of_a_jobs_files_arrive_whole(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for name, text in (("seeds/1/log", "a"), ("seeds/1/step-1/x", "1"), ("seeds/1/.lock", "")):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(text)
    trees = ("encoder", "seeds/1")
    scale.write_changes(here, scale.Files(scale.read_trees(there, trees), {}, ()))
    assert not (here / "seeds/1/.lock").exists()
    watch = scale.TreeWatch(there, trees)
    assert watch.changes(force=True) is None
    (there / "seeds/1/log").write_text("ab")
    assert watch.changes(force=False) is None  # waits for a checkpoint
    shutil.rmtree(there / "seeds/1/step-1")
    for name in ("seeds/1/step-2/x", "seeds/1/step-2/y", "encoder/w"):
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text("2")
    changes = watch.changes(force=False)
    assert changes is not None
    assert set(changes.files) == {"seeds/1/log"}
    assert set(changes.folders) == {"seeds/1/step-2", "encoder"}
    assert changes.gone == ("seeds/1/step-1",)
    scale.write_changes(here, changes)
    texts = {str(p.relative_to(here)): p.read_text() for p in here.rglob("*") if p.is_file()}
    assert texts == {
        **{"seeds/1/log": "ab", "encoder/w": "2"},
        **{"seeds/1/step-2/x": "2", "seeds/1/step-2/y": "2"},
    }
